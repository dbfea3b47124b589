//! The pieces of a pool that one process has.
//!
//! A piece has a number, and a unique name: a process that was disconnected for long may have a
//! piece that the others never used, and replaced.

use std::os::fd::OwnedFd;

use crate::error::{Error, ErrorKind, Result};

#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) memory: OwnedFd,
    pub(crate) length: u64,
    pub(crate) name: u64,
}

impl Piece {
    pub(super) fn try_clone(&self) -> std::io::Result<Self> {
        Ok(Self { memory: self.memory.try_clone()?, ..*self })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PieceStored {
    Stored,
    /// The piece is stored, in the place of another one.
    Replaced,
    /// Another piece has its number, or earlier pieces are missing.
    Rejected,
}

/// The first pieces of a pool.
#[derive(Debug, Default)]
pub(super) struct Pieces {
    all: Vec<Piece>,
    /// Number of mapped pieces; these cannot be replaced any more.
    mapped: usize,
}

impl Pieces {
    pub(super) fn count(&self) -> usize {
        self.all.len()
    }

    pub(super) fn get(&self, number: usize) -> Option<&Piece> {
        self.all.get(number)
    }

    /// Stores a piece, if it does not contradict the name in the control segment.
    pub(super) fn keep(
        &mut self,
        number: usize,
        piece: Piece,
        recorded_name: Option<u64>,
    ) -> PieceStored {
        let is_right = recorded_name.is_none_or(|name| name == piece.name);
        self.store(number, piece, is_right, is_right && recorded_name.is_some())
    }

    /// Stores a piece in place of earlier pieces with its number, or a higher one.
    pub(super) fn adopt(&mut self, number: usize, piece: Piece) -> Result<()> {
        if self.store(number, piece, true, true) != PieceStored::Rejected {
            return Ok(());
        }
        let known = self.all.len();
        let mapped = self.mapped;
        let detail = format!("piece {number} out of range: {known} are known and {mapped} in use");
        Err(Error::new("store piece of pool", ErrorKind::InvalidArgument, detail))
    }

    /// Stores a piece behind the last one, or in place of those from its number on that are not
    /// mapped.
    fn store(
        &mut self,
        number: usize,
        piece: Piece,
        may_append: bool,
        may_replace: bool,
    ) -> PieceStored {
        let stored = match self.all.get(number) {
            Some(known) if known.name == piece.name => return PieceStored::Stored,
            Some(_) if may_replace && number >= self.mapped => PieceStored::Replaced,
            None if may_append && number == self.all.len() && number < super::MAX_PIECES => {
                PieceStored::Stored
            }
            _ => return PieceStored::Rejected,
        };
        self.all.truncate(number);
        self.all.push(piece);
        stored
    }

    /// The next piece to map, if the control segment names it.
    pub(super) fn next_to_map(
        &self,
        recorded_name: impl Fn(usize) -> Option<u64>,
    ) -> Option<&Piece> {
        self.all.get(self.mapped).filter(|piece| recorded_name(self.mapped) == Some(piece.name))
    }

    pub(super) fn is_mapped(&mut self) {
        self.mapped += 1;
    }
}
