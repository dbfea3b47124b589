//! The initiator's links to targets: connecting, losing and retrying them.
//!
//! A link is one peer at one rail, and keeps its number until the agent disconnects. Each
//! connection has a new session. Known regions are opened again before the link is reported as up,
//! so that existing routes stay valid.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use fabric::Address;
use threads::RetryBackoff;

use super::chunk_window::ChunkWindow;
use super::notice_queue::NoticeQueue;
use super::target_replies::withdrawn;
use super::tcp_probe::TcpProbe;
use super::{
    CONNECT, InitiatorRole, KnownTarget, Link, LinkState, OPEN, PendingOpen, WantedRegion,
};
use crate::error::{Context, Error, ErrorKind, Result};
use crate::rail::io::RailIo;
use crate::rail::message::Message;
use crate::rail::session::{CHECK_INTERVAL, CloseReason, Session, SessionKey, first_pause};
use crate::rail::{LinkTarget, RailEvent, RailRequest};
use crate::share::random;

/// Maximum of regions that are reopened at a time: there may be thousands, and unacknowledged
/// messages are limited.
const MAX_PENDING_OPENS: usize = 128;

const RECONNECT_BACKOFF: RetryBackoff =
    RetryBackoff::new(Duration::from_millis(100), Duration::from_secs(5));
/// How long to retry. After that, only a join by the agent retries.
const MAX_RETRY_TIME: Duration = Duration::from_secs(3600);

/// The times of attempts to reconnect: growing pauses and a deadline.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReconnectSchedule {
    next: Instant,
    backoff: RetryBackoff,
    end: Instant,
}

impl ReconnectSchedule {
    fn new(now: Instant) -> Self {
        let mut backoff = RECONNECT_BACKOFF;
        Self { next: now + backoff.next_pause(), backoff, end: now + MAX_RETRY_TIME }
    }

    /// Is an attempt due? If so, schedules the next one.
    fn is_due(&mut self, now: Instant) -> bool {
        if now < self.next || now >= self.end {
            return false;
        }
        self.next = now + self.backoff.next_pause();
        true
    }

    /// An attempt failed: the pause starts now.
    fn failed(&mut self, now: Instant) {
        self.next = now + self.backoff.last_pause();
    }
}

impl Link {
    pub(super) fn is_up(&self) -> bool {
        matches!(self.state, LinkState::Up)
    }

    pub(super) fn is_connected(&self) -> bool {
        !matches!(self.state, LinkState::Connecting { .. })
    }

    /// Does the agent wait for its answer?
    pub(super) fn has_waiter(&self) -> bool {
        self.has_waiter && !self.is_connected()
    }

    fn send_open(&mut self, io: &mut RailIo, region: u64, wanted: WantedRegion) {
        let request = io.next_id();
        self.pending_opens.insert(request, PendingOpen { region, wanted, is_withdrawn: false });
        let open = Message::Open { request, region, ticket: wanted.ticket };
        io.send_message(&mut self.session, &open);
    }
}

impl InitiatorRole {
    // ------------------------------------------------------------------- connecting

    /// Connects to a peer at the agent's request.
    pub(in crate::rail) fn connect(
        &mut self,
        io: &mut RailIo,
        number: u32,
        target: LinkTarget,
        timeout: Duration,
    ) {
        if let Some(link) = self.links.get_mut(&number) {
            // It is connected or connecting already.
            match link.state {
                LinkState::Up => io.report(RailEvent::Up { link: number }),
                LinkState::Connecting { ref mut until, .. } => {
                    // An automatic attempt may have an earlier deadline than this request.
                    *until = (*until).max(ipc::deadline(timeout));
                    link.has_waiter = true;
                }
                LinkState::Opening => link.has_waiter = true,
            }
            return;
        }
        // A reconnect could continue old operations after later ones were reported. So it waits
        // until they have ended.
        if self.has_operations(number) {
            let detail = "operations of the last session are still in flight";
            let error = Error::new(CONNECT, ErrorKind::Closed, detail);
            return io.report(RailEvent::Down { link: number, error, is_closed: false });
        }
        let new = || KnownTarget { target, reconnect: None, wanted: HashMap::new() };
        let known_target = self.lost_links.remove(&number).unwrap_or_else(new);
        self.start_connect(io, number, known_target, timeout, true);
    }

