//! Subscribing, and removing those that leave or have died.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::layout::{self, MOST_SUBSCRIBERS, holding, waiting};
use super::{Queue, QueueError, Result, Subscriber};
use crate::bell::Spin;
use crate::participant::{Caller, Participant};
use crate::words::Words;

impl<W: Words, const E: usize> Queue<W, E> {
    /// Subscribes: entries from now on are delivered to the caller, too.
    ///
    /// # Errors
    /// `TooManySubscribers`, `Held`.
    pub fn subscribe(&self, caller: &Caller<'_>) -> Result<Subscriber> {
        let locked = self.lock(caller)?;
        let who = |place| self.words.load(layout::subscriber(place, layout::WHO), Relaxed);
        let place =
            (0..MOST_SUBSCRIBERS).find(|place| who(*place) == 0 && self.active() >> place & 1 == 0);
        let place = place.ok_or(QueueError::TooManySubscribers)?;
        let cursor = self.words.load(layout::TAIL, Relaxed);
        let line = |which| layout::subscriber(place, which);
        self.words.store(line(layout::CURSOR), cursor, Relaxed);
        self.words.store(line(layout::MISSED), 0, Relaxed);
        let serial = self.words.load(layout::SERIAL, Relaxed).wrapping_add(1);
        self.words.store(layout::SERIAL, serial, Relaxed);
        let name = serial << 32 | u64::from(caller.me.number());
        self.words.store(line(layout::WHO), name, Release);
        // One store: this is the moment.
        let active = self.words.load(layout::ACTIVE, Relaxed) | 1 << place;
        self.words.store(layout::ACTIVE, active, Release);
        drop(locked);
        let spin = Spin::default();
        Ok(Subscriber { place, name, cursor, missed: 0, told: 0, spin, born: self.born })
    }

    /// Ends a subscription. Entries that only this subscriber had still to read or
    /// held are disposed of.
    ///
    /// # Errors
    /// `Held`: then it subscribes still. `NotSubscribed` if it was removed before.
    pub fn unsubscribe(
        &self,
        caller: &Caller<'_>,
        subscriber: &Subscriber,
        dispose: impl FnMut([u64; E]),
    ) -> Result<()> {
        if self.remove(caller, subscriber.place, |name| name == subscriber.name, dispose)? {
            Ok(())
        } else {
            Err(QueueError::NotSubscribed)
        }
    }

    /// Removes all subscriptions of a participant, who is dead or too slow; gives how
    /// many there were. May be called again if it was cut short, and by several at once.
    ///
    /// # Errors
    /// `Held`: some may be removed already.
    pub fn expel(
        &self,
        caller: &Caller<'_>,
        who: Participant,
        mut dispose: impl FnMut([u64; E]),
    ) -> Result<usize> {
        let mut removed = 0;
        for place in 0..MOST_SUBSCRIBERS {
            let theirs = |name: u64| name as u32 == who.number();
            removed += usize::from(self.remove(caller, place, theirs, &mut dispose)?);
        }
        Ok(removed)
    }

    fn remove(
        &self,
        caller: &Caller<'_>,
        place: u32,
        is_meant: impl Fn(u64) -> bool,
        mut dispose: impl FnMut([u64; E]),
    ) -> Result<bool> {
        let at = layout::subscriber(place, layout::WHO);
        let is_theirs = || {
            let name = self.words.load(at, Acquire);
            name != 0 && is_meant(name)
        };
        if !is_theirs() {
            return Ok(false);
        }
        let locked = self.lock(caller)?;
        if !is_theirs() {
            return Ok(false);
        }
        // From here on nothing is delivered to them any more.
        let active = self.words.load(layout::ACTIVE, Relaxed) & !(1 << place);
        self.words.store(layout::ACTIVE, active, Release);
        let theirs = waiting(place) | holding(place);
        for number in 0..self.slots {
            let slot = self.slot(number);
            let was = self.words.fetch_and(slot + layout::READERS, !theirs);
            let nobody_reads = was & !theirs == 0;
            let sequence = self.words.load(slot + layout::SEQUENCE, Acquire);
            // Also those whose last reader died before it had disposed of them.
            if nobody_reads && sequence != 0 {
                dispose(self.entry(slot));
                self.settle(sequence - 1);
            }
        }
        // Last: whoever is cut short before is followed by another.
        self.words.store(at, 0, Release);
        drop(locked);
        Self::ROOM.ring(&self.words);
        Ok(true)
    }
}
