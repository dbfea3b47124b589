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

macro_rules! calls {
    ($($name:ident = $object:ident.$table:ident.$entry:ident($($argument:ident: $type:ty),*);)*) => {$(
        #[doc = concat!("`", stringify!($name), "`.")]
        #[inline]
        pub unsafe fn $name(object: *mut $object, $($argument: $type),*) -> isize {
            match (*(*object).$table).$entry {
                Some(call) => call(object, $($argument),*),
                None => ABSENT,
            }
        }
    )*};
}

calls! {
    fi_cq_read = fid_cq.ops.read(entries: *mut c_void, count: usize);
    fi_write = fid_ep.rma.write(
        buffer: *const c_void, length: usize, descriptor: *mut c_void, peer: u64, address: u64,
        key: u64, context: *mut c_void
    );
    fi_writedata = fid_ep.rma.writedata(
        buffer: *const c_void, length: usize, descriptor: *mut c_void, data: u64, peer: u64,
        address: u64, key: u64, context: *mut c_void
    );
    fi_read = fid_ep.rma.read(
        buffer: *mut c_void, length: usize, descriptor: *mut c_void, peer: u64, address: u64,
        key: u64, context: *mut c_void
    );
    fi_inject_write = fid_ep.rma.inject(
        buffer: *const c_void, length: usize, peer: u64, address: u64, key: u64
    );
    fi_inject_writedata = fid_ep.rma.injectdata(
        buffer: *const c_void, length: usize, data: u64, peer: u64, address: u64, key: u64
    );
    fi_send = fid_ep.msg.send(
        buffer: *const c_void, length: usize, descriptor: *mut c_void, peer: u64,
        context: *mut c_void
    );
    fi_recv = fid_ep.msg.recv(
        buffer: *mut c_void, length: usize, descriptor: *mut c_void, peer: u64,
        context: *mut c_void
    );
}
