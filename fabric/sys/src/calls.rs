//! Checked calls of the operation tables of libfabric's objects.
//!
//! libfabric declares most of its calls `static inline`: each looks a function up in a table of
//! the object and calls it without a check. Providers omit functions and whole tables, and a
//! provider built against older headers has shorter tables. So each call here first checks that
//! the object has the table, that the table's `size` covers the entry, and that the entry is
//! set. Otherwise it returns `-FI_ENOSYS`. All of it is inlined.
//!
//! # Safety
//! As for libfabric's functions of the same name: the object is open, and the arguments stay
//! valid as long as the manual page requires. A table of the object has at least its `size`
//! field.

use std::mem::offset_of;
use std::os::raw::{c_char, c_int, c_void};
use std::ptr;

use crate::*;

/// The result of a call whose function is absent.
trait Absent {
    const ABSENT: Self;
}

impl Absent for c_int {
    const ABSENT: Self = -FI_ENOSYS;
}

impl Absent for isize {
    const ABSENT: Self = -(FI_ENOSYS as isize);
}

/// Counters cannot report it: see [`can_count`].
impl Absent for u64 {
    const ABSENT: Self = 0;
}

impl Absent for *const c_char {
    const ABSENT: Self = ptr::null();
}

/// The function at an entry of an object's table, if present.
macro_rules! entry {
    ($object:expr, $table:ident => $kind:ident.$entry:ident) => {{
        let table = (*$object).$table;
        let end = offset_of!($kind, $entry) + size_of::<usize>();
        if table.is_null() || (*table).size < end { None } else { (*table).$entry }
    }};
}

