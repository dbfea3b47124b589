//! The side that reads: what arrived, what may be let go of, when to say so.

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;

use super::credit::Credit;
use super::geometry::{ChunkLayout, FLAG_LEN, RingGeometry};
use super::header::{ChunkHeader, HEADER_LEN};
use super::immediate::{Immediate, RingNotice, expand_truncated};
use super::writer_state::Chunk;

/// A piece of the ring that belongs to a chunk, with what was left out before it. To be
/// [released](Reader::release) once.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "what is not released is never written again"]
pub struct ReleaseToken {
    sequence: u64,
}

/// Where a header is to be looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeaderLocation {
    /// At an offset of the ring.
    Ring(u64),
    /// At an offset of the headers that lie [apart](Layout::Apart).
    Headers(u64),
}

/// A chunk that arrived.
#[derive(Debug, PartialEq, Eq)]
pub struct ArrivedChunk {
    /// What stands before the payload.
    pub header: ChunkHeader,
    /// Where the payload lies in the ring.
    pub offset: u64,
    /// Whether the message is whole with it.
    pub is_last: bool,
    /// To be released when the payload is not needed any more.
    pub release_token: ReleaseToken,
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
    MissingChunk {
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
                write!(
                    f,
                    "notice for chunk {sequence}, which is more than a ring ahead of chunk {next}"
                )
            }
            Self::MissingChunk { position } => write!(f, "no chunk at position {position}"),
            Self::Misplaced { sequence } => {
                write!(f, "chunk {sequence} does not continue its message")
            }
            Self::WrongLength { sequence, came, announced } => {
                write!(f, "chunk {sequence} has {came} bytes, its header says {announced}")
            }
        }
    }
}

impl std::error::Error for ProtocolError {}

/// The side that reads.
#[derive(Debug)]
pub struct ReaderState {
    geometry: RingGeometry,
    epoch: u32,
    /// The number that credit is told under.
    sender_index: u16,
    /// The lowest position that is not released.
    head: u64,
    /// What the writer was told of it.
    credited_head: u64,
    /// Credits may overtake each other where they are written to: one is told at a time.
    serializes_credits: bool,
    is_credit_in_flight: bool,
    /// Where the next chunk begins, but for what may be left out before it.
    next: u64,
    sequence: u64,
    /// Chunks from the next one on that arrived: a bit each, by their numbers modulo
    /// [`RingGeometry::max_chunks`].
    arrived: Box<[u64]>,
    /// How many bytes came with each, their lower 32 bits; 0 where the provider does not
    /// tell.
    lengths: Box<[u32]>,
    /// Chunks that were taken, from the first that is not released on: where each ends,
    /// and whether it was released.
    taken: VecDeque<(u64, bool)>,
    /// The header of a chunk whose notice came was not there.
    awaits_header: bool,
    /// Chunks that were released since the writer was told.
    uncredited: u64,
    /// Bytes to be released before the writer is told.
    watermark: u64,
    /// Chunks that may be in the ring.
    max_chunks: u64,
    /// How many chunks there are, once the writer said that it is done.
    ends: Option<u64>,
    /// The message that is next, and how much of it arrived.
    message: u64,
    received: u64,
    /// Length and topic of that, once a part of it came.
    announced: Option<(u64, u32)>,
    duplicates: u64,
    unmatched_notices: u64,
}

impl ReaderState {
    /// A reader of an empty ring, which tells the writer when so many bytes were released:
    /// 0 for each chunk.
    pub fn new(geometry: RingGeometry, epoch: u32, watermark: u64) -> Self {
        Self {
            geometry,
            epoch,
            sender_index: geometry.ring(),
            head: 0,
            credited_head: 0,
            serializes_credits: false,
            is_credit_in_flight: false,
            awaits_header: false,
            next: 0,
            sequence: 0,
            arrived: vec![0; (geometry.max_chunks() / 64) as usize].into(),
            lengths: vec![0; geometry.max_chunks() as usize].into(),
            taken: VecDeque::new(),
            uncredited: 0,
            watermark: watermark.min(geometry.max_chunk_len()),
            max_chunks: geometry.max_chunks(),
            ends: None,
            message: 0,
            received: 0,
            announced: None,
            duplicates: 0,
            unmatched_notices: 0,
        }
    }

    /// Goes on after so many messages, which came whole to a reader that is no more.
    pub fn resume_after(self, completed_messages: u64) -> Self {
        Self { message: completed_messages, ..self }
    }

    /// There will be at most so many chunks in the ring: the writer is told when a part of
    /// these were released.
    pub fn limit_chunks(&mut self, max_chunks: u64) {
        self.max_chunks = self.max_chunks.min(max_chunks).max(1);
    }

    /// The number that the writer wants to be told of credit under, if it is not the
    /// ring's.
    pub fn set_sender_index(&mut self, sender_index: u16) {
        self.sender_index = sender_index;
    }

