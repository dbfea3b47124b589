//! Events of an agent: initiators that connect and disconnect, and their notices.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ipc::WaitStrategy;

use super::notice::Notice;
use super::{Agent, BUSY_PAUSE};
use crate::error::{Error, ErrorKind, Result};
use crate::lock;

/// An event that peers caused.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// An initiator connected, by one or more rails.
    Joined {
        /// Its identity.
        from: [u8; 16],
        /// Its label.
        label: String,
    },
    /// A notice arrived. The data of its transfer has arrived before.
    Notice {
        /// Identity of its sender.
        from: [u8; 16],
        /// Its contents.
        notice: Notice,
    },
    /// An initiator disconnected or died, or the connection to it was lost. All its notices were
    /// reported before.
    Left {
        /// Its identity.
        from: [u8; 16],
        /// Its label.
        label: String,
        /// Its process ended, or no rail received anything from it within the timeout.
        is_dead: bool,
    },
    /// A fabric between this agent and a peer was lost. The other rails continue, and this one is
    /// retried. If it was the last one of an initiator, [`Left`](Self::Left) is reported too.
    RailLost {
        /// Identity of the peer.
        with: [u8; 16],
        /// Label of the peer.
        label: String,
        /// Index of the [fabric](super::AgentOptions::fabric) of this agent, from 0.
        rail: usize,
        /// The cause.
        reason: String,
    },
    /// A lost rail carries bytes again. Not reported for an initiator that has [left](Self::Left):
    /// it is reported as [joined](Self::Joined) when it reconnects.
    RailRestored {
        /// Identity of the peer.
        with: [u8; 16],
        /// Label of the peer.
        label: String,
        /// Index of the fabric of this agent.
        rail: usize,
    },
}

impl Agent {
    /// The next event, if any.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.update_local_initiators();
        self.poll_rails();
        if let Some((event, taken)) = self.events.pop_front() {
            if let Some((rail, session)) = taken {
                self.remote_transport.notice_taken(rail, session);
            }
            return Some(event);
        }
        // Round robin: an initiator with many notices does not starve the others.
        for _ in 0..self.local_initiators.len() {
            self.next_initiator = (self.next_initiator + 1) % self.local_initiators.len();
            let initiator = &self.local_initiators[self.next_initiator];
            if let Some(notice) = lock(&initiator.local_session).take() {
                return Some(Event::Notice { from: initiator.identity, notice });
            }
        }
        None
    }

    /// Reports initiators that connected or disconnected.
    pub(super) fn update_local_initiators(&mut self) {
        let changes = self.local_target.changes.load(Ordering::Acquire);
        if changes == self.seen_changes {
            return;
        }
        self.seen_changes = changes;
        let all = lock(&self.local_target.local_initiators);
        for initiator in
            all.iter().filter(|initiator| !initiator.departure_reported.load(Ordering::Relaxed))
        {
            if !self.local_initiators.iter().any(|reported| Arc::ptr_eq(reported, initiator)) {
                let (from, label) = (initiator.identity, initiator.label.clone());
                self.events.push_back((Event::Joined { from, label }, None));
                self.local_initiators.push(Arc::clone(initiator));
            }
        }
        drop(all);
        let (left, remaining): (Vec<_>, Vec<_>) = std::mem::take(&mut self.local_initiators)
            .into_iter()
            .partition(|v| v.has_left.load(Ordering::Acquire));
        self.local_initiators = remaining;
        for initiator in &left {
            // Notices that it sent before are reported first.
            let mut local_session = lock(&initiator.local_session);
            for notice in local_session.take_rest() {
                self.events.push_back((Event::Notice { from: initiator.identity, notice }, None));
            }
            // Its process may have exited regularly since it disconnected.
            let is_dead = !local_session.left_cleanly() && initiator.pidfd.is_over();
            drop(local_session);
            let (from, label) = (initiator.identity, initiator.label.clone());
            self.events.push_back((Event::Left { from, label, is_dead }, None));
            initiator.departure_reported.store(true, Ordering::Relaxed);
        }
        self.local_target.remove_departed();
    }

    /// Waits for an event, and makes progress meanwhile.
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded).
    pub fn next_event(&mut self, timeout: Duration) -> Result<Event> {
        let end = ipc::deadline(timeout);
        let local_target = Arc::clone(&self.local_target);
        loop {
            let until = if self.operations.in_flight == 0 {
                end
            } else {
                end.min(Instant::now() + BUSY_PAUSE)
            };
            let mut wait_strategy = self.wait_strategy;
            let found = local_target.doorbell.wait(&mut wait_strategy, until, || {
                self.progress();
                let event = self.poll_event();
                if event.is_none()
                    && self.wait_strategy == WaitStrategy::Busy
                    && !self.remote_transport.rails.is_empty()
                {
                    // As in `pause`: a rail's thread receives events.
                    std::thread::yield_now();
                }
                event
            });
            self.wait_strategy = wait_strategy;
            if let Some(event) = found {
                return Ok(event);
            }
            if Instant::now() >= end {
                let detail = format!("no event after {timeout:?}");
                return Err(Error::new("wait for an event", ErrorKind::DeadlineExceeded, detail));
            }
        }
    }
}
