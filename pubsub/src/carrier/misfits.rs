//! What other nodes said that topics are like: those that are not here, and those that are other
//! ones here, or that cannot go there for another reason, whose messages do not go there, or do not
//! come from there, and both nodes say why.

use std::collections::{BTreeMap, BTreeSet};

use super::plan::fit;
use super::providers::Strangers;
use crate::bridge::Side;
use crate::peers::{Interest, NodeIdentity};
use crate::report::Row;
use crate::settings::{SharedPlace, SharedSettings};

/// Topics of other nodes that are told of, to those that ask.
const MOST_TOLD: usize = 4096;

/// A topic of this node.
#[derive(Debug, Clone, Copy)]
pub(super) struct Here<'a> {
    pub(super) settings: &'a SharedSettings,
    pub(super) publishes: bool,
    pub(super) subscribes: bool,
}

impl Here<'_> {
    /// Does somebody there want what is published here, and somebody here what is published there?
    fn wanted(&self, there: &Interest) -> (bool, bool) {
        (self.publishes && there.subscribes, self.subscribes && there.publishes)
    }
}

/// What came of it when a topic was to go to another node, or to come from there.
#[derive(Debug, Default, Clone)]
struct Failures {
    there: Option<String>,
    here: Option<String>,
}

impl Failures {
    fn of(&mut self, side: Side) -> &mut Option<String> {
        match side {
            Side::Writer => &mut self.there,
            Side::Reader => &mut self.here,
        }
    }
}

type Key = (String, NodeIdentity);

/// What other nodes said, and what does not fit.
#[derive(Debug, Default)]
pub(super) struct Misfits {
    said: BTreeMap<NodeIdentity, BTreeMap<String, Interest>>,
    /// What may fit, or not, since the last look: all else is as it was.
    changed: BTreeSet<Key>,
    /// Those whose provider is another one.
    strangers: BTreeMap<NodeIdentity, Strangers>,
    /// What could not go to a node that is there, or come from there, and why.
    failed: BTreeMap<NodeIdentity, BTreeMap<String, Failures>>,
    /// Logged already, as long as the other node has anything to do with the topic.
    logged: BTreeMap<Key, (SharedSettings, SharedSettings)>,
}

impl Misfits {
    /// A node has this interest in a topic from now on.
    pub(super) fn says(&mut self, node: NodeIdentity, interest: Interest) {
        // What it wants is another matter now: it is tried again.
        self.failed.remove(&node);
        self.changed.insert((interest.topic.clone(), node));
        self.said.entry(node).or_default().insert(interest.topic.clone(), interest);
    }

    /// It has none any more.
    pub(super) fn is_done_with(&mut self, node: NodeIdentity, topic: &str) {
        if let Some(said) = self.said.get_mut(&node)
            && said.remove(topic).is_some()
        {
            self.failed.remove(&node);
            self.changed.insert((topic.to_owned(), node));
        }
    }

    /// A topic could not go to a node that is there, or come from there.
    pub(super) fn fails(&mut self, topic: &str, (node, side): (NodeIdentity, Side), why: &str) {
        let of_node = self.failed.entry(node).or_default();
        *of_node.entry(topic.to_owned()).or_default().of(side) = Some(why.to_owned());
    }

    /// It does go there, or come from there.
    pub(super) fn goes(&mut self, topic: &str, (node, side): (NodeIdentity, Side)) {
        let of_node = self.failed.get_mut(&node);
        if let Some(failures) = of_node.and_then(|of_node| of_node.get_mut(topic)) {
            *failures.of(side) = None;
        }
    }

    /// Why nothing can go to a node, or come from there, whatever the topic.
    pub(super) fn strangers(&self, node: NodeIdentity) -> Option<&Strangers> {
        self.strangers.get(&node)
    }

    pub(super) fn set_strangers(&mut self, node: NodeIdentity, strangers: Option<Strangers>) {
        match strangers {
            Some(strangers) => drop(self.strangers.insert(node, strangers)),
            None => drop(self.strangers.remove(&node)),
        }
    }

