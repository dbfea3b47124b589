//! A reader of a measurement.

use std::path::{Path, PathBuf};
use std::time::Instant;

use pubsub::{Sample, Subscriber};
use serde::{Deserialize, Serialize};

use super::contents::Contents;
use super::message_stamps::{Stamps, now};
use super::node::join;
use super::private_copy::PrivateMemory;
use super::queue_baseline::QueueBaselineReader;
use super::schedule::{Round, TIMEOUT, Turn, TurnTarget};
use super::shared_words::pause;
use super::topic_results::{WorkerResult, empty_result};
use super::{TopicKind, TopicResult};
use crate::exchange::plan::Wait;
use crate::process::{pin, processor_time};
use crate::worker_group::{SharedSegment, empty_histogram};
use command::exit::{Exit, Failure};
use command::stages::{self, Stage};

/// The task of a reader.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct SubscriberTask {
    directory: PathBuf,
    /// None: not a topic of this reader.
    topics: Vec<Option<(String, TopicKind)>>,
    schedule: Vec<Turn>,
    waiting: Wait,
    core: Option<usize>,
    /// The reader's pause line.
    line: usize,
    /// The reader's own memory, to which it copies each message before the time is taken.
    private: Option<String>,
}

impl SubscriberTask {
    pub(super) fn new(
        directory: &Path,
        topics: Vec<Option<(String, TopicKind)>>,
        schedule: &[Turn],
        waiting: Wait,
        core: Option<usize>,
    ) -> Self {
        let (directory, schedule) = (directory.to_owned(), schedule.to_vec());
        Self { directory, topics, schedule, waiting, core, line: 0, private: None }
    }

    /// Pauses in another line, and copies messages to its own memory.
    pub(super) fn with_private(self, line: usize, memory: &str) -> Self {
        Self { line, private: Some(memory.to_owned()), ..self }
    }
}

/// A topic of the reader.
struct TimedSubscriber {
    subscriber: Subscriber,
    contents: Contents,
    next: u64,
}

pub(super) fn read(
    shared: &SharedSegment,
    reading: &SubscriberTask,
    ready: impl FnOnce() -> Result<(), Failure>,
) -> Result<WorkerResult, Failure> {
    let node = join(&reading.directory, "reader", reading.waiting)?;
    let mut lines = Vec::new();
    for topic in &reading.topics {
        let Some((name, kind)) = topic else {
            lines.push(None);
            continue;
        };
        let subscriber = node.topic(name, &kind.settings()?)?.subscriber()?;
        lines.push(Some(TimedSubscriber {
            subscriber,
            contents: Contents::new(kind, false),
            next: 0,
        }));
    }
    let has_queue = reading.schedule.iter().any(|turn| turn.what == TurnTarget::Queue);
    let mut queue =
        has_queue.then(|| QueueBaselineReader::new(shared, reading.waiting)).transpose()?;
    let size = reading.topics.iter().flatten().map(|(_, kind)| kind.size).max().unwrap_or(0);
    let private = reading.private.as_deref().map(|memory| PrivateMemory::new(memory, size));
    let mut reader = Reader {
        private: private.transpose()?,
        verified: true,
        iterations: 0,
        found: TopicResult {
            topics: lines.iter().map(|_| empty_histogram()).collect(),
            queue: empty_histogram(),
            stages: std::array::from_fn(|_| empty_histogram()),
            private: empty_histogram(),
            ..TopicResult::default()
        },
    };
    // Threads started until now do not disturb the measurement.
    if let Some(core) = reading.core {
        pin(core)?;
    }
    let mut pauses = 0;
    ready()?;
    let begin = Instant::now();
    for turn in &reading.schedule {
        match turn.what {
            TurnTarget::Pause => {
                pauses += 1;
                pause(shared, reading.line, pauses)?;
            }
            TurnTarget::Queue => {
                let Some(queue) = &mut queue else { continue };
                let is_timed = turn.round == Round::Timed;
                let samples = &mut reader.found.queue;
                reader.verified &= queue.read(turn.count, |time| {
                    if is_timed {
                        samples.add(time);
                    }
                })?;
            }
            TurnTarget::Topic(topic) => {
                if let Some(line) = lines.get_mut(topic).and_then(Option::as_mut) {
                    reader.turn(line, topic, *turn)?;
                }
            }
        }
    }
    Ok(WorkerResult {
        elapsed: begin.elapsed().as_nanos() as u64,
        iterations: reader.iterations,
        verified: reader.verified,
        detail: Some(reader.found),
        ..empty_result(0)
    })
}

struct Reader {
    private: Option<PrivateMemory>,
    verified: bool,
    iterations: u64,
    found: TopicResult,
}

impl Reader {
    fn turn(
        &mut self,
        line: &mut TimedSubscriber,
        topic: usize,
        turn: Turn,
    ) -> Result<(), Failure> {
        let is_timed = turn.round == Round::Timed;
        let processor_time_before = processor_time();
        let (mut first, mut last) = (None, 0);
        for _ in 0..turn.count {
            let sample = line.subscriber.pull(TIMEOUT)?;
            let received = now();
            let mut pulled = received;
            if let Some(private) = &mut self.private {
                private.copy(&sample)?;
                pulled = now();
            }
            let Some(stamps) = Stamps::of(&sample.metadata()) else {
                return Err(Failure::new(Exit::DataCorrupted, "received a message without stamps"));
            };
            if is_timed {
                let before = stamps.loan + stamps.fill;
                let time = pulled.saturating_sub(stamps.published) + before;
                self.found.topics[topic].add(time);
                self.add_stages(&sample, stamps, received);
                if self.private.is_some() {
                    self.found.private.add(pulled.saturating_sub(received));
                }
            }
            let read = |offset, to: &mut [u8]| Ok(sample.read(offset, to)?);
            let is_right = line.contents.is_right(line.next, turn.round, sample.length(), read)?;
            self.verified &= is_right && stamps.number == line.next;
            line.next += 1;
            if self.found.path.is_empty() {
                self.found.path = sample.path().to_string();
            }
            let releasing = now();
            drop(sample);
            if is_timed {
                let time = now().saturating_sub(releasing);
                self.found.stages[Stage::Release as usize].add(time);
            }
            first.get_or_insert(received);
            last = received;
        }
        if is_timed && topic == 0 {
            self.found.processor_time += processor_time() - processor_time_before;
        }
        self.iterations += turn.count;
        if let (Round::Stream, Some(first)) = (turn.round, first) {
            self.found.streams.push((last.saturating_sub(first), turn.count));
        }
        Ok(())
    }

    fn add_stages(&mut self, sample: &Sample, stamps: Stamps, pulled: u64) {
        let is_remote = sample.origin().is_some();
        let mut all = stages::durations(&sample.times(), is_remote, stamps.published, pulled);
        all[Stage::Loan as usize] = Some(stamps.loan);
        all[Stage::Fill as usize] = Some(stamps.fill).filter(|fill| *fill > 0);
        for (samples, duration) in self.found.stages.iter_mut().zip(all) {
            if let Some(duration) = duration {
                samples.add(duration);
            }
        }
    }
}
