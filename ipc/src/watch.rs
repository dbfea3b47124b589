//! Waiting at many doorbells at once, for processes that wait for a file descriptor instead of
//! sleeping.
//!
//! A thread sleeps at the doorbells, and calls the listeners of one that was rung. It watches
//! each doorbell as long as there is a listener, but does not set the sleepers flag. A waiter
//! announces itself ([`Doorbell::announce_waiter`], and again each second, by its listener),
//! and then polls once more. So waiting costs no system call, and a ring costs none without
//! waiters.
//!
//! No ring is lost. A ring after an announcement increments the doorbell's count; the thread
//! compares it with the last value, and calls the listener after a change. A value that was stored
//! before an announcement is found by the poll after it. A later store sees the announcement, and
//! its ring follows, so the listener is called after the store. (`models/watch_model.rs` tries all
//! orders.)
//!
//! The kernel takes 128 words at a time. More doorbells need more threads; before Linux 5.16,
//! each doorbell needs one.

use std::fmt::Debug;
use std::io;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Acquire;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use threads::{ForkGeneration, lock};

use crate::doorbell::{Doorbell, MAX_SLEEP};
use crate::futex;
use crate::words::{LocalWords, Words};

/// A listener that is called when a doorbell was rung. It runs on the thread of a
/// [`DoorbellWatcher`], which serves others, too, so it must not block.
pub trait DoorbellListener: Debug + Send + Sync {
    /// The doorbell was rung.
    fn rung(&self);
    /// About a second has passed. A waiter announces itself again, and polls: a process that
    /// was about to ring may have been stopped.
    fn check(&self);
}

/// A doorbell on any kind of words.
trait AnyDoorbell: Debug + Send + Sync {
    fn count(&self) -> u64;
    fn word(&self) -> Option<&AtomicU64>;
    fn ring_unconditionally(&self);
}

impl<W: Words + Debug + Send + Sync> AnyDoorbell for Doorbell<W> {
    fn count(&self) -> u64 {
        self.count()
    }
    fn word(&self) -> Option<&AtomicU64> {
        self.word()
    }
    fn ring_unconditionally(&self) {
        self.ring_unconditionally();
    }
}

/// Threads that watch doorbells: none without listeners. A forked child has none of them, and
/// needs its own watcher.
///
/// ```
/// use std::sync::{Arc, mpsc};
/// use std::time::Duration;
/// use ipc::{Doorbell, Layout, DoorbellListener, Segment, DoorbellWatcher};
///
/// #[derive(Debug)]
/// struct ReportRings(mpsc::Sender<()>);
/// impl DoorbellListener for ReportRings {
///     fn rung(&self) {
///         let _ = self.0.send(());
///     }
///     fn check(&self) {}
/// }
///
/// // Other processes that map the segment can ring, too.
/// let segment = Segment::create(Layout::new("doorbell", 1), 64).unwrap();
/// let doorbell = Doorbell::new(segment.words()).unwrap();
/// let (sender, receiver) = mpsc::channel();
/// let watch = DoorbellWatcher::new();
/// let listening = watch.listen(doorbell.clone(), Arc::new(ReportRings(sender)))?;
/// doorbell.ring(); // no waiter: costs next to nothing
/// assert!(receiver.try_recv().is_err());
///
/// doorbell.announce_waiter(); // then the waiter polls once more
/// doorbell.ring();
/// receiver.recv_timeout(Duration::from_secs(10)).unwrap();
/// drop(listening); // the listener is not called any more
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct DoorbellWatcher {
    /// Doorbells of each thread.
    max: usize,
    groups: Mutex<Vec<Arc<WatcherThread>>>,
}

impl Default for DoorbellWatcher {
    fn default() -> Self {
        Self::new()
    }
}

/// The doorbells of one thread.
#[derive(Debug)]
struct WatcherThread {
    max: usize,
    state: Mutex<State>,
    /// Changed when the thread must read its list of doorbells again.
    control: LocalWords,
}

#[derive(Debug, Default)]
struct State {
    registrations: Vec<Registration>,
    next: u64,
    /// The thread has ended, or is about to.
    has_stopped: bool,
}

#[derive(Debug)]
struct Registration {
    number: u64,
    doorbell: Arc<dyn AnyDoorbell>,
    /// The doorbell's count at the last check.
    seen: u64,
    listener: Arc<dyn DoorbellListener>,
}

impl DoorbellWatcher {
    /// With as many doorbells for each thread as the kernel allows.
    #[must_use]
    pub fn new() -> Self {
        Self::with_max_doorbells(usize::MAX)
    }

    /// With at most this many doorbells for each thread: 1 is what old kernels support.
    #[must_use]
    pub fn with_max_doorbells(max: usize) -> Self {
        // One word belongs to the thread itself.
        let possible = if futex::supports_waitv() { futex::MAX_WORDS - 1 } else { 1 };
        Self { max: max.clamp(1, possible), groups: Mutex::default() }
    }

