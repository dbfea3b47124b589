//! Topics sent between nodes in simulated time.

mod device_ring_probes;
mod endpoints;
mod lanes;
mod simulation;
mod stalls;

use std::sync::Arc;

use fabric::ring::ChunkHeader;
use proptest::prelude::*;
use testkit::cases::cases;

use self::endpoints::{SimSink, SimSource, header_of};
use self::simulation::{
    SimChunk, SimInboundState, SimLane, SimPayload, SimRingInput, SimTransport, Speeds,
    transfer_time,
};
use super::{MessageHeader, NodeId, OutboundOptions, TurnFailure};
use crate::replication::inbound::Inbound;
use crate::replication::message_header::{MAX_PREFIX_LENGTH, RingMessageKind};
use crate::replication::outbound::{Outbound, RingForm};
use crate::replication::probe::RingProbe;

const MIB: u64 = 1 << 20;
const SPEEDS: Speeds = Speeds { out: 10_000, wire: 4_000, into: 8_000, latency: 2_000 };
const OPTIONS: OutboundOptions =
    OutboundOptions { piece: MIB, slots: 8, max_retained: None, timeout: u64::MAX };

fn bytes_of(position: u64, length: usize) -> Vec<u8> {
    testkit::bytes::pattern(length, position)
}

fn messages(lengths: &[usize], is_device: bool) -> Vec<(u64, SimPayload)> {
    let of = |(position, length): (u64, &usize)| {
        (position, SimPayload::new(bytes_of(position, *length), is_device))
    };
    (0..).zip(lengths).map(of).collect()
}

/// A reading node.
struct Reader {
    node: NodeId,
    inbound: Inbound<SimChunk, SimPayload, u64>,
    intake: SimInboundState,
    sink: SimSink,
    ring: Option<usize>,
    /// The next ring lies in device memory, and is probed if true.
    on_device: Option<bool>,
    /// Why the probe of its ring failed.
    failed_probe: Option<String>,
    /// The reader has no turns.
    is_stuck: bool,
}

/// A writer and its readers.
struct Simulation {
    wire: SimTransport,
    source: SimSource,
    outbound: Outbound<SimTransport>,
    readers: Vec<Reader>,
    ring: (u64, u64),
    options: OutboundOptions,
    /// Disconnected nodes.
    lost: Vec<NodeId>,
    may_lose: bool,
}

impl Simulation {
    fn new(source: SimSource, readers: usize, ring: (u64, u64), speeds: Speeds) -> Self {
        let reader = |number: usize| Reader {
            node: NodeId([number as u8; 16]),
            inbound: Inbound::new(0, 1 << 30, u64::MAX),
            intake: SimInboundState::default(),
            sink: SimSink::default(),
            ring: None,
            on_device: None,
            failed_probe: None,
            is_stuck: false,
        };
        let mut sim = Self {
            wire: SimTransport::new(speeds),
            source,
            outbound: Outbound::new(OPTIONS),
            readers: (0..readers).map(reader).collect(),
            ring,
            options: OPTIONS,
            lost: Vec::new(),
            may_lose: false,
        };
        for number in 0..readers {
            sim.connect(number);
        }
        sim
    }

    fn with(mut self, options: OutboundOptions) -> Self {
        self.options = options;
        self.outbound.close(&mut self.wire);
        self.outbound = Outbound::new(options);
        for number in 0..self.readers.len() {
            self.connect(number);
        }
        self
    }

    fn connect(&mut self, number: usize) {
        let reader = &mut self.readers[number];
        let (ring, form) = match reader.on_device {
            None => (self.wire.open(self.ring.0, self.ring.1), RingForm::Host),
            Some(is_probed) => {
                let seed = self.wire.rings.len() as u64;
                let probe = is_probed.then(|| RingProbe::new(seed, self.ring.0));
                let ring = self.wire.open_on_device(self.ring, probe.as_ref());
                reader.inbound.expect_probe(probe);
                (ring, RingForm::Device { probe })
            }
        };
        reader.ring = Some(ring);
        let from = reader.inbound.expected();
        self.outbound.connect(reader.node, (ring, form), from, &mut self.wire);
    }

