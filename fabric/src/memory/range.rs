//! Checks whether an address range can be registered. Providers differ in what they check, and
//! answer with a bare EINVAL or a crash; so it is checked here.
#![allow(unsafe_code)]

use crate::{Error, ErrorKind, Result};

/// End of the address space of ordinary mappings: 47 bits on x86-64, 48 on aarch64. Larger page
/// tables offer more on request: beyond this limit a range counts as user space if it is
/// mapped.
const USER_SPACE_END: usize = 1 << if cfg!(target_arch = "aarch64") { 48 } else { 47 };

/// Refuses ranges that are empty, wrap around or lie outside user space.
pub(crate) fn check(operation: &'static str, base: usize, length: usize) -> Result<()> {
    let refuse = |kind, detail: String| Err(Error::new(kind, operation, detail));
    if length == 0 {
        let detail = "length is zero: a registration needs at least one byte".to_owned();
        return refuse(ErrorKind::InvalidArgument, detail);
    }
    let Some(end) = base.checked_add(length) else {
        let detail = format!("range of {length} bytes at {base:#x} overflows the address space");
        return refuse(ErrorKind::OutOfBounds, detail);
    };
    if base == 0 || (end > USER_SPACE_END && !is_mapped(base, length)) {
        let detail = format!("range {base:#x}..{end:#x} is outside user space");
        return refuse(ErrorKind::OutOfBounds, detail);
    }
    Ok(())
}

pub(crate) fn check_mapped(operation: &'static str, base: usize, length: usize) -> Result<()> {
    if is_mapped(base, length) {
        return Ok(());
    }
    let detail = format!(
        "range {base:#x}..{:#x} contains unmapped pages, and the provider demands \
         allocated memory (FI_MR_ALLOCATED)",
        base.wrapping_add(length)
    );
    Err(Error::new(ErrorKind::NotMapped, operation, detail))
}

pub(super) fn page_size() -> usize {
    // SAFETY: queries a constant of the system.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    // Never fails; otherwise the largest page size of Linux is safe everywhere.
    usize::try_from(size).unwrap_or(64 << 10)
}

/// Is every page of the range mapped (whether or not it is resident)?
fn is_mapped(base: usize, length: usize) -> bool {
    /// Pages examined by one call: each needs one byte of the result.
    const AT_ONCE: usize = 4096;
    let page = page_size();
    let end = base.saturating_add(length);
    let stretch = AT_ONCE * page;
    let mut residency = [0_u8; AT_ONCE];
    let mut at = base & !(page - 1);
    while at < end {
        let bytes = stretch.min(end - at);
        // SAFETY: mincore only examines the range; the array has a byte for each of its pages.
        let code = unsafe { libc::mincore(at as *mut libc::c_void, bytes, residency.as_mut_ptr()) };
        if code != 0 {
            return false;
        }
        let Some(next) = at.checked_add(stretch) else { break };
        at = next;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_length_overflow_and_kernel_addresses_are_refused() {
        assert_eq!(check("t", 4096, 0).unwrap_err().kind(), ErrorKind::InvalidArgument);
        assert_eq!(check("t", usize::MAX - 4, 8).unwrap_err().kind(), ErrorKind::OutOfBounds);
        assert_eq!(
            check("t", 0xffff_8000_0000_0000, 4096).unwrap_err().kind(),
            ErrorKind::OutOfBounds
        );
        assert_eq!(check("t", 0, 4096).unwrap_err().kind(), ErrorKind::OutOfBounds);
    }

    #[test]
    fn unaligned_ranges_are_accepted() {
        let bytes = vec![0_u8; 10_000];
        let base = bytes.as_ptr() as usize + 3;
        check("t", base, 9_000).unwrap();
        check_mapped("t", base, 9_000).unwrap();
    }

    #[test]
    fn unmapped_page_is_found() {
        let page = page_size();
        // SAFETY: two fresh pages; the second is unmapped.
        let base = unsafe {
            let base = libc::mmap(
                std::ptr::null_mut(),
                2 * page,
                libc::PROT_READ,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            );
            libc::munmap(base.cast::<u8>().add(page).cast(), page);
            base as usize
        };
        assert!(base + page <= USER_SPACE_END, "{base:#x}");
        check_mapped("t", base, page).unwrap();
        assert_eq!(check_mapped("t", base, page + 1).unwrap_err().kind(), ErrorKind::NotMapped);
        // SAFETY: the remaining page.
        unsafe { libc::munmap(base as *mut libc::c_void, page) };
    }
}
