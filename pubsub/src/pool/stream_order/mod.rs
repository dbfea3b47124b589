//! Messages in stream order, as one process sees them: which streams of this process write which
//! message, and what is polled for them. `sync_words` is what all processes see.
//!
//! Publishing is in `publisher::stream_writes`, pulling and releasing in `subscriber::stream_reads`.

pub(super) mod sync_words;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, Weak};
use std::time::{Duration, Instant};

use gpu::{Memory, Point, Slice, Stream};
use ipc::{Block, Caller};
use threads::{RetryBackoff, lock};

pub use self::sync_words::Readiness;
pub(crate) use self::sync_words::{OWNED_BY_STREAMS, SyncPoint};
use super::Pool;
use super::bytes::SegmentPart;
use crate::error::{Error, ErrorKind, Result};
use crate::error_mapping::{During, On};

/// Bytes of sync words that are registered for a device at once, so that unused ones are not
/// pinned. Whole pages of any page size.
const REGISTER_BYTES: u64 = 64 << 10;
/// Size of a word that a stream writes.
const WORD: u64 = size_of::<u32>() as u64;
/// Number of earlier writes to check with each new one.
const CHECKS_PER_WRITE: usize = 8;
/// Pauses between polls of a word that a stream is to write: it rings no doorbell.
pub(crate) const STREAM_POLL_BACKOFF: RetryBackoff =
    RetryBackoff::new(Duration::from_micros(20), Duration::from_millis(1));

/// An object with work to do when streams of this process progress, which it detects only by
/// polling.
pub(crate) trait StreamPoller: Send + Sync + std::fmt::Debug {
    /// Polls. False if it needs no further polls of this pool.
    fn poll_streams(&self, pool: &Pool) -> bool;
}

#[derive(Debug)]
struct StreamWrite {
    block: Block,
    sync_point: SyncPoint,
    /// The point after all work that writes it.
    written: Point,
    /// No stream will signal its completion. It is poisoned at this point, not before, since the
    /// stream may still write to the block.
    is_unsignalled: bool,
}

/// Streams of this process that use a pool.
#[derive(Debug, Default)]
pub(super) struct Streams {
    words: Mutex<Vec<(u64, Memory)>>,
    stream_writes: Mutex<VecDeque<StreamWrite>>,
    /// A stream may use its block as long as this process lives.
    has_unsignalled: AtomicBool,
    stream_pollers: Mutex<Vec<Weak<dyn StreamPoller>>>,
}

impl Pool {
    /// The sync word of a block, as memory for streams.
    pub(crate) fn sync_word(&self, block: Block) -> Result<Slice> {
        let operation = "register control segment of pool";
        let (at, range) =
            (self.control().sync_word_offset(block), self.control().sync_words_range());
        if !range.contains(&at) {
            let detail = "block number out of range";
            return Err(Error::new(operation, ErrorKind::Malformed, detail).on(self.id()));
        }
        let first = range.start + (at - range.start) / REGISTER_BYTES * REGISTER_BYTES;
        let mut words = lock(&self.streams.words);
        if let Some((_, memory)) = words.iter().find(|(known, _)| *known == first) {
            return memory.slice(at - first, WORD).during(operation).on(self.id());
        }
        let length = REGISTER_BYTES.min(range.end - first);
        let part = SegmentPart::new(&self.segment, first, length).ok_or_else(|| {
            let detail = "the control segment is truncated";
            Error::new(operation, ErrorKind::Malformed, detail).on(self.id())
        })?;
        let memory = self.mapping()?.device.register(part).during(operation).on(self.id())?;
        let word = memory.slice(at - first, WORD).during(operation).on(self.id());
        words.push((first, memory));
        word
    }

    /// Fails if the stream belongs to another kind of device than this pool.
    pub(crate) fn check_stream(&self, operation: &'static str, stream: &Stream) -> Result<()> {
        let (of_stream, of_pool) = (stream.device().name(), self.mapping()?.device.name());
        if of_stream.implementation == of_pool.implementation {
            return Ok(());
        }
        let detail = format!("the stream belongs to {of_stream}, and the topic to {of_pool}");
        Err(Error::new(operation, ErrorKind::InvalidArgument, detail))
    }

