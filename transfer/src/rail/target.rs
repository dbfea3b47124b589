//! What a rail does for others: guests come, ask for regions, stage by way of memory that they were
//! given, and leave notices.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fabric::{Address, MemoryRegion};

use super::RailEvent;
use super::driver::{Driver, SessionKey};
use super::links::CloseReason;
use super::message::{Chunk, Message};
use super::post::MAX_QUEUED_PER_PEER;
use super::session::Session;
use super::staging::{SLOT_COUNT, SLOT_LENGTH, part};
use crate::agent::{Notice, Refusal};
use crate::error::{Error, ErrorKind, Result};
use crate::host_buffer::HostBuffer;
use crate::lock;
use crate::region::{Buffer, RegisteredRegion, Rights};

/// How long memory is kept that a guest had been given or shown, and left: until what it wrote before
/// it said so has landed; or, where it did not say so, until it is not likely to come back, since what
/// it had begun would come back with it.
const QUARANTINE_AFTER_BYE: Duration = Duration::from_secs(1);
const QUARANTINE_AFTER_LOSS: Duration = Duration::from_secs(60);
/// And slots of how many guests: then the oldest go. Guests that come and are killed, one after the
/// other, do not keep the next from being served. Regions have no such limit: they are as many as the
/// agent makes.
const MAX_QUARANTINED_SLOTS: usize = 128;
pub(super) const MAX_INITIATORS: usize = if cfg!(test) { 64 } else { 1024 };
/// Guests of one identity that are given staging memory: an agent connects once, or a few times.
const MAX_STAGING_SESSIONS: usize = 8;
/// Refusals of hellos that wait to be sent.
const MAX_QUEUED_REFUSALS: usize = 16;
/// Notices of one guest that may wait to be taken.
const NOTICE_WINDOW: u64 = 64;
/// How long a host that was roused polls without a rest.
pub(super) const POLLING_TIME: Duration = Duration::from_millis(1);
/// Copies of one guest that may be under way: more than it has slots is no guest's way.
const MAX_STAGING_JOBS: usize = 2 * SLOT_COUNT as usize;

/// One that came to put and get.
#[derive(Debug)]
pub(super) struct Initiator {
    /// Of all guests that ever came; a session may come again.
    number: u64,
    pub(super) session: Session,
    identity: [u8; 16],
    connection_id: u64,
    label: String,
    /// It heard that it is welcome. Before it may give up and come again, and is told of to nobody.
    is_confirmed: bool,
    opened: HashSet<u64>,
    /// Those of them that are withdrawn, and that it is not told of yet.
    unsent_withdrawals: VecDeque<u64>,
    pub(super) staging: Option<(HostBuffer, MemoryRegion)>,
    staging_jobs: usize,
    /// Notices that came, and those that were taken.
    received: u64,
    notices_taken: u64,
}

/// A copy between a region and a guest's slot.
#[derive(Debug)]
pub(super) struct StagingJob {
    session: u64,
    initiator: u64,
    chunk: u64,
    /// Kept until it is done.
    region: Arc<RegisteredRegion>,
}

/// A region that was withdrawn.
#[derive(Debug, Clone)]
pub(super) struct RetiringRegion {
    sessions: HashSet<u64>,
    // The fabric's handle goes first.
    _memory: Option<MemoryRegion>,
    _buffer: Buffer,
}

impl Driver {
    pub(super) fn handle_at_target(&mut self, session: u64, message: Message) {
        if let Message::Hello { to, from, connection_id, label, address, .. } = message {
            return self.handle_hello(session, to, (from, connection_id), label, Address(address));
        }
        let Some(initiator) = self.initiators.get_mut(&session) else { return };
        let session_key = SessionKey::Initiator(session);
        match message {
            Message::Open { request, region, ticket } => {
                let message = if self.local_target.region(region, ticket).is_some() {
                    initiator.opened.insert(region);
                    Message::Opened { request }
                } else {
                    let cause = "the region was withdrawn or never existed";
                    let refusal = Refusal::new(ErrorKind::Stale, cause);
                    Message::Refused { request, refusal }
                };
                self.send_message(session_key, &message);
            }
            Message::Stage { request } => {
                let message = match self.staging(session) {
                    Ok(memory) => Message::Staging {
                        request,
                        slots: SLOT_COUNT,
                        slot_length: SLOT_LENGTH,
                        memory,
                    },
                    Err(error) => Message::Refused { request, refusal: Refusal::of(&error) },
                };
                self.send_message(session_key, &message);
            }
            Message::Notice(notice) => self.take_notice(session, notice),
            Message::RequestDrain(chunk) => self.run_staging_job(session, chunk, true),
            Message::FillSlot(chunk) => self.run_staging_job(session, chunk, false),
            Message::KeepPolling => self.polls_until = Instant::now() + POLLING_TIME,
            Message::Released { region } => {
                initiator.opened.remove(&region);
                self.region_released(region, session);
            }
            _ => {}
        }
    }

