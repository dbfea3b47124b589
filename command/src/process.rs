//! How programs are started that do not outlive the one that started them, and what becomes of signals.
#![allow(unsafe_code)]

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

use nix::errno::Errno;
use nix::libc;
use nix::sys::prctl::set_pdeathsig;
use nix::sys::resource::{Resource, getrlimit};
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
pub fn kill_with_parent(command: &mut Command, signal: Signal) {
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
pub fn limit_lifetime(command: &mut Command, limit: Duration) {
    let seconds = u32::try_from(limit.as_secs()).unwrap_or(u32::MAX).max(1);
    let set = move || {
        // What becomes of the signal is inherited, and the alarm is left as it is by exec.
        set_disposition(Signal::SIGALRM, SigHandler::SigDfl)?;
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
pub fn restore_default_action(signal: Signal) -> Result<(), Errno> {
    set_disposition(signal, SigHandler::SigDfl)
}

/// That becomes of a signal: nothing, or what is usual.
fn set_disposition(signal: Signal, what: SigHandler) -> Result<(), Errno> {
    debug_assert!(matches!(what, SigHandler::SigDfl | SigHandler::SigIgn));
    let action = SigAction::new(what, SaFlags::empty(), SigSet::empty());
    // SAFETY: no function of this process is called by it.
    unsafe { sigaction(signal, &action) }.map(drop)
}

/// Refuses, before anything is begun, what would take more file descriptors than this process may have.
///
/// # Errors
/// [`Exit::LimitExceeded`], with the limit and what to do.
pub fn check_descriptors(operation: &str, needs: u64, remedy: &str) -> Result<(), Failure> {
    match getrlimit(Resource::RLIMIT_NOFILE) {
        Ok((limit, _)) if needs > limit => {
            let why = format!(
                "{operation} failed: it takes {needs} file descriptors, and this process may have {limit} \
                 (RLIMIT_NOFILE). {remedy}, or raise the limit: ulimit -Hn"
            );
            Err(Failure::new(Exit::LimitExceeded, why))
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
        let (limit, _) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        assert!(check_descriptors("measure", limit, "Use fewer").is_ok());
        let failure =
            check_descriptors("measure", limit + 1, "Use fewer --idle-topics").unwrap_err();
        assert_eq!(failure.exit(), Exit::LimitExceeded);
        let why = failure.to_string();
        assert!(why.contains(&format!("this process may have {limit} (RLIMIT_NOFILE)")), "{why}");
    }

    #[test]
    fn a_program_that_has_a_limit_ends_by_itself() {
        let mut command = Command::new("sleep");
        command.arg("60");
        kill_with_parent(&mut command, Signal::SIGKILL);
        limit_lifetime(&mut command, Duration::from_secs(1));
        let status = command.status().unwrap();
        assert_eq!(status.signal(), Some(Signal::SIGALRM as i32));
    }
}
