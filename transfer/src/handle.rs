//! The format of handles of shared memory: bytes, accompanied by file descriptors.
//!
//! ```text
//! offset  size  field (little endian); header and checksum as in `wire`
//!      0     8  "FcSH", version (now 1), length of the whole
//!      8    16  identity: random, one for each time memory is shared
//!     24    16  UUID of the device of the memory; zeros for the host
//!     40     1  handle type: 1 file descriptors, 2 legacy handle
//!     41     1  1: read-only, 2: of a pool
//!     42     1  dimensions, n
//!     43     4  element type: code, bits, lanes (2)
//!     47     2  runs of pieces of the same length, r
//!     49     8  length of the memory
//!     57     8  offset of the memory in the first piece, or in the allocation
//!     65     8  byte offset of the tensor
//!     73   16n  for each dimension its length (8) and its stride (8, signed)
//!  …     12r    for each run its pieces (4) and their length (8)
//!  …     64     legacy only: the driver's handle
//!  …        4   CRC-32 of all bytes before
//! ```
//!
//! The checksum detects accidents, not attackers. The channel reports the sender's credentials. The
//! claims of the bytes are validated here, and against the memory when the handle is opened.

use std::os::fd::OwnedFd;

use gpu::{LegacyHandle, Uuid};

use crate::error::{Error, ErrorKind, Result};
use crate::tensor::{ElementType, MAX_DIMENSIONS, Tensor};
use crate::wire::{DescriptorFormat, Reader};

const FORMAT: DescriptorFormat =
    DescriptorFormat { magic: *b"FcSH", version: 1, operation: OPERATION };
/// 2 MiB each: two tebibytes.
const MAX_PIECES: usize = 1 << 20;
/// What fits in a handle.
const MAX_RUNS: usize = 4096;
const OPERATION: &str = "decode handle";

/// How the memory is exported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HandleType {
    /// By one file descriptor per piece.
    Descriptors {
        /// Lengths of the pieces.
        pieces: Vec<u64>,
        /// Offset of the memory in the first piece.
        offset: u64,
    },
    /// By the driver's handle of a `cudaMalloc` allocation.
    Legacy(LegacyHandle),
}

/// The contents of a handle without its descriptors.
///
/// ```
/// use gpu::Uuid;
/// use transfer::{HandleMetadata, HandleType, Tensor};
/// let metadata = HandleMetadata {
///     identity: [1; 16],
///     device: Some(Uuid([2; 16])),
///     length: 4096,
///     is_read_only: false,
///     is_of_pool: false,
///     handle_type: HandleType::Descriptors { pieces: vec![4096], offset: 0 },
///     tensor: Tensor::bytes(4096),
/// };
/// let bytes = metadata.encode();
/// assert_eq!(HandleMetadata::decode(&bytes)?, metadata);
/// assert!(HandleMetadata::decode(&bytes[..bytes.len() - 1]).is_err());
/// # Ok::<(), transfer::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HandleMetadata {
    /// Random, new for each shared buffer. Handles with the same identity are mapped once.
    pub identity: [u8; 16],
    /// The device of the memory; None for the host.
    pub device: Option<Uuid>,
    /// Length of the memory in bytes.
    pub length: u64,
    /// Receivers may not write to it. Memory of the host is exported read-only; devices do not
    /// support that.
    pub is_read_only: bool,
    /// Many blocks of it are shared, so receivers keep its mapping for a while.
    pub is_of_pool: bool,
    /// How it is exported.
    pub handle_type: HandleType,
    /// What the bytes mean.
    pub tensor: Tensor,
}

/// A handle: metadata and descriptors, to be sent to another process.
#[derive(Debug)]
pub struct Handle {
    /// Metadata, encoded as bytes.
    pub metadata: HandleMetadata,
    /// One for each piece.
    pub descriptors: Vec<OwnedFd>,
}

