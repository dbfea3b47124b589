//! Agents without shared memory: by a fabric, directly or staged.

use std::time::Duration;

use fabric::{Caps, EndpointKind, Query};
use gpu::Block;
use transfer::path::{Path, Policy};
use transfer::{
    Agent, AgentOptions, Buffer, ErrorKind, Event, HostBuffer, Region, RegionDescriptor, Rights,
    Route,
};

use crate::common::{LENGTH, TIMEOUT, alone, device, numbers};
use crate::fixture::{
    AgentFixture, FILL, PeerProcess, SUM, WITHDRAW, blocks_of, fill_buffer, metric, notice, sum_of,
    sum_of_buffer, with_rails,
};

pub const WHOLE: [Block; 1] = [Block { to: 0, from: 0, length: LENGTH }];
/// The other side compares on this notice.
pub const COMPARE: u64 = 100;

/// RDM over tcp is named `net` before libfabric 1.18.
pub fn tcp() -> &'static str {
    let query = Query::new(EndpointKind::Rdm).caps(Caps::MESSAGE | Caps::RMA).provider("tcp");
    if query.source("127.0.0.1").first().is_ok() { "tcp" } else { "net" }
}

struct LocalMemory {
    region: Region,
    buffer: Buffer,
}

impl LocalMemory {
    fn new(fixture: &AgentFixture, is_host: bool) -> Self {
        let buffer: Buffer = if is_host {
            HostBuffer::new(LENGTH).unwrap().into()
        } else {
            device().allocate_shared(LENGTH, &[]).unwrap().into()
        };
        Self { region: fixture.agent.register(buffer.clone(), Rights::ALL).unwrap(), buffer }
    }

    fn fill(&self, first: u64) {
        fill_buffer(&self.buffer, first);
    }

    fn sum(&self) -> u64 {
        sum_of_buffer(&self.buffer)
    }

    fn join(&self, fixture: &mut AgentFixture, peer_process: &PeerProcess) -> Route {
        let (peer, policy) = (peer_process.peer, Policy::default());
        let descriptor = &peer_process.descriptor;
        fixture.agent.join(peer, &self.region, descriptor, &policy, TIMEOUT).unwrap()
    }
}

/// Put and get, and put again in many blocks, between all kinds of memory.
fn exchange(provider: &str, rails: usize) {
    let _alone = alone();
    let mut fixture = AgentFixture::open_remote(provider, rails);
    for (remote_role, is_remote_host) in [("host", true), ("shared", false)] {
        let role = format!("remote by {provider} {rails}: {remote_role}");
        let peer_process = fixture.peer_process(&role, &[]);
        for is_host in [true, false] {
            let local = LocalMemory::new(&fixture, is_host);
            let route = local.join(&mut fixture, &peer_process);
            let path =
                if is_host && is_remote_host { Path::FabricDirect } else { Path::FabricStaged };
            assert_eq!(route.path(), path, "{}", route.choice());
            for round in 1..4 {
                local.fill(round);
                let on_arrival = Some(notice(COMPARE, sum_of(LENGTH, round)));
                let token = fixture.agent.put(&route, &WHOLE, on_arrival).unwrap();
                let done = fixture.agent.wait(token, TIMEOUT).unwrap();
                assert_eq!((done.bytes, done.path), (LENGTH, Some(path)));
                assert_eq!(fixture.reply(), 1, "the other side has wrong bytes");
            }
            fixture.request(&peer_process, FILL, 77);
            let token = fixture.agent.get(&route, &WHOLE, None).unwrap();
            fixture.agent.wait(token, TIMEOUT).unwrap();
            assert_eq!(local.sum(), sum_of(LENGTH, 77));
            // Put again, in blocks of 10 000 bytes, the last first.
            let blocks = blocks_of(10_000);
            local.fill(1000);
            let on_arrival = Some(notice(COMPARE, sum_of(LENGTH, 1000)));
            let token = fixture.agent.put(&route, &blocks, on_arrival).unwrap();
            fixture.agent.wait(token, TIMEOUT).unwrap();
            assert_eq!(fixture.reply(), 1, "the other side has wrong bytes");
        }
        fixture.end(peer_process);
    }
}

