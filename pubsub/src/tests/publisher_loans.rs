//! The limit of a publisher's loans.

use std::time::Instant;

use gpu::{Device, DeviceName};
use testkit::children::ForkedChild;

use super::deaths::pidfd_of;
use super::stream_order::{Gate, node_with, on_a_device};
use super::*;
use crate::Attempt;
use crate::loan_limit::{Borrower, LoanLimit};

fn refused(publisher: &Publisher) {
    for refused in [
        publisher.try_loan(8).map(drop),
        publisher.loan(8, TEST_TIMEOUT).map(drop),
        publisher.push(b"x", TEST_TIMEOUT).map(drop),
        publisher.try_push(b"x").map(drop),
    ] {
        let error = refused.unwrap_err();
        assert_eq!((error.kind(), error.subject()), (ErrorKind::TooManyLoans, Some("test")));
        assert!(error.detail().contains("its 2 loans"), "{error}");
    }
}

#[test]
fn publisher_has_no_more_loans_than_its_topic_allows() {
    let node = TestNode::new(&TopicSettings { loans: 2, depth: 2, ..settings() });
    let (publisher, mut subscriber) = (node.publisher(), node.subscriber());
    let one = publisher.loan(8, TEST_TIMEOUT).unwrap();
    let other = publisher.try_loan(8).unwrap().unwrap();
    refused(&publisher);
    // A refused attempt allocates nothing, and other publishers have their own loans.
    assert_eq!(node.blocks_allocated(), 2);
    node.publisher().push(b"another's", TEST_TIMEOUT).unwrap();
    // A loan is returned when it is dropped, and when it is published.
    drop(one);
    let one = publisher.loan(8, TEST_TIMEOUT).unwrap();
    refused(&publisher);
    one.publish(TEST_TIMEOUT).unwrap();
    let one = publisher.loan(8, TEST_TIMEOUT).unwrap();
    refused(&publisher);
    // A loan that a full topic returned still counts; one that timed out does not.
    let Attempt::Full(one) = one.try_publish().unwrap() else { panic!("there was room") };
    refused(&publisher);
    let Attempt::Full(one) = one.publish_within(SHORT_TIMEOUT).unwrap() else {
        panic!("there was room")
    };
    refused(&publisher);
    assert_eq!(one.publish(SHORT_TIMEOUT).unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    let one = publisher.loan(8, TEST_TIMEOUT).unwrap();
    refused(&publisher);
    // Nor does one that was published without subscribers.
    for _ in 0..2 {
        drop(subscriber.pull(TEST_TIMEOUT).unwrap());
    }
    drop(subscriber);
    assert_eq!(one.publish(TEST_TIMEOUT).unwrap().subscribers, 0);
    let _one = publisher.loan(8, TEST_TIMEOUT).unwrap();
    refused(&publisher);
    drop(other);
    // A push has a loan only during the call.
    for _ in 0..10 {
        publisher.push(b"x", TEST_TIMEOUT).unwrap();
        publisher.try_push(b"x").unwrap().unwrap();
    }
    assert_eq!(publisher.loan(2 << 20, TEST_TIMEOUT).unwrap_err().kind(), ErrorKind::TooLong);
    assert!(publisher.try_loan(8).unwrap().is_some());
}

#[test]
fn attempt_without_memory_is_no_loan() {
    let largest = 2 << 20;
    let settings = TopicSettings { largest, loans: 1, ..settings() };
    let node = TestNode::with_limit(&settings, 2 << 20);
    let (publisher, mut subscriber) = (node.publisher(), node.subscriber());
    publisher.loan(largest, TEST_TIMEOUT).unwrap().publish(TEST_TIMEOUT).unwrap();
    for _ in 0..3 {
        assert!(publisher.try_loan(largest).unwrap().is_none());
        let error = publisher.loan(largest, SHORT_TIMEOUT).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    }
    drop(subscriber.pull(TEST_TIMEOUT).unwrap());
    drop(publisher.loan(largest, TEST_TIMEOUT).unwrap());
}

#[test]
fn pushing_threads_wait_for_each_others_loans() {
    let node = TestNode::new(&TopicSettings { loans: 2, depth: 1, ..settings() });
    let (publisher, mut subscriber) = (node.publisher(), node.subscriber());
    publisher.push(b"first", TEST_TIMEOUT).unwrap();
    std::thread::scope(|scope| {
        let pushing: Vec<_> =
            (0..6).map(|_| scope.spawn(|| publisher.push(b"x", TEST_TIMEOUT))).collect();
        // Two threads have all loans, and wait for room; they will return them.
        while node.blocks_allocated() < 3 {
            std::thread::yield_now();
        }
        assert!(publisher.try_loan(8).unwrap().is_none());
        assert_eq!(publisher.try_push(b"x").unwrap(), None);
        let error = publisher.loan(8, SHORT_TIMEOUT).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
        assert!(error.detail().contains("2 loans"), "{error}");
        for _ in 0..7 {
            drop(subscriber.pull(TEST_TIMEOUT).unwrap());
        }
        for thread in pushing {
            assert_eq!(thread.join().unwrap().unwrap().subscribers, 1);
        }
    });
    drop((publisher.loan(8, TEST_TIMEOUT).unwrap(), publisher.loan(8, TEST_TIMEOUT).unwrap()));
    assert_eq!(node.blocks_allocated(), 0);
}

#[test]
fn closing_the_node_ends_the_wait_for_a_loan() {
    let node = TestNode::new(&TopicSettings { loans: 1, depth: 1, ..settings() });
    let (publisher, _subscriber) = (node.publisher(), node.subscriber());
    publisher.push(b"first", TEST_TIMEOUT).unwrap();
    std::thread::scope(|scope| {
        let pushing = scope.spawn(|| publisher.push(b"x", TEST_TIMEOUT));
        while node.waiting() == 0 {
            std::thread::yield_now();
        }
        let waiting = scope.spawn(|| publisher.loan(8, TEST_TIMEOUT).map(drop));
        std::thread::sleep(SHORT_TIMEOUT);
        node.close();
        node.topic.local().room().ring();
        for ended in [pushing.join().unwrap().map(drop), waiting.join().unwrap()] {
            assert_eq!(ended.unwrap_err().kind(), ErrorKind::Closed);
        }
    });
}

#[test]
fn unread_message_is_a_loan_until_its_stream_has_finished() {
    let (node, device) = node_with(&TopicSettings { loans: 2, ..on_a_device() });
    let (publisher, stream) = (node.publisher(), device.stream().unwrap());
    let from = device.allocate(4096).unwrap();
    let gate = Gate::new(&device);
    gate.stop(&stream);
    for _ in 0..2 {
        assert_eq!(publisher.push_on(&stream, &from.whole(), TEST_TIMEOUT).unwrap().subscribers, 0);
    }
    assert_eq!(node.blocks_allocated(), 2);
    // The loan returns by itself, so the call waits for it.
    assert!(publisher.try_push_on(&stream, &from.whole()).unwrap().is_none());
    assert!(publisher.try_loan(8).unwrap().is_none());
    let error = publisher.push_on(&stream, &from.whole(), SHORT_TIMEOUT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| publisher.loan(8, TEST_TIMEOUT).map(drop));
        std::thread::sleep(SHORT_TIMEOUT);
        gate.open();
        waiting.join().unwrap().unwrap();
    });
    stream.synchronize(TEST_TIMEOUT).unwrap();
    // The same for a caller's loan: now the device has it.
    gate_stream(&node, &publisher, &device);
    drop((publisher, from));
    node.local.free_completed(&node.caller());
    assert_eq!(node.blocks_allocated(), 0);
}

