//! Why talking to the launcher failed, before the operation and the protocol are named.

use std::io;
use std::time::Duration;

use super::super::error::{Error, ErrorKind};

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
        let (kind, detail) = match self {
            Self::Deadline => {
                let detail = format!("the launcher did not answer within {timeout:?}");
                (ErrorKind::DeadlineExceeded, detail)
            }
            Self::Closed => {
                let detail = "the launcher closed the connection: the job is ending, or another \
                              program of this rank has used the connection before";
                (ErrorKind::Closed, detail.to_owned())
            }
            Self::System(error) => {
                return Error::caused_by(operation, ErrorKind::Failed, error).by(name);
            }
            Self::Malformed(detail) => (ErrorKind::Malformed, detail),
            Self::Refused(detail) => (ErrorKind::Failed, detail),
            Self::Environment(detail) => (ErrorKind::InvalidEnvironment, detail),
        };
        Error::new(operation, kind, detail).by(name)
    }
}
