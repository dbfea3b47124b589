//! The side that reads: what arrived, what may be let go of, when to say so.

use std::collections::VecDeque;
use std::fmt;

use super::header::{HEADER, Header};
use super::immediate::{Immediate, Notice, nearest};
use super::{MOST_CHUNKS, Shape};

/// A piece of the ring that belongs to a chunk, with what was left out before it. To be
/// [released](Reader::release) once.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "what is not released is never written again"]
pub struct Span {
    epoch: u32,
    sequence: u64,
}

/// A chunk that arrived.
#[derive(Debug, PartialEq, Eq)]
pub struct Arrived {
    /// What stands before the payload.
    pub header: Header,
    /// Where the payload lies in the ring.
    pub offset: u64,
    /// Whether the message is whole with it.
    pub is_last: bool,
    /// To be released when the payload is not needed any more.
    pub span: Span,
}

/// What a peer did that no honest one does. The ring is of no use any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProtocolError {
    /// Notices for more chunks than the ring can hold.
    TooFarAhead {
        /// The chunk that was told of.
        sequence: u64,
        /// The chunk that is next.
        next: u64,
    },
    /// Where the next chunk should be there is none.
    NoChunk {
        /// Its position.
        position: u64,
    },
    /// A chunk that does not continue its message, or is longer than one may be.
    Misplaced {
        /// Its sequence number.
        sequence: u64,
    },
}

impl fmt::Display for ProtocolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooFarAhead { sequence, next } => {
                write!(f, "a notice of chunk {sequence}, where {next} is next")
            }
            Self::NoChunk { position } => write!(f, "no chunk at position {position}"),
            Self::Misplaced { sequence } => {
                write!(f, "chunk {sequence} does not continue its message")
            }
        }
    }
}

impl std::error::Error for ProtocolError {}

/// The side that reads.
#[derive(Debug)]
pub struct Reader {
    shape: Shape,
    epoch: u32,
    /// The lowest position that is not released.
    head: u64,
    /// What the writer was told of it.
    told: u64,
    /// Where the next chunk begins, but for what may be left out before it.
    next: u64,
    sequence: u64,
    /// Chunks from the next one on that arrived: a bit each, by their numbers modulo
    /// [`MOST_CHUNKS`].
    arrived: Box<[u64]>,
    /// Chunks that were taken, from the first that is not released on: where each ends,
    /// and whether it was released.
    taken: VecDeque<(u64, bool)>,
    /// Chunks that were released since the writer was told.
    untold: u64,
    /// Bytes to be released before the writer is told.
    watermark: u64,
    /// The message that is next, and how much of it arrived.
    message: u64,
    received: u64,
    duplicates: u64,
    strangers: u64,
}

impl Reader {
    /// A reader of an empty ring, which tells the writer when so many bytes were released:
    /// 0 for each chunk.
    #[must_use]
    pub fn new(shape: Shape, epoch: u32, watermark: u64) -> Self {
        Self {
            shape,
            epoch,
            head: 0,
            told: 0,
            next: 0,
            sequence: 0,
            arrived: vec![0; (MOST_CHUNKS / 64) as usize].into(),
            taken: VecDeque::new(),
            untold: 0,
            watermark: watermark.min(shape.longest_chunk()),
            message: 0,
            received: 0,
            duplicates: 0,
            strangers: 0,
        }
    }

    /// A notice came: with its data, whatever came or did not come before it. One of
    /// another epoch or ring is counted and forgotten, and so is one that came already.
    ///
    /// # Errors
    /// [`TooFarAhead`](ProtocolError::TooFarAhead).
    pub fn notice(&mut self, immediate: &Immediate) -> Result<(), ProtocolError> {
        let Notice::Chunk { sequence } = immediate.notice else { return Ok(()) };
        if !immediate.is_of(self.epoch) || immediate.ring != self.shape.ring() {
            self.strangers += 1;
            return Ok(());
        }
        match nearest(self.sequence, sequence) {
            Some(sequence) if sequence >= self.sequence => {
                // Those that are taken and not released are in the ring, too.
                let before = self.taken.len() as u64;
                if sequence - self.sequence + before >= MOST_CHUNKS {
                    let next = self.sequence;
                    return Err(ProtocolError::TooFarAhead { sequence, next });
                }
                let (word, bit) = place(sequence);
                if self.arrived[word] & bit != 0 {
                    self.duplicates += 1;
                }
                self.arrived[word] |= bit;
            }
            _ => self.duplicates += 1,
        }
        Ok(())
    }

