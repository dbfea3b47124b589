//! Going on with what was begun, and waiting for it.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use ipc::Spin;

use super::deferred::DeferredOperation;
use super::lane::Ticket;
use super::operations::{Done, Token};
use super::peer::Peer;
use super::{Agent, REST};
use crate::error::{Error, ErrorKind, Result};
use crate::path::Path;

/// How long an agent that ends, or leaves a peer, waits for copies that devices have begun: for all of
/// them together.
pub(super) const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);
/// How often the life of peers is looked at.
const LOOK: Duration = Duration::from_millis(50);

impl Agent {
    pub(super) fn peer(&mut self, number: u32, operation: &'static str) -> Result<&mut Peer> {
        let unknown = || Error::new(operation, ErrorKind::Unknown, "no such peer");
        self.peers.get_mut(&number).ok_or_else(unknown)
    }

    pub(super) fn label(&self, peer: u32) -> String {
        self.peers.get(&peer).map_or_else(String::new, |peer| peer.card.label.clone())
    }

    /// The data of a transfer is there, or it failed: tells all who are to know.
    pub(super) fn complete(&mut self, ticket: Ticket, outcome: Result<()>) {
        let Some(peer) = self.peers.get_mut(&ticket.peer) else {
            let gone = Error::new("tell a peer", ErrorKind::Closed, "the peer was left");
            return self.operations.finish(ticket.token, outcome.and(Err(gone)));
        };
        if let Some(visit) = &mut peer.visit {
            visit.guest.end(ticket.number);
        }
        match outcome {
            Ok(()) if ticket.notice.is_some() => {
                peer.unsent.push_back(ticket);
                peer.send_notices(&mut self.operations);
            }
            outcome => {
                let outcome = outcome.map_err(|error| error.with(&peer.card.label));
                peer.finish(&ticket, outcome, &mut self.operations);
            }
        }
    }

    /// Goes on with everything that is under way, without waiting. False if nothing moved.
    pub fn progress(&mut self) -> bool {
        let mut has_moved = self.hear();
        let mut done = std::mem::take(&mut self.done);
        for lane in self.lanes.values_mut() {
            has_moved |= lane.progress(|ticket, outcome| done.push((ticket, outcome)));
        }
        for (ticket, outcome) in done.drain(..) {
            self.complete(ticket, outcome);
        }
        self.done = done;
        if let Some(mut chore) = self.chores.pop_front() {
            has_moved = true;
            match chore.go_on() {
                Ok(false) => self.chores.push_front(chore),
                outcome => {
                    self.lists.keep(chore.blocks);
                    self.complete(chore.ticket, outcome.map(drop));
                }
            }
        }
        for peer in self.peers.values_mut().filter(|peer| !peer.unsent.is_empty()) {
            peer.send_notices(&mut self.operations);
        }
        has_moved |= self.start_deferred();
        if Instant::now() >= self.next_look {
            self.next_look = Instant::now() + LOOK;
            self.peers.values_mut().for_each(|peer| peer.look_after(&mut self.operations));
            self.see_visitors();
        }
        has_moved
    }

    /// Is anything under way with a peer?
    pub(super) fn is_busy_with(&self, peer: u32) -> bool {
        self.lanes.iter().any(|((of, ..), lane)| *of == peer && !lane.is_idle())
            || self.chores.iter().any(|chore| chore.ticket.peer == peer)
            || self.far.is_busy_with(peer)
            || self
                .peers
                .get(&peer)
                .is_some_and(|it| !(it.unsent.is_empty() && it.deferred.is_empty()))
    }

    /// Waits until devices have done what was begun with any peer, at most until `end`; nothing more is
    /// begun. Gives the peers with which a device may still be copying.
    pub(super) fn close_lanes(&mut self, end: Instant) -> BTreeSet<u32> {
        let closed = self.lanes.drain().map(|((peer, ..), lane)| (peer, lane.close(end).1));
        closed.filter_map(|(peer, is_done)| (!is_done).then_some(peer)).collect()
    }

    /// Gives up everything that is under way with a peer. Copies that a device has begun are waited
    /// for, at most until `end`.
    pub(super) fn drop_peer(&mut self, number: u32, end: Instant, error: impl Fn() -> Error) {
        let (mut given_up, mut is_settled) = (Vec::new(), true);
        for (_, lane) in self.lanes.extract_if(|(of, ..), _| *of == number) {
            let (tickets, is_done) = lane.close(end);
            given_up.extend(tickets);
            is_settled &= is_done;
        }
        self.chores.retain_mut(|chore| {
            chore.ticket.peer != number || {
                given_up.push(chore.ticket.clone());
                false
            }
        });
        // Last: when it is gone, the peer takes all copies for done, if they are.
        if let Some(mut peer) = self.peers.remove(&number) {
            // What rails had under way with it they tell of by and by.
            self.far.leave(&peer.links);
            if let Some(visit) = peer.visit.as_mut().filter(|_| is_settled) {
                visit.guest.settle();
            }
            given_up.extend(std::mem::take(&mut peer.unsent));
            self.deferred -= peer.deferred.len();
            let deferred = std::mem::take(&mut peer.deferred).into_iter();
            given_up.extend(deferred.map(DeferredOperation::into_ticket));
        }
        for ticket in given_up {
            self.operations.finish(ticket.token, Err(error()));
        }
    }

