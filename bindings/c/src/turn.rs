//! Things that one thread uses at a time, with a limit to how long the next one waits.

use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ipc::{Doorbell, Interruption, LocalWords, Spin};

use crate::failure::{Failure, Result};
use crate::layout::Timeout;
use crate::status::Status;

/// Something that one thread uses at a time.
#[derive(Debug)]
pub(crate) struct Turn<T> {
    /// None while somebody uses it.
    what: Mutex<Option<T>>,
    is_back: Doorbell<LocalWords>,
    is_over: AtomicBool,
}

impl<T> Turn<T> {
    pub(crate) fn new(what: T) -> Self {
        Self {
            what: Mutex::new(Some(what)),
            is_back: Doorbell::in_this_process(),
            is_over: AtomicBool::new(false),
        }
    }

    fn what(&self) -> MutexGuard<'_, Option<T>> {
        self.what.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for one's turn.
    pub(crate) fn take(&self, operation: &'static CStr, timeout: Timeout) -> Result<Taken<'_, T>> {
        let look = || match self.check(operation) {
            Ok(()) => self.what().take().map(Ok),
            Err(failure) => Some(Err(failure)),
        };
        let found = match (look(), timeout) {
            (None, Timeout::For(_) | Timeout::Forever) => {
                let interruption = Interruption::watch();
                self.is_back.wait(&mut Spin::Never, timeout.end(), || {
                    look().or_else(|| interruption.has_come().then(|| Err(interrupted(operation))))
                })
            }
            (found, _) => found,
        };
        match (found, timeout) {
            (Some(found), _) => Ok(Taken { what: Some(found?), turn: self }),
            (None, Timeout::Now) => Err(in_use(Status::WouldBlock, operation)),
            (None, _) => Err(in_use(Status::DeadlineExceeded, operation)),
        }
    }

    /// Uses it, when it is one's turn.
    pub(crate) fn with<R>(
        &self,
        operation: &'static CStr,
        timeout: Timeout,
        act: impl FnOnce(&mut T) -> Result<R>,
    ) -> Result<R> {
        let mut taken = self.take(operation, timeout)?;
        match &mut taken.what {
            Some(what) => act(what),
            None => Err(over(operation)),
        }
    }

    /// Its handle was closed: whoever waits for it, or in it, should give up.
    pub(crate) fn end(&self) {
        self.is_over.store(true, Ordering::Release);
        self.is_back.ring();
    }

    /// Fails once its handle was closed.
    pub(crate) fn check(&self, operation: &'static CStr) -> Result<()> {
        if self.is_over.load(Ordering::Acquire) {
            return Err(over(operation));
        }
        Ok(())
    }
}

fn in_use(status: Status, operation: &'static CStr) -> Failure {
    Failure::new(status, operation, "another thread is using it")
}

fn interrupted(operation: &'static CStr) -> Failure {
    let detail = "a signal handler ran in the waiting thread. Call again to go on";
    Failure::new(Status::Interrupted, operation, detail)
}

fn over(operation: &'static CStr) -> Failure {
    Failure::new(Status::Closed, operation, "another thread closed it meanwhile")
}

/// One's turn, as long as it is held. What is removed and not put back is nobody's any more.
#[derive(Debug)]
pub(crate) struct Taken<'a, T> {
    what: Option<T>,
    turn: &'a Turn<T>,
}

impl<T> Taken<'_, T> {
    pub(crate) fn remove(&mut self) -> Option<T> {
        self.what.take()
    }

    pub(crate) fn put_back(&mut self, what: T) {
        self.what = Some(what);
    }
}

impl<T> Drop for Taken<'_, T> {
    fn drop(&mut self) {
        if let Some(what) = self.what.take() {
            *self.turn.what() = Some(what);
            self.turn.is_back.ring();
        } else {
            self.turn.end();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    fn value(turn: &Turn<i32>, timeout: Timeout) -> Result<i32> {
        turn.with(c"test", timeout, |what| Ok(*what))
    }

    #[test]
    fn the_next_one_gets_it_back() {
        let turn = Turn::new(1);
        turn.with(c"test", Timeout::Now, |what| {
            *what = 2;
            Ok(())
        })
        .unwrap();
        assert_eq!(value(&turn, Timeout::Forever), Ok(2));
        let mut taken = turn.take(c"test", Timeout::Now).unwrap();
        assert_eq!(taken.remove(), Some(2));
        taken.put_back(3);
        drop(taken);
        assert_eq!(value(&turn, Timeout::Now), Ok(3));
    }

    #[test]
    fn who_will_not_wait_is_told_so() {
        let turn = Turn::new(1);
        let _taken = turn.take(c"test", Timeout::Now).unwrap();
        assert_eq!(value(&turn, Timeout::Now).unwrap_err().status, Status::WouldBlock);
        let short = Timeout::For(Duration::from_millis(1));
        assert_eq!(value(&turn, short).unwrap_err().status, Status::DeadlineExceeded);
    }

    #[test]
    fn who_waits_hears_of_its_end() {
        let turn = Arc::new(Turn::new(1));
        let taken = turn.take(c"test", Timeout::Now).unwrap();
        let (sender, receiver) = channel();
        let waiting = std::thread::spawn({
            let turn = Arc::clone(&turn);
            move || {
                sender.send(()).unwrap();
                value(&turn, Timeout::Forever)
            }
        });
        receiver.recv().unwrap();
        turn.end();
        assert_eq!(waiting.join().unwrap().unwrap_err().status, Status::Closed);
        drop(taken);
    }

    #[test]
    fn what_is_removed_is_nobodys_turn_any_more() {
        let turn = Turn::new(1);
        assert_eq!(turn.take(c"test", Timeout::Now).unwrap().remove(), Some(1));
        assert_eq!(value(&turn, Timeout::Now).unwrap_err().status, Status::Closed);
    }
}
