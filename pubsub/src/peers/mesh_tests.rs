//! Nodes in simulated time: whatever happens to them, they find each other in the end.

use std::net::SocketAddr;
use std::time::{Duration, SystemTime};

use proptest::prelude::*;

use super::admission::Limits;
use super::connection_protocol::Timing;
use super::identity::{NodeId, ServiceInstance, SplitMix64};
use super::interests::Interest;
use super::mesh::{Mesh, Start};
use super::report::PeerState;
use super::simulation::{HostConfig, Simulation};
use crate::settings::TopicSettings;

/// Longer than anything takes that nodes wait for: an end that was not noticed, the longest
/// pause, an attempt that comes to nothing, and that twice.
const LONG: Duration = Duration::from_secs(60);

fn address(host: usize, which: u8) -> SocketAddr {
    SocketAddr::from(([10, which, 0, host as u8 + 1], 7000))
}

fn identity(seed: u64, host: usize) -> NodeId {
    let mut chance = SplitMix64(seed ^ (host as u64) << 32);
    let mut bytes = [host as u8; 16];
    bytes[..8].copy_from_slice(&chance.draw().to_le_bytes());
    NodeId(bytes)
}

/// Who knows whom.
#[derive(Debug, Clone, Copy)]
enum Topology {
    /// Everybody has all addresses, and its own.
    All,
    /// The same, and each node under two addresses.
    Twice,
    /// Of each two, one has the address of the other.
    OneSided,
    /// All ask the first.
    Rendezvous,
    /// The same, and the last cannot be dialled.
    Hidden,
}

fn plans(count: usize, seed: u64, acquaintance: Topology) -> Vec<HostConfig> {
    let mut chance = SplitMix64(seed);
    let mut plans: Vec<_> = (0..count)
        .map(|host| HostConfig {
            identity: identity(seed, host),
            addresses: vec![address(host, 0), address(host, 1)],
            listens: true,
            peers: Vec::new(),
            rendezvous: None,
        })
        .collect();
    for one in 0..count {
        for two in 0..count {
            let text = address(two, 0).to_string();
            match acquaintance {
                Topology::All => plans[one].peers.push(text),
                Topology::Twice => {
                    plans[one].peers.extend([text, address(two, 1).to_string()]);
                }
                Topology::OneSided if one < two => {
                    if chance.draw().is_multiple_of(2) {
                        plans[one].peers.push(text);
                    } else {
                        plans[two].peers.push(address(one, 0).to_string());
                    }
                }
                Topology::Rendezvous | Topology::Hidden if two == 0 => {
                    plans[one].rendezvous = Some(text);
                }
                _ => {}
            }
        }
    }
    if matches!(acquaintance, Topology::Hidden) {
        plans[count - 1].listens = false;
    }
    plans
}

