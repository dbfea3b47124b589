//! A shared, read-only table of the regions that an agent still has.
//!
//! Each slot is a word with the number of its region, or 0. Initiators check it right before each
//! copy, so that a withdrawn region is refused before a byte is copied. One more word says that the
//! agent has ended, and with it all regions. Peers map the table read-only, because a writer would
//! decide for others.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::fence;

use ipc::{Layout, MappedWords, ReadOnlySegment, Segment, SegmentError, Words};

const LAYOUT: Layout = Layout::new("agent regions", 1);
/// Maximum number of regions of an agent. Pages are allocated when they are first used.
const TABLE_SLOTS: usize = 1 << 16;
/// 1 after the agent has ended.
const CLOSED_WORD: usize = TABLE_SLOTS;
const WORDS: usize = TABLE_SLOTS + 1;

/// The agent's own table.
#[derive(Debug)]
pub(super) struct RegionTable {
    segment: Segment,
    words: MappedWords,
}

/// The table of another agent.
#[derive(Debug)]
pub(in crate::agent) struct ReadOnlyRegionTable(ReadOnlySegment);

fn slot_of(number: u64) -> usize {
    (number % TABLE_SLOTS as u64) as usize
}

impl RegionTable {
    pub(super) fn create() -> Result<Self, SegmentError> {
        let segment = Segment::create(LAYOUT, WORDS * size_of::<u64>())?;
        segment.mark_ready();
        let words = segment.words();
        Ok(Self { segment, words })
    }

    /// A read-only descriptor for a peer.
    pub(super) fn read_only(&self) -> Result<OwnedFd, SegmentError> {
        self.segment.read_only()
    }

    /// Inserts a region under the first number after `last` whose slot is free.
    pub(super) fn insert_after(&self, last: u64) -> Option<u64> {
        let mut numbers = (last + 1..).take(TABLE_SLOTS);
        let number = numbers.find(|number| self.words.load(slot_of(*number), SeqCst) == 0)?;
        self.words.store(slot_of(number), number, SeqCst);
        Some(number)
    }

    pub(super) fn remove(&self, number: u64) {
        if self.contains(number) {
            self.words.store(slot_of(number), 0, SeqCst);
        }
    }

    /// Marks the agent as ended. Its regions are removed one by one.
    pub(super) fn close(&self) {
        self.words.store(CLOSED_WORD, 1, SeqCst);
    }

    pub(super) fn contains(&self, number: u64) -> bool {
        number != 0 && self.words.load(slot_of(number), SeqCst) == number
    }
}

impl ReadOnlyRegionTable {
    pub(in crate::agent) fn open(file: OwnedFd) -> Result<Self, SegmentError> {
        let segment = ReadOnlySegment::open(file, LAYOUT)?;
        if segment.body_length() < WORDS * size_of::<u64>() {
            return Err(SegmentError::NotASegment { why: "region table of another size" });
        }
        Ok(Self(segment))
    }

    #[inline]
    pub(in crate::agent) fn is_closed(&self) -> bool {
        self.0.load(CLOSED_WORD) == 1
    }

    /// Checks after all stores of this thread: an initiator that recorded a copy before either sees
    /// here that the region was removed, or the owner that removed it sees the copy.
    #[inline]
    pub(in crate::agent) fn contains(&self, number: u64) -> bool {
        fence(SeqCst);
        number != 0 && self.0.load(slot_of(number)) == number
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn region_is_listed_until_removed_and_numbers_are_not_reused() {
        let own_table = RegionTable::create().unwrap();
        let peer_table = ReadOnlyRegionTable::open(own_table.read_only().unwrap()).unwrap();
        let first = own_table.insert_after(0).unwrap();
        let second = own_table.insert_after(first).unwrap();
        assert!(peer_table.contains(first) && peer_table.contains(second) && first != second);
        own_table.remove(first);
        own_table.remove(first);
        assert!(!peer_table.contains(first) && peer_table.contains(second));
        let third = own_table.insert_after(second).unwrap();
        assert!(third > second);
        // The same slot, another region.
        own_table.remove(first + TABLE_SLOTS as u64);
        assert!(!peer_table.contains(0) && !peer_table.contains(first + TABLE_SLOTS as u64));
        assert!(!peer_table.is_closed());
        own_table.close();
        assert!(peer_table.is_closed());
    }

    #[test]
    fn full_table_refuses_regions_until_a_slot_is_freed() {
        let region_table = RegionTable::create().unwrap();
        let mut last = 0;
        for _ in 0..TABLE_SLOTS {
            last = region_table.insert_after(last).unwrap();
        }
        assert_eq!(region_table.insert_after(last), None);
        region_table.remove(7);
        assert_eq!(region_table.insert_after(last).map(slot_of), Some(7));
    }
}
