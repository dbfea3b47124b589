//! What an outbound topic writes, and from what.

use fabric::ring::Pushed;

use super::{COPIES, Destination, Hold, Outbound, Part, SHEET, Stop, TURN, Unread, Wire, Writing};
use crate::bridge::header::{Form, LONGEST_PREFIX, MessageHeader, TRAILER};
use crate::bridge::staging::{Need, Staged, State, Want};
use crate::bridge::{Now, Progress};
use crate::error::Result;

impl<W: Wire> Outbound<W> {
    pub(super) fn write(
        &mut self,
        place: usize,
        now: Now,
        wire: &mut W,
        progress: &mut Progress,
    ) -> std::result::Result<(), Stop> {
        for _ in 0..TURN {
            let Some(ring) = self.destinations[place].ring else { break };
            if self.destinations[place].writing.is_none() && !self.begin(place, ring, now, wire)? {
                break;
            }
            let destination = &mut self.destinations[place];
            let Some(writing) = &mut destination.writing else { break };
            let (message, part, at, hold) = match writing {
                Writing::Batch { message, sheet, length, .. } => {
                    let part = Part::Sheet { sheet: *sheet, length: *length };
                    (message, part, 0, Some(Hold::Sheet(*sheet)))
                }
                Writing::Long { message, sheet, prefix } if message.written() == 0 => {
                    let part = Part::Sheet { sheet: *sheet, length: *prefix };
                    (message, part, 0, Some(Hold::Sheet(*sheet)))
                }
                Writing::Long { message, prefix, .. } => {
                    let number = (destination.next - self.first) as usize;
                    let Some(entry) = self.entries.get(number) else { break };
                    let prefix = *prefix as u64;
                    if entry.pieces == 0 {
                        (message, Part::Direct(&entry.place), prefix, None)
                    } else {
                        let piece = self.manner.piece;
                        let number = ((message.written() - prefix) / piece).min(entry.pieces - 1);
                        let serial = entry.serial + number;
                        let from = number * piece;
                        let mut length = piece.min(entry.header.length - from);
                        if number + 1 == entry.pieces {
                            length += TRAILER as u64;
                        }
                        let ready = self.stage.find(serial);
                        let ready = ready.filter(|item| matches!(item.state, State::Ready));
                        let Some(item) = ready else { break };
                        let part = Part::Slot { slot: item.slot, length: length as usize };
                        (message, part, prefix + from, Some(Hold::Piece(serial)))
                    }
                }
            };
            let pushed = wire.push(ring, message, part, at).map_err(Stop::Peer)?;
            destination.is_busy = pushed == Pushed::Busy;
            match pushed {
                Pushed::Posted(_) | Pushed::Written => {}
                Pushed::Blocked(_) => {
                    if destination.blocked_since.is_none() {
                        destination.blocked_since = Some(now.steady);
                        destination.counters.blocked += 1;
                    }
                    break;
                }
                Pushed::Busy => {
                    progress.is_waiting = true;
                    break;
                }
            }
            progress.has_moved = true;
            let is_written = message.is_written();
            destination.end_block(now);
            // If the ring broke just now, what was given to it is on its way all the same.
            let marks = wire.marks(ring);
            let tail = marks.as_ref().map_or(u64::MAX, |marks| marks.tail);
            if let Some(hold) = hold {
                if let Hold::Piece(serial) = hold
                    && let Some(item) = self.stage.find(serial)
                {
                    item.holds += 1;
                }
                destination.held.push_back((tail, hold));
            }
            if is_written {
                let (messages, is_copied) = match destination.writing.take() {
                    Some(Writing::Batch { messages, .. }) => (messages, true),
                    _ => {
                        destination.next += 1;
                        (1, false)
                    }
                };
                let unread = Unread { entry: destination.next, messages, is_copied };
                destination.unread.push_back((tail, unread));
            }
            marks.map_err(Stop::Peer)?;
        }
        Ok(())
    }

    /// Begins with the next message, or with several small ones. False if there is none, or no
    /// sheet.
    fn begin(
        &mut self,
        place: usize,
        ring: W::Ring,
        now: Now,
        wire: &mut W,
    ) -> std::result::Result<bool, Stop> {
        let (first, end) = (self.first, self.end());
        let destination = &mut self.destinations[place];
        // What it has from an earlier life of ours, and what is gone.
        while destination.next < end {
            let entry = &self.entries[(destination.next - first) as usize];
            if entry.header.position < destination.from {
                destination.pass(1);
            } else if entry.is_gone {
                destination.miss(1);
            } else {
                break;
            }
        }
        if destination.next == end {
            return Ok(false);
        }
        let is_first = !destination.held.iter().any(|(_, hold)| matches!(hold, Hold::Sheet(_)));
        let Some(sheet) = wire.take_sheet(is_first) else { return Ok(false) };
        let filled = self.fill(place, ring, sheet, now, wire);
        if filled.is_err() {
            // Nothing was written from it.
            wire.give_sheet(sheet, false);
        }
        filled.map(|()| true)
    }

