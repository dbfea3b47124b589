//! Numbers of operations and peers in C. They contain the number of their agent, so that those of
//! another agent are detected, and are never 0.

use std::sync::atomic::{AtomicU32, Ordering};

use transfer::{PeerId, Token};

use crate::failure::{Failure, Operation, Result};
use crate::status::Status;

/// The bits below the number of the agent.
const SHIFT: u32 = 48;

/// Number of an agent in this process: 1 to 65535, repeating after that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct AgentNumber(u64);

impl AgentNumber {
    pub(super) fn next() -> Self {
        static LAST: AtomicU32 = AtomicU32::new(0);
        Self(u64::from(LAST.fetch_add(1, Ordering::Relaxed) % 0xffff) + 1)
    }

    pub(super) fn of_token(self, token: Token) -> u64 {
        self.0 << SHIFT | token.to_u64()
    }

    pub(super) fn of_peer(self, peer: PeerId) -> u64 {
        self.0 << SHIFT | u64::from(peer.to_u32())
    }

    pub(super) fn token(self, operation: Operation, number: u64) -> Result<Token> {
        self.check(operation, number, "operation").map(Token::from_u64)
    }

    pub(super) fn peer(self, operation: Operation, number: u64) -> Result<PeerId> {
        let peer = self.check(operation, number, "peer")?;
        match u32::try_from(peer) {
            Ok(peer) => Ok(PeerId::from_u32(peer)),
            Err(_) => Err(unknown(operation, number, "peer")),
        }
    }

    /// The bits below the number of the agent.
    fn check(self, operation: Operation, number: u64, what: &str) -> Result<u64> {
        match number >> SHIFT == self.0 {
            true => Ok(number & ((1 << SHIFT) - 1)),
            false => Err(unknown(operation, number, what)),
        }
    }
}

fn unknown(operation: Operation, number: u64, what: &str) -> Failure {
    let detail = format_args!("{number:#x} is no {what} of this agent");
    Failure::new(Status::NotFound, operation, detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_of_one_agent_and_never_zero() {
        let (one, other) = (AgentNumber::next(), AgentNumber::next());
        for number in [0, 1, u64::from(u32::MAX) << 16 | 0xffff] {
            let token = one.of_token(Token::from_u64(number));
            assert_ne!(token, 0);
            assert_eq!(one.token(c"test", token).unwrap().to_u64(), number);
            assert_eq!(other.token(c"test", token).unwrap_err().status, Status::NotFound);
        }
        let peer = one.of_peer(PeerId::from_u32(7));
        assert_eq!(one.peer(c"test", peer).unwrap(), PeerId::from_u32(7));
        for unknown in [0, peer | 1 << 40, other.of_peer(PeerId::from_u32(7))] {
            assert_eq!(one.peer(c"test", unknown).unwrap_err().status, Status::NotFound);
        }
    }
}
