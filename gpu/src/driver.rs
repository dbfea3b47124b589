//! The interface between the public API and its two implementations.
//!
//! The API above checks bounds, access, budgets and forks and keeps memory alive;
//! implementations carry out calls with plain addresses.
#![allow(unsafe_code)]

use std::any::Any;
use std::fmt::Debug;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, ErrorKind, Result};
use crate::pointer_attributes::PointerAttributes;
use crate::properties::{PeerAccess, Properties};
use crate::raw_exchange::RawExchange;

/// Physical memory of a device, not mapped yet.
pub(crate) trait PhysicalMemory: Any + Debug + Send + Sync {
    fn export(&self) -> Result<OwnedFd>;
}

/// Imported memory, and the number of its device; None if this process does not see that device.
pub(crate) type Imported = (Box<dyn PhysicalMemory>, Option<u32>);

/// Physical memory that some library mapped, its address and its length.
pub(crate) type Mapped = (Box<dyn PhysicalMemory>, u64, u64);

/// A point in a stream.
pub(crate) trait EventDriver: Any + Debug + Send + Sync {
    fn is_done(&self) -> Result<bool>;
    /// The time between two reached points of events that keep it; None if one is not reached yet.
    fn time_since(&self, earlier: &dyn EventDriver) -> Result<Option<Duration>>;
}

/// The memory or event of an implementation; an error if it belongs to another one.
pub(crate) fn downcast<'a, T: Any>(operation: &'static str, object: &'a dyn Any) -> Result<&'a T> {
    object.downcast_ref().ok_or_else(|| implementation_mismatch(operation))
}

/// Memory, events and streams of different implementations cannot be combined.
pub(crate) fn implementation_mismatch(operation: &'static str) -> Error {
    let detail = "memory, events and streams of different implementations cannot be combined";
    Error::new(operation, ErrorKind::InvalidArgument, detail)
}

