//! What a subscriber misses, told by the numbers that publishers give their messages.
//!
//! Each publisher numbers its messages from 1 on, whatever becomes of them. So a number that is skipped
//! is a message that this subscriber does not get, wherever it was lost and why: dropped for want of
//! room, dropped on the way from another node, never written, or published while the node that carries
//! it had given this one up. Nothing else counts losses for readers.

use std::collections::BTreeMap;

use ipc::Words;

use crate::pool::Note;
use crate::topic::{MOST_PUBLISHERS, Published, PublishedElsewhere};

/// One that is known: its name, and the number of its next message.
#[derive(Debug, Clone, Copy, Default)]
struct Known {
    publisher: u64,
    next: u64,
}

impl Known {
    /// A message came; gives how many are missing before it.
    #[inline]
    fn takes(&mut self, sequence: u64) -> u64 {
        let missed = sequence.saturating_sub(self.next);
        self.next = self.next.max(sequence.saturating_add(1));
        missed
    }
}

/// From where on the messages of a publisher at another node are for this one, as far as it was told.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arrival {
    node: [u8; 16],
    /// The number of the first that is; 0 if that is not known.
    first: u64,
    /// Who subscribes from before this position of the arrivals on is to get all of them.
    since: u64,
}

impl Arrival {
    fn of_published(told: &PublishedElsewhere) -> Self {
        Self { node: told.node, first: told.first, since: told.since }
    }

    /// As it is noted of a message.
    pub(crate) fn of<W: Words>(note: &Note<'_, W>) -> Self {
        let (first, since) = note.beginning();
        Self { node: note.origin(), first, since }
    }
}

/// Publishers of other nodes that are known at a time: nodes come with ever new identities.
const MOST_ELSEWHERE: usize = 4096;

#[derive(Debug)]
pub(crate) struct Account {
    /// Publishers of this node, by their lines: a line is one's at a time.
    here: [Known; MOST_PUBLISHERS],
    /// The last publisher that had been made when this one subscribed.
    serial: u64,
    /// Those of other nodes, by node and line there.
    elsewhere: BTreeMap<([u8; 16], usize), Known>,
    /// The position of the first message of other nodes that was to come.
    since: u64,
    /// Changes of what other nodes have published that were looked at.
    changes_seen: u64,
    missed: u64,
    /// Of these, not told of yet.
    untold: u64,
    /// Messages that publishers of this node dropped, as far as they were looked for.
    drops_seen: u64,
}

fn line_of(publisher: u64) -> usize {
    (publisher & 0xff) as usize % MOST_PUBLISHERS
}

impl Account {
    /// From what was published before, here and elsewhere, and the position of the next message that
    /// arrives.
    pub(crate) fn new(
        before: &Published,
        drops_seen: u64,
        (elsewhere, changes_seen): (&[PublishedElsewhere], u64),
        since: u64,
    ) -> Self {
        let mut here = [Known::default(); MOST_PUBLISHERS];
        for (publisher, last) in &before.publishers {
            here[line_of(*publisher)] =
                Known { publisher: *publisher, next: last.saturating_add(1) };
        }
        // Of those of which messages came since, it is not known how far they had come.
        let known = elsewhere.iter().filter(|told| told.at == since);
        let elsewhere = known.map(|told| {
            let known = Known { publisher: told.publisher, next: told.last.saturating_add(1) };
            ((told.node, line_of(told.publisher)), known)
        });
        let (elsewhere, serial) = (elsewhere.collect(), before.serial);
        let (missed, untold) = (0, 0);
        Self { here, serial, elsewhere, since, changes_seen, missed, untold, drops_seen }
    }

    pub(crate) fn missed(&self) -> u64 {
        self.missed
    }

    /// Of these, those that were not told of yet.
    pub(super) fn untold(&self) -> u64 {
        self.untold
    }

