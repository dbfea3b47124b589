//! The layout of a queue's words.
//!
//! ```text
//!  0 identification    8 lock: three words    16 doorbell: messages   24 doorbell: space
//!  1 slots            12 active subscribers   17 its sleepers         25 its sleepers
//!  2 words an entry   13 messages dropped                             26 tail
//!  3 depth            14 spare slots used     32 a line for each subscriber
//!  4 overflow policy  15 subscriptions made      then a word for each position of the ring,
//!  5 max. held                                   and for each spare slot
//!                                             then two lines or more for each slot
//! ```
//!
//! A subscriber's line: its participant and generation, and whether it was removed or evicted; its
//! read position; how many unread entries were dropped; and whether a process lost this slot and
//! may not know it.
//!
//! The words of the ring and of the spare slots name a slot each, as its number plus 1; 0 stands
//! for the slot that it had first. Readers look up the slot of a position there, in a line that
//! rarely changes.
//!
//! A slot: the position of its entry plus 1; its subscribers; the entry. In a separate line:
//! the subscribers that have not read it, and those that hold it; the position plus 1 of the
//! last entry that was disposed of in order.
//!
//! The access pattern of a message decides which words share a cache line:
//!
//! - Polling readers read the line of the next entry. It has all that they need, and only a
//!   publisher writes to it after all of them have released the entry. So it moves from the
//!   publisher to each of them once. Marks are cleared in another line; otherwise a finished
//!   reader would take the line away from readers that have not seen the entry yet.
//! - The line of the lock stays with the publisher, if there is only one. The tail, which the
//!   last reader reads, is next to the doorbell, which it also reads.

use crate::lock;

pub(super) const LAYOUT: u64 = 0x6661_6272_7175_0005;

pub(super) const KIND: usize = 0;
pub(super) const SLOTS: usize = 1;
pub(super) const ENTRY: usize = 2;
pub(super) const DEPTH: usize = 3;
pub(super) const OVERFLOW_POLICY: usize = 4;
pub(super) const MAX_HELD: usize = 5;
pub(super) const LOCK: usize = 8;
pub(super) const ACTIVE: usize = 12;
pub(super) const DROPPED: usize = 13;
/// How many spare slots were ever used: the others need not be touched.
pub(super) const SPARES_USED: usize = 14;
pub(super) const SERIAL: usize = 15;
pub(super) const MESSAGES: usize = 16;
pub(super) const ROOM: usize = 24;
pub(super) const TAIL: usize = 26;
pub(super) const SUBSCRIBERS: usize = 32;
/// Words of a cache line.
pub(super) const LINE: usize = 8;
/// Subscribers at a time: their bits are half a word.
pub(super) const MAX_SUBSCRIBERS: u32 = 32;
/// At most this many of them may be processes: one slot is reserved for a role.
pub(super) const MAX_PROCESS_SUBSCRIBERS: u32 = MAX_SUBSCRIBERS - 1;
/// For each position of the ring its slot; then the spare slots.
pub(super) const RING: usize = SUBSCRIBERS + MAX_SUBSCRIBERS as usize * LINE;

const _: () = assert!(LOCK + lock::WORDS <= ACTIVE && SERIAL < MESSAGES);
const _: () = assert!(TAIL / LINE == ROOM / LINE);

// A subscriber's line.
pub(super) const PARTICIPANT: usize = 0;
/// In `PARTICIPANT`: it was removed, or is being removed. No participant number has this bit.
pub(super) const REMOVED: u64 = 1 << 31;
/// In `PARTICIPANT`: it was evicted, and keeps the entries that it holds.
pub(super) const EVICTED: u64 = 1 << 30;
/// Both, beside its name.
pub(super) const FLAGS: u64 = REMOVED | EVICTED;
pub(super) const CURSOR: usize = 1;
pub(super) const MISSED: usize = 2;
/// A subscriber of this slot was removed or replaced by another process: if it still lives, it
/// may clear a mark that no longer belongs to it.
pub(super) const HAS_STALE_OWNER: usize = 3;

// A slot.
/// The position of its entry plus 1; 0 without a valid entry.
pub(super) const SEQUENCE: usize = 0;
/// The subscribers at the time of delivery, one bit each.
pub(super) const DELIVERED_TO: usize = 1;
pub(super) const PAYLOAD: usize = 2;

#[inline]
pub(super) fn subscriber(index: u32, which: usize) -> usize {
    SUBSCRIBERS + index as usize * LINE + which
}

/// The bit of a subscriber that has not read the entry.
#[inline]
pub(super) fn unread_bit(index: u32) -> u64 {
    1 << (32 + index)
}

/// The bit of a subscriber that holds the entry.
#[inline]
pub(super) fn held_bit(index: u32) -> u64 {
    1 << index
}

/// The bits of all subscribers that have not read the entry.
pub(super) const UNREAD: u64 = 0xffff_ffff_0000_0000;

/// Both marks of a subscriber.
#[inline]
pub(super) fn marks(index: u32) -> u64 {
    unread_bit(index) | held_bit(index)
}
