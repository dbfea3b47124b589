//! What is moved in one request: a list of blocks, or rows at regular distances.

mod block_queue;
mod strided;

use gpu::Block;

pub(crate) use block_queue::BlockQueue;

pub use strided::{MAX_STRIDES, Rows, Strided, Subarray};

/// The blocks of a request: made from a list of them, or from what [describes](Strided) them.
#[derive(Debug, Clone, Copy)]
pub struct Blocks<'a>(Kind<'a>);

#[derive(Debug, Clone, Copy)]
enum Kind<'a> {
    List(&'a [Block]),
    Strided(&'a Strided),
}

impl<'a> From<&'a [Block]> for Blocks<'a> {
    fn from(list: &'a [Block]) -> Self {
        Self(Kind::List(list))
    }
}

impl<'a, const N: usize> From<&'a [Block; N]> for Blocks<'a> {
    fn from(list: &'a [Block; N]) -> Self {
        Self(Kind::List(list))
    }
}

impl<'a> From<&'a Vec<Block>> for Blocks<'a> {
    fn from(list: &'a Vec<Block>) -> Self {
        Self(Kind::List(list))
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

    pub(crate) fn is_empty(self) -> bool {
        matches!(self.0, Kind::List([]))
    }

    /// The list; empty if they are [rows](Self::rows).
    pub(crate) fn list(self) -> &'a [Block] {
        match self.0 {
            Kind::List(list) => list,
            Kind::Strided(_) => &[],
        }
    }

    /// What describes them, if they are no list.
    pub(crate) fn rows(self) -> Option<&'a Strided> {
        match self.0 {
            Kind::List(_) => None,
            Kind::Strided(strided) => Some(strided),
        }
    }

    /// The only one, if there is only one.
    pub(crate) fn single(self) -> Option<Block> {
        match self.0 {
            Kind::List([block]) => Some(*block),
            Kind::List(_) => None,
            Kind::Strided(strided) if strided.count() == 1 => strided.iter().next(),
            Kind::Strided(_) => None,
        }
    }

    /// The bytes of all, if they lie in what has so many bytes; or which do not.
    pub(crate) fn check(self, to: u64, from: u64) -> Result<u64, String> {
        let list = match self.0 {
            Kind::List(list) => list,
            Kind::Strided(strided) => {
                let (to_end, from_end) = (strided.to_end(), strided.from_end());
                return match to_end <= to && from_end <= from {
                    true => Ok(strided.bytes()),
                    false => Err(format!(
                        "rows that end at {from_end} of {from}, and go to where {to_end} of {to} is"
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
                    "block {number}: {} bytes from {} of {from} to {} of {to}",
                    block.length, block.from, block.to
                ));
            }
            bytes = bytes.saturating_add(block.length);
        }
        Ok(bytes)
    }
}
