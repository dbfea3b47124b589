//! Rings on a provider that does not keep the order of writes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::geometry::{ChunkLayout, RingGeometry};
use super::header::HEADER_LEN;
use super::writer_state::WriterState;
use super::{Port, PortEvent, ReceiverId, RingEvent, RingOptions, SenderId};
use crate::{
    Access, AddressVector, Capabilities, CompletionQueue, Domain, Endpoint, EndpointKind, Error,
    ErrorKind, HostMemory, MemoryRegion, Order, PostOptions, Query,
};

const TIMEOUT: Duration = Duration::from_secs(20);

/// Two ports and a ring from the first to the second, with credit for each chunk.
struct Pair {
    writer: Port,
    reader: Port,
    writing: SenderId,
    reading: ReceiverId,
    source: MemoryRegion,
    _addresses: [AddressVector; 2],
}

fn pair(change: impl FnOnce(Capabilities) -> Capabilities) -> Pair {
    let mut offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first().unwrap();
    offer.capabilities = Arc::new(change(offer.capabilities().clone()));
    let domain = Domain::open(&offer).unwrap();
    let open = || {
        let addresses = AddressVector::open(&domain).unwrap();
        let mut queue = CompletionQueue::open(&domain).unwrap();
        let builder = Endpoint::builder(&domain).addresses(&addresses);
        let endpoint = builder.queue(&mut queue).open().unwrap();
        (Port::new(endpoint, queue), addresses)
    };
    let ((mut writer, near), (mut reader, far)) = (open(), open());
    let to_reader = near.insert(&reader.endpoint().address().unwrap()).unwrap();
    let to_writer = far.insert(&writer.endpoint().address().unwrap()).unwrap();
    let options = RingOptions::new(reader.endpoint(), 8 << 10).unwrap();
    let options = RingOptions { watermark: 0, ..options };
    let reading = reader.offer(&options).unwrap();
    let (writing, answer) =
        writer.accept(to_reader, &reader.ring_offer(reading).unwrap(), 1000).unwrap();
    reader.connect(reading, to_writer, &answer).unwrap();
    let source = domain.register(HostMemory::zeroed(1000).unwrap(), Access::WRITE).unwrap();
    source.enable_for(writer.endpoint()).unwrap();
    Pair { writer, reader, writing, reading, source, _addresses: [near, far] }
}

fn unordered(mut capabilities: Capabilities) -> Capabilities {
    let order = &mut capabilities.order;
    (order.send_order, order.receive_order) = (Order::empty(), Order::empty());
    capabilities
}

impl Pair {
    /// Writes and reads messages, without returning credit.
    fn pass(&mut self, count: u64) {
        let end = Instant::now() + TIMEOUT;
        for _ in 0..count {
            let mut message = self.writer.begin(self.writing, 0, 1000).unwrap();
            while self.reader.take(self.reading).unwrap().is_none() {
                assert!(Instant::now() < end, "a message did not arrive");
                self.writer.push(self.writing, &mut message, &self.source.all()).unwrap();
                self.progress();
            }
        }
    }

    fn progress(&mut self) {
        for port in [&mut self.writer, &mut self.reader] {
            let (PortEvent::Idle | PortEvent::Ring) = port.progress().unwrap() else {
                panic!("unexpected completion")
            };
        }
    }

    /// Is a credit with a completion in flight?
    fn is_credit_in_flight(&mut self) -> bool {
        self.reader.parts().1.in_flight() > 0
    }
}

#[test]
fn completed_credit_queues_an_event_for_the_waiting_one() {
    let mut pair = pair(unordered);
    pair.reader.enable_events();
    pair.pass(1);
    assert!(pair.reader.return_credit(pair.reading, true).unwrap());
    pair.pass(1);
    // The first one may have arrived already.
    while !pair.is_credit_in_flight() {
        pair.reader.return_credit(pair.reading, true).unwrap();
        pair.pass(1);
    }
    while pair.reader.next_event().is_some() {}
    assert!(!pair.reader.return_credit(pair.reading, true).unwrap());
    assert!(pair.reader.receiver(pair.reading).unwrap().has_unsent_credit());
    let end = Instant::now() + TIMEOUT;
    while pair.is_credit_in_flight() {
        assert!(Instant::now() < end, "the credit did not arrive");
        pair.progress();
    }
    assert_eq!(pair.reader.next_event(), Some(RingEvent::Receiver(pair.reading)));
    assert!(pair.reader.return_credit(pair.reading, true).unwrap());
}

