//! One buffer, without a copy, in as many processes as want it.
//!
//! Only descriptors (or 64 bytes) cross: no path in a file system, no process number, no
//! capability. So it works between containers as between threads.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, OnceLock};

use gpu::{Device, DeviceName, Exported, LegacyHandle, Memory, Slice, Uuid, WeakMemory};
use ipc::ForkGeneration;

use crate::error::{Error, ErrorKind, Result};
use crate::handle::{Handle, HandleMetadata, HandleType, MAX_PIECES};
use crate::lock;
use crate::tensor::Tensor;

/// Memory that is shared: as long as this lives, handles of it can be made.
///
/// Memory that was [allocated to be shared](gpu::Device::allocate_shared) stays with those
/// that opened it when this, or its process, is gone. Memory that was allocated the plain
/// way goes with the process that allocated it.
///
/// ```
/// use gpu::Device;
/// use transfer::{ElementType, Opener, SharedBuffer, Tensor};
/// let device = Device::open("emulated:0".parse()?)?;
/// let memory = device.allocate_shared(12, &[])?;
/// let tensor = Tensor::contiguous(ElementType::F32, &[3]);
/// let shared = SharedBuffer::new(&memory, &tensor)?;
/// let handle = shared.handle()?; // … which travels to another process …
/// let opened = Opener::shared().open(&handle, None)?;
/// assert_eq!(opened.tensor, tensor);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct SharedBuffer {
    _memory: Memory,
    /// Exported once: a driver takes its time for it.
    descriptors: Vec<OwnedFd>,
    metadata: HandleMetadata,
    fork_generation: ForkGeneration,
}

impl SharedBuffer {
    /// Shares memory that holds a tensor.
    ///
    /// # Errors
    /// [`OutOfBounds`](ErrorKind::OutOfBounds) if the tensor reaches beyond the memory;
    /// [`Failed`](ErrorKind::Failed) for memory that cannot leave its process.
    pub fn new(memory: &Memory, tensor: &Tensor) -> Result<Self> {
        let operation = "share";
        let device = memory.mapped_for();
        if memory.device() != Some(device.name()) {
            let detail = "it lies on another device, or on the host: share it where it was made";
            return Err(Error::new(operation, ErrorKind::Failed, detail));
        }
        let of_device = |error| Error::of_device(operation, error);
        let (handle_type, descriptors) = match memory.export_pieces() {
            Ok(Exported { pieces, .. }) if pieces.len() > MAX_PIECES => {
                let detail = format!("{} pieces, {MAX_PIECES} are the most", pieces.len());
                return Err(Error::new(operation, ErrorKind::Failed, detail));
            }
            Ok(Exported { pieces, offset: 0 }) => {
                let (descriptors, pieces) = pieces.into_iter().unzip();
                (HandleType::Descriptors { pieces }, descriptors)
            }
            Ok(Exported { offset, .. }) => {
                let detail = format!("it begins {offset} bytes behind the start of its piece");
                return Err(Error::new(operation, ErrorKind::Failed, detail));
            }
            Err(error) if error.kind() == gpu::ErrorKind::NotSupported => {
                (HandleType::Legacy(memory.export_legacy().map_err(of_device)?), Vec::new())
            }
            Err(error) => return Err(of_device(error)),
        };
        // Read once, for it grows if the memory is a pool's; and pieces that came after
        // the export are not among those that travel.
        let length = match &handle_type {
            HandleType::Descriptors { pieces } => {
                let sum = pieces.iter().fold(0_u64, |sum, piece| sum.saturating_add(*piece));
                memory.length().min(sum)
            }
            HandleType::Legacy(_) => memory.length(),
        };
        tensor.check(operation, length)?;
        let metadata = HandleMetadata {
            identity: random(operation)?,
            device: device.properties().uuid,
            length,
            handle_type,
            tensor: tensor.clone(),
        };
        let fork_generation = ForkGeneration::current();
        Ok(Self { _memory: memory.clone(), descriptors, metadata, fork_generation })
    }

    /// What its handles say.
    #[must_use]
    pub fn metadata(&self) -> &HandleMetadata {
        &self.metadata
    }

    /// A handle, for one receiver.
    ///
    /// # Errors
    /// If descriptors run out, or the process forked.
    pub fn handle(&self) -> Result<Handle> {
        let operation = "make a handle";
        check_fork(self.fork_generation, operation)?;
        let copies = self.descriptors.iter().map(|descriptor| descriptor.try_clone());
        match copies.collect() {
            Ok(descriptors) => Ok(Handle { metadata: self.metadata.clone(), descriptors }),
            Err(error) => Err(Error::new(operation, ErrorKind::Failed, error.to_string())),
        }
    }
}

/// A buffer of another process, mapped here. Whoever has a copy keeps it mapped.
#[derive(Debug, Clone)]
pub struct OpenedBuffer {
    /// The memory, as long as it is.
    pub memory: Memory,
    /// What the bytes mean.
    pub tensor: Tensor,
}

impl OpenedBuffer {
    /// The bytes that the tensor reaches.
    #[must_use]
    pub fn slice(&self) -> Slice {
        // Checked when it was opened.
        let (first, end) = self.tensor.extent().unwrap_or_default();
        self.memory.slice(first, end - first).unwrap_or_else(|_| self.memory.whole())
    }

    /// Where the element with all indices 0 lies in this process.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.memory.address() + self.tensor.byte_offset
    }
}

