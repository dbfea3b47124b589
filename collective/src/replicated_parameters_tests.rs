//! Ranks that exchange the times of operations by the messages of later ones, in any interleaving.

use std::time::Duration;

use proptest::prelude::*;

use crate::controller::Choices;
use crate::operation::{OpKey, Operation, SizeClass};
use crate::parameters::Parameters;
use crate::replicated_parameters::ReplicatedParameters;
use reduction::DataType;

const PLACES: usize = 3;

/// An operation that all ranks call.
#[derive(Debug, Clone, Copy)]
struct Called {
    bytes: u64,
    /// Whether all ranks hear of all; otherwise of the root only.
    is_complete: bool,
    /// Whether ranks exchange with counterparts before those of their machine.
    is_remote_first: bool,
}

fn any_call() -> impl Strategy<Value = Called> {
    (17_u32..21, 0..4, any::<bool>()).prop_map(|(bits, kind, is_remote_first)| Called {
        bytes: 1 << bits,
        is_complete: kind > 0,
        is_remote_first,
    })
}

fn key(call: Called) -> OpKey {
    let size_class = SizeClass::of(call.bytes);
    OpKey { operation: Operation::AllReduce, size_class, data_type: DataType::F32 }
}

fn choices(_: OpKey) -> Choices {
    let with = |chunk_bits| Parameters { chunk_bits, ..Parameters::default() };
    Choices { candidates: [0, 16, 20].map(with).to_vec(), first_alpha: None }
}

struct Rank {
    parameters: ReplicatedParameters,
    /// Words given to the exchanges of the current operation: within the first group, then the second.
    given: Vec<u64>,
    operation: usize,
    used: Vec<Parameters>,
}

/// All ranks; those with the same number modulo `PLACES` are counterparts.
struct Ranks {
    ranks: Vec<Rank>,
    calls: Vec<Called>,
    /// The words of past operations: by operation, exchange and rank.
    words: Vec<[Vec<Option<u64>>; 2]>,
    dead: Option<usize>,
}

impl Ranks {
    fn group(&self, rank: usize, is_remote: bool) -> Vec<usize> {
        let is_member = |other: &usize| match is_remote {
            true => other % PLACES == rank % PLACES,
            false => other / PLACES == rank / PLACES,
        };
        (0..self.ranks.len()).filter(is_member).collect()
    }

    /// The greatest word of an exchange, if all of the group have given theirs.
    fn greatest(&self, rank: usize, operation: usize, exchange: usize) -> Option<u64> {
        let is_remote = (exchange == 0) == self.calls[operation].is_remote_first;
        let words = self.group(rank, is_remote).into_iter();
        let words = words.map(|other| self.words[operation][exchange][other]);
        words.collect::<Option<Vec<_>>>().and_then(|words| words.into_iter().max())
    }

    /// A rank goes on, if it can.
    fn advance(&mut self, rank: usize, time: u64) {
        let operation = self.ranks[rank].operation;
        if self.dead == Some(rank) || operation == self.calls.len() {
            return;
        }
        let call = self.calls[operation];
        let used = self.ranks[rank].parameters.parameters(key(call));
        let greatest = match self.ranks[rank].given.len() {
            0 => {
                self.ranks[rank].used.push(used);
                Some(self.ranks[rank].parameters.carried())
            }
            _ if !call.is_complete => None,
            given => match self.greatest(rank, operation, given - 1) {
                // It waits.
                None => return,
                greatest => greatest,
            },
        };
        let given = self.ranks[rank].given.len();
        if given < 2 && call.is_complete || given == 0 {
            self.words[operation][given][rank] = greatest;
            self.ranks[rank].given.push(0);
            return;
        }
        let own = &mut self.ranks[rank];
        own.parameters.complete(greatest);
        own.parameters.record(key(call), used, call.bytes, Duration::from_nanos(time));
        own.given.clear();
        own.operation += 1;
    }
}

proptest! {
    #[test]
    fn all_ranks_use_the_same_parameters_in_each_operation(
        machines in 2_usize..4,
        calls in prop::collection::vec(any_call(), 1..60),
        steps in prop::collection::vec((any::<prop::sample::Index>(), 1_000_u64..1 << 22), 2000),
        death in prop::option::of((any::<prop::sample::Index>(), 0_usize..2000)),
    ) {
        let count = machines * PLACES;
        let rank = |_| Rank {
            parameters: ReplicatedParameters::new(choices, None),
            given: Vec::new(),
            operation: 0,
            used: Vec::new(),
        };
        let words = calls.iter().map(|_| [vec![None; count], vec![None; count]]).collect();
        let mut all = Ranks { ranks: (0..count).map(rank).collect(), calls, words, dead: None };
        for (at, (who, time)) in steps.iter().enumerate() {
            if let Some((dead, moment)) = death && at == moment {
                all.dead = Some(dead.index(count));
            }
            all.advance(who.index(count), *time);
        }
        let longest = all.ranks.iter().map(|rank| &rank.used).max_by_key(|used| used.len()).unwrap();
        for rank in &all.ranks {
            prop_assert_eq!(&rank.used[..], &longest[..rank.used.len()]);
        }
        // Each rank ran each operation, if none died and they had time enough.
        let is_long = steps.len() > 8 * count * all.calls.len();
        if death.is_none() && is_long {
            prop_assert!(all.ranks.iter().all(|rank| rank.operation > 0));
        }
    }
}
