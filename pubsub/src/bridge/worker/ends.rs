//! Ends: of a connection, of a topic, of the worker; and what has to be waited for then.

use std::mem;
use std::time::{Duration, Instant};

use super::NodeIdentity;
use super::engine::{Engine, SHORT};
use super::reports::Report;
use super::topics::{Name, Task};
use crate::bridge::Side;
use crate::error::Error;

/// How long a worker that ends waits for what is under way.
const FAREWELL: Duration = Duration::from_secs(2);

impl Engine {
    /// The connection to a node is over: with a reason that is reported, if it was not wished for.
    pub(super) fn lose_link(&mut self, place: usize, node: NodeIdentity, reason: Option<Error>) {
        let Some(topic) = self.outs.get(place) else { return };
        topic.outbound.disconnect(node, &mut self.deck);
        if topic.links.remove(&node).is_none() {
            return;
        }
        let (key, side) = (topic.key, Side::Writer);
        if let Some(reason) = reason {
            self.reports.tell(Report::Lost { key, node, side, reason });
        }
        self.forget_closed();
        // A ring may still be on its way out.
        self.heat(Task::Out(place));
    }

    /// Rings that are gone are nobody's.
    pub(super) fn forget_closed(&mut self) {
        for ring in self.deck.closed.drain(..) {
            self.senders.remove(&ring);
        }
    }

    pub(super) fn stop_sending(&mut self, place: usize) {
        let Some(topic) = self.outs.get(place) else { return };
        let nodes: Vec<_> = topic.links.keys().copied().collect();
        for node in nodes {
            self.lose_link(place, node, None);
        }
        let Some(mut topic) = self.outs.take(place) else { return };
        topic.outbound.close(&mut self.deck);
        self.names.remove(&Name::Out(topic.key));
        self.hot.retain(|task| *task != Task::Out(place));
        let is_silent = topic.outbound.is_silent(self.now, &mut self.deck);
        self.forget_closed();
        if !is_silent {
            // What is on its way is written from memory of the source's.
            self.leaving.push(*topic);
        }
    }

    pub(super) fn stop_receiving(&mut self, place: usize, says_so: bool) {
        if says_so {
            self.say_again(place, "the reader cannot go on");
        }
        self.close_tap(place, false);
        let Some(mut topic) = self.ins.take(place) else { return };
        self.names.remove(&Name::In(topic.key, topic.origin));
        self.hot.retain(|task| *task != Task::In(place));
        self.untold.retain(|one| *one != place);
        topic.inbound.disconnect();
        if !topic.drain(&mut self.deck) {
            // What is being copied is copied into memory of the sink's.
            self.coming.push(*topic);
        }
    }

    /// Lets go of topics of which nothing is under way any more.
    pub(super) fn let_go(&mut self) {
        let (now, deck) = (self.now, &mut self.deck);
        self.leaving.retain_mut(|topic| !topic.outbound.is_silent(now, deck));
        self.coming.retain_mut(|topic| !topic.drain(deck));
        self.forget_closed();
    }

    /// Waits until nothing is under way, but not for ever.
    fn finish(&mut self) {
        let end = Instant::now() + FAREWELL;
        self.let_go();
        while !(self.leaving.is_empty() && self.coming.is_empty()) && Instant::now() < end {
            let turn = self.deck.port.rest(SHORT);
            self.turned(turn);
            self.look_at_clocks();
            self.let_go();
        }
        // A device that hangs may go on for all that is known: then its memory stays.
        mem::take(&mut self.coming).into_iter().for_each(mem::forget);
    }

    /// Closes the endpoint.
    pub(super) fn close(mut self) {
        for place in 0..self.outs.len() {
            self.stop_sending(place);
        }
        for place in 0..self.ins.len() {
            self.stop_receiving(place, false);
        }
        self.finish();
        if let Err(error) = self.deck.close() {
            tracing::warn!(%error, "a bridge's endpoint was not closed");
        }
    }
}
