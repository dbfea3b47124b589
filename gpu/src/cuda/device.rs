//! A device, its context, and its properties.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_int};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::sys;
use sys::CUdevice_attribute_enum as Attribute;

use super::kernels::Kernels;
use super::library::{
    self, Address, CONTEXT_DESTROYED, Code, DEINITIALIZED, Functions, INVALID_CONTEXT, NOT_READY,
    PEER_ACCESS_ALREADY_ENABLED,
};
use super::memory::{self, AccumulatorPool, AddressRange, Physical, PinnedBlock, PinnedBufferPool};
use super::stream::{Event, Stream};
use crate::deferred_free::any_stream_waits;
use crate::device_name::{DeviceName, Implementation};
use crate::driver::{self, AddressRangeDriver, DeviceDriver, PinnedBuffer, StreamDriver};
use crate::error::{Error, ErrorKind, Result};
use crate::pointer_attributes::PointerAttributes;
use crate::properties::{HandleTypes, PciAddress, PeerAccess, Properties, Uuid};

/// The number of devices that the driver shows to this process.
pub(crate) fn count() -> Result<u32> {
    let functions = library::driver()?;
    let mut count = 0;
    // SAFETY: one valid number.
    let code = unsafe { (functions.device_count)(&raw mut count) };
    library::check(functions, "count devices", code)?;
    Ok(count.max(0) as u32)
}

/// A device's UUID on this machine. Creates no context.
pub(crate) fn uuid(number: u32) -> Result<Uuid> {
    let operation = "read properties";
    let functions = library::driver()?;
    let (mut device, mut uuid) = (0, [0; 16]);
    // SAFETY: valid pointers for the results.
    unsafe {
        let code = (functions.device_get)(&raw mut device, number as c_int);
        library::check(functions, operation, code)?;
        library::check(functions, operation, (functions.device_uuid)(&raw mut uuid, device))?;
    }
    Ok(Uuid(uuid))
}

/// The primary context of a device, retained; frameworks use the same context.
pub(super) struct Context {
    pub(super) functions: &'static Functions,
    pub(super) number: u32,
    device: c_int,
    raw: sys::CUcontext,
    pub(super) kernels: Kernels,
    pub(super) pinned_buffers: PinnedBufferPool,
    pub(super) accumulators: AccumulatorPool,
    /// Another library destroyed the context, or the driver shut down: no object of it is used
    /// or freed any more.
    is_destroyed: AtomicBool,
}

// SAFETY: the driver's objects may be used from any thread; a context is made current in each
// before its use.
unsafe impl Send for Context {}
// SAFETY: the same.
unsafe impl Sync for Context {}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Context({})", self.number)
    }
}

impl Context {
    fn retain(functions: &'static Functions, number: u32) -> Result<Arc<Self>> {
        let operation = "open";
        let mut device = 0;
        let mut raw = std::ptr::null_mut();
        // SAFETY: valid pointers for the results.
        unsafe {
            let code = (functions.device_get)(&raw mut device, number as c_int);
            library::check(functions, operation, code)?;
            let code = (functions.context_retain)(&raw mut raw, device);
            library::check(functions, operation, code)?;
        }
        let kernels = Kernels::default();
        let (pinned_buffers, accumulators) =
            (PinnedBufferPool::default(), AccumulatorPool::default());
        let is_destroyed = AtomicBool::new(false);
        Ok(Arc::new(Self {
            functions,
            number,
            device,
            raw,
            kernels,
            pinned_buffers,
            accumulators,
            is_destroyed,
        }))
    }

    /// An error unless the code is 0.
    pub(super) fn check(&self, operation: &'static str, code: Code) -> Result<()> {
        if matches!(code, DEINITIALIZED | CONTEXT_DESTROYED) {
            // Handles of this context are no longer valid in the driver.
            self.is_destroyed.store(true, Ordering::Relaxed);
        }
        library::check(self.functions, operation, code)
            .map_err(|error| error.on(DeviceName::cuda(self.number)))
    }

