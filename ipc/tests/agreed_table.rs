//! A table of which processes read the same values at the same step, although they are delayed, or
//! killed at any store.

use std::path::Path;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::{Duration, Instant};

use ipc::crash_test::{Crash, CrashingWords, Sources};
use ipc::{AgreedTable, AgreedTableSetup, Layout, MappedWords, PidFd, Segment, WordRange, Words};
use testkit::children::ForkedChild;

const LAYOUT: Layout = Layout::new("agreed table test", 1);

static SOURCES: Sources = Sources::new(&["ipc/src/agreed_table.rs"], 1, 6);

/// Pseudo-random numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// Enters the next step, and sleeps while another rank is too far behind.
fn enter<W: Words>(table: &mut AgreedTable<W>, is_gone: impl Fn(u32) -> bool) -> u64 {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        let next = table.step() + 1;
        match table.enter([next; 4], &is_gone) {
            Ok(step) => return step,
            Err(rank) => assert!(Instant::now() < end, "rank {rank} is behind at step {next}"),
        }
        std::thread::yield_now();
    }
}

/// A digest of all values that a rank has read, with their steps.
fn digest(before: u64, step: u64, values: impl Iterator<Item = u64>) -> u64 {
    values.fold(before ^ step, |digest, value| {
        (digest ^ value).wrapping_mul(0x0100_0000_01b3).rotate_left(17)
    })
}

#[test]
fn delayed_processes_read_the_same_values_at_each_step() {
    const STEPS: u64 = 100_000;
    let setup = AgreedTableSetup { ranks: 8, rows: 16, window: 2 };
    let table_words = setup.required_words().unwrap();
    let digests = table_words;
    let words = Segment::create(LAYOUT, (table_words + 8 * STEPS as usize) * 8).unwrap().words();
    let run = |rank: u32| {
        let range = WordRange::new(words.clone(), 0, table_words).unwrap();
        let mut table = AgreedTable::join(range, setup, rank).unwrap();
        let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ u64::from(rank + 1));
        let (mut so_far, mut changes) = (0, 0);
        for step in 1..=STEPS {
            if rank == 0 && random.below(2) == 0 {
                let row = random.below(setup.rows.into()) as u32;
                changes += u64::from(table.change(row, random.below(1 << 40), |_| false).is_ok());
            }
            // Most steps are taken at once, some after a while.
            match random.below(400) {
                0 => std::thread::sleep(Duration::from_micros(random.below(300))),
                1..20 => std::thread::yield_now(),
                _ => {}
            }
            assert_eq!(enter(&mut table, |_| false), step);
            so_far = digest(so_far, step, (0..setup.rows).map(|row| table.value(row)));
            let at = digests + (rank as usize * STEPS as usize) + step as usize - 1;
            words.store(at, so_far, Relaxed);
        }
        assert!(rank != 0 || changes > STEPS / 8, "{changes} changes");
        table.leave();
    };
    let children: Vec<_> = (1..setup.ranks).map(|rank| ForkedChild::new(|| run(rank))).collect();
    run(0);
    children.into_iter().for_each(|child| assert!(child.wait().success()));
    for step in 0..STEPS as usize {
        let of = |rank: usize| words.load(digests + rank * STEPS as usize + step, Acquire);
        (1..8).for_each(|rank| assert_eq!(of(rank), of(0), "step {}, rank {rank}", step + 1));
    }
}

/// What a rank read at each step, in shared memory.
fn record(words: &MappedWords, first: usize, rank: u32, step: u64, value: u64) {
    words.store(first + rank as usize * 64 + step as usize, value + 1, Release);
}

#[test]
fn rank_0_killed_at_any_store_leaves_all_others_with_the_same_values() {
    const STEPS: u64 = 12;
    let setup = AgreedTableSetup { ranks: 3, rows: 1, window: 1 };
    let table_words = setup.required_words().unwrap();
    let crash = Crash::new(&SOURCES);
    for point in 0.. {
        let words = Segment::create(LAYOUT, (table_words + 3 * 64) * 8).unwrap().words();
        let range = || WordRange::new(words.clone(), 0, table_words).unwrap();
        let first = ForkedChild::new(|| {
            crash.crash_at(point);
            let range = CrashingWords::new(range(), &crash);
            let mut table = AgreedTable::join(range, setup, 0).unwrap();
            for step in 1..=STEPS {
                // The changes of each run are the same: those of every third step.
                while table.step() > 2 && (1..3).any(|rank| table.entered(rank) < table.step()) {
                    std::thread::yield_now();
                }
                let _ = table.change(0, step * 10, |_| false);
                enter(&mut table, |_| false);
                table.report(step, &[step; 7]);
                record(&words, table_words, 0, step, table.value(0));
            }
            table.leave();
        });
        let pidfd = PidFd::from_fd(first.pidfd()).unwrap();
        let is_gone = |rank: u32| rank == 0 && pidfd.has_exited();
        let others: Vec<_> = (1..3)
            .map(|rank| {
                let mut table = AgreedTable::join(range(), setup, rank).unwrap();
                let (words, is_gone) = (&words, &is_gone);
                ForkedChild::new(move || {
                    for _ in 1..=STEPS + 2 {
                        let step = enter(&mut table, is_gone);
                        record(words, table_words, rank, step, table.value(0));
                        // A report of rank 0 is whole, or absent.
                        let report = table.reported(0, step);
                        assert!(report.is_none_or(|report| report == [step; 7]));
                    }
                    table.leave();
                })
            })
            .collect();
        others.into_iter().for_each(|child| assert!(child.wait().success()));
        let was_killed = first.was_killed();
        let read = |rank: usize| -> Vec<u64> {
            let at = |step: u64| table_words + rank * 64 + step as usize;
            (1..=STEPS + 2).map(|step| words.load(at(step), Acquire)).collect()
        };
        let (first, second, third) = (read(0), read(1), read(2));
        assert!(second == third && second.is_sorted(), "point {point}: {second:?} {third:?}");
        let entered = first.iter().take_while(|value| **value != 0).count();
        assert_eq!(first[..entered], second[..entered], "point {point}");
        if !was_killed {
            assert_eq!(entered as u64, STEPS);
            let missed = SOURCES.missed(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/..")));
            assert!(missed.is_empty(), "no kill at {missed:?}");
            return;
        }
    }
}
