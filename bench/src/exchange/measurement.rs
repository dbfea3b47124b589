//! What ping-pongs and streams have in common: the memory and its stamps, the
//! operations in flight, and the check of every byte.
//!
//! Line by line the same exchange as `benches/raw/raw_fabric.c`, which is what
//! this is compared with.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use fabric::{Completion, CompletionKind, MemoryRegion, RegionSlice, RemoteSlice};

use super::frame::Frame;
use super::peer_watchdog::unexpected;
use super::plan::{FabricExchange, Mode, Operation};
use super::side::ExchangeSide;
use command::exit::Failure;

/// The token of the eight bytes that say "that was all" and "I have it all".
const END_TOKEN: u64 = u64::MAX;

/// Where things lie in a side's memory: slots to send from, slots to receive
/// into, and a page for the rest.
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

/// A side's memory and what is in it. The sender stamps both ends of a message
/// with its sequence number before every operation, and the receiver looks at
/// both; messages below 16 bytes are stamped all over.
#[derive(Debug)]
pub(crate) struct Payload {
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
    pub(crate) fn stamp_outgoing(&self, slot: usize, sequence: u64) -> Result<(), Failure> {
        self.stamp(self.layout.transmit(slot), sequence)
    }

    #[inline]
    pub(crate) fn stamp_incoming(&self, slot: usize, sequence: u64) -> Result<(), Failure> {
        self.stamp(self.layout.receive(slot), sequence)
    }

    /// Is this message in the slot?
    #[inline(always)] // measured: a call each otherwise
    pub(crate) fn has(&self, slot: usize, sequence: u64) -> Result<bool, Failure> {
        let (offset, size) = (self.layout.receive(slot), self.layout.size);
        if size < 16 {
            let mut bytes = [0; 16];
            self.region.read(offset, &mut bytes[..size])?;
            return Ok(bytes[..size].iter().all(|byte| *byte == sequence as u8));
        }
        // The end first: what comes last says that the rest is there.
        Ok(self.load(offset + size - 8)? == sequence && self.load(offset)? == sequence)
    }

