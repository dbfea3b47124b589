//! Bytes through staging memory, which both processes map: `host-staged`.

use std::path::Path as FilePath;
use std::time::{Duration, Instant};

use gpu::{Block, emulated};
use ipc::WaitStrategy;
use transfer::path::{Path, Policy};
use transfer::{
    Agent, AgentOptions, Buffer, ErrorKind, Event, HostBuffer, Region, Rights, Route, Strided,
};

use crate::common::{ChildProcess, LENGTH, LeakCheck, TIMEOUT, alone, device, numbers, start};
use crate::fixture::{
    AgentFixture, END, FILL, PeerProcess, SUM, WITHDRAW, blocks_of, fill_buffer, metric, notice,
    other_device, read, sum_of, sum_of_buffer, write,
};
use crate::unreachable::cpu_time;

const WHOLE: [Block; 1] = [Block { to: 0, from: 0, length: LENGTH }];
/// The other side compares on this notice.
const COMPARE: u64 = 100;
/// Bytes of a stager's part of the fixture's region.
const PART: u64 = 1 << 20;

fn slow(delay: Duration) {
    for number in 0..emulated::COUNT {
        emulated::configure_faults(number, emulated::FaultConfig { delay, ..Default::default() });
    }
}

fn required() -> Policy {
    "=host-staged".parse().unwrap()
}

/// Memory of the fixture's process, and its route to the peer's region.
struct End {
    buffer: Buffer,
    region: Region,
    route: Route,
}

impl End {
    fn new(fixture: &mut AgentFixture, peer_process: &PeerProcess, kind: &str) -> Self {
        let buffer: Buffer = match kind {
            "device" => device().allocate(LENGTH).unwrap().into(),
            "pinned" => {
                let segment =
                    ipc::Segment::create(ipc::Layout::new("test", 1), LENGTH as usize).unwrap();
                transfer::pin(&segment, &device()).unwrap().into()
            }
            _ => HostBuffer::from_vec(vec![0; LENGTH as usize]).unwrap().into(),
        };
        let region = fixture.agent.register_local(buffer.clone()).unwrap();
        let (peer, descriptor) = (peer_process.peer, &peer_process.descriptor);
        let route = fixture.agent.join(peer, &region, descriptor, &required(), TIMEOUT).unwrap();
        assert_eq!(route.path(), Path::HostStaged, "{}", route.choice());
        Self { buffer, region, route }
    }

    fn fill(&self, first: u64) {
        fill_buffer(&self.buffer, first);
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; LENGTH as usize];
        match &self.buffer {
            Buffer::Host(host) => host.read(0, &mut bytes).unwrap(),
            Buffer::Device(memory) => {
                let stream = memory.mapped_for().stream().unwrap();
                let whole = memory.slice(0, LENGTH).unwrap();
                stream.download(&whole, &mut bytes, TIMEOUT).unwrap();
            }
        }
        bytes
    }
}

