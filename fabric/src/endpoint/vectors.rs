//! What is gathered, scattered or sent with flags, as libfabric's `*msg` calls want it.

use std::os::raw::c_void;

use libfabric_sys as sys;

use super::Endpoint;
use super::chunk::Piece;
use super::rma::parts;
use crate::error::{ErrorKind, Result};
use crate::flags::Access;
use crate::memory::RegionSlice;

/// Slices as libfabric wants them.
pub(super) struct Vectors {
    vector: [sys::iovec; Self::MOST],
    descriptors: [*mut c_void; Self::MOST],
    count: usize,
    pub(super) length: usize,
}

impl Vectors {
    /// What every provider here can gather, and a slot can hold.
    pub(super) const MOST: usize = 4;

    pub(super) fn new(
        endpoint: &Endpoint,
        operation: &'static str,
        slices: &[&RegionSlice],
        access: Access,
    ) -> Result<Self> {
        let limit = endpoint.limits.iov_limit.min(Self::MOST);
        if slices.is_empty() || slices.len() > limit {
            return Err(endpoint.refuse(
                operation,
                ErrorKind::InvalidArgument,
                format!("{} slices, 1 to {limit} can go into one operation", slices.len()),
            ));
        }
        let empty = sys::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        let mut vectors = Self {
            vector: [empty; Self::MOST],
            descriptors: [std::ptr::null_mut(); Self::MOST],
            count: slices.len(),
            length: 0,
        };
        for (at, slice) in slices.iter().enumerate() {
            endpoint.check_local(operation, slice, access)?;
            let (iov_base, iov_len, descriptor) = parts(slice);
            vectors.vector[at] = sys::iovec { iov_base, iov_len };
            vectors.descriptors[at] = descriptor;
            vectors.length += iov_len;
        }
        Ok(vectors)
    }

    /// The same of a few pieces of regions that are to be written from.
    #[inline]
    pub(super) fn of_pieces(
        endpoint: &Endpoint,
        operation: &'static str,
        pieces: &[Piece<'_>],
    ) -> Result<Self> {
        let limit = endpoint.limits.iov_limit.min(Self::MOST);
        let mut vectors = Self::raw(std::ptr::null_mut(), 0, std::ptr::null_mut());
        vectors.count = pieces.len();
        let mut is_good = !pieces.is_empty() && pieces.len() <= limit;
        for (at, piece) in pieces.iter().enumerate().take(limit) {
            let region = &*piece.region.0;
            let end = piece.offset.checked_add(piece.length);
            is_good &= end.is_some_and(|end| end <= region.contiguous())
                && piece.region.access().contains(Access::WRITE)
                && piece.region.domain().is_same(&endpoint.domain);
            let iov_base = piece.region.as_ptr().wrapping_add(piece.offset).cast();
            vectors.vector[at] = sys::iovec { iov_base, iov_len: piece.length };
            vectors.descriptors[at] = region.descriptor;
            vectors.length += piece.length;
        }
        if is_good {
            return Ok(vectors);
        }
        Err(endpoint.refuse(
            operation,
            ErrorKind::InvalidArgument,
            format!("what is written from are 1 to {limit} pieces of regions, each inside of one of this domain that may be written from"),
        ))
    }

    /// One buffer that nobody checked.
    pub(super) fn raw(pointer: *mut c_void, length: usize, descriptor: *mut c_void) -> Self {
        let empty = sys::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        let mut vector = [empty; Self::MOST];
        let mut descriptors = [std::ptr::null_mut(); Self::MOST];
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

    pub(super) fn message(&self, peer: u64, context: *mut c_void, data: u64) -> sys::fi_msg {
        sys::fi_msg {
            msg_iov: self.vector.as_ptr(),
            desc: self.descriptors.as_ptr().cast_mut(),
            iov_count: self.count,
            addr: peer,
            context,
            data,
        }
    }

    pub(super) fn tagged(
        &self,
        peer: u64,
        (tag, ignore): (u64, u64),
        context: *mut c_void,
        data: u64,
    ) -> sys::fi_msg_tagged {
        sys::fi_msg_tagged {
            msg_iov: self.vector.as_ptr(),
            desc: self.descriptors.as_ptr().cast_mut(),
            iov_count: self.count,
            addr: peer,
            tag,
            ignore,
            context,
            data,
        }
    }
}
