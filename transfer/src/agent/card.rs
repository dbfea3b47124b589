//! The format of agent cards: how peers reach an agent.
//!
//! ```text
//! offset  size  field (little endian), after the header of `wire`
//!      8    16  identity: random, one for each agent
//!     24    16  its node
//!     40    16  boot id of the machine's kernel
//!      …        label (2 + n), path of the socket (2 + n), which may be empty
//!      …     1  fabrics, n; for each: provider (2 + n), address (2 + n)
//!      …     1  regions, n; for each: name (2 + n), descriptor (2 + n)
//! ```

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::agent_files;
use crate::error::{Error, ErrorKind, Result};
use crate::region::RegionDescriptor;
use crate::wire::{DescriptorFormat, MAX_ADDRESS_LENGTH, MAX_LABEL_LENGTH, put_length_prefixed};

const FORMAT: DescriptorFormat =
    DescriptorFormat { magic: *b"FcAC", version: 1, operation: "decode agent card" };
/// Maximum length of the path of a Unix socket.
const MAX_PATH_LENGTH: usize = 107;
const MAX_FABRICS: usize = 8;
/// Maximum number of regions on a card.
pub const MAX_PUBLISHED_REGIONS: usize = 32;

/// The address of an agent at a fabric.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FabricAddress {
    /// The name of the provider, or of its fabric where the provider has several.
    pub provider: String,
    /// The address of the agent's endpoint.
    pub address: Vec<u8>,
}

/// How peers reach an agent. Applications send it through a file, a launcher or a service.
///
/// ```
/// use transfer::{Agent, AgentCard, AgentOptions};
/// # let directory = std::env::temp_dir().join(format!("fabricast-card-{}", std::process::id()));
/// # std::fs::create_dir_all(&directory)?;
/// let agent = Agent::start(AgentOptions::new("decoder").directory(&directory))?;
/// let bytes = agent.card().encode()?;
/// // … sent to a peer …
/// let card = AgentCard::decode(&bytes)?;
/// assert_eq!(card.label, "decoder");
/// # drop(agent);
/// # std::fs::remove_dir_all(&directory)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentCard {
    /// Random, new for each agent: a restarted agent has a new identity.
    pub identity: [u8; 16],
    /// The node of the agent: each agent has its own.
    pub node: [u8; 16],
    /// The boot id of the kernel: the same for all containers of a machine.
    pub machine: [u8; 16],
    /// The agent's name in reports.
    pub label: String,
    /// The agent's socket, for peers on the same machine that see the path.
    pub socket: Option<PathBuf>,
    /// The agent's addresses at fabrics.
    pub fabrics: Vec<FabricAddress>,
    /// Regions that it has [published](super::Agent::publish), by name.
    pub regions: Vec<(String, RegionDescriptor)>,
}

/// The boot id of the kernel: the same in all containers of a machine.
pub(super) fn machine() -> [u8; 16] {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let mut digits = text.bytes().filter_map(|byte| char::from(byte).to_digit(16));
    std::array::from_fn(|_| {
        let (high, low) = (digits.next().unwrap_or(0), digits.next().unwrap_or(0));
        (high << 4 | low) as u8
    })
}

impl AgentCard {
    /// Was its agent killed, so that the card file is left beside the socket? False if unknown: the
    /// directory is not visible, or the agent removed its files.
    #[must_use]
    pub fn is_orphaned(&self) -> bool {
        self.socket.as_deref().is_some_and(agent_files::is_orphaned)
    }

    /// Is its agent on this machine, according to the boot id, in whatever container?
    #[must_use]
    pub fn is_of_this_machine(&self) -> bool {
        self.machine == machine()
    }

