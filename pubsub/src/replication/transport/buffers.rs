//! Memory shared by all topics of a worker: batch buffers, staging slots, and registrations.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use fabric::ring::Port;
use fabric::{Access, Domain, Endpoint, MemoryRegion, RegionSlice};
use gpu::{Device, DeviceName, Implementation, Memory, Slice};
use ipc::Layout;
use transfer::{Buffer, device_memory};

use crate::error::{Error, ErrorKind, Result};
use crate::replication::PayloadLocation;
use crate::replication::outbound::BATCH_BUFFER_LENGTH;
use crate::replication::probe::RingProbe;
use crate::replication::slab::Slab;
use crate::replication::transport::host_memory::{MappedSpan, PinnedMemory, SegmentMemory};

/// Limit of batch buffers of all topics of a worker.
const MAX_BATCH_BUFFERS: usize = 64;
const SLOT: Layout = Layout::new("replication slot", 1);

/// Items that are in use or free.
struct BufferSlab<T> {
    items: Slab<T>,
    free: Vec<u32>,
}

impl<T> BufferSlab<T> {
    fn new() -> Self {
        Self { items: Slab::new(), free: Vec::new() }
    }

    /// Returns an item to the free ones; drops it if it is quarantined, since it may still be in
    /// use.
    fn release(&mut self, index: u32, is_quarantined: bool) {
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

/// Memory that is written from, registered per lane on first use. Pinning one GiB takes
/// half a second where a provider does that. So memory that a further lane never writes is not
/// registered for it.
#[derive(Default)]
struct LaneRegions(Vec<Option<MemoryRegion>>);

impl LaneRegions {
    fn get(
        &mut self,
        lane: usize,
        port: &Port,
        register: impl FnOnce(&Domain) -> fabric::Result<MemoryRegion>,
    ) -> fabric::Result<&MemoryRegion> {
        if self.0.len() <= lane {
            self.0.resize_with(lane + 1, || None);
        }
        let slot = &mut self.0[lane];
        if let Some(region) = slot {
            return Ok(region);
        }
        let region = register(port.lane_domain(lane).unwrap_or(port.endpoint().domain()))?;
        match lane {
            0 => region.enable_for(port.endpoint())?,
            // Where memory belongs to an endpoint, there are no further lanes.
            _ if region.is_registered() => region.enable()?,
            _ => {}
        }
        Ok(slot.insert(region))
    }
}

/// Host memory with its registrations.
struct LaneRegistrations<M> {
    memory: Arc<M>,
    regions: LaneRegions,
}

impl<M: fabric::Memory> LaneRegistrations<M> {
    fn new(memory: M) -> Self {
        Self { memory: Arc::new(memory), regions: LaneRegions::default() }
    }

    fn get(&mut self, lane: usize, port: &Port) -> fabric::Result<&MemoryRegion> {
        let memory = &self.memory;
        self.regions.get(lane, port, |domain| domain.register(Arc::clone(memory), Access::WRITE))
    }
}

/// A range of device memory with its registrations.
struct DeviceRegistrations {
    buffer: Arc<Buffer>,
    range: Range<u64>,
    regions: LaneRegions,
}

impl DeviceRegistrations {
    fn new(buffer: Arc<Buffer>, range: Range<u64>) -> Self {
        Self { buffer, range, regions: LaneRegions::default() }
    }

    fn get(&mut self, lane: usize, port: &Port) -> fabric::Result<&MemoryRegion> {
        let (buffer, range) = (&self.buffer, self.range.clone());
        self.regions.get(lane, port, |domain| {
            device_memory::register_range(domain, Arc::clone(buffer), range, Access::WRITE)
        })
    }
}

/// The bytes that the probe of a ring is written from, in memory of the same kind as the messages.
pub(super) enum ProbeSource {
    Host(ProbeInHost),
    Device(Box<ProbeOnDevice>),
}

/// In host memory.
pub(super) struct ProbeInHost(LaneRegistrations<fabric::HostMemory>);

/// In device memory, where a copy brings them.
pub(super) struct ProbeOnDevice {
    memory: DeviceRegistrations,
    copied: gpu::Point,
    _from: PinnedMemory,
}

impl ProbeSource {
    pub(super) fn new(
        probe: &RingProbe,
        device: Option<&Device>,
        streams: &mut CopyStreams,
    ) -> Result<Self> {
        let operation = "probe ring in device memory";
        let bytes = probe.bytes(probe.source());
        let Some(device) = device else {
            let memory = fabric::HostMemory::from_vec(bytes);
            let memory = memory.map_err(|error| Error::of(operation, error))?;
            return Ok(Self::Host(ProbeInHost(LaneRegistrations::new(memory))));
        };
        let from = PinnedMemory::create(SLOT, bytes.len(), device, operation)?;
        from.write(0, &bytes)?;
        let length = bytes.len() as u64;
        let of_device = |error| Error::of(operation, error);
        let memory = device.allocate_shared(length, &[]).map_err(of_device)?;
        let to = memory.slice(0, length).map_err(of_device)?;
        let copied = streams.copy(device, &to, &from.slice(0, length)?)?;
        let buffer = Arc::new(Buffer::Device(memory));
        let memory = DeviceRegistrations::new(buffer, 0..length);
        Ok(Self::Device(Box::new(ProbeOnDevice { memory, copied, _from: from })))
    }

    pub(super) fn is_ready(&self) -> Result<bool> {
        match self {
            Self::Host(_) => Ok(true),
            Self::Device(on_device) => {
                let done = on_device.copied.is_done();
                done.map_err(|error| Error::of("probe ring in device memory", error))
            }
        }
    }

    /// A part of the bytes as a lane's registered region.
    pub(super) fn part(
        &mut self,
        (offset, length): (u64, u64),
        lane: usize,
        port: &Port,
    ) -> fabric::Result<RegionSlice> {
        let region = match self {
            Self::Host(bytes) => bytes.0.get(lane, port)?,
            Self::Device(on_device) => on_device.memory.get(lane, port)?,
        };
        region.slice(offset as usize..(offset + length) as usize)
    }
}

/// Host memory that small messages are collected in, and written from.
pub(super) struct BatchBuffers(BufferSlab<MemoryRegion>);

impl BatchBuffers {
    pub(super) fn new() -> Self {
        Self(BufferSlab::new())
    }

    /// A free buffer, or a new one below the limit or if it is the caller's first.
    pub(super) fn take(&mut self, is_first: bool, endpoint: &Endpoint) -> Option<u32> {
        let taken = self.0.take((is_first, MAX_BATCH_BUFFERS), || {
            let memory = fabric::HostMemory::zeroed(BATCH_BUFFER_LENGTH)?;
            let region = endpoint.domain().register(memory, Access::WRITE)?;
            region.enable_for(endpoint).map(|()| region)
        });
        taken.unwrap_or_else(|error: fabric::Error| {
            tracing::warn!(%error, "no memory for a batch buffer");
            None
        })
    }

    pub(super) fn release(&mut self, batch_buffer: u32, is_quarantined: bool) {
        self.0.release(batch_buffer, is_quarantined);
    }

    pub(super) fn get(&self, batch_buffer: u32) -> Result<&MemoryRegion> {
        self.0.items.get(batch_buffer as usize).ok_or_else(|| missing("batch buffer"))
    }
}

/// Host memory that devices copy to, and that is written from.
struct Slot {
    memory: LaneRegistrations<SegmentMemory>,
    pinned: Memory,
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
            let (segment, pinned) = SegmentMemory::create(SLOT, self.length, device, operation)?;
            let mut memory = LaneRegistrations::new(segment);
            memory.get(0, port).map_err(|error| Error::of(operation, error))?;
            Ok::<_, Error>(Slot { memory, pinned })
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
        let region = self.get(slot)?.memory.get(lane, port);
        region.map_err(|error| Error::of("write from staging slot", error))
    }

    /// The slot as the device's pinned memory.
    pub(super) fn pinned(&mut self, slot: u32, length: u64) -> Result<Slice> {
        self.get(slot)?.pinned.slice(0, length).map_err(super::copy_out_failed)
    }
}

#[cold]
fn missing(object: &str) -> Error {
    Error::new("use shared memory of worker", ErrorKind::Closed, format!("{object} does not exist"))
}

/// A registered range of a memory.
struct RegisteredRange {
    range: Range<u64>,
    span: RegisteredSpan,
}

/// The memory of a range. All ranges of a memory share one handle of it.
enum RegisteredSpan {
    Host(LaneRegistrations<MappedSpan>),
    Device(DeviceRegistrations),
}

impl RegisteredSpan {
    /// A range of a payload's memory, of which this may be an earlier one. None for host memory that
    /// the CPU does not reach.
    fn new(payload: &PayloadLocation, first: Option<&Self>, range: &Range<u64>) -> Option<Self> {
        let memory = payload.slice().memory();
        if let PayloadLocation::Device(_) = payload {
            let buffer = match first {
                Some(Self::Device(first)) => Arc::clone(&first.buffer),
                _ => Arc::new(Buffer::Device(memory.clone())),
            };
            return Some(Self::Device(DeviceRegistrations::new(buffer, range.clone())));
        }
        let held = match first {
            Some(Self::Host(first)) => first.memory.memory(),
            _ => Arc::new(memory.clone()),
        };
        let span = MappedSpan::new(held, range.start, range.end - range.start);
        span.map(|span| Self::Host(LaneRegistrations::new(span)))
    }

