//! Blocks of a transfer, as callers pass them.

use gpu::Block;
use pyo3::prelude::*;
use transfer::{Blocks, Route, Strided, path};

use super::integers::{Integers, is_sequence};
use super::strided_rows::PyStrided;
use crate::failure::Result;

/// A list of blocks, or strided rows.
pub(super) enum RequestedBlocks {
    List(Vec<Block>),
    Strided(Strided),
}

impl RequestedBlocks {
    /// Of a list of (to, from, length), an array of such rows, or strided rows; None for the whole
    /// source region.
    pub(super) fn of(
        operation: path::Operation,
        route: &Route,
        blocks: Option<&Bound<'_, PyAny>>,
    ) -> Result<Self> {
        let Some(blocks) = blocks else { return Ok(Self::List(vec![route.whole(operation)])) };
        if let Ok(strided) = blocks.cast::<PyStrided>() {
            return Ok(Self::Strided(strided.get().rows_of_transfer()));
        }
        let rows: Vec<[u64; 3]> = match is_sequence(blocks) {
            true => {
                let rows: Vec<(u64, u64, u64)> = blocks.extract()?;
                rows.into_iter().map(Into::into).collect()
            }
            false => Integers::of(operation.name(), blocks)?.to_triples(operation.name())?,
        };
        let block = |[to, from, length]: [u64; 3]| Block { to, from, length };
        Ok(Self::List(rows.into_iter().map(block).collect()))
    }

    pub(super) fn blocks(&self) -> Blocks<'_> {
        match self {
            Self::List(blocks) => blocks.into(),
            Self::Strided(rows) => rows.into(),
        }
    }

    /// The list, also of strided rows.
    pub(super) fn into_list(self) -> Vec<Block> {
        match self {
            Self::List(blocks) => blocks,
            Self::Strided(rows) => rows.iter().collect(),
        }
    }
}
