//! Bytes of the host's pools, copied in and out; and words of books that devices are let at.
//!
//! Other processes may change them at any time, so no reference to them is ever made, except
//! where a caller promises what is needed for one.
#![allow(unsafe_code)]

use gpu::{HostMapping, Slice};
use ipc::Segment;

use crate::error::{Error, ErrorKind, Result};

fn check(operation: &'static str, slice: &Slice, length: usize) -> Result<()> {
    if slice.length() == length as u64 {
        return Ok(());
    }
    let detail = format!("{length} bytes, {} of the message", slice.length());
    Err(Error::new(operation, ErrorKind::InvalidArgument, detail))
}

/// The bytes themselves.
///
/// # Safety
/// The slice is one of the memory of the host; it stays mapped, and nobody writes these bytes,
/// in whatever process, as long as the reference lives.
pub(crate) unsafe fn borrow(slice: &Slice) -> &[u8] {
    // SAFETY: by the caller's promise.
    unsafe { std::slice::from_raw_parts(slice.address() as *const u8, slice.length() as usize) }
}

/// The bytes themselves, to be written.
///
/// # Safety
/// As for [`borrow`], and nobody reads them either.
pub(crate) unsafe fn borrow_mut(slice: &mut Slice) -> &mut [u8] {
    // SAFETY: by the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(slice.address() as *mut u8, slice.length() as usize) }
}

/// The slice is one of the memory of the host.
pub(super) fn write(to: &Slice, bytes: &[u8]) -> Result<()> {
    check("write a message", to, bytes.len())?;
    let to = to.address() as *mut u8;
    // SAFETY: as many bytes as are written, mapped as long as the slice lives, in memory of
    // the host; nobody has a reference to them.
    unsafe { std::ptr::copy(bytes.as_ptr(), to, bytes.len()) };
    Ok(())
}

/// The slice is one of the memory of the host.
pub(super) fn read(from: &Slice, bytes: &mut [u8]) -> Result<()> {
    check("read a message", from, bytes.len())?;
    let from = from.address() as *const u8;
    // SAFETY: as above.
    unsafe { std::ptr::copy(from, bytes.as_mut_ptr(), bytes.len()) };
    Ok(())
}

/// A part of a segment's body.
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

// SAFETY: a segment never moves or changes its size, and stays mapped until the last handle to it
// is gone, of which this is one. Its bytes are reached as atomics or by devices only.
unsafe impl HostMapping for SegmentPart {
    fn address(&self) -> u64 {
        self.segment.body() as u64 + self.offset
    }

    fn length(&self) -> u64 {
        self.length
    }
}
