//! Local access to the bytes of a region.
//!
//! A region's bytes may change while they are read: a peer may write them, or another thread
//! with a clone of the region. So they are never lent by reference, and copies use
//! [atomic accesses](threads::shared_bytes).
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use threads::shared_bytes::{fill, load, store};

use super::MemoryRegion;
use crate::{Error, ErrorKind, Result};

const WORD: usize = size_of::<u64>();

impl MemoryRegion {
    #[inline]
    fn host_range(&self, operation: &'static str, offset: usize, length: usize) -> Result<*mut u8> {
        if self.contains(offset, length) && !self.0.extent.kind.is_device() {
            // SAFETY: inside the region, just checked.
            return Ok(unsafe { self.0.extent.base.add(offset) });
        }
        Err(self.not_accessible(operation, offset, length))
    }

    #[cold]
    fn not_accessible(&self, operation: &'static str, offset: usize, length: usize) -> Error {
        let (kind, total) = (self.0.extent.kind, self.0.extent.contiguous_length);
        if kind.is_device() {
            let detail = format!("the region is {kind} memory, which the CPU cannot access");
            return Error::new(ErrorKind::InvalidArgument, operation, detail);
        }
        let detail = format!("{length} bytes at {offset} of a region of {total} bytes");
        Error::new(ErrorKind::OutOfBounds, operation, detail)
    }

    /// Copies bytes out of the region. If a peer or another thread writes at the same time, the
    /// copy may hold old and new bytes.
    ///
    /// # Errors
    /// `OutOfBounds`, or `InvalidArgument` for device memory.
    #[inline]
    pub fn read(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        let from = self.host_range("read region", offset, into.len())?;
        // SAFETY: valid for as long as `self`, and accessed by atomics only.
        unsafe { load(from, into) };
        Ok(())
    }

    /// Copies bytes into the region.
    ///
    /// # Errors
    /// `OutOfBounds`, or `InvalidArgument` for device memory.
    #[inline]
    pub fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        let into = self.host_range("write region", offset, from.len())?;
        // SAFETY: as in `read`.
        unsafe { store(from, into) };
        Ok(())
    }

    /// Fills a range with one byte.
    ///
    /// # Errors
    /// `OutOfBounds`, or `InvalidArgument` for device memory.
    pub fn fill(&self, range: Range<usize>, byte: u8) -> Result<()> {
        let into = self.host_range("fill region", range.start, range.len())?;
        // SAFETY: as in `read`.
        unsafe { fill(into, range.len(), byte) };
        Ok(())
    }

    /// Loads an aligned 64-bit word, with acquire ordering towards the peer that wrote it last.
    ///
    /// # Errors
    /// `OutOfBounds`, or `InvalidArgument` if it is not aligned or device memory.
    #[inline]
    pub fn load_u64(&self, offset: usize) -> Result<u64> {
        Ok(self.word(offset)?.load(Ordering::Acquire))
    }

    /// Stores an aligned 64-bit word, with release ordering.
    ///
    /// # Errors
    /// As [`load_u64`](Self::load_u64).
    #[inline]
    pub fn store_u64(&self, offset: usize, value: u64) -> Result<()> {
        self.word(offset)?.store(value, Ordering::Release);
        Ok(())
    }

    #[inline]
    fn word(&self, offset: usize) -> Result<&AtomicU64> {
        let address = self.host_range("access word of region", offset, WORD)?;
        if !(address as usize).is_multiple_of(WORD) {
            return Err(not_aligned(offset));
        }
        // SAFETY: 8 valid, aligned bytes, alive as long as `self`; atomics allow concurrent
        // change by the peer.
        Ok(unsafe { AtomicU64::from_ptr(address.cast()) })
    }
}

#[cold]
fn not_aligned(offset: usize) -> Error {
    let detail = format!("offset {offset} is not aligned to 8 bytes");
    Error::new(ErrorKind::InvalidArgument, "access word of region", detail)
}
