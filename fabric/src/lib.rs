//! Safe libfabric.
//!
//! One crate to reach every provider (`verbs`, `tcp`, `shm`, `efa`, …) through
//! [libfabric](https://ofiwg.github.io/libfabric/), chosen at run time.
//!
//! ```
//! use std::time::Duration;
//! use fabric::*;
//!
//! # fn main() -> fabric::Result<()> {
//! let offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first()?;
//! let domain = Domain::open(&offer)?;
//! let addresses = AddressVector::open(&domain)?;
//! let mut queue = CompletionQueue::open(&domain)?;
//! let mut endpoint = Endpoint::builder(&domain)
//!     .addresses(&addresses)
//!     .queue(&mut queue)
//!     .open()?;
//!
//! // An endpoint can send to itself.
//! let me = addresses.insert(&endpoint.address()?)?;
//! let target = domain.register(HostMemory::zeroed(4096)?, Access::ALL)?;
//! let source = domain.register(HostMemory::from_vec(b"hello".to_vec())?, Access::ALL)?;
//! let remote = domain.attach(&target.describe()?)?;
//! let write = endpoint.write(&mut queue, me, &source.all(), &remote.slice(0..5)?, 1)?;
//! queue.complete(write, Duration::from_secs(5))?;
//! # Ok(())
//! # }
//! ```
//!
//! # Overview
//!
//! - [`Query`] returns [`Offer`]s; decisions rest on their [`Capabilities`]. [`choose`] applies
//!   a [`Policy`] and gives a reason for each selected and refused candidate.
//! - A [`Domain`] is opened from an offer, and [`MemoryRegion`]s, [`CompletionQueue`]s,
//!   [`AddressVector`]s, [`Counter`]s and [`Endpoint`]s from the domain. Each holds a reference
//!   to its parents, so objects can be dropped in any order.
//! - Operations are posted to an endpoint, together with the queue that will report them. Both
//!   are passed as `&mut`: one owner drives them, on any thread, without a lock.
//! - [`ring::listen`] and [`ring::connect`] need none of this: they set up a ring of messages
//!   between two programs.
//! - A registration owns its memory, and operations in flight hold the registration, so memory
//!   cannot be freed under a transfer. An operation that misses its deadline is quarantined
//!   until its endpoint is closed, since one-sided transfers cannot be cancelled.
//! - Every wait has a deadline. No value returned by libfabric causes a panic.
//!
//! Modules, each importing only those before it: `error`, `flags`, `handle`, `hazard`,
//! `kind`, `local_address`, `version`, `waiting`, `quirks`, `capabilities`, `host_memory`,
//! `deregistration`, `fabric`, `shm_files`, `offer`, `query`, `event`, `domain`, `address`, `counter`,
//! `memory`, `queue`, `endpoint`, `choice`, `ring`, `provider_objects`,
//! `emulated`.

#![allow(clippy::len_without_is_empty, reason = "regions and slices of them are never empty")]

mod address;
mod capabilities;
mod choice;
mod counter;
mod deregistration;
mod domain;
#[cfg(feature = "fault-injection")]
pub mod emulated;
mod endpoint;
mod error;
mod event;
mod fabric;
mod flags;
mod handle;
mod hazard;
mod host_memory;
mod kind;
mod local_address;
mod memory;
mod offer;
#[cfg(any(test, feature = "fault-injection"))]
mod provider_objects;
mod query;
mod queue;
mod quirks;
pub mod ring;
mod shm_files;
mod version;
mod waiting;

#[cfg(test)]
mod absent_tests;
#[cfg(test)]
mod fakes;

pub use address::{Address, AddressVector, Peer};
pub use capabilities::{
    Capabilities, EndpointKind, ExecutionModel, ImmediateWidths, Nic, OperationLimits,
    OrderGuarantees, Progress, RegistrationAttributes, Threading,
};
pub use choice::{
    Candidate, Choice, Locality, Policy, Requirements, Verdict, choose, rank, select,
};
pub use counter::Counter;
pub use domain::{Domain, probe_registration_cache};
pub use endpoint::{
    AtomicForm, AtomicOperation, AtomicRequest, Datatype, Endpoint, EndpointBuilder, Listener,
    PeerToPeer, PostOptions,
};
pub use error::{Error, ErrorKind, Result};
pub use event::{ConnectionRequest, Event, EventQueue, RegistrationDone};
pub use fabric::Fabric;
pub use flags::{Access, Caps, Mode, MrMode, Order, RegistrationFlags, TransferFlags};
pub use handle::failed_closes;
pub use host_memory::{HostMemory, Memory};
pub use kind::MemoryKind;
pub use local_address::{local_address, local_addresses};
pub use memory::{
    DmaBuf, MemoryRegion, PendingRegion, RegionSlice, RegistrationOptions, RemoteKey, RemoteMemory,
    RemoteRegion, RemoteSlice, registrations,
};
pub use offer::Offer;
pub use query::Query;
pub use queue::{
    Completion, CompletionKind, CompletionQueue, Failure, OperationId, Outcome, QueueOptions, Waker,
};
pub use version::Version;
pub use waiting::WaitStrategy;
