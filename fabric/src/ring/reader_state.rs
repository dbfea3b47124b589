//! State of the reader: what arrived, what is released, when credit is due.

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;

use super::immediate::expand_truncated;
use super::{ChunkHeader, ChunkLayout, Credit, HEADER_LEN, Immediate, RingGeometry, RingNotice};

/// The part of the ring that a chunk and the bytes skipped before it occupy. To be
/// [released](ReaderState::release) once.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "an unreleased chunk blocks the ring"]
pub struct ReleaseToken {
    sequence: u64,
}

/// Where a header is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeaderLocation {
    /// At an offset of the ring.
    Ring(u64),
    /// At an offset of the [separate headers](ChunkLayout::SeparateHeader).
    Headers(u64),
}

/// A chunk that arrived.
#[derive(Debug, PartialEq, Eq)]
pub struct ArrivedChunk {
    /// The header.
    pub header: ChunkHeader,
    /// Offset of the payload in the ring.
    pub offset: u64,
    /// Does the message end with it?
    pub is_last: bool,
    /// To be released once the payload is not needed.
    pub release_token: ReleaseToken,
}

/// A violation of the protocol by a peer. The ring is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProtocolError {
    /// A notice for a chunk further ahead than the ring can hold.
    TooFarAhead {
        /// The chunk in the notice.
        sequence: u64,
        /// The chunk expected next.
        next: u64,
    },
    /// There is no chunk at the position of the next one.
    MissingChunk {
        /// The chunk's position.
        position: u64,
    },
    /// The chunk does not continue its message, or is longer than a chunk may be.
    Misplaced {
        /// The chunk's sequence number.
        sequence: u64,
    },
    /// The number of bytes that arrived differs from the header.
    WrongLength {
        /// The chunk's sequence number.
        sequence: u64,
        /// Bytes that arrived.
        received: u64,
        /// Bytes according to the header.
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
            Self::WrongLength { sequence, received, announced } => {
                write!(f, "chunk {sequence} has {received} bytes, its header says {announced}")
            }
        }
    }
}

impl std::error::Error for ProtocolError {}

/// State of the reader of a ring.
#[derive(Debug)]
pub struct ReaderState {
    geometry: RingGeometry,
    epoch: u32,
    /// The ring index in credit notices.
    sender_index: u16,
    /// The lowest position that is not released.
    head: u64,
    returned: ReturnedCredit,
    /// Start of the next chunk, before any bytes that are skipped.
    next: u64,
    sequence: u64,
    /// Chunks that arrived and were not taken: a bit each, by their number modulo
    /// [`RingGeometry::max_chunks`].
    arrived: Box<[u64]>,
    /// Bytes that arrived with each, the lower 32 bits; 0 where the provider does not report it.
    lengths: Box<[u32]>,
    /// Chunks taken, from the first unreleased one: where each ends, and whether it was released.
    taken: VecDeque<(u64, bool)>,
    /// A notice arrived before the header of its chunk.
    awaits_header: bool,
    max_chunks: u64,
    /// Number of chunks in total, once the writer has sent the end notice.
    end_sequence: Option<u64>,
    message: PartialMessage,
    duplicates: u64,
    unmatched_notices: u64,
}

#[derive(Debug, Default)]
struct ReturnedCredit {
    /// The head that was last sent.
    head: u64,
    /// Bytes to be released before the next one is due.
    watermark: u64,
    /// Chunks released since.
    released: u64,
    /// Credits may overtake each other on the way to their slot: only one is in flight at a time.
    is_serialized: bool,
    is_in_flight: bool,
}

#[derive(Debug, Default)]
struct PartialMessage {
    number: u64,
    /// Bytes that arrived.
    received: u64,
    /// Length and topic, once a part arrived.
    declared: Option<(u64, u32)>,
}

impl PartialMessage {
    #[inline]
    fn is_continued_by(&self, header: &ChunkHeader) -> bool {
        header.message == self.number
            && header.offset == self.received
            && self.declared.is_none_or(|known| known == (header.length, header.topic))
    }

    /// Adds a chunk. True if the message ends with it; then the next message begins.
    #[inline]
    fn add(&mut self, header: &ChunkHeader) -> bool {
        self.received += u64::from(header.payload);
        let is_last = self.received == header.length;
        self.declared = (!is_last).then_some((header.length, header.topic));
        if is_last {
            self.number += 1;
            self.received = 0;
        }
        is_last
    }
}

impl ReaderState {
    /// A reader of an empty ring, which returns credit for every `watermark` bytes released; 0: for
    /// each chunk.
    pub fn new(geometry: RingGeometry, epoch: u32, watermark: u64) -> Self {
        Self {
            geometry,
            epoch,
            sender_index: geometry.ring(),
            head: 0,
            returned: ReturnedCredit {
                watermark: watermark.min(geometry.max_chunk_len()),
                ..ReturnedCredit::default()
            },
            awaits_header: false,
            next: 0,
            sequence: 0,
            arrived: vec![0; (geometry.max_chunks() / 64) as usize].into(),
            lengths: vec![0; geometry.max_chunks() as usize].into(),
            taken: VecDeque::new(),
            max_chunks: geometry.max_chunks(),
            end_sequence: None,
            message: PartialMessage::default(),
            duplicates: 0,
            unmatched_notices: 0,
        }
    }

