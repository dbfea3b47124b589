mod given_up;
mod origins;

use std::time::Duration;

use ipc::{Immortal, LocalWords, Owner, Participant};

use super::alarm::Alarm;
use super::losses::LostPublisher;
use super::published_elsewhere::PublishedElsewhere;
use super::*;
use crate::error::ErrorKind;
use crate::pool::{Direction, Ledger, PoolId};
use crate::settings::{LONGEST_TOPIC, Reliability, SharedPlace};

type Words<'a> = &'a LocalWords;

const SETTINGS: SharedSettings = SharedSettings {
    place: SharedPlace::Host,
    reliability: Reliability::Reliable,
    depth: 4,
    largest: 1000,
    loans: 4,
    release_microseconds: 1000,
    type_name: None,
};

fn caller(place: u32) -> Caller<'static> {
    Caller::new(Participant::new(place, 1).unwrap(), &Immortal)
}

fn role() -> Participant {
    Participant::role(0).unwrap()
}

fn origin(node: u8) -> OriginId {
    OriginId { node: [node; 16], topic: 7 }
}

struct World {
    topic: LocalWords,
    books: [LocalWords; 2],
}

impl World {
    fn new() -> Self {
        let topic = LocalWords::zeroed(TopicWords::<Words<'_>>::words_needed(&SETTINGS));
        let books = Direction::BOTH.map(|direction| {
            let words = LocalWords::zeroed(Ledger::<Words<'_>>::words_needed(64));
            let id = PoolId { place: SharedPlace::Host, direction };
            let ledger = Ledger::format(&words, id, 1 << 20, 64).unwrap();
            ledger.admit(&caller(0), 0, 1 << 16, 1).unwrap();
            words
        });
        TopicWords::format(&topic, 5, "a topic", &SETTINGS).unwrap();
        Self { topic, books }
    }

    fn topic(&self) -> TopicWords<Words<'_>> {
        TopicWords::attach(&self.topic).unwrap()
    }

    fn ledgers(&self) -> [Ledger<Words<'_>>; 2] {
        [0, 1].map(|number| Ledger::attach(&self.books[number]).unwrap())
    }

    fn entry(&self, me: Participant, number: usize, publisher: u64, sequence: u64) -> Entry {
        let ledger = &self.ledgers()[number];
        let caller = Caller::new(me, &Immortal);
        let (block, place) = ledger.allocate(&caller, Owner::participant(me), 500).unwrap();
        Entry {
            block,
            offset: place.offset,
            length: 500,
            publisher,
            sequence,
            published_at: 1,
            metadata: 0,
            has_origin: number == 1,
            turn: None,
        }
    }

    fn is_empty(&self) -> bool {
        let taken = |ledger: &Ledger<_>| ledger.statistics(&caller(0)).unwrap().blocks_taken;
        self.ledgers().iter().all(|ledger| taken(ledger) == 0)
    }
}

#[test]
fn a_topic_is_what_it_was_made() {
    let topic = Topic::create(7, "images/left", &SETTINGS).unwrap();
    let file = topic.segment().try_clone_to_owned().unwrap();
    let opened = Topic::open(file).unwrap();
    assert_eq!((opened.number(), opened.name()), (7, "images/left"));
    assert_eq!(opened.settings(), &SETTINGS);
    let longest = "x".repeat(LONGEST_TOPIC);
    assert_eq!(Topic::create(0, &longest, &SETTINGS).unwrap().name(), longest);
    for (number, name) in [(0, ""), (0, &*"x".repeat(LONGEST_TOPIC + 1)), (u32::MAX, "x")] {
        let error = Topic::create(number, name, &SETTINGS).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    }
}

#[test]
fn nonsense_is_no_topic() {
    let world = World::new();
    let scribbles = [
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
        // A name of zero bytes, which are no text.
        (layout::TYPE_LENGTH, 4),
        (layout::QUEUES, 1),
    ];
    for (at, value) in scribbles {
        let was = ipc::Words::swap(&world.topic, at, value);
        let error = TopicWords::attach(&world.topic).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Malformed, "{at}: {error}");
        ipc::Words::swap(&world.topic, at, was);
    }
    world.topic();
}

