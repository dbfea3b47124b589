//! Subscribers that are in somebody's way.
//!
//! A topic's settings say how long a message may be held. That counts from the moment at
//! which a publisher waits: who holds messages that nobody needs the room of may keep them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use ipc::{Participant, SubscriptionId};

use super::{MAX_MESSAGES_PER_TURN, POLL_INTERVAL, Service};
use crate::pool::Direction;
use crate::text;

/// For how long a topic is looked at when nobody seems to wait any more: longer than it takes until
/// it is said again that somebody does.
const MONITOR_LINGER: Duration = Duration::from_secs(2);

/// How soon it is looked again after one was evicted.
const RECHECK_AFTER_EVICTION: Duration = Duration::from_millis(10);

/// What is looked at again and again: topics that somebody waits at, as far as it was said. Who waits
/// says so when that begins and each second; and where somebody takes part, or its service has
/// ended, it is looked for.
#[derive(Debug, Default)]
pub(super) struct EvictionMonitor {
    monitored: BTreeMap<(u32, Direction), TopicMonitor>,
    /// One was evicted the last time: others may be in the way next.
    has_evicted: bool,
    /// How often a topic was looked at.
    #[cfg(test)]
    pub(super) looks: u64,
}

/// One topic: what each of its subscribers holds, and for how long.
#[derive(Debug, Default)]
struct TopicMonitor {
    /// Each with the position of its oldest message, and for how long publishers or other nodes have waited
    /// since it is that.
    holders: Vec<(SubscriptionId, u64, Duration)>,
    /// When it was looked at last, if there was a wait then and no room.
    seen: Option<Instant>,
    /// Until then it is looked at, also if nobody waits.
    until: Option<Instant>,
}

/// What is found at a topic at which publishers or other nodes wait.
struct BlockedTopic {
    /// Those that hold messages, with the position of the oldest.
    holders: Vec<(SubscriptionId, u64)>,
    /// For how long one may be held meanwhile.
    deadline: Duration,
}

impl TopicMonitor {
    /// Takes note of who holds what now; gives those that hold the oldest message of all, and for how
    /// long each has held it during waits, if that is too long. So several that stopped at
    /// different messages are too late at the same time, though there is some room after each.
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
        let held = |(seat, position): &(SubscriptionId, u64)| {
            let same = |it: &&(SubscriptionId, u64, Duration)| (it.0, it.1) == (*seat, *position);
            let before = self.holders.iter().find(same);
            let held_for = before.map_or(Duration::ZERO, |(_, _, held_for)| *held_for + passed);
            (*seat, *position, held_for)
        };
        self.holders = found.holders.iter().map(held).collect();
        self.seen = Some(now);
        let oldest = self.holders.iter().map(|(_, position, _)| *position).min();
        let holders = self.holders.iter().filter(|(_, position, _)| Some(*position) == oldest);
        let late = holders.filter(|(_, _, held_for)| *held_for >= found.deadline);
        late.map(|(seat, _, held_for)| (*seat, *held_for)).collect()
    }
}

impl EvictionMonitor {
    /// Somebody waits, or did a moment ago.
    pub(super) fn begin(&mut self, now: Instant, which: (u32, Direction)) {
        self.monitored.entry(which).or_default().until = Some(now + MONITOR_LINGER);
    }

    /// Looks at one, and what is found if there is a wait. Gives who has held what is in the way for too
    /// long. Without a wait for a while it is not looked at again.
    fn update(
        &mut self,
        now: Instant,
        which: (u32, Direction),
        found: Option<&BlockedTopic>,
    ) -> Vec<(SubscriptionId, Duration)> {
        #[cfg(test)]
        {
            self.looks += 1;
        }
        let Some(monitor_topic) = self.monitored.get_mut(&which) else { return Vec::new() };
        let late = monitor_topic.update(now, found);
        if found.is_some() {
            monitor_topic.until = Some(now + MONITOR_LINGER);
        } else if monitor_topic.until.is_none_or(|until| now >= until) {
            self.monitored.remove(&which);
        }
        late
    }

