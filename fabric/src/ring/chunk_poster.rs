//! Posts the chunks of a ring on one endpoint, in any notify mode, and reports which are locally
//! complete.

use std::collections::VecDeque;

use super::geometry::MAX_INLINE_DATA;
use super::inline_data;
use super::memory::RegistrationScope;
use super::notice_sender::{LAST_NOTICE_TOKEN, NoticeSender};
use super::{
    Chunk, ChunkHeader, ChunkLayout, EndpointIo, HEADER_LEN, LaneOffer, NotifyMode, RingGeometry,
    SenderInstance,
};
use crate::endpoint::{InjectOutcome, LocalSegment, RemoteTarget};
use crate::{
    Access, Error, ErrorKind, HostMemory, MemoryRegion, Peer, PostOptions, RemoteMemory, Result,
    TransferFlags,
};

/// Chunks that may be in flight at the same time, each with its own header.
pub(super) const SLOT_COUNT: u16 = 512;
/// The longest write that is copied instead of gathered: a few cache lines.
const MAX_COPIED_WRITE: usize = 256;
/// Tokens of a ring's writes: this, then generation and sender index, then the slot.
const WRITE_TOKEN: u64 = 0x5269 << 48;

pub(super) fn parse_last_notice_token(token: u64) -> Option<SenderInstance> {
    (token >> 32 == LAST_NOTICE_TOKEN >> 32).then_some(SenderInstance(token as u32))
}

#[inline]
pub(super) fn parse_write_token(token: u64) -> Option<(SenderInstance, u16)> {
    let instance = SenderInstance((token >> 16) as u32);
    (token >> 48 == WRITE_TOKEN >> 48).then_some((instance, token as u16))
}

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
#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    /// Completions still expected.
    pending: u8,
    /// The notice to send after them.
    immediate: u32,
    payload: u32,
    /// The chunk's number in `PostedChunks`.
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

#[derive(Debug)]
pub(super) struct ChunkPoster {
    mode: NotifyMode,
    geometry: RingGeometry,
    peer: Peer,
    ring: RemoteMemory,
    /// The reader's separate headers, if the layout has them.
    remote_headers: Option<RemoteMemory>,
    notice_sender: NoticeSender,
    instance: SenderInstance,
    token: u64,
    headers: MemoryRegion,
    slots: Box<[Slot]>,
    free: Vec<u16>,
    /// Notices to be sent as messages.
    pending_notices: VecDeque<u32>,
    partial: Option<PartialChunk>,
    posted_chunks: PostedChunks,
}

