//! Operations that wait until earlier ones with the same peer have completed.

use gpu::CopyMethod;

use super::operations::OperationContext;
use super::route::Route;
use crate::blocks::BlockQueue;
use crate::path::Operation;

/// An operation behind a fence, or an ordered notice.
#[derive(Debug)]
pub(super) struct DeferredOperation {
    pub(super) context: OperationContext,
    /// All epochs before this one must have completed.
    pub(super) after: u64,
    /// None for a notice without data.
    pub(super) transfer: Option<DeferredTransfer>,
}

/// The transfer of an operation.
#[derive(Debug)]
pub(super) struct DeferredTransfer {
    pub(super) operation: Operation,
    pub(super) route: Route,
    pub(super) blocks: BlockQueue,
    pub(super) by: CopyMethod,
}
