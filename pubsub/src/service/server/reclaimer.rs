//! Processes that die, leave, or lose their connection.

use std::collections::{BTreeSet, HashMap};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use ipc::{Liveness, Participant, PidFd};
use threads::lock;

use super::{ClientName, ServedNode, Service};
use crate::service::protocol::{MAX_PIDFDS_PER_MESSAGE, Notice};
use crate::service::registry::Registry;

/// Interval of the search for unreported deaths.
const LIVENESS_CHECK: Duration = Duration::from_secs(5);

/// The members that are watched, and those after which the service has to reclaim.
#[derive(Debug)]
pub(super) struct Reclaimer {
    pidfds: HashMap<Participant, PidFd>,
    /// Participants that are dead or have left, and may still own memory.
    unreclaimed: BTreeSet<Participant>,
    /// Members whose connection ended, though no death is known.
    disconnected: HashMap<Participant, ClientName>,
    /// A late process returned objects in which reclaimed participants may still own memory.
    must_rescan_owners: bool,
    checked_liveness_at: Instant,
}

impl Reclaimer {
    pub(super) fn new() -> Self {
        Self {
            pidfds: HashMap::new(),
            unreclaimed: BTreeSet::new(),
            disconnected: HashMap::new(),
            must_rescan_owners: false,
            checked_liveness_at: Instant::now(),
        }
    }

    pub(super) fn watch(&mut self, participant: Participant, pidfd: PidFd) {
        self.pidfds.insert(participant, pidfd);
    }

    pub(super) fn watches(&self, participant: Participant) -> bool {
        self.pidfds.contains_key(&participant)
    }

    pub(super) fn pidfds(&self) -> impl Iterator<Item = (Participant, &PidFd)> {
        self.pidfds.iter().map(|(participant, pidfd)| (*participant, pidfd))
    }

    /// Copies of all pidfds, split into messages.
    pub(super) fn pidfd_messages(&self) -> std::io::Result<Vec<(Vec<u32>, Vec<OwnedFd>)>> {
        let named = |(participant, pidfd): (Participant, &PidFd)| {
            Ok((participant.number(), pidfd.as_fd().try_clone_to_owned()?))
        };
        let all: Vec<_> = self.pidfds().map(named).collect::<std::io::Result<_>>()?;
        let mut all = all.into_iter().peekable();
        let mut messages = Vec::new();
        while all.peek().is_some() {
            messages.push(all.by_ref().take(MAX_PIDFDS_PER_MESSAGE).unzip());
        }
        Ok(messages)
    }

    /// A participant is dead or has left. Returns its name if its connection ended earlier.
    fn mark_ended(&mut self, participant: Participant) -> Option<ClientName> {
        // A pidfd stays readable after the death: it must not be polled any more.
        self.pidfds.remove(&participant);
        self.unreclaimed.insert(participant);
        self.disconnected.remove(&participant)
    }

    pub(super) fn mark_rejoined(&mut self, participant: Participant) {
        self.disconnected.remove(&participant);
    }

    pub(super) fn reclaim_later(&mut self, participants: impl IntoIterator<Item = Participant>) {
        self.unreclaimed.extend(participants);
    }

    /// Objects were returned late.
    pub(super) fn rescan_owners(&mut self) {
        self.must_rescan_owners = true;
    }

    /// Returns true if something is tried again without an event.
    pub(super) fn must_poll(&self) -> bool {
        !self.unreclaimed.is_empty() || self.must_rescan_owners
    }

    /// Finds dead owners in objects that were returned late.
    fn find_dead_owners(&mut self, served_node: &ServedNode, registry: &Registry) {
        if !self.must_rescan_owners {
            return;
        }
        match registry.owners(&served_node.caller()) {
            Ok(owners) => {
                let dead =
                    |it: &Participant| !it.is_role() && served_node.participants.is_dead(Some(*it));
                self.unreclaimed.extend(owners.into_iter().filter(dead));
                self.must_rescan_owners = false;
            }
            Err(error) => tracing::debug!(%error, "cannot look for dead participants yet"),
        }
    }
}

#[cfg(test)]
impl Reclaimer {
    pub(super) fn expire_liveness_check(&mut self) {
        self.checked_liveness_at -= LIVENESS_CHECK;
    }

    pub(super) fn awaits_reclaim(&self, participant: Participant) -> bool {
        self.unreclaimed.contains(&participant)
    }
}

