//! The topics of a worker, each in a place of its own.

use std::collections::HashMap;

use fabric::ring::{ReceiverId, View};
use gpu::{Device, Memory};

use super::checks::{Difference, Movement};
use super::{NodeIdentity, TopicKey};
use crate::bridge::deck::{Arrived, Deck, Reading, Ticket};
use crate::bridge::inbound::{Broken, Inbound};
use crate::bridge::outbound::Outbound;
use crate::bridge::{Now, Place, Progress, Sink, Source, TopicFacts};

/// A topic of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Name {
    /// That it sends.
    Out(TopicKey),
    /// That it receives from a node.
    In(TopicKey, NodeIdentity),
}

/// A topic, by its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Task {
    Out(usize),
    In(usize),
}

/// Whether a topic is looked after all the time, and until when.
#[derive(Debug, Default)]
pub(super) struct Heat {
    pub(super) is_listed: bool,
    pub(super) until: u64,
    pub(super) progress: Progress,
}

/// How far a connection to a node is, at the writer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Link {
    pub(super) connection: u64,
    /// Since when a ring is wished for; None: messages flow.
    pub(super) wished: Option<u64>,
    pub(super) movement: Movement,
}

/// A topic that is sent.
pub(super) struct OutTopic {
    pub(super) key: TopicKey,
    pub(super) facts: TopicFacts,
    pub(super) source: Box<dyn Source>,
    pub(super) outbound: Outbound<Deck>,
    pub(super) links: HashMap<NodeIdentity, Link>,
    pub(super) heat: Heat,
}

/// What a writer wishes.
#[derive(Debug, Clone)]
pub(super) struct Wish {
    pub(super) connection: u64,
    pub(super) facts: TopicFacts,
    /// The address of its endpoint.
    pub(super) from: Vec<u8>,
    /// Those of its further lanes, by which it could write, too.
    pub(super) further: Vec<Vec<u8>>,
}

/// A ring that a topic is received by.
pub(super) struct Tap {
    pub(super) ring: ReceiverId,
    /// Its memory, as the device knows it.
    pub(super) pinned: Option<Memory>,
    pub(super) wish: Wish,
    pub(super) since: u64,
    pub(super) is_connected: bool,
    /// Between what the writer says and what is here.
    pub(super) difference: Option<Difference>,
}

/// A topic that is received from a node.
pub(super) struct InTopic {
    pub(super) key: TopicKey,
    pub(super) origin: NodeIdentity,
    pub(super) sink: Box<dyn Sink>,
    pub(super) device: Option<Device>,
    pub(super) inbound: Inbound<Arrived, Place, Ticket>,
    pub(super) tap: Option<Tap>,
    /// To be answered as soon as nothing of the last connection is under way.
    pub(super) wish: Option<Wish>,
    /// What copies of a ring that is gone may still read.
    pub(super) past: Option<Memory>,
    /// It released chunks of which the writer may not know.
    pub(super) is_untold: bool,
    /// How often it was of no use to begin anew since its connection moved nothing.
    pub(super) doublings: u32,
    pub(super) heat: Heat,
}

impl InTopic {
    pub(super) fn advance(&mut self, now: Now, deck: &mut Deck) -> Result<Progress, Broken> {
        let mut reading = Reading {
            port: &mut deck.port,
            into: &mut deck.into,
            porters: &mut deck.porters,
            ring: self.tap.as_ref().map(|tap| tap.ring),
            pinned: self.tap.as_ref().and_then(|tap| tap.pinned.as_ref()),
            has_taken: false,
        };
        let advanced = self.inbound.advance(now, &mut reading, &mut *self.sink);
        let has_taken = reading.has_taken;
        if self.inbound.is_drained() {
            self.past = None;
        }
        self.is_untold |= has_taken || matches!(&advanced, Ok(progress) if progress.has_moved);
        advanced
    }

    /// Goes on until nothing is being copied: true then.
    pub(super) fn drain(&mut self, deck: &mut Deck) -> bool {
        let Deck { port, into, porters, .. } = deck;
        let (ring, pinned) = (None, None);
        let mut reading = Reading { port, into, porters, ring, pinned, has_taken: false };
        self.inbound.drain(&mut reading, &mut *self.sink)
    }

    /// The ring is gone: gives it, to be closed.
    pub(super) fn disconnect(&mut self) -> Option<Tap> {
        let mut tap = self.tap.take()?;
        self.inbound.disconnect();
        self.past = tap.pinned.take();
        Some(tap)
    }
}

/// Things in places that are used again.
#[derive(Debug)]
pub(super) struct Places<T>(Vec<Option<Box<T>>>);

impl<T> Places<T> {
    pub(super) fn new() -> Self {
        Self(Vec::new())
    }

    pub(super) fn put(&mut self, thing: T) -> usize {
        let thing = Some(Box::new(thing));
        if let Some(place) = self.0.iter().position(Option::is_none) {
            self.0[place] = thing;
            return place;
        }
        self.0.push(thing);
        self.0.len() - 1
    }

    pub(super) fn take(&mut self, place: usize) -> Option<Box<T>> {
        self.0.get_mut(place)?.take()
    }

    pub(super) fn get(&mut self, place: usize) -> Option<&mut T> {
        self.0.get_mut(place)?.as_deref_mut()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.iter().flatten().map(|thing| &**thing)
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}

// A chunk that is held by a topic is a view into its ring; it may be dropped by any thread.
const _: fn() = || {
    fn is_send<T: Send>() {}
    is_send::<View>();
    is_send::<OutTopic>();
    is_send::<InTopic>();
};
