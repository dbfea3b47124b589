//! Calls that wait, with a deadline, and make progress meanwhile.

use std::time::{Duration, Instant};

use super::super::{ChunkView, Message, Pushed, RingReceiver, RingSender};
use super::{IDLE_POLLS, Port, PortEvent, ReceiverId, SenderId};
use crate::waiting::Deadline;
use crate::{Error, ErrorKind, RegionSlice, Result};

/// Longest sleep while there is work for which no wake-up arrives.
const SHORT_SLEEP: Duration = Duration::from_micros(50);
/// Longest sleep otherwise.
const MAX_SLEEP: Duration = Duration::from_millis(50);

impl Port {
    /// Waits in the queue, with the wait strategy it was opened with, for at most `longest` or
    /// until there is work without a wake-up. Returns the event of a step. `Idle` means that time
    /// is over, or that another thread [woke](crate::Waker::wake) this one.
    ///
    /// # Errors
    /// As [`progress`](Self::progress).
    pub fn wait(&mut self, longest: Duration) -> Result<PortEvent> {
        self.wait_with_max_sleep(longest, None)
    }

    /// Like [`wait`](Self::wait), with another limit of sleeps while there is work without a
    /// wake-up, which may be late by that much. Completions still end a sleep.
    pub(in super::super) fn wait_with_max_sleep(
        &mut self,
        longest: Duration,
        short_sleep: Option<Duration>,
    ) -> Result<PortEvent> {
        match self.caller_outcomes.pop_front() {
            Some(other) => Ok(PortEvent::Other(other)),
            None => self.wait_for_queue(longest, short_sleep.unwrap_or(SHORT_SLEEP)),
        }
    }

    fn wait_for_queue(&mut self, longest: Duration, short_sleep: Duration) -> Result<PortEvent> {
        // Dropping a view wakes this thread from now on.
        self.set_receivers_sleeping(true);
        self.return_all_credit(true);
        let longest = longest.min(self.max_sleep(short_sleep));
        let has_event = self.set_lanes_sleeping();
        let outcome = if has_event { None } else { self.io.queue.wait_or_wake(longest) };
        self.extra_lanes.iter().for_each(|lanes| lanes.set_sleeping(false));
        self.set_receivers_sleeping(false);
        match outcome {
            Some(outcome) => self.dispatch(outcome),
            None if has_event || self.handle_lane_event() || self.return_all_credit(true) => {
                Ok(PortEvent::Ring)
            }
            None => self.idle(),
        }
    }

    /// Sets whether dropping a view wakes this thread.
    fn set_receivers_sleeping(&self, is_asleep: bool) {
        self.owing().for_each(|receiver| receiver.set_sleeping(is_asleep));
    }

    /// Receivers whose writers may be owed credit.
    fn owing(&self) -> impl Iterator<Item = &RingReceiver> {
        self.owing_receivers.iter().filter_map(|id| self.receiver(*id).ok())
    }

    /// How long no work without a wake-up is due.
    pub(in super::super) fn max_sleep(&self, short_sleep: Duration) -> Duration {
        if self.needs_polling || self.extra_lanes.as_ref().is_some_and(|it| it.needs_polling()) {
            return short_sleep;
        }
        // Long-pending credit may wait an eighth of its age once more.
        let unsent = self.owing().filter_map(|it| it.credit_unsent_for());
        let unsent = unsent.map(|waited| (waited / 8).max(SHORT_SLEEP)).min();
        let ends = self.retries.next().map(|next| next.saturating_duration_since(Instant::now()));
        unsent.into_iter().chain(ends).min().unwrap_or(MAX_SLEEP).min(MAX_SLEEP)
    }

    /// Writes a whole message and returns its number. The payload must not change until
    /// [`next_read`](Self::next_read) returns that number.
    ///
    /// # Errors
    /// Why the ring is broken; `DeadlineExceeded`, with the bytes written and what the call waited
    /// for. If no byte was written, the message can be sent again. Otherwise the ring accepts no
    /// other message, so use [`finish`](Self::finish) where that may happen.
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

