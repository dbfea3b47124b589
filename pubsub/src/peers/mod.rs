//! Nodes and each other: who is there, what each publishes and subscribes, and letters.
//!
//! This is the control plane between nodes, over TCP. No payload goes here. What moves
//! payloads reads of nodes that [appear](Event::Appeared) and vanish, and has the peers
//! carry its letters.
//!
//! The logic knows no sockets, threads or clock: `protocol` (what is said), `framing`,
//! `session` (one connection), `pair` (which of the connections with a node counts), `book`
//! (whom to dial, and when), `directory` (interests and their changes), `admission` (how many
//! may come), `mesh` and `answers` (all of it). `service`, `socket`, `names`, `queue` and `handle` bind it to the world.

mod admission;
mod answers;
mod book;
mod directory;
mod event;
mod framing;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
mod handle;
mod identity;
mod listening;
mod mesh;
mod names;
mod pair;
mod protocol;
mod queue;
mod reason;
mod report;
mod service;
mod session;
mod socket;

#[cfg(test)]
mod loopback_tests;
#[cfg(test)]
mod mesh_tests;
#[cfg(test)]
mod session_tests;
#[cfg(test)]
mod simulation;

pub(crate) use directory::{Change, Interest, MOST_INTERESTS};
pub(crate) use event::Event;
pub(crate) use handle::{INSECURE, Peers, check, first_address};
pub use identity::NodeIdentity;
pub(crate) use identity::{Run, SessionNumber};
#[cfg(test)]
pub(crate) use protocol::VERSION;
pub(crate) use report::{PeerReport, PeerState};
pub(crate) use socket::is_here;
