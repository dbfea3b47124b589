//! Memory that devices reach, and parts of it.
#![allow(unsafe_code)]

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::legacy::{LegacyHandle, Opened};
use crate::name::DeviceName;
use crate::space::Space;

/// Memory of the host that a device can be let at.
///
/// # Safety
/// From the first call on and until the value is dropped, `address` and `length` must
/// name the same range; it must be mapped and valid for reads and writes by devices, and
/// no Rust reference to its bytes may exist.
pub unsafe trait HostMapping: fmt::Debug + Send + Sync + 'static {
    /// First byte.
    fn address(&self) -> u64;
    /// Length in bytes.
    fn length(&self) -> u64;
}

/// Memory that devices reach: of a device, or registered memory of the host. Copies of
/// the handle are the same memory, which goes when the last one and the last operation
/// on it are gone.
#[derive(Clone)]
pub struct Memory(Arc<Holding>);

/// What memory is made of, and what is to be done when nobody needs it any more.
pub(crate) struct Holding {
    /// In whose context it is mapped.
    device: Device,
    /// Where it lies; None for the host.
    resident: Option<DeviceName>,
    address: u64,
    /// A pool's grows.
    length: AtomicU64,
    kind: Kind,
}

enum Kind {
    Plain,
    Space(Space),
    Legacy { opened: Opened },
    Host { _mapping: Box<dyn HostMapping> },
    Foreign { _owner: Box<dyn fmt::Debug + Send + Sync> },
}

impl Drop for Holding {
    fn drop(&mut self) {
        if !self.device.0.birth.is_here() {
            return;
        }
        let driver = &self.device.0.driver;
        // A driver that cannot free has failed as a whole; there is nobody to tell here.
        let _ = match &self.kind {
            Kind::Plain => {
                self.device.0.budget.give_back(self.length.load(Ordering::Relaxed));
                // SAFETY: allocated so, and no slice, thus no operation, is left.
                unsafe { driver.free(self.address) }
            }
            // SAFETY: registered by us, and no operation is left.
            Kind::Host { .. } => unsafe { driver.unregister(self.address) },
            // These look after themselves.
            Kind::Space(_) | Kind::Legacy { .. } | Kind::Foreign { .. } => Ok(()),
        };
    }
}

impl fmt::Debug for Holding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Holding({:?})", self.kind)
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (place, length) = (self.device(), self.length());
        match place {
            Some(device) => write!(f, "Memory({length} bytes of {device})"),
            None => write!(f, "Memory({length} bytes of the host)"),
        }
    }
}

impl Memory {
    fn new(
        device: &Device,
        resident: Option<DeviceName>,
        address: u64,
        length: u64,
        kind: Kind,
    ) -> Self {
        let length = AtomicU64::new(length);
        Self(Arc::new(Holding { device: device.clone(), resident, address, length, kind }))
    }

    /// A range of addresses with memory in it.
    pub(crate) fn of_space(device: &Device, resident: DeviceName, space: Space, len: u64) -> Self {
        Self::new(device, Some(resident), space.address(), len, Kind::Space(space))
    }

    pub(crate) fn of_legacy(
        device: &Device,
        resident: DeviceName,
        opened: Opened,
        address: u64,
        length: u64,
    ) -> Self {
        Self::new(device, Some(resident), address, length, Kind::Legacy { opened })
    }

    pub(crate) fn space(&self) -> Option<&Space> {
        match &self.0.kind {
            Kind::Space(space) => Some(space),
            _ => None,
        }
    }

    /// More of it is mapped now.
    pub(crate) fn grow_to(&self, length: u64) {
        self.0.length.fetch_max(length, Ordering::AcqRel);
    }

    /// Memory that something else allocated, such as a framework's tensor.
    ///
    /// # Safety
    /// The range belongs to `device`, or is mapped for it, until `owner` is dropped.
    pub unsafe fn foreign(
        device: &Device,
        address: u64,
        length: u64,
        owner: impl fmt::Debug + Send + Sync + 'static,
    ) -> Self {
        let kind = Kind::Foreign { _owner: Box::new(owner) };
        Self::new(device, Some(device.name()), address, length, kind)
    }

