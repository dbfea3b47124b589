//! Publishers and subscribers that another thread closes, alone or with their topic.

use std::os::fd::AsFd;
use std::sync::atomic::AtomicBool;
use std::thread::{ScopedJoinHandle, scope, sleep};
use std::time::Instant;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::*;

/// Joins a thread whose wait is to have ended, and checks the error.
#[track_caller]
fn assert_closed<T: std::fmt::Debug>(thread: ScopedJoinHandle<'_, Result<T>>, detail: &str) {
    let error = thread.join().unwrap().unwrap_err();
    assert_eq!((error.kind(), error.detail()), (ErrorKind::Closed, detail), "{error}");
    assert_eq!(error.subject(), Some("test"));
}

#[test]
fn close_of_the_topic_ends_all_waits_of_other_threads() {
    let node = TestNode::new(&TopicSettings { depth: 1, loans: 1, ..settings() });
    let context = node.context();
    let (idle, flushing, full) = (
        Publisher::new(context.clone()).unwrap(),
        Publisher::new(context.clone()).unwrap(),
        Publisher::new(context.clone()).unwrap(),
    );
    let mut reader = Subscriber::new(context.clone()).unwrap();
    let polled = Subscriber::new(context.clone()).unwrap();
    flushing.push(b"fills the topic", TEST_TIMEOUT).unwrap();
    let held = reader.pull(TEST_TIMEOUT).unwrap();
    let since = Instant::now();
    scope(|scope| {
        let descriptor = polled.descriptor().unwrap();
        // Its message is unread.
        let waits = [
            scope.spawn(|| reader.pull(TEST_TIMEOUT).map(drop)),
            scope.spawn(|| full.push(b"waits for room", TEST_TIMEOUT).map(drop)),
            scope.spawn(|| flushing.flush(TEST_TIMEOUT)),
            scope.spawn(|| idle.wait_for_subscribers(9, TEST_TIMEOUT).map(drop)),
            // The only loan is that of the push.
            scope.spawn(|| {
                while full.try_loan(1)?.is_some() {
                    sleep(Duration::from_millis(1));
                }
                full.push(b"waits for the loan", TEST_TIMEOUT).map(drop)
            }),
        ];
        sleep(SHORT_TIMEOUT);
        context.close();
        waits.into_iter().for_each(|thread| assert_closed(thread, "the topic was closed"));
        let mut entry = [PollFd::new(descriptor.as_fd(), PollFlags::POLLIN)];
        assert_eq!(poll(&mut entry, PollTimeout::from(10_000_u16)).unwrap(), 1);
    });
    assert!(since.elapsed() < TEST_TIMEOUT / 4);
    // What a reader holds stays readable.
    assert_eq!(held.to_vec().unwrap(), b"fills the topic");
    assert!(held.is_valid());
    let refused = |error: Error| assert_eq!(error.detail(), "the topic was closed");
    refused(Publisher::new(context.clone()).unwrap_err());
    refused(Subscriber::new(context.clone()).unwrap_err());
    refused(idle.try_loan(1).unwrap_err());
    // The topic itself, as opened another time, goes on.
    let (publisher, mut subscriber) = (node.publisher(), node.subscriber());
    drop((held, reader));
    publisher.push(b"again", TEST_TIMEOUT).unwrap();
    assert_eq!(subscriber.pull(TEST_TIMEOUT).unwrap().to_vec().unwrap(), b"again");
    drop((idle, flushing, full, polled, context, publisher, subscriber));
    assert_eq!(node.blocks_allocated(), 0);
}

#[test]
fn closed_publisher_keeps_its_slot_until_its_loans_are_gone() {
    let node = TestNode::new(&settings());
    let publisher = node.publisher();
    let mut loan = publisher.loan(10, TEST_TIMEOUT).unwrap();
    publisher.close();
    assert!(node.topic.publishers().is_empty());
    assert_eq!(publisher.try_push(b"late").unwrap_err().detail(), "the publisher was closed");
    assert_eq!(publisher.flush(TEST_TIMEOUT).unwrap_err().kind(), ErrorKind::Closed);
    drop(publisher);
    loan.write(0, b"0123456789").unwrap();
    assert_eq!(node.topic.reserved_publishers(), 1);
    assert_eq!(loan.publish(TEST_TIMEOUT).unwrap_err().detail(), "the publisher was closed");
    assert_eq!((node.topic.reserved_publishers(), node.blocks_allocated()), (0, 0));
}

#[test]
fn message_taken_while_closing_is_whole_or_given_up() {
    for round in 0..100_u64 {
        let reliability = [Reliability::Reliable, Reliability::DropOldest][(round % 2) as usize];
        let node = TestNode::new(&TopicSettings { depth: 4, reliability, ..settings() });
        let (publisher, mut subscriber) = (node.publisher(), node.subscriber());
        let (closer, is_over) = (subscriber.closer(), AtomicBool::new(false));
        scope(|scope| {
            let publishing = scope.spawn(|| {
                for number in 0_u64.. {
                    if is_over.load(Acquire) {
                        return;
                    }
                    publisher.try_push(&number.to_le_bytes()).unwrap();
                }
            });
            let reading = scope.spawn(|| {
                let mut held = Vec::new();
                loop {
                    match subscriber.pull(TEST_TIMEOUT) {
                        Ok(sample) => {
                            let bytes = sample.to_vec().unwrap();
                            held.push((sample, bytes));
                            if held.len() > 1 {
                                held.remove(0);
                            }
                        }
                        Err(error) => {
                            assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
                            return held;
                        }
                    }
                }
            });
            let end = Instant::now() + Duration::from_micros(round % 50 * 10);
            while Instant::now() < end {
                std::thread::yield_now();
            }
            closer.close();
            assert!(closer.is_closed());
            let held = reading.join().unwrap();
            // What is published later does not overwrite what is held.
            let mut other = node.subscriber();
            for _ in 0..50 {
                drop(other.try_pull().unwrap());
            }
            for (sample, bytes) in held {
                assert_eq!(sample.to_vec().unwrap(), bytes);
            }
            is_over.store(true, Release);
            publishing.join().unwrap();
            drop(other);
        });
        drop((publisher, subscriber));
        assert_eq!(node.blocks_allocated(), 0, "round {round}");
    }
}
