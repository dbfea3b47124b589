//! `fabricast sub`: reads messages, and writes, checks or measures them.

mod sink;
mod statistics;

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use pubsub::{ErrorKind, Event, Node, Reliability, Sample, Subscriber, Topic};
use serde_json::json;

use self::sink::Sink;
use self::statistics::Statistics;
use super::exit::{Exit, Failure};
use super::membership;
use super::pattern::{Checker, Fault};
use super::progress::{Progress, amount};
use super::settings::{All, Options, seconds};
use super::signals::{Deadline, Signals, interrupted};
use super::{size, text};

/// Reads all messages of a topic that are published from now on, and writes them to standard
/// output, unless something else is asked for.
///
/// Waits until somebody makes the topic, unless options or other settings say what it is to be
/// like. Ends after --count messages, or by Ctrl-C.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The topic
    topic: String,
    /// Put an end of line behind each message
    #[arg(long, conflicts_with = "into")]
    lines: bool,
    /// Append messages to this file
    #[arg(long, value_name = "FILE", conflicts_with = "into")]
    file: Option<PathBuf>,
    /// Write each message to a file of its own in this directory: 00000001, 00000002, …
    #[arg(long, value_name = "DIRECTORY")]
    into: Option<PathBuf>,
    /// Check that every message is one of `fabricast pub --pattern`, whole, and the next one
    #[arg(long)]
    check: bool,
    /// Tell how many came in which time, and how long each stage of their way took
    #[arg(long)]
    stats: bool,
    /// End after so many messages [default: with Ctrl-C]
    #[arg(long, value_parser = size::parse_positive)]
    count: Option<u64>,
    /// The longest wait for a message [default: none]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    timeout: Option<Duration>,
    /// One JSON line about what was read; messages then are not written to standard output
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    settings: Options<All>,
}

impl Arguments {
    fn sink(&self) -> Result<Sink, Failure> {
        match (&self.file, &self.into) {
            (Some(file), _) => Sink::file(file),
            (None, Some(directory)) => Sink::directory(directory),
            (None, None) if self.check || self.stats || self.json => Ok(Sink::Nowhere),
            (None, None) => Ok(Sink::output()),
        }
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let signals = Signals::catch()?;
    let settings = arguments.settings.settings()?;
    let sink = arguments.sink()?;
    let node = membership::join(&settings, "sub", &signals)?;
    let (name, timeout) = (&arguments.topic, arguments.timeout);
    let topic = membership::topic_to_read(&node, name, &settings, timeout, &signals)?;
    let Some(topic) = topic else { return end_of(arguments) };
    let mut work = Work::new(arguments, &signals, &node, topic, sink)?;
    let done = work.read_all();
    drop(work.progress.take());
    let told = work.tell(&done);
    done.and_then(|()| work.judge()).and(told)
}

/// Asked to end: the usual way, unless a number of messages was to come.
fn end_of(arguments: &Arguments) -> Result<(), Failure> {
    if arguments.count.is_some() { Err(interrupted()) } else { Ok(()) }
}

struct Work<'a> {
    arguments: &'a Arguments,
    signals: &'a Signals,
    subscriber: Subscriber,
    identity: String,
    is_reliable: bool,
    sink: Sink,
    checker: Checker,
    statistics: Statistics,
    /// Messages that were not what they should be.
    altered: u64,
    publishers_lost: u64,
    buffer: Vec<u8>,
    progress: Option<Progress>,
}

/// What is read of a message at a time.
const CHUNK: u64 = 1 << 20;
/// Faults that are told of one by one.
const MOST_TOLD: u64 = 10;

impl<'a> Work<'a> {
    fn new(
        arguments: &'a Arguments,
        signals: &'a Signals,
        node: &Node,
        topic: Topic,
        sink: Sink,
    ) -> Result<Self, Failure> {
        Ok(Self {
            arguments,
            signals,
            subscriber: topic.subscriber()?,
            identity: node.identity(),
            is_reliable: topic.settings()?.reliability == Reliability::Reliable,
            progress: (!matches!(sink, Sink::Output(_))).then(Progress::start),
            sink,
            checker: Checker::default(),
            statistics: Statistics::new(),
            altered: 0,
            publishers_lost: 0,
            buffer: Vec::new(),
        })
    }

    fn read_all(&mut self) -> Result<(), Failure> {
        let mut deadline = Deadline::after(self.arguments.timeout);
        while self.arguments.count.is_none_or(|count| self.statistics.messages < count) {
            // A look at signals is a call of the system, too dear for each of very many.
            let is_time_to_look = self.statistics.messages.is_multiple_of(64);
            if is_time_to_look && self.signals.ask_to_end() {
                return end_of(self.arguments);
            }
            let pulled = self.subscriber.pull(deadline.slice());
            self.hear_of_events();
            match pulled {
                Ok(sample) => {
                    self.read(&sample)?;
                    drop(sample);
                    deadline = Deadline::after(self.arguments.timeout);
                }
                Err(error) if error.kind() == ErrorKind::DeadlineExceeded => {
                    if self.signals.ask_to_end() {
                        return end_of(self.arguments);
                    }
                    if deadline.is_over() {
                        return Err(Failure::new(Exit::Deadline, "no message came in time"));
                    }
                }
                Err(error) => return Err(error.into()),
            }
            if let Some(progress) = &mut self.progress {
                progress.say(self.statistics.messages, self.statistics.bytes, "");
            }
        }
        Ok(())
    }

