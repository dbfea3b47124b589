//! Closing rings, and the memory that has to outlive them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::memory::RingMemory;
use super::super::posted_receives::PostedReceives;
use super::super::queue_budget::QueueBudget;
use super::super::retries::{CloseProgress, Retries};
use super::super::{EndpointIo, ReceiverStatistics, RingSender, SenderStatistics};
use super::blocking_calls::{Wait, deadline_exceeded};
use super::{Port, ReceiverId, SenderId, receiver_mut, sender_mut};
use crate::{CompletionQueue, Endpoint, MemoryRegion, Peer, Result};

/// How long closing a port continues to send end notices.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

impl Port {
    /// Closes the endpoint and then frees all memory. Pending end notices are sent first, for at
    /// most one second.
    ///
    /// # Errors
    /// Errors of the provider; then the memory is never freed.
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
        let closed = self.io.endpoint.close().and(lanes);
        if closed.is_err() {
            std::mem::forget(quarantine);
        }
        closed
    }

    /// Drops all rings and returns their memory, to be dropped after the endpoint is closed.
    fn quarantine_rings(&mut self) -> (Vec<Arc<RingMemory>>, Option<MemoryRegion>) {
        self.senders.clear();
        self.owing_receivers.clear();
        let receivers = self.receivers.drain(..).flatten();
        self.quarantine.extend(receivers.filter_map(|it| it.into_quarantined()));
        (std::mem::take(&mut self.quarantine), self.credit_memory.take())
    }

    /// Closes the endpoint and continues with another one of the same domain, and with its queue,
    /// which from now on provides the waker. Closes extra lanes, too. All rings are dropped and
    /// quarantined memory is freed; peers get no notice over the fabric.
    ///
    /// # Errors
    /// Errors of the provider: then the memory is never freed, and posted operations may still be
    /// in flight.
    pub fn replace_endpoint(&mut self, endpoint: Endpoint, queue: CompletionQueue) -> Result<()> {
        // Not used again: ofi_rxm of libfabric 1.17 keeps polling a closed endpoint.
        let mut old = std::mem::replace(&mut self.io, EndpointIo { endpoint, queue });
        let lanes = self.close_lanes();
        let quarantine = self.quarantine_rings();
        let closed = old.endpoint.close().and(lanes);
        while old.queue.poll().is_some() {}
        self.caller_outcomes.clear();
        self.events.iter_mut().for_each(VecDeque::clear);
        self.posted_receives = PostedReceives::new(self.io.endpoint.domain());
        let capabilities = self.io.endpoint.domain().capabilities();
        self.queue_budget = QueueBudget::of(capabilities, self.io.queue.size());
        self.needs_polling = false;
        self.retries = Retries::default();
        if closed.is_err() {
            std::mem::forget(quarantine);
        }
        closed
    }

    /// Bytes of quarantined memory: rings that were abandoned and that writes may still reach. It
    /// is freed with the endpoint. A port that outlives many killed writers should
    /// [replace](Self::replace_endpoint) its endpoint when this grows.
    #[must_use]
    pub fn quarantined_bytes(&self) -> u64 {
        self.quarantine.iter().map(|memory| memory.capacity()).sum()
    }

    /// Quotas of the queue that closed rings still hold, since notices may follow: of writers
    /// without an end notice, and readers without a last credit. Always 0 where the provider keeps
    /// queues from overrunning. [Replacing](Self::replace_endpoint) the endpoint returns them.
    #[must_use]
    pub fn quarantined_quotas(&self) -> usize {
        let holds_quota = |sender: &RingSender| {
            sender.is_closing() && sender.is_end_notice_sent() && sender.expects_credit()
        };
        let senders = self.senders.iter().flatten().filter(|sender| holds_quota(sender));
        let limited = self.quarantine.iter().filter(|memory| memory.quota().is_limited());
        limited.count() + senders.count()
    }

    /// Closes a sender: waits until everything is read, and until the end notice has arrived at the
    /// reader.
    ///
    /// # Errors
    /// As [`flush`](Self::flush); the ring is closed in any case.
    pub fn close_sender(&mut self, id: SenderId, timeout: Duration) -> Result<SenderStatistics> {
        let statistics = self.sender(id)?.statistics();
        let result = self.flush(id, timeout);
        let is_alive = result.is_ok() && self.sender(id)?.broken().is_none();
        self.begin_close(id, is_alive);
        result?;
        let mut wait = Wait::new(timeout);
        while self.senders.get(usize::from(id.0)).is_some_and(Option::is_some) {
            if !wait.progress(self)? {
                let detail = "the reader may not have received the end notice";
                return Err(deadline_exceeded("close ring", timeout, detail));
            }
        }
        Ok(statistics)
    }

    /// Closes a sender without waiting. The end notice follows with later progress; until then the
    /// sender index is not reused.
    pub fn drop_sender(&mut self, id: SenderId) {
        self.begin_close(id, false);
    }

    /// Closes a sender as [`drop_sender`](Self::drop_sender) does. With `confirm_delivery` the ring
    /// waits until the end notice has arrived, which needs a live reader.
    pub(in super::super) fn begin_close(&mut self, id: SenderId, confirm_delivery: bool) {
        if let Ok(sender) = sender_mut(&mut self.senders, id.0) {
            sender.begin_close(confirm_delivery);
            self.needs_polling = true;
            self.progress_close();
        }
    }

    /// Closes a receiver. The writer is notified and answers when nothing is in flight; until then
    /// the memory stays and the ring index is not reused. A write to deregistered memory would
    /// break the connection for all rings. A killed writer never answers: then they stay until
    /// [`forget`](Self::forget), and the memory until the port is dropped.
    ///
    /// # Errors
    /// `Closed` if there is no such ring.
    pub fn close_receiver(&mut self, id: ReceiverId) -> Result<ReceiverStatistics> {
        let receiver = receiver_mut(&mut self.receivers, id)?;
        let statistics = receiver.statistics();
        receiver.close();
        self.needs_polling = true;
        self.progress_close();
        Ok(statistics)
    }

    /// Abandons a ring that is being closed, or whose writer is known to be dead: its index is
    /// free. Its memory is [quarantined](Self::quarantined_bytes), since writes of the dead process
    /// may still be in flight in the provider.
    pub fn forget(&mut self, id: ReceiverId) {
        let slot = self.receivers.get_mut(usize::from(id.ring));
        let slot = slot.filter(|slot| slot.as_ref().is_some_and(|it| it.id() == id));
        self.quarantine.extend(slot.and_then(Option::take).and_then(|it| it.into_quarantined()));
    }

    /// Abandons a ring as [`forget`](Self::forget) does if it is still being closed: its writer may
    /// have died unnoticed. Does nothing if the ring is gone, even if another ring has its index.
    pub fn forget_if_closing(&mut self, id: ReceiverId) {
        let receiver = self.receivers.get(usize::from(id.ring)).and_then(Option::as_ref);
        if receiver.is_some_and(|it| it.id() == id && it.is_closing()) {
            self.forget(id);
        }
    }

    #[cold]
    pub(super) fn progress_close(&mut self) -> bool {
        let now = Instant::now();
        let mut abandoned = Vec::new();
        let has_moved = self.progress_closing_senders(now, &mut abandoned)
            | self.progress_closing_receivers(now, &mut abandoned);
        self.retries.sweep();
        for peer in &abandoned {
            let name = self.io.endpoint.name_of(*peer);
            tracing::debug!(peer = name, "gave up sending end notices of rings to a peer");
            self.abandon_end_notice(*peer);
        }
        has_moved || !abandoned.is_empty()
    }

    fn progress_closing_senders(&mut self, now: Instant, abandoned: &mut Vec<Peer>) -> bool {
        let mut has_moved = false;
        for slot in &mut self.senders {
            let Some(sender) = slot else { continue };
            let (peer, is_ready) = (sender.peer(), sender.is_end_notice_ready());
            if is_ready && !self.retries.allows(peer, now) {
                continue;
            }
            let ending = sender.progress_close(&mut self.io);
            match ending {
                CloseProgress::Refused if self.retries.refused(peer, now) => abandoned.push(peer),
                CloseProgress::Complete | CloseProgress::Pending if is_ready => {
                    self.retries.reached(peer)
                }
                _ => {}
            }
            if ending == CloseProgress::Complete && sender.is_closing() && !sender.expects_credit()
            {
                if let (Some(lanes), true) = (&mut self.extra_lanes, sender.lanes() > 1) {
                    lanes.stop(sender.instance(), true);
                }
                *slot = None;
                has_moved = true;
            }
        }
        has_moved
    }

    fn progress_closing_receivers(&mut self, now: Instant, abandoned: &mut Vec<Peer>) -> bool {
        let mut has_moved = false;
        for slot in &mut self.receivers {
            let Some(receiver) = slot.as_mut().filter(|receiver| receiver.is_closing()) else {
                continue;
            };
            let peer = receiver.peer().filter(|_| receiver.is_end_notice_ready());
            if peer.is_some_and(|peer| !self.retries.allows(peer, now)) {
                continue;
            }
            let ending = receiver.progress_close(&mut self.io).unwrap_or(CloseProgress::Complete);
            match (ending, receiver.peer()) {
                (CloseProgress::Refused, Some(peer)) if self.retries.refused(peer, now) => {
                    abandoned.push(peer);
                }
                (CloseProgress::Complete | CloseProgress::Pending, _) => {
                    peer.into_iter().for_each(|peer| self.retries.reached(peer));
                }
                _ => {}
            }
            if ending == CloseProgress::Complete {
                self.quarantine.extend(slot.take().and_then(|it| it.into_quarantined()));
                has_moved = true;
                if let Some(lanes) = &self.extra_lanes {
                    lanes.sweep();
                }
            }
        }
        has_moved
    }

    /// A peer did not take end notices for too long: its rings end without them.
    fn abandon_end_notice(&mut self, peer: Peer) {
        for sender in self.senders.iter_mut().flatten().filter(|sender| sender.peer() == peer) {
            sender.abandon_end_notice();
        }
        for slot in &mut self.receivers {
            let of_peer = slot.as_mut().filter(|it| it.is_closing() && it.peer() == Some(peer));
            if of_peer.is_some_and(|receiver| receiver.abandon_end_notice()) {
                self.quarantine.extend(slot.take().and_then(|it| it.into_quarantined()));
            }
        }
        // The next step removes rings that have ended.
        self.needs_polling = true;
    }
}
