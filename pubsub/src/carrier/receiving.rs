//! What comes from other nodes: their letters, and with them their topics.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use serde::{Deserialize, Serialize};

use super::sink::TopicSink;
use super::{Carrier, Facts, id, key, note};
use crate::bridge::Terms;
use crate::peers::NodeIdentity;
use crate::service::protocol;
use crate::settings::SharedPlace;
use crate::topic::OriginId;

/// A letter between two services: what the bridges have to tell each other about a topic.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Letter {
    pub(super) topic: String,
    pub(super) terms: Vec<u8>,
}

/// A topic that comes from a node.
pub(super) struct Receiving {
    origin: OriginId,
    pub(super) waits: Arc<AtomicBool>,
}

impl Carrier {
    /// A letter of another node.
    pub(super) fn reads(&mut self, node: NodeIdentity, bytes: &[u8]) {
        let read = protocol::decode::<Letter>("read a letter of another node", bytes)
            .and_then(|letter| Ok((Terms::decode(&letter.terms)?, letter)));
        let (terms, letter) = match read {
            Ok(read) => read,
            Err(error) => {
                tracing::warn!(%error, %node, "a letter that cannot be read");
                return;
            }
        };
        let Some(facts) = self.topics.get(&letter.topic).cloned() else { return };
        let number = facts.topic.number();
        if let Terms::Wish { facts: theirs, .. } = &terms
            && !self.receive(node, &facts, theirs.number)
        {
            return;
        }
        if let Some(workers) = &self.workers {
            note(workers.of(key(number)).letter(key(number), id(node), letter.terms));
        }
    }

    /// Receives a topic from a node, if anybody here subscribes.
    fn receive(&mut self, node: NodeIdentity, facts: &Facts, theirs: u64) -> bool {
        let topic = &facts.topic;
        let number = topic.number();
        let origin = OriginId { node: node.0, topic: theirs };
        match self.receiving.get(&(number, node)) {
            Some(known) if known.origin == origin => return true,
            Some(known) => {
                topic.forget_origin(&known.origin);
                self.stop_receiving(number, node);
            }
            None => {}
        }
        let Some(workers) = self.workers.as_ref().filter(|_| facts.subscribes) else {
            return false;
        };
        let device = match topic.settings().place {
            SharedPlace::Host => None,
            SharedPlace::Device(_) => facts.arrivals.device().cloned(),
        };
        let waits = Arc::new(AtomicBool::new(false));
        let pool = &facts.arrivals;
        let sink = TopicSink::new(&self.household, topic, pool, origin, &waits);
        let from = topic.delivered(&origin).map_or(0, |last| last + 1);
        let worker = workers.of(key(number));
        match worker.receive_topic(key(number), id(node), from, device, Box::new(sink)) {
            Ok(_) => {
                self.receiving.insert((number, node), Receiving { origin, waits });
                true
            }
            Err(error) => {
                tracing::error!(%error, "the messages of a node's topic cannot be received");
                false
            }
        }
    }

    pub(super) fn stop_receiving(&mut self, number: u32, node: NodeIdentity) {
        if self.receiving.remove(&(number, node)).is_some()
            && let Some(workers) = &self.workers
        {
            note(workers.of(key(number)).stop_receiving(key(number), id(node)));
        }
    }
}
