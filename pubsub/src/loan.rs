//! Memory that is borrowed for a message.

mod ordered;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu::{DeviceName, Slice};
use ipc::{Block, BlockRange};

pub(crate) use self::ordered::OPERATION as PUBLISH_ON_STREAM;
use crate::clock;
use crate::error::{Error, ErrorKind, Result};
use crate::error_mapping;
use crate::interruption::Interruption;
use crate::loan_limit::Borrower;
use crate::pool::{InFlightCopies, borrow_mut};
use crate::publisher::{OutgoingMessage, PublisherState};
use crate::settings::{MAX_METADATA, SharedLocation};

/// What became of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Sent {
    /// Its place in the order of the topic's messages on this node; None if nobody wanted it,
    /// or it was dropped.
    pub position: Option<u64>,
    /// How many it was delivered to.
    pub subscribers: u32,
    /// There was no room, and the topic is one of those that drop.
    pub is_dropped: bool,
}

/// What became of an attempt to publish.
#[derive(Debug)]
pub enum Attempt {
    /// It was published.
    Sent(Sent),
    /// There is no room now, or there was none when a signal ended the wait: the loan is given back.
    Full(Loan),
}

impl Attempt {
    /// Of one that waited until its deadline.
    pub(crate) fn into_sent(
        self,
        operation: &'static str,
        interruption: &Interruption,
    ) -> Result<Sent> {
        match self {
            Self::Sent(sent) => Ok(sent),
            Self::Full(loan) => {
                let topic = loan.state.context.topic.name();
                interruption.check(operation).map_err(|error| {
                    let detail = "a signal handler ran in the waiting thread, and the loan was given \
                                  back; publish_within keeps it";
                    error.on(topic).with_detail(detail)
                })?;
                let detail = "subscribers have not released what fills the topic, or a process that \
                              is stopped holds its lock";
                Err(loan.state.timeout_error(operation, detail))
            }
        }
    }

    /// Without the loan, which is given back.
    pub(crate) fn sent(self) -> Option<Sent> {
        match self {
            Self::Sent(sent) => Some(sent),
            Self::Full(_) => None,
        }
    }
}

/// Memory for a message, to be written by its borrower, and then [published](Self::publish).
/// Dropped, it is given back.
///
/// It can be written by anything: by [`write`](Self::write), by a device through its
/// [`slice`](Self::slice), or by [address](Self::address). What a device does has to be done
/// before it is published, or begun on the stream that it is [published on](Self::publish_on).
/// What it contains before that is up to chance: some message that was there before.
///
/// A publisher has [so many](crate::TopicSettings::loans) at once and no more. One that was given back
/// while a device may still write there counts until the device has done with it.
pub struct Loan {
    state: Arc<PublisherState>,
    borrower: Borrower,
    block: Block,
    /// Where it begins in the pool.
    offset: u64,
    slice: Slice,
    metadata: u16,
    is_owned: bool,
    /// What a device may still be writing to it, though nobody waited for that.
    in_flight: Option<InFlightCopies>,
    /// All of that is before the point of the stream that it was to be published on.
    is_stream_ordered: bool,
}

impl fmt::Debug for Loan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Loan({:?} of {})", self.slice, self.state.context.topic.name())
    }
}

impl Loan {
    /// Of a block that its publisher has found for it, and may have for a loan.
    pub(crate) fn new(
        state: &Arc<PublisherState>,
        borrower: Borrower,
        (block, place): (Block, BlockRange),
        length: u64,
    ) -> Result<Self> {
        match state.context.local.slice(place, length) {
            Ok(slice) => Ok(Self {
                state: Arc::clone(state),
                borrower,
                block,
                offset: place.offset,
                slice,
                metadata: 0,
                is_owned: true,
                in_flight: None,
                is_stream_ordered: false,
            }),
            Err(error) => {
                state.give_back(block);
                Err(error)
            }
        }
    }

