//! What a subscriber misses, told by the numbers that publishers give their messages.
//!
//! Each publisher numbers its messages from 1 on, whatever becomes of them. So a number that is skipped
//! is a message that this subscriber does not get, wherever it was lost and why: dropped for want of
//! room, dropped on the way from another node, never written, or published while the node that carries
//! it had given this one up. Nothing else counts losses for readers.

use std::collections::BTreeMap;

use ipc::Words;

use crate::pool::SampleInfo;
use crate::topic::{PUBLISHER_SLOTS, Published, RemoteHeartbeat};

/// One that is known: its name, and the number of its next message.
#[derive(Debug, Clone, Copy, Default)]
struct PublisherProgress {
    publisher: u64,
    next: u64,
}

impl PublisherProgress {
    /// A message came; gives how many are missing before it.
    #[inline]
    fn on_local(&mut self, sequence: u64) -> u64 {
        let missed = sequence.saturating_sub(self.next);
        self.next = self.next.max(sequence.saturating_add(1));
        missed
    }
}

/// From where on the messages of a publisher at another node are for this one, as far as it was told.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RemoteStart {
    node: [u8; 16],
    /// The number of the first that is; 0 if that is not known.
    first: u64,
    /// Who subscribes from before this position of the arrivals on is to get all of them.
    since: u64,
}

impl RemoteStart {
    fn of_published(heartbeat: &RemoteHeartbeat) -> Self {
        Self { node: heartbeat.node, first: heartbeat.first, since: heartbeat.since }
    }

    /// As it is noted of a message.
    pub(crate) fn of<W: Words>(sample_info: &SampleInfo<'_, W>) -> Self {
        let (first, since) = sample_info.beginning();
        Self { node: sample_info.origin(), first, since }
    }
}

/// Publishers of other nodes that are known at a time: nodes come with ever new identities.
const MAX_REMOTE_PUBLISHERS: usize = 4096;

#[derive(Debug)]
pub(crate) struct LossTracker {
    /// Publishers of this node, by their lines: a line is one's at a time.
    local: [PublisherProgress; PUBLISHER_SLOTS],
    /// The last publisher that had been made when this one subscribed.
    serial: u64,
    /// Those of other nodes, by node and line there.
    remote: BTreeMap<([u8; 16], usize), PublisherProgress>,
    /// The position of the first message of other nodes that was to come.
    since: u64,
    /// Changes of what other nodes have published that were looked at.
    changes_seen: u64,
    missed: u64,
    /// Of these, not told of yet.
    unreported: u64,
    /// Messages that publishers of this node dropped, as far as they were looked for.
    drops_seen: u64,
}

fn slot_of(publisher: u64) -> usize {
    (publisher & 0xff) as usize % PUBLISHER_SLOTS
}

impl LossTracker {
    /// From what was published before, here and elsewhere, and the position of the next message that
    /// arrives.
    pub(crate) fn new(
        before: &Published,
        drops_seen: u64,
        (remote, changes_seen): (&[RemoteHeartbeat], u64),
        since: u64,
    ) -> Self {
        let mut local = [PublisherProgress::default(); PUBLISHER_SLOTS];
        for (publisher, last) in &before.publishers {
            local[slot_of(*publisher)] =
                PublisherProgress { publisher: *publisher, next: last.saturating_add(1) };
        }
        // Of those of which messages came since, it is not known how far they had come.
        let known = remote.iter().filter(|heartbeat| heartbeat.at == since);
        let remote = known.map(|heartbeat| {
            let known = PublisherProgress {
                publisher: heartbeat.publisher,
                next: heartbeat.last.saturating_add(1),
            };
            ((heartbeat.node, slot_of(heartbeat.publisher)), known)
        });
        let (remote, serial) = (remote.collect(), before.serial);
        let (missed, unreported) = (0, 0);
        Self { local, serial, remote, since, changes_seen, missed, unreported, drops_seen }
    }

    pub(crate) fn missed(&self) -> u64 {
        self.missed
    }

    /// Of these, those that were not told of yet.
    pub(super) fn unreported(&self) -> u64 {
        self.unreported
    }

    /// Those are told of now.
    pub(super) fn take_unreported(&mut self) -> u64 {
        std::mem::take(&mut self.unreported)
    }

    /// So many more are missing.
    pub(super) fn add_missed(&mut self, count: u64) {
        self.missed = self.missed.wrapping_add(count);
        self.unreported = self.unreported.wrapping_add(count);
    }

    /// A message of this node came. True if others are missing before it.
    #[inline]
    pub(super) fn on_local(&mut self, publisher: u64, sequence: u64) -> bool {
        let known = &mut self.local[slot_of(publisher)];
        if known.publisher != publisher {
            // One that came before this subscribed, and left since, is known by nothing.
            let next = if publisher >> 8 > self.serial { 1 } else { sequence };
            *known = PublisherProgress { publisher, next };
        }
        let missed = known.on_local(sequence);
        if missed > 0 {
            self.add_missed(missed);
        }
        missed > 0
    }

