//! Samples: received messages.

use std::fmt;

use gpu::Slice;

use super::Sample;
use crate::error::{Error, ErrorKind, Result};
use crate::error_mapping::During;
use crate::ids::PublisherId;
use crate::pool::{DeliveryPath, Metadata, Pool, SampleInfo, Times, borrow};
use crate::settings::{MemoryLocation, SharedLocation};

impl fmt::Debug for Sample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sample({}, {:?})", self.position, self.slice)
    }
}

impl Sample {
    pub(super) fn pool(&self) -> &Pool {
        self.shared.context.pool(self.direction)
    }

    /// Reads the sample info; None if the block was reused.
    fn read_info<T>(&self, read: impl FnOnce(&SampleInfo<'_, ipc::MappedWords>) -> T) -> Option<T> {
        let sample_info = self.pool().control().sample_info(self.entry.block);
        let found = read(&sample_info);
        sample_info.belongs_to(self.entry.block).then_some(found)
    }

    /// Length in bytes.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.entry.length
    }

    /// Start of the message in this process's address space, or in the device's.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.slice.address()
    }

    /// The message's memory, for devices. Clones of the slice keep the memory mapped, but do not
    /// hold the message.
    #[must_use]
    pub fn slice(&self) -> &Slice {
        &self.slice
    }

    /// Location of its memory.
    #[must_use]
    pub fn place(&self) -> MemoryLocation {
        match (self.pool().id().place, self.slice.memory().device()) {
            (SharedLocation::Device(_), Some(device)) => MemoryLocation::Device(device),
            _ => MemoryLocation::Host,
        }
    }

    /// Returns true if the message is still held: not if the service has taken this process for dead.
    /// Then its bytes may belong to another message. Call this after reading the bytes to know
    /// whether they were valid. An eviction leaves it held.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.shared.held_messages(self.direction)
    }

    pub(super) fn check(&self, operation: &'static str) -> Result<()> {
        self.shared.context.node.check_not_forked(operation)?;
        if self.is_valid() {
            return Ok(());
        }
        let detail = "the process was removed from the node, and the message may be gone";
        Err(Error::new(operation, ErrorKind::Evicted, detail).on(self.shared.context.topic.name()))
    }

    /// The message's bytes in place; for memory of the host.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for memory of a device.
    ///
    /// # Safety
    /// No process writes these bytes while they are borrowed. That holds if all processes of the
    /// node follow the rules, also after an eviction of this subscriber, and as long as the service
    /// does not take this process for dead. A process that breaks the rules can write at any time.
    #[allow(unsafe_code)]
    pub unsafe fn bytes(&self) -> Result<&[u8]> {
        let operation = "access message bytes of topic";
        if self.pool().id().place != SharedLocation::Host {
            let detail = "the memory is on a device";
            return Err(Error::new(operation, ErrorKind::InvalidArgument, detail));
        }
        self.check(operation)?;
        // SAFETY: host memory, mapped as long as the slice lives; the caller promises the rest.
        Ok(unsafe { borrow(&self.slice) })
    }

    /// Copies a part of it. Waits until it is [written](Self::readiness), and until a device has
    /// finished the copy.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) beyond its end,
    /// [`Evicted`](ErrorKind::Evicted) if it is not [valid](Self::is_valid) any more,
    /// [`Poisoned`](ErrorKind::Poisoned) if it will never be written.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        let operation = "read message of topic";
        let part = self.slice.slice(offset, bytes.len() as u64).during(operation)?;
        if !bytes.is_empty() {
            self.shared.context.node.check_not_forked(operation)?;
            self.await_ready(operation)?;
            self.pool().read(&part, bytes, gpu::DEFAULT_TIMEOUT)?;
        }
        // Afterwards: bytes that were read while it was held are valid.
        self.check(operation)
    }

    /// Copies all its bytes.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn to_vec(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.length() as usize];
        self.read(0, &mut bytes)?;
        Ok(bytes)
    }

    /// Bytes that its publisher attached; empty if this process was taken for dead and the block was
    /// reused.
    #[must_use]
    pub fn metadata(&self) -> Metadata {
        let length = usize::from(self.entry.metadata);
        self.read_info(|sample_info| sample_info.metadata(length)).unwrap_or(Metadata::NONE)
    }

    /// The message's publisher: unique on the node of its [origin](Self::origin).
    #[must_use]
    pub fn publisher(&self) -> PublisherId {
        PublisherId(self.entry.publisher)
    }

    /// Number of the message among those of its publisher, from 1 on. Gaps are dropped messages.
    #[must_use]
    pub fn sequence(&self) -> u64 {
        self.entry.sequence
    }

    /// Position of the message in the order of this node's messages, or of those from all other
    /// nodes.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.position
    }

    /// The identity of the node that published it; None for this one. All zeros if its subscriber
    /// process was taken for dead and the block was reused.
    #[must_use]
    pub fn origin(&self) -> Option<[u8; 16]> {
        let origin = || self.read_info(|sample_info| sample_info.origin()).unwrap_or_default();
        self.entry.has_origin.then(origin)
    }

    /// When it was published, in nanoseconds since 1970, by the clock of the publisher's node.
    #[must_use]
    pub fn published_at(&self) -> u64 {
        self.entry.published_at
    }

    /// When it reached each stage of delivery; all 0 if the block was reused.
    #[must_use]
    pub fn times(&self) -> Times {
        self.read_info(|sample_info| sample_info.times()).unwrap_or_default()
    }

    /// Delivery path of the message.
    #[must_use]
    pub fn path(&self) -> DeliveryPath {
        if self.pool().is_mirrored() {
            return DeliveryPath::ServiceCopied;
        }
        self.read_info(|sample_info| sample_info.path()).unwrap_or(DeliveryPath::SharedMemory)
    }
}

impl Drop for Sample {
    fn drop(&mut self) {
        if self.is_owned {
            self.shared.release(self.direction, self.position);
        }
    }
}
