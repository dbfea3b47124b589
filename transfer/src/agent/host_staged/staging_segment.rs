//! Shared memory of a host-staged session: a request and an answer for each slot, and the slots.
//!
//! ```text
//! word 0   number of requests that the initiator has posted
//! then for each slot:
//! word 0   sequence number of its request, written after words 1 to 3 and the ranges
//! word 1   1 put, 2 get
//! word 2   number of the region
//! word 3   number of ranges of the region
//! word 8   sequence number of the request that is answered
//! word 9   bytes of the refusal, or 0 for success
//! word 16  ranges: an offset and a length each; in an answer, the refusal
//! ```
//!
//! The target creates it, and it ends with the connection. Either side may write anything anywhere:
//! what is read is copied out, and then checked.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use control::codec;
use ipc::{Doorbell, Layout, MappedWords, Segment, Words};

use super::slot_layout::{MAX_RANGES, SLOT_BYTES, SLOTS};
use crate::error::{ErrorKind, Result, failed};
use crate::host_buffer::HostBuffer;
use crate::path::Operation;
use crate::refusal::Refusal;
use crate::wire::malformed;

const LAYOUT: Layout = Layout::new("agent staging", 1);
const DOORBELL_LAYOUT: Layout = Layout::new("staging doorbell", 1);
const POSTED_WORD: usize = 0;
const HEAD_WORDS: usize = 8;
const REQUEST_WORD: usize = 0;
const OPERATION_WORD: usize = 1;
const REGION_WORD: usize = 2;
const COUNT_WORD: usize = 3;
const ANSWER_WORD: usize = 8;
const REFUSAL_WORD: usize = 9;
const RANGES_WORD: usize = 16;
const SLOT_WORDS: usize = RANGES_WORD + 2 * MAX_RANGES;
const WORDS: usize = HEAD_WORDS + SLOTS * SLOT_WORDS;
const WORD: usize = size_of::<u64>();
const PUT: u64 = 1;
const GET: u64 = 2;
const REFUSAL_VERSION: u8 = 1;
const MAX_REFUSAL: usize = 1024;

/// The doorbell of a target's thread, which all its initiators ring.
#[derive(Debug)]
pub(super) struct StagingDoorbell {
    segment: Segment,
    doorbell: Doorbell<MappedWords>,
}

impl StagingDoorbell {
    pub(super) fn create() -> Result<Self> {
        let operation = "create staging doorbell";
        let length = Doorbell::<MappedWords>::WORDS * WORD;
        let segment = Segment::create(DOORBELL_LAYOUT, length).map_err(failed(operation))?;
        segment.mark_ready();
        let doorbell = Doorbell::new(segment.words());
        let doorbell = doorbell.ok_or("the segment is too short").map_err(failed(operation))?;
        Ok(Self { segment, doorbell })
    }

    pub(super) fn doorbell(&self) -> &Doorbell<MappedWords> {
        &self.doorbell
    }

    pub(super) fn export(&self) -> Result<OwnedFd> {
        let file = self.segment.as_fd().try_clone_to_owned();
        file.map_err(failed("export staging doorbell"))
    }
}

/// Maps the doorbell of a target.
pub(super) fn open_doorbell(file: OwnedFd) -> Result<Doorbell<MappedWords>> {
    let wrong = |cause: String| malformed("map staging doorbell", cause);
    let segment = Segment::open(file, DOORBELL_LAYOUT);
    let words = segment.map_err(|error| wrong(error.to_string()))?.words();
    Doorbell::new(words).ok_or_else(|| wrong("the segment is too short".to_owned()))
}

/// A part of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RegionRange {
    offset: u64,
    length: u64,
}

impl RegionRange {
    pub(super) fn new(offset: u64, length: u64) -> Self {
        Self { offset, length }
    }

    pub(super) fn offset(self) -> u64 {
        self.offset
    }

    pub(super) fn length(self) -> u64 {
        self.length
    }

    /// Appends a range that begins where this one ends.
    pub(super) fn extend(&mut self, offset: u64, length: u64) -> bool {
        let is_next = self.offset.checked_add(self.length) == Some(offset);
        if is_next {
            self.length += length;
        }
        is_next
    }
}

/// A request as it was found in shared memory: nothing of it is checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct UncheckedRequest {
    sequence: u64,
    operation: u64,
    region: u64,
    ranges: Vec<RegionRange>,
}

impl UncheckedRequest {
    pub(super) fn sequence(&self) -> u64 {
        self.sequence
    }

    pub(super) fn operation(&self) -> Option<Operation> {
        match self.operation {
            PUT => Some(Operation::Put),
            GET => Some(Operation::Get),
            _ => None,
        }
    }

