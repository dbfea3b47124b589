//! A model of all that may happen between a publishing and a subscribing node: publishers, links,
//! readers and services come and go. For each reader, what was published since its account began is
//! what it received, and what it was told that it missed.

use std::collections::{BTreeMap, VecDeque};

use proptest::prelude::*;

use super::*;
use crate::replication::ControlMessage;
use crate::replication::routing::ended_publishers;
use crate::replication::source::last_sequences::LastSequences;
use crate::replication::source::start_sequences::StartSequences;
use crate::topic::{Published, RemotePublisher, TopicStart};

/// Messages that the model leaves unread at most.
const MAX_UNREAD: usize = 100;

#[derive(Debug, Clone, Copy)]
enum Step {
    StartPublisher,
    EndPublisher(usize),
    Publish(usize, u64),
    /// Messages that find no room where they are published.
    Drop(usize, u64),
    Cut,
    Connect,
    /// The publishing node waits no longer.
    GiveUp,
    /// Another service of the publishing node.
    HandOverWriter,
    /// Another service of the subscribing node.
    HandOverReader,
    Deliver(usize),
    /// Messages that find no room at the subscribing node.
    Refuse(usize),
    /// All publishers have been idle for a while.
    ReportIdle,
    Subscribe,
    Unsubscribe(usize),
    Pull(usize, usize),
}

fn step() -> impl Strategy<Value = Step> {
    use Step::*;
    let some = 1..6_usize;
    prop_oneof![
        3 => Just(StartPublisher),
        2 => any::<usize>().prop_map(EndPublisher),
        8 => (any::<usize>(), 1..5_u64).prop_map(|(which, count)| Publish(which, count)),
        1 => (any::<usize>(), 1..3_u64).prop_map(|(which, count)| Drop(which, count)),
        2 => Just(Cut),
        4 => Just(Connect),
        2 => Just(GiveUp),
        1 => Just(HandOverWriter),
        1 => Just(HandOverReader),
        6 => some.clone().prop_map(Deliver),
        1 => (1..3_usize).prop_map(Refuse),
        3 => Just(ReportIdle),
        2 => Just(Subscribe),
        1 => any::<usize>().prop_map(Unsubscribe),
        4 => (any::<usize>(), some).prop_map(|(which, count)| Pull(which, count)),
    ]
}

/// A message in flight.
#[derive(Debug, Clone, Copy)]
struct Sent {
    publisher: u64,
    sequence: u64,
    position: u64,
    topic: u64,
}

/// The node that publishes, with the state that outlives its services.
struct Writer {
    node_segment: Arc<NodeSegment>,
    me: Participant,
    topic: Option<Topic>,
    /// Present publishers, and the last sequence of all.
    publishers: Vec<u64>,
    published: BTreeMap<u64, u64>,
    position: u64,
    /// Messages are retained for the other node, and these are.
    is_destination: bool,
    retained: VecDeque<Sent>,
}

impl Writer {
    fn new() -> Self {
        let node_segment = Arc::new(NodeSegment::create(NodeId([1; 16])).unwrap());
        let me = node_segment.participants().admit(PidFd::of_this_process().unwrap()).unwrap();
        Self {
            node_segment,
            me,
            topic: None,
            publishers: Vec::new(),
            published: BTreeMap::new(),
            position: 0,
            is_destination: false,
            retained: VecDeque::new(),
        }
    }

    fn start_publisher(&mut self) {
        if self.publishers.len() < 3 {
            let number = || self.node_segment.next_topic_number();
            let topic = self
                .topic
                .get_or_insert_with(|| Topic::create(number(), NAME, &settings()).unwrap());
            let publisher = topic.claim(self.me).unwrap();
            assert!(self.published.insert(publisher, 0).is_none(), "an identifier of another");
            self.publishers.push(publisher);
        }
    }

    fn publish(&mut self, which: usize, is_dropped: bool) {
        let (Some(topic), false) = (&self.topic, self.publishers.is_empty()) else { return };
        let publisher = self.publishers[which % self.publishers.len()];
        let sequence = self.published[&publisher] + 1;
        self.published.insert(publisher, sequence);
        let slot = topic.publisher(publisher);
        slot.begin(sequence);
        if is_dropped {
            return slot.count_dropped();
        }
        slot.count(8);
        if self.is_destination {
            let (position, topic) = (self.position, u64::from(topic.number()));
            self.retained.push_back(Sent { publisher, sequence, position, topic });
            self.position += 1;
        }
    }

