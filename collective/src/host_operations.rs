//! Collective operations in host memory of the ranks of a machine.
//!
//! Ranks copy chunks to common memory, from which others copy or reduce them. Or they publish where
//! their bytes are, and others copy them by the kernel: large operations save a copy so, if the system
//! allows it. Elements are always reduced in the order of the ranks.
#![allow(unsafe_code)]

use crate::host_steps::HostOperation;
use crate::members::Outcome;
use crate::place::Place;
use reduction::{DataType, ReduceOp};
use reduction::{reduce, reduce_streaming};
use transfer::host_copy;

/// Blocks of parts that ranks reduce begin at multiples of this.
const GRANULE: usize = 64;
/// Bytes of each rank that are read at once to be reduced: those of all ranks stay in the cache.
const READ_BYTES: usize = 64 << 10;

/// Copies bytes, unless they are the same.
///
/// # Safety
/// As for [`host_copy::copy`].
pub(crate) unsafe fn copy(to: *mut u8, from: *const u8, bytes: usize) {
    if bytes > 0 && to.cast_const() != from {
        // SAFETY: the caller's promise.
        unsafe { host_copy::copy(to, from, bytes) };
    }
}

/// Where the result of an operation goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stores {
    /// To the caches.
    Cached,
    /// Past the caches: the result does not fit into them.
    Streaming,
}

impl Stores {
    /// From this number of bytes of all ranks on. Measured on a Zen 5 with 32 MiB of cache.
    const MIN_STREAMING: usize = 24 << 20;
    /// Ranks that share a cache, at most.
    const SHARING_RANKS: usize = 8;

    /// For a rank that reads and writes so many bytes. Those that it only overwrites where it has read
    /// are in the cache.
    pub(crate) fn of_operation(bytes: usize, ranks: u32) -> Self {
        let sharing = (ranks as usize).min(Self::SHARING_RANKS);
        if bytes.saturating_mul(sharing) > Self::MIN_STREAMING {
            Self::Streaming
        } else {
            Self::Cached
        }
    }

    /// Copies bytes of the result, unless they are there.
    ///
    /// # Safety
    /// As for [`host_copy::copy_around_caches`].
    unsafe fn copy(self, to: *mut u8, from: *const u8, bytes: usize) {
        if self == Self::Streaming && to.cast_const() != from {
            // SAFETY: the caller's promise.
            unsafe { host_copy::copy_around_caches(to, from, bytes) };
        } else {
            // SAFETY: the caller's promise.
            unsafe { copy(to, from, bytes) };
        }
    }
}

/// The share of a rank in bytes that all ranks reduce together: offset and length.
pub(crate) fn share(total: usize, rank: u32, ranks: u32) -> (usize, usize) {
    let each = total.div_ceil(ranks as usize).next_multiple_of(GRANULE);
    let begin = (each * rank as usize).min(total);
    (begin, (begin + each).min(total) - begin)
}

/// How elements are reduced.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reduction {
    op: ReduceOp,
    data_type: DataType,
}

impl Reduction {
    pub(crate) fn new(op: ReduceOp, data_type: DataType) -> Self {
        Self { op, data_type }
    }

    /// Reduces elements of so many bytes.
    ///
    /// # Safety
    /// As for [`reduce`].
    pub(crate) unsafe fn run(
        self,
        stores: Stores,
        to: *mut u8,
        sources: &[*const u8],
        bytes: usize,
    ) {
        let run = if stores == Stores::Streaming { reduce_streaming } else { reduce };
        // SAFETY: the caller's promise.
        unsafe { run(self.op, self.data_type, to, sources, bytes / self.data_type.size()) };
    }
}

/// How bytes go from rank to rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Route {
    /// By chunks of so many bytes, which the ranks copy to common memory.
    Chunks(usize),
    /// Ranks read the memory of each other.
    Direct,
}

/// The way of an operation: how bytes go from rank to rank, and into the result.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Way {
    route: Route,
    stores: Stores,
}

