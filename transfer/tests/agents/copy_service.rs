//! The copy service in a process of its own, between an agent and the agents of other processes.

use std::path::Path as FilePath;
use std::time::{Duration, Instant};

use gpu::{Block, emulated};
use transfer::path::{Path, Policy};
use transfer::{
    Admission, Agent, AgentOptions, Buffer, CopyService, ErrorKind, HostBuffer, Notice, Rights,
    Route, Strided, Token,
};

use crate::common::{ChildProcess, LENGTH, TIMEOUT, alone, device, numbers, start};
use crate::fixture::{
    AgentFixture, DROP_AGENT, FILL, PeerProcess, SUM, WITHDRAW, blocks_of, fill, other_device,
    read, sum, sum_of, write,
};

const WHOLE: [Block; 1] = [Block { to: 0, from: 0, length: LENGTH }];

/// The process of a service: until it is killed, or a file appears.
pub fn serve(directory: &FilePath) {
    let end = Instant::now() + TIMEOUT;
    let service = loop {
        match CopyService::start(directory, Admission::own_user()) {
            Ok(service) => break service,
            Err(error) => assert!(Instant::now() < end, "{error}"),
        }
    };
    write(&directory.join("serves"), b"");
    read_for_long(&directory.join("stop"));
    drop(service);
    write(&directory.join("stopped"), b"");
}

fn read_for_long(path: &FilePath) {
    while !path.exists() {
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn start_service(directory: &FilePath) -> ChildProcess {
    let _ = std::fs::remove_file(directory.join("serves"));
    let service = start("copy service", directory, &[], None);
    read(&directory.join("serves"));
    service
}

fn by_service() -> Policy {
    "=service-copied".parse().unwrap()
}

fn join_by_service(fixture: &mut AgentFixture, peer: &PeerProcess) -> Route {
    let descriptor = &peer.descriptor;
    let joined = fixture.agent.join(peer.peer, &fixture.region, descriptor, &by_service(), TIMEOUT);
    let route = joined.unwrap();
    assert_eq!(route.path(), Path::ServiceCopied, "{}", route.choice());
    route
}

fn exchange(fixture: &mut AgentFixture, peer: &PeerProcess, route: &Route, first: u64) {
    fill(&fixture.memory, LENGTH, first);
    let token = fixture.agent.put(route, &WHOLE, None).unwrap();
    fixture.agent.wait(token, TIMEOUT).unwrap();
    assert_eq!(fixture.request(peer, SUM, 0), sum_of(LENGTH, first));
    fixture.request(peer, FILL, first + 1);
    let token = fixture.agent.get(route, &WHOLE, None).unwrap();
    fixture.agent.wait(token, TIMEOUT).unwrap();
    assert_eq!(sum(&fixture.memory, LENGTH), sum_of(LENGTH, first + 1));
}

/// As in pods that have one GPU each: this process can map no memory of the other device.
#[test]
fn service_copies_where_no_memory_can_be_mapped() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    if device().name().implementation != gpu::Implementation::Emulated {
        testkit::skip!("only emulated devices can be hidden");
    }
    let _service = start_service(&fixture.directory.clone());
    let peer = fixture.peer_process("shared", &[]);
    emulated::hide_device(1, true);
    emulated::configure_faults(0, emulated::FaultConfig { are_peers: false, ..Default::default() });
    let route = fixture.join(&peer);
    assert_eq!(route.path(), Path::ServiceCopied, "{}", route.choice());
    assert_eq!(route.fallback(), Some("mapping-refused"));
    exchange(&mut fixture, &peer, &route, 5);
    emulated::hide_device(1, false);
    fixture.end(peer);
}

#[test]
fn service_copies_every_kind_of_exportable_memory() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let _service = start_service(&fixture.directory.clone());
    let is_emulated = device().name().implementation == gpu::Implementation::Emulated;
    // Other libraries are emulated on emulated devices only, which have no legacy handles.
    let more: &[&str] = if is_emulated { &["pieces", "long-pieces"] } else { &["plain"] };
    for role in ["shared", "host"].iter().chain(more) {
        let peer = fixture.peer_process(role, &[]);
        let route = join_by_service(&mut fixture, &peer);
        exchange(&mut fixture, &peer, &route, 7);
        // Local-only memory, and host memory in a segment.
        let host = HostBuffer::new(LENGTH).unwrap();
        let memory = device().allocate_shared(LENGTH, &[]).unwrap();
        let regions = [
            fixture.agent.register_local(&memory).unwrap(),
            fixture.agent.register_local(&host).unwrap(),
        ];
        fixture.request(&peer, FILL, 9);
        for region in &regions {
            let (descriptor, policy) = (&peer.descriptor, by_service());
            let joined = fixture.agent.join(peer.peer, region, descriptor, &policy, TIMEOUT);
            let route = match (joined, *role, region.buffer()) {
                (Err(error), "host", Buffer::Host(_)) => {
                    // No device takes part: the CPU copies.
                    assert_eq!(error.kind(), ErrorKind::NoPath);
                    continue;
                }
                (joined, ..) => joined.unwrap(),
            };
            let token = fixture.agent.get(&route, &WHOLE, None).unwrap();
            fixture.agent.wait(token, TIMEOUT).unwrap();
            let found = match region.buffer() {
                Buffer::Device(memory) => sum(memory, LENGTH),
                Buffer::Host(host) => {
                    let mut bytes = vec![0; LENGTH as usize];
                    host.read(0, &mut bytes).unwrap();
                    gpu::checksum(&bytes)
                }
            };
            assert_eq!(found, sum_of(LENGTH, 9), "{role}");
        }
        fixture.end(peer);
    }
}

