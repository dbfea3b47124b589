//! Memory for messages: pieces of memory that all processes of a node map, and the control segment
//! that records the owner of each block.

mod bytes;
mod control;
mod copies;
mod growth_request;
mod mirror;
mod pieces;
mod sample_info;
mod stream_order;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use gpu::{Device, Memory, Slice, Stream, Uuid};
use ipc::{
    Allocator, Block, BlockRange, Caller, Doorbell, Layout, MappedWords, Owner, Participant,
    Segment, Statistics, WordRange,
};
use serde::{Deserialize, Serialize};
use threads::lock;

use crate::error::{Error, ErrorKind, Result};
use crate::error_mapping::{During, On};
use crate::settings::{MemoryLocation, SharedLocation};

use self::copies::Copies;
use self::mirror::Mirror;
use self::stream_order::Streams;

pub(crate) use self::bytes::{borrow, borrow_mut};
#[cfg(test)]
pub(crate) use self::control::GRANULE;
pub(crate) use self::control::MAX_PIECES;
pub(crate) use self::copies::InFlightCopies;
pub(crate) use self::growth_request::GrowthRequest;
pub(crate) use self::mirror::NodeCopies;
use self::pieces::Pieces;
pub(crate) use self::pieces::{Piece, PieceStored};
pub use self::sample_info::{DeliveryPath, Metadata, Times};
pub(crate) use self::sample_info::{SampleInfo, Stage};
pub use self::stream_order::Readiness;
pub(crate) use self::stream_order::{
    OWNED_BY_STREAMS, STREAM_POLL_BACKOFF, StreamPoller, SyncPoint,
};

pub(crate) const LAYOUT: Layout = Layout::new("fabricast pool", 5);
/// A process requests memory again only after this time, if none was added.
const GROWTH_RETRY: Duration = Duration::from_secs(1);

/// Origin of the messages of a pool. With a single pool two nodes that publish to each other could
/// deadlock: each would wait for memory that the other's messages hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, PartialOrd, Ord)]
pub(crate) enum Direction {
    /// From processes of this node.
    Local,
    /// From other nodes.
    Inbound,
}

impl Direction {
    pub(crate) const BOTH: [Self; 2] = [Self::Local, Self::Inbound];

    /// The one of two that belongs to it.
    #[inline]
    pub(crate) fn of<T>(self, local: T, inbound: T) -> T {
        match self {
            Self::Local => local,
            Self::Inbound => inbound,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct PoolId {
    pub(crate) place: SharedLocation,
    pub(crate) direction: Direction,
}

impl fmt::Display for PoolId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let direction = self.direction.of("local", "inbound");
        match self.place {
            SharedLocation::Host => write!(f, "{direction} messages on the host"),
            SharedLocation::Device(uuid) => write!(f, "{direction} messages on {}", Uuid(uuid)),
        }
    }
}

/// The allocator, sample info and sync words of a pool.
#[derive(Debug)]
pub(crate) struct PoolControl<W> {
    words: W,
    allocator: Allocator<WordRange<W>>,
    bell: Doorbell<WordRange<W>>,
    max_blocks: u32,
    sync_words: Range<usize>,
    /// Only pools on a device are stream-ordered.
    is_stream_ordered: bool,
    /// Value of the count of stream-owned blocks when none was left.
    stream_owned_seen: AtomicU64,
}

/// Address range of a pool's memory.
#[derive(Debug)]
struct Mapping {
    device: Device,
    memory: gpu::Importer,
}

/// One process's view of a pool.
///
/// A process stores the pieces that it receives, so that they live as long as it does. It maps a
/// piece only once messages may lie in it: until then it may be replaced.
#[derive(Debug)]
pub(crate) struct Pool {
    id: PoolId,
    limit: u64,
    segment: Segment,
    control: PoolControl<MappedWords>,
    /// Created on the first use; a failure is retried on the next one.
    mapping: OnceLock<Mapping>,
    /// Stands for the memory, if this process cannot map it.
    mirror: OnceLock<Mirror>,
    /// The copy service of the node, for the mirror.
    node_copies: Option<Arc<NodeCopies>>,
    pieces: Mutex<Pieces>,
    /// Held while a piece is mapped.
    is_mapping: Mutex<()>,
    /// For copies in and out of a device's memory; created on the first use.
    stream: OnceLock<Stream>,
    copies: Copies,
    streams: Streams,
    /// The last growth request: pieces admitted at that time, and the time.
    last_growth_request: Mutex<Option<(usize, Instant)>>,
}

impl Pool {
    pub(crate) fn create(id: PoolId, limit: u64, max_blocks: u32) -> Result<Self> {
        let words = PoolControl::<MappedWords>::required_words(max_blocks, limit);
        let segment =
            Segment::create(LAYOUT, words * size_of::<u64>()).during("create pool").on(id)?;
        let control = PoolControl::format(segment.words(), id, limit, max_blocks)?;
        segment.mark_ready();
        let pool = Self::over(segment, control)?;
        // Memory of a hidden device is mapped only where it is used: that may create the context of
        // another device.
        if id.place.is_visible() {
            pool.mapping()?;
        }
        Ok(pool)
    }

