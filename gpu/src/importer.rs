//! Memory that comes from another process, piece by piece.

use std::os::fd::{AsFd, BorrowedFd};

use crate::address_range::AddressRange;
use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Memory;

/// Memory on its way in, one piece behind the other, at addresses that were reserved once for all
/// of them.
///
/// Each piece's descriptor may be closed as soon as it was added: a region of thousands of
/// pieces needs no more descriptors than its sender has under way.
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
///     let (descriptor, length) = memory.export_piece(number)?; // … which comes by a socket
///     importer.add(descriptor.as_fd(), length)?;
/// }
/// let same = importer.finish(pieces.offset, memory.length())?;
/// assert_eq!(same.length(), memory.length());
/// # Ok::<(), gpu::Error>(())
/// ```
///
/// Memory that grows is [used](Self::memory) while pieces still come: added in the same order by
/// all processes, an offset means the same in each of them.
#[derive(Debug)]
pub struct Importer {
    memory: Memory,
}

impl Importer {
    /// Maps the next piece. Its descriptor is not needed any more afterwards.
    ///
    /// # Errors
    /// [`InvalidHandle`](ErrorKind::InvalidHandle) if the descriptor is not such memory, has
    /// less than `length` bytes, lies on another device than the pieces before, or if the piece
    /// before was no multiple of this device's [granules](crate::Properties::granularity);
    /// [`OutOfBounds`](ErrorKind::OutOfBounds) if it is more than was reserved;
    /// [`NoPeerAccess`](ErrorKind::NoPeerAccess) if this device cannot reach it.
    pub fn add(&self, descriptor: BorrowedFd<'_>, length: u64) -> Result<()> {
        let on = |error: Error| error.on(self.memory.mapped_for().name());
        // It is a space, always.
        let Some(address_range) = self.memory.address_range() else { return Ok(()) };
        let end = address_range.import(descriptor, length).map_err(on)?;
        self.memory.grow_to(end);
        Ok(())
    }

    /// All pieces that came so far as one memory. Copies that were made before grow with it.
    #[must_use]
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// The memory: so many bytes, from this offset in the first piece on.
    ///
    /// # Errors
    /// [`InvalidHandle`](ErrorKind::InvalidHandle) if all pieces together have fewer bytes;
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if somebody uses it already.
    pub fn finish(self, offset: u64, length: u64) -> Result<Memory> {
        let (mapped, device) = (self.memory.length(), self.memory.mapped_for().name());
        let refuse = |kind, detail| Err(Error::new("import", kind, detail).on(device));
        if offset.checked_add(length).is_none_or(|end| end > mapped) {
            let detail = format!("{length} bytes from {offset} on, in pieces of {mapped} together");
            return refuse(ErrorKind::InvalidHandle, detail);
        }
        match self.memory.part(offset, length) {
            Some(memory) => Ok(memory),
            None => refuse(
                ErrorKind::InvalidArgument,
                "the imported memory is already in use".to_owned(),
            ),
        }
    }
}

impl Device {
    /// Imports memory of `length` bytes that another process exported in pieces, one behind
    /// the other, and that begins where the first of them does.
    ///
    /// # Errors
    /// As for [each piece](Importer::add); [`InvalidHandle`](ErrorKind::InvalidHandle) if all
    /// pieces together have fewer bytes.
    pub fn import_pieces(&self, pieces: &[(BorrowedFd<'_>, u64)], length: u64) -> Result<Memory> {
        let granularity = self.properties().granularity;
        let total = pieces.iter().try_fold(0_u64, |sum, (_, length)| {
            sum.checked_add(length.checked_next_multiple_of(granularity)?)
        });
        let importer = self.importer(total.unwrap_or(u64::MAX))?;
        for (descriptor, length) in pieces {
            importer.add(descriptor.as_fd(), *length)?;
        }
        importer.finish(0, length)
    }

    /// Reserves addresses for memory that another process exported, so many bytes in all its
    /// pieces together, which are then added as they come.
    ///
    /// # Errors
    /// If the addresses cannot be had.
    pub fn importer(&self, total: u64) -> Result<Importer> {
        let address_range = AddressRange::reserve(self, total, &[])?;
        Ok(Importer { memory: Memory::of_address_range(self, self.name(), address_range, (0, 0)) })
    }
}
