//! The wire alone: messages of the same length through a ring as a bridge has it, of as many lanes,
//! between two processes where those of services run. It takes turns with the messages of the
//! topic, and sleeps meanwhile. Nothing but the wire: no device, no queue; what is written lies in
//! as much memory as the bridge would write from, and what comes is let go of where it came.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fabric::ring::{
    LaneSet, Port, PortEvent, Pushed, ReceiverId, RingAnswer, RingOffer, RingOptions, SenderId,
};
use fabric::{
    Access, Address, AddressVector, CompletionQueue, Domain, Endpoint, EndpointKind, HostMemory,
    Locality, MemoryRegion, Query, QueueOptions, Requirements, WaitStrategy,
};
use pubsub::replication::WorkerOptions;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::role::{
    TIMEOUT, TopicResult, empty_result, has_ended, now, room, wire_asked, wire_done,
};
use crate::process::set_affinity;
use crate::worker_group::{SharedSegment, WorkerResult, find, leave};
use command::exit::{Exit, Failure};
use command::text;

/// What stands before a message: when it began, its number, and whether it is timed.
const HEAD: usize = 64;
const TOPIC: u32 = 1;
/// Completions that may wait to be looked at, as a bridge has it.
const QUEUE: usize = 4096;
/// How often what is asked for is looked at while nothing happens.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
const MAX_SLEEP: Duration = Duration::from_millis(20);
/// Turns without anything after which the writer is told all that was read.
const IDLE_TURNS: u32 = 16;

/// One end of it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct WireEnd {
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
pub(super) struct RingPath {
    pub(super) provider: String,
    pub(super) lanes: usize,
}

