//! A ring in the target's memory that the initiator writes into, for show: a
//! position that only grows, wrapping by address arithmetic, immediates as
//! notices, and credit for what the reader is done with.

use std::time::{Duration, Instant};

use fabric::{Completion, CompletionKind};
use serde::{Deserialize, Serialize};

use super::frame::Frame;
use super::percentile::Percentiles;
use super::station::Station;
use super::vigil::unexpected;
use command::exit::Failure;

/// Bytes of the ring.
pub(crate) const CAPACITY: usize = 16 << 20;
/// The large messages, and the unit of credit.
pub(crate) const LARGE: usize = 1 << 20;
/// The small messages.
pub(crate) const SMALL: usize = 64;
/// Large messages that fit the ring.
pub(crate) const SLOTS: usize = CAPACITY / LARGE;

/// Every message is a piece of this, each from another place.
const PATTERN: usize = 2 * LARGE;
/// Where the target writes how much it is done with.
const CREDIT: usize = CAPACITY + PATTERN;
/// Bytes of each side's memory.
pub(crate) const LENGTH: usize = CREDIT + 4096;
/// Credit goes back when this much was read since the last time, and at the end.
const WATERMARK: u64 = CAPACITY as u64 / 4;
/// Receives that are posted where immediates use them up.
const RECEIVES: u64 = 64;

/// What happens next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Round {
    /// Small messages, each answered by one.
    PingPong { count: u64 },
    /// Large messages, as fast as credit allows. All bytes are compared, or only
    /// the ends of each message.
    Stream { count: u64, every_byte: bool },
    /// Nothing more.
    End,
}

/// What came of a demonstration.
#[derive(Debug)]
pub(crate) struct Shown {
    /// One way, in microseconds.
    pub(crate) latency: Percentiles,
    pub(crate) round_trips: usize,
    pub(crate) gb_per_s: f64,
    /// The same while the reader compares every byte.
    pub(crate) checked_gb_per_s: f64,
    /// Bytes that were compared, on both sides.
    pub(crate) checked: u64,
    /// Messages that were not what they had to be.
    pub(crate) bad: u64,
    pub(crate) wraps: u64,
}

/// One side of the ring.
#[derive(Debug)]
struct Ring {
    station: Station,
    /// Where the next message goes, or is to be found.
    tail: u64,
    /// Up to where the reader has made room, as far as is known here.
    credit: u64,
    sequence: u64,
    arrived: u64,
    last_immediate: u64,
    in_flight: u64,
    checked: u64,
    bad: u64,
}

/// The initiator's side. Each of the three parts takes about this long.
pub(crate) fn run(station: Station, time: Duration) -> Result<Shown, Failure> {
    let mut ring = Ring::new(station)?;
    ring.ping_pong(200)?;
    let mut samples = Vec::new();
    let end = Instant::now() + time;
    while Instant::now() < end && samples.len() < 1_000_000 {
        samples.extend(ring.ping_pong(1000)?);
    }
    let mut rates = [0.0; 2];
    for (rate, every_byte) in rates.iter_mut().zip([false, true]) {
        let (mut bytes, mut elapsed) = (0, Duration::ZERO);
        while elapsed < time {
            let count = 8 * SLOTS as u64;
            elapsed += ring.stream(count, every_byte)?;
            bytes += count * LARGE as u64;
        }
        *rate = bytes as f64 / elapsed.as_nanos() as f64;
    }
    let there = ring.tell(Round::End)?;
    let Frame::Checked { bytes, bad } = there else {
        return Err(unexpected(there));
    };
    let latency = Percentiles::of(&mut samples)
        .ok_or_else(|| Failure::failed("no time was left for a single round trip"))?;
    let shown = Shown {
        latency: latency.scaled(0.5e-3),
        round_trips: samples.len(),
        gb_per_s: rates[0],
        checked_gb_per_s: rates[1],
        checked: ring.checked + bytes,
        bad: ring.bad + bad,
        wraps: ring.tail / CAPACITY as u64,
    };
    ring.station.finish()?;
    Ok(shown)
}

/// The target's side.
pub(crate) fn serve(station: Station) -> Result<(), Failure> {
    let mut ring = Ring::new(station)?;
    loop {
        match ring.next_frame("the next round")? {
            Frame::Round(Round::PingPong { count }) => {
                ring.station.send(&Frame::Meet)?;
                ring.answer(count)?;
            }
            Frame::Round(Round::Stream { count, every_byte }) => {
                ring.station.send(&Frame::Meet)?;
                ring.drink(count, every_byte)?;
            }
            Frame::Round(Round::End) => break,
            frame => return Err(unexpected(frame)),
        }
    }
    ring.station.send(&Frame::Checked { bytes: ring.checked, bad: ring.bad })?;
    ring.station.finish()
}

