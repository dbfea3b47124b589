//! Host-staged transfers of an initiator: its own copies, and the requests to the targets.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use gpu::{DeviceName, Pause};

use super::chunk_pipeline::{Chunk, ChunkPipeline, StagedRequest, Step};
use super::slot_layout::{SLOTS, SlotSize, chunk_length};
use super::staged_end::{Direction, StagedEnd};
use super::staged_pauses::{ChunkTimes, Look, coarse_pause};
use super::staging_link::StagingLink;
use crate::blocks::BlockQueue;
use crate::error::{Error, ErrorKind, Result};
use crate::host_copy::CacheUse;
use crate::path::{Operation, Path};
use crate::region::{Buffer, RegionDescriptor};
use crate::stream_copies::StreamCopies;

/// How a route copies: the session, and both regions.
#[derive(Debug)]
pub(in crate::agent) struct StagedMover {
    link: Arc<StagingLink>,
    region: u64,
    /// Does a CPU copy at one of the ends?
    by_cpu: bool,
    local: StagedEnd,
}

impl StagedMover {
    /// Prepares copies between local memory and a region that the target has opened.
    pub(in crate::agent) fn new(
        link: Arc<StagingLink>,
        local: &Buffer,
        remote: &RegionDescriptor,
    ) -> Result<Self> {
        let by_cpu = local.memory().is_none() || !remote.memory_type.is_device();
        let local = StagedEnd::new(local, local.length(), link.segment().slots())?;
        Ok(Self { link, region: remote.number, by_cpu, local })
    }
}

/// A transfer: its context, and the memory that it keeps.
#[derive(Debug)]
struct StagedTransfer<T> {
    context: T,
    local: StagedEnd,
    cache_use: CacheUse,
}

/// Streams of a session: small and large chunks do not wait for each other.
type StreamKey = (DeviceName, Direction, SlotSize);

#[derive(Debug)]
struct SessionCopies<T> {
    link: Arc<StagingLink>,
    pipeline: ChunkPipeline<StagedTransfer<T>>,
    streams: HashMap<StreamKey, StreamCopies<usize>>,
    /// Slots that the CPU copies, in order.
    cpu_copies: VecDeque<usize>,
    times: LookTimes,
}

/// When chunks were begun, and how long earlier ones took.
#[derive(Debug)]
struct LookTimes {
    /// When the current copy or request in each slot was begun.
    begun: [Instant; SLOTS],
    last_look: Instant,
    copies: ChunkTimes,
    answers: ChunkTimes,
}

impl LookTimes {
    fn new() -> Self {
        let now = Instant::now();
        let (copies, answers) = (ChunkTimes::new(), ChunkTimes::new());
        Self { begun: [now; SLOTS], last_look: now, copies, answers }
    }
}

/// Host-staged transfers with all peers. `T` is the context of a transfer.
#[derive(Debug)]
pub(in crate::agent) struct StagedCopies<T> {
    /// By peer.
    sessions: HashMap<u32, SessionCopies<T>>,
}

impl<T> Default for StagedCopies<T> {
    fn default() -> Self {
        Self { sessions: HashMap::new() }
    }
}

impl<T> StagedCopies<T> {
    /// Starts a transfer with a peer, or queues it.
    pub(in crate::agent) fn begin(
        &mut self,
        peer: u32,
        operation: Operation,
        mover: &StagedMover,
        blocks: BlockQueue,
        bytes: u64,
        context: T,
    ) {
        let session = match self.sessions.entry(peer) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(entry) => entry.insert(SessionCopies::new(Arc::clone(&mover.link))),
        };
        let request = StagedRequest::new(operation, mover.region, blocks);
        let request = request.with_length(bytes, chunk_length(bytes, mover.by_cpu));
        let cache_use = CacheUse::of_request(bytes);
        let transfer = StagedTransfer { context, local: mover.local.clone(), cache_use };
        session.pipeline.push(transfer, request);
        session.begin_chunks();
    }

    /// Passes transfers that are over to `done`, and continues the others. False if nothing changed.
    pub(in crate::agent) fn progress(&mut self, mut done: impl FnMut(T, Result<()>)) -> bool {
        let mut has_moved = false;
        for session in self.sessions.values_mut() {
            has_moved |= session.progress(&mut done);
        }
        has_moved
    }

    pub(in crate::agent) fn is_busy_with(&self, peer: u32) -> bool {
        self.sessions.get(&peer).is_some_and(|session| !session.pipeline.is_idle())
    }

    pub(in crate::agent) fn is_busy(&self) -> bool {
        self.sessions.values().any(|session| !session.pipeline.is_idle())
    }

    /// Does the CPU copy while it makes progress?
    pub(in crate::agent) fn uses_cpu(&self) -> bool {
        self.sessions.values().any(|session| !session.cpu_copies.is_empty())
    }

    /// What a thread that waits does until it looks again; None if all are idle.
    pub(in crate::agent) fn pause(&self, now: Instant) -> Option<Pause> {
        self.sessions.values().filter_map(|session| session.pause(now)).min()
    }

    /// Stops a transfer: it ends as cancelled when what is in flight is over. False if all of it is.
    pub(in crate::agent) fn stop(&mut self, is_meant: impl Fn(&T) -> bool) -> bool {
        self.sessions.values_mut().any(|session| {
            let cause = "the transfer was cancelled";
            let error = Error::new("copy through the host", ErrorKind::Cancelled, cause);
            session.pipeline.stop(|transfer| is_meant(&transfer.context), error)
        })
    }

    /// Cancels the transfers with a peer. Waits for devices, at most until `end`. Returns their
    /// contexts, and whether devices are done.
    pub(in crate::agent) fn cancel(&mut self, peer: u32, end: Instant) -> (Vec<T>, bool) {
        let session = self.sessions.remove(&peer);
        session.map_or_else(|| (Vec::new(), true), |session| session.close(end))
    }

    /// Waits until devices have completed all copies, at most until `end`. Returns the peers whose
    /// copies may still run.
    pub(in crate::agent) fn close(&mut self, end: Instant) -> BTreeSet<u32> {
        let closed = self.sessions.drain().map(|(peer, session)| (peer, session.close(end).1));
        closed.filter_map(|(peer, is_done)| (!is_done).then_some(peer)).collect()
    }
}

