//! Tests that every fake provider must pass: puts and gets, rings in all forms, and closing.
#![allow(unsafe_code)]

use std::time::{Duration, Instant};

use libfabric_sys as sys;

use super::network::{begin, with};
use super::objects;
use super::profile::{CXI, EFA, EFA_DIRECT, OPX, PSM3, ProviderProfile};
use crate::handle::Handle;
use crate::offer::Info;
use crate::ring::{ChunkView, NotifyMode, Port, PortEvent, RingOptions};
use crate::*;

const TIMEOUT: Duration = Duration::from_secs(20);

fn offer(profile: &ProviderProfile) -> Offer {
    // SAFETY: libfabric makes an empty element with all attributes; the strings in it are malloc's.
    unsafe {
        let raw = sys::fi_dupinfo(std::ptr::null());
        (*raw).caps = sys::FI_MSG | sys::FI_RMA | profile.caps;
        let endpoint = &mut *(*raw).ep_attr;
        (endpoint.type_, endpoint.max_msg_size) = (sys::FI_EP_RDM, profile.max_message);
        endpoint.max_order_waw_size = profile.max_ordered_write;
        let (tx, rx) = (&mut *(*raw).tx_attr, &mut *(*raw).rx_attr);
        (tx.inject_size, tx.iov_limit) = (profile.inject_size, profile.iov_limit);
        (tx.msg_order, rx.msg_order) = (profile.order, profile.order);
        (tx.size, rx.size) = (profile.depth, profile.depth);
        let domain = &mut *(*raw).domain_attr;
        (domain.mr_mode, domain.mr_key_size) = (profile.mr_mode, profile.key_size);
        (domain.cq_data_size, domain.resource_mgmt) =
            (profile.data_size, profile.resource_management);
        let copy = |name: &str| {
            let name = std::ffi::CString::new(name).unwrap();
            libc::strdup(name.as_ptr())
        };
        (*(*raw).fabric_attr).prov_name = copy(profile.name);
        (*(*raw).fabric_attr).name = copy(profile.fabric);
        Offer::adopt(Info::adopt(raw).unwrap(), Threading::Safe)
    }
}

/// One of two endpoints that are peers of each other.
struct Side {
    endpoint: Endpoint,
    queue: CompletionQueue,
    addresses: AddressVector,
    peer: Peer,
}

struct Pair {
    sides: [Side; 2],
    domain: Domain,
}

impl Pair {
    fn open(profile: ProviderProfile, seed: u64) -> Self {
        begin(profile, seed);
        let offer = offer(&profile);
        // SAFETY: just opened, and owned by the handle.
        let handle = unsafe { Handle::adopt("fi_fabric", objects::fabric()).unwrap() };
        let fabric = Fabric::new(handle, offer.capabilities().provider.clone());
        let domain = Domain::open_on(&fabric, &offer).unwrap();
        let halves = [0, 1].map(|_| {
            let addresses = AddressVector::open(&domain).unwrap();
            let options = QueueOptions { size: 256, waiting: WaitStrategy::Busy };
            let mut queue = CompletionQueue::open_with(&domain, options).unwrap();
            let builder = Endpoint::builder(&domain).addresses(&addresses);
            (builder.queue(&mut queue).open().unwrap(), queue, addresses)
        });
        let names = [0, 1].map(|side: usize| halves[side].0.address().unwrap());
        let mut names = names.iter().rev();
        let sides = halves.map(|(endpoint, queue, addresses)| {
            let peer = addresses.insert(names.next().unwrap()).unwrap();
            Side { endpoint, queue, addresses, peer }
        });
        Self { sides, domain }
    }
}

/// The checks at the end of a test: no object is open, so every close worked, and there was no
/// misuse.
fn is_clean() {
    with(|network| {
        assert!(network.misuses.is_empty(), "{:#?}", network.misuses);
        assert!(network.objects.is_empty(), "{:#?}", network.objects);
    });
}

