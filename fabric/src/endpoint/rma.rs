//! One-sided reads and writes.
//!
//! The target's processor takes no part, so the target learns of a write only by
//! an immediate, by a later message on a provider that orders sends after writes,
//! or by looking at the bytes. A local completion without
//! [`TransferFlags::DELIVERY_COMPLETE`](crate::TransferFlags::DELIVERY_COMPLETE)
//! says that the source may be reused, and nothing about the target.
//!
//! Rights and bounds come with the peer's descriptor and are checked before
//! posting: not all targets look (rxm does not check `FI_REMOTE_READ`), and shm
//! reports a write with a wrong key as successful.

use std::os::raw::c_void;

use libfabric_sys as sys;

use super::Endpoint;
use super::post::{Options, Posting, Side, keep_mapping, keep_region};
use super::vectors::Vectors;
use crate::address::Peer;
use crate::error::{ErrorKind, Result};
use crate::flags::Access;
use crate::memory::{RegionSlice, RemoteSlice};
use crate::queue::{CompletionKind, CompletionQueue, OperationId};

const WRITE: (Side, CompletionKind) = (Side::Transmit, CompletionKind::Write);
const READ: (Side, CompletionKind) = (Side::Transmit, CompletionKind::Read);

impl Endpoint {
    /// Writes local bytes into a peer's region (`fi_write`). The region stays
    /// alive until the operation is done; its bytes must not change until then,
    /// or the peer may get either.
    ///
    /// # Errors
    /// `OutOfBounds`, `AccessDenied`, `NotSupported` before anything is sent;
    /// `DeadlineExceeded` if the provider takes nothing for as long as the options say.
    #[inline]
    pub fn write(
        &mut self,
        queue: &mut CompletionQueue,
        to: Peer,
        local: &RegionSlice,
        remote: &RemoteSlice,
        options: impl Into<Options>,
    ) -> Result<OperationId> {
        let options = options.into();
        if !options.flags.is_empty() {
            return self.write_gathered(queue, to, &[local], remote, None, options);
        }
        let operation = "fi_write";
        let peer = self.check_write(operation, to, local, remote)?;
        let (pointer, length, descriptor) = parts(local);
        let (address, key) = (remote.address, remote.key);
        self.submit(
            Posting::new(operation, WRITE, to, &options),
            queue,
            |slot| {
                keep_region(slot, local);
                keep_mapping(slot, remote);
            },
            #[allow(unsafe_code)]
            // SAFETY: the slot keeps the local range alive until completion; the
            // endpoint is open, and has one-sided operations.
            move |endpoint, context| unsafe {
                sys::direct::fi_write(
                    endpoint, pointer, length, descriptor, peer, address, key, context,
                )
            },
        )
    }

    /// Writes, and tells the peer with an immediate once the bytes are there
    /// (`fi_writedata`).
    ///
    /// ```
    /// use std::time::{Duration, Instant};
    /// use fabric::*;
    /// # let query = Query::new(EndpointKind::Rdm).provider("tcp;ofi_rxm");
    /// # let offer = query.source("127.0.0.1").first()?;
    /// # let domain = Domain::open(&offer)?;
    /// # let addresses = AddressVector::open(&domain)?;
    /// # let mut queue = CompletionQueue::open(&domain)?;
    /// # let mut endpoint =
    /// #     Endpoint::builder(&domain).addresses(&addresses).queue(&mut queue).open()?;
    /// # let me = addresses.insert(&endpoint.address()?)?;
    /// # let source = domain.register(HostMemory::from_vec(vec![7; 16])?, Access::ALL)?;
    /// # let target = domain.register(HostMemory::zeroed(16)?, Access::ALL)?;
    /// let remote = domain.attach(&target.describe()?)?;
    /// if domain.capabilities().immediates_consume_receives() {
    ///     endpoint.receive_notice(&mut queue, 0)?;
    /// }
    /// endpoint.write_data(&mut queue, me, &source.all(), &remote.all(), 0xbeef, 1)?;
    /// let end = Instant::now() + Duration::from_secs(5);
    /// let notice = loop {
    ///     let completion = queue.wait(end.saturating_duration_since(Instant::now()))?;
    ///     if completion.kind == CompletionKind::RemoteWrite {
    ///         break completion;
    ///     }
    /// };
    /// assert_eq!(notice.data, Some(0xbeef));
    /// # Ok::<(), fabric::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`write`](Self::write); `OutOfBounds` for an immediate wider than the
    /// provider carries, `NotSupported` where it carries none.
    #[inline]
    pub fn write_data(
        &mut self,
        queue: &mut CompletionQueue,
        to: Peer,
        local: &RegionSlice,
        remote: &RemoteSlice,
        data: u64,
        options: impl Into<Options>,
    ) -> Result<OperationId> {
        let options = options.into();
        if !options.flags.is_empty() {
            return self.write_gathered(queue, to, &[local], remote, Some(data), options);
        }
        let operation = "fi_writedata";
        self.check_data(operation, data)?;
        let peer = self.check_write(operation, to, local, remote)?;
        let (pointer, length, descriptor) = parts(local);
        let (address, key) = (remote.address, remote.key);
        self.submit(
            Posting::new(operation, WRITE, to, &options),
            queue,
            |slot| {
                keep_region(slot, local);
                keep_mapping(slot, remote);
            },
            #[allow(unsafe_code)]
            // SAFETY: as in `write`.
            move |endpoint, context| unsafe {
                sys::direct::fi_writedata(
                    endpoint, pointer, length, descriptor, data, peer, address, key, context,
                )
            },
        )
    }