    /// Where it starts in this process's address space.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.0.address
    }

    /// Length in bytes.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.0.length.load(Ordering::Acquire)
    }

    /// The device that it lies on; None for the host.
    #[must_use]
    pub fn device(&self) -> Option<DeviceName> {
        // An attached pool lies where its pieces lie.
        self.space().and_then(Space::resident).or(self.0.resident)
    }

    /// The device that it is mapped for.
    #[must_use]
    pub fn mapped_for(&self) -> &Device {
        &self.0.device
    }

    /// All of it.
    #[must_use]
    pub fn whole(&self) -> Slice {
        Slice { memory: self.clone(), offset: 0, length: self.length() }
    }

    /// A part of it.
    ///
    /// # Errors
    /// [`OutOfBounds`](ErrorKind::OutOfBounds).
    pub fn slice(&self, offset: u64, length: u64) -> Result<Slice> {
        let end = offset.checked_add(length).filter(|end| *end <= self.length());
        if end.is_none() {
            let detail = format!("{length} bytes from {offset} on, of {} bytes", self.length());
            return Err(Error::new("take a part", ErrorKind::OutOfBounds, detail));
        }
        Ok(Slice { memory: self.clone(), offset, length })
    }

    /// Can this device reach it directly?
    #[must_use]
    pub fn is_reachable_from(&self, device: &Device) -> bool {
        let name = device.name();
        let Some(resident) = self.device() else {
            // Registered for all contexts of an implementation.
            return self.0.device.name().implementation == name.implementation;
        };
        if resident.implementation != name.implementation {
            return false;
        }
        match &self.0.kind {
            Kind::Space(space) => space.is_open_to(name.number),
            // Opened for one device, which may be another than it lies on.
            Kind::Legacy { .. } => self.0.device.name() == name || device.has_peer(resident.number),
            _ => resident == name || device.has_peer(resident.number),
        }
    }

    /// As a file descriptor, for other processes to [import](Device::import).
    ///
    /// # Errors
    /// [`NotSupported`](ErrorKind::NotSupported) unless it was
    /// [allocated to be shared](Device::allocate_shared), in one piece.
    pub fn export(&self) -> Result<OwnedFd> {
        let mut pieces = self.export_pieces()?;
        match (pieces.pop(), pieces.is_empty()) {
            (Some((descriptor, _)), true) => Ok(descriptor),
            _ => Err(self.refuse("export", "it does not consist of one piece")),
        }
    }

    /// As file descriptors, one for each of the pieces that it consists of, with their
    /// lengths: a [pool](crate::Pool) has many.
    ///
    /// # Errors
    /// [`NotSupported`](ErrorKind::NotSupported) unless it was allocated to be shared.
    pub fn export_pieces(&self) -> Result<Vec<(OwnedFd, u64)>> {
        let operation = "export";
        self.0.device.driver(operation)?;
        let Some(space) = self.space() else {
            return Err(self.refuse(operation, "it was not allocated to be shared"));
        };
        let layout = space.layout().into_iter().enumerate();
        let exported = layout.map(|(number, (_, length))| Ok((space.export(number)?, length)));
        exported.collect::<Result<_>>().map_err(|error| error.on(self.0.device.name()))
    }

    /// As 64 bytes and a place in the allocation they stand for, for other processes to
    /// [open](Device::open_legacy): the only way for memory that others allocated plainly.
    ///
    /// Keep the memory until those that opened it have closed it: what they find in memory
    /// that was freed is up to the driver. If this process ends, they keep it.
    /// The handle stands for the whole allocation, of which other parts may be in other use:
    /// who opens it can reach them, too.
    ///
    /// # Errors
    /// [`NotSupported`](ErrorKind::NotSupported) for memory allocated to be shared, for
    /// imported memory, and where the device has no such handles.
    pub fn export_legacy(&self) -> Result<LegacyHandle> {
        let operation = "export by legacy handle";
        let driver = self.0.device.driver(operation)?;
        match &self.0.kind {
            Kind::Plain | Kind::Foreign { .. } => {}
            _ => return Err(self.refuse(operation, "it was not allocated the plain way")),
        }
        let on = |error: Error| error.on(self.0.device.name());
        let attributes = driver.attributes(self.address()).map_err(on)?;
        let bytes = driver.legacy_export(self.address()).map_err(on)?;
        let offset = self.address().saturating_sub(attributes.base);
        Ok(LegacyHandle { bytes, offset, length: self.length() })
    }

    fn refuse(&self, operation: &'static str, detail: &str) -> Error {
        Error::new(operation, ErrorKind::NotSupported, detail).on(self.0.device.name())
    }

    pub(crate) fn hold(&self) -> Arc<Holding> {
        Arc::clone(&self.0)
    }

    /// A handle that does not keep it alive.
    #[must_use]
    pub fn downgrade(&self) -> WeakMemory {
        WeakMemory(Arc::downgrade(&self.0))
    }
}

/// Memory that goes when others let go of it.
#[derive(Debug, Clone)]
pub struct WeakMemory(Weak<Holding>);

impl WeakMemory {
    /// The memory, if somebody still holds it.
    #[must_use]
    pub fn upgrade(&self) -> Option<Memory> {
        self.0.upgrade().map(Memory)
    }
}

/// A part of some memory, which keeps it alive.
#[derive(Clone)]
pub struct Slice {
    memory: Memory,
    offset: u64,
    length: u64,
}

impl fmt::Debug for Slice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slice({} + {}, {:?})", self.offset, self.length, self.memory)
    }
}

