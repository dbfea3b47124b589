//! Counts missed messages of a subscriber, by the sequence numbers of publishers.
//!
//! Each publisher numbers its messages from 1 on, delivered or not. So a skipped number is a
//! message that this subscriber misses, wherever and why it was lost. It was dropped for lack of
//! room or on the way from another node, never written, or published while its node had dropped
//! this one as a destination. Nothing else counts losses for subscribers.

use std::collections::BTreeMap;

use ipc::Words;

use crate::pool::SampleInfo;
use crate::topic::{PUBLISHER_SLOTS, Published, RemoteLastSequence};

/// A publisher, and the number of its next message.
#[derive(Debug, Clone, Copy, Default)]
struct PublisherProgress {
    publisher: u64,
    next: u64,
}

impl PublisherProgress {
    /// Records a message; returns how many are missing before it.
    #[inline]
    fn on_local(&mut self, sequence: u64) -> u64 {
        let missed = sequence.saturating_sub(self.next);
        self.next = self.next.max(sequence.saturating_add(1));
        missed
    }
}

/// The first message of a publisher on another node that is for this node, if known.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RemoteStart {
    node: [u8; 16],
    /// Number of that message; 0 if unknown.
    first: u64,
    /// Subscribers from before this inbound position are to receive all of them.
    since: u64,
}

impl RemoteStart {
    pub(crate) fn of<W: Words>(sample_info: &SampleInfo<'_, W>) -> Self {
        let (first, since) = sample_info.beginning();
        Self { node: sample_info.origin(), first, since }
    }
}

/// Maximum number of remote publishers: restarted nodes have new identities.
const MAX_REMOTE_PUBLISHERS: usize = 4096;

#[derive(Debug)]
pub(crate) struct LossTracker {
    /// Publishers of this node by slot; a slot has one publisher at a time.
    local: [PublisherProgress; PUBLISHER_SLOTS],
    /// Serial of the last publisher that had been created when this one subscribed.
    serial: u64,
    /// Publishers of other nodes, by node and slot there.
    remote: BTreeMap<([u8; 16], usize), PublisherProgress>,
    /// The inbound position at which it subscribed.
    since: u64,
    /// The last handled change of the remote last sequences.
    changes_seen: u64,
    missed: u64,
    /// Part of these that was not reported yet.
    unreported: u64,
    /// The last handled count of drops by publishers of this node.
    drops_seen: u64,
}

fn slot_of(publisher: u64) -> usize {
    (publisher & 0xff) as usize % PUBLISHER_SLOTS
}

impl LossTracker {
    /// From the messages published before, on this and on other nodes, and the next inbound
    /// position.
    pub(crate) fn new(
        before: &Published,
        drops_seen: u64,
        (remote, changes_seen): (&[RemoteLastSequence], u64),
        since: u64,
    ) -> Self {
        let mut local = [PublisherProgress::default(); PUBLISHER_SLOTS];
        for (publisher, last) in &before.publishers {
            local[slot_of(*publisher)] =
                PublisherProgress { publisher: *publisher, next: last.saturating_add(1) };
        }
        // Without messages that were received since: their positions are unknown.
        let known = remote.iter().filter(|reported| reported.at == since);
        let remote = known.map(|reported| {
            let known = PublisherProgress {
                publisher: reported.publisher,
                next: reported.last.saturating_add(1),
            };
            ((reported.node, slot_of(reported.publisher)), known)
        });
        let (remote, serial) = (remote.collect(), before.serial);
        let (missed, unreported) = (0, 0);
        Self { local, serial, remote, since, changes_seen, missed, unreported, drops_seen }
    }

    pub(crate) fn missed(&self) -> u64 {
        self.missed
    }

    pub(super) fn unreported(&self) -> u64 {
        self.unreported
    }

    pub(super) fn take_unreported(&mut self) -> u64 {
        std::mem::take(&mut self.unreported)
    }

    pub(super) fn add_missed(&mut self, count: u64) {
        self.missed = self.missed.wrapping_add(count);
        self.unreported = self.unreported.wrapping_add(count);
    }

