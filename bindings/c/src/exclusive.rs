//! Objects that one thread uses at a time, with a timeout of the next one's wait.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ipc::{Doorbell, Interruption, LocalWords, WaitStrategy};

use crate::failure::{Failure, Operation, Result};
use crate::status::Status;
use crate::timeout::Timeout;

#[derive(Debug)]
pub(crate) struct Exclusive<T> {
    /// None while a thread uses it.
    inner: Mutex<Option<T>>,
    returned: Doorbell<LocalWords>,
    is_closed: AtomicBool,
    /// Number of threads that wait for it.
    waiting: AtomicU32,
}

impl<T> Exclusive<T> {
    pub(crate) fn new(inner: T) -> Self {
        Self {
            inner: Mutex::new(Some(inner)),
            returned: Doorbell::in_this_process(),
            is_closed: AtomicBool::new(false),
            waiting: AtomicU32::new(0),
        }
    }

    fn inner(&self) -> MutexGuard<'_, Option<T>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for exclusive use.
    pub(crate) fn take(
        &self,
        operation: Operation,
        timeout: Timeout,
    ) -> Result<ExclusiveGuard<'_, T>> {
        let attempt = || match self.check(operation) {
            Ok(()) => self.inner().take().map(Ok),
            Err(failure) => Some(Err(failure)),
        };
        let inner = self.wait_for(operation, timeout, attempt)?;
        Ok(ExclusiveGuard { inner: Some(inner), exclusive: self })
    }

    /// Marks the handle as closed, waits until no thread uses the object any more, and removes it.
    /// After a failure it ends with the use of the other thread.
    pub(crate) fn end_and_remove(&self, operation: Operation, timeout: Timeout) -> Result<T> {
        self.end();
        self.wait_for(operation, timeout, || self.inner().take().map(Ok))
    }

    fn wait_for(
        &self,
        operation: Operation,
        timeout: Timeout,
        attempt: impl Fn() -> Option<Result<T>>,
    ) -> Result<T> {
        let found = match (attempt(), timeout) {
            (None, Timeout::For(_) | Timeout::Forever) => {
                let interruption = Interruption::watch();
                self.waiting.fetch_add(1, Ordering::Relaxed);
                let found = self.returned.wait(&mut WaitStrategy::Block, timeout.end(), || {
                    attempt()
                        .or_else(|| interruption.occurred().then(|| Err(interrupted(operation))))
                });
                self.waiting.fetch_sub(1, Ordering::Relaxed);
                found
            }
            (found, _) => found,
        };
        match (found, timeout) {
            (Some(found), _) => found,
            (None, Timeout::Now) => Err(in_use(Status::WouldBlock, operation)),
            (None, _) => Err(in_use(Status::DeadlineExceeded, operation)),
        }
    }

    /// Does another thread wait for the object?
    pub(crate) fn is_wanted(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }

    /// Runs a function with exclusive use.
    pub(crate) fn with<R>(
        &self,
        operation: Operation,
        timeout: Timeout,
        act: impl FnOnce(&mut T) -> Result<R>,
    ) -> Result<R> {
        let mut taken = self.take(operation, timeout)?;
        match &mut taken.inner {
            Some(inner) => act(inner),
            None => Err(closed(operation)),
        }
    }

    /// Marks the handle as closed: threads that wait for the object, or in it, give up.
    pub(crate) fn end(&self) {
        self.is_closed.store(true, Ordering::Release);
        self.returned.ring();
    }

    /// Fails if the handle was closed.
    pub(crate) fn check(&self, operation: Operation) -> Result<()> {
        if self.is_closed.load(Ordering::Acquire) {
            return Err(closed(operation));
        }
        Ok(())
    }
}

fn in_use(status: Status, operation: Operation) -> Failure {
    Failure::new(status, operation, "another thread is using the handle")
}

pub(crate) fn interrupted(operation: Operation) -> Failure {
    let detail = "a signal handler ran in the waiting thread. Call again to continue";
    Failure::new(Status::Interrupted, operation, detail)
}

