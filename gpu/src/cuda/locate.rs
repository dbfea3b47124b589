//! Finds the device of an address, in a process that may not use CUDA at all.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys;
use sys::CUpointer_attribute_enum as Attribute;

use super::library::{self, Address, Code, Functions};

/// Where the memory at an address is located, as far as CUDA knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PointerLocation {
    /// In host memory that was allocated by or registered with the driver.
    Host { base: u64, length: u64 },
    /// On the device with this number.
    Device(u32),
}

/// None if CUDA is not in this process, cannot be used, or does not know the address.
pub(crate) fn locate(address: u64) -> Option<PointerLocation> {
    if !is_loaded() {
        return None;
    }
    let functions = library::driver().ok()?;
    if let Some(found) = ask(functions, address) {
        return Some(found);
    }
    // The driver may require a current context. An existing one is used, since creating one
    // takes long; each knows the memory of all devices.
    let number = (0..library::device_count().ok()?)
        .find(|number| has_primary_context(functions, *number))?;
    let mut device = 0;
    let mut context = ptr::null_mut();
    // SAFETY: valid pointers for the results; a retained context is released, a pushed one
    // popped.
    unsafe {
        if (functions.device_get)(&raw mut device, number as c_int) != 0
            || (functions.context_retain)(&raw mut context, device) != 0
        {
            return None;
        }
        let asked = if (functions.context_push)(context) == 0 {
            let asked = ask(functions, address);
            let mut popped = ptr::null_mut();
            (functions.context_pop)(&raw mut popped);
            asked
        } else {
            None
        };
        (functions.context_release)(device);
        asked
    }
}

/// Queries with the current context. It does not disturb a graph capture, because it starts no
/// operation.
fn ask(functions: &Functions, address: Address) -> Option<PointerLocation> {
    const HOST: u32 = 1;
    let wanted = [
        Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED,
        Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
        Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
    ];
    let (code, [kind, managed, ordinal, base, length]) =
        pointer_attributes(functions, wanted, address);
    match kind as u32 {
        _ if code != 0 => None,
        0 => None,
        HOST if managed & 0xff == 0 => Some(PointerLocation::Host { base, length }),
        _ => Some(PointerLocation::Device(ordinal as u32)),
    }
}

/// Attributes of an address, 0 where the driver writes none.
pub(super) fn pointer_attributes<const N: usize>(
    functions: &Functions,
    wanted: [Attribute; N],
    address: Address,
) -> (Code, [u64; N]) {
    let mut found = [0; N];
    let numbers = wanted.map(|attribute| attribute as u32);
    let places = found.each_mut().map(|place| ptr::from_mut::<u64>(place).cast::<c_void>());
    // SAFETY: as many attributes as the count says, and eight bytes for each, the size of the
    // largest.
    let code = unsafe {
        (functions.pointer_attributes)(N as u32, numbers.as_ptr(), places.as_ptr(), address)
    };
    (code, found)
}

/// Does the primary context of a device exist already, created by any library?
pub(crate) fn has_context(number: u32) -> bool {
    library::driver().is_ok_and(|functions| has_primary_context(functions, number))
}

fn has_primary_context(functions: &Functions, number: u32) -> bool {
    let (mut device, mut flags, mut is_active) = (0, 0, 0);
    // SAFETY: valid pointers for the results.
    unsafe {
        (functions.device_get)(&raw mut device, number as c_int) == 0
            && (functions.context_state)(device, &raw mut flags, &raw mut is_active) == 0
            && is_active != 0
    }
}

/// Has any library in this process loaded the driver? Called for each message, so it only looks
/// again after a library was loaded.
fn is_loaded() -> bool {
    const LOADED: u64 = u64::MAX;
    /// The number of loaded libraries when the driver was not among them, plus 1.
    static MISSED_AT: AtomicU64 = AtomicU64::new(0);
    let missed_at = MISSED_AT.load(Ordering::Relaxed);
    if missed_at == LOADED {
        return true;
    }
    let loads = loads();
    if missed_at == loads + 1 {
        return false;
    }
    // SAFETY: a terminated name; the call does not load a library.
    let found =
        unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    let is_loaded = !found.is_null();
    // The reference is kept: the driver stays loaded, as for every user of it.
    MISSED_AT.store(if is_loaded { LOADED } else { loads + 1 }, Ordering::Relaxed);
    is_loaded
}

/// The number of libraries that this process has loaded so far.
fn loads() -> u64 {
    unsafe extern "C" fn first(
        info: *mut libc::dl_phdr_info,
        _: libc::size_t,
        loads: *mut c_void,
    ) -> c_int {
        // SAFETY: the system passes a valid structure, and `data` is the number below.
        unsafe { *loads.cast::<u64>() = (*info).dlpi_adds };
        1
    }
    let mut loads = 0_u64;
    // SAFETY: the number lives longer than the call.
    unsafe { libc::dl_iterate_phdr(Some(first), (&raw mut loads).cast()) };
    loads
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locating_does_not_load_the_driver() {
        let local = 0_u8;
        if is_loaded() {
            return;
        }
        assert_eq!(locate(&raw const local as u64), None);
        assert!(!is_loaded());
        assert_eq!(loads(), loads());
    }
}