#[test]
fn transfers_by_tcp() {
    exchange(tcp(), 1);
}

#[test]
fn transfers_by_several_rails() {
    exchange(tcp(), 3);
}

#[test]
fn transfers_by_rxm() {
    exchange("tcp;ofi_rxm", 1);
}

#[test]
fn transfers_by_shm() {
    exchange("shm", 1);
}

#[test]
fn a_thousand_notices_arrive_in_order() {
    let _alone = alone();
    let mut fixture = AgentFixture::open_remote(tcp(), 1);
    let peer_process = fixture.peer_process(&format!("remote by {} 1: host", tcp()), &[]);
    // Each is answered after a comparison: more than one window of notices.
    let sum = fixture.request(&peer_process, SUM, 0);
    let tokens: Vec<_> = (0..1000)
        .map(|_| fixture.agent.notify(peer_process.peer, notice(COMPARE, sum)).unwrap())
        .collect();
    for _ in &tokens {
        assert_eq!(fixture.reply(), 1);
    }
    for token in tokens {
        fixture.agent.wait(token, TIMEOUT).unwrap();
    }
    fixture.end(peer_process);
}

#[test]
fn killed_peer_fails_operations_and_the_next_one_works() {
    let _alone = alone();
    let mut fixture = AgentFixture::open_remote(tcp(), 1);
    let role = format!("remote by {} 1: host", tcp());
    let mut peer_process = fixture.peer_process(&role, &[]);
    let local = LocalMemory::new(&fixture, true);
    let route = local.join(&mut fixture, &peer_process);
    let tokens: Vec<_> =
        (0..1000).map(|_| fixture.agent.put(&route, &WHOLE, None).unwrap()).collect();
    peer_process.other.kill();
    let mut failed = 0;
    for token in tokens {
        match fixture.agent.wait(token, TIMEOUT) {
            Ok(_) => {}
            Err(error) => {
                assert_ne!(error.kind(), ErrorKind::DeadlineExceeded, "{error}");
                failed += 1;
            }
        }
    }
    assert!(failed > 0, "a thousand puts of 6 MiB completed before the kill");
    let refused = fixture.agent.put(&route, &WHOLE, None).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Closed, "{refused}");
    let next = fixture.peer_process(&role, &[]);
    let route = local.join(&mut fixture, &next);
    let token = fixture.agent.put(&route, &WHOLE, None).unwrap();
    fixture.agent.wait(token, TIMEOUT).unwrap();
    fixture.end(next);
}

#[test]
fn withdrawn_region_is_refused_after_its_operations_ended() {
    let _alone = alone();
    let mut fixture = AgentFixture::open_remote(tcp(), 1);
    for remote_role in ["host", "shared"] {
        let peer_process =
            fixture.peer_process(&format!("remote by {} 1: {remote_role}", tcp()), &[]);
        let local = LocalMemory::new(&fixture, true);
        let route = local.join(&mut fixture, &peer_process);
        local.fill(5);
        let tokens: Vec<_> =
            (0..20).map(|_| fixture.agent.put(&route, &WHOLE, None).unwrap()).collect();
        // The reply arrives when no operation uses it any more.
        assert_eq!(fixture.request(&peer_process, WITHDRAW, 0), 0);
        for token in tokens {
            if let Err(error) = fixture.agent.wait(token, TIMEOUT) {
                assert_eq!(error.kind(), ErrorKind::Stale, "{error}");
            }
        }
        let refused = fixture.agent.put(&route, &WHOLE, None).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Stale, "{refused}");
        let (peer, policy) = (peer_process.peer, Policy::default());
        let again =
            fixture.agent.join(peer, &local.region, &peer_process.descriptor, &policy, TIMEOUT);
        assert_eq!(again.unwrap_err().kind(), ErrorKind::Stale);
        fixture.end(peer_process);
    }
}