    /// The connection breaks: both sides detect it, and reconnect.
    fn break_ring(&mut self, number: usize) {
        let reader = &mut self.readers[number];
        if let Some(ring) = reader.ring.take() {
            self.wire.sever(ring);
        }
        self.outbound.disconnect(reader.node, &mut self.wire);
        reader.inbound.disconnect();
        self.drain(number);
        self.connect(number);
    }

    /// Closes the endpoint, and opens another one.
    fn renew(&mut self) {
        for number in 0..self.readers.len() {
            let reader = &mut self.readers[number];
            if let Some(ring) = reader.ring.take() {
                self.wire.sever(ring);
            }
            self.outbound.disconnect(reader.node, &mut self.wire);
            reader.inbound.disconnect();
            self.drain(number);
        }
        self.outbound.forget_rings();
        (0..self.readers.len()).for_each(|number| self.connect(number));
    }

    /// Waits for copies in progress.
    fn drain(&mut self, number: usize) {
        loop {
            let reader = &mut self.readers[number];
            let (intake, wire, ring) = (&mut reader.intake, &mut self.wire, None);
            let mut reading = SimRingInput { intake, wire, ring };
            if reader.inbound.drain(&mut reading, &mut reader.sink) {
                break;
            }
            self.wire.now = self.wire.next_event().expect("a copy in progress has an end");
        }
    }

    /// Kills a reader; the next one continues after its published messages.
    fn kill_reader(&mut self, number: usize) {
        self.break_ring(number);
        let reader = &mut self.readers[number];
        let expected = reader.inbound.expected();
        let last = reader.sink.published.lock().unwrap().last().map(|(header, _)| header.position);
        assert_eq!(expected, last.map_or(0, |last| last + 1));
        reader.inbound = Inbound::new(expected, 1 << 30, u64::MAX);
        if let Some(ring) = reader.ring.take() {
            self.wire.sever(ring);
        }
        self.outbound.disconnect(reader.node, &mut self.wire);
        self.connect(number);
    }

    /// Kills the writer; the next one continues with unreleased messages.
    fn kill_writer(&mut self) {
        for number in 0..self.readers.len() {
            if let Some(ring) = self.readers[number].ring.take() {
                self.wire.sever(ring);
            }
            self.readers[number].inbound.disconnect();
            self.drain(number);
        }
        self.source = self.source.restarted();
        self.outbound.close(&mut self.wire);
        self.outbound = Outbound::new(self.options);
        for number in 0..self.readers.len() {
            self.connect(number);
        }
    }

    /// Gives the writer and all readers a turn. False if nothing happened.
    fn turn(&mut self) -> bool {
        let mut has_moved = self.wire.deliver_due(false);
        let now = self.wire.clock();
        let progress = self.outbound.advance(now, &mut self.source, &mut self.wire).unwrap();
        has_moved |= progress.has_moved;
        let mut is_waiting = progress.is_waiting;
        while let Some((node, error)) = self.outbound.next_disconnected() {
            assert!(self.may_lose, "{node}: {error}");
            self.lost.push(node);
        }
        let mut failed_probes = Vec::new();
        for (number, reader) in self.readers.iter_mut().enumerate() {
            if reader.is_stuck {
                continue;
            }
            let (intake, wire, ring) = (&mut reader.intake, &mut self.wire, reader.ring);
            let mut reading = SimRingInput { intake, wire, ring };
            match reader.inbound.advance(now, &mut reading, &mut reader.sink) {
                Ok(progress) => {
                    has_moved |= progress.has_moved;
                    is_waiting |= progress.is_waiting;
                }
                Err(TurnFailure::Probe(cause)) => {
                    (reader.on_device, reader.failed_probe) = (None, Some(cause));
                    failed_probes.push(number);
                }
                Err(failure) => panic!("{failure:?}"),
            }
        }
        has_moved |= !failed_probes.is_empty();
        for number in failed_probes {
            self.break_ring(number);
        }
        if !has_moved {
            has_moved = self.wire.deliver_due(true);
        }
        if is_waiting {
            self.wire.schedule_poll();
        }
        has_moved
    }

    /// Runs until no event is left. Returns the time of the last progress.
    fn run(&mut self) -> u64 {
        let mut last = self.wire.now;
        for _ in 0..2_000_000 {
            if self.turn() {
                last = self.wire.now;
                continue;
            }
            match self.wire.next_event() {
                Some(event) => self.wire.now = event,
                None => return last,
            }
        }
        panic!("the simulation does not end");
    }

