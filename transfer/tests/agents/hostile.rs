//! Peers that send garbage or false claims.

use std::time::Duration;

use gpu::{Block, Implementation};
use ipc::Channel;
use transfer::path::{ExportObstacle, Exportability, MemoryType, Path, Policy};
use transfer::{Agent, AgentCard, AgentOptions, ErrorKind, HostBuffer, RegionDescriptor, Rights};

use crate::common::{LENGTH, TIMEOUT, alone, device};
use crate::fixture::{AgentFixture, SUM, blocks_of, fill, sum, sum_of, sum_of_buffer};

#[test]
fn invalid_transfers_are_refused_before_a_byte_is_copied() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let peer_process = fixture.peer_process("shared-read-only", &[]);
    let route = fixture.join(&peer_process);
    let error =
        fixture.agent.put(&route, &[Block { to: 0, from: 0, length: 1 }], None).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotAllowed, "{error}");
    let inside = Block { to: 0, from: 0, length: 4096 };
    for (to, from, length) in [
        (0, 0, LENGTH + 1),
        (LENGTH, 0, 1),
        (0, LENGTH, 1),
        (u64::MAX, 0, 1),
        (0, 0, u64::MAX),
        (1, u64::MAX, u64::MAX),
    ] {
        let blocks = [inside, Block { to, from, length }];
        let error = fixture.agent.get(&route, &blocks, None).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfBounds, "{error}");
        assert!(error.to_string().contains("block 1"), "{error}");
    }
    assert_eq!(fixture.agent.in_flight(), 0);
    assert_eq!(fixture.request(&peer_process, SUM, 0), sum_of(LENGTH, 0));
    fixture.end(peer_process);
}

#[test]
fn false_descriptor_is_refused() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let peer_process = fixture.peer_process("shared", &[]);
    let descriptor = RegionDescriptor::decode(&peer_process.descriptor).unwrap();
    let mut try_it = |altered: RegionDescriptor, kinds: &[ErrorKind]| {
        let bytes = altered.encode().unwrap();
        let policy = Policy::default();
        let error = fixture
            .agent
            .join(peer_process.peer, &fixture.region, &bytes, &policy, TIMEOUT)
            .unwrap_err();
        assert!(kinds.contains(&error.kind()), "{error}");
    };
    use ErrorKind::{Malformed, NoPath, Stale, WrongMemory};
    // Tickets cannot be guessed.
    try_it(RegionDescriptor { ticket: descriptor.ticket ^ 1, ..descriptor.clone() }, &[Stale]);
    try_it(RegionDescriptor { number: descriptor.number + 1, ..descriptor.clone() }, &[Stale]);
    try_it(RegionDescriptor { agent: [7; 16], ..descriptor.clone() }, &[Stale]);
    try_it(RegionDescriptor { node: [7; 16], ..descriptor.clone() }, &[Stale]);
    // False length, offset and number of pieces.
    try_it(
        RegionDescriptor { length: descriptor.length * 9, ..descriptor.clone() },
        &[WrongMemory, NoPath],
    );
    try_it(RegionDescriptor { offset: 1 << 40, ..descriptor.clone() }, &[WrongMemory, NoPath]);
    try_it(RegionDescriptor { pieces: 2, ..descriptor.clone() }, &[Malformed]);
    // The connection still works.
    drop(fixture.join(&peer_process));
    fixture.end(peer_process);
}

