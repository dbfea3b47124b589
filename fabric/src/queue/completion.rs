//! What a completion queue tells.

use std::fmt;

use crate::error::Error;

/// Names one posted operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct OperationId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
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
    /// The immediate.
    pub data: Option<u64>,
    /// The tag, for tagged receives.
    pub tag: u64,
    /// Where a message lies in a buffer that takes many.
    pub offset: usize,
    /// The posted buffer takes no more messages.
    pub exhausted: bool,
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

impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Failure({self})")
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
