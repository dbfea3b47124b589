//! Two processes that share nothing but a directory: each in a PID, IPC, mount and
//! network namespace of its own, as two containers are.

use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::{Duration, Instant};

use ipc::{
    Allocator, Caller, Channel, ChannelListener, Fate, Layout, Life, MappedWords, Owner, Part,
    Participant, Roster, Segment, Words,
};
use testkit::children::{self, Child};

const LAYOUT: Layout = Layout::new("namespaces", 1);
const PATIENCE: Duration = Duration::from_secs(20);
const MOST_BLOCKS: u32 = 64;

type Books = Allocator<Part<MappedWords>>;

struct World {
    roster: Roster<Part<MappedWords>>,
    flag: Part<MappedWords>,
    books: Part<MappedWords>,
}

fn world(segment: &Segment) -> World {
    let part = |first, count| Part::new(segment.words(), first, count).unwrap();
    let roster = Roster::new(part(0, 256)).unwrap();
    World { roster, flag: part(256, 1), books: part(257, Books::words_needed(MOST_BLOCKS)) }
}

testkit::entry_of_children!(enter);

/// What the process in the other namespaces does: joins, takes a block, says so, and
/// waits to be killed.
fn enter(words: &[&str]) {
    let [path] = words else { panic!("{words:?}") };
    let channel = Channel::connect(Path::new(path), PATIENCE).unwrap();
    let life = Life::of_this_process().unwrap();
    channel.send(b"here I am", &[life.as_fd()], PATIENCE).unwrap();
    // Who is in another PID namespace has no number here.
    assert_eq!(channel.credentials().unwrap().process, None);
    let message = channel.receive(PATIENCE).unwrap();
    let me = u32::from_le_bytes(message.bytes.try_into().unwrap());
    let me = Participant::from_number(me).unwrap();
    let file = message.descriptors.into_iter().next().unwrap();
    let world = world(&Segment::open(file, LAYOUT).unwrap());
    let books = Books::attach(world.books).unwrap();
    let caller = Caller::new(me, &world.roster);
    books.allocate(&caller, Owner::participant(me), 1000, 1).unwrap();
    world.flag.store(0, 1, Release);
    std::thread::sleep(PATIENCE);
}

#[test]
fn processes_in_different_namespaces_share_memory_and_see_each_other_die() {
    let unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--ipc", "--net"];
    let works =
        Command::new(unshare[0]).args(&unshare[1..]).arg("true").stderr(Stdio::null()).status();
    if !works.is_ok_and(|status| status.success()) {
        testkit::skip!("no namespaces can be made here");
    }
    let directory = std::env::temp_dir().join(format!("fabricast-spaces-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let path = directory.join("socket");
    let listener = ChannelListener::bind(&path).unwrap();
    let segment = Segment::create(LAYOUT, (257 + Books::words_needed(MOST_BLOCKS)) * 8).unwrap();
    let world = world(&segment);
    let me = world.roster.admit(Life::of_this_process().unwrap()).unwrap();
    let caller = Caller::new(me, &world.roster);
    let books = Books::format(world.books, MOST_BLOCKS, 64).unwrap();
    books.extend(&caller, 0, 1 << 16).unwrap();
    segment.mark_ready();

    let child = Child::start(&mut children::again_by(&unshare, [&path]));
    let channel = listener.accept(PATIENCE).unwrap();
    let mut hello = channel.receive(PATIENCE).unwrap();
    let life = Life::of_peer(&channel, hello.descriptors.remove(0)).unwrap();
    let other = world.roster.admit(life).unwrap();
    channel.send(&other.number().to_le_bytes(), &[segment.as_fd()], PATIENCE).unwrap();
    let end = Instant::now() + PATIENCE;
    while world.flag.load(0, Acquire) == 0 {
        assert!(Instant::now() < end, "the other side did not take its block");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(books.statistics(&caller).unwrap().blocks_taken, 1);
    assert!(!world.roster.is_dead(Some(other)));
    drop(child);
    while !world.roster.is_dead(Some(other)) {
        assert!(Instant::now() < end, "its death was not seen");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(books.reclaim(&caller, Owner::participant(other), |_| false), Ok(1));
    assert_eq!(books.statistics(&caller).unwrap().free, 1 << 16);
    drop(listener);
    std::fs::remove_dir_all(&directory).unwrap();
}