impl<T> SessionCopies<T> {
    fn new(link: Arc<StagingLink>) -> Self {
        Self {
            link,
            pipeline: ChunkPipeline::default(),
            streams: HashMap::new(),
            cpu_copies: VecDeque::new(),
            times: LookTimes::new(),
        }
    }

    fn progress(&mut self, done: &mut impl FnMut(T, Result<()>)) -> bool {
        if self.pipeline.is_idle() {
            return false;
        }
        let mut has_moved = self.take_copies();
        // The cause before the answers: all that the target has done counts.
        let end_cause = self.link.end_cause();
        has_moved |= self.take_answers();
        if let Some(cause) = end_cause {
            self.fail(cause);
        }
        has_moved |= self.begin_chunks();
        while let Some((transfer, outcome)) = self.pipeline.take_done() {
            has_moved = true;
            done(transfer.context, outcome);
        }
        has_moved
    }

    /// Begins chunks as long as slots are free.
    fn begin_chunks(&mut self) -> bool {
        let mut steps = Vec::new();
        if self.link.end_cause().is_none() {
            steps.extend(std::iter::from_fn(|| self.pipeline.next_step()));
        }
        self.perform(&steps);
        !steps.is_empty()
    }

    fn perform(&mut self, steps: &[Step]) {
        let mut has_posted = false;
        for step in steps {
            match *step {
                Step::Copy(slot) => {
                    if let Err(error) = self.copy(slot) {
                        self.pipeline.copied(slot, Err(error));
                    }
                }
                Step::Post(slot) => {
                    let chunk = self.pipeline.chunk(slot);
                    let (sequence, operation) = (chunk.sequence(), chunk.operation());
                    let segment = self.link.segment();
                    segment.post(slot, sequence, operation, chunk.region(), chunk.ranges());
                    self.times.begun[slot] = Instant::now();
                    has_posted = true;
                }
            }
        }
        if has_posted {
            self.link.wake_target();
        }
    }