    /// In a stream the writer may be some windows ahead, so that the slot may
    /// hold a later message by now.
    fn has_or_later(&self, slot: usize, sequence: u64) -> Result<bool, Failure> {
        let (offset, size) = (self.layout.receive(slot), self.layout.size);
        if size < 16 {
            // One byte cannot tell; the check at the end does.
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

    /// Both sides hold the same patterns in their slots to send from, so that
    /// each can check what it was sent.
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

    /// Every byte between the stamps.
    fn body_is_intact(&self, slot: usize, pattern: usize) -> Result<bool, Failure> {
        let mut left = [0; 4096];
        let mut right = [0; 4096];
        let (mut at, end) = (8, self.layout.size.saturating_sub(8));
        while at < end {
            let length = (end - at).min(left.len());
            self.region.read(self.layout.receive(slot) + at, &mut left[..length])?;
            self.region.read(self.layout.transmit(pattern) + at, &mut right[..length])?;
            if left[..length] != right[..length] {
                return Ok(false);
            }
            at += length;
        }
        Ok(true)
    }
}

/// What the target's slots hold for reads; never 0, to which the reader sets its
/// own before.
pub(crate) fn read_stamp(slot: usize) -> u64 {
    slot as u64 % 255 + 1
}

/// One side of a measurement.
#[derive(Debug)]
pub(crate) struct Measurement {
    pub(crate) side: ExchangeSide,
    pub(crate) measure: FabricExchange,
    pub(crate) payload: Payload,
    pub(crate) sent: u64,
    pub(crate) arrived: u64,
    pub(crate) bad: u64,
    immediate_sum: u64,
    outgoing: Vec<RegionSlice>,
    incoming: Vec<RegionSlice>,
    there: Vec<RemoteSlice>,
    notice_out: RegionSlice,
    notice_in: RegionSlice,
    busy: Vec<bool>,
    /// Of each receive: the message it will be given, and the last it was.
    expected: Vec<u64>,
    taken: Vec<u64>,
    receives_posted: u64,
    /// Receives that were taken and want posting again.
    used: VecDeque<usize>,
    notice_busy: bool,
    notices: u64,
    notices_awaited: u64,
}

impl Measurement {
    pub(crate) fn new(side: ExchangeSide, measure: &FabricExchange) -> Result<Self, Failure> {
        let layout = Layout::new(measure);
        let slots = measure.slots;
        let region = &side.region;
        let local = |offset: usize, length| region.slice(offset..offset + length);
        let incoming: Result<_, _> =
            (0..slots).map(|slot| local(layout.receive(slot), measure.size)).collect();
        let outgoing: Result<_, _> =
            (0..slots).map(|slot| local(layout.transmit(slot), measure.size)).collect();
        // A read fetches what the other side would send.
        let there = (0..slots).map(|slot| {
            let offset = match measure.operation {
                Operation::Read => layout.transmit(slot),
                _ => layout.receive(slot),
            } as u64;
            side.remote.slice(offset..offset + measure.size as u64)
        });
        let there: Result<_, _> = there.collect();
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
            there: there?,
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

    pub(crate) fn is_busy(&self, slot: usize) -> bool {
        self.busy[slot]
    }

    /// Moves data and takes note of one completion, if there is one.
    #[inline]
    pub(crate) fn progress(&mut self) -> Result<(), Failure> {
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

    /// Posts the operation of this slot. The immediate, where there is one, is
    /// the sequence number.
    #[inline]
    pub(crate) fn post(&mut self, slot: usize) -> Result<(), Failure> {
        self.busy[slot] = true;
        let ExchangeSide { endpoint, queue, peer, .. } = &mut self.side;
        let (here, there, token) = (&self.outgoing[slot], &self.there[slot], slot as u64);
        match self.measure.operation {
            Operation::WriteData => {
                endpoint.write_data(queue, *peer, here, there, self.sent, token)?
            }
            Operation::Write => endpoint.write(queue, *peer, here, there, token)?,
            Operation::Read => endpoint.read(queue, *peer, &self.incoming[slot], there, token)?,
            Operation::Send => endpoint.send(queue, *peer, here, token)?,
        };
        Ok(())
    }

    /// The n-th receive that is posted takes the n-th message. Where immediates
    /// use receives up, nothing is put into them.
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
    pub(crate) fn post_used_receives(&mut self) -> Result<(), Failure> {
        while let Some(slot) = self.used.pop_front() {
            self.post_receive(slot)?;
        }
        Ok(())
    }

    /// Gets ready for a notice, which is a message outside of what is measured.
    fn expect_notice(&mut self) -> Result<(), Failure> {
        let ExchangeSide { endpoint, queue, .. } = &mut self.side;
        endpoint.receive(queue, &self.notice_in, END_TOKEN)?;
        Ok(())
    }

    pub(crate) fn send_notice(&mut self) -> Result<(), Failure> {
        self.notice_busy = true;
        let ExchangeSide { endpoint, queue, peer, .. } = &mut self.side;
        endpoint.send(queue, *peer, &self.notice_out, END_TOKEN)?;
        self.side.peer_watchdog.waiting_for = "a notice to leave";
        while self.notice_busy {
            self.progress()?;
        }
        Ok(())
    }

    pub(crate) fn await_notice(&mut self, what: &'static str) -> Result<(), Failure> {
        self.notices_awaited += 1;
        self.side.peer_watchdog.waiting_for = what;
        while self.notices < self.notices_awaited {
            self.progress()?;
        }
        Ok(())
    }

    /// Waits for the operations of all slots.
    pub(crate) fn drain(&mut self) -> Result<(), Failure> {
        self.side.peer_watchdog.waiting_for = "the last completions";
        while self.busy.iter().any(|busy| *busy) {
            self.progress()?;
        }
        Ok(())
    }

    /// Both sides have come here. Each keeps driving its endpoint meanwhile, as
    /// the other may still need that: the target of reads spends its life here.
    fn barrier(&mut self) -> Result<(), Failure> {
        self.side.peer_watchdog.send(&Frame::Barrier)?;
        match self.next_frame("the other side to come to the same point")? {
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

    /// What comes before the clock starts.
    pub(crate) fn begin(&mut self) -> Result<(), Failure> {
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
            // The target may leave the meeting a little later: not on our clock.
            let start = Instant::now();
            while start.elapsed() < Duration::from_millis(1) {
                self.progress()?;
            }
        }
        Ok(())
    }

    /// What comes after the clock has stopped.
    pub(crate) fn end(&mut self) -> Result<(), Failure> {
        self.drain()?;
        self.barrier()
    }

    /// The highest sequence number so far that went to this slot; 0: none.
    pub(crate) fn last_of(&self, slot: usize) -> u64 {
        let (slot, slots) = (slot as u64, self.payload.slots());
        if self.sent > slot { slot + 1 + (self.sent - slot - 1) / slots * slots } else { 0 }
    }

    /// Every byte of every slot that was received into, and what both sides
    /// found together. Ends the measurement.
    pub(crate) fn check_and_finish(mut self) -> Result<bool, Failure> {
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
        // Neither goes before the other has come here.
        self.side.peer_watchdog.send(&Frame::Verified { bytes: 0, bad: self.bad })?;
        let there = match self.next_frame("the other side's verdict")? {
            Frame::Verified { bad, .. } => bad,
            frame => return Err(unexpected(frame)),
        };
        if self.bad + there > 0 && self.side.peer_watchdog.is_initiator() {
            eprintln!(
                "fabricast: {} checks failed at the initiator, {there} at the target",
                self.bad
            );
        }
        self.side.finish()?;
        Ok(self.bad == 0 && there == 0)
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

    /// What the fabric would do.
    fn deliver(payload: &Payload, slot: usize) {
        let mut bytes = vec![0; payload.layout.size];
        payload.region.read(payload.layout.transmit(slot), &mut bytes).unwrap();
        payload.region.write(payload.layout.receive(slot), &bytes).unwrap();
    }

    #[test]
    fn what_arrives_is_recognised() {
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
    fn one_wrong_byte_is_found_wherever_it_is() {
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
