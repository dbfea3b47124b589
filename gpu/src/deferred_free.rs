//! Memory that can only be freed while no stream waits.
//!
//! A driver frees device memory, and unregisters host memory, only after all earlier operations
//! are done. A stream that waits for a word of another process can block that without a bound;
//! if the process waits for this one, for ever. The thread that frees would hang in a call
//! without a deadline.
//!
//! So memory that is released while a stream may wait is deferred. The next allocation of the
//! same length reuses it. The rest is freed once no stream waits, by the next thread that
//! allocates, frees, records a point of a stream or synchronizes one.
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

/// Read-locked while a wait starts, write-locked while memory is freed because no stream waits.
static GATE: RwLock<()> = RwLock::new(());

thread_local! {
    /// Does this thread hold the gate for freeing?
    static IS_FREEING: Cell<bool> = const { Cell::new(false) };
}

/// The gate, held for freeing.
struct FreeGuard(#[allow(dead_code, reason = "held")] RwLockWriteGuard<'static, ()>);

impl FreeGuard {
    /// None if this thread already holds it: freeing one object has released another.
    fn begin() -> Option<Self> {
        (!IS_FREEING.get()).then(|| Self::by(GATE.write().unwrap_or_else(PoisonError::into_inner)))
    }

    /// None also if another thread holds it, or is starting a wait.
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

/// Streams of this process, on all devices, that have waited. Memory that several devices can
/// access is freed, and host memory unregistered, only when all of them are idle.
static WAITING_STREAMS: Mutex<Vec<Weak<StreamWaits>>> = Mutex::new(Vec::new());

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The waits of a stream, as far as they can be tracked without querying the stream.
#[derive(Debug)]
pub(crate) struct StreamWaits {
    implementation: Implementation,
    /// None for a foreign stream, which is never queried, because its owner may destroy it.
    stream: Option<Weak<dyn StreamDriver>>,
    /// Streams of a parent process are not waited for here.
    fork_generation: ForkGeneration,
    is_known: AtomicBool,
    /// The number of waits that were started.
    started: AtomicU64,
    /// The number of waits that are known to be over.
    finished: AtomicU64,
    /// An event, and the number of waits that were started before it.
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
            started: AtomicU64::new(0),
            finished: AtomicU64::new(0),
            marker: Mutex::default(),
        })
    }

    /// Starts a wait, while nothing is freed.
    pub(crate) fn begin(self: &Arc<Self>, begin: impl FnOnce() -> Result<()>) -> Result<()> {
        let _gate = GATE.read().unwrap_or_else(PoisonError::into_inner);
        if !self.is_known.swap(true, Ordering::AcqRel) {
            let mut waiters = locked(&WAITING_STREAMS);
            waiters.retain(|waits| {
                waits.upgrade().is_some_and(|waits| waits.fork_generation.is_current())
            });
            waiters.push(Arc::downgrade(self));
        }
        // Counted first: until an event behind it is reached, the wait counts as pending.
        self.started.fetch_add(1, Ordering::AcqRel);
        begin()
    }

    /// An event was recorded behind all waits so far, under the lock of the stream.
    pub(crate) fn mark(&self, event: &Arc<driver::Event>) {
        let started = self.started.load(Ordering::Acquire);
        if started == self.finished.load(Ordering::Relaxed) {
            return;
        }
        let mut marker = locked(&self.marker);
        // The first event behind the waits proves as much, and proves it earlier.
        if marker.as_ref().is_none_or(|(before, _)| *before != started) {
            *marker = Some((started, Arc::clone(event)));
        }
    }

    /// Was a wait started that is not known to be over?
    pub(crate) fn is_open(&self) -> bool {
        self.started.load(Ordering::Acquire) != self.finished.load(Ordering::Relaxed)
    }

    /// May the stream wait? False is certain, until another wait is started.
    fn is_waiting(&self) -> bool {
        if !self.fork_generation.is_current() || !self.is_open() {
            return false;
        }
        let started = self.started.load(Ordering::Acquire);
        // Queried without the lock: dropping objects meanwhile may query the same stream.
        let marker = locked(&self.marker).clone();
        let is_reached = match marker {
            Some((before, event)) if before == started => is_known_over(event.is_done()),
            _ => false,
        };
        let has_ended = || match &self.stream {
            Some(stream) => stream.upgrade().is_none_or(|stream| is_known_over(stream.is_done())),
            None => false,
        };
        let is_over = is_reached || has_ended();
        if is_over {
            self.finished.store(started, Ordering::Relaxed);
            let mut marker = locked(&self.marker);
            if marker.as_ref().is_some_and(|(before, _)| *before == started) {
                *marker = None;
            }
        }
        !is_over
    }
}

