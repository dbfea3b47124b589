//! A session with another rail, and whether that is there.

use std::time::{Duration, Instant};

use fabric::Peer;

use super::hearing::Hearing;
use super::message::Message;

/// How often one is asked whether it is there before it is lost.
pub(super) const QUESTIONS: u32 = 8;
/// One whose data moves, and that says nothing for so many times as long, is lost all the same: it may
/// have lost us.
const SILENCE: u32 = 3;

/// What a link and a guest have in common: who the other side is, and what was said to it.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) id: u64,
    pub(super) peer: Peer,
    pub(super) presence: Presence,
    pub(super) hearing: Hearing<Message>,
}

/// Whether the other side of a session is there.
#[derive(Debug)]
pub(super) struct Presence {
    /// Anything of it, and a message.
    heard: Instant,
    spoke: Instant,
    asked: Instant,
}

impl Presence {
    pub(super) fn new() -> Self {
        let now = Instant::now();
        Self { heard: now, spoke: now, asked: now }
    }

    /// It said something.
    pub(super) fn is_heard(&mut self) {
        self.heard = Instant::now();
        self.spoke = self.heard;
    }

    /// Data moved. One-sided operations go on also where the other side has lost the session: so
    /// that does not count for ever.
    pub(super) fn is_seen(&mut self) {
        self.heard = Instant::now();
    }

    pub(super) fn is_lost(&self, now: Instant, after: Duration) -> bool {
        now.saturating_duration_since(self.heard) > after
            || now.saturating_duration_since(self.spoke) > after.saturating_mul(SILENCE)
    }

    /// Is it to be asked now?
    pub(super) fn asks(&mut self, now: Instant, lost_after: Duration) -> bool {
        let often = lost_after / QUESTIONS;
        let asks = now.saturating_duration_since(self.spoke) > often
            && now.saturating_duration_since(self.asked) > often;
        if asks {
            self.asked = now;
        }
        asks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AFTER: Duration = Duration::from_secs(8);

    #[test]
    fn one_that_is_silent_is_asked_several_times_before_it_is_lost() {
        let mut presence = Presence::new();
        let start = presence.heard;
        let second = Duration::from_secs(1);
        let asked = (0..80).filter(|tenth| presence.asks(start + second * *tenth / 10, AFTER));
        assert_eq!(asked.count(), 7);
        assert!(!presence.is_lost(start + AFTER, AFTER));
        assert!(presence.is_lost(start + AFTER + second, AFTER));
    }

    #[test]
    fn there_is_no_limit_to_patience() {
        let mut presence = Presence::new();
        let later = presence.heard + Duration::from_secs(1000);
        assert!(!presence.is_lost(later, Duration::MAX) && !presence.asks(later, Duration::MAX));
    }

    #[test]
    fn data_that_moves_stands_for_an_answer_but_not_for_ever() {
        let mut presence = Presence::new();
        let start = presence.heard;
        presence.heard = start + 2 * AFTER;
        assert!(!presence.is_lost(start + 3 * AFTER, AFTER), "it moves");
        presence.heard = start + 3 * AFTER;
        assert!(presence.is_lost(start + 3 * AFTER + AFTER / 8, AFTER), "it says nothing");
    }
}