#[test]
fn service_copies_blocks_and_rows_of_all_sizes() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let _service = start_service(&fixture.directory.clone());
    let peer = fixture.peer_process("shared", &[]);
    let route = join_by_service(&mut fixture, &peer);
    // The shortest are more blocks than the shared memory of a client holds at a time.
    for (number, length) in [64, 4096, 45 << 10, 1 << 20, LENGTH].into_iter().enumerate() {
        fill(&fixture.memory, LENGTH, number as u64);
        let notice = Notice::new(1 << 20, &sum_of(LENGTH, number as u64).to_le_bytes()).unwrap();
        let token = fixture.agent.put(&route, &blocks_of(length), Some(notice)).unwrap();
        fixture.agent.wait(token, TIMEOUT).unwrap();
        // The peer found its memory as announced when the notice arrived.
        assert_eq!(fixture.reply(), 1, "blocks of {length}");
    }
    // Many transfers in flight, one byte each.
    let expected = numbers(LENGTH, 11);
    fixture.request(&peer, FILL, 11);
    fill(&fixture.memory, LENGTH, 0);
    let tokens: Vec<_> = (0..2000)
        .map(|at| {
            let block = [Block { to: at, from: at, length: 1 }];
            fixture.agent.get(&route, &block, None).unwrap()
        })
        .collect();
    for token in tokens {
        fixture.agent.wait(token, TIMEOUT).unwrap();
    }
    let mut found = vec![0; 2000];
    let stream = device().stream().unwrap();
    let part = fixture.memory.slice(0, 2000).unwrap();
    stream.download(&part, &mut found, TIMEOUT).unwrap();
    assert_eq!(found, expected[..2000]);
    let rows = Strided::rows(100, 40, 64, 64).unwrap();
    let token = fixture.agent.get(&route, &rows, None).unwrap();
    assert_eq!(fixture.agent.wait(token, TIMEOUT).unwrap().bytes, 4000);
    let token = fixture.agent.put(&route, &[], None).unwrap();
    fixture.agent.wait(token, TIMEOUT).unwrap();
    let outside = [Block { to: LENGTH, from: 0, length: 1 }];
    let error = fixture.agent.put(&route, &outside, None).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfBounds);
    fixture.end(peer);
}

