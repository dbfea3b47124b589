//! When to look for the end of a device's work.
//!
//! Nothing wakes a thread at that moment as fast as looking: a wait of the driver that sleeps adds
//! 40 to 250 µs, which is as long as a copy of some tens of mebibytes takes. A thread that looks
//! all the time has the least delay, and uses a core. So a thread sleeps until shortly before the
//! end, as estimated from earlier work of the same stream, and then looks all the time
//! (`docs/internals/device-waits.md`).
//!
//! The estimate must not come from when the thread woke, or a sleep that is too long would confirm
//! itself: a look that finds work in progress, and the next one, which finds it done, bound the
//! time that it took.

use std::time::{Duration, Instant};

/// A sleep that ends this long before the estimated end is over in time: it takes 3 µs longer, and
/// the thread some microseconds to continue. At the end of long work the margin is a part of it.
const MARGIN: Duration = Duration::from_micros(9);
const MARGIN_OF_WORK: u32 = 64;
/// Sleeps beyond this are late by 10 to 50 µs, because the core itself sleeps then. They end early,
/// and a shorter one follows.
const LONG_SLEEP: Duration = Duration::from_micros(200);
const LONG_MARGIN: Duration = Duration::from_micros(100);
/// How long to look all the time for an end that is not estimated, and beyond the estimated one.
const SPIN_TIME: Duration = Duration::from_micros(30);
const MIN_SLEEP: Duration = Duration::from_micros(5);
/// A wrong estimate delays a caller by at most this; waking now and then costs next to nothing.
const MAX_SLEEP: Duration = Duration::from_micros(500);
/// The longest sleep as a part of the time waited, and of the time since the estimate: an end that
/// is not estimated, or later than that, is seen late by at most this part.
const PART_OF_WAIT: u32 = 16;
const PART_OF_LATENESS: u32 = 4;

/// What a thread does until its next look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pause {
    /// Nothing: it looks again at once.
    Spin,
    /// Sleep.
    Until(Instant),
}

impl Pause {
    /// For a thread that has waited since then, for work that should end at the estimate.
    ///
    /// ```
    /// use std::time::{Duration, Instant};
    /// let now = Instant::now();
    /// let millisecond = Duration::from_millis(1);
    /// let pause = gpu::Pause::for_end(now, now, Some(now + millisecond));
    /// assert!(matches!(pause, gpu::Pause::Until(end) if end > now && end < now + millisecond));
    /// assert_eq!(gpu::Pause::for_end(now, now, None), gpu::Pause::Spin);
    /// ```
    #[must_use]
    pub fn for_end(now: Instant, since: Instant, estimate: Option<Instant>) -> Self {
        let spin_end = estimate.unwrap_or(since) + SPIN_TIME;
        if now >= spin_end {
            let of_wait = now.saturating_duration_since(since) / PART_OF_WAIT;
            let of_lateness = estimate.map_or(MAX_SLEEP, |end| (now - end) / PART_OF_LATENESS);
            return Self::Until(now + of_wait.min(of_lateness).clamp(MIN_SLEEP, MAX_SLEEP));
        }
        let left = estimate.unwrap_or(now).saturating_duration_since(now);
        let of_work = estimate.map_or(Duration::ZERO, |end| (end - since) / MARGIN_OF_WORK);
        let margin =
            if left > LONG_SLEEP { LONG_MARGIN } else { MARGIN.max(of_work.min(LONG_MARGIN)) };
        match left.checked_sub(margin) {
            Some(sleep) if sleep >= MIN_SLEEP => Self::Until(now + sleep.min(MAX_SLEEP)),
            _ => Self::Spin,
        }
    }
}

/// Times that the copies of a stream take, by their lengths: estimates at the lower end of what
/// was seen, since a sleep that is too long delays the caller, and one that is too short costs some
/// processor time.
///
/// ```
/// use std::time::Duration;
/// let mut times = gpu::CopyTimes::default();
/// assert_eq!(times.estimate(64 << 20), None);
/// let [in_progress, done] = [178, 180].map(Duration::from_micros);
/// times.learn(64 << 20, in_progress, done);
/// assert_eq!(times.estimate(64 << 20), Some(in_progress));
/// ```
#[derive(Debug, Clone, Default)]
pub struct CopyTimes {
    /// By the logarithm of the length.
    classes: [CopyTime; Self::CLASSES],
}

