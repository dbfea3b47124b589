//! How long a thread pauses while chunks are copied.

use std::time::{Duration, Instant};

use gpu::{CopyTimes, Pause};

/// A thread that is in no hurry looks so much later: usually once for each chunk, after its end.
const COARSE_LOOK: Duration = Duration::from_micros(10);
/// Time of a chunk that is too short for an estimate.
const SHORT_CHUNK_TIME: Duration = Duration::from_micros(2);

/// A pause of a thread that is in no hurry: it does not look all the time. In the middle of a
/// transfer a late look delays the transfer once, not each chunk, because others are in flight.
pub(super) fn coarse_pause(pause: Pause, now: Instant) -> Pause {
    match pause {
        Pause::Spin => Pause::Until(now + COARSE_LOOK),
        Pause::Until(look) => Pause::Until(look + COARSE_LOOK),
    }
}

/// A look that found work done.
#[derive(Debug, Clone, Copy)]
pub(super) struct Look {
    now: Instant,
    /// The last look that found the first of the work in progress; None if there was none.
    in_progress: Option<Instant>,
    /// Number of chunks that were done.
    done: usize,
    /// The thread was in no hurry.
    was_coarse: bool,
}

impl Look {
    pub(super) fn new(
        now: Instant,
        in_progress: Option<Instant>,
        done: usize,
        was_coarse: bool,
    ) -> Self {
        Self { now, in_progress, done, was_coarse }
    }
}

/// Times of chunks that are worked on one after the other.
#[derive(Debug)]
pub(super) struct ChunkTimes {
    times: CopyTimes,
    /// When the last chunk ended, as far as known.
    last_end: Instant,
}

impl ChunkTimes {
    pub(super) fn new() -> Self {
        Self { times: CopyTimes::default(), last_end: Instant::now() }
    }

    /// The pause until the end of chunks of these lengths, of which the first was requested then.
    pub(super) fn pause(
        &self,
        now: Instant,
        since: Instant,
        lengths: impl Iterator<Item = u64>,
    ) -> Pause {
        let begun = since.max(self.last_end);
        let mut end = begun;
        for bytes in lengths {
            match self.times.estimate(bytes) {
                None if bytes >= CopyTimes::SHORTEST => return Pause::for_end(now, begun, None),
                time => end += time.unwrap_or(SHORT_CHUNK_TIME),
            }
        }
        Pause::for_end(now, begun, Some(end))
    }

