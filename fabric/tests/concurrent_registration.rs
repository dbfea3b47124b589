//! Threads that register and drop memory, while one thread reads a queue of the same domain.
#![allow(missing_docs)]

use std::sync::atomic::{AtomicBool, Ordering};

use fabric::{
    Access, AddressVector, Caps, CompletionQueue, Domain, Endpoint, EndpointKind, HostMemory,
    PostOptions, Query,
};

const TIMEOUT: std::time::Duration = std::time::Duration::from_secs(60);
const ROUNDS: usize = 3000;

/// Runs with the first of these providers that the running libfabric has.
fn disturb(providers: &[&str]) {
    let offer = providers.iter().find_map(|provider| {
        let query = Query::new(EndpointKind::Rdm).caps(Caps::MESSAGE | Caps::RMA);
        let query = query.provider(*provider);
        let query = if *provider == "shm" { query } else { query.source("127.0.0.1") };
        query.first().ok()
    });
    let Some(offer) = offer else {
        testkit::skip!("this libfabric has none of {providers:?}");
    };
    let domain = Domain::open(&offer).unwrap();
    let addresses = AddressVector::open(&domain).unwrap();
    let mut queue = CompletionQueue::open(&domain).unwrap();
    let endpoint = Endpoint::builder(&domain).addresses(&addresses).queue(&mut queue).open();
    let mut endpoint = endpoint.unwrap();
    let own = addresses.insert(&endpoint.address().unwrap()).unwrap();
    let target = domain.register(HostMemory::zeroed(4096).unwrap(), Access::ALL).unwrap();
    let source = domain.register(HostMemory::zeroed(4096).unwrap(), Access::ALL).unwrap();
    let remote = domain.attach(&target.describe().unwrap()).unwrap();
    let (is_over, domain) = (AtomicBool::new(false), &domain);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3)
            .map(|_| {
                scope.spawn(move || {
                    let mut regions = Vec::new();
                    for round in 0..ROUNDS {
                        let memory = HostMemory::zeroed(64).unwrap();
                        regions.push(domain.register(memory, Access::ALL).unwrap());
                        if round % 7 == 0 {
                            regions.clear();
                        }
                    }
                })
            })
            .collect();
        let is_over = &is_over;
        scope.spawn(move || {
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            is_over.store(true, Ordering::Release);
        });
        // The provider looks up a key for each write.
        let slices = (source.slice(0..64).unwrap(), remote.slice(0..64).unwrap());
        while !is_over.load(Ordering::Acquire) {
            let options = PostOptions::from(7_u64).timeout(TIMEOUT);
            let written = endpoint.write(&mut queue, own, &slices.0, &slices.1, options).unwrap();
            queue.complete(written, TIMEOUT).unwrap();
        }
    });
}

#[test]
fn registrations_race_with_polling_on_tcp() {
    // Before 1.18 net is the connectionless provider.
    disturb(&["tcp", "net"]);
}

#[test]
fn registrations_race_with_polling_on_rxm() {
    disturb(&["tcp;ofi_rxm"]);
}

#[test]
fn registrations_race_with_polling_on_shm() {
    disturb(&["shm"]);
}
