//! Processes that violate the protocol: other members are not affected.

use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ipc::{Channel, PidFd};
use pubsub::Row;
use testkit::children::ForkedChild;

use crate::support::{
    ChildProcess, TIMEOUT, TestDir, message, number_of, publish, settings, until,
};

fn connect(directory: &Path) -> Channel {
    Channel::connect(&directory.join("node.sock"), TIMEOUT).unwrap()
}

/// The answer of the service, empty if it closes the connection without one.
fn answer(channel: &Channel) -> Vec<u8> {
    channel.receive(TIMEOUT).map(|message| message.bytes).unwrap_or_default()
}

/// The first byte of every message on a node's socket.
const VERSION: u8 = 10;
/// The hello of a member without a label.
const HELLO: [u8; 3] = [VERSION, 0, 0];

/// Another member joins, publishes and reads.
#[track_caller]
fn check_node(test_dir: &TestDir) {
    let node = test_dir.join();
    let topic = node.topic("numbers", &settings()).unwrap();
    let mut subscriber = topic.subscriber().unwrap();
    topic.publisher().unwrap().push(&message(7), TIMEOUT).unwrap();
    assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), 7);
}

#[test]
fn malformed_first_messages_are_rejected() {
    let test_dir = TestDir::new();
    let _node = test_dir.join();
    let pidfd = PidFd::of_this_process().unwrap();
    let null: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
    let trailing = [&HELLO[..], b"trailing"].concat();
    let cases: [(&[u8], Vec<&OwnedFd>); 6] = [
        (b"", vec![]),
        (&[VERSION + 5, 0, 0], vec![]),
        (&[VERSION, 0xff, 0xff, 0xff, 0xff, 0xff], vec![]),
        (&HELLO, vec![]),
        (&HELLO, vec![&null]),
        (&trailing, vec![&null]),
    ];
    for (bytes, files) in cases {
        let channel = connect(test_dir.path());
        let files: Vec<_> = files.iter().map(|file| file.as_fd()).collect();
        channel.send(bytes, &files, TIMEOUT).unwrap();
        assert!(!answer(&channel).is_empty(), "{bytes:?}: no answer");
        assert!(channel.receive(TIMEOUT).is_err(), "{bytes:?}: the connection stays open");
    }
    // A member that sends a malformed message.
    let channel = connect(test_dir.path());
    channel.send(&HELLO, &[pidfd.as_fd()], TIMEOUT).unwrap();
    assert!(!channel.receive(TIMEOUT).unwrap().descriptors.is_empty(), "not admitted");
    channel.send(&[VERSION; 5000], &[], TIMEOUT).unwrap();
    while channel.receive(TIMEOUT).is_ok() {}
    check_node(&test_dir);
}

#[test]
fn member_with_a_foreign_pidfd_outlives_that_process() {
    let test_dir = TestDir::new();
    let _node = test_dir.join();
    let child = ForkedChild::new(|| std::thread::sleep(TIMEOUT));
    let channel = connect(test_dir.path());
    channel.send(&HELLO, &[child.pidfd().as_fd()], TIMEOUT).unwrap();
    // Refused where the kernel does not say which process a pidfd refers to; else a member.
    let is_member = !channel.receive(TIMEOUT).unwrap().descriptors.is_empty();
    child.kill();
    assert!(child.was_killed());
    if is_member {
        std::thread::sleep(Duration::from_millis(500));
        assert!(!channel.is_shut_down(), "disconnected when another process ended");
    }
    check_node(&test_dir);
}

#[test]
fn silent_connections_delay_no_member() {
    let test_dir = TestDir::new();
    let _node = test_dir.join();
    let connections: Vec<_> = (0..300).map(|_| connect(test_dir.path())).collect();
    check_node(&test_dir);
    drop(connections);
    check_node(&test_dir);
}

