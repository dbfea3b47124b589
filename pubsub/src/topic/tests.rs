mod changing_publishers;
mod delivery_records;
mod missed_messages;

use std::time::Duration;

use ipc::{AlwaysAlive, LocalWords, Owner, Participant};

use super::losses::LostPublisher;
use super::remote_last_sequences::RemoteLastSequence;
use super::subscribers::SubscriberSlot;
use super::*;
use crate::error::ErrorKind;
use crate::pool::{Direction, PoolControl, PoolId};
use crate::settings::{MAX_TOPIC_NAME, Reliability, SharedLocation};

type Words<'a> = &'a LocalWords;

const SETTINGS: SharedSettings = SharedSettings {
    place: SharedLocation::Host,
    reliability: Reliability::Reliable,
    max_held: 4,
    depth: 4,
    largest: 1000,
    loans: 4,
    release_microseconds: 1000,
    type_name: None,
};

impl<W: ipc::Words + Clone> TopicWords<W> {
    /// The position of the oldest message, and its holders.
    pub(crate) fn blocking_subscribers(
        &self,
        direction: Direction,
    ) -> Option<(u64, Vec<ipc::SubscriptionId>)> {
        let holders = self.holders(direction);
        let oldest = holders.iter().map(|(_, position)| *position).min()?;
        let of_oldest = holders.into_iter().filter(|(_, position)| *position == oldest);
        Some((oldest, of_oldest.map(|(subscription_id, _)| subscription_id).collect()))
    }
}

fn caller(place: u32) -> Caller<'static> {
    Caller::new(Participant::new(place, 1).unwrap(), &AlwaysAlive)
}

fn role() -> Participant {
    Participant::role(0).unwrap()
}

fn origin(node: u8) -> OriginId {
    OriginId { node: [node; 16], topic: 7 }
}

struct World {
    topic: LocalWords,
    control_segment: [LocalWords; 2],
}

impl World {
    fn new() -> Self {
        let topic = LocalWords::zeroed(TopicWords::<Words<'_>>::required_words(&SETTINGS));
        let control_segment = Direction::BOTH.map(|direction| {
            let words = LocalWords::zeroed(PoolControl::<Words<'_>>::required_words(64, 1 << 20));
            let id = PoolId { place: SharedLocation::Host, direction };
            let control = PoolControl::format(&words, id, 1 << 20, 64).unwrap();
            control.admit(&caller(0), 0, 1 << 16, 1).unwrap();
            words
        });
        TopicWords::format(&topic, 5, "a topic", &SETTINGS).unwrap();
        Self { topic, control_segment }
    }

    fn topic(&self) -> TopicWords<Words<'_>> {
        TopicWords::attach(&self.topic).unwrap()
    }

    fn controls(&self) -> [PoolControl<Words<'_>>; 2] {
        [0, 1].map(|number| PoolControl::attach(&self.control_segment[number]).unwrap())
    }

    fn entry(&self, me: Participant, number: usize, publisher: u64, sequence: u64) -> Entry {
        let control = &self.controls()[number];
        let caller = Caller::new(me, &AlwaysAlive);
        let (block, place) = control.allocate(&caller, Owner::participant(me), 500).unwrap();
        Entry {
            block,
            offset: place.offset,
            length: 500,
            publisher,
            sequence,
            published_at: 1,
            metadata: 0,
            has_origin: number == 1,
            sync_point: None,
        }
    }

    fn is_empty(&self) -> bool {
        let taken =
            |control: &PoolControl<_>| control.statistics(&caller(0)).unwrap().blocks_allocated;
        self.controls().iter().all(|control| taken(control) == 0)
    }
}

#[test]
fn opened_topic_has_its_name_and_settings() {
    let topic = Topic::create(7, "images/left", &SETTINGS).unwrap();
    let file = topic.segment().try_clone_to_owned().unwrap();
    let opened = Topic::open(file).unwrap();
    assert_eq!((opened.number(), opened.name()), (7, "images/left"));
    assert_eq!(opened.settings(), &SETTINGS);
    let longest = "x".repeat(MAX_TOPIC_NAME);
    assert_eq!(Topic::create(0, &longest, &SETTINGS).unwrap().name(), longest);
    for (number, name) in [(0, ""), (0, &*"x".repeat(MAX_TOPIC_NAME + 1)), (u32::MAX, "x")] {
        let error = Topic::create(number, name, &SETTINGS).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    }
}

#[test]
fn invalid_topic_segments_are_rejected() {
    let world = World::new();
    let corruptions = [
        (layout::PLACE, 3),
        (layout::RELIABILITY, 9),
        (layout::DEPTH, 0),
        (layout::DEPTH, 1 << 16),
        (layout::DEPTH, u64::MAX),
        (layout::NAME_LENGTH, 0),
        (layout::NAME_LENGTH, u64::MAX),
        (layout::NAME, u64::MAX),
        (layout::NUMBER, u64::MAX),
        (layout::TYPE_LENGTH, 65),
        // A type name of zero bytes, which are control characters.
        (layout::TYPE_LENGTH, 4),
        (layout::QUEUES, 1),
    ];
    for (at, value) in corruptions {
        let was = ipc::Words::swap(&world.topic, at, value);
        let error = TopicWords::attach(&world.topic).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Malformed, "{at}: {error}");
        ipc::Words::swap(&world.topic, at, was);
    }
    world.topic();
}

