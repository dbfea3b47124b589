//! Publishers and loans.

use std::ffi::c_void;
use std::ptr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use gpu::{Device, Slice, Stream};
use ipc::Interruption;
use pubsub::{Attempt, ErrorKind, Loan, MemoryLocation, Publisher, Topic};

use crate::caller_memory::{self, CallerMemory};
use crate::exclusive::Exclusive;
use crate::failure::{Failure, Operation, Result};
use crate::ffi::{CallerRange, Out, OutStruct, export};
use crate::handle::{Handle, kind};
use crate::layout::{RawCounters, RawSent, publisher_event};
use crate::registry::{self, export_close};
use crate::status::Status;
use crate::timeout::{CLOSE_CHECK_INTERVAL, Timeout};
use crate::topic::OpenTopic;

#[derive(Debug)]
pub(crate) struct OpenPublisher {
    publisher: Publisher,
    memory: MemoryLocation,
    /// The device that messages were last downloaded from, since opening one takes long.
    source: Mutex<Option<Device>>,
}

kind!(OpenPublisher, 2, "publisher", |open: &Self| open.publisher.close());
export_close!(OpenPublisher, fabricast_publisher_close, c"close publisher");

const NO_SPACE: Failure = Failure::fixed(
    Status::WouldBlock,
    c"publish to topic",
    c"publish to topic failed: would block: no space in the topic",
);

impl OpenPublisher {
    pub(crate) fn new(topic: &Topic) -> Result<Self> {
        let (publisher, memory) = (topic.publisher()?, topic.place()?);
        Ok(Self { publisher, memory, source: Mutex::default() })
    }

    fn push(&self, bytes: &[u8], timeout: Timeout) -> Result<()> {
        match timeout {
            Timeout::Now => self.publisher.try_push(bytes)?.ok_or(NO_SPACE)?,
            _ => self.publisher.push(bytes, timeout.as_duration())?,
        };
        Ok(())
    }

    /// Publishes memory of any kind.
    pub(crate) fn push_from(
        &self,
        operation: Operation,
        from: CallerRange<'_>,
        timeout: Timeout,
    ) -> Result<()> {
        match (&caller_memory::find(self.memory, operation, from)?, timeout) {
            (CallerMemory::Host(bytes), _) => return self.push(bytes, timeout),
            (CallerMemory::Device(slice), _) if !self.can_copy_from(slice) => {
                let device = slice.memory().mapped_for().clone();
                let before =
                    self.source.lock().unwrap_or_else(PoisonError::into_inner).replace(device);
                drop(before);
                // The copy from the device counts against the timeout, too.
                let end = timeout.end();
                let bytes = download_to_host(slice, timeout)?;
                return self.push(&bytes, timeout.remaining(end));
            }
            (CallerMemory::Device(slice), Timeout::Now) => {
                self.publisher.try_push_slice(slice)?.ok_or(NO_SPACE)?
            }
            (CallerMemory::Device(slice), _) => {
                self.publisher.push_slice(slice, timeout.as_duration())?
            }
        };
        Ok(())
    }

    /// Publishes device memory in the order of a stream. An empty message has no address.
    pub(crate) fn push_on(
        &self,
        operation: Operation,
        stream: &Stream,
        from: CallerRange<'_>,
        timeout: Timeout,
    ) -> Result<()> {
        let publisher = &self.publisher;
        if from.length() > 0 {
            let from = caller_memory::slice(self.memory, operation, from)?;
            match timeout {
                Timeout::Now => publisher.try_push_on(stream, &from)?.ok_or(NO_SPACE)?,
                _ => publisher.push_on(stream, &from, timeout.as_duration())?,
            };
            return Ok(());
        }
        let end = timeout.end();
        let loan = self.loan(0, timeout)?;
        let interruption = Interruption::watch();
        match loan.publish_on_within(stream, end.saturating_duration_since(Instant::now()))? {
            Attempt::Sent(_) => Ok(()),
            Attempt::Full(lent) => Err(not_published(&lent, timeout, &interruption)),
        }
    }

    fn loan(&self, length: u64, timeout: Timeout) -> Result<Loan> {
        match timeout {
            Timeout::Now => self.publisher.try_loan(length)?.ok_or(NO_SPACE),
            _ => Ok(self.publisher.loan(length, timeout.as_duration())?),
        }
    }

    /// Waits for a number of subscribers, once.
    pub(crate) fn wait_once(&self, count: u32, longest: Duration) -> SubscriberWait {
        (self.publisher.wait_for_subscribers(count, longest), self.publisher.subscribers())
    }

    /// Can the topic's device copy from this memory?
    fn can_copy_from(&self, slice: &Slice) -> bool {
        let implementation = slice.memory().mapped_for().name().implementation;
        matches!(self.memory, MemoryLocation::Device(name) if name.implementation == implementation)
    }
}

