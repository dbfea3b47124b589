//! How long a thread pauses while chunks are copied.

use std::time::{Duration, Instant};

use gpu::{CopyTimes, Pause};

/// A thread that is in no hurry looks so much later: usually once for each chunk, after its end.
const COARSE_LOOK: Duration = Duration::from_micros(10);
/// Time of a chunk that is too short for an estimate.
const SHORT_CHUNK_TIME: Duration = Duration::from_micros(2);

/// The pause until the end of work on chunks of these lengths, one after the other.
pub(super) fn pause_for(
    now: Instant,
    begun: Instant,
    times: &CopyTimes,
    lengths: impl Iterator<Item = u64>,
) -> Pause {
    let mut end = begun;
    for bytes in lengths {
        match times.estimate(bytes) {
            None if bytes >= CopyTimes::SHORTEST => return Pause::for_end(now, begun, None),
            time => end += time.unwrap_or(SHORT_CHUNK_TIME),
        }
    }
    Pause::for_end(now, begun, Some(end))
}

/// A pause of a thread that is in no hurry: it does not look all the time. In the middle of a
/// transfer a late look delays the transfer once, not each chunk, because others are in flight.
pub(super) fn coarse_pause(pause: Pause, now: Instant) -> Pause {
    match pause {
        Pause::Spin => Pause::Until(now + COARSE_LOOK),
        Pause::Until(look) => Pause::Until(look + COARSE_LOOK),
    }
}

/// Work that was seen done: at the earliest and at the latest after such a time.
#[derive(Debug, Clone, Copy)]
pub(super) struct SeenTime {
    at_least: Duration,
    at_most: Duration,
}

impl SeenTime {
    /// Of work that began then, was last seen in progress, and is done now.
    pub(super) fn new(begun: Instant, in_progress: Instant, done: Instant) -> Self {
        let since = |at: Instant| at.saturating_duration_since(begun);
        Self { at_least: since(in_progress), at_most: since(done) }
    }

    /// Learns from it. Looks of a thread in no hurry tell too little, unless the work was overdue:
    /// then more than one chunk is done.
    pub(super) fn learn(self, times: &mut CopyTimes, bytes: u64, was_coarse: bool) {
        let Self { at_least, at_most } = self;
        let is_known = times.estimate(bytes).is_some();
        if !(was_coarse && is_known) || gpu::is_exact(at_least, at_most) {
            times.learn(bytes, at_least, at_most);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thread_in_no_hurry_never_spins() {
        let now = Instant::now();
        assert_eq!(coarse_pause(Pause::Spin, now), Pause::Until(now + COARSE_LOOK));
        let late = Pause::Until(now + 5 * COARSE_LOOK);
        assert_eq!(coarse_pause(late, now), Pause::Until(now + 6 * COARSE_LOOK));
    }

    #[test]
    fn coarse_looks_do_not_shorten_the_estimate() {
        let (now, mut times) = (Instant::now(), CopyTimes::default());
        let microseconds = Duration::from_micros;
        let seen = |from: u64, to: u64| {
            SeenTime::new(now, now + microseconds(from), now + microseconds(to))
        };
        seen(75, 76).learn(&mut times, 4 << 20, true);
        assert_eq!(times.estimate(4 << 20), Some(microseconds(75)));
        (0..10).for_each(|_| seen(1, 80).learn(&mut times, 4 << 20, true));
        assert_eq!(times.estimate(4 << 20), Some(microseconds(75)));
        (0..10).for_each(|_| seen(1, 80).learn(&mut times, 4 << 20, false));
        assert!(times.estimate(4 << 20) < Some(microseconds(70)));
    }

    #[test]
    fn estimates_of_chunks_add_up() {
        let (now, mut times) = (Instant::now(), CopyTimes::default());
        let (one, time) = (1 << 20, Duration::from_micros(50));
        assert_eq!(pause_for(now, now, &times, [one].into_iter()), Pause::Spin);
        times.learn(one, time, time);
        let Pause::Until(first) = pause_for(now, now, &times, [one].into_iter()) else { panic!() };
        let Pause::Until(second) = pause_for(now, now, &times, [one; 2].into_iter()) else {
            panic!()
        };
        assert!(second - first > time / 2, "{:?}", second - first);
    }
}
