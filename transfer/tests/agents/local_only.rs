//! Local-only regions: registered once with the fabric, out of reach for peers, cached.

use std::time::{Duration, Instant};

use fabric::registrations;
use gpu::{Block, Memory};
use transfer::path::{ExportObstacle, Exportability, MemoryType, Path, Policy};
use transfer::{
    Agent, AgentOptions, Buffer, ErrorKind, HostBuffer, Region, RegionDescriptor, Rights,
};

use crate::common::{LENGTH, LeakCheck, TIMEOUT, alone, device, numbers};
use crate::fixture::{
    AgentFixture, FILL, PeerProcess, fill, metric, notice, sum, sum_of, with_rails,
};
use crate::rails::{COMPARE, WHOLE, tcp};

#[derive(Debug, PartialEq, Eq)]
struct CacheMetrics {
    hits: u64,
    misses: u64,
    evictions: u64,
    bytes: u64,
    entries: u64,
}

fn registration_cache() -> CacheMetrics {
    let metric = |name| metric(&format!("registration_cache_{name}"));
    CacheMetrics {
        hits: metric("hits_total"),
        misses: metric("misses_total"),
        evictions: metric("evictions_total"),
        bytes: metric("bytes"),
        entries: metric("entries"),
    }
}

/// tcp needs no registration of local-only memory; the option registers it nevertheless.
fn fixture(rails: usize, adjust: impl FnOnce(AgentOptions) -> AgentOptions) -> AgentFixture {
    AgentFixture::open_with(|options| {
        adjust(with_rails(options.force_remote(), tcp(), rails).always_register_local())
    })
}

fn peer_process(fixture: &mut AgentFixture) -> PeerProcess {
    fixture.peer_process(&format!("remote by {} 1: host", tcp()), &[])
}

/// Puts all bytes, and has the other side compare; then gets the other side's bytes.
fn there_and_back(
    fixture: &mut AgentFixture,
    peer_process: &PeerProcess,
    region: &Region,
    path: Path,
) {
    let policy = Policy::default();
    let peer = peer_process.peer;
    let route =
        fixture.agent.join(peer, region, &peer_process.descriptor, &policy, TIMEOUT).unwrap();
    assert_eq!(route.path(), path, "{}", route.choice());
    match region.buffer() {
        Buffer::Host(host) => host.write(0, &numbers(LENGTH, 5)).unwrap(),
        Buffer::Device(memory) => fill(memory, LENGTH, 5),
    }
    let on_arrival = Some(notice(COMPARE, sum_of(LENGTH, 5)));
    let token = fixture.agent.put(&route, &WHOLE, on_arrival).unwrap();
    fixture.agent.wait(token, TIMEOUT).unwrap();
    assert_eq!(fixture.reply(), 1, "the other side has wrong bytes");
    fixture.request(peer_process, FILL, 77);
    let token = fixture.agent.get(&route, &WHOLE, None).unwrap();
    fixture.agent.wait(token, TIMEOUT).unwrap();
    let found = match region.buffer() {
        Buffer::Host(host) => {
            let mut bytes = vec![0; LENGTH as usize];
            host.read(0, &mut bytes).unwrap();
            gpu::checksum(&bytes)
        }
        Buffer::Device(memory) => sum(memory, LENGTH),
    };
    assert_eq!(found, sum_of(LENGTH, 77));
}

#[track_caller]
fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + TIMEOUT;
    while !is_so() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn buffer_is_registered_once_for_many_regions() {
    let _alone = alone();
    let mut fixture = fixture(1, |options| options);
    let peer_process = peer_process(&mut fixture);
    let buffer = HostBuffer::new(LENGTH).unwrap();
    let (before, counts) = (registrations(), registration_cache());
    let policy = Policy::default();
    for round in 0..100 {
        let region = fixture.agent.register_local(&buffer).unwrap();
        let (peer, descriptor) = (peer_process.peer, &peer_process.descriptor);
        let route = fixture.agent.join(peer, &region, descriptor, &policy, TIMEOUT).unwrap();
        assert_eq!(route.path(), Path::FabricDirect, "{}", route.choice());
        let block = [Block { to: 4096 * round, from: 4096 * round, length: 4096 }];
        let token = fixture.agent.put(&route, &block, None).unwrap();
        fixture.agent.wait(token, TIMEOUT).unwrap();
    }
    let region = fixture.agent.register_local(&buffer).unwrap();
    there_and_back(&mut fixture, &peer_process, &region, Path::FabricDirect);
    assert_eq!(registrations() - before, 1);
    let now = registration_cache();
    assert_eq!((now.hits - counts.hits, now.misses - counts.misses), (100, 1));
    assert_eq!((now.entries, now.bytes, now.evictions), (1, LENGTH, 0));
    fixture.end(peer_process);
    // The rail's thread ends with the agent, and drops its cache.
    let AgentFixture { agent, .. } = &mut fixture;
    *agent = Agent::start(AgentOptions::new("next")).unwrap();
    assert_eq!((registration_cache().entries, registration_cache().bytes), (0, 0));
}

