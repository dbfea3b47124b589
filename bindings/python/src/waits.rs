//! Waits: without the lock of the interpreter, and ended by Ctrl-C.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use crossbeam_channel::{RecvTimeoutError, Sender};
use gpu::{DEFAULT_TIMEOUT, DeviceName, Stream};
use ipc::PerProcess;
use pyo3::marker::Ungil;
use pyo3::prelude::*;
use threads::lock;

use crate::devices::open_device;
use crate::failure::{Failure, Result};

/// After this time at the latest Python's signal handlers run.
const SLICE: Duration = Duration::from_millis(50);
/// A call without a timeout gives up after this time.
pub(crate) const LONGEST_CALL: Duration = Duration::from_secs(1 << 30);
/// The longest timeout; more is no timeout.
const LONGEST: f64 = 1e9;

/// A timeout of a caller: seconds, or None for none.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Timeout(Option<Duration>);

impl Timeout {
    pub(crate) fn new(operation: &'static str, seconds: Option<f64>) -> Result<Self> {
        match seconds {
            Some(seconds) if seconds.is_nan() || seconds < 0.0 => {
                let cause =
                    format!("timeout={seconds}: at least 0 seconds, or None for no timeout");
                Err(Failure::invalid(operation, cause))
            }
            Some(seconds) if seconds < LONGEST => Ok(Self(Some(Duration::from_secs_f64(seconds)))),
            _ => Ok(Self(None)),
        }
    }

    /// The seconds; None for no timeout.
    pub(crate) fn seconds(self) -> Option<f64> {
        self.0.map(|timeout| timeout.as_secs_f64())
    }

    pub(crate) fn is_zero(self) -> bool {
        self.0.is_some_and(|timeout| timeout.is_zero())
    }

    /// The timeout, or this one if there is none.
    pub(crate) fn or(self, longest: Duration) -> Duration {
        self.0.unwrap_or(longest)
    }

    /// When it is over; None for never.
    pub(crate) fn end(self) -> Option<Instant> {
        self.0.map(|timeout| Instant::now() + timeout)
    }

    fn text(self) -> String {
        self.0.map_or_else(String::new, |timeout| format!(" within {} s", timeout.as_secs_f64()))
    }
}

/// Calls `step` with short timeouts until it returns something. Between the steps Python's signal
/// handlers run.
///
/// # Errors
/// Those of `step`; `WouldBlock` or `DeadlineExceeded`, with `cause`; exceptions of signal handlers.
pub(crate) fn wait<T: Ungil + Send>(
    py: Python<'_>,
    operation: &'static str,
    timeout: Timeout,
    cause: impl Fn() -> String,
    mut step: impl FnMut(Duration) -> Result<Option<T>> + Send,
) -> Result<T> {
    let end = timeout.end();
    loop {
        let left = end.map_or(SLICE, |end| end.saturating_duration_since(Instant::now()));
        let step = &mut step;
        if let Some(found) = py.detach(move || step(left.min(SLICE)))? {
            return Ok(found);
        }
        py.check_signals()?;
        if timeout.is_zero() {
            return Err(Failure::new("WouldBlock", operation, cause()));
        }
        if end.is_some_and(|end| Instant::now() >= end) {
            let cause = format!("{}{}", cause(), timeout.text());
            return Err(Failure::new("DeadlineExceeded", operation, cause));
        }
    }
}

/// None for an error that means that the step was too short.
pub(crate) fn unless_late<T>(
    result: std::result::Result<T, impl Into<Failure>>,
) -> Result<Option<T>> {
    match result.map_err(Into::into) {
        Ok(found) => Ok(Some(found)),
        Err(failure) if failure.is_of("DeadlineExceeded") => Ok(None),
        Err(failure) => Err(failure),
    }
}

