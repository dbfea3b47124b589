//! The thread of a rail: polls its endpoint and its devices, and dispatches what they report to the
//! roles.

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use fabric::{Domain, MemoryRegion, Waker};
use threads::lock;

use super::initiator::InitiatorRole;
use super::io::{BUSY_PAUSE, RailIo, Received, SendEvent, SendLoss};
use super::message::{Frame, Message, ReceiverRole};
use super::release_worker::ReleaseWorker;
use super::session::{CHECK_INTERVAL, CloseReason, Session, SessionKey};
use super::target::TargetRole;
use super::{
    Command, DirectRequest, LinkTarget, RAIL_TIMEOUT, RailOptions, RailOwner, RailRequest,
    RailShared,
};
use crate::error::Result;
use crate::region::Buffer;

/// Sleeping and waking costs tens of microseconds. While transfers are in flight, the thread spins
/// for this long first.
const SPIN_WHILE_BUSY: Duration = Duration::from_micros(200);
/// How long the thread spins without transfers, after recent activity.
const SPIN_WHILE_IDLE: Duration = Duration::from_micros(50);
/// Maximum of `lost_after`: larger values would overflow the clock.
const MAX_LOST_AFTER: Duration = Duration::from_secs(365 * 24 * 3600);
/// Commands and completions between two polls of everything else.
const BATCH: usize = 64;

pub(crate) struct Driver {
    // First, so that it is closed first: the provider has memory of all others.
    io: RailIo,
    command_queue: Receiver<Command>,
    next_check: Instant,
    initiator: InitiatorRole,
    target: TargetRole,
}

/// Commands of the agent.
impl Driver {
    pub(crate) fn connect(&mut self, link: u32, target: LinkTarget, timeout: Duration) {
        self.initiator.connect(&mut self.io, link, target, timeout);
    }

    pub(crate) fn disconnect(&mut self, link: u32) {
        self.initiator.disconnect(&mut self.io, link);
    }

    /// Opens a region with its ticket.
    pub(crate) fn open(&mut self, link: u32, region: (u64, u64), stages: bool) {
        self.initiator.open(&mut self.io, link, region, stages);
    }

    pub(crate) fn want_region(&mut self, link: u32, region: (u64, u64), stages: bool) {
        self.initiator.want_region(&mut self.io, link, region, stages);
    }

    /// Requests direct access to an open region, with device memory at one end or both.
    pub(crate) fn request_direct(&mut self, link: u32, wanted: DirectRequest) {
        self.initiator.request_direct(&mut self.io, link, wanted);
    }

    pub(super) fn begin_request(&mut self, request: RailRequest) {
        self.initiator.begin_request(&mut self.io, request);
    }

    pub(crate) fn notices_taken(&mut self, session: u64, notices: u64) {
        self.target.notices_taken(&mut self.io, session, notices);
    }

    pub(super) fn retire(&mut self, region: u64, memory: Option<MemoryRegion>, buffer: Buffer) {
        self.target.retire(&mut self.io, region, memory, buffer);
    }

    pub(super) fn enable(&self, region: &MemoryRegion) -> fabric::Result<()> {
        self.io.enable(region)
    }
}

impl Driver {
    pub(super) fn new(
        domain: &Domain,
        shared: Arc<RailShared>,
        agent: Arc<dyn RailOwner>,
        settings: RailOptions,
        command_queue: Receiver<Command>,
    ) -> Result<Self> {
        let lost_after = settings.lost_after.min(MAX_LOST_AFTER);
        let release_worker = Arc::new(ReleaseWorker::start(&shared)?);
        let io = RailIo::open(domain, Arc::clone(&shared), agent, lost_after)?;
        Ok(Self {
            io,
            command_queue,
            next_check: Instant::now(),
            initiator: InitiatorRole::new(Arc::clone(&release_worker)),
            target: TargetRole::new(release_worker),
        })
    }

    pub(super) fn address(&self) -> &[u8] {
        self.io.address()
    }

    pub(super) fn waker(&self) -> Waker {
        self.io.waker()
    }

    // ------------------------------------------------------------------- receiving