    /// Encodes the card.
    ///
    /// # Errors
    /// [`Failed`](ErrorKind::Failed) if a part exceeds its maximum length.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let socket = self.socket.as_deref().map_or(&[][..], |path| path.as_os_str().as_bytes());
        if let Some(detail) = self.excess(socket) {
            return Err(Error::new("encode agent card", ErrorKind::Failed, detail));
        }
        let mut bytes = FORMAT.begin();
        bytes.extend(self.identity);
        bytes.extend(self.node);
        bytes.extend(self.machine);
        put_length_prefixed(&mut bytes, self.label.as_bytes());
        put_length_prefixed(&mut bytes, socket);
        bytes.push(self.fabrics.len() as u8);
        for fabric in &self.fabrics {
            put_length_prefixed(&mut bytes, fabric.provider.as_bytes());
            put_length_prefixed(&mut bytes, &fabric.address);
        }
        bytes.push(self.regions.len() as u8);
        for (name, region) in &self.regions {
            put_length_prefixed(&mut bytes, name.as_bytes());
            put_length_prefixed(&mut bytes, &region.encode()?);
        }
        FORMAT.seal(bytes).ok_or_else(|| FORMAT.malformed("card too long"))
    }

    /// What is too long or too many for a card, and its limit.
    fn excess(&self, socket: &[u8]) -> Option<String> {
        let too_long = |what: &str, length: usize, most: usize| {
            (length > most)
                .then(|| format!("{what} has {length} bytes, at most {most} are possible"))
        };
        let too_many = |what: &str, count: usize, most: usize| {
            (count > most).then(|| format!("{count} {what}, at most {most} are possible"))
        };
        let of_socket = || {
            let path = String::from_utf8_lossy(socket);
            let excess = too_long(&format!("the socket {path}"), socket.len(), MAX_PATH_LENGTH)?;
            Some(format!("{excess}. Use a shorter directory"))
        };
        let of_fabric = |fabric: &FabricAddress| {
            let FabricAddress { provider, address } = fabric;
            too_long("the name of a provider", provider.len(), MAX_LABEL_LENGTH)
                .or_else(|| too_long("the address at a fabric", address.len(), MAX_ADDRESS_LENGTH))
        };
        let of_region = |(name, _): &(String, RegionDescriptor)| {
            too_long(&format!("the region's name \"{name}\""), name.len(), MAX_LABEL_LENGTH)
        };
        of_socket()
            .or_else(|| too_long("the label", self.label.len(), MAX_LABEL_LENGTH))
            .or_else(|| too_many("fabrics", self.fabrics.len(), MAX_FABRICS))
            .or_else(|| self.fabrics.iter().find_map(of_fabric))
            .or_else(|| too_many("published regions", self.regions.len(), MAX_PUBLISHED_REGIONS))
            .or_else(|| self.regions.iter().find_map(of_region))
    }

    /// Decodes and validates the result of [`encode`](Self::encode).
    ///
    /// # Errors
    /// [`Malformed`](ErrorKind::Malformed), [`VersionMismatch`](ErrorKind::VersionMismatch).
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let text = |bytes: &[u8]| {
            String::from_utf8(bytes.to_vec()).map_err(|_| FORMAT.malformed("a name is not UTF-8"))
        };
        let mut reader = FORMAT.open(bytes)?;
        let (identity, node, machine) = (reader.take()?, reader.take()?, reader.take()?);
        let label = text(reader.length_prefixed(MAX_LABEL_LENGTH)?)?;
        let socket = reader.length_prefixed(MAX_PATH_LENGTH)?;
        if socket.contains(&0) {
            return Err(FORMAT.malformed("the path of the socket contains a NUL"));
        }
        let socket = (!socket.is_empty()).then(|| Path::new(OsStr::from_bytes(socket)).to_owned());
        let [count] = reader.take()?;
        if usize::from(count) > MAX_FABRICS {
            return Err(FORMAT.malformed(format!("{count} fabrics, {MAX_FABRICS} is the maximum")));
        }
        let mut fabrics = Vec::with_capacity(usize::from(count));
        for _ in 0..count {
            let provider = text(reader.length_prefixed(MAX_LABEL_LENGTH)?)?;
            let address = reader.length_prefixed(MAX_ADDRESS_LENGTH)?.to_vec();
            fabrics.push(FabricAddress { provider, address });
        }
        let [count] = reader.take()?;
        if usize::from(count) > MAX_PUBLISHED_REGIONS {
            return Err(FORMAT
                .malformed(format!("{count} regions, {MAX_PUBLISHED_REGIONS} is the maximum")));
        }
        let mut regions = Vec::with_capacity(usize::from(count));
        for _ in 0..count {
            let name = text(reader.length_prefixed(MAX_LABEL_LENGTH)?)?;
            let region = RegionDescriptor::decode(reader.length_prefixed(usize::from(u16::MAX))?)?;
            if region.agent != identity {
                return Err(FORMAT.malformed("a region of another agent"));
            }
            regions.push((name, region));
        }
        reader.finish()?;
        Ok(Self { identity, node, machine, label, socket, fabrics, regions })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn region(agent: [u8; 16]) -> RegionDescriptor {
        RegionDescriptor {
            agent,
            node: agent,
            number: 1,
            ticket: 2,
            length: 4096,
            rights: crate::Rights::ALL,
            memory_type: crate::path::MemoryType::Host(crate::path::Exportability::ByDescriptors),
            device: None,
            offset: 0,
            pieces: 1,
            legacy: None,
            keys: Vec::new(),
        }
    }

    fn card() -> AgentCard {
        AgentCard {
            identity: [1; 16],
            node: [2; 16],
            machine: [3; 16],
            label: "prefill 0".to_owned(),
            socket: Some("/run/fabricast/1".into()),
            fabrics: vec![FabricAddress { provider: "tcp".to_owned(), address: vec![4; 16] }],
            regions: vec![("cache".to_owned(), region([1; 16]))],
        }
    }

    #[test]
    fn encoded_card_is_decoded() {
        let bare = AgentCard { socket: None, fabrics: Vec::new(), regions: Vec::new(), ..card() };
        for card in [card(), bare] {
            assert_eq!(AgentCard::decode(&card.encode().unwrap()).unwrap(), card);
        }
    }

    #[test]
    fn region_of_another_agent_is_refused() {
        let card = AgentCard { regions: vec![("cache".to_owned(), region([9; 16]))], ..card() };
        let error = AgentCard::decode(&card.encode().unwrap()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Malformed, "{error}");
    }

    #[test]
    fn every_truncation_and_every_changed_byte_is_detected() {
        let bytes = card().encode().unwrap();
        for length in 0..bytes.len() {
            assert!(AgentCard::decode(&bytes[..length]).is_err(), "{length} bytes");
        }
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 0x10;
            assert!(AgentCard::decode(&changed).is_err(), "byte {at}");
        }
    }

    #[test]
    fn too_long_parts_are_neither_encoded_nor_decoded() {
        let fabric = |provider: usize, address: usize| {
            let provider = "x".repeat(provider);
            AgentCard {
                fabrics: vec![FabricAddress { provider, address: vec![1; address] }],
                ..card()
            }
        };
        let long_name = ("x".repeat(65), region([1; 16]));
        for (card, detail) in [
            (
                AgentCard { regions: vec![card().regions[0].clone(); 33], ..card() },
                "33 published regions, at most 32 are possible",
            ),
            (AgentCard { regions: vec![long_name], ..card() }, "has 65 bytes, at most 64"),
            (AgentCard { label: "x".repeat(65), ..card() }, "the label has 65 bytes, at most 64"),
            (
                AgentCard { socket: Some("/x".repeat(54).into()), ..card() },
                "/x has 108 bytes, at most 107 are possible. Use a shorter directory",
            ),
            (fabric(65, 4), "the name of a provider has 65 bytes"),
            (fabric(3, 513), "the address at a fabric has 513 bytes, at most 512"),
            (
                AgentCard { fabrics: vec![card().fabrics[0].clone(); 9], ..card() },
                "9 fabrics, at most 8 are possible",
            ),
        ] {
            let error = card.encode().unwrap_err().to_string();
            assert!(error.contains(detail), "{error}");
        }
        let mut bytes = FORMAT.begin();
        bytes.extend([0; 48]);
        put_length_prefixed(&mut bytes, &[b'x'; MAX_LABEL_LENGTH + 1]);
        put_length_prefixed(&mut bytes, b"");
        bytes.push(0);
        assert!(AgentCard::decode(&FORMAT.seal(bytes).unwrap()).is_err());
    }

    proptest! {
        #[test]
        fn garbage_with_a_good_frame_never_panics(
            body in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            let mut bytes = FORMAT.begin();
            bytes.extend(body);
            let _ = AgentCard::decode(&FORMAT.seal(bytes).unwrap());
        }
    }
}
