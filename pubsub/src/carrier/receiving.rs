//! What comes from other nodes: their letters, and with them their topics.

use std::sync::{Arc, Weak};
use std::time::Instant;

use super::beginnings::Start;
use super::letters::Letter;
use super::lines::Line;
use super::room::Room;
use super::sink::TopicSink;
use super::{Carrier, Facts, key};
use crate::bridge::Command;
use crate::bridge::Terms;
use crate::peers::NodeIdentity;
use crate::settings::SharedPlace;
use crate::topic::{OriginId, Topic};

/// Topics of other nodes that are to end at a worker, and have not yet, when none is begun anew.
const MOST_PARTING: usize = 1024;

/// A topic that comes from a node.
pub(super) struct Receiving {
    origin: OriginId,
    start: Start,
    /// The writer's last wish.
    connection: u64,
    pub(super) room: Arc<Room>,
    /// As long as the sink lives.
    sink: Weak<()>,
}

impl Receiving {
    pub(super) fn start(&self) -> &Start {
        &self.start
    }
}

/// A sink that may still be at work, though its worker knows that it is to end.
pub(super) struct Parting {
    topic: Arc<Topic>,
    /// Its worker ends, too: whoever follows is another thread.
    is_elsewhere: bool,
    /// What comes after it is another topic of that node: this one's messages are no more.
    forget: Option<OriginId>,
    sink: Weak<()>,
}

impl Carrier {
    /// A letter of another node.
    pub(super) fn reads(&mut self, node: NodeIdentity, bytes: &[u8]) {
        match Letter::decode(bytes) {
            Ok(Letter::Provider(theirs)) => self.hears_of_provider(node, theirs),
            Ok(Letter::Terms { topic, terms }) => self.hears_of_terms(node, &topic, terms),
            Ok(Letter::Beginning { topic, begins }) => {
                self.hears_of_a_beginning(node, &topic, begins);
            }
            Ok(Letter::Published { topic, last }) => {
                self.hears_what_was_published(node, &topic, last);
            }
            Ok(Letter::Obituary { topic, publishers }) => {
                self.hears_of_the_dead(node, &topic, publishers);
            }
            Err(error) if self.may_log(Instant::now()) => {
                tracing::warn!(%error, %node, "a letter that cannot be read");
            }
            Err(_) => {}
        }
    }

    /// What a bridge has to say about a topic.
    fn hears_of_terms(&mut self, node: NodeIdentity, topic: &str, terms: Terms) {
        let is_understood = self.understands(node);
        let facts = self.facts(topic).cloned();
        if let Terms::Wish { connection, facts: theirs, .. } = &terms
            && !facts.as_ref().is_some_and(|facts| {
                is_understood && self.receive(node, facts, (theirs.number, *connection))
            })
        {
            // Who wishes must not wait for nothing; it knows best whether to ask again.
            return self.asks_to_begin_again(node, topic, *connection);
        }
        if !is_understood && matches!(terms, Terms::Offer { .. }) {
            return;
        }
        let Some(number) = facts.map(|facts| facts.topic.number()) else { return };
        // One that is lost is asked for again, when it was waited for long enough.
        self.tell(number, |worker| worker.tell(Command::Letter(key(number), node, terms)));
    }

    /// The connection of a writer's wish is none, or not any more.
    fn asks_to_begin_again(&self, node: NodeIdentity, topic: &str, connection: u64) {
        let reason = "it does not receive the topic now".to_owned();
        let (topic, terms) = (topic.to_owned(), Terms::Again { connection, reason });
        self.write(node, &Letter::Terms { topic, terms });
    }

