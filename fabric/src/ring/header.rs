//! The header before a chunk's payload in the ring.
//!
//! ```text
//! offset  size  field (little endian)
//!      0     4  "FcRg"
//!      4     4  epoch
//!      8     8  position of this header
//!     16     8  sequence number of the chunk
//!     24     8  index of the message
//!     32     8  length of the message
//!     40     8  offset of the payload in the message
//!     48     4  length of the payload
//!     52     4  topic
//!     56     4  0
//!     60     4  checksum of the bytes before
//! ```
//!
//! The position distinguishes an old header, left in the ring from an earlier round, from the
//! expected one. The checksum detects headers that were only partly written, or never were headers.
//! The checksum does not protect against a hostile peer: the reader checks every field. It is a sum
//! of products, since a CRC of so few bytes would take as long as the rest of a short message.

/// Bytes of a header: a granule.
pub const HEADER_LEN: u64 = 64;
const MAGIC: [u8; 4] = *b"FcRg";

/// The header of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkHeader {
    /// The epoch in which it was written.
    pub epoch: u32,
    /// The position of this header.
    pub position: u64,
    /// Index of the chunk in its epoch, from 0.
    pub sequence: u64,
    /// Index of the message in the ring, over all epochs, from 0.
    pub message: u64,
    /// Length of the whole message in bytes.
    pub length: u64,
    /// Offset of the payload in the message.
    pub offset: u64,
    /// Length of the payload in bytes.
    pub payload: u32,
    /// Topic of the message, by the numbering of the application.
    pub topic: u32,
}

impl ChunkHeader {
    /// The encoded header.
    #[must_use]
    #[inline]
    pub fn encode(&self) -> [u8; HEADER_LEN as usize] {
        let mut words = [
            u64::from(u32::from_le_bytes(MAGIC)) | u64::from(self.epoch) << 32,
            self.position,
            self.sequence,
            self.message,
            self.length,
            self.offset,
            u64::from(self.payload) | u64::from(self.topic) << 32,
            0,
        ];
        words[7] = u64::from(checksum(&words)) << 32;
        let mut bytes = [0; HEADER_LEN as usize];
        for (slot, word) in bytes.chunks_exact_mut(8).zip(words) {
            slot.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Decodes a header. None if the bytes are no header or contradict themselves.
    #[must_use]
    #[inline]
    pub fn decode(bytes: &[u8; HEADER_LEN as usize]) -> Option<Self> {
        let mut words = [0; HEADER_LEN as usize / 8];
        for (word, slot) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_le_bytes(slot.try_into().ok()?);
        }
        let magic = u64::from(u32::from_le_bytes(MAGIC));
        if words[0] & 0xffff_ffff != magic || words[7] != u64::from(checksum(&words)) << 32 {
            return None;
        }
        let header = Self {
            epoch: (words[0] >> 32) as u32,
            position: words[1],
            sequence: words[2],
            message: words[3],
            length: words[4],
            offset: words[5],
            payload: words[6] as u32,
            topic: (words[6] >> 32) as u32,
        };
        let end = header.offset.checked_add(header.payload.into())?;
        (end <= header.length).then_some(header)
    }
}

/// Checksum of the first seven words. Each has its own odd factor, so a change of one word always
/// changes the sum, and so does swapping two words.
#[inline]
fn checksum(words: &[u64; HEADER_LEN as usize / 8]) -> u32 {
    const ODD: [u64; 7] = [
        0x9e37_79b9_7f4a_7c15,
        0xc2b2_ae3d_27d4_eb4f,
        0x1656_67b1_9e37_79f9,
        0x27d4_eb2f_1656_67c5,
        0x85eb_ca77_c2b2_ae63,
        0xff51_afd7_ed55_8ccd,
        0xc4ce_b9fe_1a85_ec53,
    ];
    let sum = words.iter().zip(ODD).fold(0_u64, |sum, (word, odd)| {
        // Folded first: the lower half of a product does not depend on the upper bits.
        sum.wrapping_add((word ^ word >> 32).wrapping_mul(odd))
    });
    (sum ^ sum >> 32) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_round_trips_and_every_bit_flip_is_detected() {
        let header = ChunkHeader {
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
        assert_eq!(ChunkHeader::decode(&bytes), Some(header));
        for at in 0..bytes.len() {
            let mut changed = bytes;
            for bit in 0..8 {
                changed[at] = bytes[at] ^ 1 << bit;
                assert_eq!(ChunkHeader::decode(&changed), None, "bit {bit} of byte {at}");
            }
        }
        assert_eq!(ChunkHeader::decode(&[0; 64]), None);
        let beyond = ChunkHeader { payload: 1001, ..header };
        assert_eq!(ChunkHeader::decode(&beyond.encode()), None, "beyond its message");
    }
}
