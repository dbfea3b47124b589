//! Publishers and subscribers of a topic on this node.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering::Acquire;

use ipc::{Participant, SubscriptionId, Words};

use super::TopicWords;
use super::layout::DROPS;
use super::publishers::{self, Published, PublisherInfo};
use super::subscribers::SubscriberSlot;
use crate::pool::Direction;

/// Publishers and subscribers of a topic, at about the same time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TopicParticipants {
    pub(crate) publishers: Vec<PublisherInfo>,
    /// Subscriptions of the local queue. Each has one of the inbound queue, too, except those of
    /// roles.
    pub(crate) subscribers: Vec<SubscriberInfo>,
}

/// A subscription.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SubscriberInfo {
    /// Its process; None for an invalid number.
    pub(crate) participant: Option<Participant>,
    /// The position that it reads next.
    pub(crate) cursor: u64,
    /// Unread messages, and held ones.
    pub(crate) unread: u32,
    pub(crate) held: u32,
    /// Missed messages, as the subscriber reports itself.
    pub(crate) missed: u64,
}

impl<W: Words + Clone> TopicWords<W> {
    pub(crate) fn participants(&self) -> TopicParticipants {
        let publishers = publishers::slots(self.words()).filter_map(|slot| slot.seen());
        let seen = |subscription_id: SubscriptionId| {
            let slot = SubscriberSlot::find(self.words(), Direction::Local, subscription_id);
            let (unread, held) = self.local().backlog_of(subscription_id);
            SubscriberInfo {
                participant: subscription_id.who(),
                cursor: self.local().progress_of(subscription_id).0,
                unread,
                held,
                missed: slot.map_or(0, |slot| slot.missed()),
            }
        };
        TopicParticipants {
            publishers: publishers.collect(),
            subscribers: self.local().subscription_ids().map(seen).collect(),
        }
    }

    /// The last sequences of all publishers of this node.
    pub(crate) fn published(&self) -> Published {
        // First: a publisher that is created in the meantime is a later one.
        let serial = publishers::last_serial(self.words());
        let seen = publishers::slots(self.words()).filter_map(|slot| slot.seen());
        let publishers = seen.map(|seen| (seen.id, seen.sequence)).collect();
        Published { serial, publishers }
    }

    /// How often publishers of this node found no room, and dropped a message.
    #[inline]
    pub(crate) fn drops(&self) -> u64 {
        self.words().load(DROPS, Acquire)
    }

    /// The present publishers and the last ones of free slots, each with its last sequence. None
    /// while one of them is publishing, since that message may or may not be delivered.
    pub(crate) fn settled(&self) -> Option<Vec<(u64, u64)>> {
        let used = publishers::slots(self.words()).filter(|slot| slot.is_used());
        used.map(|slot| slot.settled()).collect()
    }

    /// Whether there are publishers, and subscribers that are no roles. Cheap:
    /// [`participants`](Self::participants) inspects all messages.
    pub(crate) fn activity(&self) -> (bool, bool) {
        let publishes = publishers::slots(self.words()).any(|slot| slot.seen().is_some());
        let is_process = |subscription_id: SubscriptionId| {
            !subscription_id.who().is_some_and(Participant::is_role)
        };
        (publishes, self.local().subscription_ids().any(is_process))
    }

    /// The present publishers and the last ones of free slots, each with its last finished
    /// sequence.
    pub(crate) fn last_of_all(&self) -> Vec<(u64, u64)> {
        publishers::slots(self.words()).filter_map(|slot| slot.last()).collect()
    }

    /// All participants that own a slot or a subscription.
    pub(crate) fn owners(&self) -> BTreeSet<Participant> {
        let publishers = publishers::slots(self.words()).filter_map(|slot| slot.participant());
        let subscription_ids =
            [self.local(), self.inbound()].into_iter().flat_map(|queue| queue.subscription_ids());
        publishers
            .chain(subscription_ids.filter_map(|subscription_id| subscription_id.who()))
            .chain(self.writer())
            .collect()
    }
}
