//! The workers that move messages: where they are, what they are told, and what they say.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, TryRecvError, bounded};

use super::letters::Letter;
use super::rest::Rest;
use super::{Carrier, key};
use crate::bridge::Command;
use crate::bridge::{Report, Side, TopicKey, Worker, WorkerOptions, Workers};
use crate::error::{Error, ErrorKind, Result};
use crate::peers::{NodeIdentity, is_here};

/// How long to wait until it is tried again to start them.
const RESTS: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(60));
/// Reports of one worker that are heard before others have their turn.
const REPORTS: usize = 1024;

/// How workers are started.
pub(super) type Open = fn(usize, &WorkerOptions, IpAddr) -> Result<Workers>;

/// Workers that are being started.
pub(super) struct Opening {
    local: IpAddr,
    since: Instant,
    outcome: Receiver<Result<Workers>>,
    /// It takes so long that nothing waits for it any more.
    is_late: bool,
}

/// How long the end of a service waits for a provider that is being opened.
const FAREWELL: Duration = Duration::from_secs(5);

impl Opening {
    /// Waits for it, lest the process ends while a provider is in the middle of it. One that hangs is
    /// left behind.
    pub(super) fn end(self) {
        drop(self.outcome.recv_timeout(FAREWELL));
    }
}

/// Can workers at this address be reached from others that are reached from that one?
fn serves(local: IpAddr, wanted: IpAddr) -> bool {
    let is_far = |address: IpAddr| !address.to_canonical().is_loopback();
    // From another address of this machine the system finds its way; but nobody else reaches its
    // loopback.
    local == wanted || is_far(local) && is_here(local) || !is_far(wanted)
}

impl Carrier {
    /// Starts the workers when there is another node, at an address from which it is reached, and
    /// anew if one has ended, or if they are where later nodes do not reach them.
    pub(super) fn see_to_workers(&mut self, now: Instant) {
        let ours = || {
            let addresses = || self.nodes.values().map(|node| node.ours);
            let far = addresses().find(|address| !address.to_canonical().is_loopback());
            far.or_else(|| addresses().next())
        };
        let local = self.options.source.or_else(ours);
        if let Some(opening) = &mut self.opening {
            // Also when all nodes have left meanwhile: what was opened is taken.
            let (place, outcome) = (opening.local, opening.outcome.try_recv());
            let outcome = match outcome {
                Err(TryRecvError::Empty) if local.is_none_or(|local| serves(place, local)) => {
                    return self.is_still_opening(now);
                }
                // At an address that others do not reach any more: its thread closes it again.
                Err(TryRecvError::Empty) => None,
                Ok(outcome) => Some(outcome),
                Err(TryRecvError::Disconnected) => {
                    let detail = "the thread that opens a provider panicked";
                    Some(Err(Error::new("open a provider", ErrorKind::Failed, detail)))
                }
            };
            self.opening = None;
            if let Some(outcome) = outcome {
                return self.has_opened(now, place, outcome);
            }
        }
        let Some(local) = local else { return };
        if self.workers.is_some() {
            if self.local.is_some_and(|now| serves(now, local)) {
                return;
            }
            tracing::info!(%local, "other nodes reach this one at another address");
            self.retire_workers();
        }
        if self.workers_rest.is_some_and(|rest| !rest.is_over(now)) {
            return;
        }
        match self.begin_to_open(now, local) {
            Ok(opening) => {
                self.opening = Some(opening);
                // No node is promised anything that cannot be kept for it yet.
                self.plan.set_can_send(false);
            }
            Err(error) => self.has_opened(now, local, Err(error)),
        }
    }

    /// A provider is opened by a thread of its own: one that hangs holds up nothing but the messages
    /// that go between nodes.
    fn begin_to_open(&self, now: Instant, local: IpAddr) -> Result<Opening> {
        let options = WorkerOptions {
            policy: self.options.policy()?,
            lanes: self.options.lanes,
            ..WorkerOptions::default()
        };
        let (count, open) = (self.options.workers, self.open);
        let (told, outcome) = bounded(1);
        let bell = Arc::clone(&self.household.bell);
        std::thread::Builder::new()
            .name("fabricast-open".into())
            .spawn(move || {
                // If nothing waits for it any more, it is closed again here.
                let _ = told.send(open(count, &options, local));
                bell.ring();
            })
            .map_err(|error| Error::of("open a provider", error))?;
        Ok(Opening { local, since: now, outcome, is_late: false })
    }

