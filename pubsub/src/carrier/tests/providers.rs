//! Nodes whose provider is none that this one's understands.

use super::*;
use crate::bridge::{Provider, Terms, TopicFacts};
use crate::carrier::letters::Note;
use crate::carrier::receiving::Letter;
use crate::peers::SessionNumber;
use crate::service::protocol;

/// What is told of the topic and of the other node: in what the two differ, and whether there is a
/// connection.
fn told(carrier: &mut Carrier) -> (Vec<String>, Option<bool>) {
    let (mut differs_in, mut connected) = (Vec::new(), None);
    for row in carrier.rows() {
        match row {
            Row::Misfit { differs, .. } => differs_in.extend(differs),
            Row::Peer { is_connected, .. } => connected = Some(is_connected),
            _ => {}
        }
    }
    (differs_in, connected)
}

fn session(other: &Peers) -> SessionNumber {
    let session = std::iter::from_fn(|| other.next_event()).find_map(|event| match event {
        Event::Appeared { session, .. } => Some(session),
        _ => None,
    });
    session.unwrap()
}

fn tell(other: &Peers, session: SessionNumber, topic: &str, terms: Vec<u8>) {
    let letter = protocol::encode(&Letter { topic: topic.into(), terms });
    other.tell(NodeIdentity([1; 16]), session, letter).unwrap();
}

fn pigeon() -> Provider {
    Provider { name: "carrier-pigeon".into(), protocol: 1, format: 1 }
}

#[test]
fn nothing_is_kept_for_a_node_that_says_that_it_has_another_provider() {
    let place = Place::new(1);
    let mut carrier = place.carrier(&NetworkOptions { lost_after: FAR, ..network() });
    let other = one_that_wants(&carrier, 2);
    carrier.set_topics(place.topics(true, false));
    until("the topic to be carried", &mut [&mut carrier], || place.topic.is_carried());
    assert_eq!(told(&mut carrier), (Vec::new(), Some(true)));
    let session = session(&other);
    tell(&other, session, "", pigeon().encode());
    until("nothing to be kept for it", &mut [&mut carrier], || !place.is_owed());
    assert_eq!(told(&mut carrier), (vec!["provider".to_owned()], Some(false)));
    place.is_free();
    // It has the same one later.
    let ours = carrier.provider.clone().unwrap();
    tell(&other, session, "", ours.encode());
    until("the topic to be carried", &mut [&mut carrier], || place.topic.is_carried());
    assert_eq!(told(&mut carrier), (Vec::new(), Some(true)));
}

#[test]
fn two_nodes_with_other_providers_both_say_so() {
    let (writing, reading) = (Place::new(1), Place::new(2));
    let of = |provider: &str| Some(provider.to_owned());
    let mut writer = writing.carrier(&NetworkOptions { provider: of("net"), ..network() });
    let peers = vec![writer.listens().unwrap()];
    let provider = of("tcp;ofi_rxm");
    let mut reader = reading.carrier(&NetworkOptions { peers, provider, ..network() });
    writer.set_topics(writing.topics(true, false));
    reader.set_topics(reading.topics(false, true));
    let differs = (vec!["provider".to_owned()], Some(false));
    let end = Instant::now() + FAR;
    while [&mut writer, &mut reader].map(told) != [differs.clone(), differs.clone()] {
        assert!(Instant::now() < end, "{:?}", [&mut writer, &mut reader].map(told));
        writer.turn();
        reader.turn();
        std::thread::sleep(Duration::from_millis(2));
    }
    writing.is_free();
}

#[test]
fn who_wishes_before_it_has_said_its_provider_is_told_to_ask_again() {
    let place = Place::new(1);
    let mut carrier = place.carrier(&network());
    let other = one_that_wants(&carrier, 2);
    carrier.set_topics(place.topics(false, true));
    let mut events = Vec::new();
    until("its interests", &mut [&mut carrier], || {
        events.extend(std::iter::from_fn(|| other.next_event()));
        events.iter().any(|event| matches!(event, Event::Interests { .. }))
    });
    let Event::Appeared { session, .. } = events[0] else { panic!("{events:?}") };
    let facts = TopicFacts { number: 1, largest: 64, depth: DEPTH as u32 };
    let wish = |connection| Terms::Wish { connection, facts, from: vec![1; 16], lanes: 1 };
    let answer = |carrier: &mut Carrier, connection: u64| {
        tell(&other, session, NAME, wish(connection).encode().unwrap());
        let mut answer = None;
        until("an answer", &mut [carrier], || {
            answer = other.next_event();
            answer.is_some()
        });
        let Some(Event::Letter { bytes, .. }) = answer else { panic!("{answer:?}") };
        let letter: Letter = protocol::decode("test", &bytes).unwrap();
        Terms::decode(&letter.terms).unwrap()
    };
    assert!(matches!(answer(&mut carrier, 1), Terms::Again { connection: 1, .. }));
    tell(&other, session, "", carrier.provider.clone().unwrap().encode());
    assert!(matches!(answer(&mut carrier, 2), Terms::Offer { connection: 2, .. }));
    tell(&other, session, "", pigeon().encode());
    assert!(matches!(answer(&mut carrier, 3), Terms::Again { connection: 3, .. }));
}
