//! The initiator's links to targets: connecting, losing and retrying them.
//!
//! A link is one peer at one rail, and keeps its number until the agent disconnects. Each
//! connection has a new session. Known regions are opened again before the link is reported as up,
//! so that existing routes stay valid.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use fabric::{Address, RemoteMemory};

use super::chunks::Stage;
use super::driver::{CHECK_INTERVAL, Driver, SessionKey};
use super::initiator::ActiveTransfer;
use super::message::Message;
use super::session::Session;
use super::target_replies::withdrawn;
use super::tcp_probe::TcpProbe;
use super::{LinkTarget, RAIL_TIMEOUT, RailEvent, RailRequest};
use crate::error::{Error, ErrorKind, Result};
use crate::notice::Notice;
use crate::operations::Token;
use crate::share::random;

pub(super) const CONNECT: &str = "connect to an agent";
const OPEN: &str = "open a region";
/// Maximum of regions that are reopened at a time: there may be thousands, and unacknowledged
/// messages are limited.
const MAX_PENDING_OPENS: usize = 128;

/// The pause after the first attempt, and the longest.
const RETRY_PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// How long to retry. After that, only a join by the agent retries.
const MAX_RETRY_TIME: Duration = Duration::from_secs(3600);

/// The schedule for reconnecting: growing pauses and a deadline.
#[derive(Debug, Clone, Copy)]
struct RetryBackoff {
    next: Instant,
    pause: Duration,
    end: Instant,
}

impl RetryBackoff {
    fn new(now: Instant) -> Self {
        Self { next: now + RETRY_PAUSES.0, pause: RETRY_PAUSES.0, end: now + MAX_RETRY_TIME }
    }

    /// Is an attempt due? If so, schedules the next one.
    fn is_due(&mut self, now: Instant) -> bool {
        if now < self.next || now >= self.end {
            return false;
        }
        self.pause = (2 * self.pause).min(RETRY_PAUSES.1);
        self.next = now + self.pause;
        true
    }

    /// An attempt failed: the pause starts now.
    fn failed(&mut self, now: Instant) {
        self.next = now + self.pause;
    }
}

/// Staging memory of a target.
#[derive(Debug)]
pub(super) struct RemoteSlots {
    pub(super) memory: RemoteMemory,
    pub(super) length: u64,
    pub(super) free: Vec<u32>,
}

/// A region that the agent uses.
#[derive(Debug, Clone, Copy)]
pub(super) struct WantedRegion {
    ticket: u64,
    pub(super) stages: bool,
}

/// A region request in flight.
#[derive(Debug)]
pub(super) struct PendingOpen {
    pub(super) region: u64,
    pub(super) wanted: WantedRegion,
    /// It was withdrawn before the reply.
    pub(super) is_withdrawn: bool,
}

#[derive(Debug)]
pub(super) enum LinkState {
    /// The deadline for the welcome, and the time of the next hello.
    Connecting {
        began: Instant,
        until: Instant,
        next_hello: Instant,
        /// Whether anything listens at its address, once probed.
        tcp_probe: TcpProbe,
    },
    /// Connected; regions of an earlier session are being opened again.
    Opening,
    Up,
}

/// Why a session is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CloseReason {
    /// The agent disconnected.
    Left,
    /// The peer closed it. Retried only at the agent's request.
    Bye,
    /// The peer violates the protocol, or this rail ends. Not retried either.
    Fatal,
    /// The peer is silent. Retried.
    Lost,
}

/// What is known of a target, connected or not.
#[derive(Debug)]
pub(super) struct KnownTarget {
    target: LinkTarget,
    /// None if it is not retried.
    backoff: Option<RetryBackoff>,
    /// Regions that the agent has opened, also in earlier sessions.
    pub(super) wanted: HashMap<u64, WantedRegion>,
}

/// An active or connecting link to a target.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) known_target: KnownTarget,
    pub(super) session: Session,
    pub(super) state: LinkState,
    /// The agent waits for it.
    has_waiter: bool,
    pub(super) pending_opens: HashMap<u64, PendingOpen>,
    /// Regions that are still to be opened again.
    reopening: VecDeque<u64>,
    /// Withdrawn regions that transfers still use.
    pub(super) withdrawn: HashSet<u64>,
    pub(super) slots: Option<RemoteSlots>,
    /// Number and bytes of the chunks in flight.
    pub(super) in_flight: usize,
    pub(super) bytes: u64,
    /// A chunk found the provider's queue full.
    pub(super) is_queue_full: bool,
    /// Unsent notices, and sent ones without acknowledgement.
    pub(super) unsent: VecDeque<(Token, Notice)>,
    pub(super) unacknowledged: VecDeque<Token>,
    pub(super) sent: u64,
    pub(super) credit_limit: u64,
}

