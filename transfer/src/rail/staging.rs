//! Staging slots of pinned memory, and the copies of devices to and from them.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use fabric::{MemoryRegion, RegionSlice};
use gpu::{Device, DeviceName, Memory, Slice};

use crate::error::{Context, Result};
use crate::host_buffer::HostBuffer;
use crate::stream_copies::StreamCopies;

const COPY: &str = "copy through staging memory";
/// Long enough that the latencies of a copy and a message do not matter.
pub(super) const SLOT_LENGTH: u64 = 1 << 20;
/// Enough for two copies and the wire to be busy while others wait.
pub(super) const SLOT_COUNT: u32 = 8;

/// Host memory for bytes that the fabric cannot access directly.
#[derive(Debug)]
pub(super) struct Slots {
    buffer: HostBuffer,
    region: MemoryRegion,
    /// A bit for each free slot.
    free: AtomicU32,
}

impl Slots {
    pub(super) fn new(register: impl FnOnce(&HostBuffer) -> Result<MemoryRegion>) -> Result<Self> {
        let buffer = HostBuffer::new(SLOT_LENGTH * u64::from(SLOT_COUNT))?;
        let region = register(&buffer)?;
        Ok(Self { buffer, region, free: AtomicU32::new((1 << SLOT_COUNT) - 1) })
    }

    fn has_free(&self) -> bool {
        self.free.load(Ordering::Relaxed) != 0
    }
}

/// A slot, freed on drop. Only the rail's thread takes slots.
#[derive(Debug)]
pub(super) struct Slot {
    of: Arc<Slots>,
    number: u32,
}

impl Drop for Slot {
    fn drop(&mut self) {
        // A slot may be dropped on another thread: its reads must precede the next writes.
        self.of.free.fetch_or(1 << self.number, Ordering::Release);
    }
}

impl Slot {
    fn take(of: &Arc<Slots>) -> Option<Self> {
        let number = of.free.load(Ordering::Relaxed).trailing_zeros();
        of.free.fetch_and(!1_u32.checked_shl(number)?, Ordering::Acquire);
        Some(Self { of: Arc::clone(of), number })
    }

    fn start(&self) -> u64 {
        u64::from(self.number) * SLOT_LENGTH
    }

    /// The slot as registered memory.
    pub(super) fn registered(&self, length: u64) -> fabric::Result<RegionSlice> {
        let start = self.start() as usize;
        self.of.region.slice(start..start + length as usize)
    }

    /// The slot as pinned memory of a device.
    pub(super) fn pinned(&self, length: u64, device: &Device) -> Result<Slice> {
        part(&self.of.buffer.pinned_for(device)?, self.start(), length)
    }
}

pub(super) fn part(memory: &Memory, offset: u64, length: u64) -> Result<Slice> {
    memory.slice(offset, length).during(COPY)
}

/// Local slots, and copies of devices, which are identified by numbers.
#[derive(Debug, Default)]
pub(super) struct Staging {
    slots: Option<Arc<Slots>>,
    copies: HashMap<DeviceName, StreamCopies<u64>>,
}

impl Staging {
    pub(super) fn has_slots(&self) -> bool {
        self.slots.is_some()
    }

    pub(super) fn add_slots(&mut self, slots: Slots) {
        self.slots = Some(Arc::new(slots));
    }

    pub(super) fn has_free_slot(&self) -> bool {
        self.slots.as_ref().is_some_and(|slots| slots.has_free())
    }

    pub(super) fn take_slot(&self) -> Option<Slot> {
        self.slots.as_ref().and_then(Slot::take)
    }

    /// Takes no more slots of their memory, if one of these is among them. Those in use are kept by
    /// their chunks.
    pub(super) fn abandon_slots<'a>(&mut self, mut lost: impl Iterator<Item = &'a Slot>) {
        self.slots.take_if(|slots| lost.any(|slot| Arc::ptr_eq(&slot.of, slots)));
    }

    pub(super) fn begin_copy(
        &mut self,
        number: u64,
        device: &Device,
        to: &Slice,
        from: &Slice,
    ) -> Result<()> {
        let copies = match self.copies.entry(device.name()) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(entry) => entry.insert(StreamCopies::new(device)?),
        };
        copies.begin(number, |stream| stream.copy(to, from));
        Ok(())
    }

    /// Waits until the devices have completed all copies, at most until `end`. False if a copy may
    /// still be running.
    pub(super) fn close(&mut self, end: Instant) -> bool {
        let mut are_done = true;
        for (device, copies) in self.copies.drain() {
            if !copies.close(end) {
                tracing::warn!(%device, "copies of a rail did not finish: their memory is leaked");
                are_done = false;
            }
        }
        are_done
    }

    /// The next completed copy.
    pub(super) fn next_copy(&mut self) -> Option<(u64, Result<()>)> {
        let done = self.copies.values_mut().find_map(StreamCopies::next_done);
        done.map(|(number, _, outcome)| (number, outcome))
    }

    pub(super) fn copies_in_flight(&self) -> bool {
        self.copies.values().any(|copies| copies.count() > 0)
    }
}

#[cfg(test)]
#[path = "staging_tests.rs"]
mod tests;
