//! Copies of a device, in order, each with the context of its operation.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use gpu::{Block, CopyMethod, CopyTimes, Device, Pause, Slice, Stream};

use crate::blocks::{BlockListPool, BlockQueue, Blocks};
use crate::error::Result;
use crate::stream_copies::StreamCopies;

/// Copies submitted to the driver at a time: it blocks the caller at about a thousand.
const MAX_STREAM_COPIES: usize = 256;
/// A thread sleeps at least this long, if the copies take as long: it does not wake for each of many
/// short ones.
const SHORTEST_SLEEP: Duration = Duration::from_micros(60);
/// Of a copy without an estimate of its own, in a queue: short ones follow each other as fast.
const SHORT_COPY_TIME: Duration = Duration::from_micros(2);

/// The parameters of a copy by a device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CopyRequest<'a> {
    to: &'a Slice,
    from: &'a Slice,
    blocks: Blocks<'a>,
    by: CopyMethod,
}

impl<'a> CopyRequest<'a> {
    pub(crate) fn new(to: &'a Slice, from: &'a Slice, blocks: Blocks<'a>, by: CopyMethod) -> Self {
        Self { to, from, blocks, by }
    }
}

/// A request that waits for a free place on the stream.
#[derive(Debug)]
struct QueuedCopy<T> {
    context: CopyContext<T>,
    to: Slice,
    from: Slice,
    blocks: BlockQueue,
    by: CopyMethod,
}

/// The context of a copy, and its bytes.
#[derive(Debug)]
struct CopyContext<T> {
    context: T,
    bytes: u64,
}

/// A stream of copies, each with a context that is returned when it has completed.
#[derive(Debug)]
pub(crate) struct CopyQueue<T> {
    copies: StreamCopies<CopyContext<T>>,
    waiting: VecDeque<QueuedCopy<T>>,
    block_lists: BlockListPool,
    times: CopyTimes,
    last_done: LastDone,
}

/// The end of the copy before those in flight.
#[derive(Debug, Clone, Copy)]
struct LastDone {
    at: Instant,
    /// Was it seen early enough to time the next copy from it?
    is_exact: bool,
}

impl<T> CopyQueue<T> {
    pub(crate) fn new(device: &Device) -> Result<Self> {
        Ok(Self {
            copies: StreamCopies::new(device)?,
            waiting: VecDeque::new(),
            block_lists: BlockListPool::default(),
            times: CopyTimes::default(),
            last_done: LastDone { at: Instant::now(), is_exact: true },
        })
    }

    /// What a thread that waits does until it looks again; None if the queue is idle.
    pub(crate) fn pause(&self, now: Instant) -> Option<Pause> {
        let (_, since) = self.copies.in_flight().next()?;
        let begun = since.max(self.last_done.at);
        let mut end = begun;
        for (context, _) in self.copies.in_flight() {
            let time = match self.times.estimate(context.bytes) {
                None if context.bytes >= CopyTimes::SHORTEST => {
                    return Some(Pause::for_end(now, begun, None));
                }
                time => time.unwrap_or(SHORT_COPY_TIME),
            };
            end += time;
            if end >= now + SHORTEST_SLEEP {
                break;
            }
        }
        Some(Pause::for_end(now, begun, Some(end)))
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.copies.count() == 0 && self.waiting.is_empty()
    }

    /// Submits a copy, or queues it.
    pub(crate) fn push(&mut self, context: T, bytes: u64, request: CopyRequest<'_>) {
        let context = CopyContext { context, bytes };
        if self.copies.count() >= MAX_STREAM_COPIES || !self.waiting.is_empty() {
            let CopyRequest { to, from, blocks, by } = request;
            let (to, from, blocks) =
                (to.clone(), from.clone(), self.block_lists.copy_blocks(blocks));
            self.waiting.push_back(QueuedCopy { context, to, from, blocks, by });
            return;
        }
        self.begin(context, request);
    }

    fn begin(&mut self, context: CopyContext<T>, request: CopyRequest<'_>) {
        self.copies.begin(context, |stream| copy(stream, request));
    }

    /// Passes completed copies to `done`, the oldest first, and submits queued ones.
    #[inline]
    pub(crate) fn progress(&mut self, mut done: impl FnMut(T, Result<()>)) -> bool {
        let mut has_moved = false;
        while let Some((context, since, outcome)) = self.copies.next_done() {
            // Of several that are done now, only the first was seen in progress before.
            self.note_end(context.bytes, since, has_moved);
            done(context.context, outcome);
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

    /// Learns from a copy that was seen done now.
    fn note_end(&mut self, bytes: u64, since: Instant, is_late: bool) {
        let (before, at) = (self.last_done, Instant::now());
        let begun = since.max(before.at);
        let Some(in_progress) = self.copies.take_in_progress().filter(|_| !is_late) else {
            self.last_done = LastDone { at, is_exact: false };
            return;
        };
        let (at_least, at_most) = (in_progress.saturating_duration_since(begun), at - begun);
        self.last_done = LastDone { at, is_exact: gpu::is_exact(at_least, at_most) };
        if before.is_exact || since > before.at {
            self.times.learn(bytes, at_least, at_most);
        }
    }

    /// Waits until the device has completed the submitted copies; queued ones are not submitted.
    /// Returns the contexts of all incomplete copies, and whether the device is done.
    pub(crate) fn close(mut self, end: Instant) -> (Vec<T>, bool) {
        let waiting = self.waiting.drain(..).map(|waiting| waiting.context);
        let contexts = self.copies.abandon().chain(waiting).map(|it| it.context).collect();
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
