//! `fabricast sub`: reads messages, and writes, checks or measures them.

mod sink;

use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use pubsub::{ErrorKind, Event, Node, PublisherId, Reliability, Sample, Subscriber, Way};
use serde_json::{Value, json};

use self::sink::Sink;
use super::exit::{Exit, Failure, report_as_json};
use super::hints::{self, NodeHints, Phase};
use super::membership::{self, Wanted, place, with_remedy};
use super::pattern::{Checker, Fault};
use super::progress::{Progress, so_far};
use super::service::AwaitedService;
use super::settings::{ALL, Options, Settings, seconds};
use super::signals::{Deadline, Signals, interrupted};
use super::statistics::{self, Statistics};
use super::{size, text};

/// Reads all messages of a topic that are published from now on, and writes them to standard
/// output, unless something else is asked for.
///
/// Waits until somebody makes the topic, at this node or at one that it is connected to, unless
/// options or other settings say what it is to be like. Ends after --count messages, or by Ctrl-C.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The topic
    #[arg(value_parser = membership::topic_name)]
    topic: String,
    /// Put an end of line behind each message
    #[arg(long, conflicts_with = "into")]
    lines: bool,
    /// Append messages to this file
    #[arg(long, value_name = "FILE", conflicts_with = "into")]
    file: Option<PathBuf>,
    /// Write each message to a file of its own in this directory: 00000001, 00000002, …, behind those that are
    /// there already
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
    /// Such a line also so often before, for who watches
    #[arg(long, value_name = "SECONDS", value_parser = seconds, requires = "json", hide = true)]
    every: Option<Duration>,
    #[command(flatten)]
    settings: Options<ALL>,
}

impl Arguments {
    fn sink(&self, signals: &Signals) -> Result<Sink, Failure> {
        match (&self.file, &self.into) {
            (Some(file), _) => Sink::file(file, signals),
            (None, Some(directory)) => Sink::directory(directory),
            (None, None) if self.writes() => Ok(Sink::output()),
            (None, None) => Ok(Sink::Nowhere),
        }
    }

