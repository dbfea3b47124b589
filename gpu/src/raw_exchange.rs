//! An exchange in the layout of its kernel, and what the kernel does, for a device without one.
#![allow(unsafe_code)]

use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

use reduction::{DataType, ReduceOp};

/// The most devices of an exchange.
pub(crate) const MAX_RANKS: usize = 16;
/// The most blocks of a launch.
pub(crate) const MAX_BLOCKS: u32 = 256;
/// Bytes of the words of a device: for two phases, each block, and each other device.
pub(crate) const WORD_BYTES: u64 = 2 * MAX_BLOCKS as u64 * MAX_RANKS as u64 * 4;

/// A place, which may be a stage.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RawPlace {
    address: u64,
    is_stage: bool,
}

impl RawPlace {
    pub(crate) fn new(address: u64, is_stage: bool) -> Self {
        Self { address, is_stage }
    }
}

/// Bytes to copy.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct RawPiece {
    from: u64,
    to: u64,
    bytes: u64,
    chunk: u64,
    is_from_staged: u32,
    is_to_staged: u32,
}

impl RawPiece {
    pub(crate) fn new(from: RawPlace, to: RawPlace, bytes: u64, chunk: u64) -> Self {
        Self {
            from: from.address,
            to: to.address,
            bytes,
            chunk,
            is_from_staged: from.is_stage.into(),
            is_to_staged: to.is_stage.into(),
        }
    }
}

/// The words by which devices wait for each other.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct RawWords {
    own: u64,
    all: [u64; MAX_RANKS],
    stop: u64,
    failed: u64,
}

impl RawWords {
    /// The words of each device, of which this one has a rank.
    pub(crate) fn new(rank: u32, all: impl Iterator<Item = u64>, stop: u64, failed: u64) -> Self {
        let mut words = [0; MAX_RANKS];
        words.iter_mut().zip(all).for_each(|(to, word)| *to = word);
        Self { own: words[rank as usize], all: words, stop, failed }
    }
}

/// The sources and results of a reduction.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct RawReduction {
    sources: [u64; MAX_RANKS],
    results: [u64; MAX_RANKS],
    bytes: u64,
    chunk: u64,
}

/// An exchange, as exchange.cu declares it.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct RawExchange {
    ranks: u32,
    rank: u32,
    number: u32,
    data_type: u32,
    op: u32,
    results_count: u32,
    has_second_phase: u32,
    staged_sources: u32,
    staged_results: u32,
    chunks: u32,
    unused: u32,
    stage_distance: u64,
    words: RawWords,
    pushes: [RawPiece; MAX_RANKS],
    reduction: RawReduction,
    copies: [RawPiece; MAX_RANKS],
}

/// The size that the kernel's parameter has.
const _: () = assert!(size_of::<RawExchange>() == 1760);

/// The word of an exchange that the device of rank `writer` writes for another one: its offset in the
/// words of that one.
fn word_offset(phase: u32, writer: u32) -> u64 {
    u64::from(phase * MAX_BLOCKS * MAX_RANKS as u32 + writer) * 4
}

/// A part of an exchange.
#[derive(Debug, Clone, Copy)]
struct RawChunk {
    index: u64,
    stage_offset: u64,
}

impl RawChunk {
    /// Where the chunk is.
    fn place(self, base: u64, is_staged: bool, chunk: u64) -> u64 {
        base + if is_staged { self.stage_offset } else { chunk * self.index }
    }

    /// The bytes of the chunk, of so many in chunks of this length.
    fn length(self, bytes: u64, chunk: u64) -> u64 {
        bytes.saturating_sub(chunk * self.index).min(chunk)
    }
}

impl RawExchange {
    /// An exchange of so many devices that copies and reduces nothing.
    pub(crate) fn new(ranks: u32, rank: u32, number: u32, chunks: u32, words: RawWords) -> Self {
        let pieces = [RawPiece::default(); MAX_RANKS];
        let (sources, results) = ([0; MAX_RANKS], [0; MAX_RANKS]);
        Self {
            ranks,
            rank,
            number,
            data_type: 0,
            op: 0,
            results_count: 0,
            has_second_phase: 0,
            staged_sources: 0,
            staged_results: 0,
            chunks,
            unused: 0,
            stage_distance: 0,
            words,
            pushes: pieces,
            reduction: RawReduction { sources, results, bytes: 0, chunk: 0 },
            copies: pieces,
        }
    }

    /// Adds what is copied before and after the devices wait, once more if it is gathered.
    pub(crate) fn set_copies(
        &mut self,
        pushes: [RawPiece; MAX_RANKS],
        copies: [RawPiece; MAX_RANKS],
        is_gathered: bool,
        stage_distance: u64,
    ) {
        (self.pushes, self.copies) = (pushes, copies);
        self.has_second_phase = is_gathered.into();
        self.stage_distance = stage_distance;
    }

