//! Memory that the fabric may touch: who owns it, how it is registered, and how
//! a peer speaks of it.

mod descriptor;
mod host;
mod range;
mod region;
mod registration;
mod remote;

pub use descriptor::{RemoteKey, RemoteRegion};
pub use host::{HostMemory, Memory};
pub use region::{MemoryRegion, RegionSlice};
pub use registration::{DmaBuf, PendingRegion, RegistrationOptions};
pub use remote::{RemoteMemory, RemoteSlice};

pub(crate) use region::RegionInner;
pub(crate) use remote::Mapping;
