//! Memory at one end of a host-staged transfer, and copies between it and the slots.

use gpu::{Block, CopyMethod, Device, Slice, Stream};

use crate::blocks::Run;
use crate::error::{Context, Result};
use crate::host_buffer::HostBuffer;
use crate::host_copy::CacheUse;
use crate::region::Buffer;

const PREPARE: &str = "prepare staging copies";

/// The direction of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Direction {
    IntoSlots,
    OutOfSlots,
}

impl Direction {
    /// The destination and the source.
    fn to_and_from<'a, T>(self, memory: &'a T, slots: &'a T) -> (&'a T, &'a T) {
        match self {
            Self::IntoSlots => (slots, memory),
            Self::OutOfSlots => (memory, slots),
        }
    }
}

/// Local memory and the slots, as this process copies between them. Keeps both alive.
#[derive(Debug, Clone)]
pub(super) enum StagedEnd {
    /// By the CPU.
    Host { memory: HostBuffer, slots: HostBuffer },
    /// By a device, which has the slots pinned.
    Device { device: Device, memory: Slice, slots: Slice },
}

impl StagedEnd {
    /// Pins the slots, once for each process, if a device copies.
    pub(super) fn new(buffer: &Buffer, length: u64, slots: &HostBuffer) -> Result<Self> {
        Ok(match buffer {
            Buffer::Host(memory) => Self::Host { memory: memory.clone(), slots: slots.clone() },
            Buffer::Device(memory) => {
                let device = memory.mapped_for().clone();
                let slots = slots.pinned_for(&device)?.whole();
                let memory = memory.slice(0, length).during(PREPARE)?;
                Self::Device { device, memory, slots }
            }
        })
    }

    pub(super) fn device(&self) -> Option<&Device> {
        match self {
            Self::Host { .. } => None,
            Self::Device { device, .. } => Some(device),
        }
    }

    /// Copies now, if the CPU copies.
    pub(super) fn copy_by_cpu(
        &self,
        direction: Direction,
        blocks: &[Block],
        cache_use: CacheUse,
    ) -> Result<()> {
        let Self::Host { memory, slots } = self else { return Ok(()) };
        let (to, from) = direction.to_and_from(memory, slots);
        // The other side reads the slots next: there they belong into a cache.
        let cache_use = match direction {
            Direction::IntoSlots => CacheUse::Normal,
            Direction::OutOfSlots => cache_use,
        };
        blocks.iter().try_for_each(|block| to.copy_rows(from, &Run::from(*block), cache_use))
    }

    /// Starts copies on a stream, if a device copies.
    pub(super) fn start_on(
        &self,
        stream: &Stream,
        direction: Direction,
        blocks: &[Block],
    ) -> gpu::Result<()> {
        let Self::Device { memory, slots, .. } = self else { return Ok(()) };
        let (to, from) = direction.to_and_from(memory, slots);
        match blocks {
            [Block { to: at, from: of, length }] => {
                stream.copy(&to.slice(*at, *length)?, &from.slice(*of, *length)?)
            }
            _ => stream.copy_blocks(to, from, blocks, CopyMethod::Best),
        }
    }
}
