//! How many loans a publisher may have.

use std::time::Instant;

use gpu::{Device, DeviceName};
use testkit::children::ForkedChild;

use super::deaths::life_of;
use super::ordered::{Gate, home_with, on_a_device};
use super::*;
use crate::Attempt;
use crate::loans::{Borrower, Loans};

fn refused(publisher: &Publisher) {
    for refused in [
        publisher.try_loan(8).map(drop),
        publisher.loan(8, FAR).map(drop),
        publisher.push(b"x", FAR).map(drop),
        publisher.try_push(b"x").map(drop),
    ] {
        let error = refused.unwrap_err();
        assert_eq!((error.kind(), error.subject()), (ErrorKind::TooManyLoans, Some("test")));
        assert!(error.detail().contains("the 2 that"), "{error}");
    }
}

#[test]
fn no_publisher_has_more_than_its_topic_allows() {
    let home = Home::new(&TopicSettings { loans: 2, depth: 2, ..settings() });
    let (publisher, mut subscriber) = (home.publisher(), home.subscriber());
    let one = publisher.loan(8, FAR).unwrap();
    let other = publisher.try_loan(8).unwrap().unwrap();
    refused(&publisher);
    // Nor is anything taken by the attempt; and what others may have is their own.
    assert_eq!(home.blocks_taken(), 2);
    home.publisher().push(b"another's", FAR).unwrap();
    // Given back when it is dropped, and when it is published.
    drop(one);
    let one = publisher.loan(8, FAR).unwrap();
    refused(&publisher);
    one.publish(FAR).unwrap();
    let one = publisher.loan(8, FAR).unwrap();
    refused(&publisher);
    // What could not be published and came back is still one; what did not is none.
    let Attempt::Full(one) = one.try_publish().unwrap() else { panic!("there is no room") };
    refused(&publisher);
    let Attempt::Full(one) = one.publish_within(SOON).unwrap() else { panic!("there is no room") };
    refused(&publisher);
    assert_eq!(one.publish(SOON).unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    let one = publisher.loan(8, FAR).unwrap();
    refused(&publisher);
    // Nor is one that nobody wanted.
    for _ in 0..2 {
        drop(subscriber.pull(FAR).unwrap());
    }
    drop(subscriber);
    assert_eq!(one.publish(FAR).unwrap().readers, 0);
    let _one = publisher.loan(8, FAR).unwrap();
    refused(&publisher);
    drop(other);
    // Pushing has one for as long as it takes.
    for _ in 0..10 {
        publisher.push(b"x", FAR).unwrap();
        publisher.try_push(b"x").unwrap().unwrap();
    }
    assert_eq!(publisher.loan(2 << 20, FAR).unwrap_err().kind(), ErrorKind::TooLong);
    assert!(publisher.try_loan(8).unwrap().is_some());
}

#[test]
fn what_found_no_memory_is_no_loan() {
    let largest = 2 << 20;
    let settings = TopicSettings { largest, loans: 1, ..settings() };
    let home = Home::with_limit(&settings, 2 << 20);
    let (publisher, mut subscriber) = (home.publisher(), home.subscriber());
    publisher.loan(largest, FAR).unwrap().publish(FAR).unwrap();
    for _ in 0..3 {
        assert!(publisher.try_loan(largest).unwrap().is_none());
        let error = publisher.loan(largest, SOON).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    }
    drop(subscriber.pull(FAR).unwrap());
    drop(publisher.loan(largest, FAR).unwrap());
}

#[test]
fn threads_that_push_wait_for_each_other() {
    let home = Home::new(&TopicSettings { loans: 2, depth: 1, ..settings() });
    let (publisher, mut subscriber) = (home.publisher(), home.subscriber());
    publisher.push(b"first", FAR).unwrap();
    std::thread::scope(|scope| {
        let pushing: Vec<_> = (0..6).map(|_| scope.spawn(|| publisher.push(b"x", FAR))).collect();
        // Two have all that there may be, and wait for room; they will not for ever.
        while home.blocks_taken() < 3 {
            std::thread::yield_now();
        }
        assert!(publisher.try_loan(8).unwrap().is_none());
        assert_eq!(publisher.try_push(b"x").unwrap(), None);
        let error = publisher.loan(8, SOON).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
        assert!(error.detail().contains("2 loans"), "{error}");
        for _ in 0..7 {
            drop(subscriber.pull(FAR).unwrap());
        }
        for thread in pushing {
            assert_eq!(thread.join().unwrap().unwrap().readers, 1);
        }
    });
    drop((publisher.loan(8, FAR).unwrap(), publisher.loan(8, FAR).unwrap()));
    assert_eq!(home.blocks_taken(), 0);
}

#[test]
fn one_who_waits_for_those_that_push_hears_that_the_node_is_closed() {
    let home = Home::new(&TopicSettings { loans: 1, depth: 1, ..settings() });
    let (publisher, _subscriber) = (home.publisher(), home.subscriber());
    publisher.push(b"first", FAR).unwrap();
    std::thread::scope(|scope| {
        let pushing = scope.spawn(|| publisher.push(b"x", FAR));
        while home.waiting() == 0 {
            std::thread::yield_now();
        }
        let waiting = scope.spawn(|| publisher.loan(8, FAR).map(drop));
        std::thread::sleep(SOON);
        home.close();
        home.topic.here().ring_room();
        for ended in [pushing.join().unwrap().map(drop), waiting.join().unwrap()] {
            assert_eq!(ended.unwrap_err().kind(), ErrorKind::Closed);
        }
    });
}

#[test]
fn what_a_stream_still_writes_and_nobody_wants_counts_until_it_has() {
    let (home, device) = home_with(&TopicSettings { loans: 2, ..on_a_device() });
    let (publisher, stream) = (home.publisher(), device.stream().unwrap());
    let from = device.allocate(4096).unwrap();
    let gate = Gate::new(&device);
    gate.stop(&stream);
    for _ in 0..2 {
        assert_eq!(publisher.push_on(&stream, &from.whole(), FAR).unwrap().readers, 0);
    }
    assert_eq!(home.blocks_taken(), 2);
    // It comes back by itself, so it is waited for.
    assert!(publisher.try_push_on(&stream, &from.whole()).unwrap().is_none());
    assert!(publisher.try_loan(8).unwrap().is_none());
    let error = publisher.push_on(&stream, &from.whole(), SOON).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| publisher.loan(8, FAR).map(drop));
        std::thread::sleep(SOON);
        gate.open();
        waiting.join().unwrap().unwrap();
    });
    stream.synchronize(FAR).unwrap();
    // A caller's as well: it is the device that has it now.
    gate_again(&home, &publisher, &device);
    drop((publisher, from));
    home.here.free_what_is_done(&home.caller());
    assert_eq!(home.blocks_taken(), 0);
}