    fn handle(&mut self, received: Received) {
        match received {
            Received::Message(frame) => self.receive_frame(frame),
            Received::Chunk(chunk, outcome) => {
                self.initiator.stage_done(&mut self.io, chunk, outcome)
            }
            Received::Nothing => {}
        }
        self.handle_send_events();
    }

    /// Receives a message and dispatches all messages that are in order now.
    fn receive_frame(&mut self, frame: Frame) {
        let (id, now) = (frame.session, Instant::now());
        let session_key = self.session_key(id, frame.message.receiver_role());
        let Some((session, _)) = self.session(session_key) else {
            return self.dispatch(session_key, id, frame.message);
        };
        if session.is_lost(now) {
            // Messages after the timeout are ignored: the session is lost already.
            let cause = "no message arrived within the timeout";
            return self.end(session_key, CloseReason::Lost, cause);
        }
        let mut next = match session.receive(frame, now) {
            Ok(next) => next,
            Err(violation) => {
                tracing::debug!(?violation, session = id, "peer violated the protocol");
                return self.end(session_key, CloseReason::Fatal, "it violated the protocol");
            }
        };
        while let Some(message) = next {
            self.dispatch(session_key, id, message);
            next = self.session(session_key).and_then(|(session, _)| session.next_in_order());
        }
        if let Some((session, io)) = self.session(session_key)
            && session.ack_is_due(now)
        {
            io.send_message(session, &Message::Pong);
        }
        if let SessionKey::Initiator(session) = session_key {
            self.target.send_withdrawals(&mut self.io, session);
        }
    }

    fn dispatch(&mut self, session_key: SessionKey, session: u64, message: Message) {
        let Self { io, initiator, target, .. } = self;
        if matches!(session_key, SessionKey::Initiator(_))
            && !matches!(message, Message::Hello { .. })
        {
            target.confirm_initiator(io, session);
        }
        match (message.receiver_role(), message) {
            (ReceiverRole::Target, message) => target.handle(io, session, message),
            (ReceiverRole::Initiator, message) => initiator.handle(io, session, message),
            (ReceiverRole::Either, Message::Ping) => {
                if let Some((session, io)) = self.session(session_key) {
                    io.send_message(session, &Message::Pong);
                }
            }
            (ReceiverRole::Either, Message::Bye) => {
                // A target stays connected until its agent or this rail ends.
                let cause = match session_key {
                    SessionKey::Link(_) => "the agent has ended, or its rail",
                    _ => "the initiator disconnected",
                };
                self.end(session_key, CloseReason::Bye, cause);
            }
            (ReceiverRole::Either, _) => {}
        }
        self.handle_send_events();
    }

    /// The session with this id.
    fn session_key(&self, session: u64, receiver_role: ReceiverRole) -> SessionKey {
        if receiver_role != ReceiverRole::Initiator && self.target.has_session(session) {
            return SessionKey::Initiator(session);
        }
        match self.initiator.link_of(session) {
            Some(link) if receiver_role != ReceiverRole::Target => SessionKey::Link(link),
            _ => SessionKey::NoSession,
        }
    }

    fn session(&mut self, session_key: SessionKey) -> Option<(&mut Session, &mut RailIo)> {
        let session = match session_key {
            SessionKey::Link(link) => self.initiator.session(link),
            SessionKey::Initiator(session) => self.target.session(session),
            SessionKey::NoSession => None,
        };
        session.map(|session| (session, &mut self.io))
    }

    /// Closes sessions that are lost. Other messages that were not sent are retransmitted; but a
    /// peer that the agent waits for is reported at once, unless a new connection may reach it.
    fn handle_send_events(&mut self) {
        while let Some(event) = self.io.next_send_event() {
            let SendEvent { session, loss, cause } = event;
            let fails = match session {
                _ if loss == SendLoss::Session => true,
                SessionKey::Link(link) => self.initiator.note_send_loss(link, loss),
                _ => false,
            };
            if fails {
                self.end(session, CloseReason::Lost, &cause);
            } else if let Some((session, _)) = self.session(session) {
                session.retransmit_soon();
            }
        }
    }