    /// Records a message of this node. True if messages are missing before it.
    #[inline]
    pub(super) fn on_local(&mut self, publisher: u64, sequence: u64) -> bool {
        let known = &mut self.local[slot_of(publisher)];
        if known.publisher != publisher {
            // A publisher from before the subscription that has left since is unknown.
            let next = if publisher >> 8 > self.serial { 1 } else { sequence };
            *known = PublisherProgress { publisher, next };
        }
        let missed = known.on_local(sequence);
        self.add_missed(missed);
        missed > 0
    }

    /// Records a message of another node. True if messages are missing before it.
    pub(crate) fn on_inbound(&mut self, start: RemoteStart, publisher: u64, sequence: u64) -> bool {
        let key = (start.node, slot_of(publisher));
        let next = self.first_of(start.first, start.since).unwrap_or(sequence);
        let unknown = PublisherProgress { publisher, next };
        if self.remote.len() >= MAX_REMOTE_PUBLISHERS && !self.remote.contains_key(&key) {
            // For the removed publisher, messages missing before its next one are not counted.
            self.remote.pop_first();
        }
        let known = self.remote.entry(key).or_insert(unknown);
        if known.publisher < publisher {
            // It has the slot of a publisher that left.
            *known = PublisherProgress { publisher, next: 1 };
        } else if known.publisher > publisher || sequence < known.next {
            // The topic was re-created on the other node.
            *known = PublisherProgress { publisher, next: sequence };
        }
        let missed = known.on_local(sequence);
        self.add_missed(missed);
        missed > 0
    }

    /// The number of the first message for this subscriber, if none was received yet and the number
    /// is known.
    fn first_of(&self, first: u64, since: u64) -> Option<u64> {
        (first != 0 && self.since <= since).then_some(first)
    }

    /// Returns true if other nodes reported last sequences that were not handled yet.
    pub(super) fn has_new_last_sequences(&self, changes: u64) -> bool {
        self.changes_seen != changes
    }

    /// The progress of a publisher, given that none of its messages up to the last one will be
    /// delivered.
    fn known_of(&self, reported: &RemoteLastSequence) -> PublisherProgress {
        let behind = reported.last.saturating_add(1);
        match self.remote.get(&(reported.node, slot_of(reported.publisher))) {
            Some(known) if known.publisher == reported.publisher => *known,
            Some(known) if known.publisher < reported.publisher => {
                PublisherProgress { publisher: reported.publisher, next: 1 }
            }
            // Its slot has another publisher now.
            Some(known) => *known,
            None => {
                let next = self.first_of(reported.first, reported.since).unwrap_or(behind);
                PublisherProgress { publisher: reported.publisher, next }
            }
        }
    }

    /// How many messages of one publisher are missing, of those since this subscription.
    fn missing_of_publisher(&self, reported: &RemoteLastSequence) -> u64 {
        let known = self.known_of(reported);
        let is_own = known.publisher == reported.publisher && reported.at >= self.since;
        if is_own { reported.last.saturating_add(1).saturating_sub(known.next) } else { 0 }
    }

    /// How many messages are missing, given that no more of these are delivered.
    pub(super) fn missing_remote(&self, last_sequences: &[RemoteLastSequence]) -> u64 {
        let missing = last_sequences.iter().map(|it| self.missing_of_publisher(it));
        missing.fold(0, u64::wrapping_add)
    }

    /// Counts them.
    pub(super) fn settle_remote(&mut self, last_sequences: &[RemoteLastSequence], changes: u64) {
        let since = self.since;
        for reported in last_sequences.iter().filter(|it| it.at >= since) {
            self.add_missed(self.missing_of_publisher(reported));
            let mut known = self.known_of(reported);
            if known.publisher == reported.publisher {
                known.next = known.next.max(reported.last.saturating_add(1));
                let key = (reported.node, slot_of(reported.publisher));
                if self.remote.len() < MAX_REMOTE_PUBLISHERS || self.remote.contains_key(&key) {
                    self.remote.insert(key, known);
                }
            }
        }
        self.changes_seen = changes;
    }

    /// Returns true if publishers of this node dropped messages that were not handled yet.
    pub(super) fn has_new_drops(&self, drops: u64) -> bool {
        self.drops_seen != drops
    }

