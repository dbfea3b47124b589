//! The state that a queue, its endpoints and wakers share.
#![allow(unsafe_code)]

use std::sync::atomic::Ordering;

use libfabric_sys as sys;
use threads::lock;

use super::{Member, QueueShared, Waker};
use crate::{ErrorKind, Peer, Result};

impl Waker {
    /// Wakes a sleeping thread (`fi_cq_signal`). Its sleep ends early, without a result: it
    /// checks its deadline, or, in [`wait_or_wake`](super::CompletionQueue::wait_or_wake),
    /// stops waiting.
    ///
    /// # Errors
    /// `NotSupported` if the provider lacks the call: then the sleeping thread notices the
    /// request at its next check, which is soon.
    pub fn wake(&self) -> Result<()> {
        self.0.wake_up.store(true, Ordering::SeqCst);
        if !self.0.can_signal {
            let detail = "the queue was opened without a descriptor to sleep on";
            return Err(self.0.domain.error(ErrorKind::NotSupported, "fi_cq_signal", detail));
        }
        // SAFETY: the queue is alive, and libfabric lets any thread do this.
        let code = unsafe { sys::fi_cq_signal(self.0.handle.as_ptr()) };
        self.0.domain.check("fi_cq_signal", code)
    }

    pub(crate) fn is_inherited(&self) -> bool {
        self.0.handle.is_inherited()
    }

    /// Like `wake`, for callers that ignore errors and must not allocate one.
    pub(crate) fn wake_best_effort(&self) {
        if self.is_inherited() {
            return;
        }
        self.0.wake_up.store(true, Ordering::SeqCst);
        if self.0.can_signal {
            // SAFETY: as in `wake`.
            unsafe { sys::fi_cq_signal(self.0.handle.as_ptr()) };
        }
    }
}

impl Member {
    /// A peer's address, for messages; None if the operation names no peer.
    #[cold]
    pub(crate) fn name_of(&self, peer: Peer) -> Option<String> {
        match &self.addresses {
            None => self.connected_to.get().cloned(),
            Some(_) if peer == Peer::ANY => None,
            Some(addresses) => Some(addresses.name_of(peer)),
        }
    }

    pub(crate) fn connects_to(&self, name: String) {
        // A second attempt to connect leads to the same peer, or fails.
        let _ = self.connected_to.set(name);
    }

    /// Called before the endpoint is closed.
    pub(crate) fn begin_close(&self) {
        *lock(&self.endpoint) = None;
    }

    /// Called after the endpoint is closed: its buffers may be released.
    pub(crate) fn finish_close(&self, queue: &QueueShared) {
        self.closed.store(true, Ordering::Release);
        queue.closed_endpoints.fetch_add(1, Ordering::AcqRel);
    }
}

impl QueueShared {
    pub(crate) fn as_fid(&self) -> *mut sys::fid {
        self.handle.as_fid()
    }
}
