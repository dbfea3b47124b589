//! Memory that a worker's topics have in common: sheets, slots, and what is registered of theirs.

use std::collections::HashMap;
use std::sync::Arc;

use fabric::ring::Port;
use fabric::{Access, Endpoint, MemoryRegion, RegionSlice};
use gpu::{Device, DeviceName, Implementation, Memory, Slice};
use ipc::{Layout, Segment};

use super::bytes::{Body, Span};
use super::outbound::SHEET;
use crate::error::{Error, ErrorKind, Result};

/// Sheets that all topics of a worker have together.
const SHEETS: usize = 64;
const SLOT: Layout = Layout::new("bridge slot", 1);

/// A place in a list that is used again.
#[derive(Debug)]
struct Shelf<T> {
    places: Vec<Option<T>>,
    vacant: Vec<u32>,
    free: Vec<u32>,
}

impl<T> Shelf<T> {
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
    fn give(&mut self, place: u32, is_tainted: bool) {
        if is_tainted {
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
struct ForLanes<M> {
    memory: Arc<M>,
    regions: Vec<Option<MemoryRegion>>,
}

impl<M> std::fmt::Debug for ForLanes<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ForLanes").field("regions", &self.regions).finish_non_exhaustive()
    }
}

impl<M: fabric::Memory> ForLanes<M> {
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
pub(super) struct Sheets(Shelf<MemoryRegion>);

impl Sheets {
    pub(super) fn new() -> Self {
        Self(Shelf::new())
    }

    /// One, if there is one, or it is the caller's first.
    pub(super) fn take(&mut self, is_first: bool, endpoint: &Endpoint) -> Option<u32> {
        if let Some(sheet) = self.0.free.pop() {
            return Some(sheet);
        }
        if self.0.count() >= SHEETS && !is_first {
            return None;
        }
        let made = fabric::HostMemory::zeroed(SHEET)
            .and_then(|memory| endpoint.domain().register(memory, Access::WRITE))
            .and_then(|region| region.enable_for(endpoint).map(|()| region));
        match made {
            Ok(region) => Some(self.0.put(region)),
            Err(error) => {
                tracing::warn!(%error, "no memory for a sheet");
                None
            }
        }
    }

    pub(super) fn give(&mut self, sheet: u32, is_tainted: bool) {
        self.0.give(sheet, is_tainted);
    }

    pub(super) fn get(&self, sheet: u32) -> Result<&MemoryRegion> {
        self.0.get(sheet).ok_or_else(|| gone("a sheet"))
    }
}

/// Memory of the host that devices copy to and the fabric writes from.
#[derive(Debug)]
struct Slot {
    memory: ForLanes<Body>,
    pinned: Memory,
}

/// Slots, of one kind of device each.
#[derive(Debug)]
pub(super) struct Slots {
    shelves: HashMap<Implementation, Shelf<Slot>>,
    length: usize,
    most: usize,
}

/// Which kind of device a slot is for goes into its number.
fn numbered(implementation: Implementation, place: u32) -> u32 {
    place << 1 | u32::from(implementation == Implementation::Cuda)
}

fn of_number(slot: u32) -> (Implementation, u32) {
    let implementation = if slot & 1 == 1 { Implementation::Cuda } else { Implementation::StandIn };
    (implementation, slot >> 1)
}

impl Slots {
    pub(super) fn new(length: usize, most: usize) -> Self {
        Self { shelves: HashMap::new(), length, most }
    }

    pub(super) fn take(
        &mut self,
        device: &Device,
        is_first: bool,
        port: &Port,
    ) -> Result<Option<u32>> {
        let implementation = device.name().implementation;
        let shelf = self.shelves.entry(implementation).or_insert_with(Shelf::new);
        if let Some(place) = shelf.free.pop() {
            return Ok(Some(numbered(implementation, place)));
        }
        if shelf.count() >= self.most && !is_first {
            return Ok(None);
        }
        let operation = "make a slot";
        let segment = Segment::create(SLOT, self.length).map_err(|e| Error::of(operation, e))?;
        segment.mark_ready();
        let pinned = transfer::pin(&segment, device).map_err(|e| Error::of(operation, e))?;
        let mut memory = ForLanes::new(Body(segment));
        memory.get(0, port).map_err(|error| Error::of(operation, error))?;
        Ok(Some(numbered(implementation, shelf.put(Slot { memory, pinned }))))
    }

