//! Replicators of nodes in one process, over the loopback address, with peers that behave or
//! misbehave.

mod given_up_nodes;
mod loss_model;
mod provider_mismatch;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::bounded;
use ipc::{Caller, Participant, PidFd, QueueError};

use super::{
    ArrivalRepairLock, LocalTopic, NetworkOptions, Replicator, ServiceContext, WaitingArrivals,
};
use crate::ids::NodeId;
use crate::node_segment::NodeSegment;
use crate::peers::{Interest, PeerEvent, Peers};
use crate::pool::{Direction, Pool, PoolId};
use crate::replication::sink::RoomWait;
use crate::replication::sink::TopicSink;
use crate::replication::source::last_sequences::IdlePublishers;
use crate::replication::{FinishOutcome, MessageHeader, Metadata, Sink, StageDurations};
use crate::report::Row;
use crate::settings::{Reliability, SharedLocation, SharedSettings};
use crate::subscriber::{LossTracker, RemoteAccounts, RemoteStart};
use crate::topic::{Entry, LostPublisher, OriginId, Topic};
use crate::wake::WakeFd;

/// Reached only by a failing test.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);
const NUMBER: u32 = 7;
const NAME: &str = "numbers";
const DEPTH: u64 = 4;
/// A node that never connects.
const ABSENT_NODE: [u8; 16] = [9; 16];

fn settings() -> SharedSettings {
    SharedSettings {
        place: SharedLocation::Host,
        reliability: Reliability::Reliable,
        depth: DEPTH as u32,
        max_held: DEPTH as u32,
        largest: 64,
        loans: 4,
        release_microseconds: 100_000,
        type_name: None,
    }
}

fn network() -> NetworkOptions {
    NetworkOptions {
        listen: Some("127.0.0.1:0".parse().unwrap()),
        lost_after: Duration::from_millis(500),
        insecure: true,
        ..NetworkOptions::default()
    }
}

/// A node: the state that outlives its services.
struct TestNode {
    node_segment: Arc<NodeSegment>,
    me: Participant,
    topic: Arc<Topic>,
    local: Arc<Pool>,
    inbound: Arc<Pool>,
    publisher: u64,
    /// Messages that its reader missed.
    loss_tracker: RefCell<LossTracker>,
}

impl TestNode {
    fn new(identity: u8) -> Self {
        Self::with(identity, settings())
    }

    fn with(identity: u8, settings: SharedSettings) -> Self {
        let node_segment = Arc::new(NodeSegment::create(NodeId([identity; 16])).unwrap());
        let me = node_segment.participants().admit(PidFd::of_this_process().unwrap()).unwrap();
        let caller = Caller::new(me, &**node_segment.participants());
        let pool = |direction| {
            let id = PoolId { place: settings.place, direction };
            let pool = Pool::create(id, 16 << 20, 256).unwrap();
            pool.adopt_piece(0, pool.make_piece(1 << 20).unwrap()).unwrap();
            pool.admit_piece(&caller, 0).unwrap();
            Arc::new(pool)
        };
        let (local, inbound) = (pool(Direction::Local), pool(Direction::Inbound));
        let topic = Arc::new(Topic::create(NUMBER, NAME, &settings).unwrap());
        let publisher = topic.claim(me).unwrap();
        let loss_tracker =
            RefCell::new(LossTracker::new(&topic.published(), 0, &RemoteAccounts::default(), 0));
        Self { node_segment, me, topic, local, inbound, publisher, loss_tracker }
    }

    /// The topic, and the pool of messages of other nodes.
    fn incoming(&self) -> (&Arc<Topic>, &Arc<Pool>) {
        (&self.topic, &self.inbound)
    }

