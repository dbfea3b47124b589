//! The processes of a measurement beside the first one: services of nodes, and readers.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ipc::Words;
use pubsub::{
    Budgets, MemoryPlace, NetworkOptions, Node, NodeOptions, Reliability, Sample, ServiceMode,
    TopicSettings,
};
use serde::{Deserialize, Serialize};

use super::super::party::{Done, LONGEST, Shared};
use super::super::queue::Wait;
use super::private::Private;
use super::{baseline, many};
use crate::cli::exit::{Exit, Failure};
use crate::cli::histogram::Histogram;
use crate::cli::window::{Content, Windows};

pub(super) const PATIENCE: Duration = Duration::from_secs(60);
/// What is said of a message beside its content: when it was published, how long it took before
/// that, and what comes after it.
const STAMPS: usize = 3;
/// After this message: nothing; the same topic; the same, and nothing up to here counts; a rest,
/// until the next turn; or the topic with this number less 4.
pub(super) const LAST: u64 = 0;
pub(super) const SAME: u64 = 1;
pub(super) const FORGET: u64 = 2;
pub(super) const REST: u64 = 3;
pub(super) const FIRST_TOPIC: u64 = 4;
/// The word that ends services and others that wait for nothing else.
const OVER: usize = 0;
/// Rests that are over: two lines, whose readers rest by themselves.
const TURNS: usize = 1;
/// Words that all share.
pub(super) const WORDS: usize = 3;
/// Longer than one who rests sleeps at a time.
pub(super) const AWAKENING: Duration = Duration::from_millis(4);

/// What such a process does.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(in crate::cli::bench) enum Part {
    Serve(Service),
    Read(Reading),
    Many(many::Side),
    Baseline(baseline::Role),
}

/// What one has found, beside the samples of [`Done`].
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(in crate::cli::bench) struct Found {
    /// Nanoseconds of each message, by topic.
    pub(super) topics: Vec<Histogram>,
    /// Of those that came one at a time.
    pub(super) singly: Histogram,
    /// Of the stages that a message of another node has, and of letting go of it.
    pub(super) stages: [Histogram; STAGES.len()],
    /// By which way they came.
    pub(super) way: String,
    /// From the first message to the last, in nanoseconds, by round, and how many there were.
    pub(super) streams: Vec<(u64, u64)>,
    /// Messages by topic.
    pub(super) shares: Vec<u64>,
    /// The longest time without a message of a topic, in nanoseconds.
    pub(super) longest_gap: u64,
}

/// From being published to leaving its publisher's node, or being delivered there; on the wire and
/// into the memory of the other node; until it was pulled; letting go of it; a copy of its own.
pub(super) const STAGES: [&str; 5] = ["out", "wire+in", "notice", "drop", "private copy"];

/// The service of a node.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(in crate::cli::bench) struct Service {
    pub(super) directory: PathBuf,
    pub(super) network: Option<Network>,
    pub(super) budget: u64,
}

/// How it is connected.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(in crate::cli::bench) struct Network {
    pub(super) listen: SocketAddr,
    pub(super) peer: Option<SocketAddr>,
    pub(super) provider: Option<String>,
}

/// One who reads.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(in crate::cli::bench) struct Reading {
    pub(super) directory: PathBuf,
    /// It begins with the first; None: not one of this reader's.
    pub(super) topics: Vec<Option<String>>,
    pub(super) kind: Kind,
    pub(super) waiting: Wait,
    /// Of which line's turns it rests.
    pub(super) line: usize,
    /// After the last rest they come as fast as it goes: that tells nothing about stages.
    pub(super) ends_with_stream: bool,
    /// The memory of its own that it copies each message to, before it has it.
    pub(super) private: Option<String>,
}

/// What topics are like.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(in crate::cli::bench) struct Kind {
    pub(super) memory: String,
    pub(super) size: u64,
    pub(super) depth: u32,
    pub(super) run: u64,
}

impl Kind {
    pub(super) fn settings(&self) -> Result<TopicSettings, Failure> {
        let memory: MemoryPlace = self.memory.parse()?;
        Ok(TopicSettings {
            memory,
            reliability: Reliability::Reliable,
            depth: self.depth,
            largest: self.size,
            release_deadline: PATIENCE,
        })
    }

    /// What so many topics may take, as nodes reckon.
    pub(super) fn budget(&self, topics: u64) -> u64 {
        (u64::from(self.depth) + 4) * self.size.next_multiple_of(256) * topics + (64 << 20)
    }