    /// Puts what is next on a sheet.
    fn fill(
        &mut self,
        place: usize,
        ring: W::Ring,
        sheet: u32,
        now: Now,
        wire: &mut W,
    ) -> std::result::Result<(), Stop> {
        let (first, end) = (self.first, self.end());
        let destination = &mut self.destinations[place];
        let entry_of = |number: u64| &self.entries[(number - first) as usize];
        let limit = wire.longest_whole(ring).map_err(Stop::Peer)?.min(SHEET);
        let mut bytes = [0; LONGEST_PREFIX];
        let entry = entry_of(destination.next);
        if !entry.is_small(limit) {
            let header = MessageHeader { posted: now.real, ..entry.header };
            let is_staged = entry.pieces > 0;
            let prefix = header.encode(is_staged, &mut bytes);
            wire.write_sheet(sheet, 0, &bytes[..prefix]).map_err(Stop::Topic)?;
            let trailer = if is_staged { TRAILER } else { 0 };
            let length = (prefix + trailer) as u64 + header.length;
            let message = wire.begin(ring, Form::Long, length).map_err(Stop::Peer)?;
            destination.writing = Some(Writing::Long { message, sheet, prefix });
            destination.counters.bytes += header.length;
            return Ok(());
        }
        let (mut at, mut next, mut payloads) = (0, destination.next, 0);
        while next < end {
            let entry = entry_of(next);
            let header = MessageHeader { posted: now.real, ..entry.header };
            let taken = header.in_batch();
            if entry.is_gone || !entry.is_small(limit) || at + taken > limit {
                break;
            }
            let prefix = header.encode(false, &mut bytes);
            wire.write_sheet(sheet, at, &bytes[..prefix]).map_err(Stop::Topic)?;
            let length = header.length as usize;
            if length > 0 {
                wire.gather(sheet, at + prefix, &entry.place, length).map_err(Stop::Topic)?;
            }
            let filled = prefix + length;
            if filled < taken {
                let nothing = &[0; 8][..taken - filled];
                wire.write_sheet(sheet, at + filled, nothing).map_err(Stop::Topic)?;
            }
            at += taken;
            next += 1;
            payloads += header.length;
        }
        let message = wire.begin(ring, Form::Batch, at as u64).map_err(Stop::Peer)?;
        let messages = next - destination.next;
        destination.next = next;
        destination.counters.bytes += payloads;
        destination.counters.batches += 1;
        destination.writing = Some(Writing::Batch { message, sheet, length: at, messages });
        Ok(())
    }

    /// Where a destination is among the pieces.
    fn cursor(&self, destination: &Destination<W::Ring>) -> u64 {
        let Some(entry) = self.entry(destination.next) else { return self.serials };
        match &destination.writing {
            Some(Writing::Long { message, prefix, .. }) if entry.pieces > 0 => {
                let payload = message.written().saturating_sub(*prefix as u64);
                entry.serial + (payload / self.manner.piece).min(entry.pieces - 1)
            }
            _ => entry.serial,
        }
    }

    /// Has pieces copied that are wanted now or soon.
    pub(super) fn stage_more(
        &mut self,
        now: Now,
        wire: &mut W,
        progress: &mut Progress,
    ) -> Result<bool> {
        let mut wants = std::mem::take(&mut self.wants);
        wants.clear();
        for destination in self.destinations.iter().filter(|d| d.ring.is_some()) {
            let is_blocked = destination.blocked_since.is_some();
            wants.push(Want { from: self.cursor(destination), is_blocked });
        }
        while let Some(item) = self.stage.unneeded(&wants) {
            wire.give_slot(item.slot, item.is_tainted);
        }
        let mut has_moved = false;
        let ahead = self.stage.ahead();
        let (count, turn) = (wants.len(), self.turn);
        let mut room = COPIES;
        // First what is wanted now, by everybody; then what will be.
        'all: for distance in 0..ahead {
            for place in (0..count).map(|place| (place + turn) % count) {
                let serial = wants[place].from + distance;
                if serial >= self.serials || self.stage.has(serial) {
                    continue;
                }
                if wants[place].is_blocked && distance > 0 {
                    continue;
                }
                if room == 0 {
                    break 'all;
                }
                let below = if distance == 0 { Need::Now } else { Need::Soon };
                match self.copy(serial, &wants, below, now, wire) {
                    Ok(begun) => {
                        has_moved |= begun;
                        room -= usize::from(begun);
                        progress.is_waiting |= !begun && distance == 0;
                    }
                    Err(error) => {
                        self.wants = wants;
                        return Err(error);
                    }
                }
            }
        }
        self.wants = wants;
        Ok(has_moved)
    }

    /// Begins to copy a piece, if there is a slot for it, or one whose piece is needed less.
    fn copy(
        &mut self,
        serial: u64,
        wants: &[Want],
        below: Need,
        now: Now,
        wire: &mut W,
    ) -> Result<bool> {
        let number = self.entries.partition_point(|entry| entry.serial + entry.pieces <= serial);
        let Some(entry) = self.entries.get_mut(number).filter(|entry| !entry.is_gone) else {
            return Ok(false);
        };
        let mut slot = None;
        if self.stage.has_place() {
            slot = wire.take_slot(&entry.place, self.stage.is_empty())?;
        }
        if slot.is_none() {
            let Some(victim) = self.stage.victim(wants, below) else { return Ok(false) };
            wire.give_slot(victim.slot, victim.is_tainted);
            slot = wire.take_slot(&entry.place, self.stage.is_empty())?;
        }
        let Some(slot) = slot else { return Ok(false) };
        let offset = (serial - entry.serial) * self.manner.piece;
        let length = self.manner.piece.min(entry.header.length - offset);
        let ticket = match wire.copy_out(slot, &entry.place, offset, length) {
            Ok(ticket) => ticket,
            Err(error) => {
                wire.give_slot(slot, true);
                return Err(error);
            }
        };
        entry.copy_begun.get_or_insert(now.steady);
        self.stage.put(Staged {
            serial,
            entry: self.first + number as u64,
            slot,
            order: 0,
            state: State::Copying(ticket, now.steady),
            holds: 0,
            is_tainted: false,
        });
        Ok(true)
    }
}