/// A false ticket does not close a region for its other users.
#[test]
fn join_with_a_false_ticket_is_refused_and_open_routes_stay() {
    let _alone = alone();
    let mut fixture = AgentFixture::open_remote(tcp(), 2);
    for remote_role in ["host", "shared"] {
        let peer_process =
            fixture.peer_process(&format!("remote by {} 2: {remote_role}", tcp()), &[]);
        let local = LocalMemory::new(&fixture, true);
        let good = RegionDescriptor::decode(&peer_process.descriptor).unwrap();
        let bad = RegionDescriptor { ticket: good.ticket ^ 1, ..good }.encode().unwrap();
        let refused = |fixture: &mut AgentFixture| {
            let policy = Policy::default();
            let refused =
                fixture.agent.join(peer_process.peer, &local.region, &bad, &policy, TIMEOUT);
            assert_eq!(refused.unwrap_err().kind(), ErrorKind::Stale);
        };
        // Before the region is known, and after.
        refused(&mut fixture);
        let route = local.join(&mut fixture, &peer_process);
        for round in 1..4 {
            refused(&mut fixture);
            local.fill(round);
            let on_arrival = Some(notice(COMPARE, sum_of(LENGTH, round)));
            let token = fixture.agent.put(&route, &WHOLE, on_arrival).unwrap();
            fixture.agent.wait(token, TIMEOUT).unwrap();
            assert_eq!(fixture.reply(), 1, "the other side has wrong bytes");
        }
        fixture.end(peer_process);
    }
}

#[test]
fn silent_peer_is_named_with_every_reason() {
    let _alone = alone();
    let mut fixture = AgentFixture::open_remote(tcp(), 1);
    let mut peer_process = fixture.peer_process(&format!("remote by {} 1: host", tcp()), &[]);
    peer_process.other.kill();
    let short = Duration::from_millis(300);
    let peer = fixture.agent.inspect(&peer_process.card, short).unwrap();
    let local = LocalMemory::new(&fixture, true);
    let policy = Policy::default();
    let error = fixture.agent.join(peer, &local.region, &peer_process.descriptor, &policy, short);
    let error = error.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoPath, "{error}");
    assert!(error.to_string().contains("fabric-direct: "), "{error}");
    let refused = fixture.agent.notify(peer, notice(1, 1)).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NoPath, "{refused}");
}

/// A preferred path is taken although memory is shared. If it is impossible, another one is taken,
/// and each transfer is counted.
#[test]
fn preferred_path_is_taken_or_counted_as_fallback() {
    let _alone = alone();
    let mut fixture = AgentFixture::open_with_rails(tcp(), 1);
    let peer_process = fixture.peer_process(&format!("shared by {} 1: host", tcp()), &[]);
    let local = LocalMemory::new(&fixture, true);
    let joined = |fixture: &mut AgentFixture, policy: &str| {
        let policy: Policy = policy.parse().unwrap();
        let descriptor = &peer_process.descriptor;
        fixture.agent.join(peer_process.peer, &local.region, descriptor, &policy, TIMEOUT).unwrap()
    };
    let preferred = joined(&mut fixture, "fabric-direct");
    assert_eq!((preferred.path(), preferred.fallback()), (Path::FabricDirect, None));
    // Nothing is to be staged: the best of the other paths is taken.
    let second_best = joined(&mut fixture, "fabric-staged");
    assert_eq!(second_best.path(), Path::SharedMemory, "{}", second_best.choice());
    let denied = joined(&mut fixture, "^shared-memory,^host-staged");
    assert_eq!((denied.path(), denied.fallback()), (Path::FabricDirect, None));
    for route in [preferred, second_best, denied] {
        local.fill(9);
        let on_arrival = Some(notice(COMPARE, sum_of(LENGTH, 9)));
        let token = fixture.agent.put(&route, &WHOLE, on_arrival).unwrap();
        assert_eq!(fixture.agent.wait(token, TIMEOUT).unwrap().path, Some(route.path()));
        assert_eq!(fixture.reply(), 1, "the other side has wrong bytes");
    }
    fixture.end(peer_process);
}