/// Put and get of the whole, in one block, in many, and in rows; and single blocks of many lengths.
fn exchange(fixture: &mut AgentFixture, peer_process: &PeerProcess, kind: &str) {
    let end = End::new(fixture, peer_process, kind);
    let filled = |round: u64| {
        end.fill(round);
        Some(notice(COMPARE, sum_of(LENGTH, round)))
    };
    for (round, blocks) in [(1, WHOLE.to_vec()), (2, blocks_of(1000)), (3, blocks_of(300_001))] {
        let on_arrival = filled(round);
        let token = fixture.agent.put(&end.route, &blocks, on_arrival).unwrap();
        let done = fixture.agent.wait(token, TIMEOUT).unwrap();
        assert_eq!((done.bytes, done.path), (LENGTH, Some(Path::HostStaged)));
        assert_eq!(fixture.reply(), 1, "the other side has wrong bytes: {kind}, {round}");
        fixture.request(peer_process, FILL, 70 + round);
        let token = fixture.agent.get(&end.route, &blocks, None).unwrap();
        fixture.agent.wait(token, TIMEOUT).unwrap();
        assert_eq!(sum_of_buffer(&end.buffer), sum_of(LENGTH, 70 + round), "{kind}, {round}");
    }
    // Every second row of 24 bytes is put into a packed area, and got back.
    let count = 5000;
    let on_arrival = filled(9);
    let token = fixture.agent.put(&end.route, &WHOLE, on_arrival).unwrap();
    fixture.agent.wait(token, TIMEOUT).unwrap();
    assert_eq!(fixture.reply(), 1);
    let rows = Strided::rows(count, 24, 48, 24).unwrap();
    let token = fixture.agent.put(&end.route, &rows, None).unwrap();
    fixture.agent.wait(token, TIMEOUT).unwrap();
    let packed = [Block { to: 1 << 20, from: 0, length: 24 * count }];
    let token = fixture.agent.get(&end.route, &packed, None).unwrap();
    fixture.agent.wait(token, TIMEOUT).unwrap();
    let (source, found) = (numbers(LENGTH, 9), end.bytes());
    for row in 0..count as usize {
        let at = (1 << 20) + 24 * row;
        assert!(found[at..at + 24] == source[48 * row..48 * row + 24], "{kind}, row {row}");
    }
    fixture.request(peer_process, FILL, 50);
    let remote = numbers(LENGTH, 50);
    for length in [1, 7, 4096, 256 << 10, (256 << 10) + 1, (1 << 20) - 3] {
        end.fill(1);
        let mut expected = end.bytes();
        let (to, from) = (5, 1_000_003);
        let token = fixture.agent.get(&end.route, &[Block { to, from, length }], None).unwrap();
        fixture.agent.wait(token, TIMEOUT).unwrap();
        let (to, from, length) = (to as usize, from as usize, length as usize);
        expected[to..to + length].copy_from_slice(&remote[from..from + length]);
        assert!(end.bytes() == expected, "{kind}, {length} bytes");
    }
}

#[test]
fn bytes_of_all_kinds_of_memory_arrive() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let bytes = || metric("path_bytes_total{path=\"host-staged\"}");
    let before = bytes();
    for role in ["plain", "private-host", "host"] {
        let peer_process = fixture.peer_process(role, &[]);
        for kind in ["device", "pinned", "host"] {
            exchange(&mut fixture, &peer_process, kind);
        }
        fixture.end(peer_process);
    }
    assert!(bytes() - before > 9 * 6 * LENGTH, "{}", bytes() - before);
}

/// Without a policy, between memories that no process can map.
#[test]
fn private_memories_of_two_processes_need_no_fabric() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let peer_process = fixture.peer_process("private-host", &[]);
    let buffer = HostBuffer::from_vec(numbers(LENGTH, 8)).unwrap();
    let region = fixture.agent.register_local(buffer).unwrap();
    let (peer, descriptor) = (peer_process.peer, &peer_process.descriptor);
    let policy = Policy::default();
    let route = fixture.agent.join(peer, &region, descriptor, &policy, TIMEOUT).unwrap();
    assert_eq!(route.path(), Path::HostStaged, "{}", route.choice());
    for strategy in [WaitStrategy::Busy, WaitStrategy::Block, WaitStrategy::default()] {
        let options = AgentOptions::new("waiting").wait_strategy(strategy);
        let mut other = Agent::start(options).unwrap();
        let peer = other.connect(&peer_process.card, TIMEOUT).unwrap();
        let region = other.register_local(device().allocate(LENGTH).unwrap()).unwrap();
        let route = other.join(peer, &region, descriptor, &policy, TIMEOUT).unwrap();
        let token = other.get(&route, &WHOLE, None).unwrap();
        other.wait(token, TIMEOUT).unwrap();
    }
    // Fences and ordered notices as on other paths.
    for half in [0, LENGTH / 2] {
        let block = [Block { to: half, from: half, length: LENGTH / 2 }];
        let token = fixture.agent.put(&route, &block, None).unwrap();
        fixture.agent.forget(token);
        fixture.agent.fence(peer).unwrap();
    }
    let ordered = notice(COMPARE, sum_of(LENGTH, 8));
    let token = fixture.agent.notify_ordered(peer, ordered).unwrap();
    fixture.agent.wait(token, TIMEOUT).unwrap();
    assert_eq!(fixture.reply(), 1);
    fixture.agent.flush(peer, TIMEOUT).unwrap();
    fixture.end(peer_process);
}

