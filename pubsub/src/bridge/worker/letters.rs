//! Connections: what is wished for, offered, answered and lost.

use fabric::Address;
use fabric::ring::RingOptions;
use ipc::{Layout, Segment};

use super::checks::Movement;
use super::engine::Engine;
use super::topics::{Link, Name, Tap, Task, Wish};
use super::{NodeIdentity, Report, SMALLEST, TopicFacts, TopicKey};
use crate::bridge::LONGEST_PREFIX;
use crate::bridge::Side;
use crate::bridge::bytes::Body;
use crate::bridge::deck::STRIPED;
use crate::bridge::terms::{LONGEST_REASON, MOST_LANES, Terms, addresses_that_fit};
use crate::error::{Error, ErrorKind, Result};
use crate::text::shortened;

const CONNECT: &str = "connect a topic to a node";
const RING: Layout = Layout::new("bridge ring", 1);

impl Engine {
    fn say(&mut self, key: TopicKey, node: NodeIdentity, terms: Terms) {
        self.reports.tell(Report::Letter { key, node, terms });
    }

    fn fail(&mut self, key: TopicKey, node: NodeIdentity, side: Side, error: Error) {
        self.reports.tell(Report::Failed { key, node: Some(node), side, error });
    }

    /// The peer at an address, which is a node's.
    fn meet(&mut self, node: NodeIdentity, address: Vec<u8>) -> Result<fabric::Peer> {
        self.renewal.faults.note_address(node, &address);
        if let Some(peer) = self.peers.get(&address) {
            return Ok(*peer);
        }
        self.renewal.has_place(self.peers.len())?;
        let address = Address(address);
        let peer = self.addresses.insert(&address).map_err(of_fabric)?;
        self.peers.insert(address.0, peer);
        Ok(peer)
    }

    /// A node wants a topic: a ring is wished for, unless there is one.
    pub(super) fn add(&mut self, key: TopicKey, node: NodeIdentity) {
        let Some(place) = self.names.get(&Name::Out(key)).copied() else {
            // It failed, and that was reported.
            tracing::trace!(?key, %node, "a node wants a topic that is not sent any more");
            return;
        };
        let (connection, from, since) =
            (self.connections + 1, self.address.clone(), self.now.steady);
        let Some(topic) = self.outs.get(place) else { return };
        topic.outbound.add(node);
        if topic.links.get(&node).is_some_and(|link| link.wished.is_none()) {
            return;
        }
        if !self.deck.port.has_room() {
            // A ring that is made and not taken would have to be kept at the reader.
            let detail = "no more rings can be written through the endpoint";
            let reason = Error::new(CONNECT, ErrorKind::TooMany, detail).on(node);
            self.note_room(Some(&reason));
            self.reports.tell(Report::Lost { key, node, side: Side::Writer, reason });
            return;
        }
        topic
            .links
            .insert(node, Link { connection, wished: Some(since), movement: Movement::default() });
        let facts = topic.facts;
        self.connections = connection;
        let further = self.further_lanes(self.lanes_of(&facts).into());
        self.say(key, node, Terms::Wish { connection, facts, from, further });
    }

    /// Where the lanes can be reached, of so many, but for the first.
    fn further_lanes(&self, lanes: usize) -> Vec<Vec<u8>> {
        let addresses = self.deck.port.lane_addresses().into_iter();
        let further = addresses.take(lanes.saturating_sub(1)).map(|address| address.0).collect();
        addresses_that_fit(&self.address, further)
    }

    /// By how many lanes messages of such a topic could go.
    fn lanes_of(&self, facts: &TopicFacts) -> u8 {
        let lanes = u8::try_from(self.deck.port.lanes()).unwrap_or(MOST_LANES).min(MOST_LANES);
        if facts.largest < STRIPED { 1 } else { lanes }
    }