impl Way {
    pub(crate) fn new(route: Route, stores: Stores) -> Self {
        Self { route, stores }
    }
}

/// Which ranks give bytes, and which get them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ranks {
    All,
    One(u32),
}

impl Ranks {
    pub(crate) fn contains(self, rank: u32) -> bool {
        self == Self::All || self == Self::One(rank)
    }
}

/// Gives the bytes of ranks to others: the same to each. `own` are the bytes of this rank, `blocks` of
/// each rank where its bytes go here. `longest` is the most that a rank gives.
///
/// # Safety
/// The places are valid. Those of other ranks' bytes overlap nothing else.
pub(crate) unsafe fn gather(
    on: &mut HostOperation<'_>,
    Way { route, stores }: Way,
    givers: Ranks,
    getters: Ranks,
    own: Place,
    blocks: &[Place],
    longest: usize,
) -> Outcome<()> {
    let rank = on.rank();
    let (gives, gets) = (givers.contains(rank), getters.contains(rank));
    let from: Vec<u32> = on.others().filter(|rank| givers.contains(*rank)).collect();
    match route {
        Route::Direct => {
            on.publish_address(own.at().cast_const())?;
            if gives && gets {
                // SAFETY: both places are of this rank.
                unsafe { stores.copy(blocks[rank as usize].at(), own.at(), own.bytes()) };
            }
            for other in from.iter().filter(|_| gets) {
                let block = blocks[*other as usize];
                let at = on.address(*other)?;
                // SAFETY: the caller's promise for the block.
                unsafe { on.read_memory(*other, at, block.at(), block.bytes())? };
            }
            on.end();
            on.barrier()
        }
        Route::Chunks(chunk) => {
            for offset in (0..longest.max(1)).step_by(chunk) {
                let to = on.begin(chunk.min(longest - offset))?;
                if gives {
                    let part = own.part(offset, chunk);
                    // SAFETY: a step has space for a chunk.
                    unsafe { copy(to, part.at(), part.bytes()) };
                }
                on.publish();
                if gives && gets {
                    let (from, to) =
                        (own.part(offset, chunk), blocks[rank as usize].part(offset, chunk));
                    // SAFETY: both places are of this rank.
                    unsafe { stores.copy(to.at(), from.at(), from.bytes()) };
                }
                for other in from.iter().filter(|_| gets) {
                    let part = blocks[*other as usize].part(offset, chunk);
                    // SAFETY: the rank has published so many bytes; the caller's promise for the block.
                    unsafe { stores.copy(part.at(), on.source(*other)?, part.bytes()) };
                }
                on.end();
            }
            Ok(())
        }
    }
}

