//! What becomes of signals while libraries are loaded that replace their handlers.

use std::mem;
use std::ptr;

use libc::{SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGSYS, SIGTRAP, c_int, sigaction, sigset_t};

/// Faults of this thread itself: they cannot wait.
const FAULTS: [c_int; 7] = [SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGSYS, SIGTRAP];

/// Does something, and puts the handlers of signals back that it replaced. Other signals than faults
/// are held back from this thread meanwhile, and from the threads that it starts: a handler that is
/// there temporarily may end the process.
pub(crate) fn keep<T>(task: impl FnOnce() -> T) -> T {
    let before: Vec<_> = (1..=libc::SIGRTMAX())
        .filter_map(|signal| Some((signal, handler(signal, None)?)))
        .collect();
    let mask = {
        // SAFETY: the set is filled before it is used; the calls have no other precondition.
        unsafe {
            let mut held: sigset_t = mem::zeroed();
            libc::sigfillset(&mut held);
            for fault in FAULTS {
                libc::sigdelset(&mut held, fault);
            }
            set_mask(libc::SIG_BLOCK, &held)
        }
    };
    let result = task();
    for (signal, usual) in before {
        if handler(signal, None).is_some_and(|now| now.sa_sigaction != usual.sa_sigaction) {
            handler(signal, Some(&usual));
        }
    }
    set_mask(libc::SIG_SETMASK, &mask);
    result
}

/// What becomes of a signal, or became before this was set. None for those that the C library keeps
/// for itself.
fn handler(signal: c_int, new: Option<&sigaction>) -> Option<sigaction> {
    // SAFETY: all zeros are a valid value. What is set was there before.
    unsafe {
        let mut found: sigaction = mem::zeroed();
        let new = new.map_or(ptr::null(), ptr::from_ref);
        (libc::sigaction(signal, new, &mut found) == 0).then_some(found)
    }
}

/// Changes this thread's mask of signals; the one before.
fn set_mask(how: c_int, signals: &sigset_t) -> sigset_t {
    // SAFETY: the set is valid; all zeros are a value, which is written over.
    unsafe {
        let mut before: sigset_t = mem::zeroed();
        libc::pthread_sigmask(how, signals, &mut before);
        before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    extern "C" fn ignore(_: c_int) {}

    #[test]
    fn replaced_handlers_are_put_back_and_signals_wait_until_then() {
        // SAFETY: the handler does nothing; a signal that is blocked is sent to this thread only.
        unsafe {
            let mut host: sigaction = mem::zeroed();
            host.sa_sigaction = ignore as *const () as usize;
            handler(libc::SIGUSR2, Some(&host)).unwrap();
            keep(|| {
                let mut other: sigaction = mem::zeroed();
                other.sa_sigaction = libc::SIG_DFL;
                for signal in [libc::SIGUSR2, SIGSEGV] {
                    handler(signal, Some(&other)).unwrap();
                }
                // With its usual effect it would end the process.
                libc::pthread_kill(libc::pthread_self(), libc::SIGUSR2);
            });
            assert_eq!(
                handler(libc::SIGUSR2, None).unwrap().sa_sigaction,
                ignore as *const () as usize
            );
            assert_ne!(handler(SIGSEGV, None).unwrap().sa_sigaction, libc::SIG_DFL);
            assert_eq!(libc::sigismember(&set_mask(libc::SIG_BLOCK, &mem::zeroed()), SIGABRT), 0);
        }
    }
}
