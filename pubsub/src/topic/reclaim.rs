//! Reclaim after dead participants.

use ipc::{Caller, Participant, Words};

use super::TopicWords;
use super::losses::LostPublisher;
use super::publishers;
use crate::error::Result;
use crate::error_mapping::{During, On};
use crate::pool::{Direction, PoolControl};

impl<W: Words + Clone> TopicWords<W> {
    /// Reclaims after a participant that is dead or leaves: publishers, subscriptions, and an
    /// unfinished transfer. Afterwards its loans are [reclaimed](crate::pool::Pool::reclaim), pool
    /// by pool, once that was done for all topics. Idempotent, also after an interruption.
    pub(crate) fn reclaim_in(
        &self,
        caller: &Caller<'_>,
        dead: Participant,
        local: &PoolControl<W>,
        inbound: &PoolControl<W>,
    ) -> Result<()> {
        for slot in publishers::slots(self.words()).filter(|it| it.participant() == Some(dead)) {
            self.handoff(slot.intent(), self.local(), local).recover(caller)?;
            if let Some(seen) = slot.seen() {
                self.record_loss(Direction::Local, LostPublisher::local(seen.id));
            }
            slot.give_back();
        }
        if self.writer() == Some(dead) {
            self.settle_inbound(caller, inbound, 0)?;
        }
        // Stream reads end with the process. First, while its subscription indices are known.
        for (queue, control) in [(self.inbound(), inbound), (self.local(), local)] {
            let places =
                queue.subscriptions_of(dead).fold(0, |places, it| places | 1 << it.index());
            control.end_all_stream_reads(self.number(), places);
        }
        self.finish_evictions(caller, [local, inbound])?;
        // Last: this wakes processes that wait for the above.
        for (queue, control) in [(self.inbound(), inbound), (self.local(), local)] {
            let dispose = |words| _ = self.dispose(caller, control, words);
            let expelled = queue.remove_participant(caller, dead, dispose);
            expelled.during("reclaim after participant of topic").on(self.name())?;
        }
        Ok(())
    }
}