/// A region of random bytes that the endpoint may use.
fn region(domain: &Domain, endpoint: &Endpoint, length: usize, access: Access) -> MemoryRegion {
    let bytes = with(|network| (0..length).map(|_| network.draw(256) as u8).collect());
    let region = domain.register(HostMemory::from_vec(bytes).unwrap(), access).unwrap();
    region.enable_for(endpoint).unwrap();
    region
}

fn bytes(region: &MemoryRegion, from: usize, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    region.read(from, &mut bytes).unwrap();
    bytes
}

/// Writes and reads of all lengths, in flight together.
fn puts_and_gets(profile: ProviderProfile, seed: u64) {
    const BLOCKS: usize = 32;
    const BLOCK_LENGTH: usize = 10_000;
    let Pair { sides: [mut initiator, mut responder], domain } = Pair::open(profile, seed);
    let source = region(&domain, &initiator.endpoint, BLOCKS * BLOCK_LENGTH, Access::ALL);
    let result = region(&domain, &initiator.endpoint, BLOCKS * BLOCK_LENGTH, Access::ALL);
    let target = region(&domain, &responder.endpoint, BLOCKS * BLOCK_LENGTH, Access::ALL);
    let remote = domain.attach(&target.describe().unwrap()).unwrap();
    let has_data = domain.capabilities().immediate_mask() != 0;
    let end = Instant::now() + TIMEOUT;
    for _ in 0..20 {
        let mut wanted = Vec::new();
        let (mut pending, mut data) = (0, Vec::new());
        for source_range in 0..BLOCKS {
            let length = 1 + with(|network| network.draw(BLOCK_LENGTH));
            let at = source_range * BLOCK_LENGTH;
            let local = source.slice(at..at + length).unwrap();
            let range = remote.slice(at as u64..(at + length) as u64).unwrap();
            // Completed on delivery, since nothing else reports the arrival of writes without
            // an immediate.
            let options = PostOptions::token(7).flags(TransferFlags::DELIVERY_COMPLETE);
            let (endpoint, queue) = (&mut initiator.endpoint, &mut initiator.queue);
            if has_data && source_range % 2 == 0 {
                let number = 0xff00_0000 | source_range as u64;
                endpoint
                    .write_data(queue, initiator.peer, &local, &range, number, options)
                    .unwrap();
                data.push((number, length));
            } else {
                endpoint.write(queue, initiator.peer, &local, &range, options).unwrap();
            }
            pending += 1;
            wanted.push((at, length));
        }
        let mut received = Vec::new();
        while pending > 0 || received.len() < data.len() {
            assert!(Instant::now() < end, "{pending} writes of seed {seed} are not done");
            while let Some(outcome) = initiator.queue.poll() {
                assert_eq!(outcome.unwrap().token, 7);
                pending -= 1;
            }
            while let Some(outcome) = responder.queue.poll() {
                let completion = outcome.unwrap();
                assert_eq!(completion.kind, CompletionKind::RemoteWrite);
                received.push((completion.data.unwrap(), completion.length));
            }
        }
        received.sort_unstable();
        assert_eq!(received, data);
        for (at, length) in &wanted {
            assert_eq!(bytes(&target, *at, *length), bytes(&source, *at, *length), "seed {seed}");
            let range = remote.slice(*at as u64..(at + length) as u64).unwrap();
            let local = result.slice(*at..at + length).unwrap();
            initiator
                .endpoint
                .read(&mut initiator.queue, initiator.peer, &local, &range, 8)
                .unwrap();
        }
        pending = wanted.len();
        while pending > 0 {
            assert!(Instant::now() < end, "{pending} reads of seed {seed} are not done");
            assert!(responder.queue.poll().is_none());
            while let Some(outcome) = initiator.queue.poll() {
                assert_eq!(outcome.unwrap().token, 8);
                pending -= 1;
            }
        }
        for (at, length) in wanted {
            assert_eq!(bytes(&result, at, length), bytes(&source, at, length), "seed {seed}");
        }
    }
    drop((source, result, target, remote, initiator, responder, domain));
    is_clean();
}

