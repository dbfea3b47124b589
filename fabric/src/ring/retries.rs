//! Peers that the end of a ring cannot be told to now: when each is tried again, and until when.
//!
//! A provider without room and a connection that does not come up look the same. A peer that was
//! killed never answers, and each attempt makes the provider connect once more: so attempts become
//! rare, those of all rings of one peer are made together, and they end.

use std::time::{Duration, Instant};

use crate::Peer;

/// The pause before the first attempt, and the longest one: each is twice as long as the last.
const PAUSES: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(500));
/// After so long without success there are no more attempts.
const GIVEN_UP_AFTER: Duration = Duration::from_secs(5);

/// How far it is with the end of a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CloseProgress {
    /// Nothing is to be told, or not yet.
    Pending,
    /// It would have been told, and there was no room.
    Refused,
    /// Nothing more is to be told.
    Complete,
}

#[derive(Debug)]
struct Retry {
    peer: Peer,
    since: Instant,
    pause: Duration,
    next: Instant,
    /// A ring waits for it.
    is_wanted: bool,
}

/// All of a port's.
#[derive(Debug, Default)]
pub(super) struct Retries {
    peers: Vec<Retry>,
    next: Option<Instant>,
}

impl Retries {
    /// When the next attempt is due.
    #[inline]
    pub(super) fn next(&self) -> Option<Instant> {
        self.next
    }

    /// May a peer be told something now? If not, a ring waits until it may.
    pub(super) fn allows(&mut self, peer: Peer, now: Instant) -> bool {
        let retry = self.peers.iter_mut().find(|retry| retry.peer == peer);
        retry.is_none_or(|retry| {
            retry.is_wanted = true;
            now >= retry.next
        })
    }

    /// There was no room for what a peer was to be told. True if it is given up: then nothing more
    /// is to be told to it.
    pub(super) fn refused(&mut self, peer: Peer, now: Instant) -> bool {
        let place = self.peers.iter().position(|retry| retry.peer == peer);
        let retry = match place {
            Some(place) => &mut self.peers[place],
            None => {
                let (pause, next) = (Duration::ZERO, now);
                self.peers.push(Retry { peer, since: now, pause, next, is_wanted: true });
                let last = self.peers.len() - 1;
                &mut self.peers[last]
            }
        };
        if now.saturating_duration_since(retry.since) >= GIVEN_UP_AFTER {
            self.reached(peer);
            return true;
        }
        retry.pause = (2 * retry.pause).clamp(PAUSES.0, PAUSES.1);
        retry.next = now + retry.pause;
        retry.is_wanted = true;
        false
    }

    /// A peer was told something, or is not tried any more.
    pub(super) fn reached(&mut self, peer: Peer) {
        self.peers.retain(|retry| retry.peer != peer);
    }

    /// All rings were looked at: peers that none of them waits for are forgotten.
    pub(super) fn sweep(&mut self) {
        self.peers.retain_mut(|retry| std::mem::take(&mut retry.is_wanted));
        self.next = self.peers.iter().map(|retry| retry.next).min();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: Duration = Duration::from_micros(50);

    /// As a port does at each look. None while the peer is left alone.
    fn look(retries: &mut Retries, peer: Peer, now: Instant) -> Option<bool> {
        let refused = retries.allows(peer, now).then(|| retries.refused(peer, now));
        retries.sweep();
        refused
    }

    #[test]
    fn attempts_to_tell_a_dead_peer_become_rare_and_end() {
        let (start, mut retries, peer) = (Instant::now(), Retries::default(), Peer::CONNECTED);
        let (mut now, mut attempts, mut longest) = (start, 0, Duration::ZERO);
        loop {
            let before = now;
            match look(&mut retries, peer, now) {
                Some(true) => break,
                Some(false) => attempts += 1,
                None => {}
            }
            now = retries.next().unwrap();
            longest = longest.max(now - before);
            assert!(now > before);
        }
        assert!(attempts < 30, "{attempts}");
        assert_eq!(longest, PAUSES.1);
        let took = now - start;
        assert!(took >= GIVEN_UP_AFTER && took <= GIVEN_UP_AFTER + PAUSES.1, "{took:?}");
        assert_eq!(retries.next(), None);
    }

    #[test]
    fn rings_of_one_peer_are_tried_together_and_others_are_not_held_up() {
        let (now, mut retries) = (Instant::now(), Retries::default());
        let (dead, other) = (Peer::CONNECTED, Peer::ANY);
        assert!(retries.allows(dead, now) && !retries.refused(dead, now));
        // Two more rings of it, in the same look.
        assert!(!retries.allows(dead, now) && !retries.allows(dead, now));
        assert!(retries.allows(other, now));
        retries.sweep();
        assert_eq!(retries.next(), Some(now + PAUSES.0));
        assert!(retries.allows(dead, now + STEP));
        // It takes it after all: the rest is told at once.
        retries.reached(dead);
        assert!(retries.allows(dead, now + STEP));
        retries.sweep();
        assert_eq!(retries.next(), None);
    }

    #[test]
    fn a_peer_that_no_ring_waits_for_is_forgotten() {
        let (now, mut retries, peer) = (Instant::now(), Retries::default(), Peer::CONNECTED);
        assert!(!retries.refused(peer, now));
        retries.sweep();
        assert!(retries.next().is_some());
        retries.sweep();
        assert_eq!(retries.next(), None);
    }
}