    /// Makes the context current on this thread for the following calls, and restores the
    /// previous one afterwards: otherwise the next call of a framework would go to another
    /// device.
    ///
    /// The capture mode of this thread is set and restored, too. While any thread captures a
    /// graph in global mode, as frameworks do, a thread in a mode other than "relaxed" may
    /// neither query an event nor allocate: the call fails, and invalidates the capture. No
    /// operation that starts here is on a captured stream.
    pub(super) fn make_current(&self, operation: &'static str) -> Result<CurrentContext<'_>> {
        const RELAXED: u32 = 2;
        if self.is_destroyed.load(Ordering::Relaxed) {
            let detail = "its context was destroyed, or the driver shut down";
            let error = Error::new(operation, ErrorKind::DeviceFailed, detail);
            return Err(error.on(DeviceName::cuda(self.number)));
        }
        // SAFETY: retained as long as `self` lives.
        let code = unsafe { (self.functions.context_push)(self.raw) };
        self.check(operation, code).map_err(|error| match code {
            INVALID_CONTEXT => {
                self.is_destroyed.store(true, Ordering::Relaxed);
                error.with_kind(ErrorKind::DeviceFailed)
            }
            _ => error,
        })?;
        let mut mode = RELAXED;
        // SAFETY: a valid mode, which is replaced by the previous one.
        let code = unsafe { (self.functions.exchange_capture_mode)(&raw mut mode) };
        let entered = CurrentContext { context: self, mode: (code == 0).then_some(mode) };
        self.check(operation, code)?;
        Ok(entered)
    }

    /// True if done, false if not yet.
    pub(super) fn is_ready(&self, operation: &'static str, code: Code) -> Result<bool> {
        if code == NOT_READY {
            return Ok(false);
        }
        self.check(operation, code).map(|()| true)
    }

    fn attribute(&self, attribute: Attribute) -> Result<i32> {
        let mut value = 0;
        // SAFETY: one valid number.
        let code = unsafe {
            (self.functions.device_attribute)(&raw mut value, attribute as u32, self.device)
        };
        self.check("read properties", code).map(|()| value)
    }

    /// Can it register memory whose pages are read-only?
    pub(super) fn can_register_read_only(&self) -> bool {
        self.has(Attribute::CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED)
    }

    fn has(&self, attribute: Attribute) -> bool {
        self.attribute(attribute).is_ok_and(|value| value != 0)
    }
}

/// The driver's functions, while a context is current on this thread.
pub(super) struct CurrentContext<'a> {
    context: &'a Context,
    /// The previous capture mode of this thread.
    mode: Option<u32>,
}

impl std::ops::Deref for CurrentContext<'_> {
    type Target = Functions;

    fn deref(&self) -> &Functions {
        self.context.functions
    }
}

impl Drop for CurrentContext<'_> {
    fn drop(&mut self) {
        if let Some(mut mode) = self.mode {
            // SAFETY: a mode that the driver returned.
            let _ = unsafe { (self.context.functions.exchange_capture_mode)(&raw mut mode) };
        }
        let mut popped = std::ptr::null_mut();
        // SAFETY: space for a handle; the popped context is the pushed one.
        let _ = unsafe { (self.context.functions.context_pop)(&raw mut popped) };
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // The following calls would block on a waiting stream of another device. Then the
        // context ends with the process.
        if self.is_destroyed.load(Ordering::Relaxed) || any_stream_waits(Implementation::Cuda) {
            return;
        }
        std::mem::take(&mut self.kernels).unload(self);
        std::mem::take(&mut self.pinned_buffers).free(self);
        std::mem::take(&mut self.accumulators).free(self);
        if self.is_destroyed.load(Ordering::Relaxed) {
            return;
        }
        // SAFETY: retained once, by `retain`. A failure cannot be reported to any caller.
        let _ = unsafe { (self.functions.context_release)(self.device) };
    }
}

/// A device behind NVIDIA's driver.
#[derive(Debug)]
pub(crate) struct Device {
    context: Arc<Context>,
    properties: Properties,
}

impl Device {
    pub(crate) fn open(number: u32) -> Result<Self> {
        let name = DeviceName::cuda(number);
        let count = count()?;
        if number >= count {
            let detail = format!("there are {count}");
            return Err(Error::new("open", ErrorKind::NoSuchDevice, detail).on(name));
        }
        let functions = library::driver()?;
        let context = Context::retain(functions, number).map_err(|error| error.on(name))?;
        let properties = properties_of(&context)?;
        context.kernels.load_all(&context);
        Ok(Self { context, properties })
    }

