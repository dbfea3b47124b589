//! Cleaning up after those that died, and removing those that are in the way.

use std::time::Duration;

use ipc::{Caller, Participant, QueueError, Seat, Words};

use super::TopicWords;
use super::alarm::Alarm;
use super::entry::Entry;
use super::losses::LostPublisher;
use super::publishers;
use crate::error::Result;
use crate::pool::{Direction, Ledger, Readiness};
use crate::settings::Reliability;

impl<W: Words + Clone> TopicWords<W> {
    /// Cleans up after one who is dead, or leaves: publishers, subscriptions, and what it was
    /// about to hand over. Afterwards its loans are [reclaimed](crate::pool::Pool::reclaim), pool by
    /// pool, when that was done for all topics. May be done again, if it was cut short.
    pub(crate) fn bury_in(
        &self,
        caller: &Caller<'_>,
        who: Participant,
        here: &Ledger<W>,
        arrivals: &Ledger<W>,
    ) -> Result<()> {
        for line in publishers::lines(self.words()).filter(|line| line.who() == Some(who)) {
            self.hand_over(line.intent(), self.here(), here).recover(caller)?;
            if let Some(seen) = line.seen() {
                self.is_lost(Direction::Here, LostPublisher::here(seen.id));
            }
            line.give_back();
        }
        if self.is_writer(who) {
            self.settle_arrivals(caller, arrivals)?;
            self.has_no_writer();
        }
        // What its streams were at is anybody's: they ended with it. First, while it is known which
        // places it had.
        for (queue, ledger) in [(self.arrivals(), arrivals), (self.here(), here)] {
            let places = queue.seats_of(who).fold(0, |places, seat| places | 1 << seat.place());
            ledger.all_have_passed(self.number(), places);
        }
        self.finish_evictions(caller, [here, arrivals])?;
        // Last: this wakes those that wait for what was done here.
        for (queue, ledger) in [(self.arrivals(), arrivals), (self.here(), here)] {
            let expelled = queue.expel(caller, who, |words| {
                self.dispose(caller, ledger, words);
            });
            expelled.map_err(|cause| self.queue_error("clean up after a participant", cause))?;
        }
        Ok(())
    }

    /// Where there is no room: those that hold messages, or have still to read some, each with the
    /// position of the oldest. Who holds the oldest of all is in the way of those that
    /// [wait](Self::pressure) for room, if it stays so; the others may come to be.
    ///
    /// Nobody is in the way of anybody as long as there is room: memory that is wanting then is taken
    /// by loans, or by other topics. Where messages are dropped only those that are held are in the way.
    pub(crate) fn holders(&self, direction: Direction) -> Vec<(Seat, u64)> {
        let queue = self.queue(direction);
        match self.settings().reliability {
            _ if queue.has_room() => Vec::new(),
            Reliability::Reliable => queue.oldest_of_each(),
            Reliability::DropOldest | Reliability::DropNewest => queue.oldest_held_of_each(),
        }
    }

    /// The position of the oldest message of all, and who holds it.
    #[cfg(test)]
    pub(crate) fn in_the_way(&self, direction: Direction) -> Option<(u64, Vec<Seat>)> {
        let holders = self.holders(direction);
        let oldest = holders.iter().map(|(_, position)| *position).min()?;
        let is_oldest = |(seat, position): (Seat, u64)| (position == oldest).then_some(seat);
        Some((oldest, holders.into_iter().filter_map(is_oldest).collect()))
    }

    /// Is it a stream that has still to write this message? Then who holds it is in nobody's way.
    pub(crate) fn is_being_written(&self, position: u64, here: &Ledger<W>) -> bool {
        let is_pending = |words| {
            let entry = Entry::from_words(words);
            entry
                .turn
                .is_some_and(|turn| here.readiness(entry.block, turn) == Some(Readiness::Pending))
        };
        // Of this position or, if it was released meanwhile, of one that comes later.
        let mut looks = 0;
        let first = |words| {
            looks += 1;
            looks > 1 || is_pending(words)
        };
        self.here().find_unreleased(position, first) == Some(position)
    }

