//! Unit tests of frames, connections and interests.

use std::time::Duration;

use proptest::prelude::*;

use super::close_reason::{CloseReason, GoodbyeReason};
use super::framing::ReceiveBuffer;
use super::fuzzing;
use super::heartbeats::{ConnectionProtocol, ReceivedFrame};
use super::identity::SessionId;
use super::interests::{
    Interest, InterestChange, InterestSender, Interests, MAX_INTERESTS, PeerInterests,
    collect_interests,
};
use super::node_protocol::{self, Frame};
use super::protocol_limits::{
    MAGIC, MAX_CONTROL_MESSAGE_LENGTH, MAX_FRAME_LENGTH, MAX_HANDSHAKE_FRAME_LENGTH,
    MAX_PROTOCOL_FRAME_LENGTH, VERSION,
};
use super::{Hello, PeerAddress, ServiceInstance, Timing};
use crate::ids::NodeId;
use crate::settings::{MAX_TOPIC_NAME, TopicSettings};

const SECOND: Duration = Duration::from_secs(1);

fn hello(number: u8) -> Hello {
    Hello {
        identity: NodeId([number; 16]),
        instance: ServiceInstance { started: 7, nonce: 8 },
        label: format!("node {number}"),
        capabilities: 1,
        lost_after: 3000,
        listens: Some("[::1]:7".parse().unwrap()),
    }
}

fn interest(topic: &str) -> Interest {
    Interest::new(topic, true, false, &TopicSettings::default()).unwrap()
}

fn frames() -> Vec<Frame> {
    let address = "10.1.2.3:4".parse().unwrap();
    vec![
        Frame::Claim { instead_of: Some(SessionId(u64::MAX)) },
        Frame::Accept { session: SessionId(1) },
        Frame::Goodbye { why: GoodbyeReason::Leaving, detail: "bye".to_owned() },
        Frame::Heartbeat,
        Frame::Interests {
            number: 1,
            changes: vec![
                InterestChange::Set(interest("a")),
                InterestChange::Removed("b".to_owned()),
            ],
        },
        Frame::ControlMessage(vec![1, 2, 3]),
        Frame::RequestPeers,
        Frame::PeerList { others: vec![PeerAddress { node: NodeId([3; 16]), address }] },
    ]
}

#[test]
fn encoded_frame_is_decoded_and_truncated_one_refused() {
    for frame in frames() {
        let mut body = node_protocol::encode(&frame);
        assert_eq!(node_protocol::decode(&body), Ok(frame));
        for length in 0..body.len() {
            assert!(node_protocol::decode(&body[..length]).is_err());
        }
        body.push(0);
        assert!(matches!(node_protocol::decode(&body), Err(CloseReason::Malformed(_))));
    }
}

#[test]
fn hello_of_another_protocol_or_version_is_refused() {
    let body = hello(1).encode();
    assert_eq!(body[..8], MAGIC);
    assert_eq!(Hello::decode(&body), Ok(hello(1)));
    let mut other = body.clone();
    other[8] += 1;
    assert_eq!(Hello::decode(&other), Err(CloseReason::VersionMismatch(VERSION + 1)));
    let mut other = body.clone();
    other[0] ^= 1;
    assert!(matches!(Hello::decode(&other), Err(CloseReason::Malformed(_))));
    for wrong in [Hello { label: "x".repeat(65), ..hello(1) }, Hello { lost_after: 99, ..hello(1) }]
    {
        assert!(matches!(Hello::decode(&wrong.encode()), Err(CloseReason::Malformed(_))));
    }
    let colourful = Hello { label: "\u{1b}[31m".to_owned(), ..hello(1) };
    assert_eq!(Hello::decode(&colourful.encode()).unwrap().label, "\u{fffd}[31m");
}

#[test]
fn too_long_frame_is_refused_by_its_length() {
    let longest = Frame::ControlMessage(vec![7; MAX_CONTROL_MESSAGE_LENGTH]);
    let body = node_protocol::encode(&longest);
    assert!(body.len() <= MAX_FRAME_LENGTH);
    assert_eq!(node_protocol::decode(&body), Ok(longest));
    let changes = vec![InterestChange::Removed("x".to_owned()); MAX_PROTOCOL_FRAME_LENGTH];
    let body = node_protocol::encode(&Frame::Interests { number: 1, changes });
    assert!(node_protocol::decode(&body).is_err());
    for length in [0, MAX_HANDSHAKE_FRAME_LENGTH as u32 + 1, u32::MAX] {
        let mut receive_buffer = ReceiveBuffer::default();
        receive_buffer.add(&length.to_le_bytes());
        assert!(receive_buffer.next(MAX_HANDSHAKE_FRAME_LENGTH).is_err());
    }
}

