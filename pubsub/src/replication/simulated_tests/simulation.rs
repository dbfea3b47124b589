//! Simulated transports, devices and sinks in simulated time.
//!
//! The rings are the real ones, without an endpoint. Written data arrives after a latency, and is
//! overwritten if it was released too early. A device copies at the end of its copy time.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use fabric::ring::{
    ChunkHeader, Credit, Immediate, Message, Pushed, ReaderState, Refused, ReleaseToken,
    RingGeometry, WriterState,
};

use crate::error::{Error, ErrorKind, Result};
use crate::replication::inbound::{Chunk, InboundTransport};
use crate::replication::message_header::RingMessageKind;
use crate::replication::outbound::{BATCH_BUFFER_LENGTH, OutboundTransport, Part};
use crate::replication::probe::RingProbe;
use crate::replication::{ClockReading, RingProgress};

pub(super) type Bytes = Arc<Mutex<Vec<u8>>>;

/// A payload.
#[derive(Debug, Clone)]
pub(super) struct SimPayload {
    pub(super) bytes: Bytes,
    pub(super) is_device: bool,
}

impl SimPayload {
    pub(super) fn new(bytes: Vec<u8>, is_device: bool) -> Self {
        Self { bytes: Arc::new(Mutex::new(bytes)), is_device }
    }
}

/// Nanoseconds to transfer bytes at a rate in bytes per microsecond.
pub(super) fn transfer_time(bytes: u64, rate: u64) -> u64 {
    bytes * 1000 / rate
}

/// A resource that processes one transfer at a time.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct SerialResource {
    free: u64,
}

impl SerialResource {
    fn put(&mut self, now: u64, transfer_time: u64) -> u64 {
        // At least 1, so that end times differ.
        self.free = self.free.max(now) + transfer_time.max(1);
        self.free
    }
}

/// Rates in bytes per microsecond, and the latency in nanoseconds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Speeds {
    pub(super) out: u64,
    pub(super) wire: u64,
    pub(super) into: u64,
    pub(super) latency: u64,
}

/// A lane of a ring: how many times slower than the link it is, and the largest random delay in
/// nanoseconds.
#[derive(Debug, Clone, Copy)]
pub(super) struct SimLane {
    resource: SerialResource,
    pub(super) slower: u64,
    pub(super) later: u64,
}

impl SimLane {
    pub(super) fn new(slower: u64, later: u64) -> Self {
        Self { resource: SerialResource::default(), slower, later }
    }
}

/// A chunk in flight.
struct ChunkInFlight {
    lane: usize,
    /// When the chunk's source is read.
    leaves: u64,
    source: Option<(SimPayload, usize)>,
    arrives: u64,
    at: (u64, u64),
    header: ChunkHeader,
    inline: Vec<u8>,
    payload: Vec<u8>,
    immediate: u32,
}

/// A ring, with both of its sides.
pub(super) struct SimRing {
    writer: WriterState,
    reader: ReaderState,
    memory: Bytes,
    /// Of a ring in device memory: bytes beside headers, by the number of their chunk.
    inline: Option<HashMap<u64, Vec<u8>>>,
    /// What its probe is written from.
    probe: Option<Vec<u8>>,
    /// How long after their notices bytes arrive, in nanoseconds.
    pub(super) bytes_later: u64,
    /// Bytes that arrive at this time, at this place.
    late: Vec<(u64, usize, Vec<u8>)>,
    flights: Vec<ChunkInFlight>,
    /// Chunks with incomplete writes: lane, position, and completion time.
    leaving: Vec<(usize, u64, u64)>,
    left: u64,
    credits: Vec<(u64, Credit)>,
    released: Arc<Mutex<Vec<ReleaseToken>>>,
    lanes: Vec<SimLane>,
    pub(super) rate: u64,
    is_broken: bool,
    /// A lane is lost, and the writer knows.
    has_lost_lane: bool,
    is_closed: bool,
    /// The provider accepts writes, and never completes them.
    pub(super) is_frozen: bool,
    /// The limit of chunk lengths cannot be read.
    pub(super) hides_chunk_limit: bool,
}

