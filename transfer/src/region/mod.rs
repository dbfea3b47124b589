//! Registered memory.

mod descriptor;
mod registered;

pub use descriptor::{FabricKey, RegionDescriptor, Rights};
pub use registered::{Buffer, Region};

pub(crate) use descriptor::MAX_PIECES;
pub(crate) use registered::{REGISTER, RailMemory, RegionOwner, RegisteredRegion};
