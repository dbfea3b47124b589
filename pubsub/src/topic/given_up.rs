//! Dropped destinations, and the messages that they missed, counted for publishers.
//!
//! Dropping a destination removes it, and adds its missed messages to the sums. Both take effect at
//! once, even if a process dies in between. The new sums are written beside the old ones, then one
//! store names the destination, and the next process that looks finishes the rest. All this happens
//! before any retained message of the node is released: so a message is retained, was received, or
//! is counted.
//!
//! Only the service does this, one at a time.

use std::sync::atomic::Ordering::{Acquire, Release};

use ipc::{Participant, Words};

use super::TopicWords;
use super::entry::Entry;
use super::layout::{CACHE_LINE_WORDS, MISSED, MISSED_NEXT, MISSED_WORDS, PUBLISHER_SLOTS};
use crate::settings::Reliability;

/// Sums of all publishers.
const MESSAGES: usize = 0;
const NODES: usize = 1;
/// In the new sums: the slot of the destination plus one; 0 if there are none.
const BEGUN: usize = 2;
/// Words of a publisher, by its slot: first the count, then its identifier, so that a reader that
/// finds the identifier also finds its count.
const COUNT: usize = 0;
const PUBLISHER: usize = 1;
/// A destination that found no slot in the table.
const NO_SLOT: u64 = u64::MAX;

/// Messages of a topic that dropped destinations missed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct NodesMissed {
    /// Messages, counted for each node that misses them.
    pub(crate) messages: u64,
    /// How often a destination with missed messages was dropped.
    pub(crate) nodes: u64,
}

fn of_publisher(publisher: u64) -> usize {
    CACHE_LINE_WORDS + (publisher & 0xff) as usize % PUBLISHER_SLOTS * 2
}

impl<W: Words + Clone> TopicWords<W> {
    /// The sums of all messages that were published on this node.
    pub(crate) fn missed_by_nodes(&self) -> NodesMissed {
        let word = |which| self.words().load(MISSED + which, Acquire);
        NodesMissed { messages: word(MESSAGES), nodes: word(NODES) }
    }

    pub(crate) fn missed_by_nodes_of(&self, publisher: u64) -> u64 {
        let at = MISSED + of_publisher(publisher);
        match self.words().load(at + PUBLISHER, Acquire) == publisher {
            true => self.words().load(at + COUNT, Acquire),
            false => 0,
        }
    }

    /// Drops a destination. It misses the messages from a position on that are retained in the name
    /// of this role; returns their number. Topics that drop messages retain none.
    ///
    /// Without other destinations the role's queue must have been [halted](ipc::Queue::halt): later
    /// messages would not be counted.
    pub(crate) fn give_up(&self, node: &[u8; 16], role: Participant, from: u64) -> u64 {
        self.finish_giving_up();
        let mut sums: [u64; MISSED_WORDS] =
            std::array::from_fn(|which| self.words().load(MISSED + which, Acquire));
        let mut missed = 0;
        if self.settings().reliability == Reliability::Reliable {
            for subscription_id in self.local().subscriptions_of(role) {
                self.local().for_each_unreleased(subscription_id, from, |_, words| {
                    missed += 1;
                    count(&mut sums, Entry::from_words(words).publisher);
                });
            }
        }
        if missed == 0 {
            self.remove_destination(node);
            return 0;
        }
        sums[MESSAGES] = sums[MESSAGES].wrapping_add(missed);
        sums[NODES] = sums[NODES].wrapping_add(1);
        for (which, sum) in sums.into_iter().enumerate().filter(|(which, _)| *which != BEGUN) {
            self.set_sum(MISSED_NEXT + which, sum);
        }
        let slot = self.destination_slot(node).map_or(NO_SLOT, |slot| slot as u64 + 1);
        // One store commits.
        self.words().store(MISSED_NEXT + BEGUN, slot, Release);
        self.finish_giving_up();
        missed
    }

    /// Finishes what a dead process has begun.
    pub(crate) fn finish_giving_up(&self) {
        let begun = self.words().load(MISSED_NEXT + BEGUN, Acquire);
        if begun == 0 {
            return;
        }
        for which in (0..MISSED_WORDS).filter(|which| *which != BEGUN) {
            let sum = self.words().load(MISSED_NEXT + which, Acquire);
            self.set_sum(MISSED + which, sum);
        }
        self.clear_destination(begun.wrapping_sub(1));
        self.words().store(MISSED_NEXT + BEGUN, 0, Release);
    }

    /// Returns true if the destination in this slot is about to be dropped.
    pub(super) fn is_being_given_up(&self, slot: usize) -> bool {
        self.words().load(MISSED_NEXT + BEGUN, Acquire) == slot as u64 + 1
    }

    /// Most sums are unchanged, and their words are not written.
    fn set_sum(&self, at: usize, sum: u64) {
        if self.words().load(at, Acquire) != sum {
            self.words().store(at, sum, Release);
        }
    }
}

/// Counts a missed message of a publisher. An earlier publisher of the same slot is forgotten;
/// messages of an earlier one only count in the total.
fn count(sums: &mut [u64; MISSED_WORDS], publisher: u64) {
    let at = of_publisher(publisher);
    let Some([count, counted]) = sums.get_mut(at..at + 2) else { return };
    if *counted < publisher {
        (*count, *counted) = (0, publisher);
    }
    if *counted == publisher {
        *count = count.wrapping_add(1);
    }
}

const _: () = assert!(BEGUN < CACHE_LINE_WORDS && COUNT < PUBLISHER && PUBLISHER < 2);
