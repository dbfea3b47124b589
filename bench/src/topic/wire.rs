//! The wire alone: messages of the same length through a ring as a bridge has it, of as many lanes,
//! between two processes where those of services run. It takes turns with the messages of the
//! topic, and sleeps meanwhile. Nothing but the wire: no device, no queue; what is written lies in
//! as much memory as the bridge would write from, and what comes is let go of where it came.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fabric::ring::{
    Port, Pushed, ReceiverId, RingAnswer, RingOffer, RingOptions, SenderId, Stripes, Turn,
};
use fabric::{
    Access, Address, AddressVector, CompletionQueue, Domain, Endpoint, EndpointKind, HostMemory,
    MemoryRegion, Need, Query, QueueOptions, Reach, Waiting,
};
use pubsub::bridge::WorkerOptions;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::part::{Found, PATIENCE, is_over, nothing_found, now, room, wire_asked, wire_done};
use crate::party::{Done, Shared, find, leave};
use crate::process::confine;
use command::exit::{Exit, Failure};
use command::text;

/// What stands before a message: when it began, its number, and whether it is timed.
const HEAD: usize = 64;
const TOPIC: u32 = 1;
/// Completions that may wait to be looked at, as a bridge has it.
const QUEUE: usize = 4096;
/// How often what is asked for is looked at while nothing happens.
const LOOK: Duration = Duration::from_millis(1);
const LONGEST_REST: Duration = Duration::from_millis(20);
/// Turns without anything after which the writer is told all that was read.
const QUIET: u32 = 16;

/// One end of it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct End {
    pub(super) is_writer: bool,
    /// Below it the ends meet, and are told how the topic's messages go.
    pub(super) directory: PathBuf,
    pub(super) size: u64,
    pub(super) depth: u32,
    /// The messages are copied out of a device first: by way of slots.
    pub(super) is_staged: bool,
    /// Messages of each turn, and in how many turns at the beginning they are not counted.
    pub(super) each: u64,
    pub(super) warmup: u64,
    pub(super) cores: Vec<usize>,
}

/// How the messages of the topic go.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Way {
    pub(super) provider: String,
    pub(super) lanes: usize,
}

impl Way {
    /// As a node reports it: "ring of 3 lanes over net", or "ring over net".
    pub(super) fn of(path: &str) -> Option<Self> {
        let (ring, provider) = path.split_once(" over ")?;
        let lanes = match ring.strip_prefix("ring of ") {
            Some(lanes) => lanes.strip_suffix(" lanes")?.parse().ok()?,
            None => 1,
        };
        Some(Self { provider: provider.to_owned(), lanes })
    }

    /// Tells it to both ends.
    pub(super) fn tell(&self, directory: &Path) -> Result<(), Failure> {
        leave(directory, "way", self)
    }
}

/// Waits until another process has left this. None if all is over before.
fn hear<T: DeserializeOwned>(
    shared: &Shared,
    directory: &Path,
    name: &str,
) -> Result<Option<T>, Failure> {
    let end = Instant::now() + 2 * PATIENCE;
    loop {
        let found = find(directory, name)?;
        if found.is_some() || is_over(shared)? {
            return Ok(found);
        }
        if Instant::now() > end {
            return Err(late(&format!("{name} did not come")));
        }
        std::thread::sleep(LOOK);
    }
}

fn late(why: &str) -> Failure {
    Failure::new(Exit::Deadline, format!("the wire alone: {why}"))
}

/// Where the reader is reached, by each lane, and its ring.
#[derive(Debug, Serialize, Deserialize)]
struct Offered {
    address: Address,
    further: Vec<Address>,
    ring: RingOffer,
}

/// An endpoint with further lanes, opened as a bridge does.
struct Opened {
    port: Port,
    addresses: AddressVector,
}

