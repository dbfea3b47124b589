//! Nodes on a simulated network in simulated time: bytes take time, links fail and recover,
//! services crash and restart.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::SocketAddr;
use std::time::Duration;

use crate::ids::NodeId;
use crate::network_options::NetworkOptions;
use crate::peers::identity::SessionId;
use crate::peers::interests::{Interest, InterestChange, Interests, collect_interests};
use crate::peers::mesh::{Action, Mesh};
use crate::peers::peer_event::PeerEvent;
use crate::peers::{ConnectionId, Hello, Limits, ServiceInstance, SplitMix64, Timing};

/// Configuration of a host.
#[derive(Debug, Clone)]
pub(super) struct HostConfig {
    pub(super) identity: NodeId,
    pub(super) addresses: Vec<SocketAddr>,
    pub(super) listens: bool,
    pub(super) peers: Vec<String>,
    pub(super) rendezvous: Option<String>,
}

#[derive(Debug)]
pub(super) struct Host {
    pub(super) config: HostConfig,
    pub(super) mesh: Option<Mesh>,
    /// Number of its current run: packets to an earlier run do not arrive.
    run: u32,
    links: HashMap<ConnectionId, usize>,
    pub(super) interests: Interests,
    /// State derived from its events alone.
    pub(super) sessions: BTreeMap<NodeId, KnownPeer>,
    used: BTreeSet<(NodeId, SessionId)>,
    pub(super) events: usize,
}

#[derive(Debug)]
pub(super) struct KnownPeer {
    pub(super) session: SessionId,
    pub(super) interests: BTreeMap<String, Interest>,
    has_interests: bool,
    received: u64,
    sent: u64,
}

#[derive(Debug)]
struct End {
    host: usize,
    run: u32,
    connection: Option<ConnectionId>,
    is_open: bool,
}

#[derive(Debug)]
struct SimulatedLink {
    ends: [End; 2],
    address: String,
    /// When the last packet to each end arrives: none overtakes.
    busy: [Duration; 2],
    /// Packets held until the link recovers.
    held: [Vec<SimulatedPacket>; 2],
}

#[derive(Debug)]
enum SimulatedPacket {
    ConnectRequest,
    Opened,
    Bytes(Vec<u8>),
    Closed,
}

#[derive(Debug)]
enum SimulatedEvent {
    Arrives { link: usize, end: usize, packet: SimulatedPacket },
    Fails { host: usize, run: u32, address: String },
}

#[derive(Debug)]
pub(super) struct Simulation {
    pub(super) now: Duration,
    pub(super) hosts: Vec<Host>,
    links: Vec<SimulatedLink>,
    queue: BTreeMap<(Duration, u64), SimulatedEvent>,
    cuts: BTreeSet<(usize, usize)>,
    random: SplitMix64,
    next: u64,
    pub(super) timing: Timing,
}

impl Simulation {
    pub(super) fn new(configs: Vec<HostConfig>, seed: u64) -> Self {
        let hosts = configs.into_iter().map(|config| Host {
            config,
            mesh: None,
            run: 0,
            links: HashMap::new(),
            interests: Interests::new(),
            sessions: BTreeMap::new(),
            used: BTreeSet::new(),
            events: 0,
        });
        Self {
            now: Duration::ZERO,
            hosts: hosts.collect(),
            links: Vec::new(),
            queue: BTreeMap::new(),
            cuts: BTreeSet::new(),
            random: SplitMix64(seed),
            next: 0,
            timing: Timing::new(Duration::from_secs(3)),
        }
    }

    /// Starts the service of a host, if it does not run. Clocks may be wrong.
    pub(super) fn start(&mut self, index: usize, started: u64) {
        let host = &mut self.hosts[index];
        if host.mesh.is_some() {
            return;
        }
        let config = host.config.clone();
        let network = NetworkOptions {
            peers: config.peers,
            rendezvous: config.rendezvous,
            lost_after: self.timing.lost_after,
            ..NetworkOptions::default()
        };
        let instance = ServiceInstance { started, nonce: self.random.draw() };
        let (label, listens) =
            (format!("host {index}"), config.listens.then(|| config.addresses[0]));
        let me = Hello::new(config.identity, instance, &label, listens, &network);
        let mut mesh = Mesh::new(me, &network, Limits::default(), false, self.now);
        mesh.set_interests(host.interests.clone(), self.now);
        host.mesh = Some(mesh);
        host.used.clear();
        self.pump(index);
    }

