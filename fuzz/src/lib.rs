//! What fuzz targets have in common.

pub mod ring;

/// Makes the length and the checksum of a descriptor right.
///
/// Almost every change is found by one of the two. Whoever means harm would make both
/// right, and so get at the checks behind them.
#[must_use]
pub fn forge(bytes: &[u8]) -> Option<Vec<u8>> {
    /// Where all descriptors say how long they are.
    const LENGTH: std::ops::Range<usize> = 6..8;
    let (body, _) = bytes.split_last_chunk::<4>()?;
    let length = u16::try_from(bytes.len()).ok()?;
    let mut forged = body.to_vec();
    forged.get_mut(LENGTH)?.copy_from_slice(&length.to_le_bytes());
    forged.extend(crc32fast::hash(&forged).to_le_bytes());
    Some(forged)
}
