//! Memory that devices can access, and slices of it.
#![allow(unsafe_code)]

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use crate::address_range::AddressRange;
use crate::deferred_free::DeferredFree;
use crate::device::Device;
use crate::device_name::DeviceName;
use crate::error::{Error, ErrorKind, Result};
use crate::foreign::{Foreign, RetainedPieces};
use crate::legacy_handle::{LegacyHandle, remember_own_handle};
use crate::properties::Uuid;

const EXPORT: &str = "export memory";
const NOT_SHAREABLE: &str = "it was not allocated as shareable (Device::allocate_shared)";

/// Host memory that devices can be given access to.
///
/// # Safety
/// From the first call until the value is dropped, `address` and `length` must name the same
/// range. It must be mapped and valid for reads and writes by devices, and no Rust reference to
/// its bytes may exist.
///
/// Dropping it may release other memory. But it may neither start a stream wait nor wait for a
/// thread that does, because no wait can start during the drop.
pub unsafe trait HostMapping: fmt::Debug + Send + Sync + 'static {
    /// First byte.
    fn address(&self) -> u64;
    /// Length in bytes.
    fn length(&self) -> u64;
    /// Is it read-only?
    fn is_read_only(&self) -> bool {
        false
    }
}

/// Memory that devices can access: of a device, or registered host memory. Clones of the handle
/// are the same memory, which is released with the last clone and the last operation on it.
#[derive(Clone)]
pub struct Memory(Arc<MemoryInner>);

/// The backing of the memory, and how it is released.
#[derive(Debug)]
pub(crate) struct MemoryInner {
    /// The device in whose context it is mapped.
    device: Device,
    /// The device that it is located on; None for the host.
    resident: Option<DeviceName>,
    address: u64,
    /// The length; imported memory grows.
    length: AtomicU64,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Plain {
        was_exported: AtomicBool,
    },
    AddressRange(AddressRange),
    /// An allocation of another process, of which it is a user in the table of the device.
    Legacy {
        bytes: [u8; 64],
    },
    Host {
        mapping: Box<dyn HostMapping>,
    },
    Foreign(Foreign),
    Released,
}

fn plain() -> Kind {
    Kind::Plain { was_exported: AtomicBool::new(false) }
}

impl Drop for MemoryInner {
    fn drop(&mut self) {
        if !self.device.is_current() {
            return;
        }
        let (address, length) = (self.address, self.length.load(Ordering::Relaxed));
        // No slice, thus no operation, is left.
        let deferred_free = match std::mem::replace(&mut self.kind, Kind::Released) {
            Kind::Plain { was_exported } => {
                let is_private = !was_exported.into_inner();
                DeferredFree::Plain { address, length, is_private }
            }
            Kind::Host { mapping } => DeferredFree::Host { address, length, _mapping: mapping },
            Kind::Legacy { bytes } if self.device.legacy_table().release(&bytes) => {
                DeferredFree::Legacy { bytes }
            }
            // It has other users, or these release themselves.
            Kind::AddressRange(_) | Kind::Legacy { .. } | Kind::Foreign(_) | Kind::Released => {
                return;
            }
        };
        self.device.give_back(deferred_free);
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let location = self.device().map_or("the host".to_owned(), |device| device.to_string());
        write!(f, "Memory({} bytes of {location})", self.length())
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
        Self(Arc::new(MemoryInner { device: device.clone(), resident, address, length, kind }))
    }

    /// The first bytes of a range of addresses with mapped memory.
    pub(crate) fn of_address_range(
        device: &Device,
        address_range: AddressRange,
        length: u64,
    ) -> Self {
        let address = address_range.address();
        let resident = Some(device.name());
        Self::new(device, resident, address, length, Kind::AddressRange(address_range))
    }

    pub(crate) fn address_range(&self) -> Option<&AddressRange> {
        match &self.0.kind {
            Kind::AddressRange(address_range) => Some(address_range),
            _ => None,
        }
    }

    /// Memory of an address range, this many bytes from an offset on; None if the range is
    /// shared.
    pub(crate) fn part(mut self, offset: u64, length: u64) -> Option<Self> {
        let holding = Arc::get_mut(&mut self.0)?;
        holding.address += offset;
        holding.length = AtomicU64::new(length);
        Some(self)
    }

    /// Updates the length after more memory was mapped.
    pub(crate) fn grow_to(&self, length: u64) {
        self.0.length.fetch_max(length, Ordering::AcqRel);
    }

