//! Regions of this process.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use fabric::MemoryRegion;
use gpu::{Allocator, DeviceName, Memory, Uuid};
use ipc::Incarnation;

use super::descriptor::{FabricKey, MOST_PIECES, RegionDescriptor, Rights};
use crate::agent::Home;
use crate::error::{Error, ErrorKind, Result};
use crate::host::HostBuffer;
use crate::lock;
use crate::path::{Leaving, Place, Stays};
use crate::rail::Line;

const REGISTER: &str = "register a region";

/// Memory that can be registered.
#[derive(Debug, Clone)]
pub enum Buffer {
    /// Memory of a device, or of the host as a device knows it.
    Device(Memory),
    /// Memory of the host that other processes can map.
    Host(HostBuffer),
}

impl From<Memory> for Buffer {
    fn from(memory: Memory) -> Self {
        Self::Device(memory)
    }
}

impl From<HostBuffer> for Buffer {
    fn from(buffer: HostBuffer) -> Self {
        Self::Host(buffer)
    }
}

impl<T: Clone + Into<Self>> From<&T> for Buffer {
    fn from(buffer: &T) -> Self {
        buffer.clone().into()
    }
}

impl Buffer {
    /// Length in bytes.
    #[must_use]
    pub fn length(&self) -> u64 {
        match self {
            Self::Device(memory) => memory.length(),
            Self::Host(buffer) => buffer.length(),
        }
    }

    /// What peers are told of it, but for its names, its rights, and what fabrics call it.
    fn describe(&self, home: &Home) -> Result<RegionDescriptor> {
        let of_device = |error| Error::of_device(REGISTER, error);
        let stays = |device, because| staying(home, self, device, because);
        let memory = match self {
            Self::Host(buffer) if buffer.is_private() => {
                return Ok(stays(None, Stays::PrivateHostMemory));
            }
            Self::Host(_) => {
                let place = Place::Host(Leaving::ByDescriptors);
                return Ok(RegionDescriptor { place, pieces: 1, ..stays(None, Stays::OwnUse) });
            }
            Self::Device(memory) => memory,
        };
        let Some(name) = memory.device() else {
            return Ok(stays(None, Stays::PrivateHostMemory));
        };
        let device = Some(name.uuid().map_err(of_device)?);
        match memory.pieces() {
            Ok(pieces) if pieces.lengths.len() as u64 > u64::from(MOST_PIECES) => {
                let detail = format!("{} pieces, {MOST_PIECES} at most", pieces.lengths.len());
                return Err(Error::new(REGISTER, ErrorKind::TooMany, detail));
            }
            Ok(found) => {
                let place = Place::Device(Leaving::ByDescriptors);
                let (offset, pieces) = (found.offset, found.lengths.len() as u32);
                let base = stays(device, Stays::OwnUse);
                return Ok(RegionDescriptor { place, offset, pieces, ..base });
            }
            Err(error) if error.kind() == gpu::ErrorKind::NotSupported => {}
            Err(error) => return Err(of_device(error)),
        }
        let allocator = memory.mapped_for().attributes(memory.address());
        Ok(match allocator.map_err(of_device)?.allocator {
            Allocator::Plain => match memory.export_legacy() {
                Ok(handle) => {
                    let place = Place::Device(Leaving::ByLegacyHandle);
                    let (offset, legacy) = (handle.offset, Some(handle.bytes));
                    RegionDescriptor { place, offset, legacy, ..stays(device, Stays::OwnUse) }
                }
                Err(error) if error.kind() == gpu::ErrorKind::NotSupported => {
                    stays(device, Stays::NoLegacyHandle)
                }
                Err(error) => return Err(of_device(error)),
            },
            Allocator::Mapped { .. } => stays(device, Stays::NotExportable),
            Allocator::Pool => stays(device, Stays::StreamOrderedPool),
            Allocator::Managed => stays(device, Stays::Managed),
            Allocator::Host => stays(None, Stays::PrivateHostMemory),
        })
    }

