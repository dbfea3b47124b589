//! The objects of the fake providers: tables of functions that act on the thread's network.
#![allow(unsafe_code)]

use std::os::raw::{c_int, c_void};

use libfabric_sys as sys;

use super::network::{
    Endpoint, Kind, LocalSegment, Object, Packet, Queue, Receive, Region, overwrite_context, with,
};
use crate::provider_objects::{RegistrationRequest, object, read_no_failure, table};

fn open(address: usize, parent: usize, state: Object) {
    with(|network| network.open(address, state, parent));
}

pub(super) fn fabric() -> *mut sys::fid_fabric {
    object!(fid_fabric, FI_CLASS_FABRIC, 0, Object::Fabric, {
        ops: fi_ops_fabric { domain = Some(domain) },
    })
}

unsafe extern "C" fn close(object: *mut sys::fid) -> c_int {
    with(|network| network.close(object as usize))
}

/// Binds endpoints to queues and vectors, and regions to endpoints.
unsafe extern "C" fn bind(object: *mut sys::fid, to: *mut sys::fid, _: u64) -> c_int {
    let (object, to) = (object as usize, to as usize);
    with(|network| {
        let is_vector = matches!(network.objects[&to].object, Object::Vector(_));
        let is_bound = network.profile.mr_mode & sys::FI_MR_ENDPOINT != 0;
        match &mut network.objects.get_mut(&object).unwrap().object {
            Object::Endpoint(endpoint) if is_vector => endpoint.vector = to,
            Object::Endpoint(endpoint) => endpoint.queue = to,
            Object::Region(region) if is_bound => region.endpoint = to,
            _ => return network.misuse("binding an object of another kind".to_owned()) as c_int,
        }
        network.need(object, to);
        0
    })
}

unsafe extern "C" fn control(object: *mut sys::fid, command: c_int, _: *mut c_void) -> c_int {
    if command != sys::FI_ENABLE as c_int {
        return -sys::FI_ENOSYS;
    }
    with(|network| match &mut network.objects.get_mut(&(object as usize)).unwrap().object {
        Object::Endpoint(endpoint) if endpoint.queue != 0 && endpoint.vector != 0 => {
            endpoint.is_enabled = true;
            0
        }
        Object::Region(region) if region.endpoint != 0 => {
            region.is_enabled = true;
            0
        }
        _ => network.misuse("enabling an endpoint without bindings".to_owned()) as c_int,
    })
}

