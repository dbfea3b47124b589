//! A registered region, and slices of it.
#![allow(unsafe_code)]

use std::ops::Range;
use std::os::raw::c_void;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use libfabric_sys as sys;
use threads::lock;

use super::bound::{BoundRegistrations, Registration};
use super::descriptor::{RemoteKey, RemoteRegion};
use super::{Extent, MemoryRegion, RegionInner, RegionSlice};
use crate::deregistration::Keepalive;
use crate::error::number::TOO_SMALL;
use crate::handle::Handle;
use crate::{Access, Counter, Domain, Error, ErrorKind, MemoryKind, MrMode, Result};

// SAFETY: the pointers name memory that `memory` (or the contract of an unsafe constructor)
// keeps alive, and that is only accessed by raw copies.
unsafe impl Send for RegionInner {}
// SAFETY: as above.
unsafe impl Sync for RegionInner {}

impl Extent {
    /// One buffer.
    pub(super) fn of(base: *mut u8, length: usize, kind: MemoryKind) -> Self {
        Self { base, length, contiguous_length: length, kind }
    }
}

impl MemoryRegion {
    pub(super) fn new(
        domain: Domain,
        handle: Option<Handle<sys::fid_mr>>,
        extent: Extent,
        access: Access,
        memory: Option<Keepalive>,
        enabled: bool,
    ) -> Self {
        let capabilities = domain.capabilities();
        let wanted = capabilities.needs_local_registration() || extent.kind.is_device();
        let descriptor = match &handle {
            // SAFETY: the registration is alive and finished.
            Some(handle) if wanted => unsafe { (*handle.as_ptr()).mem_desc },
            _ => std::ptr::null_mut(),
        };
        Self(Arc::new(RegionInner {
            registration: handle.map(|handle| Arc::new(Registration::new(handle))),
            bound_to: AtomicU64::new(0),
            extent,
            access,
            descriptor,
            enabled: AtomicBool::new(enabled),
            counters: Mutex::new(Vec::new()),
            domain,
            memory,
        }))
    }

    /// Length in bytes.
    #[must_use]
    #[inline]
    pub fn len(&self) -> usize {
        self.0.extent.length
    }

    /// The kind of memory.
    #[must_use]
    #[inline]
    pub fn kind(&self) -> MemoryKind {
        self.0.extent.kind
    }

    /// The access that it was registered for.
    #[must_use]
    #[inline]
    pub fn access(&self) -> Access {
        self.0.access
    }

    /// The domain that it is registered with.
    #[must_use]
    #[inline]
    pub fn domain(&self) -> &Domain {
        &self.0.domain
    }

