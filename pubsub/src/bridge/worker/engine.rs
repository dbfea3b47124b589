//! What the thread does: commands, the endpoint, and the topics that something happened for.

use std::collections::{BTreeSet, HashMap};
use std::mem;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crossbeam_channel::Receiver;
use fabric::ring::{News, ReceiverId, SenderId, Turn};
use fabric::{AddressVector, Domain, Peer};

use super::doorbell::{Announced, Doorbell};
use super::endpoint::Opened;
use super::renewal::Renewal;
use super::reports::Reports;
use super::topics::{InTopic, Name, OutTopic, Places, Task};
use super::{Command, NodeIdentity, Report, WorkerOptions};
use crate::bridge::deck::Deck;
use crate::bridge::inbound::Broken;
use crate::bridge::{Now, Progress, Side};

/// Outcomes of the endpoint between two looks at everything else.
const OUTCOMES: usize = 64;
/// Rounds without anything, after which writers are told what was read.
const QUIET: u32 = 16;
/// Failures of the endpoint itself, without a success between them, after which it is of no use.
const MOST_FAILURES: u32 = 1000;
/// The longest sleep while a device copies: nobody wakes us then.
pub(super) const SHORT: Duration = Duration::from_micros(50);
/// How often what has no room is tried again, beside when somebody says that there is: a sink the
/// less often the longer it had none, so that it costs little and is late by an eighth.
const AGAIN: Duration = Duration::from_millis(1);
const LATER: Duration = Duration::from_millis(20);
/// The longest sleep.
const SLEEP: Duration = Duration::from_millis(50);
/// Where a provider has nothing to sleep on it is looked at now and then, the less often the longer
/// nothing happened: what comes first after that is late by a thousandth of it, and no more than
/// the second of these, in nanoseconds.
const PAUSES: (u64, u64) = (200_000, 4_000_000);
/// How often it is looked after what has a deadline.
const LOOK: u64 = 100_000_000;
/// How often, at all topics, who did not answer; or a few times within the patience with those.
const ANSWERS: u64 = 1_000_000_000;

/// A worker's thread.
pub(super) struct Engine {
    pub(super) options: WorkerOptions,
    pub(super) deck: Deck,
    pub(super) addresses: AddressVector,
    /// Of the endpoint.
    pub(super) address: Vec<u8>,
    /// Of the further lanes.
    pub(super) lane_domains: Vec<Domain>,
    pub(super) commands: Receiver<Command>,
    pub(super) reports: Reports,
    pub(super) doorbell: Arc<Doorbell>,
    pub(super) outs: Places<OutTopic>,
    pub(super) ins: Places<InTopic>,
    pub(super) names: HashMap<Name, usize>,
    pub(super) senders: HashMap<SenderId, usize>,
    pub(super) receivers: HashMap<ReceiverId, usize>,
    pub(super) peers: HashMap<Vec<u8>, Peer>,
    /// Topics that are not sent any more, of which something is on its way.
    pub(super) leaving: Vec<OutTopic>,
    /// Topics that are not received any more, of which something is being copied.
    pub(super) coming: Vec<InTopic>,
    /// Rings that are being closed, of which node, and since when: their writers may never answer.
    pub(super) closing: Vec<(ReceiverId, NodeIdentity, u64)>,
    /// Why and when the endpoint is begun anew.
    pub(super) renewal: Renewal,
    /// Topics that are looked after in each round.
    pub(super) hot: Vec<Task>,
    /// Of those that are sent, such that had no room when they had their turn last.
    held_up: BTreeSet<usize>,
    /// Of those that are received, such whose writers may not know all.
    pub(super) untold: Vec<usize>,
    announced: Vec<Announced>,
    start: Instant,
    pub(super) now: Now,
    next_look: u64,
    next_look_for_answers: u64,
    pub(super) next_look_at_connections: u64,
    pub(super) connections: u64,
    failures: u32,
    pub(super) sleeps: u64,
    pub(super) is_over: bool,
}

pub(super) fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

impl Engine {
    pub(super) fn new(
        options: WorkerOptions,
        opened: Opened,
        commands: Receiver<Command>,
        reports: Reports,
    ) -> Self {
        let Opened { addresses, mut port, address, lane_domains, .. } = opened;
        let doorbell = Arc::new(Doorbell::new(port.parts().1.waker()));
        let all_slots = options.all_slots.max(2 * options.slots_by(port.lanes()));
        let deck = Deck::new(port, options.chunk as usize, all_slots);
        let mut engine = Self {
            options,
            deck,
            addresses,
            address,
            lane_domains,
            commands,
            reports,
            doorbell,
            outs: Places::new(),
            ins: Places::new(),
            names: HashMap::new(),
            senders: HashMap::new(),
            receivers: HashMap::new(),
            peers: HashMap::new(),
            leaving: Vec::new(),
            coming: Vec::new(),
            closing: Vec::new(),
            renewal: Renewal::default(),
            hot: Vec::new(),
            held_up: BTreeSet::new(),
            untold: Vec::new(),
            announced: Vec::new(),
            start: Instant::now(),
            now: Now { steady: 0, real: 0 },
            next_look: 0,
            next_look_for_answers: 0,
            next_look_at_connections: 0,
            connections: 0,
            failures: 0,
            sleeps: 0,
            is_over: false,
        };
        engine.look_at_clocks();
        // A worker that was started again is not taken for the one before.
        engine.connections = engine.now.real;
        engine
    }

