use ipc::allocator::{Flaw, Listed};
use ipc::{Immortal, LocalWords};
use proptest::prelude::*;

use super::super::{Direction, PoolId};
use super::*;
use crate::settings::SharedPlace;

const TOPIC: u32 = 7;

impl<W: Words + Clone> Ledger<W> {
    pub(crate) fn blocks(&self, caller: &Caller<'_>) -> What<Vec<Listed>> {
        self.allocator.blocks(caller)
    }

    pub(crate) fn audit(&self, caller: &Caller<'_>) -> What<Result<(), Flaw>> {
        self.allocator.audit(caller)
    }
}

fn caller(place: u32) -> Caller<'static> {
    Caller::new(Participant::new(place, 1).unwrap(), &Immortal)
}

fn owner() -> Owner {
    Owner::other(TOPIC).unwrap()
}

fn books() -> LocalWords {
    let words = LocalWords::zeroed(Ledger::<&LocalWords>::words_needed(32));
    let place = SharedPlace::Device([3; 16]);
    let ledger =
        Ledger::format(&words, PoolId { place, direction: Direction::Here }, 1 << 20, 32).unwrap();
    ledger.admit(&caller(0), 0, 1 << 14, 1).unwrap();
    words
}

/// A message that a stream of `who` is to write, published.
fn publish(ledger: &Ledger<&LocalWords>, who: &Caller<'_>) -> (Block, Turn) {
    let mine = Owner::participant(who.me);
    let (block, _) = ledger.allocate(who, mine, 100).unwrap();
    let turn = ledger.begin_turn(block, who.me);
    ledger.transfer(block, mine, owner()).unwrap();
    (block, turn)
}

fn taken(ledger: &Ledger<&LocalWords>) -> u64 {
    ledger.statistics(&caller(0)).unwrap().blocks_taken
}

#[test]
fn words_for_streams_have_whole_pages_of_any_size() {
    for page in [4 << 10, 16 << 10, 64 << 10].map(|bytes: usize| bytes / size_of::<u64>()) {
        for (most_blocks, before) in [(1, 0), (32, 1), (page as u32, page), (5000, 3 * page + 7)] {
            let range = range_of(most_blocks, before, page);
            assert!(
                [range.start, range.end].iter().all(|end| end.is_multiple_of(page)),
                "{range:?}"
            );
            assert!((before..before + page).contains(&range.start), "{range:?}");
            assert!(range.len() >= most_blocks as usize * WORDS, "{range:?}");
        }
    }
    let words = books();
    let range = Ledger::attach(&words).unwrap().range_of_words();
    let page = ipc::page_size() as u64;
    assert!(
        [range.start, range.end].iter().all(|end| end.is_multiple_of(page)) && !range.is_empty(),
        "{range:?}"
    );
}

#[test]
fn what_is_let_go_of_before_it_is_written_is_freed_afterwards() {
    let words = books();
    let ledger = Ledger::attach(&words).unwrap();
    let (writer, reader) = (caller(1), caller(2));
    let (block, turn) = publish(&ledger, &writer);
    assert!(ledger.retire(&reader, block, owner()));
    assert!(ledger.retire(&reader, block, owner()), "once more is harmless");
    assert_eq!((ledger.collect(&reader).unwrap(), taken(&ledger)), (0, 1));
    ledger.end_turn(block, turn);
    assert_eq!(ledger.readiness(block, turn), Some(Readiness::Ready));
    assert!(ledger.has_left());
    assert_eq!((ledger.collect(&reader).unwrap(), taken(&ledger)), (1, 0));
    assert_eq!((ledger.collect(&reader).unwrap(), ledger.has_left()), (0, false));
    assert_eq!(ledger.readiness(block, turn), None);
    // The next one in the same block is another one.
    let (again, next) = publish(&ledger, &writer);
    assert_eq!(again.number(), block.number());
    assert_eq!(ledger.readiness(again, next), Some(Readiness::Pending));
    assert_eq!(ledger.readiness(block, turn), None);
    // Nothing comes of the one before any more.
    ledger.end_turn(again, turn);
    ledger.poison(again, turn);
    assert_eq!(ledger.readiness(again, next), Some(Readiness::Pending));
    // Who waits for what is over goes on.
    ledger.end_turn(again, next);
    assert!(next.ready().wrapping_sub(turn.ready()) as i32 >= 0);
    assert!(ledger.retire(&reader, again, owner()));
    assert_eq!(taken(&ledger), 0);
}

