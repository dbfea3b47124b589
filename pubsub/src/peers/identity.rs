//! Ids of instances of services and of sessions.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{ServiceInstance, SplitMix64};
use crate::clock;

pub(super) const MAX_LABEL_LENGTH: usize = 64;

/// A session between two nodes: the connection that both agreed to use. Both know it by the same
/// number, which is never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct SessionId(pub(crate) u64);

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl ServiceInstance {
    pub(crate) fn new(nonce: u64) -> Self {
        Self { started: clock::now(), nonce }
    }
}

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

/// Text of other nodes, safe to print: control characters could move the cursor.
pub(super) fn printable(text: &str) -> String {
    text.chars()
        .map(|character| if character.is_control() { '\u{fffd}' } else { character })
        .collect()
}
