//! A process of the demonstration: it is given its part by who started it, a line on standard
//! input, and says what it does, by lines on standard output.

use std::io::{BufRead, Write};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant, SystemTime};

use nix::unistd::alarm;
use pubsub::{
    Attempt, Budgets, ErrorKind, Loan, NetworkOptions, Node, NodeOptions, Publisher, Sample,
    ServiceMode, Topic,
};

use super::cast::{Part, Published, Reading, Role, STAGES, Said, TIMES, TOPICS, line};
use super::network::{self, Place};
use crate::cli::exit::{Exit, Failure};
use crate::cli::histogram::Histogram;
use crate::cli::process::{end_with_parent, leave};
use crate::cli::stages::{self, Stage};
use crate::cli::window::{Content, Windows};
use command::worker::this_program;

/// What is waited for at a time.
const SLICE: Duration = Duration::from_millis(100);
/// Between two of its lines.
const PAUSE: Duration = Duration::from_millis(250);
/// How long one process may keep others waiting that serve it.
const PATIENCE: Duration = Duration::from_secs(20);
/// Messages that the latest times are of.
const LATEST: usize = 15;
/// What it is to do next.
pub(super) const GO: &str = "go";
pub(super) const END: &str = "end";
pub(super) const PROBE: &str = "probe";

/// This program again, as one of the demonstration.
pub(super) fn program(name: &str) -> Command {
    let mut command = this_program("fabricast");
    command.arg("demo-worker").arg(name);
    command
}

/// The life of such a process.
pub(crate) fn work(name: &str) -> Result<(), Failure> {
    if name == PROBE {
        return network::probe().map_err(|why| {
            println!("{why}");
            Failure::silent(Exit::Denied)
        });
    }
    let mut first = String::new();
    let read = std::io::stdin().read_line(&mut first);
    read.map_err(|error| Failure::failed(format!("reading its part: {error}")))?;
    let role: Role = serde_json::from_str(&first)
        .map_err(|error| Failure::failed(format!("reading its part: {error}")))?;
    end_with_parent(role.parent)?;
    alarm::set(role.limit.as_secs().max(1) as u32);
    match act(&role) {
        Ok(()) => say(&Said::Done),
        Err(failure) => {
            say(&Said::Failed { exit: failure.exit() as i32, message: failure.to_string() })?;
            Err(Failure::silent(failure.exit()))
        }
    }
}

fn say(what: &Said) -> Result<(), Failure> {
    let line = line(what)?;
    let mut out = std::io::stdout().lock();
    let said = out.write_all(line.as_bytes()).and_then(|()| out.flush());
    said.map_err(|_| Failure::silent(Exit::Failed))
}

fn act(role: &Role) -> Result<(), Failure> {
    // Before there are threads: each has a network of its own.
    match role.place {
        Place::Here => {}
        Place::Separate => network::separate().map_err(Failure::failed)?,
        Place::With(process) => network::follow(process)?,
    }
    let ears = Ears::open()?;
    match &role.part {
        Part::Serve { .. } => serve(role, &ears),
        Part::Publish { .. } => publish(role, &ears),
        Part::Read { .. } => read(role, &ears),
    }
}

/// What comes on standard input.
struct Ears {
    went: Receiver<()>,
    is_to_end: &'static AtomicBool,
}

impl Ears {
    fn open() -> Result<Self, Failure> {
        static IS_TO_END: AtomicBool = AtomicBool::new(false);
        let (go, went) = channel();
        std::thread::Builder::new()
            .spawn(move || listen(&go, &IS_TO_END))
            .map_err(|error| Failure::failed(format!("starting a thread: {error}")))?;
        Ok(Self { went, is_to_end: &IS_TO_END })
    }

    /// Waits until it is to begin.
    fn wait_to_go(&self) -> Result<(), Failure> {
        self.went.recv().map_err(|_| Failure::failed("nobody says when to begin"))
    }

    fn is_to_end(&self) -> bool {
        self.is_to_end.load(Ordering::Acquire)
    }
}

fn listen(go: &Sender<()>, is_to_end: &AtomicBool) {
    for line in std::io::stdin().lock().lines() {
        match line.as_deref() {
            Ok(GO) => drop(go.send(())),
            Ok(END) => {
                is_to_end.store(true, Ordering::Release);
                // Whoever still waits to begin is not to.
                let _ = go.send(());
            }
            _ => break,
        }
    }
    // Who started it is gone, and with it all that this is good for.
    leave(Exit::Failed as i32)
}

fn options(role: &Role) -> NodeOptions {
    NodeOptions {
        directory: role.directory.clone(),
        label: role.label.clone(),
        service: ServiceMode::Outside,
        patience: PATIENCE,
        ..NodeOptions::default()
    }
}

