//! Memory shared by all topics of a worker: batch buffers, staging slots, and registrations.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use fabric::ring::Port;
use fabric::{Access, Domain, Endpoint, MemoryRegion, RegionSlice};
use gpu::{Device, DeviceName, Implementation, Slice};
use ipc::Layout;
use transfer::{Buffer, HostBuffer, device_memory};

use crate::error::{Error, ErrorKind, Result};
use crate::replication::PayloadLocation;
use crate::replication::outbound::BATCH_BUFFER_LENGTH;
use crate::replication::probe::RingProbe;
use crate::replication::slab::Slab;
use crate::replication::transport::host_memory::MappedSpan;

/// Limit of batch buffers of all topics of a worker.
const MAX_BATCH_BUFFERS: usize = 64;
const SLOT: Layout = Layout::new("replication slot", 1);
const PROBE: &str = "probe ring in device memory";

/// Items that are in use or free.
pub(super) struct BufferSlab<T> {
    items: Slab<T>,
    free: Vec<u32>,
}

impl<T> BufferSlab<T> {
    pub(super) fn new() -> Self {
        Self { items: Slab::default(), free: Vec::new() }
    }

    /// Returns an item to the free ones; drops it if it is quarantined, since it may still be in
    /// use.
    pub(super) fn release(&mut self, index: u32, is_quarantined: bool) {
        match is_quarantined {
            true => drop(self.items.take(index as usize)),
            false => self.free.push(index),
        }
    }

    /// Takes a free item, or a new one below the limit or if it is the caller's first.
    fn take<E>(
        &mut self,
        (is_first, max_count): (bool, usize),
        make: impl FnOnce() -> std::result::Result<T, E>,
    ) -> std::result::Result<Option<u32>, E> {
        if let Some(index) = self.free.pop() {
            return Ok(Some(index));
        }
        if self.items.iter().count() >= max_count && !is_first {
            return Ok(None);
        }
        Ok(Some(self.items.put(make()?) as u32))
    }
}

/// Memory that is written from.
enum SourceMemory {
    Host(Arc<MappedSpan>),
    Buffer(Arc<Buffer>, Range<u64>),
}

impl SourceMemory {
    /// A range of a payload's memory; all ranges of a memory share one handle of it, which `first`
    /// has. None for host memory that the CPU does not reach.
    fn of(payload: &PayloadLocation, first: Option<&Self>, range: &Range<u64>) -> Option<Self> {
        let memory = payload.slice().memory();
        if let PayloadLocation::Device(_) = payload {
            let buffer = match first {
                Some(Self::Buffer(buffer, _)) => Arc::clone(buffer),
                _ => Arc::new(Buffer::Device(memory.clone())),
            };
            return Some(Self::Buffer(buffer, range.clone()));
        }
        let held = match first {
            Some(Self::Host(span)) => Arc::clone(span.memory()),
            _ => Arc::new(memory.clone()),
        };
        let span = MappedSpan::new(held, range.start, range.end - range.start)?;
        Some(Self::Host(Arc::new(span)))
    }

    fn register(&self, domain: &Domain) -> fabric::Result<MemoryRegion> {
        match self {
            Self::Host(span) => domain.register(Arc::clone(span), Access::WRITE),
            Self::Buffer(buffer, range) => {
                let (buffer, range) = (Arc::clone(buffer), range.clone());
                device_memory::register_range(domain, buffer, range, Access::WRITE)
            }
        }
    }

    /// Returns true if another part of the process has a handle of a payload's memory.
    fn is_in_use(&self) -> bool {
        match self {
            Self::Host(span) => span.memory().is_shared(),
            Self::Buffer(buffer, _) => {
                matches!(&**buffer, Buffer::Device(memory) if memory.is_shared())
            }
        }
    }
}

/// Memory that is written from, registered per lane on first use. Pinning one GiB takes
/// half a second where a provider does that. So memory that a further lane never writes is not
/// registered for it.
struct LaneRegistrations {
    memory: SourceMemory,
    regions: Vec<Option<MemoryRegion>>,
}

impl LaneRegistrations {
    fn new(memory: SourceMemory) -> Self {
        Self { memory, regions: Vec::new() }
    }

    fn get(&mut self, lane: usize, port: &Port) -> fabric::Result<&MemoryRegion> {
        if self.regions.len() <= lane {
            self.regions.resize_with(lane + 1, || None);
        }
        let slot = &mut self.regions[lane];
        if let Some(region) = slot {
            return Ok(region);
        }
        let domain = port.lane_domain(lane).unwrap_or(port.endpoint().domain());
        let region = self.memory.register(domain)?;
        match lane {
            0 => region.enable_for(port.endpoint())?,
            // Where memory belongs to an endpoint, there are no further lanes.
            _ if region.is_registered() => region.enable()?,
            _ => {}
        }
        Ok(slot.insert(region))
    }
}

