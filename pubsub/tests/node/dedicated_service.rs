//! Processes that are there to serve a node, and those that serve it in passing.

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

/// The process that serves.
fn server(test_dir: &TestDir) -> Option<u32> {
    match pubsub::report(test_dir.path()).ok()?.first()? {
        Row::Node { process, .. } => Some(*process),
        _ => None,
    }
}

/// The process that has the lock of a file in a node's directory.
fn holder(directory: &Path, name: &str) -> Option<u32> {
    let file = File::options().read(true).write(true).open(directory.join(name)).ok()?;
    let mut found = libc::flock {
        l_type: libc::F_WRLCK as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    fcntl(file.as_fd(), FcntlArg::F_GETLK(&mut found)).unwrap();
    (i32::from(found.l_type) != libc::F_UNLCK).then_some(found.l_pid as u32)
}

fn join(test_dir: &TestDir, service: ServiceMode) -> pubsub::Result<Node> {
    Node::join(NodeOptions { service, ..options(test_dir.path()) })
}

#[test]
fn who_serves_in_passing_gives_way_to_one_that_is_there_for_it() {
    let test_dir = TestDir::new();
    let node = test_dir.join();
    let topic = node.topic("numbers", &settings()).unwrap();
    let mut subscriber = topic.subscriber().unwrap();
    publish(&topic.publisher().unwrap(), 0..5);
    assert!(node.serves());
    let mut standing = ChildProcess::start("stands", test_dir.path());
    until("it to serve", || server(&test_dir) == Some(standing.id()));
    assert!(!node.serves());
    publish(&topic.publisher().unwrap(), 5..8);
    for expected in 0..8 {
        assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), expected);
    }
    // Whoever comes now comes to it.
    let other = test_dir.join();
    assert!(!other.serves() && other.open("numbers").is_ok());
    assert_eq!((server(&test_dir), other.identity()), (Some(standing.id()), node.identity()));
    // And it is served in passing again when it has ended.
    standing.end();
    until("another service", || node.serves() || other.serves());
}

#[test]
fn it_gives_way_within_one_process_too() {
    let test_dir = TestDir::new();
    let passing = test_dir.join();
    let standing = join(&test_dir, ServiceMode::Dedicated).unwrap();
    until("it to serve", || standing.serves() && !passing.serves());
    let topic = passing.topic("numbers", &settings()).unwrap();
    let mut subscriber = topic.subscriber().unwrap();
    publish(&standing.open("numbers").unwrap().publisher().unwrap(), 0..3);
    for expected in 0..3 {
        assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), expected);
    }
    assert!(subscriber.try_pull().unwrap().is_none());
    drop(standing);
    until("another service", || passing.serves());
}

#[test]
fn nobody_takes_it_from_one_that_is_there_for_it() {
    let test_dir = TestDir::new();
    let mut standing = ChildProcess::start("stands", test_dir.path());
    until("it to serve", || server(&test_dir) == Some(standing.id()));
    let error = join(&test_dir, ServiceMode::Dedicated).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyServed);
    assert!(
        error.detail().contains(&format!("process {} already serves", standing.id())),
        "{error}"
    );
    let passing = test_dir.join();
    std::thread::sleep(Duration::from_millis(1500));
    assert_eq!(server(&test_dir), Some(standing.id()));
    assert!(!passing.serves());
    standing.kill();
    until("one that serves in passing", || passing.serves());
    // The next one takes it, as the first did.
    let next = join(&test_dir, ServiceMode::Dedicated).unwrap();
    until("its successor", || next.serves() && !passing.serves());
}

#[test]
fn stopped_service_is_named_to_who_asks_and_who_joins() {
    let test_dir = TestDir::new();
    let standing = ChildProcess::start("stands", test_dir.path());
    until("it to serve", || server(&test_dir) == Some(standing.id()));
    standing.stop();
    let named = format!("process {} ", standing.id());
    let error = pubsub::report(test_dir.path()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    assert!(error.detail().starts_with(&named), "{error}");
    let error = join(&test_dir, ServiceMode::Dedicated).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyServed);
    assert!(error.detail().starts_with(&named), "{error}");
    let service_timeout = Duration::from_millis(200);
    let passing = NodeOptions { service_timeout, ..options(test_dir.path()) };
    let error = Node::join(passing).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    assert!(error.detail().starts_with(&named), "{error}");
    standing.resume();
    until("it to answer", || server(&test_dir) == Some(standing.id()));
}

#[test]
fn process_leaves_a_stopped_service_soon_and_is_seen_to_later() {
    let test_dir = TestDir::new();
    let standing = ChildProcess::start("stands", test_dir.path());
    until("it to serve", || server(&test_dir) == Some(standing.id()));
    let node = test_dir.join();
    let publisher = node.topic("numbers", &settings()).unwrap().publisher().unwrap();
    publish(&publisher, 0..1);
    standing.stop();
    let begin = Instant::now();
    drop((publisher, node));
    assert!(begin.elapsed() < Duration::from_secs(3), "it took {:?}", begin.elapsed());
    standing.resume();
    until("what it left to be gone", || {
        let rows = pubsub::report(test_dir.path()).unwrap_or_default();
        !rows.is_empty() && !rows.iter().any(|row| matches!(row, Row::Topic { .. }))
    });
}

