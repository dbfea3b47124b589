//! Nodes and each other: who is there, what each publishes and subscribes, and letters.
//!
//! This is the control plane between nodes, over TCP. No payload goes here. What moves
//! payloads reads of nodes that [appear](Event::Appeared) and vanish, and has the peers
//! carry its letters.
//!
//! The logic knows no sockets, threads or clock: `protocol` (what is said), `framing`,
//! `guard` (where encryption goes), `session` (one connection), `pair` (which of the
//! connections with a node counts), `book` (whom to dial, and when), `directory` (interests
//! and their changes), `admission` (how many may come), `mesh` and `answers`
//! (all of it). `service`, `socket`, `names`, `queue` and `handle` bind it to the world.

mod admission;
mod answers;
mod book;
mod directory;
mod event;
mod framing;
mod guard;
mod handle;
#[cfg(any(test, feature = "fuzzing"))]
pub mod hostile;
mod identity;
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

pub use directory::{Change, Interest, MOST_INTERESTS};
pub use event::Event;
pub use handle::{Peers, PeersOptions};
pub use identity::{LONGEST_LABEL, NodeIdentity, SessionNumber};
pub use protocol::{LONGEST_FRAME, LONGEST_LETTER};
pub use reason::{Parting, Reason};
pub use report::{PeerReport, PeerState};
