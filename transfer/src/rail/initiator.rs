//! The initiator's side of a rail: puts into regions of peers, and gets from them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fabric::{PostOptions, TransferFlags};

use super::chunks::{ChunkRange, Pipeline, Stage, TransferChunks};
use super::driver::{CHECK_INTERVAL, Driver, SessionKey};
use super::message::{Chunk, Message};
use super::post::Posted;
use super::staging::{SLOT_LENGTH, Slot, Slots, part};
use super::target::POLLING_TIME;
use super::target_replies::withdrawn;
use super::{LocalSide, RailEvent, RailRequest, RailTransfer};
use crate::error::{Error, ErrorKind, Result};
use crate::notice::Notice;
use crate::operations::Token;
use crate::path::Operation;

/// Maximum length of a one-sided operation, so that transfers are interleaved.
const MAX_CHUNK_LENGTH: u64 = 4 << 20;
/// Maximum of a peer's chunks in flight, and their bytes: enough to fill a wire, and few enough for
/// other messages to get through.
const MAX_IN_FLIGHT_CHUNKS: usize = 48;
const MAX_IN_FLIGHT_BYTES: u64 = 32 << 20;
/// How often a chunk is posted again after connection failures, before the link is closed.
const MAX_POST_ATTEMPTS: u32 = 64;

/// A transfer in flight.
#[derive(Debug)]
pub(super) struct ActiveTransfer {
    pub(super) link: u32,
    pub(super) token: Token,
    notice: Option<Notice>,
    pub(super) bytes: RailTransfer,
    pub(super) chunks: TransferChunks,
    pub(super) failure: Option<Error>,
    /// Why its link was lost. The rest may be rerouted.
    pub(super) lost_cause: Option<String>,
    /// The link was lost: how long to wait for posted chunks.
    pub(super) drain_deadline: Option<Instant>,
}

/// A chunk in flight.
#[derive(Debug)]
pub(super) struct InFlightChunk {
    /// Its transfer, which may be cancelled already.
    of: u64,
    pub(super) link: u32,
    /// The session of its start; the peer may have a newer one.
    pub(super) session: u64,
    part: ChunkRange,
    pub(super) stage: Stage,
    post_attempts: u32,
    local: Option<Slot>,
    remote: Option<u32>,
}

impl Driver {
    // ------------------------------------------------------------------- transfers

    /// One-sided operations do not involve the target's thread, and many providers need it to poll
    /// for progress. So the initiator requests polling during transfers.
    pub(super) fn keep_targets_polling(&mut self) {
        if self.transfers.is_empty() {
            return;
        }
        let now = Instant::now();
        if now < self.next_keep_polling {
            return;
        }
        self.next_keep_polling = now + POLLING_TIME / 2;
        let busy = self.links.iter().filter(|(_, link)| link.in_flight > 0);
        let busy: Vec<_> = busy.map(|(number, _)| *number).collect();
        for link in busy {
            // A peer with queued messages gets no more of them.
            if !self.send_queue.iter().any(|waiting| waiting.to == SessionKey::Link(link)) {
                self.send_message(SessionKey::Link(link), &Message::KeepPolling);
            }
        }
    }

