//! Closing registrations where the provider forgets to look out for others.
//!
//! tcp of libfabric before 1.19 (as `net`, before 1.18) takes no lock to close a registration,
//! though other threads may register, or look a key up for a peer, at the same time: that breaks
//! its tree of keys. Any thread may drop a region here. So on such a provider a region is closed when no
//! queue is read and nothing is registered; or else by whoever reads a queue next.

use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use libfabric_sys as sys;

use super::region::Keepalive;
use crate::choice::closes_regions_unguarded;
use crate::fork::Birth;
use crate::handle::Handle;
use crate::version::Version;

/// A registration whose last user has let go of it.
#[derive(Debug)]
pub(super) struct Late {
    pub(super) handle: Handle<sys::fid_mr>,
    pub(super) memory: Option<Keepalive>,
    pub(super) bytes: usize,
}

/// What keeps those apart that the provider does not.
#[derive(Debug)]
pub(crate) struct Closing {
    born: Birth,
    /// Held while a queue is read: then the provider looks keys up.
    turn: Mutex<()>,
    /// Held while something is registered or closed.
    late: Mutex<Vec<Late>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Closing {
    /// None where the provider sees to it.
    pub(crate) fn of(provider: &str) -> Option<Box<Self>> {
        let (turn, late) = (Mutex::default(), Mutex::default());
        closes_regions_unguarded(provider, Version::running())
            .then(|| Box::new(Self { born: Birth::now(), turn, late }))
    }

    /// Before a queue or a counter is read, and until it was.
    pub(crate) fn turn(&self) -> Turn<'_> {
        let turn = lock(&self.turn);
        let mut late = lock(&self.late);
        let freed = late.drain(..).map(Late::close).collect();
        Turn { _turn: turn, _freed: freed }
    }

    /// Before something is registered, and until it was.
    pub(crate) fn registering(&self) -> impl Drop + '_ {
        lock(&self.late)
    }

    /// Closes a registration, now or soon. What may be freed now.
    pub(super) fn close(&self, region: Late) -> Option<Keepalive> {
        let turn = match self.turn.try_lock() {
            Err(TryLockError::WouldBlock) => {
                lock(&self.late).push(region);
                return None;
            }
            Ok(turn) => turn,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        };
        let nobody_registers = lock(&self.late);
        let memory = region.close();
        drop((nobody_registers, turn));
        memory
    }
}

/// What nobody else does meanwhile.
///
/// Memory of regions that were closed with it is freed when it is over: it is the caller's own, may have
/// regions of its own, which end with it, and may take long.
#[must_use]
pub(crate) struct Turn<'a> {
    // Goes first.
    _turn: MutexGuard<'a, ()>,
    _freed: Vec<Option<Keepalive>>,
}

impl Late {
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

impl Drop for Closing {
    fn drop(&mut self) {
        if self.born.is_parents() {
            // A forked child: the locks may be held by threads that it does not have, and what
            // waits to be closed is the parent's.
            let late = self.late.get_mut().unwrap_or_else(PoisonError::into_inner);
            std::mem::forget(std::mem::take(late));
            return;
        }
        // Before the domain: nobody uses it any more.
        drop(self.turn());
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
            drop(self.domain.closing().map(|closing| closing.turn()));
            let _ = self.ended.send(());
        }
    }

    #[test]
    fn memory_ends_when_the_turn_is_over() {
        let query = Query::new(EndpointKind::Rdm).source("127.0.0.1");
        let offer = query.clone().provider("net").first().or_else(|_| query.first()).unwrap();
        let domain = Domain::open(&offer).unwrap();
        if domain.closing().is_none() {
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
            let turn = domain.closing().map(|closing| closing.turn());
            // Too late for this turn.
            drop(region);
            let ended_in_turn = has_ended.try_recv().is_ok();
            drop(turn);
            drop(domain.closing().map(|closing| closing.turn()));
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
