//! Which messages are kept, for whom, and when they are let go of.

use std::ops::Range;

use super::{
    Destination, Entry, MessageInProgress, Outbound, OutboundTransport, READ_AHEAD,
    UnacknowledgedMessage,
};
use crate::error::{Error, ErrorKind, Result};
use crate::replication::{Now, OutgoingMessage, Source};

/// There is no room for one more message, and nothing that could make it.
struct Full;

impl<R> Destination<R> {
    /// Up to this entry all that was written has left, or was copied.
    fn left_to(&self) -> u64 {
        let is_free = |(end, unacknowledged): &&(u64, UnacknowledgedMessage)| {
            *end <= self.left || unacknowledged.is_copied
        };
        let left = self.unacknowledged.iter().take_while(is_free).last();
        left.map_or(self.delivered, |(_, unacknowledged)| unacknowledged.entry)
    }

    /// The entries that were begun, and that our provider may still read.
    pub(super) fn on_its_way(&self) -> Range<u64> {
        let end = match &self.in_progress {
            Some(MessageInProgress::Long { .. }) => self.next + 1,
            // They were copied already.
            Some(MessageInProgress::Batch { messages, .. }) => self.next.saturating_sub(*messages),
            None => self.next,
        };
        self.left_to().min(end)..end
    }
}

impl<W: OutboundTransport> Outbound<W> {
    /// Tells the source how far each destination is.
    pub(super) fn report_delivered(
        &mut self,
        source: &mut (impl Source<W::PayloadLocation> + ?Sized),
    ) {
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

    /// Lets go of what all have.
    pub(super) fn release(
        &mut self,
        source: &mut (impl Source<W::PayloadLocation> + ?Sized),
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
            self.release_slots(wire);
        }
        has_moved
    }

    fn release_slots(&mut self, wire: &mut W) {
        let entries = self.first..self.end();
        while let Some(item) = self.staging.outside_entries(&entries) {
            wire.release_slot(item.slot, item.is_quarantined);
        }
    }

    /// Takes messages while somebody may write them soon.
    pub(super) fn read_source(
        &mut self,
        now: Now,
        source: &mut (impl Source<W::PayloadLocation> + ?Sized),
        wire: &mut W,
    ) -> Result<bool> {
        let mut has_moved = false;
        let connected = self.destinations.iter().filter(|destination| destination.ring.is_some());
        let leader = match connected.map(|destination| destination.next).max() {
            Some(leader) => leader,
            // Where not all is kept nobody here has to wait because nobody there is connected: the
            // newest are kept.
            None if self.options.max_retained.is_some() && !self.destinations.is_empty() => {
                has_moved |= self.drain(source);
                self.end()
            }
            None => return Ok(false),
        };
        // No further than that whoever is ahead misses nothing.
        let ahead = self
            .options
            .max_retained
            .map_or(READ_AHEAD, |max_retained| READ_AHEAD.min(max_retained as u64 / 2).max(1));
        while self.end() - leader < ahead {
            let Ok(victim) = self.make_room(leader) else {
                self.on_full(now, wire);
                return Ok(has_moved);
            };
            let Some(OutgoingMessage { header, place }) = source.next()? else { break };
            if let Some(victim) = victim {
                self.drop_entry(victim, source);
            }
            let is_staged = header.length > 0 && wire.is_staged(&place);
            let pieces = if is_staged { header.length.div_ceil(self.options.piece) } else { 0 };
            let piece_index = self.next_piece;
            self.next_piece += pieces;
            let (copy_begun, is_dropped) = (None, false);
            self.taken_to = header.position + 1;
            self.entries.push_back(Entry {
                header,
                place,
                piece_index,
                pieces,
                copy_begun,
                is_dropped,
            });
            has_moved = true;
        }
        self.full_since = None;
        Ok(has_moved)
    }

