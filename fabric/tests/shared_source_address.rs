//! Programs that request the same local address can run at the same time.
#![allow(missing_docs)]

use fabric::{AddressVector, CompletionQueue, Domain, Endpoint, EndpointKind, Query};

/// Opens an endpoint as the program in docs/how-to/use-endpoints.md does.
fn open(provider: &str) -> (Endpoint, CompletionQueue) {
    let query = Query::new(EndpointKind::Rdm).provider(provider).source("127.0.0.1");
    let domain = Domain::open(&query.first().unwrap()).unwrap();
    let addresses = AddressVector::open(&domain).unwrap();
    let mut queue = CompletionQueue::open(&domain).unwrap();
    let opened = Endpoint::builder(&domain).addresses(&addresses).queue(&mut queue).open();
    (opened.unwrap_or_else(|error| panic!("{provider}: {error}")), queue)
}

/// The name of an shm endpoint must be unique on the machine: an IP address is not used as its
/// name.
#[test]
fn several_endpoints_share_a_source_address() {
    let offers = Query::new(EndpointKind::Rdm).source("127.0.0.1").offers().unwrap();
    let mut providers: Vec<_> =
        offers.iter().map(|offer| offer.capabilities().provider.clone()).collect();
    providers.retain(|name| ["shm", "tcp", "net", "tcp;ofi_rxm"].contains(&name.as_str()));
    providers.sort();
    providers.dedup();
    assert!(providers.iter().any(|name| name == "shm"), "{providers:?}");
    for provider in providers {
        let (first, second) = (open(&provider), open(&provider));
        assert_ne!(first.0.address().unwrap(), second.0.address().unwrap(), "{provider}");
    }
}
