//! Memory that the fabric may access: its owners, its registration, and its description for
//! peers.
//!
//! A peer can access registered memory without asking. So the worst bug of this crate would be
//! memory that is freed or reused under a transfer. Hence the order of ownership:
//!
//! - a registration takes ownership of its [`Memory`], which is freed after it;
//! - a [`MemoryRegion`] is held by its slices, and by every operation in flight;
//! - a registration bound to an endpoint is closed before it, and its memory freed after it;
//! - a registration that cannot be closed keeps its memory permanently.
//!
//! Two types stand for the two ends. A [`MemoryRegion`] is the local view; its bytes are copied
//! in and out. A [`RemoteRegion`] is sent to peers: length, access, kind, wire protocol and
//! key, versioned and checked. The receiver turns it into [`RemoteMemory`], the only target
//! that one-sided operations accept.

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