#[test]
fn descriptor_with_a_false_device_is_refused() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let peer_process = fixture.peer_process("shared", &[]);
    let descriptor = RegionDescriptor::decode(&peer_process.descriptor).unwrap();
    let policy = Policy::default();
    let nowhere = RegionDescriptor { device: Some(gpu::Uuid([0xee; 16])), ..descriptor.clone() };
    let bytes = nowhere.encode().unwrap();
    let joined = fixture.agent.join(peer_process.peer, &fixture.region, &bytes, &policy, TIMEOUT);
    match joined {
        // The named device is not seen; the memory is mapped, and found on one that is.
        Err(error) if device().name().implementation == Implementation::Cuda => {
            assert_eq!(error.kind(), ErrorKind::WrongMemory, "{error}");
        }
        Err(error) => {
            panic!("{error}");
        }
        // The peer itself copies, and does not ask where its memory is.
        Ok(route) if route.path() == Path::HostStaged => {
            let reasons = route.choice().reasons();
            assert!(reasons.contains("different implementations"), "{reasons}");
        }
        // Devices that are not seen cannot be told apart.
        Ok(_) => assert!(std::env::var_os("TEST_PEER_DEVICES").is_some()),
    }
    let own = device().properties().uuid;
    // A hidden device's memory was mapped by the first join, and is not mapped again.
    let is_mapped = std::env::var_os("TEST_PEER_DEVICES").is_some();
    if descriptor.device != Some(own) && !is_mapped {
        let moved = RegionDescriptor { device: Some(own), ..descriptor };
        let bytes = moved.encode().unwrap();
        let joined =
            fixture.agent.join(peer_process.peer, &fixture.region, &bytes, &policy, TIMEOUT);
        assert_eq!(joined.unwrap_err().kind(), ErrorKind::WrongMemory);
    }
    fixture.end(peer_process);
}

#[test]
fn descriptor_of_device_memory_as_host_memory_is_refused() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let peer_process = fixture.peer_process("shared", &[]);
    let descriptor = RegionDescriptor::decode(&peer_process.descriptor).unwrap();
    let memory_type = MemoryType::Host(Exportability::ByDescriptors);
    let altered = RegionDescriptor { memory_type, device: None, ..descriptor };
    let policy = Policy::default();
    let bytes = altered.encode().unwrap();
    let joined = fixture.agent.join(peer_process.peer, &fixture.region, &bytes, &policy, TIMEOUT);
    let kind = joined.unwrap_err().kind();
    assert!(matches!(kind, ErrorKind::WrongMemory | ErrorKind::Malformed), "{kind:?}");
    fixture.end(peer_process);
}

#[test]
fn garbage_at_the_socket_does_not_affect_other_peers() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let path = fixture.agent.card().socket.unwrap();
    let second = Duration::from_secs(1);
    let mut idle_channels = Vec::new();
    for length in [0, 1, 8, 40, 1000] {
        let channel = Channel::connect(&path, second).unwrap();
        channel.send(&vec![0xa5; length], &[], second).unwrap();
        let reply = channel.receive(TIMEOUT).unwrap();
        // A refusal of this version.
        assert!(reply.bytes.starts_with(&[2, 2]), "{:?}", reply.bytes);
    }
    // Many silent connections.
    for _ in 0..200 {
        idle_channels.extend(Channel::connect(&path, second));
    }
    let peer_process = fixture.peer_process("shared", &[]);
    let route = fixture.join(&peer_process);
    let block = [Block { to: 0, from: 0, length: LENGTH }];
    let token = fixture.agent.put(&route, &block, None).unwrap();
    fixture.agent.wait(token, TIMEOUT).unwrap();
    assert_eq!(fixture.request(&peer_process, SUM, 0), sum_of(LENGTH, 1));
    fixture.end(peer_process);
}

#[test]
fn false_card_is_refused() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let peer_process = fixture.peer_process("shared", &[]);
    let card = AgentCard::decode(&peer_process.card).unwrap();
    // Another agent than the expected one listens there.
    let altered = AgentCard { identity: [3; 16], ..card.clone() };
    let error = fixture.agent.connect(&altered.encode().unwrap(), TIMEOUT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Stale, "{error}");
    for length in 0..peer_process.card.len() {
        assert!(fixture.agent.connect(&peer_process.card[..length], TIMEOUT).is_err());
    }
    fixture.end(peer_process);
}

#[test]
fn region_without_rights_is_refused_and_pinned_memory_private() {
    let _alone = alone();
    let fixture = AgentFixture::open();
    let memory = device().allocate_shared(LENGTH, &[]).unwrap();
    let none = Rights { read: false, write: false };
    let error = fixture.agent.register(&memory, none).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Malformed);
    // Host memory that is registered with a device of this process only is not exportable.
    let segment = ipc::Segment::create(ipc::Layout::new("test", 1), 1 << 20).unwrap();
    let pinned = transfer::pin(&segment, &device()).unwrap();
    let region = fixture.agent.register(&pinned, Rights::ALL).unwrap();
    let memory_type = MemoryType::Host(Exportability::Not(ExportObstacle::PrivateHostMemory));
    assert_eq!(region.descriptor().memory_type, memory_type);
}

