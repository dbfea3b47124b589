//! What the errors of `ipc` and `gpu` mean here.

use ipc::{AllocatorError, QueueError, SegmentError};

use crate::error::{Error, ErrorKind};

pub(crate) fn of_queue(operation: &'static str, cause: QueueError) -> Error {
    let kind = match cause {
        QueueError::Full => ErrorKind::WouldBlock,
        QueueError::TooManySubscribers => ErrorKind::TooMany,
        QueueError::NotSubscribed => ErrorKind::Evicted,
        QueueError::Held(_) => ErrorKind::DeadlineExceeded,
        QueueError::Forked => ErrorKind::Forked,
        QueueError::NotAQueue { .. } => ErrorKind::Malformed,
        _ => ErrorKind::Failed,
    };
    Error::because(operation, kind, cause)
}

pub(crate) fn of_allocator(operation: &'static str, cause: AllocatorError) -> Error {
    let kind = match cause {
        AllocatorError::OutOfMemory { .. } | AllocatorError::OutOfBlocks { .. } => {
            ErrorKind::WouldBlock
        }
        AllocatorError::InvalidSize { .. } | AllocatorError::InvalidExtent { .. } => {
            ErrorKind::InvalidArgument
        }
        AllocatorError::Held(_) => ErrorKind::DeadlineExceeded,
        AllocatorError::Forked => ErrorKind::Forked,
        AllocatorError::NotAnAllocator { .. } | AllocatorError::Corrupt => ErrorKind::Malformed,
        _ => ErrorKind::Failed,
    };
    Error::because(operation, kind, cause)
}

pub(crate) fn of_segment(operation: &'static str, cause: SegmentError) -> Error {
    let kind = match cause {
        SegmentError::OtherLayout { .. } => ErrorKind::VersionMismatch,
        SegmentError::NotASegment { .. } | SegmentError::NotReady => ErrorKind::Malformed,
        _ => ErrorKind::Failed,
    };
    Error::because(operation, kind, cause)
}

pub(crate) fn of_device(operation: &'static str, cause: gpu::Error) -> Error {
    let kind = match cause.kind() {
        gpu::ErrorKind::DeadlineExceeded => ErrorKind::DeadlineExceeded,
        gpu::ErrorKind::OverBudget | gpu::ErrorKind::OutOfMemory => ErrorKind::OverBudget,
        gpu::ErrorKind::OutOfBounds | gpu::ErrorKind::InvalidArgument => ErrorKind::InvalidArgument,
        gpu::ErrorKind::InvalidHandle => ErrorKind::Malformed,
        _ => ErrorKind::Failed,
    };
    Error::because(operation, kind, cause)
}
