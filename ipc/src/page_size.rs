//! The size of the system's pages.
#![allow(unsafe_code)]

/// Bytes of a page: 4 KiB on x86-64; 4, 16 or 64 KiB on aarch64, as its kernel was built.
///
/// What is mapped, pinned or let to a device begins at a multiple of it. All processes of one
/// machine have the same, so it may decide where something lies in memory that they share; it must
/// not decide what two machines agree on.
///
/// ```
/// let size = ipc::page_size();
/// assert!(size.is_power_of_two() && size >= 4096);
/// ```
#[must_use]
pub fn page_size() -> usize {
    // SAFETY: asks for a constant of the system.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    // Never so; but the largest pages that Linux has would do everywhere.
    usize::try_from(size).unwrap_or(64 << 10)
}
