//! The allocator against a model, in one process.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;
use crate::participant::AlwaysAlive;
use crate::words::LocalWords;

const GRANULE: u64 = 64;

fn me() -> Participant {
    Participant::new(1, 1).unwrap()
}

fn allocator(max_blocks: u32) -> Allocator<LocalWords> {
    let words = LocalWords::zeroed(Allocator::<LocalWords>::required_words(max_blocks));
    Allocator::format(words, max_blocks, GRANULE).unwrap()
}

#[test]
fn all_memory_can_be_allocated_in_one_block() {
    let allocator = allocator(16);
    let (caller, owner) = (Caller::new(me(), &AlwaysAlive), Owner::participant(me()));
    allocator.extend(&caller, 0, 1000 * GRANULE).unwrap();
    for _ in 0..3 {
        let (block, range) = allocator.allocate(&caller, owner, 1000 * GRANULE, 1).unwrap();
        assert_eq!(range, BlockRange { offset: 0, length: 1000 * GRANULE });
        let error = allocator.allocate(&caller, owner, 1, 1).unwrap_err();
        assert_eq!(
            error,
            AllocatorError::OutOfMemory { wanted: GRANULE, free: 0, largest_free: 0 }
        );
        allocator.free(&caller, block, owner).unwrap();
        assert_eq!(allocator.audit(&caller).unwrap(), Ok(()));
    }
}

#[test]
fn invalid_sizes_and_alignments_are_refused() {
    let allocator = allocator(16);
    let (caller, owner) = (Caller::new(me(), &AlwaysAlive), Owner::participant(me()));
    allocator.extend(&caller, 0, 1 << 20).unwrap();
    for (bytes, alignment) in [(0, 1), (1, 0), (1, 3), (u64::MAX, 1), (1, 1 << 63)] {
        let error = allocator.allocate(&caller, owner, bytes, alignment).unwrap_err();
        assert_eq!(error, AllocatorError::InvalidSize { bytes, alignment });
    }
    for (offset, length) in
        [(0, 64), (1 << 20, 0), (1 << 20, 63), (u64::MAX - 63, 64), (0, u64::MAX)]
    {
        let error = allocator.extend(&caller, offset, length).unwrap_err();
        assert_eq!(error, AllocatorError::InvalidExtent { offset, length });
    }
    let invalid_block = Block::from_bits(u64::MAX);
    assert_eq!(
        allocator.free(&caller, invalid_block, owner),
        Err(AllocatorError::Stale(invalid_block))
    );
    assert_eq!(allocator.find(invalid_block), Err(AllocatorError::Stale(invalid_block)));
}

#[test]
fn only_the_owner_can_free_and_only_once() {
    let allocator = allocator(16);
    let caller = Caller::new(me(), &AlwaysAlive);
    let (own, topic) = (Owner::participant(me()), Owner::other(7).unwrap());
    allocator.extend(&caller, 0, 1 << 20).unwrap();
    let (block, range) = allocator.allocate(&caller, own, 100, 1).unwrap();
    assert_eq!(allocator.find(block), Ok(range));
    allocator.transfer(block, own, topic).unwrap();
    assert_eq!(allocator.owner(block), Ok(topic));
    let not_owner = AllocatorError::NotOwner { block, owner: topic };
    assert_eq!(allocator.free(&caller, block, own), Err(not_owner));
    assert_eq!(allocator.transfer(block, own, own), Err(not_owner));
    assert_eq!(allocator.reclaim(&caller, own, |_| false), Ok(0));
    assert_eq!(allocator.reclaim(&caller, topic, |_| true), Ok(0), "spared");
    assert_eq!(allocator.reclaim(&caller, topic, |_| false), Ok(1));
    assert_eq!(allocator.free(&caller, block, topic), Err(AllocatorError::Stale(block)));
    let (again, _) = allocator.allocate(&caller, own, 100, 1).unwrap();
    assert_ne!(again, block, "names are not reused");
}

