//! Ranks of a launched job as peers: `mpirun`, `srun` or `torchrun` starts the processes, and each
//! reaches the others by agents, rings and topics.
//!
//! [`Group::start`] asks the launcher for rank and size, and exchanges the cards of all ranks' agents
//! through it, once. Connections are made when they are first used: between ranks of one machine by
//! shared memory and device paths, to others by a fabric.
//!
//! ```
//! use std::time::Duration;
//! use launch::Group;
//! let mut group = Group::start()?; // under mpirun: one of its ranks; otherwise the only one
//! let timeout = Duration::from_secs(10);
//! let names = group.all_gather(format!("rank {}", group.rank()).as_bytes(), timeout)?;
//! assert_eq!(names.len(), group.size() as usize);
//! group.barrier(timeout)?;
//! # Ok::<(), launch::Error>(())
//! ```
//!
//! Modules, each importing only those before it: `collective`, `mailbox`, `options`,
//! `job_directory`, `ranks`, `messenger`, `group`.

mod collective;
mod group;
mod job_directory;
mod mailbox;
mod messenger;
mod options;
mod ranks;

pub use control::launcher::{
    Environment, Error, ErrorKind, Exchange, Launcher, LocalRank, PmiServer, PmiVersion, Result,
    Single, detect,
};
pub use group::Group;
pub use options::{FabricUse, GroupOptions};
