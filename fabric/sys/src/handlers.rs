//! Restores signal handlers that libraries replace while they are loaded.

use std::mem;
use std::ops::Range;
use std::ptr;

use libc::{
    SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGSYS, SIGTRAP, c_int, c_void, sigaction, sigset_t,
};

/// Faults of this thread itself, which cannot be deferred.
const FAULTS: [c_int; 7] = [SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGSYS, SIGTRAP];

/// Loads libraries, and restores the signal handlers that they replaced, if the new handler is
/// in a library that was not loaded before. A handler that another thread of the program
/// installs during the call stays; a disposition that it sets to ignored or default may be
/// overwritten. Signals other than faults are blocked in this thread during the call, and in
/// the threads that it starts, because a temporary handler may end the process.
pub(crate) fn preserve_signal_handlers<T>(task: impl FnOnce() -> T) -> T {
    let loaded_before = LoadedCode::loaded();
    let before: Vec<_> = (1..=libc::SIGRTMAX())
        .filter_map(|signal| Some((signal, handler(signal, None)?)))
        .collect();
    // SAFETY: the set is filled before it is used; the calls have no other precondition.
    let mask = unsafe {
        let mut held: sigset_t = mem::zeroed();
        libc::sigfillset(&mut held);
        for fault in FAULTS {
            libc::sigdelset(&mut held, fault);
        }
        set_mask(libc::SIG_BLOCK, &held)
    };
    let result = task();
    let loaded = LoadedCode::loaded();
    for (signal, usual) in before {
        let Some(now) = handler(signal, None).map(|now| now.sa_sigaction) else { continue };
        let is_program_disposition = matches!(now, libc::SIG_DFL | libc::SIG_IGN)
            || loaded.contains(now) && !loaded_before.contains(now);
        if now != usual.sa_sigaction && is_program_disposition {
            handler(signal, Some(&usual));
        }
    }
    set_mask(libc::SIG_SETMASK, &mask);
    result
}

/// The address ranges of the program and its libraries.
struct LoadedCode(Vec<Range<usize>>);

impl LoadedCode {
    fn loaded() -> Self {
        let mut found = Self(Vec::new());
        // SAFETY: the callback only runs during this call, with the given argument.
        unsafe { libc::dl_iterate_phdr(Some(add_object), ptr::from_mut(&mut found).cast()) };
        found
    }

    fn contains(&self, address: usize) -> bool {
        self.0.iter().any(|range| range.contains(&address))
    }
}

/// Adds the segments of one object.
///
/// # Safety
/// As `dl_iterate_phdr` calls it, with a [`LoadedCode`].
unsafe extern "C" fn add_object(
    object: *mut libc::dl_phdr_info,
    _: usize,
    found: *mut c_void,
) -> c_int {
    // SAFETY: the linker passes this many headers; nothing else uses the argument.
    unsafe {
        let (object, found) = (&*object, &mut *found.cast::<LoadedCode>());
        let headers = std::slice::from_raw_parts(object.dlpi_phdr, object.dlpi_phnum.into());
        for header in headers.iter().filter(|header| header.p_type == libc::PT_LOAD) {
            let start = (object.dlpi_addr as usize).wrapping_add(header.p_vaddr as usize);
            found.0.push(start..start.wrapping_add(header.p_memsz as usize));
        }
    }
    0
}

/// Sets the disposition of a signal, and returns the previous one. None for signals that the C
/// library reserves.
fn handler(signal: c_int, new: Option<&sigaction>) -> Option<sigaction> {
    // SAFETY: all zeros are a valid value. A disposition that is set was in use before.
    unsafe {
        let mut found: sigaction = mem::zeroed();
        let new = new.map_or(ptr::null(), ptr::from_ref);
        (libc::sigaction(signal, new, &mut found) == 0).then_some(found)
    }
}

/// Changes this thread's signal mask, and returns the previous one.
fn set_mask(how: c_int, signals: &sigset_t) -> sigset_t {
    // SAFETY: the set is valid; all zeros are a value, which is overwritten.
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
    fn handlers_that_the_program_sets_are_kept() {
        // SAFETY: the handler does nothing, and no other code of this process uses the signal.
        unsafe {
            let mut host: sigaction = mem::zeroed();
            host.sa_sigaction = ignore as *const () as usize;
            preserve_signal_handlers(|| handler(libc::SIGUSR1, Some(&host)).unwrap());
            let found = handler(libc::SIGUSR1, None).unwrap().sa_sigaction;
            assert_eq!(found, ignore as *const () as usize);
        }
    }

    #[test]
    fn replaced_handlers_are_restored_and_signals_deferred() {
        // SAFETY: the handler does nothing; a blocked signal is sent to this thread only.
        unsafe {
            let mut host: sigaction = mem::zeroed();
            host.sa_sigaction = ignore as *const () as usize;
            handler(libc::SIGUSR2, Some(&host)).unwrap();
            preserve_signal_handlers(|| {
                let mut other: sigaction = mem::zeroed();
                other.sa_sigaction = libc::SIG_DFL;
                for signal in [libc::SIGUSR2, SIGSEGV] {
                    handler(signal, Some(&other)).unwrap();
                }
                // The default disposition would end the process.
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
