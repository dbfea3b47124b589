//! Messages in stream order.

use std::sync::PoisonError;
use std::time::Instant;

use gpu::{Device, DeviceName, Memory, Slice, Stream, emulated};

use super::devices::MISBEHAVING;
use super::*;
use crate::{Attempt, Event, MemoryLocation, Readiness};

/// An emulated device that is made to fail.
const FRAGILE: u32 = 1;

pub(super) fn on_a_device() -> TopicSettings {
    let memory = MemoryLocation::Device(DeviceName::emulated(0));
    TopicSettings { memory, ..settings() }
}

/// A node with memory, and a device.
pub(super) fn node_with(settings: &TopicSettings) -> (TestNode, Device) {
    let node = TestNode::new(settings);
    node.service.grow(node.local.id(), 4 << 20);
    node.service.grow(node.inbound.id(), 4 << 20);
    (node, Device::open(DeviceName::emulated(0)).unwrap())
}

/// Blocks streams until it is opened.
pub(super) struct Gate {
    word: Memory,
    key: Stream,
}

impl Gate {
    pub(super) fn new(device: &Device) -> Self {
        let (word, key) = (device.allocate(4096).unwrap(), device.stream().unwrap());
        key.fill(&word.whole(), 0).unwrap();
        key.synchronize(TEST_TIMEOUT).unwrap();
        Self { word, key }
    }

    fn word(&self) -> Slice {
        self.word.slice(0, 4).unwrap()
    }

    pub(super) fn stop(&self, stream: &Stream) {
        stream.wait_for_word(&self.word(), 1).unwrap();
    }

    pub(super) fn open(&self) {
        self.key.write_word(&self.word(), 1).unwrap();
    }
}