    /// Do messages go to standard output, if to no file?
    fn writes(&self) -> bool {
        !(self.check || self.stats || self.json)
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let signals = Signals::catch()?;
    let settings = arguments.settings.settings()?;
    if arguments.lines && arguments.file.is_none() && !arguments.writes() {
        let why = "--lines: with --check, --stats or --json messages go to a file only: say which with \
                   --file";
        return Err(Failure::new(Exit::Usage, why));
    }
    let mut outcome = Outcome::default();
    let done = match read(arguments, &settings, &signals, &mut outcome) {
        // Wherever it was: the usual way to end, unless a number of messages was to come.
        Err(failure) if failure.exit() == interrupted().exit() && arguments.count.is_none() => {
            Ok(())
        }
        done => done,
    };
    // Whoever reads the last line may be slow, too.
    signals.let_go();
    let is_complete = done.is_ok();
    if arguments.json {
        let done = worst(done, outcome.judge());
        return report_as_json(done, &outcome.report(arguments, is_complete));
    }
    let told = outcome.tell(arguments);
    worst(done, outcome.judge()).and(told)
}

/// What is wrong with the data goes before why there was no more of it.
fn worst(done: Result<(), Failure>, judged: Result<(), Failure>) -> Result<(), Failure> {
    match (done, judged) {
        (done, Ok(())) => done,
        (Err(done), Err(judged)) if !done.is_silent() => {
            Err(Failure::new(judged.exit(), format!("{judged}; {done}")))
        }
        (_, judged) => judged,
    }
}

/// All that there is to do, up to where it fails.
fn read(
    arguments: &Arguments,
    settings: &Settings,
    signals: &Signals,
    outcome: &mut Outcome,
) -> Result<(), Failure> {
    let sink = arguments.sink(signals)?;
    let service = AwaitedService::of(&settings.directory.value);
    let options = membership::options(settings, "sub");
    let node = membership::join(settings, options, &service, signals)?;
    outcome.node = Some(node.identity());
    let (service, name) = (&service, &*arguments.topic);
    let wanted = Wanted { node: &node, name, settings, service, signals };
    let mut node_hints = NodeHints::begin();
    let topic = wanted.open_to_read(arguments.timeout, &mut node_hints)?;
    let like = topic.settings()?;
    let subscriber = topic.subscriber().map_err(with_remedy)?;
    outcome.has_begun = true;
    outcome.is_reliable = like.reliability == Reliability::Reliable;
    let mut work = Work {
        arguments,
        signals,
        subscriber,
        progress: (!matches!(sink, Sink::Output { .. })).then(Progress::start),
        sink,
        checker: Checker::default(),
        outcome,
        buffer: Vec::new(),
        began: Instant::now(),
        says_where: false,
        node_hints,
        publisher: None,
    };
    let done = work.read_all(&node);
    // It may have been evicted in the middle of a message.
    work.hear_of_events();
    work.outcome.missed = work.missed();
    done
}

/// What became of messages.
#[derive(Debug, Default)]
struct Outcome {
    /// The node's identity, once it is known.
    node: Option<String>,
    is_reliable: bool,
    has_begun: bool,
    statistics: Statistics,
    missed: u64,
    /// Was it evicted from its topic?
    is_evicted: bool,
    /// It was evicted while it read a message, which therefore counts as missed.
    is_last_unread: bool,
    /// Messages that were not what they should be.
    altered: u64,
    publishers_lost: u64,
    /// By which ways messages came.
    ways: Vec<Way>,
}

struct Work<'a> {
    arguments: &'a Arguments,
    signals: &'a Signals,
    subscriber: Subscriber,
    sink: Sink,
    checker: Checker,
    outcome: &'a mut Outcome,
    buffer: Vec<u8>,
    progress: Option<Progress>,
    began: Instant,
    says_where: bool,
    node_hints: NodeHints,
    /// The one of this node that published the last message.
    publisher: Option<PublisherId>,
}

/// How long no message may come before it is said where it waits.
const QUIET: Duration = Duration::from_secs(1);
/// What is read of a message at a time.
const CHUNK: u64 = 1 << 20;
/// Faults that are told of one by one.
const MOST_TOLD: u64 = 10;

