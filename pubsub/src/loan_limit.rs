//! Limits the loans of a publisher.
//!
//! Counted in its process, by one word that no other process writes. After a death the service
//! reclaims the loans together with the publisher.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};
use std::time::Instant;

use ipc::{Doorbell, LocalWords, WaitStrategy};

/// Holder of a loan. Its number is one such loan in the count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub(crate) enum Borrower {
    /// A caller, which alone decides when it returns the loan.
    Caller = 1,
    /// A call that copies a message and publishes it, or a device that still writes to a dropped
    /// loan: it returns the loan by itself.
    Transient = 1 << TRANSIENT_SHIFT,
}

/// Why no permit is available.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoPermit {
    /// Callers hold all of them: waiting is useless if this caller is the holder.
    AllTaken,
    /// A transient loan returns by itself.
    TryAgain,
}

/// First bit of the count of transient loans; the count of callers is below.
const TRANSIENT_SHIFT: u32 = 31;
const CALLER_MASK: u64 = (1 << TRANSIENT_SHIFT) - 1;
/// A thread waits for a permit.
const HAS_WAITERS: u64 = 1 << 63;

#[derive(Debug)]
pub(crate) struct LoanLimit {
    allowed: u64,
    count: AtomicU64,
    bell: Doorbell<LocalWords>,
}

/// The right to one loan; returned when it is dropped.
#[derive(Debug)]
pub(crate) struct LoanPermit<'a> {
    loans: &'a LoanLimit,
    borrower: Borrower,
}

impl LoanPermit<'_> {
    /// The holder of the loan [returns it](LoanLimit::give_back).
    #[inline]
    pub(crate) fn detach(self) {
        std::mem::forget(self);
    }
}

impl Drop for LoanPermit<'_> {
    fn drop(&mut self) {
        self.loans.give_back(self.borrower);
    }
}

impl LoanLimit {
    pub(crate) fn new(allowed: u32) -> Self {
        let bell = Doorbell::in_this_process();
        Self { allowed: u64::from(allowed), count: AtomicU64::new(0), bell }
    }

    pub(crate) fn allowed(&self) -> u64 {
        self.allowed
    }

    #[inline]
    pub(crate) fn take(&self, borrower: Borrower) -> Result<LoanPermit<'_>, NoPermit> {
        let more = |count: u64| {
            let (callers, transient) =
                (count & CALLER_MASK, (count & !HAS_WAITERS) >> TRANSIENT_SHIFT);
            (callers + transient < self.allowed).then(|| count + borrower as u64)
        };
        match self.count.fetch_update(AcqRel, Relaxed, more) {
            Ok(_) => Ok(LoanPermit { loans: self, borrower }),
            Err(count) if count & CALLER_MASK >= self.allowed => Err(NoPermit::AllTaken),
            Err(_) => Err(NoPermit::TryAgain),
        }
    }

    /// Tries after each returned loan, until `attempt` finds a result; None after the deadline.
    pub(crate) fn wait<T>(
        &self,
        deadline: Instant,
        mut attempt: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        self.bell.wait(&mut WaitStrategy::Block, deadline, || {
            // First: either the attempt sees a loan that returns now, or its holder sees this mark.
            self.count.fetch_or(HAS_WAITERS, AcqRel);
            attempt()
        })
    }

    /// A dropped loan of a caller returns by itself from now on.
    pub(crate) fn make_transient(&self, borrower: Borrower) {
        let more = (Borrower::Transient as u64).wrapping_sub(borrower as u64);
        self.count.fetch_add(more, AcqRel);
    }

    #[inline]
    pub(crate) fn give_back(&self, borrower: Borrower) {
        let before = self.count.fetch_sub(borrower as u64, AcqRel);
        if before & HAS_WAITERS != 0 {
            self.wake();
        }
    }

    /// Lets waiting threads look again.
    #[cold]
    pub(crate) fn wake(&self) {
        // Threads that find nothing set the mark again.
        self.count.fetch_and(!HAS_WAITERS, AcqRel);
        self.bell.ring();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const TEST_TIMEOUT: Duration = Duration::from_secs(60);

    fn take_until(
        loans: &LoanLimit,
        borrower: Borrower,
        end: Instant,
    ) -> Result<LoanPermit<'_>, NoPermit> {
        let attempt = || match loans.take(borrower) {
            Err(NoPermit::TryAgain) => None,
            other => Some(other),
        };
        loans.wait(end, attempt).unwrap_or(Err(NoPermit::TryAgain))
    }

    fn count(loans: &LoanLimit) -> u64 {
        loans.count.load(Relaxed) & !HAS_WAITERS
    }

    #[test]
    fn permits_stay_within_the_limit_and_return_once() {
        let loans = LoanLimit::new(3);
        let callers =
            [loans.take(Borrower::Caller).unwrap(), loans.take(Borrower::Caller).unwrap()];
        let transient = loans.take(Borrower::Transient).unwrap();
        for borrower in [Borrower::Caller, Borrower::Transient] {
            assert_eq!(loans.take(borrower).unwrap_err(), NoPermit::TryAgain);
        }
        drop(transient);
        let third = loans.take(Borrower::Caller).unwrap();
        for borrower in [Borrower::Caller, Borrower::Transient] {
            assert_eq!(loans.take(borrower).unwrap_err(), NoPermit::AllTaken);
        }
        third.detach();
        drop(callers);
        assert_eq!(count(&loans), 1);
        loans.give_back(Borrower::Caller);
        assert_eq!(count(&loans), 0);
    }

    #[test]
    fn transient_loan_returns_by_itself() {
        let loans = LoanLimit::new(1);
        for borrower in [Borrower::Caller, Borrower::Transient] {
            loans.take(borrower).unwrap().detach();
            loans.make_transient(borrower);
            assert_eq!(loans.take(Borrower::Caller).unwrap_err(), NoPermit::TryAgain);
            loans.give_back(Borrower::Transient);
            assert_eq!(count(&loans), 0);
        }
    }

    #[test]
    fn wait_ends_when_a_transient_loan_returns() {
        let loans = LoanLimit::new(1);
        let transient = loans.take(Borrower::Transient).unwrap();
        let soon = Instant::now() + Duration::from_millis(5);
        let refused = take_until(&loans, Borrower::Transient, soon);
        assert_eq!(refused.unwrap_err(), NoPermit::TryAgain);
        std::thread::scope(|scope| {
            let (end, loans) = (Instant::now() + TEST_TIMEOUT, &loans);
            let wait = move || drop(take_until(loans, Borrower::Transient, end).unwrap());
            let waiting = [scope.spawn(wait), scope.spawn(wait)];
            std::thread::sleep(Duration::from_millis(5));
            drop(transient);
            for thread in waiting {
                thread.join().unwrap();
            }
        });
        assert_eq!(count(&loans), 0);
    }

    #[test]
    fn many_pushing_threads_all_get_permits() {
        let loans = LoanLimit::new(2);
        let most = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let end = Instant::now() + TEST_TIMEOUT;
                        let permit = take_until(&loans, Borrower::Transient, end).unwrap();
                        most.fetch_max(count(&loans) >> TRANSIENT_SHIFT, Relaxed);
                        std::thread::yield_now();
                        drop(permit);
                    }
                });
            }
        });
        assert!((1..=2).contains(&most.into_inner()));
        assert_eq!(count(&loans), 0);
    }
}
