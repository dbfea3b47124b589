//! What carries messages to other nodes, if this service was told of any.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};

use super::Reception;
use crate::carrier::{self, Carrier, Crowded, Facts, Household, NetworkOptions, Rest, Settling};
use crate::error::ErrorKind;
use crate::hall::LONGEST_NETWORK;
use crate::lock::lock;
use crate::pool::PoolId;
use crate::report::Row;
use crate::service::protocol;

/// Between two attempts to start: the last service may still have the address.
const AGAIN: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// Between two times that it is told why they fail, as long as that stays the same.
const TELLING: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(60));
/// Between two attempts to let go of what was kept for other nodes.
const LOOK: Duration = Duration::from_millis(100);
/// Requests for memory that may wait.
const REQUESTS: usize = 64;

pub(super) struct Carrying {
    pub(super) carrier: Option<Carrier>,
    /// Held by all that work in this service's name.
    pub(super) household: Weak<Household>,
    attempts: Attempts,
    /// How is another service's word.
    pub(super) inherits: bool,
    /// What is kept for other nodes was let go of, since nothing can be carried there.
    has_let_go: bool,
    /// Of some of it that was not possible yet.
    lets_go_again: bool,
    settling: Settling,
    crowded: Crowded,
    ask: Sender<(PoolId, u64)>,
    asked: Receiver<(PoolId, u64)>,
}

/// Attempts to start what carries messages, that have failed.
#[derive(Debug, Default)]
struct Attempts {
    /// The first of them.
    first: Option<Instant>,
    rest: Option<Rest>,
    /// It would fail each time: the options are impossible.
    are_vain: bool,
    /// Why the last one did.
    why: Option<(ErrorKind, String)>,
    /// Until then it is told again only if there is another reason.
    silence: Option<Rest>,
}

impl Attempts {
    /// One has failed. True if that is to be told: the first, one for another reason than the last
    /// one, and otherwise less and less often.
    fn fails(&mut self, now: Instant, is_vain: bool, why: (ErrorKind, String)) -> bool {
        self.first.get_or_insert(now);
        self.rest = Some(Rest::after(self.rest, now, AGAIN));
        let is_news = self.why.as_ref() != Some(&why) || self.are_vain != is_vain;
        self.why = Some(why);
        self.are_vain = is_vain;
        let is_told = is_news || self.silence.is_none_or(|silence| silence.is_over(now));
        if is_told {
            self.silence = Some(Rest::after(self.silence.filter(|_| !is_news), now, TELLING));
        }
        is_told
    }

    /// Why they fail, and what comes of it, for people.
    fn row(&self) -> Option<Row> {
        let (kind, why) = self.why.as_ref()?;
        let rest = if self.are_vain { "" } else { "; it is tried again and again" };
        Some(Row::not_carried(*kind, &format!("{why}{rest}")))
    }

    fn may_begin(&self, now: Instant) -> bool {
        !self.are_vain && self.rest.is_none_or(|rest| rest.is_over(now))
    }

    /// Is what is owed to other nodes kept for nothing? It is if nothing leads there, or has not
    /// for as long as a node that is gone is waited for.
    fn are_over(&self, now: Instant, network: Option<&NetworkOptions>) -> bool {
        let Some(network) = network else { return true };
        let tried = self.first.map(|first| now.saturating_duration_since(first));
        self.are_vain || tried.is_some_and(|tried| tried >= network.lost_after)
    }
}

impl Carrying {
    pub(super) fn new() -> Self {
        let (ask, asked) = bounded(REQUESTS);
        Self {
            carrier: None,
            household: Weak::new(),
            attempts: Attempts::default(),
            inherits: false,
            has_let_go: false,
            lets_go_again: false,
            settling: Settling::default(),
            crowded: Crowded::default(),
            ask,
            asked,
        }
    }

    /// Held by who looks through what a dead service had begun to deliver.
    pub(super) fn settling(&self) -> Settling {
        Settling::clone(&self.settling)
    }

    /// Nothing will go to other nodes, so nothing is kept for them.
    fn is_over(&self, network: Option<&NetworkOptions>) -> bool {
        self.carrier.is_none() && self.attempts.are_over(Instant::now(), network)
    }

    pub(super) fn longest_wait(&self) -> Option<Duration> {
        let now = Instant::now();
        if let Some(carrier) = &self.carrier {
            return carrier.longest_wait(now);
        }
        let rest = self.attempts.rest.filter(|_| !self.attempts.are_vain);
        let next = rest.map(|rest| rest.until().saturating_duration_since(now));
        next.into_iter().chain(self.lets_go_again.then_some(LOOK)).min()
    }

