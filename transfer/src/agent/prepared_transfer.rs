//! Transfers that are made several times.

use gpu::Block;

use super::local_copies::{PreparedList, RequestedBlocks};
use super::route::{DataMover, Route};
use super::{Agent, Point};
use crate::error::{Error, ErrorKind, Result};
use crate::notice::Notice;
use crate::operations::{OperationInfo, Token};
use crate::path::Operation;
use crate::share::check_fork;

/// Blocks of a route, checked and prepared for puts or gets. Clones are the same list.
///
/// For a device that copies many blocks, the list stays in memory that the device reads: a request
/// costs the start of a kernel, and a selection of blocks a few nanoseconds for each.
#[derive(Debug, Clone)]
pub struct PreparedTransfer {
    operation: Operation,
    route: Route,
    list: PreparedList,
    bytes: u64,
}

impl PreparedTransfer {
    /// The blocks.
    #[must_use]
    pub fn blocks(&self) -> &[Block] {
        self.list.blocks()
    }

    /// Bytes of all blocks together.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The route.
    #[must_use]
    pub fn route(&self) -> &Route {
        &self.route
    }
}

impl Agent {
    /// Checks and prepares blocks of a route for puts or gets.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use gpu::Block;
    /// # use transfer::path::{Operation, Policy};
    /// # use transfer::{Agent, AgentOptions, HostBuffer, Rights};
    /// # let second = Duration::from_secs(1);
    /// # let mut here = Agent::start(AgentOptions::new("here"))?;
    /// # let mut there = Agent::start(AgentOptions::new("there"))?;
    /// # let local = here.register(HostBuffer::new(1 << 16)?, Rights::ALL)?;
    /// # let remote = there.register(HostBuffer::new(1 << 16)?, Rights::ALL)?;
    /// # let peer = here.connect(&there.card().encode()?, second)?;
    /// # let descriptor = remote.descriptor().encode()?;
    /// # let route = here.join(peer, &local, &descriptor, &Policy::default(), second)?;
    /// // All pages of a cache, once.
    /// let pages: Vec<_> =
    ///     (0..16).map(|n| Block { to: n * 4096, from: n * 4096, length: 4096 }).collect();
    /// let cache = here.prepare(Operation::Put, &route, pages)?;
    /// // The pages of a request, by their numbers.
    /// let token = here.submit(&cache, Some(&[3, 4, 9]), None)?;
    /// assert_eq!(here.wait(token, second)?.bytes, 3 * 4096);
    /// # Ok::<(), transfer::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`put`](Self::put); errors of the device.
    pub fn prepare(
        &mut self,
        operation: Operation,
        route: &Route,
        blocks: Vec<Block>,
    ) -> Result<PreparedTransfer> {
        check_fork(self.fork_generation, "prepare transfer")?;
        let begun = self.check_transfer(operation, route, (&blocks).into())?;
        let device = match route.0.mover() {
            DataMover::Local(mover) => {
                self.local_copies.prepare(begun.peer, operation, mover, &blocks)?
            }
            DataMover::Rails(_) => None,
        };
        let list = PreparedList::new(blocks, device);
        Ok(PreparedTransfer { operation, route: route.clone(), list, bytes: begun.bytes })
    }

    /// Starts a prepared transfer: of the blocks with these indices, each given once, or of all. Then
    /// sends the notice, if any.
    ///
    /// # Errors
    /// [`OutOfBounds`](ErrorKind::OutOfBounds) for an index that no block has;
    /// [`Stale`](ErrorKind::Stale), [`Closed`](ErrorKind::Closed), [`TooMany`](ErrorKind::TooMany)
    /// as for [`put`](Self::put).
    pub fn submit(
        &mut self,
        prepared: &PreparedTransfer,
        indices: Option<&[u32]>,
        notice: Option<Notice>,
    ) -> Result<Token> {
        self.submit_after_point(prepared, indices, None, notice)
    }

    pub(super) fn submit_after_point(
        &mut self,
        prepared: &PreparedTransfer,
        indices: Option<&[u32]>,
        after: Option<Point>,
        notice: Option<Notice>,
    ) -> Result<Token> {
        let PreparedTransfer { operation, route, list, bytes } = prepared;
        let name = operation.name();
        check_fork(self.fork_generation, name)?;
        let bytes = match indices.map(|indices| list.bytes_of(indices)) {
            None => *bytes,
            Some(Ok(bytes)) => bytes,
            Some(Err(index)) => {
                let detail = format!("index {index} of {} blocks", list.blocks().len());
                let error = Error::new(name, ErrorKind::OutOfBounds, detail);
                return Err(error.with(self.peers.label(route.peer())));
            }
        };
        // Blocks and rights were checked when it was prepared.
        route.check_owner(*operation, self.local_target.identity)?;
        let path = Some(route.path());
        let begun = OperationInfo { operation: name, bytes, path, peer: route.peer() };
        let requested = RequestedBlocks::Prepared(list, indices);
        self.begin_checked(*operation, route, begun, requested, after, notice)
    }
}
