//! What a rail posts: receives, messages and one-sided operations; and who the messages are for.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use fabric::{Address, Options, Peer};

use super::driver::{Driver, LOOK, Party};
use super::links::Link;
use super::message::{LONGEST, Message};
use super::presence::Session;

/// Messages that may be on their way to one; and what may wait to be sent to one, who asks and does
/// not listen.
const MOST_SENDING: usize = 8;
pub(super) const MOST_WAITING: usize = 512;
/// How long a last word to one that is nobody here may wait.
const LAST_WORD: Duration = Duration::from_secs(1);
/// What was posted.
#[derive(Debug, Clone, Copy)]
pub(super) enum Posted {
    Receive(usize),
    Send(usize, Party, Peer),
    Data(u64, Peer),
}

/// A message that waits to be sent.
pub(super) struct Unsent {
    pub(super) to: Party,
    pub(super) peer: Peer,
    bytes: Vec<u8>,
    pub(super) since: Instant,
}

impl Driver {
    /// A token for what is posted; [take it back](Self::posted) if that was not.
    pub(super) fn post(&mut self, posted: Posted) -> u64 {
        let place = self.free_posts.pop().unwrap_or_else(|| {
            self.posted.push(None);
            self.posted.len() - 1
        });
        self.posted[place] = Some(posted);
        place as u64
    }

    pub(super) fn posted(&mut self, token: u64) -> Option<Posted> {
        let posted = self.posted.get_mut(token as usize)?.take()?;
        self.free_posts.push(token as usize);
        Some(posted)
    }

    pub(super) fn receive(&mut self, buffer: usize) -> fabric::Result<()> {
        let slice = self.inbox.slice(buffer * LONGEST..(buffer + 1) * LONGEST)?;
        let token = self.post(Posted::Receive(buffer));
        let options = Options::token(token);
        let posted = self.endpoint.receive(&mut self.queue, &slice, options);
        posted.map(drop).inspect_err(|_| {
            self.posted(token);
        })
    }

    /// Says something to the other side of a session: again and again, if it is to be heard.
    pub(super) fn say(&mut self, to: Party, message: &Message) {
        let Some(Session { id, peer, hearing, .. }) = self.session(to) else { return };
        let number = match message.is_numbered() {
            true => hearing.say(message.clone(), Instant::now()),
            false => Some(0),
        };
        let Some(number) = number else {
            return self.lose(to, "it does not hear what is said to it");
        };
        let (peer, bytes) = (*peer, message.encode(*id, number, hearing.answer()));
        self.say_to(to, peer, bytes);
    }

    /// Asks those that are silent, says again what is not known to be heard, and tells who said
    /// something that it was heard.
    pub(super) fn look_after_sessions(&mut self, now: Instant) {
        let lost_after = self.lost_after;
        for party in self.parties() {
            // Those that are met yet have their own time.
            let is_meeting = |number| self.links.get(&number).is_some_and(|link| !link.is_met());
            let is_met = !matches!(party, Party::Link(number) if is_meeting(number));
            let Some(Session { presence, .. }) = self.session(party) else { continue };
            if is_met && presence.is_lost(now, lost_after) {
                self.lose(party, "it does not answer any more");
            } else if is_met && presence.asks(now, lost_after) {
                self.say(party, &Message::Ping);
            }
            let Some(Session { hearing, .. }) = self.session(party) else { continue };
            let mut again: Vec<_> =
                hearing.again(now).map(|(number, message)| (number, message.clone())).collect();
            let owes = hearing.owes(now);
            // What the provider has yet, or what waits, is not lost.
            if !again.is_empty() && self.is_saying(party) {
                again.clear();
            }
            if again.is_empty() && owes {
                self.say(party, &Message::Pong);
            }
            for (number, message) in again {
                let Some(Session { id, peer, hearing, .. }) = self.session(party) else { break };
                let (peer, bytes) = (*peer, message.encode(*id, number, hearing.answer()));
                self.say_to(party, peer, bytes);
            }
        }
    }

    /// Is anything that is for it on its way yet?
    pub(super) fn is_saying(&self, party: Party) -> bool {
        self.waiting.iter().any(|waiting| waiting.to == party)
            || self.posted.iter().flatten().any(|posted| match posted {
                Posted::Send(_, to, _) => *to == party,
                Posted::Receive(_) | Posted::Data(..) => false,
            })
    }

