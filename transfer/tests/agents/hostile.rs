//! Those that lie, or send garbage.

use std::time::Duration;

use gpu::Block;
use ipc::Channel;
use transfer::path::{ExportObstacle, Exportability, MemoryType, Policy};
use transfer::{Agent, AgentCard, AgentOptions, ErrorKind, HostBuffer, RegionDescriptor, Rights};

use crate::common::{LENGTH, TIMEOUT, alone, device};
use crate::fixture::{AgentFixture, SUM, blocks_of, fill, sum, sum_of, sum_of_buffer};

#[test]
fn what_is_out_of_bounds_or_not_allowed_is_refused_before_a_byte_moves() {
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
    assert_eq!(fixture.ask(&peer_process, SUM, 0), sum_of(LENGTH, 0));
    fixture.end(peer_process);
}

#[test]
fn a_descriptor_that_lies_leads_nowhere() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let peer_process = fixture.peer_process("shared", &[]);
    let told = RegionDescriptor::decode(&peer_process.descriptor).unwrap();
    let mut try_it = |lie: RegionDescriptor, kinds: &[ErrorKind]| {
        let bytes = lie.encode().unwrap();
        let policy = Policy::default();
        let error = fixture
            .agent
            .join(peer_process.peer, &fixture.region, &bytes, &policy, TIMEOUT)
            .unwrap_err();
        assert!(kinds.contains(&error.kind()), "{error}");
    };
    use ErrorKind::{Malformed, NoPath, Stale, WrongMemory};
    // Whoever has no ticket cannot guess one.
    try_it(RegionDescriptor { ticket: told.ticket ^ 1, ..told.clone() }, &[Stale]);
    try_it(RegionDescriptor { number: told.number + 1, ..told.clone() }, &[Stale]);
    try_it(RegionDescriptor { agent: [7; 16], ..told.clone() }, &[Stale]);
    try_it(RegionDescriptor { node: [7; 16], ..told.clone() }, &[Stale]);
    // Longer than it is, or beginning elsewhere, or in more pieces.
    try_it(RegionDescriptor { length: told.length * 9, ..told.clone() }, &[WrongMemory, NoPath]);
    try_it(RegionDescriptor { offset: 1 << 40, ..told.clone() }, &[WrongMemory, NoPath]);
    try_it(RegionDescriptor { pieces: 2, ..told.clone() }, &[Malformed]);
    // The connection is none the worse for it.
    drop(fixture.join(&peer_process));
    fixture.end(peer_process);
}

#[test]
fn a_descriptor_may_not_name_another_device() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let peer_process = fixture.peer_process("shared", &[]);
    let told = RegionDescriptor::decode(&peer_process.descriptor).unwrap();
    let policy = Policy::default();
    let nowhere = RegionDescriptor { device: Some(gpu::Uuid([0xee; 16])), ..told.clone() };
    let bytes = nowhere.encode().unwrap();
    let joined = fixture.agent.join(peer_process.peer, &fixture.region, &bytes, &policy, TIMEOUT);
    let error = joined.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoPath);
    assert!(error.to_string().contains("does not see the peer's device"), "{error}");
    let own = device().properties().uuid;
    if told.device != Some(own) {
        let moved = RegionDescriptor { device: Some(own), ..told };
        let bytes = moved.encode().unwrap();
        let joined =
            fixture.agent.join(peer_process.peer, &fixture.region, &bytes, &policy, TIMEOUT);
        assert_eq!(joined.unwrap_err().kind(), ErrorKind::WrongMemory);
    }
    fixture.end(peer_process);
}

#[test]
fn device_memory_is_no_host_memory() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let peer_process = fixture.peer_process("shared", &[]);
    let told = RegionDescriptor::decode(&peer_process.descriptor).unwrap();
    let memory_type = MemoryType::Host(Exportability::ByDescriptors);
    let lie = RegionDescriptor { memory_type, device: None, ..told };
    let policy = Policy::default();
    let bytes = lie.encode().unwrap();
    let joined = fixture.agent.join(peer_process.peer, &fixture.region, &bytes, &policy, TIMEOUT);
    let kind = joined.unwrap_err().kind();
    assert!(matches!(kind, ErrorKind::WrongMemory | ErrorKind::Malformed), "{kind:?}");
    fixture.end(peer_process);
}

#[test]
fn garbage_at_the_socket_harms_nobody() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let path = fixture.agent.card().socket.unwrap();
    let second = Duration::from_secs(1);
    let mut strangers = Vec::new();
    for length in [0, 1, 8, 40, 1000] {
        let channel = Channel::connect(&path, second).unwrap();
        channel.send(&vec![0xa5; length], &[], second).unwrap();
        let answer = channel.receive(TIMEOUT).unwrap();
        // A refusal of this version.
        assert!(answer.bytes.starts_with(&[1, 2]), "{:?}", answer.bytes);
    }
    // Many that say nothing at all.
    for _ in 0..200 {
        strangers.extend(Channel::connect(&path, second));
    }
    let peer_process = fixture.peer_process("shared", &[]);
    let route = fixture.join(&peer_process);
    let block = [Block { to: 0, from: 0, length: LENGTH }];
    let token = fixture.agent.put(&route, &block, None).unwrap();
    fixture.agent.wait(token, TIMEOUT).unwrap();
    assert_eq!(fixture.ask(&peer_process, SUM, 0), sum_of(LENGTH, 1));
    fixture.end(peer_process);
}

