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

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use super::rest::Rest;
use crate::peers::NodeIdentity;
use crate::settings::SharedSettings;

/// How long to wait until a line that broke between nodes that know each other is tried again.
const BREAKS: (Duration, Duration) = (Duration::from_millis(100), Duration::from_millis(6400));
/// How long a node that is there may take to say what it subscribes to: its service may have taken
/// over, and waits until all its processes are back.
const SILENCE: Duration = Duration::from_secs(20);
/// How long a destination that was in the way of others is none.
const RESTS: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(600));

/// A topic of this node.
#[derive(Debug, Clone)]
pub(super) struct Local {
    pub(super) number: u32,
    pub(super) settings: SharedSettings,
    /// Somebody publishes, or messages are still owed.
    pub(super) has_messages: bool,
    /// The destinations that are noted in its books.
    pub(super) noted: Vec<NodeIdentity>,
}

/// How it stands with a destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Standing {
    /// It is there; nothing is sent yet.
    Idle,
    /// What is published is to be sent to it, since then.
    Sending { since: Instant },
    /// The line broke, and is tried again then.
    Broken { since: Instant, until: Instant },
    /// Its node is gone, or has not said yet what it wants; it is waited for until then.
    Awaited { since: Instant, until: Instant },
}

impl Standing {
    pub(super) fn is_sending(self) -> bool {
        matches!(self, Self::Sending { .. })
    }
}

#[derive(Debug)]
struct Destination {
    standing: Standing,
    /// Since the line broke last.
    broken: Option<Rest>,
}

#[derive(Debug)]
struct Remote {
    appeared: Instant,
    /// When it first said what it subscribes to.
    spoke: Option<Instant>,
    /// Its provider is none that this node's understands.
    is_stranger: bool,
    /// What it subscribes to.
    subscribes: BTreeMap<String, SharedSettings>,
}

#[derive(Debug)]
pub(super) struct Plan {
    grace: Duration,
    /// Something can be sent at all. As long as nothing can, nobody is there.
    can_send: bool,
    nodes: BTreeMap<NodeIdentity, Remote>,
    topics: BTreeMap<u32, BTreeMap<NodeIdentity, Destination>>,
    /// What cannot be sent, and would not be if it were tried again.
    refused: BTreeSet<(u32, NodeIdentity)>,
    /// Those that were in the way of others.
    resting: BTreeMap<(u32, NodeIdentity), Rest>,
}

/// Can messages of a topic go to a topic of another node? In whose memory they lie is each
/// node's own matter.
pub(super) fn fit(ours: &SharedSettings, theirs: &SharedSettings) -> bool {
    ours.differs(theirs).next().is_none()
}

/// All that is kept of a topic by its number and a node.
pub(super) fn of_topic(number: u32) -> RangeInclusive<(u32, NodeIdentity)> {
    (number, NodeIdentity([0; 16]))..=(number, NodeIdentity([u8::MAX; 16]))
}

impl Plan {
    pub(super) fn new(grace: Duration) -> Self {
        Self {
            grace,
            can_send: true,
            nodes: BTreeMap::new(),
            topics: BTreeMap::new(),
            refused: BTreeSet::new(),
            resting: BTreeMap::new(),
        }
    }

    pub(super) fn set_can_send(&mut self, can_send: bool) {
        self.can_send = can_send;
    }

    pub(super) fn appears(&mut self, now: Instant, node: NodeIdentity) {
        self.refused.retain(|(_, refused)| *refused != node);
        self.resting.retain(|(_, resting), _| *resting != node);
        let remote =
            Remote { appeared: now, spoke: None, is_stranger: false, subscribes: BTreeMap::new() };
        self.nodes.insert(node, remote);
    }

