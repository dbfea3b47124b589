//! Nodes with incompatible providers.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::peers::SessionId;
use crate::replication::control_messages::ControlMessage;
use crate::replication::{ConnectionMessage, Provider, TopicParameters, WorkerOptions, Workers};

/// The reported differences of the topic, and whether the other node is connected.
fn reported(replication: &mut Replicator) -> (Vec<String>, Option<bool>) {
    let (mut differs_in, mut connected) = (Vec::new(), None);
    for row in replication.rows() {
        match row {
            Row::IncompatibleTopic { differs, .. } => differs_in.extend(differs),
            Row::Peer { is_connected, .. } => connected = Some(is_connected),
            _ => {}
        }
    }
    (differs_in, connected)
}

fn session(other: &Peers) -> SessionId {
    let session = std::iter::from_fn(|| other.next_event()).find_map(|event| match event {
        PeerEvent::Connected { session, .. } => Some(session),
        _ => None,
    });
    session.unwrap()
}

fn send(other: &Peers, session: SessionId, message: &ControlMessage) {
    other.send(NodeId([1; 16]), session, message.encode()).unwrap();
}

fn other_provider() -> ControlMessage {
    ControlMessage::Provider(Provider { name: "carrier-pigeon".into(), protocol: 1, format: 1 })
}

/// A message with the local provider.
fn same_provider(replication: &Replicator) -> ControlMessage {
    ControlMessage::Provider(replication.remote_nodes.provider().cloned().unwrap())
}

#[test]
fn nothing_is_retained_for_a_node_with_another_provider() {
    let node = TestNode::new(1);
    let mut replication =
        node.replication(&NetworkOptions { lost_after: TEST_TIMEOUT, ..network() });
    let other = subscribing_peer(&replication, 2);
    replication.set_topics(node.topics(true, false));
    until("the topic to be replicated", &mut [&mut replication], || node.topic.is_replicated());
    assert_eq!(reported(&mut replication), (Vec::new(), Some(true)));
    let session = session(&other);
    send(&other, session, &other_provider());
    until("retained messages to be released", &mut [&mut replication], || !node.is_retained());
    assert_eq!(reported(&mut replication), (vec!["provider".to_owned()], Some(false)));
    node.assert_nothing_retained();
    // It changes to the same provider later.
    send(&other, session, &same_provider(&replication));
    until("the topic to be replicated", &mut [&mut replication], || node.topic.is_replicated());
    assert_eq!(reported(&mut replication), (Vec::new(), Some(true)));
}

#[test]
fn provider_mismatch_is_reported_by_both_nodes() {
    let (writing, reading) = (TestNode::new(1), TestNode::new(2));
    let of = |provider: &str| Some(provider.to_owned());
    let mut writer = writing.replication(&NetworkOptions { provider: of("net"), ..network() });
    let peers = vec![writer.listens().unwrap()];
    let provider = of("tcp;ofi_rxm");
    let mut reader = reading.replication(&NetworkOptions { peers, provider, ..network() });
    writer.set_topics(writing.topics(true, false));
    reader.set_topics(reading.topics(false, true));
    let differs = (vec!["provider".to_owned()], Some(false));
    let end = Instant::now() + TEST_TIMEOUT;
    while [&mut writer, &mut reader].map(reported) != [differs.clone(), differs.clone()] {
        assert!(Instant::now() < end, "{:?}", [&mut writer, &mut reader].map(reported));
        writer.turn();
        reader.turn();
        std::thread::sleep(Duration::from_millis(2));
    }
    until("retained messages to be released", &mut [&mut writer, &mut reader], || {
        !writing.is_retained()
    });
    writing.assert_nothing_retained();
}

/// An unused address: 127.0.0.1, port 1, as a `sockaddr_in`.
const FROM: [u8; 16] = [2, 0, 0, 1, 127, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0];

#[test]
fn connect_request_before_provider_is_answered_with_restart() {
    let node = TestNode::new(1);
    let mut replication = node.replication(&network());
    let other = subscribing_peer(&replication, 2);
    replication.set_topics(node.topics(false, true));
    let mut events = Vec::new();
    until("its interests", &mut [&mut replication], || {
        events.extend(std::iter::from_fn(|| other.next_event()));
        events.iter().any(|event| matches!(event, PeerEvent::Interests { .. }))
    });
    let PeerEvent::Connected { session, .. } = events[0] else { panic!("{events:?}") };
    let parameters = TopicParameters { number: 1, largest: 64, depth: DEPTH as u32 };
    let answer = |replication: &mut Replicator, connection: u64| {
        let (from, lane_addresses) = (FROM.to_vec(), Vec::new());
        let message = ConnectionMessage::ConnectRequest {
            connection,
            parameters,
            from,
            lane_addresses,
            direct: None,
        };
        send(&other, session, &ControlMessage::ConnectionMessage { topic: NAME.into(), message });
        let mut answer = None;
        until("an answer", &mut [replication], || {
            answer = match other.next_event() {
                Some(PeerEvent::ControlMessage { bytes, .. }) => {
                    match ControlMessage::decode(&bytes).unwrap() {
                        ControlMessage::ConnectionMessage { message, .. } => Some(message),
                        // It sends its provider once that is open.
                        ControlMessage::Provider(_) => None,
                        message => panic!("{message:?}"),
                    }
                }
                Some(event) => panic!("{event:?}"),
                None => None,
            };
            answer.is_some()
        });
        answer.unwrap()
    };
    assert!(matches!(
        answer(&mut replication, 1),
        ConnectionMessage::Restart { connection: 1, .. }
    ));
    turn_until(&mut replication, |replication| replication.remote_nodes.provider().is_some());
    send(&other, session, &same_provider(&replication));
    assert!(matches!(answer(&mut replication, 2), ConnectionMessage::Offer { connection: 2, .. }));
    send(&other, session, &other_provider());
    assert!(matches!(
        answer(&mut replication, 3),
        ConnectionMessage::Restart { connection: 3, .. }
    ));
}