    pub(super) fn read_letter(&mut self, key: TopicKey, node: NodeIdentity, terms: Terms) {
        let name = match terms.side() {
            Side::Writer => Name::In(key, node),
            Side::Reader => Name::Out(key),
        };
        let Some(place) = self.names.get(&name).copied() else {
            return self.answer_without(key, node, &terms);
        };
        match terms {
            Terms::Wish { connection, facts, from, further } => {
                let old = self.ins.get(place).and_then(|topic| topic.tap.as_ref());
                let is_gone = old.is_some_and(|tap| tap.wish.from != from);
                self.close_tap(place, is_gone);
                if let Some(topic) = self.ins.get(place) {
                    topic.wish = Some(Wish { connection, facts, from, further });
                }
                self.heat(Task::In(place));
            }
            Terms::Answer { connection, answer } => {
                let Some(topic) = self.ins.get(place) else { return };
                let Some(tap) = &topic.tap else { return };
                if tap.wish.connection != connection || tap.is_connected {
                    return;
                }
                let (ring, from) = (tap.ring, tap.wish.from.clone());
                let connected = self.meet(node, from).and_then(|peer| {
                    let connected = self.deck.port.connect(ring, peer, &answer);
                    connected.map_err(|error| Error::of(CONNECT, error))
                });
                match connected {
                    Ok(()) => {
                        if let Some(tap) = self.ins.get(place).and_then(|t| t.tap.as_mut()) {
                            tap.is_connected = true;
                        }
                        let side = Side::Reader;
                        self.reports.tell(Report::Connected { key, node, side });
                        self.heat(Task::In(place));
                    }
                    Err(error) => self.lose_tap(place, error),
                }
            }
            Terms::Check { connection, chunks, read } => {
                self.hear_check(place, connection, (chunks, read));
            }
            Terms::Offer { connection, ring, position, from, further } => {
                let Some(topic) = self.outs.get(place) else { return };
                let is_wished =
                    |link: &Link| link.connection == connection && link.wished.is_some();
                if !topic.links.get(&node).is_some_and(is_wished) {
                    return;
                }
                if let Err(error) =
                    self.accept(place, node, (connection, position), &ring, (from, further))
                {
                    self.lose_link(place, node, Some(error));
                }
            }
            Terms::Refused { connection, reason } => {
                if self.is_of(place, node, connection) {
                    self.lose_link(place, node, None);
                    let error = Error::new(CONNECT, ErrorKind::Denied, reason).on(node);
                    self.fail(key, node, Side::Writer, error);
                }
            }
            Terms::Again { connection, reason } => {
                if self.is_of(place, node, connection) {
                    let reason = Error::new(CONNECT, ErrorKind::Closed, reason).on(node);
                    self.lose_link(place, node, Some(reason));
                }
            }
        }
    }

    /// A letter about a topic that is not here, or not any more: what was under way when it went is
    /// of no interest. Who wishes for a ring is told to ask again, so that it does not wait.
    fn answer_without(&mut self, key: TopicKey, node: NodeIdentity, terms: &Terms) {
        tracing::trace!(?key, %node, ?terms, "a letter about a topic that is not here");
        if let Terms::Wish { connection, .. } = terms {
            let reason = "it does not receive the topic now".to_owned();
            self.say(key, node, Terms::Again { connection: *connection, reason });
        }
    }

    /// Is it the connection that there is to a node?
    fn is_of(&mut self, place: usize, node: NodeIdentity, connection: u64) -> bool {
        let link = self.outs.get(place).and_then(|topic| topic.links.get(&node));
        link.is_some_and(|link| link.connection == connection)
    }

    /// Takes a ring that was offered.
    fn accept(
        &mut self,
        place: usize,
        node: NodeIdentity,
        (connection, position): (u64, u64),
        offer: &fabric::ring::RingOffer,
        (from, further): (Vec<u8>, Vec<Vec<u8>>),
    ) -> Result<()> {
        if offer.capacity < SMALLEST / 2 {
            let detail = format!("a ring of {} bytes", offer.capacity);
            return Err(Error::new(CONNECT, ErrorKind::Malformed, detail));
        }
        let peer = self.meet(node, from)?;
        let longest = self.options.chunk.min(offer.capacity / 4).max(4 * LONGEST_PREFIX as u64);
        let further: Vec<_> = further.into_iter().map(Address).collect();
        let accepted = self.deck.port.accept_by(peer, &further, offer, longest).map_err(of_fabric);
        self.note_room(accepted.as_ref().err());
        let (ring, answer) = accepted?;
        let Some(topic) = self.outs.get(place) else { return Ok(()) };
        topic.links.insert(node, Link { connection, wished: None, movement: Movement::default() });
        topic.outbound.connect(node, ring, position, &mut self.deck);
        let key = topic.key;
        self.senders.insert(ring, place);
        self.say(key, node, Terms::Answer { connection, answer });
        self.reports.tell(Report::Connected { key, node, side: Side::Writer });
        self.heat(Task::Out(place));
        Ok(())
    }