    pub(super) fn vanishes(&mut self, now: Instant, node: NodeIdentity) {
        self.nodes.remove(&node);
        let longest = self.grace + SILENCE;
        let grace = self.grace;
        let of_node = self.topics.values_mut().filter_map(|nodes| nodes.get_mut(&node));
        for destination in of_node {
            let since = match destination.standing {
                Standing::Awaited { since, .. } => since,
                _ => now,
            };
            let until = (now + grace).min(since + longest);
            let standing = Standing::Awaited { since, until };
            *destination = Destination { standing, broken: None };
        }
    }

    /// A node has said what it subscribes to, or that it is as before.
    /// True if it had not before.
    pub(super) fn speaks(&mut self, now: Instant, node: NodeIdentity) -> bool {
        let remote = self.nodes.get_mut(&node);
        remote.is_some_and(|remote| remote.spoke.replace(remote.spoke.unwrap_or(now)).is_none())
    }

    /// Whether anything can go to a node at all, by its provider and this node's.
    pub(super) fn set_stranger(&mut self, node: NodeIdentity, is_stranger: bool) {
        if let Some(remote) = self.nodes.get_mut(&node) {
            remote.is_stranger = is_stranger;
        }
    }

    /// The topics that a node is a destination of.
    pub(super) fn topics_of(&self, node: NodeIdentity) -> impl Iterator<Item = u32> {
        let topics = self.topics.iter().filter(move |(_, nodes)| nodes.contains_key(&node));
        topics.map(|(number, _)| *number)
    }

    /// The topics that cannot be sent to a node.
    pub(super) fn refused_by(&self, node: NodeIdentity) -> impl Iterator<Item = u32> {
        let refused = self.refused.iter().filter(move |(_, refused)| *refused == node);
        refused.map(|(number, _)| *number)
    }

    /// What a node subscribes to has changed.
    pub(super) fn subscribes(
        &mut self,
        node: NodeIdentity,
        topic: &str,
        settings: Option<SharedSettings>,
    ) {
        // What it wants is another matter now, and so is whether it can have it.
        self.refused.retain(|(_, refused)| *refused != node);
        let Some(remote) = self.nodes.get_mut(&node) else { return };
        match settings {
            Some(settings) => drop(remote.subscribes.insert(topic.into(), settings)),
            None => drop(remote.subscribes.remove(topic)),
        }
    }

    fn destination(&mut self, topic: u32, node: NodeIdentity) -> Option<&mut Destination> {
        self.topics.get_mut(&topic)?.get_mut(&node)
    }

    /// The line to a destination broke, though its node is there.
    pub(super) fn breaks(&mut self, now: Instant, topic: u32, node: NodeIdentity) {
        let Some(destination) = self.destination(topic, node) else { return };
        let Standing::Sending { since } = destination.standing else { return };
        let rest = Rest::after(destination.broken, now, BREAKS);
        destination.broken = Some(rest);
        destination.standing = Standing::Broken { since, until: rest.until() };
    }

    /// A topic cannot be sent to a node, and not because of the line.
    pub(super) fn refuses(&mut self, topic: u32, node: NodeIdentity) {
        self.refused.insert((topic, node));
    }

    /// Others wait because of a destination that does not go on. It has had its time if it was one
    /// for so long: then it is none for a while. True if that is so.
    pub(super) fn falls_behind(
        &mut self,
        now: Instant,
        (topic, node): (u32, NodeIdentity),
        patience: Duration,
    ) -> bool {
        let Some(destination) = self.destination(topic, node) else { return false };
        let (Standing::Sending { since } | Standing::Broken { since, .. }) = destination.standing
        else {
            return false;
        };
        if now.saturating_duration_since(since) < patience {
            return false;
        }
        let before = self.resting.get(&(topic, node)).copied();
        self.resting.insert((topic, node), Rest::after(before, now, RESTS));
        true
    }

    /// Has a node said itself that it does not want a topic, as it is here? Then it misses nothing
    /// when it is no destination any more. Of one that is gone, or cannot be sent it, nobody knows
    /// better than that it wants it.
    pub(super) fn is_done_with(
        &self,
        name: &str,
        ours: &SharedSettings,
        node: NodeIdentity,
    ) -> bool {
        let Some(remote) = self.nodes.get(&node) else { return false };
        let wants = remote.subscribes.get(name).is_some_and(|theirs| fit(ours, theirs));
        remote.spoke.is_some() && !wants
    }

