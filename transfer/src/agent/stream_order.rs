//! Transfers in the order of the caller's streams.

use std::time::{Duration, Instant};

use gpu::{CopyMethod, Point, Stream};

use super::local_copies::{LocalMover, RequestedBlocks};
use super::prepared_transfer::PreparedTransfer;
use super::route::{DataMover, Route};
use super::{Agent, BUSY_PAUSE, DeferredTransfer, OperationContext};
use crate::blocks::Blocks;
use crate::copy_requests::StreamDelay;
use crate::error::{Context, Error, ErrorKind, Result};
use crate::notice::Notice;
use crate::operations::Token;
use crate::path::{Operation, Path};
use crate::share::check_fork;

const DELAY: &str = "delay stream";

/// Transfers that begin after a point of a stream, on paths where this process waits for it.
#[derive(Debug, Default)]
pub(super) struct DelayedTransfers(Vec<DelayedTransfer>);

#[derive(Debug)]
struct DelayedTransfer {
    after: Point,
    transfer: DeferredTransfer,
    context: OperationContext,
}

impl DelayedTransfers {
    pub(super) fn push(
        &mut self,
        after: Point,
        transfer: DeferredTransfer,
        context: OperationContext,
    ) {
        self.0.push(DelayedTransfer { after, transfer, context });
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn is_busy_with(&self, peer: u32) -> bool {
        self.0.iter().any(|delayed| delayed.context.peer == peer)
    }

    /// Removes those that are meant, and returns their contexts.
    pub(super) fn cancel(
        &mut self,
        is_meant: impl Fn(&OperationContext) -> bool,
    ) -> Vec<OperationContext> {
        let cancelled = self.0.extract_if(.., |delayed| is_meant(&delayed.context));
        cancelled.map(|delayed| delayed.context).collect()
    }

    /// The next one whose stream has passed its point, or failed.
    fn take_ready(&mut self) -> Option<(DeferredTransfer, OperationContext, gpu::Result<()>)> {
        let mut outcome = Ok(());
        let at = self.0.iter().position(|delayed| match delayed.after.is_done() {
            Ok(is_done) => is_done,
            // Only the query failed: the stream may still run.
            Err(error) if !gpu::proves_idle(&error) => false,
            Err(error) => {
                outcome = Err(error);
                true
            }
        })?;
        let DelayedTransfer { transfer, context, .. } = self.0.remove(at);
        Some((transfer, context, outcome))
    }
}

impl Agent {
    /// Like [`put`](Self::put), after all work that was begun on a stream so far. The caller does not
    /// wait.
    ///
    /// Where a device of this process copies, the device waits for the stream; so does the copy
    /// service. On other paths the transfer begins while [progress](Self::progress) is made. A stream
    /// that is being captured into a graph is refused: the transfer is no part of the graph.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use gpu::{Block, Device};
    /// # use transfer::path::Policy;
    /// # use transfer::{Agent, AgentOptions, Rights};
    /// # let second = Duration::from_secs(1);
    /// # let mut here = Agent::start(AgentOptions::new("here"))?;
    /// # let there = Agent::start(AgentOptions::new("there"))?;
    /// # let device = Device::open("emulated:0".parse()?)?;
    /// # let memory = device.allocate_shared(4096, &[])?;
    /// # let local = here.register(&memory, Rights::ALL)?;
    /// # let remote = there.register(device.allocate_shared(4096, &[])?, Rights::ALL)?;
    /// # let peer = here.connect(&there.card().encode()?, second)?;
    /// # let descriptor = remote.descriptor().encode()?;
    /// # let route = here.join(peer, &local, &descriptor, &Policy::default(), second)?;
    /// let stream = device.stream()?;
    /// stream.fill(&memory.whole(), 7)?; // or a kernel
    /// let block = [Block { to: 0, from: 0, length: 4096 }];
    /// let token = here.put_after(&route, &block, None, &stream)?;
    /// here.delay_stream(token, &stream, second)?; // later work may overwrite the memory
    /// stream.fill(&memory.whole(), 8)?;
    /// here.wait(token, second)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`put`](Self::put); errors of the device.
    pub fn put_after<'a>(
        &mut self,
        route: &Route,
        blocks: impl Into<Blocks<'a>>,
        notice: Option<Notice>,
        stream: &Stream,
    ) -> Result<Token> {
        self.begin_after(Operation::Put, route, blocks.into(), notice, stream)
    }

