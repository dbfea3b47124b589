//! `fabricast sub`: reads messages, and writes, checks or measures them.

mod sink;

use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use pubsub::{DeliveryPath, ErrorKind, Event, Node, PublisherId, Reliability, Sample, Subscriber};
use serde_json::{Value, json};

use self::sink::Sink;
use super::connectivity::{self, ConnectivityReporter, Phase};
use super::exit::{Exit, Failure, report_as_json};
use super::node_client::{self, TopicRequest, place, with_remedy};
use super::progress::{Progress, totals};
use super::service_wait::ServiceWait;
use super::settings::{ALL, Options, Settings, seconds};
use super::signals::{Deadline, Signals, interrupted};
use super::statistics::{self, Statistics};
use super::test_pattern::{Checker, Fault};
use super::{size, text};

/// Reads all messages of a topic that are published from now on, and writes them to standard
/// output, unless something else is asked for.
///
/// Waits until somebody makes the topic, at this node or at one that it is connected to, unless
/// options or other settings say what it is to be like. Ends after --count messages, or by Ctrl-C.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The topic
    #[arg(value_parser = node_client::topic_name)]
    topic: String,
    /// Write a line feed after each message
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
    /// Print the message rate and the latency of each stage
    #[arg(long)]
    stats: bool,
    /// Exit after this many messages [default: on Ctrl-C]
    #[arg(long, value_parser = size::parse_positive)]
    count: Option<u64>,
    /// Timeout for each message [default: none]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    timeout: Option<Duration>,
    /// One JSON line about what was read; messages then are not written to standard output
    #[arg(long)]
    json: bool,
    /// Such a line also so often before, for who watches
    #[arg(long, value_name = "SECONDS", value_parser = seconds, requires = "json", hide = true)]
    interval: Option<Duration>,
    #[command(flatten)]
    settings: Options<ALL>,
}

impl Arguments {
    fn sink(&self, signals: &Signals) -> Result<Sink, Failure> {
        match (&self.file, &self.into) {
            (Some(file), _) => Sink::file(file, signals),
            (None, Some(directory)) => Sink::directory(directory),
            (None, None) if self.writes_to_stdout() => Ok(Sink::output()),
            (None, None) => Ok(Sink::Discard),
        }
    }

    /// Do messages go to standard output, if to no file?
    fn writes_to_stdout(&self) -> bool {
        !(self.check || self.stats || self.json)
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let signals = Signals::catch()?;
    let settings = arguments.settings.settings()?;
    if arguments.lines && arguments.file.is_none() && !arguments.writes_to_stdout() {
        let why = "--lines: with --check, --stats or --json messages go to a file only: say which with \
                   --file";
        return Err(Failure::new(Exit::Usage, why));
    }
    let mut outcome = SubscribeSummary::default();
    let done = match read(arguments, &settings, &signals, &mut outcome) {
        // Wherever it was: the usual way to end, unless a number of messages was to come.
        Err(failure) if failure.exit() == interrupted().exit() && arguments.count.is_none() => {
            Ok(())
        }
        done => done,
    };
    // Whoever reads the last line may be slow, too.
    signals.restore_defaults();
    let is_complete = done.is_ok();
    if arguments.json {
        let done = more_severe(done, outcome.verdict());
        return report_as_json(done, &outcome.report(arguments, is_complete));
    }
    let told = outcome.print_summary(arguments);
    more_severe(done, outcome.verdict()).and(told)
}

/// What is wrong with the data goes before why there was no more of it.
fn more_severe(done: Result<(), Failure>, judged: Result<(), Failure>) -> Result<(), Failure> {
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
    outcome: &mut SubscribeSummary,
) -> Result<(), Failure> {
    let sink = arguments.sink(signals)?;
    let service = ServiceWait::of(&settings.directory.value);
    let options = node_client::options(settings, "sub");
    let node = node_client::join(settings, options, &service, signals)?;
    outcome.node = Some(node.identity());
    let (service, name) = (&service, &*arguments.topic);
    let wanted = TopicRequest { node: &node, name, settings, service, signals };
    let mut connectivity = ConnectivityReporter::begin();
    let topic = wanted.open_to_read(arguments.timeout, &mut connectivity)?;
    let like = topic.settings()?;
    let subscriber = topic.subscriber().map_err(with_remedy)?;
    outcome.is_subscribed = true;
    outcome.is_reliable = like.reliability == Reliability::Reliable;
    let mut work = SubscribeRun {
        arguments,
        signals,
        subscriber,
        progress: (!matches!(sink, Sink::Output { .. })).then(Progress::start),
        sink,
        checker: Checker::default(),
        outcome,
        buffer: Vec::new(),
        began: Instant::now(),
        wait_reported: false,
        connectivity,
        publisher: None,
    };
    let done = work.read_all(&node);
    // It may have been evicted in the middle of a message.
    work.process_events();
    work.outcome.missed = work.missed();
    done
}

/// What became of messages.
#[derive(Debug, Default)]
struct SubscribeSummary {
    /// The node's identity, once it is known.
    node: Option<String>,
    is_reliable: bool,
    is_subscribed: bool,
    statistics: Statistics,
    missed: u64,
    /// Was it evicted from its topic?
    is_evicted: bool,
    /// It was evicted while it read a message, which therefore counts as missed.
    last_message_missed: bool,
    /// Messages that were not what they should be.
    corrupted: u64,
    publishers_lost: u64,
    /// By which ways messages came.
    paths: Vec<DeliveryPath>,
}

struct SubscribeRun<'a> {
    arguments: &'a Arguments,
    signals: &'a Signals,
    subscriber: Subscriber,
    sink: Sink,
    checker: Checker,
    outcome: &'a mut SubscribeSummary,
    buffer: Vec<u8>,
    progress: Option<Progress>,
    began: Instant,
    wait_reported: bool,
    connectivity: ConnectivityReporter,
    /// The one of this node that published the last message.
    publisher: Option<PublisherId>,
}

