//! Calls that wait, by turns, with a deadline.

use std::time::{Duration, Instant};

use super::super::memory::View;
use super::super::sender::Pushed;
use super::super::writer::Message;
use super::{Port, QUIET, ReceiverId, SenderId, Turn};
use crate::waiting::Deadline;
use crate::{Error, ErrorKind, RegionSlice, Result};

/// Longest sleep while something is to be done that nothing wakes us for.
const NAP: Duration = Duration::from_micros(50);
/// Longest sleep otherwise.
const SLEEP: Duration = Duration::from_millis(50);

impl Port {
    /// Waits until the queue has something, in the way it was opened with, or until something
    /// is to be done that nothing wakes us for. Gives what a turn would; `Idle` after so
    /// long, or if another thread [woke](crate::Waker::wake) the queue's sleeper.
    ///
    /// # Errors
    /// As [`turn`](Self::turn).
    pub fn rest(&mut self, longest: Duration) -> Result<Turn> {
        self.rest_with_naps(longest, None)
    }

    /// The same, with sleeps of this length, if one is given, while something is to be done that
    /// nothing wakes us for: that may come late by as much. What the queue has still ends a sleep.
    pub(in super::super) fn rest_with_naps(
        &mut self,
        longest: Duration,
        nap: Option<Duration>,
    ) -> Result<Turn> {
        match self.others.pop_front() {
            Some(other) => Ok(Turn::Other(other)),
            None => self.fresh_rest(longest, nap.unwrap_or(NAP)),
        }
    }

    fn fresh_rest(&mut self, longest: Duration, nap: Duration) -> Result<Turn> {
        // Whoever drops a view from now on wakes us.
        self.receivers.iter().flatten().for_each(|receiver| receiver.sleeps());
        self.tell_all(true);
        let longest = longest.min(self.longest_sleep(nap));
        let told = self.sleep_lanes();
        let outcome = if told { None } else { self.queue.wait_or_wake(longest) };
        self.wake_lanes();
        self.receivers.iter().flatten().for_each(|receiver| receiver.is_awake());
        match outcome {
            Some(outcome) => self.sort(outcome),
            None if told || self.hear_lane() || self.tell_all(true) => Ok(Turn::Ring),
            None => self.idle(),
        }
    }

    /// How long nothing is to be done that nothing wakes us for.
    fn longest_sleep(&self, nap: Duration) -> Duration {
        if self.is_restless || self.owes_lanes() {
            return nap;
        }
        // Credit that there was no room for for long may wait an eighth of that once more.
        let unsent = self.receivers.iter().flatten().filter_map(|it| it.unsent_for());
        let unsent = unsent.map(|waited| (waited / 8).max(NAP)).min();
        let ends = self.retries.next().map(|next| next.saturating_duration_since(Instant::now()));
        unsent.into_iter().chain(ends).min().unwrap_or(SLEEP).min(SLEEP)
    }

    /// Writes a whole message and gives its number. The payload must stay as it is until
    /// [`next_read`](Self::next_read) names it.
    ///
    /// # Errors
    /// Why nothing more can be written to this ring; `DeadlineExceeded`, with how much was
    /// written and what was waited for. If that is nothing at all, it can be sent again; else
    /// the ring takes no other, so use [`finish`](Self::finish) where
    /// that may happen.
    pub fn send(
        &mut self,
        id: SenderId,
        topic: u32,
        payload: &RegionSlice,
        timeout: Duration,
    ) -> Result<u64> {
        let mut message = self.begin(id, topic, payload.len() as u64)?;
        self.finish(id, &mut message, payload, timeout)?;
        Ok(message.number())
    }

