//! The part of a route on one rail: its memory, and the blocks that it carries.

use gpu::Block;

use crate::agent::JOIN;
use crate::blocks::{BlockQueue, Blocks};
use crate::device_memory::device_memory;
use crate::error::{Error, ErrorKind, Result};
use crate::rail::{LocalSide, RemoteSide};
use crate::region::{Buffer, RegisteredRegion};

/// Blocks of at least this length are split among rails.
const MIN_STRIPED_LENGTH: u64 = 8 << 20;

#[derive(Debug)]
pub(in crate::agent) struct RouteLane {
    link: u32,
    rail: usize,
    remote: RemoteSide,
    /// Does the fabric access device memory itself?
    is_direct: bool,
}

impl RouteLane {
    pub(super) fn new(link: u32, rail: usize, remote: RemoteSide, is_direct: bool) -> Self {
        Self { link, rail, remote, is_direct }
    }

    pub(super) fn link(&self) -> u32 {
        self.link
    }

    pub(super) fn remote(&self) -> &RemoteSide {
        &self.remote
    }

    /// The local memory for this rail, unless the region is withdrawn. Looked up each time: a route
    /// that held the registration would keep it open to peers.
    pub(super) fn local(&self, local: &RegisteredRegion) -> Result<LocalSide> {
        if let (Some((memory, _)), false) = (device_memory(&local.buffer), self.is_direct) {
            return Ok(LocalSide::Device(memory.clone()));
        }
        match (local.memory(self.rail), &local.buffer) {
            (Some(memory), _) => Ok(LocalSide::Registered(memory)),
            (None, _) if local.is_withdrawn() => {
                Err(Error::new("transfer", ErrorKind::Stale, "the local region was withdrawn"))
            }
            (None, Buffer::Device(memory)) => Ok(LocalSide::Device(memory.clone())),
            (None, Buffer::Host(_)) => {
                let detail = "the provider cannot register this host memory";
                Err(Error::new(JOIN, ErrorKind::NoPath, detail))
            }
        }
    }
}

/// Distributes blocks among rails: long ones are split, short ones go to the rail with the fewest
/// bytes. Short rows are distributed as ranges, which need no list.
pub(super) fn stripe_blocks(blocks: Blocks<'_>, rails: usize) -> Vec<BlockQueue> {
    if let Some(rows) = blocks.rows().filter(|rows| rows.row < MIN_STRIPED_LENGTH) {
        let first_row = |rail: usize| {
            let first_row = (u128::from(rows.count()) * rail as u128).div_ceil(rails as u128);
            // At most the count.
            first_row as u64
        };
        return (0..rails)
            .map(|rail| rows.rows_in(first_row(rail)..first_row(rail + 1)).into())
            .collect();
    }
    let mut stripes = vec![(0_u64, BlockQueue::default()); rails];
    for block in blocks.each() {
        let parts = if block.length >= MIN_STRIPED_LENGTH { rails as u64 } else { 1 };
        for part in 0..parts {
            let start = block.length / parts * part;
            let end =
                if part + 1 == parts { block.length } else { block.length / parts * (part + 1) };
            let Some(stripe) = stripes.iter_mut().min_by_key(|(bytes, _)| *bytes) else { break };
            stripe.0 += end - start;
            stripe.1.push(Block {
                to: block.to + start,
                from: block.from + start,
                length: end - start,
            });
        }
    }
    stripes.into_iter().map(|(_, blocks)| blocks).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Strided;

    #[test]
    fn blocks_are_striped_evenly_and_completely() {
        let block = |to, length| Block { to, from: to, length };
        let many: Vec<_> = (0..100).map(|n| block(n << 20, 1 << 16)).collect();
        let one = [block(0, (64 << 20) + 1)];
        for (blocks, rails) in [(&many[..], 3), (&one[..], 3), (&one[..], 1), (&many[..1], 4)] {
            let stripes = stripe_blocks(blocks.into(), rails);
            assert_eq!(stripes.len(), rails);
            let bytes: Vec<u64> = stripes
                .iter()
                .map(|stripe| stripe.clone().map(|block| block.length).sum())
                .collect();
            let all: u64 = blocks.iter().map(|block| block.length).sum();
            assert_eq!(bytes.iter().sum::<u64>(), all);
            if blocks.len() >= rails {
                let (most, least) = (bytes.iter().max(), bytes.iter().min());
                assert!(most.unwrap() - least.unwrap() <= 1 << 16, "{bytes:?}");
            }
            let mut parts: Vec<_> = stripes.into_iter().flatten().collect();
            parts.sort_by_key(|part| part.to);
            let mut ends = 0;
            for part in parts {
                assert!(part.to >= ends && part.length > 0);
                ends = part.to + part.length;
            }
        }
    }

    /// A list of so many rows would exceed the memory.
    #[test]
    fn rows_are_striped_without_a_list() {
        let count = (1 << 56) + 1;
        let rows = Strided::rows(count, 8, 0, 64).unwrap();
        let stripes = stripe_blocks((&rows).into(), 3);
        let firsts: Vec<_> =
            stripes.iter().map(|stripe| stripe.clone().next().unwrap().to).collect();
        let third = count / 3 + 1;
        assert_eq!(firsts, [0, 64 * third, 64 * 2 * third]);
        for (rails, lengths) in [(1, &[5][..]), (2, &[3, 2]), (4, &[2, 1, 1, 1]), (0, &[])] {
            let rows = Strided::rows(5, 8, 16, 64).unwrap();
            let stripes = stripe_blocks((&rows).into(), rails);
            let counts: Vec<_> = stripes.iter().map(|stripe| stripe.clone().count()).collect();
            assert_eq!(counts, lengths);
            let all: Vec<_> = stripes.into_iter().flatten().collect();
            assert!(rails == 0 || all == rows.iter().collect::<Vec<_>>());
        }
        // Long rows are split.
        let rows = Strided::rows(3, 16 << 20, 32 << 20, 64 << 20).unwrap();
        let stripes = stripe_blocks((&rows).into(), 2);
        assert!(stripes.into_iter().all(|stripe| stripe.count() == 3));
    }
}
