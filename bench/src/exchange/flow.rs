//! Messages through rings: one each way, in memory of whoever reads.

use std::time::{Duration, Instant};

use fabric::ring::{
    MOST_CHUNKS, Notify, Port, Pushed, ReceiverId, RingOptions, SenderId, Shape, Turn,
};
use fabric::{Access, HostMemory, MemoryRegion};
use serde::{Deserialize, Serialize};

use super::frame::Frame;
use super::pingpong::Measured;
use super::plan::{Mode, Wait};
use super::stamps::{Found, stamp};
use super::station::Station;
use super::vigil::{Vigil, unexpected};
use command::exit::Failure;

/// Bytes of all places to send from together, at most; and how many there are at least, if
/// messages are long.
const SOURCE: u64 = 16 << 20;
const LEAST_PLACES: u64 = 4;
/// Turns without anything after which it is quiet.
const QUIET: u32 = 1000;
/// Messages between two samples of a stream.
const WINDOW: u64 = 16;
/// Longest sleep between two looks at the other side.
const NAP: Duration = Duration::from_millis(10);

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
    /// How readers are told; None: by the best form that the provider can do.
    pub(crate) notify: Option<Notify>,
    pub(crate) iterations: u64,
    pub(crate) warmup: u64,
}

impl Flow {
    /// Are there rings of this capacity?
    pub(crate) fn has_shape(&self) -> bool {
        Shape::new(self.capacity, 0).is_some()
    }

    pub(super) fn stride(&self) -> u64 {
        self.size.max(8).next_multiple_of(64)
    }

    /// Bytes of all places to send from.
    pub(super) fn source(&self) -> u64 {
        self.places() * self.stride()
    }

    /// Bytes that the side takes for it which did not ask for it: its ring, and what it sends
    /// from, if it sends anything.
    pub(crate) fn memory_of_target(&self) -> u64 {
        match self.mode {
            Mode::Lat => self.capacity.saturating_add(self.source()),
            Mode::Bw => self.capacity,
        }
    }

    /// Bytes that the other side takes for it.
    pub(crate) fn memory_of_initiator(&self) -> u64 {
        self.capacity.saturating_add(self.source())
    }

    /// Messages one way, with those that are not measured.
    pub(super) fn messages(&self) -> u64 {
        self.warmup + self.iterations
    }

    /// Bytes of all of them.
    pub(super) fn bytes(&self) -> u64 {
        self.messages().saturating_mul(self.size)
    }

    /// Where samples go: while the clock runs nothing is allocated.
    pub(super) fn room_for_samples(&self) -> Result<Vec<u64>, Failure> {
        let count = match self.mode {
            Mode::Lat => self.iterations.max(self.warmup),
            Mode::Bw => self.iterations.max(self.warmup) / WINDOW + 1,
        };
        let mut samples = Vec::new();
        samples.try_reserve_exact(usize::try_from(count).unwrap_or(usize::MAX)).map_err(|_| {
            Failure::failed(format!("there is no memory for the samples of {count} messages"))
        })?;
        Ok(samples)
    }

    /// Messages that may be on their way. Enough that the other side tells of what it read
    /// before they are used up.
    pub(super) fn places(&self) -> u64 {
        let told_after = (self.watermark / self.stride()).min(MOST_CHUNKS);
        (SOURCE / self.stride()).clamp(LEAST_PLACES, 2 * told_after + 64)
    }
}

/// One side.
struct Side {
    port: Port,
    vigil: Vigil,
    sender: SenderId,
    receiver: ReceiverId,
    source: MemoryRegion,
    flow: Flow,
    sent: u64,
    /// Messages that the other side let go of.
    read: u64,
    taken: u64,
    found: Found,
}

/// What came of a run.
pub(crate) struct Flown {
    pub(crate) measured: Measured,
    pub(crate) notify: Notify,
    /// Credits that came, and how long the writer waited for them, in the measured part.
    pub(crate) credits: u64,
    pub(crate) blocked: Duration,
}

