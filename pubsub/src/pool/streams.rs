//! Messages that are handed over in the order of streams, as one process sees them.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, Weak};
use std::time::{Duration, Instant};

use gpu::{Memory, Point, Slice, Stream};
use ipc::{Block, Caller};

use super::bytes::SegmentPart;
use super::{Pool, Readiness, SyncPoint};
use crate::error::{Error, ErrorKind, Result};
use crate::error_mapping;
use crate::lock::lock;

/// Bytes of words that a device is let at in one go: what is not used is not pinned. Whole pages,
/// of whatever size the system's are.
const REGISTER_BYTES: u64 = 64 << 10;
/// Words of a stream.
const WORD: u64 = size_of::<u32>() as u64;
/// Handed over messages that are looked at each time there is one more.
const CHECKS_PER_WRITE: usize = 8;
/// Between two looks at a word that a stream is going to write, when that takes long.
const MIN_BACKOFF: Duration = Duration::from_micros(20);
const MAX_BACKOFF: Duration = Duration::from_millis(1);

/// Rests between looks at what rings no bell.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PollBackoff(Duration);

impl PollBackoff {
    pub(crate) const NEW: Self = Self(MIN_BACKOFF);

    /// When to look next.
    pub(crate) fn next(&mut self, deadline: Instant) -> Instant {
        let backoff = self.0;
        self.0 = (backoff * 2).min(MAX_BACKOFF);
        (Instant::now() + backoff).min(deadline)
    }
}

/// Has something to do when streams of this process have come further, and finds that out only
/// when it is asked to look.
pub(crate) trait StreamPoller: Send + Sync {
    /// Looks. False if it has nothing to do with this pool any more.
    fn poll_streams(&self, pool: &Pool) -> bool;
}

/// A message that a stream of this process writes.
#[derive(Debug)]
pub(crate) struct StreamWrite {
    pub(crate) block: Block,
    pub(crate) sync_point: SyncPoint,
    /// All that writes it is before this.
    pub(crate) written: Point,
    /// No stream will say that it is written: it is poisoned then, and not before, or its memory
    /// would be another message's while the stream still writes there.
    pub(crate) is_unsignalled: bool,
}

/// What streams of this process have to do with a pool.
#[derive(Default)]
pub(super) struct Streams {
    /// Words that the device was let at.
    words: Mutex<Vec<(u64, Memory)>>,
    stream_writes: Mutex<VecDeque<StreamWrite>>,
    /// One of them may be at its message for as long as this process lives.
    has_unsignalled: AtomicBool,
    stream_pollers: Mutex<Vec<Weak<dyn StreamPoller>>>,
}

impl std::fmt::Debug for Streams {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Streams({} messages)", lock(&self.stream_writes).len())
    }
}

impl Pool {
    /// The word of a block's message, as memory that streams write and wait for.
    pub(crate) fn sync_word(&self, block: Block) -> Result<Slice> {
        let operation = "register a pool's control segment for a device";
        let on = |cause| error_mapping::from_device(operation, cause).on(self.id());
        let (at, range) =
            (self.control().sync_word_offset(block), self.control().sync_words_range());
        if !range.contains(&at) {
            let detail = "block number out of range";
            return Err(Error::new(operation, ErrorKind::Malformed, detail).on(self.id()));
        }
        let first = range.start + (at - range.start) / REGISTER_BYTES * REGISTER_BYTES;
        let mut words = lock(&self.streams.words);
        if let Some((_, memory)) = words.iter().find(|(known, _)| *known == first) {
            return memory.slice(at - first, WORD).map_err(on);
        }
        let length = REGISTER_BYTES.min(range.end - first);
        let part = SegmentPart::new(&self.segment, first, length).ok_or_else(|| {
            let detail = "the control segment is truncated";
            Error::new(operation, ErrorKind::Malformed, detail).on(self.id())
        })?;
        let memory = self.mapping()?.device.register(part).map_err(on)?;
        let word = memory.slice(at - first, WORD).map_err(on);
        words.push((first, memory));
        word
    }

    /// Fails if a stream is none of the kind of device that this pool lies on.
    pub(crate) fn check_stream(&self, operation: &'static str, stream: &Stream) -> Result<()> {
        let (theirs, ours) = (stream.device().name(), self.mapping()?.device.name());
        if theirs.implementation == ours.implementation {
            return Ok(());
        }
        let detail = format!("the stream belongs to {theirs}");
        Err(Error::new(operation, ErrorKind::InvalidArgument, detail).on(self.id()))
    }