/// Sends a frame that [`Channel`] would not send.
#[allow(unsafe_code)]
fn send_raw(channel: &Channel, bytes: &[u8], files: &[RawFd]) {
    use nix::libc;
    // SAFETY: all bytes zero is a valid, empty message.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
    let length = size_of_val(files);
    // Words, since the kernel requires the alignment.
    let mut control = vec![0_u64; 2 + length.div_ceil(8)];
    if !files.is_empty() {
        message.msg_control = control.as_mut_ptr().cast();
        // SAFETY: the macros only compute; the header is in `control`, which has room for it and for
        // all descriptors.
        unsafe {
            message.msg_controllen = libc::CMSG_SPACE(length as u32) as usize;
            let head = libc::CMSG_FIRSTHDR(&raw const message);
            (*head).cmsg_level = libc::SOL_SOCKET;
            (*head).cmsg_type = libc::SCM_RIGHTS;
            (*head).cmsg_len = libc::CMSG_LEN(length as u32) as usize;
            std::ptr::copy_nonoverlapping(files.as_ptr().cast(), libc::CMSG_DATA(head), length);
        }
    }
    let socket = channel.as_fd().as_raw_fd();
    // SAFETY: the message and all it points to live until the call returns.
    let sent = unsafe { libc::sendmsg(socket, &raw const message, libc::MSG_NOSIGNAL) };
    assert_eq!(sent, bytes.len() as isize, "{}", std::io::Error::last_os_error());
}

/// Frames whose announced number of descriptors is wrong.
#[test]
fn malformed_frames_are_rejected() {
    let test_dir = TestDir::new();
    let _node = test_dir.join();
    let pidfd = PidFd::of_this_process().unwrap();
    let hello = |announced: u8| vec![announced, VERSION, 0, 0];
    let mut long = hello(1);
    long.resize(200 << 10, 0);
    // Empty; above the limit; other numbers than announced; truncated.
    let cases = [
        (vec![0], 0),
        (hello(100), 100),
        (hello(253), 253),
        (hello(1), 0),
        (hello(0), 1),
        (hello(3), 2),
        (long, 1),
    ];
    for (bytes, count) in cases {
        let channel = connect(test_dir.path());
        send_raw(&channel, &bytes, &vec![pidfd.as_fd().as_raw_fd(); count]);
        let length = bytes.len();
        let case = format!("{count} descriptors with {length} bytes");
        assert!(!answer(&channel).is_empty(), "{case}: no answer");
        assert!(channel.receive(TIMEOUT).is_err(), "{case}: the connection stays open");
    }
    check_node(&test_dir);
}

/// Hundreds of connections that are closed, silent, malformed or of another version, while messages
/// flow.
#[test]
fn flood_of_connections_delays_no_member() {
    const COUNT: u64 = 3000;
    let test_dir = TestDir::new();
    let service = ChildProcess::start("serves", test_dir.path());
    let node = test_dir.join_served();
    let topic = node.topic("numbers", &settings()).unwrap();
    let (publisher, mut subscriber) = (topic.publisher().unwrap(), topic.subscriber().unwrap());
    // Each call also checks that the service answers its member.
    let descriptors = || {
        assert!(matches!(node.report().unwrap().first(), Some(Row::Node { .. })));
        service.descriptors()
    };
    let pidfd = PidFd::of_this_process().unwrap();
    // The service process is a member, too.
    let is_member = |row: &Row| matches!(row, Row::Process { .. });
    until("two members", || {
        node.report().unwrap().iter().filter(|row| is_member(row)).count() == 2
    });
    let before = descriptors();
    let is_over = AtomicBool::new(false);
    let max = std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut channels = Vec::new();
                for number in (0_u32..).take_while(|_| !is_over.load(Ordering::Relaxed)) {
                    // The backlog of the socket may be full.
                    let path = test_dir.path().join("node.sock");
                    let short = Duration::from_millis(100);
                    let Ok(channel) = Channel::connect(&path, short) else { continue };
                    let old_version = [VERSION - 1, 0, 0];
                    let cases = [&b""[..], &[VERSION, 0xff, 0xff], &old_version, &HELLO];
                    let bytes: &[u8] = cases[number as usize / 2 % 4];
                    // A valid hello makes it a member until the channel is closed.
                    let count = if bytes == HELLO { 1 } else { number as usize % 5 };
                    let files = vec![pidfd.as_fd(); count];
                    if number % 2 == 0 {
                        let _ = channel.send(bytes, &files, short);
                    }
                    channels.push(channel);
                    if channels.len() > 60 {
                        channels.remove(number as usize % 60);
                    }
                }
            });
        }
        let reader = scope.spawn(|| {
            for expected in 0..COUNT {
                assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), expected);
            }
        });
        let mut max = 0;
        for round in 0..10 {
            publish(&publisher, round * COUNT / 10..(round + 1) * COUNT / 10);
            max = max.max(descriptors());
        }
        is_over.store(true, Ordering::Relaxed);
        reader.join().unwrap();
        max
    });
    // Pending clients, and members with a connection and a pidfd each.
    assert!(max < 700, "the service has {max} descriptors, before {before}");
    until("the service to close its descriptors", || descriptors() <= before);
    assert!(node.topic("others", &settings()).is_ok());
}

