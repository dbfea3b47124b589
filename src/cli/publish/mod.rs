//! `fabricast pub`: publishes standard input, files, or a test pattern.

mod input;
mod wait_notice;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use pubsub::{Attempt, ErrorKind, Node, Publisher, Reliability, Sent, Settings, parse_seconds};
use serde_json::{Value, json};

use self::input::{Input, Message};
use self::wait_notice::{Wait, WaitNotice};
use super::connectivity::{ConnectivityReporter, Phase};
use super::exit::{Exit, Failure, Result};
use super::histogram::Histogram;
use super::open_topic::{self, TopicRequest, directory_note};
use super::paths::{bracketed_names, given_up};
use super::progress::{Progress, totals};
use super::remedy::with_remedy;
use super::settings::{ALL, Options};
use super::signals::{Deadline, SLICE, Signals, interrupted};
use super::stages::Stage;
use super::statistics::Latency;
use super::test_pattern::{self, Content};
use super::{output, size, text};

/// Publishes messages: all of standard input as one, each of its lines, files, or a test pattern
/// that `fabricast sub --check` verifies. Empty input or an empty file is a message of no bytes;
/// with --lines, no message.
///
/// An existing topic is used as it is, unless topic settings are set. Ends when all subscribers
/// have released all messages (of a reliable topic), or by Ctrl-C at any time.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The topic
    #[arg(value_parser = open_topic::topic_name)]
    topic: String,
    /// Publish each line of standard input, without its line feed
    #[arg(long, conflicts_with_all = ["files", "pattern"])]
    lines: bool,
    /// Publish this file; may be given several times
    #[arg(long = "file", value_name = "FILE", conflicts_with = "pattern")]
    files: Vec<PathBuf>,
    /// Publish messages with a number, a checksum and content that follows from the number
    #[arg(long)]
    pattern: bool,
    /// Message size of the pattern
    #[arg(long, value_parser = size::parse, default_value = "64K", requires = "pattern",
        conflicts_with_all = ["files", "lines"])]
    size: u64,
    /// How many messages of the pattern [default: until Ctrl-C]
    #[arg(long, value_parser = size::parse, requires = "pattern",
        conflicts_with_all = ["files", "lines"])]
    count: Option<u64>,
    /// Messages per second [default: unlimited]
    #[arg(long, value_parser = rate)]
    rate: Option<f64>,
    /// Start when this many subscribers exist; replication to other nodes counts as one
    #[arg(long, value_name = "N", default_value_t = 0)]
    wait_for: u32,
    /// Timeout of each wait: for subscribers, for space in the topic, and at the end for release
    /// [default: none]
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    timeout: Option<Duration>,
    /// One JSON line with the result
    #[arg(long)]
    json: bool,
    /// Also print such a line at this interval
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds, requires = "json",
        hide = true)]
    interval: Option<Duration>,
    /// Do not publish faster than that rate to make up for waits
    #[arg(long, requires = "rate", hide = true)]
    no_catch_up: bool,
    #[command(flatten)]
    settings: Options<ALL>,
}

/// Interval of checking the peers while nothing is published.
const CONNECTIVITY_POLL_INTERVAL: Duration = Duration::from_secs(1);

fn rate(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(rate) if (1e-6..=1e9).contains(&rate) => Ok(rate),
        _ => Err("not a number of messages a second".to_owned()),
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let signals = Signals::catch()?;
    let settings = arguments.settings.settings()?;
    if arguments.pattern && arguments.size < test_pattern::HEADER as u64 {
        let least = test_pattern::HEADER;
        let why = format!("--size is too small. A pattern message has at least {least} bytes");
        return Err(Failure::new(Exit::Usage, why));
    }
    let mut summary = PublishSummary::default();
    let done = publish(arguments, &settings, &signals, &mut summary);
    // The reader of the last line may be slow, so signals end the process from now on.
    signals.restore_defaults();
    let is_complete = done.is_ok();
    if arguments.json {
        return output::report_as_json(done, &report(arguments, &summary, is_complete));
    }
    let printed = print_summary(arguments, &summary, is_complete);
    done.and(printed)
}

