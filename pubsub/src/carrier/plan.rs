//! Which topics go to which nodes: decided from facts, without doing anything.
//!
//! A node that subscribes to a topic that there is here is a *destination* of it. From then on
//! its messages are kept for that node (they are *carried*), and when somebody publishes, or
//! has published, they are sent. A destination whose node vanished is waited for during a
//! grace, over the end of this node's service, too: then all others have been sent it, and it
//! alone has to be told what it missed.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::peers::NodeIdentity;
use crate::settings::SharedSettings;

/// How long to wait until a line that broke between nodes that know each other is tried again.
const AGAIN: Duration = Duration::from_millis(100);

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

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Messages of the topic are to be kept for other nodes from now on.
    Carry(u32),
    /// The node is a destination of the topic: note it.
    Note(u32, NodeIdentity),
    /// It was noted by an earlier service: what is not delivered to it is kept.
    Keep(u32, NodeIdentity),
    /// Send to it.
    Send(u32, NodeIdentity),
    /// It is no destination any more.
    Forget(u32, NodeIdentity),
    /// Nothing is to be kept any more.
    Leave(u32),
}

/// How it stands with a destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    /// It is connected; nothing is sent yet.
    Idle,
    /// What is published is sent to it.
    Sending,
    /// The line broke, and is tried again then.
    Broken(Instant),
    /// Its node is gone, and waited for until then.
    Awaited(Instant),
}

#[derive(Debug, Default)]
struct Remote {
    /// What it subscribes to.
    subscribes: BTreeMap<String, SharedSettings>,
}

#[derive(Debug)]
pub(super) struct Plan {
    grace: Duration,
    nodes: BTreeMap<NodeIdentity, Remote>,
    topics: BTreeMap<u32, BTreeMap<NodeIdentity, Standing>>,
    /// What cannot be sent, and would not be if it were tried again.
    refused: BTreeSet<(u32, NodeIdentity)>,
}

/// Can messages of a topic go to a topic of another node? In whose memory they lie is each
/// node's own matter.
pub(super) fn fit(ours: &SharedSettings, theirs: &SharedSettings) -> bool {
    SharedSettings { place: theirs.place, ..*ours } == *theirs
}

impl Plan {
    pub(super) fn new(grace: Duration) -> Self {
        Self { grace, nodes: BTreeMap::new(), topics: BTreeMap::new(), refused: BTreeSet::new() }
    }

    pub(super) fn appears(&mut self, node: NodeIdentity) {
        self.refused.retain(|(_, refused)| *refused != node);
        self.nodes.insert(node, Remote::default());
    }

