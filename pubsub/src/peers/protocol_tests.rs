//! Frames, sessions and directories by themselves.

use std::time::Duration;

use proptest::prelude::*;

use super::close_reason::{CloseReason, GoodbyeReason};
use super::connection_protocol::{ConnectionProtocol, ReceivedFrame, Timing};
use super::framing::ReceiveBuffer;
use super::fuzzing;
use super::identity::{NodeId, ServiceInstance, SessionId};
use super::interests::{
    Interest, InterestChange, InterestSender, Interests, MAX_INTERESTS, PeerInterests, collect,
};
use super::protocol::{
    self, Frame, Hello, MAGIC, MAX_CONTROL_MESSAGE_LENGTH, MAX_FRAME_LENGTH,
    MAX_HANDSHAKE_FRAME_LENGTH, MAX_PROTOCOL_FRAME_LENGTH, PeerAddress, VERSION,
};
use crate::settings::{MAX_TOPIC_NAME, TopicSettings};

const SECOND: Duration = Duration::from_secs(1);

fn hello(number: u8) -> Hello {
    Hello {
        identity: NodeId([number; 16]),
        run: ServiceInstance { started: 7, chance: 8 },
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
        Frame::Goodbye { why: GoodbyeReason::Leaving, detail: "so long".to_owned() },
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
fn frames_are_read_as_they_were_written_and_nothing_may_follow() {
    for frame in frames() {
        let mut body = protocol::encode(&frame);
        assert_eq!(protocol::decode(&body), Ok(frame));
        for length in 0..body.len() {
            assert!(protocol::decode(&body[..length]).is_err());
        }
        body.push(0);
        assert!(matches!(protocol::decode(&body), Err(CloseReason::Malformed(_))));
    }
}

#[test]
fn a_hello_is_of_this_protocol_and_of_this_version() {
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
fn what_is_too_long_is_refused_by_its_length() {
    let longest = Frame::ControlMessage(vec![7; MAX_CONTROL_MESSAGE_LENGTH]);
    let body = protocol::encode(&longest);
    assert!(body.len() <= MAX_FRAME_LENGTH);
    assert_eq!(protocol::decode(&body), Ok(longest));
    let changes = vec![InterestChange::Removed("x".to_owned()); MAX_PROTOCOL_FRAME_LENGTH];
    let note = protocol::encode(&Frame::Interests { number: 1, changes });
    assert!(protocol::decode(&note).is_err());
    for length in [0, MAX_HANDSHAKE_FRAME_LENGTH as u32 + 1, u32::MAX] {
        let mut arrivals = ReceiveBuffer::default();
        arrivals.add(&length.to_le_bytes());
        assert!(arrivals.next(MAX_HANDSHAKE_FRAME_LENGTH).is_err());
    }
}

proptest! {
    #[test]
    fn bodies_come_out_as_they_went_in_however_they_are_cut(
        bodies in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 1..50), 0..20),
        cuts in proptest::collection::vec(1_usize..40, 1..10),
    ) {
        let wire: Vec<u8> = bodies
            .iter()
            .flat_map(|body| (body.len() as u32).to_le_bytes().into_iter().chain(body.clone()))
            .collect();
        let (mut rest, mut arrivals, mut seen) = (&wire[..], ReceiveBuffer::default(), Vec::new());
        for cut in cuts.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (some, more) = rest.split_at(rest.len().min(*cut));
            rest = more;
            arrivals.add(some);
            while let Some(body) = arrivals.next(64).unwrap() {
                seen.push(body.to_vec());
            }
        }
        prop_assert_eq!(seen, bodies);
    }

    #[test]
    fn no_bytes_make_a_node_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = fuzzing::hear(&bytes);
        let mut introduced = fuzzing::valid_handshake();
        introduced.extend(&bytes);
        let _ = fuzzing::hear(&introduced);
        let _ = fuzzing::fuzz_interests(&bytes);
    }

    #[test]
    fn nothing_like_what_is_right_makes_a_node_panic(
        which in proptest::sample::subsequence((0..8).collect::<Vec<_>>(), 0..8),
        changes in proptest::collection::vec((any::<u16>(), any::<u8>()), 0..6),
    ) {
        let mut right = fuzzing::valid_handshake();
        let mut interests = Vec::new();
        for frame in which.into_iter().map(|which| frames().remove(which)) {
            let body = protocol::encode(&frame);
            right.extend((body.len() as u32).to_le_bytes());
            right.extend(&body);
            interests.extend((body.len() as u16).to_le_bytes());
            interests.extend(&body);
        }
        for bytes in [&mut right, &mut interests] {
            for (at, byte) in &changes {
                let length = bytes.len().max(1);
                if let Some(changed) = bytes.get_mut(usize::from(*at) % length) {
                    *changed = *byte;
                }
            }
        }
        let _ = fuzzing::hear(&right);
        let _ = fuzzing::fuzz_interests(&interests);
    }

    #[test]
    fn a_listing_becomes_what_the_teller_knows(
        states in proptest::collection::vec(
            proptest::collection::btree_map(0_u16..600, 1_u32..4, 0..600), 1..6),
        pauses in proptest::collection::vec(0_usize..4, 6),
    ) {
        let (mut interest_sender, mut peer_interests) = (InterestSender::new(), PeerInterests::default());
        let mut known = std::collections::BTreeMap::new();
        let mut all = Interests::new();
        let mut hear = |interest_sender: &mut InterestSender, all: &Interests, most: usize| {
            for _ in 0..most {
                let Some((number, changes)) = interest_sender.next(all) else { break };
                let body = protocol::encode(&Frame::Interests { number, changes: changes.clone() });
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
            all = collect(interests).unwrap();
            interest_sender.mark_changed();
            hear(&mut interest_sender, &all, pause);
        }
        let known = hear(&mut interest_sender, &all, usize::MAX);
        prop_assert!(known.values().eq(all.values().map(|interest| &**interest)));
        prop_assert_eq!(interest_sender.next(&all), None);
    }
}

