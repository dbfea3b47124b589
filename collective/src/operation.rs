//! Operations, and the key under which their parameters are learnt.

use std::fmt;

use reduction::DataType;

/// A collective operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
#[repr(u8)]
pub enum Operation {
    /// All ranks get the reduction of the elements of all.
    AllReduce = 1,
    /// All ranks get the blocks of all.
    AllGather,
    /// Each rank gets its block of the reduction.
    ReduceScatter,
    /// All ranks get the elements of the root.
    Broadcast,
    /// Each rank gets a block from each.
    AllToAll,
    /// The root gets the blocks of all.
    Gather,
    /// Each rank gets a block of the root.
    Scatter,
    /// The root gets the reduction of the elements of all.
    Reduce,
    /// No rank continues before all have come.
    Barrier,
}

impl Operation {
    /// All operations.
    pub const ALL: [Self; 9] = [
        Self::AllReduce,
        Self::AllGather,
        Self::ReduceScatter,
        Self::Broadcast,
        Self::AllToAll,
        Self::Gather,
        Self::Scatter,
        Self::Reduce,
        Self::Barrier,
    ];

    /// The name in reports and options: `all-reduce`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all-reduce",
            Self::AllGather => "all-gather",
            Self::ReduceScatter => "reduce-scatter",
            Self::Broadcast => "broadcast",
            Self::AllToAll => "all-to-all",
            Self::Gather => "gather",
            Self::Scatter => "scatter",
            Self::Reduce => "reduce",
            Self::Barrier => "barrier",
        }
    }

    /// The operation of a number, as `operation as u8` gives it.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number).checked_sub(1)?).copied()
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A class of sizes: those up to a power of two, and above half of it.
///
/// ```
/// use collective::SizeClass;
/// assert_eq!(SizeClass::of(4096), SizeClass::of(2049));
/// assert_ne!(SizeClass::of(4096), SizeClass::of(4097));
/// assert_eq!(SizeClass::of(4097).largest(), 8192);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SizeClass(u8);

impl SizeClass {
    /// The number of classes: the last one also has all larger sizes.
    pub const COUNT: u8 = 48;

    /// The class of a size in bytes.
    #[must_use]
    pub fn of(bytes: u64) -> Self {
        let bits = u64::BITS - bytes.saturating_sub(1).leading_zeros();
        Self((bits as u8).min(Self::COUNT - 1))
    }

    /// The largest size of the class in bytes.
    #[must_use]
    pub fn largest(self) -> u64 {
        1 << self.0
    }

    /// The class of a number below [`COUNT`](Self::COUNT).
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        (number < Self::COUNT).then_some(Self(number))
    }

    /// The number of the class.
    #[must_use]
    pub fn number(self) -> u8 {
        self.0
    }
}

/// The key of a row of the parameter table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OpKey {
    /// The operation.
    pub operation: Operation,
    /// The class of the bytes that one rank contributes or gets, whichever is less.
    pub size_class: SizeClass,
    /// The type of the elements, bytes for operations that only move them.
    pub data_type: DataType,
}

impl OpKey {
    /// The number of keys.
    pub const COUNT: u32 =
        (Operation::ALL.len() * DataType::ALL.len() * SizeClass::COUNT as usize) as u32;

    /// The number of the key, below [`COUNT`](Self::COUNT): its row in the table.
    #[must_use]
    pub fn row(self) -> u32 {
        let operation = self.operation as u32 - 1;
        let data_type = self.data_type as u32 - 1;
        (operation * DataType::ALL.len() as u32 + data_type) * u32::from(SizeClass::COUNT)
            + u32::from(self.size_class.0)
    }

    /// The key of a row.
    #[must_use]
    pub fn of_row(row: u32) -> Option<Self> {
        let (rest, class) = (row / u32::from(SizeClass::COUNT), row % u32::from(SizeClass::COUNT));
        let types = DataType::ALL.len() as u32;
        Some(Self {
            operation: *Operation::ALL.get((rest / types) as usize)?,
            data_type: DataType::ALL[(rest % types) as usize],
            size_class: SizeClass(class as u8),
        })
    }
}

impl fmt::Display for OpKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} up to {} B", self.operation, self.data_type, self.size_class.largest())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_keys_correspond() {
        for row in 0..OpKey::COUNT {
            assert_eq!(OpKey::of_row(row).unwrap().row(), row);
        }
        assert_eq!(OpKey::of_row(OpKey::COUNT), None);
        assert_eq!(OpKey::of_row(u32::MAX), None);
        for operation in Operation::ALL {
            assert_eq!(Operation::from_number(operation as u8), Some(operation));
        }
        assert_eq!((Operation::from_number(0), Operation::from_number(10)), (None, None));
    }

    #[test]
    fn classes_end_at_powers_of_two() {
        assert_eq!(
            [0, 1, 2, 3, 4, 5].map(|bytes| SizeClass::of(bytes).number()),
            [0, 0, 1, 2, 2, 3]
        );
        assert_eq!(SizeClass::of(u64::MAX).number(), SizeClass::COUNT - 1);
        assert_eq!(SizeClass::from_number(SizeClass::COUNT), None);
    }
}
