//! Posts the chunks of a ring on one endpoint, in any notify mode, and reports which are locally
//! complete.

use std::collections::VecDeque;
use std::time::Duration;

use super::geometry::{ChunkLayout, FLAG_LEN, RingGeometry};
use super::header::{ChunkHeader, HEADER_LEN};
use super::memory::RegistrationScope;
use super::notice_sender::{LAST_NOTICE_TOKEN, NoticeSender};
use super::notify::NotifyMode;
use super::ring_offer::LaneOffer;
use super::writer_state::Chunk;
use crate::endpoint::{InjectOutcome, LocalSegment, RemoteTarget};
use crate::{
    Access, CompletionQueue, Endpoint, Error, ErrorKind, HostMemory, MemoryRegion, Peer,
    PostOptions, RemoteMemory, Result, TransferFlags,
};

/// Chunks that may be in flight at the same time, each with its own header.
pub(super) const SLOT_COUNT: u16 = 512;
/// A header and a flag.
const SLOT_LEN: usize = 128;
/// The longest write that is copied instead of gathered: a few cache lines.
const MAX_COPIED_WRITE: usize = 256;
/// Tokens of a ring's writes: this, then generation and sender index, then the slot.
const WRITE_TOKEN: u64 = 0x5269 << 48;

/// Distinguishes the writes of one sender from those of others, also of earlier ones with the same
/// index, whose completions may be late.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SenderInstance {
    /// Index of the sender on its port.
    pub(super) sender_index: u16,
    /// Number of senders opened before, truncated.
    pub(super) generation: u16,
}

impl SenderInstance {
    pub(super) fn number(self) -> u32 {
        u32::from(self.generation) << 16 | u32::from(self.sender_index)
    }

    /// The sender in the token of a last notice.
    pub(super) fn from_last_notice_token(token: u64) -> Option<Self> {
        let instance = Self { sender_index: token as u16, generation: (token >> 16) as u16 };
        (token >> 32 == LAST_NOTICE_TOKEN >> 32).then_some(instance)
    }
}

/// Sender and slot in the token of a write.
#[inline]
pub(super) fn parse_write_token(token: u64) -> Option<(SenderInstance, u16)> {
    let instance =
        SenderInstance { sender_index: (token >> 16) as u16, generation: (token >> 32) as u16 };
    (token >> 48 == WRITE_TOKEN >> 48).then_some((instance, token as u16))
}

/// Outcome of posting a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Posted {
    /// There was no room: post it again unchanged.
    Full,
    /// In flight; a completion follows.
    Sent,
    /// Copied; no completion follows.
    Copied,
}

/// State of a posted chunk.
#[derive(Debug, Clone, Copy)]
pub(super) struct Slot {
    /// Completions still expected.
    pending: u8,
    /// The notice to send after them.
    immediate: u32,
    /// Bytes of payload.
    payload: u32,
    /// Its number in `PostedChunks`.
    post_number: u64,
}

/// Posted chunks in order, and which of them are locally complete: the memory they were written
/// from may be reused.
#[derive(Debug)]
struct PostedChunks {
    /// From the first incomplete one: where each chunk ends, and whether it is complete.
    pending: VecDeque<(u64, bool)>,
    /// Number of the first of them.
    first: u64,
    /// End of the last chunk before which all are complete.
    completed_to: u64,
}

impl PostedChunks {
    #[inline]
    fn begin(&mut self, end: u64) -> u64 {
        self.pending.push_back((end, false));
        self.first + self.pending.len() as u64 - 1
    }

    #[inline]
    fn done(&mut self, number: u64) {
        let index = number.checked_sub(self.first).map(|index| index as usize);
        if let Some((_, is_done)) = index.and_then(|index| self.pending.get_mut(index)) {
            *is_done = true;
        }
        while let Some((end, true)) = self.pending.front() {
            self.completed_to = *end;
            self.first += 1;
            self.pending.pop_front();
        }
    }
}

/// Posts the chunks of a ring on one endpoint.
#[derive(Debug)]
pub(super) struct ChunkPoster {
    mode: NotifyMode,
    geometry: RingGeometry,
    peer: Peer,
    ring: RemoteMemory,
    /// The reader's separate headers, if the layout has them.
    remote_headers: Option<RemoteMemory>,
    /// Sends notices without a chunk to the reader.
    notice_sender: NoticeSender,
    instance: SenderInstance,
    token: u64,
    headers: MemoryRegion,
    slots: Box<[Slot]>,
    free: Vec<u16>,
    /// Notices to be sent as messages.
    pending_notices: VecDeque<u32>,
    /// A chunk of which only the first of two writes was posted, with its slot.
    partial: Option<(PartialChunk, u16)>,
    posted_chunks: PostedChunks,
}