#[test]
fn a_card_that_lies_leads_nowhere() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let peer_process = fixture.peer_process("shared", &[]);
    let card = AgentCard::decode(&peer_process.card).unwrap();
    // Another agent than the one that was meant listens there.
    let lie = AgentCard { identity: [3; 16], ..card.clone() };
    let error = fixture.agent.connect(&lie.encode().unwrap(), TIMEOUT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Stale, "{error}");
    for length in 0..peer_process.card.len() {
        assert!(fixture.agent.connect(&peer_process.card[..length], TIMEOUT).is_err());
    }
    fixture.end(peer_process);
}

#[test]
fn regions_that_cannot_be_are_not_registered() {
    let _alone = alone();
    let fixture = AgentFixture::open();
    let memory = device().allocate_shared(LENGTH, &[]).unwrap();
    let none = Rights { read: false, write: false };
    let error = fixture.agent.register(&memory, none).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Malformed);
    // Host memory that only a device of this process knows stays here, and says so.
    let segment = ipc::Segment::create(ipc::Layout::new("test", 1), 1 << 20).unwrap();
    let pinned = transfer::pin(&segment, &device()).unwrap();
    let region = fixture.agent.register(&pinned, Rights::ALL).unwrap();
    let memory_type = MemoryType::Host(Exportability::Not(ExportObstacle::PrivateHostMemory));
    assert_eq!(region.descriptor().memory_type, memory_type);
}

/// Its owner does not give a descriptor by which it could be written.
#[test]
fn host_memory_without_the_right_to_write_cannot_be_mapped_for_writing() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let peer_process = fixture.peer_process("host-read-only", &[]);
    let told = RegionDescriptor::decode(&peer_process.descriptor).unwrap();
    let lie = RegionDescriptor { rights: Rights::ALL, ..told }.encode().unwrap();
    let policy = Policy::default();
    let joined = fixture.agent.join(peer_process.peer, &fixture.region, &lie, &policy, TIMEOUT);
    assert_eq!(joined.unwrap_err().kind(), ErrorKind::WrongMemory);
    let mine = HostBuffer::new(LENGTH).unwrap();
    let region = fixture.agent.register(&mine, Rights::ALL).unwrap();
    for (region, is_host) in [(&region, true), (&fixture.region, false)] {
        let (peer, descriptor) = (peer_process.peer, &peer_process.descriptor);
        let route = fixture.agent.join(peer, region, descriptor, &policy, TIMEOUT).unwrap();
        let whole = [Block { to: 0, from: 0, length: LENGTH }];
        let refused = fixture.agent.put(&route, &whole, None).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::NotAllowed);
        let token = fixture.agent.get(&route, &whole, None).unwrap();
        fixture.agent.wait(token, TIMEOUT).unwrap();
        let found =
            if is_host { sum_of_buffer(&(&mine).into()) } else { sum(&fixture.memory, LENGTH) };
        assert_eq!(found, sum_of(LENGTH, 0));
        // Nor is what is mapped for reading used by whoever claims more.
        let joined = fixture.agent.join(peer, region, &lie, &policy, TIMEOUT);
        assert_eq!(joined.unwrap_err().kind(), ErrorKind::WrongMemory);
    }
    fixture.end(peer_process);
}

/// Nor by another agent of the same process.
#[test]
fn rights_that_a_region_does_not_give_are_refused_within_a_process() {
    let _alone = alone();
    let mut here = Agent::start(AgentOptions::new("here")).unwrap();
    let there = Agent::start(AgentOptions::new("there")).unwrap();
    let mine = here.register(HostBuffer::new(LENGTH).unwrap(), Rights::ALL).unwrap();
    let theirs = there.register(HostBuffer::new(LENGTH).unwrap(), Rights::READ).unwrap();
    let peer = here.connect(&there.card().encode().unwrap(), TIMEOUT).unwrap();
    let told = theirs.descriptor().clone();
    let policy = Policy::default();
    let mut join = |rights| {
        let bytes = RegionDescriptor { rights, ..told.clone() }.encode().unwrap();
        here.join(peer, &mine, &bytes, &policy, TIMEOUT)
    };
    join(Rights::READ).unwrap();
    assert_eq!(join(Rights::ALL).unwrap_err().kind(), ErrorKind::NotAllowed);
}

/// Then the processor reads it, and hands it to the device.
#[test]
fn read_only_host_memory_is_got_by_devices_that_cannot_register_it() {
    let _alone = alone();
    if device().name().implementation != gpu::Implementation::Emulated {
        testkit::skip!("only stand-ins refuse what they are told to");
    }
    let mut fixture = AgentFixture::open();
    let peer_process = fixture.peer_process("host-read-only", &[]);
    gpu::emulated::refuse_read_only_registrations(0, true);
    let route = fixture.join(&peer_process);
    gpu::emulated::refuse_read_only_registrations(0, false);
    assert_eq!(route.path(), transfer::path::Path::SharedMemory, "{}", route.choice());
    for length in [LENGTH, 4096] {
        fill(&fixture.memory, LENGTH, 99);
        let token = fixture.agent.get(&route, &blocks_of(length), None).unwrap();
        fixture.agent.wait(token, TIMEOUT).unwrap();
        assert_eq!(sum(&fixture.memory, LENGTH), sum_of(LENGTH, 0));
    }
    fixture.end(peer_process);
}
