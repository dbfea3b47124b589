//! Which messages are retained, for which destinations, and when they are released.

use std::ops::Range;

use super::{
    Destination, Entry, MessageInProgress, Outbound, OutboundTransport, READ_AHEAD,
    UnacknowledgedMessage,
};
use crate::error::{Error, ErrorKind, Result};
use crate::replication::{ClockReading, OutgoingMessage, Source};

/// The limit of retained messages is reached, and no entry can be dropped.
struct Full;

impl<R> Destination<R> {
    /// Entries before this one are written and completed, or were copied.
    fn left_to(&self) -> u64 {
        let is_free = |(end, unacknowledged): &&(u64, UnacknowledgedMessage)| {
            *end <= self.left || unacknowledged.is_copied
        };
        let left = self.unacknowledged.iter().take_while(is_free).last();
        left.map_or(self.delivered, |(_, unacknowledged)| unacknowledged.entry)
    }

    /// The entries that the local provider may still read.
    pub(super) fn in_flight_entries(&self) -> Range<u64> {
        let end = match &self.in_progress {
            Some(MessageInProgress { batched: None, .. }) => self.next + 1,
            // These messages were copied already.
            Some(MessageInProgress { batched: Some(count), .. }) => {
                self.next.saturating_sub(*count)
            }
            None => self.next,
        };
        self.left_to().min(end)..end
    }

    /// The next `count` entries are missed by this destination.
    pub(super) fn skip_missed(&mut self, count: u64) {
        self.counters.missed += count;
        self.skip(count);
    }

    /// The next `count` entries are not needed by this destination.
    pub(super) fn skip(&mut self, count: u64) {
        self.next += count;
        // A message in progress includes the skipped entries when it is written.
        if self.in_progress.is_some() {
            return;
        }
        match self.unacknowledged.back_mut() {
            Some((_, unacknowledged)) => unacknowledged.entry = self.next,
            None => self.delivered = self.next,
        }
    }
}

impl<W: OutboundTransport> Outbound<W> {
    /// Reports the position of each destination to the source.
    pub(super) fn report_delivered(&mut self, source: &mut dyn Source<W::PayloadLocation>) {
        if self.options.max_retained.is_some() {
            return;
        }
        let (entries, first, taken_to) = (&self.entries, self.first, self.taken_to);
        for destination in &mut self.destinations {
            let delivered = destination.delivered;
            if destination.reported.replace(delivered) == Some(delivered) {
                continue;
            }
            let next = entries.get(delivered.saturating_sub(first) as usize);
            let next = next.map_or(taken_to, |next| next.header.position);
            source.note_delivered(destination.node, next.max(destination.from));
        }
    }

    /// Releases the messages that all destinations have.
    pub(super) fn release(
        &mut self,
        source: &mut dyn Source<W::PayloadLocation>,
        wire: &mut W,
    ) -> bool {
        let lowest = self.destinations.iter().map(|destination| destination.delivered).min();
        let pinned = self.retiring.iter().filter(|retiring| !retiring.entries.is_empty());
        let pinned = pinned.map(|retiring| retiring.entries.start).min();
        let lowest = lowest.unwrap_or(self.end()).min(pinned.unwrap_or(u64::MAX));
        let mut through = None;
        while self.first < lowest {
            let Some(entry) = self.entries.pop_front() else { break };
            through = Some(entry.header.position);
            self.dropped -= usize::from(entry.is_dropped);
            self.first += 1;
        }
        let has_trimmed = self.trim();
        if let Some(through) = through {
            source.release(through);
        }
        let has_moved = through.is_some() || has_trimmed;
        if has_moved {
            let entries = self.first..self.end();
            while let Some(item) = self.staging.outside_entries(&entries) {
                wire.release_slot(item.slot, item.is_quarantined);
            }
        }
        has_moved
    }

    /// Reads messages that a destination may write soon.
    pub(super) fn read_source(
        &mut self,
        now: ClockReading,
        source: &mut dyn Source<W::PayloadLocation>,
        wire: &mut W,
    ) -> Result<bool> {
        let mut has_moved = false;
        let connected = self.destinations.iter().filter(|destination| destination.ring.is_some());
        let leader = match connected.map(|destination| destination.next).max() {
            Some(leader) => leader,
            // Where only the newest messages are retained, publishers do not wait for an
            // unconnected destination.
            None if self.options.max_retained.is_some() && !self.destinations.is_empty() => {
                has_moved |= self.drain(source);
                self.end()
            }
            None => return Ok(false),
        };
        // A bounded read-ahead, so that the destination that leads misses no message.
        let ahead = self
            .options
            .max_retained
            .map_or(READ_AHEAD, |max_retained| READ_AHEAD.min(max_retained as u64 / 2).max(1));
        while self.end() - leader < ahead {
            let Ok(victim) = self.make_room(leader) else {
                self.on_full(now, wire);
                return Ok(has_moved);
            };
            let Some(OutgoingMessage { header, place: payload }) = source.next()? else { break };
            if let Some(victim) = victim {
                self.drop_entry(victim, source);
            }
            let is_staged = header.length > 0 && wire.is_staged(&payload);
            let pieces = if is_staged { header.length.div_ceil(self.options.piece) } else { 0 };
            let piece_index = self.next_piece;
            self.next_piece += pieces;
            self.taken_to = header.position + 1;
            let (copy_begun, is_dropped) = (None, false);
            let entry = Entry { header, payload, piece_index, pieces, copy_begun, is_dropped };
            self.entries.push_back(entry);
            has_moved = true;
        }
        self.full_since = None;
        Ok(has_moved)
    }

