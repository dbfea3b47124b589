//! All peers of an agent.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::deferred::DeferredOperation;
use super::operations::{OperationContext, Operations};
use super::peer::Peer;
use crate::error::{Error, ErrorKind, Result};

/// How often peers are checked.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(super) struct Peers {
    /// By unique numbers.
    all: BTreeMap<u32, Peer>,
    next: u32,
    /// Number of deferred operations of all peers.
    deferred: usize,
    next_check: Instant,
}

impl Peers {
    pub(super) fn new() -> Self {
        Self { all: BTreeMap::new(), next: 0, deferred: 0, next_check: Instant::now() }
    }

    /// Adds a peer, and returns its number.
    pub(super) fn add(&mut self, peer: Peer) -> u32 {
        let number = self.next;
        self.next += 1;
        self.all.insert(number, peer);
        number
    }

    pub(super) fn find(&self, number: u32) -> Option<&Peer> {
        self.all.get(&number)
    }

    pub(super) fn find_mut(&mut self, number: u32) -> Option<&mut Peer> {
        self.all.get_mut(&number)
    }

    pub(super) fn get(&mut self, number: u32, operation: &'static str) -> Result<&mut Peer> {
        let unknown = || Error::new(operation, ErrorKind::Unknown, "unknown peer");
        self.all.get_mut(&number).ok_or_else(unknown)
    }

    pub(super) fn label(&self, number: u32) -> String {
        self.find(number).map_or_else(String::new, |peer| peer.label().to_owned())
    }

    pub(super) fn labels(&self) -> Vec<&str> {
        self.all.values().map(Peer::label).collect()
    }

    /// Completes a copy or its failure: sends its notice and records the outcome.
    pub(super) fn complete(
        &mut self,
        context: OperationContext,
        outcome: Result<()>,
        operations: &mut Operations,
    ) {
        let Some(peer) = self.all.get_mut(&context.peer) else {
            let disconnected =
                Error::new("notify a peer", ErrorKind::Closed, "the peer was disconnected");
            return operations.finish(context.token, outcome.and(Err(disconnected)));
        };
        peer.complete(context, outcome, operations);
    }

    /// As [`complete`](Self::complete), for an operation by rails: it ends by itself if the peer was
    /// disconnected.
    pub(super) fn complete_remote(
        &mut self,
        context: OperationContext,
        outcome: Result<()>,
        operations: &mut Operations,
    ) {
        match self.all.get_mut(&context.peer) {
            Some(peer) => peer.complete(context, outcome, operations),
            None => operations.finish(context.token, outcome),
        }
    }

    pub(super) fn defer(&mut self, operation: DeferredOperation) {
        if let Some(peer) = self.all.get_mut(&operation.context.peer) {
            peer.defer(operation);
            self.deferred += 1;
        }
    }

    /// A deferred operation that is ready, and the failure it depends on, if any.
    pub(super) fn take_deferred(&mut self) -> Option<(DeferredOperation, Option<String>)> {
        if self.deferred == 0 {
            return None;
        }
        let next = self.all.values_mut().find_map(Peer::take_deferred)?;
        self.deferred -= 1;
        Some(next)
    }

    /// Sends notices that found the queue full.
    pub(super) fn send_notices(&mut self, operations: &mut Operations) {
        self.all.values_mut().for_each(|peer| peer.send_notices(operations));
    }

    /// From time to time checks whether the peers are alive, and fails notices that cannot be sent.
    /// False if it is not time yet.
    pub(super) fn check_alive(&mut self, operations: &mut Operations) -> bool {
        if Instant::now() < self.next_check {
            return false;
        }
        self.next_check = Instant::now() + CHECK_INTERVAL;
        self.all.values_mut().for_each(|peer| {
            peer.refresh();
            peer.send_notices(operations);
        });
        true
    }

    /// Removes a peer, and returns its operations that do not complete.
    pub(super) fn disconnect(&mut self, number: u32, is_settled: bool) -> Vec<OperationContext> {
        let Some(peer) = self.all.remove(&number) else { return Vec::new() };
        let (deferred, cancelled) = peer.disconnect(is_settled);
        self.deferred -= deferred;
        cancelled
    }

    /// Removes all peers. Copies with the unsettled ones may still run.
    pub(super) fn close(&mut self, unsettled: &BTreeSet<u32>) {
        for (number, peer) in &mut self.all {
            peer.close(!unsettled.contains(number));
        }
        self.all.clear();
    }
}