/// Gives each rank its block of ranks. `own` are the blocks that this rank gives, `blocks` of each rank
/// where its bytes go here. `longest` is the longest block of all. `is_in_place` if blocks are written
/// over those that others get.
///
/// # Safety
/// As for [`gather`].
pub(crate) unsafe fn scatter(
    on: &mut HostOperation<'_>,
    Way { route, stores }: Way,
    givers: Ranks,
    own: &[Place],
    blocks: &[Place],
    longest: usize,
    is_in_place: bool,
) -> Outcome<()> {
    let rank = on.rank();
    let gives = givers.contains(rank);
    let from: Vec<u32> = on.others().filter(|rank| givers.contains(*rank)).collect();
    match route {
        Route::Direct => {
            // Where each rank finds its block: in memory that the ranks read, too.
            let copies: Vec<Vec<u8>> = match is_in_place && gives {
                // SAFETY: the places are valid.
                true => own.iter().map(|it| unsafe { bytes_of(*it) }).collect(),
                false => Vec::new(),
            };
            let table: Vec<u64> = if is_in_place && gives {
                copies.iter().map(|copy| copy.as_ptr().expose_provenance() as u64).collect()
            } else {
                own.iter().map(|it| it.at().expose_provenance() as u64).collect()
            };
            on.publish_address(table.as_ptr())?;
            if gives {
                let (from, to) = (own[rank as usize], blocks[rank as usize]);
                // SAFETY: both places are of this rank.
                unsafe { stores.copy(to.at(), from.at(), from.bytes()) };
            }
            for other in &from {
                let block = blocks[*other as usize];
                let mut at = 0_u64;
                let table = on.address(*other)?;
                // SAFETY: the caller's promise for the block.
                unsafe {
                    let entry = table.wrapping_add(u64::from(rank) * 8);
                    on.read_memory(*other, entry, (&raw mut at).cast(), size_of::<u64>())?;
                    on.read_memory(*other, at, block.at(), block.bytes())?;
                }
            }
            on.end();
            on.barrier()
        }
        Route::Chunks(chunk) => {
            let ranks = on.ranks() as usize;
            let chunk = (chunk / ranks / GRANULE * GRANULE).max(GRANULE);
            for offset in (0..longest.max(1)).step_by(chunk) {
                let each = chunk.min(longest - offset).next_multiple_of(size_of::<u64>());
                let to = on.begin(each * ranks)?;
                if gives {
                    for (number, block) in own.iter().enumerate() {
                        let part = block.part(offset, chunk);
                        if number == rank as usize {
                            continue;
                        }
                        // SAFETY: a step has space for a chunk of each rank.
                        unsafe { copy(to.add(number * each), part.at(), part.bytes()) };
                    }
                    let from = own[rank as usize].part(offset, chunk);
                    let to = blocks[rank as usize].part(offset, chunk);
                    // SAFETY: both places are of this rank.
                    unsafe { stores.copy(to.at(), from.at(), from.bytes()) };
                }
                on.publish();
                for other in &from {
                    let part = blocks[*other as usize].part(offset, chunk);
                    // SAFETY: the rank has published so many bytes; the caller's promise for the block.
                    unsafe {
                        let from = on.source(*other)?.add(rank as usize * each);
                        stores.copy(part.at(), from, part.bytes());
                    }
                }
                on.end();
            }
            Ok(())
        }
    }
}

/// # Safety
/// The place is valid for reads.
unsafe fn bytes_of(place: Place) -> Vec<u8> {
    let mut bytes = vec![0; place.bytes()];
    // SAFETY: the caller's promise.
    unsafe { copy(bytes.as_mut_ptr(), place.at(), place.bytes()) };
    bytes
}

