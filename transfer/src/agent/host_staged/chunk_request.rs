//! Checks of a request by the target, before it copies a byte.

use gpu::Block;

use super::slot_layout::{MAX_RANGES, SlotSize, slot_start};
use super::staging_segment::UncheckedRequest;
use crate::error::ErrorKind;
use crate::path::Operation;
use crate::refusal::Refusal;
use crate::region::{RegionDescriptor, Rights};

/// A request within the bounds and rights of its region.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct CheckedRequest {
    operation: Operation,
    bytes: u64,
    /// Between the region and the memory of all slots.
    blocks: Vec<Block>,
}

impl CheckedRequest {
    /// Checks a request in a slot against the region that it names.
    pub(super) fn new(
        request: &UncheckedRequest,
        slot: usize,
        region: &RegionDescriptor,
    ) -> Result<Self, Refusal> {
        Self::within(request, slot, region.length, region.rights)
    }

    fn within(
        request: &UncheckedRequest,
        slot: usize,
        length: u64,
        rights: Rights,
    ) -> Result<Self, Refusal> {
        let malformed = |cause: String| Refusal::new(ErrorKind::Malformed, cause);
        let operation = request.operation();
        let operation = operation.ok_or_else(|| malformed("unknown operation".to_owned()))?;
        if !rights.permit(operation) {
            let cause = "the region's rights do not allow it";
            return Err(Refusal::new(ErrorKind::NotAllowed, cause));
        }
        let ranges = request.ranges();
        if ranges.is_empty() || ranges.len() > MAX_RANGES {
            return Err(malformed(format!("a chunk of {} ranges", ranges.len())));
        }
        let longest = SlotSize::of_slot(slot).length();
        let mut bytes = 0_u64;
        let mut blocks = Vec::with_capacity(ranges.len());
        for range in ranges {
            let (offset, part) = (range.offset(), range.length());
            if offset.checked_add(part).is_none_or(|end| end > length) {
                let cause = format!("{part} bytes at offset {offset} of a region of {length}");
                return Err(Refusal::new(ErrorKind::OutOfBounds, cause));
            }
            let at = slot_start(slot) + bytes;
            bytes = bytes.saturating_add(part);
            if part == 0 || bytes > longest {
                return Err(malformed(format!("{bytes} bytes in a slot of {longest}")));
            }
            blocks.push(match operation {
                Operation::Put => Block { to: offset, from: at, length: part },
                Operation::Get => Block { to: at, from: offset, length: part },
            });
        }
        Ok(Self { operation, bytes, blocks })
    }

    pub(super) fn operation(&self) -> Operation {
        self.operation
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn blocks(&self) -> &[Block] {
        &self.blocks
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::slot_layout::{SLOT_BYTES, SLOTS};
    use super::super::staging_segment::RegionRange;
    use super::*;

    const LENGTH: u64 = 1 << 20;

    fn check(
        operation: u64,
        ranges: &[RegionRange],
        slot: usize,
        rights: Rights,
    ) -> Result<CheckedRequest, ErrorKind> {
        let request = UncheckedRequest::of_test(operation, ranges.to_vec());
        CheckedRequest::within(&request, slot, LENGTH, rights).map_err(|refusal| refusal.kind)
    }

    #[test]
    fn request_beyond_bounds_or_rights_is_refused() {
        let range = RegionRange::new;
        let all = |operation, ranges: &[RegionRange]| check(operation, ranges, 0, Rights::ALL);
        let checked = all(1, &[range(5, 10), range(100, 1)]).unwrap();
        assert_eq!(checked.bytes(), 11);
        let second = Block { to: 100, from: 10, length: 1 };
        assert_eq!(checked.blocks(), [Block { to: 5, from: 0, length: 10 }, second]);
        for outside in [range(LENGTH, 1), range(0, LENGTH + 1), range(u64::MAX, 2), range(9, !0)] {
            assert_eq!(all(1, &[range(0, 1), outside]), Err(ErrorKind::OutOfBounds));
        }
        for operation in [0, 3, u64::MAX] {
            assert_eq!(all(operation, &[range(0, 1)]), Err(ErrorKind::Malformed));
        }
        assert_eq!(all(1, &[]), Err(ErrorKind::Malformed));
        assert_eq!(all(1, &[range(0, 0)]), Err(ErrorKind::Malformed));
        assert_eq!(all(2, &vec![range(0, 1); MAX_RANGES + 1]), Err(ErrorKind::Malformed));
        // Longer than a slot, together.
        let parts = vec![range(0, LENGTH); 5];
        assert_eq!(all(2, &parts), Err(ErrorKind::Malformed));
        assert!(all(2, &parts[..4]).is_ok());
        assert_eq!(check(2, &parts[..1], SLOTS - 1, Rights::ALL), Err(ErrorKind::Malformed));
        let one = [range(0, 1)];
        assert_eq!(check(1, &one, 0, Rights::READ), Err(ErrorKind::NotAllowed));
        assert_eq!(check(2, &one, 0, Rights::WRITE), Err(ErrorKind::NotAllowed));
    }

    proptest! {
        #[test]
        fn accepted_requests_stay_within_region_and_slot(
            operation in 0..4_u64,
            slot in 0..SLOTS,
            ranges in proptest::collection::vec((any::<u64>(), any::<u64>(), 0..70_u32), 0..6),
        ) {
            let range = |(offset, length, shift): (u64, u64, u32)| {
                let shifted = |value: u64| value.checked_shr(shift).unwrap_or(0);
                RegionRange::new(shifted(offset), shifted(length))
            };
            let ranges: Vec<_> = ranges.into_iter().map(range).collect();
            let Ok(checked) = check(operation, &ranges, slot, Rights::ALL) else { return Ok(()) };
            let start = slot_start(slot);
            let end = start + SlotSize::of_slot(slot).length();
            prop_assert!(end <= SLOT_BYTES);
            for block in checked.blocks() {
                let (region, slots) = match checked.operation() {
                    Operation::Put => (block.to, block.from),
                    Operation::Get => (block.from, block.to),
                };
                prop_assert!(region + block.length <= LENGTH);
                prop_assert!(slots >= start && slots + block.length <= end);
            }
        }
    }
}
