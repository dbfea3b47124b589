//! Endpoints that cannot be closed while regions are bound to them, as with cxi: an installed
//! provider with such entries in its tables.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::os::raw::{c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use libfabric_sys as sys;

use crate::ring::{Port, PortEvent, RingOptions};
use crate::{
    Access, AddressVector, Caps, CompletionQueue, Domain, Endpoint, EndpointKind, ErrorKind,
    HostMemory, Memory, MemoryRegion, MrMode, Order, Query,
};

const TIMEOUT: Duration = Duration::from_secs(10);

/// Records about the objects whose tables were replaced, by their addresses.
#[derive(Default)]
struct CallRecord {
    /// Their original tables.
    tables: HashMap<usize, usize>,
    /// Regions, and the endpoints that they are bound to.
    bound: HashMap<usize, usize>,
    /// The number of regions that each closed endpoint had when it was closed.
    closed: HashMap<usize, usize>,
    /// How often the provider refused to close each endpoint.
    refused: HashMap<usize, usize>,
}

static RECORD: Mutex<Option<CallRecord>> = Mutex::new(None);

fn with_record<T>(look: impl FnOnce(&mut CallRecord) -> T) -> T {
    let mut record: MutexGuard<'_, _> = RECORD.lock().unwrap_or_else(PoisonError::into_inner);
    look(record.get_or_insert_default())
}

/// Changes an object's table.
///
/// # Safety
/// The object is open.
unsafe fn replace(object: *mut sys::fid, change: impl FnOnce(&mut sys::fi_ops)) {
    // SAFETY: by contract; the new table is leaked, since the object keeps it.
    unsafe {
        let mut table = Box::new(*(*object).ops);
        change(&mut table);
        with_record(|record| record.tables.insert(object as usize, (*object).ops as usize));
        (*object).ops = Box::leak(table);
    }
}

/// Closes an object by its original entry.
///
/// # Safety
/// The object is open, and its table was replaced.
unsafe fn close_as_before(object: *mut sys::fid) -> c_int {
    let table = with_record(|record| record.tables.remove(&(object as usize))).unwrap();
    // SAFETY: the table is the provider's own, by contract.
    unsafe {
        (*object).ops = table as *mut sys::fi_ops;
        sys::fi_close(object)
    }
}

unsafe extern "C" fn bind_region(region: *mut sys::fid, to: *mut sys::fid, _: u64) -> c_int {
    with_record(|record| record.bound.insert(region as usize, to as usize));
    0
}

unsafe extern "C" fn enable_region(region: *mut sys::fid, _: c_int, _: *mut c_void) -> c_int {
    let is_bound = with_record(|record| record.bound.contains_key(&(region as usize)));
    if is_bound { 0 } else { -sys::FI_EINVAL }
}

unsafe extern "C" fn close_region(region: *mut sys::fid) -> c_int {
    with_record(|record| {
        if let Some(endpoint) = record.bound.remove(&(region as usize)) {
            *record.closed.entry(endpoint).or_default() += 1;
        }
    });
    // SAFETY: the object is being closed, and its table was replaced at registration.
    unsafe { close_as_before(region) }
}

unsafe extern "C" fn close_endpoint(endpoint: *mut sys::fid) -> c_int {
    let is_busy = with_record(|record| {
        let is_busy = record.bound.values().any(|to| *to == endpoint as usize);
        *record.refused.entry(endpoint as usize).or_default() += usize::from(is_busy);
        is_busy
    });
    if is_busy {
        return -sys::FI_EBUSY;
    }
    // SAFETY: the object is being closed, and its table was replaced after it was opened.
    unsafe { close_as_before(endpoint) }
}

