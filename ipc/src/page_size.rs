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
    use std::os::fd::AsRawFd;

    use super::*;

    /// Can a file be mapped from this offset on?
    fn is_mappable(file: &std::fs::File, offset: usize) -> bool {
        let offset = libc::off_t::try_from(offset).unwrap();
        let (read, shared) = (libc::PROT_READ, libc::MAP_SHARED);
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let at =
            unsafe { libc::mmap(std::ptr::null_mut(), 1, read, shared, file.as_raw_fd(), offset) };
        if at == libc::MAP_FAILED {
            return false;
        }
        // SAFETY: the mapping made above, which has no users.
        unsafe { libc::munmap(at, 1) };
        true
    }

    #[test]
    fn mappings_begin_at_each_page_and_only_there() {
        let file = std::fs::File::open(std::env::current_exe().unwrap()).unwrap();
        assert!(is_mappable(&file, page_size()));
        assert!(!is_mappable(&file, page_size() / 2));
    }
}
