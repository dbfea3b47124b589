//! Memory for pools: no message lies in a piece that only its maker has.
//!
//! A descriptor that only its maker had would die with it, and the messages in it. So a piece
//! is sent to all that use its pool, and all are waited for; but not for ever for one that is
//! stopped, who finds it in its line when it goes on.

use std::collections::hash_map::Entry;
use std::time::Instant;

use ipc::Participant;

use super::Reception;
use crate::error::{ErrorKind, Result};
use crate::pool::{Piece, PoolId};
use crate::service::protocol::Notice;
use crate::service::registry::{Growing, pools_of};

impl Reception {
    /// Lets a pool grow, if it may.
    pub(super) fn grow(&mut self, id: PoolId, bytes: u64) {
        if let Err(error) = self.try_to_grow(id, bytes) {
            tracing::warn!(%error, bytes, "a pool cannot grow");
        }
    }

    pub(super) fn try_to_grow(&mut self, id: PoolId, bytes: u64) -> Result<()> {
        let Some(seat) = &self.seat else { return Ok(()) };
        match self.registry.grow(&seat.caller(), id, bytes) {
            Ok(Some(number)) => self.hand_out(id, number),
            Ok(None) => {}
            // It is asked for again.
            Err(error) if error.kind() == ErrorKind::DeadlineExceeded => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Sends a piece to all that use the pool, and waits for them to have it.
    fn hand_out(&mut self, id: PoolId, number: usize) {
        let ticket = self.ticket();
        let users: Vec<_> = self
            .guests
            .iter()
            .filter(|(_, guest)| !guest.leaves && guest.pools.contains_key(&id))
            .map(|(who, _)| *who)
            .collect();
        // Whoever brought it itself has it.
        let awaits =
            users.into_iter().filter(|who| self.send_pieces_or_log(*who, id, ticket)).collect();
        if let Some(keeping) = self.registry.pools.get_mut(&id) {
            let since = Instant::now();
            keeping.growing = Some(Growing { number, ticket, awaits, since });
        }
        self.admit_if_mapped(id);
    }

    fn ticket(&mut self) -> u64 {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        ticket
    }

    /// Sends a process the pieces of a pool that it does not have, if there are any.
    fn send_pieces(&mut self, who: Participant, id: PoolId, ticket: u64) -> Result<bool> {
        let mut has_sent = false;
        let Some(guest) = self.guests.get_mut(&who) else { return Ok(false) };
        let Some(has) = guest.pools.get_mut(&id) else { return Ok(false) };
        while let Some(Piece { memory, length, name }) = self.registry.piece(id, *has)? {
            let number = *has as u32;
            *has += 1;
            let notice = Notice::Piece { pool: id, number, length, name, ticket };
            guest.connection.send(&notice, vec![memory]);
            has_sent = true;
        }
        Ok(has_sent)
    }

    fn send_pieces_or_log(&mut self, who: Participant, id: PoolId, ticket: u64) -> bool {
        self.send_pieces(who, id, ticket).unwrap_or_else(|error| {
            tracing::warn!(%error, "a piece of a pool cannot be handed out");
            false
        })
    }

    /// Gives a process the pools of a topic, as far as it does not have them.
    pub(super) fn send_pools(&mut self, who: Participant, number: u32) -> Result<()> {
        let Some(kept) = self.registry.topics.get(&number) else { return Ok(()) };
        for id in pools_of(kept.topic.settings().place) {
            let Some(guest) = self.guests.get_mut(&who) else { return Ok(()) };
            if let Entry::Vacant(unknown) = guest.pools.entry(id) {
                let books = self.registry.books(id)?;
                unknown.insert(0);
                guest.connection.send(&Notice::Pool { pool: id }, vec![books]);
            }
            let growing = self.registry.pools.get(&id).and_then(|it| it.growing.as_ref());
            let ticket = growing.map(|growing| growing.ticket);
            let sent_as = ticket.unwrap_or_else(|| self.ticket());
            if self.send_pieces(who, id, sent_as)?
                && let Some(keeping) = self.registry.pools.get_mut(&id)
                && let Some(growing) = &mut keeping.growing
            {
                // The one that is being handed out is among them.
                growing.awaits.insert(who);
            }
        }
        Ok(())
    }

    /// All that a process that came back lacks of what it uses.
    pub(super) fn send_missing(&mut self, who: Participant) {
        let Some(guest) = self.guests.get(&who) else { return };
        for number in guest.topics.keys().copied().collect::<Vec<_>>() {
            if let Err(error) = self.send_pools(who, number) {
                tracing::warn!(%error, %who, "a process does not get all pools of its topics");
            }
        }
    }

    /// A process has all that was sent to it up to this.
    pub(super) fn has_mapped(&mut self, who: Participant, ticket: u64) {
        let mut acknowledged = Vec::new();
        for (id, keeping) in &mut self.registry.pools {
            if let Some(growing) = &mut keeping.growing
                && growing.ticket <= ticket
                && growing.awaits.remove(&who)
            {
                acknowledged.push(*id);
            }
        }
        for id in acknowledged {
            self.admit_if_mapped(id);
        }
    }

    /// Nothing is awaited of one any more.
    pub(super) fn is_not_awaited(&mut self, who: Participant) {
        self.has_mapped(who, u64::MAX);
    }

    fn admit_if_mapped(&mut self, id: PoolId) {
        let Some(keeping) = self.registry.pools.get(&id) else { return };
        let now = Instant::now();
        let Some(growing) = keeping.growing.as_ref().filter(|it| it.is_over(now)) else { return };
        for who in &growing.awaits {
            tracing::warn!(pool = %id, %who, "a process does not take a piece, and gets it later");
        }
        let Some(seat) = &self.seat else { return };
        match self.registry.admit_piece(&seat.caller(), id) {
            Ok(()) => self.tell_of_growth(id),
            Err(error) if error.kind() == ErrorKind::DeadlineExceeded => {
                tracing::debug!(%error, "a pool cannot use a piece yet");
            }
            Err(error) => tracing::warn!(%error, "a pool cannot use a piece that all have"),
        }
    }

    fn tell_of_growth(&mut self, id: PoolId) {
        for guest in self.guests.values_mut().filter(|guest| guest.pools.contains_key(&id)) {
            guest.connection.send(&Notice::Grown { pool: id }, Vec::new());
        }
    }

    pub(super) fn grows(&self) -> bool {
        self.registry.pools.values().any(|keeping| keeping.growing.is_some())
    }

    /// Looks whether those that a piece waits for had their time.
    pub(super) fn go_on_growing(&mut self) {
        let growing = self.registry.pools.iter().filter(|(_, keeping)| keeping.growing.is_some());
        for id in growing.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.admit_if_mapped(id);
        }
    }

    /// Somebody brought pieces in place of others that some may have.
    pub(super) fn are_replaced(&mut self, id: PoolId, first: usize) {
        let mut lacking = Vec::new();
        for (who, guest) in &mut self.guests {
            if let Some(has) = guest.pools.get_mut(&id).filter(|has| **has > first) {
                *has = first;
                lacking.push(*who);
            }
        }
        if self.gathering.is_none() {
            let ticket = self.ticket();
            for who in lacking {
                self.send_pieces_or_log(who, id, ticket);
            }
        }
    }

    /// Pieces that the last service made, and that no pool uses yet.
    pub(super) fn finish_growing(&mut self) {
        let unfinished: Vec<_> = self
            .registry
            .pools
            .iter()
            .map(|(id, keeping)| (*id, keeping.pool.admitted(), keeping.pool.held()))
            .filter(|(_, admitted, held)| admitted < held)
            .collect();
        for (id, number, _) in unfinished {
            self.hand_out(id, number);
        }
    }
}
