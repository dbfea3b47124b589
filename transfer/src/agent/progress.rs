//! Making progress, and waiting for operations.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use ipc::WaitStrategy;

use super::copy_queue::OperationContext;
use super::deferred::DeferredOperation;
use super::operations::{Done, Token};
use super::peer::Peer;
use super::{Agent, BUSY_PAUSE};
use crate::error::{Error, ErrorKind, Result};
use crate::path::Path;

/// How long closing an agent or disconnecting a peer waits for copies on devices: for all of them
/// together.
pub(super) const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);
/// How often peers are checked.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

impl Agent {
    pub(super) fn peer(&mut self, number: u32, operation: &'static str) -> Result<&mut Peer> {
        let unknown = || Error::new(operation, ErrorKind::Unknown, "unknown peer");
        self.peers.get_mut(&number).ok_or_else(unknown)
    }

    pub(super) fn label(&self, peer: u32) -> String {
        self.peers.get(&peer).map_or_else(String::new, |peer| peer.card.label.clone())
    }

    /// Completes a transfer or its failure: sends its notice and records the outcome.
    pub(super) fn complete(&mut self, context: OperationContext, outcome: Result<()>) {
        let Some(peer) = self.peers.get_mut(&context.peer) else {
            let disconnected =
                Error::new("notify a peer", ErrorKind::Closed, "the peer was disconnected");
            return self.operations.finish(context.token, outcome.and(Err(disconnected)));
        };
        if let Some(local_session) = &mut peer.local_session {
            local_session.segment.end(context.number);
        }
        match outcome {
            Ok(()) if context.notice.is_some() => {
                peer.unsent_notices.push_back(context);
                peer.send_notices(&mut self.operations);
            }
            outcome => {
                let outcome = outcome.map_err(|error| error.with(&peer.card.label));
                peer.finish(&context, outcome, &mut self.operations);
            }
        }
    }

    /// Makes progress with all operations, without waiting. False if nothing changed.
    pub fn progress(&mut self) -> bool {
        let mut has_moved = self.poll_rails();
        let mut done = std::mem::take(&mut self.done);
        for copy_queue in self.copy_queues.values_mut() {
            has_moved |= copy_queue.progress(|context, outcome| done.push((context, outcome)));
        }
        for (context, outcome) in done.drain(..) {
            self.complete(context, outcome);
        }
        self.done = done;
        if let Some(mut cpu_copy) = self.cpu_copies.pop_front() {
            has_moved = true;
            match cpu_copy.copy_some() {
                Ok(false) => self.cpu_copies.push_front(cpu_copy),
                outcome => {
                    self.block_lists.recycle(cpu_copy.blocks);
                    self.complete(cpu_copy.context, outcome.map(drop));
                }
            }
        }
        for peer in self.peers.values_mut().filter(|peer| !peer.unsent_notices.is_empty()) {
            peer.send_notices(&mut self.operations);
        }
        has_moved |= self.start_deferred();
        if Instant::now() >= self.next_check {
            self.next_check = Instant::now() + CHECK_INTERVAL;
            self.peers.values_mut().for_each(|peer| peer.check_alive(&mut self.operations));
            self.update_local_initiators();
        }
        has_moved
    }

    /// Are operations with a peer in flight?
    pub(super) fn is_busy_with(&self, peer: u32) -> bool {
        self.copy_queues.iter().any(|((of, ..), copy_queue)| *of == peer && !copy_queue.is_idle())
            || self.cpu_copies.iter().any(|cpu_copy| cpu_copy.context.peer == peer)
            || self.remote_transport.is_busy_with(peer)
            || self
                .peers
                .get(&peer)
                .is_some_and(|it| !(it.unsent_notices.is_empty() && it.deferred.is_empty()))
    }

    /// Waits until devices have completed all copies, at most until `end`; no new ones start.
    /// Returns the peers whose copies may still run.
    pub(super) fn close_copy_queues(&mut self, end: Instant) -> BTreeSet<u32> {
        let closed = self
            .copy_queues
            .drain()
            .map(|((peer, ..), copy_queue)| (peer, copy_queue.close(end).1));
        closed.filter_map(|(peer, is_done)| (!is_done).then_some(peer)).collect()
    }

    /// Cancels all operations with a peer. Waits for copies on devices, at most until `end`.
    pub(super) fn drop_peer(&mut self, number: u32, end: Instant, error: impl Fn() -> Error) {
        let (mut cancelled, mut is_settled) = (Vec::new(), true);
        for (_, copy_queue) in self.copy_queues.extract_if(|(of, ..), _| *of == number) {
            let (contexts, is_done) = copy_queue.close(end);
            cancelled.extend(contexts);
            is_settled &= is_done;
        }
        self.cpu_copies.retain_mut(|cpu_copy| {
            cpu_copy.context.peer != number || {
                cancelled.push(cpu_copy.context.clone());
                false
            }
        });
        // Last: if it is settled, the peer takes all copies for complete.
        if let Some(mut peer) = self.peers.remove(&number) {
            // Operations on rails end by later events.
            self.remote_transport.disconnect(&peer.links);
            if let Some(local_session) = peer.local_session.as_mut().filter(|_| is_settled) {
                local_session.segment.settle();
            }
            cancelled.extend(std::mem::take(&mut peer.unsent_notices));
            self.deferred -= peer.deferred.len();
            let deferred = std::mem::take(&mut peer.deferred).into_iter();
            cancelled.extend(deferred.map(DeferredOperation::into_context));
        }
        for context in cancelled {
            self.operations.finish(context.token, Err(error()));
        }
    }