/// The owner of the memory exports a read-only descriptor.
#[test]
fn read_only_host_memory_cannot_be_mapped_for_writing() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let peer_process = fixture.peer_process("host-read-only", &[]);
    let descriptor = RegionDescriptor::decode(&peer_process.descriptor).unwrap();
    let altered = RegionDescriptor { rights: Rights::ALL, ..descriptor }.encode().unwrap();
    let policy = Policy::default();
    let joined = fixture.agent.join(peer_process.peer, &fixture.region, &altered, &policy, TIMEOUT);
    assert_eq!(joined.unwrap_err().kind(), ErrorKind::WrongMemory);
    let local = HostBuffer::new(LENGTH).unwrap();
    let region = fixture.agent.register(&local, Rights::ALL).unwrap();
    for (region, is_host) in [(&region, true), (&fixture.region, false)] {
        let (peer, descriptor) = (peer_process.peer, &peer_process.descriptor);
        let route = fixture.agent.join(peer, region, descriptor, &policy, TIMEOUT).unwrap();
        let whole = [Block { to: 0, from: 0, length: LENGTH }];
        let refused = fixture.agent.put(&route, &whole, None).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::NotAllowed);
        let token = fixture.agent.get(&route, &whole, None).unwrap();
        fixture.agent.wait(token, TIMEOUT).unwrap();
        let found =
            if is_host { sum_of_buffer(&(&local).into()) } else { sum(&fixture.memory, LENGTH) };
        assert_eq!(found, sum_of(LENGTH, 0));
        // A read-only mapping is not reused for claims of more rights.
        let joined = fixture.agent.join(peer, region, &altered, &policy, TIMEOUT);
        assert_eq!(joined.unwrap_err().kind(), ErrorKind::WrongMemory);
    }
    fixture.end(peer_process);
}

/// Also within a process.
#[test]
fn claimed_rights_are_refused_within_a_process() {
    let _alone = alone();
    let mut here = Agent::start(AgentOptions::new("here")).unwrap();
    let there = Agent::start(AgentOptions::new("there")).unwrap();
    let local = here.register(HostBuffer::new(LENGTH).unwrap(), Rights::ALL).unwrap();
    let remote = there.register(HostBuffer::new(LENGTH).unwrap(), Rights::READ).unwrap();
    let peer = here.connect(&there.card().encode().unwrap(), TIMEOUT).unwrap();
    let descriptor = remote.descriptor().clone();
    let policy = Policy::default();
    let mut join = |rights| {
        let bytes = RegionDescriptor { rights, ..descriptor.clone() }.encode().unwrap();
        here.join(peer, &local, &bytes, &policy, TIMEOUT)
    };
    join(Rights::READ).unwrap();
    assert_eq!(join(Rights::ALL).unwrap_err().kind(), ErrorKind::NotAllowed);
}

/// The CPU reads it, and uploads it to the device.
#[test]
fn devices_that_cannot_register_read_only_memory_still_get_it() {
    let _alone = alone();
    if device().name().implementation != Implementation::Emulated {
        testkit::skip!("only emulated devices refuse on request");
    }
    let mut fixture = AgentFixture::open();
    let peer_process = fixture.peer_process("host-read-only", &[]);
    gpu::emulated::refuse_read_only_registrations(0, true);
    let route = fixture.join(&peer_process);
    gpu::emulated::refuse_read_only_registrations(0, false);
    assert_eq!(route.path(), Path::SharedMemory, "{}", route.choice());
    for length in [LENGTH, 4096] {
        fill(&fixture.memory, LENGTH, 99);
        let token = fixture.agent.get(&route, &blocks_of(length), None).unwrap();
        fixture.agent.wait(token, TIMEOUT).unwrap();
        assert_eq!(sum(&fixture.memory, LENGTH), sum_of(LENGTH, 0));
    }
    fixture.end(peer_process);
}
