//! `fabricast pub`: publishes what comes in, files, or a pattern that can be checked.

mod input;
mod room;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use pubsub::{Attempt, ErrorKind, Node, Publisher, Reliability, Sent};
use serde_json::{Value, json};

use self::input::{Input, Limit, Message};
use self::room::{Notice, Wait};
use super::exit::{Exit, Failure, report_as_json};
use super::hints::{self, NodeHints, Phase};
use super::histogram::Histogram;
use super::membership::{self, Wanted, place, with_remedy};
use super::paths::{given_up, in_brackets};
use super::pattern::{self, Content};
use super::progress::{Progress, so_far};
use super::service::AwaitedService;
use super::settings::{ALL, Options, Settings, seconds};
use super::signals::{Deadline, SLICE, Signals, interrupted};
use super::stages::Stage;
use super::statistics::Latency;
use super::{size, text};

/// Publishes messages: all of standard input as one, each of its lines, files, or a pattern
/// whose content `fabricast sub --check` checks. An input or file with nothing in it is a message of
/// no bytes; with --lines, no message.
///
/// A topic that exists is used as it is, unless options or other settings say what it is to be
/// like. It is done when all subscribers have released all messages (of a reliable topic), or
/// by Ctrl-C, at any time.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The topic
    #[arg(value_parser = membership::topic_name)]
    topic: String,
    /// Publish each line of standard input, without what ends it
    #[arg(long, conflicts_with_all = ["files", "pattern"])]
    lines: bool,
    /// Publish this file; may be given several times
    #[arg(long = "file", value_name = "FILE", conflicts_with = "pattern")]
    files: Vec<PathBuf>,
    /// Publish messages with a number, a checksum and content that follows from the number
    #[arg(long)]
    pattern: bool,
    /// How long each message of the pattern is
    #[arg(long, value_parser = size::parse, default_value = "64K", requires = "pattern",
        conflicts_with_all = ["files", "lines"])]
    size: u64,
    /// How many messages of the pattern [default: until Ctrl-C]
    #[arg(long, value_parser = size::parse, requires = "pattern",
        conflicts_with_all = ["files", "lines"])]
    count: Option<u64>,
    /// Messages a second [default: as many as go]
    #[arg(long, value_parser = rate)]
    rate: Option<f64>,
    /// Begin when there are so many subscribers; those that carry messages to other nodes count as one
    #[arg(long, value_name = "N", default_value_t = 0)]
    wait_for: u32,
    /// The longest wait: for subscribers, for room, and at the end until all is released [default: none]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    timeout: Option<Duration>,
    /// One JSON line about what was done
    #[arg(long)]
    json: bool,
    /// Such a line also so often before, for who watches
    #[arg(long, value_name = "SECONDS", value_parser = seconds, requires = "json", hide = true)]
    every: Option<Duration>,
    /// Do not publish faster than that rate to make up for waits
    #[arg(long, requires = "rate", hide = true)]
    steady: bool,
    #[command(flatten)]
    settings: Options<ALL>,
}

/// Between two looks at other nodes, while there is nothing to publish.
const LOOK: Duration = Duration::from_secs(1);

fn rate(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(rate) if (1e-6..=1e9).contains(&rate) => Ok(rate),
        _ => Err("not a number of messages a second".to_owned()),
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let signals = Signals::catch()?;
    let settings = arguments.settings.settings()?;
    if arguments.pattern && arguments.size < pattern::HEADER as u64 {
        let why = format!("--size: a pattern has at least {} bytes", pattern::HEADER);
        return Err(Failure::new(Exit::Usage, why));
    }
    let mut tally = Tally::default();
    let done = publish(arguments, &settings, &signals, &mut tally);
    // Whoever reads the last line may be slow, too.
    signals.let_go();
    let is_complete = done.is_ok();
    if arguments.json {
        return report_as_json(done, &report(arguments, &tally, is_complete));
    }
    let told = tell(arguments, &tally, is_complete);
    done.and(told)
}

/// All that there is to do, up to where it fails; what became of messages stands in the tally.
fn publish(
    arguments: &Arguments,
    settings: &Settings,
    signals: &Signals,
    tally: &mut Tally,
) -> Result<(), Failure> {
    let service = AwaitedService::of(&settings.directory.value);
    let node = membership::join(settings, membership::options(settings, "pub"), &service, signals)?;
    (tally.node, tally.place) = (Some(node.identity()), Some(place(&node)));
    let (service, name) = (&service, &*arguments.topic);
    let wanted = Wanted { node: &node, name, settings, service, signals };
    // If it is there, it says how long a message may be.
    let found = wanted.as_it_is()?;
    let longest = match &found {
        Some(topic) => Some(topic.settings()?.largest),
        None => settings.largest.is_given().then_some(settings.largest.value.0),
    };
    let origin = settings.largest.origin.as_deref();
    let limit = Limit { topic: name, largest: longest, origin };
    let input = input(arguments, limit, signals)?;
    let topic = match found {
        Some(topic) => topic,
        None => wanted.open_to_publish(input.largest())?,
    };
    let like = topic.settings()?;
    let publisher = wanted.publisher(topic)?;
    tally.publisher = Some(publisher.id().to_string());
    let mut work = Work {
        arguments,
        signals,
        publisher,
        limit: Limit { largest: Some(like.largest), ..limit },
        is_reliable: like.reliability == Reliability::Reliable,
        tally,
        progress: Progress::start(),
        hints: NodeHints::begin(),
        readers: Readers::default(),
        node: &node,
        notice: Notice::default(),
    };
    let done = work.do_all(input);
    work.judge(done)
}