#[test]
fn lost_credit_is_sent_again_although_no_chunk_was_taken_since() {
    let error = Error::new(ErrorKind::ConnectionLost, "test", "a peer exited");
    let mut ordered = pair(|capabilities| capabilities);
    ordered.pass(1);
    assert!(ordered.reader.return_all_credit(true));
    assert!(!ordered.reader.return_all_credit(true));
    let _ = ordered.reader.handle_lost_injects(&error);
    assert!(ordered.reader.return_all_credit(true));

    let mut serialized = pair(unordered);
    serialized.pass(1);
    assert!(serialized.reader.return_all_credit(true));
    assert!(!serialized.reader.return_all_credit(true));
    let number = serialized.reading.creation_epoch << 16 | u32::from(serialized.reading.ring);
    serialized.reader.credit_completed(number, Some(&error));
    assert!(serialized.reader.return_all_credit(true));
}

#[test]
fn completed_credit_is_not_resent_after_lost_injects() {
    let mut pair = pair(unordered);
    pair.pass(1);
    assert!(pair.reader.return_credit(pair.reading, true).unwrap());
    let end = Instant::now() + TIMEOUT;
    while pair.is_credit_in_flight() {
        assert!(Instant::now() < end, "the credit did not arrive");
        pair.progress();
    }
    let error = Error::new(ErrorKind::ConnectionLost, "test", "a peer exited");
    for _ in 0..20 {
        let _ = pair.reader.handle_lost_injects(&error);
        pair.reader.return_credit(pair.reading, true).unwrap();
    }
    let receiver = pair.reader.receiver(pair.reading).unwrap();
    assert!(receiver.broken().is_none(), "{:?}", receiver.broken());
    assert_eq!(receiver.statistics().credits, 1);
}

#[test]
fn credit_longer_than_the_ordered_write_is_serialized() {
    for (most, at_a_time) in [(usize::MAX, false), (16, false), (15, true), (0, true)] {
        let order = Order::WRITE_AFTER_WRITE;
        let mut pair = pair(|mut capabilities| {
            capabilities.order.send_order |= order;
            capabilities.order.receive_order |= order;
            capabilities.order.max_ordered_write = most;
            capabilities
        });
        pair.pass(1);
        assert!(pair.reader.return_credit(pair.reading, true).unwrap());
        assert_eq!(pair.is_credit_in_flight(), at_a_time, "{most} bytes");
    }
}

#[test]
fn without_write_order_one_credit_is_in_flight() {
    let mut pair = pair(unordered);
    let Pair { writer, reader, writing, reading, source, .. } = &mut pair;
    let (writing, reading) = (*writing, *reading);
    // Many times the ring: it blocks without credit.
    let (mut received, mut most) = (0, 0);
    let mut message = writer.begin(writing, 0, 1000).unwrap();
    let end = Instant::now() + TIMEOUT;
    while received < 500 {
        assert!(Instant::now() < end, "{received} messages");
        writer.push(writing, &mut message, &source.all()).unwrap();
        if message.is_written() {
            message = writer.begin(writing, 0, 1000).unwrap();
        }
        while let Some(view) = reader.take(reading).unwrap() {
            received += u64::from(view.is_last());
        }
        for port in [&mut *writer, &mut *reader] {
            let (PortEvent::Idle | PortEvent::Ring) = port.progress().unwrap() else {
                panic!("unexpected completion")
            };
        }
        reader.return_all_credit(true);
        // No other operation of the reader has a completion.
        most = reader.parts().1.in_flight().max(most);
        assert!(most <= 1, "{most} credits are in flight");
    }
    assert_eq!(most, 1);
    assert!(writer.sender(writing).unwrap().statistics().credits > 50);
}

