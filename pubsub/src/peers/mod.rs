//! Nodes and each other.

mod identity;

pub use identity::{LONGEST_LABEL, NodeIdentity, SessionNumber};