fn input<'a>(
    arguments: &Arguments,
    limit: Limit<'_>,
    signals: &'a Signals,
) -> Result<Input<'a>, Failure> {
    if arguments.pattern {
        let next = Content { run: draw()?, number: 0, length: arguments.size };
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

/// A number that no other run has.
fn draw() -> Result<u64, Failure> {
    getrandom::u64().map_err(|error| Failure::failed(format!("drawing a run's number: {error}")))
}

/// What became of messages.
#[derive(Debug, Default)]
struct Tally {
    /// The node's identity and directory, and the publisher's identity, once they are known.
    node: Option<String>,
    place: Option<String>,
    publisher: Option<String>,
    messages: u64,
    bytes: u64,
    /// Nobody subscribed.
    unwanted: u64,
    dropped: u64,
    /// How many got the last one, if any was published.
    readers: Option<u32>,
    /// Time spent without room.
    waited: Duration,
    /// How long it took, for each, to get its memory, and to write it, in nanoseconds.
    borrowing: Histogram,
    filling: Histogram,
    time: Duration,
    is_released: bool,
    /// Messages that nodes did not get which were given up.
    missed_by_nodes: u64,
    /// Subscribers of this node that were evicted meanwhile.
    evicted: u64,
}

struct Work<'a> {
    arguments: &'a Arguments,
    signals: &'a Signals,
    publisher: Publisher,
    /// The longest message that the topic takes.
    limit: Limit<'a>,
    is_reliable: bool,
    tally: &'a mut Tally,
    progress: Progress,
    hints: NodeHints,
    readers: Readers,
    node: &'a Node,
    /// What was told of waits for room.
    notice: Notice,
}

