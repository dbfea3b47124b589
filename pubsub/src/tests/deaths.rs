//! Processes that die or fork.

use std::os::fd::AsFd;
use std::sync::Barrier;
use std::time::Instant;

use ipc::Liveness;
use testkit::children::ForkedChild;

use super::*;
use crate::{Attempt, Event};

pub(super) fn pidfd_of(child: &ForkedChild) -> PidFd {
    PidFd::from_fd(child.pidfd()).unwrap()
}

impl TestNode {
    /// The node as another process opens it, with a participant that the parent admitted.
    pub(super) fn joined(&self, me: Participant) -> Self {
        let copy = |fd: std::os::fd::BorrowedFd<'_>| fd.try_clone_to_owned().unwrap();
        let node_segment = Segment::open(copy(self.node_segment.as_fd()), NODE_SEGMENT).unwrap();
        let participants = Arc::new(ParticipantTable::new(node_segment.words()).unwrap());
        let opened = |pool: &Pool| {
            let opened = Pool::open(copy(pool.control_segment())).unwrap();
            for number in 0..pool.held() {
                opened.adopt_piece(number, pool.piece(number).unwrap().unwrap()).unwrap();
            }
            Arc::new(opened)
        };
        let topic = Arc::new(Topic::open(copy(self.topic.segment())).unwrap());
        Self::with_parts(
            node_segment,
            participants,
            me,
            topic,
            opened(&self.local),
            opened(&self.inbound),
        )
    }

    /// A participant for a child that is forked later.
    pub(super) fn admit(&self) -> Participant {
        self.service.participants.admit(PidFd::of_this_process().unwrap()).unwrap()
    }

    /// Reclaims after a dead participant, as the service does.
    pub(super) fn reclaim(&self, dead: Participant) {
        while !self.service.participants.is_dead(Some(dead)) {
            std::thread::yield_now();
        }
        let caller = self.caller();
        self.topic.reclaim_in(&caller, dead, self.local.control(), self.inbound.control()).unwrap();
        for pool in [&self.local, &self.inbound] {
            pool.reclaim(&caller, dead).unwrap();
        }
        assert!(self.service.participants.free_slot(dead));
    }
}

#[test]
fn two_processes_exchange_messages() {
    let node = TestNode::new(&settings());
    node.service.grow(node.local.id(), 1 << 20);
    let participant = node.admit();
    let publisher = node.publisher();
    let mut subscriber = node.subscriber();
    let child = ForkedChild::new(|| {
        let node = node.joined(participant);
        let mut subscriber = node.subscriber();
        let publisher = node.publisher();
        publisher.push(b"ready", TEST_TIMEOUT).unwrap();
        drop(subscriber.pull(TEST_TIMEOUT).unwrap());
        for number in 0..100_u32 {
            let sample = subscriber.pull(TEST_TIMEOUT).unwrap();
            assert_eq!(sample.to_vec().unwrap(), number.to_le_bytes());
        }
    });
    node.service.participants.add_pidfd(participant, pidfd_of(&child));
    assert_eq!(subscriber.pull(TEST_TIMEOUT).unwrap().to_vec().unwrap(), b"ready");
    drop(subscriber);
    for number in 0..100_u32 {
        publisher.push(&number.to_le_bytes(), TEST_TIMEOUT).unwrap();
    }
    assert!(child.wait().success());
    node.reclaim(participant);
    drop(publisher);
    assert_eq!(node.blocks_allocated(), 0);
}

