//! Operations of domains whose ranks are threads, against a serial reference.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};

use testkit::temp_dir::TempDir;

use crate::{
    Algorithm, Bf16, CommDomain, CommDomainKey, DomainOptions, Element, ErrorKind, F16, Parameters,
    ReduceOp,
};

const TIMEOUT: Duration = Duration::from_secs(30);

/// Runs each rank in a thread, in a domain of its own directory.
fn run<T: Send>(
    ranks: u32,
    options: &DomainOptions,
    each: impl Fn(CommDomain) -> T + Sync,
) -> Vec<T> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let directory = TempDir::new(&format!("domain-{}", NEXT.fetch_add(1, Relaxed)));
    let options = options.clone().directory(&directory);
    let key = CommDomainKey::of_first_ranks(ranks);
    let results = thread::scope(|scope| {
        let start = |rank: u32| {
            let (options, key, each) = (&options, &key, &each);
            scope.spawn(move || each(CommDomain::join(key, rank, options).unwrap()))
        };
        let threads: Vec<_> = (0..ranks).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let left = directory.entries();
    assert!(left.is_empty(), "{left:?}");
    results
}

/// All ways in which the operations can be carried out.
fn all_options() -> Vec<DomainOptions> {
    let with = |algorithm, chunk_bits| {
        let parameters = Parameters { algorithm, chunk_bits, ..Parameters::default() };
        DomainOptions::new().fixed_parameters(parameters)
    };
    vec![
        DomainOptions::new(),
        with(Algorithm::OneStep, 12),
        with(Algorithm::TwoStep, 12),
        with(Algorithm::TwoStep, 16),
        with(Algorithm::Direct, 0),
    ]
}

/// Elements of which each is different.
pub(crate) trait Numbered: Element + PartialEq + std::fmt::Debug {
    fn numbered(rank: u32, at: usize) -> Self;
}

macro_rules! numbered {
    ($($type:ty),*) => {$(
        impl Numbered for $type {
            fn numbered(rank: u32, at: usize) -> Self {
                ((at * 31 + rank as usize * 7919 + 1) % 251) as $type
            }
        }
    )*};
}

numbered!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64);

impl Numbered for F16 {
    fn numbered(rank: u32, at: usize) -> Self {
        // Numbers from 1 on.
        Self(0x3c00 + u16::numbered(rank, at))
    }
}

impl Numbered for Bf16 {
    fn numbered(rank: u32, at: usize) -> Self {
        Self(0x3f80 + u16::numbered(rank, at) % 64)
    }
}

fn elements<T: Numbered>(rank: u32, count: usize) -> Vec<T> {
    (0..count).map(|at| T::numbered(rank, at)).collect()
}

/// The reduction of elements, by one process.
fn reduce_serially<T: Numbered>(op: ReduceOp, all: &[Vec<T>], count: usize) -> Vec<T> {
    let sources: Vec<*const u8> = all.iter().map(|it| it.as_ptr().cast()).collect();
    let mut result: Vec<T> = elements(0, count);
    let to = result.as_mut_ptr().cast();
    // SAFETY: vectors of so many elements.
    #[allow(unsafe_code)]
    unsafe {
        reduction::reduce(op, T::DATA_TYPE, to, &sources, count);
    }
    result
}

/// The reduction of the elements of all ranks: first of those of each machine.
fn reduced<T: Numbered>(op: ReduceOp, machines: &[Vec<u32>], count: usize) -> Vec<T> {
    let of_machine = |ranks: &Vec<u32>| {
        let all: Vec<Vec<T>> = ranks.iter().map(|rank| elements(*rank, count)).collect();
        reduce_serially(op, &all, count)
    };
    let all: Vec<Vec<T>> = machines.iter().map(of_machine).collect();
    reduce_serially(op, &all, count)
}

