//! The addresses of wanted peers, and when each is dialled next.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, SystemTime};

use threads::RetryBackoff;

use super::close_reason::GoodbyeReason;
use super::mesh::{PeerReport, PeerState};
use super::{SplitMix64, Timing};
use crate::ids::NodeId;
use crate::log_limit::LogLimit;

/// Limit of addresses learned from other nodes.
pub(super) const MAX_LEARNED: usize = 1024;
/// Minimum interval of dials of an address that other nodes report.
const MIN_REDIAL_INTERVAL: Duration = Duration::from_secs(1);
/// What each address adds to the longest backoff, where there are many.
const BACKOFF_PER_ADDRESS: Duration = Duration::from_millis(5);
/// How long an answer may be missing before that is logged.
const NO_ANSWER_LOG_DELAY: Duration = Duration::from_secs(1);
/// Limit of doublings at an address that has a session with another service.
const MAX_DOUBLINGS: u32 = 20;
/// Attempts with the usual backoff at an address whose node has a session with another service: as
/// many as it takes until a session with a lost link ends. Afterwards the backoff grows.
const OCCUPIED_BEFORE_BACKOFF: u32 = 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AddressSource {
    Configured,
    /// A configured address whose node is asked for others.
    Rendezvous,
    /// A rendezvous reported it.
    Learned,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DialState {
    /// To be dialled at `until`, unless its node has a session.
    Backoff { until: Duration },
    /// Being dialled, or connected.
    Active,
    /// The address is this node's own.
    OwnAddress,
}

#[derive(Debug)]
struct AddressEntry {
    origin: AddressSource,
    state: DialState,
    /// The node that was there last, or is reported to be there.
    node: Option<NodeId>,
    /// The last label of that node.
    label: Option<String>,
    /// Since when it is in its state.
    since: Duration,
    last_error: Option<String>,
    /// None while no attempt has failed.
    backoff: Option<RetryBackoff>,
    /// Consecutive attempts that met a session with another service.
    occupied: u32,
    /// Since when no node was reached.
    unreachable_since: Duration,
    /// A handshake is complete, and the connection is not closed.
    has_answered: bool,
    /// The last logged reason.
    logged: Option<String>,
    /// Log limit of this address, which may be reached and lost repeatedly.
    log_limit: LogLimit,
}

impl AddressEntry {
    /// Logs why it cannot be reached, unless the reason was logged before. Learned addresses are
    /// not logged, since many may be obsolete.
    fn log(&mut self, address: &str, why: &str, limit: &mut LogLimit, now: Duration) {
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
            self.state == DialState::Active && !self.has_answered && self.logged.is_none();
        (is_silent && self.origin != AddressSource::Learned)
            .then_some(self.since + NO_ANSWER_LOG_DELAY)
    }

    /// Doubles each time, up to a maximum.
    fn next_backoff(&mut self, timing: &Timing, longest: Duration) -> Duration {
        let new = || RetryBackoff::new(timing.min_backoff, timing.permanent_backoff);
        self.backoff.get_or_insert_with(new).next_pause().min(longest)
    }
}

/// A random pause, so that nodes that lost each other at the same time do not all dial at the same
/// time.
fn jittered(pause: Duration, random: &mut SplitMix64) -> Duration {
    let half = pause / 2;
    let nanoseconds = half.as_nanos() as u64;
    half + Duration::from_nanos(random.draw() % (nanoseconds + 1))
}

/// The addresses, by their text: a name may resolve to another host later.
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
            state: DialState::Backoff { until: now },
            node,
            label: None,
            since: now,
            last_error: None,
            backoff: None,
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

    /// Adds an address that a rendezvous reported. False if the table is full.
    pub(super) fn learn(&mut self, node: NodeId, address: SocketAddr, now: Duration) -> bool {
        let text = address.to_string();
        if let Some(entry) = self.entries.get_mut(&text) {
            if entry.state != DialState::OwnAddress && entry.origin == AddressSource::Learned {
                if entry.node != Some(node) {
                    entry.label = None;
                }
                entry.node = Some(node);
            }
            // Another node reached it recently: dial it soon, but not each time it is reported.
            if let DialState::Backoff { until } = &mut entry.state {
                *until = (*until).min(now.max(entry.since + MIN_REDIAL_INTERVAL));
            }
            return true;
        }
        let learned =
            self.entries.values().filter(|entry| entry.origin == AddressSource::Learned).count();
        if learned >= MAX_LEARNED {
            return false;
        }
        self.add(text, AddressSource::Learned, Some(node), now);
        true
    }

    /// Takes the addresses to be dialled now, and marks them active.
    pub(super) fn due(
        &mut self,
        now: Duration,
        timing: &Timing,
        has_session: impl Fn(&NodeId) -> bool,
    ) -> Vec<String> {
        let is_connected = |entry: &AddressEntry| entry.node.as_ref().is_some_and(&has_session);
        self.entries.retain(|_, entry| {
            entry.origin != AddressSource::Learned
                || !matches!(entry.state, DialState::Backoff { .. })
                || is_connected(entry)
                || now < entry.unreachable_since + timing.forget_after
        });
        let mut due = Vec::new();
        for (address, entry) in &mut self.entries {
            let DialState::Backoff { until } = entry.state else { continue };
            if until <= now && !is_connected(entry) {
                entry.state = DialState::Active;
                entry.since = now;
                due.push(address.clone());
            }
        }
        due
    }

    /// When the next address is due.
    pub(super) fn deadline(&self, has_session: impl Fn(&NodeId) -> bool) -> Option<Duration> {
        let times = self.entries.values().filter_map(|entry| match entry.state {
            DialState::Backoff { until } => {
                (!entry.node.as_ref().is_some_and(&has_session)).then_some(until)
            }
            _ => entry.unanswered_at(),
        });
        times.min()
    }

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
                entry.log(address, why, log, now);
            }
        }
    }

    /// Records the node reached at an address. True if it is to be asked for other nodes.
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

    /// Marks an address of this node itself; it is never dialled again.
    pub(super) fn is_own(&mut self, address: &str, now: Duration) {
        if let Some(entry) = self.entries.get_mut(address) {
            entry.state = DialState::OwnAddress;
            (entry.node, entry.label) = (None, None);
            entry.since = now;
            entry.last_error = Some(GoodbyeReason::SelfConnection.to_string());
        }
    }

    /// Returns true if a node is at an address configured as a rendezvous.
    pub(super) fn is_rendezvous(&self, node: &NodeId) -> bool {
        self.entries.values().any(|entry| {
            entry.origin == AddressSource::Rendezvous && entry.node.as_ref() == Some(node)
        })
    }

    /// An attempt, or the connection it led to, has ended.
    pub(super) fn ended(
        &mut self,
        address: &str,
        (outcome, why): (DialOutcome, &str),
        (timing, random, log): (&Timing, &mut SplitMix64, &mut LogLimit),
        now: Duration,
    ) {
        // Bounds the rate of all dials together.
        let of_all = BACKOFF_PER_ADDRESS * self.entries.len() as u32;
        let longest = timing.max_backoff.max(of_all).min(timing.permanent_backoff);
        let Some(entry) = self.entries.get_mut(address) else { return };
        if entry.state == DialState::OwnAddress {
            return;
        }
        entry.has_answered = false;
        // The address of a duplicate is fine: it is not dialled while its node has a session.
        entry.last_error = (outcome != DialOutcome::Duplicate).then(|| why.to_owned());
        if entry.last_error.is_some() {
            entry.log(address, why, log, now);
        }
        let pause = match outcome {
            DialOutcome::Permanent => {
                let longest = timing.permanent_backoff;
                entry.backoff.insert(RetryBackoff::new(longest, longest)).next_pause()
            }
            DialOutcome::Failed => entry.next_backoff(timing, longest),
            DialOutcome::SessionExists => {
                let doublings =
                    entry.occupied.saturating_sub(OCCUPIED_BEFORE_BACKOFF).min(MAX_DOUBLINGS);
                entry.occupied = entry.occupied.saturating_add(1);
                let most = timing.permanent_backoff.max(longest);
                (entry.next_backoff(timing, longest) * (1 << doublings)).min(most)
            }
            DialOutcome::Duplicate => {
                (entry.backoff, entry.occupied) = (None, 0);
                timing.min_backoff
            }
            DialOutcome::Lost { lasted } => {
                entry.unreachable_since = now;
                // A node that connects and disconnects repeatedly is not dialled ever faster.
                if lasted >= timing.permanent_backoff {
                    (entry.backoff, entry.occupied) = (None, 0);
                }
                entry.next_backoff(timing, longest)
            }
        };
        entry.since = now;
        entry.state = DialState::Backoff { until: now + jittered(pause, random) };
    }

    /// A session with a node, which may use this address, is stale: dial again now.
    pub(super) fn is_stale(&mut self, node: &NodeId, dialled: Option<&str>, now: Duration) {
        for (address, entry) in &mut self.entries {
            let is_idle = matches!(entry.state, DialState::Backoff { .. });
            if entry.node.as_ref() == Some(node) && (is_idle || dialled == Some(address.as_str())) {
                entry.state = DialState::Backoff { until: now };
                entry.backoff = None;
            }
        }
    }

    /// A session with a node ended, whichever side opened it: its idle addresses are dialled again
    /// after a pause.
    pub(super) fn lost(
        &mut self,
        node: &NodeId,
        why: &str,
        timing: &Timing,
        random: &mut SplitMix64,
        now: Duration,
    ) {
        for entry in self.entries.values_mut().filter(|entry| entry.node.as_ref() == Some(node)) {
            if let DialState::Backoff { until } = &mut entry.state {
                *until = (*until).max(now + jittered(timing.min_backoff, random));
                entry.since = now;
                entry.unreachable_since = now;
                entry.last_error = Some(why.to_owned());
            }
        }
    }

    /// Returns true if a node was last reached at one of the addresses, or is reported to be there.
    pub(super) fn contains(&self, node: &NodeId) -> bool {
        self.entries.values().any(|entry| entry.node.as_ref() == Some(node))
    }

    /// The state of each address, unless a connection or a session with its node has one.
    pub(super) fn reports(
        &self,
        has_connection: impl Fn(&str) -> bool,
        has_session: impl Fn(&NodeId) -> bool,
        moment: impl Fn(Duration) -> SystemTime,
    ) -> impl Iterator<Item = PeerReport> {
        self.entries.iter().filter_map(move |(address, entry)| {
            let state = match entry.state {
                DialState::OwnAddress => PeerState::SelfConnection,
                DialState::Active if has_connection(address) => return None,
                DialState::Active => PeerState::Dialling,
                // Another address of a connected node.
                DialState::Backoff { .. } if entry.node.as_ref().is_some_and(&has_session) => {
                    return None;
                }
                DialState::Backoff { .. } => PeerState::Backoff,
            };
            Some(PeerReport {
                identity: entry.node,
                label: entry.label.clone(),
                address: address.clone(),
                state,
                is_dialled: entry.state != DialState::OwnAddress,
                since: moment(entry.since),
                last_error: entry.last_error.clone(),
            })
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DialOutcome {
    Failed,
    /// The next attempt will most likely fail, too.
    Permanent,
    /// A session exists with another service of the same node id.
    SessionExists,
    Duplicate,
    /// The session ended, after this duration.
    Lost {
        lasted: Duration,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// The last logged reason of an address.
    fn logged<'a>(book: &'a AddressBook, address: &str) -> Option<&'a str> {
        book.entries.get(address)?.logged.as_deref()
    }

    #[test]
    fn missing_answer_and_each_new_reason_are_logged_once() {
        let (timing, mut random) = (Timing::new(5 * SECOND), SplitMix64(1));
        let mut log = LogLimit::new();
        let mut book = AddressBook::default();
        book.add("a:1".to_owned(), AddressSource::Configured, None, Duration::ZERO);
        book.add("b:1".to_owned(), AddressSource::Learned, None, Duration::ZERO);
        assert_eq!(book.due(Duration::ZERO, &timing, |_| false), ["a:1", "b:1"]);
        // Logged after a second, and only once.
        assert_eq!(book.deadline(|_| false), Some(SECOND));
        book.log_unanswered(&mut log, SECOND / 2, |_| false);
        assert_eq!(logged(&book, "a:1"), None);
        book.log_unanswered(&mut log, SECOND, |_| false);
        assert_eq!(logged(&book, "a:1"), Some("no answer yet"));
        assert_eq!(book.deadline(|_| false), None);
        let mut fail = |book: &mut AddressBook, log: &mut LogLimit, why: &str| {
            book.ended("a:1", (DialOutcome::Failed, why), (&timing, &mut random, log), 2 * SECOND);
        };
        fail(&mut book, &mut log, "refused");
        assert_eq!(logged(&book, "a:1"), Some("refused"));
        // The reason stays while it is dialled again.
        assert_eq!(book.due(20 * SECOND, &timing, |_| false), ["a:1"]);
        book.log_unanswered(&mut log, 30 * SECOND, |_| false);
        assert_eq!(logged(&book, "a:1"), Some("refused"));
        // After a node was reached, the loss is logged again.
        book.reached("a:1", (NodeId([1; 16]), "x"), &mut log, 30 * SECOND);
        assert_eq!(logged(&book, "a:1"), None);
        assert_eq!(book.deadline(|_| false), None);
        fail(&mut book, &mut log, "refused");
        assert_eq!(logged(&book, "a:1"), Some("refused"));
        // Learned addresses are not logged.
        assert_eq!(logged(&book, "b:1"), None);
    }

    /// The longest pause between attempts at one of many addresses.
    fn max_backoff(addresses: u32, outcome: DialOutcome) -> Duration {
        let (timing, mut random) = (Timing::new(Duration::from_secs(5)), SplitMix64(7));
        let (mut book, mut now, mut longest) =
            (AddressBook::default(), Duration::ZERO, Duration::ZERO);
        let mut log = LogLimit::new();
        for number in 0..addresses {
            book.add(number.to_string(), AddressSource::Configured, None, now);
        }
        for _ in 0..100 {
            assert!(book.due(now, &timing, |_| false).contains(&"0".to_owned()));
            book.ended("0", (outcome, ""), (&timing, &mut random, &mut log), now);
            let DialState::Backoff { until } = book.entries["0"].state else { panic!("busy") };
            longest = longest.max(until - now);
            now = until;
        }
        longest
    }

    #[test]
    fn address_is_dialled_every_quarter_second_less_often_if_many() {
        let failed = DialOutcome::Failed;
        let within = |pause: Duration, most: u64| {
            let most = Duration::from_millis(most);
            assert!(pause <= most && pause > most * 3 / 4, "{pause:?} of {most:?}");
        };
        within(max_backoff(1, failed), 250);
        within(max_backoff(1000, failed), 5000);
        within(max_backoff(1, DialOutcome::Permanent), 10_000);
        let lost = DialOutcome::Lost { lasted: Duration::from_secs(60) };
        within(max_backoff(1, lost), 100);
    }

    #[test]
    fn address_of_a_second_service_is_dialled_less_and_less_often() {
        let occupied = DialOutcome::SessionExists;
        let pause = max_backoff(1, occupied);
        assert!(pause > Duration::from_secs(7) && pause <= Duration::from_secs(10), "{pause:?}");
        // Until the end of a session is detected, no dial is delayed.
        let (timing, mut random) = (Timing::new(Duration::from_secs(5)), SplitMix64(7));
        let (mut book, mut log) = (AddressBook::default(), LogLimit::new());
        let (mut now, mut times) = (Duration::ZERO, 0);
        book.add("there".to_owned(), AddressSource::Configured, None, now);
        while now < 60 * SECOND {
            assert_eq!(book.due(now, &timing, |_| false), ["there"]);
            book.ended("there", (occupied, "occupied"), (&timing, &mut random, &mut log), now);
            let DialState::Backoff { until } = book.entries["there"].state else { panic!("busy") };
            let is_soon = until - now <= timing.max_backoff;
            assert!(is_soon || now > SECOND * 5 / 4, "{now:?}");
            (now, times) = (until, times + 1);
        }
        assert!((12..40).contains(&times), "{times}");
        // It was a session for a while.
        assert_eq!(book.due(now, &timing, |_| false), ["there"]);
        let lost = DialOutcome::Lost { lasted: 60 * SECOND };
        book.ended("there", (lost, ""), (&timing, &mut random, &mut log), now);
        assert_eq!(book.entries["there"].occupied, 0);
    }

    #[test]
    fn alternating_reasons_are_logged_up_to_the_limit() {
        let (timing, mut random) = (Timing::new(5 * SECOND), SplitMix64(1));
        let (mut book, mut log) = (AddressBook::default(), LogLimit::new());
        let node = (NodeId([1; 16]), "x");
        book.add("a:1".to_owned(), AddressSource::Configured, None, Duration::ZERO);
        for times in 0..1000 {
            let now = times * SECOND / 100;
            let failed = (DialOutcome::Failed, ["refused", "no route"][times as usize % 2]);
            book.ended("a:1", failed, (&timing, &mut random, &mut log), now);
            book.reached("a:1", node, &mut log, now);
        }
        // Two lines each time; ten are logged, and one more every ten seconds.
        let suppressed = book.entries["a:1"].log_limit.all_suppressed();
        assert!((1988..=1990).contains(&suppressed), "{suppressed}");
        // Other addresses are not affected.
        assert_eq!(log.all_suppressed(), 0);
    }

    #[test]
    fn address_of_a_stale_session_is_dialled_at_once() {
        let (timing, node) = (Timing::new(Duration::from_secs(5)), NodeId([1; 16]));
        for dialled in [Some("there"), None] {
            let (mut book, now) = (AddressBook::default(), Duration::from_secs(1));
            book.add("there".to_owned(), AddressSource::Configured, None, now);
            assert_eq!(book.due(now, &timing, |_| false), ["there"]);
            let mut log = LogLimit::new();
            book.reached("there", (node, "label"), &mut log, now);
            if dialled.is_none() {
                // The session uses another connection.
                book.ended(
                    "there",
                    (DialOutcome::Duplicate, ""),
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
