//! The baseline `thesis`, the original design: a pageable copy out of the device, a Unix socket to
//! a manager, TCP to the manager of the other node, shared memory to its readers, and a copy into
//! each reader's own memory.
//!
//! Instead of iceoryx, which the thesis used, the last manager has a topic within its node: one
//! copy into shared memory, and no slower wakeups. Managers receive a message completely before
//! they send it on.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::contents::Contents;
use super::message_stamps::{Stamps, now};
use super::node::{address, serve};
use super::private_copy::PrivateMemory;
use super::schedule::{Round, TIMEOUT, Turn, TurnTarget, VERIFIED_MESSAGES, WARMUP};
use super::shared_words::next_turn;
use super::timed_subscriber::SubscriberTask;
use super::topic_results::{WorkerResult, empty_result, found};
use super::{ROUNDS, Service, TopicKind, TopicResult};
use crate::exchange::plan::Wait;
use crate::report::format_figure;
use crate::worker_group::{SharedSegment, WorkerGroup};
use command::exit::Failure;
use command::histogram::Histogram;
use command::stages;

/// Header of a message: start time, kind, time when it was copied out, time when the first manager
/// had it, and number.
const HEADER: usize = 40;
/// Kinds: not timed, timed, the last.
const UNTIMED: u64 = 0;
const TIMED: u64 = 1;
const LAST: u64 = 2;
/// Sent back when all readers are done with a message.
const DONE: [u8; 1] = [1];
/// The pause line of the readers.
const PAUSE_LINE: usize = 1;

/// The role of a process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Role {
    /// Receives messages from a Unix socket, and sends them by TCP.
    Sender { socket: PathBuf, to: SocketAddr, size: u64 },
    /// Receives them by TCP, and publishes them to readers.
    Receiver { at: SocketAddr, service: Service, kind: TopicKind, readers: u32 },
}

/// The processes, and their sockets.
pub(super) struct Plan {
    socket: PathBuf,
    at: SocketAddr,
    service: Service,
    /// In host memory, for readers of the same node.
    kind: TopicKind,
    private: String,
    readers: u64,
    schedule: Vec<Turn>,
}

fn failed(what: &'static str) -> impl Fn(std::io::Error) -> Failure {
    move |error| Failure::failed(format!("{what} failed: {error}"))
}

impl Plan {
    pub(super) fn new(
        group: &WorkerGroup,
        readers: u64,
        kind: &TopicKind,
        each: u64,
    ) -> Result<Self, Failure> {
        let private = kind.memory.clone();
        let kind = TopicKind { memory: "host".to_owned(), ..kind.clone() };
        let directory = group.directory().join("baseline");
        Ok(Self {
            socket: group.directory().join("manager"),
            at: address()?,
            service: Service::local(directory, kind.budget(1), &[]),
            private,
            kind,
            readers,
            schedule: schedule(each),
        })
    }

    /// The receiver and the sender.
    pub(super) fn roles(&self) -> [Role; 2] {
        let receiver = Role::Receiver {
            at: self.at,
            service: self.service.clone(),
            kind: self.kind.clone(),
            readers: self.readers as u32,
        };
        let sender =
            Role::Sender { socket: self.socket.clone(), to: self.at, size: self.kind.size };
        [receiver, sender]
    }

    /// The tasks of all readers.
    pub(super) fn subscriber_tasks(&self) -> impl Iterator<Item = SubscriberTask> {
        let (directory, topic) =
            (&self.service.directory, ("copies".to_owned(), self.kind.clone()));
        let reading =
            SubscriberTask::new(directory, vec![Some(topic)], &self.schedule, Wait::Block, None)
                .with_private(PAUSE_LINE, &self.private);
        std::iter::repeat_n(reading, self.readers as usize)
    }

