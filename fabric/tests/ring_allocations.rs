//! A ring allocates and registers nothing per message, in any notify mode, and on several lanes.
//!
//! One test in its own program: the allocator counts for all threads.
#![allow(missing_docs)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use fabric::ring::{LaneSet, NotifyMode, Port, PortEvent, Pushed, RingOptions};
use fabric::{
    Access, AddressVector, Caps, CompletionQueue, Domain, Endpoint, EndpointKind, HostMemory,
    Offer, Peer, Query, registrations,
};
use testkit::allocations::{CountingAllocator, of_all_threads};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

const TIMEOUT: Duration = Duration::from_secs(20);
const CAPACITY: u64 = 256 << 10;
/// From empty to longer than the ring.
const LENGTHS: [usize; 6] = [0, 64, 200, 5000, 70_000, 600_000];

fn counts() -> (u64, u64) {
    (of_all_threads(), registrations())
}

#[test]
fn nothing_is_allocated_or_registered_per_message() {
    for notify in NotifyMode::ALL {
        by_one_port(notify);
    }
    by_lanes();
}

fn offer(notify: NotifyMode) -> Offer {
    let query = Query::new(EndpointKind::Rdm).source("127.0.0.1");
    match notify {
        NotifyMode::Immediate => query.first().unwrap(),
        NotifyMode::Message => {
            query.caps(Caps::MESSAGE | Caps::TAGGED | Caps::RMA).first().unwrap()
        }
    }
}

/// A port, and its own address as the peer.
fn port(offer: &Offer) -> (Port, Peer) {
    let domain = Domain::open(offer).unwrap();
    let addresses = AddressVector::open(&domain).unwrap();
    let mut queue = CompletionQueue::open(&domain).unwrap();
    let builder = Endpoint::builder(&domain).addresses(&addresses);
    let endpoint = builder.queue(&mut queue).open().unwrap();
    let peer = addresses.insert(&endpoint.address().unwrap()).unwrap();
    (Port::new(endpoint, queue), peer)
}

fn by_one_port(notify: NotifyMode) {
    let (mut port, peer) = port(&offer(notify));
    let options = RingOptions {
        watermark: CAPACITY / 8,
        notify,
        ..RingOptions::new(port.endpoint(), CAPACITY).unwrap()
    };
    let reading = port.offer(&options).unwrap();
    let (writing, answer) =
        port.accept(peer, &port.ring_offer(reading).unwrap(), 32 << 10).unwrap();
    port.connect(reading, peer, &answer).unwrap();
    let memory = HostMemory::zeroed(600_000).unwrap();
    let source = port.endpoint().domain().register(memory, Access::WRITE).unwrap();
    let mut pass = |rounds: u64| {
        for _ in 0..rounds {
            for length in LENGTHS {
                let payload = source.slice(0..length).unwrap();
                let mut message = port.begin(writing, 0, length as u64).unwrap();
                let mut is_whole = false;
                while !is_whole {
                    let pushed = port.push(writing, &mut message, &payload).unwrap();
                    let has_moved = matches!(pushed, Pushed::Posted(_));
                    let progress = if has_moved { port.progress() } else { port.wait(TIMEOUT) };
                    assert!(!matches!(progress, Ok(PortEvent::Other(_)) | Err(_)), "{progress:?}");
                    while let Some(view) = port.take(reading).unwrap() {
                        is_whole = view.is_last();
                    }
                    port.return_credit(reading, false).unwrap();
                }
            }
            while port.next_read(writing).unwrap().is_some() {}
        }
        port.flush(writing, TIMEOUT).unwrap();
    };
    // Buffers grow in the first rounds.
    pass(40);
    is_at_rest(&format!("{notify:?}"), || pass(200));
}

/// No allocation or registration per round. On a busy machine more operations may be in flight than
/// ever before, and a list of the provider grows, once.
fn is_at_rest(what: &str, mut pass: impl FnMut()) {
    let counts = (0..3).map(|_| {
        let before = counts();
        pass();
        let after = counts();
        (after.0 - before.0, after.1 - before.1)
    });
    let counts: Vec<_> = counts.collect();
    assert_eq!(
        counts.iter().min(),
        Some(&(0, 0)),
        "{what}: allocations, registrations: {counts:?}"
    );
    assert!(counts.iter().all(|(_, registered)| *registered == 0), "{what}: {counts:?}");
}

fn by_lanes() {
    let offer = offer(NotifyMode::Immediate);
    let (mut port, peer) = port(&offer);
    let further = Domain::open(&offer).unwrap();
    port.add_lanes(LaneSet::open_on(&[further]).unwrap()).unwrap();
    let options = RingOptions::new(port.endpoint(), CAPACITY).unwrap();
    let memory = HostMemory::zeroed(CAPACITY as usize).unwrap();
    let reading = port.offer_on_lanes(&options, 2, memory).unwrap();
    let (ring_offer, at) = (port.ring_offer(reading).unwrap(), port.lane_addresses());
    let (writing, answer) = port.accept_on_lanes(peer, &at, &ring_offer, 32 << 10).unwrap();
    port.connect(reading, peer, &answer).unwrap();
    let memory = Arc::new(HostMemory::zeroed(600_000).unwrap());
    let sources = [0, 1].map(|lane| {
        let domain = port.lane_domain(lane).unwrap();
        domain.register(Arc::clone(&memory), Access::WRITE).unwrap()
    });
    let (mut by, end) = ([0; 2], Instant::now() + 3 * TIMEOUT);
    let mut pass = |rounds: u64| {
        for _ in 0..rounds {
            for length in LENGTHS {
                let mut message = port.begin(writing, 0, length as u64).unwrap();
                let mut is_whole = false;
                while !is_whole {
                    assert!(Instant::now() < end, "{} of {length}", message.written());
                    let left = length as u64 - message.written();
                    let lane =
                        port.pick_lane(writing, left).unwrap().filter(|_| !message.is_written());
                    let pushed = lane.map(|lane| {
                        let payload = sources[lane].slice(0..length).unwrap();
                        (
                            lane,
                            port.push_with(lane, writing, &mut message, (&payload, 0), &[])
                                .unwrap(),
                        )
                    });
                    let progress = if let Some((lane, Pushed::Posted(_))) = pushed {
                        by[lane] += 1;
                        port.progress()
                    } else {
                        port.wait(Duration::from_micros(100))
                    };
                    assert!(!matches!(progress, Ok(PortEvent::Other(_)) | Err(_)), "{progress:?}");
                    while let Some(view) = port.take(reading).unwrap() {
                        is_whole = view.is_last();
                    }
                    port.return_credit(reading, false).unwrap();
                }
            }
            while port.next_read(writing).unwrap().is_some() {}
        }
        port.flush(writing, TIMEOUT).unwrap();
    };
    pass(40);
    is_at_rest("lanes", || pass(100));
    assert!(by.iter().all(|chunks| *chunks > 0), "{by:?}");
}