/// A failed device waits for nothing. Other errors prove nothing, for example the error of a
/// stream that is being captured.
fn is_known_over(asked: Result<bool>) -> bool {
    asked.unwrap_or_else(|error| is_over(&error))
}

/// Runs an action that would block on waiting streams, if no stream waits; no wait starts
/// during it.
pub(crate) fn if_no_stream_waits(implementation: Implementation, free: impl FnOnce()) -> bool {
    let Some(_gate) = FreeGuard::begin() else { return false };
    let is_idle = !any_stream_waits(implementation);
    if is_idle {
        free();
    }
    is_idle
}

/// Does a stream of this process wait?
pub(crate) fn any_stream_waits(implementation: Implementation) -> bool {
    let waiters: Vec<_> = locked(&WAITING_STREAMS).iter().filter_map(Weak::upgrade).collect();
    let mut waiters = waiters.iter().filter(|waits| waits.implementation == implementation);
    waiters.any(|waits| waits.is_waiting())
}

/// Memory without users that is to be freed.
#[derive(Debug)]
pub(crate) enum DeferredFree {
    /// Memory of `cuMemAlloc`, and whether no other process can have opened it.
    Plain { address: u64, length: u64, is_private: bool },
    /// Registered host memory, and the owner that keeps it mapped.
    Host { address: u64, length: u64, _mapping: Box<dyn HostMapping> },
    /// Another process's memory, opened by this handle. It may have users again.
    Legacy { bytes: [u8; 64] },
}

/// Memory that was returned to a device, and is not freed yet.
#[derive(Debug, Default)]
pub(crate) struct DeferredFrees {
    all: Mutex<Vec<DeferredFree>>,
    /// The number of entries, including those being freed, readable without the lock.
    count: AtomicUsize,
}

impl DeferredFrees {
    /// Deferred memory of this length, for reuse.
    pub(crate) fn take_plain(&self, wanted: u64) -> Option<u64> {
        self.take(|deferred_free| match deferred_free {
            DeferredFree::Plain { address, length, is_private: true } if *length == wanted => {
                Some(*address)
            }
            _ => None,
        })
        .map(|(address, _)| address)
    }

    /// Takes the registration of exactly this host range, if it is still deferred. Returns its
    /// previous owner, which may be dropped when the range has a new one.
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
    /// Frees memory now if no stream waits, otherwise later.
    pub(crate) fn give_back(&self, deferred_free: DeferredFree) {
        self.deferred_frees.count.fetch_add(1, Ordering::AcqRel);
        locked(&self.deferred_frees.all).push(deferred_free);
        self.free_deferred();
    }

    /// Frees deferred memory, if no stream waits. Then nothing is left of what any thread
    /// returned before.
    pub(crate) fn free_deferred(&self) {
        if self.deferred_frees.count.load(Ordering::Acquire) > 0
            && let Some(gate) = FreeGuard::begin()
        {
            self.free_all(gate);
        }
    }

    /// The same, unless another thread is freeing, or is starting a wait.
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
            // Host owners are dropped while the gate is held, and counted until then: another
            // thread that passed the gate relies on its mappings being gone. Objects that their
            // owners release are freed in the next round.
            let count = freed.len();
            drop(freed);
            self.deferred_frees.count.fetch_sub(count, Ordering::AcqRel);
        }
        drop(gate);
    }

    /// Called while no stream waits.
    fn free(&self, deferred_free: &DeferredFree) {
        // A driver that cannot free has failed as a whole; no caller can handle that here.
        let _ = match deferred_free {
            DeferredFree::Plain { address, length, .. } => {
                self.budget.give_back(*length);
                // SAFETY: allocated with cuMemAlloc, and no slice, thus no operation, was left.
                unsafe { self.driver.free(*address) }
            }
            // SAFETY: registered here, and no operation was left.
            DeferredFree::Host { address, .. } => unsafe { self.driver.unregister(*address) },
            DeferredFree::Legacy { bytes } => {
                // Closed under the table's lock, so that the next user opens it again.
                let mut table = locked(&self.legacy);
                table.close(bytes).map_or(Ok(()), |address| {
                    // SAFETY: opened here; no slice, thus no operation, was left.
                    unsafe { self.driver.legacy_close(address) }
                })
            }
        };
    }
}
