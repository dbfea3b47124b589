//! Report of peers and replicated topics.

use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime};

use crossbeam_channel::Receiver;

use super::Replicator;
use crate::error::ErrorKind;
use crate::peers::{PeerReport, PeerState};
use crate::replication::{Counters, TopicKey, Worker, Workers};
use crate::report::Row;
use crate::settings::SharedSettings;

/// Timeout for the counters of all workers together. A worker that exceeds it is not waited for
/// again before it has answered.
const COUNTERS_TIMEOUT: Duration = Duration::from_millis(100);

/// Counters of a worker, polled.
#[derive(Debug, Default)]
pub(super) struct PolledCounters {
    pending: Option<Receiver<Counters>>,
    last: Counters,
}

impl PolledCounters {
    /// Receives a pending answer until `end`.
    fn take_answer(&mut self, end: Instant) {
        use crossbeam_channel::RecvTimeoutError;
        let Some(pending) = &self.pending else { return };
        match pending.recv_deadline(end) {
            Ok(counters) => (self.last, self.pending) = (counters, None),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => self.pending = None,
        }
    }

    /// Requests counters, unless a request is pending. True if it sent a request.
    fn request(&mut self, worker: &Worker) -> bool {
        self.take_answer(Instant::now());
        let is_new = self.pending.is_none();
        if is_new {
            self.pending = worker.request_counters().ok();
        }
        is_new
    }
}

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
    match &peer.last_error {
        Some(why) => why.clone(),
        None => state.to_owned(),
    }
}

impl Replicator {
    /// The address at which other nodes reach this one.
    pub(crate) fn listens(&self) -> Option<String> {
        self.peers.listens().map(|address| address.to_string())
    }

    /// The settings of a topic at the connected nodes.
    pub(crate) fn remote_settings(&self, topic: &str) -> Option<SharedSettings> {
        self.incompatible_topics.remote_settings(topic)
    }

    /// Rows for each peer, for failed workers, for each topic of peers only, and for each topic
    /// sent or received.
    pub(crate) fn rows(&mut self) -> Vec<Row> {
        let mut rows: Vec<_> = self
            .peers
            .reports()
            .into_iter()
            .filter(|peer| peer.state != PeerState::SelfConnection)
            .map(|peer| {
                let provider_mismatch =
                    peer.identity.and_then(|node| self.incompatible_topics.provider_mismatch(node));
                (provider_mismatch.map(ToString::to_string), peer)
            })
            .map(|(provider_mismatch, peer)| Row::Peer {
                is_connected: peer.state == PeerState::Connected && provider_mismatch.is_none(),
                is_retried: peer.is_dialled && peer.state != PeerState::Connected,
                detail: provider_mismatch
                    .unwrap_or_else(|| describe_peer(&peer, SystemTime::now())),
                node: peer.identity.map(|node| node.to_string()).unwrap_or_default(),
                label: peer.label.unwrap_or_default(),
                address: peer.address,
            })
            .collect();
        let why = self.start_error.as_deref().filter(|_| self.workers.is_none());
        rows.extend(why.map(|why| Row::replication_error(ErrorKind::NoProvider, why)));
        rows.extend(
            self.incompatible_topics
                .rows(|name| self.replicated_topics.get(self.names.get(name)?)?.local()),
        );
        let topics = self
            .replicated_topics
            .iter()
            .map(|(number, replicated)| (*number, replicated.local_topic.topic.name()));
        rows.extend(self.seen_nodes.rows(topics));
        rows.extend(
            self.incompatible_topics.remote_only_topics(|name| self.names.contains_key(name)),
        );
        let names: BTreeMap<TopicKey, &str> = self
            .replicated_topics
            .iter()
            .map(|(number, replicated)| (super::key(*number), replicated.local_topic.topic.name()))
            .collect();
        let workers: Vec<_> = self.workers.iter().flat_map(Workers::all).collect();
        self.worker_counters.resize_with(workers.len(), PolledCounters::default);
        let end = Instant::now() + COUNTERS_TIMEOUT;
        let worker_counters = self.worker_counters.iter_mut().zip(&workers);
        let asked: Vec<_> = worker_counters.map(|(count, worker)| count.request(worker)).collect();
        for (count, _) in self.worker_counters.iter_mut().zip(asked).filter(|(_, is_new)| *is_new) {
            count.take_answer(end);
        }
        for (worker, count) in workers.into_iter().zip(&self.worker_counters) {
            let counters = count.last.clone();
            let provider = &worker.provider().name;
            let path = |lanes: u64| match lanes {
                0 | 1 => format!("ring over {provider}"),
                lanes => format!("ring of {lanes} lanes over {provider}"),
            };
            let named = |key: &TopicKey| names.get(key).map(|name| (*name).to_owned());
            for (key, node, found) in counters.sent {
                let Some(topic) = named(&key) else { continue };
                rows.push(Row::Sent {
                    topic,
                    node: node.to_string(),
                    path: path(found.lanes),
                    messages: found.delivered,
                    bytes: found.bytes,
                    waits: found.blocked,
                    stages: vec![("waited for credit".into(), found.blocked_for)],
                });
            }
            for (key, node, found) in counters.received {
                let Some(topic) = named(&key) else { continue };
                rows.push(Row::Received {
                    topic,
                    node: node.to_string(),
                    path: path(found.lanes),
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
