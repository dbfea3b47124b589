//! One buffer shared by several processes without a copy.
//!
//! Only descriptors (or 64 bytes) are sent: no path, no process id, no capability. So it works
//! across containers too.

use std::collections::HashMap;
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use gpu::{Device, DeviceName, Importer, LegacyHandle, Memory, Slice, Uuid, WeakMemory};
use ipc::{ForkGeneration, LimitReached, PerProcess};
use threads::{DeferredDrop, DeferredValue, lock};

use crate::error::{Context, Error, ErrorKind, Result, failed};
use crate::handle::{Handle, HandleMetadata, HandleType};
use crate::host_buffer::{HostBuffer, WeakHostBuffer};
use crate::region::{Buffer, Rights};
use crate::tensor::Tensor;

const SHARE: &str = "share";
const OPEN: &str = "open handle";
/// Descriptors in a message, and descriptors that a shared buffer keeps open.
pub(crate) const PIECES_PER_MESSAGE: usize = ipc::channel::MAX_DESCRIPTORS;

/// Shared memory, of which handles can be made as long as this exists.
///
/// Memory [allocated to be shared](gpu::Device::allocate_shared) and [host
/// memory](crate::HostBuffer::new) stay with the processes that opened them after this buffer and
/// its process are gone. Memory from `cudaMalloc` is freed with the process that allocated it.
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
/// assert_eq!(opened.tensor(), &tensor);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct SharedBuffer {
    buffer: Buffer,
    /// Exported once, because drivers are slow at it; not kept for memory of more pieces than a
    /// message has.
    descriptors: OnceLock<Vec<OwnedFd>>,
    metadata: HandleMetadata,
    fork_generation: ForkGeneration,
    _owner: Option<Box<dyn fmt::Debug + Send + Sync>>,
}

impl SharedBuffer {
    /// Shares memory that holds a tensor.
    ///
    /// # Errors
    /// [`OutOfBounds`](ErrorKind::OutOfBounds) if the tensor reaches beyond the memory;
    /// [`Failed`](ErrorKind::Failed) for memory that cannot be exported.
    pub fn new(buffer: impl Into<Buffer>, tensor: &Tensor) -> Result<Self> {
        Self::exported(buffer.into(), tensor, Rights::ALL)
    }