    fn end(&mut self, session_key: SessionKey, close_reason: CloseReason, cause: &str) {
        let Self { io, initiator, target, .. } = self;
        match session_key {
            SessionKey::Link(link) => initiator.end_link(io, link, close_reason, cause),
            SessionKey::Initiator(session) => target.close(io, session, close_reason, cause),
            SessionKey::NoSession => {}
        }
    }

    // ------------------------------------------------------------------- the thread

    fn process_commands(&mut self) -> bool {
        for done in 0..BATCH {
            let Ok(command) = self.command_queue.try_recv() else { return done > 0 };
            command(self);
            self.handle_send_events();
        }
        true
    }

    fn run_periodic_checks(&mut self) {
        let now = Instant::now();
        if now < self.next_check {
            return;
        }
        self.next_check = now + CHECK_INTERVAL;
        self.initiator.check(&mut self.io, now);
        self.target.check(&mut self.io, now);
        self.handle_send_events();
        for (session, is_connecting) in self.initiator.sessions() {
            self.io.check_session(session, is_connecting, now);
        }
        for session in self.target.sessions() {
            self.io.check_session(session, false, now);
        }
        self.handle_send_events();
        self.initiator.repost_due(now);
        self.io.remove_unused_addresses(now);
    }

    /// The main function of the thread.
    pub(super) fn serve(mut self) {
        // Marks the end of the thread, also after a panic: others wait for it.
        let end = ThreadEndGuard {
            shared: Arc::clone(self.io.shared()),
            agent: Arc::clone(self.io.agent()),
        };
        let ran = catch_unwind(AssertUnwindSafe(|| self.run()));
        if ran.is_err() || !end.shared.is_over.load(Ordering::Acquire) {
            // After a panic, this may panic again. The agent detects missing events itself, because
            // it knows its requests.
            let _ = catch_unwind(AssertUnwindSafe(|| self.fail_everything()));
        }
        lock(&end.shared.registration_cache).end();
        // Waits for all devices at once, before their memory is released.
        let are_done = self.io.staging().close(Instant::now() + RAIL_TIMEOUT);
        end.shared.may_copy.store(!are_done, Ordering::Release);
        // Operations in flight end with the io.
        drop(self);
    }

    /// Fails or returns all requests; other rails may continue with returned ones.
    fn fail_everything(&mut self) {
        #[cfg(test)]
        assert!(!test_access::IS_BROKEN.get(), "requested by a test");
        let cause = "the rail's thread has ended";
        let links = self.initiator.sessions().map(|(session, _)| session.key());
        let initiators = self.target.sessions().map(|session| session.key());
        for session_key in links.chain(initiators).collect::<Vec<_>>() {
            self.end(session_key, CloseReason::Fatal, cause);
        }
        // Unprocessed commands are returned, because all sessions are closed now.
        while self.process_commands() {}
        self.initiator.fail_transfers(&self.io, cause);
    }

    /// Polls everything once. True if anything happened.
    pub(super) fn poll_once(&mut self) -> bool {
        let mut has_moved = self.process_commands();
        self.io.flush();
        self.handle_send_events();
        for _ in 0..BATCH {
            let Some(received) = self.io.poll() else { break };
            self.handle(received);
            has_moved = true;
        }
        while let Some((number, outcome)) = self.io.staging().next_copy() {
            has_moved = true;
            if self.target.has_staging_job(number) {
                self.target.staging_job_done(&mut self.io, number, outcome);
                self.handle_send_events();
            } else {
                self.handle(Received::Chunk(number, outcome));
            }
        }
        has_moved |= self.target.advance_probes(&mut self.io);
        has_moved |= self.initiator.advance(&mut self.io);
        self.initiator.keep_targets_polling(&mut self.io);
        self.handle_send_events();
        self.run_periodic_checks();
        has_moved
    }

