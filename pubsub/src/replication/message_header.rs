//! Header of a message between nodes.
//!
//! ```text
//! offset  size  field (little endian)
//!      0     2  "Fm"
//!      2     1  version: 1
//!      3     1  flags: 1: 8 bytes follow the payload: duration of copying out
//!      4     2  length of the metadata
//!      6     2  0
//!      8     8  position: the message's number at its node
//!     16     8  length of the payload
//!     24     8  publisher
//!     32     8  sequence number of the publisher
//!     40     8  time of publication, ns of the writer's clock
//!     48     8  time of posting, ns of the writer's clock
//!     56     …  metadata
//! ```
//!
//! A message of the ring is a *batch* of small messages, each with its header, metadata and
//! payload, filled up to 8 bytes, all in one chunk; or a *long* one, whose first chunk is header
//! and metadata, and the others the payload. In a ring in device memory, which the reader's
//! processor cannot read, each message is *inline*: header and metadata are [beside the
//! header](fabric::ring::Port::push_with) of its first chunk.

use std::convert::Infallible;

use crate::pool::Metadata;
use crate::settings::MAX_METADATA;

/// Bytes of a header.
pub(crate) const HEADER_LENGTH: usize = 56;
/// Longest header and metadata.
pub const MAX_PREFIX_LENGTH: usize = HEADER_LENGTH + MAX_METADATA;
/// Bytes after a staged payload.
pub(crate) const TRAILER_LENGTH: usize = 8;
/// The longest payload.
pub const MAX_PAYLOAD_LENGTH: u64 = 1 << 40;
/// Positions are below this number.
pub(crate) const POSITION_LIMIT: u64 = 1 << 62;

const MAGIC: [u8; 2] = *b"Fm";
const VERSION: u8 = 1;
const HAS_TRAILER: u8 = 1;
const TRUNCATED: &str = "truncated message header";
const NOT_A_HEADER: &str = "not a message header, or another version of it";

/// Kind of a ring message, in its topic field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RingMessageKind {
    /// Small messages, one after the other.
    Batch = 0,
    /// One message.
    Long = 1,
    /// One message whose header and metadata accompany its first chunk.
    Inline = 2,
    /// Bytes of a probe.
    Probe = 3,
}

impl RingMessageKind {
    pub(crate) fn number(self) -> u32 {
        self as u32
    }

    /// None for an unknown number.
    pub(crate) fn of(number: u32) -> Option<Self> {
        let all = [Self::Batch, Self::Long, Self::Inline, Self::Probe];
        all.into_iter().find(|kind| kind.number() == number)
    }
}

/// A message without its payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MessageHeader {
    /// Number of the message at its node: it grows, and may have gaps.
    pub position: u64,
    /// Length of the payload in bytes.
    pub length: u64,
    /// The publisher.
    pub publisher: u64,
    /// Number of the message at its publisher.
    pub sequence: u64,
    /// Time of publication, ns of the writer's realtime clock.
    pub published: u64,
    /// Time of posting, ns of the writer's realtime clock.
    pub posted: u64,
    /// The metadata.
    pub metadata: Metadata,
}

impl MessageHeader {
    /// Bytes of header and metadata.
    pub fn prefix(&self) -> usize {
        HEADER_LENGTH + self.metadata.len()
    }

    /// Bytes of the message in a batch, payload included.
    pub fn batch_length(&self) -> usize {
        (self.prefix() + self.length as usize).next_multiple_of(8)
    }

    /// Writes header and metadata to the start of `into`. Returns the number of bytes.
    pub fn encode(&self, has_trailer: bool, into: &mut [u8; MAX_PREFIX_LENGTH]) -> usize {
        let metadata = &*self.metadata;
        into[0..2].copy_from_slice(&MAGIC);
        into[2] = VERSION;
        into[3] = if has_trailer { HAS_TRAILER } else { 0 };
        into[4..6].copy_from_slice(&(metadata.len() as u16).to_le_bytes());
        into[6..8].fill(0);
        let words = [
            self.position,
            self.length,
            self.publisher,
            self.sequence,
            self.published,
            self.posted,
        ];
        for (bytes, word) in into[8..HEADER_LENGTH].chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        into[HEADER_LENGTH..HEADER_LENGTH + metadata.len()].copy_from_slice(metadata);
        HEADER_LENGTH + metadata.len()
    }

