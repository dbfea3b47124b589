//! The addresses at which peers are wanted, and when each is dialled next.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use super::close_reason::GoodbyeReason;
use super::connection_protocol::Timing;
use super::identity::{NodeId, SplitMix64};
use crate::log_limit::LogLimit;

/// Addresses that others told of, at most.
pub(super) const MAX_LEARNED: usize = 1024;
/// How soon an address is dialled again because others tell of it.
const MIN_REDIAL_INTERVAL: Duration = Duration::from_secs(1);
/// What each address adds to the longest pause, where there are many.
const BACKOFF_PER_ADDRESS: Duration = Duration::from_millis(5);
/// How long an answer may take before that is logged.
const NO_ANSWER_LOG_DELAY: Duration = Duration::from_secs(1);
/// Doublings of the pause between two attempts.
const MAX_DOUBLINGS: u32 = 20;
/// Attempts with the usual pause at an address whose node has a session with another service: as many
/// as it takes until a session is over whose link was lost. From then on the pause grows.
const OCCUPIED_BEFORE_BACKOFF: u32 = 10;

/// Why an address is in the book.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AddressSource {
    /// It was given at the start.
    Configured,
    /// It was given, and whoever is there is asked for others.
    Rendezvous,
    /// A rendezvous told of it.
    Learned,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DialState {
    /// To be dialled then, unless its node has a session.
    Backoff { until: Duration },
    /// Being dialled, or connected.
    Active,
    /// It is this node's own.
    OwnAddress,
}

#[derive(Debug)]
pub(super) struct AddressEntry {
    pub(super) origin: AddressSource,
    pub(super) stage: DialState,
    /// Who was there last, or is said to be there.
    pub(super) node: Option<NodeId>,
    /// What it called itself when it was there last.
    pub(super) label: Option<String>,
    /// Since when it is in its stage.
    pub(super) since: Duration,
    /// Why the last attempt came to nothing.
    pub(super) last_error: Option<String>,
    attempts: u32,
    /// How often one of the two had a session with another service, since it was a session last.
    occupied: u32,
    /// Since when nobody was there.
    unreachable_since: Duration,
    /// A node has introduced itself there, and the connection is not over.
    has_answered: bool,
    /// The reason that was logged last.
    logged: Option<String>,
    /// What may be logged of this address, which may be reached and lost without end.
    log_limit: LogLimit,
}

impl AddressEntry {
    /// Logs why it cannot be reached, unless that was the reason before. Of what a rendezvous told of,
    /// much may be gone.
    fn log(&mut self, address: &str, why: &str, (limit, now): (&mut LogLimit, Duration)) {
        if self.origin != AddressSource::Learned && self.logged.as_deref() != Some(why) {
            if self.log_limit.allows(now) && limit.allows(now) {
                tracing::info!("cannot reach {address}: {why}; retrying");
            }
            self.logged = Some(why.to_owned());
        }
    }

    /// When to log that there is no answer.
    fn unanswered_at(&self) -> Option<Duration> {
        let is_silent =
            self.stage == DialState::Active && !self.has_answered && self.logged.is_none();
        (is_silent && self.origin != AddressSource::Learned)
            .then_some(self.since + NO_ANSWER_LOG_DELAY)
    }

    /// Twice as long each time, up to this.
    fn next_backoff(&mut self, timing: &Timing, longest: Duration) -> Duration {
        let doublings = self.attempts.min(MAX_DOUBLINGS);
        self.attempts = doublings + 1;
        (timing.min_backoff * (1 << doublings)).min(longest)
    }
}

/// So that those who lost each other at the same time do not all come back at the same time.
fn jittered(pause: Duration, chance: &mut SplitMix64) -> Duration {
    let half = pause / 2;
    let nanoseconds = half.as_nanos() as u64;
    half + Duration::from_nanos(chance.draw() % (nanoseconds + 1))
}

/// The addresses, by the text that stands for them: a name may mean another host tomorrow.
#[derive(Debug, Default)]
pub(super) struct AddressBook {
    entries: BTreeMap<String, AddressEntry>,
}

