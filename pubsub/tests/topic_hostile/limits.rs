//! Limits of processes (`RLIMIT_*`).
#![allow(unsafe_code)]

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Sets the soft limit of descriptors of this process, at most to the hard limit.
pub fn set_descriptors(soft: u64) {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("read RLIMIT_NOFILE");
    setrlimit(Resource::RLIMIT_NOFILE, soft.min(hard), hard).expect("set RLIMIT_NOFILE");
}

/// Sets the soft limit of the length of files of this process. A write beyond it fails.
pub fn set_file_length(bytes: u64) {
    let (_, hard) = getrlimit(Resource::RLIMIT_FSIZE).expect("read RLIMIT_FSIZE");
    setrlimit(Resource::RLIMIT_FSIZE, bytes.min(hard), hard).expect("set RLIMIT_FSIZE");
}

/// Sets the soft limit of the length of files of another process of this user, or removes it.
pub fn set_file_length_of(process: u32, bytes: Option<u64>) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    let pid = process as libc::pid_t;
    // SAFETY: writes the old limit to a struct that outlives the call; the new limit is null.
    let code = unsafe { libc::prlimit(pid, libc::RLIMIT_FSIZE, std::ptr::null(), &raw mut limit) };
    assert_eq!(code, 0, "prlimit: {}", std::io::Error::last_os_error());
    limit.rlim_cur = bytes.map_or(limit.rlim_max, |bytes| limit.rlim_max.min(bytes));
    // SAFETY: the new limit outlives the call; the pointer for the old limit is null.
    let code =
        unsafe { libc::prlimit(pid, libc::RLIMIT_FSIZE, &raw const limit, std::ptr::null_mut()) };
    assert_eq!(code, 0, "prlimit: {}", std::io::Error::last_os_error());
}