/// Numbers go from one process to another while the node is handed over, again and again, and
/// those that it is handed to end or are killed.
fn numbers_flow_while_it_is_handed_over(end: fn(&mut ChildProcess)) {
    const COUNT: u64 = 20_000;
    const TIMES: u64 = 6;
    let test_dir = TestDir::new();
    // It serves in passing; and so may this one, and the publisher.
    let _serving = ChildProcess::start("serves", test_dir.path());
    let node = test_dir.join();
    let topic = node.topic("numbers", &settings()).unwrap();
    let mut subscriber = topic.subscriber().unwrap();
    let mut publisher = ChildProcess::start(&format!("publishes numbers {COUNT}"), test_dir.path());
    for round in 0..TIMES {
        let mut standing = ChildProcess::start("stands", test_dir.path());
        let numbers = round * COUNT / TIMES..(round + 1) * COUNT / TIMES;
        let half = (numbers.start + numbers.end) / 2;
        for expected in numbers {
            assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), expected);
            if expected == half {
                until("it to serve", || server(&test_dir) == Some(standing.id()));
                end(&mut standing);
            }
        }
    }
    publisher.finish();
    assert!(subscriber.try_pull().unwrap().is_none(), "one came twice");
}

#[test]
fn nothing_is_lost_when_it_is_handed_over_and_back() {
    numbers_flow_while_it_is_handed_over(ChildProcess::end);
}

#[test]
fn nothing_is_lost_when_it_is_handed_over_and_taken_from_the_dead() {
    numbers_flow_while_it_is_handed_over(ChildProcess::kill);
}

/// How far a hand-over has come, at least.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Step {
    Claimed,
    Vacant,
    Taken,
}

/// Lets one that has the claim go on a little at a time until the office is vacant, and holds it
/// there. False if it has the office already.
fn hold_while_vacant(test_dir: &TestDir, heir: &ChildProcess) -> bool {
    let end = Instant::now() + TIMEOUT;
    loop {
        heir.stop();
        // Who serves has time to give way.
        std::thread::sleep(Duration::from_millis(5));
        match holder(test_dir.path(), "node.lock") {
            None => return true,
            Some(process) if process == heir.id() => return false,
            Some(_) => heir.resume(),
        }
        assert!(Instant::now() < end, "the office is not given to it");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Kills who serves, or who is to serve, at three steps of the hand-over and a little later.
#[test]
fn nothing_is_lost_whoever_dies_while_it_is_handed_over() {
    let test_dir = TestDir::new();
    let mut serving = ChildProcess::start("serves", test_dir.path());
    let node = test_dir.join_served();
    let topic = node.topic("numbers", &settings()).unwrap();
    let mut subscriber = topic.subscriber().unwrap();
    let _publisher = ChildProcess::start("publishes-for-ever numbers", test_dir.path());
    let mut expected = 0;
    let mut read_some = || {
        for _ in 0..20 {
            assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), expected);
            expected += 1;
        }
    };
    let later = [0, 300, 2000].map(Duration::from_micros);
    let mut vacancies = 0;
    for step in [Step::Claimed, Step::Vacant, Step::Taken] {
        for (kills_heir, later) in later.into_iter().flat_map(|it| [(true, it), (false, it)]) {
            read_some();
            let mut standing = ChildProcess::start("stands", test_dir.path());
            let (heir, end) = (Some(standing.id()), Instant::now() + TIMEOUT);
            loop {
                let office = holder(test_dir.path(), "node.lock");
                let is_so = match step {
                    Step::Claimed | Step::Vacant => {
                        holder(test_dir.path(), "node.priority") == heir
                    }
                    Step::Taken => office == heir,
                };
                if is_so {
                    break;
                }
                assert!(Instant::now() < end, "waited for {step:?}");
            }
            if step == Step::Vacant {
                vacancies += u32::from(hold_while_vacant(&test_dir, &standing));
            }
            std::thread::sleep(later);
            let dies = if kills_heir { &mut standing } else { &mut serving };
            dies.kill();
            if !kills_heir {
                standing.resume();
            }
            read_some();
            if !kills_heir {
                until("it to serve", || server(&test_dir) == Some(standing.id()));
                serving = ChildProcess::start("serves", test_dir.path());
                until("a member", || {
                    let rows = node.report().unwrap();
                    rows.iter().filter(|row| matches!(row, Row::Process { .. })).count() == 4
                });
                standing.kill();
            }
            until("the other to serve", || server(&test_dir) == Some(serving.id()));
            let name = format!("after {step:?} {kills_heir} {later:?}");
            node.topic(&name, &settings()).unwrap();
        }
    }
    assert!(vacancies > 0, "the office was never seen to be vacant");
}
