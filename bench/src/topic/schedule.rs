//! The schedule of publisher and readers, turn by turn, which all know from the start.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::ROUNDS;

/// Longest wait of one process for another.
pub(super) const TIMEOUT: Duration = Duration::from_secs(60);
/// Messages of a round that is compared completely.
pub(super) const VERIFIED_MESSAGES: u64 = 2;
/// Messages before the first that counts.
pub(super) const WARMUP: u64 = 5;
/// Messages before the first that counts, if messages are not copied between nodes.
pub(super) const INTRA_NODE_WARMUP: u64 = 1000;

/// The target of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum TurnTarget {
    /// Messages of the topic with this number.
    Topic(usize),
    /// Entries of the queue baseline.
    Queue,
    /// Another process is measured: readers sleep until they are resumed.
    Pause,
}

/// The purpose of a turn's messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Round {
    /// All their bytes are written and compared; nothing is timed.
    Verify,
    /// Sent like timed messages, but not counted.
    Warmup,
    /// Timed, one at a time.
    Timed,
    /// At full speed.
    Stream,
}

/// A number of messages in a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Turn {
    pub(super) what: TurnTarget,
    pub(super) round: Round,
    pub(super) count: u64,
}

impl Turn {
    pub(super) fn new(what: TurnTarget, round: Round, count: u64) -> Self {
        Self { what, round, count }
    }

    pub(super) fn pause() -> Self {
        Self::new(TurnTarget::Pause, Round::Warmup, 0)
    }
}

/// Interleaves items, A B C C B A A B C …: each is measured as often before as after another.
pub(super) fn in_turn<T: Copy>(all: &[T]) -> impl Iterator<Item = T> + '_ {
    (0..ROUNDS as usize).flat_map(move |round| {
        let index = move |at| if round % 2 == 0 { at } else { all.len() - 1 - at };
        (0..all.len()).map(move |at| all[index(at)])
    })
}

/// Number of messages of a schedule that are compared completely.
pub(super) fn compared(schedule: &[Turn]) -> u64 {
    let verify_turns = schedule.iter().filter(|turn| turn.round == Round::Verify);
    verify_turns.map(|turn| turn.count).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_item_is_as_often_before_as_after_another() {
        let two: Vec<_> = in_turn(&[0, 1]).collect();
        assert_eq!(two[..7], [0, 1, 1, 0, 0, 1, 1]);
        let three: Vec<_> = in_turn(&['a', 'b', 'c']).collect();
        assert_eq!(three[..9], ['a', 'b', 'c', 'c', 'b', 'a', 'a', 'b', 'c']);
        assert_eq!((two.len(), three.len()), (2 * ROUNDS as usize, 3 * ROUNDS as usize));
    }
}