unsafe extern "C" fn register(
    domain: *mut sys::fid,
    attributes: *const sys::fi_mr_attr,
    flags: u64,
    region: *mut *mut sys::fid_mr,
) -> c_int {
    let table = with_record(|record| record.tables[&(domain as usize)]) as *const sys::fi_ops_mr;
    // SAFETY: the table is the provider's own, with an entry of this type; a result of 0 means
    // that the region is open.
    unsafe {
        let Some(call) = (*table).regattr else { return -sys::FI_ENOSYS };
        let code = call(domain, attributes, flags, region);
        if code == 0 {
            replace((*region).cast(), |table| {
                table.close = Some(close_region);
                table.bind = Some(bind_region);
                table.control = Some(enable_region);
            });
        }
        code
    }
}

/// A domain whose regions belong to endpoints.
fn domain() -> Domain {
    domain_of(query().first().unwrap())
}

fn query() -> Query {
    let caps = Caps::MESSAGE | Caps::RMA;
    let query = Query::new(EndpointKind::Rdm).caps(caps).source("127.0.0.1");
    query.order(Order::WRITE_AFTER_WRITE)
}

fn domain_of(mut offer: crate::Offer) -> Domain {
    let mut facts = offer.capabilities().clone();
    facts.registration.mr_mode |= MrMode::ENDPOINT;
    offer.capabilities = Arc::new(facts);
    let domain = Domain::open(&offer).unwrap();
    // SAFETY: the domain is open, and not shared yet.
    unsafe {
        let raw = domain.as_ptr();
        let mut table = Box::new(*(*raw).mr);
        table.regattr = Some(register);
        with_record(|record| record.tables.insert(raw as usize, (*raw).mr as usize));
        (*raw).mr = Box::leak(table);
    }
    domain
}

/// An endpoint that cannot be closed while it has regions.
fn endpoint(domain: &Domain) -> (Endpoint, CompletionQueue, AddressVector) {
    let addresses = AddressVector::open(domain).unwrap();
    let mut queue = CompletionQueue::open(domain).unwrap();
    let builder = Endpoint::builder(domain).addresses(&addresses);
    let endpoint = builder.queue(&mut queue).open().unwrap();
    // SAFETY: the endpoint is open.
    unsafe { replace(endpoint.as_fid(), |table| table.close = Some(close_endpoint)) };
    (endpoint, queue, addresses)
}

fn region(domain: &Domain, access: Access) -> MemoryRegion {
    domain.register(HostMemory::zeroed(4096).unwrap(), access).unwrap()
}

/// The number of regions that were closed before this endpoint. The endpoint was closed at the
/// first attempt; afterwards its address may be reused.
fn closed_with(endpoint: usize) -> usize {
    with_record(|record| {
        assert_eq!(record.refused.remove(&endpoint), Some(0), "refused, or not closed");
        record.closed.remove(&endpoint).unwrap_or(0)
    })
}

#[test]
fn regions_are_closed_before_their_endpoint() {
    let domain = domain();
    let (mut first, mut queue, _addresses) = endpoint(&domain);
    let (held, dropped) = (region(&domain, Access::ALL), region(&domain, Access::ALL));
    held.enable_for(&first).unwrap();
    dropped.enable_for(&first).unwrap();
    held.write(0, b"payload").unwrap();
    // Operations in flight hold their memory until the endpoint is closed.
    first.receive(&mut queue, &dropped.all(), 0).unwrap();
    drop(dropped);

    let address = first.as_fid() as usize;
    first.close().unwrap();
    assert_eq!(closed_with(address), 2);

    // The region keeps its bytes, but nothing else.
    let mut bytes = [0; 7];
    held.read(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"payload");
    assert_eq!(held.key().unwrap_err().kind(), ErrorKind::Closed);
    let (mut second, mut queue, addresses) = endpoint(&domain);
    let peer = addresses.insert(&second.address().unwrap()).unwrap();
    let refused = second.send(&mut queue, peer, &held.all(), 0).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
    let address = second.as_fid() as usize;
    second.close().unwrap();
    assert_eq!(closed_with(address), 0);
    drop((held, queue));
}

