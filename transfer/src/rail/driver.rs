//! The thread of a rail: owns the endpoint, posts, polls, and dispatches received messages.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use fabric::{
    Access, AddressVector, Caps, CompletionKind, CompletionQueue, Domain, Endpoint, HostMemory,
    MemoryRegion, Outcome, Peer, QueueOptions, WaitStrategy,
};

use super::initiator::{ActiveTransfer, InFlightChunk};
use super::links::{CONNECT, CloseReason, KnownTarget, Link};
use super::message::{Frame, MAX_MESSAGE_LENGTH, Message, ReceiverRole};
use super::post::{Posted, QueuedMessage};
use super::release_worker::ReleaseWorker;
use super::reliable_window::ReliableWindow;
use super::session::{Keepalive, PINGS_UNTIL_LOST, Session};
use super::staging::{DeviceCopies, Slots};
use super::target::{Initiator, RetiringRegion, StagingJob};
use super::{Command, RAIL_TIMEOUT, RailEvent, RailOptions, RailOwner, RailShared, START};
use crate::error::{Error, ErrorKind, Result};
use crate::host_buffer::HostBuffer;
use crate::lock;

/// Messages that may arrive between two polls.
const RECEIVE_BUFFERS: usize = 64;
const SEND_BUFFERS: usize = 64;
/// Consecutive failures of the queue after which it is considered broken.
const MAX_QUEUE_FAILURES: u32 = 1000;
/// How often sessions are checked.
pub(super) const CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// Longest sleep while a device copies, or a message found the queue full.
const BUSY_PAUSE: Duration = Duration::from_micros(50);
/// Sleeping and waking costs tens of microseconds. While transfers are in flight, the thread spins
/// for this long first.
const SPIN_WHILE_BUSY: Duration = Duration::from_micros(200);
/// The same without transfers, after recent activity.
const SPIN_WHILE_IDLE: Duration = Duration::from_micros(50);
/// Maximum of `lost_after`: larger values would overflow the clock.
const MAX_LOST_AFTER: Duration = Duration::from_secs(365 * 24 * 3600);
/// Commands and completions between two polls of everything else.
const BATCH: usize = 64;

/// The session of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum SessionKey {
    Link(u32),
    Initiator(u64),
    /// A refused peer.
    NoSession,
}

pub(crate) struct Driver {
    // First, so that it is closed first: it returns posted buffers.
    pub(super) endpoint: Endpoint,
    pub(super) queue: CompletionQueue,
    pub(super) addresses: AddressVector,
    pub(super) domain: Domain,
    address: Vec<u8>,
    pub(super) agent: Arc<dyn RailOwner>,
    pub(super) shared: Arc<RailShared>,
    pub(super) receive_buffers: MemoryRegion,
    pub(super) send_buffers: MemoryRegion,
    pub(super) posted: Vec<Option<Posted>>,
    pub(super) free_tokens: Vec<usize>,
    pub(super) free_send_buffers: Vec<usize>,
    pub(super) send_queue: VecDeque<QueuedMessage>,
    /// Number of sessions per peer address. An address without sessions and messages in flight is
    /// removed; providers use it until then.
    pub(super) peers: HashMap<Peer, usize>,
    command_queue: Receiver<Command>,
    failures: u32,
    #[cfg(test)]
    is_broken: bool,
    next_check: Instant,
    pub(super) next_keep_polling: Instant,
    /// Polls without sleep until then, on request of an initiator.
    pub(super) polls_until: Instant,
    pub(super) lost_after: Duration,
    /// Releases registrations that are not needed any more.
    pub(super) release_worker: ReleaseWorker,
    pub(super) next_number: u64,
    // As initiator.
    pub(super) links: HashMap<u32, Link>,
    /// Lost peers, to be retried.
    pub(super) lost_links: HashMap<u32, KnownTarget>,
    /// Sessions that were closed here; their peers receive `Bye` when no chunk is in flight.
    pub(super) closing_sessions: HashMap<u64, Peer>,
    pub(super) transfers: BTreeMap<u64, ActiveTransfer>,
    pub(super) in_flight: HashMap<u64, InFlightChunk>,
    /// Of these, chunks that found the provider's queue full.
    pub(super) unposted: VecDeque<u64>,
    /// Chunks whose post failed since the connection broke, and when they are posted again.
    pub(super) repost_later: Vec<(Instant, u64)>,
    /// Transfers with chunks that were not started.
    pub(super) unstarted: BTreeSet<u64>,
    pub(super) slots: Option<Arc<Slots>>,
    pub(super) copies: DeviceCopies,
    // As target.
    pub(super) initiators: HashMap<u64, Initiator>,
    pub(super) staging_jobs: HashMap<u64, StagingJob>,
    pub(super) retiring: HashMap<u64, RetiringRegion>,
    /// Slots of lost initiators, which these may still write to, and when they are freed.
    pub(super) quarantined_slots: VecDeque<(Instant, (MemoryRegion, HostBuffer))>,
    /// Regions that lost initiators had opened, and when they are freed; with their memory, once
    /// withdrawn.
    pub(super) quarantined_regions: HashMap<u64, (Instant, Option<RetiringRegion>)>,
}

