//! Operations in order, and what keeps their memory alive.
//!
//! An operation is only begun by the call that asks for it; until it is done nobody may
//! free what it touches. So a stream holds a reference to all memory that its operations
//! touch, and lets go of it when an event behind them is done.
#![allow(unsafe_code)]

mod blocks;

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use crate::device::Device;
use crate::driver::{self, HostBlock, StreamDriver};
use crate::error::{Error, ErrorKind, Result, is_over};
use crate::event::{Event, Point};
use crate::memory::{Holding, Memory, Slice};
use crate::resting::Waits;
use crate::reuse::Reuse;
use crate::waiting;

pub use blocks::{Block, BlocksBy};

/// Operations after which an event of the stream's own is recorded, so that memory is
/// let go of while the stream is never waited for.
const KEPT: usize = 64;
/// Events that a stream keeps, to record them again: more than are waited for at once.
/// Those beyond are made and closed, which costs some microseconds, and is right as well.
const EVENTS: usize = 64;
/// Bytes that are moved at once between the caller's memory and a device.
const BOUNCE: usize = 1 << 20;
/// How long a stream that is dropped waits for its operations.
const FAREWELL: Duration = Duration::from_secs(10);

static LEAKS: AtomicU64 = AtomicU64::new(0);

/// Streams that were dropped while an operation of theirs hung, and whose memory was
/// therefore left as it was.
#[must_use]
pub fn leaked_streams() -> u64 {
    LEAKS.load(Ordering::Relaxed)
}

/// A queue of operations, which are done in order while the caller goes on.
///
/// ```
/// # use gpu::Device;
/// let device = Device::open("stand-in:0".parse()?)?;
/// let (from, to) = (device.allocate(4096)?, device.allocate(4096)?);
/// let (first, second) = (device.stream()?, device.stream()?);
/// first.fill(&from.whole(), 1)?;
/// let filled = device.event()?;
/// first.record(&filled)?;
/// second.wait_for(&filled)?; // orders the streams; the caller does not wait
/// second.copy(&to.whole(), &from.whole())?;
/// second.synchronize(gpu::PATIENCE)?;
/// # Ok::<(), gpu::Error>(())
/// ```
pub struct Stream {
    device: Device,
    raw: Option<Arc<dyn StreamDriver>>,
    /// Whether it waits, for those who free something meanwhile.
    waits: Arc<Waits>,
    /// Others begin operations on it, too.
    is_adopted: bool,
    in_flight: Mutex<InFlight>,
    /// For transfers of the caller's own memory: one at a time.
    bounce: Mutex<Option<Arc<dyn HostBlock>>>,
    /// What kernels read lists of blocks from.
    lists: Mutex<Reuse<dyn HostBlock>>,
    /// Whether all was done when it was closed, if it was.
    closed: Option<bool>,
}

/// What operations touch that are not known to be done, in their order.
#[derive(Default)]
struct InFlight {
    kept: VecDeque<Kept>,
    /// How many of the last of them no event is behind yet.
    since_last: usize,
    /// Events, and how many each lets go of.
    marked: VecDeque<(Arc<driver::Event>, usize)>,
    events: Reuse<driver::Event>,
    /// Empty: its room is used again for what is let go of.
    room: Vec<Kept>,
}

/// What an operation touches.
enum Kept {
    Memory { _held: Arc<Holding> },
    Block { _held: Arc<dyn HostBlock> },
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({})", self.device.name())
    }
}

impl Stream {
    pub(crate) fn new(device: Device, raw: Box<dyn StreamDriver>) -> Self {
        let raw: Arc<dyn StreamDriver> = Arc::from(raw);
        Self {
            waits: Waits::new(device.name().implementation, Some(&raw)),
            device,
            raw: Some(raw),
            is_adopted: false,
            in_flight: Mutex::default(),
            bounce: Mutex::default(),
            lists: Mutex::default(),
            closed: None,
        }
    }

    pub(crate) fn adopted(device: Device, raw: Box<dyn StreamDriver>) -> Self {
        let mut adopted = Self::new(device, raw);
        adopted.is_adopted = true;
        adopted.waits = Waits::new(adopted.device.name().implementation, None);
        adopted
    }

