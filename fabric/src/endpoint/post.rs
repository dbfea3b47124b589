//! Common parts of all posts: checks, slots, and the timeout when a queue is full.
//!
//! A post takes a slot of the queue's table, calls the provider with the slot's context, and
//! then moves the references into the slot. Until then the caller's borrows keep the memory
//! alive. No completion can be seen before, because the queue would have to be polled. So
//! reference counting is off the latency path. `-FI_EAGAIN` means a full queue, or a connection
//! that is still being set up. Both need progress, so the post makes some, with growing pauses,
//! until the timeout of its options. The wait is always bounded.

use std::os::raw::c_void;
use std::time::Duration;

use libfabric_sys as sys;

use super::Endpoint;
use crate::flags::names;
use crate::queue::Slot;
use crate::waiting::{Backoff, Deadline};
use crate::{
    Access, CompletionKind, CompletionQueue, Error, ErrorKind, OperationId, Peer, RegionSlice,
    RemoteSlice, Result, TransferFlags,
};

/// How one operation is posted. A bare number is its token.
///
/// ```
/// use fabric::{PostOptions, TransferFlags};
/// let plain: PostOptions = 42.into();
/// let safe = PostOptions::token(42).flags(TransferFlags::DELIVERY_COMPLETE);
/// # let _ = (plain, safe);
/// ```
///
/// A zero timeout turns a full queue into an error at once, for callers with other work:
///
/// ```
/// use std::time::Duration;
/// use fabric::*;
/// # let offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first()?;
/// # let domain = Domain::open(&offer)?;
/// # let addresses = AddressVector::open(&domain)?;
/// # let mut queue = CompletionQueue::open(&domain)?;
/// # let mut endpoint =
/// #     Endpoint::builder(&domain).addresses(&addresses).queue(&mut queue).open()?;
/// # let inbox = domain.register(HostMemory::zeroed(64)?, Access::ALL)?;
/// let at_once = PostOptions::token(9).timeout(Duration::ZERO);
/// match endpoint.receive(&mut queue, &inbox.all(), at_once) {
///     Ok(_) => {}
///     Err(full) => assert_eq!(full.kind(), ErrorKind::WouldBlock),
/// }
/// # Ok::<(), fabric::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct PostOptions {
    pub(super) token: u64,
    pub(super) flags: TransferFlags,
    pub(super) timeout: Duration,
}

impl PostOptions {
    /// The default for how long a post makes progress while the provider's queue is full.
    pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(5);

    /// Options with this token, which the completion will carry.
    #[must_use]
    #[inline]
    pub fn token(token: u64) -> Self {
        Self { token, flags: TransferFlags::empty(), timeout: Self::DEFAULT_TIMEOUT }
    }

    /// Options with these flags.
    ///
    /// Flags are valid for sends, writes and reads; other operations have no form with flags,
    /// and refuse them (`InvalidArgument`). With flags an operation takes libfabric's `*msg`
    /// form (`fi_writemsg` for `fi_write`), which costs a little more. Not every provider obeys
    /// every flag, and libfabric has no bit to query that.
    #[must_use]
    pub fn flags(mut self, flags: TransferFlags) -> Self {
        // Unknown bits could change the operation.
        self.flags = flags & TransferFlags::all();
        self
    }

    /// Waits at most this long for space in the provider's queue. If it is zero, a full queue
    /// fails with `WouldBlock`.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }
}

impl From<u64> for PostOptions {
    #[inline]
    fn from(token: u64) -> Self {
        Self::token(token)
    }
}

pub(super) const AGAIN: isize = -(sys::FI_EAGAIN as isize);
/// The peer was removed while the post waited: not a provider error.
const REMOVED: isize = isize::MIN;

impl Endpoint {
    /// The provider's number for a peer, which is not reassigned before
    /// [`posted`](Self::posted).
    #[inline]
    pub(super) fn resolve(&self, operation: &'static str, peer: Peer) -> Result<u64> {
        match &self.addresses {
            Some(addresses) => addresses.protect(operation, peer, &self.hazard),
            None if peer == Peer::CONNECTED => Ok(sys::FI_ADDR_UNSPEC),
            None => {
                let detail = || "a connected endpoint has one peer: Peer::CONNECTED".to_owned();
                Err(self.refuse(operation, ErrorKind::InvalidArgument, detail))
            }
        }
    }