impl Driver {
    pub(super) fn new(
        domain: &Domain,
        shared: Arc<RailShared>,
        agent: Arc<dyn RailOwner>,
        settings: RailOptions,
        command_queue: Receiver<Command>,
    ) -> Result<Self> {
        let of_fabric = |error| Error::of_fabric(START, error);
        let facts = domain.capabilities();
        if !facts.caps.contains(Caps::MESSAGE) {
            let detail = "rails need messages without tags (FI_MSG), which this provider lacks or \
             loses";
            return Err(Error::new(START, ErrorKind::Failed, detail).with(&facts.provider));
        }
        let addresses = AddressVector::open(domain).map_err(of_fabric)?;
        let options = QueueOptions { size: 1024, waiting: WaitStrategy::Block };
        let mut queue = CompletionQueue::open_with(domain, options).map_err(of_fabric)?;
        let endpoint = Endpoint::builder(domain).addresses(&addresses).queue(&mut queue).open();
        let endpoint = endpoint.map_err(of_fabric)?;
        let buffers = |count: usize, access| {
            let memory = HostMemory::zeroed(count * MAX_MESSAGE_LENGTH)?;
            let region = domain.register(memory, access)?;
            region.enable_for(&endpoint)?;
            Ok(region)
        };
        let receive_buffers = buffers(RECEIVE_BUFFERS, Access::RECEIVE).map_err(of_fabric)?;
        let send_buffers = buffers(SEND_BUFFERS, Access::SEND).map_err(of_fabric)?;
        let address = endpoint.address().map_err(of_fabric)?.0;
        let mut driver = Self {
            endpoint,
            queue,
            addresses,
            domain: domain.clone(),
            address,
            agent,
            shared: Arc::clone(&shared),
            receive_buffers,
            send_buffers,
            posted: Vec::new(),
            free_tokens: Vec::new(),
            free_send_buffers: (0..SEND_BUFFERS).collect(),
            send_queue: VecDeque::new(),
            peers: HashMap::new(),
            command_queue,
            failures: 0,
            #[cfg(test)]
            is_broken: false,
            next_check: Instant::now(),
            next_keep_polling: Instant::now(),
            polls_until: Instant::now(),
            lost_after: settings.lost_after.min(MAX_LOST_AFTER),
            release_worker: ReleaseWorker::start(&shared)?,
            next_number: 1,
            links: HashMap::new(),
            lost_links: HashMap::new(),
            closing_sessions: HashMap::new(),
            transfers: BTreeMap::new(),
            in_flight: HashMap::new(),
            unposted: VecDeque::new(),
            repost_later: Vec::new(),
            unstarted: BTreeSet::new(),
            slots: None,
            copies: DeviceCopies::default(),
            initiators: HashMap::new(),
            staging_jobs: HashMap::new(),
            retiring: HashMap::new(),
            quarantined_slots: VecDeque::new(),
            quarantined_regions: HashMap::new(),
        };
        for buffer in 0..RECEIVE_BUFFERS {
            driver.receive(buffer).map_err(of_fabric)?;
        }
        Ok(driver)
    }

    pub(super) fn address(&self) -> &[u8] {
        &self.address
    }

    pub(super) fn report(&self, report: RailEvent) {
        self.shared.report(report);
        self.agent.wake();
    }

