//! Agents that share no memory: by a fabric, directly or by way of the host.

use std::time::Duration;

use fabric::{Caps, EndpointKind, Query};
use gpu::Block;
use transfer::path::{Path, Policy};
use transfer::{
    Agent, AgentOptions, Buffer, ErrorKind, Event, HostBuffer, Region, RegionDescriptor, Rights,
    Route,
};

use crate::common::{LENGTH, PATIENCE, alone, device, numbers};
use crate::house::{
    FILL, House, Neighbour, SUM, WITHDRAW, blocks_of, fill_buffer, metric, notice, sum_of,
    sum_of_buffer, with_rails,
};

pub const WHOLE: [Block; 1] = [Block { to: 0, from: 0, length: LENGTH }];
/// Behind which the other side compares.
pub const COMPARE: u64 = 100;

/// RDM over tcp is called `net` before libfabric 1.18.
pub fn tcp() -> &'static str {
    let query = Query::new(EndpointKind::Rdm).caps(Caps::MESSAGE | Caps::RMA).provider("tcp");
    if query.source("127.0.0.1").first().is_ok() { "tcp" } else { "net" }
}

struct Mine {
    region: Region,
    buffer: Buffer,
}

impl Mine {
    fn new(house: &House, is_host: bool) -> Self {
        let buffer: Buffer = if is_host {
            HostBuffer::new(LENGTH).unwrap().into()
        } else {
            device().allocate_shared(LENGTH, &[]).unwrap().into()
        };
        Self { region: house.agent.register(buffer.clone(), Rights::ALL).unwrap(), buffer }
    }

    fn fill(&self, first: u64) {
        fill_buffer(&self.buffer, first);
    }

    fn sum(&self) -> u64 {
        sum_of_buffer(&self.buffer)
    }

    fn join(&self, house: &mut House, neighbour: &Neighbour) -> Route {
        let (peer, policy) = (neighbour.peer, Policy::default());
        let descriptor = &neighbour.descriptor;
        house.agent.join(peer, &self.region, descriptor, &policy, PATIENCE).unwrap()
    }
}

/// There and back, and there again in many blocks, from all kinds of memory to all kinds.
fn exchange(provider: &str, rails: usize) {
    let _alone = alone();
    let mut house = House::open_far(provider, rails);
    for (theirs, is_theirs_host) in [("host", true), ("shared", false)] {
        let role = format!("far by {provider} {rails}: {theirs}");
        let neighbour = house.neighbour(&role, &[]);
        for is_host in [true, false] {
            let mine = Mine::new(&house, is_host);
            let route = mine.join(&mut house, &neighbour);
            let path =
                if is_host && is_theirs_host { Path::FabricDirect } else { Path::FabricStaged };
            assert_eq!(route.path(), path, "{}", route.choice());
            for round in 1..4 {
                mine.fill(round);
                let tell = Some(notice(COMPARE, sum_of(LENGTH, round)));
                let token = house.agent.put(&route, &WHOLE, tell).unwrap();
                let done = house.agent.wait(token, PATIENCE).unwrap();
                assert_eq!((done.bytes, done.path), (LENGTH, Some(path)));
                assert_eq!(house.answer(), 1, "the other side saw other bytes");
            }
            house.ask(&neighbour, FILL, 77);
            let token = house.agent.get(&route, &WHOLE, None).unwrap();
            house.agent.wait(token, PATIENCE).unwrap();
            assert_eq!(mine.sum(), sum_of(LENGTH, 77));
            // There again, in blocks of 10 000 bytes, the last first.
            let blocks = blocks_of(10_000);
            mine.fill(1000);
            let tell = Some(notice(COMPARE, sum_of(LENGTH, 1000)));
            let token = house.agent.put(&route, &blocks, tell).unwrap();
            house.agent.wait(token, PATIENCE).unwrap();
            assert_eq!(house.answer(), 1, "the other side saw other bytes");
        }
        house.end(neighbour);
    }
}

#[test]
fn by_tcp() {
    exchange(tcp(), 1);
}

#[test]
fn by_several_rails() {
    exchange(tcp(), 3);
}

#[test]
fn by_rxm() {
    exchange("tcp;ofi_rxm", 1);
}

#[test]
fn by_shm() {
    exchange("shm", 1);
}