#[test]
fn bound_region_is_refused_by_other_endpoints() {
    let domain = domain();
    let (mut first, mut queue, addresses) = endpoint(&domain);
    let (second, _queue, _addresses) = endpoint(&domain);
    let peer = addresses.insert(&first.address().unwrap()).unwrap();
    let region = region(&domain, Access::ALL);
    region.enable_for(&second).unwrap();
    let refused = first.send(&mut queue, peer, &region.all(), 0).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
    // The endpoint is dropped first, so it is closed first.
    drop(region);
    for (endpoint, regions) in [(second, 1), (first, 0)] {
        let address = endpoint.as_fid() as usize;
        endpoint.close().unwrap();
        assert_eq!(closed_with(address), regions);
    }
}

#[test]
fn ports_close_with_endpoint_bound_regions() {
    let domain = domain();
    let (mut ports, mut vectors) = (Vec::new(), Vec::new());
    for _ in 0..2 {
        let (endpoint, queue, addresses) = endpoint(&domain);
        ports.push(Port::new(endpoint, queue));
        vectors.push(addresses);
    }
    let addresses = [0, 1].map(|side: usize| ports[side].endpoint().address().unwrap());
    let peers = [0, 1].map(|side: usize| vectors[side].insert(&addresses[1 - side]).unwrap());
    let options = RingOptions::new(ports[1].endpoint(), 64 << 10).unwrap();
    let reading = ports[1].offer(&options).unwrap();
    let ring_offer = ports[1].ring_offer(reading).unwrap();
    let (writing, answer) = ports[0].accept(peers[0], &ring_offer, 1000).unwrap();
    ports[1].connect(reading, peers[1], &answer).unwrap();
    let source = region(&domain, Access::WRITE);
    source.enable_for(ports[0].endpoint()).unwrap();

    let payload = source.all();
    let mut message = ports[0].begin(writing, 0, 4096).unwrap();
    let mut views = Vec::new();
    let end = Instant::now() + TIMEOUT;
    while !views.last().is_some_and(|view: &crate::ring::ChunkView| view.is_last()) {
        assert!(Instant::now() < end, "the message did not arrive");
        ports[0].push(writing, &mut message, &payload).unwrap();
        for port in &mut ports {
            let (PortEvent::Idle | PortEvent::Ring) = port.progress().unwrap() else {
                panic!("a completion of no ring")
            };
        }
        views.extend(ports[1].take(reading).unwrap());
        std::thread::yield_now();
    }
    // Views, and the memory that was written from, are still valid.
    for port in ports {
        let address = port.endpoint().as_fid() as usize;
        port.close().unwrap();
        assert!(closed_with(address) > 0);
    }
    drop((views, payload, source));
}

type Parts = (Endpoint, CompletionQueue, AddressVector);

/// Memory that closes an endpoint when it is dropped.
struct Owner {
    memory: HostMemory,
    _owned: Arc<Mutex<Option<Parts>>>,
}

// SAFETY: the inner memory fulfils the contract, and does not move while it is held here.
unsafe impl Memory for Owner {
    fn as_ptr(&self) -> *mut u8 {
        self.memory.as_ptr()
    }

    fn len(&self) -> usize {
        self.memory.len()
    }
}

#[test]
fn memory_may_close_the_endpoint_of_its_region() {
    // The first region may need the deregistration lock.
    for offer in [query().provider("net").first(), query().first()].into_iter().flatten() {
        let domain = domain_of(offer);
        let (is_done, done) = std::sync::mpsc::channel();
        // The test would deadlock on a lock that is already held.
        let thread = std::thread::spawn(move || {
            let owned = endpoint(&domain);
            let address = owned.0.as_fid() as usize;
            let owned_slot = Arc::new(Mutex::new(None));
            let memory = HostMemory::zeroed(64).unwrap();
            let memory = Owner { memory, _owned: Arc::clone(&owned_slot) };
            let region = domain.register(memory, Access::ALL).unwrap();
            region.enable_for(&owned.0).unwrap();
            *owned_slot.lock().unwrap() = Some(owned);
            drop((owned_slot, region));
            is_done.send(closed_with(address)).unwrap();
        });
        assert_eq!(done.recv_timeout(TIMEOUT).expect("the region is dropped"), 1);
        thread.join().unwrap();
    }
}