    pub(super) fn region(&self) -> u64 {
        self.region
    }

    pub(super) fn ranges(&self) -> &[RegionRange] {
        &self.ranges
    }

    #[cfg(test)]
    pub(super) fn of_test(operation: u64, ranges: Vec<RegionRange>) -> Self {
        Self { sequence: 1, operation, region: 1, ranges }
    }
}

/// The shared memory, on either side.
#[derive(Debug)]
pub(super) struct StagingSegment {
    control: Segment,
    words: MappedWords,
    slots: HostBuffer,
}

impl StagingSegment {
    pub(super) fn create() -> Result<Self> {
        let control = Segment::create(LAYOUT, WORDS * WORD);
        let control = control.map_err(failed("create staging memory"))?;
        control.mark_ready();
        Ok(Self { words: control.words(), control, slots: HostBuffer::new(SLOT_BYTES)? })
    }

    /// Maps the memory that a peer created.
    pub(super) fn open(control: OwnedFd, slots: OwnedFd) -> Result<Self> {
        let operation = "map staging memory";
        let control = Segment::open(control, LAYOUT);
        let control = control.map_err(|error| malformed(operation, error.to_string()))?;
        if control.body_length() < WORDS * WORD {
            return Err(malformed(operation, "the segment is too short"));
        }
        let slots = HostBuffer::open(slots, SLOT_BYTES, true)?;
        Ok(Self { words: control.words(), control, slots })
    }

    /// The descriptors for [`open`](Self::open).
    pub(super) fn export(&self) -> Result<[OwnedFd; 2]> {
        let control = self.control.as_fd().try_clone_to_owned();
        Ok([control.map_err(failed("export staging memory"))?, self.slots.export(true)?])
    }

    /// The memory of all slots.
    pub(super) fn slots(&self) -> &HostBuffer {
        &self.slots
    }

    fn word_of(slot: usize) -> usize {
        HEAD_WORDS + slot * SLOT_WORDS
    }

    /// Posts a request, after its bytes if it is a put.
    pub(super) fn post(
        &self,
        slot: usize,
        sequence: u64,
        operation: Operation,
        region: u64,
        ranges: &[RegionRange],
    ) {
        let at = Self::word_of(slot);
        let operation = match operation {
            Operation::Put => PUT,
            Operation::Get => GET,
        };
        for (range, at) in ranges.iter().zip((at + RANGES_WORD..).step_by(2)) {
            self.words.store(at, range.offset, Relaxed);
            self.words.store(at + 1, range.length, Relaxed);
        }
        self.words.store(at + OPERATION_WORD, operation, Relaxed);
        self.words.store(at + REGION_WORD, region, Relaxed);
        self.words.store(at + COUNT_WORD, ranges.len() as u64, Relaxed);
        self.words.store(at + REQUEST_WORD, sequence, Release);
        let posted = self.words.load(POSTED_WORD, Relaxed);
        self.words.store(POSTED_WORD, posted.wrapping_add(1), Release);
    }

    /// Writes some of the words in which a target reads requests.
    #[cfg(test)]
    pub(super) fn write_garbage(&self, slot: u64, word: u64, value: u64) {
        let at = Self::word_of(slot as usize % SLOTS) + word as usize % (RANGES_WORD + 8);
        // Small values are often valid.
        self.words.store(at, if value.is_multiple_of(2) { value % 8 } else { value }, Relaxed);
        self.words.fetch_add(POSTED_WORD, 1);
    }

    /// Number of requests that were posted, as the initiator says.
    pub(super) fn posted(&self) -> u64 {
        self.words.load(POSTED_WORD, Acquire)
    }

    /// The request in a slot, unless it is the one with this sequence number.
    pub(super) fn request(&self, slot: usize, last: u64) -> Option<UncheckedRequest> {
        let at = Self::word_of(slot);
        let sequence = self.words.load(at + REQUEST_WORD, Acquire);
        if sequence == last {
            return None;
        }
        let load = |word| self.words.load(at + word, Relaxed);
        // A count beyond the maximum stays one: the request is refused.
        let count = load(COUNT_WORD).min(MAX_RANGES as u64 + 1) as usize;
        let range = |number: usize| {
            let word = RANGES_WORD + 2 * number;
            RegionRange { offset: load(word), length: load(word + 1) }
        };
        let (operation, region) = (load(OPERATION_WORD), load(REGION_WORD));
        let ranges = (0..count).map(range).collect();
        Some(UncheckedRequest { sequence, operation, region, ranges })
    }