    /// Takes note of a look that found a chunk done, which was requested then, and maybe others.
    pub(super) fn note(&mut self, bytes: u64, since: Instant, look: Look) {
        let Look { now, in_progress, done, was_coarse } = look;
        let begun = since.max(self.last_end);
        let expected = self.times.estimate(bytes).map(|time| begun + time);
        // A late look must not delay the next one.
        self.last_end = match expected {
            Some(end) if was_coarse && done == 1 => end.min(now).max(in_progress.unwrap_or(begun)),
            _ => now,
        };
        let Some(in_progress) = in_progress else { return };
        // Several chunks share the time, or one of them would seem to take as long as all.
        let at_most = now.saturating_duration_since(begun) / look.done.max(1) as u32;
        let at_least = in_progress.saturating_duration_since(begun).min(at_most);
        // Looks of a thread in no hurry tell too little, unless the chunk was overdue, so that others
        // are done, too; or in progress for several looks beyond its expected end.
        let is_wrong = expected.is_none_or(|end| done > 1 || in_progress > end + 2 * COARSE_LOOK);
        if !was_coarse || is_wrong || gpu::is_exact(at_least, at_most) {
            self.times.learn(bytes, at_least, at_most);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNK: u64 = 4 << 20;

    fn microseconds(count: u64) -> Duration {
        Duration::from_micros(count)
    }

    #[test]
    fn thread_in_no_hurry_never_spins() {
        let now = Instant::now();
        assert_eq!(coarse_pause(Pause::Spin, now), Pause::Until(now + COARSE_LOOK));
        let late = Pause::Until(now + 5 * COARSE_LOOK);
        assert_eq!(coarse_pause(late, now), Pause::Until(now + 6 * COARSE_LOOK));
    }

    #[test]
    fn estimates_of_chunks_add_up() {
        let mut times = ChunkTimes::new();
        let start = times.last_end;
        let pause = |times: &ChunkTimes, count: usize| {
            times.pause(times.last_end, start, std::iter::repeat_n(CHUNK, count))
        };
        assert_eq!(pause(&times, 1), Pause::Spin);
        let [seen, done] = [75, 76].map(|at| start + microseconds(at));
        times.note(CHUNK, start, Look::new(done, Some(seen), 1, false));
        let [Pause::Until(first), Pause::Until(second)] = [1, 2].map(|count| pause(&times, count))
        else {
            panic!("no estimate")
        };
        assert!(second - first > microseconds(60), "{:?}", second - first);
    }

    /// Chunks of 76 µs, one after the other, and sleeps that are late by 3 µs. Returns the looks and
    /// the longest delay of a look behind the end of a chunk.
    fn simulate(chunks: u64, mut times: ChunkTimes) -> (u64, Duration) {
        let time = microseconds(76);
        let start = times.last_end;
        let (mut now, mut ended, mut looks) = (start, 0, 0);
        let (mut in_progress, mut longest) = (None, Duration::ZERO);
        while ended < chunks {
            let pause = times.pause(now, start, std::iter::once(CHUNK));
            let Pause::Until(look) = coarse_pause(pause, now) else { panic!("it spins") };
            now = now.max(look) + microseconds(3);
            looks += 1;
            let all = ((now - start).as_nanos() / time.as_nanos()) as u64;
            if all > ended {
                longest = longest.max(now - (start + time * (ended as u32 + 1)));
                let done = (all - ended) as usize;
                times.note(CHUNK, start, Look::new(now, in_progress, done, true));
                ended = all;
            }
            in_progress = Some(now);
        }
        (looks, longest)
    }

    /// A sleep until the end of all chunks of a put sees all of them done: that must not be taken for
    /// the time of one.
    #[test]
    fn too_long_an_estimate_of_several_chunks_is_corrected() {
        let (bytes, chunks, time) = (256 << 10, 4_u32, microseconds(10));
        let mut times = ChunkTimes::new();
        let [seen, done] = [499, 500].map(|at| times.last_end + microseconds(at));
        times.note(bytes, times.last_end, Look::new(done, Some(seen), 1, false));
        let (mut start, mut delay) = (done + microseconds(20), Duration::MAX);
        for _ in 0..20 {
            let (mut now, end) = (start, start + chunks * time);
            let mut in_progress = start;
            while now < end {
                in_progress = now;
                let lengths = std::iter::repeat_n(bytes, chunks as usize);
                now = match times.pause(now, start, lengths) {
                    Pause::Spin => now + microseconds(1),
                    Pause::Until(look) => look + microseconds(3),
                };
            }
            times.note(bytes, start, Look::new(now, Some(in_progress), chunks as usize, false));
            delay = now - end;
            start = now + microseconds(20);
        }
        assert!(delay < microseconds(10), "{delay:?}");
    }

    #[test]
    fn each_chunk_in_the_middle_of_a_transfer_costs_about_one_look() {
        let mut times = ChunkTimes::new();
        let [seen, done] = [75, 76].map(|at| times.last_end + microseconds(at));
        times.note(CHUNK, times.last_end, Look::new(done, Some(seen), 1, false));
        let (looks, longest) = simulate(256, times);
        assert!(looks < 256 * 3 / 2, "{looks} looks for 256 chunks");
        assert!(longest < microseconds(40), "{longest:?}");
        // From any estimate.
        for wrong in [5, 20, 200, 500] {
            let mut times = ChunkTimes::new();
            let [seen, done] = [0, 1].map(|more| times.last_end + microseconds(wrong + more));
            times.note(CHUNK, times.last_end, Look::new(done, Some(seen), 1, false));
            let (looks, _) = simulate(256, times);
            assert!(looks < 256 * 3, "{looks} looks, from {wrong} µs");
        }
    }
}
