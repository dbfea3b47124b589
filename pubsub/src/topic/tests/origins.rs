//! What is known of what comes from other nodes.

use super::super::layout::MAX_ORIGINS;
use super::super::origins::MAX_ORIGINS_PER_NODE;
use super::*;

/// Delivers, and gives the block back if it was not wanted.
fn deliver(world: &World, me: &Caller<'_>, origin: &OriginId, number: u64) -> Delivery {
    let [_, inbound] = world.controls();
    let entry = world.entry(me.me, 1, 256, number);
    let delivery = world.topic().deliver_in(me, (origin, number), entry, &inbound).unwrap();
    if !matches!(delivery, Delivery::Delivered(_)) {
        inbound.free(me, entry.block, Owner::participant(me.me)).unwrap();
    }
    delivery
}

fn pass_over(topic: &TopicWords<Words<'_>>, world: &World, origin: &OriginId, number: u64) {
    let [_, inbound] = world.controls();
    topic.skip_in(&caller(1), (origin, number), &inbound).unwrap();
}

#[test]
fn a_first_message_that_was_only_announced_was_not_delivered() {
    // One who dies between its note and the delivery leaves that the note was to be the first,
    // at a position that another origin's message gets afterwards.
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
    // And so for one that is not the first.
    let slot = topic.origin_to_write(&alive, &origin(1), &inbound).unwrap();
    slot.record(1, topic.inbound().position());
    assert_eq!(topic.delivered(&origin(1)), Some(0));
    assert!(matches!(deliver(&world, &caller(3), &origin(2), 1), Delivery::Delivered(_)));
    assert_eq!(topic.delivered(&origin(1)), Some(0));
}

#[test]
fn a_half_written_note_says_nothing() {
    let world = World::new();
    let (topic, [_, inbound]) = (world.topic(), world.controls());
    let me = caller(1);
    let _reader = topic.inbound().subscribe(&me).unwrap();
    deliver(&world, &me, &origin(2), 0);
    // As far as a note goes before it holds: its number and its place, which had a message.
    let at = layout::ORIGINS + layout::CACHE_LINE_WORDS;
    topic.origin_to_write(&me, &origin(1), &inbound).unwrap();
    ipc::Words::swap(&world.topic, at + 6, 5);
    ipc::Words::swap(&world.topic, at + 7, 0);
    assert_eq!(topic.delivered(&origin(1)), None);
}

#[test]
fn a_topic_that_a_node_makes_anew_again_and_again_pushes_out_only_its_own() {
    let world = World::new();
    let topic = world.topic();
    pass_over(&topic, &world, &origin(1), 4);
    let anew = |number| OriginId { node: [2; 16], topic: number };
    for number in 0..500 {
        pass_over(&topic, &world, &anew(number), number);
    }
    assert_eq!(topic.delivered(&origin(1)), Some(4));
    let known = (0..500).filter(|number| topic.delivered(&anew(*number)).is_some());
    let last: Vec<_> = (500 - MAX_ORIGINS_PER_NODE as u64..500).collect();
    assert!(known.eq(last));
}

#[test]
fn when_there_are_many_nodes_the_longest_unused_makes_room() {
    let world = World::new();
    let topic = world.topic();
    let most = MAX_ORIGINS as u8;
    topic.track_origin(origin(0));
    for node in 0..most {
        pass_over(&topic, &world, &origin(node), 1);
    }
    // One of them is used again, and one has a later topic beside it.
    pass_over(&topic, &world, &origin(1), 2);
    topic.remove_origin(&origin(2));
    pass_over(&topic, &world, &OriginId { topic: 8, ..origin(40) }, 1);
    pass_over(&topic, &world, &origin(100), 1);
    assert_eq!(topic.delivered(&origin(40)), None, "the earlier topic goes first");
    pass_over(&topic, &world, &origin(101), 1);
    assert_eq!(topic.delivered(&origin(3)), None, "then the longest unused");
    for kept in [0, 1, 4, 100, 101] {
        assert!(topic.delivered(&origin(kept)).is_some(), "{kept}");
    }
    // However many come, what is received is known.
    for node in 0..200_u8 {
        pass_over(&topic, &world, &OriginId { topic: 9, ..origin(node) }, 1);
    }
    assert_eq!(topic.delivered(&origin(0)), Some(1));
    topic.untrack_origin(&origin(0));
    for node in 0..200_u8 {
        pass_over(&topic, &world, &OriginId { topic: 10, ..origin(node) }, 1);
    }
    assert_eq!(topic.delivered(&origin(0)), None);
}

#[test]
fn more_than_there_are_lines_are_refused_while_all_are_received() {
    let world = World::new();
    let (topic, [_, inbound]) = (world.topic(), world.controls());
    for node in 0..MAX_ORIGINS as u8 {
        topic.track_origin(origin(node));
        pass_over(&topic, &world, &origin(node), 1);
    }
    let refused = topic.skip_in(&caller(1), (&origin(200), 1), &inbound).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::TooMany);
    topic.untrack_origin(&origin(9));
    pass_over(&topic, &world, &origin(200), 1);
    assert_eq!(topic.delivered(&origin(9)), None);
}

#[test]
fn no_node_can_be_taken_for_another_by_its_topics_numbers() {
    let world = World::new();
    let topic = world.topic();
    let victim = origin(1);
    // The second half of its identity and the number differ from the victim's in the same bits.
    let mut node = victim.node;
    node[8..].iter_mut().for_each(|byte| *byte ^= 0x5a);
    let forged = OriginId { node, topic: victim.topic ^ 0x5a5a_5a5a_5a5a_5a5a };
    pass_over(&topic, &world, &forged, u64::MAX - 1);
    assert_eq!(topic.delivered(&victim), None);
}
