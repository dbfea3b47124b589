//! A ring over several endpoints, each with a domain, of which all but the first have a thread.

use std::sync::Arc;
use std::time::Instant;

use fabric::ring::{Notify, Port, Pushed, ReceiverId, RingAnswer, RingOffer, SenderId, Stripes};
use fabric::{Access, Caps, Domain, EndpointKind, ErrorKind, HostMemory, MemoryRegion, Offer};

use super::Case;
use super::ring::{CAPACITY, World, bytes_of, options, ordered, travelled};
use crate::cells::{Cell, Memory};
use crate::cuda::DeviceMemory;
use crate::pair::{A, B, Checked, Pair, Setup, check_bytes, patience, pattern, put};
use crate::{cases, ensure};

pub const CASES: &[Case] = cases![ring_over_lanes];

const LANES: usize = 3;
const LONGEST: usize = 700_000;

/// Over three lanes. Whatever order chunks come in, messages come whole; and either side hears of
/// the other one's end.
fn ring_over_lanes(cell: &Cell) -> Checked {
    if cell.kind != EndpointKind::Rdm {
        return Err("lacking: lanes are connectionless".into());
    }
    let offer = ordered(cell, Caps::empty())?;
    if let Err(error) = Notify::Immediate.check(offer.capabilities()) {
        return Err(format!("lacking: {error}").into());
    }
    for reader_goes in [false, true] {
        let mut world = connect(cell, &offer)?;
        let sources = sources(cell.memory, &world.ports[A])?;
        let lengths = [64, 0, 5000, LONGEST, 1, 100_000, 64];
        for (number, length) in lengths.into_iter().enumerate() {
            pass(&mut world, &sources, number as u64, length)?;
        }
        world.settle(0, lengths.len() as u64)?;
        let sent = world.ports[A].sender(world.sender)?.statistics();
        let received = world.ports[B].receiver(world.receiver)?.statistics();
        ensure!(sent.messages == 7 && received.messages == 7, "{sent:?} {received:?}");
        ensure!(sent.chunks == received.chunks, "{sent:?} {received:?}");
        let (sender, receiver) = (world.sender, world.receiver);
        if reader_goes {
            world.ports[B].close_receiver(receiver)?;
            world.until("the writer to hear of the reader's end", |world| {
                Ok(world.ports[A].sender(sender)?.broken().is_some())
            })?;
            world.ports[A].drop_sender(sender);
            world.until("the ring to be let go of", |world| Ok(world.ports[B].rings().0 == 0))?;
        } else {
            world.ports[A].drop_sender(sender);
            world.until("the reader to hear of the end", |world| {
                Ok(world.ports[B].receiver(receiver)?.is_over())
            })?;
            let said = world.ports[B].take(receiver).err().ok_or("something came")?;
            ensure!(said.kind() == ErrorKind::Closed, "{said}");
        }
        for port in world.ports {
            port.close()?;
        }
    }
    Ok(())
}

/// Two ports with further lanes, and a ring by all of them.
fn connect(cell: &Cell, offer: &Offer) -> Checked<World> {
    let pair = Pair::with(cell, Setup { offer: Some(offer.clone()), ..Setup::default() })?;
    let (sides, parts) = pair.split();
    let mut ports = sides.map(|(endpoint, queue)| Port::new(endpoint, queue));
    for port in &mut ports {
        let further = (1..LANES).map(|_| Domain::open(offer)).collect::<Result<Vec<_>, _>>()?;
        let lanes = Stripes::open_on(&further)?;
        match port.add_lanes(lanes) {
            Err(error) if error.kind() == ErrorKind::NotSupported => {
                return Err(format!("lacking: {error}").into());
            }
            added => added?,
        }
    }
    let options = options(Notify::Immediate, CAPACITY, CAPACITY / 8);
    let receiver: ReceiverId = match cell.memory {
        Memory::Host => {
            ports[B].offer_by(&options, LANES, HostMemory::zeroed(CAPACITY as usize)?)?
        }
        Memory::Cuda => {
            ports[B].offer_by(&options, LANES, DeviceMemory::new(CAPACITY as usize)?)?
        }
    };
    let terms = travelled::<RingOffer>(&ports[B].terms(receiver)?)?;
    ensure!(terms.lanes.len() == LANES, "{terms:?}");
    let further = ports[B].lane_addresses();
    let (sender, answer): (SenderId, _) =
        ports[A].accept_by(parts.peers[A], &further, &terms, 3000)?;
    ports[B].connect(receiver, parts.peers[B], &travelled::<RingAnswer>(&answer)?)?;
    Ok(World { ports, parts, memory: cell.memory, sender, receiver })
}

/// The same memory, as the domains of all lanes know it.
fn sources(memory: Memory, port: &Port) -> Checked<Vec<MemoryRegion>> {
    fn all(port: &Port, memory: impl fabric::Memory) -> Checked<Vec<MemoryRegion>> {
        let memory = Arc::new(memory);
        let of = |lane| {
            let domain = port.lane_domain(lane).ok_or("there is no such lane")?;
            Ok(domain.register(Arc::clone(&memory), Access::WRITE)?)
        };
        (0..port.lanes()).map(of).collect()
    }
    match memory {
        Memory::Host => all(port, HostMemory::zeroed(LONGEST)?),
        Memory::Cuda => all(port, DeviceMemory::new(LONGEST)?),
    }
}

/// Sends a message by whichever lanes are free, and takes it.
fn pass(world: &mut World, sources: &[MemoryRegion], number: u64, length: usize) -> Checked {
    let bytes = pattern(number + 5, length);
    if length > 0 {
        put(&sources[0], 0, &bytes)?;
    }
    let (sender, receiver) = (world.sender, world.receiver);
    let mut message = world.ports[A].begin(sender, 9, length as u64)?;
    let (mut got, mut is_whole) = (Vec::with_capacity(length), false);
    let end = Instant::now() + patience();
    world.until(&format!("message {number} of {length} bytes"), |world| {
        while !message.is_written() {
            ensure!(Instant::now() < end, "{} of {length} bytes", message.written());
            let left = length as u64 - message.written();
            let Some(lane) = world.ports[A].pick(sender, left)? else { break };
            let payload = sources[lane].slice(0..length)?;
            let pushed = world.ports[A].push_by(lane, sender, &mut message, &payload, 0)?;
            if !matches!(pushed, Pushed::Posted(_)) {
                break;
            }
        }
        while let Some(view) = world.ports[B].take(receiver)? {
            let header = *view.header();
            ensure!(header.message == number && header.topic == 9, "{header:?}");
            ensure!(header.offset == got.len() as u64, "{header:?}");
            got.extend(bytes_of(&view)?);
            is_whole = view.is_last();
        }
        Ok(is_whole && message.is_written())
    })?;
    check_bytes(&format!("message {number} of {length} bytes"), &got, &bytes)?;
    // What is written from is free when the reader let go of it.
    world.until("the message to be told to be read", |world| {
        Ok(world.ports[A].sender(sender)?.writer().unread() == 0)
    })
}
