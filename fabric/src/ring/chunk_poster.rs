//! One endpoint's share of a ring's writing side: posts chunks, in whatever form the reader
//! is told, and says when what was posted is done.

use std::collections::VecDeque;
use std::time::Duration;

use super::geometry::{ChunkLayout, FLAG_LEN, RingGeometry};
use super::header::{ChunkHeader, HEADER_LEN};
use super::memory::{RegistrationScope, bind_or_enable};
use super::notice_sender::{LAST_NOTICE_TOKEN, NoticeSender};
use super::notify::NotifyMode;
use super::ring_offer::LaneOffer;
use super::writer_state::Chunk;
use crate::endpoint::{InjectOutcome, LocalSegment, RemoteTarget};
use crate::{
    Access, CompletionQueue, Endpoint, Error, ErrorKind, HostMemory, MemoryRegion, Peer,
    PostOptions, RemoteMemory, Result, TransferFlags,
};

/// Chunks that may be on their way at the same time, each with a header of its own.
pub(super) const SLOT_COUNT: u16 = 512;
/// A header and a flag.
const SLOT_LEN: usize = 128;
/// Longest write that is copied instead of gathered: a few lines of the cache.
const MAX_COPIED_WRITE: usize = 256;
/// Tokens of a ring's writes: this, then the outlet's title, then the slot.
const WRITE_TOKEN: u64 = 0x5269 << 48;

/// What tells the writes of one outlet from those of others, also of those that had the same
/// name before: their completions may still come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SenderInstance {
    /// The ring's name at its writer.
    pub(super) sender_index: u16,
    /// Counts the outlets.
    pub(super) generation: u16,
}

impl SenderInstance {
    pub(super) fn number(self) -> u32 {
        u32::from(self.generation) << 16 | u32::from(self.sender_index)
    }

    /// Whose last word it was that a token names.
    pub(super) fn from_last_notice_token(token: u64) -> Option<Self> {
        let instance = Self { sender_index: token as u16, generation: (token >> 16) as u16 };
        (token >> 32 == LAST_NOTICE_TOKEN >> 32).then_some(instance)
    }
}

/// Whose write it was that a token names, and the slot.
#[inline]
pub(super) fn parse_write_token(token: u64) -> Option<(SenderInstance, u16)> {
    let instance =
        SenderInstance { sender_index: (token >> 16) as u16, generation: (token >> 32) as u16 };
    (token >> 48 == WRITE_TOKEN >> 48).then_some((instance, token as u16))
}

/// What came of posting a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Posted {
    /// There was no room: it is to be posted again, as it is.
    No,
    /// It is on its way, and completes.
    Sent,
    /// It was copied, and does not complete.
    Copied,
}

/// What a chunk is written with.
#[derive(Debug, Clone, Copy)]
pub(super) struct Slot {
    /// Completions that are to come.
    pending: u8,
    /// What to tell the reader once they have.
    immediate: u32,
    /// Bytes of payload.
    payload: u32,
    /// Its number among the departures.
    post_number: u64,
}

/// Chunks that were posted, in their order, and which of them the provider is done with: what they
/// were written from is the caller's again.
#[derive(Debug)]
struct PostedChunks {
    /// From the first that is not done on: where its chunk ends, and whether it is.
    pending: VecDeque<(u64, bool)>,
    /// The number of that first one.
    first: u64,
    /// Where the last one ends before which all are done.
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
        let place = number.checked_sub(self.first).map(|place| place as usize);
        if let Some((_, is_done)) = place.and_then(|place| self.pending.get_mut(place)) {
            *is_done = true;
        }
        while let Some((end, true)) = self.pending.front() {
            self.completed_to = *end;
            self.first += 1;
            self.pending.pop_front();
        }
    }
}

