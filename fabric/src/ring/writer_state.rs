//! The side that writes: where chunks go, and whether there is room.

use std::collections::VecDeque;

use super::credit::Credit;
use super::geometry::{ChunkLayout, RingGeometry};
use super::header::{ChunkHeader, HEADER_LEN};
use super::immediate::{Immediate, RingNotice, expand_truncated};

/// Would writing so many bytes at the tail pass what the reader is known to have let go
/// of by more than the ring holds? A check of local numbers only.
///
/// Positions do not wrap, so it is the same comparison whether the free room lies in one
/// piece or around the end of the ring.
pub(super) fn exceeds(tail: u64, length: u64, credit: u64, capacity: u64) -> bool {
    (tail - credit).saturating_add(length) > capacity
}

/// A message that is being written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message {
    /// The epoch of the ring that it was begun in: in another one it has to be begun again.
    epoch: u32,
    number: u64,
    topic: u32,
    length: u64,
    written: u64,
    has_begun: bool,
}

impl Message {
    /// Its number: one more than that of the message before.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Its length in bytes.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Bytes that chunks were made of so far.
    pub fn written(&self) -> u64 {
        self.written
    }

    /// Is there nothing left to write? Also a message of no bytes has a chunk.
    pub fn is_written(&self) -> bool {
        self.has_begun && self.written == self.length
    }
}

/// Where a chunk goes, and what goes with it. It counts once it is
/// [committed](Writer::commit).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// What stands before the payload.
    pub header: ChunkHeader,
    /// Where the header goes: in the ring, or among the headers that lie
    /// [apart](Layout::Apart).
    pub header_at: u64,
    /// Where the payload goes in the ring.
    pub payload_at: u64,
    /// Where a word that says [`Chunk::flag`] goes once all else is there, if the reader
    /// looks for one.
    pub flag_at: Option<u64>,
    /// Bytes at the end of the ring that are left out before it.
    pub skipped: u64,
    /// What to tell the reader.
    pub immediate: u32,
}

impl Chunk {
    /// Bytes that are written: header and payload.
    pub fn length(&self) -> u64 {
        HEADER_LEN + u64::from(self.header.payload)
    }

    /// What the flag of a chunk says: never nothing, and never what an earlier one did.
    pub fn flag(sequence: u64) -> u64 {
        sequence.wrapping_add(1)
    }
}

/// There is no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Blocked {
    /// Bytes that are wanted, with what is left out at the end of the ring.
    pub wanted: u64,
    /// Bytes that are known to be free.
    pub free: u64,
}

/// Why the next chunk of a message has no place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// There is no room.
    Blocked(Blocked),
    /// Another message is written in part, or this one was begun in another ring, or before another
    /// that was written first.
    Stale,
}

/// The side that writes.
#[derive(Debug)]
pub struct WriterState {
    geometry: RingGeometry,
    epoch: u32,
    /// The number that credit comes under.
    sender_index: u16,
    tail: u64,
    /// The last that is known of the reader's head: behind it, never before it.
    credit: u64,
    sequence: u64,
    /// Messages of which a chunk was written, over all epochs.
    next_message: u64,
    /// The last of them is not whole.
    is_partial: bool,
    max_payload: u64,
    /// Chunks that may be unread.
    max_chunks: u64,
    /// Notices of credit that may wait in the writer's queue.
    max_notices: u64,
    /// Chunks that the reader let go of, as the notices tell that were taken from the queue. The
    /// credit that comes with them may be newer.
    noticed: u64,
    /// Chunks that credit has not passed: their ends, and the message that ends with them.
    unread: VecDeque<(u64, Option<u64>)>,
    /// Messages that it has passed, until somebody asks.
    read: VecDeque<u64>,
}

impl WriterState {
    /// A writer of an empty ring, with chunks of at most so many bytes of payload (or what
    /// the ring allows, if that is less).
    pub fn new(geometry: RingGeometry, epoch: u32, max_payload: u64) -> Self {
        // A payload's length has 32 bits in the header.
        let most = geometry.max_payload_in(geometry.max_chunk_len()).min(u32::MAX.into());
        Self {
            geometry,
            epoch,
            sender_index: geometry.ring(),
            tail: 0,
            credit: 0,
            sequence: 0,
            next_message: 0,
            is_partial: false,
            max_payload: max_payload.clamp(1, most),
            max_chunks: geometry.max_chunks(),
            max_notices: u64::MAX,
            noticed: 0,
            unread: VecDeque::new(),
            read: VecDeque::new(),
        }
    }

