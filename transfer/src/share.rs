//! One buffer shared by several processes without a copy.
//!
//! Only descriptors (or 64 bytes) are sent: no path, no process id, no capability. So it works
//! across containers too.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, OnceLock};

use gpu::{Device, DeviceName, Exported, LegacyHandle, Memory, Slice, Uuid, WeakMemory};
use ipc::ForkGeneration;

use crate::error::{Context, Error, ErrorKind, Result, failed};
use crate::handle::{Handle, HandleMetadata, HandleType, MAX_PIECES};
use crate::lock;
use crate::tensor::Tensor;

/// Shared memory, of which handles can be made as long as this exists.
///
/// Memory [allocated to be shared](gpu::Device::allocate_shared) stays with the processes that
/// opened it after this buffer and its process are gone. Memory from `cudaMalloc` is freed with the
/// process that allocated it.
///
/// ```
/// use gpu::Device;
/// use transfer::{ElementType, Opener, SharedBuffer, Tensor};
/// let device = Device::open("emulated:0".parse()?)?;
/// let memory = device.allocate_shared(12, &[])?;
/// let tensor = Tensor::contiguous(ElementType::F32, &[3]);
/// let shared = SharedBuffer::new(&memory, &tensor)?;
/// let handle = shared.handle()?; // … sent to another process …
/// let opened = Opener::shared().open(&handle, None)?;
/// assert_eq!(opened.tensor, tensor);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct SharedBuffer {
    _memory: Memory,
    /// Exported once, because drivers are slow at it.
    descriptors: Vec<OwnedFd>,
    metadata: HandleMetadata,
    fork_generation: ForkGeneration,
}

impl SharedBuffer {
    /// Shares memory that holds a tensor.
    ///
    /// # Errors
    /// [`OutOfBounds`](ErrorKind::OutOfBounds) if the tensor reaches beyond the memory;
    /// [`Failed`](ErrorKind::Failed) for memory that cannot be exported.
    pub fn new(memory: &Memory, tensor: &Tensor) -> Result<Self> {
        let operation = "share";
        let device = memory.mapped_for();
        if memory.device() != Some(device.name()) {
            let detail = "it is on another device or on the host. Share it where it was allocated";
            return Err(Error::new(operation, ErrorKind::Failed, detail));
        }
        let (handle_type, descriptors) = match memory.export_pieces() {
            Ok(Exported { pieces, .. }) if pieces.len() > MAX_PIECES => {
                let detail = format!("{} pieces, {MAX_PIECES} is the maximum", pieces.len());
                return Err(Error::new(operation, ErrorKind::Failed, detail));
            }
            Ok(Exported { pieces, offset: 0 }) => {
                let (descriptors, pieces) = pieces.into_iter().unzip();
                (HandleType::Descriptors { pieces }, descriptors)
            }
            Ok(Exported { offset, .. }) => {
                let detail = format!("it starts {offset} bytes after the start of its piece");
                return Err(Error::new(operation, ErrorKind::Failed, detail));
            }
            Err(error) if error.kind() == gpu::ErrorKind::NotSupported => {
                (HandleType::Legacy(memory.export_legacy().during(operation)?), Vec::new())
            }
            Err(error) => return Err(error).during(operation),
        };
        // Read once, because the length grows if the memory is a pool's. Pieces added after the
        // export are not in the handle.
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

    /// The metadata of its handles.
    #[must_use]
    pub fn metadata(&self) -> &HandleMetadata {
        &self.metadata
    }

    /// A handle, for one receiver.
    ///
    /// # Errors
    /// If descriptors run out, or the process forked.
    pub fn handle(&self) -> Result<Handle> {
        let operation = "make handle";
        check_fork(self.fork_generation, operation)?;
        let copies = self.descriptors.iter().map(|descriptor| descriptor.try_clone());
        let descriptors = copies.collect::<io::Result<_>>().map_err(failed(operation))?;
        Ok(Handle { metadata: self.metadata.clone(), descriptors })
    }
}

/// A mapped buffer of another process. The mapping exists as long as any clone of this.
#[derive(Debug, Clone)]
pub struct OpenedBuffer {
    /// The mapped memory.
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

