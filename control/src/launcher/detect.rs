//! Which launcher started this process.

use super::environment::Environment;
use super::error::Result;

/// A launcher that started this process.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Launcher {
    /// None: a job of one rank.
    Single,
}

/// Finds out from the environment which launcher started this process.
///
/// # Errors
/// [`InvalidEnvironment`](super::ErrorKind::InvalidEnvironment).
pub fn detect(_environment: &Environment) -> Result<Launcher> {
    Ok(Launcher::Single)
}
