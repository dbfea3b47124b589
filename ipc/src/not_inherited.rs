//! Descriptors that forked children do not keep.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd};
use std::sync::Once;
use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::{AcqRel, Acquire};

/// Descriptors beyond this number are inherited.
const LIMIT: usize = 1024;
const NONE: i32 = -1;
static DESCRIPTORS: [AtomicI32; LIMIT] = [const { AtomicI32::new(NONE) }; LIMIT];

/// Keeps a socket from forked children, until dropped: there its number is a descriptor of
/// `/dev/null`. Otherwise a child would keep the connection open after the end of this process, and
/// the other side would not see the end.
///
/// ```
/// use std::io::Read;
/// use std::os::unix::net::UnixStream;
/// let (mut here, there) = UnixStream::pair()?;
/// let not_inherited = ipc::NotInherited::new(&there);
/// // … a fork …
/// drop(not_inherited);
/// drop(there);
/// assert_eq!(here.read(&mut [0])?, 0, "the end of the connection");
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct NotInherited {
    number: i32,
    slot: Option<&'static AtomicI32>,
}

impl NotInherited {
    /// Drop it before the descriptor is closed.
    #[must_use]
    pub fn new(descriptor: &impl AsFd) -> Self {
        static WATCH: Once = Once::new();
        WATCH.call_once(|| {
            // SAFETY: the handler only makes system calls that are allowed there.
            unsafe { libc::pthread_atfork(None, None, Some(after_fork_in_child)) };
        });
        let number = descriptor.as_fd().as_raw_fd();
        let is_taken =
            |slot: &&AtomicI32| slot.compare_exchange(NONE, number, AcqRel, Acquire).is_ok();
        Self { number, slot: DESCRIPTORS.iter().find(is_taken) }
    }
}

impl Drop for NotInherited {
    fn drop(&mut self) {
        if let Some(slot) = self.slot {
            // In a forked child it is free, or another's.
            let _ = slot.compare_exchange(self.number, NONE, AcqRel, Acquire);
        }
    }
}

extern "C" fn after_fork_in_child() {
    let mut null = NONE;
    for slot in &DESCRIPTORS {
        let number = slot.swap(NONE, AcqRel);
        if number == NONE {
            continue;
        }
        // SAFETY: system calls without memory, and a text that ends with 0. The owner of the
        // descriptor closes it as before: its number stays in use.
        unsafe {
            if null == NONE {
                null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
            }
            libc::dup3(null, number, libc::O_CLOEXEC);
        }
    }
    if null != NONE {
        // SAFETY: opened above.
        unsafe { libc::close(null) };
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use super::*;

    #[test]
    fn forked_child_does_not_keep_a_connection_open() {
        let (mut here, there) = UnixStream::pair().unwrap();
        let kept = UnixStream::pair().unwrap();
        let not_inherited = NotInherited::new(&there);
        // SAFETY: the child only waits, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: ends the child without running any code of the parent.
            unsafe {
                libc::sleep(30);
                libc::_exit(0);
            }
        }
        drop(not_inherited);
        drop(there);
        here.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        assert_eq!(here.read(&mut [0]).unwrap(), 0);
        drop(kept);
        // SAFETY: a child of this process.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, std::ptr::null_mut(), 0);
        }
    }
}
