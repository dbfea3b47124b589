//! Those that do not keep to the rules: nobody else notices.

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

/// What the service says before it ends the connection, if anything.
fn answer(channel: &Channel) -> Vec<u8> {
    channel.receive(TIMEOUT).map(|message| message.bytes).unwrap_or_default()
}

/// What is said at a node's socket begins with it.
const VERSION: u8 = 8;
/// Of one without a label.
const HELLO: [u8; 3] = [VERSION, 0, 0];

/// Messages still flow.
#[track_caller]
fn is_well(test_dir: &TestDir) {
    let node = test_dir.join();
    let topic = node.topic("numbers", &settings()).unwrap();
    let mut subscriber = topic.subscriber().unwrap();
    topic.publisher().unwrap().push(&message(7), TIMEOUT).unwrap();
    assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), 7);
}

#[test]
fn garbage_is_turned_away() {
    let test_dir = TestDir::new();
    let _node = test_dir.join();
    let life = PidFd::of_this_process().unwrap();
    let null: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
    // What is wrong with each is told.
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
        assert!(!answer(&channel).is_empty(), "{bytes:?} was not answered");
        assert!(channel.receive(TIMEOUT).is_err(), "{bytes:?} was not the end");
    }
    // A member that speaks nonsense afterwards.
    let channel = connect(test_dir.path());
    channel.send(&HELLO, &[life.as_fd()], TIMEOUT).unwrap();
    assert!(!channel.receive(TIMEOUT).unwrap().descriptors.is_empty(), "it is no member");
    channel.send(&[VERSION; 5000], &[], TIMEOUT).unwrap();
    while channel.receive(TIMEOUT).is_ok() {}
    is_well(&test_dir);
}

#[test]
fn a_process_that_joins_by_the_life_of_another_is_not_taken_for_it() {
    let test_dir = TestDir::new();
    let _node = test_dir.join();
    let child = ForkedChild::new(|| std::thread::sleep(TIMEOUT));
    let channel = connect(test_dir.path());
    channel.send(&HELLO, &[child.pidfd().as_fd()], TIMEOUT).unwrap();
    // Refused where the kernel does not tell which process it is; else it is a member.
    let is_member = !channel.receive(TIMEOUT).unwrap().descriptors.is_empty();
    child.kill();
    assert!(child.was_killed());
    if is_member {
        std::thread::sleep(Duration::from_millis(500));
        assert!(!channel.is_shut_down(), "the end of another process was taken for this one's");
    }
    is_well(&test_dir);
}

#[test]
fn a_crowd_that_says_nothing_holds_up_nobody() {
    let test_dir = TestDir::new();
    let _node = test_dir.join();
    let crowd: Vec<_> = (0..300).map(|_| connect(test_dir.path())).collect();
    is_well(&test_dir);
    drop(crowd);
    is_well(&test_dir);
}

/// Sends a frame as it is, which channels would not.
#[allow(unsafe_code)]
fn send_raw(channel: &Channel, bytes: &[u8], files: &[RawFd]) {
    use nix::libc;
    // SAFETY: all bytes zero is a valid, empty message.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
    let length = size_of_val(files);
    // Of words, as the kernel wants it aligned.
    let mut control = vec![0_u64; 2 + length.div_ceil(8)];
    if !files.is_empty() {
        message.msg_control = control.as_mut_ptr().cast();
        // SAFETY: only computes; then the one header lies in `control`, which has room for it
        // and for all descriptors.
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

/// Below what channels send: frames that say one thing of their descriptors, and bring another.
#[test]
fn frames_that_do_not_keep_to_the_form_are_turned_away() {
    let test_dir = TestDir::new();
    let _node = test_dir.join();
    let life = PidFd::of_this_process().unwrap();
    let hello = |announced: u8| vec![announced, VERSION, 0, 0];
    let mut long = hello(1);
    long.resize(200 << 10, 0);
    // Nothing at all; many more than are taken; others than are announced; cut off.
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
        send_raw(&channel, &bytes, &vec![life.as_fd().as_raw_fd(); count]);
        let length = bytes.len();
        assert!(!answer(&channel).is_empty(), "{count} with {length} bytes: not answered");
        assert!(channel.receive(TIMEOUT).is_err(), "{count} with {length} bytes: not the end");
    }
    is_well(&test_dir);
}

/// Those that come and go, say nothing, or nonsense, or speak another version: by the hundred,
/// while messages flow.
#[test]
fn a_flood_of_connections_is_in_nobodys_way() {
    const COUNT: u64 = 3000;
    let test_dir = TestDir::new();
    let service = ChildProcess::start("serves", test_dir.path());
    let node = test_dir.join_served();
    let topic = node.topic("numbers", &settings()).unwrap();
    let (publisher, mut subscriber) = (topic.publisher().unwrap(), topic.subscriber().unwrap());
    // Who is a member is answered meanwhile, too.
    let descriptors = || {
        assert!(matches!(node.report().unwrap().first(), Some(Row::Node { .. })));
        service.descriptors()
    };
    let life = PidFd::of_this_process().unwrap();
    // The process of the service is a member, too.
    let is_member = |row: &Row| matches!(row, Row::Process { .. });
    until("two members", || {
        node.report().unwrap().iter().filter(|row| is_member(row)).count() == 2
    });
    let before = descriptors();
    let is_over = AtomicBool::new(false);
    let most = std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut kept = Vec::new();
                for number in (0_u32..).take_while(|_| !is_over.load(Ordering::Relaxed)) {
                    // It may be full for a while.
                    let path = test_dir.path().join("node.sock");
                    let short = Duration::from_millis(100);
                    let Ok(channel) = Channel::connect(&path, short) else { continue };
                    let other = [VERSION - 1, 0, 0];
                    let cases = [&b""[..], &[VERSION, 0xff, 0xff], &other, &HELLO];
                    let bytes: &[u8] = cases[number as usize / 2 % 4];
                    // Who says hello as it should is a member until it is gone.
                    let count = if bytes == HELLO { 1 } else { number as usize % 5 };
                    let files = vec![life.as_fd(); count];
                    if number % 2 == 0 {
                        let _ = channel.send(bytes, &files, short);
                    }
                    kept.push(channel);
                    if kept.len() > 60 {
                        kept.remove(number as usize % 60);
                    }
                }
            });
        }
        let reader = scope.spawn(|| {
            for expected in 0..COUNT {
                assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), expected);
            }
        });
        let mut most = 0;
        for round in 0..10 {
            publish(&publisher, round * COUNT / 10..(round + 1) * COUNT / 10);
            most = most.max(descriptors());
        }
        is_over.store(true, Ordering::Relaxed);
        reader.join().unwrap();
        most
    });
    // Those that have not said who they are, and members, each with a connection and a life.
    assert!(most < 700, "{most} descriptors of the service, before {before}");
    until("all that was opened to be closed", || descriptors() <= before);
    assert!(node.topic("others", &settings()).is_ok());
}

