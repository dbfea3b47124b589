//! Memory that a caller names by its address, which may be a device's.
#![allow(unsafe_code)]

use std::ffi::CStr;

use gpu::{Allocator, Device, Implementation, Memory, Slice, Stream};
use pubsub::MemoryPlace;

use crate::boundary::Range;
use crate::failure::{Failure, Result};

/// What lies at an address.
#[derive(Debug)]
pub(crate) enum Found<'a> {
    /// Bytes of the host's.
    Host(&'a [u8]),
    /// Memory of a device.
    Device(Slice),
}

/// Finds out what is at an address, for a topic with its messages in `memory`. Where that is
/// the host's, or the stand-in's, any address is the host's; else the driver says.
pub(crate) fn find<'a>(
    memory: MemoryPlace,
    operation: &'static CStr,
    range: Range<'a>,
) -> Result<Found<'a>> {
    if range.length() == 0 {
        return Ok(Found::Host(&[]));
    }
    let (address, length) = (range.address(), range.length() as u64);
    let name = match memory {
        MemoryPlace::Device(name) if name.implementation == Implementation::Cuda => name,
        _ => return Ok(host(range)),
    };
    let attributes = Device::open(name)?.attributes(address)?;
    let device = match (attributes.allocator, attributes.device) {
        (Allocator::Host, _) => return Ok(host(range)),
        (_, Some(device)) => Device::open(device)?,
        (_, None) => Device::open(name)?,
    };
    // Memory that was mapped consists of pieces, of which the driver names the first.
    let end = attributes.base.saturating_add(attributes.length);
    let is_mapped = matches!(attributes.allocator, Allocator::Mapped { .. });
    if !is_mapped && attributes.length > 0 && address.saturating_add(length) > end {
        let start = address.saturating_sub(attributes.base);
        let detail = format!(
            "{length} bytes from {start} on, in an allocation of {} bytes",
            attributes.length
        );
        return Err(Failure::invalid(operation, detail));
    }
    // SAFETY: it is there during the call, as the caller promised, and it is read no longer.
    let memory = unsafe { Memory::foreign(&device, address, length, ()) };
    Ok(Found::Device(memory.whole()))
}

/// As memory that streams of a topic's device copy from, also after the call.
pub(crate) fn slice(
    memory: MemoryPlace,
    operation: &'static CStr,
    range: Range<'_>,
) -> Result<Slice> {
    if let Found::Device(slice) = find(memory, operation, range)? {
        return Ok(slice);
    }
    let MemoryPlace::Device(name) = memory else {
        return Err(Failure::invalid(operation, "the topic's messages lie on the host"));
    };
    let device = Device::open(name)?;
    // SAFETY: of the host, registered with the driver or a stand-in's; it is there until the
    // stream has come past the copy, as the caller promised.
    let memory = unsafe { Memory::foreign(&device, range.address(), range.length() as u64, ()) };
    Ok(memory.whole())
}

/// A stream of a topic's device that something else made.
pub(crate) fn adopt(memory: MemoryPlace, operation: &'static CStr, stream: u64) -> Result<Stream> {
    let MemoryPlace::Device(name) = memory else {
        let detail = "the topic's messages lie on the host, where no stream has to do with them";
        return Err(Failure::invalid(operation, detail));
    };
    let device = Device::open(name)?;
    // SAFETY: a stream of that device until its handle is closed, as the caller promised.
    Ok(unsafe { device.adopt_stream(stream) }?)
}

fn host(range: Range<'_>) -> Found<'_> {
    let start = std::ptr::with_exposed_provenance::<u8>(range.address() as usize);
    // SAFETY: not NULL, as its length is not 0, and so many bytes are there, as the range says.
    Found::Host(unsafe { std::slice::from_raw_parts(start, range.length()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_address_is_the_hosts_where_there_is_no_gpu() {
        let bytes = *b"from the host";
        // SAFETY: these bytes.
        let range =
            unsafe { Range::from_c(c"test", "pointer", bytes.as_ptr().cast(), bytes.len()) };
        for place in ["host", "stand-in:0"] {
            let found = find(place.parse().unwrap(), c"test", range.clone().unwrap()).unwrap();
            let Found::Host(found) = found else { panic!("{found:?}") };
            assert_eq!(found, bytes);
        }
    }

    #[test]
    fn nothing_is_nowhere() {
        // SAFETY: no bytes.
        let range = unsafe { Range::from_c(c"test", "pointer", std::ptr::null(), 0) };
        let found = find(MemoryPlace::Host, c"test", range.unwrap()).unwrap();
        assert!(matches!(found, Found::Host([])));
    }
}
