//! Nodes on a network that is made of nothing, in time that is made up: bytes take their
//! time, cables are cut and mended, services crash and start again.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::SocketAddr;
use std::time::Duration;

use super::admission::Limits;
use super::connection_protocol::Timing;
use super::event::PeerEvent;
use super::identity::{NodeId, ServiceInstance, SessionId, SplitMix64};
use super::interests::{Interest, InterestChange, Interests, collect};
use super::mesh::{Action, Mesh, Start};
use super::session_arbitration::ConnectionId;

/// How a host is set up.
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
    pub(super) plan: HostConfig,
    pub(super) mesh: Option<Mesh>,
    /// Which of its lives: what was sent to an earlier one does not arrive.
    life: u32,
    wires: HashMap<ConnectionId, usize>,
    pub(super) interests: Interests,
    /// What it knows by its events alone.
    pub(super) sessions: BTreeMap<NodeId, KnownPeer>,
    used: BTreeSet<(NodeId, SessionId)>,
    pub(super) events: usize,
}

#[derive(Debug)]
pub(super) struct KnownPeer {
    pub(super) session: SessionId,
    pub(super) interests: BTreeMap<String, Interest>,
    has_heard: bool,
    letters: u64,
    told: u64,
}

#[derive(Debug)]
struct End {
    host: usize,
    life: u32,
    connection: Option<ConnectionId>,
    is_open: bool,
}

#[derive(Debug)]
struct SimulatedLink {
    ends: [End; 2],
    address: String,
    /// By when what goes to each end has arrived: nothing overtakes.
    busy: [Duration; 2],
    /// What waits for the cable to be mended.
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
    Arrives { wire: usize, end: usize, parcel: SimulatedPacket },
    Fails { host: usize, life: u32, address: String },
}

#[derive(Debug)]
pub(super) struct Simulation {
    pub(super) now: Duration,
    pub(super) hosts: Vec<Host>,
    wires: Vec<SimulatedLink>,
    agenda: BTreeMap<(Duration, u64), SimulatedEvent>,
    cuts: BTreeSet<(usize, usize)>,
    chance: SplitMix64,
    next: u64,
    pub(super) timing: Timing,
}

