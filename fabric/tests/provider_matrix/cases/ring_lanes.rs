//! A ring over several endpoints, each with its own domain; all but the first have a thread.

use std::sync::Arc;
use std::time::Instant;

use fabric::ring::{
    LaneSet, NotifyMode, Port, Pushed, ReceiverId, RingAnswer, RingOffer, SenderId,
};
use fabric::{Access, Caps, Domain, EndpointKind, ErrorKind, HostMemory, MemoryRegion, Offer};

use super::Case;
use super::ring::{CAPACITY, Fixture, bytes_of, options, ordered, round_trip};
use crate::cells::{Cell, Memory};
use crate::cuda::DeviceMemory;
use crate::pair::{A, B, CaseResult, Pair, Setup, check_bytes, pattern, put, timeout};
use crate::{cases, ensure};

pub const CASES: &[Case] = cases![ring_over_lanes];

const LANES: usize = 3;
const LONGEST: usize = 700_000;

/// Over three lanes. In whatever order chunks arrive, messages are complete; and either side is
/// notified when the other one closes.
fn ring_over_lanes(cell: &Cell) -> CaseResult {
    if cell.kind != EndpointKind::Rdm {
        return Err("lacking: lanes are connectionless".into());
    }
    let offer = ordered(cell, Caps::empty())?;
    if let Err(error) = NotifyMode::Immediate.check(offer.capabilities()) {
        return Err(format!("lacking: {error}").into());
    }
    for reader_goes in [false, true] {
        let mut fixture = connect(cell, &offer)?;
        let sources = sources(cell.memory, &fixture.ports[A])?;
        let lengths = [64, 0, 5000, LONGEST, 1, 100_000, 64];
        for (number, length) in lengths.into_iter().enumerate() {
            pass(&mut fixture, &sources, number as u64, length)?;
        }
        fixture.settle(0, lengths.len() as u64)?;
        let sent = fixture.ports[A].sender(fixture.sender)?.statistics();
        let received = fixture.ports[B].receiver(fixture.receiver)?.statistics();
        ensure!(sent.messages == 7 && received.messages == 7, "{sent:?} {received:?}");
        ensure!(sent.chunks == received.chunks, "{sent:?} {received:?}");
        let (sender, receiver) = (fixture.sender, fixture.receiver);
        if reader_goes {
            fixture.ports[B].close_receiver(receiver)?;
            fixture.until("the writer to be notified that the reader closed", |fixture| {
                Ok(fixture.ports[A].sender(sender)?.broken().is_some())
            })?;
            fixture.ports[A].drop_sender(sender);
            fixture
                .until("the ring to be dropped", |fixture| Ok(fixture.ports[B].rings().0 == 0))?;
        } else {
            fixture.ports[A].drop_sender(sender);
            fixture.until("the reader to be notified of the end", |fixture| {
                Ok(fixture.ports[B].receiver(receiver)?.is_end_of_stream())
            })?;
            let said = fixture.ports[B].take(receiver).err().ok_or("something came")?;
            ensure!(said.kind() == ErrorKind::Closed, "{said}");
        }
        for port in fixture.ports {
            port.close()?;
        }
    }
    Ok(())
}

/// Two ports with extra lanes, and a ring over all of them.
fn connect(cell: &Cell, offer: &Offer) -> CaseResult<Fixture> {
    let pair = Pair::with(cell, Setup { offer: Some(offer.clone()), ..Setup::default() })?;
    let (sides, parts) = pair.split();
    let mut ports = sides.map(|(endpoint, queue)| Port::new(endpoint, queue));
    for port in &mut ports {
        let further = (1..LANES).map(|_| Domain::open(offer)).collect::<Result<Vec<_>, _>>()?;
        let lanes = LaneSet::open_on(&further)?;
        match port.add_lanes(lanes) {
            Err(error) if error.kind() == ErrorKind::NotSupported => {
                return Err(format!("lacking: {error}").into());
            }
            added => added?,
        }
    }
    let options = options(NotifyMode::Immediate, CAPACITY, CAPACITY / 8);
    let receiver: ReceiverId = match cell.memory {
        Memory::Host => {
            ports[B].offer_on_lanes(&options, LANES, HostMemory::zeroed(CAPACITY as usize)?)?
        }
        Memory::Cuda => {
            ports[B].offer_on_lanes(&options, LANES, DeviceMemory::new(CAPACITY as usize)?)?
        }
    };
    let ring_offer = round_trip::<RingOffer>(&ports[B].ring_offer(receiver)?)?;
    ensure!(ring_offer.lanes.len() == LANES, "{ring_offer:?}");
    let further = ports[B].lane_addresses();
    let (sender, answer): (SenderId, _) =
        ports[A].accept_on_lanes(parts.peers[A], &further, &ring_offer, 3000)?;
    ports[B].connect(receiver, parts.peers[B], &round_trip::<RingAnswer>(&answer)?)?;
    Ok(Fixture { ports, parts, memory: cell.memory, sender, receiver })
}

/// Registers memory with the domains of all lanes.
fn sources(memory: Memory, port: &Port) -> CaseResult<Vec<MemoryRegion>> {
    fn all(port: &Port, memory: impl fabric::Memory) -> CaseResult<Vec<MemoryRegion>> {
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

/// Sends a message over any free lanes, and receives it.
fn pass(fixture: &mut Fixture, sources: &[MemoryRegion], number: u64, length: usize) -> CaseResult {
    let bytes = pattern(number + 5, length);
    if length > 0 {
        put(&sources[0], 0, &bytes)?;
    }
    let (sender, receiver) = (fixture.sender, fixture.receiver);
    let mut message = fixture.ports[A].begin(sender, 9, length as u64)?;
    let (mut got, mut is_whole) = (Vec::with_capacity(length), false);
    let end = Instant::now() + timeout();
    fixture.until(&format!("message {number} of {length} bytes"), |fixture| {
        while !message.is_written() {
            ensure!(Instant::now() < end, "{} of {length} bytes", message.written());
            let left = length as u64 - message.written();
            let Some(lane) = fixture.ports[A].pick_lane(sender, left)? else { break };
            let payload = sources[lane].slice(0..length)?;
            let pushed =
                fixture.ports[A].push_with(lane, sender, &mut message, (&payload, 0), &[])?;
            if !matches!(pushed, Pushed::Posted(_)) {
                break;
            }
        }
        while let Some(view) = fixture.ports[B].take(receiver)? {
            let header = *view.header();
            ensure!(header.message == number && header.topic == 9, "{header:?}");
            ensure!(header.offset == got.len() as u64, "{header:?}");
            got.extend(bytes_of(&view)?);
            is_whole = view.is_last();
        }
        Ok(is_whole && message.is_written())
    })?;
    check_bytes(&format!("message {number} of {length} bytes"), &got, &bytes)?;
    // The source is free when the reader has released the message.
    fixture.until("the message to be credited", |fixture| {
        Ok(fixture.ports[A].sender(sender)?.writer().unread() == 0)
    })
}
