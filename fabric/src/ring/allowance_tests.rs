use std::time::{Duration, Instant};

use super::super::{Port, Pushed, RingOptions, Turn};
use super::*;
use crate::{
    Access, AddressVector, CompletionQueue, Domain, Endpoint, EndpointKind, HostMemory, Mode,
    Query, QueueOptions, Waiting,
};

const PATIENCE: Duration = Duration::from_secs(10);

/// An offer of a provider that lets queues overrun.
fn careless() -> crate::Offer {
    let mut offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first().unwrap();
    let facts = Capabilities { protects_queues: false, ..offer.capabilities().clone() };
    offer.capabilities = Arc::new(facts);
    offer
}

#[test]
fn rings_share_the_room_of_a_queue() {
    let facts = careless().capabilities().clone();
    let facts = Capabilities { transmit_depth: 64, receive_depth: 128, ..facts };
    let allowance = Allowance::of(&facts, 192);
    let first = allowance.take(Notify::Immediate, 1 << 14).unwrap();
    assert_eq!(first.most_chunks(), 15);
    let mut others = Vec::new();
    let refused = loop {
        match allowance.take(Notify::Immediate, 1 << 14) {
            Ok(quota) => others.push(quota),
            Err(error) => break error,
        }
    };
    assert_eq!(refused.kind(), ErrorKind::ResourceExhausted);
    let taken: u64 = others.iter().map(|quota| quota.taken).sum();
    assert!((100..=112).contains(&taken), "{taken} of 112");
    others.clear();
    assert_eq!(allowance.take(Notify::Immediate, 3).unwrap().most_chunks(), 3);
    // Where immediates use receives up, there are not more than these.
    let facts = Capabilities { mode: facts.mode | Mode::RX_CQ_DATA, receive_depth: 8, ..facts };
    let allowance = Allowance::of(&facts, 0);
    assert_eq!(allowance.take(Notify::Immediate, 100).unwrap().most_chunks(), LEAST - 1);
    // And none of it matters where the provider sees to it.
    let facts = Capabilities { protects_queues: true, ..facts };
    assert_eq!(
        Allowance::of(&facts, 16).take(Notify::Immediate, 1 << 14).unwrap().most_chunks(),
        1 << 14
    );
}

#[test]
fn notices_on_their_way_fit_the_reader_s_queue() {
    const ENTRIES: usize = 128;
    let domain = Domain::open(&careless()).unwrap();
    let mut sides = Vec::new();
    for _ in 0..2 {
        let addresses = AddressVector::open(&domain).unwrap();
        let options = QueueOptions { size: ENTRIES, waiting: Waiting::default() };
        let mut queue = CompletionQueue::open_with(&domain, options).unwrap();
        let builder = Endpoint::builder(&domain).addresses(&addresses);
        let endpoint = builder.queue(&mut queue).open().unwrap();
        sides.push((Port::new(endpoint, queue), addresses));
    }
    let at = [0, 1].map(|side: usize| sides[side].0.endpoint().address().unwrap());
    let peers = [0, 1].map(|side: usize| sides[side].1.insert(&at[1 - side]).unwrap());
    let [(writer, _), (reader, _)] = &mut sides[..] else { panic!("two sides") };
    // Room for thousands of messages.
    let options = RingOptions::new(reader.endpoint(), 1 << 20).unwrap();
    let reading = reader.offer(&options).unwrap();
    let (writing, answer) = writer.accept(peers[0], &reader.terms(reading).unwrap(), 1000).unwrap();
    reader.connect(reading, peers[1], &answer).unwrap();
    let source = domain.register(HostMemory::zeroed(8).unwrap(), Access::WRITE).unwrap();
    source.enable_for(writer.endpoint()).unwrap();

    let mut sent = 0;
    let end = Instant::now() + PATIENCE;
    loop {
        assert!(Instant::now() < end);
        let mut message = writer.begin(writing, 0, 8).unwrap();
        match writer.push(writing, &mut message, &source.all()).unwrap() {
            Pushed::Posted(_) => sent += 1,
            Pushed::Blocked(_) => break,
            // Small providers hold a writer up whose peer does not look: it may take a look.
            Pushed::Busy => drop(reader.turn().unwrap()),
            Pushed::Written => panic!("nothing was written"),
        }
        let (Turn::Idle | Turn::Ring) = writer.turn().unwrap() else { panic!("nobody's") };
    }
    assert!((1..ENTRIES as u64 / 2).contains(&sent), "{sent} notices for {ENTRIES} entries");

    // It goes on when the reader does, with credit for a part of so few chunks.
    let goal = 20 * sent;
    let (mut received, mut sent) = (0, sent);
    while received < goal {
        assert!(Instant::now() < end, "{received} of {goal}");
        if sent < goal {
            let mut message = writer.begin(writing, 0, 8).unwrap();
            let pushed = writer.push(writing, &mut message, &source.all()).unwrap();
            sent += u64::from(matches!(pushed, Pushed::Posted(_)));
        }
        for port in [&mut *writer, &mut *reader] {
            let (Turn::Idle | Turn::Ring) = port.turn().unwrap() else { panic!("nobody's") };
            port.tell_all(false);
        }
        while let Some(view) = reader.take(reading).unwrap() {
            assert_eq!(view.header().message, received);
            received += 1;
        }
    }
}
