//! The transport of a worker's topics: the endpoint's port, and shared memory.

mod buffers;
mod copy_threads;
pub(in crate::replication) mod host_memory;

use fabric::RegionSlice;
use fabric::ring::{ChunkHeader, ChunkView, Message, Port, Pushed, ReceiverId, SenderId};
use gpu::{Memory, Point};

use self::copy_threads::CopyThreads;
use super::PayloadLocation;
use crate::error::{Error, ErrorKind, Result};
use crate::replication::inbound::{Chunk, InboundTransport};
use crate::replication::message_header::RingMessageKind;
use crate::replication::outbound::{OutboundTransport, Part, RingProgress};
use crate::replication::transport::buffers::{
    BatchBuffers, CopyStreams, RegistrationCache, StagingSlots,
};

/// Shorter messages use only the first lane of their ring: striping them is not worth waking a
/// thread.
pub(super) const MIN_STRIPED_LENGTH: u64 = 1 << 20;
const WRITE: &str = "write to node";
const READ: &str = "read from node";

/// Port, completion queue and registered memory of a worker; all its topics write through it.
pub(super) struct Transport {
    // The endpoint is dropped before the memory.
    port: Port,
    batch_buffers: BatchBuffers,
    slots: StagingSlots,
    registrations: RegistrationCache,
    out: CopyStreams,
    into: CopyStreams,
    copy_threads: CopyThreads,
    /// Rings that topics closed.
    closed: Vec<SenderId>,
}

impl Transport {
    pub(super) fn new(port: Port, piece: usize, slots: usize) -> Self {
        Self {
            copy_threads: CopyThreads::of(port.lanes()),
            port,
            batch_buffers: BatchBuffers::new(),
            slots: StagingSlots::new(piece + super::TRAILER_LENGTH, slots),
            registrations: RegistrationCache::new(),
            out: CopyStreams::default(),
            into: CopyStreams::default(),
            closed: Vec::new(),
        }
    }

    pub(super) fn port(&self) -> &Port {
        &self.port
    }

    pub(super) fn port_mut(&mut self) -> &mut Port {
        &mut self.port
    }

    /// Rings that topics have closed since the last call.
    pub(super) fn take_closed(&mut self) -> impl Iterator<Item = SenderId> {
        self.closed.drain(..)
    }

    /// Access of an inbound topic, for one turn. `pinned`: the ring's memory, pinned for its
    /// device.
    pub(super) fn input<'a>(
        &'a mut self,
        ring: Option<ReceiverId>,
        pinned: Option<&'a Memory>,
    ) -> RingInput<'a> {
        let Self { port, into, copy_threads, .. } = self;
        RingInput { port, into, copy_threads, ring, pinned, has_taken: false }
    }

    /// Releases memory that only this worker still uses.
    pub(super) fn release_unused(&mut self) {
        self.registrations.release_unused();
    }

    /// Closes the endpoint, and then releases all memory.
    pub(super) fn close(self) -> Result<()> {
        self.port.close().map_err(|error| Error::of("close endpoint", error))
    }

    fn start(region: &fabric::MemoryRegion, length: usize) -> Result<RegionSlice> {
        region.slice(0..length).map_err(|error| Error::of(WRITE, error))
    }
}

impl OutboundTransport for Transport {
    type Ring = SenderId;
    type PayloadLocation = PayloadLocation;
    type CopyHandle = Point;

    fn is_staged(&self, payload: &PayloadLocation) -> bool {
        matches!(payload, PayloadLocation::Device(_))
    }

    fn begin(&self, ring: SenderId, form: RingMessageKind, length: u64) -> Result<Message> {
        self.port.begin(ring, form.number(), length).map_err(|error| Error::of(WRITE, error))
    }

