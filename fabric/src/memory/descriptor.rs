//! The encoding of a region descriptor: one versioned, self-contained, checked sequence of
//! bytes.
//!
//! ```text
//! offset  size  field (little endian)
//!      0     4  "FcMR"
//!      4     2  version, now 1
//!      6     2  length of the whole descriptor
//!      8     4  protocol number of the provider
//!     12     4  memory interface
//!     16     4  device number (signed)
//!     20     4  access: bit 0 remote read, bit 1 remote write
//!     24     8  length of the region
//!     32     8  base: the address of offset 0 at the target
//!     40     2  length of the key; 0x8000 is added for a raw key
//!     42     n  key (8 bytes if not raw)
//!   42+n     4  CRC-32 of all bytes before
//! ```
//!
//! The checksum detects accidents, not attackers: region descriptors must be sent over an
//! authenticated channel.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::{Access, Error, ErrorKind, MemoryKind, Result};

const MAGIC: [u8; 4] = *b"FcMR";
const VERSION: u16 = 1;
const FIXED_LENGTH: usize = 42;
const CHECKSUM: usize = 4;
const RAW_KEY: u16 = 0x8000;
/// Far above the key size of any provider; bounds the claim of a peer.
const MAX_KEY_LENGTH: usize = 1024;
const OPERATION: &str = "decode region descriptor";

/// The key of a region at its owner.
#[derive(Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RemoteKey {
    /// Usable in operations without mapping.
    Plain(u64),
    /// Must be mapped by the peer first (`fi_mr_map_raw`).
    Raw(Vec<u8>),
}

impl std::fmt::Debug for RemoteKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Keys are a capability: they must not appear in logs.
        match self {
            Self::Plain(_) => f.write_str("Plain(..)"),
            Self::Raw(bytes) => write!(f, "Raw({} bytes)", bytes.len()),
        }
    }
}

/// A region as its owner describes it to a peer.
///
/// ```
/// use fabric::{Access, Domain, EndpointKind, HostMemory, Query, RemoteRegion};
/// # let offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first()?;
/// # let domain = Domain::open(&offer)?;
/// let region = domain.register(HostMemory::zeroed(4096)?, Access::ALL)?;
/// let bytes = region.describe()?.encode();
/// // … the bytes are sent to a peer …
/// let remote = RemoteRegion::decode(&bytes)?;
/// assert_eq!(remote.len(), 4096);
/// # Ok::<(), fabric::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteRegion {
    protocol: u32,
    kind: MemoryKind,
    access: Access,
    length: u64,
    base: u64,
    key: RemoteKey,
}

impl RemoteRegion {
    pub(crate) fn new(
        protocol: u32,
        kind: MemoryKind,
        access: Access,
        length: u64,
        base: u64,
        key: RemoteKey,
    ) -> Self {
        Self { protocol, kind, access: access & Access::REMOTE, length, base, key }
    }