    fn caller(&self) -> Caller<'_> {
        Caller::new(self.me, &**self.node_segment.participants())
    }

    fn role(&self) -> Participant {
        self.node_segment.participants().admit_role(0).unwrap()
    }

    fn service_context(&self) -> Arc<ServiceContext> {
        let (growth, _) = bounded(1);
        Arc::new(ServiceContext {
            me: self.me,
            role: self.role(),
            node_segment: Arc::clone(&self.node_segment),
            participants: Arc::clone(self.node_segment.participants()),
            growth,
            bell: Arc::new(WakeFd::new().unwrap()),
            waiting_arrivals: WaitingArrivals::default(),
            arrival_repair_lock: ArrivalRepairLock::default(),
        })
    }

    fn replication(&self, options: &NetworkOptions) -> Replicator {
        let (identity, bell) =
            (self.node_segment.identity(), Arc::clone(self.node_segment.publish_doorbell()));
        Replicator::start(options, identity, "test", self.service_context(), bell).unwrap()
    }

    /// Takes and releases the next message of another node, if any.
    fn take(&self, subscriber: &mut ipc::Subscriber) -> Option<Entry> {
        let taken = self.topic.inbound().take(subscriber)?;
        let at = (Direction::Inbound, subscriber.subscription_id());
        let entry = Entry::from_words(taken.entry);
        let arrival = RemoteStart::of(&self.inbound.control().sample_info(entry.block));
        self.loss_tracker.borrow_mut().on_inbound(arrival, entry.publisher, entry.sequence);
        self.topic.release_in(&self.caller(), at, taken.position, self.inbound.control());
        Some(entry)
    }

    /// Messages that its reader missed.
    fn missed_messages(&self) -> u64 {
        self.loss_tracker.borrow().missed()
    }

    /// A new reader subscribes now.
    fn resubscribe(&self) {
        let position = self.topic.inbound().position();
        let expected = self.topic.expected_of_remote(position);
        let other_nodes = RemoteAccounts::new(expected, 0);
        *self.loss_tracker.borrow_mut() =
            LossTracker::new(&self.topic.published(), 0, &other_nodes, position);
    }

    fn topics(&self, publishes: bool, subscribes: bool) -> BTreeMap<String, LocalTopic> {
        let local = LocalTopic {
            topic: Arc::clone(&self.topic),
            local: Arc::clone(&self.local),
            inbound: Arc::clone(&self.inbound),
            publishes,
            subscribes,
        };
        BTreeMap::from([(NAME.to_owned(), local)])
    }

    fn publish(&self, sequence: u64) -> Result<(), QueueError> {
        let published = self.publish_silently(sequence);
        if published.is_ok() {
            self.node_segment.publish_doorbell().ring(NUMBER);
        }
        published
    }

    /// Publishes like a publisher that dies before it notifies.
    fn publish_silently(&self, sequence: u64) -> Result<(), QueueError> {
        let (block, range) = self.local.allocate(&self.caller(), 8).unwrap();
        let entry = Entry {
            block,
            offset: range.offset,
            length: 8,
            publisher: self.publisher,
            sequence,
            published_at: 0,
            metadata: 0,
            has_origin: false,
            sync_point: None,
        };
        let published = self.topic.publish_in(&self.caller(), entry, self.local.control());
        if published.is_err() {
            self.local.free(&self.caller(), block).unwrap();
        }
        published.map(drop)
    }

    /// Publishes until the queue is full.
    fn fill(&self) {
        assert!((0..=DEPTH).any(|number| self.publish(number) == Err(QueueError::Full)));
    }

    /// The state left by an earlier service: messages are retained for a node.
    fn leave_backlog(&self, to: &[u8; 16]) {
        assert!(self.topic.add_destination(to));
        self.topic.subscribe_for_replication(&self.caller(), self.role(), &self.local).unwrap();
        self.topic.set_replicated(true);
        self.fill();
    }

    fn is_retained(&self) -> bool {
        self.topic.local().subscriptions_of(self.role()).next().is_some()
    }

    /// Messages of the publisher missed by given up nodes, and how often a node was given up.
    fn missed(&self) -> (u64, u64) {
        let missed = self.topic.missed_by_nodes();
        assert_eq!(self.topic.missed_by_nodes_of(self.publisher), missed.messages);
        (missed.messages, missed.nodes)
    }

    /// Asserts that nothing is retained for other nodes.
    #[track_caller]
    fn assert_nothing_retained(&self) {
        assert!(!self.is_retained() && self.topic.destinations().is_empty());
        assert!(!self.topic.is_replicated());
        assert_eq!(self.local.statistics(&self.caller()).unwrap().blocks_allocated, 0);
        assert_eq!(self.publish(0), Err(QueueError::NoSubscribers));
    }
}

