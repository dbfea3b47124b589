//! How many loans a publisher has.
//!
//! Counted in its process, by one word that nobody else writes: what a process that died had
//! borrowed is freed when it is buried, and with it goes its publisher.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};
use std::time::Instant;

use ipc::{Doorbell, LocalWords, WaitStrategy};

/// Who has a loan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Borrower {
    /// A caller, who alone knows when it comes back.
    Caller,
    /// A call that copies a message and publishes it, or a device that is still to write to what was
    /// given up: it comes back by itself.
    Transient,
}

impl Borrower {
    /// One loan of this kind, in the count.
    const fn one(self) -> u64 {
        match self {
            Self::Caller => 1,
            Self::Transient => 1 << TRANSIENT_SHIFT,
        }
    }
}

/// Why there is none now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoPermit {
    /// Callers have all of them: no waiting brings one back, if it is this caller who has them.
    AllTaken,
    /// One comes back by itself.
    TryAgain,
}

/// Where the count of those begins that come back by themselves; that of callers is below.
const TRANSIENT_SHIFT: u32 = 31;
const CALLER_MASK: u64 = (1 << TRANSIENT_SHIFT) - 1;
/// Some thread waits for one.
const HAS_WAITERS: u64 = 1 << 63;

/// The loans of one publisher.
#[derive(Debug)]
pub(crate) struct LoanLimit {
    allowed: u64,
    count: AtomicU64,
    /// Wakes those that wait.
    bell: Doorbell<LocalWords>,
}

/// The right to one loan; given back when it is dropped.
#[derive(Debug)]
pub(crate) struct LoanPermit<'a> {
    loans: &'a LoanLimit,
    borrower: Borrower,
}

impl LoanPermit<'_> {
    /// Whoever has the loan [gives it back](Loans::give_back).
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

    /// One more, if there may be.
    #[inline]
    pub(crate) fn take(&self, borrower: Borrower) -> Result<LoanPermit<'_>, NoPermit> {
        let more = |count: u64| {
            let (callers, passing) =
                (count & CALLER_MASK, (count & !HAS_WAITERS) >> TRANSIENT_SHIFT);
            (callers + passing < self.allowed).then(|| count + borrower.one())
        };
        match self.count.fetch_update(AcqRel, Relaxed, more) {
            Ok(_) => Ok(LoanPermit { loans: self, borrower }),
            Err(count) if count & CALLER_MASK >= self.allowed => Err(NoPermit::AllTaken),
            Err(_) => Err(NoPermit::TryAgain),
        }
    }

    /// Looks again whenever one has come back, until something is found; None after the deadline.
    pub(crate) fn wait<T>(
        &self,
        deadline: Instant,
        mut look: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        self.bell.wait(&mut WaitStrategy::Block, deadline, || {
            // First: either what comes back is seen here, or who brings it sees this.
            self.count.fetch_or(HAS_WAITERS, AcqRel);
            look()
        })
    }

    /// A caller's is given up, and comes back by itself from now on.
    pub(crate) fn make_transient(&self, borrower: Borrower) {
        let more = Borrower::Transient.one().wrapping_sub(borrower.one());
        self.count.fetch_add(more, AcqRel);
    }

    /// One less.
    #[inline]
    pub(crate) fn give_back(&self, borrower: Borrower) {
        let before = self.count.fetch_sub(borrower.one(), AcqRel);
        if before & HAS_WAITERS != 0 {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        // Those that find nothing say again that they wait.
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
        let look = || match loans.take(borrower) {
            Err(NoPermit::TryAgain) => None,
            other => Some(other),
        };
        loans.wait(end, look).unwrap_or(Err(NoPermit::TryAgain))
    }

    fn count(loans: &LoanLimit) -> u64 {
        loans.count.load(Relaxed) & !HAS_WAITERS
    }

    #[test]
    fn there_are_no_more_than_are_allowed_and_each_comes_back_once() {
        let loans = LoanLimit::new(3);
        let callers =
            [loans.take(Borrower::Caller).unwrap(), loans.take(Borrower::Caller).unwrap()];
        let passing = loans.take(Borrower::Transient).unwrap();
        for borrower in [Borrower::Caller, Borrower::Transient] {
            assert_eq!(loans.take(borrower).unwrap_err(), NoPermit::TryAgain);
        }
        drop(passing);
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
    fn one_that_is_given_up_comes_back_by_itself() {
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
    fn one_that_another_thread_pushes_is_waited_for() {
        let loans = LoanLimit::new(1);
        let passing = loans.take(Borrower::Transient).unwrap();
        let soon = Instant::now() + Duration::from_millis(5);
        let refused = take_until(&loans, Borrower::Transient, soon);
        assert_eq!(refused.unwrap_err(), NoPermit::TryAgain);
        std::thread::scope(|scope| {
            let (end, loans) = (Instant::now() + TEST_TIMEOUT, &loans);
            let waits = move || drop(take_until(loans, Borrower::Transient, end).unwrap());
            let waiting = [scope.spawn(waits), scope.spawn(waits)];
            std::thread::sleep(Duration::from_millis(5));
            drop(passing);
            for thread in waiting {
                thread.join().unwrap();
            }
        });
        assert_eq!(count(&loans), 0);
    }

    #[test]
    fn many_threads_that_push_all_have_their_turn() {
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
