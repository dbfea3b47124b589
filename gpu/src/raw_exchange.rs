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
    pub(crate) unused: u32,
    pub(crate) own_words: u64,
    pub(crate) words: [u64; MAX_RANKS],
    pub(crate) stop: u64,
    pub(crate) failed: u64,
    pub(crate) pushes: [RawPiece; MAX_RANKS],
    pub(crate) sources: [u64; MAX_RANKS],
    pub(crate) results: [u64; MAX_RANKS],
    pub(crate) reduced_bytes: u64,
    pub(crate) copies: [RawPiece; MAX_RANKS],
}

/// The size that the kernel's parameter has.
const _: () = assert!(size_of::<RawExchange>() == 1216);

/// The word of an exchange that the device of rank `writer` writes for another one: its offset in the
/// words of that one.
pub(crate) fn word_offset(phase: u32, block: u32, writer: u32) -> u64 {
    u64::from((phase * MAX_BLOCKS + block) * MAX_RANKS as u32 + writer) * 4
}