    /// How many messages are missing, given that no more of these are delivered.
    pub(super) fn missing_after_last(&self, settled: &[(u64, u64)]) -> u64 {
        let missing = settled.iter().map(|(publisher, last)| {
            let known = self.local[slot_of(*publisher)];
            let next = if known.publisher == *publisher { known.next } else { 1 };
            let is_own = known.publisher == *publisher || publisher >> 8 > self.serial;
            if is_own { last.saturating_add(1).saturating_sub(next) } else { 0 }
        });
        missing.fold(0, u64::wrapping_add)
    }

    /// Counts them.
    pub(super) fn settle(&mut self, settled: &[(u64, u64)], drops: u64) {
        self.add_missed(self.missing_after_last(settled));
        for (publisher, last) in settled {
            let known = &mut self.local[slot_of(*publisher)];
            if known.publisher <= *publisher {
                let next = last.saturating_add(1);
                let next = if known.publisher == *publisher { known.next.max(next) } else { next };
                *known = PublisherProgress { publisher: *publisher, next };
            }
        }
        self.drops_seen = drops;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: [u8; 16] = [7; 16];

    fn loss_tracker(publishers: &[(u64, u64)], serial: u64) -> LossTracker {
        let publishers = publishers.to_vec();
        LossTracker::new(&Published { serial, publishers }, 0, (&[], 0), 10)
    }

    fn published(publisher: u64, last: u64) -> RemoteLastSequence {
        RemoteLastSequence { node: NODE, publisher, last, first: 0, since: 10, at: 10 }
    }

    fn id(serial: u64, slot: u64) -> u64 {
        serial << 8 | slot
    }

    #[test]
    fn skipped_numbers_of_a_local_publisher_are_missed() {
        let (old, new, next) = (id(2, 0), id(4, 1), id(5, 0));
        let mut loss_tracker = loss_tracker(&[(old, 9)], 3);
        for (publisher, sequence, missed) in [
            (old, 10, 0),
            (old, 13, 2),
            // A later publisher: all of its messages are for this subscriber.
            (new, 3, 4),
            (old, 14, 4),
            // It has the slot of a publisher that left.
            (next, 1, 4),
            (next, 3, 5),
        ] {
            loss_tracker.on_local(publisher, sequence);
            assert_eq!(loss_tracker.missed(), missed, "{publisher} {sequence}");
        }
        assert_eq!(
            (loss_tracker.take_unreported(), loss_tracker.unreported(), loss_tracker.missed()),
            (5, 0, 5)
        );
        // A message published during the subscription may have been counted before.
        loss_tracker.on_local(next, 2);
        loss_tracker.on_local(next, 4);
        // A publisher that left in the meantime is unknown.
        loss_tracker.on_local(id(1, 5), 70);
        assert_eq!(loss_tracker.missed(), 5);
    }

    #[test]
    fn skipped_numbers_of_a_remote_publisher_are_missed() {
        let known_start = RemoteStart { node: NODE, first: 5, since: 10 };
        let unreported = RemoteStart { first: 0, ..known_start };
        let late = RemoteStart { since: 9, ..known_start };
        let other = RemoteStart { node: [8; 16], ..unreported };
        let mut loss_tracker = loss_tracker(&[], 0);
        for (start, publisher, sequence, missed) in [
            (known_start, id(1, 0), 8, 3),
            (unreported, id(1, 0), 9, 3),
            // The connection was lost in the meantime, and not all messages were retained for this
            // node.
            (unreported, id(1, 0), 3000, 2993),
            (unreported, id(1, 1), 7, 2993),
            (late, id(1, 2), 7, 2993),
            (other, id(1, 0), 40, 2993),
            // Another publisher in the same slot is new.
            (unreported, id(9, 0), 2, 2994),
            // The topic was re-created.
            (unreported, id(1, 0), 1, 2994),
            (unreported, id(1, 0), 3, 2995),
        ] {
            loss_tracker.on_inbound(start, publisher, sequence);
            assert_eq!(loss_tracker.missed(), missed, "{start:?} {publisher} {sequence}");
        }
    }

    #[test]
    fn messages_missing_behind_the_last_are_counted_once() {
        let (old, new, early) = (id(2, 0), id(5, 1), id(1, 3));
        let mut loss_tracker = loss_tracker(&[(old, 9)], 4);
        loss_tracker.on_local(old, 10);
        let settled = [(old, 12), (new, 3), (early, 50)];
        assert_eq!(
            (loss_tracker.has_new_drops(7), loss_tracker.missing_after_last(&settled)),
            (true, 5)
        );
        loss_tracker.settle(&settled, 7);
        assert_eq!((loss_tracker.has_new_drops(7), loss_tracker.missed()), (false, 5));
        loss_tracker.settle(&settled, 7);
        loss_tracker.on_local(new, 4);
        loss_tracker.on_local(old, 14);
        assert_eq!(loss_tracker.missed(), 6);
    }

    #[test]
    fn messages_behind_the_last_inbound_are_missed_once() {
        let start = RemoteStart { node: NODE, first: 0, since: 10 };
        let mut loss_tracker = loss_tracker(&[], 0);
        loss_tracker.on_inbound(start, id(3, 0), 7);
        let last_sequences = [published(id(3, 0), 12)];
        assert_eq!(
            (loss_tracker.missing_remote(&last_sequences), loss_tracker.has_new_last_sequences(1)),
            (5, true)
        );
        loss_tracker.settle_remote(&last_sequences, 1);
        loss_tracker.settle_remote(&last_sequences, 1);
        assert_eq!((loss_tracker.missed(), loss_tracker.has_new_last_sequences(1)), (5, false));
        // The next message is behind it.
        loss_tracker.on_inbound(start, id(3, 0), 14);
        assert_eq!(loss_tracker.missed(), 6);
        // A late report, or one of a publisher whose slot was reused.
        loss_tracker.settle_remote(&[published(id(3, 0), 12), published(id(2, 0), 50)], 2);
        assert_eq!(loss_tracker.missed(), 6);
        // Another publisher in the slot: all of its messages are for this subscriber.
        loss_tracker.settle_remote(&[published(id(4, 0), 3)], 3);
        loss_tracker.on_inbound(start, id(4, 0), 5);
        assert_eq!(loss_tracker.missed(), 10);
    }

    #[test]
    fn all_messages_of_a_publisher_may_be_missed() {
        let mut loss_tracker = loss_tracker(&[], 0);
        // The number of its first message is unknown.
        loss_tracker.settle_remote(&[published(id(1, 0), 9)], 1);
        assert_eq!(loss_tracker.missed(), 0);
        loss_tracker.settle_remote(&[RemoteLastSequence { first: 4, ..published(id(1, 1), 9) }], 2);
        assert_eq!(loss_tracker.missed(), 6);
        // The subscription is later than its first messages.
        let late = RemoteLastSequence { first: 4, since: 9, ..published(id(1, 2), 9) };
        loss_tracker.settle_remote(&[late], 3);
        assert_eq!(loss_tracker.missed(), 6);
    }

    #[test]
    fn messages_lost_before_the_subscription_are_not_counted() {
        let before = Published { serial: 0, publishers: Vec::new() };
        let last_sequences = [
            RemoteLastSequence { first: 1, ..published(id(1, 0), 9) },
            // Messages were received since.
            RemoteLastSequence { first: 1, since: 4, at: 9, ..published(id(1, 1), 9) },
        ];
        let mut loss_tracker = LossTracker::new(&before, 0, (&last_sequences, 2), 10);
        assert!(!loss_tracker.has_new_last_sequences(2));
        // Each change is checked against all publishers.
        loss_tracker.settle_remote(&last_sequences, 3);
        let later = last_sequences.map(|before| RemoteLastSequence {
            last: before.last + 3,
            at: 12,
            ..before
        });
        loss_tracker.settle_remote(&later[..1], 4);
        assert_eq!(loss_tracker.missed(), 3);
        // Messages 10 and 11 of the other publisher were not covered by a report.
        loss_tracker.on_inbound(RemoteStart { node: NODE, first: 1, since: 4 }, id(1, 1), 12);
        loss_tracker.settle_remote(&later, 5);
        assert_eq!(loss_tracker.missed(), 3);
    }
}