/// The offset in the source and the length of a message: most are short, few longer than a
/// chunk.
fn source_range(message: u64) -> (usize, usize) {
    let mixed = (message + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 16;
    let most = [64, 300, 3000, 30_000][(mixed >> 32) as usize % 4];
    ((mixed % 1000) as usize, (mixed >> 10) as usize % (most + 1))
}

/// The bytes that accompany each chunk of a message.
fn inline_of(message: u64, most: u16) -> Vec<u8> {
    let length = (message * 31) as usize % (usize::from(most) + 1);
    (0..length).map(|at| (message as usize + at) as u8).collect()
}

const CHUNK: u64 = 9000;

struct Rings {
    writer: Port,
    reader: Port,
    peers: [Peer; 2],
    source: MemoryRegion,
    domain: Domain,
    end: Instant,
    seed: u64,
    /// Turns that each side skips.
    skipped_turns: [usize; 2],
    /// Lost rings for which the writer still reserves a share of its queue.
    reserved_rings: usize,
    _addresses: [AddressVector; 2],
}

impl Rings {
    fn open(profile: ProviderProfile, seed: u64) -> Self {
        let Pair { sides: [writer, reader], domain } = Pair::open(profile, seed);
        let peers = [writer.peer, reader.peer];
        Self {
            source: region(&domain, &writer.endpoint, 40_000, Access::WRITE),
            writer: Port::new(writer.endpoint, writer.queue),
            reader: Port::new(reader.endpoint, reader.queue),
            peers,
            domain,
            end: Instant::now() + TIMEOUT,
            seed,
            skipped_turns: [0; 2],
            reserved_rings: 0,
            _addresses: [writer.addresses, reader.addresses],
        }
    }

    /// Each side takes a turn; at random it skips some, or many in a row.
    fn progress(&mut self) {
        assert!(Instant::now() < self.end, "seed {}: timed out", self.seed);
        for (port, skipped_turns) in
            [&mut self.writer, &mut self.reader].into_iter().zip(&mut self.skipped_turns)
        {
            *skipped_turns = match (*skipped_turns, with(|network| network.draw(200))) {
                (0, 0) => 300,
                (0, drawn) => usize::from(drawn < 50),
                (skipped_turns, _) => skipped_turns - 1,
            };
            if *skipped_turns == 0 {
                let progress = port.progress().unwrap();
                assert!(
                    matches!(progress, PortEvent::Idle | PortEvent::Ring),
                    "{progress:?} belongs to no ring"
                );
                port.return_all_credit(with(|network| network.draw(8) == 0));
            }
        }
    }

    fn options(&self, mode: NotifyMode, completed_messages: u64) -> RingOptions {
        let capacity = 64 << 10;
        // Returns credit in larger steps, or all released credit at once.
        let watermark = if self.seed.is_multiple_of(2) { 0 } else { capacity / 4 };
        // Bytes accompany separate headers, where the provider writes only one piece.
        let is_separate = self.domain.capabilities().limits.iov_limit < 2;
        let inline_data = if is_separate && self.seed.is_multiple_of(2) { 100 } else { 0 };
        RingOptions { capacity, watermark, notify: mode, completed_messages, inline_data }
    }

    /// Sends messages through a new ring until message `first` or a later one arrived complete.
    /// More may be in flight then, up to `last`. If all messages arrived, the ring is closed;
    /// otherwise it is lost.
    fn pass(&mut self, mode: NotifyMode, (first, until, last): (u64, u64, u64)) {
        let options = self.options(mode, first);
        let reading = self.reader.offer(&options).unwrap();
        let ring_offer = self.reader.ring_offer(reading).unwrap();
        let (writing, answer) = self.writer.accept(self.peers[0], &ring_offer, CHUNK).unwrap();
        self.reader.connect(reading, self.peers[1], &answer).unwrap();
        let is_read = |port: &Port| {
            let sender = port.sender(writing).unwrap();
            sender.writer().unread() == 0 && sender.unfinished() == 0
        };
        let (mut next, mut completed_messages, mut received) = (first, first, Vec::new());
        let mut message = None;
        let mut views: Vec<ChunkView> = Vec::new();
        while completed_messages < until {
            // At random, waits until all messages are read: the last credit must not be lost.
            let may_write_more = !next.is_multiple_of(20) || is_read(&self.writer);
            if message.is_none() && next < last && may_write_more {
                let (_, length) = source_range(next);
                let message_writer =
                    self.writer.begin(writing, next as u32, length as u64).unwrap();
                assert_eq!(message_writer.number(), next);
                message = Some(message_writer);
            }
            if let Some(message_writer) = &mut message {
                let (from, length) = source_range(next);
                let payload = self.source.slice(from..from + length).unwrap();
                let bytes = inline_of(next, options.inline_data);
                let part = (&payload, 0);
                let _ = self.writer.push_with(0, writing, message_writer, part, &bytes).unwrap();
                if message_writer.is_written() {
                    (message, next) = (None, next + 1);
                }
            }
            self.progress();
            while let Some(view) = self.reader.take(reading).unwrap() {
                let header = view.header();
                assert_eq!(
                    (header.message, header.topic),
                    (completed_messages, completed_messages as u32)
                );
                assert_eq!(header.offset, received.len() as u64);
                let expected = inline_of(completed_messages, options.inline_data);
                assert_eq!(view.inline_data().unwrap(), expected);
                let at = received.len();
                received.resize(at + view.len(), 0);
                view.read(0, &mut received[at..]).unwrap();
                if view.is_last() {
                    let (from, length) = source_range(completed_messages);
                    let wanted = bytes(&self.source, from, length);
                    assert!(
                        received == wanted,
                        "seed {}: message {completed_messages} is wrong",
                        self.seed
                    );
                    (completed_messages, received) = (completed_messages + 1, Vec::new());
                }
                views.push(view);
            }
            // Views are dropped in any order.
            let dropped = with(|network| network.draw(4));
            if dropped < views.len() {
                drop(views.swap_remove(dropped));
            }
        }
        drop(views);
        if until < last {
            // Where queues may overrun, a writer that receives no more reports keeps its share
            // reserved.
            self.reserved_rings =
                usize::from(!self.domain.capabilities().limits.resource_management);
            self.reader.forget(reading);
            return self.writer.drop_sender(writing);
        }
        while !is_read(&self.writer) {
            self.progress();
        }
        self.writer.drop_sender(writing);
        while !self.reader.receiver(reading).unwrap().is_end_of_stream() {
            self.progress();
        }
        let statistics = self.reader.close_receiver(reading).unwrap();
        assert_eq!((statistics.messages, statistics.duplicates), (last - first, 0));
        while self.writer.rings().1 > self.reserved_rings || self.reader.rings().0 > 0 {
            self.progress();
        }
    }

    fn close(self) {
        let Self { writer, reader, source, domain, seed, .. } = self;
        let ports = if seed % 2 == 0 { [writer, reader] } else { [reader, writer] };
        drop((source, domain));
        for port in ports {
            port.close().unwrap();
        }
    }
}

/// The operations that the profile permits, in every permitted form.
fn rings(profile: ProviderProfile, forms: &[NotifyMode], seed: u64) {
    const MESSAGES: u64 = 1500;
    for mode in NotifyMode::ALL {
        let mut rings = Rings::open(profile, seed);
        if forms.contains(&mode) {
            rings.pass(mode, (0, MESSAGES / 3, MESSAGES));
            rings.pass(mode, (MESSAGES / 3, MESSAGES, MESSAGES));
            with(|network| {
                // The tested event has happened.
                assert!(network.rejected_posts > 100);
                assert!(network.reordered > 100, "{}", network.reordered);
                let fills = profile.automatic_progress && mode == Immediate;
                assert!(!fills || network.most_entries > 6, "{}", network.most_entries);
            });
        } else {
            let options = rings.options(mode, 0);
            let error = rings.reader.offer(&options).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NotSupported, "{error}");
            assert_eq!(error.operation(), "open ring");
        }
        rings.close();
        is_clean();
    }
}

