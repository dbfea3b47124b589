//! The ends of rings, and the memory that has to outlive them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::board::Board;
use super::super::capacity::QueueCapacity;
use super::super::memory::RingMemory;
use super::super::receiver::ReceiverStatistics;
use super::super::retries::{Ending, Retries};
use super::super::sender::{RingSender, SenderStatistics};
use super::waiting::{Wait, late};
use super::{Port, ReceiverId, SenderId, find, open};
use crate::{CompletionQueue, Endpoint, MemoryRegion, Peer, Result};

/// How long a port that is closed goes on telling readers of the ends of their rings.
const FAREWELL: Duration = Duration::from_secs(1);

/// Memory of rings that peers may still write to. To be dropped after the endpoint is closed.
#[derive(Debug, Default)]
pub(super) struct Graves {
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
        let mut wait = Wait::new(FAREWELL);
        let is_ending = |sender: &RingSender| sender.is_retired() && !sender.has_ended();
        while self.senders.iter().flatten().any(|sender| is_ending(sender)) {
            if !matches!(wait.turn(&mut self), Ok(true)) {
                break;
            }
        }
        let lanes = self.close_lanes();
        let graves = self.bury_rings();
        let closed = self.endpoint.close().and(lanes);
        if closed.is_err() {
            std::mem::forget(graves);
        }
        closed
    }

    /// The memory of all rings, which are gone.
    fn bury_rings(&mut self) -> Graves {
        let mut graves = std::mem::take(&mut self.graves);
        for receiver in self.receivers.drain(..).flatten() {
            graves.rings.extend(receiver.into_grave());
        }
        self.senders.clear();
        graves.credit_memory = self.credit_memory.take();
        graves
    }

    /// Closes the endpoint, and goes on with another one, of the same domain, and its queue: by
    /// which the port is woken from now on. Further lanes are closed, too. All rings are gone, and so is all memory that was kept
    /// because something might be on its way to it: their peers hear nothing of this by the fabric.
    ///
    /// # Errors
    /// What the provider says: then the memory is kept for good, and what was posted may still be
    /// under way.
    pub fn renew(&mut self, endpoint: Endpoint, queue: CompletionQueue) -> Result<()> {
        let old = std::mem::replace(&mut self.endpoint, endpoint);
        // Not used again: ofi_rxm of libfabric 1.17 goes on asking an endpoint that is gone.
        let mut old_queue = std::mem::replace(&mut self.queue, queue);
        let lanes = self.close_lanes();
        let graves = self.bury_rings();
        let closed = old.close().and(lanes);
        while old_queue.poll().is_some() {}
        self.others.clear();
        if let Some(news) = &mut self.news {
            news.clear();
        }
        self.board = Board::new(self.endpoint.domain());
        let facts = self.endpoint.domain().capabilities();
        self.capacity = QueueCapacity::of(facts, self.queue.size());
        self.is_restless = false;
        self.retries = Retries::default();
        if closed.is_err() {
            std::mem::forget(graves);
        }
        closed
    }

    /// Bytes of memory that is kept because something may be on its way to it: of rings that
    /// were given up. It goes when the endpoint does; who keeps a port through
    /// the deaths of many writers may want to [renew](Self::renew) it when this grows.
    #[must_use]
    pub fn quarantined(&self) -> u64 {
        self.graves.rings.iter().map(|memory| memory.shape.capacity()).sum()
    }

    /// Rings that are gone, and whose share of the queue is kept all the same, since notices may
    /// still come: of writers that do not say that they are done, and of readers that do not say
    /// what they read last. None where the provider sees to it that queues do not overrun. The
    /// shares come back when the port is [renewed](Self::renew).
    #[must_use]
    pub fn quarantined_shares(&self) -> usize {
        let is_kept = |sender: &RingSender| {
            sender.is_retired() && sender.has_ended() && sender.expects_credit()
        };
        let senders = self.senders.iter().flatten().filter(|sender| is_kept(sender));
        let limited = self.graves.rings.iter().filter(|memory| memory.share.is_limited());
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
        self.retire(id, is_there);
        result?;
        let mut wait = Wait::new(timeout);
        while self.senders.get(usize::from(id.0)).is_some_and(Option::is_some) {
            if !wait.turn(self)? {
                return Err(late("closing a ring", timeout, "the reader may not know of the end"));
            }
        }
        Ok(statistics)
    }

    /// Lets go of the writing side, whatever is on its way. The reader is told that there will be
    /// nothing more, by the turns that follow; until then the ring's name is nobody else's.
    pub fn drop_sender(&mut self, id: SenderId) {
        self.retire(id, false);
    }

    /// Lets go of the writing side as [`drop_sender`](Self::drop_sender) does. The reader is told
    /// surely if it is known to be there: then the end of the ring waits for that.
    pub(in super::super) fn retire(&mut self, id: SenderId, surely: bool) {
        if let Ok(sender) = find(&mut self.senders, id.0) {
            sender.retire(surely);
            self.is_restless = true;
            self.go_on_closing();
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
        self.is_restless = true;
        self.go_on_closing();
        Ok(statistics)
    }

    /// Gives up a ring that is being closed, or of which the writer is known to be dead: its
    /// number is free. Its memory is [kept](Self::quarantined) all the same: what a dead writer
    /// had sent may still be on its way through the provider.
    pub fn forget(&mut self, id: ReceiverId) {
        let place = self.receivers.get_mut(usize::from(id.ring));
        let place = place.filter(|place| place.as_ref().is_some_and(|it| it.born() == id.born));
        if let Some(receiver) = place.and_then(Option::take) {
            self.graves.rings.extend(receiver.into_grave());
        }
    }

    /// Gives up a ring as by [`forget`](Self::forget), if it is still being closed: its writer may
    /// be dead without anybody having noticed. If it is gone, that is well: one that has its number
    /// by now stays.
    pub fn give_up(&mut self, id: ReceiverId) {
        let place = self.receivers.get(usize::from(id.ring)).and_then(Option::as_ref);
        if place.is_some_and(|it| it.born() == id.born && it.is_closing()) {
            self.forget(id);
        }
    }

    /// For rings that are being closed.
    #[cold]
    pub(super) fn go_on_closing(&mut self) -> bool {
        let now = Instant::now();
        let mut given_up = Vec::new();
        let has_moved =
            self.end_senders(now, &mut given_up) | self.end_receivers(now, &mut given_up);
        self.retries.sweep();
        for peer in &given_up {
            let name = self.endpoint.name_of(*peer);
            tracing::debug!(peer = name, "a peer could not be told that rings ended");
            self.give_up_telling(*peer);
        }
        has_moved || !given_up.is_empty()
    }

    fn end_senders(&mut self, now: Instant, given_up: &mut Vec<Peer>) -> bool {
        let mut has_moved = false;
        let (endpoint, queue) = (&mut self.endpoint, &mut self.queue);
        for place in &mut self.senders {
            let Some(sender) = place else { continue };
            let (peer, tells) = (sender.peer(), sender.tells_end());
            if tells && !self.retries.allows(peer, now) {
                continue;
            }
            let ending = sender.go_on_ending(endpoint, queue);
            match ending {
                Ending::Refused if self.retries.refused(peer, now) => given_up.push(peer),
                Ending::Over | Ending::Waits if tells => self.retries.reached(peer),
                _ => {}
            }
            if ending == Ending::Over && sender.is_retired() && !sender.expects_credit() {
                if let (Some(lanes), true) = (&mut self.beside, sender.lanes() > 1) {
                    lanes.close(sender.title());
                }
                *place = None;
                has_moved = true;
            }
        }
        has_moved
    }

    fn end_receivers(&mut self, now: Instant, given_up: &mut Vec<Peer>) -> bool {
        let mut has_moved = false;
        let (endpoint, queue) = (&mut self.endpoint, &mut self.queue);
        for place in &mut self.receivers {
            let Some(receiver) = place.as_mut().filter(|receiver| receiver.is_closing()) else {
                continue;
            };
            let peer = receiver.peer().filter(|_| receiver.tells_end());
            if peer.is_some_and(|peer| !self.retries.allows(peer, now)) {
                continue;
            }
            let ending = receiver.go_on_closing(endpoint, queue).unwrap_or(Ending::Over);
            match (ending, receiver.peer()) {
                (Ending::Refused, Some(peer)) if self.retries.refused(peer, now) => {
                    given_up.push(peer);
                }
                (Ending::Over | Ending::Waits, _) => {
                    peer.into_iter().for_each(|peer| self.retries.reached(peer));
                }
                _ => {}
            }
            if ending == Ending::Over {
                self.graves.rings.extend(place.take().and_then(|receiver| receiver.into_grave()));
                has_moved = true;
                if let Some(lanes) = &self.beside {
                    lanes.sweep();
                }
            }
        }
        has_moved
    }

    /// A peer was not told of ends for too long: rings end without that.
    fn give_up_telling(&mut self, peer: Peer) {
        for sender in self.senders.iter_mut().flatten().filter(|sender| sender.peer() == peer) {
            sender.give_up_telling();
        }
        for place in &mut self.receivers {
            let of_peer = place.as_mut().filter(|it| it.is_closing() && it.peer() == Some(peer));
            if of_peer.is_some_and(|receiver| receiver.give_up_telling()) {
                self.graves.rings.extend(place.take().and_then(|receiver| receiver.into_grave()));
            }
        }
        // What is over now goes at the next look.
        self.is_restless = true;
    }
}
