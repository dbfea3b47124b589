//! Which topics go to which nodes: decided from facts, without doing anything.
//!
//! A node that subscribes to a topic that there is here is a *destination* of it. From then on
//! its messages are kept for that node (they are *carried*), and when somebody publishes, or
//! has published, they are sent. A destination whose node vanished is waited for during a
//! grace, over the end of this node's service, too: then all others have been sent it, and it
//! alone has to be told what it missed.
//!
//! The plan says how it stands with each destination, and not what is to be done about it: that is
//! seen from the plan and from what was done so far.

pub(in crate::replication) mod incompatible_topics;
pub(in crate::replication) mod provider_mismatch;
pub(in crate::replication) mod reconcile;
pub(in crate::replication) mod seen_nodes;
pub(in crate::replication) mod work_queue;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use crate::peers::NodeId;
use crate::replication::retry_backoff::RetryBackoff;
use crate::settings::SharedSettings;

/// How long to wait until a line that broke between nodes that know each other is tried again.
const RECONNECT_BACKOFF: (Duration, Duration) =
    (Duration::from_millis(100), Duration::from_millis(6400));
/// How long a node that is there may take to say what it subscribes to: its service may have taken
/// over, and waits until all its processes are back.
const INTERESTS_TIMEOUT: Duration = Duration::from_secs(20);
/// How long a destination that was in the way of others is none.
const SUSPENSION: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(600));

/// A topic of this node.
#[derive(Debug, Clone)]
pub(super) struct RoutedTopic {
    pub(super) number: u32,
    pub(super) settings: SharedSettings,
    /// Somebody publishes, or messages are still owed.
    pub(super) has_messages: bool,
    /// The destinations that are noted in its books.
    pub(super) recorded: Vec<NodeId>,
}

/// How it stands with a destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DestinationState {
    /// It is there; nothing is sent yet.
    Idle,
    /// What is published is to be sent to it, since then.
    Sending { since: Instant },
    /// The line broke, and is tried again then.
    Broken { since: Instant, until: Instant },
    /// Its node is gone, or has not said yet what it wants; it is waited for until then.
    WaitingForReturn { since: Instant, until: Instant },
}

impl DestinationState {
    pub(super) fn is_sending(self) -> bool {
        matches!(self, Self::Sending { .. })
    }
}

#[derive(Debug)]
struct Destination {
    destination_state: DestinationState,
    /// Since the line broke last.
    broken: Option<RetryBackoff>,
}

#[derive(Debug)]
struct RemoteNode {
    appeared: Instant,
    /// When it first said what it subscribes to.
    interests_at: Option<Instant>,
    /// Its provider is none that this node's understands.
    is_incompatible: bool,
    /// What it subscribes to.
    subscribes: BTreeMap<String, SharedSettings>,
}

#[derive(Debug)]
pub(super) struct RoutingPlan {
    grace: Duration,
    /// Something can be sent at all. As long as nothing can, nobody is there.
    can_send: bool,
    nodes: BTreeMap<NodeId, RemoteNode>,
    topics: BTreeMap<u32, BTreeMap<NodeId, Destination>>,
    /// What cannot be sent, and would not be if it were tried again.
    unsendable: BTreeSet<(u32, NodeId)>,
    /// Those that were in the way of others.
    suspended: BTreeMap<(u32, NodeId), RetryBackoff>,
}

/// Can messages of a topic go to a topic of another node? In whose memory they lie is each
/// node's own matter.
pub(super) fn are_compatible(ours: &SharedSettings, theirs: &SharedSettings) -> bool {
    ours.differs(theirs).next().is_none()
}

/// All that is kept of a topic by its number and a node.
pub(super) fn of_topic(number: u32) -> RangeInclusive<(u32, NodeId)> {
    (number, NodeId([0; 16]))..=(number, NodeId([u8::MAX; 16]))
}

impl RoutingPlan {
    pub(super) fn new(grace: Duration) -> Self {
        Self {
            grace,
            can_send: true,
            nodes: BTreeMap::new(),
            topics: BTreeMap::new(),
            unsendable: BTreeSet::new(),
            suspended: BTreeMap::new(),
        }
    }

    pub(super) fn set_can_send(&mut self, can_send: bool) {
        self.can_send = can_send;
    }

