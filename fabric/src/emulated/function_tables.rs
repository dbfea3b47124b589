//! The objects of the emulated provider: tables of functions that act on its network.
#![allow(unsafe_code)]

use std::os::raw::{c_int, c_void};

use libfabric_sys as sys;

use super::Fault;
use super::open_objects::{Endpoint, Local, Object, Posted, Region, with};
use crate::provider_objects::{RegistrationRequest, object, read_no_failure};

fn open(address: usize, network: usize, state: Object) {
    with(|world| world.open(address, network, state));
}

pub(super) fn fabric(network: usize) -> *mut sys::fid_fabric {
    object!(fid_fabric, FI_CLASS_FABRIC, network, Object::Fabric, {
        ops: fi_ops_fabric { domain = Some(domain) },
    })
}

unsafe extern "C" fn close(object: *mut sys::fid) -> c_int {
    if with(|world| world.close(object.addr())) { 0 } else { -sys::FI_EINVAL }
}

/// Binds endpoints to queues and vectors.
unsafe extern "C" fn bind(object: *mut sys::fid, to: *mut sys::fid, _: u64) -> c_int {
    with(|world| {
        let is_vector = matches!(world.object(to.addr()), Some(Object::Vector(_)));
        let Some(endpoint) = world.endpoint(object.addr()) else { return -sys::FI_EINVAL };
        match is_vector {
            true => endpoint.bind_vector(to.addr()),
            false => endpoint.bind_queue(to.addr()),
        }
        0
    })
}

unsafe extern "C" fn control(_: *mut sys::fid, command: c_int, _: *mut c_void) -> c_int {
    if command == sys::FI_ENABLE as c_int { 0 } else { -sys::FI_ENOSYS }
}

unsafe extern "C" fn domain(
    fabric: *mut sys::fid_fabric,
    _: *mut sys::fi_info,
    opened: *mut *mut sys::fid_domain,
    _: *mut c_void,
) -> c_int {
    let network = with(|world| world.network_of(fabric.addr()));
    let object = object!(fid_domain, FI_CLASS_DOMAIN, network, Object::Domain, {
        ops: fi_ops_domain { av_open = Some(vector), cq_open = Some(queue), endpoint = Some(endpoint) },
        mr: fi_ops_mr { regattr = Some(register) },
    });
    // SAFETY: it receives the object.
    unsafe { *opened = object };
    0
}

unsafe extern "C" fn vector(
    domain: *mut sys::fid_domain,
    _: *mut sys::fi_av_attr,
    opened: *mut *mut sys::fid_av,
    _: *mut c_void,
) -> c_int {
    let network = with(|world| world.network_of(domain.addr()));
    let object = object!(fid_av, FI_CLASS_AV, network, Object::Vector(Vec::new()), {
        ops: fi_ops_av { insert = Some(insert), remove = Some(remove) },
    });
    // SAFETY: it receives the object.
    unsafe { *opened = object };
    0
}

unsafe extern "C" fn insert(
    vector: *mut sys::fid_av,
    address: *const c_void,
    _: usize,
    peer: *mut u64,
    _: u64,
    _: *mut c_void,
) -> c_int {
    // SAFETY: an address is a number, and the caller pads it; `peer` has space for one.
    let number = unsafe { address.cast::<u64>().read_unaligned() };
    with(|world| {
        let Some(Object::Vector(peers)) = world.object(vector.addr()) else {
            return -sys::FI_EINVAL;
        };
        let known = peers.iter().position(|known| *known == number);
        let index = known.unwrap_or_else(|| {
            peers.push(number);
            peers.len() - 1
        });
        // SAFETY: as above.
        unsafe { *peer = index as u64 };
        1
    })
}

/// Numbers of peers are not reused, so nothing is to be done.
unsafe extern "C" fn remove(_: *mut sys::fid_av, _: *mut u64, _: usize, _: u64) -> c_int {
    0
}

unsafe extern "C" fn queue(
    domain: *mut sys::fid_domain,
    attributes: *mut sys::fi_cq_attr,
    opened: *mut *mut sys::fid_cq,
    _: *mut c_void,
) -> c_int {
    // SAFETY: valid for the call.
    let attributes = unsafe { &*attributes };
    let is_tagged = attributes.format == sys::FI_CQ_FORMAT_TAGGED;
    if attributes.wait_obj != sys::FI_WAIT_NONE || !is_tagged {
        return -sys::FI_ENOSYS;
    }
    let network = with(|world| world.network_of(domain.addr()));
    let object = object!(fid_cq, FI_CLASS_CQ, network, Object::Queue(Default::default()), {
        ops: fi_ops_cq { read = Some(read_queue), readerr = Some(read_no_failure) },
    });
    // SAFETY: it receives the object.
    unsafe { *opened = object };
    0
}

unsafe extern "C" fn read_queue(queue: *mut sys::fid_cq, into: *mut c_void, count: usize) -> isize {
    let entries = with(|world| world.read(queue.addr(), count));
    for (at, entry) in entries.iter().enumerate() {
        // SAFETY: space for `count` entries with tags.
        unsafe { into.cast::<sys::fi_cq_tagged_entry>().add(at).write(entry.tagged()) };
    }
    if entries.is_empty() { -(sys::FI_EAGAIN as isize) } else { entries.len() as isize }
}

