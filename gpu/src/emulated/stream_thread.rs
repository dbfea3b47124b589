//! The streams of an emulated device: one thread each, which runs operations in order.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use threads::{RetryBackoff, lock};

use super::{Fault, State};
use crate::checksum::checksum_from;
use crate::driver::{self, CopyEntry, EventDriver, StreamDriver};
use crate::error::{Error, ErrorKind, Result};
use crate::raw_exchange::RawExchange;

fn failed(operation: &'static str) -> Error {
    let detail = "an earlier operation on the stream failed (injected fault)";
    Error::new(operation, ErrorKind::DeviceFailed, detail)
}

/// How often an event was recorded, and how often that point was reached.
#[derive(Debug, Default)]
struct EventState {
    recorded: AtomicU64,
    reached: AtomicU64,
    has_failed: AtomicU64,
    /// When the last point was reached, in nanoseconds since the first one of all events.
    reached_at: AtomicU64,
}

#[derive(Debug, Clone, Default)]
pub(super) struct Event(Arc<EventState>);

impl EventDriver for Event {
    fn is_done(&self) -> Result<bool> {
        let points = &self.0;
        // Read the point first, then the failure: a failed stream stores its failure before it
        // reaches a point.
        let is_reached = self.has_reached(points.recorded.load(Ordering::Acquire));
        if points.has_failed.load(Ordering::Acquire) != 0 {
            return Err(failed("query event"));
        }
        Ok(is_reached)
    }

    fn time_since(&self, earlier: &dyn EventDriver) -> Result<Option<Duration>> {
        let earlier: &Self = driver::downcast("read time of event", earlier)?;
        if !self.is_done()? || !earlier.is_done()? {
            return Ok(None);
        }
        let at = |event: &Self| event.0.reached_at.load(Ordering::Acquire);
        Ok(Some(Duration::from_nanos(at(self).saturating_sub(at(earlier)))))
    }
}

fn nanoseconds() -> u64 {
    static FIRST: OnceLock<Instant> = OnceLock::new();
    FIRST.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

impl Event {
    fn has_reached(&self, point: u64) -> bool {
        self.0.reached.load(Ordering::Acquire) >= point
    }
}

enum Operation {
    Copy { to: u64, from: u64, length: u64 },
    Fill { to: u64, byte: u8, length: u64 },
    Checksum { from: u64, length: u64, result: u64 },
    CopyList { list: u64, count: u32 },
    WriteWord { to: u64, value: u32 },
    WaitForWord { at: u64, min_value: u32 },
    Exchange(Box<RawExchange>),
    Record { event: Event, point: u64 },
    Wait { event: Event, point: u64 },
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Operation>,
    is_busy: bool,
    has_failed: bool,
    is_over: bool,
}

struct WorkQueue {
    queue: Mutex<Queue>,
    changed: Condvar,
    state: &'static State,
}

/// A thread and its work queue.
pub(super) struct Stream {
    work_queue: Arc<WorkQueue>,
    worker: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("emulated::Stream")
    }
}

impl Stream {
    pub(super) fn start(state: &'static State) -> Result<Self> {
        let queue = Mutex::default();
        let work_queue = Arc::new(WorkQueue { queue, changed: Condvar::new(), state });
        let thread_queue = Arc::clone(&work_queue);
        let worker = threads::spawn("emulated", move || work(&thread_queue))
            .map_err(|_| Error::system("create stream", "clone"))?;
        Ok(Self { work_queue, worker: Some(worker) })
    }

    fn push(&self, operation: Operation) -> Result<()> {
        lock(&self.work_queue.queue).waiting.push_back(operation);
        self.work_queue.changed.notify_one();
        Ok(())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        lock(&self.work_queue.queue).is_over = true;
        self.work_queue.changed.notify_one();
        if let Some(worker) = self.worker.take() {
            let _ = worker.join();
        }
    }
}

impl StreamDriver for Stream {
    unsafe fn copy(&self, to: u64, from: u64, length: u64) -> Result<()> {
        self.push(Operation::Copy { to, from, length })
    }

    unsafe fn fill(&self, to: u64, byte: u8, length: u64) -> Result<()> {
        self.push(Operation::Fill { to, byte, length })
    }