fn closed(operation: Operation) -> Failure {
    Failure::new(Status::Closed, operation, "another thread closed the handle meanwhile")
}

/// Exclusive use, until dropped. An object that is removed and not put back is gone.
#[derive(Debug)]
pub(crate) struct ExclusiveGuard<'a, T> {
    inner: Option<T>,
    exclusive: &'a Exclusive<T>,
}

impl<T> ExclusiveGuard<'_, T> {
    pub(crate) fn remove(&mut self) -> Option<T> {
        self.inner.take()
    }

    pub(crate) fn put_back(&mut self, inner: T) {
        self.inner = Some(inner);
    }
}

impl<T> Drop for ExclusiveGuard<'_, T> {
    fn drop(&mut self) {
        if let Some(inner) = self.inner.take() {
            *self.exclusive.inner() = Some(inner);
            self.exclusive.returned.ring();
        } else {
            self.exclusive.end();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    fn value(exclusive: &Exclusive<i32>, timeout: Timeout) -> Result<i32> {
        exclusive.with(c"test", timeout, |inner| Ok(*inner))
    }

    #[test]
    fn object_is_returned_to_the_next_user() {
        let exclusive = Exclusive::new(1);
        exclusive
            .with(c"test", Timeout::Now, |inner| {
                *inner = 2;
                Ok(())
            })
            .unwrap();
        assert_eq!(value(&exclusive, Timeout::Forever), Ok(2));
        let mut taken = exclusive.take(c"test", Timeout::Now).unwrap();
        assert_eq!(taken.remove(), Some(2));
        taken.put_back(3);
        drop(taken);
        assert_eq!(value(&exclusive, Timeout::Now), Ok(3));
    }

    #[test]
    fn use_without_waiting_fails_while_in_use() {
        let exclusive = Exclusive::new(1);
        let _taken = exclusive.take(c"test", Timeout::Now).unwrap();
        assert_eq!(value(&exclusive, Timeout::Now).unwrap_err().status, Status::WouldBlock);
        let short = Timeout::For(Duration::from_millis(1));
        assert_eq!(value(&exclusive, short).unwrap_err().status, Status::DeadlineExceeded);
    }

    #[test]
    fn waiting_thread_is_woken_by_close() {
        let exclusive = Arc::new(Exclusive::new(1));
        let taken = exclusive.take(c"test", Timeout::Now).unwrap();
        let (sender, receiver) = channel();
        let waiting = std::thread::spawn({
            let exclusive = Arc::clone(&exclusive);
            move || {
                sender.send(()).unwrap();
                value(&exclusive, Timeout::Forever)
            }
        });
        receiver.recv().unwrap();
        exclusive.end();
        assert_eq!(waiting.join().unwrap().unwrap_err().status, Status::Closed);
        drop(taken);
    }

    #[test]
    fn closing_waits_for_the_thread_that_uses_the_object() {
        let exclusive = Arc::new(Exclusive::new(1));
        let taken = exclusive.take(c"test", Timeout::Now).unwrap();
        let refused = exclusive.end_and_remove(c"test", Timeout::Now).unwrap_err();
        assert_eq!(refused.status, Status::WouldBlock);
        let closing = std::thread::spawn({
            let exclusive = Arc::clone(&exclusive);
            move || exclusive.end_and_remove(c"test", Timeout::Forever)
        });
        while !exclusive.is_wanted() {
            std::thread::yield_now();
        }
        drop(taken);
        assert_eq!(closing.join().unwrap(), Ok(1));
        assert!(!exclusive.is_wanted());
        assert_eq!(value(&exclusive, Timeout::Now).unwrap_err().status, Status::Closed);
    }

    #[test]
    fn removed_object_is_no_longer_available() {
        let exclusive = Exclusive::new(1);
        assert_eq!(exclusive.take(c"test", Timeout::Now).unwrap().remove(), Some(1));
        assert_eq!(value(&exclusive, Timeout::Now).unwrap_err().status, Status::Closed);
    }
}
