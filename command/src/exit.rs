//! How the command ends when it does not succeed.

use std::fmt;
use std::process::ExitCode;

use serde::Serialize;
use serde_json::{Map, Value};

/// Exit codes and environment variables, for `--help`.
pub const HELP: &str = "\
Exit codes:
  0  success
  1  failure
  2  invalid command line or setting
  3  no matching provider, device or path; or fabricast-bench is not installed
  4  deadline exceeded
  5  received data is corrupted
  6  node, topic, agent or directory not found
  7  limit exceeded: message longer than its topic allows, or budget, memory or descriptors exhausted
  8  messages of a reliable topic were missed, or the subscriber was evicted as too slow
  9  permission denied: node of another user, or directory not writable
 10  node already served by another fabricast node
130  interrupted (SIGINT or SIGTERM) before completion
141  output pipe closed by its reader

Environment:
  FABRICAST_LOG  off, error, warn (the default), info, debug or trace; to stderr
  FI_PROVIDER    libfabric's provider filter; it applies, and is shown where it matters
  FI_LOG_LEVEL   libfabric's log level: warn, trace, info or debug";

/// Exit codes. `--help` documents the numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Any other failure.
    Failed = 1,
    /// Invalid command line or setting.
    Usage = 2,
    /// No matching provider, device, path or program.
    NoProvider = 3,
    /// A deadline passed.
    Deadline = 4,
    /// Received data is corrupted.
    DataCorrupted = 5,
    /// Node, topic, agent or directory not found.
    NotFound = 6,
    /// A message is longer than its topic allows, or a budget, memory or descriptors are exhausted.
    LimitExceeded = 7,
    /// Messages of a reliable topic were missed.
    MessagesMissed = 8,
    /// This user may not use the node, or the directory is not writable.
    Denied = 9,
    /// Another process serves the node.
    AlreadyServed = 10,
    /// 128 and SIGPIPE, like in shells.
    OutputClosed = 141,
    /// 128 and SIGINT, like in shells.
    Interrupted = 130,
}

impl Exit {
    /// The meaning of an exit code of another process.
    pub fn from_code(code: i32) -> Self {
        match code {
            2 => Self::Usage,
            3 => Self::NoProvider,
            4 => Self::Deadline,
            5 => Self::DataCorrupted,
            6 => Self::NotFound,
            7 => Self::LimitExceeded,
            8 => Self::MessagesMissed,
            9 => Self::Denied,
            10 => Self::AlreadyServed,
            141 => Self::OutputClosed,
            130 => Self::Interrupted,
            _ => Self::Failed,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// Why the command failed, and its exit code. Boxed, so that a `Result` of measured code is one
/// word.
#[derive(Debug)]
pub struct Failure(Box<Inner>);

/// Result of what may end a program.
pub type Result<T, E = Failure> = std::result::Result<T, E>;

#[derive(Debug)]
struct Inner {
    exit: Exit,
    message: String,
    /// What was done before the failure, for `--json`.
    report: Map<String, Value>,
}

impl Failure {
    /// A failure with this code and message.
    pub fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self(Box::new(Inner { exit, message: message.into(), report: Map::new() }))
    }

    /// A failure with code 1 and this message.
    pub fn failed(message: impl Into<String>) -> Self {
        Self::new(Exit::Failed, message)
    }

    /// A failure with code 1 and the message of this error.
    pub fn of(error: impl fmt::Display) -> Self {
        Self::failed(error.to_string())
    }

    /// A failure whose message was printed before.
    pub fn silent(exit: Exit) -> Self {
        Self::new(exit, "")
    }

    /// The code that it ends with.
    #[must_use]
    pub fn exit(&self) -> Exit {
        self.0.exit
    }

    /// Was the message printed before?
    #[must_use]
    pub fn is_silent(&self) -> bool {
        self.0.message.is_empty()
    }

    /// Puts the operation in front of the message.
    pub fn with_operation(mut self, what: impl fmt::Display) -> Self {
        self.0.message = format!("{what}: {}", self.0.message);
        self
    }

    /// Adds what was done before the failure, which
    /// [`conclude`](crate::output::conclude) prints with `--json`.
    pub fn with_report(mut self, report: &impl Serialize) -> Self {
        if let Ok(Value::Object(report)) = serde_json::to_value(report) {
            self.0.report = report;
        }
        self
    }

    /// The report, with the reason and the exit code.
    pub(crate) fn document(&self) -> Value {
        let mut all = self.0.report.clone();
        all.insert("error".to_owned(), self.0.message.clone().into());
        all.insert("exit_code".to_owned(), (self.0.exit as u8).into());
        all.into()
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

/// Makes a failure of a crate's error, with the exit code of its kind: code 1 if none is named.
macro_rules! from_error {
    ($of:ident { $($($kind:ident)|+ => $exit:ident,)* }) => {
        impl From<$of::Error> for Failure {
            fn from(error: $of::Error) -> Self {
                let exit = match error.kind() {
                    $($($of::ErrorKind::$kind)|+ => Exit::$exit,)*
                    _ => Exit::Failed,
                };
                Self::new(exit, error.to_string())
            }
        }
    };
}

from_error! { fabric { NoProvider | NoLibrary => NoProvider, DeadlineExceeded => Deadline, } }
from_error! { gpu { Unavailable | NoSuchDevice => NoProvider, DeadlineExceeded => Deadline, } }
from_error! { transfer { NoSuchDevice | NoPath => NoProvider, DeadlineExceeded => Deadline, } }
from_error! { pubsub {
    InvalidArgument | SettingsDiffer => Usage,
    NoProvider | NoDevice => NoProvider,
    DeadlineExceeded => Deadline,
    NotFound | Closed => NotFound,
    OverBudget | TooLong | TooMany | TooManyLoans | TooManySamples => LimitExceeded,
    Evicted => MessagesMissed,
    Denied => Denied,
    AlreadyServed => AlreadyServed,
} }

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_device_is_no_provider_and_missing_topic_not_found() {
        let path = std::env::temp_dir().join(format!("fabricast-exit-{}", std::process::id()));
        let options = pubsub::NodeOptions { directory: path.clone(), ..Default::default() };
        let node = pubsub::Node::join(options).unwrap();
        let memory = "emulated:99".parse().unwrap();
        let settings = pubsub::TopicSettings { memory, ..Default::default() };
        let exit = |error: pubsub::Error| Failure::from(error).exit();
        assert_eq!(exit(node.topic("t", &settings).unwrap_err()), Exit::NoProvider);
        assert_eq!(exit(node.open("t").unwrap_err()), Exit::NotFound);
        drop(node);
        let _ = std::fs::remove_dir_all(path);
    }
}
