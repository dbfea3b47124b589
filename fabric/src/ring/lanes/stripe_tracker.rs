//! What of a ring's chunks went by which lane, and which of it the provider is done with: no
//! threads, no clock, no wire.

use std::collections::VecDeque;

use super::scheduler::LaneScheduler;

/// Chunks that a lane may have on its way.
const MAX_IN_FLIGHT: u64 = 4;

/// Further lanes from which on chunks are not spread over the first one as well.
///
/// The port's thread drives that: while the provider copies a chunk in a call of it nothing else is
/// done, neither for rings nor by the port's owner, who has to keep all lanes busy. Three or more
/// copy faster than such an owner gives them chunks while it copies, too: 64 MiB between two
/// devices took twice as long as alone by five lanes of which each further one was idle for most
/// of it. Two would miss the share of the first.
const EXTRA_LANES_ALONE: usize = 3;

/// The first lane of so many that chunks are spread over.
fn first_striped_lane(lanes: usize) -> usize {
    usize::from(lanes > EXTRA_LANES_ALONE)
}

/// The chunks of a ring's writing side, by lanes: the first one is the port's own.
#[derive(Debug)]
pub(in super::super) struct StripeTracker {
    scheduler: LaneScheduler,
    /// For each lane, in their order: where a chunk begins and ends in the ring that the provider
    /// may still read from.
    in_flight: Vec<VecDeque<(u64, u64)>>,
}

impl StripeTracker {
    /// Over so many lanes, for chunks of at most so many bytes.
    pub(in super::super) fn new(lanes: usize, longest: u64) -> Self {
        let in_flight = vec![VecDeque::with_capacity(MAX_IN_FLIGHT as usize * 2); lanes];
        let scheduler =
            LaneScheduler::new(lanes, first_striped_lane(lanes), MAX_IN_FLIGHT * longest);
        Self { scheduler, in_flight }
    }

    pub(in super::super) fn lanes(&self) -> usize {
        self.in_flight.len()
    }

    /// The lane that is expected to be done with a chunk first; None if all have enough to do.
    /// With several further ones it is never the first.
    pub(in super::super) fn pick_lane(&self, length: u64) -> Option<usize> {
        self.scheduler.pick_lane(length)
    }

    /// A chunk with so many bytes of payload was given to a lane, at this time in nanoseconds.
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

    /// A lane is done with a chunk's payload, and with all that it was given and that ends no
    /// further than this.
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

    /// Up to here the provider is done with all chunks, of which the last one ends at `tail`.
    pub(in super::super) fn completed_to(&self, tail: u64) -> u64 {
        let firsts = self.in_flight.iter().filter_map(|in_flight| in_flight.front());
        firsts.map(|(start, _)| *start).min().unwrap_or(tail)
    }

    /// Chunks that a lane is not done with.
    pub(in super::super) fn unfinished(&self) -> usize {
        self.in_flight.iter().map(VecDeque::len).sum()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Chunks that each lane gets before one is done.
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
    fn the_first_of_many_lanes_is_left_to_what_is_no_share_of_a_large_message() {
        for lanes in 1..=3 {
            assert_eq!(in_flight(lanes), vec![MAX_IN_FLIGHT as usize; lanes], "few are all wanted");
        }
        for lanes in 4..=8 {
            let mut expected = vec![MAX_IN_FLIGHT as usize; lanes];
            expected[0] = 0;
            assert_eq!(in_flight(lanes), expected);
        }
    }

    /// What goes by the first one all the same, such as headers, counts as before, and keeps no
    /// chunk from others.
    #[test]
    fn what_goes_by_the_first_of_many_lanes_is_waited_for() {
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
        /// Lanes that are done in any order among each other, each in its own: what is said to
        /// have left is what has, up to the first that has not.
        #[test]
        fn what_has_left_is_told_from_all_lanes(
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