/// Opens handles, each memory once: what is mapped already is found again.
///
/// One of its own knows nothing of what others mapped; mostly [that of the
/// process](Self::shared) is what is wanted.
#[derive(Debug)]
pub struct Opener {
    mapped: Mutex<HashMap<([u8; 16], DeviceName), Mapped>>,
    fork_generation: ForkGeneration,
}

impl Default for Opener {
    fn default() -> Self {
        Self { mapped: Mutex::default(), fork_generation: ForkGeneration::current() }
    }
}

#[derive(Debug)]
struct Mapped {
    memory: WeakMemory,
    metadata: HandleMetadata,
}

/// Entries above which those whose memory is gone are looked for.
const SWEEP_ABOVE: usize = 64;

impl Opener {
    /// The one that the process has in common: with it a memory is mapped once per process
    /// and device, whoever asks. In a forked child it says
    /// [`Forked`](ErrorKind::Forked), as the devices do.
    #[must_use]
    pub fn shared() -> Arc<Self> {
        static SHARED: OnceLock<Arc<Opener>> = OnceLock::new();
        Arc::clone(SHARED.get_or_init(Arc::default))
    }

    /// Maps the memory of a handle, for the device that it lies on, or for another one. Memory
    /// that was allocated the plain way is opened in other processes only, whatever their number
    /// is in their namespace.
    ///
    /// # Errors
    /// [`NoSuchDevice`](ErrorKind::NoSuchDevice) if this process does not see the device;
    /// [`NoPeerAccess`](ErrorKind::NoPeerAccess) if the other one cannot reach it;
    /// [`WrongMemory`](ErrorKind::WrongMemory) if what came is not what was described.
    pub fn open(&self, handle: &Handle, device: Option<&Device>) -> Result<OpenedBuffer> {
        let operation = "open a handle";
        check_fork(self.fork_generation, operation)?;
        let metadata = &handle.metadata;
        metadata.tensor.check(operation, metadata.length)?;
        let of_device = |error| Error::of_device(operation, error);
        let found;
        let device = match device {
            Some(device) => device,
            None => {
                found = Device::find(metadata.device).map_err(of_device)?;
                &found
            }
        };
        let key = (metadata.identity, device.name());
        let mut mapped = lock(&self.mapped);
        let entry = mapped.get(&key);
        if let Some((entry, memory)) =
            entry.and_then(|entry| Some((entry, entry.memory.upgrade()?)))
        {
            // The tensor may differ; the memory may not.
            if (entry.metadata.device, entry.metadata.length, &entry.metadata.handle_type)
                != (metadata.device, metadata.length, &metadata.handle_type)
            {
                let detail = "another memory was opened under its identity";
                return Err(Error::new(operation, ErrorKind::WrongMemory, detail));
            }
            return Ok(OpenedBuffer { memory, tensor: metadata.tensor.clone() });
        }
        let memory = open_memory(operation, handle, device)?;
        // Of memory opened by legacy handle the driver says that it lies where it was opened.
        if matches!(metadata.handle_type, HandleType::Descriptors { .. }) {
            check_device(operation, &memory, Some(metadata.device))?;
        }
        if mapped.len() >= SWEEP_ABOVE {
            mapped.retain(|_, entry| entry.memory.upgrade().is_some());
        }
        mapped.insert(key, Mapped { memory: memory.downgrade(), metadata: metadata.clone() });
        Ok(OpenedBuffer { memory, tensor: metadata.tensor.clone() })
    }
}

pub(crate) fn check_fork(fork_generation: ForkGeneration, operation: &'static str) -> Result<()> {
    if fork_generation.is_current() {
        return Ok(());
    }
    let detail = "it belongs to the parent process; make one in the child";
    Err(Error::new(operation, ErrorKind::Forked, detail))
}

/// The device may be named otherwise here; what matters is that it is that one.
pub(crate) fn check_device(
    operation: &'static str,
    memory: &Memory,
    expected_device: Option<Uuid>,
) -> Result<()> {
    let resident = memory.device().map(DeviceName::uuid).transpose();
    if resident.map_err(|error| Error::of_device(operation, error))? == expected_device {
        return Ok(());
    }
    let detail = "it lies on another device than was said";
    Err(Error::new(operation, ErrorKind::WrongMemory, detail))
}

fn open_memory(operation: &'static str, handle: &Handle, device: &Device) -> Result<Memory> {
    let metadata = &handle.metadata;
    let of_device = |error| Error::of_device(operation, error);
    let pieces = match &metadata.handle_type {
        HandleType::Legacy(legacy) => {
            let whole = LegacyHandle { length: metadata.length, ..*legacy };
            // Of another process, also one that has our number in a namespace of its own: what
            // this process made is known to the device, which refuses it either way.
            return device.open_legacy_handle(&whole).map_err(of_device);
        }
        HandleType::Descriptors { pieces } => pieces,
    };
    if pieces.len() != handle.descriptors.len() {
        let detail =
            format!("{} descriptors for {} pieces", handle.descriptors.len(), pieces.len());
        return Err(Error::new(operation, ErrorKind::Malformed, detail));
    }
    let pairs: Vec<_> =
        handle.descriptors.iter().map(AsFd::as_fd).zip(pieces.iter().copied()).collect();
    device.import_pieces(&pairs, metadata.length).map_err(of_device)
}

pub(crate) fn random(operation: &'static str) -> Result<[u8; 16]> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes)
        .map_err(|error| Error::new(operation, ErrorKind::Failed, error.to_string()))?;
    Ok(bytes)
}
