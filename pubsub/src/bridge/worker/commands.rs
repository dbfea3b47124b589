//! What a worker is told to do.

use std::collections::HashMap;

use super::engine::{Engine, nanoseconds};
use super::renewal::LINK_IS_BACK;
use super::topics::{Heat, InTopic, Name, OutTopic, Task};
use super::{Command, Counters, NodeIdentity, Report, TopicKey, TopicOptions, WorkerOptions};
use crate::bridge::Side;
use crate::bridge::deck::STRIPED;
use crate::bridge::inbound::Inbound;
use crate::bridge::outbound::{Manner, Outbound};
use crate::error::{Error, ErrorKind};

/// Commands between two looks at everything else.
const COMMANDS: usize = 64;

/// How a topic is written.
fn manner(options: &WorkerOptions, topic: &TopicOptions, lanes: usize) -> Manner {
    let lanes = if topic.facts.largest < STRIPED { 1 } else { lanes };
    let (patience, keep) = (nanoseconds(options.patience), topic.keep);
    Manner { piece: options.chunk, slots: options.slots_by(lanes), keep, patience }
}

impl Engine {
    pub(super) fn obey(&mut self) -> bool {
        let mut has_any = false;
        for _ in 0..COMMANDS {
            let Ok(command) = self.commands.try_recv() else { break };
            has_any = true;
            match command {
                Command::Send(key, options, source) => {
                    let name = Name::Out(key);
                    if self.is_taken(name, key, None) {
                        continue;
                    }
                    let topic = OutTopic {
                        key,
                        facts: options.facts,
                        source,
                        outbound: Outbound::new(manner(
                            &self.options,
                            &options,
                            self.deck.port.lanes(),
                        )),
                        links: HashMap::new(),
                        heat: Heat::default(),
                    };
                    let place = self.outs.put(topic);
                    self.names.insert(name, place);
                }
                Command::StopSending(key) => {
                    if let Some(place) = self.names.get(&Name::Out(key)).copied() {
                        self.stop_sending(place);
                    }
                }
                Command::Add(key, node) => self.add(key, node),
                Command::Remove(key, node) => {
                    if let Some(place) = self.names.get(&Name::Out(key)).copied() {
                        self.lose_link(place, node, None);
                        if let Some(topic) = self.outs.get(place) {
                            topic.outbound.remove(node, &mut self.deck);
                        }
                        self.heat(Task::Out(place));
                    }
                }
                Command::Receive(key, origin, reception) => {
                    let name = Name::In(key, origin);
                    if self.is_taken(name, key, Some(origin)) {
                        continue;
                    }
                    let patience = nanoseconds(self.options.patience);
                    let topic = InTopic {
                        key,
                        origin,
                        sink: reception.sink,
                        device: reception.device,
                        inbound: Inbound::new(reception.from, 0, patience),
                        tap: None,
                        wish: None,
                        past: None,
                        is_untold: false,
                        doublings: 0,
                        heat: Heat::default(),
                    };
                    let place = self.ins.put(topic);
                    self.names.insert(name, place);
                }
                Command::StopReceiving(key, origin) => {
                    if let Some(place) = self.names.get(&Name::In(key, origin)).copied() {
                        self.stop_receiving(place, false);
                    }
                }
                Command::Letter(key, node, terms) => self.read_letter(key, node, terms),
                Command::LoseNode(node) => self.lose_node(node),
                Command::Returned(node) => self.has_fault(node, LINK_IS_BACK),
                Command::ReportBehind(key) => self.report_behind(key),
                Command::Count(answer) => {
                    let _ = answer.try_send(self.count());
                }
                Command::Stop => self.is_over = true,
            }
        }
        // Whoever held the other end is gone, and with it whoever could want something.
        has_any
    }

    fn is_taken(&mut self, name: Name, key: TopicKey, node: Option<NodeIdentity>) -> bool {
        let is_taken = self.names.contains_key(&name);
        if is_taken {
            let detail = "the worker has it already";
            let error = Error::new("begin with a topic", ErrorKind::InvalidArgument, detail);
            let side = if node.is_some() { Side::Reader } else { Side::Writer };
            self.reports.tell(Report::Failed { key, node, side, error });
        }
        is_taken
    }

    fn report_behind(&mut self, key: TopicKey) {
        let Some(place) = self.names.get(&Name::Out(key)).copied() else { return };
        let Some(topic) = self.outs.get(place) else { return };
        for node in topic.outbound.behind() {
            self.reports.tell(Report::Behind { key, node });
        }
    }

    fn count(&self) -> Counters {
        let mut counters = Counters {
            quarantined: self.deck.port.quarantined(),
            renewals: self.renewal.count(),
            sleeps: self.sleeps,
            ..Counters::default()
        };
        for topic in self.outs.iter() {
            for (node, mut counted) in topic.outbound.counters() {
                let ring = topic.outbound.ring_of(node);
                let sender = ring.and_then(|ring| self.deck.port.sender(ring).ok());
                counted.lanes = sender.map_or(0, |sender| sender.lanes() as u64);
                counters.sent.push((topic.key, node, counted));
            }
        }
        for topic in self.ins.iter() {
            let mut counted = topic.inbound.counters();
            let ring = topic.tap.as_ref().map(|tap| tap.ring);
            let receiver = ring.and_then(|ring| self.deck.port.receiver(ring).ok());
            counted.lanes = receiver.map_or(0, |receiver| receiver.lanes() as u64);
            counters.received.push((topic.key, topic.origin, counted));
        }
        counters
    }
}
