//! When a peer that was lost is tried again.

use std::time::{Duration, Instant};

/// The pause behind the first try, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// For how long it is tried. After that somebody has to ask for it, by joining.
const LONGEST: Duration = Duration::from_secs(3600);

/// Tries to reach a peer again: with pauses that grow, and an end.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tries {
    next: Instant,
    pause: Duration,
    end: Instant,
}

impl Tries {
    pub(super) fn new(now: Instant) -> Self {
        Self { next: now + PAUSES.0, pause: PAUSES.0, end: now + LONGEST }
    }

    /// Is it to be tried now? Then the next try has its time already.
    pub(super) fn is_due(&mut self, now: Instant) -> bool {
        if now < self.next || now >= self.end {
            return false;
        }
        self.pause = (2 * self.pause).min(PAUSES.1);
        self.next = now + self.pause;
        true
    }

    /// A try is over, and came to nothing: the pause begins only now.
    pub(super) fn failed(&mut self, now: Instant) {
        self.next = now + self.pause;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_limit_and_there_is_an_end() {
        let start = Instant::now();
        let mut tries = Tries::new(start);
        let at = |ms: u64| start + Duration::from_millis(ms);
        let times: Vec<_> = (0..4_000_000).step_by(50).filter(|ms| tries.is_due(at(*ms))).collect();
        assert_eq!(times[..7], [100, 300, 700, 1500, 3100, 6300, 11_300]);
        assert!(times.windows(2).all(|two| two[1] - two[0] <= 5000));
        assert_eq!(times.last().map(|ms| ms / 10_000), Some(359), "an hour");
    }

    #[test]
    fn the_pause_begins_when_a_try_has_failed() {
        let start = Instant::now();
        let mut tries = Tries::new(start);
        assert!(tries.is_due(start + PAUSES.0));
        let late = start + Duration::from_secs(10);
        tries.failed(late);
        assert!(!tries.is_due(late + PAUSES.0) && tries.is_due(late + 2 * PAUSES.0));
    }
}
