//! Nodes that are given up, and the messages that they did not get: counted where publishers see
//! it.
//!
//! A node that is given up is no destination any more, and what it missed is added to the sums. Both
//! happen at once, whoever dies on the way: the new sums are written beside the old ones, then one
//! store says which destination they are about, and from there on whoever comes next finishes it.
//! It is done before anything that was kept for the node is let go of: so a message is kept, was
//! taken, or is counted.
//!
//! All of it is done by who serves the node, one at a time.

use std::sync::atomic::Ordering::{Acquire, Release};

use ipc::{Participant, Words};

use super::TopicWords;
use super::entry::Entry;
use super::layout::{CACHE_LINE_WORDS, MISSED, MISSED_NEXT, MISSED_WORDS, PUBLISHER_SLOTS};
use crate::settings::Reliability;

/// Of all together.
const MESSAGES: usize = 0;
const NODES: usize = 1;
/// In the new sums: which destination they are about, and one; 0 if they are none yet.
const BEGUN: usize = 2;
/// Of a publisher, by its line in their table: how many, and then which it is, so that who finds
/// its name finds a number of its own.
const COUNT: usize = 0;
const PUBLISHER: usize = 1;
/// Stands for a destination that found no place in the table.
const NO_SLOT: u64 = u64::MAX;

/// What nodes missed of a topic that were given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct NodesMissed {
    /// Messages, counted for each node that misses them.
    pub(crate) messages: u64,
    /// How often a node was given up that missed some.
    pub(crate) nodes: u64,
}

/// Where the sums of a publisher are.
fn of_publisher(publisher: u64) -> usize {
    CACHE_LINE_WORDS + (publisher & 0xff) as usize % PUBLISHER_SLOTS * 2
}

impl<W: Words + Clone> TopicWords<W> {
    /// What nodes missed that were given up: of all messages that were published here.
    pub(crate) fn missed_by_nodes(&self) -> NodesMissed {
        let word = |which| self.words().load(MISSED + which, Acquire);
        NodesMissed { messages: word(MESSAGES), nodes: word(NODES) }
    }

    /// The same, of one publisher's messages.
    pub(crate) fn missed_by_nodes_of(&self, publisher: u64) -> u64 {
        let at = MISSED + of_publisher(publisher);
        match self.words().load(at + PUBLISHER, Acquire) == publisher {
            true => self.words().load(at + COUNT, Acquire),
            false => 0,
        }
    }

    /// A node is no destination any more, though messages may be owed to it that are in the name of
    /// this role, from a position on; gives how many that are. Where not all messages have to
    /// arrive none is owed.
    ///
    /// While there are no other destinations, nothing may be
    /// [delivered](ipc::Queue::halt) to the role any more: nobody would count it.
    pub(crate) fn give_up(&self, node: &[u8; 16], role: Participant, from: u64) -> u64 {
        self.finish_giving_up();
        let mut sums: [u64; MISSED_WORDS] =
            std::array::from_fn(|which| self.words().load(MISSED + which, Acquire));
        let mut missed = 0;
        if self.settings().reliability == Reliability::Reliable {
            for subscription_id in self.local().subscriptions_of(role) {
                self.local().for_each_unreleased(subscription_id, from, |words| {
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
        let place = self.destination_slot(node).map_or(NO_SLOT, |place| place as u64 + 1);
        // One store: this is the moment.
        self.words().store(MISSED_NEXT + BEGUN, place, Release);
        self.finish_giving_up();
        missed
    }

    /// What was begun by one that died.
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

    /// Is a node about to be given up that is noted at this place?
    pub(super) fn is_being_given_up(&self, place: usize) -> bool {
        self.words().load(MISSED_NEXT + BEGUN, Acquire) == place as u64 + 1
    }

    /// Most are as they were, and never touched.
    fn set_sum(&self, at: usize, sum: u64) {
        if self.words().load(at, Acquire) != sum {
            self.words().store(at, sum, Release);
        }
    }
}

/// One more message of a publisher was missed. What is known of those that had its line before makes
/// room; a message of one of these is counted with all only.
fn count(sums: &mut [u64; MISSED_WORDS], publisher: u64) {
    let at = of_publisher(publisher);
    let Some([count, known]) = sums.get_mut(at..at + 2) else { return };
    if *known < publisher {
        (*count, *known) = (0, publisher);
    }
    if *known == publisher {
        *count = count.wrapping_add(1);
    }
}

const _: () = assert!(BEGUN < CACHE_LINE_WORDS && COUNT < PUBLISHER && PUBLISHER < 2);
