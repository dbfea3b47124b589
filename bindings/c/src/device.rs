//! Memory that a caller names by its address, which may be a device's.
#![allow(unsafe_code)]

use std::ffi::CStr;

use gpu::{Allocator, Device, Implementation, Memory, PointerAttributes, Slice, Stream};
use pubsub::MemoryLocation;

use crate::failure::{Failure, Result};
use crate::ffi::CallerRange;

/// What lies at an address.
#[derive(Debug)]
pub(crate) enum CallerMemory<'a> {
    /// Bytes of the host's.
    Host(&'a [u8]),
    /// Memory of a device.
    Device(Slice),
}

/// Where a caller's memory lies.
enum PointerKind {
    /// Unknown to all drivers: on the host, or not mapped.
    Unregistered,
    /// On the host, registered with or allocated by a driver.
    Registered,
    Device(Device),
}

/// Asks the drivers that are in this process; CUDA is not loaded for that.
fn place(operation: &'static CStr, range: &CallerRange<'_>) -> Result<PointerKind> {
    let (address, length) = (range.address(), range.length() as u64);
    let Some(found) = PointerAttributes::of(address) else { return Ok(PointerKind::Unregistered) };
    // Memory that was mapped consists of pieces, of which the driver names the first.
    let end = found.base.saturating_add(found.length);
    let is_mapped = matches!(found.allocator, Allocator::Mapped { .. });
    if !is_mapped && found.length > 0 && address.saturating_add(length) > end {
        let start = address.saturating_sub(found.base);
        let detail =
            format!("{length} bytes from {start} on, in an allocation of {} bytes", found.length);
        return Err(Failure::invalid(operation, detail));
    }
    match (found.allocator, found.device) {
        (Allocator::Host, _) | (_, None) => Ok(PointerKind::Registered),
        (_, Some(device)) => Ok(PointerKind::Device(Device::open(device)?)),
    }
}

/// Finds out what is at an address, for a topic with its messages in `memory`.
pub(crate) fn find<'a>(
    memory: MemoryLocation,
    operation: &'static CStr,
    range: CallerRange<'a>,
) -> Result<CallerMemory<'a>> {
    if range.length() == 0 {
        return Ok(CallerMemory::Host(&[]));
    }
    match place(operation, &range)? {
        PointerKind::Device(device) => Ok(CallerMemory::Device(foreign(&device, &range))),
        PointerKind::Registered => Ok(host(range)),
        PointerKind::Unregistered => {
            if is_cuda(memory) && !is_readable(&range) {
                let detail = format!(
                    "{:#x} is mapped neither by the CUDA driver nor in this process",
                    range.address()
                );
                return Err(Failure::invalid(operation, detail));
            }
            Ok(host(range))
        }
    }
}

/// As memory that streams of a topic's device copy from, also after the call.
pub(crate) fn slice(
    memory: MemoryLocation,
    operation: &'static CStr,
    range: CallerRange<'_>,
) -> Result<Slice> {
    let MemoryLocation::Device(name) = memory else {
        return Err(Failure::invalid(operation, "the topic's messages lie on the host"));
    };
    let on_device = match place(operation, &range)? {
        PointerKind::Device(device) => device,
        PointerKind::Unregistered if is_cuda(memory) && range.length() > 0 => {
            let detail = "memory of the host that no driver knows: register it (cuMemHostRegister), \
                          or push it without a stream";
            return Err(Failure::invalid(operation, detail));
        }
        PointerKind::Registered | PointerKind::Unregistered => Device::open(name)?,
    };
    Ok(foreign(&on_device, &range))
}

fn is_cuda(memory: MemoryLocation) -> bool {
    matches!(memory, MemoryLocation::Device(name) if name.implementation == Implementation::Cuda)
}

/// A caller's memory as a device knows it.
fn foreign(device: &Device, range: &CallerRange<'_>) -> Slice {
    // SAFETY: it is there during the call, or until a stream has come past its copy, as the caller
    // promised, and it is read no longer.
    let memory = unsafe { Memory::foreign(device, range.address(), range.length() as u64, ()) };
    memory.whole()
}

