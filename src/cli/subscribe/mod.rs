//! `fabricast sub`: reads messages, and writes, verifies or measures them.

mod sink;

use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use pubsub::{
    DeliveryPath, ErrorKind, Event, Node, PublisherId, Reliability, Sample, Settings, Subscriber,
    parse_seconds,
};
use serde_json::{Value, json};

use self::sink::Sink;
use super::connectivity::{ConnectivityReporter, Phase};
use super::exit::{Exit, Failure, Result};
use super::open_topic::{self, TopicRequest, directory_note};
use super::progress::{Progress, totals};
use super::remedy::with_remedy;
use super::settings::{ALL, Options};
use super::signals::{Deadline, Signals, interrupted};
use super::statistics::{self, Statistics};
use super::test_pattern::{Checker, Fault};
use super::{output, size, text};

/// Reads all messages of a topic that are published from now on, and writes them to standard output
/// unless an option selects another use.
///
/// Waits until the topic exists, on this node or on a connected peer; with topic settings it is
/// created here. Ends after --count messages, or by Ctrl-C.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The topic
    #[arg(value_parser = open_topic::topic_name)]
    topic: String,
    /// Write a line feed after each message
    #[arg(long, conflicts_with = "into")]
    lines: bool,
    /// Append messages to this file
    #[arg(long, value_name = "FILE", conflicts_with = "into")]
    file: Option<PathBuf>,
    /// Write each message to its own file in this directory: 00000001, 00000002, …, continuing
    /// after existing numbers
    #[arg(long, value_name = "DIRECTORY")]
    into: Option<PathBuf>,
    /// Verify that messages of `fabricast pub --pattern` are complete, correct and in order
    #[arg(long)]
    check: bool,
    /// Print the message rate and the latency of each stage
    #[arg(long)]
    stats: bool,
    /// Exit after this many messages [default: on Ctrl-C]
    #[arg(long, value_parser = size::parse_positive)]
    count: Option<u64>,
    /// Timeout for each message [default: none]
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    timeout: Option<Duration>,
    /// One JSON line about what was read; messages then are not written to standard output
    #[arg(long)]
    json: bool,
    /// Also print such a line at this interval
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds, requires = "json",
        hide = true)]
    interval: Option<Duration>,
    #[command(flatten)]
    settings: Options<ALL>,
}

impl Arguments {
    fn sink(&self, signals: &Signals, is_waiting: &mut bool) -> Result<Sink> {
        match (&self.file, &self.into) {
            (Some(file), _) => Sink::file(file, signals, is_waiting),
            (None, Some(directory)) => Sink::directory(directory),
            (None, None) if self.writes_to_stdout() => Ok(Sink::output()),
            (None, None) => Ok(Sink::Discard),
        }
    }

