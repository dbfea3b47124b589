//! Domains of ranks on several machines: directories stand for the machines, between which ranks use the
//! network although they run on one.

use std::net::Ipv4Addr;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use launch::{Exchange, FabricUse, Group, GroupOptions, LocalRank};
use testkit::children::ForkedChild;
use testkit::temp_dir::TempDir;
use transfer::AgentOptions;

use crate::domain_tests::{check_moves, check_reductions};
use crate::{
    Bf16, CommDomain, CommDomainKey, DataType, DomainOptions, ErrorKind, F16, OpKey, Operation,
    Parameters, ReduceOp, SizeClass,
};

const TIMEOUT: Duration = Duration::from_secs(60);

/// Ranks exchange bytes by files, as threads or as processes.
#[derive(Debug)]
struct Files {
    directory: PathBuf,
    rank: u32,
    size: u32,
    round: u32,
}

impl Exchange for Files {
    fn name(&self) -> &str {
        "files"
    }

    fn job(&self) -> &str {
        "test"
    }

    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.size
    }

    /// One machine, so that the loopback address is used.
    fn local(&self) -> Option<LocalRank> {
        Some(LocalRank { rank: self.rank, size: self.size })
    }

    fn all_gather(&mut self, own: &[u8], timeout: Duration) -> launch::Result<Vec<Vec<u8>>> {
        let deadline = Instant::now() + timeout;
        let path = |rank: u32| self.directory.join(format!("{}-{rank}", self.round));
        let unfinished = self.directory.join(format!("unfinished-{}", self.rank));
        std::fs::write(&unfinished, own).unwrap();
        std::fs::rename(&unfinished, path(self.rank)).unwrap();
        let mut all = Vec::new();
        for rank in 0..self.size {
            all.push(loop {
                if let Ok(bytes) = std::fs::read(path(rank)) {
                    break bytes;
                }
                assert!(Instant::now() < deadline, "rank {rank} is missing");
                thread::sleep(Duration::from_millis(1));
            });
        }
        self.round += 1;
        Ok(all)
    }
}

/// Starts the group of a rank.
fn start(directory: &Path, machines: &[Vec<u32>], rank: u32) -> Group {
    let machine = machines.iter().position(|ranks| ranks.contains(&rank)).unwrap();
    let size = machines.iter().map(Vec::len).sum::<usize>() as u32;
    let files = directory.join("exchange");
    let _ = std::fs::create_dir(&files);
    let exchange = Files { directory: files, rank, size, round: 0 };
    let options = GroupOptions::new()
        .directory(&directory.join(format!("machine-{machine}")))
        .fabric_use(FabricUse::Always)
        .source(Ipv4Addr::LOCALHOST.into())
        .agent(AgentOptions::new("rank").force_remote())
        .timeout(TIMEOUT);
    let group = Group::start_over(exchange, options).unwrap();
    assert_eq!(group.ranks_by_machine(), machines);
    group
}

