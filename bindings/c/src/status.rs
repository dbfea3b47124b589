//! Status codes, as `fabricast.h` numbers them.

use std::ffi::CStr;

use pubsub::ErrorKind;

/// Result of every function of the interface. A number of the ABI is never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Status {
    /// Success.
    Ok = 0,
    /// Failure of a lower layer; see the message.
    Failed = -1,
    /// An argument that is never valid.
    InvalidArgument = -2,
    /// The topic exists with other settings.
    SettingsDiffer = -3,
    /// No such topic, node or publisher.
    NotFound = -4,
    /// The budget is too small.
    OverBudget = -5,
    /// The message is longer than the topic allows.
    TooLong = -6,
    /// A limit on the number of objects is reached.
    TooMany = -7,
    /// No message, or no space in the topic, and the call does not wait.
    WouldBlock = -8,
    /// The deadline passed.
    DeadlineExceeded = -9,
    /// The subscriber was evicted: it held samples for too long.
    Evicted = -10,
    /// This process is not allowed to use the node.
    Denied = -11,
    /// Malformed external data.
    Malformed = -12,
    /// The other side speaks another version.
    VersionMismatch = -13,
    /// The node, or an object of it, was closed or lost.
    Closed = -14,
    /// The handle belongs to the parent process.
    Forked = -15,
    /// Not an open handle of this kind.
    BadHandle = -16,
    /// An internal error (panic).
    Panicked = -17,
    /// The message will never be complete: its publisher was lost before a stream had written it.
    Poisoned = -18,
    /// The publisher has the maximum number of loans.
    TooManyLoans = -19,
    /// The subscriber holds the maximum number of samples of a topic that drops messages.
    TooManySamples = -20,
    /// No provider can replicate messages to other nodes, or libfabric is not installed.
    NoProvider = -21,
    /// A signal handler ran in the calling thread while it waited.
    Interrupted = -22,
}

impl Status {
    /// Labels in the order of the numbers.
    const ALL: [(Self, &CStr); 23] = [
        (Self::Ok, c"ok"),
        (Self::Failed, c"failed"),
        (Self::InvalidArgument, c"invalid argument"),
        (Self::SettingsDiffer, c"settings differ"),
        (Self::NotFound, c"not found"),
        (Self::OverBudget, c"over budget"),
        (Self::TooLong, c"too long"),
        (Self::TooMany, c"too many"),
        (Self::WouldBlock, c"would block"),
        (Self::DeadlineExceeded, c"deadline exceeded"),
        (Self::Evicted, c"evicted"),
        (Self::Denied, c"denied"),
        (Self::Malformed, c"malformed"),
        (Self::VersionMismatch, c"version mismatch"),
        (Self::Closed, c"closed"),
        (Self::Forked, c"used after a fork"),
        (Self::BadHandle, c"not an open handle"),
        (Self::Panicked, c"internal error"),
        (Self::Poisoned, c"poisoned"),
        (Self::TooManyLoans, c"too many loans"),
        (Self::TooManySamples, c"too many samples"),
        (Self::NoProvider, c"no provider"),
        (Self::Interrupted, c"interrupted"),
    ];

    /// The status of a number from C.
    pub(crate) fn of_number(number: i32) -> Option<Self> {
        Self::ALL.into_iter().map(|(status, _)| status).find(|status| *status as i32 == number)
    }

    /// The label.
    pub(crate) fn label(self) -> &'static CStr {
        Self::ALL[-(self as i32) as usize].1
    }
}

impl From<ErrorKind> for Status {
    fn from(kind: ErrorKind) -> Self {
        match kind {
            ErrorKind::InvalidArgument => Self::InvalidArgument,
            ErrorKind::SettingsDiffer => Self::SettingsDiffer,
            ErrorKind::NotFound | ErrorKind::NoDevice => Self::NotFound,
            ErrorKind::OverBudget => Self::OverBudget,
            ErrorKind::TooLong => Self::TooLong,
            ErrorKind::TooMany => Self::TooMany,
            ErrorKind::TooManyLoans => Self::TooManyLoans,
            ErrorKind::TooManySamples => Self::TooManySamples,
            ErrorKind::WouldBlock => Self::WouldBlock,
            ErrorKind::DeadlineExceeded => Self::DeadlineExceeded,
            ErrorKind::Evicted => Self::Evicted,
            ErrorKind::Denied => Self::Denied,
            ErrorKind::Malformed => Self::Malformed,
            ErrorKind::VersionMismatch => Self::VersionMismatch,
            ErrorKind::Closed => Self::Closed,
            ErrorKind::Forked => Self::Forked,
            ErrorKind::Poisoned => Self::Poisoned,
            ErrorKind::NoProvider => Self::NoProvider,
            ErrorKind::Interrupted => Self::Interrupted,
            // Kinds of later versions have no number yet.
            _ => Self::Failed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_statuses_convert_both_ways() {
        for (index, (status, label)) in Status::ALL.into_iter().enumerate() {
            assert_eq!(status.label(), label);
            assert_eq!(status as i32, -(index as i32));
            assert_eq!(Status::of_number(status as i32), Some(status));
        }
        assert_eq!(Status::of_number(1), None);
        assert_eq!(Status::of_number(i32::MIN), None);
    }

    #[test]
    fn labels_are_unique() {
        let mut labels: Vec<_> = Status::ALL.into_iter().map(|(_, label)| label).collect();
        labels.sort_unstable();
        labels.dedup();
        assert_eq!(labels.len(), Status::ALL.len());
    }

    #[test]
    fn header_has_the_same_numbers() {
        let header = include_str!("../include/fabricast.h");
        let stated: Vec<i32> = header
            .lines()
            .filter_map(|line| line.trim().strip_prefix("#define FABRICAST_E_"))
            .filter_map(|line| line.split_once('(')?.1.split_once(')')?.0.parse().ok())
            .collect();
        let ours: Vec<i32> = Status::ALL[1..].iter().map(|(status, _)| *status as i32).collect();
        assert_eq!(stated, ours);
    }
}
