//! Bytes of the application behind a separate header, for a reader that cannot read the payload.
//!
//! ```text
//! offset  size  field (little endian)
//!      0     4  length of the bytes
//!      4     4  checksum of length and bytes, and of the chunk's position and number
//!      8     …  bytes
//! ```
//!
//! Header and bytes are one write, of which a notice may overtake any part. The checksum belongs to
//! one chunk, so bytes that an earlier chunk left do not count.

use super::ChunkHeader;

/// Bytes before those of the application.
const PREFIX_LENGTH: usize = 8;

/// Bytes behind the header, for so many of the application.
pub(super) const fn length_of(bytes: usize) -> usize {
    PREFIX_LENGTH + bytes
}

/// Writes what stands behind a header to the start of `into`, and returns its length.
pub(super) fn encode(header: &ChunkHeader, bytes: &[u8], into: &mut [u8]) -> usize {
    let length = length_of(bytes.len());
    into[0..4].copy_from_slice(&(bytes.len() as u32).to_le_bytes());
    into[4..8].copy_from_slice(&checksum(header, bytes).to_le_bytes());
    into[PREFIX_LENGTH..length].copy_from_slice(bytes);
    length
}

/// The bytes of the application behind a header. None if they have not arrived.
pub(super) fn decode<'a>(header: &ChunkHeader, behind: &'a [u8]) -> Option<&'a [u8]> {
    let (prefix, rest) = behind.split_first_chunk::<PREFIX_LENGTH>()?;
    let (length, sum) = prefix.split_at(4);
    let length = u32::from_le_bytes(length.try_into().ok()?);
    let bytes = rest.get(..length as usize)?;
    (sum == checksum(header, bytes).to_le_bytes()).then_some(bytes)
}

fn checksum(header: &ChunkHeader, bytes: &[u8]) -> u32 {
    const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
    let add = |sum: u64, word: u64| (sum ^ word).wrapping_mul(ODD).rotate_left(29);
    let known = [header.position, header.sequence, u64::from(header.epoch), bytes.len() as u64];
    let sum = known.into_iter().fold(ODD, add);
    let (words, rest) = bytes.as_chunks::<8>();
    let sum = words.iter().fold(sum, |sum, word| add(sum, u64::from_le_bytes(*word)));
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    let sum = add(sum, u64::from_le_bytes(last));
    (sum ^ sum >> 32) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(sequence: u64) -> ChunkHeader {
        ChunkHeader {
            epoch: 3,
            position: 640,
            sequence,
            message: 5,
            length: 100,
            offset: 0,
            payload: 100,
            topic: 9,
        }
    }

    #[test]
    fn bytes_are_found_behind_their_own_header_only() {
        for length in [0, 1, 7, 8, 100] {
            let bytes: Vec<u8> = (0..length).collect();
            let mut behind = [0; 200];
            let written = encode(&header(7), &bytes, &mut behind);
            assert_eq!(written, length_of(bytes.len()));
            assert_eq!(decode(&header(7), &behind), Some(&bytes[..]));
            assert_eq!(decode(&header(7), &behind[..written]), Some(&bytes[..]));
            assert_eq!(decode(&header(7), &behind[..written - 1]), None);
            assert_eq!(decode(&header(8), &behind), None, "of another chunk");
        }
        assert_eq!(decode(&header(7), &[0; 200]), None);
    }

    /// Every byte may arrive late.
    #[test]
    fn partly_written_bytes_are_detected() {
        let bytes: Vec<u8> = (1..=100).collect();
        let mut behind = [0; 200];
        let written = encode(&header(7), &bytes, &mut behind);
        for at in (0..written).filter(|at| behind[*at] != 0) {
            let mut partial = behind;
            partial[at] = 0;
            assert_eq!(decode(&header(7), &partial), None, "byte {at}");
        }
        let mut forged = behind;
        forged[..4].fill(0xff);
        assert_eq!(decode(&header(7), &forged), None);
    }
}
