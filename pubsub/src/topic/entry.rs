//! What stands in a topic's queues for a message.

use ipc::Block;

use crate::pool::SyncPoint;
use crate::settings::MAX_METADATA;

/// Words of an entry.
pub(crate) const WORDS: usize = 6;

/// What allocators count in: see the books. All places begin at a multiple of it.
const GRANULE_BITS: u32 = 8;
/// The number of granules has 32 bits: as many bytes have 40. Above the length stand the lower
/// bits of the place.
const LENGTH_BITS: u32 = 32 + GRANULE_BITS;
const LENGTH: u64 = (1 << LENGTH_BITS) - 1;
const PLACE_BITS: u32 = u64::BITS - LENGTH_BITS;
/// The others, in the word of flags.
const PLACE_ABOVE: u32 = 24;
const ABOVE: u64 = 0xff;

const METADATA: u64 = 0xffff;
const HAS_ORIGIN: u64 = 1 << 16;
/// The upper half says which turn of its block's word tells when it is there.
const IS_ORDERED: u64 = 1 << 17;

/// Stands for a message. All else about it is in its block's note.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    /// What its bytes are called in the books.
    pub(crate) block: Block,
    /// Where they begin in the pool: a block does not move while it is taken. It stands here so
    /// that readers need not look into the books, where its publisher wrote just before, and all
    /// of them would have to wait for the same line of memory after this one.
    pub(crate) offset: u64,
    /// How many.
    pub(crate) length: u64,
    /// Its publisher: the how manieth of the topic on its node, and its line.
    pub(crate) publisher: u64,
    /// The how manieth of its publisher it is.
    pub(crate) sequence: u64,
    /// When it was published, in nanoseconds since 1970.
    pub(crate) published_at: u64,
    /// Bytes of metadata in its note.
    pub(crate) metadata: u16,
    /// Does the note tell which node it comes from?
    pub(crate) has_origin: bool,
    /// A stream writes it, and says in this turn of its block's word that it has.
    pub(crate) sync_point: Option<SyncPoint>,
}

impl Entry {
    #[inline]
    pub(crate) fn to_words(self) -> [u64; WORDS] {
        let origin = if self.has_origin { HAS_ORIGIN } else { 0 };
        let sync_point = self
            .sync_point
            .map_or(0, |sync_point| u64::from(sync_point.to_bits()) << 32 | IS_ORDERED);
        let place = self.offset >> GRANULE_BITS;
        let above = (place >> PLACE_BITS & ABOVE) << PLACE_ABOVE;
        [
            self.block.to_bits(),
            self.length & LENGTH | place << LENGTH_BITS,
            self.publisher,
            self.sequence,
            self.published_at,
            u64::from(self.metadata) | origin | above | sync_point,
        ]
    }

    #[inline]
    pub(crate) fn from_words(words: [u64; WORDS]) -> Self {
        let metadata = (words[5] & METADATA) as u16;
        let place = words[1] >> LENGTH_BITS | (words[5] >> PLACE_ABOVE & ABOVE) << PLACE_BITS;
        let (is_stream_ordered, upper) = (words[5] & IS_ORDERED != 0, (words[5] >> 32) as u32);
        Self {
            block: Block::from_bits(words[0]),
            offset: place << GRANULE_BITS,
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
    fn an_entry_is_what_it_was() {
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
