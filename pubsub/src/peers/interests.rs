//! Interests of nodes, sent to each other as numbered changes.
//!
//! A session begins without knowledge, so the first changes are the whole state.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::close_reason::{CloseReason, malformed};
use super::protocol_limits::MAX_PROTOCOL_FRAME_LENGTH;
use crate::error::{Error, ErrorKind, Result};
use crate::settings::{MAX_TOPIC_NAME, Reliability, SharedLocation, SharedSettings, TopicSettings};
use crate::type_name::TypeName;

/// Limit of topics that one node may have an interest in.
pub(crate) const MAX_INTERESTS: usize = 1 << 14;
/// Changes in one frame: they fit, however long the names are.
const CHANGES_PER_FRAME: usize = MAX_PROTOCOL_FRAME_LENGTH / (MAX_TOPIC_NAME + 64);

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Interest {
    pub(crate) topic: String,
    pub(crate) publishes: bool,
    pub(crate) subscribes: bool,
    #[serde(with = "WireSettings")]
    pub(crate) settings: SharedSettings,
    /// Identifies the subscription, if it subscribes: start sequences answer it.
    pub(crate) subscription: u64,
}

/// The settings that other nodes get. Loans and held samples are local to each node.
#[derive(Serialize, Deserialize)]
#[serde(remote = "SharedSettings")]
struct WireSettings {
    place: SharedLocation,
    reliability: Reliability,
    depth: u32,
    largest: u64,
    #[serde(skip, default = "default_loans")]
    loans: u32,
    #[serde(skip, default = "default_loans")]
    max_held: u32,
    release_microseconds: u64,
    type_name: Option<TypeName>,
}

fn default_loans() -> u32 {
    TopicSettings::default().loans
}

impl Interest {
    fn has_valid_name(&self) -> bool {
        (1..=MAX_TOPIC_NAME).contains(&self.topic.len())
    }

    /// Settings that other nodes do not get have the values that they read.
    pub(super) fn clear_local_settings(&mut self) {
        self.settings.loans = default_loans();
        self.settings.max_held = default_loans();
    }

    fn check(&self) -> std::result::Result<(), CloseReason> {
        if !self.has_valid_name() {
            return Err(malformed(format!("invalid topic name of {} bytes", self.topic.len())));
        }
        if !self.publishes && !self.subscribes {
            return Err(malformed("interest without publisher or subscriber"));
        }
        let checked = self.settings.check("read interests of node");
        checked.map_err(|error| malformed(error.detail()))
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum InterestChange {
    /// The node has this interest in its topic from now on.
    Set(Interest),
    /// The node has no interest in this topic any more.
    Removed(String),
}

/// All interests of a node, by topic.
pub(super) type Interests = BTreeMap<String, Arc<Interest>>;

/// Collects interests by topic, without empty ones.
pub(super) fn collect_interests(
    interests: impl IntoIterator<Item = Interest>,
) -> Result<Interests> {
    let operation = "set interests of node";
    let refuse = |kind, detail| Err(Error::new(operation, kind, detail));
    let mut all = Interests::new();
    for mut interest in interests {
        // These are not sent: a topic created again with others is no change.
        interest.clear_local_settings();
        if !interest.has_valid_name() {
            let detail = format!("invalid topic name of {} bytes", interest.topic.len());
            return refuse(ErrorKind::InvalidArgument, detail);
        }
        if !interest.publishes && !interest.subscribes {
            continue;
        }
        if let Some(before) = all.insert(interest.topic.clone(), Arc::new(interest)) {
            let detail = format!("duplicate topic \"{}\"", before.topic);
            return refuse(ErrorKind::InvalidArgument, detail);
        }
    }
    if all.len() > MAX_INTERESTS {
        let detail = format!("{} topics exceed the limit of {MAX_INTERESTS}", all.len());
        return refuse(ErrorKind::TooMany, detail);
    }
    Ok(all)
}

/// Sends interests to one peer. It records what was sent, so that changes during congestion are
/// merged into one difference.
#[derive(Debug, Default)]
pub(super) struct InterestSender {
    sent: Interests,
    number: u64,
    is_behind: bool,
}

impl InterestSender {
    /// The first frame is sent even without interests.
    pub(super) fn new() -> Self {
        Self { is_behind: true, ..Self::default() }
    }

    pub(super) fn mark_changed(&mut self) {
        self.is_behind = true;
    }

    /// The next changes and their number, if the peer lacks any.
    pub(super) fn next(&mut self, now: &Interests) -> Option<(u64, Vec<InterestChange>)> {
        if !self.is_behind {
            return None;
        }
        let removed = self.sent.keys().filter(|topic| !now.contains_key(*topic));
        let mut changes: Vec<_> =
            removed.take(CHANGES_PER_FRAME).cloned().map(InterestChange::Removed).collect();
        let set = now.iter().filter(|(topic, interest)| {
            let sent = self.sent.get(*topic);
            sent.is_none_or(|sent| !Arc::ptr_eq(sent, interest) && sent != *interest)
        });
        let set = set.take(CHANGES_PER_FRAME - changes.len());
        changes.extend(set.map(|(_, set)| InterestChange::Set((**set).clone())));
        self.is_behind = changes.len() == CHANGES_PER_FRAME;
        if changes.is_empty() && self.number > 0 {
            return None;
        }
        for change in &changes {
            match change {
                InterestChange::Removed(topic) => {
                    self.sent.remove(topic);
                }
                InterestChange::Set(interest) => {
                    self.sent.insert(interest.topic.clone(), Arc::clone(&now[&interest.topic]));
                }
            }
        }
        self.number += 1;
        Some((self.number, changes))
    }
}

#[derive(Debug, Default)]
pub(super) struct PeerInterests {
    interests: BTreeMap<String, Interest>,
    number: u64,
}

impl PeerInterests {
    /// Applies changes; refused if they contradict the known state.
    pub(super) fn apply(
        &mut self,
        number: u64,
        changes: &[InterestChange],
    ) -> std::result::Result<(), CloseReason> {
        if number != self.number + 1 {
            return Err(malformed(format!("changes {number} after {}", self.number)));
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
            more => Err(malformed(format!("interests in {more} topics exceed the limit"))),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.interests.len()
    }
}
