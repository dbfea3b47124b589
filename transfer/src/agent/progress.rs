//! Making progress, and waiting for operations and events.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu::Pause;
use ipc::WaitStrategy;
use threads::ExactTimer;

use super::event::Event;
use super::event_queue::{EventQueue, TakeEvent};
use super::peers::Peer;
use super::{Agent, BUSY_PAUSE};
use crate::error::{Error, ErrorKind, Result};
use crate::operations::{Done, Token};
use crate::path::Path;

/// How long closing an agent or disconnecting a peer waits for copies on devices: for all of them
/// together.
pub(super) const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest wait between polls while no operation is in flight.
const IDLE_PAUSE: Duration = Duration::from_millis(20);
/// The pause between looks at a device by a thread that must not poll.
const BLOCKING_LOOK_INTERVAL: Duration = Duration::from_micros(10);

impl Agent {
    /// Makes progress with all operations, without waiting. False if nothing changed.
    pub fn progress(&mut self) -> bool {
        let mut has_moved = self.poll_rails();
        has_moved |= self.local_copies.progress(|context, outcome| {
            self.peers.complete(context, outcome, &mut self.operations);
        });
        self.peers.send_notices(&mut self.operations);
        has_moved |= self.start_deferred();
        has_moved |= !self.delayed.is_empty() && self.start_delayed();
        has_moved |= self.finish_wholes();
        if self.peers.check_alive(&mut self.operations) {
            self.events.update(&self.local_target);
        }
        has_moved
    }

    /// Handles the events of the rails. True if there were any.
    pub(super) fn poll_rails(&mut self) -> bool {
        if !self.remote_transport.has_rails() {
            return false;
        }
        let has_any = self.remote_transport.poll(&mut self.events);
        self.finish_remote();
        has_any
    }

    /// Completes the operations that the rails have completed.
    pub(super) fn finish_remote(&mut self) {
        while let Some((context, outcome)) = self.remote_transport.take_done() {
            self.peers.complete(context, outcome, &mut self.operations);
        }
    }

    /// Makes progress during a wait. Returns how long the wait may last without it.
    pub(super) fn progress_while_waiting(&mut self) -> Duration {
        self.progress();
        if self.operations.in_flight() > 0 { BUSY_PAUSE } else { IDLE_PAUSE }
    }

    pub(super) fn is_busy_with(&self, peer: u32) -> bool {
        self.local_copies.is_busy_with(peer)
            || self.delayed.is_busy_with(peer)
            || self.remote_transport.is_busy_with(peer)
            || self.peers.find(peer).is_some_and(Peer::is_busy)
    }

    /// Cancels all operations with a peer. Waits for copies on devices, at most until `end`.
    pub(super) fn drop_peer(&mut self, number: u32, end: Instant) {
        let (mut cancelled, is_settled) = self.local_copies.cancel(number, end);
        cancelled.extend(self.delayed.cancel(|context| context.peer == number));
        self.remote_transport.disconnect(number);
        // Last: if it is settled, the peer takes all copies for complete.
        cancelled.extend(self.peers.disconnect(number, is_settled));
        for context in cancelled {
            let error = Error::new("disconnect", ErrorKind::Closed, "the peer was disconnected");
            self.operations.finish(context.token, Err(error));
        }
        self.finish_wholes();
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
        self.operations.in_flight()
    }

    fn timeout_error(&self, token: Token, timeout: Duration) -> Error {
        let Some(begun) = self.operations.begun(token) else {
            return Error::new("wait", ErrorKind::Unknown, "no such operation");
        };
        let path = begun.path.map_or("no path", Path::name);
        let peer = self.peers.find(begun.peer);
        let has_data = peer.is_some_and(|peer| peer.is_notice_unsent(token));
        let (done, stage) = if has_data { (begun.bytes, "notice") } else { (0, "copy") };
        let detail = format!(
            "{done} of {} bytes completed by {path} after {timeout:?} (stage: {stage}). Wait again",
            begun.bytes
        );
        let error = Error::new(begun.operation, ErrorKind::DeadlineExceeded, detail);
        error.with(self.peers.label(begun.peer))
    }

    /// Pauses as long as polling is not worthwhile.
    pub(super) fn pause(&mut self, longest: Duration) {
        if self.wait_strategy == WaitStrategy::Busy
            && (!self.remote_transport.is_idle() || self.local_copies.needs_peer())
        {
            // The rail's or the peer's thread may have no other core. It would get this one only
            // when the system preempts a spinning thread, milliseconds later.
            std::thread::yield_now();
            return;
        }
        if self.wait_strategy == WaitStrategy::Busy || self.local_copies.uses_cpu() {
            std::hint::spin_loop();
            return;
        }
        let now = Instant::now();
        match self.next_look_at_devices(now) {
            Some(look) if look <= now => std::hint::spin_loop(),
            Some(look) => {
                let most = if self.remote_transport.is_idle() { longest } else { BUSY_PAUSE };
                let _exact = ExactTimer::set();
                ipc::sleep_interruptible((look - now).min(most).min(longest));
            }
            None if self.local_copies.uses_service() || !self.remote_transport.is_idle() => {
                self.wait_for_doorbell(now + longest);
            }
            // A notice found the queue full.
            None => ipc::sleep_interruptible(BUSY_PAUSE.min(longest)),
        }
    }