    /// The device that works on it.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Copies, between any memory that this device can reach.
    ///
    /// # Errors
    /// [`NoPeerAccess`](ErrorKind::NoPeerAccess) if one side lies on another device, and
    /// this one was not given access to it; [`NotAllowed`](ErrorKind::NotAllowed) if `to` can only
    /// be read; lengths that differ.
    pub fn copy(&self, to: &Slice, from: &Slice) -> Result<()> {
        let operation = "copy";
        if to.length() != from.length() {
            let detail = format!("{} bytes to {} bytes", from.length(), to.length());
            return Err(self.refuse(operation, ErrorKind::InvalidArgument, detail));
        }
        self.check_writable(operation, to)?;
        self.check_reach(operation, from)?;
        self.begin(operation, &[to, from], |raw| {
            // SAFETY: both are kept alive until an event behind the copy is done.
            unsafe { raw.copy(to.address(), from.address(), to.length()) }
        })
    }

    /// Fills with a byte.
    ///
    /// # Errors
    /// As for [copying](Self::copy).
    pub fn fill(&self, to: &Slice, byte: u8) -> Result<()> {
        let operation = "fill";
        self.check_writable(operation, to)?;
        self.begin(operation, &[to], |raw| {
            // SAFETY: kept alive until an event behind it is done.
            unsafe { raw.fill(to.address(), byte, to.length()) }
        })
    }

