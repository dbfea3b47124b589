//! The only error type of this crate.
//!
//! libfabric returns numbers whose meaning depends on the call, and providers differ in the
//! numbers that they choose. Kinds group errors by what a caller can do next; the number stays
//! readable.

use std::borrow::Cow;
use std::ffi::CStr;
use std::fmt;

use errors::limits::{DescriptorLimit, LimitReached};
use libfabric_sys as sys;

/// libfabric's own error numbers, which are in an unsigned enumeration.
pub(crate) mod number {
    use libfabric_sys as sys;

    pub(crate) const TOO_SMALL: i32 = sys::FI_ETOOSMALL as i32;
    pub(crate) const NO_KEY: i32 = sys::FI_ENOKEY as i32;
    pub(crate) const BAD_FLAGS: i32 = sys::FI_EBADFLAGS as i32;
    pub(crate) const AVAILABLE: i32 = sys::FI_EAVAIL as i32;
    pub(crate) const TRUNCATED: i32 = sys::FI_ETRUNC as i32;
    pub(crate) const NO_RECEIVE: i32 = sys::FI_ENORX as i32;
}

errors::define! {
    /// The kind of an error, grouped by what a program can do about it.
    pub enum ErrorKind {
        /// The provider, the library or its build does not offer this.
        NotSupported = "not supported",
        /// An argument is wrong; the detail names the violated precondition.
        InvalidArgument = "invalid argument",
        /// The queue is full (`FI_EAGAIN`) and the timeout was zero; the caller has to make
        /// progress before it retries.
        WouldBlock = "would block",
        /// The deadline passed. Operations in flight are quarantined, not lost.
        DeadlineExceeded = "deadline exceeded",
        /// The object, or its peer, is closed.
        Closed = "closed",
        /// The operation was cancelled.
        Cancelled = "cancelled",
        /// A message does not fit the receive buffer (`FI_ETRUNC`), or is longer than the
        /// provider moves or injects at once; or connection data is too long.
        Truncated = "truncated",
        /// The region does not grant this kind of access.
        AccessDenied = "access denied",
        /// The range is outside its region.
        OutOfBounds = "out of bounds",
        /// The peer does not know the key (`FI_EKEYREJECTED`), or the key no longer names this
        /// region: its owner may have closed it.
        BadKey = "key rejected",
        /// The requested registration key is already in use.
        KeyInUse = "key in use",
        /// The provider does not offer the requested registration key, or the region has no key
        /// yet because it is not enabled.
        KeyUnavailable = "key unavailable",
        /// No provider satisfies the query or the policy.
        NoProvider = "no provider",
        /// libfabric is not installed, or is older than the headers this was built against.
        NoLibrary = "no library",
        /// The peer refused the connection.
        ConnectionRefused = "connection refused",
        /// The connection to the peer is lost, or was never set up. Operations in flight may or
        /// may not have arrived.
        ConnectionLost = "connection lost",
        /// The object is still in use.
        Busy = "busy",
        /// Memory, file descriptors, queue entries or the locked-memory limit ran out.
        ResourceExhausted = "resources exhausted",
        /// A region descriptor of a peer is truncated, altered or malformed.
        MalformedDescriptor = "malformed descriptor",
        /// A version that this build does not support.
        VersionMismatch = "version mismatch",
        /// The memory is not backed by pages, which the provider requires (`FI_MR_ALLOCATED`).
        NotMapped = "memory not mapped",
        /// Any other error; the code and text have the details.
        Other = "failed",
    }

    /// A fabric error: the operation, the provider, the peer, and the cause.
    ///
    /// ```
    /// use fabric::{ErrorKind, RemoteRegion};
    /// let error = RemoteRegion::decode(b"nonsense").unwrap_err();
    /// assert_eq!(error.kind(), ErrorKind::MalformedDescriptor);
    /// assert!(error.to_string().contains("descriptor"));
    /// ```
    ///
    /// A program acts on the [`kind`](Self::kind); a person reads the text, which names the
    /// operation, the provider, the peer, libfabric's code and the likely cause:
    ///
    /// ```
    /// use fabric::*;
    /// let offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first()?;
    /// let domain = Domain::open(&offer)?;
    /// let error = domain.register(HostMemory::zeroed(64)?, Access::LOCAL)?.describe().unwrap_err();
    /// assert_eq!(error.kind(), ErrorKind::AccessDenied);
    /// assert_eq!(error.provider(), Some(offer.capabilities().provider.as_str()));
    /// assert!(error.code().is_none(), "checked before libfabric is called");
    /// # Ok::<(), fabric::Error>(())
    /// ```
    pub struct Error {
        provider: Option<String>,
        code: Option<i32>,
        provider_code: Option<i32>,
        provider_text: Option<String>,
        peer: Option<String>,
        detail: Option<Cow<'static, str>>,
    }
}

