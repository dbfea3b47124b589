//! A pool's books, as they lie in shared memory.
//!
//! ```text
//!  0 most blocks     4 what place           8 a doorbell
//!  1 limit           5 its device          16 do streams use it
//!  2 direction       6   (two words)       17 blocks that were left to streams
//!  3 pieces admitted 7 changes             24 lengths of admitted pieces
//!                                             their names
//!                                             the allocator
//!                                             a note for each block
//!                                             its words for streams, from a page's start on
//! ```

mod ordered;

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Instant;

use ipc::{
    Allocator, AllocatorError, Block, Caller, Doorbell, Owner, Part, Participant, Place, Spin,
    Statistics, Words,
};

use super::note::{self, Note};
use super::{Direction, PoolId};
use crate::below;
use crate::clock;
use crate::error::{Error, ErrorKind, Result};
use crate::settings::SharedPlace;

pub use self::ordered::Readiness;
pub(crate) use self::ordered::{LEFT_TO_STREAMS, Turn};

const MOST_BLOCKS: usize = 0;
const LIMIT: usize = 1;
const DIRECTION: usize = 2;
const ADMITTED: usize = 3;
const PLACE: usize = 4;
const UUID: usize = 5;
const CHANGES: usize = 7;
const BELL: usize = 8;
const STREAMS: usize = 16;
const LEFT: usize = 17;
const LENGTHS: usize = 24;
/// Pieces that a pool may ever have.
pub(crate) const MOST_PIECES: usize = 1024;
const NAMES: usize = LENGTHS + MOST_PIECES;
pub(super) const ALLOCATOR: usize = NAMES + MOST_PIECES;

/// Every block begins at a multiple of this: fit for any type, also on devices.
pub(crate) const GRANULE: u64 = 256;

type What<T> = std::result::Result<T, AllocatorError>;

/// A pool's books.
#[derive(Debug)]
pub(crate) struct Ledger<W> {
    words: W,
    allocator: Allocator<Part<W>>,
    bell: Doorbell<Part<W>>,
    most_blocks: u32,
    /// Where the words for streams lie.
    ordered: Range<usize>,
    /// On a device: only there messages are handed over in the order of streams.
    is_ordered: bool,
    /// So many blocks had been left to streams when none was left any more.
    left_seen: AtomicU64,
}

fn part<W: Words>(words: W, first: usize, count: usize) -> Result<Part<W>> {
    Part::new(words, first, count)
        .ok_or_else(|| Error::new("open a pool", ErrorKind::Malformed, "its books are cut off"))
}

impl<W: Words + Clone> Ledger<W> {
    pub(crate) fn words_needed(most_blocks: u32) -> usize {
        Self::ordered_words(most_blocks).end
    }

    fn first_note(most_blocks: u32) -> usize {
        ALLOCATOR + Allocator::<W>::words_needed(most_blocks).next_multiple_of(8)
    }

    fn ordered_words(most_blocks: u32) -> Range<usize> {
        let notes = most_blocks as usize * note::WORDS;
        ordered::range_of(most_blocks, Self::first_note(most_blocks) + notes, ordered::page())
    }

    /// Books over zeroed words.
    pub(crate) fn format(words: W, id: PoolId, limit: u64, most_blocks: u32) -> Result<Self> {
        let operation = "make a pool";
        let [place, low, high] = id.place.words();
        let count = Allocator::<W>::words_needed(most_blocks);
        let allocator = part(words.clone(), ALLOCATOR, count)?;
        Allocator::format_zeroed(allocator, most_blocks, GRANULE)
            .map_err(|cause| below::of_allocator(operation, cause).on(id))?;
        let direction = u64::from(id.direction == Direction::Arrivals);
        words.store(MOST_BLOCKS, u64::from(most_blocks), Relaxed);
        words.store(LIMIT, limit, Relaxed);
        words.store(DIRECTION, direction, Relaxed);
        words.store(UUID, low, Relaxed);
        words.store(UUID + 1, high, Relaxed);
        words.store(PLACE, place, Release);
        Self::attach(words)
    }

