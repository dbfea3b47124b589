//! Order of the operations with a peer, by epochs.
//!
//! Every operation belongs to the epoch in which it was started. A fence, a flush and an ordered
//! notice start the next epoch, and wait until all earlier ones have completed. If an operation
//! fails, operations that wait for its epoch are cancelled, until a flush reports the failure. This
//! module knows neither clocks nor devices.

use std::collections::VecDeque;

/// The operations with one peer.
#[derive(Debug, Default)]
pub(super) struct Epochs {
    epoch: u64,
    /// Number of operations in flight by epoch, the oldest first, without completed epochs.
    in_flight: VecDeque<(u64, usize)>,
    /// The first operation that failed since the last flush: its epoch and description.
    failure: Option<(u64, String)>,
    /// New operations wait for all epochs before this one.
    fence: u64,
}

impl Epochs {
    /// Starts an operation: returns its epoch.
    #[inline]
    pub(super) fn begin(&mut self) -> u64 {
        match self.in_flight.back_mut() {
            Some((epoch, count)) if *epoch == self.epoch => *count += 1,
            _ => self.in_flight.push_back((self.epoch, 1)),
        }
        self.epoch
    }

    #[inline]
    pub(super) fn finish(&mut self, epoch: u64) {
        let Ok(at) = self.in_flight.binary_search_by_key(&epoch, |(of, _)| *of) else { return };
        let (_, count) = &mut self.in_flight[at];
        *count -= 1;
        if *count == 0 {
            self.in_flight.remove(at);
        }
    }

    pub(super) fn fail(&mut self, epoch: u64, description: impl FnOnce() -> String) {
        self.finish(epoch);
        // Operations that wait for a later epoch wait for this one too: the earliest failure is
        // kept.
        if self.failure.as_ref().is_none_or(|(of, _)| *of > epoch) {
            self.failure = Some((epoch, description()));
        }
    }

    /// The failed operation of an earlier epoch.
    pub(super) fn failure_before(&self, epoch: u64) -> Option<&str> {
        self.failure
            .as_ref()
            .filter(|(of, _)| *of < epoch)
            .map(|(_, description)| description.as_str())
    }

    /// All earlier epochs have completed, and the caller reports their failure: later operations do
    /// not depend on it.
    pub(super) fn take_failure_before(&mut self, epoch: u64) -> Option<String> {
        self.failure.take_if(|(of, _)| *of < epoch).map(|(_, description)| description)
    }

    /// Number of operations of earlier epochs in flight.
    pub(super) fn count_before(&self, epoch: u64) -> usize {
        let before = self.in_flight.iter().take_while(|(of, _)| *of < epoch);
        before.map(|(_, count)| count).sum()
    }

    /// Starts the next epoch and returns it.
    pub(super) fn next(&mut self) -> u64 {
        self.epoch += 1;
        self.epoch
    }

    /// New operations wait for all earlier ones.
    pub(super) fn fence(&mut self) {
        self.fence = self.next();
    }

    /// Have all operations of earlier epochs completed?
    #[inline]
    pub(super) fn is_over_before(&self, epoch: u64) -> bool {
        self.in_flight.front().is_none_or(|(oldest, _)| *oldest >= epoch)
    }

    /// The epoch before which all operations must complete first, for an operation that is started
    /// now. Also returned if all completed but one of them failed.
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
    fn fence_defers_new_operations_until_earlier_ones_complete() {
        let mut epochs = Epochs::default();
        let [first, second] = [epochs.begin(), epochs.begin()];
        assert_eq!(epochs.deferred_until(), None);
        epochs.fence();
        let fence = epochs.deferred_until().unwrap();
        let third = epochs.begin();
        assert!(third >= fence && second < fence);
        epochs.finish(second);
        assert_eq!(epochs.deferred_until(), Some(fence));
        epochs.finish(first);
        assert_eq!(epochs.deferred_until(), None);
        assert!(epochs.is_over_before(fence) && !epochs.is_over_before(fence + 1));
        epochs.finish(third);
        assert!(epochs.is_over_before(u64::MAX));
    }

    #[test]
    fn later_epochs_may_be_over_first() {
        let mut epochs = Epochs::default();
        let first = epochs.begin();
        let mark = epochs.next();
        let second = epochs.begin();
        epochs.finish(second);
        assert!(!epochs.is_over_before(mark));
        epochs.finish(first);
        assert!(epochs.is_over_before(mark) && epochs.in_flight.is_empty());
        // No operation was started since: one more mark is reached at once.
        let mark = epochs.next();
        assert!(epochs.is_over_before(mark));
    }

    #[test]
    fn failure_reaches_what_waits_for_it_until_a_flush() {
        let mut epochs = Epochs::default();
        let [first, second] = [epochs.begin(), epochs.begin()];
        epochs.fence();
        let fence = epochs.deferred_until().unwrap();
        let third = epochs.begin();
        epochs.fail(first, || "first".to_owned());
        epochs.fail(second, || "second".to_owned());
        assert!(epochs.is_over_before(fence));
        assert_eq!(epochs.failure_before(fence), Some("first"));
        assert_eq!(epochs.deferred_until(), Some(fence), "it depends on a failed operation");
        epochs.fail(third, || "third".to_owned());
        // Operations without dependencies continue.
        assert_eq!(epochs.failure_before(first), None);
        let mark = epochs.next();
        assert_eq!(epochs.take_failure_before(mark).as_deref(), Some("first"));
        assert_eq!((epochs.failure_before(mark), epochs.deferred_until()), (None, None));
        // An earlier epoch that fails later replaces the failure, because more operations wait for
        // it.
        let early = epochs.begin();
        epochs.next();
        let late = epochs.begin();
        let mark = epochs.next();
        epochs.fail(late, || "late".to_owned());
        epochs.fail(early, || "early".to_owned());
        assert_eq!(epochs.failure_before(late), Some("early"));
        assert_eq!(epochs.take_failure_before(mark).as_deref(), Some("early"));
    }

    /// Completed epochs need no memory, although an earlier one is in flight.
    #[test]
    fn epochs_behind_a_stuck_one_need_no_memory() {
        let mut epochs = Epochs::default();
        let stuck = epochs.begin();
        for _ in 0..1000 {
            epochs.next();
            let epoch = epochs.begin();
            epochs.finish(epoch);
        }
        assert_eq!(epochs.in_flight.len(), 1);
        let mark = epochs.next();
        assert_eq!(epochs.count_before(mark), 1);
        epochs.finish(stuck);
        assert!(epochs.is_over_before(mark));
    }
}