    /// Topics at which what arrives has begun to wait since this was asked last.
    pub(super) fn crowded(&self) -> BTreeSet<u32> {
        std::mem::take(&mut *lock(&self.crowded))
    }

    pub(super) fn rows(&mut self) -> Vec<Row> {
        match &mut self.carrier {
            Some(carrier) => carrier.rows(),
            None => self.attempts.row().into_iter().collect(),
        }
    }

    /// Does anything work in this service's name, and be it a worker that was given up?
    pub(super) fn is_at_work(&self) -> bool {
        self.household.strong_count() > 0
    }
}

impl Reception {
    /// Sees to what goes to other nodes and comes from them.
    pub(super) fn carry_on(&mut self) {
        self.start_carrying();
        while let Ok((pool, bytes)) = self.carrying.asked.try_recv() {
            self.grow(pool, bytes);
        }
        if self.carrying.carrier.is_some() {
            let topics = std::mem::take(&mut self.tell_carrier).then(|| self.facts());
            let changed = std::mem::take(&mut self.changed);
            let Some(carrier) = &mut self.carrying.carrier else { return };
            carrier.have_changed(&changed);
            if let Some(topics) = topics {
                carrier.set_topics(topics);
            }
            carrier.turn();
        } else if self.carrying.is_over(self.options.network.as_ref()) {
            self.let_go_of_all();
        }
        for number in self.registry.unused().collect::<Vec<_>>() {
            self.forget_unused(number);
        }
    }

    /// Nothing can be carried to other nodes: what an earlier service kept for them is let go of, or
    /// those that publish would wait for ever.
    fn let_go_of_all(&mut self) {
        let carrying = &mut self.carrying;
        let again = std::mem::take(&mut carrying.lets_go_again);
        let is_first = !std::mem::replace(&mut carrying.has_let_go, true);
        if std::mem::take(&mut self.tell_carrier) || again || is_first {
            for number in self.registry.topics.keys().copied().collect::<Vec<_>>() {
                self.let_go(number);
            }
        }
    }

    /// True if nothing of a topic is kept for other nodes any more.
    fn let_go(&mut self, number: u32) -> bool {
        let (Some(seat), Some((topic, [here, _]))) = (&self.seat, self.registry.desk(number))
        else {
            return true;
        };
        let Some(role) = seat.roster.admit_role(0) else { return true };
        match carrier::let_go(topic, here, &seat.caller(), role) {
            Ok(false) => true,
            Ok(true) => {
                tracing::warn!(
                    topic = topic.name(),
                    "this service does not reach other nodes: what they are owed is not kept"
                );
                true
            }
            Err(error) => {
                tracing::debug!(%error, "cannot let go of what other nodes are owed yet");
                self.carrying.lets_go_again = true;
                false
            }
        }
    }

    /// Who is told nothing about other nodes goes on with what the last service was told.
    pub(super) fn inherit_network(&mut self) {
        let Some(seat) = self.seat.as_ref().filter(|_| self.options.network.is_none()) else {
            return;
        };
        let Some(kept) = seat.hall.network() else { return };
        match protocol::decode::<NetworkOptions>("inherit how a node is connected", &kept) {
            Ok(network) => {
                let listen = network.listen.map(tracing::field::display);
                let peers = network.peers.join(", ");
                tracing::info!(listen, peers, "other nodes are reached as by the last service");
                (self.options.network, self.carrying.inherits) = (Some(network), true);
            }
            Err(error) => {
                tracing::error!(%error, "this node does not reach others any more");
            }
        }
    }

    /// The next service of this node is to be connected like this.
    fn bequeath(&self, network: &NetworkOptions) {
        let Some(seat) = &self.seat else { return };
        let bytes = protocol::encode(network);
        if seat.hall.network().as_ref() == Some(&bytes) || seat.hall.keep_network(&bytes) {
            return;
        }
        tracing::warn!(
            bytes = bytes.len(),
            most = LONGEST_NETWORK,
            "a service without network options that takes over will not reach other nodes: \
             these options are too long to be kept"
        );
    }

