//! Who may borrow memory: a publisher has so many loans at once, and no more.

use std::time::Instant;

use super::ordered::LOOK_FOR_STREAMS;
use super::{BORROW, Post};
use crate::error::{Error, ErrorKind, Result};
use crate::loans::{Borrower, Refusal, Right};
use crate::pool::Rest;
use crate::text::counted;

impl Post {
    fn too_many_loans(&self) -> Error {
        let detail = format!("this publisher has the {} that it may have", self.loans.allowed());
        Error::new(BORROW, ErrorKind::TooManyLoans, detail).on(self.desk.topic.name())
    }

    /// The right to one loan more; None if there will be one again by itself.
    #[inline]
    pub(super) fn may_borrow(&self, borrower: Borrower) -> Result<Option<Right<'_>>> {
        match self.loans.take(borrower) {
            Ok(right) => Ok(Some(right)),
            Err(Refusal::NotYet) => Ok(None),
            Err(Refusal::AllAreLent) => Err(self.too_many_loans()),
        }
    }

    /// As [`may_borrow`](Self::may_borrow): devices may have done with what was given up.
    #[cold]
    pub(super) fn may_borrow_by_now(&self, borrower: Borrower) -> Result<Option<Right<'_>>> {
        self.desk.here.free_what_is_done(&self.desk.house.brief_caller());
        self.may_borrow(borrower)
    }

    /// The right to one loan more, when one has come back by itself.
    #[cold]
    pub(super) fn may_borrow_until(
        &self,
        borrower: Borrower,
        deadline: Instant,
    ) -> Result<Right<'_>> {
        let (house, here) = (&self.desk.house, &self.desk.here);
        let interruption = house.interruption();
        let mut rest = Rest::NEW;
        loop {
            // Devices that have done with what was given up ring no bell.
            here.free_what_is_done(&house.brief_caller());
            let end = if here.keeps_anything() {
                rest.next(deadline)
            } else {
                rest = Rest::NEW;
                deadline.min(Instant::now() + LOOK_FOR_STREAMS)
            };
            let found = self.loans.wait(end, || {
                let found = self.may_borrow(borrower).transpose();
                let interrupted = || interruption.check(BORROW).err();
                found.or_else(|| Some(Err(interrupted()?.on(self.desk.topic.name()))))
            });
            house.check(BORROW)?;
            if let Some(right) = found {
                return right;
            }
            if end >= deadline {
                let allowed = counted(self.loans.allowed(), "loan");
                let detail = format!(
                    "threads that push, or devices, have the last of this publisher's {allowed}"
                );
                return Err(self.too_late(BORROW, &detail));
            }
        }
    }
}
