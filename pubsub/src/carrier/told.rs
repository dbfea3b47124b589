//! What goes on between nodes, for those that ask.

use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime};

use crossbeam_channel::Receiver;

use super::Carrier;
use crate::bridge::{Counters, TopicKey, Worker, Workers};
use crate::error::ErrorKind;
use crate::peers::{PeerReport, PeerState};
use crate::report::Row;
use crate::settings::SharedSettings;

/// How long all workers together may take to count: who asks has other things to do. One that
/// takes longer is not waited for again before it has answered.
const COUNTING: Duration = Duration::from_millis(100);

/// What a worker counted.
#[derive(Debug, Default)]
pub(super) struct Count {
    asked: Option<Receiver<Counters>>,
    last: Counters,
}

impl Count {
    /// Takes an answer that comes by then.
    fn hears(&mut self, end: Instant) {
        use crossbeam_channel::RecvTimeoutError;
        let Some(asked) = &self.asked else { return };
        match asked.recv_deadline(end) {
            Ok(counters) => (self.last, self.asked) = (counters, None),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => self.asked = None,
        }
    }

    /// Asks, if there is no question yet that was not answered. True if there was none.
    fn asks(&mut self, worker: &Worker) -> bool {
        self.hears(Instant::now());
        let is_new = self.asked.is_none();
        if is_new {
            self.asked = worker.ask_for_counters().ok();
        }
        is_new
    }
}

/// For how long a node has been there, or why it is not.
fn how_it_stands(peer: &PeerReport, now: SystemTime) -> String {
    let since = now.duration_since(peer.since).unwrap_or_default().as_secs();
    let state = match peer.state {
        PeerState::Connected => return format!("for {since} s"),
        PeerState::Introducing => "it is connected, and has not introduced itself yet",
        PeerState::Dialling => "no answer yet",
        PeerState::Waiting => "it is tried again",
        PeerState::Oneself => "it is this node",
        PeerState::Away => "it is gone",
    };
    match &peer.why_not {
        Some(why) => why.clone(),
        None => state.to_owned(),
    }
}

impl Carrier {
    /// Where other nodes reach this one.
    pub(crate) fn listens(&self) -> Option<String> {
        self.peers.listens().map(|address| address.to_string())
    }

    /// What a topic is like at the nodes that this one is connected to.
    pub(crate) fn like(&self, topic: &str) -> Option<SharedSettings> {
        self.misfits.like(topic)
    }

    /// A row for each other node, why nothing goes there if nothing can, and a row for each topic that is there only, and for each topic that goes there or comes from there.
    pub(crate) fn rows(&mut self) -> Vec<Row> {
        let mut rows: Vec<_> = self
            .peers
            .reports()
            .into_iter()
            .filter(|peer| peer.state != PeerState::Oneself)
            .map(|peer| {
                let strangers = peer.identity.and_then(|node| self.misfits.strangers(node));
                (strangers.map(ToString::to_string), peer)
            })
            .map(|(strangers, peer)| Row::Peer {
                is_connected: peer.state == PeerState::Connected && strangers.is_none(),
                is_retried: peer.is_dialled && peer.state != PeerState::Connected,
                detail: strangers.unwrap_or_else(|| how_it_stands(&peer, SystemTime::now())),
                node: peer.identity.map(|node| node.to_string()).unwrap_or_default(),
                label: peer.label.unwrap_or_default(),
                address: peer.address,
            })
            .collect();
        let why = self.why_no_workers.as_deref().filter(|_| self.workers.is_none());
        rows.extend(why.map(|why| Row::not_carried(ErrorKind::NoProvider, why)));
        rows.extend(self.misfits.rows(|name| self.lines.get(self.names.get(name)?)?.here()));
        let topics = self.lines.iter().map(|(number, line)| (*number, line.facts.topic.name()));
        rows.extend(self.known.rows(topics));
        rows.extend(self.misfits.elsewhere(|name| self.names.contains_key(name)));
        let names: BTreeMap<TopicKey, &str> = self
            .lines
            .iter()
            .map(|(number, line)| (super::key(*number), line.facts.topic.name()))
            .collect();
        let workers: Vec<_> = self.workers.iter().flat_map(Workers::all).collect();
        self.counts.resize_with(workers.len(), Count::default);
        let end = Instant::now() + COUNTING;
        let counts = self.counts.iter_mut().zip(&workers);
        let asked: Vec<_> = counts.map(|(count, worker)| count.asks(worker)).collect();
        for (count, _) in self.counts.iter_mut().zip(asked).filter(|(_, is_new)| *is_new) {
            count.hears(end);
        }
        for (worker, count) in workers.into_iter().zip(&self.counts) {
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
                    stages: vec![("waited for room there".into(), found.blocked_for)],
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
                        ("waited for memory".into(), found.no_room_for),
                        ("waited for readers".into(), found.no_queue_for),
                    ],
                });
            }
        }
        rows
    }
}
