//! Private memory of one process, the source or destination of messages of the baseline.

use gpu::{Device, Memory, Stream};
use pubsub::{MemoryLocation, Sample};

use super::schedule::TIMEOUT;
use command::exit::Failure;

/// Bytes copied at a time between a message and a device: they stay in the cache meanwhile.
const CHUNK: usize = 1 << 20;

/// Memory for a message.
pub(super) enum PrivateMemory {
    Host(Vec<u8>),
    Device(Box<OnDevice>),
}

/// Memory of a device, with a stream to copy to it.
pub(super) struct OnDevice {
    stream: Stream,
    memory: Memory,
    chunk: Vec<u8>,
}

impl PrivateMemory {
    pub(super) fn new(memory: &str, size: u64) -> Result<Self, Failure> {
        match memory.parse::<MemoryLocation>()?.device()? {
            None => Ok(Self::Host(vec![1; size as usize])),
            Some(name) => {
                let device = Device::open(name)?;
                let memory = device.allocate(size)?;
                let stream = device.stream()?;
                let chunk = vec![1; CHUNK];
                Ok(Self::Device(Box::new(OnDevice { stream, memory, chunk })))
            }
        }
    }

    /// Copies a message to this memory.
    pub(super) fn copy(&mut self, sample: &Sample) -> Result<(), Failure> {
        let OnDevice { stream, memory, chunk } = match self {
            Self::Host(bytes) => return Ok(sample.read(0, bytes)?),
            Self::Device(device) => &mut **device,
        };
        let mut offset = 0;
        while offset < sample.length() {
            let length = (sample.length() - offset).min(CHUNK as u64);
            let part = &mut chunk[..length as usize];
            sample.read(offset, part)?;
            let to = memory.slice(offset, length)?;
            stream.upload(&to, part, TIMEOUT)?;
            offset += length;
        }
        Ok(())
    }

    /// Writes bytes to this memory.
    pub(super) fn put(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Failure> {
        match self {
            Self::Host(all) => {
                all[offset as usize..][..bytes.len()].copy_from_slice(bytes);
                Ok(())
            }
            Self::Device(device) => {
                let to = device.memory.slice(offset, bytes.len() as u64)?;
                Ok(device.stream.upload(&to, bytes, TIMEOUT)?)
            }
        }
    }

    /// Copies everything to pageable memory.
    pub(super) fn take(&self, to: &mut [u8]) -> Result<(), Failure> {
        match self {
            Self::Host(all) => {
                to.copy_from_slice(all);
                Ok(())
            }
            Self::Device(device) => {
                let from = device.memory.whole();
                Ok(device.stream.download(&from, to, TIMEOUT)?)
            }
        }
    }
}
