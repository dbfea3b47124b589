//! Nodes in simulated time: they find each other eventually, whatever happens.

mod simulated_network;

use std::net::SocketAddr;
use std::time::{Duration, SystemTime};

use proptest::prelude::*;
use testkit::cases::cases;

use self::simulated_network::{HostConfig, Simulation};
use super::{Mesh, PeerState};
use crate::ids::NodeId;
use crate::network_options::NetworkOptions;
use crate::peers::interests::Interest;
use crate::peers::{Hello, Limits, ServiceInstance, SplitMix64};
use crate::settings::TopicSettings;

impl Mesh {
    /// Bytes queued for all peers.
    pub(in crate::peers) fn waiting(&self) -> usize {
        self.connections.values().map(|link| link.session.waiting()).sum()
    }
}

/// Longer than twice the sum of all timeouts: a lost session, the longest backoff, a failing
/// attempt.
const LONG: Duration = Duration::from_secs(60);

fn address(host: usize, which: u8) -> SocketAddr {
    SocketAddr::from(([10, which, 0, host as u8 + 1], 7000))
}

fn identity(seed: u64, host: usize) -> NodeId {
    let mut random = SplitMix64(seed ^ (host as u64) << 32);
    let mut bytes = [host as u8; 16];
    bytes[..8].copy_from_slice(&random.draw().to_le_bytes());
    NodeId(bytes)
}

/// Which addresses the nodes are configured with.
#[derive(Debug, Clone, Copy)]
enum Topology {
    /// All nodes have all addresses, their own included.
    All,
    /// Like `All`, with two addresses per node.
    Twice,
    /// For each pair, one node has the address of the other.
    OneSided,
    /// All ask the first node.
    Rendezvous,
    /// Like `Rendezvous`, but the last node does not listen.
    Hidden,
}

fn configs(count: usize, seed: u64, topology: Topology) -> Vec<HostConfig> {
    let mut random = SplitMix64(seed);
    let mut configs: Vec<_> = (0..count)
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
            match topology {
                Topology::All => configs[one].peers.push(text),
                Topology::Twice => {
                    configs[one].peers.extend([text, address(two, 1).to_string()]);
                }
                Topology::OneSided if one < two => {
                    if random.draw().is_multiple_of(2) {
                        configs[one].peers.push(text);
                    } else {
                        configs[two].peers.push(address(one, 0).to_string());
                    }
                }
                Topology::Rendezvous | Topology::Hidden if two == 0 => {
                    configs[one].rendezvous = Some(text);
                }
                _ => {}
            }
        }
    }
    if matches!(topology, Topology::Hidden) {
        configs[count - 1].listens = false;
    }
    configs
}

