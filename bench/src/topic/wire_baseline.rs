//! The ring throughput baseline: messages of the same length through a ring as replication uses it,
//! with as many lanes, between two processes on the cores of the services. Interleaved with the
//! messages of the topic; sleeps meanwhile. No device and no queue: messages are written from
//! buffers of the same size as those of replication, and released where they arrive.

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
use pubsub::{MemoryLocation, RingPath};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::message_stamps::now;
use super::schedule::TIMEOUT;
use super::shared_words::{has_ended, wire_asked, wire_done};
use super::topic_results::{WorkerResult, empty_result};
use super::{Arguments, TopicResult};
use crate::process::set_affinity;
use crate::worker_group::{SharedSegment, empty_histogram, find, leave};
use command::exit::{Exit, Failure};
use command::text;

/// Header of a message: start time, number, and whether it is timed.
const HEAD: usize = 64;
const TOPIC: u32 = 1;
/// Capacity of the completion queue, as in replication.
const QUEUE: usize = 4096;
/// Interval of checking for requested turns.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
const MAX_SLEEP: Duration = Duration::from_millis(20);
/// Turns at the start that do not count.
const WARMUP_TURNS: u64 = 1;
/// Turns without progress after which the writer gets credit of all that was read.
const IDLE_TURNS: u32 = 16;

/// One end of the ring.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct WireEnd {
    is_writer: bool,
    /// Directory where the ends exchange addresses, and get the path of the topic's messages.
    directory: PathBuf,
    size: u64,
    depth: u32,
    /// Messages are copied out of a device first, through slots.
    is_staged: bool,
    /// Messages of each turn.
    each: u64,
    cores: Vec<usize>,
}

impl WireEnd {
    /// Writer and reader, with the depth of the topic and the messages of each turn.
    pub(super) fn both(
        arguments: &Arguments,
        directory: &Path,
        (depth, each): (u32, u64),
        cores: &[usize],
    ) -> [Self; 2] {
        [true, false].map(|is_writer| Self {
            is_writer,
            directory: directory.to_owned(),
            size: arguments.size,
            depth,
            is_staged: !matches!(arguments.memory, MemoryLocation::Host),
            each,
            cores: cores.to_vec(),
        })
    }
}

/// Writes the path of the topic's messages for both ends.
pub(super) fn write_path(directory: &Path, path: &RingPath) -> Result<(), Failure> {
    leave(directory, "path", path)
}

/// Waits for a file of another process. None if the measurement ends first.
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
    Failure::new(Exit::Deadline, format!("measure the ring throughput baseline failed: {why}"))
}

/// Addresses of the reader, for each lane, and its ring.
#[derive(Debug, Serialize, Deserialize)]
struct RingSetupOffer {
    address: Address,
    further: Vec<Address>,
    ring: RingOffer,
}

/// An endpoint with further lanes, opened as replication does. Busy-polls as long as replication
/// does, and blocks then.
struct OpenEndpoint {
    port: Port,
    addresses: AddressVector,
    spin: Duration,
    moved: Instant,
    idle: u32,
}

impl OpenEndpoint {
    fn new(path: &RingPath) -> Result<Self, Failure> {
        let caps = Requirements::ring(Locality::SameMachine).caps;
        let query = Query::new(EndpointKind::Rdm).source("127.0.0.1").caps(caps);
        let offer = query.provider(&path.provider).first()?;
        let domain = Domain::open(&offer)?;
        let addresses = AddressVector::open(&domain)?;
        let options = QueueOptions { size: QUEUE, waiting: WaitStrategy::Block };
        let mut queue = CompletionQueue::open_with(&domain, options)?;
        let endpoint = Endpoint::builder(&domain).addresses(&addresses).queue(&mut queue).open()?;
        let mut port = Port::new(endpoint, queue);
        if path.lanes > 1 {
            let domains = (1..path.lanes).map(|_| Domain::open(&offer));
            let domains = domains.collect::<fabric::Result<Vec<_>>>()?;
            port.add_lanes(LaneSet::open_on(&domains)?)?;
        }
        let spin = WorkerOptions::default().spin;
        Ok(Self { port, addresses, spin, moved: Instant::now(), idle: 0 })
    }