    /// Those are told of now.
    pub(super) fn tell(&mut self) -> u64 {
        std::mem::take(&mut self.untold)
    }

    /// So many more are missing.
    pub(super) fn misses(&mut self, count: u64) {
        self.missed = self.missed.wrapping_add(count);
        self.untold = self.untold.wrapping_add(count);
    }

    /// A message of this node came. True if others are missing before it.
    #[inline]
    pub(super) fn takes(&mut self, publisher: u64, sequence: u64) -> bool {
        let known = &mut self.here[line_of(publisher)];
        if known.publisher != publisher {
            // One that came before this subscribed, and left since, is known by nothing.
            let next = if publisher >> 8 > self.serial { 1 } else { sequence };
            *known = Known { publisher, next };
        }
        let missed = known.takes(sequence);
        if missed > 0 {
            self.misses(missed);
        }
        missed > 0
    }

    /// A message of another node came. True if others are missing before it.
    pub(crate) fn takes_arrival(
        &mut self,
        arrival: Arrival,
        publisher: u64,
        sequence: u64,
    ) -> bool {
        let key = (arrival.node, line_of(publisher));
        let next = self.first_of(&arrival).unwrap_or(sequence);
        let unknown = Known { publisher, next };
        if self.elsewhere.len() >= MOST_ELSEWHERE && !self.elsewhere.contains_key(&key) {
            // Of that one it is not counted what is missing before its next message.
            self.elsewhere.pop_first();
        }
        let known = self.elsewhere.entry(key).or_insert(unknown);
        if known.publisher < publisher {
            // It has the line of one that left.
            *known = Known { publisher, next: 1 };
        } else if known.publisher > publisher || sequence < known.next {
            // The topic was made anew there.
            *known = Known { publisher, next: sequence };
        }
        let missed = known.takes(sequence);
        if missed > 0 {
            self.misses(missed);
        }
        missed > 0
    }

    /// The first message of a publisher that is for this one, if nothing of it came yet and that was told.
    fn first_of(&self, arrival: &Arrival) -> Option<u64> {
        (arrival.first != 0 && self.since <= arrival.since).then_some(arrival.first)
    }

    /// Has it been noted what other nodes have published, and not been looked at yet?
    pub(super) fn is_behind_elsewhere(&self, changes: u64) -> bool {
        self.changes_seen != changes
    }

    /// What is known of such a publisher, if nothing of it is to come of what was published up to then.
    fn known_of(&self, told: &PublishedElsewhere) -> Known {
        let behind = told.last.saturating_add(1);
        let arrival = Arrival::of_published(told);
        match self.elsewhere.get(&(told.node, line_of(told.publisher))) {
            Some(known) if known.publisher == told.publisher => *known,
            Some(known) if known.publisher < told.publisher => {
                Known { publisher: told.publisher, next: 1 }
            }
            // It has the line of that one by now.
            Some(known) => *known,
            None => {
                let next = self.first_of(&arrival).unwrap_or(behind);
                Known { publisher: told.publisher, next }
            }
        }
    }

    /// Is it about messages that were to come since this one subscribed?
    fn concerns(&self, told: &PublishedElsewhere) -> bool {
        told.at >= self.since
    }

    fn missing_behind_one(&self, told: &PublishedElsewhere) -> u64 {
        let known = self.known_of(told);
        let is_its_own = known.publisher == told.publisher && self.concerns(told);
        if is_its_own { told.last.saturating_add(1).saturating_sub(known.next) } else { 0 }
    }

    /// Nothing of other nodes is to come of what they had published: how many more are missing.
    pub(super) fn missing_elsewhere(&self, told: &[PublishedElsewhere]) -> u64 {
        told.iter().map(|told| self.missing_behind_one(told)).fold(0, u64::wrapping_add)
    }