    /// Makes a ring for a topic whose writer wishes for one.
    pub(super) fn make_offer(&mut self, place: usize) {
        let (from, largest_ring) = (self.address.clone(), self.largest_ring());
        let Some(topic) = self.ins.get(place) else { return };
        let (key, node) = (topic.key, topic.origin);
        if !self.renewal.allows(node, largest_ring) {
            // It waits until there is a new endpoint.
            return;
        }
        let Some(wish) = topic.wish.take() else { return };
        let connection = wish.connection;
        topic.inbound.set_largest(wish.facts.largest);
        let position = topic.inbound.expected();
        let made = self.make_tap(place, wish);
        self.note_room(made.as_ref().err());
        match made {
            Ok(ring) => {
                let further = self.further_lanes(ring.lanes.len());
                self.say(key, node, Terms::Offer { connection, ring, position, from, further });
            }
            Err(reason) if reason.kind() == ErrorKind::TooMany => {
                // There may be room later: its writer wishes again, ever less often.
                let detail = shortened(&reason.to_string(), LONGEST_REASON).to_owned();
                self.say(key, node, Terms::Again { connection, reason: detail });
                self.reports.tell(Report::Lost { key, node, side: Side::Reader, reason });
            }
            Err(error) => {
                let reason = shortened(&error.to_string(), LONGEST_REASON).to_owned();
                self.say(key, node, Terms::Refused { connection, reason });
                self.fail(key, node, Side::Reader, error);
            }
        }
    }

    fn make_tap(&mut self, place: usize, wish: Wish) -> Result<fabric::ring::RingOffer> {
        let since = self.now.steady;
        let lanes = usize::from(self.lanes_of(&wish.facts)).min(1 + wish.further.len());
        // No more than can be told.
        let lanes = 1 + self.further_lanes(lanes).len();
        let Some(node) = self.ins.get(place).map(|topic| topic.origin) else {
            return Err(unknown());
        };
        // Before the writer knows of the ring.
        self.meet(node, wish.from.clone())?;
        let further: Vec<_> = wish.further.iter().take(lanes - 1).cloned().map(Address).collect();
        self.deck.port.insert_lane_addresses(&further).map_err(of_fabric)?;
        let capacity = self.options.ring_by(lanes, wish.facts.largest, wish.facts.depth);
        let Some(topic) = self.ins.get(place) else { return Err(unknown()) };
        let options = RingOptions::new(self.deck.port.endpoint(), capacity).map_err(of_fabric)?;
        let (ring, pinned) = match &topic.device {
            None => {
                let memory = fabric::HostMemory::zeroed(capacity as usize).map_err(of_fabric)?;
                let ring = self.deck.port.offer_by(&options, lanes, memory);
                (ring.map_err(of_fabric)?, None)
            }
            Some(device) => {
                let segment = Segment::create(RING, capacity as usize);
                let segment = segment.map_err(|error| Error::of(CONNECT, error))?;
                segment.mark_ready();
                let pinned = transfer::pin(&segment, device);
                let pinned = pinned.map_err(|error| Error::of(CONNECT, error))?;
                let ring = self.deck.port.offer_by(&options, lanes, Body(segment));
                (ring.map_err(of_fabric)?, Some(pinned))
            }
        };
        let offer = match self.deck.port.terms(ring) {
            Ok(offer) => offer,
            Err(error) => {
                self.deck.port.forget(ring);
                return Err(of_fabric(error));
            }
        };
        self.receivers.insert(ring, place);
        topic.tap = Some(Tap { ring, pinned, wish, since, is_connected: false, difference: None });
        Ok(offer)
    }

