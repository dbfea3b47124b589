//! The chunks of an initiator's transfers: which slot each has, and what is next. Knows neither
//! clocks, devices nor shared memory.
//!
//! ```text
//! put   free ── copy ──► copied here ── post ──► awaited ── answer ──► free
//! get   free ── post ──► awaited ── answer ──► copy ── copied here ──► free
//! ```

use std::collections::{HashMap, VecDeque};

use gpu::Block;

use super::slot_layout::{MAX_RANGES, SLOTS, SlotSize, slot_start};
use super::staging_segment::RegionRange;
use crate::blocks::BlockQueue;
use crate::error::{Error, Result};
use crate::path::Operation;

/// A transfer to be cut into chunks.
#[derive(Debug)]
pub(super) struct StagedRequest {
    operation: Operation,
    region: u64,
    bytes: u64,
    chunk_length: u64,
    blocks: BlockQueue,
}

impl StagedRequest {
    pub(super) fn new(operation: Operation, region: u64, blocks: BlockQueue) -> Self {
        Self { operation, region, bytes: 0, chunk_length: 1, blocks }
    }

    /// Sets the length of the transfer, and of its chunks.
    pub(super) fn with_length(self, bytes: u64, chunk_length: u64) -> Self {
        let longest = SlotSize::for_transfer(bytes).length();
        Self { bytes, chunk_length: chunk_length.clamp(1, longest), ..self }
    }
}

#[derive(Debug)]
struct Transfer<T> {
    context: T,
    request: StagedRequest,
    /// Chunks that occupy a slot.
    in_flight: usize,
    /// Bytes that have arrived.
    done: u64,
    failure: Option<Error>,
}

/// Bytes that occupy a slot.
#[derive(Debug, Default)]
pub(super) struct Chunk {
    sequence: u64,
    region: u64,
    bytes: u64,
    is_get: bool,
    /// Between local memory and the memory of all slots.
    blocks: Vec<Block>,
    ranges: Vec<RegionRange>,
}

impl Chunk {
    pub(super) fn sequence(&self) -> u64 {
        self.sequence
    }

    pub(super) fn region(&self) -> u64 {
        self.region
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn operation(&self) -> Operation {
        if self.is_get { Operation::Get } else { Operation::Put }
    }

    pub(super) fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    pub(super) fn ranges(&self) -> &[RegionRange] {
        &self.ranges
    }

    /// Takes blocks of a transfer, until the chunk is as long as a chunk may be.
    fn take(&mut self, slot: usize, request: &mut StagedRequest) {
        self.blocks.clear();
        self.ranges.clear();
        (self.bytes, self.region) = (0, request.region);
        self.is_get = request.operation == Operation::Get;
        let start = slot_start(slot);
        while self.bytes < request.chunk_length
            && self.ranges.len() < MAX_RANGES
            && self.blocks.len() < MAX_RANGES
            && let Some(block) = request.blocks.front_mut()
        {
            let length = block.length.min(request.chunk_length - self.bytes);
            let at = start + self.bytes;
            let (piece, remote) = match self.is_get {
                true => (Block { to: block.to, from: at, length }, block.from),
                false => (Block { to: at, from: block.from, length }, block.to),
            };
            block.to += length;
            block.from += length;
            block.length -= length;
            if block.length == 0 {
                request.blocks.pop_front();
            }
            if length > 0 {
                self.add(piece, RegionRange::new(remote, length));
            }
        }
    }

    /// Adds a block, as a part of the last one if it continues that at its end.
    fn add(&mut self, block: Block, range: RegionRange) {
        self.bytes += block.length;
        match self.blocks.last_mut() {
            Some(last)
                if last.to + last.length == block.to && last.from + last.length == block.from =>
            {
                last.length += block.length;
            }
            _ => self.blocks.push(block),
        }
        let is_merged =
            self.ranges.last_mut().is_some_and(|last| last.extend(range.offset(), range.length()));
        if !is_merged {
            self.ranges.push(range);
        }
    }
}

/// What is to be done with the chunk in a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Copy it between local memory and the slot.
    Copy(usize),
    /// Post its request.
    Post(usize),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SlotState {
    Free,
    /// Copied on this side, for this transfer.
    Copying(u64),
    /// Requested from the target.
    Awaited(u64),
}

/// Transfers of a session, and their chunks. `T` is the context of a transfer.
#[derive(Debug)]
pub(super) struct ChunkPipeline<T> {
    transfers: HashMap<u64, Transfer<T>>,
    next_transfer: u64,
    /// Transfers with blocks that were not begun, by the size of their slots.
    unbegun: [VecDeque<u64>; 2],
    slots: [SlotState; SLOTS],
    chunks: [Chunk; SLOTS],
    sequence: u64,
    done: VecDeque<(T, Result<()>)>,
}

impl<T> Default for ChunkPipeline<T> {
    fn default() -> Self {
        Self {
            transfers: HashMap::new(),
            next_transfer: 0,
            unbegun: Default::default(),
            slots: [SlotState::Free; SLOTS],
            chunks: std::array::from_fn(|_| Chunk::default()),
            sequence: 0,
            done: VecDeque::new(),
        }
    }
}

impl<T> ChunkPipeline<T> {
    /// Adds a transfer.
    pub(super) fn push(&mut self, context: T, request: StagedRequest) {
        let number = self.next_transfer;
        self.next_transfer += 1;
        let size = SlotSize::for_transfer(request.bytes);
        let transfer = Transfer { context, request, in_flight: 0, done: 0, failure: None };
        self.transfers.insert(number, transfer);
        self.unbegun[size as usize].push_back(number);
    }

