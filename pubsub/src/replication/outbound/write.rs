//! Writing an outbound topic: batches, long messages, and the copying of staged pieces.

use fabric::ring::Pushed;

use super::staging::PiecePriority;
use super::{
    BATCH_BUFFER_LENGTH, CHUNKS_PER_TURN, COPIES_PER_TURN, CopyState, Destination,
    MessageInProgress, MessageStart, Outbound, OutboundTransport, Part, PieceDemand, StagedPiece,
    UnacknowledgedMessage, WriteSource,
};
use crate::error::{Error, ErrorKind, Result};
use crate::replication::message_header::{
    MAX_PREFIX_LENGTH, MessageHeader, RingMessageKind, TRAILER_LENGTH,
};
use crate::replication::{ClockReading, Progress, TurnFailure};

impl<R> Destination<R> {
    /// The outcome of an attempt to write a chunk. False if none can be written now.
    fn pushed(&mut self, pushed: Pushed, now: ClockReading, progress: &mut Progress) -> bool {
        self.is_busy = pushed == Pushed::Busy;
        match pushed {
            Pushed::Posted(_) | Pushed::Written => {
                progress.has_moved = true;
                self.end_blocked(now);
                return true;
            }
            Pushed::Blocked(_) => {
                if self.blocked_since.is_none() {
                    self.blocked_since = Some(now.monotonic);
                    self.counters.blocked += 1;
                }
            }
            Pushed::Busy => progress.is_waiting = true,
        }
        false
    }
}

impl<W: OutboundTransport> Outbound<W> {
    pub(super) fn write(
        &mut self,
        index: usize,
        now: ClockReading,
        wire: &mut W,
        progress: &mut Progress,
    ) -> std::result::Result<(), TurnFailure> {
        for _ in 0..CHUNKS_PER_TURN {
            let Some(ring) = self.destinations[index].ring else { break };
            if self.destinations[index].probe.as_ref().is_some_and(|probe| probe.end.is_none()) {
                match self.write_probe((index, ring), now, wire, progress)? {
                    true => continue,
                    false => break,
                }
            }
            if self.destinations[index].in_progress.is_none()
                && !self.begin(index, ring, now, wire)?
            {
                break;
            }
            let destination = &mut self.destinations[index];
            let Some(in_progress) = &mut destination.in_progress else { break };
            let prefix = in_progress.prefix();
            let MessageInProgress { message, start, batched } = in_progress;
            let mut inline: &[u8] = &[];
            let (part, at, source) = if let MessageStart::BatchBuffer(batch_buffer, length) = start
                && message.written() == 0
            {
                let part = Part::BatchBuffer { batch_buffer: *batch_buffer, length: *length };
                (part, 0, Some(WriteSource::BatchBuffer(*batch_buffer)))
            } else {
                let Some(entry) = self.entries.get((destination.next - self.first) as usize) else {
                    break;
                };
                if let MessageStart::Inline(bytes) = start {
                    if message.written() == 0 {
                        inline = bytes;
                    }
                    match entry.header.length {
                        0 => (Part::Nothing, 0, None),
                        _ => (Part::Direct(&entry.payload), 0, None),
                    }
                } else if entry.pieces == 0 {
                    (Part::Direct(&entry.payload), prefix, None)
                } else {
                    let piece = self.options.piece;
                    let number = ((message.written() - prefix) / piece).min(entry.pieces - 1);
                    let piece_index = entry.piece_index + number;
                    let from = number * piece;
                    let mut length = piece.min(entry.header.length - from);
                    if number + 1 == entry.pieces {
                        length += TRAILER_LENGTH as u64;
                    }
                    let ready = self.staging.find(piece_index).filter(|item| !item.is_copying());
                    let Some(item) = ready else { break };
                    let part = Part::Slot { slot: item.slot, length: length as usize };
                    (part, prefix + from, Some(WriteSource::Piece(piece_index)))
                }
            };
            let pushed = wire.push(ring, message, (part, at), inline);
            let pushed = pushed.map_err(TurnFailure::Connection)?;
            let (is_written, batched) = (message.is_written(), *batched);
            if !destination.pushed(pushed, now, progress) {
                break;
            }
            // A ring that just broke may still have the write in flight.
            let ring_progress = wire.ring_progress(ring);
            let tail = ring_progress.as_ref().map_or(u64::MAX, |ring_progress| ring_progress.tail);
            if let Some(source) = source {
                if let WriteSource::Piece(piece_index) = source
                    && let Some(item) = self.staging.find(piece_index)
                {
                    item.pending_writes += 1;
                }
                destination.in_flight_writes.push_back((tail, source));
            }
            if is_written {
                destination.in_progress = None;
                destination.next += u64::from(batched.is_none());
                let unacknowledged = UnacknowledgedMessage {
                    entry: destination.next,
                    messages: batched.unwrap_or(1),
                    is_copied: batched.is_some(),
                };
                destination.unacknowledged.push_back((tail, unacknowledged));
            }
            ring_progress.map_err(TurnFailure::Connection)?;
        }
        Ok(())
    }

