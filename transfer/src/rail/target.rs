//! The target's side of a rail: sessions of initiators, their regions, staging jobs and notices.

mod probes;

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fabric::{Address, MemoryRegion};
use gpu::Block;
use threads::lock;

use self::probes::Probes;
use super::io::RailIo;
use super::message::Message;
use super::release_worker::ReleaseWorker;
use super::session::{CloseReason, Session, SessionKey};
use super::staging::{SLOT_COUNT, SLOT_LENGTH, part};
use super::{Chunk, RailEvent};
use crate::device_memory::MemoryEnd;
use crate::error::{Context, Error, ErrorKind, Result};
use crate::host_buffer::HostBuffer;
use crate::host_copy::CacheUse;
use crate::notice::Notice;
use crate::path::Operation;
use crate::refusal::Refusal;
use crate::region::{Buffer, RegisteredRegion, Rights};

/// How long memory is kept that an initiator had staged to or opened: after `Bye`, until its last
/// writes have landed; after a loss, until the initiator is unlikely to reconnect, which could
/// continue its old writes.
const QUARANTINE_AFTER_BYE: Duration = Duration::from_secs(1);
const QUARANTINE_AFTER_LOSS: Duration = Duration::from_secs(60);
/// Number of initiators whose slots are quarantined; above it, the oldest are freed. So initiators
/// that are killed repeatedly do not exhaust the memory. Regions have no such limit: the agent
/// decides their number.
const MAX_QUARANTINED_SLOTS: usize = 128;
pub(super) const MAX_INITIATORS: usize = if cfg!(test) { 64 } else { 1024 };
/// Maximum of sessions with staging memory per agent, which connects once or a few times.
const MAX_STAGING_SESSIONS: usize = 8;
const GONE: &str = "the region was withdrawn or never existed";
/// Maximum of queued refusals of hellos.
const MAX_QUEUED_REFUSALS: usize = 16;
/// Maximum of notices of an initiator that the agent has not taken.
const NOTICE_WINDOW: u64 = 64;
/// How long a target polls without sleep after a request for it.
pub(super) const POLLING_TIME: Duration = Duration::from_millis(1);
/// Maximum of concurrent copies per initiator, above what its slots allow.
const MAX_STAGING_JOBS: usize = 2 * SLOT_COUNT as usize;

/// A session of an initiator.
#[derive(Debug)]
struct Initiator {
    /// Unique, unlike session ids, which an initiator may reuse.
    number: u64,
    session: Session,
    identity: [u8; 16],
    connection_id: u64,
    label: String,
    /// The initiator confirmed the welcome. Unconfirmed sessions are not reported, because it may
    /// retry.
    is_confirmed: bool,
    opened: HashSet<u64>,
    /// Withdrawn regions of which it was not notified yet.
    unsent_withdrawals: VecDeque<u64>,
    staging: Option<(HostBuffer, MemoryRegion)>,
    staging_jobs: usize,
    /// Number of notices received, and of notices that the agent took.
    received: u64,
    notices_taken: u64,
    /// Memory of its side and of this one whose probe passed.
    passed_probes: HashSet<(MemoryEnd, MemoryEnd)>,
}

/// A copy between a region and a slot of an initiator.
#[derive(Debug)]
struct StagingJob {
    session: u64,
    initiator: u64,
    chunk: u64,
    /// Kept until the copy is done.
    region: Arc<RegisteredRegion>,
}

/// A withdrawn region that may still be in use.
#[derive(Debug, Clone)]
struct RetiringRegion {
    sessions: HashSet<u64>,
    // Before the buffer, so that it is dropped first.
    _memory: Option<MemoryRegion>,
    _buffer: Buffer,
}

impl Initiator {
    fn is_of(&self, identity: [u8; 16], connection_id: u64) -> bool {
        (self.identity, self.connection_id) == (identity, connection_id)
    }

    fn send_notice_credit(&mut self, io: &mut RailIo) {
        let message = Message::NoticeCredit {
            notices: self.received,
            credit_limit: self.notices_taken + NOTICE_WINDOW,
        };
        io.send_message(&mut self.session, &message);
    }

