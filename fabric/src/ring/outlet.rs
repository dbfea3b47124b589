//! One endpoint's share of a ring's writing side: posts chunks, in whatever form the reader
//! is told, and says when what was posted is done.

use std::collections::VecDeque;
use std::time::Duration;

use super::header::{HEADER, Header};
use super::memory::{Site, activate};
use super::notify::Notify;
use super::shape::{FLAG, Layout, Shape};
use super::speaker::{LAST, Speaker};
use super::terms::LaneOffer;
use super::writer::Chunk;
use crate::endpoint::{Injected, Piece, Target};
use crate::{
    Access, CompletionQueue, Endpoint, Error, ErrorKind, HostMemory, MemoryRegion, Options, Peer,
    RemoteMemory, Result, TransferFlags,
};

/// Chunks that may be on their way at the same time, each with a header of its own.
pub(super) const SLOTS: u16 = 512;
/// A header and a flag.
const STRIDE: usize = 128;
/// Longest write that is copied instead of gathered: a few lines of the cache.
const SHORT: usize = 256;
/// Tokens of a ring's writes: this, then the outlet's title, then the slot.
const TOKEN: u64 = 0x5269 << 48;

/// What tells the writes of one outlet from those of others, also of those that had the same
/// name before: their completions may still come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Title {
    /// The ring's name at its writer.
    pub(super) name: u16,
    /// Counts the outlets.
    pub(super) generation: u16,
}

impl Title {
    pub(super) fn number(self) -> u32 {
        u32::from(self.generation) << 16 | u32::from(self.name)
    }

    /// Whose last word it was that a token names.
    pub(super) fn of_last(token: u64) -> Option<Self> {
        let title = Self { name: token as u16, generation: (token >> 16) as u16 };
        (token >> 32 == LAST >> 32).then_some(title)
    }
}

/// Whose write it was that a token names, and the slot.
#[inline]
pub(super) fn named(token: u64) -> Option<(Title, u16)> {
    let title = Title { name: (token >> 16) as u16, generation: (token >> 32) as u16 };
    (token >> 48 == TOKEN >> 48).then_some((title, token as u16))
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
    departure: u64,
}

/// Chunks that were posted, in their order, and which of them the provider is done with: what they
/// were written from is the caller's again.
#[derive(Debug)]
struct Departures {
    /// From the first that is not done on: where its chunk ends, and whether it is.
    pending: VecDeque<(u64, bool)>,
    /// The number of that first one.
    first: u64,
    /// Where the last one ends before which all are done.
    left_to: u64,
}

impl Departures {
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
            self.left_to = *end;
            self.first += 1;
            self.pending.pop_front();
        }
    }
}

/// One endpoint's share of a ring's writing side.
#[derive(Debug)]
pub(super) struct Outlet {
    form: Notify,
    shape: Shape,
    peer: Peer,
    ring: RemoteMemory,
    /// The reader's headers, if they lie apart.
    far_headers: Option<RemoteMemory>,
    /// Gives notices to the reader that have no chunk.
    pub(super) speaker: Speaker,
    title: Title,
    token: u64,
    headers: MemoryRegion,
    slots: Box<[Slot]>,
    free: Vec<u16>,
    /// Notices that are to be sent as messages.
    due: VecDeque<u32>,
    /// A chunk of which the first write was posted, and the second one was not; and its slot.
    half: Option<(Half, u16)>,
    departures: Departures,
}

/// What is still to be written of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Half {
    /// Its payload: who comes again with this header brings it, or that of another message with
    /// the same one.
    Payload(Header),
    /// Its flag, to this place. The payload is on its way, and so the chunk is taken for
    /// written: nobody may come with another payload for it.
    Flag(u64),
}