    /// Adds a reduction of at most [`MAX_RANKS`] sources to as many results.
    pub(crate) fn set_reduction(
        &mut self,
        data_type: DataType,
        op: ReduceOp,
        sources: &[RawPlace],
        results: &[RawPlace],
        [bytes, chunk]: [u64; 2],
    ) {
        (self.data_type, self.op) = (data_type as u32, op as u32);
        for (number, place) in sources.iter().take(MAX_RANKS).enumerate() {
            self.reduction.sources[number] = place.address;
            self.staged_sources |= u32::from(place.is_stage) << number;
        }
        for (number, place) in results.iter().take(MAX_RANKS).enumerate() {
            self.reduction.results[number] = place.address;
            self.staged_results |= u32::from(place.is_stage) << number;
        }
        self.results_count = results.len().min(MAX_RANKS) as u32;
        (self.reduction.bytes, self.reduction.chunk) = (bytes, chunk);
    }

    fn chunk(&self, index: u32) -> RawChunk {
        let is_odd = self.number.wrapping_add(index) & 1 == 1;
        let stage_offset = if is_odd { self.stage_distance } else { 0 };
        RawChunk { index: u64::from(index), stage_offset }
    }

    /// Takes part in the exchange as one thread, in memory of the host. `wait` returns false if the wait
    /// was given up. Returns false in that case.
    ///
    /// # Safety
    /// All ranges are mapped until it returns.
    pub(crate) unsafe fn run_on_host(&self, wait: impl Fn(&dyn Fn() -> bool) -> bool) -> bool {
        let mut has_ended = false;
        for index in 0..self.chunks {
            let number = self.number.wrapping_add(index);
            let chunk = self.chunk(index);
            // SAFETY: the caller's promise.
            unsafe {
                self.copy_on_host(&self.pushes, chunk);
                if !self.meet_on_host(0, number, &wait, &mut has_ended) {
                    break;
                }
                self.reduce_on_host(chunk);
                if self.has_second_phase != 0
                    && !self.meet_on_host(1, number, &wait, &mut has_ended)
                {
                    break;
                }
                self.copy_on_host(&self.copies, chunk);
            }
        }
        !has_ended
    }

    /// # Safety
    /// As for [`run_on_host`](Self::run_on_host).
    unsafe fn copy_on_host(&self, pieces: &[RawPiece], chunk: RawChunk) {
        for piece in pieces {
            let from = chunk.place(piece.from, piece.is_from_staged != 0, piece.chunk);
            let to = chunk.place(piece.to, piece.is_to_staged != 0, piece.chunk);
            let length = chunk.length(piece.bytes, piece.chunk);
            // SAFETY: the caller's promise.
            unsafe { ptr::copy(from as *const u8, to as *mut u8, length as usize) };
        }
    }

    /// Waits for all others; false if the exchange is given up.
    ///
    /// # Safety
    /// As for [`run_on_host`](Self::run_on_host).
    unsafe fn meet_on_host(
        &self,
        phase: u32,
        number: u32,
        wait: impl Fn(&dyn Fn() -> bool) -> bool,
        has_ended: &mut bool,
    ) -> bool {
        // SAFETY: four aligned bytes each, by the caller's promise.
        let word = |at: u64| unsafe { &*(at as *const AtomicU32) };
        let others = || (0..self.ranks).filter(|rank| *rank != self.rank);
        for other in others() {
            let at = self.words.all[other as usize] + word_offset(phase, self.rank);
            word(at).store(number, Ordering::Release);
        }
        let is_here = |rank: u32| {
            let found = word(self.words.own + word_offset(phase, rank)).load(Ordering::Acquire);
            found.wrapping_sub(number) as i32 >= 0
        };
        let is_stopped = || word(self.words.stop).load(Ordering::Acquire) != 0;
        *has_ended |= !wait(&|| others().all(is_here) || is_stopped());
        let all_here = others().all(is_here);
        if !all_here {
            word(self.words.failed).store(self.number, Ordering::Release);
        }
        all_here
    }

    /// # Safety
    /// As for [`run_on_host`](Self::run_on_host).
    unsafe fn reduce_on_host(&self, chunk: RawChunk) {
        let data_type = DataType::from_number(self.data_type as u8);
        let (Some(data_type), Some(op)) = (data_type, ReduceOp::from_number(self.op as u8)) else {
            return;
        };
        let RawReduction { sources, results, bytes, chunk: chunk_bytes } = self.reduction;
        let length = chunk.length(bytes, chunk_bytes);
        let place = |base, staged: u32, rank: usize| {
            chunk.place(base, staged >> rank & 1 != 0, chunk_bytes)
        };
        let mut places = [ptr::null(); MAX_RANKS];
        for (rank, to) in places.iter_mut().enumerate() {
            *to = place(sources[rank], self.staged_sources, rank) as *const u8;
        }
        let mut result = vec![0_u8; length as usize];
        let count = result.len() / data_type.size();
        let places = &places[..self.ranks as usize];
        // SAFETY: the caller's promise; the result has as many bytes.
        unsafe { reduction::reduce(op, data_type, result.as_mut_ptr(), places, count) };
        for (rank, to) in results.into_iter().enumerate().take(self.results_count as usize) {
            let to = place(to, self.staged_results, rank);
            // SAFETY: as above.
            unsafe { ptr::copy(result.as_ptr(), to as *mut u8, result.len()) };
        }
    }
}
