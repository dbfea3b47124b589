//! The driver's functions, looked up at run time.
//!
//! Nothing is linked: a machine without CUDA runs the same program. All functions are looked up
//! at once, so that a driver that lacks one is refused with the name of the missing function.
//! They are declared to return plain numbers, since a newer driver may return values that no
//! enumeration here has.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys;
use libloading::Library;
use threads::ForkGeneration;

use crate::error::{Error, ErrorKind, Result};

/// The return type of every function.
pub(super) type Code = u32;
/// An address on a device, or of registered host memory.
pub(super) type Address = u64;

/// The oldest CUDA version that has all of the functions.
const MIN_DRIVER_VERSION: i32 = 12_000;

/// A structure of functions that a library has.
macro_rules! functions {
    (
        $(#[$meta:meta])* $vis:vis $name:ident
        $($field:ident = $symbol:literal: fn($($argument:ty),* $(,)?);)*
    ) => {
        $(#[$meta])*
        $vis struct $name {
            $($vis $field: unsafe extern "C" fn($($argument),*) -> u32,)*
        }

        impl $name {
            /// The functions, or the name of a missing one.
            ///
            /// # Safety
            /// The library has functions of these types, and is never unloaded.
            unsafe fn find(library: &Library) -> std::result::Result<Self, &'static str> {
                Ok(Self {
                    // SAFETY: the caller's promise.
                    $($field: *unsafe {
                        library.get::<unsafe extern "C" fn($($argument),*) -> u32>($symbol.as_bytes())
                    }.map_err(|_| $symbol)?,)*
                })
            }
        }
    };
}
pub(crate) use functions;

functions! {
    pub(super) Functions
    init = "cuInit": fn(c_uint);
    driver_version = "cuDriverGetVersion": fn(*mut c_int);
    error_name = "cuGetErrorName": fn(Code, *mut *const c_char);
    error_string = "cuGetErrorString": fn(Code, *mut *const c_char);

    device_count = "cuDeviceGetCount": fn(*mut c_int);
    device_get = "cuDeviceGet": fn(*mut c_int, c_int);
    device_name = "cuDeviceGetName": fn(*mut c_char, c_int, c_int);
    device_uuid = "cuDeviceGetUuid_v2": fn(*mut [u8; 16], c_int);
    device_attribute = "cuDeviceGetAttribute": fn(*mut c_int, c_uint, c_int);
    device_total_memory = "cuDeviceTotalMem_v2": fn(*mut usize, c_int);
    context_state = "cuDevicePrimaryCtxGetState": fn(c_int, *mut c_uint, *mut c_int);
    device_can_access_peer = "cuDeviceCanAccessPeer": fn(*mut c_int, c_int, c_int);

    context_retain = "cuDevicePrimaryCtxRetain": fn(*mut sys::CUcontext, c_int);
    context_release = "cuDevicePrimaryCtxRelease_v2": fn(c_int);
    context_push = "cuCtxPushCurrent_v2": fn(sys::CUcontext);
    context_pop = "cuCtxPopCurrent_v2": fn(*mut sys::CUcontext);
    context_enable_peer = "cuCtxEnablePeerAccess": fn(sys::CUcontext, c_uint);

    memory_info = "cuMemGetInfo_v2": fn(*mut usize, *mut usize);
    memory_allocate = "cuMemAlloc_v2": fn(*mut Address, usize);
    memory_free = "cuMemFree_v2": fn(Address);
    memory_range = "cuMemGetAddressRange_v2": fn(*mut Address, *mut usize, Address);

    physical_create = "cuMemCreate": fn(*mut u64, usize, *const sys::CUmemAllocationProp, u64);
    physical_release = "cuMemRelease": fn(u64);
    physical_export = "cuMemExportToShareableHandle": fn(*mut c_void, u64, c_uint, u64);
    physical_import = "cuMemImportFromShareableHandle": fn(*mut u64, *mut c_void, c_uint);
    physical_properties = "cuMemGetAllocationPropertiesFromHandle":
        fn(*mut sys::CUmemAllocationProp, u64);
    physical_retain = "cuMemRetainAllocationHandle": fn(*mut u64, *mut c_void);
    granularity = "cuMemGetAllocationGranularity":
        fn(*mut usize, *const sys::CUmemAllocationProp, c_uint);
    address_reserve = "cuMemAddressReserve": fn(*mut Address, usize, usize, Address, u64);
    address_free = "cuMemAddressFree": fn(Address, usize);
    map = "cuMemMap": fn(Address, usize, usize, u64, u64);
    unmap = "cuMemUnmap": fn(Address, usize);
    set_access = "cuMemSetAccess": fn(Address, usize, *const sys::CUmemAccessDesc, usize);
    address_handle = "cuMemGetHandleForAddressRange":
        fn(*mut c_void, Address, usize, c_uint, u64);
    flush_remote_writes = "cuFlushGPUDirectRDMAWrites": fn(c_uint, c_uint);

    ipc_memory_handle = "cuIpcGetMemHandle": fn(*mut sys::CUipcMemHandle, Address);
    ipc_memory_open = "cuIpcOpenMemHandle_v2": fn(*mut Address, sys::CUipcMemHandle, c_uint);
    ipc_memory_close = "cuIpcCloseMemHandle": fn(Address);

    host_allocate = "cuMemHostAlloc": fn(*mut *mut c_void, usize, c_uint);
    host_free = "cuMemFreeHost": fn(*mut c_void);
    host_register = "cuMemHostRegister_v2": fn(*mut c_void, usize, c_uint);
    host_unregister = "cuMemHostUnregister": fn(*mut c_void);
    pointer_attributes = "cuPointerGetAttributes":
        fn(c_uint, *const c_uint, *const *mut c_void, Address);
    set_pointer_attribute = "cuPointerSetAttribute": fn(*const c_void, c_uint, Address);

    stream_create = "cuStreamCreate": fn(*mut sys::CUstream, c_uint);
    stream_destroy = "cuStreamDestroy_v2": fn(sys::CUstream);
    stream_query = "cuStreamQuery": fn(sys::CUstream);
    exchange_capture_mode = "cuThreadExchangeStreamCaptureMode": fn(*mut c_uint);
    stream_is_capturing = "cuStreamIsCapturing": fn(sys::CUstream, *mut c_uint);
    stream_wait_event = "cuStreamWaitEvent": fn(sys::CUstream, sys::CUevent, c_uint);
    stream_write_word = "cuStreamWriteValue32_v2": fn(sys::CUstream, Address, u32, c_uint);
    stream_wait_for_word = "cuStreamWaitValue32_v2": fn(sys::CUstream, Address, u32, c_uint);
    copy = "cuMemcpyAsync": fn(Address, Address, usize, sys::CUstream);
    fill_bytes = "cuMemsetD8Async": fn(Address, u8, usize, sys::CUstream);

    event_create = "cuEventCreate": fn(*mut sys::CUevent, c_uint);
    event_destroy = "cuEventDestroy_v2": fn(sys::CUevent);
    event_record = "cuEventRecord": fn(sys::CUevent, sys::CUstream);
    event_query = "cuEventQuery": fn(sys::CUevent);
    event_elapsed_time = "cuEventElapsedTime": fn(*mut f32, sys::CUevent, sys::CUevent);

    module_load = "cuModuleLoadData": fn(*mut sys::CUmodule, *const c_void);
    module_unload = "cuModuleUnload": fn(sys::CUmodule);
    module_function = "cuModuleGetFunction":
        fn(*mut sys::CUfunction, sys::CUmodule, *const c_char);
    launch = "cuLaunchKernel": fn(
        sys::CUfunction,
        c_uint, c_uint, c_uint,
        c_uint, c_uint, c_uint,
        c_uint,
        sys::CUstream,
        *mut *mut c_void,
        *mut *mut c_void,
    );
}

/// The driver, if there is one. The result is cached.
pub(super) fn driver() -> Result<&'static Functions> {
    static FOUND: OnceLock<(ForkGeneration, Result<Functions>)> = OnceLock::new();
    let (fork_generation, found) = FOUND.get_or_init(|| (ForkGeneration::current(), find()));
    // A driver that the parent initialised returns errors in a child that do not tell the
    // cause.
    if !fork_generation.is_current() {
        return Err(Error::forked("use CUDA"));
    }
    found.as_ref().map_err(Clone::clone)
}

