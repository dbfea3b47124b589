//! Publishers, and the memory that they borrow for messages.

use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use gpu::{Device, Slice};
use ipc::Interruption;
use pubsub::{Attempt, ErrorKind, Loan, MemoryLocation, Publisher, Topic};

use crate::device::{self, CallerMemory};
use crate::exclusive::Exclusive;
use crate::failure::{Failure, Result};
use crate::ffi::{Bytes, CallerRange, OptionalOutStruct, Out, OutStruct, export};
use crate::handle::Handle;
use crate::layout::{RawCounters, RawSent, Timeout};
use crate::registry;
use crate::status::Status;
use crate::topic::OpenTopic;

/// One who publishes.
#[derive(Debug)]
pub(crate) struct OpenPublisher {
    pub(crate) publisher: Publisher,
    pub(crate) memory: MemoryLocation,
    /// That messages were brought from last: to open one takes long.
    source: Mutex<Option<Device>>,
}

pub(crate) const NO_ROOM: Failure =
    Failure::fixed(Status::WouldBlock, c"publish", c"publish: would block: there is no room");

const TOO_LATE: Failure = Failure::fixed(
    Status::DeadlineExceeded,
    c"publish",
    c"publish: deadline exceeded: the topic is full: subscribers have not released messages, or a stopped \
      process holds a lock. Release samples, or deepen the topic",
);

impl OpenPublisher {
    pub(crate) fn new(topic: &Topic) -> Result<Self> {
        let (publisher, memory) = (topic.publisher()?, topic.settings()?.memory);
        Ok(Self { publisher, memory, source: Mutex::default() })
    }

    pub(crate) fn push(&self, bytes: &[u8], timeout: Timeout) -> Result<()> {
        match timeout {
            Timeout::Now => self.publisher.try_push(bytes)?.ok_or(NO_ROOM)?,
            _ => self.publisher.push(bytes, timeout.as_duration())?,
        };
        Ok(())
    }

    /// From wherever it is.
    pub(crate) fn push_from(&self, found: &CallerMemory<'_>, timeout: Timeout) -> Result<()> {
        match (found, timeout) {
            (CallerMemory::Host(bytes), _) => return self.push(bytes, timeout),
            (CallerMemory::Device(slice), _) if !self.is_on_such_a_device(slice) => {
                let device = slice.memory().mapped_for().clone();
                let before =
                    self.source.lock().unwrap_or_else(PoisonError::into_inner).replace(device);
                drop(before);
                // The copy from the device counts against the deadline, too.
                let end = timeout.end();
                let bytes = brought(slice, timeout)?;
                let left = match timeout {
                    Timeout::For(_) => Timeout::For(end.saturating_duration_since(Instant::now())),
                    _ => timeout,
                };
                return self.push(&bytes, left);
            }
            (CallerMemory::Device(slice), Timeout::Now) => {
                self.publisher.try_push_slice(slice)?.ok_or(NO_ROOM)?
            }
            (CallerMemory::Device(slice), _) => {
                self.publisher.push_slice(slice, timeout.as_duration())?
            }
        };
        Ok(())
    }

    /// Can the topic's device copy from there?
    fn is_on_such_a_device(&self, slice: &Slice) -> bool {
        let implementation = slice.memory().mapped_for().name().implementation;
        matches!(self.memory, MemoryLocation::Device(name) if name.implementation == implementation)
    }
}

/// A device's bytes on the host, for a topic whose messages lie there.
fn brought(slice: &Slice, timeout: Timeout) -> Result<Vec<u8>> {
    let mut bytes = vec![0; slice.length() as usize];
    let longest = match timeout {
        Timeout::Now => gpu::DEFAULT_TIMEOUT,
        _ => timeout.as_duration(),
    };
    let stream = slice.memory().mapped_for().default_stream()?;
    stream.download(slice, &mut bytes, longest)?;
    Ok(bytes)
}

const INTERRUPTED: Failure = Failure::fixed(
    Status::Interrupted,
    c"publish",
    c"publish: interrupted: a signal handler ran in the waiting thread. Call again to continue",
);

/// Why a loan was not published that is there still.
pub(crate) fn not_published(timeout: Timeout, interruption: &Interruption) -> Failure {
    match timeout {
        Timeout::Now => NO_ROOM,
        _ if interruption.occurred() => INTERRUPTED,
        _ => TOO_LATE,
    }
}