    fn wait(&mut self) -> Result<(), Failure> {
        let is_awake = self.moved.elapsed() < self.spin;
        match if is_awake { self.port.progress()? } else { self.port.wait(MAX_SLEEP)? } {
            PortEvent::Idle => {
                self.idle = self.idle.saturating_add(1);
                if is_awake {
                    self.port.pause();
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

/// Runs an end. If it fails no process must wait for its turns: the error is its result.
pub(super) fn take(
    shared: &SharedSegment,
    end: &WireEnd,
    ready: impl FnOnce() -> Result<(), Failure>,
) -> Result<WorkerResult, Failure> {
    let result = run_end(shared, end, ready);
    if result.is_err() {
        wire_done(shared, u64::MAX)?;
    }
    result
}

fn run_end(
    shared: &SharedSegment,
    end: &WireEnd,
    ready: impl FnOnce() -> Result<(), Failure>,
) -> Result<WorkerResult, Failure> {
    set_affinity(&end.cores)?;
    ready()?;
    let Some(path) = wait_for_file(shared, &end.directory, "path")? else {
        return Ok(empty_result(0));
    };
    if end.is_writer {
        return match Writer::connect(shared, end, &path)? {
            Some(writer) => writer.write(shared, end),
            None => Ok(empty_result(0)),
        };
    }
    match Reader::connect(shared, end, &path)? {
        Some(reader) => reader.read(shared, end),
        None => Ok(empty_result(0)),
    }
}

/// Memory that one end writes from, registered with a domain.
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
    local: OpenEndpoint,
    sender: SenderId,
    head: MemoryRegion,
    /// Source of payloads, for each lane.
    payload: Vec<MemoryRegion>,
    chunk: u64,
    next: u64,
}

impl Writer {
    /// None if the measurement ends before the other end connects.
    fn connect(
        shared: &SharedSegment,
        end: &WireEnd,
        path: &RingPath,
    ) -> Result<Option<Self>, Failure> {
        let options = WorkerOptions::default();
        let mut local = OpenEndpoint::new(path)?;
        // Before the ring is offered: some providers accept writes of known peers only.
        leave(&end.directory, "writer", &local.port.endpoint().address()?)?;
        let remote = wait_for_file::<RingSetupOffer>(shared, &end.directory, "ring")?;
        let Some(remote) = remote else { return Ok(None) };
        let offer = &remote.ring;
        let OpenEndpoint { port, addresses, .. } = &mut local;
        let peer = addresses.insert(&remote.address)?;
        let chunk = options.chunk.min(offer.capacity / 4);
        let further = remote.further.get(..offer.lanes.len().saturating_sub(1));
        let further = further.ok_or_else(|| Failure::failed("an address of a lane is missing"))?;
        let (sender, answer) = port.accept_on_lanes(peer, further, offer, chunk)?;
        leave(&end.directory, "answer", &answer)?;
        let lanes = port.sender(sender)?.lanes();
        if lanes != path.lanes {
            let lanes = text::count_of(lanes as u64, "lane");
            let why = format!("the baseline has {lanes} and the topic {}", path.lanes);
            return Err(Failure::failed(why));
        }
        let slots = options.chunk * options.slots_for(lanes) as u64;
        let length = if end.is_staged { slots } else { end.size.next_multiple_of(options.chunk) };
        let memory = Arc::new(HostMemory::zeroed(length as usize)?);
        let mut payload = Vec::new();
        for lane in 0..lanes {
            let domain =
                port.lane_domain(lane).ok_or_else(|| Failure::failed("a lane is missing"))?;
            payload.push(enabled(domain, &memory, port)?);
        }
        payload[0].fill(0..length as usize, 0x5a)?;
        let memory = Arc::new(HostMemory::zeroed(HEAD)?);
        let head = enabled(port.endpoint().domain(), &memory, port)?;
        local.record_progress();
        Ok(Some(Self { local, sender, head, payload, chunk: options.chunk, next: 0 }))
    }

    /// Writes the messages of requested turns, until the measurement ends.
    fn write(mut self, shared: &SharedSegment, end: &WireEnd) -> Result<WorkerResult, Failure> {
        let mut turns = 0;
        while !has_ended(shared)? {
            if wire_asked(shared)? == turns {
                std::thread::sleep(POLL_INTERVAL);
                continue;
            }
            self.local.record_progress();
            for _ in 0..end.each {
                self.message(end.size, turns >= WARMUP_TURNS)?;
            }
            turns += 1;
            wire_done(shared, turns)?;
        }
        Ok(empty_result(self.next))
    }

    /// Writes a message, and waits until it is read.
    fn message(&mut self, size: u64, is_timed: bool) -> Result<(), Failure> {
        let end = Instant::now() + TIMEOUT;
        let (head, mut at) = (HEAD as u64, 0);
        let words = [now(), self.next, is_timed.into()].map(u64::to_le_bytes).concat();
        self.head.write(0, &words)?;
        let mut message = self.local.port.begin(self.sender, TOPIC, head + size)?;
        while !message.is_written() {
            let written = message.written();
            let pushed = if written < head {
                let part = self.head.slice(0..HEAD)?;
                self.local.port.push_with(0, self.sender, &mut message, (&part, 0), &[])?
            } else {
                // A piece continues where the last one ended.
                if written - head >= at + self.chunk {
                    at = (written - head) / self.chunk * self.chunk;
                }
                self.piece(&mut message, at, size)?
            };
            match pushed {
                Pushed::Posted(_) | Pushed::Written => self.local.record_progress(),
                Pushed::Blocked(_) | Pushed::Busy => self.local.wait()?,
            }
            if Instant::now() > end {
                return Err(late("a message was not written"));
            }
        }
        while self.local.port.next_read(self.sender)?.is_none() {
            self.local.wait()?;
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
        let remaining = message.length() - message.written();
        let lane = match self.payload.len() {
            1 => 0,
            _ => match self.local.port.pick_lane(self.sender, remaining)? {
                Some(lane) => lane,
                None => return Ok(Pushed::Busy),
            },
        };
        let region = self.payload.get(lane).ok_or_else(|| Failure::failed("unknown lane"))?;
        let from = at % region.len() as u64;
        let length = self.chunk.min(size - at);
        let part = region.slice(from as usize..(from + length) as usize)?;
        let offset = HEAD as u64 + at;
        Ok(self.local.port.push_with(lane, self.sender, message, (&part, offset), &[])?)
    }
}

struct Reader {
    local: OpenEndpoint,
    ring: ReceiverId,
}

impl Reader {
    /// None if the measurement ends before the other end connects.
    fn connect(
        shared: &SharedSegment,
        end: &WireEnd,
        path: &RingPath,
    ) -> Result<Option<Self>, Failure> {
        let mut local = OpenEndpoint::new(path)?;
        let OpenEndpoint { port, addresses, .. } = &mut local;
        let writer = wait_for_file::<Address>(shared, &end.directory, "writer")?;
        let Some(writer) = writer else { return Ok(None) };
        let writer = addresses.insert(&writer)?;
        let capacity = WorkerOptions::default().ring_size_for(path.lanes, end.size, end.depth);
        let options = RingOptions::new(port.endpoint(), capacity)?;
        let memory = HostMemory::zeroed(capacity as usize)?;
        let ring = port.offer_on_lanes(&options, path.lanes, memory)?;
        let further = port.lane_addresses();
        let address = port.endpoint().address()?;
        let offered = RingSetupOffer { address, further, ring: port.ring_offer(ring)? };
        leave(&end.directory, "ring", &offered)?;
        let answer = wait_for_file::<RingAnswer>(shared, &end.directory, "answer")?;
        let Some(answer) = answer else { return Ok(None) };
        port.connect(ring, writer, &answer)?;
        local.record_progress();
        Ok(Some(Self { local, ring }))
    }

    /// Reads until the measurement ends.
    fn read(mut self, shared: &SharedSegment, end: &WireEnd) -> Result<WorkerResult, Failure> {
        let (mut samples, mut messages, mut verified) = (empty_histogram(), 0, true);
        let mut head = [0; HEAD];
        loop {
            // The other end ends the ring when it leaves.
            let view = match self.local.port.take(self.ring) {
                Err(error) if error.kind() == fabric::ErrorKind::Closed => break,
                view => view?,
            };
            let Some(view) = view else {
                self.local.wait()?;
                if self.local.idle == IDLE_TURNS {
                    self.local.port.return_credit(self.ring, true)?;
                }
                if self.local.moved.elapsed() > MAX_SLEEP && has_ended(shared)? {
                    break;
                }
                continue;
            };
            self.local.record_progress();
            let header = *view.header();
            verified &= header.length == HEAD as u64 + end.size;
            if header.offset == 0 {
                let length = view.len().min(HEAD);
                view.read(0, &mut head[..length])?;
            }
            let is_last = view.is_last();
            drop(view);
            self.local.port.return_credit(self.ring, false)?;
            if is_last {
                let received = now();
                let word =
                    |at: usize| head[at * 8..at * 8 + 8].try_into().map_or(0, u64::from_le_bytes);
                verified &= word(1) == messages;
                if word(2) != 0 {
                    samples.add(received.saturating_sub(word(0)));
                }
                messages += 1;
                // The writer waits for this credit before the next message.
                self.local.port.return_credit(self.ring, true)?;
            }
        }
        let found = TopicResult { topics: vec![samples], ..TopicResult::default() };
        Ok(WorkerResult { verified, detail: Some(found), ..empty_result(messages) })
    }
}
