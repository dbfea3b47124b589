//! Raw bindings to [libfabric](https://ofiwg.github.io/libfabric/).
//!
//! bindgen generates most of it from libfabric's headers and a small C shim, for what the
//! `fabric` crate uses. `src/bindings` has a file for each version whose structures differ. The
//! build takes the newest file that is not newer than the headers found by `pkg-config`, which
//! must be 1.17 or newer. The C compiler checks sizes and offsets against these headers.
//! `scripts/make-bindings` generates a file for another version.
//!
//! The names are libfabric's own. The few functions that the library exports are looked up at
//! the first call, which loads the library: see [`load`]. Functions that libfabric declares
//! `static inline`, and that call a function of the object, are in [`calls`]: a function that
//! the object lacks returns `-FI_ENOSYS`. Everything that differs between header versions
//! (anonymous unions, structures that grew) is accessed through the `fcs_` functions of the
//! shim, so that one source builds against all of them.
//!
//! No call is safe without knowledge of libfabric's manual pages: use the `fabric` crate.
//!
//! Modules, each importing only those before it: `handlers`, `library`, `calls`.
//!
//! ```
//! // SAFETY: takes no argument and has no precondition.
//! let version = unsafe { libfabric_sys::fi_version() };
//! assert!(version >> 16 >= 1);
//! ```
#![allow(
    unsafe_code,
    unsafe_op_in_unsafe_fn,
    missing_docs,
    missing_debug_implementations,
    non_camel_case_types,
    non_upper_case_globals,
    non_snake_case,
    unused_qualifications,
    unreachable_pub,
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    clippy::missing_safety_doc
)]

pub mod calls;
mod handlers;
mod library;

pub use calls::*;
pub use library::{
    fi_dupinfo, fi_fabric, fi_freeinfo, fi_getinfo, fi_open, fi_strerror, fi_tostr_r, fi_version,
    load,
};

/// Structures that are only used by pointer, and whose layout differs between versions or is
/// not needed.
macro_rules! opaque {
    ($($name:ident)*) => {$(
        #[repr(C)]
        pub struct $name {
            _private: [u8; 0],
        }
    )*};
}

opaque! {
    fi_av_set_attr fi_collective_attr fi_ioc fi_mr_attr fi_msg_atomic fi_poll_attr fi_wait_attr
    fid_av_set fid_mc fid_poll fid_stx
}

/// Declarations of the headers. Nothing is linked with libfabric: its functions are those
/// above.
mod bindings {
    use super::*;

    include!(env!("LIBFABRIC_BINDINGS"));
}

pub use bindings::*;

// bindgen does not translate macros with casts, or macros that are enum members in some
// versions. Their values are ABI; `shim.c` asserts each of them.

/// No address, or any address.
pub const FI_ADDR_UNSPEC: u64 = u64::MAX;
/// The key is not available, or is a raw key.
pub const FI_KEY_NOTAVAIL: u64 = u64::MAX;
/// Deprecated registration mode "basic".
pub const FABRICAST_MR_BASIC: i32 = 1;
/// Deprecated registration mode "scalable".
pub const FABRICAST_MR_SCALABLE: i32 = 2;
/// Binding a domain to an event queue for asynchronous registration.
pub const FABRICAST_REG_MR: u64 = 1 << 59;
/// Deprecated mode bit: local buffers must be registered.
pub const FABRICAST_LOCAL_MR: u64 = 1 << 55;