/// A chunk of which only the separate header was posted. The next call with the same header posts
/// the payload, also for another message with that header.
#[derive(Debug, Clone, Copy)]
struct PartialChunk {
    header: ChunkHeader,
    slot: u16,
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
        let needed = geometry.max_chunks() * geometry.header_stride();
        let remote_headers =
            offer.headers.as_ref().map(|headers| domain.attach(headers)).transpose()?;
        let refuse = |detail: String| Err(Error::new(ErrorKind::OutOfBounds, "open ring", detail));
        let (offered, capacity) = (ring.len(), geometry.capacity());
        if offered < capacity {
            return refuse(format!(
                "the offered memory has {offered} bytes, the ring needs {capacity}"
            ));
        }
        let (length, layout) = (remote_headers.as_ref().map(|it| it.len()), geometry.layout());
        let fits = match layout {
            ChunkLayout::SeparateHeader => length.is_some_and(|length| length >= needed),
            ChunkLayout::InlineHeader => length.is_none(),
        };
        if !fits {
            let length = length.unwrap_or(0);
            return refuse(format!(
                "the offer has {length} bytes of header memory, which does not fit layout {layout:?}"
            ));
        }
        let headers_length = u64::from(SLOT_COUNT) * geometry.header_stride();
        let headers = HostMemory::zeroed(headers_length as usize)?;
        let headers = scope.register(headers, Access::WRITE)?;
        Ok(Self {
            mode,
            geometry,
            peer,
            ring,
            remote_headers,
            notice_sender,
            instance,
            token: WRITE_TOKEN | u64::from(instance.0) << 16,
            headers,
            slots: vec![Slot::default(); SLOT_COUNT.into()].into(),
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

    /// Posts a chunk, with payload from an offset of a region, and bytes beside its header.
    #[inline]
    pub(super) fn post(
        &mut self,
        io: &mut EndpointIo,
        chunk: &Chunk,
        payload: Option<(&MemoryRegion, usize)>,
        inline: &[u8],
    ) -> Result<Posted> {
        let length = chunk.header.payload as usize;
        let total = HEADER_LEN as usize + length;
        let is_short = self.mode == NotifyMode::Immediate
            && self.geometry.layout() == ChunkLayout::InlineHeader
            && total <= MAX_COPIED_WRITE.min(io.endpoint.inject_limit());
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
            match io.endpoint.try_inject_write(&io.queue, self.peer, bytes, target, data)? {
                InjectOutcome::Accepted => {
                    let post_number = self.posted_chunks.begin(self.end_of(chunk));
                    self.posted_chunks.done(post_number);
                    return Ok(Posted::Copied);
                }
                InjectOutcome::WouldBlock => return Ok(Posted::Full),
                InjectOutcome::NotSupported => {}
            }
        }
        let is_posted = self.post_long(io, chunk, payload, inline)?;
        Ok(if is_posted { Posted::Sent } else { Posted::Full })
    }

    fn post_long(
        &mut self,
        io: &mut EndpointIo,
        chunk: &Chunk,
        payload: Option<(&MemoryRegion, usize)>,
        inline: &[u8],
    ) -> Result<bool> {
        let slot = match self.partial {
            Some(partial) if partial.header == chunk.header => partial.slot,
            // The chunk's message was abandoned: the slot is reused once its write has completed.
            Some(partial) if self.slots[usize::from(partial.slot)].pending > 0 => return Ok(false),
            Some(partial) => {
                self.partial = None;
                partial.slot
            }
            None => match self.free.pop() {
                Some(slot) => slot,
                None => return Ok(false),
            },
        };
        let posted = self.post_in(slot, io, chunk, payload, inline);
        if matches!(posted, Ok(true)) {
            self.partial = None;
            let end = self.end_of(chunk);
            let state = &mut self.slots[usize::from(slot)];
            state.immediate = chunk.immediate;
            state.payload = chunk.header.payload;
            state.post_number = self.posted_chunks.begin(end);
            state.pending += 1;
        } else if self.partial.is_none() {
            self.free.push(slot);
        }
        posted
    }

    /// Posts a write of this slot. False if there is no room now.
    #[inline]
    fn write(
        &self,
        io: &mut EndpointIo,
        slot: u16,
        segments: &[LocalSegment<'_>],
        target: RemoteTarget<'_>,
        data: Option<u64>,
    ) -> Result<bool> {
        let mut options = PostOptions::token(self.token | u64::from(slot));
        if self.mode == NotifyMode::Message {
            options = options.flags(TransferFlags::DELIVERY_COMPLETE);
        }
        io.endpoint.try_write_segments(&mut io.queue, self.peer, segments, target, data, &options)
    }

    /// Posts the write or both writes of a chunk; or only the payload, if the header was posted.
    fn post_in(
        &mut self,
        slot: u16,
        io: &mut EndpointIo,
        chunk: &Chunk,
        payload: Option<(&MemoryRegion, usize)>,
        inline: &[u8],
    ) -> Result<bool> {
        let at = usize::from(slot) * self.geometry.header_stride() as usize;
        let length = chunk.header.payload as usize;
        let headers = &self.headers;
        let header_length = match self.geometry.inline_data() {
            0 => HEADER_LEN as usize,
            _ => HEADER_LEN as usize + inline_data::length_of(inline.len()),
        };
        let header = LocalSegment { region: headers, offset: at, length: header_length };
        let body = payload.map(|(region, offset)| LocalSegment { region, offset, length });
        let body = body.filter(|_| length > 0);
        let memory = self.remote_headers.as_ref().unwrap_or(&self.ring);
        let header_target = RemoteTarget { memory, offset: chunk.header_at };
        let has_two_writes = self.remote_headers.is_some() && body.is_some();
        if self.partial.is_none() {
            headers.write(at, &chunk.header.encode())?;
            if self.geometry.inline_data() > 0 {
                let mut behind = [0; inline_data::length_of(MAX_INLINE_DATA as usize)];
                let written = inline_data::encode(&chunk.header, inline, &mut behind);
                headers.write(at + HEADER_LEN as usize, &behind[..written])?;
            }
            self.slots[usize::from(slot)].pending = 0;
            if has_two_writes {
                if !self.write(io, slot, &[header], header_target, None)? {
                    return Ok(false);
                }
                self.partial = Some(PartialChunk { header: chunk.header, slot });
                self.slots[usize::from(slot)].pending = 1;
            }
        }
        let data = (self.mode == NotifyMode::Immediate).then_some(u64::from(chunk.immediate));
        match body {
            Some(body) if has_two_writes => {
                let target = RemoteTarget { memory: &self.ring, offset: chunk.payload_at };
                self.write(io, slot, &[body], target, data)
            }
            Some(body) => self.write(io, slot, &[header, body], header_target, data),
            None => self.write(io, slot, &[header], header_target, data),
        }
    }

    /// A write of this slot completed. Returns the bytes of payload if its chunk is complete.
    #[inline]
    pub(super) fn completed(&mut self, slot: u16) -> Option<u32> {
        let state = self.slots.get_mut(usize::from(slot))?;
        state.pending = state.pending.saturating_sub(1);
        // The first of two writes does not complete the chunk while the second is not posted.
        if state.pending > 0 || self.partial.is_some_and(|partial| partial.slot == slot) {
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

    pub(super) fn has_partial_chunk(&self) -> bool {
        self.partial.is_some_and(|partial| self.slots[usize::from(partial.slot)].pending > 0)
    }

    #[inline]
    pub(super) fn send_pending(&mut self, io: &mut EndpointIo) -> Result<()> {
        while let Some(bits) = self.pending_notices.front() {
            if !self.notice_sender.send_notice(io, *bits)? {
                break;
            }
            self.pending_notices.pop_front();
        }
        Ok(())
    }

    /// Sends the end notice with these bits. If delivery is confirmed, a completion reports its
    /// arrival, where the notify mode has one.
    pub(super) fn send_end_notice(
        &self,
        io: &mut EndpointIo,
        (bits, confirms_delivery): (u32, bool),
    ) -> Result<Posted> {
        let has_completion = confirms_delivery && self.mode == NotifyMode::Immediate;
        let is_sent = match has_completion {
            true => self.notice_sender.send_last_notice(io, bits, self.instance.0)?,
            false => self.notice_sender.send_notice(io, bits)?,
        };
        Ok(match (is_sent, has_completion) {
            (false, _) => Posted::Full,
            (true, true) => Posted::Sent,
            (true, false) => Posted::Copied,
        })
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
        self.partial = Some(PartialChunk { header: chunk.header, slot });
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
