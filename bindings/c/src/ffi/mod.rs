//! The FFI boundary: arguments of C are checked here, or documented as trusted, and no panic
//! crosses it.
//!
//! [`export!`] declares the functions of the interface. Each argument has a type that checks it;
//! the body gets safe values.
#![allow(unsafe_code)]

mod argument;
mod array;
mod structure;

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

use crate::failure::{self, Failure, Operation, Result};
use crate::status::Status;

pub(crate) use self::argument::{Argument, CallerBuffer, CallerRange, Name, Text, UserData, plain};
pub(crate) use self::array::{Array, OutArray};
pub(crate) use self::structure::{Layout, Out, OutStruct, Plain, WithDefaults};

/// Functions of the interface, which the headers describe. Each has an operation, with which its
/// messages begin; an argument with a name in brackets before or behind it has the length of that
/// argument.
macro_rules! export {
    ($(
        $(#[$meta:meta])*
        fn $name:ident($($([$before:ident])? $argument:ident: $type:ty $([$length:ident])?),* $(,)?)
            -> $answer:ty,
            $operation:literal $body:block
    )*) => {$(
        $(#[$meta])*
        ///
        /// # Safety
        /// As documented in the header for the arguments.
        #[allow(unsafe_code)]
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name(
            $(
                $($before: usize,)?
                $argument: <$type as $crate::ffi::Argument>::Raw,
                $($length: usize,)?
            )*
        ) -> $answer {
            const OPERATION: &std::ffi::CStr = $operation;
            $crate::ffi::call(OPERATION, || {
                $(
                    // SAFETY: as below.
                    unsafe {
                        <$type as $crate::ffi::Argument>::clear($argument, 0 $(+ $length)?)
                    };
                )*
                $(
                    // SAFETY: the caller follows the header for this argument.
                    let $argument = unsafe {
                        <$type as $crate::ffi::Argument>::from_c(
                            (OPERATION, stringify!($argument)),
                            $argument,
                            0 $(+ $before)? $(+ $length)?,
                        )
                    }?;
                )*
                $body
            })
        }
    )*};
}
pub(crate) use export;

/// Conversion of a [`Result`] to C.
pub(crate) trait Answer {
    /// The result on the Rust side.
    type Value;

    fn done(value: Self::Value) -> Self;
    fn failed(status: Status) -> Self;
}

impl Answer for i32 {
    type Value = ();

    fn done((): ()) -> Self {
        Status::Ok as Self
    }

    fn failed(status: Status) -> Self {
        status as Self
    }
}

impl Answer for () {
    type Value = ();

    fn done((): ()) -> Self {}
    fn failed(_: Status) -> Self {}
}

/// 0 on failure.
impl Answer for usize {
    type Value = Self;

    fn done(value: Self) -> Self {
        value
    }

    fn failed(_: Status) -> Self {
        0
    }
}

/// NULL on failure.
impl<T> Answer for *mut T {
    type Value = Self;

    fn done(value: Self) -> Self {
        value
    }

    fn failed(_: Status) -> Self {
        ptr::null_mut()
    }
}

thread_local! {
    /// Does this thread run a callback of the program?
    pub(crate) static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

/// Runs a function's body; on failure or panic the thread's last error is set. Fails in a
/// callback, which may run while the library holds a lock.
pub(crate) fn call<A: Answer>(operation: Operation, body: impl FnOnce() -> Result<A::Value>) -> A {
    let body = || match IN_CALLBACK.get() {
        true => Err(Failure::invalid(operation, "called from a callback of the library")),
        false => body(),
    };
    let outcome = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        Err(Failure::new(Status::Panicked, operation, panic_message(&*panic)))
    });
    match outcome {
        Ok(value) => A::done(value),
        Err(failure) => {
            let status = failure.status;
            failure::set_last_error(failure);
            A::failed(status)
        }
    }
}

/// Copies bytes of the library to the caller, if it passes room for them; returns their number.
pub(crate) fn put_bytes(operation: Operation, bytes: &[u8], into: &mut [u8]) -> Result<usize> {
    if into.is_empty() {
        return Ok(bytes.len());
    }
    let Some(part) = into.get_mut(..bytes.len()) else {
        let detail = format!("{} bytes do not fit into {}", bytes.len(), into.len());
        return Err(Failure::new(Status::TooLong, operation, detail));
    };
    part.copy_from_slice(bytes);
    Ok(bytes.len())
}

fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("panic without a message")
}

#[cfg(test)]
mod tests;