impl Outlet {
    /// A share of a ring that the peer offered, whose writes go by this title.
    pub(super) fn new(
        site: Site<'_>,
        peer: Peer,
        offer: &LaneOffer,
        (form, tagged): (Notify, bool),
        shape: Shape,
        title: Title,
    ) -> Result<Self> {
        let domain = site.domain;
        form.check(domain.capabilities())?;
        let ring = domain.attach(&offer.ring)?;
        let speaker = Speaker::new(site, (form, tagged), peer, (&offer.credit_memory, 0))?;
        let needed = shape.most_chunks() * HEADER;
        let far_headers =
            offer.headers.as_ref().map(|headers| domain.attach(headers)).transpose()?;
        let refuse =
            |detail: String| Err(Error::new(ErrorKind::OutOfBounds, "opening a ring", detail));
        if ring.len() < shape.capacity() {
            return refuse(format!("{} bytes, for a ring of {}", ring.len(), shape.capacity()));
        }
        match (&far_headers, shape.layout()) {
            (Some(headers), Layout::Apart) if headers.len() >= needed => {}
            (None, Layout::Together | Layout::Flagged) => {}
            (headers, layout) => {
                let length = headers.as_ref().map_or(0, |memory| memory.len());
                return refuse(format!("{length} bytes of headers, for a ring with {layout:?}"));
            }
        }
        let headers = HostMemory::zeroed(usize::from(SLOTS) * STRIDE)?;
        let headers = domain.register(headers, Access::WRITE)?;
        activate(&headers, site)?;
        Ok(Self {
            form,
            shape,
            peer,
            ring,
            far_headers,
            speaker,
            title,
            token: TOKEN | u64::from(title.generation) << 32 | u64::from(title.name) << 16,
            headers,
            slots: vec![Slot { pending: 0, immediate: 0, payload: 0, departure: 0 }; SLOTS.into()]
                .into(),
            free: (0..SLOTS).rev().collect(),
            due: VecDeque::with_capacity(SLOTS.into()),
            half: None,
            departures: Departures {
                pending: VecDeque::with_capacity(SLOTS.into()),
                first: 0,
                left_to: 0,
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
        let whole = HEADER as usize + length;
        let is_short = self.form == Notify::Immediate
            && self.shape.layout() == Layout::Together
            && whole <= SHORT.min(endpoint.inject_limit());
        if is_short && payload.is_none_or(|(region, _)| !region.kind().is_device()) {
            // Copied, which the provider would do, too: and there is no completion to wait for.
            let mut bytes = [0; SHORT];
            bytes[..HEADER as usize].copy_from_slice(&chunk.header.encode());
            if let Some((region, from)) = payload {
                region.read(from, &mut bytes[HEADER as usize..whole])?;
            }
            let target = Target { memory: &self.ring, offset: chunk.header_at };
            let data = Some(chunk.immediate.into());
            let bytes = &bytes[..whole];
            match endpoint.try_inject_write(queue, self.peer, bytes, target, data)? {
                Injected::Taken => {
                    let departure = self.departures.begin(self.end_of(chunk));
                    self.departures.done(departure);
                    return Ok(Posted::Copied);
                }
                Injected::NoRoom => return Ok(Posted::No),
                Injected::Refused => {}
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
        if !self.raise_flag(endpoint, queue)? {
            return Ok(false);
        }
        let slot = match self.half {
            Some((Half::Payload(half), slot)) if half == chunk.header => slot,
            // Of a message that was let go of: what it wrote is written over once it is there.
            Some((_, slot)) if self.slots[usize::from(slot)].pending > 0 => return Ok(false),
            Some((_, slot)) => {
                self.half = None;
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
        let owes_flag = matches!(self.half, Some((Half::Flag(_), half)) if half == slot);
        if matches!(posted, Ok(true)) || owes_flag {
            place.immediate = chunk.immediate;
            place.payload = chunk.header.payload;
            place.departure = self.departures.begin(end);
            if !owes_flag {
                self.half = None;
                place.pending += 1;
            }
            return posted.map(|_| true);
        } else if self.half.is_none_or(|(_, half)| half != slot) {
            self.free.push(slot);
        }
        posted
    }

    /// Posts the flag of a chunk whose payload is on its way. False if there is no room now.
    fn raise_flag(&mut self, endpoint: &mut Endpoint, queue: &mut CompletionQueue) -> Result<bool> {
        let Some((Half::Flag(offset), slot)) = self.half else { return Ok(true) };
        let at = usize::from(slot) * STRIDE + HEADER as usize;
        let flag = [Piece { region: &self.headers, offset: at, length: FLAG as usize }];
        let target = Target { memory: &self.ring, offset };
        let options = Options::token(self.token | u64::from(slot)).patience(Duration::ZERO);
        if !endpoint.try_write_pieces(queue, self.peer, &flag, target, None, &options)? {
            return Ok(false);
        }
        self.half = None;
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
        let at = usize::from(slot) * STRIDE;
        let length = chunk.header.payload as usize;
        let headers = &self.headers;
        let header = Piece { region: headers, offset: at, length: HEADER as usize };
        let body = payload.map(|(region, offset)| Piece { region, offset, length });
        let body = body.filter(|_| length > 0);
        let both = [header, body.unwrap_or(header)];
        let both = &both[..1 + usize::from(body.is_some())];
        let flag_at = at + HEADER as usize;
        let flag = [Piece { region: headers, offset: flag_at, length: FLAG as usize }];
        let (only_header, only_body) = ([header], [body.unwrap_or(header)]);

        let near = |offset| Target { memory: &self.ring, offset };
        // The write that is posted first, if there are two; and the one that counts.
        let (first, last) = match (&self.far_headers, chunk.flag_at, body) {
            (Some(memory), ..) => {
                let far = Target { memory, offset: chunk.header_at };
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
        let plain = Options::token(self.token | u64::from(slot)).patience(Duration::ZERO);
        let options = match self.form {
            Notify::Message => plain.flags(TransferFlags::DELIVERY_COMPLETE),
            Notify::Immediate | Notify::Polling => plain,
        };
        let is_half = self.half.is_some();
        if !is_half {
            headers.write(at, &chunk.header.encode())?;
            headers.store_u64(flag_at, Chunk::flag(chunk.header.sequence))?;
            self.slots[usize::from(slot)].pending = 0;
            if let Some((pieces, target)) = first {
                if !endpoint.try_write_pieces(queue, self.peer, pieces, target, None, &options)? {
                    return Ok(false);
                }
                let rest = match chunk.flag_at {
                    Some(at) => Half::Flag(at),
                    None => Half::Payload(chunk.header),
                };
                self.half = Some((rest, slot));
                self.slots[usize::from(slot)].pending = 1;
            }
        }
        let data = (self.form == Notify::Immediate).then_some(u64::from(chunk.immediate));
        let is_posted =
            endpoint.try_write_pieces(queue, self.peer, last.0, last.1, data, &options)?;
        if is_posted && matches!(self.half, Some((Half::Flag(_), half)) if half == slot) {
            self.half = None;
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
        if place.pending > 0 || self.half.is_some_and(|(_, half)| half == slot) {
            return None;
        }
        if self.form == Notify::Message {
            self.due.push_back(place.immediate);
        }
        self.free.push(slot);
        self.departures.done(place.departure);
        Some(place.payload)
    }

    /// One of a slot's writes failed: nobody is told of its chunk, nor of others.
    pub(super) fn failed(&mut self, slot: u16) {
        self.completed(slot);
        self.due.clear();
    }

    /// Was a part of a chunk written whose rest was not?
    pub(super) fn has_half(&self) -> bool {
        self.half.is_some_and(|(half, slot)| {
            matches!(half, Half::Flag(_)) || self.slots[usize::from(slot)].pending > 0
        })
    }

    /// Sends the notices that are due as messages, and the flag that is owed. False if some are
    /// left.
    #[inline]
    pub(super) fn settle(
        &mut self,
        endpoint: &mut Endpoint,
        queue: &mut CompletionQueue,
    ) -> Result<bool> {
        if !self.raise_flag(endpoint, queue)? {
            return Ok(false);
        }
        while let Some(bits) = self.due.front() {
            if !self.speaker.send_notice(endpoint, queue, *bits)? {
                return Ok(false);
            }
            self.due.pop_front();
        }
        Ok(true)
    }

    /// Chunks that were posted and are not done, and notices that are to be sent. One whose first
    /// write is done, and whose second was not posted, is none: nobody may ever come to post it.
    pub(super) fn unfinished(&self) -> usize {
        let is_idle = self.half.is_some() && !self.has_half();
        usize::from(SLOTS) - self.free.len() - usize::from(is_idle) + self.due.len()
    }

    /// As after the first of a chunk's two writes was posted, and there was no room for the second.
    #[cfg(test)]
    pub(super) fn begin_half(&mut self, chunk: &Chunk) -> Option<u16> {
        let slot = self.free.pop()?;
        self.slots[usize::from(slot)].pending = 1;
        self.half = Some((Half::Payload(chunk.header), slot));
        Some(slot)
    }

    /// Where a chunk ends in the ring.
    #[inline]
    fn end_of(&self, chunk: &Chunk) -> u64 {
        chunk.header.position + self.shape.taken(chunk.header.payload.into())
    }

    /// Of all chunks posted here that end up to this position, the provider is done with the
    /// memory they were written from.
    #[inline]
    pub(super) fn left_to(&self) -> u64 {
        self.departures.left_to
    }

    pub(super) fn title(&self) -> Title {
        self.title
    }

    pub(super) fn peer(&self) -> Peer {
        self.peer
    }
}