/// Publishes everything. The summary is filled also if this fails.
fn publish(
    arguments: &Arguments,
    settings: &Settings,
    signals: &Signals,
    summary: &mut PublishSummary,
) -> Result<()> {
    let name = &arguments.topic;
    let request = TopicRequest::join(settings, "pub", name, signals)?;
    let node = request.node();
    (summary.node, summary.directory_note) = (Some(node.identity()), Some(directory_note(node)));
    let origin = settings.origin("topic.largest");
    // An existing topic limits the length of messages.
    let found = request.existing()?;
    let longest = match &found {
        Some(topic) => Some(topic.settings()?.largest),
        None => origin.map(|_| settings.topic.largest),
    };
    let limit = LengthLimit { topic: name, largest: longest, origin };
    let input = input(arguments, limit, signals)?;
    let topic = match found {
        Some(topic) => topic,
        None => request.open_to_publish(input.largest())?,
    };
    let like = topic.settings()?;
    let publisher = request.publisher(topic)?;
    summary.publisher = Some(publisher.id().to_string());
    let mut work = PublishRun {
        arguments,
        signals,
        publisher,
        limit: LengthLimit { largest: Some(like.largest), ..limit },
        is_reliable: like.reliability == Reliability::Reliable,
        summary,
        progress: Progress::start(true),
        connectivity: ConnectivityReporter::begin(),
        had_subscribers: false,
        node,
        notice: WaitNotice::default(),
    };
    let done = work.run_all(input);
    work.final_result(done)
}

fn input<'a>(
    arguments: &Arguments,
    limit: LengthLimit<'_>,
    signals: &'a Signals,
) -> Result<Input<'a>> {
    if arguments.pattern {
        // Unique with high probability.
        let run = getrandom::u64();
        let run =
            run.map_err(|error| Failure::failed(format!("generate a run number failed: {error}")))?;
        let next = Content { run, number: 0, length: arguments.size };
        return Ok(Input::Pattern { next, left: arguments.count });
    }
    if !arguments.files.is_empty() {
        return Ok(Input::Files(arguments.files.clone().into_iter()));
    }
    if arguments.lines {
        return Ok(Input::lines(signals));
    }
    Input::whole(limit, signals)
}

/// The maximum length of messages of a topic.
#[derive(Debug, Clone, Copy)]
struct LengthLimit<'a> {
    topic: &'a str,
    /// None if there is no topic yet, and no setting.
    largest: Option<u64>,
    /// Origin of the setting, if one is set.
    origin: Option<&'a str>,
}

/// Counts of the messages by outcome.
#[derive(Debug, Default)]
struct PublishSummary {
    /// Identity and directory of the node, and identity of the publisher, once known.
    node: Option<String>,
    directory_note: Option<String>,
    publisher: Option<String>,
    messages: u64,
    bytes: u64,
    without_subscriber: u64,
    dropped: u64,
    /// Number of subscribers of the last message.
    readers: Option<u32>,
    /// Time spent waiting for space in the topic.
    waited: Duration,
    /// For each message, nanoseconds to get its memory, and to write it.
    loan_times: Histogram,
    fill_times: Histogram,
    time: Duration,
    is_released: bool,
    /// Messages missed by nodes that were given up.
    missed_by_nodes: u64,
    /// Subscribers of this node that were evicted.
    evicted: u64,
}

struct PublishRun<'a> {
    arguments: &'a Arguments,
    signals: &'a Signals,
    publisher: Publisher,
    limit: LengthLimit<'a>,
    is_reliable: bool,
    summary: &'a mut PublishSummary,
    progress: Progress,
    connectivity: ConnectivityReporter,
    /// Did the last message that was not dropped have subscribers?
    had_subscribers: bool,
    node: &'a Node,
    /// State of the notice about waits for space.
    notice: WaitNotice,
}

