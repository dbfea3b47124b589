//! Who takes part in a topic, on this node.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering::Acquire;

use ipc::{Participant, SubscriptionId, Words};

use super::TopicWords;
use super::layout::DROPS;
use super::publishers::{self, Published, PublisherInfo};
use super::subscribers::SubscriberSlot;
use crate::pool::Direction;

/// Who takes part in a topic, at about the same time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TopicParticipants {
    pub(crate) publishers: Vec<PublisherInfo>,
    /// Those of what is published here; each has a seat at the other queue, too, but for
    /// those in the names of roles.
    pub(crate) subscribers: Vec<SubscriberInfo>,
}

/// A subscription.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SubscriberInfo {
    /// In whose name; None for one that names nobody.
    pub(crate) who: Option<Participant>,
    pub(crate) subscription_id: SubscriptionId,
    /// The position that it reads next.
    pub(crate) cursor: u64,
    /// Messages that it has still to read, and that it holds.
    pub(crate) unread: u32,
    pub(crate) held: u32,
    /// Messages that it missed, as it says itself.
    pub(crate) missed: u64,
}

impl<W: Words + Clone> TopicWords<W> {
    pub(crate) fn participants(&self) -> TopicParticipants {
        let publishers = publishers::slots(self.words()).filter_map(|slot| slot.seen());
        TopicParticipants {
            publishers: publishers.collect(),
            subscribers: self.subscriptions(Direction::Local),
        }
    }

    /// What was published here up to now.
    pub(crate) fn published(&self) -> Published {
        // First: whoever comes meanwhile comes later.
        let serial = publishers::last_serial(self.words());
        let seen = publishers::slots(self.words()).filter_map(|slot| slot.seen());
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
        let used = publishers::slots(self.words()).filter(|slot| slot.is_used());
        used.map(|slot| slot.settled()).collect()
    }

    /// Does somebody publish, and does a process subscribe? In passing: a [census](Self::census)
    /// looks through all messages that are kept.
    pub(crate) fn activity(&self) -> (bool, bool) {
        let publishes = publishers::slots(self.words()).any(|slot| slot.seen().is_some());
        let is_process = |subscription_id: SubscriptionId| {
            !subscription_id.who().is_some_and(Participant::is_role)
        };
        (publishes, self.local().subscription_ids().any(is_process))
    }

    /// The publishers that are there, and those that left last, each with the number of its last
    /// message but for one that it is at now.
    pub(crate) fn last_of_all(&self) -> Vec<(u64, u64)> {
        publishers::slots(self.words()).filter_map(|slot| slot.last()).collect()
    }

    /// All in whose names there is anything in it.
    pub(crate) fn owners(&self) -> BTreeSet<Participant> {
        let publishers = publishers::slots(self.words()).filter_map(|slot| slot.who());
        let subscription_ids =
            [self.local(), self.inbound()].into_iter().flat_map(|queue| queue.subscription_ids());
        publishers
            .chain(subscription_ids.filter_map(|subscription_id| subscription_id.who()))
            .chain(self.writer())
            .collect()
    }

    /// All subscriptions to one of the queues.
    pub(crate) fn subscriptions(&self, direction: Direction) -> Vec<SubscriberInfo> {
        let queue = self.queue(direction);
        let seen = |subscription_id: SubscriptionId| {
            let (cursor, _) = queue.progress_of(subscription_id);
            let missed = SubscriberSlot::find(
                self.words(),
                subscription_id,
                direction == Direction::Inbound,
            )
            .map_or(0, |slot| slot.missed());
            let (unread, held) = queue.backlog_of(subscription_id);
            SubscriberInfo {
                who: subscription_id.who(),
                subscription_id,
                cursor,
                unread,
                held,
                missed,
            }
        };
        queue.subscription_ids().map(seen).collect()
    }
}
