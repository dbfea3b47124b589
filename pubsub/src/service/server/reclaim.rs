//! Processes that die, leave, or lose their connection.

use std::sync::atomic::Ordering;
use std::time::Instant;

use ipc::{Liveness, Participant};

use super::{LIVENESS_CHECK, SERVING, Service};
use crate::lock::lock;
use crate::service::election::PriorityLock;
use crate::service::protocol::Notice;

impl Service {
    /// A process has ended.
    pub(super) fn handle_death(&mut self, participant: Participant) {
        // A pidfd stays readable after the death: it must not be polled any more.
        self.pidfds.remove(&participant);
        self.handle_disconnect(participant);
        self.log_disconnected_death(participant);
        self.unreclaimed.insert(participant);
        if let Some(takeover) = &mut self.takeover {
            takeover.mark_returned(participant);
        }
    }

    /// A connection has ended. If the process lives, it rejoins, and returns its objects.
    pub(super) fn handle_disconnect(&mut self, participant: Participant) {
        let Some(client) = self.clients.remove(&participant) else { return };
        self.stop_awaiting(participant);
        let Some(served_node) = &self.served_node else { return };
        let (process, label) = (client.process, client.label);
        if client.is_leaving {
            return;
        }
        if served_node.roster.is_dead(Some(participant)) {
            // Its last messages, perhaps `Leave`, are not read any more.
            log_change!(self, %participant, process, label, "a process exited");
            return;
        }
        if served_node.node_segment.is_member(participant) {
            tracing::debug!(%participant, process, label, "lost the connection to a member");
            self.disconnected.insert(participant, (process, label));
        } else {
            // It gave up before it became a member, and owns nothing.
            self.pidfds.remove(&participant);
            self.unreclaimed.insert(participant);
        }
    }

    /// Logs the end of a process whose connection ended before its death was known.
    fn log_disconnected_death(&mut self, participant: Participant) {
        if let Some((process, label)) = self.disconnected.remove(&participant) {
            log_change!(self, %participant, process, label, "a process exited");
        }
    }

    /// A process leaves in order.
    pub(super) fn handle_leave(&mut self, participant: Participant) {
        let Some(client) = self.clients.get_mut(&participant) else { return };
        client.is_leaving = true;
        log_change!(
            self,
            %participant,
            process = client.process,
            label = client.label,
            "a process left"
        );
        self.stop_awaiting(participant);
        self.pidfds.remove(&participant);
        self.unreclaimed.insert(participant);
        if let Some(takeover) = &mut self.takeover {
            takeover.mark_returned(participant);
        } else {
            self.reclaim_all();
        }
    }

    /// A dedicated process requests the takeover. It is granted if this service is embedded, since
    /// only the holder of the priority lock is dedicated. Members return their objects to the new
    /// service as after an end of this one, and leave the leader lock to it. During a minimum term
    /// the request is ignored, so that a process that cannot serve does not cause repeated
    /// handovers.
    pub(super) fn handle_take_over(&mut self, participant: Participant) {
        if self.options.has_priority.load(Ordering::Acquire) {
            tracing::debug!(%participant, "takeover request rejected: this service has priority");
            return;
        }
        if self.options.min_term_until.is_some_and(|until| Instant::now() < until) {
            tracing::debug!(
                %participant,
                "takeover request ignored during the minimum term: the process with priority did \
                 not serve in time"
            );
            return;
        }
        let requester = self.clients.get(&participant).map_or(0, |client| client.process);
        match PriorityLock::holder(SERVING, &self.options.directory) {
            // If both processes are visible in this PID namespace.
            Ok(Some(process)) if process != requester && process != 0 && requester != 0 => {
                tracing::debug!(%participant, requester, process, "another process has priority");
            }
            Ok(Some(process)) => {
                tracing::info!(process, "the node is handed over to a process with priority");
                self.is_over.store(true, Ordering::Release);
            }
            // It is dead, or its request was false.
            Ok(None) => tracing::debug!(%participant, "no process has priority"),
            Err(error) => tracing::warn!(%error, "cannot read the priority lock"),
        }
    }

    /// Finds unreported deaths: of processes that left while there was no service.
    pub(super) fn check_liveness(&mut self) {
        let Some(served_node) = &self.served_node else { return };
        if self.checked_liveness_at.elapsed() < LIVENESS_CHECK {
            return;
        }
        self.checked_liveness_at = Instant::now();
        let dead = served_node.roster.dead_participants();
        for participant in dead {
            self.pidfds.remove(&participant);
            self.unreclaimed.insert(participant);
            self.log_disconnected_death(participant);
        }
    }

    /// Frees participants of unknown processes: the service that admitted them was killed before it
    /// sent their pidfds. They own nothing, since they never became members.
    pub(super) fn remove_unknown_members(&self) {
        let Some(served_node) = &self.served_node else { return };
        for found in served_node.roster.living_participants() {
            let is_known = self.pidfds.contains_key(&found) || self.clients.contains_key(&found);
            if !is_known && !found.is_role() && !served_node.node_segment.is_member(found) {
                tracing::debug!(participant = %found, "an unused participant number was freed");
                served_node.roster.free_slot(found);
            }
        }
    }

    /// Finds dead owners in objects that were returned late.
    pub(super) fn find_dead_owners(&mut self) {
        let Some(served_node) = self.served_node.as_ref().filter(|_| self.must_rescan_owners)
        else {
            return;
        };
        match self.registry.owners(&served_node.caller()) {
            Ok(owners) => {
                let dead =
                    |it: &Participant| !it.is_role() && served_node.roster.is_dead(Some(*it));
                self.unreclaimed.extend(owners.into_iter().filter(dead));
                self.must_rescan_owners = false;
            }
            Err(error) => tracing::debug!(%error, "cannot look for dead participants yet"),
        }
    }

    /// Reclaims after dead and leaving participants. If a living process holds a lock, it is tried
    /// again later.
    pub(super) fn reclaim_all(&mut self) {
        if self.takeover.is_some() {
            return;
        }
        for participant in std::mem::take(&mut self.unreclaimed) {
            if !self.reclaim(participant) {
                self.unreclaimed.insert(participant);
            }
        }
    }

    fn reclaim(&mut self, participant: Participant) -> bool {
        let Some(served_node) = &self.served_node else { return true };
        let arrival_repair_lock = self.replication.arrival_repair_lock();
        let settled = lock(&arrival_repair_lock);
        let reclaimed = self.registry.reclaim(&served_node.caller(), participant);
        drop(settled);
        if let Err(error) = reclaimed {
            tracing::debug!(%error, %participant, "cannot reclaim after a process yet");
            return false;
        }
        // The participant owns nothing any more.
        served_node.roster.free_slot(participant);
        for number in self.registry.remove_user_from(participant, |_| true) {
            self.topic_changed(number);
            self.remove_unused(number);
        }
        if let Some(mut client) = self.clients.remove(&participant) {
            client.connection.send(&Notice::Left, Vec::new());
        }
        true
    }
}