    fn send_welcome(&mut self, io: &mut RailIo) {
        let welcome = Message::Welcome { credit_limit: NOTICE_WINDOW };
        io.send_message(&mut self.session, &welcome);
    }

    /// Notifies it of withdrawn regions, within the limits of its window and queue: there may be
    /// thousands at once, and an initiator that is sent more than it acknowledges is lost.
    fn send_withdrawals(&mut self, io: &mut RailIo) {
        while !self.unsent_withdrawals.is_empty()
            && self.session.has_room()
            && io.has_room(self.session.peer())
            && let Some(region) = self.unsent_withdrawals.pop_front()
        {
            if self.opened.contains(&region) {
                io.send_message(&mut self.session, &Message::Withdrawn { region });
            }
        }
    }
}

/// The initiators of a rail, and the regions that they use.
pub(super) struct TargetRole {
    initiators: HashMap<u64, Initiator>,
    staging_jobs: HashMap<u64, StagingJob>,
    retiring: HashMap<u64, RetiringRegion>,
    /// Slots of lost initiators, which these may still write to, and when they are freed.
    quarantined_slots: VecDeque<(Instant, (MemoryRegion, HostBuffer))>,
    /// Regions that lost initiators had opened, and when they are freed; with their memory, once
    /// withdrawn.
    quarantined_regions: HashMap<u64, (Instant, Option<RetiringRegion>)>,
    /// Releases registrations that are not needed any more.
    release_worker: Arc<ReleaseWorker>,
    probes: Probes,
    /// Polls without sleep until then, on request of an initiator.
    polls_until: Instant,
}

impl TargetRole {
    pub(super) fn new(release_worker: Arc<ReleaseWorker>) -> Self {
        Self {
            initiators: HashMap::new(),
            staging_jobs: HashMap::new(),
            retiring: HashMap::new(),
            quarantined_slots: VecDeque::new(),
            quarantined_regions: HashMap::new(),
            release_worker,
            probes: Probes::default(),
            polls_until: Instant::now(),
        }
    }

    /// Has an initiator requested polling, or a probe?
    pub(super) fn polls(&self) -> bool {
        self.probes.is_active() || Instant::now() < self.polls_until
    }

    pub(super) fn has_session(&self, session: u64) -> bool {
        self.initiators.contains_key(&session)
    }

    pub(super) fn session(&mut self, session: u64) -> Option<&mut Session> {
        self.initiators.get_mut(&session).map(|initiator| &mut initiator.session)
    }

    pub(super) fn sessions(&mut self) -> impl Iterator<Item = &mut Session> {
        self.initiators.values_mut().map(|initiator| &mut initiator.session)
    }

    pub(super) fn handle(&mut self, io: &mut RailIo, session: u64, message: Message) {
        if let Message::Hello { to, from, connection_id, label, address } = message {
            return self.handle_hello(io, session, to, (from, connection_id), label, address);
        }
        let Some(initiator) = self.initiators.get_mut(&session) else { return };
        match message {
            Message::Open { request, region, ticket } => {
                let message = if io.agent().find_region(region, ticket).is_some() {
                    initiator.opened.insert(region);
                    Message::Opened { request }
                } else {
                    Message::Refused { request, refusal: Refusal::new(ErrorKind::Stale, GONE) }
                };
                io.send_message(&mut initiator.session, &message);
            }
            Message::RequestStaging { request } => {
                let message = match self.grant_staging(io, session) {
                    Ok(memory) => {
                        let (slots, slot_length) = (SLOT_COUNT, SLOT_LENGTH);
                        Message::Staging { request, slots, slot_length, memory }
                    }
                    Err(error) => Message::Refused { request, refusal: Refusal::of(&error) },
                };
                self.send_message(io, session, &message);
            }
            Message::Notice(notice) => self.take_notice(io, session, notice),
            Message::RequestDrain(chunk) => {
                self.run_staging(io, session, chunk, Operation::Put);
            }
            Message::RequestFill(chunk) => {
                self.run_staging(io, session, chunk, Operation::Get);
            }
            Message::KeepPolling => self.polls_until = Instant::now() + POLLING_TIME,
            Message::Released { region } => {
                initiator.opened.remove(&region);
                self.region_released(io, region, session);
            }
            message => self.handle_direct(io, session, message),
        }
    }

