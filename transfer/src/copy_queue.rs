//! Copies of a device, in order, each with the context of its operation.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use gpu::{Block, CopyMethod, CopyTimes, Device, Pause, Point, PreparedBlocks, Slice, Stream};

use crate::blocks::{BlockListPool, BlockQueue, Blocks};
use crate::error::{Context, Result};
use crate::stream_copies::StreamCopies;

/// Copies submitted to the driver at a time: it blocks the caller at about a thousand.
const MAX_STREAM_COPIES: usize = 256;
/// A thread sleeps at least this long, if the copies take as long: it does not wake for each of many
/// short ones.
const SHORTEST_SLEEP: Duration = Duration::from_micros(60);
/// Of a copy without an estimate of its own, in a queue: short ones follow each other as fast.
const SHORT_COPY_TIME: Duration = Duration::from_micros(2);

/// A copy by a device.
#[derive(Debug)]
pub(crate) struct CopyRequest<'a> {
    list: CopyList<'a>,
    /// The copy begins after this point of another stream.
    after: Option<Point>,
}

#[derive(Debug, Clone, Copy)]
enum CopyList<'a> {
    Blocks { to: &'a Slice, from: &'a Slice, blocks: Blocks<'a>, by: CopyMethod },
    Prepared(&'a PreparedBlocks),
    Selected(&'a PreparedBlocks, &'a [u32]),
}

impl<'a> CopyRequest<'a> {
    pub(crate) fn new(to: &'a Slice, from: &'a Slice, blocks: Blocks<'a>, by: CopyMethod) -> Self {
        Self { list: CopyList::Blocks { to, from, blocks, by }, after: None }
    }

    /// Prepared blocks: those with these indices, or all.
    pub(crate) fn prepared(blocks: &'a PreparedBlocks, indices: Option<&'a [u32]>) -> Self {
        let list = match indices {
            Some(indices) => CopyList::Selected(blocks, indices),
            None => CopyList::Prepared(blocks),
        };
        Self { list, after: None }
    }

    /// This copy, begun after a point of another stream.
    pub(crate) fn after(self, after: Option<Point>) -> Self {
        Self { after, ..self }
    }
}

/// A request that waits for a free place on the stream.
#[derive(Debug)]
struct QueuedCopy<T> {
    context: CopyContext<T>,
    list: QueuedList,
    after: Option<Point>,
}

#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "blocks are the usual case")]
enum QueuedList {
    Blocks { to: Slice, from: Slice, blocks: BlockQueue, by: CopyMethod },
    Prepared(PreparedBlocks),
    Selected(PreparedBlocks, Vec<u32>),
}

/// The context of a copy, and its bytes.
#[derive(Debug)]
struct CopyContext<T> {
    context: T,
    bytes: u64,
    /// Waits for another stream count in its time, which then says nothing about the device.
    waits: bool,
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
            let time = match self.times.estimate(context.bytes).filter(|_| !context.waits) {
                None if context.waits || context.bytes >= CopyTimes::SHORTEST => {
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
        let context = CopyContext { context, bytes, waits: request.after.is_some() };
        if self.copies.count() < MAX_STREAM_COPIES && self.waiting.is_empty() {
            self.copies.begin(context, |stream| copy(stream, request));
            return;
        }
        let CopyRequest { list, after } = request;
        let list = match list {
            CopyList::Blocks { to, from, blocks, by } => {
                let blocks = self.block_lists.copy_blocks(blocks);
                QueuedList::Blocks { to: to.clone(), from: from.clone(), blocks, by }
            }
            CopyList::Prepared(blocks) => QueuedList::Prepared(blocks.clone()),
            CopyList::Selected(blocks, indices) => {
                QueuedList::Selected(blocks.clone(), indices.to_vec())
            }
        };
        self.waiting.push_back(QueuedCopy { context, list, after });
    }

    /// Prepares blocks for copies of this queue.
    pub(crate) fn prepare(
        &self,
        to: &Slice,
        from: &Slice,
        blocks: Vec<Block>,
    ) -> Result<PreparedBlocks> {
        self.copies.stream().prepare_blocks(to, from, blocks).during("prepare transfer")
    }

    /// Removes the first queued copy that is meant: it has not begun.
    pub(crate) fn cancel(&mut self, is_meant: impl Fn(&T) -> bool) -> Option<T> {
        let at = self.waiting.iter().position(|queued| is_meant(&queued.context.context))?;
        Some(self.waiting.remove(at)?.context.context)
    }

    /// Where a copy ends on the stream; None if it has not begun or is over.
    pub(crate) fn end_of(&self, is_meant: impl Fn(&T) -> bool) -> Option<&Point> {
        self.copies.end_of(|copy| is_meant(&copy.context))
    }

    /// Passes completed copies to `done`, the oldest first, and submits queued ones.
    #[inline]
    pub(crate) fn progress(&mut self, mut done: impl FnMut(T, Result<()>)) -> bool {
        let mut has_moved = false;
        while let Some((context, since, outcome)) = self.copies.next_done() {
            // Of several that are done now, only the first was seen in progress before.
            self.note_end(context.bytes, since, has_moved || context.waits);
            done(context.context, outcome);
            has_moved = true;
        }
        while self.copies.count() < MAX_STREAM_COPIES {
            let Some(waiting) = self.waiting.pop_front() else { break };
            let QueuedCopy { context, list, after } = waiting;
            match list {
                QueuedList::Blocks { to, from, mut blocks, by } => {
                    let request = CopyRequest::new(&to, &from, blocks.all(), by).after(after);
                    self.copies.begin(context, |stream| copy(stream, request));
                    self.block_lists.recycle(blocks);
                }
                QueuedList::Prepared(blocks) => {
                    let request = CopyRequest::prepared(&blocks, None).after(after);
                    self.copies.begin(context, |stream| copy(stream, request));
                }
                QueuedList::Selected(blocks, indices) => {
                    let request = CopyRequest::prepared(&blocks, Some(&indices)).after(after);
                    self.copies.begin(context, |stream| copy(stream, request));
                }
            }
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
    if let Some(after) = &request.after {
        stream.wait_for(after)?;
    }
    let (to, from, blocks, by) = match request.list {
        CopyList::Blocks { to, from, blocks, by } => (to, from, blocks, by),
        CopyList::Prepared(blocks) => return stream.copy_prepared(blocks),
        CopyList::Selected(blocks, indices) => return stream.copy_selected(blocks, indices),
    };
    if let Some(Block { to: at, from: of, length }) = blocks.single() {
        return stream.copy(&to.slice(at, length)?, &from.slice(of, length)?);
    }
    match blocks.rows() {
        Some(rows) => stream.copy_each(to, from, rows.iter(), by),
        None => stream.copy_blocks(to, from, blocks.list(), by),
    }
}
