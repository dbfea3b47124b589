//! Bytes arrive, by the path that was said.

use std::process::{Command, Stdio};

use gpu::{Block, CopyMethod};
use transfer::path::{Operation, Path, Policy};
use transfer::{Agent, AgentOptions, ErrorKind, Event, HostBuffer, Notice, Rights};

use crate::common::{LENGTH, LeakCheck, TIMEOUT, alone, device, numbers};
use crate::fixture::{AgentFixture, FILL, SUM, blocks_of, fill, metric, notice, sum, sum_of};

const WHOLE: [Block; 1] = [Block { to: 0, from: 0, length: LENGTH }];
/// Behind which the other side compares.
const COMPARE: u64 = 100;
/// With a /proc of their own, as containers have: CUDA does not start without.
const UNSHARE: [&str; 8] =
    ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--mount", "--ipc", "--net"];

/// There and back, and there again in many blocks.
fn exchange(fixture: &mut AgentFixture, role: &str, by_way_of: &[&str], path: Path) {
    let peer_process = fixture.peer_process(role, by_way_of);
    let route = fixture.join(&peer_process);
    assert_eq!((route.path(), route.fallback()), (path, None), "{}", route.choice());
    let bytes = || metric(&format!("path_bytes_total{{path=\"{path}\"}}"));
    let before = bytes();
    // There: with the notice everything is.
    for round in 1..4 {
        fill(&fixture.memory, LENGTH, round);
        let tell = Some(notice(COMPARE, sum_of(LENGTH, round)));
        let token = fixture.agent.put(&route, &WHOLE, tell).unwrap();
        let done = fixture.agent.wait(token, TIMEOUT).unwrap();
        assert_eq!((done.bytes, done.path), (LENGTH, Some(path)));
        assert_eq!(fixture.answer(), 1, "the other side saw other bytes");
    }
    // Back.
    fixture.ask(&peer_process, FILL, 77);
    let token = fixture.agent.get(&route, &WHOLE, None).unwrap();
    fixture.agent.wait(token, TIMEOUT).unwrap();
    assert_eq!(sum(&fixture.memory, LENGTH), sum_of(LENGTH, 77));
    // There again, in blocks of 1 000 bytes, the last first, by every means.
    let blocks = blocks_of(1000);
    for (round, by) in
        [CopyMethod::Best, CopyMethod::CopyEngine, CopyMethod::Kernel].into_iter().enumerate()
    {
        let first = 1000 + round as u64;
        fill(&fixture.memory, LENGTH, first);
        let tell = Some(notice(COMPARE, sum_of(LENGTH, first)));
        let token = fixture.agent.begin(Operation::Put, &route, &blocks, tell, by).unwrap();
        fixture.agent.wait(token, TIMEOUT).unwrap();
        assert_eq!(fixture.answer(), 1, "the other side saw other bytes by {by:?}");
    }
    assert_eq!(bytes() - before, 7 * LENGTH);
    fixture.end(peer_process);
}

#[test]
fn device_memory_goes_to_another_process_and_comes_back() {
    let _alone = alone();
    exchange(&mut AgentFixture::open(), "shared", &[], Path::CudaIpc);
}

#[test]
fn so_it_does_between_namespaces() {
    let _alone = alone();
    let works =
        Command::new("unshare").args(&UNSHARE[1..]).arg("true").stderr(Stdio::null()).status();
    if !works.is_ok_and(|status| status.success()) {
        testkit::skip!("no namespaces can be made here");
    }
    exchange(&mut AgentFixture::open(), "shared", &UNSHARE, Path::CudaIpc);
}

#[test]
fn plain_memory_goes_where_the_device_can() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    if device().properties().handle_types.legacy {
        exchange(&mut fixture, "plain", &[], Path::CudaIpc);
        return;
    }
    let peer_process = fixture.peer_process("plain", &[]);
    let policy = Policy::default();
    let joined = fixture.agent.join(
        peer_process.peer,
        &fixture.region,
        &peer_process.descriptor,
        &policy,
        TIMEOUT,
    );
    let error = joined.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoPath, "{error}");
    assert!(error.to_string().contains("from cudaMalloc"), "{error}");
    testkit::skip::record(
        module_path!(),
        &format!("{} has no legacy handles: only the refusal was tested", device().name()),
    );
}

#[test]
fn memory_of_another_library_goes_in_its_pieces() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    if device().name().implementation != gpu::Implementation::Emulated {
        testkit::skip!("other libraries are played on the emulated only");
    }
    exchange(&mut fixture, "pieces", &[], Path::CudaIpc);
    exchange(&mut fixture, "long-pieces", &[], Path::CudaIpc);
    for (role, reason) in
        [("not-exportable", "not made to be exported"), ("pool", "stream-ordered")]
    {
        let peer_process = fixture.peer_process(role, &[]);
        let (peer, policy) = (peer_process.peer, Policy::default());
        let joined =
            fixture.agent.join(peer, &fixture.region, &peer_process.descriptor, &policy, TIMEOUT);
        let error = joined.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NoPath);
        assert!(error.to_string().contains(reason), "{error}");
    }
}

#[test]
fn host_memory_is_reached_by_devices() {
    let _alone = alone();
    exchange(&mut AgentFixture::open(), "host", &[], Path::SharedMemory);
}

