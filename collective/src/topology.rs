//! Which ranks of a domain are on which machine.

use std::collections::BTreeSet;

/// The ranks of a domain by machine, as one of them sees them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Topology {
    /// The ranks of each machine, ascending.
    machines: Vec<Vec<u32>>,
    own_machine: usize,
    own_place: usize,
}

impl Topology {
    /// Of the ranks of each machine. None if this rank is not among them.
    pub(crate) fn new(machines: Vec<Vec<u32>>, rank: u32) -> Option<Self> {
        let place = |ranks: &Vec<u32>| ranks.iter().position(|other| *other == rank);
        let (own_machine, own_place) =
            machines.iter().enumerate().find_map(|(at, ranks)| Some((at, place(ranks)?)))?;
        Some(Self { machines, own_machine, own_place })
    }

    pub(crate) fn machines(&self) -> &[Vec<u32>] {
        &self.machines
    }

    pub(crate) fn own_machine(&self) -> usize {
        self.own_machine
    }

    /// The place of this rank among those of its machine.
    pub(crate) fn own_place(&self) -> usize {
        self.own_place
    }

    /// The ranks of this machine.
    pub(crate) fn local(&self) -> &[u32] {
        &self.machines[self.own_machine]
    }

    /// Returns whether each machine has as many ranks.
    pub(crate) fn is_uniform(&self) -> bool {
        self.machines.iter().all(|ranks| ranks.len() == self.local().len())
    }

    /// The ranks with the place of this one on their machines, in the order of the machines; None if a
    /// machine has fewer ranks than another one.
    pub(crate) fn counterparts(&self) -> Option<Vec<u32>> {
        let at_place = self.machines.iter().map(|ranks| ranks[self.own_place]);
        self.is_uniform().then(|| at_place.collect())
    }

    /// Pairs of ranks on different machines, so that each rank has one on each other machine. The first
    /// rank is of the machine that comes first.
    pub(crate) fn pairs(&self) -> BTreeSet<[u32; 2]> {
        let mut pairs = BTreeSet::new();
        for (at, first) in self.machines.iter().enumerate() {
            for second in &self.machines[at + 1..] {
                for place in 0..first.len().max(second.len()) {
                    pairs.insert([first[place % first.len()], second[place % second.len()]]);
                }
            }
        }
        pairs
    }

    /// The machine of a rank, and its place there.
    pub(crate) fn find(&self, rank: u32) -> (usize, usize) {
        let place = |ranks: &Vec<u32>| ranks.iter().position(|other| *other == rank);
        let found = self.machines.iter().enumerate();
        found.filter_map(|(at, ranks)| Some((at, place(ranks)?))).next().unwrap_or((0, 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counterparts_have_the_same_place_on_each_machine() {
        // As a launcher places ranks by turns.
        let topology = Topology::new(vec![vec![0, 2, 4], vec![1, 3, 5]], 3).unwrap();
        assert_eq!((topology.own_machine(), topology.own_place()), (1, 1));
        assert_eq!(topology.counterparts(), Some(vec![2, 3]));
        assert_eq!(topology.find(4), (0, 2));
        assert_eq!(topology.local(), [1, 3, 5]);
    }

    #[test]
    fn machines_with_different_numbers_of_ranks_have_no_counterparts() {
        let topology = Topology::new(vec![vec![0, 1], vec![2]], 2).unwrap();
        assert_eq!(topology.counterparts(), None);
        assert_eq!(topology.pairs(), BTreeSet::from([[0, 2], [1, 2]]));
        assert_eq!(Topology::new(vec![vec![0, 1], vec![2]], 3), None);
    }
}
