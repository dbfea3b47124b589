//! Given up nodes and lost publishers: what is counted, and which nodes get reports.

use super::*;

#[test]
fn messages_halted_by_a_killed_service_are_counted_as_missed() {
    let node = TestNode::new(1);
    node.leave_backlog(&[2; 16]);
    node.topic.halt(&node.caller(), node.role()).unwrap();
    let mut replication = node.replication(&network());
    let _other = subscribing_peer(&replication, 2);
    replication.set_topics(node.topics(true, false));
    // The node is connected, and gets messages published from now on.
    until("the topic to be replicated again", &mut [&mut replication], || {
        node.topic.activity().0 && node.topic.local().subscribers() == 1
    });
    assert_eq!((node.missed(), node.topic.destinations()), ((DEPTH, 1), vec![[2; 16]]));
    node.fill();
}

#[test]
fn destinations_of_a_halted_topic_are_counted_once() {
    let node = TestNode::new(1);
    node.leave_backlog(&[2; 16]);
    assert!(node.topic.add_destination(&ABSENT_NODE));
    node.topic.halt(&node.caller(), node.role()).unwrap();
    // Two services died there, the second one after it had counted one node.
    node.topic.give_up(&ABSENT_NODE, node.role(), 0);
    let mut replication = node.replication(&network());
    let _others = [2, 3].map(|other| subscribing_peer(&replication, other));
    replication.set_topics(node.topics(true, false));
    until("the topic to be replicated again", &mut [&mut replication], || {
        let mut destinations = node.topic.destinations();
        destinations.sort_unstable();
        node.topic.activity().0 && destinations == [[2; 16], [3; 16]]
    });
    assert_eq!(node.missed(), (2 * DEPTH, 2));
    // Messages published from now on are retained for both.
    node.fill();
    assert!(node.is_retained());
}

#[test]
fn node_that_unsubscribes_misses_nothing() {
    let node = TestNode::new(1);
    let mut replication = node.replication(&network());
    let other = subscribing_peer(&replication, 2);
    replication.set_topics(node.topics(true, false));
    until("the topic to be replicated", &mut [&mut replication], || node.topic.is_replicated());
    node.fill();
    other.set_interests([]).unwrap();
    until("retained messages to be released", &mut [&mut replication], || !node.is_retained());
    node.assert_nothing_retained();
    assert_eq!(node.missed(), (0, 0));
}

#[test]
fn given_up_node_misses_messages_that_others_get() {
    let (writing, reading) = (TestNode::new(1), TestNode::new(2));
    // The next service waits for a node that never connects, beside one that does.
    assert!(writing.topic.add_destination(&ABSENT_NODE));
    writing
        .topic
        .subscribe_for_replication(&writing.caller(), writing.role(), &writing.local)
        .unwrap();
    // Long enough that the reader connects before it is given up, too, on a busy machine with an
    // emulated processor.
    let network = || NetworkOptions { lost_after: Duration::from_secs(10), ..network() };
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
    until("the absent node to be given up", &mut [&mut writer, &mut reader], || {
        writing.topic.destinations() == [[2; 16]]
    });
    assert_eq!(writing.missed(), (DEPTH, 1));
    until("queue capacity", &mut [&mut writer, &mut reader], || writing.publish(next).is_ok());
    until("another message", &mut [&mut writer, &mut reader], || {
        reading.take(&mut subscriber).is_some()
    });
    // It has all messages, and misses none when it disconnects.
    until("the acknowledgement", &mut [&mut writer, &mut reader], || {
        !crate::replication::routing::reconcile::has_backlog(&writing.topic)
    });
    drop(reader);
    until("the reader to be given up, too", &mut [&mut writer], || {
        writing.topic.destinations().is_empty()
    });
    assert_eq!(writing.missed(), (DEPTH, 1));
}

#[test]
fn lost_publisher_is_reported_to_subscribing_nodes() {
    let (writing, reading) = (TestNode::new(1), TestNode::new(2));
    let (mut writer, mut reader, mut subscriber) = replicators(&writing, &reading);
    let dead =
        writing.node_segment.participants().admit(PidFd::of_this_process().unwrap()).unwrap();
    let ids = [0, 1].map(|_| writing.topic.claim(dead).unwrap());
    writing.publish(0).unwrap();
    writing
        .topic
        .reclaim_in(&writing.caller(), dead, writing.local.control(), writing.inbound.control())
        .unwrap();
    writer.topics_changed(&[NUMBER].into());
    until("both to be reported", &mut [&mut writer, &mut reader], || {
        reading.topic.publishers_lost(Direction::Inbound) == 2
    });
    for (number, publisher) in ids.into_iter().enumerate() {
        let lost = LostPublisher { node: [1; 16], publisher };
        assert_eq!(reading.topic.publisher_lost(Direction::Inbound, number as u64), Some(lost));
    }
    until("the message", &mut [&mut writer, &mut reader], || {
        reading.take(&mut subscriber).is_some()
    });
    // The next service may repeat a report: the receiver ignores what it knows.
    writing.topic.set_losses_sent(0);
    writer.topics_changed(&[NUMBER].into());
    let late = writing.topic.claim(dead).unwrap();
    until("the report to be repeated", &mut [&mut writer, &mut reader], || {
        writing.topic.losses_sent() == 2
    });
    writing
        .topic
        .reclaim_in(&writing.caller(), dead, writing.local.control(), writing.inbound.control())
        .unwrap();
    writer.topics_changed(&[NUMBER].into());
    until("another report", &mut [&mut writer, &mut reader], || {
        reading.topic.publishers_lost(Direction::Inbound) > 2
    });
    let lost = LostPublisher { node: [1; 16], publisher: late };
    assert_eq!(reading.topic.publisher_lost(Direction::Inbound, 2), Some(lost));
    // A publisher that died together with the service, before any report.
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
    until("the last report", &mut [&mut writer, &mut reader], || {
        reading.topic.publishers_lost(Direction::Inbound) > 3
    });
    let lost = LostPublisher { node: [1; 16], publisher: last };
    assert_eq!(reading.topic.publisher_lost(Direction::Inbound, 3), Some(lost));
    // No publisher died at the reading node.
    assert_eq!(
        writing.topic.publishers_lost(Direction::Inbound)
            + reading.topic.publishers_lost(Direction::Local),
        0
    );
}

#[test]
fn reader_counts_dropped_messages_also_before_the_first() {
    let settings = SharedSettings { reliability: Reliability::DropOldest, ..settings() };
    let (writing, reading) = (TestNode::with(1, settings), TestNode::with(2, settings));
    // Messages published before are not counted.
    let _local = writing.topic.local().subscribe(&writing.caller()).unwrap();
    (1..4).for_each(|number| writing.publish(number).unwrap());
    let (mut writer, mut reader, mut subscriber) = replicators(&writing, &reading);
    const LAST: u64 = 100 * DEPTH;
    let mut taken = 0;
    for number in 4..=LAST {
        writing.publish(number).unwrap();
        // Some messages are dropped there, and some of the received ones before they are read.
        if number > LAST / 2 && number % (2 * DEPTH + 1) == 0 {
            for _ in 0..10 {
                writer.turn();
                reader.turn();
                std::thread::sleep(Duration::from_micros(200));
            }
        }
    }
    until("the last message", &mut [&mut writer, &mut reader], || {
        let Some(entry) = reading.take(&mut subscriber) else { return false };
        taken += 1;
        entry.sequence == LAST
    });
    assert_eq!(taken + reading.missed_messages(), LAST - 3);
}