    /// Like [`new`](Self::new), for receivers that only read: they cannot write to memory of the
    /// host, and promise not to write to memory of a device.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub fn read_only(buffer: impl Into<Buffer>, tensor: &Tensor) -> Result<Self> {
        Self::exported(buffer.into(), tensor, Rights::READ)
    }

    /// Shares a block of memory from which an allocator serves many: receivers map the memory once
    /// for all its blocks. It is exported when the first receiver needs it. `owner` keeps the block.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub fn of_pool(
        memory: &Memory,
        tensor: &Tensor,
        owner: impl fmt::Debug + Send + Sync + 'static,
    ) -> Result<Self> {
        let identity = identity_in_pool(memory)?;
        let mut shared = Self::described(memory.into(), tensor, Rights::ALL, identity)?;
        shared.metadata.is_of_pool = true;
        shared._owner = Some(Box::new(owner));
        Ok(shared)
    }

    fn exported(buffer: Buffer, tensor: &Tensor, rights: Rights) -> Result<Self> {
        let shared = Self::described(buffer, tensor, rights, random(SHARE)?)?;
        // Memory that cannot be exported is refused now.
        shared.descriptors(0, 1)?;
        Ok(shared)
    }

    fn described(
        buffer: Buffer,
        tensor: &Tensor,
        rights: Rights,
        identity: [u8; 16],
    ) -> Result<Self> {
        let (device, handle_type) = match &buffer {
            Buffer::Host(host) => {
                let (pieces, offset) = (vec![host.length()], 0);
                (None, HandleType::Descriptors { pieces, offset })
            }
            Buffer::Device(memory) => describe(memory)?,
        };
        // Read once, because the length grows if the memory is a pool's. Pieces added after the
        // export are not in the handle.
        let length = match &handle_type {
            HandleType::Descriptors { pieces, offset } => {
                HandleMetadata::check_pieces(SHARE, pieces)?;
                let sum = pieces.iter().fold(0_u64, |sum, piece| sum.saturating_add(*piece));
                buffer.length().min(sum.saturating_sub(*offset))
            }
            HandleType::Legacy(_) => buffer.length(),
        };
        tensor.check(SHARE, length)?;
        let metadata = HandleMetadata {
            identity,
            device,
            length,
            is_read_only: !rights.write,
            is_of_pool: false,
            handle_type,
            tensor: tensor.clone(),
        };
        let fork_generation = ForkGeneration::current();
        let descriptors = OnceLock::new();
        Ok(Self { buffer, descriptors, metadata, fork_generation, _owner: None })
    }

    /// The metadata of its handles.
    #[must_use]
    pub fn metadata(&self) -> &HandleMetadata {
        &self.metadata
    }

    /// A handle, for one receiver. Memory of very many pieces is better opened from a
    /// [service](crate::ShareService), which sends a few descriptors at a time.
    ///
    /// # Errors
    /// If descriptors run out, or the process forked.
    pub fn handle(&self) -> Result<Handle> {
        check_fork(self.fork_generation, "make handle")?;
        let descriptors = self.descriptors(0, self.metadata.pieces())?;
        Ok(Handle { metadata: self.metadata.clone(), descriptors })
    }

    /// Descriptors of at most `count` pieces, from this one on.
    pub(crate) fn descriptors(&self, first: usize, count: usize) -> Result<Vec<OwnedFd>> {
        if self.metadata.pieces() > PIECES_PER_MESSAGE {
            return self.export(first, count);
        }
        let kept = match self.descriptors.get() {
            Some(kept) => kept,
            None => {
                let exported = self.export(0, PIECES_PER_MESSAGE)?;
                self.descriptors.get_or_init(|| exported)
            }
        };
        let kept = kept.iter().skip(first).take(count);
        kept.map(|descriptor| {
            descriptor.try_clone().map_err(LimitReached::explain).map_err(failed("make handle"))
        })
        .collect()
    }

    fn export(&self, first: usize, count: usize) -> Result<Vec<OwnedFd>> {
        let rights = if self.metadata.is_read_only { Rights::READ } else { Rights::ALL };
        let end = self.metadata.pieces().min(first.saturating_add(count));
        let export = |piece| self.buffer.export(piece as u32, rights);
        (first..end).map(|piece| Ok(export(piece)?.0)).collect()
    }
}

/// The identity of all shares of a memory, as long as that exists.
fn identity_in_pool(memory: &Memory) -> Result<[u8; 16]> {
    type Identities = HashMap<usize, (WeakMemory, [u8; 16])>;
    static IDENTITIES: PerProcess<Mutex<Identities>> = PerProcess::new();
    let mut identities = lock(IDENTITIES.get());
    let exists = |(known, _): &(WeakMemory, _)| known.upgrade().is_some();
    if let Some(known) = identities.get(&memory.identity()).filter(|known| exists(known)) {
        return Ok(known.1);
    }
    identities.retain(|_, known| exists(known));
    let identity = random(SHARE)?;
    identities.insert(memory.identity(), (memory.downgrade(), identity));
    Ok(identity)
}

/// The device of memory, and how it is exported.
fn describe(memory: &Memory) -> Result<(Option<Uuid>, HandleType)> {
    let device = memory.mapped_for();
    if memory.is_of_hidden_device() {
        let detail = "it is on a device that this process does not see (CUDA_VISIBLE_DEVICES). Share \
                      it where it was allocated";
        return Err(Error::new(SHARE, ErrorKind::Failed, detail));
    }
    if memory.device() != Some(device.name()) {
        let detail = "it is on another device or on the host. Share it where it was allocated";
        return Err(Error::new(SHARE, ErrorKind::Failed, detail));
    }
    let handle_type = match memory.pieces() {
        Ok(found) => HandleType::Descriptors { pieces: found.lengths, offset: found.offset },
        Err(error) if error.kind() == gpu::ErrorKind::NotSupported => {
            HandleType::Legacy(memory.export_legacy().during(SHARE)?)
        }
        Err(error) => return Err(error).during(SHARE),
    };
    Ok((Some(device.properties().uuid), handle_type))
}