    /// The outcome of an operation, without waiting: None while it is in flight. An outcome is
    /// returned once.
    pub fn test(&mut self, token: Token) -> Option<Result<Done>> {
        self.progress();
        self.operations.collect(token)
    }

    /// Waits for an operation. An outcome is returned once.
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded): it continues, can be waited for again,
    /// and keeps its memory until it completes. Or the error of the operation.
    pub fn wait(&mut self, token: Token, timeout: Duration) -> Result<Done> {
        let end = ipc::deadline(timeout);
        loop {
            if let Some(outcome) = self.test(token) {
                return outcome;
            }
            let now = Instant::now();
            if now >= end {
                return Err(self.timeout_error(token, timeout));
            }
            self.pause(end - now);
        }
    }

    /// Discards the outcome of an operation, which continues.
    pub fn forget(&mut self, token: Token) {
        self.operations.forget(token);
    }

    /// Number of operations in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.operations.in_flight
    }

    fn timeout_error(&self, token: Token, timeout: Duration) -> Error {
        let Some(begun) = self.operations.begun(token) else {
            return Error::new("wait", ErrorKind::Unknown, "no such operation");
        };
        let path = begun.path.map_or("no path", Path::name);
        let unsent_notices = self.peers.get(&begun.peer).map(|peer| &peer.unsent_notices);
        let has_data = unsent_notices.into_iter().flatten().any(|context| context.token == token);
        let (done, stage) = if has_data { (begun.bytes, "notice") } else { (0, "copy") };
        let detail = format!(
            "{done} of {} bytes completed by {path} after {timeout:?} (stage: {stage}). Wait again",
            begun.bytes
        );
        let error = Error::new(begun.operation, ErrorKind::DeadlineExceeded, detail);
        error.with(self.label(begun.peer))
    }

    /// Pauses as long as polling is not worthwhile.
    pub(super) fn pause(&mut self, longest: Duration) {
        /// A sleep takes about this much longer.
        const SLEEP_OVERSHOOT: Duration = Duration::from_micros(80);
        if self.wait_strategy == WaitStrategy::Busy && !self.remote_transport.in_flight.is_empty() {
            // The rail's thread may have no other core. It would get this one only when the system
            // preempts a spinning thread, milliseconds later.
            std::thread::yield_now();
            return;
        }
        if self.wait_strategy == WaitStrategy::Busy || !self.cpu_copies.is_empty() {
            std::hint::spin_loop();
            return;
        }
        let busy = self.copy_queues.values().filter(|copy_queue| !copy_queue.is_idle());
        let Some(expected) = busy.map(|copy_queue| copy_queue.expected).min() else {
            if !self.remote_transport.in_flight.is_empty() {
                return self.wait_for_rail_events(Instant::now() + longest);
            }
            // A notice found the queue full.
            return std::thread::sleep(BUSY_PAUSE.min(longest));
        };
        let now = Instant::now();
        if expected > now + 2 * SLEEP_OVERSHOOT {
            std::thread::sleep((expected - now - SLEEP_OVERSHOOT).min(longest));
        } else if now > expected + BUSY_PAUSE {
            // Slower than estimated: do not spin.
            std::thread::sleep(SLEEP_OVERSHOOT.min(longest));
        } else {
            std::hint::spin_loop();
        }
    }
}

#[cfg(test)]
mod tests {
    use gpu::emulated::{FaultConfig, configure_faults};
    use gpu::{Block, Device};

    use super::*;
    use crate::path::Policy;
    use crate::{AgentOptions, Rights};

    const LENGTH: u64 = 2 << 20;
    const SECOND: Duration = Duration::from_secs(1);

    /// The deadline does not grow with the number of stuck streams and peers; the other streams are
    /// settled.
    #[test]
    fn stuck_streams_share_one_deadline() {
        let _alone = crate::stream_copies::tests::alone();
        let device = Device::open("emulated:1".parse().unwrap()).unwrap();
        let memory = || device.allocate_shared(LENGTH, &[]).unwrap();
        let mut here = Agent::start(AgentOptions::new("here")).unwrap();
        let local = here.register(memory(), Rights::ALL).unwrap();
        let mut others = Vec::new();
        for label in ["first", "second", "third", "fourth"] {
            let there = Agent::start(AgentOptions::new(label)).unwrap();
            let remote = there.register(memory(), Rights::ALL).unwrap();
            let peer = here.connect(&there.card().encode().unwrap(), SECOND).unwrap();
            let descriptor = remote.descriptor().encode().unwrap();
            let route = here.join(peer, &local, &descriptor, &Policy::default(), SECOND).unwrap();
            others.push((there, remote, peer, route));
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
        configure_faults(1, FaultConfig { delay: 20 * SECOND, ..FaultConfig::default() });
        (0..3).for_each(|at| put(&mut here, at));
        let (start, timeout) = (Instant::now(), SECOND / 2);
        let left =
            || Error::new("disconnect a peer", ErrorKind::Closed, "the peer was disconnected");
        here.drop_peer(others[0].2.0, start + timeout, left);
        assert!(start.elapsed() < 2 * timeout, "{:?}", start.elapsed());
        let start = Instant::now();
        let unsettled = here.close_copy_queues(start + timeout);
        assert!(start.elapsed() < 2 * timeout, "{:?}", start.elapsed());
        assert_eq!(unsettled, BTreeSet::from([others[1].2.0, others[2].2.0]));
    }
}
