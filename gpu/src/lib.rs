//! Devices and their memory, behind one interface.
//!
//! Two implementations pass the same conformance suite. One is CUDA, through the driver, which
//! is looked up at run time: nothing is linked, and without a driver an error names what is
//! missing. The other is an emulated device made of host memory and threads, which works on any
//! machine.
//!
//! [Shared memory](Device::allocate_shared) is exported as a file descriptor, works in any
//! namespace, and outlives the process that allocated it. It is [imported](Importer) piece by
//! piece, and can grow without moving. Memory of other libraries is [adopted](Device::adopt).
//! Adopted memory is exported as its allocator allows: in pieces, as file descriptors, or by
//! [legacy handle](Memory::export_legacy).
//!
//! There are no silent fallbacks: a copy between devices that have no access to each other is
//! refused, where a driver would stage it through the host.
//!
//! This crate has no knowledge of networks, or of what other processes do with exported memory.
//!
//! Modules, each importing only those before it: `device_name`, `error`, `properties`,
//! `pointer_attributes`, `budget`, `checksum`, `reuse`, `look_schedule`, `waiting`, `raw_exchange`, `driver`,
//! `stream_waits`, `deferred_free`, `legacy_handle`, `cuda`, `emulated`, `device`, `link_counters`,
//! `event`, `address_range`, `foreign`, `memory`, `importer`, `views`, `stream`, `block_allocator`, `pool`.

mod address_range;
mod block_allocator;
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
mod importer;
mod legacy_handle;
mod link_counters;
mod look_schedule;
mod memory;
mod pointer_attributes;
mod pool;
mod properties;
mod raw_exchange;
mod reuse;
mod stream;
mod stream_waits;
mod views;
mod waiting;

use std::time::Duration;

pub use checksum::checksum;
pub use device::{Device, DeviceSurvey};
pub use device_name::{DeviceName, Implementation};
pub use error::{Error, ErrorKind, Result, proves_idle};
pub use event::{Event, Point};
pub use importer::Importer;
pub use legacy_handle::{LegacyHandle, open_legacy_handles};
pub use link_counters::{LinkBytes, LinkCounters};
pub use look_schedule::{CopyTimes, Pause, is_exact};
pub use memory::{HostMapping, Memory, Pieces, Slice, WeakMemory};
pub use pointer_attributes::{Allocator, PointerAttributes};
pub use pool::{Pool, PoolStatistics};
pub use properties::{
    GpuDirect, HandleTypes, PciAddress, PeerAccess, Properties, Uuid, WritesOrdering,
};
pub use stream::{
    Block, CopyMethod, Exchange, ExchangeCopy, ExchangePlace, ExchangeReduction, PreparedBlocks,
    Stream, leaked_streams,
};
pub use views::{Range, View, Views};

/// A timeout for waits on devices that are expected to succeed.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);