impl Opened {
    fn new(way: &Way) -> Result<Self, Failure> {
        let caps = Need::ring(Reach::SameMachine).caps;
        let query = Query::new(EndpointKind::Rdm).source("127.0.0.1").caps(caps);
        let offer = query.provider(&way.provider).first()?;
        let domain = Domain::open(&offer)?;
        let addresses = AddressVector::open(&domain)?;
        let options = QueueOptions { size: QUEUE, waiting: Waiting::Block };
        let mut queue = CompletionQueue::open_with(&domain, options)?;
        let endpoint = Endpoint::builder(&domain).addresses(&addresses).queue(&mut queue).open()?;
        let mut port = Port::new(endpoint, queue);
        if way.lanes > 1 {
            let domains = (1..way.lanes).map(|_| Domain::open(&offer));
            let domains = domains.collect::<fabric::Result<Vec<_>>>()?;
            port.add_lanes(Stripes::open_on(&domains)?)?;
        }
        Ok(Self { port, addresses })
    }
}

/// Looks all the time for as long as a bridge does, and sleeps then.
struct Looking {
    spin: Duration,
    moved: Instant,
    idle: u32,
}

impl Looking {
    fn new() -> Self {
        Self { spin: WorkerOptions::default().spin, moved: Instant::now(), idle: 0 }
    }

    fn look(&mut self, port: &mut Port) -> Result<(), Failure> {
        let is_awake = self.moved.elapsed() < self.spin;
        match if is_awake { port.turn()? } else { port.rest(LONGEST_REST)? } {
            Turn::Idle => {
                self.idle = self.idle.saturating_add(1);
                if is_awake {
                    port.pause();
                }
            }
            Turn::Ring => self.has_moved(),
            Turn::Other(Ok(_)) => {}
            Turn::Other(Err(failure)) => return Err(failure.error.into()),
        }
        Ok(())
    }

    fn has_moved(&mut self) {
        (self.moved, self.idle) = (Instant::now(), 0);
    }
}

/// The life of an end. If it fails nobody is to wait for its turns: why it did is its result.
pub(super) fn take(
    shared: &Shared,
    end: &End,
    ready: impl FnOnce() -> Result<(), Failure>,
) -> Result<Done, Failure> {
    let taken = live(shared, end, ready);
    if taken.is_err() {
        wire_done(shared, u64::MAX)?;
    }
    taken
}

fn live(
    shared: &Shared,
    end: &End,
    ready: impl FnOnce() -> Result<(), Failure>,
) -> Result<Done, Failure> {
    confine(&end.cores)?;
    ready()?;
    let Some(way) = hear(shared, &end.directory, "way")? else { return Ok(nothing_found(0)) };
    if end.is_writer {
        return match Writer::meet(shared, end, &way)? {
            Some(writer) => writer.write(shared, end),
            None => Ok(nothing_found(0)),
        };
    }
    match Reader::meet(shared, end, &way)? {
        Some(reader) => reader.read(shared, end),
        None => Ok(nothing_found(0)),
    }
}

/// Memory that one end writes from, as a domain knows it.
fn enabled(
    domain: &Domain,
    memory: &Arc<HostMemory>,
    port: &Port,
) -> Result<MemoryRegion, Failure> {
    let region = domain.register(Arc::clone(memory), Access::WRITE)?;
    region.enable_for(port.endpoint())?;
    Ok(region)
}

struct Writer {
    port: Port,
    sender: SenderId,
    head: MemoryRegion,
    /// What payloads are written from, as each lane knows it.
    payload: Vec<MemoryRegion>,
    chunk: u64,
    looking: Looking,
    next: u64,
    _addresses: AddressVector,
}

