//! Registering memory (`fi_mr_reg`, `fi_mr_regv`, `fi_mr_regattr`).
//!
//! Providers differ in what they require of a registration (`mr_mode`), and in what they check.
//! So ranges are examined here first. Where the provider leaves the choice, keys are drawn at
//! random, so that one key reveals nothing about another. A bare `EINVAL` is returned with the
//! precondition that was probably violated.
#![allow(unsafe_code)]

use std::fmt::Display;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::raw::c_void;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use libfabric_sys as sys;

use super::{Extent, MemoryRegion, range};
use crate::deregistration::Keepalive;
use crate::error::number;
use crate::flags::names;
use crate::handle::Handle;
use crate::{
    Access, Caps, Domain, Error, ErrorKind, HostMemory, Memory, MemoryKind, MrMode,
    RegistrationFlags, Result, Version,
};

/// How to register: access, and all other fields of `struct fi_mr_attr`.
///
/// ```
/// use fabric::{Access, RegistrationOptions};
/// let options = RegistrationOptions::new(Access::ALL).requested_key(0x1234);
/// # let _ = options;
/// ```
#[derive(Debug, Clone)]
pub struct RegistrationOptions {
    pub(super) access: Access,
    flags: RegistrationFlags,
    requested_key: Option<u64>,
    offset: u64,
    authorization_key: Vec<u8>,
    /// Registers even if the provider needs no registration.
    force_registration: bool,
}

impl RegistrationOptions {
    /// Options with this access. Unlike bare access flags, options always lead to a
    /// registration, even if the provider does not need one.
    #[must_use]
    pub fn new(access: Access) -> Self {
        Self { force_registration: true, ..Self::from(access) }
    }

    /// Flags of the registration.
    #[must_use]
    pub fn flags(mut self, flags: RegistrationFlags) -> Self {
        self.flags = flags;
        self
    }

    /// Requests this key. Without it the library draws an unguessable key where the provider
    /// leaves the choice.
    #[must_use]
    pub fn requested_key(mut self, key: u64) -> Self {
        self.requested_key = Some(key);
        self
    }

    /// libfabric reserves this; anything but 0 is refused.
    #[must_use]
    pub fn offset(mut self, offset: u64) -> Self {
        self.offset = offset;
        self
    }

    /// Limits the region to endpoints with this authorization key.
    #[must_use]
    pub fn authorization_key(mut self, key: Vec<u8>) -> Self {
        self.authorization_key = key;
        self
    }
}

impl From<Access> for RegistrationOptions {
    fn from(access: Access) -> Self {
        Self {
            access,
            flags: RegistrationFlags::empty(),
            requested_key: None,
            offset: 0,
            authorization_key: Vec::new(),
            force_registration: false,
        }
    }
}

/// Memory named by a dma-buf file descriptor.
///
/// The file descriptor is borrowed: the provider takes its own reference to the buffer while it
/// registers, and the caller may close the file afterwards.
///
/// ```
/// use std::os::fd::AsFd;
/// use fabric::{DmaBuf, MemoryKind};
/// # let file = std::fs::File::open("/dev/null").unwrap();
/// // `file` came from the driver that exported the buffer.
/// let base = 0x7000_1000 as *mut u8; // its address on the device
/// let second_page =
///     DmaBuf { fd: file.as_fd(), offset: 4096, length: 4096, base, kind: MemoryKind::Cuda(0) };
/// assert!(second_page.kind.is_device());
/// ```
#[derive(Debug)]
pub struct DmaBuf<'fd> {
    /// The dma-buf.
    pub fd: BorrowedFd<'fd>,
    /// The offset of the region in it, in bytes. Allocations are often carved out of a larger
    /// buffer, so this is seldom 0 for pooled memory.
    pub offset: u64,
    /// Length of the region.
    pub length: usize,
    /// The application's address of the region's first byte.
    pub base: *mut u8,
    /// The kind of memory.
    pub kind: MemoryKind,
}

