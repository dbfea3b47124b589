//! A range of addresses in which physical memory is mapped, piece by piece.
#![allow(unsafe_code)]

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use threads::lock;

use crate::device::Device;
use crate::device_name::DeviceName;
use crate::driver::{AddressRangeDriver, PhysicalMemory};
use crate::error::{Error, ErrorKind, Result};
use crate::properties::{PeerAccess, Uuid};

/// A range of addresses, filled from its start with whole pieces of memory.
pub(crate) struct AddressRange {
    device: Device,
    raw: Option<Box<dyn AddressRangeDriver>>,
    /// Numbers of the devices that may read and write this range, besides the device of the
    /// memory.
    open_to: Vec<u32>,
    /// The UUID of the device of imported memory, if its exporter named one.
    exporter_device: Option<Uuid>,
    limit: u64,
    pieces: Mutex<Pieces>,
}

#[derive(Default)]
struct Pieces {
    mapped: u64,
    list: Vec<Piece>,
    /// The pieces' device: all are located on one.
    resident: Option<Resident>,
    /// The last piece was not a multiple of the granularity: a further piece would have another
    /// offset here than at its origin.
    is_at_end: bool,
}

/// The device of physical memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Resident {
    /// With this number in this process.
    Visible(u32),
    /// This process does not see it.
    Hidden,
}

struct Piece {
    offset: u64,
    length: u64,
    physical: Box<dyn PhysicalMemory>,
    /// Charged to the budget: allocated by this process, not imported.
    is_charged: bool,
}

impl std::fmt::Debug for AddressRange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AddressRange({} bytes, {:?})", self.limit, self.device)
    }
}

impl AddressRange {
    /// Reserves this many bytes of addresses, for this device and these peers, which need not be
    /// open.
    pub(crate) fn reserve(device: &Device, limit: u64, peers: &[DeviceName]) -> Result<Self> {
        let operation = "reserve addresses";
        let driver = device.driver(operation)?;
        let limit = rounded(device, operation, limit)?;
        let mut open_to = vec![device.name().number];
        for peer in peers {
            if device.peer_access(*peer)? == PeerAccess::None {
                return Err(unreachable_from(operation, device.name(), *peer));
            }
            open_to.push(peer.number);
        }
        open_to.sort_unstable();
        open_to.dedup();
        let raw = driver.reserve(limit).map_err(|error| error.on(device.name()))?;
        let (device, pieces) = (device.clone(), Mutex::default());
        Ok(Self { device, raw: Some(raw), open_to, exporter_device: None, limit, pieces })
    }

    /// Reserves addresses for memory of the device with this UUID, which need not be visible.
    pub(crate) fn reserve_for(device: &Device, limit: u64, exporter_device: Uuid) -> Result<Self> {
        let mut reserved = Self::reserve(device, limit, &[])?;
        reserved.exporter_device = Some(exporter_device);
        Ok(reserved)
    }

    pub(crate) fn address(&self) -> u64 {
        self.raw.as_ref().map_or(0, |raw| raw.address())
    }

    pub(crate) fn is_open_to(&self, number: u32) -> bool {
        self.open_to.contains(&number)
            || lock(&self.pieces).resident == Some(Resident::Visible(number))
    }

    /// Allocates memory and maps it behind the last piece.
    pub(crate) fn create(&self, length: u64) -> Result<()> {
        let operation = "allocate memory";
        let driver = self.device.driver(operation)?;
        let length = rounded(&self.device, operation, length)?;
        let mut pieces = lock(&self.pieces);
        self.device.charges().charge(operation, length)?;
        let created = driver.create(length).and_then(|physical| {
            let resident = Resident::Visible(self.device.name().number);
            self.map(&mut pieces, physical, length, resident, true)
        });
        created.inspect_err(|_| self.device.charges().give_back(length))
    }