/// The service and the other members close the descriptors of members that left.
#[test]
fn disconnected_members_leave_no_descriptors() {
    let test_dir = TestDir::new();
    let serving = ChildProcess::start("reads numbers 2", test_dir.path());
    let node = test_dir.join_served();
    let bystander = ChildProcess::start("reads numbers 2", test_dir.path());
    let publisher = node.topic("numbers", &settings()).unwrap().publisher().unwrap();
    until("two readers", || publisher.subscribers() == 2);
    // After its first message a reader opens no more descriptors of its own.
    publisher.push(&message(0), TIMEOUT).unwrap();
    publisher.flush(TIMEOUT).unwrap();
    let members = || {
        let is_member = |row: &&Row| matches!(row, Row::Process { .. });
        node.report().unwrap().iter().filter(is_member).count()
    };
    until("three members", || members() == 3);
    let descriptors = || [&serving, &bystander].map(|other| other.descriptors());
    let before = descriptors();
    let pidfd = PidFd::of_this_process().unwrap();
    let clients: Vec<_> = (0..20)
        .map(|_| {
            let channel = connect(test_dir.path());
            channel.send(&HELLO, &[pidfd.as_fd()], TIMEOUT).unwrap();
            // The pidfds of all other members. Later ones are never read.
            assert!(!channel.receive(TIMEOUT).unwrap().descriptors.is_empty(), "not admitted");
            channel
        })
        .collect();
    assert_eq!(members(), 23);
    drop(clients);
    let is_as_before = || (0..2).all(|index| descriptors()[index] <= before[index]);
    until("their descriptors to be closed", is_as_before);
}

#[test]
fn client_that_never_reads_is_disconnected() {
    let test_dir = TestDir::new();
    let node = test_dir.join();
    let members = || {
        let is_member = |row: &&Row| matches!(row, Row::Process { .. });
        node.report().unwrap().iter().filter(is_member).count()
    };
    let before = members();
    let channel = connect(test_dir.path());
    let pidfd = PidFd::of_this_process().unwrap();
    channel.send(&HELLO, &[pidfd.as_fd()], TIMEOUT).unwrap();
    until("a new member", || members() == before + 1);
    // The client requests many reports and receives none.
    const REPORT: u8 = 12;
    let refused = (0..20_000_u32).find_map(|number| {
        let request = [VERSION, REPORT, (number % 100) as u8];
        channel.send(&request, &[], TIMEOUT).err()
    });
    assert!(refused.is_some(), "the service accepted all requests");
    until("the client to be removed", || members() == before);
    check_node(&test_dir);
}

#[test]
fn calls_in_a_forked_child_fail() {
    let test_dir = TestDir::new();
    let node = test_dir.join();
    let topic = node.topic("numbers", &settings()).unwrap();
    let mut subscriber = topic.subscriber().unwrap();
    let publisher = topic.publisher().unwrap();
    // This process has several threads, so the child does nothing but these calls.
    let child = ForkedChild::new(|| {
        let refused = [
            node.topic("other", &settings()).err().map(|error| error.kind()),
            publisher.push(&message(1), TIMEOUT).err().map(|error| error.kind()),
            subscriber.try_pull().err().map(|error| error.kind()),
        ];
        assert!(refused.iter().all(|kind| *kind == Some(pubsub::ErrorKind::Forked)));
    });
    assert!(child.wait().success(), "a call in the forked child did not fail");
    publisher.push(&message(2), TIMEOUT).unwrap();
    assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), 2);
}