    fn end_publisher(&mut self, which: usize) {
        if let (Some(topic), false) = (&self.topic, self.publishers.is_empty()) {
            let publisher = self.publishers.swap_remove(which % self.publishers.len());
            topic.publisher(publisher).give_back();
        }
    }

    /// Removes the topic without users, unless messages are retained. True if it did.
    fn remove_unused(&mut self) -> bool {
        if !self.publishers.is_empty() || !self.retained.is_empty() {
            return false;
        }
        let Some(topic) = self.topic.take() else { return false };
        self.node_segment.record_ended_publishers(NAME, &topic.ended_publishers());
        self.position = 0;
        true
    }

    /// The last sequences, once all messages are delivered.
    fn last_sequences(&self) -> Vec<ControlMessage> {
        let (Some(topic), true) = (&self.topic, self.is_destination && self.retained.is_empty())
        else {
            return Vec::new();
        };
        let last = topic.last_of_all().into_iter().filter(|(_, last)| *last > 0);
        LastSequences::of(&last.collect::<Vec<_>>())
            .map(|last| ControlMessage::LastSequences { topic: NAME.to_owned(), last })
            .collect()
    }
}

struct Reader {
    subscriber: ipc::Subscriber,
    loss_tracker: LossTracker,
    /// Of each publisher: what the node had when this reader subscribed.
    before: BTreeMap<u64, u64>,
    received: Vec<(u64, u64)>,
}

struct Model {
    writer: Writer,
    node: TestNode,
    is_connected: bool,
    /// From the publishing node, not received yet.
    control_messages: VecDeque<ControlMessage>,
    readers: Vec<Reader>,
    /// The start of the present subscription, and the last message of each publisher that the node
    /// got, or knows to be lost.
    start: Option<TopicStart>,
    passed: BTreeMap<u64, u64>,
}

impl Model {
    fn new() -> Self {
        let depth = 4 * MAX_UNREAD as u32;
        Self {
            writer: Writer::new(),
            node: TestNode::with(2, SharedSettings { depth, ..settings() }),
            is_connected: false,
            control_messages: VecDeque::new(),
            readers: Vec::new(),
            start: None,
            passed: BTreeMap::new(),
        }
    }

    /// The publishing node learns of the subscription.
    fn report_subscription(&mut self) {
        if self.readers.is_empty() {
            return;
        }
        let (node_segment, topic) = (&self.writer.node_segment, self.writer.topic.as_ref());
        let subscription = self.node.topic.subscription();
        let answer = StartSequences::answer(node_segment, topic, NAME, subscription);
        self.control_messages.push_back(ControlMessage::StartSequences(vec![answer]));
        self.control_messages.extend(ended_publishers(node_segment, NAME));
        self.writer.is_destination = true;
    }

    fn cut(&mut self) {
        self.is_connected = false;
        self.control_messages.clear();
    }

    fn connect(&mut self) {
        if !std::mem::replace(&mut self.is_connected, true) {
            if self.readers.is_empty() {
                self.end_destination();
            }
            self.report_subscription();
        }
    }

    fn end_destination(&mut self) {
        self.writer.is_destination = false;
        self.writer.retained.clear();
    }

    fn subscribe(&mut self) {
        if self.readers.len() >= 3 {
            return;
        }
        let inbound = self.node.topic.inbound();
        let changes = self.node.topic.remote_last_sequence_changes();
        let subscriber = inbound.subscribe(&self.node.caller()).unwrap();
        let position = subscriber.position();
        let expected = self.node.topic.expected_of_remote(position);
        let before = Published { serial: 0, publishers: Vec::new() };
        let loss_tracker =
            LossTracker::new(&before, 0, &RemoteAccounts::new(expected, changes), position);
        let is_first = self.readers.is_empty();
        let (before, received) = (self.passed.clone(), Vec::new());
        self.readers.push(Reader { subscriber, loss_tracker, before, received });
        if is_first && self.is_connected {
            self.report_subscription();
        }
    }

