use ipc::allocator::{AuditError, BlockInfo};
use ipc::{AlwaysAlive, LocalWords};
use proptest::prelude::*;

use super::*;
use crate::pool::control::page_aligned_sync_words;
use crate::pool::{Direction, PoolId};
use crate::settings::SharedLocation;

const TOPIC: u32 = 7;

impl<W: Words + Clone> PoolControl<W> {
    pub(crate) fn blocks(&self, caller: &Caller<'_>) -> AllocResult<Vec<BlockInfo>> {
        self.allocator.blocks(caller)
    }

    pub(crate) fn audit(&self, caller: &Caller<'_>) -> AllocResult<Result<(), AuditError>> {
        self.allocator.audit(caller)
    }
}

fn caller(place: u32) -> Caller<'static> {
    Caller::new(Participant::new(place, 1).unwrap(), &AlwaysAlive)
}

fn owner() -> Owner {
    Owner::other(TOPIC).unwrap()
}

fn control_segment() -> LocalWords {
    let words = LocalWords::zeroed(PoolControl::<&LocalWords>::required_words(32, 1 << 20));
    let place = SharedLocation::Device([3; 16]);
    let control =
        PoolControl::format(&words, PoolId { place, direction: Direction::Local }, 1 << 20, 32)
            .unwrap();
    control.admit(&caller(0), 0, 1 << 14, 1).unwrap();
    words
}

/// Publishes a message that a stream of `writer` is to write.
fn publish(control: &PoolControl<&LocalWords>, writer: &Caller<'_>) -> (Block, SyncPoint) {
    let own = Owner::participant(writer.me);
    let (block, _) = control.allocate(writer, own, 100).unwrap();
    let sync_point = control.begin_write(block, writer.me);
    control.transfer(block, own, owner()).unwrap();
    (block, sync_point)
}

fn taken(control: &PoolControl<&LocalWords>) -> u64 {
    control.statistics(&caller(0)).unwrap().blocks_allocated
}

#[test]
fn sync_words_fill_whole_pages_of_any_size() {
    for page in [4 << 10, 16 << 10, 64 << 10].map(|bytes: usize| bytes / size_of::<u64>()) {
        for (max_blocks, before) in [(1, 0), (32, 1), (page as u32, page), (5000, 3 * page + 7)] {
            let range = page_aligned_sync_words(max_blocks, before, page);
            assert!(
                [range.start, range.end].iter().all(|end| end.is_multiple_of(page)),
                "{range:?}"
            );
            assert!((before..before + page).contains(&range.start), "{range:?}");
            assert!(range.len() >= max_blocks as usize * SYNC_WORDS, "{range:?}");
        }
    }
    let words = control_segment();
    let range = PoolControl::attach(&words).unwrap().sync_words_range();
    let page = ipc::page_size() as u64;
    assert!(
        [range.start, range.end].iter().all(|end| end.is_multiple_of(page)) && !range.is_empty(),
        "{range:?}"
    );
}

#[test]
fn message_released_before_its_write_is_freed_after_it() {
    let words = control_segment();
    let control = PoolControl::attach(&words).unwrap();
    let (writer, reader) = (caller(1), caller(2));
    let (block, sync_point) = publish(&control, &writer);
    assert!(control.retire(&reader, block, owner()));
    assert!(control.retire(&reader, block, owner()), "a second call has no effect");
    assert_eq!((control.collect(&reader).unwrap(), taken(&control)), (0, 1));
    control.end_write(block, sync_point);
    assert_eq!(control.readiness(block, sync_point), Some(Readiness::Ready));
    assert!(control.has_stream_owned());
    assert_eq!((control.collect(&reader).unwrap(), taken(&control)), (1, 0));
    assert_eq!((control.collect(&reader).unwrap(), control.has_stream_owned()), (0, false));
    assert_eq!(control.readiness(block, sync_point), None);
    // The next message in the same block has another sync point.
    let (again, next) = publish(&control, &writer);
    assert_eq!(again.number(), block.number());
    assert_eq!(control.readiness(again, next), Some(Readiness::Pending));
    assert_eq!(control.readiness(block, sync_point), None);
    // The earlier sync point has no effect any more.
    control.end_write(again, sync_point);
    control.poison(again, sync_point);
    assert_eq!(control.readiness(again, next), Some(Readiness::Pending));
    // A wait for the earlier sync point ends.
    control.end_write(again, next);
    assert!(next.ready().wrapping_sub(sync_point.ready()) as i32 >= 0);
    assert!(control.retire(&reader, again, owner()));
    assert_eq!(taken(&control), 0);
}