proptest! {
    #[test]
    fn frames_are_reassembled_from_any_fragments(
        bodies in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 1..50), 0..20),
        cuts in proptest::collection::vec(1_usize..40, 1..10),
    ) {
        let wire: Vec<u8> = bodies
            .iter()
            .flat_map(|body| (body.len() as u32).to_le_bytes().into_iter().chain(body.clone()))
            .collect();
        let (mut rest, mut receive_buffer, mut seen) = (&wire[..], ReceiveBuffer::default(), Vec::new());
        for cut in cuts.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (some, more) = rest.split_at(rest.len().min(*cut));
            rest = more;
            receive_buffer.add(some);
            while let Some(body) = receive_buffer.next(64).unwrap() {
                seen.push(body.to_vec());
            }
        }
        prop_assert_eq!(seen, bodies);
    }

    #[test]
    fn any_bytes_are_handled_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = fuzzing::fuzz_session(&bytes);
        let mut session = fuzzing::valid_handshake();
        session.extend(&bytes);
        let _ = fuzzing::fuzz_session(&session);
        let _ = fuzzing::fuzz_interests(&bytes);
    }

    #[test]
    fn mutated_frames_are_handled_without_panic(
        which in proptest::sample::subsequence((0..8).collect::<Vec<_>>(), 0..8),
        changes in proptest::collection::vec((any::<u16>(), any::<u8>()), 0..6),
    ) {
        let mut session = fuzzing::valid_handshake();
        let mut interests = Vec::new();
        for frame in which.into_iter().map(|which| frames().remove(which)) {
            let body = node_protocol::encode(&frame);
            session.extend((body.len() as u32).to_le_bytes());
            session.extend(&body);
            interests.extend((body.len() as u16).to_le_bytes());
            interests.extend(&body);
        }
        for bytes in [&mut session, &mut interests] {
            for (at, byte) in &changes {
                let length = bytes.len().max(1);
                if let Some(changed) = bytes.get_mut(usize::from(*at) % length) {
                    *changed = *byte;
                }
            }
        }
        let _ = fuzzing::fuzz_session(&session);
        let _ = fuzzing::fuzz_interests(&interests);
    }

    #[test]
    fn received_interests_converge_to_the_sent_ones(
        states in proptest::collection::vec(
            proptest::collection::btree_map(0_u16..600, 1_u32..4, 0..600), 1..6),
        pauses in proptest::collection::vec(0_usize..4, 6),
    ) {
        let (mut interest_sender, mut peer_interests) = (InterestSender::new(), PeerInterests::default());
        let mut known = std::collections::BTreeMap::new();
        let mut all = Interests::new();
        let mut exchange = |interest_sender: &mut InterestSender, all: &Interests, most: usize| {
            for _ in 0..most {
                let Some((number, changes)) = interest_sender.next(all) else { break };
                let body = node_protocol::encode(&Frame::Interests { number, changes: changes.clone() });
                assert!(body.len() <= MAX_PROTOCOL_FRAME_LENGTH);
                peer_interests.apply(number, &changes).unwrap();
                for change in changes {
                    match change {
                        InterestChange::Set(set) => drop(known.insert(set.topic.clone(), set)),
                        InterestChange::Removed(topic) => drop(known.remove(&topic).unwrap()),
                    }
                }
            }
            known.clone()
        };
        for (state, pause) in states.iter().zip(pauses) {
            let interests = state.iter().map(|(topic, depth)| {
                let settings = TopicSettings { depth: *depth, ..TopicSettings::default() };
                let topic = format!("{topic:0>0$}", MAX_TOPIC_NAME);
                Interest::new(topic, true, true, &settings).unwrap()
            });
            all = collect_interests(interests).unwrap();
            interest_sender.mark_changed();
            exchange(&mut interest_sender, &all, pause);
        }
        let known = exchange(&mut interest_sender, &all, usize::MAX);
        prop_assert!(known.values().eq(all.values().map(|interest| &**interest)));
        prop_assert_eq!(interest_sender.next(&all), None);
    }
}