    /// The [checksum](crate::checksum) of a range, computed by the device, after
    /// everything before it on this stream. Waits for it.
    ///
    /// # Errors
    /// As for [copying](Self::copy);
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded).
    pub fn checksum(&self, from: &Slice, longest: Duration) -> Result<u64> {
        let operation = "checksum";
        self.check_reach(operation, from)?;
        let left = Left::new(longest);
        let mut guard = self.lock_bounce(operation, left)?;
        let block = self.bounce_block(&mut guard)?;
        let result = block.address();
        self.begin_with(operation, &[from], Some(&block), |raw| {
            // SAFETY: range and block are kept alive until an event behind it is done.
            unsafe { raw.checksum(from.address(), from.length(), result) }
        })?;
        self.finish_with(&mut guard, left)?;
        // SAFETY: 8 bytes at the start of the block, which the device has finished writing.
        Ok(unsafe { (result as *const u64).read_volatile() })
    }

    /// Copies the caller's bytes to a range, and waits for it.
    ///
    /// # Errors
    /// As for [copying](Self::copy); [`DeadlineExceeded`](ErrorKind::DeadlineExceeded).
    pub fn upload(&self, to: &Slice, bytes: &[u8], longest: Duration) -> Result<()> {
        self.check_length("upload", to, bytes.len())?;
        self.check_writable("upload", to)?;
        let left = Left::new(longest);
        for (number, chunk) in bytes.chunks(BOUNCE).enumerate() {
            let part = to.slice((number * BOUNCE) as u64, chunk.len() as u64)?;
            let guard = self.bounced("upload", &part, left, |block| {
                // SAFETY: the block has at least a chunk's length, and nobody else uses it
                // while we hold its lock: the last transfer from it is done.
                unsafe {
                    let to = block as *mut u8;
                    to.copy_from_nonoverlapping(chunk.as_ptr(), chunk.len());
                }
                (part.address(), block)
            })?;
            drop(guard);
        }
        Ok(())
    }

    /// Copies a range to the caller's bytes, and waits for it.
    ///
    /// # Errors
    /// As for [copying](Self::copy); [`DeadlineExceeded`](ErrorKind::DeadlineExceeded).
    pub fn download(&self, from: &Slice, bytes: &mut [u8], longest: Duration) -> Result<()> {
        self.check_length("download", from, bytes.len())?;
        let left = Left::new(longest);
        for (number, chunk) in bytes.chunks_mut(BOUNCE).enumerate() {
            let part = from.slice((number * BOUNCE) as u64, chunk.len() as u64)?;
            let guard = self.bounced("download", &part, left, |block| (block, part.address()))?;
            let Some(block) = &*guard else { continue };
            // SAFETY: as in `upload`; the transfer is done, and the lock still held.
            unsafe {
                let from = block.address() as *const u8;
                chunk.as_mut_ptr().copy_from_nonoverlapping(from, chunk.len());
            }
        }
        Ok(())
    }

    /// Marks this point of the stream with an event.
    ///
    /// # Errors
    /// If the event belongs to another implementation.
    pub fn record(&self, event: &Event) -> Result<()> {
        self.begin("record an event", &[], |raw| raw.record(&event.event))
    }

    /// What follows on this stream waits for the event, or point of another stream. The caller does not wait. Such a wait has no deadline of its own.
    ///
    /// # Errors
    /// If the event belongs to another implementation.
    pub fn wait_for(&self, event: &Point) -> Result<()> {
        self.begin("wait for an event", &[], |raw| self.waits.begin(|| raw.wait(&event.event)))
    }

    /// Writes a word once all that was begun before is done: whoever finds `value` there finds
    /// what that wrote, too. Costs less than to [record](Self::record) an event, and may be
    /// seen by processes and devices alike, if the word lies in memory that they share.
    ///
    /// ```
    /// # use gpu::Device;
    /// # let device = Device::open("stand-in:0".parse()?)?;
    /// # let (data, word) = (device.allocate(4096)?, device.allocate(4)?);
    /// let (first, second) = (device.stream()?, device.stream()?);
    /// second.wait_for_word(&word.whole(), 7)?; // its writer need not be known yet
    /// first.fill(&data.whole(), 1)?;
    /// first.write_word(&word.whole(), 7)?;
    /// second.synchronize(gpu::PATIENCE)?;
    /// # Ok::<(), gpu::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [copying](Self::copy); [`InvalidArgument`](ErrorKind::InvalidArgument) unless `to`
    /// is four aligned bytes.
    pub fn write_word(&self, to: &Slice, value: u32) -> Result<()> {
        let operation = "write a word";
        self.check_writable(operation, to)?;
        self.check_word(operation, to)?;
        self.begin(operation, &[to], |raw| {
            // SAFETY: four aligned bytes, kept alive until an event behind it is done.
            unsafe { raw.write_word(to.address(), value) }
        })
    }

    /// What follows on this stream waits until the word is at least `least`, where numbers
    /// go round: up to half of all are beyond it. The caller does not wait. Such a wait has no
    /// deadline of its own: somebody has to write the word, also if who was to is gone.
    ///
    /// # Errors
    /// As for [writing one](Self::write_word).
    pub fn wait_for_word(&self, at: &Slice, least: u32) -> Result<()> {
        let operation = "wait for a word";
        self.check_word(operation, at)?;
        self.begin(operation, &[at], |raw| {
            // SAFETY: four aligned bytes, kept alive until an event behind it is done.
            self.waits.begin(|| unsafe { raw.wait_for_word(at.address(), least) })
        })
    }

    fn check_word(&self, operation: &'static str, word: &Slice) -> Result<()> {
        self.check_reach(operation, word)?;
        if word.length() == 4 && word.address().is_multiple_of(4) {
            return Ok(());
        }
        let detail = format!("{word:?} is not four aligned bytes");
        Err(self.refuse(operation, ErrorKind::InvalidArgument, detail))
    }

    /// Is everything done?
    ///
    /// # Errors
    /// If something of it failed.
    pub fn is_done(&self) -> Result<bool> {
        self.device.driver("look at a stream")?;
        self.raw().is_done().map_err(|error| error.on(self.device.name()))
    }

    /// Waits until everything is done that was begun so far.
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded): it goes on nevertheless. Or what
    /// failed.
    pub fn synchronize(&self, longest: Duration) -> Result<()> {
        let operation = "synchronize";
        let driver = self.device.driver(operation)?;
        let last = self.mark(&mut self.in_flight())?;
        waiting::until(operation, longest, || driver.is_event_done(&last))
            .map_err(|error| error.on(self.device.name()))?;
        self.sweep(self.in_flight());
        Ok(())
    }

    /// Marks this point of the stream, to be asked about later, by any thread. Costs as much
    /// as the recording of an event, none is made for it if it can be helped, and what is begun
    /// afterwards does not wait for it.
    ///
    /// ```
    /// # let device = gpu::Device::open("stand-in:0".parse()?)?;
    /// # let (from, to) = (device.allocate(4096)?, device.allocate(4096)?);
    /// let stream = device.stream()?;
    /// stream.copy(&to.whole(), &from.whole())?;
    /// let copied = stream.point()?;
    /// stream.fill(&from.whole(), 0)?;
    /// while !copied.is_done()? {} // … or something better to do
    /// # Ok::<(), gpu::Error>(())
    /// ```
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn point(&self) -> Result<Point> {
        let mut in_flight = self.in_flight();
        let event = self.mark(&mut in_flight)?;
        // Who only ever marks and asks has its memory back as well.
        self.sweep(in_flight);
        Ok(Point::new(self.device.clone(), event))
    }

    fn raw(&self) -> &dyn StreamDriver {
        // Taken by nobody but the drop.
        self.raw.as_deref().unwrap_or_else(|| unreachable!("a stream in use"))
    }

    fn in_flight(&self) -> MutexGuard<'_, InFlight> {
        self.in_flight.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn refuse(&self, operation: &'static str, kind: ErrorKind, detail: String) -> Error {
        Error::new(operation, kind, detail).on(self.device.name())
    }

    fn check_length(&self, operation: &'static str, slice: &Slice, length: usize) -> Result<()> {
        if slice.length() == length as u64 {
            return Ok(());
        }
        let detail = format!("{length} bytes of the caller, {} of the range", slice.length());
        Err(self.refuse(operation, ErrorKind::InvalidArgument, detail))
    }

    fn check_reach(&self, operation: &'static str, slice: &Slice) -> Result<()> {
        let memory: &Memory = slice.memory();
        if memory.is_reachable_from(&self.device) {
            return Ok(());
        }
        let place = memory.device().map_or("the host".to_owned(), |device| device.to_string());
        let detail = format!("{} has no access to memory of {place}", self.device.name());
        Err(self.refuse(operation, ErrorKind::NoPeerAccess, detail))
    }

    fn check_writable(&self, operation: &'static str, slice: &Slice) -> Result<()> {
        if slice.memory().is_read_only() {
            let detail = format!("{slice:?} can only be read");
            return Err(self.refuse(operation, ErrorKind::NotAllowed, detail));
        }
        self.check_reach(operation, slice)
    }

    fn begin(
        &self,
        operation: &'static str,
        touched: &[&Slice],
        begin: impl FnOnce(&dyn StreamDriver) -> Result<()>,
    ) -> Result<()> {
        self.begin_with(operation, touched, None, begin)
    }

    /// Begins an operation, under the lock that orders it with what keeps its memory.
    fn begin_with(
        &self,
        operation: &'static str,
        touched: &[&Slice],
        block: Option<&Arc<dyn HostBlock>>,
        begin: impl FnOnce(&dyn StreamDriver) -> Result<()>,
    ) -> Result<()> {
        self.device.driver(operation)?;
        let mut in_flight = self.in_flight();
        let before = in_flight.kept.len();
        let kept = touched.iter().map(|slice| Kept::Memory { _held: slice.memory().hold() });
        in_flight.kept.extend(kept);
        let kept = block.map(|block| Kept::Block { _held: Arc::clone(block) });
        in_flight.kept.extend(kept);
        in_flight.since_last += in_flight.kept.len() - before;
        begin(self.raw()).map_err(|error| error.on(self.device.name()))?;
        if in_flight.since_last >= KEPT {
            self.mark(&mut in_flight)?;
            self.sweep(in_flight);
        }
        Ok(())
    }

    /// Records an event behind all that was begun so far. It is nobody else's as long as
    /// somebody has it.
    fn mark(&self, in_flight: &mut InFlight) -> Result<Arc<driver::Event>> {
        let driver = self.device.driver("make an event")?;
        let on = |error: Error| error.on(self.device.name());
        let is_reached = |event: &driver::Event| matches!(driver.is_event_done(event), Ok(true));
        let event = match in_flight.events.take(is_reached) {
            Some(event) => event,
            None => {
                let made = Arc::new(driver.event().map_err(on)?);
                if in_flight.events.len() < EVENTS {
                    in_flight.events.keep(&made);
                }
                made
            }
        };
        self.raw().record(&event).map_err(on)?;
        self.waits.mark(&event);
        if in_flight.since_last > 0 {
            let count = std::mem::take(&mut in_flight.since_last);
            in_flight.marked.push_back((Arc::clone(&event), count));
        }
        Ok(event)
    }

    /// Lets go of what is done with, when the lock is not held any more: owners of memory
    /// may do anything then. What failed is kept: the device may be at it still.
    fn sweep(&self, mut in_flight: MutexGuard<'_, InFlight>) {
        let driver = &self.device.0.driver;
        let is_done = |event: &driver::Event| matches!(driver.is_event_done(event), Ok(true));
        let mut count = 0;
        while in_flight.marked.front().is_some_and(|(event, _)| is_done(event)) {
            count += in_flight.marked.pop_front().map_or(0, |(_, kept)| kept);
        }
        if count == 0 {
            drop(in_flight);
            self.device.0.tend_leftovers();
            return;
        }
        let mut done = std::mem::take(&mut in_flight.room);
        done.extend(in_flight.kept.drain(..count));
        drop(in_flight);
        done.clear();
        self.in_flight().room = done;
        self.device.0.tend_leftovers();
    }

    fn bounce_block(&self, block: &mut Option<Arc<dyn HostBlock>>) -> Result<Arc<dyn HostBlock>> {
        if let Some(block) = block {
            return Ok(Arc::clone(block));
        }
        let made = self.device.driver("allocate host memory")?.host_block(BOUNCE)?;
        Ok(Arc::clone(block.insert(Arc::from(made))))
    }

    /// One transfer by way of the block: `ends` gives where to and where from.
    fn bounced(
        &self,
        operation: &'static str,
        part: &Slice,
        left: Left,
        ends: impl FnOnce(u64) -> (u64, u64),
    ) -> Result<MutexGuard<'_, Option<Arc<dyn HostBlock>>>> {
        self.check_reach(operation, part)?;
        let mut guard = self.lock_bounce(operation, left)?;
        let block = self.bounce_block(&mut guard)?;
        self.device.driver(operation)?.check_context(operation)?;
        let (to, from) = ends(block.address());
        self.begin_with(operation, &[part], Some(&block), |raw| {
            // SAFETY: range and block are kept alive until an event behind it is done; the
            // part is no longer than the block.
            unsafe { raw.copy(to, from, part.length()) }
        })?;
        self.finish_with(&mut guard, left)?;
        Ok(guard)
    }

    /// Waits; if in vain, the block stays with the operation that still uses it.
    fn finish_with(&self, block: &mut Option<Arc<dyn HostBlock>>, left: Left) -> Result<()> {
        self.synchronize(left.now()).inspect_err(|_| *block = None)
    }

    /// One at a time; who comes later waits no longer than its own deadline.
    fn lock_bounce(
        &self,
        operation: &'static str,
        left: Left,
    ) -> Result<MutexGuard<'_, Option<Arc<dyn HostBlock>>>> {
        let mut taken = None;
        let wait = waiting::until(operation, left.now(), || {
            taken = match self.bounce.try_lock() {
                Ok(guard) => Some(guard),
                Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) => None,
            };
            Ok(taken.is_some())
        });
        wait.map_err(|error| error.on(self.device.name()))?;
        taken.ok_or_else(|| self.refuse(operation, ErrorKind::Other, "no lock".to_owned()))
    }
}

