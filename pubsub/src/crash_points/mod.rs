//! Kills a process before and after every single store of topics and pools. Checks that the
//! survivors find a consistent state, lose no message, and deliver none twice.
//!
//! `ipc/tests/crash_points.rs` does the same for the layer below. The test fails if any store in
//! the listed sources was not reached.

mod scenarios;

use std::cell::RefCell;
use std::path::Path;
use std::time::Duration;

use ipc::crash_test::{Crash, CrashingWords, Sources};
use ipc::{
    Block, BlockRange, Caller, Layout, Liveness, MappedWords, Owner, Participant, ParticipantTable,
    PidFd, Segment, WordRange,
};
use testkit::children::ForkedChild;

use self::scenarios::{Scenario, scenarios};
use crate::pool::{Direction, PoolControl, PoolId, Readiness, Stage, SyncPoint};
use crate::settings::{Reliability, SharedLocation, SharedSettings};
use crate::topic::{
    Delivery, Entry, LostPublisher, OriginId, PublisherStart, PublishingNode, RemoteLastSequence,
    RemotePublisher, TopicStart, TopicWords,
};

static SOURCES: Sources = Sources::new(
    &[
        "pubsub/src/pool/control.rs",
        "pubsub/src/pool/stream_order/sync_words.rs",
        "pubsub/src/pool/sample_info.rs",
        "pubsub/src/topic/subscribers.rs",
        "pubsub/src/topic/destinations.rs",
        "pubsub/src/topic/losses.rs",
        "pubsub/src/topic/eviction.rs",
        "pubsub/src/topic/remote_accounts.rs",
        "pubsub/src/topic/remote_last_sequences.rs",
        "pubsub/src/topic/given_up.rs",
        "pubsub/src/topic/presence.rs",
        "pubsub/src/topic/intent.rs",
        "pubsub/src/topic/words.rs",
        "pubsub/src/topic/origins.rs",
        "pubsub/src/topic/backpressure.rs",
        "pubsub/src/topic/publishers.rs",
        "ipc/src/allocator/mod.rs",
        "ipc/src/allocator/locked.rs",
        "ipc/src/doorbell.rs",
        "ipc/src/queue/subscriptions.rs",
        "ipc/src/queue/publish.rs",
        "ipc/src/queue/subscriber.rs",
    ],
    // The test of `ipc` covers its other sources.
    12,
    2,
);

const LAYOUT: Layout = Layout::new("crash points", 1);
const MAX_BLOCKS: u32 = 32;
const MEMORY: u64 = 1 << 15;
const PARTICIPANTS: usize = 256;
/// On a device that is never opened: stream order applies there.
const PLACE: SharedLocation = SharedLocation::Device([7; 16]);
const SETTINGS: [SharedSettings; 2] =
    [settings(Reliability::Reliable), settings(Reliability::DropOldest)];

const fn settings(reliability: Reliability) -> SharedSettings {
    let usual = SharedSettings::of_depth(2);
    SharedSettings { place: PLACE, reliability, largest: 1000, release_microseconds: 1000, ..usual }
}

/// A message that one of the scenarios drops for lack of room.
const SKIPPED: u64 = 2;
/// Destinations of a topic.
const NODES: [[u8; 16]; 2] = [[3; 16], [4; 16]];
/// A publisher of another node.
const ORIGIN: OriginId = OriginId { node: [5; 16], topic: 1 };

fn lost(publisher: u64) -> LostPublisher {
    LostPublisher { node: NODES[0], publisher }
}

/// The last sequence of a publisher of another node.
fn published(publisher: u64, last: u64) -> RemoteLastSequence {
    RemoteLastSequence { node: NODES[0], publisher, last, start: PublisherStart::new(0, 0), at: 0 }
}

/// Publishers of another node: with messages before the subscription, and later.
const LISTED: u64 = 1 << 8;
const LATER: u64 = 3 << 8;

fn later() -> RemotePublisher {
    RemotePublisher::new(NODES[0], LATER)
}

fn account_start() -> TopicStart {
    TopicStart::new(2, vec![(LISTED, 9)])
}

