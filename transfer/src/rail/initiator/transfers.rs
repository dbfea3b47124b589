//! Transfers of an initiator: puts into regions of peers, and gets from them.

use std::collections::HashSet;
use std::collections::btree_map::Entry;
use std::time::Instant;

use super::chunk_window::MAX_IN_FLIGHT_CHUNKS;
use super::chunks::{Stage, TransferChunks};
use super::target_replies::withdrawn;
use super::{ChunkRange, InFlightChunk, InitiatorRole, Link, Pipeline};
use crate::device_memory::{device_memory, flush};
use crate::error::{Context, Error, ErrorKind, Result};
use crate::notice::Notice;
use crate::operations::Token;
use crate::path::Operation;
use crate::rail::io::RailIo;
use crate::rail::message::Message;
use crate::rail::session::{CHECK_INTERVAL, CloseReason};
use crate::rail::staging::{SLOT_LENGTH, part};
use crate::rail::target::POLLING_TIME;
use crate::rail::{Chunk, LocalSide, RAIL_TIMEOUT, RailEvent, RailRequest, RailTransfer};

/// Maximum length of a one-sided operation, so that transfers are interleaved.
const MAX_CHUNK_LENGTH: u64 = 4 << 20;
/// How often a chunk is posted again after connection failures, before the link is closed.
const MAX_POST_ATTEMPTS: u32 = 64;

#[derive(Debug)]
pub(super) struct ActiveTransfer {
    link: u32,
    token: Token,
    notice: Option<Notice>,
    bytes: RailTransfer,
    chunks: TransferChunks,
    failure: Option<Error>,
    /// Why its link was lost. The rest may be rerouted.
    lost_cause: Option<String>,
    /// The link was lost: how long to wait for posted chunks.
    drain_deadline: Option<Instant>,
}

impl ActiveTransfer {
    fn uses(&self, link: u32, region: u64) -> bool {
        self.link == link && self.bytes.remote.region == region
    }

    /// Makes bytes that the fabric wrote to local device memory visible, before they are reported.
    fn flush(&self) -> Result<()> {
        let pipeline = self.chunks.pipeline();
        if pipeline.operation != Operation::Get || pipeline.stages_locally {
            return Ok(());
        }
        match device_memory(&self.bytes.region.buffer) {
            Some((memory, _)) => flush(memory.mapped_for()).during("get"),
            None => Ok(()),
        }
    }
}

impl Link {
    /// Sends notices as long as there is credit.
    pub(super) fn send_notices(&mut self, io: &mut RailIo) {
        while !io.is_lost(self.session.key())
            && let Some(notice) = self.notices.next()
        {
            io.send_message(&mut self.session, &Message::Notice(notice));
        }
    }
}

impl InitiatorRole {
    // ------------------------------------------------------------------- transfers

    /// One-sided operations do not involve the target's thread, and many providers need it to poll
    /// for progress. So the initiator requests polling during transfers.
    pub(in crate::rail) fn keep_targets_polling(&mut self, io: &mut RailIo) {
        if self.transfers.is_empty() {
            return;
        }
        let now = Instant::now();
        if self.next_keep_polling.is_some_and(|next| now < next) {
            return;
        }
        self.next_keep_polling = Some(now + POLLING_TIME / 2);
        for link in self.links.values_mut().filter(|link| !link.chunks.is_empty()) {
            // A peer with queued messages gets no more of them.
            if !io.is_queued(link.session.key()) {
                io.send_message(&mut link.session, &Message::KeepPolling);
            }
        }
    }