#[test]
fn a_thousand_notices_come_in_order() {
    let _alone = alone();
    let mut house = House::open_far(tcp(), 1);
    let neighbour = house.neighbour(&format!("far by {} 1: host", tcp()), &[]);
    // Each is answered with what it said of the sum: more than one window of them.
    let sum = house.ask(&neighbour, SUM, 0);
    let tokens: Vec<_> = (0..1000)
        .map(|_| house.agent.notify(neighbour.peer, notice(COMPARE, sum)).unwrap())
        .collect();
    for _ in &tokens {
        assert_eq!(house.answer(), 1);
    }
    for token in tokens {
        house.agent.wait(token, PATIENCE).unwrap();
    }
    house.end(neighbour);
}

#[test]
fn a_killed_peer_ends_what_is_under_way_and_the_next_one_works() {
    let _alone = alone();
    let mut house = House::open_far(tcp(), 1);
    let role = format!("far by {} 1: host", tcp());
    let mut neighbour = house.neighbour(&role, &[]);
    let mine = Mine::new(&house, true);
    let route = mine.join(&mut house, &neighbour);
    let tokens: Vec<_> =
        (0..1000).map(|_| house.agent.put(&route, &WHOLE, None).unwrap()).collect();
    neighbour.other.kill();
    let mut failed = 0;
    for token in tokens {
        match house.agent.wait(token, PATIENCE) {
            Ok(_) => {}
            Err(error) => {
                assert_ne!(error.kind(), ErrorKind::DeadlineExceeded, "{error}");
                failed += 1;
            }
        }
    }
    assert!(failed > 0, "a thousand puts of 6 MiB were through before the kill");
    let refused = house.agent.put(&route, &WHOLE, None).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Closed, "{refused}");
    let next = house.neighbour(&role, &[]);
    let route = mine.join(&mut house, &next);
    let token = house.agent.put(&route, &WHOLE, None).unwrap();
    house.agent.wait(token, PATIENCE).unwrap();
    house.end(next);
}

#[test]
fn a_region_that_is_withdrawn_is_refused_and_what_was_begun_is_waited_for() {
    let _alone = alone();
    let mut house = House::open_far(tcp(), 1);
    for theirs in ["host", "shared"] {
        let neighbour = house.neighbour(&format!("far by {} 1: {theirs}", tcp()), &[]);
        let mine = Mine::new(&house, true);
        let route = mine.join(&mut house, &neighbour);
        mine.fill(5);
        let tokens: Vec<_> =
            (0..20).map(|_| house.agent.put(&route, &WHOLE, None).unwrap()).collect();
        // The answer comes when nothing is under way with it any more.
        assert_eq!(house.ask(&neighbour, WITHDRAW, 0), 0);
        for token in tokens {
            if let Err(error) = house.agent.wait(token, PATIENCE) {
                assert_eq!(error.kind(), ErrorKind::Stale, "{error}");
            }
        }
        let refused = house.agent.put(&route, &WHOLE, None).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Stale, "{refused}");
        let (peer, policy) = (neighbour.peer, Policy::default());
        let again = house.agent.join(peer, &mine.region, &neighbour.descriptor, &policy, PATIENCE);
        assert_eq!(again.unwrap_err().kind(), ErrorKind::Stale);
        house.end(neighbour);
    }
}

/// Who asks with a ticket that was not given does not take the region from those that have it.
#[test]
fn a_join_with_another_ticket_is_refused_and_open_routes_stay() {
    let _alone = alone();
    let mut house = House::open_far(tcp(), 2);
    for theirs in ["host", "shared"] {
        let neighbour = house.neighbour(&format!("far by {} 2: {theirs}", tcp()), &[]);
        let mine = Mine::new(&house, true);
        let good = RegionDescriptor::decode(&neighbour.descriptor).unwrap();
        let bad = RegionDescriptor { ticket: good.ticket ^ 1, ..good }.encode().unwrap();
        let refused = |house: &mut House| {
            let policy = Policy::default();
            let refused = house.agent.join(neighbour.peer, &mine.region, &bad, &policy, PATIENCE);
            assert_eq!(refused.unwrap_err().kind(), ErrorKind::Stale);
        };
        // Before the region is known, and when it is.
        refused(&mut house);
        let route = mine.join(&mut house, &neighbour);
        for round in 1..4 {
            refused(&mut house);
            mine.fill(round);
            let tell = Some(notice(COMPARE, sum_of(LENGTH, round)));
            let token = house.agent.put(&route, &WHOLE, tell).unwrap();
            house.agent.wait(token, PATIENCE).unwrap();
            assert_eq!(house.answer(), 1, "the other side saw other bytes");
        }
        house.end(neighbour);
    }
}