impl Link {
    pub(super) fn is_up(&self) -> bool {
        matches!(self.state, LinkState::Up)
    }

    pub(super) fn is_connected(&self) -> bool {
        !matches!(self.state, LinkState::Connecting { .. })
    }

    /// The address of the target.
    pub(super) fn address(&self) -> &[u8] {
        &self.known_target.target.address
    }

    /// Does the agent wait for its answer?
    pub(super) fn has_waiter(&self) -> bool {
        self.has_waiter && !self.is_connected()
    }
}

impl Driver {
    // ------------------------------------------------------------------- connecting

    /// Connects to a peer at the agent's request.
    pub(crate) fn connect(&mut self, number: u32, target: LinkTarget, timeout: Duration) {
        if let Some(link) = self.links.get_mut(&number) {
            // It is connected or connecting already.
            match link.state {
                LinkState::Up => self.report(RailEvent::Up { link: number }),
                LinkState::Connecting { ref mut until, .. } => {
                    // An automatic attempt may have an earlier deadline than this request.
                    *until = (*until).max(ipc::deadline(timeout));
                    link.has_waiter = true;
                }
                LinkState::Opening => link.has_waiter = true,
            }
            return;
        }
        if self.has_unfinished_chunks(number) {
            let detail = "operations of the last session are still in flight";
            let error = Error::new(CONNECT, ErrorKind::Closed, detail);
            return self.report(RailEvent::Down { link: number, error });
        }
        let known_target = self.lost_links.remove(&number);
        let known_target = known_target.unwrap_or_else(|| KnownTarget {
            target,
            backoff: None,
            wanted: HashMap::new(),
        });
        self.start_connect(number, known_target, timeout, true);
    }

    /// A reconnect could continue old operations after later ones were reported. So it waits until
    /// they have ended.
    fn has_unfinished_chunks(&self, number: u32) -> bool {
        self.in_flight.values().any(|in_flight| in_flight.link == number)
    }

    /// Starts an attempt: sends hello.
    fn start_connect(
        &mut self,
        number: u32,
        mut known_target: KnownTarget,
        timeout: Duration,
        has_waiter: bool,
    ) {
        let address = Address(known_target.target.address.clone());
        let session_and_peer = random(CONNECT).and_then(|random| {
            let peer = self.acquire_address(&address);
            let peer = peer.map_err(|error| Error::of_fabric(CONNECT, error))?;
            Ok((u64::from_le_bytes(std::array::from_fn(|index| random[index])), peer))
        });
        let now = Instant::now();
        let (session, peer) = match session_and_peer {
            Ok(session_and_peer) => session_and_peer,
            Err(error) => {
                known_target.backoff.get_or_insert_with(|| RetryBackoff::new(now));
                self.lost_links.insert(number, known_target);
                if has_waiter {
                    self.report(RailEvent::Down { link: number, error });
                }
                return;
            }
        };
        let link = Link {
            known_target,
            session: self.new_session(session, peer),
            state: LinkState::Connecting {
                began: now,
                until: ipc::deadline(timeout),
                next_hello: now,
                tcp_probe: TcpProbe::NotStarted,
            },
            has_waiter,
            pending_opens: HashMap::new(),
            reopening: VecDeque::new(),
            withdrawn: HashSet::new(),
            slots: None,
            in_flight: 0,
            bytes: 0,
            is_queue_full: false,
            unsent: VecDeque::new(),
            unacknowledged: VecDeque::new(),
            sent: 0,
            credit_limit: 0,
        };
        self.links.insert(number, link);
        self.send_hello(number, now);
    }

    fn send_hello(&mut self, number: u32, now: Instant) {
        let pause = self.first_pause();
        let Some(link) = self.links.get_mut(&number) else { return };
        if let LinkState::Connecting { next_hello, .. } = &mut link.state {
            *next_hello = now + pause;
        }
        let (to, connection_id) =
            (link.known_target.target.identity, link.known_target.target.connection_id);
        // The provider has the last hello still queued.
        if self.is_sending(SessionKey::Link(number)) {
            return;
        }
        let hello = Message::Hello {
            to,
            from: self.agent.identity(),
            connection_id,
            label: self.agent.label().to_owned(),
            address: self.address().to_vec(),
        };
        self.send_message(SessionKey::Link(number), &hello);
    }