/// The simulated transport of an outbound topic.
pub(super) struct SimTransport {
    pub(super) now: u64,
    pub(super) speeds: Speeds,
    pub(super) rings: Vec<SimRing>,
    /// Lanes of rings opened from now on.
    pub(super) lanes: Vec<SimLane>,
    /// State of the random delays.
    random_state: u64,
    batch_buffers: Vec<Vec<u8>>,
    free_batch_buffers: Vec<u32>,
    slots: Vec<Vec<u8>>,
    free_slots: Vec<u32>,
    pub(super) all_slots: usize,
    resource: SerialResource,
    /// Copies in progress: end time, source, range, and slot.
    copies: Vec<(u64, SimPayload, u64, u64, u32)>,
    pub(super) pieces_copied: u64,
    /// Polls of copies in progress.
    pub(super) vain_polls: u64,
    events: Vec<u64>,
    /// Time of the next poll, unless an event comes first.
    next_poll: u64,
}

impl SimTransport {
    pub(super) fn new(speeds: Speeds) -> Self {
        Self {
            now: 0,
            speeds,
            rings: Vec::new(),
            lanes: vec![SimLane::new(1, 0)],
            random_state: 1,
            batch_buffers: Vec::new(),
            free_batch_buffers: Vec::new(),
            slots: Vec::new(),
            free_slots: Vec::new(),
            all_slots: 64,
            resource: SerialResource::default(),
            copies: Vec::new(),
            pieces_copied: 0,
            vain_polls: 0,
            events: Vec::new(),
            next_poll: 0,
        }
    }

    /// Opens a ring with this capacity and chunk length.
    pub(super) fn open(&mut self, capacity: u64, chunk: u64) -> usize {
        let number = self.rings.len();
        let geometry = RingGeometry::new(capacity, (number % 1024) as u16).unwrap();
        self.rings.push(SimRing {
            writer: WriterState::new(geometry, 1, chunk),
            reader: ReaderState::new(geometry, 1, capacity / 4),
            memory: Arc::new(Mutex::new(vec![0; capacity as usize])),
            inline: None,
            probe: None,
            bytes_later: 0,
            late: Vec::new(),
            flights: Vec::new(),
            leaving: Vec::new(),
            left: 0,
            credits: Vec::new(),
            released: Arc::default(),
            lanes: self.lanes.clone(),
            rate: self.speeds.wire,
            is_broken: false,
            has_lost_lane: false,
            is_closed: false,
            is_frozen: false,
            hides_chunk_limit: false,
        });
        number
    }

    /// Opens a ring in device memory, with the probe that it begins with.
    pub(super) fn open_on_device(
        &mut self,
        (capacity, chunk): (u64, u64),
        probe: Option<&RingProbe>,
    ) -> usize {
        let number = self.open(capacity, chunk);
        let ring = &mut self.rings[number];
        ring.inline = Some(HashMap::new());
        ring.probe = probe.map(|probe| probe.bytes(probe.source()));
        number
    }

    /// Breaks a ring: nothing in flight arrives.
    pub(super) fn sever(&mut self, ring: usize) {
        let ring = &mut self.rings[ring];
        ring.is_broken = true;
        ring.flights.clear();
        ring.credits.clear();
        ring.leaving.clear();
    }

    /// Breaks a lane: nothing in flight on it arrives. The writer gets the error, the reader does
    /// not.
    pub(super) fn lose_lane(&mut self, ring: usize, lane: usize) {
        let ring = &mut self.rings[ring];
        let lane = lane % ring.lanes.len();
        ring.has_lost_lane = true;
        ring.flights.retain(|flight| flight.lane != lane);
        ring.leaving.retain(|(by, ..)| *by != lane);
    }

    /// The reader, or a forger, acknowledges all that was written.
    pub(super) fn claim_all_read(&mut self, ring: usize) {
        let writer = &mut self.rings[ring].writer;
        writer.credit_to(writer.tail());
    }

    /// Number of batch buffers in use.
    pub(super) fn batch_buffers_taken(&self) -> usize {
        self.batch_buffers.len() - self.free_batch_buffers.len()
    }

