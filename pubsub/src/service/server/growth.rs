//! Growth of pools: no message lies in a piece that only one process has.
//!
//! A piece that only its creator had would be lost with it, and so would its messages. A piece is
//! therefore sent to all users of its pool before it is used, and each has to acknowledge it.
//! Stopped processes are not awaited: they find it in their queue. Others are awaited for a limited
//! time.

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

use ipc::{Caller, Participant};

use super::broker::Broker;
use crate::error::{ErrorKind, Result};
use crate::pool::PoolId;
use crate::service::process::is_stopped;

/// How long a new piece waits for acknowledgements. A process that is later is stopped or starved:
/// it receives the piece later, and messages in it wait until then.
const PIECE_ACK_TIMEOUT: Duration = Duration::from_secs(2);

/// A piece that is not in use yet, since some processes have not acknowledged it.
#[derive(Debug)]
struct PendingPiece {
    number: usize,
    /// Acknowledgements of this ticket are awaited from the following participants.
    ticket: u64,
    awaiting: BTreeSet<Participant>,
    since: Instant,
}

#[derive(Debug)]
pub(super) struct Growth {
    next_ticket: u64,
    /// At most one piece of each pool.
    pending: HashMap<PoolId, PendingPiece>,
}

impl Growth {
    pub(super) fn new() -> Self {
        Self { next_ticket: 1, pending: HashMap::new() }
    }

    /// Grows a pool, if its limit allows it.
    pub(super) fn grow_or_log(
        &mut self,
        broker: &mut Broker,
        caller: &Caller<'_>,
        id: PoolId,
        bytes: u64,
    ) {
        if let Err(error) = self.grow(broker, caller, id, bytes) {
            tracing::warn!(%error, bytes, "a pool cannot grow");
        }
    }

