//! Access to bytes of host pools, and parts of the control segment for devices.
//!
//! Other processes may change these bytes at any time, so no reference to them exists, except where
//! the caller promises that this is sound.
#![allow(unsafe_code)]

use gpu::{HostMapping, Slice};
use ipc::Segment;

use crate::error::{Error, ErrorKind, Result};

fn check(operation: &'static str, slice: &Slice, length: usize) -> Result<()> {
    if slice.length() == length as u64 {
        return Ok(());
    }
    let detail = format!("{length} bytes do not match the {} bytes of the message", slice.length());
    Err(Error::new(operation, ErrorKind::InvalidArgument, detail))
}

/// The bytes as a slice.
///
/// # Safety
/// The slice is host memory and stays mapped, and no process writes these bytes while the reference
/// lives.
pub(crate) unsafe fn borrow(slice: &Slice) -> &[u8] {
    // SAFETY: by the caller's promise.
    unsafe { std::slice::from_raw_parts(slice.address() as *const u8, slice.length() as usize) }
}

/// The bytes as a mutable slice.
///
/// # Safety
/// As for [`borrow`], and no process reads them either.
pub(crate) unsafe fn borrow_mut(slice: &mut Slice) -> &mut [u8] {
    // SAFETY: by the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(slice.address() as *mut u8, slice.length() as usize) }
}

/// The slice must be host memory.
pub(super) fn write(to: &Slice, bytes: &[u8]) -> Result<()> {
    check("write message to pool", to, bytes.len())?;
    let to = to.address() as *mut u8;
    // SAFETY: the lengths are equal, the memory is host memory, mapped as long as the slice lives,
    // and no reference to it exists.
    unsafe { std::ptr::copy(bytes.as_ptr(), to, bytes.len()) };
    Ok(())
}

/// The slice must be host memory.
pub(super) fn clear(slice: &Slice) {
    let to = slice.address() as *mut u8;
    // SAFETY: as for `write`.
    unsafe { std::ptr::write_bytes(to, 0, slice.length() as usize) };
}

/// The slice must be host memory.
pub(super) fn read(from: &Slice, bytes: &mut [u8]) -> Result<()> {
    check("read message of pool", from, bytes.len())?;
    let from = from.address() as *const u8;
    // SAFETY: as above.
    unsafe { std::ptr::copy(from, bytes.as_mut_ptr(), bytes.len()) };
    Ok(())
}

#[derive(Debug)]
pub(super) struct SegmentPart {
    segment: Segment,
    offset: u64,
    length: u64,
}

impl SegmentPart {
    /// None if the segment is shorter.
    pub(super) fn new(segment: &Segment, offset: u64, length: u64) -> Option<Self> {
        let is_inside =
            offset.checked_add(length).is_some_and(|end| end <= segment.body_length() as u64);
        is_inside.then(|| Self { segment: segment.clone(), offset, length })
    }
}

// SAFETY: a segment never moves or changes its size, and stays mapped as long as this handle lives.
// Its bytes are accessed as atomics or by devices only.
unsafe impl HostMapping for SegmentPart {
    fn address(&self) -> u64 {
        self.segment.body() as u64 + self.offset
    }

    fn length(&self) -> u64 {
        self.length
    }
}
