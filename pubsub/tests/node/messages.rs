//! Contents of messages, and messages that a full topic delays or drops.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use pubsub::{ErrorKind, Event, Reliability, Row, TopicSettings};

use crate::support::{
    ChildProcess, TIMEOUT, TestDir, message, number_of, publish, settings, until,
};

#[test]
fn report_longer_than_a_socket_buffer_arrives() {
    const TOPICS: usize = 250;
    let test_dir = TestDir::new();
    let node = test_dir.join();
    let name = |number: usize| format!("{number:0>200}");
    let topics: Vec<_> =
        (0..TOPICS).map(|number| node.topic(&name(number), &settings()).unwrap()).collect();
    let subscribers: Vec<_> = topics
        .iter()
        .flat_map(|topic| [topic.subscriber().unwrap(), topic.subscriber().unwrap()])
        .collect();
    let publishers: Vec<_> = topics.iter().map(|topic| topic.publisher().unwrap()).collect();
    let is_complete = |rows: &[Row]| {
        let count = |is_meant: fn(&Row) -> bool| rows.iter().filter(|row| is_meant(row)).count();
        assert_eq!(count(|row| matches!(row, Row::Topic { .. })), TOPICS);
        assert_eq!(count(|row| matches!(row, Row::Publisher { .. })), TOPICS);
        assert_eq!(count(|row| matches!(row, Row::Subscriber { .. })), 2 * TOPICS);
    };
    is_complete(&pubsub::report(test_dir.path()).unwrap());
    is_complete(&node.report().unwrap());
    drop((subscribers, publishers));
}

#[test]
fn sample_names_its_publisher_sequence_and_time() {
    let test_dir = TestDir::new();
    let node = test_dir.join();
    let topic = node.topic("numbers", &settings()).unwrap();
    let (publisher, mut subscriber) = (topic.publisher().unwrap(), topic.subscriber().unwrap());
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    let before = now();
    let mut loan = publisher.loan(10, TIMEOUT).unwrap();
    assert_eq!(loan.length(), 10);
    loan.write(2, b"content").unwrap();
    loan.write(0, b"no").unwrap();
    loan.write(9, b"!").unwrap();
    loan.set_metadata(&[5; 256]).unwrap();
    assert_eq!(loan.set_metadata(&[5; 257]).unwrap_err().kind(), ErrorKind::InvalidArgument);
    assert_eq!(loan.write(9, b"no").unwrap_err().kind(), ErrorKind::InvalidArgument);
    assert_eq!(loan.publish(TIMEOUT).unwrap().subscribers, 1);
    let sample = subscriber.pull(TIMEOUT).unwrap();
    assert_eq!(sample.to_vec().unwrap(), b"nocontent!");
    assert_eq!(&*sample.metadata(), [5; 256]);
    assert_eq!((sample.publisher(), sample.sequence()), (publisher.id(), 1));
    assert_eq!(sample.origin(), None);
    let second = 1_000_000_000;
    assert!((before - second..now() + second).contains(&sample.published_at()));
    let mut part = [0; 4];
    sample.read(2, &mut part).unwrap();
    assert_eq!(&part, b"cont");
    assert!(sample.read(7, &mut part).is_err());
}

#[test]
fn readers_share_one_copy_until_the_last_release() {
    let test_dir = TestDir::new();
    let node = test_dir.join();
    let topic = node.topic("numbers", &settings()).unwrap();
    let publisher = topic.publisher().unwrap();
    let mut readers: Vec<_> = (0..8).map(|_| topic.subscriber().unwrap()).collect();
    publish(&publisher, 0..2);
    let held: Vec<_> = readers.iter_mut().map(|reader| reader.pull(TIMEOUT).unwrap()).collect();
    assert!(held.iter().all(|sample| sample.address() == held[0].address()));
    let last = readers[0].pull(TIMEOUT).unwrap();
    drop((readers, publisher, topic, node));
    // Samples outlive their subscribers and the node.
    assert!(held.iter().all(|sample| number_of(sample) == 0));
    assert_eq!(number_of(&last), 1);
}

#[test]
fn best_effort_reports_missed_messages() {
    let test_dir = TestDir::new();
    let node = test_dir.join();
    for reliability in [Reliability::DropOldest, Reliability::DropNewest] {
        let name = reliability.to_string();
        let topic = node.topic(&name, &TopicSettings { reliability, ..settings() }).unwrap();
        let (publisher, mut subscriber) = (topic.publisher().unwrap(), topic.subscriber().unwrap());
        publish(&publisher, 0..20);
        let mut found = Vec::new();
        while let Some(sample) = subscriber.try_pull().unwrap() {
            found.push(number_of(&sample));
        }
        match reliability {
            Reliability::DropOldest => {
                assert_eq!(found, (12..20).collect::<Vec<_>>());
                assert!(matches!(subscriber.poll_event(), Some(Event::Gap { missed: 12, .. })));
            }
            _ => {
                assert_eq!(found, (0..8).collect::<Vec<_>>());
                assert_eq!(subscriber.poll_event(), Some(Event::Gap { missed: 12 }));
            }
        }
        publish(&publisher, 20..21);
        assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), 20);
    }
}