impl Work<'_> {
    fn do_all(&mut self, input: Input<'_>) -> Result<(), Failure> {
        self.wait_for_subscribers()?;
        self.publish_all(input)?;
        self.wait_until_released()
    }

    /// What became of what was published, as far as that is known now, however it ended. That
    /// messages are missing somewhere is worse than why there are no more.
    fn judge(&mut self, done: Result<(), Failure>) -> Result<(), Failure> {
        let counters = self.publisher.counters();
        let tally = &mut *self.tally;
        (tally.missed_by_nodes, tally.evicted) = (counters.missed_by_nodes, counters.evicted);
        let mut rows = Vec::new();
        let is_in_vain = done.is_ok() && tally.unwanted > 0;
        if tally.missed_by_nodes > 0 || is_in_vain {
            rows = self.hints.conclude(self.node, &self.arguments.topic).to_vec();
        }
        if tally.missed_by_nodes == 0 {
            return done;
        }
        tally.is_released = false;
        let why = match &done {
            Err(failure) if !failure.is_silent() => format!("{failure}; "),
            _ => String::new(),
        };
        let missed = text::counted(tally.missed_by_nodes, "message");
        let names = in_brackets(&given_up(&rows, &self.arguments.topic));
        let why =
            format!("{why}{missed} did not reach a node that subscribes{names}: it was given up");
        Err(Failure::new(Exit::Missed, why))
    }

    fn wait_for_subscribers(&mut self) -> Result<(), Failure> {
        let wanted = self.arguments.wait_for;
        let deadline = Deadline::after(self.arguments.timeout);
        let mut is_said = false;
        loop {
            let found = self.publisher.subscribers();
            if found >= wanted {
                return Ok(());
            }
            if deadline.is_over() {
                let cause = self.hints.cause(self.node, &self.arguments.topic);
                let why = format!(
                    "publish in topic \"{}\" failed: {found} of {} came in time (--timeout). Start subscribers \
                     first, or wait longer{cause}",
                    self.arguments.topic.escape_debug(),
                    text::counted(wanted.into(), "subscriber")
                );
                return Err(Failure::new(Exit::Deadline, why));
            }
            if !is_said {
                is_said = true;
                let awaited = text::counted(wanted.into(), "subscriber");
                let (topic, place) = (self.arguments.topic.escape_debug(), place(self.node));
                text::complain(&format!(
                    "fabricast: waiting for {awaited} of topic \"{topic}\" {place}"
                ));
            }
            hints::say(&self.hints.look(self.node, &self.arguments.topic, Phase::Waiting));
            self.signals.pause(deadline.slice().min(SLICE / 5))?;
        }
    }

    fn publish_all(&mut self, mut input: Input<'_>) -> Result<(), Failure> {
        input.invite();
        let mut buffer = Vec::new();
        let began = Instant::now();
        // From when on the rate counts.
        let mut since = began;
        let mut told: Option<Instant> = None;
        loop {
            self.keep_to_the_rate(&mut since)?;
            let Some(message) = input.next(self.limit, self.signals)? else {
                return Ok(());
            };
            let length = message.length();
            if self.limit.largest.is_some_and(|largest| length > largest) {
                self.limit.check(message.name(), length)?;
            }
            let sent = self.publish(message, &mut buffer)?;
            let tally = &mut *self.tally;
            tally.messages += 1;
            tally.bytes += length;
            tally.readers = Some(sent.readers);
            tally.dropped += u64::from(sent.is_dropped);
            tally.unwanted += u64::from(sent.position.is_none() && !sent.is_dropped);
            tally.time = began.elapsed();
            if self.readers.have_gone(&sent) {
                let topic = self.arguments.topic.escape_debug();
                self.complain(&[format!(
                    "topic \"{topic}\": the last subscriber has gone; messages are published to no subscriber"
                )]);
            }
            self.look_at_other_nodes();
            self.say("");
            if let Some(pause) = self.arguments.every
                && told.is_none_or(|told| told.elapsed() >= pause)
            {
                told = Some(Instant::now());
                text::json(&report(self.arguments, self.tally, false))?;
            }
        }
    }

    fn say(&mut self, what: &str) {
        self.progress.say(self.tally.messages, self.tally.bytes, what);
    }

    fn complain(&mut self, lines: &[String]) {
        if !lines.is_empty() {
            self.progress.clear();
            hints::say(lines);
        }
    }

    fn look_at_other_nodes(&mut self) {
        let lines = self.hints.look(self.node, &self.arguments.topic, Phase::Flowing);
        self.complain(&lines);
    }

    /// Waits until it is time for the next message.
    fn keep_to_the_rate(&mut self, since: &mut Instant) -> Result<(), Failure> {
        self.signals.go_on()?;
        let Some(rate) = self.arguments.rate else { return Ok(()) };
        let at = Duration::try_from_secs_f64(self.tally.messages as f64 / rate);
        let at = at.unwrap_or(Duration::MAX);
        if self.arguments.steady {
            *since += since.elapsed().saturating_sub(at);
        }
        loop {
            let left = at.saturating_sub(since.elapsed());
            if left.is_zero() {
                return Ok(());
            }
            self.look_at_other_nodes();
            self.signals.pause(left.min(LOOK))?;
        }
    }

    /// Publishes a message, and waits for room as long as it may.
    fn publish(&mut self, message: Message, buffer: &mut Vec<u8>) -> Result<Sent, Failure> {
        let deadline = Deadline::after(self.arguments.timeout);
        let length = message.length();
        // Only told as JSON: else nobody pays for it.
        let clock = || self.arguments.json.then(Instant::now);
        let asked = clock();
        // When a wait began, if there is one.
        let mut began: Option<Instant> = None;
        let mut loan = match self.publisher.try_loan(length).map_err(with_remedy)? {
            Some(loan) => loan,
            None => loop {
                let since = Instant::now();
                let borrowed = self.publisher.loan(length, deadline.slice());
                self.tally.waited += since.elapsed();
                match borrowed {
                    Ok(loan) => break loan,
                    Err(error) => {
                        let began = *began.get_or_insert(since);
                        self.go_on_after(error, deadline, (Wait::Room, began))?;
                    }
                }
            },
        };
        let lent = clock();
        message.fill(&mut loan, buffer, self.signals)?;
        if let (Some(asked), Some(lent)) = (asked, lent) {
            self.tally.borrowing.add((lent - asked).as_nanos() as u64);
            self.tally.filling.add(lent.elapsed().as_nanos() as u64);
        }
        loop {
            let since = Instant::now();
            loan = match loan.publish_within(deadline.slice())? {
                Attempt::Sent(sent) => return Ok(sent),
                Attempt::Full(loan) => loan,
            };
            self.tally.waited += since.elapsed();
            let began = *began.get_or_insert(since);
            self.look_whether_to_go_on(deadline, (Wait::Room, began))?;
        }
    }

    /// A slice of the time has passed in vain, or something else went wrong.
    fn go_on_after(
        &mut self,
        error: pubsub::Error,
        deadline: Deadline,
        wait: (Wait, Instant),
    ) -> Result<(), Failure> {
        match error.kind() {
            ErrorKind::DeadlineExceeded => self.look_whether_to_go_on(deadline, wait),
            _ => Err(with_remedy(error)),
        }
    }

    fn look_whether_to_go_on(
        &mut self,
        deadline: Deadline,
        wait: (Wait, Instant),
    ) -> Result<(), Failure> {
        self.say("; waiting for room");
        self.look_at_other_nodes();
        if let Some(told) = self.notice.look(self.node, &self.arguments.topic, wait) {
            self.progress.clear();
            text::complain(&format!("fabricast: {told}"));
        }
        if self.signals.ask_to_end() {
            return Err(interrupted());
        }
        if !deadline.is_over() {
            return Ok(());
        }
        let (topic, remedy) =
            (self.arguments.topic.escape_debug(), "Wait longer, or end slow subscribers");
        let why = match wait.0 {
            Wait::Room => format!(
                "publish in topic \"{topic}\" failed: there was no room for one more message in time (--timeout): \
                 subscribers have not released earlier ones. {remedy}"
            ),
            Wait::Release => format!(
                "publish in topic \"{topic}\" failed: subscribers have not released all messages in time (--timeout). \
                 {remedy}"
            ),
        };
        Err(Failure::new(Exit::Deadline, why))
    }

    /// What was published is complete when those who read it are done.
    fn wait_until_released(&mut self) -> Result<(), Failure> {
        let deadline = Deadline::after(self.arguments.timeout);
        let began = Instant::now();
        while self.is_reliable {
            match self.publisher.flush(deadline.slice()) {
                Ok(()) => break,
                Err(error) => self.go_on_after(error, deadline, (Wait::Release, began))?,
            }
        }
        self.tally.is_released = self.is_reliable;
        Ok(())
    }
}