    pub(crate) fn attach(words: W) -> Result<Self> {
        let operation = "open a pool";
        let malformed = |detail| Error::new(operation, ErrorKind::Malformed, detail);
        let most_blocks = u32::try_from(words.load(MOST_BLOCKS, Relaxed));
        let most_blocks = most_blocks.map_err(|_| malformed("its numbers make no sense"))?;
        let ordered = Self::ordered_words(most_blocks);
        if words.count() < ordered.end {
            return Err(malformed("its books are cut off"));
        }
        let count = Allocator::<W>::words_needed(most_blocks);
        let allocator = Allocator::attach(part(words.clone(), ALLOCATOR, count)?)
            .map_err(|cause| below::of_allocator(operation, cause))?;
        let bell = part(words.clone(), BELL, Doorbell::<W>::WORDS)?;
        let bell = Doorbell::new(bell).ok_or_else(|| malformed("its bell is cut off"))?;
        let (is_ordered, left_seen) = (false, AtomicU64::new(0));
        let mut ledger =
            Self { words, allocator, bell, most_blocks, ordered, is_ordered, left_seen };
        ledger.is_ordered = ledger.id()?.place != SharedPlace::Host;
        Ok(ledger)
    }

    pub(crate) fn id(&self) -> Result<PoolId> {
        let operation = "open a pool";
        let direction = match self.words.load(DIRECTION, Relaxed) {
            0 => Direction::Here,
            1 => Direction::Arrivals,
            _ => return Err(Error::new(operation, ErrorKind::Malformed, "of no direction")),
        };
        let place = [PLACE, UUID, UUID + 1].map(|at| self.words.load(at, Acquire));
        let place = SharedPlace::from_words(place)
            .ok_or_else(|| Error::new(operation, ErrorKind::Malformed, "of no place"))?;
        Ok(PoolId { place, direction })
    }

    pub(crate) fn limit(&self) -> u64 {
        self.words.load(LIMIT, Relaxed)
    }

    // ------------------------------------------------------------- pieces

    pub(crate) fn admitted(&self) -> usize {
        (self.words.load(ADMITTED, Acquire) as usize).min(MOST_PIECES)
    }

    /// Bytes of the first pieces.
    fn length_of(&self, pieces: usize) -> u64 {
        let lengths = (0..pieces).map(|at| self.words.load(LENGTHS + at, Acquire));
        lengths.fold(0, u64::saturating_add)
    }

    pub(crate) fn length(&self) -> u64 {
        self.length_of(self.admitted())
    }

    /// The name of the piece that has this number, if there are messages in it, or may be soon.
    pub(crate) fn name_of(&self, number: usize) -> Option<u64> {
        let word = (number < MOST_PIECES).then(|| self.words.load(NAMES + number, Acquire));
        word.filter(|name| *name != 0)
    }

    /// Where messages end, as far as pieces have names.
    pub(crate) fn end(&self) -> u64 {
        let named = (0..MOST_PIECES).take_while(|number| self.name_of(*number).is_some());
        self.length_of(named.count())
    }

    /// Gives the next piece to the allocator. Harmless if that was done before, or if it was
    /// cut short.
    pub(crate) fn admit(
        &self,
        caller: &Caller<'_>,
        number: usize,
        length: u64,
        name: u64,
    ) -> Result<()> {
        let operation = "admit a piece to a pool";
        let admitted = self.admitted();
        if number < admitted {
            return Ok(());
        }
        if number > admitted || number >= MOST_PIECES || name == 0 {
            let detail = format!("piece {number}, where {admitted} are admitted");
            return Err(Error::new(operation, ErrorKind::InvalidArgument, detail));
        }
        let on = |cause| below::of_allocator(operation, cause);
        let first = self.length_of(number);
        // What it has is what was admitted, and perhaps this very piece: then messages may lie
        // there, and no other memory may take its place.
        if self.allocator.statistics(caller).map_err(on)?.total <= first {
            // First of all, since from then on anybody may be given a block of it.
            self.words.store(LENGTHS + number, length, Release);
            self.words.store(NAMES + number, name, Release);
            self.allocator.extend(caller, first, length).map_err(on)?;
        } else if self.name_of(number) != Some(name) {
            let detail = format!("piece {number} is another one, and is not there");
            return Err(Error::new(operation, ErrorKind::Failed, detail));
        }
        self.words.store(ADMITTED, number as u64 + 1, Release);
        self.changed();
        Ok(())
    }