/// The ports of a ring in use are closed.
fn close_rings_in_use(profile: ProviderProfile, mode: NotifyMode, seed: u64) {
    let mut rings = Rings::open(profile, seed);
    let options = rings.options(mode, 0);
    let reading = rings.reader.offer(&options).unwrap();
    let ring_offer = rings.reader.ring_offer(reading).unwrap();
    let (writing, answer) = rings.writer.accept(rings.peers[0], &ring_offer, CHUNK).unwrap();
    rings.reader.connect(reading, rings.peers[1], &answer).unwrap();
    let payload = rings.source.slice(0..20_000).unwrap();
    let mut message = rings.writer.begin(writing, 0, 20_000).unwrap();
    let mut view = None;
    while view.is_none() {
        let _ = rings.writer.push(writing, &mut message, &payload).unwrap();
        rings.progress();
        view = rings.reader.take(reading).unwrap();
    }
    rings.close();
    drop((view, payload));
    is_clean();
}

/// Objects are dropped in any order, with operations in flight.
fn close_objects_in_any_order(profile: ProviderProfile, seed: u64) {
    let Pair { sides: [initiator, responder], domain } = Pair::open(profile, seed);
    let Side { mut endpoint, mut queue, addresses, peer } = initiator;
    let local = region(&domain, &endpoint, 4096, Access::ALL);
    let target = region(&domain, &responder.endpoint, 4096, Access::ALL);
    let remote = domain.attach(&target.describe().unwrap()).unwrap();
    let range = remote.slice(0..64).unwrap();
    for at in 0..20 {
        let slice = local.slice(at * 64..at * 64 + 64).unwrap();
        endpoint.receive(&mut queue, &slice, 0).unwrap();
        endpoint.write(&mut queue, peer, &slice, &range, 0).unwrap();
        endpoint.read(&mut queue, peer, &slice, &range, 0).unwrap();
    }
    let mut objects: Vec<Box<dyn std::any::Any>> = vec![
        Box::new(local),
        Box::new(endpoint),
        Box::new(queue),
        Box::new(addresses),
        Box::new(domain),
        Box::new(responder.endpoint),
        Box::new(responder.queue),
        Box::new(responder.addresses),
    ];
    while !objects.is_empty() {
        let next = with(|network| network.draw(objects.len()));
        drop(objects.swap_remove(next));
    }
    // A peer's memory is retained for as long as it must be reachable.
    drop((target, remote, range));
    is_clean();
}

