//! Which messages are kept, for whom, and when they are let go of.

use std::ops::Range;

use super::{AHEAD, Destination, Entry, Outbound, Unread, Wire, Writing};
use crate::bridge::{Now, Outgoing, Source};
use crate::error::{Error, ErrorKind, Result};

/// There is no room for one more message, and nothing that could make it.
struct Full;

impl<R> Destination<R> {
    /// Up to this entry all that was written has left, or was copied.
    fn left_to(&self) -> u64 {
        let is_free = |(end, unread): &&(u64, Unread)| *end <= self.left || unread.is_copied;
        let left = self.unread.iter().take_while(is_free).last();
        left.map_or(self.delivered, |(_, unread)| unread.entry)
    }

    /// The entries that were begun, and that our provider may still read.
    pub(super) fn on_its_way(&self) -> Range<u64> {
        let end = match &self.writing {
            Some(Writing::Long { .. }) => self.next + 1,
            // They were copied already.
            Some(Writing::Batch { messages, .. }) => self.next.saturating_sub(*messages),
            None => self.next,
        };
        self.left_to().min(end)..end
    }
}

impl<W: Wire> Outbound<W> {
    /// Tells the source how far each destination is.
    pub(super) fn tell_who_has_what(&mut self, source: &mut (impl Source<W::Place> + ?Sized)) {
        if self.manner.keep.is_some() {
            return;
        }
        let (entries, first, taken_to) = (&self.entries, self.first, self.taken_to);
        for destination in &mut self.destinations {
            let delivered = destination.delivered;
            if destination.told.replace(delivered) == Some(delivered) {
                continue;
            }
            let next = entries.get(delivered.saturating_sub(first) as usize);
            let next = next.map_or(taken_to, |next| next.header.position);
            source.has(destination.node, next.max(destination.from));
        }
    }

