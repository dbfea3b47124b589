//! What carries messages to other nodes, if this service was told of any.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};

use super::Reception;
use crate::carrier::{Carrier, Facts, Household};
use crate::pool::PoolId;
use crate::report::Row;

/// Between two attempts to start: the last service may still have the address.
const AGAIN: Duration = Duration::from_millis(100);
/// Requests for memory that may wait.
const REQUESTS: usize = 64;

pub(super) struct Carrying {
    carrier: Option<Carrier>,
    /// Held by all that work in this service's name.
    pub(super) household: Weak<Household>,
    /// When it may be tried again to start it.
    not_before: Option<Instant>,
    has_complained: bool,
    ask: Sender<(PoolId, u64)>,
    asked: Receiver<(PoolId, u64)>,
}

impl Carrying {
    pub(super) fn new() -> Self {
        let (ask, asked) = bounded(REQUESTS);
        Self {
            carrier: None,
            household: Weak::new(),
            not_before: None,
            has_complained: false,
            ask,
            asked,
        }
    }

    pub(super) fn is_on(&self) -> bool {
        self.carrier.is_some()
    }

    pub(super) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.carrier.iter().flat_map(Carrier::descriptors)
    }

    pub(super) fn longest_wait(&self) -> Option<Duration> {
        let now = Instant::now();
        match (&self.carrier, self.not_before) {
            (Some(carrier), _) => carrier.longest_wait(now),
            (None, Some(when)) => Some(when.saturating_duration_since(now)),
            (None, None) => None,
        }
    }

    pub(super) fn waits(&self, number: u32) -> bool {
        self.carrier.as_ref().is_some_and(|carrier| carrier.waits(number))
    }

    fn holds(&self, number: u32) -> bool {
        self.carrier.as_ref().is_some_and(|carrier| carrier.holds(number))
    }

    pub(super) fn listens(&self) -> Option<String> {
        self.carrier.as_ref()?.listens()
    }

    pub(super) fn rows(&self) -> Vec<Row> {
        self.carrier.as_ref().map(Carrier::rows).unwrap_or_default()
    }

    /// Does anything work in this service's name, and be it a worker that was given up?
    pub(super) fn is_at_work(&self) -> bool {
        self.household.strong_count() > 0
    }

    pub(super) fn end(&mut self) {
        self.carrier = None;
    }
}

impl Reception {
    /// Sees to what goes to other nodes and comes from them.
    pub(super) fn carry_on(&mut self) {
        self.start_carrying();
        while let Ok((pool, bytes)) = self.carrying.asked.try_recv() {
            self.grow(pool, bytes);
        }
        let topics = std::mem::take(&mut self.tell_carrier).then(|| self.facts());
        let Some(carrier) = &mut self.carrying.carrier else { return };
        if let Some(topics) = topics {
            carrier.set_topics(topics);
        }
        carrier.turn();
        let unused: Vec<u32> = self
            .registry
            .topics
            .iter()
            .filter(|(_, kept)| kept.users.is_empty())
            .map(|(number, _)| *number)
            .collect();
        for number in unused {
            self.forget_unused(number);
        }
    }

    fn start_carrying(&mut self) {
        let (Some(network), Some(seat)) = (&self.options.network, &self.seat) else { return };
        let carrying = &mut self.carrying;
        let is_too_early = carrying.not_before.is_some_and(|when| Instant::now() < when);
        if carrying.carrier.is_some() || is_too_early {
            return;
        }
        let Some(role) = seat.roster.admit_role(0) else { return };
        let household = Arc::new(Household {
            me: seat.me,
            role,
            roster: Arc::clone(&seat.roster),
            growth: carrying.ask.clone(),
            bell: Arc::clone(&self.bell),
        });
        carrying.household = Arc::downgrade(&household);
        let bell = Arc::clone(seat.hall.outward());
        let (identity, label) = (seat.hall.identity(), &self.options.label);
        match Carrier::start(network, identity, label, household, bell) {
            Ok(carrier) => {
                let listens = carrier.listens();
                tracing::info!(node = %identity, listens, "this node looks for others");
                carrying.carrier = Some(carrier);
                carrying.not_before = None;
                self.tell_carrier = true;
                for number in self.registry.topics.keys().copied().collect::<Vec<_>>() {
                    self.watch(number);
                }
            }
            Err(error) => {
                if !std::mem::replace(&mut carrying.has_complained, true) {
                    tracing::error!(%error, "this node does not reach others yet");
                }
                carrying.not_before = Some(Instant::now() + AGAIN);
            }
        }
    }

    fn facts(&self) -> BTreeMap<String, Facts> {
        let topics = self.registry.topics.iter().filter_map(|(number, kept)| {
            let (topic, [here, arrivals]) = self.registry.desk(*number)?;
            let facts = Facts {
                topic: Arc::clone(topic),
                here: Arc::clone(here),
                arrivals: Arc::clone(arrivals),
                publishes: kept.publishes,
                subscribes: kept.subscribes,
            };
            Some((topic.name().to_owned(), facts))
        });
        topics.collect()
    }

    /// Lets a topic go that nobody uses, unless other nodes are still owed messages of it.
    pub(super) fn forget_unused(&mut self, number: u32) {
        if !self.carrying.holds(number) && self.registry.forget_unused(number) {
            self.watches.forget(number);
            self.tell_carrier = true;
        }
    }
}
