//! Elements and blocks of arrays, as collective operations see them.

use collective::{Blocks, DataType, ReduceOp};

use crate::array::Source;
use crate::failure::{Failure, Result};
use crate::param_store::element_type;

/// Elements of an array, as an operation sees them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Elements {
    data_type: DataType,
    /// Elements of the operation in one of the array: its bytes, for types that are only moved.
    each: usize,
}

/// How a name says that elements are reduced.
pub(crate) fn reduce_op(operation: &'static str, name: &str) -> Result<ReduceOp> {
    let found = ReduceOp::ALL.into_iter().find(|op| op.name() == name);
    found.ok_or_else(|| {
        let names = ReduceOp::ALL.map(ReduceOp::name).join(", ");
        Failure::invalid(operation, format!("op=\"{name}\": {names}"))
    })
}

impl Elements {
    /// Of an operation without elements.
    pub(crate) const NONE: Self = Self { data_type: DataType::U8, each: 1 };

    pub(crate) fn data_type(self) -> DataType {
        self.data_type
    }

    /// Elements of the operation in one of the array.
    pub(crate) fn each(self) -> usize {
        self.each
    }

    /// Of an operation that only moves elements.
    pub(crate) fn moved(operation: &'static str, source: &Source) -> Result<Self> {
        let data_type = source.data_type();
        match (element_type(data_type), data_type.item_size()) {
            (Some(data_type), _) => Ok(Self { data_type, each: 1 }),
            (None, Some(size)) => Ok(Self { data_type: DataType::U8, each: size as usize }),
            (None, None) => {
                let cause = format!("elements of {data_type} share bytes: view them as uint8");
                Err(Failure::invalid(operation, cause))
            }
        }
    }

    /// Of an operation that reduces elements.
    pub(crate) fn reduced(operation: &'static str, source: &Source, op: ReduceOp) -> Result<Self> {
        let data_type = source.data_type();
        let is_bool = data_type.codes() == (6, 8, 1);
        match element_type(data_type) {
            Some(data_type) => Ok(Self { data_type, each: 1 }),
            None if is_bool && matches!(op, ReduceOp::Min | ReduceOp::Max | ReduceOp::Product) => {
                Ok(Self { data_type: DataType::U8, each: 1 })
            }
            None => {
                let remedy = if is_bool { ": min is \"all\", max is \"any\"" } else { "" };
                let cause = format!("elements of {data_type} have no {op}{remedy}");
                Err(Failure::invalid(operation, cause))
            }
        }
    }

    /// The elements of an array, for the operation.
    pub(crate) fn count(self, source: &Source) -> usize {
        (source.layout().elements() as usize).saturating_mul(self.each)
    }

    pub(crate) fn is_of(self, other: Self) -> bool {
        (self.data_type, self.each) == (other.data_type, other.each)
    }
}

/// Blocks of different numbers of elements, one after the other.
#[derive(Debug)]
pub(crate) struct UnequalBlocks {
    counts: Vec<usize>,
    offsets: Vec<usize>,
}

impl UnequalBlocks {
    pub(crate) fn new(counts: &[usize], each: usize) -> Self {
        let counts: Vec<_> = counts.iter().map(|count| count.saturating_mul(each)).collect();
        let mut total = 0_usize;
        let offsets = counts.iter().map(|count| {
            let offset = total;
            total = total.saturating_add(*count);
            offset
        });
        let offsets = offsets.collect();
        Self { counts, offsets }
    }

    pub(crate) fn get(&self) -> Blocks<'_> {
        Blocks::Unequal { counts: &self.counts, offsets: &self.offsets }
    }
}