    /// Maps a pool of another process.
    #[cfg(test)]
    pub(crate) fn open(control_segment: OwnedFd) -> Result<Self> {
        let pool = Self::keep(control_segment, None)?;
        pool.ensure_mapped()?;
        Ok(pool)
    }

    /// Stores a pool of another process for those that use it, even if this process cannot map it
    /// now: the copy service, if one is given, then copies its messages.
    pub(crate) fn keep(
        control_segment: OwnedFd,
        node_copies: Option<Arc<NodeCopies>>,
    ) -> Result<Self> {
        let segment = Segment::open(control_segment, LAYOUT).during("open pool")?;
        let control = PoolControl::attach(segment.words())?;
        Ok(Self { node_copies, ..Self::over(segment, control)? })
    }

    fn over(segment: Segment, control: PoolControl<MappedWords>) -> Result<Self> {
        Ok(Self {
            id: control.id()?,
            limit: control.limit(),
            segment,
            control,
            mapping: OnceLock::new(),
            mirror: OnceLock::new(),
            node_copies: None,
            pieces: Mutex::default(),
            is_mapping: Mutex::default(),
            stream: OnceLock::new(),
            copies: Copies::default(),
            streams: Streams::default(),
            last_growth_request: Mutex::default(),
        })
    }

    fn mapping(&self) -> Result<&Mapping> {
        match self.mapping.get() {
            Some(mapping) => Ok(mapping),
            None => self.create_mapping(),
        }
    }

    #[cold]
    fn create_mapping(&self) -> Result<&Mapping> {
        let device = self.id.place.mapping_device("find device to map pool")?;
        let memory = match self.id.place {
            SharedLocation::Host => device.importer(self.limit),
            SharedLocation::Device(uuid) => device.importer_of(Uuid(uuid), self.limit),
        };
        let memory = memory.during("reserve addresses of pool").on(self.id)?;
        Ok(self.mapping.get_or_init(|| Mapping { device, memory }))
    }

    /// Maps the address range; retries after an earlier failure.
    pub(crate) fn ensure_mapped(&self) -> Result<()> {
        self.mapping().map(drop)
    }

    /// Finds out how this process accesses the memory of a device that it does not see: that shows
    /// with the first piece.
    pub(crate) fn find_access(&self) -> Result<()> {
        if self.id.place.is_visible() { Ok(()) } else { self.map_admitted_pieces() }
    }

    /// Returns true if this is the control segment of this pool, and not of another pool with the
    /// same identity.
    pub(crate) fn has_control_segment(&self, control_segment: BorrowedFd<'_>) -> Result<bool> {
        let identity = |file: BorrowedFd<'_>| {
            nix::sys::stat::fstat(file).map(|found| (found.st_dev, found.st_ino))
        };
        let same =
            identity(self.control_segment()).and_then(|own| Ok(own == identity(control_segment)?));
        same.during("compare control segment of pool").on(self.id)
    }