/// What was seen of copies of similar length.
#[derive(Debug, Clone, Copy, Default)]
struct CopyTime {
    /// Nanoseconds of a byte; 0 if unknown.
    of_byte: f64,
    /// Copies whose end was seen late, one after the other.
    misses: u32,
}

impl CopyTimes {
    /// Shorter copies take less time than a sleep.
    pub const SHORTEST: u64 = 1 << Self::SHORTEST_LOG;
    const SHORTEST_LOG: u32 = 18;
    /// Beyond 256 GiB all lengths are one class.
    const CLASSES: usize = 21;

    fn class(length: u64) -> Option<usize> {
        let log = length.checked_ilog2()?.checked_sub(Self::SHORTEST_LOG)?;
        Some((log as usize).min(Self::CLASSES - 1))
    }

    /// The time that a copy of this length should take; None if no similar one was seen, or if it
    /// is too short for a sleep.
    #[must_use]
    pub fn estimate(&self, length: u64) -> Option<Duration> {
        let of_byte = self.classes[Self::class(length)?].of_byte;
        (of_byte != 0.0).then(|| Duration::from_nanos((of_byte * length as f64) as u64))
    }

    /// Takes into account a copy that was seen in progress after `at_least`, and done after
    /// `at_most`.
    pub fn learn(&mut self, length: u64, at_least: Duration, at_most: Duration) {
        let Some(class) = Self::class(length) else { return };
        let known = self.estimate(length);
        let class = &mut self.classes[class];
        let is_exact = is_exact(at_least, at_most);
        class.misses = if is_exact { 0 } else { class.misses.saturating_add(1) };
        let middle = at_least + at_most.saturating_sub(at_least) / 2;
        let kept = match known {
            // The copy may have ended long before.
            None if at_least.is_zero() => return,
            None => at_least,
            Some(known) if is_exact && at_least > known => known + (at_least - known) / 2,
            Some(_) if is_exact => at_least,
            // The system delayed the thread, or the estimate is too long, which is likely after
            // several misses: the next sleep is shorter.
            Some(known) => {
                let shorter = match class.misses {
                    1 => known - known / 32,
                    2 => known - known / 8,
                    _ => Duration::ZERO,
                };
                middle.clamp(shorter, known.max(shorter)).max(at_least).min(at_most)
            }
        };
        class.of_byte = (kept.as_nanos().max(1) as f64) / length as f64;
    }
}

/// Do these bounds of a time tell enough, for the time itself and for the start of the next copy?
#[must_use]
pub fn is_exact(at_least: Duration, at_most: Duration) -> bool {
    at_most.saturating_sub(at_least) <= at_most / 64 + MARGIN
}

#[cfg(test)]
mod tests {
    use super::*;

    const MICROSECOND: Duration = Duration::from_micros(1);

    /// A thread that waits for copies, one after the other, in simulated time.
    struct Waiter {
        times: CopyTimes,
        now: Instant,
    }

    /// What a wait cost.
    #[derive(Debug)]
    struct Cost {
        /// How late the end was seen.
        delay: Duration,
        /// The time in which the thread did not sleep.
        spun: Duration,
    }

    impl Waiter {
        fn new() -> Self {
            Self { times: CopyTimes::default(), now: Instant::now() }
        }

        /// Waits for a copy that takes this long; `late` is by how much sleeps are longer.
        fn wait(&mut self, length: u64, takes: Duration, late: Duration) -> Cost {
            let begin = self.now;
            let (end, estimate) = (begin + takes, self.times.estimate(length).map(|it| begin + it));
            let (mut in_progress, mut slept) = (begin, Duration::ZERO);
            loop {
                self.now += MICROSECOND;
                if self.now >= end {
                    break;
                }
                in_progress = self.now;
                if let Pause::Until(until) = Pause::for_end(self.now, begin, estimate) {
                    slept += until + late - self.now;
                    self.now = until + late;
                }
            }
            self.times.learn(length, in_progress - begin, self.now - begin);
            Cost { delay: self.now - end, spun: self.now - begin - slept }
        }
    }