/// The other process of the tests below: "PART ROUNDS" puts that often into its part of the
/// fixture's region and gets back; without rounds until it fails, and then returns the kind.
pub fn stager(role: &str, directory: &FilePath) {
    let (part, rounds) = role.split_once(' ').unwrap();
    let (part, rounds): (u64, u64) = (part.parse().unwrap(), rounds.parse().unwrap());
    let mut agent = Agent::start(AgentOptions::new("stager").directory(directory)).unwrap();
    let card = read(&directory.join("card"));
    let fixture = agent.connect(&card, TIMEOUT).unwrap();
    let descriptor = read(&directory.join("fixture-region"));
    let memory = other_device().allocate(LENGTH).unwrap();
    let local = agent.register(&memory, Rights::ALL).unwrap();
    let route = agent.join(fixture, &local, &descriptor, &required(), TIMEOUT).unwrap();
    let stream = memory.mapped_for().stream().unwrap();
    let (into, back) = (memory.slice(0, PART).unwrap(), memory.slice(PART, PART).unwrap());
    let mut round = 0;
    let outcome = loop {
        round += 1;
        if rounds > 0 && round > rounds {
            break 0;
        }
        let bytes = numbers(PART, (part << 24 | round) as u32);
        stream.upload(&into, &bytes, TIMEOUT).unwrap();
        let there = [Block { to: part * PART, from: 0, length: PART }];
        let moved = agent.put(&route, &there, None).and_then(|put| agent.wait(put, TIMEOUT));
        let moved = moved.and_then(|_| {
            let here = [Block { to: PART, from: part * PART, length: PART }];
            agent.get(&route, &here, None).and_then(|get| agent.wait(get, TIMEOUT))
        });
        if let Err(error) = moved {
            assert!(rounds == 0, "{error}");
            break u64::from(error.kind() == ErrorKind::Stale);
        }
        let mut found = vec![0; PART as usize];
        stream.download(&back, &mut found, TIMEOUT).unwrap();
        assert!(found == bytes, "part {part}, round {round}");
        if round == 1 {
            let token = agent.notify(fixture, notice(COMPARE, part)).unwrap();
            agent.wait(token, TIMEOUT).unwrap();
        }
    };
    let token = agent.notify(fixture, notice(END, outcome)).unwrap();
    agent.wait(token, TIMEOUT).unwrap();
    agent.disconnect(fixture, TIMEOUT).unwrap();
}

/// Starts stagers, whose target is the fixture's region.
fn stagers(fixture: &AgentFixture, rounds: u64, parts: u64) -> Vec<ChildProcess> {
    let descriptor = fixture.region.descriptor().encode().unwrap();
    write(&fixture.directory.join("fixture-region"), &descriptor);
    let one = |part| start(&format!("stager {part} {rounds}"), &fixture.directory, &[], None);
    (0..parts).map(one).collect()
}

fn wait_for(fixture: &mut AgentFixture, tag: u64) -> u64 {
    loop {
        match fixture.agent.next_event(TIMEOUT).unwrap() {
            Event::Notice { notice, .. } if notice.tag == tag => {
                return u64::from_le_bytes(notice.data().try_into().unwrap());
            }
            _ => {}
        }
    }
}

#[test]
fn several_initiators_are_served_at_a_time() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let mut children = stagers(&fixture, 20, 4);
    let mut ended = 0;
    while ended < 4 {
        match fixture.agent.next_event(TIMEOUT).unwrap() {
            Event::Notice { notice, .. } if notice.tag == END => ended += 1,
            _ => {}
        }
    }
    children.iter_mut().for_each(ChildProcess::finish);
    let mut bytes = vec![0; (4 * PART) as usize];
    let stream = fixture.memory.mapped_for().stream().unwrap();
    let written = fixture.memory.slice(0, 4 * PART).unwrap();
    stream.download(&written, &mut bytes, TIMEOUT).unwrap();
    for (part, bytes) in bytes.chunks(PART as usize).enumerate() {
        assert!(bytes == numbers(PART, (part << 24 | 20) as u32), "part {part}");
    }
    // The thread that copied sleeps.
    while let Ok(_event) = fixture.agent.next_event(Duration::from_millis(100)) {}
    let before = cpu_time();
    std::thread::sleep(Duration::from_millis(400));
    let used = cpu_time() - before;
    assert!(used < Duration::from_millis(20), "{used:?} while idle");
}

