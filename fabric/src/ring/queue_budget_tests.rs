use std::time::{Duration, Instant};

use super::super::{Port, PortEvent, Pushed, RingOptions};
use super::*;
use crate::{
    Access, AddressVector, CompletionQueue, Domain, Endpoint, EndpointKind, HostMemory, Mode,
    Query, QueueOptions, WaitStrategy,
};

const TIMEOUT: Duration = Duration::from_secs(10);

/// An offer of a provider that lets queues overrun.
fn unprotected_offer() -> crate::Offer {
    let mut offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first().unwrap();
    let mut capabilities = offer.capabilities().clone();
    capabilities.limits.resource_management = false;
    offer.capabilities = Arc::new(capabilities);
    offer
}

/// All free quotas.
fn take_all(queue_budget: &QueueBudget) -> (Vec<QueueQuota>, Error) {
    let mut quotas = Vec::new();
    loop {
        match queue_budget.take(NotifyMode::Immediate, 1 << 14) {
            Ok(quota) => quotas.push(quota),
            Err(error) => return (quotas, error),
        }
    }
}

#[test]
fn rings_have_equal_quotas_of_a_queue() {
    let mut capabilities = unprotected_offer().capabilities().clone();
    (capabilities.limits.transmit_depth, capabilities.limits.receive_depth) = (64, 128);
    let queue_budget = QueueBudget::of(&capabilities, 192);
    let (quotas, refused) = take_all(&queue_budget);
    assert_eq!(refused.kind(), ErrorKind::ResourceExhausted);
    let text = refused.to_string();
    assert!(text.contains("16 rings share") && text.contains("8 entries each"), "{text}");
    assert_eq!(quotas.len(), 16);
    assert!(quotas.iter().all(|quota| quota.max_chunks() == 7));
    drop(quotas);
    assert_eq!(queue_budget.take(NotifyMode::Immediate, 3).unwrap().max_chunks(), 3);
    // Quotas are larger where all rings of a port have room.
    let queue_budget = QueueBudget::of(&capabilities, 1 << 20);
    assert_eq!(queue_budget.take(NotifyMode::Immediate, 1 << 14).unwrap().max_chunks(), 31);
    // Where immediates consume receives, the receives bound the quotas, too.
    let mut receiving = capabilities.clone();
    receiving.mode |= Mode::RX_CQ_DATA;
    receiving.limits.receive_depth = 32;
    assert_eq!(take_all(&QueueBudget::of(&receiving, 4096)).0.len(), 4);
    // So do the entries of a lane's queue.
    let mut queue_budget = QueueBudget::of(&capabilities, 4096);
    queue_budget.limit(&capabilities, 192);
    assert_eq!(take_all(&queue_budget).0.len(), 16);
    // The provider keeps the queue from overrunning: no limit.
    capabilities.limits.resource_management = true;
    let quota = QueueBudget::of(&capabilities, 16).take(NotifyMode::Immediate, 1 << 14).unwrap();
    assert_eq!((quota.max_chunks(), quota.is_limited()), (1 << 14, false));
}

#[test]
fn long_queue_admits_thousands_of_rings() {
    let mut capabilities = unprotected_offer().capabilities().clone();
    (capabilities.limits.transmit_depth, capabilities.limits.receive_depth) = (1024, 16384);
    let direct =
        Capabilities { mode: capabilities.mode | Mode::RX_CQ_DATA, ..capabilities.clone() };
    for capabilities in [capabilities, direct] {
        let (quotas, _) = take_all(&QueueBudget::of(&capabilities, queue_entries(&capabilities)));
        assert!(quotas.len() >= 1900, "{} rings", quotas.len());
        // All quotas are equal.
        assert!(quotas.iter().all(|quota| quota.max_chunks() == 7));
    }
}

