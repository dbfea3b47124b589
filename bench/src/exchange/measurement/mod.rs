//! Ping-pongs and streams, and what both need: memory with stamps, operations in flight, and
//! verification.
//!
//! Equal line by line to the exchange in `benches/raw/raw_fabric.c`, the C reference benchmark.

mod pingpong;
mod stream;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use fabric::{Completion, CompletionKind, MemoryRegion, RegionSlice, RemoteSlice};

use super::frame::Frame;
use super::peer_watchdog::unexpected;
use super::plan::{FabricExchange, Mode, Operation};
use super::{ExchangeSide, Measured, ProcessorTimes};
use command::exit::Failure;

/// Token of the eight-byte notices: end of the stream, and everything received.
const END_TOKEN: u64 = u64::MAX;

/// Layout of a side's memory: slots to send from, slots to receive into, and a page for notices.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    size: usize,
    slots: usize,
    /// Small slots do not share cache lines.
    stride: usize,
}

impl Layout {
    pub(crate) fn new(measure: &FabricExchange) -> Self {
        let stride = measure.size.next_multiple_of(64);
        Self { size: measure.size, slots: measure.slots, stride }
    }

    pub(crate) fn length(&self) -> usize {
        self.control() + 4096
    }

    fn transmit(&self, slot: usize) -> usize {
        slot * self.stride
    }

    fn receive(&self, slot: usize) -> usize {
        (self.slots + slot) * self.stride
    }

    fn control(&self) -> usize {
        2 * self.slots * self.stride
    }
}

/// A side's memory. The sender stamps both ends of a message with its sequence number before every
/// operation, and the receiver checks both; messages below 16 bytes consist of stamps.
#[derive(Debug)]
struct Payload {
    region: MemoryRegion,
    layout: Layout,
}

