//! Nodes that are given up, publishers that die: what is counted, and who is told.

use super::*;

#[test]
fn what_a_service_left_that_died_between_halting_and_giving_up_is_counted() {
    let place = TestNode::new(1);
    place.leave_backlog(&[2; 16]);
    place.topic.halt(&place.caller(), place.role()).unwrap();
    let mut replication = place.replication(&network());
    let _other = subscribing_peer(&replication, 2);
    replication.set_topics(place.topics(true, false));
    // It is there, and gets what is published from now on.
    until("the topic to be replication started anew", &mut [&mut replication], || {
        place.topic.activity().0 && place.topic.local().subscribers() == 1
    });
    assert_eq!((place.missed(), place.topic.destinations()), ((DEPTH, 1), vec![[2; 16]]));
    place.fill();
}

#[test]
fn all_that_a_halted_topic_was_kept_for_are_counted_once_also_beside_one_that_comes() {
    let place = TestNode::new(1);
    place.leave_backlog(&[2; 16]);
    assert!(place.topic.add_destination(&ABSENT_NODE));
    place.topic.halt(&place.caller(), place.role()).unwrap();
    // Two services died there, the second one after it had counted one of the two.
    place.topic.give_up(&ABSENT_NODE, place.role(), 0);
    let mut replication = place.replication(&network());
    let _others = [2, 3].map(|other| subscribing_peer(&replication, other));
    replication.set_topics(place.topics(true, false));
    until("the topic to be replication started anew", &mut [&mut replication], || {
        let mut destinations = place.topic.destinations();
        destinations.sort_unstable();
        place.topic.activity().0 && destinations == [[2; 16], [3; 16]]
    });
    assert_eq!(place.missed(), (2 * DEPTH, 2));
    // What is published from now on is kept, for both.
    place.fill();
    assert!(place.is_owed());
}

#[test]
fn who_does_not_want_a_topic_any_more_misses_nothing() {
    let place = TestNode::new(1);
    let mut replication = place.replication(&network());
    let other = subscribing_peer(&replication, 2);
    replication.set_topics(place.topics(true, false));
    until("the topic to be replication started", &mut [&mut replication], || {
        place.topic.is_replicated()
    });
    place.fill();
    other.set_interests([]).unwrap();
    until("it to be let go of", &mut [&mut replication], || !place.is_owed());
    place.assert_nothing_retained();
    assert_eq!(place.missed(), (0, 0));
}

#[test]
fn one_that_is_given_up_misses_what_it_did_not_get_while_others_get_all() {
    let (writing, reading) = (TestNode::new(1), TestNode::new(2));
    // The next service waits for one that never comes, beside one that does.
    assert!(writing.topic.add_destination(&ABSENT_NODE));
    writing
        .topic
        .subscribe_for_replication(&writing.caller(), writing.role(), &writing.local)
        .unwrap();
    let mut writer = writing.replication(&network());
    let peers = vec![writer.listens().unwrap()];
    let mut reader = reading.replication(&NetworkOptions { peers, ..network() });
    let mut subscriber = reading.topic.inbound().subscribe(&reading.caller()).unwrap();
    for number in 0..DEPTH {
        writing.publish(number).unwrap();
    }
    writer.set_topics(writing.topics(true, false));
    reader.set_topics(reading.topics(false, true));
    let mut next = 0;
    until("all messages", &mut [&mut writer, &mut reader], || {
        let taken = reading.take(&mut subscriber);
        next += taken.map_or(0, |entry| u64::from(entry.sequence == next));
        next == DEPTH
    });
    until("the other one to be given up", &mut [&mut writer, &mut reader], || {
        writing.topic.destinations() == [[2; 16]]
    });
    assert_eq!(writing.missed(), (DEPTH, 1));
    until("room", &mut [&mut writer, &mut reader], || writing.publish(next).is_ok());
    until("one more", &mut [&mut writer, &mut reader], || reading.take(&mut subscriber).is_some());
    // It has all: so it misses nothing when it goes.
    until("that to be known", &mut [&mut writer, &mut reader], || {
        !crate::replication::routing::reconcile::has_backlog(&writing.topic)
    });
    drop(reader);
    until("it to be given up, too", &mut [&mut writer], || writing.topic.destinations().is_empty());
    assert_eq!(writing.missed(), (DEPTH, 1));
}