    /// The target sent welcome.
    pub(super) fn handle_welcome(&mut self, number: u32, credit_limit: u64) {
        let Some(link) = self.links.get_mut(&number) else { return };
        link.credit_limit = credit_limit;
        link.state = LinkState::Opening;
        link.reopening = link.known_target.wanted.keys().copied().collect();
        // Confirms the session to the target.
        self.send_message(SessionKey::Link(number), &Message::Pong);
        self.reopen_regions(number);
    }

    /// Opens regions of earlier sessions again, a few at a time.
    fn reopen_regions(&mut self, number: u32) {
        let Some(link) = self.links.get(&number) else { return };
        for _ in link.pending_opens.len()..MAX_PENDING_OPENS {
            let Some(link) = self.links.get_mut(&number) else { return };
            // Some may have been withdrawn meanwhile.
            let next = std::iter::from_fn(|| link.reopening.pop_front())
                .find_map(|region| Some((region, *link.known_target.wanted.get(&region)?)));
            let Some((region, wanted)) = next else { break };
            self.send_open(number, region, wanted);
        }
        self.check_all_open(number);
    }

    fn send_open(&mut self, number: u32, region: u64, wanted: WantedRegion) {
        let request = self.next_id();
        let Some(link) = self.links.get_mut(&number) else { return };
        link.pending_opens.insert(request, PendingOpen { region, wanted, is_withdrawn: false });
        let open = Message::Open { request, region, ticket: wanted.ticket };
        self.send_message(SessionKey::Link(number), &open);
    }

    /// Reports the link as up if all regions are open again.
    fn check_all_open(&mut self, number: u32) {
        let Some(link) = self.links.get_mut(&number) else { return };
        let is_open = link.reopening.is_empty() && link.pending_opens.is_empty();
        if !matches!(link.state, LinkState::Opening) || !is_open {
            return;
        }
        link.state = LinkState::Up;
        (link.known_target.backoff, link.has_waiter) = (None, false);
        self.report(RailEvent::Up { link: number });
    }

    pub(crate) fn open(&mut self, number: u32, (region, ticket): (u64, u64), stages: bool) {
        let Some(link) = self.links.get(&number).filter(|link| link.is_connected()) else {
            let outcome = Err(Error::new(OPEN, ErrorKind::Closed, "the peer is not connected"));
            return self.report(RailEvent::Opened {
                link: number,
                region: (region, ticket),
                outcome,
            });
        };
        // Once a region needs staging, it always does.
        let stages =
            stages || link.known_target.wanted.get(&region).is_some_and(|before| before.stages);
        self.send_open(number, region, WantedRegion { ticket, stages });
    }

    /// Another link opened this region. This link opens it too: now, or when it reconnects.
    pub(crate) fn want_region(&mut self, number: u32, (region, ticket): (u64, u64), stages: bool) {
        let is_requested = |pending_opens: &PendingOpen| {
            (pending_opens.region, pending_opens.wanted.ticket) == (region, ticket)
        };
        let (next_hello, known_target) = match self.links.get_mut(&number) {
            Some(link) => {
                let next_hello =
                    link.is_connected() && !link.pending_opens.values().any(is_requested);
                (next_hello, &mut link.known_target)
            }
            None => match self.lost_links.get_mut(&number) {
                Some(known_target) => (false, known_target),
                None => return,
            },
        };
        let before = known_target.wanted.get(&region).copied();
        if before.is_some_and(|before| before.ticket == ticket && before.stages >= stages) {
            return;
        }
        let stages = stages || before.is_some_and(|before| before.stages);
        let wanted = WantedRegion { ticket, stages };
        known_target.wanted.insert(region, wanted);
        if next_hello {
            self.send_open(number, region, wanted);
        }
    }

    /// The reply to a region request.
    pub(super) fn open_answered(&mut self, number: u32, request: u64, outcome: Result<()>) {
        let Some(link) = self.links.get_mut(&number) else { return };
        let Some(pending_opens) = link.pending_opens.remove(&request) else { return };
        let PendingOpen { region, wanted, is_withdrawn } = pending_opens;
        let outcome = if is_withdrawn { Err(withdrawn()) } else { outcome };
        match &outcome {
            Ok(()) => drop(link.known_target.wanted.insert(region, wanted)),
            Err(error) if error.kind() == ErrorKind::Stale => {
                let known_target = link.known_target.wanted.get(&region);
                // A request with a wrong ticket does not affect the region.
                if known_target.is_some_and(|known_target| known_target.ticket == wanted.ticket) {
                    link.known_target.wanted.remove(&region);
                    self.report(RailEvent::Withdrawn { link: number, region });
                }
            }
            Err(_) => {}
        }
        self.report(RailEvent::Opened { link: number, region: (region, wanted.ticket), outcome });
        self.reopen_regions(number);
    }

