//! Which operations with a peer are over, as far as their order matters: by epochs.
//!
//! Every operation belongs to the epoch in which it was begun. A fence, a flush and an ordered notice
//! begin the next epoch, and wait until all earlier ones are over. If an operation fails, what waits
//! for its epoch is cancelled, until a flush takes note of the failure. Nothing here knows a clock or
//! a device.

use std::collections::VecDeque;

/// The operations with one peer.
#[derive(Debug, Default)]
pub(super) struct Order {
    epoch: u64,
    /// How many operations are under way, by epoch: the oldest first, and none that is over.
    under_way: VecDeque<(u64, usize)>,
    /// The first operation that failed since the last flush: its epoch, and what failed.
    failure: Option<(u64, String)>,
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
        let Ok(at) = self.under_way.binary_search_by_key(&epoch, |(of, _)| *of) else { return };
        let (_, count) = &mut self.under_way[at];
        *count -= 1;
        if *count == 0 {
            self.under_way.remove(at);
        }
    }

    /// One of this epoch failed, as the text says, and is over.
    pub(super) fn fail(&mut self, epoch: u64, what: impl FnOnce() -> String) {
        self.finish(epoch);
        // All that waits for a later epoch waits for this one, too: the earliest failure is kept.
        if self.failure.as_ref().is_none_or(|(of, _)| *of > epoch) {
            self.failure = Some((epoch, what()));
        }
    }

    /// Which operation of an earlier epoch than this one failed.
    pub(super) fn failure_before(&self, epoch: u64) -> Option<&str> {
        self.failure.as_ref().filter(|(of, _)| *of < epoch).map(|(_, what)| what.as_str())
    }

    /// All of earlier epochs than this one is over, and the caller is told of its failure: what comes
    /// next does not depend on it.
    pub(super) fn take_failure_before(&mut self, epoch: u64) -> Option<String> {
        self.failure.take_if(|(of, _)| *of < epoch).map(|(_, what)| what)
    }

    /// How many operations of earlier epochs than this one are under way.
    pub(super) fn count_before(&self, epoch: u64) -> usize {
        let before = self.under_way.iter().take_while(|(of, _)| *of < epoch);
        before.map(|(_, count)| count).sum()
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

    /// What an operation has to wait for that is begun now: the end of all epochs before this one. Also
    /// if all of them are over, and one of their operations failed.
    #[inline]
    pub(super) fn deferred_until(&self) -> Option<u64> {
        let is_free = self.is_over_before(self.fence)
            && (self.failure.is_none() || self.failure_before(self.fence).is_none());
        (!is_free).then_some(self.fence)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fence_defers_what_comes_until_all_before_is_over() {
        let mut order = Order::default();
        let [first, second] = [order.begin(), order.begin()];
        assert_eq!(order.deferred_until(), None);
        order.fence();
        let fence = order.deferred_until().unwrap();
        let third = order.begin();
        assert!(third >= fence && second < fence);
        order.finish(second);
        assert_eq!(order.deferred_until(), Some(fence));
        order.finish(first);
        assert_eq!(order.deferred_until(), None);
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

    #[test]
    fn failure_reaches_what_waits_for_it_until_a_flush() {
        let mut order = Order::default();
        let [first, second] = [order.begin(), order.begin()];
        order.fence();
        let fence = order.deferred_until().unwrap();
        let third = order.begin();
        order.fail(first, || "first".to_owned());
        order.fail(second, || "second".to_owned());
        assert!(order.is_over_before(fence));
        assert_eq!(order.failure_before(fence), Some("first"));
        assert_eq!(order.deferred_until(), Some(fence), "it was to wait for what failed");
        order.fail(third, || "third".to_owned());
        // What waits for nothing goes on.
        assert_eq!(order.failure_before(first), None);
        let mark = order.next();
        assert_eq!(order.take_failure_before(mark).as_deref(), Some("first"));
        assert_eq!((order.failure_before(mark), order.deferred_until()), (None, None));
        // One that failed later, and began earlier, is waited for by more.
        let early = order.begin();
        order.next();
        let late = order.begin();
        let mark = order.next();
        order.fail(late, || "late".to_owned());
        order.fail(early, || "early".to_owned());
        assert_eq!(order.failure_before(late), Some("early"));
        assert_eq!(order.take_failure_before(mark).as_deref(), Some("early"));
    }

    /// Epochs that are over take no room, although an earlier one is not.
    #[test]
    fn epochs_behind_one_that_hangs_take_no_room() {
        let mut order = Order::default();
        let stuck = order.begin();
        for _ in 0..1000 {
            order.next();
            let epoch = order.begin();
            order.finish(epoch);
        }
        assert_eq!(order.under_way.len(), 1);
        let mark = order.next();
        assert_eq!(order.count_before(mark), 1);
        order.finish(stuck);
        assert!(order.is_over_before(mark));
    }
}
