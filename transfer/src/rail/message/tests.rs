//! Encoding and decoding of the messages of rails.

use proptest::prelude::*;

use super::*;
use crate::error::ErrorKind;
use crate::notice::MAX_NOTICE_LENGTH;

fn number(message: &Message) -> u64 {
    if message.is_numbered() { 5 } else { 0 }
}

fn all() -> Vec<Message> {
    let chunk = Chunk { number: 1, region: 2, ticket: 3, slot: 4, offset: 5, length: 6 };
    let refusal = Refusal::new(ErrorKind::Stale, "the peer is lost");
    vec![
        Message::Hello {
            to: [1; 16],
            from: [2; 16],
            connection_id: 9,
            label: "prefill 0".to_owned(),
            address: vec![4; 16],
        },
        Message::Open { request: 1, region: 2, ticket: 3 },
        Message::RequestStaging { request: 9 },
        Message::Notice(Notice::new(5, b"layer 3").unwrap()),
        Message::Notice(Notice::new(u64::MAX, &[0xff; MAX_NOTICE_LENGTH]).unwrap()),
        Message::RequestDrain(chunk),
        Message::RequestFill(chunk),
        Message::Released { region: 8 },
        Message::Ping,
        Message::Pong,
        Message::Bye,
        Message::Welcome { credit_limit: 64 },
        Message::Opened { request: 3 },
        Message::Staging { request: 4, slots: 8, slot_length: 1 << 20, memory: vec![1; 90] },
        Message::Refused { request: 5, refusal: refusal.clone() },
        Message::Done { number: 6, refusal: Some(refusal.clone()) },
        Message::Done { number: 6, refusal: None },
        Message::NoticeCredit { notices: 3, credit_limit: 67 },
        Message::Withdrawn { region: 3 },
        Message::KeepPolling,
        Message::RequestDirect {
            request: 1,
            region: 2,
            ticket: 3,
            from: MemoryEnd::Host,
            probes: true,
        },
        Message::ProbeWritten { probe: 8, step: 3 },
        Message::RequestProbeFill { probe: 8, step: 20 },
        Message::ProbePassed { probe: 8 },
        Message::ProbeAbandoned { probe: 8 },
        Message::Direct { request: 1, memory: vec![1; 90] },
        Message::ProbeReady { request: 1, probe: 8, memory: vec![1; 90] },
        Message::ProbeChecked { probe: 8, step: 3, failure: None },
        Message::ProbeChecked { probe: 8, step: 3, failure: Some(refusal) },
        Message::ProbeFilled { probe: 8, step: 20 },
    ]
}

#[test]
fn encoded_messages_are_short_and_decoded() {
    for message in all() {
        let bytes = message.encode(77, number(&message), 4);
        assert!(bytes.len() < MAX_MESSAGE_LENGTH);
        let frame = Frame { session: 77, number: number(&message), acknowledged: 4, message };
        assert_eq!(Message::decode(&bytes).unwrap(), frame);
    }
}

#[test]
fn truncated_and_extended_messages_are_refused() {
    for message in all() {
        let mut bytes = message.encode(77, number(&message), 4);
        for length in 0..bytes.len() {
            assert!(Message::decode(&bytes[..length]).is_err(), "{message:?}, {length}");
        }
        bytes.push(0);
        assert_eq!(Message::decode(&bytes).unwrap_err().kind(), ErrorKind::Malformed);
        bytes[0] += 1;
        assert_eq!(Message::decode(&bytes).unwrap_err().kind(), ErrorKind::VersionMismatch);
    }
}

#[test]
fn parts_longer_than_allowed_are_refused() {
    let (label, cause) = ("x".repeat(MAX_LABEL_LENGTH + 1), "x".repeat(MAX_MESSAGE_LENGTH));
    let hello = |label: &str, length| Message::Hello {
        to: [1; 16],
        from: [2; 16],
        connection_id: 9,
        label: label.to_owned(),
        address: vec![4; length],
    };
    let refusal = Refusal { kind: ErrorKind::Stale, cause };
    for message in [
        hello(&label, 16),
        hello("", MAX_ADDRESS_LENGTH + 1),
        Message::Staging {
            request: 1,
            slots: 1,
            slot_length: 1,
            memory: vec![0; MAX_MESSAGE_LENGTH],
        },
        Message::Refused { request: 1, refusal: refusal.clone() },
        Message::Done { number: 1, refusal: Some(refusal) },
    ] {
        let error = Message::decode(&message.encode(77, number(&message), 0)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Malformed, "{message:?}");
    }
    let (session, number, acknowledged, notice) = (77_u64, 5_u64, 0_u64, 3_u8);
    let long = codec::encode(
        VERSION,
        &(session, number, acknowledged, notice, (1_u64, vec![0_u8; MAX_NOTICE_LENGTH + 1])),
    );
    assert_eq!(Message::decode(&long).unwrap_err().kind(), ErrorKind::Malformed);
}

proptest! {
    #[test]
    fn garbage_with_a_good_head_never_panics(
        code in 0..32_u8,
        is_numbered: bool,
        body in proptest::collection::vec(any::<u8>(), 0..300),
    ) {
        let bytes = [&[VERSION, 7, u8::from(is_numbered), 0, code][..], &body].concat();
        if let Ok(frame) = Message::decode(&bytes) {
            let again = frame.message.encode(frame.session, frame.number, frame.acknowledged);
            prop_assert_eq!(again, bytes);
        }
    }
}

#[test]
fn only_reliable_messages_have_a_number() {
    for message in all() {
        let wrong = if message.is_numbered() { 0 } else { 1 };
        assert!(Message::decode(&message.encode(77, wrong, 0)).is_err(), "{message:?}");
    }
}
