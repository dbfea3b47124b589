//! Replication of messages that streams write.

use pubsub::Event;

use crate::between::{address, join, network, until_replicated};
use crate::support::{
    ChildProcess, Gate, TIMEOUT, TestDir, device_topic, number_of, publish, publish_on, settings,
};

#[test]
fn stream_writes_are_replicated_once_finished() {
    let (test_dirs, addresses) = ([TestDir::new(), TestDir::new()], [address(), address()]);
    let first = join(test_dirs[0].path(), network(addresses[0], &[]));
    let second = join(test_dirs[1].path(), network(addresses[1], &[addresses[0]]));
    let (on_device, device) = device_topic();
    let topic = first.topic("numbers", &on_device).unwrap();
    let mut remote = second.topic("numbers", &on_device).unwrap().subscriber().unwrap();
    let others = first.topic("others", &settings()).unwrap();
    let mut read = second.topic("others", &settings()).unwrap().subscriber().unwrap();
    until_replicated(&first, "numbers");
    until_replicated(&first, "others");
    let publisher = topic.publisher().unwrap();
    let (stream, gate) = (device.stream().unwrap(), Gate::new(&device));
    publish_on(&publisher, &stream, 0..2);
    gate.block(&stream);
    publish_on(&publisher, &stream, 2..4);
    publish(&publisher, 4..5);
    for number in 0..2 {
        assert_eq!(number_of(&remote.pull(TIMEOUT).unwrap()), number);
    }
    // The gate does not block other topics.
    let other = others.publisher().unwrap();
    for number in 0..50 {
        publish(&other, number..number + 1);
        assert_eq!(number_of(&read.pull(TIMEOUT).unwrap()), number);
    }
    assert!(remote.try_pull().unwrap().is_none());
    gate.open();
    for number in 2..5 {
        assert_eq!(number_of(&remote.pull(TIMEOUT).unwrap()), number);
    }
    let reading = device.stream().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| publish_on(&publisher, &stream, 5..50));
        for number in 5..50 {
            let sample = remote.pull_on(&reading, TIMEOUT).unwrap();
            assert_eq!(number_of(&sample), number);
            sample.release_on(&reading).unwrap();
        }
    });
    publisher.flush(TIMEOUT).unwrap();
}

#[test]
fn poisoned_messages_are_not_replicated() {
    let (test_dirs, addresses) = ([TestDir::new(), TestDir::new()], [address(), address()]);
    let first = join(test_dirs[0].path(), network(addresses[0], &[]));
    let second = join(test_dirs[1].path(), network(addresses[1], &[addresses[0]]));
    let (settings, device) = device_topic();
    let topic = first.topic("numbers", &settings).unwrap();
    let mut local = topic.subscriber().unwrap();
    let mut remote = second.topic("numbers", &settings).unwrap().subscriber().unwrap();
    until_replicated(&first, "numbers");
    let mut other = ChildProcess::start("publishes-and-hangs numbers", test_dirs[0].path());
    for number in 0..2 {
        assert_eq!(number_of(&remote.pull(TIMEOUT).unwrap()), number);
    }
    assert!(remote.try_pull().unwrap().is_none());
    let waiting = device.stream().unwrap();
    for _ in 0..5 {
        drop(local.pull_on(&waiting, TIMEOUT).unwrap());
    }
    other.kill();
    let last = remote.pull(TIMEOUT).unwrap();
    // The remote reader misses two messages, as local readers do.
    assert_eq!((number_of(&last), last.sequence()), (4, 5));
    assert_eq!((remote.missed(), remote.poll_event()), (2, Some(Event::Gap { missed: 2 })));
    assert!(remote.poll_event().is_none_or(|event| !matches!(event, Event::Gap { .. })));
    drop((last, topic));
}
