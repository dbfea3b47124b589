//! How many notices may wait in one queue.
//!
//! A writer may give a notice for each chunk that there is room for, whether its reader looks at
//! the queue or not, and a reader one with each credit. Most providers see to it that queues do
//! not overrun (`FI_RM_ENABLED`). Where one does not, what finds no place is lost, or breaks the
//! queue: there each ring has a share of the queue. A writer has no more chunks unread than its
//! reader's share, and none while the credit of as many as its own share has not been noticed.
//!
//! All shares of a queue are equal, so the first rings leave as much to the last as they have.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::board::receives_for_immediates;
use super::immediate::RINGS;
use super::notify::Notify;
use crate::{Capabilities, Error, ErrorKind, Result};

/// Entries of a share: at least a few chunks and the notice of the end, at most what keeps a
/// writer of small messages busy.
const SHARE: std::ops::RangeInclusive<u64> = 8..=32;
/// Rings that end on a port, of both directions.
const MOST_RINGS: u64 = 2 * RINGS as u64;

/// Entries for the completion queue of a port with many rings: where the provider lets queues
/// overrun, the number of rings is bounded by it.
///
/// ```
/// use fabric::ring::queue_entries;
/// use fabric::*;
/// let offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first()?;
/// let size = queue_entries(offer.capabilities());
/// let domain = Domain::open(&offer)?;
/// CompletionQueue::open_with(&domain, QueueOptions { size, ..QueueOptions::default() })?;
/// # Ok::<(), fabric::Error>(())
/// ```
#[must_use]
pub fn queue_entries(facts: &Capabilities) -> usize {
    // The larger one is the smallest share for each of 2048 rings.
    if facts.protects_queues { 4096 } else { 16384 }
}

/// The shares of a queue that no ring has.
#[derive(Debug, Clone)]
pub(super) struct QueueCapacity(Option<Shares>);

#[derive(Debug, Clone)]
struct Shares {
    left: Arc<AtomicU64>,
    all: u64,
    /// Entries of each.
    entries: u64,
}

/// A ring's share of a queue, which is given back when it is dropped.
#[derive(Debug)]
pub(super) struct QueueShare {
    left: Option<Arc<AtomicU64>>,
    most_chunks: u64,
}

/// Entries of a queue that are left for notices.
fn room(facts: &Capabilities, entries: usize) -> u64 {
    // Where none were asked for, providers make queues as long as both of their sides together.
    let entries = match entries {
        0 => facts.transmit_depth.saturating_add(facts.receive_depth),
        entries => entries,
    };
    // Completions of what is written here take their places, too.
    let room = entries - facts.transmit_depth.min(entries / 2);
    let receives = facts.immediates_consume_receives().then(|| receives_for_immediates(facts));
    room.min(receives.unwrap_or(usize::MAX)) as u64
}

impl QueueCapacity {
    /// Of a queue with room for so many entries; 0 for as many as the provider likes.
    pub(super) fn of(facts: &Capabilities, entries: usize) -> Self {
        if facts.protects_queues {
            return Self(None);
        }
        let room = room(facts, entries);
        let entries = (room / MOST_RINGS).clamp(*SHARE.start(), *SHARE.end());
        let all = room / entries;
        Self(Some(Shares { left: Arc::new(AtomicU64::new(all)), all, entries }))
    }

    /// Notices come by another queue, too: there are no more shares than that one has room for.
    /// To be called before rings have shares.
    pub(super) fn limit(&mut self, facts: &Capabilities, entries: usize) {
        if let Some(shares) = &mut self.0 {
            shares.all = shares.all.min(room(facts, entries) / shares.entries);
            shares.left.fetch_min(shares.all, Ordering::Relaxed);
        }
    }

    /// Is there a share, where there have to be some?
    pub(super) fn has_share(&self) -> bool {
        self.0.as_ref().is_none_or(|shares| shares.left.load(Ordering::Relaxed) > 0)
    }

    /// A share for a ring that is told of in this form, and may have so many chunks.
    ///
    /// # Errors
    /// `ResourceExhausted` if other rings have all of it.
    pub(super) fn take(&self, form: Notify, most_chunks: u64) -> Result<QueueShare> {
        let shares = match &self.0 {
            Some(shares) if form == Notify::Immediate => shares,
            _ => return Ok(QueueShare { left: None, most_chunks }),
        };
        let take_one = |left: u64| left.checked_sub(1);
        if shares.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take_one).is_err() {
            let detail = format!(
                "{} rings share the completion queue or its receives, {} entries each, and no \
                 more fit. Close rings, open the queue with more entries, or use another port",
                shares.all, shares.entries
            );
            return Err(Error::new(ErrorKind::ResourceExhausted, "opening a ring", detail));
        }
        // One entry is for the notice of the end.
        let most_chunks = most_chunks.min(shares.entries - 1);
        Ok(QueueShare { left: Some(Arc::clone(&shares.left)), most_chunks })
    }
}

impl QueueShare {
    /// Chunks whose notices fit.
    pub(super) fn most_chunks(&self) -> u64 {
        self.most_chunks
    }

    /// Is it a part of a queue that may overrun?
    pub(super) fn is_limited(&self) -> bool {
        self.left.is_some()
    }
}

impl Drop for QueueShare {
    fn drop(&mut self) {
        if let Some(left) = &self.left {
            left.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
#[path = "capacity_tests.rs"]
mod tests;
