//! Rings of a port on several lanes.
#![allow(missing_docs)]

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use fabric::ring::{
    ChunkView, LaneSet, Port, PortEvent, Pushed, ReceiverId, RingAnswer, RingOffer, RingOptions,
    SenderId,
};
use fabric::{
    Access, Address, AddressVector, CompletionQueue, Domain, Endpoint, EndpointKind, ErrorKind,
    HostMemory, Memory, MemoryRegion, Offer, Query, QueueOptions, WaitStrategy,
};

const TIMEOUT: Duration = Duration::from_secs(60);
/// libfabric 1.x calls the `tcp` of 2.x `net`.
const PROVIDERS: [&str; 3] = ["net", "tcp", "tcp;ofi_rxm"];
const CHUNK: u64 = 128 << 10;
const RING: usize = 2 << 20;

fn offers() -> Vec<Offer> {
    Query::new(EndpointKind::Rdm).source("127.0.0.1").offers().unwrap()
}

/// Providers of the list that are present.
fn providers() -> Vec<&'static str> {
    let offers = offers();
    let is_here = |name: &&str| offers.iter().any(|it| it.capabilities().provider == *name);
    let found: Vec<_> = PROVIDERS.into_iter().filter(is_here).collect();
    assert!(!found.is_empty(), "none of {PROVIDERS:?} is here");
    found
}

fn offer(provider: &str) -> Offer {
    let mut offers = offers();
    let index = offers.iter().position(|offer| offer.capabilities().provider == provider);
    offers.swap_remove(index.unwrap_or_else(|| panic!("no {provider}")))
}

/// A port with its addresses.
struct LocalPort {
    port: Port,
    addresses: AddressVector,
    at: Vec<Address>,
}

fn side(provider: &str, lanes: usize) -> LocalPort {
    let offer = offer(provider);
    let domain = Domain::open(&offer).unwrap();
    let addresses = AddressVector::open(&domain).unwrap();
    let options = QueueOptions { size: 0, waiting: WaitStrategy::Block };
    let mut queue = CompletionQueue::open_with(&domain, options).unwrap();
    let builder = Endpoint::builder(&domain).addresses(&addresses);
    let endpoint = builder.queue(&mut queue).open().unwrap();
    let mut at = vec![endpoint.address().unwrap()];
    let mut port = Port::new(endpoint, queue);
    if lanes > 1 {
        let extra: Vec<_> = (1..lanes).map(|_| Domain::open(&offer).unwrap()).collect();
        port.add_lanes(LaneSet::open_on(&extra).unwrap()).unwrap();
    }
    at.extend(port.lane_addresses());
    assert_eq!((port.lanes(), at.len()), (lanes, lanes));
    LocalPort { port, addresses, at }
}

/// Connects a ring from one port to the other.
fn connect(writer: &mut LocalPort, reader: &mut LocalPort, lanes: usize) -> (SenderId, ReceiverId) {
    connect_over(writer, reader, lanes, HostMemory::zeroed(RING).unwrap())
}

fn connect_over(
    writer: &mut LocalPort,
    reader: &mut LocalPort,
    lanes: usize,
    memory: impl Memory,
) -> (SenderId, ReceiverId) {
    let options = RingOptions::new(reader.port.endpoint(), RING as u64).unwrap();
    let reading = reader.port.offer_on_lanes(&options, lanes, memory).unwrap();
    let ring_offer: RingOffer = reader.port.ring_offer(reading).unwrap();
    let lanes = ring_offer.lanes.len();
    let peer = writer.addresses.insert(&reader.at[0]).unwrap();
    let extra = &reader.at[1..lanes];
    let accepted = writer.port.accept_on_lanes(peer, extra, &ring_offer, CHUNK).unwrap();
    let (writing, answer): (SenderId, RingAnswer) = accepted;
    assert_eq!(writer.port.sender(writing).unwrap().lanes(), lanes);
    let peer = reader.addresses.insert(&writer.at[0]).unwrap();
    reader.port.connect(reading, peer, &answer).unwrap();
    (writing, reading)
}

fn bytes_of(message: u64, length: usize) -> Vec<u8> {
    let at = |at: usize| (at as u64 * 131 + (at as u64 >> 9) * 7 + message * 29) as u8;
    (0..length).map(at).collect()
}

