//! Emulated devices, made of host memory and threads.
//!
//! They behave as real devices, on any machine: memory that is exported only as a file
//! descriptor, asynchronous streams, events, peers. With the feature `fault-injection`, which
//! only tests enable, they can be made slow, failing, or unreachable for each other, so that
//! overlap, order and failure can be tested without a GPU.
#![allow(unsafe_code)]

#[cfg(feature = "fault-injection")]
mod faults;
#[cfg(not(feature = "fault-injection"))]
#[path = "no_faults.rs"]
mod faults;
#[cfg(feature = "fault-injection")]
mod foreign_memory;
mod memory_files;
mod stream_thread;

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use faults::Faults;
#[cfg(feature = "fault-injection")]
pub use faults::{
    FaultConfig, configure_faults, fail_after, flushes, hide_device, refuse_flushes, refuse_points,
    refuse_read_only_registrations, refuse_records, refuse_words,
};
#[cfg(feature = "fault-injection")]
pub use foreign_memory::ForeignMemory;
use memory_files::Physical;
pub(crate) use memory_files::attributes;

use crate::device_name::DeviceName;
use crate::driver::{
    AddressRangeDriver, DeviceDriver, EventDriver, Imported, Mapped, PhysicalMemory, PinnedBuffer,
    StreamDriver,
};
use crate::error::{Error, ErrorKind, Result};
use crate::pointer_attributes::{Allocator, PointerAttributes};
use crate::properties::{GpuDirect, HandleTypes, PeerAccess, Properties, Uuid, WritesOrdering};

/// The number of emulated devices.
pub const COUNT: u32 = 2;
/// The memory size that each device reports. Pages are only allocated when they are touched.
const TOTAL: u64 = 16 << 30;
const GRANULARITY: u64 = 2 << 20;

/// A fault that tests switch on: the device has no peers, or refuses writes of words, queries of
/// events, records of events, registrations of read-only memory, or flushes.
#[derive(Clone, Copy)]
enum Fault {
    NoPeers,
    Words,
    Points,
    Records,
    ReadOnly,
    Flushes,
    Hidden,
}

/// The state that all handles of an emulated device share.
pub(crate) struct State {
    faults: Faults,
    used: AtomicU64,
    flushes: AtomicU64,
}

impl State {
    const fn new() -> Self {
        Self { faults: Faults::new(), used: AtomicU64::new(0), flushes: AtomicU64::new(0) }
    }

    fn take(&self, operation: &'static str, length: u64) -> Result<()> {
        let taken = |used: u64| used.checked_add(length).filter(|sum| *sum <= TOTAL);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, taken).map(drop).map_err(
            |used| {
                let detail = format!("{length} bytes requested, {used} of {TOTAL} in use");
                Error::new(operation, ErrorKind::OutOfMemory, detail)
            },
        )
    }

    /// An error if the fault is switched on.
    fn check_fault(&self, fault: Fault, operation: &'static str, refused: &str) -> Result<()> {
        if self.faults.has(fault) {
            let detail = format!("injected fault: {refused} are refused");
            return Err(Error::new(operation, ErrorKind::Other, detail));
        }
        Ok(())
    }

    fn give_back(&self, length: u64) {
        self.used.fetch_sub(length, Ordering::Relaxed);
    }
}

static STATES: [State; COUNT as usize] = [const { State::new() }; COUNT as usize];

fn state(number: u32) -> &'static State {
    &STATES[number as usize % STATES.len()]
}

/// Does this process see the device? A test may hide it.
pub(crate) fn is_visible(number: u32) -> bool {
    !state(number).faults.has(Fault::Hidden)
}

/// UUID of a device: equal in every process, like a real device's.
pub(crate) fn uuid(number: u32) -> Uuid {
    let mut bytes = *b"fabricast-host-0";
    bytes[15] += number as u8;
    Uuid(bytes)
}

/// Is it the UUID of an emulated device?
///
/// ```
/// let device = gpu::Device::open("emulated:0".parse()?)?;
/// assert!(gpu::emulated::has_uuid(device.properties().uuid));
/// assert!(!gpu::emulated::has_uuid(gpu::Uuid([7; 16])));
/// # Ok::<(), gpu::Error>(())
/// ```
#[must_use]
pub fn has_uuid(found: Uuid) -> bool {
    (0..COUNT).any(|number| uuid(number) == found)
}

#[derive(Debug)]
pub(crate) struct Device {
    number: u32,
    properties: Properties,
}

impl Device {
    pub(crate) fn open(number: u32) -> Result<Self> {
        if number < COUNT && is_visible(number) {
            return Ok(Self::new(number));
        }
        let detail = format!("there are {COUNT}");
        Err(Error::new("open", ErrorKind::NoSuchDevice, detail).of(DeviceName::emulated(number)))
    }

    /// A device that was not opened: it owns nothing.
    pub(crate) fn none() -> Self {
        Self::new(0)
    }

    fn new(number: u32) -> Self {
        let properties = Properties {
            product: "host memory".to_owned(),
            uuid: uuid(number),
            pci: None,
            numa_node: None,
            total_memory: TOTAL,
            granularity: GRANULARITY,
            driver: env!("CARGO_PKG_VERSION").to_owned(),
            handle_types: HandleTypes { file_descriptor: true, ..HandleTypes::default() },
            // The most demanding kind of a device: nothing is visible before a flush.
            gpu_direct: GpuDirect {
                rdma: true,
                rdma_mapped: true,
                can_flush: true,
                writes_ordering: WritesOrdering::None,
            },
        };
        Self { number, properties }
    }

    fn state(&self) -> &'static State {
        state(self.number)
    }
}

