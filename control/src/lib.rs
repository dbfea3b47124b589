//! The control plane that all parts of Fabricast share.
//!
//! [`codec`] writes and reads the messages that processes and nodes exchange to agree on something,
//! as opposed to payload.

pub mod codec;