    pub(crate) fn control_segment(&self) -> BorrowedFd<'_> {
        self.segment.as_fd()
    }

    pub(crate) fn control(&self) -> &PoolControl<MappedWords> {
        &self.control
    }

    pub(crate) fn id(&self) -> PoolId {
        self.id
    }

    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    /// The device that maps the memory, which need not be that of the memory; None if this process
    /// cannot map it.
    pub(crate) fn device(&self) -> Option<&Device> {
        self.mapping().ok().map(|mapping| &mapping.device)
    }

    /// Location of the memory as this process accesses it: the device that maps it, or the host.
    pub(crate) fn mapped_location(&self) -> Result<MemoryLocation> {
        match self.id.place {
            SharedLocation::Host => Ok(MemoryLocation::Host),
            SharedLocation::Device(_) => Ok(MemoryLocation::Device(self.mapping()?.device.name())),
        }
    }

    /// Memory for another piece, not in use yet. Fails if this process does not see the device.
    pub(crate) fn make_piece(&self, at_least: u64) -> Result<Piece> {
        let device = self.id.place.device("find device of pool")?;
        let exported = device.allocate_shared(at_least, &[]).and_then(|memory| {
            // Memory of the host is zero; that of an emulated device is memory of the host.
            if device.name().implementation == gpu::Implementation::Cuda {
                let stream = device.stream()?;
                stream.fill(&memory.whole(), 0)?;
                stream.synchronize(gpu::DEFAULT_TIMEOUT)?;
            }
            memory.export_piece(0)
        });
        let (memory, length) = exported.during("create piece of pool").on(self.id)?;
        let name = getrandom::u64().during("name piece of pool")?.max(1);
        Ok(Piece { memory, length, name })
    }

    /// Stores a piece that another process had. Idempotent; a piece that the control segment names
    /// is not replaced by another one.
    pub(crate) fn store_piece(&self, number: usize, piece: Piece) -> PieceStored {
        lock(&self.pieces).keep(number, piece, self.control.name_of(number))
    }

    /// Stores a piece that the service sends, in place of an earlier one.
    pub(crate) fn adopt_piece(&self, number: usize, piece: Piece) -> Result<()> {
        lock(&self.pieces).adopt(number, piece).on(self.id)?;
        self.control.wake();
        Ok(())
    }

    pub(crate) fn piece(&self, number: usize) -> Result<Option<Piece>> {
        let copied = lock(&self.pieces).get(number).map(Piece::try_clone).transpose();
        copied.during("duplicate piece of pool").on(self.id)
    }

    /// The number of pieces that this process has.
    pub(crate) fn held(&self) -> usize {
        lock(&self.pieces).count()
    }

    /// Messages that this process reads lie in other memory: see [`fetch`](Self::fetch).
    #[inline]
    pub(crate) fn is_mirrored(&self) -> bool {
        self.mirror.get().is_some()
    }

    /// Can streams of this process write and read messages in their order?
    pub(crate) fn is_stream_ordered(&self) -> bool {
        self.control.is_stream_ordered() && !self.is_mirrored()
    }

    /// Copies a part of a message into the mirror, if there is one.
    pub(crate) fn fetch(&self, part: &Slice) -> Result<()> {
        match self.mirror.get() {
            Some(mirror) if part.length() > 0 => mirror.fetch(part).on(self.id),
            _ => Ok(()),
        }
    }

    /// Maps the admitted pieces, as far as this process has them.
    pub(crate) fn map_admitted_pieces(&self) -> Result<()> {
        match self.map_until(self.length()) {
            // The missing pieces will be received.
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(()),
            reached => reached,
        }
    }

    #[cold]
    fn map_until(&self, end: u64) -> Result<()> {
        const OPERATION: &str = "map piece of pool";
        let mapping = self.mapping()?;
        let _one_at_a_time = lock(&self.is_mapping);
        while self.memory()?.length() < end {
            // Mapping may take a while, and pieces arrive meanwhile.
            let next = {
                let pieces = lock(&self.pieces);
                let next = pieces.next_to_map(|number| self.control.name_of(number));
                next.map(Piece::try_clone).transpose().during(OPERATION).on(self.id)?
            };
            let Some(piece) = next else {
                let (kind, detail) = match end > self.control.end() {
                    true => (ErrorKind::Malformed, "no memory was ever mapped at this address"),
                    false => {
                        (ErrorKind::WouldBlock, "this process has not received that piece yet")
                    }
                };
                return Err(Error::new("map message of pool", kind, detail).on(self.id));
            };
            match self.mirror.get() {
                Some(mirror) => mirror.add(&piece).on(self.id)?,
                None => {
                    let mapped = mapping.memory.add(piece.memory.as_fd(), piece.length);
                    let is_first = mapping.memory.memory().length() == 0;
                    match mapped {
                        Err(cause) if is_first => self.begin_mirror(mapping, &piece, cause)?,
                        mapped => mapped.during(OPERATION).on(self.id)?,
                    }
                }
            }
            lock(&self.pieces).is_mapped();
        }
        Ok(())
    }

    /// The driver maps no memory of the pool here. If this process does not see its device, the copy
    /// service may.
    #[cold]
    fn begin_mirror(&self, mapping: &Mapping, piece: &Piece, cause: gpu::Error) -> Result<()> {
        let not_mapped = cause.to_string();
        let error = cause.during("map piece of pool").on(self.id);
        let (Some(copies), SharedLocation::Device(uuid)) = (&self.node_copies, self.id.place)
        else {
            return Err(error);
        };
        if self.id.place.is_visible() {
            return Err(error);
        }
        let mirror = Mirror::new(copies, &mapping.device, Uuid(uuid), self.limit).on(self.id)?;
        if let Err(refused) = mirror.add(piece) {
            let detail = format!(
                "This process does not see its device, and the copy service does not map it either: \
                 {refused}. Run \"fabricast node\" with access to all devices in the node's directory"
            );
            return Err(error.with_detail(detail));
        }
        tracing::info!(
            pool = %self.id,
            cause = not_mapped,
            "the driver maps no memory of the pool here: the copy service copies its messages"
        );
        // One thread maps at a time.
        let _ = self.mirror.set(mirror);
        Ok(())
    }

    fn memory(&self) -> Result<&Memory> {
        match self.mirror.get() {
            Some(mirror) => Ok(mirror.memory()),
            None => Ok(self.mapping()?.memory.memory()),
        }
    }

    /// Admits a piece to the allocator once all processes have it.
    pub(crate) fn admit_piece(&self, caller: &Caller<'_>, number: usize) -> Result<()> {
        let operation = "admit piece to pool";
        let found = lock(&self.pieces).get(number).map(|piece| (piece.length, piece.name));
        let Some((length, name)) = found else {
            let detail = format!("piece {number} is not mapped");
            return Err(Error::new(operation, ErrorKind::InvalidArgument, detail).on(self.id));
        };
        self.control.admit(caller, number, length, name).on(self.id)
    }

    pub(crate) fn admitted(&self) -> usize {
        self.control.admitted()
    }

    /// Admitted bytes.
    pub(crate) fn length(&self) -> u64 {
        self.control.length()
    }

    pub(crate) fn may_grow(&self, bytes: u64) -> bool {
        let length = self.length().checked_add(bytes);
        length.is_some_and(|length| length <= self.limit) && self.admitted() < MAX_PIECES
    }

    /// The request for more memory after a block did not fit into this many pieces: none if this
    /// process requested it and no piece was added since, except after a while.
    pub(crate) fn growth_request(&self, admitted: usize, bytes: u64) -> Option<GrowthRequest> {
        if !self.may_grow(bytes) {
            return None;
        }
        let now = Instant::now();
        let mut last_growth_request = lock(&self.last_growth_request);
        let is_under_way = last_growth_request.is_some_and(|(before, when)| {
            before == admitted && now.saturating_duration_since(when) < GROWTH_RETRY
        });
        if is_under_way {
            return None;
        }
        *last_growth_request = Some((admitted, now));
        Some(GrowthRequest::new(self.id, admitted as u32, bytes))
    }

    /// Allocates a block owned by the caller.
    pub(crate) fn allocate(&self, caller: &Caller<'_>, bytes: u64) -> Result<(Block, BlockRange)> {
        let allocated = self.control.allocate(caller, Owner::participant(caller.me), bytes);
        allocated.during("allocate in pool").on(self.id)
    }

    pub(crate) fn free(&self, caller: &Caller<'_>, block: Block) -> Result<()> {
        let freed = self.control.free(caller, block, Owner::participant(caller.me));
        freed.during("free in pool").on(self.id)
    }

    /// Frees all blocks of a participant that is dead or leaves; returns their number.
    pub(crate) fn reclaim(&self, caller: &Caller<'_>, participant: Participant) -> Result<usize> {
        self.control.reclaim(caller, participant).during("reclaim in pool").on(self.id)
    }

    pub(crate) fn owners(&self, caller: &Caller<'_>) -> Result<BTreeSet<Participant>> {
        self.control.owners(caller).during("read statistics of pool").on(self.id)
    }

    pub(crate) fn statistics(&self, caller: &Caller<'_>) -> Result<Statistics> {
        self.control.statistics(caller).during("read statistics of pool").on(self.id)
    }

    /// Part of a block. [`WouldBlock`](ErrorKind::WouldBlock) as long as this process has not
    /// received the memory.
    #[inline]
    pub(crate) fn slice(&self, place: BlockRange, length: u64) -> Result<Slice> {
        if length > place.length {
            let operation = "find message in pool";
            let detail = format!("{length} bytes exceed the block of {}", place.length);
            return Err(Error::new(operation, ErrorKind::Malformed, detail).on(self.id));
        }
        let memory = self.memory()?;
        memory.slice(place.offset, length).or_else(|_| self.slice_slowly(place, length))
    }

    /// Memory passes to a topic with a block that it will write, all of it or, if the block `is_lent`
    /// to a caller, perhaps not: then bytes of other topics are cleared first.
    #[inline]
    pub(crate) fn take_over(&self, place: BlockRange, topic: u32, is_lent: bool) -> Result<()> {
        if !self.control.may_show_others(place, topic) {
            return Ok(());
        }
        if is_lent {
            self.clear(place)?;
        }
        self.control.pass_to(place, topic, is_lent);
        Ok(())
    }

    #[cold]
    fn clear(&self, place: BlockRange) -> Result<()> {
        let slice = self.slice(place, place.length)?;
        if self.id.place == SharedLocation::Host {
            bytes::clear(&slice);
            return Ok(());
        }
        let stream = self.stream()?;
        let cleared =
            stream.fill(&slice, 0).and_then(|()| stream.synchronize(gpu::DEFAULT_TIMEOUT));
        cleared.during("clear memory of another topic").on(self.id)
    }

    /// Part of a block, for a publisher: it must map the memory itself, since a copy by the service
    /// may outlive this process, and would then write into a block of another one.
    pub(crate) fn writable_slice(&self, place: BlockRange, length: u64) -> Result<Slice> {
        let slice = self.slice(place, length)?;
        self.check_writable("loan memory of topic").map(|()| slice)
    }

    /// Fails if this process cannot map the memory.
    pub(crate) fn check_writable(&self, operation: &'static str) -> Result<()> {
        if !self.is_mirrored() {
            return Ok(());
        }
        let detail = "the driver maps none of the topic's memory here, and the copy service copies for \
                      subscribers only. Create the topic on a device of this process, or on the host";
        Err(Error::new(operation, ErrorKind::NoDevice, detail).on(self.id))
    }

    #[cold]
    fn slice_slowly(&self, place: BlockRange, length: u64) -> Result<Slice> {
        self.map_until(place.offset.saturating_add(place.length))?;
        let slice = self.memory()?.slice(place.offset, length);
        slice.during("find message in pool").on(self.id)
    }

    pub(crate) fn write(&self, to: &Slice, bytes: &[u8], longest: Duration) -> Result<()> {
        if self.id.place == SharedLocation::Host {
            return bytes::write(to, bytes);
        }
        self.stream()?.upload(to, bytes, longest).during("write message to pool").on(self.id)
    }

    pub(crate) fn read(&self, from: &Slice, bytes: &mut [u8], longest: Duration) -> Result<()> {
        if self.id.place == SharedLocation::Host {
            return bytes::read(from, bytes);
        }
        self.stream()?.download(from, bytes, longest).during("read message of pool").on(self.id)
    }

    /// Copies other memory into a part of the pool, and waits for completion.
    pub(crate) fn copy(&self, to: &Slice, from: &Slice, longest: Duration) -> Result<()> {
        if self.id.place == SharedLocation::Host {
            return self.copy_to_host(to, from, longest);
        }
        let stream = self.stream()?;
        let begun = self.wait_for_default_stream(stream, from).and_then(|()| stream.copy(to, from));
        let copied = begun.and_then(|()| stream.synchronize(longest));
        copied.during("copy into message of pool").on(self.id)
    }

    fn stream(&self) -> Result<&Stream> {
        if let Some(stream) = self.stream.get() {
            return Ok(stream);
        }
        let stream = self.mapping()?.device.stream().during("create stream of pool").on(self.id)?;
        Ok(self.stream.get_or_init(|| stream))
    }
}