    /// Gathers several local slices into one remote range, in one operation and
    /// without a copy (`fi_writemsg`), with an immediate if there is one.
    ///
    /// # Errors
    /// As [`write_data`](Self::write_data); `InvalidArgument` for more slices
    /// than the provider gathers.
    pub fn write_gathered(
        &mut self,
        queue: &mut CompletionQueue,
        to: Peer,
        local: &[&RegionSlice],
        remote: &RemoteSlice,
        data: Option<u64>,
        options: impl Into<Options>,
    ) -> Result<OperationId> {
        let options = options.into();
        let operation = "fi_writemsg";
        if let Some(data) = data {
            self.check_data(operation, data)?;
        }
        let vectors = Vectors::new(self, operation, local, Access::WRITE)?;
        self.check_length(operation, vectors.length)?;
        self.check_injected(operation, &options, vectors.length)?;
        self.check_remote(operation, remote, vectors.length, Access::REMOTE_WRITE)?;
        let peer = self.resolve(operation, to)?;
        let flags =
            options.flags.bits() | sys::FI_COMPLETION | data.map_or(0, |_| sys::FI_REMOTE_CQ_DATA);
        self.submit(
            Posting::new(operation, WRITE, to, &options),
            queue,
            |slot| {
                local.iter().for_each(|slice| keep_region(slot, slice));
                keep_mapping(slot, remote);
            },
            |endpoint, context| {
                let target =
                    sys::fi_rma_iov { addr: remote.address, len: vectors.length, key: remote.key };
                let message = vectors.rma(peer, &target, context, data.unwrap_or(0));
                #[allow(unsafe_code)]
                // SAFETY: the vectors live for the call, what they name until
                // completion, by the slot.
                unsafe {
                    sys::fi_writemsg(endpoint, &message, flags)
                }
            },
        )
    }

    /// Writes a few bytes that are copied at once: nothing stays in flight and no
    /// completion is reported (`fi_inject_write`).
    ///
    /// # Errors
    /// As [`write`](Self::write); `Truncated` above the provider's inject size.
    #[inline]
    pub fn inject_write(
        &mut self,
        queue: &mut CompletionQueue,
        to: Peer,
        bytes: &[u8],
        remote: &RemoteSlice,
    ) -> Result<()> {
        let operation = "fi_inject_write";
        let peer = self.check_inject(operation, to, bytes.len())?;
        self.check_remote(operation, remote, bytes.len(), Access::REMOTE_WRITE)?;
        let (address, key) = (remote.address, remote.key);
        self.submit_injected(
            operation,
            queue,
            to,
            #[allow(unsafe_code)]
            // SAFETY: the bytes are copied before the call returns.
            |endpoint| unsafe {
                sys::fi_inject_write(
                    endpoint,
                    bytes.as_ptr().cast(),
                    bytes.len(),
                    peer,
                    address,
                    key,
                )
            },
        )
    }

