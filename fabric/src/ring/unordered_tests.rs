//! Rings by a provider that does not promise that writes keep their order.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Port, RingOptions, Turn};
use crate::{
    Access, AddressVector, Capabilities, CompletionQueue, Domain, Endpoint, EndpointKind,
    HostMemory, Order, Query,
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