/// The bytes that the probe of a ring is written from, in memory of the same kind as the messages.
pub(super) struct ProbeSource {
    memory: LaneRegistrations,
    /// The copy that brings them into device memory, and what it reads.
    copy: Option<(gpu::Point, MappedSpan)>,
}

impl ProbeSource {
    pub(super) fn new(
        probe: &RingProbe,
        device: Option<&Device>,
        streams: &mut CopyStreams,
    ) -> Result<Self> {
        let bytes = probe.bytes(probe.source());
        let length = bytes.len() as u64;
        let (buffer, copy) = match device {
            None => {
                let buffer = HostBuffer::from_vec(bytes);
                (Buffer::Host(buffer.map_err(|error| Error::of(PROBE, error))?), None)
            }
            Some(device) => {
                let from = MappedSpan::pinned(SLOT, bytes.len(), device, PROBE)?;
                from.write(0, &bytes)?;
                let of_device = |error| Error::of(PROBE, error);
                let memory = device.allocate_shared(length, &[]).map_err(of_device)?;
                let to = memory.slice(0, length).map_err(of_device)?;
                let piece = from.memory().slice(0, length).map_err(of_device)?;
                let copied = streams.copy(device, &to, &piece)?;
                (Buffer::Device(memory), Some((copied, from)))
            }
        };
        let memory = SourceMemory::Buffer(Arc::new(buffer), 0..length);
        Ok(Self { memory: LaneRegistrations::new(memory), copy })
    }

    pub(super) fn is_ready(&self) -> Result<bool> {
        let Some((copied, _)) = &self.copy else { return Ok(true) };
        copied.is_done().map_err(|error| Error::of(PROBE, error))
    }

    /// A part of the bytes as a lane's registered region.
    pub(super) fn part(
        &mut self,
        (offset, length): (u64, u64),
        lane: usize,
        port: &Port,
    ) -> fabric::Result<RegionSlice> {
        self.memory.get(lane, port)?.slice(offset as usize..(offset + length) as usize)
    }
}

/// Zeroed host memory that an endpoint writes from.
pub(super) fn host_region(endpoint: &Endpoint, length: usize) -> fabric::Result<MemoryRegion> {
    let memory = fabric::HostMemory::zeroed(length)?;
    let region = endpoint.domain().register(memory, Access::WRITE)?;
    region.enable_for(endpoint).map(|()| region)
}

/// Host memory that small messages are collected in, and written from.
pub(super) type BatchBuffers = BufferSlab<MemoryRegion>;

impl BatchBuffers {
    pub(super) fn take_region(&mut self, is_first: bool, endpoint: &Endpoint) -> Option<u32> {
        let make = || host_region(endpoint, BATCH_BUFFER_LENGTH);
        self.take((is_first, MAX_BATCH_BUFFERS), make).unwrap_or_else(|error| {
            tracing::warn!(%error, "no memory for a batch buffer");
            None
        })
    }

    pub(super) fn region(&self, batch_buffer: u32) -> Result<&MemoryRegion> {
        self.items.get(batch_buffer as usize).ok_or_else(|| missing("batch buffer"))
    }
}

/// Host memory that devices copy to, and that is written from.
struct Slot {
    registrations: LaneRegistrations,
    span: Arc<MappedSpan>,
}

/// Staging slots; each serves one kind of device.
pub(super) struct StagingSlots {
    slabs: HashMap<Implementation, BufferSlab<Slot>>,
    length: usize,
    max_count: usize,
}

/// The id of a slot includes its kind of device.
fn slot_id(implementation: Implementation, index: u32) -> u32 {
    index << 1 | u32::from(implementation == Implementation::Cuda)
}

fn parse_slot_id(slot: u32) -> (Implementation, u32) {
    let implementation =
        if slot & 1 == 1 { Implementation::Cuda } else { Implementation::Emulated };
    (implementation, slot >> 1)
}

impl StagingSlots {
    pub(super) fn new(length: usize, max_count: usize) -> Self {
        Self { slabs: HashMap::new(), length, max_count }
    }

    pub(super) fn take(
        &mut self,
        device: &Device,
        is_first: bool,
        port: &Port,
    ) -> Result<Option<u32>> {
        let implementation = device.name().implementation;
        let slab = self.slabs.entry(implementation).or_insert_with(BufferSlab::new);
        let taken = slab.take((is_first, self.max_count), || {
            let operation = "create staging slot";
            let span = Arc::new(MappedSpan::pinned(SLOT, self.length, device, operation)?);
            let mut registrations = LaneRegistrations::new(SourceMemory::Host(Arc::clone(&span)));
            registrations.get(0, port).map_err(|error| Error::of(operation, error))?;
            Ok::<_, Error>(Slot { registrations, span })
        })?;
        Ok(taken.map(|index| slot_id(implementation, index)))
    }

