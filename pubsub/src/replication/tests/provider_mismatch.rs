//! Nodes whose provider is none that this one's understands.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::peers::SessionId;
use crate::replication::control_messages::ControlMessage;
use crate::replication::{ConnectionMessage, Provider, TopicParameters, WorkerOptions, Workers};

/// What is told of the topic and of the other node: in what the two differ, and whether there is a
/// connection.
fn told(replication: &mut Replicator) -> (Vec<String>, Option<bool>) {
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

fn tell(other: &Peers, session: SessionId, letter: &ControlMessage) {
    other.tell(NodeId([1; 16]), session, letter.encode()).unwrap();
}

fn other_provider() -> ControlMessage {
    ControlMessage::Provider(Provider { name: "carrier-pigeon".into(), protocol: 1, format: 1 })
}

/// That it has the same provider.
fn same_provider(replication: &Replicator) -> ControlMessage {
    ControlMessage::Provider(replication.provider.clone().unwrap())
}

#[test]
fn nothing_is_kept_for_a_node_that_says_that_it_has_another_provider() {
    let place = TestNode::new(1);
    let mut replication =
        place.replication(&NetworkOptions { lost_after: TEST_TIMEOUT, ..network() });
    let other = subscribing_peer(&replication, 2);
    replication.set_topics(place.topics(true, false));
    until("the topic to be replication started", &mut [&mut replication], || {
        place.topic.is_replicated()
    });
    assert_eq!(told(&mut replication), (Vec::new(), Some(true)));
    let session = session(&other);
    tell(&other, session, &other_provider());
    until("nothing to be kept for it", &mut [&mut replication], || !place.is_owed());
    assert_eq!(told(&mut replication), (vec!["provider".to_owned()], Some(false)));
    place.assert_nothing_retained();
    // It has the same one later.
    tell(&other, session, &same_provider(&replication));
    until("the topic to be replication started", &mut [&mut replication], || {
        place.topic.is_replicated()
    });
    assert_eq!(told(&mut replication), (Vec::new(), Some(true)));
}

#[test]
fn two_nodes_with_other_providers_both_say_so() {
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
    while [&mut writer, &mut reader].map(told) != [differs.clone(), differs.clone()] {
        assert!(Instant::now() < end, "{:?}", [&mut writer, &mut reader].map(told));
        writer.turn();
        reader.turn();
        std::thread::sleep(Duration::from_millis(2));
    }
    until("nothing to be kept", &mut [&mut writer, &mut reader], || !writing.is_owed());
    writing.assert_nothing_retained();
}

/// An address at which nobody is: 127.0.0.1, port 1, as a `sockaddr_in` has it.
const FROM: [u8; 16] = [2, 0, 0, 1, 127, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0];

#[test]
fn who_wishes_before_it_has_said_its_provider_is_told_to_ask_again() {
    let place = TestNode::new(1);
    let mut replication = place.replication(&network());
    let other = subscribing_peer(&replication, 2);
    replication.set_topics(place.topics(false, true));
    let mut events = Vec::new();
    until("its interests", &mut [&mut replication], || {
        events.extend(std::iter::from_fn(|| other.next_event()));
        events.iter().any(|event| matches!(event, PeerEvent::Interests { .. }))
    });
    let PeerEvent::Connected { session, .. } = events[0] else { panic!("{events:?}") };
    let facts = TopicParameters { number: 1, largest: 64, depth: DEPTH as u32 };
    let answer = |replication: &mut Replicator, connection: u64| {
        let (from, lane_addresses) = (FROM.to_vec(), Vec::new());
        let terms = ConnectionMessage::ConnectRequest { connection, facts, from, lane_addresses };
        tell(&other, session, &ControlMessage::ConnectionMessage { topic: NAME.into(), terms });
        let mut answer = None;
        until("an answer", &mut [replication], || {
            answer = match other.next_event() {
                Some(PeerEvent::ControlMessage { bytes, .. }) => {
                    match ControlMessage::decode(&bytes).unwrap() {
                        ControlMessage::ConnectionMessage { terms, .. } => Some(terms),
                        // It says which one it has when that is open.
                        ControlMessage::Provider(_) => None,
                        letter => panic!("{letter:?}"),
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
    turn_until(&mut replication, |replication| replication.provider.is_some());
    tell(&other, session, &same_provider(&replication));
    assert!(matches!(answer(&mut replication, 2), ConnectionMessage::Offer { connection: 2, .. }));
    tell(&other, session, &other_provider());
    assert!(matches!(
        answer(&mut replication, 3),
        ConnectionMessage::Restart { connection: 3, .. }
    ));
}

#[test]
fn letters_that_are_none_are_refused_and_do_no_harm() {
    let (writing, reading) = (TestNode::new(1), TestNode::new(2));
    let (mut writer, mut reader, mut subscriber) = carriers(&writing, &reading);
    let others = [&writer, &reader].map(|replication| {
        let other = subscribing_peer(replication, 3);
        other.set_interests([]).unwrap();
        other
    });
    let garbage: [&[u8]; 5] = [&[], &[9, 9], &[1, 1, 0, 1, 2, 3], &[1; 300], &[1; 20_000]];
    for (other, node) in others.iter().zip([1, 2]) {
        let mut session = None;
        until("a session", &mut [&mut writer, &mut reader], || {
            if let Some(PeerEvent::Connected { session: begun, .. }) = other.next_event() {
                session = Some(begun);
            }
            session.is_some()
        });
        for bytes in garbage {
            other.tell(NodeId([node; 16]), session.unwrap(), bytes.to_vec()).unwrap();
        }
    }
    for number in 0..20 {
        until("a message", &mut [&mut writer, &mut reader], || {
            let _ = writing.publish(number);
            reading.take(&mut subscriber).is_some()
        });
    }
}

/// Holds up the thread that opens a provider.
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
fn provider_that_opens_when_all_nodes_have_left_is_taken() {
    static MAY_OPEN: AtomicBool = AtomicBool::new(false);
    fn hang(count: usize, options: &WorkerOptions, local: IpAddr) -> crate::Result<Workers> {
        wait_for(&MAY_OPEN);
        Workers::start(count, options, local)
    }
    let place = TestNode::new(1);
    let lost_after = Duration::from_secs(1);
    let mut replication = place.replication(&NetworkOptions { lost_after, ..network() });
    replication.start_workers = hang;
    let other = subscribing_peer(&replication, 2);
    turn_until(&mut replication, |replication| replication.worker_start.is_some());
    drop(other);
    turn_until(&mut replication, |replication| replication.nodes.is_empty());
    let late = Instant::now() + lost_after;
    turn_until(&mut replication, |_| Instant::now() >= late);
    assert_ne!(
        replication.max_poll_timeout(Instant::now()),
        Some(Duration::ZERO),
        "it does not rest"
    );
    MAY_OPEN.store(true, Ordering::Release);
    turn_until(&mut replication, |replication| {
        replication.worker_start.is_none() && replication.workers.is_some()
    });
}

#[test]
fn a_provider_that_hangs_holds_up_only_messages_between_nodes() {
    static MAY_OPEN: AtomicBool = AtomicBool::new(false);
    fn hang(count: usize, options: &WorkerOptions, local: IpAddr) -> crate::Result<Workers> {
        wait_for(&MAY_OPEN);
        Workers::start(count, options, local)
    }
    let place = TestNode::new(1);
    let lost_after = Duration::from_secs(1);
    let mut replication = place.replication(&NetworkOptions { lost_after, ..network() });
    replication.start_workers = hang;
    let other = subscribing_peer(&replication, 2);
    replication.set_topics(place.topics(true, false));
    let end = Instant::now() + TEST_TIMEOUT;
    let (mut is_told, mut knows_interests) = (false, false);
    while !is_told || !knows_interests {
        assert!(Instant::now() < end, "told: {is_told}, knows interests: {knows_interests}");
        let turn = Instant::now();
        replication.turn();
        assert!(turn.elapsed() < TEST_TIMEOUT / 4, "the service waited for a provider");
        is_told |= replication.rows().iter().any(
            |row| matches!(row, Row::ReplicationError { why, .. } if why.contains("takes longer than 500ms")),
        );
        knows_interests |= std::iter::from_fn(|| other.next_event())
            .any(|event| matches!(event, PeerEvent::Interests { .. }));
        std::thread::sleep(Duration::from_millis(2));
    }
    assert!(!place.topic.is_replicated());
    MAY_OPEN.store(true, Ordering::Release);
    until("the topic to be replication started", &mut [&mut replication], || {
        place.topic.is_replicated()
    });
    assert!(!replication.rows().iter().any(|row| matches!(row, Row::ReplicationError { .. })));
}
