//! Gather lists and messages with flags, in the form of libfabric's `*msg` calls.

use std::os::raw::c_void;

use libfabric_sys as sys;

use super::Endpoint;
use crate::{Access, ErrorKind, MemoryRegion, Result};

#[derive(Debug, Clone, Copy)]
pub(crate) struct LocalSegment<'a> {
    pub(crate) region: &'a MemoryRegion,
    pub(crate) offset: usize,
    pub(crate) length: usize,
}

/// Slices in libfabric's form.
pub(super) struct Vectors {
    vector: [sys::iovec; Self::MAX_SEGMENTS],
    descriptors: [*mut c_void; Self::MAX_SEGMENTS],
    count: usize,
    pub(super) length: usize,
}

impl Vectors {
    /// The largest gather list that every known provider takes and a slot can hold.
    pub(super) const MAX_SEGMENTS: usize = 4;

    /// A few local segments to write from.
    #[inline]
    pub(super) fn from_segments(
        endpoint: &Endpoint,
        operation: &'static str,
        pieces: &[LocalSegment<'_>],
    ) -> Result<Self> {
        let limit = endpoint.limits.iov_limit.min(Self::MAX_SEGMENTS);
        let mut vectors = Self::raw(std::ptr::null_mut(), 0, std::ptr::null_mut());
        vectors.count = pieces.len();
        let mut is_good = !pieces.is_empty() && pieces.len() <= limit;
        for (at, piece) in pieces.iter().enumerate().take(limit) {
            is_good &= piece.region.contains(piece.offset, piece.length)
                && piece.region.access().contains(Access::WRITE)
                && piece.region.is_usable_with(&endpoint.domain, &endpoint.bound);
            let iov_base = piece.region.as_ptr().wrapping_add(piece.offset).cast();
            vectors.vector[at] = sys::iovec { iov_base, iov_len: piece.length };
            vectors.descriptors[at] = piece.region.local_descriptor();
            vectors.length += piece.length;
        }
        endpoint.ensure(is_good, operation, ErrorKind::InvalidArgument, || {
            format!(
                "1 to {limit} segments are needed, each inside a region of this domain with Access::WRITE"
            )
        })?;
        Ok(vectors)
    }

    /// A single buffer, which the caller has checked.
    pub(super) fn raw(pointer: *mut c_void, length: usize, descriptor: *mut c_void) -> Self {
        let empty = sys::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        let mut vector = [empty; Self::MAX_SEGMENTS];
        let mut descriptors = [std::ptr::null_mut(); Self::MAX_SEGMENTS];
        vector[0] = sys::iovec { iov_base: pointer, iov_len: length };
        descriptors[0] = descriptor;
        Self { vector, descriptors, count: 1, length }
    }

    /// Valid as long as `self` and `remote` are.
    pub(super) fn rma(
        &self,
        peer: u64,
        remote: &sys::fi_rma_iov,
        context: *mut c_void,
        data: u64,
    ) -> sys::fi_msg_rma {
        sys::fi_msg_rma {
            msg_iov: self.vector.as_ptr(),
            desc: self.descriptors.as_ptr().cast_mut(),
            iov_count: self.count,
            addr: peer,
            rma_iov: remote,
            rma_iov_count: 1,
            context,
            data,
        }
    }

    pub(super) fn message(&self, peer: u64, context: *mut c_void) -> sys::fi_msg {
        sys::fi_msg {
            msg_iov: self.vector.as_ptr(),
            desc: self.descriptors.as_ptr().cast_mut(),
            iov_count: self.count,
            addr: peer,
            context,
            data: 0,
        }
    }

    pub(super) fn tagged(&self, peer: u64, tag: u64, context: *mut c_void) -> sys::fi_msg_tagged {
        sys::fi_msg_tagged {
            msg_iov: self.vector.as_ptr(),
            desc: self.descriptors.as_ptr().cast_mut(),
            iov_count: self.count,
            addr: peer,
            tag,
            ignore: 0,
            context,
            data: 0,
        }
    }
}