    /// Other nodes do not wait for a provider that takes long.
    fn is_still_opening(&mut self, now: Instant) {
        let longest = self.longest_opening();
        let Some(opening) = self.opening.as_mut().filter(|it| !it.is_late) else { return };
        if now < opening.since + longest {
            return;
        }
        opening.is_late = true;
        let local = opening.local;
        let why = format!(
            "opening a provider at {local} takes longer than {longest:?}; the setting \"provider\" chooses another"
        );
        tracing::error!(why, "no messages go between nodes until a provider is open");
        self.why_no_workers = Some(why);
        self.plan.set_can_send(false);
        self.speak_to_all();
        self.stir_all();
    }

    fn longest_opening(&self) -> Duration {
        self.options.lost_after / 2
    }

    /// When it is to be looked again at a provider that is being opened, if nothing tells before.
    pub(super) fn late_opening(&self) -> Option<Instant> {
        let opening = self.opening.as_ref().filter(|it| !it.is_late)?;
        Some(opening.since + self.longest_opening())
    }

    /// Those that have come are told what there is here, unless it is about to be known by what
    /// messages go: who knows that nothing can go here does not keep anything for this node.
    pub(super) fn speak_unless_opening(&mut self) {
        if self.opening.as_ref().is_none_or(|it| it.is_late) {
            self.speak_to_all();
        }
    }

    fn speak_to_all(&mut self) {
        for (node, session) in std::mem::take(&mut self.unspoken) {
            if let Err(error) = self.peers.speak_to(node, session) {
                tracing::warn!(%error, %node, "it does not learn what there is here");
            }
        }
    }

    fn has_opened(&mut self, now: Instant, local: IpAddr, outcome: Result<Workers>) {
        match outcome {
            Ok(workers) => {
                if let Some(first) = workers.all().next() {
                    let provider = &first.provider().name;
                    tracing::info!(%local, provider, "messages go between nodes");
                    self.has_provider(first.provider());
                }
                (self.workers, self.local) = (Some(workers), Some(local));
                self.why_no_workers = None;
            }
            Err(error) => {
                // It is tried again and again: said once is enough.
                let why = error.to_string();
                match self.why_no_workers.as_ref() == Some(&why) {
                    true => tracing::debug!(why, %local, "still no messages can go between nodes"),
                    false => tracing::error!(why, %local, "no messages can go between nodes"),
                }
                self.why_no_workers = Some(why);
                self.workers_rest = Some(Rest::after(self.workers_rest, now, RESTS));
            }
        }
        self.plan.set_can_send(self.workers.is_some());
        self.speak_to_all();
        self.stir_all();
    }

    /// Lets go of the workers, which may take a while; others go on with all that they did.
    fn retire_workers(&mut self) {
        let Some(workers) = self.workers.take() else { return };
        for (number, line) in &mut self.lines {
            self.ear.ignore(*number);
            line.loses_its_worker();
        }
        self.stir_all();
        self.stop_receiving_all();
        self.counts.clear();
        let farewell = std::thread::Builder::new()
            .name("fabricast-farewell".into())
            .spawn(move || drop(workers));
        self.farewells.retain(|farewell| !farewell.is_finished());
        match farewell {
            Ok(farewell) => self.farewells.push(farewell),
            // They ended here, then.
            Err(error) => tracing::debug!(%error, "no thread for workers that end"),
        }
    }

    /// Tells the worker of a topic something. If it has ended others take its place, and are told all
    /// anew.
    pub(super) fn tell(&self, number: u32, what: impl FnOnce(&Worker) -> Result<()>) {
        let Some(workers) = &self.workers else { return };
        if let Err(error) = what(workers.of(key(number))) {
            tracing::debug!(%error, "a worker does not take what it is told");
        }
    }

    /// Tells all workers of a node that is gone, before it is connected to anew.
    pub(super) fn lose_node(&self, node: NodeIdentity) {
        for worker in self.workers.iter().flat_map(Workers::all) {
            let _ = worker.tell(Command::LoseNode(node));
        }
    }

    /// The connection with a node was lost, and is back. What the workers' connections with it have on
    /// their way the system sends again when it likes, which is the later the longer the link was
    /// down: other ones begin at once.
    pub(super) fn renew_connections(&self, node: NodeIdentity) {
        for worker in self.workers.iter().flat_map(Workers::all) {
            let _ = worker.tell(Command::Returned(node));
        }
    }

    pub(super) fn hears_workers(&mut self, now: Instant) {
        let (mut reports, mut has_ended) = (Vec::new(), false);
        for worker in self.workers.iter().flat_map(Workers::all) {
            for count in 0..=REPORTS {
                match worker.try_report() {
                    Ok(Some(report)) => reports.push(report),
                    Ok(None) => break,
                    Err(_) => {
                        has_ended = true;
                        break;
                    }
                }
                self.is_behind |= count == REPORTS;
            }
        }
        for report in reports {
            self.hears_worker(now, report);
        }
        if has_ended {
            tracing::error!("a thread that moves messages between nodes has ended: anew");
            self.workers_rest = Some(Rest::after(self.workers_rest, now, RESTS));
            self.retire_workers();
            self.plan.set_can_send(false);
            self.stir_all();
        }
    }

