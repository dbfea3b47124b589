//! Domains of processes, of which one is killed, stopped, or writes what is wrong.

use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use testkit::children::ForkedChild;
use testkit::temp_dir::TempDir;

use crate::{Algorithm, CommDomain, CommDomainKey, DomainOptions, ErrorKind, Parameters, ReduceOp};

const TIMEOUT: Duration = Duration::from_secs(30);
const BYTES: usize = 4 << 20;

fn signal(child: &ForkedChild, signal: libc::c_int) {
    let pidfd = child.pidfd();
    // SAFETY: a valid descriptor; no information is passed.
    #[allow(unsafe_code)]
    unsafe {
        let none = std::ptr::null::<libc::siginfo_t>();
        libc::syscall(libc::SYS_pidfd_send_signal, pidfd.as_raw_fd(), signal, none, 0);
    }
}

/// Reduces until that fails. Returns how long after that moment all that was, and the error.
fn reduce_until_it_fails(domain: &mut CommDomain, timeout: Duration) -> crate::Error {
    let mut elements = vec![0_u32; BYTES / 4];
    loop {
        elements.fill(domain.rank());
        if let Err(error) = domain.all_reduce(&mut elements, ReduceOp::Max, timeout) {
            return error;
        }
        assert!(elements.iter().all(|found| *found == domain.size() - 1));
    }
}

/// Four ranks reduce, and the last one is killed or stopped meanwhile.
fn lose_a_rank(options: &DomainOptions, number: libc::c_int, timeout: Duration, kind: ErrorKind) {
    let key = CommDomainKey::of_first_ranks(4);
    let rank = |rank: u32| {
        let mut domain = CommDomain::join(&key, rank, options).unwrap();
        let error = reduce_until_it_fails(&mut domain, timeout);
        assert_eq!((error.kind(), error.ranks()), (kind, &[3][..]), "{error}");
        drop(domain);
        // A domain without the lost rank.
        let began = Instant::now();
        let rest = CommDomainKey { ranks: vec![0, 1, 2], ..CommDomainKey::of_first_ranks(4) };
        let mut domain = CommDomain::join(&rest, rank, options).unwrap();
        let mut sum = [1];
        domain.all_reduce(&mut sum, ReduceOp::Sum, TIMEOUT).unwrap();
        assert_eq!(sum, [3]);
        assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
        domain.close(TIMEOUT).unwrap();
    };
    let others = [1, 2].map(|number| ForkedChild::new(move || rank(number)));
    let lost = ForkedChild::new(|| {
        let mut domain = CommDomain::join(&key, 3, options).unwrap();
        reduce_until_it_fails(&mut domain, TIMEOUT);
    });
    let first = std::thread::scope(|scope| {
        let first = scope.spawn(|| {
            let mut domain = CommDomain::join(&key, 0, options).unwrap();
            let error = reduce_until_it_fails(&mut domain, timeout);
            (Instant::now(), error)
        });
        std::thread::sleep(Duration::from_millis(300));
        let lost_at = Instant::now();
        signal(&lost, number);
        let (failed_at, error) = first.join().unwrap();
        assert_eq!((error.kind(), error.ranks()), (kind, &[3][..]), "{error}");
        let took = failed_at.saturating_duration_since(lost_at);
        println!("{kind:?} after {took:?}: {error}");
        let limit = if number == libc::SIGKILL { Duration::from_millis(200) } else { 2 * timeout };
        assert!(took < limit, "{took:?}");
        let rest = CommDomainKey { ranks: vec![0, 1, 2], ..CommDomainKey::of_first_ranks(4) };
        let mut domain = CommDomain::join(&rest, 0, options).unwrap();
        domain.all_reduce(&mut [1], ReduceOp::Sum, TIMEOUT).unwrap();
        domain.close(TIMEOUT)
    });
    first.unwrap();
    others.into_iter().for_each(|other| assert!(other.wait().success()));
    drop(lost);
}

fn with(algorithm: Algorithm, directory: &TempDir) -> DomainOptions {
    let parameters = Parameters { algorithm, ..Parameters::default() };
    DomainOptions::new().directory(directory).fixed_parameters(parameters)
}

#[test]
fn killed_rank_is_named_by_all_others_at_once() {
    let directory = TempDir::new("domain-killed");
    for algorithm in [Algorithm::TwoStep, Algorithm::Direct] {
        let options = with(algorithm, &directory);
        lose_a_rank(&options, libc::SIGKILL, TIMEOUT, ErrorKind::RankFailed);
    }
    assert!(directory.entries().is_empty());
}

#[test]
fn stopped_rank_is_named_by_all_others_at_the_deadline() {
    let directory = TempDir::new("domain-stopped");
    let timeout = Duration::from_millis(500);
    for algorithm in [Algorithm::TwoStep, Algorithm::Direct] {
        let options = with(algorithm, &directory);
        lose_a_rank(&options, libc::SIGSTOP, timeout, ErrorKind::DeadlineExceeded);
    }
    assert!(directory.entries().is_empty());
}

#[test]
fn rank_killed_while_others_join_may_come_again() {
    let directory = TempDir::new("domain-joining");
    let options = DomainOptions::new().directory(&directory);
    let key = CommDomainKey::of_first_ranks(3);
    let join = |rank: u32| {
        let mut domain = CommDomain::join(&key, rank, &options).unwrap();
        domain.barrier(TIMEOUT).unwrap();
    };
    // The first one listens, the second one waits there. Either is killed.
    for killed in [0, 1] {
        let started = [0, 1].map(|rank| {
            let child = ForkedChild::new(move || join(rank));
            std::thread::sleep(Duration::from_millis(100));
            child
        });
        signal(&started[killed as usize], libc::SIGKILL);
        let again = ForkedChild::new(move || join(killed));
        std::thread::sleep(Duration::from_millis(100));
        join(2);
        assert!(again.wait().success());
        let [first, second] = started;
        let (lost, other) = if killed == 0 { (first, second) } else { (second, first) };
        assert!(lost.was_killed() && other.wait().success());
    }
    assert!(directory.entries().is_empty());
}

#[test]
fn child_of_a_rank_cannot_use_its_domain() {
    let directory = TempDir::new("domain-forked");
    let options = DomainOptions::new().directory(&directory);
    let key = CommDomainKey::of_first_ranks(1);
    let mut domain = CommDomain::join(&key, 0, &options).unwrap();
    let child = ForkedChild::new(|| {
        let error = domain.barrier(TIMEOUT).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Forked, "{error}");
    });
    assert!(child.wait().success());
    domain.barrier(TIMEOUT).unwrap();
}