    /// As [`inject_write`](Self::inject_write), with an immediate
    /// (`fi_inject_writedata`).
    ///
    /// # Errors
    /// As [`inject_write`](Self::inject_write) and [`write_data`](Self::write_data).
    #[inline]
    pub fn inject_write_data(
        &mut self,
        queue: &mut CompletionQueue,
        to: Peer,
        bytes: &[u8],
        remote: &RemoteSlice,
        data: u64,
    ) -> Result<()> {
        let operation = "fi_inject_writedata";
        self.check_data(operation, data)?;
        let peer = self.check_inject(operation, to, bytes.len())?;
        self.check_remote(operation, remote, bytes.len(), Access::REMOTE_WRITE)?;
        let (address, key) = (remote.address, remote.key);
        self.submit_injected(
            operation,
            queue,
            to,
            #[allow(unsafe_code)]
            // SAFETY: the bytes are copied before the call returns.
            |endpoint| unsafe {
                sys::fi_inject_writedata(
                    endpoint,
                    bytes.as_ptr().cast(),
                    bytes.len(),
                    data,
                    peer,
                    address,
                    key,
                )
            },
        )
    }

    /// Reads a peer's bytes into a local region (`fi_read`).
    ///
    /// # Errors
    /// As [`write`](Self::write).
    #[inline]
    pub fn read(
        &mut self,
        queue: &mut CompletionQueue,
        from: Peer,
        local: &RegionSlice,
        remote: &RemoteSlice,
        options: impl Into<Options>,
    ) -> Result<OperationId> {
        let options = options.into();
        if !options.flags.is_empty() {
            return self.read_scattered(queue, from, &[local], remote, options);
        }
        let operation = "fi_read";
        self.check_length(operation, local.len())?;
        self.check_local(operation, local, Access::READ)?;
        self.check_remote(operation, remote, local.len(), Access::REMOTE_READ)?;
        let peer = self.resolve(operation, from)?;
        let (pointer, length, descriptor) = parts(local);
        let (address, key) = (remote.address, remote.key);
        self.submit(
            Posting::new(operation, READ, from, &options),
            queue,
            |slot| {
                keep_region(slot, local);
                keep_mapping(slot, remote);
            },
            #[allow(unsafe_code)]
            // SAFETY: as in `write`.
            move |endpoint, context| unsafe {
                sys::direct::fi_read(
                    endpoint, pointer, length, descriptor, peer, address, key, context,
                )
            },
        )
    }

    /// Scatters one remote range into several local slices (`fi_readmsg`).
    ///
    /// # Errors
    /// As [`write_gathered`](Self::write_gathered).
    pub fn read_scattered(
        &mut self,
        queue: &mut CompletionQueue,
        from: Peer,
        local: &[&RegionSlice],
        remote: &RemoteSlice,
        options: impl Into<Options>,
    ) -> Result<OperationId> {
        let options = options.into();
        let operation = "fi_readmsg";
        let vectors = Vectors::new(self, operation, local, Access::READ)?;
        self.check_length(operation, vectors.length)?;
        self.check_remote(operation, remote, vectors.length, Access::REMOTE_READ)?;
        let peer = self.resolve(operation, from)?;
        let flags = options.flags.bits() | sys::FI_COMPLETION;
        self.submit(
            Posting::new(operation, READ, from, &options),
            queue,
            |slot| {
                local.iter().for_each(|slice| keep_region(slot, slice));
                keep_mapping(slot, remote);
            },
            |endpoint, context| {
                let source =
                    sys::fi_rma_iov { addr: remote.address, len: vectors.length, key: remote.key };
                let message = vectors.rma(peer, &source, context, 0);
                #[allow(unsafe_code)]
                // SAFETY: as in `write_gathered`.
                unsafe {
                    sys::fi_readmsg(endpoint, &message, flags)
                }
            },
        )
    }