    /// Runs this number of steps.
    fn run_for(&mut self, steps: usize) {
        for _ in 0..steps {
            if !self.turn() {
                match self.wire.next_event() {
                    Some(event) => self.wire.now = event,
                    None => return,
                }
            }
        }
    }

    fn check(&self, number: usize) {
        let published = self.readers[number].sink.published.lock().unwrap();
        let positions: Vec<_> = published.iter().map(|(header, _)| header.position).collect();
        let wanted: Vec<_> = self.source.messages.iter().map(|(position, _)| *position).collect();
        assert_eq!(positions, wanted, "reader {number}");
        for (header, bytes) in published.iter() {
            let wanted = header_of(header.position, bytes.len() as u64);
            assert_eq!(MessageHeader { posted: 0, ..*header }, wanted);
            assert!(*bytes == bytes_of(header.position, bytes.len()), "{}", header.position);
        }
    }

    fn released(&self) -> Option<u64> {
        *self.source.released.lock().unwrap()
    }
}

#[test]
fn stages_overlap() {
    // Each stage is the slowest once.
    let speeds = [
        SPEEDS,
        Speeds { out: 3_000, ..SPEEDS },
        Speeds { into: 3_000, ..SPEEDS },
        Speeds { out: 4_000, wire: 4_000, into: 4_000, ..SPEEDS },
    ];
    for speeds in speeds {
        let pieces = 64;
        let source = SimSource::new(messages(&[(pieces * MIB) as usize], true));
        let mut sim = Simulation::new(source, 1, (8 * MIB, MIB), speeds);
        sim.readers[0].sink.is_device = true;
        let took = sim.run();
        sim.check(0);
        let stages = [speeds.out, speeds.wire, speeds.into].map(|rate| transfer_time(MIB, rate));
        let slowest = stages.iter().max().unwrap() * pieces;
        let filling = stages.iter().sum::<u64>() + 4 * speeds.latency;
        let bound = (slowest + filling) * 102 / 100;
        assert!(took <= bound, "{took} ns, where {bound} are enough ({speeds:?})");
        let measured = sim.readers[0].sink.stages[0];
        assert!(measured.copy_out >= pieces * transfer_time(MIB, speeds.out), "{measured:?}");
        assert!(measured.copy_in >= (pieces - 1) * transfer_time(MIB, speeds.into), "{measured:?}");
        // Most pieces were copied in before the last one arrived.
        assert!((1..measured.copy_in / 2).contains(&measured.after_arrival), "{measured:?}");
    }
}

#[test]
fn pieces_are_staged_once_for_all_nodes() {
    let source = SimSource::new(messages(&[20 * MIB as usize, 5_000_000], true));
    let mut sim = Simulation::new(source, 4, (8 * MIB, MIB), SPEEDS);
    sim.run();
    (0..4).for_each(|number| sim.check(number));
    assert_eq!(sim.wire.pieces_copied, 25, "each piece is copied once");
    assert_eq!(sim.released(), Some(1));
    let counters = sim.outbound.counters();
    assert!(counters.iter().all(|(_, counted)| counted.delivered == 2), "{counters:?}");
}

#[test]
fn slow_node_does_not_block_others() {
    let lengths: Vec<usize> = (0..20).map(|_| 3 * MIB as usize + 17).collect();
    let source = SimSource::new(messages(&lengths, true));
    let mut sim = Simulation::new(source, 3, (4 * MIB, MIB), SPEEDS);
    sim.readers[1].is_stuck = true;
    sim.wire.rings[2].rate /= 8;
    sim.run();
    sim.check(0);
    sim.check(2);
    assert_eq!(sim.released(), None, "node 1 has no message yet");
    assert!(sim.readers[1].sink.published.lock().unwrap().is_empty());
    sim.readers[1].is_stuck = false;
    sim.run();
    sim.check(1);
    assert_eq!(sim.released(), Some(19));
}

