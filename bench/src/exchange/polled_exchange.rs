//! Messages through memory that the reader polls and zeroes: the first design of the ring in RGAPS,
//! to compare with.
//!
//! A chunk takes one slot of the reader's memory: its size, its payload, and a done flag at the end
//! of the slot. The writer writes size and payload, then the flag, and sends no notice. The reader
//! polls the flag, zeroes what it has read, and writes the number of released slots into the
//! writer's memory, which the writer polls.

use std::time::{Duration, Instant};

use fabric::{Capabilities, Order};

use super::frame::Frame;
use super::peer_watchdog::unexpected;
use super::plan::{Mode, RingExchange};
use super::ring_exchange::{RingResult, sampled};
use super::stamps::{is_stamped, stamp};
use super::{ExchangeSide, Measured, ProcessorTimes};
use crate::process::processor_time;
use command::exit::{Exit, Failure};

/// Bytes of a size, a flag, or a number of slots.
const WORD: usize = 8;
/// Writes in flight, at most.
const MAX_IN_FLIGHT: usize = 512;

/// Layout of a side's memory: slots to write from, slots for the other side to write, and the
/// numbers of slots that were released there and here. Both sides have the same.
#[derive(Debug, Clone, Copy)]
pub(super) struct SlotLayout {
    slots: u64,
    stride: usize,
    /// Bytes of payload in a slot, at most.
    payload: usize,
}

impl SlotLayout {
    /// Fails if the provider does not keep the order of writes.
    pub(super) fn new(
        exchange: &RingExchange,
        capabilities: &Capabilities,
    ) -> Result<Self, Failure> {
        let guarantees = &capabilities.order;
        let order = guarantees.send_order & guarantees.receive_order;
        let longest = guarantees.max_ordered_write.min(capabilities.max_message_size);
        if !order.contains(Order::WRITE_AFTER_WRITE) || longest <= WORD {
            let provider = &capabilities.provider;
            let why = format!("{provider} does not keep the order of writes: no memory is polled");
            return Err(Failure::new(Exit::NoProvider, why));
        }
        let payload = (longest - WORD).min(exchange.size.min(exchange.chunk) as usize);
        let stride = (2 * WORD + payload).next_multiple_of(64);
        let slots = (exchange.capacity / stride as u64).max(1);
        Ok(Self { slots, stride, payload })
    }

    pub(super) fn length(&self) -> usize {
        self.released_here() + 64
    }

    /// Bytes of all slots in one direction.
    fn all_slots(&self) -> usize {
        self.slots as usize * self.stride
    }

    /// Offset of the slot for a chunk, among those in one direction.
    fn slot(&self, chunk: u64) -> usize {
        (chunk % self.slots) as usize * self.stride
    }

    fn flag(&self, slot: usize) -> usize {
        slot + self.stride - WORD
    }

    fn released_there(&self) -> usize {
        2 * self.all_slots()
    }

    fn released_here(&self) -> usize {
        self.released_there() + 64
    }
}

/// One side of the exchange.
struct PolledSide {
    side: ExchangeSide,
    layout: SlotLayout,
    /// Bytes of a message.
    size: usize,
    /// Chunks read between two credits.
    credit_interval: u64,
    written: u64,
    /// Chunks of them that the other side is known to have released.
    released: u64,
    read: u64,
    /// Chunks of them that the other side has credit for.
    credited: u64,
    /// Credits that were found, and how long they were awaited.
    credits: u64,
    blocked: Duration,
    bytes: u64,
    /// Chunks with wrong contents.
    bad: u64,
}

/// What both sides found.
struct Verdict {
    verified: bool,
    peer_processor_time: Duration,
}