#[test]
fn killed_process_is_reclaimed_and_its_publisher_reported() {
    let node = TestNode::new(&TopicSettings { depth: 3, ..settings() });
    node.service.grow(node.local.id(), 1 << 20);
    let participant = node.admit();
    let publisher = node.publisher();
    let mut subscriber = node.subscriber();
    let child = ForkedChild::new(|| {
        let node = node.joined(participant);
        let mut subscriber = node.subscriber();
        let publisher = node.publisher();
        let loan = publisher.loan(100, TEST_TIMEOUT).unwrap();
        publisher.push(b"its last", TEST_TIMEOUT).unwrap();
        let held = subscriber.pull(TEST_TIMEOUT).unwrap();
        publisher.push(b"ready", TEST_TIMEOUT).unwrap();
        loop {
            // It holds a loan and a message, and has an unread one, until it is killed.
            assert!(held.is_valid() && loan.length() == 100);
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    node.service.participants.add_pidfd(participant, pidfd_of(&child));
    let last = subscriber.pull(TEST_TIMEOUT).unwrap();
    assert_eq!(subscriber.pull(TEST_TIMEOUT).unwrap().to_vec().unwrap(), b"ready");
    assert_eq!(node.blocks_allocated(), 3);
    for _ in 0..2 {
        publisher.push(b"x", TEST_TIMEOUT).unwrap();
        drop(subscriber.pull(TEST_TIMEOUT).unwrap());
    }
    std::thread::scope(|scope| {
        publisher.set_wait_strategy(WaitStrategy::Block);
        // There is no room until the unread messages of the dead process are given up.
        let pushed = scope.spawn(|| publisher.push(b"y", TEST_TIMEOUT).unwrap().subscribers);
        while node.topic.backpressure().is_none() {
            std::thread::yield_now();
        }
        child.kill();
        node.reclaim(participant);
        drop(last);
        assert_eq!(pushed.join().unwrap(), 1);
    });
    assert!(child.was_killed());
    assert!(matches!(subscriber.poll_event(), Some(Event::PublisherLost { .. })));
    assert_eq!(subscriber.poll_event(), None);
    drop(subscriber.pull(TEST_TIMEOUT).unwrap());
    assert_eq!(node.blocks_allocated(), 0);
    assert_eq!((node.topic.publishers().len(), node.topic.subscribers().len()), (1, 1));
}

/// The subscriber looks while the service reclaims.
#[test]
fn loss_of_a_publisher_is_reported_before_its_absence() {
    let node = TestNode::new(&settings());
    let participant = node.admit();
    let mut subscriber = node.subscriber();
    for _ in 0..2000 {
        let publisher = Publisher::new(node.context_of(participant)).unwrap();
        let barrier = Barrier::new(2);
        let first = std::thread::scope(|scope| {
            scope.spawn(|| {
                let caller = node.caller();
                let (local, inbound) = (node.local.control(), node.inbound.control());
                barrier.wait();
                node.topic.reclaim_in(&caller, participant, local, inbound).unwrap();
            });
            barrier.wait();
            let end = Instant::now() + TEST_TIMEOUT;
            std::iter::from_fn(|| (Instant::now() < end).then(|| subscriber.poll_event()))
                .flatten()
                .next()
        });
        assert!(matches!(first, Some(Event::PublisherLost { .. })), "{first:?}");
        assert_eq!(subscriber.poll_event(), Some(Event::NoPublishers));
        drop(publisher);
    }
}

#[test]
fn handles_in_a_forked_child_fail_without_effect() {
    let node = TestNode::new(&settings());
    let (mut subscriber, publisher) = (node.subscriber(), node.publisher());
    publisher.push(b"x", TEST_TIMEOUT).unwrap();
    publisher.push(b"y", TEST_TIMEOUT).unwrap();
    let sample = subscriber.pull(TEST_TIMEOUT).unwrap();
    let loan = publisher.loan(1, TEST_TIMEOUT).unwrap();
    let mut handles = Some((publisher, subscriber, sample, loan));
    let child = ForkedChild::new(|| {
        let (publisher, mut subscriber, sample, mut loan) = handles.take().unwrap();
        let forked = |error: Error| assert_eq!(error.kind(), ErrorKind::Forked);
        forked(publisher.loan(1, TEST_TIMEOUT).unwrap_err());
        forked(publisher.push(b"z", TEST_TIMEOUT).unwrap_err());
        forked(publisher.flush(TEST_TIMEOUT).unwrap_err());
        forked(subscriber.try_pull().unwrap_err());
        forked(subscriber.pull(TEST_TIMEOUT).unwrap_err());
        assert_eq!(subscriber.poll_event(), None);
        forked(sample.to_vec().unwrap_err());
        forked(loan.write(0, b"z").unwrap_err());
        forked(loan.set_metadata(b"z").unwrap_err());
        forked(loan.publish(TEST_TIMEOUT).unwrap_err());
        drop((publisher, subscriber, sample));
    });
    assert!(child.wait().success());
    assert_eq!(node.blocks_allocated(), 3);
    assert_eq!((node.topic.publishers().len(), node.topic.subscribers().len()), (1, 1));
    drop(handles);
}

/// Simulates a stopped process that holds the queue's lock.
#[test]
fn publisher_times_out_while_a_lock_is_held() {
    let node = TestNode::new(&settings());
    let (mut subscriber, publisher) = (node.subscriber(), node.publisher());
    publisher.push(b"first", TEST_TIMEOUT).unwrap();
    let loan = publisher.loan(4, TEST_TIMEOUT).unwrap();
    let (is_held, may_continue) = (Barrier::new(2), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut is_first = true;
            let hold = |_| {
                if std::mem::take(&mut is_first) {
                    is_held.wait();
                }
                let end = Instant::now() + TEST_TIMEOUT;
                while !may_continue.load(Acquire) && Instant::now() < end {
                    std::thread::sleep(Duration::from_millis(1));
                }
            };
            let other = Caller::new(node.admit(), &*node.service.participants);
            node.topic.local().find_entries(&other, hold).unwrap();
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
        may_continue.store(true, Release);
        // The loan is unchanged.
        loan.take().unwrap().publish(TEST_TIMEOUT).unwrap();
    });
    assert_eq!(subscriber.pull(TEST_TIMEOUT).unwrap().to_vec().unwrap(), b"first");
    assert_eq!(subscriber.pull(TEST_TIMEOUT).unwrap().to_vec().unwrap(), b"lent");
}

#[test]
fn subscription_dropped_under_a_held_lock_ends_later() {
    let node = TestNode::new(&settings());
    let (mut subscriber, other) = (node.subscriber(), node.subscriber());
    let publisher = node.publisher();
    publisher.push(b"first", TEST_TIMEOUT).unwrap();
    publisher.push(b"second", TEST_TIMEOUT).unwrap();
    let sample = subscriber.pull(TEST_TIMEOUT).unwrap();
    let (is_held, may_continue) = (Barrier::new(2), Barrier::new(2));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut is_first = true;
            let hold = |_| {
                if std::mem::take(&mut is_first) {
                    is_held.wait();
                    may_continue.wait();
                }
            };
            let stopped = Caller::new(node.admit(), &*node.service.participants);
            node.topic.local().find_entries(&stopped, hold).unwrap();
        });
        is_held.wait();
        let start = Instant::now();
        drop((subscriber, other));
        assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
        assert!(node.retry() > 0, "the end of the subscription did not wait for the lock");
        may_continue.wait();
    });
    assert_eq!(node.retry(), 0);
    // It still holds its sample, and receives no more messages.
    assert!(node.topic.subscribers().is_empty());
    assert!(sample.is_valid());
    assert_eq!(sample.to_vec().unwrap(), b"first");
    for _ in 0..100 {
        publisher.push(b"unread", TEST_TIMEOUT).unwrap();
    }
    assert_eq!(node.blocks_allocated(), 1);
    drop(sample);
    assert_eq!(node.blocks_allocated(), 0);
}