#[test]
fn adjacent_extents_are_not_coalesced() {
    let allocator = allocator(16);
    let (caller, owner) = (Caller::new(me(), &AlwaysAlive), Owner::participant(me()));
    allocator.extend(&caller, 4096, 4096).unwrap();
    allocator.extend(&caller, 0, 4096).unwrap();
    let (first, _) = allocator.allocate(&caller, owner, 4096, 1).unwrap();
    let (second, _) = allocator.allocate(&caller, owner, 4096, 1).unwrap();
    allocator.free(&caller, first, owner).unwrap();
    allocator.free(&caller, second, owner).unwrap();
    assert!(allocator.allocate(&caller, owner, 8192, 1).is_err());
    assert_eq!(allocator.statistics(&caller).unwrap().free, 8192);
    assert_eq!(allocator.audit(&caller).unwrap(), Ok(()));
}

/// The free cache: a request of the same size gets the same block, whatever its neighbours are.
#[test]
fn freed_block_is_reused_unchanged() {
    let allocator = allocator(64);
    let (caller, owner) = (Caller::new(me(), &AlwaysAlive), Owner::participant(me()));
    allocator.extend(&caller, 0, 1 << 20).unwrap();
    let sizes = [300, 4096, 64];
    let three = sizes.map(|bytes| allocator.allocate(&caller, owner, bytes, 1).unwrap());
    for round in 1..=3 {
        for (bytes, (block, range)) in sizes.into_iter().zip(three) {
            let now = Block { generation: block.generation + round - 1, ..block };
            allocator.free(&caller, now, owner).unwrap();
            let (again, there) = allocator.allocate(&caller, owner, bytes, 1).unwrap();
            assert_eq!((again.number(), there), (block.number(), range));
            assert_eq!(again.generation, block.generation + round, "names are not reused");
        }
    }
    assert_eq!(allocator.audit(&caller).unwrap(), Ok(()));
}

/// Cached blocks are memory like all other: they are coalesced when more is needed.
#[test]
fn cached_blocks_are_coalesced_when_needed() {
    let allocator = allocator(64);
    let (caller, owner) = (Caller::new(me(), &AlwaysAlive), Owner::participant(me()));
    allocator.extend(&caller, 0, 64 * GRANULE).unwrap();
    for count in [1, 3, layout::MAX_CACHED, 40] {
        // All different, so that no block fits another request.
        let sizes = (1..=count as u64).map(|number| if count < 8 { number } else { 1 });
        let blocks: Vec<_> = sizes
            .map(|granules| allocator.allocate(&caller, owner, granules * GRANULE, 1).unwrap().0)
            .collect();
        // Every second one first: their neighbours are freed while they are cached, and later.
        for odd in [1, 0] {
            for (_, block) in blocks.iter().enumerate().filter(|(number, _)| number % 2 == odd) {
                allocator.free(&caller, *block, owner).unwrap();
            }
        }
        let (whole, range) = allocator.allocate(&caller, owner, 64 * GRANULE, 1).unwrap();
        assert_eq!(range, BlockRange { offset: 0, length: 64 * GRANULE });
        allocator.free(&caller, whole, owner).unwrap();
        assert_eq!(allocator.audit(&caller).unwrap(), Ok(()));
    }
}

/// Cached blocks give up their block records when needed.
#[test]
fn cached_blocks_release_block_records_when_needed() {
    let allocator = allocator(4);
    let (caller, owner) = (Caller::new(me(), &AlwaysAlive), Owner::participant(me()));
    allocator.extend(&caller, 0, 1 << 20).unwrap();
    let blocks = [1, 2, 3]
        .map(|granules| allocator.allocate(&caller, owner, granules * GRANULE, 1).unwrap().0);
    for block in blocks {
        allocator.free(&caller, block, owner).unwrap();
    }
    let others: Vec<_> =
        (4..=6).map(|granules| allocator.allocate(&caller, owner, granules * GRANULE, 1)).collect();
    assert!(others.iter().all(Result::is_ok), "{others:?}");
}