    /// Begins with the next message, or with several small ones. False if there is none, or no free
    /// batch buffer.
    fn begin(
        &mut self,
        index: usize,
        ring: W::Ring,
        now: ClockReading,
        wire: &mut W,
    ) -> std::result::Result<bool, TurnFailure> {
        let (first, end) = (self.first, self.end());
        let destination = &mut self.destinations[index];
        // Entries that it has from an earlier connection, and dropped ones.
        while destination.next < end {
            let entry = &self.entries[(destination.next - first) as usize];
            if entry.header.position < destination.from {
                destination.skip(1);
            } else if entry.is_dropped {
                destination.skip_missed(1);
            } else {
                break;
            }
        }
        if destination.next == end {
            return Ok(false);
        }
        if destination.counters.is_direct {
            self.begin_inline(index, ring, now, wire).map_err(TurnFailure::Connection)?;
            return Ok(true);
        }
        let is_first = !destination
            .in_flight_writes
            .iter()
            .any(|(_, source)| matches!(source, WriteSource::BatchBuffer(_)));
        let Some(batch_buffer) = wire.take_batch_buffer(is_first) else { return Ok(false) };
        let filled = self.fill(index, ring, batch_buffer, now, wire);
        // Nothing was written from it.
        filled.inspect_err(|_| wire.release_batch_buffer(batch_buffer, false)).map(|()| true)
    }

