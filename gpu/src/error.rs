//! The one error type of this crate.

use std::fmt;

use crate::name::DeviceName;

/// What went wrong, as far as a program can act on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The implementation is not there: no driver library, one that is too old, no device.
    Unavailable,
    /// There is no such device.
    NoSuchDevice,
    /// This device, or this driver, cannot do it.
    NotSupported,
    /// An argument is wrong; the detail says which precondition was not met.
    InvalidArgument,
    /// The range is outside of its memory.
    OutOfBounds,
    /// What came from outside does not describe memory or an event of this device.
    InvalidHandle,
    /// One device cannot reach another's memory directly, or has not been let.
    NoPeerAccess,
    /// The budget does not allow it. The device may have more.
    OverBudget,
    /// The device, or the system, has no more.
    OutOfMemory,
    /// The deadline passed. What was in flight goes on, and keeps its memory.
    DeadlineExceeded,
    /// The device or its context has failed: nothing but a new process helps.
    DeviceFailed,
    /// The handle was made before a fork, and belongs to the parent.
    Forked,
    /// Anything else; code and detail say more.
    Other,
}

impl ErrorKind {
    fn label(self) -> &'static str {
        match self {
            Self::Unavailable => "not available",
            Self::NoSuchDevice => "no such device",
            Self::NotSupported => "not supported",
            Self::InvalidArgument => "invalid argument",
            Self::OutOfBounds => "out of bounds",
            Self::InvalidHandle => "invalid handle",
            Self::NoPeerAccess => "no peer access",
            Self::OverBudget => "over budget",
            Self::OutOfMemory => "out of memory",
            Self::DeadlineExceeded => "deadline exceeded",
            Self::DeviceFailed => "device failed",
            Self::Forked => "used after a fork",
            Self::Other => "failed",
        }
    }
}

/// An error: what was tried, on which device, and why it failed.
///
/// ```
/// use gpu::{Device, ErrorKind};
/// let error = Device::open("stand-in:99".parse().unwrap()).unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::NoSuchDevice);
/// assert!(error.to_string().starts_with("stand-in:99: open: no such device"), "{error}");
/// ```
#[derive(Clone)]
pub struct Error(Box<Inner>);

#[derive(Debug, Clone)]
struct Inner {
    operation: &'static str,
    kind: ErrorKind,
    device: Option<DeviceName>,
    code: Option<i64>,
    detail: String,
}

/// What calls of this crate give.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn new(operation: &'static str, kind: ErrorKind, detail: impl Into<String>) -> Self {
        let detail = detail.into();
        Self(Box::new(Inner { operation, kind, device: None, code: None, detail }))
    }

    /// The last call of the system.
    pub(crate) fn system(operation: &'static str, call: &str) -> Self {
        let cause = std::io::Error::last_os_error();
        let kind = match cause.raw_os_error() {
            Some(libc::ENOMEM | libc::EMFILE | libc::ENFILE | libc::EAGAIN) => {
                ErrorKind::OutOfMemory
            }
            _ => ErrorKind::Other,
        };
        let mut error = Self::new(operation, kind, format!("{call}: {cause}"));
        error.0.code = cause.raw_os_error().map(i64::from);
        error
    }

    pub(crate) fn with_code(mut self, code: i64) -> Self {
        self.0.code = Some(code);
        self
    }

    pub(crate) fn with_kind(mut self, kind: ErrorKind) -> Self {
        self.0.kind = kind;
        self
    }

    pub(crate) fn on(mut self, device: DeviceName) -> Self {
        self.0.device.get_or_insert(device);
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

    /// On which device, if on one.
    #[must_use]
    pub fn device(&self) -> Option<DeviceName> {
        self.0.device
    }

    /// The number that the driver or the system gave.
    #[must_use]
    pub fn code(&self) -> Option<i64> {
        self.0.code
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = &*self.0;
        if let Some(device) = inner.device {
            write!(f, "{device}: ")?;
        }
        write!(f, "{}: {}", inner.operation, inner.kind.label())?;
        if !inner.detail.is_empty() {
            write!(f, ": {}", inner.detail)?;
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

impl std::error::Error for Error {}