    // ------------------------------------------------------------------- closing

    pub(crate) fn disconnect(&mut self, number: u32) {
        let session = self.links.get(&number).map(|link| (link.session.id, link.session.peer));
        if let Some((session, peer)) = session {
            self.closing_sessions.insert(session, peer);
            // The address stays in use until `Bye` was sent.
            *self.peers.entry(peer).or_default() += 1;
        }
        let left = Error::new("disconnect a peer", ErrorKind::Closed, "the peer was disconnected");
        self.close_link(number, CloseReason::Left, left);
        self.lost_links.remove(&number);
        if let Some((session, _)) = session {
            self.send_bye_when_idle(session);
        }
    }

    /// Sends `Bye` for a closed session when no chunk of it is in flight: the target frees its
    /// memory soon after. Without `Bye` the target detects a loss, and frees the memory much later.
    pub(super) fn send_bye_when_idle(&mut self, session: u64) {
        if self.in_flight.values().any(|in_flight| in_flight.session == session) {
            return;
        }
        if let Some(peer) = self.closing_sessions.remove(&session) {
            self.queue_message(SessionKey::NoSession, peer, Message::Bye.encode(session, 0, 0));
            self.release_address(peer);
        }
    }

    /// Closes a link to a target.
    pub(super) fn close_link(&mut self, number: u32, close_reason: CloseReason, error: Error) {
        let Some(mut link) = self.links.remove(&number) else { return };
        let cause = error.reason();
        let closed = |operation| Error::new(operation, ErrorKind::Closed, cause.as_str());
        if close_reason != CloseReason::Left {
            // Failed automatic attempts are not reported.
            if link.is_up() || link.has_waiter {
                self.report(RailEvent::Down { link: number, error });
            }
            let now = Instant::now();
            match close_reason {
                CloseReason::Lost => {
                    link.known_target
                        .backoff
                        .get_or_insert_with(|| RetryBackoff::new(now))
                        .failed(now);
                }
                _ => link.known_target.backoff = None,
            }
            self.lost_links.insert(number, link.known_target);
        }
        for (_, PendingOpen { region, wanted, .. }) in link.pending_opens {
            let outcome = Err(closed(OPEN));
            self.report(RailEvent::Opened {
                link: number,
                region: (region, wanted.ticket),
                outcome,
            });
        }
        for token in link.unacknowledged {
            let detail = format!("{cause}; whether the notice arrived is unknown");
            let outcome = Err(Error::new("notify a peer", ErrorKind::Closed, detail));
            self.report(RailEvent::Done { token, outcome });
        }
        for (token, notice) in link.unsent {
            if close_reason == CloseReason::Left {
                let outcome = Err(closed("notify a peer"));
                self.report(RailEvent::Done { token, outcome });
            } else {
                let request =
                    RailRequest { link: number, token, notice: Some(notice), bytes: None };
                self.report(RailEvent::Returned {
                    request: Box::new(request),
                    cause: cause.clone(),
                });
            }
        }
        self.return_transfers(number, close_reason, &cause);
        self.abandon_slots(number);
        self.end_transfers();
        self.drop_queued(SessionKey::Link(number));
        self.release_address(link.session.peer);
    }

