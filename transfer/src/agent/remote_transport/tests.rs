//! Two agents with several rails between them, some of which are deaf for a while or end.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use fabric::{Caps, EndpointKind, Offer, Query};
use gpu::{Block, Device};

use crate::path::Policy;
use crate::path::metrics::Count;
use crate::{Agent, AgentOptions, Event, HostBuffer, Notice, PeerId, Region, Rights, Route, Token};

use super::*;

/// Only reached when something is wrong.
const TIMEOUT: Duration = Duration::from_secs(60);
/// One that is deaf for so long is lost, even if its machine is busy.
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

/// A rail hears and says nothing from now on, until the other end of this is dropped.
fn hold(agent: &Agent, rail: usize, until: Receiver<()>) {
    let (held, is_held) = channel();
    agent.remote_transport.rails[rail].handle.send_command(move |_| {
        let _ = held.send(());
        let _ = until.recv();
    });
    is_held.recv().unwrap();
}

/// One puts and gets, the other one has the memory.
struct World {
    one: Agent,
    two: Agent,
    peer: PeerId,
    route: Route,
    mine: HostBuffer,
    theirs: HostBuffer,
    _regions: [Region; 2],
    /// What happened at both, in a few letters.
    told: [String; 2],
}

impl World {
    fn new(rails: usize) -> Self {
        let offer = offer();
        let start = |label| {
            let options = AgentOptions::new(label).force_remote().lost_after(LOST_AFTER);
            Agent::start((0..rails).fold(options, |options, _| options.fabric(&offer))).unwrap()
        };
        let (mut one, two) = (start("one"), start("two"));
        let [mine, theirs] = [(); 2].map(|()| HostBuffer::new(LENGTH).unwrap());
        let regions = [one.register(&mine, Rights::ALL), two.register(&theirs, Rights::ALL)];
        let regions = regions.map(Result::unwrap);
        let peer = one.connect(&two.card().encode().unwrap(), TIMEOUT).unwrap();
        let descriptor = regions[1].descriptor().encode().unwrap();
        let policy = Policy::default();
        let route = one.join(peer, &regions[0], &descriptor, &policy, TIMEOUT).unwrap();
        let told = Default::default();
        let mut world = Self { one, two, peer, route, mine, theirs, _regions: regions, told };
        world.until("all rails lead there", |world| world.open_rails() == rails);
        world
    }

    /// Rails by which bytes can go.
    fn open_rails(&self) -> usize {
        let DataMover::Rails(route_lanes) = &self.route.0.mover else { panic!("no rails") };
        route_lanes
            .iter()
            .filter(|route_lane| self.one.remote_transport.is_open(route_lane))
            .count()
    }

    fn look(&mut self) {
        for (agent, told) in [&mut self.one, &mut self.two].into_iter().zip(&mut self.told) {
            agent.progress();
            while let Some(event) = agent.poll_event() {
                match event {
                    Event::Joined { .. } => told.push('J'),
                    Event::Left { .. } => told.push('L'),
                    Event::Notice { .. } => told.push('N'),
                    Event::RailLost { rail, .. } => told.push_str(&format!("-{rail}")),
                    Event::RailRestored { rail, .. } => told.push_str(&format!("+{rail}")),
                }
            }
        }
    }