    unsafe fn checksum(&self, from: u64, length: u64, result: u64) -> Result<()> {
        self.push(Operation::Checksum { from, length, result })
    }

    unsafe fn copy_list(&self, list: u64, count: u32, _bytes: u64) -> Result<()> {
        self.push(Operation::CopyList { list, count })
    }

    unsafe fn write_word(&self, to: u64, value: u32) -> Result<()> {
        self.work_queue.state.check_fault(Fault::Words, "write word", "writes of words")?;
        self.push(Operation::WriteWord { to, value })
    }

    unsafe fn wait_for_word(&self, at: u64, min_value: u32) -> Result<()> {
        self.push(Operation::WaitForWord { at, min_value })
    }

    unsafe fn exchange(&self, exchange: &RawExchange, _blocks: u32) -> Result<()> {
        self.push(Operation::Exchange(Box::new(*exchange)))
    }

    fn record(&self, event: &dyn EventDriver) -> Result<()> {
        let event: &Event = driver::downcast("record event", event)?;
        self.work_queue.state.check_fault(Fault::Records, "record event", "event records")?;
        let point = event.0.recorded.fetch_add(1, Ordering::AcqRel) + 1;
        self.push(Operation::Record { event: event.clone(), point })
    }

    fn wait(&self, event: &dyn EventDriver) -> Result<()> {
        let event: &Event = driver::downcast("wait for event", event)?;
        let point = event.0.recorded.load(Ordering::Acquire);
        self.push(Operation::Wait { event: event.clone(), point })
    }

    fn is_capturing(&self) -> Result<bool> {
        Ok(false)
    }

    fn is_done(&self) -> Result<bool> {
        let queue = lock(&self.work_queue.queue);
        if queue.has_failed {
            return Err(failed("query stream"));
        }
        Ok(queue.waiting.is_empty() && !queue.is_busy)
    }
}