/// The initiator's side.
pub(crate) fn run(station: Station, flow: &Flow) -> Result<Flown, Failure> {
    let mut side = Side::new(station, flow, true)?;
    let mut samples = flow.room_for_samples()?;
    let mut elapsed = 0;
    let mut before = side.port.sender(side.sender)?.statistics();
    for count in [flow.warmup, flow.iterations] {
        side.meet()?;
        samples.clear();
        before = side.port.sender(side.sender)?.statistics();
        let start = Instant::now();
        match flow.mode {
            Mode::Lat => side.ping(count, &mut samples)?,
            Mode::Bw => side.stream(count, &mut samples)?,
        }
        elapsed = start.elapsed().as_nanos() as u64;
    }
    let after = side.port.sender(side.sender)?.statistics();
    let notify = side.port.sender(side.sender)?.notify();
    side.meet()?;
    let there = side.next_frame("what the other side found")?;
    let Frame::Checked { bytes, bad } = there else { return Err(unexpected(there)) };
    let here = match flow.mode {
        Mode::Lat => side.found.bad(flow.size, flow.messages()),
        // Nothing comes back.
        Mode::Bw => 0,
    };
    let verified = here == 0 && bad == 0 && bytes == flow.bytes();
    side.finish()?;
    Ok(Flown {
        measured: Measured { samples, elapsed, verified },
        notify,
        credits: after.credits - before.credits,
        blocked: after.blocked_for - before.blocked_for,
    })
}

/// The target's side.
pub(crate) fn serve(station: Station, flow: &Flow) -> Result<(), Failure> {
    let mut side = Side::new(station, flow, flow.mode == Mode::Lat)?;
    for count in [flow.warmup, flow.iterations] {
        side.meet()?;
        match flow.mode {
            Mode::Lat => side.pong(count)?,
            Mode::Bw => side.drink(count)?,
        }
    }
    side.meet()?;
    let (bytes, bad) = (side.found.bytes, side.found.bad(flow.size, flow.messages()));
    side.vigil.send(&Frame::Checked { bytes, bad })?;
    side.finish()
}

impl Side {
    fn new(station: Station, flow: &Flow, writes: bool) -> Result<Self, Failure> {
        let Station { endpoint, queue, peer, mut vigil, .. } = station;
        let domain = endpoint.domain().clone();
        let notify = match flow.notify {
            Some(notify) => notify,
            None => Notify::best(domain.capabilities())?,
        };
        let mut port = Port::new(endpoint, queue);
        let (capacity, watermark) = (flow.capacity, flow.watermark);
        let options = RingOptions { capacity, watermark, notify, whole: 0 };
        let receiver = port.offer(&options)?;
        vigil.send(&Frame::Ring(port.terms(receiver)?))?;
        let frame = next_frame(&mut port, &mut vigil, "the other side's ring")?;
        let Frame::Ring(offer) = frame else { return Err(unexpected(frame)) };
        let (sender, answer) = port.accept(peer, &offer, flow.chunk)?;
        vigil.send(&Frame::Answer(answer))?;
        let frame = next_frame(&mut port, &mut vigil, "the other side's answer")?;
        let Frame::Answer(answer) = frame else { return Err(unexpected(frame)) };
        port.connect(receiver, peer, &answer)?;
        // Who only reads has nothing to send from.
        let length = if writes { flow.source() as usize } else { 64 };
        let source = domain.register(HostMemory::zeroed(length)?, Access::WRITE)?;
        source.enable_for(port.endpoint())?;
        source.fill(0..length, 0x5a)?;
        Ok(Self {
            port,
            vigil,
            sender,
            receiver,
            source,
            flow: flow.clone(),
            sent: 0,
            read: 0,
            taken: 0,
            found: Found::default(),
        })
    }

    /// Both sides come here before either goes on.
    fn meet(&mut self) -> Result<(), Failure> {
        self.vigil.send(&Frame::Meet)?;
        match self.next_frame("the meeting")? {
            Frame::Meet => Ok(()),
            frame => Err(unexpected(frame)),
        }
    }

    fn next_frame(&mut self, what: &'static str) -> Result<Frame, Failure> {
        next_frame(&mut self.port, &mut self.vigil, what)
    }

    fn finish(self) -> Result<(), Failure> {
        self.vigil.end()?;
        self.port.close()?;
        crate::process::stop_watching();
        Ok(())
    }

    /// False if nothing happened.
    #[inline(always)] // what polls is measured
    fn progress(&mut self) -> Result<bool, Failure> {
        progress(&mut self.port, &mut self.vigil)
    }