#[track_caller]
fn until(goal: &str, replicators: &mut [&mut Replicator], mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + TEST_TIMEOUT;
    loop {
        replicators.iter_mut().for_each(|replication| replication.turn());
        if is_so() {
            return;
        }
        assert!(Instant::now() < end, "waited for {goal}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn messages_retained_by_an_earlier_service_expire() {
    let node = TestNode::new(1);
    node.leave_backlog(&ABSENT_NODE);
    let mut replication = node.replication(&network());
    assert!(super::is_owed(&node.topic) && !replication.holds(NUMBER));
    replication.set_topics(node.topics(false, false));
    // Workers are not started yet, and the messages are retained all the same.
    assert!(replication.holds(NUMBER) && node.is_retained());
    until("the grace period to end", &mut [&mut replication], || !node.is_retained());
    assert!(!replication.holds(NUMBER));
    node.assert_nothing_retained();
    assert_eq!(node.missed(), (DEPTH, 1));
}

#[test]
fn messages_without_destinations_are_released() {
    // A service died after it had removed the last destination.
    let node = TestNode::new(1);
    node.leave_backlog(&ABSENT_NODE);
    node.topic.remove_destination(&ABSENT_NODE);
    let mut replication = node.replication(&network());
    replication.set_topics(node.topics(true, false));
    until("retained messages to be released", &mut [&mut replication], || !node.is_retained());
    node.assert_nothing_retained();
    // The same for a service without replication.
    let node = TestNode::new(1);
    node.leave_backlog(&ABSENT_NODE);
    for is_new in [true, false] {
        let done = super::release_retained(&node.topic, &node.local, &node.caller(), node.role());
        assert_eq!(done.unwrap(), is_new);
        node.assert_nothing_retained();
        assert_eq!(node.missed(), (DEPTH, 1), "once");
    }
}

/// A node that subscribes to the topic, and answers no control message.
fn subscribing_peer(replication: &Replicator, identity: u8) -> Peers {
    let network = NetworkOptions {
        peers: vec![replication.listens().unwrap()],
        lost_after: TEST_TIMEOUT,
        name: "silent".to_owned(),
        insecure: true,
        ..NetworkOptions::default()
    };
    let peers = Peers::start_open(&network, NodeId([identity; 16]));
    let peers = peers.unwrap();
    peers
        .set_interests([Interest {
            topic: NAME.into(),
            publishes: false,
            subscribes: true,
            settings: settings(),
            subscription: 0,
        }])
        .unwrap();
    peers
}

#[test]
fn nothing_is_retained_without_a_provider() {
    let node = TestNode::new(1);
    node.leave_backlog(&[2; 16]);
    let provider = Some("no-such-provider".to_owned());
    let mut replication = node.replication(&NetworkOptions { provider, ..network() });
    let _other = subscribing_peer(&replication, 2);
    replication.set_topics(node.topics(true, false));
    until("retained messages to be released", &mut [&mut replication], || !node.is_retained());
    node.assert_nothing_retained();
    let why = |row| match row {
        Row::ReplicationError { why, .. } => Some(why),
        _ => None,
    };
    let expected = "no provider is named \"no-such-provider\"; the providers are ";
    let end = Instant::now() + TEST_TIMEOUT;
    loop {
        let why = replication.rows().into_iter().find_map(why).unwrap();
        if why.contains(expected) {
            break;
        }
        // On a busy machine this takes long.
        assert!(Instant::now() < end && why.contains("takes longer than"), "{why}");
        replication.turn();
        std::thread::sleep(Duration::from_millis(2));
    }
    // Pending work is done, then it waits.
    let waits = |replication: &Replicator| {
        replication.max_poll_timeout(Instant::now()).is_some_and(|wait| wait > Duration::ZERO)
    };
    while !waits(&replication) {
        assert!(Instant::now() < end);
        replication.turn();
    }
}

#[test]
fn silent_node_is_given_up_after_blocking_publishers() {
    let node = TestNode::new(1);
    let mut replication = node.replication(&network());
    let _other = subscribing_peer(&replication, 2);
    replication.set_topics(node.topics(true, false));
    until("the topic to be replicated", &mut [&mut replication], || node.topic.is_replicated());
    node.fill();
    let stall_timeout = replication.stall_timeout(NUMBER);
    assert_eq!(stall_timeout, Duration::from_millis(1200));
    // No publisher has reported to be blocked.
    let end = Instant::now() + 2 * stall_timeout;
    until("time to pass", &mut [&mut replication], || Instant::now() >= end);
    assert_eq!(node.publish(0), Err(QueueError::Full));
    let end = Instant::now() + TEST_TIMEOUT;
    while node.is_retained() {
        assert!(Instant::now() < end, "the node is still waited for");
        replication.backlog_blocks_publishers(NUMBER);
        replication.turn();
        std::thread::sleep(Duration::from_millis(2));
    }
    node.assert_nothing_retained();
    assert_eq!(node.missed(), (DEPTH, 1));
}

#[test]
fn silent_node_does_not_block_drop_newest_publishers() {
    let loose = SharedSettings { reliability: Reliability::DropNewest, ..settings() };
    let node = TestNode::with(1, loose);
    let mut replication = node.replication(&network());
    let other = subscribing_peer(&replication, 2);
    let interest = Interest {
        topic: NAME.into(),
        publishes: false,
        subscribes: true,
        settings: loose,
        subscription: 0,
    };
    other.set_interests([interest]).unwrap();
    replication.set_topics(node.topics(true, false));
    until("the topic to be replicated", &mut [&mut replication], || node.topic.is_replicated());
    for number in 0..10 * DEPTH {
        until("queue capacity", &mut [&mut replication], || node.publish(number).is_ok());
    }
}

#[test]
fn connect_request_for_an_unreceived_topic_is_answered() {
    let (writing, reading) = (TestNode::new(1), TestNode::new(2));
    let mut writer = writing.replication(&network());
    let mut reader = reading.replication(&NetworkOptions {
        peers: vec![writer.listens().unwrap()],
        // This node cannot receive messages.
        provider: Some("no-such-provider".into()),
        ..network()
    });
    writer.set_topics(writing.topics(true, false));
    reader.set_topics(reading.topics(false, true));
    let (one, two) = (&mut writer, &mut reader);
    until("the topic to be replicated", &mut [&mut *one, &mut *two], || {
        writing.topic.is_replicated()
    });
    // Each request is answered long before the writer's own timeout.
    let is_broken = |replication: &Replicator| {
        let mut all = replication.routing.plan().destinations(NUMBER);
        all.any(|(_, destination_state)| {
            matches!(
                destination_state,
                crate::replication::routing::plan::DestinationState::Broken { .. }
            )
        })
    };
    let end = Instant::now() + Duration::from_secs(9);
    while !is_broken(one) {
        one.turn();
        two.turn();
        assert!(Instant::now() < end, "the request was not answered");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn failed_replication_is_retried() {
    let node = TestNode::new(1);
    let mut replication = node.replication(&network());
    let mut others: Vec<_> =
        std::iter::from_fn(|| node.topic.local().subscribe_as(&node.caller(), node.me).ok())
            .collect();
    // The last slot, reserved for replication.
    let role = Participant::role(1).unwrap();
    others.push(node.topic.local().subscribe_as(&node.caller(), role).unwrap());
    let _other = subscribing_peer(&replication, 2);
    replication.set_topics(node.topics(true, false));
    until("replication to fail", &mut [&mut replication], || !node.topic.destinations().is_empty());
    for _ in 0..10 {
        replication.turn();
    }
    assert!(!node.topic.is_replicated() && replication.max_poll_timeout(Instant::now()).is_some());
    let one = others.pop().unwrap();
    node.topic.local().end_subscription(&node.caller(), one.subscription_id(), |_| {}).unwrap();
    until("the topic to be replicated", &mut [&mut replication], || node.topic.is_replicated());
}

#[test]
fn topic_is_replicated_beside_the_maximum_of_subscribers() {
    let node = TestNode::new(1);
    let mut replication = node.replication(&network());
    let others: Vec<_> =
        std::iter::from_fn(|| node.topic.local().subscribe(&node.caller()).ok()).collect();
    let _other = subscribing_peer(&replication, 2);
    replication.set_topics(node.topics(true, false));
    until("the topic to be replicated", &mut [&mut replication], || node.topic.is_replicated());
    assert_eq!(node.topic.local().subscribers() as usize, others.len() + 1);
}

/// The replicators of both nodes; the second node subscribes.
fn replicators(
    writing: &TestNode,
    reading: &TestNode,
) -> (Replicator, Replicator, ipc::Subscriber) {
    // No node is given up, however slow the test is.
    let network = || NetworkOptions { lost_after: TEST_TIMEOUT, ..network() };
    let mut writer = writing.replication(&network());
    let peers = vec![writer.listens().unwrap()];
    let mut reader = reading.replication(&NetworkOptions { peers, ..network() });
    let subscriber = reading.topic.inbound().subscribe(&reading.caller()).unwrap();
    writer.set_topics(writing.topics(true, false));
    reader.set_topics(reading.topics(false, true));
    let both = &mut [&mut writer, &mut reader];
    until("the topic to be replicated", both, || writing.topic.is_replicated());
    (writer, reader, subscriber)
}

#[test]
fn restarted_workers_lose_no_message() {
    let (writing, reading) = (TestNode::new(1), TestNode::new(2));
    let inbound = reading.topic.inbound();
    let (mut writer, mut reader, mut subscriber) = replicators(&writing, &reading);
    let (one, two) = (&mut writer, &mut reader);
    for number in 0..60 {
        if number % 20 == 10 {
            let at = if number < 20 { &*one } else { &*two };
            at.worker_pool.all().for_each(super::Worker::stop_for_test);
        }
        let replicators = &mut [&mut *one, &mut *two];
        until("queue capacity", replicators, || {
            let published = writing.publish(number);
            assert_ne!(published, Err(QueueError::NoSubscribers));
            published.is_ok()
        });
        until("a message", &mut [&mut *one, &mut *two], || {
            let Some(entry) = reading.take(&mut subscriber) else { return false };
            assert_eq!(entry.sequence, number);
            true
        });
    }
    assert_eq!(reading.missed_messages(), 0);
    assert!(inbound.take(&mut subscriber).is_none(), "a message was delivered twice");
}

#[test]
fn quick_resubscription_counts_missed_messages() {
    let (writing, reading) = (TestNode::new(1), TestNode::new(2));
    let (mut writer, mut reader, mut subscriber) = replicators(&writing, &reading);
    let (mut next, mut last) = (1, 0);
    for _ in 0..5 {
        for subscribes in [false, true] {
            reader.set_topics(reading.topics(false, subscribes));
        }
        let again = reading.topic.inbound().subscribe(&reading.caller()).unwrap();
        let before = std::mem::replace(&mut subscriber, again);
        let dispose = |words| {
            reading.topic.dispose(&reading.caller(), reading.inbound.control(), words);
        };
        reading
            .topic
            .inbound()
            .end_subscription(&reading.caller(), before.subscription_id(), dispose)
            .unwrap();
        reading.resubscribe();
        // The other node may see both changes at once, or release some messages between them.
        // Earlier messages may still arrive first; later gaps are counted.
        let (mut has_any, mut missing) = (false, 0);
        until("messages", &mut [&mut writer, &mut reader], || {
            next += u64::from(writing.publish(next).is_ok());
            let Some(entry) = reading.take(&mut subscriber) else { return false };
            assert!(entry.sequence > last, "{} after {last}", entry.sequence);
            let between = entry.sequence - last - 1;
            if std::mem::replace(&mut has_any, true) {
                missing += between;
            } else {
                missing = reading.missed_messages();
                assert!(missing <= between, "{missing} of {between}");
            }
            assert_eq!(reading.missed_messages(), missing);
            last = entry.sequence;
            last % 8 == 0
        });
    }
}

/// Header of a message of 8 bytes; the publisher sends one per sequence number.
fn header_at(position: u64) -> MessageHeader {
    let (length, publisher, sequence) = (8, 1, position + 1);
    let (published, posted, metadata) = (0, 0, Metadata::NONE);
    MessageHeader { position, length, publisher, sequence, published, posted, metadata }
}

#[test]
fn idle_publisher_is_found_while_another_publishes() {
    let mut node = TestNode::new(1);
    let (mut idle, caller) =
        (IdlePublishers::default(), Caller::new(node.me, &**node.node_segment.participants()));
    node.topic.local().subscribe(&caller).unwrap();
    let (first, second) = (node.publisher, node.topic.claim(node.me).unwrap());
    node.publish(1).unwrap();
    assert_eq!(idle.poll(&node.topic), []);
    node.publisher = second;
    node.publish(1).unwrap();
    assert_eq!(idle.poll(&node.topic), [(first, 1)]);
    node.publish(2).unwrap();
    assert_eq!(idle.poll(&node.topic), [], "the first is reported, the second published");
    assert_eq!(idle.poll(&node.topic), [(second, 2)]);
    assert_eq!(idle.poll(&node.topic), []);
}

/// Messages in flight may still arrive.
#[test]
fn publisher_is_not_idle_before_its_messages_are_delivered() {
    let node = TestNode::new(1);
    let (mut idle, local) = (IdlePublishers::default(), node.topic.local());
    let mut subscriber =
        node.topic.subscribe_for_replication(&node.caller(), node.role(), &node.local).unwrap();
    node.publish(1).unwrap();
    let taken = local.take(&mut subscriber).unwrap();
    for _ in 0..3 {
        assert_eq!(idle.poll(&node.topic), []);
    }
    let at = (Direction::Local, subscriber.subscription_id());
    node.topic.release_in(&node.caller(), at, taken.position, node.local.control());
    assert_eq!(idle.poll(&node.topic), [(node.publisher, 1)]);
}

#[test]
fn gap_before_a_dropped_message_is_counted_with_the_next() {
    let settings = SharedSettings { reliability: Reliability::DropNewest, ..settings() };
    let node = TestNode::with(1, settings);
    let mut subscriber = node.topic.inbound().subscribe(&node.caller()).unwrap();
    let (room_wait, alive) = (Arc::new(RoomWait::new()), Arc::new(()));
    let origin = OriginId { node: ABSENT_NODE, topic: 3 };
    let service_context = node.service_context();
    let mut sink = TopicSink::new(&service_context, node.incoming(), origin, &room_wait, alive);
    let mut deliver = |position: u64| {
        let header = header_at(position);
        assert!(sink.begin(&header).unwrap().is_some());
        assert_eq!(
            sink.finish(&header, &StageDurations::default()).unwrap(),
            FinishOutcome::Published
        );
    };
    (0..DEPTH).for_each(&mut deliver);
    // One message was never written there, and the next is dropped here.
    deliver(DEPTH + 1);
    let mut take =
        || node.take(&mut subscriber).map(|entry| (entry.sequence, node.missed_messages()));
    for number in 0..DEPTH {
        assert_eq!(take(), Some((number + 1, 0)));
    }
    deliver(DEPTH + 2);
    assert_eq!(take(), Some((DEPTH + 3, 2)));
    deliver(DEPTH + 3);
    assert_eq!((take(), take()), (Some((DEPTH + 4, 2)), None));
}

#[test]
fn refused_message_counts_as_waiting_for_a_while() {
    let settings = SharedSettings { reliability: Reliability::DropNewest, ..settings() };
    let node = TestNode::with(1, settings);
    let mut subscriber = node.topic.inbound().subscribe(&node.caller()).unwrap();
    let (room_wait, alive) = (Arc::new(RoomWait::new()), Arc::new(()));
    let origin = OriginId { node: ABSENT_NODE, topic: 3 };
    let service_context = node.service_context();
    let mut sink = TopicSink::new(&service_context, node.incoming(), origin, &room_wait, alive);
    let mut position = 0;
    // Its reader holds the maximum of messages.
    while node.topic.inbound().has_room() {
        let header = header_at(position);
        assert!(sink.begin(&header).unwrap().is_some());
        assert!(!room_wait.is_waiting(TEST_TIMEOUT));
        assert_eq!(
            sink.finish(&header, &StageDurations::default()).unwrap(),
            FinishOutcome::Published
        );
        node.topic.inbound().take(&mut subscriber).unwrap();
        position += 1;
    }
    let header = header_at(position);
    assert!(sink.begin(&header).unwrap().is_some());
    assert_eq!(sink.finish(&header, &StageDurations::default()).unwrap(), FinishOutcome::Published);
    assert!(room_wait.is_waiting(TEST_TIMEOUT), "a message was refused");
    std::thread::sleep(node.topic.refusal_window());
    assert!(!room_wait.is_waiting(node.topic.refusal_window()), "the refusal has expired");
}

#[test]
fn node_sends_interests_only_after_set_topics() {
    let node = TestNode::new(1);
    let mut replication = node.replication(&network());
    let other = subscribing_peer(&replication, 2);
    let next = |replication: &mut Replicator, goal: &str| {
        let mut event = None;
        until(goal, &mut [replication], || {
            event = event.take().or_else(|| other.next_event());
            event.is_some()
        });
        event.unwrap()
    };
    assert!(matches!(next(&mut replication, "the node"), PeerEvent::Connected { .. }));
    // Its provider is sent before its interests, and what answers the subscription.
    for goal in ["its provider", "start sequences"] {
        assert!(matches!(next(&mut replication, goal), PeerEvent::ControlMessage { .. }));
    }
    let end = Instant::now() + Duration::from_millis(300);
    until("time to pass", &mut [&mut replication], || Instant::now() >= end);
    assert_eq!(other.next_event(), None);
    // Empty interests are sent, too, but only now.
    replication.set_topics(BTreeMap::new());
    assert!(matches!(next(&mut replication, "its interests"), PeerEvent::Interests { .. }));
    // A later node gets all in this order.
    let other = subscribing_peer(&replication, 3);
    let mut events = Vec::new();
    until("four events", &mut [&mut replication], || {
        events.extend(std::iter::from_fn(|| other.next_event()));
        events.len() == 4
    });
    assert!(
        matches!(
            &events[..],
            [
                PeerEvent::Connected { .. },
                PeerEvent::ControlMessage { .. },
                PeerEvent::Interests { .. },
                PeerEvent::ControlMessage { .. },
            ]
        ),
        "{events:?}"
    );
}

#[test]
fn messages_of_a_killed_publisher_are_sent_without_notification() {
    let (writing, reading) = (TestNode::new(1), TestNode::new(2));
    let inbound = reading.topic.inbound();
    let (mut writer, mut reader, mut subscriber) = replicators(&writing, &reading);
    for number in 0..2 {
        // Until no thread polls by itself any more.
        std::thread::sleep(Duration::from_millis(300));
        writing.publish_silently(number).unwrap();
        let replicators = &mut [&mut writer, &mut reader];
        until("a message", replicators, || inbound.take(&mut subscriber).is_some());
    }
}

#[test]
fn turn_reconciles_only_topics_with_events() {
    const COUNT: u32 = 300;
    let node = TestNode::new(1);
    let mut replication = node.replication(&network());
    let other = subscribing_peer(&replication, 2);
    let topics: BTreeMap<_, _> = (0..COUNT)
        .map(|number| {
            let name = if number == NUMBER { NAME.to_owned() } else { format!("idle {number}") };
            let mut local = node.topics(false, false).remove(NAME).unwrap();
            if number != NUMBER {
                local.topic = Arc::new(Topic::create(number, &name, &settings()).unwrap());
            }
            (name, local)
        })
        .collect();
    replication.set_topics(topics.clone());
    until("the topic to be replicated", &mut [&mut replication], || node.topic.is_replicated());
    // Repeated turns without changes.
    let (start, before) = (Instant::now(), replication.routing.reconciliations());
    for _ in 0..100 {
        replication.turn();
        replication.set_topics(topics.clone());
    }
    let rounds = start.elapsed().as_secs() + 1;
    let seen = replication.routing.reconciliations() - before;
    assert!(seen <= 100 + rounds * u64::from(COUNT), "{seen} reconciliations");
    // Changed interests of a node concern only their topics.
    let before = replication.routing.reconciliations();
    let interest = |name: &str| Interest {
        topic: name.into(),
        publishes: false,
        subscribes: true,
        settings: settings(),
        subscription: 0,
    };
    other.set_interests([interest(NAME), interest("idle 9")]).unwrap();
    let idle = Arc::clone(&topics["idle 9"].topic);
    until("another topic to be replicated", &mut [&mut replication], || idle.is_replicated());
    let rounds = start.elapsed().as_secs() + 1;
    assert!(replication.routing.reconciliations() - before <= 100 + rounds * u64::from(COUNT));
    // A removed topic is released.
    replication.set_topics(BTreeMap::new());
    until("the topic to be released", &mut [&mut replication], || !idle.is_replicated());
}