    /// Notifies an initiator of withdrawn regions, as far as there is room.
    pub(super) fn send_withdrawals(&mut self, io: &mut RailIo, session: u64) {
        if let Some(initiator) = self.initiators.get_mut(&session) {
            initiator.send_withdrawals(io);
        }
    }

    fn send_message(&mut self, io: &mut RailIo, session: u64, message: &Message) {
        if let Some(session) = self.session(session) {
            io.send_message(session, message);
        }
    }

    fn handle_hello(
        &mut self,
        io: &mut RailIo,
        session: u64,
        to: [u8; 16],
        (from, connection_id): ([u8; 16], u64),
        label: String,
        address: Vec<u8>,
    ) {
        if let Some(initiator) = self.initiators.get_mut(&session) {
            // The welcome was lost.
            return initiator.send_welcome(io);
        }
        let refusal = if to != io.agent().identity() {
            Some(Refusal::new(ErrorKind::Stale, "another agent listens there now"))
        } else if from == io.agent().identity() {
            // A message could not be attributed to one of the two sides.
            Some(Refusal::new(ErrorKind::Denied, "an agent cannot connect to itself over a fabric"))
        } else if !self.make_room_for_initiator(io) {
            let cause =
                format!("{MAX_INITIATORS} initiators with regions are connected, the maximum");
            Some(Refusal::new(ErrorKind::TooMany, cause))
        } else {
            None
        };
        // Limits the addresses that refusals use.
        if refusal.is_some() && io.unsent_messages(SessionKey::NoSession) >= MAX_QUEUED_REFUSALS {
            tracing::debug!(label, "refusal not sent: too many are queued");
            return;
        }
        let Ok(peer) = io.acquire_address(&Address(address)) else {
            tracing::debug!(label, "hello with an invalid address ignored");
            return;
        };
        if let Some(refusal) = refusal {
            let message = Message::Refused { request: 0, refusal };
            io.send_without_session(peer, session, &message);
            return io.release_address(peer);
        }
        // An earlier unconfirmed session is closed only after this one exists.
        let earlier = self.find(|it| it.is_of(from, connection_id) && !it.is_confirmed);
        let key = SessionKey::Initiator(session);
        let initiator = Initiator {
            number: io.next_id(),
            session: Session::new(key, session, peer, io.lost_after()),
            identity: from,
            connection_id,
            label,
            is_confirmed: false,
            opened: HashSet::new(),
            unsent_withdrawals: VecDeque::new(),
            staging: None,
            staging_jobs: 0,
            received: 0,
            notices_taken: 0,
            passed_probes: HashSet::new(),
        };
        self.initiators.insert(session, initiator);
        if let Some(earlier) = earlier {
            self.close_lost(io, earlier, "it opened a newer session");
        }
        if let Some(initiator) = self.initiators.get_mut(&session) {
            initiator.send_welcome(io);
        }
    }

    /// Makes room for an initiator if necessary: evicts one without open regions, unconfirmed and
    /// oldest first. Any process can send a hello, because identities are public; opening a region
    /// takes a ticket.
    fn make_room_for_initiator(&mut self, io: &mut RailIo) -> bool {
        if self.initiators.len() < MAX_INITIATORS {
            return true;
        }
        let idle = self.initiators.iter().filter(|(_, initiator)| initiator.opened.is_empty());
        let victim = idle.min_by_key(|(_, initiator)| (initiator.is_confirmed, initiator.number));
        let Some((&session, _)) = victim else { return false };
        self.close_lost(io, session, "evicted for other initiators: it had opened no region");
        true
    }

    /// The initiator sent a message other than hello: the session works in both directions.
    pub(super) fn confirm_initiator(&mut self, io: &mut RailIo, session: u64) {
        let Some(initiator) = self.initiators.get_mut(&session).filter(|it| !it.is_confirmed)
        else {
            return;
        };
        initiator.is_confirmed = true;
        let (number, from, connection_id) =
            (initiator.number, initiator.identity, initiator.connection_id);
        let label = initiator.label.clone();
        io.report(RailEvent::SessionOpened { session, from, connection_id, label });
        // The initiator had lost an earlier session.
        let earlier = |it: &Initiator| it.is_of(from, connection_id) && it.number < number;
        if let Some(earlier) = self.find(earlier) {
            self.close_lost(io, earlier, "it opened a newer session");
        }
    }