#[test]
fn publisher_slots_are_reused_with_new_identifiers() {
    let world = World::new();
    let topic = world.topic();
    let ids: Vec<_> = (0..64).map(|_| topic.claim(caller(1).me).unwrap()).collect();
    assert_eq!(topic.claim(caller(1).me).unwrap_err().kind(), ErrorKind::TooMany);
    topic.publisher(ids[3]).give_back();
    let again = topic.claim(caller(2).me).unwrap();
    assert!(again & 0xff == 3 && !ids.contains(&again));
    assert!(topic.publisher(again).is_of(caller(2).me, again));
    assert!(!topic.publisher(ids[3]).is_of(caller(1).me, ids[3]));
    assert_eq!(topic.publishers().len(), 64);
}

#[test]
fn participants_and_backpressure_are_reported() {
    let world = World::new();
    let (topic, [local, _]) = (world.topic(), world.controls());
    let me = caller(1);
    let id = topic.claim(me.me).unwrap();
    let mut reader = topic.local().subscribe(&caller(2)).unwrap();
    for sequence in 1..=3 {
        topic.publish_in(&me, world.entry(me.me, 0, id, sequence), &local).unwrap();
    }
    topic.local().take(&mut reader).unwrap();
    assert_eq!((topic.activity(), topic.publishers().len()), ((true, true), 1));
    let seen = topic.publishers()[0];
    assert_eq!((seen.id, seen.sequence, seen.messages, seen.bytes), (id, 3, 3, 1500));
    let it = topic.subscribers()[0];
    assert_eq!((it.participant, it.cursor, it.unread, it.held), (Some(caller(2).me), 1, 2, 1));
    assert_eq!(topic.backpressure(), None);
    topic.publisher(id).backpressure().begin();
    assert!(topic.backpressure().is_some());
    for sequence in 4..=5 {
        assert_eq!(topic.blocking_subscribers(Direction::Local), None, "there is still room");
        let entry = world.entry(caller(1).me, 0, id, sequence);
        topic.publish_in(&caller(1), entry, &local).unwrap();
    }
    assert_eq!(
        topic.blocking_subscribers(Direction::Local),
        Some((1, vec![reader.subscription_id()]))
    );
    topic.publisher(id).backpressure().end(true);
    assert_eq!(
        (topic.backpressure(), topic.blocking_subscribers(Direction::Inbound)),
        (None, None)
    );
}