/// The operation in errors.
pub(super) const OPERATION: &str = "fi_mr_regattr";

static REGISTRATIONS: AtomicU64 = AtomicU64::new(0);

/// Regions that this process has registered so far. Registering pins pages, 0.5 s for each GiB
/// of them: a number that grows with the traffic means that the application registers per
/// message.
///
/// ```
/// use fabric::*;
/// let offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first()?;
/// let domain = Domain::open(&offer)?;
/// let before = registrations();
/// let region = domain.register(HostMemory::zeroed(64)?, Access::ALL)?;
/// assert!(registrations() > before);
/// # Ok::<(), fabric::Error>(())
/// ```
#[must_use]
pub fn registrations() -> u64 {
    REGISTRATIONS.load(Ordering::Relaxed)
}

pub(super) enum Source<'a> {
    Vector(&'a [sys::iovec]),
    DmaBuf(&'a DmaBuf<'a>),
}

impl Domain {
    /// Registers memory and takes ownership of it. With bare access flags, an unneeded
    /// registration (local use only) is skipped.
    ///
    /// # Errors
    /// `InvalidArgument`, `OutOfBounds` or `NotMapped` for a range that cannot be registered,
    /// `KeyInUse`/`KeyUnavailable` for a requested key, `NotSupported` for a memory kind or
    /// flag, `Truncated` if the memory is longer than the provider registers.
    pub fn register(
        &self,
        memory: impl Memory,
        options: impl Into<RegistrationOptions>,
    ) -> Result<MemoryRegion> {
        self.register_vector(vec![Box::new(memory)], options)
    }

    /// Registers several buffers as one region (`fi_mr_regv`); offsets run through them in
    /// order.
    ///
    /// # Errors
    /// As [`register`](Self::register); `InvalidArgument` for more buffers than
    /// the provider takes.
    pub fn register_vector(
        &self,
        memory: Vec<Box<dyn Memory>>,
        options: impl Into<RegistrationOptions>,
    ) -> Result<MemoryRegion> {
        let options = options.into();
        let (vector, extent) = self.check_buffers(&memory)?;
        // SAFETY: `memory` keeps the ranges valid and moves into the region.
        unsafe { self.register_checked(&vector, extent, Some(memory), &options) }
    }

    /// Registers memory that the region does not own.
    ///
    /// # Safety
    /// The range must stay valid for reads and writes, whatever the access
    /// ([`MemoryRegion::write`] does not check it), until the region (all clones, slices and
    /// operations) is gone. No Rust reference to its bytes may be used while peers can write
    /// it.
    ///
    /// # Errors
    /// As [`register`](Self::register).
    pub unsafe fn register_raw(
        &self,
        base: *mut u8,
        length: usize,
        kind: MemoryKind,
        options: impl Into<RegistrationOptions>,
    ) -> Result<MemoryRegion> {
        let options = options.into();
        self.check_range(base, length, kind)?;
        let vector = [sys::iovec { iov_base: base.cast(), iov_len: length }];
        // SAFETY: by contract.
        unsafe { self.register_checked(&vector, Extent::of(base, length, kind), None, &options) }
    }

    /// Registers a dma-buf, for device memory that the kernel exports to other devices. Needs
    /// libfabric 1.20 headers and library.
    ///
    /// # Safety
    /// As [`register_raw`](Self::register_raw), for the memory behind the dma-buf.
    ///
    /// # Errors
    /// `NotSupported` if headers or library are older, or the provider refuses.
    pub unsafe fn register_dma_buf(
        &self,
        buffer: &DmaBuf<'_>,
        options: impl Into<RegistrationOptions>,
    ) -> Result<MemoryRegion> {
        // SAFETY: by contract.
        unsafe { self.register_dma_buf_of(buffer, options.into(), None) }
    }