#[test]
fn invalid_interests_are_refused() {
    let set = |interest: Interest| vec![InterestChange::Set(interest)];
    let mut odd = interest("a");
    odd.settings.depth = 0;
    for (number, changes) in [
        (2, set(interest("a"))),
        (0, set(interest("a"))),
        (1, vec![InterestChange::Removed("a".to_owned())]),
        (1, [set(interest("a")), set(interest("a"))].concat()),
        (1, set(interest(""))),
        (1, set(interest(&"x".repeat(MAX_TOPIC_NAME + 1)))),
        (1, set(Interest { publishes: false, ..interest("a") })),
        (1, set(odd)),
    ] {
        let refused = PeerInterests::default().apply(number, &changes);
        assert!(matches!(refused, Err(CloseReason::Malformed(_))), "{changes:?}");
    }
    let many: Vec<_> = (0..=MAX_INTERESTS)
        .map(|topic| InterestChange::Set(interest(&topic.to_string())))
        .collect();
    let mut peer_interests = PeerInterests::default();
    assert_eq!(peer_interests.apply(1, &many[..MAX_INTERESTS]), Ok(()));
    assert!(peer_interests.apply(2, &many[MAX_INTERESTS..]).is_err());
}

#[test]
fn loans_are_not_sent_to_other_nodes() {
    let of = |loans| {
        let settings = TopicSettings { loans, ..TopicSettings::default() };
        Interest::new("a", true, false, &settings).unwrap()
    };
    let (mut interest_sender, mut peer_interests) =
        (InterestSender::new(), PeerInterests::default());
    let (number, changes) = interest_sender.next(&collect_interests([of(7)]).unwrap()).unwrap();
    let frame = Frame::Interests { number, changes };
    let usual = Frame::Interests { number, changes: vec![InterestChange::Set(interest("a"))] };
    assert_eq!(node_protocol::encode(&frame), node_protocol::encode(&usual));
    let Frame::Interests { changes, .. } = frame else { panic!("not interests") };
    peer_interests.apply(number, &changes).unwrap();
    // A topic created again with other loans is no change for other nodes.
    interest_sender.mark_changed();
    assert_eq!(interest_sender.next(&collect_interests([of(8)]).unwrap()), None);
}

#[test]
fn own_interests_are_checked_before_sending() {
    use crate::ErrorKind::{InvalidArgument, TooMany};
    let kind = |interests: Vec<Interest>| collect_interests(interests).unwrap_err().kind();
    assert_eq!(kind(vec![interest("a"), interest("a")]), InvalidArgument);
    assert_eq!(kind(vec![interest("")]), InvalidArgument);
    let many = (0..=MAX_INTERESTS).map(|topic| interest(&topic.to_string())).collect();
    assert_eq!(kind(many), TooMany);
    let nothing = Interest { publishes: false, subscribes: false, ..interest("a") };
    assert!(collect_interests([nothing]).unwrap().is_empty());
}

fn session(number: u8, lost_after: Duration) -> ConnectionProtocol {
    let mut me = hello(number);
    me.lost_after = lost_after.as_millis() as u32;
    ConnectionProtocol::new(&me, &Timing::new(lost_after), Duration::ZERO)
}

/// Delivers the queued bytes of one side to the other.
fn deliver(
    from: &mut ConnectionProtocol,
    to: &mut ConnectionProtocol,
    now: Duration,
) -> Vec<Result<ReceivedFrame, CloseReason>> {
    while !from.output().is_empty() {
        let bytes = from.output().to_vec();
        from.sent(bytes.len(), now);
        to.receive(&bytes, now);
    }
    let mut received = Vec::new();
    loop {
        match to.next() {
            Ok(None) => return received,
            Ok(Some(some)) => received.push(Ok(some)),
            Err(reason) => {
                received.push(Err(reason));
                return received;
            }
        }
    }
}

