//! Entries of a topic's queues: one for each message.

use ipc::{Block, Queue, WordRange};

use crate::pool::SyncPoint;
use crate::settings::MAX_METADATA;

/// Words of an entry.
pub(crate) const WORDS: usize = 6;

pub(crate) type TopicQueue<W> = Queue<WordRange<W>, WORDS>;

/// Unit of allocators: see the control segment. All offsets are multiples of it.
const GRANULE_BITS: u32 = 8;
/// The number of granules has 32 bits, so a length in bytes has 40. The low bits of the offset are
/// stored above the length.
const LENGTH_BITS: u32 = 32 + GRANULE_BITS;
const LENGTH: u64 = (1 << LENGTH_BITS) - 1;
const LOW_BITS: u32 = u64::BITS - LENGTH_BITS;
/// The high bits of the offset are stored in the word of flags.
const HIGH_SHIFT: u32 = 24;
const HIGH_MASK: u64 = 0xff;

const METADATA: u64 = 0xffff;
const HAS_ORIGIN: u64 = 1 << 16;
/// The upper half of the word is a sync point.
const IS_ORDERED: u64 = 1 << 17;

/// A queue entry of a message. Everything else is in the sample info of its block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) block: Block,
    /// Offset in the pool: a block does not move while it is allocated. It is stored here so that
    /// readers need not load the allocator's words: the publisher has just written these, and all
    /// readers would wait for that cache line.
    pub(crate) offset: u64,
    pub(crate) length: u64,
    /// The message's publisher: serial and slot.
    pub(crate) publisher: u64,
    pub(crate) sequence: u64,
    /// When it was published, in nanoseconds since 1970.
    pub(crate) published_at: u64,
    /// Length of the metadata in the sample info.
    pub(crate) metadata: u16,
    /// True if the sample info has the node of its publisher.
    pub(crate) has_origin: bool,
    /// A stream writes it, and signals this sync point.
    pub(crate) sync_point: Option<SyncPoint>,
}

impl Entry {
    #[inline]
    pub(crate) fn to_words(self) -> [u64; WORDS] {
        let origin = if self.has_origin { HAS_ORIGIN } else { 0 };
        let sync_point = self
            .sync_point
            .map_or(0, |sync_point| u64::from(sync_point.to_bits()) << 32 | IS_ORDERED);
        let granule = self.offset >> GRANULE_BITS;
        let high = (granule >> LOW_BITS & HIGH_MASK) << HIGH_SHIFT;
        [
            self.block.to_bits(),
            self.length & LENGTH | granule << LENGTH_BITS,
            self.publisher,
            self.sequence,
            self.published_at,
            u64::from(self.metadata) | origin | high | sync_point,
        ]
    }

    #[inline]
    pub(crate) fn from_words(words: [u64; WORDS]) -> Self {
        let metadata = (words[5] & METADATA) as u16;
        let granule = words[1] >> LENGTH_BITS | (words[5] >> HIGH_SHIFT & HIGH_MASK) << LOW_BITS;
        let (is_stream_ordered, upper) = (words[5] & IS_ORDERED != 0, (words[5] >> 32) as u32);
        Self {
            block: Block::from_bits(words[0]),
            offset: granule << GRANULE_BITS,
            length: words[1] & LENGTH,
            publisher: words[2],
            sequence: words[3],
            published_at: words[4],
            metadata: metadata.min(MAX_METADATA as u16),
            has_origin: words[5] & HAS_ORIGIN != 0,
            sync_point: is_stream_ordered.then(|| SyncPoint::from_bits(upper)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::GRANULE;

    #[test]
    fn entry_is_read_back_from_its_words() {
        assert_eq!(1 << GRANULE_BITS, GRANULE);
        let largest = u64::from(u32::MAX) << GRANULE_BITS;
        for (offset, length) in [(0, 0), (GRANULE, 1), (largest, largest), (1 << 32, 1 << 39)] {
            for (metadata, has_origin, sync_point) in
                [(0, false, None), (256, true, Some(SyncPoint::from_bits(u32::MAX)))]
            {
                let entry = Entry {
                    block: Block::from_bits(0x1234_5678_9abc_def0),
                    offset,
                    length,
                    publisher: u64::MAX,
                    sequence: 1 << 63,
                    published_at: 7,
                    metadata,
                    has_origin,
                    sync_point,
                };
                assert_eq!(Entry::from_words(entry.to_words()), entry);
            }
        }
    }
}