#[test]
fn host_memory_goes_to_host_memory_and_to_devices() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let host = HostBuffer::new(LENGTH).unwrap();
    let region = fixture.agent.register(&host, Rights::ALL).unwrap();
    for (role, path) in [("host", Path::SharedMemory), ("shared", Path::CudaIpc)] {
        let peer_process = fixture.peer_process(role, &[]);
        let (peer, policy) = (peer_process.peer, Policy::default());
        let joined = fixture.agent.join(peer, &region, &peer_process.descriptor, &policy, TIMEOUT);
        let route = joined.unwrap();
        assert_eq!(route.path(), path, "{}", route.choice());
        host.write(0, &numbers(LENGTH, 5)).unwrap();
        let tell = Some(notice(COMPARE, sum_of(LENGTH, 5)));
        let token = fixture.agent.put(&route, &WHOLE, tell).unwrap();
        fixture.agent.wait(token, TIMEOUT).unwrap();
        assert_eq!(fixture.answer(), 1);
        fixture.ask(&peer_process, FILL, 6);
        let token = fixture.agent.get(&route, &WHOLE, None).unwrap();
        fixture.agent.wait(token, TIMEOUT).unwrap();
        let mut bytes = vec![0; LENGTH as usize];
        host.read(0, &mut bytes).unwrap();
        assert_eq!(bytes, numbers(LENGTH, 6));
        fixture.end(peer_process);
    }
}

#[test]
fn agents_of_one_process_need_no_socket() {
    let _alone = alone();
    let mut one = Agent::start(AgentOptions::new("one")).unwrap();
    let mut two = Agent::start(AgentOptions::new("two")).unwrap();
    let [from, to] = [1, 2].map(|_| device().allocate_shared(LENGTH, &[]).unwrap());
    fill(&from, LENGTH, 9);
    let mine = one.register(&from, Rights::READ).unwrap();
    let theirs = two.register(&to, Rights::WRITE).unwrap();
    let peer = one.connect(&two.card().encode().unwrap(), TIMEOUT).unwrap();
    let descriptor = theirs.descriptor().encode().unwrap();
    let route = one.join(peer, &mine, &descriptor, &Policy::default(), TIMEOUT).unwrap();
    assert_eq!(route.path(), Path::SameProcess);
    let tell = Some(Notice::new(3, b"x").unwrap());
    let token = one.put(&route, &WHOLE, tell).unwrap();
    one.wait(token, TIMEOUT).unwrap();
    assert!(matches!(two.next_event(TIMEOUT).unwrap(), Event::Joined { .. }));
    let Event::Notice { from: who, notice } = two.next_event(TIMEOUT).unwrap() else {
        panic!("a notice")
    };
    assert_eq!((who, notice.tag, notice.data()), (one.card().identity, 3, &b"x"[..]));
    assert_eq!(sum(&to, LENGTH), sum_of(LENGTH, 9));
    // They come and go.
    one.disconnect(peer, TIMEOUT).unwrap();
    assert!(matches!(two.next_event(TIMEOUT).unwrap(), Event::Left { is_dead: false, .. }));
    assert_eq!(one.put(&route, &WHOLE, None).unwrap_err().kind(), ErrorKind::Closed);
}

#[test]
fn one_that_says_much_does_not_keep_others_from_being_heard() {
    let _alone = alone();
    let mut host = Agent::start(AgentOptions::new("host")).unwrap();
    let card = host.card().encode().unwrap();
    let visitors = ["much", "little"].map(|label| {
        let mut agent = Agent::start(AgentOptions::new(label)).unwrap();
        let peer = agent.connect(&card, TIMEOUT).unwrap();
        (agent, peer)
    });
    let [(mut much, to), (mut little, from)] = visitors;
    for number in 0..500 {
        much.notify(to, notice(1, number)).unwrap();
    }
    little.notify(from, notice(2, 0)).unwrap();
    let heard: Vec<_> = std::iter::from_fn(|| host.poll_event()).take(4).collect();
    let is_little =
        |event: &Event| matches!(event, Event::Notice { notice, .. } if notice.tag == 2);
    assert!(heard.iter().any(is_little), "{heard:?}");
}

#[test]
fn a_required_path_that_cannot_be_had_is_an_error_with_its_reason() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    if device().name().implementation != gpu::Implementation::Emulated {
        testkit::skip!("only stand-ins can be told not to reach each other");
    }
    let peer_process = fixture.peer_process("shared", &[]);
    let apart = gpu::emulated::FaultConfig { are_peers: false, ..Default::default() };
    gpu::emulated::configure_faults(0, apart);
    let policy: Policy = "=cuda-ipc".parse().unwrap();
    let start = std::time::Instant::now();
    let joined = fixture.agent.join(
        peer_process.peer,
        &fixture.region,
        &peer_process.descriptor,
        &policy,
        TIMEOUT,
    );
    let error = joined.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoPath);
    assert!(error.to_string().contains("cannot reach each other"), "{error}");
    assert!(start.elapsed() < TIMEOUT);
    // And again when they can.
    gpu::emulated::configure_faults(0, gpu::emulated::FaultConfig::default());
    fixture
        .agent
        .join(peer_process.peer, &fixture.region, &peer_process.descriptor, &policy, TIMEOUT)
        .unwrap();
    fixture.end(peer_process);
}

#[test]
fn what_was_joined_is_mapped_once_and_let_go_of() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let peer_process = fixture.peer_process("shared", &[]);
    drop(fixture.join(&peer_process));
    let before = LeakCheck::now(&device());
    let route = fixture.join(&peer_process);
    let once = LeakCheck::now(&device());
    let others: Vec<_> = (0..10).map(|_| fixture.join(&peer_process)).collect();
    once.compare(&device());
    drop((route, others));
    before.compare(&device());
    assert_eq!(fixture.ask(&peer_process, SUM, 0), sum_of(LENGTH, 0));
    fixture.end(peer_process);
}
