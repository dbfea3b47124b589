//! Messages that are handed over in the order of streams, as one process sees them.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, Weak};
use std::time::{Duration, Instant};

use gpu::{Memory, Point, Slice, Stream};
use ipc::{Block, Caller};

use super::bytes::Part;
use super::{Pool, Readiness, Turn};
use crate::below;
use crate::error::{Error, ErrorKind, Result};
use crate::lock::lock;

/// Bytes of words that a device is let at in one go: what is not used is not pinned. Whole pages,
/// of whatever size the system's are.
const AT_ONCE: u64 = 64 << 10;
/// Words of a stream.
const WORD: u64 = size_of::<u32>() as u64;
/// Handed over messages that are looked at each time there is one more.
const LOOKS: usize = 8;
/// Between two looks at a word that a stream is going to write, when that takes long.
const FIRST_REST: Duration = Duration::from_micros(20);
const LONGEST_REST: Duration = Duration::from_millis(1);

/// Rests between looks at what rings no bell.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rest(Duration);

impl Rest {
    pub(crate) const NEW: Self = Self(FIRST_REST);

    /// When to look next.
    pub(crate) fn next(&mut self, deadline: Instant) -> Instant {
        let rest = self.0;
        self.0 = (rest * 2).min(LONGEST_REST);
        (Instant::now() + rest).min(deadline)
    }
}

/// Has something to do when streams of this process have come further, and finds that out only
/// when it is asked to look.
pub(crate) trait Tended: Send + Sync {
    /// Looks. False if it has nothing to do with this pool any more.
    fn tend(&self, pool: &Pool) -> bool;
}

/// A message that a stream of this process writes.
#[derive(Debug)]
pub(crate) struct Handed {
    pub(crate) block: Block,
    pub(crate) turn: Turn,
    /// All that writes it is before this.
    pub(crate) written: Point,
    /// No stream will say that it is written: it is poisoned then, and not before, or its memory
    /// would be another message's while the stream still writes there.
    pub(crate) is_lost: bool,
}

/// What streams of this process have to do with a pool.
#[derive(Default)]
pub(super) struct Streams {
    /// Words that the device was let at.
    words: Mutex<Vec<(u64, Memory)>>,
    handed: Mutex<VecDeque<Handed>>,
    /// One of them may be at its message for as long as this process lives.
    has_lost_one: AtomicBool,
    tended: Mutex<Vec<Weak<dyn Tended>>>,
}

impl std::fmt::Debug for Streams {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Streams({} messages)", lock(&self.handed).len())
    }
}

impl Pool {
    /// The word of a block's message, as memory that streams write and wait for.
    pub(crate) fn word_of(&self, block: Block) -> Result<Slice> {
        let operation = "let a device at a pool's books";
        let on = |cause| below::of_device(operation, cause).on(self.id());
        let (at, range) = (self.ledger().offset_of_word(block), self.ledger().range_of_words());
        if !range.contains(&at) {
            let detail = "a block that there cannot be";
            return Err(Error::new(operation, ErrorKind::Malformed, detail).on(self.id()));
        }
        let first = range.start + (at - range.start) / AT_ONCE * AT_ONCE;
        let mut words = lock(&self.streams.words);
        if let Some((_, memory)) = words.iter().find(|(known, _)| *known == first) {
            return memory.slice(at - first, WORD).map_err(on);
        }
        let length = AT_ONCE.min(range.end - first);
        let part = Part::new(&self.segment, first, length).ok_or_else(|| {
            let detail = "its books are cut off";
            Error::new(operation, ErrorKind::Malformed, detail).on(self.id())
        })?;
        let memory = self.view()?.device.register(part).map_err(on)?;
        let word = memory.slice(at - first, WORD).map_err(on);
        words.push((first, memory));
        word
    }

    /// Fails if a stream is none of the kind of device that this pool lies on.
    pub(crate) fn check_stream(&self, operation: &'static str, stream: &Stream) -> Result<()> {
        let (theirs, ours) = (stream.device().name(), self.view()?.device.name());
        if theirs.implementation == ours.implementation {
            return Ok(());
        }
        let detail = format!("a stream of {theirs}");
        Err(Error::new(operation, ErrorKind::InvalidArgument, detail).on(self.id()))
    }

