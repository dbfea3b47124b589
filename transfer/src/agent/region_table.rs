//! What an agent shows those of its machine: which of its regions are there.
//!
//! A word for each place; it holds the number of the region that has the place, or 0. Who
//! wants to copy looks here right before, so that a region that was withdrawn is refused
//! before a byte moves. One more word says whether the agent has ended; no region is there then.
//! Peers can only read it: one that could write would decide for the others.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::fence;

use ipc::{Layout, MappedWords, ReadOnlySegment, Segment, SegmentError, Words};

const LAYOUT: Layout = Layout::new("agent regions", 1);
/// Regions of an agent at a time. Their pages are made when they are first used.
const TABLE_SLOTS: usize = 1 << 16;
/// 1 once the agent has ended.
const CLOSED_WORD: usize = TABLE_SLOTS;
const WORDS: usize = TABLE_SLOTS + 1;

/// An agent's own.
#[derive(Debug)]
pub(super) struct RegionTable {
    segment: Segment,
    words: MappedWords,
}

/// One that another agent showed.
#[derive(Debug)]
pub(super) struct ReadOnlyRegionTable(ReadOnlySegment);

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

    /// A descriptor for a peer, by which it can only be read.
    pub(super) fn read_only(&self) -> Result<OwnedFd, SegmentError> {
        self.segment.read_only()
    }

    /// Shows a region under the first number after this one whose place is free.
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

    /// Says that the agent has ended. Its regions are hidden one by one.
    pub(super) fn end(&self) {
        self.words.store(CLOSED_WORD, 1, SeqCst);
    }

    pub(super) fn contains(&self, number: u64) -> bool {
        number != 0 && self.words.load(slot_of(number), SeqCst) == number
    }
}

impl ReadOnlyRegionTable {
    pub(super) fn open(file: OwnedFd) -> Result<Self, SegmentError> {
        let segment = ReadOnlySegment::open(file, LAYOUT)?;
        if segment.body_length() < WORDS * size_of::<u64>() {
            return Err(SegmentError::NotASegment { why: "region table of another size" });
        }
        Ok(Self(segment))
    }

    #[inline]
    pub(super) fn has_ended(&self) -> bool {
        self.0.load(CLOSED_WORD) == 1
    }

    /// Looks behind all stores of this thread: one that said before that it begins a copy either sees
    /// here that the region is gone, or is seen by the owner who hid it.
    #[inline]
    pub(super) fn contains(&self, number: u64) -> bool {
        fence(SeqCst);
        number != 0 && self.0.load(slot_of(number)) == number
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_is_seen_until_it_is_hidden_and_numbers_do_not_come_back() {
        let mine = RegionTable::create().unwrap();
        let theirs = ReadOnlyRegionTable::open(mine.read_only().unwrap()).unwrap();
        let first = mine.insert_after(0).unwrap();
        let second = mine.insert_after(first).unwrap();
        assert!(theirs.contains(first) && theirs.contains(second) && first != second);
        mine.remove(first);
        mine.remove(first);
        assert!(!theirs.contains(first) && theirs.contains(second));
        let third = mine.insert_after(second).unwrap();
        assert!(third > second);
        // The same place, another region.
        mine.remove(first + TABLE_SLOTS as u64);
        assert!(!theirs.contains(0) && !theirs.contains(first + TABLE_SLOTS as u64));
        assert!(!theirs.has_ended());
        mine.end();
        assert!(theirs.has_ended());
    }

    #[test]
    fn a_full_board_says_so_and_a_place_that_was_left_is_found() {
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
