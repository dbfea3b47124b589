//! Interests of other nodes in topics, and why topics are not exchanged with them. A topic may
//! exist at other nodes only, may have other settings there, or may fail for another reason. Both
//! nodes report the reason.

use std::collections::{BTreeMap, BTreeSet};

use crate::ids::NodeId;
use crate::peers::Interest;
use crate::replication::routing::ProviderMismatch;
use crate::replication::routing::plan::are_compatible;
use crate::replication::{LocalTopic, Side};
use crate::report::Row;
use crate::settings::{SharedLocation, SharedSettings};

const MAX_REPORTED_TOPICS: usize = 4096;

/// A topic of this node.
#[derive(Debug, Clone, Copy)]
pub(super) struct LocalUse<'a> {
    settings: &'a SharedSettings,
    publishes: bool,
    subscribes: bool,
}

impl<'a> LocalUse<'a> {
    pub(super) fn of(local: &'a LocalTopic) -> Self {
        let LocalTopic { topic, publishes, subscribes, .. } = local;
        Self { settings: topic.settings(), publishes: *publishes, subscribes: *subscribes }
    }

    /// Tells whether a subscriber there wants messages published here, and whether a subscriber
    /// here wants messages published there.
    fn wanted(&self, remote: &Interest) -> (bool, bool) {
        (self.publishes && remote.subscribes, self.subscribes && remote.publishes)
    }
}

type Key = (String, NodeId);

/// Interests of other nodes, and what is incompatible.
#[derive(Debug, Default)]
pub(super) struct IncompatibleTopics {
    remote_interests: BTreeMap<NodeId, BTreeMap<String, Interest>>,
    /// Topics to be checked again; all others are unchanged.
    changed: BTreeSet<Key>,
    /// Nodes with another provider.
    provider_mismatch: BTreeMap<NodeId, ProviderMismatch>,
    /// Why topics could not be sent to a connected node, or received from it: by [`Side`] here.
    failed: BTreeMap<NodeId, BTreeMap<String, [Option<String>; 2]>>,
    /// Differences logged already, until the node loses interest in the topic.
    logged: BTreeMap<Key, (SharedSettings, SharedSettings)>,
}

impl IncompatibleTopics {
    pub(super) fn set_interest(&mut self, node: NodeId, interest: Interest) {
        // The interest may be another one: the failure is cleared for a retry.
        self.failed.remove(&node);
        self.changed.insert((interest.topic.clone(), node));
        self.remote_interests.entry(node).or_default().insert(interest.topic.clone(), interest);
    }

    pub(super) fn remove_interest(&mut self, node: NodeId, topic: &str) {
        let of_node = self.remote_interests.get_mut(&node);
        if of_node.is_some_and(|of_node| of_node.remove(topic).is_some()) {
            self.failed.remove(&node);
            self.changed.insert((topic.to_owned(), node));
        }
    }

    /// Records that sending a topic to a connected node, or receiving it, failed.
    pub(super) fn record_failure(&mut self, topic: &str, (node, side): (NodeId, Side), why: &str) {
        let of_node = self.failed.entry(node).or_default();
        of_node.entry(topic.to_owned()).or_default()[side as usize] = Some(why.to_owned());
    }

    /// The topic is sent, or received, again.
    pub(super) fn clear_failure(&mut self, topic: &str, (node, side): (NodeId, Side)) {
        let of_node = self.failed.get_mut(&node);
        if let Some(failures) = of_node.and_then(|of_node| of_node.get_mut(topic)) {
            failures[side as usize] = None;
        }
    }

    /// Why nothing can be exchanged with a node, for any topic.
    pub(super) fn provider_mismatch(&self, node: NodeId) -> Option<&ProviderMismatch> {
        self.provider_mismatch.get(&node)
    }