    /// Fills a batch buffer with the next message or messages.
    fn fill(
        &mut self,
        index: usize,
        ring: W::Ring,
        batch_buffer: u32,
        now: ClockReading,
        wire: &mut W,
    ) -> std::result::Result<(), TurnFailure> {
        let (first, end) = (self.first, self.end());
        let destination = &mut self.destinations[index];
        let entry_of = |number: u64| &self.entries[(number - first) as usize];
        let limit = wire.max_single_chunk(ring).map_err(TurnFailure::Connection)?;
        let limit = limit.min(BATCH_BUFFER_LENGTH);
        let mut bytes = [0; MAX_PREFIX_LENGTH];
        let entry = entry_of(destination.next);
        let (kind, length, ring_length, payloads, batched);
        if entry.is_small(limit) {
            let (mut at, mut next, mut sum) = (0, destination.next, 0);
            while next < end {
                let entry = entry_of(next);
                let header = MessageHeader { posted: now.realtime, ..entry.header };
                let taken = header.batch_length();
                if entry.is_dropped || !entry.is_small(limit) || at + taken > limit {
                    break;
                }
                let prefix = header.encode(false, &mut bytes);
                wire.write_batch_buffer(batch_buffer, at, &bytes[..prefix])?;
                let length = header.length as usize;
                if length > 0 {
                    wire.gather(batch_buffer, at + prefix, &entry.payload, length)?;
                }
                let filled = prefix + length;
                if filled < taken {
                    let nothing = &[0; 8][..taken - filled];
                    wire.write_batch_buffer(batch_buffer, at + filled, nothing)?;
                }
                at += taken;
                next += 1;
                sum += header.length;
            }
            (kind, length, ring_length) = (RingMessageKind::Batch, at, at as u64);
            (payloads, batched) = (sum, Some(next - destination.next));
        } else {
            let header = MessageHeader { posted: now.realtime, ..entry.header };
            let is_staged = entry.pieces > 0;
            let prefix = header.encode(is_staged, &mut bytes);
            wire.write_batch_buffer(batch_buffer, 0, &bytes[..prefix])?;
            let trailer = if is_staged { TRAILER_LENGTH } else { 0 };
            (kind, length) = (RingMessageKind::Long, prefix);
            ring_length = (prefix + trailer) as u64 + header.length;
            (payloads, batched) = (header.length, None);
        }
        let message = wire.begin(ring, kind, ring_length).map_err(TurnFailure::Connection)?;
        let start = MessageStart::BatchBuffer(batch_buffer, length);
        destination.in_progress = Some(MessageInProgress { message, start, batched });
        destination.next += batched.unwrap_or(0);
        destination.counters.bytes += payloads;
        destination.counters.batches += u64::from(batched.is_some());
        Ok(())
    }

    /// Begins the next message of a ring in device memory.
    fn begin_inline(
        &mut self,
        index: usize,
        ring: W::Ring,
        now: ClockReading,
        wire: &mut W,
    ) -> Result<()> {
        let destination = &mut self.destinations[index];
        let entry = &self.entries[(destination.next - self.first) as usize];
        let header = MessageHeader { posted: now.realtime, ..entry.header };
        let mut bytes = [0; MAX_PREFIX_LENGTH];
        let prefix = header.encode(false, &mut bytes);
        let message = wire.begin(ring, RingMessageKind::Inline, header.length)?;
        let start = MessageStart::Inline(bytes[..prefix].into());
        destination.in_progress = Some(MessageInProgress { message, start, batched: None });
        destination.counters.bytes += header.length;
        Ok(())
    }

    /// Writes the next chunk of a probe. False if none can be written now.
    fn write_probe(
        &mut self,
        (index, ring): (usize, W::Ring),
        now: ClockReading,
        wire: &mut W,
        progress: &mut Progress,
    ) -> std::result::Result<bool, TurnFailure> {
        let destination = &mut self.destinations[index];
        let Some(writing) = &mut destination.probe else { return Ok(false) };
        if !wire.is_probe_ready(ring).map_err(TurnFailure::Connection)? {
            let since = *writing.since.get_or_insert(now.monotonic);
            if now.monotonic - since > self.options.timeout {
                let detail = "the device did not copy the bytes of a probe within the timeout";
                let error = Error::new("write to node", ErrorKind::DeadlineExceeded, detail);
                return Err(TurnFailure::Connection(error));
            }
            progress.is_waiting = true;
            return Ok(false);
        }
        let Some(part) = writing.probe.message() else { return Ok(false) };
        let message = match &mut writing.message {
            Some(message) => message,
            none => {
                let begun = wire.begin(ring, RingMessageKind::Probe, part.length());
                none.insert(begun.map_err(TurnFailure::Connection)?)
            }
        };
        let from = Part::Probe { offset: part.offset(), length: part.length() };
        let pushed = wire.push(ring, message, (from, 0), &[]).map_err(TurnFailure::Connection)?;
        if message.is_written() {
            writing.message = None;
            writing.probe.advance();
            if writing.probe.message().is_none() {
                let tail = wire.ring_progress(ring).map_err(TurnFailure::Connection)?.tail;
                writing.end = Some(tail);
            }
        }
        Ok(destination.pushed(pushed, now, progress))
    }

