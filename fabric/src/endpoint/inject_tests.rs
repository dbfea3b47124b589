//! Providers that inject messages but no writes, or no writes with immediates: an installed
//! provider with such entries in its tables.
#![allow(unsafe_code)]

use std::os::raw::{c_int, c_void};
use std::time::{Duration, Instant};

use libfabric_sys as sys;

use super::{InjectOutcome, RemoteTarget, inject_write_size};
use crate::ring::{Port, PortEvent, RingOptions};
use crate::{
    Access, AddressVector, CompletionQueue, Domain, Endpoint, EndpointKind, HostMemory, Query,
    RemoteMemory, TransferFlags,
};

const TIMEOUT: Duration = Duration::from_secs(10);

/// An endpoint and the objects that it needs.
struct Opened {
    domain: Domain,
    endpoint: Endpoint,
    queue: CompletionQueue,
    addresses: AddressVector,
}

fn open() -> Opened {
    let offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first().unwrap();
    let domain = Domain::open(&offer).unwrap();
    let addresses = AddressVector::open(&domain).unwrap();
    let mut queue = CompletionQueue::open(&domain).unwrap();
    let builder = Endpoint::builder(&domain).addresses(&addresses);
    let endpoint = builder.queue(&mut queue).open().unwrap();
    Opened { domain, endpoint, queue, addresses }
}

/// Replaces the entries for injected writes.
fn replace(endpoint: &Endpoint, change: impl FnOnce(&mut sys::fi_ops_rma)) {
    // SAFETY: the endpoint is open and only used here; the table is leaked, since the endpoint
    // keeps it.
    unsafe {
        let raw = endpoint.handle.as_ptr();
        let mut table = Box::new(std::ptr::read((*raw).rma));
        change(&mut table);
        (*raw).rma = Box::leak(table);
    }
}

unsafe extern "C" fn refuse(
    _: *mut sys::fid_ep,
    _: *const c_void,
    _: usize,
    _: u64,
    _: u64,
    _: u64,
) -> isize {
    -(sys::FI_EOPNOTSUPP as isize)
}

/// Sends a few short messages through a ring to the same process.
fn pass_messages(opened: Opened) {
    let Opened { domain, endpoint, queue, addresses } = opened;
    let peer = addresses.insert(&endpoint.address().unwrap()).unwrap();
    let mut port = Port::new(endpoint, queue);
    let options = RingOptions::new(port.endpoint(), 64 << 10).unwrap();
    let reading = port.offer(&options).unwrap();
    let (writing, answer) = port.accept(peer, &port.ring_offer(reading).unwrap(), 1000).unwrap();
    port.connect(reading, peer, &answer).unwrap();
    let source = domain.register(HostMemory::from_vec(vec![7; 32]).unwrap(), Access::WRITE);
    let source = source.unwrap();
    source.enable_for(port.endpoint()).unwrap();
    for number in 0..100 {
        // Some providers inject no more than a header.
        let length = [0, 8, 32][number as usize % 3];
        let payload = source.slice(0..length).unwrap();
        assert_eq!(port.send(writing, 3, &payload, TIMEOUT).unwrap(), number);
        let view = port.receive(reading, TIMEOUT).unwrap();
        let mut bytes = vec![0; length];
        view.read(0, &mut bytes).unwrap();
        assert_eq!((view.header().message, bytes), (number, vec![7; length]));
    }
    // Credit is injected the same way.
    port.flush(writing, TIMEOUT).unwrap();
    port.close_sender(writing, TIMEOUT).unwrap();
    let end = Instant::now() + TIMEOUT;
    while port.take(reading).is_ok() {
        assert!(Instant::now() < end, "the end was not reported");
        let (PortEvent::Idle | PortEvent::Ring) = port.progress().unwrap() else {
            panic!("a completion of no ring")
        };
        std::thread::yield_now();
    }
    port.close().unwrap();
}

#[test]
fn ring_works_if_injected_writes_are_refused() {
    let opened = open();
    // The behaviour of efa-direct.
    replace(&opened.endpoint, |rma| {
        rma.inject = Some(refuse);
        rma.injectdata = Some(refuse_data);
    });
    pass_messages(opened);
}

