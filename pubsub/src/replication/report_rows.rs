//! Report of peers and replicated topics.

use std::time::SystemTime;

use super::{Replicator, number};
use crate::error::ErrorKind;
use crate::peers::{PeerReport, PeerState};
use crate::replication::TopicKey;
use crate::replication::routing::ProviderMismatch;
use crate::report::{RingPath, Row};
use crate::settings::SharedSettings;

/// How long a peer has been connected, or why it is not.
fn describe_peer(peer: &PeerReport, now: SystemTime) -> String {
    let since = now.duration_since(peer.since).unwrap_or_default().as_secs();
    let state = match peer.state {
        PeerState::Connected => return format!("for {since} s"),
        PeerState::Handshaking => "connected, handshake not complete",
        PeerState::Dialling => "no answer yet",
        PeerState::Backoff => "retrying",
        PeerState::SelfConnection => "the address is this node's own",
        PeerState::Departed => "disconnected",
    };
    peer.last_error.clone().unwrap_or_else(|| state.to_owned())
}

impl Replicator {
    /// The address at which other nodes reach this one.
    pub(crate) fn listens(&self) -> Option<String> {
        self.remote_nodes.peers().listens().map(|address| address.to_string())
    }

    /// The settings of a topic at the connected nodes.
    pub(crate) fn remote_settings(&self, topic: &str) -> Option<SharedSettings> {
        self.routing.remote_settings(topic)
    }

    /// Rows for each peer, for failed workers, for each topic of peers only, and for each topic
    /// sent or received.
    pub(crate) fn rows(&mut self) -> Vec<Row> {
        let Self { remote_nodes, routing, worker_pool, .. } = self;
        let peers = remote_nodes.peers().reports().into_iter();
        let peers = peers.filter(|peer| peer.state != PeerState::SelfConnection).map(|peer| {
            let provider_mismatch =
                peer.identity.and_then(|node| ProviderMismatch::with(remote_nodes, node));
            Row::Peer {
                is_connected: peer.state == PeerState::Connected && provider_mismatch.is_none(),
                is_retried: peer.is_dialled && peer.state != PeerState::Connected,
                detail: provider_mismatch.map_or_else(
                    || describe_peer(&peer, SystemTime::now()),
                    |provider_mismatch| provider_mismatch.to_string(),
                ),
                node: peer.identity.map(|node| node.to_string()).unwrap_or_default(),
                label: peer.label.unwrap_or_default(),
                address: peer.address,
            }
        });
        let mut rows: Vec<_> = peers.collect();
        let why = worker_pool.start_error();
        rows.extend(why.map(|why| Row::replication_error(ErrorKind::NoProvider, why)));
        routing.add_rows(&mut rows, remote_nodes.seen_nodes());
        let named = |key: &TopicKey| {
            routing.local_topic(number(*key)).map(|local| local.topic.name().to_owned())
        };
        for (provider, counters) in worker_pool.counters() {
            let provider = &provider.name;
            let path = |lanes: u64, is_direct| RingPath {
                provider: provider.clone(),
                lanes: lanes.max(1) as usize,
                is_direct,
            };
            for (key, node, found) in &counters.sent {
                let Some(topic) = named(key) else { continue };
                rows.push(Row::Sent {
                    topic,
                    node: node.to_string(),
                    path: path(found.lanes, found.is_direct),
                    messages: found.delivered,
                    bytes: found.bytes,
                    waits: found.blocked,
                    stages: vec![("waited for credit".into(), found.blocked_for)],
                });
            }
            for (key, node, found) in &counters.received {
                let Some(topic) = named(key) else { continue };
                rows.push(Row::Received {
                    topic,
                    node: node.to_string(),
                    path: path(found.lanes, found.is_direct),
                    staged: counters
                        .staged
                        .iter()
                        .find(|(of, from, _)| (of, from) == (key, node))
                        .map(|(.., cause)| Row::shortened(cause)),
                    messages: found.messages,
                    bytes: found.bytes,
                    stages: vec![
                        ("waited for memory".into(), found.waited_for_memory),
                        ("waited for readers".into(), found.waited_for_queue),
                    ],
                });
            }
        }
        rows
    }
}