/// Separate headers are writes of their own; only the other write gives a notice.
#[test]
fn header_overtaken_by_its_notice_is_found_later() {
    let mut offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first().unwrap();
    let capabilities = offer.capabilities().clone();
    // Without gathering, header and payload are separate writes.
    let mut capabilities = unordered(capabilities);
    capabilities.limits.iov_limit = 1;
    offer.capabilities = Arc::new(capabilities);
    let domain = Domain::open(&offer).unwrap();
    let open = || {
        let addresses = AddressVector::open(&domain).unwrap();
        let mut queue = CompletionQueue::open(&domain).unwrap();
        let builder = Endpoint::builder(&domain).addresses(&addresses);
        (builder.queue(&mut queue).open().unwrap(), queue, addresses)
    };
    let ((endpoint, queue, _reachable), (mut writing, mut posted, addresses)) = (open(), open());
    let peer = addresses.insert(&endpoint.address().unwrap()).unwrap();
    let mut port = Port::new(endpoint, queue);
    port.enable_events();
    let ring = port.offer(&RingOptions::new(port.endpoint(), 8 << 10).unwrap()).unwrap();
    let ring_offer = port.ring_offer(ring).unwrap();
    assert_eq!(ring_offer.layout, ChunkLayout::SeparateHeader);
    let geometry = RingGeometry::new(ring_offer.capacity, ring_offer.ring)
        .unwrap()
        .with_layout(ring_offer.layout);
    let mut writer = WriterState::new(geometry, ring_offer.epoch, u64::MAX);
    let lane = &ring_offer.lanes[0];
    let far = domain.attach(&lane.ring).unwrap();
    let remote_headers = domain.attach(lane.headers.as_ref().unwrap()).unwrap();
    let source = HostMemory::from_vec(vec![5; 1000 + HEADER_LEN as usize]).unwrap();
    let source = domain.register(source, Access::WRITE).unwrap();

    let mut longest_sleeps = Vec::new();
    for number in 0..3 {
        let mut message = writer.begin(0, 1000);
        let chunk = writer.plan(&message).unwrap();
        writer.commit(&mut message, &chunk);
        source.write(1000, &chunk.header.encode()).unwrap();
        let (payload, header) = (source.slice(0..1000), source.slice(1000..1064));
        let there = far.slice(chunk.payload_at..chunk.payload_at + 1000).unwrap();
        let data = chunk.immediate.into();
        let (payload, at_once) = (payload.unwrap(), PostOptions::token(1).timeout(Duration::ZERO));
        let end = Instant::now() + TIMEOUT;
        while writing.write_data(&mut posted, peer, &payload, &there, data, at_once).is_err() {
            // Both sides have to make progress to connect.
            let (PortEvent::Idle | PortEvent::Ring) = port.progress().unwrap() else {
                panic!("unexpected completion")
            };
            assert!(Instant::now() < end, "chunk {number} was not written");
        }
        let look = |port: &mut Port, posted: &mut CompletionQueue, longest| {
            assert!(Instant::now() < end, "chunk {number} was not found");
            let _ = posted.poll();
            let start = Instant::now();
            let (PortEvent::Idle | PortEvent::Ring) = port.wait(longest).unwrap() else {
                panic!("unexpected completion")
            };
            let has_event = port.next_event() == Some(RingEvent::Receiver(ring));
            (has_event, start.elapsed())
        };
        while !look(&mut port, &mut posted, Duration::from_millis(1)).0 {}
        // The notice arrived, and the header did not.
        assert!(port.take(ring).unwrap().is_none());
        assert!(port.take(ring).unwrap().is_none());
        let there = remote_headers.slice(chunk.header_at..chunk.header_at + HEADER_LEN).unwrap();
        writing.write(&mut posted, peer, &header.unwrap(), &there, 2).unwrap();
        let mut longest = Duration::ZERO;
        let view = loop {
            let short_sleep = Duration::from_micros(50);
            assert_eq!(port.max_sleep(short_sleep), short_sleep, "chunk {number}");
            let (has_event, slept) = look(&mut port, &mut posted, TIMEOUT);
            longest = longest.max(slept);
            if has_event && let Some(view) = port.take(ring).unwrap() {
                break view;
            }
        };
        longest_sleeps.push(longest);
        assert_eq!((view.header().message, view.len()), (number, 1000));
    }
    // A port that sleeps too long does so for each header; a busy machine delays one of them.
    let shortest = longest_sleeps.into_iter().min().unwrap();
    assert!(shortest < Duration::from_millis(40), "it slept for {shortest:?}");
}