unsafe extern "C" fn register(
    domain: *mut sys::fid,
    request: *const sys::fi_mr_attr,
    _: u64,
    opened: *mut *mut sys::fid_mr,
) -> c_int {
    // SAFETY: valid for the call.
    let Some(request) = (unsafe { RegistrationRequest::read(request) }) else {
        return -sys::FI_EINVAL;
    };
    let (network, fault) = with(|world| {
        let network = world.network_of(domain.addr());
        (network, world.fault(network))
    });
    let is_device = request.is_of_device();
    if is_device && fault == Fault::RefusesRegistration {
        return -sys::FI_EINVAL;
    }
    let (range, rights) = (request.range(), (request.access(), request.key()));
    let region = Region::new(domain.addr(), range, rights, is_device);
    let object = object!(fid_mr, FI_CLASS_MR, network, Object::Region(region), {});
    // SAFETY: just made, and not visible to others; `opened` receives it.
    unsafe {
        (*object).mem_desc = object.cast();
        (*object).key = request.key();
        *opened = object;
    }
    0
}

unsafe extern "C" fn endpoint(
    domain: *mut sys::fid_domain,
    _: *mut sys::fi_info,
    opened: *mut *mut sys::fid_ep,
    _: *mut c_void,
) -> c_int {
    let (network, number) = with(|world| (world.network_of(domain.addr()), world.next_number()));
    let state = Endpoint::new(number, domain.addr());
    let object = object!(fid_ep, FI_CLASS_EP, network, Object::Endpoint(state), {
        ops: fi_ops_ep { setopt = Some(set_option) },
        cm: fi_ops_cm { getname = Some(name) },
        msg: fi_ops_msg { send = Some(send), recv = Some(receive), inject = Some(inject) },
        rma: fi_ops_rma { write = Some(write), writemsg = Some(write_message), read = Some(read) },
    });
    // SAFETY: it receives the object.
    unsafe { *opened = object };
    0
}

unsafe extern "C" fn name(endpoint: *mut sys::fid, name: *mut c_void, length: *mut usize) -> c_int {
    let number = with(|world| world.endpoint(endpoint.addr()).map_or(0, |it| it.number()));
    // SAFETY: space for as many bytes as `length` says, which is enough.
    unsafe {
        name.cast::<u64>().write_unaligned(number);
        *length = size_of::<u64>();
    }
    0
}

unsafe extern "C" fn set_option(
    endpoint: *mut sys::fid,
    _: c_int,
    option: c_int,
    value: *const c_void,
    _: usize,
) -> c_int {
    if option != sys::FI_OPT_FI_HMEM_P2P as c_int {
        return -sys::FI_ENOPROTOOPT;
    }
    // SAFETY: the option is an `int`.
    let policy = unsafe { value.cast::<c_int>().read() };
    let fault = with(|world| world.fault(world.network_of(endpoint.addr())));
    let is_required = policy == sys::FI_HMEM_P2P_REQUIRED as c_int;
    let is_refused = fault == Fault::RefusesPeerToPeer && is_required;
    if is_refused { -sys::FI_EOPNOTSUPP } else { 0 }
}

fn local(at: *const c_void, length: usize, descriptor: *mut c_void) -> Local {
    Local::new(at.expose_provenance(), length, descriptor.addr())
}

unsafe extern "C" fn send(
    endpoint: *mut sys::fid_ep,
    at: *const c_void,
    length: usize,
    descriptor: *mut c_void,
    peer: u64,
    context: *mut c_void,
) -> isize {
    let (local, context) = (local(at, length, descriptor), context.expose_provenance());
    with(|world| world.send(Posted::new(endpoint.addr(), peer, local, context)))
}

unsafe extern "C" fn inject(
    endpoint: *mut sys::fid_ep,
    at: *const c_void,
    length: usize,
    peer: u64,
) -> isize {
    let bytes = match length {
        0 => Vec::new(),
        // SAFETY: readable for the call.
        _ => unsafe { std::slice::from_raw_parts(at.cast::<u8>(), length) }.to_vec(),
    };
    with(|world| world.deliver(endpoint.addr(), peer, bytes))
}

unsafe extern "C" fn receive(
    endpoint: *mut sys::fid_ep,
    at: *mut c_void,
    length: usize,
    descriptor: *mut c_void,
    _: u64,
    context: *mut c_void,
) -> isize {
    let into = local(at, length, descriptor);
    with(|world| world.receive(endpoint.addr(), into, context.expose_provenance()))
}

unsafe extern "C" fn write(
    endpoint: *mut sys::fid_ep,
    at: *const c_void,
    length: usize,
    descriptor: *mut c_void,
    peer: u64,
    offset: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    let (local, context) = (local(at, length, descriptor), context.expose_provenance());
    let posted = Posted::new(endpoint.addr(), peer, local, context);
    with(|world| world.transfer(posted, (offset, key), false))
}

unsafe extern "C" fn write_message(
    endpoint: *mut sys::fid_ep,
    message: *const sys::fi_msg_rma,
    flags: u64,
) -> isize {
    // SAFETY: valid for the call, with one piece, its descriptor, and one range.
    let (message, piece, descriptor, range) = unsafe {
        let message = &*message;
        (message, *message.msg_iov, *message.desc, &*message.rma_iov)
    };
    if message.iov_count != 1 || message.rma_iov_count != 1 || range.len != piece.iov_len {
        return -(sys::FI_EINVAL as isize);
    }
    let local = local(piece.iov_base, piece.iov_len, descriptor);
    let context = message.context.expose_provenance();
    let posted = Posted::new(endpoint.addr(), message.addr, local, context);
    let posted = match flags & sys::FI_REMOTE_CQ_DATA {
        0 => posted,
        _ => posted.with_data(message.data),
    };
    with(|world| world.transfer(posted, (range.addr, range.key), false))
}

unsafe extern "C" fn read(
    endpoint: *mut sys::fid_ep,
    at: *mut c_void,
    length: usize,
    descriptor: *mut c_void,
    peer: u64,
    offset: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    let (local, context) = (local(at, length, descriptor), context.expose_provenance());
    let posted = Posted::new(endpoint.addr(), peer, local, context);
    with(|world| world.transfer(posted, (offset, key), true))
}