/// Reduces blocks of all ranks: rank n gets the reduction of the nth ones. `own` are the blocks of this
/// rank, `to` is where its result goes. `longest` is the longest block.
///
/// # Safety
/// The places are valid. `to` may be a block of this rank, or overlap those as [`scatter`]'s blocks may.
pub(crate) unsafe fn reduce_scatter(
    on: &mut HostOperation<'_>,
    Way { route, stores }: Way,
    reduction: Reduction,
    own: &[Place],
    to: Place,
    longest: usize,
) -> Outcome<()> {
    let rank = on.rank() as usize;
    let ranks = on.ranks() as usize;
    match route {
        Route::Direct => {
            let table: Vec<u64> = own.iter().map(|it| it.at().expose_provenance() as u64).collect();
            on.publish_address(table.as_ptr())?;
            on.wait_for_all()?;
            let mut addresses = vec![0_u64; ranks];
            for other in on.others() {
                let entry = on.address(other)?.wrapping_add(rank as u64 * 8);
                let address = (&raw mut addresses[other as usize]).cast();
                // SAFETY: a word.
                unsafe { on.read_memory(other, entry, address, size_of::<u64>())? };
            }
            // Others read blocks of this rank, which the result must not change.
            let is_apart = own.iter().enumerate().all(|(number, block)| {
                let (begin, end) = (block.at().addr(), block.at().addr() + block.bytes());
                number == rank || to.at().addr() >= end || to.at().addr() + to.bytes() <= begin
            });
            let mut result = if is_apart { Vec::new() } else { vec![0_u8; to.bytes()] };
            let target = if is_apart { to.at() } else { result.as_mut_ptr() };
            // SAFETY: the addresses were published for this.
            unsafe { reduce_direct(on, stores, reduction, own[rank], target, &addresses)? };
            on.end();
            on.barrier()?;
            if !is_apart {
                // SAFETY: the caller's promise.
                unsafe { copy(to.at(), result.as_ptr(), to.bytes()) };
            }
            Ok(())
        }
        Route::Chunks(chunk) => {
            let chunk = (chunk / ranks / GRANULE * GRANULE).max(GRANULE);
            for offset in (0..longest.max(1)).step_by(chunk) {
                let each = chunk.min(longest - offset).next_multiple_of(size_of::<u64>());
                let slot = on.begin(each * ranks)?;
                for (number, block) in own.iter().enumerate().filter(|(at, _)| *at != rank) {
                    let part = block.part(offset, chunk);
                    // SAFETY: a step has space for a chunk of each rank.
                    unsafe { copy(slot.add(number * each), part.at(), part.bytes()) };
                }
                on.publish();
                on.wait_for_all()?;
                let part = to.part(offset, chunk);
                let mut sources = Vec::with_capacity(ranks);
                for other in 0..ranks {
                    let from = match other == rank {
                        true => own[rank].part(offset, chunk).at().cast_const(),
                        // SAFETY: the rank has published so many bytes.
                        false => unsafe { on.source(other as u32)?.add(rank * each) },
                    };
                    sources.push(from);
                }
                // SAFETY: each source has so many bytes; the caller's promise for the target.
                unsafe { reduction.run(stores, part.at(), &sources, part.bytes()) };
                on.end();
            }
            Ok(())
        }
    }
}

/// Reduces bytes of all ranks, which are read from the memory of the others.
///
/// # Safety
/// `target` is valid for as many bytes as `own`. `addresses` were published by the ranks.
unsafe fn reduce_direct(
    on: &HostOperation<'_>,
    stores: Stores,
    reduction: Reduction,
    own: Place,
    target: *mut u8,
    addresses: &[u64],
) -> Outcome<()> {
    let ranks = addresses.len();
    let mut read = vec![0_u8; ranks.saturating_sub(1) * READ_BYTES.min(own.bytes())];
    let each = READ_BYTES.min(own.bytes());
    for offset in (0..own.bytes()).step_by(READ_BYTES) {
        let part = own.part(offset, READ_BYTES);
        let mut sources = vec![part.at().cast_const(); ranks];
        for (number, other) in on.others().enumerate() {
            let to = read[number * each..].as_mut_ptr();
            let from = addresses[other as usize].wrapping_add(offset as u64);
            // SAFETY: there are so many bytes for each rank.
            unsafe { on.read_memory(other, from, to, part.bytes())? };
            sources[other as usize] = to;
        }
        // SAFETY: the caller's promise.
        unsafe {
            reduction.run(stores, target.add(offset), &sources, part.bytes());
        };
    }
    Ok(())
}

/// Reduces bytes of all ranks, in one exchange: each rank that gets the result reduces all.
///
/// # Safety
/// The places are valid, and equal or apart.
pub(crate) unsafe fn reduce_one_step(
    on: &mut HostOperation<'_>,
    chunk: usize,
    stores: Stores,
    reduction: Reduction,
    getters: Ranks,
    from: Place,
    to: Place,
) -> Outcome<()> {
    let rank = on.rank();
    for offset in (0..from.bytes().max(1)).step_by(chunk) {
        let part = from.part(offset, chunk);
        let slot = on.begin(part.bytes())?;
        // SAFETY: a step has space for a chunk.
        unsafe { copy(slot, part.at(), part.bytes()) };
        on.publish();
        if getters.contains(rank) {
            let target = to.part(offset, chunk);
            // SAFETY: all ranks publish chunks of so many bytes.
            unsafe { reduce_step(on, stores, reduction, target.at(), 0, part)? };
        }
        on.end();
    }
    Ok(())
}

