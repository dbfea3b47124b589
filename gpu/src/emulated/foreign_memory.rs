//! Foreign memory: memory as another library of the same process would allocate it.
#![allow(unsafe_code)]

use super::memory_files::{self, AddressRange, Physical};
use super::{COUNT, GRANULARITY, state};
use crate::device_name::DeviceName;
use crate::driver::AddressRangeDriver;
use crate::error::{Error, ErrorKind, Result};
use crate::pointer_attributes::Allocator;

/// Foreign memory, to be [adopted](crate::Device::adopt) like that of a framework. It is freed
/// when this is dropped.
///
/// ```
/// use gpu::emulated::ForeignMemory;
/// use gpu::{Allocator, Device};
/// let pieces = [20 << 20, 20 << 20];
/// let segment = ForeignMemory::new(0, &pieces, Allocator::Mapped { exportable: true })?;
/// let (address, length) = (segment.address() + (1 << 20), 30 << 20);
/// let device = Device::open("emulated:0".parse()?)?;
/// // SAFETY: inside of the segment, which the tensor keeps alive.
/// let tensor = unsafe { device.adopt(address, length, segment)? };
/// let exported = tensor.pieces()?;
/// assert_eq!((exported.lengths.len(), exported.offset), (2, 1 << 20));
/// # Ok::<(), gpu::Error>(())
/// ```
#[derive(Debug)]
pub struct ForeignMemory {
    number: u32,
    address: u64,
    length: u64,
    /// The pieces, if it is mapped.
    mapped: Option<(AddressRange, Vec<u64>)>,
}

impl ForeignMemory {
    /// Allocates on the emulated device with this number. Mapped memory has pieces of these
    /// lengths, which are whole [granules](crate::Properties::granularity); other memory is one
    /// allocation of the total length.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for other lengths, or if there is no
    /// such emulated device; [`OutOfMemory`](ErrorKind::OutOfMemory).
    pub fn new(number: u32, pieces: &[u64], allocator: Allocator) -> Result<Self> {
        let operation = "allocate foreign memory";
        let are_whole = pieces.iter().all(|length| *length > 0 && length % GRANULARITY == 0);
        let sum = pieces.iter().try_fold(0_u64, |sum, length| sum.checked_add(*length));
        let length =
            sum.filter(|sum| *sum > 0 && are_whole && number < COUNT).ok_or_else(|| {
                let detail = format!("pieces of {pieces:?} bytes on emulated:{number}");
                Error::new(operation, ErrorKind::InvalidArgument, detail)
            })?;
        let made = match allocator {
            Allocator::Mapped { exportable } => Self::map(number, pieces, length, exportable),
            _ => Self::allocate(number, length, allocator),
        };
        made.map_err(|error| error.on(DeviceName::emulated(number)))
    }

    fn allocate(number: u32, length: u64, allocator: Allocator) -> Result<Self> {
        state(number).take("allocate memory", length)?;
        let device = (allocator != Allocator::Host).then_some(number);
        let address = memory_files::allocate(device, allocator, length)
            .inspect_err(|_| state(number).give_back(length))?;
        Ok(Self { number, address, length, mapped: None })
    }

    fn map(number: u32, pieces: &[u64], length: u64, is_exportable: bool) -> Result<Self> {
        let address_range = AddressRange::reserve(length)?;
        let address = address_range.address();
        let mapped = Some((address_range, Vec::new()));
        let mut made = Self { number, address, length, mapped };
        let mut offset = 0;
        for length in pieces {
            let state = state(number);
            state.take("allocate memory", *length)?;
            let physical = Physical::create(number, *length, is_exportable)
                .inspect_err(|_| state.give_back(*length))?;
            if let Some((address_range, lengths)) = &mut made.mapped {
                address_range.map(offset, &physical, &[])?;
                lengths.push(*length);
            }
            offset += length;
        }
        Ok(made)
    }

    /// First byte.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Length in bytes.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.length
    }
}

impl Drop for ForeignMemory {
    fn drop(&mut self) {
        let Some((address_range, lengths)) = &self.mapped else {
            if memory_files::free(self.address).is_ok() {
                state(self.number).give_back(self.length);
            }
            return;
        };
        let mut offset = 0;
        for length in lengths {
            // SAFETY: mapped here; the caller that adopted it promised that this outlives it.
            let _ = unsafe { address_range.unmap(offset, *length) };
            offset += length;
        }
    }
}
