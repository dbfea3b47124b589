//! Two nodes in two processes, one of which is killed in the middle, again and again.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, poll};
use pubsub::bridge::{Report, Side, TopicKey, Worker};
use testkit::children::{self, Child};

use crate::support::{
    LOCAL, Lengths, PATIENCE, Published, Subscribed, Where, facts, node, options,
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
struct Party {
    worker: Worker,
    side: Side,
    line: UnixStream,
    is_done: Option<Box<dyn Fn() -> bool>>,
}

impl Party {
    /// Goes on from where the journal ends.
    fn begin(provider: &str, side: Side, journal: &Path, line: UnixStream, at: Where) -> Self {
        line.set_nonblocking(true).unwrap();
        let worker = Worker::start(options(provider), LOCAL).unwrap();
        let from = Journal::read(journal).last().map_or(0, |last| last + 1);
        let mut journal = Journal::open(journal);
        let mut party = Self { worker, side, line, is_done: None };
        match side {
            Side::Writer => {
                let mut source = Published::new(&lengths(), at, from, COUNT);
                source.released = Box::new(move |through| journal.put(through));
                party.is_done = Some(Box::new(source.is_done()));
                let announcer =
                    party.worker.send_topic(KEY, facts(1 << 30), Box::new(source)).unwrap();
                party.worker.tell(pubsub::bridge::Command::Add(KEY, node(1))).unwrap();
                announcer.announce();
            }
            Side::Reader => {
                let sink = Subscribed::new(at, move |header, _| journal.put(header.position));
                let device = (at == Where::Device).then(|| at.device());
                party.worker.receive_topic(KEY, node(1), from, device, Box::new(sink)).unwrap();
            }
        }
        party
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
                self.worker.tell(pubsub::bridge::Command::Letter(KEY, node(1), terms)).unwrap();
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

    fn act(&mut self, report: Report) -> bool {
        match report {
            Report::Letter { terms, .. } => {
                let letter = control::codec::encode(TERMS, &terms);
                let mut frame = (letter.len() as u32).to_le_bytes().to_vec();
                frame.extend(letter);
                self.line.set_nonblocking(false).unwrap();
                let sent = self.line.write_all(&frame);
                self.line.set_nonblocking(true).unwrap();
                sent.is_ok()
            }
            Report::Lost { side: Side::Writer, .. } => {
                self.worker.tell(pubsub::bridge::Command::Add(KEY, node(1))).unwrap();
                true
            }
            Report::Failed { error, .. } => panic!("{error}"),
            Report::Lost { .. } | Report::Connected { .. } | Report::Behind { .. } => true,
        }
    }
}

testkit::entry_of_children!(enter);

/// What the child process does, until it is killed or its parent is gone.
fn enter(words: &[&str]) {
    let [side, provider, place, journal, socket] = *words else { panic!("{words:?}") };
    let side = if side == "writer" { Side::Writer } else { Side::Reader };
    let at = if place == "device" { Where::Device } else { Where::Host };
    let line = UnixStream::connect(socket).unwrap();
    let mut party = Party::begin(provider, side, Path::new(journal), line, at);
    while party.carry() {}
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
    at: Where,
) -> (Child, UnixStream) {
    let side = if side == Side::Writer { "writer" } else { "reader" };
    let place = if at == Where::Device { "device" } else { "host" };
    let (journal, socket) = (directory.join(side), directory.join("socket"));
    let words = [side, provider, place, journal.to_str().unwrap(), socket.to_str().unwrap()];
    let child = Child::start(&mut children::again(words));
    let end = Instant::now() + PATIENCE;
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
fn kill_again_and_again(name: &str, victim: Side, provider: &str, at: Where) {
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
    let mut party = Party::begin(provider, survivor, &ours, line, at);
    let end = Instant::now() + PATIENCE;
    let mut kills = 0;
    loop {
        let is_there = party.carry();
        let published = std::fs::metadata(&reader).map_or(0, |file| file.len() / 8);
        if kills < KILLS && published > (kills + 1) * COUNT / (KILLS + 2) {
            kills += 1;
            child.kill();
            party.worker.tell(pubsub::bridge::Command::LoseNode(node(1))).unwrap();
            let (next, line) = spawn(directory, &listener, victim, provider, at);
            line.set_nonblocking(true).unwrap();
            (child, party.line) = (next, line);
            if party.side == Side::Writer {
                party.worker.tell(pubsub::bridge::Command::Add(KEY, node(1))).unwrap();
            }
            continue;
        }
        assert!(is_there, "the child ended by itself");
        if published == COUNT {
            break;
        }
        assert!(Instant::now() < end, "{published} of {COUNT} after {kills} kills");
    }
    if let Some(is_done) = &party.is_done.take() {
        while !is_done() {
            assert!(party.carry() && Instant::now() < end, "the last are not released");
        }
    }
    drop(party);
    drop(child);
    assert_eq!(kills, KILLS);
    let published = Journal::read(&reader);
    assert!(published.iter().copied().eq(0..COUNT), "each once, in order");
}

#[test]
fn a_reader_is_killed_over_net() {
    kill_again_and_again("reader-net", Side::Reader, "=net", Where::Host);
}

#[test]
fn a_reader_is_killed_over_rxm() {
    kill_again_and_again("reader-rxm", Side::Reader, "=tcp;ofi_rxm", Where::Device);
}

#[test]
fn a_writer_is_killed_over_net() {
    kill_again_and_again("writer-net", Side::Writer, "=net", Where::Device);
}

#[test]
fn a_writer_is_killed_over_rxm() {
    kill_again_and_again("writer-rxm", Side::Writer, "=tcp;ofi_rxm", Where::Host);
}
