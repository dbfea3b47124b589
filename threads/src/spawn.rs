//! Starts threads that take no signals of the program.
//!
//! A signal for a process goes to any of its threads that does not block it. So the threads of the
//! library block all of them: handlers run, and `sigwait` returns, on threads of the program. Faults
//! such as `SIGSEGV` concern the thread itself, and reach the program's handler.
#![allow(unsafe_code)]

use std::io;
use std::mem::MaybeUninit;
use std::thread::{Builder, JoinHandle};

use libc::{SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGSYS, SIGTRAP, c_int, sigset_t};

/// Faults of a thread itself: if they were blocked, the system would end the process at once.
const FAULTS: [c_int; 7] = [SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGSYS, SIGTRAP];

/// Starts a thread of this name, which blocks all signals but faults. The threads that it starts
/// inherit that.
///
/// # Errors
/// Those of the system, with the remedy: too many threads, or no memory for their stacks.
pub fn spawn<T: Send + 'static>(
    name: &str,
    task: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    // A new thread has the mask of the thread that starts it.
    let _blocked = BlockedSignals::new();
    Builder::new().name(name.to_owned()).spawn(task).map_err(|error| {
        let text = format!(
            "start thread {name}: {error}. Raise the limit of threads (ulimit -u), of the address \
             space (ulimit -v), or of tasks of the cgroup (pids.max)"
        );
        io::Error::new(error.kind(), text)
    })
}

/// Blocks all signals but faults in this thread, until it is dropped: threads that a library starts
/// meanwhile block them, too.
///
/// ```
/// let thread = {
///     let _blocked = threads::BlockedSignals::new();
///     std::thread::spawn(|| "blocks all signals")
/// };
/// assert_eq!(thread.join().unwrap(), "blocks all signals");
/// ```
#[derive(Debug)]
#[must_use = "the signals are blocked until it is dropped"]
pub struct BlockedSignals {
    before: sigset_t,
    /// The mask is that of a thread.
    _not_send: std::marker::PhantomData<*const ()>,
}

impl BlockedSignals {
    /// Blocks the signals.
    pub fn new() -> Self {
        let mut all = MaybeUninit::<sigset_t>::uninit();
        let mut before = MaybeUninit::<sigset_t>::uninit();
        // SAFETY: the sets are initialised by the calls before they are used; the calls with these
        // arguments do not fail.
        let before = unsafe {
            libc::sigfillset(all.as_mut_ptr());
            for fault in FAULTS {
                libc::sigdelset(all.as_mut_ptr(), fault);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), before.as_mut_ptr());
            before.assume_init()
        };
        Self { before, _not_send: std::marker::PhantomData }
    }
}

impl Default for BlockedSignals {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // SAFETY: the set that this thread had.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, std::ptr::null_mut())
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The signals that this thread blocks.
    fn blocked() -> Vec<c_int> {
        let mut set = MaybeUninit::<sigset_t>::uninit();
        // SAFETY: nothing is changed, and the set is initialised by the call.
        unsafe {
            libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), set.as_mut_ptr());
            let set = set.assume_init();
            (1..=libc::SIGRTMAX())
                .filter(|it| libc::sigismember(&raw const set, *it) == 1)
                .collect()
        }
    }

    #[test]
    fn threads_block_all_signals_but_faults() {
        let before = blocked();
        let thread =
            spawn("blocked", || (blocked(), std::thread::current().name().map(str::to_owned)));
        let (inside, name) = thread.unwrap().join().unwrap();
        let is_free = |signal: &c_int| !inside.contains(signal);
        let mut unblockable = FAULTS.to_vec();
        // The C library keeps the two between them for itself.
        unblockable.extend([libc::SIGKILL, libc::SIGSTOP]);
        let free: Vec<_> =
            (1..32).chain(libc::SIGRTMIN()..=libc::SIGRTMAX()).filter(is_free).collect();
        unblockable.sort_unstable();
        assert_eq!(free, unblockable);
        assert_eq!(name.as_deref(), Some("blocked"));
        assert_eq!(blocked(), before);
    }
}