    pub(super) fn set_provider_mismatch(
        &mut self,
        node: NodeId,
        mismatch: Option<ProviderMismatch>,
    ) {
        match mismatch {
            Some(mismatch) => self.provider_mismatch.insert(node, mismatch),
            None => self.provider_mismatch.remove(&node),
        };
    }

    /// Forgets a node that disconnected, or that will send all its interests again.
    pub(super) fn forget(&mut self, node: NodeId) {
        self.failed.remove(&node);
        self.provider_mismatch.remove(&node);
        let remote_interests = self.remote_interests.remove(&node).unwrap_or_default();
        self.changed.extend(remote_interests.into_keys().map(|topic| (topic, node)));
    }

    /// A topic of this node was created, changed or removed.
    pub(super) fn local_topic_changed(&mut self, topic: &str) {
        let nodes = self.remote_interests.iter().filter(|(_, of_node)| of_node.contains_key(topic));
        self.changed.extend(nodes.map(|(node, _)| (topic.to_owned(), *node)));
    }

    /// Topics with newly differing settings, to be logged. Other failures were logged when they
    /// occurred.
    fn find<'a>(
        &mut self,
        local: impl Fn(&str) -> Option<LocalUse<'a>>,
    ) -> Vec<(Key, SharedSettings, SharedSettings)> {
        let mut new = Vec::new();
        for key in std::mem::take(&mut self.changed) {
            let of_node = self.remote_interests.get(&key.1);
            let Some(remote) = of_node.and_then(|of_node| of_node.get(&key.0)) else {
                self.logged.remove(&key);
                continue;
            };
            let local = local(&key.0).filter(|local| local.wanted(remote) != (false, false));
            let Some((ours, theirs)) = local.map(|local| (*local.settings, remote.settings)) else {
                continue;
            };
            let settings = Some((ours, theirs));
            if !are_compatible(&ours, &theirs)
                && self.logged.insert(key.clone(), (ours, theirs)) != settings
            {
                new.push((key, ours, theirs));
            }
        }
        new
    }

    /// Checks changed topics, and logs each new difference once.
    pub(super) fn check<'a>(
        &mut self,
        local: impl Fn(&str) -> Option<LocalUse<'a>>,
        label: impl Fn(NodeId) -> &'a str,
    ) {
        for ((topic, node), ours, theirs) in self.find(local) {
            tracing::warn!(
                topic,
                %node,
                label = label(node),
                local = %ours.replicated_settings(),
                remote = %theirs.replicated_settings(),
                differs = ours.differs(&theirs).collect::<Vec<_>>().join(", "),
                "topic has other settings at another node: no messages are exchanged. Use the same \
                 settings at both nodes, or give them at only one"
            );
        }
    }

    /// The settings of a topic at other nodes: those of most publishing nodes, or else of most
    /// subscribing nodes. The memory that it uses there does not matter here.
    pub(super) fn remote_settings(&self, topic: &str) -> Option<SharedSettings> {
        let mut all: Vec<(SharedSettings, (usize, usize))> = Vec::new();
        for remote in self.remote_interests.values().filter_map(|of_node| of_node.get(topic)) {
            let (publishes, subscribes) = (remote.publishes.into(), remote.subscribes.into());
            match all.iter_mut().find(|(settings, _)| are_compatible(settings, &remote.settings)) {
                Some((settings, (most, more))) => {
                    settings.type_name = settings.type_name.or(remote.settings.type_name);
                    (*most, *more) = (*most + publishes, *more + subscribes);
                }
                None => all.push((remote.settings, (publishes, subscribes))),
            }
        }
        // On a tie, the settings of the first node, so that all callers get the same.
        all.reverse();
        let (settings, _) = all.into_iter().max_by_key(|(_, count)| *count)?;
        Some(SharedSettings { place: SharedLocation::Host, ..settings })
    }

    /// Topics of other nodes only; if there are too many, an equal share of each node at most.
    pub(super) fn remote_only_topics(&self, is_local: impl Fn(&str) -> bool) -> Vec<Row> {
        let most = (MAX_REPORTED_TOPICS / self.remote_interests.len().max(1)).max(1);
        let others = self.remote_interests.iter().flat_map(|(node, remote_interests)| {
            let others = remote_interests.values().filter(|it| !is_local(&it.topic));
            others.take(most).map(move |it| (node, it))
        });
        let others = others.take(MAX_REPORTED_TOPICS);
        let row = |(node, it): (&NodeId, &Interest)| Row::RemoteTopic {
            topic: it.topic.clone(),
            node: node.to_string(),
            publishes: it.publishes,
            subscribes: it.subscribes,
            reliability: it.settings.reliability.to_string(),
            depth: it.settings.depth,
            largest: it.settings.largest,
            release_microseconds: it.settings.release_microseconds,
        };
        others.map(row).collect()
    }

    /// Rows of topics that are not exchanged with a node though one side wants them.
    pub(super) fn rows<'a>(
        &self,
        local: impl Fn(&str) -> Option<LocalUse<'a>>,
    ) -> impl Iterator<Item = Row> {
        let all = self.remote_interests.iter();
        let all = all.flat_map(|(node, of_node)| of_node.values().map(move |it| (*node, it)));
        all.filter_map(move |(node, remote)| self.row(node, &local(&remote.topic)?, remote))
    }

    fn row(&self, node: NodeId, ours: &LocalUse<'_>, theirs: &Interest) -> Option<Row> {
        let mut differs: Vec<_> =
            ours.settings.differs(&theirs.settings).map(str::to_owned).collect();
        let (mut local, mut remote) = (Vec::new(), Vec::new());
        if !differs.is_empty() {
            local.push(ours.settings.replicated_settings().to_string());
            remote.push(theirs.settings.replicated_settings().to_string());
        }
        if let Some(mismatch) = self.provider_mismatch.get(&node) {
            differs.push(Row::PROVIDER.to_owned());
            local.push(mismatch.local.clone());
            remote.push(mismatch.remote.clone());
        }
        let (mut is_wanted_remotely, mut is_wanted_locally) = ours.wanted(theirs);
        if differs.is_empty() {
            let [not_sent, not_received] = self.failed.get(&node)?.get(&theirs.topic)?;
            is_wanted_remotely &= not_sent.is_some();
            is_wanted_locally &= not_received.is_some();
            remote.extend(if is_wanted_remotely { not_sent } else { not_received }.clone());
        }
        (is_wanted_remotely || is_wanted_locally).then(|| Row::IncompatibleTopic {
            topic: theirs.topic.clone(),
            node: node.to_string(),
            is_wanted_remotely,
            is_wanted_locally,
            local: Row::shortened(&local.join(", by ")),
            remote: Row::shortened(&remote.join(", by ")),
            differs,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: NodeId = NodeId([1; 16]);

    fn local(publishes: bool, subscribes: bool) -> LocalUse<'static> {
        static SETTINGS: SharedSettings = SharedSettings::of_depth(8);
        LocalUse { settings: &SETTINGS, publishes, subscribes }
    }

    fn remote(depth: u32, publishes: bool, subscribes: bool) -> Interest {
        Interest {
            topic: "numbers".into(),
            publishes,
            subscribes,
            settings: SharedSettings::of_depth(depth),
            subscription: 0,
        }
    }

    #[test]
    fn settings_that_differ_are_found_once_on_both_sides() {
        let mut incompatible_topics = IncompatibleTopics::default();
        let find = |incompatible_topics: &mut IncompatibleTopics, local| {
            incompatible_topics.local_topic_changed("numbers");
            incompatible_topics.find(|_| Some(local)).len()
        };
        incompatible_topics.set_interest(NODE, remote(4, false, true));
        assert_eq!(find(&mut incompatible_topics, local(true, false)), 1);
        // Publishers may come and go.
        assert_eq!(find(&mut incompatible_topics, local(false, true)), 0);
        assert_eq!(incompatible_topics.rows(|_| Some(local(false, true))).count(), 0);
        assert_eq!(find(&mut incompatible_topics, local(true, false)), 0);
        assert!(matches!(
            incompatible_topics.rows(|_| Some(local(true, false))).next(),
            Some(Row::IncompatibleTopic { is_wanted_remotely: true, is_wanted_locally: false, differs, .. })
                if differs == ["depth"]
        ));
        // Changed settings, or a node that reconnected, are found again.
        incompatible_topics.set_interest(NODE, remote(5, false, true));
        assert_eq!(find(&mut incompatible_topics, local(true, false)), 1);
        incompatible_topics.forget(NODE);
        assert_eq!(find(&mut incompatible_topics, local(true, false)), 0);
        incompatible_topics.set_interest(NODE, remote(5, true, false));
        assert_eq!(find(&mut incompatible_topics, local(false, true)), 1);
        incompatible_topics.remove_interest(NODE, "numbers");
        assert_eq!(find(&mut incompatible_topics, local(false, true)), 0);
        assert_eq!(incompatible_topics.rows(|_| Some(local(false, true))).count(), 0);
    }

    /// The only row.
    fn only_row(
        incompatible_topics: &mut IncompatibleTopics,
        local: LocalUse<'static>,
    ) -> Option<(Vec<String>, String, String)> {
        assert!(
            incompatible_topics.find(|_| Some(local)).is_empty(),
            "the difference was not logged before"
        );
        let fields = |row| match row {
            Row::IncompatibleTopic { differs, local, remote, .. } => (differs, local, remote),
            other => panic!("{other:?}"),
        };
        incompatible_topics.rows(|_| Some(local)).map(fields).next()
    }

    #[test]
    fn nodes_with_different_providers_exchange_no_topic() {
        let mut incompatible_topics = IncompatibleTopics::default();
        incompatible_topics.set_interest(NODE, remote(8, false, true));
        assert_eq!(only_row(&mut incompatible_topics, local(true, false)), None);
        let provider_mismatch =
            ProviderMismatch { local: "net".to_owned(), remote: "tcp".to_owned() };
        incompatible_topics.set_provider_mismatch(NODE, Some(provider_mismatch));
        let (differs, here, there) =
            only_row(&mut incompatible_topics, local(true, false)).unwrap();
        assert_eq!((&*differs.join(" "), &*here, &*there), ("provider", "net", "tcp"));
        // All differences are in one row.
        incompatible_topics.set_interest(NODE, remote(4, false, true));
        assert_eq!(incompatible_topics.find(|_| Some(local(true, false))).len(), 1);
        let (differs, _, there) = only_row(&mut incompatible_topics, local(true, false)).unwrap();
        assert_eq!(differs, ["depth", "provider"]);
        assert!(there.starts_with("reliable, 4 messages"), "{there}");
        assert!(there.ends_with(", by tcp"), "{there}");
        incompatible_topics.set_interest(NODE, remote(8, false, true));
        incompatible_topics.set_provider_mismatch(NODE, None);
        assert_eq!(only_row(&mut incompatible_topics, local(true, false)), None);
    }

    #[test]
    fn failure_is_reported_until_it_is_cleared() {
        let mut incompatible_topics = IncompatibleTopics::default();
        incompatible_topics.set_interest(NODE, remote(8, false, true));
        for clear in [
            |incompatible_topics: &mut IncompatibleTopics| {
                incompatible_topics.clear_failure("numbers", (NODE, Side::Writer))
            },
            |incompatible_topics: &mut IncompatibleTopics| {
                incompatible_topics.set_interest(NODE, remote(8, true, true))
            },
            |incompatible_topics: &mut IncompatibleTopics| {
                incompatible_topics.remove_interest(NODE, "images")
            },
            |incompatible_topics: &mut IncompatibleTopics| incompatible_topics.forget(NODE),
        ] {
            incompatible_topics
                .set_interest(NODE, Interest { topic: "images".into(), ..remote(8, false, true) });
            incompatible_topics.set_interest(NODE, remote(8, false, true));
            incompatible_topics.record_failure("numbers", (NODE, Side::Writer), "no memory");
            // The other direction is independent.
            incompatible_topics.clear_failure("numbers", (NODE, Side::Reader));
            let all = (Vec::new(), String::new(), "no memory".to_owned());
            assert_eq!(only_row(&mut incompatible_topics, local(true, false)), Some(all));
            clear(&mut incompatible_topics);
            assert_eq!(only_row(&mut incompatible_topics, local(true, false)), None);
            incompatible_topics.record_failure("numbers", (NODE, Side::Reader), "no memory");
            assert_eq!(only_row(&mut incompatible_topics, local(true, false)), None);
        }
    }

    #[test]
    fn remote_settings_are_those_of_most_publishers() {
        let [one, two, three] = [1, 2, 3].map(|number| NodeId([number; 16]));
        let mut incompatible_topics = IncompatibleTopics::default();
        let depth = |incompatible_topics: &IncompatibleTopics| {
            incompatible_topics.remote_settings("numbers").map(|it| it.depth)
        };
        assert_eq!(depth(&incompatible_topics), None);
        incompatible_topics.set_interest(two, remote(4, false, true));
        assert_eq!(depth(&incompatible_topics), Some(4));
        let on_device = Interest {
            settings: SharedSettings {
                place: SharedLocation::Device([7; 16]),
                ..SharedSettings::of_depth(5)
            },
            ..remote(5, true, false)
        };
        incompatible_topics.set_interest(three, on_device);
        let remote_settings = incompatible_topics.remote_settings("numbers").unwrap();
        assert_eq!((remote_settings.depth, remote_settings.place), (5, SharedLocation::Host));
        // On a tie, the settings of the first node.
        incompatible_topics.set_interest(one, remote(6, true, false));
        assert_eq!(depth(&incompatible_topics), Some(6));
        incompatible_topics.set_interest(two, remote(5, false, true));
        assert_eq!(depth(&incompatible_topics), Some(5));
        assert_eq!(incompatible_topics.remote_settings("others"), None);
    }

    #[test]
    fn topics_of_different_types_are_incompatible() {
        let typed = |name: Option<&str>| Interest {
            settings: SharedSettings {
                type_name: name.map(|name| name.parse().unwrap()),
                ..SharedSettings::of_depth(8)
            },
            ..remote(8, false, true)
        };
        let ours = typed(Some("Pose")).settings;
        let local = || Some(LocalUse { settings: &ours, publishes: true, subscribes: false });
        let mut incompatible_topics = IncompatibleTopics::default();
        for same in [None, Some("Pose")] {
            incompatible_topics.set_interest(NODE, typed(same));
            assert_eq!(incompatible_topics.rows(|_| local()).count(), 0, "{same:?}");
        }
        incompatible_topics.set_interest(NODE, typed(Some("Twist")));
        let Some(Row::IncompatibleTopic { differs, local, remote, .. }) =
            incompatible_topics.rows(|_| local()).next()
        else {
            panic!("no difference in type");
        };
        assert_eq!(differs, ["type"]);
        assert!(
            local.ends_with("type Pose") && remote.ends_with("type Twist"),
            "{local}, {remote}"
        );
        // Remote settings include the type as soon as one node names it.
        incompatible_topics.set_interest(NODE, typed(None));
        incompatible_topics.set_interest(NodeId([2; 16]), typed(Some("Pose")));
        let name = incompatible_topics
            .remote_settings("numbers")
            .and_then(|remote_settings| remote_settings.type_name);
        assert_eq!(name.map(|name| name.to_string()).as_deref(), Some("Pose"));
    }

    #[test]
    fn topics_of_other_nodes_are_reported_up_to_the_limit() {
        let mut incompatible_topics = IncompatibleTopics::default();
        incompatible_topics.set_interest(NODE, remote(4, true, false));
        assert!(incompatible_topics.remote_only_topics(|name| name == "numbers").is_empty());
        let rows = incompatible_topics.remote_only_topics(|_| false);
        assert!(matches!(
            &rows[..],
            [Row::RemoteTopic { topic, publishes: true, subscribes: false, depth: 4, .. }]
                if topic == "numbers"
        ));
        for number in 0..MAX_REPORTED_TOPICS {
            incompatible_topics.set_interest(
                NODE,
                Interest { topic: format!("{number}"), ..remote(4, true, false) },
            );
        }
        assert_eq!(incompatible_topics.remote_only_topics(|_| false).len(), MAX_REPORTED_TOPICS);
        // A node with many topics does not hide topics of others.
        const OTHER: NodeId = NodeId([2; 16]);
        incompatible_topics.set_interest(OTHER, remote(4, true, false));
        let rows = incompatible_topics.remote_only_topics(|_| false);
        let of_other =
            |row: &&Row| matches!(row, Row::RemoteTopic { node, .. } if *node == OTHER.to_string());
        assert_eq!(
            (rows.len(), rows.iter().filter(of_other).count()),
            (MAX_REPORTED_TOPICS / 2 + 1, 1)
        );
    }

    #[test]
    fn unwanted_or_compatible_topic_is_not_reported() {
        let mut incompatible_topics = IncompatibleTopics::default();
        for (depth, publishes, subscribes) in [(4, true, false), (8, false, true), (8, true, true)]
        {
            incompatible_topics.set_interest(NODE, remote(depth, publishes, subscribes));
            assert!(incompatible_topics.find(|_| Some(local(true, false))).is_empty());
        }
    }

    #[test]
    fn only_changed_topics_are_checked() {
        const OTHER: NodeId = NodeId([2; 16]);
        let mut incompatible_topics = IncompatibleTopics::default();
        let interest = |topic: &str| Interest { topic: topic.into(), ..remote(4, false, true) };
        let check = |incompatible_topics: &mut IncompatibleTopics| {
            let checked = std::cell::RefCell::new(Vec::new());
            let of = |topic: &str| {
                checked.borrow_mut().push(topic.to_owned());
                (topic != "gone").then(|| local(true, false))
            };
            let new = incompatible_topics.find(of).len();
            (checked.into_inner().join(" "), new)
        };
        for topic in ["gone", "images", "numbers"] {
            incompatible_topics.set_interest(NODE, interest(topic));
            incompatible_topics.set_interest(OTHER, interest(topic));
        }
        let all = "gone gone images images numbers numbers".to_owned();
        assert_eq!(check(&mut incompatible_topics), (all, 4));
        assert_eq!(check(&mut incompatible_topics), (String::new(), 0));
        incompatible_topics.set_interest(
            NODE,
            Interest { settings: SharedSettings::of_depth(5), ..interest("images") },
        );
        assert_eq!(check(&mut incompatible_topics), ("images".to_owned(), 1));
        incompatible_topics.local_topic_changed("numbers");
        incompatible_topics.local_topic_changed("unknown");
        assert_eq!(check(&mut incompatible_topics), ("numbers numbers".to_owned(), 0));
        incompatible_topics.remove_interest(OTHER, "numbers");
        incompatible_topics.remove_interest(OTHER, "unknown");
        let of = |topic: &str| (topic != "gone").then(|| local(true, false));
        assert_eq!(
            (check(&mut incompatible_topics), incompatible_topics.rows(of).count()),
            ((String::new(), 0), 3)
        );
        incompatible_topics.forget(NODE);
        assert_eq!(
            (check(&mut incompatible_topics), incompatible_topics.rows(of).count()),
            ((String::new(), 0), 1)
        );
        assert_eq!(incompatible_topics.logged.len(), 1);
    }
}