    fn find(&self, is_match: impl Fn(&Initiator) -> bool) -> Option<u64> {
        let found = self.initiators.iter().find(|(_, initiator)| is_match(initiator));
        found.map(|(session, _)| *session)
    }

    fn close_lost(&mut self, io: &mut RailIo, session: u64, cause: &str) {
        self.close(io, session, CloseReason::Lost, cause);
    }

    pub(super) fn close(
        &mut self,
        io: &mut RailIo,
        session: u64,
        close_reason: CloseReason,
        cause: &str,
    ) {
        let Some(initiator) = self.initiators.remove(&session) else { return };
        tracing::debug!(label = initiator.label, cause, "session with an initiator closed");
        let is_lost = close_reason != CloseReason::Bye;
        let until =
            Instant::now() + if is_lost { QUARANTINE_AFTER_LOSS } else { QUARANTINE_AFTER_BYE };
        io.drop_queued(SessionKey::Initiator(session));
        for region in &initiator.opened {
            let (end, kept) = self.quarantined_regions.entry(*region).or_insert((until, None));
            *end = until.max(*end);
            if let Some(retiring) = self.retiring.get(region) {
                *kept = Some(retiring.clone());
            }
            self.region_released(io, *region, session);
        }
        if initiator.is_confirmed {
            let lost = is_lost.then(|| cause.to_owned());
            io.report(RailEvent::SessionClosed { session, lost });
        }
        if let Some((buffer, memory)) = initiator.staging {
            if self.quarantined_slots.len() >= MAX_QUARANTINED_SLOTS {
                let oldest = self.quarantined_slots.pop_front();
                self.release_worker.release(oldest);
            }
            self.quarantined_slots.push_back((until, (memory, buffer)));
        }
        io.release_address(initiator.session.peer());
        self.end_probes_of(io, session);
    }

    pub(super) fn check(&mut self, io: &mut RailIo, now: Instant) {
        self.check_probes(io, now);
        if self.quarantined_slots.iter().any(|(until, _)| now >= *until) {
            let (kept, expired): (VecDeque<_>, VecDeque<_>) =
                self.quarantined_slots.drain(..).partition(|(until, _)| now < *until);
            self.quarantined_slots = kept;
            self.release_worker.release(expired);
        }
        let expired: Vec<_> =
            self.quarantined_regions.extract_if(|_, (until, _)| now >= *until).collect();
        if !expired.is_empty() {
            self.release_worker.release(expired);
        }
        for initiator in self.initiators.values_mut() {
            initiator.send_withdrawals(io);
        }
    }

    fn grant_staging(&mut self, io: &mut RailIo, session: u64) -> Result<Vec<u8>> {
        let operation = "grant staging memory";
        // Only initiators that opened a region get memory, which takes a ticket.
        let initiator = self.initiators.get(&session);
        let Some(initiator) = initiator.filter(|it| it.staging.is_some() || !it.opened.is_empty())
        else {
            let detail = "the initiator has opened no region";
            return Err(Error::new(operation, ErrorKind::Denied, detail));
        };
        if let Some((_, memory)) = &initiator.staging {
            return Ok(memory.describe().during(operation)?.encode());
        }
        let of_agent = self.initiators.values().filter(|it| it.identity == initiator.identity);
        if of_agent.filter(|it| it.staging.is_some()).count() >= MAX_STAGING_SESSIONS {
            let detail =
                format!("{MAX_STAGING_SESSIONS} of its sessions have staging memory, the maximum");
            return Err(Error::new(operation, ErrorKind::TooMany, detail));
        }
        let buffer = HostBuffer::new(SLOT_LENGTH * u64::from(SLOT_COUNT))?;
        let memory = io.register_now((&buffer).into(), Some(Rights::ALL))?;
        let described = memory.describe().during(operation)?.encode();
        if let Some(initiator) = self.initiators.get_mut(&session) {
            initiator.staging = Some((buffer, memory));
        }
        Ok(described)
    }