/// Registers a message with each lane, in memory that is one byte longer.
fn registered(port: &Port, bytes: Vec<u8>) -> Vec<MemoryRegion> {
    let mut bytes = bytes;
    bytes.push(0);
    let memory = Arc::new(HostMemory::from_vec(bytes).unwrap());
    let of = |lane| port.lane_domain(lane).unwrap().register(Arc::clone(&memory), Access::WRITE);
    (0..port.lanes()).map(|lane| of(lane).unwrap()).collect()
}

fn progress(port: &mut Port) {
    let progress = port.wait(Duration::from_millis(1));
    assert!(!matches!(progress, Ok(PortEvent::Other(_)) | Err(_)), "{progress:?}");
}

/// Writes a message; adds up the chunks of each lane. False if the ring is broken.
fn write(port: &mut Port, ring: SenderId, regions: &[MemoryRegion], by: &mut [u64]) -> bool {
    let length = regions[0].len() as u64 - 1;
    let mut message = port.begin(ring, 0, length).unwrap();
    let end = Instant::now() + TIMEOUT;
    while !message.is_written() {
        assert!(Instant::now() < end, "{} of {length} bytes", message.written());
        let pushed = match port.pick_lane(ring, length - message.written()) {
            Ok(Some(lane)) => {
                let part = regions[lane].all();
                let pushed = port.push_with(lane, ring, &mut message, (&part, 0), &[]);
                by[lane] += u64::from(matches!(pushed, Ok(Pushed::Posted(_))));
                pushed
            }
            Ok(None) => Ok(Pushed::Busy),
            Err(error) => Err(error),
        };
        match pushed {
            Ok(Pushed::Posted(_) | Pushed::Written) => {}
            Ok(Pushed::Blocked(_) | Pushed::Busy) => progress(port),
            Err(_) => return false,
        }
    }
    true
}

/// Reads all messages, and keeps some views for a while.
fn read(
    mut side: LocalPort,
    ring: ReceiverId,
    lengths: &[usize],
    done_sender: &Sender<()>,
) -> LocalPort {
    let (mut held, mut state) = (Vec::<ChunkView>::new(), 1_u64);
    let end = Instant::now() + TIMEOUT;
    let (mut number, mut received) = (0, Vec::new());
    while number < lengths.len() {
        assert!(Instant::now() < end, "{number} messages and {} bytes", received.len());
        let Some(view) = side.port.take(ring).unwrap() else {
            held.clear();
            progress(&mut side.port);
            continue;
        };
        assert_eq!(
            (view.header().message, view.header().offset),
            (number as u64, received.len() as u64)
        );
        let from = received.len();
        received.resize(from + view.len(), 0);
        view.read(0, &mut received[from..]).unwrap();
        if view.is_last() {
            assert!(received == bytes_of(number as u64, lengths[number]), "message {number}");
            (number, received) = (number + 1, Vec::new());
            done_sender.send(()).unwrap();
        }
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        if state >> 61 == 0 && held.len() < 3 {
            held.push(view);
        }
        side.port.return_credit(ring, false).unwrap();
    }
    drop(held);
    for _ in 0..50 {
        progress(&mut side.port);
    }
    side
}

const LENGTHS: [usize; 11] =
    [0, 1, 255, 70_000, 3 << 20, 64, 9_000_001, 131_072, 131_073, 5 << 20, 300_000];

