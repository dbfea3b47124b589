//! The format of region descriptors: everything that any path needs to reach a region.
//!
//! ```text
//! offset  size  field (little endian), after the header of `wire`
//!      8    16  identity of the agent that registered it
//!     24    16  its node
//!     40     8  number of the region at its agent
//!     48     8  ticket: random, checked by the agent
//!     56     8  length
//!     64     1  rights: 1 read, 2 write
//!     65     1  memory type: 1 device, 2 host
//!     66     1  exportability: 1 descriptors, 2 legacy handle, from 16 on an obstacle
//!     67     1  fabric keys, n
//!     68    16  UUID of the device; zeros for the host
//!     84     8  offset in the exported memory
//!     92     4  pieces exported as descriptors
//!     96    64  the driver's handle; legacy handles only
//!      …        for each fabric key: the agent's domain (4), length (2), bytes
//! ```
//!
//! Descriptors must be sent through an authenticated channel: a holder may do with the region what
//! its rights allow.

use std::fmt;

use gpu::Uuid;

use crate::error::{Error, ErrorKind, Result};
use crate::path::{ExportObstacle, Exportability, MemoryType, Operation};
use crate::wire::{DescriptorFormat, put_length_prefixed};

const FORMAT: DescriptorFormat =
    DescriptorFormat { magic: *b"FcRG", version: 1, operation: "decode region" };
/// A bound for the claims of a peer, far above the keys of any fabric.
const MAX_KEY_LENGTH: usize = 2048;
const MAX_KEYS: usize = 16;
/// 2 MiB each: two tebibytes.
pub(crate) const MAX_PIECES: u32 = 1 << 20;

/// What a peer may do with a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rights {
    /// Peers may get from it.
    pub read: bool,
    /// Peers may put into it.
    pub write: bool,
}

impl Rights {
    /// Get and put.
    pub const ALL: Self = Self { read: true, write: true };
    /// Get only.
    pub const READ: Self = Self { read: true, write: false };
    /// For local-only memory: no descriptor with these rights is decoded.
    pub(crate) const NONE: Self = Self { read: false, write: false };
    /// Put only.
    pub const WRITE: Self = Self { read: false, write: true };

    /// May a peer transfer to or from the region?
    pub(crate) fn permit(self, operation: Operation) -> bool {
        match operation {
            Operation::Put => self.write,
            Operation::Get => self.read,
        }
    }

    /// Do these rights include the claimed ones?
    pub(crate) fn allow(self, claimed: Self) -> bool {
        (self.read || !claimed.read) && (self.write || !claimed.write)
    }

    fn code(self) -> u8 {
        u8::from(self.read) | u8::from(self.write) << 1
    }

    fn from_code(code: u8) -> Option<Self> {
        (1..=3).contains(&code).then_some(Self { read: code & 1 != 0, write: code & 2 != 0 })
    }
}

/// The key of a region at a fabric. `{:?}` does not show it.
#[derive(Clone, PartialEq, Eq)]
pub struct FabricKey {
    /// The number of the agent's domain that registered the region.
    pub domain: u32,
    /// The encoded region descriptor of that domain.
    pub bytes: Vec<u8>,
}

/// The description of a region, for peers.
///
/// ```
/// use transfer::RegionDescriptor;
/// # use transfer::path::{Exportability, MemoryType, ExportObstacle};
/// # let descriptor = RegionDescriptor {
/// #     agent: [1; 16], node: [2; 16], number: 3, ticket: 4, length: 4096,
/// #     rights: transfer::Rights::ALL,
/// #     memory_type: MemoryType::Host(Exportability::Not(ExportObstacle::PrivateHostMemory)),
/// #     device: None, offset: 0, pieces: 0, legacy: None, keys: Vec::new(),
/// # };
/// let bytes = descriptor.encode()?;
/// // … sent to a peer …
/// assert_eq!(RegionDescriptor::decode(&bytes)?, descriptor);
/// assert!(RegionDescriptor::decode(&bytes[1..]).is_err());
/// # Ok::<(), transfer::Error>(())
/// ```
///
/// Holders of the descriptor can access the region. So `{:?}` shows neither ticket nor keys nor
/// handles.
#[derive(Clone, PartialEq, Eq)]
pub struct RegionDescriptor {
    /// The agent that registered it. A restarted agent has a new identity.
    pub agent: [u8; 16],
    /// The node that the agent belongs to.
    pub node: [u8; 16],
    /// Number at its agent, never reused.
    pub number: u64,
    /// A random secret: the agent refuses requests without it.
    pub ticket: u64,
    /// Length in bytes.
    pub length: u64,
    /// The rights of peers.
    pub rights: Rights,
    /// Device or host memory, and how it can be exported.
    pub memory_type: MemoryType,
    /// The device of the memory.
    pub device: Option<Uuid>,
    /// Offset in the first piece, or in the allocation.
    pub offset: u64,
    /// Pieces exported as descriptors.
    pub pieces: u32,
    /// The driver's handle of its allocation.
    pub legacy: Option<[u8; 64]>,
    /// The region's keys at fabrics.
    pub keys: Vec<FabricKey>,
}

