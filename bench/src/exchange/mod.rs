//! Two processes that move data through the fabric and verify it.
//!
//! The first process, the initiator, starts the second, the target. They exchange [`frame`]s over
//! the target's standard input and output: the [`plan`], addresses and barriers. All data goes
//! through the fabric.
//!
//! Both are single-threaded: with a second thread the C library and libfabric take locks, which the
//! C reference benchmark does not pay for.

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