fn filled(device: &Device, byte: u8) -> Memory {
    let memory = device.allocate(4096).unwrap();
    let stream = device.stream().unwrap();
    stream.fill(&memory.whole(), byte).unwrap();
    stream.synchronize(TEST_TIMEOUT).unwrap();
    memory
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + TEST_TIMEOUT;
    while !is_so() {
        assert!(Instant::now() < end, "waited for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

impl TestNode {
    /// Everything is freed, at the latest once streams have finished.
    fn assert_nothing_allocated(&self) {
        until("all blocks to be freed", || {
            self.local.free_completed(&self.caller());
            self.inbound.free_completed(&self.caller());
            self.blocks_allocated() == 0
        });
    }
}

#[test]
fn message_is_received_at_once_and_its_bytes_in_order() {
    let (node, device) = node_with(&on_a_device());
    let (publisher, mut subscriber) = (node.publisher(), node.subscriber());
    let (producing, consuming) = (device.stream().unwrap(), device.stream().unwrap());
    let from = filled(&device, 7);
    let to = filled(&device, 0);
    let gate = Gate::new(&device);
    gate.stop(&producing);
    let sent = publisher.push_on(&producing, &from.whole(), TEST_TIMEOUT).unwrap();
    assert_eq!(sent.subscribers, 1);
    // Later work on the stream does not change the message.
    producing.fill(&from.whole(), 8).unwrap();
    let sample = subscriber.pull_on(&consuming, TEST_TIMEOUT).unwrap();
    assert_eq!((sample.length(), sample.readiness().unwrap()), (4096, Readiness::Pending));
    consuming.copy(&to.whole(), sample.slice()).unwrap();
    assert!(consuming.synchronize(SHORT_TIMEOUT).is_err(), "the stream does not wait");
    gate.open();
    consuming.synchronize(TEST_TIMEOUT).unwrap();
    assert_eq!(sample.readiness().unwrap(), Readiness::Ready);
    assert_eq!(sample.readiness().unwrap(), Readiness::Ready);
    let mut bytes = [0; 4096];
    consuming.download(&to.whole(), &mut bytes, TEST_TIMEOUT).unwrap();
    assert_eq!(bytes, [7; 4096]);
    drop(sample);
    node.assert_nothing_allocated();
}

#[test]
fn pull_waits_until_the_message_is_written() {
    let (node, device) = node_with(&on_a_device());
    let (publisher, other) = (node.publisher(), node.publisher());
    let mut subscriber = node.subscriber();
    let stream = device.stream().unwrap();
    let gate = Gate::new(&device);
    gate.stop(&stream);
    let loan = publisher.loan(3, TEST_TIMEOUT).unwrap();
    stream.fill(loan.slice(), 1).unwrap();
    loan.publish_on(&stream, TEST_TIMEOUT).unwrap();
    other.push(b"second", TEST_TIMEOUT).unwrap();
    assert!(subscriber.try_pull().unwrap().is_none());
    assert_eq!(subscriber.pull(SHORT_TIMEOUT).unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    std::thread::scope(|scope| {
        let pulled = scope.spawn(|| subscriber.pull(TEST_TIMEOUT).unwrap().to_vec().unwrap());
        std::thread::sleep(SHORT_TIMEOUT);
        assert!(!pulled.is_finished());
        gate.open();
        assert_eq!(pulled.join().unwrap(), [1; 3]);
    });
    assert_eq!(subscriber.pull(TEST_TIMEOUT).unwrap().to_vec().unwrap(), b"second");
    assert_eq!((subscriber.missed(), subscriber.poll_event()), (0, None));
    node.assert_nothing_allocated();
    // A message that was taken ahead and never read.
    let gate = Gate::new(&device);
    gate.stop(&stream);
    publisher.push_on(&stream, &filled(&device, 1).whole(), TEST_TIMEOUT).unwrap();
    assert!(subscriber.try_pull().unwrap().is_none());
    drop(subscriber);
    assert_eq!(node.blocks_allocated(), 1, "the stream is going to write there");
    gate.open();
    node.assert_nothing_allocated();
}

#[test]
fn block_is_not_reused_before_its_stream_write() {
    let settings = TopicSettings { reliability: Reliability::DropOldest, ..on_a_device() };
    let (node, device) = node_with(&settings);
    let publisher = node.publisher();
    let mut subscriber = node.subscriber();
    let stream = device.stream().unwrap();
    let gate = Gate::new(&device);
    gate.stop(&stream);
    let from = filled(&device, 5);
    // Released unread, dropped unread, and more than fit.
    for _ in 0..10 {
        publisher.push_on(&stream, &from.whole(), TEST_TIMEOUT).unwrap();
    }
    let waiting = device.stream().unwrap();
    drop(subscriber.pull_on(&waiting, TEST_TIMEOUT).unwrap());
    assert_eq!(node.blocks_allocated(), 10);
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..10 {
        let loan = publisher.loan(4096, TEST_TIMEOUT).unwrap();
        seen.insert(loan.address());
        drop(loan);
    }
    assert_eq!((seen.len(), node.blocks_allocated()), (1, 10));
    gate.open();
    waiting.synchronize(TEST_TIMEOUT).unwrap();
    while subscriber.pull(SHORT_TIMEOUT).is_ok() {}
    node.assert_nothing_allocated();
    // Repeatedly in the same memory, in any order of streams.
    for number in 0..50 {
        stream.fill(&from.whole(), number).unwrap();
        publisher.push_on(&stream, &from.whole(), TEST_TIMEOUT).unwrap();
        let sample = subscriber.pull(TEST_TIMEOUT).unwrap();
        assert_eq!(sample.to_vec().unwrap(), [number; 4096]);
    }
}

#[test]
fn unpublished_block_is_retained_until_its_stream_has_finished() {
    let settings = TopicSettings { depth: 1, loans: 8, ..on_a_device() };
    let (node, device) = node_with(&settings);
    let publisher = node.publisher();
    let stream = device.stream().unwrap();
    let from = filled(&device, 1);
    let gate = Gate::new(&device);
    gate.stop(&stream);
    // A publish without subscribers.
    let sent = publisher.push_on(&stream, &from.whole(), TEST_TIMEOUT).unwrap();
    assert_eq!((sent.position, sent.subscribers), (None, 0));
    assert_eq!(node.blocks_allocated(), 1);
    let mut subscriber = node.subscriber();
    publisher.push(b"x", TEST_TIMEOUT).unwrap();
    // There is no room for an attempt, or before the timeout.
    assert!(publisher.try_push_on(&stream, &from.whole()).unwrap().is_none());
    let error = publisher.push_on(&stream, &from.whole(), SHORT_TIMEOUT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    let mut loan = publisher.loan(4096, TEST_TIMEOUT).unwrap();
    for _ in 0..2 {
        stream.fill(loan.slice(), 9).unwrap();
        loan = match loan.try_publish_on(&stream).unwrap() {
            Attempt::Full(loan) => loan,
            Attempt::Sent(sent) => panic!("{sent:?}"),
        };
    }
    assert_eq!(node.blocks_allocated(), 5);
    drop(subscriber.pull(TEST_TIMEOUT).unwrap());
    // A block that a stream uses cannot be published as complete.
    let mut other = publisher.loan(4096, TEST_TIMEOUT).unwrap();
    drop(subscriber);
    subscriber = node.subscriber();
    assert!(matches!(loan.publish_on_within(&stream, TEST_TIMEOUT).unwrap(), Attempt::Sent(_)));
    other = match other.try_publish_on(&stream).unwrap() {
        Attempt::Full(other) => other,
        Attempt::Sent(sent) => panic!("{sent:?}"),
    };
    assert_eq!(other.publish(TEST_TIMEOUT).unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    gate.open();
    assert_eq!(subscriber.pull(TEST_TIMEOUT).unwrap().to_vec().unwrap(), [9; 4096]);
    node.assert_nothing_allocated();
}

#[test]
fn unsignalled_write_is_retained_until_its_stream_has_finished() {
    let name = DeviceName::emulated(FRAGILE);
    let _alone = MISBEHAVING.lock().unwrap_or_else(PoisonError::into_inner);
    let memory = MemoryLocation::Device(name);
    let (node, other) = node_with(&TopicSettings { memory, loans: 20, ..settings() });
    let device = Device::open(name).unwrap();
    device.enable_peer(&other).unwrap();
    let publisher = node.publisher();
    let (mut subscriber, mut late) = (node.subscriber(), node.subscriber());
    let (stream, waiting) = (device.stream().unwrap(), device.stream().unwrap());
    let gate = Gate::new(&other);
    gate.stop(&stream);
    let loan = publisher.loan(4096, TEST_TIMEOUT).unwrap();
    let address = loan.address();
    stream.fill(loan.slice(), 1).unwrap();
    emulated::refuse_words(FRAGILE, true);
    let error = loan.publish_on(&stream, TEST_TIMEOUT).unwrap_err();
    emulated::refuse_words(FRAGILE, false);
    assert_eq!(error.kind(), ErrorKind::Failed);
    // It was published, and the stream continues to write.
    let sample = subscriber.pull_on(&waiting, TEST_TIMEOUT).unwrap();
    node.local.free_completed(&node.caller());
    assert_eq!(sample.readiness().unwrap(), Readiness::Pending);
    drop(sample);
    assert!(late.try_pull().unwrap().is_none());
    drop(late);
    node.local.free_completed(&node.caller());
    assert_eq!(node.blocks_allocated(), 1);
    let loans: Vec<_> = (0..20).map(|_| publisher.loan(4096, TEST_TIMEOUT).unwrap()).collect();
    assert!(loans.iter().all(|loan| loan.address() != address));
    drop(loans);
    assert!(!waiting.is_done().unwrap());
    gate.open();
    node.assert_nothing_allocated();
    waiting.synchronize(TEST_TIMEOUT).unwrap();
    // Once more, for a reader on the host.
    let loan = publisher.loan(4096, TEST_TIMEOUT).unwrap();
    emulated::refuse_words(FRAGILE, true);
    assert!(loan.publish_on(&stream, TEST_TIMEOUT).is_err());
    emulated::refuse_words(FRAGILE, false);
    until("the message to be poisoned", || {
        node.local.free_completed(&node.caller());
        assert!(subscriber.try_pull().unwrap().is_none());
        subscriber.missed() == 1
    });
    assert_eq!(subscriber.poll_event(), Some(Event::Gap { missed: 1 }));
    node.assert_nothing_allocated();
}

#[test]
fn undetectable_write_is_skipped_and_its_block_retained() {
    let name = DeviceName::emulated(FRAGILE);
    let _alone = MISBEHAVING.lock().unwrap_or_else(PoisonError::into_inner);
    let memory = MemoryLocation::Device(name);
    let settings = TopicSettings { memory, depth: 1, loans: 20, ..settings() };
    let (node, other) = node_with(&settings);
    let device = Device::open(name).unwrap();
    device.enable_peer(&other).unwrap();
    let (publisher, mut subscriber) = (node.publisher(), node.subscriber());
    let (stream, gate) = (device.stream().unwrap(), Gate::new(&other));
    gate.stop(&stream);
    let loan = publisher.loan(4096, TEST_TIMEOUT).unwrap();
    let address = loan.address();
    stream.fill(loan.slice(), 1).unwrap();
    emulated::refuse_words(FRAGILE, true);
    emulated::refuse_points(FRAGILE, true);
    let published = loan.publish_on(&stream, TEST_TIMEOUT);
    node.local.free_completed(&node.caller());
    emulated::refuse_points(FRAGILE, false);
    emulated::refuse_words(FRAGILE, false);
    assert_eq!(published.unwrap_err().kind(), ErrorKind::Failed);
    // No reader waits for it, though its entry blocks the queue.
    assert!(subscriber.try_pull().unwrap().is_none());
    assert_eq!(subscriber.missed(), 1);
    publisher.push(b"next", TEST_TIMEOUT).unwrap();
    assert_eq!(subscriber.pull(TEST_TIMEOUT).unwrap().to_vec().unwrap(), b"next");
    // The stream may still write to the block, and no call can tell when it ends.
    for has_finished in [false, true] {
        if has_finished {
            gate.open();
            stream.synchronize(TEST_TIMEOUT).unwrap();
        }
        node.local.free_completed(&node.caller());
        assert_eq!(node.blocks_allocated(), 1);
        let loans: Vec<_> = (0..20).map(|_| publisher.loan(4096, TEST_TIMEOUT).unwrap()).collect();
        assert!(loans.iter().all(|loan| loan.address() != address));
    }
    // The message is not polled any more, and its process stays a member.
    assert!(!node.local.is_waiting_for_streams() && !node.local.poll_streams(&node.caller()));
    assert!(!node.local.drain_streams(&node.caller(), Instant::now() + TEST_TIMEOUT));
    drop((publisher, subscriber));
    node.local.reclaim(&node.caller(), node.service.me).unwrap();
    assert_eq!(node.blocks_allocated(), 0);
}

#[test]
fn failed_publish_retains_its_block_until_the_stream_finished() {
    let (node, device) = node_with(&on_a_device());
    let (publisher, _subscriber) = (node.publisher(), node.subscriber());
    let stream = device.stream().unwrap();
    let gate = Gate::new(&device);
    gate.stop(&stream);
    let loan = publisher.loan(4096, TEST_TIMEOUT).unwrap();
    stream.fill(loan.slice(), 1).unwrap();
    // As for a stream of another kind of device.
    let refused = Error::new("test", ErrorKind::InvalidArgument, "a stream of another kind");
    let error = loan.publish_if(Err(refused), &stream, None).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    node.local.free_completed(&node.caller());
    assert_eq!(node.blocks_allocated(), 1);
    gate.open();
    node.assert_nothing_allocated();
}

#[test]
fn failed_device_poisons_its_unwritten_messages() {
    let name = DeviceName::emulated(FRAGILE);
    let _alone = MISBEHAVING.lock().unwrap_or_else(PoisonError::into_inner);
    let memory = MemoryLocation::Device(name);
    let (node, other) = node_with(&TopicSettings { memory, ..settings() });
    let device = Device::open(name).unwrap();
    device.enable_peer(&other).unwrap();
    let (publisher, mut subscriber) = (node.publisher(), node.subscriber());
    let (failing, waiting) = (device.stream().unwrap(), device.stream().unwrap());
    // The gate belongs to another device, which does not fail.
    let gate = Gate::new(&other);
    gate.stop(&failing);
    let loan = publisher.loan(100, TEST_TIMEOUT).unwrap();
    failing.fill(loan.slice(), 1).unwrap();
    loan.publish_on(&failing, TEST_TIMEOUT).unwrap();
    let sample = subscriber.pull_on(&waiting, TEST_TIMEOUT).unwrap();
    publisher.push(b"afterwards", TEST_TIMEOUT).unwrap();
    emulated::fail_after(FRAGILE, 0);
    gate.open();
    assert!(failing.synchronize(TEST_TIMEOUT).is_err());
    assert!(!waiting.is_done().unwrap());
    // The failure is detected by the next call, or at the end.
    drop(publisher);
    waiting.synchronize(TEST_TIMEOUT).unwrap();
    assert_eq!(sample.readiness().unwrap(), Readiness::Poisoned);
    assert_eq!(sample.to_vec().unwrap_err().kind(), ErrorKind::Poisoned);
    drop(sample);
    assert_eq!(subscriber.pull(TEST_TIMEOUT).unwrap().to_vec().unwrap(), b"afterwards");
    node.assert_nothing_allocated();
    // A failed stream is rejected before the publish.
    let publisher = node.publisher();
    let loan = publisher.loan(100, TEST_TIMEOUT).unwrap();
    let _ = loan.publish_on(&failing, TEST_TIMEOUT);
    while subscriber.pull(SHORT_TIMEOUT).is_ok() {}
}

#[test]
fn stream_releases_the_messages_that_it_has_read() {
    let (node, device) = node_with(&TopicSettings { depth: 2, max_held: 1, ..on_a_device() });
    let (publisher, mut subscriber) = (node.publisher(), node.subscriber());
    let reading = device.stream().unwrap();
    let gate = Gate::new(&device);
    gate.stop(&reading);
    for _ in 0..3 {
        publisher.push(b"x", TEST_TIMEOUT).unwrap();
        subscriber.pull_on(&reading, TEST_TIMEOUT).unwrap().release_on(&reading).unwrap();
    }
    // The maximum of messages is held: there is no room.
    assert!(publisher.try_push(b"y").unwrap().is_none());
    assert_eq!(
        publisher.push(b"y", SHORT_TIMEOUT).unwrap_err().kind(),
        ErrorKind::DeadlineExceeded
    );
    let held = node.topic.subscribers()[0].held;
    assert_eq!(held, 3);
    std::thread::scope(|scope| {
        let pushed = scope.spawn(|| publisher.push(b"y", TEST_TIMEOUT).unwrap());
        std::thread::sleep(SHORT_TIMEOUT);
        assert!(!pushed.is_finished());
        gate.open();
        assert_eq!(pushed.join().unwrap().subscribers, 1);
    });
    // A waiting subscriber detects the release, too, and so does the end of the subscription.
    subscriber.pull_on(&reading, TEST_TIMEOUT).unwrap().release_on(&reading).unwrap();
    assert!(subscriber.pull(SHORT_TIMEOUT).is_err());
    publisher.push(b"z", TEST_TIMEOUT).unwrap();
    subscriber.pull(TEST_TIMEOUT).unwrap().release_on(&reading).unwrap();
    drop(subscriber);
    node.assert_nothing_allocated();
}

/// A stream that takes longer than the end of a subscription waits.
#[test]
fn slow_stream_releases_messages_after_its_subscriber_ended() {
    let (node, device) = node_with(&TopicSettings { depth: 2, ..on_a_device() });
    let (publisher, mut subscriber) = (node.publisher(), node.subscriber());
    let reading = device.stream().unwrap();
    let gate = Gate::new(&device);
    gate.stop(&reading);
    publisher.push(b"x", TEST_TIMEOUT).unwrap();
    subscriber.pull_on(&reading, TEST_TIMEOUT).unwrap().release_on(&reading).unwrap();
    drop(subscriber);
    assert_eq!(node.blocks_allocated(), 1, "the stream may still read it");
    gate.open();
    node.assert_nothing_allocated();
    until("the subscription to end", || {
        node.topic.local().subscriptions_of(node.service.me).count() == 0
    });
}

#[test]
fn stream_releases_host_messages_without_a_wait() {
    let node = TestNode::new(&TopicSettings { depth: 2, max_held: 1, ..settings() });
    let device = Device::open(DeviceName::emulated(0)).unwrap();
    let (publisher, mut subscriber) = (node.publisher(), node.subscriber());
    let reading = device.stream().unwrap();
    let gate = Gate::new(&device);
    gate.stop(&reading);
    for _ in 0..3 {
        publisher.push(b"x", TEST_TIMEOUT).unwrap();
        subscriber.pull_on(&reading, TEST_TIMEOUT).unwrap().release_on(&reading).unwrap();
    }
    // The maximum of messages is held: there is no room.
    assert!(publisher.try_push(b"y").unwrap().is_none());
    assert_eq!(
        publisher.push(b"y", SHORT_TIMEOUT).unwrap_err().kind(),
        ErrorKind::DeadlineExceeded
    );
    std::thread::scope(|scope| {
        let pushed = scope.spawn(|| publisher.push(b"y", TEST_TIMEOUT).unwrap());
        std::thread::sleep(SHORT_TIMEOUT);
        assert!(!pushed.is_finished());
        gate.open();
        assert_eq!(pushed.join().unwrap().subscribers, 1);
    });
    drop(subscriber.pull(TEST_TIMEOUT).unwrap());
    node.assert_nothing_allocated();
    // The subscriber is evicted in the meantime: the blocks are not reused.
    let gate = Gate::new(&device);
    gate.stop(&reading);
    for _ in 0..3 {
        publisher.push(b"x", TEST_TIMEOUT).unwrap();
        subscriber.pull_on(&reading, TEST_TIMEOUT).unwrap().release_on(&reading).unwrap();
    }
    let (_, subscription_ids) = node.topic.blocking_subscribers(Direction::Local).unwrap();
    let at = (Direction::Local, subscription_ids[0]);
    let held_for = Duration::from_secs(1);
    node.topic.evict_in(&node.caller(), at, held_for, node.controls()).unwrap();
    node.local.free_completed(&node.caller());
    assert_eq!(node.blocks_allocated(), 3);
    gate.open();
    drop(subscriber);
    node.assert_nothing_allocated();
}

#[test]
fn eviction_does_not_free_blocks_that_a_stream_reads() {
    let settings = TopicSettings { depth: 1, loans: 200, ..on_a_device() };
    let (node, device) = node_with(&settings);
    let (publisher, mut subscriber) = (node.publisher(), node.subscriber());
    let (reading, to) = (device.stream().unwrap(), filled(&device, 0));
    let from = filled(&device, 6);
    let gate = Gate::new(&device);
    gate.stop(&reading);
    publisher.push_slice(&from.whole(), TEST_TIMEOUT).unwrap();
    let sample = subscriber.pull_on(&reading, TEST_TIMEOUT).unwrap();
    let address = sample.address();
    reading.copy(&to.whole(), sample.slice()).unwrap();
    sample.release_on(&reading).unwrap();
    let subscription_id = node.topic.local().subscription_ids().next().unwrap();
    let at = (Direction::Local, subscription_id);
    let held_for = Duration::from_secs(1);
    node.topic.evict_in(&node.caller(), at, held_for, node.controls()).unwrap();
    assert_eq!(subscriber.try_pull().unwrap_err().kind(), ErrorKind::Evicted);
    // All free blocks, but not this one.
    let mut loans = Vec::new();
    while let Some(loan) = publisher.try_loan(4096).unwrap() {
        assert_ne!(loan.address(), address);
        loans.push(loan);
        if loans.len() >= 200 {
            break;
        }
    }
    loans.clear();
    gate.open();
    reading.synchronize(TEST_TIMEOUT).unwrap();
    let mut bytes = [0; 4096];
    reading.download(&to.whole(), &mut bytes, TEST_TIMEOUT).unwrap();
    assert_eq!(bytes, [6; 4096]);
    drop(subscriber);
    node.assert_nothing_allocated();
    // A sample of an evicted subscriber is released by a stream like any other.
    let mut subscriber = node.subscriber();
    publisher.push(b"x", TEST_TIMEOUT).unwrap();
    let sample = subscriber.pull(TEST_TIMEOUT).unwrap();
    let subscription_id = node.topic.local().subscription_ids().next().unwrap();
    let at = (Direction::Local, subscription_id);
    node.topic.evict_in(&node.caller(), at, held_for, node.controls()).unwrap();
    sample.release_on(&reading).unwrap();
    drop(subscriber);
    node.assert_nothing_allocated();
}

#[test]
fn holder_of_an_unwritten_message_is_not_blocking() {
    let (node, device) = node_with(&TopicSettings { depth: 1, ..on_a_device() });
    let (publisher, mut subscriber) = (node.publisher(), node.subscriber());
    let stream = device.stream().unwrap();
    let gate = Gate::new(&device);
    gate.stop(&stream);
    publisher.push_on(&stream, &filled(&device, 1).whole(), TEST_TIMEOUT).unwrap();
    assert!(subscriber.try_pull().unwrap().is_none());
    publisher.push_on(&stream, &filled(&device, 2).whole(), TEST_TIMEOUT).unwrap();
    let (position, holders) = node.topic.blocking_subscribers(Direction::Local).unwrap();
    let waits = || node.topic.waits_for_stream(holders[0], node.local.control());
    assert!(position == 1 && waits());
    gate.open();
    let sample = subscriber.pull(TEST_TIMEOUT).unwrap();
    until("the next message to be written", || !waits());
    drop(sample);
    assert!(!waits());
}

#[test]
fn publish_to_host_memory_waits_for_the_stream() {
    let node = TestNode::new(&settings());
    let device = Device::open(DeviceName::emulated(0)).unwrap();
    let (publisher, mut subscriber) = (node.publisher(), node.subscriber());
    let (stream, from) = (device.stream().unwrap(), filled(&device, 1));
    stream.fill(&from.whole(), 2).unwrap();
    publisher.push_on(&stream, &from.whole(), TEST_TIMEOUT).unwrap();
    let sample = subscriber.pull_on(&stream, TEST_TIMEOUT).unwrap();
    assert_eq!(sample.readiness().unwrap(), Readiness::Ready);
    assert_eq!(sample.to_vec().unwrap(), [2; 4096]);
    sample.release_on(&stream).unwrap();
    let mut loan = publisher.loan(3, TEST_TIMEOUT).unwrap();
    loan.write(0, b"abc").unwrap();
    loan.publish_on(&stream, TEST_TIMEOUT).unwrap();
    assert!(publisher.try_push_on(&stream, &from.whole()).unwrap().is_some());
    assert_eq!(subscriber.pull(TEST_TIMEOUT).unwrap().to_vec().unwrap(), b"abc");
    let sample = subscriber.try_pull_on(&stream).unwrap().unwrap();
    let gate = Gate::new(&device);
    gate.stop(&stream);
    let loan = publisher.loan(3, TEST_TIMEOUT).unwrap();
    let error = loan.publish_on(&stream, SHORT_TIMEOUT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    gate.open();
    sample.release_on(&stream).unwrap();
    node.assert_nothing_allocated();
    assert!(!matches!(subscriber.poll_event(), Some(Event::Gap { .. })));
}
