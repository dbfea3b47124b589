//! The temporary directory of a measurement, in which its processes share sockets and files.
//!
//! The directory is removed when the measurement ends, and by a thread that waits for signals when
//! a signal ends the process.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use command::exit::Failure;
use command::process::is_ignored;
use command::temp_dir::{self, Program};
use nix::sys::signal::{SigSet, Signal, raise};

use crate::process::leave;
use crate::worker::terminate_children;

/// The directory to remove if a signal ends the process.
static CURRENT: Mutex<Option<PathBuf>> = Mutex::new(None);

fn current() -> MutexGuard<'static, Option<PathBuf>> {
    CURRENT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The temporary directory of a measurement. A process has one at a time.
#[derive(Debug)]
pub(crate) struct TempDir(temp_dir::TempDir);

impl TempDir {
    /// Creates it. Call before other threads are started, since they inherit the signal mask that
    /// leaves signals to the thread that removes the directory.
    pub(crate) fn create() -> Result<Self, Failure> {
        wait_for_signals()?;
        let directory = temp_dir::TempDir::create(Program::Bench)?;
        *current() = Some(directory.path().to_owned());
        Ok(Self(directory))
    }

    /// The directory's path.
    #[must_use]
    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        *current() = None;
    }
}

/// Starts the thread that waits for signals, unless it is there already.
fn wait_for_signals() -> Result<(), Failure> {
    static STARTED: Once = Once::new();
    let mut outcome = Ok(());
    STARTED.call_once(|| outcome = start_thread());
    outcome
}

fn start_thread() -> Result<(), Failure> {
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        // A signal that is ignored, as nohup does, stays ignored.
        if !is_ignored(signal) {
            signals.add(signal);
        }
    }
    let failed = |why: String| Failure::failed(format!("wait for signals failed: {why}"));
    signals.thread_block().map_err(|error| failed(error.desc().to_owned()))?;
    let thread = std::thread::Builder::new().name("fabricast-signals".to_owned());
    let started = thread.spawn(move || {
        loop {
            if let Ok(signal) = signals.wait() {
                end(signal, &signals);
            }
        }
    });
    started.map(drop).map_err(|error| failed(error.to_string()))
}

/// Removes the directory, and ends this process as the signal would have.
fn end(signal: Signal, signals: &SigSet) -> ! {
    // Held to the end: no other thread creates or removes the directory from now on.
    let current = current();
    terminate_children();
    if let Some(directory) = current.as_ref() {
        // A file that this process has just created there would make the removal fail.
        let _ = (0..3).any(|_| fs::remove_dir_all(directory).is_ok());
    }
    // The handler of a provider, if it has one, removes its files: that of shm, which then ends the
    // process with exit code 1.
    let _ = signals.thread_unblock();
    let _ = raise(signal);
    leave(128 + signal as i32)
}
