//! Which pieces of a topic's messages lie in slots of pinned memory.
//!
//! Pieces are numbered through a topic. A piece is copied out once, and written to all destinations
//! that need it soon. For a destination that lags far its pieces are copied again, so that it
//! blocks no other.

use std::ops::Range;

use super::{PieceDemand, StagedPiece};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum PiecePriority {
    Unneeded,
    /// Needed by destinations without credit.
    Blocked,
    Later,
    Soon,
    Now,
}

/// The slots of a topic.
#[derive(Debug)]
pub(super) struct StagingArea<T> {
    items: Vec<StagedPiece<T>>,
    /// Number of copies begun.
    begun: u64,
    /// Limit of a topic's slots, and of pieces copied ahead.
    max_slots: usize,
}

impl<T> StagingArea<T> {
    pub(super) fn new(max_slots: usize) -> Self {
        Self { items: Vec::with_capacity(max_slots), begun: 0, max_slots: max_slots.max(1) }
    }

    pub(super) fn ahead(&self) -> u64 {
        self.max_slots as u64
    }

    pub(super) fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    pub(super) fn has_free_slot(&self) -> bool {
        self.items.len() < self.max_slots
    }

    pub(super) fn find(&mut self, piece_index: u64) -> Option<&mut StagedPiece<T>> {
        self.items.iter_mut().find(|item| item.piece_index == piece_index)
    }

    pub(super) fn has(&self, piece_index: u64) -> bool {
        self.items.iter().any(|item| item.piece_index == piece_index)
    }

    /// Returns true if a device reads this entry.
    pub(super) fn is_copying(&self, entry: u64) -> bool {
        self.items.iter().any(|item| item.entry == entry && item.is_copying())
    }

    pub(super) fn items(&mut self) -> &mut [StagedPiece<T>] {
        &mut self.items
    }

    pub(super) fn put(&mut self, item: StagedPiece<T>) {
        self.items.push(StagedPiece { order: self.begun, ..item });
        self.begun += 1;
    }

    /// The piece whose copy began first, among copies in progress.
    pub(super) fn oldest_copy(&mut self) -> Option<&mut StagedPiece<T>> {
        self.items.iter_mut().filter(|item| item.is_copying()).min_by_key(|item| item.order)
    }

    /// A write from a piece has ended, as far as is known; `may_go_on` if it may still continue.
    pub(super) fn write_finished(&mut self, piece_index: u64, may_go_on: bool) {
        if let Some(item) = self.find(piece_index) {
            item.pending_writes -= 1;
            item.is_quarantined |= may_go_on;
        }
    }

    fn priority(&self, piece_index: u64, demands: &[PieceDemand]) -> PiecePriority {
        let of = |demand: &PieceDemand| match piece_index.checked_sub(demand.from) {
            None => PiecePriority::Unneeded,
            Some(_) if demand.is_blocked => PiecePriority::Blocked,
            Some(0) => PiecePriority::Now,
            Some(distance) if distance < self.ahead() => PiecePriority::Soon,
            Some(_) => PiecePriority::Later,
        };
        demands.iter().map(of).max().unwrap_or(PiecePriority::Unneeded)
    }

    fn is_free(item: &StagedPiece<T>) -> bool {
        item.pending_writes == 0 && !item.is_copying()
    }

    /// Removes the slot of lowest priority, if below this one.
    pub(super) fn victim(
        &mut self,
        demands: &[PieceDemand],
        below: PiecePriority,
    ) -> Option<StagedPiece<T>> {
        let free = self.items.iter().enumerate().filter(|(_, item)| Self::is_free(item));
        let ranked = free.map(|(index, item)| {
            (self.priority(item.piece_index, demands), std::cmp::Reverse(item.piece_index), index)
        });
        let (priority, _, index) = ranked.min()?;
        (priority < below).then(|| self.items.swap_remove(index))
    }

    /// Removes one of the pieces of released entries.
    pub(super) fn outside_entries(&mut self, entries: &Range<u64>) -> Option<StagedPiece<T>> {
        let is_outside = |item: &StagedPiece<T>| !entries.contains(&item.entry);
        let index = self.items.iter().position(|item| Self::is_free(item) && is_outside(item))?;
        Some(self.items.swap_remove(index))
    }
}

#[cfg(test)]
mod tests {
    use super::super::CopyState;
    use super::*;

    fn staging(serials: &[u64]) -> StagingArea<()> {
        let mut staging = StagingArea::new(4);
        for piece_index in serials {
            staging.put(StagedPiece {
                piece_index: *piece_index,
                entry: 0,
                slot: *piece_index as u32,
                order: 0,
                state: CopyState::Ready,
                pending_writes: 0,
                is_quarantined: false,
            });
        }
        staging
    }

    fn demand(from: u64) -> PieceDemand {
        PieceDemand { from, is_blocked: false }
    }

    #[test]
    fn least_needed_piece_is_evicted_first() {
        let mut staging = staging(&[3, 5, 6, 20]);
        let demands = [demand(5), PieceDemand { from: 2, is_blocked: true }];
        let order: Vec<_> = std::iter::from_fn(|| {
            staging.victim(&demands, PiecePriority::Now).map(|item| item.piece_index)
        })
        .collect();
        assert_eq!(order, [3, 20, 6], "the piece needed now is never evicted");
        assert!(staging.has(5));
    }

    #[test]
    fn copies_are_polled_in_the_order_in_which_they_began() {
        let mut staging = staging(&[3, 1, 2]);
        staging.items().iter_mut().for_each(|item| item.state = CopyState::Copying((), 0));
        // Removing an item changes the indices of others.
        staging.items()[0].state = CopyState::Ready;
        assert_eq!(
            staging.victim(&[demand(4)], PiecePriority::Blocked).map(|item| item.piece_index),
            Some(3)
        );
        let mut order = Vec::new();
        while let Some(item) = staging.oldest_copy() {
            item.state = CopyState::Ready;
            order.push(item.piece_index);
        }
        assert_eq!(order, [1, 2]);
    }

    #[test]
    fn piece_written_to_all_destinations_is_unneeded() {
        let mut staging = staging(&[3, 4, 5]);
        staging.items()[1].pending_writes = 1;
        let demands = [demand(5)];
        assert_eq!(
            staging.victim(&demands, PiecePriority::Blocked).map(|item| item.piece_index),
            Some(3)
        );
        assert!(
            staging.victim(&demands, PiecePriority::Blocked).is_none(),
            "a write from piece 4 is pending"
        );
        staging.write_finished(4, true);
        assert!(
            staging
                .victim(&demands, PiecePriority::Blocked)
                .is_some_and(|item| item.is_quarantined)
        );
    }
}