impl Payload {
    #[inline(always)] // measured: a call each otherwise
    fn load(&self, offset: usize) -> Result<u64, Failure> {
        if offset.is_multiple_of(8) {
            return Ok(u64::from_le(self.region.load_u64(offset)?));
        }
        let mut bytes = [0; 8];
        self.region.read(offset, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    #[inline(always)] // measured: a call each otherwise
    fn stamp(&self, offset: usize, sequence: u64) -> Result<(), Failure> {
        let size = self.layout.size;
        if size < 16 {
            self.region.fill(offset..offset + size, sequence as u8)?;
        } else {
            self.store(offset, sequence)?;
            self.store(offset + size - 8, sequence)?;
        }
        Ok(())
    }

    #[inline(always)] // measured: a call each otherwise
    fn store(&self, offset: usize, value: u64) -> Result<(), Failure> {
        if offset.is_multiple_of(8) {
            self.region.store_u64(offset, value.to_le())?;
        } else {
            self.region.write(offset, &value.to_le_bytes())?;
        }
        Ok(())
    }

    #[inline]
    fn stamp_outgoing(&self, slot: usize, sequence: u64) -> Result<(), Failure> {
        self.stamp(self.layout.transmit(slot), sequence)
    }

    #[inline]
    fn stamp_incoming(&self, slot: usize, sequence: u64) -> Result<(), Failure> {
        self.stamp(self.layout.receive(slot), sequence)
    }

    /// Is this message in the slot?
    #[inline(always)] // measured: a call each otherwise
    fn has(&self, slot: usize, sequence: u64) -> Result<bool, Failure> {
        let (offset, size) = (self.layout.receive(slot), self.layout.size);
        if size < 16 {
            let mut bytes = [0; 16];
            self.region.read(offset, &mut bytes[..size])?;
            return Ok(bytes[..size].iter().all(|byte| *byte == sequence as u8));
        }
        // The end first: once it has arrived, the rest has, too.
        Ok(self.load(offset + size - 8)? == sequence && self.load(offset)? == sequence)
    }

    /// Returns true if this message is in the slot, or a later one: in a stream the writer may be
    /// some windows ahead.
    fn has_or_later(&self, slot: usize, sequence: u64) -> Result<bool, Failure> {
        let (offset, size) = (self.layout.receive(slot), self.layout.size);
        if size < 16 {
            // One byte is not enough; the check at the end is.
            return Ok(true);
        }
        let fits = |stamp: u64| {
            stamp.checked_sub(sequence).is_some_and(|ahead| ahead.is_multiple_of(self.slots()))
        };
        Ok(fits(self.load(offset + size - 8)?) && fits(self.load(offset)?))
    }

    fn slots(&self) -> u64 {
        self.layout.slots as u64
    }

    /// Fills the send slots with patterns known to both sides, so that each can verify received
    /// data.
    fn fill(&self) -> Result<(), Failure> {
        let mut pattern = Vec::with_capacity(self.layout.size + 8);
        for slot in 0..self.layout.slots {
            pattern.clear();
            let mut value = slot as u64 + 1;
            while pattern.len() < self.layout.size {
                value = value
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                pattern.extend_from_slice(&value.to_le_bytes());
            }
            pattern.truncate(self.layout.size);
            self.region.write(self.layout.transmit(slot), &pattern)?;
        }
        Ok(())
    }

    /// Are all bytes between the stamps correct?
    fn body_is_intact(&self, slot: usize, pattern: usize) -> Result<bool, Failure> {
        let mut received = [0; 4096];
        let mut right = [0; 4096];
        let (mut at, end) = (8, self.layout.size.saturating_sub(8));
        while at < end {
            let length = (end - at).min(received.len());
            self.region.read(self.layout.receive(slot) + at, &mut received[..length])?;
            self.region.read(self.layout.transmit(pattern) + at, &mut right[..length])?;
            if received[..length] != right[..length] {
                return Ok(false);
            }
            at += length;
        }
        Ok(true)
    }
}

/// The stamp of the target's slots for reads; never 0, which the initiator writes before a read.
fn read_stamp(slot: usize) -> u64 {
    slot as u64 % 255 + 1
}

/// The initiator's side.
pub(crate) fn run(side: ExchangeSide, measure: &FabricExchange) -> Result<Measured, Failure> {
    let mut measurement = Measurement::new(side, measure)?;
    let (samples, elapsed) = match measure.mode {
        Mode::Lat => (pingpong::run(&mut measurement)?, 0),
        Mode::Bw => stream::run(&mut measurement)?,
    };
    let here = measurement.side.processor_timer.time;
    let Verdict { verified, peer_processor_time: peer } = measurement.check_and_finish()?;
    let processor_times = ProcessorTimes::new(here, peer);
    Ok(Measured { samples, elapsed, verified, processor_times })
}

/// The target's side.
pub(super) fn serve(side: ExchangeSide, measure: &FabricExchange) -> Result<(), Failure> {
    let mut measurement = Measurement::new(side, measure)?;
    for count in [measure.warmup, measure.iterations] {
        match measure.mode {
            _ if count == 0 => {}
            Mode::Lat => pingpong::answer(&mut measurement, count)?,
            Mode::Bw => stream::answer(&mut measurement, count)?,
        }
    }
    measurement.check_and_finish().map(drop)
}

/// What both sides found.
struct Verdict {
    verified: bool,
    peer_processor_time: Duration,
}

/// One side of a measurement.
#[derive(Debug)]
struct Measurement {
    side: ExchangeSide,
    measure: FabricExchange,
    payload: Payload,
    sent: u64,
    arrived: u64,
    bad: u64,
    immediate_sum: u64,
    outgoing: Vec<RegionSlice>,
    incoming: Vec<RegionSlice>,
    remote: Vec<RemoteSlice>,
    notice_out: RegionSlice,
    notice_in: RegionSlice,
    busy: Vec<bool>,
    // For each receive: the message it will get, and the last one it got.
    expected: Vec<u64>,
    taken: Vec<u64>,
    receives_posted: u64,
    /// Completed receives to post again.
    used: VecDeque<usize>,
    notice_busy: bool,
    notices: u64,
    notices_awaited: u64,
}

impl Measurement {
    fn new(side: ExchangeSide, measure: &FabricExchange) -> Result<Self, Failure> {
        let layout = Layout::new(measure);
        let slots = measure.slots;
        let region = &side.region;
        let local = |offset: usize, length| region.slice(offset..offset + length);
        let incoming: Result<_, _> =
            (0..slots).map(|slot| local(layout.receive(slot), measure.size)).collect();
        let outgoing: Result<_, _> =
            (0..slots).map(|slot| local(layout.transmit(slot), measure.size)).collect();
        // A read fetches what the other side would send.
        let remote = (0..slots).map(|slot| {
            let offset = match measure.operation {
                Operation::Read => layout.transmit(slot),
                _ => layout.receive(slot),
            } as u64;
            side.remote.slice(offset..offset + measure.size as u64)
        });
        let remote: Result<_, _> = remote.collect();
        let consumes = side.capabilities().immediates_consume_receives();
        let receives = match measure.operation {
            Operation::Send => slots,
            _ if consumes => 2 * slots + 16,
            _ => 0,
        };
        let payload = Payload { region: region.clone(), layout };
        payload.fill()?;
        if measure.operation == Operation::Read && !side.peer_watchdog.is_initiator() {
            for slot in 0..slots {
                payload.stamp_outgoing(slot, read_stamp(slot))?;
            }
        }
        let mut measurement = Self {
            notice_out: local(layout.control(), 8)?,
            notice_in: local(layout.control() + 64, 64)?,
            measure: measure.clone(),
            payload,
            sent: 0,
            arrived: 0,
            bad: 0,
            immediate_sum: 0,
            outgoing: outgoing?,
            incoming: incoming?,
            remote: remote?,
            busy: vec![false; slots],
            expected: vec![0; receives],
            taken: vec![0; receives],
            receives_posted: 0,
            used: VecDeque::with_capacity(receives),
            notice_busy: false,
            notices: 0,
            notices_awaited: 0,
            side,
        };
        let posts = measure.mode == Mode::Lat || !measurement.side.peer_watchdog.is_initiator();
        for slot in 0..if posts { receives } else { 0 } {
            measurement.post_receive(slot)?;
        }
        Ok(measurement)
    }

    fn is_busy(&self, slot: usize) -> bool {
        self.busy[slot]
    }

    /// Moves data and processes one completion, if there is one.
    #[inline]
    fn progress(&mut self) -> Result<(), Failure> {
        match self.side.turn()? {
            Some(completion) => self.record_completion(&completion),
            None => Ok(()),
        }
    }

    #[inline]
    fn record_completion(&mut self, completion: &Completion) -> Result<(), Failure> {
        let slot = completion.token as usize;
        match completion.kind {
            CompletionKind::RemoteWrite => {
                self.arrived += 1;
                let data = completion.data.unwrap_or(0);
                self.immediate_sum = self.immediate_sum.wrapping_add(data);
                if self.measure.mode == Mode::Lat {
                    // One at a time, in order.
                    self.bad += u64::from(data != self.arrived);
                } else {
                    let slot = (data.wrapping_sub(1) % self.payload.slots()) as usize;
                    let is_good = data != 0 && self.payload.has_or_later(slot, data)?;
                    self.bad += u64::from(!is_good);
                }
                if completion.operation.is_some() {
                    self.used.push_back(completion.token as usize);
                }
            }
            CompletionKind::Receive if completion.token == END_TOKEN => self.notices += 1,
            CompletionKind::Receive => {
                self.arrived += 1;
                let sequence = self.expected[slot];
                let is_good =
                    completion.length == self.measure.size && self.payload.has(slot, sequence)?;
                self.bad += u64::from(!is_good);
                self.taken[slot] = sequence;
                self.used.push_back(slot);
            }
            _ if completion.token == END_TOKEN => self.notice_busy = false,
            _ => self.busy[slot] = false,
        }
        Ok(())
    }

    /// Posts the operation of this slot. The immediate, if any, is the sequence number.
    #[inline]
    fn post(&mut self, slot: usize) -> Result<(), Failure> {
        self.busy[slot] = true;
        let ExchangeSide { endpoint, queue, peer, .. } = &mut self.side;
        let (local, remote, token) = (&self.outgoing[slot], &self.remote[slot], slot as u64);
        match self.measure.operation {
            Operation::WriteData => {
                endpoint.write_data(queue, *peer, local, remote, self.sent, token)?
            }
            Operation::Write => endpoint.write(queue, *peer, local, remote, token)?,
            Operation::Read => endpoint.read(queue, *peer, &self.incoming[slot], remote, token)?,
            Operation::Send => endpoint.send(queue, *peer, local, token)?,
        };
        Ok(())
    }

    /// The n-th posted receive gets the n-th message. Where immediates consume receives, the
    /// buffers stay empty.
    fn post_receive(&mut self, slot: usize) -> Result<(), Failure> {
        self.receives_posted += 1;
        self.expected[slot] = self.receives_posted;
        let ExchangeSide { endpoint, queue, .. } = &mut self.side;
        if self.measure.operation == Operation::Send {
            endpoint.receive(queue, &self.incoming[slot], slot as u64)?;
        } else {
            endpoint.receive_immediate(queue, slot as u64)?;
        }
        Ok(())
    }

    #[inline]
    fn post_used_receives(&mut self) -> Result<(), Failure> {
        while let Some(slot) = self.used.pop_front() {
            self.post_receive(slot)?;
        }
        Ok(())
    }

    /// Posts the receive of a notice, which is not measured.
    fn expect_notice(&mut self) -> Result<(), Failure> {
        let ExchangeSide { endpoint, queue, .. } = &mut self.side;
        endpoint.receive(queue, &self.notice_in, END_TOKEN)?;
        Ok(())
    }

    fn send_notice(&mut self) -> Result<(), Failure> {
        self.notice_busy = true;
        let ExchangeSide { endpoint, queue, peer, .. } = &mut self.side;
        endpoint.send(queue, *peer, &self.notice_out, END_TOKEN)?;
        self.side.peer_watchdog.waiting_for = "a notice to be sent";
        while self.notice_busy {
            self.progress()?;
        }
        Ok(())
    }

    fn await_notice(&mut self, what: &'static str) -> Result<(), Failure> {
        self.notices_awaited += 1;
        self.side.peer_watchdog.waiting_for = what;
        while self.notices < self.notices_awaited {
            self.progress()?;
        }
        Ok(())
    }

    /// Waits for the operations of all slots.
    fn drain(&mut self) -> Result<(), Failure> {
        self.side.peer_watchdog.waiting_for = "the last completions";
        while self.busy.iter().any(|busy| *busy) {
            self.progress()?;
        }
        Ok(())
    }

    /// Waits until both sides have called it. Drives the endpoint meanwhile, since the other side
    /// may need that: the target of reads stays here.
    fn barrier(&mut self) -> Result<(), Failure> {
        self.side.peer_watchdog.send(&Frame::Barrier)?;
        match self.next_frame("the other side to reach the barrier")? {
            Frame::Barrier => Ok(()),
            frame => Err(unexpected(frame)),
        }
    }

    fn next_frame(&mut self, what: &'static str) -> Result<Frame, Failure> {
        loop {
            self.side.peer_watchdog.waiting_for = what;
            if let Some(frame) = self.side.peer_watchdog.receive()? {
                return Ok(frame);
            }
            for _ in 0..self.side.peer_watchdog.turns_per_poll() {
                self.progress()?;
            }
        }
    }

    /// Everything before the clock starts.
    fn begin(&mut self) -> Result<(), Failure> {
        let awaits_notice = if self.side.peer_watchdog.is_initiator() {
            self.measure.operation != Operation::Read
        } else {
            self.measure.operation == Operation::Write
        };
        if self.measure.mode == Mode::Bw && awaits_notice {
            self.expect_notice()?;
        }
        self.barrier()?;
        if self.side.peer_watchdog.is_initiator() {
            // The target may leave the barrier a little later: not on the clock.
            let start = Instant::now();
            while start.elapsed() < Duration::from_millis(1) {
                self.progress()?;
            }
        }
        self.side.processor_timer.begin();
        Ok(())
    }

    /// Everything after the clock has stopped.
    fn end(&mut self) -> Result<(), Failure> {
        self.side.processor_timer.end();
        self.drain()?;
        self.barrier()
    }

    /// The highest sequence number so far of this slot; 0: none.
    fn last_of(&self, slot: usize) -> u64 {
        let (slot, slots) = (slot as u64, self.payload.slots());
        if self.sent > slot { slot + 1 + (self.sent - slot - 1) / slots * slots } else { 0 }
    }

    /// Verifies every byte of every receive slot, and combines the results of both sides. Ends the
    /// measurement.
    fn check_and_finish(mut self) -> Result<Verdict, Failure> {
        let (operation, mode) = (self.measure.operation, self.measure.mode);
        let has_received = match operation {
            Operation::Read => self.side.peer_watchdog.is_initiator(),
            _ => mode == Mode::Lat || !self.side.peer_watchdog.is_initiator(),
        };
        let used = self.measure.slots.min(usize::try_from(self.sent).unwrap_or(usize::MAX));
        for slot in 0..if has_received { used } else { 0 } {
            let expected = match operation {
                Operation::Read => read_stamp(slot),
                Operation::Send => self.taken[slot],
                Operation::Write | Operation::WriteData => self.last_of(slot),
            };
            let pattern = match operation {
                Operation::Send => (expected.wrapping_sub(1) % self.payload.slots()) as usize,
                _ => slot,
            };
            self.bad += u64::from(!self.payload.has(slot, expected)?);
            self.bad += u64::from(!self.payload.body_is_intact(slot, pattern)?);
        }
        if has_received && operation == Operation::WriteData && mode == Mode::Bw {
            let sum = u128::from(self.sent) * u128::from(self.sent + 1) / 2;
            self.bad += u64::from(u128::from(self.immediate_sum) != sum);
        }
        // Neither side ends before the other is here.
        let (bad, processor_time) = (self.bad, self.side.processor_timer.time);
        self.side.peer_watchdog.send(&Frame::Verified { bytes: 0, bad, processor_time })?;
        let frame = self.next_frame("the other side's result")?;
        let Frame::Verified { bad: remote_bad, processor_time: peer_processor_time, .. } = frame
        else {
            return Err(unexpected(frame));
        };
        if self.bad + remote_bad > 0 && self.side.peer_watchdog.is_initiator() {
            eprintln!(
                "fabricast: {} checks failed at the initiator, {remote_bad} at the target",
                self.bad
            );
        }
        self.side.finish()?;
        Ok(Verdict { verified: bad == 0 && remote_bad == 0, peer_processor_time })
    }
}

#[cfg(test)]
mod tests {
    use fabric::{Access, Domain, EndpointKind, HostMemory, Query};

    use super::*;

    fn payload(size: usize, slots: usize) -> Payload {
        let layout = Layout { size, slots, stride: size.next_multiple_of(64) };
        let offer = Query::new(EndpointKind::Rdm).first().unwrap();
        let domain = Domain::open(&offer).unwrap();
        let memory = HostMemory::zeroed(layout.length()).unwrap();
        let region = domain.register(memory, Access::LOCAL).unwrap();
        let payload = Payload { region, layout };
        payload.fill().unwrap();
        payload
    }

    /// Copies a message, as the fabric would.
    fn deliver(payload: &Payload, slot: usize) {
        let mut bytes = vec![0; payload.layout.size];
        payload.region.read(payload.layout.transmit(slot), &mut bytes).unwrap();
        payload.region.write(payload.layout.receive(slot), &bytes).unwrap();
    }

    #[test]
    fn received_messages_are_recognised() {
        for size in [1, 8, 15, 16, 17, 64, 4096, 10_001] {
            let payload = payload(size, 3);
            assert!(!payload.has(1, 7).unwrap(), "{size}");
            payload.stamp_outgoing(1, 7).unwrap();
            deliver(&payload, 1);
            assert!(payload.has(1, 7).unwrap(), "{size}");
            assert!(!payload.has(1, 8).unwrap(), "{size}");
            assert!(payload.body_is_intact(1, 1).unwrap(), "{size}");
            assert!(payload.has_or_later(1, 4).unwrap(), "{size}");
            if size >= 16 {
                assert!(!payload.has_or_later(1, 5).unwrap(), "{size}");
                assert!(!payload.has_or_later(1, 10).unwrap(), "{size}");
            }
        }
    }

    #[test]
    fn wrong_byte_at_any_offset_is_found() {
        let size = 9000;
        let payload = payload(size, 2);
        payload.stamp_outgoing(0, 3).unwrap();
        deliver(&payload, 0);
        for at in [0, 7, 8, 4103, 4104, size - 9, size - 8, size - 1] {
            let offset = payload.layout.receive(0) + at;
            let mut byte = [0];
            payload.region.read(offset, &mut byte).unwrap();
            payload.region.write(offset, &[byte[0] ^ 1]).unwrap();
            let is_good = payload.has(0, 3).unwrap() && payload.body_is_intact(0, 0).unwrap();
            assert!(!is_good, "byte {at}");
            payload.region.write(offset, &byte).unwrap();
        }
        assert!(!payload.body_is_intact(0, 1).unwrap(), "the patterns differ");
    }
}
