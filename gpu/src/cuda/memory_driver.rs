//! Memory: of cuMemAlloc, mapped, of other processes, and of the host.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;
use threads::lock;

use super::Context;
use super::fabric_handle::{self, FabricHandle};
use super::library::Address;
use super::locate::pointer_attributes;
use crate::device_name::DeviceName;
use crate::driver::{self, AddressRangeDriver, Mapped, PhysicalMemory, PinnedBuffer};
use crate::error::{Error, ErrorKind, Result};
use crate::pointer_attributes::{Allocator, PointerAttributes};

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const FILE_DESCRIPTOR: u32 = 1;
/// `CU_MEM_HANDLE_TYPE_FABRIC`.
pub(super) const FABRIC: u32 = 8;

/// Can network cards access mapped memory of this device?
pub(super) fn has_rdma_mapped(context: &Context) -> bool {
    // A driver without the attribute returns an error.
    const GPU_DIRECT_RDMA_WITH_VMM_SUPPORTED: u32 = 110;
    context.has(GPU_DIRECT_RDMA_WITH_VMM_SUPPORTED)
}

/// Memory on this device that can be exported as handles of these types, and that network cards may
/// access if they can.
fn shareable(context: &Context, handle_types: u32) -> MaybeUninit<sys::CUmemAllocationProp> {
    let has_rdma = has_rdma_mapped(context);
    let mut wanted = MaybeUninit::new(sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        location: location(context.number),
        win32HandleMetaData: ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: u8::from(has_rdma),
            usage: 0,
            reserved: [0; 4],
        },
    });
    // SAFETY: a field of the size of the number. A set of types is no value of the enumeration, so
    // only the driver reads it.
    unsafe {
        let field = &raw mut (*wanted.as_mut_ptr()).requestedHandleTypes;
        field.cast::<u32>().write(handle_types);
    }
    wanted
}

/// The types of the handles of memory that is allocated here: a file descriptor, and a fabric
/// handle if this process may create one, for which the machine needs a channel of IMEX.
pub(super) fn handle_types(context: &Context) -> u32 {
    // An attribute of CUDA 12.4: older drivers do not have it.
    const HANDLE_TYPE_FABRIC_SUPPORTED: u32 = 128;
    *context.handle_types.get_or_init(|| {
        let both = FILE_DESCRIPTOR | FABRIC;
        if !context.has(HANDLE_TYPE_FABRIC_SUPPORTED) {
            return FILE_DESCRIPTOR;
        }
        let created = granularity_of(context, both)
            .and_then(|length| create(context, length, both))
            .and_then(|handle| release(context, handle));
        if created.is_ok() { both } else { FILE_DESCRIPTOR }
    })
}

fn location(number: u32) -> sys::CUmemLocation {
    sys::CUmemLocation {
        type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: number as c_int,
    }
}

pub(super) fn granularity(context: &Context) -> Result<u64> {
    granularity_of(context, handle_types(context))
}

fn granularity_of(context: &Context, handle_types: u32) -> Result<u64> {
    const RECOMMENDED: u32 = 1;
    let wanted = shareable(context, handle_types);
    let mut bytes = 0;
    context.call("read properties", |functions| {
        // SAFETY: a valid number, a valid description.
        unsafe { (functions.granularity)(&raw mut bytes, wanted.as_ptr(), RECOMMENDED) }
    })?;
    Ok(bytes as u64)
}

pub(super) fn allocate(context: &Context, length: u64) -> Result<Address> {
    let mut address = 0;
    context.call("allocate memory", |functions| {
        // SAFETY: one valid number.
        unsafe { (functions.memory_allocate)(&raw mut address, length as usize) }
    })?;
    Ok(address)
}

/// Physical memory, created or imported.
#[derive(Debug)]
pub(super) struct Physical {
    context: Arc<Context>,
    handle: u64,
    length: u64,
}

