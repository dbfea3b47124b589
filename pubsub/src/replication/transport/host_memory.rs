//! Copies by the CPU, and host memory registered with the fabric.
#![allow(unsafe_code)]

use std::sync::Arc;

use fabric::ring::ChunkView;
use fabric::{MemoryRegion, RegionSlice};
use gpu::{Device, Implementation, Memory, Slice};
use ipc::{Layout, Segment};
use nix::libc;
use transfer::host_copy;

use crate::error::{Error, ErrorKind, Result};

/// A range of memory that the CPU reaches.
pub(crate) struct MappedSpan {
    /// One shared handle for all ranges of it.
    memory: Arc<Memory>,
    offset: u64,
    length: u64,
}

impl MappedSpan {
    /// None if the CPU does not reach it.
    pub(crate) fn new(memory: Arc<Memory>, offset: u64, length: u64) -> Option<Self> {
        let is_inside = offset.checked_add(length).is_some_and(|end| end <= memory.length());
        (is_inside && is_host(&memory)).then_some(Self { memory, offset, length })
    }

    /// New memory of this process that a device reaches, too.
    pub(crate) fn pinned(
        layout: Layout,
        length: usize,
        device: &Device,
        operation: &'static str,
    ) -> Result<Self> {
        let segment = Segment::create(layout, length);
        let segment = segment.map_err(|error| Error::of(operation, error))?;
        segment.mark_ready();
        let pinned = transfer::pin(&segment, device);
        let memory = Arc::new(pinned.map_err(|error| Error::of(operation, error))?);
        Ok(Self { length: memory.length(), memory, offset: 0 })
    }

    /// The memory that contains the range.
    pub(crate) fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// The address of a part, if that lies in this memory.
    fn part(&self, offset: usize, length: usize) -> Result<*mut u8> {
        let end = offset.checked_add(length);
        match end.is_some_and(|end| end as u64 <= self.length) {
            true => Ok(fabric::Memory::as_ptr(self).wrapping_add(offset)),
            false => Err(refuse(IN)),
        }
    }

    /// Copies bytes to it.
    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        let target = self.part(offset, bytes.len())?;
        // SAFETY: inside the memory, which stays mapped; as in `unload`.
        unsafe { host_copy::copy(target, bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// Copies bytes out of it.
    pub(crate) fn read(&self, offset: usize, length: usize) -> Result<Vec<u8>> {
        let from = self.part(offset, length)?;
        let mut bytes = vec![0_u8; length];
        // SAFETY: inside the memory, which stays mapped; as in `unload`.
        unsafe { host_copy::copy(bytes.as_mut_ptr(), from, length) };
        Ok(bytes)
    }
}

// SAFETY: memory stays mapped at its address until its last handle is dropped, and this keeps one.
// Its bytes are accessed by copying, never by reference.
unsafe impl fabric::Memory for MappedSpan {
    fn as_ptr(&self) -> *mut u8 {
        (self.memory.address() + self.offset) as *mut u8
    }

    fn len(&self) -> usize {
        self.length as usize
    }
}

/// Returns true if the CPU reaches the memory.
fn is_host(memory: &Memory) -> bool {
    memory.device().is_none_or(|device| device.implementation == Implementation::Emulated)
}

const IN: &str = "copy message in";

#[cold]
fn refuse(operation: &'static str) -> Error {
    let detail = "the range exceeds the memory, or the CPU cannot access it";
    Error::new(operation, ErrorKind::InvalidArgument, detail)
}

/// Checks that a range lies inside memory that the CPU reaches.
#[inline]
pub(crate) fn check_range(length: usize, to: &Slice, at: u64) -> Result<()> {
    let is_inside = at.checked_add(length as u64).is_some_and(|end| end <= to.length());
    if is_inside && is_host(to.memory()) { Ok(()) } else { Err(refuse(IN)) }
}

/// Copies bytes of a chunk to memory that the CPU reaches.
#[inline]
pub(crate) fn unload(
    view: &ChunkView,
    from: usize,
    length: usize,
    to: &Slice,
    at: u64,
) -> Result<()> {
    if from.checked_add(length).is_none_or(|end| end > view.len()) {
        return Err(refuse(IN));
    }
    check_range(length, to, at)?;
    let target = (to.address() + at) as *mut libc::c_void;
    // SAFETY: both ranges are mapped and were checked; the view and the slice keep their memories.
    // Other threads or devices may access both meanwhile: the compiler assumes nothing about the
    // bytes, and no reference to them exists.
    unsafe { host_copy::copy(target.cast(), view.as_ptr().wrapping_add(from), length) };
    Ok(())
}

/// Bytes of a chunk; they keep its memory alive, but not its space in the ring. None for device
/// memory.
pub(crate) fn part(view: &ChunkView, from: usize, length: usize) -> Result<Option<RegionSlice>> {
    if from.checked_add(length).is_none_or(|end| end > view.len()) {
        return Err(refuse(IN));
    }
    let Some(all) = view.slice() else { return Ok(None) };
    let (start, region) = (all.offset() + from, all.region());
    if region.kind().is_device() {
        return Ok(None);
    }
    region.slice(start..start + length).map(Some).map_err(|error| Error::of(IN, error))
}

/// Copies such bytes, as [`unload`] does.
pub(crate) fn unload_part(from: &RegionSlice, to: &Slice, at: u64) -> Result<()> {
    check_range(from.len(), to, at)?;
    let target = (to.address() + at) as *mut libc::c_void;
    // SAFETY: as in `unload`; the slice of a region keeps its memory, too.
    unsafe { host_copy::copy(target.cast(), from.as_ptr(), from.len()) };
    Ok(())
}

/// Copies the start of a range that the CPU reaches to a region of this process.
#[inline]
pub(crate) fn gather(from: &Slice, length: usize, to: &MemoryRegion, at: usize) -> Result<()> {
    let is_inside = from.length() >= length as u64
        && at.checked_add(length).is_some_and(|end| end <= to.len())
        && !to.kind().is_device();
    if !is_inside || !is_host(from.memory()) {
        return Err(refuse("copy message out"));
    }
    let target = to.as_ptr().wrapping_add(at).cast::<u8>();
    // SAFETY: as in `unload`.
    unsafe { host_copy::copy(target, from.address() as *const u8, length) };
    Ok(())
}