    pub(crate) fn begin_request(&mut self, request: RailRequest) {
        let refuse = |kind, cause: &str| Err(Error::new("transfer", kind, cause));
        let Some(link) = self.links.get_mut(&request.link).filter(|link| link.is_up()) else {
            let cause = "the peer is lost".to_owned();
            return self.report(RailEvent::Returned { request: Box::new(request), cause });
        };
        let RailRequest { link: number, token, notice, bytes } = request;
        let Some(bytes) = bytes else {
            return match notice {
                Some(notice) => {
                    link.unsent.push_back((token, notice));
                    self.send_notices(number);
                }
                None => self.report(RailEvent::Done { token, outcome: Ok(()) }),
            };
        };
        if !link.known_target.wanted.contains_key(&bytes.remote.region) {
            // The agent does not know of the withdrawal yet.
            return self.report(RailEvent::Done { token, outcome: Err(withdrawn()) });
        }
        let pipeline = Pipeline {
            operation: bytes.operation,
            stages_locally: matches!(bytes.local, LocalSide::Device(_)),
            stages_remotely: bytes.remote.memory.is_none(),
        };
        let mut max_length =
            MAX_CHUNK_LENGTH.min(self.domain.capabilities().max_message_size as u64);
        if pipeline.stages_locally {
            max_length = max_length.min(SLOT_LENGTH);
            if let Err(error) = self.ensure_slots() {
                return self.report(RailEvent::Done { token, outcome: Err(error) });
            }
        }
        let link = self.links.get(&number);
        if pipeline.stages_remotely {
            let Some(slots) = link.and_then(|link| link.slots.as_ref()) else {
                let outcome = refuse(ErrorKind::NoPath, "the peer granted no staging memory");
                return self.report(RailEvent::Done { token, outcome });
            };
            max_length = max_length.min(slots.length);
        }
        let mut bytes = bytes;
        let chunks = TransferChunks::new(pipeline, std::mem::take(&mut bytes.blocks), max_length);
        let key = self.next_id();
        let (failure, lost_cause, drain_deadline) = (None, None, None);
        let transfer = ActiveTransfer {
            link: number,
            token,
            notice,
            bytes,
            chunks,
            failure,
            lost_cause,
            drain_deadline,
        };
        let is_over = transfer.chunks.is_over();
        self.transfers.insert(key, transfer);
        if is_over {
            self.end_transfer(key);
        } else {
            self.unstarted.insert(key);
        }
        self.advance();
        self.keep_targets_polling();
    }

    /// Allocates local slots, if there are none: at the first use, or after
    /// [abandoning](Self::abandon_slots) them.
    fn ensure_slots(&mut self) -> Result<()> {
        if self.slots.is_none() {
            let slots = Slots::new(|buffer| self.register_slots(buffer, None))?;
            self.slots = Some(Arc::new(slots));
        }
        Ok(())
    }

    /// Starts chunks for which there is room, and posts those that found none. True if there were
    /// any.
    pub(super) fn advance(&mut self) -> bool {
        let mut has_moved = false;
        for link in self.links.values_mut() {
            link.is_queue_full = false;
        }
        for _ in 0..self.unposted.len() {
            let Some(chunk) = self.unposted.pop_front() else { break };
            has_moved |= self.run_stage(chunk);
        }
        // One chunk of each transfer in turn, the oldest first, so that no transfer starves.
        let mut keys: Vec<_> =
            self.unstarted.iter().copied().take(2 * MAX_IN_FLIGHT_CHUNKS).collect();
        while !keys.is_empty() {
            keys.retain(|key| self.begin_chunk(*key));
            has_moved |= !keys.is_empty();
        }
        has_moved
    }

    fn begin_chunk(&mut self, key: u64) -> bool {
        let Some(transfer) = self.transfers.get(&key).filter(|transfer| transfer.chunks.has_more())
        else {
            self.unstarted.remove(&key);
            return false;
        };
        let (pipeline, number) = (transfer.chunks.pipeline, transfer.link);
        if pipeline.stages_locally
            && let Err(error) = self.ensure_slots()
        {
            self.fail_transfer(key, error);
            return false;
        }
        let Some(link) = self.links.get_mut(&number) else { return false };
        let has_room = !link.is_queue_full
            && link.in_flight < MAX_IN_FLIGHT_CHUNKS
            && (link.bytes < MAX_IN_FLIGHT_BYTES);
        let has_local_slot =
            !pipeline.stages_locally || self.slots.as_ref().is_some_and(|slots| slots.has_free());
        let has_remote_slot = !pipeline.stages_remotely
            || link.slots.as_ref().is_some_and(|slots| !slots.free.is_empty());
        if !(has_room && has_local_slot && has_remote_slot) {
            return false;
        }
        let begun = self.transfers.get_mut(&key).and_then(|transfer| transfer.chunks.begin());
        let Some(part) = begun else { return false };
        let local = self.slots.as_ref().filter(|_| pipeline.stages_locally).and_then(Slot::take);
        let remote = link.slots.as_mut().filter(|_| pipeline.stages_remotely);
        let remote = remote.and_then(|slots| slots.free.pop());
        link.in_flight += 1;
        link.bytes += part.length;
        let (stage, session) = (pipeline.first(), link.session.id);
        let chunk = self.next_id();
        let in_flight = InFlightChunk {
            of: key,
            link: number,
            session,
            part,
            stage,
            post_attempts: 0,
            local,
            remote,
        };
        self.in_flight.insert(chunk, in_flight);
        self.run_stage(chunk);
        true
    }

