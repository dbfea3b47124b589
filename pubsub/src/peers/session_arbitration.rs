//! Decides which of the connections between two nodes is their session.
//!
//! Both may dial at the same time, and one may have lost a connection that the other still believes
//! in. So they agree: the node with the smaller id, the *claimant*, claims one connection after the
//! other, and names its current session, if any. The other, the *acceptor*, accepts the claim and
//! replaces its session, unless that is the one the claimant named. Each knows its own half for
//! sure: the claimant never claims while it waits for an answer, and the acceptor has only what was
//! claimed.

use std::collections::VecDeque;

use super::ConnectionId;
use super::identity::SessionId;

/// A step to be done; steps are done in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    Claim {
        on: ConnectionId,
        instead_of: Option<SessionId>,
    },
    Accept {
        on: ConnectionId,
        session: SessionId,
    },
    /// The connection becomes the session.
    Establish {
        on: ConnectionId,
        session: SessionId,
    },
    /// Another connection replaced this one.
    Replace(ConnectionId),
    /// There is another session already.
    Refuse(ConnectionId),
}

/// State of one side about the connections with one other node.
#[derive(Debug, Default)]
pub(super) struct SessionArbitration {
    current: Option<(ConnectionId, SessionId)>,
    /// The claimant's: the connection with a pending claim.
    claimed: Option<ConnectionId>,
    /// The claimant's: connections to be claimed later.
    held: VecDeque<ConnectionId>,
}

impl SessionArbitration {
    pub(super) fn current(&self) -> Option<(ConnectionId, SessionId)> {
        self.current
    }

    /// Handles, as the claimant, a connection on which both have sent a hello. A stale session,
    /// without a message for too long, counts as none.
    pub(super) fn on_hello(&mut self, connection: ConnectionId, is_stale: bool) -> Option<Step> {
        self.held.push_back(connection);
        self.claim_next(is_stale)
    }

    fn claim_next(&mut self, is_stale: bool) -> Option<Step> {
        if self.claimed.is_some() {
            return None;
        }
        let on = self.held.pop_front()?;
        self.claimed = Some(on);
        let current = self.current.filter(|_| !is_stale);
        Some(Step::Claim { on, instead_of: current.map(|(_, session)| session) })
    }

    /// Handles, as the claimant, an accepted claim. None if there was no such claim.
    pub(super) fn accepted(&mut self, on: ConnectionId, session: SessionId) -> Option<Vec<Step>> {
        // A number stands for one session only.
        let is_used = self.current.is_some_and(|(_, current)| current == session);
        if self.claimed != Some(on) || is_used {
            return None;
        }
        self.claimed = None;
        let mut steps = self.take_over(on, session);
        steps.extend(self.claim_next(false));
        Some(steps)
    }

    /// Handles, as the acceptor, a claim. The current session may be stale.
    pub(super) fn claims(
        &mut self,
        on: ConnectionId,
        instead_of: Option<SessionId>,
        (session, is_stale): (SessionId, bool),
    ) -> Vec<Step> {
        let current = self.current.filter(|_| !is_stale).map(|(_, session)| session);
        if instead_of.is_some() && instead_of == current {
            return vec![Step::Refuse(on)];
        }
        let mut steps = vec![Step::Accept { on, session }];
        steps.extend(self.take_over(on, session));
        steps
    }

    fn take_over(&mut self, on: ConnectionId, session: SessionId) -> Vec<Step> {
        let old = self.current.replace((on, session));
        let mut steps: Vec<_> = old.map(|(old, _)| Step::Replace(old)).into_iter().collect();
        steps.push(Step::Establish { on, session });
        steps
    }

    /// A connection was closed.
    pub(super) fn gone(&mut self, connection: ConnectionId) -> Option<Step> {
        self.current.take_if(|(current, _)| *current == connection);
        self.claimed.take_if(|claimed| *claimed == connection);
        self.held.retain(|held| *held != connection);
        self.claim_next(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The two sides of a session.
    fn session() -> (SessionArbitration, SessionArbitration) {
        let (first, number) = (ConnectionId(1), SessionId(1));
        let (mut claimant, mut acceptor) =
            (SessionArbitration::default(), SessionArbitration::default());
        assert!(claimant.on_hello(first, false).is_some());
        acceptor.claims(first, None, (number, false));
        claimant.accepted(first, number).unwrap();
        (claimant, acceptor)
    }

    #[test]
    fn connection_replaces_a_session_stale_at_either_side() {
        let (first, second, number) = (ConnectionId(1), ConnectionId(2), SessionId(2));
        for (at_claimant, at_acceptor) in
            [(false, false), (true, false), (false, true), (true, true)]
        {
            let (mut claimant, mut acceptor) = session();
            let Some(Step::Claim { on, instead_of }) = claimant.on_hello(second, at_claimant)
            else {
                panic!("no claim");
            };
            assert_eq!((on, instead_of.is_none()), (second, at_claimant));
            let steps = acceptor.claims(second, instead_of, (number, at_acceptor));
            if !at_claimant && !at_acceptor {
                assert_eq!(steps, [Step::Refuse(second)]);
                continue;
            }
            let taken = [Step::Replace(first), Step::Establish { on: second, session: number }];
            assert_eq!(steps[0], Step::Accept { on: second, session: number });
            assert_eq!(steps[1..], taken);
            assert_eq!(claimant.accepted(second, number).unwrap(), taken);
        }
    }
}