    /// Starts an attempt: sends hello.
    fn start_connect(
        &mut self,
        io: &mut RailIo,
        number: u32,
        mut known_target: KnownTarget,
        timeout: Duration,
        has_waiter: bool,
    ) {
        let address = Address(known_target.target.address.clone());
        let session_and_peer = random(CONNECT).and_then(|session| {
            Ok((u64::from_le_bytes(session), io.acquire_address(&address).during(CONNECT)?))
        });
        let now = Instant::now();
        let (session, peer) = match session_and_peer {
            Ok(session_and_peer) => session_and_peer,
            Err(error) => {
                known_target.reconnect.get_or_insert_with(|| ReconnectSchedule::new(now));
                self.lost_links.insert(number, known_target);
                if has_waiter {
                    io.report(RailEvent::Down { link: number, error, is_closed: false });
                }
                return;
            }
        };
        let link = Link {
            known_target,
            session: Session::new(SessionKey::Link(number), session, peer, io.lost_after()),
            state: LinkState::Connecting {
                began: now,
                until: ipc::deadline(timeout),
                next_hello: now,
                tcp_probe: TcpProbe::NotStarted,
            },
            has_waiter,
            is_retried: false,
            pending_opens: HashMap::new(),
            reopening: VecDeque::new(),
            withdrawn: HashSet::new(),
            chunks: ChunkWindow::default(),
            notices: NoticeQueue::default(),
        };
        self.links.insert(number, link);
        self.send_hello(io, number, now);
    }

    fn send_hello(&mut self, io: &mut RailIo, number: u32, now: Instant) {
        let pause = first_pause(io.lost_after());
        let Some(link) = self.links.get_mut(&number) else { return };
        if let LinkState::Connecting { next_hello, .. } = &mut link.state {
            *next_hello = now + pause;
        }
        // The provider has the last hello still queued.
        if io.unsent_messages(SessionKey::Link(number)) > 0 {
            return;
        }
        let hello = Message::Hello {
            to: link.known_target.target.identity,
            from: io.agent().identity(),
            connection_id: link.known_target.target.connection_id,
            label: io.agent().label().to_owned(),
            address: io.address().to_vec(),
        };
        io.send_message(&mut link.session, &hello);
    }

    pub(super) fn handle_welcome(&mut self, io: &mut RailIo, number: u32, credit_limit: u64) {
        let Some(link) = self.links.get_mut(&number) else { return };
        link.notices.add_credit(credit_limit);
        link.state = LinkState::Opening;
        link.reopening = link.known_target.wanted.keys().copied().collect();
        // Confirms the session to the target.
        io.send_message(&mut link.session, &Message::Pong);
        self.reopen_regions(io, number);
    }

    /// Opens regions of earlier sessions again, a few at a time.
    fn reopen_regions(&mut self, io: &mut RailIo, number: u32) {
        let Some(link) = self.links.get_mut(&number) else { return };
        for _ in link.pending_opens.len()..MAX_PENDING_OPENS {
            if io.is_lost(link.session.key()) {
                return;
            }
            // Some may have been withdrawn meanwhile.
            let next = std::iter::from_fn(|| link.reopening.pop_front())
                .find_map(|region| Some((region, *link.known_target.wanted.get(&region)?)));
            let Some((region, wanted)) = next else { break };
            link.send_open(io, region, wanted);
        }
        let is_open = link.reopening.is_empty() && link.pending_opens.is_empty();
        // All regions are open again.
        if matches!(link.state, LinkState::Opening) && is_open {
            link.state = LinkState::Up;
            (link.known_target.reconnect, link.has_waiter) = (None, false);
            io.report(RailEvent::Up { link: number });
        }
    }

