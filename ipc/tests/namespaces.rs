//! Two processes that share nothing but a directory: each in a PID, IPC, mount and
//! network namespace of its own, as two containers are.

use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::{Duration, Instant};

use ipc::{
    Allocator, Caller, Channel, ChannelListener, Fate, Layout, Life, MappedWords, Owner, Part,
    Participant, Roster, Segment, Words,
};

const LAYOUT: Layout = Layout::new("namespaces", 1);
const PATIENCE: Duration = Duration::from_secs(20);
/// Where the other process finds the socket; without it there is nothing to be other.
const SOCKET: &str = "FABRICAST_TEST_SOCKET";
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

/// What the process in the other namespaces does: joins, takes a block, says so, and
/// waits to be killed.
#[test]
fn the_other_side() {
    let Some(path) = std::env::var_os(SOCKET) else { return };
    let channel = Channel::connect(&PathBuf::from(path), PATIENCE).unwrap();
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

struct Unshared(Child);

impl Drop for Unshared {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn processes_in_different_namespaces_share_memory_and_see_each_other_die() {
    if std::env::var_os(SOCKET).is_some() {
        return;
    }
    let namespaces = ["--pid", "--fork", "--kill-child", "--mount", "--ipc", "--net"];
    let works = Command::new("unshare").args(namespaces).arg("true").stderr(Stdio::null()).status();
    if !works.is_ok_and(|status| status.success()) {
        println!("skipped: no namespaces can be made here");
        return;
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

    let child = Command::new("unshare")
        .args(namespaces)
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "the_other_side", "--nocapture"])
        .env(SOCKET, &path)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let child = Unshared(child);
    let channel = listener.accept(PATIENCE).unwrap();
    let mut hello = channel.receive(PATIENCE).unwrap();
    let life = Life::from_fd(hello.descriptors.remove(0)).unwrap();
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