/// `name(what the function takes first) = object.table => type of the table.entry(arguments)`
macro_rules! calls {
    ($($name:ident($first:ident) = $object:ident.$table:ident => $kind:ident.$entry:ident
        ($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        $(
            #[doc = concat!("`", stringify!($name), "`.")]
            #[inline]
            pub unsafe extern "C" fn $name(object: *mut $first, $($argument: $type),*) -> $result {
                match entry!(object.cast::<$object>(), $table => $kind.$entry) {
                    Some(call) => call(object, $($argument),*),
                    None => <$result>::ABSENT,
                }
            }
        )*

        /// Each call with an object of all zeros but for this table.
        #[cfg(test)]
        unsafe fn call_all(tables: tests::Tables) -> Vec<(&'static str, bool)> {
            vec![$({
                let mut object: $object = std::mem::zeroed();
                object.$table = tables.table();
                let object = ptr::from_mut(&mut object).cast();
                let answer: $result = $name(object, $(std::mem::zeroed::<$type>()),*);
                (stringify!($name), answer == <$result>::ABSENT)
            }),*]
        }
    };
}

calls! {
    fi_close(fid) = fid.ops => fi_ops.close() -> c_int;
    fi_bind(fid) = fid.ops => fi_ops.bind(bound: *mut fid, flags: u64) -> c_int;
    fi_control(fid) = fid.ops => fi_ops.control(command: c_int, argument: *mut c_void) -> c_int;

    fi_domain(fid_fabric) = fid_fabric.ops => fi_ops_fabric.domain(
        info: *mut fi_info, domain: *mut *mut fid_domain, context: *mut c_void) -> c_int;
    fi_passive_ep(fid_fabric) = fid_fabric.ops => fi_ops_fabric.passive_ep(
        info: *mut fi_info, endpoint: *mut *mut fid_pep, context: *mut c_void) -> c_int;
    fi_eq_open(fid_fabric) = fid_fabric.ops => fi_ops_fabric.eq_open(
        attributes: *mut fi_eq_attr, queue: *mut *mut fid_eq, context: *mut c_void) -> c_int;
    fi_trywait(fid_fabric) = fid_fabric.ops => fi_ops_fabric.trywait(
        objects: *mut *mut fid, count: c_int) -> c_int;

    fi_av_open(fid_domain) = fid_domain.ops => fi_ops_domain.av_open(
        attributes: *mut fi_av_attr, vector: *mut *mut fid_av, context: *mut c_void) -> c_int;
    fi_cq_open(fid_domain) = fid_domain.ops => fi_ops_domain.cq_open(
        attributes: *mut fi_cq_attr, queue: *mut *mut fid_cq, context: *mut c_void) -> c_int;
    fi_cntr_open(fid_domain) = fid_domain.ops => fi_ops_domain.cntr_open(
        attributes: *mut fi_cntr_attr, counter: *mut *mut fid_cntr, context: *mut c_void) -> c_int;
    fi_endpoint(fid_domain) = fid_domain.ops => fi_ops_domain.endpoint(
        info: *mut fi_info, endpoint: *mut *mut fid_ep, context: *mut c_void) -> c_int;
    fi_query_atomic(fid_domain) = fid_domain.ops => fi_ops_domain.query_atomic(
        datatype: fi_datatype, operation: fi_op, attributes: *mut fi_atomic_attr,
        flags: u64) -> c_int;
    fi_mr_regattr(fid) = fid_domain.mr => fi_ops_mr.regattr(
        attributes: *const fi_mr_attr, flags: u64, region: *mut *mut fid_mr) -> c_int;

    fi_av_insert(fid_av) = fid_av.ops => fi_ops_av.insert(
        addresses: *const c_void, count: usize, peers: *mut u64, flags: u64,
        context: *mut c_void) -> c_int;
    fi_av_remove(fid_av) = fid_av.ops => fi_ops_av.remove(
        peers: *mut u64, count: usize, flags: u64) -> c_int;
    fi_av_lookup(fid_av) = fid_av.ops => fi_ops_av.lookup(
        peer: u64, address: *mut c_void, length: *mut usize) -> c_int;

    fi_eq_read(fid_eq) = fid_eq.ops => fi_ops_eq.read(
        event: *mut u32, buffer: *mut c_void, length: usize, flags: u64) -> isize;
    fi_eq_readerr(fid_eq) = fid_eq.ops => fi_ops_eq.readerr(
        entry: *mut fi_eq_err_entry, flags: u64) -> isize;
    fi_eq_strerror(fid_eq) = fid_eq.ops => fi_ops_eq.strerror(
        code: c_int, data: *const c_void, buffer: *mut c_char, length: usize) -> *const c_char;

    fi_cq_read(fid_cq) = fid_cq.ops => fi_ops_cq.read(
        entries: *mut c_void, count: usize) -> isize;
    fi_cq_readfrom(fid_cq) = fid_cq.ops => fi_ops_cq.readfrom(
        entries: *mut c_void, count: usize, sources: *mut u64) -> isize;
    fi_cq_readerr(fid_cq) = fid_cq.ops => fi_ops_cq.readerr(
        entry: *mut fi_cq_err_entry, flags: u64) -> isize;
    fi_cq_sread(fid_cq) = fid_cq.ops => fi_ops_cq.sread(
        entries: *mut c_void, count: usize, condition: *const c_void, milliseconds: c_int) -> isize;
    fi_cq_sreadfrom(fid_cq) = fid_cq.ops => fi_ops_cq.sreadfrom(
        entries: *mut c_void, count: usize, sources: *mut u64, condition: *const c_void,
        milliseconds: c_int) -> isize;
    fi_cq_signal(fid_cq) = fid_cq.ops => fi_ops_cq.signal() -> c_int;
    fi_cq_strerror(fid_cq) = fid_cq.ops => fi_ops_cq.strerror(
        code: c_int, data: *const c_void, buffer: *mut c_char, length: usize) -> *const c_char;

    fi_cntr_read(fid_cntr) = fid_cntr.ops => fi_ops_cntr.read() -> u64;
    fi_cntr_readerr(fid_cntr) = fid_cntr.ops => fi_ops_cntr.readerr() -> u64;

    fi_cancel(fid) = fid_ep.ops => fi_ops_ep.cancel(context: *mut c_void) -> isize;
    fi_getopt(fid) = fid_ep.ops => fi_ops_ep.getopt(
        level: c_int, option: c_int, value: *mut c_void, length: *mut usize) -> c_int;
    fi_setopt(fid) = fid_ep.ops => fi_ops_ep.setopt(
        level: c_int, option: c_int, value: *const c_void, length: usize) -> c_int;

    fi_getname(fid) = fid_ep.cm => fi_ops_cm.getname(
        address: *mut c_void, length: *mut usize) -> c_int;
    fi_connect(fid_ep) = fid_ep.cm => fi_ops_cm.connect(
        address: *const c_void, data: *const c_void, length: usize) -> c_int;
    fi_listen(fid_pep) = fid_pep.cm => fi_ops_cm.listen() -> c_int;
    fi_accept(fid_ep) = fid_ep.cm => fi_ops_cm.accept(data: *const c_void, length: usize) -> c_int;
    fi_reject(fid_pep) = fid_pep.cm => fi_ops_cm.reject(
        request: *mut fid, data: *const c_void, length: usize) -> c_int;
    fi_shutdown(fid_ep) = fid_ep.cm => fi_ops_cm.shutdown(flags: u64) -> c_int;

    fi_send(fid_ep) = fid_ep.msg => fi_ops_msg.send(
        buffer: *const c_void, length: usize, descriptor: *mut c_void, peer: u64,
        context: *mut c_void) -> isize;
    fi_sendmsg(fid_ep) = fid_ep.msg => fi_ops_msg.sendmsg(
        message: *const fi_msg, flags: u64) -> isize;
    fi_inject(fid_ep) = fid_ep.msg => fi_ops_msg.inject(
        buffer: *const c_void, length: usize, peer: u64) -> isize;
    fi_recv(fid_ep) = fid_ep.msg => fi_ops_msg.recv(
        buffer: *mut c_void, length: usize, descriptor: *mut c_void, peer: u64,
        context: *mut c_void) -> isize;

    fi_tsendmsg(fid_ep) = fid_ep.tagged => fi_ops_tagged.sendmsg(
        message: *const fi_msg_tagged, flags: u64) -> isize;
    fi_tinject(fid_ep) = fid_ep.tagged => fi_ops_tagged.inject(
        buffer: *const c_void, length: usize, peer: u64, tag: u64) -> isize;
    fi_trecv(fid_ep) = fid_ep.tagged => fi_ops_tagged.recv(
        buffer: *mut c_void, length: usize, descriptor: *mut c_void, peer: u64, tag: u64,
        ignore: u64, context: *mut c_void) -> isize;

    fi_write(fid_ep) = fid_ep.rma => fi_ops_rma.write(
        buffer: *const c_void, length: usize, descriptor: *mut c_void, peer: u64, address: u64,
        key: u64, context: *mut c_void) -> isize;
    fi_writedata(fid_ep) = fid_ep.rma => fi_ops_rma.writedata(
        buffer: *const c_void, length: usize, descriptor: *mut c_void, data: u64, peer: u64,
        address: u64, key: u64, context: *mut c_void) -> isize;
    fi_writemsg(fid_ep) = fid_ep.rma => fi_ops_rma.writemsg(
        message: *const fi_msg_rma, flags: u64) -> isize;
    fi_inject_write(fid_ep) = fid_ep.rma => fi_ops_rma.inject(
        buffer: *const c_void, length: usize, peer: u64, address: u64, key: u64) -> isize;
    fi_inject_writedata(fid_ep) = fid_ep.rma => fi_ops_rma.injectdata(
        buffer: *const c_void, length: usize, data: u64, peer: u64, address: u64,
        key: u64) -> isize;
    fi_read(fid_ep) = fid_ep.rma => fi_ops_rma.read(
        buffer: *mut c_void, length: usize, descriptor: *mut c_void, peer: u64, address: u64,
        key: u64, context: *mut c_void) -> isize;
    fi_readmsg(fid_ep) = fid_ep.rma => fi_ops_rma.readmsg(
        message: *const fi_msg_rma, flags: u64) -> isize;

    fi_atomic(fid_ep) = fid_ep.atomic => fi_ops_atomic.write(
        buffer: *const c_void, count: usize, descriptor: *mut c_void, peer: u64, address: u64,
        key: u64, datatype: fi_datatype, operation: fi_op, context: *mut c_void) -> isize;
    fi_fetch_atomic(fid_ep) = fid_ep.atomic => fi_ops_atomic.readwrite(
        buffer: *const c_void, count: usize, descriptor: *mut c_void, result: *mut c_void,
        result_descriptor: *mut c_void, peer: u64, address: u64, key: u64, datatype: fi_datatype,
        operation: fi_op, context: *mut c_void) -> isize;
    fi_compare_atomic(fid_ep) = fid_ep.atomic => fi_ops_atomic.compwrite(
        buffer: *const c_void, count: usize, descriptor: *mut c_void, compare: *const c_void,
        compare_descriptor: *mut c_void, result: *mut c_void, result_descriptor: *mut c_void,
        peer: u64, address: u64, key: u64, datatype: fi_datatype, operation: fi_op,
        context: *mut c_void) -> isize;
}

/// `fi_enable`, and `fi_mr_enable`.
pub unsafe fn fi_enable(object: *mut fid) -> c_int {
    fi_control(object, FI_ENABLE as c_int, ptr::null_mut())
}

/// The wait object's file descriptor of a queue or counter (`FI_GETWAIT`).
pub unsafe fn wait_descriptor(object: *mut fid, descriptor: *mut c_int) -> c_int {
    fi_control(object, FI_GETWAIT as c_int, descriptor.cast())
}

/// `FI_OPT_INJECT_RMA_SIZE`, which the loaded library may know even if the headers do not name it.
pub const INJECT_RMA_SIZE: c_int = 18;

/// `fi_getopt` of an endpoint's option that is a `size_t`.
pub unsafe fn size_option(endpoint: *mut fid, option: c_int, size: *mut usize) -> c_int {
    let mut length = size_of::<usize>();
    fi_getopt(endpoint, FI_OPT_ENDPOINT as c_int, option, size.cast(), &mut length)
}

/// Can the counter be read? The two calls that read it cannot report that they are absent.
pub unsafe fn can_count(counter: *mut fid_cntr) -> bool {
    entry!(counter, ops => fi_ops_cntr.read).is_some()
        && entry!(counter, ops => fi_ops_cntr.readerr).is_some()
}

/// `fi_mr_regattr`, from a request whose layout is the same for all headers.
pub unsafe fn register_memory(
    domain: *mut fid_domain,
    request: *const fcs_mr_request,
    region: *mut *mut fid_mr,
) -> c_int {
    fcs_mr_regattr(Some(fi_mr_regattr), domain.cast(), request, region)
}

/// `fi_mr_refresh`.
pub unsafe fn fi_mr_refresh(
    region: *mut fid,
    vector: *const iovec,
    count: usize,
    flags: u64,
) -> c_int {
    fcs_mr_refresh(Some(fi_control), region, vector, count, flags)
}

/// `fi_mr_raw_attr`.
pub unsafe fn fi_mr_raw_attr(
    region: *mut fid,
    base_addr: *mut u64,
    raw_key: *mut u8,
    key_size: *mut usize,
    flags: u64,
) -> c_int {
    let mut attributes = crate::fi_mr_raw_attr { flags, base_addr, raw_key, key_size };
    fi_control(region, FI_GET_RAW_MR as c_int, ptr::from_mut(&mut attributes).cast())
}

/// `fi_mr_map_raw`.
pub unsafe fn fi_mr_map_raw(
    domain: *mut fid,
    base_addr: u64,
    raw_key: *mut u8,
    key_size: usize,
    key: *mut u64,
    flags: u64,
) -> c_int {
    let mut map = crate::fi_mr_map_raw { flags, base_addr, raw_key, key_size, key };
    fi_control(domain, FI_MAP_RAW_MR as c_int, ptr::from_mut(&mut map).cast())
}

/// `fi_mr_unmap_key`.
pub unsafe fn fi_mr_unmap_key(domain: *mut fid, key: u64) -> c_int {
    let mut key = key;
    fi_control(domain, FI_UNMAP_KEY as c_int, ptr::from_mut(&mut key).cast())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The defects of a table.
    #[derive(Debug, Clone, Copy)]
    pub(super) enum Tables {
        /// The object has no table.
        Missing,
        /// All entries are NULL.
        Empty,
        /// All entries are set, but the table's size ends before them.
        Short,
    }

    extern "C" fn called() {
        eprintln!("an entry beyond the end of its table was called");
        std::process::abort();
    }

    impl Tables {
        /// Space for any table; it is never freed.
        pub(super) fn table<T>(self) -> *mut T {
            let entry = match self {
                Self::Missing => return ptr::null_mut(),
                Self::Empty => 0,
                Self::Short => called as *const () as usize,
            };
            let mut table = vec![entry; size_of::<T>() / size_of::<usize>()];
            let is_short = matches!(self, Self::Short);
            table[0] = if is_short { size_of::<usize>() } else { size_of::<T>() };
            table.leak().as_mut_ptr().cast()
        }
    }

    #[test]
    fn absent_entries_return_enosys() {
        for tables in [Tables::Missing, Tables::Empty, Tables::Short] {
            // SAFETY: no call gets far enough to use its arguments.
            for (name, is_refused) in unsafe { call_all(tables) } {
                assert!(is_refused, "{name}, tables {tables:?}");
            }
        }
    }

    #[test]
    fn composed_calls_return_enosys() {
        for tables in [Tables::Missing, Tables::Empty, Tables::Short] {
            // SAFETY: all bytes zero is a valid object; no call gets far enough to use its
            // arguments.
            unsafe {
                let mut region: fid_mr = std::mem::zeroed();
                region.fid.ops = tables.table();
                let mut domain: fid_domain = std::mem::zeroed();
                (domain.fid.ops, domain.mr) = (tables.table(), tables.table());
                let mut counter: fid_cntr = std::mem::zeroed();
                counter.ops = tables.table();
                let (region, domain) = ((&raw mut region).cast(), &raw mut domain);
                let request = fcs_mr_request::default();
                let (mut number, mut size, mut descriptor) = (0, 0, -1);
                let answers = [
                    fi_enable(region),
                    wait_descriptor(region, &mut descriptor),
                    register_memory(domain, &request, &mut ptr::null_mut()),
                    fi_mr_refresh(region, ptr::null(), 0, 0),
                    fi_mr_raw_attr(region, &mut number, ptr::null_mut(), &mut size, 0),
                    fi_mr_map_raw(domain.cast(), 0, ptr::null_mut(), 0, &mut number, 0),
                    fi_mr_unmap_key(domain.cast(), 0),
                ];
                assert_eq!(answers, [-FI_ENOSYS; 7], "tables {tables:?}");
                assert!(!can_count(&mut counter), "tables {tables:?}");
            }
        }
    }

    #[test]
    fn present_entry_is_called_with_its_object() {
        unsafe extern "C" fn recv(
            endpoint: *mut fid_ep,
            _: *mut c_void,
            length: usize,
            _: *mut c_void,
            _: u64,
            _: *mut c_void,
        ) -> isize {
            assert!(!endpoint.is_null());
            length as isize
        }
        // SAFETY: all bytes zero is a valid object and a valid table; `recv` uses no pointer.
        unsafe {
            let mut table: fi_ops_msg = std::mem::zeroed();
            table.size = 2 * size_of::<usize>();
            table.recv = Some(recv);
            let mut endpoint: fid_ep = std::mem::zeroed();
            endpoint.msg = &raw mut table;
            let null = ptr::null_mut();
            assert_eq!(fi_recv(&mut endpoint, null, 17, null, 0, null), 17);
            let answer = fi_send(&mut endpoint, null, 17, null, 0, null);
            assert_eq!(answer, isize::ABSENT, "the table ends before this entry");
        }
    }
}