#[test]
fn full_reliable_topic_blocks_its_publisher() {
    let test_dir = TestDir::new();
    let node = test_dir.join();
    let topic = node.topic("numbers", &settings()).unwrap();
    let (publisher, mut subscriber) = (topic.publisher().unwrap(), topic.subscriber().unwrap());
    publish(&publisher, 0..8);
    assert!(publisher.try_push(&message(8)).unwrap().is_none());
    let short = Duration::from_millis(20);
    let error = publisher.push(&message(8), short).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    assert_eq!(publisher.flush(short).unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    for expected in 0..8 {
        assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), expected);
    }
    publisher.flush(TIMEOUT).unwrap();
    assert!(subscriber.try_pull().unwrap().is_none());
    let error = subscriber.pull(short).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    // The order of each publisher is kept.
    let second = topic.publisher().unwrap();
    for number in 0..4 {
        publish(&publisher, number..number + 1);
        publish(&second, number..number + 1);
    }
    let mut next = std::collections::HashMap::new();
    for _ in 0..8 {
        let sample = subscriber.pull(TIMEOUT).unwrap();
        let expected = next.entry(sample.publisher()).or_insert(0);
        assert_eq!(number_of(&sample), *expected);
        *expected += 1;
    }
    assert_eq!(next.len(), 2);
}

#[test]
fn messages_of_every_size_up_to_the_largest() {
    let test_dir = TestDir::new();
    let node = test_dir.join();
    let largest = 24 << 20;
    let topic = node.topic("large", &TopicSettings { largest, depth: 2, ..settings() }).unwrap();
    let (publisher, mut subscriber) = (topic.publisher().unwrap(), topic.subscriber().unwrap());
    for length in [0, 1, 7, 8, 4095, 4096, 4097, 1 << 20, largest - 1, largest] {
        let bytes = testkit::bytes::pattern(length as usize, length);
        publisher.push(&bytes, TIMEOUT).unwrap();
        let sample = subscriber.pull(TIMEOUT).unwrap();
        assert_eq!(sample.length(), length);
        assert!(sample.to_vec().unwrap() == bytes, "a message of {length} bytes differs");
    }
    let error = publisher.loan(largest + 1, TIMEOUT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TooLong);
}

#[test]
fn readers_are_notified_of_a_killed_publisher() {
    let test_dir = TestDir::new();
    let node = test_dir.join();
    let topic = node.topic("numbers", &settings()).unwrap();
    let mut subscriber = topic.subscriber().unwrap();
    let mut other = ChildProcess::start("publishes-forever numbers", test_dir.path());
    for expected in 0..20 {
        assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), expected);
    }
    other.kill();
    until("an event", || {
        while subscriber.try_pull().unwrap().is_some() {}
        matches!(subscriber.poll_event(), Some(Event::PublisherLost { .. }))
    });
}

const BEST_EFFORT: [Reliability; 2] = [Reliability::DropOldest, Reliability::DropNewest];

#[test]
fn stopped_subscriber_costs_others_no_messages_and_no_time() {
    for reliability in BEST_EFFORT {
        let test_dir = TestDir::new();
        let node = test_dir.join();
        let topic = node.topic("numbers", &TopicSettings { reliability, ..settings() }).unwrap();
        let mut reader = topic.subscriber().unwrap();
        let publisher = topic.publisher().unwrap();
        let stopped = ChildProcess::start("subscribes numbers", test_dir.path());
        until("the other subscriber", || publisher.subscribers() == 2);
        stopped.stop();
        let mut longest = Duration::ZERO;
        for number in 0..400 {
            let start = Instant::now();
            assert!(!publisher.push(&message(number), TIMEOUT).unwrap().is_dropped);
            longest = longest.max(start.elapsed());
            assert_eq!(number_of(&reader.pull(TIMEOUT).unwrap()), number, "{reliability}");
        }
        assert_eq!(reader.missed(), 0, "{reliability}");
        assert!(longest < Duration::from_secs(1), "{reliability}: a push took {longest:?}");
    }
}