/// Between two looks whether the handle was closed, during which a signal handler is not noticed.
const CLOSE_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Waits in pieces, each of which finds the handle again.
pub(crate) fn wait_for_subscribers(
    operation: &'static CStr,
    count: u64,
    timeout: Timeout,
    wait: impl Fn(u32, Duration) -> Result<SubscriberWait>,
) -> Result<()> {
    let count = u32::try_from(count)
        .map_err(|_| Failure::invalid(operation, "too many subscribers for a topic"))?;
    let end = timeout.end();
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let waited = wait(count, left.min(CLOSE_CHECK_INTERVAL))?;
        match waited.ended {
            Ok(_) => return Ok(()),
            Err(error) if error.kind() != ErrorKind::DeadlineExceeded => return Err(error.into()),
            Err(_) if left > CLOSE_CHECK_INTERVAL => {}
            Err(_) if timeout == Timeout::Now => {
                return Err(Failure::new(
                    Status::WouldBlock,
                    operation,
                    "fewer subscribers exist now",
                ));
            }
            Err(error) => {
                // Of the whole wait, and not of its last piece.
                let there = waited.subscribers;
                let plural = if there == 1 { "" } else { "s" };
                let within = timeout.as_duration();
                let detail = format!("{there} subscriber{plural} of {count} after {within:?}");
                return Err(error.with_detail(detail).into());
            }
        }
    }
}

/// How a piece of a wait for subscribers ended, and how many there are.
pub(crate) struct SubscriberWait {
    ended: pubsub::Result<u32>,
    subscribers: u32,
}

impl SubscriberWait {
    pub(crate) fn once(publisher: &Publisher, count: u32, longest: Duration) -> Self {
        let ended = publisher.wait_for_subscribers(count, longest);
        Self { ended, subscribers: publisher.subscribers() }
    }
}

/// Publishes what a handle names. If there is no room, or not in time, the loan is as it was.
pub(crate) fn publish(
    operation: &'static CStr,
    loan: Handle<Exclusive<Loan>>,
    timeout: Timeout,
    sent: OptionalOutStruct<'_, RawSent>,
    attempt: impl FnOnce(Loan, Duration) -> pubsub::Result<Attempt>,
) -> Result<()> {
    // Only who has a deadline pays for a look at the clock.
    let start = matches!(timeout, Timeout::For(_)).then(Instant::now);
    let found = loan.find(operation)?;
    let mut taken = found.take(operation, timeout)?;
    let Some(lent) = taken.remove() else {
        return Err(NO_ROOM);
    };
    // Without the time that it took to get one's turn.
    let waited = start.map_or(Duration::ZERO, |start| start.elapsed());
    let interruption = Interruption::watch();
    let done = match attempt(lent, timeout.as_duration().saturating_sub(waited)) {
        Ok(Attempt::Sent(done)) => Ok(done),
        Ok(Attempt::Full(lent)) => {
            taken.put_back(lent);
            return Err(not_published(timeout, &interruption));
        }
        Err(error) => Err(error),
    };
    // It is no loan any more, also if another thread has closed the handle meanwhile.
    let _ = loan.close(operation).map(|closed| closed.end());
    let done = done?;
    sent.0.map_or(Ok(()), |sent| sent.put(RawSent::of(&done)))
}

