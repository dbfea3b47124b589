//! Devices and their memory, behind one interface.
//!
//! Two implementations pass the same conformance suite: CUDA, through the driver, which
//! is looked for at run time (nothing is linked, and a machine without it is told what is
//! missing), and a [emulated] made of host memory and threads, which is there everywhere.
//!
//! Memory that is [allocated to be shared](Device::allocate_shared) leaves its process as
//! a file descriptor, works in any namespace, and outlives who made it. It is
//! [imported](Importer) piece by piece, and can grow so without moving. Memory that something else allocated is
//! [adopted](Device::adopt), and leaves as its allocator allows: in pieces, as file
//! descriptors, or by [legacy handle](Memory::export_legacy).
//!
//! Nothing here falls back in silence: a copy between devices that have no access to each
//! other is refused, where a driver would take the long way.
//!
//! Nothing here knows of networks, or of what other processes do with what they were given.

mod address_range;
mod budget;
mod checksum;
mod cuda;
mod deferred_free;
mod device;
mod device_name;
mod driver;
pub mod emulated;
mod error;
mod event;
mod foreign;
mod fork;
mod importer;
mod legacy_handle;
mod link_counters;
mod memory;
mod pointer_attributes;
mod properties;
mod reuse;
mod stream;
mod waiting;

use std::time::Duration;

pub use checksum::checksum;
pub use device::{Device, DeviceSurvey};
pub use device_name::{DeviceName, Implementation};
pub use error::{Error, ErrorKind, Result, is_over};
pub use event::{Event, Point};
pub use importer::Importer;
pub use legacy_handle::{LegacyHandle, open_legacy_handles};
pub use link_counters::{LinkBytes, LinkCounters};
pub use memory::{Exported, HostMapping, Memory, Pieces, Slice, WeakMemory};
pub use pointer_attributes::{Allocator, PointerAttributes};
pub use properties::{HandleTypes, PciAddress, PeerAccess, Properties, Uuid};
pub use stream::{Block, CopyMethod, Stream, leaked_streams};

/// A deadline for waits on devices that are expected to succeed.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);
