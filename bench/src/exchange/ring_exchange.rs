//! Messages through rings: one in each direction, in the reader's memory.

use std::time::{Duration, Instant};

use fabric::ring::{NotifyMode, Port, PortEvent, Pushed, ReceiverId, RingOptions, SenderId};
use fabric::{Access, HostMemory, MemoryRegion};

use super::frame::Frame;
use super::peer_watchdog::{PeerWatchdog, unexpected};
use super::plan::{Mode, RingExchange, Wait};
use super::stamps::{StampCheck, stamp};
use super::{ExchangeSide, Measured, ProcessorTimes};
use crate::process::processor_time;
use command::exit::Failure;

/// Turns without progress after which the peer is idle.
const IDLE_TURNS: u32 = 1000;
/// Longest sleep between two polls of the frame channel.
const SLEEP_SLICE: Duration = Duration::from_millis(10);

/// One side of the exchange.
struct RingSide {
    port: Port,
    peer_watchdog: PeerWatchdog,
    sender: SenderId,
    receiver: ReceiverId,
    source: MemoryRegion,
    ring_exchange: RingExchange,
    sent: u64,
    /// Messages that the other side released.
    read: u64,
    received: u64,
    found: StampCheck,
}

/// Result of a run.
pub(crate) struct RingResult {
    pub(crate) measured: Measured,
    /// How readers were notified.
    pub(crate) notify: &'static str,
    /// Credits received, and how long the writer waited for them, in the measured part.
    pub(crate) credits: u64,
    pub(crate) blocked: Duration,
}

/// The initiator's side.
pub(crate) fn run(side: ExchangeSide, ring_exchange: &RingExchange) -> Result<RingResult, Failure> {
    let mut side = RingSide::new(side, ring_exchange, true)?;
    let mut samples = ring_exchange.sample_buffer()?;
    let (mut elapsed, mut here) = (0, Duration::ZERO);
    let mut before = side.port.sender(side.sender)?.statistics();
    for count in [ring_exchange.warmup, ring_exchange.iterations] {
        side.barrier()?;
        samples.clear();
        before = side.port.sender(side.sender)?.statistics();
        let (start, processor_time_before) = (Instant::now(), processor_time());
        match ring_exchange.mode {
            Mode::Lat => side.ping(count, &mut samples)?,
            Mode::Bw => side.stream(count, &mut samples)?,
        }
        elapsed = start.elapsed().as_nanos() as u64;
        here = processor_time() - processor_time_before;
    }
    let after = side.port.sender(side.sender)?.statistics();
    let notify = side.port.sender(side.sender)?.notify().name();
    side.barrier()?;
    let remote = side.next_frame("what the other side found")?;
    let Frame::Verified { bytes, bad, processor_time: peer } = remote else {
        return Err(unexpected(remote));
    };
    let local = match ring_exchange.mode {
        Mode::Lat => side.found.bad(ring_exchange.size, ring_exchange.messages()),
        // Nothing is sent back.
        Mode::Bw => 0,
    };
    let verified = local == 0 && bad == 0 && bytes == ring_exchange.bytes();
    side.finish()?;
    Ok(RingResult {
        measured: Measured {
            samples,
            elapsed,
            verified,
            processor_times: ProcessorTimes::new(here, peer),
        },
        notify,
        credits: after.credits - before.credits,
        blocked: after.blocked_for - before.blocked_for,
    })
}

/// The target's side.
pub(crate) fn serve(side: ExchangeSide, ring_exchange: &RingExchange) -> Result<(), Failure> {
    let mut side = RingSide::new(side, ring_exchange, ring_exchange.mode == Mode::Lat)?;
    let mut measured = Duration::ZERO;
    for count in [ring_exchange.warmup, ring_exchange.iterations] {
        side.barrier()?;
        let before = processor_time();
        match ring_exchange.mode {
            Mode::Lat => side.pong(count)?,
            Mode::Bw => side.receive_all(count)?,
        }
        measured = processor_time() - before;
    }
    side.barrier()?;
    let (bytes, bad) =
        (side.found.bytes, side.found.bad(ring_exchange.size, ring_exchange.messages()));
    side.peer_watchdog.send(&Frame::Verified { bytes, bad, processor_time: measured })?;
    side.finish()
}