    /// Writes what is left of a message. What the caller posted and what ends meanwhile is
    /// given by later [turns](Self::turn).
    ///
    /// # Errors
    /// As [`send`](Self::send); but the message can be taken up again.
    pub fn finish(
        &mut self,
        id: SenderId,
        message: &mut Message,
        payload: &RegionSlice,
        timeout: Duration,
    ) -> Result<()> {
        let mut wait = Wait::new(timeout);
        loop {
            let waits_for = match self.push(id, message, payload)? {
                Pushed::Written => return Ok(()),
                Pushed::Posted(_) if message.is_written() => return Ok(()),
                Pushed::Posted(_) => continue,
                Pushed::Blocked(_) => "the reader to let go of something",
                Pushed::Busy => "the provider to make room",
            };
            if !wait.turn(self)? {
                let (written, length) = (message.written(), message.length());
                let detail = format!(
                    "{written} of {length} bytes of message {} are written, waiting for {waits_for}",
                    message.number()
                );
                let error = late("writing to a ring", timeout, detail);
                return Err(self.name_peer(error, id));
            }
        }
    }

    /// Waits until the reader has let go of all that was written.
    ///
    /// # Errors
    /// `DeadlineExceeded`, with how much it has not; why the ring is broken.
    pub fn flush(&mut self, id: SenderId, timeout: Duration) -> Result<()> {
        let mut wait = Wait::new(timeout);
        loop {
            let sender = self.sender(id)?;
            if sender.writer().unread() == 0 && sender.unfinished() == 0 {
                return Ok(());
            }
            if let Some(broken) = sender.broken() {
                return Err(broken.clone());
            }
            if !wait.turn(self)? {
                let writer = self.sender(id)?.writer();
                let detail = format!(
                    "{} of {} bytes are read, in {} chunks that are not",
                    writer.known_head(),
                    writer.tail(),
                    writer.unread()
                );
                let error = late("flushing a ring", timeout, detail);
                return Err(self.name_peer(error, id));
            }
        }
    }

    /// Waits for the next chunk of a ring.
    ///
    /// # Errors
    /// As [`take`](Self::take); `DeadlineExceeded`, with how much there is of the message.
    pub fn receive(&mut self, id: ReceiverId, timeout: Duration) -> Result<View> {
        let mut wait = Wait::new(timeout);
        loop {
            if let Some(view) = self.take(id)? {
                return Ok(view);
            }
            if !wait.turn(self)? {
                let reader = self.receiver(id)?.reader();
                let detail = format!(
                    "{} messages came whole, and {} bytes of the next one",
                    reader.whole(),
                    reader.received()
                );
                let error = late("reading a ring", timeout, detail);
                return Err(self.name(error, self.receiver(id)?.peer()));
            }
        }
    }
}

/// A wait by turns: for a while it looks, then it sleeps.
pub(super) struct Wait {
    deadline: Deadline,
    turns: u32,
    idle: u32,
}

impl Wait {
    pub(super) fn new(timeout: Duration) -> Self {
        Self { deadline: Deadline::after(timeout), turns: 0, idle: 0 }
    }

    /// False once the time is over.
    pub(super) fn turn(&mut self, port: &mut Port) -> Result<bool> {
        self.turns = self.turns.wrapping_add(1);
        let is_quiet = self.idle >= QUIET;
        let turn = match is_quiet {
            true => port.fresh_rest(self.deadline.left(), NAP)?,
            false => port.fresh_turn()?,
        };
        match turn {
            Turn::Idle => self.idle = self.idle.saturating_add(1),
            Turn::Ring => self.idle = 0,
            Turn::Other(outcome) => port.others.push_back(outcome),
        }
        if self.idle == 0 {
            port.tell_all(false);
        } else if !is_quiet {
            port.queue.pause();
        }
        // The clock costs as much as a turn, and others may keep the port busy.
        let is_time_to_look = is_quiet || self.turns.is_multiple_of(QUIET);
        Ok(!is_time_to_look || !self.deadline.has_passed())
    }
}

#[cold]
pub(super) fn late(
    operation: &'static str,
    timeout: Duration,
    detail: impl std::fmt::Display,
) -> Error {
    let detail = format!("nothing for {timeout:?}; {detail}");
    Error::new(ErrorKind::DeadlineExceeded, operation, detail)
}
