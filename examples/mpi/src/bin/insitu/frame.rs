//! A message of the simulation: some rows of the field at a step.

use fabricast::pubsub::{MemoryLocation, Reliability, TopicSettings};
use mpi_examples::Result;
use mpi_examples::heat::rows_of;
use mpi_examples::memory::Location;

/// The topic.
pub(crate) const FIELD: &str = "field";

/// What a message says about its rows, beside them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) step: u64,
    /// The last step, and the steps from one published field to the next.
    pub(crate) last: u64,
    pub(crate) every: u64,
    /// Rows and columns of the grid.
    pub(crate) grid: u64,
    /// Which part of the rows, and of how many parts.
    pub(crate) part: u64,
    pub(crate) parts: u64,
    pub(crate) checksum: u64,
}

impl Frame {
    const WORDS: usize = 7;

    pub(crate) fn to_bytes(self) -> Vec<u8> {
        let Self { step, last, every, grid, part, parts, checksum } = self;
        let words: [u64; Self::WORDS] = [step, last, every, grid, part, parts, checksum];
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let words: Vec<_> = bytes.as_chunks().0.iter().map(|it| u64::from_le_bytes(*it)).collect();
        match words[..] {
            [step, last, every, grid, part, parts, checksum] if part < parts && every > 0 => {
                Ok(Self { step, last, every, grid, part, parts, checksum })
            }
            _ => Err("read frame failed: the message is not one of a simulation".into()),
        }
    }

    /// The bytes of its rows.
    pub(crate) fn length(&self) -> u64 {
        let rows = rows_of(self.part as usize, self.parts as usize, self.grid as usize);
        rows.len() as u64 * self.grid * size_of::<f64>() as u64
    }

    /// The settings of the topic: all ranks use the same. A slow analysis misses the oldest fields,
    /// so that the simulation does not wait for it.
    pub(crate) fn settings(grid: u64, parts: u64, at: Location) -> TopicSettings {
        let most_rows = grid.div_ceil(parts);
        TopicSettings {
            memory: at.first_device().map_or(MemoryLocation::Host, MemoryLocation::Device),
            reliability: Reliability::DropOldest,
            // The last field fits in any case.
            depth: 4 * parts as u32,
            largest: most_rows * grid * size_of::<f64>() as u64,
            loans: 1,
            ..TopicSettings::default()
        }
    }
}
