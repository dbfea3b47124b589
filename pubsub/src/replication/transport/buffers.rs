//! Memory shared by all topics of a worker: batch buffers, staging slots, and registrations.

use std::collections::HashMap;
use std::sync::Arc;

use fabric::ring::Port;
use fabric::{Access, Endpoint, MemoryRegion, RegionSlice};
use gpu::{Device, DeviceName, Implementation, Memory, Slice};
use ipc::Layout;

use crate::error::{Error, ErrorKind, Result};
use crate::replication::outbound::BATCH_BUFFER_LENGTH;
use crate::replication::transport::host_memory::{MappedSpan, SegmentMemory};

/// Limit of batch buffers of all topics of a worker.
const MAX_BATCH_BUFFERS: usize = 64;
const SLOT: Layout = Layout::new("replication slot", 1);

/// Items by index; indices are reused.
#[derive(Debug)]
struct BufferSlab<T> {
    items: Vec<Option<T>>,
    vacant: Vec<u32>,
    free: Vec<u32>,
}

impl<T> BufferSlab<T> {
    fn new() -> Self {
        Self { items: Vec::new(), vacant: Vec::new(), free: Vec::new() }
    }

    fn put(&mut self, item: T) -> u32 {
        if let Some(index) = self.vacant.pop() {
            self.items[index as usize] = Some(item);
            return index;
        }
        self.items.push(Some(item));
        self.items.len() as u32 - 1
    }

    fn get(&self, index: u32) -> Option<&T> {
        self.items.get(index as usize)?.as_ref()
    }

    /// Returns an item to the free ones; drops it if it is quarantined, since it may still be in
    /// use.
    fn release(&mut self, index: u32, is_quarantined: bool) {
        if is_quarantined {
            self.items[index as usize] = None;
            self.vacant.push(index);
        } else {
            self.free.push(index);
        }
    }

    fn count(&self) -> usize {
        self.items.len() - self.vacant.len()
    }
}

/// Memory that is written from, registered per lane on first use, for good. Pinning one GiB takes
/// half a second where a provider does that. So memory that a further lane never writes is not
/// registered for it.
struct LaneRegistrations<M> {
    memory: Arc<M>,
    regions: Vec<Option<MemoryRegion>>,
}

impl<M> std::fmt::Debug for LaneRegistrations<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LaneRegistrations").field("regions", &self.regions).finish_non_exhaustive()
    }
}

impl<M: fabric::Memory> LaneRegistrations<M> {
    fn new(memory: M) -> Self {
        Self { memory: Arc::new(memory), regions: Vec::new() }
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
        let region = domain.register(Arc::clone(&self.memory), Access::WRITE)?;
        match lane {
            0 => region.enable_for(port.endpoint())?,
            // Where memory belongs to an endpoint, there are no further lanes.
            _ if region.is_registered() => region.enable()?,
            _ => {}
        }
        Ok(slot.insert(region))
    }
}

/// Host memory that small messages are collected in, and written from.
#[derive(Debug)]
pub(super) struct BatchBuffers(BufferSlab<MemoryRegion>);

impl BatchBuffers {
    pub(super) fn new() -> Self {
        Self(BufferSlab::new())
    }

    /// A free buffer, or a new one below the limit or if it is the caller's first.
    pub(super) fn take(&mut self, is_first: bool, endpoint: &Endpoint) -> Option<u32> {
        if let Some(batch_buffer) = self.0.free.pop() {
            return Some(batch_buffer);
        }
        if self.0.count() >= MAX_BATCH_BUFFERS && !is_first {
            return None;
        }
        let made = fabric::HostMemory::zeroed(BATCH_BUFFER_LENGTH)
            .and_then(|memory| endpoint.domain().register(memory, Access::WRITE))
            .and_then(|region| region.enable_for(endpoint).map(|()| region));
        match made {
            Ok(region) => Some(self.0.put(region)),
            Err(error) => {
                tracing::warn!(%error, "no memory for a batch buffer");
                None
            }
        }
    }

    pub(super) fn release(&mut self, batch_buffer: u32, is_quarantined: bool) {
        self.0.release(batch_buffer, is_quarantined);
    }

    pub(super) fn get(&self, batch_buffer: u32) -> Result<&MemoryRegion> {
        self.0.get(batch_buffer).ok_or_else(|| missing("batch buffer"))
    }
}

/// Host memory that devices copy to, and that is written from.
#[derive(Debug)]
struct Slot {
    memory: LaneRegistrations<SegmentMemory>,
    pinned: Memory,
}