export! {
    /// One who publishes.
    fn fabricast_publisher_open(
        topic: Handle<OpenTopic>,
        publisher: Out<'_, *mut OpenPublisher>,
    ) -> i32, c"open a publisher" {
        let topic = topic.find(OPERATION)?;
        publisher.put(registry::open(OPERATION, OpenPublisher::new(&topic.topic)?)?)
    }

    /// Does not publish any more.
    fn fabricast_publisher_close(
        publisher: Option<Handle<OpenPublisher>>,
    ) -> i32, c"close a publisher" {
        registry::close(OPERATION, publisher)
    }

    /// Its identity within the topic.
    fn fabricast_publisher_identity(
        publisher: Handle<OpenPublisher>,
        identity: Out<'_, u64>,
    ) -> i32, c"tell a publisher's identity" {
        let publisher = publisher.find(OPERATION)?;
        identity.put(publisher.publisher.id().as_u64())
    }

    /// How many would get a message now.
    fn fabricast_publisher_subscribers(
        publisher: Handle<OpenPublisher>,
        count: Out<'_, u64>,
    ) -> i32, c"count a publisher's subscribers" {
        count.put(u64::from(publisher.find(OPERATION)?.publisher.subscribers()))
    }

    /// Waits until so many would get a message.
    fn fabricast_publisher_wait_for_subscribers(
        publisher: Handle<OpenPublisher>,
        count: u64,
        timeout: Timeout,
    ) -> i32, c"wait for subscribers" {
        wait_for_subscribers(OPERATION, count, timeout, |count, longest| {
            Ok(SubscriberWait::once(&publisher.find(OPERATION)?.publisher, count, longest))
        })
    }

    /// What it has done so far.
    fn fabricast_publisher_counters_of(
        publisher: Handle<OpenPublisher>,
        counters: OutStruct<'_, RawCounters>[size],
    ) -> i32, c"tell a publisher's counters" {
        counters.put(RawCounters::of(&publisher.find(OPERATION)?.publisher.counters()))
    }

    /// Publishes bytes of the host's memory.
    fn fabricast_publisher_push(
        publisher: Handle<OpenPublisher>,
        data: Bytes<'_>[length],
        timeout: Timeout,
    ) -> i32, c"push" {
        publisher.find(OPERATION)?.push(data.0, timeout)
    }

    /// Publishes memory of a device.
    fn fabricast_publisher_push_device(
        publisher: Handle<OpenPublisher>,
        pointer: CallerRange<'_>[length],
        timeout: Timeout,
    ) -> i32, c"push from a device's memory" {
        let publisher = publisher.find(OPERATION)?;
        let found = device::find(publisher.memory, OPERATION, pointer)?;
        publisher.push_from(&found, timeout)
    }

    /// Waits until all that it published was read.
    fn fabricast_publisher_flush(
        publisher: Handle<OpenPublisher>,
        timeout: Timeout,
    ) -> i32, c"flush" {
        let publisher = publisher.find(OPERATION)?;
        let flushed = publisher.publisher.flush(timeout.as_duration());
        flushed.map_err(|error| match (error.kind(), timeout) {
            (ErrorKind::DeadlineExceeded, Timeout::Now) => {
                Failure::new(Status::WouldBlock, OPERATION, error.detail())
            }
            _ => error.into(),
        })
    }

    /// Borrows memory for a message.
    fn fabricast_publisher_loan(
        publisher: Handle<OpenPublisher>,
        length: usize,
        timeout: Timeout,
        loan: Out<'_, *mut Exclusive<Loan>>,
    ) -> i32, c"borrow memory for a message" {
        let publisher = publisher.find(OPERATION)?;
        let (publisher, length) = (&publisher.publisher, length as u64);
        let borrowed = match timeout {
            Timeout::Now => publisher.try_loan(length)?.ok_or(NO_ROOM)?,
            _ => publisher.loan(length, timeout.as_duration())?,
        };
        loan.put(registry::open(OPERATION, Exclusive::new(borrowed))?)
    }

    /// Where it is.
    fn fabricast_loan_memory(
        loan: Handle<Exclusive<Loan>>,
        address: Out<'_, *mut c_void>,
        length: Out<'_, usize>,
    ) -> i32, c"tell where a loan is" {
        loan.find(OPERATION)?.with(OPERATION, Timeout::Forever, |loan| {
            address.put(ptr::with_exposed_provenance_mut(loan.address() as usize))?;
            length.put(loan.length() as usize)
        })
    }

    /// Writes into it.
    fn fabricast_loan_write(
        loan: Handle<Exclusive<Loan>>,
        offset: usize,
        data: Bytes<'_>[length],
    ) -> i32, c"write into a loan" {
        loan.find(OPERATION)?.with(OPERATION, Timeout::Forever, |loan| {
            Ok(loan.write(offset as u64, data.0)?)
        })
    }

    /// Attaches a few bytes to the message.
    fn fabricast_loan_set_metadata(
        loan: Handle<Exclusive<Loan>>,
        data: Bytes<'_>[length],
    ) -> i32, c"attach metadata" {
        loan.find(OPERATION)?.with(OPERATION, Timeout::Forever, |loan| {
            Ok(loan.set_metadata(data.0)?)
        })
    }

    /// Publishes it. If there is no room, or not in time, the loan is as it was.
    fn fabricast_loan_publish(
        loan: Handle<Exclusive<Loan>>,
        timeout: Timeout,
        sent: OptionalOutStruct<'_, RawSent>[size],
    ) -> i32, c"publish" {
        publish(OPERATION, loan, timeout, sent, Loan::publish_within)
    }

    /// Gives the memory back.
    fn fabricast_loan_discard(loan: Option<Handle<Exclusive<Loan>>>) -> i32, c"give a loan back" {
        if let Some(loan) = loan {
            loan.close(OPERATION)?.end();
        }
        Ok(())
    }
}