#[test]
fn publishers_have_lines_and_names_that_do_not_come_again() {
    let world = World::new();
    let topic = world.topic();
    let ids: Vec<_> = (0..64).map(|_| topic.claim(caller(1).me).unwrap()).collect();
    assert_eq!(topic.claim(caller(1).me).unwrap_err().kind(), ErrorKind::TooMany);
    topic.publisher(ids[3]).give_back();
    let again = topic.claim(caller(2).me).unwrap();
    assert!(again & 0xff == 3 && !ids.contains(&again));
    assert!(topic.publisher(again).is_of(caller(2).me, again));
    assert!(!topic.publisher(ids[3]).is_of(caller(1).me, ids[3]));
    assert_eq!(topic.census().publishers.len(), 64);
}

#[test]
fn the_census_tells_who_is_there_and_the_pressure_who_waits() {
    let world = World::new();
    let (topic, [here, _]) = (world.topic(), world.ledgers());
    let me = caller(1);
    let id = topic.claim(me.me).unwrap();
    let mut reader = topic.here().subscribe(&caller(2)).unwrap();
    for sequence in 1..=3 {
        topic.publish_in(&me, world.entry(me.me, 0, id, sequence), &here).unwrap();
    }
    topic.here().take(&mut reader).unwrap();
    let census = topic.census();
    assert_eq!((topic.takes_part(), census.publishers.len()), ((true, true), 1));
    let seen = census.publishers[0];
    assert_eq!((seen.id, seen.sequence, seen.messages, seen.bytes), (id, 3, 3, 1500));
    let seen = census.subscribers[0];
    assert_eq!((seen.who, seen.cursor, seen.unread, seen.held), (Some(caller(2).me), 1, 2, 1));
    assert_eq!(topic.pressure(), None);
    topic.publisher(id).pressure().begin();
    assert!(topic.pressure().is_some());
    assert_eq!(topic.in_the_way(Direction::Here), None, "there is room still");
    topic.publish_in(&caller(1), world.entry(caller(1).me, 0, id, 4), &here).unwrap();
    assert_eq!(topic.in_the_way(Direction::Here), Some((0, vec![reader.seat()])));
    topic.publisher(id).pressure().end(true);
    assert_eq!((topic.pressure(), topic.in_the_way(Direction::Arrivals)), (None, None));
}

#[test]
fn who_dies_leaves_nothing_behind() {
    let world = World::new();
    let (topic, [here, arrivals]) = (world.topic(), world.ledgers());
    let (dead, alive) = (caller(1), caller(2));
    let id = topic.claim(dead.me).unwrap();
    let mut subscriber = topic.here().subscribe(&dead).unwrap();
    topic.publish_in(&dead, world.entry(dead.me, 0, id, 1), &here).unwrap();
    topic.here().take(&mut subscriber).unwrap();
    topic.publish_in(&dead, world.entry(dead.me, 0, id, 2), &here).unwrap();
    let loan = world.entry(dead.me, 0, id, 3);
    let lost = topic.publishers_lost(Direction::Here);
    for _ in 0..2 {
        topic.bury_in(&alive, dead.me, &here, &arrivals).unwrap();
    }
    assert!(here.owner(loan.block).is_ok());
    here.reclaim(&alive, dead.me).unwrap();
    assert!(world.is_empty());
    assert_eq!(topic.publishers_lost(Direction::Here), lost + 1);
    assert_eq!(topic.publisher_lost(Direction::Here, lost), Some(LostPublisher::here(id)));
    assert!(topic.census().publishers.is_empty());
}

#[test]
fn the_lost_are_remembered_for_a_while() {
    let world = World::new();
    let topic = world.topic();
    for number in 0..20 {
        assert!(topic.is_lost(Direction::Here, LostPublisher::here(number)));
        assert!(!topic.is_lost(Direction::Here, LostPublisher::here(number)));
    }
    assert_eq!(topic.publishers_lost(Direction::Here), 20);
    let lost = |number| topic.publisher_lost(Direction::Here, number);
    assert_eq!([4, 20].map(lost), [None; 2]);
    assert_eq!([5, 19].map(lost), [5, 19].map(|number| Some(LostPublisher::here(number))));
    assert_eq!(topic.publishers_lost(Direction::Arrivals), 0);
}