    /// Runs the stage of a chunk. False if the provider's queue was full.
    fn run_stage(&mut self, chunk: u64) -> bool {
        match self.try_run_stage(chunk) {
            Ok(true) => true,
            Ok(false) => {
                self.unposted.push_back(chunk);
                let link = self.in_flight.get(&chunk).map(|in_flight| in_flight.link);
                if let Some(link) = link.and_then(|link| self.links.get_mut(&link)) {
                    link.is_queue_full = true;
                }
                false
            }
            Err(error) => {
                self.stage_done(chunk, Err(error));
                true
            }
        }
    }

    fn try_run_stage(&mut self, chunk: u64) -> Result<bool> {
        let lost_error = || Error::new("transfer", ErrorKind::Closed, "the peer is lost");
        let in_flight = self.in_flight.get(&chunk).ok_or_else(lost_error)?;
        let transfer = self.transfers.get(&in_flight.of).ok_or_else(lost_error)?;
        // Copies on this side continue without the link.
        let link =
            self.links.get(&in_flight.link).filter(|link| link.session.id == in_flight.session);
        let ChunkRange { local, remote, length } = in_flight.part;
        match in_flight.stage {
            Stage::FillSlot | Stage::DrainSlot => {
                let (LocalSide::Device(memory), Some(slot)) =
                    (&transfer.bytes.local, &in_flight.local)
                else {
                    return Err(lost_error());
                };
                let device = memory.mapped_for();
                let slot = slot.pinned(length, device)?;
                let memory = part(memory, local, length)?;
                let (to, from) = match in_flight.stage {
                    Stage::FillSlot => (&slot, &memory),
                    _ => (&memory, &slot),
                };
                self.copies.begin(chunk, device, to, from)?;
                Ok(true)
            }
            Stage::RequestFill | Stage::RequestDrain => {
                let request = Chunk {
                    number: chunk,
                    region: transfer.bytes.remote.region,
                    ticket: transfer.bytes.remote.ticket,
                    slot: in_flight.remote.unwrap_or_default(),
                    offset: remote,
                    length,
                };
                let number = in_flight.link;
                let message = match in_flight.stage {
                    Stage::RequestFill => Message::RequestFill(request),
                    _ => Message::RequestDrain(request),
                };
                self.send_message(SessionKey::Link(number), &message);
                Ok(true)
            }
            Stage::Write | Stage::Read => {
                let link = link.ok_or_else(lost_error)?;
                let operation = transfer.bytes.operation;
                let name = if operation == Operation::Put { "put" } else { "get" };
                let of_fabric = |error| Error::of_fabric(name, error);
                let local = match (&transfer.bytes.local, &in_flight.local) {
                    (LocalSide::Registered(region), _) => {
                        region.slice(local as usize..(local + length) as usize)
                    }
                    (LocalSide::Device(_), Some(slot)) => slot.registered(length),
                    (LocalSide::Device(_), None) => return Err(lost_error()),
                };
                let remote = match (&transfer.bytes.remote.memory, in_flight.remote, &link.slots) {
                    (Some(memory), ..) => memory.slice(remote..remote + length),
                    (None, Some(slot), Some(slots)) => {
                        let start = u64::from(slot) * slots.length;
                        slots.memory.slice(start..start + length)
                    }
                    _ => return Err(lost_error()),
                };
                let (local, remote) = (local.map_err(of_fabric)?, remote.map_err(of_fabric)?);
                let (peer, stage) = (link.session.peer, in_flight.stage);
                let token = self.record_post(Posted::Data(chunk, peer));
                let options = PostOptions::token(token).timeout(Duration::ZERO);
                let (endpoint, queue) = (&mut self.endpoint, &mut self.queue);
                let posted = match stage {
                    // Later messages rely on the data being visible at the target.
                    Stage::Write => {
                        let options = options.flags(TransferFlags::DELIVERY_COMPLETE);
                        endpoint.write(queue, peer, &local, &remote, options)
                    }
                    _ => endpoint.read(queue, peer, &local, &remote, options),
                };
                match posted {
                    Ok(_) => Ok(true),
                    Err(error) => {
                        self.take_posted(token);
                        match error.kind() {
                            fabric::ErrorKind::WouldBlock => Ok(false),
                            _ => Err(of_fabric(error)),
                        }
                    }
                }
            }
        }
    }