impl RingPath {
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
fn wait_for_file<T: DeserializeOwned>(
    shared: &SharedSegment,
    directory: &Path,
    name: &str,
) -> Result<Option<T>, Failure> {
    let end = Instant::now() + 2 * TIMEOUT;
    loop {
        let found = find(directory, name)?;
        if found.is_some() || has_ended(shared)? {
            return Ok(found);
        }
        if Instant::now() > end {
            return Err(late(&format!("{name} was not received")));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

fn late(why: &str) -> Failure {
    Failure::new(Exit::Deadline, format!("the wire alone: {why}"))
}

/// Where the reader is reached, by each lane, and its ring.
#[derive(Debug, Serialize, Deserialize)]
struct RingSetupOffer {
    address: Address,
    further: Vec<Address>,
    ring: RingOffer,
}

/// An endpoint with further lanes, opened as a bridge does.
struct OpenEndpoint {
    port: Port,
    addresses: AddressVector,
}

impl OpenEndpoint {
    fn new(way: &RingPath) -> Result<Self, Failure> {
        let caps = Requirements::ring(Locality::SameMachine).caps;
        let query = Query::new(EndpointKind::Rdm).source("127.0.0.1").caps(caps);
        let offer = query.provider(&way.provider).first()?;
        let domain = Domain::open(&offer)?;
        let addresses = AddressVector::open(&domain)?;
        let options = QueueOptions { size: QUEUE, waiting: WaitStrategy::Block };
        let mut queue = CompletionQueue::open_with(&domain, options)?;
        let endpoint = Endpoint::builder(&domain).addresses(&addresses).queue(&mut queue).open()?;
        let mut port = Port::new(endpoint, queue);
        if way.lanes > 1 {
            let domains = (1..way.lanes).map(|_| Domain::open(&offer));
            let domains = domains.collect::<fabric::Result<Vec<_>>>()?;
            port.add_lanes(LaneSet::open_on(&domains)?)?;
        }
        Ok(Self { port, addresses })
    }
}

/// Looks all the time for as long as a bridge does, and sleeps then.
struct PollState {
    spin: Duration,
    moved: Instant,
    idle: u32,
}

impl PollState {
    fn new() -> Self {
        Self { spin: WorkerOptions::default().spin, moved: Instant::now(), idle: 0 }
    }

    fn look(&mut self, port: &mut Port) -> Result<(), Failure> {
        let is_awake = self.moved.elapsed() < self.spin;
        match if is_awake { port.progress()? } else { port.wait(MAX_SLEEP)? } {
            PortEvent::Idle => {
                self.idle = self.idle.saturating_add(1);
                if is_awake {
                    port.pause();
                }
            }
            PortEvent::Ring => self.record_progress(),
            PortEvent::Other(Ok(_)) => {}
            PortEvent::Other(Err(failure)) => return Err(failure.error.into()),
        }
        Ok(())
    }

    fn record_progress(&mut self) {
        (self.moved, self.idle) = (Instant::now(), 0);
    }
}

/// The life of an end. If it fails nobody is to wait for its turns: why it did is its result.
pub(super) fn take(
    shared: &SharedSegment,
    end: &WireEnd,
    ready: impl FnOnce() -> Result<(), Failure>,
) -> Result<WorkerResult, Failure> {
    let taken = run_end(shared, end, ready);
    if taken.is_err() {
        wire_done(shared, u64::MAX)?;
    }
    taken
}

fn run_end(
    shared: &SharedSegment,
    end: &WireEnd,
    ready: impl FnOnce() -> Result<(), Failure>,
) -> Result<WorkerResult, Failure> {
    set_affinity(&end.cores)?;
    ready()?;
    let Some(way) = wait_for_file(shared, &end.directory, "way")? else {
        return Ok(empty_result(0));
    };
    if end.is_writer {
        return match Writer::connect(shared, end, &way)? {
            Some(writer) => writer.write(shared, end),
            None => Ok(empty_result(0)),
        };
    }
    match Reader::connect(shared, end, &way)? {
        Some(reader) => reader.read(shared, end),
        None => Ok(empty_result(0)),
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
    poll_state: PollState,
    next: u64,
    _addresses: AddressVector,
}

impl Writer {
    /// None if all is over before the other end comes.
    fn connect(
        shared: &SharedSegment,
        end: &WireEnd,
        way: &RingPath,
    ) -> Result<Option<Self>, Failure> {
        let options = WorkerOptions::default();
        let mut here = OpenEndpoint::new(way)?;
        // Before the ring is offered: some providers take writes of known peers only.
        leave(&end.directory, "writer", &here.port.endpoint().address()?)?;
        let there = wait_for_file::<RingSetupOffer>(shared, &end.directory, "ring")?;
        let Some(there) = there else { return Ok(None) };
        let offer = &there.ring;
        let OpenEndpoint { port, addresses } = &mut here;
        let peer = addresses.insert(&there.address)?;
        let chunk = options.chunk.min(offer.capacity / 4);
        let further = there.further.get(..offer.lanes.len().saturating_sub(1));
        let further = further.ok_or_else(|| Failure::failed("an address of a lane is missing"))?;
        let (sender, answer) = port.accept_on_lanes(peer, further, offer, chunk)?;
        leave(&end.directory, "answer", &answer)?;
        let lanes = port.sender(sender)?.lanes();
        if lanes != way.lanes {
            let lanes = text::count_of(lanes as u64, "lane");
            let why = format!("{lanes} of the wire alone, where messages have {}", way.lanes);
            return Err(Failure::failed(why));
        }
        let slots = options.chunk * options.slots_for(lanes) as u64;
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
        let OpenEndpoint { port, addresses } = here;
        let poll_state = PollState::new();
        let chunk = options.chunk;
        let _addresses = addresses;
        Ok(Some(Self { port, sender, head, payload, chunk, poll_state, next: 0, _addresses }))
    }

    /// Writes as many messages as are asked for, in turns, until all is over.
    fn write(mut self, shared: &SharedSegment, end: &WireEnd) -> Result<WorkerResult, Failure> {
        let mut turns = 0;
        while !has_ended(shared)? {
            if wire_asked(shared)? == turns {
                std::thread::sleep(POLL_INTERVAL);
                continue;
            }
            self.poll_state.record_progress();
            for _ in 0..end.each {
                self.message(end.size, turns >= end.warmup)?;
            }
            turns += 1;
            wire_done(shared, turns)?;
        }
        Ok(empty_result(self.next))
    }

    /// Writes one, and waits until it is read.
    fn message(&mut self, size: u64, is_timed: bool) -> Result<(), Failure> {
        let end = Instant::now() + TIMEOUT;
        let (head, mut at) = (HEAD as u64, 0);
        let words = [now(), self.next, is_timed.into()].map(u64::to_le_bytes).concat();
        self.head.write(0, &words)?;
        let mut message = self.port.begin(self.sender, TOPIC, head + size)?;
        while !message.is_written() {
            let written = message.written();
            let pushed = if written < head {
                let part = self.head.slice(0..HEAD)?;
                self.port.push_on_lane(0, self.sender, &mut message, &part, 0)?
            } else {
                // A piece begins where one began before, until all of it is written.
                if written - head >= at + self.chunk {
                    at = (written - head) / self.chunk * self.chunk;
                }
                self.piece(&mut message, at, size)?
            };
            match pushed {
                Pushed::Posted(_) | Pushed::Written => self.poll_state.record_progress(),
                Pushed::Blocked(_) | Pushed::Busy => self.poll_state.look(&mut self.port)?,
            }
            if Instant::now() > end {
                return Err(late("a message was not written"));
            }
        }
        while self.port.next_read(self.sender)?.is_none() {
            self.poll_state.look(&mut self.port)?;
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
            _ => match self.port.pick_lane(self.sender, left)? {
                Some(lane) => lane,
                None => return Ok(Pushed::Busy),
            },
        };
        let region = self.payload.get(lane).ok_or_else(|| Failure::failed("a lane too many"))?;
        let from = at % region.len() as u64;
        let length = self.chunk.min(size - at);
        let part = region.slice(from as usize..(from + length) as usize)?;
        let place = HEAD as u64 + at;
        Ok(self.port.push_on_lane(lane, self.sender, message, &part, place)?)
    }
}

struct Reader {
    port: Port,
    ring: ReceiverId,
    poll_state: PollState,
    _addresses: AddressVector,
}

impl Reader {
    /// None if all is over before the other end comes.
    fn connect(
        shared: &SharedSegment,
        end: &WireEnd,
        way: &RingPath,
    ) -> Result<Option<Self>, Failure> {
        let OpenEndpoint { mut port, addresses } = OpenEndpoint::new(way)?;
        let writer = wait_for_file::<Address>(shared, &end.directory, "writer")?;
        let Some(writer) = writer else { return Ok(None) };
        let writer = addresses.insert(&writer)?;
        let capacity = WorkerOptions::default().ring_size_for(way.lanes, end.size, end.depth);
        let options = RingOptions::new(port.endpoint(), capacity)?;
        let memory = HostMemory::zeroed(capacity as usize)?;
        let ring = port.offer_on_lanes(&options, way.lanes, memory)?;
        let further = port.lane_addresses();
        let address = port.endpoint().address()?;
        let offered = RingSetupOffer { address, further, ring: port.ring_offer(ring)? };
        leave(&end.directory, "ring", &offered)?;
        let answer = wait_for_file::<RingAnswer>(shared, &end.directory, "answer")?;
        let Some(answer) = answer else { return Ok(None) };
        port.connect(ring, writer, &answer)?;
        Ok(Some(Self { port, ring, poll_state: PollState::new(), _addresses: addresses }))
    }

    /// Reads until all is over.
    fn read(mut self, shared: &SharedSegment, end: &WireEnd) -> Result<WorkerResult, Failure> {
        let (mut samples, mut messages, mut verified) = (room(), 0, true);
        let mut head = [0; HEAD];
        loop {
            // The other end says that it goes, by ending the ring.
            let view = match self.port.take(self.ring) {
                Err(error) if error.kind() == fabric::ErrorKind::Closed => break,
                view => view?,
            };
            let Some(view) = view else {
                self.poll_state.look(&mut self.port)?;
                if self.poll_state.idle == IDLE_TURNS {
                    self.port.return_credit(self.ring, true)?;
                }
                if self.poll_state.moved.elapsed() > MAX_SLEEP && has_ended(shared)? {
                    break;
                }
                continue;
            };
            self.poll_state.record_progress();
            let header = *view.header();
            verified &= header.length == HEAD as u64 + end.size;
            if header.offset == 0 {
                let length = view.len().min(HEAD);
                view.read(0, &mut head[..length])?;
            }
            let is_last = view.is_last();
            drop(view);
            self.port.return_credit(self.ring, false)?;
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
                self.port.return_credit(self.ring, true)?;
            }
        }
        let found = TopicResult { topics: vec![samples], ..TopicResult::default() };
        Ok(WorkerResult { verified, found: Some(found), ..empty_result(messages) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_way_is_read_as_nodes_report_it() {
        let way = |provider: &str, lanes| Some(RingPath { provider: provider.to_owned(), lanes });
        assert_eq!(RingPath::of("ring over net"), way("net", 1));
        assert_eq!(RingPath::of("ring of 3 lanes over tcp;ofi_rxm"), way("tcp;ofi_rxm", 3));
        for none in ["", "ring", "ring of lanes over net", "ring of -1 lanes over net"] {
            assert_eq!(RingPath::of(none), None, "{none}");
        }
    }
}