    /// Makes the stream signal a published message that it writes until this point. The message is
    /// tracked also if that fails.
    pub(crate) fn signal_written(
        &self,
        caller: &Caller<'_>,
        stream: &Stream,
        word: &Slice,
        (block, sync_point): (Block, SyncPoint),
        mut written: Point,
    ) -> gpu::Result<()> {
        let signal = stream.write_word(word, sync_point.ready());
        let is_unsignalled = signal.is_err();
        if is_unsignalled && let Ok(later) = stream.point() {
            // If the write has begun after all, it is over by this point.
            written = later;
        }
        let message = StreamWrite { block, sync_point, written, is_unsignalled };
        let mut stream_writes = lock(&self.streams.stream_writes);
        stream_writes.push_back(message);
        // The oldest ones are usually finished first.
        for _ in 0..CHECKS_PER_WRITE {
            if !stream_writes.front().is_some_and(|first| self.is_over(caller, first)) {
                break;
            }
            stream_writes.pop_front();
        }
        signal
    }

    /// Returns true if the write has ended, with success or not; then its waiters are released.
    fn is_over(&self, caller: &Caller<'_>, stream_writes: &StreamWrite) -> bool {
        let StreamWrite { block, sync_point, written, is_unsignalled } = stream_writes;
        let control = self.control();
        if control.readiness(*block, *sync_point) == Some(Readiness::Pending) {
            match written.is_done() {
                Ok(true) if *is_unsignalled => control.poison(*block, *sync_point),
                // The device has stopped.
                Err(error) if error.kind() == gpu::ErrorKind::DeviceFailed => {
                    control.poison(*block, *sync_point);
                }
                // Neither the stream nor its driver will report the end. A forked child cannot
                // know: the stream is the parent's.
                Err(error) if *is_unsignalled && error.kind() != gpu::ErrorKind::Forked => {
                    tracing::error!(
                        %error, pool = %self.id(),
                        "cannot tell when a stream has finished with a message: it is poisoned, \
                         and its block is leaked until this process exits"
                    );
                    self.streams.has_unsignalled.store(true, Ordering::Release);
                    control.poison_and_retain(*block, *sync_point);
                }
                _ => return false,
            }
        }
        control.free_if_idle(caller, *block)
    }

    pub(crate) fn register_poller(&self, weak: Weak<dyn StreamPoller>) {
        let mut all = lock(&self.streams.stream_pollers);
        if !all.iter().any(|known| known.ptr_eq(&weak)) {
            all.push(weak);
        }
    }

    /// Polls streams of this process. True if some are still busy.
    pub(crate) fn poll_streams(&self, caller: &Caller<'_>) -> bool {
        // The list is taken first, since a poller may call this function.
        let mut left = std::mem::take(&mut *lock(&self.streams.stream_pollers));
        left.retain(|weak| weak.upgrade().is_some_and(|poller| poller.poll_streams(self)));
        let mut stream_pollers = lock(&self.streams.stream_pollers);
        left.retain(|weak| !stream_pollers.iter().any(|known| known.ptr_eq(weak)));
        stream_pollers.extend(left);
        let is_any_held = !stream_pollers.is_empty();
        drop(stream_pollers);
        let mut stream_writes = lock(&self.streams.stream_writes);
        stream_writes.retain(|stream_writes| !self.is_over(caller, stream_writes));
        is_any_held || !stream_writes.is_empty()
    }

    /// Returns true if unfinished work exists that rings no doorbell, and that a caller may wait
    /// for.
    pub(crate) fn is_waiting_for_streams(&self) -> bool {
        self.control().has_stream_owned() || !lock(&self.streams.stream_pollers).is_empty()
    }

    /// Waits until no stream of this process uses this pool, by messages or by unfinished copies.
    /// False at the deadline, or if completion cannot be detected.
    pub(crate) fn drain_streams(&self, caller: &Caller<'_>, deadline: Instant) -> bool {
        let mut backoff = STREAM_POLL_BACKOFF;
        loop {
            self.free_completed(caller);
            if self.streams.has_unsignalled.load(Ordering::Acquire) {
                return false;
            }
            let is_busy = !lock(&self.streams.stream_writes).is_empty()
                || !lock(&self.streams.stream_pollers).is_empty()
                || self.has_pending_copies();
            let left = deadline.saturating_duration_since(Instant::now());
            if !is_busy || left.is_zero() {
                return !is_busy;
            }
            std::thread::sleep(backoff.next_pause().min(left));
        }
    }
}