    /// Continues after messages that an earlier reader completed.
    pub fn resume_after(mut self, completed_messages: u64) -> Self {
        self.message.number = completed_messages;
        self
    }

    /// Limits the chunks in the ring: credit is due when a quarter of them were released.
    pub fn limit_chunks(&mut self, max_chunks: u64) {
        self.max_chunks = self.max_chunks.min(max_chunks).max(1);
    }

    /// Sets the ring index of credit notices, if the writer uses another one than this side.
    pub fn set_sender_index(&mut self, sender_index: u16) {
        self.sender_index = sender_index;
    }

    /// Sends no credit before the previous one has [completed](Self::credit_completed). All are
    /// written to one slot, where an overtaken one could otherwise hide the last.
    pub fn serialize_credits(&mut self) {
        self.returned.is_serialized = true;
        // A credit that is due already could not be sent before.
        self.returned.is_in_flight = self.returned.head > 0;
    }

    /// Takes a notice, which implies its own data and nothing about other chunks. `length` is the
    /// number of bytes that arrived, 0 if the provider does not report it. Notices of another epoch
    /// or ring, and duplicates, are counted and ignored.
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
                self.end_sequence =
                    expand_truncated(self.sequence, sequence).filter(|end| *end >= self.sequence);
                return Ok(());
            }
            RingNotice::Credit { .. } | RingNotice::ReaderClosed => return Ok(()),
        };
        match expand_truncated(self.sequence, sequence) {
            Some(sequence) if sequence >= self.sequence => {
                // Chunks that are taken and not released are in the ring, too.
                let before = self.taken.len() as u64;
                if sequence - self.sequence + before >= self.max_chunks {
                    let next = self.sequence;
                    return Err(ProtocolError::TooFarAhead { sequence, next });
                }
                let (number, word, bit) = self.arrival_slot(sequence);
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

    /// Chunks that arrived, taken or not.
    pub fn received_chunks(&self) -> u64 {
        self.sequence + self.arrived.iter().map(|word| u64::from(word.count_ones())).sum::<u64>()
    }

    /// The header of the next chunk: where the last one ended, or at the start of the ring if the
    /// rest was skipped.
    #[inline]
    fn find(
        &self,
        look: impl Fn(HeaderLocation) -> [u8; HEADER_LEN as usize],
    ) -> Option<ChunkHeader> {
        let here = |position: u64| {
            let location = match self.geometry.layout() {
                ChunkLayout::SeparateHeader => HeaderLocation::Headers(
                    self.sequence % self.geometry.max_chunks() * self.geometry.header_stride(),
                ),
                ChunkLayout::InlineHeader => HeaderLocation::Ring(self.geometry.offset(position)),
            };
            let found = ChunkHeader::decode(&look(location))?;
            let is_expected = found.epoch == self.epoch
                && found.position == position
                && found.sequence == self.sequence;
            is_expected.then_some(found)
        };
        here(self.next).or_else(|| here(self.next + self.geometry.bytes_to_end(self.next)))
    }

    /// The next chunk, if it has arrived. `look` reads a header.
    #[inline]
    pub fn take(
        &mut self,
        look: impl Fn(HeaderLocation) -> [u8; HEADER_LEN as usize],
    ) -> Result<Option<ArrivedChunk>, ProtocolError> {
        let (number, word, bit) = self.arrival_slot(self.sequence);
        if self.arrived[word] & bit == 0 {
            return Ok(None);
        }
        let Some(header) = self.find(look) else {
            return match self.geometry.layout() {
                // The header is a write of its own, which the notice may overtake.
                ChunkLayout::SeparateHeader => {
                    self.awaits_header = true;
                    Ok(None)
                }
                ChunkLayout::InlineHeader => {
                    Err(ProtocolError::MissingChunk { position: self.next })
                }
            };
        };
        let payload = u64::from(header.payload);
        let taken = self.geometry.taken(payload);
        let end = header.position + taken;
        let continues = self.message.is_continued_by(&header);
        let fits = taken <= self.geometry.bytes_to_end(header.position)
            && end - self.head <= self.geometry.capacity();
        if !continues || !fits || (header.payload == 0 && header.length != 0) {
            return Err(ProtocolError::Misplaced { sequence: self.sequence });
        }
        let announced = match self.geometry.layout() {
            ChunkLayout::SeparateHeader if payload > 0 => payload,
            _ => HEADER_LEN + payload,
        };
        let received = self.lengths[number];
        // Without a payload the notice came with the header, and with what accompanies that.
        let is_known = payload > 0 || self.geometry.inline_data() == 0;
        if received != 0 && is_known && received != announced as u32 {
            let (sequence, received) = (self.sequence, received.into());
            return Err(ProtocolError::WrongLength { sequence, received, announced });
        }
        self.arrived[word] &= !bit;
        self.awaits_header = false;
        self.taken.push_back((end, false));
        let release_token = ReleaseToken { sequence: self.sequence };
        self.next = end;
        self.sequence += 1;
        let is_last = self.message.add(&header);
        let offset = self.geometry.offset(header.position) + self.geometry.payload_offset();
        Ok(Some(ArrivedChunk { header, offset, is_last, release_token }))
    }

    /// Releases a chunk, in any order.
    pub fn release(&mut self, release_token: ReleaseToken) {
        let first = self.sequence - self.taken.len() as u64;
        let index = release_token.sequence.checked_sub(first).map(|index| index as usize);
        if let Some((_, is_released)) = index.and_then(|index| self.taken.get_mut(index)) {
            *is_released = true;
        }
        while let Some((end, true)) = self.taken.front() {
            self.head = *end;
            self.returned.released += 1;
            self.taken.pop_front();
        }
        debug_assert!(self.head <= self.next, "beyond what arrived");
    }

    /// Numbers from the first chunk that was taken and not released, to the next one to take.
    #[inline]
    pub fn unreleased(&self) -> Range<u64> {
        self.sequence - self.taken.len() as u64..self.sequence
    }

    /// Releases the first chunk that is not released.
    #[inline]
    pub fn release_first(&mut self) {
        let Range { start, end } = self.unreleased();
        if start < end {
            self.release(ReleaseToken { sequence: start });
        }
    }

    /// The credit to send, if it is due: the watermark is passed, a quarter of the chunks were
    /// released (otherwise the writer would soon have no chunk numbers left), or the port is idle
    /// and anything was released.
    pub fn credit(&mut self, is_idle: bool) -> Option<Credit> {
        let uncredited = self.head - self.returned.head;
        let is_due = uncredited >= self.returned.watermark
            || self.returned.released >= self.max_chunks.div_ceil(4);
        if uncredited == 0 || !(is_due || is_idle) || self.returned.is_in_flight {
            return None;
        }
        self.returned.released = 0;
        self.returned.head = self.head;
        self.returned.is_in_flight = self.returned.is_serialized;
        Some(self.last_credit())
    }

    /// The last credit, sent or still to be sent.
    pub fn last_credit(&self) -> Credit {
        Credit { epoch: self.epoch, head: self.returned.head }
    }

    /// The notice that accompanies a credit.
    pub fn credit_notice(&self) -> u32 {
        // Chunks released since that credit belong to the next one.
        let released = self.unreleased().start - self.returned.released;
        self.notice_of(RingNotice::Credit { released: released as u16 })
    }

    /// Prepares the last credit to be sent again, since it may be lost.
    pub fn resend_credit(&mut self) {
        self.returned.is_in_flight = self.returned.is_serialized;
    }

    /// The last credit has arrived, or never will.
    pub fn credit_completed(&mut self) {
        self.returned.is_in_flight = false;
    }

    /// Is only one credit in flight at a time?
    pub fn serializes_credits(&self) -> bool {
        self.returned.is_serialized
    }

    /// Does the next credit wait for the last one to complete?
    pub fn is_credit_in_flight(&self) -> bool {
        self.returned.is_in_flight
    }

    /// The lowest position that is not released.
    pub fn head(&self) -> u64 {
        self.head
    }

    /// The head that was last sent as credit.
    pub fn credited_head(&self) -> u64 {
        self.returned.head
    }

    /// Did [`take`](Self::take) find the notice of the next chunk, but not its header yet? No
    /// further notice reports the header.
    #[inline]
    pub fn awaits_header(&self) -> bool {
        self.awaits_header
    }

    /// Has the writer sent the end notice, and was every chunk taken?
    pub fn is_end_of_stream(&self) -> bool {
        self.end_sequence == Some(self.sequence)
    }

    /// The notice that the reader has closed the ring.
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

    /// The ring's geometry.
    pub fn geometry(&self) -> RingGeometry {
        self.geometry
    }

    /// Messages completed, over all epochs.
    pub fn completed_messages(&self) -> u64 {
        self.message.number
    }

    /// Bytes that arrived of the next message.
    pub fn received(&self) -> u64 {
        self.message.received
    }

    /// Duplicate notices, and notices of other epochs or rings.
    pub fn ignored(&self) -> (u64, u64) {
        (self.duplicates, self.unmatched_notices)
    }

    /// Index, word and bit of a chunk.
    #[inline]
    fn arrival_slot(&self, sequence: u64) -> (usize, usize, u64) {
        let number = sequence % self.geometry.max_chunks();
        (number as usize, (number / 64) as usize, 1 << (number % 64))
    }
}
