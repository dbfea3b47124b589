//! The limits of this process: open file descriptors, bytes of a file, and its address space.
#![allow(unsafe_code)]

use std::fmt;
use std::io;

/// The open file descriptors of this process, and its limits.
///
/// ```
/// use errors::limits::DescriptorLimit;
/// let limit = DescriptorLimit::of_this_process();
/// assert!(limit.left() > 0 && limit.to_string().contains("ulimit -n"));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DescriptorLimit {
    open: u64,
    soft: u64,
    hard: u64,
}

impl DescriptorLimit {
    /// The current values. Needs no file descriptor.
    #[must_use]
    pub fn of_this_process() -> Self {
        /// The count stops here: each descriptor takes a call.
        const MAX_COUNTED: u64 = 1 << 20;
        let (soft, hard) = limit(libc::RLIMIT_NOFILE);
        // SAFETY: no pointers; a descriptor that is not open is an error, and is counted as
        // such.
        let is_open = |fd: &u64| unsafe { libc::fcntl(*fd as libc::c_int, libc::F_GETFD) } >= 0;
        let open = (0..soft.min(MAX_COUNTED)).filter(is_open).count() as u64;
        Self { open, soft, hard }
    }

    /// How many more may be opened.
    #[must_use]
    pub fn left(&self) -> u64 {
        self.soft.saturating_sub(self.open)
    }

    /// Raises the soft limit of this process to the hard limit.
    ///
    /// For the `main` of a program, not for a library: `select()` cannot handle file
    /// descriptors from 1024 on, and child processes inherit the limit.
    ///
    /// # Errors
    /// The system's error.
    pub fn raise() -> io::Result<()> {
        let (soft, hard) = limit(libc::RLIMIT_NOFILE);
        let raised = libc::rlimit { rlim_cur: hard, rlim_max: hard };
        // SAFETY: a valid limit.
        if soft < hard && unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const raised) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

impl fmt::Display for DescriptorLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// The advice is never below this.
        const MIN_ADVICE: u64 = 1024;
        /// A soft limit that is enough for most nodes.
        const AMPLE: u64 = 4096;
        let Self { open, soft, hard } = *self;
        let twice = soft.saturating_mul(2);
        write!(f, "{open} of {soft} descriptors are open, which leaves too few. ")?;
        match soft < hard && hard >= MIN_ADVICE {
            true => write!(f, "Raise the soft limit: ulimit -n {}", hard.min(AMPLE.max(twice))),
            false => write!(
                f,
                "Raise the hard limit as root or in /etc/security/limits.conf, and then: ulimit -n {}",
                MIN_ADVICE.max(twice)
            ),
        }
    }
}

/// Soft and hard limit.
fn limit(resource: libc::__rlimit_resource_t) -> (u64, u64) {
    let mut found = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: space for the result. The call cannot fail; if it did, both would be 0.
    unsafe { libc::getrlimit(resource, &raw mut found) };
    (found.rlim_cur, found.rlim_max)
}

/// A limit that this process reached, with the numbers and the remedy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LimitReached {
    /// Too many descriptors are open (`EMFILE`).
    Descriptors(DescriptorLimit),
    /// A file would exceed the maximum file size (`EFBIG`): bytes.
    FileSize {
        /// The limit.
        max: u64,
    },
    /// Memory is refused (`ENOMEM`) to a process whose address space is limited: bytes.
    AddressSpace {
        /// The limit.
        max: u64,
    },
}

impl LimitReached {
    /// The system's error, with the numbers and the remedy if it concerns one of these limits.
    #[must_use]
    pub fn explain(error: io::Error) -> io::Error {
        let reached = match error.raw_os_error() {
            Some(libc::EMFILE) => Self::Descriptors(DescriptorLimit::of_this_process()),
            Some(libc::EFBIG) => Self::FileSize { max: limit(libc::RLIMIT_FSIZE).0 },
            Some(libc::ENOMEM) => match limit(libc::RLIMIT_AS).0 {
                libc::RLIM_INFINITY => return error,
                max => Self::AddressSpace { max },
            },
            _ => return error,
        };
        io::Error::new(error.kind(), reached)
    }

