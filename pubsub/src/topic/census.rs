//! Who takes part in a topic, on this node.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering::Acquire;

use ipc::{Participant, Seat, Words};

use super::TopicWords;
use super::alarm::Alarm;
use super::layout::DROPS;
use super::publishers::{self, Published, PublisherSeen};
use crate::pool::Direction;

/// Who takes part in a topic, at about the same time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Census {
    pub(crate) publishers: Vec<PublisherSeen>,
    /// Those of what is published here; each has a seat at the other queue, too, but for
    /// those in the names of roles.
    pub(crate) subscribers: Vec<SubscriberSeen>,
}

/// A subscription.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SubscriberSeen {
    /// In whose name; None for one that names nobody.
    pub(crate) who: Option<Participant>,
    pub(crate) seat: Seat,
    /// The position that it reads next.
    pub(crate) cursor: u64,
    /// Messages that it has still to read, and that it holds.
    pub(crate) unread: u32,
    pub(crate) held: u32,
    /// Messages that it missed, as it says itself.
    pub(crate) missed: u64,
}

impl<W: Words + Clone> TopicWords<W> {
    pub(crate) fn census(&self) -> Census {
        let publishers = publishers::lines(self.words()).filter_map(|line| line.seen());
        Census {
            publishers: publishers.collect(),
            subscribers: self.subscriptions(Direction::Here),
        }
    }

    /// What was published here up to now.
    pub(crate) fn published(&self) -> Published {
        // First: whoever comes meanwhile comes later.
        let serial = publishers::last_serial(self.words());
        let seen = publishers::lines(self.words()).filter_map(|line| line.seen());
        let publishers = seen.map(|seen| (seen.id, seen.sequence)).collect();
        Published { serial, publishers }
    }

    /// How often publishers here found no room, and dropped a message.
    #[inline]
    pub(crate) fn drops(&self) -> u64 {
        self.words().load(DROPS, Acquire)
    }

    /// The publishers that are there, and those that left last, each with the number of its last
    /// message. None if one of them is at a message now, which may be delivered or not.
    pub(crate) fn settled(&self) -> Option<Vec<(u64, u64)>> {
        let used = publishers::lines(self.words()).filter(|line| line.is_used());
        used.map(|line| line.settled()).collect()
    }

    /// Does somebody publish, and does a process subscribe? In passing: a [census](Self::census)
    /// looks through all messages that are kept.
    pub(crate) fn takes_part(&self) -> (bool, bool) {
        let publishes = publishers::lines(self.words()).any(|line| line.seen().is_some());
        let is_process = |seat: Seat| !seat.who().is_some_and(Participant::is_role);
        (publishes, self.here().seats().any(is_process))
    }

    /// The publishers that are there, and those that left last, each with the number of its last
    /// message but for one that it is at now.
    pub(crate) fn last_of_all(&self) -> Vec<(u64, u64)> {
        publishers::lines(self.words()).filter_map(|line| line.last()).collect()
    }

    /// All in whose names there is anything in it.
    pub(crate) fn names(&self) -> BTreeSet<Participant> {
        let publishers = publishers::lines(self.words()).filter_map(|line| line.who());
        let seats = [self.here(), self.arrivals()].into_iter().flat_map(|queue| queue.seats());
        publishers.chain(seats.filter_map(|seat| seat.who())).chain(self.writer()).collect()
    }

    /// All subscriptions to one of the queues.
    pub(crate) fn subscriptions(&self, direction: Direction) -> Vec<SubscriberSeen> {
        let queue = self.queue(direction);
        let seen = |seat: Seat| {
            let (cursor, _) = queue.progress_of(seat);
            let missed = Alarm::find(self.words(), seat, direction == Direction::Arrivals)
                .map_or(0, |line| line.missed());
            let (unread, held) = queue.backlog_of(seat);
            SubscriberSeen { who: seat.who(), seat, cursor, unread, held, missed }
        };
        queue.seats().map(seen).collect()
    }
}