    pub(super) fn node_appeared(&mut self, now: Instant, node: NodeId) {
        self.unsendable.retain(|(_, unsendable)| *unsendable != node);
        self.suspended.retain(|(_, suspended), _| *suspended != node);
        let remote = RemoteNode {
            appeared: now,
            interests_at: None,
            is_incompatible: false,
            subscribes: BTreeMap::new(),
        };
        self.nodes.insert(node, remote);
    }

    pub(super) fn node_vanished(&mut self, now: Instant, node: NodeId) {
        self.nodes.remove(&node);
        let longest = self.grace + INTERESTS_TIMEOUT;
        let grace = self.grace;
        let of_node = self.topics.values_mut().filter_map(|nodes| nodes.get_mut(&node));
        for destination in of_node {
            let since = match destination.destination_state {
                DestinationState::WaitingForReturn { since, .. } => since,
                _ => now,
            };
            let until = (now + grace).min(since + longest);
            let destination_state = DestinationState::WaitingForReturn { since, until };
            *destination = Destination { destination_state, broken: None };
        }
    }

    /// A node has said what it subscribes to, or that it is as before.
    /// True if it had not before.
    pub(super) fn interests_received(&mut self, now: Instant, node: NodeId) -> bool {
        let remote = self.nodes.get_mut(&node);
        remote.is_some_and(|remote| {
            remote.interests_at.replace(remote.interests_at.unwrap_or(now)).is_none()
        })
    }

    /// Whether anything can go to a node at all, by its provider and this node's.
    pub(super) fn set_incompatible(&mut self, node: NodeId, is_incompatible: bool) {
        if let Some(remote) = self.nodes.get_mut(&node) {
            remote.is_incompatible = is_incompatible;
        }
    }

    /// The topics that a node is a destination of.
    pub(super) fn topics_of(&self, node: NodeId) -> impl Iterator<Item = u32> {
        let topics = self.topics.iter().filter(move |(_, nodes)| nodes.contains_key(&node));
        topics.map(|(number, _)| *number)
    }

    /// The topics that cannot be sent to a node.
    pub(super) fn unsendable_to(&self, node: NodeId) -> impl Iterator<Item = u32> {
        let unsendable = self.unsendable.iter().filter(move |(_, unsendable)| *unsendable == node);
        unsendable.map(|(number, _)| *number)
    }

    /// What a node subscribes to has changed.
    pub(super) fn subscribes(
        &mut self,
        node: NodeId,
        topic: &str,
        settings: Option<SharedSettings>,
    ) {
        // What it wants is another matter now, and so is whether it can have it.
        self.unsendable.retain(|(_, unsendable)| *unsendable != node);
        let Some(remote) = self.nodes.get_mut(&node) else { return };
        match settings {
            Some(settings) => drop(remote.subscribes.insert(topic.into(), settings)),
            None => drop(remote.subscribes.remove(topic)),
        }
    }

    fn destination(&mut self, topic: u32, node: NodeId) -> Option<&mut Destination> {
        self.topics.get_mut(&topic)?.get_mut(&node)
    }

    /// The line to a destination broke, though its node is there.
    pub(super) fn connection_broke(&mut self, now: Instant, topic: u32, node: NodeId) {
        let Some(destination) = self.destination(topic, node) else { return };
        let DestinationState::Sending { since } = destination.destination_state else { return };
        let rest = RetryBackoff::after(destination.broken, now, RECONNECT_BACKOFF);
        destination.broken = Some(rest);
        destination.destination_state = DestinationState::Broken { since, until: rest.until() };
    }

    /// A topic cannot be sent to a node, and not because of the line.
    pub(super) fn mark_unsendable(&mut self, topic: u32, node: NodeId) {
        self.unsendable.insert((topic, node));
    }

    /// Others wait because of a destination that does not go on. It has had its time if it was one
    /// for so long: then it is none for a while. True if that is so.
    pub(super) fn suspend_if_stalled(
        &mut self,
        now: Instant,
        (topic, node): (u32, NodeId),
        timeout: Duration,
    ) -> bool {
        let Some(destination) = self.destination(topic, node) else { return false };
        let (DestinationState::Sending { since } | DestinationState::Broken { since, .. }) =
            destination.destination_state
        else {
            return false;
        };
        if now.saturating_duration_since(since) < timeout {
            return false;
        }
        let before = self.suspended.get(&(topic, node)).copied();
        self.suspended.insert((topic, node), RetryBackoff::after(before, now, SUSPENSION));
        true
    }