impl PublishRun<'_> {
    fn run_all(&mut self, input: Input<'_>) -> Result<()> {
        self.wait_for_subscribers()?;
        self.publish_all(input)?;
        self.wait_until_released()
    }

    /// The result, with the messages missed at the end of the run. Missed messages are more severe
    /// than the failure that ended it.
    fn final_result(&mut self, done: Result<()>) -> Result<()> {
        let counters = self.publisher.counters();
        let summary = &mut *self.summary;
        (summary.missed_by_nodes, summary.evicted) = (counters.missed_by_nodes, counters.evicted);
        let mut rows = Vec::new();
        let had_no_subscriber_at_all = done.is_ok() && summary.without_subscriber > 0;
        if summary.missed_by_nodes > 0 || had_no_subscriber_at_all {
            rows = self.connectivity.final_report(self.node, &self.arguments.topic).to_vec();
        }
        if summary.missed_by_nodes == 0 {
            return done;
        }
        summary.is_released = false;
        let why = match &done {
            Err(failure) if !failure.is_silent() => format!("{failure}; "),
            _ => String::new(),
        };
        let missed = text::count_of(summary.missed_by_nodes, "message");
        let names = bracketed_names(&given_up(&rows, &self.arguments.topic));
        let why =
            format!("{why}{missed} not delivered to a subscribed node{names}, which was given up");
        Err(Failure::new(Exit::MessagesMissed, why))
    }

    fn wait_for_subscribers(&mut self) -> Result<()> {
        let expected = self.arguments.wait_for;
        let deadline = Deadline::after(self.arguments.timeout);
        let mut is_reported = false;
        loop {
            let found = self.publisher.subscribers();
            if found >= expected {
                return Ok(());
            }
            if deadline.is_over() {
                let cause = self.connectivity.cause(self.node, &self.arguments.topic);
                let why = format!(
                    "publish to topic \"{}\" failed: {found} of {} within --timeout{cause}. Start subscribers first, or \
                     raise --timeout",
                    self.arguments.topic.escape_debug(),
                    text::count_of(expected.into(), "subscriber")
                );
                return Err(Failure::new(Exit::Deadline, why));
            }
            if !is_reported {
                is_reported = true;
                let awaited = text::count_of(expected.into(), "subscriber");
                let (topic, note) =
                    (self.arguments.topic.escape_debug(), directory_note(self.node));
                text::print_error(&format!(
                    "fabricast: waiting for {awaited} of topic \"{topic}\" {note}"
                ));
            }
            self.poll_connectivity(Phase::Waiting);
            self.signals.pause(deadline.slice().min(SLICE / 5))?;
        }
    }

    fn publish_all(&mut self, mut input: Input<'_>) -> Result<()> {
        input.print_terminal_hint();
        let mut buffer = Vec::new();
        let began = Instant::now();
        // The rate counts from this time on.
        let mut since = began;
        let mut printed_at: Option<Instant> = None;
        loop {
            self.wait_for_rate(&mut since)?;
            let Some(message) = input.next(self.limit, self.signals)? else {
                return Ok(());
            };
            let length = message.length();
            if self.limit.largest.is_some_and(|largest| length > largest) {
                self.limit.check(message.name(), length)?;
            }
            let sent = self.publish(message, &mut buffer)?;
            let summary = &mut *self.summary;
            summary.messages += 1;
            summary.bytes += length;
            summary.readers = Some(sent.subscribers);
            summary.dropped += u64::from(sent.is_dropped);
            summary.without_subscriber += u64::from(sent.position.is_none() && !sent.is_dropped);
            summary.time = began.elapsed();
            let has = sent.position.is_some() || sent.is_dropped && self.had_subscribers;
            if std::mem::replace(&mut self.had_subscribers, has) && !has {
                let topic = self.arguments.topic.escape_debug();
                self.progress.print_lines(&[format!(
                    "topic \"{topic}\": the last subscriber has left; messages now have no subscriber"
                )]);
            }
            self.poll_connectivity(Phase::Flowing);
            self.show_progress("");
            if let Some(pause) = self.arguments.interval
                && printed_at.is_none_or(|at| at.elapsed() >= pause)
            {
                printed_at = Some(Instant::now());
                output::json(&report(self.arguments, self.summary, false))?;
            }
        }
    }

    fn show_progress(&mut self, what: &str) {
        self.progress.show(self.summary.messages, self.summary.bytes, what);
    }

    fn poll_connectivity(&mut self, phase: Phase) {
        let lines = self.connectivity.poll(self.node, &self.arguments.topic, phase);
        self.progress.print_lines(&lines);
    }

    /// Waits until the next message is due.
    fn wait_for_rate(&mut self, since: &mut Instant) -> Result<()> {
        self.signals.check_interrupted()?;
        let Some(rate) = self.arguments.rate else { return Ok(()) };
        let at = Duration::try_from_secs_f64(self.summary.messages as f64 / rate);
        let at = at.unwrap_or(Duration::MAX);
        if self.arguments.no_catch_up {
            *since += since.elapsed().saturating_sub(at);
        }
        loop {
            let left = at.saturating_sub(since.elapsed());
            if left.is_zero() {
                return Ok(());
            }
            self.poll_connectivity(Phase::Flowing);
            self.signals.pause(left.min(CONNECTIVITY_POLL_INTERVAL))?;
        }
    }

    /// Publishes a message; waits for space in the topic as long as allowed.
    fn publish(&mut self, message: Message, buffer: &mut Vec<u8>) -> Result<Sent> {
        let deadline = Deadline::after(self.arguments.timeout);
        let length = message.length();
        // Measured for JSON only, so that other runs do not pay for it.
        let clock = || self.arguments.json.then(Instant::now);
        let requested_at = clock();
        // Begin of the wait, if there is one.
        let mut began: Option<Instant> = None;
        let mut loan = match self.publisher.try_loan(length).map_err(with_remedy)? {
            Some(loan) => loan,
            None => loop {
                let since = Instant::now();
                let borrowed = self.publisher.loan(length, deadline.slice());
                self.summary.waited += since.elapsed();
                match borrowed {
                    Ok(loan) => break loan,
                    Err(error) => check_timed_out(error)?,
                }
                let began = *began.get_or_insert(since);
                self.continue_waiting(deadline, Wait::Room, began)?;
            },
        };
        let loaned_at = clock();
        message.fill(&mut loan, buffer, self.signals)?;
        if let (Some(requested_at), Some(loaned_at)) = (requested_at, loaned_at) {
            self.summary.loan_times.add((loaned_at - requested_at).as_nanos() as u64);
            self.summary.fill_times.add(loaned_at.elapsed().as_nanos() as u64);
        }
        loop {
            let since = Instant::now();
            loan = match loan.publish_within(deadline.slice())? {
                Attempt::Sent(sent) => return Ok(sent),
                Attempt::Full(loan) => loan,
            };
            self.summary.waited += since.elapsed();
            let began = *began.get_or_insert(since);
            self.continue_waiting(deadline, Wait::Room, began)?;
        }
    }

    fn continue_waiting(&mut self, deadline: Deadline, wait: Wait, since: Instant) -> Result<()> {
        self.show_progress("; waiting for space in the topic");
        self.poll_connectivity(Phase::Flowing);
        if let Some(notice) = self.notice.poll(self.node, &self.arguments.topic, wait, since) {
            self.progress.print_lines(&[notice]);
        }
        if self.signals.termination_requested() {
            return Err(interrupted());
        }
        if !deadline.is_over() {
            return Ok(());
        }
        let (topic, remedy) =
            (self.arguments.topic.escape_debug(), "Wait longer, or stop slow subscribers");
        let why = match wait {
            Wait::Room => format!(
                "publish to topic \"{topic}\" failed: no space in the topic within --timeout: \
                 subscribers have not released earlier messages. {remedy}"
            ),
            Wait::Release => format!(
                "publish to topic \"{topic}\" failed: subscribers have not released all messages within --timeout. \
                 {remedy}"
            ),
        };
        Err(Failure::new(Exit::Deadline, why))
    }

    fn wait_until_released(&mut self) -> Result<()> {
        let deadline = Deadline::after(self.arguments.timeout);
        let began = Instant::now();
        while self.is_reliable {
            match self.publisher.flush(deadline.slice()) {
                Ok(()) => break,
                Err(error) => check_timed_out(error)?,
            }
            self.continue_waiting(deadline, Wait::Release, began)?;
        }
        self.summary.is_released = self.is_reliable;
        Ok(())
    }
}

