//! What can go wrong, sorted by whose fault it is.

use std::fmt;
use std::io;

/// Why a process of the soak test gave up.
#[derive(Debug)]
pub enum Failure {
    /// What the fabric said.
    Fabric(fabric::Error),
    /// What the system said, about what.
    System(&'static str, io::Error),
    /// What came from another process was not what was agreed.
    ControlChannel(String),
    /// Messages were lost, doubled or changed, or the ring broke though nobody had touched it.
    Defect(String),
    /// Nothing happened for too long.
    Stalled(String),
    /// The arguments.
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
