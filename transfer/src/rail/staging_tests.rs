use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use fabric::{Access, Caps, Domain, EndpointKind, HostMemory, Query};

use super::*;

fn slots() -> Arc<Slots> {
    let query = Query::new(EndpointKind::Rdm).caps(Caps::MESSAGE | Caps::RMA);
    let domain = Domain::open(&query.source("127.0.0.1").first().unwrap()).unwrap();
    let register = |_: &HostBuffer| {
        let memory = HostMemory::zeroed(SLOT_LENGTH as usize * SLOT_COUNT as usize).unwrap();
        Ok(domain.register(memory, Access::LOCAL).unwrap())
    };
    Arc::new(Slots::new(register).unwrap())
}

#[test]
fn slots_run_out_and_are_freed() {
    let slots = slots();
    let taken: Vec<_> = (0..SLOT_COUNT).map(|_| Slot::take(&slots).unwrap()).collect();
    assert!(!slots.has_free() && Slot::take(&slots).is_none());
    let mut numbers: Vec<_> = taken.iter().map(|slot| slot.number).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, (0..SLOT_COUNT).collect::<Vec<_>>());
    drop(taken);
    assert!(slots.has_free());
    let taken: Vec<_> = (0..SLOT_COUNT).filter_map(|_| Slot::take(&slots)).collect();
    assert_eq!(taken.len(), SLOT_COUNT as usize);
}

#[test]
fn slot_dropped_on_another_thread_is_read_before_reuse() {
    const ROUNDS: u64 = 20_000;
    let slots = slots();
    let end = Instant::now() + Duration::from_secs(60);
    std::thread::scope(|scope| {
        let mut readers = Vec::new();
        for _ in 0..2 {
            let (sender, receiver) = sync_channel::<(Slot, u64)>(SLOT_COUNT as usize);
            readers.push(sender);
            scope.spawn(move || {
                for (slot, written) in receiver {
                    let mut found = [0; 64];
                    slot.of.buffer.read(slot.start(), &mut found).unwrap();
                    assert_eq!(found, [written as u8; 64]);
                }
            });
        }
        for round in 0..ROUNDS {
            let slot = loop {
                match Slot::take(&slots) {
                    Some(slot) => break slot,
                    None => std::thread::yield_now(),
                }
                assert!(Instant::now() < end, "no slot was freed");
            };
            slots.buffer.write(slot.start(), &[round as u8; 64]).unwrap();
            let _ = readers[round as usize % readers.len()].send((slot, round));
        }
    });
    assert!(slots.has_free());
}
