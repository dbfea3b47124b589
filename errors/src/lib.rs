//! What the error types of all crates have in common, defined once.
//!
//! Each crate has its own `Error`, because its kinds differ. [`define!`] makes the type; the
//! crate adds constructors, accessors of its fields, and the text.
//!
//! Causes that are the same in all crates are explained here, too: limits of the process, errors
//! with files, and the memory that is available.
//!
//! Modules, each importing only those before it: `files`, `limits`, `memory`.

pub mod files;
pub mod limits;
pub mod memory;

use std::error::Error;
use std::fmt;

/// Makes `ErrorKind` (each kind with its text), `Error` and `Result`.
///
/// An `Error` has an operation, a kind, and the fields that the macro call names. Errors are
/// boxed, so that a `Result` is no larger than its value and a pointer. `Display` and
/// `std::error::Error` are left to the crate.
///
/// ```
/// errors::define! {
///     /// The kind of an error.
///     pub enum ErrorKind {
///         /// The object does not exist.
///         Unknown = "unknown",
///     }
///
///     /// An error.
///     pub struct Error {
///         subject: Option<String>,
///     }
/// }
///
/// impl std::fmt::Display for Error {
///     fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
///         let subject = self.0.subject.as_deref();
///         errors::write(f, self.operation(), subject, self.kind().label(), "", None)
///     }
/// }
///
/// let error = Error::bare("open", ErrorKind::Unknown);
/// assert_eq!(error.to_string(), "open failed: unknown");
/// assert_eq!(format!("{error:?}"), "open failed: unknown");
/// ```
#[macro_export]
macro_rules! define {
    (
        $(#[$of_kinds:meta])*
        pub enum ErrorKind {
            $( $(#[$of_kind:meta])* $kind:ident = $label:literal, )*
        }

        $(#[$of_error:meta])*
        pub struct Error {
            $( $field:ident: $type:ty, )*
        }
    ) => {
        $(#[$of_kinds])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum ErrorKind {
            $( $(#[$of_kind])* $kind, )*
        }

        impl ErrorKind {
            fn label(self) -> &'static str {
                match self {
                    $( Self::$kind => $label, )*
                }
            }
        }

        $(#[$of_error])*
        #[derive(Clone)]
        pub struct Error(::std::boxed::Box<Inner>);

        #[derive(Debug, Clone)]
        struct Inner {
            operation: &'static str,
            kind: ErrorKind,
            $( $field: $type, )*
        }

        /// The result of this crate's calls.
        pub type Result<T> = ::std::result::Result<T, Error>;

        impl Error {
            /// An error whose other fields are empty.
            fn bare(operation: &'static str, kind: ErrorKind) -> Self {
                let inner = Inner { operation, kind, $( $field: ::std::default::Default::default(), )* };
                Self(::std::boxed::Box::new(inner))
            }

            /// The operation that failed.
            #[must_use]
            pub fn operation(&self) -> &'static str {
                self.0.operation
            }

            /// The kind of the failure.
            #[must_use]
            pub fn kind(&self) -> ErrorKind {
                self.0.kind
            }
        }

        /// Writes the same text as `Display`, because a program whose `main` returns the error
        /// shows this form; with `{:#?}`, all fields.
        impl ::std::fmt::Debug for Error {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                match f.alternate() {
                    true => f.debug_tuple("Error").field(&self.0).finish(),
                    false => ::std::fmt::Display::fmt(self, f),
                }
            }
        }
    };
}

/// Text of another process, safe to print: characters that move a cursor or colour a terminal are
/// escaped.
#[must_use]
pub fn escape_control(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '"' | '\'' | '\\' => out.push(character),
            _ => out.extend(character.escape_debug()),
        }
    }
    out
}

/// The text for a kind of error that has only a detail and a cause.
const UNSPECIFIED_KIND: &str = "failed";

/// Writes `operation subject failed: kind: detail: cause`, without the parts that are empty.
///
/// # Errors
/// Errors of the formatter.
pub fn write(
    f: &mut fmt::Formatter<'_>,
    operation: &str,
    subject: Option<&str>,
    kind: &str,
    detail: &str,
    cause: Option<&dyn Error>,
) -> fmt::Result {
    f.write_str(operation)?;
    if let Some(subject) = subject {
        write!(f, " {subject}")?;
    }
    f.write_str(" failed")?;
    if kind != UNSPECIFIED_KIND {
        write!(f, ": {kind}")?;
    }
    if !detail.is_empty() {
        write!(f, ": {detail}")?;
    }
    match cause {
        Some(cause) => write!(f, ": {cause}"),
        None => Ok(()),
    }
}