#[test]
fn transfers_are_repeated_by_the_next_service() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let directory = fixture.directory.clone();
    let mut service = start_service(&directory);
    let peer = fixture.peer_process("shared", &[]);
    let route = join_by_service(&mut fixture, &peer);
    for round in 0..4 {
        fill(&fixture.memory, LENGTH, 20 + round);
        let blocks = blocks_of(64 + round * 4096);
        let notice = Notice::new(1 << 20, &sum_of(LENGTH, 20 + round).to_le_bytes()).unwrap();
        let token = fixture.agent.put(&route, &blocks, Some(notice)).unwrap();
        std::thread::sleep(Duration::from_millis(round));
        // Killed, or ended regularly.
        if round % 2 == 0 {
            service.kill();
        } else {
            write(&directory.join("stop"), b"");
            read(&directory.join("stopped"));
            service.finish();
            std::fs::remove_file(directory.join("stop")).unwrap();
            std::fs::remove_file(directory.join("stopped")).unwrap();
        }
        service = start_service(&directory);
        fixture.agent.wait(token, TIMEOUT).unwrap();
        assert_eq!(fixture.reply(), 1, "round {round}");
    }
    exchange(&mut fixture, &peer, &route, 3);
    // Without a next one they fail, and the next join takes another path.
    let clean = || transfer::clean(&directory, false).unwrap();
    let of_service = |found: &[transfer::Leftovers]| {
        let found = found.iter().find(|one| one.name == "copy-service");
        found.map(|one| one.condition.clone())
    };
    assert!(matches!(of_service(&clean()), Some(transfer::Condition::Alive(_))));
    service.kill();
    let begin = Instant::now();
    let token = fixture.agent.put(&route, &WHOLE, None).unwrap();
    let error = fixture.agent.wait(token, TIMEOUT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    assert!(begin.elapsed() < Duration::from_secs(4), "{:?}", begin.elapsed());
    let text = error.to_string();
    assert!(text.contains("copy-service") && text.contains("join again"), "{text}");
    let error = fixture
        .agent
        .join(peer.peer, &fixture.region, &peer.descriptor, &by_service(), TIMEOUT)
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoPath);
    assert!(error.to_string().contains("no copy service copies for it"), "{error}");
    let route = fixture.join(&peer);
    assert_ne!(route.path(), Path::ServiceCopied);
    // What the killed service left is removed.
    assert!(matches!(of_service(&clean()), Some(transfer::Condition::Dead(_))));
    assert_eq!(of_service(&clean()), None);
    fixture.end(peer);
}

/// Begins a put of fives, which a slow emulated device writes on the stream before; another stream
/// waits for the put.
fn begin_after_slow_fill(
    fixture: &mut AgentFixture,
    route: &Route,
    before: &gpu::Stream,
    later: &gpu::Stream,
) -> Token {
    let number = before.device().name().number;
    let slow = emulated::FaultConfig { delay: Duration::from_millis(200), ..Default::default() };
    emulated::configure_faults(number, slow);
    before.fill(&fixture.memory.whole(), 5).unwrap();
    let token = fixture.agent.put_after(route, &WHOLE, None, before).unwrap();
    fixture.agent.delay_stream(token, later, TIMEOUT).unwrap();
    emulated::configure_faults(number, emulated::FaultConfig::default());
    token
}

/// A stream that the transfer follows, and one that follows it, outlive the service.
#[test]
fn order_of_streams_survives_a_killed_service() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let directory = fixture.directory.clone();
    let mut service = start_service(&directory);
    let peer = fixture.peer_process("shared", &[]);
    let route = join_by_service(&mut fixture, &peer);
    let device = device();
    if device.name().implementation != gpu::Implementation::Emulated {
        testkit::skip!("only emulated devices can be slowed down");
    }
    let (before, later) = (device.stream().unwrap(), device.stream().unwrap());
    for has_next in [true, false] {
        fill(&fixture.memory, LENGTH, 20);
        let token = begin_after_slow_fill(&mut fixture, &route, &before, &later);
        service.kill();
        if has_next {
            service = start_service(&directory);
        }
        assert!(!later.is_done().unwrap());
        match fixture.agent.wait(token, TIMEOUT) {
            Ok(_) => assert!(has_next),
            Err(error) => assert!(!has_next && error.kind() == ErrorKind::Closed, "{error}"),
        }
        later.synchronize(TIMEOUT).unwrap();
        if has_next {
            let expected = gpu::checksum(&vec![5; LENGTH as usize]);
            assert_eq!(fixture.request(&peer, SUM, 0), expected);
        }
    }
    fixture.end(peer);
}

/// The first transfer delays the stream that the second one follows.
#[test]
fn transfers_that_wait_for_each_other_by_a_stream_survive_a_killed_service() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let directory = fixture.directory.clone();
    let mut service = start_service(&directory);
    let peer = fixture.peer_process("shared", &[]);
    let route = join_by_service(&mut fixture, &peer);
    let device = device();
    if device.name().implementation != gpu::Implementation::Emulated {
        testkit::skip!("only emulated devices can be slowed down");
    }
    let stream = device.stream().unwrap();
    let first = begin_after_slow_fill(&mut fixture, &route, &stream, &stream);
    stream.fill(&fixture.memory.whole(), 6).unwrap();
    let second = fixture.agent.put_after(&route, &WHOLE, None, &stream).unwrap();
    service.kill();
    service = start_service(&directory);
    fixture.agent.wait(first, TIMEOUT).unwrap();
    fixture.agent.wait(second, TIMEOUT).unwrap();
    stream.synchronize(TIMEOUT).unwrap();
    let expected = gpu::checksum(&vec![6; LENGTH as usize]);
    assert_eq!(fixture.request(&peer, SUM, 0), expected);
    fixture.end(peer);
    service.kill();
}

