//! What other nodes said that topics are like: those that are not here, and those that are other
//! ones here, or that cannot go there for another reason, whose messages do not go there, or do not
//! come from there, and both nodes say why.

use std::collections::{BTreeMap, BTreeSet};

use crate::peers::{Interest, NodeId};
use crate::replication::Side;
use crate::replication::routing::are_compatible;
use crate::replication::routing::provider_mismatch::ProviderMismatch;
use crate::report::Row;
use crate::settings::{SharedLocation, SharedSettings};

/// Topics of other nodes that are told of, to those that ask.
const MAX_REPORTED_TOPICS: usize = 4096;

/// A topic of this node.
#[derive(Debug, Clone, Copy)]
pub(in crate::replication) struct LocalUse<'a> {
    pub(in crate::replication) settings: &'a SharedSettings,
    pub(in crate::replication) publishes: bool,
    pub(in crate::replication) subscribes: bool,
}

impl LocalUse<'_> {
    /// Does somebody there want what is published here, and somebody here what is published there?
    fn wanted(&self, remote: &Interest) -> (bool, bool) {
        (self.publishes && remote.subscribes, self.subscribes && remote.publishes)
    }
}

/// What came of it when a topic was to go to another node, or to come from there.
#[derive(Debug, Default, Clone)]
struct TransferFailures {
    remote: Option<String>,
    local: Option<String>,
}

impl TransferFailures {
    fn of(&mut self, side: Side) -> &mut Option<String> {
        match side {
            Side::Writer => &mut self.remote,
            Side::Reader => &mut self.local,
        }
    }
}

type Key = (String, NodeId);

/// What other nodes said, and what does not fit.
#[derive(Debug, Default)]
pub(in crate::replication) struct IncompatibleTopics {
    remote_interests: BTreeMap<NodeId, BTreeMap<String, Interest>>,
    /// What may fit, or not, since the last look: all else is as it was.
    changed: BTreeSet<Key>,
    /// Those whose provider is another one.
    provider_mismatch: BTreeMap<NodeId, ProviderMismatch>,
    /// What could not go to a node that is there, or come from there, and why.
    failed: BTreeMap<NodeId, BTreeMap<String, TransferFailures>>,
    /// Logged already, as long as the other node has anything to do with the topic.
    logged: BTreeMap<Key, (SharedSettings, SharedSettings)>,
}

impl IncompatibleTopics {
    /// A node has this interest in a topic from now on.
    pub(in crate::replication) fn set_interest(&mut self, node: NodeId, interest: Interest) {
        // What it wants is another matter now: it is tried again.
        self.failed.remove(&node);
        self.changed.insert((interest.topic.clone(), node));
        self.remote_interests.entry(node).or_default().insert(interest.topic.clone(), interest);
    }

    /// It has none any more.
    pub(in crate::replication) fn remove_interest(&mut self, node: NodeId, topic: &str) {
        if let Some(remote_interests) = self.remote_interests.get_mut(&node)
            && remote_interests.remove(topic).is_some()
        {
            self.failed.remove(&node);
            self.changed.insert((topic.to_owned(), node));
        }
    }

    /// A topic could not go to a node that is there, or come from there.
    pub(in crate::replication) fn fails(
        &mut self,
        topic: &str,
        (node, side): (NodeId, Side),
        why: &str,
    ) {
        let of_node = self.failed.entry(node).or_default();
        *of_node.entry(topic.to_owned()).or_default().of(side) = Some(why.to_owned());
    }

    /// It does go there, or come from there.
    pub(in crate::replication) fn clear_failure(
        &mut self,
        topic: &str,
        (node, side): (NodeId, Side),
    ) {
        let of_node = self.failed.get_mut(&node);
        if let Some(failures) = of_node.and_then(|of_node| of_node.get_mut(topic)) {
            *failures.of(side) = None;
        }
    }

    /// Why nothing can go to a node, or come from there, whatever the topic.
    pub(in crate::replication) fn provider_mismatch(
        &self,
        node: NodeId,
    ) -> Option<&ProviderMismatch> {
        self.provider_mismatch.get(&node)
    }

    pub(in crate::replication) fn set_provider_mismatch(
        &mut self,
        node: NodeId,
        provider_mismatch: Option<ProviderMismatch>,
    ) {
        match provider_mismatch {
            Some(provider_mismatch) => drop(self.provider_mismatch.insert(node, provider_mismatch)),
            None => drop(self.provider_mismatch.remove(&node)),
        }
    }

