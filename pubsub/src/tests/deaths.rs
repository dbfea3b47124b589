//! Processes that die, or fork.

use std::os::fd::AsFd;
use std::sync::Barrier;
use std::time::Instant;

use ipc::Fate;
use testkit::children::ForkedChild;

use super::*;
use crate::{Attempt, Event};

pub(super) fn life_of(child: &ForkedChild) -> Life {
    Life::from_fd(child.pidfd()).unwrap()
}

impl Home {
    /// As another process opens it, in the name of one that the parent admitted.
    pub(super) fn joined(&self, me: Participant) -> Self {
        let copy = |fd: std::os::fd::BorrowedFd<'_>| fd.try_clone_to_owned().unwrap();
        let hall = Segment::open(copy(self.hall.as_fd()), HALL).unwrap();
        let roster = Arc::new(Roster::new(hall.words()).unwrap());
        let opened = |pool: &Pool| {
            let opened = Pool::open(copy(pool.books())).unwrap();
            for number in 0..pool.held() {
                opened.follow_piece(number, pool.piece(number).unwrap().unwrap()).unwrap();
            }
            Arc::new(opened)
        };
        let topic = Arc::new(Topic::open(copy(self.topic.segment())).unwrap());
        Self::with_parts(hall, roster, me, topic, opened(&self.here), opened(&self.arrivals))
    }

    /// A name for a child, who is to be born.
    pub(super) fn admit(&self) -> Participant {
        self.clerk.roster.admit(Life::of_this_process().unwrap()).unwrap()
    }

    /// What the service does when one is dead.
    pub(super) fn bury(&self, who: Participant) {
        while !self.clerk.roster.is_dead(Some(who)) {
            std::thread::yield_now();
        }
        let caller = self.caller();
        self.topic.bury_in(&caller, who, self.here.ledger(), self.arrivals.ledger()).unwrap();
        for pool in [&self.here, &self.arrivals] {
            pool.reclaim(&caller, who).unwrap();
        }
        assert!(self.clerk.roster.strike_off(who));
    }
}

#[test]
fn another_process_reads_what_this_one_publishes_and_the_other_way_round() {
    let home = Home::new(&settings());
    home.clerk.grow(home.here.id(), 1 << 20);
    let who = home.admit();
    let publisher = home.publisher();
    let mut subscriber = home.subscriber();
    let child = ForkedChild::new(|| {
        let home = home.joined(who);
        let mut subscriber = home.subscriber();
        let publisher = home.publisher();
        publisher.push(b"ready", FAR).unwrap();
        drop(subscriber.pull(FAR).unwrap());
        for number in 0..100_u32 {
            let sample = subscriber.pull(FAR).unwrap();
            assert_eq!(sample.to_vec().unwrap(), number.to_le_bytes());
        }
    });
    home.clerk.roster.learn(who, life_of(&child));
    assert_eq!(subscriber.pull(FAR).unwrap().to_vec().unwrap(), b"ready");
    drop(subscriber);
    for number in 0..100_u32 {
        publisher.push(&number.to_le_bytes(), FAR).unwrap();
    }
    assert!(child.wait().success());
    home.bury(who);
    drop(publisher);
    assert_eq!(home.blocks_taken(), 0);
}

