//! Credit: the reader's head, as it is returned to the writer.
//!
//! ```text
//! offset  size  field (little endian)
//!      0     8  the reader's head
//!      8     8  its complement, with the epoch in the upper half by exclusive or
//! ```
//!
//! The head is sent in full, in bytes from the beginning of the epoch, so credits may arrive in any
//! order: an overtaken one lies behind the known head and is ignored. If only lower bits were sent,
//! an overtaken credit could look like one ahead.

pub(super) const LENGTH: usize = 16;

/// The reader's head in one epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Credit {
    /// The epoch of the ring.
    pub epoch: u32,
    /// The lowest position that is not released.
    pub head: u64,
}

impl Credit {
    /// The encoded credit.
    pub fn encode(&self) -> [u8; LENGTH] {
        let words = u128::from(self.head) | u128::from(self.check()) << 64;
        words.to_le_bytes()
    }

    /// Decodes a credit of this epoch. None if the bytes are of another epoch, or were read while
    /// they were being written.
    pub fn decode(bytes: [u8; LENGTH], epoch: u32) -> Option<Self> {
        let words = u128::from_le_bytes(bytes);
        let credit = Self { epoch, head: words as u64 };
        (credit.check() == (words >> 64) as u64).then_some(credit)
    }

    fn check(&self) -> u64 {
        !self.head ^ u64::from(self.epoch) << 32
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn torn_credit_and_other_epochs_are_rejected(
            head: u64, other in any::<u64>(), epoch: u32, later: u32,
        ) {
            let credit = Credit { epoch, head };
            let bytes = credit.encode();
            prop_assert_eq!(Credit::decode(bytes, epoch), Some(credit));
            prop_assert_eq!(Credit::decode(bytes, later).is_some(), later == epoch);
            // One word of one credit, and one of another.
            let mut torn = bytes;
            torn[8..].copy_from_slice(&Credit { epoch, head: other }.encode()[8..]);
            prop_assert_eq!(Credit::decode(torn, epoch).is_some(), head == other);
        }
    }

    #[test]
    fn zeroed_memory_is_no_credit() {
        for epoch in [0, 1, u32::MAX] {
            assert_eq!(Credit::decode([0; LENGTH], epoch), None);
        }
    }
}