/// Neither who serves nor anybody else keeps anything of them, also if nobody comes in their place.
#[test]
fn those_that_left_cost_nothing() {
    let test_dir = TestDir::new();
    let serving = ChildProcess::start("reads numbers 2", test_dir.path());
    let node = test_dir.join_served();
    let bystander = ChildProcess::start("reads numbers 2", test_dir.path());
    let publisher = node.topic("numbers", &settings()).unwrap().publisher().unwrap();
    until("two that read", || publisher.subscribers() == 2);
    // Those that have read one have all that they open by themselves.
    publisher.push(&message(0), TIMEOUT).unwrap();
    publisher.flush(TIMEOUT).unwrap();
    let members = || {
        let is_member = |row: &&Row| matches!(row, Row::Process { .. });
        node.report().unwrap().iter().filter(is_member).count()
    };
    until("three members", || members() == 3);
    let descriptors = || [&serving, &bystander].map(|other| other.descriptors());
    let before = descriptors();
    let life = PidFd::of_this_process().unwrap();
    let guests: Vec<_> = (0..20)
        .map(|_| {
            let channel = connect(test_dir.path());
            channel.send(&HELLO, &[life.as_fd()], TIMEOUT).unwrap();
            // The lives of all others; what is said of those that come later is never read.
            assert!(!channel.receive(TIMEOUT).unwrap().descriptors.is_empty(), "it is no member");
            channel
        })
        .collect();
    assert_eq!(members(), 23);
    drop(guests);
    let is_as_before = || (0..2).all(|at| descriptors()[at] <= before[at]);
    until("all that was opened for them to be closed", is_as_before);
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
    let life = PidFd::of_this_process().unwrap();
    channel.send(&HELLO, &[life.as_fd()], TIMEOUT).unwrap();
    until("it to be a member", || members() == before + 1);
    // It asks for reports, many of them, and takes none.
    const REPORT: u8 = 12;
    let refused = (0..20_000_u32).find_map(|number| {
        let request = [VERSION, REPORT, (number % 100) as u8];
        channel.send(&request, &[], TIMEOUT).err()
    });
    assert!(refused.is_some(), "all its requests were taken");
    until("it to be no member any more", || members() == before);
    is_well(&test_dir);
}

#[test]
fn a_fork_is_noticed() {
    let test_dir = TestDir::new();
    let node = test_dir.join();
    let topic = node.topic("numbers", &settings()).unwrap();
    let mut subscriber = topic.subscriber().unwrap();
    let publisher = topic.publisher().unwrap();
    // In a process with one thread it would be a plain fork; here the child only asks.
    let child = ForkedChild::new(|| {
        let refused = [
            node.topic("other", &settings()).err().map(|error| error.kind()),
            publisher.push(&message(1), TIMEOUT).err().map(|error| error.kind()),
            subscriber.try_pull().err().map(|error| error.kind()),
        ];
        assert!(refused.iter().all(|kind| *kind == Some(pubsub::ErrorKind::Forked)));
    });
    assert!(child.wait().success(), "the child took itself for its parent");
    publisher.push(&message(2), TIMEOUT).unwrap();
    assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), 2);
}
