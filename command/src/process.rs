//! Child processes that do not outlive their parent, and signal dispositions.
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

use crate::exit::{Exit, Failure, Result};

/// This executable, even if the file was replaced.
#[must_use]
pub fn this_program(name: &str) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0(name);
    command
}

/// The child gets this signal when the thread that spawned it exits, whatever it executes. It does
/// not inherit the signal mask of this thread.
pub fn kill_with_parent(command: &mut Command, signal: Signal) {
    let parent = getpid();
    let ask = move || {
        SigSet::empty().thread_set_mask()?;
        set_pdeathsig(signal)?;
        // The parent may have exited before prctl.
        if getppid() == parent { Ok(()) } else { Err(io::ErrorKind::NotConnected.into()) }
    };
    // SAFETY: between fork and exec it makes system calls only, and allocates nothing.
    unsafe { command.pre_exec(ask) };
}

/// The child is killed after this time at the latest, even if its parent is stopped.
pub fn limit_lifetime(command: &mut Command, limit: Duration) {
    let seconds = u32::try_from(limit.as_secs()).unwrap_or(u32::MAX).max(1);
    let set = move || {
        // Signal dispositions are inherited, and exec keeps the alarm.
        restore_default_action(Signal::SIGALRM)?;
        alarm::set(seconds);
        Ok(())
    };
    // SAFETY: between fork and exec it makes system calls only, and allocates nothing.
    unsafe { command.pre_exec(set) };
}

/// Is this signal ignored, since the start of the process or later?
pub fn is_ignored(signal: Signal) -> bool {
    // SAFETY: all zeros are a valid value.
    let mut found: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: a null action changes nothing; the current one is written to `found`.
    let status =
        unsafe { libc::sigaction(signal as libc::c_int, std::ptr::null(), &raw mut found) };
    status == 0 && found.sa_sigaction == libc::SIG_IGN
}

/// From now on this signal ends this process at once: the process may have been started with it
/// ignored, and libraries install handlers.
pub fn restore_default_action(signal: Signal) -> Result<(), Errno> {
    let action = SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty());
    // SAFETY: no function of this process is installed as a handler.
    unsafe { sigaction(signal, &action) }.map(drop)
}

/// Fails, before the operation starts, if it needs more file descriptors than the hard limit.
///
/// # Errors
/// [`Exit::LimitExceeded`], with the limit and the remedy.
pub fn check_descriptors(operation: &str, needs: u64, remedy: &str) -> Result<()> {
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
    fn check_of_more_descriptors_than_allowed_names_the_limit() {
        let (limit, _) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        assert!(check_descriptors("measure", limit, "Use fewer").is_ok());
        let failure =
            check_descriptors("measure", limit + 1, "Use fewer --idle-topics").unwrap_err();
        assert_eq!(failure.exit(), Exit::LimitExceeded);
        let why = failure.to_string();
        assert!(why.contains(&format!("this process may have {limit} (RLIMIT_NOFILE)")), "{why}");
    }

    #[test]
    fn child_with_a_lifetime_limit_ends_by_itself() {
        let mut command = Command::new("sleep");
        command.arg("60");
        kill_with_parent(&mut command, Signal::SIGKILL);
        limit_lifetime(&mut command, Duration::from_secs(1));
        let status = command.status().unwrap();
        assert_eq!(status.signal(), Some(Signal::SIGALRM as i32));
    }
}
