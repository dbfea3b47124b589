//! A tree of rings from one rank to all.

use std::time::Duration;

use fabricast::fabric::ring::{RingReader, RingSetup, RingWriter};
use mpi_examples::{Job, Result};

use crate::tensor::{Header, Tensor};

/// Bytes of a message in a ring: long tensors are forwarded in pieces.
const PIECE: usize = 1 << 20;
const RING: u64 = 8 << 20;

/// A binomial tree of rings with rank 0 at its root.
pub(crate) struct Tree {
    parent: Option<RingReader>,
    children: Vec<RingWriter>,
}

impl Tree {
    pub(crate) fn new(job: &mut Job) -> Result<Self> {
        let (rank, size, timeout) = (job.group.rank(), job.group.size(), job.timeout());
        let setup = RingSetup::new().capacity(RING).largest(PIECE as u64);
        // Without its highest bit, a rank is that of its parent.
        let parent = rank.checked_ilog2().map(|bit| rank ^ 1 << bit);
        let parent = parent.map(|from| job.group.ring_from(from, &setup, timeout)).transpose()?;
        let first_bit = rank.checked_ilog2().map_or(0, |bit| bit + 1);
        let children = (first_bit..u32::BITS).map(|bit| rank | 1 << bit);
        let children = children
            .take_while(|child| *child < size)
            .map(|to| job.group.ring_to(to, &setup, timeout))
            .collect::<std::result::Result<_, _>>()?;
        Ok(Self { parent, children })
    }

    fn send(&mut self, message: &[u8], timeout: Duration) -> Result<()> {
        for child in &mut self.children {
            child.send(message, timeout)?;
        }
        Ok(())
    }

    /// Passes a tensor on: rank 0 sends it, the others receive and forward it.
    pub(crate) fn pass(
        &mut self,
        tensor: &mut Tensor,
        header: Header,
        timeout: Duration,
    ) -> Result<Header> {
        let Some(mut parent) = self.parent.take() else {
            self.send(&header.to_bytes(), timeout)?;
            for piece in tensor.bytes(timeout)?.chunks(PIECE) {
                self.send(piece, timeout)?;
            }
            return Ok(header);
        };
        let header = parent.receive(timeout)?;
        self.send(&header, timeout)?;
        let mut bytes = Vec::with_capacity(tensor.length() as usize);
        while (bytes.len() as u64) < tensor.length() {
            let piece = parent.receive(timeout)?;
            self.send(&piece, timeout)?;
            bytes.extend(piece);
        }
        tensor.set(bytes, timeout)?;
        self.parent = Some(parent);
        Header::from_bytes(&header)
    }

    pub(crate) fn close(mut self, timeout: Duration) -> Result<()> {
        // The end of the parent's ring.
        if let Some(parent) = &mut self.parent
            && let Ok(message) = parent.receive(timeout)
        {
            return Err(format!("close rings failed: {} bytes left", message.len()).into());
        }
        for child in self.children {
            child.close(timeout)?;
        }
        Ok(())
    }
}
