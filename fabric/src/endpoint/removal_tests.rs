//! One thread removes peers while another one posts to them.
#![allow(unsafe_code)]

use std::os::raw::{c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use libfabric_sys as sys;

use crate::{
    Access, Address, AddressVector, CompletionQueue, Domain, Endpoint, EndpointKind, ErrorKind,
    HostMemory, Peer, PostOptions, Query, RegionSlice,
};

const TIMEOUT: Duration = Duration::from_secs(10);

struct Opened {
    endpoint: Endpoint,
    queue: CompletionQueue,
    addresses: AddressVector,
    slice: RegionSlice,
    /// The endpoint's own address, and an unused address.
    known_addresses: [Address; 2],
}

fn open() -> Opened {
    let offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first().unwrap();
    let domain = Domain::open(&offer).unwrap();
    let addresses = AddressVector::open(&domain).unwrap();
    let mut queue = CompletionQueue::open(&domain).unwrap();
    let builder = Endpoint::builder(&domain).addresses(&addresses);
    let endpoint = builder.queue(&mut queue).open().unwrap();
    let region = domain.register(HostMemory::zeroed(64).unwrap(), Access::ALL).unwrap();
    let slice = region.slice(0..8).unwrap();
    let own_address = endpoint.address().unwrap();
    let mut other = own_address.clone();
    // The port of a socket address.
    other.0[3] ^= 1;
    Opened { endpoint, queue, addresses, slice, known_addresses: [own_address, other] }
}

fn wait_for(what: impl Fn() -> bool) {
    let end = Instant::now() + TIMEOUT;
    while !what() {
        assert!(Instant::now() < end, "timed out");
        thread::sleep(Duration::from_millis(1));
    }
}

static IS_IN_CALL: AtomicBool = AtomicBool::new(false);
static MAY_RETURN: AtomicBool = AtomicBool::new(false);
static REMOVED_IN_CALL: AtomicBool = AtomicBool::new(false);
static REMOVALS: AtomicU32 = AtomicU32::new(0);

/// A send that blocks until the test releases it.
unsafe extern "C" fn slow_send(
    _: *mut sys::fid_ep,
    _: *const c_void,
    _: usize,
    _: *mut c_void,
    _: u64,
    _: *mut c_void,
) -> isize {
    IS_IN_CALL.store(true, Ordering::SeqCst);
    let end = Instant::now() + TIMEOUT;
    while !MAY_RETURN.load(Ordering::SeqCst) && Instant::now() < end {
        thread::sleep(Duration::from_millis(1));
    }
    IS_IN_CALL.store(false, Ordering::SeqCst);
    -(sys::FI_EIO as isize)
}

unsafe extern "C" fn note_removal(
    _: *mut sys::fid_av,
    _: *mut sys::fi_addr_t,
    _: usize,
    _: u64,
) -> c_int {
    REMOVALS.fetch_add(1, Ordering::SeqCst);
    if IS_IN_CALL.load(Ordering::SeqCst) {
        REMOVED_IN_CALL.store(true, Ordering::SeqCst);
    }
    0
}

#[test]
fn peer_is_not_removed_during_a_post() {
    let Opened { mut endpoint, mut queue, addresses, slice, known_addresses } = open();
    // SAFETY: the objects are open and only used here; the tables are leaked, since the objects
    // keep them.
    unsafe {
        let raw = endpoint.handle.as_ptr();
        let mut table = Box::new(*(*raw).msg);
        table.send = Some(slow_send);
        (*raw).msg = Box::leak(table);
        let raw = addresses.as_fid().cast::<sys::fid_av>();
        let mut table = Box::new(*(*raw).ops);
        table.remove = Some(note_removal);
        (*raw).ops = Box::leak(table);
    }
    let peer = addresses.insert(&known_addresses[0]).unwrap();
    thread::scope(|scope| {
        let poster = scope.spawn(|| endpoint.send(&mut queue, peer, &slice, 1).unwrap_err());
        wait_for(|| IS_IN_CALL.load(Ordering::SeqCst));
        addresses.remove(peer).unwrap();
        assert_eq!(addresses.remove(peer).unwrap_err().kind(), ErrorKind::Closed);
        assert_eq!(addresses.lookup(peer).unwrap_err().kind(), ErrorKind::Closed);
        assert_eq!(REMOVALS.load(Ordering::SeqCst), 0, "removed while a post uses it");
        // The same holds when the same address is inserted as a new peer and removed again.
        let again = addresses.insert(&known_addresses[0]).unwrap();
        addresses.remove(again).unwrap();
        assert_eq!(REMOVALS.load(Ordering::SeqCst), 0, "removed while a post uses it");
        // The number is not given to another peer before.
        addresses.insert(&known_addresses[1]).unwrap();
        assert_eq!(REMOVALS.load(Ordering::SeqCst), 0, "removed while a post uses it");
        MAY_RETURN.store(true, Ordering::SeqCst);
        let error = poster.join().unwrap();
        assert_ne!(error.kind(), ErrorKind::Closed, "it was posted before: {error}");
    });
    let refused = endpoint.send(&mut queue, peer, &slice, 1).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Closed, "{refused}");
    // No post is running, so the next change returns the number.
    endpoint.receive(&mut queue, &slice, 2).unwrap();
    addresses.insert(&known_addresses[1]).unwrap();
    assert_eq!(REMOVALS.load(Ordering::SeqCst), 1);
    assert!(!REMOVED_IN_CALL.load(Ordering::SeqCst));
}