/// What is left of a time.
#[derive(Clone, Copy)]
struct Left {
    since: Instant,
    longest: Duration,
}

impl Left {
    fn new(longest: Duration) -> Self {
        Self { since: Instant::now(), longest }
    }

    fn now(self) -> Duration {
        self.longest.saturating_sub(self.since.elapsed())
    }
}

/// The answer to whether an operation is done. An error that does not say that it is over says that
/// it is not known, and it is asked again.
fn known(answer: Result<bool>) -> Result<bool> {
    match answer {
        Err(error) if !is_over(&error) => Ok(false),
        answer => answer,
    }
}

impl Stream {
    /// Waits until everything is done that was begun, and closes the stream.
    ///
    /// ```
    /// # let device = gpu::Device::open("stand-in:0".parse()?)?;
    /// # let memory = device.allocate(4096)?;
    /// let stream = device.stream()?;
    /// stream.fill(&memory.whole(), 1)?;
    /// stream.close(gpu::PATIENCE)?; // the device does not write to this memory any more
    /// # Ok::<(), gpu::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded): an operation may still be under way. What
    /// it touches is never freed, as if the stream had been dropped.
    /// [`DeviceFailed`](ErrorKind::DeviceFailed): nothing is under way any more, and what was not
    /// done is never done.
    pub fn close(mut self, longest: Duration) -> Result<()> {
        let outcome = self.wait_for_all("close a stream", longest);
        self.closed = Some(self.is_at_rest(&outcome));
        outcome.map_err(|error| error.on(self.device.name()))
    }