    /// Begins a chunk, if a slot is free for one.
    pub(super) fn next_step(&mut self) -> Option<Step> {
        SlotSize::ALL.into_iter().find_map(|size| self.begin_chunk(size))
    }

    fn begin_chunk(&mut self, size: SlotSize) -> Option<Step> {
        loop {
            let number = *self.unbegun[size as usize].front()?;
            let Some(transfer) = self.transfers.get_mut(&number) else {
                self.unbegun[size as usize].pop_front();
                continue;
            };
            let slot = size.slots().find(|slot| self.slots[*slot] == SlotState::Free)?;
            let chunk = &mut self.chunks[slot];
            chunk.take(slot, &mut transfer.request);
            if transfer.request.blocks.is_empty() {
                self.unbegun[size as usize].pop_front();
            }
            if chunk.bytes == 0 {
                self.finish_if_over(number);
                continue;
            }
            self.sequence += 1;
            chunk.sequence = self.sequence;
            transfer.in_flight += 1;
            return Some(match chunk.is_get {
                true => self.await_answer(slot, number),
                false => self.copy(slot, number),
            });
        }
    }

    fn copy(&mut self, slot: usize, transfer: u64) -> Step {
        self.slots[slot] = SlotState::Copying(transfer);
        Step::Copy(slot)
    }

    fn await_answer(&mut self, slot: usize, transfer: u64) -> Step {
        self.slots[slot] = SlotState::Awaited(transfer);
        Step::Post(slot)
    }

    /// The chunk in a slot was copied on this side, or not.
    pub(super) fn copied(&mut self, slot: usize, outcome: Result<()>) -> Option<Step> {
        let SlotState::Copying(number) = self.slots[slot] else { return None };
        let is_over = self.transfers.get(&number).is_none_or(|it| it.failure.is_some());
        match outcome {
            Ok(()) if !self.chunks[slot].is_get && !is_over => {
                Some(self.await_answer(slot, number))
            }
            outcome => {
                self.free(slot, number, outcome);
                None
            }
        }
    }

    /// The target has copied the chunk in a slot, or refused to.
    pub(super) fn answered(&mut self, slot: usize, outcome: Result<()>) -> Option<Step> {
        let SlotState::Awaited(number) = self.slots[slot] else { return None };
        let is_over = self.transfers.get(&number).is_none_or(|it| it.failure.is_some());
        match outcome {
            Ok(()) if self.chunks[slot].is_get && !is_over => Some(self.copy(slot, number)),
            outcome => {
                self.free(slot, number, outcome);
                None
            }
        }
    }