/// Fails for all errors but a missed deadline.
fn check_timed_out(error: pubsub::Error) -> Result<()> {
    match error.kind() {
        ErrorKind::DeadlineExceeded => Ok(()),
        _ => Err(with_remedy(error)),
    }
}

impl PublishSummary {
    /// An amount per second; None if no time has passed.
    fn rate(&self, amount: u64) -> Option<f64> {
        (!self.time.is_zero()).then(|| amount as f64 / self.time.as_secs_f64())
    }
}

/// The result as JSON, also of an incomplete run.
fn report(arguments: &Arguments, summary: &PublishSummary, is_complete: bool) -> Value {
    let PublishSummary {
        messages, bytes, without_subscriber, dropped, readers, waited, time, ..
    } = *summary;
    let per_second = |amount: u64| summary.rate(amount).unwrap_or(0.0);
    let stages = [(Stage::Loan, &summary.loan_times), (Stage::Fill, &summary.fill_times)];
    let latencies = stages.map(|(stage, times)| Latency::of(stage.name(), times));
    json!({
        "topic": arguments.topic,
        "node": summary.node,
        "publisher": summary.publisher,
        "messages": messages,
        "bytes": bytes,
        "seconds": time.as_secs_f64(),
        "messages_per_s": per_second(messages),
        "bytes_per_s": per_second(bytes),
        "waited_s": waited.as_secs_f64(),
        "subscribers": readers,
        "without_subscriber": without_subscriber,
        "dropped": dropped,
        "released": summary.is_released,
        "missed_by_nodes": summary.missed_by_nodes,
        "evicted_subscribers": summary.evicted,
        "stages": latencies.into_iter().flatten().collect::<Vec<_>>(),
        "complete": is_complete,
    })
}

fn print_summary(arguments: &Arguments, summary: &PublishSummary, is_complete: bool) -> Result<()> {
    let PublishSummary { messages, bytes, without_subscriber, dropped, .. } = *summary;
    if summary.publisher.is_none() || (messages == 0 && !is_complete) {
        // Nothing to report besides the failure.
        return Ok(());
    }
    let note = summary.directory_note.iter().map(|note| format!(" {note}")).collect::<String>();
    let had_no_subscriber = format!("had no subscriber{note}");
    let all = totals(messages, bytes, summary.rate(bytes));
    let mut line = format!("{}: {all}", arguments.topic.escape_debug());
    let missed = summary.missed_by_nodes;
    for (count, what) in [
        (dropped, "dropped"),
        (without_subscriber, &*had_no_subscriber),
        (missed, "missed by other nodes"),
    ] {
        if count > 0 {
            line.push_str(&format!("; {count} {what}"));
        }
    }
    if summary.evicted > 0 {
        let evicted = text::count_of(summary.evicted, "subscriber");
        line.push_str(&format!("; {evicted} evicted as too slow"));
    }
    output::print(&format!("{line}\n"))
}