    /// # Safety
    /// As [`register_dma_buf`](Self::register_dma_buf), unless `memory` keeps the memory.
    unsafe fn register_dma_buf_of(
        &self,
        buffer: &DmaBuf<'_>,
        options: RegistrationOptions,
        memory: Option<Keepalive>,
    ) -> Result<MemoryRegion> {
        if !Version::has_dma_buf() {
            let detail = format!(
                "dma-buf needs libfabric 1.20; headers are {}, the library is {}",
                Version::headers(),
                Version::running()
            );
            return Err(self.error(ErrorKind::NotSupported, OPERATION, detail));
        }
        self.refuse_if_asynchronous()?;
        self.check_device(&"a dma-buf", buffer.kind)?;
        let add_provider = |e| self.add_provider(e);
        range::check(OPERATION, buffer.base as usize, buffer.length).map_err(add_provider)?;
        if buffer.offset > buffer.base as u64 {
            let detail =
                format!("offset {:#x} lies before address 0 of the dma-buf", buffer.offset);
            return Err(self.error(ErrorKind::OutOfBounds, OPERATION, detail));
        }
        let extent = Extent::of(buffer.base, buffer.length, buffer.kind);
        // SAFETY: by contract.
        let (handle, enabled) =
            unsafe { self.call(&Source::DmaBuf(buffer), &extent, &options, ptr::null_mut())? };
        Ok(MemoryRegion::new(self.clone(), Some(handle), extent, options.access, memory, enabled))
    }

    /// Checks the offer: some providers accept a device registration that they cannot honour and
    /// then treat the address as host memory, or use the number of an emulated device as an index.
    fn check_device(&self, what: &dyn Display, kind: MemoryKind) -> Result<()> {
        let is_emulated = matches!(kind, MemoryKind::Emulated(_));
        let detail = if !self.capabilities().caps.contains(Caps::DEVICE_MEMORY) {
            format!("{what}: the domain was not opened with Caps::DEVICE_MEMORY (FI_HMEM)")
        } else if is_emulated && !self.offer().is_emulated() {
            format!("{kind} memory: libfabric has no emulated devices")
        } else {
            return Ok(());
        };
        Err(self.error(ErrorKind::NotSupported, OPERATION, detail))
    }

    /// Registers device memory by the dma-buf that contains it, at this offset, and takes ownership
    /// of the memory. The file may be closed afterwards.
    ///
    /// # Safety
    /// The dma-buf names this memory: the byte at `offset` in it is the first byte of `memory`.
    ///
    /// # Errors
    /// As [`register_dma_buf`](Self::register_dma_buf); `NotSupported` for a provider that does not
    /// [take dma-bufs](crate::Capabilities::takes_dma_buf).
    pub unsafe fn register_exported(
        &self,
        memory: impl Memory,
        fd: BorrowedFd<'_>,
        offset: u64,
        options: impl Into<RegistrationOptions>,
    ) -> Result<MemoryRegion> {
        if !self.capabilities().takes_dma_buf() {
            let detail = "the provider does not take dma-bufs (FI_MR_DMABUF)";
            return Err(self.error(ErrorKind::NotSupported, OPERATION, detail));
        }
        let (base, length, kind) = (memory.as_ptr(), memory.len(), memory.kind());
        let buffer = DmaBuf { fd, offset, length, base, kind };
        let memory: Keepalive = vec![Box::new(memory)];
        // SAFETY: by contract; the memory moves into the region.
        unsafe { self.register_dma_buf_of(&buffer, options.into(), Some(memory)) }
    }

    /// Can this build of libfabric, with the installed runtimes, register memory of this kind?
    ///
    /// Tries it: registers a page of host memory as device memory, and closes it at once;
    /// nothing is ever transferred with it. Only a clear refusal counts. A provider that
    /// objects to the page itself has shown that it knows the device.
    ///
    /// # Errors
    /// `NotSupported`, with the reason; `InvalidArgument` on a domain that registers
    /// asynchronously, where the test is impossible.
    pub fn probe_memory(&self, kind: MemoryKind) -> Result<()> {
        self.refuse_if_asynchronous()?;
        let page = HostMemory::zeroed(range::page_size())?;
        // SAFETY: the page outlives the region, which is dropped here, and no key of it leaves
        // this function.
        let result = unsafe { self.register_raw(page.as_ptr(), page.len(), kind, Access::ALL) };
        match result {
            Err(error) if error.kind() == ErrorKind::NotSupported => Err(error),
            _ => Ok(()),
        }
    }