/// The write of a chunk that is still to be posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PartialChunk {
    /// Its payload: the next call with the same header posts it, also for another message with that
    /// header.
    Payload(ChunkHeader),
    /// Its flag, at this offset. The payload is in flight, so the chunk counts as written: no other
    /// payload may be posted for it.
    Flag(u64),
}

impl ChunkPoster {
    /// Attaches a ring that the peer offered, for the writes of this sender instance.
    pub(super) fn new(
        scope: RegistrationScope<'_>,
        peer: Peer,
        offer: &LaneOffer,
        (mode, tagged): (NotifyMode, bool),
        geometry: RingGeometry,
        instance: SenderInstance,
    ) -> Result<Self> {
        let domain = scope.domain();
        mode.check(domain.capabilities())?;
        let ring = domain.attach(&offer.ring)?;
        let notice_sender =
            NoticeSender::new(scope, (mode, tagged), peer, (&offer.credit_memory, 0))?;
        let needed = geometry.max_chunks() * HEADER_LEN;
        let remote_headers =
            offer.headers.as_ref().map(|headers| domain.attach(headers)).transpose()?;
        let refuse = |detail: String| Err(Error::new(ErrorKind::OutOfBounds, "open ring", detail));
        if ring.len() < geometry.capacity() {
            return refuse(format!(
                "the offered memory has {} bytes, the ring needs {}",
                ring.len(),
                geometry.capacity()
            ));
        }
        match (&remote_headers, geometry.layout()) {
            (Some(headers), ChunkLayout::SeparateHeader) if headers.len() >= needed => {}
            (None, ChunkLayout::InlineHeader | ChunkLayout::TrailingFlag) => {}
            (headers, layout) => {
                let length = headers.as_ref().map_or(0, |memory| memory.len());
                return refuse(format!(
                    "the offer has {length} bytes of header memory, which does not fit layout {layout:?}"
                ));
            }
        }
        let headers = HostMemory::zeroed(usize::from(SLOT_COUNT) * SLOT_LEN)?;
        let headers = scope.register(headers, Access::WRITE)?;
        Ok(Self {
            mode,
            geometry,
            peer,
            ring,
            remote_headers,
            notice_sender,
            instance,
            token: WRITE_TOKEN | u64::from(instance.number()) << 16,
            headers,
            slots: vec![
                Slot { pending: 0, immediate: 0, payload: 0, post_number: 0 };
                SLOT_COUNT.into()
            ]
            .into(),
            free: (0..SLOT_COUNT).rev().collect(),
            pending_notices: VecDeque::with_capacity(SLOT_COUNT.into()),
            partial: None,
            posted_chunks: PostedChunks {
                pending: VecDeque::with_capacity(SLOT_COUNT.into()),
                first: 0,
                completed_to: 0,
            },
        })
    }

    /// Posts a chunk, with payload from an offset of a region.
    #[inline]
    pub(super) fn post(
        &mut self,
        endpoint: &mut Endpoint,
        queue: &mut CompletionQueue,
        chunk: &Chunk,
        payload: Option<(&MemoryRegion, usize)>,
    ) -> Result<Posted> {
        let length = chunk.header.payload as usize;
        let total = HEADER_LEN as usize + length;
        let is_short = self.mode == NotifyMode::Immediate
            && self.geometry.layout() == ChunkLayout::InlineHeader
            && total <= MAX_COPIED_WRITE.min(endpoint.inject_limit());
        if is_short && payload.is_none_or(|(region, _)| !region.kind().is_device()) {
            // The provider would copy it, too; and there is no completion to wait for.
            let mut bytes = [0; MAX_COPIED_WRITE];
            bytes[..HEADER_LEN as usize].copy_from_slice(&chunk.header.encode());
            if let Some((region, from)) = payload {
                region.read(from, &mut bytes[HEADER_LEN as usize..total])?;
            }
            let target = RemoteTarget { memory: &self.ring, offset: chunk.header_at };
            let data = Some(chunk.immediate.into());
            let bytes = &bytes[..total];
            match endpoint.try_inject_write(queue, self.peer, bytes, target, data)? {
                InjectOutcome::Accepted => {
                    let post_number = self.posted_chunks.begin(self.end_of(chunk));
                    self.posted_chunks.done(post_number);
                    return Ok(Posted::Copied);
                }
                InjectOutcome::WouldBlock => return Ok(Posted::Full),
                InjectOutcome::NotSupported => {}
            }
        }
        let is_posted = self.post_long(endpoint, queue, chunk, payload)?;
        Ok(if is_posted { Posted::Sent } else { Posted::Full })
    }