#[test]
fn reclaim_frees_everything_of_a_dead_process() {
    let world = World::new();
    let (topic, [local, inbound]) = (world.topic(), world.controls());
    let (dead, alive) = (caller(1), caller(2));
    let id = topic.claim(dead.me).unwrap();
    let mut subscriber = topic.local().subscribe(&dead).unwrap();
    topic.publish_in(&dead, world.entry(dead.me, 0, id, 1), &local).unwrap();
    topic.local().take(&mut subscriber).unwrap();
    topic.publish_in(&dead, world.entry(dead.me, 0, id, 2), &local).unwrap();
    let loan = world.entry(dead.me, 0, id, 3);
    let lost = topic.publishers_lost(Direction::Local);
    for _ in 0..2 {
        topic.reclaim_in(&alive, dead.me, &local, &inbound).unwrap();
    }
    assert!(local.owner(loan.block).is_ok());
    local.reclaim(&alive, dead.me).unwrap();
    assert!(world.is_empty());
    assert_eq!(topic.publishers_lost(Direction::Local), lost + 1);
    assert_eq!(topic.publisher_lost(Direction::Local, lost), Some(LostPublisher::local(id)));
    assert!(topic.publishers().is_empty());
}

#[test]
fn last_lost_publishers_are_remembered() {
    let world = World::new();
    let topic = world.topic();
    for number in 0..20 {
        assert!(topic.record_loss(Direction::Local, LostPublisher::local(number)));
        assert!(!topic.record_loss(Direction::Local, LostPublisher::local(number)));
    }
    assert_eq!(topic.publishers_lost(Direction::Local), 20);
    let lost = |number| topic.publisher_lost(Direction::Local, number);
    assert_eq!([4, 20].map(lost), [None; 2]);
    assert_eq!([5, 19].map(lost), [5, 19].map(|number| Some(LostPublisher::local(number))));
    assert_eq!(topic.publishers_lost(Direction::Inbound), 0);
}

#[test]
fn remote_last_sequences_are_recorded_for_each_publisher() {
    let world = World::new();
    let topic = world.topic();
    let last_sequence = |publisher: u64, last| RemoteLastSequence {
        node: [publisher as u8; 16],
        publisher,
        last,
        start: PublisherStart::new(1, 2),
        at: 3,
    };
    assert!(topic.remote_last_sequences(0).is_empty());
    // The same one again is no change, at any inbound position.
    for (reported, is_new) in [
        (last_sequence(1, 5), true),
        (RemoteLastSequence { at: 4, ..last_sequence(1, 5) }, false),
        (last_sequence(2, 1), true),
        (last_sequence(1, 6), true),
        // Another publisher of the same node, in the same slot.
        (RemoteLastSequence { publisher: 0x101, ..last_sequence(1, 2) }, true),
    ] {
        assert_eq!(topic.record_remote_last_sequence(&reported), is_new, "{reported:?}");
    }
    let expected = [
        last_sequence(1, 6),
        last_sequence(2, 1),
        RemoteLastSequence { publisher: 0x101, ..last_sequence(1, 2) },
    ];
    assert_eq!(
        (topic.remote_last_sequences(0), topic.remote_last_sequence_changes()),
        (expected.into(), 4)
    );
    // The oldest ones are replaced.
    for publisher in 1000..1256 {
        assert!(topic.record_remote_last_sequence(&last_sequence(publisher, 1)));
    }
    let mut found: Vec<_> = topic.remote_last_sequences(0);
    found.sort_by_key(|it| it.publisher);
    assert_eq!(found, (1000..1256).map(|it| last_sequence(it, 1)).collect::<Vec<_>>());
}

