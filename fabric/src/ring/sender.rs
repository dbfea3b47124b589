//! The side that writes, on an endpoint.

use super::Shape;
use super::header::HEADER;
use super::immediate::Immediate;
use super::writer::{Blocked, Message, Writer};
use crate::{
    Access, CompletionKind, CompletionQueue, Domain, Endpoint, Error, ErrorKind, HostMemory,
    MemoryRegion, Options, Outcome, Peer, RegionSlice, RemoteMemory, Result,
};

/// Chunks that may be on their way at the same time, each with a header of its own.
const SLOTS: u32 = 512;
/// Tokens of ring writes: this, the ring's number, the header's slot.
const TOKEN: u64 = 0x5269_6e67 << 32;

/// What came of an attempt to write a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pushed {
    /// A chunk is on its way, with so many bytes of payload.
    Posted(u64),
    /// The reader has to let go of something first.
    Blocked(Blocked),
    /// Chunks have to complete first, or the provider has to make room.
    Busy,
    /// Nothing is left of the message to write.
    Written,
}

/// Writes messages into a peer's ring, by write with immediate.
///
/// Driven by its caller: whoever owns endpoint and queue [pushes](Self::push) chunks and
/// [hands over](Self::accept) what the queue gives. Payload goes from the caller's
/// registered memory straight into the ring; it must stay as it is until
/// [`next_read`](Self::next_read) names its message.
#[derive(Debug)]
pub struct RingSender {
    writer: Writer,
    shape: Shape,
    peer: Peer,
    ring: RemoteMemory,
    headers: MemoryRegion,
    free: Vec<u32>,
    /// Where credit arrives: its bytes mean nothing, its immediates do.
    credit: MemoryRegion,
}

impl RingSender {
    /// Memory that goes with a sender: to be described to the receiver, as where it
    /// [tells](super::RingReceiver::connect) what it let go of.
    ///
    /// # Errors
    /// If it cannot be registered.
    pub fn credit_memory(domain: &Domain, endpoint: &Endpoint) -> Result<MemoryRegion> {
        let region = domain.register(HostMemory::zeroed(64)?, Access::REMOTE_WRITE)?;
        activate(&region, endpoint)?;
        Ok(region)
    }

    /// A sender into this ring, with chunks of at most so many bytes of payload.
    ///
    /// # Errors
    /// `NotSupported` where the provider has no immediates; `OutOfBounds` if the peer's
    /// region is smaller than the ring.
    pub fn new(
        endpoint: &Endpoint,
        peer: Peer,
        ring: RemoteMemory,
        credit: MemoryRegion,
        shape: Shape,
        epoch: u32,
        longest_payload: u64,
    ) -> Result<Self> {
        let operation = "opening a ring";
        let domain = endpoint.domain();
        let capabilities = domain.capabilities();
        if !capabilities.has_write_data() || capabilities.immediate_mask() < u64::from(u32::MAX) {
            let detail = "the provider carries no immediates of 32 bits";
            return Err(Error::new(ErrorKind::NotSupported, operation, detail));
        }
        if ring.len() < shape.capacity() {
            let detail = format!("{} bytes, for a ring of {}", ring.len(), shape.capacity());
            return Err(Error::new(ErrorKind::OutOfBounds, operation, detail));
        }
        let most = capabilities.max_message_size as u64;
        let longest_payload = longest_payload.min(most.saturating_sub(HEADER)).max(1);
        let headers = HostMemory::zeroed(SLOTS as usize * HEADER as usize)?;
        let headers = domain.register(headers, Access::WRITE)?;
        activate(&headers, endpoint)?;
        let writer = Writer::new(shape, epoch, longest_payload);
        let free = (0..SLOTS).rev().collect();
        Ok(Self { writer, shape, peer, ring, headers, free, credit })
    }

    /// Begins a message of so many bytes. The one before must be written first.
    pub fn begin(&mut self, topic: u32, length: u64) -> Message {
        self.writer.begin(topic, length)
    }