impl Service {
    pub(super) fn handle_death(&mut self, participant: Participant) {
        self.handle_disconnect(participant);
        self.mark_ended(participant);
        if let Some(takeover) = &mut self.takeover {
            takeover.mark_returned(participant);
        }
    }

    /// A connection has ended. If the process lives, it rejoins, and returns its objects.
    pub(super) fn handle_disconnect(&mut self, participant: Participant) {
        let Some((name, is_leaving)) = self.broker.remove(participant) else { return };
        self.stop_awaiting(participant);
        let Some(served_node) = self.served_node.as_ref().filter(|_| !is_leaving) else { return };
        let ClientName { process, label } = &name;
        if served_node.participants.is_dead(Some(participant)) {
            // Its last messages, perhaps `Leave`, are not read any more.
            log_change!(self, %participant, process, label, "a process exited");
            return;
        }
        if served_node.node_segment.is_member(participant) {
            tracing::debug!(%participant, process, label, "lost the connection to a member");
            self.reclaimer.disconnected.insert(participant, name);
        } else {
            // It gave up before it became a member, and owns nothing.
            self.reclaimer.mark_ended(participant);
        }
    }

    /// A participant is dead. Logs the end of a process whose connection ended before.
    fn mark_ended(&mut self, participant: Participant) {
        if let Some(ClientName { process, label }) = self.reclaimer.mark_ended(participant) {
            log_change!(self, %participant, process, label, "a process exited");
        }
    }

    /// No acknowledgement of this process is awaited any more.
    fn stop_awaiting(&mut self, participant: Participant) {
        let Some(served_node) = &self.served_node else { return };
        self.broker.acknowledge(&served_node.caller(), participant, u64::MAX);
    }

    pub(super) fn handle_leave(&mut self, participant: Participant) {
        let Some(ClientName { process, label }) = self.broker.mark_leaving(participant) else {
            return;
        };
        log_change!(self, %participant, process, label, "a process left");
        self.stop_awaiting(participant);
        self.reclaimer.mark_ended(participant);
        if let Some(takeover) = &mut self.takeover {
            takeover.mark_returned(participant);
        } else {
            self.reclaim_all();
        }
    }

    /// Finds unreported deaths: of processes that left while there was no service, and of owners of
    /// objects that were returned late.
    pub(super) fn find_dead(&mut self) {
        let Some(served_node) = &self.served_node else { return };
        self.reclaimer.find_dead_owners(served_node, self.broker.registry());
        if self.reclaimer.checked_liveness_at.elapsed() < LIVENESS_CHECK {
            return;
        }
        self.reclaimer.checked_liveness_at = Instant::now();
        for participant in served_node.participants.dead_participants() {
            self.mark_ended(participant);
        }
    }

    /// Frees participants of unknown processes: the service that admitted them was killed before it
    /// sent their pidfds. They own nothing, since they never became members.
    pub(super) fn remove_unknown_members(&self) {
        let Some(served_node) = &self.served_node else { return };
        for found in served_node.participants.living_participants() {
            let is_known = self.reclaimer.watches(found) || self.broker.name(found).is_some();
            if !is_known && !found.is_role() && !served_node.node_segment.is_member(found) {
                tracing::debug!(participant = %found, "an unused participant number was freed");
                served_node.participants.free_slot(found);
            }
        }
    }

    /// Reclaims after dead and leaving participants. If a living process holds a lock, it is tried
    /// again later.
    pub(super) fn reclaim_all(&mut self) {
        if self.takeover.is_some() {
            return;
        }
        for participant in std::mem::take(&mut self.reclaimer.unreclaimed) {
            if !self.reclaim(participant) {
                self.reclaimer.unreclaimed.insert(participant);
            }
        }
    }

    fn reclaim(&mut self, participant: Participant) -> bool {
        let Some(served_node) = &self.served_node else { return true };
        let reclaimed = {
            let _settled = lock(self.replication.arrival_repair_lock());
            self.broker.registry().reclaim(&served_node.caller(), participant)
        };
        if let Err(error) = reclaimed {
            tracing::debug!(%error, %participant, "cannot reclaim after a process yet");
            return false;
        }
        // The participant owns nothing any more.
        served_node.participants.free_slot(participant);
        let topics = self.broker.registry_mut().remove_user_from(participant, |_| true);
        self.review_topics(topics);
        self.broker.notify(participant, &Notice::Left, Vec::new());
        self.broker.remove(participant);
        true
    }
}