    /// Something came that this process waits for: it looks again.
    pub(crate) fn wake(&self) {
        self.words.fetch_add(CHANGES, 1);
        self.bell.ring_anyway();
    }

    // ------------------------------------------------------------- blocks

    /// Allocates, and begins the block's note.
    #[inline]
    pub(crate) fn allocate(
        &self,
        caller: &Caller<'_>,
        owner: Owner,
        bytes: u64,
    ) -> What<(Block, Place)> {
        let (block, place) = self.allocator.allocate(caller, owner, bytes.max(1), GRANULE)?;
        let note = self.note(block);
        note.will_write();
        note.begin(block, clock::now());
        Ok((block, place))
    }

    #[inline]
    pub(crate) fn free(&self, caller: &Caller<'_>, block: Block, owner: Owner) -> What<()> {
        self.allocator.free(caller, block, owner)?;
        self.changed();
        Ok(())
    }

    /// Frees, unless that was done before. False if it could not be done now.
    #[inline]
    pub(crate) fn dispose(&self, caller: &Caller<'_>, block: Block, owner: Owner) -> bool {
        match self.free(caller, block, owner) {
            Ok(()) | Err(AllocatorError::Stale(_) | AllocatorError::NotYours { .. }) => true,
            Err(error) => {
                tracing::warn!(?block, %error, "a block could not be freed");
                false
            }
        }
    }

    pub(crate) fn transfer(&self, block: Block, from: Owner, to: Owner) -> What<()> {
        self.allocator.transfer(block, from, to)
    }

    pub(crate) fn owner(&self, block: Block) -> What<Owner> {
        self.allocator.owner(block)
    }

    #[inline]
    pub(crate) fn find(&self, block: Block) -> What<Place> {
        self.allocator.find(block)
    }

    /// Frees all that one owns who is dead, and says to streams that its messages will not be
    /// written any more; also wakes those whom that one did not wake.
    pub(crate) fn reclaim(&self, caller: &Caller<'_>, who: Participant) -> What<usize> {
        let owner = Owner::participant(who);
        self.poison_all(who);
        let freed = self.allocator.reclaim(caller, owner, |_| false)?;
        self.collect(caller)?;
        self.wake();
        Ok(freed)
    }

    pub(crate) fn statistics(&self, caller: &Caller<'_>) -> What<Statistics> {
        self.allocator.statistics(caller)
    }

    pub(crate) fn most_blocks(&self) -> u32 {
        self.most_blocks
    }

    /// Those that have blocks in their own name.
    pub(crate) fn owners(&self, caller: &Caller<'_>) -> What<BTreeSet<Participant>> {
        let blocks = self.allocator.blocks(caller)?;
        Ok(blocks.into_iter().filter_map(|block| block.owner?.as_participant()).collect())
    }

    /// The note of a block.
    #[inline]
    pub(crate) fn note(&self, block: Block) -> Note<'_, W> {
        let first = match block.number() {
            number if number < self.most_blocks => {
                Self::first_note(self.most_blocks) + number as usize * note::WORDS
            }
            // Of a number that names nothing the note is empty, and swallows what it is told.
            _ => self.words.count(),
        };
        Note::new(&self.words, first)
    }

    // ------------------------------------------------------------ waiting

    /// Something was freed, or there is more.
    #[inline]
    fn changed(&self) {
        self.words.fetch_add(CHANGES, 1);
        self.bell.ring();
    }

    /// Moves whenever something was freed, or there is more.
    #[inline]
    pub(crate) fn changes(&self) -> u64 {
        self.words.load(CHANGES, Acquire)
    }

    /// Waits until `look` finds something; it is called again whenever something was freed.
    pub(crate) fn wait<T>(
        &self,
        spin: &mut Spin,
        deadline: Instant,
        look: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        self.bell.wait(spin, deadline, look)
    }
}