/// Whether there were subscribers of the messages published so far.
#[derive(Debug, Default)]
struct Readers {
    are_there: bool,
}

impl Readers {
    /// Was this the first message to no subscriber, after one that had some?
    fn have_gone(&mut self, sent: &Sent) -> bool {
        if sent.is_dropped {
            return false;
        }
        let are_there = sent.position.is_some();
        std::mem::replace(&mut self.are_there, are_there) && !are_there
    }
}

impl Tally {
    /// An amount for each second; None if no time has passed.
    fn rate(&self, amount: u64) -> Option<f64> {
        (!self.time.is_zero()).then(|| amount as f64 / self.time.as_secs_f64())
    }
}

/// What was done, also if it was less than all, for programs.
fn report(arguments: &Arguments, tally: &Tally, is_complete: bool) -> Value {
    let Tally { messages, bytes, unwanted, dropped, readers, waited, time, .. } = *tally;
    let per_second = |amount: u64| tally.rate(amount).unwrap_or(0.0);
    let stages = [(Stage::Borrow, &tally.borrowing), (Stage::Fill, &tally.filling)];
    let latencies = stages.map(|(stage, times)| Latency::of(stage.name(), times));
    json!({
        "topic": arguments.topic,
        "node": tally.node,
        "publisher": tally.publisher,
        "messages": messages,
        "bytes": bytes,
        "seconds": time.as_secs_f64(),
        "messages_per_s": per_second(messages),
        "bytes_per_s": per_second(bytes),
        "waited_s": waited.as_secs_f64(),
        "readers": readers,
        "unwanted": unwanted,
        "dropped": dropped,
        "released": tally.is_released,
        "missed_by_nodes": tally.missed_by_nodes,
        "evicted": tally.evicted,
        "latencies": latencies.into_iter().flatten().collect::<Vec<_>>(),
        "complete": is_complete,
    })
}

/// The same for people.
fn tell(arguments: &Arguments, tally: &Tally, is_complete: bool) -> Result<(), Failure> {
    let Tally { messages, bytes, unwanted, dropped, .. } = *tally;
    if tally.publisher.is_none() || (messages == 0 && !is_complete) {
        // Nothing was done that there would be something to tell of, beside why.
        return Ok(());
    }
    let had_no_subscriber = match &tally.place {
        Some(place) => format!("had no subscriber {place}"),
        None => "had no subscriber".to_owned(),
    };
    let all = so_far(messages, bytes, tally.rate(bytes));
    let mut line = format!("{}: {all}", arguments.topic.escape_debug());
    let missed = tally.missed_by_nodes;
    for (count, what) in
        [(dropped, "dropped"), (unwanted, &*had_no_subscriber), (missed, "missed by other nodes")]
    {
        if count > 0 {
            line.push_str(&format!("; {count} {what}"));
        }
    }
    if tally.evicted > 0 {
        let evicted = text::counted(tally.evicted, "subscriber");
        line.push_str(&format!("; {evicted} evicted for being too slow"));
    }
    text::print(&format!("{line}\n"))
}
