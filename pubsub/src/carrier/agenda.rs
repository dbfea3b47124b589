//! Which topics are to be looked at: a turn costs what there is to do, and not what there is.
//!
//! A topic is looked at when something has happened to it, when its time has come, and now and then
//! all the same: since it is seen each time anew what is to be done, nothing is left undone for good
//! of which nobody told.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// How long it takes until each topic was looked at once more, if there are turns.
const ROUND: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct Agenda {
    /// Something happened to these.
    stirred: BTreeSet<u32>,
    /// When each is to be looked at, if at a time of its own; and in the order of that.
    times: BTreeMap<u32, Instant>,
    due: BTreeSet<(Instant, u32)>,
    /// Where the round goes on, and how far it is.
    next: u32,
    since: Instant,
}

impl Agenda {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            stirred: BTreeSet::new(),
            times: BTreeMap::new(),
            due: BTreeSet::new(),
            next: 0,
            since: now,
        }
    }

    /// Something has happened to a topic.
    pub(super) fn stir(&mut self, number: u32) {
        self.stirred.insert(number);
    }

    pub(super) fn stir_all(&mut self, numbers: impl IntoIterator<Item = u32>) {
        self.stirred.extend(numbers);
    }

    /// There is something to do for a topic then, of which nobody tells.
    pub(super) fn set_time(&mut self, number: u32, time: Option<Instant>) {
        let before = match time {
            Some(time) => self.times.insert(number, time),
            None => self.times.remove(&number),
        };
        if let Some(before) = before {
            self.due.remove(&(before, number));
        }
        self.due.extend(time.map(|time| (time, number)));
    }

    /// The topic is gone.
    pub(super) fn forget(&mut self, number: u32) {
        self.set_time(number, None);
        self.stirred.remove(&number);
    }

    /// Those that are to be looked at now, of these.
    pub(super) fn take<T>(&mut self, now: Instant, all: &BTreeMap<u32, T>) -> BTreeSet<u32> {
        let mut found = std::mem::take(&mut self.stirred);
        while let Some((time, number)) = self.due.first().copied().filter(|(time, _)| *time <= now)
        {
            self.due.remove(&(time, number));
            self.times.remove(&number);
            found.insert(number);
        }
        found.extend(self.go_round(now, all));
        found
    }

    /// The next ones of the round, as many as have their time.
    fn go_round<T>(&mut self, now: Instant, all: &BTreeMap<u32, T>) -> Vec<u32> {
        let count = u32::try_from(all.len()).unwrap_or(u32::MAX);
        let passed = now.saturating_duration_since(self.since);
        if count == 0 || passed >= ROUND {
            self.since = now;
            return all.keys().copied().collect();
        }
        let share = passed.as_nanos() * u128::from(count) / ROUND.as_nanos();
        let share = u32::try_from(share).unwrap_or(u32::MAX);
        self.since += ROUND * share / count;
        let (later, first) = (all.range(self.next..), all.range(..self.next));
        let some = later.chain(first).map(|(number, _)| *number).take(share as usize);
        let some: Vec<_> = some.collect();
        if let Some(last) = some.last() {
            self.next = last.wrapping_add(1);
        }
        some
    }

    /// When there is something to look at next; but for what has happened already, for which it may
    /// take so long.
    pub(super) fn deadline(&self, now: Instant, look: Duration) -> Option<Instant> {
        let due = self.due.first().map(|(time, _)| *time);
        due.into_iter().chain((!self.stirred.is_empty()).then_some(now + look)).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOOK: Duration = Duration::from_millis(20);

    fn topics(count: u32) -> BTreeMap<u32, ()> {
        (0..count).map(|number| (number, ())).collect()
    }

    fn taken(agenda: &mut Agenda, now: Instant, all: &BTreeMap<u32, ()>) -> Vec<u32> {
        agenda.take(now, all).into_iter().collect()
    }

    #[test]
    fn what_happened_and_what_is_due_is_looked_at_once() {
        let (start, all) = (Instant::now(), topics(1000));
        let mut agenda = Agenda::new(start);
        assert_eq!((taken(&mut agenda, start, &all), agenda.deadline(start, LOOK)), (vec![], None));
        agenda.stir(7);
        agenda.stir_all([3, 7]);
        assert_eq!(agenda.deadline(start, LOOK), Some(start + LOOK));
        assert_eq!(taken(&mut agenda, start, &all), [3, 7]);
        assert_eq!(taken(&mut agenda, start, &all), []);
        let [soon, later] = [1, 2].map(|times| start + times * Duration::from_millis(1));
        agenda.set_time(4, Some(later));
        agenda.set_time(5, Some(later));
        agenda.set_time(6, Some(later));
        agenda.set_time(5, Some(soon));
        agenda.set_time(6, None);
        assert_eq!(agenda.deadline(start, LOOK), Some(soon));
        assert_eq!(taken(&mut agenda, start, &all), []);
        assert_eq!(taken(&mut agenda, soon, &all), [5]);
        assert_eq!(agenda.deadline(start, LOOK), Some(later));
        agenda.stir(4);
        agenda.forget(4);
        assert_eq!((taken(&mut agenda, later, &all), agenda.deadline(start, LOOK)), (vec![], None));
    }

    #[test]
    fn all_have_their_turn_though_nobody_told() {
        for (count, turns) in [(1, 3), (7, 100), (1000, 10), (1000, 1), (3, 1000), (1000, 10_000)] {
            let (start, all) = (Instant::now(), topics(count));
            let mut agenda = Agenda::new(start);
            let mut looks = BTreeMap::new();
            // Three rounds, in steps that do not fit.
            let step = ROUND / turns + Duration::from_nanos(1);
            for turn in 1..=3 * turns {
                let some = agenda.take(start + step * turn, &all);
                assert!(some.len() <= (count.div_ceil(turns) + 1) as usize);
                some.into_iter().for_each(|number| *looks.entry(number).or_insert(0) += 1);
            }
            assert_eq!(looks.len(), count as usize, "some were left out");
            assert!(looks.values().all(|times| (3..=4).contains(times)), "{looks:?}");
        }
        // New ones come and old ones go meanwhile.
        let start = Instant::now();
        let mut agenda = Agenda::new(start);
        assert!(taken(&mut agenda, start + ROUND, &topics(0)).is_empty());
        assert_eq!(taken(&mut agenda, start + 2 * ROUND, &topics(3)), [0, 1, 2]);
        agenda.next = u32::MAX;
        assert_eq!(taken(&mut agenda, start + 2 * ROUND + ROUND / 2, &topics(2)), [0]);
    }
}