#[test]
fn messages_on_several_lanes_arrive_complete_and_in_order() {
    let lengths: Vec<usize> = LENGTHS.iter().copied().cycle().take(22).collect();
    for provider in providers() {
        // Equal on both sides, more at the writer, more at the reader, and one.
        for (ours, theirs) in [(3, 3), (3, 2), (2, 4), (1, 1)] {
            let (mut writer, mut reader) = (side(provider, ours), side(provider, theirs));
            let (writing, reading) = connect(&mut writer, &mut reader, ours);
            let (done_sender, _done_receiver): (Sender<()>, Receiver<()>) = channel();
            let of_reader = lengths.clone();
            let thread =
                std::thread::spawn(move || read(reader, reading, &of_reader, &done_sender));
            let mut by = vec![0; ours];
            let port = &mut writer.port;
            let mut left = 0;
            for (number, length) in (0..).zip(&lengths) {
                let regions = registered(port, bytes_of(number, *length));
                assert!(write(port, writing, &regions, &mut by));
                let now = port.sender(writing).unwrap().completed_to();
                assert!(now >= left && now <= port.sender(writing).unwrap().writer().tail());
                left = now;
            }
            port.flush(writing, TIMEOUT).unwrap();
            let sender = port.sender(writing).unwrap();
            assert_eq!((sender.completed_to(), sender.unfinished()), (sender.writer().tail(), 0));
            let used = by.iter().filter(|chunks| **chunks > 0).count();
            assert_eq!(used, ours.min(theirs), "{provider}: {by:?}");
            thread.join().unwrap().port.close().unwrap();
            writer.port.close().unwrap();
        }
    }
}

#[test]
fn reader_dropped_mid_message_breaks_only_its_ring() {
    for provider in providers() {
        let lanes = 3;
        let mut writer = side(provider, lanes);
        let (mut lost_reader, mut kept_reader) = (side(provider, lanes), side(provider, lanes));
        let (lost, _) = connect(&mut writer, &mut lost_reader, lanes);
        let (kept, reading) = connect(&mut writer, &mut kept_reader, lanes);
        let lengths = [4 << 20, 64, 6 << 20];
        let (done_sender, done_receiver) = channel();
        let thread = std::thread::spawn(move || read(kept_reader, reading, &lengths, &done_sender));
        let port = &mut writer.port;
        let regions = registered(port, bytes_of(0, 8 << 20));
        let mut message = port.begin(lost, 0, 8 << 20).unwrap();
        // Fills the ring; then its reader is dropped.
        for _ in 0..200 {
            if let Some(lane) = port.pick_lane(lost, CHUNK).unwrap() {
                let _ = port
                    .push_with(lane, lost, &mut message, (&regions[lane].all(), 0), &[])
                    .unwrap();
            }
            progress(port);
        }
        drop(lost_reader);
        let mut by = vec![0; lanes];
        for (number, length) in (0..).zip(lengths) {
            let regions = registered(port, bytes_of(number, length));
            assert!(write(port, kept, &regions, &mut by), "{provider}: the other ring broke");
        }
        port.flush(kept, TIMEOUT).unwrap();
        assert_eq!(done_receiver.iter().take(3).count(), 3);
        // Eventually the lanes read no memory of the lost ring any more.
        port.stop_sender(lost);
        let end = Instant::now() + TIMEOUT;
        while port.sender(lost).unwrap().unfinished() > 0 {
            progress(port);
            assert!(Instant::now() < end, "{provider}: {:?}", port.sender(lost));
        }
        port.drop_sender(lost);
        assert!(port.lane_error().is_none());
        thread.join().unwrap();
    }
}

/// Before another ring is opened, and even if views outlive the ring.
#[test]
fn memory_of_a_closed_ring_is_freed() {
    for provider in providers() {
        let (mut writer, mut reader) = (side(provider, 3), side(provider, 3));
        for is_held in [false, true] {
            let memory = Arc::new(HostMemory::zeroed(RING).unwrap());
            let (writing, reading) = connect_over(&mut writer, &mut reader, 3, Arc::clone(&memory));
            let regions = registered(&writer.port, bytes_of(0, RING / 4));
            let mut message = writer.port.begin(writing, 0, (RING / 4) as u64).unwrap();
            let (mut received, mut held) = (0, Vec::new());
            let end = Instant::now() + TIMEOUT;
            while received < RING / 4 {
                assert!(Instant::now() < end, "{received} bytes");
                if let Some(lane) = writer.port.pick_lane(writing, CHUNK).unwrap() {
                    let part = regions[lane].all();
                    let _ = writer
                        .port
                        .push_with(lane, writing, &mut message, (&part, 0), &[])
                        .unwrap();
                }
                progress(&mut writer.port);
                progress(&mut reader.port);
                while let Some(view) = reader.port.take(reading).unwrap() {
                    received += view.len();
                    held.extend(is_held.then_some(view));
                }
            }
            writer.port.drop_sender(writing);
            reader.port.close_receiver(reading).unwrap();
            while writer.port.rings() != (0, 0) || reader.port.rings() != (0, 0) {
                assert!(Instant::now() < end, "{:?}", reader.port.rings());
                progress(&mut writer.port);
                progress(&mut reader.port);
            }
            assert_eq!(reader.port.quarantined_bytes(), 0);
            if is_held {
                assert!(Arc::strong_count(&memory) > 1);
                drop(held);
            }
            while Arc::strong_count(&memory) > 1 {
                assert!(Instant::now() < end, "{provider}: the memory is still referenced");
                progress(&mut reader.port);
            }
        }
        assert_eq!((writer.port.lane_peer_count(), reader.port.lane_peer_count()), (1, 0));
    }
}

