//! Rings by a provider that does not promise that writes keep their order.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::header::HEADER;
use super::port::News;
use super::shape::{Layout, Shape};
use super::writer::Writer;
use super::{Port, RingOptions, Turn};
use crate::{
    Access, AddressVector, Capabilities, CompletionQueue, Domain, Endpoint, EndpointKind,
    HostMemory, Options, Order, Query,
};

const PATIENCE: Duration = Duration::from_secs(20);

#[test]
fn one_credit_at_a_time_is_told_without_order() {
    let mut offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first().unwrap();
    let facts = offer.capabilities().clone();
    let (send_order, receive_order) = (Order::empty(), Order::empty());
    offer.capabilities = Arc::new(Capabilities { send_order, receive_order, ..facts });
    let domain = Domain::open(&offer).unwrap();
    let mut sides = Vec::new();
    for _ in 0..2 {
        let addresses = AddressVector::open(&domain).unwrap();
        let mut queue = CompletionQueue::open(&domain).unwrap();
        let builder = Endpoint::builder(&domain).addresses(&addresses);
        let endpoint = builder.queue(&mut queue).open().unwrap();
        sides.push((Port::new(endpoint, queue), addresses));
    }
    let at = [0, 1].map(|side: usize| sides[side].0.endpoint().address().unwrap());
    let peers = [0, 1].map(|side: usize| sides[side].1.insert(&at[1 - side]).unwrap());
    let [(writer, _), (reader, _)] = &mut sides[..] else { panic!("two sides") };
    let options = RingOptions::new(reader.endpoint(), 8 << 10).unwrap();
    let options = RingOptions { watermark: 0, ..options };
    let reading = reader.offer(&options).unwrap();
    let (writing, answer) = writer.accept(peers[0], &reader.terms(reading).unwrap(), 1000).unwrap();
    reader.connect(reading, peers[1], &answer).unwrap();
    let source = domain.register(HostMemory::zeroed(1000).unwrap(), Access::WRITE).unwrap();
    source.enable_for(writer.endpoint()).unwrap();

    // Many times the ring: without credit it would not come to an end.
    let (mut received, mut most) = (0, 0);
    let mut message = writer.begin(writing, 0, 1000).unwrap();
    let end = Instant::now() + PATIENCE;
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
            let (Turn::Idle | Turn::Ring) = port.turn().unwrap() else { panic!("nobody's") };
        }
        reader.tell_all(true);
        // The reader posts nothing else that completes.
        most = reader.parts().1.in_flight().max(most);
        assert!(most <= 1, "{most} credits are on their way");
    }
    assert_eq!(most, 1);
    assert!(writer.sender(writing).unwrap().statistics().credits > 50);
}

/// Headers that lie apart are writes of their own. The reader's queue tells of the other write alone.
#[test]
fn a_header_that_its_notice_overtook_is_found_later() {
    let mut offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first().unwrap();
    let facts = offer.capabilities().clone();
    // Gathers nothing: so header and payload do not leave together.
    let (send_order, receive_order, iov_limit) = (Order::empty(), Order::empty(), 1);
    let facts = Capabilities { send_order, receive_order, iov_limit, ..facts };
    offer.capabilities = Arc::new(facts);
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
    port.keep_news();
    let ring = port.offer(&RingOptions::new(port.endpoint(), 8 << 10).unwrap()).unwrap();
    let terms = port.terms(ring).unwrap();
    assert_eq!(terms.layout, Layout::Apart);
    let shape = Shape::new(terms.capacity, terms.ring).unwrap().laid_out(terms.layout);
    let mut writer = Writer::new(shape, terms.epoch, u64::MAX);
    let lane = &terms.lanes[0];
    let far = domain.attach(&lane.ring).unwrap();
    let far_headers = domain.attach(lane.headers.as_ref().unwrap()).unwrap();
    let source = HostMemory::from_vec(vec![5; 1000 + HEADER as usize]).unwrap();
    let source = domain.register(source, Access::WRITE).unwrap();

    for number in 0..3 {
        let mut message = writer.begin(0, 1000);
        let chunk = writer.plan(&message).unwrap();
        writer.commit(&mut message, &chunk);
        source.write(1000, &chunk.header.encode()).unwrap();
        let (payload, header) = (source.slice(0..1000), source.slice(1000..1064));
        let there = far.slice(chunk.payload_at..chunk.payload_at + 1000).unwrap();
        let data = chunk.immediate.into();
        let (payload, at_once) = (payload.unwrap(), Options::token(1).patience(Duration::ZERO));
        let end = Instant::now() + PATIENCE;
        while writing.write_data(&mut posted, peer, &payload, &there, data, at_once).is_err() {
            // Both sides have a part in the connection that comes up.
            let (Turn::Idle | Turn::Ring) = port.turn().unwrap() else { panic!("nobody's") };
            assert!(Instant::now() < end, "chunk {number} was not written");
        }
        let look = |port: &mut Port, posted: &mut CompletionQueue, longest| {
            assert!(Instant::now() < end, "chunk {number} was not found");
            let _ = posted.poll();
            let start = Instant::now();
            let (Turn::Idle | Turn::Ring) = port.rest(longest).unwrap() else { panic!("nobody's") };
            let is_told = port.next_news() == Some(News::Read(ring));
            (is_told, start.elapsed())
        };
        while !look(&mut port, &mut posted, Duration::from_millis(1)).0 {}
        // Told of, and not there.
        assert!(port.take(ring).unwrap().is_none());
        assert!(port.take(ring).unwrap().is_none());
        let there = far_headers.slice(chunk.header_at..chunk.header_at + HEADER).unwrap();
        writing.write(&mut posted, peer, &header.unwrap(), &there, 2).unwrap();
        let mut longest = Duration::ZERO;
        let view = loop {
            let (is_told, slept) = look(&mut port, &mut posted, PATIENCE);
            longest = longest.max(slept);
            if is_told && let Some(view) = port.take(ring).unwrap() {
                break view;
            }
        };
        assert!(longest < Duration::from_millis(40), "it slept for {longest:?}");
        assert_eq!((view.header().message, view.len()), (number, 1000));
    }
}
