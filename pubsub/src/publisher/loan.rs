//! Loans: blocks that a publisher fills before it publishes them.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu::{DeviceName, Slice};
use ipc::{Block, BlockRange};

use super::{Loan, PublisherState};
use crate::clock;
use crate::context::TopicContext;
use crate::error::{Error, ErrorKind, Result};
use crate::error_mapping::During;
use crate::interruption::Interruption;
use crate::loan_limit::Borrower;
use crate::pool::{InFlightCopies, borrow_mut};
use crate::settings::{MAX_METADATA, SharedLocation};
use crate::topic::Entry;

/// Result of publishing a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Sent {
    /// Position of the message in the order of the topic's messages on this node; None if it had no
    /// subscriber, or was dropped.
    pub position: Option<u64>,
    /// Number of subscribers that it was delivered to.
    pub subscribers: u32,
    /// There was no room, and the topic drops messages then.
    pub is_dropped: bool,
}

/// Result of an attempt to publish.
#[derive(Debug)]
pub enum Attempt {
    /// The message was published.
    Sent(Sent),
    /// There was no room, or not before a signal ended the wait: the loan is returned.
    Full(Loan),
}

impl Attempt {
    /// For an attempt that waited until its deadline.
    pub(super) fn into_sent(
        self,
        operation: &'static str,
        interruption: &Interruption,
    ) -> Result<Sent> {
        match self {
            Self::Sent(sent) => Ok(sent),
            Self::Full(loan) => {
                let topic = loan.state.context.topic.name();
                interruption.check(operation).map_err(|error| {
                    let detail = "a signal handler ran in the waiting thread, and the loan was \
                                  returned. Use publish_within to keep it";
                    error.on(topic).with_detail(detail)
                })?;
                Err(loan.no_room_error(operation))
            }
        }
    }

    /// Drops the loan, if it was returned.
    pub(super) fn sent(self) -> Option<Sent> {
        match self {
            Self::Sent(sent) => Some(sent),
            Self::Full(_) => None,
        }
    }
}

impl fmt::Debug for Loan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Loan({:?} of {})", self.slice, self.state.context.topic.name())
    }
}

impl Loan {
    /// For an allocated block, with a permit for a loan.
    pub(super) fn new(
        state: &Arc<PublisherState>,
        borrower: Borrower,
        (block, place): (Block, BlockRange),
        length: u64,
    ) -> Result<Self> {
        let TopicContext { topic, local, .. } = &state.context;
        let slice = local.writable_slice(place, length).and_then(|slice| {
            let is_lent = borrower == Borrower::Caller;
            local.take_over(place, topic.number(), is_lent).map(|()| slice)
        });
        match slice {
            Ok(slice) => Ok(Self {
                state: Arc::clone(state),
                borrower,
                block,
                slice,
                metadata: 0,
                is_owned: true,
                in_flight: None,
                is_stream_ordered: false,
            }),
            Err(error) => {
                if local.in_flight().is_none_or(|in_flight| in_flight.is_done()) {
                    state.give_back(block);
                }
                // Otherwise the block stays with this process: a device that did not end the clearing
                // in time may still write it.
                Err(error)
            }
        }
    }