/// Sums, old values and exchanges of a word; or the refusal of all of them.
fn atomics(profile: ProviderProfile, seed: u64) {
    let Pair { sides: [mut initiator, mut responder], domain } = Pair::open(profile, seed);
    let word = |endpoint, value| {
        let word = domain.register(HostMemory::zeroed(8).unwrap(), Access::ALL).unwrap();
        word.enable_for(endpoint).unwrap();
        word.store_u64(0, value).unwrap();
        word
    };
    let (three, result) = (word(&initiator.endpoint, 3), word(&initiator.endpoint, 0));
    let target = word(&responder.endpoint, 0);
    let remote = domain.attach(&target.describe().unwrap()).unwrap().all();
    let (operand, brought) = (three.all(), result.all());
    let request = AtomicRequest {
        operation: AtomicOperation::Sum,
        datatype: Datatype::U64,
        operand: &operand,
        remote: &remote,
    };
    let (endpoint, queue) = (&mut initiator.endpoint, &mut initiator.queue);
    if profile.caps & sys::FI_ATOMIC == 0 {
        let error = endpoint.atomic(queue, initiator.peer, &request, 0).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotSupported, "{error}");
    } else {
        for _ in 0..100 {
            endpoint.atomic(queue, initiator.peer, &request, 0).unwrap();
        }
        settle(&mut initiator, &mut responder, 100);
        let (endpoint, queue) = (&mut initiator.endpoint, &mut initiator.queue);
        endpoint.fetch_atomic(queue, initiator.peer, &request, &brought, 0).unwrap();
        settle(&mut initiator, &mut responder, 1);
        assert_eq!((result.load_u64(0).unwrap(), target.load_u64(0).unwrap()), (300, 303));
    }
    drop((operand, three, brought, result, target, remote, initiator, responder, domain));
    is_clean();
}

