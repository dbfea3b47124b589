//! Sizes of slots and chunks.

use std::ops::Range;

/// Number of slots of each size: enough for copies of both sides while others wait to be begun.
const SLOTS_OF_SIZE: usize = 8;
/// Number of slots of a session.
pub(super) const SLOTS: usize = 2 * SLOTS_OF_SIZE;
/// Long enough that the microseconds between two copies of a device do not matter.
const LARGE_SLOT: u64 = 4 << 20;
/// The longest transfer that uses small slots.
const SMALL_SLOT: u64 = 256 << 10;
/// Bytes of all slots.
pub(super) const SLOT_BYTES: u64 = SLOTS_OF_SIZE as u64 * (LARGE_SLOT + SMALL_SLOT);
/// Maximum of ranges of the remote region in one chunk.
pub(super) const MAX_RANGES: usize = 1024;
/// The longest chunk if a CPU copies at one end: the other end finds it in a cache.
const MAX_CPU_CHUNK: u64 = 1 << 20;
/// Shorter chunks take longer for the steps around their copies than for the copies.
const MIN_CHUNK: u64 = 256 << 10;

/// The size of a slot. Small transfers do not wait for the chunks of large ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum SlotSize {
    /// For transfers of one small chunk.
    Small,
    /// For all others.
    Large,
}

impl SlotSize {
    /// Both sizes: small transfers are served first.
    pub(super) const ALL: [Self; 2] = [Self::Small, Self::Large];

    /// The size of the slots for a transfer.
    pub(super) fn for_transfer(bytes: u64) -> Self {
        if bytes <= SMALL_SLOT { Self::Small } else { Self::Large }
    }

    /// The size of a slot.
    pub(super) fn of_slot(slot: usize) -> Self {
        if slot < SLOTS_OF_SIZE { Self::Large } else { Self::Small }
    }

    /// The slots of this size.
    pub(super) fn slots(self) -> Range<usize> {
        match self {
            Self::Large => 0..SLOTS_OF_SIZE,
            Self::Small => SLOTS_OF_SIZE..SLOTS,
        }
    }

    /// Length of a slot in bytes.
    pub(super) fn length(self) -> u64 {
        match self {
            Self::Large => LARGE_SLOT,
            Self::Small => SMALL_SLOT,
        }
    }
}

/// Where a slot begins in the memory of all slots.
pub(super) fn slot_start(slot: usize) -> u64 {
    let (large, all) = (slot.min(SLOTS_OF_SIZE) as u64, slot as u64);
    large * LARGE_SLOT + (all - large) * SMALL_SLOT
}

/// Length of the chunks of a transfer. The second copy of the last chunk has no copy beside it, and
/// each chunk costs some microseconds: the best length grows with the square root of the bytes.
pub(super) fn chunk_length(bytes: u64, by_cpu: bool) -> u64 {
    let longest = if by_cpu { MAX_CPU_CHUNK } else { LARGE_SLOT };
    let root = 1 << ((bytes.max(1).ilog2() + 16) / 2);
    u64::clamp(root, MIN_CHUNK, longest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_follow_each_other_and_fill_the_memory() {
        let mut end = 0;
        for slot in 0..SLOTS {
            assert_eq!(slot_start(slot), end);
            let size = SlotSize::of_slot(slot);
            assert!(size.slots().contains(&slot));
            end += size.length();
        }
        assert_eq!(end, SLOT_BYTES);
    }

    #[test]
    fn chunks_grow_with_the_transfer_and_fit_into_slots() {
        for (bytes, by_cpu, expected) in [
            (1, false, 256 << 10),
            (1 << 20, false, 256 << 10),
            (64 << 20, false, 2 << 20),
            (1 << 30, false, 4 << 20),
            (u64::MAX, false, 4 << 20),
            (1 << 30, true, 1 << 20),
        ] {
            assert_eq!(chunk_length(bytes, by_cpu), expected, "{bytes}");
        }
    }
}