#[test]
fn one_who_is_killed_is_cleaned_up_after_and_others_are_told() {
    let home = Home::new(&TopicSettings { depth: 3, ..settings() });
    home.clerk.grow(home.here.id(), 1 << 20);
    let who = home.admit();
    let publisher = home.publisher();
    let mut subscriber = home.subscriber();
    let child = ForkedChild::new(|| {
        let home = home.joined(who);
        let mut subscriber = home.subscriber();
        let publisher = home.publisher();
        let loan = publisher.loan(100, FAR).unwrap();
        publisher.push(b"its last", FAR).unwrap();
        let held = subscriber.pull(FAR).unwrap();
        publisher.push(b"ready", FAR).unwrap();
        loop {
            // It holds a loan and a message, and one it has not read, until it is killed.
            assert!(held.is_valid() && loan.length() == 100);
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    home.clerk.roster.learn(who, life_of(&child));
    let last = subscriber.pull(FAR).unwrap();
    assert_eq!(subscriber.pull(FAR).unwrap().to_vec().unwrap(), b"ready");
    assert_eq!(home.blocks_taken(), 3);
    publisher.push(b"x", FAR).unwrap();
    drop(subscriber.pull(FAR).unwrap());
    std::thread::scope(|scope| {
        publisher.set_spin(Spin::Never);
        // No room, until the dead one's messages are let go of.
        let pushed = scope.spawn(|| publisher.push(b"y", FAR).unwrap().readers);
        while home.topic.pressure().is_none() {
            std::thread::yield_now();
        }
        child.kill();
        home.bury(who);
        drop(last);
        assert_eq!(pushed.join().unwrap(), 1);
    });
    assert!(child.was_killed());
    assert!(matches!(subscriber.poll_event(), Some(Event::PublisherLost { .. })));
    assert_eq!(subscriber.poll_event(), None);
    drop(subscriber.pull(FAR).unwrap());
    assert_eq!(home.blocks_taken(), 0);
    let census = home.topic.census();
    assert_eq!((census.publishers.len(), census.subscribers.len()), (1, 1));
}

#[test]
fn after_a_fork_handles_say_so_and_touch_nothing() {
    let home = Home::new(&settings());
    let (mut subscriber, publisher) = (home.subscriber(), home.publisher());
    publisher.push(b"x", FAR).unwrap();
    publisher.push(b"y", FAR).unwrap();
    let sample = subscriber.pull(FAR).unwrap();
    let loan = publisher.loan(1, FAR).unwrap();
    let mut handles = Some((publisher, subscriber, sample, loan));
    let child = ForkedChild::new(|| {
        let (publisher, mut subscriber, sample, mut loan) = handles.take().unwrap();
        let forked = |error: Error| assert_eq!(error.kind(), ErrorKind::Forked);
        forked(publisher.loan(1, FAR).unwrap_err());
        forked(publisher.push(b"z", FAR).unwrap_err());
        forked(publisher.flush(FAR).unwrap_err());
        forked(subscriber.try_pull().unwrap_err());
        forked(subscriber.pull(FAR).unwrap_err());
        assert_eq!(subscriber.poll_event(), None);
        forked(sample.to_vec().unwrap_err());
        forked(loan.write(0, b"z").unwrap_err());
        forked(loan.set_metadata(b"z").unwrap_err());
        forked(loan.publish(FAR).unwrap_err());
        drop((publisher, subscriber, sample));
    });
    assert!(child.wait().success());
    assert_eq!(home.blocks_taken(), 3);
    let census = home.topic.census();
    assert_eq!((census.publishers.len(), census.subscribers.len()), (1, 1));
    drop(handles);
}

/// What a participant that is stopped does, who holds the queue's lock.
#[test]
fn a_publisher_waits_no_longer_than_it_says_for_one_that_holds_a_lock() {
    let home = Home::new(&settings());
    let (mut subscriber, publisher) = (home.subscriber(), home.publisher());
    publisher.push(b"first", FAR).unwrap();
    let loan = publisher.loan(4, FAR).unwrap();
    let (is_held, may_go_on) = (Barrier::new(2), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut is_first = true;
            let hold = |_| {
                if std::mem::take(&mut is_first) {
                    is_held.wait();
                }
                let end = Instant::now() + FAR;
                while !may_go_on.load(Acquire) && Instant::now() < end {
                    std::thread::sleep(Duration::from_millis(1));
                }
            };
            let other = Caller::new(home.admit(), &*home.clerk.roster);
            home.topic.here().find_entries(&other, hold).unwrap();
        });
        is_held.wait();
        let within = |longest: Duration, act: &mut dyn FnMut()| {
            let start = Instant::now();
            act();
            assert!(start.elapsed() < longest, "{:?}", start.elapsed());
        };
        let soon = Duration::from_millis(100);
        within(Duration::from_secs(2), &mut || {
            assert!(publisher.try_push(b"none").unwrap().is_none());
        });
        within(Duration::from_secs(2), &mut || {
            let late = publisher.push(b"none", soon).unwrap_err();
            assert_eq!(late.kind(), ErrorKind::DeadlineExceeded, "{late}");
        });
        let mut loan = Some(loan);
        within(Duration::from_secs(2), &mut || {
            let mut lent = loan.take().unwrap();
            lent.write(0, b"lent").unwrap();
            match lent.publish_within(soon).unwrap() {
                Attempt::Full(lent) => loan = Some(lent),
                Attempt::Sent(sent) => panic!("{sent:?}"),
            }
        });
        may_go_on.store(true, Release);
        // It is as it was.
        loan.take().unwrap().publish(FAR).unwrap();
    });
    assert_eq!(subscriber.pull(FAR).unwrap().to_vec().unwrap(), b"first");
    assert_eq!(subscriber.pull(FAR).unwrap().to_vec().unwrap(), b"lent");
}

#[test]
fn a_subscriber_dropped_while_a_lock_is_held_is_in_nothings_way_afterwards() {
    let home = Home::new(&settings());
    let (mut subscriber, other) = (home.subscriber(), home.subscriber());
    let publisher = home.publisher();
    publisher.push(b"first", FAR).unwrap();
    publisher.push(b"second", FAR).unwrap();
    let sample = subscriber.pull(FAR).unwrap();
    let (is_held, may_go_on) = (Barrier::new(2), Barrier::new(2));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut is_first = true;
            let hold = |_| {
                if std::mem::take(&mut is_first) {
                    is_held.wait();
                    may_go_on.wait();
                }
            };
            let stopped = Caller::new(home.admit(), &*home.clerk.roster);
            home.topic.here().find_entries(&stopped, hold).unwrap();
        });
        is_held.wait();
        let start = Instant::now();
        drop((subscriber, other));
        assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
        assert!(home.retry() > 0, "nothing is left to be done while the lock is held");
        may_go_on.wait();
    });
    assert_eq!(home.retry(), 0);
    // It holds what it held, and nothing more is delivered to it.
    assert!(home.topic.census().subscribers.is_empty());
    assert!(sample.is_valid());
    assert_eq!(sample.to_vec().unwrap(), b"first");
    for _ in 0..100 {
        publisher.push(b"for nobody", FAR).unwrap();
    }
    assert_eq!(home.blocks_taken(), 1);
    drop(sample);
    assert_eq!(home.blocks_taken(), 0);
}