    pub(super) fn forget(&mut self, number: u32) {
        for direction in Direction::BOTH {
            self.monitored.remove(&(number, direction));
        }
    }

    /// How soon it is to be looked again; None if there is nothing to look at.
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
    /// Somebody came or went, or has come back: was it said to the last service that it waits?
    pub(super) fn monitor_topic(&mut self, number: u32) {
        let now = Instant::now();
        let kept = self.registry.topics.get(&number);
        if kept.is_some_and(|kept| kept.topic.backpressure().is_some()) {
            self.eviction_monitor.begin(now, (number, Direction::Local));
        }
        if self.replication.replicator.as_ref().is_some_and(|it| it.has_waiters(number)) {
            self.eviction_monitor.begin(now, (number, Direction::Inbound));
        }
    }

    /// Evicts those that hold for too long what others wait for.
    pub(super) fn evict(&mut self) {
        let now = Instant::now();
        for number in self.replication.waiting_arrivals() {
            self.eviction_monitor.begin(now, (number, Direction::Inbound));
        }
        // What nobody uses is there for other nodes only, and cannot be there for ever.
        for number in self.registry.unused() {
            self.eviction_monitor.begin(now, (number, Direction::Local));
        }
        let (mut changed_topics, mut stalled) = (BTreeSet::new(), BTreeSet::new());
        for which in self.eviction_monitor.monitored.keys().copied().collect::<Vec<_>>() {
            // Where one was evicted another one may be in the way, and has been for long enough.
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
            if let Some(replication) = &mut self.replication.replicator {
                replication.backlog_blocks_publishers(number);
            }
        }
    }

