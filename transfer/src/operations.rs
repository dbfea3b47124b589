//! Operations in flight and uncollected outcomes: a table without clocks and devices.

use std::collections::HashMap;
use std::fmt;

use crate::error::{Error, ErrorKind, Result};
use crate::path::Path;

/// Maximum number of operations in flight and uncollected outcomes.
pub const MAX_OPERATIONS: usize = 1 << 16;

/// Identifies an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token {
    slot: u32,
    generation: u32,
}

// Generation and slot of a token in 48 bits.
const _: () = assert!(MAX_OPERATIONS <= 1 << 16);

impl Token {
    /// The token as a number below 2⁴⁸, for interfaces to other languages.
    ///
    /// ```
    /// # use transfer::{Agent, AgentOptions, Notice, Token};
    /// # let mut here = Agent::start(AgentOptions::new("here"))?;
    /// # let there = Agent::start(AgentOptions::new("there"))?;
    /// # let peer = here.connect(&there.card().encode()?, std::time::Duration::from_secs(1))?;
    /// let token = here.notify(peer, Notice::new(1, &[])?)?;
    /// assert_eq!(Token::from_u64(token.to_u64()), token);
    /// # Ok::<(), transfer::Error>(())
    /// ```
    #[must_use]
    pub fn to_u64(self) -> u64 {
        u64::from(self.generation) << 16 | u64::from(self.slot)
    }

    /// The token of a [number](Self::to_u64). A number that no operation has is
    /// [`Unknown`](ErrorKind::Unknown) to the agent.
    #[must_use]
    pub fn from_u64(number: u64) -> Self {
        Self { slot: (number & 0xffff) as u32, generation: (number >> 16) as u32 }
    }
}

/// A completed operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Done {
    /// Bytes transferred.
    pub bytes: u64,
    /// The path of the bytes; None for a notice without data.
    pub path: Option<Path>,
}

/// Facts about an operation, known at its start.
#[derive(Debug, Clone)]
pub(super) struct OperationInfo {
    /// "put"
    pub(super) operation: &'static str,
    pub(super) bytes: u64,
    pub(super) path: Option<Path>,
    /// Number of the peer at this agent.
    pub(super) peer: u32,
}

#[derive(Debug)]
enum State {
    Free,
    InFlight {
        begun: OperationInfo,
        is_forgotten: bool,
        /// The operation that it is a part of.
        whole: Option<Token>,
    },
    Over(Result<Done>),
}

#[derive(Debug)]
struct Slot {
    generation: u32,
    state: State,
}

#[derive(Debug, Default)]
pub(super) struct Operations {
    slots: Vec<Slot>,
    free: Vec<u32>,
    in_flight: usize,
    /// Operations with parts in flight.
    wholes: HashMap<Token, Parts>,
    /// Operations whose parts are over, with the first failure.
    over: Vec<(Token, Result<()>)>,
}

/// The parts of an operation.
#[derive(Debug, Default)]
struct Parts {
    in_flight: usize,
    failure: Option<Error>,
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.slot, self.generation)
    }
}