    /// Has a node said itself that it does not want a topic, as it is here? Then it misses nothing
    /// when it is no destination any more. Of one that is gone, or cannot be sent it, nobody knows
    /// better than that it wants it.
    pub(super) fn has_unsubscribed(&self, name: &str, ours: &SharedSettings, node: NodeId) -> bool {
        let Some(remote) = self.nodes.get(&node) else { return false };
        let wants = remote.subscribes.get(name).is_some_and(|theirs| are_compatible(ours, theirs));
        remote.interests_at.is_some() && !wants
    }

    /// The destinations of a topic, and how it stands with each. Its messages are to be kept if
    /// there is any.
    pub(super) fn destinations(
        &self,
        topic: u32,
    ) -> impl Iterator<Item = (NodeId, DestinationState)> {
        let nodes = self.topics.get(&topic).into_iter().flatten();
        nodes.map(|(node, destination)| (*node, destination.destination_state))
    }

    /// The topic itself is gone, and its books with it; or it is not to go anywhere for a while.
    pub(super) fn forget(&mut self, number: u32) {
        self.topics.remove(&number);
        self.unsendable.retain(|(unsendable, _)| *unsendable != number);
        self.suspended.retain(|(suspended, _), _| *suspended != number);
    }

    /// Brings the plan of a topic up to date.
    pub(super) fn update(&mut self, now: Instant, name: &str, local: &RoutedTopic) {
        let number = local.number;
        let (grace, can_send) = (self.grace, self.can_send);
        let (unsendable, suspended, remotes) = (&self.unsendable, &self.suspended, &self.nodes);
        let there = |node: &NodeId| remotes.get(node).filter(|_| can_send);
        let wants = |node: &NodeId| {
            let rests = suspended.get(&(number, *node)).is_some_and(|rest| !rest.is_over(now));
            if rests || unsendable.contains(&(number, *node)) {
                return false;
            }
            there(node)
                .filter(|remote| !remote.is_incompatible)
                .and_then(|remote| remote.subscribes.get(name))
                .is_some_and(|theirs| are_compatible(&local.settings, theirs))
        };
        let destination = |destination_state| Destination { destination_state, broken: None };
        let nodes = self.topics.entry(number).or_default();
        // What an earlier service of this node promised.
        for node in &local.recorded {
            nodes.entry(*node).or_insert_with(|| {
                destination(DestinationState::WaitingForReturn { since: now, until: now + grace })
            });
        }
        for node in remotes.keys().filter(|node| wants(node)) {
            nodes.entry(*node).or_insert_with(|| destination(DestinationState::Idle));
        }
        nodes.retain(|node, Destination { destination_state, .. }| {
            if wants(node) {
                match *destination_state {
                    DestinationState::Broken { until, .. } if now < until => {}
                    DestinationState::Broken { since, .. } => {
                        *destination_state = DestinationState::Sending { since }
                    }
                    DestinationState::Sending { .. } => {}
                    _ if local.has_messages => {
                        *destination_state = DestinationState::Sending { since: now }
                    }
                    _ => *destination_state = DestinationState::Idle,
                }
                return true;
            }
            let remote = there(node);
            let (since, until) = match (*destination_state, remote) {
                (DestinationState::WaitingForReturn { since, until }, Some(remote)) => {
                    match remote.interests_at {
                        None => (since, until.max(remote.appeared + INTERESTS_TIMEOUT)),
                        // Some of its processes may come back later than others.
                        Some(interests_at) => (since, until.min(interests_at + grace)),
                    }
                }
                (DestinationState::WaitingForReturn { since, until }, None) => (since, until),
                // It does not subscribe any more, or cannot have what it wants.
                (_, Some(_)) => return false,
                // It may be there, but nothing can be sent.
                (_, None) => (now, now + grace),
            };
            let until = until.min(since + grace + INTERESTS_TIMEOUT);
            *destination_state = DestinationState::WaitingForReturn { since, until };
            now < until
        });
        if nodes.is_empty() {
            self.topics.remove(&number);
        }
    }

