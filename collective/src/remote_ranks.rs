//! Ranks of other machines: the agent that reaches them, their messages, and their failures.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use ipc::Announcement;
use serde::{Deserialize, Serialize};
use transfer::path::Policy;
use transfer::{Agent, AgentCard, Event, Notice, PeerId, Region, Route, Token};

use crate::domain_options::JOIN;
use crate::error::{Error, ErrorKind, Result};
use crate::liveness::{Departed, LivenessAddress, LivenessLinks, LivenessListener};
use crate::members::{Calls, Failure};

/// Sets of ranks that exchange steps: those with the same place on their machines, and all.
pub(crate) const SETS: usize = 2;
/// The tag of a report that the operations of the domain are over; smaller ones are those of sets.
const FAILURE_TAG: u64 = 100;
/// Bytes that a message of a step has space for: a notice is sent at once up to 64 bytes.
pub(crate) const INLINE_BYTES: usize = 24;
/// Messages of a rank that are kept, at most: more violate the protocol.
const MAX_MESSAGES: usize = 64;
/// Time between two looks at the connections for liveness.
const LINK_INTERVAL: Duration = Duration::from_millis(5);
/// How long messages of a rank that has ended may be under way.
const LAST_MESSAGES_TIME: Duration = Duration::from_millis(20);
const REPORT_TIMEOUT: Duration = Duration::from_millis(100);

/// What a rank contributes to the start of a domain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Contact {
    /// The card of the agent.
    pub(crate) card: Vec<u8>,
    /// The memory for steps of each set.
    pub(crate) regions: Vec<Vec<u8>>,
    /// Where it is connected to for liveness, if it can be.
    pub(crate) liveness: Option<LivenessAddress>,
}

/// A step that a rank has published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StepMessage {
    pub(crate) step: u64,
    /// How many steps before this one the rank has not read yet.
    pub(crate) unread: u8,
    pub(crate) signature: u64,
    pub(crate) carried: u64,
    /// What the rank calls, without the digest of its blocks.
    pub(crate) call: [u64; 2],
    pub(crate) is_inline: bool,
    pub(crate) inline: [u8; INLINE_BYTES],
}

impl StepMessage {
    const UNREAD_BIT: u32 = 48;
    const INLINE_BIT: u32 = 63;

    fn encode(&self) -> [u8; 64] {
        let first = self.step
            | u64::from(self.unread & 0x7f) << Self::UNREAD_BIT
            | u64::from(self.is_inline) << Self::INLINE_BIT;
        let words = [first, self.signature, self.carried, self.call[0], self.call[1]];
        let mut bytes = [0; 64];
        for (at, word) in words.into_iter().enumerate() {
            bytes[at * 8..][..8].copy_from_slice(&word.to_le_bytes());
        }
        bytes[40..].copy_from_slice(&self.inline);
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; 64] = bytes.try_into().ok()?;
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| bytes[at * 8 + byte]));
        let first = word(0);
        Some(Self {
            step: first & ((1 << Self::UNREAD_BIT) - 1),
            unread: (first >> Self::UNREAD_BIT) as u8 & 0x7f,
            is_inline: first >> Self::INLINE_BIT == 1,
            signature: word(1),
            carried: word(2),
            call: [word(3), word(4)],
            inline: std::array::from_fn(|at| bytes[40 + at]),
        })
    }

    pub(crate) fn announcement(&self) -> Announcement {
        [self.call[0], self.call[1], 0, 0]
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Present,
    Left,
    /// Since then.
    Ended(Instant),
}

#[derive(Debug)]
struct RemoteRank {
    contact: Contact,
    peer: Option<PeerId>,
    state: State,
    /// Of each set: the messages that were not taken, and how many steps the rank has read.
    messages: [VecDeque<StepMessage>; SETS],
    read: [u64; SETS],
}

/// All ranks of a domain, as one of them reaches them.
#[derive(Debug)]
pub(crate) struct RemoteRanks {
    agent: Agent,
    links: LivenessLinks,
    links_read_at: Instant,
    own: u32,
    ranks: Vec<RemoteRank>,
    by_identity: HashMap<[u8; 16], u32>,
    /// What a rank of another machine reported.
    failure: Option<(Failure, Calls)>,
    /// The notices of this rank's report; None if it has reported nothing.
    report: Option<Vec<Token>>,
}