/// Neither is waited for the stream, nor copied before it.
#[test]
fn transfer_behind_a_stream_is_cancelled_without_a_copy() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let mut service = start_service(&fixture.directory.clone());
    let device = device();
    for is_disconnected in [false, true] {
        let mut peer = fixture.peer_process("shared", &[]);
        let route = join_by_service(&mut fixture, &peer);
        fill(&fixture.memory, LENGTH, 33);
        let before = sum(&fixture.memory, LENGTH);
        let (stream, key) = (device.stream().unwrap(), device.stream().unwrap());
        let gate = device.allocate(4096).unwrap();
        key.fill(&gate.whole(), 0).unwrap();
        key.synchronize(TIMEOUT).unwrap();
        let gate = gate.slice(0, 4).unwrap();
        stream.wait_for_word(&gate, 1).unwrap();
        let token = fixture.agent.get_after(&route, &WHOLE, None, &stream).unwrap();
        if is_disconnected {
            let disconnected = fixture.agent.disconnect(peer.peer, Duration::from_millis(100));
            assert_eq!(disconnected.unwrap_err().kind(), ErrorKind::DeadlineExceeded);
        } else {
            assert!(fixture.agent.cancel(token).unwrap());
        }
        let error = fixture.agent.wait(token, TIMEOUT).unwrap_err();
        let kind = if is_disconnected { ErrorKind::Closed } else { ErrorKind::Cancelled };
        assert_eq!(error.kind(), kind, "{error}");
        key.write_word(&gate, 1).unwrap();
        stream.synchronize(TIMEOUT).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(sum(&fixture.memory, LENGTH), before, "{is_disconnected}");
        if is_disconnected {
            peer.other.kill();
        } else {
            fixture.end(peer);
        }
    }
    service.kill();
}

