//! Which ranks are on which machine: the launcher's `PMI_process_mapping`.
//!
//! `(vector,(0,2,4),(2,1,8))` means: from machine 0 on, 2 machines with 4 ranks each, then from
//! machine 2 on, 1 machine with 8 ranks. If ranks are left, it begins again.

/// Ranks that follow each other, on machines that follow each other.
#[derive(Debug, Clone, Copy)]
struct Block {
    first: u64,
    machines: u64,
    ranks: u32,
}

/// The ranks on the machine of this rank, ascending. None if the mapping is unknown.
pub(super) fn neighbours(mapping: &str, rank: u32, size: u32) -> Option<Vec<u32>> {
    let blocks = parse(mapping)?;
    let machine = machine_of(&blocks, rank)?;
    let mut found = Vec::new();
    for (of_run, ranks) in Runs::new(&blocks, size) {
        if of_run == machine {
            found.extend(ranks);
        }
    }
    Some(found)
}

fn machine_of(blocks: &[Block], rank: u32) -> Option<u64> {
    let size = rank.checked_add(1)?;
    Runs::new(blocks, size).find(|(_, ranks)| ranks.contains(&rank)).map(|(machine, _)| machine)
}

/// Ranks that follow each other on one machine, until all ranks are placed.
struct Runs<'a> {
    blocks: std::iter::Cycle<std::slice::Iter<'a, Block>>,
    block: Option<(Block, u64)>,
    next: u32,
    size: u32,
}

impl<'a> Runs<'a> {
    fn new(blocks: &'a [Block], size: u32) -> Self {
        Self { blocks: blocks.iter().cycle(), block: None, next: 0, size }
    }
}

impl Iterator for Runs<'_> {
    type Item = (u64, std::ops::Range<u32>);

    fn next(&mut self) -> Option<Self::Item> {
        if self.next == self.size {
            return None;
        }
        let (block, done) = match self.block {
            Some((block, done)) if done < block.machines => (block, done),
            _ => (*self.blocks.next()?, 0),
        };
        self.block = Some((block, done + 1));
        let begin = self.next;
        self.next = begin.saturating_add(block.ranks).min(self.size);
        Some((block.first + done, begin..self.next))
    }
}

fn parse(mapping: &str) -> Option<Vec<Block>> {
    let text: String = mapping.split_whitespace().collect();
    let mut rest = text.strip_prefix("(vector")?.strip_suffix(')')?;
    let mut blocks = Vec::new();
    while !rest.is_empty() {
        let (block, behind) = rest.strip_prefix(",(")?.split_once(')')?;
        let mut numbers = block.split(',').map(|number| number.parse::<u32>().ok());
        let block = Block {
            first: numbers.next()??.into(),
            machines: numbers.next()??.into(),
            ranks: numbers.next()??,
        };
        // Each run places at least one rank, so placing all of them ends.
        if numbers.next().is_some() || block.machines == 0 || block.ranks == 0 {
            return None;
        }
        blocks.push(block);
        rest = behind;
    }
    (!blocks.is_empty()).then_some(blocks)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ranks_of_a_machine_are_found() {
        let cases: [(&str, u32, u32, &[u32]); 8] = [
            ("(vector,(0,2,2))", 2, 4, &[2, 3]),
            ("(vector,(0,1,4))", 1, 4, &[0, 1, 2, 3]),
            // Cyclic: as Slurm writes it, and as hydra does.
            ("(vector,(0,2,1),(0,2,1))", 1, 4, &[1, 3]),
            ("(vector,(0,2,1))", 1, 4, &[1, 3]),
            // hydra with one machine: the block is repeated.
            ("(vector,(0,1,1))", 2, 4, &[0, 1, 2, 3]),
            ("(vector,(0,2,2),(2,2,4))", 9, 12, &[8, 9, 10, 11]),
            ("(vector, (0, 2, 2))", 0, 3, &[0, 1]),
            ("(vector,(0,4294967295,4294967295))", 0, 3, &[0, 1, 2]),
        ];
        for (mapping, rank, size, expected) in cases {
            assert_eq!(neighbours(mapping, rank, size).unwrap(), expected, "{mapping}");
        }
    }

    #[test]
    fn other_texts_are_unknown_mappings() {
        for text in [
            "",
            "(vector)",
            "(matrix,(0,1,1))",
            "(vector,(0,0,1))",
            "(vector,(0,1,0))",
            "(vector,(0,1))",
            "(vector,(0,1,1,1))",
            "(vector,(0,1,-1))",
            "(vector,(0,1,1)",
            "(vector,(0,1,1),)",
        ] {
            assert_eq!(neighbours(text, 0, 2), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn each_rank_is_on_its_machine(
            blocks in prop::collection::vec((0u32..5, 1u32..4, 1u32..4), 1..4),
            size in 1u32..40,
        ) {
            let blocks: String =
                blocks.iter().map(|(first, machines, ranks)| format!(",({first},{machines},{ranks})")).collect();
            let mapping = format!("(vector{blocks})");
            for rank in 0..size {
                let found = neighbours(&mapping, rank, size).unwrap();
                prop_assert!(found.contains(&rank) && found.is_sorted());
                for other in &found {
                    prop_assert_eq!(&neighbours(&mapping, *other, size).unwrap(), &found);
                }
            }
        }

        #[test]
        fn any_text_is_parsed_or_unknown(text in "[(),0-9vector]{0,30}", rank in 0u32..9) {
            let _ = neighbours(&text, rank, 9);
        }
    }
}
