//! Objects that several threads use, until one closes them.

use std::sync::Mutex;

use threads::lock;

use crate::failure::{Failure, Result};

/// An object until it is closed. Calls that have begun keep their clone of it.
#[derive(Debug)]
pub(crate) struct Closable<T> {
    /// Why it cannot be used after its close: "the node was closed".
    cause: &'static str,
    /// None after its close.
    value: Mutex<Option<T>>,
}

impl<T> Closable<T> {
    pub(crate) fn new(cause: &'static str, value: T) -> Self {
        Self { cause, value: Mutex::new(Some(value)) }
    }

    fn closed(&self, operation: &'static str) -> Failure {
        Failure::new("Closed", operation, self.cause)
    }

    /// Uses it for a moment, in which no other thread does.
    pub(crate) fn with<R>(&self, operation: &'static str, call: impl FnOnce(&T) -> R) -> Result<R> {
        lock(&self.value).as_ref().map(call).ok_or_else(|| self.closed(operation))
    }

    pub(crate) fn get(&self, operation: &'static str) -> Result<T>
    where
        T: Clone,
    {
        self.with(operation, T::clone)
    }

    /// Closes it: the value, or None if it was closed before.
    pub(crate) fn close(&self) -> Option<T> {
        lock(&self.value).take()
    }

    /// Closes it for the last use.
    pub(crate) fn take(&self, operation: &'static str) -> Result<T> {
        self.close().ok_or_else(|| self.closed(operation))
    }
}
