//! The worker's thread: commands, the endpoint, and topics with events.

use std::collections::{BTreeSet, HashMap};
use std::mem;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crossbeam_channel::Receiver;
use fabric::ring::{PortEvent, ReceiverId, RingEvent, SenderId};
use fabric::{AddressVector, Domain, Peer};

use super::doorbell::{Announcement, Doorbell};
use super::endpoint::OpenedEndpoint;
use super::events::WorkerEvents;
use super::renewal::Renewal;
use super::topic_table::{InboundTopic, OutboundTopic, TopicSlab, TopicSlot, WorkerTopicKey};
use super::{Command, NodeId, WorkerEvent, WorkerOptions};
use crate::replication::inbound::InboundFailure;
use crate::replication::transport::Transport;
use crate::replication::{ClockReading, Progress, Side};

/// Completions handled before ready topics are polled.
const COMPLETIONS_PER_ROUND: usize = 64;
/// Idle rounds after which all credit is returned to writers.
const QUIET_ROUNDS: u32 = 16;
/// Failures of the endpoint, without a success between them, after which the worker ends.
const MAX_ENDPOINT_FAILURES: u32 = 1000;
/// The longest sleep while a device copies: its end wakes no thread.
pub(super) const COPY_POLL_INTERVAL: Duration = Duration::from_micros(50);
/// Interval of retries for a sink without capacity, unless an event comes first: it grows with the
/// waiting time, so that retries cost little and come at most an eighth late.
const MIN_RETRY_INTERVAL: Duration = Duration::from_millis(1);
const MAX_RETRY_INTERVAL: Duration = Duration::from_millis(20);
/// The longest sleep.
const MAX_SLEEP: Duration = Duration::from_millis(50);
/// Pause between polls where a provider has nothing to sleep on, in nanoseconds. It grows with the
/// idle time: the next event is late by a thousandth of that, and at most by the upper bound.
const IDLE_PAUSE_RANGE: (u64, u64) = (200_000, 4_000_000);
/// Interval of checking deadlines.
const HOUSEKEEPING_INTERVAL: u64 = 100_000_000;
/// Interval of checking all topics for unanswered requests; shorter for a short timeout.
const ANSWER_CHECK_INTERVAL: u64 = 1_000_000_000;

/// A worker's thread.
pub(super) struct WorkerLoop {
    pub(super) options: WorkerOptions,
    pub(super) transport: Transport,
    pub(super) addresses: AddressVector,
    /// Address of the endpoint.
    pub(super) address: Vec<u8>,
    /// Domains of the further lanes.
    pub(super) lane_domains: Vec<Domain>,
    pub(super) commands: Receiver<Command>,
    pub(super) events: WorkerEvents,
    pub(super) doorbell: Arc<Doorbell>,
    pub(super) outbound_topics: TopicSlab<OutboundTopic>,
    pub(super) inbound_topics: TopicSlab<InboundTopic>,
    pub(super) topic_index: HashMap<WorkerTopicKey, usize>,
    pub(super) sender_topics: HashMap<SenderId, usize>,
    pub(super) receiver_topics: HashMap<ReceiverId, usize>,
    pub(super) fabric_peers: HashMap<Vec<u8>, Peer>,
    /// Topics that are not sent any more, with writes in flight.
    pub(super) draining_outbound: Vec<OutboundTopic>,
    /// Topics that are not received any more, with copies in progress.
    pub(super) draining_inbound: Vec<InboundTopic>,
    /// Rings being closed, with node and time: their writers may never answer.
    pub(super) closing_rings: Vec<(ReceiverId, NodeId, u64)>,
    /// Why and when the endpoint is renewed.
    pub(super) renewal: Renewal,
    /// Topics polled in each round.
    pub(super) ready_topics: Vec<TopicSlot>,
    /// Outbound topics without capacity at their last turn.
    stalled_topics: BTreeSet<usize>,
    /// Inbound topics with credit that their writers may not have.
    pub(super) unacknowledged: Vec<usize>,
    announced: Vec<Announcement>,
    start: Instant,
    pub(super) now: ClockReading,
    next_housekeeping: u64,
    next_answer_check: u64,
    pub(super) next_stall_check: u64,
    pub(super) last_connection: u64,
    failures: u32,
    pub(super) sleep_count: u64,
    pub(super) is_stopping: bool,
}

