//! A session with another rail, and its keepalive.

use std::time::{Duration, Instant};

use fabric::Peer;

use super::message::{Frame, Message};
use super::reliable_window::{ProtocolViolation, ReliableWindow};

pub(super) const CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// Number of unanswered pings before a session is lost.
const PINGS_UNTIL_LOST: u32 = 8;
/// A peer whose data moves but that sends nothing for this many timeouts is lost: it may have lost
/// the session.
const MAX_SILENT_PERIODS: u32 = 3;

/// Which session sends or receives a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum SessionKey {
    Link(u32),
    Initiator(u64),
    /// A refused peer.
    NoSession,
}

/// Why a session is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CloseReason {
    /// The agent disconnected.
    Left,
    /// The peer closed it. Retried only at the agent's request.
    Bye,
    /// The peer violates the protocol, or this rail ends. Not retried either.
    Fatal,
    /// The peer is silent. Retried.
    Lost,
}

/// The pause before the first retransmission.
pub(super) fn first_pause(lost_after: Duration) -> Duration {
    (lost_after / PINGS_UNTIL_LOST).max(CHECK_INTERVAL)
}

/// State that links and initiators share: the peer and the messages.
#[derive(Debug)]
pub(super) struct Session {
    key: SessionKey,
    id: u64,
    peer: Peer,
    lost_after: Duration,
    keepalive: Keepalive,
    reliable_window: ReliableWindow<Message>,
}

impl Session {
    pub(super) fn new(key: SessionKey, id: u64, peer: Peer, lost_after: Duration) -> Self {
        let reliable_window = ReliableWindow::new(first_pause(lost_after), lost_after / 2);
        Self { key, id, peer, lost_after, keepalive: Keepalive::new(), reliable_window }
    }

    pub(super) fn key(&self) -> SessionKey {
        self.key
    }

    pub(super) fn id(&self) -> u64 {
        self.id
    }

    pub(super) fn peer(&self) -> Peer {
        self.peer
    }

    /// Encodes a message for the peer, with an acknowledgement. Numbered messages are retransmitted
    /// until they are acknowledged. None if the peer acknowledges none.
    pub(super) fn encode(&mut self, message: &Message) -> Option<Vec<u8>> {
        let number = match message.is_numbered() {
            true => self.reliable_window.send_message(message.clone(), Instant::now())?,
            false => 0,
        };
        Some(self.encode_numbered(number, message))
    }

    /// Encodes a message that has this number already.
    pub(super) fn encode_numbered(&mut self, number: u64, message: &Message) -> Vec<u8> {
        message.encode(self.id, number, self.reliable_window.acknowledge())
    }

    pub(super) fn due_retransmits(&mut self, now: Instant) -> Vec<(u64, Message)> {
        let due = self.reliable_window.due_retransmits(now);
        due.map(|(number, message)| (number, message.clone())).collect()
    }

    /// Receives a frame, and returns its message if it is the next one. [More](Self::next_in_order)
    /// may follow it.
    pub(super) fn receive(
        &mut self,
        frame: Frame,
        now: Instant,
    ) -> Result<Option<Message>, ProtocolViolation> {
        (self.keepalive.last_message, self.keepalive.last_activity) = (now, now);
        self.reliable_window.acknowledge_up_to(frame.acknowledged)?;
        match frame.number {
            0 => Ok(Some(frame.message)),
            number => self.reliable_window.receive(number, frame.message, now),
        }
    }

    pub(super) fn next_in_order(&mut self) -> Option<Message> {
        self.reliable_window.next_in_order()
    }

    pub(super) fn ack_is_due(&self, now: Instant) -> bool {
        self.reliable_window.ack_is_due(now)
    }

    pub(super) fn has_room(&self) -> bool {
        self.reliable_window.has_room()
    }

    /// A message was not sent.
    pub(super) fn retransmit_soon(&mut self) {
        self.reliable_window.retransmit_soon(Instant::now() + CHECK_INTERVAL);
    }

    /// Data moved. One-sided operations continue even if the peer has lost the session, so this
    /// counts for a limited time.
    pub(super) fn data_moved(&mut self) {
        self.keepalive.last_activity = Instant::now();
    }

    pub(super) fn is_lost(&self, now: Instant) -> bool {
        self.keepalive.is_lost(now, self.lost_after)
    }

    pub(super) fn should_ping(&mut self, now: Instant) -> bool {
        self.keepalive.should_ping(now, self.lost_after)
    }
}

/// Decides when a session is lost.
#[derive(Debug)]
struct Keepalive {
    /// The last activity of any kind, and the last message.
    last_activity: Instant,
    last_message: Instant,
    last_ping: Instant,
}

impl Keepalive {
    fn new() -> Self {
        let now = Instant::now();
        Self { last_activity: now, last_message: now, last_ping: now }
    }

    fn is_lost(&self, now: Instant, after: Duration) -> bool {
        now.saturating_duration_since(self.last_activity) > after
            || now.saturating_duration_since(self.last_message)
                > after.saturating_mul(MAX_SILENT_PERIODS)
    }

    /// Is a ping due?
    fn should_ping(&mut self, now: Instant, lost_after: Duration) -> bool {
        let interval = lost_after / PINGS_UNTIL_LOST;
        let should_ping = now.saturating_duration_since(self.last_message) > interval
            && now.saturating_duration_since(self.last_ping) > interval;
        if should_ping {
            self.last_ping = now;
        }
        should_ping
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AFTER: Duration = Duration::from_secs(8);

    #[test]
    fn silent_peer_is_pinged_several_times_before_it_is_lost() {
        let mut keepalive = Keepalive::new();
        let start = keepalive.last_activity;
        let second = Duration::from_secs(1);
        let last_ping =
            (0..80).filter(|tenth| keepalive.should_ping(start + second * *tenth / 10, AFTER));
        assert_eq!(last_ping.count(), 7);
        assert!(!keepalive.is_lost(start + AFTER, AFTER));
        assert!(keepalive.is_lost(start + AFTER + second, AFTER));
    }

    #[test]
    fn timeout_may_be_the_maximum_duration() {
        let mut keepalive = Keepalive::new();
        let later = keepalive.last_activity + Duration::from_secs(1000);
        assert!(
            !keepalive.is_lost(later, Duration::MAX)
                && !keepalive.should_ping(later, Duration::MAX)
        );
    }

    #[test]
    fn moving_data_keeps_a_session_for_a_limited_time() {
        let mut keepalive = Keepalive::new();
        let start = keepalive.last_activity;
        keepalive.last_activity = start + 2 * AFTER;
        assert!(!keepalive.is_lost(start + 3 * AFTER, AFTER), "data moves");
        keepalive.last_activity = start + 3 * AFTER;
        assert!(keepalive.is_lost(start + 3 * AFTER + AFTER / 8, AFTER), "no message arrives");
    }
}
