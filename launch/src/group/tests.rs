//! Ranks as threads of one process.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use fabric::ring::RingSetup;
use pubsub::{NodeOptions, Row, TopicSettings};
use transfer::path::{Path, Policy};
use transfer::{AgentOptions, Event, HostBuffer, Notice, Rights};

use super::*;
use crate::options::FabricUse;

const TIMEOUT: Duration = Duration::from_secs(20);
/// For a rank that does not come.
const SHORT: Duration = Duration::from_secs(2);

/// The bytes by round and rank.
type Contributions = BTreeMap<(u32, u32), Vec<u8>>;

/// An exchange among threads.
#[derive(Debug, Clone)]
struct Threads {
    rank: u32,
    size: u32,
    rounds: u32,
    shared: Arc<(Mutex<Contributions>, Condvar)>,
}

impl Exchange for Threads {
    fn name(&self) -> &str {
        "threads"
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

    fn local(&self) -> Option<LocalRank> {
        Some(LocalRank { rank: self.rank, size: self.size })
    }

    fn all_gather(&mut self, own: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let round = self.rounds;
        self.rounds += 1;
        let (all, changed) = &*self.shared;
        let mut all = all.lock().unwrap();
        all.insert((round, self.rank), own.to_vec());
        changed.notify_all();
        let is_incomplete =
            |all: &mut BTreeMap<_, _>| (0..self.size).any(|rank| !all.contains_key(&(round, rank)));
        let (all, waited) = changed.wait_timeout_while(all, timeout, is_incomplete).unwrap();
        if waited.timed_out() {
            let missing = (0..self.size).filter(|rank| !all.contains_key(&(round, *rank)));
            let error = Error::new("exchange among ranks", ErrorKind::DeadlineExceeded, "missing");
            return Err(error.of_ranks(missing));
        }
        Ok((0..self.size).map(|rank| all[&(round, rank)].clone()).collect())
    }
}

/// A directory that is removed at the end.
struct TestDirectory(PathBuf);

impl TestDirectory {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("fabricast-group-{}-{number}", std::process::id());
        Self(std::env::temp_dir().join(name))
    }

    fn options(&self) -> GroupOptions {
        GroupOptions::new().label("test").directory(&self.0).timeout(TIMEOUT)
    }
}

impl Drop for TestDirectory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn exchanges(size: u32) -> impl Iterator<Item = Threads> {
    let shared = Arc::default();
    (0..size).map(move |rank| Threads { rank, size, rounds: 0, shared: Arc::clone(&shared) })
}

