//! Eviction of subscribers that block publishers.
//!
//! A topic's settings limit how long a message may be held. The time counts only while a publisher
//! waits: messages that block no publisher may be held.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use ipc::{Participant, SubscriptionId};

use super::{MAX_MESSAGES_PER_TURN, POLL_INTERVAL, Service};
use crate::pool::Direction;
use crate::text;

/// How long a topic is monitored after the last sign of a wait: longer than the interval of its
/// reports.
const MONITOR_LINGER: Duration = Duration::from_secs(2);

/// How soon a topic is checked again after an eviction.
const RECHECK_AFTER_EVICTION: Duration = Duration::from_millis(10);

/// Topics that are checked periodically, since publishers may wait there. A waiting publisher is
/// reported when the wait begins and every second. The service also checks a topic after a change
/// of its participants, and after a takeover.
#[derive(Debug, Default)]
pub(super) struct EvictionMonitor {
    monitored: BTreeMap<(u32, Direction), TopicMonitor>,
    /// The last check evicted a subscriber: others may block publishers next.
    has_evicted: bool,
    /// Number of checks.
    #[cfg(test)]
    pub(super) checks: u64,
}

/// One topic: the oldest message of each subscriber, and for how long it was held.
#[derive(Debug, Default)]
struct TopicMonitor {
    /// Each with the position of its oldest message, and for how long that has blocked publishers
    /// or other nodes.
    holders: Vec<(SubscriptionId, u64, Duration)>,
    /// Time of the last check, if it found a blocked topic.
    seen: Option<Instant>,
    /// Until then it is monitored even without a wait.
    until: Option<Instant>,
    /// True while a report says that evicted subscribers hold the maximum of messages.
    is_exhaustion_reported: bool,
}

/// State of a topic where publishers or other nodes wait.
struct BlockedTopic {
    /// Subscribers that hold messages, with the position of the oldest.
    holders: Vec<(SubscriptionId, u64)>,
    /// How long a message may be held in this state.
    deadline: Duration,
    /// How long the oldest message has blocked publishers, as the last service recorded.
    before: Duration,
}

impl TopicMonitor {
    /// Records the holders. Returns the holders of the oldest message that have blocked the topic
    /// for too long, with the time. Times count for all holders at once: several that stopped at
    /// different messages are evicted together, though each eviction gives some room.
    fn update(
        &mut self,
        now: Instant,
        found: Option<&BlockedTopic>,
    ) -> Vec<(SubscriptionId, Duration)> {
        let Some(found) = found.filter(|found| !found.holders.is_empty()) else {
            self.seen = None;
            return Vec::new();
        };
        let passed = self.seen.map_or(Duration::ZERO, |seen| now.saturating_duration_since(seen));
        let oldest = found.holders.iter().map(|(_, position)| *position).min();
        let is_first = self.seen.is_none() && self.holders.is_empty();
        let held = |(holder, position): &(SubscriptionId, u64)| {
            let same = |it: &&(SubscriptionId, u64, Duration)| (it.0, it.1) == (*holder, *position);
            let held_for = match self.holders.iter().find(same) {
                Some((_, _, held_for)) => *held_for + passed,
                None if is_first && Some(*position) == oldest => found.before,
                None => Duration::ZERO,
            };
            (*holder, *position, held_for)
        };
        self.holders = found.holders.iter().map(held).collect();
        self.seen = Some(now);
        let holders = self.holders.iter().filter(|(_, position, _)| Some(*position) == oldest);
        let late = holders.filter(|(_, _, held_for)| *held_for >= found.deadline);
        late.map(|(holder, _, held_for)| (*holder, *held_for)).collect()
    }
}

impl EvictionMonitor {
    /// A publisher waits, or did until a moment ago.
    pub(super) fn begin(&mut self, now: Instant, which: (u32, Direction)) {
        self.monitored.entry(which).or_default().until = Some(now + MONITOR_LINGER);
    }