pub(crate) fn check_moves<T: Numbered>(domain: &mut CommDomain, count: usize) {
    let (rank, ranks) = (domain.rank(), domain.size());
    let own: Vec<T> = elements(rank, count);
    let all: Vec<T> = (0..ranks).flat_map(|rank| elements(rank, count)).collect();
    let blank = vec![T::numbered(99, 99); all.len()];

    let mut found = blank.clone();
    domain.all_gather(&own, &mut found, TIMEOUT).unwrap();
    assert_eq!(found, all);

    let root = (count as u32) % ranks;
    let mut found = if rank == root { elements(root, count) } else { blank[..count].to_vec() };
    domain.broadcast(root, &mut found, TIMEOUT).unwrap();
    assert_eq!(found, elements::<T>(root, count));

    let mut found = if rank == root { blank.clone() } else { Vec::new() };
    domain.gather(root, &own, &mut found, TIMEOUT).unwrap();
    assert!(found.is_empty() || found == all);
    assert_eq!(found.is_empty(), rank != root || count == 0);

    let mut found = blank[..count].to_vec();
    let blocks = if rank == root { all.clone() } else { Vec::new() };
    domain.scatter(root, &blocks, &mut found, TIMEOUT).unwrap();
    assert_eq!(found, own);

    // Block n of rank r has the numbers of rank r + 10 n.
    let send: Vec<T> = (0..ranks).flat_map(|to| elements(rank + 10 * to, count)).collect();
    let expected: Vec<T> = (0..ranks).flat_map(|from| elements(from + 10 * rank, count)).collect();
    let mut found = blank.clone();
    domain.all_to_all(&send, &mut found, TIMEOUT).unwrap();
    assert_eq!(found, expected);

    // Rank r gives r elements more than rank 0.
    let counts: Vec<usize> = (0..ranks as usize).map(|rank| count + rank).collect();
    let all: Vec<T> = (0..ranks).flat_map(|rank| elements(rank, counts[rank as usize])).collect();
    let mut found = vec![T::numbered(99, 99); all.len()];
    let own: Vec<T> = elements(rank, counts[rank as usize]);
    domain.all_gather_unequal(&own, &mut found, &counts, TIMEOUT).unwrap();
    assert_eq!(found, all);

    // Rank r gives rank n so many elements.
    let length =
        |from: u32, to: u32| (count / 3 + (from * 2 + to) as usize) * usize::from(from != to + 1);
    let block = |from: u32, to: u32| elements::<T>(from * 16 + to, length(from, to));
    let send: Vec<T> = (0..ranks).flat_map(|to| block(rank, to)).collect();
    let expected: Vec<T> = (0..ranks).flat_map(|from| block(from, rank)).collect();
    let send_counts: Vec<usize> = (0..ranks).map(|to| length(rank, to)).collect();
    let receive_counts: Vec<usize> = (0..ranks).map(|from| length(from, rank)).collect();
    let mut found = vec![T::numbered(99, 99); expected.len()];
    domain.all_to_all_unequal(&send, &send_counts, &mut found, &receive_counts, TIMEOUT).unwrap();
    assert_eq!(found, expected);
}

pub(crate) fn check_reductions<T: Numbered>(
    domain: &mut CommDomain,
    machines: &[Vec<u32>],
    op: ReduceOp,
    count: usize,
) {
    let (rank, ranks) = (domain.rank(), domain.size());
    let expected: Vec<T> = reduced(op, machines, count);
    let mut found: Vec<T> = elements(rank, count);
    domain.all_reduce(&mut found, op, TIMEOUT).unwrap();
    assert_eq!(found, expected);

    let root = (count as u32 + 1) % ranks;
    let mut found: Vec<T> = elements(rank, count);
    domain.reduce(root, &mut found, op, TIMEOUT).unwrap();
    assert_eq!(found, if rank == root { expected } else { elements(rank, count) });

    let expected: Vec<T> = reduced(op, machines, count * ranks as usize);
    let mut found: Vec<T> = elements(99, count);
    let own: Vec<T> = elements(rank, count * ranks as usize);
    domain.reduce_scatter(&own, &mut found, op, TIMEOUT).unwrap();
    assert_eq!(found, expected[rank as usize * count..][..count]);

    let counts: Vec<usize> = (0..ranks as usize).map(|rank| count + 3 * rank).collect();
    let total: usize = counts.iter().sum();
    let begin: usize = counts[..rank as usize].iter().sum();
    let own: Vec<T> = elements(rank, total);
    let mut found: Vec<T> = elements(99, counts[rank as usize]);
    domain.reduce_scatter_unequal(&own, &mut found, &counts, op, TIMEOUT).unwrap();
    let expected: Vec<T> = reduced(op, machines, total);
    assert_eq!(found, expected[begin..][..counts[rank as usize]]);
}

#[test]
fn operations_match_the_serial_reference_for_all_counts() {
    for options in all_options() {
        for ranks in [1, 2, 3, 5] {
            run(ranks, &options, |mut domain| {
                for count in [0, 1, 5, 16, 1000, 4097, 20_011] {
                    check_moves::<u8>(&mut domain, count);
                    let machines = [(0..ranks).collect()];
                    check_reductions::<f32>(&mut domain, &machines, ReduceOp::Sum, count);
                }
                domain.barrier(TIMEOUT).unwrap();
                domain.close(TIMEOUT).unwrap();
            });
        }
    }
}

