//! Two processes that move data between them and check it.
//!
//! The first process, the initiator, starts the second, the target, and both
//! talk over the target's standard input and output in [`frame`]s: the
//! [`plan`], the addresses, and where they are. All data goes through the fabric.
//!
//! Both are single-threaded on purpose: with a second thread in the process the
//! C library and libfabric pay for locks that the C program that we are compared
//! with does not pay for.

pub(crate) mod frame;
pub(crate) mod frame_channel;
pub(crate) mod initiator;
pub(crate) mod measurement;
pub(crate) mod peer_watchdog;
pub(crate) mod pingpong;
pub(crate) mod plan;
pub(crate) mod remote;
pub(crate) mod ring_exchange;
pub(crate) mod side;
mod stamps;
pub(crate) mod stream;
pub(crate) mod target;
