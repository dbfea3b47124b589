//! How programs are started that do not outlive the one that started them, and how every command ends
//! by the signals that ask it to, from its first moment on.
#![allow(unsafe_code)]

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;

use nix::errno::Errno;
use nix::libc;
use nix::sys::prctl::set_pdeathsig;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use nix::unistd::{alarm, getpid, getppid};

use crate::exit::{Exit, Failure};

/// This very program, even if another has taken its place on disk.
#[must_use]
pub fn this_program(name: &str) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0(name);
    command
}

/// A program that is started by this command gets this signal when the thread that started it
/// ends: from the beginning, whatever the program is. It does not inherit which signals this
/// thread leaves to another.
pub fn end_with_this_process(command: &mut Command, signal: Signal) {
    let parent = getpid();
    let ask = move || {
        SigSet::empty().thread_set_mask()?;
        set_pdeathsig(signal)?;
        // It may have ended just before.
        if getppid() == parent { Ok(()) } else { Err(io::ErrorKind::NotConnected.into()) }
    };
    // SAFETY: between fork and exec it makes system calls only, and allocates nothing.
    unsafe { command.pre_exec(ask) };
}

/// A program that is started by this command ends after so many seconds at the latest, even if the one
/// that started it is stopped meanwhile.
pub fn end_after(command: &mut Command, limit: Duration) {
    let seconds = u32::try_from(limit.as_secs()).unwrap_or(u32::MAX).max(1);
    let set = move || {
        // What becomes of the signal is inherited, and the alarm is left as it is by exec.
        becomes_of(Signal::SIGALRM, SigHandler::SigDfl)?;
        alarm::set(seconds);
        Ok(())
    };
    // SAFETY: between fork and exec it makes system calls only, and allocates nothing.
    unsafe { command.pre_exec(set) };
}

/// Was this process started, or told since, not to care for this signal?
pub fn is_ignored(signal: Signal) -> bool {
    // SAFETY: all zeros are a valid value.
    let mut found: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: nothing is changed; what is there is written to a valid place.
    let asked = unsafe { libc::sigaction(signal as libc::c_int, std::ptr::null(), &raw mut found) };
    asked == 0 && found.sa_sigaction == libc::SIG_IGN
}

/// From now on this signal ends this process at once, whatever was to become of it before: it may
/// have been started not to care, and libraries have handlers of their own.
pub fn ends_by(signal: Signal) -> Result<(), Errno> {
    becomes_of(signal, SigHandler::SigDfl)
}

/// That becomes of a signal: nothing, or what is usual.
fn becomes_of(signal: Signal, what: SigHandler) -> Result<(), Errno> {
    debug_assert!(matches!(what, SigHandler::SigDfl | SigHandler::SigIgn));
    let action = SigAction::new(what, SaFlags::empty(), SigSet::empty());
    // SAFETY: no function of this process is called by it.
    unsafe { sigaction(signal, &action) }.map(drop)
}

/// Those that ask to end.
const ASKING: [Signal; 2] = [Signal::SIGINT, Signal::SIGTERM];

/// Of [`ASKING`], which were ignored and which were held back when this process started: bits.
static IGNORED_FIRST: AtomicU8 = AtomicU8::new(0);
static HELD_FIRST: AtomicU8 = AtomicU8::new(0);
/// Not every C library calls what is to be called before the libraries.
static IS_HELD_BACK: AtomicBool = AtomicBool::new(false);

/// Holds back who asks to end until [`end_as_usual`]. The libraries of PSM, with which libfabric may
/// be linked, catch them as soon as they are loaded, which lasts two tenths of a second, and say that
/// this process failed.
///
/// A program has this called before the constructors of any library: by a place in
/// `.preinit_array`.
pub extern "C" fn hold_back() {
    // Nothing here needs more of the C library than its calls of the system: it is there, but what
    // its and others' constructors prepare is not yet.
    let mut held = SigSet::empty();
    for (bit, signal) in ASKING.into_iter().enumerate() {
        if is_ignored(signal) {
            IGNORED_FIRST.fetch_or(1 << bit, Ordering::Relaxed);
        }
        held.add(signal);
    }
    if let Ok(before) = held.thread_swap_mask(nix::sys::signal::SigmaskHow::SIG_BLOCK) {
        for (bit, _) in ASKING.into_iter().enumerate().filter(|(_, one)| before.contains(*one)) {
            HELD_FIRST.fetch_or(1 << bit, Ordering::Relaxed);
        }
    } else {
        // Then nothing is held back by this.
        HELD_FIRST.store(u8::MAX, Ordering::Relaxed);
    }
    IS_HELD_BACK.store(true, Ordering::Relaxed);
}