    /// Time of the next event, if any.
    pub(super) fn next_event(&mut self) -> Option<u64> {
        let now = self.now;
        self.events.retain(|event| *event > now);
        let living = self.rings.iter().filter(|ring| !ring.is_frozen);
        let rings = living.flat_map(|ring| {
            let flights = ring.flights.iter().map(|flight| flight.arrives);
            let leaving = ring.leaving.iter().map(|(.., at)| *at);
            let late = ring.late.iter().map(|(at, ..)| *at);
            flights.chain(leaving).chain(late).chain(ring.credits.iter().map(|(at, _)| *at))
        });
        let known = self.events.iter().copied().chain([self.next_poll]);
        rings.chain(known).filter(|event| *event > now).min()
    }

    /// Schedules a poll a little later, unless one is scheduled.
    pub(super) fn schedule_poll(&mut self) {
        if self.next_poll <= self.now {
            self.next_poll = self.now + 1000;
        }
    }

    /// Delivers due chunks and credit, and returns released space.
    pub(super) fn deliver_due(&mut self, is_quiet: bool) -> bool {
        let (now, latency) = (self.now, self.speeds.latency);
        let mut has_moved = false;
        for ring in self.rings.iter_mut().filter(|ring| !ring.is_broken && !ring.is_frozen) {
            for (_, at, bytes) in ring.late.extract_if(.., |late| late.0 <= now) {
                ring.memory.lock().unwrap()[at..at + bytes.len()].copy_from_slice(&bytes);
            }
            for flight in ring.flights.iter_mut().filter(|flight| flight.leaves <= now) {
                if let Some((payload, from)) = flight.source.take() {
                    let end = from + flight.payload.len();
                    flight.payload.copy_from_slice(&payload.bytes.lock().unwrap()[from..end]);
                }
            }
            ring.flights.sort_by_key(|flight| flight.arrives);
            while ring.flights.first().is_some_and(|flight| flight.arrives <= now) {
                let flight = ring.flights.remove(0);
                let mut memory = ring.memory.lock().unwrap();
                let (header, payload) = (flight.at.0 as usize, flight.at.1 as usize);
                memory[header..header + 64].copy_from_slice(&flight.header.encode());
                match ring.bytes_later {
                    0 => memory[payload..payload + flight.payload.len()]
                        .copy_from_slice(&flight.payload),
                    later => ring.late.push((now + later, payload, flight.payload)),
                }
                if let Some(inline) = &mut ring.inline {
                    inline.insert(flight.header.sequence, flight.inline);
                }
                let immediate = Immediate::decode(flight.immediate);
                ring.reader.notice(&immediate, 0).unwrap();
                has_moved = true;
            }
            let before = ring.leaving.len();
            ring.leaving.retain(|(.., at)| *at > now);
            has_moved |= ring.leaving.len() < before;
            let first = ring.leaving.iter().map(|(_, start, _)| *start).min();
            ring.left = first.unwrap_or(ring.writer.tail());
            for release_token in ring.released.lock().unwrap().drain(..) {
                ring.reader.release(release_token);
            }
            if let Some(credit) = ring.reader.credit(is_quiet) {
                ring.credits.push((now + latency, credit));
                has_moved = true;
            }
            let writer = &mut ring.writer;
            ring.credits.retain(|(at, credit)| {
                if *at <= now {
                    writer.credit(credit);
                    has_moved = true;
                }
                *at > now
            });
        }
        has_moved
    }

    pub(super) fn clock(&self) -> ClockReading {
        ClockReading { monotonic: self.now, realtime: self.now + 1_000_000 }
    }
}

fn broken() -> Error {
    Error::new("use simulated ring", ErrorKind::Failed, "the ring is broken")
}

impl OutboundTransport for SimTransport {
    type Ring = usize;
    type PayloadLocation = SimPayload;
    type CopyHandle = u64;

    fn is_staged(&self, payload: &SimPayload) -> bool {
        payload.is_device
    }

    fn begin(&self, ring: usize, form: RingMessageKind, length: u64) -> Result<Message> {
        Ok(self.rings[ring].writer.begin(form.number(), length))
    }

