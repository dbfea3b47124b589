//! Two nodes in two processes, one of which is killed in the middle, again and again.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, poll};
use pubsub::replication::{Side, TopicKey, Worker, WorkerEvent};
use testkit::children::{self, Child};

use crate::support::{
    LOCAL, Lengths, MemoryKind, Published, Subscribed, TIMEOUT, facts, node, options,
};

/// How each letter begins.
const TERMS: u8 = 1;
const KEY: TopicKey = TopicKey(1);
const COUNT: u64 = 2500;
const KILLS: u64 = 5;

fn lengths() -> Lengths {
    Arc::new(|position| match position % 100 {
        7 => 300_000,
        50 => 9 << 20,
        _ => (position % 5 * 700) as usize,
    })
}

/// Positions in a file, written before they count: what survives a kill.
struct Journal(File);

impl Journal {
    fn open(path: &Path) -> Self {
        let options = OpenOptions::new().append(true).create(true).read(true).open(path);
        Self(options.unwrap())
    }

    fn put(&mut self, position: u64) {
        self.0.write_all(&position.to_le_bytes()).unwrap();
    }

    fn read(path: &Path) -> Vec<u64> {
        let bytes = std::fs::read(path).unwrap_or_default();
        bytes.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect()
    }
}

/// One of the two nodes.
struct NodeProcess {
    worker: Worker,
    side: Side,
    line: UnixStream,
    is_done: Option<Box<dyn Fn() -> bool>>,
}

impl NodeProcess {
    /// Goes on from where the journal ends.
    fn begin(provider: &str, side: Side, journal: &Path, line: UnixStream, at: MemoryKind) -> Self {
        line.set_nonblocking(true).unwrap();
        let worker = Worker::start(options(provider), LOCAL).unwrap();
        let from = Journal::read(journal).last().map_or(0, |last| last + 1);
        let mut journal = Journal::open(journal);
        let mut node_process = Self { worker, side, line, is_done: None };
        match side {
            Side::Writer => {
                let mut source = Published::new(&lengths(), at, from, COUNT);
                source.released = Box::new(move |through| journal.put(through));
                node_process.is_done = Some(Box::new(source.is_done()));
                let announcer =
                    node_process.worker.send_topic(KEY, facts(1 << 30), Box::new(source)).unwrap();
                node_process
                    .worker
                    .tell(pubsub::replication::Command::AddDestination(KEY, node(1)))
                    .unwrap();
                announcer.announce_waiter();
            }
            Side::Reader => {
                let sink = Subscribed::new(at, move |header, _| journal.put(header.position));
                let device = (at == MemoryKind::Device).then(|| at.device());
                node_process
                    .worker
                    .receive_topic(KEY, node(1), from, device, Box::new(sink))
                    .unwrap();
            }
        }
        node_process
    }

    /// Carries letters. False if the other process is gone.
    fn carry(&mut self) -> bool {
        while let Some(report) = self.worker.try_report().unwrap() {
            if !self.act(report) {
                return false;
            }
        }
        let mut length = [0; 4];
        match self.line.read(&mut length) {
            Ok(0) => return false,
            Ok(4) => {
                self.line.set_nonblocking(false).unwrap();
                let mut letter = vec![0; u32::from_le_bytes(length) as usize];
                let came = self.line.read_exact(&mut letter);
                self.line.set_nonblocking(true).unwrap();
                if came.is_err() {
                    return false;
                }
                let terms = control::codec::decode(TERMS, &letter).unwrap();
                self.worker
                    .tell(pubsub::replication::Command::ControlMessage(KEY, node(1), terms))
                    .unwrap();
            }
            Ok(_) => return false,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                let wakes = PollFd::new(self.worker.wake_descriptor(), PollFlags::POLLIN);
                let _ = poll(&mut [wakes], 2_u8);
            }
            Err(_) => return false,
        }
        true
    }

    fn act(&mut self, report: WorkerEvent) -> bool {
        match report {
            WorkerEvent::ControlMessage { terms, .. } => {
                let letter = control::codec::encode(TERMS, &terms);
                let mut frame = (letter.len() as u32).to_le_bytes().to_vec();
                frame.extend(letter);
                self.line.set_nonblocking(false).unwrap();
                let sent = self.line.write_all(&frame);
                self.line.set_nonblocking(true).unwrap();
                sent.is_ok()
            }
            WorkerEvent::Disconnected { side: Side::Writer, .. } => {
                self.worker
                    .tell(pubsub::replication::Command::AddDestination(KEY, node(1)))
                    .unwrap();
                true
            }
            WorkerEvent::Failed { error, .. } => panic!("{error}"),
            WorkerEvent::Disconnected { .. }
            | WorkerEvent::Connected { .. }
            | WorkerEvent::Lagging { .. } => true,
        }
    }
}

