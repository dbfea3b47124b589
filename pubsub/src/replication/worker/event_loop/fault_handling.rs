//! Faults of nodes, and the renewal of the endpoint with all its rings.

use super::WorkerLoop;
use crate::error::{Error, ErrorKind, Result};
use crate::replication::worker::RENEW;
use crate::replication::worker::endpoint::RenewalReason;
use crate::replication::worker::topics::table::TopicSlot;
use crate::replication::{NodeId, Side, WorkerEvent};

const RENEW_RINGS: &str = "restart rings of node";

impl WorkerLoop {
    /// Handles a fault of a node: restarts its connections, or all connections.
    pub(super) fn handle_fault(&mut self, node: NodeId, why: RenewalReason) {
        let (now, is_only_node) = (self.now.monotonic, self.topics.is_only_node(node));
        if self.endpoint.record_fault(node, why, is_only_node, now) && !self.renew_if_due() {
            let reason = || Error::new(RENEW_RINGS, ErrorKind::Failed, why.text()).at(node);
            self.disconnect_node(node, false, reason);
        }
    }

    /// Renews the endpoint if it is due. True if so.
    pub(super) fn renew_if_due(&mut self) -> bool {
        let now = self.now;
        let due = match self.topics.is_overdue(now) {
            true => Some((RenewalReason::WriteIncomplete, None)),
            false => {
                let is_only_node = |node| self.topics.is_only_node(node);
                self.endpoint.renewal_due(now.monotonic, is_only_node)
            }
        };
        let Some((why, node)) = due else { return false };
        if let Err(error) = self.replace_endpoint(why, node) {
            tracing::error!(%error, why = why.text(), "renewing the endpoint failed");
            self.is_stopping = true;
        }
        true
    }

    fn replace_endpoint(&mut self, why: RenewalReason, node: Option<NodeId>) -> Result<()> {
        match node {
            Some(node) => tracing::info!(why = why.text(), %node, "the endpoint is renewed"),
            None => tracing::info!(why = why.text(), "the endpoint is renewed"),
        }
        if !self.endpoint.can_be_renewed() {
            let detail =
                format!("{}; memory is bound to the endpoint (FI_MR_ENDPOINT)", why.text());
            return Err(Error::new(RENEW, ErrorKind::Failed, detail));
        }
        let for_node = node.map(|node| (node, self.topics.is_only_node(node)));
        self.disconnect_all_rings(why);
        self.endpoint.renew(why, for_node, self.now.monotonic)?;
        self.doorbell.set_waker(self.endpoint.waker());
        self.topics.forget_rings();
        (0..self.topics.outbound_end()).for_each(|index| self.ready(TopicSlot::Out(index)));
        // Some have requests to be answered.
        (0..self.topics.inbound_end()).for_each(|index| self.ready(TopicSlot::In(index)));
        self.release_drained();
        Ok(())
    }

    /// Disconnects all rings before the endpoint is closed.
    fn disconnect_all_rings(&mut self, why: RenewalReason) {
        let reason =
            |node| Error::new("renew endpoint for node", ErrorKind::Closed, why.text()).at(node);
        for index in 0..self.topics.outbound_end() {
            let Some(topic) = self.topics.outbound(index) else { continue };
            for node in topic.nodes() {
                self.disconnect_writer(index, node, Some(reason(node)));
            }
        }
        for index in 0..self.topics.inbound_end() {
            self.request_restart(index, why.text());
            let Some(topic) = self.topics.inbound(index) else { continue };
            let ((key, node), side) = (topic.id(), Side::Reader);
            if topic.disconnect().is_some() {
                let reason = reason(node);
                self.events.send(WorkerEvent::Disconnected { key, node, side, reason });
            }
        }
    }
}