    /// Another device's context, for as long as it is needed.
    fn peer(&self, peer: u32) -> Result<Arc<Context>> {
        Context::retain(self.context.functions, peer)
    }
}

fn properties_of(context: &Context) -> Result<Properties> {
    let operation = "read properties";
    let functions = context.make_current(operation)?;
    let mut name = [0; 256];
    let mut uuid = [0; 16];
    let mut total = 0;
    let mut version = 0;
    // SAFETY: valid pointers of the given lengths.
    unsafe {
        let length = name.len() as c_int;
        let code = (functions.device_name)(name.as_mut_ptr(), length, context.device);
        context.check(operation, code)?;
        context.check(operation, (functions.device_uuid)(&raw mut uuid, context.device))?;
        let code = (functions.device_total_memory)(&raw mut total, context.device);
        context.check(operation, code)?;
        context.check(operation, (functions.driver_version)(&raw mut version))?;
    }
    name[255] = 0;
    // SAFETY: ends in zero.
    let product = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    let number = |attribute| context.attribute(attribute).map(|value| value.max(0) as u32);
    let pci = PciAddress {
        domain: number(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?,
        bus: number(Attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?,
        device: number(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?,
    };
    Ok(Properties {
        product,
        uuid: Uuid(uuid),
        pci: Some(pci),
        numa_node: numa_node(pci),
        total_memory: total as u64,
        granularity: memory::granularity(context)?,
        copy_engines: number(Attribute::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT)?,
        multiprocessors: number(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        compute_capability: (
            number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        driver: library::version_text(version),
        handle_types: HandleTypes {
            file_descriptor: context
                .has(Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED),
            // On Linux, every device with unified addresses supports them.
            legacy: context.has(Attribute::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING),
            fabric: has_fabric_handles(context),
            dma_buf: context.has(Attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED),
        },
    })
}

/// An attribute of CUDA 12.4: older drivers do not have it.
fn has_fabric_handles(context: &Context) -> bool {
    const HANDLE_TYPE_FABRIC_SUPPORTED: u32 = 128;
    let mut value = 0;
    // SAFETY: one valid number.
    let code = unsafe {
        let get = context.functions.device_attribute;
        get(&raw mut value, HANDLE_TYPE_FABRIC_SUPPORTED, context.device)
    };
    code == 0 && value != 0
}

/// The NUMA node from sysfs, where -1 means unknown.
fn numa_node(pci: PciAddress) -> Option<u32> {
    let path = format!("/sys/bus/pci/devices/{pci}/numa_node");
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

impl DeviceDriver for Device {
    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn free_memory(&self) -> Result<u64> {
        let operation = "free memory";
        let functions = self.context.make_current(operation)?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: two valid numbers.
        let code = unsafe { (functions.memory_info)(&raw mut free, &raw mut total) };
        self.context.check(operation, code).map(|()| free as u64)
    }

    fn peer_access(&self, peer: u32) -> Result<PeerAccess> {
        const NATIVE_ATOMIC_SUPPORTED: u32 = 3;
        let operation = "peer access";
        if peer == self.context.number {
            return Ok(PeerAccess::Same);
        }
        let functions = self.context.functions;
        let (mut can, mut atomics, mut other) = (0, 0, 0);
        // SAFETY: valid numbers.
        unsafe {
            let code = (functions.device_get)(&raw mut other, peer as c_int);
            self.context.check(operation, code)?;
            let own = self.context.device;
            let code = (functions.device_can_access_peer)(&raw mut can, own, other);
            self.context.check(operation, code)?;
            let get = functions.device_peer_attribute;
            // Optional: a driver without this attribute reports none.
            let _ = get(&raw mut atomics, NATIVE_ATOMIC_SUPPORTED, own, other);
        }
        Ok(match can {
            0 => PeerAccess::None,
            _ => PeerAccess::Direct { atomics: atomics != 0 },
        })
    }

    fn enable_peer(&self, peer: u32) -> Result<()> {
        let operation = "enable peer access";
        let peer = self.peer(peer)?;
        let functions = self.context.make_current(operation)?;
        // SAFETY: the peer's context is retained during the call; the grant ends with either
        // context.
        match unsafe { (functions.context_enable_peer)(peer.raw, 0) } {
            PEER_ACCESS_ALREADY_ENABLED => {}
            code => self.context.check(operation, code)?,
        }
        // It must outlive the grant, or a context created later would not be reachable.
        std::mem::forget(peer);
        Ok(())
    }

    fn allocate(&self, length: u64) -> Result<u64> {
        memory::allocate(&self.context, length)
    }

    unsafe fn free(&self, address: u64) -> Result<()> {
        let operation = "free";
        let functions = self.context.make_current(operation)?;
        // SAFETY: the caller's promise.
        self.context.check(operation, unsafe { (functions.memory_free)(address) })
    }

    fn create(&self, length: u64) -> Result<driver::Physical> {
        Physical::create(&self.context, length).map(driver::Physical::Cuda)
    }

    fn export(&self, physical: &driver::Physical) -> Result<OwnedFd> {
        match physical {
            driver::Physical::Cuda(physical) => physical.export(),
            driver::Physical::Emulated(_) => Err(driver::implementation_mismatch("export")),
        }
    }

    fn import(&self, descriptor: BorrowedFd<'_>, length: u64) -> Result<(driver::Physical, u32)> {
        let (physical, resident) = Physical::import(&self.context, descriptor, length)?;
        Ok((driver::Physical::Cuda(physical), resident))
    }

    fn reserve(&self, length: u64) -> Result<Box<dyn AddressRangeDriver>> {
        Ok(Box::new(AddressRange::reserve(&self.context, length)?))
    }

    fn legacy_export(&self, address: u64) -> Result<[u8; 64]> {
        memory::legacy_export(&self.context, address)
    }

    fn legacy_open(&self, handle: [u8; 64]) -> Result<(u64, u64)> {
        memory::legacy_open(&self.context, handle)
    }

    unsafe fn legacy_close(&self, address: Address) -> Result<()> {
        let operation = "close a legacy handle";
        let functions = self.context.make_current(operation)?;
        // SAFETY: the caller's promise.
        self.context.check(operation, unsafe { (functions.ipc_memory_close)(address) })
    }

    fn attributes(&self, address: u64) -> Result<PointerAttributes> {
        memory::attributes(&self.context, address)
    }

    fn retain(&self, address: u64) -> Result<driver::Mapping> {
        memory::retain(&self.context, address)
    }

    fn dma_buf(&self, address: u64, length: u64) -> Result<OwnedFd> {
        memory::dma_buf(&self.context, address, length)
    }

    unsafe fn register(&self, address: u64, length: u64, is_read_only: bool) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { memory::register(&self.context, address, length, is_read_only) }
    }

    unsafe fn unregister(&self, address: u64) -> Result<()> {
        let operation = "unregister host memory";
        let functions = self.context.make_current(operation)?;
        // SAFETY: the caller's promise.
        self.context.check(operation, unsafe { (functions.host_unregister)(address as *mut _) })
    }

    fn check_context(&self, operation: &'static str) -> Result<()> {
        self.context.make_current(operation).map(drop)
    }

    fn pinned_buffer(&self, length: usize) -> Result<Box<dyn PinnedBuffer>> {
        Ok(Box::new(PinnedBlock::new(&self.context, length)?))
    }

    fn stream(&self) -> Result<Box<dyn StreamDriver>> {
        Ok(Box::new(Stream::new(&self.context)?))
    }

    unsafe fn adopt_stream(&self, handle: u64) -> Result<Box<dyn StreamDriver>> {
        // SAFETY: the caller's promise.
        Ok(Box::new(unsafe { Stream::adopt(&self.context, handle) }?))
    }

    fn event(&self) -> Result<driver::Event> {
        Event::new(&self.context).map(driver::Event::Cuda)
    }

    fn is_event_done(&self, event: &driver::Event) -> Result<bool> {
        match event {
            driver::Event::Cuda(event) => event.is_done(),
            driver::Event::Emulated(_) => Err(driver::implementation_mismatch("query event")),
        }
    }
}
