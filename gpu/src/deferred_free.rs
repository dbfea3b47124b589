//! What goes back to the driver only while no stream waits.
//!
//! A driver frees memory, and lets go of the host's, when everything has come to rest that was
//! begun before. A stream that waits for a word which another process writes keeps it from that
//! for as long as that process likes; if that one waits for this one, for ever. Meanwhile who
//! frees hangs in a call that has no deadline.
//!
//! So what is given back while a stream may wait is put aside. The next allocation of the same
//! length takes it as it is; the rest is freed by whoever allocates, frees, marks a point of a
//! stream or synchronizes one, once no stream waits.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockWriteGuard, TryLockError, Weak,
};

use crate::device::DeviceInner;
use crate::device_name::Implementation;
use crate::driver::{self, StreamDriver};
use crate::error::{Result, is_over};
use crate::fork::ForkGeneration;
use crate::memory::HostMapping;

/// Held for reading while a wait is begun, for writing while something is freed because nobody
/// waits.
static GATE: RwLock<()> = RwLock::new(());

thread_local! {
    /// Does this thread hold the gate for freeing?
    static IS_FREEING: Cell<bool> = const { Cell::new(false) };
}

/// The gate, held for freeing.
struct FreeGuard(#[allow(dead_code, reason = "held")] RwLockWriteGuard<'static, ()>);

impl FreeGuard {
    /// None if this thread is at it already: what it frees has let go of something else.
    fn begin() -> Option<Self> {
        (!IS_FREEING.get()).then(|| Self::by(GATE.write().unwrap_or_else(PoisonError::into_inner)))
    }

    /// None also if somebody else is, or just begins to wait.
    fn try_begin() -> Option<Self> {
        match GATE.try_write() {
            Ok(gate) => Some(Self::by(gate)),
            Err(TryLockError::Poisoned(poisoned)) => Some(Self::by(poisoned.into_inner())),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    fn by(gate: RwLockWriteGuard<'static, ()>) -> Self {
        IS_FREEING.set(true);
        Self(gate)
    }
}

impl Drop for FreeGuard {
    fn drop(&mut self) {
        IS_FREEING.set(false);
    }
}

/// Streams of this process that have waited. Of all its devices: memory that several reach is
/// freed, and the host's let go of, when all of them rest.
static WAITING_STREAMS: Mutex<Vec<Weak<StreamWaits>>> = Mutex::new(Vec::new());

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a stream waits for, as far as it can be told without asking what it is.
#[derive(Debug)]
pub(crate) struct StreamWaits {
    implementation: Implementation,
    /// None if others made it: it is asked about nothing, since they may destroy it.
    stream: Option<Weak<dyn StreamDriver>>,
    /// Those of a parent process are not waited for here.
    fork_generation: ForkGeneration,
    is_known: AtomicBool,
    /// How many were begun.
    begun: AtomicU64,
    /// How many are known to be over.
    finished: AtomicU64,
    /// An event, and how many waits were begun before it.
    marker: Mutex<Option<(u64, Arc<driver::Event>)>>,
}

impl StreamWaits {
    pub(crate) fn new(
        implementation: Implementation,
        stream: Option<&Arc<dyn StreamDriver>>,
    ) -> Arc<Self> {
        Arc::new(Self {
            implementation,
            stream: stream.map(Arc::downgrade),
            fork_generation: ForkGeneration::now(),
            is_known: AtomicBool::new(false),
            begun: AtomicU64::new(0),
            finished: AtomicU64::new(0),
            marker: Mutex::default(),
        })
    }

    /// Begins a wait, while nothing is freed.
    pub(crate) fn begin(self: &Arc<Self>, begin: impl FnOnce() -> Result<()>) -> Result<()> {
        let _gate = GATE.read().unwrap_or_else(PoisonError::into_inner);
        if !self.is_known.swap(true, Ordering::AcqRel) {
            let mut waiters = locked(&WAITING_STREAMS);
            waiters.retain(|waits| {
                waits.upgrade().is_some_and(|waits| waits.fork_generation.is_current())
            });
            waiters.push(Arc::downgrade(self));
        }
        // Before it is: until an event behind it is reached nobody knows better.
        self.begun.fetch_add(1, Ordering::AcqRel);
        begin()
    }

    /// An event was recorded behind all that was begun so far, under the lock of the stream.
    pub(crate) fn mark(&self, event: &Arc<driver::Event>) {
        let begun = self.begun.load(Ordering::Acquire);
        if begun == self.finished.load(Ordering::Relaxed) {
            return;
        }
        let mut marker = locked(&self.marker);
        // The first one behind it tells as much, and tells it earlier.
        if marker.as_ref().is_none_or(|(before, _)| *before != begun) {
            *marker = Some((begun, Arc::clone(event)));
        }
    }

    /// Was a wait begun that is not known to be over?
    pub(crate) fn is_open(&self) -> bool {
        self.begun.load(Ordering::Acquire) != self.finished.load(Ordering::Relaxed)
    }

    /// Does it wait? No only if it surely does not: then it will not before a wait is begun.
    fn is_waiting(&self) -> bool {
        if !self.fork_generation.is_current() || !self.is_open() {
            return false;
        }
        let begun = self.begun.load(Ordering::Acquire);
        // Asked without the lock: what is let go of meanwhile may ask the same.
        let marker = locked(&self.marker).clone();
        let is_reached = match marker {
            Some((before, event)) if before == begun => is_known_over(event.is_done()),
            _ => false,
        };
        let has_ended = || match &self.stream {
            Some(stream) => stream.upgrade().is_none_or(|stream| is_known_over(stream.is_done())),
            None => false,
        };
        let is_over = is_reached || has_ended();
        if is_over {
            self.finished.store(begun, Ordering::Relaxed);
            let mut marker = locked(&self.marker);
            if marker.as_ref().is_some_and(|(before, _)| *before == begun) {
                *marker = None;
            }
        }
        !is_over
    }
}

/// A device that has failed waits for nothing. All other errors tell nothing, such as that of a
/// stream that is being captured.
fn is_known_over(asked: Result<bool>) -> bool {
    asked.unwrap_or_else(|error| is_over(&error))
}

/// Does something that would wait for them, if no stream waits and none begins to meanwhile.
pub(crate) fn if_no_stream_waits(implementation: Implementation, free: impl FnOnce()) -> bool {
    let Some(_gate) = FreeGuard::begin() else { return false };
    let nobody_waits = !any_stream_waits(implementation);
    if nobody_waits {
        free();
    }
    nobody_waits
}

/// Does a stream of this process wait?
pub(crate) fn any_stream_waits(implementation: Implementation) -> bool {
    let waiters: Vec<_> = locked(&WAITING_STREAMS).iter().filter_map(Weak::upgrade).collect();
    let mut waiters = waiters.iter().filter(|waits| waits.implementation == implementation);
    waiters.any(|waits| waits.is_waiting())
}

/// What nobody uses any more.
#[derive(Debug)]
pub(crate) enum DeferredFree {
    /// What was allocated the plain way, and whether nobody else can have opened it.
    Plain { address: u64, length: u64, is_private: bool },
    /// Memory of the host, registered, and what keeps it mapped.
    Host { address: u64, length: u64, _mapping: Box<dyn HostMapping> },
    /// Another process's memory, opened by these bytes. It may have users again by now.
    Legacy { bytes: [u8; 64] },
}

/// What a device was given back, and has not freed.
#[derive(Debug, Default)]
pub(crate) struct DeferredFrees {
    all: Mutex<Vec<DeferredFree>>,
    /// How many there are, and are being freed, to be seen without the lock.
    count: AtomicUsize,
}

impl DeferredFrees {
    /// Memory of this length, as it was given back.
    pub(crate) fn take_plain(&self, wanted: u64) -> Option<u64> {
        self.take(|deferred_free| match deferred_free {
            DeferredFree::Plain { address, length, is_private: true } if *length == wanted => {
                Some(*address)
            }
            _ => None,
        })
        .map(|(address, _)| address)
    }

    /// Is just this range of the host still registered? What kept it mapped so far is given
    /// back: it may go when the range is somebody's again.
    pub(crate) fn take_host(&self, range: (u64, u64)) -> Option<DeferredFree> {
        self.take(|deferred_free| match deferred_free {
            DeferredFree::Host { address, length, .. } if (*address, *length) == range => Some(()),
            _ => None,
        })
        .map(|((), deferred_free)| deferred_free)
    }

    fn take<T>(&self, is_wanted: impl Fn(&DeferredFree) -> Option<T>) -> Option<(T, DeferredFree)> {
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let mut all = locked(&self.all);
        let found = all.iter().enumerate().find_map(|(at, one)| Some((at, is_wanted(one)?)));
        let (at, found) = found?;
        let deferred_free = all.swap_remove(at);
        self.count.fetch_sub(1, Ordering::AcqRel);
        Some((found, deferred_free))
    }
}

impl DeviceInner {
    /// Frees something, now if no stream waits, or else later.
    pub(crate) fn give_back(&self, deferred_free: DeferredFree) {
        self.deferred_frees.count.fetch_add(1, Ordering::AcqRel);
        locked(&self.deferred_frees.all).push(deferred_free);
        self.free_deferred();
    }

    /// Frees what was put aside, if no stream waits. Then nothing is left of what was given back
    /// before, by any thread.
    pub(crate) fn free_deferred(&self) {
        if self.deferred_frees.count.load(Ordering::Acquire) > 0
            && let Some(gate) = FreeGuard::begin()
        {
            self.free_all(gate);
        }
    }

    /// The same, unless somebody is at it, or just begins to wait.
    pub(crate) fn try_free_deferred(&self) {
        if self.deferred_frees.count.load(Ordering::Acquire) > 0
            && let Some(gate) = FreeGuard::try_begin()
        {
            self.free_all(gate);
        }
    }

    fn free_all(&self, gate: FreeGuard) {
        if any_stream_waits(self.name.implementation) {
            return;
        }
        loop {
            let freed = std::mem::take(&mut *locked(&self.deferred_frees.all));
            if freed.is_empty() {
                break;
            }
            freed.iter().for_each(|deferred_free| self.free(deferred_free));
            // Mappings as well while the gate is held, and counted until they are gone: another
            // thread's may be among them, which finds them gone when it has passed here. What their
            // owners let go of with them is freed in the next round.
            let count = freed.len();
            drop(freed);
            self.deferred_frees.count.fetch_sub(count, Ordering::AcqRel);
        }
        drop(gate);
    }

    /// While no stream waits.
    fn free(&self, deferred_free: &DeferredFree) {
        // A driver that cannot free has failed as a whole; there is nobody to tell here.
        let _ = match deferred_free {
            DeferredFree::Plain { address, length, .. } => {
                self.budget.give_back(*length);
                // SAFETY: allocated so, and no slice, thus no operation, was left.
                unsafe { self.driver.free(*address) }
            }
            // SAFETY: registered by us, and no operation was left.
            DeferredFree::Host { address, .. } => unsafe { self.driver.unregister(*address) },
            DeferredFree::Legacy { bytes } => {
                // Closed under the table's lock: who opens it next finds it closed.
                let mut table = locked(&self.legacy);
                table.close(bytes).map_or(Ok(()), |address| {
                    // SAFETY: opened by us; no slice, thus no operation, was left.
                    unsafe { self.driver.legacy_close(address) }
                })
            }
        };
    }
}