    #[track_caller]
    fn until(&mut self, what: &str, is_so: impl Fn(&Self) -> bool) {
        let end = Instant::now() + TIMEOUT;
        while !is_so(self) {
            assert!(Instant::now() < end, "{what}: {:?}", self.told);
            self.look();
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn put(&mut self) -> Token {
        let block = [Block { to: 0, from: 0, length: LENGTH }];
        self.one.put(&self.route, &block, None).unwrap()
    }

    #[track_caller]
    fn ends(&mut self, token: Token) -> Result<()> {
        let end = Instant::now() + TIMEOUT;
        loop {
            self.look();
            if let Some(outcome) = self.one.test(token) {
                return outcome.map(drop);
            }
            assert!(Instant::now() < end, "it has no end: {:?}", self.told);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Puts other bytes than before, and has a look at what came.
    #[track_caller]
    fn carries(&mut self, first: u64) {
        self.mine.write(0, &numbers(first)).unwrap();
        let token = self.put();
        self.ends(token).unwrap();
        let mut bytes = vec![0; LENGTH as usize];
        self.theirs.read(0, &mut bytes).unwrap();
        assert!(bytes == numbers(first), "other bytes came");
    }

    /// Makes a rail deaf, until what is given back is dropped.
    #[must_use]
    fn deafen(&self, of_two: bool, rail: usize) -> Sender<()> {
        let (sender, until) = channel();
        hold(if of_two { &self.two } else { &self.one }, rail, until);
        sender
    }

    fn send_command(&self, of_two: bool, rail: usize, command: fn(&mut Driver)) {
        let agent = if of_two { &self.two } else { &self.one };
        agent.remote_transport.rails[rail].handle.send_command(command);
    }
}

#[test]
fn what_is_left_carries_and_what_is_lost_comes_back_by_itself() {
    let mut world = World::new(2);
    let (lost, back) = (Count::RailLost.value(), Count::RailRestored.value());
    world.carries(1);
    world.mine.write(0, &numbers(7)).unwrap();
    let deaf = world.deafen(true, 1);
    let tokens: Vec<_> = (0..20).map(|_| world.put()).collect();
    world.until("the rail is lost", |world| world.told[0] == "-1");
    assert_eq!(world.open_rails(), 1);
    // New ones go by the other one, while those that had begun have to wait.
    let block = [Block { to: 0, from: 0, length: 4096 }];
    let token = world.one.put(&world.route, &block, None).unwrap();
    world.ends(token).unwrap();
    let told = world.one.notify(world.peer, Notice::new(1, b"").unwrap()).unwrap();
    world.ends(told).unwrap();
    drop(deaf);
    for token in tokens {
        // It was deaf, and nothing was lost: all that it had yet came to its end.
        world.ends(token).unwrap();
    }
    let mut bytes = vec![0; LENGTH as usize];
    world.theirs.read(0, &mut bytes).unwrap();
    assert!(bytes == numbers(7), "other bytes came");
    world.until("it is back", |world| world.open_rails() == 2);
    world.carries(9);
    assert_eq!(world.told[0], "-1+1");
    world.until("the other side knows", |world| world.told[1].ends_with('1'));
    let told: String = world.told[1].chars().filter(|letter| *letter != 'N').collect();
    assert!(["J", "J-1+1"].contains(&&*told), "{told}");
    assert!(Count::RailLost.value() > lost && Count::RailRestored.value() > back);
}

#[test]
fn the_only_rail_comes_back_and_the_peer_with_it() {
    let mut world = World::new(1);
    world.carries(1);
    let deaf = world.deafen(true, 0);
    let tokens: Vec<_> = (0..20).map(|_| world.put()).collect();
    world.until("the rail is lost", |world| world.told[0] == "-0");
    let block = [Block { to: 0, from: 0, length: 4096 }];
    let refused = world.one.put(&world.route, &block, None).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Closed, "{refused}");
    drop(deaf);
    for token in tokens {
        if let Err(error) = world.ends(token) {
            assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
        }
    }
    // Without being joined again.
    world.until("it is back", |world| world.open_rails() == 1);
    world.carries(9);
    let told = world.one.notify(world.peer, Notice::new(1, b"").unwrap()).unwrap();
    world.ends(told).unwrap();
    assert_eq!(world.told[0], "-0+0");
    world.until("the notice came", |world| world.told[1].contains('N'));
}

#[test]
fn a_rail_that_ends_is_lost_and_the_others_go_on() {
    // Ours, and the peer's.
    for of_two in [false, true] {
        let mut world = World::new(3);
        world.mine.write(0, &numbers(7)).unwrap();
        let tokens: Vec<_> = (0..20).map(|_| world.put()).collect();
        world.send_command(of_two, 0, Driver::fail);
        let tokens = tokens.into_iter().chain((0..20).map(|_| {
            let block = [Block { to: 0, from: 0, length: LENGTH }];
            world.one.put(&world.route, &block, None).unwrap()
        }));
        for token in tokens.collect::<Vec<_>>() {
            if let Err(error) = world.ends(token) {
                assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
            }
        }
        world.until("it is lost", |world| world.told[0] == "-0");
        assert_eq!((world.open_rails(), world.one.in_flight()), (2, 0));
        world.carries(9);
        let told = world.one.notify(world.peer, Notice::new(1, b"").unwrap()).unwrap();
        world.ends(told).unwrap();
        world.until("the notice came", |world| world.told[1].contains('N'));
        assert!(!world.told[1].contains('L'), "{:?}", world.told);
        // It is no fault of the others when the last one is left.
        world.one.disconnect(world.peer, TIMEOUT).unwrap();
        world.until("it left", |world| world.told[1].ends_with('L'));
        assert_eq!(world.told[1].matches('J').count(), 1);
    }
}

/// Ours, and the peer's; and nothing more is told by a thread that ends in the middle of something.
#[test]
fn what_a_rail_was_given_has_an_end_also_when_its_thread_breaks() {
    for of_two in [false, true] {
        let mut world = World::new(2);
        let mut tokens: Vec<_> = (0..20).map(|_| world.put()).collect();
        world.send_command(of_two, 0, Driver::fail_by_panic);
        tokens.extend((0..20).map(|_| world.put()));
        for token in tokens {
            if let Err(error) = world.ends(token) {
                assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
            }
        }
        assert_eq!(world.one.in_flight(), 0);
        world.until("both know", |world| world.told.iter().all(|told| told.contains("-0")));
        world.carries(9);
    }
}

/// It is gone on with by another one: also what was not looked at when the rail ended.
#[test]
fn what_a_rail_did_not_look_at_before_it_ended_goes_by_another_one() {
    let mut world = World::new(2);
    world.mine.write(0, &numbers(7)).unwrap();
    let deaf = world.deafen(false, 0);
    world.send_command(false, 0, |_| panic!("asked for by a test"));
    let tokens: Vec<_> = (0..100).map(|_| world.put()).collect();
    let told = world.one.notify(world.peer, Notice::new(1, b"").unwrap()).unwrap();
    drop(deaf);
    for token in tokens.into_iter().chain([told]) {
        world.ends(token).unwrap();
    }
    let mut bytes = vec![0; LENGTH as usize];
    world.theirs.read(0, &mut bytes).unwrap();
    assert!(bytes == numbers(7), "other bytes came");
    // Whether the other side notices before or after it that the rail is lost is up to chance.
    world.until("the notice came", |world| world.told[1].contains('N'));
    assert_eq!((world.told[0].as_str(), world.open_rails()), ("-0", 1));
    assert!(!world.one.remote_transport.depends_on(0), "nothing is left to be given up");
}

/// What is staged goes through slots of this side, and who is lost may still write to those that it had
/// parts in.
#[test]
fn who_is_lost_while_bytes_are_staged_to_it_does_not_hold_up_others() {
    let offer = offer();
    let start = |label| {
        let options = AgentOptions::new(label).force_remote().lost_after(LOST_AFTER);
        Agent::start(options.fabric(&offer)).unwrap()
    };
    let (mut one, two, three) = (start("one"), start("two"), start("three"));
    let device = Device::open("emulated:0".parse().unwrap()).unwrap();
    let memory = device.allocate_shared(LENGTH, &[]).unwrap();
    let mine = one.register(&memory, Rights::ALL).unwrap();
    let join = |one: &mut Agent, other: &Agent| {
        let region = other.register(HostBuffer::new(LENGTH).unwrap(), Rights::ALL).unwrap();
        let peer = one.connect(&other.card().encode().unwrap(), TIMEOUT).unwrap();
        let descriptor = region.descriptor().encode().unwrap();
        (one.join(peer, &mine, &descriptor, &Policy::default(), TIMEOUT).unwrap(), region)
    };
    let ((to_two, _two), (to_three, _three)) = (join(&mut one, &two), join(&mut one, &three));
    let (deaf, until) = channel();
    hold(&three, 0, until);
    let block = [Block { to: 0, from: 0, length: LENGTH }];
    let lost: Vec<_> = (0..8).map(|_| one.put(&to_three, &block, None).unwrap()).collect();
    // It has all slots by now, or has them soon.
    let token = one.put(&to_two, &block, None).unwrap();
    one.wait(token, TIMEOUT).unwrap();
    let token = one.put(&to_two, &block, None).unwrap();
    one.wait(token, TIMEOUT).unwrap();
    drop(deaf);
    for token in lost {
        if let Err(error) = one.wait(token, TIMEOUT) {
            assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
        }
    }
}

#[test]
fn an_agent_does_not_visit_itself_by_a_fabric() {
    let options = AgentOptions::new("one").force_remote();
    let mut one = Agent::start(options.fabric(&offer())).unwrap();
    let region = one.register(HostBuffer::new(4096).unwrap(), Rights::ALL).unwrap();
    let card = one.card().encode().unwrap();
    let error = one.connect(&card, TIMEOUT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    let peer = one.inspect(&card, TIMEOUT).unwrap();
    let descriptor = region.descriptor().encode().unwrap();
    let joined = one.join(peer, &region, &descriptor, &Policy::default(), TIMEOUT);
    let error = joined.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoPath);
    assert!(error.to_string().contains("itself"), "{error}");
}

/// Peers that cannot be met by all rails are met by the others, and those come when they can.
#[test]
fn a_rail_that_cannot_be_met_yet_is_taken_in_later() {
    let offer = offer();
    let start = |label| {
        let options = AgentOptions::new(label).force_remote().lost_after(LOST_AFTER);
        Agent::start(options.fabric(&offer).fabric(&offer)).unwrap()
    };
    let (mut one, two) = (start("one"), start("two"));
    let (deaf, until) = channel();
    hold(&two, 0, until);
    let buffers = [(); 2].map(|()| HostBuffer::new(LENGTH).unwrap());
    let regions = [one.register(&buffers[0], Rights::ALL), two.register(&buffers[1], Rights::ALL)];
    let regions = regions.map(Result::unwrap);
    let peer = one.connect(&two.card().encode().unwrap(), TIMEOUT).unwrap();
    let descriptor = regions[1].descriptor().encode().unwrap();
    let route = one.join(peer, &regions[0], &descriptor, &Policy::default(), TIMEOUT).unwrap();
    let block = [Block { to: 0, from: 0, length: LENGTH }];
    let token = one.put(&route, &block, None).unwrap();
    one.wait(token, TIMEOUT).unwrap();
    let DataMover::Rails(route_lanes) = &route.0.mover else { panic!("no rails") };
    assert_eq!(route_lanes.len(), 2);
    drop(deaf);
    let end = Instant::now() + TIMEOUT;
    while !route_lanes.iter().all(|route_lane| one.remote_transport.is_open(route_lane)) {
        assert!(Instant::now() < end, "it does not come");
        one.progress();
        std::thread::sleep(Duration::from_millis(1));
    }
    let token = one.put(&route, &block, None).unwrap();
    one.wait(token, TIMEOUT).unwrap();
}

/// Pinning much memory takes longer than peers wait: so the rail has no part in it.
#[test]
fn memory_is_registered_while_the_rail_does_something_else() {
    let options = AgentOptions::new("one").force_remote().always_register_local();
    let agent = Agent::start(options.fabric(&offer())).unwrap();
    let (busy, until) = channel();
    hold(&agent, 0, until);
    let buffer = HostBuffer::new(LENGTH).unwrap();
    let local_only = agent.register_local(&buffer).unwrap();
    let theirs = agent.register(&buffer, Rights::ALL).unwrap();
    for region in [&local_only, &theirs] {
        assert!(region.0.memory(0).is_some(), "the rail was waited for");
    }
    assert_eq!(theirs.descriptor().keys.len(), 1);
    // And so it is for own use again, which is let go of when nobody has the buffer any more.
    let before = fabric::registrations();
    drop(local_only);
    let local_only = agent.register_local(&buffer).unwrap();
    assert_eq!(fabric::registrations(), before);
    drop((local_only, theirs, busy));
}

/// However often: a region that no route came of is not known of.
#[test]
fn a_join_that_is_refused_leaves_nothing_behind() {
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
        let mine = &world._regions[0];
        let refused = world.one.join(world.peer, mine, &bytes, &policy, TIMEOUT).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Stale, "{refused}");
        assert_eq!((known(&world), world.open_rails()), (vec![1, 1], 2));
    }
    world.carries(3);
}

/// Joins another region of the other one, and moves by it from now on.
fn joins_another(world: &mut World, theirs: HostBuffer, region: &Region) {
    let bytes = region.descriptor().encode().unwrap();
    let policy = Policy::default();
    let route = world.one.join(world.peer, &world._regions[0], &bytes, &policy, TIMEOUT);
    (world.route, world.theirs) = (route.unwrap(), theirs);
}

#[test]
fn a_join_that_is_refused_while_a_rail_is_lost_does_not_spoil_the_next_one() {
    let mut world = World::new(2);
    let theirs = HostBuffer::new(LENGTH).unwrap();
    let region = world.two.register(&theirs, Rights::ALL).unwrap();
    let deaf = world.deafen(true, 1);
    world.until("the rail is lost", |world| world.told[0] == "-1");
    let good = region.descriptor();
    let bad = crate::RegionDescriptor { ticket: good.ticket ^ 1, ..good.clone() };
    let (bytes, policy) = (bad.encode().unwrap(), Policy::default());
    let mine = &world._regions[0];
    let refused = world.one.join(world.peer, mine, &bytes, &policy, TIMEOUT).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Stale, "{refused}");
    joins_another(&mut world, theirs, &region);
    drop(deaf);
    world.until("it leads there, too", |world| world.open_rails() == 2);
    world.carries(5);
}

