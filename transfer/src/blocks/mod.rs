//! The blocks of a request: a list, or strided rows.

mod block_list_pool;
mod block_queue;
mod strided;

use gpu::Block;

pub(crate) use block_list_pool::BlockListPool;
pub(crate) use block_queue::BlockQueue;
pub(crate) use strided::Run;

pub use strided::{MAX_STRIDES, Rows, Strided, Subarray};

/// The blocks of a request: a list, or [strided rows](Strided).
#[derive(Debug, Clone, Copy)]
pub struct Blocks<'a>(Kind<'a>);

#[derive(Debug, Clone, Copy)]
enum Kind<'a> {
    List(&'a [Block]),
    Strided(&'a Strided),
}

impl<'a, T: AsRef<[Block]> + ?Sized> From<&'a T> for Blocks<'a> {
    fn from(list: &'a T) -> Self {
        Self(Kind::List(list.as_ref()))
    }
}

impl<'a> From<&'a Strided> for Blocks<'a> {
    fn from(strided: &'a Strided) -> Self {
        Self(Kind::Strided(strided))
    }
}

impl<'a> Blocks<'a> {
    pub(crate) fn each(self) -> impl Iterator<Item = Block> {
        self.list().iter().copied().chain(self.rows().into_iter().flatten())
    }

    pub(crate) fn count(self) -> usize {
        match self.0 {
            Kind::List(list) => list.len(),
            Kind::Strided(strided) => usize::try_from(strided.count()).unwrap_or(usize::MAX),
        }
    }

    pub(crate) fn is_empty(self) -> bool {
        matches!(self.0, Kind::List([]))
    }

    /// The list; empty for [strided rows](Self::rows).
    pub(crate) fn list(self) -> &'a [Block] {
        match self.0 {
            Kind::List(list) => list,
            Kind::Strided(_) => &[],
        }
    }

    /// The strided rows; None for a list.
    pub(crate) fn rows(self) -> Option<&'a Strided> {
        match self.0 {
            Kind::List(_) => None,
            Kind::Strided(strided) => Some(strided),
        }
    }

    /// The only block, if there is exactly one.
    pub(crate) fn single(self) -> Option<Block> {
        match self.0 {
            Kind::List([block]) => Some(*block),
            Kind::List(_) => None,
            Kind::Strided(strided) if strided.count() == 1 => strided.iter().next(),
            Kind::Strided(_) => None,
        }
    }

    /// The bytes of all blocks if they are within these lengths; otherwise the first violation.
    pub(crate) fn check(self, to: u64, from: u64) -> Result<u64, String> {
        let list = match self.0 {
            Kind::List(list) => list,
            Kind::Strided(strided) => {
                let (to_end, from_end) = (strided.to_end(), strided.from_end());
                return match to_end <= to && from_end <= from {
                    true => Ok(strided.bytes()),
                    false => Err(format!(
                        "rows read up to byte {from_end} of {from}, write up to byte {to_end} of {to}"
                    )),
                };
            }
        };
        let mut bytes = 0_u64;
        for (number, block) in list.iter().enumerate() {
            let is_inside = |at: u64, length: u64| {
                at.checked_add(block.length).is_some_and(|end| end <= length)
            };
            if !(is_inside(block.to, to) && is_inside(block.from, from)) {
                return Err(format!(
                    "block {number}: {} bytes from offset {} of {from} to offset {} of {to}",
                    block.length, block.from, block.to
                ));
            }
            bytes = bytes.saturating_add(block.length);
        }
        Ok(bytes)
    }
}