/// Waits for this many operations of one side.
fn settle(initiator: &mut Side, responder: &mut Side, mut pending: usize) {
    let end = Instant::now() + TIMEOUT;
    while pending > 0 {
        assert!(Instant::now() < end, "{pending} operations are not done");
        assert!(responder.queue.poll().is_none());
        if let Some(outcome) = initiator.queue.poll() {
            outcome.unwrap();
            pending -= 1;
        }
    }
}

use NotifyMode::{Immediate, Message};

macro_rules! on_each {
    ($($name:ident = $profile:expr, $forms:expr;)*) => {$(
        mod $name {
            use super::*;

            #[test]
            fn puts_and_gets_transfer_all_bytes() {
                (1..=4).for_each(|seed| puts_and_gets($profile, seed * 7919));
            }

            #[test]
            fn atomics_run_exactly_once_or_are_refused() {
                (1..=4).for_each(|seed| atomics($profile, seed * 7919));
            }

            #[test]
            fn ring_messages_arrive_complete_and_in_order() {
                (1..=4).for_each(|seed| rings($profile, &$forms, seed * 7919));
            }

            #[test]
            fn rings_in_use_are_closed_cleanly() {
                for mode in $forms {
                    (1..=8).for_each(|seed| close_rings_in_use($profile, mode, seed * 7919));
                }
            }

            #[test]
            fn objects_close_in_any_order() {
                (1..=40).for_each(|seed| close_objects_in_any_order($profile, seed * 7919));
            }
        }
    )*};
}

on_each! {
    efa = EFA, [Immediate, Message];
    efa_direct = EFA_DIRECT, [Immediate, Message];
    efa_by_single_pieces = ProviderProfile { iov_limit: 1, ..EFA_DIRECT }, [Immediate, Message];
    cxi = CXI, [Message];
    opx = OPX, [Immediate];
    psm3 = PSM3, [Immediate, Message];
    psm3_without_data = ProviderProfile { data_size: 0, ..PSM3 }, [Message];
}

#[test]
fn psm3_offers_differ_by_immediates() {
    let (with_data, without) = (offer(&PSM3), offer(&ProviderProfile { data_size: 0, ..PSM3 }));
    assert!(with_data.is_duplicate_of(&with_data));
    assert!(!with_data.is_duplicate_of(&without));
    let facts = [without.capabilities(), with_data.capabilities()];
    let (choice, order) =
        rank(&facts, &Requirements::ring(Locality::SameMachine), &Policy::default());
    assert_eq!(choice.candidates[0].verdict, Verdict::Taken, "{choice}");
    assert_eq!(order[0], 1, "the offer with immediates comes first");
}

/// The writes of efa arrive even if the reader does not poll.
#[test]
fn efa_queues_do_not_overrun_without_a_polling_reader() {
    let mut rings = Rings::open(EFA_DIRECT, 1);
    let options = rings.options(Immediate, 0);
    let reading = rings.reader.offer(&options).unwrap();
    let ring_offer = rings.reader.ring_offer(reading).unwrap();
    let (writing, answer) = rings.writer.accept(rings.peers[0], &ring_offer, CHUNK).unwrap();
    rings.reader.connect(reading, rings.peers[1], &answer).unwrap();
    let payload = rings.source.slice(0..8).unwrap();
    for _ in 0..10_000 {
        let mut message = rings.writer.begin(writing, 0, 8).unwrap();
        let _ = rings.writer.push(writing, &mut message, &payload).unwrap();
        let _ = rings.writer.progress().unwrap();
    }
    let sent = rings.writer.sender(writing).unwrap().statistics().messages;
    assert!(sent > 5, "{sent} messages");
    let mut received = 0;
    while received < sent {
        rings.progress();
        while rings.reader.take(reading).unwrap().is_some() {
            received += 1;
        }
    }
    rings.close();
    drop(payload);
    is_clean();
}