#[test]
fn malformed_control_messages_are_refused() {
    let (writing, reading) = (TestNode::new(1), TestNode::new(2));
    let (mut writer, mut reader, mut subscriber) = replicators(&writing, &reading);
    let others = [&writer, &reader].map(|replication| {
        let other = subscribing_peer(replication, 3);
        other.set_interests([]).unwrap();
        other
    });
    let garbage: [&[u8]; 5] = [&[], &[9, 9], &[1, 1, 0, 1, 2, 3], &[1; 300], &[1; 20_000]];
    for (other, node) in others.iter().zip([1, 2]) {
        let mut session = None;
        until("a session", &mut [&mut writer, &mut reader], || {
            if let Some(PeerEvent::Connected { session: new, .. }) = other.next_event() {
                session = Some(new);
            }
            session.is_some()
        });
        for bytes in garbage {
            other.send(NodeId([node; 16]), session.unwrap(), bytes.to_vec()).unwrap();
        }
    }
    for number in 0..20 {
        until("a message", &mut [&mut writer, &mut reader], || {
            let _ = writing.publish(number);
            reading.take(&mut subscriber).is_some()
        });
    }
}

/// Blocks the thread that opens a provider.
fn wait_for(flag: &AtomicBool) {
    let end = Instant::now() + TEST_TIMEOUT;
    while !flag.load(Ordering::Acquire) && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn turn_until(replication: &mut Replicator, is_so: impl Fn(&Replicator) -> bool) {
    let end = Instant::now() + TEST_TIMEOUT;
    while !is_so(replication) {
        assert!(Instant::now() < end);
        replication.turn();
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn provider_opened_after_all_nodes_left_is_used() {
    static MAY_OPEN: AtomicBool = AtomicBool::new(false);
    fn hang(count: usize, options: &WorkerOptions, local: IpAddr) -> crate::Result<Workers> {
        wait_for(&MAY_OPEN);
        Workers::start(count, options, local)
    }
    let node = TestNode::new(1);
    let lost_after = Duration::from_secs(1);
    let mut replication = node.replication(&NetworkOptions { lost_after, ..network() });
    replication.worker_pool.start_with(hang);
    let other = subscribing_peer(&replication, 2);
    turn_until(&mut replication, |replication| replication.worker_pool.is_opening());
    drop(other);
    turn_until(&mut replication, |replication| replication.remote_nodes.is_empty());
    let late = Instant::now() + lost_after;
    turn_until(&mut replication, |_| Instant::now() >= late);
    assert_ne!(
        replication.max_poll_timeout(Instant::now()),
        Some(Duration::ZERO),
        "the service polls without pause"
    );
    MAY_OPEN.store(true, Ordering::Release);
    turn_until(&mut replication, |replication| {
        !replication.worker_pool.is_opening() && replication.worker_pool.is_running()
    });
}

#[test]
fn hanging_provider_blocks_only_replication() {
    static MAY_OPEN: AtomicBool = AtomicBool::new(false);
    fn hang(count: usize, options: &WorkerOptions, local: IpAddr) -> crate::Result<Workers> {
        wait_for(&MAY_OPEN);
        Workers::start(count, options, local)
    }
    let node = TestNode::new(1);
    let lost_after = Duration::from_secs(1);
    let mut replication = node.replication(&NetworkOptions { lost_after, ..network() });
    replication.worker_pool.start_with(hang);
    let other = subscribing_peer(&replication, 2);
    replication.set_topics(node.topics(true, false));
    let end = Instant::now() + TEST_TIMEOUT;
    let (mut is_reported, mut knows_interests) = (false, false);
    while !is_reported || !knows_interests {
        assert!(
            Instant::now() < end,
            "reported: {is_reported}, knows interests: {knows_interests}"
        );
        let turn = Instant::now();
        replication.turn();
        assert!(turn.elapsed() < TEST_TIMEOUT / 4, "the service waited for a provider");
        is_reported |= replication.rows().iter().any(
            |row| matches!(row, Row::ReplicationError { why, .. } if why.contains("takes longer than 500ms")),
        );
        knows_interests |= std::iter::from_fn(|| other.next_event())
            .any(|event| matches!(event, PeerEvent::Interests { .. }));
        std::thread::sleep(Duration::from_millis(2));
    }
    assert!(!node.topic.is_replicated());
    MAY_OPEN.store(true, Ordering::Release);
    until("the topic to be replicated", &mut [&mut replication], || node.topic.is_replicated());
    assert!(!replication.rows().iter().any(|row| matches!(row, Row::ReplicationError { .. })));
}
