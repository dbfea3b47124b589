//! Closing registrations where the provider does not guard them against other threads.
//!
//! tcp of libfabric before 1.19 (`net` before 1.18) takes no lock to close a registration,
//! though other threads may register, or look a key up for a peer, at the same time: that
//! corrupts its tree of keys. Any thread may drop a region. So with such a provider a region is
//! closed only while no queue is read and nothing is registered. Otherwise the next thread that
//! reads a queue closes it.

use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use libfabric_sys as sys;
use threads::{ForkGeneration, lock};

use crate::handle::Handle;
use crate::quirks::deregisters_without_lock;
use crate::{Memory, Version};

/// The owner of registered memory, which must not be freed while the registration exists.
pub(crate) type Keepalive = Vec<Box<dyn Memory>>;

/// A registration whose last user has dropped it.
#[derive(Debug)]
struct DeferredDeregistration {
    handle: Handle<sys::fid_mr>,
    memory: Option<Keepalive>,
    bytes: usize,
}

/// The locks that the provider lacks; none if it locks by itself.
#[derive(Debug)]
pub(crate) struct DeregistrationLock(Option<Box<Locks>>);

#[derive(Debug)]
struct Locks {
    created_in: ForkGeneration,
    /// Held while a queue is read, because the provider looks up keys then.
    progress: Mutex<()>,
    /// Held during a registration or deregistration.
    deferred: Mutex<Vec<DeferredDeregistration>>,
}

impl DeregistrationLock {
    pub(crate) fn of(provider: &str) -> Self {
        let (progress, deferred) = (Mutex::default(), Mutex::default());
        let is_needed = deregisters_without_lock(provider, Version::running());
        Self(
            is_needed.then(|| {
                Box::new(Locks { created_in: ForkGeneration::current(), progress, deferred })
            }),
        )
    }

    pub(crate) fn is_needed(&self) -> bool {
        self.0.is_some()
    }

    /// Must be held while a queue or a counter is read.
    pub(crate) fn lock_progress(&self) -> Option<ProgressGuard<'_>> {
        self.0.as_ref().map(|locks| locks.lock_progress())
    }

    /// Must be held during a registration.
    pub(crate) fn lock_registration(&self) -> Option<impl Drop + '_> {
        self.0.as_ref().map(|locks| lock(&locks.deferred))
    }

    /// Closes a registration of `bytes` bytes, now or soon. Returns the memory that may be freed
    /// now.
    pub(crate) fn close(
        &self,
        handle: Handle<sys::fid_mr>,
        memory: Option<Keepalive>,
        bytes: usize,
    ) -> Option<Keepalive> {
        let region = DeferredDeregistration { handle, memory, bytes };
        let Some(locks) = &self.0 else { return region.close() };
        let progress_guard = match locks.progress.try_lock() {
            Err(TryLockError::WouldBlock) => {
                lock(&locks.deferred).push(region);
                return None;
            }
            Ok(progress_guard) => progress_guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        };
        let registration_guard = lock(&locks.deferred);
        let memory = region.close();
        drop((registration_guard, progress_guard));
        memory
    }
}

impl Locks {
    fn lock_progress(&self) -> ProgressGuard<'_> {
        let guard = lock(&self.progress);
        let mut deferred = lock(&self.deferred);
        let freed = deferred.drain(..).map(DeferredDeregistration::close).collect();
        ProgressGuard { _guard: guard, _freed: freed }
    }
}

/// Memory of regions that were closed under the guard is freed after the guard ends: it belongs
/// to the caller, may own regions itself, and may take long to free.
#[must_use]
pub(crate) struct ProgressGuard<'a> {
    // Dropped first.
    _guard: MutexGuard<'a, ()>,
    _freed: Vec<Option<Keepalive>>,
}

impl DeferredDeregistration {
    /// Closes the registration, and returns the memory that may be freed.
    fn close(self) -> Option<Keepalive> {
        let Self { handle, memory, bytes } = self;
        let Err(error) = handle.close() else { return memory };
        // The provider may still write into the memory: freeing it would be worse than leaking
        // it.
        std::mem::forget(memory);
        tracing::error!(%error, bytes, "closing a registration failed; its memory is leaked");
        None
    }
}

impl Drop for Locks {
    fn drop(&mut self) {
        if !self.created_in.is_current() {
            // In a forked child: threads that the child does not have may hold the locks, and
            // the deferred registrations belong to the parent.
            let deferred = self.deferred.get_mut().unwrap_or_else(PoisonError::into_inner);
            std::mem::forget(std::mem::take(deferred));
            return;
        }
        // Before the domain, which is no longer used.
        drop(self.lock_progress());
    }
}

#[cfg(test)]
#[allow(unsafe_code)]
mod tests {
    use std::sync::mpsc::{Sender, channel};
    use std::time::{Duration, Instant};

    use crate::{Access, Domain, EndpointKind, HostMemory, Memory, Query};

    /// Memory that reads a queue when it is dropped.
    struct QueueReadingMemory {
        memory: HostMemory,
        domain: Domain,
        freed_signal: Sender<()>,
    }

    // SAFETY: the inner memory fulfils the contract, and does not move while it is held here.
    unsafe impl Memory for QueueReadingMemory {
        fn as_ptr(&self) -> *mut u8 {
            self.memory.as_ptr()
        }

        fn len(&self) -> usize {
            self.memory.len()
        }
    }

    impl Drop for QueueReadingMemory {
        fn drop(&mut self) {
            drop(self.domain.deregistration_lock().lock_progress());
            let _ = self.freed_signal.send(());
        }
    }

    #[test]
    fn memory_is_freed_after_the_progress_guard() {
        let query = Query::new(EndpointKind::Rdm).source("127.0.0.1");
        let offer = query.clone().provider("net").first().or_else(|_| query.first()).unwrap();
        let domain = Domain::open(&offer).unwrap();
        if !domain.deregistration_lock().is_needed() {
            testkit::skip!("{} locks deregistration itself", offer.capabilities().provider);
        }
        let (freed_signal, freed) = channel();
        let memory = HostMemory::zeroed(64).unwrap();
        let memory = QueueReadingMemory { memory, domain: domain.clone(), freed_signal };
        let region = domain.register(memory, Access::ALL).unwrap();
        let closer = std::thread::spawn(move || {
            let progress_guard = domain.deregistration_lock().lock_progress();
            // Too late for this guard.
            drop(region);
            let freed_under_guard = freed.try_recv().is_ok();
            drop(progress_guard);
            drop(domain.deregistration_lock().lock_progress());
            // The memory takes the guard itself when it is dropped: under the guard it would
            // deadlock.
            let freed_after_guard = freed.recv_timeout(Duration::from_secs(30));
            (freed_under_guard, freed_after_guard.is_ok())
        });
        let end = Instant::now() + Duration::from_secs(30);
        while !closer.is_finished() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(closer.is_finished(), "the memory was dropped under the guard that it waits for");
        assert_eq!(closer.join().unwrap(), (false, true));
    }
}
