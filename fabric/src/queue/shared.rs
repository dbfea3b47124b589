//! The state that a queue, its endpoints and wakers share.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use libfabric_sys as sys;

use super::drained::DrainedEntry;
use super::table::Table;
use crate::address::{AddressVector, Peer};
use crate::domain::Domain;
use crate::error::{Error, ErrorKind, Result};
use crate::handle::Handle;

/// The part of a queue that its endpoints hold.
#[derive(Debug)]
pub(crate) struct QueueShared {
    pub(super) handle: Handle<sys::fid_cq>,
    /// The operations that were in flight when the queue's owner dropped it. Freed with the
    /// queue itself: after the last endpoint is closed.
    pub(super) orphaned_table: Mutex<Option<Box<Table>>>,
    /// Counts closed endpoints.
    pub(super) closed_endpoints: AtomicU32,
    pub(super) domain: Domain,
    /// Do entries have tags?
    pub(super) has_tags: bool,
    /// Entries that were drained when an endpoint was closed, for the next reader of the queue.
    pub(super) drained: Mutex<VecDeque<DrainedEntry>>,
    /// A wake-up was requested.
    pub(super) wake_up: AtomicBool,
    /// Was the queue opened with a wait object? libfabric 1.17 crashes if a queue without one
    /// is signalled.
    pub(super) can_signal: bool,
}

/// Wakes the thread that sleeps in a completion queue, from any thread.
///
/// ```
/// use fabric::*;
/// # let offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first()?;
/// # let domain = Domain::open(&offer)?;
/// let queue = CompletionQueue::open(&domain)?;
/// let waker = queue.waker();
/// std::thread::spawn(move || match waker.wake() {
///     Ok(()) => {}
///     Err(refused) => assert_eq!(refused.kind(), ErrorKind::NotSupported),
/// });
/// # Ok::<(), fabric::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Waker(pub(super) Arc<QueueShared>);

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
            let error = Error::new(ErrorKind::NotSupported, "fi_cq_signal", detail);
            return Err(self.0.domain.add_provider(error));
        }
        // SAFETY: the queue is alive, and libfabric lets any thread do this.
        let code = unsafe { sys::fi_cq_signal(self.0.handle.as_ptr()) };
        Error::check("fi_cq_signal", i64::from(code))
            .map(drop)
            .map_err(|e| self.0.domain.add_provider(e))
    }

    /// Is this a forked child, so that the queue belongs to the parent?
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

/// One endpoint, as its queues see it.
#[derive(Debug)]
pub(crate) struct Member {
    /// The endpoint to cancel receives on; null once it is being closed.
    pub(super) endpoint: Mutex<Option<usize>>,
    pub(super) closed: AtomicBool,
    /// Used to name the peers of failed operations.
    pub(super) addresses: Option<AddressVector>,
    /// The peer of a connected endpoint, once it is known.
    pub(super) connected_to: OnceLock<String>,
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

    /// Records the peer that a connected endpoint is connected to.
    pub(crate) fn connects_to(&self, name: String) {
        // A second attempt to connect leads to the same peer, or fails.
        let _ = self.connected_to.set(name);
    }

    /// Called before the endpoint is closed.
    pub(crate) fn begin_close(&self) {
        *self.endpoint.lock().unwrap_or_else(PoisonError::into_inner) = None;
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
