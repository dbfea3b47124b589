//! How many chunks a link may have in flight, and the staging slots of its target.

use fabric::{RemoteMemory, RemoteSlice};

use super::OPEN;
use crate::error::{Error, ErrorKind, Result};

/// Maximum of a peer's chunks in flight, and their bytes: enough to fill a wire, and few enough for
/// other messages to get through.
pub(super) const MAX_IN_FLIGHT_CHUNKS: usize = 48;
const MAX_IN_FLIGHT_BYTES: u64 = 32 << 20;
/// Limits for the staging memory that a target grants.
const MAX_SLOTS: u32 = 1024;
const MIN_SLOT_LENGTH: u64 = 4096;

/// Staging memory of a target.
#[derive(Debug)]
struct RemoteSlots {
    memory: RemoteMemory,
    length: u64,
    free: Vec<u32>,
}

/// The chunks in flight to a peer, and its staging slots.
#[derive(Debug, Default)]
pub(super) struct ChunkWindow {
    in_flight: usize,
    bytes: u64,
    /// A chunk found the provider's queue full.
    is_queue_full: bool,
    slots: Option<RemoteSlots>,
}

impl ChunkWindow {
    pub(super) fn is_empty(&self) -> bool {
        self.in_flight == 0
    }

    pub(super) fn set_queue_full(&mut self, is_queue_full: bool) {
        self.is_queue_full = is_queue_full;
    }

    pub(super) fn has_room(&self, takes_slot: bool) -> bool {
        !self.is_queue_full
            && self.in_flight < MAX_IN_FLIGHT_CHUNKS
            && self.bytes < MAX_IN_FLIGHT_BYTES
            && (!takes_slot || self.slots.as_ref().is_some_and(|slots| !slots.free.is_empty()))
    }

    /// Begins a chunk, which may take a slot of the peer.
    pub(super) fn begin(&mut self, length: u64, takes_slot: bool) -> Option<u32> {
        self.in_flight += 1;
        self.bytes += length;
        self.slots.as_mut().filter(|_| takes_slot)?.free.pop()
    }

    pub(super) fn end(&mut self, length: u64, slot: Option<u32>) {
        self.in_flight -= 1;
        self.bytes -= length;
        if let (Some(slot), Some(slots)) = (slot, &mut self.slots) {
            slots.free.push(slot);
        }
    }

    /// The length of the peer's slots, if it granted any.
    pub(super) fn slot_length(&self) -> Option<u64> {
        self.slots.as_ref().map(|slots| slots.length)
    }

    /// The memory of a slot.
    pub(super) fn slot(&self, slot: u32, length: u64) -> Option<fabric::Result<RemoteSlice>> {
        let slots = self.slots.as_ref()?;
        let start = u64::from(slot) * slots.length;
        Some(slots.memory.slice(start..start + length))
    }

    /// The peer granted staging memory.
    pub(super) fn add_slots(
        &mut self,
        memory: RemoteMemory,
        count: u32,
        length: u64,
    ) -> Result<()> {
        let is_good = (1..=MAX_SLOTS).contains(&count)
            && length >= MIN_SLOT_LENGTH
            && length.checked_mul(u64::from(count)).is_some_and(|all| all <= memory.len());
        if !is_good {
            let detail = format!("{count} slots of {length} bytes in {}", memory.len());
            return Err(Error::new(OPEN, ErrorKind::Malformed, detail));
        }
        self.slots.get_or_insert(RemoteSlots { memory, length, free: (0..count).rev().collect() });
        Ok(())
    }
}