    /// The number that credit comes under, if it is not the ring's: those of two readers may
    /// be the same.
    pub fn with_sender_index(self, sender_index: u16) -> Self {
        Self { sender_index, ..self }
    }

    /// Goes on after so many messages, which came whole to a reader that is no more.
    pub fn resume_after(self, completed_messages: u64) -> Self {
        Self { next_message: completed_messages, ..self }
    }

    /// With at most so many chunks that credit has not passed.
    pub fn limit_chunks(self, max_chunks: u64) -> Self {
        Self { max_chunks: self.max_chunks.min(max_chunks), ..self }
    }

    /// With at most so many notices of credit in its queue. The reader tells at most one for each
    /// chunk, so no chunk is planned while the notices of so many chunks may still be there.
    pub fn limit_notices(self, max_notices: u64) -> Self {
        Self { max_notices, ..self }
    }

    /// Begins a message. It has its number once the first chunk is written; until then it can be
    /// let go of. After that it must be written to its end before another one is: chunks of
    /// two messages do not mix.
    pub fn begin(&self, topic: u32, length: u64) -> Message {
        let (epoch, number) = (self.epoch, self.next_message);
        Message { epoch, number, topic, length, written: 0, has_begun: false }
    }

    /// Is this the message whose turn it is?
    fn is_next(&self, message: &Message) -> bool {
        let number = match message.has_begun {
            true => message.number.checked_add(1),
            false => Some(message.number),
        };
        message.epoch == self.epoch
            && number == Some(self.next_message)
            && message.has_begun == self.is_partial
    }

    /// Where the message's next chunk goes. Nothing is changed: it may be asked again.
    pub fn plan(&self, message: &Message) -> Result<Chunk, Refused> {
        self.plan_within(message, u64::MAX)
    }

    /// The same for a chunk of at most so many bytes of payload, at least one: where a message is
    /// put together from pieces, a chunk has bytes of one of them.
    pub fn plan_within(&self, message: &Message, most: u64) -> Result<Chunk, Refused> {
        if !self.is_next(message) {
            return Err(Refused::Stale);
        }
        let left = message.length - message.written;
        let mut payload = left.min(self.max_payload).min(most.max(1));
        let bytes_to_end = self.geometry.bytes_to_end(self.tail);
        let mut skipped = 0;
        if self.geometry.taken(payload) > bytes_to_end {
            // A part of it may fit before the end, unless that is hardly more than a header.
            let fits = self.geometry.max_payload_in(bytes_to_end);
            if fits >= self.max_payload / 4 && fits > 0 {
                payload = fits;
            } else {
                skipped = bytes_to_end;
            }
        }
        let wanted = skipped + self.geometry.taken(payload);
        let is_full =
            self.unread.len() as u64 >= self.max_chunks || self.unnoticed() >= self.max_notices;
        if is_full || exceeds(self.tail, wanted, self.credit, self.geometry.capacity()) {
            return Err(Refused::Blocked(Blocked { wanted, free: self.free() }));
        }
        let position = self.tail + skipped;
        let header = ChunkHeader {
            epoch: self.epoch,
            position,
            sequence: self.sequence,
            message: message.number,
            length: message.length,
            offset: message.written,
            payload: payload as u32,
            topic: message.topic,
        };
        let notice = RingNotice::Chunk { sequence: self.sequence as u16 };
        let immediate =
            Immediate { ring: self.geometry.ring(), epoch: self.epoch, notice }.encode();
        let at = self.geometry.offset(position);
        let flag_at = at + self.geometry.flag(payload);
        Ok(Chunk {
            header,
            header_at: match self.geometry.layout() {
                ChunkLayout::SeparateHeader => {
                    self.sequence % self.geometry.max_chunks() * HEADER_LEN
                }
                ChunkLayout::InlineHeader | ChunkLayout::TrailingFlag => at,
            },
            payload_at: at + self.geometry.payload_offset(),
            flag_at: (self.geometry.layout() == ChunkLayout::TrailingFlag).then_some(flag_at),
            skipped,
            immediate,
        })
    }