#[test]
fn one_slot_suffices_for_many_destinations() {
    // One slot for destinations at different positions.
    let lengths: Vec<usize> = (0..6).map(|_| 3 * MIB as usize + 17).collect();
    let source = SimSource::new(messages(&lengths, true));
    let sim = Simulation::new(source, 3, (4 * MIB, MIB), SPEEDS);
    let mut sim = sim.with(OutboundOptions { slots: 1, ..OPTIONS });
    sim.wire.rings.iter_mut().zip([1, 3, 7, 1, 3, 7]).for_each(|(ring, by)| ring.rate /= by);
    sim.run();
    (0..3).for_each(|number| sim.check(number));
}

#[test]
fn messages_are_longer_than_the_ring_and_its_chunks() {
    for is_device in [false, true] {
        let lengths = [0, 1, 4096, 4097, 70_000, 300_000, 64, 0, 64, 1_000_000];
        let source = SimSource::new(messages(&lengths, is_device));
        let mut sim = Simulation::new(source, 2, (64 << 10, 16 << 10), SPEEDS);
        sim.readers[1].sink.is_device = true;
        sim.run();
        sim.check(0);
        sim.check(1);
        assert_eq!(sim.released(), Some(9));
    }
}

#[test]
fn small_messages_are_batched() {
    let source = SimSource::new(messages(&[64; 1000], false));
    let mut sim = Simulation::new(source, 1, (MIB, 64 << 10), SPEEDS);
    sim.run();
    sim.check(0);
    let (_, counted) = sim.outbound.counters()[0];
    assert_eq!(counted.delivered, 1000);
    assert!(counted.batches < 100, "{counted:?}");
}

#[test]
fn sink_without_capacity_is_retried() {
    let lengths = [64, 5, 100_000, 64, 64, 200_000];
    let source = SimSource::new(messages(&lengths, false));
    let mut sim = Simulation::new(source, 1, (64 << 10, 16 << 10), SPEEDS);
    sim.readers[0].sink.refusals = (3, 4);
    sim.run();
    sim.check(0);
    let counted = sim.readers[0].inbound.counters();
    assert!(counted.waited_for_memory > 0 && counted.waited_for_queue > 0);
    let stages = sim.readers[0].sink.stages.clone();
    assert!(stages.iter().all(|stages| stages.after_copy > 0), "{stages:?}");
}

#[test]
fn unpublished_messages_are_not_acknowledged() {
    let source = SimSource::new(messages(&[64, 64], false));
    let mut sim = Simulation::new(source, 1, (64 << 10, 16 << 10), SPEEDS);
    sim.readers[0].sink.refusals = (0, u32::MAX);
    sim.run_for(2000);
    assert_eq!(sim.released(), None);
    sim.readers[0].sink.refusals = (0, 0);
    sim.run();
    assert_eq!(sim.released(), Some(1));
}

#[test]
fn lagging_node_misses_the_oldest_messages() {
    let source = SimSource::new(messages(&[10_000; 200], false));
    let sim = Simulation::new(source, 2, (64 << 10, 16 << 10), SPEEDS);
    let mut sim = sim.with(OutboundOptions { max_retained: Some(10), ..OPTIONS });
    sim.readers[1].is_stuck = true;
    sim.run();
    // It does not block the other node.
    sim.check(0);
    let missed = |sim: &Simulation| sim.outbound.counters()[1].1.missed;
    // Messages that were written already cannot be missed.
    let before = missed(&sim);
    sim.readers[1].is_stuck = false;
    sim.run();
    sim.check(0);
    let published = sim.readers[1].sink.published.lock().unwrap().len() as u64;
    assert_eq!(published + missed(&sim), 200, "{before}");
    let positions: Vec<_> = sim.readers[1].sink.published.lock().unwrap().clone();
    assert!(positions.windows(2).all(|pair| pair[0].0.position < pair[1].0.position));
}

#[test]
fn broken_ring_releases_all_buffers_and_slots() {
    let source = SimSource::new(messages(&[3 * MIB as usize, 64, 2 * MIB as usize], true));
    let mut sim = Simulation::new(source, 2, (4 * MIB, MIB), SPEEDS);
    sim.run_for(15);
    sim.break_ring(0);
    sim.run_for(15);
    sim.outbound.remove(NodeId([1; 16]), &mut sim.wire);
    sim.readers[1].is_stuck = true;
    sim.run();
    sim.check(0);
    assert_eq!(sim.released(), Some(2), "a removed node is not waited for");
}

