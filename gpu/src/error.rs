//! The only error type of this crate.

use std::fmt;

use crate::device_name::DeviceName;

errors::define! {
    /// The kind of an error, grouped by what a program can do about it.
    pub enum ErrorKind {
        /// The implementation is not available: no driver library, a too old driver, or no
        /// device.
        Unavailable = "not available",
        /// There is no such device.
        NoSuchDevice = "no such device",
        /// This device, or this driver, does not support the operation.
        NotSupported = "not supported",
        /// An argument is wrong; the detail names the violated precondition.
        InvalidArgument = "invalid argument",
        /// The range is outside of its memory.
        OutOfBounds = "out of bounds",
        /// A handle of another process does not describe memory of this device.
        InvalidHandle = "invalid handle",
        /// One device cannot access another's memory directly, or access was not enabled.
        NoPeerAccess = "no peer access",
        /// The budget does not allow it. The device may have more memory.
        OverBudget = "over budget",
        /// The device, or the system, has no more memory.
        OutOfMemory = "out of memory",
        /// The deadline passed. Operations in flight continue, and keep their memory.
        DeadlineExceeded = "deadline exceeded",
        /// The device, its context or the driver has failed or was shut down: only a new
        /// process helps.
        DeviceFailed = "device failed",
        /// The memory is read-only.
        NotAllowed = "not allowed",
        /// The handle was made before a fork, and belongs to the parent.
        Forked = "used after a fork",
        /// Any other error; code and detail have more information.
        Other = "failed",
    }

    /// An error: the operation, the device, and the cause.
    ///
    /// ```
    /// use gpu::{Device, ErrorKind};
    /// let error = Device::open("emulated:99".parse().unwrap()).unwrap_err();
    /// assert_eq!(error.kind(), ErrorKind::NoSuchDevice);
    /// assert!(error.to_string().starts_with("open emulated:99 failed: no such device"), "{error}");
    /// ```
    pub struct Error {
        device: Option<DeviceName>,
        is_object: bool,
        code: Option<i64>,
        detail: String,
    }
}

impl Error {
    pub(crate) fn new(operation: &'static str, kind: ErrorKind, detail: impl Into<String>) -> Self {
        let mut error = Self::bare(operation, kind);
        error.0.detail = detail.into();
        error
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

    /// A forked child uses a handle of its parent.
    pub(crate) fn forked(operation: &'static str) -> Self {
        let detail = "the handle belongs to the parent process; a driver does not survive a fork. \
                      Use devices in a process that was started with exec";
        Self::new(operation, ErrorKind::Forked, detail)
    }

    pub(crate) fn with_code(mut self, code: i64) -> Self {
        self.0.code = Some(code);
        self
    }

    pub(crate) fn with_kind(mut self, kind: ErrorKind) -> Self {
        self.0.kind = kind;
        self
    }

    pub(crate) fn with_remedy(mut self, remedy: &str) -> Self {
        self.0.detail = format!("{}. {remedy}", self.0.detail);
        self
    }

    pub(crate) fn on(mut self, device: DeviceName) -> Self {
        self.0.device.get_or_insert(device);
        self
    }

    /// The device is the object of the operation.
    pub(crate) fn of(mut self, device: DeviceName) -> Self {
        self.0.is_object |= self.0.device.is_none();
        self.on(device)
    }

    /// The device, if the error concerns one.
    #[must_use]
    pub fn device(&self) -> Option<DeviceName> {
        self.0.device
    }

    /// The number that the driver or the system returned.
    #[must_use]
    pub fn code(&self) -> Option<i64> {
        self.0.code
    }
}

/// Does this error prove that no operation on the device is in flight any more? It does if the
/// device, its context or the driver has ended, since no copy outlives them; and for a handle
/// of a parent process. Any other error of a query only means that the query failed: the
/// operation may be in flight.
///
/// ```
/// let missing = gpu::Device::open("emulated:99".parse().unwrap()).unwrap_err();
/// assert!(!gpu::proves_idle(&missing));
/// ```
#[must_use]
pub fn proves_idle(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::DeviceFailed | ErrorKind::Forked)
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = &*self.0;
        let preposition = if inner.is_object { "" } else { "on " };
        let object = inner.device.map(|device| format!("{preposition}{device}"));
        let (kind, object) = (inner.kind.label(), object.as_deref());
        errors::write(f, inner.operation, object, kind, &inner.detail, None)
    }
}

impl std::error::Error for Error {}
