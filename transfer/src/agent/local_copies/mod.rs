//! Copies between memory that this process has mapped: by devices and by the CPU.

mod cpu_copy;

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use gpu::{Block, CopyMethod, Device, DeviceName, Pause, Slice};

use super::OperationContext;
use super::host_staged::{StagedCopies, StagedMover};
use crate::blocks::{BlockListPool, BlockQueue, Blocks};
use crate::copy_queue::{CopyQueue, CopyRequest};
use crate::copy_requests::{ClientIdentity, CopyClient, ServicePair};
use crate::error::{Error, Result};
use crate::host_buffer::HostBuffer;
use crate::path::Operation;
use crate::region::{RegionDescriptor, RegisteredRegion};

pub(super) use cpu_copy::CopyBuffer;

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

#[derive(Debug, Default)]
pub(super) struct LocalCopies {
    /// By peer and device, small and large copies.
    queues: HashMap<(u32, DeviceName, bool), CopyQueue<OperationContext>>,
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

    /// Starts a copy, or queues it.
    pub(super) fn begin(
        &mut self,
        operation: Operation,
        mover: &LocalMover,
        blocks: Blocks<'_>,
        by: CopyMethod,
        context: OperationContext,
    ) -> std::result::Result<(), Box<(OperationContext, Error)>> {
        match mover {
            LocalMover::Service(number, pair) => {
                self.services[*number].1.begin(context, pair, operation, blocks);
            }
            LocalMover::Staged(mover) => {
                let blocks = self.block_lists.copy_blocks(blocks);
                let (peer, bytes) = (context.peer, context.bytes);
                self.staged.begin(peer, operation, mover, blocks, bytes, context);
            }
            LocalMover::Cpu { local, remote } => {
                let remote = CopyBuffer::Host(remote.clone());
                let (to, from) = operation.to_and_from(local.clone(), remote);
                let blocks = self.block_lists.copy_blocks(blocks);
                let block = Block::default();
                self.cpu_copies.push_back(CpuCopy { context, to, from, blocks, block });
            }
            LocalMover::Device { device, local, remote } => {
                let (to, from) = operation.to_and_from(local, remote);
                let key = (context.peer, device.name(), context.bytes < SMALL_COPY);
                let queue = match self.queues.entry(key) {
                    Entry::Occupied(queue) => queue.into_mut(),
                    Entry::Vacant(slot) => match CopyQueue::new(device) {
                        Ok(queue) => slot.insert(queue),
                        Err(error) => return Err(Box::new((context, error))),
                    },
                };
                let bytes = context.bytes;
                queue.push(context, bytes, CopyRequest::new(to, from, blocks, by));
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
        unsettled.extend(self.staged.close(end));
        unsettled
    }
}