    fn hear_of_events(&mut self) {
        while let Some(event) = self.subscriber.poll_event() {
            match event {
                Event::Gap { missed } => {
                    tracing::info!(missed, "messages were dropped before they were read");
                }
                Event::PublisherLost { publisher } => {
                    self.publishers_lost += 1;
                    tracing::warn!(%publisher, "a publisher died");
                }
                Event::Evicted { held_for } => {
                    tracing::warn!(?held_for, "removed from the topic: too slow");
                }
                _ => {}
            }
        }
    }

    fn read(&mut self, sample: &Sample) -> Result<(), Failure> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let now = now.map_or(0, |since| since.as_nanos() as u64);
        let length = sample.length();
        self.statistics.add(length, sample.published_at(), sample.times(), now);
        if self.arguments.check {
            let read = |offset: u64, to: &mut [u8]| sample.read(offset, to);
            let (content, fault) = self.checker.check(length, read)?;
            if let Some(fault) = fault {
                self.altered += 1;
                if self.altered <= MOST_TOLD {
                    let number = content.map(|content| content.number);
                    say_fault(self.statistics.messages, number, fault);
                }
            }
        }
        if !self.sink.takes() {
            return Ok(());
        }
        self.sink.begin()?;
        let mut offset = 0;
        while offset < length {
            let part = (length - offset).min(CHUNK);
            self.buffer.resize(part as usize, 0);
            sample.read(offset, &mut self.buffer)?;
            self.sink.write(&self.buffer, self.signals)?;
            offset += part;
        }
        if self.arguments.lines {
            self.sink.write(b"\n", self.signals)?;
        }
        self.sink.end()
    }

    fn missed(&self) -> u64 {
        // What the topic dropped is missing in the numbers of a pattern, too.
        self.subscriber.missed().max(self.checker.missed)
    }

    /// What is to be said at the end about messages that came.
    fn judge(&self) -> Result<(), Failure> {
        if self.altered > 0 {
            let why = format!("{} messages were not what they should be", self.altered);
            return Err(Failure::new(Exit::Corrupt, why));
        }
        match self.missed() {
            missed if missed > 0 && self.is_reliable => {
                Err(Failure::new(Exit::Missed, format!("{missed} messages are missing")))
            }
            _ => Ok(()),
        }
    }

    fn tell(&self, done: &Result<(), Failure>) -> Result<(), Failure> {
        let Statistics { messages, bytes, .. } = self.statistics;
        let per_second = self.statistics.bytes_per_second();
        if self.arguments.json {
            let line = json!({
                "topic": self.subscriber.topic(),
                "node": self.identity,
                "messages": messages,
                "bytes": bytes,
                "seconds": self.statistics.time().as_secs_f64(),
                "messages_per_s": self.statistics.messages_per_second(),
                "bytes_per_s": per_second,
                "missed": self.missed(),
                "altered": self.arguments.check.then_some(self.altered),
                "publishers_lost": self.publishers_lost,
                "latencies": self.statistics.latencies(),
                "complete": done.is_ok(),
            });
            return text::print(&format!("{line}\n"));
        }
        let mut line = format!(
            "{}: {messages} messages, {}, {}/s",
            self.subscriber.topic(),
            amount(bytes as f64),
            amount(per_second)
        );
        if self.missed() > 0 {
            line.push_str(&format!("; {} missed", self.missed()));
        }
        if self.arguments.check {
            line.push_str(&format!("; {} not what they should be", self.altered));
        }
        line.push('\n');
        if self.arguments.stats {
            line.push_str(&text::table(&self.statistics.table()));
        }
        match self.sink {
            // There, only messages are to be found.
            Sink::Output(_) => eprint!("{line}"),
            _ => text::print(&line)?,
        }
        Ok(())
    }
}

fn say_fault(message: u64, number: Option<u64>, fault: Fault) {
    let number = number.map(|number| format!(", number {number}")).unwrap_or_default();
    let what = match fault {
        Fault::Strange => "is none of a pattern, or its header was altered".to_owned(),
        Fault::Length { said, found } => format!("has {found} bytes, and says {said}"),
        Fault::Altered { at } => format!("was altered at byte {at}"),
        Fault::OutOfOrder { after } => format!("came after number {after}"),
    };
    eprintln!("fabricast: message {message}{number}: {what}");
}
