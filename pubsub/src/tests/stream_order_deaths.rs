//! Processes that die while their streams use messages.

use gpu::{Device, DeviceName};
use testkit::children::ForkedChild;

use super::deaths::pidfd_of;
use super::stream_order::{Gate, node_with, on_a_device};
use super::*;
use crate::Event;
use crate::Readiness;

fn sleep_for_ever() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(1));
    }
}

#[test]
fn stream_continues_after_the_death_of_its_publisher() {
    let (node, device) = node_with(&TopicSettings { depth: 8, ..on_a_device() });
    let participant = node.admit();
    let mut subscriber = node.subscriber();
    let mut slow = node.subscriber();
    let child = ForkedChild::new(|| {
        let node = node.joined(participant);
        let device = Device::open(DeviceName::emulated(0)).unwrap();
        let (publisher, stream) = (node.publisher(), device.stream().unwrap());
        let from = device.allocate(4096).unwrap();
        publisher.push_on(&stream, &from.whole(), TEST_TIMEOUT).unwrap();
        stream.synchronize(TEST_TIMEOUT).unwrap();
        Gate::new(&device).stop(&stream);
        for _ in 0..3 {
            publisher.push_on(&stream, &from.whole(), TEST_TIMEOUT).unwrap();
        }
        publisher.push(b"ready", TEST_TIMEOUT).unwrap();
        sleep_for_ever();
    });
    node.service.participants.add_pidfd(participant, pidfd_of(&child));
    let waiting = device.stream().unwrap();
    let first = subscriber.pull(TEST_TIMEOUT).unwrap();
    let lost = subscriber.pull_on(&waiting, TEST_TIMEOUT).unwrap();
    let released = subscriber.pull_on(&waiting, TEST_TIMEOUT).unwrap();
    released.release_on(&waiting).unwrap();
    // A message that is pulled and dropped.
    drop(subscriber.pull_on(&waiting, TEST_TIMEOUT).unwrap());
    let last = subscriber.pull(TEST_TIMEOUT).unwrap();
    assert_eq!(last.to_vec().unwrap(), b"ready");
    assert!(!waiting.is_done().unwrap());
    child.kill();
    node.reclaim(participant);
    waiting.synchronize(TEST_TIMEOUT).unwrap();
    assert!(child.was_killed());
    assert_eq!(lost.readiness().unwrap(), Readiness::Poisoned);
    assert_eq!(first.readiness().unwrap(), Readiness::Ready);
    assert_eq!(lost.to_vec().unwrap_err().kind(), ErrorKind::Poisoned);
    assert_eq!(first.length(), 4096);
    drop((first, lost, last));
    assert!(subscriber.try_pull().unwrap().is_none());
    // A slow reader skips messages that were never written.
    assert_eq!(slow.pull(TEST_TIMEOUT).unwrap().length(), 4096);
    assert_eq!(slow.pull(TEST_TIMEOUT).unwrap().to_vec().unwrap(), b"ready");
    assert_eq!(slow.missed(), 3);
    assert_eq!(slow.poll_event(), Some(Event::Gap { missed: 3 }));
    node.local.free_completed(&node.caller());
    assert_eq!(node.blocks_allocated(), 0);
}

#[test]
fn messages_held_by_a_dead_readers_stream_are_freed() {
    let (node, _device) = node_with(&TopicSettings { depth: 4, ..on_a_device() });
    let participant = node.admit();
    let publisher = node.publisher();
    let mut witness = node.subscriber();
    let child = ForkedChild::new(|| {
        let node = node.joined(participant);
        let device = Device::open(DeviceName::emulated(0)).unwrap();
        let (mut subscriber, stream) = (node.subscriber(), device.stream().unwrap());
        let publisher = node.publisher();
        publisher.push(b"here", TEST_TIMEOUT).unwrap();
        drop(subscriber.pull(TEST_TIMEOUT).unwrap());
        Gate::new(&device).stop(&stream);
        for _ in 0..2 {
            subscriber.pull_on(&stream, TEST_TIMEOUT).unwrap().release_on(&stream).unwrap();
        }
        publisher.push(b"ready", TEST_TIMEOUT).unwrap();
        sleep_for_ever();
    });
    node.service.participants.add_pidfd(participant, pidfd_of(&child));
    drop(witness.pull(TEST_TIMEOUT).unwrap());
    publisher.push(b"x", TEST_TIMEOUT).unwrap();
    publisher.push(b"y", TEST_TIMEOUT).unwrap();
    for _ in 0..3 {
        drop(witness.pull(TEST_TIMEOUT).unwrap());
    }
    // One of them is taken from it by an eviction before it dies.
    let (_, subscription_ids) = (0, node.topic.local().subscription_ids().collect::<Vec<_>>());
    let subscription_id = subscription_ids
        .into_iter()
        .find(|subscription_id| subscription_id.participant() == Some(participant))
        .unwrap();
    let held_for = Duration::from_secs(1);
    node.topic
        .evict_in(&node.caller(), (Direction::Local, subscription_id), held_for, node.controls())
        .unwrap();
    node.local.free_completed(&node.caller());
    assert_eq!(node.blocks_allocated(), 2, "its stream reads them");
    child.kill();
    node.reclaim(participant);
    assert!(child.was_killed());
    assert_eq!(node.blocks_allocated(), 0);
}
