//! What other nodes said that topics are like: those that are not here, and those that are other
//! ones here, whose messages do not go there, or do not come from there, and both nodes say why.

use std::collections::{BTreeMap, BTreeSet};

use super::plan::fit;
use crate::peers::{Interest, NodeIdentity};
use crate::report::Row;
use crate::settings::{SharedPlace, SharedSettings};

/// Topics of other nodes that are told of, to those that ask.
const MOST_TOLD: usize = 4096;

/// A topic of this node.
#[derive(Debug, Clone, Copy)]
pub(super) struct Here<'a> {
    pub(super) name: &'a str,
    pub(super) settings: SharedSettings,
    pub(super) publishes: bool,
    pub(super) subscribes: bool,
}

/// A topic that would be exchanged with a node, were it the same there.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Misfit {
    ours: SharedSettings,
    theirs: SharedSettings,
    /// Somebody there wants what is published here.
    is_wanted_there: bool,
    /// Somebody here wants what is published there.
    is_wanted_here: bool,
}

impl Misfit {
    fn of(here: &Here<'_>, there: &Interest) -> Option<Self> {
        let (ours, theirs) = (here.settings, there.settings);
        let is_wanted_there = here.publishes && there.subscribes;
        let is_wanted_here = here.subscribes && there.publishes;
        let is_one = (is_wanted_there || is_wanted_here) && !fit(&ours, &theirs);
        is_one.then_some(Self { ours, theirs, is_wanted_there, is_wanted_here })
    }
}

type Key = (String, NodeIdentity);

/// What other nodes said, and what does not fit.
#[derive(Debug, Default)]
pub(super) struct Misfits {
    said: BTreeMap<NodeIdentity, BTreeMap<String, Interest>>,
    /// Something was said since the last look.
    are_stale: bool,
    now: BTreeMap<Key, Misfit>,
    /// Logged already, as long as the other node has anything to do with the topic.
    logged: BTreeMap<Key, (SharedSettings, SharedSettings)>,
}

impl Misfits {
    /// A node has this interest in a topic from now on.
    pub(super) fn says(&mut self, node: NodeIdentity, interest: Interest) {
        self.said.entry(node).or_default().insert(interest.topic.clone(), interest);
        self.are_stale = true;
    }

    /// It has none any more.
    pub(super) fn is_done_with(&mut self, node: NodeIdentity, topic: &str) {
        if let Some(said) = self.said.get_mut(&node) {
            said.remove(topic);
        }
        self.are_stale = true;
    }

    /// It is gone, or says all anew.
    pub(super) fn forget(&mut self, node: NodeIdentity) {
        self.said.remove(&node);
        self.are_stale = true;
    }

    /// Is it worth another look, though the topics here are as before?
    pub(super) fn are_stale(&self) -> bool {
        self.are_stale
    }

    /// Looks what does not fit now, and gives what was not so before: to be logged.
    fn find<'a>(&mut self, topics: impl Iterator<Item = Here<'a>>) -> Vec<Key> {
        self.now.clear();
        self.are_stale = false;
        for here in topics {
            for (node, said) in &self.said {
                let misfit = said.get(here.name).and_then(|there| Misfit::of(&here, there));
                if let Some(misfit) = misfit {
                    self.now.insert((here.name.to_owned(), *node), misfit);
                }
            }
        }
        let said = &self.said;
        self.logged.retain(|(topic, node), _| {
            said.get(node).is_some_and(|interests| interests.contains_key(topic))
        });
        let mut new = BTreeSet::new();
        for (key, Misfit { ours, theirs, .. }) in &self.now {
            if self.logged.insert(key.clone(), (*ours, *theirs)) != Some((*ours, *theirs)) {
                new.insert(key.clone());
            }
        }
        new.into_iter().collect()
    }

    /// Looks what does not fit now, and logs it once.
    pub(super) fn look<'a>(&mut self, topics: impl Iterator<Item = Here<'a>>) {
        for key in self.find(topics) {
            let Some(Misfit { ours, theirs, .. }) = self.now.get(&key) else { continue };
            let (topic, node) = key;
            tracing::warn!(
                topic, %node, here = %ours, there = %theirs,
                differs = ours.differs(theirs).collect::<Vec<_>>().join(", "),
                "a topic is another one at another node: its messages do not go between them"
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
                Some((_, (most, more))) => (*most, *more) = (*most + publishes, *more + subscribes),
                None => all.push((there.settings, (publishes, subscribes))),
            }
        }
        // Of those that are as many, what the first node has: the same for all that look.
        all.reverse();
        let (settings, _) = all.into_iter().max_by_key(|(_, count)| *count)?;
        Some(SharedSettings { place: SharedPlace::Host, ..settings })
    }

    /// Topics that are at other nodes only.
    pub(super) fn elsewhere(&self, is_here: impl Fn(&str) -> bool) -> Vec<Row> {
        let all = self.said.iter().flat_map(|(node, said)| said.values().map(move |it| (node, it)));
        let others = all.filter(|(_, it)| !is_here(&it.topic)).take(MOST_TOLD);
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

    pub(super) fn rows(&self) -> impl Iterator<Item = Row> {
        self.now.iter().map(|((topic, node), misfit)| Row::Misfit {
            topic: topic.clone(),
            node: node.to_string(),
            is_wanted_there: misfit.is_wanted_there,
            is_wanted_here: misfit.is_wanted_here,
            here: misfit.ours.to_string(),
            there: misfit.theirs.to_string(),
            differs: misfit.ours.differs(&misfit.theirs).map(str::to_owned).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: NodeIdentity = NodeIdentity([1; 16]);

    fn here(publishes: bool, subscribes: bool) -> Here<'static> {
        Here { name: "numbers", settings: SharedSettings::of_depth(8), publishes, subscribes }
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
        let find = |misfits: &mut Misfits, here| misfits.find([here].into_iter()).len();
        misfits.says(NODE, there(4, false, true));
        assert_eq!(find(&mut misfits, here(true, false)), 1);
        // Publishers come and go.
        assert_eq!(find(&mut misfits, here(false, true)), 0);
        assert_eq!(misfits.rows().count(), 0);
        assert_eq!(find(&mut misfits, here(true, false)), 0);
        assert!(matches!(
            misfits.rows().next(),
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
        assert_eq!((find(&mut misfits, here(false, true)), misfits.rows().count()), (0, 0));
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
    }

    #[test]
    fn what_nobody_wants_or_what_fits_is_no_misfit() {
        let mut misfits = Misfits::default();
        for (depth, publishes, subscribes) in [(4, true, false), (8, false, true), (8, true, true)]
        {
            misfits.says(NODE, there(depth, publishes, subscribes));
            assert!(misfits.find([here(true, false)].into_iter()).is_empty());
        }
    }
}