    /// The next chunk, if it is there. `look` reads a header at an offset of the ring.
    ///
    /// # Errors
    /// [`NoChunk`](ProtocolError::NoChunk), [`Misplaced`](ProtocolError::Misplaced).
    pub fn take(
        &mut self,
        look: impl Fn(u64) -> [u8; HEADER as usize],
    ) -> Result<Option<Arrived>, ProtocolError> {
        let (word, bit) = place(self.sequence);
        if self.arrived[word] & bit == 0 {
            return Ok(None);
        }
        let here = |position: u64| {
            let found = Header::decode(&look(self.shape.offset(position)))?;
            let is_it = found.epoch == self.epoch
                && found.position == position
                && found.sequence == self.sequence;
            is_it.then_some(found)
        };
        // Where the last one ended; or, if the rest of the ring was left out, at its start.
        let until_end = self.shape.until_end(self.next);
        let header = here(self.next).or_else(|| here(self.next + until_end));
        let Some(header) = header else {
            return Err(ProtocolError::NoChunk { position: self.next });
        };
        let taken = self.shape.taken(header.payload.into());
        let end = header.position + taken;
        let continues = header.message == self.message && header.offset == self.received;
        let fits = taken <= self.shape.until_end(header.position)
            && end - self.head <= self.shape.capacity();
        if !continues || !fits || (header.payload == 0 && header.length != 0) {
            return Err(ProtocolError::Misplaced { sequence: self.sequence });
        }
        self.arrived[word] &= !bit;
        self.taken.push_back((end, false));
        let span = Span { epoch: self.epoch, sequence: self.sequence };
        self.next = end;
        self.sequence += 1;
        self.received += u64::from(header.payload);
        let is_last = self.received == header.length;
        if is_last {
            self.message += 1;
            self.received = 0;
        }
        let offset = self.shape.offset(header.position) + HEADER;
        Ok(Some(Arrived { header, offset, is_last, span }))
    }

    /// The bytes of a span are not needed any more. In any order.
    pub fn release(&mut self, span: Span) {
        // Of an epoch that is over: there is nobody to tell.
        if span.epoch != self.epoch {
            return;
        }
        let first = self.sequence - self.taken.len() as u64;
        let place = span.sequence.checked_sub(first).map(|place| place as usize);
        if let Some((_, is_released)) = place.and_then(|place| self.taken.get_mut(place)) {
            *is_released = true;
        }
        while let Some((end, true)) = self.taken.front() {
            self.head = *end;
            self.untold += 1;
            self.taken.pop_front();
        }
        debug_assert!(self.head <= self.next, "beyond what arrived");
    }

    /// What to tell the writer, if it is time: so much was released that the watermark is
    /// passed, or so many chunks that the writer would soon have no numbers left; or
    /// nothing else is going on and something was released at all.
    pub fn credit(&mut self, is_quiet: bool) -> Option<u32> {
        let untold = self.head - self.told;
        let is_due = untold >= self.watermark || self.untold >= MOST_CHUNKS / 4;
        if untold == 0 || !(is_due || is_quiet) {
            return None;
        }
        self.untold = 0;
        self.told = self.head;
        let notice = Notice::Credit { head: (self.head / self.shape.granule()) as u16 };
        Some(Immediate { ring: self.shape.ring(), epoch: self.epoch, notice }.encode())
    }

    /// The lowest position that is not released.
    #[must_use]
    pub fn head(&self) -> u64 {
        self.head
    }

    /// What the writer was told of it.
    #[must_use]
    pub fn told(&self) -> u64 {
        self.told
    }

    /// Messages that came whole, over all epochs.
    #[must_use]
    pub fn whole(&self) -> u64 {
        self.message
    }

    /// Notices that came more than once, and those of other epochs or rings.
    #[must_use]
    pub fn ignored(&self) -> (u64, u64) {
        (self.duplicates, self.strangers)
    }

    /// After the connection was lost: an empty ring, in fresh memory, in a later epoch. A
    /// message that came in part is forgotten. Gives how many came whole: what the
    /// writer has to know. Spans of the old memory need not be released any more.
    pub fn restart(&mut self, epoch: u32) -> u64 {
        self.epoch = epoch;
        (self.head, self.told, self.next, self.sequence) = (0, 0, 0, 0);
        self.arrived.fill(0);
        self.taken.clear();
        self.untold = 0;
        self.received = 0;
        self.message
    }
}

/// Word and bit of a chunk.
fn place(sequence: u64) -> (usize, u64) {
    let number = sequence % MOST_CHUNKS;
    ((number / 64) as usize, 1 << (number % 64))
}
