//! The provider itself: what arrives, and when, with each fault.

use std::time::{Duration, Instant};

use super::*;
use crate::ring::{NotifyMode, Port, RingOptions};
use crate::{
    Access, AddressVector, CompletionKind, CompletionQueue, Domain, Endpoint, ErrorKind,
    HostMemory, Memory, MemoryKind, MemoryRegion, Peer, PeerToPeer, PostOptions, TransferFlags,
};

const TIMEOUT: Duration = Duration::from_secs(5);
const LENGTH: usize = 10_000;

/// Host memory that acts as device memory.
struct DeviceMemory(HostMemory);

// SAFETY: as the inner memory.
unsafe impl Memory for DeviceMemory {
    fn as_ptr(&self) -> *mut u8 {
        self.0.as_ptr()
    }
    fn len(&self) -> usize {
        self.0.len()
    }
    fn kind(&self) -> MemoryKind {
        MemoryKind::Emulated(1)
    }
}

struct Side {
    endpoint: Endpoint,
    queue: CompletionQueue,
    _addresses: AddressVector,
    peer: Peer,
    domain: Domain,
}

/// Two endpoints with domains of their own, as two agents have.
fn pair(fault: Fault) -> [Side; 2] {
    let offer = offer(fault).unwrap();
    let halves = [0, 1].map(|_| {
        let domain = Domain::open(&offer).unwrap();
        let addresses = AddressVector::open(&domain).unwrap();
        let mut queue = CompletionQueue::open(&domain).unwrap();
        let builder = Endpoint::builder(&domain).addresses(&addresses).queue(&mut queue);
        (builder.open().unwrap(), queue, addresses, domain)
    });
    let names = [0, 1].map(|side: usize| halves[side].0.address().unwrap());
    let mut names = names.iter().rev();
    halves.map(|(endpoint, queue, addresses, domain)| {
        let peer = addresses.insert(names.next().unwrap()).unwrap();
        Side { endpoint, queue, _addresses: addresses, peer, domain }
    })
}

/// Memory and a region of the same bytes, on a device or not.
fn region(domain: &Domain, byte: u8, is_device: bool) -> (MemoryRegion, *const u8) {
    let memory = HostMemory::from_vec(vec![byte; LENGTH]).unwrap();
    let at = memory.as_ptr().cast_const();
    let region = match is_device {
        true => domain.register(DeviceMemory(memory), Access::ALL),
        false => domain.register(memory, Access::ALL),
    };
    (region.unwrap(), at)
}

/// The number of bytes that have this value, from the start on.
fn count(at: *const u8, byte: u8) -> usize {
    // SAFETY: the region of the caller keeps the memory, which nothing writes meanwhile.
    (0..LENGTH).take_while(|offset| unsafe { at.add(*offset).read_volatile() } == byte).count()
}

fn transfer(side: &mut Side, here: &MemoryRegion, there: &MemoryRegion, is_read: bool) {
    let remote = side.domain.attach(&there.describe().unwrap()).unwrap();
    let options = PostOptions::token(1).flags(TransferFlags::DELIVERY_COMPLETE);
    let (local, remote) = (here.all(), remote.all());
    let Side { endpoint, queue, peer, .. } = side;
    let (posted, kind) = match is_read {
        true => (endpoint.read(queue, *peer, &local, &remote, 1), CompletionKind::Read),
        false => (endpoint.write(queue, *peer, &local, &remote, options), CompletionKind::Write),
    };
    assert_eq!(queue.complete(posted.unwrap(), TIMEOUT).unwrap().kind, kind);
}

#[test]
fn honest_transfers_have_arrived_when_they_are_done() {
    let [mut initiator, target] = pair(Fault::None);
    for (here, there) in [(true, true), (true, false), (false, true), (false, false)] {
        let (local, own) = region(&initiator.domain, 1, here);
        let (remote, other) = region(&target.domain, 2, there);
        transfer(&mut initiator, &local, &remote, false);
        assert_eq!(count(other, 1), LENGTH);
        let (remote, _) = region(&target.domain, 3, there);
        transfer(&mut initiator, &local, &remote, true);
        assert_eq!(count(own, 3), LENGTH);
    }
}

