//! Host memory, or memory of a device.

use std::time::Duration;

use clap::ValueEnum;
use fabricast::gpu::{self, Device, DeviceName, Implementation, Stream};
use fabricast::transfer::{Buffer, HostBuffer};

use crate::Result;

const TIMEOUT: Duration = gpu::DEFAULT_TIMEOUT;

/// Where memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Location {
    /// Host memory that other processes can map
    #[default]
    Host,
    /// A GPU: the ranks of a machine take its GPUs in turn
    Cuda,
    /// An emulated GPU
    Emulated,
}

impl Location {
    /// The first device, if it is one.
    #[must_use]
    pub fn first_device(self) -> Option<DeviceName> {
        let implementation = match self {
            Self::Host => return None,
            Self::Cuda => Implementation::Cuda,
            Self::Emulated => Implementation::Emulated,
        };
        Some(DeviceName { implementation, number: 0 })
    }
}

/// Memory that a rank registers with its agent.
#[derive(Debug)]
pub enum Memory {
    /// Host memory.
    Host(HostBuffer),
    /// Device memory, and a stream to fill and read it.
    Device(gpu::Memory, Box<Stream>),
}

impl Memory {
    /// Allocates memory. `index` is the rank on its machine.
    ///
    /// # Errors
    /// If there is no such device, or not enough memory.
    pub fn new(location: Location, index: u32, bytes: u64) -> Result<Self> {
        let Some(DeviceName { implementation, .. }) = location.first_device() else {
            return Ok(Self::Host(HostBuffer::new(bytes)?));
        };
        let count = Device::count(implementation)?.max(1);
        let device = Device::open(DeviceName { implementation, number: index % count })?;
        let memory = device.allocate_shared(bytes, &[])?;
        let stream = device.stream()?;
        stream.fill(&memory.whole(), 0)?;
        stream.synchronize(TIMEOUT)?;
        Ok(Self::Device(memory, Box::new(stream)))
    }

    /// For `Agent::register`.
    #[must_use]
    pub fn buffer(&self) -> Buffer {
        match self {
            Self::Host(buffer) => buffer.into(),
            Self::Device(memory, _) => memory.into(),
        }
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// Beyond its end; errors of the device.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        match self {
            Self::Host(buffer) => buffer.write(offset, bytes)?,
            Self::Device(memory, stream) => {
                let part = memory.slice(offset, bytes.len() as u64)?;
                stream.upload(&part, bytes, TIMEOUT)?;
            }
        }
        Ok(())
    }

    /// Copies bytes out.
    ///
    /// # Errors
    /// Beyond its end; errors of the device.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        match self {
            Self::Host(buffer) => buffer.read(offset, bytes)?,
            Self::Device(memory, stream) => {
                let part = memory.slice(offset, bytes.len() as u64)?;
                stream.download(&part, bytes, TIMEOUT)?;
            }
        }
        Ok(())
    }
}