/// Runs each rank in a thread.
fn run<T: Send>(
    machines: &[Vec<u32>],
    options: &DomainOptions,
    each: impl Fn(CommDomain) -> T + Sync,
) -> Vec<T> {
    let directory = TempDir::new("machines");
    let size = machines.iter().map(Vec::len).sum::<usize>() as u32;
    thread::scope(|scope| {
        let start = |rank: u32| {
            let (directory, each) = (&directory, &each);
            scope.spawn(move || {
                let mut group = start(directory, machines, rank);
                each(CommDomain::of_group(&mut group, options).unwrap())
            })
        };
        let threads: Vec<_> = (0..size).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// How the elements are reduced: first on each machine, if it has counterparts of the others.
fn reduction_order(machines: &[Vec<u32>]) -> Vec<Vec<u32>> {
    let is_uniform = machines.iter().all(|ranks| ranks.len() == machines[0].len());
    let size = machines.iter().map(Vec::len).sum::<usize>() as u32;
    if is_uniform { machines.to_vec() } else { vec![(0..size).collect()] }
}

#[test]
fn operations_between_machines_match_the_serial_reference_for_all_counts() {
    let all = [
        vec![vec![0], vec![1]],
        vec![vec![0], vec![1], vec![2]],
        vec![vec![0, 1], vec![2, 3]],
        vec![vec![0, 2], vec![1, 3]],
        vec![vec![0, 1], vec![2]],
    ];
    for machines in all {
        run(&machines, &DomainOptions::new(), |mut domain| {
            let order = reduction_order(&machines);
            for count in [0, 1, 5, 1000, 4097, 20_011, 150_001] {
                check_moves::<u8>(&mut domain, count);
                check_reductions::<f32>(&mut domain, &order, ReduceOp::Sum, count);
            }
            domain.close(TIMEOUT).unwrap();
        });
    }
}

#[test]
fn operations_between_machines_match_the_serial_reference_for_all_types() {
    let machines = [vec![0, 1], vec![2, 3]];
    run(&machines, &DomainOptions::new(), |mut domain| {
        macro_rules! check {
            ($($type:ty),*) => {$(
                check_moves::<$type>(&mut domain, 777);
                for op in ReduceOp::ALL {
                    // Means of integers are not those of the machines' means.
                    let data_type = <$type as crate::Element>::DATA_TYPE;
                    let is_flat = op == ReduceOp::Mean && !data_type.is_floating_point();
                    let order = if is_flat { vec![vec![0, 1, 2, 3]] } else { machines.to_vec() };
                    for count in [77, 4321] {
                        check_reductions::<$type>(&mut domain, &order, op, count);
                    }
                }
            )*};
        }
        check!(u8, i8, u16, i16, u32, i32, u64, i64, F16, Bf16, f32, f64);
        domain.close(TIMEOUT).unwrap();
    });
}

/// Blocks of several chunks, of which more are under way than there are slots.
#[test]
fn large_blocks_of_all_operations_arrive_between_machines() {
    const COUNT: usize = (1 << 20) + 5;
    let parameters = Parameters { chunk_bits: 16, ..Parameters::default() };
    let options = DomainOptions::new().fixed_parameters(parameters);
    for machines in
        [vec![vec![0], vec![1]], vec![vec![0], vec![1], vec![2]], vec![vec![0, 1], vec![2, 3]]]
    {
        run(&machines, &options, |mut domain| {
            check_moves::<u8>(&mut domain, COUNT);
            check_reductions::<u32>(&mut domain, &machines, ReduceOp::Sum, COUNT / 4);
            domain.close(TIMEOUT).unwrap();
        });
    }
}

#[test]
fn root_may_be_the_same_in_many_operations() {
    let machines = [vec![0, 1], vec![2, 3]];
    run(&machines, &DomainOptions::new(), |mut domain| {
        for number in 0..400_u32 {
            let mut elements = vec![if domain.rank() == 1 { number } else { 0 }; 7];
            domain.broadcast(1, &mut elements, TIMEOUT).unwrap();
            assert_eq!(elements, [number; 7]);
            let mut all = if domain.rank() == 2 { vec![0; 4] } else { Vec::new() };
            domain.gather(2, &[domain.rank() + number], &mut all, TIMEOUT).unwrap();
            assert!(all.is_empty() || all == [number, number + 1, number + 2, number + 3]);
        }
        domain.close(TIMEOUT).unwrap();
    });
}

#[test]
fn different_calls_between_machines_are_reported_on_all_ranks_with_both_sides() {
    let began = Instant::now();
    for machines in [vec![vec![0], vec![1]], vec![vec![0, 1], vec![2, 3]]] {
        let errors = run(&machines, &DomainOptions::new(), |mut domain| {
            // A rank may still be in it when others have found the difference.
            let waited = domain.barrier(TIMEOUT);
            let count = if domain.rank() == 1 { 200 } else { 100 };
            let mut elements = vec![1.0_f32; count];
            let reduce = |()| domain.all_reduce(&mut elements, ReduceOp::Sum, TIMEOUT);
            let error = waited.and_then(reduce).unwrap_err();
            assert_eq!(domain.barrier(TIMEOUT).unwrap_err().kind(), ErrorKind::Mismatch);
            error
        });
        for error in errors {
            assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
            assert!(error.ranks().contains(&1), "{error}");
            let text = error.to_string();
            let parts = ["operation 2 of the domain", "of 100 f32 (sum)", "of 200 f32 (sum)"];
            assert!(parts.iter().all(|part| text.contains(part)), "{text}");
        }
    }
    assert!(began.elapsed() < Duration::from_secs(30));
}

#[test]
fn rank_that_does_not_call_is_named_on_all_machines() {
    let short = Duration::from_millis(400);
    for late in [1, 2] {
        let machines = [vec![0, 1], vec![2, 3]];
        let errors = run(&machines, &DomainOptions::new(), |mut domain| {
            domain.barrier(TIMEOUT).unwrap();
            if domain.rank() == late {
                thread::sleep(5 * short);
            }
            domain.all_reduce(&mut [1; 100_000], ReduceOp::Sum, short).unwrap_err()
        });
        for error in errors {
            let kind = (error.kind(), error.ranks());
            assert_eq!(kind, (ErrorKind::DeadlineExceeded, &[late][..]), "{error}");
        }
    }
}

#[test]
fn rank_that_has_left_is_named_on_all_machines() {
    let machines = [vec![0, 1], vec![2, 3]];
    let errors = run(&machines, &DomainOptions::new(), |mut domain| {
        domain.barrier(TIMEOUT).unwrap();
        (domain.rank() != 3).then(|| domain.barrier(TIMEOUT).unwrap_err())
    });
    for error in errors.into_iter().flatten() {
        assert_eq!((error.kind(), error.ranks()), (ErrorKind::Closed, &[3][..]), "{error}");
    }
}

#[test]
fn ranks_with_different_options_do_not_join_between_machines() {
    let directory = TempDir::new("machines-options");
    let machines = [vec![0], vec![1]];
    let join = |rank: u32| {
        let mut group = start(&directory, &machines, rank);
        let options = DomainOptions::new();
        let options = match rank {
            0 => options,
            _ => options.fixed_parameters(Parameters::default()),
        };
        CommDomain::of_group(&mut group, &options).unwrap_err()
    };
    let errors = thread::scope(|scope| {
        let threads = [0, 1].map(|rank| scope.spawn(move || join(rank)));
        threads.map(|thread| thread.join().unwrap())
    });
    for error in errors {
        assert_eq!(error.kind(), ErrorKind::VersionMismatch, "{error}");
        assert_eq!(error.ranks().len(), 2, "{error}");
    }
}

fn signal(child: &ForkedChild, signal: libc::c_int) {
    let pidfd = child.pidfd();
    // SAFETY: a valid descriptor; no information is passed.
    #[allow(unsafe_code)]
    unsafe {
        let none = std::ptr::null::<libc::siginfo_t>();
        libc::syscall(libc::SYS_pidfd_send_signal, pidfd.as_raw_fd(), signal, none, 0);
    }
}

/// Ranks on two machines reduce, and the last one is killed or stopped meanwhile.
fn lose_a_rank(
    machines: &[Vec<u32>],
    number: libc::c_int,
    timeout: Duration,
    kind: ErrorKind,
    limit: Duration,
) {
    let directory = TempDir::new("machines-lost");
    let last = machines[1].last().copied().unwrap();
    let reduce = |rank: u32, timeout| {
        let mut group = start(&directory, machines, rank);
        let mut domain = CommDomain::of_group(&mut group, &DomainOptions::new()).unwrap();
        let mut elements = vec![0_u32; 1 << 20];
        domain.barrier(TIMEOUT).unwrap();
        std::fs::write(directory.join(format!("ready-{rank}")), "").unwrap();
        let error = loop {
            elements.fill(rank);
            if let Err(error) = domain.all_reduce(&mut elements, ReduceOp::Max, timeout) {
                break error;
            }
            assert!(elements.iter().all(|found| *found == last));
        };
        (Instant::now(), error, group)
    };
    let rest = |rank: u32| {
        // The remaining ranks of the machine have a domain again at once.
        let began = Instant::now();
        let machine = machines.iter().find(|ranks| ranks.contains(&rank)).unwrap();
        let ranks: Vec<u32> = machine.iter().copied().filter(|other| *other != last).collect();
        let key = CommDomainKey { ranks: ranks.clone(), ..CommDomainKey::of_first_ranks(4) };
        let place = ranks.iter().position(|other| *other == rank).unwrap() as u32;
        let options = DomainOptions::new().directory(&directory);
        let mut domain = CommDomain::join(&key, place, &options).unwrap();
        domain.all_reduce(&mut [1], ReduceOp::Sum, TIMEOUT).unwrap();
        assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    };
    let check = |error: &crate::Error| {
        assert_eq!((error.kind(), error.ranks()), (kind, &[last][..]), "{error}");
    };
    let other = |rank: u32| {
        let (_, error, _group) = reduce(rank, timeout);
        check(&error);
        rest(rank);
    };
    let others: Vec<_> = (1..last).map(|rank| ForkedChild::new(move || other(rank))).collect();
    let lost = ForkedChild::new(|| drop(reduce(last, TIMEOUT)));
    thread::scope(|scope| {
        let first = scope.spawn(|| reduce(0, timeout));
        while (0..=last).any(|rank| !directory.join(format!("ready-{rank}")).exists()) {
            thread::sleep(Duration::from_millis(10));
        }
        thread::sleep(Duration::from_millis(300));
        let lost_at = Instant::now();
        signal(&lost, number);
        let (failed_at, error, _group) = first.join().unwrap();
        check(&error);
        let took = failed_at.saturating_duration_since(lost_at);
        println!("{kind:?} after {took:?}: {error}");
        assert!(took < limit, "{took:?}");
        rest(0);
    });
    for other in others {
        assert!(other.wait().success());
    }
    drop(lost);
}

#[test]
fn killed_rank_is_named_on_all_machines_at_once() {
    let limit = Duration::from_millis(200);
    for machines in [vec![vec![0, 1], vec![2, 3]], vec![vec![0], vec![1]]] {
        lose_a_rank(&machines, libc::SIGKILL, TIMEOUT, ErrorKind::RankFailed, limit);
    }
}

#[test]
fn stopped_rank_is_named_on_all_machines_at_the_deadline() {
    let timeout = Duration::from_secs(1);
    for machines in [vec![vec![0, 1], vec![2, 3]], vec![vec![0], vec![1]]] {
        let kind = ErrorKind::DeadlineExceeded;
        lose_a_rank(&machines, libc::SIGSTOP, timeout, kind, 2 * timeout);
    }
}

/// Ranks with random delays call operations of several keys, whose parameters are learnt.
#[test]
fn processes_on_two_machines_use_the_same_parameters_in_each_operation() {
    const OPERATIONS: u64 = 300;
    let directory = TempDir::new("machines-agree");
    let machines = [vec![0, 1, 2, 3], vec![4, 5, 6, 7]];
    let key = |bytes: u64, operation| OpKey {
        operation,
        size_class: SizeClass::of(bytes),
        data_type: DataType::U32,
    };
    let rank = |rank: u32| {
        let mut group = start(&directory, &machines, rank);
        let mut domain = CommDomain::of_group(&mut group, &DomainOptions::new()).unwrap();
        let mut random = u64::from(rank) * 0x9e37_79b9 + 1;
        let mut digest = Vec::new();
        for number in 0..OPERATIONS {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            if random >> 61 == 0 {
                thread::sleep(Duration::from_micros(random >> 53));
            }
            let count = if number % 2 == 0 { 64 << 10 } else { 160 << 10 };
            let bytes = 4 * count as u64;
            let operation =
                if number % 3 == 0 { Operation::Broadcast } else { Operation::AllReduce };
            digest.push(domain.parameters(key(bytes, operation)).encode());
            let mut elements = vec![rank + 1; count];
            match operation {
                Operation::Broadcast => domain.broadcast(3, &mut elements, TIMEOUT).unwrap(),
                _ => domain.all_reduce(&mut elements, ReduceOp::Sum, TIMEOUT).unwrap(),
            }
            let expected = if operation == Operation::Broadcast { 4 } else { 36 };
            assert!(elements.iter().all(|found| *found == expected));
        }
        let history = domain.history(key(256 << 10, Operation::AllReduce)).len();
        domain.close(TIMEOUT).unwrap();
        std::fs::write(directory.join(format!("digest-{rank}")), format!("{digest:?}")).unwrap();
        history
    };
    let others: Vec<_> =
        (1..8).map(|number| ForkedChild::new(move || assert!(rank(number) < 100))).collect();
    let history = rank(0);
    for other in others {
        assert!(other.wait().success());
    }
    assert!(history > 0, "nothing was learnt");
    let digest = |rank| std::fs::read_to_string(directory.join(format!("digest-{rank}"))).unwrap();
    for rank in 1..8 {
        assert_eq!(digest(rank), digest(0), "rank {rank}");
    }
}
