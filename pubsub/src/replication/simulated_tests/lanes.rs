//! Rings of several lanes, which are fast and slow, late by chance, and lost.

use super::*;

impl Simulation {
    /// All rings are made anew, with these lanes.
    fn over(mut self, lanes: &[SimLane]) -> Self {
        self.wire.lanes = lanes.to_vec();
        let options = self.options;
        self.with(options)
    }

    /// A lane of a reader's ring is lost, and the writer hears so; the reader does, too, after so
    /// many steps.
    fn lose_lane(&mut self, number: usize, lane: usize, steps: usize) {
        let Some(ring) = self.readers[number].ring else { return };
        self.wire.lose_lane(ring, lane);
        self.run_for(steps);
        self.break_ring(number);
    }
}

#[test]
fn lanes_are_as_fast_as_all_of_them_together() {
    let speeds = Speeds { out: 30_000, wire: 3_000, into: 30_000, ..SPEEDS };
    let pieces = 64;
    let run = |lanes: &[SimLane]| {
        let source = SimSource::new(messages(&[(pieces * MIB) as usize], true));
        let world = Simulation::new(source, 1, (16 * MIB, MIB), speeds);
        let mut world = world.with(OutboundOptions { slots: 16, ..OPTIONS }).over(lanes);
        world.readers[0].sink.is_device = true;
        let took = world.run();
        world.check(0);
        took
    };
    let one = run(&[SimLane::new(1, 0)]);
    let four = run(&[SimLane::new(1, 0); 4]);
    assert!(four <= one * 27 / 100, "{four} ns by four, {one} by one");
    // Three that are late by chance, and one that is much slower, are worth more than three.
    let uneven = [(1, 40_000), (1, 40_000), (4, 100_000), (1, 0)].map(|(s, l)| SimLane::new(s, l));
    let uneven = run(&uneven);
    assert!(uneven <= one * 36 / 100, "{uneven} ns by three and a slow one, {one} by one");
}

/// To begin a copy, and to ask for one, takes microseconds: what is done meanwhile would wait for many.
#[test]
fn a_device_is_asked_for_one_copy_and_given_few_at_a_time() {
    let source = SimSource::new(messages(&[(64 * MIB) as usize, (8 * MIB) as usize], true));
    let world = Simulation::new(source, 1, (16 * MIB, MIB), SPEEDS);
    let mut world = world.with(OutboundOptions { slots: 48, ..OPTIONS });
    let mut begun_most = 0;
    loop {
        let (begun, in_vain) = (world.wire.pieces_copied, world.wire.vain_polls);
        let has_moved = world.turn();
        begun_most = begun_most.max(world.wire.pieces_copied - begun);
        assert!(world.wire.vain_polls - in_vain <= 1);
        if !has_moved {
            match world.wire.next_event() {
                Some(event) => world.wire.now = event,
                None => break,
            }
        }
    }
    world.check(0);
    assert_eq!(begun_most, 8);
}

#[test]
fn one_lane_and_two_bring_the_same() {
    let lengths = [0, 1, 4096, 4097, 70_000, 300_000, 64, 0, 64, 1_000_000, 999_999];
    let run = |lanes: &[SimLane], is_device| {
        let source = SimSource::new(messages(&lengths, is_device));
        let mut world = Simulation::new(source, 1, (64 << 10, 16 << 10), SPEEDS).over(lanes);
        world.run();
        world.check(0);
        assert_eq!(world.released(), Some(10));
        let published = world.readers[0].sink.published.lock().unwrap().clone();
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
fn a_lane_that_is_lost_in_the_middle_loses_nothing() {
    for steps in 1..25 {
        for after in [0, 5, 30] {
            let lengths = [400_000, 64, 150_001, 64, 300_000];
            let source = SimSource::new(messages(&lengths, steps % 2 == 0));
            let world = Simulation::new(source, 2, (128 << 10, 16 << 10), SPEEDS);
            let options = OutboundOptions { piece: 20_000, ..OPTIONS };
            let mut world = world.with(options).over(&[SimLane::new(1, 9_000); 3]);
            world.may_lose = true;
            world.run_for(steps);
            world.lose_lane(0, steps % 3, after);
            world.run();
            world.check(0);
            world.check(1);
            assert_eq!(world.released(), Some(4), "after {steps} and {after} steps");
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

fn mishap() -> impl Strategy<Value = (usize, SimulatedFailure)> {
    let what = prop_oneof![
        (0_usize..3).prop_map(SimulatedFailure::Break),
        (0_usize..3, 0_usize..5, 0_usize..40)
            .prop_map(|(reader, lane, steps)| SimulatedFailure::LoseLane(reader, lane, steps)),
        (0_usize..3).prop_map(SimulatedFailure::KillReader),
        Just(SimulatedFailure::KillWriter),
    ];
    (1_usize..80, what)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn each_comes_once_in_order_and_right_whatever_lanes_do(
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
        mishaps in proptest::collection::vec(mishap(), 0..8),
    ) {
        let mut source = messages(&lengths, false);
        for (number, (_, place)) in source.iter_mut().enumerate() {
            place.is_device = devices >> (number % 64) & 1 == 1;
        }
        let lanes: Vec<_> = lanes.into_iter().map(|(s, l)| SimLane::new(s, l)).collect();
        let world = Simulation::new(SimSource::new(source), readers, (64 << 10, 16 << 10), SPEEDS);
        let mut world = world.with(OutboundOptions { piece, slots, ..OPTIONS }).over(&lanes);
        world.wire.all_slots = 3;
        world.may_lose = true;
        for (reader, is_device) in world.readers.iter_mut().zip(sinks) {
            reader.sink.is_device = is_device;
            reader.sink.refusals = refusals;
        }
        for (steps, mishap) in mishaps {
            world.run_for(steps);
            match mishap {
                SimulatedFailure::Break(number) => world.break_ring(number % readers),
                SimulatedFailure::LoseLane(number, lane, steps) => {
                    world.lose_lane(number % readers, lane, steps);
                }
                SimulatedFailure::KillReader(number) => world.kill_reader(number % readers),
                SimulatedFailure::KillWriter => world.kill_writer(),
            }
        }
        world.run();
        for number in 0..readers {
            world.check(number);
        }
        prop_assert_eq!(world.released(), Some(lengths.len() as u64 - 1));
    }
}
