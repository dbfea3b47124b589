//! The transport of a worker's topics: the endpoint's port, and shared memory.

mod buffers;
mod copy_threads;
pub(crate) mod host_memory;

use std::collections::HashMap;

use fabric::RegionSlice;
use fabric::ring::{
    ChunkHeader, ChunkView, Message, Port, Pushed, ReceiverId, RingSender, SenderId,
};
use gpu::{Device, Memory, Point};
use ipc::Layout;
use transfer::device_memory;

use self::copy_threads::CopyThreads;
use self::host_memory::MappedSpan;
use super::{PayloadLocation, RingProgress};
use crate::error::{Error, ErrorKind, Result};
use crate::replication::inbound::{Chunk, InboundTransport};
use crate::replication::message_header::{RingMessageKind, TRAILER_LENGTH};
use crate::replication::outbound::{OutboundTransport, Part};
use crate::replication::probe::RingProbe;
use crate::replication::transport::buffers::{
    BatchBuffers, CopyStreams, ProbeSource, SourceRegistrations, StagingSlots, host_region,
};

/// Shorter messages use only the first lane of their ring: striping them is not worth waking a
/// thread.
pub(super) const MIN_STRIPED_LENGTH: u64 = 1 << 20;
/// Bytes at the end of a chunk that are looked at first.
const TAIL_LENGTH: u64 = 4096;
const MIRROR: Layout = Layout::new("replication probe", 1);
const WRITE: &str = "write to node";
const READ: &str = "read from node";

/// Port, completion queue and registered memory of a worker; all its topics write through it.
pub(super) struct Transport {
    // The endpoint is dropped before the memory.
    port: Port,
    batch_buffers: BatchBuffers,
    slots: StagingSlots,
    registrations: SourceRegistrations,
    out: CopyStreams,
    into: CopyStreams,
    copy_threads: CopyThreads,
    /// What the probes of rings are written from.
    probes: HashMap<SenderId, ProbeSource>,
    /// Memory for empty payloads.
    empty: Option<fabric::MemoryRegion>,
    closed: Vec<SenderId>,
}

/// How devices reach the memory of a ring.
pub(super) struct RingDeviceAccess {
    /// The memory of the ring: on the device, or pinned for it.
    memory: Memory,
    /// The ring lies in device memory.
    is_direct: bool,
    /// Where its chunks are looked at during a probe.
    mirror: Option<MappedSpan>,
}

impl RingDeviceAccess {
    /// A ring in host memory that is pinned for a device.
    pub(super) fn pinned(span: &MappedSpan) -> Self {
        Self { memory: Memory::clone(span.memory()), is_direct: false, mirror: None }
    }

    /// A ring in device memory, which is probed or not.
    pub(super) fn on_device(memory: Memory, is_probed: bool) -> Result<Self> {
        let device = memory.mapped_for();
        let length = memory.length() as usize;
        let mirror = is_probed.then(|| MappedSpan::pinned(MIRROR, length, device, READ));
        Ok(Self { mirror: mirror.transpose()?, memory, is_direct: true })
    }

    pub(super) fn end_probe(&mut self) {
        self.mirror = None;
    }
}

impl Transport {
    pub(super) fn new(port: Port, piece: usize, slots: usize) -> Self {
        Self {
            copy_threads: CopyThreads::of(port.lanes()),
            port,
            batch_buffers: BatchBuffers::new(),
            slots: StagingSlots::new(piece + TRAILER_LENGTH, slots),
            registrations: SourceRegistrations::default(),
            out: CopyStreams::default(),
            into: CopyStreams::default(),
            probes: HashMap::new(),
            empty: None,
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

    /// Access of an inbound topic, for one turn, with that of its device to the ring.
    pub(super) fn input<'a>(
        &'a mut self,
        ring: Option<ReceiverId>,
        device_access: Option<&'a RingDeviceAccess>,
    ) -> RingInput<'a> {
        let Self { port, into, copy_threads, .. } = self;
        RingInput { port, into, copy_threads, ring, device_access, has_taken: false }
    }

    /// Prepares the probe of a ring, whose messages are written from memory of this device, or of
    /// the host.
    pub(super) fn begin_probe(
        &mut self,
        ring: SenderId,
        probe: &RingProbe,
        device: Option<&Device>,
    ) -> Result<()> {
        let source = ProbeSource::new(probe, device, &mut self.out)?;
        self.probes.insert(ring, source);
        Ok(())
    }

    /// The rings are closed, and so is their endpoint.
    pub(super) fn forget_probes(&mut self) {
        self.probes.clear();
    }

    /// No bytes of registered memory.
    fn empty(&mut self) -> fabric::Result<RegionSlice> {
        let region = match self.empty.take() {
            Some(region) => region,
            None => host_region(self.port.endpoint(), 64)?,
        };
        self.empty.insert(region).slice(0..0)
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
        region.slice(0..length).map_err(write_failed)
    }