fn work(work_queue: &WorkQueue) {
    let mut queue = lock(&work_queue.queue);
    loop {
        let Some(operation) = queue.waiting.pop_front() else {
            if queue.is_over {
                return;
            }
            queue = work_queue.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        queue.is_busy = true;
        let has_failed = queue.has_failed;
        drop(queue);
        let is_good = perform(work_queue, operation, has_failed);
        queue = lock(&work_queue.queue);
        queue.is_busy = false;
        queue.has_failed |= !is_good;
    }
}

/// Returns false if it failed. After a failure only events are handled.
fn perform(work_queue: &WorkQueue, operation: Operation, has_failed: bool) -> bool {
    match &operation {
        Operation::Copy { .. }
        | Operation::Fill { .. }
        | Operation::Checksum { .. }
        | Operation::CopyList { .. }
        | Operation::Exchange(_)
        | Operation::WriteWord { .. } => {}
        // A failed device waits for nothing.
        Operation::WaitForWord { .. } | Operation::Wait { .. } if has_failed => return false,
        Operation::WaitForWord { at, min_value } => {
            let (at, min_value) = (*at as *const AtomicU32, *min_value);
            // SAFETY: four aligned bytes that stay valid until this is done.
            let word = unsafe { &*at };
            return wait(work_queue, || {
                word.load(Ordering::Acquire).wrapping_sub(min_value) as i32 >= 0
            });
        }
        Operation::Record { event, point } => {
            let points = &event.0;
            if has_failed {
                points.has_failed.store(1, Ordering::Release);
            }
            points.reached_at.store(nanoseconds(), Ordering::Release);
            points.reached.fetch_max(*point, Ordering::AcqRel);
            return true;
        }
        Operation::Wait { event, point } => return wait(work_queue, || event.has_reached(*point)),
    }
    if has_failed || work_queue.state.faults.fails_now() {
        return false;
    }
    let delay = work_queue.state.faults.delay();
    if !delay.is_zero() {
        std::thread::sleep(delay);
    }
    // As on any device, two unordered streams may copy the same bytes at the same time, with an
    // undefined result. Only such copies access the bytes.
    //
    // SAFETY: the caller keeps all ranges, and a list, valid until the operation is done, and
    // no references to the bytes exist.
    unsafe {
        match operation {
            Operation::Copy { to, from, length } => {
                ptr::copy(from as *const u8, to as *mut u8, length as usize);
            }
            Operation::Fill { to, byte, length } => {
                ptr::write_bytes(to as *mut u8, byte, length as usize);
            }
            Operation::Checksum { from, length, result } => {
                let sum = checksum_of(from as *const u8, length as usize);
                (result as *mut u64).write_volatile(sum);
            }
            Operation::CopyList { list, count } => {
                for number in 0..count as usize {
                    let CopyEntry { to, from, length } =
                        (list as *const CopyEntry).add(number).read();
                    ptr::copy(from as *const u8, to as *mut u8, length as usize);
                }
            }
            Operation::Exchange(exchange) => {
                return exchange.run_on_host(|is_over| wait(work_queue, is_over));
            }
            Operation::WriteWord { to, value } => {
                (*(to as *const AtomicU32)).store(value, Ordering::Release);
            }
            Operation::WaitForWord { .. } | Operation::Record { .. } | Operation::Wait { .. } => {}
        }
    }
    true
}

/// Copies through a buffer: other threads may write the bytes at the same time, so no reference
/// to them may exist.
///
/// # Safety
/// The range is valid for reads.
unsafe fn checksum_of(from: *const u8, length: usize) -> u64 {
    let mut buffer = [0; 4096];
    let mut sum = 0_u64;
    for at in (0..length).step_by(buffer.len()) {
        let chunk = buffer.len().min(length - at);
        // SAFETY: inside of the range, and of the buffer.
        unsafe { ptr::copy_nonoverlapping(from.add(at), buffer.as_mut_ptr(), chunk) };
        sum = sum.wrapping_add(checksum_from(at as u64 / 8, &buffer[..chunk]));
    }
    sum
}

/// The number of streams of all emulated devices that wait now.
static WAITING: AtomicU32 = AtomicU32::new(0);

/// Returns when no stream waits, like a driver's calls that free memory. Those block for as
/// long as a stream waits; this ends after 20 s, so that no test hangs.
pub(super) fn wait_until_no_stream_waits() {
    const TIMEOUT: Duration = Duration::from_secs(20);
    let start = Instant::now();
    while WAITING.load(Ordering::Acquire) > 0 && start.elapsed() < TIMEOUT {
        std::thread::sleep(Duration::from_micros(200));
    }
}

fn wait(work_queue: &WorkQueue, is_over: impl Fn() -> bool) -> bool {
    if is_over() {
        return true;
    }
    WAITING.fetch_add(1, Ordering::AcqRel);
    let was_reached = until(work_queue, is_over);
    WAITING.fetch_sub(1, Ordering::AcqRel);
    was_reached
}

fn until(work_queue: &WorkQueue, is_over: impl Fn() -> bool) -> bool {
    let mut backoff = RetryBackoff::new(Duration::from_micros(20), Duration::from_millis(1));
    while !is_over() {
        if lock(&work_queue.queue).is_over {
            return false;
        }
        std::thread::sleep(backoff.next_pause());
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A thread that queries at the moment when a failed stream reaches a point must get the
    /// failure.
    #[test]
    fn points_of_a_failed_stream_fail() {
        let events: Vec<_> = (0..50_000).map(|_| Event::default()).collect();
        let queue = Mutex::default();
        let work_queue =
            WorkQueue { queue, changed: Condvar::new(), state: super::super::state(0) };
        events.iter().for_each(|event| event.0.recorded.store(1, Ordering::Release));
        // The number of events queried so far.
        let asked = AtomicU64::new(0);
        let mut successes = 0;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for (number, event) in (1..).zip(&events) {
                    while asked.load(Ordering::Relaxed) < number {
                        std::thread::yield_now();
                    }
                    perform(
                        &work_queue,
                        Operation::Record { event: event.clone(), point: 1 },
                        true,
                    );
                }
            });
            for event in &events {
                asked.fetch_add(1, Ordering::Relaxed);
                let answer = loop {
                    match event.is_done() {
                        Ok(false) => std::thread::yield_now(),
                        answer => break answer,
                    }
                };
                successes += u32::from(answer.is_ok());
            }
        });
        assert_eq!(successes, 0);
    }
}