    fn get(&mut self, lane: usize, port: &Port) -> fabric::Result<&MemoryRegion> {
        match self {
            Self::Host(span) => span.get(lane, port),
            Self::Device(span) => span.get(lane, port),
        }
    }

    /// Returns true if another part of the process has a handle of the memory.
    fn is_in_use(&self) -> bool {
        match self {
            Self::Host(span) => span.memory.memory().is_shared(),
            Self::Device(span) => {
                matches!(&*span.buffer, Buffer::Device(memory) if memory.is_shared())
            }
        }
    }
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
            let first = ranges.first().map(|first| &first.span);
            let span = range.contains(&from).then(|| RegisteredSpan::new(payload, first, &range));
            let Some(span) = span.flatten() else {
                let detail = "the CPU cannot access the memory";
                return Err(Error::new(operation, ErrorKind::InvalidArgument, detail));
            };
            ranges.push(RegisteredRange { range, span });
        }
        let newest = ranges.len() - 1;
        let RegisteredRange { range, span } = &mut ranges[known.unwrap_or(newest)];
        let part = (from - range.start) as usize..(until.min(range.end) - range.start) as usize;
        let region = span.get(lane, port).map_err(|error| Error::of(operation, error))?;
        region.slice(part).map_err(|error| Error::of(operation, error))
    }

    /// Releases memory that no other part of the process has a handle to.
    pub(super) fn release_unused(&mut self) {
        self.memories
            .retain(|_, ranges| ranges.first().is_some_and(|first| first.span.is_in_use()));
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