    fn refuse_if_asynchronous(&self) -> Result<()> {
        if !self.is_asynchronous() {
            return Ok(());
        }
        let detail = "this domain registers asynchronously: use register_asynchronously";
        Err(self.error(ErrorKind::InvalidArgument, OPERATION, detail))
    }

    pub(super) fn check_buffers(
        &self,
        memory: &[Box<dyn Memory>],
    ) -> Result<(Vec<sys::iovec>, Extent)> {
        let refuse = |detail: String| self.error(ErrorKind::InvalidArgument, OPERATION, detail);
        let Some(first) = memory.first() else { return Err(refuse("no buffer".to_owned())) };
        let limit = self.capabilities().registration.mr_iov_limit;
        if memory.len() > limit {
            return Err(refuse(format!("{} buffers, the provider takes {limit}", memory.len())));
        }
        let mut vector = Vec::with_capacity(memory.len());
        let mut length = 0;
        for buffer in memory {
            if buffer.kind() != first.kind() {
                return Err(refuse("buffers of different kinds in one region".to_owned()));
            }
            self.check_range(buffer.as_ptr(), buffer.len(), buffer.kind())?;
            vector.push(sys::iovec { iov_base: buffer.as_ptr().cast(), iov_len: buffer.len() });
            length += buffer.len();
        }
        let (base, contiguous_length, kind) = (first.as_ptr(), first.len(), first.kind());
        Ok((vector, Extent { base, length, contiguous_length, kind }))
    }

    fn check_range(&self, base: *mut u8, length: usize, kind: MemoryKind) -> Result<()> {
        let base = base as usize;
        let add_provider = |e| self.add_provider(e);
        if kind.is_device() {
            self.check_device(&format_args!("{kind} memory"), kind)?;
            // Device addresses mean nothing in the host's address space.
            if length == 0 || base.checked_add(length).is_none() {
                range::check(OPERATION, base, length).map_err(add_provider)?;
            }
            return Ok(());
        }
        range::check(OPERATION, base, length).map_err(add_provider)?;
        let mode = self.capabilities().registration.mr_mode.without_deprecated();
        if mode.contains(MrMode::ALLOCATED) {
            range::check_mapped(OPERATION, base, length).map_err(add_provider)?;
        }
        Ok(())
    }

    /// # Safety
    /// The ranges are valid as long as the region lives.
    unsafe fn register_checked(
        &self,
        vector: &[sys::iovec],
        extent: Extent,
        memory: Option<Keepalive>,
        options: &RegistrationOptions,
    ) -> Result<MemoryRegion> {
        let needed = options.force_registration
            || options.access.intersects(Access::REMOTE)
            || extent.kind.is_device()
            || self.capabilities().needs_local_registration();
        if !needed {
            return Ok(MemoryRegion::new(self.clone(), None, extent, options.access, memory, true));
        }
        self.refuse_if_asynchronous()?;
        // SAFETY: by contract.
        let (handle, enabled) =
            unsafe { self.call(&Source::Vector(vector), &extent, options, ptr::null_mut())? };
        Ok(MemoryRegion::new(self.clone(), Some(handle), extent, options.access, memory, enabled))
    }

