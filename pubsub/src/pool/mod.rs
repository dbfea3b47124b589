//! Memory for messages: pieces of memory that all processes of a node map, and the books that
//! say what of it is whose.

mod bytes;
mod copies;
mod ledger;
mod note;
#[cfg(test)]
mod tests;

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use gpu::{Device, DeviceName, Slice, Stream, Uuid};
use ipc::{Block, Caller, Layout, MappedWords, Owner, Participant, Place, Segment, Statistics};
use serde::{Deserialize, Serialize};

use crate::below;
use crate::error::{Error, ErrorKind, Result};
use crate::settings::SharedPlace;

use self::copies::Copies;

pub(crate) use self::bytes::{borrow, borrow_mut};
pub(crate) use self::copies::Begun;
pub(crate) use self::ledger::{Ledger, MOST_PIECES};
pub use self::note::{Metadata, Times, Way};
pub(crate) use self::note::{Note, Stage, origin_words};

const LAYOUT: Layout = Layout::new("fabricast pool", 1);
/// The host's memory is a device's, too: of the one that is made of it.
const HOST: DeviceName = DeviceName::stand_in(0);
/// A process asks for more memory again only after this time, if none came.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// Whose messages lie in a pool. Two pools, since with one two nodes that publish to each
/// other may each wait for the room that the other's messages take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, PartialOrd, Ord)]
pub(crate) enum Direction {
    /// Of this node's processes.
    Here,
    /// Of other nodes.
    Arrivals,
}

/// Which of a node's pools.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct PoolId {
    pub(crate) place: SharedPlace,
    pub(crate) direction: Direction,
}

impl fmt::Display for PoolId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let direction = match self.direction {
            Direction::Here => "published",
            Direction::Arrivals => "arriving",
        };
        match self.place {
            SharedPlace::Host => write!(f, "{direction} messages on the host"),
            SharedPlace::Device(uuid) => write!(f, "{direction} messages on {}", Uuid(uuid)),
        }
    }
}

impl SharedPlace {
    /// The device whose memory it is, as this process sees it.
    pub(crate) fn device(self) -> Result<Device> {
        let operation = "find the device of a pool";
        match self {
            Self::Host => Device::open(HOST),
            Self::Device(uuid) => Device::find(Uuid(uuid)),
        }
        .map_err(|cause| Error::because(operation, ErrorKind::Unknown, cause))
    }
}

/// One process's view of a pool.
#[derive(Debug)]
pub(crate) struct Pool {
    id: PoolId,
    limit: u64,
    segment: Segment,
    ledger: Ledger<MappedWords>,
    device: Device,
    memory: gpu::Pool,
    /// What was mapped, kept for those that come later.
    pieces: Mutex<Vec<(OwnedFd, u64)>>,
    /// For copies in and out of a device's memory; made when one is first needed.
    stream: OnceLock<Stream>,
    copies: Copies,
    /// When this process last asked for more: pieces admitted then and one, and the time.
    asked: Mutex<Option<(usize, Instant)>>,
}

impl Pool {
    /// Books without memory.
    pub(crate) fn create(id: PoolId, limit: u64, most_blocks: u32) -> Result<Self> {
        let operation = "make a pool";
        let words = Ledger::<MappedWords>::words_needed(most_blocks);
        let segment = Segment::create(LAYOUT, words * size_of::<u64>())
            .map_err(|cause| below::of_segment(operation, cause).on(id))?;
        let ledger = Ledger::format(segment.words(), id, limit, most_blocks)?;
        segment.mark_ready();
        Self::over(segment, ledger)
    }

    /// What another process made.
    pub(crate) fn open(books: OwnedFd) -> Result<Self> {
        let operation = "open a pool";
        let segment =
            Segment::open(books, LAYOUT).map_err(|cause| below::of_segment(operation, cause))?;
        let ledger = Ledger::attach(segment.words())?;
        Self::over(segment, ledger)
    }

