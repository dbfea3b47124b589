//! Those that die, leave, or lose their connection.

use std::sync::atomic::Ordering;
use std::time::Instant;

use ipc::{Liveness, Participant};

use super::{LIVENESS_CHECK, SERVING, Service};
use crate::lock::lock;
use crate::service::election::PriorityLock;
use crate::service::protocol::Notice;

impl Service {
    /// A process has ended.
    pub(super) fn handle_death(&mut self, who: Participant) {
        // Its end stays readable: who is known to be dead is not listened for any more.
        self.pidfds.remove(&who);
        self.handle_disconnect(who);
        self.log_disconnected_death(who);
        self.unreclaimed.insert(who);
        if let Some(takeover) = &mut self.takeover {
            takeover.mark_returned(who);
        }
    }

    /// A connection has ended. Whether the process has is another matter: one that lives comes
    /// back, with what it has.
    pub(super) fn handle_disconnect(&mut self, who: Participant) {
        let Some(client) = self.clients.remove(&who) else { return };
        self.stop_awaiting(who);
        let Some(served_node) = &self.served_node else { return };
        let (process, label) = (client.process, client.label);
        if client.leaves {
            return;
        }
        if served_node.roster.is_dead(Some(who)) {
            // That it leaves may be among what it said last and is not read any more.
            log_change!(self, %who, process, label, "a process exited");
            return;
        }
        if served_node.node_segment.is_member(who) {
            tracing::debug!(%who, process, label, "lost the connection to a member");
            self.disconnected.insert(who, (process, label));
        } else {
            // It gave up before it became one, and has nothing.
            self.pidfds.remove(&who);
            self.unreclaimed.insert(who);
        }
    }

    /// Logs the end of a process whose connection ended before its death was known.
    fn log_disconnected_death(&mut self, who: Participant) {
        if let Some((process, label)) = self.disconnected.remove(&who) {
            log_change!(self, %who, process, label, "a process exited");
        }
    }

    /// A process leaves in order.
    pub(super) fn leaves(&mut self, who: Participant) {
        let Some(client) = self.clients.get_mut(&who) else { return };
        client.leaves = true;
        log_change!(self, %who, process = client.process, label = client.label, "a process left");
        self.stop_awaiting(who);
        self.pidfds.remove(&who);
        self.unreclaimed.insert(who);
        if let Some(takeover) = &mut self.takeover {
            takeover.mark_returned(who);
        } else {
            self.reclaim_all();
        }
    }

    /// A process wants the office. It gets it if it is there to serve, and this one is not: only
    /// who has the claim can be that. Members hand over to it what they have, as if this service
    /// had ended by itself, and leave the office to it meanwhile. One that had the claim and did not
    /// serve has to wait for a while, lest the node be handed to and fro and nothing else.
    pub(super) fn handle_take_over(&mut self, who: Participant) {
        if self.options.has_priority.load(Ordering::Acquire) {
            tracing::debug!(%who, "takeover request rejected: this service has priority");
            return;
        }
        if self.options.min_term_until.is_some_and(|until| Instant::now() < until) {
            tracing::debug!(%who, "the process with priority did not take over in time");
            return;
        }
        let asks = self.clients.get(&who).map_or(0, |client| client.process);
        match PriorityLock::holder(SERVING, &self.options.directory) {
            // Where both can be seen from here.
            Ok(Some(process)) if process != asks && process != 0 && asks != 0 => {
                tracing::debug!(%who, asks, process, "another process has priority");
            }
            Ok(Some(process)) => {
                tracing::info!(process, "the node is handed over to a process with priority");
                self.is_over.store(true, Ordering::Release);
            }
            // It is dead by now, or lies.
            Ok(None) => tracing::debug!(%who, "no process has priority"),
            Err(error) => tracing::warn!(%error, "cannot read the priority lock"),
        }
    }

    /// Looks who is dead of whom nobody told: those that left when no service was there.
    pub(super) fn check_liveness(&mut self) {
        let Some(served_node) = &self.served_node else { return };
        if self.checked_liveness_at.elapsed() < LIVENESS_CHECK {
            return;
        }
        self.checked_liveness_at = Instant::now();
        let dead = served_node.roster.dead_participants();
        for who in dead {
            self.pidfds.remove(&who);
            self.unreclaimed.insert(who);
            self.log_disconnected_death(who);
        }
    }

    /// Strikes off those of whom nobody knows whether they live, since who let them in was
    /// killed before it told of them, and who have nothing, since they never became members.
    pub(super) fn remove_unknown_members(&self) {
        let Some(served_node) = &self.served_node else { return };
        for who in served_node.roster.living_participants() {
            let is_known = self.pidfds.contains_key(&who) || self.clients.contains_key(&who);
            if !is_known && !who.is_role() && !served_node.node_segment.is_member(who) {
                tracing::debug!(%who, "an unused participant number was freed");
                served_node.roster.free_slot(who);
            }
        }
    }

    /// Looks in what came late for those that are dead.
    pub(super) fn find_dead_owners(&mut self) {
        let Some(served_node) = self.served_node.as_ref().filter(|_| self.must_rescan_owners)
        else {
            return;
        };
        match self.registry.owners(&served_node.caller()) {
            Ok(owners) => {
                let dead =
                    |who: &Participant| !who.is_role() && served_node.roster.is_dead(Some(*who));
                self.unreclaimed.extend(owners.into_iter().filter(dead));
                self.must_rescan_owners = false;
            }
            Err(error) => tracing::debug!(%error, "cannot look for dead participants yet"),
        }
    }

    /// Sees to what those left that are dead or gone. What cannot be done now, since a living
    /// process holds a lock, is done at the next look.
    pub(super) fn reclaim_all(&mut self) {
        if self.takeover.is_some() {
            return;
        }
        for who in std::mem::take(&mut self.unreclaimed) {
            if !self.reclaim(who) {
                self.unreclaimed.insert(who);
            }
        }
    }

    fn reclaim(&mut self, who: Participant) -> bool {
        let Some(served_node) = &self.served_node else { return true };
        let arrival_repair_lock = self.replication.arrival_repair_lock();
        let settled = lock(&arrival_repair_lock);
        let reclaimed = self.registry.reclaim(&served_node.caller(), who);
        drop(settled);
        if let Err(error) = reclaimed {
            tracing::debug!(%error, %who, "cannot clean up after a process yet");
            return false;
        }
        // Nothing names it any more.
        served_node.roster.free_slot(who);
        for number in self.registry.remove_user_from(who, |_| true) {
            self.topic_changed(number);
            self.remove_unused(number);
        }
        if let Some(mut client) = self.clients.remove(&who) {
            client.connection.send(&Notice::Left, Vec::new());
        }
        true
    }
}
