//! Errors of the soak test, by cause.

use std::fmt;
use std::io;

/// Why a process of the soak test failed.
#[derive(Debug)]
pub enum Failure {
    /// An error of the fabric.
    Fabric(fabric::Error),
    /// An error of the system, and its operation.
    System(&'static str, io::Error),
    /// Another process violated the protocol of the control channel.
    ControlChannel(String),
    /// Messages were lost, duplicated or changed, or the ring broke without a fault.
    Defect(String),
    /// No progress for too long.
    Stalled(String),
    /// Invalid arguments.
    Usage(String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fabric(error) => error.fmt(f),
            Self::System(what, error) => write!(f, "{what}: {error}"),
            Self::ControlChannel(text)
            | Self::Defect(text)
            | Self::Stalled(text)
            | Self::Usage(text) => f.write_str(text),
        }
    }
}

impl std::error::Error for Failure {}

impl From<fabric::Error> for Failure {
    fn from(error: fabric::Error) -> Self {
        Self::Fabric(error)
    }
}
