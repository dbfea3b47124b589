//! Who a node is, which start of its service speaks, and which connection.

use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The longest label of a node, in bytes.
pub(super) const MAX_LABEL_LENGTH: usize = 64;

/// The identity of a node: the random UUID of its service.
///
/// ```
/// use pubsub::NodeId;
/// let node = NodeId(*b"0123456789abcdef");
/// assert_eq!(node.to_string(), "30313233-3435-3637-3839-616263646566");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NodeId(pub [u8; 16]);

impl NodeId {
    /// A new one.
    ///
    /// # Errors
    /// If the system gives no random bytes.
    pub fn random() -> Result<Self> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).map_err(|cause| Error::of("create a node id", cause))?;
        // What makes it a UUID of the random kind.
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

/// A session between two nodes: one connection that both have agreed to use. Both
/// know it by the same number, which neither uses again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct SessionId(pub(crate) u64);

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// One start of a node's service. A later one takes the place of an earlier one that has no session
/// any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct ServiceInstance {
    /// Nanoseconds since 1970.
    pub(super) started: u64,
    /// Tells apart those that started at the same time.
    pub(super) chance: u64,
}

impl ServiceInstance {
    pub(crate) fn new(chance: u64) -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { started: since.as_nanos() as u64, chance }
    }
}

/// Chance that can be repeated, for what needs no secrecy.
#[derive(Debug, Clone)]
pub(super) struct SplitMix64(pub(super) u64);

impl SplitMix64 {
    pub(super) fn draw(&mut self) -> u64 {
        // A counter whose steps are spread over all bits.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }
}

/// As it may be shown: what others say of themselves could else move the cursor.
pub(super) fn printable(text: &str) -> String {
    text.chars().map(|letter| if letter.is_control() { '\u{fffd}' } else { letter }).collect()
}
