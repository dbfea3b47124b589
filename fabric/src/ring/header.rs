//! What stands before a chunk's payload in the ring.
//!
//! ```text
//! offset  size  field (little endian)
//!      0     4  "FcRg"
//!      4     4  epoch
//!      8     8  position of this header
//!     16     8  sequence number of the chunk
//!     24     8  number of the message
//!     32     8  length of the message
//!     40     8  where the payload lies in the message
//!     48     4  length of the payload
//!     52     4  topic
//!     56     4  0
//!     60     4  CRC-32 of all that stands before
//! ```
//!
//! The position makes an old header that the ring still holds from an earlier round
//! another one than the one expected.

/// Bytes of a header: a granule.
pub const HEADER: u64 = 64;
const MAGIC: [u8; 4] = *b"FcRg";

/// What stands before a chunk's payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// The epoch that it was written in.
    pub epoch: u32,
    /// Where it stands.
    pub position: u64,
    /// The how manieth chunk of the epoch, from 0 on.
    pub sequence: u64,
    /// The how manieth message of the ring, over all epochs.
    pub message: u64,
    /// Length of the whole message in bytes.
    pub length: u64,
    /// Where the payload lies in the message.
    pub offset: u64,
    /// Length of the payload in bytes.
    pub payload: u32,
    /// What the message is about, as the two sides number it.
    pub topic: u32,
}

impl Header {
    /// The bytes that travel.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER as usize] {
        let mut bytes = [0; HEADER as usize];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..8].copy_from_slice(&self.epoch.to_le_bytes());
        let words = [self.position, self.sequence, self.message, self.length, self.offset];
        for (place, word) in bytes[8..48].chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes[48..52].copy_from_slice(&self.payload.to_le_bytes());
        bytes[52..56].copy_from_slice(&self.topic.to_le_bytes());
        let checksum = crc32fast::hash(&bytes[..60]);
        bytes[60..].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// What the bytes say; None if they are no header, or contradict themselves.
    #[must_use]
    pub fn decode(bytes: &[u8; HEADER as usize]) -> Option<Self> {
        let half = |at: usize| bytes[at..].first_chunk().map(|bytes| u32::from_le_bytes(*bytes));
        let word = |at: usize| bytes[at..].first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
        if bytes[..4] != MAGIC || half(60)? != crc32fast::hash(&bytes[..60]) || half(56)? != 0 {
            return None;
        }
        let header = Self {
            epoch: half(4)?,
            position: word(8)?,
            sequence: word(16)?,
            message: word(24)?,
            length: word(32)?,
            offset: word(40)?,
            payload: half(48)?,
            topic: half(52)?,
        };
        let end = header.offset.checked_add(header.payload.into())?;
        (end <= header.length).then_some(header)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read_and_changes_are_noticed() {
        let header = Header {
            epoch: 3,
            position: 1 << 40,
            sequence: 77,
            message: 5,
            length: 10_000_000_000,
            offset: 9_999_999_000,
            payload: 1000,
            topic: 9,
        };
        let bytes = header.encode();
        assert_eq!(Header::decode(&bytes), Some(header));
        for at in 0..bytes.len() {
            let mut changed = bytes;
            changed[at] ^= 4;
            assert_eq!(Header::decode(&changed), None, "byte {at}");
        }
        assert_eq!(Header::decode(&[0; 64]), None);
        let beyond = Header { payload: 1001, ..header };
        assert_eq!(Header::decode(&beyond.encode()), None, "beyond its message");
    }
}
