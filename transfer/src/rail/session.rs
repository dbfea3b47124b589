//! A session with another rail, and whether that is there.

use std::time::{Duration, Instant};

use fabric::Peer;

use super::message::Message;
use super::reliable_window::ReliableWindow;

/// How often one is asked whether it is there before it is lost.
pub(super) const PINGS_UNTIL_LOST: u32 = 8;
/// One whose data moves, and that says nothing for so many times as long, is lost all the same: it may
/// have lost us.
const MAX_SILENT_PERIODS: u32 = 3;

/// What a link and a guest have in common: who the other side is, and what was said to it.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) id: u64,
    pub(super) peer: Peer,
    pub(super) keepalive: Keepalive,
    pub(super) reliable_window: ReliableWindow<Message>,
}

/// Whether the other side of a session is there.
#[derive(Debug)]
pub(super) struct Keepalive {
    /// Anything of it, and a message.
    last_activity: Instant,
    last_message: Instant,
    last_ping: Instant,
}

impl Keepalive {
    pub(super) fn new() -> Self {
        let now = Instant::now();
        Self { last_activity: now, last_message: now, last_ping: now }
    }

    /// It said something.
    pub(super) fn is_heard(&mut self) {
        self.last_activity = Instant::now();
        self.last_message = self.last_activity;
    }

    /// Data moved. One-sided operations go on also where the other side has lost the session: so
    /// that does not count for ever.
    pub(super) fn data_moved(&mut self) {
        self.last_activity = Instant::now();
    }

    pub(super) fn is_lost(&self, now: Instant, after: Duration) -> bool {
        now.saturating_duration_since(self.last_activity) > after
            || now.saturating_duration_since(self.last_message)
                > after.saturating_mul(MAX_SILENT_PERIODS)
    }

    /// Is it to be asked now?
    pub(super) fn should_ping(&mut self, now: Instant, lost_after: Duration) -> bool {
        let often = lost_after / PINGS_UNTIL_LOST;
        let should_ping = now.saturating_duration_since(self.last_message) > often
            && now.saturating_duration_since(self.last_ping) > often;
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
    fn one_that_is_silent_is_asked_several_times_before_it_is_lost() {
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
    fn there_is_no_limit_to_patience() {
        let mut keepalive = Keepalive::new();
        let later = keepalive.last_activity + Duration::from_secs(1000);
        assert!(
            !keepalive.is_lost(later, Duration::MAX)
                && !keepalive.should_ping(later, Duration::MAX)
        );
    }

    #[test]
    fn data_that_moves_stands_for_an_answer_but_not_for_ever() {
        let mut keepalive = Keepalive::new();
        let start = keepalive.last_activity;
        keepalive.last_activity = start + 2 * AFTER;
        assert!(!keepalive.is_lost(start + 3 * AFTER, AFTER), "it moves");
        keepalive.last_activity = start + 3 * AFTER;
        assert!(keepalive.is_lost(start + 3 * AFTER + AFTER / 8, AFTER), "it says nothing");
    }
}
