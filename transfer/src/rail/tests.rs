//! A target and initiators that violate the protocol, over the loopback interface without threads.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use fabric::{Caps, Domain, EndpointKind, Query};
use gpu::Device;
use gpu::emulated::{FaultConfig, configure_faults, refuse_records};
use threads::lock;

use super::driver::Driver;
use super::message::{Frame, Message};
use super::session::SessionKey;
use super::staging::{SLOT_COUNT, SLOT_LENGTH};
use super::target::MAX_INITIATORS;
use super::{Chunk, LinkTarget, RAIL_TIMEOUT, RailEvent, RailOptions, RailShared};
use crate::admission::Admission;
use crate::agent::LocalTarget;
use crate::error::{ErrorKind, Result};
use crate::host_buffer::HostBuffer;
use crate::notice::Notice;
use crate::refusal::Refusal;
use crate::region::{Region, RegionDescriptor, Rights};

const SESSION: u64 = 7;

struct World {
    driver: Driver,
    shared: Arc<RailShared>,
    local_target: Arc<LocalTarget>,
}

impl World {
    fn new() -> Self {
        let query = Query::new(EndpointKind::Rdm).caps(Caps::MESSAGE | Caps::RMA);
        let query = query.source("127.0.0.1");
        let offer = query.clone().provider("tcp").first();
        let offer = offer.or_else(|_| query.provider("net").first()).unwrap();
        let domain = Domain::open(&offer).unwrap();
        let local_target =
            Arc::new(LocalTarget::new("target".to_owned(), Admission::own_user()).unwrap());
        let settings = RailOptions::default();
        let shared = Arc::new(RailShared::new(0, &settings, domain.capabilities()));
        let driver =
            Driver::new(&domain, Arc::clone(&shared), local_target.clone(), settings, channel().1)
                .unwrap();
        Self { driver, shared, local_target }
    }

    fn hello(&mut self, session: u64, to: [u8; 16]) {
        let address = self.driver.address().to_vec();
        let label = "initiator".to_owned();
        let (from, connection_id) = ([9; 16], session);
        let hello = Message::Hello { to, from, connection_id, label, address };
        self.driver.handle_at_target(session, hello);
    }

    /// The initiator opens a region with its ticket.
    fn opens(&mut self, session: u64, region: &Region) {
        let RegionDescriptor { number: region, ticket, .. } = *region.descriptor();
        self.driver.handle_at_target(session, Message::Open { request: 1, region, ticket });
    }

    fn with_initiator() -> Self {
        let mut world = Self::new();
        world.hello(SESSION, world.local_target.identity);
        let region = world.region(Rights::ALL);
        world.opens(SESSION, &region);
        world.driver.handle_at_target(SESSION, Message::RequestStaging { request: 1 });
        assert!(world.has_initiator());
        let region = region.descriptor().number;
        world.driver.handle_at_target(SESSION, Message::Released { region });
        world
    }

    fn connect(&mut self, link: u32) {
        let (identity, address) = (self.local_target.identity, self.driver.address().to_vec());
        self.driver.connect(link, LinkTarget { identity, address, connection_id: 5 }, RAIL_TIMEOUT);
    }

    /// Pending requests of link 3.
    fn pending_opens(&self) -> Vec<u64> {
        let mut pending_opens = self.driver.initiator().pending_opens(3);
        pending_opens.sort_unstable();
        pending_opens
    }

    fn has_initiator(&self) -> bool {
        self.driver.target().has_session(SESSION)
    }

