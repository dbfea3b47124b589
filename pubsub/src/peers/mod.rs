//! Sessions between nodes: membership, interests in topics, and control messages.
//!
//! This is the control plane between nodes, over TCP; payloads do not pass here. Replication gets
//! events of nodes that [connect](PeerEvent::Connected) and disconnect, and sends its control
//! messages through the peers.
//!
//! The logic knows no sockets, threads or clock: `protocol` (frames), `framing`,
//! `connection_protocol` (one connection), `session_arbitration` (which connection with a node
//! becomes the session), `address_book` (which addresses to dial, and when), `interests` (interests
//! and their changes), `admission` (limits of connections), `mesh` and `frame_handling` (all of
//! it). `event_loop`, `socket`, `resolver`, `event_queue` and `handle` bind it to the system.

mod address_book;
mod admission;
mod close_reason;
mod connection_protocol;
mod event;
mod event_loop;
mod event_queue;
mod frame_handling;
mod framing;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
mod handle;
mod identity;
mod interests;
mod listener;
mod mesh;
mod protocol;
mod report;
mod resolver;
mod session_arbitration;
mod socket;

#[cfg(test)]
mod loopback_tests;
#[cfg(test)]
mod mesh_tests;
#[cfg(test)]
mod protocol_tests;
#[cfg(test)]
mod simulation;

pub(crate) use event::PeerEvent;
pub(crate) use handle::Peers;
pub(crate) use identity::{ServiceInstance, SessionId};
pub(crate) use interests::{Interest, InterestChange, MAX_INTERESTS};
#[cfg(test)]
pub(crate) use protocol::VERSION;
pub(crate) use report::{PeerReport, PeerState};
pub(crate) use socket::is_local_address;