    /// One registration call, repeated with another key if the library's random key is in use.
    ///
    /// # Safety
    /// The source's ranges are valid as long as the registration lives.
    pub(super) unsafe fn call(
        &self,
        source: &Source<'_>,
        extent: &Extent,
        options: &RegistrationOptions,
        context: *mut c_void,
    ) -> Result<(Handle<sys::fid_mr>, bool)> {
        if options.offset != 0 {
            // Providers without this check would register another range.
            let detail = "offset is reserved and must be 0";
            return Err(self.error(ErrorKind::InvalidArgument, OPERATION, detail));
        }
        if options.requested_key == Some(sys::FI_KEY_NOTAVAIL) {
            let detail = "this key means \"no key\" (FI_KEY_NOTAVAIL)";
            return Err(self.error(ErrorKind::KeyUnavailable, OPERATION, detail));
        }
        let capabilities = self.capabilities();
        let mode = capabilities.registration.mr_mode.without_deprecated();
        let chooses_key = !mode.contains(MrMode::PROV_KEY);
        let enabled = starts_enabled(mode, options.flags);
        let mut attempts = 0;
        loop {
            attempts += 1;
            let key = match options.requested_key {
                Some(key) => key,
                None if chooses_key => random_key(capabilities.registration.mr_key_size)?,
                None => 0,
            };
            let mut request = sys::fcs_mr_request {
                access: (options.access & Access::all()).bits(),
                offset: options.offset,
                requested_key: key,
                context,
                auth_key_size: options.authorization_key.len(),
                auth_key: options.authorization_key.as_ptr().cast_mut(),
                iface: extent.kind.interface(),
                device: u64::from(extent.kind.device().cast_unsigned()),
                // Unknown bits could mean anything to the provider.
                flags: (options.flags & RegistrationFlags::all()).bits(),
                ..Default::default()
            };
            if options.authorization_key.is_empty() {
                request.auth_key = ptr::null_mut();
            }
            match source {
                Source::Vector(vector) => {
                    request.iov = vector.as_ptr();
                    request.iov_count = vector.len();
                }
                Source::DmaBuf(buffer) => {
                    request.use_dmabuf = 1;
                    request.dmabuf_fd = buffer.fd.as_raw_fd();
                    request.dmabuf_offset = buffer.offset;
                    request.dmabuf_len = buffer.length;
                    // libfabric requires the address of the beginning of the dma-buf.
                    let beginning = buffer.base.wrapping_sub(buffer.offset as usize);
                    request.dmabuf_base = beginning.cast();
                }
            }
            let mut region = ptr::null_mut();
            let registration_guard = self.deregistration_lock().lock_registration();
            // SAFETY: the request's pointers are valid for the call, the ranges
            // as long as the registration lives; `region` receives the object.
            let code = unsafe { sys::register_memory(self.as_ptr(), &request, &mut region) };
            drop(registration_guard);
            if code == 0 {
                REGISTRATIONS.fetch_add(1, Ordering::Relaxed);
                // SAFETY: just created, and owned here.
                return Ok((unsafe { Handle::adopt(OPERATION, region)? }, enabled));
            }
            let taken = code == -number::NO_KEY;
            if taken && options.requested_key.is_none() && chooses_key && attempts < 8 {
                continue;
            }
            return Err(self.explain(code, extent, options));
        }
    }

