//! The ends of rings, and the memory that has to outlive them.

use std::sync::Arc;
use std::time::Duration;

use super::super::memory::RingMemory;
use super::super::notify::Notify;
use super::super::receiver::ReceiverStatistics;
use super::super::sender::SenderStatistics;
use super::waiting::{Wait, late};
use super::{Port, ReceiverId, SenderId, find, open};
use crate::{CompletionQueue, Endpoint, MemoryRegion, Result};

/// Memory of rings that peers may still write to. To be dropped after the endpoint is closed.
#[derive(Debug, Default)]
#[must_use = "dropped before its endpoint is closed, it is written to after it is freed"]
pub struct Graves {
    pub(super) rings: Vec<Arc<RingMemory>>,
    pub(super) words: Vec<MemoryRegion>,
}

impl Port {
    /// Closes the endpoint, and then lets go of all memory.
    ///
    /// # Errors
    /// What the provider says; the memory is kept for good then.
    pub fn close(self) -> Result<()> {
        let (endpoint, _queue, graves) = self.into_parts();
        match endpoint.close() {
            Ok(()) => Ok(()),
            Err(error) => {
                std::mem::forget(graves);
                Err(error)
            }
        }
    }

    /// Endpoint and queue again, and the memory of the rings, which are gone. That has to be kept
    /// until the endpoint is closed: peers may go on writing to it.
    pub fn into_parts(mut self) -> (Endpoint, CompletionQueue, Graves) {
        for receiver in self.receivers.drain(..).flatten() {
            self.graves.rings.extend(receiver.into_graves());
        }
        for sender in self.senders.drain(..).flatten() {
            self.graves.words.extend(sender.into_credit());
        }
        self.graves.words.extend(self.slate);
        (self.endpoint, self.queue, self.graves)
    }

    /// Bytes of memory that is kept because something may be on its way to it: of rings that
    /// began a new epoch, or were given up. It goes when the port does; who keeps a port through
    /// the deaths of many writers may want to open another one when this grows.
    #[must_use]
    pub fn quarantined(&self) -> u64 {
        let kept = self.graves.rings.iter().map(|memory| memory.shape.capacity()).sum::<u64>();
        let past = self.receivers.iter().flatten().map(|receiver| receiver.past());
        kept + past.sum::<u64>()
    }

    /// Closes the writing side: the reader is told that there will be nothing more, and gets
    /// the rest. Waits until everything is read.
    ///
    /// # Errors
    /// As [`flush`](Self::flush); the ring is closed all the same.
    pub fn close_sender(&mut self, id: SenderId, timeout: Duration) -> Result<SenderStatistics> {
        let statistics = self.sender(id)?.statistics();
        let result = self.flush(id, timeout).and_then(|()| self.say_done(id, timeout));
        self.drop_sender(id);
        result.map(|()| statistics)
    }

    fn say_done(&mut self, id: SenderId, timeout: Duration) -> Result<()> {
        let mut wait = Wait::new(timeout);
        loop {
            let sender = find(&mut self.senders, id.0)?;
            if sender.say_done(&mut self.endpoint, &mut self.queue)? {
                return Ok(());
            }
            if !wait.turn(self)? {
                return Err(late("closing a ring", timeout, "the provider has no room"));
            }
        }
    }

    /// Lets go of the writing side, whatever is on its way.
    pub fn drop_sender(&mut self, id: SenderId) {
        if let Some(sender) = self.senders.get_mut(usize::from(id.0)).and_then(Option::take) {
            self.closing -= u32::from(sender.owes_end());
            self.restless -= u32::from(sender.notify() != Notify::Immediate);
            self.graves.words.extend(sender.into_credit());
        }
    }

    /// Lets go of the reading side. The writer is told that nobody reads any more, and answers
    /// that it has nothing on its way; until that came, the memory stays, and the ring's
    /// number is nobody else's: a write to memory that is gone would break the connection
    /// for all rings. A writer that is dead never answers: then they stay until
    /// [`forget`](Self::forget), and the memory until the port is dropped.
    ///
    /// # Errors
    /// `Closed` if there is no such ring.
    pub fn close_receiver(&mut self, id: ReceiverId) -> Result<ReceiverStatistics> {
        let receiver = open(&mut self.receivers, id)?;
        let statistics = receiver.statistics();
        receiver.close();
        self.closing += 1;
        self.go_on_closing();
        Ok(statistics)
    }

    /// Gives up a ring that is being closed, or of which the writer is known to be dead: its
    /// number is free. Its memory is [kept](Self::quarantined) all the same: what a dead writer
    /// had sent may still be on its way through the provider.
    pub fn forget(&mut self, id: ReceiverId) {
        let place = self.receivers.get_mut(usize::from(id.0));
        if let Some(receiver) = place.and_then(Option::take) {
            self.closing -= u32::from(receiver.is_closing());
            self.restless -= u32::from(receiver.notify() != Notify::Immediate);
            self.graves.rings.extend(receiver.into_graves());
        }
    }

    /// For rings that are being closed.
    #[cold]
    pub(super) fn go_on_closing(&mut self) -> bool {
        let mut has_moved = false;
        let (endpoint, queue) = (&mut self.endpoint, &mut self.queue);
        for sender in self.senders.iter_mut().flatten().filter(|sender| sender.owes_end()) {
            // A connection that is broken has nobody to be told.
            if sender.say_done(endpoint, queue).unwrap_or(true) {
                self.closing -= 1;
                has_moved = true;
            }
        }
        for place in &mut self.receivers {
            let Some(receiver) = place.as_mut().filter(|receiver| receiver.is_closing()) else {
                continue;
            };
            if receiver.go_on_closing(endpoint, queue).unwrap_or(true) {
                self.restless -= u32::from(receiver.notify() != Notify::Immediate);
                self.closing -= 1;
                let graves = place.take().into_iter().flat_map(|receiver| receiver.into_graves());
                self.graves.rings.extend(graves);
                has_moved = true;
            }
        }
        has_moved
    }
}
