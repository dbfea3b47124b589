//! A reader: reads all topics, checks each message, and reports to the supervisor at the end.

use std::path::Path;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use pubsub::{ErrorKind, Subscriber, Topic};
use testkit::children::{next_line, say};

use crate::account::Account;
use crate::message::Message;
use crate::topics;

/// Interval at which a thread checks whether to stop.
const PULL_TIMEOUT: Duration = Duration::from_millis(500);

pub fn run(directory: &Path) {
    let node = topics::join(directory);
    let (is_over, mut lines) = (&AtomicBool::new(false), Vec::new());
    let (node, topics) = (&node, topics::all());
    let are_subscribed = &Barrier::new(topics.len() + 1);
    std::thread::scope(|scope| {
        let threads: Vec<_> = topics
            .into_iter()
            .map(|(name, settings)| {
                scope.spawn(move || {
                    let topic = node.topic(&name, &settings).expect("open the topic");
                    let subscriber = topic.subscriber().expect("create a subscriber");
                    are_subscribed.wait();
                    read(&topic, name, subscriber, is_over)
                })
            })
            .collect();
        // What is published from now on counts for it.
        are_subscribed.wait();
        say("ready");
        while next_line().is_some_and(|line| line != "stop") {}
        is_over.store(true, Relaxed);
        lines.extend(threads.into_iter().map(|thread| thread.join().expect("read a topic")));
    });
    lines.iter().for_each(|(account, _)| say(&account.line()));
    // Stay subscribed while the supervisor checks that all processes are idle.
    while next_line().is_some() {}
}

fn read(
    topic: &Topic,
    name: String,
    mut subscriber: Subscriber,
    is_over: &AtomicBool,
) -> (Account, Subscriber) {
    let mut account = Account { topic: name, ..Account::default() };
    // Missed by subscribers that were evicted.
    let mut missed_before = 0;
    loop {
        match subscriber.pull(PULL_TIMEOUT) {
            Ok(sample) => {
                let bytes = sample.to_vec().expect("read a sample");
                let message = Message::of(&bytes)
                    .unwrap_or_else(|| panic!("{}: corrupted message", account.topic));
                let received = account.publishers.entry(message.publisher).or_default();
                let before = *received;
                assert!(
                    received.add(message.number),
                    "{}: {message:?} is a duplicate or out of order, after {before:?}",
                    account.topic
                );
            }
            Err(error) if error.kind() == ErrorKind::DeadlineExceeded => {
                if is_over.load(Relaxed) {
                    break;
                }
            }
            Err(error) if error.kind() == ErrorKind::Evicted => {
                missed_before += subscriber.missed();
                account.evictions += 1;
                subscriber = topic.subscriber().expect("subscribe after an eviction");
            }
            Err(error) => panic!("{}: {error}", account.topic),
        }
        account.missed = missed_before + subscriber.missed();
        let gaps: u64 = account.publishers.values().map(|received| received.gaps()).sum();
        assert!(
            account.missed >= gaps || account.evictions > 0,
            "{}: {gaps} messages are missing, {} were counted as missed: {account:?}",
            account.topic,
            account.missed
        );
    }
    account.missed = missed_before + subscriber.missed();
    (account, subscriber)
}