#[test]
fn messages_arrive_whole_and_in_order() {
    let [mut sender, mut receiver] = pair(Fault::CutsTransfers(1));
    let (out, _) = region(&sender.domain, 0, false);
    let (inbox, _) = region(&receiver.domain, 0, false);
    for number in 0..20_u8 {
        out.write(0, &[number; 100]).unwrap();
        let slice = out.slice(0..100).unwrap();
        let sent = sender.endpoint.send(&mut sender.queue, sender.peer, &slice, 1).unwrap();
        sender.queue.complete(sent, TIMEOUT).unwrap();
    }
    for number in 0..20_u8 {
        let posted = receiver.endpoint.receive(&mut receiver.queue, &inbox.all(), 2).unwrap();
        let done = receiver.queue.complete(posted, TIMEOUT).unwrap();
        let mut bytes = [0; 100];
        inbox.read(0, &mut bytes).unwrap();
        assert_eq!((done.length, bytes), (100, [number; 100]));
    }
}

#[test]
fn early_completions_precede_their_bytes_on_devices_only() {
    const LATE: Duration = Duration::from_millis(50);
    let [mut initiator, target] = pair(Fault::EarlyCompletions(LATE));
    let (local, _) = region(&initiator.domain, 1, false);
    let (host, on_host) = region(&target.domain, 2, false);
    transfer(&mut initiator, &local, &host, false);
    assert_eq!(count(on_host, 1), LENGTH);
    let (device, on_device) = region(&target.domain, 2, true);
    let start = Instant::now();
    transfer(&mut initiator, &local, &device, false);
    assert_eq!(count(on_device, 2), LENGTH, "the bytes did not wait");
    while count(on_device, 1) < LENGTH {
        assert!(initiator.queue.poll().is_none() && start.elapsed() < TIMEOUT);
    }
    assert!(start.elapsed() >= LATE);
    // Bytes of closed regions are dropped.
    transfer(&mut initiator, &local, &device, false);
    drop(device);
    std::thread::sleep(2 * LATE);
    assert!(initiator.queue.poll().is_none());
}

#[test]
fn cut_transfers_are_reported_as_done() {
    let [mut initiator, target] = pair(Fault::CutsTransfers(4096));
    let (local, own) = region(&initiator.domain, 1, false);
    let (device, on_device) = region(&target.domain, 2, true);
    transfer(&mut initiator, &local, &device, false);
    assert_eq!((count(on_device, 1), LENGTH > 4096), (4096, true));
    let (device, _) = region(&target.domain, 3, true);
    transfer(&mut initiator, &local, &device, true);
    assert_eq!(count(own, 3), 4096);
}

#[test]
fn refusals_are_those_of_real_providers() {
    let domain = Domain::open(&offer(Fault::RefusesRegistration).unwrap()).unwrap();
    let memory = DeviceMemory(HostMemory::zeroed(4096).unwrap());
    let error = domain.register(memory, Access::ALL).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.to_string().contains("GPUDirect RDMA"), "{error}");
    domain.register(HostMemory::zeroed(4096).unwrap(), Access::ALL).unwrap();

    let open = |fault| {
        let domain = Domain::open(&offer(fault).unwrap()).unwrap();
        let addresses = AddressVector::open(&domain).unwrap();
        let mut queue = CompletionQueue::open(&domain).unwrap();
        let builder = Endpoint::builder(&domain).addresses(&addresses).queue(&mut queue);
        builder.peer_to_peer(PeerToPeer::Required).open().map(drop)
    };
    open(Fault::None).unwrap();
    let error = open(Fault::RefusesPeerToPeer).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotSupported);
    assert!(error.to_string().contains("no direct path"), "{error}");
}

#[test]
fn wrong_key_or_range_is_refused() {
    let [mut initiator, target] = pair(Fault::None);
    let (local, _) = region(&initiator.domain, 1, true);
    let (remote, at) = region(&target.domain, 2, true);
    let described = remote.describe().unwrap();
    drop(remote);
    let remote = initiator.domain.attach(&described).unwrap();
    let Side { endpoint, queue, peer, .. } = &mut initiator;
    let error = endpoint.write(queue, *peer, &local.all(), &remote.all(), 1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BadKey, "{error}");
    let _ = at;
}