impl Operations {
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight
    }

    pub(super) fn begin(&mut self, begun: OperationInfo) -> Result<Token> {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None if self.slots.len() < MAX_OPERATIONS => {
                self.slots.push(Slot { generation: 0, state: State::Free });
                self.slots.len() as u32 - 1
            }
            None => {
                let detail = format!(
                    "{MAX_OPERATIONS} operations in flight or uncollected. Call wait or test"
                );
                return Err(Error::new(begun.operation, ErrorKind::TooMany, detail));
            }
        };
        let entry = &mut self.slots[slot as usize];
        entry.state = State::InFlight { begun, is_forgotten: false, whole: None };
        self.in_flight += 1;
        Ok(Token { slot, generation: entry.generation })
    }

    /// Records the outcome of an operation. A second outcome is ignored.
    pub(super) fn finish(&mut self, token: Token, outcome: Result<()>) {
        let Some(slot) = self.slot(token) else { return };
        let State::InFlight { begun, is_forgotten, whole } = &slot.state else { return };
        let done = Done { bytes: begun.bytes, path: begun.path };
        let (is_forgotten, whole) = (*is_forgotten, *whole);
        let failure = outcome.as_ref().err().cloned();
        slot.state = State::Over(outcome.map(|()| done));
        self.in_flight -= 1;
        if is_forgotten {
            self.release(token);
        }
        if let Some(whole) = whole {
            self.part_is_over(whole, failure);
        }
    }

    /// Makes an operation in flight a part of another one: its outcome is that of the whole.
    pub(super) fn join(&mut self, part: Token, of: Token) {
        let Some(slot) = self.slot(part) else { return };
        if let State::InFlight { is_forgotten, whole, .. } = &mut slot.state {
            (*is_forgotten, *whole) = (true, Some(of));
            self.wholes.entry(of).or_default().in_flight += 1;
        }
    }

    fn part_is_over(&mut self, whole: Token, failure: Option<Error>) {
        let Some(parts) = self.wholes.get_mut(&whole) else { return };
        parts.in_flight -= 1;
        if parts.failure.is_none() {
            parts.failure = failure;
        }
        if parts.in_flight == 0
            && let Some(parts) = self.wholes.remove(&whole)
        {
            self.over.push((whole, parts.failure.map_or(Ok(()), Err)));
        }
    }

    /// An operation whose parts are over, with the first failure.
    pub(super) fn take_over(&mut self) -> Option<(Token, Result<()>)> {
        self.over.pop()
    }

    /// The parts of an operation that are in flight.
    pub(super) fn parts_of(&self, of: Token) -> Vec<Token> {
        let mut parts = Vec::new();
        if !self.wholes.contains_key(&of) {
            return parts;
        }
        for (slot, number) in self.slots.iter().zip(0..) {
            if let State::InFlight { whole: Some(whole), .. } = &slot.state
                && *whole == of
            {
                parts.push(Token { slot: number, generation: slot.generation });
            }
        }
        parts
    }

    /// Describes one operation in flight with a peer.
    pub(super) fn describe_one(&self, peer: u32) -> String {
        let mut slots = self.slots.iter().zip(0..);
        let found = slots.find_map(|(slot, number)| match &slot.state {
            State::InFlight { begun, .. } if begun.peer == peer => {
                let token = Token { slot: number, generation: slot.generation };
                Some(format!("{} {token} of {} bytes", begun.operation, begun.bytes))
            }
            _ => None,
        });
        found.unwrap_or_else(|| "none".to_owned())
    }

    /// Facts about an operation in flight.
    pub(super) fn begun(&self, token: Token) -> Option<&OperationInfo> {
        let slot = self.slots.get(token.slot as usize)?;
        match &slot.state {
            State::InFlight { begun, .. } if slot.generation == token.generation => Some(begun),
            _ => None,
        }
    }

    /// Returns the outcome once: None while the operation is in flight.
    pub(super) fn collect(&mut self, token: Token) -> Option<Result<Done>> {
        let unknown = || {
            let detail = format!("{token} was collected already, or belongs to another agent");
            Some(Err(Error::new("query operation", ErrorKind::Unknown, detail)))
        };
        let Some(slot) = self.slot(token) else { return unknown() };
        match std::mem::replace(&mut slot.state, State::Free) {
            State::Over(outcome) => {
                self.release(token);
                Some(outcome)
            }
            state @ State::InFlight { .. } => {
                slot.state = state;
                None
            }
            State::Free => unknown(),
        }
    }

    /// The outcome will not be collected.
    pub(super) fn forget(&mut self, token: Token) {
        let Some(slot) = self.slot(token) else { return };
        match &mut slot.state {
            State::InFlight { is_forgotten, .. } => *is_forgotten = true,
            State::Over(_) => self.release(token),
            State::Free => {}
        }
    }

    fn slot(&mut self, token: Token) -> Option<&mut Slot> {
        self.slots.get_mut(token.slot as usize).filter(|slot| slot.generation == token.generation)
    }

    fn release(&mut self, token: Token) {
        let slot = &mut self.slots[token.slot as usize];
        slot.state = State::Free;
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(token.slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begun(bytes: u64) -> OperationInfo {
        OperationInfo { operation: "put", bytes, path: Some(Path::CudaIpc), peer: 0 }
    }

    #[test]
    fn outcome_is_collected_once() {
        let mut operations = Operations::default();
        let token = operations.begin(begun(5)).unwrap();
        assert!(operations.collect(token).is_none());
        assert_eq!(operations.begun(token).unwrap().bytes, 5);
        operations.finish(token, Ok(()));
        operations.finish(token, Err(Error::new("put", ErrorKind::Closed, "")));
        assert_eq!(operations.in_flight, 0);
        let done = operations.collect(token).unwrap().unwrap();
        assert_eq!(done, Done { bytes: 5, path: Some(Path::CudaIpc) });
        let again = operations.collect(token).unwrap().unwrap_err();
        assert_eq!(again.kind(), ErrorKind::Unknown);
    }

    #[test]
    fn reused_slot_does_not_answer_to_the_old_token() {
        let mut operations = Operations::default();
        let old = operations.begin(begun(1)).unwrap();
        operations.forget(old);
        operations.finish(old, Ok(()));
        let new = operations.begin(begun(2)).unwrap();
        assert_eq!(old.slot, new.slot);
        assert!(operations.begun(old).is_none());
        operations.finish(old, Ok(()));
        assert!(operations.collect(new).is_none(), "still in flight");
        assert!(operations.collect(old).unwrap().is_err());
        operations.finish(new, Err(Error::new("put", ErrorKind::Closed, "")));
        operations.forget(new);
        assert!(operations.collect(new).unwrap().is_err());
    }

    #[test]
    fn operations_beyond_the_maximum_are_refused() {
        let mut operations = Operations::default();
        let tokens: Vec<_> =
            (0..MAX_OPERATIONS).map(|_| operations.begin(begun(0)).unwrap()).collect();
        assert_eq!(operations.begin(begun(0)).unwrap_err().kind(), ErrorKind::TooMany);
        operations.finish(tokens[3], Ok(()));
        // Completed, but not collected.
        assert!(operations.begin(begun(0)).is_err());
        operations.collect(tokens[3]);
        assert!(operations.begin(begun(0)).is_ok());
    }
}