    /// Evicts those that have held the oldest message of a topic for too long. True if one was.
    fn evict_from(
        &mut self,
        now: Instant,
        which: (u32, Direction),
        stalled: &mut BTreeSet<u32>,
    ) -> bool {
        let (number, direction) = which;
        let Some(served_node) = &self.served_node else { return false };
        let Some((topic, [local, inbound])) = self.registry.topic_and_pools(number) else {
            self.eviction_monitor.forget(number);
            return false;
        };
        let replication = self.replication.replicator.as_ref();
        // Only while somebody waits is anything in the way.
        let has_waiters = match direction {
            Direction::Local => topic.backpressure().is_some() || self.registry.is_unused(number),
            Direction::Inbound => replication.is_some_and(|it| it.has_waiters(number)),
        };
        let found = has_waiters.then(|| {
            let mut holders = topic.holders(direction);
            if direction == Direction::Local {
                holders.retain(|(_, it)| !topic.is_being_written(*it, local.control()));
            }
            BlockedTopic { holders, deadline: topic.settings().release_deadline() }
        });
        let holders = found.iter().flat_map(|found| &found.holders);
        let position = holders.map(|(_, position)| *position).min();
        let mut has_evicted = false;
        for (holder, held_for) in self.eviction_monitor.update(now, which, found.as_ref()) {
            // Other nodes are waited for by those who carry the messages there, who know which
            // of them it is; and for longer, since there is more that may take time.
            if holder.who().is_some_and(Participant::is_role) {
                if replication.is_some_and(|it| held_for >= it.stall_timeout(number)) {
                    stalled.insert(number);
                }
                continue;
            }
            let at = (direction, holder);
            let controls = [local.control(), inbound.control()];
            match topic.evict_in(&served_node.caller(), at, held_for, controls) {
                Ok(()) => {
                    let who = holder.who();
                    let client = who.and_then(|who| self.clients.get(&who));
                    tracing::warn!(
                        topic = topic.name(),
                        process = client.map(|client| client.process),
                        label = client.map(|client| client.label.as_str()),
                        participant = who.map(tracing::field::display),
                        position,
                        held_for = %text::format_duration(held_for),
                        "a subscriber was evicted: it held a message past the release deadline"
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

    /// Seats of a queue.
    fn seats<const N: usize>() -> [SubscriptionId; N] {
        let setup = ipc::QueueSetup { depth: 4, overflow_policy: ipc::OverflowPolicy::Reject };
        let words =
            ipc::LocalWords::zeroed(ipc::Queue::<ipc::LocalWords, 1>::required_words(setup));
        let queue = ipc::Queue::<_, 1>::format(words, setup).unwrap();
        let me = Participant::new(1, 1).unwrap();
        let caller = ipc::Caller::new(me, &ipc::AlwaysAlive);
        std::array::from_fn(|_| queue.subscribe(&caller).unwrap().subscription_id())
    }

    fn waiting(holders: &[(SubscriptionId, u64)], deadline: Duration) -> BlockedTopic {
        BlockedTopic { holders: holders.to_vec(), deadline }
    }

    #[test]
    fn only_the_same_message_for_the_whole_deadline_is_too_long() {
        let [seat] = seats();
        let (start, deadline) = (Instant::now(), Duration::from_secs(1));
        let which = (7, Direction::Local);
        let mut eviction_monitor = EvictionMonitor::default();
        eviction_monitor.begin(start, which);
        let mut update = |tenths, found: Option<u64>| {
            let found = found.map(|position| waiting(&[(seat, position)], deadline));
            eviction_monitor.update(start + deadline / 10 * tenths, which, found.as_ref())
        };
        assert_eq!(update(0, Some(7)), []);
        assert_eq!(update(9, Some(7)), []);
        // It is slow, but lets go.
        assert_eq!(update(10, Some(8)), []);
        assert_eq!(update(19, Some(8)), []);
        // While nobody waits it may be held.
        assert_eq!(update(20, None), []);
        assert_eq!(update(30, Some(8)), []);
        assert_eq!(update(31, Some(8)), [(seat, deadline)]);
    }

    #[test]
    fn those_that_hold_different_messages_are_too_late_at_the_same_time() {
        let [first, second, slow] = seats();
        let (start, deadline) = (Instant::now(), Duration::from_secs(1));
        let mut monitor_topic = TopicMonitor::default();
        let mut update = |tenths, holders: &[(SubscriptionId, u64)]| {
            monitor_topic.update(start + deadline / 10 * tenths, Some(&waiting(holders, deadline)))
        };
        assert_eq!(update(0, &[(first, 4), (second, 5), (slow, 5)]), []);
        assert_eq!(update(6, &[(first, 4), (second, 5), (slow, 6)]), []);
        assert_eq!(update(10, &[(first, 4), (second, 5), (slow, 6)]), [(first, deadline)]);
        // There is room for a moment, which does not count.
        assert_eq!(update(10, &[]), []);
        assert_eq!(update(15, &[(second, 5), (slow, 6)]), [(second, deadline)]);
        assert_eq!(update(15, &[]), []);
        assert_eq!(update(17, &[(slow, 6)]), []);
        assert_eq!(update(23, &[(slow, 6)]), [(slow, deadline)]);
    }

    #[test]
    fn where_nobody_waits_nothing_is_looked_at() {
        let [seat] = seats();
        let (start, deadline) = (Instant::now(), Duration::from_secs(1));
        let which = (7, Direction::Local);
        let mut eviction_monitor = EvictionMonitor::default();
        let found = waiting(&[(seat, 3)], deadline);
        eviction_monitor.begin(start, which);
        assert!(eviction_monitor.has_any());
        // Nobody waited when it was looked at first; but that may be said again before long.
        assert_eq!(eviction_monitor.update(start, which, None), []);
        let again = start + MONITOR_LINGER / 2;
        assert_eq!(eviction_monitor.update(again, which, Some(&found)), []);
        let late = again + MONITOR_LINGER;
        assert_eq!(eviction_monitor.update(late, which, Some(&found)), [(seat, MONITOR_LINGER)]);
        // What is in the way of somebody is, however long ago that was said.
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