impl HandleMetadata {
    /// Encodes the metadata.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let tensor = &self.tensor;
        let (kind, pieces, offset): (u8, &[u64], u64) = match &self.handle_type {
            HandleType::Descriptors { pieces, offset } => (1, pieces, *offset),
            HandleType::Legacy(handle) => (2, &[], handle.offset),
        };
        let runs: Vec<_> = pieces.chunk_by(|one, next| one == next).collect();
        let mut bytes = FORMAT.begin();
        bytes.extend(self.identity);
        bytes.extend(self.device.map_or([0; 16], |device| device.0));
        let dimensions = tensor.shape.len().min(MAX_DIMENSIONS);
        let (code, bits, lanes) = tensor.element.codes();
        let flags = u8::from(self.is_read_only) | u8::from(self.is_of_pool) << 1;
        bytes.extend([kind, flags, dimensions as u8, code, bits]);
        bytes.extend(lanes.to_le_bytes());
        bytes.extend((runs.len() as u16).to_le_bytes());
        bytes.extend(self.length.to_le_bytes());
        bytes.extend(offset.to_le_bytes());
        bytes.extend(tensor.byte_offset.to_le_bytes());
        for (length, stride) in tensor.shape.iter().zip(&tensor.strides).take(dimensions) {
            bytes.extend(length.to_le_bytes());
            bytes.extend(stride.to_le_bytes());
        }
        for run in runs {
            bytes.extend((run.len() as u32).to_le_bytes());
            bytes.extend(run[0].to_le_bytes());
        }
        if let HandleType::Legacy(handle) = &self.handle_type {
            bytes.extend(handle.bytes);
        }
        // Shorter than the maximum of a descriptor: shared memory has few runs.
        FORMAT.seal(bytes).unwrap_or_default()
    }

    /// Can it be encoded?
    pub(crate) fn check_pieces(operation: &'static str, pieces: &[u64]) -> Result<()> {
        let runs = pieces.chunk_by(|one, next| one == next).count();
        if pieces.len() <= MAX_PIECES && runs <= MAX_RUNS {
            return Ok(());
        }
        let detail = format!(
            "{} pieces in {runs} runs of the same length, {MAX_PIECES} and {MAX_RUNS} are the maximum",
            pieces.len()
        );
        Err(Error::new(operation, ErrorKind::TooMany, detail))
    }

    /// Decodes and validates the result of [`encode`](Self::encode).
    ///
    /// # Errors
    /// [`Malformed`](ErrorKind::Malformed), [`VersionMismatch`](ErrorKind::VersionMismatch),
    /// and [`OutOfBounds`](ErrorKind::OutOfBounds) for a tensor beyond its memory.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let malformed = |detail: &str| FORMAT.malformed(detail);
        let mut reader = FORMAT.open(bytes)?;
        let identity = reader.take()?;
        let device = Some(reader.take()?).filter(|uuid| *uuid != [0; 16]).map(Uuid);
        let [kind, flags, dimensions, code, bits] = reader.take()?;
        let (lanes, runs) = (reader.u16()?, usize::from(reader.u16()?));
        let dimensions = usize::from(dimensions);
        let is_consistent = match kind {
            1 => (1..=MAX_RUNS).contains(&runs),
            2 => runs == 0 && device.is_some(),
            _ => false,
        };
        if !is_consistent || dimensions > MAX_DIMENSIONS || flags > 3 {
            return Err(malformed("unknown handle type, or parts that contradict it"));
        }
        let Some(element) = ElementType::new(code, bits, lanes) else {
            return Err(malformed("unknown element type"));
        };
        let (length, offset, byte_offset) = (reader.u64()?, reader.u64()?, reader.u64()?);
        let (mut shape, mut strides) = (Vec::new(), Vec::new());
        for _ in 0..dimensions {
            shape.push(reader.u64()?);
            strides.push(i64::from_le_bytes(reader.take()?));
        }
        let handle_type = if kind == 1 {
            HandleType::Descriptors { pieces: read_pieces(&mut reader, runs)?, offset }
        } else {
            HandleType::Legacy(LegacyHandle { bytes: reader.take()?, offset, length })
        };
        reader.finish()?;
        if let HandleType::Descriptors { pieces, offset } = &handle_type {
            let sum = pieces.iter().try_fold(0_u64, |sum, piece| sum.checked_add(*piece));
            let end = offset.checked_add(length);
            if sum.is_none() || end.is_none() || end > sum {
                return Err(malformed("the pieces are shorter than the memory"));
            }
            if device.is_none() && (pieces.len(), *offset) != (1, 0) {
                return Err(malformed("memory of the host is one piece"));
            }
        }
        let tensor = Tensor { element, shape, strides, byte_offset };
        tensor.check(OPERATION, length)?;
        let (is_read_only, is_of_pool) = (flags & 1 != 0, flags & 2 != 0);
        Ok(Self { identity, device, length, is_read_only, is_of_pool, handle_type, tensor })
    }

    /// The number of descriptors.
    #[must_use]
    pub fn pieces(&self) -> usize {
        match &self.handle_type {
            HandleType::Descriptors { pieces, .. } => pieces.len(),
            HandleType::Legacy(_) => 0,
        }
    }
}

