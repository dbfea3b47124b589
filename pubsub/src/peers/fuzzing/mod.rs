//! A peer that says whatever it likes, for the fuzzers and the replay of their corpora.

use std::net::SocketAddr;
use std::time::Duration;

use super::admission::Limits;
use super::connection_protocol::Timing;
use super::event::PeerEvent;
use super::identity::{NodeId, ServiceInstance};
use super::interests::{Interest, MAX_INTERESTS, PeerInterests, collect};
use super::mesh::{Action, Mesh, Start};
use super::protocol::{self, Frame, Hello};
use super::session_arbitration::ConnectionId;
use crate::error::Result;
use crate::settings::{SharedSettings, TopicSettings};

/// What a node heard of such a peer.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct FuzzOutcome {
    /// Events.
    pub events: usize,
    /// The connection was ended.
    pub is_over: bool,
}

impl Interest {
    /// An interest in a topic that is like this.
    pub(crate) fn new(
        topic: impl Into<String>,
        publishes: bool,
        subscribes: bool,
        settings: &TopicSettings,
    ) -> Result<Self> {
        let settings = SharedSettings::of(settings)?;
        Ok(Self { topic: topic.into(), publishes, subscribes, settings })
    }
}

/// A node to which one has connected.
fn node() -> (Mesh, ConnectionId) {
    let start = Start {
        // The decider: others claim.
        identity: NodeId([0xff; 16]),
        run: ServiceInstance { started: 1, chance: 1 },
        label: "node".to_owned(),
        listens: None,
        peers: Vec::new(),
        rendezvous: None,
        timing: Timing::new(Duration::from_secs(3)),
        limits: Limits::default(),
    };
    let mut mesh = Mesh::new(start, Duration::ZERO);
    let interest = Interest::new("topic", true, true, &TopicSettings::default());
    if let Ok(interests) = interest.and_then(|interest| collect([interest])) {
        mesh.set_interests(interests, Duration::ZERO);
    }
    let address = SocketAddr::from(([127, 0, 0, 1], 7000));
    // The first finds room.
    let connection = mesh.accepted(address, address, Duration::ZERO).unwrap_or(ConnectionId(0));
    (mesh, connection)
}

fn on_the_wire(body: &[u8]) -> Vec<u8> {
    let mut bytes = (body.len() as u32).to_le_bytes().to_vec();
    bytes.extend(body);
    bytes
}

/// How one begins who means well.
#[must_use]
pub fn valid_handshake() -> Vec<u8> {
    let hello = Hello {
        identity: NodeId([1; 16]),
        run: ServiceInstance { started: 1, chance: 1 },
        label: "guest".to_owned(),
        capabilities: 0,
        lost_after: 3000,
        listens: None,
    };
    let mut bytes = on_the_wire(&hello.encode());
    bytes.extend(on_the_wire(&protocol::encode(&Frame::Claim { instead_of: None })));
    bytes
}

/// These bytes come over a connection, a few at a time.
///
/// # Panics
/// If events come in an order that those who use peers do not expect.
#[must_use]
pub fn hear(bytes: &[u8]) -> FuzzOutcome {
    let (mut mesh, connection) = node();
    let mut now = Duration::ZERO;
    let mut heard = FuzzOutcome::default();
    let mut session = None;
    for (index, some) in bytes.chunks(61).enumerate() {
        // All at once, too.
        let some = if index == 0 && bytes.len() % 2 == 1 { bytes } else { some };
        now += Duration::from_millis(1);
        mesh.received(connection, some, now);
        mesh.tick(now);
        let waiting = mesh.output(connection).len();
        mesh.sent(connection, waiting, now);
        while let Some(action) = mesh.next_action() {
            match action {
                Action::Tell(event) => {
                    heard.events += 1;
                    let (is_first, is_last, number) = match event {
                        PeerEvent::Connected { session, .. } => (true, false, session),
                        PeerEvent::Disconnected { session, .. } => (false, true, session),
                        PeerEvent::Interests { session, .. }
                        | PeerEvent::ControlMessage { session, .. } => (false, false, session),
                    };
                    if is_first {
                        assert_eq!(session, None, "two sessions with one peer");
                        session = Some(number);
                    }
                    assert_eq!(session, Some(number), "an event outside of its session");
                    if is_last {
                        session = None;
                    }
                }
                Action::Close { .. } => {
                    heard.is_over = true;
                }
                Action::Dial { address } => unreachable!("nobody is wanted: {address}"),
            }
        }
        assert!(!heard.is_over || session.is_none(), "it is over, and nobody was told");
        if heard.is_over || some.len() == bytes.len() {
            break;
        }
    }
    heard
}

/// These bytes are what a peer says it publishes and subscribes: frames, each with its
/// length (two bytes, little endian) before it. Gives how many were accepted.
///
/// # Panics
/// If what was accepted cannot be said again in the same way, or is too much.
#[must_use]
pub fn fuzz_interests(mut bytes: &[u8]) -> usize {
    let mut peer_interests = PeerInterests::default();
    let mut accepted = 0;
    while let Some((length, rest)) = bytes.split_first_chunk() {
        let (body, rest) = rest.split_at(usize::from(u16::from_le_bytes(*length)).min(rest.len()));
        bytes = rest;
        let Ok(frame) = protocol::decode(body) else { break };
        let again = protocol::decode(&protocol::encode(&frame));
        assert_eq!(again.as_ref(), Ok(&frame), "it is said otherwise the second time");
        let Frame::Interests { number, changes } = frame else { break };
        if peer_interests.apply(number, &changes).is_err() {
            break;
        }
        assert!(peer_interests.len() <= MAX_INTERESTS);
        accepted += 1;
    }
    accepted
}