#[test]
fn what_was_published_elsewhere_is_noted_for_each_publisher() {
    let world = World::new();
    let topic = world.topic();
    let told = |publisher: u64, last| PublishedElsewhere {
        node: [publisher as u8; 16],
        publisher,
        last,
        first: 1,
        since: 2,
        at: 3,
    };
    assert!(topic.published_elsewhere().is_empty());
    // The same again is no news, wherever the arrivals are by then.
    for (told, is_news) in [
        (told(1, 5), true),
        (PublishedElsewhere { at: 4, ..told(1, 5) }, false),
        (told(2, 1), true),
        (told(1, 6), true),
        // It has the line of the one before at its node.
        (PublishedElsewhere { publisher: 0x101, ..told(1, 2) }, true),
    ] {
        assert_eq!(topic.note_published_elsewhere(&told), is_news, "{told:?}");
    }
    let expected = [PublishedElsewhere { publisher: 0x101, ..told(1, 2) }, told(2, 1)];
    assert_eq!((topic.published_elsewhere(), topic.changes_elsewhere()), (expected.into(), 4));
    // Those that were noted longest ago give way.
    for publisher in 3..=66 {
        assert!(topic.note_published_elsewhere(&told(publisher, 1)));
    }
    let mut found: Vec<_> = topic.published_elsewhere();
    found.sort_by_key(|told| told.publisher);
    assert_eq!(found, (3..=66).map(|publisher| told(publisher, 1)).collect::<Vec<_>>());
}

#[test]
fn one_in_the_way_is_evicted_from_both_queues_and_told() {
    for direction in Direction::BOTH {
        let world = World::new();
        let (topic, [here, arrivals]) = (world.topic(), world.ledgers());
        let me = caller(1);
        let id = topic.claim(me.me).unwrap();
        let seats = [topic.here(), topic.arrivals()].map(|queue| queue.subscribe(&me).unwrap());
        topic.enrol(seats[0].seat(), seats[1].seat());
        for number in 0..u64::from(SETTINGS.depth) {
            assert_eq!(topic.in_the_way(direction), None, "there is room");
            topic.publish_in(&me, world.entry(me.me, 0, id, number + 1), &here).unwrap();
            let entry = world.entry(me.me, 1, id, number + 1);
            topic.deliver_in(&me, (&origin(1), number), entry, &arrivals).unwrap();
        }
        assert_eq!(topic.evicted(seats[0].seat()), None);
        let (_, holders) = topic.in_the_way(direction).unwrap();
        let held_for = Duration::from_secs(3);
        topic.evict_in(&me, (direction, holders[0]), held_for, [&here, &arrivals]).unwrap();
        assert_eq!(topic.evicted(seats[0].seat()), Some(held_for));
        assert_eq!(topic.evictions(), 1);
        // Who cleans up after another looks whether that was in the middle of it.
        topic.bury_in(&me, caller(3).me, &here, &arrivals).unwrap();
        assert_eq!(topic.evictions(), 1);
        assert!(!topic.here().is_subscribed(&seats[0]));
        assert!(!topic.arrivals().is_subscribed(&seats[1]));
        assert!(world.is_empty());
        // Another at the same places is not told.
        topic.here().unsubscribe(&me, &seats[0], |_| {}).unwrap();
        let next = topic.here().subscribe(&me).unwrap();
        assert_eq!((next.place(), topic.evicted(next.seat())), (0, None));
    }
}

#[test]
fn one_that_only_holds_is_evicted_from_both_queues() {
    let world = World::new();
    let (topic, [here, arrivals]) = (world.topic(), world.ledgers());
    let me = caller(1);
    let id = topic.claim(me.me).unwrap();
    let mut seats = [topic.here(), topic.arrivals()].map(|queue| queue.subscribe(&me).unwrap());
    topic.enrol(seats[0].seat(), seats[1].seat());
    topic.publish_in(&me, world.entry(me.me, 0, id, 1), &here).unwrap();
    topic.deliver_in(&me, (&origin(1), 0), world.entry(me.me, 1, id, 1), &arrivals).unwrap();
    for (queue, seat) in [topic.here(), topic.arrivals()].into_iter().zip(&mut seats) {
        queue.take(seat).unwrap();
        queue.stop(&me, seat, |_| {}).unwrap();
    }
    let held_for = Duration::from_secs(3);
    let at = (Direction::Here, seats[0].seat());
    topic.evict_in(&me, at, held_for, [&here, &arrivals]).unwrap();
    assert!(!topic.here().is_subscribed(&seats[0]));
    assert!(!topic.arrivals().is_subscribed(&seats[1]));
    assert!(world.is_empty());
}

