//! Slots of pinned memory, and the copies that devices make to and from them.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use fabric::{MemoryRegion, RegionSlice};
use gpu::{Device, DeviceName, Memory, Slice};

use crate::copies::Copies;
use crate::error::{Error, Result};
use crate::host::HostBuffer;

const COPY: &str = "copy by way of the host";
/// Of a slot: long enough that a copy's beginning and a message do not matter beside it.
pub(super) const SLOT: u64 = 1 << 20;
/// Slots: enough for both copies and the wire to have one while others wait.
pub(super) const SLOTS: u32 = 8;

/// Memory of the host by way of which bytes go that the fabric cannot reach.
#[derive(Debug)]
pub(super) struct Slots {
    buffer: HostBuffer,
    region: MemoryRegion,
    free: Vec<u32>,
}

impl Slots {
    pub(super) fn new(register: impl FnOnce(&HostBuffer) -> Result<MemoryRegion>) -> Result<Self> {
        let buffer = HostBuffer::new(SLOT * u64::from(SLOTS))?;
        let region = register(&buffer)?;
        Ok(Self { buffer, region, free: (0..SLOTS).rev().collect() })
    }

    pub(super) fn has_free(&self) -> bool {
        !self.free.is_empty()
    }

    pub(super) fn take(&mut self) -> Option<u32> {
        self.free.pop()
    }

    pub(super) fn give_back(&mut self, slot: u32) {
        self.free.push(slot);
    }

    /// As the fabric knows it.
    pub(super) fn registered(&self, slot: u32, length: u64) -> fabric::Result<RegionSlice> {
        let start = (u64::from(slot) * SLOT) as usize;
        self.region.slice(start..start + length as usize)
    }

    /// As a device knows it.
    pub(super) fn pinned(&self, slot: u32, length: u64, device: &Device) -> Result<Slice> {
        let memory = self.buffer.pinned_for(device)?;
        part(&memory, u64::from(slot) * SLOT, length)
    }
}

pub(super) fn part(memory: &Memory, offset: u64, length: u64) -> Result<Slice> {
    memory.slice(offset, length).map_err(|error| Error::of_device(COPY, error))
}

/// Copies that devices make, each known by a number.
#[derive(Debug, Default)]
pub(super) struct DeviceCopies(HashMap<DeviceName, Copies<u64>>);

impl DeviceCopies {
    pub(super) fn begin(
        &mut self,
        number: u64,
        device: &Device,
        to: &Slice,
        from: &Slice,
    ) -> Result<()> {
        let copies = match self.0.entry(device.name()) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => place.insert(Copies::new(device)?),
        };
        copies.begin(number, |stream| stream.copy(to, from)).map_err(|(_, error)| error)
    }

    /// What is done.
    pub(super) fn look(&mut self, done: &mut Vec<(u64, Result<()>)>) {
        for copies in self.0.values_mut() {
            while let Some((number, _, outcome)) = copies.next_done() {
                done.push((number, outcome));
            }
        }
    }

    pub(super) fn are_under_way(&self) -> bool {
        self.0.values().any(|copies| copies.count() > 0)
    }
}