    /// Counts them.
    pub(super) fn settles_elsewhere(&mut self, told: &[PublishedElsewhere], changes: u64) {
        for told in told {
            if !self.concerns(told) {
                continue;
            }
            self.misses(self.missing_behind_one(told));
            let mut known = self.known_of(told);
            if known.publisher == told.publisher {
                known.next = known.next.max(told.last.saturating_add(1));
                let key = (told.node, line_of(told.publisher));
                if self.elsewhere.len() < MOST_ELSEWHERE || self.elsewhere.contains_key(&key) {
                    self.elsewhere.insert(key, known);
                }
            }
        }
        self.changes_seen = changes;
    }

    /// Have publishers of this node dropped messages that were not looked for yet?
    pub(super) fn is_behind(&self, drops: u64) -> bool {
        self.drops_seen != drops
    }

    /// Nothing of this node is to come of what was published up to now: how many more are missing.
    pub(super) fn missing_behind(&self, settled: &[(u64, u64)]) -> u64 {
        let missing = settled.iter().map(|(publisher, last)| {
            let known = self.here[line_of(*publisher)];
            let next = if known.publisher == *publisher { known.next } else { 1 };
            let is_its_own = known.publisher == *publisher || publisher >> 8 > self.serial;
            if is_its_own { last.saturating_add(1).saturating_sub(next) } else { 0 }
        });
        missing.fold(0, u64::wrapping_add)
    }

    /// Counts them.
    pub(super) fn settles(&mut self, settled: &[(u64, u64)], drops: u64) {
        self.misses(self.missing_behind(settled));
        for (publisher, last) in settled {
            let known = &mut self.here[line_of(*publisher)];
            if known.publisher <= *publisher {
                let next = last.saturating_add(1);
                let next = if known.publisher == *publisher { known.next.max(next) } else { next };
                *known = Known { publisher: *publisher, next };
            }
        }
        self.drops_seen = drops;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: [u8; 16] = [7; 16];

    fn account(publishers: &[(u64, u64)], serial: u64) -> Account {
        let publishers = publishers.to_vec();
        Account::new(&Published { serial, publishers }, 0, (&[], 0), 10)
    }

    fn published(publisher: u64, last: u64) -> PublishedElsewhere {
        PublishedElsewhere { node: NODE, publisher, last, first: 0, since: 10, at: 10 }
    }

    fn id(serial: u64, line: u64) -> u64 {
        serial << 8 | line
    }

    #[test]
    fn skipped_numbers_of_a_publisher_are_missed() {
        let (old, new, next) = (id(2, 0), id(4, 1), id(5, 0));
        let mut account = account(&[(old, 9)], 3);
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
            account.takes(publisher, sequence);
            assert_eq!(account.missed(), missed, "{publisher} {sequence}");
        }
        assert_eq!((account.tell(), account.untold(), account.missed()), (5, 0, 5));
        // What was being published as this one subscribed may have been counted before.
        account.takes(next, 2);
        account.takes(next, 4);
        // One that left meanwhile is known by nothing.
        account.takes(id(1, 5), 70);
        assert_eq!(account.missed(), 5);
    }

    #[test]
    fn skipped_numbers_of_another_node_are_missed() {
        let told = Arrival { node: NODE, first: 5, since: 10 };
        let untold = Arrival { first: 0, ..told };
        let late = Arrival { since: 9, ..told };
        let other = Arrival { node: [8; 16], ..untold };
        let mut account = account(&[], 0);
        for (arrival, publisher, sequence, missed) in [
            (told, id(1, 0), 8, 3),
            (untold, id(1, 0), 9, 3),
            // The connection was lost meanwhile, and what was kept for this node was not all.
            (untold, id(1, 0), 3000, 2993),
            (untold, id(1, 1), 7, 2993),
            (late, id(1, 2), 7, 2993),
            (other, id(1, 0), 40, 2993),
            // A publisher that has another one's line is new.
            (untold, id(9, 0), 2, 2994),
            // The topic was made anew.
            (untold, id(1, 0), 1, 2994),
            (untold, id(1, 0), 3, 2995),
        ] {
            account.takes_arrival(arrival, publisher, sequence);
            assert_eq!(account.missed(), missed, "{arrival:?} {publisher} {sequence}");
        }
    }

