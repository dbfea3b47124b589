//! What messages carry, and what becomes of those for which there is no room.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use pubsub::{ErrorKind, Event, Reliability, Row, TopicSettings};

use crate::ground::{Ground, Other, PATIENCE, message, number_of, publish, settings, until};

/// More than the buffer of a socket holds: it comes in parts, as they are taken.
#[test]
fn a_report_longer_than_a_sockets_buffer_arrives() {
    const TOPICS: usize = 250;
    let ground = Ground::new();
    let node = ground.join();
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
    is_complete(&pubsub::report(ground.path()).unwrap());
    is_complete(&node.report().unwrap());
    drop((subscribers, publishers));
}

#[test]
fn a_message_says_where_it_comes_from() {
    let ground = Ground::new();
    let node = ground.join();
    let topic = node.topic("numbers", &settings()).unwrap();
    let (publisher, mut subscriber) = (topic.publisher().unwrap(), topic.subscriber().unwrap());
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    let before = now();
    let mut loan = publisher.loan(10, PATIENCE).unwrap();
    assert_eq!(loan.length(), 10);
    loan.write(2, b"content").unwrap();
    loan.write(0, b"no").unwrap();
    loan.write(9, b"!").unwrap();
    loan.set_metadata(&[5; 256]).unwrap();
    assert_eq!(loan.set_metadata(&[5; 257]).unwrap_err().kind(), ErrorKind::InvalidArgument);
    assert_eq!(loan.write(9, b"no").unwrap_err().kind(), ErrorKind::InvalidArgument);
    assert_eq!(loan.publish(PATIENCE).unwrap().readers, 1);
    let sample = subscriber.pull(PATIENCE).unwrap();
    assert_eq!(sample.to_vec().unwrap(), b"nocontent!");
    assert_eq!(&*sample.metadata(), [5; 256]);
    assert_eq!((sample.publisher(), sample.sequence()), (publisher.id(), 1));
    assert_eq!(sample.origin(), None);
    let second = 1_000_000_000;
    assert!((before - second..now() + second).contains(&sample.published_at()));
    // It is read where it lies, and another reader finds it in the very same memory.
    let mut part = [0; 4];
    sample.read(2, &mut part).unwrap();
    assert_eq!(&part, b"cont");
    assert!(sample.read(7, &mut part).is_err());
}

#[test]
fn one_copy_for_all_and_for_as_long_as_anybody_holds_it() {
    let ground = Ground::new();
    let node = ground.join();
    let topic = node.topic("numbers", &settings()).unwrap();
    let publisher = topic.publisher().unwrap();
    let mut readers: Vec<_> = (0..8).map(|_| topic.subscriber().unwrap()).collect();
    publish(&publisher, 0..2);
    let held: Vec<_> = readers.iter_mut().map(|reader| reader.pull(PATIENCE).unwrap()).collect();
    assert!(held.iter().all(|sample| sample.address() == held[0].address()));
    let last = readers[0].pull(PATIENCE).unwrap();
    drop((readers, publisher, topic, node));
    // The subscribers are gone, and the node, too: not what was read.
    assert!(held.iter().all(|sample| number_of(sample) == 0));
    assert_eq!(number_of(&last), 1);
}

#[test]
fn best_effort_tells_what_was_missed() {
    let ground = Ground::new();
    let node = ground.join();
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
            _ => assert_eq!(found, (0..8).collect::<Vec<_>>()),
        }
        publish(&publisher, 20..21);
        assert_eq!(number_of(&subscriber.pull(PATIENCE).unwrap()), 20);
    }
}

#[test]
fn a_reliable_topic_slows_its_publisher() {
    let ground = Ground::new();
    let node = ground.join();
    let topic = node.topic("numbers", &settings()).unwrap();
    let (publisher, mut subscriber) = (topic.publisher().unwrap(), topic.subscriber().unwrap());
    publish(&publisher, 0..8);
    assert!(publisher.try_push(&message(8)).unwrap().is_none());
    let short = Duration::from_millis(20);
    let error = publisher.push(&message(8), short).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    assert_eq!(publisher.flush(short).unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    for expected in 0..8 {
        assert_eq!(number_of(&subscriber.pull(PATIENCE).unwrap()), expected);
    }
    publisher.flush(PATIENCE).unwrap();
    assert!(subscriber.try_pull().unwrap().is_none());
    let error = subscriber.pull(short).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    // Several publishers: each one's order is kept.
    let second = topic.publisher().unwrap();
    for number in 0..4 {
        publish(&publisher, number..number + 1);
        publish(&second, number..number + 1);
    }
    let mut next = std::collections::HashMap::new();
    for _ in 0..8 {
        let sample = subscriber.pull(PATIENCE).unwrap();
        let expected = next.entry(sample.publisher()).or_insert(0);
        assert_eq!(number_of(&sample), *expected);
        *expected += 1;
    }
    assert_eq!(next.len(), 2);
}

#[test]
fn sizes_from_nothing_to_the_largest() {
    let ground = Ground::new();
    let node = ground.join();
    let largest = 24 << 20;
    let topic = node.topic("large", &TopicSettings { largest, depth: 2, ..settings() }).unwrap();
    let (publisher, mut subscriber) = (topic.publisher().unwrap(), topic.subscriber().unwrap());
    for length in [0, 1, 7, 8, 4095, 4096, 4097, 1 << 20, largest - 1, largest] {
        let bytes: Vec<u8> = (0..length).map(|at| (at * 7 + length) as u8).collect();
        publisher.push(&bytes, PATIENCE).unwrap();
        let sample = subscriber.pull(PATIENCE).unwrap();
        assert_eq!(sample.length(), length);
        assert!(sample.to_vec().unwrap() == bytes, "other bytes, {length} of them");
    }
    let error = publisher.loan(largest + 1, PATIENCE).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TooLong);
}

#[test]
fn readers_learn_of_a_publisher_that_dies() {
    let ground = Ground::new();
    let node = ground.join();
    let topic = node.topic("numbers", &settings()).unwrap();
    let mut subscriber = topic.subscriber().unwrap();
    let mut other = Other::start("publishes-for-ever numbers", ground.path());
    for expected in 0..20 {
        assert_eq!(number_of(&subscriber.pull(PATIENCE).unwrap()), expected);
    }
    other.kill();
    until("word of its death", || {
        while subscriber.try_pull().unwrap().is_some() {}
        matches!(subscriber.poll_event(), Some(Event::PublisherLost { .. }))
    });
}