    /// Memory of another library, such as a framework's tensor. The driver is not queried, so
    /// it cannot be exported as pieces; [adopt](Device::adopt) does query it.
    ///
    /// # Safety
    /// The range belongs to `device`, or is mapped for it, until `owner` is dropped.
    pub unsafe fn foreign(
        device: &Device,
        address: u64,
        length: u64,
        owner: impl fmt::Debug + Send + Sync + 'static,
    ) -> Self {
        let kind = Kind::Foreign(Foreign::unknown(Box::new(owner)));
        Self::new(device, Some(device.name()), address, length, kind)
    }

    /// Address of the memory in this process.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.0.address
    }

    /// Length in bytes.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.0.length.load(Ordering::Acquire)
    }

    /// The device that it is located on; None for the host. For memory of a device that this process
    /// does not see, and for memory opened by legacy handle, it is the device that maps it, as for
    /// the driver.
    #[must_use]
    pub fn device(&self) -> Option<DeviceName> {
        // Imported memory is located where its pieces are.
        self.address_range().and_then(AddressRange::resident).or(self.0.resident)
    }

    /// Was it imported from a device that this process does not see? Not known of memory opened by
    /// legacy handle.
    ///
    /// ```
    /// let device = gpu::Device::open("emulated:0".parse()?)?;
    /// assert!(!device.allocate(4096)?.is_of_hidden_device());
    /// # Ok::<(), gpu::Error>(())
    /// ```
    #[must_use]
    pub fn is_of_hidden_device(&self) -> bool {
        self.address_range().is_some_and(AddressRange::is_hidden)
    }

    /// The UUID of the device that it is located on; None for the host. Of a device that this process
    /// does not see, it is the one that [`importer_of`](Device::importer_of) was given. Memory opened
    /// by legacy handle has the device that opened it.
    ///
    /// ```
    /// let device = gpu::Device::open("emulated:0".parse()?)?;
    /// let memory = device.allocate(4096)?;
    /// assert_eq!(memory.device_uuid()?, Some(device.properties().uuid));
    /// # Ok::<(), gpu::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`NoSuchDevice`](ErrorKind::NoSuchDevice) if this process does not see the device, and was not
    /// told its UUID.
    pub fn device_uuid(&self) -> Result<Option<Uuid>> {
        let hidden = self.address_range().filter(|address_range| address_range.is_hidden());
        let Some(address_range) = hidden else {
            return self.device().map(DeviceName::uuid).transpose();
        };
        address_range.exporter_device().map(Some).ok_or_else(|| {
            let detail = "this process does not see the device of the memory";
            let error = Error::new("identify device of memory", ErrorKind::NoSuchDevice, detail);
            error.on(self.0.device.name())
        })
    }

    /// Is it read-only? Streams refuse to write to it.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        matches!(&self.0.kind, Kind::Host { mapping } if mapping.is_read_only())
    }

    /// The device that it is mapped for.
    #[must_use]
    pub fn mapped_for(&self) -> &Device {
        &self.0.device
    }

    /// The whole memory.
    #[must_use]
    pub fn whole(&self) -> Slice {
        Slice { memory: self.clone(), offset: 0, length: self.length() }
    }

    /// A part of it.
    ///
    /// # Errors
    /// [`OutOfBounds`](ErrorKind::OutOfBounds).
    pub fn slice(&self, offset: u64, length: u64) -> Result<Slice> {
        check_bounds(offset, length, self.length())?;
        Ok(Slice { memory: self.clone(), offset, length })
    }

    /// Can this device access it directly?
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
            Kind::AddressRange(address_range) => address_range.is_open_to(name.number),
            // Opened for one device, which may not be the device of the memory.
            Kind::Legacy { .. } => {
                self.0.device.name() == name || device.has_peer_access(resident.number)
            }
            // Access to a peer's cuMemAlloc memory does not imply access to memory that other
            // libraries mapped.
            Kind::Foreign(foreign) if foreign.is_mapped() => self.0.device.name() == name,
            _ => resident == name || device.has_peer_access(resident.number),
        }
    }

    /// Exports one of its [pieces](Self::pieces) as a file descriptor, with its length. CUDA
    /// exports only memory that this process allocated, not imported memory.
    ///
    /// # Errors
    /// [`NotSupported`](ErrorKind::NotSupported) unless it was allocated as shareable, here or
    /// by another library; the text names the remedy. [`OutOfBounds`](ErrorKind::OutOfBounds) if
    /// there is no such piece.
    pub fn export_piece(&self, number: usize) -> Result<(OwnedFd, u64)> {
        self.0.device.call(EXPORT, |_| match &self.0.kind {
            Kind::AddressRange(address_range) => address_range.export(number),
            Kind::Foreign(foreign) => self.retained(foreign)?.export(number),
            _ => Err(self.refuse(EXPORT, NOT_SHAREABLE)),
        })
    }

    /// The pieces that [`export_piece`](Self::export_piece) exports, and the offset of the memory
    /// in them. Memory that [grew](crate::Importer) has many pieces, and so may
    /// [adopted](Device::adopt) memory.
    ///
    /// # Errors
    /// [`NotSupported`](ErrorKind::NotSupported) if it cannot be exported in pieces.
    pub fn pieces(&self) -> Result<Pieces> {
        self.0.device.driver(EXPORT)?;
        let (offset, lengths) = match &self.0.kind {
            Kind::AddressRange(address_range) => {
                (self.address() - address_range.address(), address_range.lengths())
            }
            Kind::Foreign(foreign) => self.retained(foreign)?.extent(),
            _ => return Err(self.refuse(EXPORT, NOT_SHAREABLE)),
        };
        Ok(Pieces { offset, lengths })
    }

    fn retained<'a>(&self, foreign: &'a Foreign) -> Result<&'a RetainedPieces> {
        let why = || self.refuse(EXPORT, foreign.reason_not_exportable());
        foreign.retained().ok_or_else(why)
    }

    /// Exports it as a legacy handle (64 bytes) and an offset in its allocation, for other
    /// processes to [open](Device::open_legacy_handle): the only way for memory that other
    /// libraries allocated with `cuMemAlloc`.
    ///
    /// Keep the memory until its importers have closed it: the driver does not define what they
    /// access in freed memory. If this process exits, their mappings stay valid. The handle
    /// names the whole allocation, so an importer can also access parts of it that are in other
    /// use.
    ///
    /// # Errors
    /// [`NotSupported`](ErrorKind::NotSupported) for memory allocated as shareable, for
    /// imported memory, and if the device has no legacy handles.
    pub fn export_legacy(&self) -> Result<LegacyHandle> {
        let operation = "export by legacy handle";
        let driver = self.0.device.driver(operation)?;
        match &self.0.kind {
            // An importer may close it late, so this memory is never reused.
            Kind::Plain { was_exported } => was_exported.store(true, Ordering::Relaxed),
            Kind::Foreign(foreign) if foreign.may_have_legacy_handle() => {}
            Kind::Foreign(foreign) if foreign.retained().is_none() => {
                return Err(self.refuse(operation, foreign.reason_not_exportable()));
            }
            _ => {
                let detail = "it was not allocated with cuMemAlloc (cudaMalloc)";
                return Err(self.refuse(operation, detail));
            }
        }
        let on = |error: Error| error.on(self.0.device.name());
        let attributes = driver.attributes(self.address()).map_err(on)?;
        let bytes = driver.legacy_export(self.address()).map_err(on)?;
        let offset = self.address().saturating_sub(attributes.base);
        remember_own_handle(bytes);
        Ok(LegacyHandle { bytes, offset, length: self.length() })
    }

    /// Lets synchronous copies of its allocation by any library end before their calls return, as
    /// direct access by network cards requires: without it a copy between devices may still run
    /// when its call has returned (`CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`). It cannot be undone.
    ///
    /// ```
    /// let device = gpu::Device::open("emulated:0".parse()?)?;
    /// device.allocate(4096)?.set_sync_memops()?;
    /// let mapped = device.allocate_shared(4096, &[])?;
    /// assert_eq!(mapped.set_sync_memops().unwrap_err().kind(), gpu::ErrorKind::NotSupported);
    /// # Ok::<(), gpu::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`NotSupported`](ErrorKind::NotSupported) for mapped memory, and for memory of the host.
    pub fn set_sync_memops(&self) -> Result<()> {
        let operation = "set synchronous copies";
        if self.device().is_none() {
            return Err(self.refuse(operation, "it is memory of the host"));
        }
        self.0.device.call(operation, |driver| driver.set_sync_memops(self.address()))
    }

    fn refuse(&self, operation: &'static str, detail: &str) -> Error {
        Error::new(operation, ErrorKind::NotSupported, detail).on(self.0.device.name())
    }

    pub(crate) fn inner(&self) -> Arc<MemoryInner> {
        Arc::clone(&self.0)
    }

    /// An identity that no other memory has during its lifetime; two mappings of different
    /// devices can have the same address.
    #[must_use]
    pub fn identity(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }

    /// Is another handle, a slice or an operation using it? A `true` may be outdated when it is
    /// returned; a `false` is not.
    ///
    /// ```
    /// let device = gpu::Device::open("emulated:0".parse()?)?;
    /// let memory = device.allocate(4096)?;
    /// assert!(!memory.is_shared());
    /// let slice = memory.slice(0, 8)?;
    /// assert!(memory.is_shared() && slice.memory().identity() == memory.identity());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// A handle that does not keep it alive.
    #[must_use]
    pub fn downgrade(&self) -> WeakMemory {
        WeakMemory(Arc::downgrade(&self.0))
    }
}