fn not_supported<T>(operation: &'static str, what: &str) -> Result<T> {
    Err(Error::new(operation, ErrorKind::NotSupported, format!("an emulated device has no {what}")))
}

impl DeviceDriver for Device {
    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn with_context(&self, call: &mut dyn FnMut()) -> Result<()> {
        call();
        Ok(())
    }

    fn free_memory(&self) -> Result<u64> {
        Ok(TOTAL - self.state().used.load(Ordering::Relaxed).min(TOTAL))
    }

    fn peer_access(&self, peer: u32) -> Result<PeerAccess> {
        let are_apart = |number: u32| state(number).faults.has(Fault::NoPeers);
        Ok(if peer == self.number {
            PeerAccess::Same
        } else if are_apart(peer) || are_apart(self.number) {
            PeerAccess::None
        } else {
            PeerAccess::Direct
        })
    }

    fn enable_peer(&self, _peer: u32) -> Result<()> {
        Ok(())
    }

    fn allocate(&self, length: u64) -> Result<u64> {
        self.state().take("allocate memory", length)?;
        memory_files::allocate(Some(self.number), Allocator::Plain, length)
            .inspect_err(|_| self.state().give_back(length))
    }

    unsafe fn free(&self, address: u64) -> Result<()> {
        stream_thread::wait_until_no_stream_waits();
        let length = memory_files::free(address)?;
        self.state().give_back(length);
        Ok(())
    }

    fn create(&self, length: u64) -> Result<Box<dyn PhysicalMemory>> {
        self.state().take("allocate memory", length)?;
        let physical = Physical::create(self.number, length, true);
        Ok(Box::new(physical.inspect_err(|_| self.state().give_back(length))?))
    }

    fn import(&self, descriptor: BorrowedFd<'_>, length: u64) -> Result<Imported> {
        let (physical, resident) = Physical::import(descriptor, length)?;
        let resident = is_visible(resident).then_some(resident);
        if resident.is_none() && self.state().faults.has(Fault::NoPeers) {
            let detail = "injected fault: the device reaches no other one";
            return Err(Error::new("import memory", ErrorKind::NoPeerAccess, detail));
        }
        Ok((Box::new(physical), resident))
    }

    fn reserve(&self, length: u64) -> Result<Box<dyn AddressRangeDriver>> {
        Ok(Box::new(memory_files::AddressRange::reserve(length)?))
    }

    fn legacy_export(&self, _address: u64) -> Result<[u8; 64]> {
        not_supported("export by legacy handle", "legacy handles")
    }

    fn legacy_open(&self, _handle: [u8; 64]) -> Result<(u64, u64)> {
        not_supported("open legacy handle", "legacy handles")
    }

    unsafe fn legacy_close(&self, _address: u64) -> Result<()> {
        not_supported("close legacy handle", "legacy handles")
    }

    fn attributes(&self, address: u64) -> Result<PointerAttributes> {
        attributes(address).ok_or_else(|| {
            let detail = format!("no allocation contains address {address:#x}");
            Error::new("query pointer attributes", ErrorKind::InvalidArgument, detail)
        })
    }

    fn retain(&self, address: u64) -> Result<Mapped> {
        memory_files::retain(address).ok_or_else(|| {
            let detail = format!("nothing is mapped at {address:#x}");
            Error::new("query mapped memory", ErrorKind::InvalidArgument, detail)
        })
    }

    fn dma_buf(&self, _address: u64, _length: u64) -> Result<OwnedFd> {
        not_supported("export as dma-buf", "dma-buf")
    }

    fn flush_remote_writes(&self) -> Result<()> {
        self.state().check_fault(Fault::Flushes, "flush remote writes", "flushes")?;
        self.state().flushes.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn set_sync_memops(&self, address: u64) -> Result<()> {
        match self.attributes(address)?.allocator {
            Allocator::Mapped { .. } => {
                not_supported("set synchronous copies", "synchronous copies of mapped memory")
            }
            _ => Ok(()),
        }
    }

    unsafe fn register(&self, address: u64, length: u64, is_read_only: bool) -> Result<()> {
        if is_read_only && self.state().faults.has(Fault::ReadOnly) {
            return not_supported("register host memory", "registrations of read-only memory");
        }
        memory_files::register(address, length)
    }

    unsafe fn unregister(&self, address: u64) -> Result<()> {
        stream_thread::wait_until_no_stream_waits();
        memory_files::unregister(address);
        Ok(())
    }

    fn check_context(&self, _: &'static str) -> Result<()> {
        Ok(())
    }

    fn pinned_buffer(&self, length: usize) -> Result<Box<dyn PinnedBuffer>> {
        Ok(Box::new(memory_files::PinnedBlock::new(length)?))
    }

    fn stream(&self) -> Result<Box<dyn StreamDriver>> {
        Ok(Box::new(stream_thread::Stream::start(self.state())?))
    }

    unsafe fn adopt_stream(&self, handle: u64) -> Result<Box<dyn StreamDriver>> {
        if handle == 0 {
            // The order of operations that other libraries start is not visible.
            return self.stream();
        }
        let detail = "streams of an emulated device are made by this library only";
        Err(Error::new("adopt stream", ErrorKind::NotSupported, detail))
    }

    fn event(&self) -> Result<Arc<dyn EventDriver>> {
        Ok(Arc::new(stream_thread::Event::default()))
    }

    fn event_with_time(&self) -> Result<Arc<dyn EventDriver>> {
        self.event()
    }

    fn is_event_done(&self, event: &dyn EventDriver) -> Result<bool> {
        self.state().check_fault(Fault::Points, "query event", "event queries")?;
        event.is_done()
    }
}