    /// A chunk completed a stage.
    pub(super) fn stage_done(&mut self, chunk: u64, outcome: Result<()>) {
        let Some(in_flight) = self.in_flight.get_mut(&chunk) else { return };
        let (of, stage) = (in_flight.of, in_flight.stage);
        let link = self.links.get_mut(&in_flight.link);
        let mut link = link.filter(|link| link.session.id == in_flight.session);
        let transfer = self.transfers.get_mut(&of).filter(|transfer| transfer.failure.is_none());
        let Some(transfer) = transfer else { return self.end_chunk(chunk) };
        match outcome {
            Ok(()) => {
                if let Some(link) = &mut link {
                    link.session.keepalive.data_moved();
                }
                match transfer.chunks.pipeline.after(stage) {
                    None => self.end_chunk(chunk),
                    // Without the peer only copies of local devices continue.
                    Some(next) if link.is_some() || next == Stage::DrainSlot => {
                        in_flight.stage = next;
                        in_flight.post_attempts = 0;
                        self.run_stage(chunk);
                    }
                    Some(_) => self.return_chunk(chunk),
                }
            }
            // The provider has dropped it, maybe half done. It is repeated with the same bytes, and
            // the transfer waits for that.
            Err(error)
                if matches!(stage, Stage::Write | Stage::Read)
                    && matches!(error.kind(), ErrorKind::Closed | ErrorKind::DeadlineExceeded) =>
            {
                in_flight.post_attempts += 1;
                match link {
                    Some(_) if in_flight.post_attempts < MAX_POST_ATTEMPTS => {
                        self.repost_later.push((Instant::now() + CHECK_INTERVAL, chunk));
                    }
                    // This rail does not carry it; another one may.
                    Some(_) => {
                        let session_key = SessionKey::Link(in_flight.link);
                        self.repost_later.push((Instant::now(), chunk));
                        self.close_lost(
                            session_key,
                            &format!("posted operations fail repeatedly: {error}"),
                        );
                    }
                    None => self.return_chunk(chunk),
                }
            }
            Err(error) => self.fail_chunk(chunk, error),
        }
    }

    /// Fails a chunk and its transfer.
    pub(super) fn fail_chunk(&mut self, chunk: u64, error: Error) {
        if let Some(of) = self.in_flight.get(&chunk).map(|in_flight| in_flight.of) {
            self.fail_transfer(of, error);
        }
        self.end_chunk(chunk);
    }

    /// Fails a transfer. It ends when its chunks in flight end.
    fn fail_transfer(&mut self, key: u64, error: Error) {
        let Some(transfer) = self.transfers.get_mut(&key) else { return };
        transfer.chunks.cancel();
        transfer.failure.get_or_insert(error);
        if transfer.chunks.is_over() {
            self.end_transfer(key);
        }
    }

    /// Returns a chunk of a lost peer that is neither copied nor in flight.
    pub(super) fn return_chunk(&mut self, chunk: u64) {
        let in_flight = self.in_flight.get(&chunk).map(|in_flight| (in_flight.of, in_flight.part));
        if let Some((of, part)) = in_flight
            && let Some(transfer) = self.transfers.get_mut(&of)
        {
            transfer.chunks.give_back(part);
        }
        self.end_chunk(chunk);
    }

