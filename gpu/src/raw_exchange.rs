//! An exchange in the layout of its kernel.

/// The most devices of an exchange.
pub(crate) const MAX_RANKS: usize = 16;
/// The most blocks of a launch.
pub(crate) const MAX_BLOCKS: u32 = 256;
/// Bytes of the words of a device: for two phases, each block, and each other device.
pub(crate) const WORD_BYTES: u64 = 2 * MAX_BLOCKS as u64 * MAX_RANKS as u64 * 4;

/// Bytes to copy.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct RawPiece {
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) bytes: u64,
    pub(crate) chunk: u64,
    pub(crate) is_from_staged: u32,
    pub(crate) is_to_staged: u32,
}

/// An exchange, as exchange.cu declares it.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct RawExchange {
    pub(crate) ranks: u32,
    pub(crate) rank: u32,
    pub(crate) number: u32,
    pub(crate) data_type: u32,
    pub(crate) op: u32,
    pub(crate) results_count: u32,
    pub(crate) has_second_phase: u32,
    pub(crate) staged_sources: u32,
    pub(crate) staged_results: u32,
    pub(crate) chunks: u32,
    pub(crate) unused: u32,
    pub(crate) stage_distance: u64,
    pub(crate) own_words: u64,
    pub(crate) words: [u64; MAX_RANKS],
    pub(crate) stop: u64,
    pub(crate) failed: u64,
    pub(crate) pushes: [RawPiece; MAX_RANKS],
    pub(crate) sources: [u64; MAX_RANKS],
    pub(crate) results: [u64; MAX_RANKS],
    pub(crate) reduced_bytes: u64,
    pub(crate) reduced_chunk: u64,
    pub(crate) copies: [RawPiece; MAX_RANKS],
}

/// The size that the kernel's parameter has.
const _: () = assert!(size_of::<RawExchange>() == 1760);

/// A part of an exchange.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RawChunk {
    index: u64,
    stage_offset: u64,
}

impl RawExchange {
    pub(crate) fn chunk(&self, index: u32) -> RawChunk {
        let is_odd = self.number.wrapping_add(index) & 1 == 1;
        let stage_offset = if is_odd { self.stage_distance } else { 0 };
        RawChunk { index: u64::from(index), stage_offset }
    }
}

impl RawChunk {
    /// Where the chunk is.
    pub(crate) fn place(self, base: u64, is_staged: bool, chunk: u64) -> u64 {
        base + if is_staged { self.stage_offset } else { chunk * self.index }
    }

    /// The bytes of the chunk, of so many in chunks of this length.
    pub(crate) fn length(self, bytes: u64, chunk: u64) -> u64 {
        bytes.saturating_sub(chunk * self.index).min(chunk)
    }
}

/// The word of an exchange that the device of rank `writer` writes for another one: its offset in the
/// words of that one.
pub(crate) fn word_offset(phase: u32, block: u32, writer: u32) -> u64 {
    u64::from((phase * MAX_BLOCKS + block) * MAX_RANKS as u32 + writer) * 4
}