impl ErrorKind {
    fn from_code(code: i32) -> Self {
        match code {
            sys::FI_ENOSYS | sys::FI_EOPNOTSUPP | number::BAD_FLAGS | sys::FI_ENOPROTOOPT => {
                Self::NotSupported
            }
            sys::FI_EINVAL => Self::InvalidArgument,
            sys::FI_EAGAIN => Self::WouldBlock,
            sys::FI_ETIMEDOUT => Self::DeadlineExceeded,
            sys::FI_ECANCELED => Self::Cancelled,
            number::TRUNCATED | sys::FI_EMSGSIZE | number::TOO_SMALL => Self::Truncated,
            sys::FI_EACCES | sys::FI_EPERM => Self::AccessDenied,
            sys::FI_EKEYREJECTED => Self::BadKey,
            number::NO_KEY => Self::KeyInUse,
            sys::FI_ENODATA => Self::NoProvider,
            sys::FI_ECONNREFUSED => Self::ConnectionRefused,
            sys::FI_ECONNABORTED
            | sys::FI_ECONNRESET
            | sys::FI_ENOTCONN
            | sys::FI_ESHUTDOWN
            | sys::FI_EHOSTUNREACH
            | sys::FI_EHOSTDOWN
            | sys::FI_ENETUNREACH
            | sys::FI_EREMOTEIO => Self::ConnectionLost,
            sys::FI_EBUSY => Self::Busy,
            sys::FI_ENOMEM
            | sys::FI_ENOSPC
            | sys::FI_ENOBUFS
            | sys::FI_EMFILE
            | number::NO_RECEIVE => Self::ResourceExhausted,
            sys::FI_EFAULT => Self::NotMapped,
            _ => Self::Other,
        }
    }
}

impl Error {
    /// An error found by this library itself, before or without libfabric.
    pub(crate) fn new(
        kind: ErrorKind,
        operation: &'static str,
        detail: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self::bare(operation, kind).with_detail(detail)
    }

    /// An error that libfabric returned; the sign of the code does not matter.
    pub(crate) fn from_code(operation: &'static str, code: impl Into<i64>) -> Self {
        let code = i32::try_from(code.into().unsigned_abs()).unwrap_or(i32::MAX);
        let mut error = Self::bare(operation, ErrorKind::from_code(code));
        error.0.code = Some(code);
        error
    }

    /// Ok for 0 and above, otherwise the error of the code.
    pub(crate) fn check(operation: &'static str, code: impl Into<i64>) -> Result<i64> {
        let code = code.into();
        if code >= 0 { Ok(code) } else { Err(Self::from_code(operation, code)) }
    }

    pub(crate) fn from_io_error(
        operation: &'static str,
        object: &dyn fmt::Display,
        error: &std::io::Error,
    ) -> Self {
        let kind = match (error.kind(), error.raw_os_error()) {
            (std::io::ErrorKind::AddrInUse, _) => ErrorKind::Busy,
            (_, Some(code)) => ErrorKind::from_code(code),
            (_, None) => ErrorKind::Other,
        };
        let limit = match error.raw_os_error() {
            Some(libc::EMFILE) => format!(". {}", DescriptorLimit::of_this_process()),
            _ => String::new(),
        };
        Self::new(kind, operation, format!("{object}: {error}{limit}"))
    }