fn find() -> Result<Functions> {
    let missing = |detail: String| Error::new("load CUDA", ErrorKind::Unavailable, detail);
    // SAFETY: loads and closes the library; its initialisers are NVIDIA's.
    if !unsafe { sys::is_culib_present() } {
        let detail = "libcuda.so.1 not found: no NVIDIA driver, or the container lacks it";
        return Err(missing(detail.to_owned()));
    }
    // SAFETY: it is the CUDA driver, by its file name, whose symbols have had these types since they
    // exist; cudarc never unloads it.
    let functions = unsafe { Functions::find(sys::culib()) };
    let functions = functions
        .map_err(|symbol| missing(format!("libcuda has no {symbol}: too old a driver")))?;
    let mut version = 0;
    // SAFETY: one valid number.
    check(&functions, "load CUDA", unsafe { (functions.driver_version)(&raw mut version) })?;
    if version < MIN_DRIVER_VERSION {
        let detail = format!(
            "the driver speaks CUDA {}, {} is the oldest supported version",
            version_text(version),
            version_text(MIN_DRIVER_VERSION)
        );
        return Err(missing(detail));
    }
    // SAFETY: no pointers.
    check(&functions, "load CUDA", unsafe { (functions.init)(0) })
        .map_err(|error| error.with_kind(ErrorKind::Unavailable))?;
    Ok(functions)
}

