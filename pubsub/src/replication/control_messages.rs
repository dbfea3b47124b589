//! Control messages between the services of two nodes.

use control::codec;
use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};
use crate::replication::source::last_sequences::LastSequences;
use crate::replication::source::start_sequences::StartSequences;
use crate::replication::{ConnectionMessage, Provider};

/// The longest message, in bytes: the maximum of lanes, each with its descriptors, and their
/// addresses.
const MAX_LENGTH: usize = 16 << 10;
/// Number of lost publishers that the receiver's topic is sure to remember.
pub(crate) const MAX_LOST_PUBLISHERS: usize = 15;
/// First byte of each message.
const TAG: u8 = 1;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum ControlMessage {
    /// The provider of the sender: the first message of a session, sent again after a change.
    Provider(Provider),
    /// A message of the workers about one connection of a topic.
    ConnectionMessage { topic: String, message: ConnectionMessage },
    /// What was published before the sender learned of subscriptions of the receiver.
    StartSequences(Vec<StartSequences>),
    /// Publishers of a topic that died.
    PublisherLost { topic: String, publishers: Vec<u64> },
    /// Last sequences published, sent when none of the topic's messages is in flight.
    LastSequences { topic: String, last: LastSequences },
}

impl ControlMessage {
    pub(super) fn encode(&self) -> Vec<u8> {
        codec::encode(TAG, self)
    }

    /// Decodes a message of another node. Each accepted message has only one encoding.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self> {
        let operation = "read control message from node";
        let refuse = |detail| Error::new(operation, ErrorKind::Malformed, detail);
        if bytes.len() > MAX_LENGTH {
            return Err(refuse("control message too long"));
        }
        let message: Self = codec::decode(TAG, bytes)
            .map_err(|cause| Error::because(operation, ErrorKind::Malformed, cause))?;
        message.validation_error().map_or(Ok(message), |detail| Err(refuse(detail)))
    }

    fn validation_error(&self) -> Option<&'static str> {
        match self {
            Self::Provider(provider) => provider.validation_error(),
            Self::ConnectionMessage { message, .. } => message.validation_error(),
            Self::StartSequences(all) => StartSequences::validation_error(all),
            Self::PublisherLost { publishers, .. } => {
                let is_valid = (1..=MAX_LOST_PUBLISHERS).contains(&publishers.len());
                (!is_valid).then_some("lost publishers: none, or too many")
            }
            Self::LastSequences { last, .. } => last.validation_error(),
        }
    }
}

/// Decodes a message, and encodes it again: for fuzzing.
///
/// # Errors
/// What is malformed in it.
#[cfg(any(test, feature = "fuzzing"))]
pub fn reencode_control_message(bytes: &[u8]) -> Result<Vec<u8>> {
    ControlMessage::decode(bytes).map(|message| message.encode())
}

#[cfg(test)]
mod tests {
    use fabric::RemoteRegion;
    use fabric::ring::{ChunkLayout, LaneOffer, NotifyMode, RingAnswer, RingOffer};
    use proptest::prelude::*;
    use transfer::device_memory::MemoryEnd;

    use super::*;
    use crate::peers::VERSION;
    use crate::replication::source::{last_sequences, start_sequences};
    use crate::replication::{
        DirectWriter, MAX_LANES, MAX_PAYLOAD_LENGTH, MAX_REASON_LENGTH, TopicParameters,
        fit_addresses,
    };
    use crate::settings::{MAX_TOPIC_NAME, TopicSettings};
    use crate::text::shortened;
    use crate::topic::TopicStart;

    const PARAMETERS: TopicParameters = TopicParameters { number: 3, largest: 1 << 20, depth: 16 };
    const TOPIC: &str = "numbers";

    fn provider(name: &str) -> ControlMessage {
        ControlMessage::Provider(Provider { name: name.to_owned(), protocol: 1 << 31, format: 2 })
    }

    fn connection_message(message: ConnectionMessage) -> ControlMessage {
        ControlMessage::ConnectionMessage { topic: TOPIC.to_owned(), message }
    }

