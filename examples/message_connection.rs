//! Two ends of a connection (`FI_EP_MSG`): listen and connect with connection data, messages, a
//! write into the other's memory, and an orderly shutdown.
//!
//! ```text
//! cargo run --locked --example message_connection                # the first provider at 127.0.0.1
//! cargo run --locked --example message_connection -- sockets     # this one
//! cargo run --locked --example message_connection -- tcp 192.0.2.7
//! ```
//!
//! Each end is a thread that owns its endpoint and its queues: they share nothing of the fabric but
//! the address to connect to.
//!
//! A connected endpoint fills posted receives in order, so the receives are posted in the order in
//! which the other end sends.

use std::error::Error;
use std::net::TcpListener;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};
use std::{env, thread};

use fabricast::fabric::{
    Access, Address, CompletionQueue, Domain, Endpoint, EndpointKind, Event, EventQueue, Fabric,
    HostMemory, Listener, MemoryRegion, Offer, OperationId, Peer, Query, RemoteRegion,
};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const TIMEOUT: Duration = Duration::from_secs(10);
/// Connection data is limited: 56 bytes with verbs.
const PROTOCOL: &[u8] = b"fabricast, protocol 1";
const WELCOME: &[u8] = b"welcome";
const QUESTION: &[u8] = b"where may I write?";
const THANKS: &[u8] = b"all there";
/// A region's descriptor is the longest.
const LONGEST_MESSAGE: usize = 2048;
const LENGTH: usize = 256 << 10;
/// Immediate of the write: all its bytes have arrived.
const WRITTEN: u64 = 42;

fn main() -> Result<()> {
    let mut arguments = env::args().skip(1);
    let provider = arguments.next();
    let source = arguments.next().unwrap_or_else(|| "127.0.0.1".to_owned());
    // Some providers open an endpoint only with a destination, so both ends need to know the port
    // before.
    let port = TcpListener::bind((source.as_str(), 0))?.local_addr()?.port().to_string();
    let mut query = Query::new(EndpointKind::Msg);
    if let Some(provider) = provider {
        query = query.provider(provider);
    }
    let local = query.clone().source_service(&source, &port).first()?;
    let facts = local.capabilities();
    println!("{} on {} ({})", facts.provider, facts.domain, facts.protocol_name);
    let remote = query.provider(&facts.provider).destination(&source, &port).first()?;

    let (address_sender, address) = channel();
    thread::scope(|scope| {
        let listening = scope.spawn(|| listen(&local, address_sender));
        let connected = connect(&remote, address);
        let listened = listening.join().map_err(|_| "the listening thread panicked")?;
        // Either failure may be the cause of the other.
        match (listened, connected) {
            (Err(one), Err(other)) => Err(format!("listening: {one}; connecting: {other}").into()),
            (listened, connected) => listened.and(connected),
        }
    })?;
    println!("{LENGTH} bytes written into the listener's memory, and an orderly shutdown: ok");
    Ok(())
}

fn listen(offer: &Offer, address_sender: Sender<Address>) -> Result<()> {
    let fabric = Fabric::open(offer)?;
    let mut events = EventQueue::open(&fabric)?;
    let listener = Listener::open(&fabric, offer, &events)?;
    address_sender.send(listener.address()?)?;

    let Event::ConnectionRequest(request) = events.wait(TIMEOUT)? else {
        return Err("expected a connection request".into());
    };
    if !request.data.starts_with(PROTOCOL) {
        listener.reject(&request, b"another protocol")?;
        return Err("the other end uses another protocol".into());
    }
    let domain = Domain::open_on(&fabric, &request.offer)?;
    let mut end = End::open(&domain, &request.offer, events)?;
    let region = domain.register(HostMemory::zeroed(LENGTH)?, Access::REMOTE_WRITE)?;

    // Before the connection is up, in the order of arrival: a question, then an immediate, which
    // consumes a receive with some providers.
    let question = end.post_receive()?;
    if domain.capabilities().immediates_consume_receives() {
        end.endpoint.receive_immediate(&mut end.queue, 0)?;
    }
    end.endpoint.accept(&mut end.events, WELCOME, TIMEOUT)?;
    expect(&end.received(question)?, QUESTION)?;
    end.send(&region.describe()?.encode())?;

    while end.queue.wait(TIMEOUT)?.data != Some(WRITTEN) {}
    let mut bytes = vec![0; LENGTH];
    region.read(0, &mut bytes)?;
    expect(&bytes, &pattern())?;
    end.send(THANKS)?;

    end.await_shutdown()?;
    println!("the listener received the shutdown");
    Ok(end.endpoint.close()?)
}

