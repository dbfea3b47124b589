//! Growth of pools: no message lies in a piece that only one process has.
//!
//! A piece that only its creator had would be lost with it, and so would its messages. A piece is
//! therefore sent to all users of its pool before it is used, and each has to acknowledge it.
//! Stopped processes are not awaited: they find it in their queue. Others are awaited for a limited
//! time.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

use ipc::{Caller, Participant};

use super::Broker;
use crate::error::{ErrorKind, Result};
use crate::pool::{GrowthRequest, Piece, PoolId};
use crate::service::process::is_stopped;
use crate::service::protocol::Notice;
use crate::service::registry::NextPiece;

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

#[derive(Debug, Default)]
pub(super) struct Growth {
    last_ticket: u64,
    /// At most one piece of each pool.
    pending: HashMap<PoolId, PendingPiece>,
}

impl Growth {
    fn ticket(&mut self) -> u64 {
        self.last_ticket += 1;
        self.last_ticket
    }
}

impl Broker {
    /// Grows a pool, if it has not grown since the request, and its limit allows it.
    pub(crate) fn grow_as_requested(&mut self, caller: &Caller<'_>, request: GrowthRequest) {
        let (id, bytes) = (request.pool(), request.bytes());
        if self.registry.pool(id).is_some_and(|pool| request.is_outdated(pool)) {
            return;
        }
        if let Err(error) = self.grow(caller, id, bytes) {
            tracing::warn!(%error, bytes, "a pool cannot grow");
        }
    }