    /// Address of the first byte.
    #[must_use]
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        self.0.extent.base
    }

    /// The local descriptor (`fi_mr_desc`) for raw posts; null if the provider requires none.
    #[must_use]
    #[inline]
    pub fn local_descriptor(&self) -> *mut c_void {
        self.0.descriptor
    }

    /// Does another clone, slice or operation in flight share the region? A `true` may be
    /// outdated when it is returned; a `false` is not.
    ///
    /// ```
    /// use fabric::*;
    /// let offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first()?;
    /// let region = Domain::open(&offer)?.register(HostMemory::zeroed(64)?, Access::ALL)?;
    /// assert!(!region.is_shared());
    /// let slice = region.slice(0..8)?;
    /// assert!(region.is_shared());
    /// # Ok::<(), fabric::Error>(())
    /// ```
    #[must_use]
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// Is the region registered? A region for local use needs no registration unless the
    /// provider requires it.
    #[must_use]
    pub fn is_registered(&self) -> bool {
        self.0.registration.is_some()
    }

    /// May peers use it already? (See [`enable`](Self::enable).)
    #[must_use]
    pub fn is_enabled(&self) -> bool {
        self.0.enabled.load(Ordering::Acquire)
    }

    /// Objects that are bound together must come from one domain: providers cast without a
    /// check.
    fn check_same_domain(&self, other: &Domain) -> Result<()> {
        if self.0.domain.is_same(other) {
            return Ok(());
        }
        let detail = "the two objects belong to different domains";
        Err(self.0.domain.error(ErrorKind::InvalidArgument, "fi_mr_bind", detail))
    }

    fn registration(&self, operation: &'static str) -> Result<&Arc<Registration>> {
        self.0.registration.as_ref().ok_or_else(|| {
            let detail =
                "the region is for local use and the provider needs no registration for that";
            self.0.domain.error(ErrorKind::InvalidArgument, operation, detail)
        })
    }

    /// Makes a call with the registration, and prevents closing it during the call.
    fn with_handle<T>(
        &self,
        operation: &'static str,
        call: impl FnOnce(&Handle<sys::fid_mr>) -> T,
    ) -> Result<T> {
        match &*self.registration(operation)?.lock_handle() {
            Some(handle) => Ok(call(handle)),
            None => {
                let detail = "the endpoint that the region is bound to is closed, and so is its \
                              registration";
                Err(self.0.domain.error(ErrorKind::Closed, operation, detail))
            }
        }
    }

    /// The key, from `fi_mr_key`.
    ///
    /// # Errors
    /// `KeyUnavailable` if the provider has raw keys only, or the region is not enabled yet.
    pub fn key(&self) -> Result<u64> {
        // SAFETY: the registration is alive and finished.
        let key = self.with_handle("fi_mr_key", |region| unsafe { (*region.as_ptr()).key })?;
        if key == sys::FI_KEY_NOTAVAIL {
            let detail = match self.is_enabled() {
                true => "the provider has raw keys only (FI_MR_RAW)",
                false => "the region is not enabled yet",
            };
            return Err(self.0.domain.error(ErrorKind::KeyUnavailable, "fi_mr_key", detail));
        }
        Ok(key)
    }

    /// Base address and raw key, from `fi_mr_raw_attr`.
    ///
    /// # Errors
    /// `NotSupported` if the provider has plain keys only.
    pub fn raw_key(&self) -> Result<(u64, Vec<u8>)> {
        let mut size = self.0.domain.capabilities().registration.mr_key_size.max(8);
        let mut key = vec![0_u8; size];
        let mut base = 0_u64;
        for _ in 0..2 {
            // SAFETY: the registration is alive, the buffer has `size` bytes; the outputs are valid.
            let code = self.with_handle("fi_mr_raw_attr", |region| unsafe {
                sys::fi_mr_raw_attr(region.as_fid(), &mut base, key.as_mut_ptr(), &mut size, 0)
            })?;
            if code == -TOO_SMALL && size > key.len() && size <= 1 << 16 {
                key.resize(size, 0);
                continue;
            }
            self.0.domain.check("fi_mr_raw_attr", code)?;
            key.truncate(size);
            return Ok((base, key));
        }
        let detail = "the provider keeps asking for a longer buffer";
        Err(self.0.domain.error(ErrorKind::Other, "fi_mr_raw_attr", detail))
    }

    /// Counts peers' accesses to this region (`fi_mr_bind` with a counter). Where the provider
    /// requires it (`MrMode::RMA_EVENT`), the region must be registered with that flag, and
    /// this call must precede `enable`.
    ///
    /// # Errors
    /// `NotSupported` if the provider does not count accesses to regions.
    pub fn bind_counter(&self, counter: &Counter) -> Result<()> {
        self.registration("fi_mr_bind")?;
        self.check_same_domain(counter.domain())?;
        // SAFETY: both objects are alive, of one domain, and the region retains the counter.
        let code = self.with_handle("fi_mr_bind", |region| unsafe {
            sys::fi_bind(region.as_fid(), counter.as_fid(), sys::FI_REMOTE_WRITE)
        })?;
        self.0.domain.check("fi_mr_bind", code).map_err(|e| match e.kind() {
            ErrorKind::InvalidArgument => {
                e.with_detail("the provider does not count remote accesses to regions")
            }
            _ => e,
        })?;
        lock(&self.0.counters).push(counter.clone());
        Ok(())
    }

    /// Binds the region to an endpoint, which closes the registration before it is closed.
    ///
    /// # Safety
    /// The endpoint is open, and of this domain.
    pub(crate) unsafe fn bind_to(
        &self,
        domain: &Domain,
        endpoint: *mut sys::fid,
        bound: &BoundRegistrations,
    ) -> Result<()> {
        let registration = self.registration("fi_mr_bind")?;
        self.check_same_domain(domain)?;
        // SAFETY: both objects are alive, and of one domain.
        let code = self.with_handle("fi_mr_bind", |region| unsafe {
            sys::fi_bind(region.as_fid(), endpoint, 0)
        })?;
        self.0.domain.check("fi_mr_bind", code)?;
        bound.add(registration);
        self.0.bound_to.store(bound.number(), Ordering::Release);
        Ok(())
    }

    /// May the endpoint with these bound registrations use it? Not if it is bound to another
    /// endpoint, or to one that has been closed.
    #[inline]
    pub(crate) fn is_usable_with(&self, domain: &Domain, bound: &BoundRegistrations) -> bool {
        let bound_to = self.0.bound_to.load(Ordering::Acquire);
        self.0.domain.is_same(domain) && (bound_to == 0 || bound_to == bound.number())
    }

    /// Is this range inside the region, and contiguous?
    #[inline]
    pub(crate) fn contains(&self, offset: usize, length: usize) -> bool {
        offset.checked_add(length).is_some_and(|end| end <= self.0.extent.contiguous_length)
    }

    /// Enables the access of peers where registration left the region disabled
    /// (`MrMode::ENDPOINT`, `MrMode::RMA_EVENT`); otherwise does nothing.
    ///
    /// # Errors
    /// The provider's error.
    pub fn enable(&self) -> Result<()> {
        if self.0.enabled.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        // SAFETY: the registration is alive.
        let code =
            self.with_handle("fi_mr_enable", |region| unsafe { sys::fi_enable(region.as_fid()) });
        let enabled = code.and_then(|code| self.0.domain.check("fi_mr_enable", code));
        enabled.inspect_err(|_| self.0.enabled.store(false, Ordering::Release))
    }

    /// Reports to the provider that pages of this range changed, as `MrMode::MMU_NOTIFY`
    /// requires; otherwise does nothing.
    ///
    /// # Errors
    /// `OutOfBounds`, or the provider's error.
    pub fn refresh(&self, range: Range<usize>) -> Result<()> {
        if !self.0.domain.capabilities().registration.mr_mode.contains(MrMode::MMU_NOTIFY) {
            return self.slice(range).map(drop);
        }
        self.force_refresh(range)
    }

    /// Calls `fi_mr_refresh` whether or not the provider requires it.
    ///
    /// # Errors
    /// `OutOfBounds`; `NotSupported` from providers without the call.
    pub fn force_refresh(&self, range: Range<usize>) -> Result<()> {
        let slice = self.slice(range)?;
        let vector = sys::iovec { iov_base: slice.as_ptr().cast(), iov_len: slice.len() };
        // SAFETY: the registration is alive; one element, alive for the call.
        let code = self.with_handle("fi_mr_refresh", |region| unsafe {
            sys::fi_mr_refresh(region.as_fid(), &vector, 1, 0)
        })?;
        self.0.domain.check("fi_mr_refresh", code)
    }

    /// The region descriptor, by which a peer reaches this region.
    ///
    /// # Errors
    /// `AccessDenied` if it grants no remote access; `KeyUnavailable` before it is enabled.
    pub fn describe(&self) -> Result<RemoteRegion> {
        let operation = "describe region";
        if !self.0.access.intersects(Access::REMOTE) {
            let detail = "the region was registered without remote access";
            return Err(self.0.domain.error(ErrorKind::AccessDenied, operation, detail));
        }
        if !self.is_enabled() {
            let detail = "the region is not enabled yet: bind it, then call enable";
            return Err(self.0.domain.error(ErrorKind::KeyUnavailable, operation, detail));
        }
        let capabilities = self.0.domain.capabilities();
        let mode = capabilities.registration.mr_mode.without_deprecated();
        let virtual_base =
            if mode.contains(MrMode::VIRT_ADDR) { self.0.extent.base as u64 } else { 0 };
        let (base, key) = if mode.contains(MrMode::RAW) {
            let (base, key) = self.raw_key()?;
            (base, RemoteKey::Raw(key))
        } else {
            (virtual_base, RemoteKey::Plain(self.key()?))
        };
        Ok(RemoteRegion::new(
            capabilities.protocol,
            self.0.extent.kind,
            self.0.access,
            // The source of providers shows that of several buffers they check, and reach, only
            // the first: the others are not announced.
            self.0.extent.contiguous_length as u64,
            base,
            key,
        ))
    }

    /// A part of the region, for use in an operation.
    ///
    /// # Errors
    /// `OutOfBounds`.
    pub fn slice(&self, range: Range<usize>) -> Result<RegionSlice> {
        if range.start > range.end || range.end > self.0.extent.contiguous_length {
            let length = self.0.extent.contiguous_length;
            let detail = format!("{range:?} of a region of {length} bytes");
            return Err(Error::new(ErrorKind::OutOfBounds, "slice region", detail));
        }
        Ok(RegionSlice { region: self.clone(), offset: range.start, length: range.len() })
    }

    /// The whole region (of a region of several buffers, the first one).
    #[must_use]
    pub fn all(&self) -> RegionSlice {
        RegionSlice { region: self.clone(), offset: 0, length: self.0.extent.contiguous_length }
    }
}