    /// Result, compared with the topic's latency and its slowest stage, in microseconds.
    pub(super) fn measured(
        &self,
        results: &[WorkerResult],
        ours: Option<f64>,
        slowest: f64,
    ) -> Measured {
        let readers = &results[results.len() - self.readers as usize..];
        let managers = &results[..results.len() - readers.len()];
        let all: Histogram = found(readers).flat_map(|found| &found.topics).collect();
        let copied: Histogram = found(readers).map(|found| &found.private).collect();
        let wakeup = stages::Stage::Wakeup as usize;
        let notice: Histogram = found(readers).map(|found| &found.stages[wakeup]).collect();
        let receiver = found(managers).find(|found| found.topics.len() == 4);
        let of = |which: usize| {
            let found = receiver.and_then(|found| found.topics.get(which));
            found.and_then(|found| found.microseconds(0.5)).unwrap_or(0.0)
        };
        let stages = [
            ("copy out", of(0)),
            ("Unix socket", of(1)),
            ("TCP", of(2)),
            ("shared memory", of(3) + notice.microseconds(0.5).unwrap_or(0.0)),
            ("private copy", copied.microseconds(0.5).unwrap_or(0.0)),
        ];
        let sum: f64 = stages.iter().map(|(_, time)| time).sum();
        let p50_us = all.microseconds(0.5);
        let bound = (slowest > 0.0).then(|| sum / slowest);
        let ratio = p50_us.zip(ours).map(|(baseline, ours)| baseline / ours);
        Measured {
            p50_us,
            p99_us: all.microseconds(0.99),
            stages: stages.map(|(stage, p50_us)| Stage { stage, p50_us }).to_vec(),
            bound,
            ratio,
            fraction_of_bound: ratio.zip(bound).map(|(ratio, bound)| ratio / bound),
        }
    }
}

#[derive(Debug, Clone, Serialize)]
struct Stage {
    stage: &'static str,
    p50_us: f64,
}

/// The result.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Measured {
    p50_us: Option<f64>,
    p99_us: Option<f64>,
    stages: Vec<Stage>,
    /// All its stages, relative to the slowest stage of the topic: the upper bound of the
    /// topic's advantage.
    bound: Option<f64>,
    /// The baseline's latency relative to the topic's; and that relative to the bound.
    ratio: Option<f64>,
    fraction_of_bound: Option<f64>,
}

impl Measured {
    pub(super) fn to_text(&self) -> String {
        let stages: String =
            self.stages.iter().map(|it| format!("{} {:.1}  ", it.stage, it.p50_us)).collect();
        format!(
            "baseline: p50 {}, p99 {} us: {}; that is {} times ours, {} of the bound, which is {}\n",
            format_figure(self.p50_us),
            format_figure(self.p99_us),
            stages.trim_end(),
            format_figure(self.ratio),
            format_figure(self.fraction_of_bound),
            format_figure(self.bound)
        )
    }
}

/// The publisher: its messages are in its own memory at the start.
pub(super) struct BaselinePublisher {
    socket: UnixStream,
    contents: Contents,
    memory: PrivateMemory,
    pageable: Vec<u8>,
    next: u64,
    is_awake: bool,
}

impl BaselinePublisher {
    pub(super) fn start(plan: &Plan, kind: &TopicKind) -> Result<Self, Failure> {
        let socket = connected(|| UnixStream::connect(&plan.socket))?;
        socket.set_read_timeout(Some(TIMEOUT)).map_err(failed("set a timeout"))?;
        let mut baseline_publisher = Self {
            socket,
            contents: Contents::new(kind, false),
            memory: PrivateMemory::new(&kind.memory, kind.size)?,
            pageable: vec![1; kind.size as usize],
            next: 0,
            is_awake: true,
        };
        for (round, count) in WARMUP_ROUNDS {
            for _ in 0..count {
                baseline_publisher.publish(round, UNTIMED)?;
            }
        }
        Ok(baseline_publisher)
    }

    /// Publishes messages, each when all readers have copied the one before.
    pub(super) fn turn(&mut self, shared: &SharedSegment, count: u64) -> Result<(), Failure> {
        self.wake(shared)?;
        for _ in 0..count {
            self.publish(Round::Timed, TIMED)?;
        }
        self.is_awake = false;
        Ok(())
    }

    /// The last messages, which are verified again, end all processes.
    pub(super) fn end(&mut self, shared: &SharedSegment) -> Result<(), Failure> {
        self.wake(shared)?;
        for _ in 1..VERIFIED_MESSAGES {
            self.publish(Round::Verify, UNTIMED)?;
        }
        self.publish(Round::Verify, LAST)
    }

    fn wake(&mut self, shared: &SharedSegment) -> Result<(), Failure> {
        if !self.is_awake {
            next_turn(shared, PAUSE_LINE)?;
            self.is_awake = true;
        }
        Ok(())
    }

    fn publish(&mut self, round: Round, kind: u64) -> Result<(), Failure> {
        let Self { socket, contents, memory, pageable, next, .. } = self;
        contents.write(*next, round, |offset, part| memory.put(offset, part))?;
        let begun = now();
        memory.take(pageable)?;
        let words = [begun, kind, now(), 0, *next].map(u64::to_le_bytes).concat();
        let sent = socket.write_all(&words).and_then(|()| socket.write_all(pageable));
        sent.map_err(failed("send to the manager"))?;
        *next += 1;
        let mut done = DONE;
        socket.read_exact(&mut done).map_err(failed("wait for the manager"))
    }
}

