//! The one error type of this crate.

use std::error::Error as StdError;
use std::fmt;

/// What went wrong, as far as a program can act on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An argument that can never be right: the detail says which, and what is possible.
    InvalidArgument,
    /// The topic exists with other settings; the detail prints both.
    SettingsDiffer,
    /// There is no such topic, node or publisher.
    Unknown,
    /// The budget does not allow it; the detail has the figures.
    OverBudget,
    /// The message is longer than the topic's largest.
    TooLong,
    /// There is no place for one more.
    TooMany,
    /// The publisher has as many [loans](crate::Loan) as its topic allows each; the detail says how
    /// many that is.
    TooManyLoans,
    /// Nothing was there, or no room was free, and the caller would not wait.
    WouldBlock,
    /// The deadline passed; the detail says what was waited for.
    DeadlineExceeded,
    /// A subscriber was removed: it held samples for longer than the topic allows.
    Evicted,
    /// The node service may not be used by this process, or not trusted by it.
    Denied,
    /// Another process serves the node, and stays; the detail says which.
    AlreadyServed,
    /// Bytes from outside that are truncated, altered or contradict themselves.
    Malformed,
    /// The other side speaks another version.
    VersionMismatch,
    /// The node, or what belongs to it, was closed or lost.
    Closed,
    /// The message will never be there: its publisher died, or its device failed, before a stream
    /// had written it.
    Poisoned,
    /// The handle was made before a fork, and belongs to the parent.
    Forked,
    /// No provider leads to other nodes, or not the one that was asked for; the detail says why.
    NoProvider,
    /// Something below failed; the cause says what.
    Failed,
}

impl ErrorKind {
    fn label(self) -> &'static str {
        match self {
            Self::InvalidArgument => "invalid argument",
            Self::SettingsDiffer => "settings differ",
            Self::Unknown => "not found",
            Self::OverBudget => "over budget",
            Self::TooLong => "too long",
            Self::TooMany => "too many",
            Self::TooManyLoans => "too many loans",
            Self::WouldBlock => "would block",
            Self::DeadlineExceeded => "deadline exceeded",
            Self::Evicted => "evicted",
            Self::Denied => "denied",
            Self::AlreadyServed => "already served",
            Self::Malformed => "malformed",
            Self::VersionMismatch => "version mismatch",
            Self::Closed => "closed",
            Self::Poisoned => "poisoned",
            Self::Forked => "used after a fork",
            Self::NoProvider => "no provider",
            Self::Failed => "failed",
        }
    }
}

/// An error: what was tried, with whom or on what, and why it failed.
pub struct Error(Box<Inner>);

#[derive(Debug)]
struct Inner {
    operation: &'static str,
    kind: ErrorKind,
    subject: Option<String>,
    detail: String,
    cause: Option<Box<dyn StdError + Send + Sync>>,
}

/// What calls of this crate give.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn new(operation: &'static str, kind: ErrorKind, detail: impl Into<String>) -> Self {
        let detail = detail.into();
        Self(Box::new(Inner { operation, kind, subject: None, detail, cause: None }))
    }

    /// Something below this crate failed.
    pub(crate) fn of(
        operation: &'static str,
        cause: impl Into<Box<dyn StdError + Send + Sync>>,
    ) -> Self {
        Self::because(operation, ErrorKind::Failed, cause)
    }

    /// Something below failed, and it is known what that means here.
    pub(crate) fn because(
        operation: &'static str,
        kind: ErrorKind,
        cause: impl Into<Box<dyn StdError + Send + Sync>>,
    ) -> Self {
        let mut error = Self::new(operation, kind, "");
        error.0.cause = Some(cause.into());
        error
    }

    /// Names the topic, node or path that it is about, if none is named yet.
    pub(crate) fn on(mut self, subject: impl fmt::Display) -> Self {
        self.0.subject.get_or_insert_with(|| subject.to_string());
        self
    }

    /// What was tried.
    #[must_use]
    pub fn operation(&self) -> &'static str {
        self.0.operation
    }

    /// What went wrong.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The topic, node or path that it is about.
    #[must_use]
    pub fn subject(&self) -> Option<&str> {
        self.0.subject.as_deref()
    }

    /// More about it, in words; may be empty.
    #[must_use]
    pub fn detail(&self) -> &str {
        &self.0.detail
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = &self.0;
        write!(f, "{}", inner.operation)?;
        if let Some(subject) = &inner.subject {
            write!(f, " ({subject})")?;
        }
        write!(f, ": {}", inner.kind.label())?;
        if !inner.detail.is_empty() {
            write!(f, ": {}", inner.detail)?;
        }
        match &inner.cause {
            Some(cause) => write!(f, ": {cause}"),
            None => Ok(()),
        }
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
        self.0.cause.as_ref().map(|cause| &**cause as &(dyn StdError + 'static))
    }
}