    #[inline]
    fn push(
        &mut self,
        ring: SenderId,
        message: &mut Message,
        part: Part<'_, PayloadLocation>,
        at: u64,
    ) -> Result<Pushed> {
        let of_fabric = |error| Error::of(WRITE, error);
        let lane = match part {
            Part::BatchBuffer { .. } => 0,
            _ if message.length() < MIN_STRIPED_LENGTH => 0,
            _ => {
                let left = message.length() - message.written();
                match self.port.pick_lane(ring, left).map_err(of_fabric)? {
                    Some(lane) => lane,
                    None => return Ok(Pushed::Busy),
                }
            }
        };
        let (part, at) = match part {
            Part::BatchBuffer { batch_buffer, length } => {
                (Self::start(self.batch_buffers.get(batch_buffer)?, length)?, at)
            }
            Part::Slot { slot, length } => {
                (Self::start(self.slots.region(slot, lane, &self.port)?, length)?, at)
            }
            Part::Direct(payload) => {
                let written = message.written();
                let from = written - at;
                (self.registrations.part(payload.slice(), from, lane, &self.port)?, written)
            }
        };
        // Positions suffice here: drop the acknowledgements of single messages.
        while self.port.next_read(ring).map_err(of_fabric)?.is_some() {}
        self.port.push_on_lane(lane, ring, message, &part, at).map_err(of_fabric)
    }

    fn ring_progress(&self, ring: SenderId) -> Result<RingProgress> {
        let sender = self.port.sender(ring).map_err(|error| Error::of(WRITE, error))?;
        if let Some(broken) = sender.broken() {
            return Err(Error::of(WRITE, broken.clone()));
        }
        let writer = sender.writer();
        Ok(RingProgress {
            tail: writer.tail(),
            left: sender.completed_to(),
            read: writer.known_head(),
        })
    }

    fn is_quiescent(&mut self, ring: SenderId) -> bool {
        self.port.stop_sender(ring);
        !self.port.sender(ring).is_ok_and(|sender| sender.unfinished() > 0)
    }

    fn close(&mut self, ring: SenderId) {
        self.port.drop_sender(ring);
        self.closed.push(ring);
    }

    fn max_single_chunk(&self, ring: SenderId) -> Result<usize> {
        let sender = self.port.sender(ring).map_err(|error| Error::of(WRITE, error))?;
        Ok(sender.writer().max_single_chunk() as usize)
    }

    fn take_batch_buffer(&mut self, is_first: bool) -> Option<u32> {
        self.batch_buffers.take(is_first, self.port.endpoint())
    }

    fn release_batch_buffer(&mut self, batch_buffer: u32, is_quarantined: bool) {
        self.batch_buffers.release(batch_buffer, is_quarantined);
    }

    fn write_batch_buffer(&mut self, batch_buffer: u32, at: usize, bytes: &[u8]) -> Result<()> {
        self.batch_buffers
            .get(batch_buffer)?
            .write(at, bytes)
            .map_err(|error| Error::of(WRITE, error))
    }

    fn gather(
        &mut self,
        batch_buffer: u32,
        at: usize,
        from: &PayloadLocation,
        length: usize,
    ) -> Result<()> {
        host_memory::gather(from.slice(), length, self.batch_buffers.get(batch_buffer)?, at)
    }

    fn take_slot(&mut self, like: &PayloadLocation, is_first: bool) -> Result<Option<u32>> {
        let device = like.slice().memory().mapped_for();
        self.slots.take(device, is_first, &self.port)
    }

    fn release_slot(&mut self, slot: u32, is_quarantined: bool) {
        self.slots.release(slot, is_quarantined);
    }

    fn write_slot(&mut self, slot: u32, at: usize, bytes: &[u8]) -> Result<()> {
        self.slots
            .region(slot, 0, &self.port)?
            .write(at, bytes)
            .map_err(|error| Error::of(WRITE, error))
    }

