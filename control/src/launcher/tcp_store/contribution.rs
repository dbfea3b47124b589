//! How the bytes of a rank are stored: a head with their length and beginning, then pieces.
//!
//! ```text
//! offset  size  field of the head
//!      0     8  n, number of bytes; little-endian
//!      8     …  the first bytes: min(n, FIRST)
//! ```

use std::ops::Range;

/// Most bytes of a rank.
pub(super) const MAX: usize = 16 << 20;
/// Bytes in the head: those of most ranks, so that one query gets them.
const FIRST: usize = 16 << 10;
pub(super) const MAX_HEAD: usize = size_of::<u64>() + FIRST;
/// Bytes in a piece. The store handles one query at a time, and copies the value.
const PIECE: usize = 1 << 20;

pub(super) fn head(bytes: &[u8]) -> Vec<u8> {
    let mut head = (bytes.len() as u64).to_le_bytes().to_vec();
    head.extend(&bytes[..bytes.len().min(FIRST)]);
    head
}

/// The length of a contribution, and its first bytes; None if this is no head.
pub(super) fn open_head(head: &[u8]) -> Option<(usize, &[u8])> {
    let (length, first) = head.split_first_chunk()?;
    let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
    (length <= MAX && first.len() == length.min(FIRST)).then_some((length, first))
}

/// What each piece of a contribution holds, apart from its head.
pub(super) fn pieces(length: usize) -> impl Iterator<Item = Range<usize>> + Clone {
    (FIRST..length).step_by(PIECE).map(move |start| start..length.min(start + PIECE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn head_and_pieces_are_the_whole() {
        for length in [0, 1, FIRST - 1, FIRST, FIRST + 1, FIRST + PIECE, FIRST + PIECE + 1, MAX] {
            let bytes = vec![7; length];
            let head = head(&bytes);
            assert!(head.len() <= MAX_HEAD);
            let (claimed, first) = open_head(&head).unwrap();
            assert_eq!(claimed, length);
            let mut end = first.len();
            for piece in pieces(length) {
                assert_eq!(piece.start, end);
                assert!((1..=PIECE).contains(&piece.len()));
                end = piece.end;
            }
            assert_eq!(end, length);
        }
    }

    #[test]
    fn other_heads_are_refused() {
        let head = head(&[7; 100]);
        for end in 0..head.len() {
            assert_eq!(open_head(&head[..end]), None);
        }
        assert_eq!(open_head(&[&head[..], &[7]].concat()), None);
        let too_long = [&(MAX as u64 + 1).to_le_bytes()[..], &[7; FIRST]].concat();
        assert_eq!(open_head(&too_long), None);
        assert_eq!(open_head(&[0xff; MAX_HEAD]), None);
    }
}
