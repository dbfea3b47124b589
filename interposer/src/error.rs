//! Errors of engines and communicators.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

/// Why a communicator is of no use any more, or has no domain of this project.
#[derive(Debug, Clone)]
pub(crate) enum Error {
    /// The domain or the log of choices failed.
    Collective(collective::Error),
    /// The device failed.
    Device(gpu::Error),
    /// The reason why something is not possible here.
    Unavailable(String),
    /// NCCL itself refused the operations of a group, of which some were for this library.
    Group,
    /// The program aborted the communicator.
    Aborted,
}

pub(crate) type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Returns whether another rank is the cause, and not this machine.
    pub(crate) fn is_of_another_rank(&self) -> bool {
        use collective::ErrorKind::{Closed, DeadlineExceeded, Mismatch, RankFailed};
        let Self::Collective(error) = self else { return false };
        matches!(error.kind(), RankFailed | Closed | DeadlineExceeded | Mismatch)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Collective(error) => error.fmt(f),
            Self::Device(error) => error.fmt(f),
            Self::Unavailable(reason) => f.write_str(reason),
            Self::Group => f.write_str("the end of a group failed"),
            Self::Aborted => f.write_str("the communicator was aborted"),
        }
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::Collective(error) => Some(error),
            Self::Device(error) => Some(error),
            Self::Unavailable(_) | Self::Group | Self::Aborted => None,
        }
    }
}

impl From<collective::Error> for Error {
    fn from(error: collective::Error) -> Self {
        Self::Collective(error)
    }
}

impl From<gpu::Error> for Error {
    fn from(error: gpu::Error) -> Self {
        Self::Device(error)
    }
}

/// A flag that all clones share: set once, by any thread.
#[derive(Debug, Clone, Default)]
pub(crate) struct Flag(Arc<std::sync::atomic::AtomicBool>);

impl Flag {
    pub(crate) fn set(&self) {
        self.0.store(true, std::sync::atomic::Ordering::Release);
    }

    pub(crate) fn is_set(&self) -> bool {
        self.0.load(std::sync::atomic::Ordering::Acquire)
    }
}