    /// A copy that always takes the same time, after some waits, whatever was before.
    #[test]
    fn estimate_does_not_depend_on_history() {
        for megabytes in [1, 4, 64, 1024_u64] {
            let takes = Duration::from_nanos(8_000 + megabytes * 2_650);
            for before in
                [None, Some(takes / 20), Some(takes / 2), Some(takes * 2), Some(takes * 20)]
            {
                let (mut waiter, length) = (Waiter::new(), megabytes << 20);
                if let Some(before) = before {
                    for _ in 0..10 {
                        waiter.wait(length, before, 3 * MICROSECOND);
                    }
                }
                for _ in 0..30 {
                    waiter.wait(length, takes, 3 * MICROSECOND);
                }
                for _ in 0..10 {
                    let Cost { delay, spun } = waiter.wait(length, takes, 3 * MICROSECOND);
                    assert!(delay <= MICROSECOND, "{megabytes} MiB: {delay:?} after {before:?}");
                    assert!(
                        spun <= takes.min(25 * MICROSECOND + takes / 50) + MICROSECOND,
                        "{megabytes} MiB: {spun:?}"
                    );
                }
            }
        }
    }

    /// The first wait knows nothing, and sees the end late by a sixteenth of the time.
    #[test]
    fn first_wait_is_late_by_a_small_part() {
        for takes in [40, 180, 2_700, 50_000].map(Duration::from_micros) {
            let Cost { delay, .. } = Waiter::new().wait(1 << 30, takes, 3 * MICROSECOND);
            assert!(
                delay <= (takes / 14).clamp(9 * MICROSECOND, MAX_SLEEP),
                "{takes:?}: {delay:?}"
            );
        }
    }

    /// Sleeps that the system prolongs now and then cost some processor time, and never confirm
    /// themselves.
    #[test]
    fn late_sleeps_do_not_become_the_estimate() {
        let (mut waiter, takes) = (Waiter::new(), Duration::from_micros(180));
        let (mut delays, mut spun) = (Vec::new(), Duration::ZERO);
        for round in 0..200 {
            let late = if round % 10 == 9 { 100 } else { 3 };
            let cost = waiter.wait(64 << 20, takes, Duration::from_micros(late));
            delays.push(cost.delay);
            spun += cost.spun;
        }
        delays.sort();
        assert!(delays[100] <= MICROSECOND && delays[170] <= 10 * MICROSECOND, "{delays:?}");
        assert!(spun / 200 <= takes / 8, "{:?}", spun / 200);
    }

    /// Work before the copy, or a thread that looked after seconds: no later wait takes as long.
    #[test]
    fn one_long_time_delays_few_later_waits() {
        let (length, takes, second) =
            (64 << 20, Duration::from_micros(180), Duration::from_secs(1));
        for (at_least, at_most) in [
            (2 * second, 2 * second + MICROSECOND),
            (Duration::ZERO, 3 * second),
            (MICROSECOND, 3 * second),
        ] {
            for is_known in [false, true] {
                let mut waiter = Waiter::new();
                for _ in 0..if is_known { 5 } else { 0 } {
                    waiter.wait(length, takes, 3 * MICROSECOND);
                }
                waiter.times.learn(length, at_least, at_most);
                let delays = (0..10).map(|_| waiter.wait(length, takes, 3 * MICROSECOND).delay);
                let lost: Duration = delays.sum();
                assert!(lost <= Duration::from_millis(2), "{at_least:?}, {is_known}: {lost:?}");
                assert!(waiter.wait(length, takes, 3 * MICROSECOND).delay <= MICROSECOND);
            }
        }
    }

    #[test]
    fn short_lengths_and_extreme_times_are_accepted() {
        let mut times = CopyTimes::default();
        for (length, at_most) in [(0, MICROSECOND), (4096, MICROSECOND), (1 << 20, Duration::ZERO)]
        {
            times.learn(length, Duration::ZERO, at_most);
        }
        assert_eq!((times.estimate(0), times.estimate(4096)), (None, None));
        times.learn(u64::MAX, Duration::MAX, Duration::MAX);
        assert!(times.estimate(u64::MAX).is_some());
    }
}