    fn run(&mut self) {
        let mut moved = Instant::now();
        while !self.io.is_over() {
            if self.poll_once() {
                moved = Instant::now();
                continue;
            }
            let is_busy = self.initiator.has_transfers() || self.target.has_staging_jobs();
            // A look at probed bytes must not wait for a sleep to end.
            if self.target.polls()
                || self.initiator.is_probing()
                || moved.elapsed() < if is_busy { SPIN_WHILE_BUSY } else { SPIN_WHILE_IDLE }
            {
                self.io.pause();
                // The thread that waits for this one may have no other core.
                std::thread::yield_now();
                continue;
            }
            let max_sleep = self.io.max_sleep(self.initiator.has_unposted());
            if let Some(received) = self.io.wait(max_sleep) {
                self.handle(received);
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
        self.initiator.stop();
        let end = Instant::now() + DRAIN_TIMEOUT;
        while (self.io.posted_chunks().next().is_some() || self.io.staging().copies_in_flight())
            && Instant::now() < end
        {
            if let Some(received) = self.io.wait(BUSY_PAUSE) {
                self.handle(received);
            }
            while self.io.staging().next_copy().is_some() {}
        }
        // Peers whose memory is still written to receive no `Bye`, and detect the loss themselves.
        let posted = self.io.posted_chunks();
        let busy: HashSet<_> =
            posted.filter_map(|chunk| self.initiator.session_of(chunk)).collect();
        let links = self.initiator.sessions().map(|(session, _)| session);
        for session in links.chain(self.target.sessions()) {
            if !busy.contains(&session.id()) {
                self.io.send_message(session, &Message::Bye);
            }
        }
        self.handle_send_events();
        let end = Instant::now() + BYE_TIMEOUT;
        while !self.io.has_sent_all() && Instant::now() < end {
            self.io.flush();
            if let Some(received) = self.io.wait(BUSY_PAUSE) {
                self.handle(received);
            }
        }
    }
}

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

/// Access for tests.
#[cfg(test)]
mod test_access {
    use super::*;
    use crate::host_buffer::HostBuffer;
    use crate::path::Operation;
    use crate::rail::Chunk;
    use crate::region::Rights;

    thread_local! {
        /// The cleanup of this thread's rail panics.
        pub(super) static IS_BROKEN: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
    }

    impl Driver {
        /// Ends as if the provider had failed.
        pub(crate) fn fail(&mut self) {
            self.io.fail();
        }

        pub(in crate::rail) fn break_connection(&mut self, link: u32, cause: &str) {
            self.io.break_connection(SessionKey::Link(link), cause);
        }

        /// Ends with a panic, and with another one during the cleanup.
        pub(crate) fn fail_by_panic(&mut self) {
            IS_BROKEN.set(true);
            panic!("requested by a test");
        }

        pub(in crate::rail) fn initiator(&self) -> &InitiatorRole {
            &self.initiator
        }

        pub(in crate::rail) fn target(&self) -> &TargetRole {
            &self.target
        }

        /// Registers memory for peers.
        pub(in crate::rail) fn register(&self, buffer: &HostBuffer) -> MemoryRegion {
            self.io.register_now(Buffer::Host(buffer.clone()), Some(Rights::ALL)).unwrap()
        }

        pub(in crate::rail) fn known_peers(&self) -> usize {
            self.io.known_peers()
        }

        pub(in crate::rail) fn receive(&mut self, frame: Frame) {
            self.handle(Received::Message(frame));
        }

        pub(in crate::rail) fn handle_at_target(&mut self, session: u64, message: Message) {
            self.target.handle(&mut self.io, session, message);
            self.handle_send_events();
        }

        pub(in crate::rail) fn handle_at_initiator(&mut self, session: u64, message: Message) {
            self.initiator.handle(&mut self.io, session, message);
            self.handle_send_events();
        }

        pub(in crate::rail) fn begin_staging_job(
            &mut self,
            session: u64,
            chunk: Chunk,
            is_drain: bool,
        ) -> Result<()> {
            let operation = if is_drain { Operation::Put } else { Operation::Get };
            self.target.begin_staging_job(&mut self.io, session, chunk, operation)
        }

        pub(in crate::rail) fn close_lost(&mut self, session_key: SessionKey, cause: &str) {
            self.end(session_key, CloseReason::Lost, cause);
        }

        pub(in crate::rail) fn check_links(&mut self, now: Instant) {
            self.initiator.check(&mut self.io, now);
            self.handle_send_events();
        }

        pub(in crate::rail) fn check_initiators(&mut self, now: Instant) {
            self.target.check(&mut self.io, now);
            self.handle_send_events();
        }
    }
}