#[test]
fn reclaim_poisons_only_messages_of_the_dead_process() {
    let words = control_segment();
    let control = PoolControl::attach(&words).unwrap();
    let (dead, alive) = (caller(1), caller(2));
    let (lost, lost_point) = publish(&control, &dead);
    let (done, done_point) = publish(&control, &dead);
    control.end_write(done, done_point);
    let (other, other_point) = publish(&control, &alive);
    // A loan that was not published.
    let own = Owner::participant(dead.me);
    let (loan, _) = control.allocate(&dead, own, 100).unwrap();
    control.begin_write(loan, dead.me);
    // Its reader released it before the publisher died, or died itself.
    let (left, _) = publish(&control, &dead);
    assert!(control.retire(&alive, left, owner()));
    assert_eq!(taken(&control), 5);
    control.reclaim(&alive, dead.me).unwrap();
    assert_eq!(control.readiness(lost, lost_point), Some(Readiness::Poisoned));
    assert_eq!(control.readiness(done, done_point), Some(Readiness::Ready));
    assert_eq!(control.readiness(other, other_point), Some(Readiness::Pending));
    assert_eq!(taken(&control), 3);
    for block in [lost, done] {
        assert!(control.retire(&alive, block, owner()));
    }
    assert_eq!(taken(&control), 1);
    // A reused block no longer belongs to the dead process.
    let (next, next_point) = publish(&control, &alive);
    control.reclaim(&alive, dead.me).unwrap();
    assert_eq!(control.readiness(next, next_point), Some(Readiness::Pending));
}

#[test]
fn unsignalled_write_retains_its_block_until_its_publisher_dies() {
    let words = control_segment();
    let control = PoolControl::attach(&words).unwrap();
    let (writer, reader) = (caller(1), caller(2));
    let all: Vec<_> = (0..3).map(|_| publish(&control, &writer)).collect();
    let (other, _) = publish(&control, &reader);
    for (block, sync_point) in &all[..2] {
        control.poison_and_retain(*block, *sync_point);
        assert_eq!(control.readiness(*block, *sync_point), Some(Readiness::Poisoned));
    }
    // The publisher died before it had poisoned the last one.
    let (block, sync_point) = all[2];
    let at = control.at(block.number(), WRITER);
    words.store(at, words.load(at, Acquire) | u64::from(RETAINED), Release);
    // The first one still has a reader.
    for (block, _) in &all[1..] {
        assert!(control.retire(&reader, *block, owner()));
    }
    assert_eq!((control.collect(&reader).unwrap(), control.has_stream_owned()), (0, false));
    assert_eq!(taken(&control), 4);
    control.reclaim(&reader, reader.me).unwrap();
    assert_eq!(taken(&control), 4);
    control.reclaim(&reader, writer.me).unwrap();
    assert_eq!(taken(&control), 2);
    assert!(control.retire(&reader, all[0].0, owner()) && control.retire(&reader, other, owner()));
    assert_eq!(taken(&control), 0);
    // A late call has no effect on another message.
    let (next, next_point) = publish(&control, &writer);
    for (block, sync_point) in all {
        control.poison_and_retain(block, sync_point);
    }
    control.poison_and_retain(block, sync_point);
    assert_eq!(control.readiness(next, next_point), Some(Readiness::Pending));
    control.end_write(next, next_point);
    assert!(control.retire(&reader, next, owner()));
    assert_eq!(taken(&control), 0);
}

#[test]
fn ended_write_does_not_block_a_later_publish() {
    let words = control_segment();
    let control = PoolControl::attach(&words).unwrap();
    let me = caller(1);
    let own = Owner::participant(me.me);
    let (block, _) = control.allocate(&me, own, 100).unwrap();
    let sync_point = control.begin_write(block, me.me);
    control.end_write(block, sync_point);
    // Published without a stream after all.
    control.transfer(block, own, owner()).unwrap();
    assert!(control.retire(&me, block, owner()));
    assert_eq!(taken(&control), 0);
}

#[test]
fn pending_stream_reads_keep_a_block_from_reuse() {
    let words = control_segment();
    let control = PoolControl::attach(&words).unwrap();
    let me = caller(1);
    let (block, sync_point) = publish(&control, &me);
    control.end_write(block, sync_point);
    control.begin_stream_read(block, TOPIC, 31);
    control.begin_stream_read(block, TOPIC, 0);
    // Both subscribers were evicted.
    assert!(control.retire(&me, block, owner()));
    control.end_stream_read(block, 0);
    assert!(control.free_if_idle(&me, block));
    assert_eq!(taken(&control), 1);
    control.end_all_stream_reads(TOPIC + 1, 1 << 31);
    assert_eq!(control.collect(&me).unwrap(), 0);
    control.end_all_stream_reads(TOPIC, 1 << 31);
    assert_eq!(control.collect(&me).unwrap(), 1);
    assert_eq!(taken(&control), 0);
    // An invalid block has no effect.
    let nothing = Block::from_bits(u64::MAX);
    control.begin_stream_read(nothing, TOPIC, 200);
    control.end_stream_read(nothing, 200);
    assert!(control.free_if_idle(&me, nothing));
    assert!(!control.sync_words_range().contains(&control.sync_word_offset(nothing)));
}

