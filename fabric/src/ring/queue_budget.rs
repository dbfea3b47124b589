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

use super::immediate::MAX_RINGS;
use super::notify::NotifyMode;
use super::posted_receives::immediate_receive_count;
use crate::{Capabilities, Error, ErrorKind, Result};

/// Entries of a share: at least a few chunks and the notice of the end, at most what keeps a
/// writer of small messages busy.
const QUOTA_ENTRIES: std::ops::RangeInclusive<u64> = 8..=32;
/// Rings that end on a port, of both directions.
const MAX_RINGS_BOTH_WAYS: u64 = 2 * MAX_RINGS as u64;

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
    if facts.resource_management { 4096 } else { 16384 }
}

/// The shares of a queue that no ring has.
#[derive(Debug, Clone)]
pub(super) struct QueueBudget(Option<QuotaPool>);

#[derive(Debug, Clone)]
struct QuotaPool {
    left: Arc<AtomicU64>,
    all: u64,
    /// Entries of each.
    entries: u64,
}

/// A ring's share of a queue, which is given back when it is dropped.
#[derive(Debug)]
pub(super) struct QueueQuota {
    left: Option<Arc<AtomicU64>>,
    max_chunks: u64,
}

/// Entries of a queue that are left for notices.
fn notice_entries(facts: &Capabilities, entries: usize) -> u64 {
    // Where none were asked for, providers make queues as long as both of their sides together.
    let entries = match entries {
        0 => facts.transmit_depth.saturating_add(facts.receive_depth),
        entries => entries,
    };
    // Completions of what is written here take their places, too.
    let notice_entries = entries - facts.transmit_depth.min(entries / 2);
    let receives = facts.immediates_consume_receives().then(|| immediate_receive_count(facts));
    notice_entries.min(receives.unwrap_or(usize::MAX)) as u64
}

impl QueueBudget {
    /// Of a queue with room for so many entries; 0 for as many as the provider likes.
    pub(super) fn of(facts: &Capabilities, entries: usize) -> Self {
        if facts.resource_management {
            return Self(None);
        }
        let notice_entries = notice_entries(facts, entries);
        let entries = (notice_entries / MAX_RINGS_BOTH_WAYS)
            .clamp(*QUOTA_ENTRIES.start(), *QUOTA_ENTRIES.end());
        let all = notice_entries / entries;
        Self(Some(QuotaPool { left: Arc::new(AtomicU64::new(all)), all, entries }))
    }

    /// Notices come by another queue, too: there are no more shares than that one has room for.
    /// To be called before rings have shares.
    pub(super) fn limit(&mut self, facts: &Capabilities, entries: usize) {
        if let Some(quotas) = &mut self.0 {
            quotas.all = quotas.all.min(notice_entries(facts, entries) / quotas.entries);
            quotas.left.fetch_min(quotas.all, Ordering::Relaxed);
        }
    }

    /// Is there a share, where there have to be some?
    pub(super) fn has_free_quota(&self) -> bool {
        self.0.as_ref().is_none_or(|quotas| quotas.left.load(Ordering::Relaxed) > 0)
    }

    /// A share for a ring that is told of in this form, and may have so many chunks.
    ///
    /// # Errors
    /// `ResourceExhausted` if other rings have all of it.
    pub(super) fn take(&self, mode: NotifyMode, max_chunks: u64) -> Result<QueueQuota> {
        let quotas = match &self.0 {
            Some(quotas) if mode == NotifyMode::Immediate => quotas,
            _ => return Ok(QueueQuota { left: None, max_chunks }),
        };
        let take_one = |left: u64| left.checked_sub(1);
        if quotas.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take_one).is_err() {
            let detail = format!(
                "{} rings share the completion queue or its receives, {} entries each, and no \
                 more fit. Close rings, open the queue with more entries, or use another port",
                quotas.all, quotas.entries
            );
            return Err(Error::new(ErrorKind::ResourceExhausted, "opening a ring", detail));
        }
        // One entry is for the notice of the end.
        let max_chunks = max_chunks.min(quotas.entries - 1);
        Ok(QueueQuota { left: Some(Arc::clone(&quotas.left)), max_chunks })
    }
}

impl QueueQuota {
    /// Chunks whose notices fit.
    pub(super) fn max_chunks(&self) -> u64 {
        self.max_chunks
    }

    /// Is it a part of a queue that may overrun?
    pub(super) fn is_limited(&self) -> bool {
        self.left.is_some()
    }
}

impl Drop for QueueQuota {
    fn drop(&mut self) {
        if let Some(left) = &self.left {
            left.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
#[path = "queue_budget_tests.rs"]
mod tests;