    /// Like [`get`](Self::get), after all work that was begun on a stream so far; see
    /// [`put_after`](Self::put_after).
    ///
    /// # Errors
    /// As for [`put_after`](Self::put_after).
    pub fn get_after<'a>(
        &mut self,
        route: &Route,
        blocks: impl Into<Blocks<'a>>,
        notice: Option<Notice>,
        stream: &Stream,
    ) -> Result<Token> {
        self.begin_after(Operation::Get, route, blocks.into(), notice, stream)
    }

    /// Like [`submit`](Self::submit), after all work that was begun on a stream so far; see
    /// [`put_after`](Self::put_after).
    ///
    /// # Errors
    /// As for [`submit`](Self::submit); errors of the device.
    pub fn submit_after(
        &mut self,
        prepared: &PreparedTransfer,
        indices: Option<&[u32]>,
        notice: Option<Notice>,
        stream: &Stream,
    ) -> Result<Token> {
        check_fork(self.fork_generation, "submit transfer")?;
        let after = stream.point().during("submit transfer")?;
        self.submit_after_point(prepared, indices, Some(after), notice)
    }

    fn begin_after(
        &mut self,
        operation: Operation,
        route: &Route,
        blocks: Blocks<'_>,
        notice: Option<Notice>,
        stream: &Stream,
    ) -> Result<Token> {
        check_fork(self.fork_generation, operation.name())?;
        let begun = self.check_transfer(operation, route, blocks)?;
        let after = stream.point().during(operation.name())?;
        let requested = RequestedBlocks::Given(blocks, CopyMethod::Best);
        self.begin_checked(operation, route, begun, requested, Some(after), notice)
    }

    /// Lets later work on a stream wait for the data of an operation. The caller waits only until the
    /// operation has begun: behind a fence, or behind many others.
    ///
    /// An operation that is over delays nothing; [`wait`](Self::wait) tells its outcome.
    ///
    /// # Errors
    /// [`NoPath`](ErrorKind::NoPath) on a path for which streams do not wait: wait for the
    /// operation instead. [`DeadlineExceeded`](ErrorKind::DeadlineExceeded) if it has not begun;
    /// errors of the device.
    pub fn delay_stream(&mut self, token: Token, stream: &Stream, timeout: Duration) -> Result<()> {
        check_fork(self.fork_generation, DELAY)?;
        let end = ipc::deadline(timeout);
        let parts = self.operations.parts_of(token);
        if parts.is_empty() {
            return self.delay_by_data(token, stream, timeout, end);
        }
        // An operation of several parts has no data of its own.
        parts.into_iter().try_for_each(|part| self.delay_by_data(part, stream, timeout, end))
    }

    fn delay_by_data(
        &mut self,
        token: Token,
        stream: &Stream,
        timeout: Duration,
        end: Instant,
    ) -> Result<()> {
        loop {
            self.progress();
            let Some(begun) = self.operations.begun(token) else { return Ok(()) };
            if let Some(point) = self.local_copies.end_of(token) {
                return stream.wait_for(point).during(DELAY);
            }
            let peer = self.peers.find(begun.peer);
            if peer.is_some_and(|peer| peer.is_notice_unsent(token)) {
                return Ok(());
            }
            let path = begun.path;
            if path == Some(Path::ServiceCopied) {
                match self.local_copies.delay_by_service(token, stream)? {
                    StreamDelay::Begun => return Ok(()),
                    // The transfer itself waits for a stream, or for a place in the ring.
                    StreamDelay::NotPosted => {}
                    StreamDelay::Over if self.operations.begun(token).is_none() => return Ok(()),
                    StreamDelay::Over => {}
                }
            }
            if !path.is_some_and(|path| {
                matches!(
                    path,
                    Path::SameProcess | Path::CudaIpc | Path::SharedMemory | Path::ServiceCopied
                )
            }) || self.local_copies.is_copied_by_cpu(token)
            {
                let path = path.map_or("several paths", Path::name);
                let detail = format!("streams do not wait for {path}. Wait for the token");
                return Err(Error::new(DELAY, ErrorKind::NoPath, detail));
            }
            if Instant::now() >= end {
                let detail = format!("the operation has not begun after {timeout:?}");
                return Err(Error::new(DELAY, ErrorKind::DeadlineExceeded, detail));
            }
            std::thread::sleep(BUSY_PAUSE);
        }
    }

    /// Starts transfers whose streams have passed their points. True if there were any.
    pub(super) fn start_delayed(&mut self) -> bool {
        let mut has_any = false;
        while let Some((transfer, context, outcome)) = self.delayed.take_ready() {
            has_any = true;
            let name = transfer.operation.name();
            let region = transfer.route.region();
            let peer = self.peers.find_mut(context.peer);
            let obstacle = peer.and_then(|peer| peer.obstacle(Some(region)));
            let refusal = match outcome {
                Err(error) => Some(Error::caused_by(name, error)),
                Ok(()) => obstacle.map(|(kind, cause)| Error::new(name, kind, cause)),
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
}

/// Does a device of this process copy by this route?
pub(super) fn copies_by_device(route: &Route) -> bool {
    matches!(route.0.mover(), DataMover::Local(LocalMover::Device { .. }))
}
