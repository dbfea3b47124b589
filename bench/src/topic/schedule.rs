//! What publisher and readers do, one turn after the other: all of them know it from the
//! beginning.

use serde::{Deserialize, Serialize};

use super::ROUNDS;

/// Messages of a round that is compared in full.
pub(super) const VERIFIED_MESSAGES: u64 = 2;
/// Messages before the first that counts.
pub(super) const WARMUP: u64 = 5;
/// The same, where messages lie already where they are read.
pub(super) const INTRA_NODE_WARMUP: u64 = 1000;

/// What a turn is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum TurnTarget {
    /// Messages of the topic with this number.
    Topic(usize),
    /// Entries of a queue alone.
    Queue,
    /// It is somebody else's turn: readers sleep until they are woken.
    Pause,
}

/// What messages of a turn are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Round {
    /// All their bytes are written and compared; nothing is timed.
    Verify,
    /// As those that are timed, but not counted.
    Warmup,
    /// Timed, one at a time.
    Timed,
    /// As fast as it goes.
    Stream,
}

/// So many messages in a row.
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

    pub(super) fn rest() -> Self {
        Self::new(TurnTarget::Pause, Round::Warmup, 0)
    }
}

/// Some things in turn, A B C C B A A B C …: each is measured as often before as behind another.
pub(super) fn in_turn<T: Copy>(all: &[T]) -> impl Iterator<Item = T> + '_ {
    (0..ROUNDS as usize).flat_map(move |round| {
        let place = move |at| if round % 2 == 0 { at } else { all.len() - 1 - at };
        (0..all.len()).map(move |at| all[place(at)])
    })
}

/// How many messages of a schedule are compared in full.
pub(super) fn compared(schedule: &[Turn]) -> u64 {
    let verify_turns = schedule.iter().filter(|turn| turn.round == Round::Verify);
    verify_turns.map(|turn| turn.count).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_as_often_before_as_behind_the_other() {
        let two: Vec<_> = in_turn(&[0, 1]).collect();
        assert_eq!(two[..7], [0, 1, 1, 0, 0, 1, 1]);
        let three: Vec<_> = in_turn(&['a', 'b', 'c']).collect();
        assert_eq!(three[..9], ['a', 'b', 'c', 'c', 'b', 'a', 'a', 'b', 'c']);
        assert_eq!((two.len(), three.len()), (2 * ROUNDS as usize, 3 * ROUNDS as usize));
    }
}
