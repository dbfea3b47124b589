//! Handover of the node to a process with priority.

use std::sync::atomic::Ordering;
use std::time::Instant;

use ipc::Participant;

use super::{SERVING, Service};
use crate::service::election::PriorityLock;

impl Service {
    /// A dedicated process requests the takeover. It is granted if this service is embedded, since
    /// only the holder of the priority lock is dedicated. Members return their objects to the new
    /// service as after an end of this one, and leave the leader lock to it. During a minimum term
    /// the request is ignored, so that a process that cannot serve does not cause repeated
    /// handovers.
    pub(super) fn handle_take_over(&mut self, participant: Participant) {
        if self.has_priority.load(Ordering::Acquire) {
            tracing::debug!(%participant, "takeover request rejected: this service has priority");
            return;
        }
        if self.min_term_until.is_some_and(|until| Instant::now() < until) {
            tracing::debug!(
                %participant,
                "takeover request ignored during the minimum term: the process with priority did \
                 not serve in time"
            );
            return;
        }
        let requester = self.broker.name(participant).map_or(0, |name| name.process);
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
}