    /// The provider's call has returned, so the peer may be removed. A post that failed before
    /// the call need not report this, since the next post does.
    #[inline]
    pub(super) fn posted(&self) {
        self.hazard.clear();
    }

    /// An error with this reason, unless the condition holds.
    #[inline]
    pub(super) fn ensure(
        &self,
        is_so: bool,
        operation: &'static str,
        kind: ErrorKind,
        why: impl FnOnce() -> String,
    ) -> Result<()> {
        if is_so { Ok(()) } else { Err(self.refuse(operation, kind, why)) }
    }

    /// Out of line: posts are inlined up to here.
    #[cold]
    #[inline(never)]
    fn refuse(
        &self,
        operation: &'static str,
        kind: ErrorKind,
        why: impl FnOnce() -> String,
    ) -> Error {
        self.domain.error(kind, operation, why())
    }

    #[inline]
    pub(super) fn check_length(&self, operation: &'static str, length: usize) -> Result<()> {
        let most = self.limits.max_message;
        self.ensure(length <= most, operation, ErrorKind::Truncated, || {
            format!("{length} bytes, the provider moves at most {most} at once")
        })
    }

    #[inline]
    pub(super) fn check_local(
        &self,
        operation: &'static str,
        slice: &RegionSlice,
        needed: Access,
    ) -> Result<()> {
        let access = slice.access();
        self.ensure(access.contains(needed), operation, ErrorKind::AccessDenied, || {
            format!(
                "the local region was registered for {}, not for {}",
                names(&access).join(", "),
                names(&needed).join(", ")
            )
        })?;
        let is_usable = slice.as_region().is_usable_with(&self.domain, &self.bound);
        self.ensure(is_usable, operation, ErrorKind::InvalidArgument, || {
            "the local region is registered with another domain, or bound to another endpoint"
                .to_owned()
        })
    }

    #[inline]
    pub(super) fn check_rma(&self, operation: &'static str) -> Result<()> {
        self.ensure(self.limits.has_rma, operation, ErrorKind::NotSupported, || {
            "the endpoint has no one-sided operations".to_owned()
        })
    }

    /// Checks of reads, writes and atomics against their remote range.
    #[inline]
    pub(super) fn check_range(
        &self,
        operation: &'static str,
        remote: &RemoteSlice,
        length: usize,
        needed: Access,
    ) -> Result<()> {
        self.ensure(length as u64 <= remote.len(), operation, ErrorKind::OutOfBounds, || {
            format!("{length} bytes do not fit a remote range of {}", remote.len())
        })?;
        self.ensure(remote.access().contains(needed), operation, ErrorKind::AccessDenied, || {
            format!(
                "the remote region grants {}, not {}",
                names(&remote.access()).join(", "),
                names(&needed).join(", ")
            )
        })
    }

    /// Providers copy injected bytes into a buffer of fixed size, and some do not check the
    /// length.
    #[inline]
    pub(super) fn check_injected(
        &self,
        operation: &'static str,
        length: usize,
        most: usize,
    ) -> Result<()> {
        self.ensure(length <= most, operation, ErrorKind::Truncated, || {
            format!("{length} bytes, the provider injects at most {most}")
        })
    }

    /// For operations that libfabric has no form with flags for.
    #[inline]
    pub(super) fn check_no_flags(
        &self,
        operation: &'static str,
        options: &PostOptions,
    ) -> Result<()> {
        let flags = options.flags;
        self.ensure(flags.is_empty(), operation, ErrorKind::InvalidArgument, || {
            format!("this operation has no form with flags, got {}", names(&flags).join(", "))
        })
    }

    #[inline]
    pub(super) fn check_messages(&self, operation: &'static str, tagged: bool) -> Result<()> {
        let has_them = if tagged { self.limits.has_tagged } else { self.limits.has_message };
        self.ensure(has_them, operation, ErrorKind::NotSupported, || match tagged {
            true => "the endpoint has no tagged messages. Request Caps::TAGGED".to_owned(),
            false => "the endpoint has no messages. Request Caps::MESSAGE (a provider that is \
                      known to lose messages offers none)"
                .to_owned(),
        })
    }

