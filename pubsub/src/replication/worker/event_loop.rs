//! What the thread does: commands, the endpoint, and the topics that something happened for.

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

/// Outcomes of the endpoint between two looks at everything else.
const TURNS_PER_ROUND: usize = 64;
/// Rounds without anything, after which writers are told what was read.
const QUIET_ROUNDS: u32 = 16;
/// Failures of the endpoint itself, without a success between them, after which it is of no use.
const MAX_ENDPOINT_FAILURES: u32 = 1000;
/// The longest sleep while a device copies: nobody wakes us then.
pub(super) const COPY_POLL_INTERVAL: Duration = Duration::from_micros(50);
/// How often what has no room is tried again, beside when somebody says that there is: a sink the
/// less often the longer it had none, so that it costs little and is late by an eighth.
const MIN_RETRY_INTERVAL: Duration = Duration::from_millis(1);
const MAX_RETRY_INTERVAL: Duration = Duration::from_millis(20);
/// The longest sleep.
const MAX_SLEEP: Duration = Duration::from_millis(50);
/// Where a provider has nothing to sleep on it is looked at now and then, the less often the longer
/// nothing happened: what comes first after that is late by a thousandth of it, and no more than
/// the second of these, in nanoseconds.
const IDLE_PAUSE_RANGE: (u64, u64) = (200_000, 4_000_000);
/// How often it is looked after what has a deadline.
const HOUSEKEEPING_INTERVAL: u64 = 100_000_000;
/// How often, at all topics, who did not answer; or a few times within the patience with those.
const ANSWER_CHECK_INTERVAL: u64 = 1_000_000_000;

