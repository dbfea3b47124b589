//! Messages between two ranks, by different means that are measured alike.

mod agent;
mod endpoint;
#[cfg(feature = "mpi")]
mod message;
mod ring;

pub use agent::AgentChannel;
pub use endpoint::EndpointChannel;
#[cfg(feature = "mpi")]
pub use message::MessageChannel;
pub use ring::RingChannel;

use crate::{Job, Result};

/// Memory of a channel: slots to send from and slots to receive into.
#[derive(Debug, Clone, Copy)]
pub struct Slots {
    /// Number of slots in each direction. Message n uses slot n modulo this number.
    pub count: usize,
    /// Bytes of the longest message.
    pub longest: usize,
}

impl Slots {
    /// Bytes from one slot to the next.
    fn stride(&self) -> usize {
        self.longest.next_multiple_of(64)
    }

    fn outgoing(&self, message: u64) -> usize {
        (message % self.count as u64) as usize * self.stride()
    }

    fn incoming(&self, message: u64) -> usize {
        self.count * self.stride() + self.outgoing(message)
    }

    fn bytes(&self) -> usize {
        2 * self.count * self.stride()
    }
}

/// A means to send messages to one other rank, and to receive its messages.
pub trait Channel {
    /// For reports.
    fn describe(&self) -> String;

    /// Writes the bytes of the next message.
    ///
    /// # Errors
    /// Errors of the memory.
    fn fill(&mut self, bytes: &[u8]) -> Result<()>;

    /// Starts to send the next message.
    ///
    /// # Errors
    /// Errors of the means.
    fn send(&mut self, job: &mut Job, bytes: usize) -> Result<()>;

    /// Waits until all sent messages have left their slots.
    ///
    /// # Errors
    /// Errors of the means; after the deadline.
    fn flush(&mut self, job: &mut Job) -> Result<()>;

    /// Prepares to receive further messages, where that is necessary.
    ///
    /// # Errors
    /// Errors of the means.
    fn expect(&mut self, _job: &mut Job, _count: usize, _bytes: usize) -> Result<()> {
        Ok(())
    }

    /// Waits until this number of further messages has arrived. They are [expected](Self::expect).
    ///
    /// # Errors
    /// Errors of the means; after the deadline.
    fn receive(&mut self, job: &mut Job, count: usize, bytes: usize) -> Result<()>;

    /// Reads a received message: the last one, or that number of messages before it.
    ///
    /// # Errors
    /// Errors of the memory.
    fn read(&mut self, before_last: u64, bytes: &mut [u8]) -> Result<()>;
}
