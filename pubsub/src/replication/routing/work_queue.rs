//! The topics to reconcile: a pass costs as much as has changed, not as much as exists.
//!
//! A topic is reconciled after an event, at its own deadline, and periodically. Each pass derives
//! its work anew: so work that no event announced is done eventually.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Interval in which each topic is reconciled at least once.
const FULL_ROUND: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct ReconcileQueue {
    /// Topics with events.
    pending: BTreeSet<u32>,
    /// Own deadlines of topics; `due` has them in order of time.
    times: BTreeMap<u32, Instant>,
    due: BTreeSet<(Instant, u32)>,
    /// Position and begin of the periodic round.
    next: u32,
    since: Instant,
}

impl ReconcileQueue {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            pending: BTreeSet::new(),
            times: BTreeMap::new(),
            due: BTreeSet::new(),
            next: 0,
            since: now,
        }
    }

    /// Enqueues a topic after an event.
    pub(super) fn enqueue(&mut self, number: u32) {
        self.pending.insert(number);
    }

    pub(super) fn enqueue_all(&mut self, numbers: impl IntoIterator<Item = u32>) {
        self.pending.extend(numbers);
    }

    /// Sets the deadline of a topic, for work that no event announces.
    pub(super) fn schedule(&mut self, number: u32, time: Option<Instant>) {
        let before = match time {
            Some(time) => self.times.insert(number, time),
            None => self.times.remove(&number),
        };
        if let Some(before) = before {
            self.due.remove(&(before, number));
        }
        self.due.extend(time.map(|time| (time, number)));
    }

    pub(super) fn forget(&mut self, number: u32) {
        self.schedule(number, None);
        self.pending.remove(&number);
    }

    /// Takes the topics of `all` that are to be reconciled now.
    pub(super) fn take<T>(&mut self, now: Instant, all: &BTreeMap<u32, T>) -> BTreeSet<u32> {
        let mut found = std::mem::take(&mut self.pending);
        while let Some((time, number)) = self.due.first().copied().filter(|(time, _)| *time <= now)
        {
            self.due.remove(&(time, number));
            self.times.remove(&number);
            found.insert(number);
        }
        found.extend(self.next_of_round(now, all));
        found
    }

    /// The next topics of the periodic round, in proportion to the time passed.
    fn next_of_round<T>(&mut self, now: Instant, all: &BTreeMap<u32, T>) -> Vec<u32> {
        let count = u32::try_from(all.len()).unwrap_or(u32::MAX);
        let passed = now.saturating_duration_since(self.since);
        if count == 0 || passed >= FULL_ROUND {
            self.since = now;
            return all.keys().copied().collect();
        }
        let share = passed.as_nanos() * u128::from(count) / FULL_ROUND.as_nanos();
        let share = u32::try_from(share).unwrap_or(u32::MAX);
        self.since += FULL_ROUND * share / count;
        let (later, first) = (all.range(self.next..), all.range(..self.next));
        let some = later.chain(first).map(|(number, _)| *number).take(share as usize);
        let some: Vec<_> = some.collect();
        if let Some(last) = some.last() {
            self.next = last.wrapping_add(1);
        }
        some
    }

    /// When the next topic is due; `interval` from now if topics with events are pending.
    pub(super) fn deadline(&self, now: Instant, interval: Duration) -> Option<Instant> {
        let due = self.due.first().map(|(time, _)| *time);
        due.into_iter().chain((!self.pending.is_empty()).then_some(now + interval)).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLL_INTERVAL: Duration = Duration::from_millis(20);

    fn topics(count: u32) -> BTreeMap<u32, ()> {
        (0..count).map(|number| (number, ())).collect()
    }

    fn taken(
        reconcile_queue: &mut ReconcileQueue,
        now: Instant,
        all: &BTreeMap<u32, ()>,
    ) -> Vec<u32> {
        reconcile_queue.take(now, all).into_iter().collect()
    }

    #[test]
    fn topics_with_events_or_due_are_taken_once() {
        let (start, all) = (Instant::now(), topics(1000));
        let mut reconcile_queue = ReconcileQueue::new(start);
        assert_eq!(
            (
                taken(&mut reconcile_queue, start, &all),
                reconcile_queue.deadline(start, POLL_INTERVAL)
            ),
            (vec![], None)
        );
        reconcile_queue.enqueue(7);
        reconcile_queue.enqueue_all([3, 7]);
        assert_eq!(reconcile_queue.deadline(start, POLL_INTERVAL), Some(start + POLL_INTERVAL));
        assert_eq!(taken(&mut reconcile_queue, start, &all), [3, 7]);
        assert_eq!(taken(&mut reconcile_queue, start, &all), []);
        let [soon, later] = [1, 2].map(|times| start + times * Duration::from_millis(1));
        reconcile_queue.schedule(4, Some(later));
        reconcile_queue.schedule(5, Some(later));
        reconcile_queue.schedule(6, Some(later));
        reconcile_queue.schedule(5, Some(soon));
        reconcile_queue.schedule(6, None);
        assert_eq!(reconcile_queue.deadline(start, POLL_INTERVAL), Some(soon));
        assert_eq!(taken(&mut reconcile_queue, start, &all), []);
        assert_eq!(taken(&mut reconcile_queue, soon, &all), [5]);
        assert_eq!(reconcile_queue.deadline(start, POLL_INTERVAL), Some(later));
        reconcile_queue.enqueue(4);
        reconcile_queue.forget(4);
        assert_eq!(
            (
                taken(&mut reconcile_queue, later, &all),
                reconcile_queue.deadline(start, POLL_INTERVAL)
            ),
            (vec![], None)
        );
    }

    #[test]
    fn all_topics_are_taken_periodically_without_events() {
        for (count, turns) in [(1, 3), (7, 100), (1000, 10), (1000, 1), (3, 1000), (1000, 10_000)] {
            let (start, all) = (Instant::now(), topics(count));
            let mut reconcile_queue = ReconcileQueue::new(start);
            let mut counts = BTreeMap::new();
            // Three rounds, in steps that do not divide the interval.
            let step = FULL_ROUND / turns + Duration::from_nanos(1);
            for turn in 1..=3 * turns {
                let some = reconcile_queue.take(start + step * turn, &all);
                assert!(some.len() <= (count.div_ceil(turns) + 1) as usize);
                some.into_iter().for_each(|number| *counts.entry(number).or_insert(0) += 1);
            }
            assert_eq!(counts.len(), count as usize, "some topics were never taken");
            assert!(counts.values().all(|times| (3..=4).contains(times)), "{counts:?}");
        }
        // Topics are added and removed meanwhile.
        let start = Instant::now();
        let mut reconcile_queue = ReconcileQueue::new(start);
        assert!(taken(&mut reconcile_queue, start + FULL_ROUND, &topics(0)).is_empty());
        assert_eq!(taken(&mut reconcile_queue, start + 2 * FULL_ROUND, &topics(3)), [0, 1, 2]);
        reconcile_queue.next = u32::MAX;
        assert_eq!(
            taken(&mut reconcile_queue, start + 2 * FULL_ROUND + FULL_ROUND / 2, &topics(2)),
            [0]
        );
    }
}