/// Another node that publishes.
fn publishing(node: usize, is_connected: bool) -> PublishingNode {
    PublishingNode::new(NODES[node], is_connected, "another node")
}

fn role() -> Participant {
    Participant::role(0).unwrap()
}

/// The memory that two processes share.
struct World {
    words: MappedWords,
    crash: Crash,
    participants: ParticipantTable<WordRange<MappedWords>>,
    survivor: Participant,
    victim: Participant,
    settings: SharedSettings,
    /// A subscriber that is about to be evicted.
    slow: RefCell<Option<[ipc::Subscriber; 2]>>,
}

type Control<'a> = PoolControl<CrashingWords<'a>>;

impl World {
    fn new(settings: SharedSettings) -> Self {
        let world = Self::unformatted(settings);
        TopicWords::format(world.topic_words(), 9, "crash points", &settings).unwrap();
        for direction in Direction::BOTH {
            let id = PoolId { place: PLACE, direction };
            let words = world.control_words(direction);
            let control = PoolControl::format(words, id, 1 << 20, MAX_BLOCKS).unwrap();
            control.admit(&world.caller(world.survivor), 0, MEMORY, 1).unwrap();
        }
        world
    }

    fn unformatted(settings: SharedSettings) -> Self {
        let topic = TopicWords::<CrashingWords<'_>>::required_words(&settings);
        let control_segment = Control::required_words(MAX_BLOCKS, 1 << 20);
        let count = PARTICIPANTS + topic + 2 * control_segment;
        let words = Segment::create(LAYOUT, count * 8).unwrap().words();
        let participants =
            ParticipantTable::new(WordRange::new(words.clone(), 0, PARTICIPANTS).unwrap()).unwrap();
        let survivor = participants.admit(PidFd::of_this_process().unwrap()).unwrap();
        // Its pidfd is added when it is forked.
        let victim = participants.admit(PidFd::of_this_process().unwrap()).unwrap();
        let (crash, slow) = (Crash::new(&SOURCES), RefCell::default());
        Self { words, crash, participants, survivor, victim, settings, slow }
    }