    /// Records a check of one topic. Returns the subscriptions to evict. After a while without a
    /// wait the topic is no longer monitored.
    fn update(
        &mut self,
        now: Instant,
        which: (u32, Direction),
        found: Option<&BlockedTopic>,
    ) -> Vec<(SubscriptionId, Duration)> {
        #[cfg(test)]
        {
            self.checks += 1;
        }
        let Some(monitor) = self.monitored.get_mut(&which) else { return Vec::new() };
        let late = monitor.update(now, found);
        if found.is_some() {
            monitor.until = Some(now + MONITOR_LINGER);
        } else if monitor.until.is_none_or(|until| now >= until) {
            self.monitored.remove(&which);
        }
        late
    }

    /// The oldest message that blocks publishers, and for how long it has.
    fn oldest(&self, which: (u32, Direction)) -> Option<(u64, Duration)> {
        let monitor = self.monitored.get(&which).filter(|monitor| monitor.seen.is_some())?;
        let oldest = monitor.holders.iter().min_by_key(|(_, position, _)| *position);
        oldest.map(|(_, position, held_for)| (*position, *held_for))
    }

    /// Evicted subscribers hold the maximum of a topic's messages, or do not any more. True if that is
    /// new.
    fn note_exhaustion(&mut self, which: (u32, Direction), is_exhausted: bool) -> bool {
        let monitor = self.monitored.get_mut(&which);
        monitor.is_some_and(|monitor| {
            !std::mem::replace(&mut monitor.is_exhaustion_reported, is_exhausted) && is_exhausted
        })
    }

    pub(super) fn forget(&mut self, number: u32) {
        for direction in Direction::BOTH {
            self.monitored.remove(&(number, direction));
        }
    }

    /// How soon to check again; None if no topic is monitored.
    pub(super) fn max_poll_timeout(&self) -> Option<Duration> {
        let any = self.monitored.keys().next();
        any.map(|_| if self.has_evicted { RECHECK_AFTER_EVICTION } else { POLL_INTERVAL })
    }

    #[cfg(test)]
    pub(super) fn has_any(&self) -> bool {
        !self.monitored.is_empty()
    }
}

impl Service {
    /// After a change of participants or a takeover: a wait may have been reported only to the last
    /// service.
    pub(super) fn monitor_topic(&mut self, number: u32) {
        let now = Instant::now();
        let found = self.broker.registry().topic_and_pools(number);
        if found.is_some_and(|(topic, _)| topic.backpressure().is_some()) {
            self.eviction_monitor.begin(now, (number, Direction::Local));
        }
        if self.replication.replicator().is_some_and(|it| it.has_waiters(number)) {
            self.eviction_monitor.begin(now, (number, Direction::Inbound));
        }
    }

    pub(super) fn evict(&mut self) {
        let now = Instant::now();
        for number in self.replication.waiting_arrivals() {
            self.eviction_monitor.begin(now, (number, Direction::Inbound));
        }
        // A topic without users exists only for other nodes, and not for ever.
        for number in self.broker.registry().unused() {
            self.eviction_monitor.begin(now, (number, Direction::Local));
        }
        let (mut changed_topics, mut stalled) = (BTreeSet::new(), BTreeSet::new());
        for which in self.eviction_monitor.monitored.keys().copied().collect::<Vec<_>>() {
            // After an eviction another subscriber may be the blocking one, for long enough
            // already.
            for _ in 0..MAX_MESSAGES_PER_TURN {
                if !self.evict_from(now, which, &mut stalled) {
                    break;
                }
                changed_topics.insert(which.0);
            }
        }
        self.eviction_monitor.has_evicted = !changed_topics.is_empty();
        for number in changed_topics {
            self.topic_changed(number);
        }
        for number in stalled {
            self.replication.backlog_blocks_publishers(number);
        }
    }

