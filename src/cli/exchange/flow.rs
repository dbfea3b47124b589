//! Messages through rings: one each way, in memory of whoever reads.

use std::time::Instant;

use fabric::ring::{MOST_CHUNKS, Pushed, RingReceiver, RingSender, Shape, View};
use fabric::{Access, CompletionKind, HostMemory, MemoryRegion};
use serde::{Deserialize, Serialize};

use super::frame::Frame;
use super::pingpong::Measured;
use super::plan::Mode;
use super::station::{Station, unexpected};
use crate::cli::exit::Failure;

/// Receives that are posted ahead, where immediates use them up.
const RECEIVES: u64 = 1024;
/// Bytes of all places to send from together, at most.
const SOURCE: u64 = 64 << 20;
/// Turns without anything after which it is quiet.
const QUIET: u32 = 1000;
/// Messages between two samples of a stream.
const WINDOW: u64 = 16;
/// The ring's number and epoch: there is one each way.
const RING: u16 = 0;
const EPOCH: u32 = 1;

/// What is measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Flow {
    pub(crate) mode: Mode,
    /// Bytes of a message.
    pub(crate) size: u64,
    /// Bytes of each ring.
    pub(crate) capacity: u64,
    /// Bytes that are released before the writer is told; 0: after each chunk.
    pub(crate) watermark: u64,
    /// Bytes of payload in a chunk, at most.
    pub(crate) chunk: u64,
    pub(crate) iterations: u64,
    pub(crate) warmup: u64,
}

impl Flow {
    /// The rings; None if there are none of this capacity.
    pub(crate) fn shape(&self) -> Option<Shape> {
        Shape::new(self.capacity, RING)
    }

    fn stride(&self) -> u64 {
        self.size.max(8).next_multiple_of(64)
    }

    /// Messages that may be on their way. Enough that the other side tells of what it read
    /// before they are used up.
    fn places(&self) -> u64 {
        let told_after = (self.watermark / self.stride()).min(MOST_CHUNKS);
        (SOURCE / self.stride()).clamp(1, 2 * told_after + 64)
    }
}

/// One side.
struct Side {
    station: Station,
    sender: RingSender,
    receiver: RingReceiver,
    source: MemoryRegion,
    flow: Flow,
    sent: u64,
    /// Messages that the other side let go of.
    read: u64,
    taken: u64,
    bad: u64,
    bytes: u64,
}

/// The initiator's side.
pub(crate) fn run(station: Station, flow: &Flow) -> Result<Measured, Failure> {
    let mut side = Side::new(station, flow)?;
    let mut samples = Vec::with_capacity(flow.iterations as usize);
    let mut elapsed = 0;
    for count in [flow.warmup, flow.iterations] {
        side.meet()?;
        samples.clear();
        let start = Instant::now();
        match flow.mode {
            Mode::Lat => side.ping(count, &mut samples)?,
            Mode::Bw => side.stream(count, &mut samples)?,
        }
        elapsed = start.elapsed().as_nanos() as u64;
    }
    side.meet()?;
    let there = side.next_frame("what the other side found")?;
    let Frame::Checked { bad, .. } = there else { return Err(unexpected(there)) };
    let verified = side.bad == 0 && bad == 0;
    side.station.finish()?;
    Ok(Measured { samples, elapsed, verified })
}

/// The target's side.
pub(crate) fn serve(station: Station, flow: &Flow) -> Result<(), Failure> {
    let mut side = Side::new(station, flow)?;
    for count in [flow.warmup, flow.iterations] {
        side.meet()?;
        match flow.mode {
            Mode::Lat => side.pong(count)?,
            Mode::Bw => side.drink(count)?,
        }
    }
    side.meet()?;
    let (bytes, bad) = (side.bytes, side.bad);
    side.station.send(&Frame::Checked { bytes, bad })?;
    side.station.finish()
}

impl Side {
    fn new(mut station: Station, flow: &Flow) -> Result<Self, Failure> {
        let shape = flow.shape().ok_or_else(|| Failure::failed("no ring of this capacity"))?;
        let domain = station.region.domain().clone();
        let mut receiver = RingReceiver::new(&station.endpoint, shape, EPOCH, flow.watermark)?;
        let credit = RingSender::credit_memory(&domain, &station.endpoint)?;
        if station.capabilities().immediates_consume_receives() {
            for _ in 0..RECEIVES {
                station.endpoint.receive_notice(&mut station.queue, 0)?;
            }
        }
        let rings =
            Frame::Rings { ring: receiver.region().describe()?, credit: credit.describe()? };
        station.send(&rings)?;
        station.waiting_for = "the other side's ring";
        let frame = loop {
            if let Some(frame) = station.receive()? {
                break frame;
            }
            station.turn()?;
        };
        let Frame::Rings { ring, credit: theirs } = frame else { return Err(unexpected(frame)) };
        receiver.connect(station.peer, domain.attach(&theirs)?);
        let sender = RingSender::new(
            &station.endpoint,
            station.peer,
            domain.attach(&ring)?,
            credit,
            shape,
            EPOCH,
            flow.chunk,
        )?;
        let length = (flow.places() * flow.stride()) as usize;
        let source = domain.register(HostMemory::zeroed(length)?, Access::WRITE)?;
        if source.is_registered() && !source.is_enabled() {
            source.bind_endpoint(&station.endpoint)?;
            source.enable()?;
        }
        source.fill(0..length, 0x5a)?;
        let flow = flow.clone();
        Ok(Self {
            station,
            sender,
            receiver,
            source,
            flow,
            sent: 0,
            read: 0,
            taken: 0,
            bad: 0,
            bytes: 0,
        })
    }