    /// The first piece that a destination still needs.
    fn cursor(&self, destination: &Destination<W::Ring>) -> u64 {
        let Some(entry) = self.entry(destination.next) else { return self.next_piece };
        match &destination.in_progress {
            Some(writing) if writing.batched.is_none() && entry.pieces > 0 => {
                let payload = writing.message.written().saturating_sub(writing.prefix());
                entry.piece_index + (payload / self.options.piece).min(entry.pieces - 1)
            }
            _ => entry.piece_index,
        }
    }

    /// Begins copies of pieces that are needed now or soon.
    pub(super) fn stage_more(
        &mut self,
        now: ClockReading,
        wire: &mut W,
        progress: &mut Progress,
    ) -> Result<bool> {
        let mut demands = std::mem::take(&mut self.demands);
        demands.clear();
        for destination in
            self.destinations.iter().filter(|d| d.ring.is_some() && !d.counters.is_direct)
        {
            let is_blocked = destination.blocked_since.is_some();
            demands.push(PieceDemand { from: self.cursor(destination), is_blocked });
        }
        // Pieces that no destination needs.
        while let Some(item) = self.staging.victim(&demands, PiecePriority::Blocked) {
            wire.release_slot(item.slot, item.is_quarantined);
        }
        let mut has_moved = false;
        let ahead = self.staging.ahead();
        let (count, turn) = (demands.len(), self.turn);
        let mut budget = COPIES_PER_TURN;
        // Pieces needed now come first, then those needed later.
        'all: for distance in 0..ahead {
            for index in (0..count).map(|offset| (offset + turn) % count) {
                let piece_index = demands[index].from + distance;
                if piece_index >= self.next_piece
                    || self.staging.has(piece_index)
                    || demands[index].is_blocked && distance > 0
                {
                    continue;
                }
                if budget == 0 {
                    break 'all;
                }
                let below = if distance == 0 { PiecePriority::Now } else { PiecePriority::Soon };
                let has_begun = self.copy(piece_index, &demands, below, now, wire)?;
                has_moved |= has_begun;
                budget -= usize::from(has_begun);
                progress.is_waiting |= !has_begun && distance == 0;
            }
        }
        self.demands = demands;
        Ok(has_moved)
    }

    /// Begins to copy a piece, if there is a slot for it, or a slot whose piece is needed less.
    fn copy(
        &mut self,
        piece_index: u64,
        demands: &[PieceDemand],
        below: PiecePriority,
        now: ClockReading,
        wire: &mut W,
    ) -> Result<bool> {
        let number =
            self.entries.partition_point(|entry| entry.piece_index + entry.pieces <= piece_index);
        let Some(entry) = self.entries.get_mut(number).filter(|entry| !entry.is_dropped) else {
            return Ok(false);
        };
        let mut slot = None;
        if self.staging.has_free_slot() {
            slot = wire.take_slot(&entry.payload, self.staging.is_empty())?;
        }
        if slot.is_none() {
            let Some(victim) = self.staging.victim(demands, below) else { return Ok(false) };
            wire.release_slot(victim.slot, victim.is_quarantined);
            slot = wire.take_slot(&entry.payload, self.staging.is_empty())?;
        }
        let Some(slot) = slot else { return Ok(false) };
        let offset = (piece_index - entry.piece_index) * self.options.piece;
        let length = self.options.piece.min(entry.header.length - offset);
        let copied = wire.copy_out(slot, &entry.payload, offset, length);
        let copy_handle = copied.inspect_err(|_| wire.release_slot(slot, true))?;
        entry.copy_begun.get_or_insert(now.monotonic);
        self.staging.put(StagedPiece {
            piece_index,
            entry: self.first + number as u64,
            slot,
            order: 0,
            state: CopyState::Copying(copy_handle, now.monotonic),
            pending_writes: 0,
            is_quarantined: false,
        });
        Ok(true)
    }
}
