//! Memory that comes from another process, piece by piece.

use std::os::fd::{AsFd, BorrowedFd};

use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Memory;
use crate::space::Space;

/// Memory on its way in, one piece behind the other.
///
/// Each piece's descriptor may be closed as soon as it was added: a region of thousands of
/// pieces needs no more descriptors than its sender has under way.
///
/// ```
/// use std::os::fd::AsFd;
/// use gpu::Device;
/// let device = Device::open("stand-in:0".parse()?)?;
/// let memory = device.allocate_shared(4 << 20, &[])?;
/// let pieces = memory.pieces()?;
/// // In another process:
/// let mut importer = device.importer(pieces.lengths.iter().sum())?;
/// for number in 0..pieces.lengths.len() {
///     let (descriptor, length) = memory.export_piece(number)?; // … which comes by a socket
///     importer.add(descriptor.as_fd(), length)?;
/// }
/// let same = importer.finish(pieces.offset, memory.length())?;
/// assert_eq!(same.length(), memory.length());
/// # Ok::<(), gpu::Error>(())
/// ```
#[derive(Debug)]
pub struct Importer {
    device: Device,
    space: Space,
    mapped: u64,
    /// The last piece was no whole number of granules: what follows would lie elsewhere here
    /// than where it came from.
    is_at_end: bool,
}

impl Importer {
    fn new(device: &Device, total: u64) -> Result<Self> {
        let space = Space::reserve(device, total, &[])?;
        Ok(Self { device: device.clone(), space, mapped: 0, is_at_end: false })
    }

    /// Maps the next piece. Its descriptor is not needed any more afterwards.
    ///
    /// # Errors
    /// [`InvalidHandle`](ErrorKind::InvalidHandle) if the descriptor is not such memory, has
    /// less than `length` bytes, lies on another device than the pieces before, or if the piece
    /// before was no multiple of this device's [granules](crate::Properties::granularity);
    /// [`OutOfBounds`](ErrorKind::OutOfBounds) if it is more than was reserved;
    /// [`NoPeerAccess`](ErrorKind::NoPeerAccess) if this device cannot reach it.
    pub fn add(&mut self, descriptor: BorrowedFd<'_>, length: u64) -> Result<()> {
        let on = |error: Error| error.on(self.device.name());
        let granularity = self.device.properties().granularity;
        if self.is_at_end {
            let detail = format!("a piece before it is no multiple of {granularity} bytes");
            return Err(on(Error::new("import", ErrorKind::InvalidHandle, detail)));
        }
        let imported = self.space.import(descriptor, length).map_err(|error| {
            on(match error.kind() {
                ErrorKind::OverBudget => error.with_kind(ErrorKind::OutOfBounds),
                _ => error,
            })
        })?;
        self.mapped = imported.offset + imported.length;
        self.is_at_end = !length.is_multiple_of(granularity);
        Ok(())
    }

    /// The memory: so many bytes, from this offset in the first piece on.
    ///
    /// # Errors
    /// [`InvalidHandle`](ErrorKind::InvalidHandle) if all pieces together have fewer bytes.
    pub fn finish(self, offset: u64, length: u64) -> Result<Memory> {
        if offset.checked_add(length).is_none_or(|end| end > self.mapped) {
            let detail =
                format!("{length} bytes from {offset} on, in pieces of {} together", self.mapped);
            let error = Error::new("import", ErrorKind::InvalidHandle, detail);
            return Err(error.on(self.device.name()));
        }
        let resident = self.space.resident().unwrap_or(self.device.name());
        Ok(Memory::of_space(&self.device, resident, self.space, (offset, length)))
    }
}

impl Device {
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
        let mut importer = self.importer(total.unwrap_or(u64::MAX))?;
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
        Importer::new(self, total)
    }
}
