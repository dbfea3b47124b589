//! Objects that one thread at a time uses.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use pyo3::prelude::*;
use threads::lock;

use crate::failure::{Failure, Result};

/// How long a thread that waits in the object leaves it to others, if there are any.
const PAUSE: Duration = Duration::from_millis(1);

/// An object until it is closed. It is locked without the lock of the interpreter only, so that a
/// thread that waits in it does not block threads of Python that do not use it.
#[derive(Debug)]
pub(crate) struct Exclusive<T> {
    name: &'static str,
    /// None after its close.
    value: Mutex<Option<T>>,
    /// Threads that want to use it.
    waiting: AtomicU32,
}

impl<T: Send> Exclusive<T> {
    pub(crate) fn new(name: &'static str, value: T) -> Self {
        Self { name, value: Mutex::new(Some(value)), waiting: AtomicU32::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, Option<T>> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let guard = lock(&self.value);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        guard
    }

    fn closed(&self, operation: &'static str) -> Failure {
        Failure::new("Closed", operation, format!("the {} was closed", self.name))
    }

    /// Uses it. The caller does not hold the lock of the interpreter.
    pub(crate) fn detached<R>(
        &self,
        operation: &'static str,
        call: impl FnOnce(&mut T) -> Result<R>,
    ) -> Result<R> {
        call(self.lock().as_mut().ok_or_else(|| self.closed(operation))?)
    }

    /// Uses it for a part of a wait. Between the parts other threads use it.
    pub(crate) fn step<R>(
        &self,
        operation: &'static str,
        call: impl FnOnce(&mut T) -> Result<R>,
    ) -> Result<R> {
        if self.waiting.load(Ordering::Relaxed) > 0 {
            std::thread::sleep(PAUSE);
        }
        self.detached(operation, call)
    }

    /// Uses it for short.
    pub(crate) fn with<R: Send>(
        &self,
        py: Python<'_>,
        operation: &'static str,
        call: impl FnOnce(&mut T) -> Result<R> + Send,
    ) -> Result<R> {
        py.detach(|| self.detached(operation, call))
    }

    /// Closes it: the value, or None if it was closed before.
    pub(crate) fn take(&self, py: Python<'_>) -> Option<T> {
        py.detach(|| self.lock().take())
    }
}
