//! Asynchronous registrations.
//!
//! Where a provider registers in the background, the registration in flight belongs to a
//! [`PendingRegion`]: only the event of its completion turns it into a region.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use libfabric_sys as sys;

use super::registration::{RegistrationOptions, Source};
use super::{Extent, MemoryRegion};
use crate::deregistration::Keepalive;
use crate::handle::Handle;
use crate::waiting::Deadline;
use crate::{Access, Domain, Error, ErrorKind, Event, EventQueue, Memory, Result};

impl Domain {
    /// Starts a registration that completes on the event queue that the domain was opened with
    /// ([`open_asynchronous`](Self::open_asynchronous)).
    ///
    /// # Errors
    /// `InvalidArgument` for a domain that registers synchronously; otherwise as
    /// [`register`](Self::register).
    pub fn register_asynchronously(
        &self,
        memory: impl Memory,
        options: impl Into<RegistrationOptions>,
    ) -> Result<PendingRegion> {
        let options = options.into();
        if !self.is_asynchronous() {
            let detail = "the domain was not opened with an event queue for registrations";
            return Err(self.error(ErrorKind::InvalidArgument, "fi_mr_regattr", detail));
        }
        let memory: Vec<Box<dyn Memory>> = vec![Box::new(memory)];
        let (vector, extent) = self.check_buffers(&memory)?;
        // Never a pointer: the event returns it unchanged.
        static NEXT: AtomicUsize = AtomicUsize::new(1);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let context = std::ptr::without_provenance_mut(number);
        // SAFETY: `memory` keeps the range valid and moves into the pending region.
        let (handle, enabled) =
            unsafe { self.call(&Source::Vector(&vector), &extent, &options, context)? };
        Ok(PendingRegion {
            number,
            parts: Some((handle, memory)),
            enabled,
            extent,
            access: options.access,
            domain: self.clone(),
        })
    }
}

/// A registration that is not finished yet, which owns the memory.
///
/// Where the provider registers asynchronously, the event ends the wait:
///
/// ```
/// use std::time::Duration;
/// use fabric::*;
/// let offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first()?;
/// let fabric = Fabric::open(&offer)?;
/// let mut events = EventQueue::open(&fabric)?;
/// match Domain::open_asynchronous(&fabric, &offer, &events) {
///     Ok(domain) => {
///         let pending = domain.register_asynchronously(HostMemory::zeroed(4096)?, Access::ALL)?;
///         let region = pending.wait(&mut events, Duration::from_secs(5))?;
///         assert_eq!(region.len(), 4096);
///     }
///     Err(refused) => println!("{refused}"), // most providers register synchronously only
/// }
/// # Ok::<(), fabric::Error>(())
/// ```
#[derive(Debug)]
pub struct PendingRegion {
    number: usize,
    /// The registration and its memory, until `finish` takes them.
    parts: Option<(Handle<sys::fid_mr>, Keepalive)>,
    enabled: bool,
    extent: Extent,
    access: Access,
    domain: Domain,
}

impl Drop for PendingRegion {
    fn drop(&mut self) {
        let Some((handle, memory)) = self.parts.take() else { return };
        if self.domain.is_inherited() {
            std::mem::forget((handle, memory));
            return;
        }
        drop(self.domain.deregistration_lock().close(handle, Some(memory), self.extent.length));
    }
}

// SAFETY: see RegionInner.
unsafe impl Send for PendingRegion {}

impl PendingRegion {
    /// Is this event about this registration?
    #[must_use]
    pub fn is_done_by(&self, event: &Event) -> bool {
        matches!((event, &self.parts), (Event::RegistrationComplete(done), Some((handle, _)))
            if done.is_of(self.number, handle.as_fid()))
    }

    /// Finishes the registration after its event arrived.
    ///
    /// # Errors
    /// Returns the pending region, with the reason, if the event belongs to another
    /// registration.
    pub fn finish(
        mut self,
        event: &Event,
    ) -> std::result::Result<MemoryRegion, Box<(Self, Error)>> {
        if self.is_done_by(event)
            && let Some((handle, memory)) = self.parts.take()
        {
            let domain = self.domain.clone();
            return Ok(MemoryRegion::new(
                domain,
                Some(handle),
                self.extent,
                self.access,
                Some(memory),
                self.enabled,
            ));
        }
        let detail = "the event belongs to another registration";
        let error = Error::new(ErrorKind::InvalidArgument, "finish registration", detail);
        Err(Box::new((self, error)))
    }

    /// Waits for its event and finishes. Other events on the queue are dropped, so the queue
    /// must be used for registrations only.
    ///
    /// # Errors
    /// `DeadlineExceeded` (the memory is then leaked on purpose, because the provider may still
    /// use it), or the reported failure.
    pub fn wait(self, events: &mut EventQueue, timeout: Duration) -> Result<MemoryRegion> {
        let deadline = Deadline::after(timeout);
        loop {
            match events.wait(deadline.left()) {
                Ok(event) if self.is_done_by(&event) => {
                    return self.finish(&event).map_err(|refused| refused.1);
                }
                Ok(_) => {}
                Err(error) => {
                    // A failed registration is over, and closing it frees the memory. A late
                    // one is not over.
                    if error.kind() == ErrorKind::DeadlineExceeded {
                        std::mem::forget(self);
                    }
                    return Err(error);
                }
            }
        }
    }
}
