//! Encoding of what other processes read.
//!
//! Control messages are decoded by [`decode`]. Descriptors, which applications keep and send
//! themselves, have a fixed layout: a magic number, a version, a length, and a checksum.
//!
//! ```text
//! offset  size  field (little endian)
//!      0     4  magic number
//!      4     2  version
//!      6     2  total length
//!      …        parts
//!      …     4  CRC-32 of all bytes before
//! ```
//!
//! The checksum detects accidents, not attackers: readers validate the claims of the parts against
//! the memory that exists.

use control::codec::{self, DecodeError};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, ErrorKind, Result};

const HEADER_LENGTH: usize = 8;
const CHECKSUM_LENGTH: usize = 4;
/// Maximum length of a label, in bytes.
pub const MAX_LABEL_LENGTH: usize = 64;
/// Maximum length of the address of an endpoint.
pub(crate) const MAX_ADDRESS_LENGTH: usize = 512;

/// The format of a descriptor, and the operation that its errors name.
pub(crate) struct DescriptorFormat {
    pub(crate) magic: [u8; 4],
    pub(crate) version: u16,
    /// "decode handle"
    pub(crate) operation: &'static str,
}

impl DescriptorFormat {
    pub(crate) fn malformed(&self, detail: impl Into<String>) -> Error {
        Error::new(self.operation, ErrorKind::Malformed, detail)
    }

    /// Starts a descriptor, to be [sealed](Self::seal) when its parts were added.
    pub(crate) fn begin(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(256);
        bytes.extend(self.magic);
        bytes.extend(self.version.to_le_bytes());
        bytes.extend([0; 2]);
        bytes
    }

    /// None if it exceeds the maximum length of a descriptor.
    pub(crate) fn seal(&self, mut bytes: Vec<u8>) -> Option<Vec<u8>> {
        let length = u16::try_from(bytes.len() + CHECKSUM_LENGTH).ok()?;
        bytes[6..8].copy_from_slice(&length.to_le_bytes());
        let checksum = crc32fast::hash(&bytes);
        bytes.extend(checksum.to_le_bytes());
        Some(bytes)
    }

    /// The parts of a descriptor, after its header and checksum were checked.
    pub(crate) fn open<'a>(&'a self, bytes: &'a [u8]) -> Result<Reader<'a>> {
        let mut head = Reader { rest: bytes, format: self };
        if head.take::<4>()? != self.magic {
            return Err(self.malformed("wrong magic number"));
        }
        let version = u16::from_le_bytes(head.take()?);
        if version != self.version {
            let detail = format!("version {version}, this build supports {}", self.version);
            return Err(Error::new(self.operation, ErrorKind::VersionMismatch, detail));
        }
        let length = usize::from(head.u16()?);
        if length != bytes.len() || length < HEADER_LENGTH + CHECKSUM_LENGTH {
            return Err(self.malformed(format!("{} bytes, header says {length}", bytes.len())));
        }
        let (body, checksum) = bytes.split_at(length - CHECKSUM_LENGTH);
        if crc32fast::hash(body).to_le_bytes() != checksum {
            return Err(self.malformed("wrong checksum"));
        }
        Ok(Reader { rest: &body[HEADER_LENGTH..], format: self })
    }
}

/// Takes parts from the front.
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
    format: &'a DescriptorFormat,
}

impl<'a> Reader<'a> {
    pub(crate) fn take<const N: usize>(&mut self) -> Result<[u8; N]> {
        let Some((taken, rest)) = self.rest.split_first_chunk() else {
            return Err(self.too_short(N));
        };
        self.rest = rest;
        Ok(*taken)
    }

    pub(crate) fn bytes(&mut self, length: usize) -> Result<&'a [u8]> {
        let Some((taken, rest)) = self.rest.split_at_checked(length) else {
            return Err(self.too_short(length));
        };
        self.rest = rest;
        Ok(taken)
    }

    pub(crate) fn u16(&mut self) -> Result<u16> {
        self.take().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32> {
        self.take().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64> {
        self.take().map(u64::from_le_bytes)
    }

    /// Bytes with their length (16 bits) before them.
    pub(crate) fn length_prefixed(&mut self, max: usize) -> Result<&'a [u8]> {
        let length = usize::from(self.u16()?);
        if length > max {
            return Err(self
                .format
                .malformed(format!("{length} bytes in a part, {max} is the maximum")));
        }
        self.bytes(length)
    }

    /// Fails if bytes are left.
    pub(crate) fn finish(self) -> Result<()> {
        match self.rest.len() {
            0 => Ok(()),
            more => Err(self.format.malformed(format!("{more} bytes follow the last part"))),
        }
    }

    fn too_short(&self, wanted: usize) -> Error {
        self.format.malformed(format!("{} bytes left, {wanted} needed", self.rest.len()))
    }
}

pub(crate) fn put_length_prefixed(bytes: &mut Vec<u8>, part: &[u8]) {
    // `seal` refuses longer parts with the whole.
    let length = u16::try_from(part.len()).unwrap_or(u16::MAX);
    bytes.extend(length.to_le_bytes());
    bytes.extend(part);
}

/// Decodes and validates a control message of this version.
pub(crate) fn decode<T: Serialize + DeserializeOwned>(
    operation: &'static str,
    version: u8,
    bytes: &[u8],
) -> Result<T> {
    codec::decode(version, bytes).map_err(|error| {
        let kind = match error {
            DecodeError::Tag { .. } => ErrorKind::VersionMismatch,
            _ => ErrorKind::Malformed,
        };
        Error::new(operation, kind, error.to_string())
    })
}

pub(crate) fn malformed(operation: &'static str, detail: impl Into<String>) -> Error {
    Error::new(operation, ErrorKind::Malformed, detail)
}