/// A mapped buffer of another process.
///
/// The mapping exists as long as any clone of this or of its [buffer](Self::buffer). As long as any
/// clone of this exists, the owner keeps the memory if it was opened from a
/// [service](crate::ShareService), so that its allocator does not use it for something else.
#[derive(Debug, Clone)]
pub struct OpenedBuffer {
    buffer: Buffer,
    tensor: Tensor,
    is_read_only: bool,
    /// Notifies the owner of the memory when it is dropped.
    _hold: Option<Arc<dyn fmt::Debug + Send + Sync>>,
}

impl OpenedBuffer {
    /// The mapped memory.
    #[must_use]
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// The mapped memory, if it is of a device.
    #[must_use]
    pub fn memory(&self) -> Option<&Memory> {
        self.buffer.memory()
    }

    /// What the bytes mean.
    #[must_use]
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// Did its owner share it for readers only?
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.is_read_only
    }

    /// The bytes of a device that the tensor reaches.
    ///
    /// # Errors
    /// [`Failed`](ErrorKind::Failed) for memory of the host.
    pub fn slice(&self) -> Result<Slice> {
        let operation = "slice shared memory";
        let memory = self.memory().ok_or("it is memory of the host").map_err(failed(operation))?;
        // Checked when it was opened.
        let (first, end) = self.tensor.extent().unwrap_or_default();
        memory.slice(first, end - first).during(operation)
    }

    /// The address of the element with all indices 0 in this process.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.buffer.address() + self.tensor.byte_offset
    }

    pub(crate) fn held(self, hold: Arc<dyn fmt::Debug + Send + Sync>) -> Self {
        Self { _hold: Some(hold), ..self }
    }
}

/// Opens handles; maps each memory once.
///
/// An opener does not know the mappings of other openers. Mostly the [process-wide
/// one](Self::shared) is wanted.
#[derive(Debug)]
pub struct Opener {
    mapped: Mutex<HashMap<Key, Mapped>>,
    kept: DeferredDrop<KeptMapping>,
    fork_generation: ForkGeneration,
}

impl Default for Opener {
    fn default() -> Self {
        Self {
            mapped: Mutex::default(),
            kept: DeferredDrop::default(),
            fork_generation: ForkGeneration::current(),
        }
    }
}

/// A mapping that is kept although it may be unused.
struct KeptMapping {
    until: Instant,
    memory: Memory,
}

impl DeferredValue for KeptMapping {
    const THREAD_NAME: &'static str = "fabricast-unmap";
    const CHECK_INTERVAL: Duration = Duration::from_millis(500);

    fn is_unused(&mut self) -> bool {
        Instant::now() >= self.until
    }
}

/// Identity of the memory, and the device that it is mapped for; None for the host.
type Key = ([u8; 16], Option<DeviceName>);

#[derive(Debug)]
struct Mapped {
    buffer: WeakBuffer,
    metadata: HandleMetadata,
}

#[derive(Debug)]
enum WeakBuffer {
    Device(WeakMemory),
    Host(WeakHostBuffer),
}

impl WeakBuffer {
    fn of(buffer: &Buffer) -> Self {
        match buffer {
            Buffer::Device(memory) => Self::Device(memory.downgrade()),
            Buffer::Host(host) => Self::Host(host.downgrade()),
        }
    }

    fn upgrade(&self) -> Option<Buffer> {
        match self {
            Self::Device(memory) => memory.upgrade().map(Buffer::Device),
            Self::Host(host) => host.upgrade().map(Buffer::Host),
        }
    }
}

