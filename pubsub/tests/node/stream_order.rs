//! Messages in stream order between processes, some of which are killed.
//!
//! The device is the one that `TEST_DEVICE` names, or an emulated one.

use std::time::Duration;

use gpu::{Device, Stream};
use pubsub::{Event, Readiness, Row, Sample, TopicSettings};

use crate::support::{
    ChildProcess, Gate, TIMEOUT, TestDir, device_topic, message, number_of, publish, publish_on,
    until,
};

/// Copies a message to memory of this process, in stream order.
fn copy(device: &Device, stream: &Stream, sample: &Sample) -> gpu::Slice {
    let target = device.allocate(4096).unwrap().slice(0, sample.length()).unwrap();
    stream.copy(&target, sample.slice()).unwrap();
    target
}

#[track_caller]
fn check(stream: &Stream, copy: &gpu::Slice, number: u64) {
    let mut bytes = vec![0; copy.length() as usize];
    stream.download(copy, &mut bytes, TIMEOUT).unwrap();
    assert!(bytes == message(number), "message {number} differs from what was published");
}

#[test]
fn messages_flow_from_stream_to_stream() {
    const COUNT: u64 = 300;
    let test_dir = TestDir::new();
    let node = test_dir.join();
    let (settings, device) = device_topic();
    let topic = node.topic("numbers", &settings).unwrap();
    let mut subscribers = [topic.subscriber().unwrap(), topic.subscriber().unwrap()];
    let stream = device.stream().unwrap();
    let mut other = ChildProcess::start(&format!("publishes-on numbers {COUNT}"), test_dir.path());
    let mut last = None;
    for number in 0..COUNT {
        let [first, second] = &mut subscribers;
        let sample = first.pull_on(&stream, TIMEOUT).unwrap();
        let copy = copy(&device, &stream, &sample);
        sample.release_on(&stream).unwrap();
        assert_eq!(number_of(&second.pull(TIMEOUT).unwrap()), number);
        if let Some((number, copy)) = last.replace((number, copy)) {
            check(&stream, &copy, number);
        }
    }
    other.finish();
    drop(subscribers);
}

#[test]
fn stream_continues_after_its_publisher_is_killed() {
    let test_dir = TestDir::new();
    let node = test_dir.join();
    let (settings, device) = device_topic();
    let topic = node.topic("numbers", &settings).unwrap();
    let mut subscriber = topic.subscriber().unwrap();
    let mut host = topic.subscriber().unwrap();
    let stream = device.stream().unwrap();
    let mut other = ChildProcess::start("publishes-and-hangs numbers", test_dir.path());
    let samples: Vec<_> = (0..4).map(|_| subscriber.pull_on(&stream, TIMEOUT).unwrap()).collect();
    let last = subscriber.pull(TIMEOUT).unwrap();
    let copies: Vec<_> = samples.iter().map(|sample| copy(&device, &stream, sample)).collect();
    for number in 0..2 {
        assert_eq!(number_of(&host.pull(TIMEOUT).unwrap()), number);
    }
    assert!(host.pull(Duration::from_millis(50)).is_err());
    assert!(!stream.is_done().unwrap());
    other.kill();
    stream.synchronize(TIMEOUT).unwrap();
    let states: Vec<_> = samples.iter().map(|sample| sample.readiness().unwrap()).collect();
    use Readiness::{Poisoned, Ready};
    assert_eq!(states, [Ready, Ready, Poisoned, Poisoned]);
    (0..2).for_each(|number| check(&stream, &copies[number], number as u64));
    drop(samples);
    // A subscriber on the host misses the poisoned messages.
    assert_eq!(number_of(&host.pull(TIMEOUT).unwrap()), 4);
    assert_eq!(host.missed(), 2);
    assert_eq!(host.poll_event(), Some(Event::Gap { missed: 2 }));
    assert_eq!(number_of(&last), 4);
    drop(last);
    until("all memory to be free", || used_blocks(&node) == 0);
}

/// The number of allocated blocks of the node.
fn used_blocks(node: &pubsub::Node) -> u64 {
    let rows = node.report().unwrap();
    let used = |row: &Row| match row {
        Row::Pool { blocks, .. } => *blocks,
        _ => 0,
    };
    rows.iter().map(used).sum()
}