#[test]
fn full_metadata_is_reported_and_loses_nothing() {
    let allocator = allocator(4);
    let (caller, owner) = (Caller::new(me(), &AlwaysAlive), Owner::participant(me()));
    allocator.extend(&caller, 0, 1 << 20).unwrap();
    let mut blocks = Vec::new();
    let error = loop {
        match allocator.allocate(&caller, owner, 64, 256) {
            Ok((block, _)) => blocks.push(block),
            Err(error) => break error,
        }
    };
    assert_eq!(error, AllocatorError::OutOfBlocks { most: 4 });
    assert_eq!(allocator.audit(&caller).unwrap(), Ok(()));
    for block in blocks {
        allocator.free(&caller, block, owner).unwrap();
    }
    assert_eq!(allocator.statistics(&caller).unwrap().largest_free, 1 << 20);
}

#[test]
fn invalid_metadata_is_refused() {
    let refused = |words: &LocalWords| match Allocator::attach(words) {
        Err(AllocatorError::NotAnAllocator { why }) => why,
        other => panic!("{other:?}"),
    };
    let words = LocalWords::zeroed(Allocator::<LocalWords>::required_words(8));
    assert_eq!(refused(&words), "not initialised, or of another kind");
    Allocator::format(&words, 8, 64).unwrap();
    let set = |at, value| words.store(at, value, Relaxed);
    set(layout::KIND, layout::LAYOUT + 1);
    assert_eq!(refused(&words), "another version");
    set(layout::KIND, layout::LAYOUT);
    set(layout::MAX_BLOCKS, 9);
    assert_eq!(refused(&words), "it is truncated");
    set(layout::MAX_BLOCKS, u64::MAX);
    assert_eq!(refused(&words), "too many blocks");
    set(layout::MAX_BLOCKS, 8);
    set(layout::GRANULE, 64);
    assert_eq!(refused(&words), "its header is inconsistent");
}

#[derive(Debug, Clone)]
enum Step {
    Allocate { bytes: u64, alignment: u32 },
    Free { which: usize },
    Extend { granules: u64, gap: u64 },
    Transfer { which: usize, to: u32 },
    Reclaim { of: u32 },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        8 => (1..20_000_u64, 0..13_u32)
            .prop_map(|(bytes, alignment)| Step::Allocate { bytes, alignment }),
        6 => any::<usize>().prop_map(|which| Step::Free { which }),
        1 => (1..2000_u64, 0..3_u64).prop_map(|(granules, gap)| Step::Extend { granules, gap }),
        1 => (any::<usize>(), 0..4_u32).prop_map(|(which, to)| Step::Transfer { which, to }),
        1 => (0..4_u32).prop_map(|of| Step::Reclaim { of }),
    ];
    prop::collection::vec(step, 1..120)
}