    fn part(&self, first: usize, count: usize) -> CrashingWords<'_> {
        CrashingWords::new(WordRange::new(self.words.clone(), first, count).unwrap(), &self.crash)
    }

    fn topic_words(&self) -> CrashingWords<'_> {
        self.part(PARTICIPANTS, TopicWords::<CrashingWords<'_>>::required_words(&self.settings))
    }

    fn control_words(&self, direction: Direction) -> CrashingWords<'_> {
        let count = Control::required_words(MAX_BLOCKS, 1 << 20);
        let first = PARTICIPANTS + TopicWords::<CrashingWords<'_>>::required_words(&self.settings);
        self.part(first + usize::from(direction == Direction::Inbound) * count, count)
    }

    fn topic(&self) -> TopicWords<CrashingWords<'_>> {
        TopicWords::attach(self.topic_words()).unwrap()
    }

    fn control(&self, direction: Direction) -> Control<'_> {
        PoolControl::attach(self.control_words(direction)).unwrap()
    }

    fn caller(&self, me: Participant) -> Caller<'_> {
        Caller { timeout: Duration::from_secs(20), ..Caller::new(me, &self.participants) }
    }

    /// A loan with all its sample info.
    fn entry(&self, me: Participant, direction: Direction, sequence: u64) -> Entry {
        let control = self.control(direction);
        let (block, place) =
            control.allocate(&self.caller(me), Owner::participant(me), 500).unwrap();
        let sample_info = control.sample_info(block);
        sample_info.set_metadata(b"metadata");
        sample_info.set_origin(&ORIGIN.node);
        sample_info.set_start([1, 0]);
        sample_info.set_path(crate::DeliveryPath::Ring);
        sample_info.stamp(Stage::Filled, 1);
        Entry {
            block,
            offset: place.offset,
            length: 500,
            publisher: 256,
            sequence,
            published_at: 1,
            metadata: 8,
            has_origin: direction == Direction::Inbound,
            sync_point: None,
        }
    }

    /// Publishes as a publisher does; false if there was no room.
    fn publish(&self, me: Participant, id: u64, sequence: u64) -> bool {
        let control = self.control(Direction::Local);
        let entry = Entry { publisher: id, ..self.entry(me, Direction::Local, sequence) };
        let (topic, caller) = (self.topic(), self.caller(me));
        match topic.publish_in(&caller, entry, &control) {
            Ok(_) => true,
            Err(_) => {
                let slot = topic.publisher(id);
                slot.backpressure().refused();
                slot.backpressure().begin();
                slot.count_dropped();
                control.free(&caller, entry.block, Owner::participant(me)).unwrap();
                slot.backpressure().end(false);
                slot.backpressure().relieved();
                false
            }
        }
    }

    /// Publishes as a publisher does whose stream is still writing. Returns the block and its sync
    /// point; None if there was no room.
    fn publish_in_order(
        &self,
        me: Participant,
        id: u64,
        sequence: u64,
    ) -> Option<(Block, SyncPoint)> {
        let control = self.control(Direction::Local);
        let entry = Entry { publisher: id, ..self.entry(me, Direction::Local, sequence) };
        let sync_point = control.begin_write(entry.block, me);
        let (topic, caller) = (self.topic(), self.caller(me));
        let entry = Entry { sync_point: Some(sync_point), ..entry };
        if topic.publish_in(&caller, entry, &control).is_err() {
            control.end_write(entry.block, sync_point);
            control.free(&caller, entry.block, Owner::participant(me)).unwrap();
            return None;
        }
        Some((entry.block, sync_point))
    }

    /// Takes one message, and releases it once a stream has read it.
    fn read_in_order(&self, me: Participant, by: &mut ipc::Subscriber) {
        let (topic, caller) = (self.topic(), self.caller(me));
        let control = self.control(Direction::Local);
        let Some(taken) = topic.local().take(by) else { return };
        let (block, subscription_id) = (Entry::from_words(taken.entry).block, by.subscription_id());
        control.begin_stream_read(block, topic.number(), subscription_id.index());
        control.end_stream_read(block, subscription_id.index());
        topic.release_in(&caller, (Direction::Local, subscription_id), taken.position, &control);
    }

    /// No message of a dead process is left pending on a stream.
    fn check_no_pending_write(&self, what: &str) {
        let (topic, control) = (self.topic(), self.control(Direction::Local));
        let each = |words| {
            let entry = Entry::from_words(words);
            let Some(sync_point) = entry.sync_point else { return };
            if topic.publisher(entry.publisher).is_of(self.survivor, entry.publisher) {
                return;
            }
            let found = control.readiness(entry.block, sync_point);
            assert_ne!(found, Some(Readiness::Pending), "{what}: {entry:?}");
        };
        topic.local().find_entries(&self.caller(self.survivor), each).unwrap();
    }

    /// Delivers as the service does for a message of another node.
    fn deliver(&self, me: Participant, number: u64) -> Option<Delivery> {
        let control = self.control(Direction::Inbound);
        let entry = self.entry(me, Direction::Inbound, number);
        let (topic, caller) = (self.topic(), self.caller(me));
        let delivery = topic.deliver_in(&caller, (&ORIGIN, number), entry, &control);
        if !matches!(delivery, Ok(Delivery::Delivered(_))) {
            control.free(&caller, entry.block, Owner::participant(me)).unwrap();
        }
        delivery.ok()
    }

    fn subscribe(&self, me: Participant) -> [ipc::Subscriber; 2] {
        let (topic, caller) = (self.topic(), self.caller(me));
        let inbound = topic.inbound().subscribe(&caller).unwrap();
        let local = topic.local().subscribe(&caller).unwrap();
        topic.join_subscriptions(local.subscription_id(), inbound.subscription_id());
        [local, inbound]
    }

    /// Takes and releases all messages; returns their sequences.
    fn read(&self, me: Participant, direction: Direction, by: &mut ipc::Subscriber) -> Vec<u64> {
        let (topic, caller, control) = (self.topic(), self.caller(me), self.control(direction));
        let mut seen = Vec::new();
        while let Some(taken) = topic.queue(direction).take(by) {
            seen.push(Entry::from_words(taken.entry).sequence);
            topic.release_in(&caller, (direction, by.subscription_id()), taken.position, &control);
        }
        seen
    }

    fn reclaim(&self, me: Participant, dead: Participant) {
        let controls = Direction::BOTH.map(|direction| self.control(direction));
        let caller = self.caller(me);
        self.topic().reclaim_in(&caller, dead, &controls[0], &controls[1]).unwrap();
        for control in &controls {
            control.reclaim(&caller, dead).unwrap();
        }
    }

    /// The delivered messages are those recorded as delivered, whatever was interrupted.
    fn deliver_remaining(&self, what: &str, reader: &mut ipc::Subscriber) {
        let mut seen = self.read(self.survivor, Direction::Inbound, reader);
        let last = self.topic().delivered(&ORIGIN);
        let next = last.map_or(0, |last| last + 1);
        // Counted without having been delivered: the skipped message.
        let passed = last.filter(|last| seen.last() != Some(last));
        assert!(passed.is_none_or(|passed| passed == SKIPPED), "{what}: {seen:?}, {last:?}");
        for number in next..next + 3 {
            let delivered = self.deliver(self.survivor, number);
            assert!(matches!(delivered, Some(Delivery::Delivered(_))), "{what}: {delivered:?}");
            assert_eq!(self.deliver(self.survivor, number), Some(Delivery::Duplicate), "{what}");
            seen.extend(self.read(self.survivor, Direction::Inbound, reader));
        }
        let first = match self.settings.reliability {
            Reliability::DropOldest => seen[0],
            _ => 0,
        };
        let all: Vec<_> = (first..next + 3).filter(|number| Some(*number) != passed).collect();
        assert_eq!(seen, all, "{what}: each once");
    }

    /// Evicted from both queues with a report, or from neither without one.
    fn check_eviction(&self, what: &str) {
        let Some(slow) = self.slow.take() else { return };
        let topic = self.topic();
        let queues = [topic.local(), topic.inbound()];
        let [local, inbound] = [0, 1].map(|at| queues[at].is_subscribed(&slow[at]));
        assert_eq!(local, inbound, "{what}: evicted from one queue only");
        assert_eq!(topic.evicted(slow[0].subscription_id()).is_none(), local, "{what}");
        assert_eq!(topic.evictions(), u64::from(!local), "{what}");
        for (queue, subscriber) in queues.into_iter().zip(&slow) {
            // It keeps what it holds.
            let (unread, held) = queue.backlog_of(subscriber.subscription_id());
            assert!(local || unread == 0 && held <= 1, "{what}: {unread} {held}");
        }
    }

    /// Drops the remaining destinations. Each message that a destination missed is counted once for
    /// each of its nodes, whichever process counted it.
    fn check_dropped_destinations(&self, what: &str) {
        let topic = self.topic();
        let before: Vec<_> = topic.destinations();
        for node in &before {
            if NODES.contains(node) {
                topic.give_up(node, role(), 0);
            } else {
                topic.remove_destination(node);
            }
        }
        topic.finish_giving_up();
        assert!(topic.destinations().is_empty(), "{what}");
        let missed = topic.missed_by_nodes();
        let of_publishers: u64 =
            topic.publishers().iter().map(|publisher| topic.missed_by_nodes_of(publisher.id)).sum();
        let expected = match self.settings.reliability {
            Reliability::Reliable => (4, 2, 4),
            _ => (0, 0, 0),
        };
        let found = (missed.messages, missed.nodes, of_publishers);
        assert_eq!(found, expected, "{what}: {before:?}");
    }

    /// Each reported loss is recorded once, and a repeated report changes nothing.
    fn check_remote_losses(&self, what: &str) {
        let topic = self.topic();
        let count = topic.publishers_lost(Direction::Inbound);
        (1..=count).for_each(|publisher| {
            // Only the last of many are kept.
            let known = topic.publisher_lost(Direction::Inbound, publisher - 1);
            let is_known = count - publisher < 15;
            assert_eq!(known, is_known.then(|| lost(publisher)), "{what}");
            assert!(!is_known || !topic.record_loss(Direction::Inbound, lost(publisher)), "{what}");
        });
        assert!(topic.record_loss(Direction::Inbound, lost(count + 1)), "{what}");
        assert_eq!(topic.publishers_lost(Direction::Inbound), count + 1, "{what}");
    }

    /// Every slot is as recorded; the next service can update all of them, and readers see the
    /// change.
    fn check_remote_last_sequences(&self, what: &str) {
        let topic = self.topic();
        let found = topic.remote_last_sequences(0);
        let is_recorded = |it: &RemoteLastSequence| *it == published(it.publisher, it.last);
        let is_known = |it: &RemoteLastSequence| it.last == it.publisher || it.last == 9;
        assert!(found.iter().all(|it| is_recorded(it) && is_known(it)), "{what}: {found:?}");
        let last: Vec<_> = (1..=3).map(|last| published(last, last + 10)).collect();
        let changes = topic.remote_last_sequence_changes();
        assert!(last.iter().all(|it| topic.record_remote_last_sequence(it)), "{what}");
        let mut found = topic.remote_last_sequences(0);
        found.sort_by_key(|it| it.publisher);
        assert_eq!(found, last, "{what}");
        assert!(topic.remote_last_sequence_changes() > changes, "{what}");
    }

    /// Publishers that a subscriber sees exist, and the next service goes on. Called before and after
    /// the reclaim.
    fn check_publishers(&self, what: &str, victim: Option<Participant>) {
        let topic = self.topic();
        for found in topic.named_publishers() {
            assert_eq!(Some(found.participant()), victim, "{what}");
            assert_eq!(found.process(), (7, "victim"), "{what}");
        }
        let known = [publishing(0, true), publishing(1, true), publishing(1, false)];
        let found = topic.publishing_nodes();
        assert!(found.iter().all(|node| known.contains(node)), "{what}: {found:?}");
        let (before, changes) = (topic.presence(), topic.publisher_changes());
        assert!(before.is_any() || found.is_empty(), "{what}");
        topic.set_publishing_nodes(&[publishing(0, false)]);
        assert_eq!(topic.publishing_nodes(), [publishing(0, false)], "{what}");
        assert!(topic.presence().is_any() && topic.publisher_changes() > changes, "{what}");
        let is_known = found.iter().any(|node| node.node() == NODES[0]);
        assert!(is_known || topic.presence().has_arrivals_since(before), "{what}");
        topic.set_publishing_nodes(&[]);
        let has_victim = !topic.named_publishers().is_empty();
        assert_eq!(topic.presence().is_any(), has_victim, "{what}");
    }

    /// What a new subscriber expects was recorded, and the next service goes on.
    fn check_remote_accounts(&self, what: &str) {
        let topic = self.topic();
        let node = &NODES[0];
        let progress = |since| topic.expected_of_remote(since);
        // Positions and numbers as the scenario has them.
        let listed = RemotePublisher::new(*node, LISTED);
        for since in [0, 1, 2] {
            for (publisher, next) in progress(since) {
                let known: &[u64] = match since {
                    _ if publisher == listed => &[10],
                    0 | 1 => &[2],
                    _ => &[2, 6],
                };
                let is_known = [listed, later()].contains(&publisher) && known.contains(&next);
                assert!(is_known, "{what}: {publisher:?} {next}");
            }
        }
        topic.begin_accounts(node, &account_start());
        let start = topic.note_arrival(&mut 0, later(), 7, 2);
        assert!([0, 1].contains(&start.words()[0]), "{what}: {start:?}");
        assert!(progress(3).contains(&(later(), 8)), "{what}");
        topic.end_accounts();
        assert!(progress(3).is_empty(), "{what}");
        topic.begin_accounts(node, &account_start());
        let start = topic.note_arrival(&mut 0, later(), 8, 2);
        assert_eq!(start.words()[0], 1, "{what}");
    }

    /// Once the survivor has left too, no memory, publisher or subscription is left.
    fn check(&self, what: &str) {
        let (topic, caller) = (self.topic(), self.caller(self.survivor));
        assert!(topic.publishers().iter().all(|seen| seen.participant == self.survivor), "{what}");
        assert_eq!(topic.reserved_publishers(), 0, "{what}");
        let local = self.control(Direction::Local);
        // Another process continues the role's subscription.
        if let Some(mut replication) = topic.local().resume(&caller, role(), |_| {}).unwrap() {
            self.read(self.survivor, Direction::Local, &mut replication);
        }
        let dispose = |words| {
            topic.dispose(&caller, &local, words);
        };
        topic.local().remove_participant(&caller, role(), dispose).unwrap();
        self.reclaim(self.survivor, self.survivor);
        let mut subscription_ids =
            topic.local().subscription_ids().chain(topic.inbound().subscription_ids());
        assert!(subscription_ids.next().is_none(), "{what}");
        for direction in Direction::BOTH {
            let control = self.control(direction);
            control.audit(&caller).unwrap().unwrap_or_else(|flaw| panic!("{what}: {flaw}"));
            for listed in control.blocks(&caller).unwrap() {
                assert_eq!(listed.owner, None, "{what}: {listed:?} is left");
            }
            let statistics = control.statistics(&caller).unwrap();
            assert_eq!(
                (statistics.blocks_allocated, statistics.free),
                (0, control.length()),
                "{what}"
            );
        }
    }
}

