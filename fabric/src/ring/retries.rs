//! Repeats end notices that a peer cannot take now: when to try again, and when to stop.
//!
//! A provider without room and a connection that is not established look the same. A killed peer
//! never answers, and each attempt makes the provider connect again. So attempts become rare, all
//! rings of a peer try together, and attempts end.

use std::time::{Duration, Instant};

use threads::RetryBackoff;

use crate::Peer;

const BACKOFF: RetryBackoff =
    RetryBackoff::new(Duration::from_micros(50), Duration::from_millis(500));
/// Attempts end after this time without success.
const RETRY_TIMEOUT: Duration = Duration::from_secs(5);

/// State of a ring's end notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CloseProgress {
    /// No notice is due, or not yet.
    Pending,
    /// The provider had no room for the notice.
    Refused,
    /// No notice is outstanding.
    Complete,
}

#[derive(Debug)]
struct Retry {
    peer: Peer,
    since: Instant,
    backoff: RetryBackoff,
    next: Instant,
    /// A ring waits for the next attempt.
    is_wanted: bool,
}

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

    /// May a notice be sent to this peer now? If not, a ring waits until then.
    pub(super) fn allows(&mut self, peer: Peer, now: Instant) -> bool {
        self.peers.iter_mut().find(|retry| retry.peer == peer).is_none_or(|retry| {
            retry.is_wanted = true;
            now >= retry.next
        })
    }

    /// The provider had no room for a notice to this peer. True if attempts end here.
    pub(super) fn refused(&mut self, peer: Peer, now: Instant) -> bool {
        let known = self.peers.iter().position(|retry| retry.peer == peer);
        let index = known.unwrap_or_else(|| {
            let (backoff, next) = (BACKOFF, now);
            self.peers.push(Retry { peer, since: now, backoff, next, is_wanted: true });
            self.peers.len() - 1
        });
        let retry = &mut self.peers[index];
        if now.saturating_duration_since(retry.since) >= RETRY_TIMEOUT {
            self.reached(peer);
            return true;
        }
        retry.next = now + retry.backoff.next_pause();
        retry.is_wanted = true;
        false
    }

    /// A notice was sent to this peer, or attempts have ended.
    pub(super) fn reached(&mut self, peer: Peer) {
        self.peers.retain(|retry| retry.peer != peer);
    }

    /// Every ring was serviced: forgets peers that no ring waits for.
    pub(super) fn sweep(&mut self) {
        self.peers.retain_mut(|retry| std::mem::take(&mut retry.is_wanted));
        self.next = self.peers.iter().map(|retry| retry.next).min();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: Duration = Duration::from_micros(50);

    /// Attempts a notice like a port in each step. None while no attempt is due.
    fn attempt(retries: &mut Retries, peer: Peer, now: Instant) -> Option<bool> {
        let refused = retries.allows(peer, now).then(|| retries.refused(peer, now));
        retries.sweep();
        refused
    }

    #[test]
    fn end_notices_to_a_dead_peer_back_off_and_stop() {
        let (start, mut retries, peer) = (Instant::now(), Retries::default(), Peer::CONNECTED);
        let (mut now, mut attempts, mut longest) = (start, 0, Duration::ZERO);
        loop {
            let before = now;
            match attempt(&mut retries, peer, now) {
                Some(true) => break,
                Some(false) => attempts += 1,
                None => {}
            }
            now = retries.next().unwrap();
            longest = longest.max(now - before);
            assert!(now > before);
        }
        assert!(attempts < 30, "{attempts}");
        assert_eq!(longest, BACKOFF.longest());
        let took = now - start;
        assert!(took >= RETRY_TIMEOUT && took <= RETRY_TIMEOUT + BACKOFF.longest(), "{took:?}");
        assert_eq!(retries.next(), None);
    }

    #[test]
    fn rings_of_a_peer_retry_together_without_delaying_others() {
        let (now, mut retries) = (Instant::now(), Retries::default());
        let (dead, other) = (Peer::CONNECTED, Peer::ANY);
        assert!(retries.allows(dead, now) && !retries.refused(dead, now));
        // Two more rings of the same peer, in the same step.
        assert!(!retries.allows(dead, now) && !retries.allows(dead, now));
        assert!(retries.allows(other, now));
        retries.sweep();
        assert_eq!(retries.next(), Some(now + BACKOFF.first()));
        assert!(retries.allows(dead, now + STEP));
        // The peer takes it after all: the other notices follow at once.
        retries.reached(dead);
        assert!(retries.allows(dead, now + STEP));
        retries.sweep();
        assert_eq!(retries.next(), None);
    }

    #[test]
    fn peer_without_waiting_rings_is_forgotten() {
        let (now, mut retries, peer) = (Instant::now(), Retries::default(), Peer::CONNECTED);
        assert!(!retries.refused(peer, now));
        retries.sweep();
        assert!(retries.next().is_some());
        retries.sweep();
        assert_eq!(retries.next(), None);
    }
}