impl Drop for Physical {
    fn drop(&mut self) {
        let _ = release(&self.context, self.handle);
    }
}

fn create(context: &Context, length: u64, handle_types: u32) -> Result<u64> {
    let wanted = shareable(context, handle_types);
    let mut handle = 0;
    // SAFETY: a valid number, a valid description.
    context.call("allocate memory", |functions| unsafe {
        (functions.physical_create)(&raw mut handle, length as usize, wanted.as_ptr(), 0)
    })?;
    Ok(handle)
}

fn release(context: &Context, handle: u64) -> Result<()> {
    // SAFETY: its owner releases it once; mapped memory stays until it is unmapped.
    context.call("release memory", |functions| unsafe { (functions.physical_release)(handle) })
}

impl Physical {
    pub(super) fn create(context: &Arc<Context>, length: u64) -> Result<Self> {
        let handle = create(context, length, handle_types(context))?;
        Ok(Self { context: Arc::clone(context), handle, length })
    }

    /// The piece that is mapped at an address, by any library. The handle keeps it allocated. For
    /// memory that was mapped in pieces, the driver reports the bounds of this piece, not those of
    /// the whole range.
    pub(super) fn mapped_at(context: &Arc<Context>, address: Address) -> Result<Mapped> {
        let operation = "query mapped memory";
        let functions = context.make_current(operation)?;
        let (mut handle, mut base, mut length) = (0, 0, 0);
        // SAFETY: valid numbers; the driver looks the address up.
        unsafe {
            let code = (functions.memory_range)(&raw mut base, &raw mut length, address);
            context.check(operation, code)?;
            let at = ptr::without_provenance_mut(address as usize);
            context.check(operation, (functions.physical_retain)(&raw mut handle, at))?;
        }
        let length = length as u64;
        Ok((Box::new(Self { context: Arc::clone(context), handle, length }), base, length))
    }

    /// The memory, and the device that it is located on.
    pub(super) fn import(
        context: &Arc<Context>,
        descriptor: BorrowedFd<'_>,
        length: u64,
    ) -> Result<(Self, Option<u32>)> {
        /// The driver's number for a device that is not visible.
        const INVALID_DEVICE: i32 = -2;
        let operation = "import memory";
        let functions = context.make_current(operation)?;
        let mut handle = 0;
        let code = match fabric_handle::from_file(descriptor) {
            // SAFETY: the driver reads the handle, which exists during the call.
            Some(mut fabric) => unsafe {
                (functions.physical_import)(&raw mut handle, fabric.as_mut_ptr().cast(), FABRIC)
            },
            // SAFETY: the driver takes the number of a file descriptor as a pointer, and keeps no
            // reference to it.
            None => unsafe {
                let number = ptr::without_provenance_mut(descriptor.as_raw_fd() as usize);
                (functions.physical_import)(&raw mut handle, number, FILE_DESCRIPTOR)
            },
        };
        context.check(operation, code).map_err(|error| match error.kind() {
            ErrorKind::OutOfMemory | ErrorKind::DeviceFailed | ErrorKind::NoSuchDevice => error,
            _ => error.with_kind(ErrorKind::InvalidHandle),
        })?;
        let physical = Self { context: Arc::clone(context), handle, length };
        let mut found = MaybeUninit::<sys::CUmemAllocationProp>::zeroed();
        // SAFETY: space for a description, of which only a plain number is read: its
        // enumerations may have values that are unknown here.
        let (code, kind, resident) = unsafe {
            let code = (functions.physical_properties)(found.as_mut_ptr(), handle);
            let location = &raw const (*found.as_ptr()).location;
            let kind = (&raw const (*location).type_).cast::<u32>().read();
            (code, kind, (&raw const (*location).id).read())
        };
        context.check(operation, code)?;
        let is_device = kind == sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as u32;
        match u32::try_from(resident) {
            Ok(resident) if is_device => Ok((physical, Some(resident))),
            Err(_) if is_device && resident == INVALID_DEVICE => Ok((physical, None)),
            _ => {
                let detail = "memory of no device of this process";
                Err(Error::new(operation, ErrorKind::InvalidHandle, detail))
            }
        }
    }
}

