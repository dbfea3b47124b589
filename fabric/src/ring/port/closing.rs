//! The ends of rings, and the memory that has to outlive them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::memory::RingMemory;
use super::super::posted_receives::PostedReceives;
use super::super::queue_budget::QueueBudget;
use super::super::receiver::ReceiverStatistics;
use super::super::retries::{CloseProgress, Retries};
use super::super::sender::{RingSender, SenderStatistics};
use super::waiting::{Wait, deadline_exceeded};
use super::{Port, ReceiverId, SenderId, find, open};
use crate::{CompletionQueue, Endpoint, MemoryRegion, Peer, Result};

/// How long a port that is closed goes on telling readers of the ends of their rings.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Memory of rings that peers may still write to. To be dropped after the endpoint is closed.
#[derive(Debug, Default)]
pub(super) struct QuarantinedMemory {
    rings: Vec<Arc<RingMemory>>,
    #[allow(dead_code)] // kept alive
    credit_memory: Option<MemoryRegion>,
}

impl Port {
    /// Closes the endpoint, and then lets go of all memory. What readers are still to be told of
    /// the end of their rings is told first, if that takes no more than a second.
    ///
    /// # Errors
    /// What the provider says; the memory is kept for good then.
    pub fn close(mut self) -> Result<()> {
        let mut wait = Wait::new(CLOSE_TIMEOUT);
        let is_ending = |sender: &RingSender| sender.is_closing() && !sender.is_end_notice_sent();
        while self.senders.iter().flatten().any(|sender| is_ending(sender)) {
            if !matches!(wait.progress(&mut self), Ok(true)) {
                break;
            }
        }
        let lanes = self.close_lanes();
        let quarantine = self.quarantine_rings();
        let closed = self.endpoint.close().and(lanes);
        if closed.is_err() {
            std::mem::forget(quarantine);
        }
        closed
    }

    /// The memory of all rings, which are gone.
    fn quarantine_rings(&mut self) -> QuarantinedMemory {
        let mut quarantine = std::mem::take(&mut self.quarantine);
        for receiver in self.receivers.drain(..).flatten() {
            quarantine.rings.extend(receiver.into_quarantined());
        }
        self.senders.clear();
        quarantine.credit_memory = self.credit_memory.take();
        quarantine
    }

    /// Closes the endpoint, and goes on with another one, of the same domain, and its queue: by
    /// which the port is woken from now on. Further lanes are closed, too. All rings are gone, and so is all memory that was kept
    /// because something might be on its way to it: their peers hear nothing of this by the fabric.
    ///
    /// # Errors
    /// What the provider says: then the memory is kept for good, and what was posted may still be
    /// under way.
    pub fn replace_endpoint(&mut self, endpoint: Endpoint, queue: CompletionQueue) -> Result<()> {
        let old = std::mem::replace(&mut self.endpoint, endpoint);
        // Not used again: ofi_rxm of libfabric 1.17 goes on asking an endpoint that is gone.
        let mut old_queue = std::mem::replace(&mut self.queue, queue);
        let lanes = self.close_lanes();
        let quarantine = self.quarantine_rings();
        let closed = old.close().and(lanes);
        while old_queue.poll().is_some() {}
        self.caller_outcomes.clear();
        if let Some(events) = &mut self.events {
            events.clear();
        }
        self.posted_receives = PostedReceives::new(self.endpoint.domain());
        let facts = self.endpoint.domain().capabilities();
        self.queue_budget = QueueBudget::of(facts, self.queue.size());
        self.needs_polling = false;
        self.retries = Retries::default();
        if closed.is_err() {
            std::mem::forget(quarantine);
        }
        closed
    }

    /// Bytes of memory that is kept because something may be on its way to it: of rings that
    /// were given up. It goes when the endpoint does; who keeps a port through
    /// the deaths of many writers may want to [renew](Self::renew) it when this grows.
    #[must_use]
    pub fn quarantined_bytes(&self) -> u64 {
        self.quarantine.rings.iter().map(|memory| memory.geometry.capacity()).sum()
    }

    /// Rings that are gone, and whose share of the queue is kept all the same, since notices may
    /// still come: of writers that do not say that they are done, and of readers that do not say
    /// what they read last. None where the provider sees to it that queues do not overrun. The
    /// shares come back when the port is [renewed](Self::renew).
    #[must_use]
    pub fn quarantined_quotas(&self) -> usize {
        let is_kept = |sender: &RingSender| {
            sender.is_closing() && sender.is_end_notice_sent() && sender.expects_credit()
        };
        let senders = self.senders.iter().flatten().filter(|sender| is_kept(sender));
        let limited = self.quarantine.rings.iter().filter(|memory| memory.quota.is_limited());
        limited.count() + senders.count()
    }

    /// Closes the writing side: the reader is told that there will be nothing more, and gets
    /// the rest. Waits until everything is read, and that was told.
    ///
    /// # Errors
    /// As [`flush`](Self::flush); the ring is closed all the same.
    pub fn close_sender(&mut self, id: SenderId, timeout: Duration) -> Result<SenderStatistics> {
        let statistics = self.sender(id)?.statistics();
        let result = self.flush(id, timeout);
        let is_there = result.is_ok() && self.sender(id)?.broken().is_none();
        self.begin_close(id, is_there);
        result?;
        let mut wait = Wait::new(timeout);
        while self.senders.get(usize::from(id.0)).is_some_and(Option::is_some) {
            if !wait.progress(self)? {
                return Err(deadline_exceeded(
                    "closing a ring",
                    timeout,
                    "the reader may not have received the end notice",
                ));
            }
        }
        Ok(statistics)
    }