    /// Bytes of all pieces that it leaves in, which may be more than its own.
    pub(crate) fn bytes_of_pieces(&self) -> u64 {
        match self {
            Self::Device(memory) => memory.pieces().map_or(0, |pieces| pieces.lengths.iter().sum()),
            Self::Host(buffer) => buffer.length(),
        }
    }

    /// The descriptor and the length of a piece, for a peer with these rights. Memory of the host
    /// cannot be mapped for writing by it where they do not say so; devices know no such
    /// difference.
    pub(crate) fn export(&self, number: u32, rights: Rights) -> Result<(OwnedFd, u64)> {
        let operation = "export a region";
        match self {
            Self::Device(memory) => memory
                .export_piece(number as usize)
                .map_err(|error| Error::of_device(operation, error)),
            Self::Host(buffer) => Ok((buffer.export(rights.write)?, buffer.length())),
        }
    }
}

/// What is told of memory that does not leave its process, on this device or on the host.
fn staying(home: &Home, buffer: &Buffer, device: Option<Uuid>, because: Stays) -> RegionDescriptor {
    let place = if device.is_some() { Place::Device } else { Place::Host };
    RegionDescriptor {
        agent: home.identity,
        node: home.identity,
        number: 0,
        ticket: 0,
        length: buffer.length(),
        rights: Rights::NONE,
        place: place(Leaving::Not(because)),
        device,
        offset: 0,
        pieces: 0,
        legacy: None,
        keys: Vec::new(),
    }
}

/// Memory that peers may reach as long as this lives, or that is for own use. Copies of the
/// handle are the same region.
///
/// Dropping the last handle does not wait. Nothing more begins with the memory; where another process
/// still copies to or from it, it is kept until that copy is over or the process has ended. Then a
/// thread of the library drops it, and with it the owner of memory that was adopted. To use the memory
/// for something else, [withdraw](crate::Agent::withdraw) the region first: that waits.
#[derive(Debug, Clone)]
pub struct Region(pub(crate) Arc<Registered>);

pub(crate) struct Registered {
    pub(crate) buffer: Buffer,
    pub(crate) descriptor: RegionDescriptor,
    home: Arc<Home>,
    /// As the rails know it, by their numbers, until it is withdrawn.
    memories: Mutex<Vec<Option<MemoryRegion>>>,
    pub(crate) is_withdrawn: AtomicBool,
    born: Incarnation,
}

/// Without what lets others reach it: ticket and keys.
impl fmt::Debug for Registered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {:?}", self.descriptor.number, self.buffer)
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if !self.born.is_current() {
            // The parent's: its board, its rails, and its registrations.
            std::mem::forget(std::mem::take(&mut *lock(&self.memories)));
            return;
        }
        self.home.withdraw(self.descriptor.number);
        self.retire();
        // Of what is for own use no peer knows.
        if self.descriptor.rights != Rights::NONE {
            self.home.release(self.descriptor.number, self.buffer.clone());
        }
    }
}

impl Region {
    pub(crate) fn new(home: &Arc<Home>, buffer: Buffer, rights: Rights) -> Result<Self> {
        let told = buffer.describe(home)?;
        if !(rights.read || rights.write) {
            let detail = "a region that peers may neither read nor write";
            return Err(Error::new(REGISTER, ErrorKind::Malformed, detail));
        }
        let memories = known_to_rails(home, &buffer, Some(rights));
        let mut keys = Vec::new();
        for (domain, memory) in memories.iter().enumerate() {
            let Some(memory) = memory else { continue };
            let described = memory.describe().map_err(|error| Error::of_fabric(REGISTER, error))?;
            keys.push(FabricKey { domain: domain as u32, bytes: described.encode() });
        }
        let entered = home.enter(|number, ticket| {
            let descriptor = RegionDescriptor { number, ticket, rights, keys, ..told };
            Arc::new(Registered::new(home, buffer, descriptor, memories))
        });
        entered.map(Self)
    }