    pub(super) fn doorbell(&self) -> Arc<Doorbell> {
        Arc::clone(&self.doorbell)
    }

    pub(super) fn look_at_clocks(&mut self) {
        let real = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.now = Now { steady: nanoseconds(self.start.elapsed()), real: nanoseconds(real) };
    }

    pub(super) fn run(&mut self) {
        let spin = nanoseconds(self.options.spin);
        let (mut moved, mut heard, mut idle) = (self.now.steady, self.now.steady, 0_u32);
        while !self.is_over {
            self.look_at_clocks();
            let mut has_moved = self.obey();
            has_moved |= self.hear_announced();
            has_moved |= self.turn_port();
            has_moved |= self.advance_hot(spin);
            self.look_after();
            if has_moved {
                (moved, heard, idle) = (self.now.steady, self.now.steady, 0);
                self.tell_some();
                continue;
            }
            idle = idle.saturating_add(1);
            if idle == QUIET {
                self.tell_quiet();
            }
            if self.now.steady - moved < spin {
                self.deck.port.pause();
                continue;
            }
            let pause = ((self.now.steady - heard) / 1000).clamp(PAUSES.0, PAUSES.1);
            self.deck.port.parts().1.pause_at_most(Duration::from_nanos(pause));
            self.rest();
            // What it was woken for is done first.
            self.look_at_clocks();
            moved = moved.max(self.now.steady.saturating_sub(spin));
        }
    }

    fn rest(&mut self) {
        let mut longest = SLEEP;
        for task in &self.hot {
            let seen = match task {
                Task::Out(place) => self.outs.get(*place).map(|topic| (topic.heat.progress, None)),
                Task::In(place) => self
                    .ins
                    .get(*place)
                    .map(|topic| (topic.heat.progress, topic.inbound.waits_since())),
            };
            let Some((progress, since)) = seen else { continue };
            if progress.is_copying {
                longest = longest.min(SHORT);
            } else if progress.is_waiting {
                let waited = since.map_or(0, |since| self.now.steady.saturating_sub(since));
                longest = longest.min(Duration::from_nanos(waited / 8).clamp(AGAIN, LATER));
            }
        }
        self.doorbell.sleeps(true);
        if self.commands.is_empty() && self.doorbell.is_silent() {
            self.sleeps += 1;
            let turn = self.deck.port.rest(longest);
            self.turned(turn);
            self.read_news();
        }
        self.doorbell.sleeps(false);
    }

    /// Gives the outcome of a turn its due. True if there was something.
    pub(super) fn turned(&mut self, turn: fabric::Result<Turn>) -> bool {
        match turn {
            Ok(Turn::Idle) => false,
            Ok(_) => {
                self.failures = 0;
                true
            }
            Err(error) => {
                tracing::debug!(%error, "a bridge's endpoint");
                self.failures += 1;
                if self.failures >= MOST_FAILURES {
                    tracing::error!(%error, "a bridge's endpoint is of no use any more");
                    self.is_over = true;
                }
                false
            }
        }
    }

    fn turn_port(&mut self) -> bool {
        let mut has_moved = false;
        for _ in 0..OUTCOMES {
            let turn = self.deck.port.turn();
            if !self.turned(turn) {
                break;
            }
            has_moved = true;
        }
        self.read_news() || has_moved
    }

    fn read_news(&mut self) -> bool {
        let mut has_any = false;
        while let Some(news) = self.deck.port.next_news() {
            has_any = true;
            match news {
                News::Read(ring) => {
                    if let Some(place) = self.receivers.get(&ring) {
                        self.heat(Task::In(*place));
                    }
                }
                News::Write(ring) => {
                    if let Some(place) = self.senders.get(&ring) {
                        self.heat(Task::Out(*place));
                    }
                }
            }
        }
        has_any
    }

    fn hear_announced(&mut self) -> bool {
        let mut announced = mem::take(&mut self.announced);
        self.doorbell.take(&mut announced);
        let has_any = !announced.is_empty();
        for one in announced.drain(..) {
            // Before it is looked at: what comes later is announced again.
            one.unlist();
            if let Some(place) = self.names.get(&Name::Out(one.key)).copied() {
                self.heat(Task::Out(place));
            }
        }
        self.announced = announced;
        has_any
    }

    /// Something happened for a topic.
    pub(super) fn heat(&mut self, task: Task) {
        let until = self.now.steady + nanoseconds(self.options.spin);
        let heat = match task {
            Task::Out(place) => self.outs.get(place).map(|topic| &mut topic.heat),
            Task::In(place) => self.ins.get(place).map(|topic| &mut topic.heat),
        };
        let Some(heat) = heat else { return };
        heat.until = until;
        if !mem::replace(&mut heat.is_listed, true) {
            self.hot.push(task);
        }
    }

