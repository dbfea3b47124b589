//! Rings of several lanes: of different speeds, with random delays, and lost lanes.

use super::*;

impl Simulation {
    /// Reopens all rings with these lanes.
    fn over(mut self, lanes: &[SimLane]) -> Self {
        self.wire.lanes = lanes.to_vec();
        let options = self.options;
        self.with(options)
    }

    /// A reader's ring loses a lane; the writer gets the error. The reader detects it after
    /// `steps`.
    fn lose_lane(&mut self, number: usize, lane: usize, steps: usize) {
        let Some(ring) = self.readers[number].ring else { return };
        self.wire.lose_lane(ring, lane);
        self.run_for(steps);
        self.break_ring(number);
    }
}

#[test]
fn throughput_of_lanes_adds_up() {
    let speeds = Speeds { out: 30_000, wire: 3_000, into: 30_000, ..SPEEDS };
    let pieces = 64;
    let run = |lanes: &[SimLane]| {
        let source = SimSource::new(messages(&[(pieces * MIB) as usize], true));
        let sim = Simulation::new(source, 1, (16 * MIB, MIB), speeds);
        let mut sim = sim.with(OutboundOptions { slots: 16, ..OPTIONS }).over(lanes);
        sim.readers[0].sink.is_device = true;
        let took = sim.run();
        sim.check(0);
        took
    };
    let one = run(&[SimLane::new(1, 0)]);
    let four = run(&[SimLane::new(1, 0); 4]);
    assert!(four <= one * 27 / 100, "{four} ns by four, {one} by one");
    // Three delayed lanes and one much slower lane exceed three lanes.
    let uneven = [(1, 40_000), (1, 40_000), (4, 100_000), (1, 0)].map(|(s, l)| SimLane::new(s, l));
    let uneven = run(&uneven);
    assert!(uneven <= one * 36 / 100, "{uneven} ns by three and a slow one, {one} by one");
}

/// Beginning and polling a copy take microseconds each: completions would wait for many of them.
#[test]
fn device_copies_are_polled_one_and_begun_few_per_turn() {
    let source = SimSource::new(messages(&[(64 * MIB) as usize, (8 * MIB) as usize], true));
    let sim = Simulation::new(source, 1, (16 * MIB, MIB), SPEEDS);
    let mut sim = sim.with(OutboundOptions { slots: 48, ..OPTIONS });
    let mut begun_most = 0;
    loop {
        let (begun, vain) = (sim.wire.pieces_copied, sim.wire.vain_polls);
        let has_moved = sim.turn();
        begun_most = begun_most.max(sim.wire.pieces_copied - begun);
        assert!(sim.wire.vain_polls - vain <= 1);
        if !has_moved {
            match sim.wire.next_event() {
                Some(event) => sim.wire.now = event,
                None => break,
            }
        }
    }
    sim.check(0);
    assert_eq!(begun_most, 8);
}

#[test]
fn one_lane_and_two_deliver_the_same_messages() {
    let lengths = [0, 1, 4096, 4097, 70_000, 300_000, 64, 0, 64, 1_000_000, 999_999];
    let run = |lanes: &[SimLane], is_device| {
        let source = SimSource::new(messages(&lengths, is_device));
        let mut sim = Simulation::new(source, 1, (64 << 10, 16 << 10), SPEEDS).over(lanes);
        sim.run();
        sim.check(0);
        assert_eq!(sim.released(), Some(10));
        let published = sim.readers[0].sink.published.lock().unwrap().clone();
        let plain = |(header, bytes)| (MessageHeader { posted: 0, ..header }, bytes);
        published.into_iter().map(plain).collect::<Vec<_>>()
    };
    for is_device in [false, true] {
        let one = run(&[SimLane::new(1, 0)], is_device);
        let two = run(&[SimLane::new(3, 20_000), SimLane::new(1, 90_000)], is_device);
        assert!(one == two);
    }
}

#[test]
fn lost_lane_loses_no_message() {
    for steps in 1..25 {
        for after in [0, 5, 30] {
            let lengths = [400_000, 64, 150_001, 64, 300_000];
            let source = SimSource::new(messages(&lengths, steps % 2 == 0));
            let sim = Simulation::new(source, 2, (128 << 10, 16 << 10), SPEEDS);
            let options = OutboundOptions { piece: 20_000, ..OPTIONS };
            let mut sim = sim.with(options).over(&[SimLane::new(1, 9_000); 3]);
            sim.may_lose = true;
            sim.run_for(steps);
            sim.lose_lane(0, steps % 3, after);
            sim.run();
            sim.check(0);
            sim.check(1);
            assert_eq!(sim.released(), Some(4), "after {steps} and {after} steps");
        }
    }
}

#[derive(Debug, Clone)]
enum SimulatedFailure {
    Break(usize),
    LoseLane(usize, usize, usize),
    KillReader(usize),
    KillWriter,
}

fn failure() -> impl Strategy<Value = (usize, SimulatedFailure)> {
    let failure = prop_oneof![
        (0_usize..3).prop_map(SimulatedFailure::Break),
        (0_usize..3, 0_usize..5, 0_usize..40)
            .prop_map(|(reader, lane, steps)| SimulatedFailure::LoseLane(reader, lane, steps)),
        (0_usize..3).prop_map(SimulatedFailure::KillReader),
        Just(SimulatedFailure::KillWriter),
    ];
    (1_usize..80, failure)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(32), ..ProptestConfig::default() })]

    #[test]
    fn messages_arrive_once_in_order_despite_lane_failures(
        lengths in proptest::collection::vec(
            prop_oneof![3 => 0_usize..200, 1 => 3000_usize..9000, 3 => 20_000_usize..200_000],
            1..24,
        ),
        lanes in proptest::collection::vec((1_u64..9, prop_oneof![Just(0), 1_u64..50_000]), 1..5),
        devices in any::<u64>(),
        readers in 1_usize..4,
        sinks in any::<[bool; 3]>(),
        refusals in (0_u32..3, 0_u32..3),
        piece in 3000_u64..40_000,
        slots in 1_usize..12,
        failures in proptest::collection::vec(failure(), 0..8),
    ) {
        let mut source = messages(&lengths, false);
        for (number, (_, payload)) in source.iter_mut().enumerate() {
            payload.is_device = devices >> (number % 64) & 1 == 1;
        }
        let lanes: Vec<_> = lanes.into_iter().map(|(s, l)| SimLane::new(s, l)).collect();
        let sim = Simulation::new(SimSource::new(source), readers, (64 << 10, 16 << 10), SPEEDS);
        let mut sim = sim.with(OutboundOptions { piece, slots, ..OPTIONS }).over(&lanes);
        sim.wire.all_slots = 3;
        sim.may_lose = true;
        for (reader, is_device) in sim.readers.iter_mut().zip(sinks) {
            reader.sink.is_device = is_device;
            reader.sink.refusals = refusals;
        }
        for (steps, failure) in failures {
            sim.run_for(steps);
            match failure {
                SimulatedFailure::Break(number) => sim.break_ring(number % readers),
                SimulatedFailure::LoseLane(number, lane, steps) => {
                    sim.lose_lane(number % readers, lane, steps);
                }
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
}