#[derive(Debug, Clone)]
enum Step {
    Start { host: usize, clock: u64 },
    Stop { host: usize, says_goodbye: bool },
    Cut(usize, usize),
    Mend(usize, usize),
    Subscribe { host: usize, topics: u8 },
    Tell { host: usize, letters: u64 },
    Wait(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let host = 0_usize..6;
    let step = prop_oneof![
        4 => (host.clone(), 0_u64..1000).prop_map(|(host, clock)| Step::Start { host, clock }),
        2 => (host.clone(), any::<bool>())
            .prop_map(|(host, says_goodbye)| Step::Stop { host, says_goodbye }),
        2 => (host.clone(), host.clone()).prop_map(|(one, two)| Step::Cut(one, two)),
        2 => (host.clone(), host.clone()).prop_map(|(one, two)| Step::Mend(one, two)),
        2 => (host.clone(), any::<u8>()).prop_map(|(host, topics)| Step::Subscribe { host, topics }),
        2 => (host, 1_u64..20).prop_map(|(host, letters)| Step::Tell { host, letters }),
        4 => (0_u64..100).prop_map(Step::Wait),
        2 => (100_u64..6000).prop_map(Step::Wait),
    ];
    proptest::collection::vec(step, 0..60)
}

/// Eight topics, each there or not.
fn interests(topics: u8) -> Vec<Interest> {
    let settings = TopicSettings::default();
    (0..8)
        .filter(|topic| topics >> topic & 1 == 1)
        .map(|topic| {
            let publishes = topics.rotate_left(3) >> topic & 1 == 1;
            Interest::new(format!("topic {topic}"), publishes, true, &settings).unwrap()
        })
        .collect()
}

fn perform(world: &mut Simulation, step: Step) {
    let count = world.hosts.len();
    let of = |host: usize| host % count;
    match step {
        Step::Start { host, clock } => world.start(of(host), clock),
        Step::Stop { host, says_goodbye } => world.stop(of(host), says_goodbye),
        Step::Cut(one, two) if of(one) != of(two) => world.cut(of(one), of(two)),
        Step::Mend(one, two) => world.mend(of(one), of(two)),
        Step::Subscribe { host, topics } => world.set_interests(of(host), interests(topics)),
        Step::Tell { host, letters } => world.tell_all(of(host), letters),
        Step::Wait(milliseconds) => world.run(Duration::from_millis(milliseconds)),
        Step::Cut(..) => {}
    }
}

/// Every two have one connection, agree on it, and know what the other subscribes.
fn check_that_all_are_joined(world: &Simulation) {
    let count = world.hosts.len();
    for one in 0..count {
        assert_eq!(world.connections_of(one), count - 1, "connections of {one}: {world:#?}");
        for two in (0..count).filter(|two| *two != one) {
            let (host, other) = (&world.hosts[one], &world.hosts[two]);
            assert_eq!(world.connections(one, two), 1);
            let known = host.sessions.get(&other.identity()).expect("all have appeared");
            let of_other = &other.sessions[&host.identity()];
            assert_eq!(known.session, of_other.session);
            assert!(known.interests.values().eq(other.interests.values().map(|it| &**it)));
            assert!(host.has_all_letters_of(other));
        }
    }
}

/// So many, or as many as PROPTEST_CASES says: what is rare here takes some thousands.
fn cases(usual: u32) -> ProptestConfig {
    let said = std::env::var("PROPTEST_CASES").ok().and_then(|said| said.parse().ok());
    ProptestConfig { cases: said.unwrap_or(usual), ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(cases(200))]

    #[test]
    fn whatever_happens_all_find_each_other_in_the_end(
        count in 2_usize..=6,
        seed in any::<u64>(),
        acquaintance in prop_oneof![
            Just(Topology::All),
            Just(Topology::Twice),
            Just(Topology::OneSided),
            Just(Topology::Rendezvous),
            Just(Topology::Hidden),
        ],
        steps in steps(),
    ) {
        let mut world = Simulation::new(plans(count, seed, acquaintance), seed);
        for step in steps {
            perform(&mut world, step);
        }
        world.mend_all();
        for host in 0..count {
            world.start(host, 2000);
        }
        world.run(LONG);
        for host in 0..count {
            world.tell_all(host, 3);
        }
        world.run(Duration::from_secs(1));
        check_that_all_are_joined(&world);
        // And then there is nothing to tell any more.
        let events: Vec<_> = world.hosts.iter().map(|host| host.events).collect();
        world.run(LONG);
        check_that_all_are_joined(&world);
        prop_assert_eq!(events, world.hosts.iter().map(|host| host.events).collect::<Vec<_>>());
    }

    #[test]
    fn in_whichever_order_they_start_each_meets_each_once(
        count in 2_usize..=6,
        seed in any::<u64>(),
        pauses in proptest::collection::vec(0_u64..300, 6),
        acquaintance in prop_oneof![Just(Topology::All), Just(Topology::Twice)],
    ) {
        let mut world = Simulation::new(plans(count, seed, acquaintance), seed);
        let mut order: Vec<_> = (0..count).collect();
        let mut chance = SplitMix64(seed);
        order.sort_by_cached_key(|_| chance.draw());
        for (host, pause) in order.into_iter().zip(pauses) {
            world.start(host, 1);
            world.run(Duration::from_millis(pause));
        }
        world.run(LONG);
        check_that_all_are_joined(&world);
        for host in &world.hosts {
            // Appeared, and the first interests: no session was given up for another.
            prop_assert_eq!(host.events, 2 * (count - 1));
        }
    }
}

#[test]
fn one_that_meets_itself_does_not_dial_itself_again() {
    let mut world = Simulation::new(plans(1, 1, Topology::Twice), 1);
    world.start(0, 1);
    world.run(LONG);
    assert_eq!(world.connections_of(0), 0);
    let reports = world.hosts[0].mesh.as_ref().unwrap().reports(|_| SystemTime::UNIX_EPOCH);
    assert_eq!(reports.len(), 2);
    assert!(reports.iter().all(|report| report.state == PeerState::SelfConnection), "{reports:?}");
    assert_eq!(world.hosts[0].mesh.as_ref().unwrap().deadline(), None);
}

#[test]
fn a_session_is_not_taken_over_by_another_service_of_its_identity() {
    for started in [2, 0] {
        let mut plans = plans(3, 1, Topology::All);
        plans[1].identity = plans[0].identity;
        let mut world = Simulation::new(plans, 1);
        world.start(0, 1);
        world.start(2, 1);
        world.run(LONG);
        let session = world.hosts[2].sessions[&world.hosts[0].identity()].session;
        // By its clock it is the later one, or the earlier one.
        world.start(1, started);
        world.run(LONG);
        assert_eq!(world.connections(0, 2), 1);
        assert_eq!(world.connections(1, 2), 0);
        assert_eq!(world.hosts[2].sessions[&world.hosts[0].identity()].session, session);
        let reports = world.hosts[1].mesh.as_ref().unwrap().reports(|_| SystemTime::UNIX_EPOCH);
        for host in [0, 2] {
            let address = address(host, 0).to_string();
            let report = reports.iter().find(|report| report.address == address).unwrap();
            assert_eq!(report.state, PeerState::Backoff);
            let why = report.last_error.as_deref().unwrap();
            assert!(why.contains("identity"), "{why}");
        }
        // It has its turn when the first one is gone.
        world.stop(0, false);
        world.run(LONG);
        assert_eq!(world.connections(1, 2), 1);
    }
}

#[test]
fn a_silent_session_gives_way_to_another_service_of_its_identity() {
    let mut plans = plans(3, 1, Topology::All);
    plans[1].identity = plans[0].identity;
    let mut world = Simulation::new(plans, 1);
    world.start(0, 1);
    world.start(2, 1);
    world.run(LONG);
    // As if its machine lost its power: that it ended is not seen.
    world.cut(0, 2);
    world.stop(0, false);
    world.run(Duration::from_millis(1500));
    assert!(world.hosts[2].sessions.contains_key(&world.hosts[0].identity()));
    world.start(1, 2);
    world.run(Duration::from_millis(500));
    assert_eq!(world.connections(1, 2), 1);
}

#[test]
fn connections_that_come_and_those_that_are_dialled_do_not_take_each_others_places() {
    let limits = Limits { connections: 4, per_source: 2, pending: 2 };
    let peer = address(1, 0);
    let start = Start {
        identity: identity(0, 1),
        run: ServiceInstance { started: 1, chance: 1 },
        label: String::new(),
        listens: Some(address(0, 0)),
        peers: vec![peer.to_string()],
        rendezvous: None,
        timing: Timing::new(Duration::from_secs(3)),
        limits,
    };
    let mut mesh = Mesh::new(start, Duration::ZERO);
    let come = |mesh: &mut Mesh| {
        let from = (0..8).map(|host| address(2 + host / 4, 0));
        from.filter(|from| mesh.accepted(address(0, 0), *from, Duration::ZERO).is_some()).count()
    };
    assert_eq!(come(&mut mesh), 8, "each takes the place of one before it");
    assert_eq!(mesh.connections.len(), 2);
    for count in 3..16 {
        let ends = Ok((address(0, 0), peer));
        assert!(mesh.dialled(&peer.to_string(), ends, Duration::ZERO).is_some());
        assert_eq!(mesh.connections.len(), count);
    }
    assert_eq!(come(&mut mesh), 8);
    assert_eq!(mesh.connections.len(), 15);
}

#[test]
fn a_service_that_starts_again_takes_the_place_of_the_one_that_was_cut_off() {
    let mut world = Simulation::new(plans(2, 1, Topology::All), 1);
    world.start(0, 1);
    world.start(1, 1);
    world.run(LONG);
    let before = world.hosts[0].sessions[&world.hosts[1].identity()].session;
    // Nobody is told of the end, and the new one is there long before the old is missed.
    world.cut(0, 1);
    world.stop(1, false);
    world.start(1, 2);
    world.mend(0, 1);
    world.run(Duration::from_secs(1));
    check_that_all_are_joined(&world);
    assert_ne!(world.hosts[0].sessions[&world.hosts[1].identity()].session, before);
}

/// As after a start without a clock of its own, or when the clock was set back.
#[test]
fn services_that_start_at_the_same_time_by_their_clock_have_other_sessions() {
    for restarts in [0, 1] {
        let mut world = Simulation::new(plans(2, 1, Topology::All), 1);
        world.start(0, 816);
        world.start(1, 816);
        let mut numbers = Vec::new();
        for _ in 0..5 {
            world.run(LONG);
            check_that_all_are_joined(&world);
            let other = world.hosts[1 - restarts].identity();
            numbers.push(world.hosts[restarts].sessions[&other].session);
            world.stop(restarts, false);
            world.start(restarts, 816);
        }
        numbers.sort();
        numbers.dedup();
        assert_eq!(numbers.len(), 5);
    }
}

#[test]
fn a_peer_that_is_cut_off_is_missed_by_both_sides() {
    let mut world = Simulation::new(plans(2, 1, Topology::All), 1);
    world.start(0, 1);
    world.start(1, 1);
    world.run(LONG);
    world.cut(0, 1);
    world.run(world.timing.lost_after + Duration::from_secs(1));
    assert!(world.hosts.iter().all(|host| host.sessions.is_empty()));
    let reports = world.hosts[0].mesh.as_ref().unwrap().reports(|_| SystemTime::UNIX_EPOCH);
    let address = address(1, 0).to_string();
    let is_missed = |state| state != PeerState::Connected;
    assert!(reports.iter().any(|report| report.address == address && is_missed(report.state)));
}

#[test]
fn report_names_why_the_last_session_ended() {
    for seed in 0..20 {
        let mut world = Simulation::new(plans(2, seed, Topology::All), seed);
        world.start(0, 1);
        world.start(1, 1);
        world.run(LONG);
        world.cut(0, 1);
        world.run(world.timing.lost_after + Duration::from_secs(1));
        world.mend(0, 1);
        world.run(LONG);
        check_that_all_are_joined(&world);
        let (goes, stays) = if seed % 2 == 0 { (0, 1) } else { (1, 0) };
        world.stop(goes, true);
        world.run(Duration::from_millis(100));
        let reports = world.hosts[stays].mesh.as_ref().unwrap().reports(|_| SystemTime::UNIX_EPOCH);
        let address = address(goes, 0).to_string();
        let report = reports.iter().find(|report| report.address == address).unwrap();
        // The address may have been dialled again already, in vain.
        let why = report.last_error.as_deref().unwrap();
        assert!(["it left", "connection refused"].contains(&why), "seed {seed}: {why}");
    }
}

#[test]
fn one_that_had_come_by_itself_is_told_of_while_it_is_away() {
    let away = |world: &mut Simulation| {
        let now = world.now;
        let mesh = world.hosts[0].mesh.as_mut().unwrap();
        mesh.tick(now);
        let mut reports = mesh.reports(|_| SystemTime::UNIX_EPOCH);
        reports.retain(|report| report.state == PeerState::Departed);
        assert!(reports.iter().all(|report| report.last_error.is_some()));
        let known =
            reports.into_iter().map(|report| (report.identity, report.label, report.address));
        known.collect::<Vec<_>>()
    };
    for says_goodbye in [false, true] {
        let mut plans = plans(2, 1, Topology::All);
        plans[0].peers.clear();
        let mut world = Simulation::new(plans, 1);
        world.start(0, 1);
        world.start(1, 1);
        world.run(LONG);
        assert_eq!(away(&mut world), []);
        let other = Some(world.hosts[1].identity());
        let expected = [(other, Some("host 1".to_owned()), address(1, 0).to_string())];
        world.stop(1, says_goodbye);
        world.run(world.timing.lost_after + Duration::from_secs(1));
        assert_eq!(away(&mut world), expected);
        world.start(1, 2);
        world.run(Duration::from_secs(1));
        check_that_all_are_joined(&world);
        assert_eq!(away(&mut world), []);
        // One that has left in order is remembered for as long as it may be owed something.
        world.stop(1, says_goodbye);
        world.run(world.timing.lost_after + Duration::from_secs(1));
        assert_eq!(away(&mut world), expected);
        let lost_after = world.timing.lost_after;
        world.run(if says_goodbye { lost_after } else { world.timing.forget_after });
        assert_eq!(away(&mut world), []);
        // Or until another one is where it was.
        world.start(1, 3);
        world.run(Duration::from_secs(1));
        world.stop(1, false);
        world.run(world.timing.lost_after + Duration::from_secs(1));
        assert_eq!(away(&mut world), expected);
        world.hosts[1].plan.identity = identity(2, 1);
        world.start(1, 4);
        world.run(Duration::from_secs(1));
        assert_eq!(away(&mut world), []);
        // Or one of its name comes from there, which cannot be dialled.
        let there = Some((world.hosts[1].identity(), address(1, 0).to_string()));
        world.stop(1, false);
        world.run(world.timing.lost_after + Duration::from_secs(1));
        let mut gone = away(&mut world).into_iter();
        assert_eq!(gone.next().and_then(|(node, _, address)| Some((node?, address))), there);
        world.hosts[1].plan.identity = identity(3, 1);
        world.hosts[1].plan.listens = false;
        world.start(1, 5);
        world.run(Duration::from_secs(1));
        check_that_all_are_joined(&world);
        assert_eq!(away(&mut world), []);
    }
}
