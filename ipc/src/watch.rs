//! Waiting at many bells at once, for those that cannot sleep: they wait for a descriptor.
//!
//! A thread sleeps at the bells, and tells whoever listens there that one was rung. It is at
//! each of them from when somebody begins to listen, whether that one waits or not, and does not
//! say that somebody sleeps: who waits says so ([`Doorbell::announce_waiter`], and again each second, by
//! its listener), looks once more, and that is all. So waiting costs no call of the system, and a ring costs none as long
//! as nobody waits.
//!
//! Nothing is lost. A ring moves the bell's count; the thread compares it with the one that it
//! saw last, and tells the listener after it has seen another one. Whoever stored something
//! before an announcement is found by the look after it. Whoever stored it later sees the
//! announcement, and its ring comes after that, so the listener is told after that, too.
//! (`models/watch.rs` tries all orders of it.)
//!
//! The kernel takes 128 words at a time: of more bells there are more threads, and one for each
//! bell where it takes one only (before Linux 5.16).

use std::fmt::Debug;
use std::io;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Acquire;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::doorbell::{Doorbell, MAX_SLEEP};
use crate::futex;
use crate::pidfd::ForkGeneration;
use crate::words::{FutexWords, LocalWords, Words};

/// One who is told when a bell was rung. It is told by the thread of a [`DoorbellWatcher`], which serves
/// others, too: so it does not wait for anything.
pub trait DoorbellListener: Debug + Send + Sync {
    /// The bell was rung.
    fn rung(&self);
    /// Some time has passed, a second or so. One who waits announces itself again, and looks:
    /// whoever was about to ring may have been stopped before.
    fn look(&self);
}

/// A bell, whatever words it is made of.
trait AnyDoorbell: Debug + Send + Sync {
    fn count(&self) -> u64;
    fn word(&self) -> Option<&AtomicU64>;
    fn ring_unconditionally(&self);
}

