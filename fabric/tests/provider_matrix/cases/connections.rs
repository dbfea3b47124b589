//! Endpoints with one peer: connecting, refusing, ending.

use std::time::{Duration, Instant};

use fabric::{
    Address, Caps, CompletionQueue, ConnectionRequest, Domain, Endpoint, EndpointKind, ErrorKind,
    Event, EventQueue, Listener,
};

use super::Case;
use crate::cells::Cell;
use crate::pair::{A, B, CaseResult, Pair, connection_request, timeout};
use crate::{cases, ensure};

pub const CASES: &[Case] = cases![
    connection_data_travels_both_ways,
    connection_data_is_bounded,
    rejection_is_reported,
    connecting_without_a_listener_is_refused,
    shutdown_is_reported_to_the_peer,
    connection_request_is_accepted_once,
];

struct Connecting {
    domain: Domain,
    listen_events: EventQueue,
    listener: Listener,
    events: EventQueue,
    #[allow(dead_code)]
    queue: CompletionQueue,
    endpoint: Endpoint,
}

impl Connecting {
    fn request(&mut self, hello: &[u8]) -> CaseResult<ConnectionRequest> {
        connection_request(&self.listener, &mut self.listen_events, &mut self.events, hello)
    }
}

fn start(cell: &Cell) -> CaseResult<Connecting> {
    ensure!(cell.kind == EndpointKind::Msg, "for connected endpoints");
    let offer = cell.offer(Caps::empty())?;
    let domain = Domain::open(&offer)?;
    let listen_events = EventQueue::open(domain.fabric())?;
    let listener = Listener::open(domain.fabric(), &offer, &listen_events)?;
    let events = EventQueue::open(domain.fabric())?;
    let mut queue = CompletionQueue::open(&domain)?;
    let to = listener.address()?;
    let endpoint =
        Endpoint::builder(&domain).queue(&mut queue).events(&events).towards(&to).open()?;
    Ok(Connecting { domain, listen_events, listener, events, queue, endpoint })
}

fn connection_data_travels_both_ways(cell: &Cell) -> CaseResult {
    let mut c = start(cell)?;
    c.endpoint.start_connecting(&c.listener.address()?, b"from the client")?;
    let request = c.request(b"from the client")?;
    let mut queue = CompletionQueue::open(&c.domain)?;
    let mut events = EventQueue::open(c.domain.fabric())?;
    let mut accepted = Endpoint::builder(&c.domain)
        .offer(&request.offer)
        .queue(&mut queue)
        .events(&events)
        .open()?;
    accepted.start_accepting(b"from the server")?;
    let mut data = None;
    let mut up = false;
    let end = Instant::now() + timeout();
    while !(up && data.is_some()) && Instant::now() < end {
        if let Some(Event::Connected { endpoint, data: got }) = c.events.poll()?
            && c.endpoint.is(endpoint)
        {
            data = Some(got);
        }
        if let Some(Event::Connected { endpoint, .. }) = events.poll()? {
            up |= accepted.is(endpoint);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let data = data.ok_or("the client was not connected")?;
    ensure!(data.starts_with(b"from the server"), "{data:?}");
    ensure!(up, "the server was not connected");
    Ok(())
}

fn connection_data_is_bounded(cell: &Cell) -> CaseResult {
    let mut c = start(cell)?;
    let to = c.listener.address()?;
    let limit = c.endpoint.connection_data_limit();
    ensure!((1..=1024).contains(&limit), "limit {limit}");
    let too_long = c.endpoint.start_connecting(&to, &vec![7; limit + 1]);
    let too_long = too_long.err().ok_or("data above the limit was accepted")?;
    ensure!(too_long.kind() == ErrorKind::Truncated, "{too_long}");
    c.endpoint.start_connecting(&to, &vec![7; limit])?;
    let request = c.request(&vec![7; limit])?;
    let limit = c.listener.connection_data_limit();
    let too_long = c.listener.reject(&request, &vec![7; limit + 1]);
    let too_long = too_long.err().ok_or("data above the limit was accepted")?;
    ensure!(too_long.kind() == ErrorKind::Truncated, "{too_long}");
    c.listener.reject(&request, &vec![7; limit])?;
    Ok(())
}

fn rejection_is_reported(cell: &Cell) -> CaseResult {
    let mut c = start(cell)?;
    c.endpoint.start_connecting(&c.listener.address()?, b"please")?;
    let request = c.request(b"please")?;
    c.listener.reject(&request, b"no room")?;
    match c.events.wait(timeout()) {
        Err(error) => ensure!(
            matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::ConnectionLost),
            "{error}"
        ),
        Ok(Event::Shutdown { .. }) => {}
        Ok(other) => return Err(format!("{other:?} after a rejection").into()),
    }
    Ok(())
}

fn connecting_without_a_listener_is_refused(cell: &Cell) -> CaseResult {
    let c = start(cell)?;
    // A port that had a listener a moment ago.
    let to: Address = c.listener.address()?;
    let Connecting { listener, mut events, mut endpoint, queue, domain, listen_events } = c;
    drop(listener);
    let started = Instant::now();
    let result = endpoint.connect(&mut events, &to, b"", Duration::from_secs(10));
    let error = result.err().ok_or("connected without a listener")?;
    ensure!(
        matches!(
            error.kind(),
            ErrorKind::ConnectionRefused | ErrorKind::ConnectionLost | ErrorKind::DeadlineExceeded
        ),
        "{error}"
    );
    ensure!(error.peer().is_some(), "the error does not name the peer: {error}");
    ensure!(started.elapsed() < Duration::from_secs(12), "took {:?}", started.elapsed());
    drop((endpoint, queue, domain, listen_events));
    Ok(())
}

fn shutdown_is_reported_to_the_peer(cell: &Cell) -> CaseResult {
    let mut pair = Pair::new(cell)?;
    ensure!(pair.kind == EndpointKind::Msg, "for connected endpoints");
    pair.sides[A].endpoint.disconnect()?;
    let end = Instant::now() + timeout();
    while Instant::now() < end {
        pair.pump();
        let side = &mut pair.sides[B];
        let events = side.events.as_mut().ok_or("no events")?;
        if let Some(Event::Shutdown { endpoint }) = events.poll()? {
            ensure!(side.endpoint.is(endpoint), "another endpoint's shutdown");
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Err("the peer saw no shutdown".into())
}

fn connection_request_is_accepted_once(cell: &Cell) -> CaseResult {
    let mut c = start(cell)?;
    c.endpoint.start_connecting(&c.listener.address()?, b"once")?;
    let request = c.request(b"once")?;
    let mut queue = CompletionQueue::open(&c.domain)?;
    let events = EventQueue::open(c.domain.fabric())?;
    let mut open = || {
        Endpoint::builder(&c.domain).offer(&request.offer).queue(&mut queue).events(&events).open()
    };
    let accepted = open()?;
    // libfabric frees the half-open connection at its first use.
    let again = open().err().ok_or("two endpoints opened for one request")?;
    ensure!(again.kind() == ErrorKind::InvalidArgument, "{again}");
    let rejected =
        c.listener.reject(&request, b"").err().ok_or("rejected after it was accepted")?;
    ensure!(rejected.kind() == ErrorKind::InvalidArgument, "{rejected}");
    drop(accepted);
    Ok(())
}