impl Work<'_> {
    fn read_all(&mut self, node: &Node) -> Result<(), Failure> {
        let mut deadline = Deadline::after(self.arguments.timeout);
        let wanted = self.arguments.count.unwrap_or(u64::MAX);
        let mut told: Option<Instant> = None;
        while self.outcome.statistics.messages < wanted {
            self.signals.go_on()?;
            if let Some(pause) = self.arguments.every
                && told.is_none_or(|told| told.elapsed() >= pause)
            {
                told = Some(Instant::now());
                self.outcome.missed = self.missed();
                text::json(&self.outcome.report(self.arguments, false))?;
            }
            let pulled = self.subscriber.pull(deadline.slice());
            self.hear_of_events();
            match pulled {
                Ok(sample) => {
                    let read = self.read(&sample);
                    self.outcome.is_last_unread = read.is_err() && !sample.is_valid();
                    read?;
                    drop(sample);
                    deadline = Deadline::after(self.arguments.timeout);
                }
                Err(error) if error.kind() == ErrorKind::DeadlineExceeded => {
                    if self.signals.ask_to_end() {
                        return Err(interrupted());
                    }
                    if deadline.is_over() {
                        let topic = self.arguments.topic.escape_debug();
                        let cause = self.node_hints.cause(node, &self.arguments.topic);
                        let why = format!(
                            "read topic \"{topic}\" failed: no message came in time (--timeout){cause}"
                        );
                        return Err(Failure::new(Exit::Deadline, why));
                    }
                    if self.outcome.statistics.messages == 0 {
                        self.say_where_it_waits(node);
                    }
                }
                Err(error) => return Err(error.into()),
            }
            let phase = match self.outcome.statistics.messages {
                0 => Phase::Waiting,
                _ => Phase::Flowing,
            };
            let lines = self.node_hints.look(node, &self.arguments.topic, phase);
            self.say(&lines);
            if let Some(progress) = &mut self.progress {
                let Statistics { messages, bytes, .. } = self.outcome.statistics;
                progress.say(messages, bytes, "");
            }
        }
        Ok(())
    }

    fn say(&mut self, lines: &[String]) {
        if let Some(progress) = self.progress.as_mut().filter(|_| !lines.is_empty()) {
            progress.clear();
        }
        hints::say(lines);
    }

    /// That a publisher was killed, or its node says so.
    fn say_that_publisher_is_lost(&mut self, place: &str, which: &str) {
        self.outcome.publishers_lost += 1;
        let topic = self.arguments.topic.escape_debug();
        self.say(&[format!(
            "topic \"{topic}\": a publisher{place} ended without leaving ({which}); its last messages may be missing"
        )]);
    }

    /// Says once, if no message has come for a while, where messages would have to be published.
    fn say_where_it_waits(&mut self, node: &Node) {
        if !self.says_where && self.began.elapsed() >= QUIET {
            self.says_where = true;
            let (topic, place) = (self.arguments.topic.escape_debug(), place(node));
            text::complain(&format!(
                "fabricast: waiting for messages of topic \"{topic}\" {place}"
            ));
        }
    }

    fn hear_of_events(&mut self) {
        while let Some(event) = self.subscriber.poll_event() {
            match event {
                Event::Gap { missed } => {
                    tracing::info!(
                        missed,
                        "messages were dropped before they were read, or never written"
                    );
                }
                Event::PublisherLost { publisher } => {
                    let which = self.node_hints.name_of_publisher(publisher);
                    self.say_that_publisher_is_lost("", &which);
                }
                Event::PublisherLostElsewhere { node, publisher } => {
                    let name = self.node_hints.name_of_node(node);
                    let place = format!(" at node \"{}\"", name.escape_debug());
                    self.say_that_publisher_is_lost(&place, &format!("publisher {publisher}"));
                }
                Event::Evicted { held_for } => {
                    self.outcome.is_evicted = true;
                    let held_for = held_for.map(|it| tracing::field::display(text::plain_time(it)));
                    tracing::warn!(held_for, "evicted from the topic: too slow");
                }
                _ => {}
            }
        }
    }

    fn read(&mut self, sample: &Sample) -> Result<(), Failure> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let now = now.map_or(0, |since| since.as_nanos() as u64);
        if self.arguments.check {
            self.check(sample)?;
        }
        if self.sink.takes() {
            self.write(sample)?;
        }
        // A report names its process, as long as it is there.
        let publisher = sample.origin().is_none().then(|| sample.publisher());
        if publisher != self.publisher {
            self.publisher = publisher;
            publisher.into_iter().for_each(|publisher| self.node_hints.expect(publisher));
        }
        let way = sample.way();
        if !self.outcome.ways.contains(&way) {
            self.outcome.ways.push(way);
        }
        // Only now has it arrived where it was to go.
        // Clocks of other nodes may be ahead.
        let latency = now.saturating_sub(sample.published_at());
        self.outcome.statistics.add(sample.length(), latency, statistics::took(sample, now));
        Ok(())
    }

    fn check(&mut self, sample: &Sample) -> Result<(), Failure> {
        let read = |offset: u64, to: &mut [u8]| -> Result<(), Failure> {
            self.signals.go_on()?;
            Ok(sample.read(offset, to)?)
        };
        let (content, fault) = self.checker.check(sample.length(), read)?;
        if let Some(fault) = fault {
            self.outcome.altered += 1;
            if self.outcome.altered <= MOST_TOLD {
                let number = content.map(|content| content.number);
                say_fault(self.outcome.statistics.messages + 1, number, fault);
            }
        }
        Ok(())
    }

    fn write(&mut self, sample: &Sample) -> Result<(), Failure> {
        let length = sample.length();
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
        let missed = self.subscriber.missed() + u64::from(self.outcome.is_last_unread);
        // What the topic dropped is missing in the numbers of a pattern, too.
        missed.max(self.checker.missed)
    }
}

