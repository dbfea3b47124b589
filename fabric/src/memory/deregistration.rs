//! Closing registrations where the provider forgets to look out for others.
//!
//! tcp of libfabric before 1.19 (as `net`, before 1.18) takes no lock to close a registration,
//! though other threads may register, or look a key up for a peer, at the same time: that breaks
//! its tree of keys. Any thread may drop a region here. So on such a provider a region is closed when no
//! queue is read and nothing is registered; or else by whoever reads a queue next.

use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use libfabric_sys as sys;

use super::region::Keepalive;
use crate::choice::deregisters_without_lock;
use crate::fork::ForkGeneration;
use crate::handle::Handle;
use crate::version::Version;

/// A registration whose last user has let go of it.
#[derive(Debug)]
pub(super) struct DeferredDeregistration {
    pub(super) handle: Handle<sys::fid_mr>,
    pub(super) memory: Option<Keepalive>,
    pub(super) bytes: usize,
}

/// What keeps those apart that the provider does not.
#[derive(Debug)]
pub(crate) struct DeregistrationLock {
    created_in: ForkGeneration,
    /// Held while a queue is read: then the provider looks keys up.
    lock_progress: Mutex<()>,
    /// Held while something is registered or closed.
    deferred: Mutex<Vec<DeferredDeregistration>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl DeregistrationLock {
    /// None where the provider sees to it.
    pub(crate) fn of(provider: &str) -> Option<Box<Self>> {
        let (lock_progress, deferred) = (Mutex::default(), Mutex::default());
        deregisters_without_lock(provider, Version::running())
            .then(|| Box::new(Self { created_in: ForkGeneration::now(), lock_progress, deferred }))
    }

    /// Before a queue or a counter is read, and until it was.
    pub(crate) fn lock_progress(&self) -> ProgressGuard<'_> {
        let lock_progress = lock(&self.lock_progress);
        let mut deferred = lock(&self.deferred);
        let freed = deferred.drain(..).map(DeferredDeregistration::close).collect();
        ProgressGuard { _turn: lock_progress, _freed: freed }
    }

    /// Before something is registered, and until it was.
    pub(crate) fn lock_registration(&self) -> impl Drop + '_ {
        lock(&self.deferred)
    }

    /// Closes a registration, now or soon. What may be freed now.
    pub(super) fn close(&self, region: DeferredDeregistration) -> Option<Keepalive> {
        let lock_progress = match self.lock_progress.try_lock() {
            Err(TryLockError::WouldBlock) => {
                lock(&self.deferred).push(region);
                return None;
            }
            Ok(lock_progress) => lock_progress,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        };
        let nobody_registers = lock(&self.deferred);
        let memory = region.close();
        drop((nobody_registers, lock_progress));
        memory
    }
}

/// What nobody else does meanwhile.
///
/// Memory of regions that were closed with it is freed when it is over: it is the caller's own, may have
/// regions of its own, which end with it, and may take long.
#[must_use]
pub(crate) struct ProgressGuard<'a> {
    // Goes first.
    _turn: MutexGuard<'a, ()>,
    _freed: Vec<Option<Keepalive>>,
}

impl DeferredDeregistration {
    /// What may be freed then.
    pub(super) fn close(self) -> Option<Keepalive> {
        let Self { handle, memory, bytes } = self;
        let Err(error) = handle.close() else { return memory };
        // The provider may still write into the memory: freeing it would be
        // worse than losing it.
        std::mem::forget(memory);
        tracing::error!(%error, bytes, "a registration could not be closed; its memory is leaked");
        None
    }
}

impl Drop for DeregistrationLock {
    fn drop(&mut self) {
        if self.created_in.is_inherited() {
            // A forked child: the locks may be held by threads that it does not have, and what
            // waits to be closed is the parent's.
            let deferred = self.deferred.get_mut().unwrap_or_else(PoisonError::into_inner);
            std::mem::forget(std::mem::take(deferred));
            return;
        }
        // Before the domain: nobody uses it any more.
        drop(self.lock_progress());
    }
}

#[cfg(test)]
#[allow(unsafe_code)]
mod tests {
    use std::sync::mpsc::{Sender, channel};
    use std::time::{Duration, Instant};

    use crate::{Access, Domain, EndpointKind, HostMemory, Memory, Query};

    /// Memory at the end of which a queue is looked at.
    struct Curious {
        memory: HostMemory,
        domain: Domain,
        ended: Sender<()>,
    }

    // SAFETY: its memory is, and stays where it is as long as this has it.
    unsafe impl Memory for Curious {
        fn as_ptr(&self) -> *mut u8 {
            self.memory.as_ptr()
        }

        fn len(&self) -> usize {
            self.memory.len()
        }
    }

    impl Drop for Curious {
        fn drop(&mut self) {
            drop(
                self.domain
                    .deregistration_lock()
                    .map(|deregistration_lock| deregistration_lock.lock_progress()),
            );
            let _ = self.ended.send(());
        }
    }

    #[test]
    fn memory_ends_when_the_turn_is_over() {
        let query = Query::new(EndpointKind::Rdm).source("127.0.0.1");
        let offer = query.clone().provider("net").first().or_else(|_| query.first()).unwrap();
        let domain = Domain::open(&offer).unwrap();
        if domain.deregistration_lock().is_none() {
            testkit::skip!(
                "{} closes registrations under a lock of its own",
                offer.capabilities().provider
            );
        }
        let (ended, has_ended) = channel();
        let memory = HostMemory::zeroed(64).unwrap();
        let memory = Curious { memory, domain: domain.clone(), ended };
        let region = domain.register(memory, Access::ALL).unwrap();
        let closer = std::thread::spawn(move || {
            let lock_progress = domain
                .deregistration_lock()
                .map(|deregistration_lock| deregistration_lock.lock_progress());
            // Too late for this turn.
            drop(region);
            let ended_in_turn = has_ended.try_recv().is_ok();
            drop(lock_progress);
            drop(
                domain
                    .deregistration_lock()
                    .map(|deregistration_lock| deregistration_lock.lock_progress()),
            );
            // The memory takes a turn itself when it ends: within a turn it would never end.
            let ended = has_ended.recv_timeout(Duration::from_secs(30));
            (ended_in_turn, ended.is_ok())
        });
        let end = Instant::now() + Duration::from_secs(30);
        while !closer.is_finished() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(closer.is_finished(), "the memory ended within a turn, and waits for its own");
        assert_eq!(closer.join().unwrap(), (false, true));
    }
}
