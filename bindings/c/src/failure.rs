//! Why a call failed, and the calling thread's last error.

use std::borrow::Cow;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::fmt;

use crate::status::Status;

/// Result of calls on the Rust side.
pub(crate) type Result<T> = std::result::Result<T, Failure>;

/// What a function does, as its messages begin.
pub(crate) type Operation = &'static CStr;

/// Why a call failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) status: Status,
    operation: Cow<'static, CStr>,
    /// The whole message.
    message: Cow<'static, CStr>,
    /// Ranks that caused it.
    ranks: Vec<u32>,
}

/// A C string without inner zeros.
pub(crate) fn c_text(text: impl Into<String>) -> CString {
    let mut text = text.into();
    text.retain(|character| character != '\0');
    CString::new(text).unwrap_or_default()
}

impl Failure {
    pub(crate) fn new(status: Status, operation: Operation, detail: impl fmt::Display) -> Self {
        let (label, tried) = (status.label().to_string_lossy(), operation.to_string_lossy());
        let message = c_text(format!("{tried} failed: {label}: {detail}"));
        let (operation, message) = (Cow::Borrowed(operation), Cow::Owned(message));
        Self { status, operation, message, ranks: Vec::new() }
    }

    /// Without allocation: for frequent failures.
    pub(crate) const fn fixed(
        status: Status,
        operation: Operation,
        message: &'static CStr,
    ) -> Self {
        let (operation, message) = (Cow::Borrowed(operation), Cow::Borrowed(message));
        Self { status, operation, message, ranks: Vec::new() }
    }

    pub(crate) fn invalid(operation: Operation, detail: impl fmt::Display) -> Self {
        Self::new(Status::InvalidArgument, operation, detail)
    }

    /// With this text as the message.
    pub(crate) fn from_text(status: Status, operation: &str, message: String) -> Self {
        let message = Cow::Owned(c_text(message));
        let operation = Cow::Owned(c_text(operation));
        Self { status, operation, message, ranks: Vec::new() }
    }
}

/// Converts errors of libraries, which have the whole message.
macro_rules! from_errors {
    ($($error:ty),*) => {$(
        impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                Self::from_text(error.kind().into(), error.operation(), error.to_string())
            }
        }
    )*};
}

from_errors!(pubsub::Error, gpu::Error, transfer::Error, fabric::Error);

/// Converts errors that ranks may have caused.
macro_rules! from_errors_of_ranks {
    ($($error:ty),*) => {$(
        impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                let text = error.to_string();
                let failure = Self::from_text(error.kind().into(), error.operation(), text);
                Self { ranks: error.ranks().to_vec(), ..failure }
            }
        }
    )*};
}

from_errors_of_ranks!(collective::Error, launch::Error);

const NONE: Failure = Failure::fixed(Status::Ok, c"", c"");

thread_local! {
    static LAST: RefCell<Failure> = const { RefCell::new(NONE) };
}

/// Stores it as the thread's last error.
pub(crate) fn set_last_error(failure: Failure) {
    // Not while the thread is ending.
    let _ = LAST.try_with(|last| last.replace(failure));
}

pub(crate) fn clear_last_error() {
    set_last_error(NONE);
}

/// Ranks that caused the thread's last error.
pub(crate) fn last_ranks() -> Vec<u32> {
    LAST.try_with(|last| last.borrow().ranks.clone()).unwrap_or_default()
}

/// Status of the thread's last error.
#[allow(unsafe_code)]
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fabricast_error_status() -> i32 {
    LAST.try_with(|last| last.borrow().status).unwrap_or(Status::Ok) as i32
}

/// Message of the last error, valid until the next failure of this thread.
#[allow(unsafe_code)]
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fabricast_error_message() -> *const c_char {
    LAST.try_with(|last| last.borrow().message.as_ptr()).unwrap_or(c"".as_ptr())
}

/// Operation of the last error; valid as long.
#[allow(unsafe_code)]
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fabricast_error_operation() -> *const c_char {
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
    fn last_error_belongs_to_the_thread_that_failed() {
        assert_eq!(fabricast_error_status(), Status::Ok as i32);
        set_last_error(Failure::new(Status::Closed, c"push", "gone"));
        assert_eq!(fabricast_error_status(), Status::Closed as i32);
        let other = std::thread::spawn(|| fabricast_error_status()).join().unwrap();
        assert_eq!(other, Status::Ok as i32);
        clear_last_error();
        assert_eq!(fabricast_error_status(), Status::Ok as i32);
    }

    #[test]
    fn message_has_operation_kind_and_detail() {
        let failure = Failure::new(Status::TooLong, c"push", "5 bytes of 4");
        assert_eq!(failure.message(), "push failed: too long: 5 bytes of 4");
    }

    #[test]
    fn text_with_a_zero_is_not_cut() {
        assert_eq!(c_text("a\0b").as_c_str(), c"ab");
    }

    #[test]
    fn error_of_pubsub_keeps_kind_and_text() {
        let error = "elsewhere".parse::<pubsub::MemoryLocation>().unwrap_err();
        let text = error.to_string();
        let failure = Failure::from(error);
        assert_eq!(failure.status, Status::InvalidArgument);
        assert_eq!(failure.message(), text);
    }
}
