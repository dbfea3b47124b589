//! Rings in device memory, and their probes.

use super::*;

const LENGTHS: [usize; 12] =
    [0, 1, 4096, 4097, 70_000, 300_000, 64, 0, 64, 1_000_000, 5_000_000, 9];
const RING: (u64, u64) = (MIB, 256 << 10);

/// A topic on devices with readers whose rings lie in device memory, or in host memory.
fn simulation(on_device: &[Option<bool>]) -> Simulation {
    let source = SimSource::new(messages(&LENGTHS, true));
    let mut sim = Simulation::new(source, on_device.len(), RING, SPEEDS);
    for (number, on_device) in on_device.iter().enumerate() {
        sim.readers[number].sink.is_device = true;
        sim.readers[number].on_device = *on_device;
        sim.break_ring(number);
    }
    sim
}

fn check(sim: &Simulation) {
    (0..sim.readers.len()).for_each(|number| sim.check(number));
    assert_eq!(sim.released(), Some(LENGTHS.len() as u64 - 1));
}

#[test]
fn messages_are_not_staged_for_rings_in_device_memory() {
    for is_probed in [false, true] {
        let mut sim = simulation(&[Some(is_probed), Some(is_probed)]);
        sim.run();
        check(&sim);
        assert_eq!(sim.wire.pieces_copied, 0);
        for reader in &mut sim.readers {
            assert_eq!(reader.inbound.take_passed_probe(), is_probed);
            assert!(!reader.inbound.take_passed_probe(), "it is reported once");
        }
        let counters = sim.outbound.counters();
        assert!(counters.iter().all(|(_, counted)| counted.is_direct && counted.batches == 0));
        assert_eq!(sim.wire.batch_buffers_taken(), 0);
    }
}

#[test]
fn nodes_with_and_without_rings_in_device_memory_get_all_messages() {
    let mut sim = simulation(&[Some(true), None, Some(false)]);
    sim.run();
    check(&sim);
    assert!(sim.wire.pieces_copied > 0);
}

/// The reader sees what the notice has overtaken, and gets its messages through the host.
#[test]
fn bytes_behind_their_notice_fail_the_probe() {
    for later in [1, 1000, 50_000] {
        let mut sim = simulation(&[Some(true), Some(true)]);
        sim.readers[0].on_device = Some(true);
        sim.wire.rings.last_mut().unwrap().bytes_later = later;
        sim.run();
        check(&sim);
        let causes = sim.readers.iter().map(|reader| reader.failed_probe.clone());
        let causes: Vec<_> = causes.collect();
        assert_eq!(causes[0], None, "the other ring is honest");
        let cause = causes[1].as_ref().unwrap();
        assert!(cause.contains("was incomplete when its notice arrived"), "{cause}");
    }
}

#[test]
fn broken_rings_are_probed_again_and_lose_nothing() {
    for steps in (0..200).step_by(7).chain([300, 400, 500, 1000]) {
        let mut sim = simulation(&[Some(true), None]);
        sim.run_for(steps);
        sim.break_ring(0);
        sim.run_for(steps);
        sim.kill_reader(0);
        sim.run_for(steps);
        sim.kill_writer();
        sim.run();
        (0..2).for_each(|number| sim.check(number));
        assert_eq!(sim.readers[0].failed_probe, None);
    }
}

/// Chunks that no honest writer sends.
#[test]
fn writers_that_skip_the_probe_are_disconnected() {
    let header = |kind: RingMessageKind, length: u64, offset| ChunkHeader {
        epoch: 1,
        position: 0,
        sequence: 0,
        message: 0,
        length,
        offset,
        payload: length as u32,
        topic: kind.number(),
    };
    let cases = [
        (true, RingMessageKind::Long, 64, "the ring does not begin with the probe"),
        (true, RingMessageKind::Inline, 64, "the ring does not begin with the probe"),
        (true, RingMessageKind::Probe, 9, "a probe that was not asked for, or of another length"),
        (false, RingMessageKind::Probe, 8, "a probe that was not asked for, or of another length"),
        (false, RingMessageKind::Inline, 8, "truncated message header"),
    ];
    for (is_probed, kind, length, expected) in cases {
        let mut sim = simulation(&[Some(is_probed)]);
        let chunk = SimChunk::forged(header(kind, length, 0), true, vec![0; length as usize]);
        let now = sim.wire.clock();
        let reader = &mut sim.readers[0];
        reader.intake.forged.push(chunk);
        let (intake, wire, ring) = (&mut reader.intake, &mut sim.wire, None);
        let mut reading = SimRingInput { intake, wire, ring };
        match reader.inbound.advance(now, &mut reading, &mut reader.sink) {
            Err(TurnFailure::Connection(error)) => assert_eq!(error.detail(), expected),
            other => panic!("{other:?}"),
        }
    }
}
