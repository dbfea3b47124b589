//! Why talking to the launcher failed, before the operation and the protocol are named.

use std::io;
use std::time::Duration;

use super::super::error::{Error, ErrorKind};

/// A failure on the connection to the launcher.
#[derive(Debug)]
pub(super) enum Failure {
    /// The launcher did not answer before the deadline.
    Deadline,
    /// The launcher closed the connection.
    Closed,
    /// A system call failed.
    System(io::Error),
    /// The launcher sent what the protocol does not allow.
    Malformed(String),
    /// The launcher reported a failure.
    Refused(String),
    /// The launcher contradicts the environment.
    Environment(String),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Self::Closed,
            io::ErrorKind::TimedOut => Self::Deadline,
            _ => Self::System(error),
        }
    }
}

impl Failure {
    /// The error of an operation with this timeout, by this protocol.
    pub(super) fn error(self, operation: &'static str, name: &str, timeout: Duration) -> Error {
        let error = match self {
            Self::Deadline => {
                let detail = format!("the launcher did not answer within {timeout:?}");
                Error::new(operation, ErrorKind::DeadlineExceeded, detail)
            }
            Self::Closed => {
                let detail = "the launcher closed the connection: the job is ending, or another \
                              program of this rank has used the connection before";
                Error::new(operation, ErrorKind::Closed, detail)
            }
            Self::System(error) => Error::caused_by(operation, ErrorKind::Failed, error),
            Self::Malformed(detail) => Error::new(operation, ErrorKind::Malformed, detail),
            Self::Refused(detail) => Error::new(operation, ErrorKind::Failed, detail),
            Self::Environment(detail) => {
                Error::new(operation, ErrorKind::InvalidEnvironment, detail)
            }
        };
        error.by(name)
    }
}
