//! Nodes whose provider is none that this one's understands.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::bridge::{Provider, Terms, TopicFacts, WorkerOptions, Workers};
use crate::carrier::letters::Letter;
use crate::peers::SessionNumber;

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

fn tell(other: &Peers, session: SessionNumber, letter: &Letter) {
    other.tell(NodeIdentity([1; 16]), session, letter.encode()).unwrap();
}

fn pigeon() -> Letter {
    Letter::Provider(Provider { name: "carrier-pigeon".into(), protocol: 1, format: 1 })
}

/// That it has the same provider.
fn the_same(carrier: &Carrier) -> Letter {
    Letter::Provider(carrier.provider.clone().unwrap())
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
    tell(&other, session, &pigeon());
    until("nothing to be kept for it", &mut [&mut carrier], || !place.is_owed());
    assert_eq!(told(&mut carrier), (vec!["provider".to_owned()], Some(false)));
    place.is_free();
    // It has the same one later.
    tell(&other, session, &the_same(&carrier));
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
    until("nothing to be kept", &mut [&mut writer, &mut reader], || !writing.is_owed());
    writing.is_free();
}

/// An address at which nobody is: 127.0.0.1, port 1, as a `sockaddr_in` has it.
const FROM: [u8; 16] = [2, 0, 0, 1, 127, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0];

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
    let answer = |carrier: &mut Carrier, connection: u64| {
        let (from, further) = (FROM.to_vec(), Vec::new());
        let terms = Terms::Wish { connection, facts, from, further };
        tell(&other, session, &Letter::Terms { topic: NAME.into(), terms });
        let mut answer = None;
        until("an answer", &mut [carrier], || {
            answer = match other.next_event() {
                Some(Event::Letter { bytes, .. }) => match Letter::decode(&bytes).unwrap() {
                    Letter::Terms { terms, .. } => Some(terms),
                    // It says which one it has when that is open.
                    Letter::Provider(_) => None,
                    letter => panic!("{letter:?}"),
                },
                Some(event) => panic!("{event:?}"),
                None => None,
            };
            answer.is_some()
        });
        answer.unwrap()
    };
    assert!(matches!(answer(&mut carrier, 1), Terms::Again { connection: 1, .. }));
    turn_until(&mut carrier, |carrier| carrier.provider.is_some());
    tell(&other, session, &the_same(&carrier));
    assert!(matches!(answer(&mut carrier, 2), Terms::Offer { connection: 2, .. }));
    tell(&other, session, &pigeon());
    assert!(matches!(answer(&mut carrier, 3), Terms::Again { connection: 3, .. }));
}

#[test]
fn letters_that_are_none_are_refused_and_do_no_harm() {
    let (writing, reading) = (Place::new(1), Place::new(2));
    let (mut writer, mut reader, mut subscriber) = carriers(&writing, &reading);
    let others = [&writer, &reader].map(|carrier| {
        let other = one_that_wants(carrier, 3);
        other.set_interests([]).unwrap();
        other
    });
    let garbage: [&[u8]; 5] = [&[], &[9, 9], &[1, 1, 0, 1, 2, 3], &[1; 300], &[1; 20_000]];
    for (other, node) in others.iter().zip([1, 2]) {
        let mut session = None;
        until("a session", &mut [&mut writer, &mut reader], || {
            if let Some(Event::Appeared { session: begun, .. }) = other.next_event() {
                session = Some(begun);
            }
            session.is_some()
        });
        for bytes in garbage {
            other.tell(NodeIdentity([node; 16]), session.unwrap(), bytes.to_vec()).unwrap();
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
    let end = Instant::now() + FAR;
    while !flag.load(Ordering::Acquire) && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn turn_until(carrier: &mut Carrier, is_so: impl Fn(&Carrier) -> bool) {
    let end = Instant::now() + FAR;
    while !is_so(carrier) {
        assert!(Instant::now() < end);
        carrier.turn();
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
    let place = Place::new(1);
    let lost_after = Duration::from_secs(1);
    let mut carrier = place.carrier(&NetworkOptions { lost_after, ..network() });
    carrier.open = hang;
    let other = one_that_wants(&carrier, 2);
    turn_until(&mut carrier, |carrier| carrier.opening.is_some());
    drop(other);
    turn_until(&mut carrier, |carrier| carrier.nodes.is_empty());
    let late = Instant::now() + lost_after;
    turn_until(&mut carrier, |_| Instant::now() >= late);
    assert_ne!(carrier.longest_wait(Instant::now()), Some(Duration::ZERO), "it does not rest");
    MAY_OPEN.store(true, Ordering::Release);
    turn_until(&mut carrier, |carrier| carrier.opening.is_none() && carrier.workers.is_some());
}

#[test]
fn a_provider_that_hangs_holds_up_only_messages_between_nodes() {
    static MAY_OPEN: AtomicBool = AtomicBool::new(false);
    fn hang(count: usize, options: &WorkerOptions, local: IpAddr) -> crate::Result<Workers> {
        wait_for(&MAY_OPEN);
        Workers::start(count, options, local)
    }
    let place = Place::new(1);
    let lost_after = Duration::from_secs(1);
    let mut carrier = place.carrier(&NetworkOptions { lost_after, ..network() });
    carrier.open = hang;
    let other = one_that_wants(&carrier, 2);
    carrier.set_topics(place.topics(true, false));
    let end = Instant::now() + FAR;
    let (mut is_told, mut knows_interests) = (false, false);
    while !is_told || !knows_interests {
        assert!(Instant::now() < end, "told: {is_told}, knows interests: {knows_interests}");
        let turn = Instant::now();
        carrier.turn();
        assert!(turn.elapsed() < FAR / 4, "the service waited for a provider");
        is_told |= carrier.rows().iter().any(
            |row| matches!(row, Row::NotCarried { why, .. } if why.contains("takes longer than 500ms")),
        );
        knows_interests |= std::iter::from_fn(|| other.next_event())
            .any(|event| matches!(event, Event::Interests { .. }));
        std::thread::sleep(Duration::from_millis(2));
    }
    assert!(!place.topic.is_carried());
    MAY_OPEN.store(true, Ordering::Release);
    until("the topic to be carried", &mut [&mut carrier], || place.topic.is_carried());
    assert!(!carrier.rows().iter().any(|row| matches!(row, Row::NotCarried { .. })));
}