    /// A message of another node came. True if others are missing before it.
    pub(crate) fn on_inbound(&mut self, start: RemoteStart, publisher: u64, sequence: u64) -> bool {
        let key = (start.node, slot_of(publisher));
        let next = self.first_of(&start).unwrap_or(sequence);
        let unknown = PublisherProgress { publisher, next };
        if self.remote.len() >= MAX_REMOTE_PUBLISHERS && !self.remote.contains_key(&key) {
            // Of that one it is not counted what is missing before its next message.
            self.remote.pop_first();
        }
        let known = self.remote.entry(key).or_insert(unknown);
        if known.publisher < publisher {
            // It has the line of one that left.
            *known = PublisherProgress { publisher, next: 1 };
        } else if known.publisher > publisher || sequence < known.next {
            // The topic was made anew there.
            *known = PublisherProgress { publisher, next: sequence };
        }
        let missed = known.on_local(sequence);
        if missed > 0 {
            self.add_missed(missed);
        }
        missed > 0
    }

    /// The first message of a publisher that is for this one, if nothing of it came yet and that was told.
    fn first_of(&self, start: &RemoteStart) -> Option<u64> {
        (start.first != 0 && self.since <= start.since).then_some(start.first)
    }

    /// Has it been noted what other nodes have published, and not been looked at yet?
    pub(super) fn has_new_heartbeats(&self, changes: u64) -> bool {
        self.changes_seen != changes
    }

    /// What is known of such a publisher, if nothing of it is to come of what was published up to then.
    fn known_of(&self, heartbeat: &RemoteHeartbeat) -> PublisherProgress {
        let behind = heartbeat.last.saturating_add(1);
        let start = RemoteStart::of_published(heartbeat);
        match self.remote.get(&(heartbeat.node, slot_of(heartbeat.publisher))) {
            Some(known) if known.publisher == heartbeat.publisher => *known,
            Some(known) if known.publisher < heartbeat.publisher => {
                PublisherProgress { publisher: heartbeat.publisher, next: 1 }
            }
            // It has the line of that one by now.
            Some(known) => *known,
            None => {
                let next = self.first_of(&start).unwrap_or(behind);
                PublisherProgress { publisher: heartbeat.publisher, next }
            }
        }
    }

    /// Is it about messages that were to come since this one subscribed?
    fn concerns(&self, heartbeat: &RemoteHeartbeat) -> bool {
        heartbeat.at >= self.since
    }

    fn missing_of_publisher(&self, heartbeat: &RemoteHeartbeat) -> u64 {
        let known = self.known_of(heartbeat);
        let is_its_own = known.publisher == heartbeat.publisher && self.concerns(heartbeat);
        if is_its_own { heartbeat.last.saturating_add(1).saturating_sub(known.next) } else { 0 }
    }

    /// Nothing of other nodes is to come of what they had published: how many more are missing.
    pub(super) fn missing_remote(&self, heartbeat: &[RemoteHeartbeat]) -> u64 {
        heartbeat
            .iter()
            .map(|heartbeat| self.missing_of_publisher(heartbeat))
            .fold(0, u64::wrapping_add)
    }

    /// Counts them.
    pub(super) fn settle_remote(&mut self, heartbeat: &[RemoteHeartbeat], changes: u64) {
        for heartbeat in heartbeat {
            if !self.concerns(heartbeat) {
                continue;
            }
            self.add_missed(self.missing_of_publisher(heartbeat));
            let mut known = self.known_of(heartbeat);
            if known.publisher == heartbeat.publisher {
                known.next = known.next.max(heartbeat.last.saturating_add(1));
                let key = (heartbeat.node, slot_of(heartbeat.publisher));
                if self.remote.len() < MAX_REMOTE_PUBLISHERS || self.remote.contains_key(&key) {
                    self.remote.insert(key, known);
                }
            }
        }
        self.changes_seen = changes;
    }

    /// Have publishers of this node dropped messages that were not looked for yet?
    pub(super) fn has_new_drops(&self, drops: u64) -> bool {
        self.drops_seen != drops
    }

