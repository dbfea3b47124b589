//! Connecting to the launcher that started this process.

use std::time::Duration;

use super::detect::{Launcher, detect};
use super::environment::Environment;
use super::error::Result;
use super::exchange::Exchange;
use super::single::Single;

/// Connects to the launcher that started this process.
///
/// # Errors
/// Errors of [`detect`]; errors of the connection.
pub fn start(environment: &Environment, _timeout: Duration) -> Result<Box<dyn Exchange>> {
    match detect(environment)? {
        Launcher::Single => Ok(Box::new(Single::new())),
    }
}
