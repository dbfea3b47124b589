//! Counts missed messages of a subscriber, by the sequence numbers of publishers.
//!
//! Each publisher numbers its messages from 1 on, delivered or not. So a skipped number is a
//! message that this subscriber misses, wherever and why it was lost. It was dropped for lack of
//! room or on the way from another node, never written, or published while its node had dropped
//! this one as a destination. Nothing else counts losses for subscribers.

use std::collections::BTreeMap;

use ipc::Words;

use crate::pool::SampleInfo;
use crate::topic::{
    PUBLISHER_SLOTS, Published, PublisherStart, RemoteLastSequence, RemotePublisher,
};

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

/// Where the messages of a publisher on another node start for this node, as a message of it says.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RemoteStart {
    node: [u8; 16],
    start: PublisherStart,
}

impl RemoteStart {
    pub(crate) fn of<W: Words>(sample_info: &SampleInfo<'_, W>) -> Self {
        let [first, since] = sample_info.start();
        Self { node: sample_info.origin(), start: PublisherStart::new(first, since) }
    }
}

/// What is known of publishers on other nodes when a subscriber is created.
#[derive(Debug, Default)]
pub(crate) struct RemoteAccounts {
    /// Publishers, each with the next message that is expected.
    expected: Vec<(RemotePublisher, u64)>,
    /// The count of changes of last sequences that these contain.
    changes: u64,
}

impl RemoteAccounts {
    pub(crate) fn new(expected: Vec<(RemotePublisher, u64)>, changes: u64) -> Self {
        Self { expected, changes }
    }
}

/// Maximum number of publishers on other nodes: restarted publishers are others.
const MAX_REMOTE_PUBLISHERS: usize = 4096;

