//! Which publishers the topic has: admitted ones of this node, with their names, and other nodes
//! that publish.
//!
//! Only the service writes names and other nodes, one at a time. A publisher is named before it is
//! admitted. The slot of another node is written under a version, which is odd in the meantime: a
//! reader takes such a slot for a node that publishes. If a service dies then, the next one writes
//! the slot again. Each change is counted after it was made.

use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::atomic::fence;

use ipc::{Participant, Words};

use super::TopicWords;
use super::label::{self, LABEL_WORDS};
use super::layout::{
    MAX_PUBLISHING_NODES, NAME_WORDS, PUBLISHER_CHANGES, PUBLISHER_NAMES, PUBLISHING_NODE_ARRIVALS,
    PUBLISHING_NODE_WORDS, PUBLISHING_NODES, store_all,
};
use super::publishers::{self, PublisherSlot};
use crate::ids::{id_from_words, id_to_words};

// Words of a name.
const PROCESS: usize = 0;
const LABEL: usize = 1;

// Words of another node.
const VERSION: usize = 0;
const CONTENT: usize = 1;
const CONTENT_WORDS: usize = 3 + LABEL_WORDS;

const _: () = assert!(LABEL + LABEL_WORDS <= NAME_WORDS);
const _: () = assert!(CONTENT + CONTENT_WORDS <= PUBLISHING_NODE_WORDS);

/// State of a slot without a node. Otherwise the node is connected, or lost and still waited for.
const FREE: u64 = 0;
const CONNECTED: u64 = 1;
const LOST: u64 = 2;

/// A publisher of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NamedPublisher {
    id: u64,
    participant: Participant,
    process: u32,
    label: String,
}

impl NamedPublisher {
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    pub(crate) fn participant(&self) -> Participant {
        self.participant
    }

    /// The process, and its label.
    pub(crate) fn process(&self) -> (u32, &str) {
        (self.process, &self.label)
    }
}

/// Another node that publishes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PublishingNode {
    node: [u8; 16],
    is_connected: bool,
    label: String,
}

impl PublishingNode {
    /// The label is shortened to what is stored.
    pub(crate) fn new(node: [u8; 16], is_connected: bool, label: &str) -> Self {
        let label = label::from_words(&label::to_words(label));
        Self { node, is_connected, label }
    }

    pub(crate) fn node(&self) -> [u8; 16] {
        self.node
    }

    pub(crate) fn is_connected(&self) -> bool {
        self.is_connected
    }

    pub(crate) fn label(&self) -> &str {
        &self.label
    }

    fn words(&self) -> [u64; CONTENT_WORDS] {
        let [low, high] = id_to_words(&self.node);
        let state = if self.is_connected { CONNECTED } else { LOST };
        let mut words = [0; CONTENT_WORDS];
        words[..3].copy_from_slice(&[state, low, high]);
        words[3..].copy_from_slice(&label::to_words(&self.label));
        words
    }
}

/// What a slot of another node contains.
enum NodeSlot {
    Free,
    /// Slot that is being written, or whose writer died.
    Unknown,
    Used(PublishingNode),
}

/// What is known of a topic's publishers at one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Presence {
    /// A publisher of this node exists, or another node publishes.
    is_any: bool,
    /// The serial of the last publisher of this node that has left; 0 if none is known.
    last_left: u64,
    /// How often another node has begun to publish.
    arrivals: u64,
}

impl Presence {
    pub(crate) fn is_any(self) -> bool {
        self.is_any
    }

    /// Returns true if a publisher that `earlier` does not know has come, and may have gone again.
    pub(crate) fn has_arrivals_since(self, earlier: Self) -> bool {
        self.last_left > earlier.last_left || self.arrivals != earlier.arrivals
    }

    /// This presence, with what only the earlier one knows of publishers that have left.
    pub(crate) fn after(self, earlier: Self) -> Self {
        Self { last_left: self.last_left.max(earlier.last_left), ..self }
    }
}

impl<W: Words + Clone> TopicWords<W> {
    /// Grows whenever publishers of this node or other publishing nodes have come or gone.
    #[inline]
    pub(crate) fn publisher_changes(&self) -> u64 {
        self.words().load(PUBLISHER_CHANGES, Acquire)
    }

    pub(crate) fn presence(&self) -> Presence {
        let slots = || publishers::slots(self.words());
        let is_used = |(_, slot): (usize, NodeSlot)| !matches!(slot, NodeSlot::Free);
        Presence {
            last_left: slots().filter_map(|slot| slot.left()).max().unwrap_or_default(),
            arrivals: self.words().load(PUBLISHING_NODE_ARRIVALS, Acquire),
            is_any: slots().any(|slot| slot.is_present()) || self.node_slots().any(is_used),
        }
    }

    /// Names a publisher of this node that is about to be admitted.
    pub(crate) fn name_publisher(&self, id: u64, process: u32, label: &str) {
        let at = Self::name_of(&self.publisher(id));
        self.words().store(at + PROCESS, u64::from(process), Release);
        store_all(self.words(), at + LABEL, label::to_words(label));
    }