pub(crate) trait DeviceDriver: Debug + Send + Sync {
    fn properties(&self) -> &Properties;
    /// An error if the context was destroyed by another library, and with it all allocations.
    fn check_context(&self, operation: &'static str) -> Result<()>;
    /// Calls a function while the context is current on this thread.
    fn with_context(&self, call: &mut dyn FnMut()) -> Result<()>;
    /// Free memory of the whole device now.
    fn free_memory(&self) -> Result<u64>;
    fn peer_access(&self, peer: u32) -> Result<PeerAccess>;
    /// Enables the access of this device to cuMemAlloc memory of `peer`.
    fn enable_peer(&self, peer: u32) -> Result<()>;

    fn allocate(&self, length: u64) -> Result<u64>;
    /// # Safety
    /// From `allocate`, freed once, and no longer used.
    unsafe fn free(&self, address: u64) -> Result<()>;

    fn create(&self, length: u64) -> Result<Box<dyn PhysicalMemory>>;
    fn import(&self, descriptor: BorrowedFd<'_>, length: u64) -> Result<Imported>;
    fn reserve(&self, length: u64) -> Result<Box<dyn AddressRangeDriver>>;

    fn legacy_export(&self, address: u64) -> Result<[u8; 64]>;
    /// Address and length of the whole allocation.
    fn legacy_open(&self, handle: [u8; 64]) -> Result<(u64, u64)>;
    /// # Safety
    /// From `legacy_open`, closed once, and no longer used.
    unsafe fn legacy_close(&self, address: u64) -> Result<()>;

    fn attributes(&self, address: u64) -> Result<PointerAttributes>;
    /// The piece of physical memory that is mapped at this address, by any library. It stays
    /// allocated as long as the returned object.
    fn retain(&self, address: u64) -> Result<Mapped>;
    fn dma_buf(&self, address: u64, length: u64) -> Result<OwnedFd>;
    /// Makes earlier writes of network cards to memory of this device visible to all devices.
    fn flush_remote_writes(&self) -> Result<()>;
    /// From now on synchronous copies of the allocation at this address end before their calls
    /// return.
    fn set_sync_memops(&self, address: u64) -> Result<()>;

    /// # Safety
    /// Stays mapped until `unregister`.
    unsafe fn register(&self, address: u64, length: u64, is_read_only: bool) -> Result<()>;
    /// # Safety
    /// Registered, and no longer in any transfer.
    unsafe fn unregister(&self, address: u64) -> Result<()>;
    /// Pinned host memory, to and from which copies are fastest.
    fn pinned_buffer(&self, length: usize) -> Result<Box<dyn PinnedBuffer>>;

    fn stream(&self) -> Result<Box<dyn StreamDriver>>;
    /// A stream of another library, by the driver's handle.
    ///
    /// # Safety
    /// The stream belongs to this device or to one of its contexts, and outlives the returned
    /// object.
    unsafe fn adopt_stream(&self, handle: u64) -> Result<Box<dyn StreamDriver>>;
    fn event(&self) -> Result<Arc<dyn EventDriver>>;
    /// An event that keeps the time at which its point was reached.
    fn event_with_time(&self) -> Result<Arc<dyn EventDriver>>;
    fn is_event_done(&self, event: &dyn EventDriver) -> Result<bool> {
        event.is_done()
    }
}

/// A reserved range of addresses, in which physical memory is mapped.
pub(crate) trait AddressRangeDriver: Debug + Send + Sync {
    fn address(&self) -> u64;
    /// Maps all of it at this offset, readable and writable by these devices.
    fn map(&self, offset: u64, physical: &dyn PhysicalMemory, devices: &[u32]) -> Result<()>;
    /// # Safety
    /// Mapped before, and no longer used. The same holds for dropping the range.
    unsafe fn unmap(&self, offset: u64, length: u64) -> Result<()>;
}

pub(crate) trait PinnedBuffer: Debug + Send + Sync {
    fn address(&self) -> u64;
}

/// An entry of a list of copies, in the layout of the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct CopyEntry {
    pub(crate) to: u64,
    pub(crate) from: u64,
    pub(crate) length: u64,
}

/// Operations in order. A call only starts its operation.
pub(crate) trait StreamDriver: Debug + Send + Sync {
    /// # Safety
    /// Both ranges stay valid until the operation is done.
    unsafe fn copy(&self, to: u64, from: u64, length: u64) -> Result<()>;
    /// # Safety
    /// As for copying.
    unsafe fn fill(&self, to: u64, byte: u8, length: u64) -> Result<()>;
    /// Writes the [checksum](crate::checksum) of the range to `result`.
    ///
    /// # Safety
    /// As for copying; `result` is 8 bytes of a host block.
    unsafe fn checksum(&self, from: u64, length: u64, result: u64) -> Result<()>;
    /// Copies the entries of a list, in any order: `count` [entries](CopyEntry), which are in a
    /// host block, with this many bytes together.
    ///
    /// # Safety
    /// As for copying, for each entry; the list stays valid and unchanged until the operation
    /// is done.
    unsafe fn copy_list(&self, list: u64, count: u32, bytes: u64) -> Result<()>;
    /// Writes the word after all earlier operations are done and visible to all devices and
    /// processes.
    ///
    /// # Safety
    /// `to` is four aligned bytes that stay valid until the operation is done.
    unsafe fn write_word(&self, to: u64, value: u32) -> Result<()>;
    /// Waits until the word is `min_value`, or at most half of all numbers beyond it.
    ///
    /// # Safety
    /// As for writing one.
    unsafe fn wait_for_word(&self, at: u64, min_value: u32) -> Result<()>;
    /// Takes part in an exchange, with so many blocks.
    ///
    /// # Safety
    /// All its ranges stay valid until it is done.
    unsafe fn exchange(&self, exchange: &RawExchange, blocks: u32) -> Result<()>;
    fn record(&self, event: &dyn EventDriver) -> Result<()>;
    fn wait(&self, event: &dyn EventDriver) -> Result<()>;
    /// Returns whether operations go into a graph, instead of being carried out.
    fn is_capturing(&self) -> Result<bool>;
    fn is_done(&self) -> Result<bool>;
}
