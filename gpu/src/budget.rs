//! The upper limit of device memory for this process.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, ErrorKind, Result};

/// The charged device memory, and the limit.
#[derive(Debug)]
pub(crate) struct Budget {
    limit: AtomicU64,
    used: AtomicU64,
}

impl Budget {
    pub(crate) fn new(limit: u64) -> Self {
        Self { limit: AtomicU64::new(limit), used: AtomicU64::new(0) }
    }

    pub(crate) fn limit(&self) -> u64 {
        self.limit.load(Ordering::Relaxed)
    }

    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    pub(crate) fn set_limit(&self, limit: u64) {
        self.limit.store(limit, Ordering::Relaxed);
    }

    /// Charges this many bytes, or refuses with the numbers.
    pub(crate) fn charge(&self, operation: &'static str, length: u64) -> Result<()> {
        let limit = self.limit();
        let charged = |used: u64| used.checked_add(length).filter(|sum| *sum <= limit);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, charged).map(drop).map_err(
            |used| {
                let detail = format!(
                    "{length} bytes requested, {used} of the budget's {limit} in use, {} left",
                    limit.saturating_sub(used)
                );
                Error::new(operation, ErrorKind::OverBudget, detail)
            },
        )
    }

    pub(crate) fn give_back(&self, length: u64) {
        self.used.fetch_sub(length, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exceeding_the_budget_is_refused_with_numbers() {
        let budget = Budget::new(100);
        budget.charge("test", 60).unwrap();
        let error = budget.charge("test", 41).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OverBudget);
        let text = error.to_string();
        assert!(
            text.contains("41 bytes requested, 60 of the budget's 100 in use, 40 left"),
            "{text}"
        );
        assert!(budget.charge("test", u64::MAX).is_err(), "the sum must not wrap");
        budget.give_back(60);
        budget.charge("test", 100).unwrap();
        budget.set_limit(50);
        assert!(budget.charge("test", 1).is_err());
        assert_eq!((budget.used(), budget.limit()), (100, 50));
    }
}
