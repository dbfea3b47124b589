//! Two nodes in two processes, one of which is killed repeatedly while messages flow.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, poll};
use pubsub::replication::{Command, Side, TopicKey, Worker, WorkerEvent};
use testkit::children::{self, Child};

use crate::support::{
    LOCAL, Lengths, MemoryKind, TIMEOUT, TestSink, TestSource, node, options, topic,
};

/// The first byte of each control message.
const TAG: u8 = 1;
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

/// Positions in a file, which survive a kill. Each is written before it counts.
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
    stream: UnixStream,
    is_done: Option<Box<dyn Fn() -> bool>>,
}

impl NodeProcess {
    /// Starts a node at the position after the end of the journal.
    fn start(
        provider: &str,
        side: Side,
        journal: &Path,
        stream: UnixStream,
        memory: MemoryKind,
    ) -> Self {
        stream.set_nonblocking(true).unwrap();
        let worker = Worker::start(options(provider), LOCAL).unwrap();
        let from = Journal::read(journal).last().map_or(0, |last| last + 1);
        let mut journal = Journal::open(journal);
        let mut node_process = Self { worker, side, stream, is_done: None };
        match side {
            Side::Writer => {
                let mut source = TestSource::new(&lengths(), memory, from, COUNT);
                source.released = Box::new(move |through| journal.put(through));
                node_process.is_done = Some(Box::new(source.is_done()));
                let announcer =
                    node_process.worker.send_topic(KEY, topic(1 << 30), Box::new(source)).unwrap();
                node_process.worker.send(Command::AddDestination(KEY, node(1))).unwrap();
                announcer.announce_waiter();
            }
            Side::Reader => {
                let sink = TestSink::new(memory, move |header, _| journal.put(header.position));
                let device = (memory == MemoryKind::Device).then(|| memory.device());
                node_process
                    .worker
                    .receive_topic(KEY, node(1), from, device, Box::new(sink))
                    .unwrap();
            }
        }
        node_process
    }

    /// Exchanges control messages. False if the other process has ended.
    fn process_events(&mut self) -> bool {
        while let Some(event) = self.worker.try_event().unwrap() {
            if !self.process(event) {
                return false;
            }
        }
        let mut length = [0; 4];
        match self.stream.read(&mut length) {
            Ok(0) => return false,
            Ok(4) => {
                self.stream.set_nonblocking(false).unwrap();
                let mut bytes = vec![0; u32::from_le_bytes(length) as usize];
                let result = self.stream.read_exact(&mut bytes);
                self.stream.set_nonblocking(true).unwrap();
                if result.is_err() {
                    return false;
                }
                let message = control::codec::decode(TAG, &bytes).unwrap();
                self.worker.send(Command::ControlMessage(KEY, node(1), message)).unwrap();
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

    fn process(&mut self, event: WorkerEvent) -> bool {
        match event {
            WorkerEvent::ControlMessage { message, .. } => {
                let message = control::codec::encode(TAG, &message);
                let mut frame = (message.len() as u32).to_le_bytes().to_vec();
                frame.extend(message);
                self.stream.set_nonblocking(false).unwrap();
                let result = self.stream.write_all(&frame);
                self.stream.set_nonblocking(true).unwrap();
                result.is_ok()
            }
            WorkerEvent::Disconnected { side: Side::Writer, .. } => {
                self.worker.send(Command::AddDestination(KEY, node(1))).unwrap();
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

/// The child process. It runs until it is killed or its parent has ended.
fn enter(args: &[&str]) {
    let [side, provider, memory, journal, socket] = *args else { panic!("{args:?}") };
    let side = if side == "writer" { Side::Writer } else { Side::Reader };
    let memory = if memory == "device" { MemoryKind::Device } else { MemoryKind::Host };
    let stream = UnixStream::connect(socket).unwrap();
    let mut node_process = NodeProcess::start(provider, side, Path::new(journal), stream, memory);
    while node_process.process_events() {}
    // Without an orderly end, as a kill would.
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
    memory: MemoryKind,
) -> (Child, UnixStream) {
    let side = if side == Side::Writer { "writer" } else { "reader" };
    let memory = if memory == MemoryKind::Device { "device" } else { "host" };
    let (journal, socket) = (directory.join(side), directory.join("socket"));
    let args = [side, provider, memory, journal.to_str().unwrap(), socket.to_str().unwrap()];
    let child = Child::start(&mut children::respawn(args));
    let end = Instant::now() + TIMEOUT;
    loop {
        match listener.accept() {
            Ok((stream, _)) => return (child, stream),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                assert!(Instant::now() < end, "timeout: the child does not connect");
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// Kills the process of one side several times while messages flow.
fn kill_repeatedly(name: &str, victim: Side, provider: &str, memory: MemoryKind) {
    let directory = std::env::temp_dir().join(format!("replication-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let directory = Directory(directory);
    let directory = &directory.0;
    let listener = UnixListener::bind(directory.join("socket")).unwrap();
    listener.set_nonblocking(true).unwrap();
    let reader = directory.join("reader");
    let survivor = if victim == Side::Writer { Side::Reader } else { Side::Writer };
    let journal = directory.join(if survivor == Side::Writer { "writer" } else { "reader" });
    let (mut child, stream) = spawn(directory, &listener, victim, provider, memory);
    let mut node_process = NodeProcess::start(provider, survivor, &journal, stream, memory);
    let end = Instant::now() + TIMEOUT;
    let mut kills = 0;
    loop {
        let is_connected = node_process.process_events();
        let published = std::fs::metadata(&reader).map_or(0, |file| file.len() / 8);
        if kills < KILLS && published > (kills + 1) * COUNT / (KILLS + 2) {
            kills += 1;
            child.kill();
            node_process.worker.send(Command::NodeLost(node(1))).unwrap();
            let (next, stream) = spawn(directory, &listener, victim, provider, memory);
            stream.set_nonblocking(true).unwrap();
            (child, node_process.stream) = (next, stream);
            if node_process.side == Side::Writer {
                node_process.worker.send(Command::AddDestination(KEY, node(1))).unwrap();
            }
            continue;
        }
        assert!(is_connected, "the child ended by itself");
        if published == COUNT {
            break;
        }
        assert!(Instant::now() < end, "timeout: {published} of {COUNT} after {kills} kills");
    }
    if let Some(is_done) = &node_process.is_done.take() {
        while !is_done() {
            let is_connected = node_process.process_events();
            assert!(is_connected && Instant::now() < end, "the last messages are not released");
        }
    }
    drop(node_process);
    drop(child);
    assert_eq!(kills, KILLS);
    let published = Journal::read(&reader);
    assert!(published.iter().copied().eq(0..COUNT), "not each message once and in order");
}

#[test]
fn reader_killed_repeatedly_over_net_loses_nothing() {
    kill_repeatedly("reader-net", Side::Reader, "=net", MemoryKind::Host);
}

#[test]
fn reader_killed_repeatedly_over_rxm_loses_nothing() {
    kill_repeatedly("reader-rxm", Side::Reader, "=tcp;ofi_rxm", MemoryKind::Device);
}

#[test]
fn writer_killed_repeatedly_over_net_loses_nothing() {
    kill_repeatedly("writer-net", Side::Writer, "=net", MemoryKind::Device);
}

#[test]
fn writer_killed_repeatedly_over_rxm_loses_nothing() {
    kill_repeatedly("writer-rxm", Side::Writer, "=tcp;ofi_rxm", MemoryKind::Host);
}