    /// Are messages written to standard output, without --file and --into?
    fn writes_to_stdout(&self) -> bool {
        !(self.check || self.stats || self.json)
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let signals = Signals::catch()?;
    let settings = arguments.settings.settings()?;
    if arguments.lines && arguments.file.is_none() && !arguments.writes_to_stdout() {
        let why = "use --lines failed: with --check, --stats or --json messages are not written to standard output. \
                   Add --file FILE";
        return Err(Failure::new(Exit::Usage, why));
    }
    let mut outcome = SubscribeSummary::default();
    let done = match read(arguments, &settings, &signals, &mut outcome) {
        // An interrupt is the normal end once it waits or has subscribed, unless --count messages were expected.
        Err(failure)
            if failure.exit() == interrupted().exit()
                && arguments.count.is_none()
                && (outcome.is_waiting || outcome.is_subscribed) =>
        {
            Ok(())
        }
        done => done,
    };
    // The reader of the last line may be slow, so signals end the process from now on.
    signals.restore_defaults();
    let is_complete = done.is_ok();
    if arguments.json {
        let done = more_severe(done, outcome.verdict());
        return output::report_as_json(done, &outcome.report(arguments, is_complete));
    }
    let printed = outcome.print_summary(arguments);
    more_severe(done, outcome.verdict()).and(printed)
}

/// Faults of the data are more severe than the reason of the end.
fn more_severe(done: Result<()>, verdict: Result<()>) -> Result<()> {
    match (done, verdict) {
        (done, Ok(())) => done,
        (Err(done), Err(verdict)) if !done.is_silent() => {
            Err(Failure::new(verdict.exit(), format!("{verdict}; {done}")))
        }
        (_, verdict) => verdict,
    }
}

/// Reads everything. The outcome is filled also if this fails.
fn read(
    arguments: &Arguments,
    settings: &Settings,
    signals: &Signals,
    outcome: &mut SubscribeSummary,
) -> Result<()> {
    let sink = arguments.sink(signals, &mut outcome.is_waiting)?;
    let request = TopicRequest::join(settings, "sub", &arguments.topic, signals)?;
    let node = request.node();
    outcome.node = Some(node.identity());
    let mut connectivity = ConnectivityReporter::begin();
    let waiting = &mut outcome.is_waiting;
    let topic = request.open_to_read(arguments.timeout, &mut connectivity, waiting)?;
    let like = topic.settings()?;
    let subscriber = topic.subscriber().map_err(with_remedy)?;
    outcome.is_subscribed = true;
    outcome.is_reliable = like.reliability == Reliability::Reliable;
    let mut work = SubscribeRun {
        arguments,
        signals,
        subscriber,
        progress: Progress::start(!matches!(sink, Sink::Output { .. })),
        sink,
        checker: Checker::default(),
        outcome,
        buffer: Vec::new(),
        began: Instant::now(),
        wait_reported: false,
        connectivity,
        publisher: None,
    };
    let done = work.read_all(node);
    // The subscriber may have been evicted while it read a message.
    work.process_events();
    work.outcome.missed = work.missed();
    done
}

/// Counts of the messages by outcome.
#[derive(Debug, Default)]
struct SubscribeSummary {
    /// Identity of the node, once known.
    node: Option<String>,
    /// The program has waited for the reader of a pipe, or for its topic.
    is_waiting: bool,
    is_reliable: bool,
    is_subscribed: bool,
    statistics: Statistics,
    missed: u64,
    is_evicted: bool,
    /// Evicted while it read a message, which therefore counts as missed.
    last_message_missed: bool,
    corrupted: u64,
    publishers_lost: u64,
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
    progress: Progress,
    began: Instant,
    wait_reported: bool,
    connectivity: ConnectivityReporter,
    /// Publisher of the last message, if on this node.
    publisher: Option<PublisherId>,
}

/// Time without a message until the wait is reported.
const NOTICE_DELAY: Duration = Duration::from_secs(1);
/// Bytes of a message read at a time.
const CHUNK: u64 = 1 << 20;
/// Number of faults that are printed one by one.
const MAX_REPORTED_FAULTS: u64 = 10;

impl SubscribeRun<'_> {
    fn read_all(&mut self, node: &Node) -> Result<()> {
        let mut deadline = Deadline::after(self.arguments.timeout);
        let expected = self.arguments.count.unwrap_or(u64::MAX);
        let mut printed_at: Option<Instant> = None;
        while self.outcome.statistics.messages < expected {
            self.signals.check_interrupted()?;
            if let Some(pause) = self.arguments.interval
                && printed_at.is_none_or(|at| at.elapsed() >= pause)
            {
                printed_at = Some(Instant::now());
                self.outcome.missed = self.missed();
                output::json(&self.outcome.report(self.arguments, false))?;
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
                            "read topic \"{topic}\" failed: no message within --timeout{cause}. Start a publisher, or raise --timeout"
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
            self.progress.print_lines(&lines);
            let Statistics { messages, bytes, .. } = self.outcome.statistics;
            self.progress.show(messages, bytes, "");
        }
        Ok(())
    }

    /// Reports that a publisher was killed or crashed, on this node or on another one.
    fn report_lost_publisher(&mut self, origin: &str, which: &str) {
        self.outcome.publishers_lost += 1;
        let topic = self.arguments.topic.escape_debug();
        self.progress.print_lines(&[format!(
            "topic \"{topic}\": a publisher{origin} exited unexpectedly ({which}); its last messages may be missing"
        )]);
    }

    /// Reports once, after a while without messages, the node directory where this process waits.
    fn report_waiting(&mut self, node: &Node) {
        if !self.wait_reported && self.began.elapsed() >= NOTICE_DELAY {
            self.wait_reported = true;
            let (topic, note) = (self.arguments.topic.escape_debug(), directory_note(node));
            text::print_error(&format!(
                "fabricast: waiting for messages of topic \"{topic}\" {note}"
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
                    let origin = format!(" at node \"{}\"", name.escape_debug());
                    self.report_lost_publisher(&origin, &format!("publisher {publisher}"));
                }
                Event::NoPublishers => tracing::info!("the last publisher has gone"),
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

    fn read(&mut self, sample: &Sample) -> Result<()> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let now = now.map_or(0, |since| since.as_nanos() as u64);
        if self.arguments.check {
            self.check(sample)?;
        }
        if self.sink.wants_bytes() {
            self.write(sample)?;
        }
        // Reports name the process only while it runs.
        let publisher = sample.origin().is_none().then(|| sample.publisher());
        if publisher != self.publisher {
            self.publisher = publisher;
            publisher.into_iter().for_each(|publisher| self.connectivity.expect(publisher));
        }
        let path = sample.path();
        if !self.outcome.paths.contains(&path) {
            self.outcome.paths.push(path);
        }
        // The message has reached its destination only now. Clocks of other nodes may be ahead.
        let latency = now.saturating_sub(sample.published_at());
        self.outcome.statistics.add(sample.length(), latency, statistics::durations(sample, now));
        Ok(())
    }

    fn check(&mut self, sample: &Sample) -> Result<()> {
        let read = |offset: u64, to: &mut [u8]| -> Result<()> {
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

    fn write(&mut self, sample: &Sample) -> Result<()> {
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
        // Messages that the topic dropped are also gaps in the numbers of a pattern.
        missed.max(self.checker.missed)
    }
}

impl SubscribeSummary {
    /// The failure for corrupted or missed messages.
    fn verdict(&self) -> Result<()> {
        if self.corrupted > 0 {
            return Err(Failure::new(Exit::DataCorrupted, text::corrupted(self.corrupted)));
        }
        if self.missed == 0 || !self.is_reliable {
            return Ok(());
        }
        let (one, several) = ("message was missed", "messages were missed");
        let why = text::count_of_irregular(self.missed, one, several);
        Err(Failure::new(Exit::MessagesMissed, why))
    }

    /// The result as JSON, also of an incomplete run.
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

    fn print_summary(&self, arguments: &Arguments) -> Result<()> {
        let Statistics { messages, bytes, .. } = self.statistics;
        let per_second = self.statistics.bytes_per_second();
        if !self.is_subscribed {
            // Nothing to report.
            return Ok(());
        }
        // A single message has no rate.
        let all = totals(messages, bytes, (per_second > 0.0).then_some(per_second));
        let mut line = format!("{}: {all}", arguments.topic.escape_debug());
        if self.missed > 0 {
            line.push_str(&format!("; {} missed", self.missed));
        }
        if self.is_evicted {
            line.push_str("; evicted as too slow");
        }
        if arguments.check {
            line.push_str(&format!("; {} corrupted", self.corrupted));
        }
        line.push('\n');
        if arguments.stats {
            line.push_str(&self.statistics.table());
        }
        let is_output =
            arguments.file.is_none() && arguments.into.is_none() && arguments.writes_to_stdout();
        if is_output {
            // Standard output has messages only.
            text::print_error(line.trim_end());
            return Ok(());
        }
        output::print(&line)
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
    fn faults_of_the_data_decide_the_exit_code_and_all_are_reported() {
        let fail = |exit, why: &str| Err(Failure::new(exit, why));
        let code = |done, verdict| more_severe(done, verdict).map_err(|failure| failure.exit());
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
