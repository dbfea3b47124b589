//! A device, its context, and its properties.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_int, c_void};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;
use sys::CUdevice_attribute_enum as Attribute;

use super::Context;
use super::library::{self, Address, PEER_ACCESS_ALREADY_ENABLED};
use super::memory_driver::{self, AddressRange, Physical, PinnedBlock};
use super::stream_driver::{Event, Stream};
use crate::device_name::DeviceName;
use crate::driver::{
    AddressRangeDriver, DeviceDriver, EventDriver, Imported, Mapped, PhysicalMemory, PinnedBuffer,
    StreamDriver,
};
use crate::error::{Error, ErrorKind, Result};
use crate::pointer_attributes::PointerAttributes;
use crate::properties::{
    GpuDirect, HandleTypes, PciAddress, PeerAccess, Properties, Uuid, WritesOrdering,
};

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

#[derive(Debug)]
pub(crate) struct Device {
    context: Arc<Context>,
    properties: Properties,
}

impl Device {
    pub(crate) fn open(number: u32) -> Result<Self> {
        let name = DeviceName::cuda(number);
        let count = library::device_count()?;
        if number >= count {
            let detail = format!("there are {count}");
            return Err(Error::new("open", ErrorKind::NoSuchDevice, detail).of(name));
        }
        let functions = library::driver()?;
        let context = Context::retain(functions, number).map_err(|error| error.of(name))?;
        let properties = properties_of(&context)?;
        context.kernels.load_all(&context);
        Ok(Self { context, properties })
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
    let number =
        |attribute: Attribute| context.attribute(attribute as u32).map(|value| value.max(0) as u32);
    let has = |attribute: Attribute| context.has(attribute as u32);
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
        granularity: memory_driver::granularity(context)?,
        driver: library::version_text(version),
        handle_types: HandleTypes {
            file_descriptor: has(
                Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
            ),
            // On Linux, every device with unified addresses supports them.
            legacy: has(Attribute::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING),
            fabric: memory_driver::handle_types(context) & memory_driver::FABRIC != 0,
            dma_buf: has(Attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED),
        },
        gpu_direct: gpu_direct(context),
    })
}

