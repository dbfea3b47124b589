//! The versions of PMI.

use std::fmt;

/// The version of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PmiVersion {
    /// PMI-1: MPICH, Intel MPI, Flux.
    One,
    /// PMI-2: Slurm.
    Two,
}

impl PmiVersion {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::One => "PMI-1",
            Self::Two => "PMI-2",
        }
    }

    /// Version and subversion.
    pub(super) fn numbers(self) -> (&'static str, &'static str) {
        match self {
            Self::One => ("1", "1"),
            Self::Two => ("2", "0"),
        }
    }

    pub(super) fn of_number(number: &str) -> Option<Self> {
        [Self::One, Self::Two].into_iter().find(|version| version.numbers().0 == number)
    }
}

impl fmt::Display for PmiVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
