//! Child processes of a benchmark, which never outlive it.

use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;

use command::exit::{Exit, Failure};
use command::process::kill_with_parent;

/// How long a process may take to exit after its signal.
pub(crate) const EXIT_TIMEOUT: Duration = Duration::from_secs(2);

/// Children: process number, and the signal that ends them; 0: none. A signal handler can read it.
static CHILDREN: [AtomicU64; MAX_CHILDREN] = [const { AtomicU64::new(0) }; MAX_CHILDREN];
/// Reserves a slot for a child that is being started.
const RESERVED: u64 = u64::MAX;
/// The maximum number of children.
const MAX_CHILDREN: usize = 4096;

/// Children that were not waited for, with the signal that ends each.
pub(crate) fn children() -> impl Iterator<Item = (Pid, Signal)> {
    let known = CHILDREN
        .iter()
        .map(|slot| slot.load(Ordering::Acquire))
        .filter(|it| *it != 0 && *it != RESERVED);
    known.map(|it| {
        let signal = Signal::try_from((it >> 32) as i32).unwrap_or(Signal::SIGKILL);
        (Pid::from_raw(it as u32 as i32), signal)
    })
}

/// Ends all children, and waits for them.
pub(crate) fn terminate_children() {
    for (child, signal) in children() {
        let _ = kill(child, signal);
    }
    let deadline = Instant::now() + EXIT_TIMEOUT;
    for (child, _) in children() {
        let is_there = || {
            let state = waitpid(child, Some(WaitPidFlag::WNOHANG));
            state.is_ok_and(|state| state.pid().is_none())
        };
        while is_there() {
            if Instant::now() >= deadline {
                let _ = kill(child, Signal::SIGKILL);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// A child process. Dropping it ends it: by its signal, or, after a while, by SIGKILL.
#[derive(Debug)]
pub(crate) struct Worker {
    child: Child,
    label: &'static str,
    signal: Signal,
    slot: &'static AtomicU64,
    expect_exit: bool,
}

impl Worker {
    /// Starts it. The signal ends it, also when the thread that started it exits.
    ///
    /// # Errors
    /// Errors of the system.
    pub(crate) fn start(
        mut command: Command,
        label: &'static str,
        signal: Signal,
    ) -> Result<Self, Failure> {
        kill_with_parent(&mut command, signal);
        let failed = |why: &str| Failure::failed(format!("start {label} failed: {why}"));
        let claim = |slot: &&AtomicU64| {
            slot.compare_exchange(0, RESERVED, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        let slot = CHILDREN.iter().find(claim).ok_or_else(|| failed("too many child processes"))?;
        let spawned = command.spawn();
        let known = spawned.as_ref().map_or(0, |it| u64::from(it.id()) | (signal as u64) << 32);
        slot.store(known, Ordering::Release);
        let child = spawned.map_err(|error| failed(&error.to_string()))?;
        Ok(Self { child, label, signal, slot, expect_exit: false })
    }

    /// The number of the process.
    #[must_use]
    pub(crate) fn number(&self) -> u32 {
        self.child.id()
    }

    /// The worker's standard input and output, if these are pipes.
    pub(crate) fn pipes(&mut self) -> Option<(ChildStdin, ChildStdout)> {
        self.child.stdin.take().zip(self.child.stdout.take())
    }

    /// The process is about to exit: dropping it waits a while before it sends the signal.
    pub(crate) fn expect_exit(&mut self) {
        self.expect_exit = true;
    }

    /// Waits for its exit; None after the timeout.
    pub(crate) fn wait(&mut self, timeout: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Some(status);
            }
            if Instant::now() >= deadline {
                return None;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The failure of a process that closed its output.
    #[must_use]
    pub(crate) fn exit_failure(mut self) -> Failure {
        let label = self.label;
        match self.wait(EXIT_TIMEOUT) {
            Some(status) => exit_status_failure(label, status),
            None => {
                Failure::failed(format!("{label} closed its pipe but did not exit; it was killed"))
            }
        }
    }

    /// Waits until it has exited by itself.
    ///
    /// # Errors
    /// The worker failed, or has not ended in time.
    pub(crate) fn finish(mut self) -> Result<(), Failure> {
        match self.wait(EXIT_TIMEOUT) {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(exit_status_failure(self.label, status)),
            None => {
                let why =
                    format!("{} did not exit within {EXIT_TIMEOUT:?}; it was killed", self.label);
                Err(Failure::new(Exit::Deadline, why))
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Waited for from here on: its number may be reused.
        self.slot.store(0, Ordering::Release);
        let timeout = if self.expect_exit { EXIT_TIMEOUT } else { Duration::ZERO };
        if self.wait(timeout).is_some() {
            return;
        }
        // Its signal first, so that a provider removes its shared memory.
        if let Ok(number) = i32::try_from(self.child.id()) {
            let _ = kill(Pid::from_raw(number), self.signal);
        }
        if self.wait(EXIT_TIMEOUT).is_none() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

fn exit_status_failure(label: &str, status: ExitStatus) -> Failure {
    match (status.code(), status.signal()) {
        (Some(0), _) => Failure::failed(format!("{label} exited early with status 0")),
        (Some(code), _) => {
            let why = format!("{label} failed with exit status {code}");
            Failure::new(Exit::from_code(code), why)
        }
        (None, Some(signal)) => Failure::failed(format!("{label} was killed by signal {signal}")),
        (None, None) => Failure::failed(format!("{label} ended: {status}")),
    }
}
