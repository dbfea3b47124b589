//! The one error type of this crate.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

use ipc::LimitReached;

errors::define! {
    // The service sends the kind by its position in this list: a new order needs a new version of
    // `service::protocol`.
    /// What went wrong, as far as a program can act on it.
    #[derive(serde::Serialize, serde::Deserialize)]
    pub enum ErrorKind {
        /// An argument that can never be valid: the detail names it, and the valid range.
        InvalidArgument = "invalid argument",
        /// The topic exists with other settings; the detail prints both.
        SettingsDiffer = "settings differ",
        /// There is no such topic, node or publisher.
        NotFound = "not found",
        /// There is no such device, or this process does not see it; the detail or the cause says
        /// which.
        NoDevice = "no such device",
        /// The budget does not allow it; the detail has the figures.
        OverBudget = "over budget",
        /// The message is longer than the topic's largest.
        TooLong = "too long",
        /// A limit is reached: of participants or slots, or of descriptors of this process or its
        /// service. The detail names the limit.
        TooMany = "too many",
        /// The publisher has as many [loans](crate::Loan) as its topic allows; the detail has the
        /// number.
        TooManyLoans = "too many loans",
        /// The subscriber holds as many [samples](crate::Sample) as a topic that drops messages
        /// allows; the detail has the number.
        TooManySamples = "too many samples",
        /// There was no message, or no room, and the caller did not wait.
        WouldBlock = "would block",
        /// The deadline passed; the detail names what was waited for.
        DeadlineExceeded = "deadline exceeded",
        /// A subscriber was evicted: it blocked publishers for longer than the topic allows. Its
        /// samples stay valid; [`Topic::subscriber`](crate::Topic::subscriber) subscribes again.
        Evicted = "evicted",
        /// This process may not use the node service, or does not trust it.
        Denied = "denied",
        /// Another process serves the node, and keeps doing so; the detail names it.
        AlreadyServed = "already served",
        /// Bytes from outside that are truncated, altered or inconsistent.
        Malformed = "malformed",
        /// The other side uses another protocol version.
        VersionMismatch = "version mismatch",
        /// The node, or an object of it, was closed or lost.
        Closed = "closed",
        /// The message will never be complete: its publisher died, or its device failed, before a
        /// stream had written it.
        Poisoned = "poisoned",
        /// The handle was made before a fork, and belongs to the parent process.
        Forked = "used after a fork",
        /// No provider reaches other nodes, or not the requested one; the detail has the reason.
        NoProvider = "no provider",
        /// The node cannot listen at its address: for instance another process uses it, or it is
        /// not an address of this machine.
        CannotListen = "cannot listen there",
        /// A lower layer failed; see the cause.
        Failed = "failed",
        /// A signal handler ran in the waiting thread, at a node whose waits end then
        /// ([`NodeOptions::interruptible`](crate::NodeOptions::interruptible)). No message was
        /// taken or sent.
        Interrupted = "interrupted",
        /// All publishers of the topic have left or died, all their messages were pulled, and the
        /// subscriber [was asked to end then](crate::Subscriber::end_without_publishers).
        NoPublishers = "no publishers",
    }

    /// An error: the operation, its object, and why it failed.
    pub struct Error {
        subject: Option<String>,
        is_name: bool,
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

    /// A layer below this crate failed.
    pub(crate) fn of(
        operation: &'static str,
        cause: impl Into<Box<dyn StdError + Send + Sync>>,
    ) -> Self {
        Self::because(operation, ErrorKind::Failed, cause)
    }

    /// A lower layer failed, with a known meaning here.
    pub(crate) fn because(
        operation: &'static str,
        kind: ErrorKind,
        cause: impl Into<Box<dyn StdError + Send + Sync>>,
    ) -> Self {
        let cause: Box<dyn StdError + Send + Sync> = match cause.into().downcast() {
            Ok(cause) => Box::new(LimitReached::explain(*cause)),
            Err(cause) => cause,
        };
        let mut error = Self::bare(operation, kind);
        error.0.cause = Some(cause.into());
        let limit = error.limit_reached();
        if kind == ErrorKind::Failed && matches!(limit, Some(LimitReached::Descriptors(_))) {
            error.0.kind = ErrorKind::TooMany;
        }
        error
    }

    /// Names the operation, where another thread failed that knew only a part of it.
    pub(crate) fn during(mut self, operation: &'static str) -> Self {
        self.0.operation = operation;
        self
    }

    /// The limit of this process that caused the error, if one did.
    pub(crate) fn limit_reached(&self) -> Option<LimitReached> {
        let mut next = self.source();
        while let Some(cause) = next {
            let reached = cause.downcast_ref().and_then(LimitReached::of);
            if reached.is_some() {
                return reached;
            }
            next = cause.source();
        }
        None
    }

    /// Names the topic or pool of the error, if no object is named yet.
    pub(crate) fn on(mut self, name: impl fmt::Display) -> Self {
        self.0.is_name |= self.0.subject.is_none();
        self.at(name)
    }

    /// Names the node, path, address or variable of the error, if no object is named yet.
    pub(crate) fn at(mut self, subject: impl fmt::Display) -> Self {
        self.0.subject.get_or_insert_with(|| subject.to_string());
        self
    }

    /// The topic, node or path of the error.
    #[must_use]
    pub fn subject(&self) -> Option<&str> {
        self.0.subject.as_deref()
    }

    /// Replaces the detail: for a caller that waits in slices, and knows the total.
    #[must_use]
    pub fn with_detail(mut self, detail: impl Into<String>) -> Self {
        self.0.detail = detail.into();
        self
    }

    /// Further text; may be empty.
    #[must_use]
    pub fn detail(&self) -> &str {
        &self.0.detail
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = &*self.0;
        let quote = |name: &String| if inner.is_name { format!("{name:?}") } else { name.clone() };
        let subject = inner.subject.as_ref().map(quote);
        let subject = subject.as_deref();
        errors::write(f, inner.operation, subject, inner.kind.label(), &inner.detail, self.source())
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.cause.as_deref().map(|cause| cause as _)
    }
}