    fn unsubscribe(&mut self, which: usize) {
        if self.readers.is_empty() {
            return;
        }
        let mut reader = self.readers.swap_remove(which % self.readers.len());
        Self::pull(&self.node, &mut reader, usize::MAX);
        let id = reader.subscriber.subscription_id();
        self.node.topic.inbound().end_subscription(&self.node.caller(), id, |_| {}).unwrap();
        if self.readers.is_empty() {
            self.node.topic.end_accounts();
            self.start = None;
            self.passed.clear();
            if self.is_connected {
                self.end_destination();
            }
        }
    }

    fn pull(node: &TestNode, reader: &mut Reader, count: usize) {
        for _ in 0..count {
            let Some(taken) = node.topic.inbound().take(&mut reader.subscriber) else {
                let changes = node.topic.remote_last_sequence_changes();
                if reader.loss_tracker.has_new_last_sequences(changes) {
                    let seen = reader.loss_tracker.changes_seen();
                    let last = node.topic.remote_last_sequences(seen);
                    reader.loss_tracker.settle_remote(&last, changes);
                }
                return;
            };
            let entry = Entry::from_words(taken.entry);
            let start = RemoteStart::of(&node.inbound.control().sample_info(entry.block));
            reader.loss_tracker.on_inbound(start, entry.publisher, entry.sequence);
            let at = (Direction::Inbound, reader.subscriber.subscription_id());
            node.topic.release_in(&node.caller(), at, taken.position, node.inbound.control());
            reader.received.push((entry.publisher, entry.sequence));
        }
    }

    fn pull_all(&mut self) {
        self.readers.iter_mut().for_each(|it| Self::pull(&self.node, it, usize::MAX));
    }

    /// Handles control messages as a replicator does.
    fn receive_control_messages(&mut self) {
        let node = self.writer.node_segment.identity();
        for message in std::mem::take(&mut self.control_messages) {
            if self.readers.is_empty() {
                continue;
            }
            match message {
                ControlMessage::StartSequences(all) => {
                    for one in all {
                        if one.answers(self.node.topic.subscription()) {
                            self.start.get_or_insert(one.start().clone());
                        }
                        one.begin(node, &self.node.topic);
                    }
                }
                ControlMessage::LastSequences { last, .. } => {
                    for (publisher, last) in last.publishers() {
                        let passed = self.passed.entry(*publisher).or_default();
                        *passed = (*last).max(*passed);
                    }
                    last.record(node, &self.node.topic);
                }
                other => panic!("{other:?}"),
            }
        }
    }

    /// Delivers retained messages, as a new sink would.
    fn deliver(&mut self, count: usize, is_refused: bool) {
        if !self.is_connected {
            return;
        }
        self.receive_control_messages();
        let service_context = self.node.service_context();
        for _ in 0..count {
            let Some(sent) = self.writer.retained.pop_front() else { return };
            if self.node.topic.inbound().position().is_multiple_of(MAX_UNREAD as u64) {
                self.readers.iter_mut().for_each(|it| Self::pull(&self.node, it, usize::MAX));
            }
            let origin = OriginId { node: [1; 16], topic: sent.topic };
            let (room_wait, alive) = (Arc::new(RoomWait::new()), Arc::new(()));
            let mut sink =
                TopicSink::new(&service_context, self.node.incoming(), origin, &room_wait, alive);
            let header = MessageHeader {
                publisher: sent.publisher,
                sequence: sent.sequence,
                ..header_at(sent.position)
            };
            if is_refused {
                let (topic, control) = (&self.node.topic, self.node.inbound.control());
                let (caller, at) = (self.node.caller(), (&origin, sent.position));
                topic.skip_in(&caller, at, control).unwrap();
                let publisher = RemotePublisher::new(origin.node, sent.publisher);
                topic.note_passed(&mut 0, publisher, sent.sequence);
            } else {
                assert!(sink.begin(&header).unwrap().is_some());
                let finished = sink.finish(&header, &StageDurations::default()).unwrap();
                assert_eq!(finished, FinishOutcome::Published);
            }
            let passed = self.passed.entry(sent.publisher).or_default();
            *passed = sent.sequence.max(*passed);
        }
    }