    /// Finds the entry to drop for a new one, if one must be dropped. Where not all messages are
    /// retained, it is the oldest that no destination is writing: destinations that have not begun
    /// with it miss it. A message that was written and completed is dropped, too, and missed should
    /// that ring be lost. The destination that leads misses nothing.
    fn make_room(&self, leader: u64) -> std::result::Result<Option<u64>, Full> {
        match self.options.max_retained {
            Some(max_retained) if self.entries.len() - self.dropped >= max_retained => {}
            _ => return Ok(None),
        }
        let is_droppable = |number: &u64| {
            self.entry(*number).is_some_and(|entry| !entry.is_dropped) && !self.is_in_use(*number)
        };
        (self.first..leader).find(is_droppable).map(Some).ok_or(Full)
    }

    /// Drops the oldest entries while the limit is reached. Otherwise publishers of this node could
    /// publish nothing that replaces them. True if any was dropped.
    fn drain(&mut self, source: &mut dyn Source<W::PayloadLocation>) -> bool {
        let most = self.options.max_retained.unwrap_or(usize::MAX);
        let mut has_moved = false;
        while self.entries.len() - self.dropped >= most {
            let Ok(Some(oldest)) = self.make_room(self.end()) else { break };
            self.drop_entry(oldest, source);
            has_moved = true;
        }
        has_moved
    }

    fn drop_entry(&mut self, number: u64, source: &mut dyn Source<W::PayloadLocation>) {
        let Some(entry) = self.entries.get_mut((number - self.first) as usize) else { return };
        entry.is_dropped = true;
        let position = entry.header.position;
        self.dropped += 1;
        if number == self.first {
            self.trim();
            source.release(position);
        } else {
            source.release_one(position);
        }
    }

    /// Returns true if no entry could be dropped at its last turn: then it needs polling.
    pub(crate) fn is_stalled(&self) -> bool {
        self.full_since.is_some()
    }

    /// Returns true if a destination, a provider or a device may still read an entry.
    fn is_in_use(&self, number: u64) -> bool {
        self.destinations
            .iter()
            .any(|destination| destination.in_flight_entries().contains(&number))
            || self.retiring.iter().any(|retiring| retiring.entries.contains(&number))
            || self.staging.is_copying(number)
    }

    /// Removes dropped entries at the front. True if there were any.
    fn trim(&mut self) -> bool {
        let before = self.first;
        while self.entries.front().is_some_and(|entry| entry.is_dropped) {
            self.entries.pop_front();
            self.dropped -= 1;
            self.first += 1;
        }
        for destination in &mut self.destinations {
            // Entries that were written and completed are still to be acknowledged.
            if destination.next < self.first {
                let missed = self.first - destination.next;
                destination.skip_missed(missed);
            }
        }
        self.first > before
    }

    /// No entry can be dropped. After the timeout, the destinations that block are disconnected;
    /// their writes in flight are waited for, or the endpoint is closed.
    fn on_full(&mut self, now: ClockReading, wire: &mut W) {
        let since = *self.full_since.get_or_insert(now.monotonic);
        if now.monotonic - since <= self.options.timeout {
            return;
        }
        self.full_since = None;
        let blocks = |destination: &Destination<_>| {
            destination.ring.is_some() && !destination.in_flight_entries().is_empty()
        };
        let lowest = self.destinations.iter().filter(|one| blocks(one));
        let Some(lowest) = lowest.map(|destination| destination.in_flight_entries().start).min()
        else {
            return;
        };
        for index in 0..self.destinations.len() {
            let destination = &self.destinations[index];
            if blocks(destination) && destination.in_flight_entries().start == lowest {
                let detail = "the node does not read, and blocks all other nodes";
                let error = Error::new("write to node", ErrorKind::DeadlineExceeded, detail);
                self.disconnect_failed(index, error, wire);
            }
        }
    }
}
