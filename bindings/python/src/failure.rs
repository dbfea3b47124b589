//! Errors, as exceptions of `fabricast.errors`.

use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// The result of a call.
pub(crate) type Result<T> = std::result::Result<T, Failure>;

/// Why a call failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Of the library: the class of the exception, the operation, the text, and the ranks that caused it.
    Library { class: String, operation: &'static str, text: String, ranks: Vec<u32> },
    /// Of Python, for example `KeyboardInterrupt`.
    Python(PyErr),
}

/// The classes of exceptions have the names of the kinds.
macro_rules! from_errors {
    ($($error:ty),*) => {
        $(impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                Self::of_kind(error.kind(), error.operation(), &error)
            }
        })*
    };
}

from_errors!(pubsub::Error, transfer::Error, fabric::Error, gpu::Error);

/// Errors that ranks may have caused.
macro_rules! from_errors_of_ranks {
    ($($error:ty),*) => {
        $(impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                let failure = Self::of_kind(error.kind(), error.operation(), &error);
                failure.of_ranks(error.ranks())
            }
        })*
    };
}

from_errors_of_ranks!(launch::Error, collective::Error);

impl Failure {
    fn of_kind(
        kind: impl std::fmt::Debug,
        operation: &'static str,
        error: &impl std::fmt::Display,
    ) -> Self {
        let (class, text) = (format!("{kind:?}"), error.to_string());
        Self::Library { class, operation, text, ranks: Vec::new() }
    }

    /// This error of the library with the ranks that caused it.
    fn of_ranks(self, all: &[u32]) -> Self {
        match self {
            Self::Library { class, operation, text, .. } => {
                Self::Library { class, operation, text, ranks: all.to_vec() }
            }
            Self::Python(error) => Self::Python(error),
        }
    }

    pub(crate) fn new(class: &str, operation: &'static str, cause: impl std::fmt::Display) -> Self {
        let text = format!("{operation} failed: {cause}");
        Self::Library { class: class.to_owned(), operation, text, ranks: Vec::new() }
    }

    pub(crate) fn invalid(operation: &'static str, cause: impl std::fmt::Display) -> Self {
        Self::new("InvalidArgument", operation, cause)
    }

    /// This error of the library with another class.
    pub(crate) fn with_class(self, class: &str) -> Self {
        match self {
            Self::Library { operation, text, ranks, .. } => {
                Self::Library { class: class.to_owned(), operation, text, ranks }
            }
            Self::Python(error) => Self::Python(error),
        }
    }

    /// This error of the library with more of its cause.
    pub(crate) fn with_more(self, more: impl std::fmt::Display) -> Self {
        match self {
            Self::Library { class, operation, text, ranks } => {
                Self::Library { class, operation, text: format!("{text}{more}"), ranks }
            }
            Self::Python(error) => Self::Python(error),
        }
    }

    /// Is it an error of the library of this class?
    pub(crate) fn is_of(&self, name: &str) -> bool {
        matches!(self, Self::Library { class, .. } if class == name)
    }
}

impl From<PyErr> for Failure {
    fn from(error: PyErr) -> Self {
        Self::Python(error)
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Python(error) => error,
            Failure::Library { class, operation, text, ranks } => Python::attach(|py| {
                let made = (|| {
                    let errors = py.import("fabricast.errors")?;
                    let class = match errors.getattr(class.as_str()) {
                        Ok(class) => class,
                        // A kind without a class of its own.
                        Err(_) => errors.getattr("Error")?,
                    };
                    class.call1((text, operation, PyTuple::new(py, ranks)?))
                })();
                made.map_or_else(|error| error, Self::from_value)
            }),
        }
    }
}
