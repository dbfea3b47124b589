//! Posting of receives, messages and one-sided operations, and the queue of messages.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use fabric::{Address, Peer, PostOptions};

use super::driver::{CHECK_INTERVAL, Driver, SessionKey};
use super::links::Link;
use super::message::{MAX_MESSAGE_LENGTH, Message};
use super::session::Session;

/// Maximum of messages to one peer in the provider, and in the queue: a peer may request but not
/// receive.
const MAX_SENDS_PER_PEER: usize = 8;
pub(super) const MAX_QUEUED_PER_PEER: usize = 512;
/// How long a refusal without a session may wait.
const REFUSAL_SEND_TIMEOUT: Duration = Duration::from_secs(1);
/// A posted operation.
#[derive(Debug, Clone, Copy)]
pub(super) enum Posted {
    Receive(usize),
    Send(usize, SessionKey, Peer),
    Data(u64, Peer),
}

/// A queued message.
pub(super) struct QueuedMessage {
    pub(super) to: SessionKey,
    pub(super) peer: Peer,
    bytes: Vec<u8>,
    pub(super) since: Instant,
}

impl Driver {
    /// A token for an operation; [taken back](Self::take_posted) if posting it fails.
    pub(super) fn record_post(&mut self, posted: Posted) -> u64 {
        let index = self.free_tokens.pop().unwrap_or_else(|| {
            self.posted.push(None);
            self.posted.len() - 1
        });
        self.posted[index] = Some(posted);
        index as u64
    }

    pub(super) fn take_posted(&mut self, token: u64) -> Option<Posted> {
        let posted = self.posted.get_mut(token as usize)?.take()?;
        self.free_tokens.push(token as usize);
        Some(posted)
    }

    pub(super) fn receive(&mut self, buffer: usize) -> fabric::Result<()> {
        let slice = self
            .receive_buffers
            .slice(buffer * MAX_MESSAGE_LENGTH..(buffer + 1) * MAX_MESSAGE_LENGTH)?;
        let token = self.record_post(Posted::Receive(buffer));
        let options = PostOptions::token(token);
        let posted = self.endpoint.receive(&mut self.queue, &slice, options);
        posted.map(drop).inspect_err(|_| {
            self.take_posted(token);
        })
    }

    /// Sends a message in a session. Numbered messages are retransmitted until they are
    /// acknowledged.
    pub(super) fn send_message(&mut self, to: SessionKey, message: &Message) {
        let Some(Session { id, peer, reliable_window, .. }) = self.session(to) else { return };
        let number = match message.is_numbered() {
            true => reliable_window.send_message(message.clone(), Instant::now()),
            false => Some(0),
        };
        let Some(number) = number else {
            return self.close_lost(to, "it acknowledges no messages");
        };
        let (peer, bytes) = (*peer, message.encode(*id, number, reliable_window.acknowledge()));
        self.queue_message(to, peer, bytes);
    }

    /// Pings silent peers, retransmits unacknowledged messages, and acknowledges received ones.
    pub(super) fn check_sessions(&mut self, now: Instant) {
        let lost_after = self.lost_after;
        for session_key in self.session_keys() {
            // Connecting links have their own deadline.
            let is_connecting =
                |number| self.links.get(&number).is_some_and(|link| !link.is_connected());
            let is_connected =
                !matches!(session_key, SessionKey::Link(number) if is_connecting(number));
            let Some(Session { keepalive, .. }) = self.session(session_key) else { continue };
            if is_connected && keepalive.is_lost(now, lost_after) {
                self.close_lost(session_key, "it does not answer");
            } else if is_connected && keepalive.should_ping(now, lost_after) {
                self.send_message(session_key, &Message::Ping);
            }
            let Some(Session { reliable_window, .. }) = self.session(session_key) else { continue };
            let mut due_retransmits: Vec<_> = reliable_window
                .due_retransmits(now)
                .map(|(number, message)| (number, message.clone()))
                .collect();
            let ack_is_due = reliable_window.ack_is_due(now);
            // Queued messages, in the provider or here, are not lost.
            if !due_retransmits.is_empty() && self.is_sending(session_key) {
                due_retransmits.clear();
            }
            if due_retransmits.is_empty() && ack_is_due {
                self.send_message(session_key, &Message::Pong);
            }
            for (number, message) in due_retransmits {
                let Some(Session { id, peer, reliable_window, .. }) = self.session(session_key)
                else {
                    break;
                };
                let (peer, bytes) =
                    (*peer, message.encode(*id, number, reliable_window.acknowledge()));
                self.queue_message(session_key, peer, bytes);
            }
        }
    }

    /// Are messages of this session queued, here or in the provider?
    pub(super) fn is_sending(&self, session_key: SessionKey) -> bool {
        self.send_queue.iter().any(|waiting| waiting.to == session_key)
            || self.posted.iter().flatten().any(|posted| match posted {
                Posted::Send(_, to, _) => *to == session_key,
                Posted::Receive(_) | Posted::Data(..) => false,
            })
    }