#[test]
fn who_does_not_answer_is_named_with_every_reason() {
    let _alone = alone();
    let mut house = House::open_far(tcp(), 1);
    let mut neighbour = house.neighbour(&format!("far by {} 1: host", tcp()), &[]);
    neighbour.other.kill();
    let short = Duration::from_millis(300);
    let peer = house.agent.inspect(&neighbour.card, short).unwrap();
    let mine = Mine::new(&house, true);
    let policy = Policy::default();
    let error = house.agent.join(peer, &mine.region, &neighbour.descriptor, &policy, short);
    let error = error.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoPath, "{error}");
    assert!(error.to_string().contains("fabric-direct: "), "{error}");
    let refused = house.agent.notify(peer, notice(1, 1)).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NoPath, "{refused}");
}

/// What is preferred is taken though memory is shared; where it cannot be had, another path is,
/// and each transfer by it is counted.
#[test]
fn a_preferred_path_is_taken_or_fallen_back_from() {
    let _alone = alone();
    let mut house = House::open_beside(tcp(), 1);
    let neighbour = house.neighbour(&format!("beside by {} 1: host", tcp()), &[]);
    let mine = Mine::new(&house, true);
    let joined = |house: &mut House, policy: &str| {
        let policy: Policy = policy.parse().unwrap();
        let descriptor = &neighbour.descriptor;
        house.agent.join(neighbour.peer, &mine.region, descriptor, &policy, PATIENCE).unwrap()
    };
    let wanted = joined(&mut house, "fabric-direct");
    assert_eq!((wanted.path(), wanted.fallback()), (Path::FabricDirect, None));
    // Nothing is to be staged; what is taken then is the best of the others.
    let instead = joined(&mut house, "fabric-staged");
    assert_eq!(instead.path(), Path::SharedMemory, "{}", instead.choice());
    let denied = joined(&mut house, "^shared-memory");
    assert_eq!((denied.path(), denied.fallback()), (Path::FabricDirect, None));
    for route in [wanted, instead, denied] {
        mine.fill(9);
        let tell = Some(notice(COMPARE, sum_of(LENGTH, 9)));
        let token = house.agent.put(&route, &WHOLE, tell).unwrap();
        assert_eq!(house.agent.wait(token, PATIENCE).unwrap().path, Some(route.path()));
        assert_eq!(house.answer(), 1, "the other side saw other bytes");
    }
    house.end(neighbour);
}

/// Memory of a device by a provider that does not reach it: staged, said so, and counted each time.
#[test]
fn staging_is_a_fallback_that_is_counted() {
    let _alone = alone();
    let mut house = House::open_far(tcp(), 1);
    let neighbour = house.neighbour(&format!("far by {} 1: shared", tcp()), &[]);
    let mine = Mine::new(&house, false);
    let route = mine.join(&mut house, &neighbour);
    assert_eq!(route.fallback(), Some("not-registered"), "{}", route.choice());
    let count = || metric("path_fallback_total{reason=\"not-registered\"}");
    let before = count();
    for _ in 0..3 {
        let token = house.agent.put(&route, &WHOLE, None).unwrap();
        house.agent.wait(token, PATIENCE).unwrap();
    }
    assert_eq!(count() - before, 3);
    // What is required and cannot be had is an error, with the reason.
    let policy: Policy = "=fabric-direct".parse().unwrap();
    let descriptor = &neighbour.descriptor;
    let refused = house.agent.join(neighbour.peer, &mine.region, descriptor, &policy, PATIENCE);
    let refused = refused.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NoPath);
    assert!(refused.to_string().contains("does not reach the local memory"), "{refused}");
    house.end(neighbour);
}

/// One that sends garbage, and much of it, to an agent's address does not disturb it.
#[test]
fn garbage_at_a_rail_is_left_aside() {
    let _alone = alone();
    let mut house = House::open_far(tcp(), 1);
    let card = house.agent.card();
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
        let _ = sent.and_then(|sent| queue.complete(sent, PATIENCE));
    }
    let neighbour = house.neighbour(&format!("far by {} 1: host", tcp()), &[]);
    let mine = Mine::new(&house, true);
    let route = mine.join(&mut house, &neighbour);
    mine.fill(3);
    let tell = Some(notice(COMPARE, sum_of(LENGTH, 3)));
    let token = house.agent.put(&route, &WHOLE, tell).unwrap();
    house.agent.wait(token, PATIENCE).unwrap();
    assert_eq!(house.answer(), 1);
    house.end(neighbour);
}