impl RingSide {
    fn new(
        side: ExchangeSide,
        ring_exchange: &RingExchange,
        writes: bool,
    ) -> Result<Self, Failure> {
        let ExchangeSide { endpoint, queue, peer, mut peer_watchdog, .. } = side;
        let domain = endpoint.domain().clone();
        let notify = match ring_exchange.notify {
            Some(notify) => notify,
            None => NotifyMode::best(domain.capabilities())?,
        };
        let mut port = Port::new(endpoint, queue);
        let (capacity, watermark) = (ring_exchange.capacity, ring_exchange.watermark);
        let options =
            RingOptions { capacity, watermark, notify, completed_messages: 0, inline_data: 0 };
        let receiver = port.offer(&options)?;
        peer_watchdog.send(&Frame::Ring(port.ring_offer(receiver)?))?;
        let frame = next_frame(&mut port, &mut peer_watchdog, "the other side's ring")?;
        let Frame::Ring(offer) = frame else { return Err(unexpected(frame)) };
        let (sender, answer) = port.accept(peer, &offer, ring_exchange.chunk)?;
        peer_watchdog.send(&Frame::Answer(answer))?;
        let frame = next_frame(&mut port, &mut peer_watchdog, "the other side's answer")?;
        let Frame::Answer(answer) = frame else { return Err(unexpected(frame)) };
        port.connect(receiver, peer, &answer)?;
        // A side that only reads has no send slots.
        let length = if writes { ring_exchange.source() as usize } else { 64 };
        let source = domain.register(HostMemory::zeroed(length)?, Access::WRITE)?;
        source.enable_for(port.endpoint())?;
        source.fill(0..length, 0x5a)?;
        Ok(Self {
            port,
            peer_watchdog,
            sender,
            receiver,
            source,
            ring_exchange: ring_exchange.clone(),
            sent: 0,
            read: 0,
            received: 0,
            found: StampCheck::default(),
        })
    }

    /// Waits until both sides have called it.
    fn barrier(&mut self) -> Result<(), Failure> {
        self.peer_watchdog.send(&Frame::Barrier)?;
        match self.next_frame("the barrier")? {
            Frame::Barrier => Ok(()),
            frame => Err(unexpected(frame)),
        }
    }

    fn next_frame(&mut self, what: &'static str) -> Result<Frame, Failure> {
        next_frame(&mut self.port, &mut self.peer_watchdog, what)
    }

    fn finish(self) -> Result<(), Failure> {
        self.peer_watchdog.end()?;
        self.port.close()?;
        crate::process::cancel_stall_alarm();
        Ok(())
    }

    /// False if nothing happened.
    #[inline(always)] // what polls is measured
    fn progress(&mut self) -> Result<bool, Failure> {
        progress(&mut self.port, &mut self.peer_watchdog)
    }

    /// Sends the next message, with its number at both ends.
    fn send(&mut self) -> Result<(), Failure> {
        self.peer_watchdog.waiting_for = "credit of the other side's ring";
        while self.sent - self.read >= self.ring_exchange.slots() {
            self.process_credits()?;
        }
        let at = (self.sent % self.ring_exchange.slots() * self.ring_exchange.stride()) as usize;
        let size = self.ring_exchange.size as usize;
        stamp(&self.source, at, size, self.sent)?;
        let payload = self.source.slice(at..at + size)?;
        let mut message = self.port.begin(self.sender, 0, self.ring_exchange.size)?;
        loop {
            match self.port.push(self.sender, &mut message, &payload)? {
                Pushed::Posted(_) if message.is_written() => break,
                Pushed::Written => break,
                Pushed::Posted(_) => {}
                Pushed::Blocked(_) | Pushed::Busy => self.process_credits()?,
            }
        }
        self.sent += 1;
        Ok(())
    }