/// Device memory with a provider that does not register it: staged, reported, and counted each
/// time.
#[test]
fn staging_is_a_fallback_that_is_counted() {
    let _alone = alone();
    let mut fixture = AgentFixture::open_remote(tcp(), 1);
    let peer_process = fixture.peer_process(&format!("remote by {} 1: shared", tcp()), &[]);
    let local = LocalMemory::new(&fixture, false);
    let route = local.join(&mut fixture, &peer_process);
    assert_eq!(route.fallback(), Some("not-registered"), "{}", route.choice());
    let count = || metric("path_fallback_total{reason=\"not-registered\"}");
    let before = count();
    for _ in 0..3 {
        let token = fixture.agent.put(&route, &WHOLE, None).unwrap();
        fixture.agent.wait(token, TIMEOUT).unwrap();
    }
    assert_eq!(count() - before, 3);
    // A required path that is impossible is an error with its reason.
    let policy: Policy = "=fabric-direct".parse().unwrap();
    let descriptor = &peer_process.descriptor;
    let refused =
        fixture.agent.join(peer_process.peer, &local.region, descriptor, &policy, TIMEOUT);
    let refused = refused.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NoPath);
    assert!(refused.to_string().contains("does not reach the local memory"), "{refused}");
    fixture.end(peer_process);
}

/// Much garbage at an agent's address does not disturb it.
#[test]
fn garbage_at_a_rail_is_ignored() {
    let _alone = alone();
    let mut fixture = AgentFixture::open_remote(tcp(), 1);
    let card = fixture.agent.card();
    let address = fabric::Address(card.fabrics[0].address.clone());
    let query = Query::new(EndpointKind::Rdm).caps(Caps::MESSAGE | Caps::RMA).provider(tcp());
    let domain = fabric::Domain::open(&query.source("127.0.0.1").first().unwrap()).unwrap();
    let addresses = fabric::AddressVector::open(&domain).unwrap();
    let mut queue = fabric::CompletionQueue::open(&domain).unwrap();
    let mut endpoint =
        fabric::Endpoint::builder(&domain).addresses(&addresses).queue(&mut queue).open().unwrap();
    let target = addresses.insert(&address).unwrap();
    let memory = fabric::HostMemory::from_vec(numbers(16 << 10, 1)).unwrap();
    let region = domain.register(memory, fabric::Access::ALL).unwrap();
    for round in 0..300 {
        // Of all lengths, also longer than a message can be.
        let length = [0, 1, 17, 300, 4096, 5000, 16 << 10][round % 7];
        let part = region.slice(0..length).unwrap();
        let sent = endpoint.send(&mut queue, target, &part, round as u64);
        let _ = sent.and_then(|sent| queue.complete(sent, TIMEOUT));
    }
    let peer_process = fixture.peer_process(&format!("remote by {} 1: host", tcp()), &[]);
    let local = LocalMemory::new(&fixture, true);
    let route = local.join(&mut fixture, &peer_process);
    local.fill(3);
    let on_arrival = Some(notice(COMPARE, sum_of(LENGTH, 3)));
    let token = fixture.agent.put(&route, &WHOLE, on_arrival).unwrap();
    fixture.agent.wait(token, TIMEOUT).unwrap();
    assert_eq!(fixture.reply(), 1);
    fixture.end(peer_process);
}

/// Two agents with connections both ways, one of them twice: closing one does not affect the
/// others.
#[test]
fn disconnecting_one_way_does_not_affect_the_other() {
    let _alone = alone();
    let start = |label: &str| {
        let options = AgentOptions::new(label).force_remote();
        Agent::start(with_rails(options, tcp(), 1)).unwrap()
    };
    let (mut one, mut two) = (start("one"), start("two"));
    let cards = [&one, &two].map(|agent| agent.card().encode().unwrap());
    let outgoing = one.connect(&cards[1], TIMEOUT).unwrap();
    let again = one.connect(&cards[1], TIMEOUT).unwrap();
    let incoming = two.connect(&cards[0], TIMEOUT).unwrap();
    one.disconnect(again, TIMEOUT).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    let token = one.notify(outgoing, notice(1, 1)).unwrap();
    one.wait(token, TIMEOUT).unwrap();
    one.disconnect(outgoing, TIMEOUT).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    // The other connection still works, and carries bytes.
    let buffers = [(); 2].map(|()| HostBuffer::new(LENGTH).unwrap());
    buffers[0].write(0, &numbers(LENGTH, 5)).unwrap();
    let from = two.register(&buffers[0], Rights::ALL).unwrap();
    let to = one.register(&buffers[1], Rights::ALL).unwrap();
    let descriptor = to.descriptor().encode().unwrap();
    let route = two.join(incoming, &from, &descriptor, &Policy::default(), TIMEOUT).unwrap();
    let token = two.put(&route, &WHOLE, None).unwrap();
    two.wait(token, TIMEOUT).unwrap();
    let mut bytes = vec![0; LENGTH as usize];
    buffers[1].read(0, &mut bytes).unwrap();
    assert!(bytes == numbers(LENGTH, 5));
}

