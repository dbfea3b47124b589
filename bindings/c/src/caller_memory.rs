//! Memory named by a caller's pointer, which may be device memory.
#![allow(unsafe_code)]

use std::fmt;
use std::time::Duration;

use collective::{CollectiveCall, CommDomain};
use gpu::{
    Allocator, Device, Implementation, Memory, PointerAttributes, Range, Slice, Stream, View,
};
use pubsub::MemoryLocation;
use transfer::{Buffer, HostBuffer};

use crate::failure::{Failure, Operation, Result};
use crate::ffi::{CallerBuffer, CallerRange};

/// Memory of a caller.
#[derive(Debug)]
pub(crate) enum CallerMemory<'a> {
    Host(&'a [u8]),
    Device(Slice),
}

/// Kind of a caller's pointer.
enum PointerKind {
    /// Unknown to all drivers: host memory, or not mapped.
    Unregistered,
    /// Host memory registered with or allocated by a driver.
    Registered,
    Device(Device),
}

/// Asks the drivers that this process has loaded; CUDA is not loaded for that.
fn place(operation: Operation, range: &CallerRange<'_>) -> Result<PointerKind> {
    let (address, length) = (range.address(), range.length() as u64);
    let Some(found) = PointerAttributes::of(address) else { return Ok(PointerKind::Unregistered) };
    // Mapped memory consists of pieces; the driver reports the first.
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

/// Finds the kind of memory at an address, for a topic with messages in `memory`.
pub(crate) fn find<'a>(
    memory: MemoryLocation,
    operation: Operation,
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

/// Describes memory as device memory, from which streams of the topic's device copy, also after the
/// call.
pub(crate) fn slice(
    memory: MemoryLocation,
    operation: Operation,
    range: CallerRange<'_>,
) -> Result<Slice> {
    let Some(name) = memory.device()? else {
        return Err(Failure::invalid(operation, "the topic's messages are in host memory"));
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

/// Adopts memory for an agent, of a device or of the host, until nothing uses it and `owner` is
/// dropped.
pub(crate) fn adopt_memory(
    operation: Operation,
    range: CallerRange<'_>,
    owner: impl fmt::Debug + Send + Sync + 'static,
) -> Result<Buffer> {
    if range.length() == 0 {
        return Err(Failure::invalid(operation, "memory of 0 bytes"));
    }
    if let PointerKind::Device(device) = place(operation, &range)? {
        // SAFETY: valid until the owner is dropped, as the caller guarantees.
        let adopted = unsafe { device.adopt(range.address(), range.length() as u64, owner) };
        return Ok(Buffer::Device(adopted?));
    }
    if !is_readable(&range) {
        let detail = format!("{:#x} is not mapped in this process", range.address());
        return Err(Failure::invalid(operation, detail));
    }
    let start = std::ptr::with_exposed_provenance_mut::<u8>(range.address() as usize);
    // SAFETY: as above, and the caller writes there only what transfers do not use.
    let adopted = unsafe { HostBuffer::adopt(start, range.length(), owner) };
    Ok(Buffer::Host(adopted?))
}

/// Groups ranges of memory of one device by their allocations: the device, and its ranges to adopt,
/// and where each range is in these.
pub(crate) fn group_views(
    operation: Operation,
    ranges: &[Range],
) -> Result<(Device, Vec<Range>, Vec<View>)> {
    let refused = |detail: &str| Err(Failure::invalid(operation, detail));
    let Some(first) = ranges.first() else { return refused("no ranges") };
    let Some(name) = PointerAttributes::of(first.address).and_then(|found| found.device) else {
        return refused("the first range is not on a device. Adopt memory of the host by itself");
    };
    let device = Device::open(name)?;
    let (groups, views) = device.group_views(ranges)?;
    let is_elsewhere =
        |group: &Range| PointerAttributes::of(group.address).and_then(|it| it.device) != Some(name);
    if groups.iter().any(is_elsewhere) {
        return refused(&format!("not all ranges are on {name}"));
    }
    Ok((device, groups, views))
}

/// Adopts a range of a device's memory until `owner` is dropped.
pub(crate) fn adopt_range(
    device: &Device,
    range: Range,
    owner: impl fmt::Debug + Send + Sync + 'static,
) -> Result<Buffer> {
    // SAFETY: valid until the owner is dropped, as the caller guarantees.
    Ok(Buffer::Device(unsafe { device.adopt(range.address, range.length, owner) }?))
}

fn is_cuda(memory: MemoryLocation) -> bool {
    matches!(memory, MemoryLocation::Device(name) if name.implementation == Implementation::Cuda)
}

/// A caller's memory as a slice of a device.
fn foreign(device: &Device, range: &CallerRange<'_>) -> Slice {
    // SAFETY: valid during the call, or until a stream has completed its copy, as the caller
    // guarantees; it is not read later.
    let memory = unsafe { Memory::foreign(device, range.address(), range.length() as u64, ()) };
    memory.whole()
}

/// Can its first and last byte be read? Detects device pointers that the driver does not know. True
/// where the system does not support the check.
fn is_readable(range: &CallerRange<'_>) -> bool {
    let last = range.address() + (range.length() as u64 - 1);
    [range.address(), last].into_iter().all(|address| {
        let mut byte = 0_u8;
        let into = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
        let from = libc::iovec { iov_base: address as *mut _, iov_len: 1 };
        // SAFETY: the system copies one byte to valid memory, or returns an error.
        let read = unsafe {
            libc::process_vm_readv(libc::getpid(), &raw const into, 1, &raw const from, 1, 0)
        };
        read == 1 || std::io::Error::last_os_error().raw_os_error() != Some(libc::EFAULT)
    })
}

/// Adopts a foreign stream of the device that has this memory.
pub(crate) fn adopt(memory: MemoryLocation, operation: Operation, stream: u64) -> Result<Stream> {
    let Some(name) = memory.device()? else {
        let detail = "host memory has no streams. Use a device, such as cuda:0";
        return Err(Failure::invalid(operation, detail));
    };
    let device = Device::open(name)?;
    // SAFETY: a stream of that device until its handle is closed, as the caller guarantees.
    Ok(unsafe { device.adopt_stream(stream) }?)
}

fn host(range: CallerRange<'_>) -> CallerMemory<'_> {
    let start = std::ptr::with_exposed_provenance::<u8>(range.address() as usize);
    // SAFETY: not NULL, as its length is not 0, and valid for its length, as the range guarantees.
    CallerMemory::Host(unsafe { std::slice::from_raw_parts(start, range.length()) })
}

/// Fails for memory that only a device accesses, by the drivers that this process has loaded.
fn check_host(operation: Operation, buffer: CallerBuffer<'_>) -> Result<()> {
    if buffer.is_null() {
        return Ok(());
    }
    let found = PointerAttributes::of(buffer.start().expose_provenance() as u64);
    let Some(PointerAttributes { device: Some(device), allocator, .. }) = found else {
        return Ok(());
    };
    let is_of_device = !matches!(allocator, Allocator::Host | Allocator::Managed);
    if is_of_device && device.implementation == Implementation::Cuda {
        let detail = format!(
            "the memory is of {device}: collective operations of a domain are in host memory. Copy it \
             to the host"
        );
        return Err(Failure::invalid(operation, detail));
    }
    Ok(())
}

/// Carries out a collective operation between buffers of the caller in host memory. The call has no
/// addresses yet.
pub(crate) fn run_collective(
    operation: Operation,
    domain: &mut CommDomain,
    call: CollectiveCall<'_>,
    input: CallerBuffer<'_>,
    output: CallerBuffer<'_>,
    timeout: Duration,
) -> Result<()> {
    check_host(operation, input)?;
    check_host(operation, output)?;
    let call = CollectiveCall { input: input.start(), output: output.start(), ..call };
    // SAFETY: the caller's buffers have the blocks that it states, apart from each other or in place, and
    // no other thread uses them meanwhile, as the header demands.
    Ok(unsafe { domain.run(&call, timeout) }?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ffi::Argument as _;

    fn range(bytes: *const u8, length: usize) -> CallerRange<'static> {
        // SAFETY: used only while the bytes are valid.
        unsafe { CallerRange::from_c((c"test", "pointer"), bytes.cast(), length) }.unwrap()
    }

    #[test]
    fn plain_memory_is_host_memory_for_any_topic() {
        let bytes = *b"from the host";
        for memory in ["host", "emulated:0", "cuda:0"] {
            let range = range(bytes.as_ptr(), bytes.len());
            let found = find(memory.parse().unwrap(), c"test", range).unwrap();
            let CallerMemory::Host(found) = found else { panic!("{found:?}") };
            assert_eq!(found, bytes);
        }
    }

    #[test]
    fn device_memory_is_detected_for_any_topic() {
        for number in 0..2 {
            let device = Device::open(gpu::DeviceName::emulated(number)).unwrap();
            let memory = device.allocate(1 << 20).unwrap();
            let start = std::ptr::with_exposed_provenance::<u8>(memory.address() as usize);
            let length = memory.length() as usize;
            for memory in ["host", "emulated:0", "cuda:0"] {
                let memory = memory.parse().unwrap();
                let part = range(start.wrapping_add(100), 1000);
                let found = find(memory, c"test", part).unwrap();
                let CallerMemory::Device(slice) = found else { panic!("{found:?}") };
                assert_eq!(slice.length(), 1000);
                let beyond = range(start.wrapping_add(100), length);
                let refused = find(memory, c"test", beyond).unwrap_err();
                assert_eq!(refused.status, crate::status::Status::InvalidArgument);
            }
        }
    }

    #[test]
    fn unknown_addresses_are_errors_for_device_topics() {
        let unmapped = range(std::ptr::without_provenance(4096), 8);
        let refused = find("cuda:0".parse().unwrap(), c"test", unmapped).unwrap_err();
        assert_eq!(refused.status, crate::status::Status::InvalidArgument);
        let bytes = [0_u8; 8];
        let plain = range(bytes.as_ptr(), bytes.len());
        let refused = slice("cuda:0".parse().unwrap(), c"test", plain).unwrap_err();
        assert_eq!(refused.status, crate::status::Status::InvalidArgument);
    }

    #[test]
    fn kind_of_adopted_memory_is_detected() {
        let bytes = [7_u8; 100];
        let adopted = adopt_memory(c"test", range(bytes.as_ptr(), 100), ()).unwrap();
        assert!(matches!(adopted, Buffer::Host(found) if found.length() == 100));
        let device = Device::open(gpu::DeviceName::emulated(0)).unwrap();
        let memory = device.allocate_shared(1 << 20, &[]).unwrap();
        let start = std::ptr::with_exposed_provenance::<u8>(memory.address() as usize);
        let part = range(start.wrapping_add(100), 1000);
        let adopted = adopt_memory(c"test", part, ()).unwrap();
        assert!(matches!(adopted, Buffer::Device(found) if found.length() == 1000));
        for invalid in [range(bytes.as_ptr(), 0), range(std::ptr::without_provenance(4096), 8)] {
            let refused = adopt_memory(c"test", invalid, ()).unwrap_err();
            assert_eq!(refused.status, crate::status::Status::InvalidArgument);
        }
    }

    #[test]
    fn empty_range_is_host_memory() {
        // SAFETY: no bytes are read.
        let range = unsafe { CallerRange::from_c((c"test", "pointer"), std::ptr::null(), 0) };
        let found = find(MemoryLocation::Host, c"test", range.unwrap()).unwrap();
        assert!(matches!(found, CallerMemory::Host([])));
    }
}
