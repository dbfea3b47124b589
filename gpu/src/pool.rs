//! Memory that grows, and that other processes follow.

use std::os::fd::{BorrowedFd, OwnedFd};

use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Memory;
use crate::space::Space;

/// Shared memory of a device that grows by whole pieces, without moving.
///
/// Addresses are reserved once for all it may ever be; each piece is one export. Another
/// process [attaches](Self::attach) with the same limit and maps the pieces in the same
/// order: then an offset means the same in both.
///
/// ```
/// use std::os::fd::AsFd;
/// use gpu::{Device, Pool};
/// let device = Device::open("stand-in:0".parse()?)?;
/// let pool = Pool::new(&device, 64 << 20, &[])?;
/// let piece = pool.grow(4 << 20)?;
/// // In another process:
/// let same = Pool::attach(&device, 64 << 20)?;
/// same.extend(pool.export(0)?.as_fd(), piece.length)?;
/// assert_eq!(same.length(), pool.length());
/// # Ok::<(), gpu::Error>(())
/// ```
#[derive(Debug)]
pub struct Pool {
    device: Device,
    memory: Memory,
    /// To another process's pool, which alone grows it.
    is_attached: bool,
}

/// A piece of a pool: one export.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolPiece {
    /// Where it begins in the pool, in bytes.
    pub offset: u64,
    /// Its length in bytes.
    pub length: u64,
}

impl Pool {
    /// Reserves addresses for so many bytes; `peers` will reach the memory, too. Takes
    /// nothing of the device yet.
    ///
    /// # Errors
    /// [`NoPeerAccess`](ErrorKind::NoPeerAccess) if a peer cannot.
    pub fn new(device: &Device, limit: u64, peers: &[&Device]) -> Result<Self> {
        let space = Space::reserve(device, limit, peers)?;
        let memory = Memory::of_space(device, device.name(), space, (0, 0));
        Ok(Self { device: device.clone(), memory, is_attached: false })
    }

    /// Reserves addresses for another process's pool, for this device, which may be another
    /// than the pool lies on. It does not grow by itself: it is [extended](Self::extend).
    ///
    /// # Errors
    /// If the addresses cannot be had.
    pub fn attach(device: &Device, limit: u64) -> Result<Self> {
        Ok(Self { is_attached: true, ..Self::new(device, limit, &[])? })
    }

    /// Allocates a further piece of at least so many bytes.
    ///
    /// # Errors
    /// [`OverBudget`](ErrorKind::OverBudget), with the numbers, beyond the pool's limit or
    /// the device's budget; [`OutOfMemory`](ErrorKind::OutOfMemory).
    pub fn grow(&self, length: u64) -> Result<PoolPiece> {
        let on = |error: Error| error.on(self.device.name());
        if self.is_attached {
            let detail = "it follows another process's pool: that one grows it";
            return Err(on(Error::new("grow a pool", ErrorKind::InvalidArgument, detail)));
        }
        let (offset, length) = self.space()?.create(length).map_err(on)?;
        self.memory.grow_to(offset + length);
        Ok(PoolPiece { offset, length })
    }

    /// Maps the next piece of another process's pool.
    ///
    /// # Errors
    /// As for [importing](Device::import).
    pub fn extend(&self, descriptor: BorrowedFd<'_>, length: u64) -> Result<PoolPiece> {
        let on = |error: Error| error.on(self.device.name());
        if !self.is_attached {
            let detail = "it is this process's own pool: it grows here";
            return Err(on(Error::new("extend a pool", ErrorKind::InvalidArgument, detail)));
        }
        let imported = self.space()?.import(descriptor, length).map_err(on)?;
        let (offset, length) = (imported.offset, imported.length);
        self.memory.grow_to(offset + length);
        Ok(PoolPiece { offset, length })
    }

    /// A piece as a file descriptor.
    ///
    /// # Errors
    /// [`OutOfBounds`](ErrorKind::OutOfBounds) if there is no such piece.
    pub fn export(&self, piece: usize) -> Result<OwnedFd> {
        self.memory.export_piece(piece).map(|(descriptor, _)| descriptor)
    }

    /// Its pieces, in order.
    #[must_use]
    pub fn pieces(&self) -> Vec<PoolPiece> {
        let layout = self.memory.space().map(Space::layout).unwrap_or_default();
        layout.into_iter().map(|(offset, length)| PoolPiece { offset, length }).collect()
    }

    /// All pieces as one memory, as long as the pool is now. Copies that were made before
    /// grow with it.
    #[must_use]
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Length now, in bytes.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.memory.length()
    }

    /// What it may grow to, in bytes.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.memory.space().map_or(0, Space::limit)
    }

    fn space(&self) -> Result<&Space> {
        // A pool's memory is always a space.
        self.memory.space().ok_or_else(|| {
            Error::new("use a pool", ErrorKind::Other, "its memory is of another kind")
        })
    }
}