    /// Nothing of this node is to come of what was published up to now: how many more are missing.
    pub(super) fn missing_after_last(&self, settled: &[(u64, u64)]) -> u64 {
        let missing = settled.iter().map(|(publisher, last)| {
            let known = self.local[slot_of(*publisher)];
            let next = if known.publisher == *publisher { known.next } else { 1 };
            let is_its_own = known.publisher == *publisher || publisher >> 8 > self.serial;
            if is_its_own { last.saturating_add(1).saturating_sub(next) } else { 0 }
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

    fn published(publisher: u64, last: u64) -> RemoteHeartbeat {
        RemoteHeartbeat { node: NODE, publisher, last, first: 0, since: 10, at: 10 }
    }

    fn id(serial: u64, slot: u64) -> u64 {
        serial << 8 | slot
    }

    #[test]
    fn skipped_numbers_of_a_publisher_are_missed() {
        let (old, new, next) = (id(2, 0), id(4, 1), id(5, 0));
        let mut loss_tracker = loss_tracker(&[(old, 9)], 3);
        for (publisher, sequence, missed) in [
            (old, 10, 0),
            (old, 13, 2),
            // One that came later: all of its messages were to come.
            (new, 3, 4),
            (old, 14, 4),
            // It has the line of one that left.
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
        // What was being published as this one subscribed may have been counted before.
        loss_tracker.on_local(next, 2);
        loss_tracker.on_local(next, 4);
        // One that left meanwhile is known by nothing.
        loss_tracker.on_local(id(1, 5), 70);
        assert_eq!(loss_tracker.missed(), 5);
    }

    #[test]
    fn skipped_numbers_of_another_node_are_missed() {
        let heartbeat = RemoteStart { node: NODE, first: 5, since: 10 };
        let unreported = RemoteStart { first: 0, ..heartbeat };
        let late = RemoteStart { since: 9, ..heartbeat };
        let other = RemoteStart { node: [8; 16], ..unreported };
        let mut loss_tracker = loss_tracker(&[], 0);
        for (start, publisher, sequence, missed) in [
            (heartbeat, id(1, 0), 8, 3),
            (unreported, id(1, 0), 9, 3),
            // The connection was lost meanwhile, and what was kept for this node was not all.
            (unreported, id(1, 0), 3000, 2993),
            (unreported, id(1, 1), 7, 2993),
            (late, id(1, 2), 7, 2993),
            (other, id(1, 0), 40, 2993),
            // A publisher that has another one's line is new.
            (unreported, id(9, 0), 2, 2994),
            // The topic was made anew.
            (unreported, id(1, 0), 1, 2994),
            (unreported, id(1, 0), 3, 2995),
        ] {
            loss_tracker.on_inbound(start, publisher, sequence);
            assert_eq!(loss_tracker.missed(), missed, "{start:?} {publisher} {sequence}");
        }
    }

    #[test]
    fn what_is_missing_behind_the_last_one_is_counted_once() {
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
    fn what_another_node_published_behind_the_last_arrival_is_missed_once() {
        let start = RemoteStart { node: NODE, first: 0, since: 10 };
        let mut loss_tracker = loss_tracker(&[], 0);
        loss_tracker.on_inbound(start, id(3, 0), 7);
        let heartbeat = [published(id(3, 0), 12)];
        assert_eq!(
            (loss_tracker.missing_remote(&heartbeat), loss_tracker.has_new_heartbeats(1)),
            (5, true)
        );
        loss_tracker.settle_remote(&heartbeat, 1);
        loss_tracker.settle_remote(&heartbeat, 1);
        assert_eq!((loss_tracker.missed(), loss_tracker.has_new_heartbeats(1)), (5, false));
        // The next message is behind it.
        loss_tracker.on_inbound(start, id(3, 0), 14);
        assert_eq!(loss_tracker.missed(), 6);
        // Told late, or of a publisher that left the line to another.
        loss_tracker.settle_remote(&[published(id(3, 0), 12), published(id(2, 0), 50)], 2);
        assert_eq!(loss_tracker.missed(), 6);
        // One that took the line: all of its messages were to come.
        loss_tracker.settle_remote(&[published(id(4, 0), 3)], 3);
        loss_tracker.on_inbound(start, id(4, 0), 5);
        assert_eq!(loss_tracker.missed(), 10);
    }

    #[test]
    fn all_messages_of_a_publisher_may_be_missed() {
        let mut loss_tracker = loss_tracker(&[], 0);
        // Nothing is known of its first message.
        loss_tracker.settle_remote(&[published(id(1, 0), 9)], 1);
        assert_eq!(loss_tracker.missed(), 0);
        loss_tracker.settle_remote(&[RemoteHeartbeat { first: 4, ..published(id(1, 1), 9) }], 2);
        assert_eq!(loss_tracker.missed(), 6);
        // It subscribed after the first ones had come.
        let late = RemoteHeartbeat { first: 4, since: 9, ..published(id(1, 2), 9) };
        loss_tracker.settle_remote(&[late], 3);
        assert_eq!(loss_tracker.missed(), 6);
    }

    #[test]
    fn what_was_missed_before_it_subscribed_is_not_counted() {
        let before = Published { serial: 0, publishers: Vec::new() };
        let heartbeat = [
            RemoteHeartbeat { first: 1, ..published(id(1, 0), 9) },
            // Messages came since.
            RemoteHeartbeat { first: 1, since: 4, at: 9, ..published(id(1, 1), 9) },
        ];
        let mut loss_tracker = LossTracker::new(&before, 0, (&heartbeat, 2), 10);
        assert!(!loss_tracker.has_new_heartbeats(2));
        // It is looked through again with each change.
        loss_tracker.settle_remote(&heartbeat, 3);
        let later = heartbeat.map(|heartbeat| RemoteHeartbeat {
            last: heartbeat.last + 3,
            at: 12,
            ..heartbeat
        });
        loss_tracker.settle_remote(&later[..1], 4);
        assert_eq!(loss_tracker.missed(), 3);
        // Of the other one messages had come that nothing told of: 10 and 11.
        loss_tracker.on_inbound(RemoteStart { node: NODE, first: 1, since: 4 }, id(1, 1), 12);
        loss_tracker.settle_remote(&later, 5);
        assert_eq!(loss_tracker.missed(), 3);
    }
}