impl AddressBook {
    pub(super) fn add(
        &mut self,
        address: String,
        origin: AddressSource,
        node: Option<NodeId>,
        now: Duration,
    ) {
        let entry = self.entries.entry(address).or_insert(AddressEntry {
            origin,
            stage: DialState::Backoff { until: now },
            node,
            label: None,
            since: now,
            last_error: None,
            attempts: 0,
            occupied: 0,
            unreachable_since: now,
            has_answered: false,
            logged: None,
            log_limit: LogLimit::short(),
        });
        if origin == AddressSource::Rendezvous {
            entry.origin = origin;
        }
    }

    /// A rendezvous told of it. False if there is no room.
    pub(super) fn learn(&mut self, node: NodeId, address: SocketAddr, now: Duration) -> bool {
        let text = address.to_string();
        if let Some(entry) = self.entries.get_mut(&text) {
            if entry.stage != DialState::OwnAddress && entry.origin == AddressSource::Learned {
                if entry.node != Some(node) {
                    entry.label = None;
                }
                entry.node = Some(node);
            }
            // Somebody saw it a moment ago: better than to wait for the end of a long pause,
            // but not as often as somebody says so.
            if let DialState::Backoff { until } = &mut entry.stage {
                *until = (*until).min(now.max(entry.since + MIN_REDIAL_INTERVAL));
            }
            return true;
        }
        let learnt =
            self.entries.values().filter(|entry| entry.origin == AddressSource::Learned).count();
        if learnt >= MAX_LEARNED {
            return false;
        }
        self.add(text, AddressSource::Learned, Some(node), now);
        true
    }

    /// What is to be dialled now. It is busy from then on.
    pub(super) fn due(
        &mut self,
        now: Duration,
        timing: &Timing,
        has_session: impl Fn(&NodeId) -> bool,
    ) -> Vec<String> {
        let is_here = |entry: &AddressEntry| entry.node.as_ref().is_some_and(&has_session);
        self.entries.retain(|_, entry| {
            entry.origin != AddressSource::Learned
                || !matches!(entry.stage, DialState::Backoff { .. })
                || is_here(entry)
                || now < entry.unreachable_since + timing.forget_after
        });
        let mut due = Vec::new();
        for (address, entry) in &mut self.entries {
            let DialState::Backoff { until } = entry.stage else { continue };
            if until <= now && !entry.node.as_ref().is_some_and(&has_session) {
                entry.stage = DialState::Active;
                entry.since = now;
                due.push(address.clone());
            }
        }
        due
    }

    /// When the next is due.
    pub(super) fn deadline(&self, has_session: impl Fn(&NodeId) -> bool) -> Option<Duration> {
        let resting = self.entries.values().filter_map(|entry| match entry.stage {
            DialState::Backoff { until } if !entry.node.as_ref().is_some_and(&has_session) => {
                Some(until)
            }
            _ => entry.unanswered_at(),
        });
        resting.min()
    }

    /// Logs which addresses do not answer for long.
    pub(super) fn log_unanswered(
        &mut self,
        log: &mut LogLimit,
        now: Duration,
        is_connected: impl Fn(&str) -> bool,
    ) {
        for (address, entry) in &mut self.entries {
            if entry.unanswered_at().is_some_and(|at| at <= now) {
                let why = match is_connected(address) {
                    true => "connected, handshake not complete",
                    false => "no answer yet",
                };
                entry.log(address, why, (log, now));
            }
        }
    }

    /// This node answered there, and calls itself so. True if it is to be asked for others.
    pub(super) fn reached(
        &mut self,
        address: &str,
        (node, label): (NodeId, &str),
        log: &mut LogLimit,
        now: Duration,
    ) -> bool {
        let Some(entry) = self.entries.get_mut(address) else { return false };
        entry.node = Some(node);
        entry.label = Some(label.to_owned());
        entry.unreachable_since = now;
        entry.has_answered = true;
        if entry.logged.take().is_some() && entry.log_limit.allows(now) && log.allows(now) {
            tracing::info!("reached {address}");
        }
        entry.origin == AddressSource::Rendezvous
    }