impl PhysicalMemory for Physical {
    fn export(&self) -> Result<OwnedFd> {
        let operation = "export memory";
        let mut number: c_int = -1;
        let out = (&raw mut number).cast::<c_void>();
        // SAFETY: space for a file descriptor's number.
        let exported = self.context.call(operation, |functions| unsafe {
            (functions.physical_export)(out, self.handle, FILE_DESCRIPTOR, 0)
        });
        match exported {
            Ok(()) => owned(operation, number),
            // The driver's error for memory of other libraries that cannot be exported as a
            // file descriptor.
            Err(error) if error.kind() == ErrorKind::InvalidArgument => {
                let none = |_| error.with_kind(ErrorKind::NotSupported);
                fabric_handle::to_file(&self.fabric_handle().map_err(none)?)
            }
            Err(error) => Err(error),
        }
    }
}

impl Physical {
    fn fabric_handle(&self) -> Result<FabricHandle> {
        let mut handle = [0; size_of::<FabricHandle>()];
        // SAFETY: space for a handle.
        self.context.call("export memory", |functions| unsafe {
            (functions.physical_export)(handle.as_mut_ptr().cast(), self.handle, FABRIC, 0)
        })?;
        Ok(handle)
    }
}

/// Takes ownership of the file descriptor that the driver returned, and sets close-on-exec.
pub(super) fn owned(operation: &'static str, number: c_int) -> Result<OwnedFd> {
    // SAFETY: no pointers.
    if number < 0 || unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) } != 0 {
        return Err(Error::system(operation, "fcntl F_SETFD"));
    }
    // SAFETY: just made for this process.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

#[derive(Debug)]
pub(super) struct AddressRange {
    context: Arc<Context>,
    address: Address,
    length: u64,
}

impl AddressRange {
    pub(super) fn reserve(context: &Arc<Context>, length: u64) -> Result<Self> {
        let mut address = 0;
        context.call("reserve addresses", |functions| {
            // SAFETY: one valid number.
            unsafe { (functions.address_reserve)(&raw mut address, length as usize, 0, 0, 0) }
        })?;
        Ok(Self { context: Arc::clone(context), address, length })
    }
}

impl AddressRangeDriver for AddressRange {
    fn address(&self) -> u64 {
        self.address
    }

    fn map(&self, offset: u64, physical: &dyn PhysicalMemory, devices: &[u32]) -> Result<()> {
        let operation = "map memory";
        let physical: &Physical = driver::downcast(operation, physical)?;
        let functions = self.context.make_current(operation)?;
        let (at, length) = (self.address + offset, physical.length as usize);
        // SAFETY: inside of the reserved range, which `address_range.rs` keeps track of.
        let code = unsafe { (functions.map)(at, length, 0, physical.handle, 0) };
        self.context.check(operation, code)?;
        let access: Vec<_> = devices
            .iter()
            .map(|number| sys::CUmemAccessDesc {
                location: location(*number),
                flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
            })
            .collect();
        // SAFETY: as many descriptions as the count says.
        let code = unsafe { (functions.set_access)(at, length, access.as_ptr(), access.len()) };
        self.context.check("set access", code).inspect_err(|_| {
            // SAFETY: mapped a moment ago, and not used yet.
            let _ = unsafe { (functions.unmap)(at, length) };
        })
    }

    unsafe fn unmap(&self, offset: u64, length: u64) -> Result<()> {
        // SAFETY: the caller's promise.
        self.context.call("unmap memory", |functions| unsafe {
            (functions.unmap)(self.address + offset, length as usize)
        })
    }
}