    pub(super) fn give(&mut self, slot: u32, is_tainted: bool) {
        let (implementation, place) = of_number(slot);
        if let Some(shelf) = self.shelves.get_mut(&implementation) {
            shelf.give(place, is_tainted);
        }
    }

    fn get(&self, slot: u32) -> Result<&Slot> {
        let (implementation, place) = of_number(slot);
        let shelf = self.shelves.get(&implementation);
        shelf.and_then(|shelf| shelf.get(place)).ok_or_else(|| gone("a slot"))
    }

    /// As a lane knows it.
    pub(super) fn region(&mut self, slot: u32, lane: usize, port: &Port) -> Result<&MemoryRegion> {
        let (implementation, place) = of_number(slot);
        let shelf = self.shelves.get_mut(&implementation);
        let slot = shelf.and_then(|shelf| shelf.places.get_mut(place as usize)?.as_mut());
        let slot = slot.ok_or_else(|| gone("a slot"))?;
        slot.memory.get(lane, port).map_err(|error| Error::of("write from a slot", error))
    }

    /// As the device knows it.
    pub(super) fn pinned(&self, slot: u32, length: u64) -> Result<Slice> {
        let slot = self.get(slot)?;
        slot.pinned.slice(0, length).map_err(|error| Error::of("copy a message out", error))
    }
}

#[cold]
fn gone(what: &str) -> Error {
    Error::new("use common memory", ErrorKind::Closed, format!("{what} that is none"))
}

/// A stretch of memory, as the fabric knows it.
#[derive(Debug)]
struct Stretch {
    end: u64,
    start: u64,
    span: ForLanes<Span>,
}

/// Memory of sources that messages are written from where they lie: registered once, in as many
/// stretches as it grew by.
#[derive(Debug)]
pub(super) struct Registered {
    memories: HashMap<usize, Vec<Stretch>>,
}

impl Registered {
    pub(super) fn new() -> Self {
        Self { memories: HashMap::new() }
    }

    /// What lies there from byte `at` of a range on, as far as one registration goes, as a lane
    /// knows it.
    pub(super) fn part(
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
            let span = Span::new(held, start, end.saturating_sub(start));
            let Some(span) = span.filter(|_| (start..end).contains(&from)) else {
                let detail = "memory that the processor does not reach";
                return Err(Error::new(operation, ErrorKind::InvalidArgument, detail));
            };
            place = Some(stretches.len());
            stretches.push(Stretch { start, end, span: ForLanes::new(span) });
        }
        let stretch = place.and_then(|place| stretches.get_mut(place));
        let stretch = stretch.ok_or_else(|| gone("memory"))?;
        let range =
            (from - stretch.start) as usize..(until.min(stretch.end) - stretch.start) as usize;
        let region = stretch.span.get(lane, port).map_err(|error| Error::of(operation, error))?;
        region.slice(range).map_err(|error| Error::of(operation, error))
    }

    /// Lets go of memory that nobody else has a handle to.
    pub(super) fn sweep(&mut self) {
        self.memories.retain(|_, stretches| {
            stretches.first().is_some_and(|stretch| stretch.span.memory.memory().is_shared())
        });
    }
}

/// Devices that were opened, and a stream of each for copies in one direction.
#[derive(Debug, Default)]
pub(super) struct Streams(HashMap<DeviceName, gpu::Stream>);

impl Streams {
    /// Begins a copy, which a device makes. What the point says is done is done.
    pub(super) fn copy(&mut self, on: &Device, to: &Slice, from: &Slice) -> Result<gpu::Point> {
        let of_device = |error| Error::of("copy a message", error);
        let stream = match self.0.entry(on.name()) {
            std::collections::hash_map::Entry::Occupied(known) => known.into_mut(),
            std::collections::hash_map::Entry::Vacant(place) => {
                place.insert(on.stream().map_err(of_device)?)
            }
        };
        stream.copy(to, from).map_err(of_device)?;
        stream.point().map_err(|error| {
            // It was begun all the same, and its memory may be used again after this.
            let _ = stream.synchronize(gpu::PATIENCE);
            of_device(error)
        })
    }
}