    /// Ends it, with a goodbye or without.
    pub(super) fn stop(&mut self, index: usize, is_graceful: bool) {
        let host = &mut self.hosts[index];
        let Some(mut mesh) = host.mesh.take() else { return };
        if is_graceful {
            mesh.close_all();
            while let Some(action) = mesh.next_action() {
                if let Action::Close { connection, unsent } = action {
                    let link = self.hosts[index].links[&connection];
                    self.post(link, index, connection, SimulatedPacket::Bytes(unsent));
                }
            }
        }
        let host = &mut self.hosts[index];
        host.run += 1;
        host.sessions.clear();
        for (connection, link) in std::mem::take(&mut host.links) {
            self.post(link, index, connection, SimulatedPacket::Closed);
        }
    }

    pub(super) fn cut(&mut self, one: usize, two: usize) {
        self.cuts.insert((one.min(two), one.max(two)));
    }

    pub(super) fn mend(&mut self, one: usize, two: usize) {
        self.cuts.remove(&(one.min(two), one.max(two)));
        for link in 0..self.links.len() {
            let [a, b] = self.links[link].ends.each_ref().map(|end| end.host);
            if (a.min(b), a.max(b)) != (one.min(two), one.max(two)) {
                continue;
            }
            for end in 0..2 {
                // At once: packets in flight were sent later.
                for packet in std::mem::take(&mut self.links[link].held[end]) {
                    self.handle(SimulatedEvent::Arrives { link, end, packet });
                }
            }
        }
    }

    pub(super) fn mend_all(&mut self) {
        for (one, two) in self.cuts.clone() {
            self.mend(one, two);
        }
    }

    pub(super) fn set_interests(&mut self, index: usize, interests: Vec<Interest>) {
        let interests = collect_interests(interests).unwrap();
        let host = &mut self.hosts[index];
        host.interests = interests.clone();
        if let Some(mesh) = &mut host.mesh {
            mesh.set_interests(interests, self.now);
            self.pump(index);
        }
    }

    /// Sends control messages to all connected nodes.
    pub(super) fn send_to_all(&mut self, index: usize, count: u64) {
        let host = &mut self.hosts[index];
        let Some(mesh) = &mut host.mesh else { return };
        for (node, known) in &mut host.sessions {
            for _ in 0..count {
                let message = known.sent.to_le_bytes().to_vec();
                mesh.send_control_message(*node, known.session, message, self.now).unwrap();
                known.sent += 1;
            }
        }
        self.pump(index);
    }

    /// Runs for this duration.
    pub(super) fn run(&mut self, duration: Duration) {
        let end = self.now + duration;
        loop {
            let deadlines = self.hosts.iter().enumerate().filter_map(|(index, host)| {
                Some((host.mesh.as_ref()?.deadline()?.max(self.now), index))
            });
            let deadline = deadlines.min();
            let queued = self.queue.first_key_value().map(|((moment, _), _)| *moment);
            match (deadline, queued) {
                (deadline, Some(moment))
                    if moment <= end && deadline.is_none_or(|(first, _)| moment <= first) =>
                {
                    self.now = moment;
                    let (_, event) = self.queue.pop_first().unwrap();
                    self.handle(event);
                }
                (Some((moment, host)), _) if moment <= end => {
                    self.now = moment;
                    self.hosts[host].mesh.as_mut().unwrap().tick(moment);
                    self.pump(host);
                    let next = self.hosts[host].mesh.as_ref().unwrap().deadline();
                    assert!(next.is_none_or(|next| next > moment), "the deadline does not advance");
                }
                _ => break,
            }
        }
        self.now = end;
    }

    fn schedule(&mut self, moment: Duration, event: SimulatedEvent) {
        self.next += 1;
        self.queue.insert((moment, self.next), event);
    }

    /// Sends a packet to one end of a link.
    fn send(&mut self, link: usize, end: usize, packet: SimulatedPacket) {
        let delay = Duration::from_micros(20 + self.random.draw() % 40_000);
        let busy = &mut self.links[link].busy[end];
        *busy = (*busy).max(self.now + delay);
        let moment = *busy;
        self.schedule(moment, SimulatedEvent::Arrives { link, end, packet });
    }

