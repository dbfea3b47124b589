//! Tensors of a model, in memory of the host or of a device.

use std::time::Duration;

use fabricast::gpu::{self, Device, DeviceName, Stream};
use fabricast::pubsub::{Publisher, Subscriber};
use mpi_examples::Result;

/// A tensor of the model.
pub(crate) enum Tensor {
    Host(Vec<u8>),
    Device(gpu::Memory, Box<Stream>),
}

/// What is known of a tensor's version before its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) version: u64,
    /// Index of the tensor.
    pub(crate) tensor: u64,
    pub(crate) checksum: u64,
}

impl Header {
    pub(crate) const BYTES: usize = 24;

    pub(crate) fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let words = [self.version, self.tensor, self.checksum];
        for (part, word) in bytes.as_chunks_mut().0.iter_mut().zip(words) {
            *part = word.to_le_bytes();
        }
        bytes
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Self> {
        match bytes.as_chunks().0 {
            [version, tensor, checksum] => {
                let [version, tensor, checksum] =
                    [version, tensor, checksum].map(|word| u64::from_le_bytes(*word));
                Ok(Self { version, tensor, checksum })
            }
            _ => Err(format!("read header failed: {} bytes", bytes.len()).into()),
        }
    }
}

impl Tensor {
    pub(crate) fn new(device: Option<DeviceName>, bytes: u64) -> Result<Self> {
        let Some(name) = device else { return Ok(Self::Host(vec![0; bytes as usize])) };
        let device = Device::open(name)?;
        Ok(Self::Device(device.allocate(bytes)?, Box::new(device.stream()?)))
    }

    pub(crate) fn length(&self) -> u64 {
        match self {
            Self::Host(bytes) => bytes.len() as u64,
            Self::Device(memory, _) => memory.length(),
        }
    }

    pub(crate) fn bytes(&self, timeout: Duration) -> Result<Vec<u8>> {
        match self {
            Self::Host(bytes) => Ok(bytes.clone()),
            Self::Device(memory, stream) => {
                let mut bytes = vec![0; memory.length() as usize];
                stream.download(&memory.whole(), &mut bytes, timeout)?;
                Ok(bytes)
            }
        }
    }

    pub(crate) fn set(&mut self, new: Vec<u8>, timeout: Duration) -> Result<()> {
        match self {
            Self::Host(bytes) => *bytes = new,
            Self::Device(memory, stream) => stream.upload(&memory.whole(), &new, timeout)?,
        }
        Ok(())
    }

    pub(crate) fn checksum(&self, timeout: Duration) -> Result<u64> {
        match self {
            Self::Host(bytes) => Ok(gpu::checksum(bytes)),
            Self::Device(memory, stream) => Ok(stream.checksum(&memory.whole(), timeout)?),
        }
    }

    /// Publishes it: of a device by a copy there, which need not be complete yet.
    pub(crate) fn publish(
        &self,
        publisher: &Publisher,
        header: Header,
        timeout: Duration,
    ) -> Result<()> {
        let mut loan = publisher.loan(self.length(), timeout)?;
        loan.set_metadata(&header.to_bytes())?;
        match self {
            Self::Host(bytes) => {
                loan.write(0, bytes)?;
                loan.publish(timeout)?;
            }
            Self::Device(memory, stream) => {
                stream.copy(loan.slice(), &memory.whole())?;
                loan.publish_on(stream, timeout)?;
            }
        }
        Ok(())
    }

    /// Takes its next version from the topic.
    pub(crate) fn pull(
        &mut self,
        subscriber: &mut Subscriber,
        timeout: Duration,
    ) -> Result<Header> {
        match self {
            Self::Host(bytes) => {
                let sample = subscriber.pull(timeout)?;
                sample.read(0, bytes)?;
                Header::from_bytes(&sample.metadata())
            }
            Self::Device(memory, stream) => {
                let sample = subscriber.pull_on(stream, timeout)?;
                let header = Header::from_bytes(&sample.metadata())?;
                stream.copy(&memory.whole(), sample.slice())?;
                sample.release_on(stream)?;
                Ok(header)
            }
        }
    }

    /// Waits for copies of its device.
    pub(crate) fn synchronize(&self, timeout: Duration) -> Result<()> {
        match self {
            Self::Host(_) => Ok(()),
            Self::Device(_, stream) => Ok(stream.synchronize(timeout)?),
        }
    }
}
