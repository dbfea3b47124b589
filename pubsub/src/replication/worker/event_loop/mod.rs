//! The worker's thread: commands, the endpoint, and topics with events.

mod commands;
mod connections;
mod fault_handling;
mod teardown;

use std::mem;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;

use super::doorbell::{Announcement, WorkerDoorbell};
use super::endpoint::{RenewalReason, WorkerEndpoint};
use super::ready_queue::ReadyQueue;
use super::topics::table::{TopicSlot, TopicTable, WorkerTopicKey};
use super::{Command, WorkerEvent, WorkerEvents, WorkerOptions, nanoseconds};
use crate::clock;
use crate::replication::{ClockReading, Progress, Side, TurnFailure};

/// Idle rounds after which all credit is returned to writers.
const QUIET_ROUNDS: u32 = 16;
/// Pause between polls where a provider has nothing to sleep on, in nanoseconds. It grows with the
/// idle time: the next event is late by a thousandth of that, and at most by the upper bound.
const IDLE_PAUSE_RANGE: (u64, u64) = (200_000, 4_000_000);
/// Interval of checking deadlines.
const HOUSEKEEPING_INTERVAL: u64 = 100_000_000;
/// Interval of checking all topics for unanswered requests; shorter for a short timeout.
const ANSWER_CHECK_INTERVAL: u64 = 1_000_000_000;
/// Interval of checking all connections for stalls.
const STALL_CHECK_INTERVAL: u64 = 200_000_000;

pub(super) struct WorkerLoop {
    options: WorkerOptions,
    endpoint: WorkerEndpoint,
    commands: Receiver<Command>,
    events: WorkerEvents,
    doorbell: Arc<WorkerDoorbell>,
    topics: TopicTable,
    ready_queue: ReadyQueue,
    announced: Vec<Announcement>,
    start: Instant,
    /// The time of the current round.
    now: ClockReading,
    next_checks: NextChecks,
    is_stopping: bool,
}

#[derive(Default)]
struct NextChecks {
    housekeeping: u64,
    answers: u64,
    stalls: u64,
}

fn read_clock(start: Instant) -> ClockReading {
    ClockReading { monotonic: nanoseconds(start.elapsed()), realtime: clock::now() }
}

/// Returns true if a check is due, and then sets when the next one is.
fn is_due(next: &mut u64, now: u64, interval: u64) -> bool {
    let is_due = now >= *next;
    if is_due {
        *next = now + interval;
    }
    is_due
}

impl WorkerLoop {
    pub(super) fn new(
        options: WorkerOptions,
        endpoint: WorkerEndpoint,
        commands: Receiver<Command>,
        events: WorkerEvents,
        doorbell: Arc<WorkerDoorbell>,
    ) -> Self {
        let start = Instant::now();
        let now = read_clock(start);
        Self {
            doorbell,
            endpoint,
            commands,
            events,
            // Connection numbers differ from those of an earlier worker.
            topics: TopicTable::new(now.realtime),
            ready_queue: ReadyQueue::new(nanoseconds(options.spin)),
            announced: Vec::new(),
            start,
            now,
            next_checks: NextChecks::default(),
            is_stopping: false,
            options,
        }
    }

    pub(super) fn run(&mut self) {
        let spin = nanoseconds(self.options.spin);
        let now = self.now.monotonic;
        let (mut last_moved, mut last_event, mut idle) = (now, now, 0_u32);
        while !self.is_stopping && !self.endpoint.has_failed() {
            self.now = read_clock(self.start);
            let now = self.now.monotonic;
            let mut has_moved = self.process_commands();
            has_moved |= self.take_announcements();
            has_moved |= self.endpoint.poll();
            has_moved |= self.handle_ring_events();
            has_moved |= self.advance_ready();
            self.run_housekeeping();
            if has_moved {
                (last_moved, last_event, idle) = (now, now, 0);
                self.acknowledge(false);
                continue;
            }
            idle = idle.saturating_add(1);
            if idle == QUIET_ROUNDS {
                self.acknowledge(true);
            }
            if now - last_moved < spin {
                self.endpoint.transport().port().pause();
                continue;
            }
            let pause = ((now - last_event) / 1000).clamp(IDLE_PAUSE_RANGE.0, IDLE_PAUSE_RANGE.1);
            self.wait(Duration::from_nanos(pause));
            // Spins only briefly after a wake-up.
            self.now = read_clock(self.start);
            last_moved = last_moved.max(self.now.monotonic.saturating_sub(spin));
        }
    }

    fn wait(&mut self, max_pause: Duration) {
        let longest = self.ready_queue.longest_sleep(&mut self.topics, self.now.monotonic);
        self.doorbell.set_asleep(true);
        if self.commands.is_empty() && self.doorbell.is_empty() {
            self.endpoint.sleep(longest, max_pause);
            self.handle_ring_events();
        }
        self.doorbell.set_asleep(false);
    }

    fn handle_ring_events(&mut self) -> bool {
        let mut has_any = false;
        while let Some(event) = self.endpoint.next_event() {
            has_any = true;
            if let Some(slot) = self.topics.slot_of(event) {
                self.ready(slot);
            }
        }
        has_any
    }

