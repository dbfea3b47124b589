//! Status codes, as `fabricast.h` numbers them.

use std::ffi::CStr;

macro_rules! statuses {
    ($($(#[$about:meta])* $name:ident = $number:literal $label:literal,)*) => {
        /// Result of every function of the interface. A number of the ABI is never reused.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(i32)]
        pub(crate) enum Status {
            $($(#[$about])* $name = $number,)*
        }

        impl Status {
            /// Labels in the order of the numbers.
            const ALL: [(Self, &CStr); 26] = [$((Self::$name, $label),)*];
        }
    };
}

statuses! {
    /// Success.
    Ok = 0 c"ok",
    /// Failure of a lower layer; see the message.
    Failed = -1 c"failed",
    /// An argument that is never valid.
    InvalidArgument = -2 c"invalid argument",
    /// The topic exists with other settings.
    SettingsDiffer = -3 c"settings differ",
    /// No such topic, node, device, peer, region or operation.
    NotFound = -4 c"not found",
    /// The budget is too small.
    OverBudget = -5 c"over budget",
    /// The message is longer than the topic allows.
    TooLong = -6 c"too long",
    /// A limit on the number of objects is reached.
    TooMany = -7 c"too many",
    /// No message, or no space in the topic, and the call does not wait.
    WouldBlock = -8 c"would block",
    /// The deadline passed.
    DeadlineExceeded = -9 c"deadline exceeded",
    /// The subscriber was evicted: it held samples for too long.
    Evicted = -10 c"evicted",
    /// Not allowed to use the node or agent, or to put into or get from the region.
    Denied = -11 c"denied",
    /// Malformed external data.
    Malformed = -12 c"malformed",
    /// The other side speaks another version.
    VersionMismatch = -13 c"version mismatch",
    /// The node, the peer, or an object of them, was closed or lost.
    Closed = -14 c"closed",
    /// The handle belongs to the parent process.
    Forked = -15 c"used after a fork",
    /// Not an open handle of this kind.
    BadHandle = -16 c"not an open handle",
    /// An internal error (panic).
    Panicked = -17 c"internal error",
    /// The message will never be complete: its publisher was lost before a stream had written it.
    Poisoned = -18 c"poisoned",
    /// The publisher has the maximum number of loans.
    TooManyLoans = -19 c"too many loans",
    /// The subscriber holds the maximum number of samples of a topic that drops messages.
    TooManySamples = -20 c"too many samples",
    /// No provider can replicate messages to other nodes, or libfabric is not installed.
    NoProvider = -21 c"no provider",
    /// A signal handler ran in the calling thread while it waited.
    Interrupted = -22 c"interrupted",
    /// No path between two regions is possible.
    NoPath = -23 c"no path",
    /// The region was withdrawn, or belongs to another agent, or its agent was restarted.
    Stale = -24 c"stale",
    /// The operation was not started, because one that it waited for failed.
    Cancelled = -25 c"cancelled",
}

impl Status {
    /// The status of a number from C.
    pub(crate) fn of_number(number: i32) -> Option<Self> {
        Self::ALL.into_iter().map(|(status, _)| status).find(|status| *status as i32 == number)
    }

    /// The label.
    pub(crate) fn label(self) -> &'static CStr {
        Self::ALL[-(self as i32) as usize].1
    }
}

/// Converts kinds of errors: those that have the name of a status, and others.
macro_rules! from_kinds {
    ($($library:ident: $($same:ident)|* $(, $($other:ident)|* => $status:ident)*;)*) => {$(
        impl From<$library::ErrorKind> for Status {
            fn from(kind: $library::ErrorKind) -> Self {
                use $library::ErrorKind as Kind;
                match kind {
                    $(Kind::$same => Self::$same,)*
                    $($(Kind::$other)|* => Self::$status,)*
                    // Kinds of later versions have no number yet.
                    _ => Self::Failed,
                }
            }
        }
    )*};
}

from_kinds! {
    pubsub: InvalidArgument | SettingsDiffer | NotFound | OverBudget | TooLong | TooMany
        | TooManyLoans | TooManySamples | WouldBlock | DeadlineExceeded | Evicted | Denied
        | Malformed | VersionMismatch | Closed | Forked | Poisoned | NoProvider | Interrupted,
        NoDevice => NotFound;
    transfer: Malformed | VersionMismatch | NoPath | Stale | Denied | TooMany | DeadlineExceeded
        | Closed | Cancelled | Forked,
        WrongMemory => Malformed,
        OutOfBounds => InvalidArgument,
        NoSuchDevice | Unknown => NotFound,
        NoPeerAccess => NoPath,
        NotAllowed => Denied;
    fabric: InvalidArgument | NoProvider,
        NoLibrary => NoProvider;
    gpu: InvalidArgument | OverBudget | DeadlineExceeded | Forked,
        OutOfBounds => InvalidArgument,
        NoSuchDevice | Unavailable => NotFound,
        OutOfMemory => OverBudget;
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