    pub(super) fn next_id(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    // ------------------------------------------------------------------- receiving

    fn handle_completion(&mut self, outcome: Outcome) {
        let (operation, token, length, failure) = match outcome {
            Ok(done) => (done.operation, done.token, done.length, None),
            Err(failure) => {
                (failure.operation, failure.token, 0, Some((failure.kind, failure.error)))
            }
        };
        if failure.is_none() && self.failures < MAX_QUEUE_FAILURES {
            self.failures = 0;
        }
        if operation.is_none() {
            if let Some((_, error)) = failure {
                tracing::debug!(%error, "completion queue of a rail failed");
                self.failures += 1;
            }
            return;
        }
        match (self.take_posted(token), failure) {
            (Some(Posted::Receive(buffer)), failure) => {
                if failure.is_none() {
                    self.decode_received(buffer, length);
                }
                self.receive_again(buffer);
            }
            (Some(Posted::Send(buffer, to, _)), failure) => {
                self.free_send_buffers.push(buffer);
                if let Some((_, error)) = failure {
                    self.send_failed(to, &error.to_string());
                }
            }
            (Some(Posted::Data(chunk, _)), None) => self.stage_done(chunk, Ok(())),
            (Some(Posted::Data(chunk, _)), Some((kind, error))) => {
                let is_read = matches!(kind, Some(CompletionKind::Read));
                let operation = if is_read { "get" } else { "put" };
                self.stage_done(chunk, Err(Error::of_fabric(operation, error)));
            }
            (None, _) => {}
        }
    }

    fn receive_again(&mut self, buffer: usize) {
        if let Err(error) = self.receive(buffer) {
            // One receive buffer less; the others are reposted.
            tracing::warn!(%error, "posting a receive of a rail again failed");
        }
    }

    fn decode_received(&mut self, buffer: usize, length: usize) {
        let mut bytes = [0; MAX_MESSAGE_LENGTH];
        let bytes = &mut bytes[..length.min(MAX_MESSAGE_LENGTH)];
        if self.receive_buffers.read(buffer * MAX_MESSAGE_LENGTH, bytes).is_err() {
            return;
        }
        match Message::decode(bytes) {
            Ok(frame) => self.receive_frame(frame),
            Err(error) => tracing::debug!(%error, "malformed message ignored"),
        }
    }

    /// Receives a message and dispatches all messages that are in order now.
    pub(super) fn receive_frame(&mut self, frame: Frame) {
        let Frame { session, number, acknowledged, message } = frame;
        let session_key = self.session_key(session, message.receiver_role());
        let (now, lost_after) = (Instant::now(), self.lost_after);
        let Some(Session { keepalive, reliable_window, .. }) = self.session(session_key) else {
            return self.dispatch(session_key, session, message);
        };
        if keepalive.is_lost(now, lost_after) {
            // Messages after the timeout are ignored: the session is lost already.
            return self.close_lost(session_key, "no message arrived within the timeout");
        }
        keepalive.message_received();
        let acknowledged =
            reliable_window.acknowledge_up_to(acknowledged).and_then(|()| match number {
                0 => Ok(Some(message)),
                number => reliable_window.receive(number, message, now),
            });
        let mut next = match acknowledged {
            Ok(next) => next,
            Err(violation) => {
                tracing::debug!(?violation, session, "it violated the protocol");
                return self.end(session_key, CloseReason::Fatal, "it violated the protocol");
            }
        };
        while let Some(message) = next {
            self.dispatch(session_key, session, message);
            next = self
                .session(session_key)
                .and_then(|session| session.reliable_window.next_in_order());
        }
        if self.session(session_key).is_some_and(|session| session.reliable_window.ack_is_due(now))
        {
            self.send_message(session_key, &Message::Pong);
        }
        if let SessionKey::Initiator(session) = session_key {
            self.send_withdrawals(session);
        }
    }

    fn dispatch(&mut self, session_key: SessionKey, session: u64, message: Message) {
        if matches!(session_key, SessionKey::Initiator(_))
            && !matches!(message, Message::Hello { .. })
        {
            self.confirm_initiator(session);
        }
        match (message.receiver_role(), message) {
            (ReceiverRole::Target, message) => self.handle_at_target(session, message),
            (ReceiverRole::Initiator, message) => self.handle_at_initiator(session, message),
            (ReceiverRole::Either, Message::Ping) => self.send_message(session_key, &Message::Pong),
            (ReceiverRole::Either, Message::Bye) => {
                // A target stays connected until its agent or this rail ends.
                let cause = match session_key {
                    SessionKey::Link(_) => "the agent has ended, or its rail",
                    SessionKey::Initiator(_) | SessionKey::NoSession => {
                        "the initiator disconnected"
                    }
                };
                self.end(session_key, CloseReason::Bye, cause);
            }
            (ReceiverRole::Either, _) => {}
        }
    }

    /// The session with this id.
    fn session_key(&mut self, session: u64, receiver_role: ReceiverRole) -> SessionKey {
        if receiver_role != ReceiverRole::Initiator && self.initiators.contains_key(&session) {
            return SessionKey::Initiator(session);
        }
        let link = self.links.iter().find(|(_, link)| link.session.id == session);
        match link {
            Some((number, _)) if receiver_role != ReceiverRole::Target => SessionKey::Link(*number),
            _ => SessionKey::NoSession,
        }
    }

    pub(super) fn new_session(&self, id: u64, peer: Peer) -> Session {
        let reliable_window = ReliableWindow::new(self.first_pause(), self.lost_after / 2);
        Session { id, peer, keepalive: Keepalive::new(), reliable_window }
    }

    pub(super) fn session(&mut self, session_key: SessionKey) -> Option<&mut Session> {
        match session_key {
            SessionKey::Link(link) => self.links.get_mut(&link).map(|link| &mut link.session),
            SessionKey::Initiator(session) => {
                self.initiators.get_mut(&session).map(|initiator| &mut initiator.session)
            }
            SessionKey::NoSession => None,
        }
    }

    /// The keys of all sessions.
    pub(super) fn session_keys(&self) -> Vec<SessionKey> {
        let links = self.links.keys().map(|link| SessionKey::Link(*link));
        links.chain(self.initiators.keys().map(|session| SessionKey::Initiator(*session))).collect()
    }

    /// The pause before the first retransmission.
    pub(super) fn first_pause(&self) -> Duration {
        (self.lost_after / PINGS_UNTIL_LOST).max(CHECK_INTERVAL)
    }

    /// Closes a session whose peer is silent or violated a limit.
    pub(super) fn close_lost(&mut self, session_key: SessionKey, cause: &str) {
        self.end(session_key, CloseReason::Lost, cause);
    }

    pub(super) fn end(&mut self, session_key: SessionKey, close_reason: CloseReason, cause: &str) {
        match session_key {
            SessionKey::Link(link) => {
                self.close_link(link, close_reason, Error::new(CONNECT, ErrorKind::Closed, cause))
            }
            SessionKey::Initiator(session) => self.close_initiator(session, close_reason, cause),
            SessionKey::NoSession => {}
        }
    }

    // ------------------------------------------------------------------- the thread

    fn process_commands(&mut self) -> bool {
        for done in 0..BATCH {
            let Ok(command) = self.command_queue.try_recv() else { return done > 0 };
            command(self);
        }
        true
    }

    /// Ends as if the provider had failed.
    #[cfg(test)]
    pub(crate) fn fail(&mut self) {
        self.failures = MAX_QUEUE_FAILURES;
    }

    /// Ends with a panic, and with another one during the cleanup.
    #[cfg(test)]
    pub(crate) fn fail_by_panic(&mut self) {
        self.is_broken = true;
        panic!("requested by a test");
    }

    fn run_periodic_checks(&mut self) {
        let now = Instant::now();
        if now < self.next_check {
            return;
        }
        self.next_check = now + CHECK_INTERVAL;
        self.check_links(now);
        self.check_initiators(now);
        self.check_sessions(now);
        self.repost_due(now);
        self.remove_unused_addresses(now);
    }

    /// The main function of the thread.
    pub(super) fn serve(mut self) {
        // Marks the end of the thread, also after a panic: others wait for it.
        let _end =
            ThreadEndGuard { shared: Arc::clone(&self.shared), agent: Arc::clone(&self.agent) };
        let ran = catch_unwind(AssertUnwindSafe(|| self.run()));
        if ran.is_err() || !self.shared.is_over.load(Ordering::Acquire) {
            // After a panic, this may panic again. The agent detects missing events itself, because
            // it knows its requests.
            let _ = catch_unwind(AssertUnwindSafe(|| self.fail_everything()));
        }
        lock(&self.shared.registration_cache).end();
        // Waits for all devices at once, before their memory is released.
        let are_done = self.copies.close(Instant::now() + RAIL_TIMEOUT);
        self.shared.may_copy.store(!are_done, Ordering::Release);
        // Operations in flight end with the endpoint.
        drop(self);
    }

    /// Fails or returns all requests; other rails may continue with returned ones.
    fn fail_everything(&mut self) {
        #[cfg(test)]
        assert!(!self.is_broken, "requested by a test");
        let cause = "the rail's thread has ended";
        for session_key in self.session_keys() {
            self.end(session_key, CloseReason::Fatal, cause);
        }
        // Unprocessed commands are returned, because all sessions are closed now.
        while self.process_commands() {}
        for (_, transfer) in std::mem::take(&mut self.transfers) {
            let outcome = Err(Error::new("transfer", ErrorKind::Closed, cause));
            self.report(RailEvent::Done { token: transfer.token, outcome });
        }
    }

    /// Polls everything once. True if anything happened.
    pub(super) fn poll_once(&mut self) -> bool {
        let mut has_moved = self.process_commands();
        self.flush();
        for _ in 0..BATCH {
            let Some(outcome) = self.queue.poll() else { break };
            self.handle_completion(outcome);
            has_moved = true;
        }
        while let Some((number, outcome)) = self.copies.next_done() {
            has_moved = true;
            if self.staging_jobs.contains_key(&number) {
                self.staging_job_done(number, outcome);
            } else {
                self.stage_done(number, outcome);
            }
        }
        has_moved |= self.advance();
        self.keep_targets_polling();
        self.run_periodic_checks();
        has_moved
    }

    /// The time until the next poll. Messages that find the queue full are retried soon, and less
    /// often with time: a provider that cannot connect never has room.
    fn max_sleep(&self) -> Duration {
        if self.copies.are_in_flight() || !self.unposted.is_empty() {
            return BUSY_PAUSE;
        }
        let latest = self.send_queue.back().map(|unsent| unsent.since.elapsed() / 8);
        latest.map_or(CHECK_INTERVAL, |pause| pause.clamp(BUSY_PAUSE, CHECK_INTERVAL))
    }

    fn run(&mut self) {
        let mut moved = Instant::now();
        while !self.shared.is_over.load(Ordering::Acquire) && self.failures < MAX_QUEUE_FAILURES {
            if self.poll_once() {
                moved = Instant::now();
                continue;
            }
            let is_busy = !(self.transfers.is_empty() && self.staging_jobs.is_empty());
            if Instant::now() < self.polls_until
                || moved.elapsed() < if is_busy { SPIN_WHILE_BUSY } else { SPIN_WHILE_IDLE }
            {
                self.queue.pause();
                // The thread that waits for this one may have no other core.
                std::thread::yield_now();
                continue;
            }
            if let Some(outcome) = self.queue.wait_or_wake(self.max_sleep()) {
                self.handle_completion(outcome);
                moved = Instant::now();
            }
        }
        self.drain_and_send_bye();
    }

    /// Completes posted operations and sends `Bye` to all peers. Some providers crash when they are
    /// closed during a write.
    fn drain_and_send_bye(&mut self) {
        const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);
        const BYE_TIMEOUT: Duration = Duration::from_millis(200);
        self.unstarted.clear();
        self.unposted.clear();
        let end = Instant::now() + DRAIN_TIMEOUT;
        let is_data = |posted: &Posted| matches!(posted, Posted::Data(..));
        while (self.posted.iter().flatten().any(is_data) || self.copies.are_in_flight())
            && Instant::now() < end
        {
            if let Some(outcome) = self.queue.wait_or_wake(BUSY_PAUSE) {
                self.handle_completion(outcome);
            }
            while self.copies.next_done().is_some() {}
        }
        // Peers whose memory is still written to receive no `Bye`, and detect the loss themselves.
        let posted = self.posted.iter().flatten().filter_map(|posted| match posted {
            Posted::Data(chunk, _) => self.in_flight.get(chunk).map(|in_flight| in_flight.session),
            Posted::Receive(_) | Posted::Send(..) => None,
        });
        let busy: HashSet<_> = posted.collect();
        for session_key in self.session_keys() {
            if self.session(session_key).is_some_and(|session| !busy.contains(&session.id)) {
                self.send_message(session_key, &Message::Bye);
            }
        }
        let end = Instant::now() + BYE_TIMEOUT;
        while (self.free_send_buffers.len() < SEND_BUFFERS || !self.send_queue.is_empty())
            && Instant::now() < end
        {
            self.flush();
            if let Some(outcome) = self.queue.wait_or_wake(BUSY_PAUSE) {
                self.handle_completion(outcome);
            }
        }
    }
}

/// Marks the end of the thread on drop.
struct ThreadEndGuard {
    shared: Arc<RailShared>,
    agent: Arc<dyn RailOwner>,
}

impl Drop for ThreadEndGuard {
    fn drop(&mut self) {
        self.shared.has_ended.store(true, Ordering::Release);
        self.agent.wake();
    }
}