    /// Sends a packet from a host's connection to the other side.
    fn post(
        &mut self,
        link: usize,
        host: usize,
        connection: ConnectionId,
        packet: SimulatedPacket,
    ) {
        let ends = &mut self.links[link].ends;
        let own = ends
            .iter()
            .position(|end| end.host == host && end.connection == Some(connection))
            .unwrap();
        if matches!(packet, SimulatedPacket::Closed) {
            ends[own].is_open = false;
        }
        self.send(link, 1 - own, packet);
    }

    fn handle(&mut self, event: SimulatedEvent) {
        let (link, end, packet) = match event {
            SimulatedEvent::Fails { host, run, address } => {
                if self.hosts[host].run == run {
                    self.report(host, &address, None);
                }
                return;
            }
            SimulatedEvent::Arrives { link, end, packet } => (link, end, packet),
        };
        let [a, b] = self.links[link].ends.each_ref().map(|end| end.host);
        let is_cut = self.cuts.contains(&(a.min(b), a.max(b)));
        if is_cut || !self.links[link].held[end].is_empty() {
            self.links[link].held[end].push(packet);
            return;
        }
        let End { host, run, connection, is_open } = self.links[link].ends[end];
        let is_alive = self.hosts[host].run == run && self.hosts[host].mesh.is_some();
        match packet {
            SimulatedPacket::ConnectRequest => {
                let host = &mut self.hosts[b];
                let local_address = host.config.addresses[0];
                let peer_address = SocketAddr::new("10.9.9.9".parse().unwrap(), 1000 + a as u16);
                let peer_address = SocketAddr::new(peer_address.ip(), peer_address.port());
                let accepted = match &mut host.mesh {
                    Some(mesh) if host.config.listens => {
                        mesh.accepted(local_address, peer_address, self.now)
                    }
                    _ => None,
                };
                let Some(connection) = accepted else {
                    return self.send(link, 0, SimulatedPacket::Closed);
                };
                host.links.insert(connection, link);
                let run = host.run;
                self.links[link].ends[1] =
                    End { host: b, run, connection: Some(connection), is_open: true };
                self.send(link, 0, SimulatedPacket::Opened);
                self.pump(b);
            }
            SimulatedPacket::Opened if is_alive && is_open => self.open(link),
            SimulatedPacket::Closed if is_alive && is_open && connection.is_none() => {
                self.links[link].ends[end].is_open = false;
                let address = self.links[link].address.clone();
                self.report(host, &address, None);
            }
            SimulatedPacket::Bytes(bytes) if is_alive && is_open => {
                let mesh = self.hosts[host].mesh.as_mut().unwrap();
                mesh.received(connection.unwrap(), &bytes, self.now);
                self.pump(host);
            }
            SimulatedPacket::Closed if is_alive && is_open => {
                let mesh = self.hosts[host].mesh.as_mut().unwrap();
                mesh.broken(connection.unwrap(), "closed", self.now);
                self.pump(host);
            }
            SimulatedPacket::Closed => {}
            // The receiver does not exist any more.
            SimulatedPacket::Opened | SimulatedPacket::Bytes(_) => {
                self.send(link, 1 - end, SimulatedPacket::Closed)
            }
        }
    }

    /// A dialled connection is established.
    fn open(&mut self, link: usize) {
        let host = self.links[link].ends[0].host;
        let address = self.links[link].address.clone();
        self.report(host, &address, Some(link));
    }

    fn report(&mut self, host: usize, address: &str, link: Option<usize>) {
        let now = self.now;
        let Host { mesh, config, links, .. } = &mut self.hosts[host];
        let Some(mesh) = mesh else { return };
        let result = match link {
            Some(_) => Ok((config.addresses[0], address.parse().unwrap())),
            None => Err("connection refused".to_owned()),
        };
        let connection = mesh.dialled(address, result, now);
        if let Some(link) = link {
            self.links[link].ends[0].connection = connection;
            links.insert(connection.unwrap(), link);
        }
        self.pump(host);
    }

    fn dial(&mut self, host: usize, address: String) {
        let run = self.hosts[host].run;
        let to: SocketAddr = address.parse().unwrap();
        let other = self.hosts.iter().position(|host| host.config.addresses.contains(&to));
        let Some(other) = other else {
            let moment = self.now + Duration::from_millis(1);
            return self.schedule(moment, SimulatedEvent::Fails { host, run, address });
        };
        if self.cuts.contains(&(host.min(other), host.max(other))) {
            // Without an answer the attempt fails after a timeout.
            let moment = self.now + self.timing.handshake_timeout;
            return self.schedule(moment, SimulatedEvent::Fails { host, run, address });
        }
        let ends = [host, other].map(|host| End {
            host,
            run: self.hosts[host].run,
            connection: None,
            is_open: true,
        });
        let link = SimulatedLink {
            ends,
            address,
            busy: [Duration::ZERO; 2],
            held: [Vec::new(), Vec::new()],
        };
        self.links.push(link);
        self.send(self.links.len() - 1, 1, SimulatedPacket::ConnectRequest);
    }