unsafe extern "C" fn domain(
    fabric: *mut sys::fid_fabric,
    _: *mut sys::fi_info,
    opened: *mut *mut sys::fid_domain,
    _: *mut c_void,
) -> c_int {
    let object = object!(fid_domain, FI_CLASS_DOMAIN, fabric.expose_provenance(), Object::Domain, {
        ops: fi_ops_domain {
            av_open = Some(vector), cq_open = Some(queue), endpoint = Some(endpoint),
            query_atomic = Some(query_atomic),
        },
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
    let object = object!(fid_av, FI_CLASS_AV, domain.expose_provenance(), Object::Vector(Vec::new()), {
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
    // SAFETY: an address is a number; `peer` has space for one.
    let number = unsafe { address.cast::<u64>().read_unaligned() };
    with(|network| {
        let Object::Vector(peers) =
            &mut network.objects.get_mut(&(vector as usize)).unwrap().object
        else {
            return network.misuse("no vector".to_owned()) as c_int;
        };
        peers.push(number);
        // SAFETY: as above.
        unsafe { *peer = peers.len() as u64 - 1 };
        1
    })
}

unsafe extern "C" fn remove(vector: *mut sys::fid_av, peer: *mut u64, _: usize, _: u64) -> c_int {
    // SAFETY: it points to one.
    let peer = unsafe { *peer };
    with(|network| {
        if let Object::Vector(peers) =
            &mut network.objects.get_mut(&(vector as usize)).unwrap().object
        {
            peers[peer as usize] = 0;
        }
    });
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
    let profile = with(|network| network.profile);
    let tagged = attributes.format == sys::FI_CQ_FORMAT_TAGGED;
    let has_form = profile.caps & sys::FI_TAGGED != 0 || !tagged;
    if attributes.wait_obj != sys::FI_WAIT_NONE || !has_form {
        return -sys::FI_ENOSYS;
    }
    let size = if attributes.size == 0 { profile.entries } else { attributes.size };
    let state = Queue { size, tagged, entries: Default::default() };
    let object = object!(fid_cq, FI_CLASS_CQ, domain.expose_provenance(), Object::Queue(state), {
        ops: fi_ops_cq { read = Some(read_queue), readerr = Some(read_no_failure) },
    });
    // SAFETY: it receives the object.
    unsafe { *opened = object };
    0
}

unsafe extern "C" fn read_queue(queue: *mut sys::fid_cq, into: *mut c_void, count: usize) -> isize {
    let queue = queue as usize;
    with(|network| {
        network.progress(queue);
        let Some(Object::Queue(Queue { tagged, .. })) =
            network.objects.get(&queue).map(|open| &open.object)
        else {
            return network.misuse("reading a closed queue".to_owned());
        };
        let tagged = *tagged;
        for at in 0..count {
            let Some(entry) = network.take_entry(queue) else {
                return if at == 0 { -(sys::FI_EAGAIN as isize) } else { at as isize };
            };
            // SAFETY: space for `count` entries of the queue's format.
            unsafe {
                if tagged {
                    into.cast::<sys::fi_cq_tagged_entry>().add(at).write(entry);
                } else {
                    let sys::fi_cq_tagged_entry { op_context, flags, len, buf, data, .. } = entry;
                    let entry = sys::fi_cq_data_entry { op_context, flags, len, buf, data };
                    into.cast::<sys::fi_cq_data_entry>().add(at).write(entry);
                }
            }
        }
        count as isize
    })
}

unsafe extern "C" fn register(
    domain: *mut sys::fid,
    request: *const sys::fi_mr_attr,
    _: u64,
    opened: *mut *mut sys::fid_mr,
) -> c_int {
    // SAFETY: valid for the call.
    let request = unsafe { RegistrationRequest::read(request) };
    let profile = with(|network| network.profile);
    let has_key = profile.mr_mode & sys::FI_MR_PROV_KEY != 0;
    let key = if has_key {
        with(|network| network.draw(1 << (8 * profile.key_size - 2).min(48)) as u64)
    } else {
        request.map_or(0, |request| request.key())
    };
    let width = 8 * profile.key_size as u32;
    let Some(request) = request.filter(|_| width >= 64 || key >> width == 0) else {
        return with(|network| network.misuse("a bad registration".to_owned())) as c_int;
    };
    let (base, length) = request.range();
    let region = Region {
        domain: domain as usize,
        base,
        length,
        access: request.access(),
        key,
        endpoint: 0,
        is_enabled: profile.mr_mode & sys::FI_MR_ENDPOINT == 0,
    };
    let object =
        object!(fid_mr, FI_CLASS_MR, domain.expose_provenance(), Object::Region(region), {});
    // SAFETY: just made, and not visible to others; `opened` receives it.
    unsafe {
        (*object).mem_desc = object.cast();
        (*object).key = key;
        *opened = object;
    }
    0
}

unsafe extern "C" fn query_atomic(
    _: *mut sys::fid_domain,
    datatype: sys::fi_datatype,
    operation: sys::fi_op,
    attributes: *mut sys::fi_atomic_attr,
    _: u64,
) -> c_int {
    if datatype != sys::FI_UINT64 || ![sys::FI_SUM, sys::FI_CSWAP].contains(&operation) {
        return -sys::FI_EOPNOTSUPP;
    }
    // SAFETY: space for one value.
    unsafe { *attributes = sys::fi_atomic_attr { count: 1, size: 8 } };
    0
}

unsafe extern "C" fn endpoint(
    domain: *mut sys::fid_domain,
    _: *mut sys::fi_info,
    opened: *mut *mut sys::fid_ep,
    _: *mut c_void,
) -> c_int {
    let profile = with(|network| network.profile);
    let number = with(|network| {
        network.next_number += 1;
        network.next_number
    });
    let state = Endpoint { number, domain: domain as usize, ..Endpoint::default() };
    let object = object!(fid_ep, FI_CLASS_EP, domain.expose_provenance(), Object::Endpoint(state), {
        ops: fi_ops_ep { getopt = Some(option) },
        cm: fi_ops_cm { getname = Some(name) },
        msg: fi_ops_msg {
            send = Some(send), sendmsg = Some(send_message), inject = Some(inject),
            recv = Some(receive),
        },
        rma: fi_ops_rma {
            write = Some(write), writemsg = Some(write_message), read = Some(read),
            writedata = profile.write_data.then_some(write_data as _),
            inject = Some(inject_write),
            injectdata = profile.inject_data.then_some(inject_write_data as _),
        },
    });
    let tagged =
        table!(fi_ops_tagged { inject = Some(inject_tagged), recv = Some(receive_tagged) });
    let atomic = table!(fi_ops_atomic {
        write = Some(atomic), readwrite = Some(fetch_atomic), compwrite = Some(compare_atomic)
    });
    // SAFETY: just made, and not visible to others; `opened` receives it.
    unsafe {
        if profile.caps & sys::FI_TAGGED != 0 {
            (*object).tagged = tagged;
        }
        if profile.caps & sys::FI_ATOMIC != 0 {
            (*object).atomic = atomic;
        }
        *opened = object;
    }
    0
}

unsafe extern "C" fn name(endpoint: *mut sys::fid, name: *mut c_void, length: *mut usize) -> c_int {
    let number = with(|network| network.endpoint(endpoint as usize).map_or(0, |it| it.number));
    // SAFETY: space for as many bytes as `length` says, which is enough.
    unsafe {
        name.cast::<u64>().write_unaligned(number);
        *length = 8;
    }
    0
}

/// FI_OPT_INJECT_RMA_SIZE.
unsafe extern "C" fn option(
    _: *mut sys::fid,
    _: c_int,
    option: c_int,
    value: *mut c_void,
    _: *mut usize,
) -> c_int {
    const INJECT_RMA_SIZE: c_int = 18;
    if option != INJECT_RMA_SIZE {
        return -sys::FI_ENOSYS;
    }
    // SAFETY: space for one value.
    unsafe { *value.cast::<usize>() = with(|network| network.profile.inject_rma) };
    0
}

impl Packet {
    fn new(endpoint: *mut sys::fid_ep, kind: Kind, context: *mut c_void) -> Self {
        Self {
            from: endpoint as usize,
            to: 0,
            kind,
            source: Vec::new(),
            result: None,
            length: 0,
            bytes: None,
            remote: (0, 0),
            data: None,
            context: context as usize,
            delivery_complete: false,
            is_reported: false,
            parts: None,
        }
    }

    fn source(mut self, at: *const c_void, length: usize, descriptor: *mut c_void) -> Self {
        self.source.push(LocalSegment { at: at as usize, length, descriptor: descriptor as usize });
        self.length += length;
        self
    }

    fn post(self, peer: u64) -> isize {
        with(|network| network.post(self, peer))
    }

    /// Injects bytes, if they are not too long.
    fn inject(self, peer: u64) -> isize {
        let limit = with(|network| match self.kind {
            Kind::Write => network.profile.inject_rma,
            _ => network.profile.inject_size,
        });
        match limit {
            0 => -(sys::FI_EOPNOTSUPP as isize),
            limit if self.length > limit => {
                with(|network| network.misuse(format!("{} bytes are injected", self.length)))
            }
            _ => self.post(peer),
        }
    }
}

unsafe extern "C" fn send(
    endpoint: *mut sys::fid_ep,
    at: *const c_void,
    length: usize,
    descriptor: *mut c_void,
    peer: u64,
    context: *mut c_void,
) -> isize {
    Packet::new(endpoint, Kind::Message(None), context).source(at, length, descriptor).post(peer)
}

unsafe extern "C" fn send_message(
    endpoint: *mut sys::fid_ep,
    message: *const sys::fi_msg,
    flags: u64,
) -> isize {
    // SAFETY: valid for the call, with at least one piece.
    let (message, piece) = unsafe { (&*message, *(*message).msg_iov) };
    let packet = Packet::new(endpoint, Kind::Message(None), message.context);
    // SAFETY: as above.
    let packet = packet.source(piece.iov_base, piece.iov_len, unsafe { *message.desc });
    Packet { delivery_complete: flags & sys::FI_DELIVERY_COMPLETE != 0, ..packet }
        .post(message.addr)
}

unsafe extern "C" fn inject(
    endpoint: *mut sys::fid_ep,
    at: *const c_void,
    length: usize,
    peer: u64,
) -> isize {
    let null = std::ptr::null_mut();
    Packet::new(endpoint, Kind::Message(None), null).source(at, length, null).inject(peer)
}

unsafe extern "C" fn inject_tagged(
    endpoint: *mut sys::fid_ep,
    at: *const c_void,
    length: usize,
    peer: u64,
    tag: u64,
) -> isize {
    let null = std::ptr::null_mut();
    Packet::new(endpoint, Kind::Message(Some(tag)), null).source(at, length, null).inject(peer)
}

unsafe extern "C" fn receive(
    endpoint: *mut sys::fid_ep,
    at: *mut c_void,
    length: usize,
    descriptor: *mut c_void,
    _: u64,
    context: *mut c_void,
) -> isize {
    post_receive(endpoint, (at, length, descriptor), None, context)
}

unsafe extern "C" fn receive_tagged(
    endpoint: *mut sys::fid_ep,
    at: *mut c_void,
    length: usize,
    descriptor: *mut c_void,
    _: u64,
    tag: u64,
    _: u64,
    context: *mut c_void,
) -> isize {
    post_receive(endpoint, (at, length, descriptor), Some(tag), context)
}

fn post_receive(
    endpoint: *mut sys::fid_ep,
    (at, length, descriptor): (*mut c_void, usize, *mut c_void),
    tag: Option<u64>,
    context: *mut c_void,
) -> isize {
    let piece = LocalSegment { at: at as usize, length, descriptor: descriptor as usize };
    with(|network| {
        if let Err(what) = network.check_local(endpoint as usize, piece, sys::FI_RECV) {
            return network.misuse(what);
        }
        let depth = network.profile.depth;
        let Some(endpoint) = network.endpoint(endpoint as usize) else {
            return network.misuse("a receive on a closed endpoint".to_owned());
        };
        if endpoint.receives.len() >= depth {
            return -(sys::FI_EAGAIN as isize);
        }
        overwrite_context(context as usize);
        endpoint.receives.push_back(Receive { piece, tag, context: context as usize });
        0
    })
}

unsafe extern "C" fn write(
    endpoint: *mut sys::fid_ep,
    at: *const c_void,
    length: usize,
    descriptor: *mut c_void,
    peer: u64,
    address: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    let packet = Packet::new(endpoint, Kind::Write, context).source(at, length, descriptor);
    Packet { remote: (address, key), ..packet }.post(peer)
}

unsafe extern "C" fn write_data(
    endpoint: *mut sys::fid_ep,
    at: *const c_void,
    length: usize,
    descriptor: *mut c_void,
    data: u64,
    peer: u64,
    address: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    let packet = Packet::new(endpoint, Kind::Write, context).source(at, length, descriptor);
    Packet { remote: (address, key), data: Some(data), ..packet }.post(peer)
}

unsafe extern "C" fn write_message(
    endpoint: *mut sys::fid_ep,
    message: *const sys::fi_msg_rma,
    flags: u64,
) -> isize {
    // SAFETY: valid for the call, with as many pieces and descriptors as it says, and one
    // range.
    let (message, remote, pieces, descriptors) = unsafe {
        let it = &*message;
        let pieces = std::slice::from_raw_parts(it.msg_iov, it.iov_count);
        (it, &*it.rma_iov, pieces, std::slice::from_raw_parts(it.desc, it.iov_count))
    };
    let mut packet = Packet::new(endpoint, Kind::Write, message.context);
    for (piece, descriptor) in pieces.iter().zip(descriptors) {
        packet = packet.source(piece.iov_base, piece.iov_len, *descriptor);
    }
    let has_data = flags & sys::FI_REMOTE_CQ_DATA != 0;
    let (profile, known) = (
        with(|network| network.profile),
        sys::FI_REMOTE_CQ_DATA | sys::FI_DELIVERY_COMPLETE | sys::FI_COMPLETION | sys::FI_INJECT,
    );
    let is_injected = flags & sys::FI_INJECT != 0;
    if (has_data && !profile.write_data)
        || flags & !known != 0
        || remote.len != packet.length
        || (is_injected && packet.length > profile.inject_rma)
    {
        let what = format!("a write of {} bytes with flags {flags:#x}", packet.length);
        return with(|network| network.misuse(what));
    }
    packet.data = has_data.then_some(message.data);
    packet.remote = (remote.addr, remote.key);
    packet.delivery_complete = flags & sys::FI_DELIVERY_COMPLETE != 0;
    packet.post(message.addr)
}

unsafe extern "C" fn inject_write(
    endpoint: *mut sys::fid_ep,
    at: *const c_void,
    length: usize,
    peer: u64,
    address: u64,
    key: u64,
) -> isize {
    let null = std::ptr::null_mut();
    let packet = Packet::new(endpoint, Kind::Write, null).source(at, length, null);
    Packet { remote: (address, key), ..packet }.inject(peer)
}

unsafe extern "C" fn inject_write_data(
    endpoint: *mut sys::fid_ep,
    at: *const c_void,
    length: usize,
    data: u64,
    peer: u64,
    address: u64,
    key: u64,
) -> isize {
    let null = std::ptr::null_mut();
    let packet = Packet::new(endpoint, Kind::Write, null).source(at, length, null);
    Packet { remote: (address, key), data: Some(data), ..packet }.inject(peer)
}

unsafe extern "C" fn read(
    endpoint: *mut sys::fid_ep,
    at: *mut c_void,
    length: usize,
    descriptor: *mut c_void,
    peer: u64,
    address: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    let packet = Packet::new(endpoint, Kind::Read, context);
    let result = LocalSegment { at: at as usize, length, descriptor: descriptor as usize };
    Packet { remote: (address, key), result: Some(result), length, ..packet }.post(peer)
}

/// An atomic operation on one word.
fn post_atomic(
    endpoint: *mut sys::fid_ep,
    kind: Kind,
    (operand, descriptor): (*const c_void, *mut c_void),
    result: Option<(*mut c_void, *mut c_void)>,
    (peer, remote): (u64, (u64, u64)),
    context: *mut c_void,
) -> isize {
    let packet = Packet::new(endpoint, kind, context).source(operand, 8, descriptor);
    let result = result.map(|(at, descriptor)| LocalSegment {
        at: at as usize,
        length: 8,
        descriptor: descriptor as usize,
    });
    Packet { remote, result, ..packet }.post(peer)
}

unsafe extern "C" fn atomic(
    endpoint: *mut sys::fid_ep,
    operand: *const c_void,
    _: usize,
    descriptor: *mut c_void,
    peer: u64,
    address: u64,
    key: u64,
    _: sys::fi_datatype,
    operation: sys::fi_op,
    context: *mut c_void,
) -> isize {
    let kind = Kind::Atomic(operation, 0, false);
    post_atomic(endpoint, kind, (operand, descriptor), None, (peer, (address, key)), context)
}

unsafe extern "C" fn fetch_atomic(
    endpoint: *mut sys::fid_ep,
    operand: *const c_void,
    _: usize,
    descriptor: *mut c_void,
    result: *mut c_void,
    result_descriptor: *mut c_void,
    peer: u64,
    address: u64,
    key: u64,
    _: sys::fi_datatype,
    operation: sys::fi_op,
    context: *mut c_void,
) -> isize {
    let kind = Kind::Atomic(operation, 0, true);
    let result = Some((result, result_descriptor));
    post_atomic(endpoint, kind, (operand, descriptor), result, (peer, (address, key)), context)
}

unsafe extern "C" fn compare_atomic(
    endpoint: *mut sys::fid_ep,
    operand: *const c_void,
    _: usize,
    descriptor: *mut c_void,
    compared: *const c_void,
    _: *mut c_void,
    result: *mut c_void,
    result_descriptor: *mut c_void,
    peer: u64,
    address: u64,
    key: u64,
    _: sys::fi_datatype,
    operation: sys::fi_op,
    context: *mut c_void,
) -> isize {
    // SAFETY: one word, aligned.
    let kind = Kind::Atomic(operation, unsafe { compared.cast::<u64>().read() }, true);
    let result = Some((result, result_descriptor));
    post_atomic(endpoint, kind, (operand, descriptor), result, (peer, (address, key)), context)
}