impl Slice {
    /// What it is a part of.
    #[must_use]
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Where it starts in this process's address space.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.memory.address() + self.offset
    }

    /// Where it starts in its memory.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Length in bytes.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.length
    }

    /// A part of the part.
    ///
    /// # Errors
    /// [`OutOfBounds`](ErrorKind::OutOfBounds).
    pub fn slice(&self, offset: u64, length: u64) -> Result<Self> {
        let is_inside = offset.checked_add(length).is_some_and(|end| end <= self.length);
        if !is_inside {
            let detail = format!("{length} bytes from {offset} on, of {} bytes", self.length);
            return Err(Error::new("take a part", ErrorKind::OutOfBounds, detail));
        }
        self.memory.slice(self.offset + offset, length)
    }

    /// As a dma-buf, for network cards. The range must lie on page bounds.
    ///
    /// # Errors
    /// [`NotSupported`](ErrorKind::NotSupported) where the device has none.
    pub fn dma_buf(&self) -> Result<OwnedFd> {
        let device = &self.memory.0.device;
        let driver = device.driver("export as dma-buf")?;
        driver.dma_buf(self.address(), self.length).map_err(|error| error.on(device.name()))
    }
}

impl Device {
    /// Allocates memory the plain way: for this process alone, or to be shared by
    /// [legacy handle](Memory::export_legacy) where the device has those.
    ///
    /// # Errors
    /// [`OverBudget`](ErrorKind::OverBudget), [`OutOfMemory`](ErrorKind::OutOfMemory).
    pub fn allocate(&self, length: u64) -> Result<Memory> {
        let operation = "allocate";
        let driver = self.driver(operation)?;
        let on = |error: Error| error.on(self.name());
        if length == 0 {
            return Err(on(Error::new(operation, ErrorKind::InvalidArgument, "0 bytes")));
        }
        self.0.budget.charge(operation, length).map_err(on)?;
        let address = driver.allocate(length).map_err(|error| {
            self.0.budget.give_back(length);
            on(error)
        })?;
        Ok(Memory::new(self, Some(self.name()), address, length, Kind::Plain))
    }

    /// Allocates memory that other processes can [import](Self::import), and that `peers`
    /// can reach as well as this device. Takes whole
    /// [granules](crate::Properties::granularity) of the device.
    ///
    /// # Errors
    /// [`OverBudget`](ErrorKind::OverBudget), [`OutOfMemory`](ErrorKind::OutOfMemory);
    /// [`NoPeerAccess`](ErrorKind::NoPeerAccess) if a peer cannot.
    pub fn allocate_shared(&self, length: u64, peers: &[&Self]) -> Result<Memory> {
        let space = Space::reserve(self, length, peers)?;
        space.create(length).map_err(|error| error.on(self.name()))?;
        Ok(Memory::of_space(self, self.name(), space, length))
    }

    /// Imports memory that another process exported, for this device, which may be another
    /// than it lies on. Whoever exported it can go: the memory stays as long as anybody
    /// has it.
    ///
    /// # Errors
    /// [`InvalidHandle`](ErrorKind::InvalidHandle) if the descriptor is not such memory, or
    /// has less than `length` bytes;
    /// [`NoPeerAccess`](ErrorKind::NoPeerAccess) if this device cannot reach it.
    pub fn import(&self, descriptor: BorrowedFd<'_>, length: u64) -> Result<Memory> {
        self.import_pieces(&[(descriptor, length)], length)
    }

    /// Imports memory of `length` bytes that another process exported in pieces, one behind
    /// the other.
    ///
    /// # Errors
    /// As for [one piece](Self::import); [`InvalidHandle`](ErrorKind::InvalidHandle) if all
    /// pieces together have fewer bytes.
    pub fn import_pieces(&self, pieces: &[(BorrowedFd<'_>, u64)], length: u64) -> Result<Memory> {
        let on = |error: Error| error.on(self.name());
        let limit = pieces.iter().try_fold(0_u64, |sum, (_, length)| {
            let length = length.checked_next_multiple_of(self.properties().granularity)?;
            sum.checked_add(length)
        });
        let space = Space::reserve(self, limit.unwrap_or(u64::MAX), &[])?;
        let mut resident = self.name();
        let mut mapped = 0;
        for (descriptor, length) in pieces {
            let imported = space.import(descriptor.as_fd(), *length).map_err(on)?;
            mapped = imported.offset + imported.length;
            resident = imported.resident;
        }
        if length > mapped {
            let detail = format!("{length} bytes, in pieces of {mapped} together");
            return Err(on(Error::new("import", ErrorKind::InvalidHandle, detail)));
        }
        Ok(Memory::of_space(self, resident, space, length))
    }

    /// Lets this device, and all others of its kind, at memory of the host.
    ///
    /// # Errors
    /// If the driver refuses, such as for a range that is registered already.
    pub fn register(&self, mapping: impl HostMapping) -> Result<Memory> {
        let driver = self.driver("register host memory")?;
        let (address, length) = (mapping.address(), mapping.length());
        // SAFETY: mapped as long as the value lives, by its contract; it is dropped after
        // the range was unregistered.
        unsafe { driver.register(address, length) }.map_err(|error| error.on(self.name()))?;
        let kind = Kind::Host { _mapping: Box::new(mapping) };
        Ok(Memory::new(self, None, address, length, kind))
    }
}

impl fmt::Debug for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Legacy { opened } => write!(f, "{opened:?}"),
            _ => f.write_str("memory"),
        }
    }
}