#[test]
fn memory_grows_without_waiting_for_stopped_processes() {
    let test_dir = TestDir::new();
    let node = test_dir.join();
    let (reliability, largest) = (Reliability::DropOldest, 1 << 20);
    let settings = TopicSettings { reliability, largest, max_held: 20, ..settings() };
    let topic = node.topic("numbers", &settings).unwrap();
    let (mut reader, publisher) = (topic.subscriber().unwrap(), topic.publisher().unwrap());
    let stopped = ChildProcess::start("subscribes numbers", test_dir.path());
    until("the other subscriber", || publisher.subscribers() == 2);
    stopped.stop();
    let mut samples = Vec::new();
    for number in 0..20 {
        let start = Instant::now();
        publisher.push(&vec![number; 1 << 20], TIMEOUT).unwrap();
        assert!(start.elapsed() < Duration::from_secs(1), "{number}: {:?}", start.elapsed());
        samples.push(reader.pull(TIMEOUT).unwrap());
    }
}

#[test]
fn best_effort_subscriber_that_holds_all_samples_is_evicted() {
    for reliability in BEST_EFFORT {
        let test_dir = TestDir::new();
        let node = test_dir.join();
        let release_deadline = Duration::from_millis(200);
        let settings = TopicSettings { reliability, release_deadline, max_held: 12, ..settings() };
        let topic = node.topic("numbers", &settings).unwrap();
        let publisher = topic.publisher().unwrap();
        let mut subscribers = Vec::new();
        // All that there is room for.
        for count in [12, 8] {
            let mut subscriber = topic.subscriber().unwrap();
            let samples: Vec<_> = (0..count)
                .map(|number| {
                    publish(&publisher, number..number + 1);
                    subscriber.pull(TIMEOUT).unwrap()
                })
                .collect();
            subscribers.push((subscriber, samples));
        }
        // The first subscriber holds the maximum.
        let (first, held) = &mut subscribers[0];
        assert_eq!(first.try_pull().unwrap_err().kind(), ErrorKind::TooManySamples);
        let mut reader = topic.subscriber().unwrap();
        until("room", || !publisher.push(&message(7), TIMEOUT).unwrap().is_dropped);
        assert_eq!(number_of(&reader.pull(TIMEOUT).unwrap()), 7);
        assert!(reader.missed() > 0, "{reliability}: dropped messages are not counted");
        assert_eq!(first.try_pull().unwrap_err().kind(), ErrorKind::Evicted);
        // What it holds stays.
        assert_eq!(held.iter().map(number_of).collect::<Vec<_>>(), (0..12).collect::<Vec<_>>());
        assert!(publisher.counters().evicted > 0 && publisher.counters().dropped > 0);
    }
}

#[test]
fn messages_dropped_at_the_end_of_a_publisher_are_counted() {
    let test_dir = TestDir::new();
    let node = test_dir.join();
    let settings = TopicSettings { reliability: Reliability::DropNewest, ..settings() };
    let topic = node.topic("numbers", &settings).unwrap();
    let mut reader = topic.subscriber().unwrap();
    for publisher in [topic.publisher().unwrap(), topic.publisher().unwrap()] {
        publish(&publisher, 0..20);
    }
    while reader.try_pull().unwrap().is_some() {}
    assert_eq!(reader.missed(), 32);
    assert_eq!(reader.poll_event(), Some(Event::Gap { missed: 32 }));
    assert_eq!(reader.poll_event(), Some(Event::NoPublishers));
    assert_eq!((reader.poll_event(), reader.missed()), (None, 32));
    let publisher = topic.publisher().unwrap();
    publish(&publisher, 0..1);
    assert_eq!(reader.pull(TIMEOUT).unwrap().sequence(), 1);
    assert_eq!((reader.poll_event(), reader.missed()), (None, 32));
}

/// Memory passes between topics: a loan that is published unwritten has zeros.
#[test]
fn unwritten_loans_have_no_bytes_of_other_topics() {
    let test_dir = TestDir::new();
    let node = test_dir.join();
    for memory in ["host", "emulated:0"] {
        let open = |name: &str| {
            let memory = memory.parse().unwrap();
            let settings = TopicSettings { memory, largest: 4 << 20, ..settings() };
            let topic = node.topic(&format!("{name} on {memory}"), &settings).unwrap();
            let (publisher, subscriber) = (topic.publisher().unwrap(), topic.subscriber().unwrap());
            (publisher, subscriber)
        };
        let [(others, mut reader_of_others), (publisher, mut reader)] = ["others", "own"].map(open);
        for length in [1, 255, 4096, 65_536, 70_000, 1 << 20, 4 << 20] {
            for count in [1, 3, 8] {
                for _ in 0..count {
                    others.push(&vec![0xaa; length], TIMEOUT).unwrap();
                }
                while reader_of_others.try_pull().unwrap().is_some() {}
                for _ in 0..count {
                    publisher.loan(length as u64, TIMEOUT).unwrap().publish(TIMEOUT).unwrap();
                }
                while let Some(sample) = reader.try_pull().unwrap() {
                    let bytes = sample.to_vec().unwrap();
                    assert!(bytes.iter().all(|byte| *byte == 0), "{memory}, {length} bytes");
                }
            }
        }
    }
}