    /// It is gone, or says all anew.
    pub(in crate::replication) fn forget(&mut self, node: NodeId) {
        self.failed.remove(&node);
        self.provider_mismatch.remove(&node);
        let remote_interests = self.remote_interests.remove(&node).unwrap_or_default();
        self.changed.extend(remote_interests.into_keys().map(|topic| (topic, node)));
    }

    /// A topic of this node is another one, or is used in another way, or is gone.
    pub(in crate::replication) fn local_topic_changed(&mut self, topic: &str) {
        let nodes = self
            .remote_interests
            .iter()
            .filter(|(_, remote_interests)| remote_interests.contains_key(topic));
        self.changed.extend(nodes.map(|(node, _)| (topic.to_owned(), *node)));
    }

    /// Topics that are other ones there, and were not so before: to be logged. All else that does not
    /// fit was logged where it was found.
    fn find<'a>(
        &mut self,
        local: impl Fn(&str) -> Option<LocalUse<'a>>,
    ) -> Vec<(Key, SharedSettings, SharedSettings)> {
        let mut new = Vec::new();
        for key in std::mem::take(&mut self.changed) {
            let Some(remote) = self
                .remote_interests
                .get(&key.1)
                .and_then(|remote_interests| remote_interests.get(&key.0))
            else {
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

    /// Looks what does not fit now, and logs it once.
    pub(in crate::replication) fn look<'a>(
        &mut self,
        local: impl Fn(&str) -> Option<LocalUse<'a>>,
        label: impl Fn(NodeId) -> &'a str,
    ) {
        for ((topic, node), ours, theirs) in self.find(local) {
            tracing::warn!(
                topic, %node, label = label(node), local = %ours.replicated_settings(), remote = %theirs.replicated_settings(),
                differs = ours.differs(&theirs).collect::<Vec<_>>().join(", "),
                "a topic is another one at another node: its messages do not go between them, until both \
                 say the same of it, or one of them nothing"
            );
        }
    }

    /// What a topic is like at other nodes, if it is at any: as most have it that publish, or else
    /// that subscribe. In whose memory it lies there is no matter here.
    pub(in crate::replication) fn remote_settings(&self, topic: &str) -> Option<SharedSettings> {
        let mut all: Vec<(SharedSettings, (usize, usize))> = Vec::new();
        for remote in self
            .remote_interests
            .values()
            .filter_map(|remote_interests| remote_interests.get(topic))
        {
            let (publishes, subscribes) = (remote.publishes.into(), remote.subscribes.into());
            match all.iter_mut().find(|(settings, _)| are_compatible(settings, &remote.settings)) {
                Some((settings, (most, more))) => {
                    settings.type_name = settings.type_name.or(remote.settings.type_name);
                    (*most, *more) = (*most + publishes, *more + subscribes);
                }
                None => all.push((remote.settings, (publishes, subscribes))),
            }
        }
        // Of those that are as many, what the first node has: the same for all that look.
        all.reverse();
        let (settings, _) = all.into_iter().max_by_key(|(_, count)| *count)?;
        Some(SharedSettings { place: SharedLocation::Host, ..settings })
    }

    /// Topics that are at other nodes only; if they are too many, as many of each node at most.
    pub(in crate::replication) fn remote_only_topics(
        &self,
        is_here: impl Fn(&str) -> bool,
    ) -> Vec<Row> {
        let most = (MAX_REPORTED_TOPICS / self.remote_interests.len().max(1)).max(1);
        let others = self.remote_interests.iter().flat_map(|(node, remote_interests)| {
            let others = remote_interests.values().filter(|it| !is_here(&it.topic));
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

    /// A row for each topic that would be exchanged with a node, were it the same there, and could it
    /// go there.
    pub(in crate::replication) fn rows<'a>(
        &self,
        local: impl Fn(&str) -> Option<LocalUse<'a>>,
    ) -> impl Iterator<Item = Row> {
        let remote_interests = self.remote_interests.iter();
        let all = remote_interests.flat_map(|(node, remote_interests)| {
            remote_interests.values().map(move |remote| (*node, remote))
        });
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
        if let Some(provider_mismatch) = self.provider_mismatch.get(&node) {
            differs.push(Row::PROVIDER.to_owned());
            local.push(provider_mismatch.local.clone());
            remote.push(provider_mismatch.remote.clone());
        }
        let (mut is_wanted_remotely, mut is_wanted_locally) = ours.wanted(theirs);
        if differs.is_empty() {
            let failures = self.failed.get(&node)?.get(&theirs.topic)?;
            is_wanted_remotely &= failures.remote.is_some();
            is_wanted_locally &= failures.local.is_some();
            let why = if is_wanted_remotely { &failures.remote } else { &failures.local };
            remote.extend(why.clone());
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
        }
    }

    #[test]
    fn both_sides_of_an_exchange_hear_of_it_once() {
        let mut incompatible_topics = IncompatibleTopics::default();
        let find = |incompatible_topics: &mut IncompatibleTopics, local| {
            incompatible_topics.local_topic_changed("numbers");
            incompatible_topics.find(|_| Some(local)).len()
        };
        incompatible_topics.set_interest(NODE, remote(4, false, true));
        assert_eq!(find(&mut incompatible_topics, local(true, false)), 1);
        // Publishers come and go.
        assert_eq!(find(&mut incompatible_topics, local(false, true)), 0);
        assert_eq!(incompatible_topics.rows(|_| Some(local(false, true))).count(), 0);
        assert_eq!(find(&mut incompatible_topics, local(true, false)), 0);
        assert!(matches!(
            incompatible_topics.rows(|_| Some(local(true, false))).next(),
            Some(Row::IncompatibleTopic { is_wanted_remotely: true, is_wanted_locally: false, differs, .. })
                if differs == ["depth"]
        ));
        // Other settings are another matter, and so is another node's next life.
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

    /// What is told of the only one that there is.
    fn told(
        incompatible_topics: &mut IncompatibleTopics,
        local: LocalUse<'static>,
    ) -> Option<(Vec<String>, String, String)> {
        assert!(incompatible_topics.find(|_| Some(local)).is_empty(), "it was logged before");
        let told = |row| match row {
            Row::IncompatibleTopic { differs, local, remote, .. } => (differs, local, remote),
            other => panic!("{other:?}"),
        };
        incompatible_topics.rows(|_| Some(local)).map(told).next()
    }

    #[test]
    fn nodes_with_other_providers_exchange_nothing_whatever_the_topic_is_like() {
        let mut incompatible_topics = IncompatibleTopics::default();
        incompatible_topics.set_interest(NODE, remote(8, false, true));
        assert_eq!(told(&mut incompatible_topics, local(true, false)), None);
        let provider_mismatch =
            ProviderMismatch { local: "net".to_owned(), remote: "tcp".to_owned() };
        incompatible_topics.set_provider_mismatch(NODE, Some(provider_mismatch));
        let (differs, here_it_is, there_it_is) =
            told(&mut incompatible_topics, local(true, false)).unwrap();
        assert_eq!((&*differs.join(" "), &*here_it_is, &*there_it_is), ("provider", "net", "tcp"));
        // All that differs is told at once.
        incompatible_topics.set_interest(NODE, remote(4, false, true));
        assert_eq!(incompatible_topics.find(|_| Some(local(true, false))).len(), 1);
        let (differs, _, there_it_is) = told(&mut incompatible_topics, local(true, false)).unwrap();
        assert_eq!(differs, ["depth", "provider"]);
        assert!(there_it_is.starts_with("reliable, 4 messages"), "{there_it_is}");
        assert!(there_it_is.ends_with(", by tcp"), "{there_it_is}");
        incompatible_topics.set_interest(NODE, remote(8, false, true));
        incompatible_topics.set_provider_mismatch(NODE, None);
        assert_eq!(told(&mut incompatible_topics, local(true, false)), None);
    }

    #[test]
    fn what_could_not_go_is_told_until_it_is_another_matter() {
        let mut incompatible_topics = IncompatibleTopics::default();
        incompatible_topics.set_interest(NODE, remote(8, false, true));
        for ends in [
            |incompatible_topics: &mut IncompatibleTopics| {
                incompatible_topics.clear_failure("numbers", (NODE, Side::Writer))
            },
            |incompatible_topics: &mut IncompatibleTopics| {
                incompatible_topics.set_interest(NODE, remote(8, true, true))
            },
            |incompatible_topics: &mut IncompatibleTopics| {
                incompatible_topics.remove_interest(NODE, "letters")
            },
            |incompatible_topics: &mut IncompatibleTopics| incompatible_topics.forget(NODE),
        ] {
            incompatible_topics
                .set_interest(NODE, Interest { topic: "letters".into(), ..remote(8, false, true) });
            incompatible_topics.set_interest(NODE, remote(8, false, true));
            incompatible_topics.fails("numbers", (NODE, Side::Writer), "no memory");
            // That it comes from there is another matter, and that it does not as well.
            incompatible_topics.clear_failure("numbers", (NODE, Side::Reader));
            let all = (Vec::new(), String::new(), "no memory".to_owned());
            assert_eq!(told(&mut incompatible_topics, local(true, false)), Some(all));
            ends(&mut incompatible_topics);
            assert_eq!(told(&mut incompatible_topics, local(true, false)), None);
            incompatible_topics.fails("numbers", (NODE, Side::Reader), "no memory");
            assert_eq!(told(&mut incompatible_topics, local(true, false)), None);
        }
    }

    #[test]
    fn a_topic_is_like_most_have_it_that_publish() {
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
        // As many as publish elsewhere, and the first.
        incompatible_topics.set_interest(one, remote(6, true, false));
        assert_eq!(depth(&incompatible_topics), Some(6));
        incompatible_topics.set_interest(two, remote(5, false, true));
        assert_eq!(depth(&incompatible_topics), Some(5));
        assert_eq!(incompatible_topics.remote_settings("others"), None);
    }

    #[test]
    fn topics_of_values_of_different_types_are_different_topics() {
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
            panic!("they are the same");
        };
        assert_eq!(differs, ["type"]);
        assert!(
            local.ends_with("type Pose") && remote.ends_with("type Twist"),
            "{local}, {remote}"
        );
        // A topic that is made as it is elsewhere has the type, as soon as one node names it.
        incompatible_topics.set_interest(NODE, typed(None));
        incompatible_topics.set_interest(NodeId([2; 16]), typed(Some("Pose")));
        let name = incompatible_topics
            .remote_settings("numbers")
            .and_then(|remote_settings| remote_settings.type_name);
        assert_eq!(name.map(|name| name.to_string()).as_deref(), Some("Pose"));
    }

    #[test]
    fn topics_that_are_elsewhere_only_are_told_of_and_no_more_than_may_be() {
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
        // One that has many does not hide what others have.
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
    fn what_nobody_wants_or_what_fits_is_no_misfit() {
        let mut incompatible_topics = IncompatibleTopics::default();
        for (depth, publishes, subscribes) in [(4, true, false), (8, false, true), (8, true, true)]
        {
            incompatible_topics.set_interest(NODE, remote(depth, publishes, subscribes));
            assert!(incompatible_topics.find(|_| Some(local(true, false))).is_empty());
        }
    }

    #[test]
    fn a_word_about_one_topic_is_no_reason_to_look_at_others() {
        const OTHER: NodeId = NodeId([2; 16]);
        let mut incompatible_topics = IncompatibleTopics::default();
        let interest = |topic: &str| Interest { topic: topic.into(), ..remote(4, false, true) };
        let look = |incompatible_topics: &mut IncompatibleTopics| {
            let looked = std::cell::RefCell::new(Vec::new());
            let of = |topic: &str| {
                looked.borrow_mut().push(topic.to_owned());
                (topic != "gone").then(|| local(true, false))
            };
            let new = incompatible_topics.find(of).len();
            (looked.into_inner().join(" "), new)
        };
        for topic in ["gone", "letters", "numbers"] {
            incompatible_topics.set_interest(NODE, interest(topic));
            incompatible_topics.set_interest(OTHER, interest(topic));
        }
        let all = "gone gone letters letters numbers numbers".to_owned();
        assert_eq!(look(&mut incompatible_topics), (all, 4));
        assert_eq!(look(&mut incompatible_topics), (String::new(), 0));
        incompatible_topics.set_interest(
            NODE,
            Interest { settings: SharedSettings::of_depth(5), ..interest("letters") },
        );
        assert_eq!(look(&mut incompatible_topics), ("letters".to_owned(), 1));
        incompatible_topics.local_topic_changed("numbers");
        incompatible_topics.local_topic_changed("nobody says anything of it");
        assert_eq!(look(&mut incompatible_topics), ("numbers numbers".to_owned(), 0));
        incompatible_topics.remove_interest(OTHER, "numbers");
        incompatible_topics.remove_interest(OTHER, "never said");
        let of = |topic: &str| (topic != "gone").then(|| local(true, false));
        assert_eq!(
            (look(&mut incompatible_topics), incompatible_topics.rows(of).count()),
            ((String::new(), 0), 3)
        );
        incompatible_topics.forget(NODE);
        assert_eq!(
            (look(&mut incompatible_topics), incompatible_topics.rows(of).count()),
            ((String::new(), 0), 1)
        );
        assert_eq!(incompatible_topics.logged.len(), 1);
    }
}
