//! One-sided reads and writes.
//!
//! The target's processor takes no part. So the target learns of a write only by an immediate,
//! by a later message on a provider that orders sends after writes, or by polling the bytes. A
//! local completion without
//! [`TransferFlags::DELIVERY_COMPLETE`](crate::TransferFlags::DELIVERY_COMPLETE) means that the
//! source may be reused, and says nothing about the target.
//!
//! Access and bounds are in the peer's region descriptor and are checked before the post: some
//! targets do not check them (rxm ignores `FI_REMOTE_READ`), and shm reports a write with a
//! wrong key as successful.

use std::os::raw::c_void;

use libfabric_sys as sys;

use super::Endpoint;
use super::post::PostOptions;
use super::vectors::Vectors;
use crate::{
    Access, CompletionKind, CompletionQueue, OperationId, Peer, RegionSlice, RemoteSlice, Result,
    TransferFlags,
};

/// The access that an operation needs to a peer's region.
#[derive(Clone, Copy)]
enum Transfer {
    Write,
    WriteData(u64),
    Read,
}

impl Endpoint {
    /// Writes local bytes into a peer's region (`fi_write`). The region stays alive until the
    /// operation is done. Its bytes must not change before; otherwise the peer may get the old
    /// or the new ones.
    ///
    /// # Errors
    /// `OutOfBounds`, `AccessDenied`, `NotSupported` before anything is sent;
    /// `DeadlineExceeded` if the provider accepts no operation within the timeout of the
    /// options.
    #[inline]
    pub fn write(
        &mut self,
        queue: &mut CompletionQueue,
        to: Peer,
        local: &RegionSlice,
        remote: &RemoteSlice,
        options: impl Into<PostOptions>,
    ) -> Result<OperationId> {
        self.transfer(queue, to, local, remote, Transfer::Write, options.into())
    }

    /// Writes, and notifies the peer with an immediate after the bytes arrived
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
    ///     endpoint.receive_immediate(&mut queue, 0)?;
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
    /// As [`write`](Self::write); `OutOfBounds` for an immediate wider than the provider
    /// carries, `NotSupported` if it carries none.
    #[inline]
    pub fn write_data(
        &mut self,
        queue: &mut CompletionQueue,
        to: Peer,
        local: &RegionSlice,
        remote: &RemoteSlice,
        data: u64,
        options: impl Into<PostOptions>,
    ) -> Result<OperationId> {
        self.check_data("fi_writedata", data)?;
        self.transfer(queue, to, local, remote, Transfer::WriteData(data), options.into())
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
        options: impl Into<PostOptions>,
    ) -> Result<OperationId> {
        self.transfer(queue, from, local, remote, Transfer::Read, options.into())
    }

    /// Uses the short forms without flags; otherwise those with a message structure.
    #[inline]
    fn transfer(
        &mut self,
        queue: &mut CompletionQueue,
        with: Peer,
        local: &RegionSlice,
        remote: &RemoteSlice,
        what: Transfer,
        options: PostOptions,
    ) -> Result<OperationId> {
        let (operation, kind, here, there) = match what {
            Transfer::Write => {
                ("fi_write", CompletionKind::Write, Access::WRITE, Access::REMOTE_WRITE)
            }
            Transfer::WriteData(_) => {
                ("fi_writedata", CompletionKind::Write, Access::WRITE, Access::REMOTE_WRITE)
            }
            Transfer::Read => ("fi_read", CompletionKind::Read, Access::READ, Access::REMOTE_READ),
        };
        self.check_length(operation, local.len())?;
        if options.flags.contains(TransferFlags::INJECT) {
            self.check_injected(operation, local.len(), self.limits.inject_write_size)?;
        }
        self.check_local(operation, local, here)?;
        self.check_rma(operation)?;
        self.check_range(operation, remote, local.len(), there)?;
        let peer = self.resolve(operation, with)?;
        let (pointer, length, descriptor) = parts(local);
        let (address, key) = remote.address();
        let flags = options.flags.bits();
        self.post(
            (operation, kind, with),
            &options,
            queue,
            |slot| {
                slot.keep_region(local.as_region());
                slot.keep_mapped_key(remote.mapped_key());
            },
            #[allow(unsafe_code)]
            // SAFETY: the slot keeps the local range alive until completion, the vectors live for
            // the call; the endpoint is open, and has one-sided operations.
            move |endpoint, context| unsafe {
                if flags == 0 {
                    return match what {
                        Transfer::Write => sys::fi_write(
                            endpoint, pointer, length, descriptor, peer, address, key, context,
                        ),
                        Transfer::WriteData(data) => sys::fi_writedata(
                            endpoint, pointer, length, descriptor, data, peer, address, key,
                            context,
                        ),
                        Transfer::Read => sys::fi_read(
                            endpoint, pointer, length, descriptor, peer, address, key, context,
                        ),
                    };
                }
                let (data, data_flag) = match what {
                    Transfer::WriteData(data) => (data, sys::FI_REMOTE_CQ_DATA),
                    Transfer::Write | Transfer::Read => (0, 0),
                };
                let vectors = Vectors::raw(pointer, length, descriptor);
                let range = sys::fi_rma_iov { addr: address, len: length, key };
                let message = vectors.rma(peer, &range, context, data);
                let flags = flags | sys::FI_COMPLETION | data_flag;
                match what {
                    Transfer::Read => sys::fi_readmsg(endpoint, &message, flags),
                    _ => sys::fi_writemsg(endpoint, &message, flags),
                }
            },
        )
    }
}

/// Pointer, length and local descriptor of a slice.
#[inline]
pub(super) fn parts(slice: &RegionSlice) -> (*mut c_void, usize, *mut c_void) {
    (slice.as_ptr().cast(), slice.len(), slice.as_region().local_descriptor())
}
