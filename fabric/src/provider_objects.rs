//! What providers inside of this process need: the emulated one, and the fakes of tests.
#![allow(unsafe_code)]

use std::os::raw::c_void;

use libfabric_sys as sys;

/// A table of functions, which is never freed. Functions that are not named are absent.
macro_rules! table {
    ($kind:ident { $($entry:ident = $call:expr),* $(,)? }) => {{
        // SAFETY: all bytes zero is a valid table, without entries.
        let table: &'static mut sys::$kind = Box::leak(Box::new(unsafe { std::mem::zeroed() }));
        table.size = size_of::<sys::$kind>();
        $(table.$entry = $call;)*
        table
    }};
}

/// An object of this class, with these tables. It is never freed, so that its address is not reused.
///
/// The caller has functions `close`, `bind` and `control` of objects, and
/// `open(address, owner, state)`, which enters the object.
macro_rules! object {
    ($type:ident, $class:ident, $owner:expr, $state:expr, { $($table:ident: $kind:ident
        { $($entry:ident = $call:expr),* $(,)? }),* $(,)? }) => {{
        use $crate::provider_objects::table;
        // SAFETY: all bytes zero is a valid object.
        let object: &'static mut sys::$type = Box::leak(Box::new(unsafe { std::mem::zeroed() }));
        object.fid.fclass = sys::$class as usize;
        object.fid.ops =
            table!(fi_ops { close = Some(close), bind = Some(bind), control = Some(control) });
        $(object.$table = table!($kind { $($entry = $call),* });)*
        let object: *mut sys::$type = object;
        open(object.expose_provenance(), $owner, $state);
        object
    }};
}

pub(crate) use {object, table};

/// The common prefix of `struct fi_mr_attr` in all versions.
#[derive(Clone, Copy)]
#[repr(C)]
struct AttributesPrefix {
    vector: *const sys::iovec,
    count: usize,
    access: u64,
    offset: u64,
    requested_key: u64,
    context: *mut c_void,
    auth_key_size: usize,
    auth_key: *mut u8,
    interface: u32,
}

/// A request to register one buffer.
#[derive(Clone, Copy)]
pub(crate) struct RegistrationRequest {
    base: usize,
    length: usize,
    access: u64,
    key: u64,
    interface: u32,
}

impl RegistrationRequest {
    /// None for several buffers.
    ///
    /// # Safety
    /// The attributes are valid.
    pub(crate) unsafe fn read(request: *const sys::fi_mr_attr) -> Option<Self> {
        // SAFETY: by contract; the attributes begin with this prefix, and the vector has this length.
        let (request, vector) = unsafe {
            let request = *request.cast::<AttributesPrefix>();
            (request, std::slice::from_raw_parts(request.vector, request.count))
        };
        let AttributesPrefix { access, requested_key: key, interface, .. } = request;
        let [buffer] = vector else { return None };
        let (base, length) = (buffer.iov_base.expose_provenance(), buffer.iov_len);
        Some(Self { base, length, access, key, interface })
    }

    /// The address and the length of the buffer.
    pub(crate) fn range(&self) -> (usize, usize) {
        (self.base, self.length)
    }

    pub(crate) fn access(&self) -> u64 {
        self.access
    }

    pub(crate) fn key(&self) -> u64 {
        self.key
    }

    pub(crate) fn is_of_device(&self) -> bool {
        self.interface != sys::FI_HMEM_SYSTEM
    }
}

/// `fi_cq_readerr` of a queue that has no failures.
pub(crate) unsafe extern "C" fn read_no_failure(
    _: *mut sys::fid_cq,
    _: *mut sys::fi_cq_err_entry,
    _: u64,
) -> isize {
    -(sys::FI_EAGAIN as isize)
}