/// The pieces of exported memory. A process that receives them [adds](crate::Importer::add) them
/// in their order, and [finishes](crate::Importer::finish) at the offset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pieces {
    /// The offset of the memory in the first piece, in bytes.
    pub offset: u64,
    /// Their lengths in bytes, in address order.
    pub lengths: Vec<u64>,
}

/// A weak handle, which does not keep the memory alive.
#[derive(Debug, Clone)]
pub struct WeakMemory(Weak<MemoryInner>);

impl WeakMemory {
    /// The memory, if it is still alive.
    #[must_use]
    pub fn upgrade(&self) -> Option<Memory> {
        self.0.upgrade().map(Memory)
    }
}

/// A slice of memory, which keeps it alive.
#[derive(Clone)]
pub struct Slice {
    memory: Memory,
    offset: u64,
    length: u64,
}

fn check_bounds(offset: u64, length: u64, limit: u64) -> Result<()> {
    if offset.checked_add(length).is_some_and(|end| end <= limit) {
        return Ok(());
    }
    let detail = format!("{length} bytes at offset {offset}, of {limit} bytes");
    Err(Error::new("slice memory", ErrorKind::OutOfBounds, detail))
}

impl fmt::Debug for Slice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slice({} + {}, {:?})", self.offset, self.length, self.memory)
    }
}