    /// Writes from memory that nothing keeps alive, to any address and key.
    ///
    /// # Safety
    /// `length` bytes at `pointer` must stay valid until the operation is done
    /// (completed, or its endpoint closed), and `descriptor` must be that of a
    /// live registration covering them, or null where the provider needs none.
    /// Address and key are not checked: the target may be harmed.
    ///
    /// # Errors
    /// What the provider says.
    #[allow(unsafe_code, clippy::too_many_arguments)]
    pub unsafe fn write_raw(
        &mut self,
        queue: &mut CompletionQueue,
        to: Peer,
        pointer: *const u8,
        length: usize,
        descriptor: *mut c_void,
        (address, key): (u64, u64),
        data: Option<u64>,
        options: impl Into<Options>,
    ) -> Result<OperationId> {
        let options = options.into();
        let operation = "fi_write";
        if let Some(data) = data {
            self.check_data(operation, data)?;
        }
        if !self.limits.has_rma {
            return Err(self.no_rma(operation));
        }
        self.check_length(operation, length)?;
        self.check_injected(operation, &options, length)?;
        let peer = self.resolve(operation, to)?;
        let vectors = Vectors::raw(pointer.cast_mut().cast(), length, descriptor);
        let flags =
            options.flags.bits() | sys::FI_COMPLETION | data.map_or(0, |_| sys::FI_REMOTE_CQ_DATA);
        let target = sys::fi_rma_iov { addr: address, len: length, key };
        self.submit(
            Posting::new(operation, WRITE, to, &options),
            queue,
            |_| {},
            |endpoint, context| {
                let message = vectors.rma(peer, &target, context, data.unwrap_or(0));
                // SAFETY: by contract.
                unsafe { sys::fi_writemsg(endpoint, &message, flags) }
            },
        )
    }

    /// Reads into memory that nothing keeps alive.
    ///
    /// # Safety
    /// As [`write_raw`](Self::write_raw); the memory is written.
    ///
    /// # Errors
    /// What the provider says.
    #[allow(unsafe_code, clippy::too_many_arguments)]
    pub unsafe fn read_raw(
        &mut self,
        queue: &mut CompletionQueue,
        from: Peer,
        pointer: *mut u8,
        length: usize,
        descriptor: *mut c_void,
        (address, key): (u64, u64),
        options: impl Into<Options>,
    ) -> Result<OperationId> {
        let options = options.into();
        let operation = "fi_read";
        if !self.limits.has_rma {
            return Err(self.no_rma(operation));
        }
        self.check_length(operation, length)?;
        let peer = self.resolve(operation, from)?;
        let vectors = Vectors::raw(pointer.cast(), length, descriptor);
        let flags = options.flags.bits() | sys::FI_COMPLETION;
        let source = sys::fi_rma_iov { addr: address, len: length, key };
        self.submit(
            Posting::new(operation, READ, from, &options),
            queue,
            |_| {},
            |endpoint, context| {
                let message = vectors.rma(peer, &source, context, 0);
                // SAFETY: by contract.
                unsafe { sys::fi_readmsg(endpoint, &message, flags) }
            },
        )
    }

    #[cold]
    pub(super) fn no_rma(&self, operation: &'static str) -> crate::Error {
        self.refuse(
            operation,
            ErrorKind::NotSupported,
            "the endpoint has no one-sided operations".to_owned(),
        )
    }

    #[inline]
    fn check_write(
        &self,
        operation: &'static str,
        to: Peer,
        local: &RegionSlice,
        remote: &RemoteSlice,
    ) -> Result<u64> {
        self.check_length(operation, local.len())?;
        self.check_local(operation, local, Access::WRITE)?;
        self.check_remote(operation, remote, local.len(), Access::REMOTE_WRITE)?;
        self.resolve(operation, to)
    }

    #[inline]
    pub(super) fn check_inject(
        &self,
        operation: &'static str,
        to: Peer,
        length: usize,
    ) -> Result<u64> {
        if length > self.limits.inject_size {
            return Err(self.refuse(
                operation,
                ErrorKind::Truncated,
                format!("{length} bytes, the provider injects at most {}", self.limits.inject_size),
            ));
        }
        self.resolve(operation, to)
    }
}

/// Pointer, length and descriptor of a slice.
#[inline]
pub(super) fn parts(slice: &RegionSlice) -> (*mut c_void, usize, *mut c_void) {
    (slice.as_ptr().cast(), slice.len(), slice.region.0.descriptor)
}