    /// Returns or fails the transfers of a closed link. Posted operations and device copies may
    /// still access the memory, so the transfer ends with them. Chunks that waited for the peer or
    /// were not posted end now. The rest may be rerouted.
    fn return_transfers(&mut self, number: u32, close_reason: CloseReason, cause: &str) {
        let until = Instant::now() + RAIL_TIMEOUT;
        let closed = || Error::new("transfer", ErrorKind::Closed, cause);
        for transfer in self.transfers.values_mut().filter(|transfer| transfer.link == number) {
            transfer.chunks.cancel();
            transfer.drain_deadline.get_or_insert(until);
            if close_reason == CloseReason::Left {
                transfer.failure.get_or_insert_with(closed);
            } else {
                transfer.lost_cause.get_or_insert_with(|| cause.to_owned());
            }
        }
        let unposted: HashSet<_> = self.unposted.iter().copied().collect();
        let repost_later: HashSet<_> = self.repost_later.iter().map(|(_, chunk)| *chunk).collect();
        let over = self.in_flight.iter().filter(|(_, in_flight)| in_flight.link == number);
        let over: Vec<_> = over
            .filter(|(key, in_flight)| {
                matches!(in_flight.stage, Stage::RequestFill | Stage::RequestDrain)
                    || unposted.contains(key)
                    || repost_later.contains(key)
            })
            .map(|(key, in_flight)| (*key, in_flight.stage))
            .collect();
        for (key, stage) in over {
            self.unposted.retain(|other| *other != key);
            self.repost_later.retain(|(_, other)| *other != key);
            match stage {
                // The peer may still copy from its slot later, when this transfer is forgotten.
                Stage::RequestDrain => {
                    let detail = format!("{cause}; whether the data arrived is unknown");
                    self.fail_chunk(key, Error::new("put", ErrorKind::Closed, detail));
                }
                _ => self.return_chunk(key),
            }
        }
    }

    // ------------------------------------------------------------------- periodic checks

    pub(super) fn check_links(&mut self, now: Instant) {
        let (mut late, mut hello) = (vec![], vec![]);
        for (number, link) in &self.links {
            match link.state {
                LinkState::Connecting { until, .. } if now >= until => late.push(*number),
                LinkState::Connecting { next_hello, .. } if now >= next_hello => {
                    hello.push(*number)
                }
                _ => {}
            }
        }
        for number in late {
            let detail = "it did not answer within the timeout";
            self.close_link(
                number,
                CloseReason::Lost,
                Error::new(CONNECT, ErrorKind::DeadlineExceeded, detail),
            );
        }
        for number in hello {
            self.send_hello(number, now);
        }
        self.check_tcp_probes(now);
        self.fail_overdue_transfers(now);
        self.retry_lost_links(now);
    }

    /// Fails transfers of lost peers whose posted operations do not complete.
    fn fail_overdue_transfers(&mut self, now: Instant) {
        let late =
            |transfer: &ActiveTransfer| transfer.drain_deadline.is_some_and(|end| now >= end);
        let late: Vec<_> = self
            .transfers
            .iter()
            .filter(|(_, transfer)| late(transfer))
            .map(|(key, _)| *key)
            .collect();
        for key in late {
            self.unstarted.remove(&key);
            let Some(transfer) = self.transfers.remove(&key) else { continue };
            let detail = "the peer is lost, and operations in flight may still access the memory";
            let outcome = Err(Error::new("transfer", ErrorKind::Closed, detail));
            self.report(RailEvent::Done { token: transfer.token, outcome });
        }
    }

    /// Retries lost links that are due.
    fn retry_lost_links(&mut self, now: Instant) {
        let mut due = Vec::new();
        for (number, lost_links) in &mut self.lost_links {
            if self.in_flight.values().any(|in_flight| in_flight.link == *number) {
                continue;
            }
            if lost_links.backoff.as_mut().is_some_and(|backoff| backoff.is_due(now)) {
                due.push(*number);
            }
        }
        let timeout = self.lost_after.max(2 * CHECK_INTERVAL);
        for number in due {
            if let Some(lost_links) = self.lost_links.remove(&number) {
                self.start_connect(number, lost_links, timeout, false);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_up_to_a_limit_and_retries_end() {
        let start = Instant::now();
        let mut backoff = RetryBackoff::new(start);
        let index = |ms: u64| start + Duration::from_millis(ms);
        let times: Vec<_> =
            (0..4_000_000).step_by(50).filter(|ms| backoff.is_due(index(*ms))).collect();
        assert_eq!(times[..7], [100, 300, 700, 1500, 3100, 6300, 11_300]);
        assert!(times.windows(2).all(|two| two[1] - two[0] <= 5000));
        assert_eq!(times.last().map(|ms| ms / 10_000), Some(359), "an hour");
    }

    #[test]
    fn pause_starts_when_an_attempt_has_failed() {
        let start = Instant::now();
        let mut backoff = RetryBackoff::new(start);
        assert!(backoff.is_due(start + RETRY_PAUSES.0));
        let late = start + Duration::from_secs(10);
        backoff.failed(late);
        assert!(
            !backoff.is_due(late + RETRY_PAUSES.0) && backoff.is_due(late + 2 * RETRY_PAUSES.0)
        );
    }
}
