//! Handover between embedded and dedicated services of a node.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use pubsub::{ErrorKind, Node, NodeOptions, Row, ServiceMode};

use crate::support::{
    ChildProcess, TIMEOUT, TestDir, number_of, options, publish, settings, until,
};

/// The process of the service.
fn server(test_dir: &TestDir) -> Option<u32> {
    match pubsub::report(test_dir.path()).ok()?.first()? {
        Row::Node { process, .. } => Some(*process),
        _ => None,
    }
}

/// The process that holds the lock of a file in a node's directory.
fn holder(directory: &Path, name: &str) -> Option<u32> {
    let file = File::options().read(true).write(true).open(directory.join(name)).ok()?;
    let mut lock = libc::flock {
        l_type: libc::F_WRLCK as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    fcntl(file.as_fd(), FcntlArg::F_GETLK(&mut lock)).unwrap();
    (i32::from(lock.l_type) != libc::F_UNLCK).then_some(lock.l_pid as u32)
}

fn join(test_dir: &TestDir, service: ServiceMode) -> pubsub::Result<Node> {
    Node::join(NodeOptions { service, ..options(test_dir.path()) })
}

#[test]
fn embedded_service_hands_over_to_a_dedicated_one() {
    let test_dir = TestDir::new();
    let node = test_dir.join();
    let topic = node.topic("numbers", &settings()).unwrap();
    let mut subscriber = topic.subscriber().unwrap();
    publish(&topic.publisher().unwrap(), 0..5);
    assert!(node.serves());
    let mut dedicated = ChildProcess::start("serves-dedicated", test_dir.path());
    until("the dedicated service", || server(&test_dir) == Some(dedicated.id()));
    assert!(!node.serves());
    publish(&topic.publisher().unwrap(), 5..8);
    for expected in 0..8 {
        assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), expected);
    }
    // A new member joins the dedicated service.
    let other = test_dir.join();
    assert!(!other.serves() && other.open("numbers").is_ok());
    assert_eq!((server(&test_dir), other.identity()), (Some(dedicated.id()), node.identity()));
    // When the dedicated service ends, an embedded one takes over.
    dedicated.end();
    until("another service", || node.serves() || other.serves());
}

#[test]
fn embedded_service_hands_over_within_one_process() {
    let test_dir = TestDir::new();
    let embedded = test_dir.join();
    let dedicated = join(&test_dir, ServiceMode::Dedicated).unwrap();
    until("the dedicated service", || dedicated.serves() && !embedded.serves());
    let topic = embedded.topic("numbers", &settings()).unwrap();
    let mut subscriber = topic.subscriber().unwrap();
    publish(&dedicated.open("numbers").unwrap().publisher().unwrap(), 0..3);
    for expected in 0..3 {
        assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), expected);
    }
    assert!(subscriber.try_pull().unwrap().is_none());
    drop(dedicated);
    until("another service", || embedded.serves());
}

#[test]
fn dedicated_service_is_not_replaced_while_it_lives() {
    let test_dir = TestDir::new();
    let mut dedicated = ChildProcess::start("serves-dedicated", test_dir.path());
    until("the dedicated service", || server(&test_dir) == Some(dedicated.id()));
    let error = join(&test_dir, ServiceMode::Dedicated).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyServed);
    assert!(
        error.detail().contains(&format!("process {} already serves", dedicated.id())),
        "{error}"
    );
    let embedded = test_dir.join();
    std::thread::sleep(Duration::from_millis(1500));
    assert_eq!(server(&test_dir), Some(dedicated.id()));
    assert!(!embedded.serves());
    dedicated.kill();
    until("an embedded service", || embedded.serves());
    // The next dedicated service takes over from the embedded one.
    let next = join(&test_dir, ServiceMode::Dedicated).unwrap();
    until("the next dedicated service", || next.serves() && !embedded.serves());
}

#[test]
fn stopped_service_is_named_in_errors() {
    let test_dir = TestDir::new();
    let dedicated = ChildProcess::start("serves-dedicated", test_dir.path());
    until("the dedicated service", || server(&test_dir) == Some(dedicated.id()));
    dedicated.stop();
    let named = format!("process {} ", dedicated.id());
    let error = pubsub::report(test_dir.path()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    assert!(error.detail().starts_with(&named), "{error}");
    let error = join(&test_dir, ServiceMode::Dedicated).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyServed);
    assert!(error.detail().starts_with(&named), "{error}");
    let service_timeout = Duration::from_millis(200);
    let embedded = NodeOptions { service_timeout, ..options(test_dir.path()) };
    let error = Node::join(embedded).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    assert!(error.detail().starts_with(&named), "{error}");
    dedicated.resume();
    until("an answer of the service", || server(&test_dir) == Some(dedicated.id()));
}

#[test]
fn leaving_a_stopped_service_is_quick_and_reclaimed_later() {
    let test_dir = TestDir::new();
    let dedicated = ChildProcess::start("serves-dedicated", test_dir.path());
    until("the dedicated service", || server(&test_dir) == Some(dedicated.id()));
    let node = test_dir.join();
    let publisher = node.topic("numbers", &settings()).unwrap().publisher().unwrap();
    publish(&publisher, 0..1);
    dedicated.stop();
    let begin = Instant::now();
    drop((publisher, node));
    assert!(begin.elapsed() < Duration::from_secs(3), "leaving took {:?}", begin.elapsed());
    dedicated.resume();
    until("the topic to be removed", || {
        let rows = pubsub::report(test_dir.path()).unwrap_or_default();
        !rows.is_empty() && !rows.iter().any(|row| matches!(row, Row::Topic { .. }))
    });
}

