//! Topics of values of one type, and subscribers that need no settings.

use std::time::Duration;

use pubsub::{ErrorKind, Reliability, TopicSettings};

use crate::support::{TIMEOUT, TestDir};

/// Waited for in vain.
const SHORT_TIMEOUT: Duration = Duration::from_millis(50);

pubsub::plain! {
    /// Where something is.
    #[derive(Debug, PartialEq)]
    struct Pose {
        position: [f64; 3],
        number: u64,
    }
}

fn pose(number: u64) -> Pose {
    Pose { position: [number as f64, -0.5, f64::INFINITY], number }
}

#[test]
fn typed_topic_carries_values_between_members() {
    let test_dir = TestDir::new();
    let (node, other) = (test_dir.join(), test_dir.join());
    let publisher = node.topic_of::<Pose>("pose").unwrap().publisher().unwrap();
    let mut subscriber = other.topic_of::<Pose>("pose").unwrap().subscriber().unwrap();
    publisher.wait_for_subscribers(1, TIMEOUT).unwrap();
    for number in 0..5 {
        assert_eq!(publisher.publish(&pose(number), TIMEOUT).unwrap().subscribers, 1);
        assert_eq!(subscriber.pull(TIMEOUT).unwrap(), pose(number));
    }
    assert!(subscriber.try_pull().unwrap().is_none());
    publisher.try_publish(&pose(7)).unwrap().unwrap();
    let sample = subscriber.untyped().pull(TIMEOUT).unwrap();
    assert_eq!((sample.sequence(), subscriber.value_of(&sample).unwrap()), (6, pose(7)));
}

#[test]
fn type_of_another_size_is_refused() {
    let test_dir = TestDir::new();
    let node = test_dir.join();
    let topic = node.topic_of::<Pose>("pose").unwrap();
    let error = node.topic_of::<[u8; 31]>("pose").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::SettingsDiffer, "{error}");
    let error = topic.untyped().typed::<[u8; 31]>().unwrap_err();
    assert_eq!((error.kind(), error.subject()), (ErrorKind::SettingsDiffer, Some("pose")));
    assert!(error.to_string().contains("[u8; 31]"), "{error}");
    let error = node.topic_of::<[u64; 0]>("nothing").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    // As it is, whatever its other settings are.
    let settings = TopicSettings { reliability: Reliability::DropOldest, ..Default::default() };
    node.topic_of_with::<u64>("numbers", &settings).unwrap().publisher().unwrap();
}

mod elsewhere {
    pubsub::plain! {
        /// The same, as another program declares it.
        #[derive(Debug)]
        pub(super) struct Pose {
            pub(super) position: [f64; 3],
            pub(super) number: u64,
        }
    }
    pubsub::plain! {
        /// Of the same size, and something else.
        #[derive(Debug)]
        pub(super) struct Twist {
            pub(super) linear: [f64; 3],
            pub(super) number: u64,
        }
    }
}

#[test]
fn type_of_another_name_is_refused_and_of_another_module_is_not() {
    let test_dir = TestDir::new();
    let (node, other) = (test_dir.join(), test_dir.join());
    let topic = node.topic_of::<Pose>("pose").unwrap();
    other.topic_of::<elsewhere::Pose>("pose").unwrap();
    let error = other.topic_of::<elsewhere::Twist>("pose").unwrap_err();
    assert_eq!((error.kind(), error.subject()), (ErrorKind::SettingsDiffer, Some("pose")));
    let creator = format!("created by process {} ", std::process::id());
    for part in ["type Pose", "type Twist", &creator] {
        assert!(error.to_string().contains(part), "{part}: {error}");
    }
    let error = topic.untyped().typed::<elsewhere::Twist>().unwrap_err();
    assert_eq!((error.kind(), error.subject()), (ErrorKind::SettingsDiffer, Some("pose")));
    assert!(error.to_string().contains("type Pose, not Twist"), "{error}");
}

mod outdated {
    pubsub::plain! {
        /// The same type, as an earlier version of a program declares it.
        #[derive(Debug)]
        pub(super) struct Pose {
            pub(super) position: [f64; 2],
        }
    }
}