    /// A region that no peer reaches: it is not in the list of regions, and has no keys.
    pub(crate) fn own(home: &Arc<Home>, buffer: Buffer) -> Result<Self> {
        let device = match &buffer {
            Buffer::Device(memory) => memory.device(),
            Buffer::Host(_) => None,
        };
        let device = device.map(DeviceName::uuid).transpose();
        let device = device.map_err(|error| Error::of_device(REGISTER, error))?;
        let memories = known_to_rails(home, &buffer, None);
        let told = staying(home, &buffer, device, Stays::OwnUse);
        let descriptor = RegionDescriptor { number: home.number(), ..told };
        Ok(Self(Arc::new(Registered::new(home, buffer, descriptor, memories))))
    }

    /// What it was made of.
    #[must_use]
    pub fn buffer(&self) -> &Buffer {
        &self.0.buffer
    }

    /// What a peer needs to reach it; [encode](RegionDescriptor::encode) it to send it.
    #[must_use]
    pub fn descriptor(&self) -> &RegionDescriptor {
        &self.0.descriptor
    }
}

/// Has the rails register memory: for peers with these rights, or for own use.
fn known_to_rails(
    home: &Home,
    buffer: &Buffer,
    rights: Option<Rights>,
) -> Vec<Option<MemoryRegion>> {
    let register = |line: &Line| {
        line.register(buffer, rights).unwrap_or_else(|error| {
            // Then it is staged; the table says so.
            tracing::warn!(%error, "a fabric does not take this memory");
            None
        })
    };
    home.lines().iter().map(register).collect()
}

impl Registered {
    fn new(
        home: &Arc<Home>,
        buffer: Buffer,
        descriptor: RegionDescriptor,
        memories: Vec<Option<MemoryRegion>>,
    ) -> Self {
        Self {
            buffer,
            descriptor,
            home: Arc::clone(home),
            memories: Mutex::new(memories),
            is_withdrawn: AtomicBool::new(false),
            born: Incarnation::current(),
        }
    }

    /// As a rail knows it.
    pub(crate) fn memory(&self, rail: usize) -> Option<MemoryRegion> {
        lock(&self.memories).get(rail).cloned().flatten()
    }

    /// The rails that know it.
    pub(crate) fn domains(&self) -> Vec<usize> {
        let memories = lock(&self.memories);
        (0..memories.len()).filter(|rail| memories[*rail].is_some()).collect()
    }

    /// Has the rails let go of it, when peers know that it is gone.
    pub(crate) fn retire(&self) {
        self.is_withdrawn.store(true, Ordering::Release);
        let memories = std::mem::take(&mut *lock(&self.memories));
        // Of what is for own use no peer knows; transfers that are under way have handles.
        if self.descriptor.rights == Rights::NONE {
            return;
        }
        for (line, memory) in self.home.lines().iter().zip(memories) {
            line.retire(self.descriptor.number, memory, self.buffer.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::Whereabouts;
    use crate::{Agent, AgentOptions};

    #[test]
    fn printed_regions_do_not_show_how_they_are_reached() {
        let agent = Agent::start(AgentOptions::new("one")).unwrap();
        let region = agent.register(HostBuffer::new(4096).unwrap(), Rights::ALL).unwrap();
        let mut descriptor = region.descriptor().clone();
        descriptor.keys.push(FabricKey { domain: 0, bytes: vec![5; 3] });
        let there = Whereabouts::from(&descriptor);
        let texts = [
            format!("{region:?} {descriptor:?} {there:?}"),
            format!("{region:#?} {descriptor:#?} {there:#?}"),
        ];
        for text in texts {
            assert!(!text.contains(&descriptor.ticket.to_string()), "{text}");
            assert!(!text.contains("FabricKey"), "{text}");
            assert!(text.contains(&descriptor.number.to_string()), "{text}");
        }
    }
}
