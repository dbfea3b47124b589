//! Operations of the ranks of a set, between machines.
//!
//! Each rank gives its bytes directly to those that need them, by chunks of which several are under way.
//! Elements are reduced in the order of the ranks.
#![allow(unsafe_code)]

use crate::host_operations::{Ranks, Reduction, Stores, copy, share};
use crate::members::Outcome;
use crate::place::Place;
use crate::remote_steps::{Given, RemoteOperation};

/// Gives the bytes of ranks to others: the same to each. `own` are the bytes of this rank, `blocks` of
/// each rank where its bytes go here. `longest` is the most that a rank gives.
///
/// # Safety
/// The places are valid. Those of other ranks' bytes overlap nothing else.
pub(crate) unsafe fn gather(
    on: &mut RemoteOperation<'_>,
    chunk: usize,
    givers: Ranks,
    getters: Ranks,
    own: Place,
    blocks: &[Place],
    longest: usize,
) -> Outcome<()> {
    let rank = on.own();
    let (gives, gets) = (givers.contains(rank as u32), getters.contains(rank as u32));
    let chunk = chunk.min(on.payload_bytes());
    let chunks = longest.div_ceil(chunk).max(1);
    let of_peers = |ranks: Ranks, is_used: bool| -> Vec<usize> {
        let peers = on.peers().iter().copied().filter(|_| is_used);
        peers.filter(|rank| ranks.contains(*rank as u32)).collect()
    };
    let (to, from) = (of_peers(getters, gives), of_peers(givers, gets));
    if gives && gets {
        // SAFETY: both places are of this rank.
        unsafe { copy(blocks[rank].at(), own.at(), own.bytes()) };
    }
    let mut published = 0;
    for read in 0..chunks {
        while published < chunks && on.may_publish() {
            if !to.is_empty() {
                let part = own.part(published * chunk, chunk);
                on.begin(Given::All(part.bytes()))?;
                // SAFETY: the step has so many bytes.
                unsafe { copy(on.target(0), part.at(), part.bytes()) };
            }
            on.publish(&to)?;
            published += 1;
        }
        if read == 0 && givers == Ranks::All && getters == Ranks::All {
            on.wait_for_all()?;
        }
        for other in &from {
            let part = blocks[*other].part(read * chunk, chunk);
            // SAFETY: the rank has given so many bytes; the caller's promise for the block.
            unsafe { copy(part.at(), on.source(*other, part.bytes())?, part.bytes()) };
        }
        on.end(&from);
    }
    on.finish()
}

/// Gives each rank its block of ranks. `own` are the blocks that this rank gives, `blocks` of each rank
/// where its bytes go here. `longest` is the longest block of all.
///
/// # Safety
/// As for [`gather`]; blocks may be where those are that this rank gives to the same ranks.
pub(crate) unsafe fn scatter(
    on: &mut RemoteOperation<'_>,
    chunk: usize,
    givers: Ranks,
    own: &[Place],
    blocks: &[Place],
    longest: usize,
) -> Outcome<()> {
    let rank = on.own();
    let gives = givers.contains(rank as u32);
    let chunk = chunk.min(on.payload_bytes());
    let chunks = longest.div_ceil(chunk).max(1);
    let peers = on.peers().iter().copied();
    let from: Vec<usize> = peers.filter(|rank| givers.contains(*rank as u32)).collect();
    if gives {
        // SAFETY: both places are of this rank.
        unsafe { copy(blocks[rank].at(), own[rank].at(), own[rank].bytes()) };
    }
    let mut published = 0;
    for read in 0..chunks {
        while published < chunks && on.may_publish() {
            if gives {
                let each = chunk.min(longest - published * chunk);
                // SAFETY: as `give_parts` requires.
                unsafe { give_parts(on, own, published * chunk, chunk, each)? };
            } else {
                on.publish(&[])?;
            }
            published += 1;
        }
        if read == 0 && givers == Ranks::All {
            on.wait_for_all()?;
        }
        for other in &from {
            let part = blocks[*other].part(read * chunk, chunk);
            // SAFETY: the rank has given so many bytes; the caller's promise for the block.
            unsafe { copy(part.at(), on.source(*other, part.bytes())?, part.bytes()) };
        }
        on.end(&from);
    }
    on.finish()
}

/// Publishes a step in which each other rank gets `each` bytes: its part of `own`.
///
/// # Safety
/// The places are valid, and their parts are no longer than `each`.
unsafe fn give_parts(
    on: &mut RemoteOperation<'_>,
    own: &[Place],
    offset: usize,
    chunk: usize,
    each: usize,
) -> Outcome<()> {
    on.begin(Given::Each(each))?;
    for other in on.peers().iter().filter(|_| each > 0) {
        let part = own[*other].part(offset, chunk);
        // SAFETY: the step has so many bytes for each rank.
        unsafe { copy(on.target(*other), part.at(), part.bytes()) };
    }
    on.publish(on.peers())
}