    /// The address of the element with all indices 0 in this process.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.memory.address() + self.tensor.byte_offset
    }
}

/// Opens handles; maps each memory once.
///
/// An opener does not know the mappings of other openers. Mostly the [process-wide
/// one](Self::shared) is wanted.
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

/// Above this number of entries, those whose memory is gone are removed.
const SWEEP_ABOVE: usize = 64;

impl Opener {
    /// The opener of the whole process: it maps a memory once per process and device. In a forked
    /// child it fails with [`Forked`](ErrorKind::Forked), as devices do.
    #[must_use]
    pub fn shared() -> Arc<Self> {
        static SHARED: OnceLock<Arc<Opener>> = OnceLock::new();
        Arc::clone(SHARED.get_or_init(Arc::default))
    }

    /// Maps the memory of a handle, for its own device or for another one. Memory from `cudaMalloc`
    /// can be opened in other processes only, whatever their process ids in their namespaces.
    ///
    /// # Errors
    /// [`NoSuchDevice`](ErrorKind::NoSuchDevice) if this process does not see the device;
    /// [`NoPeerAccess`](ErrorKind::NoPeerAccess) if the given device cannot reach it;
    /// [`WrongMemory`](ErrorKind::WrongMemory) if the descriptors are not those of the described
    /// memory.
    pub fn open(&self, handle: &Handle, device: Option<&Device>) -> Result<OpenedBuffer> {
        let operation = "open handle";
        check_fork(self.fork_generation, operation)?;
        let metadata = &handle.metadata;
        metadata.tensor.check(operation, metadata.length)?;
        let found;
        let device = match device {
            Some(device) => device,
            None => {
                found = Device::find(metadata.device).during(operation)?;
                &found
            }
        };
        let key = (metadata.identity, device.name());
        let mut mapped = lock(&self.mapped);
        if let Some(entry) = mapped.get(&key)
            && let Some(memory) = entry.memory.upgrade()
        {
            // The tensor may differ; the memory may not.
            if (entry.metadata.device, entry.metadata.length, &entry.metadata.handle_type)
                != (metadata.device, metadata.length, &metadata.handle_type)
            {
                let detail = "another memory was opened under this identity";
                return Err(Error::new(operation, ErrorKind::WrongMemory, detail));
            }
            return Ok(OpenedBuffer { memory, tensor: metadata.tensor.clone() });
        }
        let memory = open_memory(operation, handle, device)?;
        // For memory opened by legacy handle the driver reports the opening device, so it proves
        // nothing.
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
    let detail = "it belongs to the parent process. Create one in the child";
    Err(Error::new(operation, ErrorKind::Forked, detail))
}

/// Compares UUIDs, because names of devices differ between processes.
pub(crate) fn check_device(
    operation: &'static str,
    memory: &Memory,
    expected_device: Option<Uuid>,
) -> Result<()> {
    let resident = memory.device().map(DeviceName::uuid).transpose();
    if resident.during(operation)? == expected_device {
        return Ok(());
    }
    let detail = "the memory is on another device than described";
    Err(Error::new(operation, ErrorKind::WrongMemory, detail))
}

fn open_memory(operation: &'static str, handle: &Handle, device: &Device) -> Result<Memory> {
    let metadata = &handle.metadata;
    let pieces = match &metadata.handle_type {
        HandleType::Legacy(legacy) => {
            let whole = LegacyHandle { length: metadata.length, ..*legacy };
            // Process ids are no criterion: namespaces reuse them. The device knows what this
            // process allocated, and refuses it.
            return device.open_legacy_handle(&whole).during(operation);
        }
        HandleType::Descriptors { pieces } => pieces,
    };
    if pieces.len() != handle.descriptors.len() {
        let detail = format!(
            "received {} descriptors for {} pieces",
            handle.descriptors.len(),
            pieces.len()
        );
        return Err(Error::new(operation, ErrorKind::Malformed, detail));
    }
    let pairs: Vec<_> =
        handle.descriptors.iter().map(AsFd::as_fd).zip(pieces.iter().copied()).collect();
    device.import_pieces(&pairs, metadata.length).during(operation)
}

pub(crate) fn random<const N: usize>(operation: &'static str) -> Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(failed(operation))?;
    Ok(bytes)
}
