//! State of the writer: where chunks go, and whether there is room.

use std::collections::VecDeque;

use super::immediate::expand_truncated;
use super::{ChunkHeader, ChunkLayout, Credit, HEADER_LEN, Immediate, RingGeometry, RingNotice};

/// Would a write of `length` bytes at the tail overwrite bytes that the reader has not released?
/// Compares local numbers only.
pub(super) fn exceeds(tail: u64, length: u64, credit: u64, capacity: u64) -> bool {
    (tail - credit).saturating_add(length) > capacity
}

/// A message that is being written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message {
    /// The epoch in which it was begun: in another epoch it must be begun again.
    epoch: u32,
    number: u64,
    topic: u32,
    length: u64,
    written: u64,
    has_begun: bool,
}

impl Message {
    /// The message's number: one more than that of the previous message.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The message's length in bytes.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Bytes for which chunks were planned and committed.
    pub fn written(&self) -> u64 {
        self.written
    }

    /// Is nothing left to write? An empty message has one chunk.
    pub fn is_written(&self) -> bool {
        self.has_begun && self.written == self.length
    }
}

/// Where a chunk is written, and what is written with it. It counts once it is
/// [committed](WriterState::commit).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// The header.
    pub header: ChunkHeader,
    /// Where the header is written: an offset of the ring, or of the [separate
    /// headers](ChunkLayout::SeparateHeader).
    pub header_at: u64,
    /// Offset of the payload in the ring.
    pub payload_at: u64,
    /// Bytes skipped at the end of the ring before it.
    pub skipped: u64,
    /// The notice to the reader.
    pub immediate: u32,
}

impl Chunk {
    /// Bytes that are written: header and payload.
    pub fn length(&self) -> u64 {
        HEADER_LEN + u64::from(self.header.payload)
    }
}

/// The ring has no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Blocked {
    /// Bytes needed, with those skipped at the end of the ring.
    pub wanted: u64,
    /// Bytes known to be free.
    pub free: u64,
}

/// Why the next chunk of a message cannot be planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// The ring has no room.
    Blocked(Blocked),
    /// Another message is partly written; or this one belongs to another ring, or was begun before
    /// a message that was written first.
    Stale,
}

/// State of the writer of a ring.
#[derive(Debug)]
pub struct WriterState {
    geometry: RingGeometry,
    epoch: u32,
    /// The ring index in credit notices.
    sender_index: u16,
    tail: u64,
    /// The last known head of the reader: never beyond the real one.
    credit: u64,
    sequence: u64,
    /// Messages of which a chunk was written, over all epochs.
    next_message: u64,
    /// The last of them is incomplete.
    is_partial: bool,
    max_payload: u64,
    max_chunks: u64,
    /// Limit of credit notices in the writer's queue.
    max_notices: u64,
    /// Chunks released according to the notices taken from the queue. The credit that accompanies
    /// them may be newer.
    noticed: u64,
    /// Chunks beyond the credit: the end of each, and the message that ends with it.
    unread: VecDeque<(u64, Option<u64>)>,
    /// Messages below the credit that `next_read` has not returned yet.
    read: VecDeque<u64>,
}

impl WriterState {
    /// A writer of an empty ring, with chunks of at most `max_payload` bytes (or what the ring
    /// allows, if that is less).
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

    /// Sets the ring index of credit notices, if it is not the reader's index: two readers may use
    /// the same one.
    pub fn with_sender_index(self, sender_index: u16) -> Self {
        Self { sender_index, ..self }
    }

    /// Continues after messages that an earlier reader completed.
    pub fn resume_after(self, completed_messages: u64) -> Self {
        Self { next_message: completed_messages, ..self }
    }

    /// Limits the chunks that credit has not passed.
    pub fn limit_chunks(self, max_chunks: u64) -> Self {
        Self { max_chunks: self.max_chunks.min(max_chunks), ..self }
    }

    /// Limits the credit notices in the writer's queue. The reader sends at most one for each
    /// chunk, so no chunk is planned while that many notices may be in the queue.
    pub fn limit_notices(self, max_notices: u64) -> Self {
        Self { max_notices, ..self }
    }