    /// Sends the next message: its number stands at both ends of it.
    fn send(&mut self) -> Result<(), Failure> {
        self.vigil.waiting_for = "room in the other side's ring";
        while self.sent - self.read >= self.flow.places() {
            self.reap()?;
        }
        let at = (self.sent % self.flow.places() * self.flow.stride()) as usize;
        let size = self.flow.size as usize;
        stamp(&self.source, at, size, self.sent)?;
        let payload = self.source.slice(at..at + size)?;
        let mut message = self.port.begin(self.sender, 0, self.flow.size)?;
        loop {
            match self.port.push(self.sender, &mut message, &payload)? {
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
        while self.port.next_read(self.sender)?.is_some() {
            self.read += 1;
        }
        Ok(())
    }

    /// Takes the next message, and looks at both ends of it.
    #[inline]
    fn receive(&mut self) -> Result<(), Failure> {
        self.vigil.waiting_for = "the other side's message";
        let mut idle = 0;
        loop {
            while let Some(view) = self.port.take(self.receiver)? {
                let is_last = view.is_last();
                self.found.look_at(&view, self.flow.size, self.taken)?;
                drop(view);
                if is_last {
                    self.taken += 1;
                    return Ok(());
                }
                self.port.tell(self.receiver, false)?;
            }
            idle = if self.progress()? { 0 } else { idle + 1 };
            if idle % QUIET == QUIET - 1 {
                // The other side may wait for what was read and not told.
                self.port.tell(self.receiver, true)?;
            }
        }
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
            self.port.tell(self.receiver, false)?;
        }
        Ok(())
    }

    fn pong(&mut self, count: u64) -> Result<(), Failure> {
        for _ in 0..count {
            self.receive()?;
            self.send()?;
            self.port.tell(self.receiver, false)?;
        }
        Ok(())
    }

    fn stream(&mut self, count: u64, samples: &mut Vec<u64>) -> Result<(), Failure> {
        sampled(count, samples, || self.send())?;
        self.vigil.waiting_for = "the last messages to be read";
        while self.read < self.sent {
            self.reap()?;
        }
        Ok(())
    }

    fn drink(&mut self, count: u64) -> Result<(), Failure> {
        for _ in 0..count {
            self.receive()?;
            self.port.tell(self.receiver, false)?;
        }
        while self.port.tell(self.receiver, true)? {}
        Ok(())
    }
}

/// Rings go on meanwhile: the other side may wait for credit.
fn next_frame(port: &mut Port, vigil: &mut Vigil, what: &'static str) -> Result<Frame, Failure> {
    vigil.waiting_for = what;
    loop {
        if let Some(frame) = vigil.receive()? {
            return Ok(frame);
        }
        for _ in 0..vigil.turns_per_look() {
            if !progress(port, vigil)? {
                port.tell_all(true);
            }
        }
    }
}

/// False if nothing happened.
#[inline(always)] // what polls is measured
fn progress(port: &mut Port, vigil: &mut Vigil) -> Result<bool, Failure> {
    vigil.look_up()?;
    let turn = match vigil.waiting {
        Wait::Busy => port.turn(),
        Wait::Adaptive | Wait::Block => port.rest(NAP),
    };
    match turn {
        Ok(Turn::Ring) => {
            vigil.has_moved();
            Ok(true)
        }
        Ok(Turn::Idle) if vigil.waiting == Wait::Busy => {
            port.pause();
            Ok(false)
        }
        Ok(Turn::Idle) => vigil.tick().map(|()| false),
        Ok(Turn::Other(Ok(_))) => Ok(true),
        Ok(Turn::Other(Err(failure))) => Err(vigil.failed(failure.error)),
        Err(error) => Err(vigil.failed(error)),
    }
}

/// Sends so many messages, with the time that each of a few in a row took as a sample.
pub(super) fn sampled(
    count: u64,
    samples: &mut Vec<u64>,
    mut send: impl FnMut() -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut before = Instant::now();
    for number in 1..=count {
        send()?;
        if number % WINDOW == 0 {
            let after = Instant::now();
            samples.push((after - before).as_nanos() as u64 / WINDOW);
            before = after;
        }
    }
    samples.extend((before.elapsed().as_nanos() as u64).checked_div(count % WINDOW));
    Ok(())
}