proptest! {
    /// Allocations never overlap, are aligned and large enough, and do not move; the rest is
    /// free.
    #[test]
    fn allocator_matches_the_model(steps in steps(), max_blocks in 8..200_u32) {
        let allocator = allocator(max_blocks);
        let caller = Caller::new(me(), &AlwaysAlive);
        let owner = |number| Owner::other(number).unwrap();
        let (mut end, mut total) = (0, 0);
        let mut taken: Vec<(Block, BlockRange, Owner)> = Vec::new();
        for step in steps {
            match step {
                Step::Allocate { bytes, alignment } => {
                    let alignment = 1 << alignment;
                    match allocator.allocate(&caller, owner(0), bytes, alignment) {
                        Ok((block, range)) => {
                            prop_assert!(range.length >= bytes);
                            prop_assert!(range.length < bytes + GRANULE);
                            prop_assert_eq!(range.offset % alignment.max(GRANULE), 0);
                            let clear = taken.iter().all(|(_, other, _)| {
                                other.offset + other.length <= range.offset
                                    || range.offset + range.length <= other.offset
                            });
                            prop_assert!(clear, "{range:?} overlaps");
                            taken.push((block, range, owner(0)));
                        }
                        Err(AllocatorError::OutOfBlocks { .. }) => {}
                        Err(AllocatorError::OutOfMemory { largest_free, .. }) => {
                            // Never refused while a whole larger class has space.
                            let size = bytes.next_multiple_of(GRANULE) + alignment.max(GRANULE);
                            prop_assert!(largest_free <= size + size / 16, "{largest_free}, {size}");
                        }
                        Err(error) => prop_assert!(false, "{error}"),
                    }
                }
                Step::Free { which } if !taken.is_empty() => {
                    let (block, _, owner) = taken.swap_remove(which % taken.len());
                    prop_assert_eq!(allocator.free(&caller, block, owner), Ok(()));
                    prop_assert_eq!(allocator.free(&caller, block, owner), Err(AllocatorError::Stale(block)));
                }
                Step::Extend { granules, gap } => {
                    let (offset, length) = (end + gap * GRANULE, granules * GRANULE);
                    if allocator.extend(&caller, offset, length).is_ok() {
                        end = offset + length;
                        total += length;
                    }
                }
                Step::Transfer { which, to } if !taken.is_empty() => {
                    let at = which % taken.len();
                    let (block, _, from) = taken[at];
                    prop_assert_eq!(allocator.transfer(block, from, owner(to)), Ok(()));
                    taken[at].2 = owner(to);
                }
                Step::Reclaim { of } => {
                    let before = taken.len();
                    taken.retain(|(_, _, whose)| *whose != owner(of));
                    let freed = allocator.reclaim(&caller, owner(of), |_| false);
                    prop_assert_eq!(freed, Ok(before - taken.len()));
                }
                Step::Free { .. } | Step::Transfer { .. } => {}
            }
            prop_assert_eq!(allocator.audit(&caller).unwrap(), Ok(()));
        }
        let listed: HashMap<_, _> = allocator
            .blocks(&caller)
            .unwrap()
            .into_iter()
            .filter_map(|listed| Some((listed.block, (listed.range, listed.owner?))))
            .collect();
        prop_assert_eq!(listed.len(), taken.len());
        for (block, range, owner) in &taken {
            prop_assert_eq!(listed.get(block), Some(&(*range, *owner)));
            prop_assert_eq!(allocator.find(*block), Ok(*range));
        }
        let statistics = allocator.statistics(&caller).unwrap();
        let in_use: u64 = taken.iter().map(|(_, range, _)| range.length).sum();
        prop_assert_eq!(statistics.total, total);
        prop_assert_eq!(statistics.free, total - in_use);
        prop_assert_eq!(statistics.blocks_allocated, taken.len() as u64);
    }

    /// No corruption of the metadata causes a panic or an endless loop.
    #[test]
    fn corrupted_metadata_does_not_panic(
        scribbles in prop::collection::vec((0..3000_usize, any::<u64>()), 1..40),
        sizes in prop::collection::vec(1..5000_u64, 1..20),
    ) {
        let allocator = allocator(64);
        let caller = Caller { timeout: std::time::Duration::ZERO, ..Caller::new(me(), &AlwaysAlive) };
        allocator.extend(&caller, 0, 1 << 20).unwrap();
        let owner = Owner::participant(me());
        let mut blocks = Vec::new();
        for (at, size) in sizes.iter().enumerate() {
            if let Ok((block, _)) = allocator.allocate(&caller, owner, *size, 64) {
                blocks.push(block);
            }
            let (word, value) = scribbles[at % scribbles.len()];
            // Not the sizes that were checked at the beginning: `attach` keeps those.
            allocator.words.store(3 + word, value, Relaxed);
            let _ = allocator.free(&caller, blocks.get(at / 2).copied().unwrap_or(Block::from_bits(0)), owner);
            let _ = allocator.reclaim(&caller, Owner(1), |_| false);
            let _ = allocator.audit(&caller);
            let _ = allocator.statistics(&caller);
            let _ = allocator.blocks(&caller);
            allocator.words.store(layout::LOCK, 0x7fff_fffe, Relaxed);
        }
    }
}