    /// Credits may overtake each other on their way to the one place that they are written to:
    /// from now on none is told before the one before it [arrived](Self::credit_completed), or an
    /// old one could hide the last.
    pub fn serialize_credits(&mut self) {
        self.serializes_credits = true;
        // One that is due already, and could not be told before.
        self.is_credit_in_flight = self.credited_head > 0;
    }

    /// A notice came: with its data, whatever came or did not come before it. `length` is
    /// how many bytes came, as the provider tells it; 0 where it does not. A notice of
    /// another epoch or ring is counted and forgotten, and so is one that came already.
    #[inline]
    pub fn notice(&mut self, immediate: &Immediate, length: u64) -> Result<(), ProtocolError> {
        if !immediate.matches_epoch(self.epoch) || immediate.ring != self.geometry.ring() {
            self.unmatched_notices += 1;
            return Ok(());
        }
        let sequence = match immediate.notice {
            RingNotice::Chunk { sequence } => sequence,
            RingNotice::WriterClosed { sequence } => {
                // It may overtake the notices of the last chunks.
                self.ends =
                    expand_truncated(self.sequence, sequence).filter(|end| *end >= self.sequence);
                return Ok(());
            }
            RingNotice::Credit { .. } | RingNotice::ReaderClosed => return Ok(()),
        };
        match expand_truncated(self.sequence, sequence) {
            Some(sequence) if sequence >= self.sequence => {
                // Those that are taken and not released are in the ring, too.
                let before = self.taken.len() as u64;
                if sequence - self.sequence + before >= self.max_chunks {
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
        look: impl Fn(HeaderLocation) -> [u8; HEADER_LEN as usize],
        flag: impl Fn(u64) -> u64,
    ) -> bool {
        let (_, word, bit) = self.place(self.sequence);
        if self.arrived[word] & bit != 0 {
            return true;
        }
        let Some(header) = self.find(look) else { return false };
        let payload = u64::from(header.payload);
        let ends = self.geometry.flag(payload) + FLAG_LEN;
        if ends > self.geometry.bytes_to_end(header.position) {
            return false;
        }
        let at = self.geometry.offset(header.position) + self.geometry.flag(payload);
        if flag(at) != Chunk::flag(self.sequence) {
            return false;
        }
        self.arrived[word] |= bit;
        self.lengths[(self.sequence % self.geometry.max_chunks()) as usize] = 0;
        true
    }

    /// The header of the next chunk: where the last one ended; or, if the rest of the ring was
    /// left out, at its start.
    #[inline]
    fn find(
        &self,
        look: impl Fn(HeaderLocation) -> [u8; HEADER_LEN as usize],
    ) -> Option<ChunkHeader> {
        let here = |position: u64| {
            let place = match self.geometry.layout() {
                ChunkLayout::SeparateHeader => {
                    HeaderLocation::Headers(self.sequence % self.geometry.max_chunks() * HEADER_LEN)
                }
                ChunkLayout::InlineHeader | ChunkLayout::TrailingFlag => {
                    HeaderLocation::Ring(self.geometry.offset(position))
                }
            };
            let found = ChunkHeader::decode(&look(place))?;
            let is_it = found.epoch == self.epoch
                && found.position == position
                && found.sequence == self.sequence;
            is_it.then_some(found)
        };
        here(self.next).or_else(|| here(self.next + self.geometry.bytes_to_end(self.next)))
    }

    /// The next chunk, if it is there. `look` reads a header.
    #[inline]
    pub fn take(
        &mut self,
        look: impl Fn(HeaderLocation) -> [u8; HEADER_LEN as usize],
    ) -> Result<Option<ArrivedChunk>, ProtocolError> {
        let (number, word, bit) = self.place(self.sequence);
        if self.arrived[word] & bit == 0 {
            return Ok(None);
        }
        let Some(header) = self.find(look) else {
            return match self.geometry.layout() {
                // Another write than the one whose notice came, and not bound to be first.
                ChunkLayout::SeparateHeader => {
                    self.awaits_header = true;
                    Ok(None)
                }
                _ => Err(ProtocolError::MissingChunk { position: self.next }),
            };
        };
        let payload = u64::from(header.payload);
        let taken = self.geometry.taken(payload);
        let end = header.position + taken;
        let is_same = self.announced.is_none_or(|said| said == (header.length, header.topic));
        let continues = header.message == self.message && header.offset == self.received && is_same;
        let fits = taken <= self.geometry.bytes_to_end(header.position)
            && end - self.head <= self.geometry.capacity();
        if !continues || !fits || (header.payload == 0 && header.length != 0) {
            return Err(ProtocolError::Misplaced { sequence: self.sequence });
        }
        let announced = match self.geometry.layout() {
            ChunkLayout::SeparateHeader if payload > 0 => payload,
            _ => HEADER_LEN + payload,
        };
        let came = self.lengths[number];
        if came != 0 && came != announced as u32 {
            let (sequence, came) = (self.sequence, came.into());
            return Err(ProtocolError::WrongLength { sequence, came, announced });
        }
        self.arrived[word] &= !bit;
        self.awaits_header = false;
        self.taken.push_back((end, false));
        let release_token = ReleaseToken { sequence: self.sequence };
        self.next = end;
        self.sequence += 1;
        self.received += u64::from(header.payload);
        let is_last = self.received == header.length;
        self.announced = (!is_last).then_some((header.length, header.topic));
        if is_last {
            self.message += 1;
            self.received = 0;
        }
        let offset = self.geometry.offset(header.position) + self.geometry.payload_offset();
        Ok(Some(ArrivedChunk { header, offset, is_last, release_token }))
    }

    /// The bytes of a span are not needed any more. In any order.
    pub fn release(&mut self, release_token: ReleaseToken) {
        let first = self.sequence - self.taken.len() as u64;
        let place = release_token.sequence.checked_sub(first).map(|place| place as usize);
        if let Some((_, is_released)) = place.and_then(|place| self.taken.get_mut(place)) {
            *is_released = true;
        }
        while let Some((end, true)) = self.taken.front() {
            self.head = *end;
            self.uncredited += 1;
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
            self.release(ReleaseToken { sequence: start });
        }
    }

    /// What to tell the writer, if it is time: so much was released that the watermark is
    /// passed, or so many chunks that the writer would soon have no numbers left; or
    /// nothing else is going on and something was released at all.
    pub fn credit(&mut self, is_idle: bool) -> Option<Credit> {
        let uncredited = self.head - self.credited_head;
        let is_due = uncredited >= self.watermark || self.uncredited >= self.max_chunks.div_ceil(4);
        if uncredited == 0 || !(is_due || is_idle) || self.is_credit_in_flight {
            return None;
        }
        self.uncredited = 0;
        self.credited_head = self.head;
        self.is_credit_in_flight = self.serializes_credits;
        Some(self.last_credit())
    }

    /// What the writer was told last, or is to be told if that was not sent.
    pub fn last_credit(&self) -> Credit {
        Credit { epoch: self.epoch, head: self.credited_head }
    }

    /// The notice that a credit comes with.
    pub fn credit_notice(&self) -> u32 {
        // Those that were released since the writer was told are told with the next one.
        let released = self.unreleased().start - self.uncredited;
        self.notice_of(RingNotice::Credit { released: released as u16 })
    }

    /// The credit that was told last is to be told again, since it may be lost.
    pub fn resend_credit(&mut self) {
        self.is_credit_in_flight = self.serializes_credits;
    }

    /// The credit that was told last has arrived, or never will.
    pub fn credit_completed(&mut self) {
        self.is_credit_in_flight = false;
    }

    /// Is one credit told at a time?
    pub fn serializes_credits(&self) -> bool {
        self.serializes_credits
    }

    /// Is the next credit waiting for the last one to arrive?
    pub fn is_credit_in_flight(&self) -> bool {
        self.is_credit_in_flight
    }

    /// The lowest position that is not released.
    pub fn head(&self) -> u64 {
        self.head
    }

    /// What the writer was told of it.
    pub fn credited_head(&self) -> u64 {
        self.credited_head
    }

    /// Was the next chunk looked for after its notice came, and its header not there? It is still on
    /// its way then, and no notice tells when it is there.
    #[inline]
    pub fn awaits_header(&self) -> bool {
        self.awaits_header
    }

    /// Is the writer done, and everything taken?
    pub fn is_end_of_stream(&self) -> bool {
        self.ends == Some(self.sequence)
    }

    /// What to tell the writer if nobody is going to read any more.
    pub fn close_notice(&self) -> u32 {
        self.notice_of(RingNotice::ReaderClosed)
    }

    fn notice_of(&self, notice: RingNotice) -> u32 {
        Immediate { ring: self.sender_index, epoch: self.epoch, notice }.encode()
    }

    /// The epoch that it reads.
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// What both sides agree on.
    pub fn geometry(&self) -> RingGeometry {
        self.geometry
    }

    /// Messages that came whole, over all epochs.
    pub fn completed_messages(&self) -> u64 {
        self.message
    }

    /// Bytes that came of the message that is next.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// Notices that came more than once, and those of other epochs or rings.
    pub fn ignored(&self) -> (u64, u64) {
        (self.duplicates, self.unmatched_notices)
    }

    /// Number, word and bit of a chunk.
    #[inline]
    fn place(&self, sequence: u64) -> (usize, usize, u64) {
        let number = sequence % self.geometry.max_chunks();
        (number as usize, (number / 64) as usize, 1 << (number % 64))
    }
}