#[test]
fn handshake_and_session_allow_different_frames() {
    for frame in frames() {
        let is_first = matches!(frame, Frame::Claim { .. } | Frame::Accept { .. });
        let is_last = matches!(frame, Frame::Goodbye { .. });
        for is_established in [false, true] {
            let (mut one, mut two) = (session(1, SECOND), session(2, SECOND));
            if is_established {
                two.establish(Duration::ZERO);
            }
            one.send(&frame).unwrap();
            let received = deliver(&mut one, &mut two, Duration::ZERO);
            assert_eq!(received.len(), 2);
            assert_eq!(received[1].is_ok(), is_first != is_established || is_last, "{frame:?}");
        }
    }
}

#[test]
fn heartbeats_follow_the_shorter_timeout() {
    let (mut one, mut two) = (session(1, SECOND), session(2, 60 * SECOND));
    let mut now = Duration::ZERO;
    deliver(&mut one, &mut two, now);
    deliver(&mut two, &mut one, now);
    one.establish(now);
    two.establish(now);
    let mut heartbeats = 0;
    while now < 20 * SECOND {
        let next = one.deadline().unwrap().min(two.deadline().unwrap());
        assert!(next > now);
        now = next;
        one.tick(now).unwrap();
        two.tick(now).unwrap();
        deliver(&mut one, &mut two, now);
        heartbeats += deliver(&mut two, &mut one, now).len();
    }
    // Four a second, and no more.
    assert_eq!(heartbeats, 80);
    // While reading is paused, silence is not the peer's fault.
    one.pause_reading(true, now);
    assert_eq!(one.tick(now + 5 * SECOND), Ok(()));
    one.pause_reading(false, now + 5 * SECOND);
    assert_eq!(one.tick(now + 5 * SECOND), Ok(()));
    assert_eq!(
        one.tick(now + 6 * SECOND),
        Err(CloseReason::Closed(GoodbyeReason::HeartbeatTimeout))
    );
}

#[test]
fn trickled_hello_exceeds_the_handshake_timeout() {
    let (mut one, mut two) = (session(1, SECOND), session(2, SECOND));
    let until = two.deadline().unwrap();
    let bytes = one.output().to_vec();
    let mut now = Duration::ZERO;
    for byte in bytes.chunks(1).cycle() {
        now += Duration::from_millis(100);
        two.receive(byte, now);
        if now >= until {
            break;
        }
        assert_eq!(two.tick(now), Ok(()));
    }
    assert_eq!(two.tick(now), Err(CloseReason::Closed(GoodbyeReason::HandshakeTimeout)));
    let _ = one.take_final_bytes(None, "");
}

#[test]
fn full_send_queue_refuses_control_messages() {
    let mut one = session(1, SECOND);
    one.establish(Duration::ZERO);
    let message = Frame::ControlMessage(vec![0; 1 << 20 >> 1]);
    let sent = (0..100).take_while(|_| one.send(&message).is_ok()).count();
    assert_eq!(sent, 15);
    assert_eq!(one.send(&message), Err(CloseReason::Closed(GoodbyeReason::SendQueueFull)));
    // The reserve still takes protocol frames.
    assert_eq!(one.send(&Frame::Heartbeat), Ok(()));
    while !one.output().is_empty() {
        let waiting = one.output().len();
        one.sent(waiting, Duration::ZERO);
    }
    assert_eq!(one.send(&message), Ok(()));
}

fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let corpus = format!("{}/../fuzz/corpus/{target}", env!("CARGO_MANIFEST_DIR"));
    let entries = std::fs::read_dir(corpus).expect("the corpus is part of the repository");
    let read = entries.map(|entry| {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        (name, std::fs::read(path).unwrap())
    });
    let found: Vec<_> = read.collect();
    assert!(!found.is_empty(), "the corpus is empty");
    found
}

#[test]
fn fuzz_corpus_of_sessions_runs_without_panic() {
    for (name, bytes) in corpus("peer_session") {
        let outcome = fuzzing::fuzz_session(&bytes);
        if name.starts_with("honest") {
            assert!(outcome.events > 0, "{name} caused no event");
        }
        let mut session = fuzzing::valid_handshake();
        session.extend(&bytes);
        let _ = fuzzing::fuzz_session(&session);
    }
}

#[test]
fn fuzz_corpus_of_interests_runs_without_panic() {
    for (name, bytes) in corpus("peer_directory") {
        let accepted = fuzzing::fuzz_interests(&bytes);
        assert_eq!(accepted > 0, name.starts_with("honest"), "{name}");
    }
}
