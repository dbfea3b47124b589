//! Records of deliveries from other nodes.

use super::super::layout::MAX_ORIGINS;
use super::super::origins::MAX_ORIGINS_PER_NODE;
use super::*;

/// Delivers, and frees the block if it was not delivered.
fn deliver(world: &World, me: &Caller<'_>, origin: &OriginId, number: u64) -> Delivery {
    let [_, inbound] = world.controls();
    let entry = world.entry(me.me, 1, 256, number);
    let delivery = world.topic().deliver_in(me, (origin, number), entry, &inbound).unwrap();
    if !matches!(delivery, Delivery::Delivered(_)) {
        inbound.free(me, entry.block, Owner::participant(me.me)).unwrap();
    }
    delivery
}

fn skip(topic: &TopicWords<Words<'_>>, world: &World, origin: &OriginId, number: u64) {
    let [_, inbound] = world.controls();
    topic.skip_in(&caller(1), (origin, number), &inbound).unwrap();
}

#[test]
fn recorded_but_undelivered_message_is_not_counted() {
    // A process that dies between record and delivery leaves a record of a first message, at a
    // position that another origin's message gets afterwards.
    let world = World::new();
    let (topic, [_, inbound]) = (world.topic(), world.controls());
    let (dead, alive) = (caller(1), caller(2));
    let _reader = topic.inbound().subscribe(&alive).unwrap();
    let slot = topic.origin_to_write(&dead, &origin(1), &inbound).unwrap();
    slot.record(0, topic.inbound().position());
    assert_eq!(topic.delivered(&origin(1)), None);
    assert!(matches!(deliver(&world, &alive, &origin(2), 0), Delivery::Delivered(_)));
    assert_eq!(topic.delivered(&origin(1)), None);
    assert!(matches!(deliver(&world, &alive, &origin(1), 0), Delivery::Delivered(_)));
    assert_eq!((topic.delivered(&origin(1)), topic.delivered(&origin(2))), (Some(0), Some(0)));
    // The same for a later message.
    let slot = topic.origin_to_write(&alive, &origin(1), &inbound).unwrap();
    slot.record(1, topic.inbound().position());
    assert_eq!(topic.delivered(&origin(1)), Some(0));
    assert!(matches!(deliver(&world, &caller(3), &origin(2), 1), Delivery::Delivered(_)));
    assert_eq!(topic.delivered(&origin(1)), Some(0));
}

#[test]
fn half_written_record_is_ignored() {
    let world = World::new();
    let (topic, [_, inbound]) = (world.topic(), world.controls());
    let me = caller(1);
    let _reader = topic.inbound().subscribe(&me).unwrap();
    deliver(&world, &me, &origin(2), 0);
    // The state of a record before it is valid: its number and a position that had a message.
    let at = layout::ORIGINS + layout::CACHE_LINE_WORDS;
    topic.origin_to_write(&me, &origin(1), &inbound).unwrap();
    ipc::Words::swap(&world.topic, at + 6, 5);
    ipc::Words::swap(&world.topic, at + 7, 0);
    assert_eq!(topic.delivered(&origin(1)), None);
}

#[test]
fn recreated_topics_replace_only_origins_of_their_node() {
    let world = World::new();
    let topic = world.topic();
    skip(&topic, &world, &origin(1), 4);
    let recreated = |number| OriginId { node: [2; 16], topic: number };
    for number in 0..500 {
        skip(&topic, &world, &recreated(number), number);
    }
    assert_eq!(topic.delivered(&origin(1)), Some(4));
    let known = (0..500).filter(|number| topic.delivered(&recreated(*number)).is_some());
    let last: Vec<_> = (500 - MAX_ORIGINS_PER_NODE as u64..500).collect();
    assert!(known.eq(last));
}

#[test]
fn longest_unused_origin_is_replaced() {
    let world = World::new();
    let topic = world.topic();
    let most = MAX_ORIGINS as u8;
    topic.track_origin(origin(0));
    for node in 0..most {
        skip(&topic, &world, &origin(node), 1);
    }
    // One of them is used again, and one has a later topic of its node.
    skip(&topic, &world, &origin(1), 2);
    topic.remove_origin(&origin(2));
    skip(&topic, &world, &OriginId { topic: 8, ..origin(40) }, 1);
    skip(&topic, &world, &origin(100), 1);
    assert_eq!(topic.delivered(&origin(40)), None, "the earlier topic goes first");
    skip(&topic, &world, &origin(101), 1);
    assert_eq!(topic.delivered(&origin(3)), None, "then the longest unused");
    for node in [0, 1, 4, 100, 101] {
        assert!(topic.delivered(&origin(node)).is_some(), "{node}");
    }
    // A tracked origin stays, for any number of others.
    for node in 0..200_u8 {
        skip(&topic, &world, &OriginId { topic: 9, ..origin(node) }, 1);
    }
    assert_eq!(topic.delivered(&origin(0)), Some(1));
    topic.untrack_origin(&origin(0));
    for node in 0..200_u8 {
        skip(&topic, &world, &OriginId { topic: 10, ..origin(node) }, 1);
    }
    assert_eq!(topic.delivered(&origin(0)), None);
}

#[test]
fn origin_without_a_slot_is_refused_while_all_are_tracked() {
    let world = World::new();
    let (topic, [_, inbound]) = (world.topic(), world.controls());
    for node in 0..MAX_ORIGINS as u8 {
        topic.track_origin(origin(node));
        skip(&topic, &world, &origin(node), 1);
    }
    let refused = topic.skip_in(&caller(1), (&origin(200), 1), &inbound).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::TooMany);
    topic.untrack_origin(&origin(9));
    skip(&topic, &world, &origin(200), 1);
    assert_eq!(topic.delivered(&origin(9)), None);
}

#[test]
fn origins_of_different_nodes_are_never_confused() {
    let world = World::new();
    let topic = world.topic();
    let victim = origin(1);
    // The second half of its identity and the number differ from the victim's in the same bits.
    let mut node = victim.node;
    node[8..].iter_mut().for_each(|byte| *byte ^= 0x5a);
    let forged = OriginId { node, topic: victim.topic ^ 0x5a5a_5a5a_5a5a_5a5a };
    skip(&topic, &world, &forged, u64::MAX - 1);
    assert_eq!(topic.delivered(&victim), None);
}