    pub(super) fn release(&mut self, slot: u32, is_quarantined: bool) {
        let (implementation, index) = parse_slot_id(slot);
        if let Some(slab) = self.slabs.get_mut(&implementation) {
            slab.release(index, is_quarantined);
        }
    }

    fn get(&mut self, slot: u32) -> Result<&mut Slot> {
        let (implementation, index) = parse_slot_id(slot);
        let slab = self.slabs.get_mut(&implementation);
        let slot = slab.and_then(|slab| slab.items.get_mut(index as usize));
        slot.ok_or_else(|| missing("staging slot"))
    }

    /// The slot as a lane's registered region.
    pub(super) fn region(&mut self, slot: u32, lane: usize, port: &Port) -> Result<&MemoryRegion> {
        let region = self.get(slot)?.registrations.get(lane, port);
        region.map_err(|error| Error::of("write from staging slot", error))
    }

    /// The slot as the device's pinned memory.
    pub(super) fn pinned(&mut self, slot: u32, length: u64) -> Result<Slice> {
        self.get(slot)?.span.memory().slice(0, length).map_err(super::copy_out_failed)
    }
}

#[cold]
fn missing(object: &str) -> Error {
    Error::new("use shared memory of worker", ErrorKind::Closed, format!("{object} does not exist"))
}

struct RegisteredRange {
    range: Range<u64>,
    registrations: LaneRegistrations,
}

/// Memory of sources that messages are written from directly. Each range is registered once; memory
/// that grows gets more ranges.
#[derive(Default)]
pub(super) struct SourceRegistrations {
    memories: HashMap<usize, Vec<RegisteredRange>>,
}

impl SourceRegistrations {
    /// The bytes from `at` of a payload, up to the end of one registration, as a region of a lane.
    pub(super) fn part(
        &mut self,
        payload: &PayloadLocation,
        at: u64,
        lane: usize,
        port: &Port,
    ) -> Result<RegionSlice> {
        let operation = "write message without copying";
        let slice = payload.slice();
        let (memory, from) = (slice.memory(), slice.offset() + at);
        let until = slice.offset() + slice.length();
        let ranges = self.memories.entry(memory.identity()).or_default();
        let known = ranges.iter().position(|one| one.range.contains(&from));
        if known.is_none() {
            let start = ranges.last().map_or(0, |last| last.range.end);
            let range = start..memory.length();
            let first = ranges.first().map(|first| &first.registrations.memory);
            let memory = range.contains(&from).then(|| SourceMemory::of(payload, first, &range));
            let Some(memory) = memory.flatten() else {
                let detail = "the CPU cannot access the memory";
                return Err(Error::new(operation, ErrorKind::InvalidArgument, detail));
            };
            let registrations = LaneRegistrations::new(memory);
            ranges.push(RegisteredRange { range, registrations });
        }
        let newest = ranges.len() - 1;
        let RegisteredRange { range, registrations } = &mut ranges[known.unwrap_or(newest)];
        let part = (from - range.start) as usize..(until.min(range.end) - range.start) as usize;
        let region = registrations.get(lane, port).map_err(|error| Error::of(operation, error))?;
        region.slice(part).map_err(|error| Error::of(operation, error))
    }

    /// Releases memory that no other part of the process has a handle to.
    pub(super) fn release_unused(&mut self) {
        self.memories.retain(|_, ranges| {
            ranges.first().is_some_and(|it| it.registrations.memory.is_in_use())
        });
    }
}

/// A stream of each opened device, for copies in one direction.
#[derive(Debug, Default)]
pub(super) struct CopyStreams(HashMap<DeviceName, gpu::Stream>);

impl CopyStreams {
    /// Begins a copy by a device. The returned point is done when the copy is.
    pub(super) fn copy(&mut self, on: &Device, to: &Slice, from: &Slice) -> Result<gpu::Point> {
        let from_device = |error| Error::of("copy message", error);
        let stream = match self.0.entry(on.name()) {
            std::collections::hash_map::Entry::Occupied(known) => known.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => {
                entry.insert(on.stream().map_err(from_device)?)
            }
        };
        stream.copy(to, from).map_err(from_device)?;
        stream.point().map_err(|error| {
            // The copy was begun, and its memory may be reused after this.
            let _ = stream.synchronize(gpu::DEFAULT_TIMEOUT);
            from_device(error)
        })
    }
}
