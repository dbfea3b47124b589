//! Two processes that share only a directory: each has its own PID, IPC, mount and network
//! namespace, like two containers.

use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::{Duration, Instant};

use ipc::{
    Allocator, Caller, Channel, ChannelListener, Layout, Liveness, MappedWords, Owner, Participant,
    ParticipantTable, PidFd, Segment, WordRange, Words,
};
use testkit::children::{self, Child};

const LAYOUT: Layout = Layout::new("namespaces", 1);
const TIMEOUT: Duration = Duration::from_secs(20);
const MAX_BLOCKS: u32 = 64;

type SharedAllocator = Allocator<WordRange<MappedWords>>;

struct Fixture {
    participants: ParticipantTable<WordRange<MappedWords>>,
    flag: WordRange<MappedWords>,
    allocator: WordRange<MappedWords>,
}

fn fixture(segment: &Segment) -> Fixture {
    let part = |first, count| WordRange::new(segment.words(), first, count).unwrap();
    let participants = ParticipantTable::new(part(0, 256)).unwrap();
    Fixture {
        participants,
        flag: part(256, 1),
        allocator: part(257, SharedAllocator::required_words(MAX_BLOCKS)),
    }
}

testkit::child_entry!(enter);

/// The process in the other namespaces joins, takes a block, reports it, and waits to be
/// killed.
fn enter(words: &[&str]) {
    let [path] = words else { panic!("{words:?}") };
    let channel = Channel::connect(Path::new(path), TIMEOUT).unwrap();
    let pidfd = PidFd::of_this_process().unwrap();
    channel.send(b"here I am", &[pidfd.as_fd()], TIMEOUT).unwrap();
    // A process in another PID namespace has no process id here.
    assert_eq!(channel.credentials().unwrap().process, None);
    let message = channel.receive(TIMEOUT).unwrap();
    let me = u32::from_le_bytes(message.bytes.try_into().unwrap());
    let me = Participant::from_number(me).unwrap();
    let file = message.descriptors.into_iter().next().unwrap();
    let fixture = fixture(&Segment::open(file, LAYOUT).unwrap());
    let allocator = SharedAllocator::attach(fixture.allocator).unwrap();
    let caller = Caller::new(me, &fixture.participants);
    allocator.allocate(&caller, Owner::participant(me), 1000, 1).unwrap();
    fixture.flag.store(0, 1, Release);
    std::thread::sleep(TIMEOUT);
}

#[test]
fn processes_in_different_namespaces_share_memory_and_liveness() {
    let unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--ipc", "--net"];
    let works =
        Command::new(unshare[0]).args(&unshare[1..]).arg("true").stderr(Stdio::null()).status();
    if !works.is_ok_and(|status| status.success()) {
        testkit::skip!("creating namespaces is not permitted");
    }
    let directory = std::env::temp_dir().join(format!("fabricast-spaces-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let path = directory.join("socket");
    let listener = ChannelListener::bind(&path).unwrap();
    let segment =
        Segment::create(LAYOUT, (257 + SharedAllocator::required_words(MAX_BLOCKS)) * 8).unwrap();
    let fixture = fixture(&segment);
    let me = fixture.participants.admit(PidFd::of_this_process().unwrap()).unwrap();
    let caller = Caller::new(me, &fixture.participants);
    let allocator = SharedAllocator::format(fixture.allocator, MAX_BLOCKS, 64).unwrap();
    allocator.extend(&caller, 0, 1 << 16).unwrap();
    segment.mark_ready();

    let child = Child::start(&mut children::respawn_with(&unshare, [&path]));
    let channel = listener.accept(TIMEOUT).unwrap();
    let mut hello = channel.receive(TIMEOUT).unwrap();
    let pidfd = PidFd::of_peer(&channel, hello.descriptors.remove(0)).unwrap();
    let other = fixture.participants.admit(pidfd).unwrap();
    channel.send(&other.number().to_le_bytes(), &[segment.as_fd()], TIMEOUT).unwrap();
    let end = Instant::now() + TIMEOUT;
    while fixture.flag.load(0, Acquire) == 0 {
        assert!(Instant::now() < end, "the other side did not take its block");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(allocator.statistics(&caller).unwrap().blocks_allocated, 1);
    assert!(!fixture.participants.is_dead(Some(other)));
    drop(child);
    while !fixture.participants.is_dead(Some(other)) {
        assert!(Instant::now() < end, "its exit was not detected");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(allocator.reclaim(&caller, Owner::participant(other), |_| false), Ok(1));
    assert_eq!(allocator.statistics(&caller).unwrap().free, 1 << 16);
    drop(listener);
    std::fs::remove_dir_all(&directory).unwrap();
}