    /// Length in bytes.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.slice.length()
    }

    /// Start of the loan in this process's address space, or in the device's.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.slice.address()
    }

    /// The loan's memory, for devices.
    #[must_use]
    pub fn slice(&self) -> &Slice {
        &self.slice
    }

    /// The device of its memory; None for the host.
    #[must_use]
    pub fn device(&self) -> Option<DeviceName> {
        match self.state.context.local.id().place {
            SharedLocation::Host => None,
            SharedLocation::Device(_) => self.slice.memory().device(),
        }
    }

    /// The loan's bytes, to be written in place; for memory of the host.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for memory of a device.
    ///
    /// # Safety
    /// No other process accesses these bytes at the same time. Processes that follow the rules do
    /// not, but all processes of a node can, and this process cannot check it.
    #[allow(unsafe_code)]
    pub unsafe fn bytes_mut(&mut self) -> Result<&mut [u8]> {
        if self.state.context.local.id().place != SharedLocation::Host {
            let detail = "the memory is on a device";
            return Err(Error::new(
                "access message bytes of topic",
                ErrorKind::InvalidArgument,
                detail,
            ));
        }
        // SAFETY: host memory, mapped as long as the slice lives; the caller promises the rest.
        Ok(unsafe { borrow_mut(&mut self.slice) })
    }

    /// Copies bytes into a part of it; waits until a device has finished the copy.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) beyond its end;
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded) if a device is too slow: then the block is
    /// neither published nor reused before the device has finished.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.state.context.node.check_not_forked("write message to topic")?;
        let part = self.slice.slice(offset, bytes.len() as u64).during("write message to topic")?;
        if bytes.is_empty() {
            return Ok(());
        }
        let written = self.state.context.local.write(&part, bytes, gpu::DEFAULT_TIMEOUT);
        written.inspect_err(|_| self.in_flight = self.state.context.local.in_flight())
    }

    pub(crate) fn copy(&mut self, from: &Slice, timeout: Duration) -> Result<()> {
        if from.length() == 0 {
            return Ok(());
        }
        let copied = self.state.context.local.copy(&self.slice, from, timeout);
        copied.inspect_err(|_| self.in_flight = self.state.context.local.in_flight())
    }

    /// Fails while a copy that this process started may still write to it.
    pub(super) fn check_done(&self) -> Result<()> {
        if self.in_flight.as_ref().is_none_or(InFlightCopies::is_done) {
            return Ok(());
        }
        let detail = "an earlier copy into the message timed out, but still runs";
        Err(self.state.timeout_error("publish to topic", detail))
    }

    /// Attaches bytes to the message, beside its payload.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for more than [`MAX_METADATA`].
    pub fn set_metadata(&mut self, bytes: &[u8]) -> Result<()> {
        let operation = "attach metadata to message";
        self.state.context.node.check_not_forked(operation)?;
        if bytes.len() > MAX_METADATA {
            let detail = format!("{} bytes exceed the maximum of {MAX_METADATA}", bytes.len());
            return Err(Error::new(operation, ErrorKind::InvalidArgument, detail));
        }
        self.state.context.local.control().sample_info(self.block).set_metadata(bytes);
        self.metadata = bytes.len() as u16;
        Ok(())
    }

    /// The message's queue entry, filled now and without a sequence.
    pub(super) fn entry(&self) -> Entry {
        Entry {
            block: self.block,
            offset: self.slice.offset(),
            length: self.length(),
            publisher: self.state.id,
            sequence: 0,
            published_at: clock::now(),
            metadata: self.metadata,
            has_origin: false,
            sync_point: None,
        }
    }

    /// Publishes it. A reliable topic waits for room until the timeout; the others always have
    /// room, or drop the message and count it.
    ///
    /// Without subscribers it succeeds, and the block is freed at once.
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded); [`Interrupted`](ErrorKind::Interrupted),
    /// where the node [is interruptible](crate::NodeOptions::interruptible);
    /// [`Closed`](ErrorKind::Closed); [`Forked`](ErrorKind::Forked). The block is freed after each
    /// of them.
    pub fn publish(self, timeout: Duration) -> Result<Sent> {
        let interruption = self.state.context.node.interruption();
        self.publish_within(timeout)?.into_sent("publish to topic", &interruption)
    }

    /// Like [`publish`](Self::publish), but returns the loan if the deadline passes, or a signal
    /// [ends the wait](crate::NodeOptions::interruptible): a program with other work can wait
    /// again.
    ///
    /// # Errors
    /// As [`publish`](Self::publish), except for the deadline.
    pub fn publish_within(self, timeout: Duration) -> Result<Attempt> {
        // The usual case does not read the clock.
        match self.try_publish()? {
            Attempt::Full(loan) if !timeout.is_zero() => {
                loan.publish_by(Some(ipc::deadline(timeout)))
            }
            attempt => Ok(attempt),
        }
    }

    /// Why a message found no room until the deadline: the error of [`publish`](Self::publish), for
    /// callers of [`publish_within`](Self::publish_within).
    ///
    /// ```
    /// use std::time::Duration;
    /// use pubsub::{Attempt, ErrorKind, Node, NodeOptions, TopicSettings};
    /// # let directory = testkit::temp_dir::TempDir::new("fabricast-doc-no-room");
    /// # let node = Node::join(NodeOptions { directory: directory.join("node"), ..NodeOptions::default() })?;
    /// let topic = node.topic("frames", &TopicSettings { depth: 1, ..TopicSettings::default() })?;
    /// let (publisher, _subscriber) = (topic.publisher()?, topic.subscriber()?);
    /// publisher.push(b"unread", Duration::from_secs(5))?;
    /// let loan = publisher.loan(4, Duration::from_secs(5))?;
    /// let Attempt::Full(loan) = loan.publish_within(Duration::from_millis(1))? else { panic!() };
    /// let error = loan.no_room_error("publish frame");
    /// assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    /// assert!(error.detail().contains("the topic is full"), "{error}");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn no_room_error(&self, operation: &'static str) -> Error {
        self.state.timeout_error(operation, &self.state.why_full())
    }

    /// Publishes it, if there is room now.
    ///
    /// # Errors
    /// As [`publish`](Self::publish), except for the deadline.
    pub fn try_publish(self) -> Result<Attempt> {
        self.publish_by(None)
    }

    /// Does not wait without a deadline.
    pub(super) fn publish_by(mut self, deadline: Option<Instant>) -> Result<Attempt> {
        self.check_done()?;
        match self.state.publish_by(self.entry(), deadline) {
            Ok(Some(sent)) => {
                self.is_owned = false;
                Ok(Attempt::Sent(sent))
            }
            Ok(None) => Ok(Attempt::Full(self)),
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(Attempt::Full(self)),
            Err(error) => Err(error),
        }
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        if self.is_owned {
            if let Some(in_flight) = self.in_flight.take().filter(|in_flight| !in_flight.is_done())
            {
                // The block is not reused while a device may write to it, and counts as a loan
                // until then.
                self.state.loans.make_transient(self.borrower);
                let loans = Arc::clone(&self.state.loans);
                self.state.context.local.free_after(self.block, in_flight, loans);
                return;
            }
            self.state.give_back(self.block);
        }
        self.state.loans.give_back(self.borrower);
    }
}