    /// A message was published that a stream writes.
    pub(crate) fn has_handed(&self, caller: &Caller<'_>, message: Handed) {
        let mut handed = lock(&self.streams.handed);
        handed.push_back(message);
        // Mostly the oldest ones are done first.
        for _ in 0..LOOKS {
            if !handed.front().is_some_and(|first| self.is_over(caller, first)) {
                break;
            }
            handed.pop_front();
        }
    }

    /// Was it written, or never will be? Then whoever waits for it goes on.
    fn is_over(&self, caller: &Caller<'_>, handed: &Handed) -> bool {
        let Handed { block, turn, written, is_lost } = handed;
        let ledger = self.ledger();
        if ledger.readiness(*block, *turn) == Some(Readiness::Pending) {
            match written.is_done() {
                Ok(true) if *is_lost => ledger.poison(*block, *turn),
                // The device does nothing any more.
                Err(error) if error.kind() == gpu::ErrorKind::DeviceFailed => {
                    ledger.poison(*block, *turn);
                }
                // Neither the stream nor its driver will ever tell. In a forked child it is the
                // parent's, and may well be told there.
                Err(error) if *is_lost && error.kind() != gpu::ErrorKind::Forked => {
                    let pool = self.id();
                    tracing::error!(
                        %error, %pool,
                        "nobody can tell when a stream is through with a message: it is poisoned, \
                         and its memory is not used again as long as this process lives"
                    );
                    self.streams.has_lost_one.store(true, Ordering::Release);
                    ledger.poison_and_keep(*block, *turn);
                }
                _ => return false,
            }
        }
        ledger.free_if_left(caller, *block)
    }

    /// `tended` has something to do when streams have come further.
    pub(crate) fn look_after(&self, tended: Weak<dyn Tended>) {
        let weak = tended;
        let mut all = lock(&self.streams.tended);
        if !all.iter().any(|known| known.ptr_eq(&weak)) {
            all.push(weak);
        }
    }

    /// Sees to what streams of this process have done meanwhile. True if they have still to do
    /// something.
    pub(crate) fn tend(&self, caller: &Caller<'_>) -> bool {
        // One that is looked after may come here itself.
        let all = std::mem::take(&mut *lock(&self.streams.tended));
        let mut left = Vec::new();
        for weak in all {
            if weak.upgrade().is_some_and(|tended| tended.tend(self)) {
                left.push(weak);
            }
        }
        let mut tended = lock(&self.streams.tended);
        left.retain(|weak| !tended.iter().any(|known| known.ptr_eq(weak)));
        tended.extend(left);
        let is_any_held = !tended.is_empty();
        drop(tended);
        let mut handed = lock(&self.streams.handed);
        handed.retain(|handed| !self.is_over(caller, handed));
        is_any_held || !handed.is_empty()
    }

    /// Does anything go on that rings no bell when it is done, and that somebody may wait for?
    pub(crate) fn waits_for_streams(&self) -> bool {
        self.ledger().has_left() || !lock(&self.streams.tended).is_empty()
    }

    /// Waits until no stream of this process is at this pool any more, by its messages or by
    /// copies that took too long. False if that takes longer, or if it will never be known.
    pub(crate) fn is_left_alone(&self, caller: &Caller<'_>, deadline: Instant) -> bool {
        let mut rest = Rest::NEW;
        loop {
            self.free_what_is_done(caller);
            if self.streams.has_lost_one.load(Ordering::Acquire) {
                return false;
            }
            let is_busy = !lock(&self.streams.handed).is_empty()
                || !lock(&self.streams.tended).is_empty()
                || self.keeps_anything();
            if !is_busy || Instant::now() >= deadline {
                return !is_busy;
            }
            std::thread::sleep(rest.next(deadline).saturating_duration_since(Instant::now()));
        }
    }
}