    /// libfabric answers many faults with a bare EINVAL or ENOSYS: adds the precondition that
    /// was probably violated.
    fn explain(&self, code: i32, extent: &Extent, options: &RegistrationOptions) -> Error {
        let error = self.add_provider(Error::from_code(OPERATION, code));
        let mode = self.capabilities().registration.mr_mode.without_deprecated();
        let key_is_chosen = options.requested_key.is_some();
        match -code {
            number::NO_KEY => error.with_detail("the requested key is in use in this domain"),
            sys::FI_EKEYREJECTED => error
                .with_kind(ErrorKind::KeyUnavailable)
                .with_detail("the requested key is out of the provider's range"),
            sys::FI_ENOSYS if extent.kind.is_device() => error.with_detail(format!(
                "libfabric was built without support for {} memory, or its runtime is missing",
                extent.kind
            )),
            number::BAD_FLAGS => error.with_detail(format!(
                "flags {} are not supported for registrations",
                names(&options.flags).join(", ")
            )),
            sys::FI_EINVAL if options.access.is_empty() => {
                error.with_detail("no access is requested")
            }
            sys::FI_EINVAL if key_is_chosen && mode.contains(MrMode::PROV_KEY) => error
                .with_kind(ErrorKind::KeyUnavailable)
                .with_detail("the provider chooses the keys (FI_MR_PROV_KEY)"),
            sys::FI_EINVAL | sys::FI_EFAULT | sys::FI_EOPNOTSUPP if extent.kind.is_device() => {
                error.with_detail(format!(
                    "the network card cannot access {} bytes of {} memory: GPUDirect RDMA \
                     (nvidia-peermem or dma-buf) may be missing, or the provider may not take \
                     memory of this allocator",
                    extent.length, extent.kind
                ))
            }
            sys::FI_ENOMEM | sys::FI_EAGAIN => error.with_detail(format!(
                "{} bytes could not be pinned: is the locked-memory limit (ulimit -l) too low?",
                extent.length
            )),
            _ => error.with_detail(format!("{} bytes of {} memory", extent.length, extent.kind)),
        }
    }

    /// Maps a raw key for use in operations; [`attach`](Self::attach) calls it where needed.
    pub(crate) fn map_raw_key(&self, base: u64, key: &[u8]) -> Result<u64> {
        let mut raw = key.to_vec();
        let mut mapped = 0;
        // SAFETY: the key's buffer and length match; `mapped` receives the result.
        let code = unsafe {
            let (domain, size) = (self.as_ptr().cast(), raw.len());
            sys::fi_mr_map_raw(domain, base, raw.as_mut_ptr(), size, &mut mapped, 0)
        };
        self.check("fi_mr_map_raw", code)?;
        Ok(mapped)
    }

    pub(crate) fn unmap_key(&self, key: u64) {
        // SAFETY: the key came from map_raw_key of this domain and is released once.
        let code = unsafe { sys::fi_mr_unmap_key(self.as_ptr().cast(), key) };
        if let Err(error) = self.check("fi_mr_unmap_key", code) {
            tracing::error!(%error, "a mapped key could not be released");
        }
    }
}

/// Can peers access a region as soon as it is registered, or must it be bound first?
fn starts_enabled(mode: MrMode, flags: RegistrationFlags) -> bool {
    let counts = mode.contains(MrMode::RMA_EVENT) && flags.contains(RegistrationFlags::RMA_EVENT);
    !mode.contains(MrMode::ENDPOINT) && !counts
}

/// A key that a peer cannot guess, of the provider's key size.
fn random_key(size: usize) -> Result<u64> {
    let no_key = |error| Error::new(ErrorKind::Other, OPERATION, format!("no random key: {error}"));
    let key = getrandom::u64().map_err(no_key)?;
    Ok(match size {
        1..8 => key & ((1 << (8 * size)) - 1),
        // All ones means "no key".
        _ => key & !(1 << 63),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn region_starts_disabled_if_it_must_be_bound() {
        let (none, events) = (RegistrationFlags::empty(), RegistrationFlags::RMA_EVENT);
        assert!(starts_enabled(MrMode::empty(), none));
        assert!(starts_enabled(MrMode::empty(), events), "the provider counts without it");
        assert!(starts_enabled(MrMode::RMA_EVENT, none), "this region counts nothing");
        assert!(!starts_enabled(MrMode::RMA_EVENT, events));
        assert!(!starts_enabled(MrMode::ENDPOINT, none));
        assert!(!starts_enabled(MrMode::ENDPOINT | MrMode::VIRT_ADDR, events));
    }

    #[test]
    fn random_keys_fit_the_key_size_and_are_valid() {
        for size in 1..=8 {
            for _ in 0..100 {
                let key = random_key(size).unwrap();
                assert!(size == 8 || key < 1 << (8 * size), "{key:#x} in {size} bytes");
                assert_ne!(key, sys::FI_KEY_NOTAVAIL);
            }
        }
    }
}
