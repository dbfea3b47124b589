//! Messages assembled from several memories, local completion, and ring events.
#![allow(missing_docs)]

use std::time::{Duration, Instant};

use fabric::ring::{Port, PortEvent, Pushed, RingEvent, RingOptions};
use fabric::{
    Access, AddressVector, CompletionQueue, Domain, Endpoint, EndpointKind, ErrorKind, HostMemory,
    Peer, Query,
};

const TIMEOUT: Duration = Duration::from_secs(20);

fn port() -> (Domain, Port, Peer) {
    let offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first().unwrap();
    let domain = Domain::open(&offer).unwrap();
    let addresses = AddressVector::open(&domain).unwrap();
    let mut queue = CompletionQueue::open(&domain).unwrap();
    let builder = Endpoint::builder(&domain).addresses(&addresses);
    let endpoint = builder.queue(&mut queue).open().unwrap();
    let peer = addresses.insert(&endpoint.address().unwrap()).unwrap();
    (domain, Port::new(endpoint, queue), peer)
}

fn progress(port: &mut Port) {
    let progress = port.wait(Duration::from_millis(1));
    assert!(!matches!(progress, Ok(PortEvent::Other(_)) | Err(_)), "{progress:?}");
}

#[test]
fn message_is_assembled_from_several_regions() {
    let (domain, mut port, peer) = port();
    let options = RingOptions::new(port.endpoint(), 64 << 10).unwrap();
    let reading = port.offer(&options).unwrap();
    let (writing, answer) =
        port.accept(peer, &port.ring_offer(reading).unwrap(), 16 << 10).unwrap();
    port.connect(reading, peer, &answer).unwrap();
    // Together longer than the ring.
    let lengths = [100, 50_000, 7, 40_000];
    let pieces: Vec<Vec<u8>> =
        (1..).zip(lengths).map(|(fill, length): (u8, usize)| vec![fill; length]).collect();
    let wanted = pieces.concat();
    let regions: Vec<_> = pieces
        .into_iter()
        .map(|piece| domain.register(HostMemory::from_vec(piece).unwrap(), Access::WRITE).unwrap())
        .collect();
    let whole = wanted.len() as u64;
    let mut message = port.begin(writing, 5, whole).unwrap();
    let second = port.push_part(writing, &mut message, &regions[1].all(), 100).unwrap_err();
    assert_eq!(second.kind(), ErrorKind::OutOfBounds, "the first piece comes first");

    let (mut received, mut at, mut piece, mut is_over) = (Vec::new(), 0, 0, false);
    let end = Instant::now() + TIMEOUT;
    while !is_over {
        assert!(Instant::now() < end, "{} of {whole} bytes", received.len());
        if piece < regions.len() {
            let part = regions[piece].all();
            let pushed = port.push_part(writing, &mut message, &part, at).unwrap();
            if let Pushed::Posted(_) = pushed
                && message.written() == at + part.len() as u64
            {
                (at, piece) = (message.written(), piece + 1);
            }
        }
        progress(&mut port);
        while let Some(view) = port.take(reading).unwrap() {
            assert_eq!(view.header().offset, received.len() as u64);
            let from = received.len();
            received.resize(from + view.len(), 0);
            view.read(0, &mut received[from..]).unwrap();
            // No chunk has bytes of two pieces.
            assert!(received[from..].iter().all(|byte| *byte == received[from]));
            is_over = view.is_last();
        }
    }
    assert!(received == wanted);
    let done = port.push_part(writing, &mut message, &regions[0].all(), 0).unwrap();
    assert_eq!(done, Pushed::Written);
}

