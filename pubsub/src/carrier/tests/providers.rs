//! Nodes whose provider is none that this one's understands.

use super::*;
use crate::bridge::{Spot, Terms, TopicFacts};
use crate::carrier::receiving::Letter;
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

#[test]
fn one_that_does_not_say_its_provider_is_known_by_its_first_letter_about_a_topic() {
    let place = Place::new(1);
    let mut carrier = place.carrier(&NetworkOptions { lost_after: FAR, ..network() });
    let other = one_that_wants(&carrier, 2);
    carrier.set_topics(place.topics(true, false));
    until("the topic to be carried", &mut [&mut carrier], || place.topic.is_carried());
    assert_eq!(told(&mut carrier), (Vec::new(), Some(true)));
    let session = std::iter::from_fn(|| other.next_event()).find_map(|event| match event {
        Event::Appeared { session, .. } => Some(session),
        _ => None,
    });
    let from = Spot { provider: "carrier-pigeon".into(), protocol: 1, format: 1, address: vec![1] };
    let facts = TopicFacts { number: 1, largest: 64, depth: DEPTH as u32 };
    let terms = Terms::Wish { connection: 1, facts, from, lanes: 0 }.encode().unwrap();
    let letter = protocol::encode(&Letter { topic: NAME.into(), terms });
    other.tell(NodeIdentity([1; 16]), session.unwrap(), letter).unwrap();
    until("nothing to be kept for it", &mut [&mut carrier], || !place.is_owed());
    assert_eq!(told(&mut carrier), (vec!["provider".to_owned()], Some(false)));
    place.is_free();
}
