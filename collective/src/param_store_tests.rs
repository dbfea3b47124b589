//! Parameter stores of several ranks: processes with delays, deaths, and other segments.

use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::time::{Duration, Instant};

use ipc::{Layout, Segment, Words};
use testkit::children::ForkedChild;
use testkit::temp_dir::TempDir;

use crate::{
    Aggregation, AggregationPoint, Choices, CommDomainKey, DataType, DomainOptions, ErrorKind,
    ExecStat, LearningOptions, OpKey, Operation, Parameters, ShmParamStore, SizeClass,
};

const TIMEOUT: Duration = Duration::from_secs(60);

fn key(operation: Operation, bytes: u64) -> OpKey {
    OpKey { operation, size_class: SizeClass::of(bytes), data_type: DataType::F32 }
}

fn choices(_: OpKey) -> Choices {
    Choices { candidates: vec![Parameters::default()], first_alpha: Some(900) }
}

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

/// An execution on two paths of 300 and 30 GB/s, as a rank measures it.
fn execution(parameters: Parameters, bytes: u64, random: &mut Random) -> ExecStat {
    let fast_bytes = parameters.fast_bytes(bytes, 4096);
    let second_bytes = bytes - fast_bytes;
    let noise = 97 + random.below(6);
    let time = |bytes: u64, rate: u64| Duration::from_nanos(bytes / rate * noise / 100);
    let (fast_time, second_time) = (time(fast_bytes, 300), time(second_bytes, 30));
    ExecStat { fast_time, second_time, fast_bytes, second_bytes, success: true }
}

/// All ranks learn; each writes a digest of its parameters so far after each operation.
fn compare_processes(options: &DomainOptions, operations: u64) {
    const RANKS: u32 = 8;
    let key_of_domain = CommDomainKey::of_first_ranks(RANKS);
    let layout = Layout::new("digests", 1);
    let digests =
        Segment::create(layout, RANKS as usize * operations as usize * 8).unwrap().words();
    let run = |rank: u32| {
        let mut store = ShmParamStore::attach(&key_of_domain, rank, options, choices).unwrap();
        let mut random = Random(0x1234_5678_9abc_def1 ^ u64::from(rank + 1) << 40);
        let mut common = Random(77);
        let (mut digest, mut changes) = (0_u64, 0);
        let mut last = Parameters::default();
        for number in 1..=operations {
            let bytes = 1 << (20 + common.below(4));
            let operation = [Operation::AllGather, Operation::AllReduce][common.below(2) as usize];
            match random.below(500) {
                0 => std::thread::sleep(Duration::from_micros(random.below(200))),
                1..10 => std::thread::yield_now(),
                _ => {}
            }
            let entry = store.enter(key(operation, bytes), TIMEOUT).unwrap();
            assert_eq!(entry.number, number);
            let stat = execution(entry.parameters, bytes, &mut random);
            store.record(&entry, &stat).unwrap();
            changes += u64::from(entry.parameters != last);
            last = entry.parameters;
            digest = (digest ^ number ^ entry.parameters.encode()).wrapping_mul(0x0100_0000_01b3);
            let at = rank as usize * operations as usize + number as usize - 1;
            digests.store(at, digest.rotate_left(7), Relaxed);
        }
        assert!(changes > 20, "{changes} changes");
    };
    let children: Vec<_> = (1..RANKS).map(|rank| ForkedChild::new(|| run(rank))).collect();
    run(0);
    children.into_iter().for_each(|child| assert!(child.wait().success()));
    for number in 0..operations as usize {
        let of = |rank: usize| digests.load(rank * operations as usize + number, Acquire);
        (1..RANKS as usize).for_each(|rank| assert_eq!(of(rank), of(0), "operation {number}"));
    }
}

#[test]
fn delayed_processes_use_the_same_parameters_in_each_operation() {
    let directory = TempDir::new("store-delays");
    let options = DomainOptions::new().directory(&directory);
    compare_processes(&options, 100_000);
    assert!(directory.entries().is_empty());
}

#[test]
fn counted_rounds_keep_the_same_guarantee() {
    let directory = TempDir::new("store-rounds");
    for aggregation in [Aggregation::Max, Aggregation::Mean, Aggregation::Percentile(90)] {
        let timeout = Duration::from_millis(20);
        let aggregation_point = AggregationPoint::CountedRounds { timeout };
        let learning =
            LearningOptions { aggregation, aggregation_point, ..LearningOptions::default() };
        let options = DomainOptions::new().directory(&directory).learning(learning);
        compare_processes(&options, 500);
    }
}