/// Reduces blocks of all ranks: each gets the reduction of those at its place. `own` are the blocks of
/// this rank, `to` is where its result goes. `longest` is the longest block.
///
/// # Safety
/// The places are valid. `to` may be the block of this rank, or begin where its blocks do.
pub(crate) unsafe fn reduce_scatter(
    on: &mut RemoteOperation<'_>,
    chunk: usize,
    reduction: Reduction,
    own: &[Place],
    to: Place,
    longest: usize,
) -> Outcome<()> {
    let rank = on.own();
    let chunk = chunk.min(on.payload_bytes());
    let chunks = longest.div_ceil(chunk).max(1);
    let mut published = 0;
    for read in 0..chunks {
        while published < chunks && on.may_publish() {
            let each = chunk.min(longest - published * chunk);
            // SAFETY: the longest block is as long.
            unsafe { give_parts(on, own, published * chunk, chunk, each)? };
            published += 1;
        }
        on.wait_for_all()?;
        let part = to.part(read * chunk, chunk);
        let mut sources = Vec::with_capacity(on.count());
        for place in 0..on.count() {
            sources.push(match place == rank {
                true => own[rank].part(read * chunk, chunk).at().cast_const(),
                false => on.source(place, part.bytes())?,
            });
        }
        // SAFETY: each source has so many bytes; the caller's promise for the target.
        unsafe { reduction.run(Stores::Cached, part.at(), &sources, part.bytes()) };
        on.end(on.peers());
    }
    on.finish()
}

/// Reduces bytes of all ranks, of which each that gets the result reduces all.
///
/// # Safety
/// The places are valid, and equal or apart.
pub(crate) unsafe fn reduce_one_step(
    on: &mut RemoteOperation<'_>,
    reduction: Reduction,
    getters: Ranks,
    from: Place,
    to: Place,
) -> Outcome<()> {
    let rank = on.own();
    let chunk = on.payload_bytes();
    for offset in (0..from.bytes().max(1)).step_by(chunk) {
        let part = from.part(offset, chunk);
        on.begin(Given::All(part.bytes()))?;
        // SAFETY: the step has so many bytes.
        unsafe { copy(on.target(0), part.at(), part.bytes()) };
        on.publish(on.peers())?;
        on.wait_for_all()?;
        let target = to.part(offset, chunk);
        if getters.contains(rank as u32) {
            let mut sources = Vec::with_capacity(on.count());
            for place in 0..on.count() {
                sources.push(match place == rank {
                    true => on.own_source(),
                    false => on.source(place, target.bytes())?,
                });
            }
            // SAFETY: all ranks give chunks of so many bytes.
            unsafe { reduction.run(Stores::Cached, target.at(), &sources, target.bytes()) };
        }
        on.end(on.peers());
    }
    on.finish()
}

/// Reduces bytes of all ranks in two exchanges: each rank reduces its share, then the ranks that get the
/// result gather the shares.
///
/// # Safety
/// The places are valid, and equal or apart.
pub(crate) unsafe fn reduce_two_steps(
    on: &mut RemoteOperation<'_>,
    chunk: usize,
    reduction: Reduction,
    getters: Ranks,
    from: Place,
    to: Place,
) -> Outcome<()> {
    let (rank, count) = (on.own(), on.count());
    let part = |of: Place, place: usize| {
        let (begin, length) = share(from.bytes(), place as u32, count as u32);
        of.part(begin, length)
    };
    let own: Vec<Place> = (0..count).map(|place| part(from, place)).collect();
    let (_, longest) = share(from.bytes(), 0, count as u32);
    let gets = getters.contains(rank as u32);
    let mut result = if gets { Vec::new() } else { vec![0_u8; own[rank].bytes()] };
    let target = match gets {
        true => part(to, rank),
        false => Place::new(result.as_mut_ptr(), result.len()),
    };
    let blocks: Vec<Place> = match gets {
        true => (0..count).map(|place| part(to, place)).collect(),
        false => vec![Place::NONE; count],
    };
    // SAFETY: the caller's promise; a share of `to` is that of `from`, or apart from all of them.
    unsafe {
        reduce_scatter(on, chunk, reduction, &own, target, longest)?;
        gather(on, chunk, Ranks::All, getters, target, &blocks, longest)
    }
}