    /// Posts the message's next chunk, if there is room for it. `payload` is the whole
    /// message.
    ///
    /// # Errors
    /// `OutOfBounds` if the payload is shorter than the message; what the fabric says. The
    /// message can be pushed again.
    pub fn push(
        &mut self,
        endpoint: &mut Endpoint,
        queue: &mut CompletionQueue,
        message: &mut Message,
        payload: &RegionSlice,
    ) -> Result<Pushed> {
        if message.is_written() {
            return Ok(Pushed::Written);
        }
        let chunk = match self.writer.plan(message) {
            Ok(chunk) => chunk,
            Err(blocked) => return Ok(Pushed::Blocked(blocked)),
        };
        let (from, length) = (chunk.header.offset as usize, chunk.header.payload as usize);
        if from + length > payload.len() {
            let detail =
                format!("{} bytes, of a message of {}", payload.len(), chunk.header.length);
            return Err(Error::new(ErrorKind::OutOfBounds, "writing to a ring", detail));
        }
        let Some(slot) = self.free.last().copied() else { return Ok(Pushed::Busy) };
        let at = slot as usize * HEADER as usize;
        self.headers.write(at, &chunk.header.encode())?;
        let header = self.headers.slice(at..at + HEADER as usize)?;
        let target = self.ring.slice(chunk.offset..chunk.offset + HEADER + length as u64)?;
        let token = TOKEN | u64::from(self.shape.ring()) << 16 | u64::from(slot);
        let options = Options::token(token).patience(std::time::Duration::ZERO);
        let data = Some(u64::from(chunk.immediate));
        let posted = if length == 0 {
            endpoint.write_gathered(queue, self.peer, &[&header], &target, data, options)
        } else {
            let from = payload.offset() + from;
            let body = payload.region().slice(from..from + length)?;
            endpoint.write_gathered(queue, self.peer, &[&header, &body], &target, data, options)
        };
        match posted {
            Ok(_) => {
                self.free.pop();
                self.writer.commit(message, &chunk);
                Ok(Pushed::Posted(length as u64))
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(Pushed::Busy),
            Err(error) => Err(error),
        }
    }

    /// Looks at what a queue gave: true if it was this ring's business.
    ///
    /// # Errors
    /// A chunk that failed: the ring is broken.
    pub fn accept(&mut self, outcome: &Outcome) -> Result<bool> {
        let completion = match outcome {
            Ok(completion) => completion,
            Err(failure) if self.is_ours(failure.token) => return Err(failure.error.clone()),
            Err(_) => return Ok(false),
        };
        match (completion.kind, completion.data) {
            (CompletionKind::Write, _) if self.is_ours(completion.token) => {
                self.free.push(completion.token as u16 as u32);
                Ok(true)
            }
            (CompletionKind::RemoteWrite, Some(data)) => {
                Ok(self.writer.credit(&Immediate::decode(data as u32)))
            }
            _ => Ok(false),
        }
    }

    fn is_ours(&self, token: u64) -> bool {
        token >> 16 == TOKEN >> 16 | u64::from(self.shape.ring())
    }

    /// The next message that the reader let go of: its memory is free.
    pub fn next_read(&mut self) -> Option<u64> {
        self.writer.next_read()
    }

    /// The positions behind it.
    #[must_use]
    pub fn writer(&self) -> &Writer {
        &self.writer
    }

    /// Where credit arrives.
    #[must_use]
    pub fn credit_region(&self) -> &MemoryRegion {
        &self.credit
    }
}

/// Binds and enables a region where the provider demands it.
pub(super) fn activate(region: &MemoryRegion, endpoint: &Endpoint) -> Result<()> {
    if region.is_registered() && !region.is_enabled() {
        region.bind_endpoint(endpoint)?;
        region.enable()?;
    }
    Ok(())
}
