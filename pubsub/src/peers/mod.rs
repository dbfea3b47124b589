//! Sessions between nodes: membership, interests in topics, and control messages.
//!
//! This is the control plane between nodes, over TCP; payloads do not pass here. Replication gets
//! events of nodes that [connect](PeerEvent::Connected) and disconnect, and sends its control
//! messages through the peers.
//!
//! The logic knows no sockets, threads or clock: `node_protocol` (frames), `framing`,
//! `heartbeats` (one connection), `session_arbitration` (which connection with a node becomes the
//! session), `address_book` (which addresses to dial, and when), `advertised_address` (how others
//! reach a node), `interests` (interests and their changes), `mesh` (all of it, with received
//! frames, limits of connections and reports).
//! `event_loop`, `socket`, `resolver`, `event_queue` and `handle` bind it to the system.

mod address_book;
mod advertised_address;
mod close_reason;
mod event_loop;
mod event_queue;
mod framing;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
mod handle;
mod heartbeats;
mod identity;
mod interests;
mod listener;
mod mesh;
mod node_protocol;
mod peer_event;
mod protocol_limits;
mod resolver;
mod session_arbitration;
mod socket;

#[cfg(test)]
mod loopback_tests;
#[cfg(test)]
mod node_protocol_tests;

use std::net::SocketAddr;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ipc::ForkGeneration;
use serde::{Deserialize, Serialize};

use self::event_queue::PeerEventQueue;
use self::mesh::Mesh;
use crate::ids::NodeId;
use crate::wake::WakeFd;

pub(crate) use identity::SessionId;
pub(crate) use interests::{Interest, InterestChange, MAX_INTERESTS};
pub(crate) use mesh::{PeerReport, PeerState};
pub(crate) use peer_event::PeerEvent;
#[cfg(test)]
pub(crate) use protocol_limits::VERSION;
pub(crate) use resolver::is_address;
pub(crate) use socket::is_local_address;

/// The peers of a node, served by a thread. Dropping it says goodbye to them, for at most half a
/// second.
#[derive(Debug)]
pub(crate) struct Peers {
    shared: Arc<Shared>,
    listens: Option<SocketAddr>,
    thread: Option<JoinHandle<()>>,
    fork_generation: ForkGeneration,
}

/// Timeouts and backoffs of a node. Times are durations since it began.
#[derive(Debug, Clone, Copy)]
struct Timing {
    /// A peer without a message for this long is lost.
    lost_after: Duration,
    /// Timeout until a connection is a session.
    handshake_timeout: Duration,
    /// Range of the backoff before dialling again.
    min_backoff: Duration,
    max_backoff: Duration,
    /// Backoff where the next attempt would most likely fail, too.
    permanent_backoff: Duration,
    /// A learned node that cannot be reached for this long is forgotten.
    forget_after: Duration,
}

/// Introduction of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Hello {
    identity: NodeId,
    instance: ServiceInstance,
    label: String,
    capabilities: u64,
    /// The node loses us after this many milliseconds without a message.
    lost_after: u32,
    /// Where it listens, if it does. An unspecified address stands for the observed one.
    listens: Option<SocketAddr>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct PeerAddress {
    node: NodeId,
    address: SocketAddr,
}

/// Limits of simultaneous connections. Dialled connections do not count: their number is limited by
/// the known addresses.
#[derive(Debug, Clone, Copy)]
struct Limits {
    /// Inbound connections in all.
    connections: usize,
    /// Inbound connections from one address.
    per_source: usize,
    /// Inbound connections without a session.
    pending: usize,
}

/// One run of a node's service. A later one replaces an earlier one without a live session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct ServiceInstance {
    /// Nanoseconds since 1970.
    started: u64,
    /// Distinguishes instances with the same start time.
    nonce: u64,
}

/// Repeatable random numbers, for purposes without secrecy.
#[derive(Debug, Clone)]
struct SplitMix64(u64);

/// A connection, as numbered on this side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct ConnectionId(u64);

/// State shared by the thread and its handle.
#[derive(Debug)]
struct Shared {
    mesh: Mutex<Mesh>,
    events: PeerEventQueue,
    /// Wakes the thread.
    bell: Arc<WakeFd>,
    began: Instant,
    is_over: AtomicBool,
}

impl Shared {
    fn now(&self) -> Duration {
        self.began.elapsed()
    }
}