    fn handle_hello(
        &mut self,
        session: u64,
        to: [u8; 16],
        (from, connection_id): ([u8; 16], u64),
        label: String,
        address: Address,
    ) {
        if self.initiators.contains_key(&session) {
            // It did not hear the answer.
            return self.send_welcome(session);
        }
        let refusal = if to != self.local_target.identity {
            Some(Refusal::new(ErrorKind::Stale, "another agent listens there now"))
        } else if from == self.local_target.identity {
            // Whether something is for the one or the other half could not be told.
            Some(Refusal::new(ErrorKind::Denied, "an agent cannot connect to itself over a fabric"))
        } else if !self.make_room_for_initiator() {
            Some(Refusal::new(
                ErrorKind::TooMany,
                format!("{MAX_INITIATORS} guests with regions are here"),
            ))
        } else {
            None
        };
        // Refused ones take no more than a few places among the addresses.
        if refusal.is_some() && self.messages_without_session() >= MAX_QUEUED_REFUSALS {
            tracing::debug!(label, "refusal not sent: too many are queued");
            return;
        }
        let Ok(peer) = self.acquire_address(&address) else {
            tracing::debug!(label, "hello with an invalid address ignored");
            return;
        };
        if let Some(refusal) = refusal {
            let message = Message::Refused { request: 0, refusal };
            self.queue_message(SessionKey::NoSession, peer, message.encode(session, 0, 0));
            return self.release_address(peer);
        }
        // One that has come is gone only when this one is there.
        let earlier = self.initiators.iter().find(|(_, initiator)| {
            (initiator.identity, initiator.connection_id) == (from, connection_id)
                && !initiator.is_confirmed
        });
        let earlier = earlier.map(|(session, _)| *session);
        let number = self.number();
        let initiator = Initiator {
            number,
            session: self.new_session(session, peer),
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
        };
        self.initiators.insert(session, initiator);
        if let Some(earlier) = earlier {
            self.close_lost(SessionKey::Initiator(earlier), "it opened a newer session");
        }
        self.send_welcome(session);
    }

    /// Is there room for one more guest? One that was never heard again since its hello makes room, or
    /// else one that has opened no region: the identity that a hello names stands in every card, so
    /// anybody can say hello, and a region takes a ticket. The oldest goes first.
    fn make_room_for_initiator(&mut self) -> bool {
        if self.initiators.len() < MAX_INITIATORS {
            return true;
        }
        let idle = self.initiators.iter().filter(|(_, initiator)| initiator.opened.is_empty());
        let victim = idle.min_by_key(|(_, initiator)| (initiator.is_confirmed, initiator.number));
        let Some(session) = victim.map(|(session, _)| *session) else { return false };
        self.close_lost(
            SessionKey::Initiator(session),
            "evicted for other initiators: it had opened no region",
        );
        true
    }

    /// A guest said something that is no hello: it is there, and hears us.
    pub(super) fn confirm_initiator(&mut self, session: u64) {
        let Some(initiator) =
            self.initiators.get_mut(&session).filter(|initiator| !initiator.is_confirmed)
        else {
            return;
        };
        initiator.is_confirmed = true;
        let (number, from, connection_id) =
            (initiator.number, initiator.identity, initiator.connection_id);
        let label = initiator.label.clone();
        self.report(RailEvent::SessionOpened { session, from, connection_id, label });
        // It lost us, and we did not notice.
        let earlier = self.initiators.iter().find(|(_, initiator)| {
            (initiator.identity, initiator.connection_id) == (from, connection_id)
                && initiator.number < number
        });
        if let Some(earlier) = earlier.map(|(session, _)| *session) {
            self.close_lost(SessionKey::Initiator(earlier), "it opened a newer session");
        }
    }