#[test]
fn one_that_died_poisons_its_own_and_no_others() {
    let words = books();
    let ledger = Ledger::attach(&words).unwrap();
    let (dead, alive) = (caller(1), caller(2));
    let (lost, lost_turn) = publish(&ledger, &dead);
    let (done, done_turn) = publish(&ledger, &dead);
    ledger.end_turn(done, done_turn);
    let (other, other_turn) = publish(&ledger, &alive);
    // Of which nothing was published.
    let mine = Owner::participant(dead.me);
    let (loan, _) = ledger.allocate(&dead, mine, 100).unwrap();
    ledger.begin_turn(loan, dead.me);
    // Its reader let go of it before it died, or died itself.
    let (left, _) = publish(&ledger, &dead);
    assert!(ledger.retire(&alive, left, owner()));
    assert_eq!(taken(&ledger), 5);
    ledger.reclaim(&alive, dead.me).unwrap();
    assert_eq!(ledger.readiness(lost, lost_turn), Some(Readiness::Poisoned));
    assert_eq!(ledger.readiness(done, done_turn), Some(Readiness::Ready));
    assert_eq!(ledger.readiness(other, other_turn), Some(Readiness::Pending));
    assert_eq!(taken(&ledger), 3);
    for block in [lost, done] {
        assert!(ledger.retire(&alive, block, owner()));
    }
    assert_eq!(taken(&ledger), 1);
    // A block of one who died is not taken for its, once it is another's.
    let (next, next_turn) = publish(&ledger, &alive);
    ledger.reclaim(&alive, dead.me).unwrap();
    assert_eq!(ledger.readiness(next, next_turn), Some(Readiness::Pending));
}

#[test]
fn what_nobody_can_tell_to_be_written_is_kept_until_its_publisher_is_dead() {
    let words = books();
    let ledger = Ledger::attach(&words).unwrap();
    let (writer, reader) = (caller(1), caller(2));
    let all: Vec<_> = (0..3).map(|_| publish(&ledger, &writer)).collect();
    let (other, _) = publish(&ledger, &reader);
    for (block, turn) in &all[..2] {
        ledger.poison_and_keep(*block, *turn);
        assert_eq!(ledger.readiness(*block, *turn), Some(Readiness::Poisoned));
    }
    // It died before it had poisoned the last one.
    let (block, turn) = all[2];
    let at = ledger.at(block.number(), WHOSE);
    words.store(at, words.load(at, Acquire) | u64::from(KEPT), Release);
    // The first one is still read.
    for (block, _) in &all[1..] {
        assert!(ledger.retire(&reader, *block, owner()));
    }
    assert_eq!((ledger.collect(&reader).unwrap(), ledger.has_left()), (0, false));
    assert_eq!(taken(&ledger), 4);
    ledger.reclaim(&reader, reader.me).unwrap();
    assert_eq!(taken(&ledger), 4);
    ledger.reclaim(&reader, writer.me).unwrap();
    assert_eq!(taken(&ledger), 2);
    assert!(ledger.retire(&reader, all[0].0, owner()) && ledger.retire(&reader, other, owner()));
    assert_eq!(taken(&ledger), 0);
    // What is said of it too late is said of no other message.
    let (next, next_turn) = publish(&ledger, &writer);
    for (block, turn) in all {
        ledger.poison_and_keep(block, turn);
    }
    ledger.poison_and_keep(block, turn);
    assert_eq!(ledger.readiness(next, next_turn), Some(Readiness::Pending));
    ledger.end_turn(next, next_turn);
    assert!(ledger.retire(&reader, next, owner()));
    assert_eq!(taken(&ledger), 0);
}

#[test]
fn a_turn_that_came_to_nothing_is_in_nobodys_way() {
    let words = books();
    let ledger = Ledger::attach(&words).unwrap();
    let me = caller(1);
    let mine = Owner::participant(me.me);
    let (block, _) = ledger.allocate(&me, mine, 100).unwrap();
    let turn = ledger.begin_turn(block, me.me);
    ledger.end_turn(block, turn);
    // Published without a stream after all.
    ledger.transfer(block, mine, owner()).unwrap();
    assert!(ledger.retire(&me, block, owner()));
    assert_eq!(taken(&ledger), 0);
}

#[test]
fn nobody_gets_what_a_readers_stream_has_not_passed() {
    let words = books();
    let ledger = Ledger::attach(&words).unwrap();
    let me = caller(1);
    let (block, turn) = publish(&ledger, &me);
    ledger.end_turn(block, turn);
    ledger.is_passing(block, TOPIC, 31);
    ledger.is_passing(block, TOPIC, 0);
    // Evicted, both of them.
    assert!(ledger.retire(&me, block, owner()));
    ledger.has_passed(block, 0);
    assert!(ledger.free_if_left(&me, block));
    assert_eq!(taken(&ledger), 1);
    ledger.all_have_passed(TOPIC + 1, 1 << 31);
    assert_eq!(ledger.collect(&me).unwrap(), 0);
    ledger.all_have_passed(TOPIC, 1 << 31);
    assert_eq!(ledger.collect(&me).unwrap(), 1);
    assert_eq!(taken(&ledger), 0);
    // A name of nothing is harmless.
    let nothing = Block::from_bits(u64::MAX);
    ledger.is_passing(nothing, TOPIC, 200);
    ledger.has_passed(nothing, 200);
    assert!(ledger.free_if_left(&me, nothing));
    assert!(!ledger.range_of_words().contains(&ledger.offset_of_word(nothing)));
}

