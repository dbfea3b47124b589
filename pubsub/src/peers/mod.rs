//! Nodes and each other: who is there, what each publishes and subscribes, and letters.
//!
//! This is the control plane between nodes, over TCP. No payload goes here. What moves
//! payloads reads of nodes that [appear](Event::Appeared) and vanish, and has the peers
//! carry its letters.
//!
//! The logic knows no sockets, threads or clock: `protocol` (what is said), `framing`,
//! `session` (one connection), `arbitration` (which of the connections with a node counts), `book`
//! (whom to dial, and when), `directory` (interests and their changes), `admission` (how many
//! may come), `mesh` and `answers` (all of it). `service`, `socket`, `names`, `queue` and `handle` bind it to the world.

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
pub(crate) use handle::{INSECURE, Peers, check, first_address};
pub use identity::NodeId;
pub(crate) use identity::{ServiceInstance, SessionId};
pub(crate) use interests::{Interest, InterestChange, MAX_INTERESTS};
#[cfg(test)]
pub(crate) use protocol::VERSION;
pub(crate) use report::{PeerReport, PeerState};
pub(crate) use socket::is_local_address;