    fn post_long(
        &mut self,
        endpoint: &mut Endpoint,
        queue: &mut CompletionQueue,
        chunk: &Chunk,
        payload: Option<(&MemoryRegion, usize)>,
    ) -> Result<bool> {
        if !self.post_flag(endpoint, queue)? {
            return Ok(false);
        }
        let slot = match self.partial {
            Some((PartialChunk::Payload(partial), slot)) if partial == chunk.header => slot,
            // The chunk's message was abandoned: the slot is reused once its write has completed.
            Some((_, slot)) if self.slots[usize::from(slot)].pending > 0 => return Ok(false),
            Some((_, slot)) => {
                self.partial = None;
                slot
            }
            None => match self.free.pop() {
                Some(slot) => slot,
                None => return Ok(false),
            },
        };
        let posted = self.post_in(slot, endpoint, queue, chunk, payload);
        let end = self.end_of(chunk);
        let state = &mut self.slots[usize::from(slot)];
        let is_flag_pending =
            matches!(self.partial, Some((PartialChunk::Flag(_), partial)) if partial == slot);
        if matches!(posted, Ok(true)) || is_flag_pending {
            state.immediate = chunk.immediate;
            state.payload = chunk.header.payload;
            state.post_number = self.posted_chunks.begin(end);
            if !is_flag_pending {
                self.partial = None;
                state.pending += 1;
            }
            return posted.map(|_| true);
        } else if self.partial.is_none_or(|(_, partial)| partial != slot) {
            self.free.push(slot);
        }
        posted
    }

    /// Posts the flag of a chunk whose payload is in flight. False if there is no room now.
    fn post_flag(&mut self, endpoint: &mut Endpoint, queue: &mut CompletionQueue) -> Result<bool> {
        let Some((PartialChunk::Flag(offset), slot)) = self.partial else { return Ok(true) };
        let at = usize::from(slot) * SLOT_LEN + HEADER_LEN as usize;
        let flag = [LocalSegment { region: &self.headers, offset: at, length: FLAG_LEN as usize }];
        let target = RemoteTarget { memory: &self.ring, offset };
        let options = PostOptions::token(self.token | u64::from(slot)).timeout(Duration::ZERO);
        if !endpoint.try_write_segments(queue, self.peer, &flag, target, None, &options)? {
            return Ok(false);
        }
        self.partial = None;
        self.slots[usize::from(slot)].pending += 1;
        Ok(true)
    }

    /// Posts the write or both writes of a chunk; or only the second, if the first was posted.
    fn post_in(
        &mut self,
        slot: u16,
        endpoint: &mut Endpoint,
        queue: &mut CompletionQueue,
        chunk: &Chunk,
        payload: Option<(&MemoryRegion, usize)>,
    ) -> Result<bool> {
        let at = usize::from(slot) * SLOT_LEN;
        let length = chunk.header.payload as usize;
        let headers = &self.headers;
        let header = LocalSegment { region: headers, offset: at, length: HEADER_LEN as usize };
        let body = payload.map(|(region, offset)| LocalSegment { region, offset, length });
        let body = body.filter(|_| length > 0);
        let both = [header, body.unwrap_or(header)];
        let both = &both[..1 + usize::from(body.is_some())];
        let flag_at = at + HEADER_LEN as usize;
        let flag = [LocalSegment { region: headers, offset: flag_at, length: FLAG_LEN as usize }];
        let (only_header, only_body) = ([header], [body.unwrap_or(header)]);

        let ring = |offset| RemoteTarget { memory: &self.ring, offset };
        // The write to post first, if there are two, and the one that completes the chunk.
        let (first, last) = match (&self.remote_headers, chunk.flag_at, body) {
            (Some(memory), ..) => {
                let target = RemoteTarget { memory, offset: chunk.header_at };
                match body {
                    Some(_) => {
                        (Some((&only_header[..], target)), (&only_body[..], ring(chunk.payload_at)))
                    }
                    None => (None, (&only_header[..], target)),
                }
            }
            (None, Some(at), _) => (Some((both, ring(chunk.header_at))), (&flag[..], ring(at))),
            (None, None, _) => (None, (both, ring(chunk.header_at))),
        };
        let plain = PostOptions::token(self.token | u64::from(slot)).timeout(Duration::ZERO);
        let options = match self.mode {
            NotifyMode::Message => plain.flags(TransferFlags::DELIVERY_COMPLETE),
            NotifyMode::Immediate | NotifyMode::Polling => plain,
        };
        let is_second_write = self.partial.is_some();
        if !is_second_write {
            headers.write(at, &chunk.header.encode())?;
            headers.store_u64(flag_at, Chunk::flag(chunk.header.sequence))?;
            self.slots[usize::from(slot)].pending = 0;
            if let Some((pieces, target)) = first {
                if !endpoint.try_write_segments(queue, self.peer, pieces, target, None, &options)? {
                    return Ok(false);
                }
                let rest = match chunk.flag_at {
                    Some(at) => PartialChunk::Flag(at),
                    None => PartialChunk::Payload(chunk.header),
                };
                self.partial = Some((rest, slot));
                self.slots[usize::from(slot)].pending = 1;
            }
        }
        let data = (self.mode == NotifyMode::Immediate).then_some(u64::from(chunk.immediate));
        let is_posted =
            endpoint.try_write_segments(queue, self.peer, last.0, last.1, data, &options)?;
        if is_posted
            && matches!(self.partial, Some((PartialChunk::Flag(_), partial)) if partial == slot)
        {
            self.partial = None;
        }
        Ok(is_posted)
    }