#[test]
fn removed_node_reads_no_overwritten_payload() {
    for steps in 1..60 {
        let lengths = [70_000, 64, 9000, 100_000, 5000, 64, 64, 40_000];
        let source = SimSource::new(messages(&lengths, false));
        let mut sim = Simulation::new(source, 2, (256 << 10, 32 << 10), SPEEDS);
        sim.run_for(steps);
        sim.outbound.remove(NodeId([1; 16]), &mut sim.wire);
        sim.run();
        sim.check(0);
        let published = sim.readers[1].sink.published.lock().unwrap();
        for (number, (header, bytes)) in (0..).zip(published.iter()) {
            assert_eq!(header.position, number);
            assert!(*bytes == bytes_of(number, bytes.len()), "{number} after {steps} steps");
        }
    }
}

#[derive(Debug, Clone)]
enum SimulatedFailure {
    Break(usize),
    KillReader(usize),
    KillWriter,
}

fn failure() -> impl Strategy<Value = (usize, SimulatedFailure)> {
    let failure = prop_oneof![
        (0_usize..3).prop_map(SimulatedFailure::Break),
        (0_usize..3).prop_map(SimulatedFailure::KillReader),
        Just(SimulatedFailure::KillWriter),
    ];
    (1_usize..60, failure)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(48), ..ProptestConfig::default() })]

    #[test]
    fn messages_arrive_once_in_order_despite_failures(
        lengths in proptest::collection::vec(
            prop_oneof![4 => 0_usize..200, 2 => 3000_usize..9000, 1 => 20_000_usize..150_000],
            1..40,
        ),
        devices in any::<u64>(),
        readers in 1_usize..4,
        sinks in any::<[bool; 3]>(),
        refusals in (0_u32..3, 0_u32..3),
        piece in 3000_u64..40_000,
        slots in 1_usize..5,
        failures in proptest::collection::vec(failure(), 0..8),
    ) {
        let mut source = messages(&lengths, false);
        for (number, (_, payload)) in source.iter_mut().enumerate() {
            payload.is_device = devices >> (number % 64) & 1 == 1;
        }
        let source = SimSource::new(source);
        let sim = Simulation::new(source, readers, (64 << 10, 16 << 10), SPEEDS);
        let mut sim = sim.with(OutboundOptions { piece, slots, ..OPTIONS });
        sim.wire.all_slots = 3;
        for (reader, is_device) in sim.readers.iter_mut().zip(sinks) {
            reader.sink.is_device = is_device;
            reader.sink.refusals = refusals;
        }
        for (steps, failure) in failures {
            sim.run_for(steps);
            match failure {
                SimulatedFailure::Break(number) => sim.break_ring(number % readers),
                SimulatedFailure::KillReader(number) => sim.kill_reader(number % readers),
                SimulatedFailure::KillWriter => sim.kill_writer(),
            }
        }
        sim.run();
        for number in 0..readers {
            sim.check(number);
        }
        prop_assert_eq!(sim.released(), Some(lengths.len() as u64 - 1));
    }

    #[test]
    fn no_chunk_makes_a_reader_panic(
        chunks in proptest::collection::vec(
            (0_u32..3, any::<bool>(), 0_u64..3, proptest::collection::vec(any::<u8>(), 0..400)),
            1..6,
        ),
        forge in any::<bool>(),
    ) {
        let mut intake = SimInboundState::default();
        for (topic, is_last, offset, mut bytes) in chunks {
            if forge {
                let header = header_of(bytes.len() as u64, offset * 10);
                let mut prefix = [0; MAX_PREFIX_LENGTH];
                let length = header.encode(topic == 2, &mut prefix);
                bytes.splice(0..0, prefix[..length].iter().copied());
            }
            let whole = bytes.len() as u64 + offset * 10;
            let header = ring_header(topic % 3, offset * 400, whole.max(offset * 400), bytes.len());
            intake.forged.push(SimChunk::forged(header, is_last, bytes));
        }
        let mut wire = SimTransport::new(SPEEDS);
        let mut inbound = Inbound::new(0, 1000, u64::MAX);
        let mut sink = SimSink::default();
        let now = wire.clock();
        let mut reading = SimRingInput { intake: &mut intake, wire: &mut wire, ring: None };
        let _ = inbound.advance(now, &mut reading, &mut sink);
    }
}