/// A child that executes `act`, and dies if it reaches the given point.
fn fork(crash: &Crash, point: u64, act: impl FnOnce()) -> ForkedChild {
    ForkedChild::new(|| {
        crash.crash_at(point);
        act();
    })
}

/// Runs the scenario with the victim killed at its `point`th point; false if the victim finished.
fn run(name: &str, scenario: Scenario, settings: SharedSettings, point: u64) -> bool {
    let world = World::new(settings);
    let mut reader = world.subscribe(world.survivor);
    let act = scenario(&world);
    let child = fork(&world.crash, point, || act(&world));
    world.participants.add_pidfd(world.victim, PidFd::from_fd(child.pidfd()).unwrap());
    let was_killed = child.was_killed();
    assert!(world.participants.is_dead(Some(world.victim)));
    let what = format!("{name}, {}, killed at point {point}", settings.reliability);
    if name.starts_with("record ") {
        world.check_remote_losses(&what);
        world.check_remote_last_sequences(&what);
    }
    if name == "store what blocks publishers" {
        let recorded = world.topic().recorded_blocking(Direction::Local, 7);
        assert!(
            recorded.is_none_or(|time| (1..4).contains(&time.as_secs())),
            "{what}: {recorded:?}"
        );
        assert_eq!(world.topic().recorded_blocking(Direction::Local, 8), None, "{what}");
    }
    if name == "tell which publishers there are" {
        world.check_publishers(&what, Some(world.victim));
    }
    if name == "keep accounts of other nodes" {
        world.check_remote_accounts(&what);
    }
    if name == "drop destinations" {
        world.check_dropped_destinations(&what);
    }
    // Another process publishes before the death is detected.
    if point.is_multiple_of(2) {
        let id = world.topic().claim(world.survivor).unwrap();
        world.publish(world.survivor, id, 1);
    }
    world.reclaim(world.survivor, world.victim);
    if name == "tell which publishers there are" {
        world.check_publishers(&what, None);
    }
    world.check_eviction(&what);
    if name.starts_with("publish in stream order") {
        world.check_no_pending_write(&what);
    }
    let [_, inbound] = &mut reader;
    if name.starts_with("deliver") {
        world.deliver_remaining(&what, inbound);
    }
    if name == "admit a piece" {
        world.control(Direction::Local).admit(&world.caller(world.survivor), 1, 4096, 2).unwrap();
    }
    world.check(&what);
    was_killed
}