    /// It is one of this node's own addresses, and never dialled again.
    pub(super) fn is_own(&mut self, address: &str, now: Duration) {
        if let Some(entry) = self.entries.get_mut(address) {
            entry.stage = DialState::OwnAddress;
            (entry.node, entry.label) = (None, None);
            entry.since = now;
            entry.last_error = Some(GoodbyeReason::SelfConnection.to_string());
        }
    }

    /// Is the node at an address that was given as a rendezvous?
    pub(super) fn is_rendezvous(&self, node: &NodeId) -> bool {
        self.entries.values().any(|entry| {
            entry.origin == AddressSource::Rendezvous && entry.node.as_ref() == Some(node)
        })
    }

    /// The attempt, or the connection that came of it, is over.
    pub(super) fn ended(
        &mut self,
        address: &str,
        end: DialOutcome,
        (timing, chance, log): (&Timing, &mut SplitMix64, &mut LogLimit),
        now: Duration,
    ) {
        // All of them together are not dialled too often.
        let of_all = BACKOFF_PER_ADDRESS * self.entries.len() as u32;
        let longest = timing.max_backoff.max(of_all).min(timing.permanent_backoff);
        let Some(entry) = self.entries.get_mut(address) else { return };
        if entry.stage == DialState::OwnAddress {
            return;
        }
        entry.has_answered = false;
        if let Some(why) = end.why() {
            entry.log(address, why, (log, now));
        }
        let pause = match end {
            DialOutcome::Permanent(why) => {
                entry.last_error = Some(why);
                entry.attempts = MAX_DOUBLINGS;
                timing.permanent_backoff
            }
            DialOutcome::Failed(why) => {
                entry.last_error = Some(why);
                entry.next_backoff(timing, longest)
            }
            DialOutcome::SessionExists(why) => {
                entry.last_error = Some(why);
                let doublings =
                    entry.occupied.saturating_sub(OCCUPIED_BEFORE_BACKOFF).min(MAX_DOUBLINGS);
                entry.occupied = entry.occupied.saturating_add(1);
                let most = timing.permanent_backoff.max(longest);
                (entry.next_backoff(timing, longest) * (1 << doublings)).min(most)
            }
            // Nothing is wrong with the address. It rests as long as its node has a session.
            DialOutcome::Duplicate => {
                entry.last_error = None;
                (entry.attempts, entry.occupied) = (0, 0);
                timing.min_backoff
            }
            DialOutcome::Lost { why, lasted } => {
                entry.last_error = Some(why);
                entry.unreachable_since = now;
                // Who comes and goes is not dialled ever faster.
                if lasted >= timing.permanent_backoff {
                    (entry.attempts, entry.occupied) = (0, 0);
                }
                entry.next_backoff(timing, longest)
            }
        };
        entry.since = now;
        entry.stage = DialState::Backoff { until: now + jittered(pause, chance) };
    }

    /// Nothing is heard on the session with a node, which may have come about by this address: another
    /// connection is tried now.
    pub(super) fn is_stale(&mut self, node: &NodeId, dialled: Option<&str>, now: Duration) {
        for (address, entry) in &mut self.entries {
            let is_idle = matches!(entry.stage, DialState::Backoff { .. });
            if entry.node.as_ref() == Some(node) && (is_idle || dialled == Some(address.as_str())) {
                entry.stage = DialState::Backoff { until: now };
                entry.attempts = 0;
            }
        }
    }

    /// The session with a node ended, for this reason, whichever side had opened it: addresses of the
    /// node that were idle meanwhile are dialled again after a pause.
    pub(super) fn lost(
        &mut self,
        node: &NodeId,
        why: &str,
        timing: &Timing,
        chance: &mut SplitMix64,
        now: Duration,
    ) {
        for entry in self.entries.values_mut().filter(|entry| entry.node.as_ref() == Some(node)) {
            if let DialState::Backoff { until } = &mut entry.stage {
                *until = (*until).max(now + jittered(timing.min_backoff, chance));
                entry.since = now;
                entry.unreachable_since = now;
                entry.last_error = Some(why.to_owned());
            }
        }
    }