/// One endpoint's share of a ring's writing side.
#[derive(Debug)]
pub(super) struct ChunkPoster {
    mode: NotifyMode,
    geometry: RingGeometry,
    peer: Peer,
    ring: RemoteMemory,
    /// The reader's headers, if they lie apart.
    remote_headers: Option<RemoteMemory>,
    /// Gives notices to the reader that have no chunk.
    pub(super) notice_sender: NoticeSender,
    instance: SenderInstance,
    token: u64,
    headers: MemoryRegion,
    slots: Box<[Slot]>,
    free: Vec<u16>,
    /// Notices that are to be sent as messages.
    pending_notices: VecDeque<u32>,
    /// A chunk of which the first write was posted, and the second one was not; and its slot.
    partial: Option<(PartialChunk, u16)>,
    posted_chunks: PostedChunks,
}

/// What is still to be written of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PartialChunk {
    /// Its payload: who comes again with this header brings it, or that of another message with
    /// the same one.
    Payload(ChunkHeader),
    /// Its flag, to this place. The payload is on its way, and so the chunk is taken for
    /// written: nobody may come with another payload for it.
    Flag(u64),
}

impl ChunkPoster {
    /// A share of a ring that the peer offered, whose writes go by this title.
    pub(super) fn new(
        scope: RegistrationScope<'_>,
        peer: Peer,
        offer: &LaneOffer,
        (mode, tagged): (NotifyMode, bool),
        geometry: RingGeometry,
        instance: SenderInstance,
    ) -> Result<Self> {
        let domain = scope.domain;
        mode.check(domain.capabilities())?;
        let ring = domain.attach(&offer.ring)?;
        let notice_sender =
            NoticeSender::new(scope, (mode, tagged), peer, (&offer.credit_memory, 0))?;
        let needed = geometry.max_chunks() * HEADER_LEN;
        let remote_headers =
            offer.headers.as_ref().map(|headers| domain.attach(headers)).transpose()?;
        let refuse =
            |detail: String| Err(Error::new(ErrorKind::OutOfBounds, "opening a ring", detail));
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
        let headers = domain.register(headers, Access::WRITE)?;
        bind_or_enable(&headers, scope)?;
        Ok(Self {
            mode,
            geometry,
            peer,
            ring,
            remote_headers,
            notice_sender,
            instance,
            token: WRITE_TOKEN
                | u64::from(instance.generation) << 32
                | u64::from(instance.sender_index) << 16,
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
        let whole = HEADER_LEN as usize + length;
        let is_short = self.mode == NotifyMode::Immediate
            && self.geometry.layout() == ChunkLayout::InlineHeader
            && whole <= MAX_COPIED_WRITE.min(endpoint.inject_limit());
        if is_short && payload.is_none_or(|(region, _)| !region.kind().is_device()) {
            // Copied, which the provider would do, too: and there is no completion to wait for.
            let mut bytes = [0; MAX_COPIED_WRITE];
            bytes[..HEADER_LEN as usize].copy_from_slice(&chunk.header.encode());
            if let Some((region, from)) = payload {
                region.read(from, &mut bytes[HEADER_LEN as usize..whole])?;
            }
            let target = RemoteTarget { memory: &self.ring, offset: chunk.header_at };
            let data = Some(chunk.immediate.into());
            let bytes = &bytes[..whole];
            match endpoint.try_inject_write(queue, self.peer, bytes, target, data)? {
                InjectOutcome::Accepted => {
                    let post_number = self.posted_chunks.begin(self.end_of(chunk));
                    self.posted_chunks.done(post_number);
                    return Ok(Posted::Copied);
                }
                InjectOutcome::WouldBlock => return Ok(Posted::No),
                InjectOutcome::NotSupported => {}
            }
        }
        let is_posted = self.post_long(endpoint, queue, chunk, payload)?;
        Ok(if is_posted { Posted::Sent } else { Posted::No })
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
            // Of a message that was let go of: what it wrote is written over once it is there.
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
        let place = &mut self.slots[usize::from(slot)];
        let owes_flag =
            matches!(self.partial, Some((PartialChunk::Flag(_), partial)) if partial == slot);
        if matches!(posted, Ok(true)) || owes_flag {
            place.immediate = chunk.immediate;
            place.payload = chunk.header.payload;
            place.post_number = self.posted_chunks.begin(end);
            if !owes_flag {
                self.partial = None;
                place.pending += 1;
            }
            return posted.map(|_| true);
        } else if self.partial.is_none_or(|(_, partial)| partial != slot) {
            self.free.push(slot);
        }
        posted
    }

    /// Posts the flag of a chunk whose payload is on its way. False if there is no room now.
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

    /// Posts the one write of a chunk, or both; or the second one, if the first is posted.
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

        let near = |offset| RemoteTarget { memory: &self.ring, offset };
        // The write that is posted first, if there are two; and the one that counts.
        let (first, last) = match (&self.remote_headers, chunk.flag_at, body) {
            (Some(memory), ..) => {
                let far = RemoteTarget { memory, offset: chunk.header_at };
                match body {
                    Some(_) => {
                        (Some((&only_header[..], far)), (&only_body[..], near(chunk.payload_at)))
                    }
                    None => (None, (&only_header[..], far)),
                }
            }
            (None, Some(at), _) => (Some((both, near(chunk.header_at))), (&flag[..], near(at))),
            (None, None, _) => (None, (both, near(chunk.header_at))),
        };
        let plain = PostOptions::token(self.token | u64::from(slot)).timeout(Duration::ZERO);
        let options = match self.mode {
            NotifyMode::Message => plain.flags(TransferFlags::DELIVERY_COMPLETE),
            NotifyMode::Immediate | NotifyMode::Polling => plain,
        };
        let is_half = self.partial.is_some();
        if !is_half {
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

    /// One of a slot's writes completed. If its chunk is done with that, gives the bytes of its
    /// payload.
    #[inline]
    pub(super) fn completed(&mut self, slot: u16) -> Option<u32> {
        let place = self.slots.get_mut(usize::from(slot))?;
        place.pending = place.pending.saturating_sub(1);
        // The first of two, while the second one is still to be posted, is nothing yet.
        if place.pending > 0 || self.partial.is_some_and(|(_, partial)| partial == slot) {
            return None;
        }
        if self.mode == NotifyMode::Message {
            self.pending_notices.push_back(place.immediate);
        }
        self.free.push(slot);
        self.posted_chunks.done(place.post_number);
        Some(place.payload)
    }

    /// One of a slot's writes failed: nobody is told of its chunk, nor of others.
    pub(super) fn failed(&mut self, slot: u16) {
        self.completed(slot);
        self.pending_notices.clear();
    }

    /// Was a part of a chunk written whose rest was not?
    pub(super) fn has_partial_chunk(&self) -> bool {
        self.partial.is_some_and(|(partial, slot)| {
            matches!(partial, PartialChunk::Flag(_)) || self.slots[usize::from(slot)].pending > 0
        })
    }

    /// Sends the notices that are due as messages, and the flag that is owed. False if some are
    /// left.
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

    /// Chunks that were posted and are not done, and notices that are to be sent. One whose first
    /// write is done, and whose second was not posted, is none: nobody may ever come to post it.
    pub(super) fn unfinished(&self) -> usize {
        let is_idle = self.partial.is_some() && !self.has_partial_chunk();
        usize::from(SLOT_COUNT) - self.free.len() - usize::from(is_idle)
            + self.pending_notices.len()
    }

    /// As after the first of a chunk's two writes was posted, and there was no room for the second.
    #[cfg(test)]
    pub(super) fn begin_partial_chunk(&mut self, chunk: &Chunk) -> Option<u16> {
        let slot = self.free.pop()?;
        self.slots[usize::from(slot)].pending = 1;
        self.partial = Some((PartialChunk::Payload(chunk.header), slot));
        Some(slot)
    }

    /// Where a chunk ends in the ring.
    #[inline]
    fn end_of(&self, chunk: &Chunk) -> u64 {
        chunk.header.position + self.geometry.taken(chunk.header.payload.into())
    }

    /// Of all chunks posted here that end up to this position, the provider is done with the
    /// memory they were written from.
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