#[test]
fn operations_match_the_serial_reference_for_all_types() {
    for options in all_options() {
        run(3, &options, |mut domain| {
            macro_rules! check {
                ($($type:ty),*) => {$(
                    check_moves::<$type>(&mut domain, 777);
                    for op in ReduceOp::ALL {
                        check_reductions::<$type>(&mut domain, &[vec![0, 1, 2]], op, 777);
                    }
                )*};
            }
            check!(u8, i8, u16, i16, u32, i32, u64, i64, F16, Bf16, f32, f64);
            domain.close(TIMEOUT).unwrap();
        });
    }
}

/// The errors of ranks that call different operations.
fn mismatch(ranks: u32, call: impl Fn(&mut CommDomain) -> crate::Result<()> + Sync) -> Vec<String> {
    let began = Instant::now();
    let texts = run(ranks, &DomainOptions::new(), |mut domain| {
        domain.barrier(TIMEOUT).unwrap();
        let mut error = call(&mut domain).err();
        // A rank that needed nothing of the others finds it in its next operations.
        for _ in 0..3 {
            error = error.or_else(|| domain.barrier(TIMEOUT).err());
        }
        let error = error.unwrap();
        assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
        assert!(error.ranks().len() == 2 && error.ranks()[0] != error.ranks()[1]);
        // The domain is over.
        assert_eq!(domain.barrier(TIMEOUT).unwrap_err().kind(), ErrorKind::Mismatch);
        error.to_string()
    });
    assert!(began.elapsed() < Duration::from_secs(10));
    texts
}

#[test]
fn different_calls_are_reported_on_all_ranks_with_both_sides() {
    let has = |texts: Vec<String>, parts: &[&str]| {
        for text in &texts {
            assert!(parts.iter().all(|part| text.contains(part)), "{text}");
        }
    };
    let sizes = mismatch(3, |domain| {
        let mut elements = vec![1.0_f32; if domain.rank() == 2 { 200 } else { 100 }];
        domain.all_reduce(&mut elements, ReduceOp::Sum, TIMEOUT)
    });
    has(
        sizes,
        &["operation 2 of the domain", "all-reduce of 100 f32 (sum)", "all-reduce of 200 f32"],
    );
    let types = mismatch(2, |domain| match domain.rank() {
        0 => domain.all_reduce(&mut [1_u32; 9], ReduceOp::Sum, TIMEOUT),
        _ => domain.all_reduce(&mut [1_i32; 9], ReduceOp::Sum, TIMEOUT),
    });
    has(types, &["of 9 u32 (sum)", "of 9 i32 (sum)"]);
    let reductions = mismatch(2, |domain| {
        let op = if domain.rank() == 0 { ReduceOp::Min } else { ReduceOp::Max };
        domain.reduce(1, &mut [1_u32; 9], op, TIMEOUT)
    });
    has(reductions, &["(min) with root 1", "(max) with root 1"]);
    // Each rank is a root, and needs nothing of the other one.
    let roots =
        mismatch(2, |domain| domain.broadcast(domain.rank(), &mut [domain.rank(); 100], TIMEOUT));
    has(roots, &["broadcast of 100 u32 with root 0", "broadcast of 100 u32 with root 1"]);
    let operations = mismatch(4, |domain| match domain.rank() {
        1 => domain.barrier(TIMEOUT),
        rank => domain.all_gather(&[rank; 50_000], &mut [0; 200_000], TIMEOUT),
    });
    has(operations, &["rank 1 calls barrier", "all-gather of 50000 u32"]);
    // In another order.
    let orders = mismatch(2, |domain| {
        if domain.rank() == 0 {
            domain.barrier(TIMEOUT)?;
        }
        domain.all_reduce(&mut [1_u8], ReduceOp::Sum, TIMEOUT)?;
        domain.barrier(TIMEOUT)
    });
    has(orders, &["barrier", "all-reduce of 1 u8 (sum)"]);
    let lengths = mismatch(2, |domain| {
        let counts = [[1, 2], [3, 4]][domain.rank() as usize];
        let total = counts.iter().sum();
        let (send, mut receive) = (vec![0_u8; total], vec![0_u8; total]);
        domain.all_to_all_unequal(&send, &counts, &mut receive, &counts, TIMEOUT)
    });
    has(lengths, &["all-to-all"]);
}

