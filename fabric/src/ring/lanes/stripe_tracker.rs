//! Tracks which chunks of a ring went by which lane, and which are locally complete: no threads,
//! clock or I/O.

use std::collections::VecDeque;

use super::scheduler::LaneScheduler;

/// Chunks that a lane may have in flight.
const MAX_IN_FLIGHT: u64 = 4;

/// Number of extra lanes from which on lane 0 carries no stripes.
///
/// Lane 0 is driven by the port's thread. While the provider copies a chunk in one of its calls,
/// neither rings nor the owner of the port make progress, and the owner has to feed all lanes.
/// Three or more lanes copy faster than such an owner feeds them: 64 MiB between two devices took
/// twice as long over lane 0 and four extra lanes, which were mostly idle, as over the extra lanes
/// alone. Two extra lanes alone are slower than with lane 0.
const EXTRA_LANES_ALONE: usize = 3;

/// The chunks of a ring by lane; lane 0 is the port's endpoint.
#[derive(Debug)]
pub(in super::super) struct StripeTracker {
    scheduler: LaneScheduler,
    /// For each lane in order: start and end of the chunks that the provider may still read.
    in_flight: Vec<VecDeque<(u64, u64)>>,
}

impl StripeTracker {
    /// Tracks this many lanes, for chunks of at most `longest` bytes.
    pub(in super::super) fn new(lanes: usize, longest: u64) -> Self {
        let in_flight = vec![VecDeque::with_capacity(MAX_IN_FLIGHT as usize * 2); lanes];
        let first = usize::from(lanes > EXTRA_LANES_ALONE);
        let scheduler = LaneScheduler::new(lanes, first, MAX_IN_FLIGHT * longest);
        Self { scheduler, in_flight }
    }

    pub(in super::super) fn lanes(&self) -> usize {
        self.in_flight.len()
    }

    /// The lane that is expected to complete a chunk first; None if all are full. With several
    /// extra lanes it is never lane 0.
    pub(in super::super) fn pick_lane(&self, length: u64) -> Option<usize> {
        self.scheduler.pick_lane(length)
    }

    /// A chunk with this payload was posted on a lane, at this time in nanoseconds.
    pub(in super::super) fn posted(
        &mut self,
        lane: usize,
        (start, end): (u64, u64),
        payload: u64,
        now: u64,
    ) {
        self.in_flight[lane].push_back((start, end));
        self.scheduler.posted(lane, payload, now);
    }

    /// A lane has completed a chunk with this payload, and all its chunks that end at or below the
    /// position.
    pub(in super::super) fn done(
        &mut self,
        lane: usize,
        completed_to: u64,
        payload: u64,
        now: u64,
    ) {
        let Some(in_flight) = self.in_flight.get_mut(lane) else { return };
        while in_flight.front().is_some_and(|(_, end)| *end <= completed_to) {
            in_flight.pop_front();
        }
        self.scheduler.done(lane, payload, now);
    }

    /// All chunks that end at or below this position are locally complete; `tail` is the end of the
    /// last one.
    pub(in super::super) fn completed_to(&self, tail: u64) -> u64 {
        let firsts = self.in_flight.iter().filter_map(|in_flight| in_flight.front());
        firsts.map(|(start, _)| *start).min().unwrap_or(tail)
    }

    pub(in super::super) fn unfinished(&self) -> usize {
        self.in_flight.iter().map(VecDeque::len).sum()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Chunks that each lane gets before one completes.
    fn in_flight(lanes: usize) -> Vec<usize> {
        let mut stripe_tracker = StripeTracker::new(lanes, 1 << 19);
        let mut tail = 0;
        while let Some(lane) = stripe_tracker.pick_lane(1 << 19) {
            stripe_tracker.posted(lane, (tail, tail + 1), 1 << 19, tail);
            tail += 1;
        }
        stripe_tracker.in_flight.iter().map(VecDeque::len).collect()
    }

    #[test]
    fn lane_0_carries_no_stripes_beside_three_extra_lanes() {
        for lanes in 1..=3 {
            assert_eq!(in_flight(lanes), vec![MAX_IN_FLIGHT as usize; lanes], "all carry stripes");
        }
        for lanes in 4..=8 {
            let mut expected = vec![MAX_IN_FLIGHT as usize; lanes];
            expected[0] = 0;
            assert_eq!(in_flight(lanes), expected);
        }
    }

    /// Other chunks on lane 0, such as headers, count as before and do not delay other lanes.
    #[test]
    fn completed_to_includes_chunks_on_lane_0() {
        let mut stripe_tracker = StripeTracker::new(5, 1 << 19);
        stripe_tracker.posted(0, (0, 64), 40, 0);
        for at in 0..16 {
            let lane = stripe_tracker.pick_lane(1 << 19).unwrap();
            let start = 64 + at * (1 << 19);
            stripe_tracker.posted(lane, (start, start + (1 << 19)), 1 << 19, 1);
        }
        let tail = 64 + 16 * (1 << 19);
        assert_eq!((stripe_tracker.pick_lane(1 << 19), stripe_tracker.unfinished()), (None, 17));
        (1..5).for_each(|lane| stripe_tracker.done(lane, tail, 4 << 19, 1000));
        assert_eq!((stripe_tracker.completed_to(tail), stripe_tracker.unfinished()), (0, 1));
        stripe_tracker.done(0, 64, 40, 1000);
        assert_eq!((stripe_tracker.completed_to(tail), stripe_tracker.unfinished()), (tail, 0));
    }

    proptest! {
        /// Lanes complete in any order, each its own chunks in sequence. The completed position is
        /// the start of the first incomplete chunk.
        #[test]
        fn completed_to_is_the_first_incomplete_chunk_of_all_lanes(
            chunks in proptest::collection::vec((0..4_usize, 1..1000_u64, 0..3_u64), 1..60),
            order in proptest::collection::vec(0..4_usize, 0..200),
        ) {
            let mut stripe_tracker = StripeTracker::new(4, 1 << 20);
            let (mut tail, mut all, mut queues) = (0, Vec::new(), vec![VecDeque::new(); 4]);
            for (number, (lane, length, skip)) in chunks.iter().enumerate() {
                let start = tail + skip * 10;
                tail = start + length;
                stripe_tracker.posted(*lane, (start, tail), *length, number as u64);
                queues[*lane].push_back(number);
                all.push((start, tail, false));
            }
            let rest: Vec<usize> = (0..4).flat_map(|lane| vec![lane; 60]).collect();
            for lane in order.into_iter().chain(rest) {
                let Some(number) = queues[lane].pop_front() else { continue };
                let (start, end, _) = all[number];
                all[number].2 = true;
                stripe_tracker.done(lane, end, end - start, 100);
                let first = all.iter().find(|(_, _, is_done)| !is_done);
                prop_assert_eq!(stripe_tracker.completed_to(tail), first.map_or(tail, |(start, ..)| *start));
                let left = all.iter().filter(|(_, _, is_done)| !is_done).count();
                prop_assert_eq!(stripe_tracker.unfinished(), left);
            }
            prop_assert_eq!(stripe_tracker.completed_to(tail), tail);
        }
    }
}