    /// Receives a topic from a node, if anybody here subscribes.
    fn receive(
        &mut self,
        node: NodeIdentity,
        facts: &Facts,
        (theirs, connection): (u64, u64),
    ) -> bool {
        let topic = &facts.topic;
        let number = topic.number();
        // One thread at a time delivers to a topic.
        let is_at_work = |it: &Parting| it.is_elsewhere && it.topic.number() == number;
        if self.parting.iter().any(|it| is_at_work(it) && it.sink.strong_count() > 0) {
            return false;
        }
        let origin = OriginId { node: node.0, topic: theirs };
        if let Some(known) = self.receiving.get_mut(&(number, node)) {
            if known.origin == origin {
                known.connection = connection;
                return true;
            }
            // A worker that hangs in its provider ends nothing, and a node can ask without end.
            if self.parting.len() >= MOST_PARTING {
                return false;
            }
            self.part(number, node, true);
        }
        let Some(workers) = self.workers.as_mut().filter(|_| facts.subscribes) else {
            return false;
        };
        let device = match topic.settings().place {
            SharedPlace::Host => None,
            SharedPlace::Device(_) => facts.arrivals.device().cloned(),
        };
        let room = Arc::new(Room::new());
        let pool = &facts.arrivals;
        let begins = self.beginnings.remove(&(number, node));
        let begins = begins.filter(|begins| begins.topic == theirs);
        let start = Start::new(begins, topic.arrivals().position());
        let (sink, alive) = {
            let alive = Arc::new(());
            let weak = Arc::downgrade(&alive);
            let household = &self.household;
            let start = start.clone();
            (TopicSink::new(household, (topic, pool), origin, start, &room, alive), weak)
        };
        let from = topic.delivered(&origin).map_or(0, |last| last + 1);
        workers.place(key(number), topic.settings().largest);
        let worker = workers.of(key(number));
        match worker.receive_topic(key(number), node, from, device, Box::new(sink)) {
            Ok(()) => {
                let sink = alive;
                let receiving = Receiving { origin, start, connection, room, sink };
                self.receiving.insert((number, node), receiving);
                true
            }
            Err(error) => {
                tracing::error!(%error, "the messages of a node's topic cannot be received");
                false
            }
        }
    }

    /// Does this one receive a topic of a node, by its number there?
    pub(super) fn is_receiving(&self, number: u32, node: NodeIdentity, theirs: u64) -> bool {
        self.receiving_of(number, node, theirs).is_some()
    }

    pub(super) fn receiving_of(
        &self,
        number: u32,
        node: NodeIdentity,
        theirs: u64,
    ) -> Option<&Receiving> {
        let known = self.receiving.get(&(number, node));
        known.filter(|known| known.origin.topic == theirs)
    }

    pub(super) fn stop_receiving(&mut self, number: u32, node: NodeIdentity) {
        self.part(number, node, false);
    }

    /// Nothing more comes of topics that nobody here subscribes to. What their nodes publish until
    /// somebody does again is no gap for that one: it gets a sink of its own.
    pub(super) fn stop_receiving_unwanted(&mut self) {
        let is_wanted = |line: &Line| !line.is_gone && line.facts.subscribes;
        let wanted = |number: &u32| self.lines.get(number).is_some_and(is_wanted);
        self.beginnings.retain(|(number, _), _| wanted(number));
        let all = self.receiving.iter().filter(|((number, _), _)| !wanted(number));
        let all = all.map(|((number, node), known)| (*number, *node, known.connection));
        for (number, node, connection) in all.collect::<Vec<_>>() {
            // It may hear too late that nobody does, or not at all, if somebody does again.
            if let Some(line) = self.lines.get(&number) {
                self.asks_to_begin_again(node, line.facts.topic.name(), connection);
            }
            self.stop_receiving(number, node);
        }
    }

    /// Ends what comes from a node of a topic.
    fn part(&mut self, number: u32, node: NodeIdentity, forgets: bool) {
        let Some(Receiving { origin, sink, .. }) = self.receiving.remove(&(number, node)) else {
            return;
        };
        self.tell(number, |worker| worker.tell(Command::StopReceiving(key(number), node)));
        if let Some(line) = self.lines.get(&number) {
            let topic = Arc::clone(&line.facts.topic);
            let forget = forgets.then_some(origin);
            self.parting.push(Parting { topic, is_elsewhere: false, forget, sink });
        }
    }

    /// The workers are gone, or will be soon: those that write to them are told to begin again.
    pub(super) fn stop_receiving_all(&mut self) {
        for ((number, node), known) in std::mem::take(&mut self.receiving) {
            let Some(line) = self.lines.get(&number) else { continue };
            let topic = Arc::clone(&line.facts.topic);
            self.asks_to_begin_again(node, topic.name(), known.connection);
            let sink = known.sink;
            self.parting.push(Parting { topic, is_elsewhere: true, forget: None, sink });
        }
        self.parting.iter_mut().for_each(|parting| parting.is_elsewhere = true);
    }

    /// What has ended is cleaned up after.
    pub(super) fn see_to_receiving(&mut self) {
        self.parting.retain(|parting| {
            let is_at_work = parting.sink.strong_count() > 0;
            if let Some(origin) = parting.forget.filter(|_| !is_at_work) {
                parting.topic.forget_origin(&origin);
            }
            is_at_work
        });
    }
}