/// Can its first and last byte be read? A caller's pointer into a device's address space, of which
/// the driver knows nothing, is found out so. True where the system does not let itself be asked.
fn is_readable(range: &CallerRange<'_>) -> bool {
    let last = range.address() + (range.length() as u64 - 1);
    [range.address(), last].into_iter().all(|address| {
        let mut byte = 0_u8;
        let into = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
        let from = libc::iovec { iov_base: address as *mut _, iov_len: 1 };
        // SAFETY: the system copies one byte to where there is room for it, or says that it cannot.
        let read = unsafe {
            libc::process_vm_readv(libc::getpid(), &raw const into, 1, &raw const from, 1, 0)
        };
        read == 1 || std::io::Error::last_os_error().raw_os_error() != Some(libc::EFAULT)
    })
}

/// A stream of a topic's device that something else made.
pub(crate) fn adopt(
    memory: MemoryLocation,
    operation: &'static CStr,
    stream: u64,
) -> Result<Stream> {
    let MemoryLocation::Device(name) = memory else {
        let detail = "the topic's messages lie on the host, where no stream has to do with them";
        return Err(Failure::invalid(operation, detail));
    };
    let device = Device::open(name)?;
    // SAFETY: a stream of that device until its handle is closed, as the caller promised.
    Ok(unsafe { device.adopt_stream(stream) }?)
}

fn host(range: CallerRange<'_>) -> CallerMemory<'_> {
    let start = std::ptr::with_exposed_provenance::<u8>(range.address() as usize);
    // SAFETY: not NULL, as its length is not 0, and so many bytes are there, as the range says.
    CallerMemory::Host(unsafe { std::slice::from_raw_parts(start, range.length()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(bytes: *const u8, length: usize) -> CallerRange<'static> {
        // SAFETY: used as long as the bytes are there.
        unsafe { CallerRange::from_c(c"test", "pointer", bytes.cast(), length) }.unwrap()
    }

    #[test]
    fn plain_memory_is_the_hosts_wherever_the_topic_lies() {
        let bytes = *b"from the host";
        for place in ["host", "emulated:0", "cuda:0"] {
            let range = range(bytes.as_ptr(), bytes.len());
            let found = find(place.parse().unwrap(), c"test", range).unwrap();
            let CallerMemory::Host(found) = found else { panic!("{found:?}") };
            assert_eq!(found, bytes);
        }
    }

    #[test]
    fn memory_of_a_device_is_found_whatever_the_topic_says() {
        for number in 0..2 {
            let device = Device::open(gpu::DeviceName::emulated(number)).unwrap();
            let memory = device.allocate(1 << 20).unwrap();
            let start = std::ptr::with_exposed_provenance::<u8>(memory.address() as usize);
            let length = memory.length() as usize;
            for place in ["host", "emulated:0", "cuda:0"] {
                let place = place.parse().unwrap();
                let part = range(start.wrapping_add(100), 1000);
                let found = find(place, c"test", part).unwrap();
                let CallerMemory::Device(slice) = found else { panic!("{found:?}") };
                assert_eq!(slice.length(), 1000);
                let beyond = range(start.wrapping_add(100), length);
                let refused = find(place, c"test", beyond).unwrap_err();
                assert_eq!(refused.status, crate::status::Status::InvalidArgument);
            }
        }
    }

    #[test]
    fn unknown_addresses_are_refused_where_a_device_would_read_them() {
        let unmapped = range(std::ptr::without_provenance(4096), 8);
        let refused = find("cuda:0".parse().unwrap(), c"test", unmapped).unwrap_err();
        assert_eq!(refused.status, crate::status::Status::InvalidArgument);
        let bytes = [0_u8; 8];
        let plain = range(bytes.as_ptr(), bytes.len());
        let refused = slice("cuda:0".parse().unwrap(), c"test", plain).unwrap_err();
        assert_eq!(refused.status, crate::status::Status::InvalidArgument);
    }

    #[test]
    fn nothing_is_nowhere() {
        // SAFETY: no bytes.
        let range = unsafe { CallerRange::from_c(c"test", "pointer", std::ptr::null(), 0) };
        let found = find(MemoryLocation::Host, c"test", range.unwrap()).unwrap();
        assert!(matches!(found, CallerMemory::Host([])));
    }
}