fn connect(offer: &Offer, address: Receiver<Address>) -> Result<()> {
    let address = address.recv_timeout(TIMEOUT)?;
    let domain = Domain::open(offer)?;
    let events = EventQueue::open(domain.fabric())?;
    let mut end = End::open(&domain, offer, events)?;
    let descriptor = end.post_receive()?;
    let thanks = end.post_receive()?;
    let welcome = end.endpoint.connect(&mut end.events, &address, PROTOCOL, TIMEOUT)?;
    expect(&welcome, WELCOME)?;

    end.send(QUESTION)?;
    let remote = domain.attach(&RemoteRegion::decode(&end.received(descriptor)?)?)?;
    let source = domain.register(HostMemory::from_vec(pattern())?, Access::WRITE)?.all();
    let (to, target) = (Peer::CONNECTED, remote.all());
    let write = end.endpoint.write_data(&mut end.queue, to, &source, &target, WRITTEN, 0)?;
    end.queue.complete(write, TIMEOUT)?;
    // Only now: operations in flight at the shutdown are lost.
    expect(&end.received(thanks)?, THANKS)?;
    end.endpoint.disconnect()?;
    Ok(end.endpoint.close()?)
}

/// One end of the connection.
struct End {
    endpoint: Endpoint,
    queue: CompletionQueue,
    events: EventQueue,
}

impl End {
    fn open(domain: &Domain, offer: &Offer, events: EventQueue) -> Result<Self> {
        let mut queue = CompletionQueue::open(domain)?;
        let builder = Endpoint::builder(domain).offer(offer).events(&events);
        let endpoint = builder.queue(&mut queue).open()?;
        Ok(Self { endpoint, queue, events })
    }

    fn post_receive(&mut self) -> Result<(OperationId, MemoryRegion)> {
        let memory = HostMemory::zeroed(LONGEST_MESSAGE)?;
        let region = self.endpoint.domain().register(memory, Access::RECEIVE)?;
        Ok((self.endpoint.receive(&mut self.queue, &region.all(), 0)?, region))
    }

    fn received(&mut self, (operation, region): (OperationId, MemoryRegion)) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.queue.complete(operation, TIMEOUT)?.length];
        region.read(0, &mut bytes)?;
        Ok(bytes)
    }

    fn send(&mut self, bytes: &[u8]) -> Result<()> {
        let memory = HostMemory::from_vec(bytes.to_vec())?;
        let region = self.endpoint.domain().register(memory, Access::SEND)?;
        let send = self.endpoint.send(&mut self.queue, Peer::CONNECTED, &region.all(), 0)?;
        self.queue.complete(send, TIMEOUT)?;
        Ok(())
    }

    /// Reads both queues: providers with manual progress may notice the shutdown only while
    /// completions are polled.
    fn await_shutdown(&mut self) -> Result<()> {
        let deadline = Instant::now() + TIMEOUT;
        while Instant::now() < deadline {
            match self.events.poll()? {
                Some(Event::Shutdown { endpoint }) if self.endpoint.is(endpoint) => return Ok(()),
                Some(other) => return Err(format!("an unexpected event: {other:?}").into()),
                None => {}
            }
            // Nothing is in flight any more: a failure here also means the shutdown.
            if self.queue.poll().is_none() {
                thread::sleep(Duration::from_micros(100));
            }
        }
        Err("timed out waiting for the shutdown".into())
    }
}

/// Compares the beginning only: some providers pad connection data.
fn expect(found: &[u8], expected: &[u8]) -> Result<()> {
    if found.starts_with(expected) { Ok(()) } else { Err("received data is corrupted".into()) }
}

fn pattern() -> Vec<u8> {
    (0..LENGTH).map(|at| (at * 31 + at / 251) as u8).collect()
}
