//! Two threads exchange messages through a ring: one writes into the other's memory, which reads
//! them in place. Two processes or machines would do the same; the contents of the two channels
//! here (address, offer, answer) would be sent by any means of the application, or by a TCP
//! connection of `ring::listen` and `ring::connect`, as in `examples/ring_connection.rs`.
//!
//! `cargo run --locked --example ring [-- PROVIDER]`

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
    // Join before returning: libfabric calls must not be interrupted by the exit of the process.
    drop(to_reader);
    let read = reader.join().expect("the reader panicked");
    written?;
    let bytes = read?;
    assert_eq!(bytes, LENGTHS.iter().sum::<usize>());
    println!("ok: {} messages, {bytes} bytes", LENGTHS.len());
    Ok(())
}

/// What the two sides exchange before.
enum SetupMessage {
    Address(Address),
    Terms(Box<RingOffer>),
    Answer(RingAnswer),
}

/// A port, and the address vector of its peers.
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
    to.send(SetupMessage::Address(port.endpoint().address()?)).expect("the reader is running");
    let Ok(SetupMessage::Address(address)) = from.recv() else { panic!("no address") };
    let reader = addresses.insert(&address)?;
    let Ok(SetupMessage::Terms(ring_offer)) = from.recv() else { panic!("no ring offer") };
    let (ring, answer) = port.accept(reader, &ring_offer, 64 << 10)?;
    to.send(SetupMessage::Answer(answer)).expect("the reader is running");

    for (number, length) in LENGTHS.into_iter().enumerate() {
        // Usually memory is registered once; here each message has its own region.
        let bytes: Vec<u8> = (0..length.max(1)).map(|at| (at * 7 + number) as u8).collect();
        let domain = port.endpoint().domain();
        let source = domain.register(HostMemory::from_vec(bytes)?, Access::WRITE)?;
        port.send(ring, number as u32, &source.slice(0..length)?, TIMEOUT)?;
        // The memory must not change until the reader is done: the region keeps it alive, and no
        // other code writes to it.
    }
    // Waits until everything is read, and closes the ring.
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
    to.send(SetupMessage::Address(port.endpoint().address()?)).expect("the writer is running");
    let Ok(SetupMessage::Address(address)) = from.recv() else { panic!("no address") };
    let writer = addresses.insert(&address)?;
    let options = RingOptions::new(port.endpoint(), RING)?;
    let ring = port.offer(&options)?;
    to.send(SetupMessage::Terms(Box::new(port.ring_offer(ring)?))).expect("the writer is running");
    let Ok(SetupMessage::Answer(answer)) = from.recv() else { panic!("no answer") };
    port.connect(ring, writer, &answer)?;

    let mut total = 0;
    loop {
        let view = match port.receive(ring, TIMEOUT) {
            Ok(view) => view,
            // The writer has closed the ring, and everything was read.
            Err(_) if port.receiver(ring)?.is_end_of_stream() => return Ok(total),
            Err(error) => return Err(error),
        };
        // A chunk of a message, in place in the ring.
        let mut bytes = vec![0; view.len()];
        view.read(0, &mut bytes)?;
        let from = view.header().offset as usize;
        let number = view.header().message as usize;
        let is_right = |(at, byte): (usize, &u8)| *byte == ((from + at) * 7 + number) as u8;
        assert!(bytes.iter().enumerate().all(is_right), "message {number}");
        total += view.len();
        // Dropping it returns its space to the writer.
    }
}