    pub(in crate::rail) fn open(
        &mut self,
        io: &mut RailIo,
        number: u32,
        region: (u64, u64),
        stages: bool,
    ) {
        let Some(link) = self.links.get_mut(&number).filter(|link| link.is_connected()) else {
            let outcome = Err(Error::new(OPEN, ErrorKind::Closed, "the peer is not connected"));
            return io.report(RailEvent::Opened { link: number, region, outcome });
        };
        let (region, ticket) = region;
        // Once a region needs staging, it always does.
        let stages =
            stages || link.known_target.wanted.get(&region).is_some_and(|before| before.stages);
        link.send_open(io, region, WantedRegion { ticket, stages });
    }

    /// Another link opened this region. This link opens it too: now, or when it reconnects.
    pub(in crate::rail) fn want_region(
        &mut self,
        io: &mut RailIo,
        number: u32,
        (region, ticket): (u64, u64),
        stages: bool,
    ) {
        let is_requested =
            |open: &PendingOpen| (open.region, open.wanted.ticket) == (region, ticket);
        let mut link = self.links.get_mut(&number);
        let connected = link.as_mut().map(|link| &mut link.known_target);
        let Some(known_target) = connected.or_else(|| self.lost_links.get_mut(&number)) else {
            return;
        };
        let before = known_target.wanted.get(&region).copied();
        if before.is_some_and(|before| before.ticket == ticket && before.stages >= stages) {
            return;
        }
        let stages = stages || before.is_some_and(|before| before.stages);
        let wanted = WantedRegion { ticket, stages };
        known_target.wanted.insert(region, wanted);
        if let Some(link) = link
            && link.is_connected()
            && !link.pending_opens.values().any(is_requested)
        {
            link.send_open(io, region, wanted);
        }
    }

    pub(super) fn open_answered(
        &mut self,
        io: &mut RailIo,
        number: u32,
        request: u64,
        outcome: Result<()>,
    ) {
        let Some(link) = self.links.get_mut(&number) else { return };
        let Some(pending_open) = link.pending_opens.remove(&request) else { return };
        let PendingOpen { region, wanted, is_withdrawn } = pending_open;
        let outcome = if is_withdrawn { Err(withdrawn()) } else { outcome };
        match &outcome {
            Ok(()) => drop(link.known_target.wanted.insert(region, wanted)),
            Err(error) if error.kind() == ErrorKind::Stale => {
                let known = link.known_target.wanted.get(&region);
                // A request with a wrong ticket does not affect the region.
                if known.is_some_and(|known| known.ticket == wanted.ticket) {
                    link.known_target.wanted.remove(&region);
                    io.report(RailEvent::Withdrawn { link: number, region });
                }
            }
            Err(_) => {}
        }
        io.report(RailEvent::Opened { link: number, region: (region, wanted.ticket), outcome });
        self.reopen_regions(io, number);
    }

    // ------------------------------------------------------------------- closing

    pub(in crate::rail) fn disconnect(&mut self, io: &mut RailIo, number: u32) {
        let session = self.links.get(&number).map(|link| (link.session.id(), link.session.peer()));
        if let Some((session, peer)) = session {
            self.closing_sessions.insert(session, peer);
            // The address stays in use until `Bye` was sent.
            io.retain_address(peer);
        }
        let left = Error::new("disconnect", ErrorKind::Closed, "the peer was disconnected");
        self.close_link(io, number, CloseReason::Left, left);
        self.lost_links.remove(&number);
        if let Some((session, _)) = session {
            self.send_bye_when_idle(io, session);
        }
    }

    /// Sends `Bye` for a closed session when no chunk of it is in flight: the target frees its
    /// memory soon after. Without `Bye` the target detects a loss, and frees the memory much later.
    pub(super) fn send_bye_when_idle(&mut self, io: &mut RailIo, session: u64) {
        if self.in_flight.values().any(|in_flight| in_flight.session == session)
            || self.direct.has_chunks_of_session(session)
        {
            return;
        }
        if let Some(peer) = self.closing_sessions.remove(&session) {
            io.send_without_session(peer, session, &Message::Bye);
            io.release_address(peer);
        }
    }

