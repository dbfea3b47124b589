//! Opening a domain on a fabric.
//!
//! A domain is the unit of sharing: memory registered with it serves all its endpoints and no
//! others, and many providers run one progress engine per domain.
#![allow(unsafe_code)]

use std::borrow::Cow;
use std::ptr;
use std::sync::Arc;

use libfabric_sys as sys;

use crate::deregistration::DeregistrationLock;
use crate::event::EventQueueShared;
use crate::handle::Handle;
use crate::quirks::caches_registrations;
use crate::version::load_library;
use crate::{Capabilities, Error, ErrorKind, EventQueue, Fabric, Offer, Result, Version};

/// An open device or interface, from which endpoints, queues and registered memory are made.
/// Cheap to clone; it is closed after all objects made from it.
///
/// ```
/// use fabric::{Access, Domain, EndpointKind, HostMemory, Query};
/// let offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first()?;
/// let domain = Domain::open(&offer)?;
/// let region = domain.register(HostMemory::zeroed(4096)?, Access::ALL)?;
/// region.write(0, b"hello")?;
/// # Ok::<(), fabric::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Domain(Arc<DomainInner>);

#[derive(Debug)]
struct DomainInner {
    /// Deferred deregistrations, which must be closed before the domain.
    deregistration_lock: DeregistrationLock,
    handle: Handle<sys::fid_domain>,
    offer: Offer,
    /// The event queue of asynchronous registrations. Declared after the handle, because
    /// providers keep a bare pointer to it.
    registration_events: Option<Arc<EventQueueShared>>,
    fabric: Fabric,
}

impl Domain {
    /// Opens a fabric and a domain on it.
    ///
    /// # Errors
    /// The provider's error.
    pub fn open(offer: &Offer) -> Result<Self> {
        Self::open_on(&Fabric::open(offer)?, offer)
    }

    /// Opens a domain on an open fabric. Lanes that must run in parallel need a domain each on
    /// providers with one progress engine per domain. The endpoint of a connection request
    /// needs a domain of its listener's fabric; [`open`](Self::open) would open the fabric a
    /// second time.
    ///
    /// # Errors
    /// The provider's error.
    pub fn open_on(fabric: &Fabric, offer: &Offer) -> Result<Self> {
        Self::open_inner(fabric, offer, None)
    }

    /// Opens a domain whose registrations complete asynchronously: they report
    /// to this event queue.
    ///
    /// # Errors
    /// `NotSupported` if the provider registers synchronously only.
    pub fn open_asynchronous(fabric: &Fabric, offer: &Offer, events: &EventQueue) -> Result<Self> {
        Self::open_inner(fabric, offer, Some(events.shared_handle()))
    }

    fn open_inner(
        fabric: &Fabric,
        offer: &Offer,
        registration_events: Option<Arc<EventQueueShared>>,
    ) -> Result<Self> {
        let capabilities = offer.capabilities();
        if capabilities.provider != fabric.provider() {
            let detail = "the offer is of another provider than the fabric";
            return Err(fabric.error(ErrorKind::InvalidArgument, "fi_domain", detail));
        }
        // SAFETY: fabric and offer are alive; the object is owned here.
        let handle = unsafe {
            Handle::open("fi_domain", fabric.provider(), |domain| {
                sys::fi_domain(fabric.as_ptr(), offer.info.as_ptr(), domain, ptr::null_mut())
            })?
        };
        if let Some(events) = &registration_events {
            if !events.is_on(fabric) {
                let detail = "the event queue belongs to another fabric";
                return Err(fabric.error(ErrorKind::InvalidArgument, "fi_domain_bind", detail));
            }
            // SAFETY: both objects are alive and of one provider; the domain keeps
            // the event queue.
            let code =
                unsafe { sys::fi_bind(handle.as_fid(), events.as_fid(), sys::FABRICAST_REG_MR) };
            let detail = "the provider does not register memory asynchronously";
            fabric.check("fi_domain_bind", code).map_err(|e| e.with_detail(detail))?;
        }
        if caches_registrations(&capabilities.provider) {
            tracing::warn!(
                provider = %capabilities.provider,
                "the provider's registration cache keeps closed regions open to peers; \
                 set FI_MR_CACHE_MAX_COUNT=0 to have regions closed when they are closed"
            );
        }
        Ok(Self(Arc::new(DomainInner {
            deregistration_lock: DeregistrationLock::of(&capabilities.provider),
            handle,
            offer: offer.clone(),
            registration_events,
            fabric: fabric.clone(),
        })))
    }

    pub(crate) fn deregistration_lock(&self) -> &DeregistrationLock {
        &self.0.deregistration_lock
    }

    /// The facts of the offer this domain was opened from.
    #[must_use]
    pub fn capabilities(&self) -> &Capabilities {
        self.0.offer.capabilities()
    }

    /// The offer this domain was opened from.
    #[must_use]
    pub fn offer(&self) -> &Offer {
        &self.0.offer
    }

    /// The fabric this domain belongs to.
    #[must_use]
    pub fn fabric(&self) -> &Fabric {
        &self.0.fabric
    }

    pub(crate) fn is_asynchronous(&self) -> bool {
        self.0.registration_events.is_some()
    }

    pub(crate) fn as_ptr(&self) -> *mut sys::fid_domain {
        self.0.handle.as_ptr()
    }

    pub(crate) fn is_inherited(&self) -> bool {
        self.0.handle.is_inherited()
    }

    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    pub(crate) fn check(&self, operation: &'static str, code: i32) -> Result<()> {
        self.0.fabric.check(operation, code)
    }

    pub(crate) fn error(
        &self,
        kind: ErrorKind,
        operation: &'static str,
        detail: impl Into<Cow<'static, str>>,
    ) -> Error {
        self.0.fabric.error(kind, operation, detail)
    }

    pub(crate) fn add_provider(&self, error: Error) -> Error {
        error.with_provider(&self.capabilities().provider)
    }
}

/// Does this libfabric open its internal registration cache to applications (`fi_open` with the
/// name `mr_cache`)? The `FI_MR_CACHE_*` variables set its limits and monitors; this library
/// does not change them.
///
/// # Errors
/// libfabric's error if it does not; `NoLibrary` if libfabric is not installed.
pub fn probe_registration_cache() -> Result<()> {
    load_library("fi_open")?;
    let mut object: *mut sys::fid = ptr::null_mut();
    // SAFETY: a terminated name, no attributes; `object` receives the opened object and is
    // closed at once.
    unsafe {
        let (version, none) = (Version::api_version().packed(), ptr::null_mut());
        let code = sys::fi_open(version, c"mr_cache".as_ptr(), none, 0, 0, &mut object, none);
        Error::check("fi_open", code)?;
        Error::check("fi_close", sys::fi_close(object))?;
    }
    Ok(())
}