/// Messages before the first that counts.
const WARMUP_ROUNDS: [(Round, u64); 2] =
    [(Round::Verify, VERIFIED_MESSAGES), (Round::Warmup, WARMUP)];

/// The schedule of readers.
fn schedule(each: u64) -> Vec<Turn> {
    let turn = |round, count| Turn::new(TurnTarget::Topic(0), round, count);
    let timed = (0..ROUNDS).flat_map(|_| [turn(Round::Timed, each), Turn::pause()]);
    let beginning = WARMUP_ROUNDS.map(|(round, count)| turn(round, count));
    beginning.into_iter().chain(timed).chain([turn(Round::Verify, VERIFIED_MESSAGES)]).collect()
}

/// Connects, with retries: the other process may not listen yet.
fn connected<T>(connect: impl Fn() -> std::io::Result<T>) -> Result<T, Failure> {
    let end = Instant::now() + TIMEOUT;
    loop {
        match connect() {
            Err(_) if Instant::now() < end => std::thread::sleep(Duration::from_millis(2)),
            connected => return connected.map_err(failed("connect")),
        }
    }
}

/// Runs a manager.
pub(super) fn take(
    role: &Role,
    ready: impl FnOnce() -> Result<(), Failure>,
) -> Result<WorkerResult, Failure> {
    match role {
        Role::Sender { socket, to, size } => {
            let listener = UnixListener::bind(socket).map_err(failed("listen"))?;
            ready()?;
            let (mut from, _) = listener.accept().map_err(failed("accept a connection"))?;
            let mut to = connected(|| TcpStream::connect(to))?;
            to.set_nodelay(true).map_err(failed("set a socket option"))?;
            let mut message = vec![0; HEADER + *size as usize];
            loop {
                from.read_exact(&mut message).map_err(failed("receive a message"))?;
                message[24..32].copy_from_slice(&now().to_le_bytes());
                to.write_all(&message).map_err(failed("send a message"))?;
                let mut done = DONE;
                to.read_exact(&mut done).map_err(failed("wait for the other manager"))?;
                from.write_all(&done).map_err(failed("notify the publisher"))?;
                if word(&message, 1) == LAST {
                    return Ok(empty_result(0));
                }
            }
        }
        Role::Receiver { at, service, kind, readers } => {
            let node = serve(service)?;
            let topic = node.topic("copies", &kind.settings()?)?;
            let publisher = topic.publisher()?;
            let listener = TcpListener::bind(at).map_err(failed("listen"))?;
            ready()?;
            let (mut from, _) = listener.accept().map_err(failed("accept a connection"))?;
            from.set_nodelay(true).map_err(failed("set a socket option"))?;
            let mut message = vec![0; HEADER + kind.size as usize];
            let mut times: [Histogram; 4] = Default::default();
            debug_assert!(publisher.subscribers() == *readers);
            loop {
                from.read_exact(&mut message).map_err(failed("receive a message"))?;
                let received = now();
                let [begun, message_kind, copied, sent, number] =
                    [0, 1, 2, 3, 4].map(|at| word(&message, at));
                let mut loan = publisher.loan(kind.size, TIMEOUT)?;
                loan.write(0, &message[HEADER..])?;
                let stamps = Stamps { published: begun, loan: 0, fill: 0, number };
                loan.set_metadata(&stamps.bytes())?;
                let lent = now();
                loan.publish(TIMEOUT)?;
                let ends = [begun, copied, sent, received, lent];
                if message_kind == TIMED {
                    for (samples, stage) in times.iter_mut().zip(ends.windows(2)) {
                        samples.add(stage[1].saturating_sub(stage[0]));
                    }
                }
                publisher.flush(TIMEOUT)?;
                from.write_all(&DONE).map_err(failed("notify the other manager"))?;
                if message_kind == LAST {
                    let found = TopicResult { topics: times.into(), ..TopicResult::default() };
                    return Ok(WorkerResult { detail: Some(found), ..empty_result(0) });
                }
            }
        }
    }
}

fn word(message: &[u8], at: usize) -> u64 {
    message[at * 8..at * 8 + 8].try_into().map_or(0, u64::from_le_bytes)
}