    fn run(&mut self, step: Step) {
        match step {
            Step::StartPublisher => self.writer.start_publisher(),
            Step::EndPublisher(which) => self.writer.end_publisher(which),
            Step::Publish(which, count) => {
                (0..count).for_each(|_| self.writer.publish(which, false))
            }
            Step::Drop(which, count) => (0..count).for_each(|_| self.writer.publish(which, true)),
            Step::Cut | Step::HandOverWriter | Step::HandOverReader => self.cut(),
            Step::Connect => self.connect(),
            Step::GiveUp if !self.is_connected => self.end_destination(),
            Step::GiveUp => {}
            Step::Deliver(count) => self.deliver(count, false),
            Step::Refuse(count) => self.deliver(count, true),
            Step::ReportIdle if self.is_connected => {
                self.control_messages.extend(self.writer.last_sequences());
            }
            Step::ReportIdle => {}
            Step::Subscribe => self.subscribe(),
            Step::Unsubscribe(which) => self.unsubscribe(which),
            Step::Pull(which, count) => {
                let readers = self.readers.len().max(1);
                if let Some(reader) = self.readers.get_mut(which % readers) {
                    Self::pull(&self.node, reader, count);
                }
            }
        }
        if self.writer.remove_unused() && self.is_connected && self.writer.is_destination {
            self.control_messages.extend(ended_publishers(&self.writer.node_segment, NAME));
        }
    }

    /// The first message of a publisher that counts for a reader.
    fn first_of(&self, reader: &Reader, publisher: u64) -> Option<u64> {
        let first = self.start.as_ref()?.first_after(publisher)?;
        Some(first.max(reader.before.get(&publisher).map_or(0, |last| last + 1)))
    }

    /// Connects, delivers and reports all, and compares.
    fn check(&mut self) {
        self.connect();
        self.deliver(usize::MAX, false);
        self.run(Step::Pull(0, 0));
        self.run(Step::ReportIdle);
        self.receive_control_messages();
        self.pull_all();
        for reader in &self.readers {
            let (mut expected, mut received) = (0, 0);
            for (publisher, last) in &self.writer.published {
                let Some(first) = self.first_of(reader, *publisher) else { continue };
                expected += (last + 1).saturating_sub(first);
                let of_publisher = reader.received.iter().filter(|(from, _)| from == publisher);
                let sequences: Vec<_> = of_publisher.map(|(_, sequence)| *sequence).collect();
                assert!(sequences.is_sorted_by(|one, next| one < next), "{sequences:?}");
                received += sequences.iter().filter(|sequence| **sequence >= first).count() as u64;
            }
            assert_eq!(received + reader.loss_tracker.missed(), expected, "received {received}");
        }
    }
}

fn check_after(steps: &[Step]) {
    let mut model = Model::new();
    steps.iter().for_each(|step| model.run(*step));
    model.check();
}

/// A publisher that ended in an earlier subscription is reported again, beside a last sequence that is
/// still recorded for that subscription.
#[test]
fn last_sequences_of_a_former_subscription_are_not_counted() {
    use Step::*;
    check_after(&[
        Subscribe,
        StartPublisher,
        Connect,
        Deliver(1),
        Publish(0, 1),
        Cut,
        EndPublisher(0),
        GiveUp,
        StartPublisher,
        Publish(0, 1),
        Connect,
        ReportIdle,
        Deliver(1),
        Unsubscribe(0),
        Subscribe,
        Publish(0, 1),
    ]);
}

/// A last sequence arrives after the node subscribed again, and before the answer to that.
#[test]
fn late_last_sequence_of_a_former_subscription_is_not_counted() {
    use Step::*;
    check_after(&[
        Subscribe,
        StartPublisher,
        Publish(0, 1),
        Connect,
        Deliver(1),
        ReportIdle,
        Unsubscribe(0),
        Publish(0, 1),
        Subscribe,
        Deliver(1),
        Pull(0, 1),
    ]);
}

#[test]
fn published_messages_are_received_or_told_as_missed() {
    let steps = proptest::collection::vec(step(), 1..120);
    proptest!(ProptestConfig::with_cases(400), |(steps in steps)| {
        check_after(&steps);
    });
}
