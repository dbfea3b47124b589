//! Starting transfers: everything is validated before a byte is copied.

use std::collections::hash_map::Entry;
use std::time::{Duration, Instant};

use gpu::{Block, CopyMethod};

use super::copy_queue::{CopyQueue, CopyRequest, OperationContext};
use super::cpu_copy::{CopyBuffer, CpuCopy};
use super::deferred::{DeferredOperation, DeferredTransfer};
use super::epochs::Epochs;
use super::notice::Notice;
use super::operations::{OperationInfo, Token};
use super::peer::Peer;
use super::route::{DataMover, Route};
use super::{Agent, PeerId, SMALL_COPY};
use crate::blocks::Blocks;
use crate::error::{Error, ErrorKind, Result};
use crate::path::{Operation, metrics};
use crate::region::RegionDescriptor;
use crate::share::check_fork;

impl Agent {
    /// Copies blocks from the local region of a route to the remote one, and then sends the notice,
    /// if any. Without blocks only the notice is sent.
    ///
    /// Blocks are a list, or [strided rows](crate::Strided). They are copied in any order and must
    /// not overlap at the target. Operations are unordered unless a [fence](Self::fence) separates
    /// them; a notice follows the data of its own operation.
    ///
    /// # Errors
    /// [`OutOfBounds`](ErrorKind::OutOfBounds), [`NotAllowed`](ErrorKind::NotAllowed),
    /// [`Stale`](ErrorKind::Stale), [`Closed`](ErrorKind::Closed): before a byte is copied.
    /// [`TooMany`](ErrorKind::TooMany) operations.
    pub fn put<'a>(
        &mut self,
        route: &Route,
        blocks: impl Into<Blocks<'a>>,
        notice: Option<Notice>,
    ) -> Result<Token> {
        self.begin(Operation::Put, route, blocks, notice, CopyMethod::Best)
    }

    /// Copies blocks from the remote region of a route to the local one, and then sends the notice,
    /// if any.
    ///
    /// # Errors
    /// As for [`put`](Self::put).
    pub fn get<'a>(
        &mut self,
        route: &Route,
        blocks: impl Into<Blocks<'a>>,
        notice: Option<Notice>,
    ) -> Result<Token> {
        self.begin(Operation::Get, route, blocks, notice, CopyMethod::Best)
    }

    /// Sends a notice without data. It may overtake earlier operations; see
    /// [`notify_ordered`](Self::notify_ordered).
    ///
    /// # Errors
    /// [`Closed`](ErrorKind::Closed), [`TooMany`](ErrorKind::TooMany) operations.
    pub fn notify(&mut self, peer: PeerId, notice: Notice) -> Result<Token> {
        let name = "notify";
        check_fork(self.fork_generation, name)?;
        let begun = OperationInfo { operation: name, bytes: 0, path: None, peer: peer.0 };
        let (context, after) = self.register_operation(begun, None, Some(notice))?;
        let token = context.token;
        match after {
            Some(after) => self.defer(DeferredOperation::notice(context, after)),
            None => self.finish_without_data(context),
        }
        Ok(token)
    }

    /// Sends a notice after all earlier operations with the peer have completed: their data has
    /// arrived, and their notices were sent. Later operations do not wait for it.
    ///
    /// If one of them failed, no notice is sent: this ends as [`Cancelled`](ErrorKind::Cancelled),
    /// and so does every later ordered notice, until [`flush`](Self::flush) has reported the
    /// failure.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use gpu::Block;
    /// # use transfer::path::Policy;
    /// # use transfer::{Agent, AgentOptions, Event, HostBuffer, Notice, Rights};
    /// # let second = Duration::from_secs(1);
    /// # let mut here = Agent::start(AgentOptions::new("here"))?;
    /// # let mut there = Agent::start(AgentOptions::new("there"))?;
    /// # let local_region = here.register(HostBuffer::new(4096)?, Rights::ALL)?;
    /// # let remote_region = there.register(HostBuffer::new(4096)?, Rights::ALL)?;
    /// # let peer = here.connect(&there.card().encode()?, second)?;
    /// # let descriptor = remote_region.descriptor().encode()?;
    /// # let route = here.join(peer, &local_region, &descriptor, &Policy::default(), second)?;
    /// for at in [0, 1024, 2048] {
    ///     let token = here.put(&route, &[Block { to: at, from: at, length: 1024 }], None)?;
    ///     here.forget(token);
    /// }
    /// let notified = here.notify_ordered(peer, Notice::new(1, b"all three arrived")?)?;
    /// here.wait(notified, second)?;
    /// # Ok::<(), transfer::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`notify`](Self::notify).
    pub fn notify_ordered(&mut self, peer: PeerId, notice: Notice) -> Result<Token> {
        let name = "notify ordered";
        check_fork(self.fork_generation, name)?;
        let begun = OperationInfo { operation: name, bytes: 0, path: None, peer: peer.0 };
        let known = self.peers.get_mut(&peer.0).ok_or_else(|| disconnected_error(name))?;
        let after = known.epochs.next();
        let (context, _) = self.register_operation(begun, None, Some(notice))?;
        let token = context.token;
        self.defer(DeferredOperation::notice(context, after));
        self.start_deferred();
        Ok(token)
    }

    /// Later operations with this peer start after all earlier ones have completed, as if the
    /// caller had waited in between, but without waiting.
    ///
    /// If one of them fails, operations behind the fence do not start: they end as
    /// [`Cancelled`](ErrorKind::Cancelled), until [`flush`](Self::flush) has reported the failure.
    ///
    /// Without a fence the order of data and notices of operations is undefined: of two puts to the
    /// same bytes either may be the last.
    ///
    /// # Errors
    /// [`Unknown`](ErrorKind::Unknown) peer.
    pub fn fence(&mut self, peer: PeerId) -> Result<()> {
        let name = "fence";
        check_fork(self.fork_generation, name)?;
        self.peer(peer.0, name)?.epochs.fence();
        Ok(())
    }

    /// Waits until all operations with this peer have completed: data has arrived, and all notices
    /// were sent.
    ///
    /// # Errors
    /// [`Failed`](ErrorKind::Failed): all have completed, but at least one failed since the last
    /// flush; the error names the first. Later operations do not depend on it.
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded): operations continue;
    /// [`Unknown`](ErrorKind::Unknown) peer.
    pub fn flush(&mut self, peer: PeerId, timeout: Duration) -> Result<()> {
        let name = "flush";
        check_fork(self.fork_generation, name)?;
        let mark = self.peer(peer.0, name)?.epochs.next();
        let end = ipc::deadline(timeout);
        loop {
            self.progress();
            let epochs = &mut self.peer(peer.0, name)?.epochs;
            if epochs.is_over_before(mark) {
                let Some(failure) = epochs.take_failure_before(mark) else { return Ok(()) };
                let error = Error::new(name, ErrorKind::Failed, failure);
                return Err(error.with(self.label(peer.0)));
            }
            let now = Instant::now();
            if now >= end {
                let count = epochs.count_before(mark);
                let one = self.operations.describe_one(peer.0);
                let detail = format!(
                    "{count} operations in flight after {timeout:?}, one of them {one}. Flush again \
                     or disconnect"
                );
                let error = Error::new(name, ErrorKind::DeadlineExceeded, detail);
                return Err(error.with(self.label(peer.0)));
            }
            self.pause(end - now);
        }
    }

    /// As [`put`](Self::put) or [`get`](Self::get) with a given method of copying many blocks: for
    /// measurements.
    ///
    /// # Errors
    /// As for [`put`](Self::put).
    pub fn begin<'a>(
        &mut self,
        operation: Operation,
        route: &Route,
        blocks: impl Into<Blocks<'a>>,
        notice: Option<Notice>,
        by: CopyMethod,
    ) -> Result<Token> {
        let blocks = blocks.into();
        let name = match operation {
            Operation::Put => "put",
            Operation::Get => "get",
        };
        check_fork(self.fork_generation, name)?;
        let inner = &route.0;
        if inner.agent != self.local_target.identity {
            return Err(Error::new(name, ErrorKind::Stale, "the route belongs to another agent"));
        }
        let (local, remote) = (inner.local.descriptor.length, inner.remote.length);
        let (from, to) = match operation {
            Operation::Put => (local, remote),
            Operation::Get => (remote, local),
        };
        let rights = inner.remote.rights;
        let may = if operation == Operation::Put { rights.write } else { rights.read };
        if !may && !blocks.is_empty() {
            let detail = "the region's rights do not allow it";
            return Err(
                Error::new(name, ErrorKind::NotAllowed, detail).with(self.label(inner.peer))
            );
        }
        let bytes = blocks
            .check(to, from)
            .map_err(|detail| Error::new(name, ErrorKind::OutOfBounds, detail))?;
        let begun =
            OperationInfo { operation: name, bytes, path: Some(inner.path), peer: inner.peer };
        let (context, after) = self.register_operation(begun, Some(&inner.remote), notice)?;
        let token = context.token;
        metrics::count(inner.path, bytes, inner.fallback);
        if let Some(after) = after {
            let blocks = self.block_lists.copy_blocks(blocks);
            let transfer = DeferredTransfer { operation, route: route.clone(), blocks, by };
            self.defer(DeferredOperation::transfer(context, after, transfer));
            return Ok(token);
        }
        self.move_bytes(operation, route, blocks, by, context).map_err(|failed| {
            let (context, error) = *failed;
            self.cancel_unstarted(context, error)
        })?;
        Ok(token)
    }

    fn defer(&mut self, deferred: DeferredOperation) {
        if let Some(peer) = self.peers.get_mut(&deferred.peer()) {
            peer.deferred.push_back(deferred);
            self.deferred += 1;
        }
    }

    /// Starts deferred operations that are ready, or fails those that depend on a failed one. True
    /// if there were any.
    pub(super) fn start_deferred(&mut self) -> bool {
        let mut has_any = false;
        while self.deferred > 0
            && let Some(next) = self.peers.values_mut().find_map(Peer::take_deferred)
        {
            has_any = true;
            self.deferred -= 1;
            let (operation, failure) = next;
            let (context, transfer) = operation.into_parts();
            let region = transfer.as_ref().map(|transfer| &transfer.route.0.remote);
            let obstacle = self.peers.get_mut(&context.peer).and_then(|peer| peer.obstacle(region));
            let name = self.operations.begun(context.token).map_or("transfer", |it| it.operation);
            let refusal = match (failure, obstacle) {
                (Some(failure), _) => {
                    let detail = format!("{failure}. Flush the peer to continue");
                    Some(Error::new(name, ErrorKind::Cancelled, detail))
                }
                (None, obstacle) => obstacle.map(|(kind, cause)| Error::new(name, kind, cause)),
            };
            let outcome = match (refusal, transfer) {
                (Some(error), transfer) => {
                    transfer
                        .into_iter()
                        .for_each(|transfer| self.block_lists.recycle(transfer.blocks));
                    Err(Box::new((context, error)))
                }
                (None, None) => {
                    self.finish_without_data(context);
                    Ok(())
                }
                (None, Some(DeferredTransfer { operation, route, mut blocks, by })) => {
                    let begun = self.move_bytes(operation, &route, blocks.all(), by, context);
                    self.block_lists.recycle(blocks);
                    begun
                }
            };
            if let Err(failed) = outcome {
                let (context, error) = *failed;
                self.complete(context, Err(error));
            }
        }
        has_any
    }

    /// Registers an operation, unless the peer or its region is lost. With a fence, also returns
    /// the epoch before which all operations must complete first.
    fn register_operation(
        &mut self,
        begun: OperationInfo,
        region: Option<&RegionDescriptor>,
        notice: Option<Notice>,
    ) -> Result<(OperationContext, Option<u64>)> {
        let (name, number, bytes) = (begun.operation, begun.peer, begun.bytes);
        let Some(peer) = self.peers.get_mut(&number) else {
            return Err(disconnected_error(name));
        };
        let refuse = |kind, cause: &str| Err(Error::new(name, kind, cause).with(&peer.card.label));
        let is_by_rails = begun.path.is_some_and(|path| !path.is_local());
        if peer.local_session.is_none() || (region.is_some() && is_by_rails) {
            if peer.links.is_empty() {
                return refuse(
                    ErrorKind::NoPath,
                    "it is not on this machine, and no fabric reaches it",
                );
            }
            let links = peer.links.iter().copied();
            let region = region.map(|region| region.number);
            if let Some((kind, cause)) = self.remote_transport.obstacle(links, region) {
                return refuse(kind, &cause);
            }
        }
        let context = |token, number_in_session, epochs: &mut Epochs| {
            let after = epochs.deferred_until();
            let epoch = epochs.begin();
            (
                OperationContext {
                    token,
                    peer: number,
                    number: number_in_session,
                    bytes,
                    notice,
                    epoch,
                },
                after,
            )
        };
        let Some(local_session) = &mut peer.local_session else {
            return Ok(context(self.operations.begin(begun)?, 0, &mut peer.epochs));
        };
        if let Some(end) = local_session.closed_cause() {
            return refuse(ErrorKind::Closed, end);
        }
        // Record the copy first, then check: withdrawing removes the region first, then checks.
        let number_in_session = local_session.segment.begin();
        if region.is_some_and(|region| !local_session.region_table.contains(region.number)) {
            local_session.segment.end(number_in_session);
            local_session.refresh();
            return match local_session.closed_cause() {
                Some(end) => refuse(ErrorKind::Closed, end),
                None => refuse(ErrorKind::Stale, "the region was withdrawn"),
            };
        }
        match self.operations.begin(begun) {
            Ok(token) => Ok(context(token, number_in_session, &mut peer.epochs)),
            Err(error) => {
                local_session.segment.end(number_in_session);
                Err(error)
            }
        }
    }

    fn move_bytes(
        &mut self,
        operation: Operation,
        route: &Route,
        blocks: Blocks<'_>,
        by: CopyMethod,
        context: OperationContext,
    ) -> std::result::Result<(), Box<(OperationContext, Error)>> {
        if context.bytes == 0 {
            self.finish_without_data(context);
            return Ok(());
        }
        match &route.0.mover {
            DataMover::Rails(route_lanes) => {
                self.submit_stripes(operation, &route.0, route_lanes, blocks, context);
                Ok(())
            }
            DataMover::Cpu { local, remote } => {
                let remote = CopyBuffer::Host(remote.clone());
                let (to, from) = match operation {
                    Operation::Put => (remote, local.clone()),
                    Operation::Get => (local.clone(), remote),
                };
                let blocks = self.block_lists.copy_blocks(blocks);
                self.cpu_copies.push_back(CpuCopy {
                    context,
                    to,
                    from,
                    blocks,
                    block: Block::default(),
                });
                Ok(())
            }
            DataMover::Device { device, local, remote } => {
                let (to, from) = match operation {
                    Operation::Put => (remote, local),
                    Operation::Get => (local, remote),
                };
                let key = (context.peer, device.name(), context.bytes < SMALL_COPY);
                let copy_queue = match self.copy_queues.entry(key) {
                    Entry::Occupied(copy_queue) => copy_queue.into_mut(),
                    Entry::Vacant(slot) => match CopyQueue::new(device) {
                        Ok(copy_queue) => slot.insert(copy_queue),
                        Err(error) => return Err(Box::new((context, error))),
                    },
                };
                copy_queue.push(context, CopyRequest { to, from, blocks, by });
                Ok(())
            }
        }
    }

    /// An operation without data: sends its notice, if any.
    fn finish_without_data(&mut self, context: OperationContext) {
        match self.peers.get(&context.peer) {
            Some(peer) if peer.local_session.is_none() && context.notice.is_some() => {
                self.send_notice_by_rail(context);
            }
            _ => self.complete(context, Ok(())),
        }
    }

    /// Undoes the registration of an operation that did not start.
    fn cancel_unstarted(&mut self, context: OperationContext, error: Error) -> Error {
        if let Some(peer) = self.peers.get_mut(&context.peer) {
            peer.epochs.finish(context.epoch);
            if let Some(local_session) = &mut peer.local_session {
                local_session.segment.end(context.number);
            }
        }
        self.operations.forget(context.token);
        self.operations.finish(context.token, Ok(()));
        error.with(self.label(context.peer))
    }
}

fn disconnected_error(operation: &'static str) -> Error {
    Error::new(operation, ErrorKind::Closed, "the peer was disconnected")
}