    fn connect_request(parameters: TopicParameters, address: usize, lanes: u8) -> ControlMessage {
        let lane_addresses = vec![vec![1; address]; usize::from(lanes - 1)];
        connection_message(ConnectionMessage::ConnectRequest {
            connection: 1 << 40,
            parameters,
            from: vec![1; address],
            lane_addresses,
            direct: Some(DirectWriter::new(MemoryEnd::Host, true)),
        })
    }

    fn restart(reason: String) -> ControlMessage {
        connection_message(ConnectionMessage::Restart { connection: 9, reason })
    }

    /// A descriptor of 64 bytes in host memory.
    const REGION: [u8; 54] = *b"FcMR\x01\x006\x00\x0b\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\x00\x00@\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x08\x00\x8a\xc1\x92\x98\x08\xfd\x99\x0dw\xec\x07h";

    fn region() -> RemoteRegion {
        RemoteRegion::decode(&REGION).unwrap()
    }

    fn offer() -> ControlMessage {
        let lane = LaneOffer { ring: region(), headers: None, credit_memory: region() };
        let ring = RingOffer {
            ring: 0,
            epoch: 1,
            capacity: 1 << 16,
            notify: NotifyMode::Immediate,
            tagged: false,
            layout: ChunkLayout::InlineHeader,
            inline_data: 0,
            max_chunks: 1 << 14,
            completed_messages: 0,
            lanes: vec![lane],
        };
        let (from, lane_addresses) = (vec![1; 16], Vec::new());
        connection_message(ConnectionMessage::Offer {
            connection: 7,
            ring,
            position: 3,
            from,
            lane_addresses,
            is_probed: true,
        })
    }

    /// The longest possible offer: all lanes, with separate headers.
    fn long_offer() -> ControlMessage {
        let ControlMessage::ConnectionMessage {
            message: ConnectionMessage::Offer { mut ring, .. },
            ..
        } = offer()
        else {
            panic!("not an offer");
        };
        ring.lanes =
            vec![
                LaneOffer { ring: region(), headers: Some(region()), credit_memory: region() };
                usize::from(MAX_LANES)
            ];
        let (from, lane_addresses) = (vec![1; 512], vec![vec![1; 512]; usize::from(MAX_LANES) - 1]);
        connection_message(ConnectionMessage::Offer {
            connection: 7,
            ring,
            position: 3,
            from,
            lane_addresses,
            is_probed: false,
        })
    }

    fn answer() -> ControlMessage {
        let answer = RingAnswer {
            sender_index: 0,
            epoch: 1,
            max_chunks: 64,
            tagged: false,
            credit_memory: region(),
        };
        connection_message(ConnectionMessage::Answer { connection: 7, answer })
    }

    fn start_sequences(publishers: usize) -> ControlMessage {
        let topic = "x".repeat(MAX_TOPIC_NAME);
        let of = |publishers: usize| {
            StartSequences::at(&topic, TopicStart::new(4, vec![(256, u64::MAX); publishers]))
        };
        let others = vec![of(0); start_sequences::MAX_TOPICS - 1];
        ControlMessage::StartSequences([vec![of(publishers)], others].concat())
    }

    fn lost_publishers(publishers: usize) -> ControlMessage {
        ControlMessage::PublisherLost {
            topic: TOPIC.to_owned(),
            publishers: vec![1 << 40; publishers],
        }
    }

    fn last_sequences(publishers: usize) -> ControlMessage {
        let last = LastSequences::at(vec![(256, u64::MAX); publishers]);
        ControlMessage::LastSequences { topic: TOPIC.to_owned(), last }
    }

    fn good() -> Vec<ControlMessage> {
        vec![
            provider("tcp;ofi_rxm"),
            connect_request(PARAMETERS, 16, 1),
            connect_request(PARAMETERS, 1024, 1),
            connect_request(PARAMETERS, 512, MAX_LANES),
            restart(shortened(&"ä".repeat(1000), MAX_REASON_LENGTH).to_owned()),
            connection_message(ConnectionMessage::Refused { connection: 9, reason: String::new() }),
            start_sequences(0),
            start_sequences(start_sequences::MAX_PUBLISHERS),
            lost_publishers(1),
            lost_publishers(MAX_LOST_PUBLISHERS),
            last_sequences(1),
            last_sequences(last_sequences::MAX_PUBLISHERS),
            offer(),
            answer(),
            long_offer(),
        ]
    }