pub(super) fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

impl WorkerLoop {
    pub(super) fn new(
        options: WorkerOptions,
        opened: OpenedEndpoint,
        commands: Receiver<Command>,
        events: WorkerEvents,
    ) -> Self {
        let OpenedEndpoint { addresses, mut port, address, lane_domains, .. } = opened;
        let doorbell = Arc::new(Doorbell::new(port.parts().1.waker()));
        let max_slots = options.max_slots.max(2 * options.slots_for(port.lanes()));
        let transport = Transport::new(port, options.chunk as usize, max_slots);
        let mut worker_loop = Self {
            options,
            transport,
            addresses,
            address,
            lane_domains,
            commands,
            events,
            doorbell,
            outbound_topics: TopicSlab::new(),
            inbound_topics: TopicSlab::new(),
            topic_index: HashMap::new(),
            sender_topics: HashMap::new(),
            receiver_topics: HashMap::new(),
            fabric_peers: HashMap::new(),
            draining_outbound: Vec::new(),
            draining_inbound: Vec::new(),
            closing_rings: Vec::new(),
            renewal: Renewal::default(),
            ready_topics: Vec::new(),
            stalled_topics: BTreeSet::new(),
            unacknowledged: Vec::new(),
            announced: Vec::new(),
            start: Instant::now(),
            now: ClockReading { monotonic: 0, realtime: 0 },
            next_housekeeping: 0,
            next_answer_check: 0,
            next_stall_check: 0,
            last_connection: 0,
            failures: 0,
            sleep_count: 0,
            is_stopping: false,
        };
        worker_loop.update_clock();
        // Connection numbers differ from those of an earlier worker.
        worker_loop.last_connection = worker_loop.now.realtime;
        worker_loop
    }

    pub(super) fn doorbell(&self) -> Arc<Doorbell> {
        Arc::clone(&self.doorbell)
    }

    pub(super) fn update_clock(&mut self) {
        let realtime = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.now = ClockReading {
            monotonic: nanoseconds(self.start.elapsed()),
            realtime: nanoseconds(realtime),
        };
    }

    pub(super) fn run(&mut self) {
        let spin = nanoseconds(self.options.spin);
        let (mut last_moved, mut last_event, mut idle) =
            (self.now.monotonic, self.now.monotonic, 0_u32);
        while !self.is_stopping {
            self.update_clock();
            let mut has_moved = self.process_commands();
            has_moved |= self.take_announcements();
            has_moved |= self.poll_port();
            has_moved |= self.advance_ready(spin);
            self.run_housekeeping();
            if has_moved {
                (last_moved, last_event, idle) = (self.now.monotonic, self.now.monotonic, 0);
                self.acknowledge_due();
                continue;
            }
            idle = idle.saturating_add(1);
            if idle == QUIET_ROUNDS {
                self.acknowledge_all();
            }
            if self.now.monotonic - last_moved < spin {
                self.transport.port.pause();
                continue;
            }
            let pause = ((self.now.monotonic - last_event) / 1000)
                .clamp(IDLE_PAUSE_RANGE.0, IDLE_PAUSE_RANGE.1);
            self.transport.port.parts().1.set_max_pause(Duration::from_nanos(pause));
            self.wait();
            // Spins only briefly after a wake-up.
            self.update_clock();
            last_moved = last_moved.max(self.now.monotonic.saturating_sub(spin));
        }
    }

    fn wait(&mut self) {
        let mut longest = MAX_SLEEP;
        for task in &self.ready_topics {
            let seen = match task {
                TopicSlot::Out(index) => {
                    self.outbound_topics.get(*index).map(|topic| (topic.ready.progress, None))
                }
                TopicSlot::In(index) => self
                    .inbound_topics
                    .get(*index)
                    .map(|topic| (topic.ready.progress, topic.inbound.waiting_since())),
            };
            let Some((progress, since)) = seen else { continue };
            if progress.is_copying {
                longest = longest.min(COPY_POLL_INTERVAL);
            } else if progress.is_waiting {
                let waited = since.map_or(0, |since| self.now.monotonic.saturating_sub(since));
                longest = longest.min(
                    Duration::from_nanos(waited / 8).clamp(MIN_RETRY_INTERVAL, MAX_RETRY_INTERVAL),
                );
            }
        }
        self.doorbell.set_asleep(true);
        if self.commands.is_empty() && self.doorbell.is_empty() {
            self.sleep_count += 1;
            let progress = self.transport.port.wait(longest);
            self.handle_turn(progress);
            self.handle_port_events();
        }
        self.doorbell.set_asleep(false);
    }