/// Operations in flight complete or fail when a peer is disconnected or the agent dropped, and no
/// process crashes.
fn disconnects_during_transfers(provider: &str) {
    let _alone = alone();
    // They outlive the agent, so that none is killed here.
    let mut neighbours = Vec::new();
    let mut fixture = AgentFixture::open_remote(provider, 1);
    for is_host in [true, false] {
        let peer_process = fixture.peer_process(&format!("remote by {provider} 1: host"), &[]);
        let local = LocalMemory::new(&fixture, is_host);
        let route = local.join(&mut fixture, &peer_process);
        let tokens: Vec<_> = (0..40)
            .map(|number| match number % 2 {
                0 => fixture.agent.put(&route, &WHOLE, None).unwrap(),
                _ => fixture.agent.get(&route, &WHOLE, None).unwrap(),
            })
            .collect();
        let _ = fixture.agent.disconnect(peer_process.peer, Duration::ZERO);
        for token in tokens {
            if let Err(error) = fixture.agent.wait(token, TIMEOUT) {
                assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
            }
        }
        assert_eq!(fixture.agent.in_flight(), 0);
        neighbours.push(peer_process);
    }
    let peer_process = fixture.peer_process(&format!("remote by {provider} 1: host"), &[]);
    let local = LocalMemory::new(&fixture, true);
    let route = local.join(&mut fixture, &peer_process);
    for _ in 0..40 {
        fixture.agent.put(&route, &WHOLE, None).unwrap();
    }
    drop(fixture);
}

#[test]
fn disconnect_during_transfers_by_tcp() {
    disconnects_during_transfers(tcp());
}

#[test]
fn disconnect_during_transfers_by_rxm() {
    disconnects_during_transfers("tcp;ofi_rxm");
}

#[test]
fn disconnect_during_transfers_by_shm() {
    disconnects_during_transfers("shm");
}

/// A peer killed during many transfers does not block others. (With shm it does: see
/// docs/reference/providers.md.)
fn others_continue(provider: &str) {
    let _alone = alone();
    let mut fixture = AgentFixture::open_remote(provider, 1);
    let role = format!("remote by {provider} 1: shared");
    let mut victim = fixture.peer_process(&role, &[]);
    let other = fixture.peer_process(&role, &[]);
    for is_host in [true, false] {
        let local = LocalMemory::new(&fixture, is_host);
        let route = local.join(&mut fixture, &victim);
        let tokens: Vec<_> =
            (0..60).map(|_| fixture.agent.put(&route, &WHOLE, None).unwrap()).collect();
        victim.other.kill();
        let to_other = local.join(&mut fixture, &other);
        local.fill(6);
        let on_arrival = Some(notice(COMPARE, sum_of(LENGTH, 6)));
        let token = fixture.agent.put(&to_other, &WHOLE, on_arrival).unwrap();
        fixture.agent.wait(token, TIMEOUT).unwrap();
        assert_eq!(fixture.reply(), 1);
        for token in tokens {
            let outcome = fixture.agent.wait(token, TIMEOUT);
            let is_late = outcome.is_err_and(|error| error.kind() == ErrorKind::DeadlineExceeded);
            assert!(!is_late, "the operation does not end");
        }
        // And again, after the loss is known.
        local.fill(8);
        let on_arrival = Some(notice(COMPARE, sum_of(LENGTH, 8)));
        let token = fixture.agent.put(&to_other, &WHOLE, on_arrival).unwrap();
        fixture.agent.wait(token, TIMEOUT).unwrap();
        assert_eq!(fixture.reply(), 1);
        victim = fixture.peer_process(&role, &[]);
    }
    fixture.end(victim);
    fixture.end(other);
}

