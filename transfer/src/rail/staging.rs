//! Slots of pinned memory, and the copies that devices make to and from them.

use std::collections::{HashMap, VecDeque};

use fabric::{MemoryRegion, RegionSlice};
use gpu::{Device, DeviceName, Memory, Point, Slice, Stream};

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
pub(super) struct Copies {
    streams: HashMap<DeviceName, (Stream, VecDeque<(u64, Point)>)>,
}

impl Copies {
    pub(super) fn begin(
        &mut self,
        number: u64,
        device: &Device,
        to: &Slice,
        from: &Slice,
    ) -> Result<()> {
        let of_device = |error| Error::of_device(COPY, error);
        let (stream, begun) = match self.streams.entry(device.name()) {
            std::collections::hash_map::Entry::Occupied(known) => known.into_mut(),
            std::collections::hash_map::Entry::Vacant(place) => {
                place.insert((device.stream().map_err(of_device)?, VecDeque::new()))
            }
        };
        stream.copy(to, from).map_err(of_device)?;
        match stream.point() {
            Ok(point) => {
                begun.push_back((number, point));
                Ok(())
            }
            Err(error) => {
                // It was begun all the same, and its memory may be used again after this.
                let _ = stream.synchronize(gpu::PATIENCE);
                Err(of_device(error))
            }
        }
    }

    /// What is done.
    pub(super) fn look(&mut self, done: &mut Vec<(u64, Result<()>)>) {
        for (_, begun) in self.streams.values_mut() {
            while let Some((number, point)) = begun.front() {
                let outcome = match point.is_done() {
                    Ok(false) => break,
                    Ok(true) => Ok(()),
                    Err(error) => Err(Error::of_device(COPY, error)),
                };
                done.push((*number, outcome));
                begun.pop_front();
            }
        }
    }

    pub(super) fn are_under_way(&self) -> bool {
        self.streams.values().any(|(_, begun)| !begun.is_empty())
    }
}