    pub(super) fn close_link(
        &mut self,
        io: &mut RailIo,
        number: u32,
        close_reason: CloseReason,
        error: Error,
    ) {
        let Some(mut link) = self.links.remove(&number) else { return };
        let cause = error.reason();
        let closed = |operation| Error::new(operation, ErrorKind::Closed, cause.as_str());
        if close_reason != CloseReason::Left {
            // Failed automatic attempts are not reported.
            if link.is_up() || link.has_waiter {
                let is_closed = close_reason == CloseReason::Bye;
                io.report(RailEvent::Down { link: number, error, is_closed });
            }
            let reconnect = &mut link.known_target.reconnect;
            if close_reason == CloseReason::Lost {
                let now = Instant::now();
                reconnect.get_or_insert_with(|| ReconnectSchedule::new(now)).failed(now);
            } else {
                *reconnect = None;
            }
            self.lost_links.insert(number, link.known_target);
        }
        for (_, PendingOpen { region, wanted, .. }) in link.pending_opens {
            let outcome = Err(closed(OPEN));
            io.report(RailEvent::Opened { link: number, region: (region, wanted.ticket), outcome });
        }
        let (unacknowledged, unsent) = link.notices.into_rest();
        for token in unacknowledged {
            let detail = format!("{cause}; whether the notice arrived is unknown");
            let error = Error::new("notify", ErrorKind::Closed, detail);
            io.report_done(token, Err(error));
        }
        for (token, notice) in unsent {
            if close_reason == CloseReason::Left {
                io.report_done(token, Err(closed("notify")));
            } else {
                let request =
                    RailRequest { link: number, token, notice: Some(notice), bytes: None };
                io.report(RailEvent::Returned { request: Box::new(request), cause: cause.clone() });
            }
        }
        self.direct.close_link(io, number, &cause);
        self.return_transfers(io, number, close_reason, &cause);
        self.abandon_slots(io, number);
        self.end_transfers(io);
        io.drop_queued(SessionKey::Link(number));
        io.release_address(link.session.peer());
    }

    // ------------------------------------------------------------------- periodic checks

    pub(in crate::rail) fn check(&mut self, io: &mut RailIo, now: Instant) {
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
            let error = Error::new(CONNECT, ErrorKind::DeadlineExceeded, detail);
            self.close_link(io, number, CloseReason::Lost, error);
        }
        for number in hello {
            self.send_hello(io, number, now);
        }
        self.check_tcp_probes(io, now);
        self.fail_overdue_transfers(io, now);
        self.retry_lost_links(io, now);
    }

    fn retry_lost_links(&mut self, io: &mut RailIo, now: Instant) {
        let Self { lost_links, in_flight, direct, .. } = self;
        let due = lost_links.extract_if(|number, lost| {
            !in_flight.values().any(|chunk| chunk.link == *number)
                && !direct.has_chunks_of_link(*number)
                && lost.reconnect.as_mut().is_some_and(|reconnect| reconnect.is_due(now))
        });
        let timeout = io.lost_after().max(2 * CHECK_INTERVAL);
        for (number, known_target) in due.collect::<Vec<_>>() {
            self.start_connect(io, number, known_target, timeout, false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_up_to_a_limit_and_retries_end() {
        let start = Instant::now();
        let mut reconnect = ReconnectSchedule::new(start);
        let time = |ms: u64| start + Duration::from_millis(ms);
        let times: Vec<_> =
            (0..4_000_000).step_by(50).filter(|ms| reconnect.is_due(time(*ms))).collect();
        assert_eq!(times[..7], [100, 300, 700, 1500, 3100, 6300, 11_300]);
        assert!(times.windows(2).all(|two| two[1] - two[0] <= 5000));
        assert_eq!(times.last().map(|ms| ms / 10_000), Some(359), "an hour");
    }

    #[test]
    fn pause_starts_when_an_attempt_has_failed() {
        let start = Instant::now();
        let mut reconnect = ReconnectSchedule::new(start);
        let first = RECONNECT_BACKOFF.first();
        assert!(reconnect.is_due(start + first));
        let late = start + Duration::from_secs(10);
        reconnect.failed(late);
        assert!(!reconnect.is_due(late + first) && reconnect.is_due(late + 2 * first));
    }
}