    fn grow(
        &mut self,
        broker: &mut Broker,
        caller: &Caller<'_>,
        id: PoolId,
        bytes: u64,
    ) -> Result<()> {
        if self.pending.contains_key(&id) {
            return Ok(());
        }
        match broker.registry().grow(caller, id, bytes) {
            Ok(Some(number)) => self.distribute_piece(broker, caller, id, number),
            Ok(None) => {}
            // The publisher will request it again.
            Err(error) if error.kind() == ErrorKind::DeadlineExceeded => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Adds memory for a topic that gets its first user, so that the first message need not wait.
    /// Fails if a limit of this process prevents that.
    pub(super) fn preallocate(
        &mut self,
        broker: &mut Broker,
        caller: &Caller<'_>,
        number: u32,
    ) -> Result<()> {
        let Some((topic, [local, _])) = broker.registry().topic_and_pools(number) else {
            return Ok(());
        };
        let (id, first) = (local.id(), topic.settings().largest);
        // If it is unknown now, a publisher will request memory.
        let free = local.statistics(caller).map_or(first, |found| found.largest_free);
        if free >= first {
            return Ok(());
        }
        match self.grow(broker, caller, id, first) {
            Err(error) if error.limit_reached().is_some() => Err(error),
            Err(error) => {
                tracing::warn!(%error, first, "a pool cannot grow");
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    /// Sends a piece to all users of the pool, and awaits their acknowledgements.
    fn distribute_piece(
        &mut self,
        broker: &mut Broker,
        caller: &Caller<'_>,
        id: PoolId,
        number: usize,
    ) {
        let users = broker.users_of(id);
        // A process that returned the piece has it already.
        let (ticket, awaiting) = self.send_pieces(broker, users, id);
        let since = Instant::now();
        self.pending.insert(id, PendingPiece { number, ticket, awaiting, since });
        self.admit_if_mapped(broker, caller, id);
    }

    fn ticket(&mut self) -> u64 {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        ticket
    }

    /// Sends the pools of a topic that a process does not have.
    pub(super) fn send_pools(
        &mut self,
        broker: &mut Broker,
        member: Participant,
        number: u32,
    ) -> Result<()> {
        let Some((_, pools)) = broker.registry().topic_and_pools(number) else { return Ok(()) };
        for id in pools.map(|pool| pool.id()) {
            broker.send_pool(member, id)?;
            let ticket = self.pending.get(&id).map(|pending_piece| pending_piece.ticket);
            let sent_as = ticket.unwrap_or_else(|| self.ticket());
            if broker.send_pieces(member, id, sent_as)?
                && let Some(pending_piece) = self.pending.get_mut(&id)
            {
                // The pending piece is among them.
                pending_piece.awaiting.insert(member);
            }
        }
        Ok(())
    }

    /// Sends everything that a rejoined process lacks of its pools.
    pub(super) fn send_missing(&mut self, broker: &mut Broker, member: Participant) {
        for number in broker.topics_of(member) {
            if let Err(error) = self.send_pools(broker, member, number) {
                tracing::warn!(
                    %error,
                    participant = %member,
                    "a process did not receive all pools of its topics"
                );
            }
        }
    }

    /// Sends pieces that processes lack. Returns the ticket, and the processes that lacked any.
    pub(super) fn send_pieces(
        &mut self,
        broker: &mut Broker,
        members: Vec<Participant>,
        id: PoolId,
    ) -> (u64, BTreeSet<Participant>) {
        let ticket = self.ticket();
        let has_sent = |member: &Participant| {
            broker.send_pieces(*member, id, ticket).unwrap_or_else(|error| {
                tracing::warn!(%error, "a piece of a pool could not be sent");
                false
            })
        };
        (ticket, members.into_iter().filter(has_sent).collect())
    }

    /// A process has received all pieces up to this ticket.
    pub(super) fn acknowledge(
        &mut self,
        broker: &mut Broker,
        caller: &Caller<'_>,
        member: Participant,
        ticket: u64,
    ) {
        let mut acknowledged = Vec::new();
        for (id, pending_piece) in &mut self.pending {
            if pending_piece.ticket <= ticket && pending_piece.awaiting.remove(&member) {
                acknowledged.push(*id);
            }
        }
        for id in acknowledged {
            self.admit_if_mapped(broker, caller, id);
        }
    }

    fn admit_if_mapped(&mut self, broker: &mut Broker, caller: &Caller<'_>, id: PoolId) {
        let Some(pool) = broker.registry().pool(id) else { return };
        let Some(pending_piece) = self.pending.get(&id) else { return };
        let runs = |it: &Participant| broker.name(*it).is_some_and(|it| !is_stopped(it.process));
        let is_overdue = pending_piece.since.elapsed() >= PIECE_ACK_TIMEOUT;
        if !is_overdue && pending_piece.awaiting.iter().any(runs) {
            return;
        }
        for participant in &pending_piece.awaiting {
            tracing::warn!(
                pool = %id,
                %participant,
                "a process did not acknowledge a piece in time; it gets the piece later"
            );
        }
        match pool.admit_piece(caller, pending_piece.number) {
            // The holder of the allocator's lock will release it, or die: the pool still grows.
            Err(error) if error.kind() == ErrorKind::DeadlineExceeded => {
                tracing::debug!(%error, "a pool cannot admit a piece yet");
                return;
            }
            Err(error) => tracing::warn!(%error, "a pool cannot admit a distributed piece"),
            Ok(()) => broker.notify_growth(id),
        }
        self.pending.remove(&id);
    }

    pub(super) fn is_growing(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Checks whether the time for acknowledgements is over.
    pub(super) fn check(&mut self, broker: &mut Broker, caller: &Caller<'_>) {
        for id in self.pending.keys().copied().collect::<Vec<_>>() {
            self.admit_if_mapped(broker, caller, id);
        }
    }

    /// Distributes pieces of the last service that no pool uses yet.
    pub(super) fn resume(&mut self, broker: &mut Broker, caller: &Caller<'_>) {
        let pools = broker.registry().pools();
        let pools = pools.map(|pool| (pool.id(), pool.admitted(), pool.held()));
        let unfinished: Vec<_> = pools.filter(|(_, admitted, held)| admitted < held).collect();
        for (id, number, _) in unfinished {
            self.distribute_piece(broker, caller, id, number);
        }
    }
}

#[cfg(test)]
impl Growth {
    pub(super) fn tickets(&self) -> std::ops::Range<u64> {
        1..self.next_ticket
    }

    /// The time for acknowledgements is over.
    pub(super) fn expire(&mut self) {
        for pending_piece in self.pending.values_mut() {
            pending_piece.since -= Duration::from_secs(60);
        }
    }
}