    /// Calls this listener after each ring from now on, until the returned object is dropped.
    ///
    /// # Errors
    /// `Unsupported` for words that the kernel cannot sleep on; the system's error, for example that
    /// no more threads can be created.
    pub fn listen<W>(
        &self,
        doorbell: Doorbell<W>,
        listener: Arc<dyn DoorbellListener>,
    ) -> io::Result<ListenerGuard>
    where
        W: Words + Debug + Send + Sync + 'static,
    {
        if doorbell.word().is_none() {
            let detail = "the kernel cannot sleep on these words";
            return Err(io::Error::new(io::ErrorKind::Unsupported, detail));
        }
        let seen = doorbell.count();
        let mut registration =
            Registration { number: 0, doorbell: Arc::new(doorbell), seen, listener };
        let fork_generation = ForkGeneration::current();
        let mut groups = lock(&self.groups);
        groups.retain(|group| !lock(&group.state).has_stopped);
        for group in groups.iter() {
            match group.add(registration) {
                Ok(number) => {
                    return Ok(ListenerGuard { group: Arc::clone(group), number, fork_generation });
                }
                Err(refused) => registration = refused,
            }
        }
        let state = State { registrations: vec![registration], next: 1, has_stopped: false };
        let control = LocalWords::zeroed(1);
        let group = Arc::new(WatcherThread { max: self.max, state: Mutex::new(state), control });
        threads::spawn("fabricast-watch", {
            let group = Arc::clone(&group);
            move || group.run()
        })?;
        groups.push(Arc::clone(&group));
        Ok(ListenerGuard { group, number: 0, fork_generation })
    }

    /// The number of threads.
    #[must_use]
    pub fn threads(&self) -> usize {
        let is_running = |group: &&Arc<WatcherThread>| !lock(&group.state).has_stopped;
        lock(&self.groups).iter().filter(is_running).count()
    }
}

impl WatcherThread {
    fn add(&self, mut registration: Registration) -> Result<u64, Registration> {
        let mut state = lock(&self.state);
        if state.has_stopped || state.registrations.len() >= self.max {
            return Err(registration);
        }
        let number = state.next;
        registration.number = number;
        state.next += 1;
        state.registrations.push(registration);
        drop(state);
        self.wake_thread();
        Ok(number)
    }

    /// After this returns, the listener is not called any more, and no reference to it is left
    /// here.
    fn remove(&self, number: u64) {
        let mut state = lock(&self.state);
        let found = state.registrations.iter().position(|known| known.number == number);
        let Some(at) = found else { return };
        let registration = state.registrations.swap_remove(at);
        state.has_stopped = state.registrations.is_empty();
        drop(state);
        if self.max == 1 {
            // The thread sleeps only at the doorbell. Other threads would wake for nothing.
            registration.doorbell.ring_unconditionally();
        } else {
            self.wake_thread();
        }
    }

    /// Makes the thread read its list again.
    fn wake_thread(&self) {
        self.control.fetch_add(0, 1);
        self.control.wake(0, 1);
    }

    fn run(&self) {
        let mut last_check = Instant::now();
        let mut waiters = Vec::new();
        loop {
            let called = {
                let mut state = lock(&self.state);
                if state.has_stopped {
                    return;
                }
                let is_time = last_check.elapsed() >= MAX_SLEEP;
                if is_time {
                    last_check = Instant::now();
                }
                for registration in &mut state.registrations {
                    let count = registration.doorbell.count();
                    if count != registration.seen {
                        registration.seen = count;
                        registration.listener.rung();
                    } else if is_time {
                        registration.listener.check();
                    }
                    waiters.push((Arc::clone(&registration.doorbell), count as u32));
                }
                // Callers change the list before they notify the thread.
                self.control.load(0, Acquire) as u32
            };
            self.sleep(called, &waiters);
            // Before it sleeps again: words without a listener must not stay mapped.
            waiters.clear();
        }
    }

    fn sleep(&self, called: u32, waiters: &[(Arc<dyn AnyDoorbell>, u32)]) {
        let mut words =
            waiters.iter().filter_map(|(doorbell, count)| Some((doorbell.word()?, *count)));
        if self.max == 1 {
            if let Some((word, count)) = words.next() {
                futex::sleep(word, count, MAX_SLEEP);
            }
            return;
        }
        let called = self.control.word(0).map(|word| (word, called));
        if futex::wait_any(called.into_iter().chain(words), MAX_SLEEP).is_err() {
            // The kernel has no memory for it: until then, rings are detected a little later.
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// A listener at a doorbell. After it is dropped, nothing is reported any more; the thread ends
/// with the last one.
#[derive(Debug)]
#[must_use = "dropping it ends the registration"]
pub struct ListenerGuard {
    group: Arc<WatcherThread>,
    number: u64,
    fork_generation: ForkGeneration,
}

impl Drop for ListenerGuard {
    fn drop(&mut self) {
        // A forked child has no such thread, and no thread that would release the lock.
        if self.fork_generation.is_current() {
            self.group.remove(self.number);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
