//! Shared by the fuzz targets.

pub mod ring;

/// Corrects the length and the checksum of a descriptor.
///
/// Both detect almost every change. An attacker would correct both, and so reach the checks behind
/// them.
#[must_use]
pub fn forge(bytes: &[u8]) -> Option<Vec<u8>> {
    /// Where all descriptors have their length.
    const LENGTH: std::ops::Range<usize> = 6..8;
    let (body, _) = bytes.split_last_chunk::<4>()?;
    let length = u16::try_from(bytes.len()).ok()?;
    let mut forged = body.to_vec();
    forged.get_mut(LENGTH)?.copy_from_slice(&length.to_le_bytes());
    forged.extend(crc32fast::hash(&forged).to_le_bytes());
    Some(forged)
}