impl Slice {
    /// The memory of the slice.
    #[must_use]
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Address of the slice in this process.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.memory.address() + self.offset
    }

    /// Offset of the slice in its memory.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Length in bytes.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.length
    }

    /// A part of the slice.
    ///
    /// # Errors
    /// [`OutOfBounds`](ErrorKind::OutOfBounds).
    pub fn slice(&self, offset: u64, length: u64) -> Result<Self> {
        check_bounds(offset, length, self.length)?;
        self.memory.slice(self.offset + offset, length)
    }
}

impl Device {
    /// Allocates memory with `cuMemAlloc`: for this process alone, or shareable by [legacy
    /// handle](Memory::export_legacy) if the device has those.
    ///
    /// # Errors
    /// [`OverBudget`](ErrorKind::OverBudget), [`OutOfMemory`](ErrorKind::OutOfMemory).
    pub fn allocate(&self, length: u64) -> Result<Memory> {
        let operation = "allocate memory";
        let driver = self.driver(operation)?;
        let on = |error: Error| error.on(self.name());
        if length == 0 {
            return Err(on(Error::new(operation, ErrorKind::InvalidArgument, "0 bytes")));
        }
        // Deferred memory is still charged.
        if let Some(address) = self.deferred_frees().take_plain(length) {
            return Ok(Memory::new(self, Some(self.name()), address, length, plain()));
        }
        self.charges().charge(operation, length).map_err(on)?;
        let allocated = driver.allocate(length);
        let address = allocated.inspect_err(|_| self.charges().give_back(length)).map_err(on)?;
        Ok(Memory::new(self, Some(self.name()), address, length, plain()))
    }

    /// Allocates memory that other processes can [import](Self::importer), and that `peers` can
    /// access as well as this device; they need not be open. Takes whole [granules](crate::Properties::granularity) of
    /// the device.
    ///
    /// # Errors
    /// [`OverBudget`](ErrorKind::OverBudget), [`OutOfMemory`](ErrorKind::OutOfMemory);
    /// [`NoPeerAccess`](ErrorKind::NoPeerAccess) if a peer has no access.
    pub fn allocate_shared(&self, length: u64, peers: &[DeviceName]) -> Result<Memory> {
        let address_range = AddressRange::reserve(self, length, peers)?;
        address_range.create(length).map_err(|error| error.on(self.name()))?;
        Ok(Memory::of_address_range(self, address_range, length))
    }