fn gate_stream(node: &TestNode, publisher: &Publisher, device: &Device) {
    let (stream, gate) = (device.stream().unwrap(), Gate::new(device));
    gate.stop(&stream);
    for _ in 0..2 {
        let loan = publisher.loan(4096, TEST_TIMEOUT).unwrap();
        stream.fill(loan.slice(), 1).unwrap();
        assert_eq!(loan.publish_on(&stream, TEST_TIMEOUT).unwrap().subscribers, 0);
    }
    assert!(publisher.try_loan(8).unwrap().is_none());
    gate.open();
    stream.synchronize(TEST_TIMEOUT).unwrap();
    // At once: the attempt polls the device.
    let loans = [publisher.try_loan(8).unwrap(), publisher.try_loan(8).unwrap()];
    assert!(loans.iter().all(Option::is_some));
    drop(loans);
    assert_eq!(node.blocks_allocated(), 0);
}

#[test]
fn published_message_of_a_stream_is_no_loan() {
    let (node, device) = node_with(&TopicSettings { loans: 1, depth: 8, ..on_a_device() });
    assert_eq!(device.name(), DeviceName::emulated(0));
    let (publisher, mut subscriber) = (node.publisher(), node.subscriber());
    let (stream, from) = (device.stream().unwrap(), device.allocate(4096).unwrap());
    let gate = Gate::new(&device);
    gate.stop(&stream);
    for _ in 0..8 {
        publisher.push_on(&stream, &from.whole(), TEST_TIMEOUT).unwrap();
    }
    drop(publisher.loan(8, TEST_TIMEOUT).unwrap());
    gate.open();
    for _ in 0..8 {
        drop(subscriber.pull(TEST_TIMEOUT).unwrap());
    }
}

#[test]
fn forked_child_drops_a_loan_without_waiting() {
    let loans = LoanLimit::new(1);
    loans.take(Borrower::Transient).unwrap().detach();
    // Forked while a thread of the parent waits, which the child does not have.
    let has_ended = loans.wait(Instant::now(), || {
        let child = ForkedChild::new(|| loans.give_back(Borrower::Transient));
        let (pidfd, end) = (pidfd_of(&child), Instant::now() + TEST_TIMEOUT / 4);
        while !pidfd.has_exited() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
        child.kill();
        Some(child.wait().success())
    });
    assert_eq!(has_ended, Some(true));
}