#[test]
fn a_listing_refuses_what_no_node_says() {
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
fn how_many_loans_there_are_is_nobody_elses_matter() {
    let of = |loans| {
        let settings = TopicSettings { loans, ..TopicSettings::default() };
        Interest::new("a", true, false, &settings).unwrap()
    };
    let (mut interest_sender, mut peer_interests) =
        (InterestSender::new(), PeerInterests::default());
    let (number, changes) = interest_sender.next(&collect([of(7)]).unwrap()).unwrap();
    let frame = Frame::Interests { number, changes };
    let usual = Frame::Interests { number, changes: vec![InterestChange::Set(interest("a"))] };
    assert_eq!(protocol::encode(&frame), protocol::encode(&usual));
    let Frame::Interests { changes, .. } = frame else { panic!("it is another frame") };
    peer_interests.apply(number, &changes).unwrap();
    // Made anew with others, it is the same for other nodes.
    interest_sender.mark_changed();
    assert_eq!(interest_sender.next(&collect([of(8)]).unwrap()), None);
}

#[test]
fn interests_are_checked_before_they_are_told() {
    use crate::ErrorKind::{InvalidArgument, TooMany};
    let kind = |interests: Vec<Interest>| collect(interests).unwrap_err().kind();
    assert_eq!(kind(vec![interest("a"), interest("a")]), InvalidArgument);
    assert_eq!(kind(vec![interest("")]), InvalidArgument);
    let many = (0..=MAX_INTERESTS).map(|topic| interest(&topic.to_string())).collect();
    assert_eq!(kind(many), TooMany);
    let nothing = Interest { publishes: false, subscribes: false, ..interest("a") };
    assert!(collect([nothing]).unwrap().is_empty());
}

fn session(number: u8, lost_after: Duration) -> ConnectionProtocol {
    let mut me = hello(number);
    me.lost_after = lost_after.as_millis() as u32;
    ConnectionProtocol::new(&me, &Timing::new(lost_after), Duration::ZERO)
}

/// Carries what one has said to the other.
fn carry(
    from: &mut ConnectionProtocol,
    to: &mut ConnectionProtocol,
    now: Duration,
) -> Vec<Result<ReceivedFrame, CloseReason>> {
    while !from.output().is_empty() {
        let bytes = from.output().to_vec();
        from.sent(bytes.len(), now);
        to.receive(&bytes, now);
    }
    let mut came = Vec::new();
    loop {
        match to.next() {
            Ok(None) => return came,
            Ok(Some(some)) => came.push(Ok(some)),
            Err(reason) => {
                came.push(Err(reason));
                return came;
            }
        }
    }
}

#[test]
fn before_and_after_it_is_agreed_different_things_may_be_said() {
    for frame in frames() {
        let is_first = matches!(frame, Frame::Claim { .. } | Frame::Accept { .. });
        let is_last = matches!(frame, Frame::Goodbye { .. });
        for is_established in [false, true] {
            let (mut one, mut two) = (session(1, SECOND), session(2, SECOND));
            if is_established {
                two.establish(Duration::ZERO);
            }
            one.send(&frame).unwrap();
            let came = carry(&mut one, &mut two, Duration::ZERO);
            assert_eq!(came.len(), 2);
            assert_eq!(came[1].is_ok(), is_first != is_established || is_last, "{frame:?}");
        }
    }
}

#[test]
fn each_beats_as_often_as_the_more_impatient_needs_it() {
    let (mut one, mut two) = (session(1, SECOND), session(2, 60 * SECOND));
    let mut now = Duration::ZERO;
    carry(&mut one, &mut two, now);
    carry(&mut two, &mut one, now);
    one.establish(now);
    two.establish(now);
    let mut beats = 0;
    while now < 20 * SECOND {
        let next = one.deadline().unwrap().min(two.deadline().unwrap());
        assert!(next > now);
        now = next;
        one.tick(now).unwrap();
        two.tick(now).unwrap();
        carry(&mut one, &mut two, now);
        beats += carry(&mut two, &mut one, now).len();
    }
    // Four a second, and no more.
    assert_eq!(beats, 80);
    // Who does not listen hears nobody, and that is nobody's fault.
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
fn who_trickles_its_hello_is_late() {
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
fn more_than_may_wait_is_refused() {
    let mut one = session(1, SECOND);
    one.establish(Duration::ZERO);
    let letter = Frame::ControlMessage(vec![0; 1 << 20 >> 1]);
    let sent = (0..100).take_while(|_| one.send(&letter).is_ok()).count();
    assert_eq!(sent, 15);
    assert_eq!(one.send(&letter), Err(CloseReason::Closed(GoodbyeReason::SendQueueFull)));
    // There is still room to say so.
    assert_eq!(one.send(&Frame::Heartbeat), Ok(()));
    while !one.output().is_empty() {
        let waiting = one.output().len();
        one.sent(waiting, Duration::ZERO);
    }
    assert_eq!(one.send(&letter), Ok(()));
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
fn the_fuzzers_corpus_of_sessions_does_not_panic() {
    for (name, bytes) in corpus("peer_session") {
        let heard = fuzzing::hear(&bytes);
        if name.starts_with("honest") {
            assert!(heard.events > 0, "{name} does not say what it was written for");
        }
        let mut introduced = fuzzing::valid_handshake();
        introduced.extend(&bytes);
        let _ = fuzzing::hear(&introduced);
    }
}

#[test]
fn the_fuzzers_corpus_of_interests_does_not_panic() {
    for (name, bytes) in corpus("peer_directory") {
        let accepted = fuzzing::fuzz_interests(&bytes);
        assert_eq!(accepted > 0, name.starts_with("honest"), "{name}");
    }
}