    // ------------------------------------------------------------------- notices

    fn take_notice(&mut self, io: &mut RailIo, session: u64, notice: Notice) {
        let Some(initiator) = self.initiators.get_mut(&session) else { return };
        if initiator.received >= initiator.notices_taken + NOTICE_WINDOW {
            let cause = "it sent more notices than its credit allows";
            return self.close_lost(io, session, cause);
        }
        // Otherwise the notice would overtake the bytes that it announces.
        if let Err(error) = io.agent().written_devices().flush() {
            let cause = format!("its writes to device memory cannot be flushed: {error}");
            return self.close_lost(io, session, &cause);
        }
        initiator.received += 1;
        let from = initiator.identity;
        io.report(RailEvent::Notice { session, from, notice });
        initiator.send_notice_credit(io);
    }

    /// The agent took notices of an initiator: grants credit for as many more.
    pub(super) fn notices_taken(&mut self, io: &mut RailIo, session: u64, notices: u64) {
        let Some(initiator) = self.initiators.get_mut(&session) else { return };
        initiator.notices_taken += notices;
        initiator.send_notice_credit(io);
    }

    // ------------------------------------------------------------------- staging jobs

    fn run_staging(&mut self, io: &mut RailIo, session: u64, chunk: Chunk, operation: Operation) {
        if let Err(error) = self.begin_staging_job(io, session, chunk, operation) {
            let done = Message::Done { number: chunk.number, refusal: Some(Refusal::of(&error)) };
            self.send_message(io, session, &done);
        }
    }

    pub(super) fn begin_staging_job(
        &mut self,
        io: &mut RailIo,
        session: u64,
        chunk: Chunk,
        operation: Operation,
    ) -> Result<()> {
        let refuse = |kind, cause: &str| Err(Error::new(operation.name(), kind, cause));
        let Some(region) = io.agent().find_region(chunk.region, chunk.ticket) else {
            return refuse(ErrorKind::Stale, GONE);
        };
        if !region.descriptor.rights.permit(operation) {
            return refuse(ErrorKind::NotAllowed, "the region's rights do not allow it");
        }
        let end = chunk.offset.checked_add(chunk.length);
        let is_inside = end.is_some_and(|end| end <= region.descriptor.length);
        if !is_inside || chunk.slot >= SLOT_COUNT || chunk.length > SLOT_LENGTH {
            return refuse(ErrorKind::OutOfBounds, "the chunk exceeds the region or a slot");
        }
        let number = io.next_id();
        let Some(initiator) = self.initiators.get_mut(&session) else { return Ok(()) };
        let Some((buffer, _)) = &initiator.staging else {
            return refuse(ErrorKind::NoPath, "the initiator has no staging memory");
        };
        if initiator.staging_jobs >= MAX_STAGING_JOBS {
            return refuse(ErrorKind::TooMany, "more copies in flight than staging slots");
        }
        let at = u64::from(chunk.slot) * SLOT_LENGTH;
        match &region.buffer {
            Buffer::Host(memory) => {
                let (to, from) = operation.to_and_from(at, chunk.offset);
                let block = Block { to, from, length: chunk.length };
                let (target, source) = operation.to_and_from(buffer, memory);
                target.copy_rows(source, &block.into(), CacheUse::Normal)?;
                let done = Message::Done { number: chunk.number, refusal: None };
                io.send_message(&mut initiator.session, &done);
            }
            Buffer::Device(memory) => {
                let device = memory.mapped_for();
                let slot = part(&buffer.pinned_for(device)?, at, chunk.length)?;
                let memory_part = part(memory, chunk.offset, chunk.length)?;
                let (to, from) = operation.to_and_from(&slot, &memory_part);
                io.staging().begin_copy(number, device, to, from)?;
                initiator.staging_jobs += 1;
                let (initiator, chunk) = (initiator.number, chunk.number);
                let staging_job = StagingJob { session, initiator, chunk, region };
                self.staging_jobs.insert(number, staging_job);
            }
        }
        Ok(())
    }

    pub(super) fn has_staging_jobs(&self) -> bool {
        !self.staging_jobs.is_empty()
    }

