//! Ids of nodes and publishers.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The id of a node: the random UUID of its service.
///
/// ```
/// use pubsub::NodeId;
/// let node = NodeId(*b"0123456789abcdef");
/// assert_eq!(node.to_string(), "30313233-3435-3637-3839-616263646566");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NodeId(pub [u8; 16]);

impl NodeId {
    /// A new random id.
    ///
    /// # Errors
    /// If the system gives no random bytes.
    pub fn random() -> Result<Self> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).map_err(|cause| Error::of("create node id", cause))?;
        // Version and variant bits of a random UUID.
        bytes[6] = bytes[6] & 0x0f | 0x40;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        Ok(Self(bytes))
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, byte) in self.0.iter().enumerate() {
            if matches!(index, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Bits of a publisher's serial within its topic; the topic's number is above them.
const SERIAL_BITS: u32 = 27;

/// The last serial below those of the topic with this number, and of later topics. A topic that was
/// created again under the same name has greater serials than before.
pub(crate) fn serials_before(topic: u32) -> u64 {
    u64::from(topic) << SERIAL_BITS
}

/// Identifies a publisher among all that its node ever had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PublisherId(pub(crate) u64);

impl PublisherId {
    /// Converts the identifier to a number.
    #[must_use]
    pub fn as_u64(self) -> u64 {
        self.0
    }
}

impl fmt::Display for PublisherId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The topic's number is left out: it is the same for all publishers of a topic.
        write!(f, "{}.{}", (self.0 >> 8) & ((1 << SERIAL_BITS) - 1), self.0 & 0xff)
    }
}

/// Bytes as words; zeros fill the last one.
pub(crate) fn bytes_to_words(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.chunks(size_of::<u64>()).map(|some| {
        let mut word = [0; size_of::<u64>()];
        word[..some.len()].copy_from_slice(some);
        u64::from_le_bytes(word)
    })
}

pub(crate) fn id_to_words(id: &[u8; 16]) -> [u64; 2] {
    let number = u128::from_le_bytes(*id);
    [number as u64, (number >> 64) as u64]
}

pub(crate) fn id_from_words([low, high]: [u64; 2]) -> [u8; 16] {
    (u128::from(high) << 64 | u128::from(low)).to_le_bytes()
}