#[test]
fn rank_that_does_not_call_is_named_at_the_deadline() {
    let short = Duration::from_millis(300);
    let errors = run(3, &DomainOptions::new(), |mut domain| {
        domain.barrier(TIMEOUT).unwrap();
        if domain.rank() == 1 {
            thread::sleep(3 * short);
        }
        let began = Instant::now();
        let error = domain.all_reduce(&mut [1; 1000], ReduceOp::Sum, short).unwrap_err();
        assert!(began.elapsed() < 2 * short);
        error
    });
    for error in errors {
        assert_eq!(
            (error.kind(), error.ranks()),
            (ErrorKind::DeadlineExceeded, &[1][..]),
            "{error}"
        );
    }
}

#[test]
fn rank_that_has_left_is_named() {
    let errors = run(3, &DomainOptions::new(), |mut domain| {
        domain.barrier(TIMEOUT).unwrap();
        (domain.rank() != 2).then(|| domain.barrier(TIMEOUT).unwrap_err())
    });
    for error in errors.into_iter().flatten() {
        assert_eq!((error.kind(), error.ranks()), (ErrorKind::Closed, &[2][..]), "{error}");
    }
}

#[test]
fn rank_that_is_interrupted_gives_up_on_all_ranks() {
    let options = DomainOptions::new().interruption(|| true);
    let errors = run(2, &options, |mut domain| {
        if domain.rank() == 1 {
            thread::sleep(Duration::from_millis(300));
        }
        domain.barrier(TIMEOUT).unwrap_err()
    });
    for error in errors {
        assert_eq!((error.kind(), error.ranks()), (ErrorKind::Closed, &[0][..]), "{error}");
    }
}

#[test]
fn invalid_arguments_leave_the_domain_as_it_is() {
    run(2, &DomainOptions::new(), |mut domain| {
        let invalid = |result: crate::Result<()>, part: &str| {
            let error = result.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
            assert!(error.to_string().contains(part), "{error}");
        };
        invalid(domain.broadcast(2, &mut [0_u8], TIMEOUT), "rank 2 does not exist");
        invalid(domain.all_gather(&[0_u8; 2], &mut [0; 3], TIMEOUT), "3 elements");
        invalid(domain.all_to_all(&[0_u8; 3], &mut [0; 3], TIMEOUT), "3 elements");
        let counts = domain.all_gather_unequal(&[0_u8; 2], &mut [0; 4], &[2, 3], TIMEOUT);
        invalid(counts, "5 elements by the counts, 4 are given");
        let counts = domain.all_gather_unequal(&[0_u8; 2], &mut [0; 4], &[4], TIMEOUT);
        invalid(counts, "1 counts for 2 ranks");
        let mut own = [0_u8; 2];
        let own_count = [1 - domain.rank() as usize, 1 + domain.rank() as usize];
        let result =
            domain.reduce_scatter_unequal(&[0; 2], &mut own, &own_count, ReduceOp::Sum, TIMEOUT);
        if domain.rank() == 0 {
            invalid(result, "gives 1 elements to itself, and takes 2");
        }
        domain.close(TIMEOUT).ok();
    });
}

#[test]
fn ranks_that_do_not_agree_do_not_join() {
    let directory = TempDir::new("domain-setup");
    let key = CommDomainKey::of_first_ranks(3);
    let join = |rank: u32, number: u32, fixed| {
        let options =
            DomainOptions::new().directory(&directory).timeout(Duration::from_millis(500));
        let options = match fixed {
            true => options.fixed_parameters(Parameters::default()),
            false => options,
        };
        let _ = number;
        CommDomain::join(&key, rank, &options).map(drop)
    };
    let all = |ranks: [(u32, bool); 3]| {
        thread::scope(|scope| {
            let start = |(number, (rank, fixed)): (usize, (u32, bool))| {
                let join = &join;
                scope.spawn(move || join(rank, number as u32, fixed).unwrap_err())
            };
            let threads: Vec<_> = ranks.into_iter().enumerate().map(start).collect();
            threads.into_iter().map(|it| it.join().unwrap()).collect::<Vec<_>>()
        })
    };
    for error in all([(0, false), (1, true), (2, false)]) {
        // A third rank may come after the refusal, and wait in vain.
        let kinds = [ErrorKind::VersionMismatch, ErrorKind::DeadlineExceeded];
        assert!(kinds.contains(&error.kind()), "{error}");
    }
    for error in all([(0, false), (1, false), (1, false)]) {
        let kinds = [ErrorKind::InvalidArgument, ErrorKind::DeadlineExceeded];
        assert!(kinds.contains(&error.kind()), "{error}");
    }
    let error = join(1, 0, false).unwrap_err();
    assert_eq!(
        (error.kind(), error.ranks()),
        (ErrorKind::DeadlineExceeded, &[0, 2][..]),
        "{error}"
    );
    let error = join(3, 0, false).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    assert!(directory.entries().is_empty());
}
