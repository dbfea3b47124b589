use std::path::PathBuf;
use std::sync::Arc;

use crate::wake::WakeFd;
use ipc::ChannelListener;

use super::super::connector::LocalService;
use super::super::membership::Answer;
use super::*;
use crate::ids::NodeId;
use crate::node_options::NodeOptions;
use crate::node_segment::NodeSegment;
use crate::pool::{Direction, Pool, PoolId};
use crate::service::election::{self, MemberLock, socket_path};
use crate::service::protocol::Refusal;
use crate::settings::SharedSettings;
use crate::topic::Topic;

const TEST_TIMEOUT: Duration = Duration::from_secs(60);

fn directory(name: &str) -> PathBuf {
    let name = format!("fabricast-link-{name}-{}", std::process::id());
    let directory = std::env::temp_dir().join(name);
    election::prepare("test", &directory).unwrap();
    directory
}

fn member(directory: &std::path::Path) -> MembershipState {
    let node_segment = NodeSegment::create(NodeId([3; 16])).unwrap();
    let me = node_segment.participants().admit(PidFd::of_this_process().unwrap()).unwrap();
    node_segment.mark_member(me);
    let options = NodeOptions {
        directory: directory.to_owned(),
        service: ServiceMode::External,
        service_timeout: TEST_TIMEOUT,
        ..NodeOptions::default()
    };
    let bell = WakeFd::new().unwrap();
    let member_lock = MemberLock::hold("test", directory).unwrap();
    MembershipState::new(options, node_segment, me, bell, LocalService::default(), member_lock)
}