/// Kills a process while it reclaims after another, which died at a crash point itself.
fn run_reclaim(settings: SharedSettings, first: u64, second: u64) -> (bool, bool) {
    let world = World::new(settings);
    let mut reader = world.subscribe(world.survivor);
    let dead = world.participants.admit(PidFd::of_this_process().unwrap()).unwrap();
    let child = fork(&world.crash, first, || {
        let mut subscribers = world.subscribe(dead);
        let id = world.topic().claim(dead).unwrap();
        let (block, _) = world.publish_in_order(dead, id, 1).unwrap();
        let subscription_id = subscribers[0].subscription_id();
        world.control(Direction::Local).begin_stream_read(
            block,
            world.topic().number(),
            subscription_id.index(),
        );
        world.topic().local().take(&mut subscribers[0]).unwrap();
        world.deliver(dead, 0);
        world.deliver(dead, 1);
        let keep = |(block, sync_point)| {
            world.control(Direction::Local).poison_and_retain(block, sync_point)
        };
        world.publish_in_order(dead, id, 2).into_iter().for_each(keep);
    });
    world.participants.add_pidfd(dead, PidFd::from_fd(child.pidfd()).unwrap());
    let first_was_killed = child.was_killed();
    assert!(world.participants.is_dead(Some(dead)));
    let reclaimer = fork(&world.crash, second, || world.reclaim(world.victim, dead));
    world.participants.add_pidfd(world.victim, PidFd::from_fd(reclaimer.pidfd()).unwrap());
    let was_killed = reclaimer.was_killed();
    assert!(world.participants.is_dead(Some(world.victim)));
    let what = format!("reclaim, {}, killed at {first} and {second}", settings.reliability);
    world.reclaim(world.survivor, world.victim);
    world.reclaim(world.survivor, dead);
    world.check_no_pending_write(&what);
    world.deliver_remaining(&what, &mut reader[1]);
    world.check(&what);
    (first_was_killed, was_killed)
}