    pub(super) fn has_staging_job(&self, number: u64) -> bool {
        self.staging_jobs.contains_key(&number)
    }

    pub(super) fn staging_job_done(&mut self, io: &mut RailIo, number: u64, outcome: Result<()>) {
        let Some(staging_job) = self.staging_jobs.remove(&number) else { return };
        let StagingJob { session, initiator: by, chunk, region } = staging_job;
        let number = region.descriptor.number;
        drop(region);
        if let Some(initiator) = self.initiators.get_mut(&session).filter(|it| it.number == by) {
            initiator.staging_jobs -= 1;
            let refusal = outcome.err().map(|error| Refusal::of(&error));
            let done = Message::Done { number: chunk, refusal };
            io.send_message(&mut initiator.session, &done);
        }
        self.finish_retiring(io, number);
    }

    // ------------------------------------------------------------------- withdrawn regions

    pub(super) fn retire(
        &mut self,
        io: &mut RailIo,
        region: u64,
        memory: Option<MemoryRegion>,
        buffer: Buffer,
    ) {
        let mut sessions = HashSet::new();
        for (session, initiator) in &mut self.initiators {
            if initiator.opened.contains(&region) {
                sessions.insert(*session);
                initiator.unsent_withdrawals.push_back(region);
                initiator.send_withdrawals(io);
            }
        }
        let retiring = RetiringRegion { sessions, _memory: memory, _buffer: buffer };
        // The withdrawal does not wait for a lost initiator, but the memory is not reused.
        if let Some((_, kept)) = self.quarantined_regions.get_mut(&region) {
            *kept = Some(retiring.clone());
        }
        self.retiring.insert(region, retiring);
        self.finish_retiring(io, region);
    }

    fn region_released(&mut self, io: &RailIo, region: u64, session: u64) {
        if let Some(retiring) = self.retiring.get_mut(&region) {
            retiring.sessions.remove(&session);
            self.finish_retiring(io, region);
        }
    }

    /// Releases a withdrawn region that is not in use any more, or records its users.
    fn finish_retiring(&mut self, io: &RailIo, region: u64) {
        let Some(retiring) = self.retiring.get(&region) else { return };
        let is_copied =
            self.staging_jobs.values().any(|job| job.region.descriptor.number == region);
        if !retiring.sessions.is_empty() || is_copied {
            let label = |session: &u64| Some(self.initiators.get(session)?.label.clone());
            let mut labels: Vec<_> = retiring.sessions.iter().filter_map(label).collect();
            if labels.is_empty() {
                labels.push("a staging copy of this agent".to_owned());
            }
            lock(&io.shared().retiring).insert(region, labels);
            return;
        }
        let retiring = self.retiring.remove(&region);
        lock(&io.shared().retiring).insert(region, vec!["the rail".to_owned()]);
        // Only after the fabric has released it.
        let shared = Arc::clone(io.shared());
        self.release_worker.run(move || {
            drop(retiring);
            lock(&shared.retiring).remove(&region);
        });
    }
}

/// Access for tests.
#[cfg(test)]
mod test_access {
    use super::*;

    impl TargetRole {
        pub(in crate::rail) fn count(&self) -> usize {
            self.initiators.len()
        }

        /// Number of initiators with staging memory.
        pub(in crate::rail) fn staging_count(&self) -> usize {
            self.initiators.values().filter(|initiator| initiator.staging.is_some()).count()
        }

        pub(in crate::rail) fn has_staging(&self, session: u64) -> bool {
            self.initiators[&session].staging.is_some()
        }

        /// Number of quarantined slots, and when the last are freed.
        pub(in crate::rail) fn quarantined_slots(&self) -> (usize, Instant) {
            (self.quarantined_slots.len(), self.quarantined_slots.back().unwrap().0)
        }

        pub(in crate::rail) fn quarantined_regions(&self) -> usize {
            self.quarantined_regions.len()
        }

        /// When a quarantined region is freed, and whether it is withdrawn.
        pub(in crate::rail) fn quarantined_region(&self, region: u64) -> Option<(Instant, bool)> {
            self.quarantined_regions.get(&region).map(|(until, kept)| (*until, kept.is_some()))
        }
    }
}