impl Drop for AddressRange {
    fn drop(&mut self) {
        let _ = self.context.call("free addresses", |functions| {
            // SAFETY: reserved here; the pieces are unmapped, or the call is refused.
            unsafe { (functions.address_free)(self.address, self.length as usize) }
        });
    }
}

pub(super) fn attributes(context: &Context, address: Address) -> Result<PointerAttributes> {
    use sys::CUpointer_attribute_enum as Attribute;
    const HOST: u64 = 1;
    let operation = "query pointer attributes";
    let functions = context.make_current(operation)?;
    let wanted = [
        Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED,
        Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
        Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
        Attribute::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES,
        Attribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
        Attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID,
    ];
    let (code, found) = pointer_attributes(&functions, wanted, address);
    context.check(operation, code)?;
    let [memory_type, ordinal, is_managed, base, length, handle_types, pool, id] = found;
    if memory_type == 0 {
        let detail = format!("the driver has no allocation at {address:#x}");
        return Err(Error::new(operation, ErrorKind::InvalidArgument, detail));
    }
    let allocator = if is_managed & 0xff != 0 {
        Allocator::Managed
    } else if memory_type as u32 as u64 == HOST {
        Allocator::Host
    } else if pool != 0 {
        Allocator::Pool
    } else if is_mapped(context, address) {
        // A fabric handle was allowed when the memory was allocated.
        Allocator::Mapped { exportable: handle_types & u64::from(FILE_DESCRIPTOR | FABRIC) != 0 }
    } else {
        Allocator::Plain
    };
    let device = (allocator != Allocator::Host).then(|| DeviceName::cuda(ordinal as u32));
    Ok(PointerAttributes { device, allocator, base, length, id })
}

/// Is physical memory mapped here, by any library?
fn is_mapped(context: &Context, address: Address) -> bool {
    let functions = context.functions;
    let mut handle = 0;
    // SAFETY: a valid number; the retained handle is released at once.
    unsafe {
        let at = ptr::without_provenance_mut(address as usize);
        let is_mapped = (functions.physical_retain)(&raw mut handle, at) == 0;
        if is_mapped {
            let _ = (functions.physical_release)(handle);
        }
        is_mapped
    }
}

/// Host memory, allocated with the driver.
#[derive(Debug)]
pub(super) struct PinnedBlock {
    context: Arc<Context>,
    address: u64,
    length: usize,
}

/// Frees the unused blocks and accumulators, at the end of a context.
pub(super) fn free_spare(context: &Context) {
    for (_, address) in std::mem::take(&mut *lock(&context.spare_blocks)) {
        // SAFETY: owned, and no operation on it is left.
        let _ = context.call("free host memory", |functions| unsafe {
            (functions.host_free)(address as *mut c_void)
        });
    }
    for address in std::mem::take(&mut *lock(&context.spare_accumulators)) {
        free_accumulator(context, address);
    }
}

pub(super) fn free_accumulator(context: &Context, address: Address) {
    // SAFETY: owned, and no operation on it is left.
    let _ = context.call("free memory", |functions| unsafe { (functions.memory_free)(address) });
}

impl PinnedBlock {
    pub(super) fn new(context: &Arc<Context>, length: usize) -> Result<Self> {
        const PORTABLE: u32 = 1;
        let operation = "allocate host memory";
        let functions = context.make_current(operation)?;
        let spare = lock(&context.spare_blocks).extract_if(.., |spare| spare.0 == length).next();
        let address = match spare {
            Some((_, address)) => address,
            None => {
                let mut out = ptr::null_mut();
                // SAFETY: space for an address.
                let code = unsafe { (functions.host_allocate)(&raw mut out, length, PORTABLE) };
                context.check(operation, code)?;
                out.expose_provenance() as u64
            }
        };
        Ok(Self { context: Arc::clone(context), address, length })
    }
}

impl PinnedBuffer for PinnedBlock {
    fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for PinnedBlock {
    fn drop(&mut self) {
        lock(&self.context.spare_blocks).push((self.length, self.address));
    }
}