impl Writer {
    /// None if all is over before the other end comes.
    fn meet(shared: &Shared, end: &End, way: &Way) -> Result<Option<Self>, Failure> {
        let options = WorkerOptions::default();
        let mut here = Opened::new(way)?;
        // Before the ring is offered: some providers take writes of known peers only.
        leave(&end.directory, "writer", &here.port.endpoint().address()?)?;
        let there = hear::<Offered>(shared, &end.directory, "ring")?;
        let Some(there) = there else { return Ok(None) };
        let offer = &there.ring;
        let Opened { port, addresses } = &mut here;
        let peer = addresses.insert(&there.address)?;
        let chunk = options.chunk.min(offer.capacity / 4);
        let further = there.further.get(..offer.lanes.len().saturating_sub(1));
        let further = further.ok_or_else(|| Failure::failed("an address of a lane is missing"))?;
        let (sender, answer) = port.accept_by(peer, further, offer, chunk)?;
        leave(&end.directory, "answer", &answer)?;
        let lanes = port.sender(sender)?.lanes();
        if lanes != way.lanes {
            let lanes = text::counted(lanes as u64, "lane");
            let why = format!("{lanes} of the wire alone, where messages have {}", way.lanes);
            return Err(Failure::failed(why));
        }
        let slots = options.chunk * options.slots_by(lanes) as u64;
        let length = if end.is_staged { slots } else { end.size.next_multiple_of(options.chunk) };
        let memory = Arc::new(HostMemory::zeroed(length as usize)?);
        let mut payload = Vec::new();
        for lane in 0..lanes {
            let domain = port.lane_domain(lane).ok_or_else(|| Failure::failed("a lane is gone"))?;
            payload.push(enabled(domain, &memory, port)?);
        }
        payload[0].fill(0..length as usize, 0x5a)?;
        let memory = Arc::new(HostMemory::zeroed(HEAD)?);
        let head = enabled(port.endpoint().domain(), &memory, port)?;
        let Opened { port, addresses } = here;
        let looking = Looking::new();
        let chunk = options.chunk;
        let _addresses = addresses;
        Ok(Some(Self { port, sender, head, payload, chunk, looking, next: 0, _addresses }))
    }

    /// Writes as many messages as are asked for, in turns, until all is over.
    fn write(mut self, shared: &Shared, end: &End) -> Result<Done, Failure> {
        let mut turns = 0;
        while !is_over(shared)? {
            if wire_asked(shared)? == turns {
                std::thread::sleep(LOOK);
                continue;
            }
            self.looking.has_moved();
            for _ in 0..end.each {
                self.message(end.size, turns >= end.warmup)?;
            }
            turns += 1;
            wire_done(shared, turns)?;
        }
        Ok(nothing_found(self.next))
    }

    /// Writes one, and waits until it is read.
    fn message(&mut self, size: u64, is_timed: bool) -> Result<(), Failure> {
        let end = Instant::now() + PATIENCE;
        let (head, mut at) = (HEAD as u64, 0);
        let words = [now(), self.next, is_timed.into()].map(u64::to_le_bytes).concat();
        self.head.write(0, &words)?;
        let mut message = self.port.begin(self.sender, TOPIC, head + size)?;
        while !message.is_written() {
            let written = message.written();
            let pushed = if written < head {
                let part = self.head.slice(0..HEAD)?;
                self.port.push_by(0, self.sender, &mut message, &part, 0)?
            } else {
                // A piece begins where one began before, until all of it is written.
                if written - head >= at + self.chunk {
                    at = (written - head) / self.chunk * self.chunk;
                }
                self.piece(&mut message, at, size)?
            };
            match pushed {
                Pushed::Posted(_) | Pushed::Written => self.looking.has_moved(),
                Pushed::Blocked(_) | Pushed::Busy => self.looking.look(&mut self.port)?,
            }
            if Instant::now() > end {
                return Err(late("a message was not written"));
            }
        }
        while self.port.next_read(self.sender)?.is_none() {
            self.looking.look(&mut self.port)?;
            if Instant::now() > end {
                return Err(late("a message was not read"));
            }
        }
        self.next += 1;
        Ok(())
    }