impl RemoteRanks {
    /// The ranks with these contacts.
    pub(crate) fn new(agent: Agent, own: u32, contacts: Vec<Contact>) -> Result<Self> {
        let mut by_identity = HashMap::new();
        let mut ranks = Vec::with_capacity(contacts.len());
        for (contact, rank) in contacts.into_iter().zip(0..) {
            let malformed = |cause: String| {
                let detail = format!("rank {rank} sent no valid contact: {cause}");
                Error::new(JOIN, ErrorKind::Malformed, detail).of_ranks([rank])
            };
            let card =
                AgentCard::decode(&contact.card).map_err(|error| malformed(error.to_string()))?;
            if contact.regions.len() != SETS {
                return Err(malformed(format!("{} regions", contact.regions.len())));
            }
            by_identity.insert(card.identity, rank);
            ranks.push(RemoteRank {
                contact,
                peer: None,
                state: State::Present,
                messages: Default::default(),
                read: [0; SETS],
            });
        }
        let (links, links_read_at) = (LivenessLinks::default(), Instant::now());
        let (failure, report) = (None, None);
        Ok(Self { agent, links, links_read_at, own, ranks, by_identity, failure, report })
    }

    /// Connects to ranks of other machines, to learn when they end.
    pub(crate) fn watch(
        &mut self,
        listener: LivenessListener,
        pairs: impl IntoIterator<Item = [u32; 2]>,
        deadline: Instant,
    ) {
        let (mut to, mut from) = (Vec::new(), Vec::new());
        for [first, second] in pairs {
            let address = self.ranks.get(second as usize).and_then(|rank| rank.contact.liveness);
            match address {
                Some(address) if first == self.own => to.push((second, address)),
                _ if second == self.own => from.push(first),
                _ => {}
            }
        }
        self.links = listener.connect(self.own, &to, &from, deadline);
    }

    pub(crate) fn own(&self) -> u32 {
        self.own
    }

    pub(crate) fn agent(&mut self) -> &mut Agent {
        &mut self.agent
    }

    /// The route from memory of this rank to that of another one for a set.
    pub(crate) fn route(
        &mut self,
        rank: u32,
        set: usize,
        source: &Region,
        deadline: Instant,
    ) -> transfer::Result<Route> {
        let left = || deadline.saturating_duration_since(Instant::now());
        let to = &mut self.ranks[rank as usize];
        let peer = match to.peer {
            Some(peer) => peer,
            None => *to.peer.insert(self.agent.connect(&to.contact.card, left())?),
        };
        let region = &to.contact.regions[set];
        self.agent.join(peer, source, region, &Policy::default(), left())
    }

    /// Sends a message of a set, after these bytes.
    pub(crate) fn send(
        &mut self,
        route: &Route,
        blocks: &[gpu::Block],
        set: usize,
        message: &StepMessage,
    ) -> transfer::Result<Token> {
        let notice = Notice::new(set as u64, &message.encode())?;
        self.agent.put(route, blocks, Some(notice))
    }

    /// Takes all events that have come.
    pub(crate) fn poll(&mut self) {
        if self.links_read_at.elapsed() >= LINK_INTERVAL {
            self.links_read_at = Instant::now();
            // Before the messages: a rank that leaves has sent its last ones before.
            for (rank, how) in self.links.departed() {
                self.set_departed(rank, how == Departed::Ended);
            }
        }
        while let Some(event) = self.agent.poll_event() {
            self.handle(event);
        }
    }

    /// Waits for an event for this time at most.
    pub(crate) fn wait(&mut self, time: Duration) {
        if let Ok(event) = self.agent.next_event(time) {
            self.handle(event);
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Notice { from, notice } => {
                let Some(&rank) = self.by_identity.get(&from) else { return };
                if notice.tag == FAILURE_TAG {
                    let failure = decode_failure(notice.data());
                    self.failure = self.failure.or(failure);
                    return;
                }
                let set = usize::try_from(notice.tag).unwrap_or(SETS);
                let (Some(message), true) = (StepMessage::decode(notice.data()), set < SETS) else {
                    return;
                };
                let from = &mut self.ranks[rank as usize];
                let read = message.step.saturating_sub(message.unread.into());
                from.read[set] = from.read[set].max(read);
                if from.messages[set].len() < MAX_MESSAGES {
                    from.messages[set].push_back(message);
                }
            }
            Event::Left { from, is_dead, .. } => {
                if let Some(&rank) = self.by_identity.get(&from) {
                    self.set_departed(rank, is_dead);
                }
            }
            _ => {}
        }
    }

    fn set_departed(&mut self, rank: u32, has_ended: bool) {
        let state = &mut self.ranks[rank as usize].state;
        if *state == State::Present {
            *state = if has_ended { State::Ended(Instant::now()) } else { State::Left };
        }
    }

    /// How many steps of a set a rank has read.
    pub(crate) fn read(&self, rank: u32, set: usize) -> u64 {
        self.ranks[rank as usize].read[set]
    }

