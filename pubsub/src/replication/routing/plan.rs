//! Which topics are sent to which nodes: this module decides, and has no effects.
//!
//! A node that subscribes to a topic of this node is a *destination* of it. From then on messages
//! are retained for that node (the topic is *replicated*), and sent once there are any. The plan
//! waits for the return of a disconnected destination during a grace period, also across a takeover
//! of this node's service. Other destinations have received those messages already: only the
//! returning one is told what it missed.
//!
//! The plan holds the state of each destination. The next step follows from the plan and from what
//! was done so far.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use threads::RetryBackoff;

use crate::ids::NodeId;
use crate::replication::retry_schedule::RetrySchedule;
use crate::settings::SharedSettings;
use crate::topic::Topic;

/// Backoff of a broken connection between connected nodes.
const RECONNECT_BACKOFF: RetryBackoff =
    RetryBackoff::new(Duration::from_millis(100), Duration::from_millis(6400));
/// Timeout for a connected node's interests: its service may have taken over, and waits until all
/// its processes have rejoined.
pub(super) const INTERESTS_TIMEOUT: Duration = Duration::from_secs(20);
/// How long a destination that blocked others is suspended.
const SUSPENSION: RetryBackoff =
    RetryBackoff::new(Duration::from_secs(30), Duration::from_secs(600));

/// A topic of this node.
#[derive(Debug, Clone)]
pub(super) struct RoutedTopic {
    number: u32,
    settings: SharedSettings,
    /// A publisher exists, or messages are still retained.
    has_messages: bool,
    /// Destinations recorded in the topic.
    recorded: Vec<NodeId>,
}