#[test]
fn fabric_without_registration_registers_and_caches_nothing() {
    let _alone = alone();
    let mut fixture = AgentFixture::open_remote(tcp(), 1);
    let peer_process = peer_process(&mut fixture);
    // Metrics of the whole process, in which other tests may have run before.
    let (before, counts) = (registrations(), registration_cache());
    for buffer in [
        Buffer::from(HostBuffer::new(LENGTH).unwrap()),
        device().allocate_shared(LENGTH, &[]).unwrap().into(),
    ] {
        let path = match &buffer {
            Buffer::Host(_) => Path::FabricDirect,
            Buffer::Device(_) => Path::FabricStaged,
        };
        let region = fixture.agent.register_local(buffer).unwrap();
        there_and_back(&mut fixture, &peer_process, &region, path);
    }
    assert_eq!(registrations(), before);
    assert_eq!(registration_cache(), counts);
    fixture.end(peer_process);
}

#[test]
fn regions_for_peers_are_registered_anew_each_time() {
    let _alone = alone();
    let fixture = fixture(1, |options| options);
    let buffer = HostBuffer::new(LENGTH).unwrap();
    let before = registrations();
    let own = fixture.agent.register_local(&buffer).unwrap();
    // At the same time, and one after the other.
    let both = [(); 2].map(|()| fixture.agent.register(&buffer, Rights::ALL).unwrap());
    assert_ne!(both[0].descriptor().keys, both[1].descriptor().keys);
    assert_eq!(registrations() - before, 3);
    drop(both);
    drop(fixture.agent.register(&buffer, Rights::READ).unwrap());
    drop(fixture.agent.register(&buffer, Rights::READ).unwrap());
    assert_eq!(registrations() - before, 5);
    drop(own);
    drop(fixture.agent.register_local(&buffer).unwrap());
    assert_eq!(registrations() - before, 5);
    assert_eq!(registration_cache().entries, 1);
}

/// Host memory that is registered with a device of this process only.
fn pinned() -> Memory {
    let layout = ipc::Layout::new("fabricast test", 1);
    let segment = ipc::Segment::create(layout, LENGTH as usize).unwrap();
    transfer::pin(&segment, &device()).unwrap()
}

#[test]
fn dropped_memory_is_not_kept_by_the_cache() {
    let _alone = alone();
    let evictions = registration_cache().evictions;
    // Several rails and agents do not count each other as users.
    let fixture = fixture(2, |options| options);
    let options =
        with_rails(AgentOptions::new("other").force_remote(), tcp(), 1).always_register_local();
    let other = Agent::start(options).unwrap();
    // One-time allocations of the process.
    drop(fixture.agent.register_local(pinned()).unwrap());
    wait_until("the first registration is not released", || registration_cache().entries == 0);
    let leak_check = LeakCheck::begin(&device());
    let make: [fn() -> Buffer; 2] =
        [|| HostBuffer::new(LENGTH).unwrap().into(), || pinned().into()];
    for make in make {
        let buffer = make();
        let before = registrations();
        for _ in 0..10 {
            for agent in [&fixture.agent, &other] {
                assert_eq!(agent.register_local(buffer.clone()).unwrap().buffer().length(), LENGTH);
            }
        }
        assert_eq!(registrations() - before, 3, "not one for each rail");
        // A handle keeps it registered.
        std::thread::sleep(Duration::from_millis(200));
        assert_eq!(registration_cache().entries, 3);
        let region = other.register_local(buffer).unwrap();
        std::thread::sleep(Duration::from_millis(200));
        assert_eq!((registrations() - before, registration_cache().entries), (3, 3));
        drop(region);
        wait_until("a registration is not released", || registration_cache().entries == 0);
        leak_check.compare(&device());
    }
    assert_eq!(registration_cache().evictions, evictions);
}