#[test]
fn killed_peer_does_not_block_others_by_tcp() {
    others_continue(tcp());
}

#[test]
fn killed_peer_does_not_block_others_by_rxm() {
    others_continue("tcp;ofi_rxm");
}

/// Devices without peer access, and a policy that prefers it: the fabric carries the bytes, and
/// each transfer is counted with the reason.
#[test]
fn missing_peer_access_is_counted_as_fallback() {
    let _alone = alone();
    if device().name().implementation != gpu::Implementation::Emulated {
        testkit::skip!("only emulated devices can disable peer access");
    }
    let mut fixture = AgentFixture::open_with_rails(tcp(), 1);
    let peer_process = fixture.peer_process(&format!("shared by {} 1: shared", tcp()), &[]);
    let apart = gpu::emulated::FaultConfig { are_peers: false, ..Default::default() };
    gpu::emulated::configure_faults(0, apart);
    let local = LocalMemory::new(&fixture, false);
    let join = |fixture: &mut AgentFixture, policy: &str| {
        let (policy, descriptor): (Policy, _) = (policy.parse().unwrap(), &peer_process.descriptor);
        fixture.agent.join(peer_process.peer, &local.region, descriptor, &policy, TIMEOUT)
    };
    let refused = join(&mut fixture, "=cuda-ipc").unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NoPath);
    assert!(refused.to_string().contains("cannot reach each other"), "{refused}");
    for (policy, path) in
        [("cuda-ipc", Path::HostStaged), ("cuda-ipc,^host-staged", Path::FabricStaged)]
    {
        let route = join(&mut fixture, policy).unwrap();
        assert_eq!(route.path(), path, "{}", route.choice());
        let reason = route.fallback().unwrap();
        let count = || metric(&format!("path_fallback_total{{reason=\"{reason}\"}}"));
        assert_eq!(reason, "no-peer-access");
        let before = count();
        for round in 1..4 {
            local.fill(round);
            let on_arrival = Some(notice(COMPARE, sum_of(LENGTH, round)));
            let token = fixture.agent.put(&route, &WHOLE, on_arrival).unwrap();
            assert_eq!(fixture.agent.wait(token, TIMEOUT).unwrap().path, Some(path));
            assert_eq!(fixture.reply(), 1, "the other side has wrong bytes");
            assert_eq!(count() - before, round);
        }
    }
    gpu::emulated::configure_faults(0, gpu::emulated::FaultConfig::default());
    fixture.end(peer_process);
}

/// An infinite timeout, on one machine and by a fabric.
#[test]
fn timeouts_may_be_infinite() {
    const EVER: Duration = Duration::MAX;
    let _alone = alone();
    for is_remote in [false, true] {
        let start = |label: &str| {
            let options = AgentOptions::new(label).lost_after(EVER);
            let remote_options =
                |options: AgentOptions| with_rails(options.force_remote(), tcp(), 1);
            Agent::start(if is_remote { remote_options(options) } else { options }).unwrap()
        };
        let (mut here, mut there) = (start("here"), start("there"));
        let memory = || HostBuffer::new(LENGTH).unwrap();
        let local = here.register(memory(), Rights::ALL).unwrap();
        let remote = there.register(memory(), Rights::ALL).unwrap();
        let peer = here.connect(&there.card().encode().unwrap(), EVER).unwrap();
        here.connect_fabrics(peer, EVER).unwrap();
        let descriptor = remote.descriptor().encode().unwrap();
        let route = here.join(peer, &local, &descriptor, &Policy::default(), EVER).unwrap();
        let put = here.put(&route, &WHOLE, Some(notice(1, 2))).unwrap();
        here.wait(put, EVER).unwrap();
        while !matches!(there.next_event(EVER).unwrap(), Event::Notice { .. }) {}
        here.withdraw(&local, EVER).unwrap();
        here.disconnect(peer, EVER).unwrap();
    }
}