    /// Answers a request, after its bytes if it is a get.
    pub(super) fn answer(&self, slot: usize, sequence: u64, refusal: Option<&Refusal>) {
        let at = Self::word_of(slot);
        let bytes = refusal.map(|refusal| codec::encode(REFUSAL_VERSION, refusal));
        let bytes = bytes.unwrap_or_default();
        for (word, part) in bytes.chunks(WORD).enumerate() {
            let mut padded = [0; WORD];
            padded[..part.len()].copy_from_slice(part);
            self.words.store(at + RANGES_WORD + word, u64::from_le_bytes(padded), Relaxed);
        }
        self.words.store(at + REFUSAL_WORD, bytes.len() as u64, Relaxed);
        self.words.store(at + ANSWER_WORD, sequence, Release);
    }

    /// The answer to the request with this sequence number, if it is there.
    pub(super) fn answer_to(
        &self,
        slot: usize,
        sequence: u64,
    ) -> Option<std::result::Result<(), Refusal>> {
        let at = Self::word_of(slot);
        if self.words.load(at + ANSWER_WORD, Acquire) != sequence {
            return None;
        }
        let length = self.words.load(at + REFUSAL_WORD, Relaxed);
        if length == 0 {
            return Some(Ok(()));
        }
        let length = length.min(MAX_REFUSAL as u64) as usize;
        let words = (0..length.div_ceil(WORD)).map(|word| at + RANGES_WORD + word);
        let mut bytes: Vec<u8> =
            words.flat_map(|word| self.words.load(word, Relaxed).to_le_bytes()).collect();
        bytes.truncate(length);
        let refusal = codec::decode::<Refusal>(REFUSAL_VERSION, &bytes).ok();
        let malformed = || Refusal::new(ErrorKind::Malformed, "the peer's answer is garbage");
        Some(Err(refusal.filter(Refusal::is_short).unwrap_or_else(malformed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn both() -> (StagingSegment, StagingSegment) {
        let target = StagingSegment::create().unwrap();
        let [control, slots] = target.export().unwrap();
        let initiator = StagingSegment::open(control, slots).unwrap();
        (target, initiator)
    }

    #[test]
    fn request_and_answer_arrive_in_their_slot() {
        let (target, initiator) = both();
        let ranges: Vec<_> =
            (0..MAX_RANGES as u64).map(|number| RegionRange::new(10 * number, 5)).collect();
        for (slot, sequence) in [(0, 5), (SLOTS - 1, 6), (0, 7)] {
            initiator.post(slot, sequence, Operation::Get, 9, &ranges);
            let request = target.request(slot, 0).unwrap();
            assert_eq!((request.sequence(), request.region()), (sequence, 9));
            assert_eq!((request.operation(), request.ranges()), (Some(Operation::Get), &*ranges));
            assert!(target.request(slot, sequence).is_none(), "taken twice");
            assert!(initiator.answer_to(slot, sequence).is_none());
            target.answer(slot, sequence, None);
            assert_eq!(initiator.answer_to(slot, sequence), Some(Ok(())));
        }
        assert_eq!(target.posted(), 3);
    }

    #[test]
    fn refusal_arrives_and_garbage_in_its_place_is_malformed() {
        let (target, initiator) = both();
        let refusal = Refusal::new(ErrorKind::Stale, "the region was withdrawn");
        target.answer(3, 8, Some(&refusal));
        assert_eq!(initiator.answer_to(3, 8), Some(Err(refusal)));
        let at = StagingSegment::word_of(3);
        for length in [1, 7, 40, MAX_REFUSAL as u64, u64::MAX] {
            target.words.store(at + REFUSAL_WORD, length, Relaxed);
            let Some(Err(found)) = initiator.answer_to(3, 8) else { panic!("{length}") };
            assert_eq!(found.kind, ErrorKind::Malformed, "{length}");
        }
    }

    #[test]
    fn count_of_ranges_beyond_the_maximum_is_kept_within_the_segment() {
        let (target, initiator) = both();
        initiator.post(SLOTS - 1, 1, Operation::Put, 1, &[]);
        let at = StagingSegment::word_of(SLOTS - 1);
        initiator.words.store(at + COUNT_WORD, u64::MAX, Relaxed);
        initiator.words.store(at + OPERATION_WORD, 77, Relaxed);
        let request = target.request(SLOTS - 1, 0).unwrap();
        assert_eq!((request.operation(), request.ranges().len()), (None, MAX_RANGES + 1));
    }

    #[test]
    fn other_memory_is_no_staging_memory() {
        let (target, _) = both();
        let [control, slots] = target.export().unwrap();
        assert!(StagingSegment::open(slots, control).is_err());
    }
}
