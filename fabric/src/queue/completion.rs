//! What a completion queue tells.
//!
//! Outcomes name operations in two ways: by [`OperationId`], which this library
//! gives and never repeats while the operation is known, and by the caller's token,
//! which is carried as it is and may repeat.
//!
//! ```
//! use fabric::{Completion, CompletionKind, Outcome};
//!
//! /// Sorts what a queue handed out.
//! fn note(outcome: Outcome, done: &mut Vec<u64>, immediates: &mut Vec<u64>) {
//!     match outcome {
//!         Ok(Completion { kind: CompletionKind::RemoteWrite, data: Some(data), .. }) => {
//!             immediates.push(data);
//!         }
//!         Ok(completion) => done.push(completion.token),
//!         // A failure without an operation says something of the whole queue.
//!         Err(failure) if failure.operation.is_none() => eprintln!("{failure}"),
//!         Err(failure) => eprintln!("operation {} failed: {}", failure.token, failure.error),
//!     }
//! }
//! # let _ = note;
//! ```

use std::fmt;
use std::num::NonZeroU32;

use crate::error::Error;

/// Names one posted operation, within the queue it reports to. It goes stale when
/// the outcome was handed out: a later operation in the same slot has another name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct OperationId {
    pub(crate) index: u32,
    pub(crate) generation: NonZeroU32,
}

/// What completed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CompletionKind {
    /// A send.
    Send,
    /// A receive.
    Receive,
    /// A write that was started here.
    Write,
    /// A read that was started here.
    Read,
    /// An atomic that was started here.
    Atomic,
    /// A peer's write arrived, with an immediate. Where immediates consume
    /// receives, the operation and token are those of the receive it used up.
    RemoteWrite,
}

/// An operation that completed, or an immediate that arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// What completed.
    pub kind: CompletionKind,
    /// The operation; None for arrivals that no operation here asked for.
    pub operation: Option<OperationId>,
    /// The token given at posting; 0 where there is no operation.
    pub token: u64,
    /// Bytes received or written, where the provider tells (0 where it does not:
    /// `verbs;ofi_rxm` gives no length with an immediate, for one).
    pub length: usize,
    /// The immediate (`FI_REMOTE_CQ_DATA`), if one came. Bits beyond the provider's
    /// width were refused at the sender, so what is here is whole.
    pub data: Option<u64>,
    /// The tag of a tagged receive, as the sender gave it; 0 for anything else.
    pub tag: u64,
    pub(crate) source: u64,
}

/// An operation that failed, or a failure that belongs to no operation (a lost
/// connection, say, or a deadline).
#[derive(Clone)]
pub struct Failure {
    /// What failed, if it was an operation.
    pub kind: Option<CompletionKind>,
    /// The operation.
    pub operation: Option<OperationId>,
    /// The token given at posting; 0 where there is no operation.
    pub token: u64,
    /// Why.
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

/// For people, as with [`Error`].
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

/// What a queue hands out.
pub type Outcome = Result<Completion, Failure>;