    /// Executes the actions of a host's mesh.
    fn pump(&mut self, index: usize) {
        loop {
            let host = &mut self.hosts[index];
            let Some(mesh) = &mut host.mesh else { return };
            let mut packets = Vec::new();
            for connection in mesh.connections.keys().copied().collect::<Vec<_>>() {
                let mut bytes = Vec::new();
                loop {
                    let output = mesh.output(connection).to_vec();
                    if output.is_empty() {
                        break;
                    }
                    mesh.sent(connection, output.len(), self.now);
                    bytes.extend(output);
                }
                if !bytes.is_empty() {
                    packets.push((connection, SimulatedPacket::Bytes(bytes)));
                }
            }
            let action = mesh.next_action();
            for (connection, packet) in packets {
                let link = self.hosts[index].links[&connection];
                self.post(link, index, connection, packet);
            }
            match action {
                None => return,
                Some(Action::Dial { address }) => self.dial(index, address),
                Some(Action::Report(event)) => self.hosts[index].handle_event(event),
                Some(Action::Close { connection, unsent }) => {
                    let link = self.hosts[index].links.remove(&connection).unwrap();
                    if !unsent.is_empty() {
                        self.post(link, index, connection, SimulatedPacket::Bytes(unsent));
                    }
                    self.post(link, index, connection, SimulatedPacket::Closed);
                }
            }
        }
    }

    /// Connections between two hosts that both ends have.
    pub(super) fn connections(&self, one: usize, two: usize) -> usize {
        let of = |host: &Host| host.links.values().copied().collect::<BTreeSet<_>>();
        of(&self.hosts[one]).intersection(&of(&self.hosts[two])).count()
    }

    /// All connections of a host.
    pub(super) fn connections_of(&self, host: usize) -> usize {
        self.hosts[host].links.len()
    }
}

impl Host {
    /// Checks what every user of peers relies on.
    fn handle_event(&mut self, event: PeerEvent) {
        self.events += 1;
        match event {
            PeerEvent::Connected { node, session, .. } => {
                assert_ne!(node, self.config.identity, "a node connected to itself");
                assert!(self.used.insert((node, session)), "a session number was reused");
                let known = KnownPeer {
                    session,
                    interests: BTreeMap::new(),
                    has_interests: false,
                    received: 0,
                    sent: 0,
                };
                assert!(self.sessions.insert(node, known).is_none(), "two sessions with {node}");
            }
            PeerEvent::Interests { node, session, changes } => {
                let known = self.sessions.get_mut(&node).expect("the node is connected");
                assert_eq!(known.session, session);
                assert!(!changes.is_empty() || !known.has_interests, "nothing has changed");
                known.has_interests = true;
                for change in changes {
                    match change {
                        InterestChange::Set(interest) => {
                            let topic = interest.topic.clone();
                            let before = known.interests.insert(topic, interest.clone());
                            assert_ne!(before, Some(interest));
                        }
                        InterestChange::Removed(topic) => {
                            known.interests.remove(&topic).expect("the interest exists");
                        }
                    }
                }
            }
            PeerEvent::ControlMessage { node, session, bytes } => {
                let known = self.sessions.get_mut(&node).expect("the node is connected");
                assert_eq!(known.session, session);
                let number = u64::from_le_bytes(bytes.try_into().unwrap());
                assert_eq!(number, known.received, "messages arrive in order, and once");
                known.received += 1;
            }
            PeerEvent::Disconnected { node, session, .. } => {
                let known = self.sessions.remove(&node).expect("the node is connected");
                assert_eq!(known.session, session);
            }
        }
    }

    /// Returns true if it has received all messages that the other sent in their session.
    pub(super) fn has_all_messages_of(&self, other: &Self) -> bool {
        let received = self.sessions[&other.config.identity].received;
        received == other.sessions[&self.config.identity].sent
    }

    pub(super) fn identity(&self) -> NodeId {
        self.config.identity
    }
}
