//! Values that a thread drops later: once nothing uses them any more.

use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::{lock, spawn};

/// A value of a [`DeferredDrop`].
pub trait DeferredValue: Send + Sized + 'static {
    /// Name of the thread.
    const THREAD_NAME: &'static str;
    /// Pause between two checks of all values.
    const CHECK_INTERVAL: Duration;

    /// Is the value unused from now on?
    fn is_unused(&mut self) -> bool;

    /// Ends an unused value, on the thread. It may wait, and delays the values after it.
    fn end(self) {}
}

/// Values that a thread ends once they are unused, so that no caller waits for that.
///
/// The thread starts with the first value and ends with the last one, also after this object was
/// dropped. Values for which no thread could be started are dropped with this object, and not
/// [ended](DeferredValue::end). A forked child has no thread: there the values of its parent stay.
///
/// ```
/// use std::sync::atomic::{AtomicBool, Ordering};
/// use std::sync::{Arc, mpsc};
/// use std::time::Duration;
/// use threads::{DeferredDrop, DeferredValue};
///
/// struct Mapping {
///     is_unused: Arc<AtomicBool>,
///     unmapped: mpsc::Sender<()>,
/// }
///
/// impl DeferredValue for Mapping {
///     const THREAD_NAME: &'static str = "example-unmap";
///     const CHECK_INTERVAL: Duration = Duration::from_millis(1);
///
///     fn is_unused(&mut self) -> bool {
///         self.is_unused.load(Ordering::Acquire)
///     }
///
///     fn end(self) {
///         self.unmapped.send(()).unwrap();
///     }
/// }
///
/// let (unmapped, is_unmapped) = mpsc::channel();
/// let is_unused = Arc::new(AtomicBool::new(false));
/// let mappings = DeferredDrop::default();
/// mappings.push(Mapping { is_unused: Arc::clone(&is_unused), unmapped })?;
/// assert!(is_unmapped.try_recv().is_err());
/// is_unused.store(true, Ordering::Release);
/// is_unmapped.recv().unwrap();
/// # Ok::<(), std::io::Error>(())
/// ```
pub struct DeferredDrop<T>(Arc<Mutex<Values<T>>>);

struct Values<T> {
    all: Vec<T>,
    has_thread: bool,
}

impl<T> Default for DeferredDrop<T> {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Values { all: Vec::new(), has_thread: false })))
    }
}

impl<T> fmt::Debug for DeferredDrop<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeferredDrop").finish_non_exhaustive()
    }
}

impl<T: DeferredValue> DeferredDrop<T> {
    /// Adds a value, and starts the thread if there is none.
    ///
    /// # Errors
    /// Those of the system: too many threads. The value is kept; the next one tries again.
    pub fn push(&self, value: T) -> io::Result<()> {
        let mut values = lock(&self.0);
        values.all.push(value);
        if !values.has_thread {
            let shared = Arc::clone(&self.0);
            spawn(T::THREAD_NAME, move || while end_unused(&shared) {})?;
            values.has_thread = true;
        }
        Ok(())
    }

    /// Changes the values, which are in the order in which they were added.
    pub fn update<R>(&self, change: impl FnOnce(&mut Vec<T>) -> R) -> R {
        change(&mut lock(&self.0).all)
    }
}

/// Waits for an interval, and ends unused values. False if none is left.
fn end_unused<T: DeferredValue>(shared: &Mutex<Values<T>>) -> bool {
    std::thread::sleep(T::CHECK_INTERVAL);
    let mut values = lock(shared);
    let unused: Vec<_> = values.all.extract_if(.., T::is_unused).collect();
    let has_more = !values.all.is_empty();
    values.has_thread = has_more;
    drop(values);
    for value in unused {
        // A panic must not keep the others; it was printed.
        let _ = catch_unwind(AssertUnwindSafe(|| value.end()));
    }
    has_more
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::{Sender, channel};

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(20);
    const PANICS: usize = 1;

    struct Value {
        number: usize,
        is_unused: Arc<AtomicBool>,
        ended: Sender<(usize, Option<String>)>,
    }

    impl DeferredValue for Value {
        const THREAD_NAME: &'static str = "deferred";
        const CHECK_INTERVAL: Duration = Duration::from_millis(1);

        fn is_unused(&mut self) -> bool {
            self.is_unused.load(Ordering::Acquire)
        }

        fn end(self) {
            let thread = std::thread::current().name().map(str::to_owned);
            self.ended.send((self.number, thread)).unwrap();
            assert_ne!(self.number, PANICS, "requested by a test");
        }
    }

    #[test]
    fn values_end_once_unused_also_after_a_panic() {
        let ((ended, ends), deferred) = (channel(), DeferredDrop::default());
        let is_unused: [Arc<AtomicBool>; 3] = Default::default();
        for (number, is_unused) in is_unused.iter().enumerate() {
            let (is_unused, ended) = (Arc::clone(is_unused), ended.clone());
            deferred.push(Value { number, is_unused, ended }).unwrap();
        }
        let next = || ends.recv_timeout(TIMEOUT).unwrap();
        for number in [PANICS, 0] {
            is_unused[number].store(true, Ordering::Release);
            assert_eq!(next(), (number, Some("deferred".to_owned())));
        }
        // The thread has the last one.
        drop(deferred);
        is_unused[2].store(true, Ordering::Release);
        assert_eq!(next().0, 2);
    }

    #[test]
    fn thread_starts_again_after_its_last_value() {
        let ((ended, ends), deferred) = (channel(), DeferredDrop::default());
        for number in [0, 2, 3] {
            let (is_unused, ended) = (Arc::new(AtomicBool::new(true)), ended.clone());
            deferred.push(Value { number, is_unused, ended }).unwrap();
            assert_eq!(ends.recv_timeout(TIMEOUT).unwrap().0, number);
        }
    }

    #[test]
    fn values_taken_back_are_not_ended() {
        let ((ended, ends), deferred) = (channel(), DeferredDrop::default());
        let is_unused = Arc::new(AtomicBool::new(false));
        deferred.push(Value { number: 0, is_unused: Arc::clone(&is_unused), ended }).unwrap();
        let taken = deferred.update(std::mem::take);
        is_unused.store(true, Ordering::Release);
        assert_eq!(taken.len(), 1);
        drop(taken);
        // Nothing was sent: the sender was dropped with the value.
        assert!(ends.recv_timeout(TIMEOUT).is_err());
    }
}
