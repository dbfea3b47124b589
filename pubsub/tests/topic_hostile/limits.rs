//! Limits of processes (`RLIMIT_*`).
#![allow(unsafe_code)]

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Sets the soft limit of descriptors of this process, or the hard limit where that is lower.
pub fn set_descriptors(soft: u64) {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("a limit of descriptors");
    setrlimit(Resource::RLIMIT_NOFILE, soft.min(hard), hard).expect("a soft limit below the hard");
}

/// Sets the soft limit of the length of files of this process; a write beyond it fails.
pub fn set_file_length(bytes: u64) {
    let (_, hard) = getrlimit(Resource::RLIMIT_FSIZE).expect("a limit of files");
    setrlimit(Resource::RLIMIT_FSIZE, bytes.min(hard), hard).expect("a soft limit below the hard");
}

/// Sets the soft limit of the length of files of another process of this user; None: no limit.
pub fn set_file_length_of(process: u32, bytes: Option<u64>) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    let number = process as libc::pid_t;
    // SAFETY: the old limit is written to a struct that lives longer than the call; no new one.
    let code =
        unsafe { libc::prlimit(number, libc::RLIMIT_FSIZE, std::ptr::null(), &raw mut limit) };
    assert_eq!(code, 0, "prlimit: {}", std::io::Error::last_os_error());
    limit.rlim_cur = bytes.map_or(limit.rlim_max, |bytes| limit.rlim_max.min(bytes));
    // SAFETY: the new limit lives longer than the call; the old one is not asked for.
    let code = unsafe {
        libc::prlimit(number, libc::RLIMIT_FSIZE, &raw const limit, std::ptr::null_mut())
    };
    assert_eq!(code, 0, "prlimit: {}", std::io::Error::last_os_error());
}