    fn over(segment: Segment, ledger: Ledger<MappedWords>) -> Result<Self> {
        let operation = "reserve a pool's addresses";
        let (id, limit) = (ledger.id()?, ledger.limit());
        let device = id.place.device()?;
        let memory = gpu::Pool::attach(&device, limit)
            .map_err(|cause| below::of_device(operation, cause).on(id))?;
        Ok(Self {
            id,
            limit,
            segment,
            ledger,
            device,
            memory,
            pieces: Mutex::default(),
            stream: OnceLock::new(),
            copies: Copies::default(),
            asked: Mutex::default(),
        })
    }

    pub(crate) fn books(&self) -> BorrowedFd<'_> {
        self.segment.as_fd()
    }

    pub(crate) fn ledger(&self) -> &Ledger<MappedWords> {
        &self.ledger
    }

    pub(crate) fn id(&self) -> PoolId {
        self.id
    }

    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    // ------------------------------------------------------------- pieces

    /// Memory for a further piece: neither mapped nor usable yet.
    pub(crate) fn make_piece(&self, at_least: u64) -> Result<(OwnedFd, u64)> {
        let made = self.device.allocate_shared(at_least, &[]);
        made.and_then(|memory| memory.export_piece(0))
            .map_err(|cause| below::of_device("make a piece of a pool", cause).on(self.id))
    }

    /// Maps a piece, and keeps its descriptor. Once more is harmless.
    pub(crate) fn map_piece(&self, number: usize, descriptor: OwnedFd, length: u64) -> Result<()> {
        let operation = "map a piece of a pool";
        let mut pieces = self.kept();
        if number < pieces.len() {
            return Ok(());
        }
        if number > pieces.len() || number >= MOST_PIECES {
            let detail = format!("piece {number}, where {} are mapped", pieces.len());
            return Err(Error::new(operation, ErrorKind::InvalidArgument, detail).on(self.id));
        }
        let mapped = self.memory.extend(descriptor.as_fd(), length);
        let mapped = mapped.map_err(|cause| below::of_device(operation, cause).on(self.id))?;
        pieces.push((descriptor, mapped.length));
        Ok(())
    }

    /// What is mapped, for another process to map.
    pub(crate) fn pieces(&self) -> Result<Vec<(OwnedFd, u64)>> {
        let copy = |(descriptor, length): &(OwnedFd, u64)| Ok((descriptor.try_clone()?, *length));
        let pieces = self.kept().iter().map(copy).collect::<std::io::Result<_>>();
        pieces.map_err(|cause| Error::of("hand on the pieces of a pool", cause).on(self.id))
    }

    fn kept(&self) -> MutexGuard<'_, Vec<(OwnedFd, u64)>> {
        self.pieces.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets everybody allocate from a piece that all have mapped.
    pub(crate) fn admit_piece(&self, caller: &Caller<'_>, number: usize) -> Result<()> {
        let operation = "admit a piece to a pool";
        let length = self.kept().get(number).map(|(_, length)| *length);
        let Some(length) = length else {
            let detail = format!("piece {number} is not mapped");
            return Err(Error::new(operation, ErrorKind::InvalidArgument, detail).on(self.id));
        };
        self.ledger.admit(caller, number, length).map_err(|error| error.on(self.id))
    }

    pub(crate) fn admitted(&self) -> usize {
        self.ledger.admitted()
    }

    /// Bytes that were admitted.
    pub(crate) fn length(&self) -> u64 {
        self.ledger.length()
    }

    pub(crate) fn may_grow(&self, bytes: u64) -> bool {
        let length = self.length().checked_add(bytes);
        length.is_some_and(|length| length <= self.limit) && self.admitted() < MOST_PIECES
    }

    /// Should this process ask for so many bytes more? Not if it did, and nothing came since;
    /// but after a while again.
    pub(crate) fn should_ask(&self, bytes: u64) -> bool {
        if !self.may_grow(bytes) {
            return false;
        }
        let (admitted, now) = (self.admitted(), Instant::now());
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        let is_under_way = asked.is_some_and(|(before, when)| {
            before == admitted && now.saturating_duration_since(when) < ASK_AGAIN
        });
        if !is_under_way {
            *asked = Some((admitted, now));
        }
        !is_under_way
    }

    // ------------------------------------------------------------- blocks

    /// In the caller's own name.
    pub(crate) fn allocate(&self, caller: &Caller<'_>, bytes: u64) -> Result<(Block, Place)> {
        let owner = Owner::participant(caller.me);
        let allocated = self.ledger.allocate(caller, owner, bytes);
        allocated.map_err(|cause| below::of_allocator("allocate in a pool", cause).on(self.id))
    }

    /// What the caller allocated.
    pub(crate) fn free(&self, caller: &Caller<'_>, block: Block) -> Result<()> {
        let freed = self.ledger.free(caller, block, Owner::participant(caller.me));
        freed.map_err(|cause| below::of_allocator("free in a pool", cause).on(self.id))
    }

    /// Frees all that somebody owns who is dead, or leaves; gives how many blocks.
    pub(crate) fn reclaim(&self, caller: &Caller<'_>, who: Participant) -> Result<usize> {
        let reclaimed = self.ledger.reclaim(caller, who);
        reclaimed.map_err(|cause| below::of_allocator("reclaim in a pool", cause).on(self.id))
    }

    pub(crate) fn statistics(&self, caller: &Caller<'_>) -> Result<Statistics> {
        let statistics = self.ledger.statistics(caller);
        statistics.map_err(|cause| below::of_allocator("look at a pool", cause).on(self.id))
    }

    // -------------------------------------------------------------- bytes

    pub(crate) fn memory(&self) -> &gpu::Memory {
        self.memory.memory()
    }

    /// So many bytes of a block's place.
    pub(crate) fn slice(&self, place: Place, length: u64) -> Result<Slice> {
        let operation = "find a message in its pool";
        if length > place.length {
            let detail = format!("{length} bytes in a block of {}", place.length);
            return Err(Error::new(operation, ErrorKind::Malformed, detail).on(self.id));
        }
        let slice = self.memory().slice(place.offset, length);
        slice.map_err(|cause| below::of_device(operation, cause).on(self.id))
    }

    /// Copies bytes into a part of the pool.
    pub(crate) fn write(&self, to: &Slice, bytes: &[u8], longest: Duration) -> Result<()> {
        if self.id.place == SharedPlace::Host {
            return bytes::write(to, bytes);
        }
        let written = self.stream()?.upload(to, bytes, longest);
        written.map_err(|cause| below::of_device("write a message", cause).on(self.id))
    }

    /// Copies bytes out of a part of the pool.
    pub(crate) fn read(&self, from: &Slice, bytes: &mut [u8], longest: Duration) -> Result<()> {
        if self.id.place == SharedPlace::Host {
            return bytes::read(from, bytes);
        }
        let read = self.stream()?.download(from, bytes, longest);
        read.map_err(|cause| below::of_device("read a message", cause).on(self.id))
    }

    /// Copies other memory into a part of the pool, and waits until it is there.
    pub(crate) fn copy(&self, to: &Slice, from: &Slice, longest: Duration) -> Result<()> {
        let operation = "copy into a message";
        let on = |cause| below::of_device(operation, cause).on(self.id);
        if self.id.place == SharedPlace::Host {
            return self.copy_to_host(to, from, longest);
        }
        let stream = self.stream()?;
        stream.copy(to, from).map_err(on)?;
        stream.synchronize(longest).map_err(on)
    }

    fn stream(&self) -> Result<&Stream> {
        if let Some(stream) = self.stream.get() {
            return Ok(stream);
        }
        let stream = self.device.stream();
        let stream =
            stream.map_err(|cause| below::of_device("make a stream", cause).on(self.id))?;
        Ok(self.stream.get_or_init(|| stream))
    }
}
