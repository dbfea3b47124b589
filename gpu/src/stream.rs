//! Operations in order, and the ownership of their memory.
//!
//! A call only starts an operation; its memory must not be freed until it is done. So a stream
//! holds a reference to all memory of its operations, and releases it when a later event is
//! done.
#![allow(unsafe_code)]

mod copy_blocks;
mod exchange;
mod prepared_blocks;

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use crate::device::Device;
use crate::driver::{DeviceDriver, EventDriver, PinnedBuffer, StreamDriver};
use crate::error::{Error, ErrorKind, Result, proves_idle};
use crate::event::{Event, Point};
use crate::look_schedule::CopyTimes;
use crate::memory::{Memory, MemoryInner, Slice};
use crate::reuse::ReusePool;
use crate::stream_waits::StreamWaits;
use crate::waiting;

pub use copy_blocks::{Block, CopyMethod};
pub use exchange::{Exchange, ExchangeCopy, ExchangePlace, ExchangeReduction};
pub use prepared_blocks::PreparedBlocks;
use threads::lock;

/// Number of operations after which the stream records an event of its own, so that memory is
/// released even if no caller waits for the stream.
const SWEEP_INTERVAL: usize = 64;
/// Number of events that a stream keeps for reuse: more than are normally pending. Further
/// events are created and destroyed, which costs some microseconds.
const MAX_SPARE_EVENTS: usize = 64;
/// Bytes that are moved at once between the caller's memory and a device.
const BOUNCE: usize = 1 << 20;
/// How long the drop of a stream waits for its operations.
const DROP_TIMEOUT: Duration = Duration::from_secs(10);

static LEAKS: AtomicU64 = AtomicU64::new(0);

/// Number of streams that were dropped while an operation hung, and whose memory was therefore
/// leaked.
#[must_use]
pub fn leaked_streams() -> u64 {
    LEAKS.load(Ordering::Relaxed)
}

/// A queue of operations, which run in order while the caller continues.
///
/// ```
/// # use gpu::Device;
/// let device = Device::open("emulated:0".parse()?)?;
/// let (from, to) = (device.allocate(4096)?, device.allocate(4096)?);
/// let (first, second) = (device.stream()?, device.stream()?);
/// first.fill(&from.whole(), 1)?;
/// let filled = device.event()?;
/// first.record(&filled)?;
/// second.wait_for(&filled)?; // orders the streams; the caller does not wait
/// second.copy(&to.whole(), &from.whole())?;
/// second.synchronize(gpu::DEFAULT_TIMEOUT)?;
/// # Ok::<(), gpu::Error>(())
/// ```
pub struct Stream {
    device: Device,
    raw: Option<Arc<dyn StreamDriver>>,
    /// The waits of the stream, for threads that free memory.
    waits: Arc<StreamWaits>,
    /// True if other libraries start operations on it, too.
    is_adopted: bool,
    in_flight: Mutex<InFlight>,
    /// For transfers of the caller's own memory: one at a time.
    bounce: Mutex<Option<Arc<dyn PinnedBuffer>>>,
    /// The lists of blocks that kernels read.
    lists: Mutex<ReusePool<dyn PinnedBuffer>>,
    /// The result of closing it, if it was closed.
    closed: Option<bool>,
}

/// The memory of operations that are not known to be done, in their order.
#[derive(Default)]
struct InFlight {
    retained: VecDeque<Retained>,
    /// The number of the last operations that are not covered by an event yet.
    since_last: usize,
    /// Events, and how many operations each covers.
    marked: VecDeque<(Arc<dyn EventDriver>, usize)>,
    /// The event behind all operations and waits so far, if there is one.
    last: Option<Arc<dyn EventDriver>>,
    events: ReusePool<dyn EventDriver>,
    /// Empty: its capacity is reused for released references.
    spare: Vec<Retained>,
    /// Copies since the stream was last known to be idle.
    unfinished: Option<Unfinished>,
    times: CopyTimes,
}

