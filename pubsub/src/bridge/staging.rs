//! Which pieces of a topic's messages lie in slots of pinned memory.
//!
//! Pieces are numbered through a topic: its *serials*. A piece is copied out once and written to
//! all destinations that are near it; one that is far behind has its pieces copied again, so that
//! it holds up nobody.

use std::ops::Range;

/// A slot with a piece in it.
#[derive(Debug)]
pub(super) struct Staged<T> {
    pub(super) serial: u64,
    /// The number of its message's entry.
    pub(super) entry: u64,
    pub(super) slot: u32,
    /// Which copy of the topic it was: given when it is put.
    pub(super) order: u64,
    pub(super) state: State<T>,
    /// Writes from it that the provider is not done with.
    pub(super) holds: u32,
    /// Writes from it were given up, but may go on: nobody else may use the slot.
    pub(super) is_tainted: bool,
}

#[derive(Debug)]
pub(super) enum State<T> {
    /// Being copied since then.
    Copying(T, u64),
    Ready,
}

/// Who will want pieces: from this serial on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Want {
    pub(super) from: u64,
    /// It cannot go on now.
    pub(super) is_blocked: bool,
}

/// How badly a piece is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Need {
    Nobody,
    /// Those who cannot go on now.
    Blocked,
    /// Somebody, much later.
    Far,
    /// Somebody, soon.
    Soon,
    /// Somebody, now.
    Now,
}

/// The slots of a topic.
#[derive(Debug)]
pub(super) struct Stage<T> {
    items: Vec<Staged<T>>,
    /// Copies that were begun.
    begun: u64,
    /// Slots that a topic has at most, and pieces that are copied ahead.
    most: usize,
}

impl<T> Stage<T> {
    pub(super) fn new(most: usize) -> Self {
        Self { items: Vec::with_capacity(most), begun: 0, most: most.max(1) }
    }

    pub(super) fn ahead(&self) -> u64 {
        self.most as u64
    }

    pub(super) fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    pub(super) fn has_place(&self) -> bool {
        self.items.len() < self.most
    }

    pub(super) fn find(&mut self, serial: u64) -> Option<&mut Staged<T>> {
        self.items.iter_mut().find(|item| item.serial == serial)
    }

    pub(super) fn has(&self, serial: u64) -> bool {
        self.items.iter().any(|item| item.serial == serial)
    }

    /// Does a device read this entry?
    pub(super) fn is_copying(&self, entry: u64) -> bool {
        let is_it = |item: &Staged<T>| item.entry == entry;
        self.items.iter().any(|item| is_it(item) && matches!(item.state, State::Copying(..)))
    }

    pub(super) fn items(&mut self) -> &mut [Staged<T>] {
        &mut self.items
    }

    pub(super) fn put(&mut self, item: Staged<T>) {
        self.items.push(Staged { order: self.begun, ..item });
        self.begun += 1;
    }

    /// The piece whose copy was begun first, of those that are being copied.
    pub(super) fn oldest_copy(&mut self) -> Option<&mut Staged<T>> {
        let copies = self.items.iter_mut().filter(|item| matches!(item.state, State::Copying(..)));
        copies.min_by_key(|item| item.order)
    }

    /// A write from a piece is over, as far as we know. With whether it may go on all the same.
    pub(super) fn let_go(&mut self, serial: u64, may_go_on: bool) {
        if let Some(item) = self.find(serial) {
            item.holds -= 1;
            item.is_tainted |= may_go_on;
        }
    }

    /// How badly a piece is wanted by these.
    fn need(&self, serial: u64, wants: &[Want]) -> Need {
        let of = |want: &Want| match serial.checked_sub(want.from) {
            None => Need::Nobody,
            Some(_) if want.is_blocked => Need::Blocked,
            Some(0) => Need::Now,
            Some(distance) if distance < self.ahead() => Need::Soon,
            Some(_) => Need::Far,
        };
        wants.iter().map(of).max().unwrap_or(Need::Nobody)
    }

    fn is_free(item: &Staged<T>) -> bool {
        item.holds == 0 && matches!(item.state, State::Ready)
    }

    /// Takes out a slot that nobody needs.
    pub(super) fn unneeded(&mut self, wants: &[Want]) -> Option<Staged<T>> {
        let is_it =
            |item: &Staged<T>| Self::is_free(item) && self.need(item.serial, wants) == Need::Nobody;
        let place = self.items.iter().position(is_it)?;
        Some(self.items.swap_remove(place))
    }

    /// Takes out the slot that is needed least, if less than this.
    pub(super) fn victim(&mut self, wants: &[Want], below: Need) -> Option<Staged<T>> {
        let free = self.items.iter().enumerate().filter(|(_, item)| Self::is_free(item));
        let ranked = free.map(|(place, item)| {
            (self.need(item.serial, wants), std::cmp::Reverse(item.serial), place)
        });
        let (need, _, place) = ranked.min()?;
        (need < below).then(|| self.items.swap_remove(place))
    }

    /// Takes out one of the pieces of entries that are no more.
    pub(super) fn outside(&mut self, entries: &Range<u64>) -> Option<Staged<T>> {
        let place = self
            .items
            .iter()
            .position(|item| Self::is_free(item) && !entries.contains(&item.entry))?;
        Some(self.items.swap_remove(place))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stage(serials: &[u64]) -> Stage<()> {
        let mut stage = Stage::new(4);
        for serial in serials {
            stage.put(Staged {
                serial: *serial,
                entry: 0,
                slot: *serial as u32,
                order: 0,
                state: State::Ready,
                holds: 0,
                is_tainted: false,
            });
        }
        stage
    }

    fn want(from: u64) -> Want {
        Want { from, is_blocked: false }
    }

    #[test]
    fn what_is_needed_least_goes_first() {
        let mut stage = stage(&[3, 5, 6, 20]);
        let wants = [want(5), Want { from: 2, is_blocked: true }];
        let order: Vec<_> =
            std::iter::from_fn(|| stage.victim(&wants, Need::Now).map(|item| item.serial))
                .collect();
        assert_eq!(order, [3, 20, 6], "and never the one that is wanted now");
        assert!(stage.has(5));
    }

    #[test]
    fn copies_are_looked_at_in_the_order_in_which_they_began() {
        let mut stage = stage(&[3, 1, 2]);
        stage.items().iter_mut().for_each(|item| item.state = State::Copying((), 0));
        // One that is taken out changes the places of others.
        stage.items()[0].state = State::Ready;
        assert_eq!(stage.unneeded(&[want(4)]).map(|item| item.serial), Some(3));
        let mut order = Vec::new();
        while let Some(item) = stage.oldest_copy() {
            item.state = State::Ready;
            order.push(item.serial);
        }
        assert_eq!(order, [1, 2]);
    }

    #[test]
    fn what_all_have_written_is_unneeded() {
        let mut stage = stage(&[3, 4, 5]);
        stage.items()[1].holds = 1;
        let wants = [want(5)];
        assert_eq!(stage.unneeded(&wants).map(|item| item.serial), Some(3));
        assert!(stage.unneeded(&wants).is_none(), "one is still being written from");
        stage.let_go(4, true);
        assert!(stage.unneeded(&wants).is_some_and(|item| item.is_tainted));
    }
}
