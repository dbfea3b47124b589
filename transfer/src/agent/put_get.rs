//! Starting transfers: everything is validated before a byte is copied.

use std::time::{Duration, Instant};

use gpu::{Block, CopyMethod, Point};

use super::local_copies::RequestedBlocks;
use super::peers::Peer;
use super::route::{DataMover, Route};
use super::stream_order::copies_by_device;
use super::{Agent, DeferredOperation, DeferredTransfer, OperationContext, PeerId};
use crate::blocks::Blocks;
use crate::error::{Error, ErrorKind, Result};
use crate::notice::Notice;
use crate::operations::{OperationInfo, Token};
use crate::path::Operation;
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

    /// Copies the whole local region of a route to the start of the remote one, and then sends the
    /// notice, if any.
    ///
    /// # Errors
    /// [`OutOfBounds`](ErrorKind::OutOfBounds) if the remote region is shorter; as
    /// [`put`](Self::put).
    pub fn put_all(&mut self, route: &Route, notice: Option<Notice>) -> Result<Token> {
        let length = route.lengths().0;
        self.put(route, &[Block { to: 0, from: 0, length }], notice)
    }

    /// Copies the whole remote region of a route to the start of the local one, and then sends the
    /// notice, if any.
    ///
    /// # Errors
    /// [`OutOfBounds`](ErrorKind::OutOfBounds) if the local region is shorter; as
    /// [`get`](Self::get).
    pub fn get_all(&mut self, route: &Route, notice: Option<Notice>) -> Result<Token> {
        let length = route.lengths().1;
        self.get(route, &[Block { to: 0, from: 0, length }], notice)
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
            Some(after) => self.peers.defer(DeferredOperation { context, after, transfer: None }),
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
        let known = self.peers.find_mut(peer.0).ok_or_else(|| disconnected_error(name))?;
        let after = known.epochs().next();
        let (context, _) = self.register_operation(begun, None, Some(notice))?;
        let token = context.token;
        self.peers.defer(DeferredOperation { context, after, transfer: None });
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
        self.peers.get(peer.0, name)?.epochs().fence();
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
        let mark = self.peers.get(peer.0, name)?.epochs().next();
        let end = ipc::deadline(timeout);
        loop {
            self.progress();
            let epochs = self.peers.get(peer.0, name)?.epochs();
            if epochs.is_over_before(mark) {
                let Some(failure) = epochs.take_failure_before(mark) else { return Ok(()) };
                let error = Error::new(name, ErrorKind::Failed, failure);
                return Err(error.with(self.peers.label(peer.0)));
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
                return Err(error.with(self.peers.label(peer.0)));
            }
            self.pause(end - now);
        }
    }

    /// Like [`put`](Self::put) or [`get`](Self::get), with a given method of copying many blocks:
    /// for measurements.
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
        check_fork(self.fork_generation, operation.name())?;
        let begun = self.check_transfer(operation, route, blocks)?;
        let requested = RequestedBlocks::Given(blocks, by);
        self.begin_checked(operation, route, begun, requested, None, notice)
    }

    /// Checks a transfer, before a byte is copied.
    pub(super) fn check_transfer(
        &self,
        operation: Operation,
        route: &Route,
        blocks: Blocks<'_>,
    ) -> Result<OperationInfo> {
        let label = |peer| self.peers.label(peer);
        route.check(operation, blocks, self.local_target.identity, label)
    }

    /// Starts a transfer that was checked, or defers it.
    pub(super) fn begin_checked(
        &mut self,
        operation: Operation,
        route: &Route,
        begun: OperationInfo,
        requested: RequestedBlocks<'_>,
        after: Option<Point>,
        notice: Option<Notice>,
    ) -> Result<Token> {
        let (context, fence) = self.register_operation(begun, Some(route.region()), notice)?;
        let token = context.token;
        let started = self.start_or_defer(operation, route, requested, after, fence, context);
        started.map_err(|failed| {
            let (context, error) = *failed;
            self.undo_operation(&context);
            error.with(self.peers.label(context.peer))
        })?;
        Ok(token)
    }

    /// Starts a registered transfer, or defers it behind a fence.
    pub(super) fn start_or_defer(
        &mut self,
        operation: Operation,
        route: &Route,
        requested: RequestedBlocks<'_>,
        after: Option<Point>,
        fence: Option<u64>,
        context: OperationContext,
    ) -> std::result::Result<(), Box<(OperationContext, Error)>> {
        route.count(context.bytes);
        let Some(fence) = fence else {
            return self.move_bytes(operation, route, requested, after, context);
        };
        let blocks = requested.defer(self.local_copies.block_lists());
        let transfer = Some(DeferredTransfer { operation, route: route.clone(), blocks, after });
        self.peers.defer(DeferredOperation { context, after: fence, transfer });
        Ok(())
    }

    /// Undoes the registration of an operation that was not started.
    pub(super) fn undo_operation(&mut self, context: &OperationContext) {
        if let Some(peer) = self.peers.find_mut(context.peer) {
            peer.cancel_unstarted(context);
        }
        self.operations.forget(context.token);
        self.operations.finish(context.token, Ok(()));
    }

    /// Starts deferred operations that are ready, or fails those that depend on a failed one. True
    /// if there were any.
    pub(super) fn start_deferred(&mut self) -> bool {
        let mut has_any = false;
        while let Some((operation, failure)) = self.peers.take_deferred() {
            has_any = true;
            let DeferredOperation { context, transfer, .. } = operation;
            let region = transfer.as_ref().map(|transfer| transfer.route.region());
            let obstacle = self.peers.find_mut(context.peer).and_then(|peer| peer.obstacle(region));
            let name = self.operations.begun(context.token).map_or("transfer", |it| it.operation);
            let refusal = match failure {
                Some(failure) => {
                    let detail = format!("{failure}. Flush the peer to continue");
                    Some(Error::new(name, ErrorKind::Cancelled, detail))
                }
                None => obstacle.map(|(kind, cause)| Error::new(name, kind, cause)),
            };
            let Some(transfer) = transfer else {
                match refusal {
                    Some(error) => self.peers.complete(context, Err(error), &mut self.operations),
                    None => self.finish_without_data(context),
                }
                continue;
            };
            let begun = match refusal {
                Some(error) => Err(Box::new((context, error))),
                None => self.start_transfer(transfer, context),
            };
            if let Err(failed) = begun {
                let (context, error) = *failed;
                self.peers.complete(context, Err(error), &mut self.operations);
            }
        }
        has_any
    }

    /// Starts a transfer that was deferred.
    pub(super) fn start_transfer(
        &mut self,
        transfer: DeferredTransfer,
        context: OperationContext,
    ) -> std::result::Result<(), Box<(OperationContext, Error)>> {
        let DeferredTransfer { operation, route, mut blocks, after } = transfer;
        let begun = self.move_bytes(operation, &route, blocks.requested(), after, context);
        blocks.recycle(self.local_copies.block_lists());
        begun
    }

    /// Registers an operation, unless the peer or its region is lost. With a fence, also returns
    /// the epoch before which all operations must complete first.
    pub(super) fn register_operation(
        &mut self,
        begun: OperationInfo,
        region: Option<u64>,
        notice: Option<Notice>,
    ) -> Result<(OperationContext, Option<u64>)> {
        let (name, number) = (begun.operation, begun.peer);
        let Some(peer) = self.peers.find_mut(number) else {
            return Err(disconnected_error(name));
        };
        let is_by_rails = begun.path.is_some_and(|path| !path.is_local());
        if (peer.is_remote() || (region.is_some() && is_by_rails))
            && let Some((kind, cause)) = self.remote_transport.obstacle(number, region)
        {
            return Err(Error::new(name, kind, cause).with(peer.label()));
        }
        peer.begin(begun, region, notice, &mut self.operations)
    }

    /// Does the copy service begin such a transfer after a stream?
    fn follows(&mut self, route: &Route, after: &Point, requested: &RequestedBlocks<'_>) -> bool {
        let DataMover::Local(mover) = route.0.mover() else { return false };
        self.local_copies.can_service_follow(mover, after.device(), requested.count())
    }

    fn move_bytes(
        &mut self,
        operation: Operation,
        route: &Route,
        requested: RequestedBlocks<'_>,
        after: Option<Point>,
        context: OperationContext,
    ) -> std::result::Result<(), Box<(OperationContext, Error)>> {
        if context.bytes == 0 && after.is_none() {
            self.finish_without_data(context);
            return Ok(());
        }
        let after = match after {
            Some(after)
                if context.bytes > 0
                    && (copies_by_device(route) || self.follows(route, &after, &requested)) =>
            {
                Some(after)
            }
            Some(after) => {
                let blocks = requested.defer(self.local_copies.block_lists());
                let route = route.clone();
                let transfer = DeferredTransfer { operation, route, blocks, after: None };
                self.delayed.push(after, transfer, context);
                return Ok(());
            }
            None => None,
        };
        match route.0.mover() {
            DataMover::Local(mover) => {
                return self.local_copies.begin(operation, mover, requested, after, context);
            }
            DataMover::Rails(lanes) => {
                let is_remote = self.peers.find(context.peer).is_some_and(Peer::is_remote);
                let (transport, route) = (&mut self.remote_transport, &route.0);
                let mut store = Vec::new();
                let blocks = requested.list(&mut store);
                transport.submit_stripes(operation, route, lanes, blocks, context, is_remote);
                self.finish_remote();
            }
        }
        Ok(())
    }

    /// An operation without data: sends its notice, if any.
    pub(super) fn finish_without_data(&mut self, context: OperationContext) {
        match self.peers.find(context.peer) {
            Some(peer) if peer.is_remote() && context.notice.is_some() => {
                self.remote_transport.send_notice(context);
                self.finish_remote();
            }
            _ => self.peers.complete(context, Ok(()), &mut self.operations),
        }
    }
}

fn disconnected_error(operation: &'static str) -> Error {
    Error::new(operation, ErrorKind::Closed, "the peer was disconnected")
}