/// Copies device memory to the host, for a topic in host memory.
fn download_to_host(slice: &Slice, timeout: Timeout) -> Result<Vec<u8>> {
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
    c"publish to topic",
    c"publish to topic failed: interrupted: a signal handler ran in the waiting thread. Call again to continue",
);

/// Why a loan that still exists was not published.
fn not_published(lent: &Loan, timeout: Timeout, interruption: &Interruption) -> Failure {
    match timeout {
        Timeout::Now => NO_SPACE,
        _ if interruption.occurred() => INTERRUPTED,
        _ => lent.no_room_error("publish to topic").into(),
    }
}

/// Waits in pieces, each of which looks the handle up again.
pub(crate) fn wait_for_subscribers(
    operation: Operation,
    count: u64,
    timeout: Timeout,
    wait: impl Fn(u32, Duration) -> Result<SubscriberWait>,
) -> Result<()> {
    let count = u32::try_from(count)
        .map_err(|_| Failure::invalid(operation, "too many subscribers for a topic"))?;
    let end = timeout.end();
    loop {
        let remaining = end.saturating_duration_since(Instant::now());
        let (ended, found) = wait(count, remaining.min(CLOSE_CHECK_INTERVAL))?;
        match ended {
            Ok(_) => return Ok(()),
            Err(error) if error.kind() != ErrorKind::DeadlineExceeded => return Err(error.into()),
            Err(_) if remaining > CLOSE_CHECK_INTERVAL => {}
            Err(_) if timeout == Timeout::Now => {
                let detail = "fewer subscribers exist now";
                return Err(Failure::new(Status::WouldBlock, operation, detail));
            }
            Err(error) => {
                // Of the whole wait, not of its last piece.
                let plural = if found == 1 { "" } else { "s" };
                let within = timeout.as_duration();
                let detail = format!("{found} subscriber{plural} of {count} after {within:?}");
                return Err(error.with_detail(detail).into());
            }
        }
    }
}

/// How a piece of the wait ended, and the number of subscribers.
pub(crate) type SubscriberWait = (pubsub::Result<u32>, u32);

/// Publishes the loan of a handle. Without space, or after the timeout, the loan is unchanged.
pub(crate) fn publish(
    operation: Operation,
    loan: Handle<Exclusive<Loan>>,
    timeout: Timeout,
    sent: Option<OutStruct<'_, RawSent>>,
    attempt: impl FnOnce(Loan, Duration) -> pubsub::Result<Attempt>,
) -> Result<()> {
    // Only calls with a timeout read the clock.
    let start = matches!(timeout, Timeout::For(_)).then(Instant::now);
    let found = loan.find(operation)?;
    let mut taken = found.take(operation, timeout)?;
    let Some(lent) = taken.remove() else {
        return Err(NO_SPACE);
    };
    // Without the time that the wait for exclusive use took.
    let waited = start.map_or(Duration::ZERO, |start| start.elapsed());
    let interruption = Interruption::watch();
    let done = match attempt(lent, timeout.as_duration().saturating_sub(waited)) {
        Ok(Attempt::Sent(done)) => Ok(done),
        Ok(Attempt::Full(lent)) => {
            let failure = not_published(&lent, timeout, &interruption);
            taken.put_back(lent);
            return Err(failure);
        }
        Err(error) => Err(error),
    };
    // The loan is used up, also if another thread has closed the handle meanwhile.
    let _ = loan.close(operation).map(|closed| closed.end());
    let done = done?;
    sent.map_or(Ok(()), |sent| sent.put(RawSent::of(&done)))
}

/// The failure of a call; one without a timeout would have had to wait.
fn would_block(operation: Operation, timeout: Timeout, error: pubsub::Error) -> Failure {
    match (error.kind(), timeout) {
        (ErrorKind::DeadlineExceeded, Timeout::Now) => {
            Failure::new(Status::WouldBlock, operation, error.detail())
        }
        _ => error.into(),
    }
}

kind!(Exclusive<Loan>, 3, "loan", Exclusive::end);
export_close!(Exclusive<Loan>, fabricast_loan_discard, c"discard loan");