/// Waits until the work on a stream so far is done. Ctrl-C ends the wait, but not the work.
pub(crate) fn wait_for_work(
    py: Python<'_>,
    operation: &'static str,
    stream: &Stream,
) -> Result<()> {
    if stream.is_done()? {
        return Ok(());
    }
    let (point, timeout) = (stream.point()?, Timeout(Some(DEFAULT_TIMEOUT)));
    let cause = || format!("the work on {} is not done", stream.device().name());
    wait(py, operation, timeout, cause, |slice| unless_late(point.wait(slice)))
}

/// Waits for the work that writes an array of a CUDA device: the default stream waits for the stream
/// of the producer, as DLPack demands.
pub(crate) fn wait_for_writers(
    py: Python<'_>,
    operation: &'static str,
    cuda_device: Option<u32>,
) -> Result<()> {
    let Some(number) = cuda_device else { return Ok(()) };
    wait_for_work(py, operation, &open_device(DeviceName::cuda(number))?.default_stream()?)
}

type Job = Box<dyn FnOnce() + Send>;

/// Threads of earlier calls that wait for another one.
static IDLE: PerProcess<Mutex<Vec<Sender<Job>>>> = PerProcess::new();
/// How long they wait.
const IDLE_TIME: Duration = Duration::from_secs(5);

/// Runs a job in a thread that waits for one, or in a new one.
fn run_in_thread(operation: &'static str, job: Job) -> Result<()> {
    let waiting = lock(IDLE.get()).pop();
    let job = match waiting {
        Some(thread) => match thread.send(job) {
            Ok(()) => return Ok(()),
            Err(unsent) => unsent.into_inner(),
        },
        None => job,
    };
    let started = threads::spawn("fabricast-call", move || {
        let (sender, receiver) = crossbeam_channel::bounded::<Job>(1);
        let mut next = Some(job);
        while let Some(job) = next.take() {
            job();
            lock(IDLE.get()).push(sender.clone());
            next = receiver.recv_timeout(IDLE_TIME).ok().or_else(|| {
                let mut idle = lock(IDLE.get());
                let listed = idle.iter().position(|other| other.same_channel(&sender));
                match listed {
                    Some(index) => {
                        idle.remove(index);
                        None
                    }
                    // A caller has taken it from the list, and sends a job.
                    None => {
                        drop(idle);
                        receiver.recv().ok()
                    }
                }
            });
        }
    });
    started.map(drop).map_err(|error| Failure::new("TooMany", operation, error))
}

/// Makes a call that has a deadline of its own, in a thread, so that Ctrl-C ends the wait for it.
/// Then the call goes on, and its result is dropped.
///
/// # Errors
/// Those of the call; exceptions of signal handlers.
pub(crate) fn interruptibly<T: Send + 'static, E: Into<Failure> + Send + 'static>(
    py: Python<'_>,
    operation: &'static str,
    call: impl FnOnce() -> std::result::Result<T, E> + Send + 'static,
) -> Result<T> {
    // Without room: the result is received, or not sent.
    let (sender, receiver) = crossbeam_channel::bounded(0);
    let job = move || {
        // Without a receiver the caller was interrupted.
        let _ = sender.send(call());
    };
    py.detach(|| run_in_thread(operation, Box::new(job)))?;
    loop {
        let receiver = &receiver;
        match py.detach(move || receiver.recv_timeout(SLICE)) {
            Ok(done) => return done.map_err(Into::into),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Failure::new("Failed", operation, "its thread ended"));
            }
        }
    }
}

/// Makes a call in this thread, which asks often whether it goes on: then Python's signal handlers run.
///
/// # Errors
/// Exceptions of signal handlers.
pub(crate) fn with_signals<T: Send>(
    py: Python<'_>,
    call: impl FnOnce(&dyn Fn() -> bool) -> T + Send,
) -> Result<T> {
    let interrupted = Mutex::new(None);
    let goes_on = || match Python::attach(|py| py.check_signals()) {
        Ok(()) => true,
        Err(error) => {
            *lock(&interrupted) = Some(error);
            false
        }
    };
    let outcome = py.detach(|| call(&goes_on));
    match lock(&interrupted).take() {
        Some(error) => Err(error.into()),
        None => Ok(outcome),
    }
}
