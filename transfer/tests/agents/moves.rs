//! Bytes arrive, by the expected path.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use gpu::{Block, CopyMethod};
use transfer::path::{Operation, Path, Policy};
use transfer::{Agent, AgentOptions, ErrorKind, Event, HostBuffer, Notice, Rights};

use crate::common::{LENGTH, LeakCheck, TIMEOUT, alone, device, numbers};
use crate::fixture::{AgentFixture, FILL, SUM, blocks_of, fill, metric, notice, sum, sum_of};

const WHOLE: [Block; 1] = [Block { to: 0, from: 0, length: LENGTH }];
/// The other side compares on this notice.
const COMPARE: u64 = 100;
/// With their own /proc, as containers have: CUDA does not start without.
const UNSHARE: [&str; 8] =
    ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--mount", "--ipc", "--net"];

/// Put and get, and put again in many blocks.
fn exchange(fixture: &mut AgentFixture, role: &str, wrapper: &[&str], path: Path) {
    let peer_process = fixture.peer_process(role, wrapper);
    let route = fixture.join(&peer_process);
    assert_eq!(route.path(), path, "{}", route.choice());
    assert_eq!(route.fallback().is_some(), path == Path::HostStaged);
    let bytes = || metric(&format!("path_bytes_total{{path=\"{path}\"}}"));
    let before = bytes();
    // Put: with the notice all bytes have arrived.
    for round in 1..4 {
        fill(&fixture.memory, LENGTH, round);
        let on_arrival = Some(notice(COMPARE, sum_of(LENGTH, round)));
        let token = fixture.agent.put(&route, &WHOLE, on_arrival).unwrap();
        let done = fixture.agent.wait(token, TIMEOUT).unwrap();
        assert_eq!((done.bytes, done.path), (LENGTH, Some(path)));
        assert_eq!(fixture.reply(), 1, "the other side has wrong bytes");
    }
    // Get.
    fixture.request(&peer_process, FILL, 77);
    let token = fixture.agent.get(&route, &WHOLE, None).unwrap();
    fixture.agent.wait(token, TIMEOUT).unwrap();
    assert_eq!(sum(&fixture.memory, LENGTH), sum_of(LENGTH, 77));
    // Put again, in blocks of 1 000 bytes, the last first, by every method.
    let blocks = blocks_of(1000);
    for (round, by) in
        [CopyMethod::Best, CopyMethod::CopyEngine, CopyMethod::Kernel].into_iter().enumerate()
    {
        let first = 1000 + round as u64;
        fill(&fixture.memory, LENGTH, first);
        let on_arrival = Some(notice(COMPARE, sum_of(LENGTH, first)));
        let token = fixture.agent.begin(Operation::Put, &route, &blocks, on_arrival, by).unwrap();
        fixture.agent.wait(token, TIMEOUT).unwrap();
        assert_eq!(fixture.reply(), 1, "the other side has wrong bytes by {by:?}");
    }
    assert_eq!(bytes() - before, 7 * LENGTH);
    fixture.end(peer_process);
}

#[test]
fn device_memory_is_transferred_between_processes() {
    let _alone = alone();
    exchange(&mut AgentFixture::open(), "shared", &[], Path::CudaIpc);
}

#[test]
fn device_memory_is_transferred_between_namespaces() {
    let _alone = alone();
    let works =
        Command::new("unshare").args(&UNSHARE[1..]).arg("true").stderr(Stdio::null()).status();
    if !works.is_ok_and(|status| status.success()) {
        testkit::skip!("namespaces cannot be created here");
    }
    exchange(&mut AgentFixture::open(), "shared", &UNSHARE, Path::CudaIpc);
}

#[test]
fn cuda_malloc_memory_is_transferred_if_the_device_exports_it() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    if device().properties().handle_types.legacy {
        exchange(&mut fixture, "plain", &[], Path::CudaIpc);
        return;
    }
    exchange(&mut fixture, "plain", &[], Path::HostStaged);
    let peer_process = fixture.peer_process("plain", &[]);
    let reasons = fixture.join(&peer_process).choice().reasons();
    assert!(reasons.contains("from cudaMalloc"), "{reasons}");
    testkit::skip::record(
        module_path!(),
        &format!("{} has no legacy handles: it was staged", device().name()),
    );
}

