//! Messages that are retransmitted until they are acknowledged, and delivered once and in order.
//!
//! A connection that breaks and recovers may silently lose messages. So both sides of a session
//! number their messages from one, and acknowledge with every frame. Unacknowledged messages are
//! retransmitted after growing pauses. Duplicates are dropped; messages out of order wait for the
//! missing ones.
//!
//! This module knows no fabric, and takes the time as an argument.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use threads::RetryBackoff;

#[cfg(test)]
mod tests;

pub(super) const MAX_UNACKNOWLEDGED: usize = 512;
/// Messages after which an acknowledgement is due.
const MAX_ACKS_DUE: u32 = 16;
/// Time after which an acknowledgement is due.
const MAX_ACK_DELAY: Duration = Duration::from_millis(20);

/// A violation of the protocol by the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ProtocolViolation {
    /// The peer acknowledged a message that was not sent.
    Acknowledged,
    /// The peer sent more messages than the window allows.
    Sent,
}

#[derive(Debug)]
struct Sent<M> {
    message: M,
    /// The next retransmission.
    next: Instant,
    backoff: RetryBackoff,
}

/// One side of a session.
#[derive(Debug)]
pub(super) struct ReliableWindow<M> {
    /// The number of the next message.
    next: u64,
    /// Sent messages without acknowledgement, the oldest first.
    unacknowledged: VecDeque<Sent<M>>,
    /// Pauses before retransmissions of a new message.
    backoff: RetryBackoff,
    /// All messages up to this number were received.
    received_up_to: u64,
    out_of_order: BTreeMap<u64, M>,
    /// Number of received messages that were not acknowledged, and since when.
    acks_due: u32,
    ack_due_since: Option<Instant>,
}

impl<M> ReliableWindow<M> {
    pub(super) fn new(first_pause: Duration, longest_pause: Duration) -> Self {
        Self {
            next: 1,
            unacknowledged: VecDeque::new(),
            backoff: RetryBackoff::new(first_pause, longest_pause.max(first_pause)),
            received_up_to: 0,
            out_of_order: BTreeMap::new(),
            acks_due: 0,
            ack_due_since: None,
        }
    }

    /// Sends a message and returns its number. None if the window is full.
    pub(super) fn send_message(&mut self, message: M, now: Instant) -> Option<u64> {
        if self.unacknowledged.len() >= MAX_UNACKNOWLEDGED {
            return None;
        }
        let mut backoff = self.backoff;
        let next = now + backoff.next_pause();
        self.unacknowledged.push_back(Sent { message, next, backoff });
        self.next += 1;
        Some(self.next - 1)
    }

    /// Is there room for messages that can wait? Most of the window is reserved for others, such as
    /// replies.
    pub(super) fn has_room(&self) -> bool {
        self.unacknowledged.len() < MAX_UNACKNOWLEDGED / 4
    }

    /// The number to acknowledge, which is sent now.
    pub(super) fn acknowledge(&mut self) -> u64 {
        self.acks_due = 0;
        self.ack_due_since = None;
        self.received_up_to
    }

    /// The peer acknowledges all messages up to this number.
    pub(super) fn acknowledge_up_to(&mut self, up_to: u64) -> Result<(), ProtocolViolation> {
        if up_to >= self.next {
            return Err(ProtocolViolation::Acknowledged);
        }
        // Frames may arrive out of order.
        let open = (self.next - 1 - up_to) as usize;
        while self.unacknowledged.len() > open {
            self.unacknowledged.pop_front();
        }
        Ok(())
    }

    /// Receives a message, and returns it if it is the next one. [More](Self::next_in_order) may
    /// follow it.
    pub(super) fn receive(
        &mut self,
        number: u64,
        message: M,
        now: Instant,
    ) -> Result<Option<M>, ProtocolViolation> {
        if number > self.received_up_to + MAX_UNACKNOWLEDGED as u64 {
            return Err(ProtocolViolation::Sent);
        }
        // Duplicates too: their acknowledgement may have been lost.
        self.acks_due += 1;
        self.ack_due_since.get_or_insert(now);
        if number == self.received_up_to + 1 {
            self.received_up_to = number;
            self.out_of_order.remove(&number);
            return Ok(Some(message));
        }
        if number > self.received_up_to {
            self.out_of_order.entry(number).or_insert(message);
        }
        Ok(None)
    }

    /// The next message that was received out of order.
    pub(super) fn next_in_order(&mut self) -> Option<M> {
        let message = self.out_of_order.remove(&(self.received_up_to + 1))?;
        self.received_up_to += 1;
        Some(message)
    }

    pub(super) fn ack_is_due(&self, now: Instant) -> bool {
        self.acks_due >= MAX_ACKS_DUE
            || self.ack_due_since.is_some_and(|since| now - since >= MAX_ACK_DELAY)
    }

    /// Messages to retransmit, with their numbers.
    pub(super) fn due_retransmits(&mut self, now: Instant) -> impl Iterator<Item = (u64, &M)> {
        let first = self.next - self.unacknowledged.len() as u64;
        (first..).zip(&mut self.unacknowledged).filter(move |(_, sent)| sent.next <= now).map(
            move |(number, sent)| {
                sent.next = now + sent.backoff.next_pause();
                (number, &sent.message)
            },
        )
    }

    /// A loss was detected: retransmits all messages soon.
    pub(super) fn retransmit_soon(&mut self, next: Instant) {
        for sent in &mut self.unacknowledged {
            sent.next = sent.next.min(next);
        }
    }
}
