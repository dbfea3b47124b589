//! What a rank calls, as it announces it for the others to compare.

use std::fmt;

use crate::domain_key::digest;
use crate::operation::Operation;
use reduction::{DataType, ReduceOp};

/// What a rank calls: all that must be the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Call {
    /// The operation.
    pub operation: Operation,
    /// The type of the elements.
    pub data_type: DataType,
    /// How elements are reduced; None for operations that move elements only.
    pub reduce_op: Option<ReduceOp>,
    /// The rank that has or gets all elements; None for operations without such a rank.
    pub root: Option<u32>,
    /// The elements of a block: of what a rank contributes or gets, whichever is less. For unequal
    /// blocks, of all together; 0 if the ranks do not know all.
    pub count: u64,
    /// A digest of the elements of each block, if they are unequal.
    pub blocks: u64,
}

impl Call {
    const NO_ROOT: u32 = u32::MAX;

    /// Returns it as words.
    pub(crate) fn encode(&self) -> ipc::Announcement {
        let numbers = u64::from(self.operation as u8)
            | u64::from(self.data_type as u8) << 8
            | u64::from(self.reduce_op.map_or(0, |op| op as u8)) << 16
            | u64::from(self.root.unwrap_or(Self::NO_ROOT)) << 32;
        [numbers, self.count, self.blocks, 0]
    }

    /// The call of words; None if another process wrote what is none.
    pub(crate) fn decode(words: &ipc::Announcement) -> Option<Self> {
        let [operation, data_type, reduce_op, _] = (words[0] as u32).to_le_bytes();
        let root = (words[0] >> 32) as u32;
        Some(Self {
            operation: Operation::from_number(operation)?,
            data_type: DataType::from_number(data_type)?,
            reduce_op: ReduceOp::from_number(reduce_op),
            root: (root != Self::NO_ROOT).then_some(root),
            count: words[1],
            blocks: words[2],
        })
    }

    /// A word by which ranks find that their calls differ.
    pub(crate) fn signature(&self) -> u64 {
        digest(self.encode())
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.operation)?;
        if self.operation != Operation::Barrier {
            write!(f, " of {} {}", self.count, self.data_type)?;
        }
        if let Some(op) = self.reduce_op {
            write!(f, " ({op})")?;
        }
        if let Some(root) = self.root {
            write!(f, " with root {root}")?;
        }
        if self.blocks != 0 {
            write!(f, " in blocks {:08x}", self.blocks as u32)?;
        }
        Ok(())
    }
}
