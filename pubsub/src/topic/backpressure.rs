//! Waiting publishers, and since when they wait: needed to evict blocking subscribers.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use ipc::Words;

use crate::clock;

/// Number of waiting threads in the lowest bits; above: since when, in milliseconds since 1970.
const WAITERS: u64 = 0xff;
const SINCE: u32 = 8;

/// How many threads of a publisher wait for room, and since when the publisher has found none; 0
/// while it finds room.
///
/// A publisher that retries instead of waiting counts as waiting, too, for some time after each
/// attempt.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Backpressure<'a, W> {
    words: &'a W,
    at: usize,
}

impl<'a, W: Words> Backpressure<'a, W> {
    pub(super) fn new(words: &'a W, at: usize) -> Self {
        Self { words, at }
    }

    fn update(&self, change: impl Fn(u64) -> u64) {
        let mut word = self.words.load(self.at, Relaxed);
        while let Err(found) = self.words.compare_exchange(self.at, word, change(word)) {
            word = found;
        }
    }

    /// Another thread waits, until [`end`](Self::end).
    #[cfg(test)]
    pub(crate) fn begin(&self) {
        self.begin_since(clock::now());
    }

    /// Another thread waits, until [`end`](Self::end), and has done so since this time in
    /// nanoseconds since 1970, apart from pauses.
    pub(crate) fn begin_since(&self, since: u64) {
        let since = since / 1_000_000;
        self.update(|word| match word & WAITERS {
            0 => since << SINCE | 1,
            WAITERS => word,
            _ => word + 1,
        });
    }

    /// A thread stops to wait, with success or not.
    pub(crate) fn end(&self, has_found: bool) {
        let since = if has_found { 0 } else { now() };
        self.update(|word| match word & WAITERS {
            0 => word,
            1 => since << SINCE,
            _ => word - 1,
        });
    }

    /// An attempt found no room, and does not wait.
    pub(crate) fn refused(&self) {
        let now = now();
        self.update(|word| if word & WAITERS == 0 { now << SINCE } else { word });
    }

    #[inline]
    pub(crate) fn relieved(&self) {
        if self.words.load(self.at, Relaxed) != 0 {
            self.forget();
        }
    }

    #[cold]
    fn forget(&self) {
        self.update(|word| if word & WAITERS == 0 { 0 } else { word });
    }

    /// The slot has no publisher any more.
    pub(crate) fn clear(&self) {
        self.words.store(self.at, 0, Relaxed);
    }

    /// Since when a publisher waits, in nanoseconds since 1970; None if none does. A refused
    /// attempt counts for this duration.
    pub(crate) fn since(&self, holds: Duration) -> Option<u64> {
        let word = self.words.load(self.at, Relaxed);
        let since = Duration::from_millis(word >> SINCE);
        let is_fresh = || Duration::from_millis(now()).saturating_sub(since) < holds;
        let waits = word & WAITERS != 0 || word != 0 && is_fresh();
        waits.then_some(since.as_nanos() as u64)
    }
}

fn now() -> u64 {
    clock::now() / 1_000_000
}

#[cfg(test)]
mod tests {
    use ipc::LocalWords;

    use super::*;

    const LONG: Duration = Duration::from_secs(3600);

    #[test]
    fn backpressure_lasts_while_waiting_and_after_a_refusal() {
        let words = LocalWords::zeroed(1);
        let backpressure = Backpressure { words: &words, at: 0 };
        assert_eq!(backpressure.since(LONG), None);
        backpressure.begin();
        backpressure.begin();
        let since = backpressure.since(Duration::ZERO);
        assert!(since.is_some());
        // One thread finds room, and the other one continues to wait.
        backpressure.end(true);
        backpressure.relieved();
        backpressure.refused();
        assert_eq!(backpressure.since(Duration::ZERO), since);
        backpressure.end(true);
        assert_eq!(backpressure.since(LONG), None);
        // A thread that timed out may try again.
        backpressure.begin();
        backpressure.end(false);
        assert!(backpressure.since(LONG).is_some() && backpressure.since(Duration::ZERO).is_none());
        backpressure.relieved();
        assert_eq!(backpressure.since(LONG), None);
        backpressure.refused();
        assert!(backpressure.since(LONG).is_some() && backpressure.since(Duration::ZERO).is_none());
        backpressure.end(false);
        backpressure.clear();
        assert_eq!(backpressure.since(LONG), None);
    }

    #[test]
    fn number_of_waiting_threads_saturates() {
        let words = LocalWords::zeroed(1);
        let backpressure = Backpressure { words: &words, at: 0 };
        (0..1000).for_each(|_| backpressure.begin());
        assert!(backpressure.since(Duration::ZERO).is_some());
        (0..1000).for_each(|_| backpressure.end(true));
        assert_eq!(backpressure.since(LONG), None);
    }
}