/// How long a mapping is kept after the last opening.
const KEPT_FOR: Duration = Duration::from_secs(2);
/// Of this many memories at most.
const MAX_KEPT: usize = 256;
/// Above this number of entries, those whose memory is gone are removed.
const SWEEP_ABOVE: usize = 64;

/// The next descriptor of a handle.
pub(crate) type PieceSource<'a> = &'a mut dyn FnMut() -> Result<OwnedFd>;

impl Opener {
    /// The opener of the whole process: it maps a memory once per process and device. A forked child
    /// has another one.
    #[must_use]
    pub fn shared() -> Arc<Self> {
        static SHARED: PerProcess<OnceLock<Arc<Opener>>> = PerProcess::new();
        Arc::clone(SHARED.get().get_or_init(Arc::default))
    }

    /// Maps the memory of a handle, for its own device or for another one too. Memory from
    /// `cudaMalloc` can be opened in other processes only, whatever their process ids in their
    /// namespaces.
    ///
    /// # Errors
    /// [`NoSuchDevice`](ErrorKind::NoSuchDevice) if this process sees no device that could map it;
    /// [`NoPeerAccess`](ErrorKind::NoPeerAccess) if the given device cannot reach it;
    /// [`WrongMemory`](ErrorKind::WrongMemory) if the descriptors are not those of the described
    /// memory.
    pub fn open(&self, handle: &Handle, device: Option<&Device>) -> Result<OpenedBuffer> {
        let mut descriptors = handle.descriptors.iter();
        let received = handle.descriptors.len();
        let pieces = handle.metadata.pieces();
        if received != pieces {
            let detail = format!("received {received} descriptors for {pieces} pieces");
            return Err(Error::new(OPEN, ErrorKind::Malformed, detail));
        }
        self.open_pieces(&handle.metadata, device, &mut || {
            let next = descriptors.next().map(OwnedFd::try_clone);
            next.ok_or("a piece is missing").map_err(failed(OPEN))?.map_err(failed(OPEN))
        })
    }

    /// Keeps the mapping of a pool's memory for some seconds, since mapping takes milliseconds. Its
    /// owner cannot give the memory back meanwhile.
    pub(crate) fn keep(&self, opened: &OpenedBuffer) {
        let Some(memory) = opened.memory() else { return };
        let is_same = |kept: &mut KeptMapping| kept.memory.identity() == memory.identity();
        drop(self.kept.update(|all| all.extract_if(.., is_same).collect::<Vec<_>>()));
        let mapping = KeptMapping { until: Instant::now() + KEPT_FOR, memory: memory.clone() };
        // Without a thread that drops them, none is kept.
        let most = if self.kept.push(mapping).is_ok() { MAX_KEPT } else { 0 };
        drop(self.kept.update(|all| {
            let excess = all.len().saturating_sub(most);
            all.drain(..excess).collect::<Vec<_>>()
        }));
    }

