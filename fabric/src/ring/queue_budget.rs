//! Limits the notices in a completion queue.
//!
//! A writer may send a notice for each chunk that fits, even if its reader does not poll; a reader
//! may send one with each credit. Most providers keep queues from overrunning (`FI_RM_ENABLED`).
//! Where one does not, excess notices are lost or break the queue. There each ring has a quota of
//! the queue's entries. A writer has at most as many unread chunks as its reader's quota, and none
//! beyond its own quota while the credit notices may still be in its queue.
//!
//! All quotas of a queue are equal, so the first rings leave as much to the last as they have.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::immediate::MAX_RINGS;
use super::notify::NotifyMode;
use crate::{Capabilities, Error, ErrorKind, Result};

/// Entries of a quota: at least a few chunks and the end notice, at most enough to keep a writer of
/// small messages busy.
const QUOTA_ENTRIES: std::ops::RangeInclusive<u64> = 8..=32;
/// Receives for immediates, where queues do not overrun.
const IMMEDIATE_RECEIVES: usize = 1024;
const MAX_RINGS_BOTH_WAYS: u64 = 2 * MAX_RINGS as u64;

/// Entries for the completion queue of a port with many rings: where the provider lets queues
/// overrun, they bound the number of rings.
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
pub fn queue_entries(capabilities: &Capabilities) -> usize {
    // The larger one is the smallest quota for each of 2048 rings.
    if capabilities.limits.resource_management { 4096 } else { 16384 }
}

/// Receives posted for immediates where these consume receives. Where queues may overrun they bound
/// the number of rings, so as many are posted as the provider takes.
pub(super) fn immediate_receive_count(capabilities: &Capabilities) -> usize {
    let most = if capabilities.limits.resource_management {
        IMMEDIATE_RECEIVES
    } else {
        usize::from(u16::MAX)
    };
    capabilities.limits.receive_depth.clamp(1, most)
}

/// The free quotas of a queue.
#[derive(Debug, Clone)]
pub(super) struct QueueBudget(Option<QuotaPool>);

#[derive(Debug, Clone)]
struct QuotaPool {
    left: Arc<AtomicU64>,
    all: u64,
    /// Entries of each.
    entries: u64,
}

/// A ring's quota of a queue, returned when it is dropped.
#[derive(Debug)]
pub(super) struct QueueQuota {
    left: Option<Arc<AtomicU64>>,
    max_chunks: u64,
}

/// Entries of a queue that notices may use.
fn notice_entries(capabilities: &Capabilities, entries: usize) -> u64 {
    // By default, providers size a queue for both of its sides together.
    let entries = match entries {
        0 => capabilities.limits.transmit_depth.saturating_add(capabilities.limits.receive_depth),
        entries => entries,
    };
    // Completions of local operations use entries, too.
    let notice_entries = entries - capabilities.limits.transmit_depth.min(entries / 2);
    let receives =
        capabilities.immediates_consume_receives().then(|| immediate_receive_count(capabilities));
    notice_entries.min(receives.unwrap_or(usize::MAX)) as u64
}

impl QueueBudget {
    /// The budget of a queue with this many entries; 0: the provider's default.
    pub(super) fn of(capabilities: &Capabilities, entries: usize) -> Self {
        if capabilities.limits.resource_management {
            return Self(None);
        }
        let notice_entries = notice_entries(capabilities, entries);
        let entries = (notice_entries / MAX_RINGS_BOTH_WAYS)
            .clamp(*QUOTA_ENTRIES.start(), *QUOTA_ENTRIES.end());
        let all = notice_entries / entries;
        Self(Some(QuotaPool { left: Arc::new(AtomicU64::new(all)), all, entries }))
    }

    /// Notices arrive in another queue, too: its entries bound the number of quotas. To be called
    /// before any ring takes a quota.
    pub(super) fn limit(&mut self, capabilities: &Capabilities, entries: usize) {
        if let Some(quotas) = &mut self.0 {
            quotas.all = quotas.all.min(notice_entries(capabilities, entries) / quotas.entries);
            quotas.left.fetch_min(quotas.all, Ordering::Relaxed);
        }
    }

    /// Is a quota free, or none needed?
    pub(super) fn has_free_quota(&self) -> bool {
        self.0.as_ref().is_none_or(|quotas| quotas.left.load(Ordering::Relaxed) > 0)
    }

    /// A quota for a ring in this notify mode with at most `max_chunks` chunks.
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
            return Err(Error::new(ErrorKind::ResourceExhausted, "open ring", detail));
        }
        // One entry is for the end notice.
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
