//! The error type of this crate.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

errors::define! {
    /// The kinds of failure that a program can act on.
    pub enum ErrorKind {
        /// An argument that is never valid.
        InvalidArgument = "invalid argument",
        /// Ranks called different operations, or with different arguments.
        Mismatch = "ranks called different operations",
        /// Ranks use different versions, or options that must be equal.
        VersionMismatch = "version mismatch",
        /// A rank did not take part before the deadline; the error names it.
        DeadlineExceeded = "deadline exceeded",
        /// The process of a rank has ended; the error names it.
        RankFailed = "a rank has ended",
        /// A rank has left the domain; the error names it.
        Closed = "a rank has left",
        /// Another process sent or wrote what is not allowed.
        Malformed = "malformed",
        /// The domain belongs to the parent of this process.
        Forked = "used after a fork",
        /// What is asked for does not exist on this machine.
        Unavailable = "not available",
        /// A lower layer failed; the detail or the cause says how.
        Failed = "failed",
    }

    /// An error: the operation, the ranks that caused it, and the cause.
    pub struct Error {
        ranks: Vec<u32>,
        detail: String,
        cause: Option<Arc<dyn StdError + Send + Sync>>,
    }
}

impl Error {
    pub(crate) fn new(operation: &'static str, kind: ErrorKind, detail: impl Into<String>) -> Self {
        let mut error = Self::bare(operation, kind);
        error.0.detail = detail.into();
        error
    }

    /// An error of a lower layer.
    pub(crate) fn caused_by(
        operation: &'static str,
        kind: ErrorKind,
        cause: impl Into<Box<dyn StdError + Send + Sync>>,
    ) -> Self {
        let mut error = Self::bare(operation, kind);
        error.0.cause = Some(Arc::from(cause.into()));
        error
    }

    pub(crate) fn of_ranks(mut self, ranks: impl IntoIterator<Item = u32>) -> Self {
        self.0.ranks = ranks.into_iter().collect();
        self
    }

    /// The ranks of the domain that caused it; empty if they are not known.
    #[must_use]
    pub fn ranks(&self) -> &[u32] {
        &self.0.ranks
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = &*self.0;
        errors::write(f, inner.operation, None, inner.kind.label(), &inner.detail, self.source())
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.cause.as_deref().map(|cause| cause as _)
    }
}
