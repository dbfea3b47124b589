//! Data that travels with a connection request, an acceptance and a rejection.
#![allow(missing_docs)]

use std::time::{Duration, Instant};

use fabric::{
    Address, CompletionQueue, ConnectionRequest, Domain, Endpoint, EndpointKind, Error, ErrorKind,
    Event, EventQueue, Listener, Query,
};

const TIMEOUT: Duration = Duration::from_secs(20);

/// A listener, and an endpoint that connects to it.
struct Connecting {
    domain: Domain,
    requests: EventQueue,
    listener: Listener,
    to: Address,
    events: EventQueue,
    #[allow(dead_code)] // bound to the endpoint
    queue: CompletionQueue,
    client: Endpoint,
}

fn over(provider: &str) -> Result<Connecting, Error> {
    let offer = Query::new(EndpointKind::Msg).provider(provider).source("127.0.0.1").first()?;
    let domain = Domain::open(&offer)?;
    let requests = EventQueue::open(domain.fabric())?;
    let listener = Listener::open(domain.fabric(), &offer, &requests)?;
    let to = listener.address()?;
    let events = EventQueue::open(domain.fabric())?;
    let mut queue = CompletionQueue::open(&domain)?;
    let client =
        Endpoint::builder(&domain).queue(&mut queue).events(&events).towards(&to).open()?;
    Ok(Connecting { domain, requests, listener, to, events, queue, client })
}

impl Connecting {
    fn request(&mut self) -> ConnectionRequest {
        let end = Instant::now() + TIMEOUT;
        loop {
            // The client's queue is read as well, because that advances the handshake.
            self.events.poll().unwrap();
            if let Some(Event::ConnectionRequest(request)) = self.requests.poll().unwrap() {
                return request;
            }
            assert!(Instant::now() < end, "no request arrived");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// An endpoint for a request, with its event queue.
    fn server(&self, request: &ConnectionRequest) -> (Endpoint, EventQueue, CompletionQueue) {
        let events = EventQueue::open(self.domain.fabric()).unwrap();
        let mut queue = CompletionQueue::open(&self.domain).unwrap();
        let endpoint = Endpoint::builder(&self.domain)
            .offer(&request.offer)
            .queue(&mut queue)
            .events(&events)
            .open()
            .unwrap();
        (endpoint, events, queue)
    }
}

/// Lengths to test, and whether they are within the limit.
fn lengths(limit: usize) -> [(usize, bool); 4] {
    assert!((1..4096).contains(&limit), "limit {limit}");
    [(0, true), (limit, true), (limit + 1, false), (4096, false)]
}

fn data(length: usize) -> Vec<u8> {
    (0..length).map(|at| at as u8).collect()
}

fn is_too_long(error: &Error, limit: usize) {
    assert_eq!(error.kind(), ErrorKind::Truncated, "{error}");
    assert_eq!(error.provider(), Some("tcp"));
    assert!(error.code().is_none(), "checked before the provider is called: {error}");
    assert!(error.to_string().contains(&format!("at most {limit}")), "{error}");
}

#[test]
fn connect_refuses_data_beyond_the_limit() {
    let limit = over("tcp").unwrap().client.connection_data_limit();
    for (length, fits) in lengths(limit) {
        let mut c = over("tcp").unwrap();
        let mut sent = data(length);
        let started = c.client.start_connecting(&c.to, &sent);
        assert_eq!(started.is_ok(), fits, "{length} bytes: {started:?}");
        if let Err(error) = started {
            is_too_long(&error, limit);
            // Nothing was started: the same endpoint can connect.
            sent = data(limit);
            c.client.start_connecting(&c.to, &sent).unwrap();
        }
        let request = c.request();
        assert_eq!(request.data, sent, "{length} bytes");
        // An unanswered request stays half open.
        c.listener.reject(&request, b"").unwrap();
    }
}

#[test]
fn accept_refuses_data_beyond_the_limit() {
    let limit = over("tcp").unwrap().client.connection_data_limit();
    for (length, fits) in lengths(limit) {
        let mut c = over("tcp").unwrap();
        c.client.start_connecting(&c.to, b"").unwrap();
        let request = c.request();
        let (mut server, mut server_events, _queue) = c.server(&request);
        assert_eq!(server.connection_data_limit(), limit);
        let mut sent = data(length);
        let accepted = server.start_accepting(&sent);
        assert_eq!(accepted.is_ok(), fits, "{length} bytes: {accepted:?}");
        if let Err(error) = accepted {
            is_too_long(&error, limit);
            // The request is still pending.
            sent = data(limit);
            server.start_accepting(&sent).unwrap();
        }
        let end = Instant::now() + TIMEOUT;
        let got = loop {
            server_events.poll().unwrap();
            if let Some(Event::Connected { data, .. }) = c.events.poll().unwrap() {
                break data;
            }
            assert!(Instant::now() < end, "{length} bytes: not connected");
            std::thread::sleep(Duration::from_millis(1));
        };
        assert_eq!(got, sent, "{length} bytes");
    }
}

#[test]
fn reject_refuses_data_beyond_the_limit() {
    let limit = over("tcp").unwrap().listener.connection_data_limit();
    for (length, fits) in lengths(limit) {
        let mut c = over("tcp").unwrap();
        c.client.start_connecting(&c.to, b"").unwrap();
        let request = c.request();
        let rejected = c.listener.reject(&request, &data(length));
        assert_eq!(rejected.is_ok(), fits, "{length} bytes: {rejected:?}");
        if let Err(error) = rejected {
            is_too_long(&error, limit);
            // The request is still pending.
            c.listener.reject(&request, &data(limit)).unwrap();
        }
        let refused = c.events.wait(TIMEOUT).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused, "{length} bytes: {refused}");
    }
}

fn is_of_another_fabric(error: &Error) {
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    assert!(error.detail().is_some_and(|why| why.contains("another")), "{error}");
}

/// Providers cast the half-open connection to their own type.
#[test]
fn request_of_another_fabric_is_refused() {
    let mut c = over("tcp").unwrap();
    c.client.start_connecting(&c.to, b"").unwrap();
    let request = c.request();
    let mut others = 0;
    for provider in ["tcp", "net", "sockets"] {
        let Ok(other) = over(provider) else { continue };
        others += 1;
        is_of_another_fabric(&other.listener.reject(&request, b"").unwrap_err());
        let events = EventQueue::open(other.domain.fabric()).unwrap();
        let mut queue = CompletionQueue::open(&other.domain).unwrap();
        let opened = Endpoint::builder(&other.domain)
            .offer(&request.offer)
            .queue(&mut queue)
            .events(&events)
            .open();
        is_of_another_fabric(&opened.unwrap_err());
    }
    assert!(others > 0, "no other provider for the request");
    // The listener that received it can still answer it.
    c.listener.reject(&request, b"").unwrap();
    let refused = c.events.wait(TIMEOUT).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused, "{refused}");
}