    /// Length of the region in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.length
    }

    /// The access that peers have.
    #[must_use]
    pub fn access(&self) -> Access {
        self.access
    }

    /// The kind of memory.
    #[must_use]
    pub fn kind(&self) -> MemoryKind {
        self.kind
    }

    /// Number of the wire protocol that reaches the region.
    #[must_use]
    pub fn protocol(&self) -> u32 {
        self.protocol
    }

    /// The address of offset 0 at the owner: 0, or a virtual address.
    #[must_use]
    pub fn base(&self) -> u64 {
        self.base
    }

    /// The key.
    #[must_use]
    pub fn key(&self) -> &RemoteKey {
        &self.key
    }

    /// The encoded descriptor.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let (key_length, key) = match &self.key {
            RemoteKey::Plain(key) => (8, key.to_le_bytes().to_vec()),
            RemoteKey::Raw(bytes) => (RAW_KEY | bytes.len() as u16, bytes.clone()),
        };
        let total = FIXED_LENGTH + key.len() + CHECKSUM;
        let read = u32::from(self.access.contains(Access::REMOTE_READ));
        let write = u32::from(self.access.contains(Access::REMOTE_WRITE)) << 1;
        let mut out = [
            &MAGIC[..],
            &VERSION.to_le_bytes(),
            &(total as u16).to_le_bytes(),
            &self.protocol.to_le_bytes(),
            &self.kind.interface().to_le_bytes(),
            &self.kind.device().to_le_bytes(),
            &(read | write).to_le_bytes(),
            &self.length.to_le_bytes(),
            &self.base.to_le_bytes(),
            &key_length.to_le_bytes(),
            &key,
        ]
        .concat();
        let checksum = crc32fast::hash(&out);
        out.extend_from_slice(&checksum.to_le_bytes());
        out
    }

    /// Decodes the bytes of a peer. Never panics, and allocates no more than the key.
    ///
    /// # Errors
    /// `MalformedDescriptor` for bytes that are truncated, too long, altered or inconsistent,
    /// `VersionMismatch` for an unknown version; the text names the fault.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut rest = bytes;
        if take::<4>(&mut rest, "the magic")? != MAGIC {
            return Err(malformed("it does not begin with \"FcMR\""));
        }
        let version = u16::from_le_bytes(take(&mut rest, "the version")?);
        if version != VERSION {
            let detail =
                format!("region descriptor of version {version}, this build supports {VERSION}");
            return Err(Error::new(ErrorKind::VersionMismatch, OPERATION, detail));
        }
        let total = usize::from(u16::from_le_bytes(take(&mut rest, "the length")?));
        if bytes.len() < total {
            return Err(malformed(format!("it is truncated: {} of {total} bytes", bytes.len())));
        }
        if bytes.len() > total || total < FIXED_LENGTH + CHECKSUM {
            return Err(malformed(format!("it has {} bytes and claims {total}", bytes.len())));
        }
        let (body, checksum) = bytes.split_at(total - CHECKSUM);
        if crc32fast::hash(body).to_le_bytes() != *checksum {
            return Err(malformed("its checksum is wrong: it was altered in transit"));
        }
        let mut rest = &rest[..rest.len() - CHECKSUM];
        let protocol = u32::from_le_bytes(take(&mut rest, "the protocol")?);
        let interface = u32::from_le_bytes(take(&mut rest, "the interface")?);
        let device = i32::from_le_bytes(take(&mut rest, "the device")?);
        let wire_access = u32::from_le_bytes(take(&mut rest, "the access flags")?);
        let length = u64::from_le_bytes(take(&mut rest, "the region's length")?);
        let base = u64::from_le_bytes(take(&mut rest, "the base")?);
        let key_length = u16::from_le_bytes(take(&mut rest, "the key's length")?);
        let key_bytes = rest;

        let kind = MemoryKind::from_parts(interface, device).ok_or_else(|| {
            malformed(format!("memory interface {interface} with device {device} is not known"))
        })?;
        if wire_access == 0 || wire_access > 3 {
            return Err(malformed(format!("access flags {wire_access:#x} are invalid")));
        }
        let mut access = Access::empty();
        access.set(Access::REMOTE_READ, wire_access & 1 != 0);
        access.set(Access::REMOTE_WRITE, wire_access & 2 != 0);
        if length == 0 || base.checked_add(length).is_none() {
            return Err(malformed(format!("{length} bytes at {base:#x} are not a range")));
        }
        let is_raw = key_length & RAW_KEY != 0;
        let claimed = usize::from(key_length & !RAW_KEY);
        if claimed != key_bytes.len() || claimed > MAX_KEY_LENGTH {
            return Err(malformed(format!(
                "the key has {} bytes and claims {claimed}",
                key_bytes.len()
            )));
        }
        let key = if is_raw {
            if claimed == 0 {
                return Err(malformed("the raw key is empty"));
            }
            RemoteKey::Raw(key_bytes.to_vec())
        } else {
            let key = key_bytes.try_into().map_err(|_| malformed("a plain key has 8 bytes"))?;
            RemoteKey::Plain(u64::from_le_bytes(key))
        };
        Ok(Self { protocol, kind, access, length, base, key })
    }
}

fn malformed(why: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::MalformedDescriptor, OPERATION, why)
}

/// Takes the next field off the rest of a descriptor.
fn take<const N: usize>(rest: &mut &[u8], what: &str) -> Result<[u8; N]> {
    let missing = || malformed(format!("it is truncated: {what} is missing"));
    let (field, behind) = rest.split_first_chunk().ok_or_else(missing)?;
    *rest = behind;
    Ok(*field)
}

impl Serialize for RemoteRegion {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.encode())
    }
}

impl<'de> Deserialize<'de> for RemoteRegion {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Visitor;
        impl<'de> de::Visitor<'de> for Visitor {
            type Value = RemoteRegion;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("the bytes of a region descriptor")
            }
            fn visit_bytes<E: de::Error>(
                self,
                bytes: &[u8],
            ) -> std::result::Result<RemoteRegion, E> {
                RemoteRegion::decode(bytes).map_err(E::custom)
            }
            // Formats without a byte type (JSON) send a list of numbers.
            fn visit_seq<A: de::SeqAccess<'de>>(
                self,
                mut sequence: A,
            ) -> std::result::Result<RemoteRegion, A::Error> {
                let longest = FIXED_LENGTH + MAX_KEY_LENGTH + CHECKSUM;
                let mut bytes = Vec::new();
                while let Some(byte) = sequence.next_element()? {
                    if bytes.len() == longest {
                        return Err(de::Error::custom("region descriptor is too long"));
                    }
                    bytes.push(byte);
                }
                RemoteRegion::decode(&bytes).map_err(de::Error::custom)
            }
        }
        deserializer.deserialize_bytes(Visitor)
    }
}

#[cfg(test)]
#[path = "descriptor_tests.rs"]
mod tests;