#[derive(Debug, Clone)]
enum Step {
    Start { host: usize, clock: u64 },
    Stop { host: usize, is_graceful: bool },
    Cut(usize, usize),
    Mend(usize, usize),
    Subscribe { host: usize, topics: u8 },
    Send { host: usize, messages: u64 },
    Wait(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let host = 0_usize..6;
    let step = prop_oneof![
        4 => (host.clone(), 0_u64..1000).prop_map(|(host, clock)| Step::Start { host, clock }),
        2 => (host.clone(), any::<bool>())
            .prop_map(|(host, is_graceful)| Step::Stop { host, is_graceful }),
        2 => (host.clone(), host.clone()).prop_map(|(one, two)| Step::Cut(one, two)),
        2 => (host.clone(), host.clone()).prop_map(|(one, two)| Step::Mend(one, two)),
        2 => (host.clone(), any::<u8>()).prop_map(|(host, topics)| Step::Subscribe { host, topics }),
        2 => (host, 1_u64..20).prop_map(|(host, messages)| Step::Send { host, messages }),
        4 => (0_u64..100).prop_map(Step::Wait),
        2 => (100_u64..6000).prop_map(Step::Wait),
    ];
    proptest::collection::vec(step, 0..60)
}

/// One of 256 sets of eight topics.
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

fn perform(sim: &mut Simulation, step: Step) {
    let count = sim.hosts.len();
    let of = |host: usize| host % count;
    match step {
        Step::Start { host, clock } => sim.start(of(host), clock),
        Step::Stop { host, is_graceful } => sim.stop(of(host), is_graceful),
        Step::Cut(one, two) if of(one) != of(two) => sim.cut(of(one), of(two)),
        Step::Mend(one, two) => sim.mend(of(one), of(two)),
        Step::Subscribe { host, topics } => sim.set_interests(of(host), interests(topics)),
        Step::Send { host, messages } => sim.send_to_all(of(host), messages),
        Step::Wait(milliseconds) => sim.run(Duration::from_millis(milliseconds)),
        Step::Cut(..) => {}
    }
}

/// Each pair has one connection, agrees on it, and knows the other's interests.
fn check_full_mesh(sim: &Simulation) {
    let count = sim.hosts.len();
    for one in 0..count {
        assert_eq!(sim.connections_of(one), count - 1, "connections of {one}: {sim:#?}");
        for two in (0..count).filter(|two| *two != one) {
            let (host, other) = (&sim.hosts[one], &sim.hosts[two]);
            assert_eq!(sim.connections(one, two), 1);
            let known = host.sessions.get(&other.identity()).expect("all have connected");
            let of_other = &other.sessions[&host.identity()];
            assert_eq!(known.session, of_other.session);
            assert!(known.interests.values().eq(other.interests.values().map(|it| &**it)));
            assert!(host.has_all_messages_of(other));
        }
    }
}

proptest! {
    // Rare failures take some thousands: `scripts/test simulations`.
    #![proptest_config(ProptestConfig { cases: cases(40), ..ProptestConfig::default() })]

    #[test]
    fn all_nodes_connect_eventually_after_any_failures(
        count in 2_usize..=6,
        seed in any::<u64>(),
        topology in prop_oneof![
            Just(Topology::All),
            Just(Topology::Twice),
            Just(Topology::OneSided),
            Just(Topology::Rendezvous),
            Just(Topology::Hidden),
        ],
        steps in steps(),
    ) {
        let mut sim = Simulation::new(configs(count, seed, topology), seed);
        for step in steps {
            perform(&mut sim, step);
        }
        sim.mend_all();
        for host in 0..count {
            sim.start(host, 2000);
        }
        sim.run(LONG);
        for host in 0..count {
            sim.send_to_all(host, 3);
        }
        sim.run(Duration::from_secs(1));
        check_full_mesh(&sim);
        // Afterwards no event follows.
        let events: Vec<_> = sim.hosts.iter().map(|host| host.events).collect();
        sim.run(LONG);
        check_full_mesh(&sim);
        prop_assert_eq!(events, sim.hosts.iter().map(|host| host.events).collect::<Vec<_>>());
    }

    #[test]
    fn nodes_connect_once_in_any_start_order(
        count in 2_usize..=6,
        seed in any::<u64>(),
        pauses in proptest::collection::vec(0_u64..300, 6),
        topology in prop_oneof![Just(Topology::All), Just(Topology::Twice)],
    ) {
        let mut sim = Simulation::new(configs(count, seed, topology), seed);
        let mut order: Vec<_> = (0..count).collect();
        let mut random = SplitMix64(seed);
        order.sort_by_cached_key(|_| random.draw());
        for (host, pause) in order.into_iter().zip(pauses) {
            sim.start(host, 1);
            sim.run(Duration::from_millis(pause));
        }
        sim.run(LONG);
        check_full_mesh(&sim);
        for host in &sim.hosts {
            // Connected, and the first interests: no session was replaced.
            prop_assert_eq!(host.events, 2 * (count - 1));
        }
    }
}

#[test]
fn own_address_is_not_dialled_again() {
    let mut sim = Simulation::new(configs(1, 1, Topology::Twice), 1);
    sim.start(0, 1);
    sim.run(LONG);
    assert_eq!(sim.connections_of(0), 0);
    let reports =
        sim.hosts[0].mesh.as_mut().unwrap().reports(Duration::ZERO, |_| SystemTime::UNIX_EPOCH);
    assert_eq!(reports.len(), 2);
    assert!(reports.iter().all(|report| report.state == PeerState::SelfConnection), "{reports:?}");
    assert_eq!(sim.hosts[0].mesh.as_ref().unwrap().deadline(), None);
}

#[test]
fn live_session_is_not_taken_over_by_another_service() {
    for started in [2, 0] {
        let mut configs = configs(3, 1, Topology::All);
        configs[1].identity = configs[0].identity;
        let mut sim = Simulation::new(configs, 1);
        sim.start(0, 1);
        sim.start(2, 1);
        sim.run(LONG);
        let session = sim.hosts[2].sessions[&sim.hosts[0].identity()].session;
        // By its clock it started later, or earlier.
        sim.start(1, started);
        sim.run(LONG);
        assert_eq!(sim.connections(0, 2), 1);
        assert_eq!(sim.connections(1, 2), 0);
        assert_eq!(sim.hosts[2].sessions[&sim.hosts[0].identity()].session, session);
        let reports =
            sim.hosts[1].mesh.as_mut().unwrap().reports(Duration::ZERO, |_| SystemTime::UNIX_EPOCH);
        for host in [0, 2] {
            let address = address(host, 0).to_string();
            let report = reports.iter().find(|report| report.address == address).unwrap();
            assert_eq!(report.state, PeerState::Backoff);
            let why = report.last_error.as_deref().unwrap();
            assert!(why.contains("node id"), "{why}");
        }
        // It gets a session when the first one is gone.
        sim.stop(0, false);
        sim.run(LONG);
        assert_eq!(sim.connections(1, 2), 1);
    }
}

#[test]
fn silent_session_is_replaced_by_another_service_of_the_id() {
    let mut configs = configs(3, 1, Topology::All);
    configs[1].identity = configs[0].identity;
    let mut sim = Simulation::new(configs, 1);
    sim.start(0, 1);
    sim.start(2, 1);
    sim.run(LONG);
    // As after a power failure: the end is not detected.
    sim.cut(0, 2);
    sim.stop(0, false);
    sim.run(Duration::from_millis(1500));
    assert!(sim.hosts[2].sessions.contains_key(&sim.hosts[0].identity()));
    sim.start(1, 2);
    sim.run(Duration::from_millis(500));
    assert_eq!(sim.connections(1, 2), 1);
}

#[test]
fn inbound_and_dialled_connections_have_separate_limits() {
    let limits = Limits { connections: 4, per_source: 2, pending: 2 };
    let peer = address(1, 0);
    let network = NetworkOptions {
        peers: vec![peer.to_string()],
        lost_after: Duration::from_secs(3),
        ..NetworkOptions::default()
    };
    let instance = ServiceInstance { started: 1, nonce: 1 };
    let me = Hello::new(identity(0, 1), instance, "", Some(address(0, 0)), &network);
    let mut mesh = Mesh::new(me, &network, limits, false, Duration::ZERO);
    let accept = |mesh: &mut Mesh| {
        let from = (0..8).map(|host| address(2 + host / 4, 0));
        from.filter(|from| mesh.accepted(address(0, 0), *from, Duration::ZERO).is_some()).count()
    };
    assert_eq!(accept(&mut mesh), 8, "each replaces an earlier one");
    assert_eq!(mesh.connections.len(), 2);
    for count in 3..16 {
        let addresses = Ok((address(0, 0), peer));
        assert!(mesh.dialled(&peer.to_string(), addresses, Duration::ZERO).is_some());
        assert_eq!(mesh.connections.len(), count);
    }
    assert_eq!(accept(&mut mesh), 8);
    assert_eq!(mesh.connections.len(), 15);
}

#[test]
fn restarted_service_replaces_its_unreachable_session() {
    let mut sim = Simulation::new(configs(2, 1, Topology::All), 1);
    sim.start(0, 1);
    sim.start(1, 1);
    sim.run(LONG);
    let before = sim.hosts[0].sessions[&sim.hosts[1].identity()].session;
    // The end is not reported, and the new service starts long before the timeout.
    sim.cut(0, 1);
    sim.stop(1, false);
    sim.start(1, 2);
    sim.mend(0, 1);
    sim.run(Duration::from_secs(1));
    check_full_mesh(&sim);
    assert_ne!(sim.hosts[0].sessions[&sim.hosts[1].identity()].session, before);
}

/// Equal start times happen after a boot without a clock of its own, or when the clock was set
/// back.
#[test]
fn instances_with_equal_start_times_have_different_sessions() {
    for restarts in [0, 1] {
        let mut sim = Simulation::new(configs(2, 1, Topology::All), 1);
        sim.start(0, 816);
        sim.start(1, 816);
        let mut numbers = Vec::new();
        for _ in 0..5 {
            sim.run(LONG);
            check_full_mesh(&sim);
            let other = sim.hosts[1 - restarts].identity();
            numbers.push(sim.hosts[restarts].sessions[&other].session);
            sim.stop(restarts, false);
            sim.start(restarts, 816);
        }
        numbers.sort();
        numbers.dedup();
        assert_eq!(numbers.len(), 5);
    }
}

#[test]
fn unreachable_peer_is_lost_on_both_sides() {
    let mut sim = Simulation::new(configs(2, 1, Topology::All), 1);
    sim.start(0, 1);
    sim.start(1, 1);
    sim.run(LONG);
    sim.cut(0, 1);
    sim.run(sim.timing.lost_after + Duration::from_secs(1));
    assert!(sim.hosts.iter().all(|host| host.sessions.is_empty()));
    let reports =
        sim.hosts[0].mesh.as_mut().unwrap().reports(Duration::ZERO, |_| SystemTime::UNIX_EPOCH);
    let address = address(1, 0).to_string();
    let is_lost = |state| state != PeerState::Connected;
    assert!(reports.iter().any(|report| report.address == address && is_lost(report.state)));
}

#[test]
fn report_names_why_the_last_session_ended() {
    for seed in 0..20 {
        let mut sim = Simulation::new(configs(2, seed, Topology::All), seed);
        sim.start(0, 1);
        sim.start(1, 1);
        sim.run(LONG);
        sim.cut(0, 1);
        sim.run(sim.timing.lost_after + Duration::from_secs(1));
        sim.mend(0, 1);
        sim.run(LONG);
        check_full_mesh(&sim);
        let (goes, stays) = if seed % 2 == 0 { (0, 1) } else { (1, 0) };
        sim.stop(goes, true);
        sim.run(Duration::from_millis(100));
        let reports = sim.hosts[stays]
            .mesh
            .as_mut()
            .unwrap()
            .reports(Duration::ZERO, |_| SystemTime::UNIX_EPOCH);
        let address = address(goes, 0).to_string();
        let report = reports.iter().find(|report| report.address == address).unwrap();
        // The address may have been dialled again already, and failed.
        let why = report.last_error.as_deref().unwrap();
        assert!(
            ["it closed the session", "connection refused"].contains(&why),
            "seed {seed}: {why}"
        );
    }
}

#[test]
fn departed_inbound_peer_is_reported_until_it_returns() {
    let away = |sim: &mut Simulation| {
        let now = sim.now;
        let mesh = sim.hosts[0].mesh.as_mut().unwrap();
        mesh.tick(now);
        let mut reports = mesh.reports(Duration::ZERO, |_| SystemTime::UNIX_EPOCH);
        reports.retain(|report| report.state == PeerState::Departed);
        assert!(reports.iter().all(|report| report.last_error.is_some()));
        let known =
            reports.into_iter().map(|report| (report.identity, report.label, report.address));
        known.collect::<Vec<_>>()
    };
    for is_graceful in [false, true] {
        let mut configs = configs(2, 1, Topology::All);
        configs[0].peers.clear();
        let mut sim = Simulation::new(configs, 1);
        sim.start(0, 1);
        sim.start(1, 1);
        sim.run(LONG);
        assert_eq!(away(&mut sim), []);
        let other = Some(sim.hosts[1].identity());
        let expected = [(other, Some("host 1".to_owned()), address(1, 0).to_string())];
        sim.stop(1, is_graceful);
        sim.run(sim.timing.lost_after + Duration::from_secs(1));
        assert_eq!(away(&mut sim), expected);
        sim.start(1, 2);
        sim.run(Duration::from_secs(1));
        check_full_mesh(&sim);
        assert_eq!(away(&mut sim), []);
        // A node that closed its session is remembered while messages may be retained for it.
        sim.stop(1, is_graceful);
        sim.run(sim.timing.lost_after + Duration::from_secs(1));
        assert_eq!(away(&mut sim), expected);
        let lost_after = sim.timing.lost_after;
        sim.run(if is_graceful { lost_after } else { sim.timing.forget_after });
        assert_eq!(away(&mut sim), []);
        // Or until another node is at its address.
        sim.start(1, 3);
        sim.run(Duration::from_secs(1));
        sim.stop(1, false);
        sim.run(sim.timing.lost_after + Duration::from_secs(1));
        assert_eq!(away(&mut sim), expected);
        sim.hosts[1].config.identity = identity(2, 1);
        sim.start(1, 4);
        sim.run(Duration::from_secs(1));
        assert_eq!(away(&mut sim), []);
        // Or until a node of its label connects from there without listening.
        let there = Some((sim.hosts[1].identity(), address(1, 0).to_string()));
        sim.stop(1, false);
        sim.run(sim.timing.lost_after + Duration::from_secs(1));
        let mut gone = away(&mut sim).into_iter();
        assert_eq!(gone.next().and_then(|(node, _, address)| Some((node?, address))), there);
        sim.hosts[1].config.identity = identity(3, 1);
        sim.hosts[1].config.listens = false;
        sim.start(1, 5);
        sim.run(Duration::from_secs(1));
        check_full_mesh(&sim);
        assert_eq!(away(&mut sim), []);
    }
}