/// The number of devices that the driver shows to this process.
pub(crate) fn device_count() -> Result<u32> {
    let functions = driver()?;
    let mut count = 0;
    // SAFETY: one valid number.
    let code = unsafe { (functions.device_count)(&raw mut count) };
    check(functions, "count devices", code)?;
    Ok(count.max(0) as u32)
}

/// Formats a version, such as `13.0`.
pub(super) fn version_text(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// The driver's code for an operation that is not done yet.
pub(super) const NOT_READY: Code = 600;
pub(super) const PEER_ACCESS_ALREADY_ENABLED: Code = 704;
/// The driver was shut down, at the end of the process.
pub(super) const DEINITIALIZED: Code = 4;
/// The code for a destroyed context, and for other faults: it is only unambiguous when the
/// context is made current.
pub(super) const INVALID_CONTEXT: Code = 201;
pub(super) const CONTEXT_DESTROYED: Code = 709;

fn kind_of(code: Code) -> ErrorKind {
    match code {
        1 => ErrorKind::InvalidArgument,
        2 => ErrorKind::OutOfMemory,
        // For example, a fabric manager that does not run yet.
        3 | 46 | 100 | 802..=804 => ErrorKind::Unavailable,
        101 => ErrorKind::NoSuchDevice,
        217 => ErrorKind::NoPeerAccess,
        400 => ErrorKind::InvalidHandle,
        712 | 713 => ErrorKind::InvalidArgument,
        // For example, code for other devices.
        209 | 222 | 801 => ErrorKind::NotSupported,
        // Faults of addresses, instructions and assertions, and errors of the hardware: the
        // context is gone. It is also gone when the driver was shut down at the end of the
        // process (4), and when the device was reset (709).
        4 | 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 => ErrorKind::DeviceFailed,
        _ => ErrorKind::Other,
    }
}

/// An error unless the code is 0.
pub(super) fn check(functions: &Functions, operation: &'static str, code: Code) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    let text = |get: unsafe extern "C" fn(Code, *mut *const c_char) -> Code| {
        let mut text = std::ptr::null();
        // SAFETY: a valid place for a pointer to a literal of the driver.
        unsafe {
            if get(code, &raw mut text) != 0 || text.is_null() {
                return "unknown".to_owned();
            }
            CStr::from_ptr(text).to_string_lossy().into_owned()
        }
    };
    let detail =
        format!("{} ({code}, {})", text(functions.error_string), text(functions.error_name));
    Err(Error::new(operation, kind_of(code), detail).with_code(i64::from(code)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::proves_idle;

    /// No copy outlives the driver or its context, so nothing has to be waited for.
    #[test]
    fn ended_driver_or_context_has_nothing_in_flight() {
        let is_idle = |code| proves_idle(&Error::new("query stream", kind_of(code), ""));
        for ended in [4, 700, 709] {
            assert!(is_idle(ended), "{ended}");
        }
        // Not initialized, another context, not permitted during a capture, not ready.
        for other in [1, 2, 3, 201, 400, 600, 800, 900, 906] {
            assert!(!is_idle(other), "{other}");
        }
    }
}
