//! A completion queue whose file descriptor is in the caller's own event loop.
#![allow(missing_docs)]

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use fabric::{
    Access, AddressVector, CompletionQueue, Domain, Endpoint, EndpointKind, HostMemory, Query,
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

#[test]
#[allow(unsafe_code)]
fn completions_are_read_by_polling_the_descriptor() {
    let query = Query::new(EndpointKind::Rdm).source("127.0.0.1");
    let of = |provider: &str| query.clone().provider(provider).first();
    let offer = of("tcp").or_else(|_| of("net")).unwrap();
    let domain = Domain::open(&offer).unwrap();
    let addresses = AddressVector::open(&domain).unwrap();
    let mut queue = CompletionQueue::open(&domain).unwrap();
    let endpoint = Endpoint::builder(&domain).addresses(&addresses).queue(&mut queue).open();
    let mut endpoint = endpoint.unwrap();
    let own = addresses.insert(&endpoint.address().unwrap()).unwrap();
    let target = domain.register(HostMemory::zeroed(64).unwrap(), Access::ALL).unwrap();
    let source = domain.register(HostMemory::zeroed(64).unwrap(), Access::ALL).unwrap();
    let remote = domain.attach(&target.describe().unwrap()).unwrap();
    let number = queue.wait_descriptor().expect("tcp has descriptors");
    // SAFETY: the descriptor is open as long as the queue, which outlives this.
    let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
    let end = Instant::now() + Duration::from_secs(20);
    for _ in 0..20 {
        let slices = (source.all(), remote.slice(0..64).unwrap());
        let written = endpoint.write(&mut queue, own, &slices.0, &slices.1, 7).unwrap();
        loop {
            if let Some(outcome) = queue.poll() {
                assert_eq!(outcome.unwrap().operation, Some(written));
                break;
            }
            assert!(Instant::now() < end, "no completion arrived");
            if queue.may_sleep() {
                let mut entries = [PollFd::new(descriptor, PollFlags::POLLIN)];
                poll(&mut entries, PollTimeout::from(1000_u16)).unwrap();
            }
        }
    }
}
