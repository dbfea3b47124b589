//! What each rail was given to do and has not told of: if its thread ends in the middle of
//! something, somebody has to know.

use std::collections::HashMap;

use super::lane::Ticket;
use super::operations::Token;
use crate::rail::Report;

/// Operations that rails have a part in, by rail.
#[derive(Debug, Default)]
pub(super) struct Given {
    /// Of one operation a rail may have several parts, once another one was lost.
    rails: Vec<HashMap<Token, (Ticket, usize)>>,
}

impl Given {
    /// A rail is given a part of an operation, or a notice.
    pub(super) fn give(&mut self, rail: usize, ticket: &Ticket) {
        if self.rails.len() <= rail {
            self.rails.resize_with(rail + 1, HashMap::new);
        }
        self.rails[rail].entry(ticket.token).or_insert_with(|| (ticket.clone(), 0)).1 += 1;
    }

    /// A rail tells something. Each part comes back once.
    pub(super) fn hear(&mut self, rail: usize, report: &Report) {
        let token = match report {
            Report::Done { ticket, .. } => ticket.token,
            Report::Stranded { told, .. } => told.ticket.token,
            _ => return,
        };
        let Some(given) = self.rails.get_mut(rail) else { return };
        if let Some((_, parts)) = given.get_mut(&token) {
            *parts -= 1;
            if *parts == 0 {
                given.remove(&token);
            }
        }
    }

    /// A rail tells nothing more: what it has not told of, for each part once.
    pub(super) fn take(&mut self, rail: usize) -> Vec<Ticket> {
        let given = self.rails.get_mut(rail).map(std::mem::take).unwrap_or_default();
        let parts = given.into_values();
        parts.flat_map(|(ticket, parts)| std::iter::repeat_n(ticket, parts)).collect()
    }
}