/// Two agents know each other both ways, one of them twice: what is left does not touch the rest.
#[test]
fn leaving_one_way_does_not_touch_the_other() {
    let _alone = alone();
    let start = |label: &str| {
        let options = AgentOptions::new(label).take_all_for_remote();
        Agent::start(with_rails(options, tcp(), 1)).unwrap()
    };
    let (mut one, mut two) = (start("one"), start("two"));
    let cards = [&one, &two].map(|agent| agent.card().encode().unwrap());
    let forth = one.connect(&cards[1], PATIENCE).unwrap();
    let again = one.connect(&cards[1], PATIENCE).unwrap();
    let back = two.connect(&cards[0], PATIENCE).unwrap();
    one.disconnect(again, PATIENCE).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    let token = one.notify(forth, notice(1, 1)).unwrap();
    one.wait(token, PATIENCE).unwrap();
    one.disconnect(forth, PATIENCE).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    // The other way is still there, and carries bytes.
    let buffers = [(); 2].map(|()| HostBuffer::new(LENGTH).unwrap());
    buffers[0].write(0, &numbers(LENGTH, 5)).unwrap();
    let from = two.register(&buffers[0], Rights::ALL).unwrap();
    let to = one.register(&buffers[1], Rights::ALL).unwrap();
    let descriptor = to.descriptor().encode().unwrap();
    let route = two.join(back, &from, &descriptor, &Policy::default(), PATIENCE).unwrap();
    let token = two.put(&route, &WHOLE, None).unwrap();
    two.wait(token, PATIENCE).unwrap();
    let mut bytes = vec![0; LENGTH as usize];
    buffers[1].read(0, &mut bytes).unwrap();
    assert!(bytes == numbers(LENGTH, 5));
}

/// What is under way when a peer is left, or the agent is dropped, comes to its end: with success or
/// an error, and nothing crashes.
fn leaves_in_the_middle(provider: &str) {
    let _alone = alone();
    // They outlive the agent: what is left alone here is not killed.
    let mut neighbours = Vec::new();
    let mut house = House::open_far(provider, 1);
    for is_host in [true, false] {
        let neighbour = house.neighbour(&format!("far by {provider} 1: host"), &[]);
        let mine = Mine::new(&house, is_host);
        let route = mine.join(&mut house, &neighbour);
        let tokens: Vec<_> = (0..40)
            .map(|number| match number % 2 {
                0 => house.agent.put(&route, &WHOLE, None).unwrap(),
                _ => house.agent.get(&route, &WHOLE, None).unwrap(),
            })
            .collect();
        let _ = house.agent.disconnect(neighbour.peer, Duration::ZERO);
        for token in tokens {
            if let Err(error) = house.agent.wait(token, PATIENCE) {
                assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
            }
        }
        assert_eq!(house.agent.under_way(), 0);
        neighbours.push(neighbour);
    }
    let neighbour = house.neighbour(&format!("far by {provider} 1: host"), &[]);
    let mine = Mine::new(&house, true);
    let route = mine.join(&mut house, &neighbour);
    for _ in 0..40 {
        house.agent.put(&route, &WHOLE, None).unwrap();
    }
    drop(house);
}

#[test]
fn tcp_is_left_in_the_middle() {
    leaves_in_the_middle(tcp());
}

#[test]
fn rxm_is_left_in_the_middle() {
    leaves_in_the_middle("tcp;ofi_rxm");
}

#[test]
fn shm_is_left_in_the_middle() {
    leaves_in_the_middle("shm");
}

/// One that is killed in the middle of much does not hold up others. (On shm it does: see
/// docs/providers.md.)
fn others_go_on(provider: &str) {
    let _alone = alone();
    let mut house = House::open_far(provider, 1);
    let role = format!("far by {provider} 1: shared");
    let mut victim = house.neighbour(&role, &[]);
    let other = house.neighbour(&role, &[]);
    for is_host in [true, false] {
        let mine = Mine::new(&house, is_host);
        let route = mine.join(&mut house, &victim);
        let tokens: Vec<_> =
            (0..60).map(|_| house.agent.put(&route, &WHOLE, None).unwrap()).collect();
        victim.other.kill();
        let to_other = mine.join(&mut house, &other);
        mine.fill(6);
        let tell = Some(notice(COMPARE, sum_of(LENGTH, 6)));
        let token = house.agent.put(&to_other, &WHOLE, tell).unwrap();
        house.agent.wait(token, PATIENCE).unwrap();
        assert_eq!(house.answer(), 1);
        for token in tokens {
            let outcome = house.agent.wait(token, PATIENCE);
            let is_late = outcome.is_err_and(|error| error.kind() == ErrorKind::DeadlineExceeded);
            assert!(!is_late, "it has no end");
        }
        // And once more, when the first is known to be lost.
        mine.fill(8);
        let tell = Some(notice(COMPARE, sum_of(LENGTH, 8)));
        let token = house.agent.put(&to_other, &WHOLE, tell).unwrap();
        house.agent.wait(token, PATIENCE).unwrap();
        assert_eq!(house.answer(), 1);
        victim = house.neighbour(&role, &[]);
    }
    house.end(victim);
    house.end(other);
}

