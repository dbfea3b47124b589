//! Operations that wait until earlier ones with the same peer have completed.

use gpu::CopyMethod;

use super::copy_queue::OperationContext;
use super::route::Route;
use crate::blocks::BlockQueue;
use crate::path::Operation;

/// An operation behind a fence, or an ordered notice.
#[derive(Debug)]
pub(super) struct DeferredOperation {
    context: OperationContext,
    /// All epochs before this one must have completed.
    after: u64,
    transfer: Option<DeferredTransfer>,
}

/// The transfer of an operation.
#[derive(Debug)]
pub(super) struct DeferredTransfer {
    pub(super) operation: Operation,
    pub(super) route: Route,
    pub(super) blocks: BlockQueue,
    pub(super) by: CopyMethod,
}

impl DeferredOperation {
    /// A notice without data.
    pub(super) fn notice(context: OperationContext, after: u64) -> Self {
        Self { context, after, transfer: None }
    }

    pub(super) fn transfer(
        context: OperationContext,
        after: u64,
        transfer: DeferredTransfer,
    ) -> Self {
        Self { context, after, transfer: Some(transfer) }
    }

    pub(super) fn peer(&self) -> u32 {
        self.context.peer
    }

    pub(super) fn after(&self) -> u64 {
        self.after
    }

    pub(super) fn into_context(self) -> OperationContext {
        self.context
    }

    pub(super) fn into_parts(self) -> (OperationContext, Option<DeferredTransfer>) {
        (self.context, self.transfer)
    }
}
