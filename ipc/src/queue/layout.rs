//! Where everything lies in a queue's words.
//!
//! ```text
//!  0 what this is     8 lock: three words    16 doorbell of messages   24 doorbell of room
//!  1 slots           12 who subscribes       17 its sleepers       25 its sleepers
//!  2 words an entry  13 messages dropped                           26 tail
//!  3 depth           14 positions skipped                          27 oldest not dropped
//!  4 when full       15 subscriptions made   32 a line for each subscriber
//!
//!                                            then two lines or more for each slot
//! ```
//!
//! A subscriber's line: who it is and the how manieth, and whether it was removed; how far
//! it has read; how many entries were dropped that it had still to read; whether somebody
//! lost this place who may not know it.
//!
//! A slot: the position of its entry and one; whom it was delivered to; the entry. In a line
//! of their own: who has it still to read, and who holds it; the position and one of the last
//! entry that was disposed of in order; the number of its entry among all entries.
//!
//! What lies together follows from who touches it while a message is on its way:
//!
//! - Readers that look all the time look at the line of the next entry. They find all that
//!   they need there, and nobody but a publisher writes to it until all of them have let go:
//!   so it goes from the publisher to each of them once. Marks are taken off in another line, or
//!   those that are done would take the entry away from those that have not seen it yet.
//! - The line of the lock is the publisher's, as long as there is one. The tail, which the last
//!   reader looks at, lies with the bell that this one looks at, too.

use crate::lock;

pub(super) const LAYOUT: u64 = 0x6661_6272_7175_0004;

pub(super) const KIND: usize = 0;
pub(super) const SLOTS: usize = 1;
pub(super) const ENTRY: usize = 2;
pub(super) const DEPTH: usize = 3;
pub(super) const WHEN_FULL: usize = 4;
pub(super) const LOCK: usize = 8;
pub(super) const ACTIVE: usize = 12;
pub(super) const DROPPED: usize = 13;
pub(super) const SKIPPED: usize = 14;
pub(super) const SERIAL: usize = 15;
pub(super) const MESSAGES: usize = 16;
pub(super) const ROOM: usize = 24;
pub(super) const TAIL: usize = 26;
/// Where entries are dropped: before this position nothing is left to drop.
pub(super) const OLDEST: usize = 27;
pub(super) const SUBSCRIBERS: usize = 32;
/// Words of a cache line.
pub(super) const LINE: usize = 8;
/// Subscribers at a time: their bits are half a word.
pub(super) const MAX_SUBSCRIBERS: u32 = 32;
/// Of these as many may be processes: one place is left for a role.
pub(super) const MAX_PROCESS_SUBSCRIBERS: u32 = MAX_SUBSCRIBERS - 1;
pub(super) const FIRST_SLOT: usize = SUBSCRIBERS + MAX_SUBSCRIBERS as usize * LINE;

const _: () = assert!(LOCK + lock::WORDS <= ACTIVE && SERIAL < MESSAGES);
const _: () = assert!(TAIL / LINE == ROOM / LINE && OLDEST / LINE == TAIL / LINE);

// A subscriber's line.
pub(super) const PARTICIPANT: usize = 0;
/// In `PARTICIPANT`: it was removed, or is being removed. No participant's number has this bit.
pub(super) const REMOVED: u64 = 1 << 31;
pub(super) const CURSOR: usize = 1;
pub(super) const MISSED: usize = 2;
/// Somebody was removed from this place by another one, or followed by one: should it live after
/// all, it may take off a mark that is not its own any more.
pub(super) const HAS_STALE_OWNER: usize = 3;

// A slot.
/// The position of its entry and 1; 0 if it holds none that matters.
pub(super) const SEQUENCE: usize = 0;
/// Who subscribed when it was delivered, a bit each.
pub(super) const DELIVERED_TO: usize = 1;
pub(super) const PAYLOAD: usize = 2;

/// Words that its entry takes, with what belongs to it, in whole lines.
const fn entry_words(entry: usize) -> usize {
    (PAYLOAD + entry).next_multiple_of(LINE)
}

/// Upper half: who has still to read it; lower half: who holds it.
pub(super) const fn readers(entry: usize) -> usize {
    entry_words(entry)
}

/// The position and 1 of the last entry that was disposed of by who let go of it last: then
/// nobody has to look for it any more.
pub(super) const fn disposed(entry: usize) -> usize {
    entry_words(entry) + 1
}

/// The number of its entry: its position less the positions that were skipped before it.
pub(super) const fn number(entry: usize) -> usize {
    entry_words(entry) + 2
}

/// Words of a slot.
pub(super) const fn stride(entry: usize) -> usize {
    entry_words(entry) + LINE
}

#[inline]
pub(super) fn subscriber(index: u32, which: usize) -> usize {
    SUBSCRIBERS + index as usize * LINE + which
}

/// The bit of one that has still to read.
#[inline]
pub(super) fn unread_bit(index: u32) -> u64 {
    1 << (32 + index)
}

/// The bit of one that holds it.
#[inline]
pub(super) fn held_bit(index: u32) -> u64 {
    1 << index
}

/// All bits of those that have still to read.
pub(super) const UNREAD: u64 = 0xffff_ffff_0000_0000;
