//! Chooses the lane of a chunk: no threads, clock or I/O.
//!
//! A lane's rate is measured from the bytes that it completes while it is busy. A chunk goes to the
//! lane that is expected to complete it first. So a lane with half the rate gets half the bytes,
//! and a lane that stalls gets no more than it has.

/// Bytes that a lane completes before its rate is updated.
const RATE_WINDOW: u64 = 1 << 20;
/// Weight of the old rate in the new one.
const OLD_RATE_WEIGHT: f64 = 0.75;

#[derive(Debug, Clone)]
struct LaneRate {
    /// Bytes posted and not completed.
    in_flight: u64,
    /// Bytes per nanosecond. None: not known yet.
    rate: Option<f64>,
    /// Bytes completed since the last update of the rate, and the time in which the lane was busy.
    done: u64,
    busy: u64,
    busy_since: u64,
}

#[derive(Debug)]
pub(in super::super) struct LaneScheduler {
    lanes: Vec<LaneRate>,
    most_in_flight: u64,
    /// Lanes before this one are never picked.
    first: usize,
}

impl LaneScheduler {
    /// Distributes chunks over the lanes from `first` on, each with at most `most_in_flight` bytes,
    /// or one chunk.
    pub(super) fn new(lanes: usize, first: usize, most_in_flight: u64) -> Self {
        let lane = LaneRate { in_flight: 0, rate: None, done: 0, busy: 0, busy_since: 0 };
        Self { lanes: vec![lane; lanes], most_in_flight, first }
    }

    /// The lane for a chunk of this many bytes; None if all lanes are full.
    pub(super) fn pick_lane(&self, length: u64) -> Option<usize> {
        // A lane with unknown rate is assumed to be as fast as the best, so it is tried.
        let lanes = || self.lanes.iter().enumerate().skip(self.first);
        let best = lanes().filter_map(|(_, lane)| lane.rate).reduce(f64::max).unwrap_or(1.0);
        let times = lanes().filter_map(|(number, lane)| {
            let is_full = lane.in_flight > 0 && lane.in_flight + length > self.most_in_flight;
            let time = (lane.in_flight + length) as f64 / lane.rate.unwrap_or(best);
            (!is_full).then_some((number, time))
        });
        times.min_by(|(_, one), (_, other)| one.total_cmp(other)).map(|(number, _)| number)
    }

    /// A chunk was posted on a lane, at this time in nanoseconds.
    pub(super) fn posted(&mut self, lane: usize, length: u64, now: u64) {
        let lane = &mut self.lanes[lane];
        if lane.in_flight == 0 {
            lane.busy_since = now;
        }
        // An empty chunk keeps the lane busy, too.
        lane.in_flight += length.max(1);
    }

    /// A chunk is complete, at this time in nanoseconds.
    pub(super) fn done(&mut self, lane: usize, length: u64, now: u64) {
        let lane = &mut self.lanes[lane];
        lane.in_flight = lane.in_flight.saturating_sub(length.max(1));
        lane.done += length;
        lane.busy += now.saturating_sub(lane.busy_since);
        lane.busy_since = now;
        if lane.done >= RATE_WINDOW && lane.busy > 0 {
            let rate = lane.done as f64 / lane.busy as f64;
            lane.rate = Some(
                lane.rate
                    .map_or(rate, |old| old * OLD_RATE_WEIGHT + rate * (1.0 - OLD_RATE_WEIGHT)),
            );
            (lane.done, lane.busy) = (0, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates lanes with a fixed time per byte. Returns each lane's share of the bytes, and the
    /// time.
    fn run(nanoseconds_per_byte: &[f64], chunks: u64, length: u64) -> (Vec<f64>, u64) {
        let mut scheduler = LaneScheduler::new(nanoseconds_per_byte.len(), 0, 4 * length);
        let mut queues: Vec<Vec<u64>> = vec![Vec::new(); nanoseconds_per_byte.len()];
        let mut carried = vec![0_u64; nanoseconds_per_byte.len()];
        let mut now = 0;
        let mut sent = 0;
        while sent < chunks || queues.iter().any(|queue| !queue.is_empty()) {
            while sent < chunks
                && let Some(lane) = scheduler.pick_lane(length)
            {
                let time = (length as f64 * nanoseconds_per_byte[lane]) as u64;
                let start = queues[lane].last().copied().unwrap_or(now).max(now);
                queues[lane].push(start + time);
                scheduler.posted(lane, length, now);
                carried[lane] += length;
                sent += 1;
            }
            // The next chunk to complete.
            let ends = queues.iter().enumerate();
            let next = ends.filter_map(|(lane, queue)| queue.first().map(|end| (*end, lane))).min();
            let Some((end, lane)) = next else { break };
            queues[lane].remove(0);
            now = end;
            scheduler.done(lane, length, now);
        }
        assert!(scheduler.lanes.iter().all(|lane| lane.in_flight == 0));
        let total: u64 = carried.iter().sum();
        (carried.iter().map(|bytes| *bytes as f64 / total as f64).collect(), now)
    }

    #[test]
    fn equal_lanes_get_equal_shares() {
        let (shares, took) = run(&[1.0; 4], 4000, 1 << 18);
        assert!(shares.iter().all(|share| (share - 0.25).abs() < 0.01), "{shares:?}");
        // A quarter of the time of one lane.
        assert!((took as f64) < 1.02 * 1000.0 * f64::from(1 << 18), "{took}");
    }

    #[test]
    fn shares_follow_rates() {
        let (shares, took) = run(&[1.0, 2.0, 4.0], 7000, 1 << 18);
        for (share, expected) in shares.iter().zip([4.0 / 7.0, 2.0 / 7.0, 1.0 / 7.0]) {
            assert!((share - expected).abs() < 0.03, "{shares:?}");
        }
        let best = 7000.0 * f64::from(1 << 18) / 1.75;
        assert!((took as f64) < 1.03 * best, "{took} against {best}");
    }

    #[test]
    fn rates_of_excluded_lanes_are_ignored() {
        let mut scheduler = LaneScheduler::new(3, 1, 4 << 20);
        // The first lane is much faster than the others, and idle.
        for now in 0..10 {
            scheduler.posted(0, 1 << 20, now * 1000);
            scheduler.done(0, 1 << 20, now * 1000 + 1);
        }
        let mut carried = [0; 3];
        while let Some(lane) = scheduler.pick_lane(1 << 20) {
            scheduler.posted(lane, 1 << 20, 20_000);
            carried[lane] += 1;
        }
        assert_eq!(carried, [0, 4, 4]);
        // The third has an unknown rate: it is assumed to be like the second, not like the first.
        for now in [1, 2, 3, 4] {
            scheduler.done(1, 1 << 20, 20_000 + now * 1_000_000);
        }
        scheduler.posted(1, 1 << 20, 5_000_000);
        for _ in 0..3 {
            scheduler.done(2, 1, 5_000_000);
        }
        assert_eq!(scheduler.pick_lane(1 << 20), Some(1));
    }

    #[test]
    fn stalled_lane_gets_no_more_chunks() {
        let mut scheduler = LaneScheduler::new(2, 0, 4 << 20);
        let mut to_stalled = 0;
        for now in 0..1000 {
            while let Some(lane) = scheduler.pick_lane(1 << 20) {
                scheduler.posted(lane, 1 << 20, now * 1000);
                if lane == 1 {
                    to_stalled += 1;
                }
                if lane == 0 {
                    break;
                }
            }
            if now > 0 {
                scheduler.done(0, 1 << 20, now * 1000);
            }
        }
        assert!(to_stalled <= 4, "{to_stalled}");
    }
}