#[test]
fn adopted_memory_is_exported_in_pieces_or_staged() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    if device().name().implementation != gpu::Implementation::Emulated {
        testkit::skip!("other libraries are emulated on emulated devices only");
    }
    exchange(&mut fixture, "pieces", &[], Path::CudaIpc);
    exchange(&mut fixture, "long-pieces", &[], Path::CudaIpc);
    for (role, reason) in
        [("not-exportable", "without exportable handles"), ("pool", "stream-ordered")]
    {
        exchange(&mut fixture, role, &[], Path::HostStaged);
        let peer_process = fixture.peer_process(role, &[]);
        let reasons = fixture.join(&peer_process).choice().reasons();
        assert!(reasons.contains(reason), "{reasons}");
        fixture.end(peer_process);
    }
}

#[test]
fn device_memory_is_transferred_to_host_memory() {
    let _alone = alone();
    exchange(&mut AgentFixture::open(), "host", &[], Path::SharedMemory);
}

#[test]
fn host_memory_is_transferred_to_host_and_device_memory() {
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
        let on_arrival = Some(notice(COMPARE, sum_of(LENGTH, 5)));
        let token = fixture.agent.put(&route, &WHOLE, on_arrival).unwrap();
        fixture.agent.wait(token, TIMEOUT).unwrap();
        assert_eq!(fixture.reply(), 1);
        fixture.request(&peer_process, FILL, 6);
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
    let local = one.register(&from, Rights::READ).unwrap();
    let remote = two.register(&to, Rights::WRITE).unwrap();
    let peer = one.connect(&two.card().encode().unwrap(), TIMEOUT).unwrap();
    let descriptor = remote.descriptor().encode().unwrap();
    let route = one.join(peer, &local, &descriptor, &Policy::default(), TIMEOUT).unwrap();
    assert_eq!(route.path(), Path::SameProcess);
    let on_arrival = Some(Notice::new(3, b"x").unwrap());
    let token = one.put(&route, &WHOLE, on_arrival).unwrap();
    one.wait(token, TIMEOUT).unwrap();
    assert!(matches!(two.next_event(TIMEOUT).unwrap(), Event::Joined { .. }));
    let Event::Notice { from: sender, notice } = two.next_event(TIMEOUT).unwrap() else {
        panic!("a notice")
    };
    assert_eq!((sender, notice.tag, notice.data()), (one.card().identity, 3, &b"x"[..]));
    assert_eq!(sum(&to, LENGTH), sum_of(LENGTH, 9));
    // They disconnect.
    one.disconnect(peer, TIMEOUT).unwrap();
    assert!(matches!(two.next_event(TIMEOUT).unwrap(), Event::Left { is_dead: false, .. }));
    assert_eq!(one.put(&route, &WHOLE, None).unwrap_err().kind(), ErrorKind::Closed);
}

#[test]
fn many_notices_of_one_initiator_do_not_delay_others() {
    let _alone = alone();
    let mut host = Agent::start(AgentOptions::new("host")).unwrap();
    let card = host.card().encode().unwrap();
    let initiators = ["much", "little"].map(|label| {
        let mut agent = Agent::start(AgentOptions::new(label)).unwrap();
        let peer = agent.connect(&card, TIMEOUT).unwrap();
        (agent, peer)
    });
    let [(mut much, to), (mut little, from)] = initiators;
    for number in 0..500 {
        much.notify(to, notice(1, number)).unwrap();
    }
    little.notify(from, notice(2, 0)).unwrap();
    let events: Vec<_> = std::iter::from_fn(|| host.poll_event()).take(4).collect();
    let is_little =
        |event: &Event| matches!(event, Event::Notice { notice, .. } if notice.tag == 2);
    assert!(events.iter().any(is_little), "{events:?}");
}

#[test]
fn impossible_required_path_is_an_error_with_its_reason() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    if device().name().implementation != gpu::Implementation::Emulated {
        testkit::skip!("only emulated devices can disable peer access");
    }
    let peer_process = fixture.peer_process("shared", &[]);
    let apart = gpu::emulated::FaultConfig { are_peers: false, ..Default::default() };
    gpu::emulated::configure_faults(0, apart);
    let policy: Policy = "=cuda-ipc".parse().unwrap();
    let start = Instant::now();
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
    // Possible again.
    gpu::emulated::configure_faults(0, gpu::emulated::FaultConfig::default());
    fixture
        .agent
        .join(peer_process.peer, &fixture.region, &peer_process.descriptor, &policy, TIMEOUT)
        .unwrap();
    fixture.end(peer_process);
}

