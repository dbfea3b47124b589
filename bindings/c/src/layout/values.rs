//! Conversion of the values of fields.

use std::time::Duration;

use ipc::WaitStrategy;

use crate::failure::{Failure, Operation, Result};

/// A time of a structure, which must not be negative.
pub(crate) fn time(operation: Operation, name: &str, nanoseconds: i64) -> Result<Duration> {
    match u64::try_from(nanoseconds) {
        Ok(nanoseconds) => Ok(Duration::from_nanos(nanoseconds)),
        Err(_) => Err(Failure::invalid(operation, format_args!("\"{name}\" is negative"))),
    }
}

pub(crate) fn nanoseconds(time: Duration) -> i64 {
    i64::try_from(time.as_nanos()).unwrap_or(i64::MAX)
}

pub(crate) fn wait_strategy(operation: Operation, number: u32) -> Result<WaitStrategy> {
    match number {
        0 => Ok(WaitStrategy::default()),
        1 => Ok(WaitStrategy::Busy),
        2 => Ok(WaitStrategy::Block),
        other => Err(unknown(operation, "waiting", other)),
    }
}

/// A number that is 0 or 1.
pub(crate) fn flag(operation: Operation, name: &str, number: u32) -> Result<bool> {
    match number {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(unknown(operation, name, other)),
    }
}

pub(crate) fn unknown(operation: Operation, name: &str, number: u32) -> Failure {
    Failure::invalid(operation, format_args!("{number} is not a value of \"{name}\""))
}