    pub(in crate::rail) fn begin_request(&mut self, io: &mut RailIo, request: RailRequest) {
        let Some(link) = self.links.get_mut(&request.link).filter(|link| link.is_up()) else {
            let cause = "the peer is lost".to_owned();
            return io.report(RailEvent::Returned { request: Box::new(request), cause });
        };
        let RailRequest { link: number, token, notice, bytes } = request;
        let Some(mut bytes) = bytes else {
            return match notice {
                Some(notice) => {
                    link.notices.push(token, notice);
                    link.send_notices(io);
                }
                None => io.report_done(token, Ok(())),
            };
        };
        if !link.known_target.wanted.contains_key(&bytes.remote.region) {
            // The agent does not know of the withdrawal yet.
            return io.report_done(token, Err(withdrawn()));
        }
        let pipeline = Pipeline {
            operation: bytes.operation,
            stages_locally: matches!(bytes.local, LocalSide::Device(_)),
            stages_remotely: bytes.remote.memory.is_none(),
        };
        let mut max_length = MAX_CHUNK_LENGTH.min(io.capabilities().max_message_size as u64);
        if pipeline.stages_locally {
            max_length = max_length.min(SLOT_LENGTH);
            if let Err(error) = io.ensure_slots() {
                return io.report_done(token, Err(error));
            }
        }
        if pipeline.stages_remotely {
            let Some(slot_length) = link.chunks.slot_length() else {
                let detail = "the peer granted no staging memory";
                let error = Error::new("transfer", ErrorKind::NoPath, detail);
                return io.report_done(token, Err(error));
            };
            max_length = max_length.min(slot_length);
        }
        let chunks = TransferChunks::new(pipeline, std::mem::take(&mut bytes.blocks), max_length);
        let key = io.next_id();
        let transfer = ActiveTransfer {
            link: number,
            token,
            notice,
            bytes,
            chunks,
            failure: None,
            lost_cause: None,
            drain_deadline: None,
        };
        self.transfers.insert(key, transfer);
        self.unstarted.insert(key);
        self.end_if_over(io, key);
        self.advance(io);
        self.keep_targets_polling(io);
    }

    /// Starts chunks for which there is room, and posts those that found none. True if there were
    /// any.
    pub(in crate::rail) fn advance(&mut self, io: &mut RailIo) -> bool {
        let mut has_moved = self.advance_probes(io);
        for link in self.links.values_mut() {
            link.chunks.set_queue_full(false);
        }
        for _ in 0..self.unposted.len() {
            let Some(chunk) = self.unposted.pop_front() else { break };
            has_moved |= self.run_stage(io, chunk);
        }
        // One chunk of each transfer in turn, the oldest first, so that no transfer starves.
        let mut keys: Vec<_> =
            self.unstarted.iter().copied().take(2 * MAX_IN_FLIGHT_CHUNKS).collect();
        while !keys.is_empty() {
            keys.retain(|key| self.begin_chunk(io, *key));
            has_moved |= !keys.is_empty();
        }
        has_moved
    }

    fn begin_chunk(&mut self, io: &mut RailIo, key: u64) -> bool {
        let Some(transfer) = self.transfers.get(&key).filter(|transfer| transfer.chunks.has_more())
        else {
            self.unstarted.remove(&key);
            return false;
        };
        let (pipeline, number) = (transfer.chunks.pipeline(), transfer.link);
        if pipeline.stages_locally
            && let Err(error) = io.ensure_slots()
        {
            self.fail_transfer(io, key, error);
            return false;
        }
        let Some(link) = self.links.get_mut(&number) else { return false };
        if !link.chunks.has_room(pipeline.stages_remotely)
            || pipeline.stages_locally && !io.staging().has_free_slot()
            || io.is_lost(link.session.key())
        {
            return false;
        }
        let begun = self.transfers.get_mut(&key).and_then(|transfer| transfer.chunks.begin());
        let Some(part) = begun else { return false };
        let local = if pipeline.stages_locally { io.staging().take_slot() } else { None };
        let remote = link.chunks.begin(part.length, pipeline.stages_remotely);
        let (stage, session) = (pipeline.first(), link.session.id());
        let chunk = io.next_id();
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
        self.run_stage(io, chunk);
        true
    }

    /// Runs the stage of a chunk. False if the provider's queue was full.
    fn run_stage(&mut self, io: &mut RailIo, chunk: u64) -> bool {
        match self.try_run_stage(io, chunk) {
            Ok(true) => true,
            Ok(false) => {
                self.unposted.push_back(chunk);
                let link = self.in_flight.get(&chunk).map(|in_flight| in_flight.link);
                if let Some(link) = link.and_then(|link| self.links.get_mut(&link)) {
                    link.chunks.set_queue_full(true);
                }
                false
            }
            Err(error) => {
                self.stage_done(io, chunk, Err(error));
                true
            }
        }
    }

