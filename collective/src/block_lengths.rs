//! Lengths of blocks that ranks do not know of each other.

use crate::collective_call::CheckedCall;
use crate::members::{Failure, Outcome};
use crate::operation::Operation;

/// Ranks that give each other words.
pub(crate) trait WordExchange {
    /// This rank, and the number of ranks.
    fn ranks(&self) -> [u32; 2];

    /// Returns whether this rank exchanges bytes with a rank, or is it.
    fn includes(&self, rank: u32) -> bool;

    /// Gives words of this rank to all; all ranks give as many. Of ranks that are not included there are
    /// zeros.
    fn exchange(&mut self, own: &[u64]) -> Outcome<Vec<Vec<u64>>>;

    /// The failure that a rank calls another operation.
    fn mismatch(&self, rank: u32) -> Failure;
}

/// Tells the others the length of each block, and returns the longest of all. Ranks whose lengths differ
/// call different operations.
pub(crate) fn exchange_lengths(
    on: &mut impl WordExchange,
    checked: &CheckedCall,
) -> Outcome<usize> {
    let [rank, ranks] = on.ranks();
    let mut own = vec![0_u64; ranks as usize];
    match checked.from() {
        // For each rank the same.
        [one] => own.fill(one.bytes() as u64),
        blocks => own.iter_mut().zip(blocks).for_each(|(to, block)| *to = block.bytes() as u64),
    }
    let all = on.exchange(&own)?;
    for (other, lengths) in all.iter().enumerate() {
        if !on.includes(other as u32) {
            continue;
        }
        let given = lengths[rank as usize];
        let taken = match (checked.call().operation, checked.to()) {
            (Operation::Scatter, [block]) if checked.call().root == Some(other as u32) => {
                block.bytes()
            }
            (Operation::Scatter, _) | (_, []) => continue,
            (_, blocks) => blocks[other].bytes(),
        };
        if given != taken as u64 {
            return Err(on.mismatch(other as u32));
        }
    }
    let longest = all.iter().flatten().max().copied().unwrap_or(0);
    Ok(usize::try_from(longest).unwrap_or(0))
}