#[test]
fn blocking_subscriber_is_evicted_from_both_queues() {
    for direction in Direction::BOTH {
        let world = World::new();
        let (topic, [local, inbound]) = (world.topic(), world.controls());
        let me = caller(1);
        let id = topic.claim(me.me).unwrap();
        let subscription_ids =
            [topic.local(), topic.inbound()].map(|queue| queue.subscribe(&me).unwrap());
        topic.join_subscriptions(
            subscription_ids[0].subscription_id(),
            subscription_ids[1].subscription_id(),
        );
        for number in 0..u64::from(SETTINGS.depth) {
            assert_eq!(topic.blocking_subscribers(direction), None, "there is room");
            topic.publish_in(&me, world.entry(me.me, 0, id, number + 1), &local).unwrap();
            let entry = world.entry(me.me, 1, id, number + 1);
            topic.deliver_in(&me, (&origin(1), number), entry, &inbound).unwrap();
        }
        assert_eq!(topic.evicted(subscription_ids[0].subscription_id()), None);
        let (_, holders) = topic.blocking_subscribers(direction).unwrap();
        let held_for = Duration::from_secs(3);
        topic.evict_in(&me, (direction, holders[0]), held_for, [&local, &inbound]).unwrap();
        assert_eq!(topic.evicted(subscription_ids[0].subscription_id()), Some(held_for));
        assert_eq!(topic.evictions(), 1);
        // A reclaim after another process checks for unfinished evictions.
        topic.reclaim_in(&me, caller(3).me, &local, &inbound).unwrap();
        assert_eq!(topic.evictions(), 1);
        assert!(!topic.local().is_subscribed(&subscription_ids[0]));
        assert!(!topic.inbound().is_subscribed(&subscription_ids[1]));
        assert!(world.is_empty());
        // Another subscriber with the same index is not affected.
        topic.local().end_subscription(&me, subscription_ids[0].subscription_id(), |_| {}).unwrap();
        let next = topic.local().subscribe(&me).unwrap();
        assert_eq!((next.index(), topic.evicted(next.subscription_id())), (0, None));
    }
}

#[test]
fn stopped_subscriber_is_evicted_from_both_queues() {
    let world = World::new();
    let (topic, [local, inbound]) = (world.topic(), world.controls());
    let me = caller(1);
    let id = topic.claim(me.me).unwrap();
    let mut subscription_ids =
        [topic.local(), topic.inbound()].map(|queue| queue.subscribe(&me).unwrap());
    topic.join_subscriptions(
        subscription_ids[0].subscription_id(),
        subscription_ids[1].subscription_id(),
    );
    topic.publish_in(&me, world.entry(me.me, 0, id, 1), &local).unwrap();
    topic.deliver_in(&me, (&origin(1), 0), world.entry(me.me, 1, id, 1), &inbound).unwrap();
    for (queue, subscription_id) in
        [topic.local(), topic.inbound()].into_iter().zip(&mut subscription_ids)
    {
        queue.take(subscription_id).unwrap();
        queue.stop(&me, subscription_id, |_| {}).unwrap();
    }
    let held_for = Duration::from_secs(3);
    let at = (Direction::Local, subscription_ids[0].subscription_id());
    topic.evict_in(&me, at, held_for, [&local, &inbound]).unwrap();
    assert!(!topic.local().is_subscribed(&subscription_ids[0]));
    assert!(!topic.inbound().is_subscribed(&subscription_ids[1]));
    // It keeps what it holds until it ends.
    assert!(!world.is_empty());
    for (direction, control, subscriber) in
        [(Direction::Local, &local, 0), (Direction::Inbound, &inbound, 1)]
    {
        let at = (direction, subscription_ids[subscriber].subscription_id());
        topic.release_in(&me, at, 0, control);
    }
    assert!(world.is_empty());
}

#[test]
fn later_subscriber_of_the_slot_is_not_evicted() {
    let world = World::new();
    let (topic, [local, inbound]) = (world.topic(), world.controls());
    let me = caller(1);
    let subscribe = || [topic.local(), topic.inbound()].map(|queue| queue.subscribe(&me).unwrap());
    let before = subscribe();
    topic.join_subscriptions(before[0].subscription_id(), before[1].subscription_id());
    let slot = SubscriberSlot::of(topic.words(), before[0].subscription_id());
    // It leaves by itself while its eviction is recorded.
    for (queue, subscriber) in [topic.local(), topic.inbound()].into_iter().zip(&before) {
        queue.end_subscription(&me, subscriber.subscription_id(), |_| {}).unwrap();
    }
    let next = subscribe();
    assert_eq!(next[0].index(), before[0].index());
    topic.join_subscriptions(next[0].subscription_id(), next[1].subscription_id());
    slot.evict(before[0].subscription_id().to_bits(), Duration::from_secs(1));
    // Nor is it evicted by the reclaim after the evicting process.
    topic.reclaim_in(&me, caller(2).me, &local, &inbound).unwrap();
    assert_eq!(topic.evicted(next[0].subscription_id()), None);
    assert!(topic.local().is_subscribed(&next[0]) && topic.inbound().is_subscribed(&next[1]));
}