    /// A message was published that a stream writes.
    pub(crate) fn track_stream_write(&self, caller: &Caller<'_>, message: StreamWrite) {
        let mut stream_writes = lock(&self.streams.stream_writes);
        stream_writes.push_back(message);
        // Mostly the oldest ones are done first.
        for _ in 0..CHECKS_PER_WRITE {
            if !stream_writes.front().is_some_and(|first| self.is_over(caller, first)) {
                break;
            }
            stream_writes.pop_front();
        }
    }

    /// Was it written, or never will be? Then whoever waits for it goes on.
    fn is_over(&self, caller: &Caller<'_>, stream_writes: &StreamWrite) -> bool {
        let StreamWrite { block, sync_point, written, is_unsignalled } = stream_writes;
        let control = self.control();
        if control.readiness(*block, *sync_point) == Some(Readiness::Pending) {
            match written.is_done() {
                Ok(true) if *is_unsignalled => control.poison(*block, *sync_point),
                // The device does nothing any more.
                Err(error) if error.kind() == gpu::ErrorKind::DeviceFailed => {
                    control.poison(*block, *sync_point);
                }
                // Neither the stream nor its driver will ever tell. In a forked child it is the
                // parent's, and may well be told there.
                Err(error) if *is_unsignalled && error.kind() != gpu::ErrorKind::Forked => {
                    let pool = self.id();
                    tracing::error!(
                        %error, %pool,
                        "nobody can tell when a stream is through with a message: it is poisoned, \
                         and its memory is not used again as long as this process lives"
                    );
                    self.streams.has_unsignalled.store(true, Ordering::Release);
                    control.poison_and_retain(*block, *sync_point);
                }
                _ => return false,
            }
        }
        control.free_if_idle(caller, *block)
    }

    /// `stream_pollers` has something to do when streams have come further.
    pub(crate) fn register_poller(&self, stream_pollers: Weak<dyn StreamPoller>) {
        let weak = stream_pollers;
        let mut all = lock(&self.streams.stream_pollers);
        if !all.iter().any(|known| known.ptr_eq(&weak)) {
            all.push(weak);
        }
    }

    /// Sees to what streams of this process have done meanwhile. True if they have still to do
    /// something.
    pub(crate) fn poll_streams(&self, caller: &Caller<'_>) -> bool {
        // One that is looked after may come here itself.
        let all = std::mem::take(&mut *lock(&self.streams.stream_pollers));
        let mut left = Vec::new();
        for weak in all {
            if weak.upgrade().is_some_and(|stream_pollers| stream_pollers.poll_streams(self)) {
                left.push(weak);
            }
        }
        let mut stream_pollers = lock(&self.streams.stream_pollers);
        left.retain(|weak| !stream_pollers.iter().any(|known| known.ptr_eq(weak)));
        stream_pollers.extend(left);
        let is_any_held = !stream_pollers.is_empty();
        drop(stream_pollers);
        let mut stream_writes = lock(&self.streams.stream_writes);
        stream_writes.retain(|stream_writes| !self.is_over(caller, stream_writes));
        is_any_held || !stream_writes.is_empty()
    }

    /// Does anything go on that rings no bell when it is done, and that somebody may wait for?
    pub(crate) fn is_waiting_for_streams(&self) -> bool {
        self.control().has_stream_owned() || !lock(&self.streams.stream_pollers).is_empty()
    }

    /// Waits until no stream of this process is at this pool any more, by its messages or by
    /// copies that took too long. False if that takes longer, or if it will never be known.
    pub(crate) fn drain_streams(&self, caller: &Caller<'_>, deadline: Instant) -> bool {
        let mut backoff = PollBackoff::NEW;
        loop {
            self.free_completed(caller);
            if self.streams.has_unsignalled.load(Ordering::Acquire) {
                return false;
            }
            let is_busy = !lock(&self.streams.stream_writes).is_empty()
                || !lock(&self.streams.stream_pollers).is_empty()
                || self.has_pending_copies();
            if !is_busy || Instant::now() >= deadline {
                return !is_busy;
            }
            std::thread::sleep(backoff.next(deadline).saturating_duration_since(Instant::now()));
        }
    }
}