#[test]
fn who_comes_while_another_is_evicted_is_not_told() {
    let world = World::new();
    let (topic, [here, arrivals]) = (world.topic(), world.ledgers());
    let me = caller(1);
    let subscribe = || [topic.here(), topic.arrivals()].map(|queue| queue.subscribe(&me).unwrap());
    let before = subscribe();
    topic.enrol(before[0].seat(), before[1].seat());
    let line = Alarm::of(topic.words(), before[0].seat());
    // It leaves by itself while it is noted that it is evicted.
    for (queue, subscriber) in [topic.here(), topic.arrivals()].into_iter().zip(&before) {
        queue.unsubscribe(&me, subscriber, |_| {}).unwrap();
    }
    let next = subscribe();
    assert_eq!(next[0].place(), before[0].place());
    topic.enrol(next[0].seat(), next[1].seat());
    line.evict(before[0].seat().to_bits(), Duration::from_secs(1));
    // Nor is it removed when the one that was evicting is cleaned up after.
    topic.bury_in(&me, caller(2).me, &here, &arrivals).unwrap();
    assert_eq!(topic.evicted(next[0].seat()), None);
    assert!(topic.here().is_subscribed(&next[0]) && topic.arrivals().is_subscribed(&next[1]));
}

#[test]
fn what_comes_from_another_node_comes_once() {
    let world = World::new();
    let (topic, [_, arrivals]) = (world.topic(), world.ledgers());
    let (first, second) = (caller(1), caller(2));
    let (one, other) = (origin(1), origin(2));
    let deliver = |me: &Caller<'_>, origin: &OriginId, number| {
        let entry = world.entry(me.me, 1, 256, number);
        let delivery = topic.deliver_in(me, (origin, number), entry, &arrivals).unwrap();
        if !matches!(delivery, Delivery::Delivered(_)) {
            arrivals.free(me, entry.block, Owner::participant(me.me)).unwrap();
        }
        delivery
    };
    assert_eq!(topic.delivered(&one), None);
    assert_eq!(deliver(&first, &one, 3), Delivery::Nobody);
    assert_eq!(topic.delivered(&one), Some(3));
    let mut reader = topic.arrivals().subscribe(&first).unwrap();
    for number in 0..10 {
        let me = if number < 5 { &first } else { &second };
        let before = matches!(deliver(me, &one, number), Delivery::Before);
        assert_eq!(before, number <= 3);
        assert!(matches!(deliver(me, &other, number), Delivery::Delivered(_)));
        while let Some(taken) = topic.arrivals().take(&mut reader) {
            let seat = (Direction::Arrivals, reader.seat());
            topic.release_in(me, seat, taken.position, &arrivals);
        }
        assert_eq!(topic.delivered(&other), Some(number));
    }
    topic.pass_over_in(&second, (&one, 20), &arrivals).unwrap();
    assert_eq!(topic.delivered(&one), Some(20));
    topic.forget_origin(&one);
    assert_eq!(topic.delivered(&one), None);
    assert!(world.is_empty());
}

#[test]
fn the_role_goes_on_where_it_was() {
    let topic = Topic::create(1, "carried", &SETTINGS).unwrap();
    let pool = |direction| {
        let pool =
            Pool::create(PoolId { place: SharedPlace::Host, direction }, 1 << 20, 64).unwrap();
        pool.follow_piece(0, pool.make_piece(1 << 16).unwrap()).unwrap();
        pool.admit_piece(&caller(0), 0).unwrap();
        pool
    };
    let (here, arrivals) = (pool(Direction::Here), pool(Direction::Arrivals));
    let (first, second) = (caller(1), caller(2));
    let id = topic.claim(second.me).unwrap();
    let mut carrier = topic.carry(&first, role(), &here).unwrap();
    for sequence in 1..=2 {
        let (block, place) = here.allocate(&second, 10).unwrap();
        let entry = Entry {
            block,
            offset: place.offset,
            length: 10,
            publisher: id,
            sequence,
            published_at: 1,
            metadata: 0,
            has_origin: false,
            turn: None,
        };
        topic.publish_in(&second, entry, here.ledger()).unwrap();
    }
    assert_eq!(topic.here().take(&mut carrier).unwrap().position, 0);
    topic.bury_in(&second, first.me, here.ledger(), arrivals.ledger()).unwrap();
    let mut carrier = topic.carry(&second, role(), &here).unwrap();
    for position in 0..2 {
        assert_eq!(topic.here().take(&mut carrier).unwrap().position, position);
        topic.release_in(&second, (Direction::Here, carrier.seat()), position, here.ledger());
    }
    assert_eq!(here.statistics(&second).unwrap().blocks_taken, 0);
    assert_eq!(topic.takes_part(), (true, false));
    topic.stop_carrying(&second, role(), &here).unwrap();
    assert!(topic.census().subscribers.is_empty());
}
