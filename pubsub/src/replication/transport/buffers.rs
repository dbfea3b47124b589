//! Memory that a worker's topics have in common: sheets, slots, and what is registered of theirs.

use std::collections::HashMap;
use std::sync::Arc;

use fabric::ring::Port;
use fabric::{Access, Endpoint, MemoryRegion, RegionSlice};
use gpu::{Device, DeviceName, Implementation, Memory, Slice};
use ipc::{Layout, Segment};

use crate::error::{Error, ErrorKind, Result};
use crate::replication::outbound::BATCH_BUFFER_LENGTH;
use crate::replication::transport::host_memory::{MappedSpan, SegmentMemory};

/// Sheets that all topics of a worker have together.
const MAX_BATCH_BUFFERS: usize = 64;
const SLOT: Layout = Layout::new("replication slot", 1);

/// A place in a list that is used again.
#[derive(Debug)]
struct BufferSlab<T> {
    places: Vec<Option<T>>,
    vacant: Vec<u32>,
    free: Vec<u32>,
}

impl<T> BufferSlab<T> {
    fn new() -> Self {
        Self { places: Vec::new(), vacant: Vec::new(), free: Vec::new() }
    }

    fn put(&mut self, thing: T) -> u32 {
        if let Some(place) = self.vacant.pop() {
            self.places[place as usize] = Some(thing);
            return place;
        }
        self.places.push(Some(thing));
        self.places.len() as u32 - 1
    }

    fn get(&self, place: u32) -> Option<&T> {
        self.places.get(place as usize)?.as_ref()
    }

    /// Back among the free ones; or gone for good, if somebody may still use it.
    fn release(&mut self, place: u32, is_quarantined: bool) {
        if is_quarantined {
            self.places[place as usize] = None;
            self.vacant.push(place);
        } else {
            self.free.push(place);
        }
    }

    fn count(&self) -> usize {
        self.places.len() - self.vacant.len()
    }
}

/// Memory that is written from, as the lanes of a port know it: registered for each when that is to
/// write from it first, for good. To pin a GiB takes half a second where a provider does that, so
/// what is never written by a further lane is not registered for it.
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
        let place = &mut self.regions[lane];
        if let Some(region) = place {
            return Ok(region);
        }
        let domain = port.lane_domain(lane).unwrap_or(port.endpoint().domain());
        let region = domain.register(Arc::clone(&self.memory), Access::WRITE)?;
        match lane {
            0 => region.enable_for(port.endpoint())?,
            // Where memory belongs to an endpoint there are no further lanes.
            _ if region.is_registered() => region.enable()?,
            _ => {}
        }
        Ok(place.insert(region))
    }
}

/// Memory of the host that the fabric writes from, and small messages are put together in.
#[derive(Debug)]
pub(in crate::replication) struct BatchBuffers(BufferSlab<MemoryRegion>);

impl BatchBuffers {
    pub(in crate::replication) fn new() -> Self {
        Self(BufferSlab::new())
    }

    /// One, if there is one, or it is the caller's first.
    pub(in crate::replication) fn take(
        &mut self,
        is_first: bool,
        endpoint: &Endpoint,
    ) -> Option<u32> {
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

    pub(in crate::replication) fn release(&mut self, batch_buffer: u32, is_quarantined: bool) {
        self.0.release(batch_buffer, is_quarantined);
    }

    pub(in crate::replication) fn get(&self, batch_buffer: u32) -> Result<&MemoryRegion> {
        self.0.get(batch_buffer).ok_or_else(|| missing("a batch buffer"))
    }
}

/// Memory of the host that devices copy to and the fabric writes from.
#[derive(Debug)]
struct Slot {
    memory: LaneRegistrations<SegmentMemory>,
    pinned: Memory,
}

/// Slots, of one kind of device each.
#[derive(Debug)]
pub(in crate::replication) struct StagingSlots {
    slabs: HashMap<Implementation, BufferSlab<Slot>>,
    length: usize,
    max_count: usize,
}

/// Which kind of device a slot is for goes into its number.
fn slot_id(implementation: Implementation, place: u32) -> u32 {
    place << 1 | u32::from(implementation == Implementation::Cuda)
}

fn parse_slot_id(slot: u32) -> (Implementation, u32) {
    let implementation =
        if slot & 1 == 1 { Implementation::Cuda } else { Implementation::Emulated };
    (implementation, slot >> 1)
}

impl StagingSlots {
    pub(in crate::replication) fn new(length: usize, max_count: usize) -> Self {
        Self { slabs: HashMap::new(), length, max_count }
    }

    pub(in crate::replication) fn take(
        &mut self,
        device: &Device,
        is_first: bool,
        port: &Port,
    ) -> Result<Option<u32>> {
        let implementation = device.name().implementation;
        let slab = self.slabs.entry(implementation).or_insert_with(BufferSlab::new);
        if let Some(place) = slab.free.pop() {
            return Ok(Some(slot_id(implementation, place)));
        }
        if slab.count() >= self.max_count && !is_first {
            return Ok(None);
        }
        let operation = "make a slot";
        let segment = Segment::create(SLOT, self.length).map_err(|e| Error::of(operation, e))?;
        segment.mark_ready();
        let pinned = transfer::pin(&segment, device).map_err(|e| Error::of(operation, e))?;
        let mut memory = LaneRegistrations::new(SegmentMemory(segment));
        memory.get(0, port).map_err(|error| Error::of(operation, error))?;
        Ok(Some(slot_id(implementation, slab.put(Slot { memory, pinned }))))
    }

