//! Which ranks are on which machine: the launcher's `PMI_process_mapping`.
//!
//! `(vector,(0,2,4),(2,1,8))` means: from machine 0 on, 2 machines with 4 ranks each, then from
//! machine 2 on, 1 machine with 8 ranks. If ranks are left, it begins again.

use std::ops::Range;

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
    let until_rank = rank.checked_add(1)?;
    let (machine, _) = runs(&blocks, until_rank).find(|(_, ranks)| ranks.contains(&rank))?;
    let here = runs(&blocks, size).filter(|(of_run, _)| *of_run == machine);
    Some(here.flat_map(|(_, ranks)| ranks).collect())
}

/// Machines, each with ranks on it that follow each other, until all ranks are placed.
fn runs(blocks: &[Block], size: u32) -> impl Iterator<Item = (u64, Range<u32>)> {
    let machines = blocks.iter().cycle().flat_map(|block| {
        (block.first..block.first + block.machines).map(|machine| (machine, block.ranks))
    });
    let mut next = 0_u32;
    machines.map_while(move |(machine, ranks)| {
        let begin = next;
        next = begin.saturating_add(ranks).min(size);
        (begin < size).then_some((machine, begin..next))
    })
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
