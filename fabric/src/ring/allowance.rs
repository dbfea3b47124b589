//! How many notices may be on their way to one queue.
//!
//! A writer may give a notice for each chunk that there is room for, whether its reader looks at
//! the queue or not, and a reader one with each credit. Most providers see to it that queues do
//! not overrun (`FI_RM_ENABLED`). Where one does not, what finds no place is lost, or breaks the
//! queue: there each ring gets a share of it, and has no more chunks unread than that. Credit is
//! told at most once for each of these.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::board::IMMEDIATES;
use super::notify::Notify;
use crate::{Capabilities, Error, ErrorKind, Result};

/// The most of all rings together: what the queue of a further lane has room for beside its own
/// writes.
const MOST: u64 = 2048;
/// The smallest share: a few chunks, and the notice of the end.
const LEAST: u64 = 8;

/// What is left of a queue's room for notices. None: there is no end of it.
#[derive(Debug, Clone)]
pub(super) struct Allowance(Option<Arc<AtomicU64>>);

/// A ring's share of it, which is given back when it is dropped.
#[derive(Debug)]
pub(super) struct Quota {
    left: Option<Arc<AtomicU64>>,
    taken: u64,
    most_chunks: u64,
}

impl Allowance {
    /// Of a queue with room for so many entries; 0 for as many as the provider likes.
    pub(super) fn of(facts: &Capabilities, entries: usize) -> Self {
        if facts.protects_queues {
            return Self(None);
        }
        // Providers make queues as long as both of their sides together.
        let depth = |entries: usize| entries as u64;
        let entries = match entries {
            0 => facts.transmit_depth.saturating_add(facts.receive_depth),
            entries => entries,
        };
        // Completions of what is written here take their places, too.
        let own = depth(facts.transmit_depth).min(depth(entries) / 2);
        let mut room = (depth(entries) - own).min(MOST);
        if facts.immediates_consume_receives() {
            room = room.min(depth(IMMEDIATES.min(facts.receive_depth)));
        }
        Self(Some(Arc::new(AtomicU64::new(room))))
    }

    /// A share for a ring that is told of in this form, and may have so many chunks.
    ///
    /// # Errors
    /// `ResourceExhausted` if other rings have all of it.
    pub(super) fn take(&self, form: Notify, most_chunks: u64) -> Result<Quota> {
        let left = match &self.0 {
            Some(left) if form == Notify::Immediate => left,
            _ => return Ok(Quota { left: None, taken: 0, most_chunks }),
        };
        // An eighth of what is left, so that there is some for many.
        let share = |left: u64| (left / 8).max(LEAST).min(most_chunks + 1);
        let taken = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
            left.checked_sub(share(left))
        });
        match taken {
            Ok(before) => {
                let taken = share(before);
                Ok(Quota { left: Some(Arc::clone(left)), taken, most_chunks: taken - 1 })
            }
            Err(left) => {
                let detail = format!(
                    "the completion queue has room for {left} more notices: open it with more"
                );
                Err(Error::new(ErrorKind::ResourceExhausted, "opening a ring", detail))
            }
        }
    }
}

impl Quota {
    /// Chunks that the ring may have at the same time.
    pub(super) fn most_chunks(&self) -> u64 {
        self.most_chunks
    }
}

impl Drop for Quota {
    fn drop(&mut self) {
        if let Some(left) = &self.left {
            left.fetch_add(self.taken, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
#[path = "allowance_tests.rs"]
mod tests;
