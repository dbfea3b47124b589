//! Sessions between nodes: membership, interests in topics, and control messages.
//!
//! This is the control plane between nodes, over TCP; payloads do not pass here. Replication gets
//! events of nodes that [connect](PeerEvent::Connected) and disconnect, and sends its control
//! messages through the peers.
//!
//! The logic knows no sockets, threads or clock: `protocol` (frames), `framing`,
//! `connection_protocol` (one connection), `session_arbitration` (which connection with a node
//! becomes the session), `address_book` (which addresses to dial, and when), `interests` (interests
//! and their changes), `mesh` (all of it, with received frames, limits of connections and reports). `event_loop`, `socket`, `resolver`, `event_queue` and `handle` bind it to the system.

mod address_book;
mod close_reason;
mod connection_protocol;
mod event;
mod event_loop;
mod event_queue;
mod framing;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
mod handle;
mod identity;
mod interests;
mod listener;
mod mesh;
mod protocol;
mod resolver;
mod session_arbitration;
mod socket;

#[cfg(test)]
mod loopback_tests;
#[cfg(test)]
mod protocol_tests;

use std::net::SocketAddr;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ipc::ForkGeneration;

use self::event_queue::PeerEventQueue;
use self::mesh::Mesh;
use crate::wake::WakeFd;

pub(crate) use event::PeerEvent;
pub(crate) use identity::{ServiceInstance, SessionId};
pub(crate) use interests::{Interest, InterestChange, MAX_INTERESTS};
pub(crate) use mesh::{PeerReport, PeerState};
#[cfg(test)]
pub(crate) use protocol::VERSION;
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