testkit::child_entry!(enter);

/// What the child process does, until it is killed or its parent is gone.
fn enter(words: &[&str]) {
    let [side, provider, place, journal, socket] = *words else { panic!("{words:?}") };
    let side = if side == "writer" { Side::Writer } else { Side::Reader };
    let at = if place == "device" { MemoryKind::Device } else { MemoryKind::Host };
    let line = UnixStream::connect(socket).unwrap();
    let mut node_process = NodeProcess::begin(provider, side, Path::new(journal), line, at);
    while node_process.carry() {}
    // Not in order: it may be in the middle of everything.
    std::process::exit(0);
}

struct Directory(PathBuf);

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn spawn(
    directory: &Path,
    listener: &UnixListener,
    side: Side,
    provider: &str,
    at: MemoryKind,
) -> (Child, UnixStream) {
    let side = if side == Side::Writer { "writer" } else { "reader" };
    let place = if at == MemoryKind::Device { "device" } else { "host" };
    let (journal, socket) = (directory.join(side), directory.join("socket"));
    let words = [side, provider, place, journal.to_str().unwrap(), socket.to_str().unwrap()];
    let child = Child::start(&mut children::respawn(words));
    let end = Instant::now() + TIMEOUT;
    loop {
        match listener.accept() {
            Ok((line, _)) => return (child, line),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                assert!(Instant::now() < end, "the child does not come");
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// Kills the process of one side in the middle of everything, several times.
fn kill_repeatedly(name: &str, victim: Side, provider: &str, at: MemoryKind) {
    let directory = std::env::temp_dir().join(format!("bridge-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let directory = Directory(directory);
    let directory = &directory.0;
    let listener = UnixListener::bind(directory.join("socket")).unwrap();
    listener.set_nonblocking(true).unwrap();
    let reader = directory.join("reader");
    let survivor = if victim == Side::Writer { Side::Reader } else { Side::Writer };
    let ours = directory.join(if survivor == Side::Writer { "writer" } else { "reader" });
    let (mut child, line) = spawn(directory, &listener, victim, provider, at);
    let mut node_process = NodeProcess::begin(provider, survivor, &ours, line, at);
    let end = Instant::now() + TIMEOUT;
    let mut kills = 0;
    loop {
        let is_there = node_process.carry();
        let published = std::fs::metadata(&reader).map_or(0, |file| file.len() / 8);
        if kills < KILLS && published > (kills + 1) * COUNT / (KILLS + 2) {
            kills += 1;
            child.kill();
            node_process.worker.tell(pubsub::replication::Command::NodeLost(node(1))).unwrap();
            let (next, line) = spawn(directory, &listener, victim, provider, at);
            line.set_nonblocking(true).unwrap();
            (child, node_process.line) = (next, line);
            if node_process.side == Side::Writer {
                node_process
                    .worker
                    .tell(pubsub::replication::Command::AddDestination(KEY, node(1)))
                    .unwrap();
            }
            continue;
        }
        assert!(is_there, "the child ended by itself");
        if published == COUNT {
            break;
        }
        assert!(Instant::now() < end, "{published} of {COUNT} after {kills} kills");
    }
    if let Some(is_done) = &node_process.is_done.take() {
        while !is_done() {
            assert!(node_process.carry() && Instant::now() < end, "the last are not released");
        }
    }
    drop(node_process);
    drop(child);
    assert_eq!(kills, KILLS);
    let published = Journal::read(&reader);
    assert!(published.iter().copied().eq(0..COUNT), "each once, in order");
}

#[test]
fn a_reader_is_killed_over_net() {
    kill_repeatedly("reader-net", Side::Reader, "=net", MemoryKind::Host);
}

#[test]
fn a_reader_is_killed_over_rxm() {
    kill_repeatedly("reader-rxm", Side::Reader, "=tcp;ofi_rxm", MemoryKind::Device);
}

#[test]
fn a_writer_is_killed_over_net() {
    kill_repeatedly("writer-net", Side::Writer, "=net", MemoryKind::Device);
}

#[test]
fn a_writer_is_killed_over_rxm() {
    kill_repeatedly("writer-rxm", Side::Writer, "=tcp;ofi_rxm", MemoryKind::Host);
}