/// A topic or pool that is interrupted while it is formatted is absent, or complete.
fn deaths_while_formatting() -> u64 {
    let type_name = Some("Pose".parse().unwrap());
    let settings = SharedSettings { type_name, ..SETTINGS[0] };
    for point in 0.. {
        let world = World::unformatted(settings);
        let id = PoolId { place: PLACE, direction: Direction::Local };
        let was_killed = fork(&world.crash, point, || {
            let words = world.control_words(Direction::Local);
            PoolControl::format(words, id, 1 << 20, MAX_BLOCKS).unwrap();
            TopicWords::format(world.topic_words(), 9, "made", &settings).unwrap();
        })
        .was_killed();
        if let Ok(topic) = TopicWords::attach(world.topic_words()) {
            assert_eq!((topic.name(), topic.number(), topic.settings()), ("made", 9, &settings));
        }
        if let Ok(control) = PoolControl::attach(world.control_words(Direction::Local)) {
            assert_eq!((control.id().unwrap(), control.limit()), (id, 1 << 20));
        }
        if !was_killed {
            return point;
        }
    }
    unreachable!("the loop ends by returning")
}

#[test]
fn a_death_at_any_store_loses_nothing() {
    let mut points = deaths_while_formatting();
    for settings in SETTINGS {
        for (name, scenario) in scenarios() {
            let mut point = 0;
            while run(name, scenario, settings, point) {
                point += 1;
                assert!(point < 5000, "{name} does not end");
            }
            points += point;
        }
    }
    for settings in SETTINGS {
        for first in 0.. {
            // Each reclaiming process dies at other points: seven in a row cover all of them.
            let mut second = first % 7;
            let mut first_was_killed = true;
            loop {
                let (first_died, second_died) = run_reclaim(settings, first, second);
                first_was_killed &= first_died;
                if !second_died {
                    break;
                }
                points += 1;
                second += 7;
            }
            if !first_was_killed {
                // The first process finished: now the reclaiming process dies at every point.
                points +=
                    (0..).find(|second| !run_reclaim(settings, first, *second).1).unwrap_or(0);
                break;
            }
        }
    }
    let reached = SOURCES.reached();
    println!("{points} deaths at {} places in the source: {reached:#?}", reached.len());
    let missed = SOURCES.missed(&Path::new(env!("CARGO_MANIFEST_DIR")).join(".."));
    assert!(missed.is_empty(), "no process died at: {missed:#?}");
}
