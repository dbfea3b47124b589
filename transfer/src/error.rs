//! The one error type of this crate.

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;

use ipc::ChannelError;

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
        Stale = "stale",
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

    /// An error of a lower layer.
    pub(crate) fn caused_by(operation: &'static str, cause: impl Cause) -> Self {
        let mut error = Self::bare(operation, cause.kind_here());
        error.0.cause = Some(Arc::new(cause));
        error
    }

    /// An error of a channel whose peer is identified by the path of its socket. The path is named
    /// only once.
    pub(crate) fn of_channel_at(operation: &'static str, path: &Path, cause: ChannelError) -> Self {
        use ChannelError::{InUse, InvalidPath, System};
        let error = match cause {
            System { call, cause, .. } => {
                Self::caused_by(operation, System { call, path: None, cause })
            }
            InUse(_) => failed(operation)("another process listens there. Choose another path"),
            InvalidPath(_) => {
                failed(operation)("the path of a socket has 1 to 107 bytes and no NUL")
            }
            other => Self::caused_by(operation, other),
        };
        error.at(path)
    }

    /// An error of creating a socket or its directory, with the remedy.
    pub(crate) fn of_listening_at(
        operation: &'static str,
        path: &Path,
        cause: ChannelError,
    ) -> Self {
        match cause {
            ChannelError::System { call, cause, .. } => {
                Self::of_file(operation, call, &cause).at(path)
            }
            other => Self::of_channel_at(operation, path, other),
        }
    }

    /// An error of the system with a file, directory or socket, with the remedy if it is known. The
    /// caller names the path.
    pub(crate) fn of_file(operation: &'static str, call: &str, cause: &io::Error) -> Self {
        let kind = match cause.kind() {
            io::ErrorKind::PermissionDenied => ErrorKind::Denied,
            _ => ErrorKind::Failed,
        };
        let remedy = errors::files::remedy(cause).map(|remedy| format!(". {remedy}"));
        Self::new(operation, kind, format!("{call}: {cause}{}", remedy.unwrap_or_default()))
    }

    /// Did the driver of a device refuse the memory, for a reason other than a lack of memory or a
    /// failed device? Checks of this library have no code of a driver.
    pub(crate) fn is_refusal_of_driver(&self) -> bool {
        use gpu::ErrorKind::{DeviceFailed, NoPeerAccess, NoSuchDevice, OutOfMemory};
        let of_device = self.source().and_then(|cause| cause.downcast_ref::<gpu::Error>());
        of_device.is_some_and(|cause| match cause.kind() {
            OutOfMemory | DeviceFailed => false,
            NoPeerAccess | NoSuchDevice => true,
            _ => cause.code().is_some(),
        })
    }

    /// The cause, in a few words.
    pub(crate) fn reason(&self) -> String {
        match &self.0.cause {
            Some(cause) if self.0.detail.is_empty() => cause.to_string(),
            _ => self.0.detail.clone(),
        }
    }

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

/// A failure of the system, described by its text.
pub(crate) fn failed<E: ToString>(operation: &'static str) -> impl Fn(E) -> Error {
    move |cause| Error::new(operation, ErrorKind::Failed, cause.to_string())
}

/// An error of a lower layer.
pub(crate) trait Cause: StdError + Send + Sync + 'static {
    /// The kind of this crate's error.
    fn kind_here(&self) -> ErrorKind;
}

impl Cause for gpu::Error {
    fn kind_here(&self) -> ErrorKind {
        match self.kind() {
            gpu::ErrorKind::NoSuchDevice | gpu::ErrorKind::Unavailable => ErrorKind::NoSuchDevice,
            gpu::ErrorKind::NoPeerAccess => ErrorKind::NoPeerAccess,
            gpu::ErrorKind::InvalidHandle => ErrorKind::WrongMemory,
            gpu::ErrorKind::OutOfBounds => ErrorKind::OutOfBounds,
            gpu::ErrorKind::NotAllowed => ErrorKind::NotAllowed,
            gpu::ErrorKind::DeadlineExceeded => ErrorKind::DeadlineExceeded,
            gpu::ErrorKind::Forked => ErrorKind::Forked,
            _ => ErrorKind::Failed,
        }
    }
}

impl Cause for fabric::Error {
    fn kind_here(&self) -> ErrorKind {
        match self.kind() {
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
        }
    }
}

impl Cause for ChannelError {
    fn kind_here(&self) -> ErrorKind {
        match self {
            Self::DeadlineExceeded { .. } => ErrorKind::DeadlineExceeded,
            Self::Closed => ErrorKind::Closed,
            Self::TooLong { .. } => ErrorKind::Malformed,
            _ => ErrorKind::Failed,
        }
    }
}

/// A result of a lower layer, whose error gets the operation that failed here.
pub(crate) trait Context<T> {
    fn during(self, operation: &'static str) -> Result<T>;
}

impl<T, E: Cause> Context<T> for std::result::Result<T, E> {
    fn during(self, operation: &'static str) -> Result<T> {
        self.map_err(|cause| Error::caused_by(operation, cause))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = &*self.0;
        let peer = inner.peer.as_deref().map(errors::escape_control);
        let object = peer.map(|peer| match inner.is_path {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_of_a_label_are_escaped() {
        let error =
            Error::new("connect to agent", ErrorKind::Closed, "it has ended").with("a\x1b[31m\n");
        assert_eq!(
            error.to_string(),
            "connect to agent (peer a\\u{1b}[31m\\n) failed: closed: it has ended"
        );
        assert_eq!(error.peer(), Some("a\x1b[31m\n"));
    }
}