#[test]
fn a_region_that_was_joined_while_a_rail_said_nothing_is_reached_by_it_later() {
    let mut world = World::new(2);
    let theirs = HostBuffer::new(LENGTH).unwrap();
    let region = world.two.register(&theirs, Rights::ALL).unwrap();
    let deaf = world.deafen(true, 1);
    joins_another(&mut world, theirs, &region);
    assert_eq!(world.open_rails(), 1);
    world.until("the rail is lost", |world| world.told[0] == "-1");
    drop(deaf);
    world.until("it leads there, too", |world| world.open_rails() == 2);
    world.carries(5);
}

/// What was told to a rail and not begun keeps the regions of both ends of it, and goes with the agent.
#[test]
fn agent_that_ends_with_queued_puts_lets_go_of_its_regions() {
    let mut world = World::new(2);
    let block = [Block { to: 0, from: 0, length: LENGTH }];
    for _ in 0..1000 {
        let token = world.one.put(&world.route, &block, None).unwrap();
        world.one.forget(token);
    }
    let World { one, two, route, mine, theirs, _regions, .. } = world;
    drop(one);
    drop((route, _regions, two));
    let end = Instant::now() + TIMEOUT;
    while mine.is_shared() || theirs.is_shared() {
        assert!(Instant::now() < end, "{} {}", mine.is_shared(), theirs.is_shared());
        std::thread::sleep(Duration::from_millis(10));
    }
}