impl<W: FutexWords + Debug + Send + Sync> AnyDoorbell for Doorbell<W> {
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

/// Threads at bells: none as long as nobody listens. A forked child has none of them, and makes
/// a watch of its own.
///
/// ```
/// use std::sync::{Arc, mpsc};
/// use std::time::Duration;
/// use ipc::{Doorbell, Layout, DoorbellListener, Segment, DoorbellWatcher};
///
/// #[derive(Debug)]
/// struct Teller(mpsc::Sender<()>);
/// impl DoorbellListener for Teller {
///     fn rung(&self) {
///         let _ = self.0.send(());
///     }
///     fn look(&self) {}
/// }
///
/// // Others that map the segment ring there, too.
/// let segment = Segment::create(Layout::new("a bell", 1), 64).unwrap();
/// let doorbell = Doorbell::new(segment.words()).unwrap();
/// let (sender, receiver) = mpsc::channel();
/// let watch = DoorbellWatcher::new();
/// let listening = watch.listen(doorbell.clone(), Arc::new(Teller(sender)))?;
/// doorbell.ring(); // nobody waits: next to nothing
/// assert!(receiver.try_recv().is_err());
///
/// doorbell.announce_waiter(); // and then one looks for what is waited for
/// doorbell.ring();
/// receiver.recv_timeout(Duration::from_secs(10)).unwrap();
/// drop(listening); // from here on nothing is told any more
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct DoorbellWatcher {
    /// Bells of each thread.
    max: usize,
    groups: Mutex<Vec<Arc<WatcherThread>>>,
}

impl Default for DoorbellWatcher {
    fn default() -> Self {
        Self::new()
    }
}

/// The bells of one thread.
#[derive(Debug)]
struct WatcherThread {
    max: usize,
    state: Mutex<State>,
    /// Moves when the thread has to look at its bells anew.
    control: LocalWords,
}

#[derive(Debug, Default)]
struct State {
    registrations: Vec<Registration>,
    next: u64,
    /// The thread has ended, or is about to.
    has_stopped: bool,
}

/// A bell, and who listens.
#[derive(Debug)]
struct Registration {
    number: u64,
    doorbell: Arc<dyn AnyDoorbell>,
    /// Its count when it was looked at last.
    seen: u64,
    listener: Arc<dyn DoorbellListener>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl DoorbellWatcher {
    /// With as many bells for each thread as the kernel allows.
    #[must_use]
    pub fn new() -> Self {
        // One word is the thread's own.
        Self::with_max_doorbells(if futex::supports_waitv() { futex::MAX_WORDS - 1 } else { 1 })
    }

    /// With no more bells for each thread than so many: with one, as where the kernel knows no
    /// better.
    #[must_use]
    pub fn with_max_doorbells(max: usize) -> Self {
        let possible = if futex::supports_waitv() { futex::MAX_WORDS - 1 } else { 1 };
        Self { max: max.clamp(1, possible), groups: Mutex::default() }
    }

    /// Tells this listener of each ring from now on, until what this gives is dropped.
    ///
    /// # Errors
    /// What the system says: that there can be no more threads.
    pub fn listen<W>(
        &self,
        doorbell: Doorbell<W>,
        listener: Arc<dyn DoorbellListener>,
    ) -> io::Result<ListenerGuard>
    where
        W: FutexWords + Debug + Send + Sync + 'static,
    {
        let seen = doorbell.count();
        let mut registration =
            Registration { number: 0, doorbell: Arc::new(doorbell), seen, listener };
        let fork_generation = ForkGeneration::current();
        let mut groups = locked(&self.groups);
        groups.retain(|group| !locked(&group.state).has_stopped);
        for group in groups.iter() {
            registration = match group.add(registration) {
                Ok(number) => {
                    return Ok(ListenerGuard { group: Arc::clone(group), number, fork_generation });
                }
                Err(registration) => registration,
            };
        }
        let state = State { registrations: vec![registration], next: 1, has_stopped: false };
        let control = LocalWords::zeroed(1);
        let group = Arc::new(WatcherThread { max: self.max, state: Mutex::new(state), control });
        let thread = std::thread::Builder::new().name("fabricast-watch".into());
        thread.spawn({
            let group = Arc::clone(&group);
            move || group.run()
        })?;
        groups.push(Arc::clone(&group));
        Ok(ListenerGuard { group, number: 0, fork_generation })
    }

    /// How many threads there are.
    #[must_use]
    pub fn threads(&self) -> usize {
        let has_stopped = |group: &&Arc<WatcherThread>| locked(&group.state).has_stopped;
        let groups = locked(&self.groups);
        groups.len() - groups.iter().filter(has_stopped).count()
    }
}

impl WatcherThread {
    fn add(&self, mut registration: Registration) -> Result<u64, Registration> {
        let mut state = locked(&self.state);
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

    /// Once this is done, nothing is told to its listener, and nobody here has it any more.
    fn remove(&self, number: u64) {
        let mut state = locked(&self.state);
        let Some(at) =
            state.registrations.iter().position(|registration| registration.number == number)
        else {
            return;
        };
        let registration = state.registrations.swap_remove(at);
        state.has_stopped = state.registrations.is_empty();
        drop(state);
        if self.max == 1 {
            // The bell is all that its thread sleeps at. Others wake for nothing.
            registration.doorbell.ring_unconditionally();
        } else {
            self.wake_thread();
        }
    }

    /// Has the thread look anew.
    fn wake_thread(&self) {
        self.control.fetch_add(0, 1);
        self.control.wake(0, 1);
    }

    fn run(&self) {
        let mut looked = Instant::now();
        let mut waiters = Vec::new();
        loop {
            let called = {
                let mut state = locked(&self.state);
                if state.has_stopped {
                    return;
                }
                let is_time = looked.elapsed() >= MAX_SLEEP;
                if is_time {
                    looked = Instant::now();
                }
                for registration in &mut state.registrations {
                    let count = registration.doorbell.count();
                    if count != registration.seen {
                        registration.seen = count;
                        registration.listener.rung();
                    } else if is_time {
                        registration.listener.look();
                    }
                    waiters.push((Arc::clone(&registration.doorbell), count as u32));
                }
                // Those who change something do so before they call.
                self.control.load(0, Acquire) as u32
            };
            self.sleep(called, &waiters);
            // Before it looks again: words that nobody listens at any more are not kept mapped.
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
            // The kernel has no memory for it: rings are heard a little later meanwhile.
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// One who listens at a bell. Once it is dropped, nothing is told any more; the thread ends with
/// the last one.
#[derive(Debug)]
#[must_use = "dropped, it does not listen any more"]
pub struct ListenerGuard {
    group: Arc<WatcherThread>,
    number: u64,
    fork_generation: ForkGeneration,
}

impl Drop for ListenerGuard {
    fn drop(&mut self) {
        // A forked child has neither the thread nor anybody who would let go of the lock.
        if self.fork_generation.is_current() {
            self.group.remove(self.number);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