    /// What became of an operation, without waiting: None while it is under way. An outcome
    /// is given once.
    pub fn test(&mut self, token: Token) -> Option<Result<Done>> {
        self.progress();
        self.operations.collect(token)
    }

    /// Waits for an operation. An outcome is given once.
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded): it goes on, may be waited for
    /// again, and its memory is kept until it is done. Or how it failed.
    pub fn wait(&mut self, token: Token, patience: Duration) -> Result<Done> {
        let end = ipc::deadline(patience);
        loop {
            if let Some(outcome) = self.test(token) {
                return outcome;
            }
            let now = Instant::now();
            if now >= end {
                return Err(self.too_late(token, patience));
            }
            self.rest(end - now);
        }
    }

    /// Nobody will ask after the operation any more; it goes on all the same.
    pub fn forget(&mut self, token: Token) {
        self.operations.forget(token);
    }

    /// Operations that are under way.
    #[must_use]
    pub fn under_way(&self) -> usize {
        self.operations.under_way
    }

    fn too_late(&self, token: Token, patience: Duration) -> Error {
        let Some(begun) = self.operations.begun(token) else {
            return Error::new("wait", ErrorKind::Unknown, "no such operation");
        };
        let path = begun.path.map_or("no path", Path::name);
        let unsent = self.peers.get(&begun.peer).map(|peer| &peer.unsent);
        let has_data = unsent.into_iter().flatten().any(|ticket| ticket.token == token);
        let (done, stage) = if has_data { (begun.bytes, "notice") } else { (0, "copy") };
        let detail = format!(
            "by {path}, in the stage {stage}: {done} of {} bytes known to be there after {patience:?}",
            begun.bytes
        );
        let error = Error::new(begun.operation, ErrorKind::DeadlineExceeded, detail);
        error.with(self.label(begun.peer))
    }

    /// Rests for as long as it is not worth looking.
    pub(super) fn rest(&mut self, longest: Duration) {
        /// Sleeps end late by about as much.
        const LATE: Duration = Duration::from_micros(80);
        if self.waiting == Spin::Always && !self.far.under_way.is_empty() {
            // What is waited for is done by a rail's thread, which may have no other core: it would
            // get this one only when the system takes it from who spins, milliseconds later.
            std::thread::yield_now();
            return;
        }
        if self.waiting == Spin::Always || !self.chores.is_empty() {
            std::hint::spin_loop();
            return;
        }
        let busy = self.lanes.values().filter(|lane| !lane.is_idle());
        let Some(expected) = busy.map(|lane| lane.expected).min() else {
            if !self.far.under_way.is_empty() {
                return self.rest_until_told(Instant::now() + longest);
            }
            // A notice that finds no room.
            return std::thread::sleep(REST.min(longest));
        };
        let now = Instant::now();
        if expected > now + 2 * LATE {
            std::thread::sleep((expected - now - LATE).min(longest));
        } else if now > expected + REST {
            // Slower than ever seen: no reason to burn a core.
            std::thread::sleep(LATE.min(longest));
        } else {
            std::hint::spin_loop();
        }
    }
}

#[cfg(test)]
mod tests {
    use gpu::stand_in::{Behaviour, behave};
    use gpu::{Block, Device};

    use super::*;
    use crate::path::Policy;
    use crate::{AgentOptions, Rights};

    const LENGTH: u64 = 2 << 20;
    const SECOND: Duration = Duration::from_secs(1);

    /// However many streams hang, and with how many peers; and those that do not hang are settled.
    #[test]
    fn streams_that_hang_have_one_deadline_together() {
        let _alone = crate::copies::tests::alone();
        let device = Device::open("stand-in:1".parse().unwrap()).unwrap();
        let memory = || device.allocate_shared(LENGTH, &[]).unwrap();
        let mut here = Agent::start(AgentOptions::new("here")).unwrap();
        let mine = here.register(memory(), Rights::ALL).unwrap();
        let mut others = Vec::new();
        for label in ["first", "second", "third", "fourth"] {
            let there = Agent::start(AgentOptions::new(label)).unwrap();
            let theirs = there.register(memory(), Rights::ALL).unwrap();
            let peer = here.connect(&there.card().encode().unwrap(), SECOND).unwrap();
            let descriptor = theirs.descriptor().encode().unwrap();
            let route = here.join(peer, &mine, &descriptor, &Policy::default(), SECOND).unwrap();
            others.push((there, theirs, peer, route));
        }
        let put = |here: &mut Agent, at: usize| {
            for length in [LENGTH, 4096] {
                let block = [Block { to: 0, from: 0, length }];
                let token = here.put(&others[at].3, &block, None).unwrap();
                here.forget(token);
            }
        };
        put(&mut here, 3);
        here.flush(others[3].2, SECOND).unwrap();
        behave(1, Behaviour { delay: 20 * SECOND, ..Behaviour::default() });
        (0..3).for_each(|at| put(&mut here, at));
        let (start, timeout) = (Instant::now(), SECOND / 2);
        let left = || Error::new("leave a peer", ErrorKind::Closed, "it was left");
        here.drop_peer(others[0].2.0, start + timeout, left);
        assert!(start.elapsed() < 2 * timeout, "{:?}", start.elapsed());
        let start = Instant::now();
        let unsettled = here.close_lanes(start + timeout);
        assert!(start.elapsed() < 2 * timeout, "{:?}", start.elapsed());
        assert_eq!(unsettled, BTreeSet::from([others[1].2.0, others[2].2.0]));
    }
}
