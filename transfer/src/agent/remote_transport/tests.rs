//! Two agents with several rails between them, some of which are suspended or end.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use fabric::{Caps, EndpointKind, Offer, Query};
use gpu::{Block, Device};

use crate::path::metrics::Count;
use crate::path::{Locality, Path, Policy};
use crate::{Agent, AgentOptions, Event, HostBuffer, Notice, PeerId, Region, Rights, Route, Token};

use super::*;

/// Reached only if the test fails.
const TIMEOUT: Duration = Duration::from_secs(60);
/// A rail suspended for this long is lost, even on a busy machine.
const LOST_AFTER: Duration = Duration::from_secs(2);
const LENGTH: u64 = 16 << 20;

fn offer() -> Offer {
    let query = Query::new(EndpointKind::Rdm).caps(Caps::MESSAGE | Caps::RMA);
    let query = query.source("127.0.0.1");
    let offer = query.clone().provider("tcp").first();
    offer.or_else(|_| query.provider("net").first()).unwrap()
}

fn numbers(first: u64) -> Vec<u8> {
    (0..LENGTH / 8).flat_map(|at| (first + at).to_le_bytes()).collect()
}

/// Suspends a rail until the other end of `resumed` is dropped.
fn suspend(agent: &Agent, rail: usize, resumed: Receiver<()>) {
    let (suspended, is_suspended) = channel();
    agent.remote_transport.rails[rail].handle.send_command(move |_| {
        let _ = suspended.send(());
        let _ = resumed.recv();
    });
    is_suspended.recv().unwrap();
}

/// One agent puts and gets, the other one has the memory.
struct World {
    one: Agent,
    two: Agent,
    peer: PeerId,
    route: Route,
    local: HostBuffer,
    remote: HostBuffer,
    _regions: [Region; 2],
    /// The events of both, as letters.
    events: [String; 2],
}

impl World {
    fn new(rails: usize) -> Self {
        let offer = offer();
        let start = |label| {
            let options = AgentOptions::new(label).force_remote().lost_after(LOST_AFTER);
            Agent::start((0..rails).fold(options, |options, _| options.fabric(&offer))).unwrap()
        };
        let (mut one, two) = (start("one"), start("two"));
        let [local, remote] = [(); 2].map(|()| HostBuffer::new(LENGTH).unwrap());
        let regions = [one.register(&local, Rights::ALL), two.register(&remote, Rights::ALL)];
        let regions = regions.map(Result::unwrap);
        let peer = one.connect(&two.card().encode().unwrap(), TIMEOUT).unwrap();
        let descriptor = regions[1].descriptor().encode().unwrap();
        let policy = Policy::default();
        let route = one.join(peer, &regions[0], &descriptor, &policy, TIMEOUT).unwrap();
        let events = Default::default();
        let mut world = Self { one, two, peer, route, local, remote, _regions: regions, events };
        world.wait_until("all rails are open", |world| world.open_rails() == rails);
        world
    }

    /// Rails that can carry bytes now.
    fn open_rails(&self) -> usize {
        let DataMover::Rails(route_lanes) = self.route.0.mover() else { panic!("no rails") };
        route_lanes
            .iter()
            .filter(|route_lane| self.one.remote_transport.is_open(route_lane))
            .count()
    }

    fn poll(&mut self) {
        for (agent, events) in [&mut self.one, &mut self.two].into_iter().zip(&mut self.events) {
            agent.progress();
            while let Some(event) = agent.poll_event() {
                match event {
                    Event::Joined { .. } => events.push('J'),
                    Event::Left { .. } => events.push('L'),
                    Event::Notice { .. } => events.push('N'),
                    Event::RailLost { rail, .. } => events.push_str(&format!("-{rail}")),
                    Event::RailRestored { rail, .. } => events.push_str(&format!("+{rail}")),
                }
            }
        }
    }

