//! A session with another rail, and its keepalive.

use std::time::{Duration, Instant};

use fabric::Peer;

use super::message::Message;
use super::reliable_window::ReliableWindow;

/// Number of unanswered pings before a session is lost.
pub(super) const PINGS_UNTIL_LOST: u32 = 8;
/// A peer whose data moves but that sends nothing for this many timeouts is lost: it may have lost
/// the session.
const MAX_SILENT_PERIODS: u32 = 3;

/// State that links and initiators share: the peer and the messages.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) id: u64,
    pub(super) peer: Peer,
    pub(super) keepalive: Keepalive,
    pub(super) reliable_window: ReliableWindow<Message>,
}

/// Decides when a session is lost.
#[derive(Debug)]
pub(super) struct Keepalive {
    /// The last activity of any kind, and the last message.
    last_activity: Instant,
    last_message: Instant,
    last_ping: Instant,
}

impl Keepalive {
    pub(super) fn new() -> Self {
        let now = Instant::now();
        Self { last_activity: now, last_message: now, last_ping: now }
    }

    /// A message was received.
    pub(super) fn message_received(&mut self) {
        self.last_activity = Instant::now();
        self.last_message = self.last_activity;
    }

    /// Data moved. One-sided operations continue even if the peer has lost the session, so this
    /// counts for a limited time.
    pub(super) fn data_moved(&mut self) {
        self.last_activity = Instant::now();
    }

    pub(super) fn is_lost(&self, now: Instant, after: Duration) -> bool {
        now.saturating_duration_since(self.last_activity) > after
            || now.saturating_duration_since(self.last_message)
                > after.saturating_mul(MAX_SILENT_PERIODS)
    }

    /// Is a ping due?
    pub(super) fn should_ping(&mut self, now: Instant, lost_after: Duration) -> bool {
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