    /// A write of this slot completed. Returns the bytes of payload if its chunk is complete.
    #[inline]
    pub(super) fn completed(&mut self, slot: u16) -> Option<u32> {
        let state = self.slots.get_mut(usize::from(slot))?;
        state.pending = state.pending.saturating_sub(1);
        // The first of two writes does not complete the chunk while the second is not posted.
        if state.pending > 0 || self.partial.is_some_and(|(_, partial)| partial == slot) {
            return None;
        }
        if self.mode == NotifyMode::Message {
            self.pending_notices.push_back(state.immediate);
        }
        self.free.push(slot);
        self.posted_chunks.done(state.post_number);
        Some(state.payload)
    }

    /// A write of this slot failed: no pending notice is sent any more.
    pub(super) fn failed(&mut self, slot: u16) {
        self.completed(slot);
        self.pending_notices.clear();
    }

    /// Was only a part of a chunk written?
    pub(super) fn has_partial_chunk(&self) -> bool {
        self.partial.is_some_and(|(partial, slot)| {
            matches!(partial, PartialChunk::Flag(_)) || self.slots[usize::from(slot)].pending > 0
        })
    }

    /// Sends pending notices and a pending flag. False if some are left.
    #[inline]
    pub(super) fn send_pending(
        &mut self,
        endpoint: &mut Endpoint,
        queue: &mut CompletionQueue,
    ) -> Result<bool> {
        if !self.post_flag(endpoint, queue)? {
            return Ok(false);
        }
        while let Some(bits) = self.pending_notices.front() {
            if !self.notice_sender.send_notice(endpoint, queue, *bits)? {
                return Ok(false);
            }
            self.pending_notices.pop_front();
        }
        Ok(true)
    }

    /// Sends the end notice with these bits. Some(true): a completion reports its arrival, as
    /// requested. Some(false): there is no room now. None: it is sent.
    pub(super) fn send_end_notice(
        &self,
        endpoint: &mut Endpoint,
        queue: &mut CompletionQueue,
        (bits, confirms_delivery): (u32, bool),
    ) -> Result<Option<bool>> {
        if confirms_delivery {
            let number = self.instance.number();
            return self.notice_sender.send_last_notice(endpoint, queue, bits, number);
        }
        let is_sent = self.notice_sender.send_notice(endpoint, queue, bits)?;
        Ok((!is_sent).then_some(false))
    }

    /// Incomplete chunks and unsent notices. A chunk whose first write has completed and whose
    /// second was not posted does not count: its second write may never be posted.
    pub(super) fn unfinished(&self) -> usize {
        let is_idle = self.partial.is_some() && !self.has_partial_chunk();
        usize::from(SLOT_COUNT) - self.free.len() - usize::from(is_idle)
            + self.pending_notices.len()
    }

    /// The state after the first of two writes was posted, and the second found no room.
    #[cfg(test)]
    pub(super) fn begin_partial_chunk(&mut self, chunk: &Chunk) -> Option<u16> {
        let slot = self.free.pop()?;
        self.slots[usize::from(slot)].pending = 1;
        self.partial = Some((PartialChunk::Payload(chunk.header), slot));
        Some(slot)
    }

    #[inline]
    fn end_of(&self, chunk: &Chunk) -> u64 {
        chunk.header.position + self.geometry.taken(chunk.header.payload.into())
    }

    /// The memory of all chunks posted here that end at or below this position may be reused.
    #[inline]
    pub(super) fn completed_to(&self) -> u64 {
        self.posted_chunks.completed_to
    }

    pub(super) fn instance(&self) -> SenderInstance {
        self.instance
    }

    pub(super) fn peer(&self) -> Peer {
        self.peer
    }
}