    /// It is gone, or says all anew.
    pub(super) fn forget(&mut self, node: NodeIdentity) {
        self.failed.remove(&node);
        self.strangers.remove(&node);
        let said = self.said.remove(&node).unwrap_or_default();
        self.changed.extend(said.into_keys().map(|topic| (topic, node)));
    }

    /// A topic of this node is another one, or is used in another way, or is gone.
    pub(super) fn is_other_here(&mut self, topic: &str) {
        let nodes = self.said.iter().filter(|(_, said)| said.contains_key(topic));
        self.changed.extend(nodes.map(|(node, _)| (topic.to_owned(), *node)));
    }

    /// Topics that are other ones there, and were not so before: to be logged. All else that does not
    /// fit was logged where it was found.
    fn find<'a>(
        &mut self,
        here: impl Fn(&str) -> Option<Here<'a>>,
    ) -> Vec<(Key, SharedSettings, SharedSettings)> {
        let mut new = Vec::new();
        for key in std::mem::take(&mut self.changed) {
            let Some(there) = self.said.get(&key.1).and_then(|said| said.get(&key.0)) else {
                self.logged.remove(&key);
                continue;
            };
            let here = here(&key.0).filter(|here| here.wanted(there) != (false, false));
            let Some((ours, theirs)) = here.map(|here| (*here.settings, there.settings)) else {
                continue;
            };
            let settings = Some((ours, theirs));
            if !fit(&ours, &theirs) && self.logged.insert(key.clone(), (ours, theirs)) != settings {
                new.push((key, ours, theirs));
            }
        }
        new
    }

    /// Looks what does not fit now, and logs it once.
    pub(super) fn look<'a>(
        &mut self,
        here: impl Fn(&str) -> Option<Here<'a>>,
        label: impl Fn(NodeIdentity) -> &'a str,
    ) {
        for ((topic, node), ours, theirs) in self.find(here) {
            tracing::warn!(
                topic, %node, label = label(node), here = %ours.between_nodes(), there = %theirs.between_nodes(),
                differs = ours.differs(&theirs).collect::<Vec<_>>().join(", "),
                "a topic is another one at another node: its messages do not go between them, until both \
                 say the same of it, or one of them nothing"
            );
        }
    }

    /// What a topic is like at other nodes, if it is at any: as most have it that publish, or else
    /// that subscribe. In whose memory it lies there is no matter here.
    pub(super) fn like(&self, topic: &str) -> Option<SharedSettings> {
        let mut all: Vec<(SharedSettings, (usize, usize))> = Vec::new();
        for there in self.said.values().filter_map(|said| said.get(topic)) {
            let (publishes, subscribes) = (there.publishes.into(), there.subscribes.into());
            match all.iter_mut().find(|(settings, _)| fit(settings, &there.settings)) {
                Some((settings, (most, more))) => {
                    settings.type_name = settings.type_name.or(there.settings.type_name);
                    (*most, *more) = (*most + publishes, *more + subscribes);
                }
                None => all.push((there.settings, (publishes, subscribes))),
            }
        }
        // Of those that are as many, what the first node has: the same for all that look.
        all.reverse();
        let (settings, _) = all.into_iter().max_by_key(|(_, count)| *count)?;
        Some(SharedSettings { place: SharedPlace::Host, ..settings })
    }

    /// Topics that are at other nodes only; if they are too many, as many of each node at most.
    pub(super) fn elsewhere(&self, is_here: impl Fn(&str) -> bool) -> Vec<Row> {
        let most = (MOST_TOLD / self.said.len().max(1)).max(1);
        let others = self.said.iter().flat_map(|(node, said)| {
            let others = said.values().filter(|it| !is_here(&it.topic));
            others.take(most).map(move |it| (node, it))
        });
        let others = others.take(MOST_TOLD);
        let row = |(node, it): (&NodeIdentity, &Interest)| Row::Elsewhere {
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
    pub(super) fn rows<'a>(
        &self,
        here: impl Fn(&str) -> Option<Here<'a>>,
    ) -> impl Iterator<Item = Row> {
        let said = self.said.iter();
        let all = said.flat_map(|(node, said)| said.values().map(move |there| (*node, there)));
        all.filter_map(move |(node, there)| self.row(node, &here(&there.topic)?, there))
    }

    fn row(&self, node: NodeIdentity, ours: &Here<'_>, theirs: &Interest) -> Option<Row> {
        let mut differs: Vec<_> =
            ours.settings.differs(&theirs.settings).map(str::to_owned).collect();
        let (mut here, mut there) = (Vec::new(), Vec::new());
        if !differs.is_empty() {
            here.push(ours.settings.between_nodes().to_string());
            there.push(theirs.settings.between_nodes().to_string());
        }
        if let Some(strangers) = self.strangers.get(&node) {
            differs.push(Row::PROVIDER.to_owned());
            here.push(strangers.here.clone());
            there.push(strangers.there.clone());
        }
        let (mut is_wanted_there, mut is_wanted_here) = ours.wanted(theirs);
        if differs.is_empty() {
            let failures = self.failed.get(&node)?.get(&theirs.topic)?;
            is_wanted_there &= failures.there.is_some();
            is_wanted_here &= failures.here.is_some();
            let why = if is_wanted_there { &failures.there } else { &failures.here };
            there.extend(why.clone());
        }
        (is_wanted_there || is_wanted_here).then(|| Row::Misfit {
            topic: theirs.topic.clone(),
            node: node.to_string(),
            is_wanted_there,
            is_wanted_here,
            here: Row::shortened(&here.join(", by ")),
            there: Row::shortened(&there.join(", by ")),
            differs,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: NodeIdentity = NodeIdentity([1; 16]);

    fn here(publishes: bool, subscribes: bool) -> Here<'static> {
        static SETTINGS: SharedSettings = SharedSettings::of_depth(8);
        Here { settings: &SETTINGS, publishes, subscribes }
    }

    fn there(depth: u32, publishes: bool, subscribes: bool) -> Interest {
        Interest {
            topic: "numbers".into(),
            publishes,
            subscribes,
            settings: SharedSettings::of_depth(depth),
        }
    }

    #[test]
    fn both_sides_of_an_exchange_hear_of_it_once() {
        let mut misfits = Misfits::default();
        let find = |misfits: &mut Misfits, here| {
            misfits.is_other_here("numbers");
            misfits.find(|_| Some(here)).len()
        };
        misfits.says(NODE, there(4, false, true));
        assert_eq!(find(&mut misfits, here(true, false)), 1);
        // Publishers come and go.
        assert_eq!(find(&mut misfits, here(false, true)), 0);
        assert_eq!(misfits.rows(|_| Some(here(false, true))).count(), 0);
        assert_eq!(find(&mut misfits, here(true, false)), 0);
        assert!(matches!(
            misfits.rows(|_| Some(here(true, false))).next(),
            Some(Row::Misfit { is_wanted_there: true, is_wanted_here: false, differs, .. })
                if differs == ["depth"]
        ));
        // Other settings are another matter, and so is another node's next life.
        misfits.says(NODE, there(5, false, true));
        assert_eq!(find(&mut misfits, here(true, false)), 1);
        misfits.forget(NODE);
        assert_eq!(find(&mut misfits, here(true, false)), 0);
        misfits.says(NODE, there(5, true, false));
        assert_eq!(find(&mut misfits, here(false, true)), 1);
        misfits.is_done_with(NODE, "numbers");
        assert_eq!(find(&mut misfits, here(false, true)), 0);
        assert_eq!(misfits.rows(|_| Some(here(false, true))).count(), 0);
    }

    /// What is told of the only one that there is.
    fn told(misfits: &mut Misfits, here: Here<'static>) -> Option<(Vec<String>, String, String)> {
        assert!(misfits.find(|_| Some(here)).is_empty(), "it was logged before");
        let told = |row| match row {
            Row::Misfit { differs, here, there, .. } => (differs, here, there),
            other => panic!("{other:?}"),
        };
        misfits.rows(|_| Some(here)).map(told).next()
    }

    #[test]
    fn nodes_with_other_providers_exchange_nothing_whatever_the_topic_is_like() {
        let mut misfits = Misfits::default();
        misfits.says(NODE, there(8, false, true));
        assert_eq!(told(&mut misfits, here(true, false)), None);
        let strangers = Strangers { here: "net".to_owned(), there: "tcp".to_owned() };
        misfits.set_strangers(NODE, Some(strangers));
        let (differs, here_it_is, there_it_is) = told(&mut misfits, here(true, false)).unwrap();
        assert_eq!((&*differs.join(" "), &*here_it_is, &*there_it_is), ("provider", "net", "tcp"));
        // All that differs is told at once.
        misfits.says(NODE, there(4, false, true));
        assert_eq!(misfits.find(|_| Some(here(true, false))).len(), 1);
        let (differs, _, there_it_is) = told(&mut misfits, here(true, false)).unwrap();
        assert_eq!(differs, ["depth", "provider"]);
        assert!(there_it_is.starts_with("reliable, 4 messages"), "{there_it_is}");
        assert!(there_it_is.ends_with(", by tcp"), "{there_it_is}");
        misfits.says(NODE, there(8, false, true));
        misfits.set_strangers(NODE, None);
        assert_eq!(told(&mut misfits, here(true, false)), None);
    }

    #[test]
    fn what_could_not_go_is_told_until_it_is_another_matter() {
        let mut misfits = Misfits::default();
        misfits.says(NODE, there(8, false, true));
        for ends in [
            |misfits: &mut Misfits| misfits.goes("numbers", (NODE, Side::Writer)),
            |misfits: &mut Misfits| misfits.says(NODE, there(8, true, true)),
            |misfits: &mut Misfits| misfits.is_done_with(NODE, "letters"),
            |misfits: &mut Misfits| misfits.forget(NODE),
        ] {
            misfits.says(NODE, Interest { topic: "letters".into(), ..there(8, false, true) });
            misfits.says(NODE, there(8, false, true));
            misfits.fails("numbers", (NODE, Side::Writer), "no memory");
            // That it comes from there is another matter, and that it does not as well.
            misfits.goes("numbers", (NODE, Side::Reader));
            let all = (Vec::new(), String::new(), "no memory".to_owned());
            assert_eq!(told(&mut misfits, here(true, false)), Some(all));
            ends(&mut misfits);
            assert_eq!(told(&mut misfits, here(true, false)), None);
            misfits.fails("numbers", (NODE, Side::Reader), "no memory");
            assert_eq!(told(&mut misfits, here(true, false)), None);
        }
    }

    #[test]
    fn a_topic_is_like_most_have_it_that_publish() {
        let [one, two, three] = [1, 2, 3].map(|number| NodeIdentity([number; 16]));
        let mut misfits = Misfits::default();
        let depth = |misfits: &Misfits| misfits.like("numbers").map(|it| it.depth);
        assert_eq!(depth(&misfits), None);
        misfits.says(two, there(4, false, true));
        assert_eq!(depth(&misfits), Some(4));
        let on_device = Interest {
            settings: SharedSettings {
                place: SharedPlace::Device([7; 16]),
                ..SharedSettings::of_depth(5)
            },
            ..there(5, true, false)
        };
        misfits.says(three, on_device);
        let like = misfits.like("numbers").unwrap();
        assert_eq!((like.depth, like.place), (5, SharedPlace::Host));
        // As many as publish elsewhere, and the first.
        misfits.says(one, there(6, true, false));
        assert_eq!(depth(&misfits), Some(6));
        misfits.says(two, there(5, false, true));
        assert_eq!(depth(&misfits), Some(5));
        assert_eq!(misfits.like("others"), None);
    }

    #[test]
    fn topics_of_values_of_different_types_are_different_topics() {
        let typed = |name: Option<&str>| Interest {
            settings: SharedSettings {
                type_name: name.map(|name| name.parse().unwrap()),
                ..SharedSettings::of_depth(8)
            },
            ..there(8, false, true)
        };
        let ours = typed(Some("Pose")).settings;
        let here = || Some(Here { settings: &ours, publishes: true, subscribes: false });
        let mut misfits = Misfits::default();
        for same in [None, Some("Pose")] {
            misfits.says(NODE, typed(same));
            assert_eq!(misfits.rows(|_| here()).count(), 0, "{same:?}");
        }
        misfits.says(NODE, typed(Some("Twist")));
        let Some(Row::Misfit { differs, here, there, .. }) = misfits.rows(|_| here()).next() else {
            panic!("they are the same");
        };
        assert_eq!(differs, ["type"]);
        assert!(here.ends_with("type Pose") && there.ends_with("type Twist"), "{here}, {there}");
        // A topic that is made as it is elsewhere has the type, as soon as one node names it.
        misfits.says(NODE, typed(None));
        misfits.says(NodeIdentity([2; 16]), typed(Some("Pose")));
        let name = misfits.like("numbers").and_then(|like| like.type_name);
        assert_eq!(name.map(|name| name.to_string()).as_deref(), Some("Pose"));
    }

    #[test]
    fn topics_that_are_elsewhere_only_are_told_of_and_no_more_than_may_be() {
        let mut misfits = Misfits::default();
        misfits.says(NODE, there(4, true, false));
        assert!(misfits.elsewhere(|name| name == "numbers").is_empty());
        let rows = misfits.elsewhere(|_| false);
        assert!(matches!(
            &rows[..],
            [Row::Elsewhere { topic, publishes: true, subscribes: false, depth: 4, .. }]
                if topic == "numbers"
        ));
        for number in 0..MOST_TOLD {
            misfits.says(NODE, Interest { topic: format!("{number}"), ..there(4, true, false) });
        }
        assert_eq!(misfits.elsewhere(|_| false).len(), MOST_TOLD);
        // One that has many does not hide what others have.
        const OTHER: NodeIdentity = NodeIdentity([2; 16]);
        misfits.says(OTHER, there(4, true, false));
        let rows = misfits.elsewhere(|_| false);
        let of_other =
            |row: &&Row| matches!(row, Row::Elsewhere { node, .. } if *node == OTHER.to_string());
        assert_eq!((rows.len(), rows.iter().filter(of_other).count()), (MOST_TOLD / 2 + 1, 1));
    }

    #[test]
    fn what_nobody_wants_or_what_fits_is_no_misfit() {
        let mut misfits = Misfits::default();
        for (depth, publishes, subscribes) in [(4, true, false), (8, false, true), (8, true, true)]
        {
            misfits.says(NODE, there(depth, publishes, subscribes));
            assert!(misfits.find(|_| Some(here(true, false))).is_empty());
        }
    }

    #[test]
    fn a_word_about_one_topic_is_no_reason_to_look_at_others() {
        const OTHER: NodeIdentity = NodeIdentity([2; 16]);
        let mut misfits = Misfits::default();
        let interest = |topic: &str| Interest { topic: topic.into(), ..there(4, false, true) };
        let look = |misfits: &mut Misfits| {
            let looked = std::cell::RefCell::new(Vec::new());
            let of = |topic: &str| {
                looked.borrow_mut().push(topic.to_owned());
                (topic != "gone").then(|| here(true, false))
            };
            let new = misfits.find(of).len();
            (looked.into_inner().join(" "), new)
        };
        for topic in ["gone", "letters", "numbers"] {
            misfits.says(NODE, interest(topic));
            misfits.says(OTHER, interest(topic));
        }
        let all = "gone gone letters letters numbers numbers".to_owned();
        assert_eq!(look(&mut misfits), (all, 4));
        assert_eq!(look(&mut misfits), (String::new(), 0));
        misfits
            .says(NODE, Interest { settings: SharedSettings::of_depth(5), ..interest("letters") });
        assert_eq!(look(&mut misfits), ("letters".to_owned(), 1));
        misfits.is_other_here("numbers");
        misfits.is_other_here("nobody says anything of it");
        assert_eq!(look(&mut misfits), ("numbers numbers".to_owned(), 0));
        misfits.is_done_with(OTHER, "numbers");
        misfits.is_done_with(OTHER, "never said");
        let of = |topic: &str| (topic != "gone").then(|| here(true, false));
        assert_eq!((look(&mut misfits), misfits.rows(of).count()), ((String::new(), 0), 3));
        misfits.forget(NODE);
        assert_eq!((look(&mut misfits), misfits.rows(of).count()), ((String::new(), 0), 1));
        assert_eq!(misfits.logged.len(), 1);
    }
}