    fn advance_hot(&mut self, spin: u64) -> bool {
        let mut has_moved = false;
        let mut at = 0;
        while let Some(task) = self.hot.get(at).copied() {
            let progress = match task {
                Task::Out(place) => self.advance_out(place),
                Task::In(place) => self.advance_in(place),
            };
            let now = self.now.steady;
            let heat = match task {
                Task::Out(place) => self.outs.get(place).map(|topic| &mut topic.heat),
                Task::In(place) => self.ins.get(place).map(|topic| &mut topic.heat),
            };
            let stays = heat.is_some_and(|heat| {
                heat.progress = progress;
                if progress.has_moved {
                    heat.until = now + spin;
                }
                heat.is_listed = now < heat.until || progress.is_copying || progress.is_waiting;
                heat.is_listed
            });
            has_moved |= progress.has_moved;
            if stays {
                at += 1;
            } else {
                self.hot.swap_remove(at);
            }
        }
        has_moved
    }

    fn advance_out(&mut self, place: usize) -> Progress {
        let Some(topic) = self.outs.get(place) else { return Progress::default() };
        match topic.outbound.advance(self.now, &mut *topic.source, &mut self.deck) {
            Ok(progress) => {
                if topic.outbound.is_held_up() {
                    self.held_up.insert(place);
                } else {
                    self.held_up.remove(&place);
                }
                while let Some((node, reason)) =
                    self.outs.get(place).and_then(|topic| topic.outbound.next_lost())
                {
                    self.lose_link(place, node, Some(reason));
                }
                progress
            }
            Err(error) => {
                let (key, side) = (topic.key, Side::Writer);
                self.reports.tell(Report::Failed { key, node: None, side, error });
                self.stop_sending(place);
                Progress::default()
            }
        }
    }

    fn advance_in(&mut self, place: usize) -> Progress {
        let Some(topic) = self.ins.get(place) else { return Progress::default() };
        let progress = match topic.advance(self.now, &mut self.deck) {
            Ok(progress) => progress,
            Err(Broken::Ring(reason)) => {
                self.lose_tap(place, reason);
                Progress { has_moved: true, ..Progress::default() }
            }
            Err(Broken::Topic(error)) => {
                let (key, node, side) = (topic.key, Some(topic.origin), Side::Reader);
                self.reports.tell(Report::Failed { key, node, side, error });
                self.stop_receiving(place, true);
                return Progress::default();
            }
        };
        if let Some(topic) = self.ins.get(place) {
            if topic.is_untold && !self.untold.contains(&place) {
                self.untold.push(place);
            }
            if topic.wish.is_some() && topic.inbound.is_drained() {
                self.make_offer(place);
            }
        }
        progress
    }

    /// Tells writers what was read, where a watermark was passed.
    fn tell_some(&mut self) {
        for at in 0..self.untold.len() {
            let place = self.untold[at];
            self.tell(place, false);
        }
    }

    /// Nothing else is going on: tells writers all that was read.
    fn tell_quiet(&mut self) {
        let untold = mem::take(&mut self.untold);
        for place in &untold {
            self.tell(*place, true);
        }
        let mut untold = untold;
        untold.retain(|place| self.ins.get(*place).is_some_and(|topic| topic.is_untold));
        self.untold = untold;
    }

    fn tell(&mut self, place: usize, is_quiet: bool) {
        let Some(topic) = self.ins.get(place) else { return };
        let Some(tap) = topic.tap.as_ref().filter(|tap| tap.is_connected) else {
            topic.is_untold &= topic.tap.is_some();
            return;
        };
        match self.deck.port.tell(tap.ring, is_quiet) {
            // What waits for the credit before it is not told yet.
            Ok(_) if is_quiet => {
                let receiver = self.deck.port.receiver(tap.ring);
                topic.is_untold = receiver.is_ok_and(|receiver| receiver.has_untold());
            }
            Ok(_) => {}
            Err(error) => {
                topic.is_untold = false;
                tracing::debug!(%error, "a writer cannot be told");
                // What came before is read first; then the ring says that it is broken.
                self.heat(Task::In(place));
            }
        }
    }

    /// Where nobody makes room nobody wakes us either.
    fn look_at_those_held_up(&mut self) {
        // At its turn it is seen whether it still is.
        for place in mem::take(&mut self.held_up) {
            self.heat(Task::Out(place));
        }
    }

    /// What has a deadline.
    fn look_after(&mut self) {
        if self.now.steady < self.next_look {
            return;
        }
        self.next_look = self.now.steady + LOOK;
        self.let_go();
        let patience = nanoseconds(self.options.patience);
        let now = self.now.steady;
        let is_late = |(_, _, since): &mut (ReceiverId, NodeIdentity, u64)| now - *since > patience;
        for (ring, node, _) in self.closing.extract_if(.., is_late).collect::<Vec<_>>() {
            self.bury(node, |port| port.give_up(ring));
        }
        self.deck.sweep();
        if now >= self.next_look_for_answers {
            self.next_look_for_answers = now + ANSWERS.min(patience / 8);
            self.look_for_answers(patience);
        }
        self.look_at_those_held_up();
        self.look_at_connections();
        self.renew_if_due();
    }
}