#[test]
fn stale_stream_reads_do_not_affect_a_reused_block() {
    const OTHER: u32 = TOPIC + 1;
    let words = control_segment();
    let control = PoolControl::attach(&words).unwrap();
    let me = caller(1);
    let again = || {
        let (block, sync_point) = publish(&control, &me);
        control.end_write(block, sync_point);
        block
    };
    // Its reader was evicted, and holds a stale sample.
    let stale = again();
    assert!(control.retire(&me, stale, owner()));
    let block = again();
    assert_eq!(block.number(), stale.number());
    control.begin_stream_read(block, OTHER, 3);
    control.begin_stream_read(stale, TOPIC, 3);
    control.end_stream_read(stale, 3);
    control.end_all_stream_reads(TOPIC, 1 << 3);
    assert!(control.retire(&me, block, owner()));
    assert_eq!((control.collect(&me).unwrap(), taken(&control)), (0, 1));
    control.begin_stream_read(stale, TOPIC, 4);
    control.end_stream_read(block, 3);
    assert!(control.free_if_idle(&me, block));
    assert_eq!(taken(&control), 0);
    // Nor a block without any stream reads.
    let next = again();
    control.begin_stream_read(block, OTHER, 3);
    control.begin_stream_read(stale, TOPIC, 4);
    assert!(control.retire(&me, next, owner()));
    assert_eq!(taken(&control), 0);
    // A dead subscriber had this index, and a subscriber of another topic has it now.
    let last = again();
    control.begin_stream_read(last, TOPIC, 3);
    assert!(control.retire(&me, last, owner()));
    control.end_all_stream_reads(OTHER, 1 << 3);
    assert_eq!(control.collect(&me).unwrap(), 0);
    control.end_all_stream_reads(TOPIC, 1 << 3);
    assert_eq!((control.collect(&me).unwrap(), taken(&control)), (1, 0));
}

/// Independent of how often the block was reused since.
#[test]
fn stream_reads_of_old_generations_are_ignored() {
    let words = control_segment();
    let control = PoolControl::attach(&words).unwrap();
    let me = caller(1);
    let (block, sync_point) = publish(&control, &me);
    control.end_write(block, sync_point);
    for long_ago in [1, u32::MAX / 2, u32::MAX / 2 + 2, u32::MAX] {
        for which in [READS_PENDING, READS_TOPIC] {
            let word = u64::from(generation(block).wrapping_sub(long_ago)) << 32 | 0xff;
            words.store(control.at(block.number(), which), word, Relaxed);
        }
        assert!(!control.is_busy(block));
        control.begin_stream_read(block, TOPIC, 9);
        assert!(control.is_busy(block));
        control.end_stream_read(block, 9);
        assert!(!control.is_busy(block));
    }
}

proptest! {
    /// For any earlier sync points, and with wrap-around.
    #[test]
    fn sync_point_is_pending_until_its_own_word_is_written(bits: u32, later in 0_u32..1 << 20) {
        let sync_point = SyncPoint::from_bits(bits);
        let before = SyncPoint::from_bits(bits.wrapping_sub(1));
        for phase in [PENDING, READY, POISONED] {
            prop_assert_eq!(sync_point.seen_in(before.word(phase)), Some(Readiness::Pending));
            prop_assert!((before.word(phase).wrapping_sub(sync_point.ready()) as i32) < 0);
        }
        prop_assert_eq!(sync_point.seen_in(sync_point.word(PENDING)), Some(Readiness::Pending));
        prop_assert!((sync_point.word(PENDING).wrapping_sub(sync_point.ready()) as i32) < 0);
        prop_assert_eq!(sync_point.seen_in(sync_point.ready()), Some(Readiness::Ready));
        prop_assert_eq!(sync_point.seen_in(sync_point.word(POISONED)), Some(Readiness::Poisoned));
        let next = SyncPoint::from_bits(bits.wrapping_add(1 + later));
        for phase in [PENDING, READY, POISONED] {
            prop_assert_eq!(sync_point.seen_in(next.word(phase)), None);
            prop_assert!(next.word(phase).wrapping_sub(sync_point.ready()) as i32 >= 0);
        }
        prop_assert_eq!(SyncPoint::after(sync_point.word(READY)), SyncPoint::from_bits(bits.wrapping_add(1)));
    }
}
