//! What of a ring's chunks went by which lane, and which of it the provider is done with: no
//! threads, no clock, no wire.

use std::collections::VecDeque;

use super::spread::Spread;

/// Chunks that a lane may have on its way.
const DEPTH: u64 = 4;

/// Further lanes from which on chunks are not spread over the first one as well.
///
/// The port's thread drives that: while the provider copies a chunk in a call of it nothing else is
/// done, neither for rings nor by the port's owner, who has to keep all lanes busy. Three or more
/// copy faster than such an owner gives them chunks while it copies, too: 64 MiB between two
/// devices took twice as long as alone by five lanes of which each further one was idle for most
/// of it. Two would miss the share of the first.
const ENOUGH: usize = 3;

/// The first lane of so many that chunks are spread over.
fn first_of(lanes: usize) -> usize {
    usize::from(lanes > ENOUGH)
}

/// The chunks of a ring's writing side, by lanes: the first one is the port's own.
#[derive(Debug)]
pub(in super::super) struct Shares {
    spread: Spread,
    /// For each lane, in their order: where a chunk begins and ends in the ring that the provider
    /// may still read from.
    given: Vec<VecDeque<(u64, u64)>>,
}

impl Shares {
    /// Over so many lanes, for chunks of at most so many bytes.
    pub(in super::super) fn new(lanes: usize, longest: u64) -> Self {
        let given = vec![VecDeque::with_capacity(DEPTH as usize * 2); lanes];
        let spread = Spread::new(lanes, first_of(lanes), DEPTH * longest);
        Self { spread, given }
    }

    pub(in super::super) fn lanes(&self) -> usize {
        self.given.len()
    }

    /// The lane that is expected to be done with a chunk first; None if all have enough to do.
    /// With several further ones it is never the first.
    pub(in super::super) fn pick(&self, length: u64) -> Option<usize> {
        self.spread.pick(length)
    }

    /// A chunk with so many bytes of payload was given to a lane, at this time in nanoseconds.
    pub(in super::super) fn posted(
        &mut self,
        lane: usize,
        (start, end): (u64, u64),
        payload: u64,
        now: u64,
    ) {
        self.given[lane].push_back((start, end));
        self.spread.posted(lane, payload, now);
    }

    /// A lane is done with a chunk's payload, and with all that it was given and that ends no
    /// further than this.
    pub(in super::super) fn done(&mut self, lane: usize, left_to: u64, payload: u64, now: u64) {
        let Some(given) = self.given.get_mut(lane) else { return };
        while given.front().is_some_and(|(_, end)| *end <= left_to) {
            given.pop_front();
        }
        self.spread.done(lane, payload, now);
    }

    /// Up to here the provider is done with all chunks, of which the last one ends at `tail`.
    pub(in super::super) fn left_to(&self, tail: u64) -> u64 {
        let firsts = self.given.iter().filter_map(|given| given.front());
        firsts.map(|(start, _)| *start).min().unwrap_or(tail)
    }

    /// Chunks that a lane is not done with.
    pub(in super::super) fn unfinished(&self) -> usize {
        self.given.iter().map(VecDeque::len).sum()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Chunks that each lane gets before one is done.
    fn given(lanes: usize) -> Vec<usize> {
        let mut shares = Shares::new(lanes, 1 << 19);
        let mut tail = 0;
        while let Some(lane) = shares.pick(1 << 19) {
            shares.posted(lane, (tail, tail + 1), 1 << 19, tail);
            tail += 1;
        }
        shares.given.iter().map(VecDeque::len).collect()
    }

    #[test]
    fn the_first_of_many_lanes_is_left_to_what_is_no_share_of_a_large_message() {
        for lanes in 1..=3 {
            assert_eq!(given(lanes), vec![DEPTH as usize; lanes], "few are all wanted");
        }
        for lanes in 4..=8 {
            let mut expected = vec![DEPTH as usize; lanes];
            expected[0] = 0;
            assert_eq!(given(lanes), expected);
        }
    }

    /// What goes by the first one all the same, such as headers, counts as before, and keeps no
    /// chunk from others.
    #[test]
    fn what_goes_by_the_first_of_many_lanes_is_waited_for() {
        let mut shares = Shares::new(5, 1 << 19);
        shares.posted(0, (0, 64), 40, 0);
        for at in 0..16 {
            let lane = shares.pick(1 << 19).unwrap();
            let start = 64 + at * (1 << 19);
            shares.posted(lane, (start, start + (1 << 19)), 1 << 19, 1);
        }
        let tail = 64 + 16 * (1 << 19);
        assert_eq!((shares.pick(1 << 19), shares.unfinished()), (None, 17));
        (1..5).for_each(|lane| shares.done(lane, tail, 4 << 19, 1000));
        assert_eq!((shares.left_to(tail), shares.unfinished()), (0, 1));
        shares.done(0, 64, 40, 1000);
        assert_eq!((shares.left_to(tail), shares.unfinished()), (tail, 0));
    }

    proptest! {
        /// Lanes that are done in any order among each other, each in its own: what is said to
        /// have left is what has, up to the first that has not.
        #[test]
        fn what_has_left_is_told_from_all_lanes(
            chunks in proptest::collection::vec((0..4_usize, 1..1000_u64, 0..3_u64), 1..60),
            order in proptest::collection::vec(0..4_usize, 0..200),
        ) {
            let mut shares = Shares::new(4, 1 << 20);
            let (mut tail, mut all, mut queues) = (0, Vec::new(), vec![VecDeque::new(); 4]);
            for (number, (lane, length, skip)) in chunks.iter().enumerate() {
                let start = tail + skip * 10;
                tail = start + length;
                shares.posted(*lane, (start, tail), *length, number as u64);
                queues[*lane].push_back(number);
                all.push((start, tail, false));
            }
            let rest: Vec<usize> = (0..4).flat_map(|lane| vec![lane; 60]).collect();
            for lane in order.into_iter().chain(rest) {
                let Some(number) = queues[lane].pop_front() else { continue };
                let (start, end, _) = all[number];
                all[number].2 = true;
                shares.done(lane, end, end - start, 100);
                let first = all.iter().find(|(_, _, is_done)| !is_done);
                prop_assert_eq!(shares.left_to(tail), first.map_or(tail, |(start, ..)| *start));
                let left = all.iter().filter(|(_, _, is_done)| !is_done).count();
                prop_assert_eq!(shares.unfinished(), left);
            }
            prop_assert_eq!(shares.left_to(tail), tail);
        }
    }
}
