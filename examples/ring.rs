//! Two threads pass messages through a ring: one writes into memory of the other's, which looks
//! at them where they lie. Two processes or machines would do the same; what the two channels
//! here carry (address, terms, answer) would then travel by whatever the application has: or by a TCP
//! connection that `ring::listen` and `ring::connect` make, as in `examples/ring_connection.rs`.
//!
//! `cargo run --example ring [-- PROVIDER]`

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use fabricast::fabric::ring::{Port, RingAnswer, RingOffer, RingOptions};
use fabricast::fabric::{
    Access, Address, AddressVector, CompletionQueue, Domain, Endpoint, EndpointKind, HostMemory,
    Query, Result,
};

const TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes of the ring, and of the messages: some are several times longer.
const RING: u64 = 256 << 10;
const LENGTHS: [usize; 5] = [0, 64, 5000, 1 << 20, 3];

fn main() -> Result<()> {
    let provider = std::env::args().nth(1);
    let (to_reader, from_writer) = channel();
    let (to_writer, from_reader) = channel();
    let name = provider.clone();
    let reader = std::thread::spawn(move || read(name.as_deref(), &to_writer, &from_writer));
    let written = write(provider.as_deref(), &to_reader, &from_reader);
    // Whatever came of it: libfabric does not like a process that ends in the middle of its calls.
    drop(to_reader);
    let read = reader.join().expect("the reader panicked");
    written?;
    let bytes = read?;
    assert_eq!(bytes, LENGTHS.iter().sum::<usize>());
    println!("ok: {} messages, {bytes} bytes", LENGTHS.len());
    Ok(())
}

/// What the two sides tell each other.
enum SetupMessage {
    Address(Address),
    Terms(Box<RingOffer>),
    Answer(RingAnswer),
}

/// A port, and where its peers are put down.
fn open(provider: Option<&str>) -> Result<(Port, AddressVector)> {
    let mut query = Query::new(EndpointKind::Rdm).source("127.0.0.1");
    if let Some(name) = provider {
        query = query.provider(name);
    }
    let domain = Domain::open(&query.first()?)?;
    let addresses = AddressVector::open(&domain)?;
    let mut queue = CompletionQueue::open(&domain)?;
    let endpoint = Endpoint::builder(&domain).addresses(&addresses).queue(&mut queue).open()?;
    Ok((Port::new(endpoint, queue), addresses))
}

fn write(
    provider: Option<&str>,
    to: &Sender<SetupMessage>,
    from: &Receiver<SetupMessage>,
) -> Result<()> {
    let (mut port, addresses) = open(provider)?;
    to.send(SetupMessage::Address(port.endpoint().address()?)).expect("the reader is there");
    let Ok(SetupMessage::Address(address)) = from.recv() else { panic!("no address") };
    let reader = addresses.insert(&address)?;
    let Ok(SetupMessage::Terms(ring_offer)) = from.recv() else { panic!("no ring offer") };
    let (ring, answer) = port.accept(reader, &ring_offer, 64 << 10)?;
    to.send(SetupMessage::Answer(answer)).expect("the reader is there");

    for (number, length) in LENGTHS.into_iter().enumerate() {
        // Memory is registered once, as a rule; here each message has its own.
        let bytes: Vec<u8> = (0..length.max(1)).map(|at| (at * 7 + number) as u8).collect();
        let domain = port.endpoint().domain();
        let source = domain.register(HostMemory::from_vec(bytes)?, Access::WRITE)?;
        port.send(ring, number as u32, &source.slice(0..length)?, TIMEOUT)?;
        // The memory must stay as it is until the reader is done with it: the region sees to that
        // it stays, and nobody here changes it.
    }
    // Waits until everything is read, and tells the reader that there is no more.
    let statistics = port.close_sender(ring, TIMEOUT)?;
    println!("{} chunks, {:?} without credit", statistics.chunks, statistics.blocked_for);
    Ok(())
}

fn read(
    provider: Option<&str>,
    to: &Sender<SetupMessage>,
    from: &Receiver<SetupMessage>,
) -> Result<usize> {
    let (mut port, addresses) = open(provider)?;
    to.send(SetupMessage::Address(port.endpoint().address()?)).expect("the writer is there");
    let Ok(SetupMessage::Address(address)) = from.recv() else { panic!("no address") };
    let writer = addresses.insert(&address)?;
    let options = RingOptions::new(port.endpoint(), RING)?;
    let ring = port.offer(&options)?;
    to.send(SetupMessage::Terms(Box::new(port.ring_offer(ring)?))).expect("the writer is there");
    let Ok(SetupMessage::Answer(answer)) = from.recv() else { panic!("no answer") };
    port.connect(ring, writer, &answer)?;

    let mut total = 0;
    loop {
        let view = match port.receive(ring, TIMEOUT) {
            Ok(view) => view,
            // The writer is done, and everything was read.
            Err(_) if port.receiver(ring)?.is_end_of_stream() => return Ok(total),
            Err(error) => return Err(error),
        };
        // A chunk of a message, where it lies in the ring.
        let mut bytes = vec![0; view.len()];
        view.read(0, &mut bytes)?;
        let from = view.header().offset as usize;
        let number = view.header().message as usize;
        let is_right = |(at, byte): (usize, &u8)| *byte == ((from + at) * 7 + number) as u8;
        assert!(bytes.iter().enumerate().all(is_right), "message {number}");
        total += view.len();
        // Dropped, its place is the writer's again.
    }
}
