//! The functions that this library replaces.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::OnceLock;
use std::{mem, ptr};

/// The driver's handle of memory, as the runtime passes it by value.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct IpcHandle(pub(crate) [u8; 64]);

pub(crate) type Code = c_int;
/// There is no original: the program uses no shared runtime.
pub(crate) const NOT_SUPPORTED: Code = 801;

/// The original of each function, if there is one.
macro_rules! originals {
    ($($name:ident: fn($($argument:ident: $type:ty),*);)*) => {
        $(
            /// Calls the original function.
            ///
            /// # Safety
            /// As for the original.
            pub(crate) unsafe fn $name($($argument: $type),*) -> Code {
                static FOUND: OnceLock<Option<usize>> = OnceLock::new();
                let symbol = concat!(stringify!($name), "\0");
                let Some(address) = FOUND.get_or_init(|| find(symbol)) else { return NOT_SUPPORTED };
                // SAFETY: the function of this name in CUDA's runtime has this type.
                unsafe {
                    let function: unsafe extern "C" fn($($type),*) -> Code =
                        mem::transmute(ptr::with_exposed_provenance::<c_void>(*address));
                    function($($argument),*)
                }
            }
        )*
    };
}

#[allow(non_snake_case)]
mod functions {
    use super::*;

    originals! {
        cudaMalloc: fn(out: *mut *mut c_void, length: usize);
        cudaFree: fn(address: *mut c_void);
        cudaMallocAsync: fn(out: *mut *mut c_void, length: usize, stream: *mut c_void);
        cudaFreeAsync: fn(address: *mut c_void, stream: *mut c_void);
        cudaIpcGetMemHandle: fn(out: *mut IpcHandle, address: *mut c_void);
        cudaIpcOpenMemHandle: fn(out: *mut *mut c_void, handle: IpcHandle, flags: u32);
        cudaIpcCloseMemHandle: fn(address: *mut c_void);
        cudaIpcGetEventHandle: fn(out: *mut IpcHandle, event: *mut c_void);
        cudaGetDevice: fn(device: *mut c_int);
        cudaDeviceSynchronize: fn();
    }
}

pub(crate) use functions::*;

/// The address of a function in the runtime that is loaded; None without one. `symbol` ends with 0.
fn find(symbol: &str) -> Option<usize> {
    let name = symbol.as_ptr().cast::<c_char>();
    // SAFETY: a name that ends with 0. This finds a runtime that the program is linked to.
    let mut found = unsafe { libc::dlsym(libc::RTLD_NEXT, name) };
    if found.is_null() {
        // One that was loaded later, as by Python.
        let runtime = loaded_runtime()?;
        // SAFETY: an open library, which stays loaded.
        found = unsafe { libc::dlsym(runtime, name) };
    }
    (!found.is_null()).then(|| found.expose_provenance())
}

/// The runtime among the libraries of this process.
fn loaded_runtime() -> Option<*mut c_void> {
    unsafe extern "C" fn visit(
        info: *mut libc::dl_phdr_info,
        _size: libc::size_t,
        found: *mut c_void,
    ) -> c_int {
        // SAFETY: the system passes a valid structure; `found` is the place below.
        unsafe {
            let path = (*info).dlpi_name;
            let is_runtime = !path.is_null()
                && CStr::from_ptr(path).to_bytes().windows(12).any(|part| part == b"libcudart.so");
            if is_runtime {
                *found.cast::<Option<CString>>() = Some(CStr::from_ptr(path).to_owned());
            }
            c_int::from(is_runtime)
        }
    }
    let mut found: Option<CString> = None;
    // SAFETY: the place lives longer than the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut found).cast()) };
    // Not in the callback, which has a lock of the loader.
    // SAFETY: the path of a loaded library.
    let runtime = unsafe { libc::dlopen(found?.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    (!runtime.is_null()).then_some(runtime)
}

pub(crate) fn current_device() -> Option<u32> {
    let mut device = -1;
    // SAFETY: a valid place for a number.
    let code = unsafe { cudaGetDevice(&raw mut device) };
    u32::try_from(device).ok().filter(|_| code == 0)
}