/// Those that ask to end do that as usual, unless this process was started not to care; what came while
/// libraries were loaded does it now. Who catches them afterwards cares for
/// them in any case. To be called before anything else: handlers of libraries end the process in
/// order, in the middle of whatever it does. If it is in libfabric, it waits for ever for a lock that
/// it holds itself, and no such signal ends it any more.
pub fn end_as_usual() {
    let (ignored, held) =
        (IGNORED_FIRST.load(Ordering::Relaxed), HELD_FIRST.load(Ordering::Relaxed));
    let mut free = SigSet::empty();
    for (bit, signal) in ASKING.into_iter().enumerate() {
        let is_ignored = match IS_HELD_BACK.load(Ordering::Relaxed) {
            true => ignored & 1 << bit != 0,
            false => is_ignored(signal),
        };
        let becomes = if is_ignored { SigHandler::SigIgn } else { SigHandler::SigDfl };
        // Else it stays as it is.
        let _ = becomes_of(signal, becomes);
        if held & 1 << bit == 0 {
            free.add(signal);
        }
    }
    if IS_HELD_BACK.load(Ordering::Relaxed) {
        let _ = free.thread_unblock();
    }
}

/// More descriptors than any command needs: some programs that are started look at all that they may
/// have.
const MOST_DESCRIPTORS: u64 = 1 << 20;

/// Lets this process have as many file descriptors as it may: topics and peers have some each, and
/// the usual limit is low.
pub fn raise_descriptor_limit() {
    let Ok((now, most)) = getrlimit(Resource::RLIMIT_NOFILE) else { return };
    let wanted = most.min(MOST_DESCRIPTORS);
    if now < wanted {
        let _ = setrlimit(Resource::RLIMIT_NOFILE, wanted, most);
    }
}

/// Refuses, before anything is begun, what would take more file descriptors than this process may have.
///
/// # Errors
/// [`Exit::TooMuch`], with the limit and what to do.
pub fn check_descriptors(operation: &str, needs: u64, remedy: &str) -> Result<(), Failure> {
    match getrlimit(Resource::RLIMIT_NOFILE) {
        Ok((limit, _)) if needs > limit => {
            let why = format!(
                "{operation} failed: it takes {needs} file descriptors, and this process may have {limit} \
                 (RLIMIT_NOFILE). {remedy}, or raise the limit: ulimit -Hn"
            );
            Err(Failure::new(Exit::TooMuch, why))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    #[test]
    fn more_descriptors_than_the_limit_are_refused_by_its_name() {
        raise_descriptor_limit();
        let (limit, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        assert_eq!(limit, most.min(MOST_DESCRIPTORS).max(limit));
        assert!(check_descriptors("measure", limit, "Use fewer").is_ok());
        let failure = check_descriptors("measure", limit + 1, "Use fewer --topics").unwrap_err();
        assert_eq!(failure.exit(), Exit::TooMuch);
        let why = failure.to_string();
        assert!(why.contains(&format!("this process may have {limit} (RLIMIT_NOFILE)")), "{why}");
    }

    #[test]
    fn a_program_that_has_a_limit_ends_by_itself() {
        let mut command = Command::new("sleep");
        command.arg("60");
        end_with_this_process(&mut command, Signal::SIGKILL);
        end_after(&mut command, Duration::from_secs(1));
        let status = command.status().unwrap();
        assert_eq!(status.signal(), Some(Signal::SIGALRM as i32));
    }
}
