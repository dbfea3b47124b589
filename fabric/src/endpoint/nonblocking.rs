//! Posts of a ring: they do not wait, and do not allocate an error when the queue is full.
//!
//! A ring can do other work when the provider's queue is full, which is frequent. It posts
//! parts of regions whose bounds it has checked, and counts as few references as keep the
//! memory alive.

use libfabric_sys as sys;

use super::Endpoint;
use super::post::{AGAIN, PostOptions};
use super::vectors::{LocalSegment, Vectors};
use crate::{Access, CompletionKind, CompletionQueue, ErrorKind, Peer, RemoteMemory, Result};

/// A part of a peer's region, from an offset on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RemoteTarget<'a> {
    pub(crate) memory: &'a RemoteMemory,
    pub(crate) offset: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum InjectOutcome {
    /// The provider copied the bytes.
    Accepted,
    /// The queue has no space now.
    WouldBlock,
    /// The provider injects no write of this length: the caller must post an ordinary write.
    NotSupported,
}

/// The error code for an operation that a provider does not have.
const NOT_IMPLEMENTED: isize = -(sys::FI_ENOSYS as isize);
/// The error code for an operation that a provider does not do in this form.
const NOT_SUPPORTED: isize = -(sys::FI_EOPNOTSUPP as isize);

impl Endpoint {
    /// Largest number of bytes that [`try_inject_write`](Self::try_inject_write) copies with an
    /// immediate.
    #[inline]
    pub(crate) fn inject_limit(&self) -> usize {
        self.limits.inject_write_data_size
    }