    fn send_welcome(&mut self, session: u64) {
        self.send_message(
            SessionKey::Initiator(session),
            &Message::Welcome { credit_limit: NOTICE_WINDOW },
        );
    }

    /// A session with a guest ends.
    pub(super) fn close_initiator(&mut self, session: u64, close_reason: CloseReason, cause: &str) {
        let Some(initiator) = self.initiators.remove(&session) else { return };
        tracing::debug!(label = initiator.label, cause, "session with an initiator closed");
        let is_lost = close_reason != CloseReason::Bye;
        let until =
            Instant::now() + if is_lost { QUARANTINE_AFTER_LOSS } else { QUARANTINE_AFTER_BYE };
        self.drop_queued(SessionKey::Initiator(session));
        for region in &initiator.opened {
            let quarantined_regions =
                self.quarantined_regions.entry(*region).or_insert((until, None));
            quarantined_regions.0 = until.max(quarantined_regions.0);
            if let Some(retiring) = self.retiring.get(region) {
                quarantined_regions.1 = Some(retiring.clone());
            }
            self.region_released(*region, session);
        }
        if initiator.is_confirmed {
            self.report(RailEvent::SessionClosed {
                session,
                lost: is_lost.then(|| cause.to_owned()),
            });
        }
        if let Some((buffer, memory)) = initiator.staging {
            if self.quarantined_slots.len() >= MAX_QUARANTINED_SLOTS {
                let oldest = self.quarantined_slots.pop_front();
                self.release_worker.release(oldest);
            }
            self.quarantined_slots.push_back((until, (memory, buffer)));
        }
        self.release_address(initiator.session.peer);
    }

    pub(super) fn check_initiators(&mut self, now: Instant) {
        if self.quarantined_slots.iter().any(|(until, _)| now >= *until) {
            let (stays, goes): (VecDeque<_>, VecDeque<_>) =
                self.quarantined_slots.drain(..).partition(|(until, _)| now < *until);
            self.quarantined_slots = stays;
            self.release_worker.release(goes);
        }
        let goes: Vec<_> =
            self.quarantined_regions.extract_if(|_, (until, _)| now >= *until).collect();
        if !goes.is_empty() {
            self.release_worker.release(goes);
        }
        let with_withdrawals = self
            .initiators
            .iter()
            .filter(|(_, initiator)| !initiator.unsent_withdrawals.is_empty());
        let with_withdrawals: Vec<_> = with_withdrawals.map(|(session, _)| *session).collect();
        with_withdrawals.into_iter().for_each(|session| self.send_withdrawals(session));
    }

    fn staging(&mut self, session: u64) -> Result<Vec<u8>> {
        let operation = "give staging memory";
        let of_fabric = |error| Error::of_fabric(operation, error);
        let initiator = self.initiators.get(&session);
        if let Some((_, memory)) = initiator.and_then(|initiator| initiator.staging.as_ref()) {
            return Ok(memory.describe().map_err(of_fabric)?.encode());
        }
        // Memory is for those that were given a region's ticket, and they are given it whoever else is
        // there.
        if initiator.is_none_or(|initiator| initiator.opened.is_empty()) {
            let detail = "it has opened no region that it could stage for";
            return Err(Error::new(operation, ErrorKind::Denied, detail));
        }
        let identity = initiator.map(|initiator| initiator.identity);
        let is_staging = |initiator: &&Initiator| {
            initiator.staging.is_some() && Some(initiator.identity) == identity
        };
        if self.initiators.values().filter(is_staging).count() >= MAX_STAGING_SESSIONS {
            let detail =
                format!("{MAX_STAGING_SESSIONS} of its sessions have staging memory already");
            return Err(Error::new(operation, ErrorKind::TooMany, detail));
        }
        let buffer = HostBuffer::new(SLOT_LENGTH * u64::from(SLOT_COUNT))?;
        let memory = self.register_slots(&buffer, Some(Rights::ALL))?;
        let described = memory.describe().map_err(of_fabric)?.encode();
        if let Some(initiator) = self.initiators.get_mut(&session) {
            initiator.staging = Some((buffer, memory));
        }
        Ok(described)
    }

