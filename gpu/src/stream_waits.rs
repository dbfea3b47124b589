//! The streams that wait, and the gate between waits that start and memory that is freed.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockWriteGuard, TryLockError, Weak};

use threads::{ForkGeneration, lock};

use crate::device_name::Implementation;
use crate::driver::{EventDriver, StreamDriver};
use crate::error::{Result, proves_idle};

/// Read-locked while a wait starts, write-locked while memory is freed because no stream waits.
static GATE: RwLock<()> = RwLock::new(());

thread_local! {
    /// Does this thread hold the gate for freeing?
    static IS_FREEING: Cell<bool> = const { Cell::new(false) };
}

/// The gate, held for freeing.
pub(crate) struct FreeGuard(#[allow(dead_code, reason = "held")] RwLockWriteGuard<'static, ()>);

impl FreeGuard {
    /// None if this thread already holds it: freeing one object has released another.
    pub(crate) fn begin() -> Option<Self> {
        (!IS_FREEING.get()).then(|| Self::by(GATE.write().unwrap_or_else(PoisonError::into_inner)))
    }

    /// None also if another thread holds it, or is starting a wait.
    pub(crate) fn try_begin() -> Option<Self> {
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
    marker: Mutex<Option<(u64, Arc<dyn EventDriver>)>>,
}

impl StreamWaits {
    pub(crate) fn new(
        implementation: Implementation,
        stream: Option<&Arc<dyn StreamDriver>>,
    ) -> Arc<Self> {
        Arc::new(Self {
            implementation,
            stream: stream.map(Arc::downgrade),
            fork_generation: ForkGeneration::current(),
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
            let mut waiters = lock(&WAITING_STREAMS);
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
    pub(crate) fn mark(&self, event: &Arc<dyn EventDriver>) {
        if !self.is_open() {
            return;
        }
        let started = self.started.load(Ordering::Acquire);
        let mut marker = lock(&self.marker);
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
        let marker = lock(&self.marker).clone();
        let is_over = marker
            .is_some_and(|(before, event)| before == started && is_known_over(event.is_done()))
            || self.stream.as_ref().is_some_and(|stream| {
                stream.upgrade().is_none_or(|stream| is_known_over(stream.is_done()))
            });
        if is_over {
            self.finished.store(started, Ordering::Relaxed);
            lock(&self.marker).take_if(|(before, _)| *before == started);
        }
        !is_over
    }
}

/// A failed device waits for nothing. Other errors prove nothing, for example the error of a
/// stream that is being captured.
fn is_known_over(asked: Result<bool>) -> bool {
    asked.unwrap_or_else(|error| proves_idle(&error))
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
    let waiters: Vec<_> = lock(&WAITING_STREAMS).iter().filter_map(Weak::upgrade).collect();
    let mut waiters = waiters.iter().filter(|waits| waits.implementation == implementation);
    waiters.any(|waits| waits.is_waiting())
}