    pub(super) fn entries(&self) -> impl Iterator<Item = (&String, &AddressEntry)> {
        self.entries.iter()
    }
}

/// How an attempt or a connection came to its end.
#[derive(Debug)]
pub(super) enum DialOutcome {
    Failed(String),
    /// It will hardly be otherwise the next time.
    Permanent(String),
    /// One side has a session with another service that says it is the same node.
    SessionExists(String),
    Duplicate,
    /// It was a session, for so long.
    Lost {
        why: String,
        lasted: Duration,
    },
}

impl DialOutcome {
    fn why(&self) -> Option<&str> {
        match self {
            Self::Failed(why)
            | Self::Permanent(why)
            | Self::SessionExists(why)
            | Self::Lost { why, .. } => Some(why),
            Self::Duplicate => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// What was logged of the address last.
    fn logged<'a>(book: &'a AddressBook, address: &str) -> Option<&'a str> {
        book.entries.get(address)?.logged.as_deref()
    }

    #[test]
    fn silence_and_each_new_reason_is_logged_once() {
        let (timing, mut chance) = (Timing::new(5 * SECOND), SplitMix64(1));
        let mut log = LogLimit::new();
        let mut book = AddressBook::default();
        book.add("a:1".to_owned(), AddressSource::Configured, None, Duration::ZERO);
        book.add("b:1".to_owned(), AddressSource::Learned, None, Duration::ZERO);
        assert_eq!(book.due(Duration::ZERO, &timing, |_| false), ["a:1", "b:1"]);
        // Within a second, and then no more.
        assert_eq!(book.deadline(|_| false), Some(SECOND));
        book.log_unanswered(&mut log, SECOND / 2, |_| false);
        assert_eq!(logged(&book, "a:1"), None);
        book.log_unanswered(&mut log, SECOND, |_| false);
        assert_eq!(logged(&book, "a:1"), Some("no answer yet"));
        assert_eq!(book.deadline(|_| false), None);
        let mut fail = |book: &mut AddressBook, log: &mut LogLimit, why: &str| {
            let end = DialOutcome::Failed(why.to_owned());
            book.ended("a:1", end, (&timing, &mut chance, log), 2 * SECOND);
        };
        fail(&mut book, &mut log, "refused");
        assert_eq!(logged(&book, "a:1"), Some("refused"));
        // While it is tried again the reason stays.
        assert_eq!(book.due(20 * SECOND, &timing, |_| false), ["a:1"]);
        book.log_unanswered(&mut log, 30 * SECOND, |_| false);
        assert_eq!(logged(&book, "a:1"), Some("refused"));
        // A node is there; when it is lost that is news.
        book.reached("a:1", (NodeId([1; 16]), "x"), &mut log, 30 * SECOND);
        assert_eq!(logged(&book, "a:1"), None);
        assert_eq!(book.deadline(|_| false), None);
        fail(&mut book, &mut log, "refused");
        assert_eq!(logged(&book, "a:1"), Some("refused"));
        // What others told of may be gone.
        assert_eq!(logged(&book, "b:1"), None);
    }

    /// The longest pause between attempts at an address, among so many.
    fn max_backoff(addresses: u32, end: impl Fn() -> DialOutcome) -> Duration {
        let (timing, mut chance) = (Timing::new(Duration::from_secs(5)), SplitMix64(7));
        let (mut book, mut now, mut longest) =
            (AddressBook::default(), Duration::ZERO, Duration::ZERO);
        let mut log = LogLimit::new();
        for number in 0..addresses {
            book.add(number.to_string(), AddressSource::Configured, None, now);
        }
        for _ in 0..100 {
            assert!(book.due(now, &timing, |_| false).contains(&"0".to_owned()));
            book.ended("0", end(), (&timing, &mut chance, &mut log), now);
            let DialState::Backoff { until } = book.entries["0"].stage else { panic!("busy") };
            longest = longest.max(until - now);
            now = until;
        }
        longest
    }