    /// When to look at the copies of devices again; None if there are none.
    fn next_look_at_devices(&self, now: Instant) -> Option<Instant> {
        Some(match self.local_copies.pause(now)? {
            Pause::Spin if self.wait_strategy == WaitStrategy::Block => {
                now + BLOCKING_LOOK_INTERVAL
            }
            Pause::Spin => now,
            Pause::Until(look) => look,
        })
    }

    /// Waits for an event of a rail, or an outcome of the copy service.
    pub(super) fn wait_for_doorbell(&mut self, end: Instant) {
        let mut wait_strategy = self.wait_strategy;
        let until = end.min(Instant::now() + 10 * BUSY_PAUSE);
        let has_events = || {
            let of_service = self.local_copies.has_outcomes_of_service();
            (of_service || self.remote_transport.has_events()).then_some(())
        };
        self.local_target.doorbell.wait(&mut wait_strategy, until, has_events);
        self.wait_strategy = wait_strategy;
    }

    /// The next event, if any.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.poll_events(EventQueue::take)
    }

    fn poll_events(&mut self, take: TakeEvent) -> Option<Event> {
        self.events.update(&self.local_target);
        self.poll_rails();
        let event = take(&mut self.events);
        for (rail, session) in self.events.take_freed_credits() {
            self.remote_transport.notice_taken(rail, session);
        }
        event
    }

    /// Waits for an event, and makes progress meanwhile.
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded).
    pub fn next_event(&mut self, timeout: Duration) -> Result<Event> {
        self.wait_for_event(timeout, EventQueue::take)
    }

    /// Waits for a notice with a [reserved](super::AgentOptions::reserve_tags_from) tag, or for the
    /// departure of a peer, which [`next_event`](Self::next_event) reports too. Makes progress
    /// meanwhile; other events stay for `next_event`, and their senders are not held back.
    ///
    /// ```
    /// use std::time::Duration;
    /// use transfer::{Agent, AgentOptions, Event, Notice};
    /// let second = Duration::from_secs(1);
    /// let mut here = Agent::start(AgentOptions::new("here"))?;
    /// let mut there = Agent::start(AgentOptions::new("there").reserve_tags_from(1 << 32))?;
    /// let peer = here.connect(&there.card().encode()?, second)?;
    /// for tag in [5, 1 << 32, 6] {
    ///     let token = here.notify(peer, Notice::new(tag, b"")?)?;
    ///     here.wait(token, second)?;
    /// }
    /// let tag = |event| match event {
    ///     Event::Notice { notice, .. } => notice.tag,
    ///     other => panic!("{other:?}"),
    /// };
    /// assert_eq!(tag(there.next_reserved_event(second)?), 1 << 32);
    /// assert!(matches!(there.next_event(second)?, Event::Joined { .. }));
    /// assert_eq!([tag(there.next_event(second)?), tag(there.next_event(second)?)], [5, 6]);
    /// # Ok::<(), transfer::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded).
    pub fn next_reserved_event(&mut self, timeout: Duration) -> Result<Event> {
        self.wait_for_event(timeout, EventQueue::take_reserved)
    }

    fn wait_for_event(&mut self, timeout: Duration, take: TakeEvent) -> Result<Event> {
        let end = ipc::deadline(timeout);
        let local_target = Arc::clone(&self.local_target);
        loop {
            let now = Instant::now();
            let look = match self.wait_strategy {
                WaitStrategy::Busy => None,
                _ => self.next_look_at_devices(now),
            };
            let until = match look {
                Some(_) if self.local_copies.uses_cpu() => now,
                Some(look) if self.remote_transport.is_idle() => end.min(look),
                Some(look) => end.min(look).min(now + BUSY_PAUSE),
                None if self.operations.in_flight() == 0 => end,
                None if self.local_copies.uses_service() && self.delayed.is_empty() => {
                    end.min(now + IDLE_PAUSE)
                }
                None => end.min(now + BUSY_PAUSE),
            };
            let exact = look.filter(|_| until > now).map(|_| ExactTimer::set());
            let mut wait_strategy = self.wait_strategy;
            let found = local_target.doorbell.wait(&mut wait_strategy, until, || {
                self.progress();
                let event = self.poll_events(take);
                if event.is_none()
                    && self.wait_strategy == WaitStrategy::Busy
                    && (self.remote_transport.has_rails() || self.local_copies.needs_peer())
                {
                    // As in `pause`: a rail's thread receives events.
                    std::thread::yield_now();
                }
                event
            });
            self.wait_strategy = wait_strategy;
            drop(exact);
            if let Some(event) = found {
                return Ok(event);
            }
            if Instant::now() >= end {
                let detail = format!("no event after {timeout:?}");
                return Err(Error::new("wait for event", ErrorKind::DeadlineExceeded, detail));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

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
        here.drop_peer(others[0].2.0, start + timeout);
        assert!(start.elapsed() < 2 * timeout, "{:?}", start.elapsed());
        let start = Instant::now();
        let unsettled = here.local_copies.close(start + timeout);
        assert!(start.elapsed() < 2 * timeout, "{:?}", start.elapsed());
        assert_eq!(unsettled, BTreeSet::from([others[1].2.0, others[2].2.0]));
    }
}
