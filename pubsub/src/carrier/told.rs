//! What goes on between nodes, for those that ask.

use std::collections::BTreeMap;
use std::time::Duration;

use super::Carrier;
use crate::bridge::{TopicKey, Workers};
use crate::peers::{NodeIdentity, PeerState};
use crate::report::Row;

/// How long a worker may take to count. It is asked by who has other things to do.
const COUNTING: Duration = Duration::from_millis(500);

impl Carrier {
    /// Where other nodes reach this one.
    pub(crate) fn listens(&self) -> Option<String> {
        self.peers.listens().map(|address| address.to_string())
    }

    /// A row for each other node, and for each topic that goes there or comes from there.
    pub(crate) fn rows(&self) -> Vec<Row> {
        let mut rows: Vec<_> = self
            .peers
            .reports()
            .into_iter()
            .filter(|peer| peer.state != PeerState::Oneself)
            .map(|peer| Row::Peer {
                node: peer.identity.map(|node| node.to_string()).unwrap_or_default(),
                label: peer.label.unwrap_or_default(),
                address: peer.address,
                is_connected: peer.state == PeerState::Connected,
                detail: peer.why_not.unwrap_or_default(),
            })
            .collect();
        let names: BTreeMap<TopicKey, &str> = self
            .topics
            .iter()
            .map(|(name, facts)| (super::key(facts.topic.number()), name.as_str()))
            .collect();
        for worker in self.workers.iter().flat_map(Workers::all) {
            let Ok(counters) = worker.counters(COUNTING) else { continue };
            let path = format!("ring over {}", worker.address().provider);
            let named = |key: &TopicKey| names.get(key).map(|name| (*name).to_owned());
            let of_node = |node: [u8; 16]| NodeIdentity(node).to_string();
            for (key, node, found) in counters.sent {
                let Some(topic) = named(&key) else { continue };
                rows.push(Row::Sent {
                    topic,
                    node: of_node(node.0),
                    path: path.clone(),
                    messages: found.delivered,
                    bytes: found.bytes,
                    waits: found.blocked,
                    stages: vec![("waited for room there".into(), found.blocked_for)],
                });
            }
            for (key, node, found) in counters.received {
                let Some(topic) = named(&key) else { continue };
                rows.push(Row::Received {
                    topic,
                    node: of_node(node.0),
                    path: path.clone(),
                    messages: found.messages,
                    bytes: found.bytes,
                    stages: vec![
                        ("waited for memory".into(), found.no_room_for),
                        ("waited for readers".into(), found.no_queue_for),
                    ],
                });
            }
        }
        rows
    }
}
