//! The results that a completion queue reports.
//!
//! Results name operations in two ways: by [`OperationId`], which this library assigns and does not
//! repeat while the operation is known, and by the caller's token, which is returned unchanged and
//! may repeat.
//!
//! ```
//! use fabric::{Completion, CompletionKind, Outcome};
//!
//! /// Sorts the results of a queue.
//! fn note(outcome: Outcome, done: &mut Vec<u64>, immediates: &mut Vec<u64>) {
//!     match outcome {
//!         Ok(Completion { kind: CompletionKind::RemoteWrite, data: Some(data), .. }) => {
//!             immediates.push(data);
//!         }
//!         Ok(completion) => done.push(completion.token),
//!         // A failure without an operation concerns the whole queue.
//!         Err(failure) if failure.operation.is_none() => eprintln!("{failure}"),
//!         Err(failure) => eprintln!("operation {} failed: {}", failure.token, failure.error),
//!     }
//! }
//! # let _ = note;
//! ```

use std::fmt;

use super::OperationId;
use crate::Error;

/// The kind of a completed operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CompletionKind {
    /// A send.
    Send,
    /// A receive.
    Receive,
    /// A write of this endpoint.
    Write,
    /// A read of this endpoint.
    Read,
    /// An atomic of this endpoint.
    Atomic,
    /// A peer's write arrived, with an immediate. If immediates consume receives, the operation
    /// and token are those of the consumed receive.
    RemoteWrite,
}

/// An operation that completed, or an immediate that arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// The kind of operation.
    pub kind: CompletionKind,
    /// The operation; None for arrivals without a local operation.
    pub operation: Option<OperationId>,
    /// The token given at posting; 0 if there is no operation.
    pub token: u64,
    /// Bytes received or written, if the provider reports them; otherwise 0 (`verbs;ofi_rxm`
    /// gives no length with an immediate, for example).
    pub length: usize,
    /// The immediate (`FI_REMOTE_CQ_DATA`), if there is one. It is complete, because the sender
    /// refuses bits beyond the provider's width.
    pub data: Option<u64>,
    /// The tag of a tagged receive, as the sender set it; otherwise 0.
    pub tag: u64,
    pub(crate) source: u64,
}

/// An operation that failed, or a failure that belongs to no operation (such as a lost
/// connection or a deadline).
#[derive(Clone)]
pub struct Failure {
    /// The kind of operation, if it was one.
    pub kind: Option<CompletionKind>,
    /// The operation.
    pub operation: Option<OperationId>,
    /// The token given at posting; 0 if there is no operation.
    pub token: u64,
    /// The cause.
    pub error: Error,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            Some(kind) => write!(f, "{kind:?} (token {}): {}", self.token, self.error),
            None => self.error.fmt(f),
        }
    }
}

/// Writes the same text as `Display`, as with [`Error`].
impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !f.alternate() {
            return fmt::Display::fmt(self, f);
        }
        let Self { kind, operation, token, error } = self;
        let mut fields = f.debug_struct("Failure");
        fields.field("kind", kind).field("operation", operation);
        fields.field("token", token).field("error", error).finish()
    }
}

impl std::error::Error for Failure {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        failure.error
    }
}

/// The result that a queue returns.
pub type Outcome = Result<Completion, Failure>;
