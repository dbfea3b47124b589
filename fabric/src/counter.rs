//! Counting completions instead of reading each of them.
//!
//! A counter reports how many operations completed, not which. That suits algorithms that know
//! what to expect (a barrier, a ring of fixed size), and it is the only way to watch a region.
//! Failures are counted separately. The completion queue reports which operation failed; it
//! must be read anyway, because it owns the memory.
#![allow(unsafe_code)]

use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use libfabric_sys as sys;

use crate::handle::Handle;
use crate::waiting::{Backoff, Deadline};
use crate::{Domain, Error, ErrorKind, Result};

/// A counter (`fid_cntr`) of the operations of endpoints, or of the remote accesses to regions,
/// that it is bound to. Cheap to clone.
///
/// ```
/// use std::time::Duration;
/// use fabric::*;
/// let offer = Query::new(EndpointKind::Rdm).provider("tcp;ofi_rxm").source("127.0.0.1").first()?;
/// let domain = Domain::open(&offer)?;
/// let writes = Counter::open(&domain)?;
/// # let addresses = AddressVector::open(&domain)?;
/// let mut queue = CompletionQueue::open(&domain)?;
/// let mut endpoint = Endpoint::builder(&domain)
///     .addresses(&addresses)
///     .queue(&mut queue)
///     .counter(&writes, Access::WRITE)
///     .open()?;
/// # let me = addresses.insert(&endpoint.address()?)?;
/// # let source = domain.register(HostMemory::zeroed(8)?, Access::ALL)?;
/// # let target = domain.register(HostMemory::zeroed(32)?, Access::ALL)?;
/// let remote = domain.attach(&target.describe()?)?;
/// for at in 0..4 {
///     endpoint.write(&mut queue, me, &source.all(), &remote.slice(8 * at..8 * at + 8)?, at)?;
/// }
/// writes.wait(4, Duration::from_secs(5), || {
///     let _ = queue.poll();
/// })?;
/// assert_eq!((writes.read(), writes.read_errors()), (4, 0));
/// # Ok::<(), fabric::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Counter(Arc<CounterInner>);

#[derive(Debug)]
struct CounterInner {
    handle: Handle<sys::fid_cntr>,
    domain: Domain,
}

impl Counter {
    /// Opens a counter.
    ///
    /// # Errors
    /// `NotSupported` if the provider has no counters.
    pub fn open(domain: &Domain) -> Result<Self> {
        let mut attributes = sys::fi_cntr_attr {
            events: sys::FI_CNTR_EVENTS_COMP,
            wait_obj: sys::FI_WAIT_NONE,
            ..Default::default()
        };
        // SAFETY: the domain is alive; the object is owned here.
        let handle = unsafe {
            Handle::open("fi_cntr_open", &domain.capabilities().provider, |counter| {
                sys::fi_cntr_open(domain.as_ptr(), &mut attributes, counter, ptr::null_mut())
            })?
        };
        // SAFETY: the counter is alive.
        if !unsafe { sys::can_count(handle.as_ptr()) } {
            let absent = Error::from_code("fi_cntr_read", sys::FI_ENOSYS);
            return Err(domain.add_provider(absent));
        }
        Ok(Self(Arc::new(CounterInner { handle, domain: domain.clone() })))
    }

    /// Operations that succeeded. Reading also makes progress.
    #[must_use]
    pub fn read(&self) -> u64 {
        let _guard = self.0.domain.deregistration_lock().lock_progress();
        // SAFETY: the counter is alive.
        unsafe { sys::fi_cntr_read(self.0.handle.as_ptr()) }
    }

    /// Operations that failed.
    #[must_use]
    pub fn read_errors(&self) -> u64 {
        let _guard = self.0.domain.deregistration_lock().lock_progress();
        // SAFETY: the counter is alive.
        unsafe { sys::fi_cntr_readerr(self.0.handle.as_ptr()) }
    }

    /// Waits until the value reaches a threshold or an operation fails. `progress` is called
    /// between polls; it must poll the queues of providers with manual progress.
    ///
    /// # Errors
    /// `DeadlineExceeded` with the value reached; `Other` if failures were counted.
    pub fn wait(
        &self,
        threshold: u64,
        timeout: Duration,
        mut progress: impl FnMut(),
    ) -> Result<()> {
        let errors = self.read_errors();
        let deadline = Deadline::after(timeout);
        let mut backoff = Backoff::new();
        loop {
            let value = self.read();
            if value >= threshold {
                return Ok(());
            }
            if self.read_errors() > errors {
                let detail = format!(
                    "an operation failed after {value} of {threshold} completions. Read the completion queue for its error"
                );
                return Err(self.0.domain.error(ErrorKind::Other, "fi_cntr_wait", detail));
            }
            progress();
            if !backoff.pause(&deadline) {
                let detail = format!("{value} of {threshold} completions within {timeout:?}");
                let kind = ErrorKind::DeadlineExceeded;
                return Err(self.0.domain.error(kind, "fi_cntr_wait", detail));
            }
        }
    }

    pub(crate) fn domain(&self) -> &Domain {
        &self.0.domain
    }

    pub(crate) fn as_fid(&self) -> *mut sys::fid {
        self.0.handle.as_fid()
    }
}
