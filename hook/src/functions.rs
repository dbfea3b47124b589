//! The functions that replace those of CUDA's runtime and of the C library.
#![allow(unsafe_code, non_snake_case, unreachable_pub)]

use std::arch::asm;
use std::ffi::{c_int, c_long, c_void};
use std::ptr;

use crate::original::{self, Code, IpcHandle};
use crate::recursion::outermost;
use crate::settings::log;
use crate::{blocks, descriptors};

const SUCCESS: Code = 0;
/// `cudaErrorInvalidValue`, `cudaErrorInvalidResourceHandle`.
const INVALID_VALUE: Code = 1;
const INVALID_HANDLE: Code = 400;

fn address_of(pointer: *mut c_void) -> u64 {
    pointer.expose_provenance() as u64
}

fn pointer_to(address: u64) -> *mut c_void {
    ptr::with_exposed_provenance_mut(address as usize)
}

/// For functions that share memory: others get descriptors of this process from then on.
fn sharing<T>(call: impl FnOnce() -> Option<T>) -> Option<T> {
    outermost(|| {
        descriptors::serve();
        call()
    })
}

/// Stores the value of this library for the caller; without one, calls the original.
///
/// # Safety
/// `out` is null, or the caller's place for a value.
unsafe fn answer<T>(out: *mut T, value: Option<T>, call_original: impl FnOnce() -> Code) -> Code {
    match value {
        Some(value) if !out.is_null() => {
            // SAFETY: the caller's promise.
            unsafe { *out = value };
            SUCCESS
        }
        _ => call_original(),
    }
}

/// # Safety
/// As the original.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaMalloc(out: *mut *mut c_void, length: usize) -> Code {
    let allocated = sharing(|| blocks::allocate(length));
    // SAFETY: the caller's place for a pointer, or the original's.
    unsafe { answer(out, allocated.map(pointer_to), || original::cudaMalloc(out, length)) }
}

/// # Safety
/// As the original.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaFree(pointer: *mut c_void) -> Code {
    let address = address_of(pointer);
    let freed = outermost(|| {
        // As the original: it waits for all work of the device.
        if let Some(device) = blocks::device_of_plain(address) {
            let code = blocks::synchronize(&device)?;
            blocks::free(address);
            return Some(code);
        }
        let code = blocks::synchronize(blocks::pool_of(address)?.device())?;
        Some(blocks::free_async(address, 0).map_or(INVALID_VALUE, |()| code))
    });
    // SAFETY: as the original.
    freed.unwrap_or_else(|| unsafe { original::cudaFree(pointer) })
}

/// # Safety
/// As the original.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaMallocAsync(
    out: *mut *mut c_void,
    length: usize,
    stream: *mut c_void,
) -> Code {
    let allocated = sharing(|| blocks::allocate_async(length, address_of(stream)));
    // SAFETY: the caller's place for a pointer, or the original's.
    unsafe {
        let call_original = || original::cudaMallocAsync(out, length, stream);
        answer(out, allocated.map(pointer_to), call_original)
    }
}

/// # Safety
/// As the original.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaFreeAsync(pointer: *mut c_void, stream: *mut c_void) -> Code {
    let address = address_of(pointer);
    if outermost(|| blocks::free_async(address, address_of(stream))).is_some() {
        return SUCCESS;
    }
    if outermost(|| blocks::device_of_plain(address).map(drop)).is_some() {
        // SAFETY: as the original.
        return unsafe { cudaFree(pointer) };
    }
    // SAFETY: as the original.
    unsafe { original::cudaFreeAsync(pointer, stream) }
}

/// # Safety
/// As the original.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaIpcGetMemHandle(out: *mut IpcHandle, pointer: *mut c_void) -> Code {
    let exported = sharing(|| blocks::export(address_of(pointer)));
    // SAFETY: the caller's place for a handle, or the original's.
    unsafe { answer(out, exported.map(IpcHandle), || original::cudaIpcGetMemHandle(out, pointer)) }
}

/// # Safety
/// As the original.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaIpcOpenMemHandle(
    out: *mut *mut c_void,
    handle: IpcHandle,
    flags: u32,
) -> Code {
    let opened = outermost(|| blocks::open(&handle.0));
    // SAFETY: the caller's place for a pointer, or the original's.
    unsafe {
        match opened {
            _ if out.is_null() => INVALID_VALUE,
            Some(Ok(address)) => {
                *out = pointer_to(address);
                SUCCESS
            }
            Some(Err(error)) => {
                log(|| error.to_string());
                INVALID_HANDLE
            }
            None => original::cudaIpcOpenMemHandle(out, handle, flags),
        }
    }
}

/// # Safety
/// As the original.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaIpcCloseMemHandle(pointer: *mut c_void) -> Code {
    let address = address_of(pointer);
    let closed = outermost(|| {
        // Work that uses the memory is done.
        let devices = blocks::devices_of_opened(address)?;
        let codes = devices.iter().filter_map(blocks::synchronize);
        let code = codes.max().unwrap_or(SUCCESS);
        blocks::close(address);
        Some(code)
    });
    // SAFETY: as the original.
    closed.unwrap_or_else(|| unsafe { original::cudaIpcCloseMemHandle(pointer) })
}

/// # Safety
/// As the original.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaIpcGetEventHandle(out: *mut IpcHandle, event: *mut c_void) -> Code {
    sharing(|| Some(()));
    // SAFETY: as the original.
    unsafe { original::cudaIpcGetEventHandle(out, event) }
}

/// The system call itself: its result, negative for an error.
///
/// # Safety
/// As the system call.
unsafe fn raw_syscall(number: c_long, arguments: [c_long; 6]) -> c_long {
    let [a, b, c, d, e, f] = arguments;
    let result: c_long;
    // SAFETY: the caller's promise; the registers are those that the kernel defines.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        asm!("syscall", inlateout("rax") number => result, in("rdi") a, in("rsi") b, in("rdx") c,
            in("r10") d, in("r8") e, in("r9") f, lateout("rcx") _, lateout("r11") _,
            options(nostack));
    }
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        asm!("svc 0", in("x8") number, inlateout("x0") a => result, in("x1") b, in("x2") c,
            in("x3") d, in("x4") e, in("x5") f, options(nostack));
    }
    result
}

/// All system calls that a program makes by this function of the C library: those of other numbers
/// than `pidfd_getfd` are passed on without any other step, since also locks and allocators use it.
///
/// # Safety
/// As the original.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syscall(
    number: c_long,
    a: c_long,
    b: c_long,
    c: c_long,
    d: c_long,
    e: c_long,
    f: c_long,
) -> c_long {
    // SAFETY: the caller's call.
    let mut result = unsafe { raw_syscall(number, [a, b, c, d, e, f]) };
    if number == libc::SYS_pidfd_getfd && result == -c_long::from(libc::EPERM) {
        let found = outermost(|| descriptors::request(a as c_int, b as c_int));
        result = found.map_or(result, c_long::from);
    }
    if (-4095..0).contains(&result) {
        // SAFETY: the place of this thread.
        unsafe { *libc::__errno_location() = -result as c_int };
        return -1;
    }
    result
}
