//! A stream of messages through a ring over several lanes, each with a thread.

use std::time::{Duration, Instant};

use fabric::ring::{
    Notify, Pushed, RingOptions, StripedReceiver, StripedRegion, StripedSender, Stripes,
    StripesOptions,
};
use fabric::{Address, HostMemory, Offer};

use super::flow::{Flow, Flown, sampled};
use super::frame::Frame;
use super::pingpong::Measured;
use super::stamps::{Found, stamp};
use super::station::Station;
use super::vigil::{Vigil, unexpected};
use command::exit::Failure;

/// Longest wait for the ring between two looks at the other side.
const LOOK: Duration = Duration::from_millis(10);
/// How long the last words may take.
const FAREWELL: Duration = Duration::from_secs(10);

/// The writer.
struct Source {
    vigil: Vigil,
    ring: StripedSender,
    source: StripedRegion,
    flow: Flow,
    sent: u64,
    read: u64,
}

pub(super) fn run(station: Station, flow: &Flow) -> Result<Flown, Failure> {
    let (lanes, theirs, mut vigil, notify) = open(station, flow)?;
    let length = flow.source() as usize;
    let source = lanes.register(HostMemory::zeroed(length)?)?;
    source.region().fill(0..length, 0x5a)?;
    let frame = vigil.next("the other side's ring")?;
    let Frame::Ring(offer) = frame else { return Err(unexpected(frame)) };
    let (ring, answer) = lanes.sender(&theirs, &offer, flow.chunk)?;
    vigil.send(&Frame::Answer(answer))?;
    let mut side = Source { vigil, ring, source, flow: flow.clone(), sent: 0, read: 0 };
    let mut samples = flow.room_for_samples()?;
    let mut elapsed = 0;
    let mut before = side.ring.statistics();
    for count in [flow.warmup, flow.iterations] {
        side.vigil.meet()?;
        samples.clear();
        before = side.ring.statistics();
        let start = Instant::now();
        side.stream(count, &mut samples)?;
        elapsed = start.elapsed().as_nanos() as u64;
    }
    let after = side.ring.statistics();
    side.vigil.meet()?;
    let there = side.vigil.next("what the other side found")?;
    let Frame::Checked { bytes, bad } = there else { return Err(unexpected(there)) };
    let Source { ring, vigil, .. } = side;
    ring.close(FAREWELL)?;
    vigil.end()?;
    command::process::stop_watching();
    Ok(Flown {
        measured: Measured { samples, elapsed, verified: bad == 0 && bytes == flow.bytes() },
        notify,
        credits: after.credits - before.credits,
        blocked: after.blocked_for - before.blocked_for,
    })
}

impl Source {
    fn stream(&mut self, count: u64, samples: &mut Vec<u64>) -> Result<(), Failure> {
        sampled(count, samples, || self.send())?;
        self.vigil.waiting_for = "the last messages to be read";
        while self.read < self.sent {
            self.reap()?;
        }
        Ok(())
    }

    fn send(&mut self) -> Result<(), Failure> {
        self.vigil.waiting_for = "room in the other side's ring";
        while self.sent - self.read >= self.flow.places() {
            self.reap()?;
        }
        let at = (self.sent % self.flow.places() * self.flow.stride()) as usize;
        let size = self.flow.size as usize;
        stamp(self.source.region(), at, size, self.sent)?;
        let source = self.source.clone();
        let payload = source.slice(at..at + size)?;
        let mut message = self.ring.begin(0, self.flow.size);
        loop {
            match self.ring.push(&mut message, &payload)? {
                Pushed::Written => break,
                Pushed::Posted(_) => {}
                Pushed::Blocked(_) | Pushed::Busy => self.reap()?,
            }
        }
        self.sent += 1;
        Ok(())
    }

    fn reap(&mut self) -> Result<(), Failure> {
        self.vigil.tick()?;
        self.ring.rest(LOOK);
        if let Some(broken) = self.ring.broken() {
            return Err(self.vigil.failed(broken.clone()));
        }
        while self.ring.next_read().is_some() {
            self.read += 1;
            self.vigil.has_moved();
        }
        Ok(())
    }
}

pub(super) fn serve(station: Station, flow: &Flow) -> Result<(), Failure> {
    let (lanes, theirs, mut vigil, notify) = open(station, flow)?;
    let (capacity, watermark) = (flow.capacity, flow.watermark);
    let options = RingOptions { capacity, watermark, notify, whole: 0 };
    let mut ring = lanes.receiver(&theirs, &options)?;
    vigil.send(&Frame::Ring(ring.terms()?))?;
    let frame = vigil.next("the other side's answer")?;
    let Frame::Answer(answer) = frame else { return Err(unexpected(frame)) };
    ring.connect(&answer)?;
    let (mut taken, mut found) = (0, Found::default());
    for count in [flow.warmup, flow.iterations] {
        vigil.meet()?;
        vigil.waiting_for = "the other side's message";
        let end = taken + count;
        while taken < end {
            vigil.tick()?;
            let Some(view) = next(&mut ring)? else { continue };
            vigil.has_moved();
            found.look_at(&view, flow.size, taken)?;
            taken += u64::from(view.is_last());
        }
        while ring.tell(true) {}
    }
    vigil.meet()?;
    let (bytes, bad) = (found.bytes, found.bad(flow.size, flow.messages()));
    vigil.send(&Frame::Checked { bytes, bad })?;
    // Until the writer has said that it is done.
    while next(&mut ring).is_ok() {
        vigil.tick()?;
    }
    drop(ring);
    command::process::stop_watching();
    Ok(())
}

/// The next chunk; None if there was none for a while.
fn next(ring: &mut StripedReceiver) -> Result<Option<fabric::ring::View>, Failure> {
    match ring.receive(LOOK) {
        Ok(view) => Ok(Some(view)),
        Err(error) if error.kind() == fabric::ErrorKind::DeadlineExceeded => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Opens the lanes and exchanges their addresses. The endpoint that both sides met on is not
/// used.
fn open(station: Station, flow: &Flow) -> Result<(Stripes, Vec<Address>, Vigil, Notify), Failure> {
    let Station { endpoint, queue, mut vigil, .. } = station;
    let offer: Offer = endpoint.domain().offer().clone();
    let notify = match flow.notify {
        Some(notify) => notify,
        None => Notify::best(offer.capabilities())?,
    };
    let options = StripesOptions { waiting: vigil.waiting.waiting() };
    let lanes = Stripes::open(&vec![offer; flow.stripes], options)?;
    vigil.send(&Frame::Lanes(lanes.addresses()?))?;
    let frame = vigil.next("the other side's lanes")?;
    let Frame::Lanes(theirs) = frame else { return Err(unexpected(frame)) };
    endpoint.close()?;
    drop(queue);
    Ok((lanes, theirs, vigil, notify))
}