    /// Like [`open`](Self::open), with descriptors that are taken one by one; none is taken for memory
    /// that is mapped already.
    pub(crate) fn open_pieces(
        &self,
        metadata: &HandleMetadata,
        device: Option<&Device>,
        next_piece: PieceSource<'_>,
    ) -> Result<OpenedBuffer> {
        check_fork(self.fork_generation, OPEN)?;
        metadata.tensor.check(OPEN, metadata.length)?;
        let found;
        let device = match (metadata.device, device) {
            (None, _) => None,
            (Some(_), Some(device)) => Some(device),
            (Some(uuid), None) => {
                found = Device::for_memory_of(uuid).during(OPEN)?;
                Some(&found)
            }
        };
        let opened = |buffer| OpenedBuffer {
            buffer,
            tensor: metadata.tensor.clone(),
            is_read_only: metadata.is_read_only,
            _hold: None,
        };
        let key = (metadata.identity, device.map(Device::name));
        if let Some(buffer) = mapped_as(&lock(&self.mapped), key, metadata)? {
            return Ok(opened(buffer));
        }
        // Without the lock, because pieces may take time to arrive.
        let buffer: Buffer = match device {
            None => {
                let file = next_piece()?;
                HostBuffer::open(file, metadata.length, !metadata.is_read_only)?.into()
            }
            Some(device) => open_memory(metadata, device, next_piece)?.into(),
        };
        let mut mapped = lock(&self.mapped);
        if let Some(buffer) = mapped_as(&mapped, key, metadata)? {
            return Ok(opened(buffer));
        }
        if mapped.len() >= SWEEP_ABOVE {
            mapped.retain(|_, entry| entry.buffer.upgrade().is_some());
        }
        mapped.insert(key, Mapped { buffer: WeakBuffer::of(&buffer), metadata: metadata.clone() });
        Ok(opened(buffer))
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
    if memory.is_of_hidden_device() {
        let is_visible = expected_device.is_some_and(|uuid| Device::find(uuid).is_ok());
        if expected_device.is_some() && !is_visible {
            return Ok(());
        }
        let detail = "the memory is on a device that this process does not see, unlike described";
        return Err(Error::new(operation, ErrorKind::WrongMemory, detail));
    }
    let resident = memory.device().map(DeviceName::uuid).transpose();
    if resident.during(operation)? == expected_device {
        return Ok(());
    }
    let detail = "the memory is on another device than described";
    Err(Error::new(operation, ErrorKind::WrongMemory, detail))
}

fn mapped_as(
    mapped: &HashMap<Key, Mapped>,
    key: Key,
    metadata: &HandleMetadata,
) -> Result<Option<Buffer>> {
    let Some(entry) = mapped.get(&key) else { return Ok(None) };
    let Some(buffer) = entry.buffer.upgrade() else { return Ok(None) };
    // The tensor may differ; the memory may not.
    let is_same =
        HandleMetadata { tensor: metadata.tensor.clone(), ..entry.metadata.clone() } == *metadata;
    if is_same {
        return Ok(Some(buffer));
    }
    let detail = "another memory was opened under this identity";
    Err(Error::new(OPEN, ErrorKind::WrongMemory, detail))
}

fn open_memory(
    metadata: &HandleMetadata,
    device: &Device,
    next_piece: PieceSource<'_>,
) -> Result<Memory> {
    let (pieces, offset) = match &metadata.handle_type {
        HandleType::Legacy(legacy) => {
            let whole = LegacyHandle { length: metadata.length, ..*legacy };
            // Opened by its own device, it is memory of that device for every library; opened by
            // another one, the driver reports that one.
            if let Some(resident) = metadata.device.and_then(|uuid| Device::find(uuid).ok())
                && resident.name() != device.name()
            {
                device.enable_peer(&resident).during(OPEN)?;
                return resident.open_legacy_handle(&whole).during(OPEN);
            }
            // Process ids are no criterion: namespaces reuse them. The device knows what this
            // process allocated, and refuses it. It reports the opening device for such memory, so
            // there is nothing to compare.
            return device.open_legacy_handle(&whole).during(OPEN);
        }
        HandleType::Descriptors { pieces, offset } => (pieces, *offset),
    };
    let granularity = device.properties().granularity;
    let total = pieces.iter().try_fold(0_u64, |sum, length| {
        sum.checked_add(length.checked_next_multiple_of(granularity)?)
    });
    let total = total.unwrap_or(u64::MAX);
    let importer: Importer = match metadata.device {
        Some(uuid) => device.importer_of(uuid, total),
        None => device.importer(total),
    }
    .during(OPEN)?;
    for length in pieces {
        importer.add(next_piece()?.as_fd(), *length).during(OPEN)?;
    }
    let memory = importer.finish(offset, metadata.length).during(OPEN)?;
    check_device(OPEN, &memory, metadata.device)?;
    Ok(memory)
}

pub(crate) fn random<const N: usize>(operation: &'static str) -> Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(failed(operation))?;
    Ok(bytes)
}