    fn try_run_stage(&mut self, io: &mut RailIo, chunk: u64) -> Result<bool> {
        let lost_error = || Error::new("transfer", ErrorKind::Closed, "the peer is lost");
        let in_flight = self.in_flight.get(&chunk).ok_or_else(lost_error)?;
        let transfer = self.transfers.get(&in_flight.of).ok_or_else(lost_error)?;
        let link = self.links.get_mut(&in_flight.link);
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
                io.staging().begin_copy(chunk, device, to, from)?;
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
                let message = match in_flight.stage {
                    Stage::RequestFill => Message::RequestFill(request),
                    _ => Message::RequestDrain(request),
                };
                if let Some(link) = link {
                    io.send_message(&mut link.session, &message);
                }
                Ok(true)
            }
            Stage::Write | Stage::Read => {
                let link = link.filter(|link| link.session.id() == in_flight.session);
                let link = link.filter(|link| !io.is_lost(link.session.key()));
                let link = link.ok_or_else(lost_error)?;
                let operation = transfer.bytes.operation;
                let name = operation.name();
                let local = match (&transfer.bytes.local, &in_flight.local) {
                    (LocalSide::Registered(region), _) => {
                        region.slice(local as usize..(local + length) as usize)
                    }
                    (LocalSide::Device(_), Some(slot)) => slot.registered(length),
                    (LocalSide::Device(_), None) => return Err(lost_error()),
                };
                let remote = match (&transfer.bytes.remote.memory, in_flight.remote) {
                    (Some(memory), _) => Some(memory.slice(remote..remote + length)),
                    (None, slot) => slot.and_then(|slot| link.chunks.slot(slot, length)),
                };
                let remote = remote.ok_or_else(lost_error)?;
                let (local, remote) = (local.during(name)?, remote.during(name)?);
                let peer = link.session.peer();
                io.post_data(operation, chunk, peer, &local, &remote).during(name)
            }
        }
    }

    pub(in crate::rail) fn stage_done(&mut self, io: &mut RailIo, chunk: u64, outcome: Result<()>) {
        if let Some(session) = self.probe_chunk_done(io, chunk, &outcome) {
            if self.closing_sessions.contains_key(&session) {
                self.send_bye_when_idle(io, session);
            }
            return;
        }
        let Some(in_flight) = self.in_flight.get_mut(&chunk) else { return };
        let (of, stage) = (in_flight.of, in_flight.stage);
        let link = self.links.get_mut(&in_flight.link);
        let mut link = link.filter(|link| link.session.id() == in_flight.session);
        let transfer = self.transfers.get_mut(&of).filter(|transfer| transfer.failure.is_none());
        let Some(transfer) = transfer else { return self.end_chunk(io, chunk) };
        match outcome {
            Ok(()) => {
                if let Some(link) = &mut link {
                    link.session.data_moved();
                }
                match transfer.chunks.pipeline().after(stage) {
                    None => self.end_chunk(io, chunk),
                    // Without the peer only copies of local devices continue.
                    Some(next) if link.is_some() || next == Stage::DrainSlot => {
                        in_flight.stage = next;
                        in_flight.post_attempts = 0;
                        self.run_stage(io, chunk);
                    }
                    Some(_) => self.return_chunk(io, chunk),
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
                        let number = in_flight.link;
                        self.repost_later.push((Instant::now(), chunk));
                        let cause = format!("posted operations fail repeatedly: {error}");
                        self.end_link(io, number, CloseReason::Lost, &cause);
                    }
                    None => self.return_chunk(io, chunk),
                }
            }
            Err(error) => self.fail_chunk(io, chunk, error),
        }
    }

    /// Fails a chunk and its transfer.
    fn fail_chunk(&mut self, io: &mut RailIo, chunk: u64, error: Error) {
        if let Some(of) = self.in_flight.get(&chunk).map(|in_flight| in_flight.of) {
            self.fail_transfer(io, of, error);
        }
        self.end_chunk(io, chunk);
    }

    /// Fails a transfer. It ends when its chunks in flight end.
    fn fail_transfer(&mut self, io: &mut RailIo, key: u64, error: Error) {
        let Some(transfer) = self.transfers.get_mut(&key) else { return };
        transfer.chunks.cancel();
        transfer.failure.get_or_insert(error);
        self.end_if_over(io, key);
    }

    /// Returns a chunk of a lost peer that is neither copied nor in flight.
    fn return_chunk(&mut self, io: &mut RailIo, chunk: u64) {
        if let Some(in_flight) = self.in_flight.get(&chunk)
            && let Some(transfer) = self.transfers.get_mut(&in_flight.of)
        {
            transfer.chunks.give_back(in_flight.part);
        }
        self.end_chunk(io, chunk);
    }

    /// Posts failed chunks again after a pause.
    pub(in crate::rail) fn repost_due(&mut self, now: Instant) {
        let due = self.repost_later.extract_if(.., |(until, _)| now >= *until);
        self.unposted.extend(due.map(|(_, chunk)| chunk));
    }

    /// Ends a chunk: frees its slots, and ends the transfer with its last chunk.
    fn end_chunk(&mut self, io: &mut RailIo, chunk: u64) {
        let Some(in_flight) = self.in_flight.remove(&chunk) else { return };
        if self.closing_sessions.contains_key(&in_flight.session) {
            self.send_bye_when_idle(io, in_flight.session);
        }
        let link = self.links.get_mut(&in_flight.link);
        if let Some(link) = link.filter(|link| link.session.id() == in_flight.session) {
            link.chunks.end(in_flight.part.length, in_flight.remote);
        }
        let Some(transfer) = self.transfers.get_mut(&in_flight.of) else { return };
        transfer.chunks.end();
        self.end_if_over(io, in_flight.of);
    }

    /// Abandons the local slots if a lost peer has chunks in them: the queue keeps their memory.
    /// The next chunk allocates new slots.
    pub(super) fn abandon_slots(&self, io: &mut RailIo, link: u32) {
        let lost = self.in_flight.values().filter(|in_flight| in_flight.link == link);
        // Chunks of other peers in these slots continue.
        io.staging().abandon_slots(lost.filter_map(|in_flight| in_flight.local.as_ref()));
    }

    /// Ends completed transfers.
    pub(super) fn end_transfers(&mut self, io: &mut RailIo) {
        for key in self.transfers.keys().copied().collect::<Vec<_>>() {
            self.end_if_over(io, key);
        }
    }

    fn end_if_over(&mut self, io: &mut RailIo, key: u64) {
        let Entry::Occupied(transfer) = self.transfers.entry(key) else { return };
        if !transfer.get().chunks.is_over() {
            return;
        }
        self.unstarted.remove(&key);
        let mut transfer = transfer.remove();
        if let Err(error) = transfer.flush() {
            transfer.failure.get_or_insert(error);
        }
        let ActiveTransfer { link: number, token, notice, failure, lost_cause, .. } = transfer;
        let (mut bytes, mut chunks) = (transfer.bytes, transfer.chunks);
        let region = bytes.remote.region;
        bytes.blocks = chunks.take_rest();
        let is_all = bytes.blocks.is_empty();
        match (failure, notice) {
            (Some(error), _) => io.report_done(token, Err(error)),
            (None, None) if is_all => io.report_done(token, Ok(())),
            (None, notice) => match (lost_cause, self.links.get_mut(&number), notice) {
                (None, Some(link), Some(notice)) => {
                    link.notices.push(token, notice);
                    link.send_notices(io);
                }
                (cause, _, notice) => {
                    let cause = cause.unwrap_or_else(|| "the peer is lost".to_owned());
                    let bytes = (!is_all).then_some(bytes);
                    let request = Box::new(RailRequest { link: number, token, notice, bytes });
                    io.report(RailEvent::Returned { request, cause });
                }
            },
        }
        self.release_region(io, number, region);
    }

    /// The target has copied a chunk between its slot and its region, or refuses it.
    pub(super) fn peer_done(
        &mut self,
        io: &mut RailIo,
        (session, chunk): (u64, u64),
        outcome: Result<()>,
    ) {
        let is_pending = self.in_flight.get(&chunk).is_some_and(|in_flight| {
            in_flight.session == session
                && matches!(in_flight.stage, Stage::RequestFill | Stage::RequestDrain)
        });
        if is_pending {
            self.stage_done(io, chunk, outcome);
        }
    }

    /// Fails the transfers of a withdrawn region.
    pub(super) fn fail_transfers_with(&mut self, io: &mut RailIo, number: u32, region: u64) {
        for transfer in self.transfers.values_mut().filter(|it| it.uses(number, region)) {
            transfer.chunks.cancel();
            transfer.failure.get_or_insert_with(withdrawn);
        }
        self.end_transfers(io);
    }

    pub(super) fn has_transfers_with(&self, number: u32, region: u64) -> bool {
        self.transfers.values().any(|transfer| transfer.uses(number, region))
    }

    // ------------------------------------------------------------------- the thread

    pub(in crate::rail) fn has_transfers(&self) -> bool {
        !self.transfers.is_empty()
    }

    /// Have chunks found the provider's queue full?
    pub(in crate::rail) fn has_unposted(&self) -> bool {
        !self.unposted.is_empty()
    }

    pub(in crate::rail) fn session_of(&self, chunk: u64) -> Option<u64> {
        let transfer = self.in_flight.get(&chunk).map(|in_flight| in_flight.session);
        transfer.or_else(|| self.direct.session_of(chunk))
    }

    /// Posts nothing more.
    pub(in crate::rail) fn stop(&mut self) {
        self.unstarted.clear();
        self.unposted.clear();
    }

    /// Fails all transfers: the rail ends.
    pub(in crate::rail) fn fail_transfers(&mut self, io: &RailIo, cause: &str) {
        for (_, transfer) in std::mem::take(&mut self.transfers) {
            let error = Error::new("transfer", ErrorKind::Closed, cause);
            io.report_done(transfer.token, Err(error));
        }
    }

    // ------------------------------------------------------------------- lost links

    /// Returns or fails the transfers of a closed link. Posted operations and device copies may
    /// still access the memory, so the transfer ends with them. Chunks that waited for the peer or
    /// were not posted end now. The rest may be rerouted.
    pub(super) fn return_transfers(
        &mut self,
        io: &mut RailIo,
        number: u32,
        close_reason: CloseReason,
        cause: &str,
    ) {
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
        let over = self.in_flight.iter().filter(|(key, in_flight)| {
            in_flight.link == number
                && (matches!(in_flight.stage, Stage::RequestFill | Stage::RequestDrain)
                    || unposted.contains(key)
                    || repost_later.contains(key))
        });
        let over: Vec<_> = over.map(|(key, in_flight)| (*key, in_flight.stage)).collect();
        for (key, stage) in over {
            self.unposted.retain(|other| *other != key);
            self.repost_later.retain(|(_, other)| *other != key);
            match stage {
                // The peer may still copy from its slot later, when this transfer is forgotten.
                Stage::RequestDrain => {
                    let detail = format!("{cause}; whether the data arrived is unknown");
                    self.fail_chunk(io, key, Error::new("put", ErrorKind::Closed, detail));
                }
                _ => self.return_chunk(io, key),
            }
        }
    }

    /// Fails transfers of lost peers whose posted operations do not complete.
    pub(super) fn fail_overdue_transfers(&mut self, io: &RailIo, now: Instant) {
        let Self { transfers, unstarted, .. } = self;
        transfers.retain(|key, transfer| {
            let is_overdue = transfer.drain_deadline.is_some_and(|end| now >= end);
            if is_overdue {
                unstarted.remove(key);
                let detail =
                    "the peer is lost, and operations in flight may still access the memory";
                let error = Error::new("transfer", ErrorKind::Closed, detail);
                io.report_done(transfer.token, Err(error));
            }
            !is_overdue
        });
    }
}
