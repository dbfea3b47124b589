//! Reports of the service.

use super::Service;
use crate::error::ErrorKind;
use crate::pool::Direction;
use crate::report::Row;
use crate::service::protocol::{self, Notice, Refusal};

/// Maximum bytes of rows in one message: several of these fit into a socket buffer.
const PART: usize = 16 << 10;

impl Service {
    pub(super) fn answer_to_report(&mut self, request: u64) -> Vec<Notice> {
        if self.takeover.is_some() {
            let reason = "the service is taking over and has no report yet";
            let reason = Refusal::new(ErrorKind::Failed, reason);
            return vec![Notice::Refused { request, reason }];
        }
        let mut notices = Vec::new();
        let mut rows = Vec::new();
        let mut bytes = 0;
        for row in self.report() {
            let length = protocol::encode(&row).len();
            if bytes + length > PART && bytes > 0 {
                let rows = std::mem::take(&mut rows);
                notices.push(Notice::Rows { request, rows, is_last: false });
                bytes = 0;
            }
            bytes += length;
            rows.push(row);
        }
        notices.push(Notice::Rows { request, rows, is_last: true });
        notices
    }

    /// All rows of the report. The first one is the node's.
    fn report(&mut self) -> Vec<Row> {
        let Some(served_node) = &self.served_node else { return Vec::new() };
        let mut rows = vec![Row::Node {
            identity: served_node.node_segment.identity().to_string(),
            label: self.options.label.clone(),
            service: served_node.number,
            process: std::process::id(),
            listens: self.replication.replicator().and_then(|it| it.listens()),
        }];
        rows.extend(self.broker.members().map(|(participant, name)| Row::Process {
            participant: participant.to_string(),
            label: name.label.clone(),
            process: name.process,
        }));
        let registry = self.broker.registry();
        for pool in registry.pools() {
            let id = pool.id();
            let found = pool.statistics(&served_node.caller()).unwrap_or_default();
            rows.push(Row::Pool {
                place: id.place.to_string(),
                is_inbound: id.direction == Direction::Inbound,
                bytes: pool.length(),
                budget: registry.budget(id.place),
                limit: pool.limit(),
                free: found.free,
                blocks: found.blocks_allocated,
            });
        }
        rows.extend(registry.topics().flat_map(|topic| topic.report()));
        rows.extend(self.replication.rows());
        rows
    }
}
