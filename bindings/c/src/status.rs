//! Status codes, as `fabricast.h` numbers them.

use std::ffi::CStr;

macro_rules! statuses {
    ($($name:ident = $number:literal $label:literal,)*) => {
        /// Result of every function of the interface, as `fabricast.h` describes it. A number of
        /// the ABI is never reused.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(i32)]
        pub(crate) enum Status {
            $($name = $number,)*
        }

        impl Status {
            /// Labels in the order of the numbers.
            const ALL: [(Self, &CStr); 29] = [$((Self::$name, $label),)*];
        }
    };
}

statuses! {
    Ok = 0 c"ok",
    Failed = -1 c"failed",
    InvalidArgument = -2 c"invalid argument",
    SettingsDiffer = -3 c"settings differ",
    NotFound = -4 c"not found",
    OverBudget = -5 c"over budget",
    TooLong = -6 c"too long",
    TooMany = -7 c"too many",
    WouldBlock = -8 c"would block",
    DeadlineExceeded = -9 c"deadline exceeded",
    Evicted = -10 c"evicted",
    Denied = -11 c"denied",
    Malformed = -12 c"malformed",
    VersionMismatch = -13 c"version mismatch",
    Closed = -14 c"closed",
    Forked = -15 c"used after a fork",
    BadHandle = -16 c"not an open handle",
    Panicked = -17 c"internal error",
    Poisoned = -18 c"poisoned",
    TooManyLoans = -19 c"too many loans",
    TooManySamples = -20 c"too many samples",
    NoProvider = -21 c"no provider",
    Interrupted = -22 c"interrupted",
    NoPath = -23 c"no path",
    Stale = -24 c"stale",
    Cancelled = -25 c"cancelled",
    NoPublishers = -26 c"no publishers",
    RankFailed = -27 c"a rank has ended",
    Mismatch = -28 c"ranks called different operations",
}

impl Status {
    /// The status of a number from C.
    pub(crate) fn of_number(number: i32) -> Option<Self> {
        Self::ALL.into_iter().map(|(status, _)| status).find(|status| *status as i32 == number)
    }

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
        | Malformed | VersionMismatch | Closed | Forked | Poisoned | NoProvider | Interrupted
        | NoPublishers,
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
    collective: InvalidArgument | Mismatch | VersionMismatch | DeadlineExceeded | RankFailed
        | Closed | Malformed | Forked,
        Unavailable => NotFound;
    launch: InvalidArgument | VersionMismatch | DeadlineExceeded | RankFailed | Closed | Malformed,
        InvalidEnvironment => InvalidArgument,
        Unavailable => NotFound;
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