    /// When a topic has to be brought up to date at the latest, though nothing happens.
    pub(super) fn deadline(&self, now: Instant, number: u32) -> Option<Instant> {
        let standings = self.destinations(number).map(|(_, destination_state)| destination_state);
        let standings = standings.filter_map(|destination_state| match destination_state {
            DestinationState::Broken { until, .. }
            | DestinationState::WaitingForReturn { until, .. } => Some(until),
            DestinationState::Idle | DestinationState::Sending { .. } => None,
        });
        let rests = self.suspended.range(of_topic(number)).map(|(_, rest)| rest);
        let rests = rests.filter(|rest| !rest.is_over(now)).map(RetryBackoff::until);
        standings.chain(rests).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::SharedLocation;

    const NODE: NodeId = NodeId([1; 16]);
    const GRACE: Duration = Duration::from_secs(5);

    fn local(has_messages: bool, recorded: &[NodeId]) -> RoutedTopic {
        RoutedTopic {
            number: 7,
            settings: SharedSettings::of_depth(8),
            has_messages,
            recorded: recorded.to_vec(),
        }
    }

    /// How it stands with the only destination that there is.
    fn destination_state(plan: &RoutingPlan) -> Option<DestinationState> {
        let all: Vec<_> = plan.destinations(7).collect();
        assert!(all.iter().all(|(node, _)| *node == NODE));
        all.first().map(|(_, destination_state)| *destination_state)
    }

    /// What a node that subscribes says.
    fn wanted(now: Instant, plan: &mut RoutingPlan) {
        plan.node_appeared(now, NODE);
        plan.subscribes(NODE, "numbers", Some(SharedSettings::of_depth(8)));
        plan.interests_received(now, NODE);
    }

    fn awaited(since: Instant, until: Instant) -> Option<DestinationState> {
        Some(DestinationState::WaitingForReturn { since, until })
    }

    #[test]
    fn a_subscribed_topic_is_kept_at_once_and_sent_when_there_is_something() {
        let (now, mut plan) = (Instant::now(), RoutingPlan::new(GRACE));
        plan.node_appeared(now, NODE);
        plan.update(now, "numbers", &local(false, &[]));
        assert_eq!(destination_state(&plan), None);
        wanted(now, &mut plan);
        plan.update(now, "numbers", &local(false, &[]));
        assert_eq!(destination_state(&plan), Some(DestinationState::Idle));
        let later = now + GRACE;
        plan.update(later, "numbers", &local(true, &[NODE]));
        assert_eq!(destination_state(&plan), Some(DestinationState::Sending { since: later }));
        plan.update(later + GRACE, "numbers", &local(false, &[NODE]));
        assert_eq!(destination_state(&plan), Some(DestinationState::Sending { since: later }));
        plan.subscribes(NODE, "numbers", None);
        plan.update(later, "numbers", &local(true, &[NODE]));
        assert_eq!(destination_state(&plan), None);
    }

    #[test]
    fn other_settings_do_not_fit_but_other_memory_does() {
        let (now, mut plan) = (Instant::now(), RoutingPlan::new(GRACE));
        plan.node_appeared(now, NODE);
        plan.subscribes(NODE, "numbers", Some(SharedSettings::of_depth(9)));
        plan.update(now, "numbers", &local(true, &[]));
        assert_eq!(destination_state(&plan), None);
        let elsewhere = SharedSettings {
            place: SharedLocation::Device([3; 16]),
            ..SharedSettings::of_depth(8)
        };
        plan.subscribes(NODE, "numbers", Some(elsewhere));
        plan.update(now, "numbers", &local(true, &[]));
        assert!(destination_state(&plan).is_some_and(DestinationState::is_sending));
    }

    #[test]
    fn one_that_vanished_is_waited_for() {
        let (now, mut plan) = (Instant::now(), RoutingPlan::new(GRACE));
        wanted(now, &mut plan);
        plan.update(now, "numbers", &local(true, &[]));
        plan.node_vanished(now, NODE);
        plan.update(now, "numbers", &local(true, &[NODE]));
        assert_eq!(destination_state(&plan), awaited(now, now + GRACE));
        assert_eq!(plan.deadline(now, 7), Some(now + GRACE));
        // It comes back, and is nobody's destination until it says so.
        wanted(now + GRACE / 2, &mut plan);
        plan.update(now + GRACE / 2, "numbers", &local(true, &[NODE]));
        assert_eq!(
            destination_state(&plan),
            Some(DestinationState::Sending { since: now + GRACE / 2 })
        );
        plan.node_vanished(now + GRACE, NODE);
        plan.update(now + GRACE, "numbers", &local(true, &[NODE]));
        assert_eq!(destination_state(&plan), awaited(now + GRACE, now + 2 * GRACE));
        plan.update(now + 2 * GRACE, "numbers", &local(true, &[NODE]));
        assert_eq!(destination_state(&plan), None);
    }

    #[test]
    fn one_that_is_there_and_silent_is_waited_for_longer_but_not_for_ever() {
        let (now, mut plan) = (Instant::now(), RoutingPlan::new(GRACE));
        wanted(now, &mut plan);
        plan.update(now, "numbers", &local(true, &[]));
        plan.node_vanished(now, NODE);
        // Its service takes over, and gathers: that takes longer than the grace.
        let back = now + GRACE / 2;
        plan.node_appeared(back, NODE);
        plan.update(now + 2 * GRACE, "numbers", &local(true, &[NODE]));
        assert_eq!(destination_state(&plan), awaited(now, back + INTERESTS_TIMEOUT));
        // One of its processes is back later than the others.
        let interests_at = now + 3 * GRACE;
        plan.interests_received(interests_at, NODE);
        plan.update(interests_at, "numbers", &local(true, &[NODE]));
        assert_eq!(destination_state(&plan), awaited(now, interests_at + GRACE));
        plan.subscribes(NODE, "numbers", Some(SharedSettings::of_depth(8)));
        plan.update(interests_at, "numbers", &local(true, &[NODE]));
        assert!(destination_state(&plan).is_some_and(DestinationState::is_sending));
        // It comes and goes and never says anything.
        let mut time = interests_at;
        while destination_state(&plan).is_some() {
            plan.node_vanished(time, NODE);
            plan.node_appeared(time, NODE);
            plan.update(time, "numbers", &local(true, &[NODE]));
            assert!(plan.deadline(time, 7).is_none_or(|deadline| deadline > time));
            time += GRACE / 2;
            assert!(time < interests_at + 2 * (GRACE + INTERESTS_TIMEOUT));
        }
    }

    #[test]
    fn the_next_service_keeps_what_the_last_one_promised() {
        let (now, mut plan) = (Instant::now(), RoutingPlan::new(GRACE));
        plan.update(now, "numbers", &local(true, &[NODE]));
        assert_eq!(destination_state(&plan), awaited(now, now + GRACE));
        wanted(now, &mut plan);
        plan.update(now, "numbers", &local(true, &[NODE]));
        assert_eq!(destination_state(&plan), Some(DestinationState::Sending { since: now }));
        // The topic goes.
        plan.forget(7);
        assert_eq!(destination_state(&plan), None);
    }

    #[test]
    fn while_nothing_can_be_sent_nobody_is_there() {
        let (now, mut plan) = (Instant::now(), RoutingPlan::new(GRACE));
        plan.set_can_send(false);
        wanted(now, &mut plan);
        plan.update(now, "numbers", &local(true, &[]));
        assert_eq!(destination_state(&plan), None);
        // What was promised is kept for the grace only.
        plan.update(now, "numbers", &local(true, &[NODE]));
        assert_eq!(destination_state(&plan), awaited(now, now + GRACE));
        plan.update(now + GRACE, "numbers", &local(true, &[NODE]));
        assert_eq!(destination_state(&plan), None);
        plan.set_can_send(true);
        plan.update(now + GRACE, "numbers", &local(true, &[]));
        assert!(destination_state(&plan).is_some_and(DestinationState::is_sending));
        // And so if it cannot any more.
        plan.set_can_send(false);
        plan.update(now + GRACE, "numbers", &local(true, &[NODE]));
        assert_eq!(destination_state(&plan), awaited(now + GRACE, now + 2 * GRACE));
    }

    #[test]
    fn only_who_says_so_does_not_want_a_topic() {
        let (now, mut plan) = (Instant::now(), RoutingPlan::new(GRACE));
        let is_done = |plan: &RoutingPlan| {
            plan.has_unsubscribed("numbers", &SharedSettings::of_depth(8), NODE)
        };
        // It was never met, or is gone.
        assert!(!is_done(&plan));
        plan.node_appeared(now, NODE);
        // It has not said yet.
        assert!(!is_done(&plan));
        wanted(now, &mut plan);
        assert!(!is_done(&plan));
        plan.update(now, "numbers", &local(true, &[]));
        plan.mark_unsendable(7, NODE);
        plan.update(now, "numbers", &local(true, &[]));
        // It wants it, and cannot be sent it.
        assert!(destination_state(&plan).is_none() && !is_done(&plan));
        plan.subscribes(NODE, "numbers", Some(SharedSettings::of_depth(9)));
        assert!(is_done(&plan), "it is another one");
        plan.subscribes(NODE, "numbers", None);
        assert!(is_done(&plan));
        plan.node_vanished(now, NODE);
        assert!(!is_done(&plan));
    }

    #[test]
    fn nothing_is_sent_to_a_stranger() {
        let (now, mut plan) = (Instant::now(), RoutingPlan::new(GRACE));
        wanted(now, &mut plan);
        for is_incompatible in [true, false] {
            plan.set_incompatible(NODE, is_incompatible);
            plan.update(now, "numbers", &local(true, &[]));
            assert_eq!(destination_state(&plan).is_none(), is_incompatible);
        }
    }

    #[test]
    fn what_cannot_be_sent_is_not_tried_again() {
        let (now, mut plan) = (Instant::now(), RoutingPlan::new(GRACE));
        wanted(now, &mut plan);
        plan.update(now, "numbers", &local(true, &[]));
        plan.mark_unsendable(7, NODE);
        for _ in 0..2 {
            plan.update(now, "numbers", &local(true, &[]));
            assert_eq!(destination_state(&plan), None);
        }
        wanted(now, &mut plan);
        plan.update(now, "numbers", &local(true, &[]));
        assert!(destination_state(&plan).is_some_and(DestinationState::is_sending));
    }

    #[test]
    fn a_line_that_breaks_is_tried_again_less_and_less_often() {
        let (start, mut plan) = (Instant::now(), RoutingPlan::new(GRACE));
        wanted(start, &mut plan);
        plan.update(start, "numbers", &local(true, &[]));
        let mut now = start;
        for pause in [1, 2, 4, 8, 16, 32, 64, 64].map(|times| times * RECONNECT_BACKOFF.0) {
            plan.connection_broke(now, 7, NODE);
            // It has ended by itself: nothing is to be paused. Once is enough.
            plan.connection_broke(now, 7, NODE);
            plan.update(now, "numbers", &local(true, &[NODE]));
            let broken = DestinationState::Broken { since: start, until: now + pause };
            assert_eq!(destination_state(&plan), Some(broken));
            now += pause;
            plan.update(now, "numbers", &local(true, &[NODE]));
            assert_eq!(destination_state(&plan), Some(DestinationState::Sending { since: start }));
        }
        now += 4 * RECONNECT_BACKOFF.1;
        plan.connection_broke(now, 7, NODE);
        assert_eq!(plan.deadline(now, 7), Some(now + RECONNECT_BACKOFF.0));
    }

    #[test]
    fn one_that_others_wait_for_has_its_time_and_is_left_alone_then() {
        let (start, mut plan) = (Instant::now(), RoutingPlan::new(GRACE));
        wanted(start, &mut plan);
        plan.update(start, "numbers", &local(true, &[]));
        assert!(!plan.suspend_if_stalled(start + GRACE / 2, (7, NODE), GRACE));
        // Lines that break again and again give it no new time.
        plan.connection_broke(start + GRACE / 2, 7, NODE);
        plan.update(start + GRACE, "numbers", &local(true, &[NODE]));
        assert!(plan.suspend_if_stalled(start + GRACE, (7, NODE), GRACE));
        plan.update(start + GRACE, "numbers", &local(true, &[NODE]));
        assert_eq!(destination_state(&plan), None);
        assert_eq!(plan.deadline(start + GRACE, 7), Some(start + GRACE + SUSPENSION.0));
        plan.update(start + GRACE + SUSPENSION.0, "numbers", &local(true, &[]));
        let again = DestinationState::Sending { since: start + GRACE + SUSPENSION.0 };
        assert_eq!(destination_state(&plan), Some(again));
        // One who is awaited has its grace.
        plan.node_vanished(start, NODE);
        assert!(!plan.suspend_if_stalled(start + 100 * GRACE, (7, NODE), GRACE));
    }
}