    /// Lets other nodes see this one, if it is told how.
    pub(super) fn start_carrying(&mut self) {
        let (Some(network), Some(seat)) = (&self.options.network, &self.seat) else { return };
        let carrying = &mut self.carrying;
        if carrying.carrier.is_some() || !carrying.attempts.may_begin(Instant::now()) {
            return;
        }
        let Some(role) = seat.roster.admit_role(0) else { return };
        let household = Arc::new(Household {
            me: seat.me,
            role,
            roster: Arc::clone(&seat.roster),
            growth: carrying.ask.clone(),
            bell: Arc::clone(&self.bell),
            crowded: Crowded::clone(&carrying.crowded),
            settling: Settling::clone(&carrying.settling),
        });
        carrying.household = Arc::downgrade(&household);
        let bell = Arc::clone(seat.hall.outward());
        let (identity, label) = (seat.hall.identity(), &self.options.label);
        let is_first = carrying.attempts.first.is_none();
        if is_first {
            network.say_if_insecure();
        }
        match Carrier::start(network, identity, label, household, bell) {
            Ok(carrier) => {
                let (listens, legacy) = (carrier.listens(), carrier.legacy(label));
                match (is_first, &listens) {
                    (false, Some(listens)) => tracing::info!(
                        node = %identity,
                        listens,
                        "this node listens now, and looks for others"
                    ),
                    _ => tracing::info!(node = %identity, listens, "this node looks for others"),
                }
                carrying.carrier = Some(carrier);
                (carrying.attempts, carrying.has_let_go) = (Attempts::default(), false);
                self.tell_carrier = true;
                self.bequeath(&legacy);
            }
            Err(error) => {
                // What another service could do comes right again.
                let is_vain = error.kind() == ErrorKind::InvalidArgument && !carrying.inherits;
                let attempts = &mut carrying.attempts;
                let why = (error.kind(), error.to_string());
                let is_told = attempts.fails(Instant::now(), is_vain, why);
                if is_told && is_vain {
                    tracing::error!(%error, "this node cannot reach others");
                } else if is_told {
                    tracing::error!(
                        %error,
                        "this node does not reach others; it is tried again and again"
                    );
                }
                if is_first && !is_vain && !carrying.inherits {
                    self.bequeath(&network.clone());
                }
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
        let is_unused = self.registry.is_unused(number);
        let kept = self.registry.topics.get(&number).filter(|_| is_unused);
        let Some(topic) = kept.map(|kept| Arc::clone(&kept.topic)) else { return };
        let is_held = if self.carrying.is_over(self.options.network.as_ref()) {
            !self.let_go(number)
        } else {
            // By the last service, say, though nobody carries it yet.
            self.carrying.carrier.as_ref().is_some_and(|it| it.holds(number))
                || carrier::is_owed(&topic)
        };
        if !is_held && self.registry.forget_unused(number) {
            log_change!(self, topic = topic.name(), "a topic is gone");
            self.watches.forget(number);
            self.changed.remove(&number);
            self.tell_carrier = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn because(why: &str) -> (ErrorKind, String) {
        (ErrorKind::CannotListen, why.to_owned())
    }

    #[test]
    fn why_it_fails_is_told_at_once_if_it_is_news_and_else_less_and_less_often() {
        let (now, mut attempts) = (Instant::now(), Attempts::default());
        let mut told = Vec::new();
        for seconds in 0..300 {
            let why = if seconds < 200 { "no such address" } else { "taken" };
            if attempts.fails(now + Duration::from_secs(seconds), false, because(why)) {
                told.push(seconds);
            }
        }
        assert_eq!(told, [0, 5, 15, 35, 75, 135, 195, 200, 205, 215, 235, 275]);
    }

    #[test]
    fn what_is_owed_is_kept_as_long_as_there_is_hope() {
        let network = NetworkOptions::default();
        let (now, mut attempts) = (Instant::now(), Attempts::default());
        assert!(attempts.are_over(now, None));
        assert!(!attempts.are_over(now, Some(&network)) && attempts.may_begin(now));
        attempts.fails(now, false, because("taken"));
        assert!(!attempts.may_begin(now) && attempts.may_begin(now + AGAIN.0));
        assert!(!attempts.are_over(now + network.lost_after / 2, Some(&network)));
        attempts.fails(now + network.lost_after / 2, false, because("taken"));
        let late = now + network.lost_after;
        assert!(attempts.are_over(late, Some(&network)));
        // It may come right yet.
        assert!(attempts.may_begin(late));
        attempts.fails(now, true, because("impossible"));
        assert!(attempts.are_over(now, Some(&network)) && !attempts.may_begin(late + 100 * LOOK));
    }
}
