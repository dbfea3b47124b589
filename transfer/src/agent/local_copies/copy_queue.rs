//! Copies of a device, in order, each with the context of its operation.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use gpu::{Block, CopyMethod, Device, Slice, Stream};

use super::CopyRequest;
use super::block_list_pool::BlockListPool;
use crate::agent::OperationContext;
use crate::blocks::BlockQueue;
use crate::error::Result;
use crate::stream_copies::StreamCopies;

/// Copies submitted to the driver at a time: it blocks the caller at about a thousand.
const MAX_STREAM_COPIES: usize = 256;
const MIN_COPY_TIME: Duration = Duration::from_micros(7);
/// The assumed rate before the first measurement, in bytes per microsecond.
const INITIAL_RATE: f64 = 20_000.0;

/// A request that waits for a free place on the stream.
#[derive(Debug)]
struct QueuedCopy {
    context: OperationContext,
    to: Slice,
    from: Slice,
    blocks: BlockQueue,
    by: CopyMethod,
}

/// A stream of copies to or from one peer.
#[derive(Debug)]
pub(super) struct CopyQueue {
    copies: StreamCopies<OperationContext>,
    waiting: VecDeque<QueuedCopy>,
    block_lists: BlockListPool,
    /// When all submitted copies should be done, as estimated.
    expected: Instant,
    /// Recent rate in bytes per microsecond.
    rate: f64,
    last_done: Instant,
}

impl CopyQueue {
    pub(super) fn new(device: &Device) -> Result<Self> {
        let now = Instant::now();
        Ok(Self {
            copies: StreamCopies::new(device)?,
            waiting: VecDeque::new(),
            block_lists: BlockListPool::default(),
            expected: now,
            rate: INITIAL_RATE,
            last_done: now,
        })
    }

    /// When it should be idle, as estimated; None if it is.
    pub(super) fn expected(&self) -> Option<Instant> {
        (!self.is_idle()).then_some(self.expected)
    }

    pub(super) fn is_idle(&self) -> bool {
        self.copies.count() == 0 && self.waiting.is_empty()
    }

    /// Submits a copy, or queues it.
    pub(super) fn push(&mut self, context: OperationContext, request: CopyRequest<'_>) {
        if self.copies.count() >= MAX_STREAM_COPIES || !self.waiting.is_empty() {
            let CopyRequest { to, from, blocks, by } = request;
            let (to, from, blocks) =
                (to.clone(), from.clone(), self.block_lists.copy_blocks(blocks));
            self.waiting.push_back(QueuedCopy { context, to, from, blocks, by });
            return;
        }
        self.begin(context, request);
    }

    fn begin(&mut self, context: OperationContext, request: CopyRequest<'_>) {
        let bytes = context.bytes;
        self.copies.begin(context, |stream| copy(stream, request));
        let took = Duration::from_secs_f64(bytes as f64 / self.rate / 1e6);
        self.expected = self.expected.max(Instant::now()) + took + MIN_COPY_TIME;
    }

    /// Passes completed copies to `done`, the oldest first, and submits queued ones.
    #[inline]
    pub(super) fn progress(&mut self, mut done: impl FnMut(OperationContext, Result<()>)) -> bool {
        let mut has_moved = false;
        while let Some((context, since, outcome)) = self.copies.next_done() {
            self.update_rate(context.bytes, since);
            done(context, outcome);
            has_moved = true;
        }
        while self.copies.count() < MAX_STREAM_COPIES {
            let Some(waiting) = self.waiting.pop_front() else { break };
            let QueuedCopy { context, to, from, mut blocks, by } = waiting;
            let request = CopyRequest { to: &to, from: &from, blocks: blocks.all(), by };
            self.begin(context, request);
            self.block_lists.recycle(blocks);
            has_moved = true;
        }
        has_moved
    }

    fn update_rate(&mut self, bytes: u64, since: Instant) {
        /// Shorter copies measure the latency rather than the rate.
        const MIN_MEASURED: u64 = 1 << 20;
        let now = Instant::now();
        let took = now - since.max(self.last_done);
        self.last_done = now;
        if bytes >= MIN_MEASURED {
            let seen = bytes as f64 / took.as_secs_f64().max(1e-7) / 1e6;
            self.rate = 0.75 * self.rate + 0.25 * seen;
        }
    }

    /// Waits until the device has completed the submitted copies; queued ones are not submitted.
    /// Returns the contexts of all incomplete copies, and whether the device is done.
    pub(super) fn close(mut self, end: Instant) -> (Vec<OperationContext>, bool) {
        let waiting = self.waiting.drain(..).map(|waiting| waiting.context);
        let contexts = self.copies.abandon().chain(waiting).collect();
        (contexts, self.copies.close(end))
    }
}

/// A single block is a plain copy; several are one request.
fn copy(stream: &Stream, request: CopyRequest<'_>) -> gpu::Result<()> {
    let CopyRequest { to, from, blocks, by } = request;
    if let Some(Block { to: at, from: of, length }) = blocks.single() {
        return stream.copy(&to.slice(at, length)?, &from.slice(of, length)?);
    }
    match blocks.rows() {
        Some(rows) => stream.copy_each(to, from, rows.iter(), by),
        None => stream.copy_blocks(to, from, blocks.list(), by),
    }
}
