//! Carriers of nodes in one process, over the loopback address, with other nodes that do what they
//! should or do not.

mod losses;
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
use crate::node_segment::NodeSegment;
use crate::peers::{Interest, NodeId, PeerEvent, Peers};
use crate::pool::{Direction, Pool, PoolId};
use crate::replication::sink::TopicSink;
use crate::replication::sink::room_wait::RoomWait;
use crate::replication::source::last_sequences::IdlePublishers;
use crate::replication::source::start_sequences::ReplicationStart;
use crate::replication::{FinishOutcome, MessageHeader, Metadata, Sink, StageDurations};
use crate::report::Row;
use crate::settings::{Reliability, SharedLocation, SharedSettings};
use crate::subscriber::{LossTracker, RemoteStart};
use crate::topic::{Entry, LostPublisher, OriginId, Topic};
use crate::wake::WakeFd;

/// Reached only if something is wrong.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);
const NUMBER: u32 = 7;
const NAME: &str = "numbers";
const DEPTH: u64 = 4;
/// A node that never comes.
const ABSENT_NODE: [u8; 16] = [9; 16];

fn settings() -> SharedSettings {
    SharedSettings {
        place: SharedLocation::Host,
        reliability: Reliability::Reliable,
        depth: DEPTH as u32,
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

/// A node: what outlives its services.
struct TestNode {
    node_segment: NodeSegment,
    me: Participant,
    topic: Arc<Topic>,
    local: Arc<Pool>,
    inbound: Arc<Pool>,
    publisher: u64,
    /// What its reader missed.
    loss_tracker: RefCell<LossTracker>,
}

impl TestNode {
    fn new(identity: u8) -> Self {
        Self::with(identity, settings())
    }

    fn with(identity: u8, settings: SharedSettings) -> Self {
        let node_segment = NodeSegment::create(NodeId([identity; 16])).unwrap();
        let me = node_segment.roster().admit(PidFd::of_this_process().unwrap()).unwrap();
        let caller = Caller::new(me, &**node_segment.roster());
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
        let loss_tracker = RefCell::new(LossTracker::new(&topic.published(), 0, (&[], 0), 0));
        Self { node_segment, me, topic, local, inbound, publisher, loss_tracker }
    }

    /// The topic, and where what comes from other nodes lies.
    fn incoming(&self) -> (&Arc<Topic>, &Arc<Pool>) {
        (&self.topic, &self.inbound)
    }

    fn caller(&self) -> Caller<'_> {
        Caller::new(self.me, &**self.node_segment.roster())
    }

    fn role(&self) -> Participant {
        self.node_segment.roster().admit_role(0).unwrap()
    }

    fn service_context(&self) -> Arc<ServiceContext> {
        let (growth, _) = bounded(1);
        Arc::new(ServiceContext {
            me: self.me,
            role: self.role(),
            roster: Arc::clone(self.node_segment.roster()),
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

    /// The next message that came from another node, if there is one; it is given back.
    fn take(&self, subscriber: &mut ipc::Subscriber) -> Option<Entry> {
        let taken = self.topic.inbound().take(subscriber)?;
        let at = (Direction::Inbound, subscriber.subscription_id());
        let entry = Entry::from_words(taken.entry);
        let arrival = RemoteStart::of(&self.inbound.control().sample_info(entry.block));
        self.loss_tracker.borrow_mut().on_inbound(arrival, entry.publisher, entry.sequence);
        self.topic.release_in(&self.caller(), at, taken.position, self.inbound.control());
        Some(entry)
    }

    /// Messages that its reader did not get.
    fn missed_messages(&self) -> u64 {
        self.loss_tracker.borrow().missed()
    }

    /// Its reader subscribes now.
    fn resubscribe(&self) {
        let position = self.topic.inbound().position();
        *self.loss_tracker.borrow_mut() =
            LossTracker::new(&self.topic.published(), 0, (&[], 0), position);
    }

    fn topics(&self, publishes: bool, subscribes: bool) -> BTreeMap<String, LocalTopic> {
        let facts = LocalTopic {
            topic: Arc::clone(&self.topic),
            local: Arc::clone(&self.local),
            inbound: Arc::clone(&self.inbound),
            publishes,
            subscribes,
        };
        BTreeMap::from([(NAME.to_owned(), facts)])
    }

    fn publish(&self, sequence: u64) -> Result<(), QueueError> {
        let published = self.publish_silently(sequence);
        if published.is_ok() {
            self.node_segment.publish_doorbell().ring(NUMBER);
        }
        published
    }

    /// As one who dies before it has told.
    fn publish_silently(&self, sequence: u64) -> Result<(), QueueError> {
        let (block, place) = self.local.allocate(&self.caller(), 8).unwrap();
        let entry = Entry {
            block,
            offset: place.offset,
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

    /// Publishes until there is no room.
    fn fill(&self) {
        assert!((0..=DEPTH).any(|number| self.publish(number) == Err(QueueError::Full)));
    }

    /// As an earlier service left it: with messages that are owed to a node.
    fn leave_backlog(&self, to: &[u8; 16]) {
        assert!(self.topic.add_destination(to));
        self.topic.subscribe_for_replication(&self.caller(), self.role(), &self.local).unwrap();
        self.topic.set_replicated(true);
        self.fill();
    }

    fn is_owed(&self) -> bool {
        self.topic.local().subscriptions_of(self.role()).next().is_some()
    }

    /// Messages of the publisher that nodes missed which were given up, and how often one was.
    fn missed(&self) -> (u64, u64) {
        let missed = self.topic.missed_by_nodes();
        assert_eq!(self.topic.missed_by_nodes_of(self.publisher), missed.messages);
        (missed.messages, missed.nodes)
    }

    /// Nothing of it is kept for other nodes.
    #[track_caller]
    fn assert_nothing_retained(&self) {
        assert!(!self.is_owed() && self.topic.destinations().is_empty());
        assert!(!self.topic.is_replicated());
        assert_eq!(self.local.statistics(&self.caller()).unwrap().blocks_allocated, 0);
        assert_eq!(self.publish(0), Err(QueueError::NoSubscribers));
    }
}

#[track_caller]
fn until(what: &str, carriers: &mut [&mut Replicator], mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + TEST_TIMEOUT;
    loop {
        carriers.iter_mut().for_each(|replication| replication.turn());
        if is_so() {
            return;
        }
        assert!(Instant::now() < end, "waited for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn what_an_earlier_service_promised_is_kept_for_a_while() {
    let place = TestNode::new(1);
    place.leave_backlog(&ABSENT_NODE);
    let mut replication = place.replication(&network());
    assert!(super::is_owed(&place.topic) && !replication.holds(NUMBER));
    replication.set_topics(place.topics(false, false));
    // There are no workers yet, and it is kept all the same.
    assert!(replication.holds(NUMBER) && place.is_owed());
    until("nobody to come", &mut [&mut replication], || !place.is_owed());
    assert!(!replication.holds(NUMBER));
    place.assert_nothing_retained();
    assert_eq!(place.missed(), (DEPTH, 1));
}

#[test]
fn what_is_kept_for_nobody_is_let_go_of() {
    // A service died when it had forgotten whom it was for.
    let place = TestNode::new(1);
    place.leave_backlog(&ABSENT_NODE);
    place.topic.remove_destination(&ABSENT_NODE);
    let mut replication = place.replication(&network());
    replication.set_topics(place.topics(true, false));
    until("it", &mut [&mut replication], || !place.is_owed());
    place.assert_nothing_retained();
    // And so where a service has no way to other nodes.
    let place = TestNode::new(1);
    place.leave_backlog(&ABSENT_NODE);
    for is_new in [true, false] {
        let done =
            super::release_retained(&place.topic, &place.local, &place.caller(), place.role());
        assert_eq!(done.unwrap(), is_new);
        place.assert_nothing_retained();
        assert_eq!(place.missed(), (DEPTH, 1), "once");
    }
}

/// Another node that wants the topic, and answers no letter.
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
        }])
        .unwrap();
    peers
}

#[test]
fn where_nothing_can_be_sent_nothing_is_kept() {
    let place = TestNode::new(1);
    place.leave_backlog(&[2; 16]);
    let provider = Some("no-such-provider".to_owned());
    let mut replication = place.replication(&NetworkOptions { provider, ..network() });
    let _other = subscribing_peer(&replication, 2);
    replication.set_topics(place.topics(true, false));
    until("it", &mut [&mut replication], || !place.is_owed());
    place.assert_nothing_retained();
    let why = |row| match row {
        Row::ReplicationError { why, .. } => Some(why),
        _ => None,
    };
    let expected = "no provider here is called \"no-such-provider\"; there are ";
    let end = Instant::now() + TEST_TIMEOUT;
    loop {
        let why = replication.rows().into_iter().find_map(why).unwrap();
        if why.contains(expected) {
            break;
        }
        // On a busy machine it takes long to find that out.
        assert!(Instant::now() < end && why.contains("takes longer than"), "{why}");
        replication.turn();
        std::thread::sleep(Duration::from_millis(2));
    }
    // What is due is done, and then it waits.
    let waits = |replication: &Replicator| {
        replication.max_poll_timeout(Instant::now()).is_some_and(|wait| wait > Duration::ZERO)
    };
    while !waits(&replication) {
        assert!(Instant::now() < end);
        replication.turn();
    }
}

#[test]
fn a_node_that_does_not_answer_is_waited_for_until_others_wait_for_too_long() {
    let place = TestNode::new(1);
    let mut replication = place.replication(&network());
    let _other = subscribing_peer(&replication, 2);
    replication.set_topics(place.topics(true, false));
    until("the topic to be replication started", &mut [&mut replication], || {
        place.topic.is_replicated()
    });
    place.fill();
    let stall_timeout = replication.stall_timeout(NUMBER);
    assert_eq!(stall_timeout, Duration::from_millis(1200));
    // Nobody has said that it is in the way.
    let end = Instant::now() + 2 * stall_timeout;
    until("time to pass", &mut [&mut replication], || Instant::now() >= end);
    assert_eq!(place.publish(0), Err(QueueError::Full));
    let end = Instant::now() + TEST_TIMEOUT;
    while place.is_owed() {
        assert!(Instant::now() < end, "it is still waited for");
        replication.backlog_blocks_publishers(NUMBER);
        replication.turn();
        std::thread::sleep(Duration::from_millis(2));
    }
    place.assert_nothing_retained();
    assert_eq!(place.missed(), (DEPTH, 1));
}

#[test]
fn nobody_here_waits_for_a_node_that_does_not_answer_if_not_all_is_to_arrive() {
    let loose = SharedSettings { reliability: Reliability::DropNewest, ..settings() };
    let place = TestNode::with(1, loose);
    let mut replication = place.replication(&network());
    let other = subscribing_peer(&replication, 2);
    let wants =
        Interest { topic: NAME.into(), publishes: false, subscribes: true, settings: loose };
    other.set_interests([wants]).unwrap();
    replication.set_topics(place.topics(true, false));
    until("the topic to be replication started", &mut [&mut replication], || {
        place.topic.is_replicated()
    });
    for number in 0..10 * DEPTH {
        until("room", &mut [&mut replication], || place.publish(number).is_ok());
    }
}

#[test]
fn who_wants_a_topic_that_is_not_received_is_told_so() {
    let (writing, reading) = (TestNode::new(1), TestNode::new(2));
    let mut writer = writing.replication(&network());
    let mut reader = reading.replication(&NetworkOptions {
        peers: vec![writer.listens().unwrap()],
        // No messages can come here.
        provider: Some("no-such-provider".into()),
        ..network()
    });
    writer.set_topics(writing.topics(true, false));
    reader.set_topics(reading.topics(false, true));
    let (one, two) = (&mut writer, &mut reader);
    until("the topic to be replication started", &mut [&mut *one, &mut *two], || {
        writing.topic.is_replicated()
    });
    // Each wish is answered, long before the writer's own patience is over.
    let broke = |replication: &Replicator| {
        let mut all = replication.plan.destinations(NUMBER);
        all.any(|(_, destination_state)| {
            matches!(
                destination_state,
                crate::replication::routing::DestinationState::Broken { .. }
            )
        })
    };
    let end = Instant::now() + Duration::from_secs(9);
    while !broke(one) {
        one.turn();
        two.turn();
        assert!(Instant::now() < end, "it was not answered");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn what_could_not_be_carried_is_tried_again() {
    let place = TestNode::new(1);
    let mut replication = place.replication(&network());
    let mut others: Vec<_> =
        std::iter::from_fn(|| place.topic.local().subscribe_as(&place.caller(), place.me).ok())
            .collect();
    // The place that is left for what goes to other nodes.
    let blocking_subscribers = Participant::role(1).unwrap();
    others.push(place.topic.local().subscribe_as(&place.caller(), blocking_subscribers).unwrap());
    let _other = subscribing_peer(&replication, 2);
    replication.set_topics(place.topics(true, false));
    until("it to fail", &mut [&mut replication], || !place.topic.destinations().is_empty());
    for _ in 0..10 {
        replication.turn();
    }
    assert!(!place.topic.is_replicated() && replication.max_poll_timeout(Instant::now()).is_some());
    let one = others.pop().unwrap();
    place.topic.local().unsubscribe(&place.caller(), &one, |_| {}).unwrap();
    until("the topic to be replication started", &mut [&mut replication], || {
        place.topic.is_replicated()
    });
}

#[test]
fn topic_leaves_its_node_beside_as_many_subscribers_as_there_can_be() {
    let place = TestNode::new(1);
    let mut replication = place.replication(&network());
    let others: Vec<_> =
        std::iter::from_fn(|| place.topic.local().subscribe(&place.caller()).ok()).collect();
    let _other = subscribing_peer(&replication, 2);
    replication.set_topics(place.topics(true, false));
    until("the topic to be replication started", &mut [&mut replication], || {
        place.topic.is_replicated()
    });
    assert_eq!(place.topic.local().subscribers() as usize, others.len() + 1);
}

/// Both nodes', which carry the topic to a subscriber at the second one.
fn carriers(writing: &TestNode, reading: &TestNode) -> (Replicator, Replicator, ipc::Subscriber) {
    // Nobody is given up meanwhile, however slow all is.
    let network = || NetworkOptions { lost_after: TEST_TIMEOUT, ..network() };
    let mut writer = writing.replication(&network());
    let peers = vec![writer.listens().unwrap()];
    let mut reader = reading.replication(&NetworkOptions { peers, ..network() });
    let subscriber = reading.topic.inbound().subscribe(&reading.caller()).unwrap();
    writer.set_topics(writing.topics(true, false));
    reader.set_topics(reading.topics(false, true));
    let both = &mut [&mut writer, &mut reader];
    until("the topic to be replication started", both, || writing.topic.is_replicated());
    (writer, reader, subscriber)
}

#[test]
fn workers_that_end_are_followed_by_others_that_lose_nothing() {
    let (writing, reading) = (TestNode::new(1), TestNode::new(2));
    let inbound = reading.topic.inbound();
    let (mut writer, mut reader, mut subscriber) = carriers(&writing, &reading);
    let (one, two) = (&mut writer, &mut reader);
    for number in 0..60 {
        if number % 20 == 10 {
            let at = if number < 20 { &*one } else { &*two };
            at.workers.iter().flat_map(super::Workers::all).for_each(super::Worker::ends);
        }
        let carriers = &mut [&mut *one, &mut *two];
        until("room", carriers, || {
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
    assert!(inbound.take(&mut subscriber).is_none(), "one came twice");
}

#[test]
fn who_subscribes_again_before_the_other_node_knows_is_told_what_does_not_come() {
    let (writing, reading) = (TestNode::new(1), TestNode::new(2));
    let (mut writer, mut reader, mut subscriber) = carriers(&writing, &reading);
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
        reading.topic.inbound().unsubscribe(&reading.caller(), &before, dispose).unwrap();
        reading.resubscribe();
        // The other node may hear of both at once, or let go of some between them: of what was begun
        // before something may still come first, and what is let go of after that is told.
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

/// Of a message of 8 bytes, one of each number of one publisher.
fn header_at(position: u64) -> MessageHeader {
    let (length, publisher, sequence) = (8, 1, position + 1);
    let (published, posted, metadata) = (0, 0, Metadata::NONE);
    MessageHeader { position, length, publisher, sequence, published, posted, metadata }
}

#[test]
fn publisher_that_is_quiet_is_found_while_another_one_publishes() {
    let mut place = TestNode::new(1);
    let (mut idle, caller) =
        (IdlePublishers::default(), Caller::new(place.me, &**place.node_segment.roster()));
    place.topic.local().subscribe(&caller).unwrap();
    let (first, second) = (place.publisher, place.topic.claim(place.me).unwrap());
    place.publish(1).unwrap();
    assert_eq!(idle.look(&place.topic), []);
    place.publisher = second;
    place.publish(1).unwrap();
    assert_eq!(idle.look(&place.topic), [(first, 1)]);
    place.publish(2).unwrap();
    assert_eq!(idle.look(&place.topic), [], "that is known, and the other one published");
    assert_eq!(idle.look(&place.topic), [(second, 2)]);
    assert_eq!(idle.look(&place.topic), []);
}

/// What is on its way may still arrive.
#[test]
fn publisher_is_not_quiet_before_its_messages_are_delivered_to_other_nodes() {
    let place = TestNode::new(1);
    let (mut idle, local) = (IdlePublishers::default(), place.topic.local());
    let mut carried =
        place.topic.subscribe_for_replication(&place.caller(), place.role(), &place.local).unwrap();
    place.publish(1).unwrap();
    let taken = local.take(&mut carried).unwrap();
    for _ in 0..3 {
        assert_eq!(idle.look(&place.topic), []);
    }
    let at = (Direction::Local, carried.subscription_id());
    place.topic.release_in(&place.caller(), at, taken.position, place.local.control());
    assert_eq!(idle.look(&place.topic), [(place.publisher, 1)]);
}

#[test]
fn what_is_missing_before_one_that_found_no_room_is_told_with_the_next_one() {
    let settings = SharedSettings { reliability: Reliability::DropNewest, ..settings() };
    let place = TestNode::with(1, settings);
    let mut subscriber = place.topic.inbound().subscribe(&place.caller()).unwrap();
    let (room_wait, alive) = (Arc::new(RoomWait::new()), Arc::new(()));
    let origin = OriginId { node: ABSENT_NODE, topic: 3 };
    let service_context = place.service_context();
    let mut sink = TopicSink::new(
        &service_context,
        place.incoming(),
        origin,
        ReplicationStart::default(),
        &room_wait,
        alive,
    );
    let mut comes = |position: u64| {
        let header = header_at(position);
        assert!(sink.begin(&header).unwrap().is_some());
        assert_eq!(
            sink.finish(&header, &StageDurations::default()).unwrap(),
            FinishOutcome::Published
        );
    };
    (0..DEPTH).for_each(&mut comes);
    // One was never written there, and the next one is dropped here.
    comes(DEPTH + 1);
    let mut take =
        || place.take(&mut subscriber).map(|entry| (entry.sequence, place.missed_messages()));
    for number in 0..DEPTH {
        assert_eq!(take(), Some((number + 1, 0)));
    }
    comes(DEPTH + 2);
    assert_eq!(take(), Some((DEPTH + 3, 2)));
    comes(DEPTH + 3);
    assert_eq!((take(), take()), (Some((DEPTH + 4, 2)), None));
}

#[test]
fn a_reader_is_in_nobodys_way_once_what_was_refused_does_not_come_again() {
    let settings = SharedSettings { reliability: Reliability::DropNewest, ..settings() };
    let place = TestNode::with(1, settings);
    let mut subscriber = place.topic.inbound().subscribe(&place.caller()).unwrap();
    let (room_wait, alive) = (Arc::new(RoomWait::new()), Arc::new(()));
    let origin = OriginId { node: ABSENT_NODE, topic: 3 };
    let service_context = place.service_context();
    let mut sink = TopicSink::new(
        &service_context,
        place.incoming(),
        origin,
        ReplicationStart::default(),
        &room_wait,
        alive,
    );
    let mut position = 0;
    // Its reader holds all messages that there may be.
    while place.topic.inbound().has_room() {
        let header = header_at(position);
        assert!(sink.begin(&header).unwrap().is_some());
        assert!(!room_wait.is_waiting(TEST_TIMEOUT));
        assert_eq!(
            sink.finish(&header, &StageDurations::default()).unwrap(),
            FinishOutcome::Published
        );
        place.topic.inbound().take(&mut subscriber).unwrap();
        position += 1;
    }
    let header = header_at(position);
    assert!(sink.begin(&header).unwrap().is_some());
    assert_eq!(sink.finish(&header, &StageDurations::default()).unwrap(), FinishOutcome::Published);
    assert!(room_wait.is_waiting(TEST_TIMEOUT), "one was refused");
    std::thread::sleep(place.topic.refusal_window());
    assert!(!room_wait.is_waiting(place.topic.refusal_window()), "and none came after it");
}

#[test]
fn a_node_says_nothing_before_it_knows_what_it_wants() {
    let place = TestNode::new(1);
    let mut replication = place.replication(&network());
    let other = subscribing_peer(&replication, 2);
    let next = |replication: &mut Replicator, what: &str| {
        let mut event = None;
        until(what, &mut [replication], || {
            event = event.take().or_else(|| other.next_event());
            event.is_some()
        });
        event.unwrap()
    };
    assert!(matches!(next(&mut replication, "the node"), PeerEvent::Connected { .. }));
    // Its provider is all that it says, which is before what it wants.
    assert!(matches!(next(&mut replication, "its provider"), PeerEvent::ControlMessage { .. }));
    let end = Instant::now() + Duration::from_millis(300);
    until("time to pass", &mut [&mut replication], || Instant::now() >= end);
    assert_eq!(other.next_event(), None);
    // That there is nothing is said, too, but only now.
    replication.set_topics(BTreeMap::new());
    assert!(matches!(next(&mut replication, "its interests"), PeerEvent::Interests { .. }));
    // And to one that comes later, too, in this order.
    let other = subscribing_peer(&replication, 3);
    let mut heard = Vec::new();
    until("all that it says", &mut [&mut replication], || {
        heard.extend(std::iter::from_fn(|| other.next_event()));
        heard.len() == 3
    });
    assert!(
        matches!(
            &heard[..],
            [
                PeerEvent::Connected { .. },
                PeerEvent::ControlMessage { .. },
                PeerEvent::Interests { .. }
            ]
        ),
        "{heard:?}"
    );
}

#[test]
fn what_nobody_told_of_is_sent_all_the_same() {
    let (writing, reading) = (TestNode::new(1), TestNode::new(2));
    let inbound = reading.topic.inbound();
    let (mut writer, mut reader, mut subscriber) = carriers(&writing, &reading);
    for number in 0..2 {
        // Until nobody looks by itself any more.
        std::thread::sleep(Duration::from_millis(300));
        writing.publish_silently(number).unwrap();
        let carriers = &mut [&mut writer, &mut reader];
        until("a message", carriers, || inbound.take(&mut subscriber).is_some());
    }
}

#[test]
fn a_turn_looks_at_what_something_happened_to() {
    const COUNT: u32 = 300;
    let place = TestNode::new(1);
    let mut replication = place.replication(&network());
    let other = subscribing_peer(&replication, 2);
    let topics: BTreeMap<_, _> = (0..COUNT)
        .map(|number| {
            let name = if number == NUMBER { NAME.to_owned() } else { format!("idle {number}") };
            let mut facts = place.topics(false, false).remove(NAME).unwrap();
            if number != NUMBER {
                facts.topic = Arc::new(Topic::create(number, &name, &settings()).unwrap());
            }
            (name, facts)
        })
        .collect();
    replication.set_topics(topics.clone());
    until("the topic to be replication started", &mut [&mut replication], || {
        place.topic.is_replicated()
    });
    // Nothing new, and again nothing.
    let (start, looks) = (Instant::now(), replication.looks);
    for _ in 0..100 {
        replication.turn();
        replication.set_topics(topics.clone());
    }
    let rounds = start.elapsed().as_secs() + 1;
    let seen = replication.looks - looks;
    assert!(seen <= 100 + rounds * u64::from(COUNT), "{seen} looks");
    // A node that comes, or wants another one, has to do with what it wants.
    let looks = replication.looks;
    let wants = |name: &str| Interest {
        topic: name.into(),
        publishes: false,
        subscribes: true,
        settings: settings(),
    };
    other.set_interests([wants(NAME), wants("idle 9")]).unwrap();
    let idle = Arc::clone(&topics["idle 9"].topic);
    until("another topic to be replication started", &mut [&mut replication], || {
        idle.is_replicated()
    });
    let rounds = start.elapsed().as_secs() + 1;
    assert!(replication.looks - looks <= 100 + rounds * u64::from(COUNT));
    // One that is not there any more is let go of.
    replication.set_topics(BTreeMap::new());
    until("it to be let go of", &mut [&mut replication], || !idle.is_replicated());
}
