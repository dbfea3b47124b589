//! Foreign memory: its pieces, and how it can be exported.

use std::fmt;
use std::os::fd::OwnedFd;

use crate::device::Device;
use crate::driver::PhysicalMemory;
use crate::error::{Error, ErrorKind, Result};
use crate::pointer_attributes::Allocator;

/// Memory that another library allocated.
#[derive(Debug)]
pub(crate) struct Foreign {
    /// None if the driver was not queried.
    allocator: Option<Allocator>,
    /// The pieces of exportable mapped memory. Declared before the owner, so that they are
    /// released before the owner frees the memory.
    retained: Option<RetainedPieces>,
    _owner: Box<dyn fmt::Debug + Send + Sync>,
}

impl Foreign {
    /// Memory that was not looked up.
    pub(crate) fn unknown(owner: Box<dyn fmt::Debug + Send + Sync>) -> Self {
        Self { allocator: None, retained: None, _owner: owner }
    }

    /// Queries the allocator of the memory. Also returns the device that it is located on.
    pub(crate) fn found(
        device: &Device,
        (address, length): (u64, u64),
        owner: Box<dyn fmt::Debug + Send + Sync>,
    ) -> Result<(Self, Option<crate::DeviceName>)> {
        let operation = "adopt memory";
        let on = |error: Error| error.on(device.name());
        let refuse = |kind, detail| Err(on(Error::new(operation, kind, detail)));
        let Some(end) = address.checked_add(length).filter(|end| *end > address) else {
            return refuse(ErrorKind::InvalidArgument, format!("{length} bytes at {address:#x}"));
        };
        let found = device.driver(operation)?.attributes(address).map_err(on)?;
        let retained = match found.allocator {
            // The driver's answer covers only one piece of this memory.
            Allocator::Mapped { exportable: true } => {
                Some(RetainedPieces::walk(device, operation, address, end).map_err(on)?)
            }
            Allocator::Mapped { exportable: false } => None,
            // A driver that does not know the length reports 0.
            _ if found.length > 0 && end.saturating_sub(found.base) > found.length => {
                let detail = format!(
                    "{length} bytes at offset {}, in an allocation of {} bytes",
                    address.saturating_sub(found.base),
                    found.length
                );
                return refuse(ErrorKind::OutOfBounds, detail);
            }
            _ => None,
        };
        Ok((Self { allocator: Some(found.allocator), retained, _owner: owner }, found.device))
    }

    /// The pieces that contain the memory, if it can be exported.
    pub(crate) fn retained(&self) -> Option<&RetainedPieces> {
        self.retained.as_ref()
    }

    /// Mapped memory is accessible to the devices that it is mapped for, peers or not.
    pub(crate) fn is_mapped(&self) -> bool {
        matches!(self.allocator, Some(Allocator::Mapped { .. }))
    }

    /// May the driver have a legacy handle for it?
    pub(crate) fn may_have_legacy_handle(&self) -> bool {
        matches!(self.allocator, None | Some(Allocator::Plain))
    }

    /// Why it cannot be exported as file descriptors, with the remedy.
    pub(crate) fn reason_not_exportable(&self) -> &'static str {
        match self.allocator {
            None => {
                "its allocator is unknown. Adopt it with Device::adopt, or export it by legacy \
                 handle"
            }
            Some(Allocator::Plain) => {
                "it was allocated with cudaMalloc: export it by legacy handle"
            }
            Some(Allocator::Mapped { .. }) => {
                "it is mapped from physical memory without a shareable handle type: \
                 let its allocator request file descriptors or fabric handles, or allocate with \
                 cudaMalloc (PyTorch: without expandable segments), or copy it to memory that \
                 Device::allocate_shared returned"
            }
            Some(Allocator::Pool) => {
                "it is of a stream-ordered pool (cudaMallocAsync), which keeps it in its process: \
                 have its allocator use cudaMalloc (PyTorch: backend:native), or copy it to \
                 memory that Device::allocate_shared returned"
            }
            Some(Allocator::Managed) => {
                "it is managed memory (cudaMallocManaged), which stays in its process: copy it to \
                 memory that Device::allocate_shared returned"
            }
            Some(Allocator::Host) => {
                "it is host memory: share the segment or file that contains it"
            }
        }
    }
}

/// Foreign physical memory, mapped piece behind piece. It stays allocated as long as this
/// object, whatever its owner does.
#[derive(Debug)]
pub(crate) struct RetainedPieces {
    device: Device,
    /// The offset of the range in the first piece.
    offset: u64,
    pieces: Vec<(Box<dyn PhysicalMemory>, u64)>,
}

impl RetainedPieces {
    /// All pieces that overlap the range; the first and the last may overlap it only partly.
    fn walk(device: &Device, operation: &'static str, address: u64, end: u64) -> Result<Self> {
        let driver = device.driver(operation)?;
        let mut found = Self { device: device.clone(), offset: 0, pieces: Vec::new() };
        let mut at = address;
        while at < end {
            let (physical, base, length) = driver.retain(at)?;
            let behind = base.checked_add(length);
            let is_next = if found.pieces.is_empty() { base <= at } else { base == at };
            let Some(behind) = behind.filter(|behind| is_next && *behind > at) else {
                let detail = format!("{at:#x} is inside a piece of {length} bytes at {base:#x}");
                return Err(Error::new(operation, ErrorKind::Other, detail));
            };
            if found.pieces.is_empty() {
                found.offset = at - base;
            }
            found.pieces.push((physical, length));
            at = behind;
        }
        Ok(found)
    }

    /// The offset of the range in the first piece, and the lengths of the pieces.
    pub(crate) fn extent(&self) -> (u64, Vec<u64>) {
        (self.offset, self.pieces.iter().map(|(_, length)| *length).collect())
    }

    /// The file descriptor of a piece, and its length.
    pub(crate) fn export(&self, number: usize) -> Result<(OwnedFd, u64)> {
        let Some((physical, length)) = self.pieces.get(number) else {
            let detail = format!("piece {number} of {}", self.pieces.len());
            return Err(Error::new("export memory", ErrorKind::OutOfBounds, detail));
        };
        Ok((physical.export()?, *length))
    }
}

impl Drop for RetainedPieces {
    fn drop(&mut self) {
        if !self.device.is_current() {
            std::mem::forget(std::mem::take(&mut self.pieces));
        }
    }
}