    /// Processes credit.
    fn process_credits(&mut self) -> Result<(), Failure> {
        self.progress()?;
        while self.port.next_read(self.sender)?.is_some() {
            self.read += 1;
        }
        Ok(())
    }

    /// Receives the next message, and checks both its ends.
    #[inline]
    fn receive(&mut self) -> Result<(), Failure> {
        self.peer_watchdog.waiting_for = "the other side's message";
        let mut idle = 0;
        loop {
            while let Some(view) = self.port.take(self.receiver)? {
                let is_last = view.is_last();
                self.found.check_chunk(&view, self.ring_exchange.size, self.received)?;
                drop(view);
                if is_last {
                    self.received += 1;
                    return Ok(());
                }
                self.port.return_credit(self.receiver, false)?;
            }
            idle = if self.progress()? { 0 } else { idle + 1 };
            if idle % IDLE_TURNS == IDLE_TURNS - 1 {
                // The other side may wait for credit of what was read.
                self.port.return_credit(self.receiver, true)?;
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
            // After the message, which is not delayed.
            self.port.return_credit(self.receiver, false)?;
        }
        Ok(())
    }

    fn pong(&mut self, count: u64) -> Result<(), Failure> {
        for _ in 0..count {
            self.receive()?;
            self.send()?;
            self.port.return_credit(self.receiver, false)?;
        }
        Ok(())
    }

    fn stream(&mut self, count: u64, samples: &mut Vec<u64>) -> Result<(), Failure> {
        sampled(count, samples, || self.send())?;
        self.peer_watchdog.waiting_for = "the last messages to be read";
        while self.read < self.sent {
            self.process_credits()?;
        }
        Ok(())
    }

    fn receive_all(&mut self, count: u64) -> Result<(), Failure> {
        for _ in 0..count {
            self.receive()?;
            self.port.return_credit(self.receiver, false)?;
        }
        while self.port.return_credit(self.receiver, true)? {}
        Ok(())
    }
}

/// Drives the rings meanwhile: the other side may wait for credit.
fn next_frame(
    port: &mut Port,
    peer_watchdog: &mut PeerWatchdog,
    what: &'static str,
) -> Result<Frame, Failure> {
    peer_watchdog.waiting_for = what;
    loop {
        if let Some(frame) = peer_watchdog.receive()? {
            return Ok(frame);
        }
        for _ in 0..peer_watchdog.turns_per_poll() {
            if !progress(port, peer_watchdog)? {
                port.return_all_credit(true);
            }
        }
    }
}

/// False if nothing happened.
#[inline(always)] // what polls is measured
fn progress(port: &mut Port, peer_watchdog: &mut PeerWatchdog) -> Result<bool, Failure> {
    peer_watchdog.check_peer()?;
    let progress = match peer_watchdog.waiting {
        Wait::Poll => port.progress(),
        Wait::Default | Wait::Block => port.wait(SLEEP_SLICE),
    };
    match progress {
        Ok(PortEvent::Ring) => {
            peer_watchdog.record_progress();
            Ok(true)
        }
        Ok(PortEvent::Idle) if peer_watchdog.waiting == Wait::Poll => {
            port.pause();
            Ok(false)
        }
        Ok(PortEvent::Idle) => peer_watchdog.tick().map(|()| false),
        Ok(PortEvent::Other(Ok(_))) => Ok(true),
        Ok(PortEvent::Other(Err(failure))) => Err(peer_watchdog.failed(failure.error)),
        Err(error) => Err(peer_watchdog.failed(error)),
    }
}

/// Sends messages; a sample is the time of a few successive ones.
pub(super) fn sampled(
    count: u64,
    samples: &mut Vec<u64>,
    mut send: impl FnMut() -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut before = Instant::now();
    for number in 1..=count {
        send()?;
        if number % RingExchange::WINDOW == 0 {
            let after = Instant::now();
            samples.push((after - before).as_nanos() as u64 / RingExchange::WINDOW);
            before = after;
        }
    }
    samples.extend((before.elapsed().as_nanos() as u64).checked_div(count % RingExchange::WINDOW));
    Ok(())
}
