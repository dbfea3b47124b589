//! Topics of values of one type, and subscribers that need no settings.

use std::time::Duration;

use pubsub::{ErrorKind, Reliability, TopicSettings};

use crate::support::{TIMEOUT, TestDir};

/// For an operation that is expected to time out.
const SHORT_TIMEOUT: Duration = Duration::from_millis(50);

pubsub::plain! {
    /// A position.
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
fn typed_topic_delivers_values_between_members() {
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
    // Any other settings are accepted for a typed topic.
    let settings = TopicSettings { reliability: Reliability::DropOldest, ..Default::default() };
    node.topic_of_with::<u64>("numbers", &settings).unwrap().publisher().unwrap();
}

mod foreign {
    pubsub::plain! {
        /// The type `Pose` as another program declares it.
        #[derive(Debug)]
        pub(super) struct Pose {
            pub(super) position: [f64; 3],
            pub(super) number: u64,
        }
    }
    pubsub::plain! {
        /// Another type of the same size.
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
    other.topic_of::<foreign::Pose>("pose").unwrap();
    let error = other.topic_of::<foreign::Twist>("pose").unwrap_err();
    assert_eq!((error.kind(), error.subject()), (ErrorKind::SettingsDiffer, Some("pose")));
    let creator = format!("created by process {} ", std::process::id());
    for part in ["type Pose", "type Twist", &creator] {
        assert!(error.to_string().contains(part), "{part}: {error}");
    }
    let error = topic.untyped().typed::<foreign::Twist>().unwrap_err();
    assert_eq!((error.kind(), error.subject()), (ErrorKind::SettingsDiffer, Some("pose")));
    assert!(error.to_string().contains("type Pose, not Twist"), "{error}");
}

mod outdated {
    pubsub::plain! {
        /// The type `Pose` as an earlier version of a program declares it.
        #[derive(Debug)]
        pub(super) struct Pose {
            pub(super) position: [f64; 2],
        }
    }
}

#[test]
fn same_type_name_with_another_size_is_refused() {
    let test_dir = TestDir::new();
    let (node, other) = (test_dir.join(), test_dir.join());
    let topic = node.topic_of::<outdated::Pose>("pose").unwrap();
    let error = other.topic_of::<Pose>("pose").unwrap_err();
    assert_eq!((error.kind(), error.subject()), (ErrorKind::SettingsDiffer, Some("pose")));
    assert_eq!(
        error.to_string(),
        "open typed topic \"pose\" failed: settings differ: a Pose has 32 bytes here, but 16 where the \
         topic was created. Compile both from one definition"
    );
    let error = topic.untyped().typed::<Pose>().unwrap_err();
    assert_eq!(
        error.to_string(),
        "open typed topic \"pose\" failed: settings differ: a Pose has 32 bytes here, but 16 where the \
         topic was created. Compile both from one definition"
    );
    // The error names every setting that differs.
    let deep = TopicSettings { depth: 5, ..Default::default() };
    let text = other.topic_of_with::<Pose>("pose", &deep).unwrap_err().to_string();
    assert!(text.contains("depth, largest: the topic has"), "{text}");
}

#[test]
fn untyped_and_typed_members_share_a_topic() {
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
    // Untyped first, then typed.
    let bytes = node.topic("raw", &TopicSettings { largest, ..Default::default() }).unwrap();
    assert_eq!(bytes.settings().unwrap().type_name, None);
    other.topic_of::<foreign::Twist>("raw").unwrap();
    bytes.typed::<Pose>().unwrap();
}

#[test]
fn message_of_wrong_size_is_an_error_and_the_next_is_read() {
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
            "pull value from topic \"numbers\" failed: malformed: a message of 5 bytes from publisher {publisher}, \
             but a u64 has 8. Publish values of that type only"
        )
    );
    assert_eq!(subscriber.pull(TIMEOUT).unwrap(), 7);
}

#[test]
fn subscribe_waits_for_a_topic_and_takes_its_settings() {
    let test_dir = TestDir::new();
    let node = test_dir.join();
    let error = node.subscribe("later", SHORT_TIMEOUT).unwrap_err();
    assert_eq!((error.kind(), error.subject()), (ErrorKind::NotFound, Some("later")));
    let settings = TopicSettings { depth: 3, largest: 100, ..Default::default() };
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| {
            let mut subscriber = node.subscribe("later", TIMEOUT).unwrap();
            subscriber.pull(TIMEOUT).unwrap().to_vec().unwrap()
        });
        std::thread::sleep(SHORT_TIMEOUT);
        let publisher = node.topic("later", &settings).unwrap().publisher().unwrap();
        publisher.wait_for_subscribers(1, TIMEOUT).unwrap();
        publisher.push(b"hello", TIMEOUT).unwrap();
        assert_eq!(reading.join().unwrap(), b"hello");
    });
}