/// Staging slots; each serves one kind of device.
#[derive(Debug)]
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
        if let Some(index) = slab.free.pop() {
            return Ok(Some(slot_id(implementation, index)));
        }
        if slab.count() >= self.max_count && !is_first {
            return Ok(None);
        }
        let operation = "create staging slot";
        let (segment, pinned) = SegmentMemory::create(SLOT, self.length, device, operation)?;
        let mut memory = LaneRegistrations::new(segment);
        memory.get(0, port).map_err(|error| Error::of(operation, error))?;
        Ok(Some(slot_id(implementation, slab.put(Slot { memory, pinned }))))
    }

    pub(super) fn release(&mut self, slot: u32, is_quarantined: bool) {
        let (implementation, index) = parse_slot_id(slot);
        if let Some(slab) = self.slabs.get_mut(&implementation) {
            slab.release(index, is_quarantined);
        }
    }

    fn get(&self, slot: u32) -> Result<&Slot> {
        let (implementation, index) = parse_slot_id(slot);
        let slab = self.slabs.get(&implementation);
        slab.and_then(|slab| slab.get(index)).ok_or_else(|| missing("staging slot"))
    }

    /// The slot as a lane's registered region.
    pub(super) fn region(&mut self, slot: u32, lane: usize, port: &Port) -> Result<&MemoryRegion> {
        let (implementation, index) = parse_slot_id(slot);
        let slab = self.slabs.get_mut(&implementation);
        let slot = slab.and_then(|slab| slab.items.get_mut(index as usize)?.as_mut());
        let slot = slot.ok_or_else(|| missing("staging slot"))?;
        slot.memory.get(lane, port).map_err(|error| Error::of("write from staging slot", error))
    }

    /// The slot as the device's pinned memory.
    pub(super) fn pinned(&self, slot: u32, length: u64) -> Result<Slice> {
        let slot = self.get(slot)?;
        slot.pinned.slice(0, length).map_err(|error| Error::of("copy message out", error))
    }
}

#[cold]
fn missing(object: &str) -> Error {
    Error::new("use shared memory of worker", ErrorKind::Closed, format!("{object} does not exist"))
}

/// A registered range of a memory.
#[derive(Debug)]
struct RegisteredRange {
    end: u64,
    start: u64,
    span: LaneRegistrations<MappedSpan>,
}

/// Memory of sources that messages are written from directly. Each range is registered once; memory
/// that grows gets more ranges.
#[derive(Debug)]
pub(super) struct RegistrationCache {
    memories: HashMap<usize, Vec<RegisteredRange>>,
}

impl RegistrationCache {
    pub(super) fn new() -> Self {
        Self { memories: HashMap::new() }
    }

    /// The bytes from `at` of a slice, up to the end of one registration, as a region of a lane.
    pub(super) fn part(
        &mut self,
        slice: &Slice,
        at: u64,
        lane: usize,
        port: &Port,
    ) -> Result<RegionSlice> {
        let operation = "write message without copying";
        let (memory, from) = (slice.memory(), slice.offset() + at);
        let until = slice.offset() + slice.length();
        let ranges = self.memories.entry(memory.identity()).or_default();
        let mut index = ranges.iter().position(|one| (one.start..one.end).contains(&from));
        if index.is_none() {
            let start = ranges.last().map_or(0, |last| last.end);
            let end = memory.length();
            let held = ranges.first().map(|first| first.span.memory.memory());
            let held = held.unwrap_or_else(|| Arc::new(memory.clone()));
            let span = MappedSpan::new(held, start, end.saturating_sub(start));
            let Some(span) = span.filter(|_| (start..end).contains(&from)) else {
                let detail = "the CPU cannot access the memory";
                return Err(Error::new(operation, ErrorKind::InvalidArgument, detail));
            };
            index = Some(ranges.len());
            ranges.push(RegisteredRange { start, end, span: LaneRegistrations::new(span) });
        }
        let registered = index.and_then(|index| ranges.get_mut(index));
        let registered = registered.ok_or_else(|| missing("memory"))?;
        let range = (from - registered.start) as usize
            ..(until.min(registered.end) - registered.start) as usize;
        let region =
            registered.span.get(lane, port).map_err(|error| Error::of(operation, error))?;
        region.slice(range).map_err(|error| Error::of(operation, error))
    }

    /// Releases memory that no other part of the process has a handle to.
    pub(super) fn release_unused(&mut self) {
        self.memories.retain(|_, ranges| {
            ranges.first().is_some_and(|first| first.span.memory.memory().is_shared())
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
