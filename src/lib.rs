//! Fabricast moves GPU and host memory between processes and machines over
//! whatever fabric is there, and lets any number of subscribers read one copy of
//! it.
//!
//! It is a house of several rooms, each a crate that can be used by itself; this
//! one gathers them and adds the command `fabricast`. The rooms that exist now:
//!
//! - [`fabric`]: safe libfabric. Every provider (`verbs`, `tcp`, `shm`, …) is
//!   chosen at run time, by facts and a policy, and the choice says why each
//!   candidate was taken or refused.
//! - [`ipc`]: one machine. Shared segments, an allocator and queues that stay whole
//!   whoever dies, and liveness.
//! - [`gpu`]: devices behind one interface, CUDA or a emulated of host memory.
//! - [`transfer`]: memory handed from process to process: one buffer, shared without a
//!   copy, or bytes put into another's memory.
//! - [`pubsub`]: topics. One copy of a message, read by any number of processes.
//!
//! ```
//! use fabricast::fabric::{EndpointKind, Requirements, Policy, Query, Locality, choose};
//!
//! let need = Requirements::ring(Locality::SameMachine);
//! let (offer, choice) = choose(&Query::new(EndpointKind::Rdm), &need, &Policy::default())?;
//! println!("{} was taken:\n{choice}", offer.capabilities().provider);
//! # Ok::<(), fabricast::fabric::Error>(())
//! ```
//!
//! On the command line `fabricast info` shows what this machine offers,
//! `fabricast demo` runs two nodes with topics, and `fabricast bench` measures. A program that wants
//! the library only takes it with `default-features = false`.

mod error;

pub use error::{Error, Result};
pub use fabric;
pub use gpu;
pub use ipc;
pub use pubsub;
pub use transfer;

// The programs in the README, kept true by being run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

// So is the one in docs/endpoints.md.
#[cfg(doctest)]
#[doc = include_str!("../docs/endpoints.md")]
struct Endpoints;

// And the one in docs/devices.md.
#[cfg(doctest)]
#[doc = include_str!("../docs/devices.md")]
struct Devices;