    // ------------------------------------------------------------------- notices

    fn take_notice(&mut self, session: u64, notice: Notice) {
        let Some(initiator) = self.initiators.get_mut(&session) else { return };
        if initiator.received >= initiator.notices_taken + NOTICE_WINDOW {
            return self.close_lost(
                SessionKey::Initiator(session),
                "it sent more notices than its credit allows",
            );
        }
        initiator.received += 1;
        let from = initiator.identity;
        self.report(RailEvent::Notice { session, from, notice });
        self.send_notice_credit(session);
    }

    fn send_notice_credit(&mut self, session: u64) {
        let Some(initiator) = self.initiators.get(&session) else { return };
        let message = Message::NoticeCredit {
            notices: initiator.received,
            credit_limit: initiator.notices_taken + NOTICE_WINDOW,
        };
        self.send_message(SessionKey::Initiator(session), &message);
    }

    /// The agent took notices of a guest: there is room for as many more.
    pub(crate) fn notices_taken(&mut self, session: u64, notices: u64) {
        let Some(initiator) = self.initiators.get_mut(&session) else { return };
        initiator.notices_taken += notices;
        self.send_notice_credit(session);
    }

    // ------------------------------------------------------------------- copies for guests

    fn run_staging_job(&mut self, session: u64, chunk: Chunk, is_drain: bool) {
        let begun = self.begin_staging_job(session, chunk, is_drain);
        if let Err(error) = begun {
            let refusal = Some(Refusal::of(&error));
            self.send_message(
                SessionKey::Initiator(session),
                &Message::Done { number: chunk.number, refusal },
            );
        }
    }

    pub(super) fn begin_staging_job(
        &mut self,
        session: u64,
        chunk: Chunk,
        is_drain: bool,
    ) -> Result<()> {
        let operation = if is_drain { "put" } else { "get" };
        let refuse = |kind, cause: &str| Err(Error::new(operation, kind, cause));
        let Some(region) = self.local_target.region(chunk.region, chunk.ticket) else {
            return refuse(ErrorKind::Stale, "the region was withdrawn or never existed");
        };
        let rights = region.descriptor.rights;
        if !(if is_drain { rights.write } else { rights.read }) {
            return refuse(ErrorKind::NotAllowed, "the region's rights do not allow it");
        }
        let end = chunk.offset.checked_add(chunk.length);
        let is_inside = end.is_some_and(|end| end <= region.descriptor.length);
        if !is_inside || chunk.slot >= SLOT_COUNT || chunk.length > SLOT_LENGTH {
            return refuse(ErrorKind::OutOfBounds, "it is not inside of the region, or of a slot");
        }
        let number = self.number();
        let Some(initiator) = self.initiators.get_mut(&session) else { return Ok(()) };
        let Some((buffer, _)) = &initiator.staging else {
            return refuse(ErrorKind::NoPath, "it has no staging memory");
        };
        if initiator.staging_jobs >= MAX_STAGING_JOBS {
            return refuse(ErrorKind::TooMany, "more copies than staging slots");
        }
        let at = u64::from(chunk.slot) * SLOT_LENGTH;
        match &region.buffer {
            Buffer::Host(memory) => {
                let copied = match is_drain {
                    true => memory.copy(chunk.offset, buffer, at, chunk.length),
                    false => buffer.copy(at, memory, chunk.offset, chunk.length),
                };
                copied?;
                let done = Message::Done { number: chunk.number, refusal: None };
                self.send_message(SessionKey::Initiator(session), &done);
            }
            Buffer::Device(memory) => {
                let device = memory.mapped_for();
                let slot = part(&buffer.pinned_for(device)?, at, chunk.length)?;
                let place = part(memory, chunk.offset, chunk.length)?;
                let (to, from) = if is_drain { (&place, &slot) } else { (&slot, &place) };
                self.copies.begin(number, device, to, from)?;
                initiator.staging_jobs += 1;
                self.staging_jobs.insert(
                    number,
                    StagingJob {
                        session,
                        initiator: initiator.number,
                        chunk: chunk.number,
                        region,
                    },
                );
            }
        }
        Ok(())
    }