    #[test]
    fn what_is_missing_behind_the_last_one_is_counted_once() {
        let (old, new, early) = (id(2, 0), id(5, 1), id(1, 3));
        let mut account = account(&[(old, 9)], 4);
        account.takes(old, 10);
        let settled = [(old, 12), (new, 3), (early, 50)];
        assert_eq!((account.is_behind(7), account.missing_behind(&settled)), (true, 5));
        account.settles(&settled, 7);
        assert_eq!((account.is_behind(7), account.missed()), (false, 5));
        account.settles(&settled, 7);
        account.takes(new, 4);
        account.takes(old, 14);
        assert_eq!(account.missed(), 6);
    }

    #[test]
    fn what_another_node_published_behind_the_last_arrival_is_missed_once() {
        let arrival = Arrival { node: NODE, first: 0, since: 10 };
        let mut account = account(&[], 0);
        account.takes_arrival(arrival, id(3, 0), 7);
        let told = [published(id(3, 0), 12)];
        assert_eq!((account.missing_elsewhere(&told), account.is_behind_elsewhere(1)), (5, true));
        account.settles_elsewhere(&told, 1);
        account.settles_elsewhere(&told, 1);
        assert_eq!((account.missed(), account.is_behind_elsewhere(1)), (5, false));
        // The next message is behind it.
        account.takes_arrival(arrival, id(3, 0), 14);
        assert_eq!(account.missed(), 6);
        // Told late, or of a publisher that left the line to another.
        account.settles_elsewhere(&[published(id(3, 0), 12), published(id(2, 0), 50)], 2);
        assert_eq!(account.missed(), 6);
        // One that took the line: all of its messages were to come.
        account.settles_elsewhere(&[published(id(4, 0), 3)], 3);
        account.takes_arrival(arrival, id(4, 0), 5);
        assert_eq!(account.missed(), 10);
    }

    #[test]
    fn all_messages_of_a_publisher_may_be_missed() {
        let mut account = account(&[], 0);
        // Nothing is known of its first message.
        account.settles_elsewhere(&[published(id(1, 0), 9)], 1);
        assert_eq!(account.missed(), 0);
        account.settles_elsewhere(&[PublishedElsewhere { first: 4, ..published(id(1, 1), 9) }], 2);
        assert_eq!(account.missed(), 6);
        // It subscribed after the first ones had come.
        let late = PublishedElsewhere { first: 4, since: 9, ..published(id(1, 2), 9) };
        account.settles_elsewhere(&[late], 3);
        assert_eq!(account.missed(), 6);
    }

    #[test]
    fn what_was_missed_before_it_subscribed_is_not_counted() {
        let before = Published { serial: 0, publishers: Vec::new() };
        let told = [
            PublishedElsewhere { first: 1, ..published(id(1, 0), 9) },
            // Messages came since.
            PublishedElsewhere { first: 1, since: 4, at: 9, ..published(id(1, 1), 9) },
        ];
        let mut account = Account::new(&before, 0, (&told, 2), 10);
        assert!(!account.is_behind_elsewhere(2));
        // It is looked through again with each change.
        account.settles_elsewhere(&told, 3);
        let later = told.map(|told| PublishedElsewhere { last: told.last + 3, at: 12, ..told });
        account.settles_elsewhere(&later[..1], 4);
        assert_eq!(account.missed(), 3);
        // Of the other one messages had come that nothing told of: 10 and 11.
        account.takes_arrival(Arrival { node: NODE, first: 1, since: 4 }, id(1, 1), 12);
        account.settles_elsewhere(&later, 5);
        assert_eq!(account.missed(), 3);
    }
}
