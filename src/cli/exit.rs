//! How the command ends when it does not succeed.

use std::fmt;
use std::process::ExitCode;

use fabric::ErrorKind;

/// What the exit code says. `--help` documents the numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Exit {
    Failed = 1,
    Usage = 2,
    NoProvider = 3,
    Deadline = 4,
    Corrupt = 5,
    NobodyThere = 6,
    TooMuch = 7,
    Missed = 8,
    Denied = 9,
    Taken = 10,
    /// As shells have it for a broken pipe.
    Unread = 141,
    /// As shells have it for Ctrl-C.
    Interrupted = 130,
}

impl Exit {
    /// What a code means that came from another process.
    pub(crate) fn from_code(code: i32) -> Self {
        match code {
            2 => Self::Usage,
            3 => Self::NoProvider,
            4 => Self::Deadline,
            5 => Self::Corrupt,
            6 => Self::NobodyThere,
            7 => Self::TooMuch,
            8 => Self::Missed,
            9 => Self::Denied,
            10 => Self::Taken,
            141 => Self::Unread,
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

/// Why the command failed, and with which code it ends. Boxed, so that what
/// succeeds while something is measured carries a single word.
#[derive(Debug)]
pub(crate) struct Failure(Box<Inner>);

#[derive(Debug)]
struct Inner {
    exit: Exit,
    message: String,
}

impl Failure {
    pub(crate) fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self(Box::new(Inner { exit, message: message.into() }))
    }

    pub(crate) fn failed(message: impl Into<String>) -> Self {
        Self::new(Exit::Failed, message)
    }

    /// Ends without a message, which was given already.
    pub(crate) fn silent(exit: Exit) -> Self {
        Self::new(exit, "")
    }

    pub(crate) fn exit(&self) -> Exit {
        self.0.exit
    }

    pub(crate) fn is_silent(&self) -> bool {
        self.0.message.is_empty()
    }

    /// Says in front what was being done.
    pub(crate) fn while_doing(self, what: impl fmt::Display) -> Self {
        Self::new(self.0.exit, format!("{what}: {}", self.0.message))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl From<fabric::Error> for Failure {
    fn from(error: fabric::Error) -> Self {
        let exit = match error.kind() {
            ErrorKind::NoProvider => Exit::NoProvider,
            ErrorKind::DeadlineExceeded => Exit::Deadline,
            _ => Exit::Failed,
        };
        Self::new(exit, error.to_string())
    }
}

/// What the library says that it does when a topic is to lie in a device's memory.
const DEVICE: &str = "open the device of a topic";

impl From<pubsub::Error> for Failure {
    fn from(error: pubsub::Error) -> Self {
        use pubsub::ErrorKind as Kind;
        let exit = match error.kind() {
            Kind::InvalidArgument | Kind::SettingsDiffer => Exit::Usage,
            Kind::DeadlineExceeded => Exit::Deadline,
            Kind::NoProvider => Exit::NoProvider,
            // What is not there is a device, and nobody.
            Kind::Unknown if error.operation() == DEVICE => Exit::NoProvider,
            Kind::Unknown | Kind::Closed => Exit::NobodyThere,
            Kind::OverBudget | Kind::TooLong | Kind::TooMany | Kind::TooManyLoans => Exit::TooMuch,
            Kind::Evicted => Exit::Missed,
            Kind::Denied => Exit::Denied,
            Kind::AlreadyServed => Exit::Taken,
            _ => Exit::Failed,
        };
        Self::new(exit, error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_is_not_there_is_not_nobody() {
        let path = std::env::temp_dir().join(format!("fabricast-exit-{}", std::process::id()));
        let options = pubsub::NodeOptions { directory: path.clone(), ..Default::default() };
        let node = pubsub::Node::join(options).unwrap();
        let memory = "stand-in:99".parse().unwrap();
        let wanted = pubsub::TopicSettings { memory, ..Default::default() };
        let exit = |error: pubsub::Error| Failure::from(error).exit();
        assert_eq!(exit(node.topic("t", &wanted).unwrap_err()), Exit::NoProvider);
        assert_eq!(exit(node.open("t").unwrap_err()), Exit::NobodyThere);
        drop(node);
        let _ = std::fs::remove_dir_all(path);
    }
}