    /// The destinations of a topic, and how it stands with each. Its messages are to be kept if
    /// there is any.
    pub(super) fn destinations(
        &self,
        topic: u32,
    ) -> impl Iterator<Item = (NodeIdentity, Standing)> {
        let nodes = self.topics.get(&topic).into_iter().flatten();
        nodes.map(|(node, destination)| (*node, destination.standing))
    }

    /// The topic itself is gone, and its books with it; or it is not to go anywhere for a while.
    pub(super) fn forget(&mut self, number: u32) {
        self.topics.remove(&number);
        self.refused.retain(|(refused, _)| *refused != number);
        self.resting.retain(|(resting, _), _| *resting != number);
    }

    /// Brings the plan of a topic up to date.
    pub(super) fn update(&mut self, now: Instant, name: &str, local: &Local) {
        let number = local.number;
        let (grace, can_send) = (self.grace, self.can_send);
        let (refused, resting, remotes) = (&self.refused, &self.resting, &self.nodes);
        let there = |node: &NodeIdentity| remotes.get(node).filter(|_| can_send);
        let wants = |node: &NodeIdentity| {
            let rests = resting.get(&(number, *node)).is_some_and(|rest| !rest.is_over(now));
            if rests || refused.contains(&(number, *node)) {
                return false;
            }
            there(node)
                .filter(|remote| !remote.is_stranger)
                .and_then(|remote| remote.subscribes.get(name))
                .is_some_and(|theirs| fit(&local.settings, theirs))
        };
        let destination = |standing| Destination { standing, broken: None };
        let nodes = self.topics.entry(number).or_default();
        // What an earlier service of this node promised.
        for node in &local.noted {
            nodes.entry(*node).or_insert_with(|| {
                destination(Standing::Awaited { since: now, until: now + grace })
            });
        }
        for node in remotes.keys().filter(|node| wants(node)) {
            nodes.entry(*node).or_insert_with(|| destination(Standing::Idle));
        }
        nodes.retain(|node, Destination { standing, .. }| {
            if wants(node) {
                match *standing {
                    Standing::Broken { until, .. } if now < until => {}
                    Standing::Broken { since, .. } => *standing = Standing::Sending { since },
                    Standing::Sending { .. } => {}
                    _ if local.has_messages => *standing = Standing::Sending { since: now },
                    _ => *standing = Standing::Idle,
                }
                return true;
            }
            let remote = there(node);
            let (since, until) = match (*standing, remote) {
                (Standing::Awaited { since, until }, Some(remote)) => match remote.spoke {
                    None => (since, until.max(remote.appeared + SILENCE)),
                    // Some of its processes may come back later than others.
                    Some(spoke) => (since, until.min(spoke + grace)),
                },
                (Standing::Awaited { since, until }, None) => (since, until),
                // It does not subscribe any more, or cannot have what it wants.
                (_, Some(_)) => return false,
                // It may be there, but nothing can be sent.
                (_, None) => (now, now + grace),
            };
            let until = until.min(since + grace + SILENCE);
            *standing = Standing::Awaited { since, until };
            now < until
        });
        if nodes.is_empty() {
            self.topics.remove(&number);
        }
    }

