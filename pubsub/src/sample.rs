//! A message that is held.

mod ordered;

use std::fmt;
use std::sync::Arc;

use gpu::Slice;

use crate::error::{Error, ErrorKind, Result};
use crate::error_mapping;
use crate::pool::{DeliveryPath, Direction, Metadata, Pool, SampleInfo, Times, borrow};
use crate::publisher::PublisherId;
use crate::settings::{MemoryLocation, SharedLocation};
use crate::subscriber::Subscription;
use crate::topic::Entry;

/// A message, held until this is dropped, by any thread, and also after its subscriber is gone.
/// Its bytes are where its publisher put them: nothing was copied, however many read it.
pub struct Sample {
    shared: Arc<Subscription>,
    direction: Direction,
    position: u64,
    entry: Entry,
    slice: Slice,
    /// Not, if a stream holds it now.
    is_owned: bool,
}

impl fmt::Debug for Sample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sample({}, {:?})", self.position, self.slice)
    }
}

impl Sample {
    pub(crate) fn new(
        shared: Arc<Subscription>,
        direction: Direction,
        position: u64,
        entry: Entry,
        slice: Slice,
    ) -> Self {
        Self { shared, direction, position, entry, slice, is_owned: true }
    }

    fn pool(&self) -> &Pool {
        self.shared.context.pool(self.direction)
    }

    /// What is noted of the message; None if its block is another one's by now.
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

    /// Where it starts in this process's address space: the device's, if it is one's.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.slice.address()
    }

    /// As memory that devices reach. Copies of the slice keep the memory mapped, but do not
    /// hold the message.
    #[must_use]
    pub fn slice(&self) -> &Slice {
        &self.slice
    }

    /// In whose memory it lies.
    #[must_use]
    pub fn place(&self) -> MemoryLocation {
        match (self.pool().id().place, self.slice.memory().device()) {
            (SharedLocation::Device(_), Some(device)) => MemoryLocation::Device(device),
            _ => MemoryLocation::Host,
        }
    }

    /// Is it still held? Not if its subscriber was evicted for holding it too long: then what
    /// lies there may be another message by now. Asked after its bytes were read it tells
    /// whether they were its own.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.shared.was_subscription_active(self.direction)
    }

    fn check(&self, operation: &'static str) -> Result<()> {
        self.shared.context.node.check_not_forked(operation)?;
        if self.is_valid() {
            return Ok(());
        }
        let detail = "the subscriber was evicted, and the message may be gone";
        Err(Error::new(operation, ErrorKind::Evicted, detail).on(self.shared.context.topic.name()))
    }

    /// Its bytes where they lie, for one on the host.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for one on a device.
    ///
    /// # Safety
    /// Nobody writes these bytes while they are borrowed. That holds if all processes of the
    /// node keep to the rules, and this subscriber is not evicted meanwhile: it is on a reliable
    /// topic if it holds its samples too long, so the bytes have to be given back before the
    /// topic's release deadline. A process that breaks the rules can write at any time.
    #[allow(unsafe_code)]
    pub unsafe fn bytes(&self) -> Result<&[u8]> {
        let operation = "borrow bytes";
        if self.pool().id().place != SharedLocation::Host {
            let detail = "the memory is on a device";
            return Err(Error::new(operation, ErrorKind::InvalidArgument, detail));
        }
        self.check(operation)?;
        // SAFETY: of the host, mapped as long as the slice lives; the caller promises the rest.
        Ok(unsafe { borrow(&self.slice) })
    }

    /// Copies a part of it out; from a device, waits until it is there, and before that until it
    /// is [written](Self::readiness).
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) beyond its end,
    /// [`Evicted`](ErrorKind::Evicted) if it is not [valid](Self::is_valid) any more,
    /// [`Poisoned`](ErrorKind::Poisoned) if it never will be written.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        let operation = "read a message";
        let part = self.slice.slice(offset, bytes.len() as u64);
        let part = part.map_err(|cause| error_mapping::from_device(operation, cause))?;
        if !bytes.is_empty() {
            self.shared.context.node.check_not_forked(operation)?;
            self.await_ready(operation)?;
            self.pool().read(&part, bytes, gpu::DEFAULT_TIMEOUT)?;
        }
        // Afterwards: what was read while it was held is right.
        self.check(operation)
    }

    /// A copy of all its bytes.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn to_vec(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.length() as usize];
        self.read(0, &mut bytes)?;
        Ok(bytes)
    }

    /// What its publisher attached; nothing, if its subscriber was evicted and another message
    /// has come to its place.
    #[must_use]
    pub fn metadata(&self) -> Metadata {
        let length = usize::from(self.entry.metadata);
        self.read_info(|sample_info| sample_info.metadata(length)).unwrap_or(Metadata::NONE)
    }

    /// Who published it: a name that is unique on the node that it [comes from](Self::origin).
    #[must_use]
    pub fn publisher(&self) -> PublisherId {
        PublisherId(self.entry.publisher)
    }

    /// The how manieth of its publisher's messages it is, from 1 on. What is missing in between
    /// was dropped.
    #[must_use]
    pub fn sequence(&self) -> u64 {
        self.entry.sequence
    }

    /// Its place in the order of the messages that came the same way: of this node's, or of
    /// those from all other nodes.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.position
    }

    /// The identity of the node that it comes from; None for this one. Nothing but zeros if
    /// that is not known any more, since its subscriber was evicted.
    #[must_use]
    pub fn origin(&self) -> Option<[u8; 16]> {
        self.entry
            .has_origin
            .then(|| self.read_info(|sample_info| sample_info.origin()).unwrap_or_default())
    }

    /// When it was published, in nanoseconds since 1970, by the clock of the node that it
    /// comes from.
    #[must_use]
    pub fn published_at(&self) -> u64 {
        self.entry.published_at
    }

    /// When it reached each stage of its way; all 0 if that is not known any more.
    #[must_use]
    pub fn times(&self) -> Times {
        self.read_info(|sample_info| sample_info.times()).unwrap_or_default()
    }

    /// By which way it came.
    #[must_use]
    pub fn path(&self) -> DeliveryPath {
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
