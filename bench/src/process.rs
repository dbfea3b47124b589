//! Affinity of threads, and an alarm against calls that never return.
#![allow(unsafe_code)]

use std::os::fd::AsFd;
use std::time::Duration;

use command::exit::{Exit, Failure};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::libc;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::{Pid, alarm};

use crate::worker::children;

/// How long one call into libfabric may take: a peer that was killed while it held a lock in shared
/// memory can block it forever.
const STALL_ALARM: Duration = Duration::from_secs(30);

/// Processor time of this process so far, in programs and in the kernel.
pub(crate) fn processor_time() -> Duration {
    clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

/// Pins the calling thread to this core, and threads and processes that it starts.
pub(crate) fn pin(core: usize) -> Result<(), Failure> {
    set_affinity(&[core])
}

/// Pins the calling thread to these cores, and threads and processes that it starts; without cores
/// it is not pinned.
pub(crate) fn set_affinity(cores: &[usize]) -> Result<(), Failure> {
    let mut set = CpuSet::new();
    for core in cores {
        set.set(*core).map_err(|error| no_core(*core, error))?;
    }
    match cores.first() {
        Some(core) => {
            sched_setaffinity(Pid::from_raw(0), &set).map_err(|error| no_core(*core, error))
        }
        None => Ok(()),
    }
}

fn no_core(core: usize, error: Errno) -> Failure {
    Failure::new(Exit::Usage, format!("pin to core {core} failed: {}", error.desc()))
}

/// Affinity of the calling thread.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Affinity(CpuSet);

impl Affinity {
    /// The current affinity.
    pub(crate) fn now() -> Result<Self, Failure> {
        let found = sched_getaffinity(Pid::from_raw(0));
        found.map(Self).map_err(|error| Failure::failed(format!("sched_getaffinity: {error}")))
    }

    /// Is this core among them?
    pub(crate) fn has(self, core: usize) -> bool {
        self.0.is_set(core).unwrap_or(false)
    }

    /// All cores.
    pub(crate) fn cores(self) -> Vec<usize> {
        (0..CpuSet::count()).filter(|core| self.has(*core)).collect()
    }

    /// Sets this affinity again.
    pub(crate) fn restore(self) -> Result<(), Failure> {
        sched_setaffinity(Pid::from_raw(0), &self.0)
            .map_err(|error| Failure::failed(format!("sched_setaffinity: {error}")))
    }
}

/// Number of involuntary context switches of this process.
pub(crate) fn count_involuntary_switches() -> u64 {
    let usage = getrusage(UsageWho::RUSAGE_SELF);
    usage.map_or(0, |usage| usage.involuntary_context_switches().max(0) as u64)
}

/// Exits at once, without destructors and exit handlers.
pub(crate) fn leave(code: i32) -> ! {
    // SAFETY: takes no pointers, and does not return.
    unsafe { libc::_exit(code) }
}

/// Makes reads and writes on this descriptor non-blocking.
pub(crate) fn set_nonblocking(descriptor: impl AsFd) -> Result<(), Failure> {
    let flags = fcntl(descriptor.as_fd(), FcntlArg::F_GETFL);
    flags
        .map(|flags| OFlag::from_bits_retain(flags) | OFlag::O_NONBLOCK)
        .and_then(|flags| fcntl(descriptor.as_fd(), FcntlArg::F_SETFL(flags)))
        .map(drop)
        .map_err(|error| Failure::failed(format!("fcntl(O_NONBLOCK): {}", error.desc())))
}

/// From now on the process exits, with the exit code of a deadline, unless [`reset_stall_alarm`] is
/// called often enough. A signal instead of a thread: with a second thread every lock would cost
/// more.
pub(crate) fn start_stall_alarm() -> Result<(), Failure> {
    let action =
        SigAction::new(SigHandler::Handler(on_stall_alarm), SaFlags::empty(), SigSet::empty());
    // SAFETY: the handler calls only async-signal-safe functions.
    unsafe { sigaction(Signal::SIGALRM, &action) }
        .map_err(|error| Failure::failed(format!("sigaction: {}", error.desc())))?;
    reset_stall_alarm();
    Ok(())
}

/// Restarts the alarm.
pub(crate) fn reset_stall_alarm() {
    alarm::set(STALL_ALARM.as_secs() as u32);
}

/// Cancels the alarm.
pub(crate) fn cancel_stall_alarm() {
    alarm::cancel();
}

extern "C" fn on_stall_alarm(_signal: libc::c_int) {
    const TEXT: &[u8] = b"fabricast: a libfabric call did not return within 30 s\n";
    // SAFETY: write is async-signal-safe.
    unsafe { libc::write(2, TEXT.as_ptr().cast(), TEXT.len()) };
    for (child, _) in children() {
        // SAFETY: both are async-signal-safe; the child was started by this process and not waited
        // for.
        unsafe {
            libc::kill(child.as_raw(), libc::SIGKILL);
            libc::waitpid(child.as_raw(), std::ptr::null_mut(), 0);
        }
    }
    leave(Exit::Deadline as i32)
}