    fn sender(&self, ring: SenderId) -> Result<&RingSender> {
        self.port.sender(ring).map_err(write_failed)
    }
}

#[cold]
fn no_probe() -> Error {
    Error::new("probe ring in device memory", ErrorKind::Closed, "the ring has no probe")
}

fn write_failed(error: fabric::Error) -> Error {
    Error::of(WRITE, error)
}

fn copy_out_failed(error: gpu::Error) -> Error {
    Error::of("copy message out", error)
}

fn copy_in_failed(error: gpu::Error) -> Error {
    Error::of("copy message in", error)
}

impl OutboundTransport for Transport {
    type Ring = SenderId;
    type PayloadLocation = PayloadLocation;
    type CopyHandle = Point;

    fn is_staged(&self, payload: &PayloadLocation) -> bool {
        matches!(payload, PayloadLocation::Device(_))
    }

    fn begin(&self, ring: SenderId, form: RingMessageKind, length: u64) -> Result<Message> {
        self.port.begin(ring, form.number(), length).map_err(write_failed)
    }

    #[inline]
    fn push(
        &mut self,
        ring: SenderId,
        message: &mut Message,
        (part, at): (Part<'_, PayloadLocation>, u64),
        inline: &[u8],
    ) -> Result<Pushed> {
        let lane = match part {
            Part::BatchBuffer { .. } | Part::Nothing => 0,
            _ if message.length() < MIN_STRIPED_LENGTH => 0,
            _ => {
                let left = message.length() - message.written();
                match self.port.pick_lane(ring, left).map_err(write_failed)? {
                    Some(lane) => lane,
                    None => return Ok(Pushed::Busy),
                }
            }
        };
        let (part, at) = match part {
            Part::BatchBuffer { batch_buffer, length } => {
                (Self::start(self.batch_buffers.region(batch_buffer)?, length)?, at)
            }
            Part::Slot { slot, length } => {
                (Self::start(self.slots.region(slot, lane, &self.port)?, length)?, at)
            }
            Part::Direct(payload) => {
                let written = message.written();
                let from = written - at;
                (self.registrations.part(payload, from, lane, &self.port)?, written)
            }
            Part::Probe { offset, length } => {
                let source = self.probes.get_mut(&ring).ok_or_else(no_probe)?;
                let part = source.part((offset, length), lane, &self.port);
                (part.map_err(write_failed)?, 0)
            }
            Part::Nothing => (self.empty().map_err(write_failed)?, 0),
        };
        // Positions suffice here: drop the acknowledgements of single messages.
        while self.port.next_read(ring).map_err(write_failed)?.is_some() {}
        self.port.push_with(lane, ring, message, (&part, at), inline).map_err(write_failed)
    }

    fn is_probe_ready(&mut self, ring: SenderId) -> Result<bool> {
        self.probes.get(&ring).ok_or_else(no_probe)?.is_ready()
    }

    fn end_probe(&mut self, ring: SenderId) {
        self.probes.remove(&ring);
    }

    fn ring_progress(&self, ring: SenderId) -> Result<RingProgress> {
        let sender = self.sender(ring)?;
        if let Some(broken) = sender.broken() {
            return Err(write_failed(broken.clone()));
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
        self.probes.remove(&ring);
        self.closed.push(ring);
    }

    fn max_single_chunk(&self, ring: SenderId) -> Result<usize> {
        Ok(self.sender(ring)?.writer().max_single_chunk() as usize)
    }

    fn take_batch_buffer(&mut self, is_first: bool) -> Option<u32> {
        self.batch_buffers.take_region(is_first, self.port.endpoint())
    }

    fn release_batch_buffer(&mut self, batch_buffer: u32, is_quarantined: bool) {
        self.batch_buffers.release(batch_buffer, is_quarantined);
    }

    fn write_batch_buffer(&mut self, batch_buffer: u32, at: usize, bytes: &[u8]) -> Result<()> {
        self.batch_buffers.region(batch_buffer)?.write(at, bytes).map_err(write_failed)
    }

    fn gather(
        &mut self,
        batch_buffer: u32,
        at: usize,
        from: &PayloadLocation,
        length: usize,
    ) -> Result<()> {
        host_memory::gather(from.slice(), length, self.batch_buffers.region(batch_buffer)?, at)
    }

    fn take_slot(&mut self, like: &PayloadLocation, is_first: bool) -> Result<Option<u32>> {
        let device = like.slice().memory().mapped_for();
        self.slots.take(device, is_first, &self.port)
    }

    fn release_slot(&mut self, slot: u32, is_quarantined: bool) {
        self.slots.release(slot, is_quarantined);
    }

    fn write_slot(&mut self, slot: u32, at: usize, bytes: &[u8]) -> Result<()> {
        self.slots.region(slot, 0, &self.port)?.write(at, bytes).map_err(write_failed)
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
        let piece = from.slice(offset, length).map_err(copy_out_failed)?;
        self.out.copy(from.memory().mapped_for(), &to, &piece)
    }

    fn is_copied(&mut self, copy_handle: &Point) -> Result<bool> {
        copy_handle.is_done().map_err(copy_out_failed)
    }
}

impl Chunk for ChunkView {
    #[inline]
    fn header(&self) -> &ChunkHeader {
        ChunkView::header(self)
    }

    #[inline]
    fn is_last(&self) -> bool {
        ChunkView::is_last(self)
    }

    #[inline]
    fn read(&self, at: usize, into: &mut [u8]) -> Result<()> {
        ChunkView::read(self, at, into).map_err(|error| Error::of(READ, error))
    }

    fn inline_data(&self) -> Result<Vec<u8>> {
        ChunkView::inline_data(self).map_err(|error| Error::of(READ, error))
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
    device_access: Option<&'a RingDeviceAccess>,
    has_taken: bool,
}

impl RingInput<'_> {
    /// Returns true if a chunk was taken.
    pub(super) fn has_taken(&self) -> bool {
        self.has_taken
    }
}

impl InboundTransport for RingInput<'_> {
    type Chunk = ChunkView;
    type PayloadLocation = PayloadLocation;
    type CopyHandle = CopyHandle;

    #[inline]
    fn take(&mut self) -> Result<Option<ChunkView>> {
        let Some(ring) = self.ring else { return Ok(None) };
        let view = self.port.take(ring).map_err(|error| match error.kind() {
            fabric::ErrorKind::Closed => Error::because(READ, ErrorKind::Closed, error),
            _ => Error::of(READ, error),
        })?;
        let was_first = view.is_some() && !std::mem::replace(&mut self.has_taken, true);
        // Notices are taken between turns, except for the last ones of a broken ring.
        let is_broken = || self.port.receiver(ring).is_ok_and(|it| it.broken().is_some());
        if let Some(access) = self.device_access.filter(|access| access.is_direct)
            && view.is_some()
            && (was_first || is_broken())
        {
            // The notices may have overtaken their bytes on the way into the device.
            let flushed = device_memory::flush(access.memory.mapped_for());
            flushed.map_err(|error| Error::of(READ, error))?;
        }
        Ok(view)
    }

    #[inline]
    fn copy_in(
        &mut self,
        chunk: &ChunkView,
        from: usize,
        length: usize,
        to: &PayloadLocation,
        at: u64,
    ) -> Result<Option<CopyHandle>> {
        let to = match to {
            PayloadLocation::Host(slice) => {
                let part = || host_memory::part(chunk, from, length);
                if length >= copy_threads::MIN_COPY_LENGTH
                    && let Some(number) = self.copy_threads.submit(part, slice, at)?
                {
                    return Ok(Some(CopyHandle::CopyThread(number)));
                }
                return host_memory::unload(chunk, from, length, slice, at).map(|()| None);
            }
            PayloadLocation::Device(slice) => slice,
        };
        let (Some(access), Some(slice)) = (self.device_access, chunk.slice()) else {
            let detail = "the sink returned device memory, but the topic has no device";
            return Err(Error::new("copy message in", ErrorKind::InvalidArgument, detail));
        };
        let start = (slice.offset() + from) as u64;
        let piece = access.memory.slice(start, length as u64).map_err(copy_in_failed)?;
        let target = to.slice(at, length as u64).map_err(copy_in_failed)?;
        let copy = self.into.copy(to.memory().mapped_for(), &target, &piece);
        copy.map(|point| Some(CopyHandle::Device(point)))
    }

    fn is_copied(&mut self, copy_handle: &CopyHandle) -> Result<bool> {
        match copy_handle {
            CopyHandle::Device(point) => point.is_done().map_err(copy_in_failed),
            CopyHandle::CopyThread(number) => Ok(self.copy_threads.is_done(*number)),
        }
    }

    fn look(&mut self, chunk: &ChunkView) -> Result<CopyHandle> {
        let (Some(RingDeviceAccess { memory, mirror: Some(mirror), .. }), Some(slice)) =
            (self.device_access, chunk.slice())
        else {
            return Err(no_probe());
        };
        let (start, length) = (slice.offset() as u64, slice.len() as u64);
        let tail = length.min(TAIL_LENGTH);
        let mut last = None;
        for (from, length) in [(start + length - tail, tail), (start, length - tail)] {
            if length > 0 {
                let piece = memory.slice(from, length).map_err(copy_in_failed)?;
                let to = mirror.memory().slice(from, length).map_err(copy_in_failed)?;
                last = Some(self.into.copy(memory.mapped_for(), &to, &piece)?);
            }
        }
        last.map(CopyHandle::Device).ok_or_else(no_probe)
    }

    fn seen(&mut self, chunk: &ChunkView) -> Result<Vec<u8>> {
        let (Some(RingDeviceAccess { mirror: Some(mirror), .. }), Some(slice)) =
            (self.device_access, chunk.slice())
        else {
            return Err(no_probe());
        };
        mirror.read(slice.offset(), slice.len())
    }
}
