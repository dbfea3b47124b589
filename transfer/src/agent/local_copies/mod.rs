//! Copies between memory that this process has mapped: by devices and by the CPU.

mod cpu_copy;
mod requested_blocks;

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use gpu::{Block, Device, DeviceName, Pause, Point, PreparedBlocks, Slice, Stream};

use super::OperationContext;
use super::host_staged::{StagedCopies, StagedMover};
use crate::blocks::{BlockListPool, BlockQueue};
use crate::copy_queue::CopyQueue;
use crate::copy_requests::{
    ClientIdentity, CopyClient, PairRemote, RegionName, ServicePair, StreamDelay,
};
use crate::error::{Error, Result};
use crate::host_buffer::HostBuffer;
use crate::operations::Token;
use crate::path::Operation;
use crate::region::{RegionDescriptor, RegisteredRegion};

pub(super) use cpu_copy::CopyBuffer;
pub(super) use requested_blocks::{DeferredBlocks, PreparedList, RequestedBlocks};

/// Shorter copies have their own stream, so that they do not wait behind copies that take
/// milliseconds.
const SMALL_COPY: u64 = 1 << 20;

/// How bytes are copied on this machine.
#[derive(Debug)]
pub(super) enum LocalMover {
    /// By a device's copy engines.
    Device { device: Device, local: Slice, remote: Slice },
    /// By the calling CPU.
    Cpu { local: CopyBuffer, remote: HostBuffer },
    /// By a copy service of the machine, the number of its client.
    Service(usize, Arc<ServicePair>),
    /// By both sides, through memory between them.
    Staged(StagedMover),
}

#[derive(Debug)]
struct CpuCopy {
    context: OperationContext,
    to: CopyBuffer,
    from: CopyBuffer,
    /// Blocks that were not started.
    blocks: BlockQueue,
    /// The rest of the current block.
    block: Block,
}

/// Copies of different classes do not wait for each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum CopyClass {
    Small,
    Large,
    /// Copies that wait for streams of the caller.
    InStreamOrder,
}

#[derive(Debug, Default)]
pub(super) struct LocalCopies {
    /// By peer, device and class of copies.
    queues: HashMap<(u32, DeviceName, CopyClass), CopyQueue<OperationContext>>,
    cpu_copies: VecDeque<CpuCopy>,
    /// Transfers by the copy services of directories, once a route takes that path.
    services: Vec<(PathBuf, CopyClient<OperationContext>)>,
    staged: StagedCopies<OperationContext>,
    /// Lists of blocks for CPU copies and deferred operations.
    block_lists: BlockListPool,
}

/// The client of a copy service, and its number.
pub(super) struct ServiceClient<'a> {
    number: usize,
    client: &'a mut CopyClient<OperationContext>,
}

impl ServiceClient<'_> {
    /// Opens a pair of memory.
    pub(super) fn open_pair(
        self,
        local: &Arc<RegisteredRegion>,
        remote: &RegionDescriptor,
        end: Instant,
    ) -> Result<LocalMover> {
        let remote = PairRemote::Region(RegionName::of(remote));
        let pair = self.client.open_pair(local, remote, end)?;
        Ok(LocalMover::Service(self.number, pair))
    }
}

