//! Nodes that do not read, providers that do not go on, and readers that claim too much.

use super::*;
use crate::replication::outbound::OutboundTransport;

const SECOND: u64 = 1_000_000_000;

#[test]
fn credit_that_runs_ahead_releases_nothing_that_is_still_read() {
    let source = SimSource::new(messages(&[3 * MIB as usize, 300_000], false));
    let mut world = Simulation::new(source, 1, (4 * MIB, MIB), SPEEDS);
    world.run_for(1);
    let ring = world.readers[0].ring.unwrap();
    let ring_progress = world.wire.ring_progress(ring).unwrap();
    assert!(
        ring_progress.tail > 3 * MIB && ring_progress.left < ring_progress.tail,
        "{ring_progress:?}"
    );
    world.wire.claim_all_read(ring);
    world.turn();
    assert_eq!(world.released(), None);
    world.run();
    world.check(0);
    assert_eq!(world.released(), Some(1));
}

#[test]
fn what_a_provider_does_not_let_go_of_stays_until_the_endpoint_is_closed() {
    let source = SimSource::new(messages(&[MIB as usize, 300_000], false));
    let world = Simulation::new(source, 2, (4 * MIB, MIB), SPEEDS);
    let mut world = world.with(OutboundOptions { timeout: SECOND, ..OPTIONS });
    world.run_for(1);
    let ring = world.readers[1].ring.unwrap();
    world.wire.rings[ring].is_frozen = true;
    world.outbound.remove(NodeId([1; 16]), &mut world.wire);
    world.readers[1].is_stuck = true;
    // It never comes to an end: it is looked again and again.
    world.run_for(10_000);
    world.check(0);
    world.wire.now += SECOND / 2;
    world.turn();
    assert!(!world.outbound.is_overdue(world.wire.clock()));
    for _ in 0..3 {
        world.wire.now += SECOND;
        world.turn();
        assert_eq!(world.released(), None, "the provider may still read it");
        assert!(world.outbound.is_overdue(world.wire.clock()));
    }
    world.renew();
    world.outbound.remove(NodeId([1; 16]), &mut world.wire);
    world.run();
    assert!(!world.outbound.is_overdue(world.wire.clock()));
    assert_eq!(world.released(), Some(1));
    world.check(0);
}

#[test]
fn one_whose_provider_does_not_go_on_holds_up_nobody_where_not_all_is_kept() {
    for length in [64, 10_000] {
        let source = SimSource::new(messages(&[length; 200], false));
        let world = Simulation::new(source, 2, (64 << 10, 16 << 10), SPEEDS);
        let mut world = world.with(OutboundOptions { max_retained: Some(16), ..OPTIONS });
        let ring = world.readers[1].ring.unwrap();
        world.wire.rings[ring].is_frozen = true;
        world.run();
        world.check(0);
    }
}

#[test]
fn who_holds_all_that_may_be_kept_is_given_up() {
    let source = SimSource::new(messages(&[10_000; 200], false));
    let world = Simulation::new(source, 2, (256 << 10, 16 << 10), SPEEDS);
    let mut world =
        world.with(OutboundOptions { max_retained: Some(4), timeout: SECOND, ..OPTIONS });
    world.may_lose = true;
    let ring = world.readers[1].ring.unwrap();
    world.wire.rings[ring].is_frozen = true;
    world.run();
    assert!(world.readers[0].sink.published.lock().unwrap().len() < 200);
    assert!(world.outbound.is_stalled());
    world.wire.now += 2 * SECOND;
    world.turn();
    assert_eq!(world.lost, [NodeId([1; 16])]);
    world.turn();
    world.wire.now += 2 * SECOND;
    world.turn();
    assert!(world.outbound.is_overdue(world.wire.clock()));
    world.renew();
    world.run();
    world.check(0);
    let counted = world.outbound.counters()[1].1;
    assert_eq!(counted.missed + world.readers[1].sink.published.lock().unwrap().len() as u64, 200);
}

#[test]
fn a_ring_that_fails_when_a_message_begins_leaves_no_sheet_behind() {
    let source = SimSource::new(messages(&[64; 10], false));
    let mut world = Simulation::new(source, 1, (64 << 10, 16 << 10), SPEEDS);
    for _ in 0..20 {
        let ring = world.readers[0].ring.unwrap();
        world.wire.rings[ring].hides_chunk_limit = true;
        let now = world.wire.clock();
        world.outbound.advance(now, &mut world.source, &mut world.wire).unwrap();
        assert!(world.outbound.next_disconnected().is_some());
        world.break_ring(0);
    }
    assert_eq!(world.wire.batch_buffers_taken(), 0);
    world.run();
    world.check(0);
}

#[derive(Debug, Clone)]
enum SimulatedStall {
    Stop(usize),
    Continue(usize),
    Kill(usize),
    Break(usize),
    Renew,
}

fn trouble() -> impl Strategy<Value = (usize, SimulatedStall)> {
    let what = prop_oneof![
        3 => (0_usize..3).prop_map(SimulatedStall::Stop),
        3 => (0_usize..3).prop_map(SimulatedStall::Continue),
        1 => (0_usize..3).prop_map(SimulatedStall::Kill),
        1 => (0_usize..3).prop_map(SimulatedStall::Break),
        1 => Just(SimulatedStall::Renew),
    ];
    (1_usize..80, what)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn what_is_not_missed_is_right_and_in_order_whoever_lags(
        lengths in proptest::collection::vec(
            prop_oneof![4 => 0_usize..200, 2 => 3000_usize..9000, 1 => 20_000_usize..100_000],
            1..60,
        ),
        is_device in any::<bool>(),
        max_retained in 1_usize..12,
        readers in 1_usize..4,
        troubles in proptest::collection::vec(trouble(), 0..10),
    ) {
        let source = SimSource::new(messages(&lengths, is_device));
        let world = Simulation::new(source, readers, (64 << 10, 16 << 10), SPEEDS);
        let mut world = world.with(OutboundOptions { max_retained: Some(max_retained), piece: 8000, slots: 3, ..OPTIONS });
        for (steps, trouble) in troubles {
            world.run_for(steps);
            match trouble {
                SimulatedStall::Stop(number) => world.readers[number % readers].is_stuck = true,
                SimulatedStall::Continue(number) => world.readers[number % readers].is_stuck = false,
                SimulatedStall::Kill(number) => {
                    if let Some(ring) = world.readers[number % readers].ring {
                        world.wire.rings[ring].is_frozen = true;
                    }
                }
                SimulatedStall::Break(number) => world.break_ring(number % readers),
                SimulatedStall::Renew => world.renew(),
            }
        }
        world.run_for(200);
        world.readers.iter_mut().for_each(|reader| reader.is_stuck = false);
        world.renew();
        world.run();
        prop_assert_eq!(world.released(), Some(lengths.len() as u64 - 1));
        let counters = world.outbound.counters();
        for (reader, (_, counted)) in world.readers.iter().zip(counters) {
            let published = reader.sink.published.lock().unwrap();
            let in_order = published.windows(2).all(|two| two[0].0.position < two[1].0.position);
            prop_assert!(in_order);
            for (header, bytes) in published.iter() {
                prop_assert!(*bytes == bytes_of(header.position, bytes.len()));
            }
            prop_assert!(published.len() as u64 + counted.missed >= lengths.len() as u64);
            prop_assert!(counted.delivered <= lengths.len() as u64);
        }
    }
}