/// Lengths of pieces, from runs that differ from their neighbours.
fn read_pieces(reader: &mut Reader<'_>, runs: usize) -> Result<Vec<u64>> {
    let mut pieces: Vec<u64> = Vec::new();
    for _ in 0..runs {
        let (count, length) = (reader.u32()? as usize, reader.u64()?);
        let is_valid = length > 0 && count > 0 && pieces.last() != Some(&length);
        if !is_valid || pieces.len() + count > MAX_PIECES {
            return Err(FORMAT.malformed("an empty piece, or too many pieces"));
        }
        pieces.resize(pieces.len() + count, length);
    }
    Ok(pieces)
}

impl Handle {
    /// From the parts of a message.
    ///
    /// # Errors
    /// As for [decoding](HandleMetadata::decode); [`Malformed`](ErrorKind::Malformed) if the number
    /// of descriptors does not match. The descriptors are closed then.
    pub fn from_parts(bytes: &[u8], descriptors: Vec<OwnedFd>) -> Result<Self> {
        let metadata = HandleMetadata::decode(bytes)?;
        if descriptors.len() == metadata.pieces() {
            return Ok(Self { metadata, descriptors });
        }
        let detail = format!("{} descriptors instead of {}", descriptors.len(), metadata.pieces());
        Err(Error::new(OPERATION, ErrorKind::Malformed, detail))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn metadata(handle_type: HandleType) -> HandleMetadata {
        let tensor = Tensor {
            element: ElementType::BF16,
            shape: vec![3, 5],
            strides: vec![-5, 1],
            byte_offset: 40,
        };
        HandleMetadata {
            identity: [7; 16],
            device: Some(Uuid([8; 16])),
            length: 4096,
            is_read_only: true,
            is_of_pool: true,
            handle_type,
            tensor,
        }
    }

    fn both() -> [HandleMetadata; 2] {
        let legacy = LegacyHandle { bytes: [3; 64], offset: 512, length: 4096 };
        let pieces = vec![2048, 2048, 4096];
        [
            metadata(HandleType::Descriptors { pieces, offset: 100 }),
            metadata(HandleType::Legacy(legacy)),
        ]
    }

    fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
        bytes.truncate(bytes.len() - 4);
        let checksum = crc32fast::hash(&bytes);
        bytes.extend(checksum.to_le_bytes());
        bytes
    }

    #[test]
    fn encoded_metadata_is_decoded() {
        for metadata in both() {
            assert_eq!(HandleMetadata::decode(&metadata.encode()).unwrap(), metadata);
        }
    }