fn ring_header(topic: u32, offset: u64, length: u64, payload: usize) -> ChunkHeader {
    ChunkHeader {
        epoch: 1,
        position: 0,
        sequence: 0,
        message: 0,
        length,
        offset,
        payload: payload as u32,
        topic,
    }
}

/// The result of reading one ring message with these changes.
fn hostile(
    form: RingMessageKind,
    header: &MessageHeader,
    change: impl FnOnce(&mut ChunkHeader, &mut Vec<u8>),
) -> String {
    let mut prefix = [0; MAX_PREFIX_LENGTH];
    let length = header.encode(false, &mut prefix);
    let mut bytes = prefix[..length].to_vec();
    let whole = match form {
        RingMessageKind::Batch => {
            bytes.resize(header.batch_length(), 0);
            bytes.len() as u64
        }
        RingMessageKind::Long => length as u64 + header.length,
        other => panic!("{other:?} has tests of its own"),
    };
    let mut ring = ring_header(form.number(), 0, whole, bytes.len());
    change(&mut ring, &mut bytes);
    ring.payload = bytes.len() as u32;
    let is_last = form == RingMessageKind::Batch && ring.length == bytes.len() as u64;
    let mut intake = SimInboundState::default();
    intake.forged.push(SimChunk::forged(ring, is_last, bytes));
    let mut wire = SimTransport::new(SPEEDS);
    let mut inbound = Inbound::new(3, 1000, u64::MAX);
    let mut sink = SimSink::default();
    let now = wire.clock();
    let mut reading = SimRingInput { intake: &mut intake, wire: &mut wire, ring: None };
    match inbound.advance(now, &mut reading, &mut sink) {
        Err(TurnFailure::Connection(error)) => error.to_string(),
        Err(failure) => panic!("{failure:?}"),
        Ok(_) => format!("{} published", sink.published.lock().unwrap().len()),
    }
}

#[test]
fn hostile_chunks_are_refused() {
    let good = header_of(5, 100);
    let nothing = |_: &mut ChunkHeader, _: &mut Vec<u8>| {};
    assert_eq!(hostile(RingMessageKind::Batch, &good, nothing), "1 published");
    assert_eq!(hostile(RingMessageKind::Long, &good, nothing), "0 published");
    let old = header_of(2, 100);
    assert_eq!(hostile(RingMessageKind::Batch, &old, nothing), "0 published", "it is a duplicate");
    let long = header_of(5, 1001);
    for form in [RingMessageKind::Batch, RingMessageKind::Long] {
        assert!(hostile(form, &long, nothing).contains("longer than the topic"));
        assert!(hostile(form, &good, |ring, _| ring.topic = 7).contains("unknown kind"));
        let cut = hostile(form, &good, |_, bytes| bytes.truncate(30));
        assert!(cut.contains("several chunks") || cut.contains("truncated"), "{cut}");
        assert!(hostile(form, &good, |_, bytes| bytes[0] = 0).contains("not a message header"));
    }
    let twice = |ring: &mut ChunkHeader, bytes: &mut Vec<u8>| {
        bytes.extend(bytes.clone());
        ring.length = bytes.len() as u64;
    };
    assert!(hostile(RingMessageKind::Batch, &good, twice).contains("does not follow the last"));
    let more = |ring: &mut ChunkHeader, _: &mut Vec<u8>| ring.length += 1;
    assert!(hostile(RingMessageKind::Long, &good, more).contains("length differs"));
    assert!(
        hostile(RingMessageKind::Batch, &good, |ring, _| ring.offset = 8)
            .contains("several chunks")
    );
    assert!(hostile(RingMessageKind::Long, &header_of(5, 0), nothing).contains("length differs"));
    let beyond = |ring: &mut ChunkHeader, bytes: &mut Vec<u8>| {
        bytes.truncate(bytes.len() - 50);
        ring.length = bytes.len() as u64;
    };
    assert!(hostile(RingMessageKind::Batch, &good, beyond).contains("beyond its batch"));
}

#[test]
fn restarted_source_continues_after_released_messages() {
    let source = SimSource::new(messages(&[64; 10], false));
    *source.released.lock().unwrap() = Some(3);
    let restarted = source.restarted();
    assert_eq!(restarted.next, 4);
    assert!(Arc::ptr_eq(&restarted.messages, &source.messages));
}