    /// The limit that an error is about, if it was [explained](Self::explain).
    #[must_use]
    pub fn of(error: &io::Error) -> Option<Self> {
        error.get_ref()?.downcast_ref().copied()
    }

    /// The text for another process, which calls this one by the given name.
    ///
    /// ```
    /// use errors::limits::LimitReached;
    /// let limit = LimitReached::FileSize { max: 4096 };
    /// assert!(limit.of_process("process 7").starts_with("a file of process 7, "));
    /// ```
    #[must_use]
    pub fn of_process(&self, process: &str) -> String {
        match self {
            Self::Descriptors(limit) => format!("too many open files in {process}: {limit}"),
            Self::FileSize { max } => format!(
                "a file of {process}, shared memory included, may have {max} bytes. Raise the \
                 limit: ulimit -f"
            ),
            Self::AddressSpace { max } => format!(
                "out of memory: the address space of {process} may have {max} bytes. Raise the limit: \
                 ulimit -v unlimited"
            ),
        }
    }
}

impl fmt::Display for LimitReached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.of_process("this process"))
    }
}

impl std::error::Error for LimitReached {}

/// Refuses a file length beyond the limit of this process: the system would kill the process by
/// `SIGXFSZ`.
///
/// # Errors
/// [`LimitReached::FileSize`].
pub fn check_file_size(length: u64) -> io::Result<()> {
    match length > limit(libc::RLIMIT_FSIZE).0 {
        true => Err(LimitReached::explain(io::Error::from_raw_os_error(libc::EFBIG))),
        false => Ok(()),
    }
}

/// Refuses to begin what takes about this much more address space than the limit of this process
/// leaves: without memory for a small allocation the process would abort.
///
/// ```
/// assert!(errors::limits::check_address_space(1 << 20).is_ok());
/// ```
///
/// # Errors
/// [`LimitReached::AddressSpace`].
pub fn check_address_space(bytes: u64) -> io::Result<()> {
    let max = limit(libc::RLIMIT_AS).0;
    if max == libc::RLIM_INFINITY {
        return Ok(());
    }
    // Its first number: the pages of the address space. Without /proc nothing is known.
    let pages = std::fs::read_to_string("/proc/self/statm").ok();
    let pages = pages.as_deref().and_then(|text| text.split(' ').next()?.parse::<u64>().ok());
    // SAFETY: no pointers.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) }.unsigned_abs();
    match pages.is_some_and(|pages| pages.saturating_mul(page).saturating_add(bytes) > max) {
        true => Err(LimitReached::explain(io::Error::from_raw_os_error(libc::ENOMEM))),
        false => Ok(()),
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn limit_error_names_number_and_process() {
        let limit = DescriptorLimit { open: 80, soft: 80, hard: 4096 };
        let text = LimitReached::Descriptors(limit).to_string();
        assert_eq!(
            text,
            "too many open files in this process: 80 of 80 descriptors are open, which leaves too few. \
             Raise the soft limit: ulimit -n 4096"
        );
        let low = DescriptorLimit { open: 22, soft: 28, hard: 28 };
        assert_eq!(
            low.to_string(),
            "22 of 28 descriptors are open, which leaves too few. Raise the hard limit as root or in \
             /etc/security/limits.conf, and then: ulimit -n 1024"
        );
        // The advice exceeds the present number, is within the hard limit, and is at least
        // 1024.
        for (soft, hard, advice) in [
            (28, 512, 1024),
            (28, 1024, 1024),
            (28, u64::MAX, 4096),
            (4096, 1 << 20, 8192),
            (5000, 6000, 6000),
            (1024, 1024, 2048),
        ] {
            let text = DescriptorLimit { open: 22, soft, hard }.to_string();
            let is_hard = text.contains("the hard limit as root");
            assert_eq!(is_hard, advice > hard, "{text}");
            assert!(text.ends_with(&format!("ulimit -n {advice}")), "{text}");
        }
    }
}