/// Where in the pattern a message comes from: never the same place for messages
/// that follow each other in one slot.
fn source_of(sequence: u64) -> usize {
    (sequence.wrapping_mul(7919 * 8) % (PATTERN - LARGE) as u64) as usize
}

impl Ring {
    fn new(mut station: Station) -> Result<Self, Failure> {
        let mut value = 1_u64;
        let words = (0..PATTERN / 8).flat_map(|_| {
            value = value
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            value.to_le_bytes()
        });
        let pattern: Vec<u8> = words.collect();
        station.region.write(CAPACITY, &pattern)?;
        if station.capabilities().immediates_consume_receives() {
            for token in 0..RECEIVES {
                station.endpoint.receive_notice(&mut station.queue, token)?;
            }
        }
        Ok(Self {
            station,
            tail: 0,
            credit: CAPACITY as u64,
            sequence: 0,
            arrived: 0,
            last_immediate: 0,
            in_flight: 0,
            checked: 0,
            bad: 0,
        })
    }

    /// The position of the next message of this length, and where that is.
    fn advance(&mut self, length: usize) -> (u64, usize) {
        // The capacity is a multiple of every length, so that this is contiguous.
        let position = self.tail.next_multiple_of(length as u64);
        self.tail = position + length as u64;
        self.sequence += 1;
        (position, (position % CAPACITY as u64) as usize)
    }

    fn progress(&mut self) -> Result<(), Failure> {
        let Some(completion) = self.station.turn()? else {
            return Ok(());
        };
        let Completion { kind, data, operation, token, .. } = completion;
        if kind == CompletionKind::RemoteWrite {
            self.arrived += 1;
            self.last_immediate = data.unwrap_or(0);
            if operation.is_some() {
                let Station { endpoint, queue, .. } = &mut self.station;
                endpoint.receive_notice(queue, token)?;
            }
        } else {
            self.in_flight -= 1;
        }
        Ok(())
    }

    /// The immediate of the current message; the narrowest have 32 bits.
    fn notice(&self) -> u64 {
        self.sequence & u64::from(u32::MAX)
    }

    /// Writes the current message into the other side's ring.
    fn write(&mut self, offset: usize, length: usize) -> Result<(), Failure> {
        let source = CAPACITY + source_of(self.sequence);
        let notice = self.notice();
        let Station { endpoint, queue, peer, region, remote, .. } = &mut self.station;
        let from = region.slice(source..source + length)?;
        let to = remote.slice(offset as u64..(offset + length) as u64)?;
        endpoint.write_data(queue, *peer, &from, &to, notice, self.sequence)?;
        self.in_flight += 1;
        Ok(())
    }

    /// Is the current message in this place?
    fn check(&mut self, offset: usize, length: usize, every_byte: bool) -> Result<(), Failure> {
        let source = CAPACITY + source_of(self.sequence);
        let mut is_good = self.last_immediate == self.notice();
        let mut compare = |at: usize, length: usize| -> Result<(), Failure> {
            let (mut here, mut there) = ([0; 4096], [0; 4096]);
            self.station.region.read(offset + at, &mut here[..length])?;
            self.station.region.read(source + at, &mut there[..length])?;
            is_good &= here[..length] == there[..length];
            self.checked += length as u64;
            Ok(())
        };
        if every_byte {
            for at in (0..length).step_by(4096) {
                compare(at, 4096.min(length - at))?;
            }
        } else {
            compare(0, 8)?;
            compare(length - 8, 8)?;
        }
        self.bad += u64::from(!is_good);
        Ok(())
    }

    fn await_arrival(&mut self, count: u64, what: &'static str) -> Result<(), Failure> {
        self.station.vigil.waiting_for = what;
        while self.arrived < count {
            self.progress()?;
        }
        Ok(())
    }

    fn drain(&mut self) -> Result<(), Failure> {
        self.station.vigil.waiting_for = "the last completions";
        while self.in_flight > 0 {
            self.progress()?;
        }
        Ok(())
    }

    fn next_frame(&mut self, what: &'static str) -> Result<Frame, Failure> {
        loop {
            self.station.vigil.waiting_for = what;
            if let Some(frame) = self.station.receive()? {
                return Ok(frame);
            }
            for _ in 0..self.station.turns_per_look() {
                self.progress()?;
            }
        }
    }

