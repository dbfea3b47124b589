//! Importing memory of another process, piece by piece.

use std::os::fd::BorrowedFd;

use crate::address_range::AddressRange;
use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Memory;
use crate::properties::Uuid;

/// Memory that is being imported. Its pieces are mapped one behind the other, in one reserved
/// address range.
///
/// The file descriptor of a piece may be closed as soon as the piece was added: a region of
/// thousands of pieces needs no more file descriptors than are in flight.
///
/// ```
/// use std::os::fd::AsFd;
/// use gpu::Device;
/// let device = Device::open("emulated:0".parse()?)?;
/// let memory = device.allocate_shared(4 << 20, &[])?;
/// let pieces = memory.pieces()?;
/// // In another process:
/// let importer = device.importer(pieces.lengths.iter().sum())?;
/// for number in 0..pieces.lengths.len() {
///     let (descriptor, length) = memory.export_piece(number)?; // … which arrives over a socket
///     importer.add(descriptor.as_fd(), length)?;
/// }
/// let same = importer.finish(pieces.offset, memory.length())?;
/// assert_eq!(same.length(), memory.length());
/// # Ok::<(), gpu::Error>(())
/// ```
///
/// Growing memory can be [used](Self::memory) before all pieces have arrived. If all processes
/// add the pieces in the same order, an offset means the same in each of them.
#[derive(Debug)]
pub struct Importer {
    memory: Memory,
}

impl Importer {
    /// Maps the next piece. Its file descriptor is not needed afterwards.
    ///
    /// # Errors
    /// [`InvalidHandle`](ErrorKind::InvalidHandle) if the file descriptor is not such memory, has
    /// less than `length` bytes, is on another device than the previous pieces, or if the previous
    /// piece was not a multiple of this device's [granules](crate::Properties::granularity);
    /// [`OutOfBounds`](ErrorKind::OutOfBounds) if it exceeds the reserved range;
    /// [`NoPeerAccess`](ErrorKind::NoPeerAccess) if this device cannot access it.
    pub fn add(&self, descriptor: BorrowedFd<'_>, length: u64) -> Result<()> {
        let on = |error: Error| error.on(self.memory.mapped_for().name());
        // An importer always has an address range.
        let Some(address_range) = self.memory.address_range() else { return Ok(()) };
        let end = address_range.import(descriptor, length).map_err(on)?;
        self.memory.grow_to(end);
        Ok(())
    }

    /// All pieces so far as one memory. Clones that were made earlier grow with it.
    #[must_use]
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// The finished memory: this many bytes, from this offset in the first piece on.
    ///
    /// # Errors
    /// [`InvalidHandle`](ErrorKind::InvalidHandle) if all pieces together have fewer bytes;
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if the memory is already in use.
    pub fn finish(self, offset: u64, length: u64) -> Result<Memory> {
        let (mapped, device) = (self.memory.length(), self.memory.mapped_for().name());
        let refuse = |kind, detail| Err(Error::new("import memory", kind, detail).on(device));
        if offset.checked_add(length).is_none_or(|end| end > mapped) {
            let detail =
                format!("{length} bytes at offset {offset}, in pieces of {mapped} bytes together");
            return refuse(ErrorKind::InvalidHandle, detail);
        }
        let detail = "the imported memory is already in use";
        let in_use = || refuse(ErrorKind::InvalidArgument, detail.to_owned());
        self.memory.part(offset, length).map_or_else(in_use, Ok)
    }
}

impl Device {
    /// Reserves addresses for memory that another process exported, with this many bytes in all
    /// its pieces together. The pieces are added as they arrive.
    ///
    /// # Errors
    /// If the addresses cannot be reserved.
    pub fn importer(&self, total: u64) -> Result<Importer> {
        let address_range = AddressRange::reserve(self, total, &[])?;
        Ok(Importer { memory: Memory::of_address_range(self, address_range, 0) })
    }

    /// Like [`importer`](Self::importer), for memory of the device with this UUID, which this process
    /// need not see: the memory then [knows](Memory::device_uuid) where it is.
    ///
    /// # Errors
    /// If the addresses cannot be reserved.
    pub fn importer_of(&self, uuid: Uuid, total: u64) -> Result<Importer> {
        let address_range = AddressRange::reserve_for(self, total, uuid)?;
        Ok(Importer { memory: Memory::of_address_range(self, address_range, 0) })
    }
}
