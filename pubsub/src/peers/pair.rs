//! Which of the connections between two nodes is their session.
//!
//! Both may dial at the same time, and one may have lost a connection that the other
//! still believes in. So it is agreed: the node with the smaller identity, the *asker*,
//! claims one connection after the other and says which session it has, if any. The
//! other, the *decider*, accepts the claim and so replaces what it had, unless that is
//! the very session that the asker has, too. Each knows its half for sure: the asker
//! never claims while it waits for an answer, and the decider has only what was claimed.

use std::collections::VecDeque;

use super::identity::SessionNumber;

/// A connection, as it is known on this side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Connection(pub(super) u64);

/// What is to be done, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    Claim {
        on: Connection,
        instead_of: Option<SessionNumber>,
    },
    Accept {
        on: Connection,
        session: SessionNumber,
    },
    /// It is the session from now on.
    Establish {
        on: Connection,
        session: SessionNumber,
    },
    /// Another took its place.
    Replace(Connection),
    /// There is another already.
    Refuse(Connection),
}

/// What one side knows of the connections with one other node.
#[derive(Debug, Default)]
pub(super) struct Pair {
    current: Option<(Connection, SessionNumber)>,
    /// The asker's: the one that waits for its answer.
    claimed: Option<Connection>,
    /// The asker's: those to be claimed later.
    held: VecDeque<Connection>,
}

impl Pair {
    pub(super) fn current(&self) -> Option<(Connection, SessionNumber)> {
        self.current
    }

    /// As the asker: a connection on which both have said hello. A session that is stale, on which
    /// nothing was heard for too long, is as good as none.
    pub(super) fn introduced(&mut self, connection: Connection, is_stale: bool) -> Option<Step> {
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
    pub(super) fn accepted(&mut self, on: Connection, session: SessionNumber) -> Option<Vec<Step>> {
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
        on: Connection,
        instead_of: Option<SessionNumber>,
        (session, is_stale): (SessionNumber, bool),
    ) -> Vec<Step> {
        let current = self.current.filter(|_| !is_stale).map(|(_, session)| session);
        if instead_of.is_some() && instead_of == current {
            return vec![Step::Refuse(on)];
        }
        let mut steps = vec![Step::Accept { on, session }];
        steps.extend(self.take_over(on, session));
        steps
    }

    fn take_over(&mut self, on: Connection, session: SessionNumber) -> Vec<Step> {
        let old = self.current.replace((on, session));
        let mut steps: Vec<_> = old.map(|(old, _)| Step::Replace(old)).into_iter().collect();
        steps.push(Step::Establish { on, session });
        steps
    }

    /// A connection is gone.
    pub(super) fn gone(&mut self, connection: Connection) -> Option<Step> {
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
    fn session() -> (Pair, Pair) {
        let (first, number) = (Connection(1), SessionNumber(1));
        let (mut asker, mut decider) = (Pair::default(), Pair::default());
        assert!(asker.introduced(first, false).is_some());
        decider.claims(first, None, (number, false));
        asker.accepted(first, number).unwrap();
        (asker, decider)
    }

    #[test]
    fn another_connection_takes_the_place_of_a_session_that_is_stale_at_either_side() {
        let (first, second, number) = (Connection(1), Connection(2), SessionNumber(2));
        for (at_asker, at_decider) in [(false, false), (true, false), (false, true), (true, true)] {
            let (mut asker, mut decider) = session();
            let Some(Step::Claim { on, instead_of }) = asker.introduced(second, at_asker) else {
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