impl fmt::Debug for FabricKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FabricKey(domain {}, {} bytes)", self.domain, self.bytes.len())
    }
}

impl fmt::Debug for RegionDescriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { number, length, rights, memory_type, .. } = self;
        write!(f, "RegionDescriptor({number}, {length} bytes, {rights:?}, {memory_type:?}, …)")
    }
}

impl RegionDescriptor {
    /// Encodes the descriptor.
    ///
    /// # Errors
    /// [`Failed`](ErrorKind::Failed) if its keys exceed the length of a descriptor;
    /// [`NotAllowed`](ErrorKind::NotAllowed) for a local-only region.
    pub fn encode(&self) -> Result<Vec<u8>> {
        if self.rights == Rights::NONE {
            let detail = "the region is local-only. Register it with rights for peers";
            return Err(Error::new("encode region", ErrorKind::NotAllowed, detail));
        }
        let mut bytes = FORMAT.begin();
        bytes.extend(self.agent);
        bytes.extend(self.node);
        for word in [self.number, self.ticket, self.length] {
            bytes.extend(word.to_le_bytes());
        }
        let memory_type = if self.memory_type.is_device() { 1 } else { 2 };
        let exportability = code_of(self.memory_type.exportability());
        let keys = self.keys.len().min(MAX_KEYS);
        bytes.extend([self.rights.code(), memory_type, exportability, keys as u8]);
        bytes.extend(self.device.unwrap_or(Uuid([0; 16])).0);
        bytes.extend(self.offset.to_le_bytes());
        bytes.extend(self.pieces.to_le_bytes());
        bytes.extend(self.legacy.iter().flatten());
        for key in self.keys.iter().take(keys) {
            bytes.extend(key.domain.to_le_bytes());
            put_length_prefixed(&mut bytes, &key.bytes);
        }
        FORMAT.seal(bytes).ok_or_else(|| {
            Error::new("encode region", ErrorKind::Failed, "the fabric keys are too long")
        })
    }

    /// Decodes and validates the result of [`encode`](Self::encode).
    ///
    /// # Errors
    /// [`Malformed`](ErrorKind::Malformed), [`VersionMismatch`](ErrorKind::VersionMismatch).
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut reader = FORMAT.open(bytes)?;
        let (agent, node) = (reader.take()?, reader.take()?);
        let (number, ticket, length) = (reader.u64()?, reader.u64()?, reader.u64()?);
        let [rights, memory_type, exportability, count] = reader.take()?;
        let device = Some(reader.take()?).filter(|uuid| *uuid != [0; 16]).map(Uuid);
        let (offset, pieces) = (reader.u64()?, reader.u32()?);
        let Some(rights) = Rights::from_code(rights) else {
            return Err(FORMAT.malformed("invalid rights"));
        };
        let Some(exportability) = exportability_of(exportability) else {
            return Err(FORMAT.malformed("unknown exportability"));
        };
        let memory_type = match (memory_type, device) {
            (1, Some(_)) => MemoryType::Device(exportability),
            (2, None) => MemoryType::Host(exportability),
            _ => return Err(FORMAT.malformed("memory type and device contradict each other")),
        };
        let is_by_descriptors = exportability == Exportability::ByDescriptors;
        let allowed = if is_by_descriptors { 1..=MAX_PIECES } else { 0..=0 };
        if !allowed.contains(&pieces) {
            return Err(FORMAT.malformed(format!("{pieces} pieces contradict the exportability")));
        }
        let is_legacy = exportability == Exportability::ByLegacyHandle;
        if is_legacy && !memory_type.is_device() {
            return Err(FORMAT.malformed("legacy handle of host memory"));
        }
        let legacy = is_legacy.then(|| reader.take()).transpose()?;
        if length == 0 || offset.checked_add(length).is_none() {
            return Err(FORMAT.malformed(format!("{length} bytes at offset {offset}")));
        }
        if usize::from(count) > MAX_KEYS {
            return Err(FORMAT.malformed(format!("{count} fabric keys, {MAX_KEYS} is the maximum")));
        }
        let mut keys = Vec::with_capacity(usize::from(count));
        for _ in 0..count {
            let (domain, bytes) = (reader.u32()?, reader.length_prefixed(MAX_KEY_LENGTH)?.to_vec());
            keys.push(FabricKey { domain, bytes });
        }
        reader.finish()?;
        Ok(Self {
            agent,
            node,
            number,
            ticket,
            length,
            rights,
            memory_type,
            device,
            offset,
            pieces,
            legacy,
            keys,
        })
    }
}