    /// A message came to nothing. If it matters it is said again, until its session is lost; one
    /// that cannot be met at all is told so at once.
    pub(super) fn was_not_sent(&mut self, to: Party, why: &str) {
        tracing::debug!(?to, why, "a message was not sent");
        if let Party::Link(link) = to
            && self.links.get(&link).is_some_and(Link::is_awaited)
        {
            return self.lose(to, why);
        }
        if let Some(session) = self.session(to) {
            session.hearing.hurry(Instant::now() + LOOK);
        }
    }

    pub(super) fn say_to(&mut self, to: Party, peer: Peer, bytes: Vec<u8>) {
        if bytes.len() > LONGEST {
            return tracing::warn!(length = bytes.len(), "a message too long to be sent");
        }
        if self.waiting.iter().filter(|waiting| waiting.peer == peer).count() >= MOST_WAITING {
            return self.lose(to, "it does not take what is sent to it");
        }
        self.waiting.push_back(Unsent { to, peer, bytes, since: Instant::now() });
        self.flush();
    }

    /// Sends what waits, in order for each peer. One that cannot be sent to now does not
    /// hold up others.
    pub(super) fn flush(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        let mut sending: HashMap<Peer, usize> = HashMap::new();
        for posted in self.posted.iter().flatten() {
            if let Posted::Send(_, _, peer) = posted {
                *sending.entry(*peer).or_default() += 1;
            }
        }
        let mut stuck: HashSet<Peer> = HashSet::new();
        let mut at = 0;
        while at < self.waiting.len() && !self.free_sends.is_empty() {
            let Unsent { to, peer, .. } = self.waiting[at];
            let count = sending.entry(peer).or_default();
            if *count >= MOST_SENDING || stuck.contains(&peer) {
                at += 1;
                continue;
            }
            match self.send(at) {
                Ok(()) => {
                    *count += 1;
                    self.waiting.remove(at);
                }
                Err(error) if error.kind() == fabric::ErrorKind::WouldBlock => {
                    stuck.insert(peer);
                }
                Err(error) => {
                    self.waiting.remove(at);
                    self.was_not_sent(to, &error.to_string());
                    at = 0;
                }
            }
        }
    }

    fn send(&mut self, at: usize) -> fabric::Result<()> {
        let Unsent { to, peer, bytes, .. } = &self.waiting[at];
        let (to, peer) = (*to, *peer);
        let Some(buffer) = self.free_sends.last().copied() else { return Ok(()) };
        self.outbox.write(buffer * LONGEST, bytes)?;
        let slice = self.outbox.slice(buffer * LONGEST..buffer * LONGEST + bytes.len())?;
        let token = self.post(Posted::Send(buffer, to, peer));
        let options = Options::token(token).patience(Duration::ZERO);
        let sent = self.endpoint.send(&mut self.queue, peer, &slice, options);
        match sent {
            Ok(_) => {
                self.free_sends.pop();
                Ok(())
            }
            Err(error) => {
                self.posted(token);
                Err(error)
            }
        }
    }

    /// The peer of an address, used by one session more.
    pub(super) fn enter_peer(&mut self, address: &Address) -> fabric::Result<Peer> {
        let peer = self.addresses.insert(address)?;
        *self.peers.entry(peer).or_default() += 1;
        Ok(peer)
    }

    /// One session less uses it.
    pub(super) fn leave_peer(&mut self, peer: Peer) {
        if let Some(users) = self.peers.get_mut(&peer) {
            *users = users.saturating_sub(1);
        }
    }

    /// Messages without a session that are under way, or wait.
    pub(super) fn messages_without_session(&self) -> usize {
        let is_one = |posted: &&Posted| matches!(posted, Posted::Send(_, Party::Nobody, _));
        let posted = self.posted.iter().flatten().filter(is_one).count();
        posted + self.waiting.iter().filter(|waiting| waiting.to == Party::Nobody).count()
    }

    /// Removes addresses that nobody uses any more.
    pub(super) fn sweep_peers(&mut self, now: Instant) {
        self.waiting
            .retain(|waiting| waiting.to != Party::Nobody || now - waiting.since < LAST_WORD);
        // A provider that stays on the machine answers peers by what it knows of them, also those
        // that nobody here hears of any more.
        if !self.domain.capabilities().reaches_other_machines {
            return;
        }
        let unused = self.peers.iter().filter(|(_, users)| **users == 0);
        let unused: Vec<_> = unused.map(|(peer, _)| *peer).collect();
        for peer in unused {
            let is_used = self.waiting.iter().any(|waiting| waiting.peer == peer)
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
