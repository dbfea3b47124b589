//! Why a call failed, and what the calling thread can ask about it afterwards.

use std::borrow::Cow;
use std::cell::RefCell;
use std::ffi::{CStr, CString};
use std::fmt;

use crate::status::Status;

/// What calls give on this side of the boundary.
pub(crate) type Result<T> = std::result::Result<T, Failure>;

/// Why a call failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) status: Status,
    /// What was tried.
    operation: Cow<'static, CStr>,
    /// The whole of it, in words.
    message: Cow<'static, CStr>,
}

/// A text without what would end it too early.
pub(crate) fn c_text(text: impl Into<String>) -> CString {
    let mut text = text.into();
    text.retain(|letter| letter != '\0');
    CString::new(text).unwrap_or_default()
}

impl Failure {
    pub(crate) fn new(status: Status, operation: &'static CStr, detail: impl fmt::Display) -> Self {
        let (label, tried) = (status.label().to_string_lossy(), operation.to_string_lossy());
        let message = c_text(format!("{tried} failed: {label}: {detail}"));
        Self { status, operation: Cow::Borrowed(operation), message: Cow::Owned(message) }
    }

    /// Costs no allocation: for what happens all the time.
    pub(crate) const fn fixed(
        status: Status,
        operation: &'static CStr,
        message: &'static CStr,
    ) -> Self {
        Self { status, operation: Cow::Borrowed(operation), message: Cow::Borrowed(message) }
    }

    pub(crate) fn invalid(operation: &'static CStr, detail: impl fmt::Display) -> Self {
        Self::new(Status::InvalidArgument, operation, detail)
    }

    /// In the words of what failed below.
    fn from_library(status: Status, operation: &str, error: &impl fmt::Display) -> Self {
        let message = Cow::Owned(c_text(error.to_string()));
        Self { status, operation: Cow::Owned(c_text(operation)), message }
    }
}

impl From<pubsub::Error> for Failure {
    fn from(error: pubsub::Error) -> Self {
        Self::from_library(error.kind().into(), error.operation(), &error)
    }
}

impl From<gpu::Error> for Failure {
    fn from(error: gpu::Error) -> Self {
        use gpu::ErrorKind as Kind;
        let status = match error.kind() {
            Kind::InvalidArgument | Kind::OutOfBounds => Status::InvalidArgument,
            Kind::OverBudget | Kind::OutOfMemory => Status::OverBudget,
            Kind::DeadlineExceeded => Status::DeadlineExceeded,
            Kind::Forked => Status::Forked,
            _ => Status::Failed,
        };
        Self::from_library(status, error.operation(), &error)
    }
}

const NONE: Failure = Failure::fixed(Status::Ok, c"", c"");

thread_local! {
    static LAST: RefCell<Failure> = const { RefCell::new(NONE) };
}

/// Keeps it for this thread to ask about.
pub(crate) fn set_last_error(failure: Failure) {
    // A thread that is ending has nobody left who could ask.
    let _ = LAST.try_with(|last| last.replace(failure));
}

pub(crate) fn clear_last_error() {
    set_last_error(NONE);
}

/// The last one's status.
pub(crate) fn last_status() -> Status {
    LAST.try_with(|last| last.borrow().status).unwrap_or(Status::Ok)
}

/// The last one's message, which stays where it is until this thread fails again.
pub(crate) fn last_message() -> *const std::ffi::c_char {
    LAST.try_with(|last| last.borrow().message.as_ptr()).unwrap_or(c"".as_ptr())
}

/// What the last one tried; stays as long.
pub(crate) fn last_operation() -> *const std::ffi::c_char {
    LAST.try_with(|last| last.borrow().operation.as_ptr()).unwrap_or(c"".as_ptr())
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Failure {
        pub(crate) fn message(&self) -> String {
            self.message.to_string_lossy().into_owned()
        }
    }

    #[test]
    fn what_failed_last_is_known_to_the_thread_that_it_failed_in() {
        assert_eq!(last_status(), Status::Ok);
        set_last_error(Failure::new(Status::Closed, c"push", "gone"));
        assert_eq!(last_status(), Status::Closed);
        let other = std::thread::spawn(last_status).join().unwrap();
        assert_eq!(other, Status::Ok);
        clear_last_error();
        assert_eq!(last_status(), Status::Ok);
    }

    #[test]
    fn a_message_has_operation_kind_and_detail() {
        let failure = Failure::new(Status::TooLong, c"push", "5 bytes of 4");
        assert_eq!(failure.message(), "push failed: too long: 5 bytes of 4");
    }

    #[test]
    fn a_text_with_a_zero_is_not_cut_there() {
        assert_eq!(c_text("a\0b").as_c_str(), c"ab");
    }

    #[test]
    fn an_error_of_pubsub_keeps_its_kind_and_its_words() {
        let error = "elsewhere".parse::<pubsub::MemoryLocation>().unwrap_err();
        let text = error.to_string();
        let failure = Failure::from(error);
        assert_eq!(failure.status, Status::InvalidArgument);
        assert_eq!(failure.message(), text);
    }
}
