//! What stands in a topic's queues for a message.

use ipc::Block;

use crate::pool::Turn;
use crate::settings::MOST_METADATA;

/// Words of an entry.
pub(crate) const WORDS: usize = 6;

const METADATA: u64 = 0xffff;
const HAS_ORIGIN: u64 = 1 << 16;
/// The upper half says which turn of its block's word tells when it is there.
const IS_ORDERED: u64 = 1 << 17;

/// Stands for a message. All else about it is in its block's note.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Where its bytes are.
    pub(crate) block: Block,
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
    pub(crate) turn: Option<Turn>,
}

impl Entry {
    #[inline]
    pub(crate) fn to_words(self) -> [u64; WORDS] {
        let origin = if self.has_origin { HAS_ORIGIN } else { 0 };
        let turn = self.turn.map_or(0, |turn| u64::from(turn.to_bits()) << 32 | IS_ORDERED);
        [
            self.block.to_bits(),
            self.length,
            self.publisher,
            self.sequence,
            self.published_at,
            u64::from(self.metadata) | origin | turn,
        ]
    }

    #[inline]
    pub(crate) fn from_words(words: [u64; WORDS]) -> Self {
        let metadata = (words[5] & METADATA) as u16;
        Self {
            block: Block::from_bits(words[0]),
            length: words[1],
            publisher: words[2],
            sequence: words[3],
            published_at: words[4],
            metadata: metadata.min(MOST_METADATA as u16),
            has_origin: words[5] & HAS_ORIGIN != 0,
            turn: (words[5] & IS_ORDERED != 0).then(|| Turn::from_bits((words[5] >> 32) as u32)),
        }
    }
}