    pub(super) fn staging_job_done(&mut self, number: u64, outcome: Result<()>) {
        let Some(staging_job) = self.staging_jobs.remove(&number) else { return };
        let StagingJob { session, initiator: of, chunk, region } = staging_job;
        let number = region.descriptor.number;
        drop(region);
        if let Some(initiator) =
            self.initiators.get_mut(&session).filter(|initiator| initiator.number == of)
        {
            initiator.staging_jobs -= 1;
            let refusal = outcome.err().map(|error| Refusal::of(&error));
            self.send_message(
                SessionKey::Initiator(session),
                &Message::Done { number: chunk, refusal },
            );
        }
        self.finish_retiring(number);
    }

    // ------------------------------------------------------------------- regions that go

    pub(super) fn retire(&mut self, region: u64, memory: Option<MemoryRegion>, buffer: Buffer) {
        let sessions =
            self.initiators.iter().filter(|(_, initiator)| initiator.opened.contains(&region));
        let sessions: HashSet<_> = sessions.map(|(session, _)| *session).collect();
        for session in &sessions {
            if let Some(initiator) = self.initiators.get_mut(session) {
                initiator.unsent_withdrawals.push_back(region);
            }
        }
        let told: Vec<_> = sessions.iter().copied().collect();
        let retiring = RetiringRegion { sessions, _memory: memory, _buffer: buffer };
        // Whoever withdraws it does not wait for one that was lost, but the memory is nobody else's.
        if let Some((_, kept)) = self.quarantined_regions.get_mut(&region) {
            *kept = Some(retiring.clone());
        }
        self.retiring.insert(region, retiring);
        told.into_iter().for_each(|session| self.send_withdrawals(session));
        self.finish_retiring(region);
    }

    /// Tells a guest which regions are withdrawn, no more at a time than it hears: thousands may be
    /// at once, and one that is said more than it hears would be lost for that.
    pub(super) fn send_withdrawals(&mut self, session: u64) {
        while let Some(initiator) = self.initiators.get(&session) {
            if initiator.unsent_withdrawals.is_empty()
                || !initiator.session.reliable_window.has_room()
            {
                return;
            }
            let peer = initiator.session.peer;
            let waiting = self.waiting.iter().filter(|waiting| waiting.peer == peer).count();
            if waiting >= MAX_QUEUED_PER_PEER / 2 {
                return;
            }
            let Some(initiator) = self.initiators.get_mut(&session) else { return };
            let Some(region) = initiator.unsent_withdrawals.pop_front() else { return };
            if initiator.opened.contains(&region) {
                self.send_message(SessionKey::Initiator(session), &Message::Withdrawn { region });
            }
        }
    }

    fn region_released(&mut self, region: u64, session: u64) {
        if let Some(retiring) = self.retiring.get_mut(&region) {
            retiring.sessions.remove(&session);
            self.finish_retiring(region);
        }
    }

    /// Lets go of a region that was withdrawn if nobody is at it any more, or else tells who is.
    fn finish_retiring(&mut self, region: u64) {
        let Some(retiring) = self.retiring.get(&region) else { return };
        let mut copied_regions =
            self.staging_jobs.values().map(|staging_job| staging_job.region.descriptor.number);
        let is_copied = copied_regions.any(|number| number == region);
        if !retiring.sessions.is_empty() || is_copied {
            let initiators =
                retiring.sessions.iter().filter_map(|session| self.initiators.get(session));
            let mut labels: Vec<_> = initiators.map(|initiator| initiator.label.clone()).collect();
            if labels.is_empty() {
                labels.push("a staging copy of this agent".to_owned());
            }
            lock(&self.shared.retiring).insert(region, labels);
            return;
        }
        let retiring = self.retiring.remove(&region);
        lock(&self.shared.retiring).insert(region, vec!["the rail".to_owned()]);
        // Not as long as the fabric has it.
        let shared = Arc::clone(&self.shared);
        self.release_worker.run(move || {
            drop(retiring);
            lock(&shared.retiring).remove(&region);
        });
    }

    /// What waits to be sent to one that is gone.
    pub(super) fn drop_queued(&mut self, session_key: SessionKey) {
        self.waiting.retain(|waiting| waiting.to != session_key);
    }
}