    #[test]
    fn every_truncation_and_every_changed_byte_is_detected() {
        for metadata in both() {
            let bytes = metadata.encode();
            for length in 0..bytes.len() {
                assert!(HandleMetadata::decode(&bytes[..length]).is_err(), "{length} bytes");
            }
            for at in 0..bytes.len() {
                let mut changed = bytes.clone();
                changed[at] ^= 0x10;
                assert!(HandleMetadata::decode(&changed).is_err(), "byte {at}");
            }
            assert!(HandleMetadata::decode(&[bytes, vec![0]].concat()).is_err(), "one byte more");
        }
    }

    #[test]
    fn contradictions_with_a_valid_checksum_are_refused() {
        let refused = |at: usize, new: &[u8]| {
            let mut bytes = both()[0].encode();
            bytes[at..at + new.len()].copy_from_slice(new);
            HandleMetadata::decode(&sealed(bytes)).unwrap_err().kind()
        };
        assert_eq!(refused(4, &[9, 0]), ErrorKind::VersionMismatch);
        assert_eq!(refused(40, &[3]), ErrorKind::Malformed, "unknown handle type");
        assert_eq!(refused(40, &[2]), ErrorKind::Malformed, "a legacy handle with pieces");
        assert_eq!(refused(41, &[4]), ErrorKind::Malformed, "an unknown flag");
        assert_eq!(refused(42, &[17]), ErrorKind::Malformed, "dimensions");
        assert_eq!(refused(43, &[18]), ErrorKind::Malformed, "unknown element type");
        assert_eq!(refused(47, &[0]), ErrorKind::Malformed, "pieces");
        assert_eq!(refused(49, &[0xff; 8]), ErrorKind::Malformed, "longer than its pieces");
        assert_eq!(refused(57, &[0xff; 8]), ErrorKind::Malformed, "an offset beyond its pieces");
        assert_eq!(refused(65, &[0xff; 8]), ErrorKind::OutOfBounds, "the offset of the tensor");
        assert_eq!(refused(73, &[0xff; 8]), ErrorKind::OutOfBounds, "the shape");
        assert_eq!(refused(105, &[0xff; 4]), ErrorKind::Malformed, "too many pieces");
        assert_eq!(refused(109, &[0; 8]), ErrorKind::Malformed, "empty pieces");
        assert_eq!(refused(109, &4096_u64.to_le_bytes()), ErrorKind::Malformed, "one run, as two");
        let mut host = both()[1].encode();
        host[24..40].fill(0);
        let error = HandleMetadata::decode(&sealed(host)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Malformed, "a legacy handle without a device");
    }

    #[test]
    fn the_fuzzers_corpus_does_not_panic() {
        let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus/share_handle");
        let mut seen = 0;
        for entry in std::fs::read_dir(corpus).expect("the corpus is part of the repository") {
            let bytes = std::fs::read(entry.unwrap().path()).unwrap();
            if let Ok(metadata) = HandleMetadata::decode(&bytes) {
                assert_eq!(metadata.encode(), bytes);
            }
            seen += 1;
        }
        assert!(seen > 0, "the corpus is empty");
    }

    #[test]
    fn wrong_number_of_descriptors_is_refused() {
        let bytes = both()[0].encode();
        let file = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        for count in [0, 1, 2, 4] {
            let descriptors = (0..count).map(|_| file()).collect();
            let error = Handle::from_parts(&bytes, descriptors).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Malformed);
        }
        assert!(Handle::from_parts(&bytes, vec![file(), file(), file()]).is_ok());
    }

    proptest! {
        #[test]
        fn garbage_is_refused(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            prop_assert!(HandleMetadata::decode(&bytes).is_err());
        }

        #[test]
        fn garbage_with_a_good_frame_never_panics(
            mut body in proptest::collection::vec(any::<u8>(), 65..400),
            dimensions in 0..20_u8,
        ) {
            body[32..35].copy_from_slice(&[1 + dimensions % 2, 0, dimensions]);
            body[35..41].copy_from_slice(&[2, 32, 1, 0, dimensions % 3, 0]);
            let bytes = [FORMAT.begin(), body].concat();
            let _ = HandleMetadata::decode(&FORMAT.seal(bytes).unwrap());
        }
    }
}