    /// Handles the result of a turn of the port. True if there was an event.
    pub(super) fn handle_turn(&mut self, progress: fabric::Result<PortEvent>) -> bool {
        match progress {
            Ok(PortEvent::Idle) => false,
            Ok(_) => {
                self.failures = 0;
                true
            }
            Err(error) => {
                tracing::debug!(%error, "an endpoint operation failed");
                self.failures += 1;
                if self.failures >= MAX_ENDPOINT_FAILURES {
                    tracing::error!(%error, "the endpoint failed repeatedly; the worker ends");
                    self.is_stopping = true;
                }
                false
            }
        }
    }

    fn poll_port(&mut self) -> bool {
        let mut has_moved = false;
        for _ in 0..COMPLETIONS_PER_ROUND {
            let progress = self.transport.port.progress();
            if !self.handle_turn(progress) {
                break;
            }
            has_moved = true;
        }
        self.handle_port_events() || has_moved
    }

    fn handle_port_events(&mut self) -> bool {
        let mut has_any = false;
        while let Some(event) = self.transport.port.next_event() {
            has_any = true;
            match event {
                RingEvent::Receiver(ring) => {
                    if let Some(index) = self.receiver_topics.get(&ring) {
                        self.ready(TopicSlot::In(*index));
                    }
                }
                RingEvent::Sender(ring) => {
                    if let Some(index) = self.sender_topics.get(&ring) {
                        self.ready(TopicSlot::Out(*index));
                    }
                }
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
            one.clear_listed();
            if let Some(index) = self.topic_index.get(&WorkerTopicKey::Out(one.key)).copied() {
                self.ready(TopicSlot::Out(index));
            }
        }
        self.announced = announced;
        has_any
    }

    /// Marks a topic as ready after an event.
    pub(super) fn ready(&mut self, task: TopicSlot) {
        let until = self.now.monotonic + nanoseconds(self.options.spin);
        let ready = match task {
            TopicSlot::Out(index) => self.outbound_topics.get(index).map(|topic| &mut topic.ready),
            TopicSlot::In(index) => self.inbound_topics.get(index).map(|topic| &mut topic.ready),
        };
        let Some(ready) = ready else { return };
        ready.until = until;
        if !mem::replace(&mut ready.is_listed, true) {
            self.ready_topics.push(task);
        }
    }

    fn advance_ready(&mut self, spin: u64) -> bool {
        let mut has_moved = false;
        let mut at = 0;
        while let Some(task) = self.ready_topics.get(at).copied() {
            let progress = match task {
                TopicSlot::Out(index) => self.advance_out(index),
                TopicSlot::In(index) => self.advance_in(index),
            };
            let now = self.now.monotonic;
            let ready = match task {
                TopicSlot::Out(index) => {
                    self.outbound_topics.get(index).map(|topic| &mut topic.ready)
                }
                TopicSlot::In(index) => {
                    self.inbound_topics.get(index).map(|topic| &mut topic.ready)
                }
            };
            let stays = ready.is_some_and(|ready| {
                ready.progress = progress;
                if progress.has_moved {
                    ready.until = now + spin;
                }
                ready.is_listed = now < ready.until || progress.is_copying || progress.is_waiting;
                ready.is_listed
            });
            has_moved |= progress.has_moved;
            if stays {
                at += 1;
            } else {
                self.ready_topics.swap_remove(at);
            }
        }
        has_moved
    }

    fn advance_out(&mut self, index: usize) -> Progress {
        let Some(topic) = self.outbound_topics.get(index) else { return Progress::default() };
        match topic.outbound.advance(self.now, &mut *topic.source, &mut self.transport) {
            Ok(progress) => {
                if topic.outbound.is_stalled() {
                    self.stalled_topics.insert(index);
                } else {
                    self.stalled_topics.remove(&index);
                }
                while let Some((node, reason)) = self
                    .outbound_topics
                    .get(index)
                    .and_then(|topic| topic.outbound.next_disconnected())
                {
                    self.disconnect_writer(index, node, Some(reason));
                }
                progress
            }
            Err(error) => {
                let (key, side) = (topic.key, Side::Writer);
                self.events.send(WorkerEvent::Failed { key, node: None, side, error });
                self.stop_sending(index);
                Progress::default()
            }
        }
    }

    fn advance_in(&mut self, index: usize) -> Progress {
        let Some(topic) = self.inbound_topics.get(index) else { return Progress::default() };
        let progress = match topic.advance(self.now, &mut self.transport) {
            Ok(progress) => progress,
            Err(InboundFailure::Ring(reason)) => {
                self.disconnect_inbound_ring(index, reason);
                Progress { has_moved: true, ..Progress::default() }
            }
            Err(InboundFailure::Topic(error)) => {
                let (key, node, side) = (topic.key, Some(topic.origin), Side::Reader);
                self.events.send(WorkerEvent::Failed { key, node, side, error });
                self.stop_receiving(index, true);
                return Progress::default();
            }
        };
        if let Some(topic) = self.inbound_topics.get(index) {
            if topic.has_unacknowledged && !self.unacknowledged.contains(&index) {
                self.unacknowledged.push(index);
            }
            if topic.request.is_some() && topic.inbound.is_drained() {
                self.offer_ring(index);
            }
        }
        progress
    }

    /// Returns credit to writers where a watermark was passed.
    fn acknowledge_due(&mut self) {
        for at in 0..self.unacknowledged.len() {
            let index = self.unacknowledged[at];
            self.acknowledge(index, false);
        }
    }

    /// Returns all credit to writers while nothing else happens.
    fn acknowledge_all(&mut self) {
        let unacknowledged = mem::take(&mut self.unacknowledged);
        for index in &unacknowledged {
            self.acknowledge(*index, true);
        }
        let mut unacknowledged = unacknowledged;
        unacknowledged.retain(|index| {
            self.inbound_topics.get(*index).is_some_and(|topic| topic.has_unacknowledged)
        });
        self.unacknowledged = unacknowledged;
    }

    fn acknowledge(&mut self, index: usize, is_quiet: bool) {
        let Some(topic) = self.inbound_topics.get(index) else { return };
        let Some(inbound_ring) =
            topic.inbound_ring.as_ref().filter(|inbound_ring| inbound_ring.is_connected)
        else {
            topic.has_unacknowledged &= topic.inbound_ring.is_some();
            return;
        };
        match self.transport.port.return_credit(inbound_ring.ring, is_quiet) {
            // Credit may still wait for the write of an earlier one.
            Ok(_) if is_quiet => {
                let receiver = self.transport.port.receiver(inbound_ring.ring);
                topic.has_unacknowledged =
                    receiver.is_ok_and(|receiver| receiver.has_unsent_credit());
            }
            Ok(_) => {}
            Err(error) => {
                topic.has_unacknowledged = false;
                tracing::debug!(%error, "returning credit to a writer failed");
                // Chunks that arrived before are read first; then the ring reports that it is
                // broken.
                self.ready(TopicSlot::In(index));
            }
        }
    }

    /// Freed capacity wakes no thread: retry.
    fn retry_stalled(&mut self) {
        // Its next turn checks whether it is still stalled.
        for index in mem::take(&mut self.stalled_topics) {
            self.ready(TopicSlot::Out(index));
        }
    }

    /// Checks all deadlines.
    fn run_housekeeping(&mut self) {
        if self.now.monotonic < self.next_housekeeping {
            return;
        }
        self.next_housekeeping = self.now.monotonic + HOUSEKEEPING_INTERVAL;
        self.release_drained();
        let timeout = nanoseconds(self.options.timeout);
        let now = self.now.monotonic;
        let is_late = |(_, _, since): &mut (ReceiverId, NodeId, u64)| now - *since > timeout;
        for (ring, node, _) in self.closing_rings.extract_if(.., is_late).collect::<Vec<_>>() {
            self.reclaim_ring(node, |port| port.forget_if_closing(ring));
        }
        self.transport.release_unused();
        if now >= self.next_answer_check {
            self.next_answer_check = now + ANSWER_CHECK_INTERVAL.min(timeout / 8);
            self.expire_requests(timeout);
        }
        self.retry_stalled();
        self.check_connections();
        self.renew_if_due();
    }
}
