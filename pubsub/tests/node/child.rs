//! The roles of child processes.

use std::path::Path;
use std::time::Instant;

use nix::sys::resource::Resource;
use pubsub::{ErrorKind, Node, NodeOptions, ServiceMode};
use testkit::children::{say, wait_for_end_of_input};

use crate::support::{
    Gate, TIMEOUT, device_topic, message, number_of, options, publish, publish_and_hang,
    publish_on, settings,
};

testkit::child_entry!(enter);

/// Reports whether a message can be published and read, or which error names the limit.
fn run_with_limit(options: &NodeOptions, limit: &str) {
    let since = Instant::now();
    let publish_and_read = || -> pubsub::Result<()> {
        let node = Node::join(options.clone())?;
        let topic = node.topic("numbers", &settings())?;
        let (mut subscriber, publisher) = (topic.subscriber()?, topic.publisher()?);
        publisher.push(&message(1), TIMEOUT)?;
        assert_eq!(number_of(&subscriber.pull(TIMEOUT)?), 1);
        Ok(())
    };
    match publish_and_read() {
        Ok(()) => say("delivered"),
        Err(error) => {
            let text = error.to_string();
            assert!(text.contains(limit), "{text}");
            // The limit is of this process, not of the service.
            assert!(!text.contains("the node's service, process"), "{text}");
            assert!(since.elapsed() < TIMEOUT / 4, "{text}, after {:?}", since.elapsed());
            say("refused");
        }
    }
}

fn enter(args: &[&str]) {
    crate::support::log();
    let [directory, args @ ..] = args else { panic!("the node directory is missing") };
    let directory = Path::new(directory);
    if let ["sees", device, words @ ..] = args {
        return crate::hidden_devices::enter(directory, device, words);
    }
    let join = |service| Node::join(NodeOptions { service, ..options(directory) }).unwrap();
    let (args, mode) = match args {
        ["external", args @ ..] => (args, ServiceMode::External),
        _ => (args, ServiceMode::Embedded),
    };
    let number = |text: &str| text.parse::<u64>().unwrap();
    match *args {
        ["serves"] => {
            let node = join(ServiceMode::Embedded);
            wait_for_end_of_input();
            drop(node);
        }
        // Takes the service over from an embedded one.
        ["serves-dedicated"] => {
            let node = join(ServiceMode::Dedicated);
            wait_for_end_of_input();
            drop(node);
        }
        // A forked child inherits all descriptors of the service.
        ["serves-and-forks", topic] => {
            let node = join(ServiceMode::Embedded);
            let topic = node.topic(topic, &settings()).unwrap();
            crate::support::fork_idle_child();
            wait_for_end_of_input();
            drop((node, topic));
        }
        // Publishes numbers to the first subscriber.
        ["publishes", topic, count] => {
            let node = join(ServiceMode::Embedded);
            let topic = node.topic(topic, &settings()).unwrap();
            let publisher = topic.publisher().unwrap();
            publish(&publisher, 0..number(count));
            publisher.flush(TIMEOUT).unwrap();
        }
        // Waits for a number of subscribers, then publishes numbers.
        ["publishes-to", wanted, topic, count] => {
            let topic = join(mode).topic(topic, &settings()).unwrap();
            let publisher = topic.publisher().unwrap();
            while u64::from(publisher.subscribers()) < number(wanted) {
                std::thread::sleep(std::time::Duration::from_millis(2));
            }
            publish(&publisher, 0..number(count));
            publisher.flush(TIMEOUT).unwrap();
        }
        // Publishes numbers until it is killed.
        ["publishes-forever", topic] => {
            let node = join(ServiceMode::External);
            let topic = node.topic(topic, &settings()).unwrap();
            let publisher = topic.publisher().unwrap();
            publish(&publisher, 0..u64::MAX);
        }
        // Publishes on a stream.
        ["publishes-on", topic, count] => {
            let node = join(ServiceMode::External);
            let (settings, device) = device_topic();
            let topic = node.topic(topic, &settings).unwrap();
            let publisher = topic.publisher().unwrap();
            let stream = device.stream().unwrap();
            publish_on(&publisher, &stream, 0..number(count));
        }
        ["publishes-and-hangs", topic] => publish_and_hang(&join(ServiceMode::External), topic),
        // Pulls samples on a stream that never finishes with them.
        ["reads-and-hangs", topic, count] => {
            let node = join(ServiceMode::External);
            let (_, device) = device_topic();
            let topic = node.open(topic).unwrap();
            let mut subscriber = topic.subscriber().unwrap();
            let stream = device.stream().unwrap();
            Gate::new(&device).block(&stream);
            for _ in 0..number(count) {
                let sample = subscriber.pull_on(&stream, TIMEOUT).unwrap();
                sample.release_on(&stream).unwrap();
            }
            topic.publisher().unwrap().push(&message(99), TIMEOUT).unwrap();
            wait_for_end_of_input();
        }
        // Holds all loans that its publisher may have, until it is killed.
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
        // Reads all numbers in order.
        ["reads", topic, count] => {
            let node = join(mode);
            let topic = node.topic(topic, &settings()).unwrap();
            let mut subscriber = topic.subscriber().unwrap();
            for expected in 0..number(count) {
                assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), expected);
            }
        }
        // Reads nothing.
        ["subscribes", topic] => {
            let topic = join(ServiceMode::External).open(topic).unwrap();
            let subscriber = topic.subscriber().unwrap();
            wait_for_end_of_input();
            drop(subscriber);
        }
        // Pulls samples and holds them.
        ["holds-samples", topic, count] => {
            let node = join(ServiceMode::External);
            let topic = node.topic(topic, &settings()).unwrap();
            let mut subscriber = topic.subscriber().unwrap();
            let samples: Vec<_> =
                (0..number(count)).map(|_| subscriber.pull(TIMEOUT).unwrap()).collect();
            wait_for_end_of_input();
            drop(samples);
        }
        ["closes-its-node", topic] => crate::closing::close_node(&join(mode), topic),
        ["has-few-descriptors", soft] => {
            nix::sys::resource::setrlimit(Resource::RLIMIT_NOFILE, number(soft), 4096).unwrap();
            run_with_limit(&NodeOptions { service: mode, ..options(directory) }, "ulimit -n 4096");
        }
        // The limit applies to shared memory, too.
        ["has-short-files", bytes] => {
            nix::sys::resource::setrlimit(Resource::RLIMIT_FSIZE, number(bytes), 1 << 40).unwrap();
            run_with_limit(&NodeOptions { service: mode, ..options(directory) }, "ulimit -f");
        }
        ["serves-with-few-descriptors", soft] => {
            let node = join(ServiceMode::Embedded);
            nix::sys::resource::setrlimit(Resource::RLIMIT_NOFILE, number(soft), 4096).unwrap();
            say("serves");
            wait_for_end_of_input();
            drop(node);
        }
        _ => panic!("unknown role {args:?}"),
    }
}
