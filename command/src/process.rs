//! What a measurement asks of the system: a core of its own, a child that does
//! not outlive its parent, and an end even if a call never returns. And how every command ends by
//! the signals that ask it to, from its first moment on.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::libc;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use nix::unistd::{Pid, alarm, getpid, getppid};

use crate::exit::{Exit, Failure};
use crate::worker::children;

/// How long one call into libfabric may take: a peer that died while it held a
/// lock in shared memory can keep it for ever.
const STUCK: Duration = Duration::from_secs(30);

/// Runs the calling thread on this core only, and threads and processes that it starts.
pub fn pin(core: usize) -> Result<(), Failure> {
    confine(&[core])
}

/// Runs the calling thread on these cores only, and threads and processes that it starts; wherever
/// it ran before, if there are none.
pub fn confine(cores: &[usize]) -> Result<(), Failure> {
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
    Failure::new(Exit::Usage, format!("cannot run on core {core}: {}", error.desc()))
}

/// Where the calling thread may run.
#[derive(Debug, Clone, Copy)]
pub struct Affinity(CpuSet);

impl Affinity {
    /// As it is now.
    pub fn now() -> Result<Self, Failure> {
        let found = sched_getaffinity(Pid::from_raw(0));
        found.map(Self).map_err(|error| Failure::failed(format!("sched_getaffinity: {error}")))
    }

    /// Is this core one of them?
    pub fn has(self, core: usize) -> bool {
        self.0.is_set(core).unwrap_or(false)
    }

    /// All of them.
    pub fn cores(self) -> Vec<usize> {
        (0..CpuSet::count()).filter(|core| self.has(*core)).collect()
    }

    /// Runs it there again.
    pub fn restore(self) -> Result<(), Failure> {
        sched_setaffinity(Pid::from_raw(0), &self.0)
            .map_err(|error| Failure::failed(format!("sched_setaffinity: {error}")))
    }
}

/// How often the system gave this process's core to another that did not wait for it.
pub fn times_preempted() -> u64 {
    let usage = getrusage(UsageWho::RUSAGE_SELF);
    usage.map_or(0, |usage| usage.involuntary_context_switches().max(0) as u64)
}

/// This process is asked to end when the one that started it does. That is how
/// an interrupted measurement leaves nothing behind: asked, rather than killed,
/// a provider still removes its shared memory.
pub fn end_with_parent(parent: u32) -> Result<(), Failure> {
    set_pdeathsig(Signal::SIGTERM)
        .map_err(|error| Failure::failed(format!("prctl(PR_SET_PDEATHSIG): {}", error.desc())))?;
    // It may have ended just before.
    if u32::try_from(getppid().as_raw()) == Ok(parent) {
        Ok(())
    } else {
        Err(Failure::failed("the process that started this one is gone"))
    }
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

/// Ends this process at once, without running anybody's clean-up.
pub fn leave(code: i32) -> ! {
    // SAFETY: takes nothing, and does not return.
    unsafe { libc::_exit(code) }
}

/// Reads and writes on this descriptor return at once.
pub fn do_not_block(descriptor: impl AsFd) -> Result<(), Failure> {
    let flags = fcntl(descriptor.as_fd(), FcntlArg::F_GETFL);
    flags
        .map(|flags| OFlag::from_bits_retain(flags) | OFlag::O_NONBLOCK)
        .and_then(|flags| fcntl(descriptor.as_fd(), FcntlArg::F_SETFL(flags)))
        .map(drop)
        .map_err(|error| Failure::failed(format!("fcntl(O_NONBLOCK): {}", error.desc())))
}

/// From now on the process ends, with the exit code of a deadline, if
/// [`still_alive`] is not called often enough. A signal instead of a thread:
/// with a second thread in the process every lock would cost more.
pub fn watch_over() -> Result<(), Failure> {
    let action = SigAction::new(SigHandler::Handler(stuck), SaFlags::empty(), SigSet::empty());
    // SAFETY: the handler calls only functions that are safe in a handler.
    unsafe { sigaction(Signal::SIGALRM, &action) }
        .map_err(|error| Failure::failed(format!("sigaction: {}", error.desc())))?;
    still_alive();
    Ok(())
}

/// Puts the end off.
pub fn still_alive() {
    alarm::set(STUCK.as_secs() as u32);
}

/// No further end is planned.
pub fn stop_watching() {
    alarm::cancel();
}

extern "C" fn stuck(_signal: libc::c_int) {
    const TEXT: &[u8] = b"fabricast: stuck inside one libfabric call for 30 s\n";
    // SAFETY: write is safe in a signal handler.
    unsafe { libc::write(2, TEXT.as_ptr().cast(), TEXT.len()) };
    for (child, _) in children() {
        // SAFETY: both are safe in a signal handler; the child was started by this process and
        // not waited for yet.
        unsafe {
            libc::kill(child.as_raw(), libc::SIGKILL);
            libc::waitpid(child.as_raw(), std::ptr::null_mut(), 0);
        }
    }
    leave(Exit::Deadline as i32)
}