    fn push(
        &mut self,
        ring: usize,
        message: &mut Message,
        (part, at): (Part<'_, SimPayload>, u64),
        inline: &[u8],
    ) -> Result<Pushed> {
        let ring = &mut self.rings[ring];
        if ring.is_broken || ring.has_lost_lane {
            return Err(broken());
        }
        if ring.leaving.len() >= 16 {
            return Ok(Pushed::Busy);
        }
        // Small messages and prefixes use the first lane.
        let lanes = ring.lanes.iter().enumerate();
        let lane = match part {
            Part::BatchBuffer { .. } | Part::Nothing => 0,
            _ => {
                lanes.min_by_key(|(_, lane)| lane.resource.free.max(self.now)).map_or(0, |it| it.0)
            }
        };
        let from = (message.written() - at) as usize;
        let source = match part {
            Part::Direct(payload) => Some((payload.clone(), from)),
            _ => None,
        };
        let bytes = match part {
            Part::BatchBuffer { batch_buffer, length } => {
                self.batch_buffers[batch_buffer as usize][from..length].to_vec()
            }
            Part::Slot { slot, length } => self.slots[slot as usize][from..length].to_vec(),
            Part::Direct(payload) => {
                let is_direct = ring.inline.is_some() || !payload.is_device;
                assert!(is_direct, "device memory is not written to a ring in host memory");
                payload.bytes.lock().unwrap()[from..].to_vec()
            }
            Part::Probe { offset, length } => {
                let source = ring.probe.as_ref().expect("a probe that was not begun, or is over");
                source[offset as usize + from..(offset + length) as usize].to_vec()
            }
            Part::Nothing => Vec::new(),
        };
        assert!(inline.is_empty() || ring.inline.is_some(), "no room beside headers");
        let chunk = match ring.writer.plan_within(message, bytes.len() as u64) {
            Ok(chunk) => chunk,
            Err(Refused::Blocked(blocked)) => return Ok(Pushed::Blocked(blocked)),
            Err(Refused::Stale) => panic!("stale message"),
        };
        ring.writer.commit(message, &chunk);
        let payload = bytes[..chunk.header.payload as usize].to_vec();
        let by = &mut ring.lanes[lane];
        let left = by.resource.put(self.now, transfer_time(chunk.length(), ring.rate) * by.slower);
        self.random_state = self.random_state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        let late = if by.later == 0 { 0 } else { (self.random_state >> 33) % by.later };
        ring.leaving.push((lane, chunk.header.position, left));
        ring.flights.push(ChunkInFlight {
            lane,
            leaves: left,
            source,
            arrives: left + self.speeds.latency + late,
            at: (chunk.header_at, chunk.payload_at),
            header: chunk.header,
            inline: inline.to_vec(),
            payload,
            immediate: chunk.immediate,
        });
        Ok(Pushed::Posted(chunk.header.payload.into()))
    }

    fn is_probe_ready(&mut self, ring: usize) -> Result<bool> {
        Ok(self.rings[ring].probe.is_some())
    }

    fn end_probe(&mut self, ring: usize) {
        assert!(self.rings[ring].probe.take().is_some(), "a probe ended twice");
    }

    fn ring_progress(&self, ring: usize) -> Result<RingProgress> {
        let ring = &self.rings[ring];
        if ring.is_broken || ring.has_lost_lane {
            return Err(broken());
        }
        let (tail, read) = (ring.writer.tail(), ring.writer.known_head());
        Ok(RingProgress { tail, left: ring.left, read })
    }

    fn is_quiescent(&mut self, ring: usize) -> bool {
        self.rings[ring].leaving.is_empty()
    }

    fn close(&mut self, ring: usize) {
        assert!(!std::mem::replace(&mut self.rings[ring].is_closed, true), "closed twice");
    }

    fn max_single_chunk(&self, ring: usize) -> Result<usize> {
        if self.rings[ring].hides_chunk_limit {
            return Err(broken());
        }
        Ok(self.rings[ring].writer.max_single_chunk() as usize)
    }

    fn take_batch_buffer(&mut self, is_first: bool) -> Option<u32> {
        if let Some(batch_buffer) = self.free_batch_buffers.pop() {
            return Some(batch_buffer);
        }
        if self.batch_buffers.len() >= 4 && !is_first {
            return None;
        }
        self.batch_buffers.push(vec![0; BATCH_BUFFER_LENGTH]);
        Some(self.batch_buffers.len() as u32 - 1)
    }

    fn release_batch_buffer(&mut self, batch_buffer: u32, is_quarantined: bool) {
        // A later read finds other bytes.
        self.batch_buffers[batch_buffer as usize].fill(0xEE);
        assert!(
            !self.free_batch_buffers.contains(&batch_buffer),
            "batch buffer was released twice"
        );
        if !is_quarantined {
            self.free_batch_buffers.push(batch_buffer);
        }
    }

    fn write_batch_buffer(&mut self, batch_buffer: u32, at: usize, bytes: &[u8]) -> Result<()> {
        self.batch_buffers[batch_buffer as usize][at..at + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn gather(
        &mut self,
        batch_buffer: u32,
        at: usize,
        from: &SimPayload,
        length: usize,
    ) -> Result<()> {
        let bytes = from.bytes.lock().unwrap();
        self.batch_buffers[batch_buffer as usize][at..at + length]
            .copy_from_slice(&bytes[..length]);
        Ok(())
    }

    fn take_slot(&mut self, _like: &SimPayload, is_first: bool) -> Result<Option<u32>> {
        if let Some(slot) = self.free_slots.pop() {
            return Ok(Some(slot));
        }
        if self.slots.len() >= self.all_slots && !is_first {
            return Ok(None);
        }
        self.slots.push(Vec::new());
        Ok(Some(self.slots.len() as u32 - 1))
    }

    fn release_slot(&mut self, slot: u32, is_quarantined: bool) {
        self.slots[slot as usize].fill(0xEE);
        assert!(!self.free_slots.contains(&slot), "slot was released twice");
        if !is_quarantined {
            self.free_slots.push(slot);
        }
    }

    fn write_slot(&mut self, slot: u32, at: usize, bytes: &[u8]) -> Result<()> {
        let slot = &mut self.slots[slot as usize];
        slot.resize(slot.len().max(at + bytes.len()), 0);
        slot[at..at + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn copy_out(&mut self, slot: u32, from: &SimPayload, offset: u64, length: u64) -> Result<u64> {
        let done = self.resource.put(self.now, transfer_time(length, self.speeds.out));
        self.pieces_copied += 1;
        self.copies.push((done, from.clone(), offset, length, slot));
        self.events.push(done);
        Ok(done)
    }

    fn is_copied(&mut self, copy_handle: &u64) -> Result<bool> {
        if *copy_handle > self.now {
            self.vain_polls += 1;
            return Ok(false);
        }
        if let Some(index) = self.copies.iter().position(|copy| copy.0 == *copy_handle) {
            let (_, from, offset, length, slot) = self.copies.remove(index);
            let bytes = from.bytes.lock().unwrap();
            let range = offset as usize..(offset + length) as usize;
            self.slots[slot as usize] = bytes[range].to_vec();
        }
        Ok(true)
    }
}

/// A received chunk.
pub(super) struct SimChunk {
    header: ChunkHeader,
    is_last: bool,
    offset: usize,
    memory: Bytes,
    /// The bytes beside its header, of a ring in device memory.
    inline: Option<Vec<u8>>,
    release_token: Option<ReleaseToken>,
    released: Arc<Mutex<Vec<ReleaseToken>>>,
}

impl Drop for SimChunk {
    fn drop(&mut self) {
        let end = self.offset + self.header.payload as usize;
        // A later read finds other bytes.
        self.memory.lock().unwrap()[self.offset..end].fill(0xDD);
        self.released.lock().unwrap().extend(self.release_token.take());
    }
}

impl SimChunk {
    /// A chunk that was not written into any ring.
    pub(super) fn forged(header: ChunkHeader, is_last: bool, bytes: Vec<u8>) -> Self {
        let memory = Arc::new(Mutex::new(bytes));
        let (inline, release_token, released) = (None, None, Arc::default());
        Self { header, is_last, offset: 0, memory, inline, release_token, released }
    }
}

impl Chunk for SimChunk {
    fn header(&self) -> &ChunkHeader {
        &self.header
    }

    fn is_last(&self) -> bool {
        self.is_last
    }

    fn inline_data(&self) -> Result<Vec<u8>> {
        Ok(self.inline.clone().unwrap_or_default())
    }

    fn read(&self, at: usize, into: &mut [u8]) -> Result<()> {
        assert!(self.inline.is_none(), "the processor cannot read device memory");
        let from = self.offset + at;
        into.copy_from_slice(&self.memory.lock().unwrap()[from..from + into.len()]);
        Ok(())
    }
}

/// A copy into a device, executed at its end time.
type CopyIn = (u64, (Bytes, usize, usize), SimPayload, u64);

/// State of one inbound topic's transport.
#[derive(Default)]
pub(super) struct SimInboundState {
    resource: SerialResource,
    copies: Vec<CopyIn>,
    /// Chunks of a probe as they were seen.
    seen: HashMap<u64, Vec<u8>>,
    pub(super) forged: Vec<SimChunk>,
}

/// Access to that state for one turn.
pub(super) struct SimRingInput<'a> {
    pub(super) intake: &'a mut SimInboundState,
    pub(super) wire: &'a mut SimTransport,
    pub(super) ring: Option<usize>,
}

impl InboundTransport for SimRingInput<'_> {
    type Chunk = SimChunk;
    type PayloadLocation = SimPayload;
    type CopyHandle = u64;

    fn take(&mut self) -> Result<Option<SimChunk>> {
        if !self.intake.forged.is_empty() {
            return Ok(Some(self.intake.forged.remove(0)));
        }
        let Some(ring) = self.ring else { return Ok(None) };
        let ring = &mut self.wire.rings[ring];
        if ring.is_broken {
            return Err(broken());
        }
        let memory = Arc::clone(&ring.memory);
        let read_header = |location| {
            let fabric::ring::HeaderLocation::Ring(at) = location else {
                panic!("headers lie in the ring")
            };
            let at = at as usize;
            let mut bytes = [0; 64];
            bytes.copy_from_slice(&memory.lock().unwrap()[at..at + 64]);
            bytes
        };
        let taken = ring.reader.take(read_header).unwrap();
        Ok(taken.map(|arrived| SimChunk {
            header: arrived.header,
            is_last: arrived.is_last,
            offset: arrived.offset as usize,
            memory: Arc::clone(&memory),
            inline: ring.inline.as_mut().map(|inline| {
                inline.remove(&arrived.header.sequence).expect("written with the header")
            }),
            release_token: Some(arrived.release_token),
            released: Arc::clone(&ring.released),
        }))
    }

    fn copy_in(
        &mut self,
        chunk: &SimChunk,
        from: usize,
        length: usize,
        to: &SimPayload,
        at: u64,
    ) -> Result<Option<u64>> {
        if !to.is_device {
            let end = at as usize + length;
            chunk.read(from, &mut to.bytes.lock().unwrap()[at as usize..end])?;
            return Ok(None);
        }
        let done = self
            .intake
            .resource
            .put(self.wire.now, transfer_time(length as u64, self.wire.speeds.into));
        let source = (Arc::clone(&chunk.memory), chunk.offset + from, length);
        self.intake.copies.push((done, source, to.clone(), at));
        self.wire.events.push(done);
        Ok(Some(done))
    }

    fn look(&mut self, chunk: &SimChunk) -> Result<u64> {
        let length = u64::from(chunk.header.payload);
        let taken = transfer_time(length, self.wire.speeds.into);
        let done = self.intake.resource.put(self.wire.now, taken);
        // What the device sees when it begins.
        let end = chunk.offset + length as usize;
        let seen = chunk.memory.lock().unwrap()[chunk.offset..end].to_vec();
        self.intake.seen.insert(chunk.header.sequence, seen);
        self.wire.events.push(done);
        Ok(done)
    }

    fn seen(&mut self, chunk: &SimChunk) -> Result<Vec<u8>> {
        Ok(self.intake.seen.remove(&chunk.header.sequence).expect("looked at, once"))
    }

    fn is_copied(&mut self, copy_handle: &u64) -> Result<bool> {
        if *copy_handle > self.wire.now {
            return Ok(false);
        }
        for (done, (memory, from, length), to, at) in std::mem::take(&mut self.intake.copies) {
            if done > *copy_handle {
                self.intake.copies.push((done, (memory, from, length), to, at));
                continue;
            }
            let at = at as usize;
            let bytes = memory.lock().unwrap()[from..from + length].to_vec();
            to.bytes.lock().unwrap()[at..at + length].copy_from_slice(&bytes);
        }
        Ok(true)
    }
}