    /// Starts the copy of a slot on this side.
    fn copy(&mut self, slot: usize) -> Result<()> {
        let Some(transfer) = self.pipeline.context(slot) else { return Ok(()) };
        let chunk = self.pipeline.chunk(slot);
        let direction = direction(chunk.operation());
        let Some(device) = transfer.local.device() else {
            self.cpu_copies.push_back(slot);
            return Ok(());
        };
        let key = (device.name(), direction, SlotSize::of_slot(slot));
        let copies = match self.streams.entry(key) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(entry) => entry.insert(StreamCopies::new(device)?),
        };
        copies.begin(slot, |stream| transfer.local.start_on(stream, direction, chunk.blocks()));
        self.times.begun[slot] = Instant::now();
        Ok(())
    }

    /// Takes note of copies that are done on this side, and makes one of the CPU.
    fn take_copies(&mut self) -> bool {
        let mut next = Vec::new();
        let mut has_moved = false;
        let was_coarse = self.pipeline.has_unbegun();
        for copies in self.streams.values_mut() {
            let (mut first, mut count) = (None, 0);
            while let Some((slot, since, outcome)) = copies.next_done() {
                // Of several that are done now, only the first was seen in progress before.
                let bytes = self.pipeline.chunk(slot).bytes();
                first.get_or_insert_with(|| (bytes, since, copies.take_in_progress()));
                count += 1;
                next.extend(self.pipeline.copied(slot, outcome));
            }
            if let Some((bytes, since, in_progress)) = first {
                let look = Look::new(Instant::now(), in_progress, count, was_coarse);
                self.times.copies.note(bytes, since, look);
                has_moved = true;
            }
        }
        if let Some(slot) = self.cpu_copies.pop_front() {
            has_moved = true;
            let outcome = self.pipeline.context(slot).map_or(Ok(()), |transfer| {
                let chunk = self.pipeline.chunk(slot);
                let direction = direction(chunk.operation());
                transfer.local.copy_by_cpu(direction, chunk.blocks(), transfer.cache_use)
            });
            next.extend(self.pipeline.copied(slot, outcome));
        }
        self.perform(&next);
        has_moved
    }

    fn take_answers(&mut self) -> bool {
        let asked = Instant::now();
        let mut next = Vec::new();
        let was_coarse = self.pipeline.has_unbegun();
        let (mut first, mut count) = (None, 0);
        for slot in 0..SLOTS {
            let Some(sequence) = self.pipeline.awaited(slot) else { continue };
            let Some(answer) = self.link.segment().answer_to(slot, sequence) else { continue };
            let chunk = self.pipeline.chunk(slot);
            first.get_or_insert((chunk.bytes(), self.times.begun[slot]));
            count += 1;
            let name = chunk.operation().name();
            let outcome = answer.map_err(|refusal| {
                let detail = format!("{}: {}", Path::HostStaged, refusal.cause);
                Error::new(name, refusal.kind, detail)
            });
            next.extend(self.pipeline.answered(slot, outcome));
        }
        if let Some((bytes, since)) = first {
            let before = Some(self.times.last_look);
            let look = Look::new(Instant::now(), before, count, was_coarse);
            self.times.answers.note(bytes, since, look);
        }
        self.times.last_look = asked;
        self.perform(&next);
        count > 0
    }

    fn fail(&mut self, cause: &str) {
        self.pipeline.fail_all(|operation, bytes, done| {
            let path = Path::HostStaged;
            let detail = format!("{path}: {done} of {bytes} bytes were copied: {cause}");
            Error::new(operation.name(), ErrorKind::Closed, detail)
        });
        // They would only copy for nothing.
        let waiting = std::mem::take(&mut self.cpu_copies);
        waiting.into_iter().for_each(|slot| {
            self.pipeline.copied(slot, Ok(()));
        });
    }

    /// What a thread that waits does until it looks again. Chunks in the middle of a transfer are
    /// not looked for all the time: a late look delays the transfer once, not each chunk.
    fn pause(&self, now: Instant) -> Option<Pause> {
        // An ended session keeps slots whose answers never come.
        if self.pipeline.is_idle() {
            return None;
        }
        let copy = self.streams.values().filter_map(|copies| {
            let (slot, since) = copies.in_flight().next()?;
            let bytes = self.pipeline.chunk(*slot).bytes();
            Some(self.times.copies.pause(now, since, std::iter::once(bytes)))
        });
        let copy = copy.min();
        if self.pipeline.has_unbegun()
            && let Some(pause) = copy
        {
            return Some(coarse_pause(pause, now));
        }
        let mut awaited: Vec<_> =
            (0..SLOTS).filter(|slot| self.pipeline.awaited(*slot).is_some()).collect();
        awaited.sort_unstable_by_key(|slot| self.pipeline.awaited(*slot));
        let Some(first) = awaited.first() else { return copy };
        let since = self.times.begun[*first];
        let chunks = awaited.iter().map(|slot| self.pipeline.chunk(*slot));
        // Each answer to a get is followed by a copy of this side, of puts only the last counts.
        let is_followed = chunks.clone().any(|chunk| chunk.operation() == Operation::Get);
        let is_first_of_several = awaited.len() > 1 && is_followed;
        let answer = if self.pipeline.has_unbegun() || is_first_of_several {
            let next = chunks.map(Chunk::bytes).take(1);
            coarse_pause(self.times.answers.pause(now, since, next), now)
        } else {
            self.times.answers.pause(now, since, chunks.map(Chunk::bytes))
        };
        Some(copy.map_or(answer, |copy| copy.min(answer)))
    }

    /// Waits for the device's copies, at most until `end`.
    fn close(self, end: Instant) -> (Vec<T>, bool) {
        let mut is_done = true;
        for copies in self.streams.into_values() {
            is_done &= copies.close(end);
        }
        (self.pipeline.abandon().map(|transfer| transfer.context).collect(), is_done)
    }
}

fn direction(operation: Operation) -> Direction {
    match operation {
        Operation::Put => Direction::IntoSlots,
        Operation::Get => Direction::OutOfSlots,
    }
}