#[test]
fn type_of_the_same_name_and_another_size_is_refused_with_both_sizes() {
    let test_dir = TestDir::new();
    let (node, other) = (test_dir.join(), test_dir.join());
    let topic = node.topic_of::<outdated::Pose>("pose").unwrap();
    let error = other.topic_of::<Pose>("pose").unwrap_err();
    assert_eq!((error.kind(), error.subject()), (ErrorKind::SettingsDiffer, Some("pose")));
    assert_eq!(
        error.to_string(),
        "open a typed topic (pose) failed: settings differ: a Pose has 32 bytes here, but 16 where the \
         topic was created. Compile both from one definition"
    );
    let error = topic.untyped().typed::<Pose>().unwrap_err();
    assert_eq!(
        error.to_string(),
        "open a typed topic (pose) failed: settings differ: a Pose has 32 bytes here, but 16 where the \
         topic was created. Compile both from one definition"
    );
    // Where more than the size differs, all of it is told.
    let deep = TopicSettings { depth: 5, ..Default::default() };
    let text = other.topic_of_with::<Pose>("pose", &deep).unwrap_err().to_string();
    assert!(text.contains("depth, largest: the topic has"), "{text}");
}

#[test]
fn topic_without_a_type_and_one_of_values_are_open_to_each_other() {
    let test_dir = TestDir::new();
    let (node, other) = (test_dir.join(), test_dir.join());
    let values = node.topic_of::<Pose>("pose").unwrap();
    let name = values.untyped().settings().unwrap().type_name;
    assert_eq!(name.map(|name| name.to_string()).as_deref(), Some("Pose"));
    let largest = size_of::<Pose>() as u64;
    let bytes = other.topic("pose", &TopicSettings { largest, ..Default::default() }).unwrap();
    let mut subscriber = bytes.subscriber().unwrap();
    values.publisher().unwrap().publish(&pose(3), TIMEOUT).unwrap();
    assert_eq!(subscriber.pull(TIMEOUT).unwrap().length(), largest);
    // The other way round.
    let bytes = node.topic("raw", &TopicSettings { largest, ..Default::default() }).unwrap();
    assert_eq!(bytes.settings().unwrap().type_name, None);
    other.topic_of::<elsewhere::Twist>("raw").unwrap();
    bytes.typed::<Pose>().unwrap();
}

#[test]
fn message_that_is_no_value_is_an_error_and_the_next_is_read() {
    let test_dir = TestDir::new();
    let node = test_dir.join();
    let topic = node.topic_of::<u64>("numbers").unwrap();
    let (publisher, mut subscriber) = (topic.publisher().unwrap(), topic.subscriber().unwrap());
    publisher.untyped().push(b"short", TIMEOUT).unwrap();
    publisher.publish(&7, TIMEOUT).unwrap();
    let error = subscriber.pull(TIMEOUT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Malformed, "{error}");
    let publisher = publisher.untyped().id();
    assert_eq!(
        error.to_string(),
        format!(
            "pull a value (numbers) failed: malformed: a message of 5 bytes from publisher {publisher}, \
             but a u64 has 8. Publish values of that type only"
        )
    );
    assert_eq!(subscriber.pull(TIMEOUT).unwrap(), 7);
}

#[test]
fn subscriber_takes_a_topic_as_it_is_and_waits_for_it() {
    let test_dir = TestDir::new();
    let node = test_dir.join();
    let error = node.subscribe("later", SHORT_TIMEOUT).unwrap_err();
    assert_eq!((error.kind(), error.subject()), (ErrorKind::NotFound, Some("later")));
    let settings = TopicSettings { depth: 3, largest: 100, ..Default::default() };
    std::thread::scope(|scope| {
        let reads = scope.spawn(|| {
            let mut subscriber = node.subscribe("later", TIMEOUT).unwrap();
            subscriber.pull(TIMEOUT).unwrap().to_vec().unwrap()
        });
        std::thread::sleep(SHORT_TIMEOUT);
        let publisher = node.topic("later", &settings).unwrap().publisher().unwrap();
        publisher.wait_for_subscribers(1, TIMEOUT).unwrap();
        publisher.push(b"hello", TIMEOUT).unwrap();
        assert_eq!(reads.join().unwrap(), b"hello");
    });
}
