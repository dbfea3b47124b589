//! Where everything lies in a queue's words.
//!
//! ```text
//!  0 what this is     8 lock: three words    16 bell of messages   24 bell of room
//!  1 slots           11 tail                 17 its sleepers       25 its sleepers
//!  2 words an entry  12 who subscribes
//!  3 depth           13 messages dropped
//!  4 when full       14 positions skipped    32 a line for each subscriber
//!                    15 subscriptions made
//!                                            then a line or more for each slot
//! ```
//!
//! A subscriber's line: who it is and the how manieth, and whether it was removed; how far
//! it has read; how many entries were dropped that it had still to read.
//! A slot: who has it still to read, and who holds it; the position of its entry and
//! one; the entry.

use crate::lock;

pub(super) const LAYOUT: u64 = 0x6661_6272_7175_0002;

pub(super) const KIND: usize = 0;
pub(super) const SLOTS: usize = 1;
pub(super) const ENTRY: usize = 2;
pub(super) const DEPTH: usize = 3;
pub(super) const WHEN_FULL: usize = 4;
pub(super) const LOCK: usize = 8;
pub(super) const TAIL: usize = 11;
pub(super) const ACTIVE: usize = 12;
pub(super) const DROPPED: usize = 13;
pub(super) const SKIPPED: usize = 14;
pub(super) const SERIAL: usize = 15;
pub(super) const MESSAGES: usize = 16;
pub(super) const ROOM: usize = 24;
pub(super) const SUBSCRIBERS: usize = 32;
/// Words of a cache line.
pub(super) const LINE: usize = 8;
/// Subscribers at a time: their bits are half a word.
pub(super) const MOST_SUBSCRIBERS: u32 = 32;
pub(super) const FIRST_SLOT: usize = SUBSCRIBERS + MOST_SUBSCRIBERS as usize * LINE;

const _: () = assert!(LOCK + lock::WORDS == TAIL && SERIAL < MESSAGES);

// A subscriber's line.
pub(super) const WHO: usize = 0;
/// In `WHO`: it was removed, or is being removed. No participant's number has this bit.
pub(super) const LEAVING: u64 = 1 << 31;
pub(super) const CURSOR: usize = 1;
pub(super) const MISSED: usize = 2;

// A slot.
/// Upper half: who has still to read it; lower half: who holds it.
pub(super) const READERS: usize = 0;
/// The position of its entry and 1; 0 if it holds none that matters.
pub(super) const SEQUENCE: usize = 1;
pub(super) const PAYLOAD: usize = 2;

/// Words of a slot.
pub(super) const fn stride(entry: usize) -> usize {
    (PAYLOAD + entry).next_multiple_of(LINE)
}

#[inline]
pub(super) fn subscriber(place: u32, which: usize) -> usize {
    SUBSCRIBERS + place as usize * LINE + which
}

/// The bit of one that has still to read.
#[inline]
pub(super) fn waiting(place: u32) -> u64 {
    1 << (32 + place)
}

/// The bit of one that holds it.
#[inline]
pub(super) fn holding(place: u32) -> u64 {
    1 << place
}

/// All bits of those that have still to read.
pub(super) const WAITING: u64 = 0xffff_ffff_0000_0000;