fn serve(role: &Role, ears: &Ears) -> Result<(), Failure> {
    let Part::Serve { listen, peers, budget } = &role.part else { return Ok(()) };
    if matches!(role.place, Place::Separate) {
        say(&Said::Separate)?;
        ears.wait_to_go()?;
        network::plug_in()?;
    }
    let network = NetworkOptions {
        listen: Some(*listen),
        peers: peers.clone(),
        // Nobody else is in these networks, or all are of this user.
        insecure: !listen.ip().is_loopback(),
        name: role.label.clone(),
        lost_after: PATIENCE,
        ..NetworkOptions::default()
    };
    let node = Node::join(NodeOptions {
        service: ServiceMode::Embedded,
        budgets: Budgets { host: Some(*budget), device: Some(*budget) },
        network: Some(network),
        ..options(role)
    })?;
    let mut is_ready = false;
    loop {
        let is_over = ears.is_to_end();
        let rows = node.report()?;
        if !is_ready {
            let listens = rows.iter().find_map(|row| match row {
                pubsub::Row::Node { listens, .. } => listens.clone(),
                _ => None,
            });
            if listens.is_some() {
                say(&Said::Ready { listens })?;
                is_ready = true;
            }
        }
        say(&Said::Served(rows))?;
        if is_over {
            return Ok(());
        }
        std::thread::sleep(if is_ready { PAUSE } else { PAUSE / 10 });
    }
}

fn open(role: &Role, which: usize, memory: &str) -> Result<(Node, Topic), Failure> {
    let node = Node::join(options(role))?;
    let subject = &TOPICS[which];
    let topic = node.topic(subject.name, &subject.settings(memory.parse()?))?;
    Ok((node, topic))
}

/// Nanoseconds since 1970, as messages have them.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| since.as_nanos() as u64)
}

/// What a publisher attaches: when it asked for memory, when it had it, when that was filled.
struct Stamps([u64; 3]);

impl Stamps {
    fn bytes(&self) -> Vec<u8> {
        self.0.iter().flat_map(|time| time.to_le_bytes()).collect()
    }

    fn of(bytes: &[u8]) -> Option<Self> {
        let mut times = [0; 3];
        for (time, word) in times.iter_mut().zip(bytes.chunks_exact(8)) {
            *time = u64::from_le_bytes(word.try_into().ok()?);
        }
        (bytes.len() == 24).then_some(Self(times))
    }
}

struct Publishing<'a> {
    publisher: Publisher,
    ears: &'a Ears,
    done: Published,
    told: Instant,
}

fn publish(role: &Role, ears: &Ears) -> Result<(), Failure> {
    let Part::Publish { topic: which, memory, run, time, rate } = &role.part else {
        return Ok(());
    };
    let subject = &TOPICS[*which];
    let (_node, topic) = open(role, *which, memory)?;
    let publisher = topic.publisher()?;
    while publisher.subscribers() < subject.expected() {
        if ears.is_to_end() {
            return Ok(());
        }
        std::thread::sleep(SLICE / 10);
    }
    let windows = Windows::default();
    say(&Said::Ready { listens: None })?;
    ears.wait_to_go()?;
    let mut all = Publishing { publisher, ears, done: Published::default(), told: Instant::now() };
    let (begin, each) = (Instant::now(), Duration::from_secs_f64(1.0 / rate));
    let mut next = begin;
    while begin.elapsed() < *time && !ears.is_to_end() {
        let left = next.saturating_duration_since(Instant::now());
        if !left.is_zero() {
            std::thread::sleep(left.min(SLICE));
            all.tell(false)?;
            continue;
        }
        // Who had to wait does not make up for it.
        next = (next + each).max(Instant::now());
        let content = Content { run: *run, number: all.done.messages, length: subject.size };
        if !all.publish(&windows, content)? {
            break;
        }
        all.tell(false)?;
    }
    while !ears.is_to_end() {
        match all.publisher.flush(SLICE) {
            Ok(()) => {
                all.done.is_released = true;
                break;
            }
            Err(error) if error.kind() == ErrorKind::DeadlineExceeded => all.tell(false)?,
            Err(error) => return Err(error.into()),
        }
    }
    all.tell(true)?;
    // It stays until the others have said what they know of it.
    while !ears.is_to_end() {
        std::thread::sleep(SLICE);
    }
    Ok(())
}