/// An attribute that the driver does not know counts as 0: not supported, and no order.
fn gpu_direct(context: &Context) -> GpuDirect {
    const FLUSH_BY_HOST: i32 = 1;
    const ORDERED_FOR_OWNER: i32 = 100;
    const ORDERED_FOR_ALL_DEVICES: i32 = 200;
    let number = |attribute: Attribute| context.attribute(attribute as u32).unwrap_or(0);
    let flush = Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS;
    let ordering = number(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING);
    GpuDirect {
        rdma: context.has(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED as u32),
        rdma_mapped: memory_driver::has_rdma_mapped(context),
        can_flush: number(flush) & FLUSH_BY_HOST != 0,
        writes_ordering: match ordering {
            ORDERED_FOR_ALL_DEVICES.. => WritesOrdering::AllDevices,
            ORDERED_FOR_OWNER.. => WritesOrdering::Owner,
            _ => WritesOrdering::None,
        },
    }
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

    fn with_context(&self, call: &mut dyn FnMut()) -> Result<()> {
        let _current = self.context.make_current("make device current")?;
        call();
        Ok(())
    }

    fn free_memory(&self) -> Result<u64> {
        let (mut free, mut total) = (0, 0);
        self.context.call("query free memory", |functions| {
            // SAFETY: two valid numbers.
            unsafe { (functions.memory_info)(&raw mut free, &raw mut total) }
        })?;
        Ok(free as u64)
    }

    fn peer_access(&self, peer: u32) -> Result<PeerAccess> {
        let operation = "query peer access";
        if peer == self.context.number {
            return Ok(PeerAccess::Same);
        }
        let functions = self.context.functions;
        let mut can = 0;
        let mut other = 0;
        // SAFETY: valid numbers.
        unsafe {
            let code = (functions.device_get)(&raw mut other, peer as c_int);
            self.context.check(operation, code)?;
            let own = self.context.device;
            let code = (functions.device_can_access_peer)(&raw mut can, own, other);
            self.context.check(operation, code)?;
        }
        Ok(if can == 0 { PeerAccess::None } else { PeerAccess::Direct })
    }

    fn enable_peer(&self, peer: u32) -> Result<()> {
        let operation = "enable peer access";
        let peer = Context::retain(self.context.functions, peer)?;
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
        memory_driver::allocate(&self.context, length)
    }

    unsafe fn free(&self, address: u64) -> Result<()> {
        // SAFETY: the caller's promise.
        self.context.call("free memory", |functions| unsafe { (functions.memory_free)(address) })
    }

    fn create(&self, length: u64) -> Result<Box<dyn PhysicalMemory>> {
        Ok(Box::new(Physical::create(&self.context, length)?))
    }

    fn import(&self, descriptor: BorrowedFd<'_>, length: u64) -> Result<Imported> {
        let (physical, resident) = Physical::import(&self.context, descriptor, length)?;
        Ok((Box::new(physical), resident))
    }

    fn reserve(&self, length: u64) -> Result<Box<dyn AddressRangeDriver>> {
        Ok(Box::new(AddressRange::reserve(&self.context, length)?))
    }

    fn legacy_export(&self, address: Address) -> Result<[u8; 64]> {
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        let exported = self.context.call("export by legacy handle", |functions| {
            // SAFETY: space for a handle.
            unsafe { (functions.ipc_memory_handle)(&raw mut handle, address) }
        });
        exported.map_err(|error| match error.kind() {
            // The driver's error for memory that was not allocated with cuMemAlloc.
            ErrorKind::InvalidArgument => error.with_kind(ErrorKind::NotSupported),
            _ => error,
        })?;
        Ok(handle.reserved.map(|byte| byte as u8))
    }

    fn legacy_open(&self, handle: [u8; 64]) -> Result<(Address, u64)> {
        const LAZY_ENABLE_PEER_ACCESS: u32 = 1;
        let operation = "open legacy handle";
        let context = &self.context;
        let functions = context.make_current(operation)?;
        let handle = sys::CUipcMemHandle { reserved: handle.map(|byte| byte as _) };
        let (mut address, mut base, mut length) = (0, 0, 0);
        // SAFETY: valid numbers; the driver checks the handle.
        unsafe {
            let code =
                (functions.ipc_memory_open)(&raw mut address, handle, LAZY_ENABLE_PEER_ACCESS);
            context.check(operation, code).map_err(|error| match error.kind() {
                ErrorKind::OutOfMemory | ErrorKind::DeviceFailed | ErrorKind::NoPeerAccess => error,
                _ => error.with_kind(ErrorKind::InvalidHandle),
            })?;
            let code = (functions.memory_range)(&raw mut base, &raw mut length, address);
            context.check(operation, code).inspect_err(|_| {
                let _ = (functions.ipc_memory_close)(address);
            })?;
        }
        Ok((address, (length as u64).saturating_sub(address - base)))
    }

    unsafe fn legacy_close(&self, address: Address) -> Result<()> {
        // SAFETY: the caller's promise.
        self.context.call("close legacy handle", |functions| unsafe {
            (functions.ipc_memory_close)(address)
        })
    }

    fn attributes(&self, address: u64) -> Result<PointerAttributes> {
        memory_driver::attributes(&self.context, address)
    }

    fn retain(&self, address: u64) -> Result<Mapped> {
        Physical::mapped_at(&self.context, address)
    }

    fn dma_buf(&self, address: u64, length: u64) -> Result<OwnedFd> {
        const DMA_BUF: u32 = 1;
        let operation = "export as dma-buf";
        let mut number: c_int = -1;
        let out = (&raw mut number).cast::<c_void>();
        // SAFETY: space for a file descriptor's number.
        self.context.call(operation, |functions| unsafe {
            (functions.address_handle)(out, address, length as usize, DMA_BUF, 0)
        })?;
        memory_driver::owned(operation, number)
    }

    fn flush_remote_writes(&self) -> Result<()> {
        const CURRENT_CONTEXT: u32 = 0;
        const TO_ALL_DEVICES: u32 = 200;
        self.context.call("flush remote writes", |functions| {
            // SAFETY: no pointers; the context is current.
            unsafe { (functions.flush_remote_writes)(CURRENT_CONTEXT, TO_ALL_DEVICES) }
        })
    }

    fn set_sync_memops(&self, address: u64) -> Result<()> {
        const SYNC_MEMOPS: u32 = 6;
        let is_on: c_int = 1;
        let set = self.context.call("set synchronous copies", |functions| {
            // SAFETY: the attribute is an `int`; the driver looks the address up.
            unsafe {
                (functions.set_pointer_attribute)((&raw const is_on).cast(), SYNC_MEMOPS, address)
            }
        });
        set.map_err(|error| match error.kind() {
            // The driver's error for mapped memory.
            ErrorKind::InvalidArgument => error.with_kind(ErrorKind::NotSupported),
            _ => error,
        })
    }

    unsafe fn register(&self, address: u64, length: u64, is_read_only: bool) -> Result<()> {
        const PORTABLE_AND_MAPPED: u32 = 1 | 2;
        const READ_ONLY: u32 = 8;
        let operation = "register host memory";
        let functions = self.context.make_current(operation)?;
        let read_only = Attribute::CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED;
        if is_read_only && !self.context.has(read_only as u32) {
            let detail = "the device cannot register memory that can only be read";
            return Err(Error::new(operation, ErrorKind::NotSupported, detail));
        }
        // SAFETY: the caller's promise.
        let code = unsafe {
            let at = ptr::with_exposed_provenance_mut(address as usize);
            let flags = PORTABLE_AND_MAPPED | if is_read_only { READ_ONLY } else { 0 };
            (functions.host_register)(at, length as usize, flags)
        };
        self.context.check(operation, code)
    }

    unsafe fn unregister(&self, address: u64) -> Result<()> {
        // SAFETY: the caller's promise.
        self.context.call("unregister host memory", |functions| unsafe {
            (functions.host_unregister)(address as *mut _)
        })
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

    fn event(&self) -> Result<Arc<dyn EventDriver>> {
        Ok(Arc::new(Event::new(&self.context)?))
    }

    fn event_with_time(&self) -> Result<Arc<dyn EventDriver>> {
        Ok(Arc::new(Event::with_time(&self.context)?))
    }
}
