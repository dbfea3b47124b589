//! Reading the memory of other ranks of the machine, by the kernel.
//!
//! Linux allows it for processes of the same user and PID namespace, unless a security module or the
//! container forbids it. The ranks of a domain try it when they join.
#![allow(unsafe_code)]

use std::io;

/// Copies bytes of another process.
///
/// # Safety
/// `to` is valid for writes of `bytes`, and only the caller accesses them.
pub(crate) unsafe fn read(process: u32, from: u64, to: *mut u8, bytes: usize) -> io::Result<()> {
    let process = libc::pid_t::try_from(process).map_err(io::Error::other)?;
    let mut done = 0;
    while done < bytes {
        let left = bytes - done;
        // SAFETY: the caller's promise.
        let target = unsafe { to.add(done) };
        let local = libc::iovec { iov_base: target.cast(), iov_len: left };
        let address = usize::try_from(from).map_err(io::Error::other)?.wrapping_add(done);
        let remote =
            libc::iovec { iov_base: std::ptr::without_provenance_mut(address), iov_len: left };
        // SAFETY: the kernel checks the address of the other process, and writes only the local range.
        let read = unsafe {
            libc::process_vm_readv(process, &raw const local, 1, &raw const remote, 1, 0)
        };
        match read {
            1.. => done += read.cast_unsigned(),
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            _ => return Err(io::Error::last_os_error()),
        }
    }
    Ok(())
}
