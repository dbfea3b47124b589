//! The 32 bits that arrive with a write: the least that providers with immediates carry.
//!
//! ```text
//! 31 30   29 … 26   25 … 16   15 … 0
//! kind    epoch     ring      amount
//!
//! kind 0  a chunk arrived; amount: lower 16 bits of its sequence number
//!      1  the reader closes the ring; amount: 0
//!      2  credit; amount: lower 16 bits of the number of chunks released
//!      3  the writer closes the ring; amount: lower 16 bits of the number of chunks
//! ```
//!
//! Kinds 0 and 3 go to the reader and carry the reader's index of the ring. Kinds 1 and 2 go to the
//! writer and carry the writer's index.
//!
//! What does not fit here (length and number of a message, its topic, the whole epoch) is in the
//! chunk's header; the reader's head is in the [credit](super::credit) that accompanies its notice.
//! Four bits of the epoch are enough to discard late notices of the last few epochs; the header has
//! all bits.

/// Rings that immediates on one endpoint can distinguish.
pub(super) const MAX_RINGS: u16 = 1 << 10;
const EPOCH_MODULUS: u32 = 1 << 4;

/// The event that a notice reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RingNotice {
    /// A chunk with a header has arrived.
    Chunk {
        /// The lower bits of its sequence number.
        sequence: u16,
    },
    /// The reader released chunks; its head accompanies the notice.
    Credit {
        /// The lower bits of the number of chunks released in this epoch.
        released: u16,
    },
    /// The writer sends no more chunks.
    WriterClosed {
        /// The lower bits of the number of chunks written.
        sequence: u16,
    },
    /// The reader has closed the ring.
    ReaderClosed,
}

/// A decoded immediate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Immediate {
    /// Index of the ring at the receiving side.
    pub ring: u16,
    /// The ring's epoch, of which only the lower four bits are transmitted.
    pub epoch: u32,
    /// The event.
    pub notice: RingNotice,
}

impl Immediate {
    /// The 32 bits. An index of 1024 or above loses its upper bits: no
    /// [`RingGeometry`](super::RingGeometry) has one.
    pub fn encode(&self) -> u32 {
        let (kind, amount) = match self.notice {
            RingNotice::Chunk { sequence } => (0, sequence),
            RingNotice::Credit { released } => (2, released),
            RingNotice::WriterClosed { sequence } => (3, sequence),
            RingNotice::ReaderClosed => (1, 0),
        };
        kind << 30
            | (self.epoch % EPOCH_MODULUS) << 26
            | u32::from(self.ring % MAX_RINGS) << 16
            | u32::from(amount)
    }

    /// Decodes the bits: every pattern is valid.
    pub fn decode(bits: u32) -> Self {
        let amount = bits as u16;
        let notice = match bits >> 30 {
            0 => RingNotice::Chunk { sequence: amount },
            1 => RingNotice::ReaderClosed,
            2 => RingNotice::Credit { released: amount },
            _ => RingNotice::WriterClosed { sequence: amount },
        };
        Self {
            ring: (bits >> 16) as u16 % MAX_RINGS,
            epoch: bits >> 26 & (EPOCH_MODULUS - 1),
            notice,
        }
    }

    /// Could it belong to this epoch?
    pub fn matches_epoch(&self, epoch: u32) -> bool {
        self.epoch % EPOCH_MODULUS == epoch % EPOCH_MODULUS
    }
}

/// The full number for its lower 16 bits: the one nearest to the expected number, at most 2¹⁵
/// before or after it. None below 0.
pub(super) fn expand_truncated(expected: u64, lower: u16) -> Option<u64> {
    let difference = lower.wrapping_sub(expected as u16) as i16;
    expected.checked_add_signed(difference.into())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn immediate_carries_the_lower_bits_of_the_epoch() {
        let notice = RingNotice::Chunk { sequence: 40_000 };
        let immediate = Immediate { ring: 1023, epoch: 17, notice };
        let decoded = Immediate::decode(immediate.encode());
        assert_eq!(decoded, Immediate { epoch: 1, ..immediate });
        assert!(immediate.matches_epoch(17) && !immediate.matches_epoch(18));
    }

    #[test]
    fn truncated_number_expands_to_the_nearest() {
        assert_eq!(expand_truncated(0, 0), Some(0));
        assert_eq!(expand_truncated(0, 5), Some(5));
        assert_eq!(expand_truncated(0, 0xffff), None, "before the first");
        assert_eq!(expand_truncated(0x1_0000, 0xffff), Some(0xffff));
        assert_eq!(expand_truncated(0xffff, 0), Some(0x1_0000));
        assert_eq!(expand_truncated(0x1_0000, 0x7fff), Some(0x1_7fff));
        assert_eq!(expand_truncated(0x1_0000, 0x8000), Some(0x8000), "before the expected number");
    }

    proptest! {
        #[test]
        fn every_bit_pattern_decodes_uniquely(bits: u32) {
            let immediate = Immediate::decode(bits);
            let again = immediate.encode();
            // Kinds without an amount ignore those bits.
            let has_no_amount = immediate.notice == RingNotice::ReaderClosed;
            prop_assert!(again == bits || has_no_amount);
            prop_assert_eq!(Immediate::decode(again), immediate);
        }

        #[test]
        fn truncated_number_near_the_expected_is_recovered(expected in 0_u64..1 << 48, difference in -32_768_i64..32_768) {
            if let Some(meant) = expected.checked_add_signed(difference) {
                prop_assert_eq!(expand_truncated(expected, meant as u16), Some(meant));
            }
        }
    }
}
