//! The side that reads: what arrived, what may be let go of, when to say so.

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;

use super::credit::Credit;
use super::header::{HEADER, Header};
use super::immediate::{Immediate, Notice, nearest};
use super::shape::{FLAG, Layout, Shape};
use super::writer::Chunk;

/// A piece of the ring that belongs to a chunk, with what was left out before it. To be
/// [released](Reader::release) once.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "what is not released is never written again"]
pub struct Span {
    sequence: u64,
}

/// Where a header is to be looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// At an offset of the ring.
    Ring(u64),
    /// At an offset of the headers that lie [apart](Layout::Apart).
    Headers(u64),
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
    /// Another number of bytes came than its header announces.
    WrongLength {
        /// Its sequence number.
        sequence: u64,
        /// Bytes that came.
        came: u64,
        /// Bytes that were announced.
        announced: u64,
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
            Self::WrongLength { sequence, came, announced } => {
                write!(f, "{came} bytes came for chunk {sequence}, which announces {announced}")
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
    /// The number that credit is told under.
    writer_name: u16,
    /// The lowest position that is not released.
    head: u64,
    /// What the writer was told of it.
    told: u64,
    /// Credits may overtake each other where they are written to: one is told at a time.
    serializes_credits: bool,
    is_credit_on_its_way: bool,
    /// Where the next chunk begins, but for what may be left out before it.
    next: u64,
    sequence: u64,
    /// Chunks from the next one on that arrived: a bit each, by their numbers modulo
    /// [`Shape::most_chunks`].
    arrived: Box<[u64]>,
    /// How many bytes came with each, their lower 32 bits; 0 where the provider does not
    /// tell.
    lengths: Box<[u32]>,
    /// Chunks that were taken, from the first that is not released on: where each ends,
    /// and whether it was released.
    taken: VecDeque<(u64, bool)>,
    /// The header of a chunk whose notice came was not there.
    misses_header: bool,
    /// Chunks that were released since the writer was told.
    untold: u64,
    /// Bytes to be released before the writer is told.
    watermark: u64,
    /// Chunks that may be in the ring.
    most_chunks: u64,
    /// How many chunks there are, once the writer said that it is done.
    ends: Option<u64>,
    /// The message that is next, and how much of it arrived.
    message: u64,
    received: u64,
    /// Length and topic of that, once a part of it came.
    announced: Option<(u64, u32)>,
    duplicates: u64,
    strangers: u64,
}

impl Reader {
    /// A reader of an empty ring, which tells the writer when so many bytes were released:
    /// 0 for each chunk.
    pub fn new(shape: Shape, epoch: u32, watermark: u64) -> Self {
        Self {
            shape,
            epoch,
            writer_name: shape.ring(),
            head: 0,
            told: 0,
            serializes_credits: false,
            is_credit_on_its_way: false,
            misses_header: false,
            next: 0,
            sequence: 0,
            arrived: vec![0; (shape.most_chunks() / 64) as usize].into(),
            lengths: vec![0; shape.most_chunks() as usize].into(),
            taken: VecDeque::new(),
            untold: 0,
            watermark: watermark.min(shape.longest_chunk()),
            most_chunks: shape.most_chunks(),
            ends: None,
            message: 0,
            received: 0,
            announced: None,
            duplicates: 0,
            strangers: 0,
        }
    }

    /// Goes on after so many messages, which came whole to a reader that is no more.
    pub fn after(self, whole: u64) -> Self {
        Self { message: whole, ..self }
    }

    /// There will be at most so many chunks in the ring: the writer is told when a part of
    /// these were released.
    pub fn limit_chunks(&mut self, most_chunks: u64) {
        self.most_chunks = self.most_chunks.min(most_chunks).max(1);
    }

    /// The number that the writer wants to be told of credit under, if it is not the
    /// ring's.
    pub fn set_writer_name(&mut self, name: u16) {
        self.writer_name = name;
    }

    /// Credits may overtake each other on their way to the one place that they are written to:
    /// from now on none is told before the one before it [arrived](Self::credit_completed), or an
    /// old one could hide the last.
    pub fn serialize_credits(&mut self) {
        self.serializes_credits = true;
        // One that is due already, and could not be told before.
        self.is_credit_on_its_way = self.told > 0;
    }

    /// A notice came: with its data, whatever came or did not come before it. `length` is
    /// how many bytes came, as the provider tells it; 0 where it does not. A notice of
    /// another epoch or ring is counted and forgotten, and so is one that came already.
    #[inline]
    pub fn notice(&mut self, immediate: &Immediate, length: u64) -> Result<(), ProtocolError> {
        if !immediate.is_of(self.epoch) || immediate.ring != self.shape.ring() {
            self.strangers += 1;
            return Ok(());
        }
        let sequence = match immediate.notice {
            Notice::Chunk { sequence } => sequence,
            Notice::Done { sequence } => {
                // It may overtake the notices of the last chunks.
                self.ends = nearest(self.sequence, sequence).filter(|end| *end >= self.sequence);
                return Ok(());
            }
            Notice::Credit { .. } | Notice::Gone => return Ok(()),
        };
        match nearest(self.sequence, sequence) {
            Some(sequence) if sequence >= self.sequence => {
                // Those that are taken and not released are in the ring, too.
                let before = self.taken.len() as u64;
                if sequence - self.sequence + before >= self.most_chunks {
                    let next = self.sequence;
                    return Err(ProtocolError::TooFarAhead { sequence, next });
                }
                let (number, word, bit) = self.place(sequence);
                if self.arrived[word] & bit != 0 {
                    self.duplicates += 1;
                }
                self.arrived[word] |= bit;
                self.lengths[number] = length as u32;
            }
            _ => self.duplicates += 1,
        }
        Ok(())
    }

    /// Chunks that came, taken or not.
    pub fn came(&self) -> u64 {
        self.sequence + self.arrived.iter().map(|word| u64::from(word.count_ones())).sum::<u64>()
    }

    /// Looks whether the next chunk is there, with its flag: for a reader that is not
    /// told. `look` reads a header, `flag` a word at an offset of the ring.
    pub fn look(
        &mut self,
        look: impl Fn(Place) -> [u8; HEADER as usize],
        flag: impl Fn(u64) -> u64,
    ) -> bool {
        let (_, word, bit) = self.place(self.sequence);
        if self.arrived[word] & bit != 0 {
            return true;
        }
        let Some(header) = self.find(look) else { return false };
        let payload = u64::from(header.payload);
        let ends = self.shape.flag(payload) + FLAG;
        if ends > self.shape.until_end(header.position) {
            return false;
        }
        let at = self.shape.offset(header.position) + self.shape.flag(payload);
        if flag(at) != Chunk::flag(self.sequence) {
            return false;
        }
        self.arrived[word] |= bit;
        self.lengths[(self.sequence % self.shape.most_chunks()) as usize] = 0;
        true
    }

    /// The header of the next chunk: where the last one ended; or, if the rest of the ring was
    /// left out, at its start.
    #[inline]
    fn find(&self, look: impl Fn(Place) -> [u8; HEADER as usize]) -> Option<Header> {
        let here = |position: u64| {
            let place = match self.shape.layout() {
                Layout::Apart => Place::Headers(self.sequence % self.shape.most_chunks() * HEADER),
                Layout::Together | Layout::Flagged => Place::Ring(self.shape.offset(position)),
            };
            let found = Header::decode(&look(place))?;
            let is_it = found.epoch == self.epoch
                && found.position == position
                && found.sequence == self.sequence;
            is_it.then_some(found)
        };
        here(self.next).or_else(|| here(self.next + self.shape.until_end(self.next)))
    }

    /// The next chunk, if it is there. `look` reads a header.
    #[inline]
    pub fn take(
        &mut self,
        look: impl Fn(Place) -> [u8; HEADER as usize],
    ) -> Result<Option<Arrived>, ProtocolError> {
        let (number, word, bit) = self.place(self.sequence);
        if self.arrived[word] & bit == 0 {
            return Ok(None);
        }
        let Some(header) = self.find(look) else {
            return match self.shape.layout() {
                // Another write than the one whose notice came, and not bound to be first.
                Layout::Apart => {
                    self.misses_header = true;
                    Ok(None)
                }
                _ => Err(ProtocolError::NoChunk { position: self.next }),
            };
        };
        let payload = u64::from(header.payload);
        let taken = self.shape.taken(payload);
        let end = header.position + taken;
        let is_same = self.announced.is_none_or(|said| said == (header.length, header.topic));
        let continues = header.message == self.message && header.offset == self.received && is_same;
        let fits = taken <= self.shape.until_end(header.position)
            && end - self.head <= self.shape.capacity();
        if !continues || !fits || (header.payload == 0 && header.length != 0) {
            return Err(ProtocolError::Misplaced { sequence: self.sequence });
        }
        let announced = match self.shape.layout() {
            Layout::Apart if payload > 0 => payload,
            _ => HEADER + payload,
        };
        let came = self.lengths[number];
        if came != 0 && came != announced as u32 {
            let (sequence, came) = (self.sequence, came.into());
            return Err(ProtocolError::WrongLength { sequence, came, announced });
        }
        self.arrived[word] &= !bit;
        self.misses_header = false;
        self.taken.push_back((end, false));
        let span = Span { sequence: self.sequence };
        self.next = end;
        self.sequence += 1;
        self.received += u64::from(header.payload);
        let is_last = self.received == header.length;
        self.announced = (!is_last).then_some((header.length, header.topic));
        if is_last {
            self.message += 1;
            self.received = 0;
        }
        let offset = self.shape.offset(header.position) + self.shape.before_payload();
        Ok(Some(Arrived { header, offset, is_last, span }))
    }

    /// The bytes of a span are not needed any more. In any order.
    pub fn release(&mut self, span: Span) {
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

    /// The number of the first chunk that was taken and is not released, and of the next one
    /// to be taken.
    #[inline]
    pub fn unreleased(&self) -> Range<u64> {
        self.sequence - self.taken.len() as u64..self.sequence
    }

    /// As [`release`](Self::release), for the first that is not released.
    #[inline]
    pub fn release_first(&mut self) {
        let Range { start, end } = self.unreleased();
        if start < end {
            self.release(Span { sequence: start });
        }
    }

    /// What to tell the writer, if it is time: so much was released that the watermark is
    /// passed, or so many chunks that the writer would soon have no numbers left; or
    /// nothing else is going on and something was released at all.
    pub fn credit(&mut self, is_quiet: bool) -> Option<Credit> {
        let untold = self.head - self.told;
        let is_due = untold >= self.watermark || self.untold >= self.most_chunks.div_ceil(4);
        if untold == 0 || !(is_due || is_quiet) || self.is_credit_on_its_way {
            return None;
        }
        self.untold = 0;
        self.told = self.head;
        self.is_credit_on_its_way = self.serializes_credits;
        Some(self.told_credit())
    }

    /// What the writer was told last, or is to be told if that was not sent.
    pub fn told_credit(&self) -> Credit {
        Credit { epoch: self.epoch, head: self.told }
    }

    /// The notice that a credit comes with.
    pub fn credit_notice(&self) -> u32 {
        // Those that were released since the writer was told are told with the next one.
        let released = self.unreleased().start - self.untold;
        self.notice_of(Notice::Credit { released: released as u16 })
    }

    /// The credit that was told last is to be told again, since it may be lost.
    pub fn tell_again(&mut self) {
        self.is_credit_on_its_way = self.serializes_credits;
    }

    /// The credit that was told last has arrived, or never will.
    pub fn credit_completed(&mut self) {
        self.is_credit_on_its_way = false;
    }

    /// Is one credit told at a time?
    pub fn serializes_credits(&self) -> bool {
        self.serializes_credits
    }

    /// Is the next credit waiting for the last one to arrive?
    pub fn is_credit_on_its_way(&self) -> bool {
        self.is_credit_on_its_way
    }

    /// The lowest position that is not released.
    pub fn head(&self) -> u64 {
        self.head
    }

    /// What the writer was told of it.
    pub fn told(&self) -> u64 {
        self.told
    }

    /// Was the next chunk looked for after its notice came, and its header not there? It is still on
    /// its way then, and no notice tells when it is there.
    #[inline]
    pub fn misses_header(&self) -> bool {
        self.misses_header
    }

    /// Is the writer done, and everything taken?
    pub fn is_over(&self) -> bool {
        self.ends == Some(self.sequence)
    }

    /// What to tell the writer if nobody is going to read any more.
    pub fn gone(&self) -> u32 {
        self.notice_of(Notice::Gone)
    }

    fn notice_of(&self, notice: Notice) -> u32 {
        Immediate { ring: self.writer_name, epoch: self.epoch, notice }.encode()
    }

    /// The epoch that it reads.
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// What both sides agree on.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Messages that came whole, over all epochs.
    pub fn whole(&self) -> u64 {
        self.message
    }

    /// Bytes that came of the message that is next.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// Notices that came more than once, and those of other epochs or rings.
    pub fn ignored(&self) -> (u64, u64) {
        (self.duplicates, self.strangers)
    }

    /// Number, word and bit of a chunk.
    #[inline]
    fn place(&self, sequence: u64) -> (usize, usize, u64) {
        let number = sequence % self.shape.most_chunks();
        (number as usize, (number / 64) as usize, 1 << (number % 64))
    }
}
