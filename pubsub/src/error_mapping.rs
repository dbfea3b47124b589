//! Names the operation of failures of `ipc`, `gpu` and the system, and maps them to errors of this
//! crate.

use std::{fmt, io};

use ipc::{AllocatorError, ChannelError, QueueError, SegmentError};
use nix::errno::Errno;
use nix::libc;

use crate::error::{Error, ErrorKind, Result};

/// A failure of a lower layer, or a result with one.
pub(crate) trait During {
    type Named;

    /// Converts to an error, or result, of this operation.
    fn during(self, operation: &'static str) -> Self::Named;
}

impl<T, E: During> During for std::result::Result<T, E> {
    type Named = std::result::Result<T, E::Named>;

    #[inline]
    fn during(self, operation: &'static str) -> Self::Named {
        self.map_err(|cause| cause.during(operation))
    }
}

/// A result whose error gets a subject.
pub(crate) trait On {
    fn on(self, name: impl fmt::Display) -> Self;

    fn at(self, subject: impl fmt::Display) -> Self;
}

impl<T> On for Result<T> {
    #[inline]
    fn on(self, name: impl fmt::Display) -> Self {
        self.map_err(|error| error.on(name))
    }

    #[inline]
    fn at(self, subject: impl fmt::Display) -> Self {
        self.map_err(|error| error.at(subject))
    }
}

macro_rules! kinds {
    ($($cause:ty { $($which:pat => $kind:ident,)* })*) => {$(
        impl During for $cause {
            type Named = Error;

            fn during(self, operation: &'static str) -> Error {
                let kind = match &self {
                    $($which => ErrorKind::$kind,)*
                    _ => ErrorKind::Failed,
                };
                Error::because(operation, kind, self)
            }
        }
    )*};
}

kinds! {
    io::Error {}
    Errno {}
    getrandom::Error {}
    QueueError {
        Self::Full => WouldBlock,
        Self::TooManySubscribers => TooMany,
        Self::NotSubscribed => Evicted,
        Self::LockTimeout(_) => DeadlineExceeded,
        Self::Forked => Forked,
        Self::NotAQueue { .. } => Malformed,
    }
    AllocatorError {
        Self::OutOfMemory { .. } | Self::OutOfBlocks { .. } => WouldBlock,
        Self::InvalidSize { .. } | Self::InvalidExtent { .. } => InvalidArgument,
        Self::LockTimeout(_) => DeadlineExceeded,
        Self::Forked => Forked,
        Self::NotAnAllocator { .. } | Self::Corrupt => Malformed,
    }
    SegmentError {
        Self::LayoutMismatch { .. } => VersionMismatch,
        Self::NotASegment { .. } | Self::NotReady => Malformed,
    }
    ChannelError {
        Self::Closed => Closed,
        Self::TooManyDescriptorsInFlight | Self::DescriptorsLost { .. } => TooMany,
        Self::DeadlineExceeded { .. } => DeadlineExceeded,
    }
}

impl During for gpu::Error {
    type Named = Error;

    fn during(self, operation: &'static str) -> Error {
        use gpu::ErrorKind as Cause;
        if let (Cause::OutOfMemory, Some(code)) = (self.kind(), self.code())
            && let Some(limit) =
                [libc::EMFILE, libc::EFBIG].into_iter().find(|it| code == i64::from(*it))
        {
            return Error::of(operation, io::Error::from_raw_os_error(limit));
        }
        let kind = match self.kind() {
            Cause::DeadlineExceeded => ErrorKind::DeadlineExceeded,
            Cause::OverBudget | Cause::OutOfMemory => ErrorKind::OverBudget,
            Cause::OutOfBounds | Cause::InvalidArgument => ErrorKind::InvalidArgument,
            Cause::InvalidHandle => ErrorKind::Malformed,
            _ => ErrorKind::Failed,
        };
        Error::because(operation, kind, self)
    }
}