impl Publishing<'_> {
    fn tell(&mut self, is_urgent: bool) -> Result<(), Failure> {
        if !is_urgent && self.told.elapsed() < PAUSE {
            return Ok(());
        }
        self.told = Instant::now();
        say(&Said::Published(self.done.clone()))
    }

    /// False if it is to end before there is room.
    fn publish(&mut self, windows: &Windows, content: Content) -> Result<bool, Failure> {
        let asked = now();
        let Some(mut loan) = self.borrow(content.length)? else { return Ok(false) };
        let lent = now();
        windows.write(content, |offset, part| loan.write(offset, part))?;
        loan.set_metadata(&Stamps([asked, lent, now()]).bytes())?;
        loop {
            let since = Instant::now();
            loan = match loan.publish_within(SLICE)? {
                Attempt::Sent(_) => break,
                Attempt::Full(loan) => loan,
            };
            self.done.waited += since.elapsed();
            self.tell(false)?;
            if self.ears.is_to_end() {
                return Ok(false);
            }
        }
        self.done.messages += 1;
        self.done.bytes += content.length;
        Ok(true)
    }

    fn borrow(&mut self, length: u64) -> Result<Option<Loan>, Failure> {
        while !self.ears.is_to_end() {
            let since = Instant::now();
            match self.publisher.loan(length, SLICE) {
                Ok(loan) => return Ok(Some(loan)),
                Err(error) if error.kind() == ErrorKind::DeadlineExceeded => {
                    self.done.waited += since.elapsed();
                    self.tell(false)?;
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(None)
    }
}

fn read(role: &Role, ears: &Ears) -> Result<(), Failure> {
    let Part::Read { topic: which, memory, run } = &role.part else { return Ok(()) };
    let (_node, topic) = open(role, *which, memory)?;
    let mut subscriber = topic.subscriber()?;
    let mut windows = Windows::default();
    say(&Said::Ready { listens: None })?;
    let mut reading = Reading::default();
    let mut all: [Histogram; TIMES] = Default::default();
    let mut latest: Vec<[u64; TIMES]> = Vec::new();
    let (mut next, mut told) = (0, Instant::now());
    while !ears.is_to_end() {
        match subscriber.pull(SLICE) {
            Ok(sample) => {
                let times = times(&sample, now());
                for (time, samples) in times.iter().zip(&mut all) {
                    if *time > 0 {
                        samples.add(*time);
                    }
                }
                if latest.len() == LATEST {
                    latest.remove(0);
                }
                latest.push(times);
                let path = sample.way().to_string();
                if !reading.paths.contains(&path) {
                    reading.paths.push(path);
                }
                // A publisher counts from 1 on, and a run from 0.
                let number = sample.sequence().wrapping_sub(1);
                reading.missed += number.wrapping_sub(next).min(1 << 32);
                next = number.wrapping_add(1);
                let content = Content { run: *run, number, length: TOPICS[*which].size };
                let fault = match sample.length() == content.length {
                    true => windows.check(content, |offset, to| sample.read(offset, to))?.is_some(),
                    false => true,
                };
                drop(sample);
                reading.altered += u64::from(fault);
                reading.messages += 1;
                reading.bytes += content.length;
            }
            Err(error) if error.kind() == ErrorKind::DeadlineExceeded => {}
            Err(error) => return Err(error.into()),
        }
        if told.elapsed() >= PAUSE {
            told = Instant::now();
            reading.latest = middle(&latest);
            say(&Said::Read(Box::new(reading.clone())))?;
        }
    }
    reading.latest = middle(&latest);
    reading.samples = all.into();
    say(&Said::Read(Box::new(reading)))
}

/// How long each stage took of a message that was pulled at this time, and all of them from publishing
/// on. A stage that takes no time at all takes a nanosecond: 0 is for what it skipped.
fn times(sample: &Sample, pulled: u64) -> [u64; TIMES] {
    let Some(Stamps([asked, lent, filled])) = Stamps::of(&sample.metadata()) else {
        return [0; TIMES];
    };
    let known = |time: u64| time.max(1);
    let mut all = stages::took(&sample.times(), sample.origin().is_some(), filled, pulled);
    all[Stage::Borrow as usize] = Some(lent.saturating_sub(asked));
    all[Stage::Fill as usize] = Some(filled.saturating_sub(lent));
    let mut times = [known(pulled.saturating_sub(filled)); TIMES];
    for (time, stage) in times.iter_mut().zip(STAGES) {
        *time = all[stage as usize].map_or(0, known);
    }
    times
}

/// The median of each that was not skipped.
fn middle(latest: &[[u64; TIMES]]) -> [u64; TIMES] {
    std::array::from_fn(|stage| {
        let mut values: Vec<u64> =
            latest.iter().map(|times| times[stage]).filter(|time| *time > 0).collect();
        values.sort_unstable();
        values.get(values.len() / 2).copied().unwrap_or(0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stamps_are_read_as_they_were_written() {
        let bytes = Stamps([1, 2, u64::MAX]).bytes();
        assert_eq!(Stamps::of(&bytes).unwrap().0, [1, 2, u64::MAX]);
        assert!(Stamps::of(&bytes[1..]).is_none() && Stamps::of(&[]).is_none());
    }

    #[test]
    fn what_was_skipped_is_not_in_the_middle() {
        assert_eq!(middle(&[]), [0; TIMES]);
        let found =
            middle(&[[1, 0, 5, 0, 0, 0, 0, 9], [2, 0, 0, 0, 0, 0, 0, 9], [3, 0, 7, 0, 0, 0, 0, 9]]);
        assert_eq!(found, [2, 0, 7, 0, 0, 0, 0, 9]);
    }
}