    /// A message could not be sent. Numbered ones are retransmitted until the session is lost; a
    /// peer that the agent waits for is reported at once.
    pub(super) fn send_failed(&mut self, to: SessionKey, cause: &str) {
        tracing::debug!(?to, cause, "sending a message failed");
        if let SessionKey::Link(link) = to
            && self.links.get(&link).is_some_and(Link::has_waiter)
        {
            return self.close_lost(to, cause);
        }
        if let Some(session) = self.session(to) {
            session.reliable_window.retransmit_soon(Instant::now() + CHECK_INTERVAL);
        }
    }

    pub(super) fn queue_message(&mut self, to: SessionKey, peer: Peer, bytes: Vec<u8>) {
        if bytes.len() > MAX_MESSAGE_LENGTH {
            return tracing::warn!(length = bytes.len(), "message longer than the limit dropped");
        }
        if self.send_queue.iter().filter(|waiting| waiting.peer == peer).count()
            >= MAX_QUEUED_PER_PEER
        {
            return self.close_lost(to, "it receives no messages");
        }
        self.send_queue.push_back(QueuedMessage { to, peer, bytes, since: Instant::now() });
        self.flush();
    }

    /// Sends queued messages, in order for each peer. A blocked peer does not hold up others.
    pub(super) fn flush(&mut self) {
        if self.send_queue.is_empty() {
            return;
        }
        let mut sending: HashMap<Peer, usize> = HashMap::new();
        for posted in self.posted.iter().flatten() {
            if let Posted::Send(_, _, peer) = posted {
                *sending.entry(*peer).or_default() += 1;
            }
        }
        let mut blocked: HashSet<Peer> = HashSet::new();
        let mut at = 0;
        while at < self.send_queue.len() && !self.free_send_buffers.is_empty() {
            let QueuedMessage { to, peer, .. } = self.send_queue[at];
            let count = sending.entry(peer).or_default();
            if *count >= MAX_SENDS_PER_PEER || blocked.contains(&peer) {
                at += 1;
                continue;
            }
            match self.send(at) {
                Ok(()) => {
                    *count += 1;
                    self.send_queue.remove(at);
                }
                Err(error) if error.kind() == fabric::ErrorKind::WouldBlock => {
                    blocked.insert(peer);
                }
                Err(error) => {
                    self.send_queue.remove(at);
                    self.send_failed(to, &error.to_string());
                    at = 0;
                }
            }
        }
    }

    fn send(&mut self, at: usize) -> fabric::Result<()> {
        let QueuedMessage { to, peer, bytes, .. } = &self.send_queue[at];
        let (to, peer) = (*to, *peer);
        let Some(buffer) = self.free_send_buffers.last().copied() else { return Ok(()) };
        self.send_buffers.write(buffer * MAX_MESSAGE_LENGTH, bytes)?;
        let slice = self
            .send_buffers
            .slice(buffer * MAX_MESSAGE_LENGTH..buffer * MAX_MESSAGE_LENGTH + bytes.len())?;
        let token = self.record_post(Posted::Send(buffer, to, peer));
        let options = PostOptions::token(token).timeout(Duration::ZERO);
        let sent = self.endpoint.send(&mut self.queue, peer, &slice, options);
        match sent {
            Ok(_) => {
                self.free_send_buffers.pop();
                Ok(())
            }
            Err(error) => {
                self.take_posted(token);
                Err(error)
            }
        }
    }

    /// The peer of an address; counts one more session.
    pub(super) fn acquire_address(&mut self, address: &Address) -> fabric::Result<Peer> {
        let peer = self.addresses.insert(address)?;
        *self.peers.entry(peer).or_default() += 1;
        Ok(peer)
    }

    /// Counts one session less for this address.
    pub(super) fn release_address(&mut self, peer: Peer) {
        if let Some(users) = self.peers.get_mut(&peer) {
            *users = users.saturating_sub(1);
        }
    }

    /// Number of messages without a session, queued or in flight.
    pub(super) fn messages_without_session(&self) -> usize {
        let has_no_session =
            |posted: &&Posted| matches!(posted, Posted::Send(_, SessionKey::NoSession, _));
        let posted = self.posted.iter().flatten().filter(has_no_session).count();
        posted
            + self.send_queue.iter().filter(|waiting| waiting.to == SessionKey::NoSession).count()
    }

    /// Removes unused addresses.
    pub(super) fn remove_unused_addresses(&mut self, now: Instant) {
        self.send_queue.retain(|waiting| {
            waiting.to != SessionKey::NoSession || now - waiting.since < REFUSAL_SEND_TIMEOUT
        });
        // Local providers answer peers by their addresses, also after all sessions have ended.
        if !self.domain.capabilities().reaches_other_machines {
            return;
        }
        let unused = self.peers.iter().filter(|(_, users)| **users == 0);
        let unused: Vec<_> = unused.map(|(peer, _)| *peer).collect();
        for peer in unused {
            let is_used = self.send_queue.iter().any(|waiting| waiting.peer == peer)
                || self.posted.iter().flatten().any(|posted| match posted {
                    Posted::Send(_, _, to) | Posted::Data(_, to) => *to == peer,
                    Posted::Receive(_) => false,
                });
            if !is_used {
                self.peers.remove(&peer);
                let _ = self.addresses.remove(peer);
            }
        }
    }
}
