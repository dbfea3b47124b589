//! Messages that dropped destinations missed.

use super::super::layout::{MAX_DESTINATIONS, MISSED_NEXT};
use super::*;

const NODES: [[u8; 16]; 2] = [[3; 16], [4; 16]];

/// Two publishers, the first with three messages that are retained for other nodes, the second with
/// one; both nodes are destinations.
fn with_messages(world: &World) -> [u64; 2] {
    let (topic, [local, _]) = (world.topic(), world.controls());
    let me = caller(1);
    NODES.iter().for_each(|node| assert!(topic.add_destination(node)));
    topic.local().subscribe_as(&me, role()).unwrap();
    let ids = [0, 1].map(|_| topic.claim(me.me).unwrap());
    for (at, sequence) in [(0, 1), (1, 1), (0, 2), (0, 3)] {
        topic.publish_in(&me, world.entry(me.me, 0, ids[at], sequence), &local).unwrap();
    }
    ids
}

fn missed(topic: &TopicWords<Words<'_>>, ids: [u64; 2]) -> (u64, u64, [u64; 2]) {
    let all = topic.missed_by_nodes();
    (all.messages, all.nodes, ids.map(|id| topic.missed_by_nodes_of(id)))
}

#[test]
fn missed_messages_are_counted_once_for_each_publisher() {
    let world = World::new();
    let (topic, ids) = (world.topic(), with_messages(&world));
    assert_eq!(missed(&topic, ids), (0, 0, [0, 0]));
    // One node has the first two already.
    assert_eq!(topic.give_up(&NODES[0], role(), 2), 2);
    assert_eq!(missed(&topic, ids), (2, 1, [2, 0]));
    assert_eq!(topic.destinations(), [NODES[1]]);
    assert_eq!(topic.give_up(&NODES[1], role(), 0), 4);
    assert_eq!(missed(&topic, ids), (6, 2, [5, 1]));
    assert!(topic.destinations().is_empty());
    // A new publisher in a reused slot begins at zero; the count of the earlier one stays in the
    // total.
    topic.publisher(ids[0]).give_back();
    let next = loop {
        let next = topic.claim(caller(2).me).unwrap();
        if next & 0xff == ids[0] & 0xff {
            break next;
        }
        topic.publisher(next).give_back();
    };
    assert_eq!((next & 0xff, topic.missed_by_nodes_of(next)), (ids[0] & 0xff, 0));
    let [local, _] = world.controls();
    let subscription_id = topic.local().subscription_ids().next().unwrap();
    topic.release_in(&caller(1), (Direction::Local, subscription_id), 0, &local);
    topic.publish_in(&caller(2), world.entry(caller(2).me, 0, next, 1), &local).unwrap();
    assert!(topic.add_destination(&NODES[0]));
    assert_eq!(topic.give_up(&NODES[0], role(), 0), 4);
    assert_eq!(missed(&topic, [next, ids[1]]), (10, 3, [1, 2]));
}

#[test]
fn node_that_unsubscribed_or_has_all_misses_nothing() {
    let world = World::new();
    let (topic, ids) = (world.topic(), with_messages(&world));
    topic.remove_destination(&NODES[0]);
    assert_eq!(topic.give_up(&NODES[1], role(), 4), 0);
    assert_eq!((missed(&topic, ids), topic.destinations()), ((0, 0, [0, 0]), Vec::new()));
}

#[test]
fn best_effort_topic_counts_no_missed_messages() {
    let settings = SharedSettings { reliability: Reliability::DropOldest, ..SETTINGS };
    let words = LocalWords::zeroed(TopicWords::<Words<'_>>::required_words(&settings));
    let topic = TopicWords::format(&words, 5, "a topic", &settings).unwrap();
    let (world, me) = (World::new(), caller(1));
    topic.local().subscribe_as(&me, role()).unwrap();
    assert!(topic.add_destination(&NODES[0]));
    let entry = world.entry(me.me, 0, 256, 1);
    topic.local().publish(&me, entry.to_words(), |_| {}).unwrap();
    assert_eq!((topic.give_up(&NODES[0], role(), 0), topic.missed_by_nodes().nodes), (0, 0));
    assert!(topic.destinations().is_empty());
}

#[test]
fn destination_without_a_slot_misses_messages_too() {
    let world = World::new();
    let (topic, ids) = (world.topic(), with_messages(&world));
    let more = |number| [10 + number as u8; 16];
    for number in 2..MAX_DESTINATIONS {
        assert!(topic.add_destination(&more(number)));
    }
    assert!(!topic.add_destination(&more(MAX_DESTINATIONS)));
    assert_eq!(topic.give_up(&more(MAX_DESTINATIONS), role(), 0), 4);
    assert_eq!(missed(&topic, ids), (4, 1, [3, 1]));
    assert_eq!(topic.destinations().len(), MAX_DESTINATIONS);
}

#[test]
fn halted_role_gets_no_more_messages() {
    let world = World::new();
    let (topic, ids) = (world.topic(), with_messages(&world));
    let ([local, _], me) = (world.controls(), caller(1));
    topic.local().halt(&me, role()).unwrap();
    topic.local().halt(&me, role()).unwrap();
    let entry = world.entry(me.me, 0, ids[1], 2);
    let published = topic.publish_in(&me, entry, &local);
    assert_eq!(published.unwrap_err(), ipc::QueueError::NoSubscribers);
    local.free(&me, entry.block, Owner::participant(me.me)).unwrap();
    // Its earlier messages are still there, and counted.
    assert_eq!(topic.give_up(&NODES[0], role(), 1), 3);
    assert!(!world.is_empty());
    topic
        .local()
        .remove_participant(&me, role(), |words| {
            topic.dispose(&me, &local, words);
        })
        .unwrap();
    assert!(world.is_empty());
    // Its subscription index is free again.
    assert_eq!(topic.local().subscribe(&me).unwrap().index(), 0);
}

/// Any process may have written these words.
#[test]
fn invalid_destination_slot_is_ignored() {
    for begun in [MAX_DESTINATIONS as u64 + 1, 1 << 40, u64::MAX] {
        let world = World::new();
        let (topic, ids) = (world.topic(), with_messages(&world));
        ipc::Words::swap(&world.topic, MISSED_NEXT + 2, begun);
        topic.finish_giving_up();
        assert_eq!(missed(&topic, ids), (0, 0, [0, 0]));
        assert_eq!(topic.destinations(), NODES);
    }
}