/// Messages flow between two processes during repeated handovers to dedicated services, each of
/// which ends or is killed.
fn messages_flow_during_handovers(end: fn(&mut ChildProcess)) {
    const COUNT: u64 = 20_000;
    const TIMES: u64 = 6;
    let test_dir = TestDir::new();
    // Any of the three embedded processes may become the service.
    let _serving = ChildProcess::start("serves", test_dir.path());
    let node = test_dir.join();
    let topic = node.topic("numbers", &settings()).unwrap();
    let mut subscriber = topic.subscriber().unwrap();
    let mut publisher = ChildProcess::start(&format!("publishes numbers {COUNT}"), test_dir.path());
    for round in 0..TIMES {
        let mut dedicated = ChildProcess::start("serves-dedicated", test_dir.path());
        let numbers = round * COUNT / TIMES..(round + 1) * COUNT / TIMES;
        let half = (numbers.start + numbers.end) / 2;
        for expected in numbers {
            assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), expected);
            if expected == half {
                until("the dedicated service", || server(&test_dir) == Some(dedicated.id()));
                end(&mut dedicated);
            }
        }
    }
    publisher.finish();
    assert!(subscriber.try_pull().unwrap().is_none(), "a message was delivered twice");
}

#[test]
fn handover_to_a_dedicated_service_and_back_loses_nothing() {
    messages_flow_during_handovers(ChildProcess::end);
}

#[test]
fn takeover_from_a_killed_dedicated_service_loses_nothing() {
    messages_flow_during_handovers(ChildProcess::kill);
}

/// The least progress of a handover.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Step {
    PriorityLocked,
    LeaderUnlocked,
    LeaderLocked,
}

/// Runs a process that holds the priority lock in short steps, and stops it when no process holds
/// the leader lock. False if the process itself holds the leader lock already.
fn stop_without_leader(test_dir: &TestDir, successor: &ChildProcess) -> bool {
    let end = Instant::now() + TIMEOUT;
    loop {
        successor.stop();
        // The embedded service has time to release the leader lock.
        std::thread::sleep(Duration::from_millis(5));
        match holder(test_dir.path(), "node.lock") {
            None => return true,
            Some(process) if process == successor.id() => return false,
            Some(_) => successor.resume(),
        }
        assert!(Instant::now() < end, "timeout: the leader lock is not released");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Kills the service or its successor at three steps of the handover, or a little later.
#[test]
fn process_killed_during_a_handover_loses_no_message() {
    let test_dir = TestDir::new();
    let mut serving = ChildProcess::start("serves", test_dir.path());
    let node = test_dir.join_served();
    let topic = node.topic("numbers", &settings()).unwrap();
    let mut subscriber = topic.subscriber().unwrap();
    let _publisher = ChildProcess::start("publishes-forever numbers", test_dir.path());
    let mut expected = 0;
    let mut read_some = || {
        for _ in 0..20 {
            assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), expected);
            expected += 1;
        }
    };
    let later = [0, 300, 2000].map(Duration::from_micros);
    let mut times_without_leader = 0;
    for step in [Step::PriorityLocked, Step::LeaderUnlocked, Step::LeaderLocked] {
        for (kills_successor, later) in later.into_iter().flat_map(|it| [(true, it), (false, it)]) {
            read_some();
            let mut dedicated = ChildProcess::start("serves-dedicated", test_dir.path());
            let (successor, end) = (Some(dedicated.id()), Instant::now() + TIMEOUT);
            let lock = match step {
                Step::PriorityLocked | Step::LeaderUnlocked => "node.priority",
                Step::LeaderLocked => "node.lock",
            };
            while holder(test_dir.path(), lock) != successor {
                assert!(Instant::now() < end, "timeout: waited for {step:?}");
            }
            if step == Step::LeaderUnlocked {
                let is_without_leader = stop_without_leader(&test_dir, &dedicated);
                times_without_leader += u32::from(is_without_leader);
            }
            std::thread::sleep(later);
            let victim = if kills_successor { &mut dedicated } else { &mut serving };
            victim.kill();
            if !kills_successor {
                dedicated.resume();
            }
            read_some();
            if !kills_successor {
                until("the dedicated service", || server(&test_dir) == Some(dedicated.id()));
                serving = ChildProcess::start("serves", test_dir.path());
                until("four members", || {
                    let rows = node.report().unwrap();
                    rows.iter().filter(|row| matches!(row, Row::Process { .. })).count() == 4
                });
                dedicated.kill();
            }
            until("the embedded service", || server(&test_dir) == Some(serving.id()));
            let name = format!("after {step:?} {kills_successor} {later:?}");
            node.topic(&name, &settings()).unwrap();
        }
    }
    assert!(times_without_leader > 0, "some process held the leader lock at all times");
}