    /// Announces a round; returns what the target says to it.
    fn tell(&mut self, round: Round) -> Result<Frame, Failure> {
        self.arrived = 0;
        self.station.send(&Frame::Round(round))?;
        self.next_frame("the target to be ready")
    }

    fn announce(&mut self, round: Round) -> Result<(), Failure> {
        match self.tell(round)? {
            Frame::Meet => Ok(()),
            frame => Err(unexpected(frame)),
        }
    }

    /// Nanoseconds of each round trip.
    fn ping_pong(&mut self, count: u64) -> Result<Vec<u64>, Failure> {
        let mut samples = Vec::with_capacity(count as usize);
        self.announce(Round::PingPong { count })?;
        let mut before = Instant::now();
        for turn in 1..=count {
            let (_, offset) = self.advance(SMALL);
            self.write(offset, SMALL)?;
            self.await_arrival(turn, "the answer")?;
            self.check(offset, SMALL, true)?;
            self.drain()?;
            let after = Instant::now();
            samples.push((after - before).as_nanos() as u64);
            before = after;
        }
        // Each was read before the next was written.
        self.credit = self.tail + CAPACITY as u64;
        Ok(samples)
    }

    fn answer(&mut self, count: u64) -> Result<(), Failure> {
        self.arrived = 0;
        for turn in 1..=count {
            let (_, offset) = self.advance(SMALL);
            self.await_arrival(turn, "a small message")?;
            self.check(offset, SMALL, true)?;
            self.write(offset, SMALL)?;
            self.drain()?;
        }
        Ok(())
    }

    fn stream(&mut self, count: u64, every_byte: bool) -> Result<Duration, Failure> {
        self.announce(Round::Stream { count, every_byte })?;
        let start = Instant::now();
        for _ in 0..count {
            let (position, offset) = self.advance(LARGE);
            self.await_credit(position + LARGE as u64)?;
            self.write(offset, LARGE)?;
        }
        // All of it was read when there is room for a whole ring again.
        self.await_credit(self.tail + CAPACITY as u64)?;
        let elapsed = start.elapsed();
        self.drain()?;
        Ok(elapsed)
    }

    /// Waits until the reader has made room up to this position.
    fn await_credit(&mut self, position: u64) -> Result<(), Failure> {
        self.station.vigil.waiting_for = "credit";
        while self.credit < position {
            let arrived = self.arrived;
            self.progress()?;
            if self.arrived != arrived {
                self.credit = self.last_immediate * LARGE as u64 + CAPACITY as u64;
            }
        }
        Ok(())
    }

    fn drink(&mut self, count: u64, every_byte: bool) -> Result<(), Failure> {
        self.arrived = 0;
        let mut released = 0;
        for turn in 1..=count {
            let (_, offset) = self.advance(LARGE);
            self.await_arrival(turn, "a large message")?;
            self.check(offset, LARGE, every_byte)?;
            released += LARGE as u64;
            if released >= WATERMARK || turn == count {
                self.give_credit()?;
                released = 0;
            }
        }
        self.drain()
    }

    /// Everything up to the tail was read. The immediate says so, since it also
    /// wakes a writer that sleeps; the bytes it comes with are only there because
    /// a write needs some.
    fn give_credit(&mut self) -> Result<(), Failure> {
        let granules = self.tail / LARGE as u64;
        let Station { endpoint, queue, peer, region, remote, .. } = &mut self.station;
        region.store_u64(CREDIT, self.tail)?;
        let from = region.slice(CREDIT..CREDIT + 8)?;
        let to = remote.slice(CREDIT as u64..CREDIT as u64 + 8)?;
        endpoint.write_data(queue, *peer, &from, &to, granules, self.sequence)?;
        self.in_flight += 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_from_inside_the_pattern_and_differ() {
        for sequence in (0..10_000).chain([u64::MAX - 1, u64::MAX]) {
            let source = source_of(sequence);
            assert!(source + LARGE <= PATTERN && source.is_multiple_of(8));
            assert_ne!(source, source_of(sequence.wrapping_add(1)));
            assert_ne!(source, source_of(sequence.wrapping_add(SLOTS as u64)));
        }
    }

    #[test]
    fn every_message_is_contiguous() {
        assert!(CAPACITY.is_multiple_of(LARGE) && CAPACITY.is_multiple_of(SMALL));
        assert!(CREDIT.is_multiple_of(8) && LENGTH > CREDIT);
    }
}
