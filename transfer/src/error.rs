//! The one error type of this crate.

use std::error::Error as StdError;
use std::fmt;
use std::path::Path;

/// What went wrong, as far as a program can act on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Bytes from outside that are truncated, altered or contradict themselves.
    Malformed,
    /// A version that this build does not speak.
    VersionMismatch,
    /// The description does not fit the memory.
    OutOfBounds,
    /// The memory lies on a device that this process does not see.
    NoSuchDevice,
    /// The device cannot reach the memory.
    NoPeerAccess,
    /// The descriptors that came are not the memory that was described.
    WrongMemory,
    /// Nothing is shared under this name; or nothing is known by this token.
    Unknown,
    /// No path leads there; the detail has a reason for each.
    NoPath,
    /// What was described is gone: withdrawn, or its agent was started anew.
    Stale,
    /// The region's rights do not allow it.
    NotAllowed,
    /// There is no place for one more.
    TooMany,
    /// The other side may not, or we may not trust it.
    Denied,
    /// The deadline passed.
    DeadlineExceeded,
    /// The other side closed the connection, or is dead.
    Closed,
    /// The handle was made before a fork, and belongs to the parent.
    Forked,
    /// Something below failed; the cause says what.
    Failed,
}

impl ErrorKind {
    fn label(self) -> &'static str {
        match self {
            Self::Malformed => "malformed",
            Self::VersionMismatch => "version mismatch",
            Self::OutOfBounds => "out of bounds",
            Self::NoSuchDevice => "no such device",
            Self::NoPeerAccess => "no peer access",
            Self::WrongMemory => "not the memory described",
            Self::Unknown => "unknown",
            Self::NoPath => "no path",
            Self::Stale => "gone",
            Self::NotAllowed => "not allowed",
            Self::TooMany => "too many",
            Self::Denied => "denied",
            Self::DeadlineExceeded => "deadline exceeded",
            Self::Closed => "closed",
            Self::Forked => "used after a fork",
            Self::Failed => "failed",
        }
    }
}

/// An error: what was tried, with whom, and why it failed.
pub struct Error(Box<Inner>);

#[derive(Debug)]
struct Inner {
    operation: &'static str,
    kind: ErrorKind,
    peer: Option<String>,
    detail: String,
    cause: Option<Box<dyn StdError + Send + Sync>>,
}

/// What calls of this crate give.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn new(operation: &'static str, kind: ErrorKind, detail: impl Into<String>) -> Self {
        let detail = detail.into();
        Self(Box::new(Inner { operation, kind, peer: None, detail, cause: None }))
    }

    /// What a device said.
    pub(crate) fn of_device(operation: &'static str, cause: gpu::Error) -> Self {
        let kind = match cause.kind() {
            gpu::ErrorKind::NoSuchDevice | gpu::ErrorKind::Unavailable => ErrorKind::NoSuchDevice,
            gpu::ErrorKind::NoPeerAccess => ErrorKind::NoPeerAccess,
            gpu::ErrorKind::InvalidHandle => ErrorKind::WrongMemory,
            gpu::ErrorKind::OutOfBounds => ErrorKind::OutOfBounds,
            gpu::ErrorKind::DeadlineExceeded => ErrorKind::DeadlineExceeded,
            gpu::ErrorKind::Forked => ErrorKind::Forked,
            _ => ErrorKind::Failed,
        };
        let mut error = Self::new(operation, kind, "");
        error.0.cause = Some(Box::new(cause));
        error
    }

    /// What a fabric said.
    pub(crate) fn of_fabric(operation: &'static str, cause: fabric::Error) -> Self {
        let kind = match cause.kind() {
            fabric::ErrorKind::DeadlineExceeded => ErrorKind::DeadlineExceeded,
            // Nobody here cancels: the provider does, when a connection is gone.
            fabric::ErrorKind::Closed
            | fabric::ErrorKind::Cancelled
            | fabric::ErrorKind::ConnectionLost
            | fabric::ErrorKind::ConnectionRefused => ErrorKind::Closed,
            fabric::ErrorKind::OutOfBounds => ErrorKind::OutOfBounds,
            fabric::ErrorKind::MalformedDescriptor => ErrorKind::Malformed,
            fabric::ErrorKind::VersionMismatch => ErrorKind::VersionMismatch,
            _ => ErrorKind::Failed,
        };
        let mut error = Self::new(operation, kind, "");
        error.0.cause = Some(Box::new(cause));
        error
    }

    /// What a channel said.
    pub(crate) fn of_channel(operation: &'static str, cause: ipc::ChannelError) -> Self {
        let kind = match cause {
            ipc::ChannelError::DeadlineExceeded { .. } => ErrorKind::DeadlineExceeded,
            ipc::ChannelError::Closed => ErrorKind::Closed,
            ipc::ChannelError::TooLong { .. } => ErrorKind::Malformed,
            _ => ErrorKind::Failed,
        };
        let mut error = Self::new(operation, kind, "");
        error.0.cause = Some(Box::new(cause));
        error
    }

    /// What a channel said, where the peer is known by the path of its socket, which is
    /// then named once.
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
            InUse(_) => failed("somebody listens there already"),
            InvalidPath(_) => failed("the path of a socket has 1 to 107 bytes, and no zero"),
            other => Self::of_channel(operation, other),
        };
        error.with(path.display())
    }

    /// Why, in a few words.
    pub(crate) fn reason(&self) -> String {
        match &self.0.cause {
            Some(cause) if self.0.detail.is_empty() => cause.to_string(),
            _ => self.0.detail.clone(),
        }
    }

    /// The same failure, of another kind.
    pub(crate) fn and_kind(mut self, kind: ErrorKind) -> Self {
        self.0.kind = kind;
        self
    }

    pub(crate) fn with(mut self, peer: impl fmt::Display) -> Self {
        self.0.peer = Some(peer.to_string());
        self
    }

    /// What was tried.
    #[must_use]
    pub fn operation(&self) -> &'static str {
        self.0.operation
    }

    /// What kind of failure it is.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// With whom, if with somebody.
    #[must_use]
    pub fn peer(&self) -> Option<&str> {
        self.0.peer.as_deref()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { operation, kind, peer, detail, cause } = &*self.0;
        write!(f, "{operation}")?;
        if let Some(peer) = peer {
            write!(f, " ({peer})")?;
        }
        write!(f, ": {}", kind.label())?;
        if !detail.is_empty() {
            write!(f, ": {detail}")?;
        }
        if let Some(cause) = cause {
            write!(f, ": {cause}")?;
        }
        Ok(())
    }
}

/// As it is printed for people, since that is what a program shows whose `main` returns it; with
/// `{:#?}`, all that is known.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match f.alternate() {
            true => f.debug_tuple("Error").field(&self.0).finish(),
            false => fmt::Display::fmt(self, f),
        }
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.cause.as_deref().map(|cause| cause as _)
    }
}
