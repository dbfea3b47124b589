//! A hostile peer, for the fuzzers and the replay of their corpora.

use std::net::SocketAddr;
use std::time::Duration;

use super::interests::{Interest, MAX_INTERESTS, PeerInterests, collect_interests};
use super::mesh::{Action, Mesh};
use super::node_protocol::{self, Frame};
use super::peer_event::PeerEvent;
use super::{ConnectionId, Hello, Limits, ServiceInstance};
use crate::error::Result;
use crate::ids::NodeId;
use crate::network_options::NetworkOptions;
use crate::settings::{SharedSettings, TopicSettings};

/// What a node received from such a peer.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct FuzzOutcome {
    /// Number of events.
    pub events: usize,
    /// The connection was closed.
    pub is_over: bool,
}

impl Interest {
    /// An interest in a topic with these settings.
    pub(crate) fn new(
        topic: impl Into<String>,
        publishes: bool,
        subscribes: bool,
        settings: &TopicSettings,
    ) -> Result<Self> {
        let settings = SharedSettings::of(settings)?;
        let topic = topic.into();
        let mut interest = Self { topic, publishes, subscribes, settings, subscription: 0 };
        interest.clear_local_settings();
        Ok(interest)
    }
}

/// A node with one accepted connection.
fn node() -> (Mesh, ConnectionId) {
    let network =
        NetworkOptions { lost_after: Duration::from_secs(3), ..NetworkOptions::default() };
    let instance = ServiceInstance { started: 1, nonce: 1 };
    // The greater id is the acceptor: peers claim.
    let me = Hello::new(NodeId([0xff; 16]), instance, "node", None, &network);
    let mut mesh = Mesh::new(me, &network, Limits::default(), false, Duration::ZERO);
    let interest = Interest::new("topic", true, true, &TopicSettings::default());
    if let Ok(interests) = interest.and_then(|interest| collect_interests([interest])) {
        mesh.set_interests(interests, Duration::ZERO);
    }
    let address = SocketAddr::from(([127, 0, 0, 1], 7000));
    // The first connection is within the limits.
    let connection = mesh.accepted(address, address, Duration::ZERO).unwrap_or(ConnectionId(0));
    (mesh, connection)
}

fn on_the_wire(body: &[u8]) -> Vec<u8> {
    let mut bytes = (body.len() as u32).to_le_bytes().to_vec();
    bytes.extend(body);
    bytes
}

/// A valid hello and claim.
#[must_use]
pub fn valid_handshake() -> Vec<u8> {
    let hello = Hello {
        identity: NodeId([1; 16]),
        instance: ServiceInstance { started: 1, nonce: 1 },
        label: "peer".to_owned(),
        capabilities: 0,
        lost_after: 3000,
        listens: None,
    };
    let mut bytes = on_the_wire(&hello.encode());
    bytes.extend(on_the_wire(&node_protocol::encode(&Frame::Claim { instead_of: None })));
    bytes
}

/// Delivers these bytes over a connection, in small parts.
///
/// # Panics
/// If events arrive in an order that users of peers do not expect.
#[must_use]
pub fn fuzz_session(bytes: &[u8]) -> FuzzOutcome {
    let (mut mesh, connection) = node();
    let mut now = Duration::ZERO;
    let mut outcome = FuzzOutcome::default();
    let mut session = None;
    for (index, some) in bytes.chunks(61).enumerate() {
        // An odd length is delivered at once.
        let some = if index == 0 && bytes.len() % 2 == 1 { bytes } else { some };
        now += Duration::from_millis(1);
        mesh.received(connection, some, now);
        mesh.tick(now);
        let waiting = mesh.output(connection).len();
        mesh.sent(connection, waiting, now);
        while let Some(action) = mesh.next_action() {
            match action {
                Action::Report(event) => {
                    outcome.events += 1;
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
                    outcome.is_over = true;
                }
                Action::Dial { address } => unreachable!("no peer was configured: {address}"),
            }
        }
        assert!(
            !outcome.is_over || session.is_none(),
            "the connection was closed without a Disconnected event"
        );
        if outcome.is_over || some.len() == bytes.len() {
            break;
        }
    }
    outcome
}

/// Decodes the interests of a peer: frames, each with its length before it (two bytes, little
/// endian). Returns the number of accepted frames.
///
/// # Panics
/// If an accepted frame is encoded differently, or exceeds the limits.
#[must_use]
pub fn fuzz_interests(mut bytes: &[u8]) -> usize {
    let mut peer_interests = PeerInterests::default();
    let mut accepted = 0;
    while let Some((length, rest)) = bytes.split_first_chunk() {
        let (body, rest) = rest.split_at(usize::from(u16::from_le_bytes(*length)).min(rest.len()));
        bytes = rest;
        let Ok(frame) = node_protocol::decode(body) else { break };
        let again = node_protocol::decode(&node_protocol::encode(&frame));
        assert_eq!(again.as_ref(), Ok(&frame), "the second encoding differs");
        let Frame::Interests { number, changes } = frame else { break };
        if peer_interests.apply(number, &changes).is_err() {
            break;
        }
        assert!(peer_interests.len() <= MAX_INTERESTS);
        accepted += 1;
    }
    accepted
}
