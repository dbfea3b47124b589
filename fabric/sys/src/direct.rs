//! The calls of the fast path, without a detour.
//!
//! libfabric declares them `static inline`: each only looks up a function in the
//! object and calls it. The generated wrappers do that in C, which costs a second
//! call with up to nine arguments. These do it in Rust, where it is inlined. A
//! function that the object lacks answers `-FI_ENOSYS`.
//!
//! # Safety
//! As libfabric's functions of the same name: the object is open, and what it is
//! given stays valid as long as the manual page says.

use std::os::raw::c_void;

use crate::{FI_ENOSYS, fid_cq, fid_ep};

const ABSENT: isize = -(FI_ENOSYS as isize);

/// `fi_cq_read`.
#[inline]
pub unsafe fn fi_cq_read(queue: *mut fid_cq, entries: *mut c_void, count: usize) -> isize {
    match (*(*queue).ops).read {
        Some(read) => read(queue, entries, count),
        None => ABSENT,
    }
}

/// `fi_write`.
#[inline]
pub unsafe fn fi_write(
    endpoint: *mut fid_ep,
    buffer: *const c_void,
    length: usize,
    descriptor: *mut c_void,
    peer: u64,
    address: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    match (*(*endpoint).rma).write {
        Some(write) => write(endpoint, buffer, length, descriptor, peer, address, key, context),
        None => ABSENT,
    }
}

/// `fi_writedata`.
#[inline]
pub unsafe fn fi_writedata(
    endpoint: *mut fid_ep,
    buffer: *const c_void,
    length: usize,
    descriptor: *mut c_void,
    data: u64,
    peer: u64,
    address: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    match (*(*endpoint).rma).writedata {
        Some(write) => {
            write(endpoint, buffer, length, descriptor, data, peer, address, key, context)
        }
        None => ABSENT,
    }
}

/// `fi_read`.
#[inline]
pub unsafe fn fi_read(
    endpoint: *mut fid_ep,
    buffer: *mut c_void,
    length: usize,
    descriptor: *mut c_void,
    peer: u64,
    address: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    match (*(*endpoint).rma).read {
        Some(read) => read(endpoint, buffer, length, descriptor, peer, address, key, context),
        None => ABSENT,
    }
}

/// `fi_send`.
#[inline]
pub unsafe fn fi_send(
    endpoint: *mut fid_ep,
    buffer: *const c_void,
    length: usize,
    descriptor: *mut c_void,
    peer: u64,
    context: *mut c_void,
) -> isize {
    match (*(*endpoint).msg).send {
        Some(send) => send(endpoint, buffer, length, descriptor, peer, context),
        None => ABSENT,
    }
}

/// `fi_recv`.
#[inline]
pub unsafe fn fi_recv(
    endpoint: *mut fid_ep,
    buffer: *mut c_void,
    length: usize,
    descriptor: *mut c_void,
    peer: u64,
    context: *mut c_void,
) -> isize {
    match (*(*endpoint).msg).recv {
        Some(receive) => receive(endpoint, buffer, length, descriptor, peer, context),
        None => ABSENT,
    }
}