#[test]
fn invalid_lanes_are_refused() {
    let first = providers()[0];
    let (mut writer, mut reader) = (side(first, 2), side(first, 3));
    let domain = Domain::open(&offer(first)).unwrap();
    let again = LaneSet::open_on(&[domain]).unwrap();
    assert_eq!(writer.port.add_lanes(again).unwrap_err().kind(), ErrorKind::InvalidArgument);
    let options = RingOptions::new(reader.port.endpoint(), RING as u64).unwrap();
    let memory = HostMemory::zeroed(RING).unwrap();
    let reading = reader.port.offer_on_lanes(&options, 9, memory).unwrap();
    let ring_offer = reader.port.ring_offer(reading).unwrap();
    assert_eq!(ring_offer.lanes.len(), 3, "limited to the lanes of the port");
    let peer = writer.addresses.insert(&reader.at[0]).unwrap();
    for extra in [&reader.at[1..], &reader.at[1..2], &[]] {
        let error = writer.port.accept_on_lanes(peer, extra, &ring_offer, CHUNK).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::MalformedDescriptor, "{} extra addresses", extra.len());
    }
    assert_eq!(writer.port.rings(), (0, 0));
}

#[test]
fn idle_lanes_sleep() {
    let side = side(providers()[0], 4);
    let before = cpu_time();
    std::thread::sleep(Duration::from_secs(2));
    // Lane threads of other tests in this process may end meanwhile.
    let took = cpu_time().saturating_sub(before);
    println!("{took:?} of processor time for three lanes in two seconds");
    let is_alone = std::env::var_os("NEXTEST").is_some();
    assert!(!is_alone || took < Duration::from_millis(40), "{took:?}");
    drop(side);
}

/// An owner with other work, such as device copies, waits for microseconds only.
#[test]
fn wait_does_not_exceed_its_limit() {
    for provider in providers() {
        let mut port = side(provider, 1).port;
        let wait_time = |port: &mut Port| {
            let start = Instant::now();
            assert!(
                matches!(port.wait(Duration::from_micros(50)), Ok(PortEvent::Idle)),
                "{provider}"
            );
            start.elapsed()
        };
        // Other processes may take the core, but not each time.
        let shortest = (0..200).map(|_| wait_time(&mut port)).min().unwrap();
        assert!(shortest < Duration::from_micros(800), "{provider}: {shortest:?}");
        // Nor after a wake-up, which some providers consume only in a sleep of at least a
        // millisecond.
        let waker = port.parts().1.waker();
        let shortest = (0..200).map(|_| {
            waker.wake().unwrap();
            wait_time(&mut port);
            wait_time(&mut port)
        });
        let shortest = shortest.min().unwrap();
        assert!(shortest < Duration::from_micros(800), "{provider}, woken: {shortest:?}");
    }
}

/// Processor time of the lane threads of this process.
fn cpu_time() -> Duration {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
    let of_lanes = tasks.filter(|task| {
        std::fs::read_to_string(task.join("comm")).is_ok_and(|name| name.starts_with("ring lane"))
    });
    let times = of_lanes.filter_map(|task| std::fs::read_to_string(task.join("schedstat")).ok());
    let nanoseconds = times.filter_map(|times| times.split(' ').next()?.parse::<u64>().ok());
    Duration::from_nanos(nanoseconds.sum())
}