    /// The message of a rank's step, if it has come.
    pub(crate) fn message(&self, rank: u32, set: usize, step: u64) -> Option<&StepMessage> {
        self.ranks[rank as usize].messages[set].iter().find(|message| message.step == step)
    }

    /// Drops the messages of a set before a step.
    pub(crate) fn drop_before(&mut self, set: usize, step: u64) {
        for rank in &mut self.ranks {
            rank.messages[set].retain(|message| message.step >= step);
        }
    }

    /// The failure of a rank that has ended or left, or what another rank reported.
    pub(crate) fn failure(&self, rank: u32) -> Option<(Failure, Calls)> {
        let departed = match self.ranks[rank as usize].state {
            State::Present => None,
            State::Left => Some(Failure::Left { rank }),
            // Its last messages may still be under way.
            State::Ended(since) if since.elapsed() < LAST_MESSAGES_TIME => None,
            State::Ended(_) => Some(Failure::Ended { rank }),
        };
        // The report names the first cause.
        self.failure.or(departed.map(|failure| (failure, [[0; 4]; 2])))
    }

    /// What another rank reported.
    pub(crate) fn reported(&self) -> Option<(Failure, Calls)> {
        self.failure
    }

    /// Reports a failure to the connected ranks, once.
    pub(crate) fn report(&mut self, failure: Failure, calls: &Calls) {
        if self.report.is_some() {
            return;
        }
        let Ok(notice) = Notice::new(FAILURE_TAG, &encode_failure(failure, calls)) else { return };
        let Self { agent, ranks, .. } = self;
        let present = ranks.iter().zip(0..).filter(|(rank, _)| rank.state == State::Present);
        let others = present.filter(|(_, number)| !failure.is_of(*number));
        let peers = others.filter_map(|(rank, _)| rank.peer);
        self.report =
            Some(peers.filter_map(|peer| agent.notify(peer, notice.clone()).ok()).collect());
    }

    /// Leaves the other ranks. After a failure that takes place later: the connection to a rank that does
    /// not answer ends only after some time.
    pub(crate) fn leave(mut self) {
        self.links.leave();
        let Some(tokens) = self.report.take() else { return };
        let end = move || {
            let deadline = Instant::now() + REPORT_TIMEOUT;
            for token in tokens {
                let left = deadline.saturating_duration_since(Instant::now());
                let _ = self.agent.wait(token, left);
            }
        };
        if let Err(error) = threads::spawn("collective-leave", end) {
            tracing::warn!(%error, "thread that leaves a domain could not be started");
        }
    }
}

/// A failure as the bytes of a report.
fn encode_failure(failure: Failure, calls: &Calls) -> [u8; 56] {
    let calls = calls.iter().flat_map(|call| call[..3].iter().copied());
    let mut bytes = [0; 56];
    for (at, word) in std::iter::once(failure.encode()).chain(calls).enumerate() {
        bytes[at * 8..][..8].copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

fn decode_failure(bytes: &[u8]) -> Option<(Failure, Calls)> {
    let bytes: &[u8; 56] = bytes.try_into().ok()?;
    let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| bytes[at * 8 + byte]));
    let call = |first: usize| [word(first), word(first + 1), word(first + 2), 0];
    Some((Failure::decode(word(0)), [call(1), call(4)]))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn encoded_messages_are_decoded(
            step in 0_u64..1 << 48,
            unread in 0_u8..0x80,
            words: [u64; 4],
            is_inline: bool,
            inline: [u8; INLINE_BYTES],
        ) {
            let [signature, carried, ..] = words;
            let call = [words[2], words[3]];
            let message =
                StepMessage { step, unread, signature, carried, call, is_inline, inline };
            prop_assert_eq!(StepMessage::decode(&message.encode()), Some(message));
        }

        #[test]
        fn failures_are_reported_with_calls(one in 0_u32..4096, other in 0_u32..4096, word: u64) {
            let calls = [[1, 2, word, 0], [4, word, 6, 0]];
            for failure in [
                Failure::Ended { rank: one },
                Failure::Late { rank: one, waiting: other },
                Failure::Unreachable { rank: one, waiting: other },
                Failure::Mismatch { one, other, collective: 7 },
            ] {
                let bytes = encode_failure(failure, &calls);
                prop_assert_eq!(decode_failure(&bytes), Some((failure, calls)));
            }
        }

        #[test]
        fn other_bytes_are_no_failure_or_one_with_ranks(bytes: Vec<u8>) {
            let _ = (decode_failure(&bytes), StepMessage::decode(&bytes));
        }
    }
}