/// Runs all ranks of a group, and returns what each returned.
fn run_with<T: Send>(
    size: u32,
    options: impl Fn(u32, GroupOptions) -> GroupOptions + Sync,
    rank: impl Fn(Group) -> T + Sync,
) -> Vec<T> {
    let directory = TestDirectory::new();
    thread::scope(|scope| {
        let start = |exchange: Threads| {
            let options = options(exchange.rank, directory.options());
            let rank = &rank;
            scope.spawn(move || rank(Group::start_over(exchange, options).unwrap()))
        };
        let threads: Vec<_> = exchanges(size).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn run<T: Send>(size: u32, rank: impl Fn(Group) -> T + Sync) -> Vec<T> {
    run_with(size, |_, options| options, rank)
}

#[test]
fn ranks_gather_and_broadcast_and_meet() {
    for size in [1, 2, 3, 5, 8] {
        run(size, |mut group| {
            assert_eq!((group.size(), group.local().size), (size, size));
            assert_eq!(group.local_ranks(), (0..size).collect::<Vec<_>>());
            for step in 0..3u32 {
                let own = vec![group.rank() as u8; (step * 100) as usize];
                let all = group.all_gather(&own, TIMEOUT).unwrap();
                let expected = |rank: u32| vec![rank as u8; (step * 100) as usize];
                assert_eq!(all, (0..size).map(expected).collect::<Vec<_>>());
                let root = step % size;
                let bytes = group.broadcast(root, &group.rank().to_le_bytes(), TIMEOUT).unwrap();
                assert_eq!(bytes, root.to_le_bytes());
                group.barrier(TIMEOUT).unwrap();
            }
            group.close(TIMEOUT).unwrap();
        });
    }
}

#[test]
fn large_messages_are_gathered() {
    run(3, |mut group| {
        let own: Vec<u8> = (0..300_000).map(|at| (at as u32 * 7 + group.rank()) as u8).collect();
        let all = group.all_gather(&own, TIMEOUT).unwrap();
        for (rank, bytes) in all.iter().enumerate() {
            assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == (at * 7 + rank) as u8));
        }
    });
}

#[test]
fn too_many_bytes_of_one_rank_fail_all_at_once() {
    let errors = run(4, |mut group| {
        group.barrier(TIMEOUT).unwrap();
        let own = vec![0; if group.rank() == 2 { (16 << 20) + 1 } else { 1 }];
        let before = Instant::now();
        let error = group.all_gather(&own, TIMEOUT).unwrap_err();
        assert!(before.elapsed() < TIMEOUT / 4, "{:?}", before.elapsed());
        thread::sleep(SHORT / 2);
        error.to_string()
    });
    let own = "all-gather of ranks failed: invalid argument: 16777217 bytes are more than 16777216, the \
               maximum";
    let other = "all-gather of ranks failed: a rank failed: rank 2 cannot take part. Its error has the \
                 cause";
    assert_eq!(errors, [other, other, own, other]);
}

#[test]
fn too_many_bytes_together_fail_all() {
    let errors = run(2, |mut group| group.all_gather(&vec![0; 9 << 20], TIMEOUT).unwrap_err());
    assert!(errors.iter().all(|error| error.kind() == ErrorKind::InvalidArgument), "{errors:?}");
}

#[test]
fn different_collectives_fail_at_once() {
    let errors = run(2, |mut group| {
        let error = match group.rank() {
            0 => group.barrier(TIMEOUT).unwrap_err(),
            _ => group.all_gather(b"", TIMEOUT).unwrap_err(),
        };
        thread::sleep(SHORT / 2);
        error
    });
    assert!(errors.iter().all(|error| error.kind() == ErrorKind::Malformed), "{errors:?}");
    let text = "sent a message of another collective. Check that all ranks call the same ones in the \
                same order";
    assert!(errors[0].to_string().ends_with(text), "{}", errors[0]);
}

/// The root is blocked by one of its receivers: that one is named, and not the root.
#[test]
fn rank_that_does_not_receive_a_broadcast_is_named() {
    let remote =
        |_, options: GroupOptions| options.force_remote().source(Ipv4Addr::LOCALHOST.into());
    let errors = run_with(4, remote, |mut group| {
        group.barrier(TIMEOUT).unwrap();
        if group.rank() == 1 {
            thread::sleep(2 * SHORT);
            return None;
        }
        let error = group.broadcast(0, &vec![7; 8 << 20], SHORT).unwrap_err();
        thread::sleep(SHORT);
        Some(error)
    });
    for error in errors.into_iter().flatten() {
        assert_eq!(
            (error.kind(), error.ranks()),
            (ErrorKind::DeadlineExceeded, &[1][..]),
            "{error}"
        );
    }
}

#[test]
fn missing_rank_is_named_by_all_others_in_time() {
    let errors = run(6, |mut group| {
        group.barrier(TIMEOUT).unwrap();
        if group.rank() == 4 {
            thread::sleep(SHORT + SHORT / 2);
            return group.barrier(TIMEOUT).unwrap_err();
        }
        let before = Instant::now();
        let error = group.barrier(SHORT).unwrap_err();
        assert!(before.elapsed() < SHORT + Duration::from_millis(1500), "{:?}", before.elapsed());
        // The agent serves others until they have reported it.
        thread::sleep(SHORT);
        let again = group.all_gather(b"", TIMEOUT).unwrap_err();
        assert_eq!(again.ranks(), [4]);
        error
    });
    for error in &errors {
        assert_eq!(
            (error.kind(), error.ranks()),
            (ErrorKind::DeadlineExceeded, &[4][..]),
            "{error}"
        );
    }
    // All ranks tell how long the one that gave up waited: less than the timeout, for its report.
    let figure = |error: &Error| {
        let text = error.to_string();
        let rest = text.split_once("rank 4 did not come within ").unwrap().1;
        let (figure, remedy) = rest.split_once(". ").unwrap();
        assert_eq!(remedy, "Check that all ranks call it");
        figure.strip_suffix('s').unwrap().parse::<f64>().unwrap()
    };
    assert!((1.5..2.0).contains(&figure(&errors[0])), "{}", errors[0]);
    assert!(errors.iter().all(|error| figure(error) == figure(&errors[0])), "{errors:?}");
}

#[test]
fn ended_rank_is_named_by_all_others_at_once() {
    let errors = run(6, |mut group| {
        group.barrier(TIMEOUT).unwrap();
        if group.rank() == 2 {
            return None;
        }
        let before = Instant::now();
        let error = group.barrier(TIMEOUT).unwrap_err();
        assert!(before.elapsed() < SHORT, "{:?}", before.elapsed());
        thread::sleep(SHORT / 2);
        Some(error)
    });
    for error in errors.into_iter().flatten() {
        assert_eq!((error.kind(), error.ranks()), (ErrorKind::RankFailed, &[2][..]), "{error}");
    }
}

/// A rank that fails in a collective leaves, and later ones find it gone.
#[test]
fn rank_that_left_after_a_failure_is_not_named_for_it() {
    let errors = run(3, |mut group| {
        group.barrier(TIMEOUT).unwrap();
        match group.rank() {
            1 => return None,
            2 => {
                let end = Instant::now() + SHORT / 2;
                while Instant::now() < end {
                    group.agent().progress();
                    thread::sleep(Duration::from_millis(10));
                }
            }
            _ => {}
        }
        Some(group.barrier(TIMEOUT).unwrap_err())
    });
    for error in errors.into_iter().flatten() {
        assert_eq!((error.kind(), error.ranks()), (ErrorKind::RankFailed, &[1][..]), "{error}");
    }
}

/// Rank 2 ends, and rank 1 because of it, outside of collectives. Rank 5 has a connection from rank 1
/// only.
#[test]
fn first_of_several_ranks_that_end_is_named() {
    let errors = run(6, |mut group| {
        group.barrier(TIMEOUT).unwrap();
        match group.rank() {
            1 => {
                let peer = group.peer(2, TIMEOUT).unwrap();
                while group.agent().notify(peer, Notice::new(5, b"").unwrap()).is_ok() {
                    thread::sleep(Duration::from_millis(10));
                }
                None
            }
            2 => None,
            5 => Some(group.barrier(TIMEOUT).unwrap_err()),
            _ => {
                thread::sleep(SHORT);
                None
            }
        }
    });
    let error = errors[5].as_ref().unwrap();
    assert_eq!((error.kind(), error.ranks()), (ErrorKind::RankFailed, &[2][..]), "{error}");
}

#[test]
fn rank_that_cannot_start_fails_all_with_its_error() {
    let directory = TestDirectory::new();
    let errors: Vec<_> = thread::scope(|scope| {
        let start = |exchange: Threads| {
            let options = match exchange.rank {
                1 => directory.options().directory("/proc/none".as_ref()),
                _ => directory.options(),
            };
            scope.spawn(move || Group::start_over(exchange, options).unwrap_err())
        };
        let threads: Vec<_> = exchanges(3).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for rank in [0, 2] {
        let error = &errors[rank];
        assert_eq!((error.kind(), error.ranks()), (ErrorKind::RankFailed, &[1][..]), "{error}");
        assert!(
            error.to_string().contains("rank 1: start group failed: create directory /proc/none")
        );
    }
    assert_eq!(errors[1].kind(), ErrorKind::Failed);
}

/// An exchange whose rank 1 is of another version.
#[derive(Debug)]
struct OfVersions(Threads);

impl Exchange for OfVersions {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn job(&self) -> &str {
        self.0.job()
    }

    fn rank(&self) -> u32 {
        self.0.rank()
    }

    fn size(&self) -> u32 {
        self.0.size()
    }

    fn local(&self) -> Option<LocalRank> {
        self.0.local()
    }

    fn all_gather(&mut self, own: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let version = env!("CARGO_PKG_VERSION").as_bytes();
        let at = own.windows(version.len()).position(|part| part == version).unwrap();
        let mut own = own.to_vec();
        if self.rank() == 1 {
            own[at] = b'9';
        }
        self.0.all_gather(&own, timeout)
    }
}

#[test]
fn rank_of_another_version_is_named_by_all() {
    let directory = TestDirectory::new();
    let errors: Vec<_> = thread::scope(|scope| {
        let start = |exchange: Threads| {
            let options = directory.options();
            scope.spawn(move || Group::start_over(OfVersions(exchange), options).unwrap_err())
        };
        let threads: Vec<_> = exchanges(3).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let version = env!("CARGO_PKG_VERSION");
    let text = format!(
        "exchange among ranks (threads) failed: version mismatch: rank 1 is of version 9{}, rank 0 \
         is of version {version}. Start the same build on all ranks",
        &version[1..]
    );
    for error in errors {
        assert_eq!((error.to_string(), error.ranks()), (text.clone(), &[1][..]));
    }
}

#[test]
fn rank_that_never_starts_is_named() {
    let directory = TestDirectory::new();
    let mut first = exchanges(2);
    let options = directory.options().timeout(Duration::from_millis(200));
    let error = Group::start_over(first.next().unwrap(), options).unwrap_err();
    assert_eq!((error.kind(), error.ranks()), (ErrorKind::DeadlineExceeded, &[1][..]));
}

/// Each rank puts into the next one.
fn put_around(mut group: Group) -> Path {
    let (rank, size) = (group.rank(), group.size());
    let inbox = HostBuffer::new(4096).unwrap();
    let region = group.agent().register(&inbox, Rights::WRITE).unwrap();
    let descriptor = region.descriptor().encode().unwrap();
    let descriptors = group.all_gather(&descriptor, TIMEOUT).unwrap();
    let next = (rank + 1) % size;
    let peer = group.peer(next, TIMEOUT).unwrap();
    let source = HostBuffer::from_vec(vec![rank as u8 + 1; 4096]).unwrap();
    let source = group.agent().register_local(source).unwrap();
    let (descriptor, policy) = (&descriptors[next as usize], Policy::default());
    let route = group.agent().join(peer, &source, descriptor, &policy, TIMEOUT).unwrap();
    let notice = Notice::new(5, b"put").unwrap();
    let put = group.agent().put_all(&route, Some(notice)).unwrap();
    group.agent().wait(put, TIMEOUT).unwrap();
    // A barrier does not take the notices of the program.
    group.barrier(TIMEOUT).unwrap();
    let from = loop {
        match group.agent().next_event(TIMEOUT).unwrap() {
            Event::Notice { from, notice } => {
                assert_eq!(notice.tag, 5);
                break group.rank_of(from).unwrap();
            }
            _ => continue,
        }
    };
    assert_eq!(from, (rank + size - 1) % size);
    let mut found = vec![0; 4096];
    inbox.read(0, &mut found).unwrap();
    assert_eq!(found, vec![from as u8 + 1; 4096]);
    let path = route.path();
    group.close(TIMEOUT).unwrap();
    path
}

#[test]
fn ranks_put_into_each_other() {
    assert!(run(3, put_around).iter().all(|path| *path == Path::SameProcess));
}

#[test]
fn remote_ranks_put_by_a_fabric() {
    let remote =
        |_, options: GroupOptions| options.force_remote().source(Ipv4Addr::LOCALHOST.into());
    assert!(run_with(3, remote, put_around).iter().all(|path| *path == Path::FabricDirect));
}

/// A group's notices wait behind those of the program, which have a limited number of credits.
#[test]
fn collectives_pass_notices_that_the_program_has_not_taken() {
    const NOTICES: u64 = 300;
    let remote =
        |_, options: GroupOptions| options.force_remote().source(Ipv4Addr::LOCALHOST.into());
    run_with(2, remote, |mut group| {
        let peer = group.peer(1 - group.rank(), TIMEOUT).unwrap();
        let tokens: Vec<_> = (0..NOTICES)
            .map(|tag| group.agent().notify(peer, Notice::new(tag, b"").unwrap()).unwrap())
            .collect();
        group.barrier(TIMEOUT).unwrap();
        for token in tokens {
            group.agent().wait(token, TIMEOUT).unwrap();
        }
        let mut next = 0;
        while next < NOTICES {
            if let Event::Notice { notice, .. } = group.agent().next_event(TIMEOUT).unwrap() {
                assert_eq!(notice.tag, next);
                next += 1;
            }
        }
        group.close(TIMEOUT).unwrap();
    });
}

#[test]
fn nodes_of_several_machines_are_connected_when_the_group_has_joined_them() {
    let directories = [(); 3].map(|()| TestDirectory::new());
    let several = |rank: u32, options: GroupOptions| {
        let directory = &directories[rank as usize % 3].0;
        let options = options.directory(directory).insecure().fabric_use(FabricUse::Always);
        options.source(Ipv4Addr::LOCALHOST.into())
    };
    run_with(4, several, |mut group| {
        assert_eq!(group.machines(), 3);
        let node = group.node(NodeOptions::default(), TIMEOUT).unwrap();
        let topic = node.topic("field", &TopicSettings::default()).unwrap();
        let mut subscriber = topic.subscriber().unwrap();
        if group.rank() == 0 {
            let publisher = topic.publisher().unwrap();
            let subscribes = |row: &Row| matches!(row, Row::Sent { topic, .. } if topic == "field");
            let end = Instant::now() + TIMEOUT;
            while node.report().unwrap().iter().filter(|row| subscribes(row)).count() < 2 {
                assert!(Instant::now() < end, "{:?}", node.report());
                thread::sleep(Duration::from_millis(10));
            }
            publisher.wait_for_subscribers(group.local().size + 1, TIMEOUT).unwrap();
            publisher.push(b"step 1", TIMEOUT).unwrap();
        }
        assert_eq!(subscriber.pull(TIMEOUT).unwrap().to_vec().unwrap(), b"step 1");
        group.barrier(TIMEOUT).unwrap();
        drop((subscriber, topic, node));
        group.close(TIMEOUT).unwrap();
    });
    for directory in &directories {
        let left: Vec<_> = std::fs::read_dir(&directory.0).unwrap().collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

#[test]
fn job_on_one_machine_opens_a_fabric_only_on_request() {
    let fabrics = |mut group: Group| group.agent().card().fabrics.len();
    assert_eq!(run(2, fabrics), [0, 0]);
    let always = |_, options: GroupOptions| {
        options.fabric_use(FabricUse::Always).source(Ipv4Addr::LOCALHOST.into())
    };
    assert_eq!(run_with(2, always, fabrics), [1, 1]);
}

#[test]
fn options_of_the_agent_are_used() {
    let labelled = |_, options: GroupOptions| options.agent(AgentOptions::new("other"));
    let labels = run_with(2, labelled, |mut group| group.agent().card().label);
    assert_eq!(labels, ["test 0", "test 1"]);
}

#[test]
fn rings_connect_ranks_in_both_directions() {
    run(3, |mut group| {
        let (rank, size) = (group.rank(), group.size());
        let setup = RingSetup::new().capacity(1 << 20);
        let (next, last) = ((rank + 1) % size, (rank + size - 1) % size);
        // Rank 0 begins as writer, so that not all listen at the same time.
        let (mut writer, mut reader);
        if rank == 0 {
            writer = group.ring_to(next, &setup, TIMEOUT).unwrap();
            reader = group.ring_from(last, &setup, TIMEOUT).unwrap();
        } else {
            reader = group.ring_from(last, &setup, TIMEOUT).unwrap();
            writer = group.ring_to(next, &setup, TIMEOUT).unwrap();
        }
        writer.send(&[rank as u8; 1000], TIMEOUT).unwrap();
        assert_eq!(reader.receive(TIMEOUT).unwrap(), [last as u8; 1000]);
        group.barrier(TIMEOUT).unwrap();
    });
}

/// Opens a ring from rank 0 to rank 1, and returns its provider at this rank.
fn provider_of_ring(group: &mut Group) -> Result<String> {
    let setup = RingSetup::new();
    match group.rank() {
        0 => group.ring_to(1, &setup, TIMEOUT).map(|writer| writer.provider().to_owned()),
        _ => group.ring_from(0, &setup, TIMEOUT).map(|reader| reader.provider().to_owned()),
    }
}

#[test]
fn rings_within_a_machine_go_by_the_required_provider() {
    const LAYERED: &str = "tcp;ofi_rxm";
    let free = run(2, |mut group| provider_of_ring(&mut group).unwrap());
    assert!(!free.contains(&LAYERED.to_owned()), "{free:?}");
    let required =
        |_, options: GroupOptions| options.providers(format!("={LAYERED}").parse().unwrap());
    let found = run_with(2, required, |mut group| provider_of_ring(&mut group).unwrap());
    assert_eq!(found, [LAYERED, LAYERED]);
}

#[test]
fn required_provider_that_serves_no_ring_is_refused() {
    let absent = |_, options: GroupOptions| options.providers("=absent".parse().unwrap());
    let [writer, reader] =
        run_with(2, absent, |mut group| provider_of_ring(&mut group).unwrap_err())
            .try_into()
            .unwrap();
    assert_eq!((reader.kind(), reader.ranks()), (ErrorKind::Unavailable, &[0][..]), "{reader}");
    let text = reader.to_string();
    for part in ["rank 0 is on this machine", "policy requires absent", "FABRICAST_INSECURE=true"] {
        assert!(text.contains(part), "{text}");
    }
    assert_eq!((writer.kind(), writer.ranks()), (ErrorKind::RankFailed, &[1][..]), "{writer}");
    let insecure = |rank, options| absent(rank, options).insecure();
    let errors = run_with(2, insecure, |mut group| provider_of_ring(&mut group).unwrap_err());
    let text = errors[1].to_string();
    assert!(text.contains("or one that serves ") && !text.contains("INSECURE"), "{text}");
    assert_eq!(text.matches("policy requires absent").count(), 1, "{text}");
}

#[test]
fn writer_gets_the_error_of_a_reader_that_cannot_listen() {
    run(2, |mut group| {
        let setup = RingSetup::new().policy("=none".parse().unwrap());
        if group.rank() == 0 {
            let error = group.ring_to(1, &setup, TIMEOUT).unwrap_err();
            assert_eq!((error.kind(), error.ranks()), (ErrorKind::RankFailed, &[1][..]), "{error}");
            assert!(error.to_string().contains("rank 1: open ring from rank failed"), "{error}");
        } else {
            group.ring_from(0, &setup, TIMEOUT).unwrap_err();
        }
        group.barrier(TIMEOUT).unwrap();
    });
}

#[test]
fn reader_that_gave_up_may_try_again() {
    run(2, |mut group| {
        let setup = RingSetup::new();
        if group.rank() == 1 {
            group.ring_from(0, &setup, SHORT / 8).unwrap_err();
            group.barrier(TIMEOUT).unwrap();
            let mut reader = group.ring_from(0, &setup, TIMEOUT).unwrap();
            assert_eq!(reader.receive(TIMEOUT).unwrap(), b"again");
        } else {
            group.barrier(TIMEOUT).unwrap();
            group.ring_to(1, &setup, TIMEOUT).unwrap().send(b"again", TIMEOUT).unwrap();
        }
        group.barrier(TIMEOUT).unwrap();
    });
}

#[test]
fn ring_without_its_other_side_is_refused_in_time() {
    run(2, |mut group| {
        let setup = RingSetup::new();
        let error = group.ring_to(group.rank(), &setup, TIMEOUT).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        if group.rank() == 0 {
            let error = group.ring_to(1, &setup, SHORT / 4).unwrap_err();
            assert_eq!((error.kind(), error.ranks()), (ErrorKind::DeadlineExceeded, &[1][..]));
            let error = group.ring_from(1, &setup, SHORT / 4).unwrap_err();
            assert_eq!((error.kind(), error.ranks()), (ErrorKind::DeadlineExceeded, &[1][..]));
        }
        group.barrier(TIMEOUT).unwrap();
    });
}

#[test]
fn ranks_outside_the_group_are_refused() {
    run(2, |mut group| {
        for rank in [group.rank(), 2, u32::MAX] {
            let error = group.peer(rank, TIMEOUT).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        }
        let error = group.broadcast(2, b"", TIMEOUT).unwrap_err();
        let text = "broadcast to ranks failed: invalid argument: rank 2 does not exist: the group has \
                    2 ranks";
        assert_eq!(error.to_string(), text);
    });
}
