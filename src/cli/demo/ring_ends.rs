//! The two ends of the ring that `fabricast demo --ring` shows: this process writes, a second one
//! reads, and answers small messages by a ring of its own.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::process::Stdio;
use std::time::{Duration, Instant};

use fabric::ring::{Notify, Port, ReceiverId, RingAnswer, RingOffer, RingOptions, SenderId};
use fabric::{
    Access, Address, AddressVector, Caps, CompletionQueue, Domain, Endpoint, EndpointKind,
    ErrorKind, HostMemory, MemoryRegion, Offer, Order, Progress, Query, QueueOptions, Waiting,
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use nix::unistd::alarm;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::cast::line;
use super::worker::{RING, program};
use crate::cli::exit::{Exit, Failure};
use crate::cli::histogram::Histogram;
use command::local;
use command::worker::Worker;

/// Bytes of the ring.
pub(super) const CAPACITY: usize = 16 << 20;
/// The large messages.
pub(super) const LARGE: usize = 1 << 20;
/// The small messages.
pub(super) const SMALL: usize = 64;
/// Large messages that are timed together.
const TOGETHER: u64 = 128;
/// Every message is a piece of this, each from another place.
const PATTERN: usize = 2 * LARGE;

/// How long the other end may do nothing at all, and how long it is waited for at a time.
const STALL: Duration = Duration::from_secs(10);
const SLICE: Duration = Duration::from_millis(200);
/// The second process is over by then, whatever happens.
const LIMIT: u32 = 120;

// What messages are for.
const PING: u32 = 1;
/// Its ends are compared.
const STREAM: u32 = 2;
/// All of its bytes are.
const COMPARED: u32 = 3;
const END: u32 = 4;

/// What came of it.
#[derive(Debug)]
pub(super) struct Shown {
    /// One way, in nanoseconds of both ways.
    pub(super) round_trips: Histogram,
    pub(super) gb_per_s: f64,
    /// The same while the reader compares every byte.
    pub(super) checked_gb_per_s: f64,
    /// Bytes that were compared, on both sides.
    pub(super) checked: u64,
    /// Messages that were not what they had to be.
    pub(super) bad: u64,
    pub(super) wraps: u64,
}

/// What the second process is told first.
#[derive(Debug, Serialize, Deserialize)]
struct Role {
    provider: String,
    domain: String,
}

/// Where an end is, and the ring that it reads.
#[derive(Debug, Serialize, Deserialize)]
struct Meeting {
    address: Address,
    ring: RingOffer,
}

/// What an end found.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Found {
    checked: u64,
    bad: u64,
}

/// A question for providers that could carry it.
pub(super) fn query() -> Query {
    // Both ends poll: a provider's own progress thread would only take the core away from them.
    Query::new(EndpointKind::Rdm).progress(Progress::Manual)
}

fn offer(role: &Role) -> Result<Offer, Failure> {
    let query = query().provider(&role.provider).domain(&role.domain);
    let order = Order::WRITE_AFTER_WRITE | Order::SEND_AFTER_WRITE;
    let tagged = query.clone().caps(Caps::MESSAGE | Caps::TAGGED | Caps::RMA).order(order);
    // By tags notices that are messages are told from others; without a hint for order some
    // providers promise none.
    let first = |query: &Query| local::offers(query, None).map(|mut all| all.remove(0).offer);
    let ordered = first(&query.clone().order(order));
    let best = match &ordered {
        Ok(offer) if Notify::Immediate.check(offer.capabilities()).is_ok() => ordered,
        _ => first(&tagged).or(ordered),
    };
    Ok(best.or_else(|_| first(&query))?)
}

/// The other process, by lines.
trait Other {
    fn say(&mut self, what: &impl Serialize) -> Result<(), Failure>;
    fn hear<T: DeserializeOwned>(&mut self) -> Result<T, Failure>;
    fn is_gone(&mut self) -> bool;
}

/// The second process, as the first one has it.
struct Second {
    worker: Worker,
    input: std::process::ChildStdin,
    output: BufReader<std::process::ChildStdout>,
}

/// The first process, as the second one has it; when it is gone a signal tells.
struct First;

fn decode<T: DeserializeOwned>(text: &str) -> Result<T, Failure> {
    let said = serde_json::from_str(text);
    said.map_err(|error| Failure::failed(format!("the other process said {text:?}: {error}")))
}

fn broken(error: std::io::Error) -> Failure {
    Failure::failed(format!("talking to the other process: {error}"))
}

impl Other for Second {
    fn say(&mut self, what: &impl Serialize) -> Result<(), Failure> {
        self.input.write_all(line(what)?.as_bytes()).map_err(broken)
    }

