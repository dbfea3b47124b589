//! Nodes that do not read, providers that hang, and readers that acknowledge too much.

use super::*;
use crate::replication::outbound::OutboundTransport;

const SECOND: u64 = 1_000_000_000;

#[test]
fn premature_credit_releases_no_message_in_flight() {
    let source = SimSource::new(messages(&[3 * MIB as usize, 300_000], false));
    let mut sim = Simulation::new(source, 1, (4 * MIB, MIB), SPEEDS);
    sim.run_for(1);
    let ring = sim.readers[0].ring.unwrap();
    let ring_progress = sim.wire.ring_progress(ring).unwrap();
    assert!(
        ring_progress.tail > 3 * MIB && ring_progress.left < ring_progress.tail,
        "{ring_progress:?}"
    );
    sim.wire.claim_all_read(ring);
    sim.turn();
    assert_eq!(sim.released(), None);
    sim.run();
    sim.check(0);
    assert_eq!(sim.released(), Some(1));
}

#[test]
fn uncompleted_writes_pin_messages_until_renewal() {
    let source = SimSource::new(messages(&[MIB as usize, 300_000], false));
    let sim = Simulation::new(source, 2, (4 * MIB, MIB), SPEEDS);
    let mut sim = sim.with(OutboundOptions { timeout: SECOND, ..OPTIONS });
    sim.run_for(1);
    let ring = sim.readers[1].ring.unwrap();
    sim.wire.rings[ring].is_frozen = true;
    sim.outbound.remove(NodeId([1; 16]), &mut sim.wire);
    sim.readers[1].is_stuck = true;
    // It never ends, since it polls repeatedly.
    sim.run_for(10_000);
    sim.check(0);
    sim.wire.now += SECOND / 2;
    sim.turn();
    assert!(!sim.outbound.is_overdue(sim.wire.clock()));
    for _ in 0..3 {
        sim.wire.now += SECOND;
        sim.turn();
        assert_eq!(sim.released(), None, "the provider may still read it");
        assert!(sim.outbound.is_overdue(sim.wire.clock()));
    }
    sim.renew();
    sim.outbound.remove(NodeId([1; 16]), &mut sim.wire);
    sim.run();
    assert!(!sim.outbound.is_overdue(sim.wire.clock()));
    assert_eq!(sim.released(), Some(1));
    sim.check(0);
}

#[test]
fn hanging_destination_does_not_block_others_beyond_the_limit() {
    for length in [64, 10_000] {
        let source = SimSource::new(messages(&[length; 200], false));
        let sim = Simulation::new(source, 2, (64 << 10, 16 << 10), SPEEDS);
        let mut sim = sim.with(OutboundOptions { max_retained: Some(16), ..OPTIONS });
        let ring = sim.readers[1].ring.unwrap();
        sim.wire.rings[ring].is_frozen = true;
        sim.run();
        sim.check(0);
    }
}

#[test]
fn destination_that_pins_all_retained_messages_is_lost() {
    let source = SimSource::new(messages(&[10_000; 200], false));
    let sim = Simulation::new(source, 2, (256 << 10, 16 << 10), SPEEDS);
    let mut sim = sim.with(OutboundOptions { max_retained: Some(4), timeout: SECOND, ..OPTIONS });
    sim.may_lose = true;
    let ring = sim.readers[1].ring.unwrap();
    sim.wire.rings[ring].is_frozen = true;
    sim.run();
    assert!(sim.readers[0].sink.published.lock().unwrap().len() < 200);
    assert!(sim.outbound.is_stalled());
    sim.wire.now += 2 * SECOND;
    sim.turn();
    assert_eq!(sim.lost, [NodeId([1; 16])]);
    sim.turn();
    sim.wire.now += 2 * SECOND;
    sim.turn();
    assert!(sim.outbound.is_overdue(sim.wire.clock()));
    sim.renew();
    sim.run();
    sim.check(0);
    let counted = sim.outbound.counters()[1].1;
    assert_eq!(counted.missed + sim.readers[1].sink.published.lock().unwrap().len() as u64, 200);
}

#[test]
fn ring_failing_at_message_begin_leaks_no_batch_buffer() {
    let source = SimSource::new(messages(&[64; 10], false));
    let mut sim = Simulation::new(source, 1, (64 << 10, 16 << 10), SPEEDS);
    for _ in 0..20 {
        let ring = sim.readers[0].ring.unwrap();
        sim.wire.rings[ring].hides_chunk_limit = true;
        let now = sim.wire.clock();
        sim.outbound.advance(now, &mut sim.source, &mut sim.wire).unwrap();
        assert!(sim.outbound.next_disconnected().is_some());
        sim.break_ring(0);
    }
    assert_eq!(sim.wire.batch_buffers_taken(), 0);
    sim.run();
    sim.check(0);
}

#[derive(Debug, Clone)]
enum SimulatedStall {
    Stop(usize),
    Continue(usize),
    Kill(usize),
    Break(usize),
    Renew,
}

fn stall() -> impl Strategy<Value = (usize, SimulatedStall)> {
    let stall = prop_oneof![
        3 => (0_usize..3).prop_map(SimulatedStall::Stop),
        3 => (0_usize..3).prop_map(SimulatedStall::Continue),
        1 => (0_usize..3).prop_map(SimulatedStall::Kill),
        1 => (0_usize..3).prop_map(SimulatedStall::Break),
        1 => Just(SimulatedStall::Renew),
    ];
    (1_usize..80, stall)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(48), ..ProptestConfig::default() })]

    #[test]
    fn received_messages_are_intact_and_in_order_despite_stalls(
        lengths in proptest::collection::vec(
            prop_oneof![4 => 0_usize..200, 2 => 3000_usize..9000, 1 => 20_000_usize..100_000],
            1..60,
        ),
        is_device in any::<bool>(),
        max_retained in 1_usize..12,
        readers in 1_usize..4,
        stalls in proptest::collection::vec(stall(), 0..10),
    ) {
        let source = SimSource::new(messages(&lengths, is_device));
        let sim = Simulation::new(source, readers, (64 << 10, 16 << 10), SPEEDS);
        let mut sim = sim.with(OutboundOptions { max_retained: Some(max_retained), piece: 8000, slots: 3, ..OPTIONS });
        for (steps, stall) in stalls {
            sim.run_for(steps);
            match stall {
                SimulatedStall::Stop(number) => sim.readers[number % readers].is_stuck = true,
                SimulatedStall::Continue(number) => sim.readers[number % readers].is_stuck = false,
                SimulatedStall::Kill(number) => {
                    if let Some(ring) = sim.readers[number % readers].ring {
                        sim.wire.rings[ring].is_frozen = true;
                    }
                }
                SimulatedStall::Break(number) => sim.break_ring(number % readers),
                SimulatedStall::Renew => sim.renew(),
            }
        }
        sim.run_for(200);
        sim.readers.iter_mut().for_each(|reader| reader.is_stuck = false);
        sim.renew();
        sim.run();
        prop_assert_eq!(sim.released(), Some(lengths.len() as u64 - 1));
        let counters = sim.outbound.counters();
        for (reader, (_, counted)) in sim.readers.iter().zip(counters) {
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