unsafe extern "C" fn refuse_data(
    _: *mut sys::fid_ep,
    _: *const c_void,
    _: usize,
    _: u64,
    _: u64,
    _: u64,
    _: u64,
) -> isize {
    -(sys::FI_ENOSYS as isize)
}

#[test]
fn ring_works_without_injected_immediates() {
    let opened = open();
    // The behaviour of opx, whose entry is empty.
    replace(&opened.endpoint, |rma| rma.injectdata = None);
    pass_messages(opened);
}

unsafe extern "C" fn tell_size(
    _: *mut sys::fid,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    length: *mut usize,
) -> c_int {
    assert_eq!((level, name), (sys::FI_OPT_ENDPOINT as c_int, 18), "FI_OPT_INJECT_RMA_SIZE");
    // SAFETY: the caller passes space for a size.
    unsafe {
        assert_eq!(*length, size_of::<usize>());
        *value.cast::<usize>() = 32;
    }
    0
}

#[test]
fn inject_size_of_writes_is_queried() {
    let mut opened = open();
    let most = opened.domain.capabilities().inject_size;
    assert!(most > 32, "{most}");
    assert_eq!(opened.endpoint.limits.inject_write_size, most, "no limit of its own here");
    // SAFETY: the endpoint is open and only used here; the table is leaked.
    unsafe {
        let raw = opened.endpoint.handle.as_ptr();
        let mut table = Box::new(*(*raw).ops);
        table.getopt = Some(tell_size);
        (*raw).ops = Box::leak(table);
    }
    assert_eq!(inject_write_size(&opened.endpoint.handle, most), 32);
    assert_eq!(inject_write_size(&opened.endpoint.handle, 16), 16);
    // A longer write is refused if it is requested as injected.
    opened.endpoint.limits.inject_write_size = 32;
    let region = opened.domain.register(HostMemory::zeroed(64).unwrap(), Access::ALL).unwrap();
    region.enable_for(&opened.endpoint).unwrap();
    let remote: RemoteMemory = opened.domain.attach(&region.describe().unwrap()).unwrap();
    let peer = opened.addresses.insert(&opened.endpoint.address().unwrap()).unwrap();
    let options = crate::PostOptions::token(0).flags(TransferFlags::INJECT);
    let Opened { endpoint, queue, .. } = &mut opened;
    let target = remote.slice(0..33).unwrap();
    let slice = region.slice(0..33).unwrap();
    let refused = endpoint.write(queue, peer, &slice, &target, options).unwrap_err();
    assert_eq!(refused.kind(), crate::ErrorKind::Truncated);
}

unsafe extern "C" fn refuse_long(
    _: *mut sys::fid_ep,
    _: *const c_void,
    length: usize,
    _: u64,
    _: u64,
    _: u64,
) -> isize {
    if length > 8 { -(sys::FI_EOPNOTSUPP as isize) } else { 0 }
}

#[test]
fn refused_injection_limits_only_its_call_and_length() {
    let mut opened = open();
    replace(&opened.endpoint, |rma| {
        rma.injectdata = None;
        rma.inject = Some(refuse_long);
    });
    let region = opened.domain.register(HostMemory::zeroed(64).unwrap(), Access::ALL).unwrap();
    region.enable_for(&opened.endpoint).unwrap();
    let memory: RemoteMemory = opened.domain.attach(&region.describe().unwrap()).unwrap();
    let peer = opened.addresses.insert(&opened.endpoint.address().unwrap()).unwrap();
    let Opened { endpoint, queue, .. } = &mut opened;
    let target = RemoteTarget { memory: &memory, offset: 0 };
    let mut inject = |length, data| {
        endpoint.try_inject_write(queue, peer, &[0; 16][..length], target, data).unwrap()
    };
    assert_eq!(inject(8, Some(1)), InjectOutcome::NotSupported);
    // The other entry is present, but does not take all lengths.
    assert_eq!([16, 9].map(|length| inject(length, None)), [InjectOutcome::NotSupported; 2]);
    assert_eq!(inject(8, None), InjectOutcome::Accepted);
    let limits = endpoint.limits;
    assert_eq!((limits.inject_write_size, limits.inject_write_data_size), (8, 0));
}