    /// Is nothing of ours under way any more, after this outcome of waiting for it? What a parent
    /// process has under way is not known in its child.
    fn is_at_rest(&self, outcome: &Result<()>) -> bool {
        self.device.0.birth.is_here() && outcome.as_ref().map_or_else(is_over, |()| true)
    }

    /// Waits until nothing of ours is under way any more. What others began on a stream of
    /// theirs may never end, as long as they go on.
    fn wait_for_all(&self, operation: &'static str, longest: Duration) -> Result<()> {
        let driver = self.device.driver(operation)?;
        if !self.is_adopted {
            return waiting::until(operation, longest, || known(self.raw().is_done()));
        }
        let last = {
            let mut in_flight = self.in_flight();
            if in_flight.kept.is_empty() && !self.waits.is_open() {
                return Ok(());
            }
            self.mark(&mut in_flight)?
        };
        waiting::until(operation, longest, || known(driver.is_event_done(&last)))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let is_done = match self.closed {
            Some(is_done) => is_done,
            None if !self.device.0.birth.is_here() => false,
            None => self.is_at_rest(&self.wait_for_all("drop a stream", FAREWELL)),
        };
        if is_done {
            return;
        }
        // A hanging operation, or somebody else's process: what may still be touched stays.
        LEAKS.fetch_add(1, Ordering::Relaxed);
        // No locks: in a forked child a thread that is not there may hold them.
        std::mem::forget(std::mem::take(
            self.in_flight.get_mut().unwrap_or_else(PoisonError::into_inner),
        ));
        std::mem::forget(self.raw.take());
        // It may wait for ever, and what would be freed meanwhile waits with it.
        std::mem::forget(Arc::clone(&self.waits));
        std::mem::forget(self.bounce.get_mut().unwrap_or_else(PoisonError::into_inner).take());
        std::mem::forget(std::mem::take(
            self.lists.get_mut().unwrap_or_else(PoisonError::into_inner),
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PATIENCE;

    /// Bytes that the host can only read.
    #[derive(Debug)]
    struct ReadOnly(u64);

    // SAFETY: a page that stays mapped, and that nothing refers to.
    unsafe impl crate::HostMapping for ReadOnly {
        fn address(&self) -> u64 {
            self.0
        }

        fn length(&self) -> u64 {
            4096
        }

        fn is_read_only(&self) -> bool {
            true
        }
    }

    fn read_only() -> ReadOnly {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_READ, flags, -1, 0) };
        assert_ne!(at, libc::MAP_FAILED);
        ReadOnly(at as u64)
    }

    #[test]
    fn memory_that_can_only_be_read_is_not_written() {
        let device = Device::open("stand-in:1".parse().unwrap()).unwrap();
        let memory = device.register(read_only()).unwrap();
        let (whole, word) = (memory.whole(), memory.slice(0, 4).unwrap());
        let other = device.allocate(4096).unwrap();
        let stream = device.stream().unwrap();
        stream.fill(&other.whole(), 1).unwrap();
        let blocks = [Block { to: 0, from: 0, length: 8 }];
        let refused = [
            stream.fill(&whole, 1),
            stream.copy(&whole, &other.whole()),
            stream.copy_blocks(&whole, &other.whole(), &blocks, BlocksBy::Best),
            stream.upload(&whole, &[1; 4096], PATIENCE),
            stream.write_word(&word, 1),
        ];
        for refused in refused {
            assert_eq!(refused.unwrap_err().kind(), ErrorKind::NotAllowed);
        }
        stream.copy(&other.whole(), &whole).unwrap();
        let mut bytes = [7; 4096];
        stream.download(&other.whole(), &mut bytes, PATIENCE).unwrap();
        assert_eq!(bytes, [0; 4096]);
    }

    /// Begun and waited for again and again, a stream makes no further events, and keeps no
    /// memory that nobody needs.
    #[test]
    fn steady_use_makes_no_events() {
        let device = Device::open("stand-in:1".parse().unwrap()).unwrap();
        let (to, from) = (device.allocate(4096).unwrap(), device.allocate(4096).unwrap());
        let stream = device.stream().unwrap();
        for _ in 0..1000 {
            stream.copy(&to.whole(), &from.whole()).unwrap();
            let point = stream.point().unwrap();
            stream.synchronize(PATIENCE).unwrap();
            assert!(point.is_done().unwrap());
        }
        let in_flight = stream.in_flight();
        assert!(in_flight.events.len() <= 3, "{} events", in_flight.events.len());
        assert!(in_flight.kept.is_empty() && in_flight.marked.is_empty());
        drop(in_flight);
        // More points than events are kept, none of which is asked about.
        let points: Vec<_> = (0..2 * EVENTS).map(|_| stream.point().unwrap()).collect();
        points.last().unwrap().wait(PATIENCE).unwrap();
        assert!(points.iter().all(|point| point.is_done().unwrap()));
        assert_eq!(stream.in_flight().events.len(), EVENTS);
        drop(points);
        drop(stream.point().unwrap());
        assert_eq!(stream.in_flight().events.len(), EVENTS);
    }
}
