//! Which operations with a peer are over, as far as their order matters: by epochs.
//!
//! Every operation belongs to the epoch in which it was begun. A fence, a flush and an ordered notice
//! begin the next epoch, and wait until all earlier ones are over. If an operation fails, what waits
//! for its epoch is cancelled, until a flush takes note of the failure. Nothing here knows a clock or
//! a device.

use std::collections::VecDeque;

/// The operations with one peer.
#[derive(Debug, Default)]
pub(super) struct Epochs {
    epoch: u64,
    /// How many operations are under way, by epoch: the oldest first, and none that is over.
    in_flight: VecDeque<(u64, usize)>,
    /// The first operation that failed since the last flush: its epoch, and what failed.
    failure: Option<(u64, String)>,
    /// What is begun from now on waits for all earlier epochs than this one.
    fence: u64,
}

impl Epochs {
    /// One more is begun: gives its epoch.
    #[inline]
    pub(super) fn begin(&mut self) -> u64 {
        match self.in_flight.back_mut() {
            Some((epoch, count)) if *epoch == self.epoch => *count += 1,
            _ => self.in_flight.push_back((self.epoch, 1)),
        }
        self.epoch
    }

    /// One of this epoch is over.
    #[inline]
    pub(super) fn finish(&mut self, epoch: u64) {
        let Ok(at) = self.in_flight.binary_search_by_key(&epoch, |(of, _)| *of) else { return };
        let (_, count) = &mut self.in_flight[at];
        *count -= 1;
        if *count == 0 {
            self.in_flight.remove(at);
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
        let before = self.in_flight.iter().take_while(|(of, _)| *of < epoch);
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
        self.in_flight.front().is_none_or(|(oldest, _)| *oldest >= epoch)
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
        // Nothing was begun since: one more mark is reached at once.
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
        assert_eq!(epochs.deferred_until(), Some(fence), "it was to wait for what failed");
        epochs.fail(third, || "third".to_owned());
        // What waits for nothing goes on.
        assert_eq!(epochs.failure_before(first), None);
        let mark = epochs.next();
        assert_eq!(epochs.take_failure_before(mark).as_deref(), Some("first"));
        assert_eq!((epochs.failure_before(mark), epochs.deferred_until()), (None, None));
        // One that failed later, and began earlier, is waited for by more.
        let early = epochs.begin();
        epochs.next();
        let late = epochs.begin();
        let mark = epochs.next();
        epochs.fail(late, || "late".to_owned());
        epochs.fail(early, || "early".to_owned());
        assert_eq!(epochs.failure_before(late), Some("early"));
        assert_eq!(epochs.take_failure_before(mark).as_deref(), Some("early"));
    }

    /// Epochs that are over take no room, although an earlier one is not.
    #[test]
    fn epochs_behind_one_that_hangs_take_no_room() {
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
