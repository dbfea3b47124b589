//! What the other processes of a test do.

use std::path::Path;
use std::time::Instant;

use nix::sys::resource::Resource;
use pubsub::{ErrorKind, Node, NodeOptions, ServiceMode};
use testkit::children::{say, wait_for_end_of_input};

use crate::support::{
    Gate, TIMEOUT, message, number_of, on_a_device, options, publish, publish_and_hang, publish_on,
    settings,
};

testkit::child_entry!(enter);

/// Says how far a message goes: all the way, or until an error that names the limit.
fn limited(options: &NodeOptions, names: &str) {
    let since = Instant::now();
    let used = || -> pubsub::Result<()> {
        let node = Node::join(options.clone())?;
        let topic = node.topic("numbers", &settings())?;
        let (mut subscriber, publisher) = (topic.subscriber()?, topic.publisher()?);
        publisher.push(&message(1), TIMEOUT)?;
        assert_eq!(number_of(&subscriber.pull(TIMEOUT)?), 1);
        Ok(())
    };
    match used() {
        Ok(()) => say("used"),
        Err(error) => {
            let text = error.to_string();
            assert!(text.contains(names), "{text}");
            // The limit is this process's own.
            assert!(!text.contains("the node's service, process"), "{text}");
            assert!(since.elapsed() < TIMEOUT / 4, "{text}, after {:?}", since.elapsed());
            say("refused");
        }
    }
}

fn enter(words: &[&str]) {
    crate::support::log();
    let [place, words @ ..] = words else { panic!("no place") };
    let place = Path::new(place);
    let join = |service| Node::join(NodeOptions { service, ..options(place) }).unwrap();
    // Serves if nobody does, unless it is told not to.
    let (words, comes) = match words {
        ["outside", words @ ..] => (words, ServiceMode::External),
        _ => (words, ServiceMode::Embedded),
    };
    let number = |text: &str| text.parse::<u64>().unwrap();
    match *words {
        // Serves, if nobody else does.
        ["serves"] => {
            let node = join(ServiceMode::Embedded);
            wait_for_end_of_input();
            drop(node);
        }
        // Serves, and takes it from those that do in passing.
        ["stands"] => {
            let node = join(ServiceMode::Dedicated);
            wait_for_end_of_input();
            drop(node);
        }
        // Serves, and leaves all that it has open with a child.
        ["serves-and-forks", topic] => {
            let node = join(ServiceMode::Embedded);
            let topic = node.topic(topic, &settings()).unwrap();
            crate::support::leave_a_child();
            wait_for_end_of_input();
            drop((node, topic));
        }
        // Publishes numbers when somebody subscribes.
        ["publishes", topic, count] => {
            let node = join(ServiceMode::Embedded);
            let topic = node.topic(topic, &settings()).unwrap();
            let publisher = topic.publisher().unwrap();
            publish(&publisher, 0..number(count));
            publisher.flush(TIMEOUT).unwrap();
        }
        // Publishes numbers when so many subscribe.
        ["publishes-to", wanted, topic, count] => {
            let topic = join(comes).topic(topic, &settings()).unwrap();
            let publisher = topic.publisher().unwrap();
            while u64::from(publisher.subscribers()) < number(wanted) {
                std::thread::sleep(std::time::Duration::from_millis(2));
            }
            publish(&publisher, 0..number(count));
            publisher.flush(TIMEOUT).unwrap();
        }
        // Publishes numbers until it is killed.
        ["publishes-for-ever", topic] => {
            let node = join(ServiceMode::External);
            let topic = node.topic(topic, &settings()).unwrap();
            let publisher = topic.publisher().unwrap();
            publish(&publisher, 0..u64::MAX);
        }
        // Publishes numbers on a stream.
        ["publishes-on", topic, count] => {
            let node = join(ServiceMode::External);
            let (settings, device) = on_a_device();
            let topic = node.topic(topic, &settings).unwrap();
            let publisher = topic.publisher().unwrap();
            let stream = device.stream().unwrap();
            publish_on(&publisher, &stream, 0..number(count));
        }
        ["publishes-and-hangs", topic] => publish_and_hang(&join(ServiceMode::External), topic),
        // Takes samples on a stream that never comes to their end.
        ["reads-and-hangs", topic, count] => {
            let node = join(ServiceMode::External);
            let (_, device) = on_a_device();
            let topic = node.open(topic).unwrap();
            let mut subscriber = topic.subscriber().unwrap();
            let stream = device.stream().unwrap();
            Gate::new(&device).stop(&stream);
            for _ in 0..number(count) {
                let sample = subscriber.pull_on(&stream, TIMEOUT).unwrap();
                sample.release_on(&stream).unwrap();
            }
            topic.publisher().unwrap().push(&message(99), TIMEOUT).unwrap();
            wait_for_end_of_input();
        }
        // Holds all the loans that a publisher may have, so many, and is killed.
        ["loans", topic, count] => {
            let node = join(ServiceMode::External);
            let topic = node.open(topic).unwrap();
            let publisher = topic.publisher().unwrap();
            let loans: Vec<_> =
                (0..number(count)).map(|_| publisher.loan(4096, TIMEOUT).unwrap()).collect();
            let refused = publisher.push(&message(0), TIMEOUT).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::TooManyLoans);
            let other = topic.publisher().unwrap();
            other.push(&message(0), TIMEOUT).unwrap();
            wait_for_end_of_input();
            drop((loans, other));
        }
        // Reads numbers, all of them and in order.
        ["reads", topic, count] => {
            let node = join(comes);
            let topic = node.topic(topic, &settings()).unwrap();
            let mut subscriber = topic.subscriber().unwrap();
            for expected in 0..number(count) {
                assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), expected);
            }
        }
        // Subscribes, and reads nothing.
        ["subscribes", topic] => {
            let topic = join(ServiceMode::External).open(topic).unwrap();
            let subscriber = topic.subscriber().unwrap();
            wait_for_end_of_input();
            drop(subscriber);
        }
        // Takes samples and keeps them.
        ["hoards", topic, count] => {
            let node = join(ServiceMode::External);
            let topic = node.topic(topic, &settings()).unwrap();
            let mut subscriber = topic.subscriber().unwrap();
            let samples: Vec<_> =
                (0..number(count)).map(|_| subscriber.pull(TIMEOUT).unwrap()).collect();
            wait_for_end_of_input();
            drop(samples);
        }
        // Joins, publishes and reads with few descriptors, or hears at once that they are too few.
        ["has-few-descriptors", soft] => {
            nix::sys::resource::setrlimit(Resource::RLIMIT_NOFILE, number(soft), 4096).unwrap();
            limited(&NodeOptions { service: comes, ..options(place) }, "ulimit -n 4096");
        }
        // The same where files are short, shared memory included.
        ["has-short-files", bytes] => {
            nix::sys::resource::setrlimit(Resource::RLIMIT_FSIZE, number(bytes), 1 << 40).unwrap();
            limited(&NodeOptions { service: comes, ..options(place) }, "ulimit -f");
        }
        ["serves-with-few-descriptors", soft] => {
            let node = join(ServiceMode::Embedded);
            nix::sys::resource::setrlimit(Resource::RLIMIT_NOFILE, number(soft), 4096).unwrap();
            say("serves");
            wait_for_end_of_input();
            drop(node);
        }
        _ => panic!("no role {words:?}"),
    }
}
