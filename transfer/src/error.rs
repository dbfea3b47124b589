//! The one error type of this crate.

use std::error::Error as StdError;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

errors::define! {
    /// The kinds of failure that a program can act on.
    pub enum ErrorKind {
        /// Bytes from outside are truncated, altered or contradict themselves.
        Malformed = "malformed",
        /// This build does not support the version.
        VersionMismatch = "version mismatch",
        /// The description does not fit the memory.
        OutOfBounds = "out of bounds",
        /// The memory is on a device that this process does not see.
        NoSuchDevice = "no such device",
        /// The device cannot reach the memory.
        NoPeerAccess = "no peer access",
        /// The received descriptors are not those of the described memory.
        WrongMemory = "not the memory described",
        /// No memory is shared under this name, or no operation has this token.
        Unknown = "unknown",
        /// No path is possible; the detail has a reason for each.
        NoPath = "no path",
        /// The region was withdrawn, or its agent was restarted.
        Stale = "gone",
        /// The region's rights do not allow it.
        NotAllowed = "not allowed",
        /// A limit was reached.
        TooMany = "too many",
        /// Access is denied, or the peer is not trusted.
        Denied = "denied",
        /// The deadline passed.
        DeadlineExceeded = "deadline exceeded",
        /// The peer closed the connection, or has died.
        Closed = "closed",
        /// The operation was not started, because one that it waited for failed.
        Cancelled = "cancelled",
        /// The handle was made before a fork, and belongs to the parent.
        Forked = "used after a fork",
        /// A lower layer failed; the cause has the details.
        Failed = "failed",
    }

    /// An error: the operation, the peer, and the cause.
    pub struct Error {
        peer: Option<String>,
        is_path: bool,
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

    fn caused_by(
        operation: &'static str,
        kind: ErrorKind,
        cause: impl StdError + Send + Sync + 'static,
    ) -> Self {
        let mut error = Self::bare(operation, kind);
        error.0.cause = Some(Arc::new(cause));
        error
    }

    /// An error of a device.
    pub(crate) fn of_device(operation: &'static str, cause: gpu::Error) -> Self {
        let kind = match cause.kind() {
            gpu::ErrorKind::NoSuchDevice | gpu::ErrorKind::Unavailable => ErrorKind::NoSuchDevice,
            gpu::ErrorKind::NoPeerAccess => ErrorKind::NoPeerAccess,
            gpu::ErrorKind::InvalidHandle => ErrorKind::WrongMemory,
            gpu::ErrorKind::OutOfBounds => ErrorKind::OutOfBounds,
            gpu::ErrorKind::NotAllowed => ErrorKind::NotAllowed,
            gpu::ErrorKind::DeadlineExceeded => ErrorKind::DeadlineExceeded,
            gpu::ErrorKind::Forked => ErrorKind::Forked,
            _ => ErrorKind::Failed,
        };
        Self::caused_by(operation, kind, cause)
    }

    /// An error of a fabric.
    pub(crate) fn of_fabric(operation: &'static str, cause: fabric::Error) -> Self {
        let kind = match cause.kind() {
            fabric::ErrorKind::DeadlineExceeded => ErrorKind::DeadlineExceeded,
            // This crate never cancels: the provider does when a connection is lost.
            fabric::ErrorKind::Closed
            | fabric::ErrorKind::Cancelled
            | fabric::ErrorKind::ConnectionLost
            | fabric::ErrorKind::ConnectionRefused => ErrorKind::Closed,
            fabric::ErrorKind::OutOfBounds => ErrorKind::OutOfBounds,
            fabric::ErrorKind::MalformedDescriptor => ErrorKind::Malformed,
            fabric::ErrorKind::VersionMismatch => ErrorKind::VersionMismatch,
            _ => ErrorKind::Failed,
        };
        Self::caused_by(operation, kind, cause)
    }

    /// An error of a channel.
    pub(crate) fn of_channel(operation: &'static str, cause: ipc::ChannelError) -> Self {
        let kind = match cause {
            ipc::ChannelError::DeadlineExceeded { .. } => ErrorKind::DeadlineExceeded,
            ipc::ChannelError::Closed => ErrorKind::Closed,
            ipc::ChannelError::TooLong { .. } => ErrorKind::Malformed,
            _ => ErrorKind::Failed,
        };
        Self::caused_by(operation, kind, cause)
    }

    /// An error of a channel whose peer is identified by the path of its socket. The path is named
    /// only once.
    pub(crate) fn of_channel_at(
        operation: &'static str,
        path: &Path,
        cause: ipc::ChannelError,
    ) -> Self {
        use ipc::ChannelError::{InUse, InvalidPath, System};
        let failed = |detail| Self::new(operation, ErrorKind::Failed, detail);
        let error = match cause {
            System { call, cause, .. } => {
                Self::of_channel(operation, System { call, path: None, cause })
            }
            InUse(_) => failed("another process listens there. Choose another path"),
            InvalidPath(_) => failed("the path of a socket has 1 to 107 bytes and no NUL"),
            other => Self::of_channel(operation, other),
        };
        error.at(path)
    }

    /// The cause, in a few words.
    pub(crate) fn reason(&self) -> String {
        match &self.0.cause {
            Some(cause) if self.0.detail.is_empty() => cause.to_string(),
            _ => self.0.detail.clone(),
        }
    }

    /// The same failure with another kind.
    pub(crate) fn with_kind(mut self, kind: ErrorKind) -> Self {
        self.0.kind = kind;
        self
    }

    pub(crate) fn with(mut self, peer: impl fmt::Display) -> Self {
        (self.0.peer, self.0.is_path) = (Some(peer.to_string()), false);
        self
    }

    /// Names the path of a socket, card or directory in place of a peer.
    pub(crate) fn at(mut self, path: &Path) -> Self {
        (self.0.peer, self.0.is_path) = (Some(path.display().to_string()), true);
        self
    }

    /// The peer, if the operation had one.
    #[must_use]
    pub fn peer(&self) -> Option<&str> {
        self.0.peer.as_deref()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = &*self.0;
        let object = inner.peer.as_ref().map(|peer| match inner.is_path {
            true => format!("at {peer}"),
            false => format!("(peer {peer})"),
        });
        let object = object.as_deref();
        errors::write(f, inner.operation, object, inner.kind.label(), &inner.detail, self.source())
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.cause.as_deref().map(|cause| cause as _)
    }
}