/// Copies that were not waited for.
#[derive(Clone, Copy)]
struct Unfinished {
    since: Instant,
    bytes: u64,
}

/// The references that an operation holds.
enum Retained {
    Memory { _held: Arc<MemoryInner> },
    Block { _held: Arc<dyn PinnedBuffer> },
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({})", self.device.name())
    }
}

impl Stream {
    fn new(device: &Device, raw: Box<dyn StreamDriver>, is_adopted: bool) -> Self {
        let raw: Arc<dyn StreamDriver> = Arc::from(raw);
        // An adopted stream is never queried, because its owner may destroy it.
        let queried = (!is_adopted).then_some(&raw);
        Self {
            waits: StreamWaits::new(device.name().implementation, queried),
            device: device.clone(),
            raw: Some(raw),
            is_adopted,
            in_flight: Mutex::default(),
            bounce: Mutex::default(),
            lists: Mutex::default(),
            closed: None,
        }
    }

    /// The device that runs it.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Copies between any memory that this device can access.
    ///
    /// # Errors
    /// [`NoPeerAccess`](ErrorKind::NoPeerAccess) if one side is on another device that this
    /// device has no access to; [`NotAllowed`](ErrorKind::NotAllowed) if `to` is read-only;
    /// different lengths.
    pub fn copy(&self, to: &Slice, from: &Slice) -> Result<()> {
        let operation = "copy memory";
        if to.length() != from.length() {
            let detail = format!("{} bytes to {} bytes", from.length(), to.length());
            return Err(self.refuse(operation, ErrorKind::InvalidArgument, detail));
        }
        self.check_writable(operation, to)?;
        self.check_reach(operation, from)?;
        self.begin(operation, &[to, from], None, |raw| {
            // SAFETY: both are kept alive until an event behind the copy is done.
            unsafe { raw.copy(to.address(), from.address(), to.length()) }
        })?;
        self.note_copy(to.length());
        Ok(())
    }

    /// Takes a copy that has begun into account, for a wait.
    fn note_copy(&self, bytes: u64) {
        if bytes >= CopyTimes::SHORTEST {
            let mut in_flight = lock(&self.in_flight);
            let new = || Unfinished { since: Instant::now(), bytes: 0 };
            in_flight.unfinished.get_or_insert_with(new).bytes += bytes;
        }
    }

    /// Fills with a byte.
    ///
    /// # Errors
    /// As for [copying](Self::copy).
    pub fn fill(&self, to: &Slice, byte: u8) -> Result<()> {
        let operation = "fill memory";
        self.check_writable(operation, to)?;
        self.begin(operation, &[to], None, |raw| {
            // SAFETY: kept alive until an event behind it is done.
            unsafe { raw.fill(to.address(), byte, to.length()) }
        })
    }