    /// Maps another process's memory behind the last piece. Returns the end of the new piece.
    pub(crate) fn import(&self, descriptor: BorrowedFd<'_>, claimed: u64) -> Result<u64> {
        let operation = "import memory";
        let driver = self.device.driver(operation)?;
        let length = rounded(&self.device, operation, claimed)?;
        let mut pieces = lock(&self.pieces);
        if pieces.is_at_end {
            let granularity = self.device.properties().granularity;
            let detail = format!("the previous piece is not a multiple of {granularity} bytes");
            return Err(Error::new(operation, ErrorKind::InvalidHandle, detail));
        }
        let left = self.limit - pieces.mapped;
        if length > left {
            let detail = format!(
                "{length} bytes requested, {} of the reserved {} in use, {left} left",
                pieces.mapped, self.limit
            );
            return Err(Error::new(operation, ErrorKind::OutOfBounds, detail));
        }
        let (physical, number) = driver.import(descriptor, length)?;
        if let Some(number) = number
            && driver.peer_access(number)? == PeerAccess::None
            && number != self.device.name().number
        {
            let name = DeviceName { number, ..self.device.name() };
            return Err(unreachable_from(operation, self.device.name(), name));
        }
        // Mapping memory of a hidden device shows whether this device reaches it.
        let resident = number.map_or(Resident::Hidden, Resident::Visible);
        if pieces.resident.is_some_and(|other| other != resident) {
            let detail = "the piece is on another device than the others";
            return Err(Error::new(operation, ErrorKind::InvalidHandle, detail));
        }
        let mapped = self.map(&mut pieces, physical, length, resident, false);
        mapped.map_err(|error| match error.kind() {
            // The driver's error for memory that is shorter than announced.
            ErrorKind::InvalidArgument | ErrorKind::NotSupported => {
                error.with_kind(ErrorKind::InvalidHandle)
            }
            _ => error,
        })?;
        pieces.is_at_end = length != claimed;
        Ok(pieces.mapped)
    }

    fn map(
        &self,
        pieces: &mut Pieces,
        physical: Box<dyn PhysicalMemory>,
        length: u64,
        resident: Resident,
        is_charged: bool,
    ) -> Result<()> {
        let Some(raw) = &self.raw else { return Ok(()) };
        let offset = pieces.mapped;
        let mut devices = self.open_to.clone();
        // Both the mapping device and the device of the memory need access, or one of them
        // faults.
        if let Resident::Visible(number) = resident
            && !devices.contains(&number)
        {
            devices.push(number);
        }
        raw.map(offset, &*physical, &devices)?;
        pieces.mapped += length;
        pieces.resident = Some(resident);
        pieces.list.push(Piece { offset, length, physical, is_charged });
        Ok(())
    }

    /// The file descriptor of a piece, and its length.
    pub(crate) fn export(&self, number: usize) -> Result<(OwnedFd, u64)> {
        let pieces = lock(&self.pieces);
        let Some(piece) = pieces.list.get(number) else {
            let detail = format!("piece {number} of {}", pieces.list.len());
            return Err(Error::new("export memory", ErrorKind::OutOfBounds, detail));
        };
        Ok((piece.physical.export()?, piece.length))
    }

    /// The device of the pieces, if there are any and this process sees it.
    pub(crate) fn resident(&self) -> Option<DeviceName> {
        match lock(&self.pieces).resident {
            Some(Resident::Visible(number)) => Some(DeviceName { number, ..self.device.name() }),
            Some(Resident::Hidden) | None => None,
        }
    }

    /// Are the pieces on a device that this process does not see?
    pub(crate) fn is_hidden(&self) -> bool {
        lock(&self.pieces).resident == Some(Resident::Hidden)
    }

    /// The device of the pieces as their exporter named it.
    pub(crate) fn exporter_device(&self) -> Option<Uuid> {
        self.exporter_device
    }

    pub(crate) fn lengths(&self) -> Vec<u64> {
        lock(&self.pieces).list.iter().map(|piece| piece.length).collect()
    }
}

impl Drop for AddressRange {
    fn drop(&mut self) {
        // No lock: in a forked child, a thread that does not exist there may hold it.
        let pieces = std::mem::take(self.pieces.get_mut().unwrap_or_else(PoisonError::into_inner));
        if !self.device.is_current() {
            std::mem::forget(pieces);
            std::mem::forget(self.raw.take());
            return;
        }
        for piece in &pieces.list {
            if let Some(raw) = &self.raw {
                // SAFETY: mapped by this object; no slice, and thus no operation, is left. If
                // it fails, the addresses are not reused: freeing them would fail in the
                // driver, too.
                let _ = unsafe { raw.unmap(piece.offset, piece.length) };
            }
            if piece.is_charged {
                self.device.charges().give_back(piece.length);
            }
        }
    }
}

fn unreachable_from(operation: &'static str, device: DeviceName, peer: DeviceName) -> Error {
    let detail = format!("{device} and {peer} cannot reach each other's memory directly");
    Error::new(operation, ErrorKind::NoPeerAccess, detail).on(device)
}

/// Rounds up to whole granules of the device.
fn rounded(device: &Device, operation: &'static str, length: u64) -> Result<u64> {
    let granularity = device.properties().granularity;
    // A length that no machine has is refused before any arithmetic on it can wrap.
    if length == 0 || length > 1 << 46 {
        let error = Error::new(operation, ErrorKind::InvalidArgument, format!("{length} bytes"));
        return Err(error.on(device.name()));
    }
    Ok(length.next_multiple_of(granularity))
}