static WAS_ASKED: AtomicBool = AtomicBool::new(false);

unsafe extern "C" fn full(
    _: *mut sys::fid_ep,
    _: *const c_void,
    _: usize,
    _: *mut c_void,
    _: u64,
    _: *mut c_void,
) -> isize {
    WAS_ASKED.store(true, Ordering::SeqCst);
    -(sys::FI_EAGAIN as isize)
}

#[test]
fn waiting_post_ends_when_its_peer_is_removed() {
    let Opened { mut endpoint, mut queue, addresses, slice, known_addresses } = open();
    // SAFETY: as above.
    unsafe {
        let raw = endpoint.handle.as_ptr();
        let mut table = Box::new(*(*raw).msg);
        table.send = Some(full);
        (*raw).msg = Box::leak(table);
    }
    let peer = addresses.insert(&known_addresses[0]).unwrap();
    thread::scope(|scope| {
        let poster = scope.spawn(|| {
            let patient = PostOptions::token(1).timeout(3 * TIMEOUT);
            let refused = endpoint.send(&mut queue, peer, &slice, patient).unwrap_err();
            (refused, Instant::now())
        });
        wait_for(|| WAS_ASKED.load(Ordering::SeqCst));
        let start = Instant::now();
        addresses.remove(peer).unwrap();
        let (refused, end) = poster.join().unwrap();
        assert_eq!(refused.kind(), ErrorKind::Closed, "{refused}");
        assert!(
            end.saturating_duration_since(start) < TIMEOUT,
            "the post waited for its whole timeout"
        );
    });
}

/// A real provider: one thread sends to itself, another one removes and inserts the peer.
#[test]
fn posts_concurrent_with_removals_succeed_or_fail_cleanly() {
    let Opened { mut endpoint, mut queue, addresses, slice, known_addresses } = open();
    let inserted = AtomicU32::new(0);
    let is_over = AtomicBool::new(false);
    let current = std::sync::Mutex::new(addresses.insert(&known_addresses[0]).unwrap());
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                let peer: Peer = *current.lock().unwrap();
                addresses.remove(peer).unwrap();
                // It takes the provider's number of the removed peer.
                let other = addresses.insert(&known_addresses[1]).unwrap();
                let next = addresses.insert(&known_addresses[0]).unwrap();
                addresses.remove(other).unwrap();
                *current.lock().unwrap() = next;
                inserted.fetch_add(1, Ordering::Relaxed);
                thread::sleep(Duration::from_micros(500));
            }
        });
        let mut tried = 0;
        let end = Instant::now() + TIMEOUT / 10;
        while inserted.load(Ordering::Relaxed) < 100 && Instant::now() < end {
            let peer = *current.lock().unwrap();
            let options = PostOptions::token(1).timeout(Duration::from_millis(50));
            tried += 1;
            match endpoint.send(&mut queue, peer, &slice, options) {
                Ok(_) => {}
                // The provider may have no connection yet, because removals end it.
                Err(error) => assert!(
                    matches!(error.kind(), ErrorKind::Closed | ErrorKind::DeadlineExceeded),
                    "{error}"
                ),
            }
            let _ = endpoint.receive(&mut queue, &slice, 2);
            while queue.poll().is_some() {}
        }
        is_over.store(true, Ordering::Relaxed);
        assert!(tried > 0 && inserted.load(Ordering::Relaxed) > 0);
    });
}