    /// The error with the number of open descriptors, if opening an object failed because there were
    /// too many. Some providers report another code then.
    pub(crate) fn explain_opening(self) -> Self {
        /// Some that a provider had opened are closed again.
        const FEW: u64 = 4;
        let Some(code @ (sys::FI_EMFILE | sys::FI_EIO | sys::FI_ENOMEM)) = self.code() else {
            return self;
        };
        let limit = DescriptorLimit::of_this_process();
        match code == sys::FI_EMFILE || limit.left() < FEW {
            true => self.with_detail(LimitReached::Descriptors(limit).to_string()),
            false => self,
        }
    }

    pub(crate) fn with_kind(mut self, kind: ErrorKind) -> Self {
        self.0.kind = kind;
        self
    }

    pub(crate) fn with_provider(mut self, provider: &str) -> Self {
        self.0.provider = Some(provider.to_owned());
        self
    }

    pub(crate) fn with_peer(mut self, peer: impl Into<String>) -> Self {
        self.0.peer = Some(peer.into());
        self
    }

    pub(crate) fn with_known_peer(mut self, peer: Option<String>) -> Self {
        self.0.peer = peer.or(self.0.peer);
        self
    }

    pub(crate) fn with_detail(mut self, detail: impl Into<Cow<'static, str>>) -> Self {
        self.0.detail = Some(detail.into());
        self
    }

    /// The provider's own error number and its text, from an error completion.
    #[must_use]
    pub fn provider_error(&self) -> Option<(i32, Option<&str>)> {
        self.0.provider_code.map(|code| (code, self.0.provider_text.as_deref()))
    }

    pub(crate) fn with_provider_text(mut self, code: i32, text: Option<String>) -> Self {
        self.0.provider_code = Some(code);
        self.0.provider_text = text;
        self
    }

    /// The provider that failed, if one was chosen already.
    #[must_use]
    pub fn provider(&self) -> Option<&str> {
        self.0.provider.as_deref()
    }

    /// libfabric's error number (positive), if libfabric returned one.
    #[must_use]
    pub fn code(&self) -> Option<i32> {
        self.0.code
    }

    /// The peer the operation was directed to.
    #[must_use]
    pub fn peer(&self) -> Option<&str> {
        self.0.peer.as_deref()
    }

    /// The cause in words, if this library has more information than the code.
    #[must_use]
    pub fn detail(&self) -> Option<&str> {
        self.0.detail.as_deref()
    }
}

pub(crate) fn code_text(code: i32) -> &'static str {
    #[allow(unsafe_code)]
    // SAFETY: fi_strerror takes any number and returns a string constant.
    unsafe { CStr::from_ptr(sys::fi_strerror(code)) }.to_str().unwrap_or("unknown error")
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = &*self.0;
        write!(f, "{}", inner.operation)?;
        if let Some(provider) = &inner.provider {
            write!(f, " on {provider}")?;
        }
        if let Some(peer) = &inner.peer {
            write!(f, " to {peer}")?;
        }
        f.write_str(" failed")?;
        if inner.kind != ErrorKind::Other {
            write!(f, ": {}", inner.kind.label())?;
        }
        if let Some(code) = inner.code {
            write!(f, " ({}, {code})", code_text(code))?;
        }
        if let Some(detail) = &inner.detail {
            write!(f, ": {detail}")?;
        }
        match (inner.provider_code, &inner.provider_text) {
            (Some(code), Some(text)) => write!(f, "; provider error: {text} ({code})"),
            (Some(code), None) if code != 0 => write!(f, "; provider code {code}"),
            _ => Ok(()),
        }
    }
}

impl std::error::Error for Error {}
