//! What goes back to the driver only while no stream waits.
//!
//! A driver frees memory, and lets go of the host's, when everything has come to rest that was
//! begun before. A stream that waits for a word which another process writes keeps it from that
//! for as long as that process likes; if that one waits for this one, for ever. Meanwhile who
//! frees hangs in a call that has no deadline.
//!
//! So what is given back while a stream may wait is put aside. The next allocation of the same
//! length takes it as it is; the rest is freed by whoever allocates, frees or waits next, once
//! no stream waits.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};

use crate::device::Inner;
use crate::driver::{self, DeviceDriver, StreamDriver};
use crate::error::Result;
use crate::memory::HostMapping;
use crate::name::Implementation;

/// Held for reading while a wait is begun, for writing while something is freed because nobody
/// waits.
static GATE: RwLock<()> = RwLock::new(());

/// Streams of this process that have waited.
static WAITERS: Mutex<Vec<(Implementation, Weak<Waits>)>> = Mutex::new(Vec::new());

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a stream waits for, as far as it can be told without asking what it is.
#[derive(Debug)]
pub(crate) struct Waits {
    implementation: Implementation,
    stream: Weak<dyn StreamDriver>,
    /// How many were begun.
    begun: AtomicU64,
    /// How many are known to be over.
    over: AtomicU64,
    /// An event, and how many waits were begun before it.
    behind: Mutex<Option<(u64, Arc<driver::Event>)>>,
}

impl Waits {
    pub(crate) fn new(implementation: Implementation, stream: &Arc<dyn StreamDriver>) -> Arc<Self> {
        Arc::new(Self {
            implementation,
            stream: Arc::downgrade(stream),
            begun: AtomicU64::new(0),
            over: AtomicU64::new(0),
            behind: Mutex::default(),
        })
    }

    /// Begins a wait, while nothing is freed.
    pub(crate) fn begin(self: &Arc<Self>, begin: impl FnOnce() -> Result<()>) -> Result<()> {
        let _gate = GATE.read().unwrap_or_else(PoisonError::into_inner);
        if self.begun.fetch_add(1, Ordering::AcqRel) == 0 {
            let mut waiters = locked(&WAITERS);
            waiters.retain(|(_, waits)| waits.strong_count() > 0);
            waiters.push((self.implementation, Arc::downgrade(self)));
        }
        begin()
    }

    /// An event was recorded behind all that was begun so far, under the lock of the stream.
    pub(crate) fn mark(&self, event: &Arc<driver::Event>) {
        let begun = self.begun.load(Ordering::Acquire);
        if begun == self.over.load(Ordering::Relaxed) {
            return;
        }
        let mut behind = locked(&self.behind);
        // The first one behind it tells as much, and tells it earlier.
        if behind.as_ref().is_none_or(|(before, _)| *before != begun) {
            *behind = Some((begun, Arc::clone(event)));
        }
    }

    /// Does it wait? No only if it surely does not: then it will not before a wait is begun.
    fn is_waiting(&self, driver: &dyn DeviceDriver) -> bool {
        let begun = self.begun.load(Ordering::Acquire);
        if begun == self.over.load(Ordering::Relaxed) {
            return false;
        }
        let mut behind = locked(&self.behind);
        let is_behind_all = |(before, event): &(u64, Arc<driver::Event>)| {
            // What has failed waits for nothing.
            *before == begun && driver.is_event_done(event).unwrap_or(true)
        };
        let is_over = behind.as_ref().is_some_and(is_behind_all)
            || self.stream.upgrade().is_none_or(|stream| stream.is_done().unwrap_or(true));
        if is_over {
            self.over.store(begun, Ordering::Relaxed);
            *behind = None;
        }
        !is_over
    }
}