    #[track_caller]
    fn wait_until(&mut self, what: &str, is_so: impl Fn(&Self) -> bool) {
        let end = Instant::now() + TIMEOUT;
        while !is_so(self) {
            assert!(Instant::now() < end, "timed out before {what}: {:?}", self.events);
            self.poll();
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn put(&mut self) -> Token {
        let block = [Block { to: 0, from: 0, length: LENGTH }];
        self.one.put(&self.route, &block, None).unwrap()
    }

    #[track_caller]
    fn wait_for(&mut self, token: Token) -> Result<()> {
        let end = Instant::now() + TIMEOUT;
        loop {
            self.poll();
            if let Some(outcome) = self.one.test(token) {
                return outcome.map(drop);
            }
            assert!(Instant::now() < end, "the operation does not end: {:?}", self.events);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Puts new bytes, and checks that they arrive.
    #[track_caller]
    fn check_transfer(&mut self, first: u64) {
        self.local.write(0, &numbers(first)).unwrap();
        let token = self.put();
        self.wait_for(token).unwrap();
        let mut bytes = vec![0; LENGTH as usize];
        self.remote.read(0, &mut bytes).unwrap();
        assert!(bytes == numbers(first), "wrong bytes arrived");
    }

    /// Suspends a rail until the returned sender is dropped.
    #[must_use]
    fn suspend_rail(&self, is_second: bool, rail: usize) -> Sender<()> {
        let (sender, resumed) = channel();
        suspend(if is_second { &self.two } else { &self.one }, rail, resumed);
        sender
    }

    fn send_command(&self, is_second: bool, rail: usize, command: fn(&mut Driver)) {
        let agent = if is_second { &self.two } else { &self.one };
        agent.remote_transport.rails[rail].handle.send_command(command);
    }
}

#[test]
fn lost_rail_is_restored_while_the_others_carry() {
    let mut world = World::new(2);
    let (lost, back) = (Count::RailLost.value(), Count::RailRestored.value());
    world.check_transfer(1);
    world.local.write(0, &numbers(7)).unwrap();
    let suspension = world.suspend_rail(true, 1);
    let tokens: Vec<_> = (0..20).map(|_| world.put()).collect();
    world.wait_until("the rail is lost", |world| world.events[0] == "-1");
    assert_eq!(world.open_rails(), 1);
    // New transfers use the other rail, while started ones wait.
    let block = [Block { to: 0, from: 0, length: 4096 }];
    let token = world.one.put(&world.route, &block, None).unwrap();
    world.wait_for(token).unwrap();
    let notified = world.one.notify(world.peer, Notice::new(1, b"").unwrap()).unwrap();
    world.wait_for(notified).unwrap();
    drop(suspension);
    for token in tokens {
        // The rail was only suspended: its transfers complete.
        world.wait_for(token).unwrap();
    }
    let mut bytes = vec![0; LENGTH as usize];
    world.remote.read(0, &mut bytes).unwrap();
    assert!(bytes == numbers(7), "wrong bytes arrived");
    world.wait_until("the rail is restored", |world| world.open_rails() == 2);
    world.check_transfer(9);
    assert_eq!(world.events[0], "-1+1");
    world.wait_until("the other side knows", |world| world.events[1].ends_with('1'));
    let events: String = world.events[1].chars().filter(|letter| *letter != 'N').collect();
    assert!(["J", "J-1+1"].contains(&&*events), "{events}");
    assert!(Count::RailLost.value() > lost && Count::RailRestored.value() > back);
}

#[test]
fn the_only_rail_and_its_peer_are_restored() {
    let mut world = World::new(1);
    world.check_transfer(1);
    let suspension = world.suspend_rail(true, 0);
    let tokens: Vec<_> = (0..20).map(|_| world.put()).collect();
    world.wait_until("the rail is lost", |world| world.events[0] == "-0");
    let block = [Block { to: 0, from: 0, length: 4096 }];
    let refused = world.one.put(&world.route, &block, None).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Closed, "{refused}");
    drop(suspension);
    for token in tokens {
        if let Err(error) = world.wait_for(token) {
            assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
        }
    }
    // Without joining again.
    world.wait_until("the rail is restored", |world| world.open_rails() == 1);
    world.check_transfer(9);
    let notified = world.one.notify(world.peer, Notice::new(1, b"").unwrap()).unwrap();
    world.wait_for(notified).unwrap();
    assert_eq!(world.events[0], "-0+0");
    world.wait_until("the notice arrived", |world| world.events[1].contains('N'));
}

#[test]
fn ended_rail_is_lost_and_the_others_carry() {
    // A local rail, and a rail of the peer.
    for is_second in [false, true] {
        let mut world = World::new(3);
        world.local.write(0, &numbers(7)).unwrap();
        let tokens: Vec<_> = (0..20).map(|_| world.put()).collect();
        world.send_command(is_second, 0, Driver::fail);
        let tokens = tokens.into_iter().chain((0..20).map(|_| {
            let block = [Block { to: 0, from: 0, length: LENGTH }];
            world.one.put(&world.route, &block, None).unwrap()
        }));
        for token in tokens.collect::<Vec<_>>() {
            if let Err(error) = world.wait_for(token) {
                assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
            }
        }
        world.wait_until("it is lost", |world| world.events[0] == "-0");
        assert_eq!((world.open_rails(), world.one.in_flight()), (2, 0));
        world.check_transfer(9);
        let notified = world.one.notify(world.peer, Notice::new(1, b"").unwrap()).unwrap();
        world.wait_for(notified).unwrap();
        world.wait_until("the notice arrived", |world| world.events[1].contains('N'));
        assert!(!world.events[1].contains('L'), "{:?}", world.events);
        // Disconnecting does not fail on the lost rail.
        world.one.disconnect(world.peer, TIMEOUT).unwrap();
        world.wait_until("it left", |world| world.events[1].ends_with('L'));
        assert_eq!(world.events[1].matches('J').count(), 1);
    }
}

/// A local rail, and a rail of the peer, whose thread panics without further events.
#[test]
fn requests_of_a_rail_end_if_its_thread_panics() {
    for is_second in [false, true] {
        let mut world = World::new(2);
        let mut tokens: Vec<_> = (0..20).map(|_| world.put()).collect();
        world.send_command(is_second, 0, Driver::fail_by_panic);
        tokens.extend((0..20).map(|_| world.put()));
        for token in tokens {
            if let Err(error) = world.wait_for(token) {
                assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
            }
        }
        assert_eq!(world.one.in_flight(), 0);
        world.wait_until("both know", |world| {
            world.events.iter().all(|events| events.contains("-0"))
        });
        world.check_transfer(9);
    }
}

/// Also requests that the ended rail had not processed.
#[test]
fn unprocessed_requests_of_an_ended_rail_are_rerouted() {
    let mut world = World::new(2);
    world.local.write(0, &numbers(7)).unwrap();
    let suspension = world.suspend_rail(false, 0);
    world.send_command(false, 0, |_| panic!("requested by a test"));
    let tokens: Vec<_> = (0..100).map(|_| world.put()).collect();
    let notified = world.one.notify(world.peer, Notice::new(1, b"").unwrap()).unwrap();
    drop(suspension);
    for token in tokens.into_iter().chain([notified]) {
        world.wait_for(token).unwrap();
    }
    let mut bytes = vec![0; LENGTH as usize];
    world.remote.read(0, &mut bytes).unwrap();
    assert!(bytes == numbers(7), "wrong bytes arrived");
    // The other side may detect the loss before or after the notice.
    world.wait_until("the notice arrived", |world| world.events[1].contains('N'));
    assert_eq!((world.events[0].as_str(), world.open_rails()), ("-0", 1));
    assert!(!world.one.remote_transport.depends_on(0), "something still depends on the lost rail");
}

/// Staging uses slots of this side, and a lost peer may still write to the slots of its chunks.
#[test]
fn peer_lost_while_staging_does_not_block_others() {
    let offer = offer();
    let start = |label| {
        let options = AgentOptions::new(label).force_remote().lost_after(LOST_AFTER);
        Agent::start(options.fabric(&offer)).unwrap()
    };
    let (mut one, two, three) = (start("one"), start("two"), start("three"));
    let device = Device::open("emulated:0".parse().unwrap()).unwrap();
    let memory = device.allocate_shared(LENGTH, &[]).unwrap();
    let local = one.register(&memory, Rights::ALL).unwrap();
    let join = |one: &mut Agent, other: &Agent| {
        let region = other.register(HostBuffer::new(LENGTH).unwrap(), Rights::ALL).unwrap();
        let peer = one.connect(&other.card().encode().unwrap(), TIMEOUT).unwrap();
        let descriptor = region.descriptor().encode().unwrap();
        (one.join(peer, &local, &descriptor, &Policy::default(), TIMEOUT).unwrap(), region)
    };
    let ((to_two, _two), (to_three, _three)) = (join(&mut one, &two), join(&mut one, &three));
    let (suspension, resumed) = channel();
    suspend(&three, 0, resumed);
    let block = [Block { to: 0, from: 0, length: LENGTH }];
    let lost: Vec<_> = (0..8).map(|_| one.put(&to_three, &block, None).unwrap()).collect();
    // The lost peer has all slots by now, or soon.
    let token = one.put(&to_two, &block, None).unwrap();
    one.wait(token, TIMEOUT).unwrap();
    let token = one.put(&to_two, &block, None).unwrap();
    one.wait(token, TIMEOUT).unwrap();
    drop(suspension);
    for token in lost {
        if let Err(error) = one.wait(token, TIMEOUT) {
            assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
        }
    }
}

/// Not by a fabric, even if its peers are forced to be remote.
#[test]
fn agent_reaches_itself_in_its_process() {
    let options = AgentOptions::new("one").force_remote();
    let mut one = Agent::start(options.fabric(&offer())).unwrap();
    let buffer = HostBuffer::new(4096).unwrap();
    let region = one.register(&buffer, Rights::ALL).unwrap();
    let peer = one.connect(&one.card().encode().unwrap(), TIMEOUT).unwrap();
    assert_eq!(one.locality(peer), Some(&Locality::SameProcess));
    one.connect_fabrics(peer, TIMEOUT).unwrap();
    let descriptor = region.descriptor().encode().unwrap();
    let route = one.join(peer, &region, &descriptor, &Policy::default(), TIMEOUT).unwrap();
    assert_eq!(route.path(), Path::SameProcess);
    buffer.write(0, b"halo").unwrap();
    let token = one.put(&route, &[Block { to: 100, from: 0, length: 4 }], None).unwrap();
    one.wait(token, TIMEOUT).unwrap();
    let mut found = [0; 4];
    buffer.read(100, &mut found).unwrap();
    assert_eq!(&found, b"halo");
}

/// Peers are connected by the rails that answer; the other rails follow when they can.
#[test]
fn unresponsive_rail_is_connected_later() {
    let offer = offer();
    let start = |label| {
        let options = AgentOptions::new(label).force_remote().lost_after(LOST_AFTER);
        Agent::start(options.fabric(&offer).fabric(&offer)).unwrap()
    };
    let (mut one, two) = (start("one"), start("two"));
    let (suspension, resumed) = channel();
    suspend(&two, 0, resumed);
    let buffers = [(); 2].map(|()| HostBuffer::new(LENGTH).unwrap());
    let regions = [one.register(&buffers[0], Rights::ALL), two.register(&buffers[1], Rights::ALL)];
    let regions = regions.map(Result::unwrap);
    let peer = one.connect(&two.card().encode().unwrap(), TIMEOUT).unwrap();
    let descriptor = regions[1].descriptor().encode().unwrap();
    let route = one.join(peer, &regions[0], &descriptor, &Policy::default(), TIMEOUT).unwrap();
    let block = [Block { to: 0, from: 0, length: LENGTH }];
    let token = one.put(&route, &block, None).unwrap();
    one.wait(token, TIMEOUT).unwrap();
    let DataMover::Rails(route_lanes) = route.0.mover() else { panic!("no rails") };
    assert_eq!(route_lanes.len(), 2);
    drop(suspension);
    let end = Instant::now() + TIMEOUT;
    while !route_lanes.iter().all(|route_lane| one.remote_transport.is_open(route_lane)) {
        assert!(Instant::now() < end, "the rail is not connected");
        one.progress();
        std::thread::sleep(Duration::from_millis(1));
    }
    let token = one.put(&route, &block, None).unwrap();
    one.wait(token, TIMEOUT).unwrap();
}

/// Pinning much memory takes longer than the timeout of peers, so another thread does it.
#[test]
fn memory_is_registered_while_the_rail_is_busy() {
    let options = AgentOptions::new("one").force_remote().always_register_local();
    let agent = Agent::start(options.fabric(&offer())).unwrap();
    let (busy, resumed) = channel();
    suspend(&agent, 0, resumed);
    let buffer = HostBuffer::new(LENGTH).unwrap();
    let local_only = agent.register_local(&buffer).unwrap();
    let remote = agent.register(&buffer, Rights::ALL).unwrap();
    for region in [&local_only, &remote] {
        assert!(region.0.memory(0).is_some(), "registration needs the rail");
    }
    assert_eq!(remote.descriptor().keys.len(), 1);
    // The cached registration is reused for local-only memory.
    let before = fabric::registrations();
    drop(local_only);
    let local_only = agent.register_local(&buffer).unwrap();
    assert_eq!(fabric::registrations(), before);
    drop((local_only, remote, busy));
}

/// However often it fails: links keep no regions of failed joins.
#[test]
fn refused_join_leaks_nothing() {
    let mut world = World::new(2);
    let known = |world: &World| -> Vec<_> {
        world.one.remote_transport.links.values().map(|link| link.regions.len()).collect()
    };
    assert_eq!(known(&world), [1, 1]);
    let good = world._regions[1].descriptor();
    let unknown = crate::RegionDescriptor { number: good.number + 1, ..good.clone() };
    let other = crate::RegionDescriptor { ticket: good.ticket ^ 1, ..good.clone() };
    for descriptor in [unknown, other] {
        let (bytes, policy) = (descriptor.encode().unwrap(), Policy::default());
        let local = &world._regions[0];
        let refused = world.one.join(world.peer, local, &bytes, &policy, TIMEOUT).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Stale, "{refused}");
        assert_eq!((known(&world), world.open_rails()), (vec![1, 1], 2));
    }
    world.check_transfer(3);
}

/// Joins another region of the other agent, and uses it from now on.
fn join_another(world: &mut World, remote: HostBuffer, region: &Region) {
    let bytes = region.descriptor().encode().unwrap();
    let policy = Policy::default();
    let route = world.one.join(world.peer, &world._regions[0], &bytes, &policy, TIMEOUT);
    (world.route, world.remote) = (route.unwrap(), remote);
}

#[test]
fn join_refused_while_a_rail_is_lost_does_not_affect_the_next() {
    let mut world = World::new(2);
    let remote = HostBuffer::new(LENGTH).unwrap();
    let region = world.two.register(&remote, Rights::ALL).unwrap();
    let suspension = world.suspend_rail(true, 1);
    world.wait_until("the rail is lost", |world| world.events[0] == "-1");
    let good = region.descriptor();
    let bad = crate::RegionDescriptor { ticket: good.ticket ^ 1, ..good.clone() };
    let (bytes, policy) = (bad.encode().unwrap(), Policy::default());
    let local = &world._regions[0];
    let refused = world.one.join(world.peer, local, &bytes, &policy, TIMEOUT).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Stale, "{refused}");
    join_another(&mut world, remote, &region);
    drop(suspension);
    world.wait_until("the rail is open too", |world| world.open_rails() == 2);
    world.check_transfer(5);
}

#[test]
fn region_joined_while_a_rail_is_silent_is_reached_by_it_later() {
    let mut world = World::new(2);
    let remote = HostBuffer::new(LENGTH).unwrap();
    let region = world.two.register(&remote, Rights::ALL).unwrap();
    let suspension = world.suspend_rail(true, 1);
    join_another(&mut world, remote, &region);
    assert_eq!(world.open_rails(), 1);
    world.wait_until("the rail is lost", |world| world.events[0] == "-1");
    drop(suspension);
    world.wait_until("the rail is open too", |world| world.open_rails() == 2);
    world.check_transfer(5);
}

/// Queued requests keep the regions of both ends, and are dropped with the agent.
#[test]
fn agent_that_ends_with_queued_puts_releases_its_regions() {
    let mut world = World::new(2);
    let block = [Block { to: 0, from: 0, length: LENGTH }];
    for _ in 0..1000 {
        let token = world.one.put(&world.route, &block, None).unwrap();
        world.one.forget(token);
    }
    let World { one, two, route, local, remote, _regions, .. } = world;
    drop(one);
    drop((route, _regions, two));
    let end = Instant::now() + TIMEOUT;
    while local.is_shared() || remote.is_shared() {
        assert!(Instant::now() < end, "{} {}", local.is_shared(), remote.is_shared());
        std::thread::sleep(Duration::from_millis(10));
    }
}