    /// Allocates shared memory in pieces of these lengths, to match the pieces of other libraries.
    ///
    /// # Errors
    /// As for [one piece](Self::allocate_shared).
    #[cfg(feature = "fault-injection")]
    pub fn allocate_pieces(&self, lengths: &[u64]) -> Result<Memory> {
        let address_range = AddressRange::reserve(self, lengths.iter().sum(), &[])?;
        lengths.iter().try_for_each(|length| address_range.create(*length))?;
        Ok(Memory::of_address_range(self, address_range, lengths.iter().sum()))
    }

    /// Adopts memory of another library, such as a framework's tensor: queries the driver for
    /// its allocator, and thus how it can be exported.
    ///
    /// Memory mapped in exportable pieces, such as PyTorch's expandable segments, is exported
    /// [in pieces](Memory::export_piece): all pieces that overlap the range. They stay
    /// allocated as long as the adopted memory, even if their owner unmaps them. `cuMemAlloc`
    /// memory is exported [by legacy handle](Memory::export_legacy). Other memory cannot be
    /// exported; the error names the reason.
    ///
    /// Mapped memory counts as accessible to this device alone, whatever its peers could
    /// access: adopt it for each device that it is mapped for.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if the driver does not know the address;
    /// [`OutOfBounds`](ErrorKind::OutOfBounds) if its allocation is shorter.
    ///
    /// # Safety
    /// The range belongs to this device, or is mapped for it, until `owner` is dropped.
    pub unsafe fn adopt(
        &self,
        address: u64,
        length: u64,
        owner: impl fmt::Debug + Send + Sync + 'static,
    ) -> Result<Memory> {
        let (foreign, resident) = Foreign::found(self, (address, length), Box::new(owner))?;
        Ok(Memory::new(self, resident, address, length, Kind::Foreign(foreign)))
    }

    /// Opens memory of another process for this device. The other process may have the same
    /// process id in another PID namespace: the first process of every container has id 1.
    ///
    /// # Errors
    /// [`InvalidHandle`](ErrorKind::InvalidHandle) if the handle is unknown to the driver, was
    /// made by this process, or claims more than the allocation has.
    pub fn open_legacy_handle(&self, handle: &LegacyHandle) -> Result<Memory> {
        let operation = "open legacy handle";
        let driver = self.driver(operation)?;
        let on = |error: Error| error.on(self.name());
        let LegacyHandle { bytes, offset, length } = *handle;
        let (base, whole) = self.legacy_table().open(bytes, driver).map_err(on)?;
        // Another device than this one, if a peer opened it.
        let resident = driver.attributes(base).ok().and_then(|attributes| attributes.device);
        let resident = resident.or(Some(self.name()));
        // From here on it is released on drop.
        let address = base.wrapping_add(offset);
        let memory = Memory::new(self, resident, address, length, Kind::Legacy { bytes });
        if length == 0 || offset.checked_add(length).is_none_or(|end| end > whole) {
            let detail =
                format!("{length} bytes at offset {offset}, in an allocation of {whole} bytes");
            return Err(on(Error::new(operation, ErrorKind::InvalidHandle, detail)));
        }
        Ok(memory)
    }

    /// Gives this device, and all others of its implementation, access to host memory.
    ///
    /// # Errors
    /// If the driver refuses, for example because the range is already registered;
    /// [`NotSupported`](ErrorKind::NotSupported) for read-only memory, if the device cannot
    /// register it.
    pub fn register(&self, mapping: impl HostMapping) -> Result<Memory> {
        let driver = self.driver("register host memory")?;
        let (address, length) = (mapping.address(), mapping.length());
        let before = self.deferred_frees().take_host((address, length));
        if before.is_none() {
            // SAFETY: mapped as long as the value lives, by its contract; it is dropped after
            // the range was unregistered.
            unsafe { driver.register(address, length, mapping.is_read_only()) }
                .map_err(|error| error.on(self.name()))?;
        }
        Ok(Memory::new(self, None, address, length, Kind::Host { mapping: Box::new(mapping) }))
    }
}