fn gate_again(home: &Home, publisher: &Publisher, device: &Device) {
    let (stream, gate) = (device.stream().unwrap(), Gate::new(device));
    gate.stop(&stream);
    for _ in 0..2 {
        let loan = publisher.loan(4096, FAR).unwrap();
        stream.fill(loan.slice(), 1).unwrap();
        assert_eq!(loan.publish_on(&stream, FAR).unwrap().readers, 0);
    }
    assert!(publisher.try_loan(8).unwrap().is_none());
    gate.open();
    stream.synchronize(FAR).unwrap();
    // At once: who asks looks whether the device has done with it.
    let loans = [publisher.try_loan(8).unwrap(), publisher.try_loan(8).unwrap()];
    assert!(loans.iter().all(Option::is_some));
    drop(loans);
    assert_eq!(home.blocks_taken(), 0);
}

#[test]
fn what_streams_write_and_was_published_is_no_loan() {
    let (home, device) = home_with(&TopicSettings { loans: 1, depth: 8, ..on_a_device() });
    assert_eq!(device.name(), DeviceName::stand_in(0));
    let (publisher, mut subscriber) = (home.publisher(), home.subscriber());
    let (stream, from) = (device.stream().unwrap(), device.allocate(4096).unwrap());
    let gate = Gate::new(&device);
    gate.stop(&stream);
    for _ in 0..8 {
        publisher.push_on(&stream, &from.whole(), FAR).unwrap();
    }
    drop(publisher.loan(8, FAR).unwrap());
    gate.open();
    for _ in 0..8 {
        drop(subscriber.pull(FAR).unwrap());
    }
}

#[test]
fn a_forked_child_that_drops_a_loan_waits_for_nobody() {
    let loans = Loans::new(1);
    loans.take(Borrower::Passing).unwrap().hand_over();
    // Forked while a thread of the parent's looks, which the child does not have.
    let has_ended = loans.wait(Instant::now(), || {
        let child = ForkedChild::new(|| loans.give_back(Borrower::Passing));
        let (life, end) = (life_of(&child), Instant::now() + FAR / 4);
        while !life.is_over() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
        child.kill();
        Some(child.wait().success())
    });
    assert_eq!(has_ended, Some(true));
}