#[derive(Debug)]
pub(crate) struct LossTracker {
    /// Publishers of this node by slot; a slot has one publisher at a time.
    local: [PublisherProgress; PUBLISHER_SLOTS],
    /// Serial of the last publisher that had been created when this one subscribed.
    serial: u64,
    /// The next message of publishers on other nodes.
    remote: BTreeMap<RemotePublisher, u64>,
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
        other_nodes: &RemoteAccounts,
        since: u64,
    ) -> Self {
        let mut local = [PublisherProgress::default(); PUBLISHER_SLOTS];
        for (publisher, last) in &before.publishers {
            local[slot_of(*publisher)] =
                PublisherProgress { publisher: *publisher, next: last.saturating_add(1) };
        }
        let remote = other_nodes.expected.iter().copied().collect();
        Self {
            local,
            remote,
            serial: before.serial,
            since,
            changes_seen: other_nodes.changes,
            missed: 0,
            unreported: 0,
            drops_seen,
        }
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
        let key = RemotePublisher::new(start.node, publisher);
        let next = self.next_of(&key, start.start).unwrap_or(sequence);
        let missed = sequence.saturating_sub(next);
        self.set_next(key, next.max(sequence.saturating_add(1)));
        self.add_missed(missed);
        missed > 0
    }

    /// The next message of a publisher, if it is known. A number that was reported before the account
    /// began may be of a former subscription of this node.
    fn next_of(&self, publisher: &RemotePublisher, start: PublisherStart) -> Option<u64> {
        self.remote.get(publisher).copied().max(start.first_for(self.since))
    }

    fn set_next(&mut self, publisher: RemotePublisher, next: u64) {
        if self.remote.len() >= MAX_REMOTE_PUBLISHERS && !self.remote.contains_key(&publisher) {
            // For the removed publisher, messages missing before its next one are not counted.
            self.remote.pop_first();
        }
        self.remote.insert(publisher, next);
    }

    /// The count of changes of last sequences that it has handled.
    pub(crate) fn changes_seen(&self) -> u64 {
        self.changes_seen
    }

    /// Returns true if other nodes reported last sequences that were not handled yet.
    pub(crate) fn has_new_last_sequences(&self, changes: u64) -> bool {
        self.changes_seen != changes
    }

    /// How many messages of one publisher are missing, of those since this subscription, given that
    /// none up to its last one will be delivered.
    fn missing_of_publisher(&self, reported: &RemoteLastSequence) -> u64 {
        if reported.at < self.since {
            return 0;
        }
        let behind = reported.last.saturating_add(1);
        let next = self.next_of(&reported.of_publisher(), reported.start);
        behind.saturating_sub(next.unwrap_or(behind))
    }

    /// How many messages are missing, given that no more of these are delivered.
    pub(crate) fn missing_remote(&self, last_sequences: &[RemoteLastSequence]) -> u64 {
        let missing = last_sequences.iter().map(|it| self.missing_of_publisher(it));
        missing.fold(0, u64::wrapping_add)
    }

    /// Counts them.
    pub(crate) fn settle_remote(&mut self, last_sequences: &[RemoteLastSequence], changes: u64) {
        let since = self.since;
        for reported in last_sequences.iter().filter(|it| it.at >= since) {
            self.add_missed(self.missing_of_publisher(reported));
            let publisher = reported.of_publisher();
            let known = self.remote.get(&publisher).copied().unwrap_or_default();
            self.set_next(publisher, known.max(reported.last.saturating_add(1)));
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
        LossTracker::new(&Published { serial, publishers }, 0, &RemoteAccounts::default(), 10)
    }

    fn published(publisher: u64, last: u64) -> RemoteLastSequence {
        let start = PublisherStart::new(0, 10);
        RemoteLastSequence { node: NODE, publisher, last, start, at: 10 }
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
        let of =
            |node, first, since| RemoteStart { node, start: PublisherStart::new(first, since) };
        let known_start = of(NODE, 5, 10);
        let unreported = of(NODE, 0, 10);
        let late = of(NODE, 5, 9);
        let other = of([8; 16], 0, 10);
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
            // Another publisher, in a slot that was used before.
            (of(NODE, 1, 10), id(9, 0), 2, 2994),
            (unreported, id(9, 0), 2, 2994),
            (unreported, id(9, 0), 4, 2995),
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
        let start = RemoteStart { node: NODE, start: PublisherStart::new(0, 10) };
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
        // A late report, or one of a publisher whose start is unknown.
        loss_tracker.settle_remote(&[published(id(3, 0), 12), published(id(2, 0), 50)], 2);
        assert_eq!(loss_tracker.missed(), 6);
        // All messages of a later publisher are for this subscriber.
        let later =
            RemoteLastSequence { start: PublisherStart::new(1, 10), ..published(id(4, 0), 3) };
        loss_tracker.settle_remote(&[later], 3);
        loss_tracker.on_inbound(start, id(4, 0), 5);
        assert_eq!(loss_tracker.missed(), 10);
    }

    #[test]
    fn all_messages_of_a_publisher_may_be_missed() {
        let mut loss_tracker = loss_tracker(&[], 0);
        // The number of its first message is unknown.
        loss_tracker.settle_remote(&[published(id(1, 0), 9)], 1);
        assert_eq!(loss_tracker.missed(), 0);
        let reported =
            RemoteLastSequence { start: PublisherStart::new(4, 10), ..published(id(1, 1), 9) };
        loss_tracker.settle_remote(&[reported], 2);
        assert_eq!(loss_tracker.missed(), 6);
        // The subscription is later than its first messages.
        let late =
            RemoteLastSequence { start: PublisherStart::new(4, 9), ..published(id(1, 2), 9) };
        loss_tracker.settle_remote(&[late], 3);
        assert_eq!(loss_tracker.missed(), 6);
    }

    #[test]
    fn messages_lost_before_the_subscription_are_not_counted() {
        let before = Published { serial: 0, publishers: Vec::new() };
        let expected = [(id(1, 0), 10), (id(1, 1), 12)];
        let known = |(publisher, next)| (RemotePublisher::new(NODE, publisher), next);
        let expected = expected.map(known).to_vec();
        let other_nodes = RemoteAccounts::new(expected, 2);
        let mut loss_tracker = LossTracker::new(&before, 0, &other_nodes, 10);
        assert!(!loss_tracker.has_new_last_sequences(2));
        let start = PublisherStart::new(1, 4);
        let lasts = [
            RemoteLastSequence { start, ..published(id(1, 0), 9) },
            RemoteLastSequence { start, at: 9, ..published(id(1, 1), 9) },
        ];
        // Each change is checked against all publishers.
        loss_tracker.settle_remote(&lasts, 3);
        assert_eq!(loss_tracker.missed(), 0);
        let later =
            lasts.map(|before| RemoteLastSequence { last: before.last + 3, at: 12, ..before });
        loss_tracker.settle_remote(&later, 4);
        assert_eq!(loss_tracker.missed(), 4);
        loss_tracker.on_inbound(RemoteStart { node: NODE, start }, id(1, 1), 14);
        assert_eq!(loss_tracker.missed(), 5);
    }
}
