//! Which topics are polled in every round, which ones are tried again, and which owe credit.

use std::collections::BTreeSet;
use std::mem;
use std::time::Duration;

use super::topics::table::{TopicSlot, TopicTable};
use crate::replication::Progress;
use crate::replication::transport::Transport;

/// The longest sleep while a device copies: its end wakes no thread.
pub(super) const COPY_POLL_INTERVAL: Duration = Duration::from_micros(50);
/// Interval of retries for a sink without capacity, unless an event comes first: it grows with the
/// waiting time, so that retries cost little and come at most an eighth late.
const MIN_RETRY_INTERVAL: Duration = Duration::from_millis(1);
const MAX_RETRY_INTERVAL: Duration = Duration::from_millis(20);
const MAX_SLEEP: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(super) struct ReadyQueue {
    /// Topics polled in each round.
    listed: Vec<TopicSlot>,
    /// Outbound topics without capacity at their last turn.
    stalled: BTreeSet<usize>,
    /// Inbound topics with credit that their writers may not have.
    unacknowledged: Vec<usize>,
    /// How long a topic is polled after an event, in nanoseconds.
    spin: u64,
}

impl ReadyQueue {
    pub(super) fn new(spin: u64) -> Self {
        Self { listed: Vec::new(), stalled: BTreeSet::new(), unacknowledged: Vec::new(), spin }
    }

    /// Marks a topic as ready after an event.
    pub(super) fn mark(&mut self, topics: &mut TopicTable, slot: TopicSlot, now: u64) {
        let Some(ready) = topics.ready(slot) else { return };
        if ready.mark(now + self.spin) {
            self.listed.push(slot);
        }
    }

    pub(super) fn get(&self, at: usize) -> Option<TopicSlot> {
        self.listed.get(at).copied()
    }

    /// Notes the result of the turn of the topic at an index. True if it stays there.
    pub(super) fn end_turn(
        &mut self,
        at: usize,
        slot: TopicSlot,
        progress: Progress,
        topics: &mut TopicTable,
        now: u64,
    ) -> bool {
        let ready = topics.ready(slot);
        let stays = ready.is_some_and(|ready| ready.end_turn(progress, now, self.spin));
        // A topic whose source or sink failed in its turn was removed already.
        if !stays && self.get(at) == Some(slot) {
            self.listed.swap_remove(at);
        }
        stays
    }

    /// Forgets a topic that was taken from the table.
    pub(super) fn remove(&mut self, slot: TopicSlot) {
        self.listed.retain(|one| *one != slot);
        if let TopicSlot::In(index) = slot {
            self.unacknowledged.retain(|one| *one != index);
        }
    }

    /// How long the thread may sleep, unless an event comes first.
    pub(super) fn longest_sleep(&self, topics: &mut TopicTable, now: u64) -> Duration {
        let mut longest = MAX_SLEEP;
        for slot in &self.listed {
            let Some(Progress { is_copying, is_waiting, .. }) =
                topics.ready(*slot).map(|ready| ready.progress())
            else {
                continue;
            };
            if is_copying {
                longest = longest.min(COPY_POLL_INTERVAL);
            } else if is_waiting {
                let since = topics.waiting_since(*slot);
                let waited = since.map_or(0, |since| now.saturating_sub(since));
                longest = longest.min(
                    Duration::from_nanos(waited / 8).clamp(MIN_RETRY_INTERVAL, MAX_RETRY_INTERVAL),
                );
            }
        }
        longest
    }

    /// Notes whether an outbound topic lacks capacity.
    pub(super) fn set_stalled(&mut self, index: usize, is_stalled: bool) {
        match is_stalled {
            true => self.stalled.insert(index),
            false => self.stalled.remove(&index),
        };
    }

    /// Freed capacity wakes no thread: retry.
    pub(super) fn retry_stalled(&mut self, topics: &mut TopicTable, now: u64) {
        // Its next turn checks whether it is still stalled.
        for index in mem::take(&mut self.stalled) {
            self.mark(topics, TopicSlot::Out(index), now);
        }
    }

    /// Notes that the writer of an inbound topic may lack credit.
    pub(super) fn set_unacknowledged(&mut self, index: usize) {
        if !self.unacknowledged.contains(&index) {
            self.unacknowledged.push(index);
        }
    }

    /// Returns credit to writers where a watermark was passed; all credit while nothing else
    /// happens (`is_quiet`).
    pub(super) fn acknowledge(
        &mut self,
        topics: &mut TopicTable,
        transport: &mut Transport,
        is_quiet: bool,
        now: u64,
    ) {
        for at in 0..self.unacknowledged.len() {
            let index = self.unacknowledged[at];
            let Some(topic) = topics.inbound(index) else { continue };
            if let Err(error) = topic.acknowledge(transport.port_mut(), is_quiet) {
                tracing::debug!(%error, "returning credit to a writer failed");
                // Chunks that arrived before are read first; then the ring reports that it is
                // broken.
                self.mark(topics, TopicSlot::In(index), now);
            }
        }
        if is_quiet {
            self.unacknowledged.retain(|index| {
                topics.inbound(*index).is_some_and(|topic| topic.has_unacknowledged())
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn topic_removed_in_its_turn_leaves_the_others() {
        let (first, second) = (TopicSlot::Out(0), TopicSlot::Out(1));
        for (removed, other) in [(first, second), (second, first)] {
            let mut queue = ReadyQueue::new(0);
            queue.listed = vec![first, second];
            let at = queue.listed.iter().position(|slot| *slot == removed).unwrap();
            queue.remove(removed);
            let mut topics = TopicTable::new(0);
            assert!(!queue.end_turn(at, removed, Progress::default(), &mut topics, 0));
            assert_eq!(queue.listed, [other]);
        }
    }
}