impl Outcome {
    /// What is to be said at the end about messages that came.
    fn judge(&self) -> Result<(), Failure> {
        if self.altered > 0 {
            return Err(Failure::new(Exit::Corrupt, text::altered(self.altered)));
        }
        match self.missed {
            missed if missed > 0 && self.is_reliable => {
                let why = text::one_or(missed, "message is missing", "messages are missing");
                Err(Failure::new(Exit::Missed, why))
            }
            _ => Ok(()),
        }
    }

    /// What was read, also if it was less than all, for programs.
    fn report(&self, arguments: &Arguments, is_complete: bool) -> Value {
        let Statistics { messages, bytes, .. } = self.statistics;
        json!({
            "topic": arguments.topic,
            "node": self.node,
            "messages": messages,
            "bytes": bytes,
            "seconds": self.statistics.time().as_secs_f64(),
            "messages_per_s": self.statistics.messages_per_second(),
            "bytes_per_s": self.statistics.bytes_per_second(),
            "missed": self.missed,
            "evicted": self.is_evicted,
            "altered": arguments.check.then_some(self.altered),
            "publishers_lost": self.publishers_lost,
            "paths": self.ways.iter().map(Way::to_string).collect::<Vec<_>>(),
            "latencies": self.statistics.latencies(),
            "complete": is_complete,
        })
    }

    /// The same for people.
    fn tell(&self, arguments: &Arguments) -> Result<(), Failure> {
        let Statistics { messages, bytes, .. } = self.statistics;
        let per_second = self.statistics.bytes_per_second();
        if !self.has_begun {
            // There is nothing to tell of.
            return Ok(());
        }
        // Of one message no rate is known.
        let all = so_far(messages, bytes, (per_second > 0.0).then_some(per_second));
        let mut line = format!("{}: {all}", arguments.topic.escape_debug());
        if self.missed > 0 {
            line.push_str(&format!("; {} missed", self.missed));
        }
        if self.is_evicted {
            line.push_str("; evicted for being too slow");
        }
        if arguments.check {
            let altered =
                text::one_or(self.altered, "not what it should be", "not what they should be");
            line.push_str(&format!("; {altered}"));
        }
        line.push('\n');
        if arguments.stats {
            line.push_str(&self.statistics.table());
        }
        let is_output = arguments.file.is_none() && arguments.into.is_none() && arguments.writes();
        if is_output {
            // There, only messages are to be found.
            text::complain(line.trim_end());
            return Ok(());
        }
        text::print(&line)
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
    text::complain(&format!("fabricast: message {message}{number}: {what}"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_worst_for_the_data_is_said_and_nothing_is_left_out() {
        let fail = |exit, why: &str| Err(Failure::new(exit, why));
        let code = |done, judged| worst(done, judged).map_err(|failure| failure.exit());
        assert_eq!(code(Ok(()), Ok(())), Ok(()));
        assert_eq!(code(fail(Exit::Deadline, "late"), Ok(())), Err(Exit::Deadline));
        assert_eq!(code(Ok(()), fail(Exit::Corrupt, "bad")), Err(Exit::Corrupt));
        let silent = Err(Failure::silent(Exit::Unread));
        assert_eq!(code(silent, fail(Exit::Missed, "less")), Err(Exit::Missed));
        let both = worst(fail(Exit::Interrupted, "interrupted"), fail(Exit::Corrupt, "bad"));
        let both = both.unwrap_err();
        assert_eq!((both.exit(), both.to_string().as_str()), (Exit::Corrupt, "bad; interrupted"));
    }
}