const EXPORTABILITY_CODES: [(u8, Exportability); 7] = [
    (1, Exportability::ByDescriptors),
    (2, Exportability::ByLegacyHandle),
    (16, Exportability::Not(ExportObstacle::NotExportable)),
    (17, Exportability::Not(ExportObstacle::StreamOrderedPool)),
    (18, Exportability::Not(ExportObstacle::Managed)),
    (19, Exportability::Not(ExportObstacle::PrivateHostMemory)),
    (20, Exportability::Not(ExportObstacle::NoLegacyHandle)),
];

fn code_of(exportability: Exportability) -> u8 {
    // Local-only memory has no descriptor, and code 0 is never decoded.
    EXPORTABILITY_CODES.iter().find(|(_, of)| *of == exportability).map_or(0, |(code, _)| *code)
}

fn exportability_of(code: u8) -> Option<Exportability> {
    EXPORTABILITY_CODES.iter().find(|(known, _)| *known == code).map(|(_, of)| *of)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn descriptor_of(memory_type: MemoryType) -> RegionDescriptor {
        let exportability = memory_type.exportability();
        RegionDescriptor {
            agent: [1; 16],
            node: [2; 16],
            number: 7,
            ticket: 0x1234,
            length: 1 << 30,
            rights: Rights::ALL,
            memory_type,
            device: memory_type.is_device().then_some(Uuid([9; 16])),
            offset: 512,
            pieces: if exportability == Exportability::ByDescriptors { 52 } else { 0 },
            legacy: (exportability == Exportability::ByLegacyHandle).then_some([3; 64]),
            keys: vec![
                FabricKey { domain: 0, bytes: vec![5; 54] },
                FabricKey { domain: 1, bytes: Vec::new() },
            ],
        }
    }

    fn all() -> Vec<RegionDescriptor> {
        let mut all = Vec::new();
        for code in 0..=u8::MAX {
            let Some(exportability) = exportability_of(code) else { continue };
            all.push(descriptor_of(MemoryType::Device(exportability)));
            if exportability != Exportability::ByLegacyHandle {
                all.push(descriptor_of(MemoryType::Host(exportability)));
            }
        }
        assert_eq!(all.len(), 13);
        all
    }

    fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
        bytes.truncate(bytes.len() - 4);
        FORMAT.seal(bytes).unwrap()
    }

    #[test]
    fn encoded_descriptor_is_decoded() {
        for region in all() {
            assert_eq!(RegionDescriptor::decode(&region.encode().unwrap()).unwrap(), region);
        }
    }

    #[test]
    fn every_truncation_and_every_changed_byte_is_detected() {
        for region in all() {
            let bytes = region.encode().unwrap();
            for length in 0..bytes.len() {
                assert!(RegionDescriptor::decode(&bytes[..length]).is_err(), "{length} bytes");
                assert!(RegionDescriptor::decode(&sealed_short(&bytes, length)).is_err());
            }
            for at in 0..bytes.len() {
                let mut changed = bytes.clone();
                changed[at] ^= 0x10;
                assert!(RegionDescriptor::decode(&changed).is_err(), "byte {at}");
            }
            assert!(RegionDescriptor::decode(&[bytes, vec![0]].concat()).is_err());
        }
    }

    /// Shorter, with a valid header and checksum.
    fn sealed_short(bytes: &[u8], length: usize) -> Vec<u8> {
        FORMAT.seal(bytes[..length.clamp(8, bytes.len() - 5)].to_vec()).unwrap()
    }

    #[test]
    fn contradictions_with_a_valid_checksum_are_refused() {
        let refused = |at: usize, new: &[u8]| {
            let mut bytes =
                descriptor_of(MemoryType::Device(Exportability::ByDescriptors)).encode().unwrap();
            bytes[at..at + new.len()].copy_from_slice(new);
            RegionDescriptor::decode(&sealed(bytes)).unwrap_err().kind()
        };
        assert_eq!(refused(4, &[9, 0]), ErrorKind::VersionMismatch);
        assert_eq!(refused(56, &[0; 8]), ErrorKind::Malformed, "empty");
        assert_eq!(refused(56, &[0xff; 8]), ErrorKind::Malformed, "beyond all addresses");
        assert_eq!(refused(64, &[0]), ErrorKind::Malformed, "no rights");
        assert_eq!(refused(64, &[4]), ErrorKind::Malformed, "invalid rights");
        assert_eq!(refused(65, &[3]), ErrorKind::Malformed, "unknown memory type");
        assert_eq!(refused(65, &[2]), ErrorKind::Malformed, "host memory on a device");
        assert_eq!(refused(66, &[9]), ErrorKind::Malformed, "unknown exportability");
        assert_eq!(refused(66, &[2]), ErrorKind::Malformed, "a legacy handle with pieces");
        assert_eq!(refused(67, &[17]), ErrorKind::Malformed, "keys");
        assert_eq!(refused(68, &[0; 16]), ErrorKind::Malformed, "a device without a UUID");
        assert_eq!(refused(92, &[0; 4]), ErrorKind::Malformed, "no pieces");
        assert_eq!(refused(92, &[0xff; 4]), ErrorKind::Malformed, "too many pieces");
        assert_eq!(refused(100, &[0xff; 2]), ErrorKind::Malformed, "a key without end");
    }

    #[test]
    fn local_only_region_is_neither_encoded_nor_decoded() {
        let memory_type = MemoryType::Host(Exportability::Not(ExportObstacle::LocalOnly));
        let local_only = RegionDescriptor {
            rights: Rights::NONE,
            keys: Vec::new(),
            ..descriptor_of(memory_type)
        };
        assert_eq!(local_only.encode().unwrap_err().kind(), ErrorKind::NotAllowed);
        // Also with rights that contradict the exportability.
        let altered = RegionDescriptor { rights: Rights::ALL, ..local_only }.encode().unwrap();
        assert_eq!(RegionDescriptor::decode(&altered).unwrap_err().kind(), ErrorKind::Malformed);
    }

    #[test]
    fn the_fuzzers_corpus_does_not_panic() {
        let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus/transfer_region");
        let mut seen = 0;
        for entry in std::fs::read_dir(corpus).expect("the corpus is part of the repository") {
            let bytes = std::fs::read(entry.unwrap().path()).unwrap();
            if let Ok(region) = RegionDescriptor::decode(&bytes) {
                assert_eq!(region.encode().unwrap(), bytes);
            }
            seen += 1;
        }
        assert!(seen > 0, "the corpus is empty");
    }

    proptest! {
        #[test]
        fn garbage_is_refused(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            prop_assert!(RegionDescriptor::decode(&bytes).is_err());
        }

        #[test]
        fn garbage_with_a_good_frame_never_panics(
            body in proptest::collection::vec(any::<u8>(), 0..400),
            exportability in 0..21_u8,
        ) {
            let mut bytes = FORMAT.begin();
            bytes.extend(body);
            if let Some(byte) = bytes.get_mut(66) {
                *byte = exportability;
            }
            let bytes = FORMAT.seal(bytes).unwrap();
            if let Ok(region) = RegionDescriptor::decode(&bytes) {
                prop_assert_eq!(region.encode().unwrap(), bytes);
            }
        }
    }
}