/// Accepts a rejoining process, and answers.
fn answer(listener: &ChannelListener, notice: &Notice, files: &[BorrowedFd<'_>]) -> Channel {
    let channel = listener.accept(TEST_TIMEOUT).unwrap();
    channel.receive(TEST_TIMEOUT).unwrap();
    channel.send(&protocol::encode(notice), files, TEST_TIMEOUT).unwrap();
    channel
}

#[test]
fn temporary_rejection_does_not_end_a_membership() {
    let directory = directory("again");
    let listener = ChannelListener::bind(&socket_path(&directory)).unwrap();
    let shared = member(&directory);
    std::thread::scope(|scope| {
        let back = scope.spawn(|| rejoin(&shared).map(|link| link.is_some()));
        for kind in [ErrorKind::TooMany, ErrorKind::Failed] {
            let reason = Refusal::new(kind, "not now");
            answer(&listener, &Notice::Rejected { reason }, &[]);
        }
        let participant = shared.me.number();
        let welcome = Notice::Welcome { participant };
        let pidfd = PidFd::of_this_process().unwrap();
        let channel = answer(&listener, &welcome, &[shared.node_segment.as_fd(), pidfd.as_fd()]);
        while protocol::decode::<Request>("test", &channel.receive(TEST_TIMEOUT).unwrap().bytes)
            .unwrap()
            != Request::RejoinDone
        {}
        assert!(back.join().unwrap().unwrap());

        let back = scope.spawn(|| rejoin(&shared).map(|link| link.is_some()));
        let reason = Refusal::new(ErrorKind::Closed, "another node");
        answer(&listener, &Notice::Rejected { reason }, &[]);
        assert_eq!(back.join().unwrap().unwrap_err().kind(), ErrorKind::Closed);
    });
    drop(listener);
    std::fs::remove_dir_all(directory).unwrap();
}

/// The last two members of a node may leave at once, one of them its service.
#[test]
fn leaving_while_rejoining_ends_with_the_last_other_member() {
    let directory = directory("company");
    let shared = member(&directory);
    let participants = shared.participants();
    let other = participants.admit(PidFd::of_this_process().unwrap()).unwrap();
    shared.node_segment.mark_member(other);
    std::thread::scope(|scope| {
        let back = scope.spawn(|| rejoin(&shared).map(|link| link.is_some()));
        let moment = Duration::from_millis(100);
        std::thread::sleep(moment);
        shared.begin_leave();
        // The other member might still serve.
        std::thread::sleep(moment);
        assert!(!back.is_finished());
        assert!(participants.free_slot(other));
        assert!(!back.join().unwrap().unwrap(), "it waited until the deadline");
    });
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn topic_without_its_pools_is_closed() {
    let directory = directory("unused");
    let shared = member(&directory);
    let settings = SharedSettings::of(&crate::TopicSettings::default()).unwrap();
    let topic = Topic::create(5, "it", &settings).unwrap();
    // Its pools were not sent.
    for _ in 0..2 {
        shared.on_topic(1, 5, topic.segment().try_clone_to_owned().unwrap());
        let sent: Vec<_> = shared.requests().into_iter().collect();
        assert_eq!(sent, [Request::CloseTopic { number: 5, granted: 1 }]);
    }
    std::fs::remove_dir_all(directory).unwrap();
}

#[derive(Debug)]
struct RingForwarder(std::sync::mpsc::Sender<()>);

impl ipc::DoorbellListener for RingForwarder {
    fn rung(&self) {
        let _ = self.0.send(());
    }
    fn check(&self) {}
}

#[test]
fn closing_the_node_wakes_waiting_threads() {
    let directory = directory("closed");
    let shared = member(&directory);
    let settings = SharedSettings::of(&crate::TopicSettings::default()).unwrap();
    let topic = Topic::create(5, "it", &settings).unwrap();
    for direction in Direction::BOTH {
        let id = PoolId { place: settings.place, direction };
        let pool = Pool::create(id, 1 << 20, 256).unwrap();
        shared.on_pool(id, pool.control_segment().try_clone_to_owned().unwrap());
    }
    std::thread::scope(|scope| {
        let answer = scope.spawn(|| {
            let open = |request| Request::Open { request, name: "it".into(), settings: None };
            shared.call("test", TEST_TIMEOUT, open).is_ok()
        });
        let request = loop {
            if let Some(Request::Open { request, .. }) = shared.requests().pop_front() {
                break request;
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        shared.on_topic(request, 5, topic.segment().try_clone_to_owned().unwrap());
        assert!(answer.join().unwrap());
    });
    let (sender, receiver) = std::sync::mpsc::channel();
    let (watch, bell) = (ipc::DoorbellWatcher::new(), topic.local().message_doorbell());
    let listening = watch.listen(bell.clone(), Arc::new(RingForwarder(sender))).unwrap();
    bell.announce_waiter();
    shared.close(&Error::new("test", ErrorKind::Closed, "its service is lost"));
    receiver.recv_timeout(TEST_TIMEOUT).unwrap();
    drop(listening);
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn blocked_topics_are_reported_periodically() {
    let directory = directory("waits");
    let shared = Arc::new(member(&directory));
    let settings = SharedSettings::of(&crate::TopicSettings::default()).unwrap();
    for direction in Direction::BOTH {
        let id = PoolId { place: settings.place, direction };
        let pool = Pool::create(id, 1 << 20, 64).unwrap();
        shared.on_pool(id, pool.control_segment().try_clone_to_owned().unwrap());
    }
    let made = Topic::create(5, "it", &settings).unwrap();
    let report_request = |number| Request::Report { request: number };
    let topic = std::thread::scope(|scope| {
        let answer = scope.spawn(|| shared.call("open topic", TEST_TIMEOUT, report_request));
        while shared.requests().is_empty() {
            std::thread::yield_now();
        }
        shared.on_topic(1, 5, made.segment().try_clone_to_owned().unwrap());
        match answer.join().unwrap().unwrap() {
            Answer::Topic { topic, .. } => topic,
            _ => panic!("unexpected answer"),
        }
    });
    let publisher = topic.publisher(topic.claim(shared.me).unwrap());
    let report = |now| {
        let next = shared.report_blocked_topics(now, BLOCKED_REPORT_INTERVAL);
        (next, shared.requests().into_iter().collect::<Vec<_>>())
    };
    let publisher_blocked = || vec![Request::PublisherBlocked { number: 5 }];
    let start = Instant::now();
    assert_eq!(report(start), (None, vec![]));
    publisher.backpressure().begin();
    assert!(topic.mark_blocked() && !topic.mark_blocked());
    shared.publisher_blocked(5);
    assert_eq!(report(start).1, publisher_blocked());
    let start = Instant::now();
    assert_eq!(
        report(start + BLOCKED_REPORT_INTERVAL),
        (Some(BLOCKED_REPORT_INTERVAL), publisher_blocked())
    );
    assert_eq!(
        report(start + 3 * BLOCKED_REPORT_INTERVAL / 2),
        (Some(BLOCKED_REPORT_INTERVAL / 2), vec![])
    );
    // The next service does not know it, and the last request to the old one is lost.
    shared.handover_requests().unwrap();
    assert_eq!(
        report(start + 3 * BLOCKED_REPORT_INTERVAL / 2),
        (Some(BLOCKED_REPORT_INTERVAL), publisher_blocked())
    );
    publisher.backpressure().end(true);
    assert_eq!(report(start + 3 * BLOCKED_REPORT_INTERVAL), (None, vec![]));
    // A new wait is reported again.
    publisher.backpressure().begin();
    assert!(topic.mark_blocked());
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn last_member_leaves_without_waiting() {
    let directory = directory("alone");
    let shared = member(&directory);
    shared.begin_leave();
    assert!(rejoin(&shared).unwrap().is_none());
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn process_without_descriptors_rejoins_with_growing_pauses() {
    let start = Instant::now();
    let (mut descriptor_backoff, mut now, mut times) = (DescriptorBackoff::new(start), start, 0);
    while now < start + Duration::from_secs(60) {
        // Each connection ends at once.
        now += descriptor_backoff.next(now);
        times += 1;
    }
    assert!((15..=20).contains(&times), "{times}");
    // The connection lasted for a while.
    now += 3 * MAX_DESCRIPTOR_BACKOFF;
    assert_eq!(descriptor_backoff.next(now), RETRY_PAUSE);
}

#[test]
fn call_ends_at_its_timeout() {
    let directory = directory("timeout");
    let shared = member(&directory);
    let start = Instant::now();
    let report_request = |number| Request::Report { request: number };
    let answer = shared.call("test", Duration::from_millis(100), report_request);
    assert_eq!(answer.map(drop).unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    assert!(start.elapsed() < shared.options.service_timeout / 2, "{:?}", start.elapsed());
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn dead_service_is_left_although_its_connections_stay() {
    let directory = directory("zombie");
    let shared = member(&directory);
    let (channel, _there) = Channel::pair().unwrap();
    let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
    let service = pidfd_of(&child);
    let link = Link { channel, service };
    shared.bell.ring();
    assert!(matches!(run_once(&shared, &link, &mut SentRequests::default()), Next::Continue));
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(matches!(run_once(&shared, &link, &mut SentRequests::default()), Next::Lost));
    std::fs::remove_dir_all(directory).unwrap();
}

#[allow(unsafe_code)]
fn pidfd_of(child: &std::process::Child) -> PidFd {
    use std::os::fd::FromRawFd;
    // SAFETY: no pointers; the child is not reaped, so its number is not reused.
    let file = unsafe { libc::syscall(libc::SYS_pidfd_open, child.id(), 0) };
    assert!(file >= 0);
    // SAFETY: just opened, and owned by this function alone.
    PidFd::from_fd(unsafe { OwnedFd::from_raw_fd(file as i32) }).unwrap()
}