    /// Both sides come here before either goes on.
    fn meet(&mut self) -> Result<(), Failure> {
        self.station.send(&Frame::Meet)?;
        match self.next_frame("the meeting")? {
            Frame::Meet => Ok(()),
            frame => Err(unexpected(frame)),
        }
    }

    /// Rings go on meanwhile: the other side may wait for credit.
    fn next_frame(&mut self, what: &'static str) -> Result<Frame, Failure> {
        self.station.waiting_for = what;
        loop {
            if let Some(frame) = self.station.receive()? {
                return Ok(frame);
            }
            for _ in 0..self.station.turns_per_look() {
                if !self.progress()? {
                    self.tell(true)?;
                }
            }
        }
    }

    /// False if nothing happened.
    #[inline]
    fn progress(&mut self) -> Result<bool, Failure> {
        let Some(completion) = self.station.turn()? else { return Ok(false) };
        if completion.kind == CompletionKind::RemoteWrite && completion.operation.is_some() {
            let Station { endpoint, queue, .. } = &mut self.station;
            endpoint.receive_notice(queue, 0)?;
        }
        let outcome = Ok(completion);
        if !self.sender.accept(&outcome)? {
            self.receiver.accept(&outcome)?;
        }
        Ok(true)
    }

    fn tell(&mut self, is_quiet: bool) -> Result<bool, Failure> {
        let Station { endpoint, queue, .. } = &mut self.station;
        Ok(self.receiver.tell(endpoint, queue, is_quiet)?)
    }

    /// Sends the next message: its number stands at both ends of it.
    fn send(&mut self) -> Result<(), Failure> {
        self.station.waiting_for = "room in the other side's ring";
        while self.sent - self.read >= self.flow.places() {
            self.reap()?;
        }
        let at = (self.sent % self.flow.places() * self.flow.stride()) as usize;
        let size = self.flow.size as usize;
        let stamp = self.sent.to_le_bytes();
        let stamped = size.min(8);
        self.source.write(at, &stamp[..stamped])?;
        self.source.write(at + size - stamped, &stamp[..stamped])?;
        let payload = self.source.slice(at..at + size)?;
        let mut message = self.sender.begin(0, self.flow.size);
        loop {
            let Station { endpoint, queue, .. } = &mut self.station;
            match self.sender.push(endpoint, queue, &mut message, &payload)? {
                Pushed::Posted(_) if message.is_written() => break,
                Pushed::Written => break,
                Pushed::Posted(_) => {}
                Pushed::Blocked(_) | Pushed::Busy => self.reap()?,
            }
        }
        self.sent += 1;
        Ok(())
    }

    /// Takes note of what the other side let go of.
    fn reap(&mut self) -> Result<(), Failure> {
        self.progress()?;
        while self.sender.next_read().is_some() {
            self.read += 1;
        }
        Ok(())
    }

    /// Takes the next message, and looks at both ends of it.
    #[inline]
    fn receive(&mut self) -> Result<(), Failure> {
        self.station.waiting_for = "the other side's message";
        let mut idle = 0;
        loop {
            while let Some(view) = self.receiver.take()? {
                let is_last = view.is_last;
                self.look_at(&view)?;
                self.receiver.release(view);
                if is_last {
                    self.taken += 1;
                    return Ok(());
                }
                self.tell(false)?;
            }
            idle = if self.progress()? { 0 } else { idle + 1 };
            if idle % QUIET == QUIET - 1 {
                // The other side may wait for what was read and not told.
                self.tell(true)?;
            }
        }
    }

    fn look_at(&mut self, view: &View) -> Result<(), Failure> {
        let Some(payload) = &view.payload else { return Ok(()) };
        self.bytes += payload.len() as u64;
        let stamp = self.taken.to_le_bytes();
        let stamped = (self.flow.size as usize).min(8);
        let region = payload.region();
        let mut found = [0; 8];
        let is_first = view.header.offset == 0;
        if is_first && payload.len() >= stamped {
            region.read(payload.offset(), &mut found[..stamped])?;
            self.bad += u64::from(found[..stamped] != stamp[..stamped]);
        }
        if view.is_last && payload.len() >= stamped {
            region.read(payload.offset() + payload.len() - stamped, &mut found[..stamped])?;
            self.bad += u64::from(found[..stamped] != stamp[..stamped]);
        }
        Ok(())
    }

    fn ping(&mut self, count: u64, samples: &mut Vec<u64>) -> Result<(), Failure> {
        let mut before = Instant::now();
        for _ in 0..count {
            self.send()?;
            self.receive()?;
            let after = Instant::now();
            samples.push((after - before).as_nanos() as u64);
            before = after;
            // After the message: nobody waits for it.
            self.tell(false)?;
        }
        Ok(())
    }

    fn pong(&mut self, count: u64) -> Result<(), Failure> {
        for _ in 0..count {
            self.receive()?;
            self.send()?;
            self.tell(false)?;
        }
        Ok(())
    }

    fn stream(&mut self, count: u64, samples: &mut Vec<u64>) -> Result<(), Failure> {
        let mut before = Instant::now();
        for number in 1..=count {
            self.send()?;
            if number % WINDOW == 0 {
                let after = Instant::now();
                samples.push((after - before).as_nanos() as u64 / WINDOW);
                before = after;
            }
        }
        self.station.waiting_for = "the last messages to be read";
        while self.read < self.sent {
            self.reap()?;
        }
        Ok(())
    }

    fn drink(&mut self, count: u64) -> Result<(), Failure> {
        for _ in 0..count {
            self.receive()?;
            self.tell(false)?;
        }
        while self.tell(true)? {}
        Ok(())
    }
}