/// After the event that it left, no byte of it arrives; then everything that it had is released.
#[test]
fn killed_initiator_leaves_no_copy_and_no_resource() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    // Drivers allocate some state at the first use, and the thread stays.
    for mut child in stagers(&fixture, 1, 1) {
        wait_for(&mut fixture, END);
        child.finish();
    }
    while let Ok(_event) = fixture.agent.next_event(Duration::from_millis(100)) {}
    let leak_check = LeakCheck::begin(&device());
    for round in 0..6 {
        slow(Duration::from_micros(round * 300));
        let mut child = stagers(&fixture, 0, 1).pop().unwrap();
        wait_for(&mut fixture, COMPARE);
        std::thread::sleep(Duration::from_micros(1700 * round));
        child.kill();
        while !matches!(fixture.agent.next_event(TIMEOUT).unwrap(), Event::Left { .. }) {}
        slow(Duration::ZERO);
        fill_buffer(&(&fixture.memory).into(), 5);
        std::thread::sleep(Duration::from_millis(10));
        assert_eq!(sum_of_buffer(&(&fixture.memory).into()), sum_of(LENGTH, 5), "round {round}");
    }
    leak_check.compare(&device());
    fixture.agent.withdraw(&fixture.region, TIMEOUT).unwrap();
}

#[test]
fn transfers_to_a_killed_target_end_with_its_name() {
    let _alone = alone();
    if device().name().implementation != gpu::Implementation::Emulated {
        testkit::skip!("only emulated devices can be slowed down");
    }
    let mut fixture = AgentFixture::open();
    for round in 0..4 {
        let mut peer_process = fixture.peer_process("plain", &[]);
        let end = End::new(&mut fixture, &peer_process, "device");
        slow(Duration::from_millis(2));
        let put = fixture.agent.put(&end.route, &WHOLE, None).unwrap();
        let get = fixture.agent.get(&end.route, &blocks_of(300_001), None).unwrap();
        let kill_at = Instant::now() + Duration::from_millis(3 * round);
        while Instant::now() < kill_at {
            fixture.agent.progress();
        }
        peer_process.other.kill();
        let begin = Instant::now();
        for token in [put, get] {
            let error = fixture.agent.wait(token, TIMEOUT).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
            let text = error.to_string();
            for part in ["host-staged", "plain", "bytes were copied"] {
                assert!(text.contains(part), "{text}");
            }
        }
        assert!(begin.elapsed() < TIMEOUT / 4, "{:?}", begin.elapsed());
        slow(Duration::ZERO);
        let error = fixture.agent.put(&end.route, &WHOLE, None).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
        fixture.agent.disconnect(peer_process.peer, TIMEOUT).unwrap();
    }
}

/// The owner waits for its own copies, and initiators get the cause.
#[test]
fn region_withdrawn_during_transfers_is_not_written_any_more() {
    let _alone = alone();
    for drops in [false, true] {
        let mut fixture = AgentFixture::open();
        let mut children = stagers(&fixture, 0, 3);
        for _ in 0..3 {
            wait_for(&mut fixture, COMPARE);
        }
        slow(Duration::from_millis(1));
        if drops {
            let other = fixture.agent.register(HostBuffer::new(1).unwrap(), Rights::ALL).unwrap();
            drop(std::mem::replace(&mut fixture.region, other));
            // Dropping a region does not wait: the next copies are refused.
            std::thread::sleep(Duration::from_millis(50));
        } else {
            fixture.agent.withdraw(&fixture.region, TIMEOUT).unwrap();
        }
        slow(Duration::ZERO);
        fill_buffer(&(&fixture.memory).into(), 5);
        for _ in 0..3 {
            assert_eq!(wait_for(&mut fixture, END), 1, "an error of another kind");
        }
        assert_eq!(sum_of_buffer(&(&fixture.memory).into()), sum_of(LENGTH, 5), "{drops}");
        children.iter_mut().for_each(ChildProcess::finish);
    }
}

