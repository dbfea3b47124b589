//! What happens at an agent without its doing: those that visit it, and what they tell.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ipc::WaitStrategy;

use super::notice::Notice;
use super::{Agent, BUSY_PAUSE};
use crate::error::{Error, ErrorKind, Result};
use crate::lock;

/// What happens at an agent without its doing.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// One began to visit, by however many rails.
    Joined {
        /// Its identity.
        from: [u8; 16],
        /// What people call it.
        label: String,
    },
    /// A notice came. The data of its transfer is there.
    Notice {
        /// Identity of its sender.
        from: [u8; 16],
        /// What it says.
        notice: Notice,
    },
    /// One left, or died, or the connection to it was lost. All its notices came before.
    Left {
        /// Its identity.
        from: [u8; 16],
        /// What people call it.
        label: String,
        /// Its process is gone; or it was not heard of for too long, by any rail.
        is_dead: bool,
    },
    /// One of the fabrics between this agent and another one is lost. The others go on, and it is
    /// tried again. If it was the last by which the other one visits, it has [left](Self::Left), too.
    RailLost {
        /// Identity of the other one.
        with: [u8; 16],
        /// What people call it.
        label: String,
        /// Which of this agent's [fabrics](super::AgentOptions::fabric), in the order in which they
        /// were given: the first is 0.
        rail: usize,
        /// Why.
        reason: String,
    },
    /// It is back, and carries bytes again. That is not told of one that has [left](Self::Left): it
    /// has [joined](Self::Joined) when it comes again, by whichever rails.
    RailRestored {
        /// Identity of the other one.
        with: [u8; 16],
        /// What people call it.
        label: String,
        /// Which of this agent's fabrics.
        rail: usize,
    },
}

impl Agent {
    /// What happened, if anything did.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.update_local_initiators();
        self.poll_rails();
        if let Some((event, taken)) = self.events.pop_front() {
            if let Some((rail, session)) = taken {
                self.remote_transport.notice_taken(rail, session);
            }
            return Some(event);
        }
        // Each in turn: one that says much does not keep others from being heard.
        for _ in 0..self.local_initiators.len() {
            self.next_initiator = (self.next_initiator + 1) % self.local_initiators.len();
            let initiator = &self.local_initiators[self.next_initiator];
            if let Some(notice) = lock(&initiator.local_session).take() {
                return Some(Event::Notice { from: initiator.identity, notice });
            }
        }
        None
    }

    /// Takes note of visitors that came, and of those that left.
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
            if !self.local_initiators.iter().any(|known| Arc::ptr_eq(known, initiator)) {
                let (from, label) = (initiator.identity, initiator.label.clone());
                self.events.push_back((Event::Joined { from, label }, None));
                self.local_initiators.push(Arc::clone(initiator));
            }
        }
        drop(all);
        let (left, stayed): (Vec<_>, Vec<_>) = std::mem::take(&mut self.local_initiators)
            .into_iter()
            .partition(|v| v.has_left.load(Ordering::Acquire));
        self.local_initiators = stayed;
        for initiator in &left {
            // What it left behind was there before it left.
            let mut local_session = lock(&initiator.local_session);
            for notice in local_session.take_rest() {
                self.events.push_back((Event::Notice { from: initiator.identity, notice }, None));
            }
            // Its process may have ended in order since, before anybody looked here.
            let is_dead = !local_session.left_cleanly() && initiator.pidfd.is_over();
            drop(local_session);
            let (from, label) = (initiator.identity, initiator.label.clone());
            self.events.push_back((Event::Left { from, label, is_dead }, None));
            initiator.departure_reported.store(true, Ordering::Relaxed);
        }
        self.local_target.remove_departed();
    }

    /// Waits until something happens, and goes on with what is under way meanwhile.
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
                    // As in `rest`: a rail's thread hears what comes.
                    std::thread::yield_now();
                }
                event
            });
            self.wait_strategy = wait_strategy;
            if let Some(event) = found {
                return Ok(event);
            }
            if Instant::now() >= end {
                let detail = format!("nothing happened in {timeout:?}");
                return Err(Error::new("wait for an event", ErrorKind::DeadlineExceeded, detail));
            }
        }
    }
}