    /// The [checksum](crate::checksum) of a range, computed by the device, after all earlier
    /// operations of this stream. Waits for it.
    ///
    /// # Errors
    /// As for [copying](Self::copy);
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded).
    pub fn checksum(&self, from: &Slice, timeout: Duration) -> Result<u64> {
        let operation = "checksum";
        self.check_reach(operation, from)?;
        let left = remaining(timeout);
        let (mut guard, block) = self.lock_bounce(operation, left())?;
        let result = block.address();
        self.begin(operation, &[from], Some(&block), |raw| {
            // SAFETY: range and block are kept alive until an event behind it is done.
            unsafe { raw.checksum(from.address(), from.length(), result) }
        })?;
        self.finish_with(&mut guard, left())?;
        // SAFETY: 8 bytes at the start of the block, which the device has finished writing.
        Ok(unsafe { (result as *const u64).read_volatile() })
    }

    /// Copies the caller's bytes to a range, and waits for it.
    ///
    /// # Errors
    /// As for [copying](Self::copy); [`DeadlineExceeded`](ErrorKind::DeadlineExceeded).
    pub fn upload(&self, to: &Slice, bytes: &[u8], timeout: Duration) -> Result<()> {
        self.check_length("upload", to, bytes.len())?;
        self.check_writable("upload", to)?;
        let left = remaining(timeout);
        for (number, chunk) in bytes.chunks(BOUNCE).enumerate() {
            let part = to.slice((number * BOUNCE) as u64, chunk.len() as u64)?;
            let guard = self.bounced("upload", &part, left, |block| {
                // SAFETY: the block has at least a chunk's length, and is not used by others
                // while its lock is held: the last transfer from it is done.
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
    pub fn download(&self, from: &Slice, bytes: &mut [u8], timeout: Duration) -> Result<()> {
        self.check_length("download", from, bytes.len())?;
        let left = remaining(timeout);
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

    /// Records an event at this point of the stream.
    ///
    /// # Errors
    /// If the event belongs to another implementation.
    pub fn record(&self, event: &Event) -> Result<()> {
        self.begin("record event", &[], None, |raw| raw.record(event.raw()))
    }

    /// Returns whether the stream is being captured into a graph: its operations are not carried out
    /// now.
    ///
    /// # Errors
    /// If the device failed.
    pub fn is_capturing(&self) -> Result<bool> {
        self.device.driver("query capture")?;
        self.raw().is_capturing()
    }

    /// Later operations on this stream wait for the event, or for a point of another stream.
    /// The caller does not wait. Such a wait has no deadline of its own.
    ///
    /// # Errors
    /// If the event belongs to another implementation.
    pub fn wait_for(&self, event: &Point) -> Result<()> {
        let wait = |raw: &dyn StreamDriver| self.waits.begin(|| raw.wait(event.raw()));
        self.begin("wait for event", &[], None, wait)
    }

    /// Writes a word after all earlier operations are done: a reader that finds `value` also
    /// sees their writes. Costs less than [recording](Self::record) an event. Processes and
    /// devices can read the word, if it is in memory that they share.
    ///
    /// ```
    /// # use gpu::Device;
    /// # let device = Device::open("emulated:0".parse()?)?;
    /// # let (data, word) = (device.allocate(4096)?, device.allocate(4)?);
    /// let (first, second) = (device.stream()?, device.stream()?);
    /// second.wait_for_word(&word.whole(), 7)?; // the writer need not exist yet
    /// first.fill(&data.whole(), 1)?;
    /// first.write_word(&word.whole(), 7)?;
    /// second.synchronize(gpu::DEFAULT_TIMEOUT)?;
    /// # Ok::<(), gpu::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [copying](Self::copy); [`InvalidArgument`](ErrorKind::InvalidArgument) unless `to`
    /// is four aligned bytes.
    pub fn write_word(&self, to: &Slice, value: u32) -> Result<()> {
        let operation = "write word";
        self.check_writable(operation, to)?;
        self.check_word(operation, to)?;
        self.begin(operation, &[to], None, |raw| {
            // SAFETY: four aligned bytes, kept alive until an event behind it is done.
            unsafe { raw.write_word(to.address(), value) }
        })
    }

    /// Later operations on this stream wait until the word is at least `min_value`. Numbers
    /// wrap: up to half of all numbers count as larger. The caller does not wait. Such a wait
    /// has no deadline of its own: a process must write the word, even if the process that was
    /// to write it has exited.
    ///
    /// # Errors
    /// As for [writing one](Self::write_word).
    pub fn wait_for_word(&self, at: &Slice, min_value: u32) -> Result<()> {
        let operation = "wait for word";
        self.check_word(operation, at)?;
        self.begin(operation, &[at], None, |raw| {
            // SAFETY: four aligned bytes, kept alive until an event behind it is done.
            self.waits.begin(|| unsafe { raw.wait_for_word(at.address(), min_value) })
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

    /// Are all operations done?
    ///
    /// # Errors
    /// If one of the operations failed.
    pub fn is_done(&self) -> Result<bool> {
        self.device.call("query stream", |_| self.raw().is_done())
    }

    /// Waits until all operations so far are done.
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded): the operations continue. Or the error
    /// of a failed operation.
    pub fn synchronize(&self, timeout: Duration) -> Result<()> {
        let operation = "synchronize stream";
        let driver = self.device.driver(operation)?;
        let begin = Instant::now();
        let (last, unfinished, estimate) = {
            let mut in_flight = lock(&self.in_flight);
            let last = self.mark(driver, &mut in_flight)?;
            let unfinished = in_flight.unfinished.take();
            let estimate =
                unfinished.and_then(|of| Some(of.since + in_flight.times.estimate(of.bytes)?));
            (last, unfinished, estimate)
        };
        let in_progress =
            waiting::wait_for_end(operation, timeout, estimate, || driver.is_event_done(&*last))
                .map_err(|error| error.on(self.device.name()))?;
        let done = Instant::now();
        let mut in_flight = lock(&self.in_flight);
        if let (Some(Unfinished { since, bytes }), Some(in_progress)) = (unfinished, in_progress) {
            let at_most = done - since;
            // Otherwise the copies may have ended before the wait: its event is new.
            if begin - since <= at_most / 8 {
                in_flight.times.learn(bytes, in_progress - since, at_most);
            }
        }
        self.sweep(driver, in_flight);
        Ok(())
    }

    /// Marks this point of the stream, which any thread can query later. Costs as much as
    /// recording an event, and reuses events where possible. Later operations do not wait for
    /// it.
    ///
    /// ```
    /// # let device = gpu::Device::open("emulated:0".parse()?)?;
    /// # let (from, to) = (device.allocate(4096)?, device.allocate(4096)?);
    /// let stream = device.stream()?;
    /// stream.copy(&to.whole(), &from.whole())?;
    /// let copied = stream.point()?;
    /// stream.fill(&from.whole(), 0)?;
    /// while !copied.is_done()? {} // … or do other work
    /// # Ok::<(), gpu::Error>(())
    /// ```
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn point(&self) -> Result<Point> {
        let driver = self.device.driver("create event")?;
        let mut in_flight = lock(&self.in_flight);
        let event = self.mark(driver, &mut in_flight)?;
        // A caller that only marks and queries must get its memory back as well.
        self.sweep(driver, in_flight);
        Ok(Point::new(self.device.clone(), event))
    }

    /// Are all operations before this point of the stream done? Then the memory that they used is
    /// released, which otherwise happens with the next point or [`synchronize`](Self::synchronize).
    /// Does not wait.
    ///
    /// ```
    /// # let device = gpu::Device::open("emulated:0".parse()?)?;
    /// # let (from, to) = (device.allocate(4096)?, device.allocate(4096)?);
    /// let stream = device.stream()?;
    /// stream.copy(&to.whole(), &from.whole())?;
    /// let copied = stream.point()?;
    /// while !stream.release_if_done(&copied)? {} // … or do other work
    /// drop((from, to)); // frees both
    /// # Ok::<(), gpu::Error>(())
    /// ```
    ///
    /// # Errors
    /// If one of the operations failed: its memory is kept.
    pub fn release_if_done(&self, point: &Point) -> Result<bool> {
        if !point.is_done()? {
            return Ok(false);
        }
        let mut in_flight = lock(&self.in_flight);
        let mut before = in_flight.marked.iter();
        if let Some(at) = before.position(|(event, _)| point.uses(event)) {
            let count = in_flight.marked.drain(..=at).map(|(_, retained)| retained).sum();
            self.release_first(count, in_flight);
        } else if !in_flight.marked.is_empty() {
            // No operation followed the event before it.
            self.sweep(self.device.driver("query point")?, in_flight);
        }
        Ok(true)
    }

    fn raw(&self) -> &dyn StreamDriver {
        // Only the drop takes it.
        self.raw.as_deref().unwrap_or_else(|| unreachable!("a stream in use"))
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
        let location = memory.device().map_or("the host".to_owned(), |device| device.to_string());
        let detail = format!("{} has no access to memory of {location}", self.device.name());
        Err(self.refuse(operation, ErrorKind::NoPeerAccess, detail))
    }

    fn check_writable(&self, operation: &'static str, slice: &Slice) -> Result<()> {
        if slice.memory().is_read_only() {
            let detail = format!("{slice:?} is read-only");
            return Err(self.refuse(operation, ErrorKind::NotAllowed, detail));
        }
        self.check_reach(operation, slice)
    }

    /// Starts an operation, under the lock that orders it with the references to its memory.
    fn begin(
        &self,
        operation: &'static str,
        touched: &[&Slice],
        block: Option<&Arc<dyn PinnedBuffer>>,
        begin: impl FnOnce(&dyn StreamDriver) -> Result<()>,
    ) -> Result<()> {
        let driver = self.device.driver(operation)?;
        let mut in_flight = lock(&self.in_flight);
        let before = in_flight.retained.len();
        let memory = touched.iter().map(|slice| Retained::Memory { _held: slice.memory().inner() });
        let block = block.map(|block| Retained::Block { _held: Arc::clone(block) });
        in_flight.retained.extend(memory.chain(block));
        in_flight.since_last += in_flight.retained.len() - before;
        in_flight.last = None;
        begin(self.raw()).map_err(|error| error.on(self.device.name()))?;
        if in_flight.since_last >= SWEEP_INTERVAL {
            self.mark(driver, &mut in_flight)?;
            self.sweep(driver, in_flight);
        }
        Ok(())
    }

    /// Records an event behind all operations so far. It is not reused as long as a reference
    /// to it exists.
    fn mark(
        &self,
        driver: &dyn DeviceDriver,
        in_flight: &mut InFlight,
    ) -> Result<Arc<dyn EventDriver>> {
        let on = |error: Error| error.on(self.device.name());
        let is_reached = |event: &_| matches!(driver.is_event_done(event), Ok(true));
        in_flight.last = None;
        let event = match in_flight.events.take(is_reached) {
            Some(event) => event,
            None => {
                let made = driver.event().map_err(on)?;
                if in_flight.events.len() < MAX_SPARE_EVENTS {
                    in_flight.events.keep(&made);
                }
                made
            }
        };
        self.raw().record(&*event).map_err(on)?;
        self.waits.mark(&event);
        if in_flight.since_last > 0 {
            let count = std::mem::take(&mut in_flight.since_last);
            in_flight.marked.push_back((Arc::clone(&event), count));
        }
        in_flight.last = Some(Arc::clone(&event));
        Ok(event)
    }

    /// Releases the memory of finished operations, without the lock: owners of memory may run any
    /// code. Memory of failed operations is kept, because the device may
    /// still access it.
    fn sweep(&self, driver: &dyn DeviceDriver, mut in_flight: MutexGuard<'_, InFlight>) {
        let is_done = |event: &_| matches!(driver.is_event_done(event), Ok(true));
        let mut count = 0;
        while in_flight.marked.front().is_some_and(|(event, _)| is_done(&**event)) {
            count += in_flight.marked.pop_front().map_or(0, |(_, retained)| retained);
        }
        if count == 0 {
            drop(in_flight);
            self.device.try_free_deferred();
            return;
        }
        self.release_first(count, in_flight);
    }

    /// Releases this many references, the oldest ones, after the lock was released.
    fn release_first(&self, count: usize, mut in_flight: MutexGuard<'_, InFlight>) {
        let mut done = std::mem::take(&mut in_flight.spare);
        done.extend(in_flight.retained.drain(..count));
        if in_flight.retained.is_empty() {
            in_flight.unfinished = None;
        }
        drop(in_flight);
        done.clear();
        lock(&self.in_flight).spare = done;
        self.device.try_free_deferred();
    }

    /// One transfer through the bounce block: `ends` returns the destination and the source.
    fn bounced(
        &self,
        operation: &'static str,
        part: &Slice,
        left: impl Fn() -> Duration,
        ends: impl FnOnce(u64) -> (u64, u64),
    ) -> Result<BounceGuard<'_>> {
        self.check_reach(operation, part)?;
        let (mut guard, block) = self.lock_bounce(operation, left())?;
        self.device.driver(operation)?.check_context(operation)?;
        let (to, from) = ends(block.address());
        self.begin(operation, &[part], Some(&block), |raw| {
            // SAFETY: range and block are kept alive until an event behind it is done; the part
            // is no longer than the block.
            unsafe { raw.copy(to, from, part.length()) }
        })?;
        self.finish_with(&mut guard, left())?;
        Ok(guard)
    }

    /// Waits; on failure, the block stays with the operation that still uses it.
    fn finish_with(&self, block: &mut BounceGuard<'_>, timeout: Duration) -> Result<()> {
        self.synchronize(timeout).inspect_err(|_| **block = None)
    }

    /// One transfer at a time; a later caller waits no longer than its own deadline.
    fn lock_bounce(
        &self,
        operation: &'static str,
        timeout: Duration,
    ) -> Result<(BounceGuard<'_>, Arc<dyn PinnedBuffer>)> {
        let mut taken = None;
        let wait = waiting::wait_until(operation, timeout, || {
            taken = match self.bounce.try_lock() {
                Ok(guard) => Some(guard),
                Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) => None,
            };
            Ok(taken.is_some())
        });
        wait.map_err(|error| error.on(self.device.name()))?;
        let Some(mut guard) = taken else {
            let detail = "another transfer holds the bounce buffer".to_owned();
            return Err(self.refuse(operation, ErrorKind::Other, detail));
        };
        let block = match &*guard {
            Some(block) => Arc::clone(block),
            None => {
                let made = self.device.driver("allocate host memory")?.pinned_buffer(BOUNCE)?;
                Arc::clone(guard.insert(Arc::from(made)))
            }
        };
        Ok((guard, block))
    }

    /// Waits until all operations are done, and closes the stream.
    ///
    /// ```
    /// # let device = gpu::Device::open("emulated:0".parse()?)?;
    /// # let memory = device.allocate(4096)?;
    /// let stream = device.stream()?;
    /// stream.fill(&memory.whole(), 1)?;
    /// stream.close(gpu::DEFAULT_TIMEOUT)?; // the device no longer writes to this memory
    /// # Ok::<(), gpu::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded): an operation may still be in flight.
    /// The operation's memory is never freed, as if the stream had been dropped.
    /// [`DeviceFailed`](ErrorKind::DeviceFailed): no operation is in flight any more, and
    /// unfinished ones are never done.
    pub fn close(mut self, timeout: Duration) -> Result<()> {
        let outcome = self.wait_for_all("close stream", timeout);
        self.closed = Some(self.is_idle(&outcome));
        outcome.map_err(|error| error.on(self.device.name()))
    }

    /// Does this result of a wait prove that no operation of this library is in flight? In a
    /// forked child, the operations of the parent are unknown.
    fn is_idle(&self, outcome: &Result<()>) -> bool {
        self.device.is_current() && outcome.as_ref().map_or_else(proves_idle, |()| true)
    }

    /// Waits until no operation of this library is in flight. Operations of other libraries on
    /// their own stream may continue without end.
    fn wait_for_all(&self, operation: &'static str, timeout: Duration) -> Result<()> {
        let driver = self.device.driver(operation)?;
        if !self.is_adopted {
            return waiting::wait_until(operation, timeout, || {
                waiting::retry_unless_over(self.raw().is_done())
            });
        }
        let last = {
            let mut in_flight = lock(&self.in_flight);
            if in_flight.retained.is_empty() && !self.waits.is_open() {
                return Ok(());
            }
            match in_flight.last.clone() {
                Some(last) => last,
                None => self.mark(driver, &mut in_flight)?,
            }
        };
        waiting::wait_until(operation, timeout, || {
            waiting::retry_unless_over(driver.is_event_done(&*last))
        })
    }
}

/// The bounce buffer, once it is allocated.
type BounceGuard<'a> = MutexGuard<'a, Option<Arc<dyn PinnedBuffer>>>;

/// The rest of a timeout.
fn remaining(timeout: Duration) -> impl Fn() -> Duration + Copy {
    let since = Instant::now();
    move || timeout.saturating_sub(since.elapsed())
}

impl Drop for Stream {
    fn drop(&mut self) {
        let is_done = match self.closed {
            Some(is_done) => is_done,
            None if !self.device.is_current() => false,
            None => self.is_idle(&self.wait_for_all("drop stream", DROP_TIMEOUT)),
        };
        if is_done {
            return;
        }
        // An operation hangs, or the stream belongs to a parent process: memory that it may
        // still access stays.
        LEAKS.fetch_add(1, Ordering::Relaxed);
        // No locks: in a forked child, a thread that does not exist there may hold them.
        forget_content(&mut self.in_flight);
        std::mem::forget(self.raw.take());
        // It may wait for ever, and deferred memory waits with it.
        std::mem::forget(Arc::clone(&self.waits));
        forget_content(&mut self.bounce);
        forget_content(&mut self.lists);
    }
}

fn forget_content<T: Default>(mutex: &mut Mutex<T>) {
    let content = mutex.get_mut().unwrap_or_else(PoisonError::into_inner);
    std::mem::forget(std::mem::take(content));
}

impl Device {
    /// Creates a stream: a queue of operations that run in order.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn stream(&self) -> Result<Stream> {
        let raw = self.call("create stream", |driver| driver.stream())?;
        Ok(Stream::new(self, raw, false))
    }

    /// The default stream: copies of programs that name no stream run there, and it waits for
    /// all streams that are not non-blocking.
    ///
    /// An emulated device has none, and returns a new stream.
    ///
    /// # Errors
    /// If the driver refuses, for example during a graph capture.
    pub fn default_stream(&self) -> Result<Stream> {
        // SAFETY: the default stream always exists.
        unsafe { self.adopt_stream(0) }
    }

    /// Adopts a stream of another library, such as a framework's current one, by the driver's
    /// handle (a `cudaStream_t`; 0 is the default stream). Operations that either library
    /// starts on it run in the order of their start. Dropping the returned stream does not
    /// destroy it; it waits for the operations that were started here, and not for others. After the
    /// last [point](Stream::point), if that is reached, it neither waits nor accesses the stream.
    ///
    /// An emulated device has no default stream: 0 returns a new one.
    ///
    /// # Errors
    /// [`NotSupported`](crate::ErrorKind::NotSupported) for the per-thread default stream (2),
    /// which differs in every thread; for a stream that is being captured; on an emulated
    /// device, for anything but 0.
    ///
    /// # Safety
    /// The handle is a stream of this device's primary context until everything made from it is
    /// dropped, and no thread captures it during that time.
    pub unsafe fn adopt_stream(&self, handle: u64) -> Result<Stream> {
        // SAFETY: the caller's promise.
        let raw = self.call("adopt stream", |driver| unsafe { driver.adopt_stream(handle) })?;
        Ok(Stream::new(self, raw, true))
    }

    /// Lets a stream of another library wait for a point, as that library would do it: the caller
    /// does not wait, and this library does not keep track of the wait.
    ///
    /// # Errors
    /// As for [`adopt_stream`](Self::adopt_stream).
    ///
    /// # Safety
    /// As for [`adopt_stream`](Self::adopt_stream), during this call.
    pub unsafe fn delay_stream(&self, handle: u64, until: &Point) -> Result<()> {
        self.call("delay stream", |driver| {
            // SAFETY: the caller's promise.
            unsafe { driver.adopt_stream(handle) }?.wait(until.raw())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DEFAULT_TIMEOUT;

    /// Read-only host memory.
    #[derive(Debug)]
    struct ReadOnly(u64);

    // SAFETY: a page that stays mapped, and to which no reference exists.
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
    fn read_only_memory_is_not_written() {
        let device = Device::open("emulated:1".parse().unwrap()).unwrap();
        let memory = device.register(read_only()).unwrap();
        let (whole, word) = (memory.whole(), memory.slice(0, 4).unwrap());
        let other = device.allocate(4096).unwrap();
        let stream = device.stream().unwrap();
        stream.fill(&other.whole(), 1).unwrap();
        let blocks = [Block { to: 0, from: 0, length: 8 }];
        let refused = [
            stream.fill(&whole, 1),
            stream.copy(&whole, &other.whole()),
            stream.copy_blocks(&whole, &other.whole(), &blocks, CopyMethod::Best),
            stream.upload(&whole, &[1; 4096], DEFAULT_TIMEOUT),
            stream.write_word(&word, 1),
        ];
        for refused in refused {
            assert_eq!(refused.unwrap_err().kind(), ErrorKind::NotAllowed);
        }
        stream.copy(&other.whole(), &whole).unwrap();
        let mut bytes = [7; 4096];
        stream.download(&other.whole(), &mut bytes, DEFAULT_TIMEOUT).unwrap();
        assert_eq!(bytes, [0; 4096]);
    }

    /// A program that computes between a copy and its wait: the time is not taken for the copy's.
    #[test]
    fn late_wait_delays_no_later_one() {
        const COMPUTING: Duration = Duration::from_millis(200);
        let device = Device::open("emulated:1".parse().unwrap()).unwrap();
        let (to, from) = (device.allocate(1 << 20).unwrap(), device.allocate(1 << 20).unwrap());
        let stream = device.stream().unwrap();
        for _ in 0..3 {
            stream.copy(&to.whole(), &from.whole()).unwrap();
            std::thread::sleep(COMPUTING);
            stream.synchronize(DEFAULT_TIMEOUT).unwrap();
        }
        let quickest = (0..3).map(|_| {
            let begin = Instant::now();
            stream.copy(&to.whole(), &from.whole()).unwrap();
            stream.synchronize(DEFAULT_TIMEOUT).unwrap();
            begin.elapsed()
        });
        assert!(quickest.min().unwrap() < COMPUTING / 4);
    }

    /// A stream that is repeatedly used and waited for creates no further events, and keeps no
    /// unneeded memory.
    #[test]
    fn steady_use_creates_no_events() {
        let device = Device::open("emulated:1".parse().unwrap()).unwrap();
        let (to, from) = (device.allocate(4096).unwrap(), device.allocate(4096).unwrap());
        let stream = device.stream().unwrap();
        for _ in 0..1000 {
            stream.copy(&to.whole(), &from.whole()).unwrap();
            let point = stream.point().unwrap();
            stream.synchronize(DEFAULT_TIMEOUT).unwrap();
            assert!(stream.release_if_done(&point).unwrap());
        }
        let in_flight = lock(&stream.in_flight);
        assert!(in_flight.events.len() <= 3, "{} events", in_flight.events.len());
        assert!(in_flight.retained.is_empty() && in_flight.marked.is_empty());
        drop(in_flight);
        // More points than kept events, none of which is queried.
        let points: Vec<_> = (0..2 * MAX_SPARE_EVENTS).map(|_| stream.point().unwrap()).collect();
        points.last().unwrap().wait(DEFAULT_TIMEOUT).unwrap();
        assert!(points.iter().all(|point| point.is_done().unwrap()));
        assert_eq!(lock(&stream.in_flight).events.len(), MAX_SPARE_EVENTS);
        drop(points);
        drop(stream.point().unwrap());
        assert_eq!(lock(&stream.in_flight).events.len(), MAX_SPARE_EVENTS);
    }
}
