//! What rails say, written and read.

use proptest::prelude::*;

use super::*;
use crate::error::ErrorKind;

fn number(message: &Message) -> u64 {
    if message.is_numbered() { 5 } else { 0 }
}

fn all() -> Vec<Message> {
    let chunk = Chunk { number: 1, region: 2, ticket: 3, slot: 4, offset: 5, length: 6 };
    let refusal = Refusal { kind: ErrorKind::Stale, why: "it is gone".to_owned() };
    vec![
        Message::Hello {
            to: [1; 16],
            from: [2; 16],
            node: [3; 16],
            visit: 9,
            label: "prefill 0".to_owned(),
            address: vec![4; 16],
        },
        Message::Open { request: 1, region: 2, ticket: 3 },
        Message::Stage { request: 9 },
        Message::Notice { number: 7, notice: Notice::new(5, b"layer 3").unwrap() },
        Message::Deliver(chunk),
        Message::Fetch(chunk),
        Message::Released { region: 8 },
        Message::Ping { number: 1 },
        Message::Pong { number: 2 },
        Message::Bye,
        Message::Welcome { label: "decode".to_owned(), may_send: 64 },
        Message::Opened { request: 3 },
        Message::Staging { request: 4, slots: 8, slot_length: 1 << 20, memory: vec![1; 90] },
        Message::Refused { request: 5, refusal: refusal.clone() },
        Message::Done { number: 6, refusal: Some(refusal) },
        Message::Done { number: 6, refusal: None },
        Message::Heard { notices: 3, may_send: 67 },
        Message::Withdrawn { region: 3 },
        Message::Rouse,
    ]
}

#[test]
fn what_was_written_is_read_and_none_is_longer_than_can_be() {
    for message in all() {
        let bytes = message.encode(77, number(&message), 4);
        assert!(bytes.len() < LONGEST);
        let frame = Frame { session: 77, number: number(&message), heard: 4, message };
        assert_eq!(Message::decode(&bytes).unwrap(), frame);
    }
}

#[test]
fn every_truncation_and_every_changed_byte_is_noticed() {
    for message in all() {
        let bytes = message.encode(77, number(&message), 4);
        for length in 0..bytes.len() {
            assert!(Message::decode(&bytes[..length]).is_err(), "{message:?}, {length}");
        }
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 0x10;
            assert!(Message::decode(&changed).is_err(), "{message:?}, byte {at}");
        }
    }
}

proptest! {
    #[test]
    fn garbage_with_a_good_frame_never_panics(
        code in 0..20_u8,
        is_numbered: bool,
        body in proptest::collection::vec(any::<u8>(), 0..300),
    ) {
        let mut bytes = FORM.begin();
        bytes.extend([0; 8]);
        bytes.extend([u8::from(is_numbered), 0, 0, 0, 0, 0, 0, 0]);
        bytes.extend([0; 8]);
        bytes.push(code);
        bytes.extend(body);
        let bytes = FORM.seal(bytes).unwrap();
        if let Ok(frame) = Message::decode(&bytes) {
            // Texts that are none are made some.
            let again = frame.message.encode(frame.session, frame.number, frame.heard);
            prop_assert_eq!(Message::decode(&again).unwrap(), frame);
        }
    }
}

#[test]
fn what_is_to_be_heard_has_a_number_and_nothing_else_has() {
    for message in all() {
        let wrong = if message.is_numbered() { 0 } else { 1 };
        assert!(Message::decode(&message.encode(77, wrong, 0)).is_err(), "{message:?}");
    }
}
