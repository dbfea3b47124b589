//! Cycles in a directed graph.

use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Edge<Node> {
    pub(crate) from: Node,
    pub(crate) to: Node,
}

/// Returns the strongly connected components of more than one node.
pub(crate) fn cycles<Node: Copy + Ord>(
    edges: impl Iterator<Item = Edge<Node>>,
) -> BTreeSet<BTreeSet<Node>> {
    let mut targets: BTreeMap<Node, Vec<Node>> = BTreeMap::new();
    for edge in edges.filter(|edge| edge.from != edge.to) {
        targets.entry(edge.from).or_default().push(edge.to);
    }
    let reachable = |from: Node| {
        let mut found = BTreeSet::new();
        let mut waiting = vec![from];
        while let Some(node) = waiting.pop() {
            let next = targets.get(&node).into_iter().flatten().copied();
            waiting.extend(next.filter(|target| found.insert(*target)));
        }
        found
    };
    let reached: BTreeMap<Node, BTreeSet<Node>> =
        targets.keys().map(|node| (*node, reachable(*node))).collect();
    let component = |node: &Node| {
        let back = |other: &&Node| reached.get(other).is_some_and(|nodes| nodes.contains(node));
        reached[node].iter().filter(back).copied().collect()
    };
    reached.keys().filter(|node| reached[node].contains(node)).map(component).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn components_of_several_nodes_are_cycles() {
        let edges = [
            ('a', 'b'),
            ('b', 'c'),
            ('c', 'b'),
            ('c', 'd'),
            ('d', 'd'),
            ('e', 'f'),
            ('f', 'g'),
            ('g', 'e'),
        ];
        let found = cycles(edges.into_iter().map(|(from, to)| Edge { from, to }));
        let found: Vec<String> = found.iter().map(|nodes| nodes.iter().collect()).collect();
        assert_eq!(found, ["bc", "efg"]);
    }
}