impl LocalCopies {
    /// The client of the copy service of a directory, made when it is first needed.
    pub(super) fn service_of(
        &mut self,
        directory: &Path,
        identity: impl FnOnce() -> Result<ClientIdentity>,
    ) -> Result<ServiceClient<'_>> {
        let known = self.services.iter().position(|(of, _)| of == directory);
        let number = match known {
            Some(number) => number,
            None => {
                let client = CopyClient::new(directory, identity()?);
                self.services.push((directory.to_owned(), client));
                self.services.len() - 1
            }
        };
        Ok(ServiceClient { number, client: &mut self.services[number].1 })
    }

    /// Lists for the blocks of deferred operations.
    pub(super) fn block_lists(&mut self) -> &mut BlockListPool {
        &mut self.block_lists
    }

    /// The queue for copies of a device with a peer.
    fn queue(
        &mut self,
        peer: u32,
        device: &Device,
        class: CopyClass,
    ) -> Result<&mut CopyQueue<OperationContext>> {
        match self.queues.entry((peer, device.name(), class)) {
            Entry::Occupied(queue) => Ok(queue.into_mut()),
            Entry::Vacant(slot) => Ok(slot.insert(CopyQueue::new(device)?)),
        }
    }

    /// Prepares blocks for a device that copies with a peer. None if no device copies.
    pub(super) fn prepare(
        &mut self,
        peer: u32,
        operation: Operation,
        mover: &LocalMover,
        blocks: &[Block],
    ) -> Result<Option<PreparedBlocks>> {
        let LocalMover::Device { device, local, remote } = mover else { return Ok(None) };
        let (to, from) = operation.to_and_from(local, remote);
        let queue = self.queue(peer, device, CopyClass::Large)?;
        queue.prepare(to, from, blocks.to_vec()).map(Some)
    }

    /// Starts a copy, or queues it; a device's copy after a point of another stream.
    pub(super) fn begin(
        &mut self,
        operation: Operation,
        mover: &LocalMover,
        requested: RequestedBlocks<'_>,
        after: Option<Point>,
        context: OperationContext,
    ) -> std::result::Result<(), Box<(OperationContext, Error)>> {
        let mut store = Vec::new();
        match mover {
            LocalMover::Service(number, pair) => {
                let blocks = requested.list(&mut store);
                self.services[*number].1.begin(context, pair, operation, blocks, after);
            }
            LocalMover::Staged(mover) => {
                let blocks = self.block_lists.copy_blocks(requested.list(&mut store));
                let (peer, bytes) = (context.peer, context.bytes);
                self.staged.begin(peer, operation, mover, blocks, bytes, context);
            }
            LocalMover::Cpu { local, remote } => {
                let remote = CopyBuffer::Host(remote.clone());
                let (to, from) = operation.to_and_from(local.clone(), remote);
                let blocks = self.block_lists.copy_blocks(requested.list(&mut store));
                let block = Block::default();
                self.cpu_copies.push_back(CpuCopy { context, to, from, blocks, block });
            }
            LocalMover::Device { device, local, remote } => {
                let (to, from) = operation.to_and_from(local, remote);
                let (peer, bytes) = (context.peer, context.bytes);
                let class = match after {
                    Some(_) => CopyClass::InStreamOrder,
                    None if bytes < SMALL_COPY => CopyClass::Small,
                    None => CopyClass::Large,
                };
                let queue = match self.queue(peer, device, class) {
                    Ok(queue) => queue,
                    Err(error) => return Err(Box::new((context, error))),
                };
                let request = requested.copy_request(to, from, &mut store);
                queue.push(context, bytes, request.after(after));
            }
        }
        Ok(())
    }

    /// Passes completed copies to `done`, and starts queued ones. False if nothing changed.
    pub(super) fn progress(&mut self, mut done: impl FnMut(OperationContext, Result<()>)) -> bool {
        let mut has_moved = false;
        for queue in self.queues.values_mut() {
            has_moved |= queue.progress(&mut done);
        }
        for (_, service) in &mut self.services {
            has_moved |= service.progress(&mut done);
        }
        has_moved |= self.staged.progress(&mut done);
        let Some(mut copy) = self.cpu_copies.pop_front() else { return has_moved };
        match copy.copy_some() {
            Ok(false) => self.cpu_copies.push_front(copy),
            outcome => {
                self.block_lists.recycle(copy.blocks);
                done(copy.context, outcome.map(drop));
            }
        }
        true
    }

    pub(super) fn is_busy_with(&self, peer: u32) -> bool {
        self.queues.iter().any(|((of, ..), queue)| *of == peer && !queue.is_idle())
            || self.cpu_copies.iter().any(|copy| copy.context.peer == peer)
            || self.staged.is_busy_with(peer)
            || self.of_service().any(|context| context.peer == peer)
    }

    /// The transfers by copy services that are not complete.
    fn of_service(&self) -> impl Iterator<Item = &OperationContext> {
        self.services.iter().flat_map(|(_, service)| service.in_flight())
    }

    /// Does a copy service copy? It rings the agent's doorbell at each outcome.
    pub(super) fn uses_service(&self) -> bool {
        self.of_service().next().is_some()
    }

    pub(super) fn has_outcomes_of_service(&self) -> bool {
        self.services.iter().any(|(_, service)| service.has_outcomes())
    }

    /// Does the CPU copy while it makes progress?
    pub(super) fn uses_cpu(&self) -> bool {
        !self.cpu_copies.is_empty() || self.staged.uses_cpu()
    }

    /// Does a thread of a peer copy, too?
    pub(super) fn needs_peer(&self) -> bool {
        self.staged.is_busy()
    }

    /// What a thread that waits for devices does until it looks again; None if they are idle.
    pub(super) fn pause(&self, now: Instant) -> Option<Pause> {
        let queues = self.queues.values().filter_map(|queue| queue.pause(now));
        queues.chain(self.staged.pause(now)).min()
    }

    /// Stops a transfer that has not begun, or what of it has not begun. True if it ends as cancelled:
    /// its context, if nothing of it is in flight.
    pub(super) fn cancel_transfer(&mut self, token: Token) -> (bool, Option<OperationContext>) {
        let is_meant = |context: &OperationContext| context.token == token;
        let queued = self.queues.values_mut().find_map(|queue| queue.cancel(is_meant));
        if queued.is_some() {
            return (true, queued);
        }
        if let Some(at) = self.cpu_copies.iter().position(|copy| is_meant(&copy.context)) {
            let copy = self.cpu_copies.remove(at);
            return (true, copy.map(|copy| copy.context));
        }
        let is_stopped = self.staged.stop(is_meant)
            || self.services.iter_mut().any(|(_, service)| service.stop(is_meant));
        (is_stopped, None)
    }

    /// Can a transfer of so many blocks follow a stream of this device, by the copy service?
    pub(super) fn can_service_follow(
        &mut self,
        mover: &LocalMover,
        device: &Device,
        blocks: usize,
    ) -> bool {
        match mover {
            LocalMover::Service(number, _) => self.services[*number].1.can_follow(device, blocks),
            _ => false,
        }
    }

    /// Lets a stream wait for a transfer by the copy service.
    pub(super) fn delay_by_service(
        &mut self,
        token: Token,
        stream: &Stream,
    ) -> Result<StreamDelay> {
        for (_, service) in &mut self.services {
            match service.delay(|context| context.token == token, stream)? {
                StreamDelay::Over => {}
                found => return Ok(found),
            }
        }
        Ok(StreamDelay::Over)
    }

    /// Does the CPU of this process copy it?
    pub(super) fn is_copied_by_cpu(&self, token: Token) -> bool {
        self.cpu_copies.iter().any(|copy| copy.context.token == token)
    }

    /// Where a transfer ends on the stream of a device; None if it has not begun, is over, or no
    /// device of this process copies.
    pub(super) fn end_of(&self, token: Token) -> Option<&Point> {
        self.queues.values().find_map(|queue| queue.end_of(|context| context.token == token))
    }

    /// Cancels all copies of a peer. Waits for devices, at most until `end`. Returns the incomplete
    /// copies, and whether devices are done with all of them.
    pub(super) fn cancel(&mut self, peer: u32, end: Instant) -> (Vec<OperationContext>, bool) {
        let (mut cancelled, mut is_settled) = self.staged.cancel(peer, end);
        for (_, queue) in self.queues.extract_if(|(of, ..), _| *of == peer) {
            let (contexts, is_done) = queue.close(end);
            cancelled.extend(contexts);
            is_settled &= is_done;
        }
        self.cpu_copies.retain(|copy| {
            copy.context.peer != peer || {
                cancelled.push(copy.context.clone());
                false
            }
        });
        for (_, service) in &mut self.services {
            let (contexts, is_done) = service.cancel(|context| context.peer == peer, end);
            cancelled.extend(contexts);
            is_settled &= is_done;
        }
        (cancelled, is_settled)
    }

    /// Waits until devices have completed all copies, at most until `end`; no new ones start.
    /// Returns the peers whose copies may still run.
    pub(super) fn close(&mut self, end: Instant) -> BTreeSet<u32> {
        let closed = self.queues.drain().map(|((peer, ..), queue)| (peer, queue.close(end).1));
        let mut unsettled: BTreeSet<_> =
            closed.filter_map(|(peer, is_done)| (!is_done).then_some(peer)).collect();
        let of_service: BTreeSet<_> = self.of_service().map(|context| context.peer).collect();
        for peer in of_service {
            for (_, service) in &mut self.services {
                if !service.cancel(|context| context.peer == peer, end).1 {
                    unsettled.insert(peer);
                }
            }
        }
        self.services.iter_mut().for_each(|(_, service)| service.close_streams(end));
        unsettled.extend(self.staged.close(end));
        unsettled
    }
}