    fn grow(&mut self, caller: &Caller<'_>, id: PoolId, bytes: u64) -> Result<()> {
        if self.growth.pending.contains_key(&id) {
            return Ok(());
        }
        match self.registry.grow(caller, id, bytes) {
            Ok(Some(NextPiece::Held(number))) => self.distribute_piece(caller, id, number),
            Ok(Some(NextPiece::OfMember { number, length })) => {
                return self.request_piece(id, number, length);
            }
            Ok(None) => {}
            // The publisher will request it again.
            Err(error) if error.kind() == ErrorKind::DeadlineExceeded => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Adds memory for a topic that gets its first user, so that the first message need not wait.
    /// Fails if a limit of this process prevents that.
    pub(crate) fn preallocate(&mut self, caller: &Caller<'_>, number: u32) -> Result<()> {
        let Some((topic, [local, _])) = self.registry.topic_and_pools(number) else {
            return Ok(());
        };
        let (id, first) = (local.id(), topic.settings().largest);
        // If it is unknown now, a publisher will request memory.
        let free = local.statistics(caller).map_or(first, |found| found.largest_free);
        if free >= first {
            return Ok(());
        }
        match self.grow(caller, id, first) {
            Err(error) if error.limit_reached().is_some() => Err(error),
            Err(error) => {
                tracing::warn!(%error, first, "a pool cannot grow");
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    /// Sends a piece to all users of the pool, and awaits their acknowledgements.
    pub(super) fn distribute_piece(&mut self, caller: &Caller<'_>, id: PoolId, number: usize) {
        let clients = self.clients.iter();
        let users = clients.filter(|(_, it)| !it.is_leaving && it.pools.contains_key(&id));
        let users = users.map(|(member, _)| *member).collect();
        // A process that returned the piece has it already.
        let (ticket, awaiting) = self.send_new_pieces(users, id);
        let since = Instant::now();
        self.growth.pending.insert(id, PendingPiece { number, ticket, awaiting, since });
        self.admit_if_mapped(caller, id);
    }

    /// Sends pieces that processes lack. Returns the ticket, and the processes that lacked any.
    pub(crate) fn send_new_pieces(
        &mut self,
        members: Vec<Participant>,
        id: PoolId,
    ) -> (u64, BTreeSet<Participant>) {
        let ticket = self.growth.ticket();
        let has_sent = |member: &Participant| {
            self.send_pieces(*member, id, ticket).unwrap_or_else(|error| {
                tracing::warn!(%error, "a piece of a pool could not be sent");
                false
            })
        };
        (ticket, members.into_iter().filter(has_sent).collect())
    }

    /// Sends the pieces of a pool that a process does not have. True if there was one.
    fn send_pieces(&mut self, member: Participant, id: PoolId, ticket: u64) -> Result<bool> {
        let mut has_sent = false;
        let Some(client) = self.clients.get_mut(&member) else { return Ok(false) };
        let (pool, has) = (self.registry.pool(id), client.pools.get_mut(&id));
        let (Some(pool), Some(has)) = (pool, has) else { return Ok(false) };
        while let Some(Piece { memory, length, name }) = pool.piece(*has)? {
            let number = *has as u32;
            *has += 1;
            let notice = Notice::Piece { pool: id, number, length, name, ticket };
            client.connection.send(&notice, vec![memory]);
            has_sent = true;
        }
        Ok(has_sent)
    }

    /// Sends the pools of a topic that a process does not have.
    pub(crate) fn send_pools(&mut self, member: Participant, number: u32) -> Result<()> {
        let Some((_, pools)) = self.registry.topic_and_pools(number) else { return Ok(()) };
        for id in pools.map(|pool| pool.id()) {
            let Some(client) = self.clients.get_mut(&member) else { return Ok(()) };
            if let Entry::Vacant(unknown) = client.pools.entry(id) {
                let control_segment = self.registry.control_segment(id)?;
                unknown.insert(0);
                client.connection.send(&Notice::Pool { pool: id }, vec![control_segment]);
            }
            let ticket = self.growth.pending.get(&id).map(|pending_piece| pending_piece.ticket);
            let sent_as = ticket.unwrap_or_else(|| self.growth.ticket());
            if self.send_pieces(member, id, sent_as)?
                && let Some(pending_piece) = self.growth.pending.get_mut(&id)
            {
                // The pending piece is among them.
                pending_piece.awaiting.insert(member);
            }
        }
        Ok(())
    }

    /// Sends everything that a rejoined process lacks of its pools.
    pub(crate) fn send_missing(&mut self, member: Participant) {
        for number in self.topics_of(member) {
            if let Err(error) = self.send_pools(member, number) {
                tracing::warn!(
                    %error,
                    participant = %member,
                    "a process did not receive all pools of its topics"
                );
            }
        }
    }

    /// A process has received all pieces up to this ticket.
    pub(crate) fn acknowledge(&mut self, caller: &Caller<'_>, member: Participant, ticket: u64) {
        let mut acknowledged = Vec::new();
        for (id, pending_piece) in &mut self.growth.pending {
            if pending_piece.ticket <= ticket && pending_piece.awaiting.remove(&member) {
                acknowledged.push(*id);
            }
        }
        for id in acknowledged {
            self.admit_if_mapped(caller, id);
        }
    }

    fn admit_if_mapped(&mut self, caller: &Caller<'_>, id: PoolId) {
        let Some(pool) = self.registry.pool(id) else { return };
        let Some(pending_piece) = self.growth.pending.get(&id) else { return };
        let runs = |it: &Participant| self.name(*it).is_some_and(|it| !is_stopped(it.process));
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
            Ok(()) => {
                let clients = self.clients.values_mut();
                for client in clients.filter(|client| client.pools.contains_key(&id)) {
                    client.connection.send(&Notice::PoolGrown { pool: id }, Vec::new());
                }
            }
        }
        self.growth.pending.remove(&id);
    }

    pub(crate) fn is_growing(&self) -> bool {
        !self.growth.pending.is_empty() || !self.piece_requests.is_empty()
    }

    /// Checks whether the time for acknowledgements, or for requested pieces, is over.
    pub(crate) fn check_growth(&mut self, caller: &Caller<'_>) {
        self.check_piece_requests();
        for id in self.growth.pending.keys().copied().collect::<Vec<_>>() {
            self.admit_if_mapped(caller, id);
        }
    }

    /// Distributes pieces of the last service that no pool uses yet.
    pub(crate) fn resume_growth(&mut self, caller: &Caller<'_>) {
        let pools = self.registry.pools();
        let pools = pools.map(|pool| (pool.id(), pool.admitted(), pool.held()));
        let unfinished: Vec<_> = pools.filter(|(_, admitted, held)| admitted < held).collect();
        for (id, number, _) in unfinished {
            self.distribute_piece(caller, id, number);
        }
    }
}

#[cfg(test)]
impl Broker {
    pub(crate) fn tickets(&self) -> std::ops::Range<u64> {
        1..self.growth.last_ticket + 1
    }

    /// The time for acknowledgements is over.
    pub(crate) fn expire_acknowledgements(&mut self) {
        for pending_piece in self.growth.pending.values_mut() {
            pending_piece.since -= Duration::from_secs(60);
        }
    }
}