    /// Is there room for one more, and which entry makes it? Where not all is kept, the oldest
    /// that nobody is in the middle of does, and those that had not begun with it miss it. What
    /// was written whole, and has left, is not kept any longer either: should that ring be lost,
    /// it is missed, too. But who is ahead of all misses nothing.
    fn make_room(&self, leader: u64) -> std::result::Result<Option<u64>, Full> {
        match self.options.max_retained {
            Some(max_retained) if self.entries.len() - self.dropped >= max_retained => {}
            _ => return Ok(None),
        }
        let may_go = |number: &u64| {
            self.entry(*number).is_some_and(|entry| !entry.is_dropped) && !self.is_in_use(*number)
        };
        (self.first..leader).find(may_go).map(Some).ok_or(Full)
    }

    /// Lets go of the oldest as soon as as many are held as may be: while all of them are, nobody
    /// here can publish one that would take its place. True if any went.
    fn drain(&mut self, source: &mut (impl Source<W::PayloadLocation> + ?Sized)) -> bool {
        let most = self.options.max_retained.unwrap_or(usize::MAX);
        let mut has_moved = false;
        while self.entries.len() - self.dropped >= most {
            let Ok(Some(oldest)) = self.make_room(self.end()) else { break };
            self.drop_entry(oldest, source);
            has_moved = true;
        }
        has_moved
    }

    fn drop_entry(&mut self, number: u64, source: &mut (impl Source<W::PayloadLocation> + ?Sized)) {
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

    /// Did nobody make room when it had its turn last? Then it wants to be looked after.
    pub(crate) fn is_stalled(&self) -> bool {
        self.full_since.is_some()
    }

    /// Does somebody read an entry, or may a provider or a device still?
    fn is_in_use(&self, number: u64) -> bool {
        self.destinations.iter().any(|destination| destination.on_its_way().contains(&number))
            || self.retiring.iter().any(|retiring| retiring.entries.contains(&number))
            || self.staging.is_copying(number)
    }

    /// Forgets entries that are gone, as long as nothing is in front of them. True if there were
    /// any.
    fn trim(&mut self) -> bool {
        let before = self.first;
        while self.entries.front().is_some_and(|entry| entry.is_dropped) {
            self.entries.pop_front();
            self.dropped -= 1;
            self.first += 1;
        }
        for destination in &mut self.destinations {
            // Those that were written and left are still on their way to be delivered.
            if destination.next < self.first {
                let missed = self.first - destination.next;
                destination.skip_missed(missed);
            }
        }
        self.first > before
    }

    /// Nobody makes room. Who is in the way for too long is not written to any more: what it may
    /// still read is waited for then, or the endpoint closed.
    fn on_full(&mut self, now: Now, wire: &mut W) {
        let since = *self.full_since.get_or_insert(now.monotonic);
        if now.monotonic - since <= self.options.timeout {
            return;
        }
        self.full_since = None;
        let is_in_the_way = |destination: &Destination<_>| {
            destination.ring.is_some() && !destination.on_its_way().is_empty()
        };
        let lowest = self.destinations.iter().filter(|one| is_in_the_way(one));
        let Some(lowest) = lowest.map(|destination| destination.on_its_way().start).min() else {
            return;
        };
        for place in 0..self.destinations.len() {
            let destination = &self.destinations[place];
            if is_in_the_way(destination) && destination.on_its_way().start == lowest {
                let detail = "it does not read, and blocks all other nodes";
                let error = Error::new("write to a node", ErrorKind::DeadlineExceeded, detail);
                self.disconnect_failed(place, error, wire);
            }
        }
    }
}

impl<R> Destination<R> {
    /// It does not get so many, which are next.
    pub(super) fn skip_missed(&mut self, count: u64) {
        self.counters.missed += count;
        self.skip(count);
    }

    /// It needs nothing of so many that are next.
    pub(super) fn skip(&mut self, count: u64) {
        self.next += count;
        match self.unacknowledged.back_mut() {
            Some((_, unacknowledged)) => unacknowledged.entry = self.next,
            // While it is in the middle of something, that says so when it is written.
            None if self.in_progress.is_none() => self.delivered = self.next,
            None => {}
        }
    }
}