#[test]
fn empty_message_is_assembled_from_empty_parts() {
    let (domain, mut port, peer) = port();
    let options = RingOptions::new(port.endpoint(), 64 << 10).unwrap();
    let reading = port.offer(&options).unwrap();
    let (writing, answer) =
        port.accept(peer, &port.ring_offer(reading).unwrap(), 16 << 10).unwrap();
    port.connect(reading, peer, &answer).unwrap();
    let piece = domain.register(HostMemory::zeroed(64).unwrap(), Access::WRITE).unwrap();
    // Offsets of empty parts do not matter.
    for (part, at) in [(0..0, 0), (0..64, 0), (0..0, 9)] {
        let mut message = port.begin(writing, 5, 0).unwrap();
        let part = piece.slice(part).unwrap();
        let end = Instant::now() + TIMEOUT;
        while !message.is_written() {
            assert!(Instant::now() < end);
            let _ = port.push_part(writing, &mut message, &part, at).unwrap();
            progress(&mut port);
        }
        let mut view = None;
        while view.is_none() {
            assert!(Instant::now() < end);
            progress(&mut port);
            view = port.take(reading).unwrap();
        }
        let view = view.unwrap();
        assert_eq!((view.len(), view.header().length, view.is_last()), (0, 0, true));
    }
    let mut message = port.begin(writing, 5, 1).unwrap();
    let nothing = piece.slice(0..0).unwrap();
    let error = port.push_part(writing, &mut message, &nothing, 0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfBounds, "the part does not have the byte");
}

/// The index of a closed ring is reused; its id is not.
#[test]
fn id_of_a_forgotten_ring_does_not_name_its_successor() {
    let (_domain, mut port, _peer) = port();
    let options = RingOptions::new(port.endpoint(), 4096).unwrap();
    let first = port.offer(&options).unwrap();
    port.forget(first);
    // All indexes are used before one is reused.
    let number = |port: &Port, ring| port.ring_offer(ring).unwrap().ring;
    let mut later = port.offer(&options).unwrap();
    while number(&port, later) != 0 {
        port.forget(later);
        later = port.offer(&options).unwrap();
    }
    assert_ne!(first, later);
    for id in [first, later] {
        // Open, or already forgotten.
        port.forget_if_closing(id);
    }
    assert!(port.receiver(later).is_ok() && port.receiver(first).is_err());
    assert_eq!(port.close_receiver(first).unwrap_err().kind(), ErrorKind::Closed);
    port.forget(first);
    assert_eq!(port.rings().0, 1);
    assert_eq!(number(&port, later), 0);
}

#[test]
fn completed_position_and_one_event_per_ring_are_reported() {
    let (domain, mut port, peer) = port();
    port.enable_events();
    let options =
        RingOptions { watermark: 0, ..RingOptions::new(port.endpoint(), 64 << 10).unwrap() };
    let rings: Vec<_> = (0..3)
        .map(|_| {
            let reading = port.offer(&options).unwrap();
            let ring_offer = port.ring_offer(reading).unwrap();
            let (writing, answer) = port.accept(peer, &ring_offer, 16 << 10).unwrap();
            port.connect(reading, peer, &answer).unwrap();
            (reading, writing)
        })
        .collect();
    let source = domain.register(HostMemory::zeroed(10_000).unwrap(), Access::WRITE).unwrap();
    let (reading, writing) = rings[1];
    // One message that is copied, and one that is not.
    for length in [10, 10_000] {
        let payload = source.slice(0..length).unwrap();
        let mut message = port.begin(writing, 0, length as u64).unwrap();
        let end = Instant::now() + TIMEOUT;
        while !message.is_written() {
            assert!(Instant::now() < end);
            let _ = port.push(writing, &mut message, &payload).unwrap();
            progress(&mut port);
        }
        let tail = port.sender(writing).unwrap().writer().tail();
        let mut view = None;
        while view.is_none() || port.sender(writing).unwrap().completed_to() < tail {
            assert!(Instant::now() < end);
            progress(&mut port);
            view = view.or(port.take(reading).unwrap());
        }
        assert!(port.sender(writing).unwrap().writer().known_head() < tail, "the view is held");
        drop(view);
        while port.sender(writing).unwrap().writer().known_head() < tail {
            assert!(Instant::now() < end);
            progress(&mut port);
        }
        let mut events: Vec<_> = std::iter::from_fn(|| port.next_event()).collect();
        events.sort_by_key(|event| matches!(event, RingEvent::Sender(_)));
        assert_eq!(
            events,
            [RingEvent::Receiver(reading), RingEvent::Sender(writing)],
            "each once, and no others"
        );
    }
}
