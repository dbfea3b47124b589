//! Which operations with a peer are over, as far as their order matters: by epochs.
//!
//! Every operation belongs to the epoch in which it was begun. A fence, a flush and an ordered notice
//! begin the next epoch, and wait until all earlier ones are over. Nothing here knows a clock or a
//! device.

use std::collections::VecDeque;

/// The operations with one peer.
#[derive(Debug, Default)]
pub(super) struct Order {
    epoch: u64,
    /// Operations that are under way, by epoch: the oldest first, and none that is over.
    under_way: VecDeque<(u64, usize)>,
    /// What is begun from now on waits for all earlier epochs than this one.
    fence: u64,
}

impl Order {
    /// One more is begun: gives its epoch.
    #[inline]
    pub(super) fn begin(&mut self) -> u64 {
        match self.under_way.back_mut() {
            Some((epoch, count)) if *epoch == self.epoch => *count += 1,
            _ => self.under_way.push_back((self.epoch, 1)),
        }
        self.epoch
    }

    /// One of this epoch is over.
    #[inline]
    pub(super) fn finish(&mut self, epoch: u64) {
        let found = self.under_way.iter_mut().find(|(of, _)| *of == epoch);
        if let Some((_, count)) = found {
            *count -= 1;
        }
        while self.under_way.front().is_some_and(|(_, count)| *count == 0) {
            self.under_way.pop_front();
        }
    }

    /// Begins the next epoch: gives it.
    pub(super) fn next(&mut self) -> u64 {
        self.epoch += 1;
        self.epoch
    }

    /// What is begun from now on waits for all that was begun before.
    pub(super) fn fence(&mut self) {
        self.fence = self.next();
    }

    /// Are all operations of earlier epochs than this one over?
    #[inline]
    pub(super) fn is_over_before(&self, epoch: u64) -> bool {
        self.under_way.front().is_none_or(|(oldest, _)| *oldest >= epoch)
    }

    /// What an operation has to wait for that is begun now: the end of all epochs before this one.
    #[inline]
    pub(super) fn held_until(&self) -> Option<u64> {
        (!self.is_over_before(self.fence)).then_some(self.fence)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fence_holds_what_comes_until_all_before_is_over() {
        let mut order = Order::default();
        let [first, second] = [order.begin(), order.begin()];
        assert_eq!(order.held_until(), None);
        order.fence();
        let fence = order.held_until().unwrap();
        let third = order.begin();
        assert!(third >= fence && second < fence);
        order.finish(second);
        assert_eq!(order.held_until(), Some(fence));
        order.finish(first);
        assert_eq!(order.held_until(), None);
        assert!(order.is_over_before(fence) && !order.is_over_before(fence + 1));
        order.finish(third);
        assert!(order.is_over_before(u64::MAX));
    }

    #[test]
    fn later_epochs_may_be_over_first() {
        let mut order = Order::default();
        let first = order.begin();
        let mark = order.next();
        let second = order.begin();
        order.finish(second);
        assert!(!order.is_over_before(mark));
        order.finish(first);
        assert!(order.is_over_before(mark) && order.under_way.is_empty());
        // Nothing was begun since: one more mark is reached at once.
        let mark = order.next();
        assert!(order.is_over_before(mark));
    }
}
