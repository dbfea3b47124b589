//! Bytes of the host's pools, copied in and out.
//!
//! Other processes may change them at any time, so no reference to them is ever made, except
//! where a caller promises what is needed for one.
#![allow(unsafe_code)]

use gpu::Slice;

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