    #[track_caller]
    fn is_refused(bytes: &[u8]) {
        assert_eq!(
            ControlMessage::decode(bytes).unwrap_err().kind(),
            ErrorKind::Malformed,
            "{bytes:?}"
        );
    }

    #[test]
    fn encoded_message_is_decoded_and_truncated_one_refused() {
        for message in good() {
            let bytes = message.encode();
            assert_eq!(ControlMessage::decode(&bytes).unwrap(), message);
            let longer = [&bytes[..], &[0]].concat();
            let other = [&[TAG + 1], &bytes[1..]].concat();
            let less = &bytes[..bytes.len() - 1];
            for bytes in [&[][..], &bytes[..1], &bytes[1..], less, &longer, &other] {
                is_refused(bytes);
            }
        }
    }

    #[test]
    fn invalid_message_is_refused() {
        let deep = TopicParameters { depth: TopicSettings::MAX_DEPTH + 1, ..PARAMETERS };
        let long = TopicParameters { largest: MAX_PAYLOAD_LENGTH + 1, ..PARAMETERS };
        for message in [
            provider(&"x".repeat(101)),
            restart("x".repeat(401)),
            connect_request(PARAMETERS, 0, 1),
            connect_request(PARAMETERS, 1025, 1),
            connect_request(deep, 16, 1),
            connect_request(long, 16, 1),
            connect_request(PARAMETERS, 16, MAX_LANES + 1),
            connect_request(PARAMETERS, 513, MAX_LANES),
            start_sequences(start_sequences::MAX_PUBLISHERS + 1),
            lost_publishers(0),
            lost_publishers(MAX_LOST_PUBLISHERS + 1),
            last_sequences(0),
            last_sequences(last_sequences::MAX_PUBLISHERS + 1),
            ControlMessage::ConnectionMessage {
                topic: "x".repeat(MAX_LENGTH),
                message: ConnectionMessage::Refused { connection: 9, reason: String::new() },
            },
        ] {
            is_refused(&message.encode());
        }
    }

    #[test]
    fn lanes_are_limited_to_the_length_of_a_message() {
        let lanes = usize::from(MAX_LANES) - 1;
        let fit = |address: usize| {
            let lane_addresses = vec![vec![1; address]; lanes];
            fit_addresses(&vec![1; address], lane_addresses).len()
        };
        assert_eq!([16, 512, 513, 1024].map(fit), [lanes, lanes, lanes - 1, 7]);
    }

    /// FNV-1a.
    fn digest(bytes: &[u8]) -> u64 {
        let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
    }

    /// A failure means that the layout of a message changed: nodes of the previous version cannot
    /// decode it, and `VERSION` has to change, too.
    #[test]
    fn messages_of_a_version_have_one_layout() {
        let bytes: Vec<u8> = good().iter().flat_map(ControlMessage::encode).collect();
        assert_eq!((VERSION, digest(&bytes)), (6, 0x832b_1abf_0ba4_5899));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(
            kind in 0..6_u8,
            bytes in proptest::collection::vec(any::<u8>(), 0..300),
        ) {
            let message = [&[TAG, kind], &bytes[..]].concat();
            for bytes in [bytes, message] {
                if let Ok(again) = reencode_control_message(&bytes) {
                    prop_assert_eq!(again, bytes);
                }
            }
        }
    }

    const CORPUS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus/control_messages");

    #[test]
    fn fuzz_corpus_is_decoded_without_panic() {
        let (mut seen, mut read) = (0, 0);
        for entry in std::fs::read_dir(CORPUS).expect("the corpus is part of the repository") {
            let bytes = std::fs::read(entry.unwrap().path()).unwrap();
            read += usize::from(reencode_control_message(&bytes).is_ok());
            let _ = crate::replication::MessageHeader::decode(&bytes);
            seen += 1;
        }
        assert!(seen > read && read >= good().len(), "{read} of {seen} are control messages");
    }

    /// Messages of all kinds as seeds of the fuzzer: run it after the encoding changes.
    #[test]
    #[ignore = "writes files"]
    fn fuzz_corpus_is_rewritten() {
        for (number, message) in good().into_iter().enumerate() {
            std::fs::write(format!("{CORPUS}/message-{number}"), message.encode()).unwrap();
        }
    }
}
