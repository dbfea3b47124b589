//! Maps errors of `ipc` and `gpu` to those of this crate.

use std::io;

use ipc::{AllocatorError, QueueError, SegmentError};
use nix::libc;

use crate::error::{Error, ErrorKind};

pub(crate) fn from_queue(operation: &'static str, cause: QueueError) -> Error {
    let kind = match cause {
        QueueError::Full => ErrorKind::WouldBlock,
        QueueError::TooManySubscribers => ErrorKind::TooMany,
        QueueError::NotSubscribed => ErrorKind::Evicted,
        QueueError::LockTimeout(_) => ErrorKind::DeadlineExceeded,
        QueueError::Forked => ErrorKind::Forked,
        QueueError::NotAQueue { .. } => ErrorKind::Malformed,
        _ => ErrorKind::Failed,
    };
    Error::because(operation, kind, cause)
}

pub(crate) fn from_allocator(operation: &'static str, cause: AllocatorError) -> Error {
    let kind = match cause {
        AllocatorError::OutOfMemory { .. } | AllocatorError::OutOfBlocks { .. } => {
            ErrorKind::WouldBlock
        }
        AllocatorError::InvalidSize { .. } | AllocatorError::InvalidExtent { .. } => {
            ErrorKind::InvalidArgument
        }
        AllocatorError::LockTimeout(_) => ErrorKind::DeadlineExceeded,
        AllocatorError::Forked => ErrorKind::Forked,
        AllocatorError::NotAnAllocator { .. } | AllocatorError::Corrupt => ErrorKind::Malformed,
        _ => ErrorKind::Failed,
    };
    Error::because(operation, kind, cause)
}

pub(crate) fn from_segment(operation: &'static str, cause: SegmentError) -> Error {
    let kind = match cause {
        SegmentError::LayoutMismatch { .. } => ErrorKind::VersionMismatch,
        SegmentError::NotASegment { .. } | SegmentError::NotReady => ErrorKind::Malformed,
        _ => ErrorKind::Failed,
    };
    Error::because(operation, kind, cause)
}

pub(crate) fn from_device(operation: &'static str, cause: gpu::Error) -> Error {
    if let (gpu::ErrorKind::OutOfMemory, Some(code)) = (cause.kind(), cause.code())
        && let Some(limit) =
            [libc::EMFILE, libc::EFBIG].into_iter().find(|it| code == i64::from(*it))
    {
        return Error::of(operation, io::Error::from_raw_os_error(limit));
    }
    let kind = match cause.kind() {
        gpu::ErrorKind::DeadlineExceeded => ErrorKind::DeadlineExceeded,
        gpu::ErrorKind::OverBudget | gpu::ErrorKind::OutOfMemory => ErrorKind::OverBudget,
        gpu::ErrorKind::OutOfBounds | gpu::ErrorKind::InvalidArgument => ErrorKind::InvalidArgument,
        gpu::ErrorKind::InvalidHandle => ErrorKind::Malformed,
        _ => ErrorKind::Failed,
    };
    Error::because(operation, kind, cause)
}