/// The initiator's side.
pub(crate) fn run(side: ExchangeSide, exchange: &RingExchange) -> Result<RingResult, Failure> {
    let mut side = PolledSide::new(side, exchange)?;
    let mut samples = exchange.sample_buffer()?;
    let (mut elapsed, mut here) = (0, Duration::ZERO);
    for count in [exchange.warmup, exchange.iterations] {
        side.barrier()?;
        samples.clear();
        (side.credits, side.blocked) = (0, Duration::ZERO);
        let (start, processor_time_before) = (Instant::now(), processor_time());
        match exchange.mode {
            Mode::Lat => side.ping(count, &mut samples)?,
            Mode::Bw => side.stream(count, &mut samples)?,
        }
        elapsed = start.elapsed().as_nanos() as u64;
        here = processor_time() - processor_time_before;
    }
    let (credits, blocked) = (side.credits, side.blocked);
    let Verdict { verified, peer_processor_time: peer } = side.check_and_finish(exchange, here)?;
    let processor_times = ProcessorTimes::new(here, peer);
    let measured = Measured { samples, elapsed, verified, processor_times };
    Ok(RingResult { measured, notify: "poll", credits, blocked })
}

/// The target's side.
pub(super) fn serve(side: ExchangeSide, exchange: &RingExchange) -> Result<(), Failure> {
    let mut side = PolledSide::new(side, exchange)?;
    let mut measured = Duration::ZERO;
    for count in [exchange.warmup, exchange.iterations] {
        side.barrier()?;
        let before = processor_time();
        for _ in 0..count {
            side.receive()?;
            if exchange.mode == Mode::Lat {
                side.send()?;
            }
        }
        side.return_credit()?;
        measured = processor_time() - before;
    }
    side.check_and_finish(exchange, measured).map(drop)
}

impl PolledSide {
    fn new(side: ExchangeSide, exchange: &RingExchange) -> Result<Self, Failure> {
        let layout = SlotLayout::new(exchange, side.capabilities())?;
        for chunk in 0..layout.slots {
            side.region.store_u64(layout.flag(layout.slot(chunk)), 1)?;
        }
        Ok(Self {
            side,
            layout,
            size: exchange.size as usize,
            credit_interval: (exchange.watermark / layout.stride as u64).clamp(1, layout.slots),
            written: 0,
            released: 0,
            read: 0,
            credited: 0,
            credits: 0,
            blocked: Duration::ZERO,
            bytes: 0,
            bad: 0,
        })
    }

    fn ping(&mut self, count: u64, samples: &mut Vec<u64>) -> Result<(), Failure> {
        let mut before = Instant::now();
        for _ in 0..count {
            self.send()?;
            self.receive()?;
            let after = Instant::now();
            samples.push((after - before).as_nanos() as u64);
            before = after;
        }
        Ok(())
    }

    fn stream(&mut self, count: u64, samples: &mut Vec<u64>) -> Result<(), Failure> {
        sampled(count, samples, || self.send())?;
        self.await_released(self.written)
    }

    /// Sends a message.
    fn send(&mut self) -> Result<(), Failure> {
        let SlotLayout { slots, payload, .. } = self.layout;
        for from in (0..self.size).step_by(payload) {
            let size = payload.min(self.size - from);
            self.await_released((self.written + 1).saturating_sub(slots))?;
            let slot = self.layout.slot(self.written);
            self.written += 1;
            let region = &self.side.region;
            region.store_u64(slot, size as u64)?;
            stamp(region, slot + WORD, size, self.written)?;
            let target = self.layout.all_slots();
            self.write(slot, WORD + size, target + slot)?;
            let flag = self.layout.flag(slot);
            self.write(flag, WORD, target + flag)?;
        }
        Ok(())
    }

    /// Waits until the other side has released this many chunks.
    fn await_released(&mut self, chunks: u64) -> Result<(), Failure> {
        if self.released >= chunks {
            return Ok(());
        }
        let start = Instant::now();
        self.side.peer_watchdog.waiting_for = "the other side to release chunks";
        while self.released < chunks {
            self.side.turn()?;
            let found = self.side.region.load_u64(self.layout.released_there())?;
            // A number of which only some bytes have arrived is never too large.
            if found > self.released {
                self.released = found;
                self.credits += 1;
            }
        }
        self.blocked += start.elapsed();
        Ok(())
    }

