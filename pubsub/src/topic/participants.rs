//! Publishers and subscribers of a topic on this node.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering::Acquire;

use ipc::{Participant, SubscriptionId, Words};

use super::TopicWords;
use super::layout::{DROPS, SERIAL};
use super::publishers::{self, Published};
use super::subscribers::SubscriberSlot;
use super::{PublisherInfo, SubscriberInfo};
use crate::clock;
use crate::pool::Direction;
use crate::report::{ReportedSubscriber, Row};

impl<W: Words + Clone> TopicWords<W> {
    /// The present publishers of this node.
    pub(crate) fn publishers(&self) -> Vec<PublisherInfo> {
        publishers::slots(self.words()).filter_map(|slot| slot.seen()).collect()
    }

    /// Subscriptions of the local queue. Each has one of the inbound queue, too, except those of
    /// roles.
    pub(crate) fn subscribers(&self) -> Vec<SubscriberInfo> {
        self.local().subscription_ids().map(|id| self.subscriber_info(id, false)).collect()
    }

    /// Evicted subscribers that still hold messages of this node.
    fn evicted_subscribers(&self) -> impl Iterator<Item = SubscriberInfo> {
        self.local().evicted_holders().into_iter().map(|(id, _)| self.subscriber_info(id, true))
    }

    fn subscriber_info(&self, local: SubscriptionId, is_evicted: bool) -> SubscriberInfo {
        let slot = SubscriberSlot::find(self.words(), Direction::Local, local);
        let inbound = slot.as_ref().and_then(|slot| {
            let [_, inbound] = slot.subscription_ids();
            self.inbound().find_subscription(inbound)
        });
        let of_other_nodes = inbound.map_or((0, 0), |id| self.inbound().backlog_of(id));
        let (unread, held) = self.local().backlog_of(local);
        SubscriberInfo {
            participant: local.participant(),
            cursor: self.local().progress_of(local).0,
            unread: unread + of_other_nodes.0,
            held: held + of_other_nodes.1,
            is_evicted,
            missed: slot.map_or(0, |slot| slot.missed()),
        }
    }

    /// The last sequences of all publishers of this node.
    pub(crate) fn published(&self) -> Published {
        // First: a publisher that is created in the meantime is a later one.
        let serial = self.words().load(SERIAL, Acquire);
        let publishers = self.publishers().iter().map(|seen| (seen.id, seen.sequence)).collect();
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

    /// Tells whether there are publishers, and whether there are subscribers that are no roles.
    /// Cheap: [`subscribers`](Self::subscribers) inspects all messages.
    pub(crate) fn activity(&self) -> (bool, bool) {
        let publishes = publishers::slots(self.words()).any(|slot| slot.seen().is_some());
        let is_process = |id: SubscriptionId| !id.participant().is_some_and(Participant::is_role);
        (publishes, self.local().subscription_ids().any(is_process))
    }

    /// The present publishers and the last ones of free slots, each with its last finished
    /// sequence.
    pub(crate) fn last_of_all(&self) -> Vec<(u64, u64)> {
        publishers::slots(self.words()).filter_map(|slot| slot.last()).collect()
    }

    /// The last publishers of free slots that published, each with its last sequence.
    pub(crate) fn ended_publishers(&self) -> Vec<(u64, u64)> {
        let free = publishers::slots(self.words()).filter(|slot| slot.participant().is_none());
        free.filter_map(|slot| slot.last()).filter(|(_, last)| *last > 0).collect()
    }

    /// The present publishers and the last ones of free slots, each with the sequence that it has
    /// begun last.
    pub(super) fn begun_of_all(&self) -> Vec<(u64, u64)> {
        publishers::slots(self.words()).filter_map(|slot| slot.begun()).collect()
    }

    /// Returns true if all messages before a position were delivered to other nodes, or given up.
    pub(crate) fn is_replicated_until(&self, position: u64) -> bool {
        let is_role = |id: &SubscriptionId| id.participant().is_some_and(Participant::is_role);
        let mut roles = self.local().subscription_ids().filter(is_role);
        roles.all(|id| self.local().oldest_unreleased(id) >= position)
    }

    /// All participants that own a slot or a subscription.
    pub(crate) fn owners(&self) -> BTreeSet<Participant> {
        let publishers = publishers::slots(self.words()).filter_map(|slot| slot.participant());
        let queues = [self.local(), self.inbound()].into_iter();
        let subscription_ids = queues.flat_map(|queue| queue.subscription_ids());
        let subscribers = subscription_ids.filter_map(|id| id.participant());
        publishers.chain(subscribers).chain(self.writer()).collect()
    }

    pub(crate) fn report(&self) -> Vec<Row> {
        let settings = self.settings();
        let name = || self.name().to_owned();
        let mut rows = vec![Row::Topic {
            name: name(),
            number: self.number(),
            place: settings.place.to_string(),
            reliability: settings.reliability.to_string(),
            depth: settings.depth,
            max_held: settings.max_held,
            largest: settings.largest,
            loans: settings.loans,
            release_microseconds: settings.release_microseconds,
            type_name: settings.type_name.map(String::from),
            published: self.local().position(),
            arrived: self.inbound().position(),
            dropped: self.local().dropped() + self.inbound().dropped(),
            reserves: settings.reserves(self.reserved_publishers()),
        }];
        rows.extend(self.publishers().into_iter().map(|found| Row::Publisher {
            topic: name(),
            participant: found.participant.to_string(),
            publisher: found.id,
            messages: found.messages,
            bytes: found.bytes,
            waits_microseconds:
                found.waits_since.map_or(0, |since| clock::now().saturating_sub(since) / 1000),
        }));
        let subscribers = self.subscribers().into_iter().chain(self.evicted_subscribers());
        rows.extend(subscribers.map(|found| Row::Subscriber {
            topic: name(),
            participant: match found.participant {
                Some(participant) if participant.is_role() => ReportedSubscriber::Replication,
                participant => ReportedSubscriber::Process(
                    participant.map(|it| it.to_string()).unwrap_or_default(),
                ),
            },
            unread: found.unread.into(),
            held: found.held.into(),
            is_evicted: found.is_evicted,
            missed: found.missed,
        }));
        let missed = self.missed_by_nodes();
        if missed.nodes > 0 {
            rows.push(Row::Missed {
                topic: name(),
                nodes: missed.nodes,
                messages: missed.messages,
            });
        }
        rows
    }
}