    /// Refuses immediates of writes that carry none (some providers would return EAGAIN for
    /// ever), and immediates that the provider would cut silently.
    #[inline]
    pub(super) fn check_data(&self, operation: &'static str, data: u64) -> Result<()> {
        let mask = self.limits.immediate_mask;
        self.ensure(mask != 0, operation, ErrorKind::NotSupported, || {
            "the provider carries no immediates with this operation".to_owned()
        })?;
        self.ensure(data & !mask == 0, operation, ErrorKind::OutOfBounds, || {
            format!("immediate {data:#x} is wider than the provider carries (mask {mask:#x})")
        })
    }

    #[inline]
    pub(super) fn check_queue(
        &self,
        operation: &'static str,
        queue: &CompletionQueue,
    ) -> Result<u32> {
        let is_bound = queue.is(&self.queue_binding.queue);
        self.ensure(is_bound, operation, ErrorKind::InvalidArgument, || {
            "the endpoint reports to another completion queue".to_owned()
        })?;
        Ok(self.queue_binding.number)
    }

    /// Takes a slot, calls the provider until it accepts the operation, and lets `retain` fill
    /// the slot with references.
    ///
    /// Both closures are copied for the slow path instead of borrowed: their captures can stay
    /// in registers on the fast path.
    #[inline]
    pub(super) fn post(
        &mut self,
        (operation, kind, peer): (&'static str, CompletionKind, Peer),
        options: &PostOptions,
        queue: &mut CompletionQueue,
        keep: impl FnOnce(&mut Slot) + Copy,
        call: impl Fn(*mut sys::fid_ep, *mut c_void) -> isize + Copy,
    ) -> Result<OperationId> {
        let member = self.check_queue(operation, queue)?;
        let slot = queue.take(member, kind, peer, options.token)?;
        let (id, context) = (slot.id(), slot.context());
        let code = call(self.handle.as_ptr(), context);
        if code == 0 {
            self.posted();
            keep(slot);
            return Ok(id);
        }
        self.retry_post(operation, peer, options.timeout, queue, id, keep, (code, context), call)
    }

    /// The slow path of `post`, after the first call failed.
    #[cold]
    #[inline(never)]
    #[expect(clippy::too_many_arguments, reason = "one struct of them would be filled each time")]
    fn retry_post(
        &mut self,
        operation: &'static str,
        peer: Peer,
        timeout: Duration,
        queue: &mut CompletionQueue,
        id: OperationId,
        keep: impl FnOnce(&mut Slot),
        (mut code, context): (isize, *mut c_void),
        call: impl Fn(*mut sys::fid_ep, *mut c_void) -> isize,
    ) -> Result<OperationId> {
        let endpoint = self.handle.as_ptr();
        let mut removal_error = None;
        if code == AGAIN {
            code = Self::retry_until_timeout(queue, timeout, || {
                // The peer may have been removed in the meantime.
                let may_be_removed = peer != Peer::ANY;
                removal_error =
                    may_be_removed.then(|| self.resolve(operation, peer).err()).flatten();
                if removal_error.is_some() { REMOVED } else { call(endpoint, context) }
            });
        }
        self.posted();
        if code == 0 {
            queue.keep(id, keep);
            return Ok(id);
        }
        queue.put_back(id);
        Err(removal_error.unwrap_or_else(|| self.post_error(operation, peer, code, timeout)))
    }

    /// The provider's queue is full, or a connection is being set up: makes progress, with
    /// growing pauses, and retries until the timeout.
    #[cold]
    fn retry_until_timeout(
        queue: &mut CompletionQueue,
        timeout: Duration,
        mut call: impl FnMut() -> isize,
    ) -> isize {
        if timeout.is_zero() {
            // One poll of the queue may be enough.
            queue.progress();
            return call();
        }
        let deadline = Deadline::after(timeout);
        let mut backoff = Backoff::new();
        loop {
            queue.progress();
            let code = call();
            if code != AGAIN || !backoff.pause(&deadline) {
                return code;
            }
        }
    }

    #[cold]
    pub(super) fn post_error(
        &self,
        operation: &'static str,
        peer: Peer,
        code: isize,
        timeout: Duration,
    ) -> Error {
        let error = self.domain.add_provider(Error::from_code(operation, code as i64));
        let error = error.with_known_peer(self.name_of(peer));
        if code != AGAIN {
            return error;
        }
        if timeout.is_zero() {
            error.with_detail("the provider's queue is full")
        } else {
            error.with_kind(ErrorKind::DeadlineExceeded).with_detail(format!(
                "the provider accepted no operation for {timeout:?}: its queue is full or the peer does not respond. Poll the completion queue, or raise the timeout"
            ))
        }
    }
}