    /// Receives a message, checks and zeroes it.
    fn receive(&mut self) -> Result<(), Failure> {
        self.side.peer_watchdog.waiting_for = "the other side's message";
        for from in (0..self.size).step_by(self.layout.payload) {
            let size = self.layout.payload.min(self.size - from);
            let slot = self.layout.all_slots() + self.layout.slot(self.read);
            let flag = self.layout.flag(slot);
            while self.side.region.load_u64(flag)? == 0 {
                self.side.turn()?;
            }
            self.read += 1;
            let region = &self.side.region;
            let is_good = region.load_u64(slot)? == size as u64
                && is_stamped(region, slot + WORD, size, self.read)?;
            region.fill(slot..slot + WORD + size, 0)?;
            region.store_u64(flag, 0)?;
            self.bytes += size as u64;
            self.bad += u64::from(!is_good);
            if self.read - self.credited >= self.credit_interval {
                self.return_credit()?;
            }
        }
        Ok(())
    }

    /// Tells the other side how many chunks are released.
    fn return_credit(&mut self) -> Result<(), Failure> {
        self.credited = self.read;
        let from = self.layout.released_here();
        self.side.region.store_u64(from, self.read)?;
        self.write(from, WORD, self.layout.released_there())
    }

    /// Writes bytes of this side's memory to an offset of the other's.
    fn write(&mut self, from: usize, length: usize, to: usize) -> Result<(), Failure> {
        let ExchangeSide { endpoint, queue, peer, region, remote, .. } = &mut self.side;
        let local = region.slice(from..from + length)?;
        let target = remote.slice(to as u64..(to + length) as u64)?;
        endpoint.write(queue, *peer, &local, &target, 0)?;
        while self.side.queue.in_flight() > MAX_IN_FLIGHT {
            self.side.turn()?;
        }
        Ok(())
    }

    /// Waits until both sides have called it.
    fn barrier(&mut self) -> Result<(), Failure> {
        self.side.peer_watchdog.send(&Frame::Barrier)?;
        match self.next_frame("the barrier")? {
            Frame::Barrier => Ok(()),
            frame => Err(unexpected(frame)),
        }
    }

    fn next_frame(&mut self, what: &'static str) -> Result<Frame, Failure> {
        self.side.peer_watchdog.waiting_for = what;
        loop {
            if let Some(frame) = self.side.peer_watchdog.receive()? {
                return Ok(frame);
            }
            for _ in 0..self.side.peer_watchdog.turns_per_poll() {
                self.side.turn()?;
            }
        }
    }

    /// Checks that every slot was zeroed, and combines the results of both sides. Ends the
    /// exchange.
    fn check_and_finish(
        mut self,
        exchange: &RingExchange,
        processor_time: Duration,
    ) -> Result<Verdict, Failure> {
        self.side.peer_watchdog.waiting_for = "the last completions";
        while self.side.queue.in_flight() > 0 {
            self.side.turn()?;
        }
        self.barrier()?;
        let all_slots = self.layout.all_slots();
        for at in (all_slots..2 * all_slots).step_by(WORD) {
            self.bad += u64::from(self.side.region.load_u64(at)? != 0);
        }
        let (bytes, bad) = (self.bytes, self.bad);
        self.side.peer_watchdog.send(&Frame::Verified { bytes, bad, processor_time })?;
        let frame = self.next_frame("what the other side found")?;
        let Frame::Verified { bytes: bytes_there, bad: bad_there, processor_time } = frame else {
            return Err(unexpected(frame));
        };
        self.side.finish()?;
        let directions = if exchange.mode == Mode::Lat { 2 } else { 1 };
        let verified = bad + bad_there == 0 && bytes + bytes_there == directions * exchange.bytes();
        Ok(Verdict { verified, peer_processor_time: processor_time })
    }
}
