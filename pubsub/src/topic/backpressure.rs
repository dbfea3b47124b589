//! Who waits for room, and since when: so that who is in the way can be asked to leave.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use ipc::Words;

use crate::clock;

/// How many wait: the lowest bits of the word. Above: since when, in milliseconds since 1970.
const WAITERS: u64 = 0xff;
const SINCE: u32 = 8;

/// The word in which a publisher says how many of its threads wait for room, and since when it
/// has found none; 0 as long as it finds some.
///
/// One that does not wait but tries again and again waits all the same: what it says holds for
/// a while.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Backpressure<'a, W> {
    pub(super) words: &'a W,
    pub(super) at: usize,
}

impl<W: Words> Backpressure<'_, W> {
    fn update(&self, change: impl Fn(u64) -> u64) {
        let mut word = self.words.load(self.at, Relaxed);
        while let Err(found) = self.words.compare_exchange(self.at, word, change(word)) {
            word = found;
        }
    }

    /// One more waits, until this [ends](Self::end).
    #[cfg(test)]
    pub(crate) fn begin(&self) {
        self.begin_since(clock::now());
    }

    /// One more waits, until this [ends](Self::end), and has done so since then, in nanoseconds since
    /// 1970, but for pauses.
    pub(crate) fn begin_since(&self, since: u64) {
        let since = since / 1_000_000;
        self.update(|word| match word & WAITERS {
            0 => since << SINCE | 1,
            WAITERS => word,
            _ => word + 1,
        });
    }

    /// One that waited has found room, or has given up.
    pub(crate) fn end(&self, has_found: bool) {
        let since = if has_found { 0 } else { now() };
        self.update(|word| match word & WAITERS {
            0 => word,
            1 => since << SINCE,
            _ => word - 1,
        });
    }

    /// One found no room, and does not wait.
    pub(crate) fn refused(&self) {
        let now = now();
        self.update(|word| if word & WAITERS == 0 { now << SINCE } else { word });
    }

    /// Room was found.
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

    /// Nobody's from now on.
    pub(crate) fn clear(&self) {
        self.words.store(self.at, 0, Relaxed);
    }

    /// Since when somebody waits, in nanoseconds since 1970; None if nobody does. What one says
    /// that does not wait holds for so long.
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
    fn it_lasts_as_long_as_one_waits_or_was_refused_lately() {
        let words = LocalWords::zeroed(1);
        let backpressure = Backpressure { words: &words, at: 0 };
        assert_eq!(backpressure.since(LONG), None);
        backpressure.begin();
        backpressure.begin();
        let since = backpressure.since(Duration::ZERO);
        assert!(since.is_some());
        // One finds room, and the other one waits on.
        backpressure.end(true);
        backpressure.relieved();
        backpressure.refused();
        assert_eq!(backpressure.since(Duration::ZERO), since);
        backpressure.end(true);
        assert_eq!(backpressure.since(LONG), None);
        // One that gives up may come again.
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
    fn very_many_may_wait() {
        let words = LocalWords::zeroed(1);
        let backpressure = Backpressure { words: &words, at: 0 };
        (0..1000).for_each(|_| backpressure.begin());
        assert!(backpressure.since(Duration::ZERO).is_some());
        (0..1000).for_each(|_| backpressure.end(true));
        assert_eq!(backpressure.since(LONG), None);
    }
}