    /// Posts failed chunks again after a pause.
    pub(super) fn repost_due(&mut self, now: Instant) {
        let unposted = &mut self.unposted;
        self.repost_later.retain(|(until, chunk)| {
            let is_waiting = now < *until;
            if !is_waiting {
                unposted.push_back(*chunk);
            }
            is_waiting
        });
    }

    /// Ends a chunk: frees its slots, and ends the transfer with its last chunk.
    pub(super) fn end_chunk(&mut self, chunk: u64) {
        let Some(in_flight) = self.in_flight.remove(&chunk) else { return };
        if self.closing_sessions.contains_key(&in_flight.session) {
            self.send_bye_when_idle(in_flight.session);
        }
        let link = self.links.get_mut(&in_flight.link);
        if let Some(link) = link.filter(|link| link.session.id == in_flight.session) {
            link.in_flight -= 1;
            link.bytes -= in_flight.part.length;
            if let (Some(slot), Some(slots)) = (in_flight.remote, &mut link.slots) {
                slots.free.push(slot);
            }
        }
        let Some(transfer) = self.transfers.get_mut(&in_flight.of) else { return };
        transfer.chunks.end();
        if transfer.chunks.is_over() {
            self.end_transfer(in_flight.of);
        }
    }

    /// Abandons the local slots if a lost peer has chunks in them: the queue keeps their memory.
    /// The next chunk allocates new slots.
    pub(super) fn abandon_slots(&mut self, link: u32) {
        let Some(slots) = &self.slots else { return };
        let holds = |slot: &Slot| Arc::ptr_eq(&slot.of, slots);
        let mut parts = self.in_flight.values().filter(|in_flight| in_flight.link == link);
        if parts.any(|in_flight| in_flight.local.as_ref().is_some_and(holds)) {
            // Chunks of other peers in these slots continue.
            self.slots = None;
        }
    }

    /// Ends completed transfers.
    pub(super) fn end_transfers(&mut self) {
        let over = self.transfers.iter().filter(|(_, transfer)| transfer.chunks.is_over());
        let over: Vec<_> = over.map(|(key, _)| *key).collect();
        for key in over {
            self.end_transfer(key);
        }
    }

    fn end_transfer(&mut self, key: u64) {
        self.unstarted.remove(&key);
        let Some(transfer) = self.transfers.remove(&key) else { return };
        let ActiveTransfer {
            link: number,
            token,
            notice,
            mut bytes,
            mut chunks,
            failure,
            lost_cause,
            ..
        } = transfer;
        let region = bytes.remote.region;
        bytes.blocks = chunks.take_rest();
        let is_all = bytes.blocks.is_empty();
        match (failure, notice) {
            (Some(error), _) => self.report(RailEvent::Done { token, outcome: Err(error) }),
            (None, None) if is_all => self.report(RailEvent::Done { token, outcome: Ok(()) }),
            (None, notice) => match (lost_cause, self.links.get_mut(&number), notice) {
                (None, Some(link), Some(notice)) => {
                    link.unsent.push_back((token, notice));
                    self.send_notices(number);
                }
                (cause, _, notice) => {
                    let cause = cause.unwrap_or_else(|| "the peer is lost".to_owned());
                    let bytes = (!is_all).then_some(bytes);
                    let request = Box::new(RailRequest { link: number, token, notice, bytes });
                    self.report(RailEvent::Returned { request, cause });
                }
            },
        }
        self.release_region(number, region);
    }

    /// Sends notices as long as there is credit.
    pub(super) fn send_notices(&mut self, number: u32) {
        while let Some(link) = self.links.get_mut(&number) {
            if link.sent >= link.credit_limit {
                return;
            }
            let Some((token, notice)) = link.unsent.pop_front() else { return };
            let message = Message::Notice(notice);
            link.sent += 1;
            link.unacknowledged.push_back(token);
            self.send_message(SessionKey::Link(number), &message);
        }
    }
}