    /// A ring is of no use any more, and why.
    pub(super) fn lose_tap(&mut self, place: usize, reason: Error) {
        if reason.kind() != ErrorKind::Closed {
            self.say_again(place, &reason.to_string());
        }
        self.close_tap(place, false);
        if let Some(topic) = self.ins.get(place) {
            let (key, node, side) = (topic.key, topic.origin, Side::Reader);
            self.reports.tell(Report::Lost { key, node, side, reason });
        }
        self.heat(Task::In(place));
    }

    /// Tells the writer that its ring is of no use any more.
    pub(super) fn say_again(&mut self, place: usize, reason: &str) {
        let Some(topic) = self.ins.get(place) else { return };
        let Some(connection) = topic.tap.as_ref().map(|tap| tap.wish.connection) else { return };
        let (key, node, reason) =
            (topic.key, topic.origin, shortened(reason, LONGEST_REASON).to_owned());
        self.say(key, node, Terms::Again { connection, reason });
    }

    /// Closes a topic's ring. Of a writer that is gone, or has begun anew, no answer is waited for.
    pub(super) fn close_tap(&mut self, place: usize, is_gone: bool) {
        let Some(topic) = self.ins.get(place) else { return };
        topic.wish = None;
        let Some(tap) = topic.disconnect() else { return };
        let node = topic.origin;
        self.receivers.remove(&tap.ring);
        if is_gone {
            self.bury(node, |port| port.forget(tap.ring));
        } else {
            match self.bury(node, |port| port.close_receiver(tap.ring)) {
                Ok(_) => self.closing.push((tap.ring, node, self.now.steady)),
                Err(error) => tracing::debug!(%error, "a ring was not closed"),
            }
        }
        self.heat(Task::In(place));
    }

    /// All connections to a node are over.
    pub(super) fn lose_node(&mut self, node: NodeIdentity) {
        self.renewal.faults.forget_wish(node);
        for place in 0..self.outs.len() {
            if self.outs.get(place).is_some_and(|topic| topic.links.contains_key(&node)) {
                self.lose_link(place, node, Some(left(node)));
            }
        }
        for place in 0..self.ins.len() {
            let is_from = self.ins.get(place).is_some_and(|t| t.origin == node && t.tap.is_some());
            if is_from {
                self.close_tap(place, true);
                if let Some(topic) = self.ins.get(place) {
                    let (key, side, reason) = (topic.key, Side::Reader, left(node));
                    self.reports.tell(Report::Lost { key, node, side, reason });
                }
            }
        }
    }

    /// Who does not answer in time is not waited for any longer.
    pub(super) fn look_for_answers(&mut self, patience: u64) {
        let now = self.now.steady;
        let late = |node: NodeIdentity| {
            let detail = "it did not answer in time";
            Error::new(CONNECT, ErrorKind::DeadlineExceeded, detail).on(node)
        };
        for place in 0..self.outs.len() {
            let Some(topic) = self.outs.get(place) else { continue };
            let is_late = |link: &Link| link.wished.is_some_and(|since| now - since > patience);
            let nodes = topic.links.iter().filter(|(_, link)| is_late(link)).map(|(node, _)| *node);
            for node in nodes.collect::<Vec<_>>() {
                self.lose_link(place, node, Some(late(node)));
            }
        }
        for place in 0..self.ins.len() {
            let Some(topic) = self.ins.get(place) else { continue };
            let is_late = topic
                .tap
                .as_ref()
                .is_some_and(|tap| !tap.is_connected && now - tap.since > patience);
            if is_late {
                let origin = topic.origin;
                self.lose_tap(place, late(origin));
            }
        }
    }
}

/// There may be room later: that is told from all else.
#[cold]
fn of_fabric(error: fabric::Error) -> Error {
    let kind = match error.kind() {
        fabric::ErrorKind::ResourceExhausted => ErrorKind::TooMany,
        _ => ErrorKind::Failed,
    };
    Error::because(CONNECT, kind, error)
}

#[cold]
fn unknown() -> Error {
    Error::new(CONNECT, ErrorKind::Unknown, "the worker does not have it")
}

#[cold]
fn left(node: NodeIdentity) -> Error {
    Error::new(CONNECT, ErrorKind::Closed, "the node is gone").on(node)
}