    /// Writes the rest of a message. Completions of the caller's operations are returned by later
    /// calls of [`progress`](Self::progress).
    ///
    /// # Errors
    /// As [`send`](Self::send); but the call can be repeated to continue the message.
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
                Pushed::Blocked(_) => "the reader to release chunks",
                Pushed::Busy => "room in the provider's queue",
            };
            if !wait.progress(self)? {
                let (written, length, number) =
                    (message.written(), message.length(), message.number());
                let detail = format!(
                    "{written} of {length} bytes of message {number} are written, waiting for {waits_for}"
                );
                let peer = self.sender(id).ok().map(RingSender::peer);
                return Err(self.deadline_error("write to ring", timeout, detail, peer));
            }
        }
    }

    /// Waits until the reader has released everything that was written.
    ///
    /// # Errors
    /// `DeadlineExceeded`, with the bytes not released; why the ring is broken.
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
            if !wait.progress(self)? {
                let sender = self.sender(id)?;
                let writer = sender.writer();
                let (head, tail, unread) = (writer.known_head(), writer.tail(), writer.unread());
                let detail =
                    format!("{head} of {tail} bytes are released, {unread} chunks are not");
                let peer = Some(sender.peer());
                return Err(self.deadline_error("flush ring", timeout, detail, peer));
            }
        }
    }

    /// Waits for the next chunk of a ring.
    ///
    /// # Errors
    /// As [`take`](Self::take); `DeadlineExceeded`, with the bytes received of the message.
    pub fn receive(&mut self, id: ReceiverId, timeout: Duration) -> Result<ChunkView> {
        let mut wait = Wait::new(timeout);
        loop {
            if let Some(view) = self.take(id)? {
                return Ok(view);
            }
            if !wait.progress(self)? {
                let reader = self.receiver(id)?.reader();
                let (messages, bytes) = (reader.completed_messages(), reader.received());
                let detail =
                    format!("{messages} messages arrived, and {bytes} bytes of the next one");
                let peer = self.receiver(id)?.peer();
                return Err(self.deadline_error("read from ring", timeout, detail, peer));
            }
        }
    }
}

/// A wait with progress: it polls for a while, then sleeps.
pub(super) struct Wait {
    deadline: Deadline,
    steps: u32,
    idle: u32,
}

impl Wait {
    pub(super) fn new(timeout: Duration) -> Self {
        Self { deadline: Deadline::after(timeout), steps: 0, idle: 0 }
    }

    /// False once the deadline has passed.
    pub(super) fn progress(&mut self, port: &mut Port) -> Result<bool> {
        self.steps = self.steps.wrapping_add(1);
        let is_idle = self.idle >= IDLE_POLLS;
        let progress = match is_idle {
            true => port.wait_for_queue(self.deadline.left(), SHORT_SLEEP)?,
            false => port.progress_queue()?,
        };
        match progress {
            PortEvent::Idle => self.idle = self.idle.saturating_add(1),
            PortEvent::Ring => self.idle = 0,
            PortEvent::Other(outcome) => port.caller_outcomes.push_back(outcome),
        }
        if self.idle == 0 {
            port.return_all_credit(false);
        } else if !is_idle {
            port.io.queue.pause();
        }
        // Reading the clock costs as much as a step, and other rings may keep the port busy.
        let checks_clock = is_idle || self.steps.is_multiple_of(IDLE_POLLS);
        Ok(!checks_clock || !self.deadline.has_passed())
    }
}

#[cold]
pub(super) fn deadline_exceeded(
    operation: &'static str,
    timeout: Duration,
    detail: impl std::fmt::Display,
) -> Error {
    let detail = format!("no progress within {timeout:?}: {detail}");
    Error::new(ErrorKind::DeadlineExceeded, operation, detail)
}
