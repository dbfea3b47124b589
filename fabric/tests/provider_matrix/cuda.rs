//! CUDA memory for the matrix, through the driver library, loaded at run time. Only the calls
//! that cells need: one device, allocate, copy in and out.
#![allow(unsafe_code)]
// The types of the fields document the symbols.
#![allow(clippy::missing_transmute_annotations)]

use std::ffi::CStr;
use std::os::raw::{c_char, c_int, c_void};
use std::sync::OnceLock;

use fabric::{Memory, MemoryKind};

use crate::pair::CaseResult;

type DevicePointer = u64;

struct Driver {
    allocate: unsafe extern "C" fn(*mut DevicePointer, usize) -> c_int,
    free: unsafe extern "C" fn(DevicePointer) -> c_int,
    to_device: unsafe extern "C" fn(DevicePointer, *const c_void, usize) -> c_int,
    to_host: unsafe extern "C" fn(*mut c_void, DevicePointer, usize) -> c_int,
    set_attribute: unsafe extern "C" fn(*const c_void, c_int, DevicePointer) -> c_int,
}

/// CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: copies of this memory are synchronous.
const SYNC_MEMOPS: c_int = 6;

fn driver() -> Option<&'static Driver> {
    static DRIVER: OnceLock<Option<Driver>> = OnceLock::new();
    DRIVER.get_or_init(load).as_ref()
}

fn load() -> Option<Driver> {
    // SAFETY: a terminated name; the handle is never closed.
    let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
    if library.is_null() {
        return None;
    }
    let symbol = |name: &CStr| -> Option<*mut c_void> {
        // SAFETY: the library is open, the name terminated.
        let address = unsafe { libc::dlsym(library, name.as_ptr().cast::<c_char>()) };
        (!address.is_null()).then_some(address)
    };
    // SAFETY: the signatures are those of the driver's documented functions.
    unsafe {
        let init: unsafe extern "C" fn(u32) -> c_int = std::mem::transmute(symbol(c"cuInit")?);
        let count: unsafe extern "C" fn(*mut c_int) -> c_int =
            std::mem::transmute(symbol(c"cuDeviceGetCount")?);
        let retain: unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int =
            std::mem::transmute(symbol(c"cuDevicePrimaryCtxRetain")?);
        let current: unsafe extern "C" fn(*mut c_void) -> c_int =
            std::mem::transmute(symbol(c"cuCtxSetCurrent")?);
        let mut devices = 0;
        let mut context = std::ptr::null_mut();
        if init(0) != 0
            || count(&mut devices) != 0
            || devices == 0
            || retain(&mut context, 0) != 0
            || current(context) != 0
        {
            return None;
        }
        Some(Driver {
            allocate: std::mem::transmute(symbol(c"cuMemAlloc_v2")?),
            free: std::mem::transmute(symbol(c"cuMemFree_v2")?),
            to_device: std::mem::transmute(symbol(c"cuMemcpyHtoD_v2")?),
            to_host: std::mem::transmute(symbol(c"cuMemcpyDtoH_v2")?),
            set_attribute: std::mem::transmute(symbol(c"cuPointerSetAttribute")?),
        })
    }
}

/// Is there a device? Checked without creating a context in this process, because a process
/// with a context must not fork children that use CUDA.
pub fn is_available() -> bool {
    std::path::Path::new("/dev/nvidiactl").exists() && {
        // SAFETY: a terminated name; only looked up.
        let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_LAZY) };
        !library.is_null()
    }
}

pub struct DeviceMemory {
    base: DevicePointer,
    length: usize,
}

impl DeviceMemory {
    pub fn new(length: usize) -> CaseResult<Self> {
        let driver = driver().ok_or("no CUDA device")?;
        let mut base = 0;
        let on: c_int = 1;
        // SAFETY: a context is current on this thread; outputs are valid.
        let codes = unsafe {
            let allocated = (driver.allocate)(&mut base, length.max(1));
            (allocated, (driver.set_attribute)((&raw const on).cast(), SYNC_MEMOPS, base))
        };
        if codes != (0, 0) {
            return Err(format!("cuMemAlloc of {length}: {codes:?}").into());
        }
        let memory = Self { base, length };
        copy_in(memory.base as *mut u8, 0, &vec![0; length])?;
        Ok(memory)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if let Some(driver) = driver() {
            // SAFETY: allocated by `new`, freed once.
            unsafe { (driver.free)(self.base) };
        }
    }
}

// SAFETY: device memory, allocated in `new`, freed on drop.
unsafe impl Memory for DeviceMemory {
    fn as_ptr(&self) -> *mut u8 {
        self.base as *mut u8
    }
    fn len(&self) -> usize {
        self.length
    }
    fn kind(&self) -> MemoryKind {
        MemoryKind::Cuda(0)
    }
}

pub fn copy_in(base: *mut u8, offset: usize, bytes: &[u8]) -> CaseResult {
    let driver = driver().ok_or("no CUDA device")?;
    let to = base as u64 + offset as u64;
    // SAFETY: callers pass ranges inside an allocation.
    match unsafe { (driver.to_device)(to, bytes.as_ptr().cast(), bytes.len()) } {
        0 => Ok(()),
        code => Err(format!("cuMemcpyHtoD: {code}").into()),
    }
}

pub fn copy_out(base: *mut u8, offset: usize, bytes: &mut [u8]) -> CaseResult {
    let driver = driver().ok_or("no CUDA device")?;
    let from = base as u64 + offset as u64;
    // SAFETY: callers pass ranges inside an allocation.
    match unsafe { (driver.to_host)(bytes.as_mut_ptr().cast(), from, bytes.len()) } {
        0 => Ok(()),
        code => Err(format!("cuMemcpyDtoH: {code}").into()),
    }
}