/// A program that computes between a put and its wait: the time is not taken for the copy's.
#[test]
fn late_wait_delays_no_later_one() {
    const COMPUTING: Duration = Duration::from_millis(400);
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let peer_process = fixture.peer_process("shared", &[]);
    let route = fixture.join(&peer_process);
    let mut quickest = Duration::MAX;
    for round in 0..5 {
        let begin = Instant::now();
        let token = fixture.agent.put(&route, &WHOLE, None).unwrap();
        if round < 2 {
            std::thread::sleep(COMPUTING);
        }
        fixture.agent.wait(token, TIMEOUT).unwrap();
        quickest = quickest.min(begin.elapsed());
    }
    assert!(quickest < COMPUTING / 4, "{quickest:?}");
    fixture.end(peer_process);
}

/// As with `CUDA_VISIBLE_DEVICES`: each process sees its own device only.
#[test]
fn memory_of_a_hidden_device_is_mapped() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    if device().name().implementation != gpu::Implementation::Emulated {
        testkit::skip!("only emulated devices can be hidden; gpu-tests hides others");
    }
    let peer_process = fixture.peer_process("shared", &[]);
    let policy = Policy::default();
    gpu::emulated::hide_device(1, true);
    fill(&fixture.memory, LENGTH, 5);
    let route = fixture.join(&peer_process);
    assert_eq!(route.path(), Path::CudaIpc, "{}", route.choice());
    let token = fixture.agent.put(&route, &WHOLE, None).unwrap();
    fixture.agent.wait(token, TIMEOUT).unwrap();
    assert_eq!(fixture.request(&peer_process, SUM, 0), sum_of(LENGTH, 5));
    fixture.request(&peer_process, FILL, 6);
    let token = fixture.agent.get(&route, &WHOLE, None).unwrap();
    fixture.agent.wait(token, TIMEOUT).unwrap();
    assert_eq!(sum(&fixture.memory, LENGTH), sum_of(LENGTH, 6));
    // Host memory is copied by a device of this process.
    let host = HostBuffer::new(LENGTH).unwrap();
    let region = fixture.agent.register(&host, Rights::ALL).unwrap();
    let descriptor = peer_process.descriptor.clone();
    let peer = peer_process.peer;
    let route = fixture.agent.join(peer, &region, &descriptor, &policy, TIMEOUT).unwrap();
    assert_eq!(route.path(), Path::CudaIpc, "{}", route.choice());
    let token = fixture.agent.get(&route, &WHOLE, None).unwrap();
    fixture.agent.wait(token, TIMEOUT).unwrap();
    let mut bytes = vec![0; LENGTH as usize];
    host.read(0, &mut bytes).unwrap();
    assert_eq!(gpu::checksum(&bytes), sum_of(LENGTH, 6));
    gpu::emulated::hide_device(1, false);
    fixture.end(peer_process);
}

/// As in a pod that has one GPU: the refusal is the reason of the table, and is not repeated.
#[test]
fn refused_mapping_of_a_hidden_device_is_a_reason() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    if device().name().implementation != gpu::Implementation::Emulated {
        testkit::skip!("only emulated devices can be hidden");
    }
    let peer_process = fixture.peer_process("shared", &[]);
    gpu::emulated::hide_device(1, true);
    let apart = gpu::emulated::FaultConfig { are_peers: false, ..Default::default() };
    gpu::emulated::configure_faults(0, apart);
    let (peer, descriptor) = (peer_process.peer, &peer_process.descriptor);
    let policy = Policy::default();
    for _ in 0..2 {
        let joined = fixture.agent.join(peer, &fixture.region, descriptor, &policy, TIMEOUT);
        let route = joined.unwrap();
        assert_eq!(route.path(), Path::HostStaged, "{}", route.choice());
        let expected = "this process does not see the peer's device, and the driver does not map \
                        its memory: import memory on emulated:0 failed: no peer access";
        assert!(route.choice().reasons().contains(expected), "{}", route.choice());
        // The driver would not refuse it again, but is not asked.
        gpu::emulated::configure_faults(0, gpu::emulated::FaultConfig::default());
    }
    gpu::emulated::hide_device(1, false);
    fixture.end(peer_process);
}

#[test]
fn joined_region_is_mapped_once_and_unmapped() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let peer_process = fixture.peer_process("shared", &[]);
    drop(fixture.join(&peer_process));
    let before = LeakCheck::begin(&device());
    let route = fixture.join(&peer_process);
    let once = LeakCheck::begin(&device());
    let others: Vec<_> = (0..10).map(|_| fixture.join(&peer_process)).collect();
    once.compare(&device());
    drop((route, others));
    before.compare(&device());
    assert_eq!(fixture.request(&peer_process, SUM, 0), sum_of(LENGTH, 0));
    fixture.end(peer_process);
}