fn somebody_waits(implementation: Implementation, driver: &dyn DeviceDriver) -> bool {
    let waiters: Vec<_> = locked(&WAITERS)
        .iter()
        .filter(|(of, _)| *of == implementation)
        .filter_map(|(_, waits)| waits.upgrade())
        .collect();
    waiters.iter().any(|waits| waits.is_waiting(driver))
}

/// What nobody uses any more.
#[derive(Debug)]
pub(crate) enum Leftover {
    /// What was allocated the plain way.
    Plain { address: u64, length: u64 },
    /// Memory of the host, registered, and what keeps it mapped.
    Host { address: u64, length: u64, _mapping: Box<dyn HostMapping> },
    /// Another process's memory, opened by these bytes. It may have users again by now.
    Legacy { bytes: [u8; 64] },
}

/// What a device was given back, and has not freed.
#[derive(Debug, Default)]
pub(crate) struct Leftovers {
    all: Mutex<Vec<Leftover>>,
    /// How many, to be seen without the lock.
    count: AtomicUsize,
}

impl Leftovers {
    /// Memory of this length, as it was given back.
    pub(crate) fn take_plain(&self, wanted: u64) -> Option<u64> {
        self.take(|leftover| match leftover {
            Leftover::Plain { address, length } if *length == wanted => Some(*address),
            _ => None,
        })
        .map(|(address, _)| address)
    }

    /// Is just this range of the host still registered? What kept it mapped so far is given
    /// back: it may go when the range is somebody's again.
    pub(crate) fn take_host(&self, range: (u64, u64)) -> Option<Leftover> {
        self.take(|leftover| match leftover {
            Leftover::Host { address, length, .. } if (*address, *length) == range => Some(()),
            _ => None,
        })
        .map(|((), leftover)| leftover)
    }

    fn take<T>(&self, is_wanted: impl Fn(&Leftover) -> Option<T>) -> Option<(T, Leftover)> {
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let mut all = locked(&self.all);
        let found = all.iter().enumerate().find_map(|(at, one)| Some((at, is_wanted(one)?)));
        let (at, found) = found?;
        let leftover = all.swap_remove(at);
        self.count.store(all.len(), Ordering::Release);
        Some((found, leftover))
    }
}

impl Inner {
    /// Frees something, now if no stream waits, or else later.
    pub(crate) fn give_back(&self, leftover: Leftover) {
        let mut all = locked(&self.leftovers.all);
        all.push(leftover);
        self.leftovers.count.store(all.len(), Ordering::Release);
        drop(all);
        self.free_leftovers();
    }

    /// Frees what was put aside, if no stream waits.
    pub(crate) fn free_leftovers(&self) {
        if self.leftovers.count.load(Ordering::Acquire) == 0 {
            return;
        }
        let gate = GATE.write().unwrap_or_else(PoisonError::into_inner);
        if somebody_waits(self.name.implementation, &*self.driver) {
            return;
        }
        let freed = {
            let mut all = locked(&self.leftovers.all);
            self.leftovers.count.store(0, Ordering::Release);
            std::mem::take(&mut *all)
        };
        for leftover in &freed {
            // A driver that cannot free has failed as a whole; there is nobody to tell here.
            let _ = match leftover {
                Leftover::Plain { address, length } => {
                    self.budget.give_back(*length);
                    // SAFETY: allocated so, and no slice, thus no operation, was left.
                    unsafe { self.driver.free(*address) }
                }
                // SAFETY: registered by us, and no operation was left.
                Leftover::Host { address, .. } => unsafe { self.driver.unregister(*address) },
                Leftover::Legacy { bytes } => {
                    // Closed under the table's lock: who opens it next finds it closed.
                    let mut table = locked(&self.legacy);
                    table.close(bytes).map_or(Ok(()), |address| {
                        // SAFETY: opened by us; no slice, thus no operation, is left.
                        unsafe { self.driver.legacy_close(address) }
                    })
                }
            };
        }
        drop(gate);
        // Mappings are dropped only now: whoever owns them may do anything then.
        drop(freed);
    }
}