/// Memory of an owner is not kept by the service after its region or its process is gone.
#[test]
fn service_forgets_regions_that_are_gone() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let service = start_service(&fixture.directory.clone());
    let mappings = || {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", service.0.id())).unwrap();
        maps.lines().filter(|line| line.contains("memfd")).count()
    };
    // With the connection of the client.
    let peer = fixture.peer_process("shared", &[]);
    drop(join_by_service(&mut fixture, &peer));
    fixture.end(peer);
    std::thread::sleep(Duration::from_millis(200));
    let before = mappings();
    for is_killed in [false, true] {
        let mut peer = fixture.peer_process("shared", &[]);
        let route = join_by_service(&mut fixture, &peer);
        let token = fixture.agent.put(&route, &WHOLE, None).unwrap();
        fixture.agent.wait(token, TIMEOUT).unwrap();
        if is_killed {
            peer.other.kill();
        } else {
            fixture.request(&peer, WITHDRAW, 0);
        }
        let end = Instant::now() + TIMEOUT;
        let expected = if is_killed { ErrorKind::Closed } else { ErrorKind::Stale };
        loop {
            let put = fixture.agent.put(&route, &WHOLE, None);
            match put.and_then(|token| fixture.agent.wait(token, TIMEOUT)) {
                Err(error) => {
                    assert_eq!(error.kind(), expected, "{error}");
                    break;
                }
                Ok(_) => assert!(is_killed && Instant::now() < end),
            }
        }
        if !is_killed {
            fixture.end(peer);
        }
        drop(route);
        while mappings() > before {
            assert!(Instant::now() < end, "the service keeps memory that is gone");
            fixture.agent.progress();
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// A dropped agent frees its memory when the service does not copy any more.
#[test]
fn owner_that_ends_waits_for_copies_of_the_service() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let directory = fixture.directory.clone();
    let _service = start_service(&directory);
    let mut peer = fixture.peer_process("shared", &[]);
    let route = join_by_service(&mut fixture, &peer);
    let token = fixture.agent.put(&route, &blocks_of(64), None).unwrap();
    fixture.notify_peer(&peer, DROP_AGENT, 0);
    // The copy completes, or the region was withdrawn before it began.
    match fixture.agent.wait(token, TIMEOUT) {
        Ok(_) => {}
        Err(error) => {
            assert!(matches!(error.kind(), ErrorKind::Stale | ErrorKind::Closed), "{error}");
        }
    }
    read(&directory.join("at-the-end"));
    write(&directory.join("look"), b"");
    read(&directory.join("later"));
    write(&directory.join("leave"), b"");
    peer.other.finish();
}

/// The owner of a region, until it is told to leave.
pub fn own(directory: &FilePath) {
    let shared = directory.parent().unwrap();
    let mut agent = Agent::start(AgentOptions::new("owner").directory(shared)).unwrap();
    let memory = other_device().allocate_shared(LENGTH, &[]).unwrap();
    let region = agent.register(&memory, Rights::ALL).unwrap();
    write(&directory.join("region"), &region.descriptor().encode().unwrap());
    write(&directory.join("card"), &agent.card().encode().unwrap());
    while !directory.join("leave").exists() {
        let _ = agent.next_event(Duration::from_millis(20));
    }
}

/// A client that moves memory to an owner of its own and back by the service, and compares the bytes,
/// until a file appears. It writes how many bytes it moved, and the longest transfer.
pub fn load(directory: &FilePath) {
    let name = std::process::id().to_string();
    let owner_directory = directory.join(format!("owner-{name}"));
    std::fs::create_dir_all(&owner_directory).unwrap();
    let mut owner = start("owner of a region", &owner_directory, &[], None);
    let card = read(&owner_directory.join("card"));
    let descriptor = read(&owner_directory.join("region"));
    let mut agent = Agent::start(AgentOptions::new(&name).directory(directory)).unwrap();
    let [out, back] = [1, 2].map(|_| device().allocate_shared(LENGTH, &[]).unwrap());
    let peer = agent.connect(&card, TIMEOUT).unwrap();
    let [put, get] = [&out, &back].map(|memory| {
        let region = agent.register(memory, Rights::ALL).unwrap();
        agent.join(peer, &region, &descriptor, &by_service(), TIMEOUT).unwrap()
    });
    write(&directory.join(format!("ready-{name}")), b"");
    read_for_long(&directory.join("begin"));
    let (mut moved, mut longest, mut first) = (0, Duration::ZERO, 100);
    while !directory.join("end").exists() {
        first += 1;
        fill(&out, LENGTH, first);
        let blocks = blocks_of([4096, 300 << 10, LENGTH][first as usize % 3]);
        let begin = Instant::now();
        let token = agent.put(&put, &blocks, None).unwrap();
        agent.wait(token, TIMEOUT).unwrap();
        longest = longest.max(begin.elapsed());
        let token = agent.get(&get, &blocks, None).unwrap();
        agent.wait(token, TIMEOUT).unwrap();
        assert_eq!(sum(&back, LENGTH), sum_of(LENGTH, first), "client {name}, round {first}");
        moved += 2 * LENGTH;
    }
    let result = format!("{moved} {}", longest.as_millis());
    write(&directory.join(format!("result-{name}")), result.as_bytes());
    write(&owner_directory.join("leave"), b"");
    owner.finish();
}

/// `TEST_KILLS` repeats it more often.
#[test]
fn killed_services_under_load_lose_and_alter_nothing() {
    let _alone = alone();
    let kills = std::env::var("TEST_KILLS").map_or(6, |kills| kills.parse().unwrap());
    let fixture = AgentFixture::open();
    let directory = fixture.directory.clone();
    let mut service = start_service(&directory);
    let count = 8;
    let mut clients: Vec<_> =
        (0..count).map(|_| start("client of the copy service", &directory, &[], None)).collect();
    let of = |prefix: &str| {
        let entries = std::fs::read_dir(&directory).unwrap().flatten();
        let names = entries.map(|entry| entry.file_name().into_string().unwrap());
        names.filter(|name| name.starts_with(prefix)).collect::<Vec<_>>()
    };
    let end = Instant::now() + TIMEOUT;
    while of("ready-").len() < count {
        assert!(Instant::now() < end, "the clients do not start");
        std::thread::sleep(Duration::from_millis(10));
    }
    write(&directory.join("begin"), b"");
    for kill in 0..kills {
        std::thread::sleep(Duration::from_millis(100 + kill * 37 % 200));
        service.kill();
        service = start_service(&directory);
    }
    std::thread::sleep(Duration::from_millis(300));
    write(&directory.join("end"), b"");
    clients.iter_mut().for_each(ChildProcess::finish);
    let results = of("result-");
    assert_eq!(results.len(), count);
    for name in results {
        let result = String::from_utf8(read(&directory.join(name))).unwrap();
        let (moved, longest) = result.split_once(' ').unwrap();
        println!("a client moved {moved} bytes, its longest transfer took {longest} ms");
        assert!(moved.parse::<u64>().unwrap() > 0);
    }
    drop(service);
}