    fn copy_out(
        &mut self,
        slot: u32,
        from: &PayloadLocation,
        offset: u64,
        length: u64,
    ) -> Result<Point> {
        let to = self.slots.pinned(slot, length)?;
        let from = from.slice();
        let piece =
            from.slice(offset, length).map_err(|error| Error::of("copy message out", error))?;
        self.out.copy(from.memory().mapped_for(), &to, &piece)
    }

    fn is_copied(&mut self, copy_handle: &Point) -> Result<bool> {
        copy_handle.is_done().map_err(|error| Error::of("copy message out", error))
    }
}

/// A chunk received by a ring.
pub(super) struct ReceivedChunk(ChunkView);

impl Chunk for ReceivedChunk {
    #[inline]
    fn header(&self) -> &ChunkHeader {
        self.0.header()
    }

    #[inline]
    fn is_last(&self) -> bool {
        self.0.is_last()
    }

    #[inline]
    fn read(&self, at: usize, into: &mut [u8]) -> Result<()> {
        self.0.read(at, into).map_err(|error| Error::of(READ, error))
    }
}

/// A pending copy into a payload.
#[derive(Debug)]
pub(super) enum CopyHandle {
    Device(Point),
    CopyThread(u64),
}

/// Access of one inbound topic to the transport, for one turn.
pub(super) struct RingInput<'a> {
    port: &'a mut Port,
    into: &'a mut CopyStreams,
    copy_threads: &'a mut CopyThreads,
    ring: Option<ReceiverId>,
    pinned: Option<&'a Memory>,
    has_taken: bool,
}

impl RingInput<'_> {
    /// Whether a chunk was taken.
    pub(super) fn has_taken(&self) -> bool {
        self.has_taken
    }
}

impl InboundTransport for RingInput<'_> {
    type Chunk = ReceivedChunk;
    type PayloadLocation = PayloadLocation;
    type CopyHandle = CopyHandle;

    #[inline]
    fn take(&mut self) -> Result<Option<ReceivedChunk>> {
        let Some(ring) = self.ring else { return Ok(None) };
        let view = self.port.take(ring).map_err(|error| match error.kind() {
            fabric::ErrorKind::Closed => Error::because(READ, ErrorKind::Closed, error),
            _ => Error::of(READ, error),
        })?;
        self.has_taken |= view.is_some();
        Ok(view.map(ReceivedChunk))
    }

    #[inline]
    fn copy_in(
        &mut self,
        chunk: &ReceivedChunk,
        from: usize,
        length: usize,
        to: &PayloadLocation,
        at: u64,
    ) -> Result<Option<CopyHandle>> {
        let to = match to {
            PayloadLocation::Host(slice) => {
                if length >= copy_threads::MIN_COPY_LENGTH
                    && let Some(number) =
                        self.copy_threads.submit_chunk(&chunk.0, from, length, slice, at)?
                {
                    return Ok(Some(CopyHandle::CopyThread(number)));
                }
                return host_memory::unload(&chunk.0, from, length, slice, at).map(|()| None);
            }
            PayloadLocation::Device(slice) => slice,
        };
        let from_device = |error| Error::of("copy message in", error);
        let (Some(pinned), Some(slice)) = (self.pinned, chunk.0.slice()) else {
            let detail = "the sink returned device memory, but the topic has no device";
            return Err(Error::new("copy message in", ErrorKind::InvalidArgument, detail));
        };
        let start = (slice.offset() + from) as u64;
        let piece = pinned.slice(start, length as u64).map_err(from_device)?;
        let target = to.slice(at, length as u64).map_err(from_device)?;
        let copy = self.into.copy(to.memory().mapped_for(), &target, &piece);
        copy.map(|point| Some(CopyHandle::Device(point)))
    }

    fn is_copied(&mut self, copy_handle: &CopyHandle) -> Result<bool> {
        match copy_handle {
            CopyHandle::Device(point) => {
                point.is_done().map_err(|error| Error::of("copy message in", error))
            }
            CopyHandle::CopyThread(number) => Ok(self.copy_threads.is_done(*number)),
        }
    }
}
