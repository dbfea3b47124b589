//! Messages that are said until they are heard, and taken once, in the order in which they were said.
//!
//! A connection that breaks and comes back may have lost what was on its way, and says nothing of it.
//! So the two sides of a session number what they say, from one on, and say with everything up to
//! which number they have heard the other. What is not known to be heard is said again, after pauses
//! that grow. What comes twice is left aside; what comes early waits for what is missing.
//!
//! Nothing here knows a fabric, and the time is told by who asks.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

#[cfg(test)]
mod tests;

/// Messages that may be said and not yet heard.
pub(super) const MAX_UNACKNOWLEDGED: usize = 512;
/// So many may come before the other side is told so.
const MAX_ACKS_DUE: u32 = 16;
/// It is told so after so long at the latest, if there is nothing else to say.
const MAX_ACK_DELAY: Duration = Duration::from_millis(20);

/// Why the other side is not to be believed any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ProtocolViolation {
    /// It heard what was not said.
    Acknowledged,
    /// It said more than may be on its way.
    Sent,
}

#[derive(Debug)]
struct Sent<M> {
    message: M,
    /// When it is said again, and how long it is waited then.
    next: Instant,
    pause: Duration,
}

/// One side of a session.
#[derive(Debug)]
pub(super) struct ReliableWindow<M> {
    /// The number of what is said next.
    next: u64,
    /// What was said last, and is not known to be heard: the oldest first.
    unacknowledged: VecDeque<Sent<M>>,
    /// First pause before something is said again, and the longest.
    pauses: (Duration, Duration),
    /// All up to this number was taken from the other side.
    received_up_to: u64,
    out_of_order: BTreeMap<u64, M>,
    /// What came and the other side was not told of, and since when.
    acks_due: u32,
    ack_due_since: Option<Instant>,
}

impl<M> ReliableWindow<M> {
    pub(super) fn new(first_pause: Duration, longest_pause: Duration) -> Self {
        Self {
            next: 1,
            unacknowledged: VecDeque::new(),
            pauses: (first_pause, longest_pause.max(first_pause)),
            received_up_to: 0,
            out_of_order: BTreeMap::new(),
            acks_due: 0,
            ack_due_since: None,
        }
    }

    /// Something is said; its number. None if too much is not heard yet.
    pub(super) fn send_message(&mut self, message: M, now: Instant) -> Option<u64> {
        if self.unacknowledged.len() >= MAX_UNACKNOWLEDGED {
            return None;
        }
        let pause = self.pauses.0;
        self.unacknowledged.push_back(Sent { message, next: now + pause, pause });
        self.next += 1;
        Some(self.next - 1)
    }

    /// May something be said that can wait? Most of what may be said and not yet heard is for what
    /// cannot; the other side answers, too, and has the same limit.
    pub(super) fn has_room(&self) -> bool {
        self.unacknowledged.len() < MAX_UNACKNOWLEDGED / 4
    }

    /// Up to which number the other side was heard: it is told so now.
    pub(super) fn acknowledge(&mut self) -> u64 {
        self.acks_due = 0;
        self.ack_due_since = None;
        self.received_up_to
    }

    /// The other side says that it heard all up to this number.
    pub(super) fn is_heard(&mut self, up_to: u64) -> Result<(), ProtocolViolation> {
        if up_to >= self.next {
            return Err(ProtocolViolation::Acknowledged);
        }
        // An older one may come later.
        let open = (self.next - 1 - up_to) as usize;
        while self.unacknowledged.len() > open {
            self.unacknowledged.pop_front();
        }
        Ok(())
    }

    /// Something came: it is given back if it is the next one. Behind it others may be
    /// [taken](Self::take).
    pub(super) fn hear(
        &mut self,
        number: u64,
        message: M,
        now: Instant,
    ) -> Result<Option<M>, ProtocolViolation> {
        if number > self.received_up_to + MAX_UNACKNOWLEDGED as u64 {
            return Err(ProtocolViolation::Sent);
        }
        // Also of what came before: the answer may have been lost.
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

    /// The next one of those that came early.
    pub(super) fn take(&mut self) -> Option<M> {
        let message = self.out_of_order.remove(&(self.received_up_to + 1))?;
        self.received_up_to += 1;
        Some(message)
    }

    /// Is it time to tell the other side what came?
    pub(super) fn ack_is_due(&self, now: Instant) -> bool {
        self.acks_due >= MAX_ACKS_DUE
            || self.ack_due_since.is_some_and(|since| now - since >= MAX_ACK_DELAY)
    }

    /// What is to be said again, with its number.
    pub(super) fn due_retransmits(&mut self, now: Instant) -> impl Iterator<Item = (u64, &M)> {
        let first = self.next - self.unacknowledged.len() as u64;
        let longest = self.pauses.1;
        (first..).zip(&mut self.unacknowledged).filter(move |(_, sent)| sent.next <= now).map(
            move |(number, sent)| {
                sent.pause = (2 * sent.pause).min(longest);
                sent.next = now + sent.pause;
                (number, &sent.message)
            },
        )
    }

    /// Something is known to be lost: all is said again without a long pause.
    pub(super) fn retransmit_soon(&mut self, next: Instant) {
        for sent in &mut self.unacknowledged {
            sent.next = sent.next.min(next);
        }
    }
}