#[test]
fn inbound_message_is_delivered_once() {
    let world = World::new();
    let (topic, [_, inbound]) = (world.topic(), world.controls());
    let (first, second) = (caller(1), caller(2));
    let (one, other) = (origin(1), origin(2));
    let deliver = |me: &Caller<'_>, origin: &OriginId, number| {
        let entry = world.entry(me.me, 1, 256, number);
        let delivery = topic.deliver_in(me, (origin, number), entry, &inbound).unwrap();
        if !matches!(delivery, Delivery::Delivered(_)) {
            inbound.free(me, entry.block, Owner::participant(me.me)).unwrap();
        }
        delivery
    };
    assert_eq!(topic.delivered(&one), None);
    assert_eq!(deliver(&first, &one, 3), Delivery::NoSubscribers);
    assert_eq!(topic.delivered(&one), Some(3));
    let mut reader = topic.inbound().subscribe(&first).unwrap();
    for number in 0..10 {
        let me = if number < 5 { &first } else { &second };
        let before = matches!(deliver(me, &one, number), Delivery::Duplicate);
        assert_eq!(before, number <= 3);
        assert!(matches!(deliver(me, &other, number), Delivery::Delivered(_)));
        while let Some(taken) = topic.inbound().take(&mut reader) {
            let subscription_id = (Direction::Inbound, reader.subscription_id());
            topic.release_in(me, subscription_id, taken.position, &inbound);
        }
        assert_eq!(topic.delivered(&other), Some(number));
    }
    topic.skip_in(&second, (&one, 20), &inbound).unwrap();
    assert_eq!(topic.delivered(&one), Some(20));
    topic.remove_origin(&one);
    assert_eq!(topic.delivered(&one), None);
    assert!(world.is_empty());
}

#[test]
fn role_continues_at_its_oldest_unreleased_message() {
    let topic = Topic::create(1, "replicated", &SETTINGS).unwrap();
    let pool = |direction| {
        let pool =
            Pool::create(PoolId { place: SharedLocation::Host, direction }, 1 << 20, 64).unwrap();
        pool.adopt_piece(0, pool.make_piece(1 << 16).unwrap()).unwrap();
        pool.admit_piece(&caller(0), 0).unwrap();
        pool
    };
    let (local, inbound) = (pool(Direction::Local), pool(Direction::Inbound));
    let (first, second) = (caller(1), caller(2));
    let id = topic.claim(second.me).unwrap();
    let mut replication = topic.subscribe_for_replication(&first, role(), &local).unwrap();
    for sequence in 1..=2 {
        let (block, place) = local.allocate(&second, 10).unwrap();
        let entry = Entry {
            block,
            offset: place.offset,
            length: 10,
            publisher: id,
            sequence,
            published_at: 1,
            metadata: 0,
            has_origin: false,
            sync_point: None,
        };
        topic.publish_in(&second, entry, local.control()).unwrap();
    }
    assert_eq!(topic.local().take(&mut replication).unwrap().position, 0);
    topic.reclaim_in(&second, first.me, local.control(), inbound.control()).unwrap();
    let mut replication = topic.subscribe_for_replication(&second, role(), &local).unwrap();
    for position in 0..2 {
        assert_eq!(topic.local().take(&mut replication).unwrap().position, position);
        topic.release_in(
            &second,
            (Direction::Local, replication.subscription_id()),
            position,
            local.control(),
        );
    }
    assert_eq!(local.statistics(&second).unwrap().blocks_allocated, 0);
    assert_eq!(topic.activity(), (true, false));
    topic.stop_replication(&second, role(), &local).unwrap();
    assert!(topic.subscribers().is_empty());
}