#[test]
fn stream_continues_after_service_and_publisher_are_killed() {
    let test_dir = TestDir::new();
    let mut service = ChildProcess::start("serves", test_dir.path());
    let node = test_dir.join_served();
    let (settings, device) = device_topic();
    let topic = node.topic("numbers", &settings).unwrap();
    let mut subscriber = topic.subscriber().unwrap();
    let stream = device.stream().unwrap();
    let mut other = ChildProcess::start("publishes-and-hangs numbers", test_dir.path());
    let samples: Vec<_> = (0..4).map(|_| subscriber.pull_on(&stream, TIMEOUT).unwrap()).collect();
    assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), 4);
    until("the stream", || samples[1].readiness().unwrap() == Readiness::Ready);
    service.kill();
    other.kill();
    let mut service = ChildProcess::start("serves", test_dir.path());
    stream.synchronize(TIMEOUT).unwrap();
    let state = |index: usize| samples[index].readiness().unwrap();
    assert_eq!((state(1), state(3)), (Readiness::Ready, Readiness::Poisoned));
    drop(samples);
    until("all memory to be free", || used_blocks(&node) == 0);
    let publisher = topic.publisher().unwrap();
    publish_on(&publisher, &device.stream().unwrap(), 0..3);
    for number in 0..3 {
        assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), number);
    }
    drop((publisher, subscriber, topic, node));
    service.end();
}

#[test]
fn blocks_of_a_stream_are_reclaimed_after_process_death() {
    let test_dir = TestDir::new();
    let node = test_dir.join();
    let (settings, _) = device_topic();
    let release_deadline = Duration::from_millis(500);
    let settings = TopicSettings { depth: 2, release_deadline, ..settings };
    let topic = node.topic("numbers", &settings).unwrap();
    let publisher = topic.publisher().unwrap();
    let mut other = ChildProcess::start("reads-and-hangs numbers 2", test_dir.path());
    until("a reader", || publisher.subscribers() == 1);
    let mut subscriber = topic.subscriber().unwrap();
    publish(&publisher, 0..2);
    for number in 0..2 {
        assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), number);
    }
    publish(&publisher, 2..3);
    let rest = [subscriber.pull(TIMEOUT).unwrap(), subscriber.pull(TIMEOUT).unwrap()];
    let mut numbers = rest.each_ref().map(number_of);
    numbers.sort_unstable();
    assert_eq!(numbers, [2, 99]);
    drop(rest);
    // The reader blocks the publisher and is evicted, but the blocks that its stream uses stay.
    publish(&publisher, 3..4);
    assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), 3);
    assert_eq!(publisher.subscribers(), 1);
    assert_eq!(used_blocks(&node), 2);
    other.kill();
    until("all memory to be free", || used_blocks(&node) == 0);
}

#[test]
fn process_leaves_after_its_streams_finish() {
    let test_dir = TestDir::new();
    let node = test_dir.join();
    let (settings, device) = device_topic();
    let topic = node.topic("numbers", &settings).unwrap();
    let mut subscriber = topic.subscriber().unwrap();
    let second = test_dir.join();
    let publisher = second.topic("numbers", &settings).unwrap().publisher().unwrap();
    let (stream, gate) = (device.stream().unwrap(), Gate::new(&device));
    gate.block(&stream);
    publish_on(&publisher, &stream, 0..2);
    std::thread::scope(|scope| {
        let leaving = scope.spawn(|| drop((publisher, second)));
        std::thread::sleep(Duration::from_millis(300));
        assert!(!leaving.is_finished());
        assert!(subscriber.try_pull().unwrap().is_none());
        gate.open();
        leaving.join().unwrap();
    });
    for number in 0..2 {
        assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), number);
    }
    until("all memory to be free", || used_blocks(&node) == 0);
}

#[test]
fn idle_reader_releases_what_its_stream_finished() {
    let test_dir = TestDir::new();
    let (node, second) = (test_dir.join(), test_dir.join());
    let (settings, device) = device_topic();
    let publisher = node.topic("numbers", &settings).unwrap().publisher().unwrap();
    let mut subscriber = second.topic("numbers", &settings).unwrap().subscriber().unwrap();
    let (stream, gate) = (device.stream().unwrap(), Gate::new(&device));
    gate.block(&stream);
    publish(&publisher, 0..2);
    for _ in 0..2 {
        subscriber.pull_on(&stream, TIMEOUT).unwrap().release_on(&stream).unwrap();
    }
    assert!(publisher.flush(Duration::from_millis(50)).is_err());
    gate.open();
    publisher.flush(TIMEOUT).unwrap();
    until("all memory to be free", || used_blocks(&node) == 0);
    drop(subscriber);
}
