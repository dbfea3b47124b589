//! Waiting without burning a core, and always with a bound.
//!
//! Deadlines are points in time, computed once, so that a loop of short sleeps does not extend
//! them. A timeout too long to be represented means no bound. A caller may request this; it is
//! never a default.

use std::time::{Duration, Instant};

/// How a completion queue waits.
///
/// ```
/// use std::time::Duration;
/// use fabric::*;
/// let offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first()?;
/// let domain = Domain::open(&offer)?;
/// let waiting = WaitStrategy::Adaptive { spin: Duration::from_micros(50) };
/// let adaptive = CompletionQueue::open_with(&domain, QueueOptions { size: 256, waiting })?;
/// assert_ne!(adaptive.wait_method(), "busy");
/// let waiting = WaitStrategy::Busy;
/// let busy = CompletionQueue::open_with(&domain, QueueOptions { size: 0, waiting })?;
/// assert_eq!(busy.wait_method(), "busy");
/// # Ok::<(), fabric::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitStrategy {
    /// Poll all the time: lowest latency, a whole core.
    Busy,
    /// Poll for this long, then sleep: on the queue's file descriptor if the provider has one,
    /// otherwise with growing pauses.
    Adaptive {
        /// How long to poll before sleeping.
        spin: Duration,
    },
    /// Sleep at once: for queues that are seldom used. Costs a system call and a wake-up per
    /// wait, some microseconds each, and leaves the core to other threads.
    Block,
}

impl Default for WaitStrategy {
    /// Polls for 20 µs: about the cost of going to sleep and being woken (a futex wake between
    /// two processes was measured at 4 to 24 µs), so that the worst case is twice the best.
    fn default() -> Self {
        Self::Adaptive { spin: Duration::from_micros(20) }
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline {
    /// None: too far away to be represented.
    end: Option<Instant>,
}

impl Deadline {
    pub(crate) fn after(timeout: Duration) -> Self {
        Self { end: Instant::now().checked_add(timeout) }
    }

    pub(crate) fn left(&self) -> Duration {
        self.end.map_or(Duration::MAX, |end| end.saturating_duration_since(Instant::now()))
    }

    pub(crate) fn has_passed(&self) -> bool {
        self.left().is_zero()
    }
}

/// The pause between two polls of a queue in a busy loop.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PollPause {
    pauses: u32,
}

impl PollPause {
    /// For providers whose polls slow their peers down: long enough that most of the peers'
    /// writes fall between two polls, short against the 0.6 µs of a message. Measured with 64
    /// bytes over shm of libfabric 1.17: 0 to 80 ns between polls give 0.69 to 0.74 µs one way,
    /// 80 to 210 ns give 0.62 to 0.65 µs.
    const SPACED: Duration = Duration::from_nanos(150);

    /// One spin hint, which costs almost nothing; or pauses that leave peers time to write. The
    /// duration of a spin hint differs tenfold between processors, so it is measured.
    pub(crate) fn new(is_spaced: bool) -> Self {
        if !is_spaced {
            return Self { pauses: 1 };
        }
        const SAMPLE: u32 = 32;
        let one_sample = || {
            let start = Instant::now();
            (0..SAMPLE).for_each(|_| std::hint::spin_loop());
            start.elapsed()
        };
        // The shortest: it was not interrupted.
        let shortest = (0..4).map(|_| one_sample()).min().unwrap_or_default();
        let pauses = Self::SPACED.as_nanos() * u128::from(SAMPLE) / shortest.as_nanos().max(1);
        Self { pauses: (pauses as u32).clamp(1, 100) }
    }

    #[inline]
    pub(crate) fn pause(self) {
        for _ in 0..self.pauses {
            std::hint::spin_loop();
        }
    }
}

/// Growing pauses for waits without a wake-up: a short spin, then yielding, then sleeping up to
/// 200 µs at a time.
#[derive(Debug)]
pub(crate) struct Backoff {
    step: u32,
    max_pause: Duration,
}

impl Backoff {
    const SPINS: u32 = 32;
    const YIELDS: u32 = 32;
    pub(crate) const MAX_PAUSE: Duration = Duration::from_micros(200);

    pub(crate) fn new() -> Self {
        Self { step: 0, max_pause: Self::MAX_PAUSE }
    }

    /// Starts with sleeping: for waits that are known to be long.
    pub(crate) fn sleeping(max_pause: Duration) -> Self {
        Self { step: Self::SPINS + Self::YIELDS, max_pause }
    }

    /// Pauses; false once the deadline has passed.
    pub(crate) fn pause(&mut self, deadline: &Deadline) -> bool {
        let step = self.step;
        self.step = self.step.saturating_add(1);
        if step < Self::SPINS {
            std::hint::spin_loop();
            // Reading the clock costs more than spinning: read it only sometimes.
            return !step.is_multiple_of(8) || !deadline.has_passed();
        }
        let left = deadline.left();
        if left.is_zero() {
            return false;
        }
        if step < Self::SPINS + Self::YIELDS {
            std::thread::yield_now();
        } else {
            let doublings = (step - Self::SPINS - Self::YIELDS).min(16);
            let pause = Duration::from_micros(5) * 2_u32.pow(doublings);
            std::thread::sleep(pause.min(self.max_pause).min(left));
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_ends_at_its_deadline() {
        let deadline = Deadline::after(Duration::from_millis(5));
        let mut backoff = Backoff::new();
        let mut pauses = 0;
        while backoff.pause(&deadline) {
            pauses += 1;
        }
        assert!(deadline.has_passed());
        // 32 spins, 32 yields, and growing pauses: far from a hot loop.
        assert!(pauses < 200, "{pauses}");
    }

    #[test]
    fn poll_pauses_are_short() {
        let pace = PollPause::new(true);
        assert!((1..=100).contains(&pace.pauses), "{pace:?}");
        let shortest = (0..100)
            .map(|_| {
                let start = Instant::now();
                pace.pause();
                start.elapsed()
            })
            .min()
            .unwrap();
        assert!(shortest < Duration::from_micros(5), "{shortest:?}");
    }

    #[test]
    fn unrepresentable_deadline_never_passes() {
        assert!(!Deadline::after(Duration::MAX).has_passed());
    }
}