    pub(super) fn content(&self, number: u64) -> Content {
        Content { run: self.run, number, length: self.size }
    }
}

/// Nanoseconds of the clock that all processes of a machine share, and messages have.
#[inline]
pub(super) fn now() -> u64 {
    let time = nix::time::clock_gettime(nix::time::ClockId::CLOCK_REALTIME);
    time.map_or(0, |time| time.tv_sec() as u64 * 1_000_000_000 + time.tv_nsec() as u64)
}

/// What is attached to a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stamps {
    pub(super) published: u64,
    pub(super) before: u64,
    pub(super) next: u64,
}

impl Stamps {
    pub(super) fn bytes(self) -> [u8; STAMPS * 8] {
        let mut bytes = [0; STAMPS * 8];
        let words = [self.published, self.before, self.next];
        for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    pub(super) fn of(bytes: &[u8]) -> Option<Self> {
        let word =
            |at: usize| Some(u64::from_le_bytes(bytes.get(at * 8..at * 8 + 8)?.try_into().ok()?));
        Some(Self { published: word(0)?, before: word(1)?, next: word(2)? })
    }
}

/// Joins a node that another process serves.
pub(super) fn join(directory: &Path, label: &str, waiting: Wait) -> Result<Node, Failure> {
    let options = NodeOptions {
        directory: directory.to_owned(),
        label: label.to_owned(),
        service: ServiceMode::Outside,
        patience: PATIENCE,
        waiting: waiting.spin(),
        ..NodeOptions::default()
    };
    Ok(Node::join(options)?)
}

/// Joins a node, and serves it.
pub(super) fn serve(service: &Service) -> Result<Node, Failure> {
    let network = service.network.as_ref().map(|network| NetworkOptions {
        listen: Some(network.listen),
        peers: network.peer.iter().map(ToString::to_string).collect(),
        provider: network.provider.clone(),
        lost_after: PATIENCE,
        ..NetworkOptions::default()
    });
    Ok(Node::join(NodeOptions {
        directory: service.directory.clone(),
        label: "service".to_owned(),
        patience: PATIENCE,
        budgets: Budgets { host: Some(service.budget), device: Some(service.budget) },
        network,
        ..NodeOptions::default()
    })?)
}

/// Lets those end that wait for nothing else.
pub(super) fn end_all(shared: &Shared) -> Result<(), Failure> {
    shared.part()?.store(OVER, 1, Ordering::Release);
    Ok(())
}

pub(super) fn is_over(shared: &Shared) -> Result<bool, Failure> {
    Ok(shared.part()?.load(OVER, Ordering::Acquire) != 0)
}

/// Lets the readers of a line go on.
pub(super) fn next_turn(shared: &Shared, line: usize) -> Result<(), Failure> {
    shared.part()?.fetch_add(TURNS + line, 1);
    // They are not to be awaited while a message is on its way.
    std::thread::sleep(AWAKENING);
    Ok(())
}

pub(super) fn nothing_found(iterations: u64) -> Done {
    Done {
        samples: Histogram::default(),
        elapsed: 0,
        iterations,
        verified: true,
        preempted: 0,
        seen: None,
        found: None,
    }
}

/// The life of such a process.
pub(in crate::cli::bench) fn take(
    shared: &Shared,
    part: &Part,
    ready: impl FnOnce() -> Result<(), Failure>,
) -> Result<Done, Failure> {
    match part {
        Part::Serve(service) => {
            let _node = serve(service)?;
            ready()?;
            while !is_over(shared)? {
                std::thread::sleep(Duration::from_millis(10));
            }
            Ok(nothing_found(0))
        }
        Part::Read(reading) => read(shared, reading, ready),
        Part::Many(side) => many::take(shared, side, ready),
        Part::Baseline(role) => baseline::take(role, ready),
    }
}

fn read(
    shared: &Shared,
    reading: &Reading,
    ready: impl FnOnce() -> Result<(), Failure>,
) -> Result<Done, Failure> {
    let node = join(&reading.directory, "reader", reading.waiting)?;
    let settings = reading.kind.settings()?;
    let mut subscribers = Vec::new();
    for name in &reading.topics {
        let subscriber = match name {
            Some(name) => Some(node.topic(name, &settings)?.subscriber()?),
            None => None,
        };
        subscribers.push(subscriber);
    }
    let mut found = Found {
        topics: subscribers.iter().map(|_| room()).collect(),
        stages: std::array::from_fn(|_| room()),
        singly: room(),
        ..Found::default()
    };
    let mut windows = Windows::new();
    let private = reading.private.as_deref().map(|memory| Private::new(memory, reading.kind.size));
    let mut private = private.transpose()?;
    let mut numbers = vec![0; subscribers.len()];
    let (mut current, mut verified, mut iterations, mut rests) = (0, true, 0, 0);
    ready()?;
    let mut round = Round::new();
    let begin = Instant::now();
    loop {
        let subscriber = subscribers.get_mut(current).and_then(Option::as_mut);
        let Some(subscriber) = subscriber else {
            return Err(Failure::failed("was sent to a topic that is not its own"));
        };
        let sample = subscriber.pull(PATIENCE)?;
        let came = now();
        let mut pulled = came;
        if let Some(private) = &mut private {
            private.copy(&sample)?;
            pulled = now();
            round.stages[4].add(pulled.saturating_sub(came));
        }
        let Some(stamps) = Stamps::of(&sample.metadata()) else {
            return Err(Failure::new(Exit::Corrupt, "a message without its stamps came"));
        };
        round.took.add(pulled.saturating_sub(stamps.published) + stamps.before);
        round.add_stages(&sample, stamps, came);
        let content = reading.kind.content(numbers[current]);
        numbers[current] += 1;
        verified &= sample.length() == content.length
            && windows.check(content, |offset, to| sample.read(offset, to))?.is_none();
        found.way = sample.way().to_string();
        iterations += 1;
        let letting_go = now();
        drop(sample);
        round.stages[3].add(now().saturating_sub(letting_go));
        round.first.get_or_insert(came);
        round.messages += 1;
        if stamps.next == SAME {
            continue;
        }
        let ended = std::mem::replace(&mut round, Round::new());
        if stamps.next == FORGET {
            continue;
        }
        let is_stream = stamps.next == LAST && reading.ends_with_stream;
        ended.end(&mut found, current, came, is_stream);
        match stamps.next {
            LAST => break,
            REST => {
                rests += 1;
                rest(shared, reading.line, rests)?;
            }
            topic => {
                let topic = (topic - FIRST_TOPIC) as usize;
                // What one does not have it does not wait for.
                if subscribers.get(topic).is_some_and(Option::is_some) {
                    current = topic;
                }
            }
        }
    }
    Ok(Done {
        elapsed: begin.elapsed().as_nanos() as u64,
        iterations,
        verified,
        found: Some(found),
        ..nothing_found(0)
    })
}

/// Sleeps until it is this line's turn again, so often.
fn rest(shared: &Shared, line: usize, rests: u64) -> Result<(), Failure> {
    let end = Instant::now() + LONGEST;
    while shared.part()?.load(TURNS + line, Ordering::Acquire) < rests {
        if Instant::now() > end {
            return Err(Failure::new(Exit::Deadline, "nobody ends the rest"));
        }
        std::thread::sleep(AWAKENING / 4);
    }
    Ok(())
}

fn room() -> Histogram {
    Histogram::up_to(LONGEST.as_nanos() as u64)
}

/// What came since a reader was told last what to do next.
struct Round {
    took: Histogram,
    stages: [Histogram; STAGES.len()],
    /// When the first message came.
    first: Option<u64>,
    messages: u64,
}

impl Round {
    fn new() -> Self {
        let stages = std::array::from_fn(|_| room());
        Self { took: room(), stages, first: None, messages: 0 }
    }

    fn add_stages(&mut self, sample: &Sample, stamps: Stamps, pulled: u64) {
        let times = sample.times();
        let (left, arrived) = match sample.origin() {
            Some(_) => (times.filled, times.copied),
            None => (times.published, times.published),
        };
        self.stages[0].add(left.saturating_sub(stamps.published));
        if sample.origin().is_some() {
            self.stages[1].add(arrived.saturating_sub(left));
        }
        self.stages[2].add(pulled.saturating_sub(arrived));
    }

    fn end(self, found: &mut Found, topic: usize, last: u64, is_stream: bool) {
        let time = last.saturating_sub(self.first.unwrap_or(last));
        found.streams.push((time, self.messages));
        if is_stream {
            return;
        }
        found.topics[topic].merge(&self.took);
        found.singly.merge(&self.took);
        for (all, stage) in found.stages.iter_mut().zip(&self.stages) {
            all.merge(stage);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stamps_are_read_as_they_were_written() {
        let stamps = Stamps { published: 1, before: 2, next: u64::MAX };
        assert_eq!(Stamps::of(&stamps.bytes()), Some(stamps));
        assert_eq!(Stamps::of(&stamps.bytes()[1..]), None);
    }
}
