//! One request over several regions of a peer, and the end of operations before they are over.

use gpu::CopyMethod;

use super::local_copies::RequestedBlocks;
use super::route::Route;
use super::{Agent, OperationContext};
use crate::blocks::Blocks;
use crate::error::{Error, ErrorKind, Result};
use crate::notice::Notice;
use crate::operations::{OperationInfo, Token};
use crate::path::Operation;
use crate::share::check_fork;

impl Agent {
    /// Puts blocks by several routes to one peer as one operation, and then sends the notice, if any:
    /// after the data of all.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use gpu::Block;
    /// # use transfer::path::Policy;
    /// # use transfer::{Agent, AgentOptions, Event, HostBuffer, Notice, Rights};
    /// # let second = Duration::from_secs(1);
    /// # let mut here = Agent::start(AgentOptions::new("here"))?;
    /// # let mut there = Agent::start(AgentOptions::new("there"))?;
    /// # let peer = here.connect(&there.card().encode()?, second)?;
    /// # let mut regions = Vec::new();
    /// // A region for each layer of a cache.
    /// let mut layers = Vec::new();
    /// for layer in 0..4 {
    ///     let local = here.register(HostBuffer::new(8192)?, Rights::ALL)?;
    ///     let remote = there.register(HostBuffer::new(8192)?, Rights::ALL)?;
    ///     let descriptor = remote.descriptor().encode()?;
    ///     layers.push(here.join(peer, &local, &descriptor, &Policy::default(), second)?);
    /// #   regions.push((local, remote));
    /// }
    /// let page = [Block { to: 0, from: 4096, length: 4096 }];
    /// let parts: Vec<_> = layers.iter().map(|layer| (layer, (&page).into())).collect();
    /// let token = here.put_parts(&parts, Some(Notice::new(1, b"page 1 of all layers")?))?;
    /// assert_eq!(here.wait(token, second)?.bytes, 4 * 4096);
    /// # Ok::<(), transfer::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`put`](Self::put), before a byte is copied;
    /// [`Malformed`](ErrorKind::Malformed) for routes to different peers, or none.
    pub fn put_parts(
        &mut self,
        parts: &[(&Route, Blocks<'_>)],
        notice: Option<Notice>,
    ) -> Result<Token> {
        self.begin_parts(Operation::Put, parts, notice)
    }

    /// Gets blocks by several routes to one peer as one operation, and then sends the notice, if any.
    ///
    /// # Errors
    /// As for [`put_parts`](Self::put_parts).
    pub fn get_parts(
        &mut self,
        parts: &[(&Route, Blocks<'_>)],
        notice: Option<Notice>,
    ) -> Result<Token> {
        self.begin_parts(Operation::Get, parts, notice)
    }

    fn begin_parts(
        &mut self,
        operation: Operation,
        parts: &[(&Route, Blocks<'_>)],
        notice: Option<Notice>,
    ) -> Result<Token> {
        let name = operation.name();
        check_fork(self.fork_generation, name)?;
        let malformed = |detail| Error::new(name, ErrorKind::Malformed, detail);
        let (first, _) = parts.first().ok_or_else(|| malformed("a request without routes"))?;
        let (peer, path) = (first.peer(), first.path());
        if parts.iter().any(|(route, _)| route.peer() != peer) {
            return Err(malformed("the routes are to different peers"));
        }
        let checked =
            parts.iter().map(|(route, blocks)| self.check_transfer(operation, route, *blocks));
        let begun = checked.collect::<Result<Vec<_>>>()?;
        let bytes = begun.iter().map(|part| part.bytes).sum();
        let is_one_path = parts.iter().all(|(route, _)| route.path() == path);
        let path = is_one_path.then_some(path);
        let whole = OperationInfo { operation: name, bytes, path, peer };
        let (whole, _) = self.register_operation(whole, None, notice)?;
        let registered = match self.register_parts(parts, begun) {
            Ok(registered) => registered,
            Err(error) => {
                self.undo_operation(&whole);
                return Err(error);
            }
        };
        let token = whole.token;
        for (context, _) in &registered {
            self.operations.join(context.token, token);
        }
        self.wholes.insert(token, whole);
        for ((route, blocks), (context, fence)) in parts.iter().zip(registered) {
            let requested = RequestedBlocks::Given(*blocks, CopyMethod::Best);
            let started = self.start_or_defer(operation, route, requested, None, fence, context);
            if let Err(failed) = started {
                let (context, error) = *failed;
                self.peers.complete(context, Err(error), &mut self.operations);
            }
        }
        self.finish_wholes();
        Ok(token)
    }

    /// Registers all parts, or none.
    fn register_parts(
        &mut self,
        parts: &[(&Route, Blocks<'_>)],
        begun: Vec<OperationInfo>,
    ) -> Result<Vec<(OperationContext, Option<u64>)>> {
        let mut registered: Vec<(OperationContext, Option<u64>)> = Vec::with_capacity(parts.len());
        for ((route, _), part) in parts.iter().zip(begun) {
            match self.register_operation(part, Some(route.region()), None) {
                Ok(part) => registered.push(part),
                Err(error) => {
                    registered.iter().for_each(|(context, _)| self.undo_operation(context));
                    return Err(error);
                }
            }
        }
        Ok(registered)
    }

    /// Completes operations whose parts are over. True if there were any.
    pub(super) fn finish_wholes(&mut self) -> bool {
        let mut has_any = false;
        while let Some((token, outcome)) = self.operations.take_over() {
            let Some(whole) = self.wholes.remove(&token) else { continue };
            has_any = true;
            match outcome {
                Ok(()) => self.finish_without_data(whole),
                Err(error) => self.peers.complete(whole, Err(error), &mut self.operations),
            }
        }
        has_any
    }

    /// Ends an operation that has not begun, or stops what of it has not begun. Copies in flight
    /// complete: the operation ends as [`Cancelled`](ErrorKind::Cancelled) when they are over, and its
    /// notice is not sent. False if all of it is under way or over: then it ends as usual.
    ///
    /// A cancelled put has written all, a part or nothing of its bytes. Operations behind a
    /// [fence](Self::fence) do not start, as after a failure.
    ///
    /// # Errors
    /// Of a forked process.
    pub fn cancel(&mut self, token: Token) -> Result<bool> {
        check_fork(self.fork_generation, "cancel operation")?;
        self.progress();
        let parts = self.operations.parts_of(token);
        let mut is_cancelled = false;
        for part in parts.into_iter().chain([token]) {
            is_cancelled |= self.cancel_one(part);
        }
        self.finish_wholes();
        Ok(is_cancelled)
    }

    fn cancel_one(&mut self, token: Token) -> bool {
        let Some(name) = self.operations.begun(token).map(|begun| begun.operation) else {
            return false;
        };
        let is_meant = |context: &OperationContext| context.token == token;
        let mut cancelled = self.delayed.cancel(is_meant);
        cancelled.extend(self.peers.cancel(is_meant));
        let (is_stopped, copy) = match cancelled.is_empty() {
            true => self.local_copies.cancel_transfer(token),
            false => (true, None),
        };
        for context in cancelled.into_iter().chain(copy) {
            let error = Error::new(name, ErrorKind::Cancelled, "the operation was cancelled");
            self.peers.complete(context, Err(error), &mut self.operations);
        }
        is_stopped
    }
}
