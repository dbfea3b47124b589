//! What nodes publish and subscribe: told to each other as numbered changes.
//!
//! A session begins with nothing known, so the whole state is the first changes.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::close_reason::CloseReason;
use super::protocol::{MAX_PROTOCOL_FRAME_LENGTH, malformed};
use crate::error::{Error, ErrorKind, Result};
use crate::settings::{MAX_TOPIC_NAME, SharedSettings, TopicSettings};

/// Topics that one node may have an interest in, and so those that it may have.
pub(crate) const MAX_INTERESTS: usize = 1 << 14;
/// Changes of one frame: they fit in a note, however long the names are.
const CHANGES_PER_FRAME: usize = MAX_PROTOCOL_FRAME_LENGTH / (MAX_TOPIC_NAME + 64);

/// What a node has to do with a topic.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Interest {
    /// The topic's name.
    pub(crate) topic: String,
    /// It has publishers there.
    pub(crate) publishes: bool,
    /// It has subscribers there.
    pub(crate) subscribes: bool,
    #[serde(with = "told")]
    pub(crate) settings: SharedSettings,
}

/// What other nodes are told of a topic's settings. How many loans there are is each node's own matter.
mod told {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use crate::settings::{Reliability, SharedLocation, SharedSettings, TopicSettings};
    use crate::type_name::TypeName;

    #[derive(Serialize, Deserialize)]
    struct WireSettings {
        place: SharedLocation,
        reliability: Reliability,
        depth: u32,
        largest: u64,
        release_microseconds: u64,
        type_name: Option<TypeName>,
    }

    pub(super) fn serialize<S: Serializer>(
        settings: &SharedSettings,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let SharedSettings {
            place,
            reliability,
            depth,
            largest,
            release_microseconds,
            type_name,
            ..
        } = *settings;
        WireSettings { place, reliability, depth, largest, release_microseconds, type_name }
            .serialize(serializer)
    }

    pub(super) fn deserialize<'a, D: Deserializer<'a>>(
        deserializer: D,
    ) -> Result<SharedSettings, D::Error> {
        let WireSettings { place, reliability, depth, largest, release_microseconds, type_name } =
            WireSettings::deserialize(deserializer)?;
        let loans = TopicSettings::default().loans;
        Ok(SharedSettings {
            place,
            reliability,
            depth,
            largest,
            loans,
            release_microseconds,
            type_name,
        })
    }
}

impl Interest {
    fn has_valid_name(&self) -> bool {
        (1..=MAX_TOPIC_NAME).contains(&self.topic.len())
    }

    /// Refuses what no node would say.
    fn check(&self) -> std::result::Result<(), CloseReason> {
        if !self.has_valid_name() {
            return Err(malformed(format!("a topic's name of {} bytes", self.topic.len())));
        }
        if !self.publishes && !self.subscribes {
            return Err(malformed("interest without publisher or subscriber"));
        }
        self.settings
            .check("read the interests of a node")
            .map_err(|error| malformed(error.detail()))
    }
}

/// What changed in what a node publishes and subscribes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum InterestChange {
    /// It has this interest from now on, and no other in this topic.
    Set(Interest),
    /// It has none in this topic any more.
    Removed(String),
}

/// All that a node publishes and subscribes, by topic.
pub(super) type Interests = BTreeMap<String, Arc<Interest>>;

/// Puts them in order, and leaves those out that are in nothing.
pub(super) fn collect(interests: impl IntoIterator<Item = Interest>) -> Result<Interests> {
    let operation = "set the interests of this node";
    let refuse = |kind, detail| Err(Error::new(operation, kind, detail));
    let mut all = Interests::new();
    for mut interest in interests {
        // Not told: a topic made anew with other ones is no change.
        interest.settings.loans = TopicSettings::default().loans;
        if !interest.has_valid_name() {
            let detail = format!("a name of {} bytes", interest.topic.len());
            return refuse(ErrorKind::InvalidArgument, detail);
        }
        if !interest.publishes && !interest.subscribes {
            continue;
        }
        if let Some(before) = all.insert(interest.topic.clone(), Arc::new(interest)) {
            let detail = format!("the topic \"{}\" is there twice", before.topic);
            return refuse(ErrorKind::InvalidArgument, detail);
        }
    }
    if all.len() > MAX_INTERESTS {
        let detail = format!("{} topics, {MAX_INTERESTS} at most", all.len());
        return refuse(ErrorKind::TooMany, detail);
    }
    Ok(all)
}

/// Tells one peer. It remembers what it told, so that what happens while the peer is
/// slow is told as one difference later.
#[derive(Debug, Default)]
pub(super) struct InterestSender {
    told: Interests,
    number: u64,
    is_behind: bool,
}

impl InterestSender {
    /// There is something to tell, at least that there is nothing.
    pub(super) fn new() -> Self {
        Self { is_behind: true, ..Self::default() }
    }

    pub(super) fn mark_changed(&mut self) {
        self.is_behind = true;
    }

    /// The next changes and their number, if the peer does not know everything yet.
    pub(super) fn next(&mut self, now: &Interests) -> Option<(u64, Vec<InterestChange>)> {
        if !self.is_behind {
            return None;
        }
        let gone = self.told.keys().filter(|topic| !now.contains_key(*topic));
        let mut changes: Vec<_> =
            gone.take(CHANGES_PER_FRAME).cloned().map(InterestChange::Removed).collect();
        let set = now.iter().filter(|(topic, interest)| {
            self.told
                .get(*topic)
                .is_none_or(|told| !Arc::ptr_eq(told, interest) && told != *interest)
        });
        changes.extend(
            set.take(CHANGES_PER_FRAME - changes.len())
                .map(|(_, set)| InterestChange::Set((**set).clone())),
        );
        self.is_behind = changes.len() == CHANGES_PER_FRAME;
        if changes.is_empty() && self.number > 0 {
            return None;
        }
        for change in &changes {
            match change {
                InterestChange::Removed(topic) => {
                    self.told.remove(topic);
                }
                InterestChange::Set(interest) => {
                    self.told.insert(interest.topic.clone(), Arc::clone(&now[&interest.topic]));
                }
            }
        }
        self.number += 1;
        Some((self.number, changes))
    }
}

/// What one peer told.
#[derive(Debug, Default)]
pub(super) struct PeerInterests {
    interests: BTreeMap<String, Interest>,
    number: u64,
}

impl PeerInterests {
    /// Changes came. They are refused if they cannot be meant for what is known.
    pub(super) fn apply(
        &mut self,
        number: u64,
        changes: &[InterestChange],
    ) -> std::result::Result<(), CloseReason> {
        if number != self.number + 1 {
            return Err(malformed(format!("changes {number} behind {}", self.number)));
        }
        self.number = number;
        for change in changes {
            match change {
                InterestChange::Removed(topic) => {
                    if self.interests.remove(topic).is_none() {
                        return Err(malformed("unsubscribe for a topic that was not subscribed"));
                    }
                }
                InterestChange::Set(interest) => {
                    interest.check()?;
                    let before = self.interests.insert(interest.topic.clone(), interest.clone());
                    if before.as_ref() == Some(interest) {
                        return Err(malformed("interest sent twice"));
                    }
                }
            }
        }
        match self.interests.len() {
            0..=MAX_INTERESTS => Ok(()),
            more => Err(malformed(format!("interests in {more} topics"))),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.interests.len()
    }
}