/// Reduces bytes of this step, from an offset on. `own` are those of this rank.
///
/// # Safety
/// All ranks publish so many bytes; the target has space for them.
unsafe fn reduce_step(
    on: &mut HostOperation<'_>,
    stores: Stores,
    reduction: Reduction,
    target: *mut u8,
    offset: usize,
    own: Place,
) -> Outcome<()> {
    on.wait_for_all()?;
    let mut sources = Vec::with_capacity(on.ranks() as usize);
    for other in 0..on.ranks() {
        sources.push(match other == on.rank() {
            true => own.at().cast_const(),
            // SAFETY: the caller's promise.
            false => unsafe { on.source(other)?.add(offset) },
        });
    }
    // SAFETY: the caller's promise.
    unsafe { reduction.run(stores, target, &sources, own.bytes()) };
    Ok(())
}

/// Reduces bytes of all ranks, in two exchanges: each rank reduces its share, then the ranks that get
/// the result gather the shares.
///
/// # Safety
/// The places are valid, and equal or apart.
pub(crate) unsafe fn reduce_two_steps(
    on: &mut HostOperation<'_>,
    Way { route, stores }: Way,
    reduction: Reduction,
    getters: Ranks,
    from: Place,
    to: Place,
) -> Outcome<()> {
    let (rank, ranks) = (on.rank(), on.ranks());
    let gets = getters.contains(rank);
    match route {
        Route::Direct => {
            on.publish_address(from.at().cast_const())?;
            on.wait_for_all()?;
            let (begin, length) = share(from.bytes(), rank, ranks);
            let mut addresses = vec![0_u64; ranks as usize];
            for other in on.others() {
                addresses[other as usize] = on.address(other)?.wrapping_add(begin as u64);
            }
            let own = from.part(begin, length);
            let mut result = if gets { Vec::new() } else { vec![0_u8; length] };
            let target = match gets {
                true => to.part(begin, length).at(),
                false => result.as_mut_ptr(),
            };
            // SAFETY: the target has space for the share; the addresses were published for this.
            unsafe { reduce_direct(on, stores, reduction, own, target, &addresses)? };
            on.end();
            on.publish_address(target.cast_const())?;
            for other in on.others().filter(|_| gets) {
                let (begin, length) = share(from.bytes(), other, ranks);
                let part = to.part(begin, length);
                let at = on.address(other)?;
                // SAFETY: the caller's promise for the place.
                unsafe { on.read_memory(other, at, part.at(), part.bytes())? };
            }
            on.end();
            on.barrier()
        }
        Route::Chunks(chunk) => {
            for offset in (0..from.bytes().max(1)).step_by(chunk) {
                let (part, result) = (from.part(offset, chunk), to.part(offset, chunk));
                let slot = on.begin(part.bytes())?;
                // SAFETY: a step has space for a chunk.
                unsafe { copy(slot, part.at(), part.bytes()) };
                on.publish();
                on.wait_for_all()?;
                let (begin, length) = share(part.bytes(), rank, ranks);
                let mut sources = Vec::with_capacity(ranks as usize);
                for other in 0..ranks {
                    // SAFETY: all ranks publish chunks of so many bytes.
                    sources.push(unsafe { on.source(other)?.add(begin) });
                }
                on.end();
                let (_, longest) = share(part.bytes(), 0, ranks);
                let slot = on.begin(longest)?;
                // SAFETY: the chunks of the step before are not written before this one was published.
                unsafe { reduction.run(Stores::Cached, slot, &sources, length) };
                on.publish();
                for other in on.others().chain([rank]).filter(|_| gets) {
                    let (begin, length) = share(part.bytes(), other, ranks);
                    let target = result.part(begin, length);
                    // SAFETY: the rank has published so many bytes.
                    unsafe { stores.copy(target.at(), on.source(other)?, target.bytes()) };
                }
                on.end();
            }
            Ok(())
        }
    }
}