    /// Begins a message. Its number is taken with the first chunk; until then it can be abandoned.
    /// Afterwards it must be written to its end before another message: chunks of two messages do
    /// not mix.
    pub fn begin(&self, topic: u32, length: u64) -> Message {
        let (epoch, number) = (self.epoch, self.next_message);
        Message { epoch, number, topic, length, written: 0, has_begun: false }
    }

    fn is_next(&self, message: &Message) -> bool {
        let number = match message.has_begun {
            true => message.number.checked_add(1),
            false => Some(message.number),
        };
        message.epoch == self.epoch
            && number == Some(self.next_message)
            && message.has_begun == self.is_partial
    }

    /// Plans the message's next chunk. Changes nothing, so the call can be repeated.
    pub fn plan(&self, message: &Message) -> Result<Chunk, Refused> {
        self.plan_within(message, u64::MAX)
    }

    /// Like [`plan`](Self::plan), for a chunk of at most `most` bytes of payload, at least one:
    /// where a message is assembled from pieces, a chunk has bytes of only one.
    pub fn plan_within(&self, message: &Message, most: u64) -> Result<Chunk, Refused> {
        if !self.is_next(message) {
            return Err(Refused::Stale);
        }
        let left = message.length - message.written;
        let mut payload = left.min(self.max_payload).min(most.max(1));
        let bytes_to_end = self.geometry.bytes_to_end(self.tail);
        let mut skipped = 0;
        if self.geometry.taken(payload) > bytes_to_end {
            // A part may fit before the end, unless that is hardly more than a header.
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
        Ok(Chunk {
            header,
            header_at: match self.geometry.layout() {
                ChunkLayout::SeparateHeader => {
                    self.sequence % self.geometry.max_chunks() * self.geometry.header_stride()
                }
                ChunkLayout::InlineHeader => at,
            },
            payload_at: at + self.geometry.payload_offset(),
            skipped,
            immediate,
        })
    }

    /// Records that the chunk was posted.
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

    /// Is this a credit notice for this ring? The credit accompanies it; the notice itself frees an
    /// entry of the queue.
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

    /// Chunks without a credit notice so far: their notices may still arrive or be in the queue.
    pub fn unnoticed(&self) -> u64 {
        self.sequence - self.noticed
    }

    /// Takes a credit. True if it is new. A head behind the known one or beyond the tail is
    /// ignored, so credits may arrive in any order, and repeatedly.
    pub fn credit(&mut self, credit: &Credit) -> bool {
        credit.epoch == self.epoch && self.credit_to(credit.head)
    }

    /// Like [`credit`](Self::credit), for this epoch.
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

    /// The notice that no more chunks follow.
    pub fn end_notice(&self) -> u32 {
        let notice = RingNotice::WriterClosed { sequence: self.sequence as u16 };
        Immediate { ring: self.geometry.ring(), epoch: self.epoch, notice }.encode()
    }

    /// Does this notice say that the reader has closed the ring?
    pub fn is_reader_closed(&self, immediate: &Immediate) -> bool {
        immediate.notice == RingNotice::ReaderClosed && self.is_for_this_ring(immediate)
    }

    fn is_for_this_ring(&self, immediate: &Immediate) -> bool {
        immediate.matches_epoch(self.epoch) && immediate.ring == self.sender_index
    }

    /// The next message that the reader has released: its memory is free.
    pub fn next_read(&mut self) -> Option<u64> {
        self.read.pop_front()
    }

    /// Messages written, at least in part, over all epochs: the number of the next one.
    pub fn messages(&self) -> u64 {
        self.next_message
    }

    /// Bytes known to be free.
    pub fn free(&self) -> u64 {
        self.geometry.capacity() - (self.tail - self.credit)
    }

    /// The ring's geometry.
    pub fn geometry(&self) -> RingGeometry {
        self.geometry
    }

    /// The epoch in which it writes.
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// The longest message that is always one chunk: a longer one may be cut at the end of the
    /// ring.
    pub fn max_single_chunk(&self) -> u64 {
        self.max_payload / 4
    }

    pub(super) fn max_payload(&self) -> u64 {
        self.max_payload
    }

    /// Chunks written and not known to be released.
    pub fn unread(&self) -> usize {
        self.unread.len()
    }

    /// Bytes written in this epoch, with headers and skipped bytes.
    pub fn tail(&self) -> u64 {
        self.tail
    }

    /// The last known head of the reader.
    pub fn known_head(&self) -> u64 {
        self.credit
    }
}
