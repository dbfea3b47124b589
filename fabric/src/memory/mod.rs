//! Memory that the fabric may touch: who owns it, how it is registered, and how
//! a peer speaks of it.
//!
//! Registered memory is what a peer can reach without asking, so the worst bug of
//! this crate would be memory that is freed, or handed to somebody else, under a
//! transfer. Hence the order of ownership:
//!
//! - a [`Memory`] is given away to its registration, and freed after it;
//! - a [`MemoryRegion`] is held by its slices, and by every operation in flight;
//! - a registration that is bound to an endpoint is closed before that, and its memory freed
//!   after it;
//! - a registration that cannot be closed keeps its memory for good.
//!
//! Two types stand for the two ends. A [`MemoryRegion`] is the local view, and its
//! bytes are copied in and out. A [`RemoteRegion`] is what travels: length, rights,
//! kind, wire protocol and key, versioned and checked. [`RemoteMemory`] is what the
//! receiver makes of it, and the only thing a one-sided operation accepts.

mod access;
mod bound;
mod deregistration;
mod descriptor;
mod host;
mod pending;
mod range;
mod region;
mod registration;
mod remote;

pub use descriptor::{RemoteKey, RemoteRegion};
pub use host::{HostMemory, Memory};
pub use pending::PendingRegion;
pub use region::{MemoryRegion, RegionSlice};
pub use registration::{DmaBuf, RegistrationOptions, registrations};
pub use remote::{RemoteMemory, RemoteSlice};

pub(crate) use bound::BoundRegistrations;
pub(crate) use deregistration::DeregistrationLock;
pub(crate) use region::RegionInner;
pub(crate) use remote::MappedKey;
