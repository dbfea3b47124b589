//! The system's page size.
#![allow(unsafe_code)]

/// Bytes of a page: 4 KiB on x86-64; 4, 16 or 64 KiB on aarch64, depending on the kernel.
///
/// Mappings, pinned memory and memory for devices begin at a multiple of it. All processes of
/// one machine have the same page size, so offsets in shared memory may depend on it; a format
/// that two machines share must not.
///
/// ```
/// let size = ipc::page_size();
/// assert!(size.is_power_of_two() && size >= 4096);
/// ```
#[must_use]
pub fn page_size() -> usize {
    // SAFETY: queries a constant of the system.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    // Never fails; otherwise the largest page size of Linux is safe everywhere.
    usize::try_from(size).unwrap_or(64 << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_size_is_that_of_the_kernel() {
        // SAFETY: reads a number that the kernel gave to the process.
        let of_kernel = unsafe { libc::getauxval(libc::AT_PAGESZ) };
        assert_eq!(u64::try_from(page_size()).unwrap(), of_kernel);
    }
}
