//! Sample info: what is stored of a message beside its entry in a queue. These are its times, path,
//! origin and metadata, for each block.

use std::fmt;
use std::ops::Deref;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::fence;

use ipc::{Block, Words};

use crate::ids::{bytes_to_words, id_from_words, id_to_words};
use crate::settings::MAX_METADATA;

// Words of a sample info.
const BLOCK: usize = 0;
const PATH: usize = 6;
const ORIGIN: usize = 7;
/// The words between here and the metadata are only valid for messages of other nodes.
const END: usize = 11;
const FIRST: usize = 11;
const SINCE: usize = 12;
const METADATA: usize = 16;
pub(super) const WORDS: usize = METADATA + MAX_METADATA / size_of::<u64>();

/// A stage of delivery, as the index of its timestamp; [`Times`] describes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    Allocated = 1,
    Filled = 2,
    Wire = 3,
    Copied = 4,
    Published = 5,
    Posted = 9,
    Copying = 10,
}

/// When a message reached each stage of delivery, in nanoseconds since 1970; 0 for a skipped stage.
/// Stages on another node are measured by its clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Times {
    /// When the message's block was allocated, by its publisher or by replication.
    pub allocated: u64,
    /// When the publisher had filled the message. On another node: when it had been copied from its
    /// device, or, without a copy, was [posted](Self::posted).
    pub filled: u64,
    /// When the last byte was received.
    pub wire: u64,
    /// When the message was copied to its block.
    pub copied: u64,
    /// When the message was delivered to the subscribers of this node.
    pub published: u64,
    /// When the message's node began to write or copy it.
    pub posted: u64,
    /// The copy of its first bytes to its block began.
    pub copying: u64,
}

/// Bytes that a publisher attached to a message: at most 256.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Metadata {
    bytes: [u8; MAX_METADATA],
    length: usize,
}

impl Metadata {
    pub(crate) const NONE: Self = Self { bytes: [0; MAX_METADATA], length: 0 };

    /// Zeros, at most the maximum length.
    pub(crate) fn zeroed(length: usize) -> Self {
        Self { length: length.min(MAX_METADATA), ..Self::NONE }
    }

    /// None if these are too many bytes.
    #[doc(hidden)]
    pub fn new(from: &[u8]) -> Option<Self> {
        let mut metadata = Self::zeroed(from.len());
        metadata.bytes.get_mut(..from.len())?.copy_from_slice(from);
        Some(metadata)
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[..self.length]
    }
}

impl Deref for Metadata {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

impl fmt::Debug for Metadata {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Metadata({:?})", &**self)
    }
}

/// The path by which a message was delivered.
///
/// ```
/// assert_eq!(pubsub::DeliveryPath::StagedRing.to_string(), "staged-ring");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeliveryPath {
    /// Published on this node, and read where its publisher wrote it.
    SharedMemory = 0,
    /// From another node by a ring, with one copy.
    Ring = 1,
    /// From another node by a ring of pinned memory, from which a device copied it.
    StagedRing = 2,
    /// From another node by a ring in device memory, which the fabric writes itself, and from which
    /// the device copied it.
    DirectRing = 3,
    /// Copied by the copy service, since this process cannot map the topic's memory.
    ServiceCopied = 4,
}

impl fmt::Display for DeliveryPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SharedMemory => "shared-memory",
            Self::Ring => "ring",
            Self::StagedRing => "staged-ring",
            Self::DirectRing => "direct-ring",
            Self::ServiceCopied => "service-copied",
        })
    }
}

/// The sample info of a block. The publisher writes it before it publishes; holders of the message
/// read it.
#[derive(Debug)]
pub(crate) struct SampleInfo<'a, W> {
    words: &'a W,
    first: usize,
}

impl<'a, W: Words> SampleInfo<'a, W> {
    pub(crate) fn new(words: &'a W, first: usize) -> Self {
        Self { words, first }
    }

    #[inline]
    fn word(&self, which: usize) -> u64 {
        self.words.load(self.first + which, Relaxed)
    }

    /// Starts to fetch the cache lines, which readers of the previous message hold.
    #[inline]
    pub(crate) fn prefetch_for_write(&self) {
        for which in [BLOCK, PATH + 2, METADATA] {
            self.words.prefetch_for_write(self.first + which);
        }
    }

    #[inline]
    pub(crate) fn begin(&self, block: Block, now: u64) {
        self.words.store(self.first + BLOCK, block.to_bits(), Relaxed);
        // A reader of the following stores also sees the block.
        fence(Release);
        for which in BLOCK + 1..END {
            self.words.store(self.first + which, 0, Relaxed);
        }
        self.stamp(Stage::Allocated, now);
    }

    /// Returns true if the sample info still belonged to this block after it was read, and not to a
    /// later one.
    pub(crate) fn belongs_to(&self, block: Block) -> bool {
        fence(Acquire);
        self.word(BLOCK) == block.to_bits()
    }

    #[inline]
    pub(crate) fn stamp(&self, stage: Stage, now: u64) {
        self.words.store(self.first + stage as usize, now, Relaxed);
    }

    #[inline]
    pub(crate) fn times(&self) -> Times {
        let time = |stage: Stage| self.word(stage as usize);
        Times {
            allocated: time(Stage::Allocated),
            filled: time(Stage::Filled),
            wire: time(Stage::Wire),
            copied: time(Stage::Copied),
            published: time(Stage::Published),
            posted: time(Stage::Posted),
            copying: time(Stage::Copying),
        }
    }

    /// Set for messages of other nodes only.
    pub(crate) fn set_path(&self, path: DeliveryPath) {
        self.words.store(self.first + PATH, path as u64, Relaxed);
    }

    pub(crate) fn path(&self) -> DeliveryPath {
        match self.word(PATH) {
            1 => DeliveryPath::Ring,
            2 => DeliveryPath::StagedRing,
            3 => DeliveryPath::DirectRing,
            _ => DeliveryPath::SharedMemory,
        }
    }

    /// The node of its publisher.
    pub(crate) fn set_origin(&self, origin: &[u8; 16]) {
        for (at, word) in id_to_words(origin).into_iter().enumerate() {
            self.words.store(self.first + ORIGIN + at, word, Relaxed);
        }
    }

    pub(crate) fn origin(&self) -> [u8; 16] {
        id_from_words([ORIGIN, ORIGIN + 1].map(|at| self.word(at)))
    }

    /// For a message of another node: where the messages of its publisher start for this node.
    pub(crate) fn set_start(&self, [first, since]: [u64; 2]) {
        self.words.store(self.first + FIRST, first, Relaxed);
        self.words.store(self.first + SINCE, since, Relaxed);
    }

    pub(crate) fn start(&self) -> [u64; 2] {
        [FIRST, SINCE].map(|at| self.word(at))
    }

    /// Stores the bytes that fit; the entry holds the length.
    pub(crate) fn set_metadata(&self, bytes: &[u8]) {
        for (at, word) in (METADATA..WORDS).zip(bytes_to_words(bytes)) {
            self.words.store(self.first + at, word, Release);
        }
    }

    pub(crate) fn metadata(&self, length: usize) -> Metadata {
        let length = length.min(MAX_METADATA);
        let mut bytes = [0; MAX_METADATA];
        for (at, to) in bytes.chunks_exact_mut(8).take(length.div_ceil(8)).enumerate() {
            to.copy_from_slice(&self.word(METADATA + at).to_le_bytes());
        }
        bytes[length..].fill(0);
        Metadata { bytes, length }
    }
}