/// How long no message may come before it is said where it waits.
const NOTICE_DELAY: Duration = Duration::from_secs(1);
/// What is read of a message at a time.
const CHUNK: u64 = 1 << 20;
/// Faults that are told of one by one.
const MAX_REPORTED_FAULTS: u64 = 10;

impl SubscribeRun<'_> {
    fn read_all(&mut self, node: &Node) -> Result<(), Failure> {
        let mut deadline = Deadline::after(self.arguments.timeout);
        let wanted = self.arguments.count.unwrap_or(u64::MAX);
        let mut told: Option<Instant> = None;
        while self.outcome.statistics.messages < wanted {
            self.signals.check_interrupted()?;
            if let Some(pause) = self.arguments.interval
                && told.is_none_or(|told| told.elapsed() >= pause)
            {
                told = Some(Instant::now());
                self.outcome.missed = self.missed();
                text::json(&self.outcome.report(self.arguments, false))?;
            }
            let pulled = self.subscriber.pull(deadline.slice());
            self.process_events();
            match pulled {
                Ok(sample) => {
                    let read = self.read(&sample);
                    self.outcome.last_message_missed = read.is_err() && !sample.is_valid();
                    read?;
                    drop(sample);
                    deadline = Deadline::after(self.arguments.timeout);
                }
                Err(error) if error.kind() == ErrorKind::DeadlineExceeded => {
                    if self.signals.termination_requested() {
                        return Err(interrupted());
                    }
                    if deadline.is_over() {
                        let topic = self.arguments.topic.escape_debug();
                        let cause = self.connectivity.cause(node, &self.arguments.topic);
                        let why = format!(
                            "read topic \"{topic}\" failed: no message within --timeout{cause}"
                        );
                        return Err(Failure::new(Exit::Deadline, why));
                    }
                    if self.outcome.statistics.messages == 0 {
                        self.report_waiting(node);
                    }
                }
                Err(error) => return Err(error.into()),
            }
            let phase = match self.outcome.statistics.messages {
                0 => Phase::Waiting,
                _ => Phase::Flowing,
            };
            let lines = self.connectivity.poll(node, &self.arguments.topic, phase);
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
        connectivity::say(lines);
    }

    /// That a publisher was killed, or its node says so.
    fn report_lost_publisher(&mut self, place: &str, which: &str) {
        self.outcome.publishers_lost += 1;
        let topic = self.arguments.topic.escape_debug();
        self.say(&[format!(
            "topic \"{topic}\": a publisher{place} ended without leaving ({which}); its last messages may be missing"
        )]);
    }

    /// Says once, if no message has come for a while, where messages would have to be published.
    fn report_waiting(&mut self, node: &Node) {
        if !self.wait_reported && self.began.elapsed() >= NOTICE_DELAY {
            self.wait_reported = true;
            let (topic, place) = (self.arguments.topic.escape_debug(), place(node));
            text::print_error(&format!(
                "fabricast: waiting for messages of topic \"{topic}\" {place}"
            ));
        }
    }

    fn process_events(&mut self) {
        while let Some(event) = self.subscriber.poll_event() {
            match event {
                Event::Gap { missed } => {
                    tracing::info!(missed, "messages were dropped unread or never written");
                }
                Event::PublisherLost { publisher } => {
                    let which = self.connectivity.name_of_publisher(publisher);
                    self.report_lost_publisher("", &which);
                }
                Event::RemotePublisherLost { node, publisher } => {
                    let name = self.connectivity.name_of_node(node);
                    let place = format!(" at node \"{}\"", name.escape_debug());
                    self.report_lost_publisher(&place, &format!("publisher {publisher}"));
                }
                Event::Evicted { held_for } => {
                    self.outcome.is_evicted = true;
                    let held_for =
                        held_for.map(|it| tracing::field::display(text::format_duration(it)));
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
        if self.sink.wants_bytes() {
            self.write(sample)?;
        }
        // A report names its process, as long as it is there.
        let publisher = sample.origin().is_none().then(|| sample.publisher());
        if publisher != self.publisher {
            self.publisher = publisher;
            publisher.into_iter().for_each(|publisher| self.connectivity.expect(publisher));
        }
        let path = sample.path();
        if !self.outcome.paths.contains(&path) {
            self.outcome.paths.push(path);
        }
        // Only now has it arrived where it was to go.
        // Clocks of other nodes may be ahead.
        let latency = now.saturating_sub(sample.published_at());
        self.outcome.statistics.add(sample.length(), latency, statistics::durations(sample, now));
        Ok(())
    }

    fn check(&mut self, sample: &Sample) -> Result<(), Failure> {
        let read = |offset: u64, to: &mut [u8]| -> Result<(), Failure> {
            self.signals.check_interrupted()?;
            Ok(sample.read(offset, to)?)
        };
        let (content, fault) = self.checker.check(sample.length(), read)?;
        if let Some(fault) = fault {
            self.outcome.corrupted += 1;
            if self.outcome.corrupted <= MAX_REPORTED_FAULTS {
                let number = content.map(|content| content.number);
                report_fault(self.outcome.statistics.messages + 1, number, fault);
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
        let missed = self.subscriber.missed() + u64::from(self.outcome.last_message_missed);
        // What the topic dropped is missing in the numbers of a pattern, too.
        missed.max(self.checker.missed)
    }
}

impl SubscribeSummary {
    /// What is to be said at the end about messages that came.
    fn verdict(&self) -> Result<(), Failure> {
        if self.corrupted > 0 {
            return Err(Failure::new(Exit::DataCorrupted, text::corrupted(self.corrupted)));
        }
        match self.missed {
            missed if missed > 0 && self.is_reliable => {
                let why =
                    text::count_of_irregular(missed, "message is missing", "messages are missing");
                Err(Failure::new(Exit::MessagesMissed, why))
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
            "corrupted": arguments.check.then_some(self.corrupted),
            "publishers_lost": self.publishers_lost,
            "paths": self.paths.iter().map(DeliveryPath::to_string).collect::<Vec<_>>(),
            "stages": self.statistics.latencies(),
            "complete": is_complete,
        })
    }

    /// The same for people.
    fn print_summary(&self, arguments: &Arguments) -> Result<(), Failure> {
        let Statistics { messages, bytes, .. } = self.statistics;
        let per_second = self.statistics.bytes_per_second();
        if !self.is_subscribed {
            // There is nothing to tell of.
            return Ok(());
        }
        // Of one message no rate is known.
        let all = totals(messages, bytes, (per_second > 0.0).then_some(per_second));
        let mut line = format!("{}: {all}", arguments.topic.escape_debug());
        if self.missed > 0 {
            line.push_str(&format!("; {} missed", self.missed));
        }
        if self.is_evicted {
            line.push_str("; evicted for being too slow");
        }
        if arguments.check {
            let corrupted = text::count_of_irregular(self.corrupted, "corrupted", "corrupted");
            line.push_str(&format!("; {corrupted}"));
        }
        line.push('\n');
        if arguments.stats {
            line.push_str(&self.statistics.table());
        }
        let is_output =
            arguments.file.is_none() && arguments.into.is_none() && arguments.writes_to_stdout();
        if is_output {
            // There, only messages are to be found.
            text::print_error(line.trim_end());
            return Ok(());
        }
        text::print(&line)
    }
}

fn report_fault(message: u64, number: Option<u64>, fault: Fault) {
    let number = number.map(|number| format!(", number {number}")).unwrap_or_default();
    let what = match fault {
        Fault::NoHeader => "is not a pattern message, or its header is corrupted".to_owned(),
        Fault::Length { declared, found } => {
            format!("has {found} bytes, but its header says {declared}")
        }
        Fault::Corrupted { at } => format!("is corrupted at byte {at}"),
        Fault::OutOfOrder { after } => format!("is out of order, after number {after}"),
    };
    text::print_error(&format!("fabricast: message {message}{number}: {what}"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_worst_for_the_data_is_said_and_nothing_is_left_out() {
        let fail = |exit, why: &str| Err(Failure::new(exit, why));
        let code = |done, judged| more_severe(done, judged).map_err(|failure| failure.exit());
        assert_eq!(code(Ok(()), Ok(())), Ok(()));
        assert_eq!(code(fail(Exit::Deadline, "late"), Ok(())), Err(Exit::Deadline));
        assert_eq!(code(Ok(()), fail(Exit::DataCorrupted, "bad")), Err(Exit::DataCorrupted));
        let silent = Err(Failure::silent(Exit::OutputClosed));
        assert_eq!(code(silent, fail(Exit::MessagesMissed, "less")), Err(Exit::MessagesMissed));
        let both =
            more_severe(fail(Exit::Interrupted, "interrupted"), fail(Exit::DataCorrupted, "bad"));
        let both = both.unwrap_err();
        assert_eq!(
            (both.exit(), both.to_string().as_str()),
            (Exit::DataCorrupted, "bad; interrupted")
        );
    }
}
