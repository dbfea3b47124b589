//! What happens at an agent without its doing: those that visit it, and what they tell.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ipc::Spin;

use super::notice::Notice;
use super::{Agent, REST};
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
    RailBack {
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
        self.see_visitors();
        self.hear();
        if let Some((event, taken)) = self.events.pop_front() {
            if let Some((rail, session)) = taken {
                self.far.has_taken(rail, session);
            }
            return Some(event);
        }
        // Each in turn: one that says much does not keep others from being heard.
        for _ in 0..self.visitors.len() {
            self.next_visitor = (self.next_visitor + 1) % self.visitors.len();
            let visitor = &self.visitors[self.next_visitor];
            if let Some(notice) = lock(&visitor.visit).take() {
                return Some(Event::Notice { from: visitor.identity, notice });
            }
        }
        None
    }

    /// Takes note of visitors that came, and of those that left.
    pub(super) fn see_visitors(&mut self) {
        let changes = self.home.changes.load(Ordering::Acquire);
        if changes == self.seen_changes {
            return;
        }
        self.seen_changes = changes;
        let all = lock(&self.home.visitors);
        for visitor in all.iter().filter(|visitor| !visitor.is_told_of.load(Ordering::Relaxed)) {
            if !self.visitors.iter().any(|known| Arc::ptr_eq(known, visitor)) {
                let (from, label) = (visitor.identity, visitor.label.clone());
                self.events.push_back((Event::Joined { from, label }, None));
                self.visitors.push(Arc::clone(visitor));
            }
        }
        drop(all);
        let (left, stayed): (Vec<_>, Vec<_>) = std::mem::take(&mut self.visitors)
            .into_iter()
            .partition(|v| v.has_left.load(Ordering::Acquire));
        self.visitors = stayed;
        for visitor in &left {
            // What it left behind was there before it left.
            let mut visit = lock(&visitor.visit);
            for notice in visit.take_rest() {
                self.events.push_back((Event::Notice { from: visitor.identity, notice }, None));
            }
            // Its process may have ended in order since, before anybody looked here.
            let is_dead = !visit.heard_goodbye() && visitor.life.is_over();
            drop(visit);
            let (from, label) = (visitor.identity, visitor.label.clone());
            self.events.push_back((Event::Left { from, label, is_dead }, None));
            visitor.is_told_of.store(true, Ordering::Relaxed);
        }
        self.home.forget_departed();
    }

    /// Waits until something happens, and goes on with what is under way meanwhile.
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded).
    pub fn next_event(&mut self, patience: Duration) -> Result<Event> {
        let end = ipc::deadline(patience);
        let home = Arc::clone(&self.home);
        loop {
            let until =
                if self.operations.under_way == 0 { end } else { end.min(Instant::now() + REST) };
            let mut waiting = self.waiting;
            let found = home.doorbell.wait(&mut waiting, until, || {
                self.progress();
                let event = self.poll_event();
                if event.is_none() && self.waiting == Spin::Always && !self.far.rails.is_empty() {
                    // As in `rest`: a rail's thread hears what comes.
                    std::thread::yield_now();
                }
                event
            });
            self.waiting = waiting;
            if let Some(event) = found {
                return Ok(event);
            }
            if Instant::now() >= end {
                let detail = format!("nothing happened in {patience:?}");
                return Err(Error::new("wait for an event", ErrorKind::DeadlineExceeded, detail));
            }
        }
    }
}
