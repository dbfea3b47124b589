//! Which of the connections between two nodes is their session.
//!
//! Both may dial at the same time, and one may have lost a connection that the other
//! still believes in. So it is agreed: the node with the smaller identity, the *asker*,
//! claims one connection after the other and says which session it has, if any. The
//! other, the *decider*, accepts the claim and so replaces what it had, unless that is
//! the very session that the asker has, too. Each knows its half for sure: the asker
//! never claims while it waits for an answer, and the decider has only what was claimed.

use std::collections::VecDeque;

use super::identity::SessionId;

/// A connection, as it is known on this side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct ConnectionId(pub(super) u64);

/// What is to be done, in this order.
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
    /// It is the session from now on.
    Establish {
        on: ConnectionId,
        session: SessionId,
    },
    /// Another took its place.
    Replace(ConnectionId),
    /// There is another already.
    Refuse(ConnectionId),
}

/// What one side knows of the connections with one other node.
#[derive(Debug, Default)]
pub(super) struct SessionArbitration {
    current: Option<(ConnectionId, SessionId)>,
    /// The asker's: the one that waits for its answer.
    claimed: Option<ConnectionId>,
    /// The asker's: those to be claimed later.
    held: VecDeque<ConnectionId>,
}

impl SessionArbitration {
    pub(super) fn current(&self) -> Option<(ConnectionId, SessionId)> {
        self.current
    }

    /// As the asker: a connection on which both have said hello. A session that is stale, on which
    /// nothing was heard for too long, is as good as none.
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

    /// As the asker: the claim was accepted. None if there was no such claim.
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

    /// As the decider: a claim came. The session that there is may be stale.
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

    /// A connection is gone.
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
        let (mut asker, mut decider) =
            (SessionArbitration::default(), SessionArbitration::default());
        assert!(asker.on_hello(first, false).is_some());
        decider.claims(first, None, (number, false));
        asker.accepted(first, number).unwrap();
        (asker, decider)
    }

    #[test]
    fn another_connection_takes_the_place_of_a_session_that_is_stale_at_either_side() {
        let (first, second, number) = (ConnectionId(1), ConnectionId(2), SessionId(2));
        for (at_asker, at_decider) in [(false, false), (true, false), (false, true), (true, true)] {
            let (mut asker, mut decider) = session();
            let Some(Step::Claim { on, instead_of }) = asker.on_hello(second, at_asker) else {
                panic!("no claim");
            };
            assert_eq!((on, instead_of.is_none()), (second, at_asker));
            let steps = decider.claims(second, instead_of, (number, at_decider));
            if !at_asker && !at_decider {
                assert_eq!(steps, [Step::Refuse(second)]);
                continue;
            }
            let taken = [Step::Replace(first), Step::Establish { on: second, session: number }];
            assert_eq!(steps[0], Step::Accept { on: second, session: number });
            assert_eq!(steps[1..], taken);
            assert_eq!(asker.accepted(second, number).unwrap(), taken);
        }
    }
}
