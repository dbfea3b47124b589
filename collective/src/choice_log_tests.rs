//! Logs of several ranks: processes with delays, agreements, and deaths.

use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::time::{Duration, Instant};

use ipc::{Layout, Segment, Words};
use testkit::children::ForkedChild;
use testkit::temp_dir::TempDir;

use crate::{
    Algorithm, ChoiceLog, Choices, CommDomainKey, DataType, DomainOptions, ErrorKind, OpKey,
    Operation, Parameters, SizeClass,
};

const TIMEOUT: Duration = Duration::from_secs(30);
const LIBRARY: Parameters = Parameters {
    alpha: Parameters::FAST_ONLY,
    chunk_bits: 0,
    stripes: 0,
    algorithm: Algorithm::Library,
};

fn key(operation: Operation) -> OpKey {
    OpKey { operation, size_class: SizeClass::of(1 << 20), data_type: DataType::F32 }
}

fn choices(_: OpKey) -> Choices {
    Choices { candidates: vec![LIBRARY, Parameters::default()], first_alpha: None }
}

fn join(ranks: u32, rank: u32, directory: &TempDir) -> ChoiceLog {
    let options = DomainOptions::new().directory(directory);
    ChoiceLog::join(&CommDomainKey::of_first_ranks(ranks), rank, &options, 7, choices).unwrap()
}

/// The library is faster in all-reduce, and slower in all-gather.
fn time(operation: Operation, parameters: Parameters) -> Duration {
    let is_library = parameters.algorithm == Algorithm::Library;
    let is_faster = is_library == (operation == Operation::AllReduce);
    Duration::from_micros(if is_faster { 20 } else { 30 })
}

#[test]
fn delayed_processes_do_the_same_and_settle_on_the_faster() {
    const RANKS: u32 = 4;
    const OPERATIONS: usize = 20_000;
    let directory = TempDir::new("log-delays");
    let length = RANKS as usize * OPERATIONS * 8;
    let found = Segment::create(Layout::new("found", 1), length).unwrap().words();
    let run = |rank: u32| {
        let mut log = join(RANKS, rank, &directory);
        let mut pending = Vec::new();
        for number in 0..OPERATIONS {
            let operation = [Operation::AllReduce, Operation::AllGather][number % 2];
            let choice = log.enter(key(operation), 1 << 20, TIMEOUT).unwrap();
            assert_eq!(choice.number, number as u64 + 1);
            let word = choice.parameters.encode() << 1 | u64::from(choice.is_measured);
            found.store(rank as usize * OPERATIONS + number, word, Relaxed);
            // A host is ahead of its device.
            pending.push((choice, time(operation, choice.parameters)));
            if pending.len() == 10 * (rank as usize + 1) {
                pending.drain(..).for_each(|(choice, time)| log.record(&choice, Some(time)));
            }
            if number % 977 == rank as usize * 13 {
                std::thread::sleep(Duration::from_micros(300));
            }
        }
        assert_eq!(log.parameters(key(Operation::AllReduce)), LIBRARY);
        assert_eq!(log.parameters(key(Operation::AllGather)), Parameters::default());
    };
    let others: Vec<_> = (1..RANKS).map(|rank| ForkedChild::new(|| run(rank))).collect();
    run(0);
    others.into_iter().for_each(|other| assert!(other.wait().success()));
    for number in 0..OPERATIONS {
        let of = |rank: usize| found.load(rank * OPERATIONS + number, Acquire);
        (1..RANKS as usize).for_each(|rank| assert_eq!(of(rank), of(0), "operation {number}"));
    }
}

#[test]
fn agreement_is_yes_only_if_all_ranks_say_so() {
    let directory = TempDir::new("log-agree");
    let run = |rank: u32| {
        let mut log = join(3, rank, &directory);
        assert!(log.agree(true, TIMEOUT).unwrap());
        let began = Instant::now();
        assert!(!log.agree(rank != 1, TIMEOUT).unwrap());
        assert!(began.elapsed() < Duration::from_secs(5));
        // The last rank comes too late for the others.
        if rank == 2 {
            std::thread::sleep(Duration::from_millis(200));
        }
        assert!(!log.agree(true, Duration::from_millis(50)).unwrap());
        // The second rank ends.
        if rank == 1 {
            std::process::exit(0);
        }
        assert!(!log.agree(true, TIMEOUT).unwrap());
        assert_eq!(log.agree(true, TIMEOUT).unwrap_err().kind(), ErrorKind::InvalidArgument);
    };
    let others = [1, 2].map(|rank| ForkedChild::new(move || run(rank)));
    run(0);
    others.into_iter().for_each(|other| assert!(other.wait().success()));
}

#[test]
fn rank_far_ahead_waits_until_its_deadline_and_not_for_the_dead() {
    let directory = TempDir::new("log-ahead");
    let other = ForkedChild::new(|| {
        let mut log = join(2, 1, &directory);
        log.enter(key(Operation::AllReduce), 8, TIMEOUT).unwrap();
        std::thread::sleep(Duration::from_secs(60));
    });
    let mut log = join(2, 0, &directory);
    let mut enter = || log.enter(key(Operation::AllReduce), 8, Duration::from_millis(50));
    let error = (0..5000).find_map(|_| enter().err()).unwrap();
    assert_eq!((error.kind(), error.ranks()), (ErrorKind::DeadlineExceeded, &[1][..]), "{error}");
    other.kill();
    std::thread::sleep(Duration::from_millis(100));
    (0..5000).for_each(|_| assert!(enter().is_ok()));
}

#[test]
fn ranks_with_another_setup_are_refused() {
    let directory = TempDir::new("log-setup");
    let join = |rank: u32| {
        let options = DomainOptions::new().directory(&directory).timeout(Duration::from_secs(2));
        let key = CommDomainKey::of_first_ranks(2);
        ChoiceLog::join(&key, rank, &options, rank.into(), choices).unwrap_err().kind()
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| join(1));
        assert_eq!(join(0), ErrorKind::VersionMismatch);
        assert_eq!(other.join().unwrap(), ErrorKind::VersionMismatch);
    });
}

#[test]
fn ranks_that_enter_different_operations_find_that() {
    let directory = TempDir::new("log-mismatch");
    let enter = |rank: u32, operation| {
        let mut log = join(2, rank, &directory);
        let first = log.enter(key(Operation::AllReduce), 8, TIMEOUT);
        first.and_then(|_| log.enter(key(operation), 8, TIMEOUT)).err().map(|error| error.kind())
    };
    let kinds = std::thread::scope(|scope| {
        let other = scope.spawn(|| enter(1, Operation::Reduce));
        [enter(0, Operation::AllReduce), other.join().unwrap()]
    });
    // The rank that came first does not know.
    let mismatch = Some(ErrorKind::Mismatch);
    assert!([[None, mismatch], [mismatch, None]].contains(&kinds), "{kinds:?}");
}