    /// For how long what was refused and does not wait counts as if it did: it has to come again for
    /// somebody to be in its way for as long as messages may be held.
    pub(crate) fn refusal_holds(&self) -> Duration {
        self.settings().release_deadline() / 4 * 3
    }

    /// Since when a publisher waits for room, the longest of all; None if none does. One that
    /// was refused and does not wait counts [for a while](Self::refusal_holds).
    pub(crate) fn pressure(&self) -> Option<u64> {
        let holds = self.refusal_holds();
        let waiting = publishers::lines(self.words()).filter(|line| line.who().is_some());
        waiting.filter_map(|line| line.pressure().since(holds)).min()
    }

    /// Removes one that lives from both queues, and tells it why. Its places are its own until it
    /// ends its subscription by itself. Whoever [cleans up](Self::bury_in) after one that died
    /// here does the rest.
    pub(crate) fn evict_in(
        &self,
        caller: &Caller<'_>,
        (direction, seat): (Direction, Seat),
        held_for: Duration,
        ledgers: [&Ledger<W>; 2],
    ) -> Result<()> {
        let Some(line) = Alarm::find(self.words(), seat, direction == Direction::Arrivals) else {
            // It has not come so far that the two are joined.
            return self.evict_from(caller, direction, seat, ledgers);
        };
        let seats = line.seats();
        if seats[(direction == Direction::Arrivals) as usize] != seat.to_bits() {
            // It has ended its subscription by itself, and another one has come.
            return Ok(());
        }
        // First, so that it knows why when it sees that it is removed.
        line.evict(seats[0], held_for);
        // And before there is room, so that who waited for it knows what made it.
        line.count(seats[0]);
        let evicted = self.evict_both(caller, seats, ledgers);
        if evicted.is_err() && self.are_seated(seats) {
            line.take_back();
        }
        evicted
    }

    fn are_seated(&self, seats: [u64; 2]) -> bool {
        [self.here(), self.arrivals()].into_iter().zip(seats).all(|(queue, bits)| {
            // Its place is still its own when it is evicted.
            queue.find_seat(bits).is_some_and(|seat| queue.is_seated(seat))
        })
    }

    /// What was begun by one that died, or could not get a lock.
    fn finish_evictions(&self, caller: &Caller<'_>, ledgers: [&Ledger<W>; 2]) -> Result<()> {
        let lines = Alarm::all(self.words());
        let mut begun = lines.filter_map(|line| line.evicted_seats().map(|seats| (line, seats)));
        begun.try_for_each(|(line, seats)| {
            line.count(seats[0]);
            self.evict_both(caller, seats, ledgers)
        })
    }

    fn evict_both(
        &self,
        caller: &Caller<'_>,
        seats: [u64; 2],
        ledgers: [&Ledger<W>; 2],
    ) -> Result<()> {
        for (direction, bits) in Direction::BOTH.into_iter().zip(seats) {
            let Some(seat) = self.queue(direction).find_seat(bits) else { continue };
            self.evict_from(caller, direction, seat, ledgers)?;
        }
        self.here().ring_messages();
        Ok(())
    }

    fn evict_from(
        &self,
        caller: &Caller<'_>,
        direction: Direction,
        seat: Seat,
        ledgers: [&Ledger<W>; 2],
    ) -> Result<()> {
        let ledger = ledgers[usize::from(direction == Direction::Arrivals)];
        let dispose = |words| {
            self.dispose(caller, ledger, words);
        };
        match self.queue(direction).evict(caller, seat, dispose) {
            // Or it has ended its subscription by itself.
            Ok(()) | Err(QueueError::NotSubscribed) => Ok(()),
            Err(cause) => Err(self.queue_error("evict a subscriber", cause)),
        }
    }
}