    #[test]
    fn an_address_is_dialled_every_quarter_second_and_many_are_less_often() {
        let failed = || DialOutcome::Failed("refused".to_owned());
        let within = |pause: Duration, most: u64| {
            let most = Duration::from_millis(most);
            assert!(pause <= most && pause > most * 3 / 4, "{pause:?} of {most:?}");
        };
        within(max_backoff(1, failed), 250);
        within(max_backoff(1000, failed), 5000);
        within(max_backoff(1, || DialOutcome::Permanent("version".to_owned())), 10_000);
        let lost = || DialOutcome::Lost { why: String::new(), lasted: Duration::from_secs(60) };
        within(max_backoff(1, lost), 100);
    }

    #[test]
    fn address_of_a_second_service_of_a_node_is_dialled_ever_less_often() {
        let occupied =
            || DialOutcome::SessionExists("it has a session with another service".to_owned());
        let pause = max_backoff(1, occupied);
        assert!(pause > Duration::from_secs(7) && pause <= Duration::from_secs(10), "{pause:?}");
        // Until a session is noticed to be over nothing is late.
        let (timing, mut chance) = (Timing::new(Duration::from_secs(5)), SplitMix64(7));
        let (mut book, mut log) = (AddressBook::default(), LogLimit::new());
        let (mut now, mut times) = (Duration::ZERO, 0);
        book.add("there".to_owned(), AddressSource::Configured, None, now);
        while now < 60 * SECOND {
            assert_eq!(book.due(now, &timing, |_| false), ["there"]);
            book.ended("there", occupied(), (&timing, &mut chance, &mut log), now);
            let DialState::Backoff { until } = book.entries["there"].stage else { panic!("busy") };
            let is_soon = until - now <= timing.max_backoff;
            assert!(is_soon || now > SECOND * 5 / 4, "{now:?}");
            (now, times) = (until, times + 1);
        }
        assert!((12..40).contains(&times), "{times}");
        // It was a session for a while.
        assert_eq!(book.due(now, &timing, |_| false), ["there"]);
        let lost = DialOutcome::Lost { why: String::new(), lasted: 60 * SECOND };
        book.ended("there", lost, (&timing, &mut chance, &mut log), now);
        assert_eq!(book.entries["there"].occupied, 0);
    }

    #[test]
    fn reasons_that_change_all_the_time_are_logged_up_to_the_limit() {
        let (timing, mut chance) = (Timing::new(5 * SECOND), SplitMix64(1));
        let (mut book, mut log) = (AddressBook::default(), LogLimit::new());
        let node = (NodeId([1; 16]), "x");
        book.add("a:1".to_owned(), AddressSource::Configured, None, Duration::ZERO);
        for times in 0..1000 {
            let now = times * SECOND / 100;
            let failed =
                DialOutcome::Failed(["refused", "no route"][times as usize % 2].to_owned());
            book.ended("a:1", failed, (&timing, &mut chance, &mut log), now);
            book.reached("a:1", node, &mut log, now);
        }
        // Two lines each time, of which ten are logged, and one more every ten seconds.
        let suppressed = book.entries["a:1"].log_limit.all_suppressed();
        assert!((1988..=1990).contains(&suppressed), "{suppressed}");
        // Other addresses are not held up by that.
        assert_eq!(log.all_suppressed(), 0);
    }

    #[test]
    fn address_of_a_session_that_is_stale_is_dialled_at_once() {
        let (timing, node) = (Timing::new(Duration::from_secs(5)), NodeId([1; 16]));
        for dialled in [Some("there"), None] {
            let (mut book, now) = (AddressBook::default(), Duration::from_secs(1));
            book.add("there".to_owned(), AddressSource::Configured, None, now);
            assert_eq!(book.due(now, &timing, |_| false), ["there"]);
            let mut log = LogLimit::new();
            book.reached("there", (node, "label"), &mut log, now);
            if dialled.is_none() {
                // The session is another one.
                book.ended(
                    "there",
                    DialOutcome::Duplicate,
                    (&timing, &mut SplitMix64(7), &mut log),
                    now,
                );
            }
            assert!(book.due(now + timing.permanent_backoff, &timing, |_| true).is_empty());
            book.is_stale(&node, dialled, now);
            assert_eq!(book.due(now, &timing, |_| false), ["there"]);
        }
    }
}