    fn name_of(slot: &PublisherSlot<'_, W>) -> usize {
        PUBLISHER_NAMES + slot.index() * NAME_WORDS
    }

    /// The publishers of this node.
    pub(crate) fn named_publishers(&self) -> Vec<NamedPublisher> {
        let named = |slot: PublisherSlot<'_, W>| {
            let seen = slot.seen().filter(|_| slot.is_present())?;
            let at = Self::name_of(&slot);
            let word = |which| self.words().load(at + which, Acquire);
            let (process, label) =
                (word(PROCESS), std::array::from_fn(|which| word(LABEL + which)));
            fence(Acquire);
            // Otherwise the name may be the next publisher's.
            let is_same = slot.is_of(seen.participant, seen.id);
            is_same.then(|| NamedPublisher {
                id: seen.id,
                participant: seen.participant,
                process: u32::try_from(process).unwrap_or_default(),
                label: label::from_words(&label),
            })
        };
        publishers::slots(self.words()).filter_map(named).collect()
    }

    /// The other nodes that publish. A node whose slot is being written is left out.
    pub(crate) fn publishing_nodes(&self) -> Vec<PublishingNode> {
        let used = self.node_slots().filter_map(|(_, slot)| match slot {
            NodeSlot::Used(node) => Some(node),
            NodeSlot::Free | NodeSlot::Unknown => None,
        });
        used.collect()
    }

    /// Offset and content of each slot.
    fn node_slots(&self) -> impl Iterator<Item = (usize, NodeSlot)> {
        let words = self.words();
        (0..MAX_PUBLISHING_NODES).map(move |slot| {
            let at = PUBLISHING_NODES + slot * PUBLISHING_NODE_WORDS;
            let version = words.load(at + VERSION, Acquire);
            if version == 0 {
                return (at, NodeSlot::Free);
            }
            let content: [u64; CONTENT_WORDS] =
                std::array::from_fn(|word| words.load(at + CONTENT + word, Acquire));
            fence(Acquire);
            let is_whole =
                version.is_multiple_of(2) && words.load(at + VERSION, Acquire) == version;
            let found = match content[0] {
                _ if !is_whole => NodeSlot::Unknown,
                FREE => NodeSlot::Free,
                state => {
                    let mut label = [0; LABEL_WORDS];
                    label.copy_from_slice(&content[3..]);
                    NodeSlot::Used(PublishingNode {
                        node: id_from_words([content[1], content[2]]),
                        is_connected: state == CONNECTED,
                        label: label::from_words(&label),
                    })
                }
            };
            (at, found)
        })
    }

    fn write_node(&self, at: usize, content: [u64; CONTENT_WORDS]) {
        let words = self.words();
        let version = words.load(at + VERSION, Acquire);
        words.store(at + VERSION, version | 1, Release);
        fence(Release);
        store_all(words, at + CONTENT, content);
        words.store(at + VERSION, (version | 1).wrapping_add(1), Release);
    }

    /// Stores which other nodes publish, and wakes waiting subscribers if that is a change. Called
    /// by the service. Nodes beyond the number of slots are left out; they count as long as others
    /// are there.
    pub(crate) fn set_publishing_nodes(&self, nodes: &[PublishingNode]) {
        let (mut free, mut gone) = (Vec::new(), Vec::new());
        let mut missing: Vec<_> = nodes.iter().collect();
        let mut is_changed = false;
        for (at, slot) in self.node_slots() {
            let used = match slot {
                NodeSlot::Used(used) => used,
                NodeSlot::Free => {
                    free.push(at);
                    continue;
                }
                // An earlier service died here.
                NodeSlot::Unknown => {
                    gone.push(at);
                    continue;
                }
            };
            let known = missing.iter().position(|node| node.node == used.node);
            let Some(now) = known.map(|index| missing.swap_remove(index)) else {
                gone.push(at);
                continue;
            };
            if *now != used {
                self.write_node(at, now.words());
                is_changed = true;
            }
        }
        // First the new ones: a subscriber that looks meanwhile finds a node.
        let (mut free, mut gone) = (free.into_iter(), gone.into_iter());
        for node in missing {
            let Some(at) = free.next().or_else(|| gone.next()) else { break };
            self.write_node(at, node.words());
            self.words().fetch_add(PUBLISHING_NODE_ARRIVALS, 1);
            is_changed = true;
        }
        for at in gone {
            self.write_node(at, [FREE; CONTENT_WORDS]);
            is_changed = true;
        }
        if is_changed {
            self.count_publisher_change();
        }
    }

    /// Lets subscribers look at the publishers again. Called after each change, and by a new
    /// service, since the last one may have died before it called this.
    pub(crate) fn count_publisher_change(&self) {
        self.words().fetch_add(PUBLISHER_CHANGES, 1);
        self.local().messages().ring();
    }
}