impl Simulation {
    pub(super) fn new(plans: Vec<HostConfig>, seed: u64) -> Self {
        let hosts = plans.into_iter().map(|plan| Host {
            plan,
            mesh: None,
            life: 0,
            wires: HashMap::new(),
            interests: Interests::new(),
            sessions: BTreeMap::new(),
            used: BTreeSet::new(),
            events: 0,
        });
        Self {
            now: Duration::ZERO,
            hosts: hosts.collect(),
            wires: Vec::new(),
            agenda: BTreeMap::new(),
            cuts: BTreeSet::new(),
            chance: SplitMix64(seed),
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
        let plan = host.plan.clone();
        let start = Start {
            identity: plan.identity,
            run: ServiceInstance { started, chance: self.chance.draw() },
            label: format!("host {index}"),
            listens: plan.listens.then(|| plan.addresses[0]),
            peers: plan.peers,
            rendezvous: plan.rendezvous,
            timing: self.timing,
            limits: Limits::default(),
        };
        let mut mesh = Mesh::new(start, self.now);
        mesh.set_interests(host.interests.clone(), self.now);
        host.mesh = Some(mesh);
        host.used.clear();
        self.pump(index);
    }

    /// Ends it, with a goodbye or without.
    pub(super) fn stop(&mut self, index: usize, says_goodbye: bool) {
        let host = &mut self.hosts[index];
        let Some(mut mesh) = host.mesh.take() else { return };
        if says_goodbye {
            mesh.leave();
            while let Some(action) = mesh.next_action() {
                if let Action::Close { connection, rest } = action {
                    let wire = self.hosts[index].wires[&connection];
                    self.post(wire, index, connection, SimulatedPacket::Bytes(rest));
                }
            }
        }
        let host = &mut self.hosts[index];
        host.life += 1;
        host.sessions.clear();
        for (connection, wire) in std::mem::take(&mut host.wires) {
            self.post(wire, index, connection, SimulatedPacket::Closed);
        }
    }

    pub(super) fn cut(&mut self, one: usize, two: usize) {
        self.cuts.insert((one.min(two), one.max(two)));
    }

    pub(super) fn mend(&mut self, one: usize, two: usize) {
        self.cuts.remove(&(one.min(two), one.max(two)));
        for wire in 0..self.wires.len() {
            let [a, b] = self.wires[wire].ends.each_ref().map(|end| end.host);
            if (a.min(b), a.max(b)) != (one.min(two), one.max(two)) {
                continue;
            }
            for end in 0..2 {
                // At once: what is on its way now was sent later.
                for parcel in std::mem::take(&mut self.wires[wire].held[end]) {
                    self.handle(SimulatedEvent::Arrives { wire, end, parcel });
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
        let interests = collect(interests).unwrap();
        let host = &mut self.hosts[index];
        host.interests = interests.clone();
        if let Some(mesh) = &mut host.mesh {
            mesh.set_interests(interests, self.now);
            self.pump(index);
        }
    }

    /// Sends letters to all that it knows.
    pub(super) fn tell_all(&mut self, index: usize, count: u64) {
        let host = &mut self.hosts[index];
        let Some(mesh) = &mut host.mesh else { return };
        for (node, known) in &mut host.sessions {
            for _ in 0..count {
                let letter = known.told.to_le_bytes().to_vec();
                mesh.tell(*node, known.session, letter, self.now).unwrap();
                known.told += 1;
            }
        }
        self.pump(index);
    }

    /// Lets so much time pass.
    pub(super) fn run(&mut self, duration: Duration) {
        let end = self.now + duration;
        loop {
            let deadlines = self.hosts.iter().enumerate().filter_map(|(index, host)| {
                Some((host.mesh.as_ref()?.deadline()?.max(self.now), index))
            });
            let deadline = deadlines.min();
            let agenda = self.agenda.first_key_value().map(|((moment, _), _)| *moment);
            match (deadline, agenda) {
                (deadline, Some(moment))
                    if moment <= end && deadline.is_none_or(|(first, _)| moment <= first) =>
                {
                    self.now = moment;
                    let (_, happening) = self.agenda.pop_first().unwrap();
                    self.handle(happening);
                }
                (Some((moment, host)), _) if moment <= end => {
                    self.now = moment;
                    self.hosts[host].mesh.as_mut().unwrap().tick(moment);
                    self.pump(host);
                    let next = self.hosts[host].mesh.as_ref().unwrap().deadline();
                    assert!(next.is_none_or(|next| next > moment), "a deadline that stays");
                }
                _ => break,
            }
        }
        self.now = end;
    }

    fn schedule(&mut self, moment: Duration, happening: SimulatedEvent) {
        self.next += 1;
        self.agenda.insert((moment, self.next), happening);
    }

    /// Sends a parcel to one end of a wire.
    fn send(&mut self, wire: usize, end: usize, parcel: SimulatedPacket) {
        let delay = Duration::from_micros(20 + self.chance.draw() % 40_000);
        let busy = &mut self.wires[wire].busy[end];
        *busy = (*busy).max(self.now + delay);
        let moment = *busy;
        self.schedule(moment, SimulatedEvent::Arrives { wire, end, parcel });
    }

    /// Sends a parcel from a host's connection to the other side.
    fn post(
        &mut self,
        wire: usize,
        host: usize,
        connection: ConnectionId,
        parcel: SimulatedPacket,
    ) {
        let ends = &mut self.wires[wire].ends;
        let own = ends
            .iter()
            .position(|end| end.host == host && end.connection == Some(connection))
            .unwrap();
        if matches!(parcel, SimulatedPacket::Closed) {
            ends[own].is_open = false;
        }
        self.send(wire, 1 - own, parcel);
    }

    fn handle(&mut self, happening: SimulatedEvent) {
        let (wire, end, parcel) = match happening {
            SimulatedEvent::Fails { host, life, address } => {
                if self.hosts[host].life == life {
                    self.report(host, &address, None);
                }
                return;
            }
            SimulatedEvent::Arrives { wire, end, parcel } => (wire, end, parcel),
        };
        let [a, b] = self.wires[wire].ends.each_ref().map(|end| end.host);
        let is_cut = self.cuts.contains(&(a.min(b), a.max(b)));
        if is_cut || !self.wires[wire].held[end].is_empty() {
            self.wires[wire].held[end].push(parcel);
            return;
        }
        let End { host, life, connection, is_open } = self.wires[wire].ends[end];
        let is_alive = self.hosts[host].life == life && self.hosts[host].mesh.is_some();
        match parcel {
            SimulatedPacket::ConnectRequest => {
                let host = &mut self.hosts[b];
                let local_address = host.plan.addresses[0];
                let peer_address = SocketAddr::new("10.9.9.9".parse().unwrap(), 1000 + a as u16);
                let peer_address = SocketAddr::new(peer_address.ip(), peer_address.port());
                let accepted = match &mut host.mesh {
                    Some(mesh) if host.plan.listens => {
                        mesh.accepted(local_address, peer_address, self.now)
                    }
                    _ => None,
                };
                let Some(connection) = accepted else {
                    return self.send(wire, 0, SimulatedPacket::Closed);
                };
                host.wires.insert(connection, wire);
                let life = host.life;
                self.wires[wire].ends[1] =
                    End { host: b, life, connection: Some(connection), is_open: true };
                self.send(wire, 0, SimulatedPacket::Opened);
                self.pump(b);
            }
            SimulatedPacket::Opened if is_alive && is_open => self.open(wire),
            SimulatedPacket::Closed if is_alive && is_open && connection.is_none() => {
                self.wires[wire].ends[end].is_open = false;
                let address = self.wires[wire].address.clone();
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
            // Nobody is here any more who would take it.
            SimulatedPacket::Opened | SimulatedPacket::Bytes(_) => {
                self.send(wire, 1 - end, SimulatedPacket::Closed)
            }
        }
    }

    /// A dialled connection came about.
    fn open(&mut self, wire: usize) {
        let host = self.wires[wire].ends[0].host;
        let address = self.wires[wire].address.clone();
        self.report(host, &address, Some(wire));
    }

    fn report(&mut self, host: usize, address: &str, wire: Option<usize>) {
        let now = self.now;
        let Host { mesh, plan, wires, .. } = &mut self.hosts[host];
        let Some(mesh) = mesh else { return };
        let result = match wire {
            Some(_) => Ok((plan.addresses[0], address.parse().unwrap())),
            None => Err("connection refused".to_owned()),
        };
        let connection = mesh.dialled(address, result, now);
        if let Some(wire) = wire {
            self.wires[wire].ends[0].connection = connection;
            wires.insert(connection.unwrap(), wire);
        }
        self.pump(host);
    }

    fn dial(&mut self, host: usize, address: String) {
        let life = self.hosts[host].life;
        let to: SocketAddr = address.parse().unwrap();
        let other = self.hosts.iter().position(|host| host.plan.addresses.contains(&to));
        let Some(other) = other else {
            let moment = self.now + Duration::from_millis(1);
            return self.schedule(moment, SimulatedEvent::Fails { host, life, address });
        };
        if self.cuts.contains(&(host.min(other), host.max(other))) {
            // Nobody answers, and that takes its time.
            let moment = self.now + self.timing.handshake_timeout;
            return self.schedule(moment, SimulatedEvent::Fails { host, life, address });
        }
        let ends = [host, other].map(|host| End {
            host,
            life: self.hosts[host].life,
            connection: None,
            is_open: true,
        });
        let wire = SimulatedLink {
            ends,
            address,
            busy: [Duration::ZERO; 2],
            held: [Vec::new(), Vec::new()],
        };
        self.wires.push(wire);
        self.send(self.wires.len() - 1, 1, SimulatedPacket::ConnectRequest);
    }

    /// Does what a host's mesh wants done.
    fn pump(&mut self, index: usize) {
        loop {
            let host = &mut self.hosts[index];
            let Some(mesh) = &mut host.mesh else { return };
            let mut parcels = Vec::new();
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
                    parcels.push((connection, SimulatedPacket::Bytes(bytes)));
                }
            }
            let action = mesh.next_action();
            for (connection, parcel) in parcels {
                let wire = self.hosts[index].wires[&connection];
                self.post(wire, index, connection, parcel);
            }
            match action {
                None => return,
                Some(Action::Dial { address }) => self.dial(index, address),
                Some(Action::Tell(event)) => self.hosts[index].hears(event),
                Some(Action::Close { connection, rest }) => {
                    let wire = self.hosts[index].wires.remove(&connection).unwrap();
                    if !rest.is_empty() {
                        self.post(wire, index, connection, SimulatedPacket::Bytes(rest));
                    }
                    self.post(wire, index, connection, SimulatedPacket::Closed);
                }
            }
        }
    }

    /// Connections between two hosts that both ends believe in.
    pub(super) fn connections(&self, one: usize, two: usize) -> usize {
        let of = |host: &Host| host.wires.values().copied().collect::<BTreeSet<_>>();
        of(&self.hosts[one]).intersection(&of(&self.hosts[two])).count()
    }

    /// All connections of a host.
    pub(super) fn connections_of(&self, host: usize) -> usize {
        self.hosts[host].wires.len()
    }
}

impl Host {
    /// Checks what every user of peers relies on.
    fn hears(&mut self, event: PeerEvent) {
        self.events += 1;
        match event {
            PeerEvent::Connected { node, session, .. } => {
                assert_ne!(node, self.plan.identity, "it met itself");
                assert!(self.used.insert((node, session)), "the number of a session came again");
                let known = KnownPeer {
                    session,
                    interests: BTreeMap::new(),
                    has_heard: false,
                    letters: 0,
                    told: 0,
                };
                assert!(self.sessions.insert(node, known).is_none(), "two sessions with {node}");
            }
            PeerEvent::Interests { node, session, changes } => {
                let known = self.sessions.get_mut(&node).expect("it has appeared");
                assert_eq!(known.session, session);
                assert!(!changes.is_empty() || !known.has_heard, "nothing has changed");
                known.has_heard = true;
                for change in changes {
                    match change {
                        InterestChange::Set(interest) => {
                            let topic = interest.topic.clone();
                            let before = known.interests.insert(topic, interest.clone());
                            assert_ne!(before, Some(interest));
                        }
                        InterestChange::Removed(topic) => {
                            known.interests.remove(&topic).expect("it was there");
                        }
                    }
                }
            }
            PeerEvent::ControlMessage { node, session, bytes } => {
                let known = self.sessions.get_mut(&node).expect("it has appeared");
                assert_eq!(known.session, session);
                let number = u64::from_le_bytes(bytes.try_into().unwrap());
                assert_eq!(number, known.letters, "letters in order, and once");
                known.letters += 1;
            }
            PeerEvent::Disconnected { node, session, .. } => {
                let known = self.sessions.remove(&node).expect("it has appeared");
                assert_eq!(known.session, session);
            }
        }
    }

    /// Has it heard all letters that the other told in their session?
    pub(super) fn has_all_letters_of(&self, other: &Self) -> bool {
        let heard = self.sessions[&other.plan.identity].letters;
        heard == other.sessions[&self.plan.identity].told
    }

    pub(super) fn identity(&self) -> NodeId {
        self.plan.identity
    }
}