    /// Decodes header and metadata from the start of bytes that a peer sent, and whether there is a
    /// trailer. The error says what is malformed.
    pub fn decode(bytes: &[u8]) -> Result<(Self, bool), &'static str> {
        let decoded = Self::decode_from(bytes.len(), |at, into: &mut [u8]| {
            into.copy_from_slice(&bytes[at..at + into.len()]);
            Ok::<_, Infallible>(())
        });
        decoded.unwrap_or_else(|never| match never {})
    }

    /// Decodes all but the metadata, of which only the length is known.
    fn decode_fixed_part(header: &[u8; HEADER_LENGTH]) -> Result<(Self, bool), &'static str> {
        if header[0..2] != MAGIC || header[2] != VERSION {
            return Err(NOT_A_HEADER);
        }
        let mut words = [0; 6];
        for (word, bytes) in words.iter_mut().zip(header[8..].as_chunks().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        let [position, length, publisher, sequence, published, posted] = words;
        let metadata = u16::from_le_bytes([header[4], header[5]]);
        if header[3] & !HAS_TRAILER != 0 || header[6..8] != [0, 0] {
            return Err("message header: unknown flag");
        }
        if usize::from(metadata) > MAX_METADATA {
            return Err("message header: metadata too long");
        }
        if position >= POSITION_LIMIT {
            return Err("message header: position out of range");
        }
        if length > MAX_PAYLOAD_LENGTH {
            return Err("message header: payload too long");
        }
        let metadata = Metadata::zeroed(metadata.into());
        let decoded = Self { position, length, publisher, sequence, published, posted, metadata };
        Ok((decoded, header[3] & HAS_TRAILER != 0))
    }

    /// Like [`decode`](Self::decode), through `read`: first the header, which has the length of the
    /// metadata. `left` bytes are available.
    pub(super) fn decode_from<E>(
        left: usize,
        mut read: impl FnMut(usize, &mut [u8]) -> Result<(), E>,
    ) -> Result<Result<(Self, bool), &'static str>, E> {
        let mut header = [0; HEADER_LENGTH];
        if left < HEADER_LENGTH {
            return Ok(Err(TRUNCATED));
        }
        read(0, &mut header)?;
        let (mut decoded, has_trailer) = match Self::decode_fixed_part(&header) {
            Ok(decoded) => decoded,
            Err(error) => return Ok(Err(error)),
        };
        if left < decoded.prefix() {
            return Ok(Err(TRUNCATED));
        }
        read(HEADER_LENGTH, decoded.metadata.bytes_mut())?;
        Ok(Ok((decoded, has_trailer)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn header(metadata: &[u8]) -> MessageHeader {
        MessageHeader {
            position: 77,
            length: 1 << 33,
            publisher: 5 << 8 | 3,
            sequence: 12,
            published: 1 << 60,
            posted: (1 << 60) + 5000,
            metadata: Metadata::new(metadata).unwrap(),
        }
    }

    #[test]
    fn encoded_header_is_decoded_unchanged() {
        for (length, has_trailer) in [(0, false), (1, true), (MAX_METADATA, true)] {
            let header = header(&vec![9; length]);
            let mut bytes = [0; MAX_PREFIX_LENGTH];
            let prefix = header.encode(has_trailer, &mut bytes);
            assert_eq!(prefix, header.prefix());
            assert_eq!(MessageHeader::decode(&bytes[..prefix]), Ok((header, has_trailer)));
            assert_eq!(MessageHeader::decode(&bytes[..prefix - 1]), Err(TRUNCATED));
        }
        assert!(Metadata::new(&[0; MAX_METADATA + 1]).is_none());
    }

    #[test]
    fn malformed_header_is_refused() {
        let mut good = [0; MAX_PREFIX_LENGTH];
        let prefix = header(b"about").encode(false, &mut good);
        let with = |at: usize, byte: u8| {
            let mut bytes = good;
            bytes[at] = byte;
            MessageHeader::decode(&bytes[..prefix]).unwrap_err()
        };
        assert_eq!(with(0, b'X'), NOT_A_HEADER);
        assert_eq!(with(2, 2), NOT_A_HEADER);
        assert_eq!(with(3, 2), "message header: unknown flag");
        assert_eq!(with(5, 2), "message header: metadata too long");
        assert_eq!(with(4, 200), TRUNCATED);
        assert_eq!(with(7, 1), "message header: unknown flag");
        assert_eq!(with(15, 0x40), "message header: position out of range");
        assert_eq!(with(22, 1), "message header: payload too long");
    }

    proptest! {
        #[test]
        fn any_bytes_are_decoded_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = MessageHeader::decode(&bytes);
            let mut forged = bytes;
            if forged.len() >= 8 {
                let start = [b'F', b'm', 1, 0, forged[4], 0, 0, 0];
                forged[..8].copy_from_slice(&start);
            }
            if let Ok((header, has_trailer)) = MessageHeader::decode(&forged) {
                let mut again = [0; MAX_PREFIX_LENGTH];
                let prefix = header.encode(has_trailer, &mut again);
                prop_assert_eq!(&again[..prefix], &forged[..prefix]);
            }
        }
    }
}