#[test]
fn cache_is_limited_and_registrations_in_use_stay() {
    let _alone = alone();
    let fixture = fixture(1, |options| options.registration_cache_limits(2 * LENGTH, 10));
    let buffers = [(); 3].map(|()| HostBuffer::new(LENGTH).unwrap());
    let (before, old) = (registrations(), registration_cache());
    let first = fixture.agent.register_local(&buffers[0]).unwrap();
    for _ in 0..10 {
        for buffer in &buffers[1..] {
            drop(fixture.agent.register_local(buffer).unwrap());
            assert!(registration_cache().bytes <= 2 * LENGTH);
        }
    }
    // The rail learns later that a region was dropped, so the evicted entry is up to chance; but
    // the first is in use.
    let counts = registration_cache();
    assert!(counts.evictions > old.evictions, "{counts:?}");
    assert_eq!(registrations() - before, counts.misses - old.misses);
    let now = registrations();
    drop(fixture.agent.register_local(&buffers[0]).unwrap());
    assert_eq!(registrations(), now, "a registration in use was evicted");
    drop(first);
    // The cache is full of registrations in use: further ones are not cached, but work.
    let regions = [0, 1, 2, 2].map(|at| fixture.agent.register_local(&buffers[at]).unwrap());
    assert_eq!(registration_cache().entries, 2);
    drop(regions);
    let none = AgentFixture::open_with(|options| {
        with_rails(options.force_remote(), tcp(), 1)
            .always_register_local()
            .registration_cache_limits(0, 0)
    });
    let now = registrations();
    for _ in 0..3 {
        drop(none.agent.register_local(&buffers[0]).unwrap());
    }
    assert_eq!(registrations() - now, 3);
}

#[test]
fn least_recently_used_registration_is_evicted() {
    let _alone = alone();
    let fixture = fixture(1, |options| options.registration_cache_limits(2 * LENGTH, 10));
    let buffers = [(); 3].map(|()| HostBuffer::new(LENGTH).unwrap());
    for at in [0, 1, 0, 2] {
        drop(fixture.agent.register_local(&buffers[at]).unwrap());
    }
    let before = registration_cache();
    drop(fixture.agent.register_local(&buffers[0]).unwrap());
    assert_eq!(registration_cache().hits, before.hits + 1, "the first was evicted");
    drop(fixture.agent.register_local(&buffers[1]).unwrap());
    assert_eq!(registration_cache().misses, before.misses + 1);
}

#[test]
fn peers_cannot_reach_local_only_regions() {
    let _alone = alone();
    let options = |label| AgentOptions::new(label);
    let remote =
        |label| with_rails(options(label).force_remote(), tcp(), 1).always_register_local();
    let pairs = [
        [options("target"), options("initiator")],
        [remote("remote target"), remote("remote initiator")],
    ];
    for [target, initiator] in pairs {
        let (target, mut initiator) =
            (Agent::start(target).unwrap(), Agent::start(initiator).unwrap());
        let peer = initiator.connect(&target.card().encode().unwrap(), TIMEOUT).unwrap();
        let local = initiator.register_local(HostBuffer::new(LENGTH).unwrap()).unwrap();
        let own = target.register_local(HostBuffer::new(LENGTH).unwrap()).unwrap();
        assert_eq!(own.descriptor().rights, Rights { read: false, write: false });
        let descriptor = own.descriptor();
        assert!(
            descriptor.keys.is_empty() && descriptor.legacy.is_none() && descriptor.pieces == 0
        );
        assert_eq!(descriptor.encode().unwrap_err().kind(), ErrorKind::NotAllowed);
        // False claims are refused.
        let memory_type = MemoryType::Host(Exportability::Not(ExportObstacle::PrivateHostMemory));
        let false_descriptor =
            RegionDescriptor { rights: Rights::ALL, memory_type, ..descriptor.clone() };
        let bytes = false_descriptor.encode().unwrap();
        let joined = initiator.join(peer, &local, &bytes, &Policy::default(), TIMEOUT);
        assert_eq!(joined.unwrap_err().kind(), ErrorKind::Stale);
    }
}

#[test]
fn local_only_region_is_withdrawn_and_shares_memory() {
    let _alone = alone();
    let mut fixture = fixture(1, |options| options);
    let mut initiator = Agent::start(AgentOptions::new("initiator")).unwrap();
    let peer = initiator.connect(&fixture.agent.card().encode().unwrap(), TIMEOUT).unwrap();
    let descriptor = fixture.region.descriptor().encode().unwrap();
    let memory = device().allocate(LENGTH).unwrap();
    fill(&memory, LENGTH, 9);
    let own = initiator.register_local(&memory).unwrap();
    let route = initiator.join(peer, &own, &descriptor, &Policy::default(), TIMEOUT).unwrap();
    assert_eq!(route.path(), Path::SameProcess);
    let token = initiator.put(&route, &WHOLE, None).unwrap();
    initiator.wait(token, TIMEOUT).unwrap();
    assert_eq!(sum(&fixture.memory, LENGTH), sum_of(LENGTH, 9));
    initiator.withdraw(&own, TIMEOUT).unwrap();
    let own = fixture.agent.register_local(HostBuffer::new(LENGTH).unwrap()).unwrap();
    fixture.agent.withdraw(&own, TIMEOUT).unwrap();
    // Its number is unique.
    let other = fixture.agent.register(&fixture.memory, Rights::ALL).unwrap();
    assert!(other.descriptor().number > own.descriptor().number);
}
