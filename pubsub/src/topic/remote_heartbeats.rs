//! The number of the last message that publishers of other nodes have published, as their nodes told
//! when nothing of it was on its way any more: a subscriber that has read all that arrived misses what
//! it did not get up to there.
//!
//! Written by the service that serves the node, one at a time. A line is written under a version, which is
//! odd meanwhile; a service that dies then leaves a line that is written anew.

use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::atomic::fence;

use ipc::Words;

use super::TopicWords;
use super::layout::{
    CACHE_LINE_WORDS, MAX_REMOTE_HEARTBEATS, REMOTE_HEARTBEAT_CHANGES, REMOTE_HEARTBEATS,
};
use crate::pool::{id_from_words, id_to_words};

/// Grows by two with each change, and is odd during one. 0: the line is free.
const VERSION: usize = 0;
const CONTENT: usize = 1;
const WORDS: usize = 7;

/// What a node told of one of its publishers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RemoteHeartbeat {
    pub(crate) node: [u8; 16],
    pub(crate) publisher: u64,
    /// The number of its last message.
    pub(crate) last: u64,
    /// That of the first one that was kept for this node; 0 if that is not known.
    pub(crate) first: u64,
    /// Subscribers from before this position of the arrivals on were to get all from the first one on.
    pub(crate) since: u64,
    /// The position of the next arrival when this was noted.
    pub(crate) at: u64,
}

impl RemoteHeartbeat {
    fn words(&self) -> [u64; WORDS] {
        let [low, high] = id_to_words(&self.node);
        [low, high, self.publisher, self.last, self.first, self.since, self.at]
    }

    fn from_words([low, high, publisher, last, first, since, at]: [u64; WORDS]) -> Self {
        Self { node: id_from_words([low, high]), publisher, last, first, since, at }
    }

    /// Two publishers of a node that had the same line of its publishers' table, one after the other.
    fn replaces(&self, other: &Self) -> bool {
        self.node == other.node && self.publisher & 0xff == other.publisher & 0xff
    }

    fn differs_from(&self, other: &Self) -> bool {
        let told = |it: &Self| (it.publisher, it.last, it.first, it.since);
        told(self) != told(other)
    }
}

impl<W: Words + Clone> TopicWords<W> {
    /// How often something was noted.
    #[inline]
    pub(crate) fn remote_heartbeat_changes(&self) -> u64 {
        self.words().load(REMOTE_HEARTBEAT_CHANGES, Acquire)
    }

    /// What was noted of each publisher, but for a line that is being written now: that one counts as
    /// another change.
    pub(crate) fn remote_heartbeats(&self) -> Vec<RemoteHeartbeat> {
        self.remote_heartbeat_slots().filter_map(|(_, found)| found).collect()
    }

    /// Each line's place, and what it says.
    fn remote_heartbeat_slots(&self) -> impl Iterator<Item = (usize, Option<RemoteHeartbeat>)> {
        (0..MAX_REMOTE_HEARTBEATS).map(|slot| {
            let at = REMOTE_HEARTBEATS + slot * CACHE_LINE_WORDS;
            let version = self.words().load(at + VERSION, Acquire);
            let content =
                std::array::from_fn(|word| self.words().load(at + CONTENT + word, Acquire));
            fence(Acquire);
            let is_whole = version != 0
                && version.is_multiple_of(2)
                && self.words().load(at + VERSION, Acquire) == version;
            (at, is_whole.then(|| RemoteHeartbeat::from_words(content)))
        })
    }

    /// Notes what a node told of one of its publishers, in place of what was noted longest ago if there
    /// is no room. False if it was noted before.
    pub(crate) fn record_remote_heartbeat(&self, told: &RemoteHeartbeat) -> bool {
        let words = self.words();
        let version = |at: usize| words.load(at + VERSION, Acquire);
        let mut same = None;
        for (at, found) in self.remote_heartbeat_slots() {
            let Some(found) = found.filter(|found| told.replaces(found)) else { continue };
            // A service may have died between the line and the count of changes.
            let is_counted = version(at) / 2 <= self.remote_heartbeat_changes();
            if is_counted && !told.differs_from(&found) {
                return false;
            }
            same = Some(at);
        }
        let at = same.unwrap_or_else(|| {
            // One that a dead service left is written first, a free one next.
            let slots =
                (0..MAX_REMOTE_HEARTBEATS).map(|slot| REMOTE_HEARTBEATS + slot * CACHE_LINE_WORDS);
            let age = |at: &usize| if version(*at) % 2 == 1 { 0 } else { version(*at) };
            slots.min_by_key(age).unwrap_or(REMOTE_HEARTBEATS)
        });
        let changes = self.remote_heartbeat_changes().wrapping_add(1);
        words.store(at + VERSION, changes.wrapping_mul(2) | 1, Release);
        fence(Release);
        for (word, value) in told.words().into_iter().enumerate() {
            words.store(at + CONTENT + word, value, Release);
        }
        words.store(at + VERSION, changes.wrapping_mul(2), Release);
        words.store(REMOTE_HEARTBEAT_CHANGES, changes, Release);
        true
    }
}