#[test]
fn a_publisher_that_dies_is_told_of_where_somebody_reads() {
    let (writing, reading) = (TestNode::new(1), TestNode::new(2));
    let (mut writer, mut reader, mut subscriber) = carriers(&writing, &reading);
    let dead = writing.node_segment.roster().admit(PidFd::of_this_process().unwrap()).unwrap();
    let ids = [0, 1].map(|_| writing.topic.claim(dead).unwrap());
    writing.publish(0).unwrap();
    writing
        .topic
        .reclaim_in(&writing.caller(), dead, writing.local.control(), writing.inbound.control())
        .unwrap();
    writer.topics_changed(&[NUMBER].into());
    until("both to be told of", &mut [&mut writer, &mut reader], || {
        reading.topic.publishers_lost(Direction::Inbound) == 2
    });
    for (number, publisher) in ids.into_iter().enumerate() {
        let lost = LostPublisher { node: [1; 16], publisher };
        assert_eq!(reading.topic.publisher_lost(Direction::Inbound, number as u64), Some(lost));
    }
    until("the message", &mut [&mut writer, &mut reader], || {
        reading.take(&mut subscriber).is_some()
    });
    // The next service says what the last one may not have said; who knows it takes no notice.
    writing.topic.set_losses_sent(0);
    writer.topics_changed(&[NUMBER].into());
    let late = writing.topic.claim(dead).unwrap();
    until("it to be told again", &mut [&mut writer, &mut reader], || {
        writing.topic.losses_sent() == 2
    });
    writing
        .topic
        .reclaim_in(&writing.caller(), dead, writing.local.control(), writing.inbound.control())
        .unwrap();
    writer.topics_changed(&[NUMBER].into());
    until("one more", &mut [&mut writer, &mut reader], || {
        reading.topic.publishers_lost(Direction::Inbound) > 2
    });
    let lost = LostPublisher { node: [1; 16], publisher: late };
    assert_eq!(reading.topic.publisher_lost(Direction::Inbound, 2), Some(lost));
    // One that died together with the service, which told nobody.
    let listen = writer.listens().unwrap().parse().ok();
    drop(writer);
    let last = writing.topic.claim(dead).unwrap();
    writing
        .topic
        .reclaim_in(&writing.caller(), dead, writing.local.control(), writing.inbound.control())
        .unwrap();
    let options = NetworkOptions { listen, lost_after: TEST_TIMEOUT, ..network() };
    let mut writer = writing.replication(&options);
    writer.set_topics(writing.topics(true, false));
    until("the last one", &mut [&mut writer, &mut reader], || {
        reading.topic.publishers_lost(Direction::Inbound) > 3
    });
    let lost = LostPublisher { node: [1; 16], publisher: last };
    assert_eq!(reading.topic.publisher_lost(Direction::Inbound, 3), Some(lost));
    // Here nobody died.
    assert_eq!(
        writing.topic.publishers_lost(Direction::Inbound)
            + reading.topic.publishers_lost(Direction::Local),
        0
    );
}

#[test]
fn all_that_is_dropped_on_the_way_is_counted_by_who_reads_also_before_the_first_that_comes() {
    let settings = SharedSettings { reliability: Reliability::DropOldest, ..settings() };
    let (writing, reading) = (TestNode::with(1, settings), TestNode::with(2, settings));
    // What was published before is nothing that is waited for.
    let _local = writing.topic.local().subscribe(&writing.caller()).unwrap();
    (1..4).for_each(|number| writing.publish(number).unwrap());
    let (mut writer, mut reader, mut subscriber) = carriers(&writing, &reading);
    const LAST: u64 = 100 * DEPTH;
    let mut taken = 0;
    for number in 4..=LAST {
        writing.publish(number).unwrap();
        // Some are dropped there, and of those that come some are, before they are read.
        if number > LAST / 2 && number % (2 * DEPTH + 1) == 0 {
            for _ in 0..10 {
                writer.turn();
                reader.turn();
                std::thread::sleep(Duration::from_micros(200));
            }
        }
    }
    until("the last one", &mut [&mut writer, &mut reader], || {
        let Some(entry) = reading.take(&mut subscriber) else { return false };
        taken += 1;
        entry.sequence == LAST
    });
    assert_eq!(taken + reading.missed_messages(), LAST - 3);
}