    /// Lets go of what all have.
    pub(super) fn release(
        &mut self,
        source: &mut (impl Source<W::Place> + ?Sized),
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
            self.gone -= usize::from(entry.is_gone);
            self.first += 1;
        }
        let has_trimmed = self.trim();
        if let Some(through) = through {
            source.release(through);
        }
        let has_moved = through.is_some() || has_trimmed;
        if has_moved {
            self.give_slots(wire);
        }
        has_moved
    }

    fn give_slots(&mut self, wire: &mut W) {
        let entries = self.first..self.end();
        while let Some(item) = self.stage.outside(&entries) {
            wire.give_slot(item.slot, item.is_tainted);
        }
    }

    /// Takes messages while somebody may write them soon.
    pub(super) fn take_more(
        &mut self,
        now: Now,
        source: &mut (impl Source<W::Place> + ?Sized),
        wire: &mut W,
    ) -> Result<bool> {
        let mut has_moved = false;
        let connected = self.destinations.iter().filter(|destination| destination.ring.is_some());
        let leader = match connected.map(|destination| destination.next).max() {
            Some(leader) => leader,
            // Where not all is kept nobody here has to wait because nobody there is connected: the
            // newest are kept.
            None if self.manner.keep.is_some() && !self.destinations.is_empty() => {
                has_moved |= self.drain(source);
                self.end()
            }
            None => return Ok(false),
        };
        // No further than that whoever is ahead misses nothing.
        let ahead = self.manner.keep.map_or(AHEAD, |keep| AHEAD.min(keep as u64 / 2).max(1));
        while self.end() - leader < ahead {
            let Ok(victim) = self.room(leader) else {
                self.is_full(now, wire);
                return Ok(has_moved);
            };
            let Some(Outgoing { header, place }) = source.next()? else { break };
            if let Some(victim) = victim {
                self.let_go_of(victim, source);
            }
            let is_staged = header.length > 0 && wire.is_staged(&place);
            let pieces = if is_staged { header.length.div_ceil(self.manner.piece) } else { 0 };
            let serial = self.serials;
            self.serials += pieces;
            let (copy_begun, is_gone) = (None, false);
            self.taken_to = header.position + 1;
            self.entries.push_back(Entry { header, place, serial, pieces, copy_begun, is_gone });
            has_moved = true;
        }
        self.full_since = None;
        Ok(has_moved)
    }

    /// Is there room for one more, and which entry makes it? Where not all is kept, the oldest
    /// that nobody is in the middle of does, and those that had not begun with it miss it. What
    /// was written whole, and has left, is not kept any longer either: should that ring be lost,
    /// it is missed, too. But who is ahead of all misses nothing.
    fn room(&self, leader: u64) -> std::result::Result<Option<u64>, Full> {
        match self.manner.keep {
            Some(keep) if self.entries.len() - self.gone >= keep => {}
            _ => return Ok(None),
        }
        let may_go = |number: &u64| {
            self.entry(*number).is_some_and(|entry| !entry.is_gone) && !self.is_used(*number)
        };
        (self.first..leader).find(may_go).map(Some).ok_or(Full)
    }

    /// Lets go of the oldest as soon as as many are held as may be: while all of them are, nobody
    /// here can publish one that would take its place. True if any went.
    fn drain(&mut self, source: &mut (impl Source<W::Place> + ?Sized)) -> bool {
        let most = self.manner.keep.unwrap_or(usize::MAX);
        let mut has_moved = false;
        while self.entries.len() - self.gone >= most {
            let Ok(Some(oldest)) = self.room(self.end()) else { break };
            self.let_go_of(oldest, source);
            has_moved = true;
        }
        has_moved
    }

    fn let_go_of(&mut self, number: u64, source: &mut (impl Source<W::Place> + ?Sized)) {
        let Some(entry) = self.entries.get_mut((number - self.first) as usize) else { return };
        entry.is_gone = true;
        let position = entry.header.position;
        self.gone += 1;
        if number == self.first {
            self.trim();
            source.release(position);
        } else {
            source.release_one(position);
        }
    }

    /// Did nobody make room when it had its turn last? Then it wants to be looked after.
    pub(crate) fn is_held_up(&self) -> bool {
        self.full_since.is_some()
    }

    /// Does somebody read an entry, or may a provider or a device still?
    fn is_used(&self, number: u64) -> bool {
        self.destinations.iter().any(|destination| destination.on_its_way().contains(&number))
            || self.retiring.iter().any(|retiring| retiring.entries.contains(&number))
            || self.stage.is_copying(number)
    }

    /// Forgets entries that are gone, as long as nothing is in front of them. True if there were
    /// any.
    fn trim(&mut self) -> bool {
        let before = self.first;
        while self.entries.front().is_some_and(|entry| entry.is_gone) {
            self.entries.pop_front();
            self.gone -= 1;
            self.first += 1;
        }
        for destination in &mut self.destinations {
            // Those that were written and left are still on their way to be delivered.
            if destination.next < self.first {
                let missed = self.first - destination.next;
                destination.miss(missed);
            }
        }
        self.first > before
    }

    /// Nobody makes room. Who is in the way for too long is not written to any more: what it may
    /// still read is waited for then, or the endpoint closed.
    fn is_full(&mut self, now: Now, wire: &mut W) {
        let since = *self.full_since.get_or_insert(now.steady);
        if now.steady - since <= self.manner.patience {
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
                let detail = "it does not read, and holds up all others";
                let error = Error::new("write to a node", ErrorKind::DeadlineExceeded, detail);
                self.lose(place, error, wire);
            }
        }
    }
}

impl<R> Destination<R> {
    /// It does not get so many, which are next.
    pub(super) fn miss(&mut self, count: u64) {
        self.counters.missed += count;
        self.pass(count);
    }

    /// It needs nothing of so many that are next.
    pub(super) fn pass(&mut self, count: u64) {
        self.next += count;
        match self.unread.back_mut() {
            Some((_, unread)) => unread.entry = self.next,
            // While it is in the middle of something, that says so when it is written.
            None if self.writing.is_none() => self.delivered = self.next,
            None => {}
        }
    }
}