/// Real providers get no memory of emulated devices: its interface number means nothing to them.
#[test]
fn real_providers_refuse_emulated_memory() {
    use crate::{Caps, EndpointKind, Query};
    let query = Query::new(EndpointKind::Rdm).provider("shm");
    let caps = Caps::MESSAGE | Caps::RMA | Caps::DEVICE_MEMORY;
    let domain = Domain::open(&query.caps(caps).first().unwrap()).unwrap();
    let memory = DeviceMemory(HostMemory::zeroed(4096).unwrap());
    let error = domain.register(memory, Access::ALL).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotSupported);
    assert!(error.to_string().contains("no emulated devices"), "{error}");
}

/// Writes messages to a ring in device memory, and returns how many payloads were incomplete when
/// their notice arrived.
fn ring_in_device_memory(fault: Fault, notify: NotifyMode) -> usize {
    const CAPACITY: usize = 64 << 10;
    let [writer, reader] = pair(fault);
    let (peers, domains) = ([writer.peer, reader.peer], [writer.domain, reader.domain]);
    let mut writing = Port::new(writer.endpoint, writer.queue);
    let mut reading = Port::new(reader.endpoint, reader.queue);
    let memory = HostMemory::zeroed(CAPACITY).unwrap();
    let region = domains[1].register(DeviceMemory(memory), Access::REMOTE_WRITE).unwrap();
    let options = RingOptions::new(reading.endpoint(), CAPACITY as u64).unwrap();
    let options = RingOptions { notify, inline_data: 40, ..options };
    // Its memory must be of the reader's domain.
    let foreign = domains[0].register(HostMemory::zeroed(CAPACITY).unwrap(), Access::ALL).unwrap();
    for regions in [vec![], vec![foreign], vec![region.clone(), region.clone()]] {
        let refused = reading.offer_registered(&options, regions).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
    }
    let ring = reading.offer_registered(&options, vec![region]).unwrap();
    let offer = reading.ring_offer(ring).unwrap();
    let (sender, answer) = writing.accept(peers[0], &offer, 9000).unwrap();
    reading.connect(ring, peers[1], &answer).unwrap();
    let bytes: Vec<u8> = (0..20_000_u32).map(|at| (at % 251) as u8).collect();
    let source = domains[0].register(HostMemory::from_vec(bytes).unwrap(), Access::WRITE).unwrap();
    let end = Instant::now() + TIMEOUT;
    let mut incomplete = 0;
    for number in 0..200_usize {
        let length = [0, 1, 100, 20_000][number % 4];
        let inline: Vec<u8> = (0..number % 41).map(|at| (number + at) as u8).collect();
        let payload = source.slice(0..length).unwrap();
        let mut message = writing.begin(sender, number as u32, length as u64).unwrap();
        let mut received = 0;
        loop {
            assert!(Instant::now() < end, "message {number}");
            if !message.is_written() {
                let part = (&payload, 0);
                let _ = writing.push_with(0, sender, &mut message, part, &inline).unwrap();
            }
            let _ = (writing.progress().unwrap(), reading.progress().unwrap());
            reading.return_all_credit(true);
            let Some(view) = reading.take(ring).unwrap() else { continue };
            assert_eq!((view.header().topic, view.header().offset), (number as u32, received));
            assert_eq!(view.inline_data().unwrap(), inline);
            if view.slice().is_some() {
                assert!(view.read(0, &mut [0]).is_err(), "the processor cannot read it");
            }
            let byte = |at: usize| {
                // SAFETY: the memory is of the host, and the view keeps it.
                unsafe { view.as_ptr().add(at).read_volatile() }
            };
            let expected = |at| ((received as usize + at) % 251) as u8;
            incomplete += usize::from(!(0..view.len()).all(|at| byte(at) == expected(at)));
            received += view.len() as u64;
            if view.is_last() {
                break;
            }
        }
    }
    let mut message = writing.begin(sender, 0, 8).unwrap();
    let part = source.slice(0..8).unwrap();
    let refused = writing.push_with(0, sender, &mut message, (&part, 0), &[0; 41]).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::OutOfBounds);
    incomplete
}

#[test]
fn rings_in_device_memory_have_bytes_beside_their_headers() {
    for notify in [NotifyMode::Immediate, NotifyMode::Message] {
        assert_eq!(ring_in_device_memory(Fault::None, notify), 0);
        let late = Fault::EarlyCompletions(Duration::from_millis(5));
        assert!(ring_in_device_memory(late, notify) > 100);
        assert!(ring_in_device_memory(Fault::CutsTransfers(50), notify) > 20);
    }
}