    /// The chunk was posted.
    pub fn commit(&mut self, message: &mut Message, chunk: &Chunk) {
        debug_assert_eq!(chunk.header.sequence, self.sequence, "planned, then committed");
        debug_assert_eq!(chunk.header.position, self.tail + chunk.skipped);
        self.tail += chunk.skipped + self.geometry.taken(chunk.header.payload.into());
        self.sequence += 1;
        message.written += u64::from(chunk.header.payload);
        self.next_message += u64::from(!message.has_begun);
        message.has_begun = true;
        self.is_partial = !message.is_written();
        self.unread.push_back((self.tail, message.is_written().then_some(message.number)));
        debug_assert!(self.tail - self.credit <= self.geometry.capacity(), "beyond the credit");
    }

    /// Is this a notice that the reader let go of something? How far it is comes with it. The
    /// notice itself leaves room in the queue for others.
    pub fn take_credit_notice(&mut self, immediate: &Immediate) -> bool {
        let RingNotice::Credit { released } = immediate.notice else { return false };
        let is_ours = self.is_for_this_ring(immediate);
        if is_ours
            && let Some(released) = expand_truncated(self.noticed, released)
            && released <= self.sequence
        {
            self.noticed = self.noticed.max(released);
        }
        is_ours
    }

    /// Chunks of which no notice said that the reader let go of them: notices that may come, or
    /// wait in the queue.
    pub fn unnoticed(&self) -> u64 {
        self.sequence - self.noticed
    }

    /// The reader told how far it is. Gives whether that was news; what is behind what is
    /// known, or beyond what was written, is not believed. So credits may come in any order,
    /// and more than once.
    pub fn credit(&mut self, credit: &Credit) -> bool {
        credit.epoch == self.epoch && self.credit_to(credit.head)
    }

    /// As [`credit`](Self::credit), of this epoch.
    pub fn credit_to(&mut self, head: u64) -> bool {
        if head <= self.credit || head > self.tail {
            return false;
        }
        self.credit = head;
        while self.unread.front().is_some_and(|(end, _)| *end <= head) {
            self.read.extend(self.unread.pop_front().and_then(|(_, message)| message));
        }
        true
    }

    /// What to tell the reader if there will be nothing more.
    pub fn end_notice(&self) -> u32 {
        let notice = RingNotice::WriterClosed { sequence: self.sequence as u16 };
        Immediate { ring: self.geometry.ring(), epoch: self.epoch, notice }.encode()
    }

    /// Did the reader say that nobody reads any more?
    pub fn is_reader_closed(&self, immediate: &Immediate) -> bool {
        immediate.notice == RingNotice::ReaderClosed && self.is_for_this_ring(immediate)
    }

    fn is_for_this_ring(&self, immediate: &Immediate) -> bool {
        immediate.matches_epoch(self.epoch) && immediate.ring == self.sender_index
    }

    /// The next message that the reader is known to be done with: its memory is free.
    pub fn next_read(&mut self) -> Option<u64> {
        self.read.pop_front()
    }

    /// Messages that were written, if only in part, over all epochs: the number of the next one.
    pub fn messages(&self) -> u64 {
        self.next_message
    }

    /// Bytes that are known to be free.
    pub fn free(&self) -> u64 {
        self.geometry.capacity() - (self.tail - self.credit)
    }

    /// What both sides agree on.
    pub fn geometry(&self) -> RingGeometry {
        self.geometry
    }

    /// The epoch that it writes in.
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// The longest message that is always one chunk: what is longer may be cut at the end of the
    /// ring.
    pub fn max_single_chunk(&self) -> u64 {
        self.max_payload / 4
    }

    /// The most payload of a chunk.
    pub(super) fn max_payload(&self) -> u64 {
        self.max_payload
    }

    /// Chunks that were written and that the reader is not known to be done with.
    pub fn unread(&self) -> usize {
        self.unread.len()
    }

    /// Bytes written in this epoch, with headers and what was left out.
    pub fn tail(&self) -> u64 {
        self.tail
    }

    /// The last that is known of the reader's head.
    pub fn known_head(&self) -> u64 {
        self.credit
    }
}