    /// Lets go of the writing side, whatever is on its way. The reader is told that there will be
    /// nothing more, by the turns that follow; until then the ring's name is nobody else's.
    pub fn drop_sender(&mut self, id: SenderId) {
        self.begin_close(id, false);
    }

    /// Lets go of the writing side as [`drop_sender`](Self::drop_sender) does. The reader is told
    /// surely if it is known to be there: then the end of the ring waits for that.
    pub(in super::super) fn begin_close(&mut self, id: SenderId, confirm_delivery: bool) {
        if let Ok(sender) = find(&mut self.senders, id.0) {
            sender.begin_close(confirm_delivery);
            self.needs_polling = true;
            self.progress_close();
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
        self.needs_polling = true;
        self.progress_close();
        Ok(statistics)
    }

    /// Gives up a ring that is being closed, or of which the writer is known to be dead: its
    /// number is free. Its memory is [kept](Self::quarantined) all the same: what a dead writer
    /// had sent may still be on its way through the provider.
    pub fn forget(&mut self, id: ReceiverId) {
        let place = self.receivers.get_mut(usize::from(id.ring));
        let place = place.filter(|place| {
            place.as_ref().is_some_and(|it| it.creation_epoch() == id.creation_epoch)
        });
        if let Some(receiver) = place.and_then(Option::take) {
            self.quarantine.rings.extend(receiver.into_quarantined());
        }
    }

    /// Gives up a ring as by [`forget`](Self::forget), if it is still being closed: its writer may
    /// be dead without anybody having noticed. If it is gone, that is well: one that has its number
    /// by now stays.
    pub fn forget_if_closing(&mut self, id: ReceiverId) {
        let place = self.receivers.get(usize::from(id.ring)).and_then(Option::as_ref);
        if place.is_some_and(|it| it.creation_epoch() == id.creation_epoch && it.is_closing()) {
            self.forget(id);
        }
    }

    /// For rings that are being closed.
    #[cold]
    pub(super) fn progress_close(&mut self) -> bool {
        let now = Instant::now();
        let mut given_up = Vec::new();
        let has_moved = self.progress_closing_senders(now, &mut given_up)
            | self.progress_closing_receivers(now, &mut given_up);
        self.retries.sweep();
        for peer in &given_up {
            let name = self.endpoint.name_of(*peer);
            tracing::debug!(peer = name, "gave up sending end notices of rings to a peer");
            self.abandon_end_notice(*peer);
        }
        has_moved || !given_up.is_empty()
    }

    fn progress_closing_senders(&mut self, now: Instant, given_up: &mut Vec<Peer>) -> bool {
        let mut has_moved = false;
        let (endpoint, queue) = (&mut self.endpoint, &mut self.queue);
        for place in &mut self.senders {
            let Some(sender) = place else { continue };
            let (peer, tells) = (sender.peer(), sender.is_end_notice_ready());
            if tells && !self.retries.allows(peer, now) {
                continue;
            }
            let ending = sender.progress_close(endpoint, queue);
            match ending {
                CloseProgress::Refused if self.retries.refused(peer, now) => given_up.push(peer),
                CloseProgress::Complete | CloseProgress::Pending if tells => {
                    self.retries.reached(peer)
                }
                _ => {}
            }
            if ending == CloseProgress::Complete && sender.is_closing() && !sender.expects_credit()
            {
                if let (Some(lanes), true) = (&mut self.extra_lanes, sender.lanes() > 1) {
                    lanes.close(sender.instance());
                }
                *place = None;
                has_moved = true;
            }
        }
        has_moved
    }

    fn progress_closing_receivers(&mut self, now: Instant, given_up: &mut Vec<Peer>) -> bool {
        let mut has_moved = false;
        let (endpoint, queue) = (&mut self.endpoint, &mut self.queue);
        for place in &mut self.receivers {
            let Some(receiver) = place.as_mut().filter(|receiver| receiver.is_closing()) else {
                continue;
            };
            let peer = receiver.peer().filter(|_| receiver.is_end_notice_ready());
            if peer.is_some_and(|peer| !self.retries.allows(peer, now)) {
                continue;
            }
            let ending =
                receiver.progress_close(endpoint, queue).unwrap_or(CloseProgress::Complete);
            match (ending, receiver.peer()) {
                (CloseProgress::Refused, Some(peer)) if self.retries.refused(peer, now) => {
                    given_up.push(peer);
                }
                (CloseProgress::Complete | CloseProgress::Pending, _) => {
                    peer.into_iter().for_each(|peer| self.retries.reached(peer));
                }
                _ => {}
            }
            if ending == CloseProgress::Complete {
                self.quarantine
                    .rings
                    .extend(place.take().and_then(|receiver| receiver.into_quarantined()));
                has_moved = true;
                if let Some(lanes) = &self.extra_lanes {
                    lanes.sweep();
                }
            }
        }
        has_moved
    }

    /// A peer was not told of ends for too long: rings end without that.
    fn abandon_end_notice(&mut self, peer: Peer) {
        for sender in self.senders.iter_mut().flatten().filter(|sender| sender.peer() == peer) {
            sender.abandon_end_notice();
        }
        for place in &mut self.receivers {
            let of_peer = place.as_mut().filter(|it| it.is_closing() && it.peer() == Some(peer));
            if of_peer.is_some_and(|receiver| receiver.abandon_end_notice()) {
                self.quarantine
                    .rings
                    .extend(place.take().and_then(|receiver| receiver.into_quarantined()));
            }
        }
        // What is over now goes at the next look.
        self.needs_polling = true;
    }
}