    /// When a topic has to be brought up to date at the latest, though nothing happens.
    pub(super) fn deadline(&self, now: Instant, number: u32) -> Option<Instant> {
        let standings = self.destinations(number).map(|(_, standing)| standing);
        let standings = standings.filter_map(|standing| match standing {
            Standing::Broken { until, .. } | Standing::Awaited { until, .. } => Some(until),
            Standing::Idle | Standing::Sending { .. } => None,
        });
        let rests = self.resting.range(of_topic(number)).map(|(_, rest)| rest);
        let rests = rests.filter(|rest| !rest.is_over(now)).map(Rest::until);
        standings.chain(rests).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::SharedPlace;

    const NODE: NodeIdentity = NodeIdentity([1; 16]);
    const GRACE: Duration = Duration::from_secs(5);

    fn local(has_messages: bool, noted: &[NodeIdentity]) -> Local {
        Local {
            number: 7,
            settings: SharedSettings::of_depth(8),
            has_messages,
            noted: noted.to_vec(),
        }
    }

    /// How it stands with the only destination that there is.
    fn standing(plan: &Plan) -> Option<Standing> {
        let all: Vec<_> = plan.destinations(7).collect();
        assert!(all.iter().all(|(node, _)| *node == NODE));
        all.first().map(|(_, standing)| *standing)
    }

    /// What a node that subscribes says.
    fn wanted(now: Instant, plan: &mut Plan) {
        plan.appears(now, NODE);
        plan.subscribes(NODE, "numbers", Some(SharedSettings::of_depth(8)));
        plan.speaks(now, NODE);
    }

    fn awaited(since: Instant, until: Instant) -> Option<Standing> {
        Some(Standing::Awaited { since, until })
    }

    #[test]
    fn a_subscribed_topic_is_kept_at_once_and_sent_when_there_is_something() {
        let (now, mut plan) = (Instant::now(), Plan::new(GRACE));
        plan.appears(now, NODE);
        plan.update(now, "numbers", &local(false, &[]));
        assert_eq!(standing(&plan), None);
        wanted(now, &mut plan);
        plan.update(now, "numbers", &local(false, &[]));
        assert_eq!(standing(&plan), Some(Standing::Idle));
        let later = now + GRACE;
        plan.update(later, "numbers", &local(true, &[NODE]));
        assert_eq!(standing(&plan), Some(Standing::Sending { since: later }));
        plan.update(later + GRACE, "numbers", &local(false, &[NODE]));
        assert_eq!(standing(&plan), Some(Standing::Sending { since: later }));
        plan.subscribes(NODE, "numbers", None);
        plan.update(later, "numbers", &local(true, &[NODE]));
        assert_eq!(standing(&plan), None);
    }

    #[test]
    fn other_settings_do_not_fit_but_other_memory_does() {
        let (now, mut plan) = (Instant::now(), Plan::new(GRACE));
        plan.appears(now, NODE);
        plan.subscribes(NODE, "numbers", Some(SharedSettings::of_depth(9)));
        plan.update(now, "numbers", &local(true, &[]));
        assert_eq!(standing(&plan), None);
        let elsewhere =
            SharedSettings { place: SharedPlace::Device([3; 16]), ..SharedSettings::of_depth(8) };
        plan.subscribes(NODE, "numbers", Some(elsewhere));
        plan.update(now, "numbers", &local(true, &[]));
        assert!(standing(&plan).is_some_and(Standing::is_sending));
    }

    #[test]
    fn one_that_vanished_is_waited_for() {
        let (now, mut plan) = (Instant::now(), Plan::new(GRACE));
        wanted(now, &mut plan);
        plan.update(now, "numbers", &local(true, &[]));
        plan.vanishes(now, NODE);
        plan.update(now, "numbers", &local(true, &[NODE]));
        assert_eq!(standing(&plan), awaited(now, now + GRACE));
        assert_eq!(plan.deadline(now, 7), Some(now + GRACE));
        // It comes back, and is nobody's destination until it says so.
        wanted(now + GRACE / 2, &mut plan);
        plan.update(now + GRACE / 2, "numbers", &local(true, &[NODE]));
        assert_eq!(standing(&plan), Some(Standing::Sending { since: now + GRACE / 2 }));
        plan.vanishes(now + GRACE, NODE);
        plan.update(now + GRACE, "numbers", &local(true, &[NODE]));
        assert_eq!(standing(&plan), awaited(now + GRACE, now + 2 * GRACE));
        plan.update(now + 2 * GRACE, "numbers", &local(true, &[NODE]));
        assert_eq!(standing(&plan), None);
    }

    #[test]
    fn one_that_is_there_and_silent_is_waited_for_longer_but_not_for_ever() {
        let (now, mut plan) = (Instant::now(), Plan::new(GRACE));
        wanted(now, &mut plan);
        plan.update(now, "numbers", &local(true, &[]));
        plan.vanishes(now, NODE);
        // Its service takes over, and gathers: that takes longer than the grace.
        let back = now + GRACE / 2;
        plan.appears(back, NODE);
        plan.update(now + 2 * GRACE, "numbers", &local(true, &[NODE]));
        assert_eq!(standing(&plan), awaited(now, back + SILENCE));
        // One of its processes is back later than the others.
        let spoke = now + 3 * GRACE;
        plan.speaks(spoke, NODE);
        plan.update(spoke, "numbers", &local(true, &[NODE]));
        assert_eq!(standing(&plan), awaited(now, spoke + GRACE));
        plan.subscribes(NODE, "numbers", Some(SharedSettings::of_depth(8)));
        plan.update(spoke, "numbers", &local(true, &[NODE]));
        assert!(standing(&plan).is_some_and(Standing::is_sending));
        // It comes and goes and never says anything.
        let mut time = spoke;
        while standing(&plan).is_some() {
            plan.vanishes(time, NODE);
            plan.appears(time, NODE);
            plan.update(time, "numbers", &local(true, &[NODE]));
            assert!(plan.deadline(time, 7).is_none_or(|deadline| deadline > time));
            time += GRACE / 2;
            assert!(time < spoke + 2 * (GRACE + SILENCE));
        }
    }

    #[test]
    fn the_next_service_keeps_what_the_last_one_promised() {
        let (now, mut plan) = (Instant::now(), Plan::new(GRACE));
        plan.update(now, "numbers", &local(true, &[NODE]));
        assert_eq!(standing(&plan), awaited(now, now + GRACE));
        wanted(now, &mut plan);
        plan.update(now, "numbers", &local(true, &[NODE]));
        assert_eq!(standing(&plan), Some(Standing::Sending { since: now }));
        // The topic goes.
        plan.forget(7);
        assert_eq!(standing(&plan), None);
    }

    #[test]
    fn while_nothing_can_be_sent_nobody_is_there() {
        let (now, mut plan) = (Instant::now(), Plan::new(GRACE));
        plan.set_can_send(false);
        wanted(now, &mut plan);
        plan.update(now, "numbers", &local(true, &[]));
        assert_eq!(standing(&plan), None);
        // What was promised is kept for the grace only.
        plan.update(now, "numbers", &local(true, &[NODE]));
        assert_eq!(standing(&plan), awaited(now, now + GRACE));
        plan.update(now + GRACE, "numbers", &local(true, &[NODE]));
        assert_eq!(standing(&plan), None);
        plan.set_can_send(true);
        plan.update(now + GRACE, "numbers", &local(true, &[]));
        assert!(standing(&plan).is_some_and(Standing::is_sending));
        // And so if it cannot any more.
        plan.set_can_send(false);
        plan.update(now + GRACE, "numbers", &local(true, &[NODE]));
        assert_eq!(standing(&plan), awaited(now + GRACE, now + 2 * GRACE));
    }

    #[test]
    fn only_who_says_so_does_not_want_a_topic() {
        let (now, mut plan) = (Instant::now(), Plan::new(GRACE));
        let is_done =
            |plan: &Plan| plan.is_done_with("numbers", &SharedSettings::of_depth(8), NODE);
        // It was never met, or is gone.
        assert!(!is_done(&plan));
        plan.appears(now, NODE);
        // It has not said yet.
        assert!(!is_done(&plan));
        wanted(now, &mut plan);
        assert!(!is_done(&plan));
        plan.update(now, "numbers", &local(true, &[]));
        plan.refuses(7, NODE);
        plan.update(now, "numbers", &local(true, &[]));
        // It wants it, and cannot be sent it.
        assert!(standing(&plan).is_none() && !is_done(&plan));
        plan.subscribes(NODE, "numbers", Some(SharedSettings::of_depth(9)));
        assert!(is_done(&plan), "it is another one");
        plan.subscribes(NODE, "numbers", None);
        assert!(is_done(&plan));
        plan.vanishes(now, NODE);
        assert!(!is_done(&plan));
    }

    #[test]
    fn nothing_is_sent_to_a_stranger() {
        let (now, mut plan) = (Instant::now(), Plan::new(GRACE));
        wanted(now, &mut plan);
        for is_stranger in [true, false] {
            plan.set_stranger(NODE, is_stranger);
            plan.update(now, "numbers", &local(true, &[]));
            assert_eq!(standing(&plan).is_none(), is_stranger);
        }
    }

    #[test]
    fn what_cannot_be_sent_is_not_tried_again() {
        let (now, mut plan) = (Instant::now(), Plan::new(GRACE));
        wanted(now, &mut plan);
        plan.update(now, "numbers", &local(true, &[]));
        plan.refuses(7, NODE);
        for _ in 0..2 {
            plan.update(now, "numbers", &local(true, &[]));
            assert_eq!(standing(&plan), None);
        }
        wanted(now, &mut plan);
        plan.update(now, "numbers", &local(true, &[]));
        assert!(standing(&plan).is_some_and(Standing::is_sending));
    }

    #[test]
    fn a_line_that_breaks_is_tried_again_less_and_less_often() {
        let (start, mut plan) = (Instant::now(), Plan::new(GRACE));
        wanted(start, &mut plan);
        plan.update(start, "numbers", &local(true, &[]));
        let mut now = start;
        for pause in [1, 2, 4, 8, 16, 32, 64, 64].map(|times| times * BREAKS.0) {
            plan.breaks(now, 7, NODE);
            // It has ended by itself: nothing is to be paused. Once is enough.
            plan.breaks(now, 7, NODE);
            plan.update(now, "numbers", &local(true, &[NODE]));
            let broken = Standing::Broken { since: start, until: now + pause };
            assert_eq!(standing(&plan), Some(broken));
            now += pause;
            plan.update(now, "numbers", &local(true, &[NODE]));
            assert_eq!(standing(&plan), Some(Standing::Sending { since: start }));
        }
        now += 4 * BREAKS.1;
        plan.breaks(now, 7, NODE);
        assert_eq!(plan.deadline(now, 7), Some(now + BREAKS.0));
    }

    #[test]
    fn one_that_others_wait_for_has_its_time_and_is_left_alone_then() {
        let (start, mut plan) = (Instant::now(), Plan::new(GRACE));
        wanted(start, &mut plan);
        plan.update(start, "numbers", &local(true, &[]));
        assert!(!plan.falls_behind(start + GRACE / 2, (7, NODE), GRACE));
        // Lines that break again and again give it no new time.
        plan.breaks(start + GRACE / 2, 7, NODE);
        plan.update(start + GRACE, "numbers", &local(true, &[NODE]));
        assert!(plan.falls_behind(start + GRACE, (7, NODE), GRACE));
        plan.update(start + GRACE, "numbers", &local(true, &[NODE]));
        assert_eq!(standing(&plan), None);
        assert_eq!(plan.deadline(start + GRACE, 7), Some(start + GRACE + RESTS.0));
        plan.update(start + GRACE + RESTS.0, "numbers", &local(true, &[]));
        let again = Standing::Sending { since: start + GRACE + RESTS.0 };
        assert_eq!(standing(&plan), Some(again));
        // One who is awaited has its grace.
        plan.vanishes(start, NODE);
        assert!(!plan.falls_behind(start + 100 * GRACE, (7, NODE), GRACE));
    }
}