    /// Gathers several local segments into one remote range, in one operation without a copy,
    /// with an optional immediate; false if the queue has no space now.
    #[inline]
    pub(crate) fn try_write_segments(
        &mut self,
        queue: &mut CompletionQueue,
        to: Peer,
        pieces: &[LocalSegment<'_>],
        target: RemoteTarget<'_>,
        data: Option<u64>,
        options: &PostOptions,
    ) -> Result<bool> {
        let operation = "fi_writemsg";
        if let Some(data) = data {
            self.check_data(operation, data)?;
        }
        let vectors = Vectors::from_segments(self, operation, pieces)?;
        self.check_length(operation, vectors.length)?;
        self.check_target(operation, target, vectors.length)?;
        let peer = self.resolve(operation, to)?;
        let flags =
            options.flags.bits() | sys::FI_COMPLETION | data.map_or(0, |_| sys::FI_REMOTE_CQ_DATA);
        let member = self.check_queue(operation, queue)?;
        let (address, key) = target.memory.address(target.offset);
        let remote = sys::fi_rma_iov { addr: address, len: vectors.length, key };
        let slot = queue.take(member, CompletionKind::Write, to, options.token)?;
        let (id, context) = (slot.id(), slot.context());
        let message = vectors.rma(peer, &remote, context, data.unwrap_or(0));
        // SAFETY: the vectors live for the call. The slot keeps the memory that they name alive
        // until completion; if the call fails, it is not touched.
        let code = unsafe { sys::fi_writemsg(self.handle.as_ptr(), &message, flags) };
        self.posted();
        if code == 0 {
            for piece in pieces {
                slot.keep_region(piece.region);
            }
            slot.keep_mapped_key(target.memory.mapped_key());
            return Ok(true);
        }
        queue.put_back(id);
        self.false_if_would_block(operation, to, code)
    }

    /// Injects a short write, with an optional immediate: nothing stays in flight, and no
    /// completion is reported. After a refusal, this length is not injected again.
    #[inline]
    pub(crate) fn try_inject_write(
        &mut self,
        queue: &CompletionQueue,
        to: Peer,
        bytes: &[u8],
        target: RemoteTarget<'_>,
        data: Option<u64>,
    ) -> Result<InjectOutcome> {
        let operation = if data.is_some() { "fi_inject_writedata" } else { "fi_inject_write" };
        if let Some(data) = data {
            self.check_data(operation, data)?;
        }
        let limit = match data {
            Some(_) => self.limits.inject_write_data_size,
            None => self.limits.inject_write_size,
        };
        if bytes.len() > limit {
            return Ok(InjectOutcome::NotSupported);
        }
        self.check_target(operation, target, bytes.len())?;
        self.check_queue(operation, queue)?;
        let peer = self.resolve(operation, to)?;
        let (address, key) = target.memory.address(target.offset);
        let (pointer, length, endpoint) =
            (bytes.as_ptr().cast(), bytes.len(), self.handle.as_ptr());
        // SAFETY: the bytes are copied before the call returns.
        let code = unsafe {
            match data {
                Some(data) => {
                    sys::fi_inject_writedata(endpoint, pointer, length, data, peer, address, key)
                }
                None => sys::fi_inject_write(endpoint, pointer, length, peer, address, key),
            }
        };
        self.posted();
        if code == 0 {
            return Ok(InjectOutcome::Accepted);
        }
        self.inject_failed((operation, data.is_some()), to, code, bytes.len())
    }

    #[cold]
    fn inject_failed(
        &mut self,
        (operation, has_data): (&'static str, bool),
        to: Peer,
        code: isize,
        length: usize,
    ) -> Result<InjectOutcome> {
        // One provider has no entry for the call, the other refuses this length.
        let left = match code {
            NOT_IMPLEMENTED => 0,
            NOT_SUPPORTED => length.saturating_sub(1),
            _ => {
                self.false_if_would_block(operation, to, code)?;
                return Ok(InjectOutcome::WouldBlock);
            }
        };
        let limit = match has_data {
            true => &mut self.limits.inject_write_data_size,
            false => &mut self.limits.inject_write_size,
        };
        *limit = left.min(*limit);
        Ok(InjectOutcome::NotSupported)
    }

    /// Injects a short message, with an optional tag; false if the queue has no space now.
    pub(crate) fn try_inject(
        &mut self,
        queue: &CompletionQueue,
        to: Peer,
        bytes: &[u8],
        tag: Option<u64>,
    ) -> Result<bool> {
        let operation = if tag.is_some() { "fi_tinject" } else { "fi_inject" };
        self.check_messages(operation, tag.is_some())?;
        self.check_injected(operation, bytes.len(), self.limits.inject_size)?;
        self.check_queue(operation, queue)?;
        let peer = self.resolve(operation, to)?;
        let (pointer, length, endpoint) =
            (bytes.as_ptr().cast(), bytes.len(), self.handle.as_ptr());
        // SAFETY: the bytes are copied before the call returns.
        let code = unsafe {
            match tag {
                Some(tag) => sys::fi_tinject(endpoint, pointer, length, peer, tag),
                None => sys::fi_inject(endpoint, pointer, length, peer),
            }
        };
        self.posted();
        if code == 0 { Ok(true) } else { self.false_if_would_block(operation, to, code) }
    }

    #[inline]
    fn check_target(
        &self,
        operation: &'static str,
        target: RemoteTarget<'_>,
        length: usize,
    ) -> Result<()> {
        self.check_rma(operation)?;
        let (memory, offset) = (target.memory, target.offset);
        let fits = offset.checked_add(length as u64).is_some_and(|end| end <= memory.len());
        self.ensure(fits, operation, ErrorKind::OutOfBounds, || {
            format!("{length} bytes at {offset} of a remote region of {}", memory.len())
        })?;
        let is_granted = memory.access().contains(Access::REMOTE_WRITE);
        self.ensure(is_granted, operation, ErrorKind::AccessDenied, || {
            "the remote region grants no writes".to_owned()
        })
    }

    #[cold]
    pub(super) fn false_if_would_block(
        &self,
        operation: &'static str,
        to: Peer,
        code: isize,
    ) -> Result<bool> {
        if code == AGAIN {
            return Ok(false);
        }
        Err(self.post_error(operation, to, code, std::time::Duration::ZERO))
    }
}