    fn hear<T: DeserializeOwned>(&mut self) -> Result<T, Failure> {
        // What it says comes in whole lines.
        let mut ready = [PollFd::new(self.output.get_ref().as_fd(), PollFlags::POLLIN)];
        let timeout = PollTimeout::try_from(STALL).unwrap_or(PollTimeout::MAX);
        if self.output.buffer().is_empty() && !matches!(poll(&mut ready, timeout), Ok(1..)) {
            return Err(Failure::new(Exit::Deadline, "the second process says nothing"));
        }
        let mut text = String::new();
        self.output.read_line(&mut text).map_err(broken)?;
        decode(&text)
    }

    fn is_gone(&mut self) -> bool {
        self.worker.has_ended()
    }
}

impl Other for First {
    fn say(&mut self, what: &impl Serialize) -> Result<(), Failure> {
        let mut out = std::io::stdout().lock();
        out.write_all(line(what)?.as_bytes()).and_then(|()| out.flush()).map_err(broken)
    }

    fn hear<T: DeserializeOwned>(&mut self) -> Result<T, Failure> {
        let mut text = String::new();
        std::io::stdin().read_line(&mut text).map_err(broken)?;
        decode(&text)
    }

    fn is_gone(&mut self) -> bool {
        false
    }
}

/// One end.
struct End<O> {
    port: Port,
    sender: SenderId,
    receiver: ReceiverId,
    source: MemoryRegion,
    pattern: Vec<u8>,
    sent: u64,
    taken: u64,
    found: Found,
    other: O,
    _addresses: AddressVector,
}

/// Where in the pattern a message comes from: never the same place for messages
/// that follow each other.
fn source_of(number: u64) -> usize {
    (number.wrapping_mul(7919 * 8) % (PATTERN - LARGE) as u64) as usize
}

impl<O: Other> End<O> {
    fn open(role: &Role, mut other: O) -> Result<Self, Failure> {
        // Two processes that poll all the time need a core each.
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let waiting = if cores > 1 { Waiting::Busy } else { Waiting::default() };
        let domain = Domain::open(&offer(role)?)?;
        let addresses = AddressVector::open(&domain)?;
        let options = QueueOptions { size: 1024, waiting };
        let mut queue = CompletionQueue::open_with(&domain, options)?;
        let endpoint = Endpoint::builder(&domain).addresses(&addresses).queue(&mut queue).open()?;
        let mut port = Port::new(endpoint, queue);
        let options = RingOptions::new(port.endpoint(), CAPACITY as u64)?;
        let receiver = port.offer(&options)?;
        let address = port.endpoint().address()?;
        other.say(&Meeting { address, ring: port.terms(receiver)? })?;
        let there: Meeting = other.hear()?;
        let peer = addresses.insert(&there.address)?;
        let (sender, answer) = port.accept(peer, &there.ring, LARGE as u64)?;
        other.say(&answer)?;
        let answer: RingAnswer = other.hear()?;
        port.connect(receiver, peer, &answer)?;
        let mut value = 1_u64;
        let words = (0..PATTERN / 8).flat_map(|_| {
            value = value
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            value.to_le_bytes()
        });
        let pattern: Vec<u8> = words.collect();
        let source = domain.register(HostMemory::zeroed(PATTERN)?, Access::WRITE)?;
        if source.is_registered() && !source.is_enabled() {
            source.bind_endpoint(port.endpoint())?;
            source.enable()?;
        }
        source.write(0, &pattern)?;
        Ok(Self {
            port,
            sender,
            receiver,
            source,
            pattern,
            sent: 0,
            taken: 0,
            found: Found::default(),
            other,
            _addresses: addresses,
        })
    }

    /// Tries again as long as the other end is there, for a while.
    fn patiently<T>(
        &mut self,
        mut attempt: impl FnMut(&mut Self) -> fabric::Result<T>,
    ) -> Result<T, Failure> {
        let deadline = Instant::now() + STALL;
        loop {
            match attempt(self) {
                Err(error)
                    if error.kind() == ErrorKind::DeadlineExceeded && Instant::now() < deadline =>
                {
                    if self.other.is_gone() {
                        return Err(Failure::failed("the second process ended too early"));
                    }
                }
                done => return Ok(done?),
            }
        }
    }

    fn send(&mut self, length: usize, what: u32) -> Result<(), Failure> {
        let from = source_of(self.sent);
        let payload = self.source.slice(from..from + length)?;
        let mut message = self.port.begin(self.sender, what, length as u64)?;
        self.patiently(|end| end.port.finish(end.sender, &mut message, &payload, SLICE))?;
        while self.port.next_read(self.sender)?.is_some() {}
        self.sent += 1;
        Ok(())
    }

