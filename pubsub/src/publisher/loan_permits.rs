//! Permits for loans: a publisher has a limited number of loans.

use std::time::Instant;

use super::stream_writes::STREAM_CHECK_INTERVAL;
use super::{LOAN_MEMORY, PublisherState};
use crate::error::{Error, ErrorKind, Result};
use crate::error_mapping::On;
use crate::loan_limit::{Borrower, LoanPermit, NoPermit};
use crate::pool::STREAM_POLL_BACKOFF;
use crate::text::counted;

impl PublisherState {
    fn too_many_loans(&self) -> Error {
        let detail = format!("this publisher already has its {} loans", self.loans.allowed());
        Error::new(LOAN_MEMORY, ErrorKind::TooManyLoans, detail).on(self.context.topic.name())
    }

    /// A permit for one more loan; None if one returns by itself.
    #[inline]
    pub(super) fn acquire_permit(&self, borrower: Borrower) -> Result<Option<LoanPermit<'_>>> {
        match self.loans.take(borrower) {
            Ok(permit) => Ok(Some(permit)),
            Err(NoPermit::TryAgain) => Ok(None),
            Err(NoPermit::AllTaken) => Err(self.too_many_loans()),
        }
    }

    /// A permit for one more loan, once one has returned by itself.
    #[cold]
    pub(super) fn acquire_permit_until(
        &self,
        borrower: Borrower,
        deadline: Instant,
    ) -> Result<LoanPermit<'_>> {
        let (node, local) = (&self.context.node, &self.context.local);
        let interruption = node.interruption();
        let mut backoff = STREAM_POLL_BACKOFF;
        loop {
            // A device that finishes with a dropped loan rings no doorbell.
            local.free_completed(&node.short_caller());
            let end = if local.has_pending_copies() {
                deadline.min(Instant::now() + backoff.next_pause())
            } else {
                backoff.reset();
                deadline.min(Instant::now() + STREAM_CHECK_INTERVAL)
            };
            let found = self.loans.wait(end, || {
                let found = self.acquire_permit(borrower).transpose();
                let check = || interruption.check(LOAN_MEMORY).on(self.context.topic.name());
                let ended = || self.check_open(LOAN_MEMORY).and_then(|()| check()).err();
                found.or_else(|| ended().map(Err))
            });
            self.check_open(LOAN_MEMORY)?;
            if let Some(permit) = found {
                return permit;
            }
            if end >= deadline {
                let allowed = counted(self.loans.allowed(), "loan");
                let detail = format!(
                    "pushing threads or device copies hold the last of this publisher's {allowed}"
                );
                return Err(self.timeout_error(LOAN_MEMORY, &detail));
            }
        }
    }
}