    pub(super) fn vanishes(&mut self, node: NodeIdentity) {
        self.nodes.remove(&node);
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

    /// The line to a destination broke, though its node is there.
    pub(super) fn breaks(&mut self, now: Instant, topic: u32, node: NodeIdentity) {
        let standing = self.topics.get_mut(&topic).and_then(|nodes| nodes.get_mut(&node));
        if let Some(standing @ Standing::Sending) = standing {
            *standing = Standing::Broken(now + AGAIN);
        }
    }

    /// A topic cannot be sent to a node, and not because of the line.
    pub(super) fn refuses(&mut self, topic: u32, node: NodeIdentity) {
        self.refused.insert((topic, node));
    }

    /// Destinations of a topic.
    #[cfg(test)]
    fn destinations(&self, topic: u32) -> usize {
        self.topics.get(&topic).map_or(0, BTreeMap::len)
    }

    /// Brings the plan up to date; gives what is to be done for it, in order.
    pub(super) fn update(&mut self, now: Instant, topics: &BTreeMap<String, Local>) -> Vec<Step> {
        let mut steps = Vec::new();
        let known: BTreeSet<u32> = topics.values().map(|local| local.number).collect();
        // The topic itself is gone, and its books with it.
        self.topics.retain(|number, nodes| {
            let stays = known.contains(number);
            if !stays {
                steps.extend(nodes.keys().map(|node| Step::Forget(*number, *node)));
                steps.push(Step::Leave(*number));
            }
            stays
        });
        for (name, local) in topics {
            self.update_topic(now, name, local, &mut steps);
        }
        steps
    }

    fn update_topic(&mut self, now: Instant, name: &str, local: &Local, steps: &mut Vec<Step>) {
        let number = local.number;
        let refused = &self.refused;
        let wants = |node: &NodeIdentity| {
            if refused.contains(&(number, *node)) {
                return false;
            }
            let remote = self.nodes.get(node);
            remote
                .and_then(|remote| remote.subscribes.get(name))
                .is_some_and(|theirs| fit(&local.settings, theirs))
        };
        let was_carried = self.topics.contains_key(&number);
        let nodes = self.topics.entry(number).or_default();
        // What an earlier service of this node promised.
        let mut later = Vec::new();
        for node in &local.noted {
            nodes.entry(*node).or_insert_with(|| {
                later.push(Step::Keep(number, *node));
                Standing::Awaited(now + self.grace)
            });
        }
        for node in self.nodes.keys().filter(|node| wants(node)) {
            if !nodes.contains_key(node) {
                nodes.insert(*node, Standing::Idle);
                steps.push(Step::Note(number, *node));
            }
        }
        let has_destinations = !nodes.is_empty();
        nodes.retain(|node, standing| {
            let is_there = self.nodes.contains_key(node);
            let next = match *standing {
                _ if is_there && wants(node) => match *standing {
                    Standing::Broken(when) if now < when => Standing::Broken(when),
                    Standing::Sending => Standing::Sending,
                    _ if local.has_messages => Standing::Sending,
                    _ => Standing::Idle,
                },
                Standing::Awaited(until) if !is_there && now < until => Standing::Awaited(until),
                // It is there, and told us nothing yet.
                Standing::Awaited(until) if is_there && now < until => Standing::Awaited(until),
                Standing::Awaited(_) => {
                    later.push(Step::Forget(number, *node));
                    return false;
                }
                _ if !is_there => Standing::Awaited(now + self.grace),
                // It does not subscribe any more.
                _ => {
                    later.push(Step::Forget(number, *node));
                    return false;
                }
            };
            if *standing != Standing::Sending && next == Standing::Sending {
                later.push(Step::Send(number, *node));
            }
            *standing = next;
            true
        });
        if has_destinations && !was_carried {
            steps.push(Step::Carry(number));
        }
        steps.append(&mut later);
        if nodes.is_empty() {
            self.topics.remove(&number);
            if has_destinations || was_carried {
                steps.push(Step::Leave(number));
            }
        }
    }

    /// When it has to be brought up to date at the latest, though nothing happens.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let standings = self.topics.values().flat_map(BTreeMap::values);
        standings
            .filter_map(|standing| match standing {
                Standing::Broken(when) | Standing::Awaited(when) => Some(*when),
                Standing::Idle | Standing::Sending => None,
            })
            .min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::{Reliability, SharedPlace};

    const NODE: NodeIdentity = NodeIdentity([1; 16]);
    const GRACE: Duration = Duration::from_secs(5);

    fn settings(depth: u32) -> SharedSettings {
        SharedSettings {
            place: SharedPlace::Host,
            reliability: Reliability::Reliable,
            depth,
            largest: 4096,
            release_microseconds: 1_000_000,
        }
    }

    fn topics(has_messages: bool, noted: &[NodeIdentity]) -> BTreeMap<String, Local> {
        let local = Local { number: 7, settings: settings(8), has_messages, noted: noted.to_vec() };
        BTreeMap::from([("numbers".to_owned(), local)])
    }

    #[test]
    fn a_subscribed_topic_is_kept_at_once_and_sent_when_there_is_something() {
        let (now, mut plan) = (Instant::now(), Plan::new(GRACE));
        assert_eq!(plan.update(now, &topics(false, &[])), []);
        plan.appears(NODE);
        assert_eq!(plan.update(now, &topics(false, &[])), []);
        plan.subscribes(NODE, "numbers", Some(settings(8)));
        let begun = plan.update(now, &topics(false, &[]));
        assert_eq!(begun, [Step::Note(7, NODE), Step::Carry(7)]);
        assert_eq!(plan.update(now, &topics(true, &[NODE])), [Step::Send(7, NODE)]);
        assert_eq!(plan.update(now, &topics(false, &[NODE])), []);
        plan.subscribes(NODE, "numbers", None);
        let ended = plan.update(now, &topics(true, &[]));
        assert_eq!(ended, [Step::Forget(7, NODE), Step::Leave(7)]);
        assert_eq!(plan.destinations(7), 0);
    }

    #[test]
    fn other_settings_do_not_fit_but_other_memory_does() {
        let (now, mut plan) = (Instant::now(), Plan::new(GRACE));
        plan.appears(NODE);
        plan.subscribes(NODE, "numbers", Some(settings(9)));
        assert_eq!(plan.update(now, &topics(true, &[])), []);
        let elsewhere = SharedSettings { place: SharedPlace::Device([3; 16]), ..settings(8) };
        plan.subscribes(NODE, "numbers", Some(elsewhere));
        assert_eq!(plan.update(now, &topics(true, &[])).len(), 3);
    }

    #[test]
    fn one_that_vanished_is_waited_for() {
        let (now, mut plan) = (Instant::now(), Plan::new(GRACE));
        plan.appears(NODE);
        plan.subscribes(NODE, "numbers", Some(settings(8)));
        plan.update(now, &topics(true, &[]));
        plan.vanishes(NODE);
        assert_eq!(plan.update(now, &topics(true, &[NODE])), []);
        assert_eq!(plan.deadline(), Some(now + GRACE));
        // It comes back, and is nobody's destination until it says so.
        plan.appears(NODE);
        assert_eq!(plan.update(now + GRACE / 2, &topics(true, &[NODE])), []);
        plan.subscribes(NODE, "numbers", Some(settings(8)));
        assert_eq!(plan.update(now + GRACE / 2, &topics(true, &[NODE])), [Step::Send(7, NODE)]);
        plan.vanishes(NODE);
        plan.update(now + GRACE, &topics(true, &[NODE]));
        let ended = plan.update(now + 3 * GRACE, &topics(true, &[NODE]));
        assert_eq!(ended, [Step::Forget(7, NODE), Step::Leave(7)]);
    }

    #[test]
    fn the_next_service_keeps_what_the_last_one_promised() {
        let (now, mut plan) = (Instant::now(), Plan::new(GRACE));
        let begun = plan.update(now, &topics(true, &[NODE]));
        assert_eq!(begun, [Step::Carry(7), Step::Keep(7, NODE)]);
        plan.appears(NODE);
        plan.subscribes(NODE, "numbers", Some(settings(8)));
        assert_eq!(plan.update(now, &topics(true, &[NODE])), [Step::Send(7, NODE)]);
        // The topic goes.
        let ended = plan.update(now, &BTreeMap::new());
        assert_eq!(ended, [Step::Forget(7, NODE), Step::Leave(7)]);
    }

    #[test]
    fn what_cannot_be_sent_is_not_tried_again() {
        let (now, mut plan) = (Instant::now(), Plan::new(GRACE));
        plan.appears(NODE);
        plan.subscribes(NODE, "numbers", Some(settings(8)));
        plan.update(now, &topics(true, &[]));
        plan.refuses(7, NODE);
        let ended = plan.update(now, &topics(true, &[]));
        assert_eq!(ended, [Step::Forget(7, NODE), Step::Leave(7)]);
        assert_eq!(plan.update(now, &topics(true, &[])), []);
        plan.appears(NODE);
        plan.subscribes(NODE, "numbers", Some(settings(8)));
        assert_eq!(plan.update(now, &topics(true, &[])).len(), 3);
    }

    #[test]
    fn a_line_that_breaks_is_tried_again() {
        let (now, mut plan) = (Instant::now(), Plan::new(GRACE));
        plan.appears(NODE);
        plan.subscribes(NODE, "numbers", Some(settings(8)));
        plan.update(now, &topics(true, &[]));
        plan.breaks(now, 7, NODE);
        // It has ended by itself: nothing is to be paused.
        assert_eq!(plan.update(now, &topics(true, &[NODE])), []);
        assert_eq!(plan.update(now + AGAIN, &topics(true, &[NODE])), [Step::Send(7, NODE)]);
    }
}
