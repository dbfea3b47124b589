//! Fabricast moves GPU and host memory between processes and machines over the fabrics
//! of the machine, and lets any number of subscribers read one copy of a message.
//!
//! Fabricast is a workspace of crates, each usable by itself. This crate re-exports them and adds
//! the command `fabricast`:
//!
//! - [`fabric`]: safe libfabric. Every provider (`verbs`, `tcp`, `shm`, …) is
//!   chosen at run time by facts and a policy; the choice gives the reason for each
//!   candidate that was selected or rejected.
//! - [`ipc`]: one machine. Shared segments, an allocator and queues that stay consistent
//!   when a process is killed, and liveness.
//! - [`gpu`]: devices behind one interface: CUDA, or emulated in host memory.
//! - [`transfer`]: memory shared between processes: one buffer without a copy, or bytes
//!   written to another process's memory.
//! - [`pubsub`]: topics. One copy of a message, read by any number of processes.
//! - [`launch`]: ranks that `mpirun`, `srun` or `torchrun` started, as peers.
//! - [`collective`]: all-reduce, all-gather and others among ranks, in host and device memory, with
//!   parameters that all ranks agree on.
//!
//! ```
//! use fabricast::fabric::{EndpointKind, Requirements, Policy, Query, Locality, choose};
//!
//! let need = Requirements::ring(Locality::SameMachine);
//! let (offer, choice) = choose(&Query::new(EndpointKind::Rdm), &need, &Policy::default())?;
//! println!("{} selected:\n{choice}", offer.capabilities().provider);
//! # Ok::<(), fabricast::fabric::Error>(())
//! ```
//!
//! On the command line `fabricast info` lists the devices and providers of this machine,
//! `fabricast demo` runs two nodes with topics, and `fabricast bench` measures. A program that
//! needs only the library uses `default-features = false`.
//!
//! Modules, each importing only those before it: `error`.

mod error;

pub use collective;
pub use error::{Error, Result};
pub use fabric;
pub use gpu;
pub use ipc;
pub use launch;
pub use pubsub;
pub use transfer;

// Compiles and runs the programs of the README, the tutorials and the how-to pages.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

#[cfg(doctest)]
#[doc = include_str!("../docs/tutorial/first-topic.md")]
struct FirstTopic;

#[cfg(doctest)]
#[doc = include_str!("../docs/tutorial/first-put.md")]
struct FirstPut;

#[cfg(doctest)]
#[doc = include_str!("../docs/tutorial/first-ring.md")]
struct FirstRing;

#[cfg(doctest)]
#[doc = include_str!("../docs/how-to/use-endpoints.md")]
struct UseEndpoints;

#[cfg(doctest)]
#[doc = include_str!("../docs/how-to/move-memory.md")]
struct MoveMemory;

#[cfg(doctest)]
#[doc = include_str!("../docs/how-to/share-a-buffer.md")]
struct ShareABuffer;

#[cfg(doctest)]
#[doc = include_str!("../docs/how-to/hpc.md")]
struct RunAsRanks;
