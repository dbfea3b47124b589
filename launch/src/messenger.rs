//! Runs collectives and direct messages over the notices of an agent.
//!
//! If a rank is missing or has ended, the rank that detects it reports it to its
//! [partners](crate::collective::partners), they to theirs, and all fail with the same cause. Then
//! the collectives of the group are over, since ranks may have left them at different steps.

use std::time::{Duration, Instant};

use control::launcher::{Error, ErrorKind, Result};
use transfer::{Agent, Departure, Event, Token};

use crate::collective::{Collective, Source, partners};
use crate::mailbox::{MAX_BYTES, MAX_MESSAGE, Mailbox, MessageId, fragments};
use crate::ranks::{Ranks, of_agent};

/// Notices in flight before a rank waits for some to complete.
const MAX_IN_FLIGHT: usize = 256;
/// A rank that detects a missing one reports it this long before the deadline, at most: so that all
/// others learn the cause in time.
const REPORT_TIME: Duration = Duration::from_millis(500);
/// How long a report waits for ranks that do not answer.
const REPORT_TIMEOUT: Duration = Duration::from_millis(400);

/// Why collectives are over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Failure {
    /// A rank did not take part in this number of milliseconds.
    Missing(u32, u32),
    /// A rank has ended.
    Ended(u32),
    /// A rank sent a message of another collective, or a malformed one.
    Malformed(u32),
    /// A rank cannot take part, and has the cause.
    Refused(u32),
    /// A rank is not reached any more.
    Unreachable(u32),
}

