//! Routes: two joined regions and the path between them.

use std::fmt;
use std::sync::Arc;

use gpu::Block;

use super::local_copies::LocalMover;
use super::remote_transport::RouteLane;
use crate::blocks::Blocks;
use crate::error::{Error, ErrorKind, Result};
use crate::operations::OperationInfo;
use crate::path::{Choice, Operation, Path, metrics};
use crate::region::{RegionDescriptor, RegisteredRegion};

/// Two joined regions, one of this agent and one of a peer. The path is chosen and everything
/// mapped: a transfer only has to be started.
#[derive(Clone)]
pub struct Route(pub(super) Arc<RouteInner>);

/// Without mappings and keys, which give access to the memory.
impl fmt::Debug for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RouteInner { local, remote, path, .. } = &*self.0;
        let mut shown = f.debug_struct("Route");
        shown.field("path", &path.name()).field("local", &local.descriptor);
        shown.field("remote", remote).finish_non_exhaustive()
    }
}

#[derive(Debug)]
pub(crate) struct RouteInner {
    agent: [u8; 16],
    peer: u32,
    /// Kept as long as transfers may use it.
    local: Arc<RegisteredRegion>,
    remote: RegionDescriptor,
    choice: Choice,
    path: Path,
    /// Why this is not a better path, if one was expected.
    fallback: Option<&'static str>,
    mover: DataMover,
}

/// How bytes are copied.
#[derive(Debug)]
pub(super) enum DataMover {
    /// On this machine.
    Local(LocalMover),
    /// By a fabric, by one or more rails.
    Rails(Vec<RouteLane>),
}

impl RouteInner {
    pub(super) fn local(&self) -> &Arc<RegisteredRegion> {
        &self.local
    }

    pub(super) fn mover(&self) -> &DataMover {
        &self.mover
    }
}

impl Route {
    pub(super) fn new(
        agent: [u8; 16],
        peer: u32,
        local: &Arc<RegisteredRegion>,
        remote: RegionDescriptor,
        (choice, path): (Choice, Path),
        mover: DataMover,
    ) -> Self {
        let fallback = choice.fallback().map(|(_, reason)| reason.name());
        let local = Arc::clone(local);
        Self(Arc::new(RouteInner { agent, peer, local, remote, choice, path, fallback, mover }))
    }

    /// The number of the peer.
    pub(super) fn peer(&self) -> u32 {
        self.0.peer
    }

    /// Fails for a route of another agent.
    pub(super) fn check_owner(&self, operation: Operation, agent: [u8; 16]) -> Result<()> {
        if self.0.agent == agent {
            return Ok(());
        }
        let detail = "the route belongs to another agent";
        Err(Error::new(operation.name(), ErrorKind::Stale, detail))
    }

    /// The number of the remote region.
    pub(super) fn region(&self) -> u64 {
        self.0.remote.number
    }

    /// Lengths of the local and the remote region.
    pub(super) fn lengths(&self) -> (u64, u64) {
        (self.0.local.descriptor.length, self.0.remote.length)
    }

    /// The block that spans the whole source region, to the start of the target.
    #[must_use]
    pub fn whole(&self, operation: Operation) -> Block {
        let (local, remote) = self.lengths();
        let (_, length) = operation.to_and_from(local, remote);
        Block { to: 0, from: 0, length }
    }

    /// Checks a transfer of this agent, before a byte is copied.
    pub(super) fn check(
        &self,
        operation: Operation,
        blocks: Blocks<'_>,
        agent: [u8; 16],
        label: impl FnOnce(u32) -> String,
    ) -> Result<OperationInfo> {
        let inner = &self.0;
        let name = operation.name();
        self.check_owner(operation, agent)?;
        let (local, remote) = self.lengths();
        let rights = inner.remote.rights;
        let (to, from) = operation.to_and_from(local, remote);
        if !rights.permit(operation) && !blocks.is_empty() {
            let detail = "the region's rights do not allow it";
            let error = Error::new(name, ErrorKind::NotAllowed, detail);
            return Err(error.with(label(inner.peer)));
        }
        let bytes = blocks
            .check(to, from)
            .map_err(|detail| Error::new(name, ErrorKind::OutOfBounds, detail))?;
        Ok(OperationInfo { operation: name, bytes, path: Some(inner.path), peer: inner.peer })
    }

    /// Counts a transfer for the metrics.
    pub(super) fn count(&self, bytes: u64) {
        metrics::count(self.0.path, bytes, self.0.fallback);
    }

    /// The path of the bytes.
    #[must_use]
    pub fn path(&self) -> Path {
        self.0.path
    }

    /// The verdict on every path.
    #[must_use]
    pub fn choice(&self) -> &Choice {
        &self.0.choice
    }

    /// Why this is not a better path, if one was expected.
    #[must_use]
    pub fn fallback(&self) -> Option<&'static str> {
        self.0.fallback
    }
}