    pub(in crate::replication) fn release(&mut self, slot: u32, is_quarantined: bool) {
        let (implementation, place) = parse_slot_id(slot);
        if let Some(slab) = self.slabs.get_mut(&implementation) {
            slab.release(place, is_quarantined);
        }
    }

    fn get(&self, slot: u32) -> Result<&Slot> {
        let (implementation, place) = parse_slot_id(slot);
        let slab = self.slabs.get(&implementation);
        slab.and_then(|slab| slab.get(place)).ok_or_else(|| missing("a slot"))
    }

    /// As a lane knows it.
    pub(in crate::replication) fn region(
        &mut self,
        slot: u32,
        lane: usize,
        port: &Port,
    ) -> Result<&MemoryRegion> {
        let (implementation, place) = parse_slot_id(slot);
        let slab = self.slabs.get_mut(&implementation);
        let slot = slab.and_then(|slab| slab.places.get_mut(place as usize)?.as_mut());
        let slot = slot.ok_or_else(|| missing("a slot"))?;
        slot.memory.get(lane, port).map_err(|error| Error::of("write from a slot", error))
    }

    /// As the device knows it.
    pub(in crate::replication) fn pinned(&self, slot: u32, length: u64) -> Result<Slice> {
        let slot = self.get(slot)?;
        slot.pinned.slice(0, length).map_err(|error| Error::of("copy a message out", error))
    }
}

#[cold]
fn missing(what: &str) -> Error {
    Error::new("use common memory", ErrorKind::Closed, format!("{what} that is none"))
}

/// A stretch of memory, as the fabric knows it.
#[derive(Debug)]
struct RegisteredRange {
    end: u64,
    start: u64,
    span: LaneRegistrations<MappedSpan>,
}

/// Memory of sources that messages are written from where they lie: registered once, in as many
/// stretches as it grew by.
#[derive(Debug)]
pub(in crate::replication) struct RegistrationCache {
    memories: HashMap<usize, Vec<RegisteredRange>>,
}

impl RegistrationCache {
    pub(in crate::replication) fn new() -> Self {
        Self { memories: HashMap::new() }
    }

    /// What lies there from byte `at` of a range on, as far as one registration goes, as a lane
    /// knows it.
    pub(in crate::replication) fn part(
        &mut self,
        slice: &Slice,
        at: u64,
        lane: usize,
        port: &Port,
    ) -> Result<RegionSlice> {
        let operation = "write a message from where it lies";
        let (memory, from) = (slice.memory(), slice.offset() + at);
        let until = slice.offset() + slice.length();
        let stretches = self.memories.entry(memory.identity()).or_default();
        let mut place = stretches.iter().position(|one| (one.start..one.end).contains(&from));
        if place.is_none() {
            let start = stretches.last().map_or(0, |last| last.end);
            let end = memory.length();
            let held = stretches.first().map(|first| first.span.memory.memory());
            let held = held.unwrap_or_else(|| Arc::new(memory.clone()));
            let span = MappedSpan::new(held, start, end.saturating_sub(start));
            let Some(span) = span.filter(|_| (start..end).contains(&from)) else {
                let detail = "memory that the processor does not reach";
                return Err(Error::new(operation, ErrorKind::InvalidArgument, detail));
            };
            place = Some(stretches.len());
            stretches.push(RegisteredRange { start, end, span: LaneRegistrations::new(span) });
        }
        let stretch = place.and_then(|place| stretches.get_mut(place));
        let stretch = stretch.ok_or_else(|| missing("memory"))?;
        let range =
            (from - stretch.start) as usize..(until.min(stretch.end) - stretch.start) as usize;
        let region = stretch.span.get(lane, port).map_err(|error| Error::of(operation, error))?;
        region.slice(range).map_err(|error| Error::of(operation, error))
    }

    /// Lets go of memory that nobody else has a handle to.
    pub(in crate::replication) fn release_unused(&mut self) {
        self.memories.retain(|_, stretches| {
            stretches.first().is_some_and(|stretch| stretch.span.memory.memory().is_shared())
        });
    }
}

/// Devices that were opened, and a stream of each for copies in one direction.
#[derive(Debug, Default)]
pub(in crate::replication) struct CopyStreams(HashMap<DeviceName, gpu::Stream>);

impl CopyStreams {
    /// Begins a copy, which a device makes. What the point says is done is done.
    pub(in crate::replication) fn copy(
        &mut self,
        on: &Device,
        to: &Slice,
        from: &Slice,
    ) -> Result<gpu::Point> {
        let from_device = |error| Error::of("copy a message", error);
        let stream = match self.0.entry(on.name()) {
            std::collections::hash_map::Entry::Occupied(known) => known.into_mut(),
            std::collections::hash_map::Entry::Vacant(place) => {
                place.insert(on.stream().map_err(from_device)?)
            }
        };
        stream.copy(to, from).map_err(from_device)?;
        stream.point().map_err(|error| {
            // It was begun all the same, and its memory may be used again after this.
            let _ = stream.synchronize(gpu::DEFAULT_TIMEOUT);
            from_device(error)
        })
    }
}
