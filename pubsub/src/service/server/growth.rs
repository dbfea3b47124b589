//! Growth of pools: no message lies in a piece that only one process has.
//!
//! A piece that only its creator had would be lost with it, and so would its messages. A piece is
//! therefore sent to all users of its pool before it is used, and each has to acknowledge it.
//! Stopped processes are not awaited: they find it in their queue. Others are awaited for a limited
//! time.

use std::collections::hash_map::Entry;
use std::time::Instant;

use ipc::Participant;

use super::Service;
use crate::error::{ErrorKind, Result};
use crate::pool::{Piece, PoolId};
use crate::service::process::is_stopped;
use crate::service::protocol::Notice;
use crate::service::registry::{PendingPiece, pools_of};

impl Service {
    /// Grows a pool, if its limit allows it.
    pub(super) fn grow(&mut self, id: PoolId, bytes: u64) {
        if let Err(error) = self.try_to_grow(id, bytes) {
            tracing::warn!(%error, bytes, "a pool cannot grow");
        }
    }

    pub(super) fn try_to_grow(&mut self, id: PoolId, bytes: u64) -> Result<()> {
        let Some(served_node) = &self.served_node else { return Ok(()) };
        match self.registry.grow(&served_node.caller(), id, bytes) {
            Ok(Some(number)) => self.distribute_piece(id, number),
            Ok(None) => {}
            // The publisher will request it again.
            Err(error) if error.kind() == ErrorKind::DeadlineExceeded => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Sends a piece to all users of the pool, and awaits their acknowledgements.
    fn distribute_piece(&mut self, id: PoolId, number: usize) {
        let ticket = self.ticket();
        let users: Vec<_> = self
            .clients
            .iter()
            .filter(|(_, client)| !client.is_leaving && client.pools.contains_key(&id))
            .map(|(participant, _)| *participant)
            .collect();
        // A process that returned the piece has it already.
        let awaiting =
            users.into_iter().filter(|it| self.send_pieces_or_log(*it, id, ticket)).collect();
        if let Some(pool_entry) = self.registry.pools.get_mut(&id) {
            let since = Instant::now();
            pool_entry.pending_piece = Some(PendingPiece { number, ticket, awaiting, since });
        }
        self.admit_if_mapped(id);
    }

    fn ticket(&mut self) -> u64 {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        ticket
    }

    /// Sends the pieces of a pool that a process does not have. True if there was one.
    fn send_pieces(&mut self, participant: Participant, id: PoolId, ticket: u64) -> Result<bool> {
        let mut has_sent = false;
        let Some(client) = self.clients.get_mut(&participant) else { return Ok(false) };
        let Some(has) = client.pools.get_mut(&id) else { return Ok(false) };
        while let Some(Piece { memory, length, name }) = self.registry.piece(id, *has)? {
            let number = *has as u32;
            *has += 1;
            let notice = Notice::Piece { pool: id, number, length, name, ticket };
            client.connection.send(&notice, vec![memory]);
            has_sent = true;
        }
        Ok(has_sent)
    }

    fn send_pieces_or_log(&mut self, participant: Participant, id: PoolId, ticket: u64) -> bool {
        self.send_pieces(participant, id, ticket).unwrap_or_else(|error| {
            tracing::warn!(%error, "a piece of a pool could not be sent");
            false
        })
    }

    /// Sends the pools of a topic that a process does not have.
    pub(super) fn send_pools(&mut self, participant: Participant, number: u32) -> Result<()> {
        let Some(entry) = self.registry.topics.get(&number) else { return Ok(()) };
        for id in pools_of(entry.topic.settings().place) {
            let Some(client) = self.clients.get_mut(&participant) else { return Ok(()) };
            if let Entry::Vacant(unknown) = client.pools.entry(id) {
                let control_segment = self.registry.control_segment(id)?;
                unknown.insert(0);
                client.connection.send(&Notice::Pool { pool: id }, vec![control_segment]);
            }
            let pending_piece =
                self.registry.pools.get(&id).and_then(|it| it.pending_piece.as_ref());
            let ticket = pending_piece.map(|pending_piece| pending_piece.ticket);
            let sent_as = ticket.unwrap_or_else(|| self.ticket());
            if self.send_pieces(participant, id, sent_as)?
                && let Some(pool_entry) = self.registry.pools.get_mut(&id)
                && let Some(pending_piece) = &mut pool_entry.pending_piece
            {
                // The pending piece is among them.
                pending_piece.awaiting.insert(participant);
            }
        }
        Ok(())
    }

    /// Sends everything that a rejoined process lacks of its pools.
    pub(super) fn send_missing(&mut self, participant: Participant) {
        let Some(client) = self.clients.get(&participant) else { return };
        for number in client.topics.keys().copied().collect::<Vec<_>>() {
            if let Err(error) = self.send_pools(participant, number) {
                tracing::warn!(
                    %error,
                    %participant,
                    "a process did not receive all pools of its topics"
                );
            }
        }
    }

    /// A process has received all pieces up to this ticket.
    pub(super) fn handle_acknowledge_pieces(&mut self, participant: Participant, ticket: u64) {
        let mut acknowledged = Vec::new();
        for (id, pool_entry) in &mut self.registry.pools {
            if let Some(pending_piece) = &mut pool_entry.pending_piece
                && pending_piece.ticket <= ticket
                && pending_piece.awaiting.remove(&participant)
            {
                acknowledged.push(*id);
            }
        }
        for id in acknowledged {
            self.admit_if_mapped(id);
        }
    }

    /// No acknowledgement of this process is awaited any more.
    pub(super) fn stop_awaiting(&mut self, participant: Participant) {
        self.handle_acknowledge_pieces(participant, u64::MAX);
    }

    fn admit_if_mapped(&mut self, id: PoolId) {
        let Some(pool_entry) = self.registry.pools.get(&id) else { return };
        let Some(pending_piece) = &pool_entry.pending_piece else { return };
        let is_over = pending_piece.is_overdue(Instant::now());
        let runs = |it| self.clients.get(it).is_some_and(|client| !is_stopped(client.process));
        if !is_over && pending_piece.awaiting.iter().any(runs) {
            return;
        }
        for participant in &pending_piece.awaiting {
            tracing::warn!(
                pool = %id,
                %participant,
                "a process did not acknowledge a piece in time; it gets the piece later"
            );
        }
        let Some(served_node) = &self.served_node else { return };
        match self.registry.admit_piece(&served_node.caller(), id) {
            Ok(()) => self.notify_growth(id),
            Err(error) if error.kind() == ErrorKind::DeadlineExceeded => {
                tracing::debug!(%error, "a pool cannot admit a piece yet");
            }
            Err(error) => {
                tracing::warn!(%error, "a pool cannot admit a distributed piece")
            }
        }
    }

    fn notify_growth(&mut self, id: PoolId) {
        for client in self.clients.values_mut().filter(|client| client.pools.contains_key(&id)) {
            client.connection.send(&Notice::PoolGrown { pool: id }, Vec::new());
        }
    }

    pub(super) fn is_growing(&self) -> bool {
        self.registry.pools.values().any(|pool_entry| pool_entry.pending_piece.is_some())
    }

    /// Checks whether the time for acknowledgements is over.
    pub(super) fn check_growth(&mut self) {
        let pending_piece =
            self.registry.pools.iter().filter(|(_, pool_entry)| pool_entry.pending_piece.is_some());
        for id in pending_piece.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.admit_if_mapped(id);
        }
    }

    /// A process returned the right pieces after others had received wrong ones.
    pub(super) fn handle_replaced_pieces(&mut self, id: PoolId, first: usize) {
        let mut lacking = Vec::new();
        for (participant, client) in &mut self.clients {
            if let Some(has) = client.pools.get_mut(&id).filter(|has| **has > first) {
                *has = first;
                lacking.push(*participant);
            }
        }
        if self.takeover.is_none() {
            let ticket = self.ticket();
            for participant in lacking {
                self.send_pieces_or_log(participant, id, ticket);
            }
        }
    }

    /// Distributes pieces of the last service that no pool uses yet.
    pub(super) fn resume_growth(&mut self) {
        let unfinished: Vec<_> = self
            .registry
            .pools
            .iter()
            .map(|(id, pool_entry)| (*id, pool_entry.pool.admitted(), pool_entry.pool.held()))
            .filter(|(_, admitted, held)| admitted < held)
            .collect();
        for (id, number, _) in unfinished {
            self.distribute_piece(id, number);
        }
    }
}