    /// Evicts subscribers that have held the oldest message of a topic for too long. True if one
    /// was evicted.
    fn evict_from(
        &mut self,
        now: Instant,
        which: (u32, Direction),
        stalled: &mut BTreeSet<u32>,
    ) -> bool {
        let (number, direction) = which;
        let Some(served_node) = &self.served_node else { return false };
        let registry = self.broker.registry();
        let Some((topic, [local, inbound])) = registry.topic_and_pools(number) else {
            self.eviction_monitor.forget(number);
            return false;
        };
        let replication = self.replication.replicator();
        // Only while a publisher or node waits is any subscriber blocking.
        let has_waiters = match direction {
            Direction::Local => topic.backpressure().is_some() || registry.is_unused(number),
            Direction::Inbound => replication.is_some_and(|it| it.has_waiters(number)),
        };
        let found = has_waiters.then(|| {
            let mut holders = topic.holders(direction);
            if direction == Direction::Local {
                holders.retain(|(holder, _)| !topic.waits_for_stream(*holder, local.control()));
            }
            let oldest = holders.iter().map(|(_, position)| *position).min();
            let before = oldest.and_then(|oldest| topic.recorded_blocking(direction, oldest));
            let deadline = topic.settings().release_deadline();
            BlockedTopic { holders, deadline, before: before.unwrap_or_default() }
        });
        let is_stuck = found.as_ref().is_some_and(|found| found.holders.is_empty());
        let evicted = if is_stuck { topic.evicted_holders(direction) } else { Vec::new() };
        if self.eviction_monitor.note_exhaustion(which, !evicted.is_empty()) {
            let names = evicted.iter().map(|(holder, held)| {
                let client = holder.participant().and_then(|it| self.broker.name(it));
                let name = client.map_or_else(
                    || "an unknown process".to_owned(),
                    |client| format!("process {} \"{}\"", client.process, client.label),
                );
                format!("{name}: {held}")
            });
            tracing::warn!(
                topic = topic.name(),
                held = names.collect::<Vec<_>>().join(", "),
                "publishers wait: evicted subscribers hold the maximum of messages. They have to \
                 drop samples"
            );
        }
        let holders = found.iter().flat_map(|found| &found.holders);
        let position = holders.map(|(_, position)| *position).min();
        let mut has_evicted = false;
        let late = self.eviction_monitor.update(now, which, found.as_ref());
        // The next service continues from there.
        if let Some((position, held_for)) = self.eviction_monitor.oldest(which) {
            topic.record_blocking(direction, position, held_for);
        }
        for (holder, held_for) in late {
            // Replication waits for other nodes itself: it knows the node, and allows more time.
            if holder.participant().is_some_and(Participant::is_role) {
                if replication.is_some_and(|it| held_for >= it.stall_timeout(number)) {
                    stalled.insert(number);
                }
                continue;
            }
            let at = (direction, holder);
            let controls = [local.control(), inbound.control()];
            match topic.evict_in(&served_node.caller(), at, held_for, controls) {
                Ok(()) => {
                    let participant = holder.participant();
                    let client = participant.and_then(|participant| self.broker.name(participant));
                    tracing::warn!(
                        topic = topic.name(),
                        process = client.map(|client| client.process),
                        label = client.map(|client| client.label.as_str()),
                        participant = participant.map(tracing::field::display),
                        position,
                        held_for = %text::format_duration(held_for),
                        "a subscriber was evicted: it blocked publishers past the release deadline"
                    );
                    has_evicted = true;
                }
                Err(error) => tracing::debug!(%error, "cannot evict a subscriber yet"),
            }
        }
        has_evicted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Subscriptions of a queue.
    fn subscriptions<const N: usize>() -> [SubscriptionId; N] {
        let setup =
            ipc::QueueSetup { depth: 4, max_held: 4, overflow_policy: ipc::OverflowPolicy::Reject };
        let words =
            ipc::LocalWords::zeroed(ipc::Queue::<ipc::LocalWords, 1>::required_words(setup));
        let queue = ipc::Queue::<_, 1>::format(words, setup).unwrap();
        let me = Participant::new(1, 1).unwrap();
        let caller = ipc::Caller::new(me, &ipc::AlwaysAlive);
        std::array::from_fn(|_| queue.subscribe(&caller).unwrap().subscription_id())
    }

    fn waiting(holders: &[(SubscriptionId, u64)], deadline: Duration) -> BlockedTopic {
        BlockedTopic { holders: holders.to_vec(), deadline, before: Duration::ZERO }
    }

    #[test]
    fn next_service_continues_the_time_of_the_oldest_message() {
        let [holder, other] = subscriptions();
        let (now, deadline) = (Instant::now(), Duration::from_secs(5));
        let found = |before, position| BlockedTopic {
            holders: vec![(holder, position), (other, position + 1)],
            deadline,
            before: Duration::from_secs(before),
        };
        let mut monitor = TopicMonitor::default();
        assert_eq!(monitor.update(now, Some(&found(4, 7))), []);
        let later = now + Duration::from_secs(1);
        assert_eq!(monitor.update(later, Some(&found(9, 7))), [(holder, deadline)]);
        // Only what the last service recorded counts, and only at first.
        assert_eq!(monitor.update(later, Some(&found(9, 9))), []);
        let late = TopicMonitor::default().update(now, Some(&found(6, 7)));
        assert_eq!(late, [(holder, Duration::from_secs(6))]);
    }

    #[test]
    fn subscriber_is_evicted_only_for_one_message_held_too_long() {
        let [holder] = subscriptions();
        let (start, deadline) = (Instant::now(), Duration::from_secs(1));
        let which = (7, Direction::Local);
        let mut eviction_monitor = EvictionMonitor::default();
        eviction_monitor.begin(start, which);
        let mut update = |tenths, found: Option<u64>| {
            let found = found.map(|position| waiting(&[(holder, position)], deadline));
            eviction_monitor.update(start + deadline / 10 * tenths, which, found.as_ref())
        };
        assert_eq!(update(0, Some(7)), []);
        assert_eq!(update(9, Some(7)), []);
        // The subscriber is slow, but releases.
        assert_eq!(update(10, Some(8)), []);
        assert_eq!(update(19, Some(8)), []);
        // Without a waiting publisher it may hold it.
        assert_eq!(update(20, None), []);
        assert_eq!(update(30, Some(8)), []);
        assert_eq!(update(31, Some(8)), [(holder, deadline)]);
    }

    #[test]
    fn holders_of_different_messages_are_timed_together() {
        let [first, second, slow] = subscriptions();
        let (start, deadline) = (Instant::now(), Duration::from_secs(1));
        let mut monitor = TopicMonitor::default();
        let mut update = |tenths, holders: &[(SubscriptionId, u64)]| {
            monitor.update(start + deadline / 10 * tenths, Some(&waiting(holders, deadline)))
        };
        assert_eq!(update(0, &[(first, 4), (second, 5), (slow, 5)]), []);
        assert_eq!(update(6, &[(first, 4), (second, 5), (slow, 6)]), []);
        assert_eq!(update(10, &[(first, 4), (second, 5), (slow, 6)]), [(first, deadline)]);
        // A moment with room does not reset the time.
        assert_eq!(update(10, &[]), []);
        assert_eq!(update(15, &[(second, 5), (slow, 6)]), [(second, deadline)]);
        assert_eq!(update(15, &[]), []);
        assert_eq!(update(17, &[(slow, 6)]), []);
        assert_eq!(update(23, &[(slow, 6)]), [(slow, deadline)]);
    }

    #[test]
    fn topic_without_waiting_publishers_is_not_monitored() {
        let [holder] = subscriptions();
        let (start, deadline) = (Instant::now(), Duration::from_secs(1));
        let which = (7, Direction::Local);
        let mut eviction_monitor = EvictionMonitor::default();
        let found = waiting(&[(holder, 3)], deadline);
        eviction_monitor.begin(start, which);
        assert!(eviction_monitor.has_any());
        // No publisher waited at the first check, but one may be reported soon.
        assert_eq!(eviction_monitor.update(start, which, None), []);
        let again = start + MONITOR_LINGER / 2;
        assert_eq!(eviction_monitor.update(again, which, Some(&found)), []);
        let late = again + MONITOR_LINGER;
        assert_eq!(eviction_monitor.update(late, which, Some(&found)), [(holder, MONITOR_LINGER)]);
        // A blocked topic stays monitored, without further reports.
        for seconds in 1..100 {
            let now = late + Duration::from_secs(seconds);
            assert!(!eviction_monitor.update(now, which, Some(&found)).is_empty());
        }
        let end = late + Duration::from_secs(99);
        assert_eq!(eviction_monitor.update(end + MONITOR_LINGER / 2, which, None), []);
        assert!(eviction_monitor.has_any());
        assert_eq!(eviction_monitor.update(end + MONITOR_LINGER, which, None), []);
        assert!(!eviction_monitor.has_any());
        assert_eq!(eviction_monitor.update(end + MONITOR_LINGER, which, Some(&found)), []);
        eviction_monitor.begin(end, which);
        eviction_monitor.forget(7);
        assert!(!eviction_monitor.has_any());
    }
}