#[test]
fn withdrawn_region_is_refused_with_path_and_cause() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let peer_process = fixture.peer_process("private-host", &[]);
    let end = End::new(&mut fixture, &peer_process, "host");
    fixture.request(&peer_process, WITHDRAW, 0);
    let error = fixture.agent.put(&end.route, &WHOLE, None).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Stale, "{error}");
    let (peer, descriptor) = (peer_process.peer, &peer_process.descriptor);
    let again = fixture.agent.join(peer, &end.region, descriptor, &required(), TIMEOUT);
    assert_eq!(again.unwrap_err().kind(), ErrorKind::Stale);
    assert_eq!(fixture.request(&peer_process, SUM, 0), sum_of(LENGTH, 0), "bytes were copied");
    fixture.end(peer_process);
}

#[test]
fn disconnecting_cancels_staged_transfers() {
    let _alone = alone();
    if device().name().implementation != gpu::Implementation::Emulated {
        testkit::skip!("only emulated devices can be slowed down");
    }
    let mut fixture = AgentFixture::open();
    let peer_process = fixture.peer_process("plain", &[]);
    let end = End::new(&mut fixture, &peer_process, "device");
    slow(Duration::from_millis(20));
    let tokens = [0, 1].map(|_| fixture.agent.put(&end.route, &WHOLE, None).unwrap());
    let short = Duration::from_millis(5);
    let waited = fixture.agent.wait(tokens[0], short).unwrap_err();
    assert_eq!(waited.kind(), ErrorKind::DeadlineExceeded);
    assert!(waited.to_string().contains("by host-staged"), "{waited}");
    let left = fixture.agent.disconnect(peer_process.peer, short).unwrap_err();
    assert_eq!(left.kind(), ErrorKind::DeadlineExceeded);
    for token in tokens {
        assert_eq!(fixture.agent.wait(token, TIMEOUT).unwrap_err().kind(), ErrorKind::Closed);
    }
    assert_eq!(fixture.agent.in_flight(), 0);
}

/// Both threads that wait sleep most of the time.
#[test]
fn waiting_for_staged_copies_uses_little_of_a_core() {
    let _alone = alone();
    if device().name().implementation != gpu::Implementation::Emulated {
        testkit::skip!("only emulated devices can be slowed down");
    }
    let mut fixture = AgentFixture::open();
    let peer_process = fixture.peer_process("plain", &[]);
    let end = End::new(&mut fixture, &peer_process, "device");
    let run = |fixture: &mut AgentFixture| {
        let token = fixture.agent.put(&end.route, &WHOLE, None).unwrap();
        fixture.agent.wait(token, TIMEOUT).unwrap();
    };
    run(&mut fixture);
    slow(Duration::from_millis(20));
    let (begin, before) = (Instant::now(), cpu_time());
    run(&mut fixture);
    let (took, used) = (begin.elapsed(), cpu_time() - before);
    slow(Duration::ZERO);
    assert!(took > Duration::from_millis(200), "{took:?}");
    assert!(used < took / 4, "{used:?} of {took:?}");
    fixture.end(peer_process);
}

/// An agent that ends waits for its own copies, and its peers learn that it ended.
#[test]
fn closed_target_ends_transfers_and_frees_its_memory() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let mut children = stagers(&fixture, 0, 2);
    for _ in 0..2 {
        wait_for(&mut fixture, COMPARE);
    }
    slow(Duration::from_millis(1));
    let next = Agent::start(AgentOptions::new("next")).unwrap();
    std::mem::replace(&mut fixture.agent, next).close(TIMEOUT).unwrap();
    slow(Duration::ZERO);
    fill_buffer(&(&fixture.memory).into(), 5);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(sum_of_buffer(&(&fixture.memory).into()), sum_of(LENGTH, 5));
    children.iter_mut().for_each(ChildProcess::kill);
}