#[test]
fn death_of_rank_0_is_reported_and_the_others_keep_the_last_parameters() {
    let directory = TempDir::new("store-death");
    let options = DomainOptions::new().directory(&directory);
    let domain = CommDomainKey::of_first_ranks(3);
    let used = key(Operation::AllGather, 1 << 24);
    let run = |rank: u32, operations: u64| {
        let mut store = ShmParamStore::attach(&domain, rank, &options, choices).unwrap();
        let mut random = Random(5);
        for _ in 0..operations {
            let entry = store.enter(used, TIMEOUT).unwrap();
            store.record(&entry, &execution(entry.parameters, 1 << 24, &mut random)).unwrap();
        }
        store
    };
    let first = ForkedChild::new(|| {
        std::mem::forget(run(0, 100));
        // SAFETY: ends this process.
        #[allow(unsafe_code)]
        unsafe {
            libc::kill(libc::getpid(), libc::SIGKILL);
        }
    });
    let third = ForkedChild::new(|| {
        let mut store = run(2, 200);
        assert!(store.has_lost_writer());
        let alpha = store.parameters(used).alpha;
        assert!((880..=930).contains(&alpha), "{alpha}");
        for _ in 0..100 {
            assert_eq!(store.enter(used, TIMEOUT).unwrap().parameters.alpha, alpha);
        }
    });
    let began = Instant::now();
    let store = run(1, 300);
    assert!(store.has_lost_writer() && began.elapsed() < Duration::from_secs(5));
    assert!((880..=930).contains(&store.parameters(used).alpha));
    assert!(first.was_killed() && third.wait().success());
}

#[test]
fn stopped_rank_is_named_and_the_store_goes_on_when_it_continues() {
    let directory = TempDir::new("store-stopped");
    let options = DomainOptions::new().directory(&directory);
    let domain = CommDomainKey::of_first_ranks(2);
    let other = ForkedChild::new(|| {
        let mut store = ShmParamStore::attach(&domain, 1, &options, choices).unwrap();
        std::thread::sleep(Duration::from_millis(300));
        for _ in 0..10 {
            store.enter(key(Operation::AllReduce, 8), TIMEOUT).unwrap();
        }
    });
    let mut store = ShmParamStore::attach(&domain, 0, &options, choices).unwrap();
    let mut enter = |timeout| store.enter(key(Operation::AllReduce, 8), timeout);
    assert_eq!([(); 2].map(|()| enter(TIMEOUT).unwrap().number), [1, 2]);
    let error = enter(Duration::from_millis(20)).unwrap_err();
    assert_eq!((error.kind(), error.ranks()), (ErrorKind::DeadlineExceeded, &[1][..]), "{error}");
    assert_eq!((3..=12).map(|_| enter(TIMEOUT).unwrap().number).last(), Some(12));
    assert!(other.wait().success());
}

/// Prints what an operation costs beside its execution, in which ranks wait for each other: below 1 microsecond on a
/// quiet machine, if it is optimized. Other programs disturb it: hence the bound.
#[test]
fn entrance_and_record_take_microseconds() {
    const RANKS: u32 = 8;
    const OPERATIONS: usize = 2000;
    let directory = TempDir::new("store-cost");
    let options = DomainOptions::new().directory(&directory);
    let domain = CommDomainKey::of_first_ranks(RANKS);
    let arrivals = Segment::create(Layout::new("arrivals", 1), size_of::<u64>()).unwrap().words();
    let run = |rank: u32| {
        let mut store = ShmParamStore::attach(&domain, rank, &options, choices).unwrap();
        let mut random = Random(5);
        let mut times = Vec::with_capacity(OPERATIONS);
        for number in 1..=OPERATIONS as u64 {
            let began = Instant::now();
            let entry = store.enter(key(Operation::AllReduce, 1 << 24), TIMEOUT).unwrap();
            let entered = began.elapsed();
            arrivals.fetch_add(0, 1);
            while arrivals.load(0, Acquire) < number * u64::from(RANKS) {
                std::thread::yield_now();
            }
            let stat = execution(entry.parameters, 1 << 24, &mut random);
            let began = Instant::now();
            store.record(&entry, &stat).unwrap();
            times.push(entered + began.elapsed());
        }
        times.sort_unstable();
        let at = |percent: usize| times[OPERATIONS * percent / 100];
        println!("rank {rank}: p50 {:?}, p90 {:?}, p99 {:?}", at(50), at(90), at(99));
        at(50)
    };
    let others = Vec::from_iter((1..RANKS).map(|rank| {
        ForkedChild::new(|| {
            run(rank);
        })
    }));
    let median = run(0);
    others.into_iter().for_each(|other| assert!(other.wait().success()));
    let most = Duration::from_micros(if cfg!(debug_assertions) { 100 } else { 2 });
    assert!(median < most, "{median:?}");
}