impl Drop for RegionInner {
    fn drop(&mut self) {
        if self.domain.is_inherited() {
            // In a forked child: the parent's peers continue to access the memory.
            std::mem::forget(self.memory.take());
            return;
        }
        let Some(registration) = &self.registration else { return };
        // Held until it is closed: the endpoint that it is bound to waits for that.
        let mut held = registration.lock_handle();
        let Some(handle) = held.take() else {
            // Closed before its endpoint.
            if registration.close_failed() {
                std::mem::forget(self.memory.take());
            }
            return;
        };
        let memory =
            self.domain.deregistration_lock().close(handle, self.memory.take(), self.extent.length);
        // The memory belongs to the caller, and may close the endpoint when it is dropped.
        drop(held);
        drop(memory);
    }
}

impl RegionSlice {
    /// Address of the first byte.
    #[must_use]
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        // SAFETY: inside the region, checked when the slice was made.
        unsafe { self.region.0.extent.base.add(self.offset) }
    }

    /// Length in bytes.
    #[must_use]
    #[inline]
    pub fn len(&self) -> usize {
        self.length
    }

    /// Is the slice empty?
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The offset of the slice in its region.
    #[must_use]
    #[inline]
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// The region that contains the slice.
    #[must_use]
    pub fn region(&self) -> MemoryRegion {
        self.region.clone()
    }

    #[inline]
    pub(crate) fn as_region(&self) -> &MemoryRegion {
        &self.region
    }

    #[inline]
    pub(crate) fn access(&self) -> Access {
        self.region.0.access
    }
}