/// One side closes a ring while the other cannot be reached: for a while, or permanently.
fn close_with_unreachable_peer(writer_ends: bool) {
    let mut rings = Rings::open(PSM3, 1);
    let options = rings.options(Immediate, 0);
    let reading = rings.reader.offer(&options).unwrap();
    let ring_offer = rings.reader.ring_offer(reading).unwrap();
    let (writing, answer) = rings.writer.accept(rings.peers[0], &ring_offer, CHUNK).unwrap();
    rings.reader.connect(reading, rings.peers[1], &answer).unwrap();
    rings.progress();
    with(|network| (network.is_disconnected, network.rejected_posts) = (true, 0));
    if writer_ends {
        rings.writer.drop_sender(writing);
    } else {
        rings.reader.close_receiver(reading).unwrap();
    }
    let end = Instant::now() + Duration::from_millis(300);
    let mut turns = 0;
    while Instant::now() < end {
        let port = if writer_ends { &mut rings.writer } else { &mut rings.reader };
        let _ = port.wait(Duration::from_secs(1)).unwrap();
        turns += 1;
    }
    let rejected_posts = with(|network| {
        network.is_disconnected = false;
        network.rejected_posts
    });
    assert!((2..=14).contains(&rejected_posts), "{rejected_posts} attempts in 300 ms");
    assert!(turns <= 40, "{turns} turns in 300 ms");
    // Afterwards the other side is notified, within the time limit of one turn.
    if writer_ends {
        while rings.reader.take(reading).is_ok() {
            rings.progress();
        }
    } else {
        while rings.writer.sender(writing).unwrap().broken().is_none() {
            rings.progress();
        }
        rings.writer.drop_sender(writing);
        while rings.reader.rings() != (0, 0) {
            rings.progress();
        }
    }
    rings.close();
    is_clean();
}

#[test]
fn end_notifications_to_unreachable_peers_back_off() {
    close_with_unreachable_peer(true);
    close_with_unreachable_peer(false);
}

/// The fakes detect misuse.
#[test]
fn fakes_detect_misuse() {
    let Pair { sides: [initiator, responder], domain } = Pair::open(EFA_DIRECT, 1);
    let mut queue = initiator.queue;
    let local = region(&domain, &initiator.endpoint, 64, Access::ALL);
    let target = region(&domain, &responder.endpoint, 64, Access::ALL);
    let (at, descriptor) = (local.as_ptr().cast::<std::ffi::c_void>(), local.local_descriptor());
    let (raw, null) = (initiator.endpoint.as_fid().cast::<sys::fid_ep>(), std::ptr::null_mut());
    let (key, to) = (target.key().unwrap(), target.as_ptr() as u64);
    let count_misuses = || with(|network| std::mem::take(&mut network.misuses).len());
    let mut scratch = sys::fi_context2::default();
    let context = (&raw mut scratch).cast();
    // SAFETY: the endpoint is open; the wrong arguments are never dereferenced.
    unsafe {
        assert!(sys::fi_write(raw, at, 64, descriptor, 5, to, key, context) < 0, "no such peer");
        assert!(sys::fi_write(raw, at, 64, null, 0, to, key, context) < 0, "no descriptor");
        assert!(sys::fi_write(raw, at, 65, descriptor, 0, to, key, context) < 0, "too long");
        let wide = 1 << 32;
        let code = sys::fi_writedata(raw, at, 8, descriptor, wide, 0, to, key, context);
        assert!(code < 0, "too wide");
        assert!(sys::fi_inject(raw, at, 33, 0) < 0, "too long to be injected");
        assert_eq!(sys::fi_close(domain.as_ptr().cast()), -sys::FI_EBUSY);
        assert_eq!(count_misuses(), 6);
        // These are detected on arrival.
        for (to, key) in [(to, key ^ 1), (to + 1, key)] {
            while sys::fi_write(raw, at, 64, descriptor, 0, to, key, context) != 0 {}
            (0..100).for_each(|_| drop(queue.poll()));
            assert_eq!(count_misuses(), 1);
        }
    }
}