impl Failure {
    fn encode(self) -> [u8; 9] {
        let (tag, rank, waited) = match self {
            Self::Missing(rank, waited) => (0, rank, waited),
            Self::Ended(rank) => (1, rank, 0),
            Self::Malformed(rank) => (2, rank, 0),
            Self::Refused(rank) => (3, rank, 0),
            Self::Unreachable(rank) => (4, rank, 0),
        };
        let mut bytes = [tag, 0, 0, 0, 0, 0, 0, 0, 0];
        bytes[1..5].copy_from_slice(&rank.to_le_bytes());
        bytes[5..].copy_from_slice(&waited.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (tag, rest) = bytes.split_first()?;
        let (rank, waited) = rest.split_first_chunk()?;
        let [rank, waited] = [*rank, waited.try_into().ok()?].map(u32::from_le_bytes);
        Some(match tag {
            0 => Self::Missing(rank, waited),
            1 => Self::Ended(rank),
            2 => Self::Malformed(rank),
            3 => Self::Refused(rank),
            4 => Self::Unreachable(rank),
            _ => return None,
        })
    }

    /// May it follow from the failure of another rank?
    fn may_be_consequence(self) -> bool {
        matches!(self, Self::Missing(..) | Self::Ended(_) | Self::Unreachable(_))
    }

    fn error(self, operation: &'static str) -> Error {
        let (kind, rank, detail) = match self {
            Self::Missing(rank, waited) => {
                let waited = Duration::from_millis(waited.into());
                let detail = format!(
                    "rank {rank} did not come within {waited:?}. Check that all ranks call it"
                );
                (ErrorKind::DeadlineExceeded, rank, detail)
            }
            Self::Ended(rank) => (ErrorKind::RankFailed, rank, format!("rank {rank} has ended")),
            Self::Malformed(rank) => {
                let detail = format!(
                    "rank {rank} sent a message of another collective. Check that all ranks call the \
                     same ones in the same order"
                );
                (ErrorKind::Malformed, rank, detail)
            }
            Self::Refused(rank) => {
                let detail = format!("rank {rank} cannot take part. Its error has the cause");
                (ErrorKind::RankFailed, rank, detail)
            }
            Self::Unreachable(rank) => {
                let detail = format!("the connection to rank {rank} was lost");
                (ErrorKind::RankFailed, rank, detail)
            }
        };
        Error::new(operation, kind, detail).of_ranks([rank])
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct CallDeadline {
    operation: &'static str,
    timeout: Duration,
    began: Instant,
    end: Instant,
}

impl CallDeadline {
    pub(crate) fn new(operation: &'static str, timeout: Duration) -> Self {
        Self { operation, timeout, began: Instant::now(), end: ipc::deadline(timeout) }
    }

    pub(crate) fn left(&self) -> Duration {
        self.end.saturating_duration_since(Instant::now())
    }

    /// The failure that a rank has not come until now.
    fn missing(&self, rank: u32) -> Failure {
        let waited = self.began.elapsed().as_millis();
        // Not more digits than a person reads, and no more than was waited.
        let digit = if waited < 1000 { 10 } else { 100 };
        Failure::Missing(rank, u32::try_from(waited / digit * digit).unwrap_or(u32::MAX))
    }

    /// The time until a rank that knows which one is missing reports it, so that all others learn the
    /// cause before the deadline.
    fn left_before_report(&self) -> Duration {
        self.left().saturating_sub(REPORT_TIME.min(self.timeout / 4))
    }
}

/// A call of a group that sends or receives.
pub(crate) struct Call<'a> {
    agent: &'a mut Agent,
    ranks: &'a mut Ranks,
    deadline: CallDeadline,
}

impl<'a> Call<'a> {
    pub(crate) fn new(agent: &'a mut Agent, ranks: &'a mut Ranks, deadline: CallDeadline) -> Self {
        Self { agent, ranks, deadline }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Messenger {
    mailbox: Mailbox,
    /// The number of the next collective.
    sequence: u16,
    /// Notices in flight, each with the rank that gets it.
    in_flight: Vec<(Token, u32)>,
    failure: Option<Failure>,
}

impl Messenger {
    pub(crate) fn run(
        &mut self,
        call: &mut Call<'_>,
        collective: &mut impl Collective,
    ) -> Result<()> {
        if let Some(failure) = self.failure {
            return Err(failure.error(call.deadline.operation));
        }
        let own_bytes = collective.own_bytes();
        if own_bytes > MAX_BYTES {
            let error = too_long(call.deadline.operation, own_bytes);
            return Err(self.refuse(call, error));
        }
        self.mailbox.begin(self.sequence);
        let outcome = self.run_rounds(call, collective);
        self.sequence = self.sequence.wrapping_add(1);
        outcome
    }

    fn run_rounds<C: Collective>(&mut self, call: &mut Call<'_>, collective: &mut C) -> Result<()> {
        while let Some(round) = collective.next_round() {
            let id = MessageId::of_round(self.sequence, C::KIND, round.number);
            if let Some((to, message)) = round.send {
                self.send(call, to, id, &message)?;
            }
            let Some(source) = round.receive else { continue };
            let message = self.receive(call, source, id)?;
            if collective.receive(message).is_err() {
                return Err(self.fail(call, Failure::Malformed(source.rank)));
            }
        }
        // Notices advance only while the agent is driven.
        self.complete_notices(call, 0)
    }

    /// Sends a message. All of its notices have left when [`run`](Self::run) or
    /// [`send_direct`](Self::send_direct) returns.
    fn send(&mut self, call: &mut Call<'_>, to: u32, id: MessageId, message: &[u8]) -> Result<()> {
        if message.len() > MAX_MESSAGE {
            let error = too_long(call.deadline.operation, message.len());
            return Err(self.refuse(call, error));
        }
        let peer = match call.ranks.connect(call.agent, to, call.deadline.left_before_report()) {
            Ok(peer) => peer,
            Err(error) => {
                let failure = match error.kind() {
                    ErrorKind::RankFailed => Failure::Ended(to),
                    ErrorKind::DeadlineExceeded => call.deadline.missing(to),
                    _ => return Err(self.refuse(call, error)),
                };
                return Err(self.fail(call, failure));
            }
        };
        for notice in fragments(id, message) {
            self.complete_notices(call, MAX_IN_FLIGHT - 1)?;
            match call.agent.notify(peer, notice) {
                Ok(token) => self.in_flight.push((token, to)),
                Err(error) if error.kind() == transfer::ErrorKind::Closed => {
                    return Err(self.fail(call, Failure::Ended(to)));
                }
                Err(error) => {
                    let error = of_agent(call.deadline.operation, to, error);
                    return Err(self.refuse(call, error));
                }
            }
        }
        Ok(())
    }

    /// Waits until at most `most` notices are in flight. Takes notices of others meanwhile: they may
    /// wait for that.
    fn complete_notices(&mut self, call: &mut Call<'_>, most: usize) -> Result<()> {
        loop {
            let mut failure = None;
            self.in_flight.retain(|(token, to)| match call.agent.test(*token) {
                None => true,
                Some(Ok(_)) => false,
                Some(Err(error)) => {
                    tracing::debug!(rank = to, %error, "sending to a rank failed");
                    failure = Some(match error.kind() {
                        transfer::ErrorKind::Closed | transfer::ErrorKind::Stale => {
                            Failure::Ended(*to)
                        }
                        _ => Failure::Unreachable(*to),
                    });
                    false
                }
            });
            if let Some(failure) = failure {
                return Err(self.fail(call, failure));
            }
            if self.in_flight.len() <= most {
                return Ok(());
            }
            if call.deadline.left_before_report().is_zero() {
                let rank = self.in_flight[0].1;
                let missing = call.deadline.missing(rank);
                return Err(self.fail(call, missing));
            }
            self.take_events(call, Duration::from_millis(1));
            if let Some(failure) = self.reported_failure() {
                return Err(self.fail(call, failure));
            }
        }
    }

    fn receive(&mut self, call: &mut Call<'_>, source: Source, id: MessageId) -> Result<Vec<u8>> {
        loop {
            if let Some(message) = self.mailbox.take(source.rank, id) {
                return Ok(message);
            }
            if self.mailbox.has_contradiction(source.rank, id) {
                return Err(self.fail(call, Failure::Malformed(source.rank)));
            }
            let has_departed = self.mailbox.has_departed(source.rank);
            let departed = has_departed.then_some(Failure::Ended(source.rank));
            if let Some(failure) = self.reported_failure().or(departed) {
                return Err(self.fail(call, failure));
            }
            // Only the rank that waits for a first message knows that its sender is missing.
            let left = match source.sends_at_once {
                true => call.deadline.left_before_report(),
                false => call.deadline.left(),
            };
            if left.is_zero() {
                let missing = call.deadline.missing(source.rank);
                return Err(self.fail(call, missing));
            }
            self.take_events(call, left);
            // A send that failed.
            self.complete_notices(call, usize::MAX)?;
        }
    }

    /// Takes what has arrived; waits until something arrives, at most for this time.
    fn take_events(&mut self, call: &mut Call<'_>, longest: Duration) {
        let mut wait = longest;
        while let Ok(event) = call.agent.next_reserved_event(wait) {
            match event {
                Event::Notice { from, notice } => {
                    if let Some(rank) = call.ranks.find(from) {
                        self.mailbox.add(rank, &notice, self.sequence);
                    }
                }
                Event::Left { from, is_dead, .. } => {
                    if let Some(rank) = call.ranks.find(from) {
                        let departure = if is_dead { Departure::Dead } else { Departure::Closed };
                        self.mailbox.note_departure(rank, departure);
                    }
                }
                _ => {}
            }
            wait = Duration::ZERO;
        }
    }

    fn reported_failure(&self) -> Option<Failure> {
        self.mailbox.abort(self.sequence).and_then(Failure::decode)
    }

    /// Ends the collectives of this rank, and reports the failure to its partners.
    fn fail(&mut self, call: &mut Call<'_>, failure: Failure) -> Error {
        let failure =
            self.first_cause(call).filter(|_| failure.may_be_consequence()).unwrap_or(failure);
        if self.failure.replace(failure).is_none() {
            self.report(call, failure, partners(call.ranks.own(), call.ranks.size()));
        }
        failure.error(call.deadline.operation)
    }

    /// Tells the connected partners which rank departed first, if one did: their next failure would
    /// name this rank, which leaves because of the other.
    pub(crate) fn leave(&mut self, mut call: Call<'_>) {
        if self.failure.is_some() {
            return;
        }
        self.failure = self.first_cause(&mut call);
        if let Some(failure) = self.failure {
            let mut partners = partners(call.ranks.own(), call.ranks.size());
            partners.retain(|rank| call.ranks.is_connected(*rank));
            self.report(&mut call, failure, partners);
        }
    }

    /// The failure that others may follow from, as far as known without waiting: what another rank has
    /// reported, or the departure of the first rank.
    fn first_cause(&mut self, call: &mut Call<'_>) -> Option<Failure> {
        self.take_events(call, Duration::ZERO);
        for (rank, peer) in call.ranks.connected() {
            if let Some(departure) = call.agent.departure(peer) {
                self.mailbox.note_departure(rank, departure);
            }
        }
        self.reported_failure().or_else(|| self.mailbox.first_departed().map(Failure::Ended))
    }

    /// Ends the collectives because this rank cannot take part, and returns why.
    fn refuse(&mut self, call: &mut Call<'_>, error: Error) -> Error {
        let failure = Failure::Refused(call.ranks.own());
        self.fail(call, failure);
        error
    }

    fn report(
        &self,
        Call { agent, ranks, .. }: &mut Call<'_>,
        failure: Failure,
        mut partners: Vec<u32>,
    ) {
        let end = Instant::now() + REPORT_TIMEOUT;
        let left = || end.saturating_duration_since(Instant::now());
        partners.retain(|rank| failure != Failure::Ended(*rank));
        // A connection to a rank that does not answer must not delay the others.
        partners.sort_by_key(|rank| !ranks.is_connected(*rank));
        let mut tokens = Vec::new();
        for rank in partners {
            let Ok(peer) = ranks.connect(agent, rank, left() / 2) else { continue };
            for notice in fragments(MessageId::abort(self.sequence), &failure.encode()) {
                tokens.extend(agent.notify(peer, notice));
            }
        }
        for token in tokens {
            if agent.wait(token, left()).is_err() {
                agent.forget(token);
            }
        }
    }

    /// Sends a message to one rank, outside of collectives.
    pub(crate) fn send_direct(call: Call<'_>, to: u32, message: &[u8]) -> Result<()> {
        let peer = call.ranks.connect(call.agent, to, call.deadline.left())?;
        for notice in fragments(MessageId::direct(), message) {
            let sent = call.agent.notify(peer, notice);
            let sent = sent.and_then(|token| call.agent.wait(token, call.deadline.left()));
            sent.map_err(|error| of_agent(call.deadline.operation, to, error))?;
        }
        Ok(())
    }

    /// Has another message of a rank, outside of collectives, arrived?
    pub(crate) fn has_direct(&self, from: u32) -> bool {
        self.mailbox.has_direct(from)
    }

    /// Waits for the next message of one rank, outside of collectives.
    pub(crate) fn receive_direct(&mut self, mut call: Call<'_>, from: u32) -> Result<Vec<u8>> {
        loop {
            if let Some(message) = self.mailbox.take(from, MessageId::direct()) {
                return Ok(message);
            }
            let left = call.deadline.left();
            if self.mailbox.has_departed(from) {
                return Err(Failure::Ended(from).error(call.deadline.operation));
            }
            if left.is_zero() {
                return Err(call.deadline.missing(from).error(call.deadline.operation));
            }
            self.take_events(&mut call, left);
        }
    }
}

pub(crate) fn too_long(operation: &'static str, length: usize) -> Error {
    let detail = format!("{length} bytes are more than {MAX_BYTES}, the maximum");
    Error::new(operation, ErrorKind::InvalidArgument, detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_reported_to_other_ranks() {
        for failure in [
            Failure::Missing(0, 1500),
            Failure::Missing(7, u32::MAX),
            Failure::Ended(u32::MAX),
            Failure::Malformed(3),
            Failure::Refused(4),
            Failure::Unreachable(5),
        ] {
            assert_eq!(Failure::decode(&failure.encode()), Some(failure));
        }
        for bytes in [&[][..], &[0, 1, 2, 3], &[5, 0, 0, 0, 0, 0, 0, 0, 0], &[0; 8], &[0; 10]] {
            assert_eq!(Failure::decode(bytes), None);
        }
    }

    #[test]
    fn error_names_the_missing_rank_and_the_time_waited() {
        let error = Failure::Missing(3, 9500).error("barrier of ranks");
        let text = "barrier of ranks failed: deadline exceeded: rank 3 did not come within 9.5s. Check \
                    that all ranks call it";
        assert_eq!((error.to_string().as_str(), error.ranks()), (text, &[3][..]));
        let began = Instant::now().checked_sub(Duration::from_millis(1234)).unwrap();
        let deadline =
            CallDeadline { began, ..CallDeadline::new("barrier", Duration::from_secs(2)) };
        assert_eq!(deadline.missing(3), Failure::Missing(3, 1200));
    }
}