    fn piece(
        &mut self,
        message: &mut fabric::ring::Message,
        at: u64,
        size: u64,
    ) -> Result<Pushed, Failure> {
        let left = message.length() - message.written();
        let lane = match self.payload.len() {
            1 => 0,
            _ => match self.port.pick(self.sender, left)? {
                Some(lane) => lane,
                None => return Ok(Pushed::Busy),
            },
        };
        let region = self.payload.get(lane).ok_or_else(|| Failure::failed("a lane too many"))?;
        let from = at % region.len() as u64;
        let length = self.chunk.min(size - at);
        let part = region.slice(from as usize..(from + length) as usize)?;
        let place = HEAD as u64 + at;
        Ok(self.port.push_by(lane, self.sender, message, &part, place)?)
    }
}

struct Reader {
    port: Port,
    ring: ReceiverId,
    looking: Looking,
    _addresses: AddressVector,
}

impl Reader {
    /// None if all is over before the other end comes.
    fn meet(shared: &Shared, end: &End, way: &Way) -> Result<Option<Self>, Failure> {
        let Opened { mut port, addresses } = Opened::new(way)?;
        let writer = hear::<Address>(shared, &end.directory, "writer")?;
        let Some(writer) = writer else { return Ok(None) };
        let writer = addresses.insert(&writer)?;
        let capacity = WorkerOptions::default().ring_by(way.lanes, end.size, end.depth);
        let options = RingOptions::new(port.endpoint(), capacity)?;
        let memory = HostMemory::zeroed(capacity as usize)?;
        let ring = port.offer_by(&options, way.lanes, memory)?;
        let further = port.lane_addresses();
        let address = port.endpoint().address()?;
        let offered = Offered { address, further, ring: port.terms(ring)? };
        leave(&end.directory, "ring", &offered)?;
        let answer = hear::<RingAnswer>(shared, &end.directory, "answer")?;
        let Some(answer) = answer else { return Ok(None) };
        port.connect(ring, writer, &answer)?;
        Ok(Some(Self { port, ring, looking: Looking::new(), _addresses: addresses }))
    }

    /// Reads until all is over.
    fn read(mut self, shared: &Shared, end: &End) -> Result<Done, Failure> {
        let (mut samples, mut messages, mut verified) = (room(), 0, true);
        let mut head = [0; HEAD];
        loop {
            // The other end says that it goes, by ending the ring.
            let view = match self.port.take(self.ring) {
                Err(error) if error.kind() == fabric::ErrorKind::Closed => break,
                view => view?,
            };
            let Some(view) = view else {
                self.looking.look(&mut self.port)?;
                if self.looking.idle == QUIET {
                    self.port.tell(self.ring, true)?;
                }
                if self.looking.moved.elapsed() > LONGEST_REST && is_over(shared)? {
                    break;
                }
                continue;
            };
            self.looking.has_moved();
            let header = *view.header();
            verified &= header.length == HEAD as u64 + end.size;
            if header.offset == 0 {
                let length = view.len().min(HEAD);
                view.read(0, &mut head[..length])?;
            }
            let is_last = view.is_last();
            drop(view);
            self.port.tell(self.ring, false)?;
            if is_last {
                let came = now();
                let word =
                    |at: usize| head[at * 8..at * 8 + 8].try_into().map_or(0, u64::from_le_bytes);
                verified &= word(1) == messages;
                if word(2) != 0 {
                    samples.add(came.saturating_sub(word(0)));
                }
                messages += 1;
                // Whoever writes the next one waits for this.
                self.port.tell(self.ring, true)?;
            }
        }
        let found = Found { topics: vec![samples], ..Found::default() };
        Ok(Done { verified, found: Some(found), ..nothing_found(messages) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_way_is_read_as_nodes_report_it() {
        let way = |provider: &str, lanes| Some(Way { provider: provider.to_owned(), lanes });
        assert_eq!(Way::of("ring over net"), way("net", 1));
        assert_eq!(Way::of("ring of 3 lanes over tcp;ofi_rxm"), way("tcp;ofi_rxm", 3));
        for none in ["", "ring", "ring of lanes over net", "ring of -1 lanes over net"] {
            assert_eq!(Way::of(none), None, "{none}");
        }
    }
}