    /// The region is released on another thread.
    fn wait_until_released(&self, region: u64) {
        let end = Instant::now() + RAIL_TIMEOUT;
        while lock(&self.shared.retiring).contains_key(&region) {
            assert!(Instant::now() < end, "the region is not released");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn region(&self, rights: Rights) -> Region {
        self.local_target
            .register(HostBuffer::new(2 * SLOT_LENGTH).unwrap().into(), rights)
            .unwrap()
    }

    fn refusal(&mut self, chunk: Chunk, is_drain: bool) -> Option<ErrorKind> {
        let started = self.driver.begin_staging_job(SESSION, chunk, is_drain);
        started.err().map(|error| error.kind())
    }
}

fn chunk(region: &Region) -> Chunk {
    let (region, ticket) = (region.descriptor().number, region.descriptor().ticket);
    Chunk { number: 5, region, ticket, slot: 0, offset: 0, length: 100 }
}

#[test]
fn hello_for_another_agent_is_refused() {
    let mut world = World::new();
    world.hello(SESSION, [1; 16]);
    assert!(!world.has_initiator());
    world.hello(SESSION, world.local_target.identity);
    world.hello(SESSION, world.local_target.identity);
    assert!(world.has_initiator());
    for _ in 0..2 {
        world.driver.receive(frame(0, 0, Message::Pong));
    }
    let events = lock(&world.shared.rail_events);
    let opened = events.iter().filter(|report| matches!(report, RailEvent::SessionOpened { .. }));
    assert_eq!(opened.count(), 1, "opened more than once");
}

#[test]
fn hello_with_an_invalid_address_is_ignored() {
    let mut world = World::new();
    for address in [vec![], vec![0], vec![0xff; 512]] {
        let (to, label) = (world.local_target.identity, "initiator".to_owned());
        let (from, connection_id) = ([9; 16], 1);
        let hello = Message::Hello { to, from, connection_id, label, address };
        // The provider may accept an unreachable address.
        world.driver.handle_at_target(SESSION, hello);
    }
    world.driver.handle_at_target(99, Message::RequestStaging { request: 1 });
    assert!(!world.driver.target().has_session(99), "message without a hello");
}

#[test]
fn chunks_beyond_region_or_slot_are_refused() {
    let mut world = World::with_initiator();
    let region = world.region(Rights::ALL);
    let good = chunk(&region);
    for is_drain in [true, false] {
        assert_eq!(world.refusal(good, is_drain), None);
        let refused = |world: &mut World, chunk| world.refusal(chunk, is_drain).unwrap();
        let invalid = [
            Chunk { slot: SLOT_COUNT, ..good },
            Chunk { slot: u32::MAX, ..good },
            Chunk { length: SLOT_LENGTH + 1, ..good },
            Chunk { length: u64::MAX, ..good },
            Chunk { offset: 2 * SLOT_LENGTH - 99, ..good },
            Chunk { offset: u64::MAX, ..good },
        ];
        for chunk in invalid {
            assert_eq!(refused(&mut world, chunk), ErrorKind::OutOfBounds, "{chunk:?}");
        }
        let stale = Chunk { ticket: good.ticket ^ 1, ..good };
        assert_eq!(refused(&mut world, stale), ErrorKind::Stale);
        let stale = Chunk { region: good.region + 1, ..good };
        assert_eq!(refused(&mut world, stale), ErrorKind::Stale);
    }
    let read_only = chunk(&world.region(Rights::READ));
    // The handle of that region was dropped.
    assert_eq!(world.refusal(read_only, true), Some(ErrorKind::Stale));
    let region = world.region(Rights::READ);
    assert_eq!(world.refusal(chunk(&region), true), Some(ErrorKind::NotAllowed));
    assert_eq!(world.refusal(chunk(&region), false), None);
    let region = world.region(Rights::WRITE);
    assert_eq!(world.refusal(chunk(&region), false), Some(ErrorKind::NotAllowed));
}

/// Hellos for another agent are answered as long as there is room.
#[test]
fn hellos_for_another_agent_use_few_addresses() {
    let mut world = World::new();
    for number in 0..200_u16 {
        let address =
            std::net::SocketAddrV4::new([127, 1, (number >> 8) as u8, number as u8].into(), 9);
        let mut bytes = world.driver.address().to_vec();
        // A `sockaddr_in` starts with family and port.
        bytes[4..8].copy_from_slice(&address.ip().octets());
        let (to, label, from, connection_id) = ([1; 16], "initiator".to_owned(), [9; 16], 1);
        let hello = Message::Hello { to, from, connection_id, label, address: bytes };
        world.driver.handle_at_target(1000 + u64::from(number), hello);
    }
    assert!(world.driver.target().count() == 0);
    let known_peers = world.driver.known_peers();
    assert!(known_peers <= 32, "{known_peers} addresses");
}

#[test]
fn initiator_without_staging_memory_or_slots_is_refused() {
    let mut world = World::new();
    world.hello(SESSION, world.local_target.identity);
    let region = world.region(Rights::ALL);
    assert_eq!(world.refusal(chunk(&region), true), Some(ErrorKind::NoPath));
    // It gets none before it has opened a region.
    world.driver.handle_at_target(SESSION, Message::RequestStaging { request: 1 });
    assert_eq!(world.refusal(chunk(&region), true), Some(ErrorKind::NoPath));
    world.opens(SESSION, &region);
    world.driver.handle_at_target(SESSION, Message::RequestStaging { request: 1 });
    let device = Device::open("emulated:0".parse().unwrap()).unwrap();
    let memory = device.allocate_shared(2 * SLOT_LENGTH, &[]).unwrap();
    let region = world.local_target.register(memory.into(), Rights::ALL).unwrap();
    let outcomes: Vec<_> = (0..100).map(|_| world.refusal(chunk(&region), true)).collect();
    assert_eq!(outcomes[0], None);
    assert_eq!(outcomes[99], Some(ErrorKind::TooMany));
}

/// The copy is in flight, although the driver refused to record its event.
#[test]
fn region_is_kept_until_a_copy_without_event_is_done() {
    let _alone = crate::stream_copies::tests::alone();
    let mut world = World::new();
    world.hello(SESSION, world.local_target.identity);
    let device = Device::open("emulated:1".parse().unwrap()).unwrap();
    let memory = device.allocate_shared(2 * SLOT_LENGTH, &[]).unwrap();
    let region = world.local_target.register(memory.into(), Rights::ALL).unwrap();
    let number = region.descriptor().number;
    world.opens(SESSION, &region);
    world.driver.handle_at_target(SESSION, Message::RequestStaging { request: 1 });
    let delay = Duration::from_millis(200);
    configure_faults(1, FaultConfig { delay, ..FaultConfig::default() });
    refuse_records(1, true);
    let start = Instant::now();
    assert_eq!(world.refusal(chunk(&region), true), None);
    refuse_records(1, false);
    world.driver.handle_at_target(SESSION, Message::Released { region: number });
    world.driver.retire(number, None, region.buffer().clone());
    while lock(&world.shared.retiring).contains_key(&number) {
        assert!(start.elapsed() < RAIL_TIMEOUT, "the region is not released");
        world.driver.poll_once();
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(start.elapsed() >= delay, "released after {:?}", start.elapsed());
    // The initiator gets an error, and may reuse its slot then.
    assert!(!world.driver.target().has_staging_jobs() && world.has_initiator());
}

/// Identities of agents are public: any process can send a hello.
#[test]
fn initiators_without_regions_are_evicted() {
    let mut world = World::new();
    let region = world.region(Rights::ALL);
    world.hello(SESSION, world.local_target.identity);
    world.opens(SESSION, &region);
    world.driver.receive(frame(0, 0, Message::Pong));
    let mut address = world.driver.address().to_vec();
    for number in 0..MAX_INITIATORS as u16 + 20 {
        // Unused addresses. A `sockaddr_in` starts with family and port.
        address[4..8].copy_from_slice(&[127, 1, (number >> 8) as u8, number as u8]);
        let mut from = [3; 16];
        from[..2].copy_from_slice(&number.to_le_bytes());
        let (to, label, connection_id) = (world.local_target.identity, "unknown".to_owned(), 1);
        let hello = Message::Hello { to, from, connection_id, label, address: address.clone() };
        world.driver.handle_at_target(1000 + u64::from(number), hello);
    }
    assert_eq!(world.driver.target().count(), MAX_INITIATORS);
    assert!(world.has_initiator(), "it has opened a region");
    // A legitimate initiator is served.
    world.hello(9000, world.local_target.identity);
    world.opens(9000, &region);
    world.driver.handle_at_target(9000, Message::RequestStaging { request: 2 });
    assert!(world.driver.target().has_staging(9000));
    // An agent gets memory for a few sessions only.
    for session in 9001..9030 {
        world.hello(session, world.local_target.identity);
        world.opens(session, &region);
        world.driver.handle_at_target(session, Message::RequestStaging { request: 2 });
    }
    assert_eq!(world.driver.target().staging_count(), 8);
}

#[test]
fn notices_beyond_the_credit_end_the_session() {
    let notice = Notice::new(1, b"").unwrap();
    let mut world = World::with_initiator();
    for _ in 0..64 {
        world.driver.handle_at_target(SESSION, Message::Notice(notice.clone()));
    }
    assert!(world.has_initiator());
    assert_eq!(world.tags().len(), 64);
    // The agent took one notice, so there is credit for another one.
    world.driver.notices_taken(SESSION, 1);
    world.driver.handle_at_target(SESSION, Message::Notice(notice.clone()));
    assert!(world.has_initiator());
    world.driver.handle_at_target(SESSION, Message::Notice(notice));
    assert!(!world.has_initiator(), "more notices than credit");
}

#[test]
fn region_is_released_when_its_initiators_confirm_or_are_lost() {
    let mut world = World::with_initiator();
    let region = world.region(Rights::ALL);
    let (number, ticket) = (region.descriptor().number, region.descriptor().ticket);
    world.driver.handle_at_target(SESSION, Message::Open { request: 2, region: number, ticket });
    world.driver.retire(number, None, region.buffer().clone());
    assert_eq!(lock(&world.shared.retiring).get(&number).unwrap(), &["initiator".to_owned()]);
    world.driver.handle_at_target(SESSION, Message::Released { region: number + 1 });
    assert!(lock(&world.shared.retiring).contains_key(&number));
    world.driver.handle_at_target(SESSION, Message::Released { region: number });
    world.wait_until_released(number);
    let other = world.region(Rights::ALL);
    let (number, ticket) = (other.descriptor().number, other.descriptor().ticket);
    world.driver.handle_at_target(SESSION, Message::Open { request: 3, region: number, ticket });
    world.driver.retire(number, None, other.buffer().clone());
    assert!(lock(&world.shared.retiring).contains_key(&number));
    world.driver.close_lost(SessionKey::Initiator(SESSION), "it does not answer");
    world.wait_until_released(number);
}

#[test]
fn messages_without_a_link_are_ignored() {
    let mut world = World::new();
    let refusal = Refusal::new(ErrorKind::Denied, "");
    let all = [
        Message::Welcome { credit_limit: 1 },
        Message::Opened { request: 1 },
        Message::Staging { request: 1, slots: 1, slot_length: 1, memory: vec![1; 90] },
        Message::Refused { request: 0, refusal },
        Message::Done { number: 1, refusal: None },
        Message::NoticeCredit { notices: 5, credit_limit: 9 },
        Message::Withdrawn { region: 1 },
    ];
    for message in all {
        world.driver.handle_at_initiator(SESSION, message);
    }
    assert!(lock(&world.shared.rail_events).is_empty());
}

/// Killed initiators leave slots that they may still write to. Their number is bounded, and the
/// next initiator is served.
#[test]
fn staging_memory_is_granted_after_many_lost_initiators() {
    let mut world = World::new();
    let region = world.region(Rights::ALL);
    let (number, ticket) = (region.descriptor().number, region.descriptor().ticket);
    for session in 0..300 {
        world.hello(session, world.local_target.identity);
        world
            .driver
            .handle_at_target(session, Message::Open { request: 1, region: number, ticket });
        world.driver.handle_at_target(session, Message::RequestStaging { request: 2 });
        assert!(world.driver.target().has_staging(session), "initiator {session}");
        world.driver.close_lost(SessionKey::Initiator(session), "it does not answer");
    }
    let (count, before) = world.driver.target().quarantined_slots();
    assert!(count <= 128);
    // Memory that a lost initiator may write to is kept after a withdrawal, which does not wait.
    world.driver.retire(number, None, region.buffer().clone());
    world.wait_until_released(number);
    assert_eq!(world.driver.target().quarantined_region(number).unwrap().0, before);
}

/// All memory that a lost initiator may write to is kept until it is unlikely to reconnect, whether
/// withdrawn before or after the loss.
#[test]
fn quarantined_regions_are_kept_in_any_number() {
    let mut world = World::with_initiator();
    let buffer = HostBuffer::new(4096).unwrap();
    let region = || world.local_target.register(buffer.clone().into(), Rights::ALL).unwrap();
    let regions: Vec<_> = (0..400).map(|_| region()).collect();
    for region in &regions {
        let (region, ticket) = (region.descriptor().number, region.descriptor().ticket);
        world.driver.handle_at_target(SESSION, Message::Open { request: 2, region, ticket });
    }
    let retire = |world: &mut World, regions: &[Region]| {
        for region in regions {
            let number = region.descriptor().number;
            world.driver.retire(number, None, region.buffer().clone());
        }
    };
    retire(&mut world, &regions[..200]);
    world.driver.close_lost(SessionKey::Initiator(SESSION), "it does not answer");
    retire(&mut world, &regions[200..]);
    let is_kept = |world: &World, region: &Region| {
        let region = world.driver.target().quarantined_region(region.descriptor().number);
        region.is_some_and(|(_, is_withdrawn)| is_withdrawn)
    };
    assert!(regions.iter().all(|region| is_kept(&world, region)));
    let now = Instant::now();
    world.driver.check_initiators(now + Duration::from_secs(50));
    assert!(regions.iter().all(|region| is_kept(&world, region)));
    world.driver.check_initiators(now + Duration::from_secs(61));
    assert_eq!(world.driver.target().quarantined_regions(), 0);
    regions.iter().for_each(|region| world.wait_until_released(region.descriptor().number));
}

/// A withdrawal may arrive before the reply to the request.
#[test]
fn region_may_be_withdrawn_before_it_is_open() {
    let mut world = World::new();
    world.connect(3);
    let session = world.driver.initiator().session_id(3).unwrap();
    let welcome = Message::Welcome { credit_limit: 1 };
    world.driver.handle_at_initiator(session, welcome);
    world.driver.open(3, (77, 5), false);
    let request = world.pending_opens()[0];
    lock(&world.shared.rail_events).clear();
    world.driver.handle_at_initiator(session, Message::Withdrawn { region: 78 });
    world.driver.handle_at_initiator(session, Message::Withdrawn { region: 77 });
    world.driver.handle_at_initiator(session, Message::Opened { request });
    let reported = std::mem::take(&mut *lock(&world.shared.rail_events));
    assert_eq!(reported.len(), 2, "the other region was not requested");
    assert!(matches!(reported[0], RailEvent::Withdrawn { region: 77, .. }));
    let is_stale = |outcome: &Result<()>| outcome.as_ref().unwrap_err().kind() == ErrorKind::Stale;
    assert!(matches!(&reported[1], RailEvent::Opened { outcome, .. } if is_stale(outcome)));
    let remaining = world.driver.initiator().withdrawn_and_wanted(3);
    assert_eq!(remaining, (0, 0), "state of the region remains");
}

fn frame(number: u64, acknowledged: u64, message: Message) -> Frame {
    Frame { session: SESSION, number, acknowledged, message }
}

impl World {
    /// Tags of the notices that were reported to the agent.
    fn tags(&self) -> Vec<u64> {
        let rail_events = lock(&self.shared.rail_events);
        let notices = rail_events.iter().filter_map(|report| match report {
            RailEvent::Notice { notice, .. } => Some(notice.tag),
            _ => None,
        });
        notices.collect()
    }
}

#[test]
fn duplicates_are_dropped_and_early_messages_wait() {
    let mut world = World::with_initiator();
    let notice = |number: u64| {
        let notice = Notice::new(10 + number, b"").unwrap();
        frame(1 + number, 0, Message::Notice(notice))
    };
    for number in [1, 0, 0, 1, 3, 1] {
        world.driver.receive(notice(number));
    }
    assert_eq!(world.tags(), [10, 11]);
    world.driver.receive(notice(2));
    assert_eq!(world.tags(), [10, 11, 12, 13]);
    assert!(world.has_initiator());
}

#[test]
fn invalid_message_numbers_end_the_session() {
    let ping = |acknowledged| frame(0, acknowledged, Message::Ping);
    let released = |number| frame(number, 0, Message::Released { region: 1 });
    for invalid in [ping(u64::MAX), ping(1000), released(u64::MAX), released(1000)] {
        let mut world = World::with_initiator();
        world.driver.receive(ping(0));
        assert!(world.has_initiator());
        world.driver.receive(invalid);
        assert!(!world.has_initiator());
    }
}

#[test]
fn repeated_hello_is_answered_and_reported_once() {
    let mut world = World::new();
    let hello = |world: &World, session, connection_id| {
        let (to, address) = (world.local_target.identity, world.driver.address().to_vec());
        let (from, label) = ([9; 16], "initiator".to_owned());
        let message = Message::Hello { to, from, connection_id, label, address };
        Frame { session, number: 0, acknowledged: 0, message }
    };
    let count = |world: &World| {
        let rail_events = lock(&world.shared.rail_events);
        let opened = rail_events
            .iter()
            .filter(|report| matches!(report, RailEvent::SessionOpened { .. }))
            .count();
        let closed = rail_events
            .iter()
            .filter(|report| matches!(report, RailEvent::SessionClosed { .. }))
            .count();
        (opened, closed, world.driver.target().count())
    };
    let pong = |session| Frame { session, ..frame(0, 0, Message::Pong) };
    for _ in 0..3 {
        world.driver.receive(hello(&world, SESSION, 5));
        assert_eq!(count(&world), (0, 0, 1));
    }
    world.driver.receive(pong(SESSION));
    world.driver.receive(hello(&world, SESSION, 5));
    assert_eq!(count(&world), (1, 0, 1));
    // A rail that reconnects has a new session, and may need several attempts.
    for session in [8, 9, 10] {
        world.driver.receive(hello(&world, session, 5));
        assert_eq!(count(&world), (1, 0, 2));
    }
    world.driver.receive(pong(9));
    assert_eq!(count(&world), (1, 0, 2), "that session is closed");
    world.driver.receive(pong(10));
    assert_eq!(count(&world), (2, 1, 1));
    // Another connection is independent. Unconfirmed sessions do not leave.
    world.driver.receive(hello(&world, 11, 6));
    world.driver.close_lost(SessionKey::Initiator(11), "it does not answer");
    assert_eq!(count(&world), (2, 1, 1));
}

/// A lost link is retried, and its regions are opened again; it is up when all are open.
#[test]
fn lost_target_is_reconnected_and_its_regions_reopened() {
    let mut world = World::new();
    world.connect(3);
    let rail_events = |world: &World| std::mem::take(&mut *lock(&world.shared.rail_events));
    let welcome = |world: &mut World| {
        let session = world.driver.initiator().session_id(3).unwrap();
        let welcome = Message::Welcome { credit_limit: 1 };
        world.driver.handle_at_initiator(session, welcome);
        session
    };
    let first = welcome(&mut world);
    assert!(matches!(rail_events(&world).pop_back(), Some(RailEvent::Up { link: 3 })));
    world.driver.open(3, (77, 5), false);
    world.driver.open(3, (78, 5), false);
    for request in world.pending_opens() {
        world.driver.handle_at_initiator(first, Message::Opened { request });
    }
    assert_eq!(rail_events(&world).len(), 2);
    world.driver.close_lost(SessionKey::Link(3), "it does not answer");
    assert!(matches!(rail_events(&world).pop_back(), Some(RailEvent::Down { link: 3, .. })));
    let now = Instant::now();
    world.driver.check_links(now);
    assert!(world.driver.initiator().session_id(3).is_none(), "reconnected without a pause");
    world.driver.check_links(now + Duration::from_secs(1));
    // Failed attempts are not reported.
    world.driver.close_lost(SessionKey::Link(3), "it does not answer");
    assert!(rail_events(&world).is_empty());
    world.driver.check_links(now + Duration::from_secs(9));
    let second = welcome(&mut world);
    assert_ne!(first, second);
    let pending_opens = world.pending_opens();
    assert_eq!(pending_opens.len(), 2);
    world.driver.handle_at_initiator(first, Message::Opened { request: pending_opens[0] });
    assert!(rail_events(&world).is_empty(), "the session is closed");
    world.driver.handle_at_initiator(second, Message::Opened { request: pending_opens[0] });
    let refusal = Refusal::new(ErrorKind::Stale, "it was withdrawn");
    world
        .driver
        .handle_at_initiator(second, Message::Refused { request: pending_opens[1], refusal });
    let reported = rail_events(&world);
    assert!(matches!(reported[0], RailEvent::Opened { outcome: Ok(()), .. }));
    assert!(matches!(reported[1], RailEvent::Withdrawn { .. }));
    assert!(matches!(reported[2], RailEvent::Opened { outcome: Err(_), .. }));
    assert!(matches!(reported[3], RailEvent::Up { link: 3 }));
}