    fn hears_worker(&mut self, now: Instant, report: Report) {
        let number = |key: TopicKey| key.0 as u32;
        match report {
            Report::Letter { key, node, terms } => {
                let Some(line) = self.lines.get(&number(key)) else { return };
                let topic = line.facts.topic.name().to_owned();
                self.write(node, &Letter::Terms { topic, terms });
            }
            Report::Connected { key, node, side } => {
                tracing::debug!(?key, %node, ?side, "a topic is connected");
                if let Some(line) = self.lines.get(&number(key)) {
                    self.misfits.goes(line.facts.topic.name(), (node, side));
                }
            }
            Report::Lost { key, node, side, reason } => {
                tracing::debug!(?key, %node, ?side, %reason, "a topic's line broke");
                if side == Side::Writer {
                    self.plan.breaks(now, number(key), node);
                    self.agenda.stir(number(key));
                }
            }
            Report::Behind { key, node } => self.is_behind_with(now, number(key), node),
            Report::Failed { key, node: Some(node), side, error } => {
                let (number, node) = (number(key), node);
                let label = self.known.label(node);
                tracing::error!(%error, ?key, %node, label, ?side, "a topic cannot go between two nodes");
                // Of one that is gone nothing is noted that only its coming back would end.
                let is_there = self.nodes.contains_key(&node);
                if let Some(line) = self.lines.get(&number).filter(|_| is_there) {
                    let topic = line.facts.topic.name();
                    self.misfits.fails(topic, (node, side), &error.to_string());
                }
                match side {
                    Side::Reader => self.stop_receiving(number, node),
                    Side::Writer => {
                        if is_there {
                            self.plan.refuses(number, node);
                        }
                        self.agenda.stir(number);
                    }
                }
            }
            Report::Failed { key, node: None, error, .. } => {
                tracing::error!(%error, ?key, "a topic does not go to other nodes for now");
                // Whoever publishes must not wait for what nobody takes.
                if let Some(line) = self.lines.get_mut(&number(key)) {
                    self.ear.ignore(number(key));
                    line.fails(now);
                    self.agenda.stir(number(key));
                }
            }
        }
    }

    /// Sends a letter to a node, if it is there.
    pub(super) fn write(&self, node: NodeIdentity, letter: &Letter) {
        let Some(there) = self.nodes.get(&node) else { return };
        if let Err(error) = self.peers.tell(node, there.session, letter.encode()) {
            tracing::debug!(%error, %node, "a letter was not sent");
        }
    }

    /// How long a destination may take nothing while others wait because of that: longer than it
    /// takes to find out that its node is gone, or to remove there who is in the way.
    pub(crate) fn patience(&self, number: u32) -> Duration {
        let line = self.lines.get(&number);
        let release = line.map(|line| line.facts.topic.settings().release_deadline());
        2 * (self.options.lost_after + release.unwrap_or_default())
    }

    /// What other nodes are owed of a topic is in the way, and has been for as long as that may be.
    pub(crate) fn is_in_the_way(&mut self, number: u32) {
        let Some(line) = self.lines.get(&number) else { return };
        if line.is_carried() {
            // It knows who takes nothing.
            self.tell(number, |worker| worker.tell(Command::ReportBehind(key(number))));
            return;
        }
        let nodes: Vec<_> = self.plan.destinations(number).map(|(node, _)| node).collect();
        for node in nodes {
            self.is_behind_with(Instant::now(), number, node);
        }
    }

    fn is_behind_with(&mut self, now: Instant, number: u32, node: NodeIdentity) {
        let patience = self.patience(number);
        if self.plan.falls_behind(now, (number, node), patience) {
            self.agenda.stir(number);
            let topic = self.lines.get(&number).map(|line| line.facts.topic.name());
            tracing::warn!(
                topic, %node, label = self.known.label(node), ?patience,
                "a node took nothing for too long while others waited: it will miss messages"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_at_the_loopback_is_reached_from_there_only() {
        let [loopback, near, far] =
            ["127.0.0.1", "::ffff:127.0.0.1", "10.0.0.1"].map(|it| it.parse::<IpAddr>().unwrap());
        assert!(serves(loopback, loopback) && serves(loopback, near) && serves(far, loopback));
        assert!(!serves(loopback, far) && !serves(near, far));
        // Where this machine cannot be reached, whatever it was.
        assert!(!serves("192.0.2.1".parse().unwrap(), far));
    }
}