    fn take_announcements(&mut self) -> bool {
        let mut announced = mem::take(&mut self.announced);
        self.doorbell.take(&mut announced);
        let has_any = !announced.is_empty();
        for one in announced.drain(..) {
            // Before the topic is polled: later messages are announced again.
            let key = one.clear_listed();
            if let Some(index) = self.topics.index_of(WorkerTopicKey::Out(key)) {
                self.ready(TopicSlot::Out(index));
            }
        }
        self.announced = announced;
        has_any
    }

    fn ready(&mut self, slot: TopicSlot) {
        self.ready_queue.mark(&mut self.topics, slot, self.now.monotonic);
    }

    fn advance_ready(&mut self) -> bool {
        let mut has_moved = false;
        let mut at = 0;
        while let Some(slot) = self.ready_queue.get(at) {
            let progress = match slot {
                TopicSlot::Out(index) => self.advance_out(index),
                TopicSlot::In(index) => self.advance_in(index),
            };
            has_moved |= progress.has_moved;
            let now = self.now.monotonic;
            let stays = self.ready_queue.end_turn(at, slot, progress, &mut self.topics, now);
            at += usize::from(stays);
        }
        has_moved
    }

    fn advance_out(&mut self, index: usize) -> Progress {
        let Some(topic) = self.topics.outbound(index) else { return Progress::default() };
        match topic.advance(self.now, self.endpoint.transport()) {
            Ok(progress) => {
                self.ready_queue.set_stalled(index, topic.outbound().is_stalled());
                while let Some(topic) = self.topics.outbound(index)
                    && let Some((node, reason)) = topic.outbound().next_disconnected()
                {
                    self.disconnect_writer(index, node, Some(reason));
                }
                progress
            }
            Err(error) => {
                let (key, side) = (topic.key(), Side::Writer);
                self.events.send(WorkerEvent::Failed { key, node: None, side, error });
                self.stop_sending(index);
                Progress::default()
            }
        }
    }

    fn advance_in(&mut self, index: usize) -> Progress {
        let Some(topic) = self.topics.inbound(index) else { return Progress::default() };
        let progress = match topic.advance(self.now, self.endpoint.transport()) {
            Ok(progress) => {
                if let Some((ends, extent)) = topic.take_passed_probe() {
                    let (_, node) = topic.id();
                    tracing::info!(%node, "the ring in device memory passed its probe");
                    if !self.endpoint.device_rings().probe_passed(ends, extent) {
                        self.end_direct_rings(ends, "another ring failed its probe");
                    }
                }
                progress
            }
            Err(TurnFailure::Probe(cause)) => {
                let (_, node) = topic.id();
                tracing::warn!(%node, cause, "the ring in device memory failed its probe");
                if let Some((ends, _)) = topic.direct_ring() {
                    self.endpoint.probe_failed(ends, &cause);
                    self.end_direct_rings(ends, &cause);
                }
                Progress { has_moved: true, ..Progress::default() }
            }
            Err(TurnFailure::Connection(reason)) => {
                self.note_ended_ring(index);
                self.disconnect_inbound_ring(index, false, reason);
                Progress { has_moved: true, ..Progress::default() }
            }
            Err(TurnFailure::Topic(error)) => {
                let (key, node) = topic.id();
                self.report_failure(key, node, Side::Reader, error);
                self.request_restart(index, "the reader failed");
                self.stop_receiving(index);
                return Progress::default();
            }
        };
        if let Some(topic) = self.topics.inbound(index) {
            if topic.has_unacknowledged() {
                self.ready_queue.set_unacknowledged(index);
            }
            if topic.can_answer() {
                self.offer_ring(index);
            }
        }
        progress
    }

    fn acknowledge(&mut self, is_quiet: bool) {
        let (now, transport) = (self.now.monotonic, self.endpoint.transport());
        self.ready_queue.acknowledge(&mut self.topics, transport, is_quiet, now);
    }

    /// Checks all deadlines.
    fn run_housekeeping(&mut self) {
        let now = self.now.monotonic;
        if !is_due(&mut self.next_checks.housekeeping, now, HOUSEKEEPING_INTERVAL) {
            return;
        }
        self.release_drained();
        let timeout = nanoseconds(self.options.timeout);
        self.endpoint.expire_closing_rings(now, timeout);
        self.endpoint.transport().release_unused();
        self.endpoint.device_rings().release_quarantined(now);
        let interval = ANSWER_CHECK_INTERVAL.min(timeout / 8);
        if is_due(&mut self.next_checks.answers, now, interval) {
            self.expire_requests(timeout);
        }
        self.ready_queue.retry_stalled(&mut self.topics, now);
        if is_due(&mut self.next_checks.stalls, now, STALL_CHECK_INTERVAL) {
            self.check_connections();
        }
        self.renew_if_due();
    }

    /// Checks all connections for stalls.
    fn check_connections(&mut self) {
        let (now, port) = (self.now.monotonic, self.endpoint.transport().port());
        for topic in self.topics.outbound_topics() {
            topic.send_stall_checks(now, port, &self.events);
        }
        for index in 0..self.topics.inbound_end() {
            let Some(topic) = self.topics.inbound(index) else { continue };
            if topic.poll_stall(now, self.endpoint.transport().port()) {
                let (key, node) = topic.id();
                tracing::warn!(topic = ?key, %node, "connection with a node stalled");
                self.note_ended_ring(index);
                self.handle_fault(node, RenewalReason::ConnectionStalled);
            }
        }
    }
}
