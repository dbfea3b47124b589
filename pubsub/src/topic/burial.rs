//! Cleaning up after those that died, and removing those that are in the way.

use std::time::Duration;

use ipc::{Caller, Participant, QueueError, Seat, Words};

use super::TopicWords;
use super::alarm::{Alarm, Losses};
use super::publishers;
use crate::error::Result;
use crate::pool::{Direction, Ledger};

impl<W: Words + Clone> TopicWords<W> {
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
                Losses(self.words()).add(seen.id);
            }
            line.give_back();
        }
        if self.is_writer(who) {
            self.settle_arrivals(caller, arrivals)?;
            self.has_no_writer();
        }
        // Last: this wakes those that wait for what was done here.
        for (queue, ledger) in [(self.arrivals(), arrivals), (self.here(), here)] {
            let expelled = queue.expel(caller, who, |words| {
                self.dispose(caller, ledger, words);
            });
            expelled.map_err(|cause| self.queue_error("clean up after a participant", cause))?;
        }
        Ok(())
    }

    /// The oldest message that somebody has still to read or holds, and who: they are in the
    /// way of those that [wait](Self::pressure) for room, if it stays so.
    pub(crate) fn in_the_way(&self, direction: Direction) -> Option<(u64, Vec<Seat>)> {
        let queue = self.queue(direction);
        let position = queue.oldest()?;
        Some((position, queue.holders(position).collect()))
    }

    /// Since when a publisher waits for room, the longest of all; None if none does.
    pub(crate) fn pressure(&self) -> Option<u64> {
        let waiting = publishers::lines(self.words()).filter(|line| line.who().is_some());
        waiting.filter_map(|line| line.pressure().since()).min()
    }

    pub(crate) fn evict_in(
        &self,
        caller: &Caller<'_>,
        (direction, seat): (Direction, Seat),
        held_for: Duration,
        ledgers: [&Ledger<W>; 2],
    ) -> Result<()> {
        let line = Alarm::find(self.words(), seat, direction == Direction::Arrivals);
        if let Some(line) = &line {
            // First, so that it knows why when it sees that it is removed.
            line.evict(held_for);
        }
        let queues = [(Direction::Here, ledgers[0]), (Direction::Arrivals, ledgers[1])];
        for ((at, ledger), number) in queues.into_iter().zip(0..) {
            let queue = self.queue(at);
            let theirs = if at == direction {
                Some(seat)
            } else {
                let bits = line.as_ref().map(|line| line.seats()[number]);
                queue.seats().find(|seat| Some(seat.to_bits()) == bits)
            };
            let Some(theirs) = theirs else { continue };
            let dispose = |words| {
                self.dispose(caller, ledger, words);
            };
            match queue.unseat(caller, theirs, dispose) {
                Ok(()) | Err(QueueError::NotSubscribed) => {}
                Err(cause) => return Err(self.queue_error("evict a subscriber", cause)),
            }
        }
        self.here().ring_messages();
        Ok(())
    }
}
