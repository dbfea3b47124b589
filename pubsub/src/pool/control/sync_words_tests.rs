use ipc::allocator::{AuditError, BlockInfo};
use ipc::{AlwaysAlive, LocalWords};
use proptest::prelude::*;

use super::super::{Direction, PoolId};
use super::*;
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
    let words = LocalWords::zeroed(PoolControl::<&LocalWords>::required_words(32));
    let place = SharedLocation::Device([3; 16]);
    let control =
        PoolControl::format(&words, PoolId { place, direction: Direction::Local }, 1 << 20, 32)
            .unwrap();
    control.admit(&caller(0), 0, 1 << 14, 1).unwrap();
    words
}

/// A message that a stream of `who` is to write, published.
fn publish(control: &PoolControl<&LocalWords>, who: &Caller<'_>) -> (Block, SyncPoint) {
    let mine = Owner::participant(who.me);
    let (block, _) = control.allocate(who, mine, 100).unwrap();
    let sync_point = control.begin_write(block, who.me);
    control.transfer(block, mine, owner()).unwrap();
    (block, sync_point)
}

fn taken(control: &PoolControl<&LocalWords>) -> u64 {
    control.statistics(&caller(0)).unwrap().blocks_allocated
}

#[test]
fn words_for_streams_have_whole_pages_of_any_size() {
    for page in [4 << 10, 16 << 10, 64 << 10].map(|bytes: usize| bytes / size_of::<u64>()) {
        for (max_blocks, before) in [(1, 0), (32, 1), (page as u32, page), (5000, 3 * page + 7)] {
            let range = range_of(max_blocks, before, page);
            assert!(
                [range.start, range.end].iter().all(|end| end.is_multiple_of(page)),
                "{range:?}"
            );
            assert!((before..before + page).contains(&range.start), "{range:?}");
            assert!(range.len() >= max_blocks as usize * WORDS, "{range:?}");
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
fn what_is_let_go_of_before_it_is_written_is_freed_afterwards() {
    let words = control_segment();
    let control = PoolControl::attach(&words).unwrap();
    let (writer, reader) = (caller(1), caller(2));
    let (block, sync_point) = publish(&control, &writer);
    assert!(control.retire(&reader, block, owner()));
    assert!(control.retire(&reader, block, owner()), "once more is harmless");
    assert_eq!((control.collect(&reader).unwrap(), taken(&control)), (0, 1));
    control.end_write(block, sync_point);
    assert_eq!(control.readiness(block, sync_point), Some(Readiness::Ready));
    assert!(control.has_stream_owned());
    assert_eq!((control.collect(&reader).unwrap(), taken(&control)), (1, 0));
    assert_eq!((control.collect(&reader).unwrap(), control.has_stream_owned()), (0, false));
    assert_eq!(control.readiness(block, sync_point), None);
    // The next one in the same block is another one.
    let (again, next) = publish(&control, &writer);
    assert_eq!(again.number(), block.number());
    assert_eq!(control.readiness(again, next), Some(Readiness::Pending));
    assert_eq!(control.readiness(block, sync_point), None);
    // Nothing comes of the one before any more.
    control.end_write(again, sync_point);
    control.poison(again, sync_point);
    assert_eq!(control.readiness(again, next), Some(Readiness::Pending));
    // Who waits for what is over goes on.
    control.end_write(again, next);
    assert!(next.ready().wrapping_sub(sync_point.ready()) as i32 >= 0);
    assert!(control.retire(&reader, again, owner()));
    assert_eq!(taken(&control), 0);
}

#[test]
fn one_that_died_poisons_its_own_and_no_others() {
    let words = control_segment();
    let control = PoolControl::attach(&words).unwrap();
    let (dead, alive) = (caller(1), caller(2));
    let (lost, lost_turn) = publish(&control, &dead);
    let (done, done_turn) = publish(&control, &dead);
    control.end_write(done, done_turn);
    let (other, other_turn) = publish(&control, &alive);
    // Of which nothing was published.
    let mine = Owner::participant(dead.me);
    let (loan, _) = control.allocate(&dead, mine, 100).unwrap();
    control.begin_write(loan, dead.me);
    // Its reader let go of it before it died, or died itself.
    let (left, _) = publish(&control, &dead);
    assert!(control.retire(&alive, left, owner()));
    assert_eq!(taken(&control), 5);
    control.reclaim(&alive, dead.me).unwrap();
    assert_eq!(control.readiness(lost, lost_turn), Some(Readiness::Poisoned));
    assert_eq!(control.readiness(done, done_turn), Some(Readiness::Ready));
    assert_eq!(control.readiness(other, other_turn), Some(Readiness::Pending));
    assert_eq!(taken(&control), 3);
    for block in [lost, done] {
        assert!(control.retire(&alive, block, owner()));
    }
    assert_eq!(taken(&control), 1);
    // A block of one who died is not taken for its, once it is another's.
    let (next, next_turn) = publish(&control, &alive);
    control.reclaim(&alive, dead.me).unwrap();
    assert_eq!(control.readiness(next, next_turn), Some(Readiness::Pending));
}

#[test]
fn what_nobody_can_tell_to_be_written_is_kept_until_its_publisher_is_dead() {
    let words = control_segment();
    let control = PoolControl::attach(&words).unwrap();
    let (writer, reader) = (caller(1), caller(2));
    let all: Vec<_> = (0..3).map(|_| publish(&control, &writer)).collect();
    let (other, _) = publish(&control, &reader);
    for (block, sync_point) in &all[..2] {
        control.poison_and_retain(*block, *sync_point);
        assert_eq!(control.readiness(*block, *sync_point), Some(Readiness::Poisoned));
    }
    // It died before it had poisoned the last one.
    let (block, sync_point) = all[2];
    let at = control.at(block.number(), WRITER);
    words.store(at, words.load(at, Acquire) | u64::from(RETAINED), Release);
    // The first one is still read.
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
    // What is said of it too late is said of no other message.
    let (next, next_turn) = publish(&control, &writer);
    for (block, sync_point) in all {
        control.poison_and_retain(block, sync_point);
    }
    control.poison_and_retain(block, sync_point);
    assert_eq!(control.readiness(next, next_turn), Some(Readiness::Pending));
    control.end_write(next, next_turn);
    assert!(control.retire(&reader, next, owner()));
    assert_eq!(taken(&control), 0);
}

#[test]
fn a_turn_that_came_to_nothing_is_in_nobodys_way() {
    let words = control_segment();
    let control = PoolControl::attach(&words).unwrap();
    let me = caller(1);
    let mine = Owner::participant(me.me);
    let (block, _) = control.allocate(&me, mine, 100).unwrap();
    let sync_point = control.begin_write(block, me.me);
    control.end_write(block, sync_point);
    // Published without a stream after all.
    control.transfer(block, mine, owner()).unwrap();
    assert!(control.retire(&me, block, owner()));
    assert_eq!(taken(&control), 0);
}

#[test]
fn nobody_gets_what_a_readers_stream_has_not_passed() {
    let words = control_segment();
    let control = PoolControl::attach(&words).unwrap();
    let me = caller(1);
    let (block, sync_point) = publish(&control, &me);
    control.end_write(block, sync_point);
    control.begin_stream_read(block, TOPIC, 31);
    control.begin_stream_read(block, TOPIC, 0);
    // Evicted, both of them.
    assert!(control.retire(&me, block, owner()));
    control.end_stream_read(block, 0);
    assert!(control.free_if_idle(&me, block));
    assert_eq!(taken(&control), 1);
    control.end_all_stream_reads(TOPIC + 1, 1 << 31);
    assert_eq!(control.collect(&me).unwrap(), 0);
    control.end_all_stream_reads(TOPIC, 1 << 31);
    assert_eq!(control.collect(&me).unwrap(), 1);
    assert_eq!(taken(&control), 0);
    // A name of nothing is harmless.
    let nothing = Block::from_bits(u64::MAX);
    control.begin_stream_read(nothing, TOPIC, 200);
    control.end_stream_read(nothing, 200);
    assert!(control.free_if_idle(&me, nothing));
    assert!(!control.sync_words_range().contains(&control.sync_word_offset(nothing)));
}

#[test]
fn who_comes_too_late_says_nothing_of_what_is_anothers() {
    const OTHER: u32 = TOPIC + 1;
    let words = control_segment();
    let control = PoolControl::attach(&words).unwrap();
    let me = caller(1);
    let again = || {
        let (block, sync_point) = publish(&control, &me);
        control.end_write(block, sync_point);
        block
    };
    // Its reader was evicted, and has a stale sample.
    let gone = again();
    assert!(control.retire(&me, gone, owner()));
    let block = again();
    assert_eq!(block.number(), gone.number());
    control.begin_stream_read(block, OTHER, 3);
    control.begin_stream_read(gone, TOPIC, 3);
    control.end_stream_read(gone, 3);
    control.end_all_stream_reads(TOPIC, 1 << 3);
    assert!(control.retire(&me, block, owner()));
    assert_eq!((control.collect(&me).unwrap(), taken(&control)), (0, 1));
    control.begin_stream_read(gone, TOPIC, 4);
    control.end_stream_read(block, 3);
    assert!(control.free_if_idle(&me, block));
    assert_eq!(taken(&control), 0);
    // Nor of one of which nothing was said yet.
    let next = again();
    control.begin_stream_read(block, OTHER, 3);
    control.begin_stream_read(gone, TOPIC, 4);
    assert!(control.retire(&me, next, owner()));
    assert_eq!(taken(&control), 0);
    // Who is dead had that place, and another one of another topic has it.
    let last = again();
    control.begin_stream_read(last, TOPIC, 3);
    assert!(control.retire(&me, last, owner()));
    control.end_all_stream_reads(OTHER, 1 << 3);
    assert_eq!(control.collect(&me).unwrap(), 0);
    control.end_all_stream_reads(TOPIC, 1 << 3);
    assert_eq!((control.collect(&me).unwrap(), taken(&control)), (1, 0));
}

/// However many messages had a block since a stream of a reader was at one there.
#[test]
fn what_was_said_long_ago_is_no_later_blocks() {
    let words = control_segment();
    let control = PoolControl::attach(&words).unwrap();
    let me = caller(1);
    let (block, sync_point) = publish(&control, &me);
    control.end_write(block, sync_point);
    for long_ago in [1, u32::MAX / 2, u32::MAX / 2 + 2, u32::MAX] {
        for which in [READS_PENDING, READS_TOPIC] {
            let said = u64::from(generation(block).wrapping_sub(long_ago)) << 32 | 0xff;
            words.store(control.at(block.number(), which), said, Relaxed);
        }
        assert!(!control.is_busy(block));
        control.begin_stream_read(block, TOPIC, 9);
        assert!(control.is_busy(block));
        control.end_stream_read(block, 9);
        assert!(!control.is_busy(block));
    }
}

proptest! {
    /// Whatever came of earlier turns, and wherever numbers go round.
    #[test]
    fn a_turn_is_pending_until_its_own_word_is_written(bits: u32, later in 0_u32..1 << 20) {
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