/// A worker's thread.
pub(super) struct WorkerLoop {
    pub(super) options: WorkerOptions,
    pub(super) transport: Transport,
    pub(super) addresses: AddressVector,
    /// Of the endpoint.
    pub(super) address: Vec<u8>,
    /// Of the further lanes.
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
    /// Topics that are not sent any more, of which something is on its way.
    pub(super) draining_outbound: Vec<OutboundTopic>,
    /// Topics that are not received any more, of which something is being copied.
    pub(super) draining_inbound: Vec<InboundTopic>,
    /// Rings that are being closed, of which node, and since when: their writers may never answer.
    pub(super) closing_rings: Vec<(ReceiverId, NodeId, u64)>,
    /// Why and when the endpoint is begun anew.
    pub(super) renewal: Renewal,
    /// Topics that are looked after in each round.
    pub(super) ready_topics: Vec<TopicSlot>,
    /// Of those that are sent, such that had no room when they had their turn last.
    stalled_topics: BTreeSet<usize>,
    /// Of those that are received, such whose writers may not know all.
    pub(super) unacknowledged: Vec<usize>,
    announced: Vec<Announcement>,
    start: Instant,
    pub(super) now: ClockReading,
    next_housekeeping: u64,
    next_answer_check: u64,
    pub(super) next_stall_check: u64,
    pub(super) last_connection: u64,
    failures: u32,
    pub(super) sleeps: u64,
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
        let mut engine = Self {
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
            sleeps: 0,
            is_stopping: false,
        };
        engine.update_clock();
        // A worker that was started again is not taken for the one before.
        engine.last_connection = engine.now.realtime;
        engine
    }

    pub(super) fn doorbell(&self) -> Arc<Doorbell> {
        Arc::clone(&self.doorbell)
    }

    pub(super) fn update_clock(&mut self) {
        let realtime = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.now =
            ClockReading { monotonic: nanoseconds(self.start.elapsed()), realtime: nanoseconds(realtime) };
    }

    pub(super) fn run(&mut self) {
        let spin = nanoseconds(self.options.spin);
        let (mut moved, mut heard, mut idle) = (self.now.monotonic, self.now.monotonic, 0_u32);
        while !self.is_stopping {
            self.update_clock();
            let mut has_moved = self.process_commands();
            has_moved |= self.take_announcements();
            has_moved |= self.poll_port();
            has_moved |= self.advance_ready(spin);
            self.run_housekeeping();
            if has_moved {
                (moved, heard, idle) = (self.now.monotonic, self.now.monotonic, 0);
                self.acknowledge_due();
                continue;
            }
            idle = idle.saturating_add(1);
            if idle == QUIET_ROUNDS {
                self.acknowledge_all();
            }
            if self.now.monotonic - moved < spin {
                self.transport.port.pause();
                continue;
            }
            let pause =
                ((self.now.monotonic - heard) / 1000).clamp(IDLE_PAUSE_RANGE.0, IDLE_PAUSE_RANGE.1);
            self.transport.port.parts().1.set_max_pause(Duration::from_nanos(pause));
            self.wait();
            // What it was woken for is done first.
            self.update_clock();
            moved = moved.max(self.now.monotonic.saturating_sub(spin));
        }
    }

    fn wait(&mut self) {
        let mut longest = MAX_SLEEP;
        for task in &self.ready_topics {
            let seen = match task {
                TopicSlot::Out(place) => {
                    self.outbound_topics.get(*place).map(|topic| (topic.ready.progress, None))
                }
                TopicSlot::In(place) => self
                    .inbound_topics
                    .get(*place)
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
        self.doorbell.sleeps(true);
        if self.commands.is_empty() && self.doorbell.is_empty() {
            self.sleeps += 1;
            let progress = self.transport.port.wait(longest);
            self.handle_turn(progress);
            self.handle_port_events();
        }
        self.doorbell.sleeps(false);
    }

    /// Gives the outcome of a turn its due. True if there was something.
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
        for _ in 0..TURNS_PER_ROUND {
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
                    if let Some(place) = self.receiver_topics.get(&ring) {
                        self.ready(TopicSlot::In(*place));
                    }
                }
                RingEvent::Sender(ring) => {
                    if let Some(place) = self.sender_topics.get(&ring) {
                        self.ready(TopicSlot::Out(*place));
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
            // Before it is looked at: what comes later is announced again.
            one.clear_listed();
            if let Some(place) = self.topic_index.get(&WorkerTopicKey::Out(one.key)).copied() {
                self.ready(TopicSlot::Out(place));
            }
        }
        self.announced = announced;
        has_any
    }

    /// Something happened for a topic.
    pub(super) fn ready(&mut self, task: TopicSlot) {
        let until = self.now.monotonic + nanoseconds(self.options.spin);
        let ready = match task {
            TopicSlot::Out(place) => self.outbound_topics.get(place).map(|topic| &mut topic.ready),
            TopicSlot::In(place) => self.inbound_topics.get(place).map(|topic| &mut topic.ready),
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
                TopicSlot::Out(place) => self.advance_out(place),
                TopicSlot::In(place) => self.advance_in(place),
            };
            let now = self.now.monotonic;
            let ready = match task {
                TopicSlot::Out(place) => {
                    self.outbound_topics.get(place).map(|topic| &mut topic.ready)
                }
                TopicSlot::In(place) => {
                    self.inbound_topics.get(place).map(|topic| &mut topic.ready)
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

    fn advance_out(&mut self, place: usize) -> Progress {
        let Some(topic) = self.outbound_topics.get(place) else { return Progress::default() };
        match topic.outbound.advance(self.now, &mut *topic.source, &mut self.transport) {
            Ok(progress) => {
                if topic.outbound.is_stalled() {
                    self.stalled_topics.insert(place);
                } else {
                    self.stalled_topics.remove(&place);
                }
                while let Some((node, reason)) = self
                    .outbound_topics
                    .get(place)
                    .and_then(|topic| topic.outbound.next_disconnected())
                {
                    self.disconnect_writer(place, node, Some(reason));
                }
                progress
            }
            Err(error) => {
                let (key, side) = (topic.key, Side::Writer);
                self.events.tell(WorkerEvent::Failed { key, node: None, side, error });
                self.stop_sending(place);
                Progress::default()
            }
        }
    }

    fn advance_in(&mut self, place: usize) -> Progress {
        let Some(topic) = self.inbound_topics.get(place) else { return Progress::default() };
        let progress = match topic.advance(self.now, &mut self.transport) {
            Ok(progress) => progress,
            Err(InboundFailure::Ring(reason)) => {
                self.disconnect_inbound_ring(place, reason);
                Progress { has_moved: true, ..Progress::default() }
            }
            Err(InboundFailure::Topic(error)) => {
                let (key, node, side) = (topic.key, Some(topic.origin), Side::Reader);
                self.events.tell(WorkerEvent::Failed { key, node, side, error });
                self.stop_receiving(place, true);
                return Progress::default();
            }
        };
        if let Some(topic) = self.inbound_topics.get(place) {
            if topic.has_unacknowledged && !self.unacknowledged.contains(&place) {
                self.unacknowledged.push(place);
            }
            if topic.request.is_some() && topic.inbound.is_drained() {
                self.offer_ring(place);
            }
        }
        progress
    }

    /// Tells writers what was read, where a watermark was passed.
    fn acknowledge_due(&mut self) {
        for at in 0..self.unacknowledged.len() {
            let place = self.unacknowledged[at];
            self.tell(place, false);
        }
    }

    /// Nothing else is going on: tells writers all that was read.
    fn acknowledge_all(&mut self) {
        let unacknowledged = mem::take(&mut self.unacknowledged);
        for place in &unacknowledged {
            self.tell(*place, true);
        }
        let mut unacknowledged = unacknowledged;
        unacknowledged.retain(|place| {
            self.inbound_topics.get(*place).is_some_and(|topic| topic.has_unacknowledged)
        });
        self.unacknowledged = unacknowledged;
    }

    fn tell(&mut self, place: usize, is_quiet: bool) {
        let Some(topic) = self.inbound_topics.get(place) else { return };
        let Some(inbound_ring) =
            topic.inbound_ring.as_ref().filter(|inbound_ring| inbound_ring.is_connected)
        else {
            topic.has_unacknowledged &= topic.inbound_ring.is_some();
            return;
        };
        match self.transport.port.return_credit(inbound_ring.ring, is_quiet) {
            // What waits for the credit before it is not told yet.
            Ok(_) if is_quiet => {
                let receiver = self.transport.port.receiver(inbound_ring.ring);
                topic.has_unacknowledged =
                    receiver.is_ok_and(|receiver| receiver.has_unsent_credit());
            }
            Ok(_) => {}
            Err(error) => {
                topic.has_unacknowledged = false;
                tracing::debug!(%error, "a writer cannot be told");
                // What came before is read first; then the ring says that it is broken.
                self.ready(TopicSlot::In(place));
            }
        }
    }

    /// Where nobody makes room nobody wakes us either.
    fn retry_stalled(&mut self) {
        // At its turn it is seen whether it still is.
        for place in mem::take(&mut self.stalled_topics) {
            self.ready(TopicSlot::Out(place));
        }
    }

    /// What has a deadline.
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