export! {
    fn fabricast_publisher_open(
        topic: Handle<OpenTopic>,
        publisher: Out<'_, *mut OpenPublisher>,
    ) -> i32, c"open publisher" {
        let topic = topic.find(OPERATION)?;
        publisher.put(registry::open(OPERATION, OpenPublisher::new(&topic.topic)?)?)
    }

    fn fabricast_publisher_identity(
        publisher: Handle<OpenPublisher>,
        identity: Out<'_, u64>,
    ) -> i32, c"get identity of publisher" {
        let publisher = publisher.find(OPERATION)?;
        identity.put(publisher.publisher.id().as_u64())
    }

    /// Number of subscribers that would get a message now.
    fn fabricast_publisher_subscribers(
        publisher: Handle<OpenPublisher>,
        count: Out<'_, u64>,
    ) -> i32, c"count subscribers of publisher" {
        count.put(u64::from(publisher.find(OPERATION)?.publisher.subscribers()))
    }

    fn fabricast_publisher_wait_for_subscribers(
        publisher: Handle<OpenPublisher>,
        count: u64,
        timeout: Timeout,
    ) -> i32, c"wait for subscribers of topic" {
        wait_for_subscribers(OPERATION, count, timeout, |count, longest| {
            Ok(publisher.find(OPERATION)?.wait_once(count, longest))
        })
    }

    /// Waits until no subscriber is left.
    fn fabricast_publisher_wait_for_no_subscribers(
        publisher: Handle<OpenPublisher>,
        timeout: Timeout,
    ) -> i32, c"wait for end of subscribers of topic" {
        let publisher = publisher.find(OPERATION)?;
        let waited = publisher.publisher.wait_for_no_subscribers(timeout.as_duration());
        waited.map_err(|error| would_block(OPERATION, timeout, error))
    }

    /// The next event of the publisher.
    fn fabricast_publisher_event(
        publisher: Handle<OpenPublisher>,
        kind: Out<'_, u64>,
    ) -> i32, c"get event of publisher" {
        kind.put(publisher_event(publisher.find(OPERATION)?.publisher.poll_event()))
    }

    fn fabricast_publisher_counters_of(
        publisher: Handle<OpenPublisher>,
        counters: OutStruct<'_, RawCounters>[size],
    ) -> i32, c"get counters of publisher" {
        counters.put(RawCounters::of(&publisher.find(OPERATION)?.publisher.counters()))
    }

    /// Publishes bytes of host memory.
    fn fabricast_publisher_push(
        publisher: Handle<OpenPublisher>,
        data: &[u8] [length],
        timeout: Timeout,
    ) -> i32, c"push to topic" {
        publisher.find(OPERATION)?.push(data, timeout)
    }

    fn fabricast_publisher_push_device(
        publisher: Handle<OpenPublisher>,
        pointer: CallerRange<'_>[length],
        timeout: Timeout,
    ) -> i32, c"push device memory to topic" {
        publisher.find(OPERATION)?.push_from(OPERATION, pointer, timeout)
    }

    /// Waits until all published messages are released.
    fn fabricast_publisher_flush(
        publisher: Handle<OpenPublisher>,
        timeout: Timeout,
    ) -> i32, c"flush topic" {
        let publisher = publisher.find(OPERATION)?;
        let flushed = publisher.publisher.flush(timeout.as_duration());
        flushed.map_err(|error| would_block(OPERATION, timeout, error))
    }

    fn fabricast_publisher_loan(
        publisher: Handle<OpenPublisher>,
        length: usize,
        timeout: Timeout,
        loan: Out<'_, *mut Exclusive<Loan>>,
    ) -> i32, c"loan memory for topic" {
        let borrowed = publisher.find(OPERATION)?.loan(length as u64, timeout)?;
        loan.put(registry::open(OPERATION, Exclusive::new(borrowed))?)
    }

    fn fabricast_loan_memory(
        loan: Handle<Exclusive<Loan>>,
        address: Out<'_, *mut c_void>,
        length: Out<'_, usize>,
    ) -> i32, c"get memory of loan" {
        loan.find(OPERATION)?.with(OPERATION, Timeout::Forever, |loan| {
            address.put(ptr::with_exposed_provenance_mut(loan.address() as usize))?;
            length.put(loan.length() as usize)
        })
    }

    fn fabricast_loan_write(
        loan: Handle<Exclusive<Loan>>,
        offset: usize,
        data: &[u8] [length],
    ) -> i32, c"write into loan" {
        loan.find(OPERATION)?.with(OPERATION, Timeout::Forever, |loan| {
            Ok(loan.write(offset as u64, data)?)
        })
    }

    fn fabricast_loan_set_metadata(
        loan: Handle<Exclusive<Loan>>,
        data: &[u8] [length],
    ) -> i32, c"attach metadata to message" {
        loan.find(OPERATION)?.with(OPERATION, Timeout::Forever, |loan| {
            Ok(loan.set_metadata(data)?)
        })
    }

    /// Publishes the loan. Without space, or after the timeout, the loan is unchanged.
    fn fabricast_loan_publish(
        loan: Handle<Exclusive<Loan>>,
        timeout: Timeout,
        sent: Option<OutStruct<'_, RawSent>>[size],
    ) -> i32, c"publish to topic" {
        publish(OPERATION, loan, timeout, sent, Loan::publish_within)
    }
}