#[test]
fn others_go_on_by_tcp_when_one_is_killed() {
    others_go_on(tcp());
}

#[test]
fn others_go_on_by_rxm_when_one_is_killed() {
    others_go_on("tcp;ofi_rxm");
}

/// Devices that cannot reach each other, and the policy that prefers that they do: the bytes go by
/// the fabric, and each transfer is counted, with the reason.
#[test]
fn without_peer_access_the_preferred_path_is_fallen_back_from() {
    let _alone = alone();
    if device().name().implementation != gpu::Implementation::StandIn {
        testkit::skip!("only stand-ins can be told not to reach each other");
    }
    let mut house = House::open_beside(tcp(), 1);
    let neighbour = house.neighbour(&format!("beside by {} 1: shared", tcp()), &[]);
    let apart = gpu::stand_in::Behaviour { are_peers: false, ..Default::default() };
    gpu::stand_in::behave(0, apart);
    let mine = Mine::new(&house, false);
    let join = |house: &mut House, policy: &str| {
        let (policy, descriptor): (Policy, _) = (policy.parse().unwrap(), &neighbour.descriptor);
        house.agent.join(neighbour.peer, &mine.region, descriptor, &policy, PATIENCE)
    };
    let refused = join(&mut house, "=cuda-ipc").unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NoPath);
    assert!(refused.to_string().contains("cannot reach each other"), "{refused}");
    let route = join(&mut house, "cuda-ipc").unwrap();
    assert_eq!(route.path(), Path::FabricStaged, "{}", route.choice());
    let reason = route.fallback().unwrap();
    let count = || metric(&format!("path_fallback_total{{reason=\"{reason}\"}}"));
    assert_eq!(reason, "no-peer-access");
    let before = count();
    for round in 1..4 {
        mine.fill(round);
        let tell = Some(notice(COMPARE, sum_of(LENGTH, round)));
        let token = house.agent.put(&route, &WHOLE, tell).unwrap();
        assert_eq!(house.agent.wait(token, PATIENCE).unwrap().path, Some(Path::FabricStaged));
        assert_eq!(house.answer(), 1, "the other side saw other bytes");
        assert_eq!(count() - before, round);
    }
    gpu::stand_in::behave(0, gpu::stand_in::Behaviour::default());
    house.end(neighbour);
}

/// For ever is the caller's wish: on one machine, and by a fabric.
#[test]
fn patience_may_be_endless() {
    const EVER: Duration = Duration::MAX;
    let _alone = alone();
    for is_far in [false, true] {
        let start = |label: &str| {
            let options = AgentOptions::new(label).lost_after(EVER);
            let far = |options: AgentOptions| with_rails(options.take_all_for_remote(), tcp(), 1);
            Agent::start(if is_far { far(options) } else { options }).unwrap()
        };
        let (mut here, mut there) = (start("here"), start("there"));
        let memory = || HostBuffer::new(LENGTH).unwrap();
        let mine = here.register(memory(), Rights::ALL).unwrap();
        let theirs = there.register(memory(), Rights::ALL).unwrap();
        let peer = here.connect(&there.card().encode().unwrap(), EVER).unwrap();
        here.try_fabrics(peer, EVER).unwrap();
        let descriptor = theirs.descriptor().encode().unwrap();
        let route = here.join(peer, &mine, &descriptor, &Policy::default(), EVER).unwrap();
        let put = here.put(&route, &WHOLE, Some(notice(1, 2))).unwrap();
        here.wait(put, EVER).unwrap();
        while !matches!(there.next_event(EVER).unwrap(), Event::Notice { .. }) {}
        here.withdraw(&mine, EVER).unwrap();
        here.disconnect(peer, EVER).unwrap();
    }
}