#[test]
fn who_comes_too_late_says_nothing_of_what_is_anothers() {
    const OTHER: u32 = TOPIC + 1;
    let words = books();
    let ledger = Ledger::attach(&words).unwrap();
    let me = caller(1);
    let again = || {
        let (block, turn) = publish(&ledger, &me);
        ledger.end_turn(block, turn);
        block
    };
    // Its reader was evicted, and has a stale sample.
    let gone = again();
    assert!(ledger.retire(&me, gone, owner()));
    let block = again();
    assert_eq!(block.number(), gone.number());
    ledger.is_passing(block, OTHER, 3);
    ledger.is_passing(gone, TOPIC, 3);
    ledger.has_passed(gone, 3);
    ledger.all_have_passed(TOPIC, 1 << 3);
    assert!(ledger.retire(&me, block, owner()));
    assert_eq!((ledger.collect(&me).unwrap(), taken(&ledger)), (0, 1));
    ledger.is_passing(gone, TOPIC, 4);
    ledger.has_passed(block, 3);
    assert!(ledger.free_if_left(&me, block));
    assert_eq!(taken(&ledger), 0);
    // Nor of one of which nothing was said yet.
    let next = again();
    ledger.is_passing(block, OTHER, 3);
    ledger.is_passing(gone, TOPIC, 4);
    assert!(ledger.retire(&me, next, owner()));
    assert_eq!(taken(&ledger), 0);
    // Who is dead had that place, and another one of another topic has it.
    let last = again();
    ledger.is_passing(last, TOPIC, 3);
    assert!(ledger.retire(&me, last, owner()));
    ledger.all_have_passed(OTHER, 1 << 3);
    assert_eq!(ledger.collect(&me).unwrap(), 0);
    ledger.all_have_passed(TOPIC, 1 << 3);
    assert_eq!((ledger.collect(&me).unwrap(), taken(&ledger)), (1, 0));
}

/// However many messages had a block since a stream of a reader was at one there.
#[test]
fn what_was_said_long_ago_is_no_later_blocks() {
    let words = books();
    let ledger = Ledger::attach(&words).unwrap();
    let me = caller(1);
    let (block, turn) = publish(&ledger, &me);
    ledger.end_turn(block, turn);
    for long_ago in [1, u32::MAX / 2, u32::MAX / 2 + 2, u32::MAX] {
        for which in [PASSING, PLACES_OF] {
            let said = u64::from(generation(block).wrapping_sub(long_ago)) << 32 | 0xff;
            words.store(ledger.at(block.number(), which), said, Relaxed);
        }
        assert!(!ledger.is_busy(block));
        ledger.is_passing(block, TOPIC, 9);
        assert!(ledger.is_busy(block));
        ledger.has_passed(block, 9);
        assert!(!ledger.is_busy(block));
    }
}

proptest! {
    /// Whatever came of earlier turns, and wherever numbers go round.
    #[test]
    fn a_turn_is_pending_until_its_own_word_is_written(bits: u32, later in 0_u32..1 << 20) {
        let turn = Turn::from_bits(bits);
        let before = Turn::from_bits(bits.wrapping_sub(1));
        for phase in [PENDING, READY, POISONED] {
            prop_assert_eq!(turn.seen_in(before.word(phase)), Some(Readiness::Pending));
            prop_assert!((before.word(phase).wrapping_sub(turn.ready()) as i32) < 0);
        }
        prop_assert_eq!(turn.seen_in(turn.word(PENDING)), Some(Readiness::Pending));
        prop_assert!((turn.word(PENDING).wrapping_sub(turn.ready()) as i32) < 0);
        prop_assert_eq!(turn.seen_in(turn.ready()), Some(Readiness::Ready));
        prop_assert_eq!(turn.seen_in(turn.word(POISONED)), Some(Readiness::Poisoned));
        let next = Turn::from_bits(bits.wrapping_add(1 + later));
        for phase in [PENDING, READY, POISONED] {
            prop_assert_eq!(turn.seen_in(next.word(phase)), None);
            prop_assert!(next.word(phase).wrapping_sub(turn.ready()) as i32 >= 0);
        }
        prop_assert_eq!(Turn::after(turn.word(READY)), Turn::from_bits(bits.wrapping_add(1)));
    }
}