impl RoutedTopic {
    pub(super) fn of(topic: &Topic, has_messages: bool) -> Self {
        let recorded = topic.destinations().into_iter().map(NodeId).collect();
        Self { number: topic.number(), settings: *topic.settings(), has_messages, recorded }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DestinationState {
    /// Connected; nothing is sent yet.
    Idle,
    /// Published messages are sent to it, since then.
    Sending { since: Instant },
    /// The connection broke; retried at `until`.
    Broken { since: Instant, until: Instant },
    /// The node is disconnected, or has not sent its interests; waited for until then.
    WaitingForReturn { since: Instant, until: Instant },
}

impl DestinationState {
    pub(super) fn is_sending(self) -> bool {
        matches!(self, Self::Sending { .. })
    }
}

#[derive(Debug)]
struct Destination {
    state: DestinationState,
    /// Backoff since the connection broke last.
    broken: Option<RetrySchedule>,
}

#[derive(Debug)]
struct RemoteNode {
    appeared: Instant,
    /// When it first sent its interests.
    interests_at: Option<Instant>,
    /// The node's provider differs from the local one.
    is_incompatible: bool,
    subscribes: BTreeMap<String, SharedSettings>,
}

#[derive(Debug)]
struct DepartedNode {
    since: Instant,
    subscribes: BTreeMap<String, SharedSettings>,
}

#[derive(Debug, Default)]
pub(crate) struct RoutingPlan {
    grace: Duration,
    /// True if anything can be sent; while not, all nodes count as disconnected.
    can_send: bool,
    nodes: BTreeMap<NodeId, RemoteNode>,
    /// Nodes that disconnected, and have not sent their interests since: they count as subscribed
    /// for the grace period.
    departed: BTreeMap<NodeId, DepartedNode>,
    topics: BTreeMap<u32, BTreeMap<NodeId, Destination>>,
    /// Topics that cannot be sent to a node; a retry would fail, too.
    unsendable: BTreeSet<(u32, NodeId)>,
    /// Destinations that blocked others.
    suspended: BTreeMap<(u32, NodeId), RetrySchedule>,
}

/// Returns true if messages can be exchanged between topics of these settings. The memory that they
/// use is local to each node.
pub(super) fn are_compatible(ours: &SharedSettings, theirs: &SharedSettings) -> bool {
    ours.differs(theirs).next().is_none()
}

/// The range of all keys of a topic.
pub(crate) fn of_topic(number: u32) -> RangeInclusive<(u32, NodeId)> {
    (number, NodeId([0; 16]))..=(number, NodeId([u8::MAX; 16]))
}

impl RoutingPlan {
    pub(super) fn new(grace: Duration) -> Self {
        Self { grace, can_send: true, ..Self::default() }
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
        self.departed.retain(|_, departed| now < departed.since + self.grace);
        if let Some(remote) = self.nodes.remove(&node)
            && remote.interests_at.is_some()
            && !remote.is_incompatible
        {
            let departed = DepartedNode { since: now, subscribes: remote.subscribes };
            self.departed.insert(node, departed);
        }
        let longest = self.grace + INTERESTS_TIMEOUT;
        let grace = self.grace;
        let of_node = self.topics.values_mut().filter_map(|nodes| nodes.get_mut(&node));
        for destination in of_node {
            let since = match destination.state {
                DestinationState::WaitingForReturn { since, .. } => since,
                _ => now,
            };
            let until = (now + grace).min(since + longest);
            let state = DestinationState::WaitingForReturn { since, until };
            *destination = Destination { state, broken: None };
        }
    }

    /// A node has sent its interests. True if they are its first.
    pub(super) fn interests_received(&mut self, now: Instant, node: NodeId) -> bool {
        self.departed.remove(&node);
        let remote = self.nodes.get_mut(&node);
        remote.is_some_and(|remote| {
            remote.interests_at.replace(remote.interests_at.unwrap_or(now)).is_none()
        })
    }

    /// Sets whether nothing can be sent to a node because the providers differ.
    pub(super) fn set_incompatible(&mut self, node: NodeId, is_incompatible: bool) {
        if let Some(remote) = self.nodes.get_mut(&node) {
            remote.is_incompatible = is_incompatible;
        }
    }

    /// The connected nodes that subscribe to a topic with these settings.
    pub(super) fn subscribers_of(
        &self,
        name: &str,
        ours: &SharedSettings,
    ) -> impl Iterator<Item = NodeId> {
        let wants = |remote: &RemoteNode| {
            remote.subscribes.get(name).is_some_and(|theirs| are_compatible(ours, theirs))
        };
        let nodes = self.nodes.iter().filter(move |(_, remote)| wants(remote));
        nodes.map(|(node, _)| *node)
    }

    /// The topics that a node is a destination of.
    pub(super) fn topics_of(&self, node: NodeId) -> impl Iterator<Item = u32> {
        let topics = self.topics.iter().filter(move |(_, nodes)| nodes.contains_key(&node));
        topics.map(|(number, _)| *number)
    }

    pub(super) fn unsendable_to(&self, node: NodeId) -> impl Iterator<Item = u32> {
        let unsendable = self.unsendable.iter().filter(move |(_, unsendable)| *unsendable == node);
        unsendable.map(|(number, _)| *number)
    }

    pub(super) fn set_subscription(
        &mut self,
        node: NodeId,
        topic: &str,
        settings: Option<SharedSettings>,
    ) {
        // The new interest may be sendable.
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

    /// The connection to a destination broke, though its node is connected.
    pub(super) fn connection_broke(&mut self, now: Instant, topic: u32, node: NodeId) {
        let Some(destination) = self.destination(topic, node) else { return };
        let DestinationState::Sending { since } = destination.state else { return };
        let backoff = RetrySchedule::after(destination.broken, now, RECONNECT_BACKOFF);
        destination.broken = Some(backoff);
        destination.state = DestinationState::Broken { since, until: backoff.until() };
    }

    /// A topic cannot be sent to a node, for a reason other than the connection.
    pub(super) fn mark_unsendable(&mut self, topic: u32, node: NodeId) {
        self.unsendable.insert((topic, node));
    }

    /// A destination makes no progress, and others wait for it. If it has been one for at least
    /// `timeout`, it is suspended for a while. True if so.
    pub(super) fn suspend_if_stalled(
        &mut self,
        now: Instant,
        (topic, node): (u32, NodeId),
        timeout: Duration,
    ) -> bool {
        let Some(destination) = self.destination(topic, node) else { return false };
        let (DestinationState::Sending { since } | DestinationState::Broken { since, .. }) =
            destination.state
        else {
            return false;
        };
        if now.saturating_duration_since(since) < timeout {
            return false;
        }
        let before = self.suspended.get(&(topic, node)).copied();
        self.suspended.insert((topic, node), RetrySchedule::after(before, now, SUSPENSION));
        true
    }

    /// Returns true if a node has reported that it does not want a topic with these settings. Then
    /// it misses nothing when it is removed. A disconnected or unsendable node has reported
    /// nothing, and may still want it.
    pub(super) fn has_unsubscribed(&self, name: &str, ours: &SharedSettings, node: NodeId) -> bool {
        let Some(remote) = self.nodes.get(&node) else { return false };
        let wants = remote.subscribes.get(name).is_some_and(|theirs| are_compatible(ours, theirs));
        remote.interests_at.is_some() && !wants
    }

    /// The destinations of a topic, with their states. Messages are retained if there is any.
    pub(crate) fn destinations(
        &self,
        topic: u32,
    ) -> impl Iterator<Item = (NodeId, DestinationState)> {
        let nodes = self.topics.get(&topic).into_iter().flatten();
        nodes.map(|(node, destination)| (*node, destination.state))
    }

    /// The topic is removed with its records, or is not replicated for a while.
    pub(super) fn forget(&mut self, number: u32) {
        self.topics.remove(&number);
        self.unsendable.retain(|(unsendable, _)| *unsendable != number);
        self.suspended.retain(|(suspended, _), _| *suspended != number);
    }

    pub(super) fn update(&mut self, now: Instant, name: &str, local: &RoutedTopic) {
        let number = local.number;
        let (grace, can_send) = (self.grace, self.can_send);
        let (unsendable, suspended, remotes) = (&self.unsendable, &self.suspended, &self.nodes);
        let connected = |node: &NodeId| remotes.get(node).filter(|_| can_send);
        let is_excluded = |node: &NodeId| {
            let is_suspended =
                suspended.get(&(number, *node)).is_some_and(|backoff| !backoff.is_over(now));
            is_suspended || unsendable.contains(&(number, *node))
        };
        let wants = |node: &NodeId| {
            if is_excluded(node) {
                return false;
            }
            connected(node)
                .filter(|remote| !remote.is_incompatible)
                .and_then(|remote| remote.subscribes.get(name))
                .is_some_and(|theirs| are_compatible(&local.settings, theirs))
        };
        let destination = |state| Destination { state, broken: None };
        let nodes = self.topics.entry(number).or_default();
        // Destinations that an earlier service of this node promised to retain messages for.
        for node in &local.recorded {
            nodes.entry(*node).or_insert_with(|| {
                destination(DestinationState::WaitingForReturn { since: now, until: now + grace })
            });
        }
        // The topic may have been created while they were away.
        for (node, departed) in self.departed.iter().filter(|(node, _)| !is_excluded(node)) {
            let until = departed.since + grace;
            let subscribed = departed.subscribes.get(name);
            if now < until && subscribed.is_some_and(|it| are_compatible(&local.settings, it)) {
                let state = DestinationState::WaitingForReturn { since: departed.since, until };
                nodes.entry(*node).or_insert_with(|| destination(state));
            }
        }
        for node in remotes.keys().filter(|node| wants(node)) {
            nodes.entry(*node).or_insert_with(|| destination(DestinationState::Idle));
        }
        nodes.retain(|node, Destination { state, .. }| {
            if wants(node) {
                match *state {
                    DestinationState::Broken { until, .. } if now < until => {}
                    DestinationState::Broken { since, .. } => {
                        *state = DestinationState::Sending { since }
                    }
                    DestinationState::Sending { .. } => {}
                    _ if local.has_messages => *state = DestinationState::Sending { since: now },
                    _ => *state = DestinationState::Idle,
                }
                return true;
            }
            let remote = connected(node);
            let (since, until) = match (*state, remote) {
                (DestinationState::WaitingForReturn { since, until }, Some(remote)) => {
                    match remote.interests_at {
                        None => (since, until.max(remote.appeared + INTERESTS_TIMEOUT)),
                        // Some of its processes may rejoin later than others.
                        Some(interests_at) => (since, until.min(interests_at + grace)),
                    }
                }
                (DestinationState::WaitingForReturn { since, until }, None) => (since, until),
                // It does not subscribe any more, or has incompatible settings.
                (_, Some(_)) => return false,
                // Nothing can be sent, whether it is connected or not.
                (_, None) => (now, now + grace),
            };
            let until = until.min(since + grace + INTERESTS_TIMEOUT);
            *state = DestinationState::WaitingForReturn { since, until };
            now < until
        });
        if nodes.is_empty() {
            self.topics.remove(&number);
        }
    }

    /// When a topic has to be updated at the latest, without any event.
    pub(super) fn deadline(&self, now: Instant, number: u32) -> Option<Instant> {
        let states = self.destinations(number).map(|(_, state)| state);
        let states = states.filter_map(|state| match state {
            DestinationState::Broken { until, .. }
            | DestinationState::WaitingForReturn { until, .. } => Some(until),
            DestinationState::Idle | DestinationState::Sending { .. } => None,
        });
        let backoffs = self.suspended.range(of_topic(number)).map(|(_, backoff)| backoff);
        let backoffs = backoffs.filter(|backoff| !backoff.is_over(now)).map(RetrySchedule::until);
        states.chain(backoffs).min()
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

    /// The state of the only destination.
    fn destination_state(plan: &RoutingPlan) -> Option<DestinationState> {
        let all: Vec<_> = plan.destinations(7).collect();
        assert!(all.iter().all(|(node, _)| *node == NODE));
        all.first().map(|(_, destination_state)| *destination_state)
    }

    /// A node connects and subscribes.
    fn subscribe(now: Instant, plan: &mut RoutingPlan) {
        plan.node_appeared(now, NODE);
        plan.set_subscription(NODE, "numbers", Some(SharedSettings::of_depth(8)));
        plan.interests_received(now, NODE);
    }

    fn waiting(since: Instant, until: Instant) -> Option<DestinationState> {
        Some(DestinationState::WaitingForReturn { since, until })
    }

    #[test]
    fn subscribed_topic_is_retained_at_once_and_sent_on_publish() {
        let (now, mut plan) = (Instant::now(), RoutingPlan::new(GRACE));
        plan.node_appeared(now, NODE);
        plan.update(now, "numbers", &local(false, &[]));
        assert_eq!(destination_state(&plan), None);
        subscribe(now, &mut plan);
        plan.update(now, "numbers", &local(false, &[]));
        assert_eq!(destination_state(&plan), Some(DestinationState::Idle));
        let later = now + GRACE;
        plan.update(later, "numbers", &local(true, &[NODE]));
        assert_eq!(destination_state(&plan), Some(DestinationState::Sending { since: later }));
        plan.update(later + GRACE, "numbers", &local(false, &[NODE]));
        assert_eq!(destination_state(&plan), Some(DestinationState::Sending { since: later }));
        plan.set_subscription(NODE, "numbers", None);
        plan.update(later, "numbers", &local(true, &[NODE]));
        assert_eq!(destination_state(&plan), None);
    }

    #[test]
    fn different_settings_are_incompatible_different_memory_is_not() {
        let (now, mut plan) = (Instant::now(), RoutingPlan::new(GRACE));
        plan.node_appeared(now, NODE);
        plan.set_subscription(NODE, "numbers", Some(SharedSettings::of_depth(9)));
        plan.update(now, "numbers", &local(true, &[]));
        assert_eq!(destination_state(&plan), None);
        let elsewhere = SharedSettings {
            place: SharedLocation::Device([3; 16]),
            ..SharedSettings::of_depth(8)
        };
        plan.set_subscription(NODE, "numbers", Some(elsewhere));
        plan.update(now, "numbers", &local(true, &[]));
        assert!(destination_state(&plan).is_some_and(DestinationState::is_sending));
    }

    #[test]
    fn disconnected_destination_is_waited_for_during_grace() {
        let (now, mut plan) = (Instant::now(), RoutingPlan::new(GRACE));
        subscribe(now, &mut plan);
        plan.update(now, "numbers", &local(true, &[]));
        plan.node_vanished(now, NODE);
        plan.update(now, "numbers", &local(true, &[NODE]));
        assert_eq!(destination_state(&plan), waiting(now, now + GRACE));
        assert_eq!(plan.deadline(now, 7), Some(now + GRACE));
        // It returns, and is a destination again once it subscribes.
        subscribe(now + GRACE / 2, &mut plan);
        plan.update(now + GRACE / 2, "numbers", &local(true, &[NODE]));
        assert_eq!(
            destination_state(&plan),
            Some(DestinationState::Sending { since: now + GRACE / 2 })
        );
        plan.node_vanished(now + GRACE, NODE);
        plan.update(now + GRACE, "numbers", &local(true, &[NODE]));
        assert_eq!(destination_state(&plan), waiting(now + GRACE, now + 2 * GRACE));
        plan.update(now + 2 * GRACE, "numbers", &local(true, &[NODE]));
        assert_eq!(destination_state(&plan), None);
    }

    #[test]
    fn topic_that_is_created_while_a_subscriber_is_away_waits_for_it() {
        let (now, mut plan) = (Instant::now(), RoutingPlan::new(GRACE));
        subscribe(now, &mut plan);
        plan.node_vanished(now, NODE);
        let created = now + GRACE / 2;
        plan.update(created, "images", &local(true, &[]));
        assert_eq!(destination_state(&plan), None);
        plan.update(created, "numbers", &local(true, &[]));
        assert_eq!(destination_state(&plan), waiting(now, now + GRACE));
        plan.forget(7);
        // It has appeared, but not sent its interests yet.
        plan.node_appeared(created, NODE);
        plan.update(created, "numbers", &local(true, &[]));
        assert!(matches!(
            destination_state(&plan),
            Some(DestinationState::WaitingForReturn { .. })
        ));
        plan.forget(7);
        plan.interests_received(created, NODE);
        plan.update(created, "numbers", &local(true, &[]));
        assert_eq!(destination_state(&plan), None, "it does not subscribe any more");
        plan.node_vanished(created, NODE);
        plan.update(created, "numbers", &local(true, &[]));
        assert_eq!(destination_state(&plan), None);
        // After the grace period the messages are only counted.
        subscribe(created, &mut plan);
        plan.node_vanished(created, NODE);
        plan.update(created + GRACE, "numbers", &local(true, &[]));
        assert_eq!(destination_state(&plan), None);
    }

    #[test]
    fn returned_node_without_interests_is_waited_for_bounded_time() {
        let (now, mut plan) = (Instant::now(), RoutingPlan::new(GRACE));
        subscribe(now, &mut plan);
        plan.update(now, "numbers", &local(true, &[]));
        plan.node_vanished(now, NODE);
        // Its service takes over, and waits for its processes: this takes longer than the grace.
        let back = now + GRACE / 2;
        plan.node_appeared(back, NODE);
        plan.update(now + 2 * GRACE, "numbers", &local(true, &[NODE]));
        assert_eq!(destination_state(&plan), waiting(now, back + INTERESTS_TIMEOUT));
        // One of its processes rejoins later than the others.
        let interests_at = now + 3 * GRACE;
        plan.interests_received(interests_at, NODE);
        plan.update(interests_at, "numbers", &local(true, &[NODE]));
        assert_eq!(destination_state(&plan), waiting(now, interests_at + GRACE));
        plan.set_subscription(NODE, "numbers", Some(SharedSettings::of_depth(8)));
        plan.update(interests_at, "numbers", &local(true, &[NODE]));
        assert!(destination_state(&plan).is_some_and(DestinationState::is_sending));
        // It connects and disconnects repeatedly, and never sends interests.
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
    fn next_service_retains_for_recorded_destinations() {
        let (now, mut plan) = (Instant::now(), RoutingPlan::new(GRACE));
        plan.update(now, "numbers", &local(true, &[NODE]));
        assert_eq!(destination_state(&plan), waiting(now, now + GRACE));
        subscribe(now, &mut plan);
        plan.update(now, "numbers", &local(true, &[NODE]));
        assert_eq!(destination_state(&plan), Some(DestinationState::Sending { since: now }));
        // The topic is removed.
        plan.forget(7);
        assert_eq!(destination_state(&plan), None);
    }

    #[test]
    fn without_workers_no_node_counts_as_connected() {
        let (now, mut plan) = (Instant::now(), RoutingPlan::new(GRACE));
        plan.set_can_send(false);
        subscribe(now, &mut plan);
        plan.update(now, "numbers", &local(true, &[]));
        assert_eq!(destination_state(&plan), None);
        // Messages of recorded destinations are retained for the grace only.
        plan.update(now, "numbers", &local(true, &[NODE]));
        assert_eq!(destination_state(&plan), waiting(now, now + GRACE));
        plan.update(now + GRACE, "numbers", &local(true, &[NODE]));
        assert_eq!(destination_state(&plan), None);
        plan.set_can_send(true);
        plan.update(now + GRACE, "numbers", &local(true, &[]));
        assert!(destination_state(&plan).is_some_and(DestinationState::is_sending));
        // The same if sending becomes impossible later.
        plan.set_can_send(false);
        plan.update(now + GRACE, "numbers", &local(true, &[NODE]));
        assert_eq!(destination_state(&plan), waiting(now + GRACE, now + 2 * GRACE));
    }

    #[test]
    fn only_a_reported_interest_unsubscribes_a_node() {
        let (now, mut plan) = (Instant::now(), RoutingPlan::new(GRACE));
        let is_done = |plan: &RoutingPlan| {
            plan.has_unsubscribed("numbers", &SharedSettings::of_depth(8), NODE)
        };
        // It was never connected.
        assert!(!is_done(&plan));
        plan.node_appeared(now, NODE);
        // Its interests are unknown.
        assert!(!is_done(&plan));
        subscribe(now, &mut plan);
        assert!(!is_done(&plan));
        plan.update(now, "numbers", &local(true, &[]));
        plan.mark_unsendable(7, NODE);
        plan.update(now, "numbers", &local(true, &[]));
        // It wants the topic, which cannot be sent to it.
        assert!(destination_state(&plan).is_none() && !is_done(&plan));
        plan.set_subscription(NODE, "numbers", Some(SharedSettings::of_depth(9)));
        assert!(is_done(&plan), "the settings differ");
        plan.set_subscription(NODE, "numbers", None);
        assert!(is_done(&plan));
        plan.node_vanished(now, NODE);
        assert!(!is_done(&plan));
    }

    #[test]
    fn nothing_is_sent_to_a_node_with_another_provider() {
        let (now, mut plan) = (Instant::now(), RoutingPlan::new(GRACE));
        subscribe(now, &mut plan);
        for is_incompatible in [true, false] {
            plan.set_incompatible(NODE, is_incompatible);
            plan.update(now, "numbers", &local(true, &[]));
            assert_eq!(destination_state(&plan).is_none(), is_incompatible);
        }
    }

    #[test]
    fn unsendable_topic_is_not_retried() {
        let (now, mut plan) = (Instant::now(), RoutingPlan::new(GRACE));
        subscribe(now, &mut plan);
        plan.update(now, "numbers", &local(true, &[]));
        plan.mark_unsendable(7, NODE);
        for _ in 0..2 {
            plan.update(now, "numbers", &local(true, &[]));
            assert_eq!(destination_state(&plan), None);
        }
        subscribe(now, &mut plan);
        plan.update(now, "numbers", &local(true, &[]));
        assert!(destination_state(&plan).is_some_and(DestinationState::is_sending));
    }

    #[test]
    fn broken_connection_is_retried_with_growing_backoff() {
        let (start, mut plan) = (Instant::now(), RoutingPlan::new(GRACE));
        subscribe(start, &mut plan);
        plan.update(start, "numbers", &local(true, &[]));
        let mut now = start;
        for pause in [1, 2, 4, 8, 16, 32, 64, 64].map(|times| times * RECONNECT_BACKOFF.first()) {
            plan.connection_broke(now, 7, NODE);
            // A second report of the same break changes nothing.
            plan.connection_broke(now, 7, NODE);
            plan.update(now, "numbers", &local(true, &[NODE]));
            let broken = DestinationState::Broken { since: start, until: now + pause };
            assert_eq!(destination_state(&plan), Some(broken));
            now += pause;
            plan.update(now, "numbers", &local(true, &[NODE]));
            assert_eq!(destination_state(&plan), Some(DestinationState::Sending { since: start }));
        }
        now += 4 * RECONNECT_BACKOFF.longest();
        plan.connection_broke(now, 7, NODE);
        assert_eq!(plan.deadline(now, 7), Some(now + RECONNECT_BACKOFF.first()));
    }

    #[test]
    fn stalled_destination_is_suspended_after_timeout() {
        let (start, mut plan) = (Instant::now(), RoutingPlan::new(GRACE));
        subscribe(start, &mut plan);
        plan.update(start, "numbers", &local(true, &[]));
        assert!(!plan.suspend_if_stalled(start + GRACE / 2, (7, NODE), GRACE));
        // Repeated breaks do not extend the timeout.
        plan.connection_broke(start + GRACE / 2, 7, NODE);
        plan.update(start + GRACE, "numbers", &local(true, &[NODE]));
        assert!(plan.suspend_if_stalled(start + GRACE, (7, NODE), GRACE));
        plan.update(start + GRACE, "numbers", &local(true, &[NODE]));
        assert_eq!(destination_state(&plan), None);
        assert_eq!(plan.deadline(start + GRACE, 7), Some(start + GRACE + SUSPENSION.first()));
        plan.update(start + GRACE + SUSPENSION.first(), "numbers", &local(true, &[]));
        let again = DestinationState::Sending { since: start + GRACE + SUSPENSION.first() };
        assert_eq!(destination_state(&plan), Some(again));
        // A destination that is waited for keeps its grace.
        plan.node_vanished(start, NODE);
        assert!(!plan.suspend_if_stalled(start + 100 * GRACE, (7, NODE), GRACE));
    }
}
