use std::os::fd::AsFd;
use std::path::PathBuf;

use ipc::ChannelListener;

use super::super::link::send_request;
use super::*;
use crate::Node;
use crate::service::election::{self, MemberLock};
use crate::service::protocol::Request;

const TEST_TIMEOUT: Duration = Duration::from_secs(60);

fn directory(name: &str) -> PathBuf {
    let name = format!("fabricast-connector-{name}-{}", std::process::id());
    let directory = std::env::temp_dir().join(name);
    election::prepare("test", &directory).unwrap();
    directory
}

fn options(directory: &Path, service: ServiceMode, service_timeout: Duration) -> NodeOptions {
    NodeOptions {
        directory: directory.to_owned(),
        service,
        service_timeout,
        ..NodeOptions::default()
    }
}

#[track_caller]
fn until(what: &str, is_so: impl Fn() -> bool) {
    let end = Instant::now() + TEST_TIMEOUT;
    while !is_so() {
        assert!(Instant::now() < end, "waited for {what}");
        std::thread::sleep(PAUSE);
    }
}

#[test]
fn failed_service_start_releases_priority_for_a_while() {
    let directory = directory("begin");
    let options = options(&directory, ServiceMode::Dedicated, TEST_TIMEOUT);
    let own = LocalService::default();
    assert!(own.acquire_priority("test", &options).unwrap());
    // A directory blocks the path of its socket.
    let path = socket_path(&directory);
    std::fs::create_dir(&path).unwrap();
    let since = Instant::now();
    own.try_serve("test", &options, since).unwrap_err();
    assert_eq!(PriorityLock::holder("test", &directory).unwrap(), None);
    assert!(!own.has_priority.load(Ordering::Acquire));
    until("the priority lock", || own.acquire_priority("test", &options).unwrap());
    assert!(since.elapsed() >= CANDIDACY_BACKOFF.first());
    std::fs::remove_dir(&path).unwrap();
    own.try_serve("test", &options, since).unwrap();
    assert!(own.is_running() && own.has_priority.load(Ordering::Acquire));
    own.end();
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn failed_service_releases_its_priority() {
    let directory = directory("go-on");
    let options = options(&directory, ServiceMode::Dedicated, TEST_TIMEOUT);
    // A member of a node whose segment no process returns.
    let member = MemberLock::hold("test", &directory).unwrap();
    let own = LocalService::default();
    own.try_serve("test", &options, Instant::now()).unwrap();
    assert!(own.acquire_priority("test", &options).unwrap());
    let members = directory.join("node.members");
    std::fs::remove_file(&members).unwrap();
    std::fs::create_dir(&members).unwrap();
    until("its end", || !own.is_running());
    assert_eq!(PriorityLock::holder("test", &directory).unwrap(), None);
    drop(member);
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn priority_without_service_delays_others_only_for_a_grace() {
    let directory = directory("bounded");
    let priority_lock = PriorityLock::take("test", &directory).unwrap().unwrap();
    let service_timeout = Duration::from_millis(200);
    let external = options(&directory, ServiceMode::External, service_timeout);
    let error = Node::join(external).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    let named = format!("process {} has priority", std::process::id());
    assert!(error.detail().contains(&named), "{error}");
    let service_timeout = Duration::from_secs(4);
    let node = Node::join(options(&directory, ServiceMode::Embedded, service_timeout)).unwrap();
    assert!(node.serves());
    drop((node, priority_lock));
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn silent_leader_keeps_its_lock_until_it_ends() {
    let directory = directory("vacant");
    let priority_lock = PriorityLock::take("test", &directory).unwrap().unwrap();
    // It holds the leader lock, and does not answer.
    let leader_lock = LeaderLock::take("test", &directory).unwrap().unwrap();
    let listener = ChannelListener::bind(&socket_path(&directory)).unwrap();
    let options = options(&directory, ServiceMode::Embedded, Duration::from_secs(2));
    let own = LocalService::default();
    let end = Instant::now() + TEST_TIMEOUT;
    std::thread::scope(|scope| {
        let joining = scope.spawn(|| {
            let (end, serves) = (|| end, || true);
            let connector = ServiceConnector::new("test", &options, &own, &end, &serves);
            let hello = Request::Hello { label: "test".into() };
            let pidfd = PidFd::of_this_process().unwrap();
            let greet = |channel: &Channel| send_request("test", channel, &hello, &[pidfd.as_fd()]);
            matches!(connector.handshake(greet), Ok((_, Ok(_))))
        });
        std::thread::sleep(priority_grace(&options) * 3 / 2);
        let since = Instant::now();
        drop((listener, leader_lock));
        until("the joining process to serve", || own.is_running());
        assert!(since.elapsed() >= priority_grace(&options));
        assert!(joining.join().unwrap());
    });
    own.end();
    drop(priority_lock);
    std::fs::remove_dir_all(directory).unwrap();
}