    fn free(&mut self, slot: usize, number: u64, outcome: Result<()>) {
        self.slots[slot] = SlotState::Free;
        let Some(transfer) = self.transfers.get_mut(&number) else { return };
        transfer.in_flight -= 1;
        match outcome {
            Ok(()) => transfer.done += self.chunks[slot].bytes,
            Err(error) => {
                transfer.failure.get_or_insert(error);
                transfer.request.blocks = BlockQueue::default();
            }
        }
        self.finish_if_over(number);
    }

    fn finish_if_over(&mut self, number: u64) {
        let is_over = |it: &Transfer<T>| it.in_flight == 0 && it.request.blocks.is_empty();
        if self.transfers.get(&number).is_some_and(is_over)
            && let Some(transfer) = self.transfers.remove(&number)
        {
            self.done.push_back((transfer.context, transfer.failure.map_or(Ok(()), Err)));
        }
    }

    /// Ends a transfer with an error when its chunks in slots are over, and begins no more. False if it
    /// has no more.
    pub(super) fn stop(&mut self, is_meant: impl Fn(&T) -> bool, error: Error) -> bool {
        let mut transfers = self.transfers.iter_mut();
        let found = transfers.find(|(_, transfer)| is_meant(&transfer.context));
        let Some((number, transfer)) = found else { return false };
        if transfer.request.blocks.is_empty() {
            return false;
        }
        let number = *number;
        transfer.failure.get_or_insert(error);
        transfer.request.blocks = BlockQueue::default();
        self.finish_if_over(number);
        true
    }

    /// Fails all transfers, because no answer will come. Copies on this side are still waited for.
    /// `why` gets the operation, its bytes, and how many of them have arrived.
    pub(super) fn fail_all(&mut self, why: impl Fn(Operation, u64, u64) -> Error) {
        for transfer in self.transfers.values_mut() {
            let StagedRequest { operation, bytes, .. } = transfer.request;
            transfer.failure.get_or_insert_with(|| why(operation, bytes, transfer.done));
            transfer.request.blocks = BlockQueue::default();
        }
        for slot in 0..SLOTS {
            // The target may still copy: such a slot is not used again.
            if let SlotState::Awaited(number) = self.slots[slot]
                && let Some(transfer) = self.transfers.get_mut(&number)
            {
                transfer.in_flight -= 1;
                self.slots[slot] = SlotState::Awaited(u64::MAX);
            }
        }
        let all: Vec<_> = self.transfers.keys().copied().collect();
        all.into_iter().for_each(|number| self.finish_if_over(number));
        self.unbegun.iter_mut().for_each(VecDeque::clear);
    }

    /// The sequence number of the request in a slot, if its answer is awaited.
    pub(super) fn awaited(&self, slot: usize) -> Option<u64> {
        let is_awaited = matches!(self.slots[slot], SlotState::Awaited(_));
        is_awaited.then_some(self.chunks[slot].sequence)
    }

    pub(super) fn chunk(&self, slot: usize) -> &Chunk {
        &self.chunks[slot]
    }

    /// The context of the transfer whose chunk is in a slot.
    pub(super) fn context(&self, slot: usize) -> Option<&T> {
        match self.slots[slot] {
            SlotState::Copying(number) | SlotState::Awaited(number) => {
                self.transfers.get(&number).map(|transfer| &transfer.context)
            }
            SlotState::Free => None,
        }
    }

    /// The next transfer that is over.
    pub(super) fn take_done(&mut self) -> Option<(T, Result<()>)> {
        self.done.pop_front()
    }

    /// Are there chunks that were not begun?
    pub(super) fn has_unbegun(&self) -> bool {
        self.unbegun.iter().any(|queue| !queue.is_empty())
    }

    pub(super) fn is_idle(&self) -> bool {
        self.transfers.is_empty() && self.done.is_empty()
    }

    /// The contexts of all transfers, which are not tracked any more.
    pub(super) fn abandon(self) -> impl Iterator<Item = T> {
        let done = self.done.into_iter().map(|(context, _)| context);
        done.chain(self.transfers.into_values().map(|transfer| transfer.context))
    }
}

#[cfg(test)]
#[path = "chunk_pipeline_tests.rs"]
mod tests;