#[test]
fn notices_in_flight_fit_the_readers_queue() {
    const ENTRIES: usize = 128;
    let domain = Domain::open(&unprotected_offer()).unwrap();
    let mut sides = Vec::new();
    for _ in 0..2 {
        let addresses = AddressVector::open(&domain).unwrap();
        let options = QueueOptions { size: ENTRIES, waiting: WaitStrategy::default() };
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
    let (writing, answer) =
        writer.accept(peers[0], &reader.ring_offer(reading).unwrap(), 1000).unwrap();
    reader.connect(reading, peers[1], &answer).unwrap();
    let source = domain.register(HostMemory::zeroed(8).unwrap(), Access::WRITE).unwrap();
    source.enable_for(writer.endpoint()).unwrap();

    let mut sent = 0;
    let end = Instant::now() + TIMEOUT;
    loop {
        assert!(Instant::now() < end);
        let mut message = writer.begin(writing, 0, 8).unwrap();
        match writer.push(writing, &mut message, &source.all()).unwrap() {
            Pushed::Posted(_) => sent += 1,
            Pushed::Blocked(_) => break,
            // Small providers block a writer until its peer polls.
            Pushed::Busy => drop(reader.progress().unwrap()),
            Pushed::Written => panic!("nothing was written"),
        }
        let (PortEvent::Idle | PortEvent::Ring) = writer.progress().unwrap() else {
            panic!("unexpected completion")
        };
    }
    assert!((1..ENTRIES as u64 / 2).contains(&sent), "{sent} notices for {ENTRIES} entries");

    // The writer continues with credit for a part of these chunks.
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
            let (PortEvent::Idle | PortEvent::Ring) = port.progress().unwrap() else {
                panic!("unexpected completion")
            };
            port.return_all_credit(false);
        }
        while let Some(view) = reader.take(reading).unwrap() {
            assert_eq!(view.header().message, received);
            received += 1;
        }
    }
}

/// Two ports of a provider that lets queues overrun, and a ring from the first to the second.
struct Pair {
    writer: Port,
    reader: Port,
    writing: super::super::SenderId,
    reading: super::super::ReceiverId,
    source: crate::MemoryRegion,
    _addresses: [AddressVector; 2],
}

fn pair() -> Pair {
    let domain = Domain::open(&unprotected_offer()).unwrap();
    let open = || {
        let addresses = AddressVector::open(&domain).unwrap();
        let options = QueueOptions { size: 256, waiting: WaitStrategy::default() };
        let mut queue = CompletionQueue::open_with(&domain, options).unwrap();
        let builder = Endpoint::builder(&domain).addresses(&addresses);
        let endpoint = builder.queue(&mut queue).open().unwrap();
        (Port::new(endpoint, queue), addresses)
    };
    let ((mut writer, near), (mut reader, far)) = (open(), open());
    let to_reader = near.insert(&reader.endpoint().address().unwrap()).unwrap();
    let to_writer = far.insert(&writer.endpoint().address().unwrap()).unwrap();
    let options = RingOptions::new(reader.endpoint(), 1 << 20).unwrap();
    let reading = reader.offer(&options).unwrap();
    let (writing, answer) =
        writer.accept(to_reader, &reader.ring_offer(reading).unwrap(), 1000).unwrap();
    reader.connect(reading, to_writer, &answer).unwrap();
    let source = domain.register(HostMemory::zeroed(8).unwrap(), Access::WRITE).unwrap();
    source.enable_for(writer.endpoint()).unwrap();
    Pair { writer, reader, writing, reading, source, _addresses: [near, far] }
}

impl Pair {
    /// Makes progress on both ports until a condition holds.
    fn until(&mut self, what: &str, mut is_met: impl FnMut(&mut Self) -> bool) {
        let end = Instant::now() + TIMEOUT;
        while !is_met(self) {
            assert!(Instant::now() < end, "timed out before {what}");
            for port in [&mut self.writer, &mut self.reader] {
                let (PortEvent::Idle | PortEvent::Ring) = port.progress().unwrap() else {
                    panic!("unexpected completion")
                };
            }
        }
    }

    fn send(&mut self) {
        let mut message = self.writer.begin(self.writing, 0, 8).unwrap();
        self.until("a message is written", |pair| {
            let pushed = pair.writer.push(pair.writing, &mut message, &pair.source.all()).unwrap();
            matches!(pushed, Pushed::Posted(_))
        });
    }
}

#[test]
fn quota_is_held_until_the_last_credit_arrives() {
    let mut pair = pair();
    pair.send();
    pair.send();
    let writing = pair.writing;
    pair.writer.drop_sender(writing);
    pair.until("the end notice arrives", |pair| {
        drop(pair.reader.take(pair.reading).unwrap_or(None));
        pair.reader.receiver(pair.reading).unwrap().is_end_of_stream()
    });
    pair.until("the end notice is sent", |pair| pair.writer.quarantined_quotas() == 1);
    // The reader returns the last credit, which frees the quota.
    let reading = pair.reading;
    pair.reader.close_receiver(reading).unwrap();
    pair.until("the last credit arrives", |pair| pair.writer.rings() == (0, 0));
    assert_eq!(pair.writer.quarantined_quotas(), 0);
    assert_eq!(pair.reader.quarantined_quotas(), 0);
}

#[test]
fn quotas_of_forgotten_rings_are_counted() {
    let mut pair = pair();
    pair.send();
    let reading = pair.reading;
    pair.reader.forget(reading);
    assert_eq!(pair.reader.quarantined_quotas(), 1);
}