    /// Takes the next message, compares it, and says what it is for.
    fn take(&mut self) -> Result<u32, Failure> {
        let mut is_good = true;
        loop {
            let view = self.patiently(|end| end.port.receive(end.receiver, SLICE))?;
            let header = *view.header();
            let from = source_of(self.taken) + header.offset as usize;
            let mut bytes = [0; 4096];
            let mut compare = |at: usize, length: usize| -> Result<(), Failure> {
                view.read(at, &mut bytes[..length])?;
                is_good &= bytes[..length] == self.pattern[from + at..][..length];
                self.found.checked += length as u64;
                Ok(())
            };
            let length = view.len();
            if header.topic == STREAM {
                compare(0, length.min(8))?;
                compare(length - length.min(8), length.min(8))?;
            } else {
                for at in (0..length).step_by(4096) {
                    compare(at, 4096.min(length - at))?;
                }
            }
            let is_last = view.is_last();
            drop(view);
            self.port.tell(self.receiver, false)?;
            if is_last {
                self.taken += 1;
                self.found.bad += u64::from(!is_good);
                return Ok(header.topic);
            }
        }
    }

    fn flush(&mut self) -> Result<(), Failure> {
        self.patiently(|end| end.port.flush(end.sender, SLICE))
    }

    /// Nanoseconds of each round trip.
    fn ping(&mut self, count: usize, samples: &mut Histogram) -> Result<(), Failure> {
        let mut before = Instant::now();
        for _ in 0..count {
            self.send(SMALL, PING)?;
            self.take()?;
            let after = Instant::now();
            samples.add((after - before).as_nanos() as u64);
            before = after;
        }
        Ok(())
    }

    /// Bytes in a nanosecond.
    fn stream(&mut self, what: u32, time: Duration) -> Result<f64, Failure> {
        let (mut bytes, mut elapsed) = (0, Duration::ZERO);
        while elapsed < time {
            let start = Instant::now();
            for _ in 0..TOGETHER {
                self.send(LARGE, what)?;
            }
            self.flush()?;
            elapsed += start.elapsed();
            bytes += TOGETHER * LARGE as u64;
        }
        Ok(bytes as f64 / elapsed.as_nanos() as f64)
    }
}

/// Starts a second process, and shows the ring. Each of three parts takes about this long.
pub(super) fn show(provider: &str, domain: &str, time: Duration) -> Result<Shown, Failure> {
    let role = Role { provider: provider.to_owned(), domain: domain.to_owned() };
    let mut command = program(RING);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut worker = Worker::start(command, "the second process", Signal::SIGTERM)?;
    let pipes = worker.pipes().ok_or_else(|| Failure::failed("the second process has no pipes"))?;
    let (input, output) = pipes;
    let mut second = Second { worker, input, output: BufReader::new(output) };
    second.say(&role)?;
    let mut end = End::open(&role, second)?;
    let mut round_trips = Histogram::default();
    end.ping(200, &mut round_trips)?;
    round_trips = Histogram::default();
    let until = Instant::now() + time;
    while Instant::now() < until && round_trips.samples() < 1_000_000 {
        end.ping(1000, &mut round_trips)?;
    }
    let gb_per_s = end.stream(STREAM, time)?;
    let checked_gb_per_s = end.stream(COMPARED, time)?;
    end.send(SMALL, END)?;
    let there: Found = end.other.hear()?;
    let shown = Shown {
        round_trips,
        gb_per_s,
        checked_gb_per_s,
        checked: end.found.checked + there.checked,
        bad: end.found.bad + there.bad,
        wraps: end.port.sender(end.sender)?.writer().tail() / CAPACITY as u64,
    };
    let End { port, other, .. } = end;
    other.worker.finish()?;
    port.close()?;
    Ok(shown)
}

/// The life of the second process.
pub(super) fn answer() -> Result<(), Failure> {
    let role: Role = First.hear()?;
    alarm::set(LIMIT);
    let mut end = End::open(&role, First)?;
    loop {
        match end.take()? {
            PING => end.send(SMALL, PING)?,
            END => break,
            _ => {}
        }
    }
    let found = std::mem::take(&mut end.found);
    end.other.say(&found)?;
    Ok(end.port.close()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_from_inside_the_pattern_and_differ() {
        for number in (0..10_000).chain([u64::MAX - 1, u64::MAX]) {
            let source = source_of(number);
            assert!(source + LARGE <= PATTERN && source.is_multiple_of(8));
            assert_ne!(source, source_of(number.wrapping_add(1)));
        }
    }
}