    /// Length in bytes.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.slice.length()
    }

    /// Where it starts in this process's address space: the device's, if it is one's.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.slice.address()
    }

    /// As memory that devices reach.
    #[must_use]
    pub fn slice(&self) -> &Slice {
        &self.slice
    }

    /// The device that it lies on; None for the host.
    #[must_use]
    pub fn device(&self) -> Option<DeviceName> {
        match self.state.context.local.id().place {
            SharedLocation::Host => None,
            SharedLocation::Device(_) => self.slice.memory().device(),
        }
    }

    /// Its bytes, to be written in place. For one on the host.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for one on a device.
    ///
    /// # Safety
    /// No other process touches these bytes meanwhile. None does that keeps to the rules, but
    /// all processes of a node can, and this one cannot know that they do not.
    #[allow(unsafe_code)]
    pub unsafe fn bytes_mut(&mut self) -> Result<&mut [u8]> {
        if self.state.context.local.id().place != SharedLocation::Host {
            let detail = "the memory is on a device";
            return Err(Error::new("borrow bytes", ErrorKind::InvalidArgument, detail));
        }
        // SAFETY: of the host, mapped as long as the slice lives; the caller promises the rest.
        Ok(unsafe { borrow_mut(&mut self.slice) })
    }

    /// Copies bytes to a part of it; on a device, waits until they are there.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) beyond its end;
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded) if a device is too slow: then nobody
    /// gets the memory, by publishing or giving it back, before the device has done with it.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.state.context.node.check_not_forked("write a message")?;
        let part = self.slice.slice(offset, bytes.len() as u64);
        let part = part.map_err(|cause| error_mapping::from_device("write a message", cause))?;
        if bytes.is_empty() {
            return Ok(());
        }
        let written = self.state.context.local.write(&part, bytes, gpu::DEFAULT_TIMEOUT);
        written.inspect_err(|_| self.in_flight = self.state.context.local.in_flight())
    }

    /// Copies from a device's memory, all of it.
    pub(crate) fn copy(&mut self, from: &Slice, timeout: Duration) -> Result<()> {
        if from.length() == 0 {
            return Ok(());
        }
        let copied = self.state.context.local.copy(&self.slice, from, timeout);
        copied.inspect_err(|_| self.in_flight = self.state.context.local.in_flight())
    }

    /// Does no device write to it any more that this process told to?
    fn check_done(&self) -> Result<()> {
        if self.in_flight.as_ref().is_none_or(InFlightCopies::is_done) {
            return Ok(());
        }
        let detail = "an earlier copy into the message timed out and still runs";
        Err(self.state.timeout_error("publish", detail))
    }

    /// Attaches bytes to the message, beside its payload.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for more than [`MAX_METADATA`].
    pub fn set_metadata(&mut self, bytes: &[u8]) -> Result<()> {
        let operation = "attach metadata";
        self.state.context.node.check_not_forked(operation)?;
        if bytes.len() > MAX_METADATA {
            let detail = format!("{} bytes, of {MAX_METADATA} possible", bytes.len());
            return Err(Error::new(operation, ErrorKind::InvalidArgument, detail));
        }
        self.state.context.local.control().sample_info(self.block).set_metadata(bytes);
        self.metadata = bytes.len() as u16;
        Ok(())
    }

    fn outgoing(&self) -> OutgoingMessage {
        OutgoingMessage {
            block: self.block,
            offset: self.offset,
            length: self.length(),
            metadata: self.metadata,
            filled: clock::now(),
            sync_point: None,
        }
    }

    /// Publishes it. On a reliable topic waits for room, for as long as the patience lasts;
    /// on others there is always room, or it is dropped and counted.
    ///
    /// Nobody subscribes: that is no error, and the memory is free again.
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded), and then the memory is given back, as
    /// with any error; [`Interrupted`](ErrorKind::Interrupted), with the memory given back, too, where
    /// the node [is interruptible](crate::NodeOptions::interruptible); [`Closed`](ErrorKind::Closed),
    /// [`Forked`](ErrorKind::Forked).
    pub fn publish(self, timeout: Duration) -> Result<Sent> {
        let interruption = self.state.context.node.interruption();
        self.publish_within(timeout)?.into_sent("publish", &interruption)
    }

    /// As [`publish`](Self::publish), but the loan comes back if the deadline passes, or a signal
    /// [ends the wait](crate::NodeOptions::interruptible): a program that has something else to look
    /// after can wait again.
    ///
    /// # Errors
    /// As [`publish`](Self::publish), but for the deadline.
    pub fn publish_within(self, timeout: Duration) -> Result<Attempt> {
        // The usual case needs no look at the clock.
        match self.try_publish()? {
            Attempt::Full(loan) if !timeout.is_zero() => {
                loan.publish_by(Some(ipc::deadline(timeout)))
            }
            attempt => Ok(attempt),
        }
    }

    /// Publishes it, if there is room now.
    ///
    /// # Errors
    /// As [`publish`](Self::publish), but for the deadline.
    pub fn try_publish(self) -> Result<Attempt> {
        self.publish_by(None)
    }

    /// At once, if there is no deadline.
    pub(crate) fn publish_by(mut self, deadline: Option<Instant>) -> Result<Attempt> {
        self.check_done()?;
        match self.state.publish_by(self.outgoing(), deadline) {
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
                // Nobody else gets what a device may write to, and it is a loan until then.
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
