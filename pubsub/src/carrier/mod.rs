//! Carries the messages of topics to other nodes, and from them: joins who is there
//! ([`peers`](crate::peers)) and what moves bytes ([`bridge`](crate::bridge)) with the topics
//! of this node.
//!
//! It belongs to the service's thread.

mod ear;
mod options;
mod plan;
mod receiving;
mod sink;
mod source;
mod told;

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;
use fabric::Policy;
use ipc::{Caller, MappedWords, Participant, Roster};
use nix::sys::eventfd::EventFd;

use self::ear::Ear;
use self::plan::{Local, Plan, Step};
use self::receiving::{Letter, Receiving};
use self::source::TopicSource;
use crate::bridge::{NodeId, Report, Side, TopicFacts, TopicKey, TopicOptions};
use crate::bridge::{Worker, WorkerOptions, Workers};
use crate::error::Result;
use crate::hall::Bell;
use crate::peers::{Change, Event, Interest, NodeIdentity, Peers, PeersOptions, SessionNumber};
use crate::pool::{Pool, PoolId};
use crate::service::protocol;
use crate::settings::{Reliability, SharedSettings};
use crate::topic::Topic;

pub use self::options::NetworkOptions;

/// How often it looks whether something has ended of which nobody tells.
const LOOK: Duration = Duration::from_millis(20);

/// In whose name the service works.
#[derive(Debug)]
pub(crate) struct Household {
    pub(crate) me: Participant,
    pub(crate) role: Participant,
    pub(crate) roster: Arc<Roster<MappedWords>>,
    /// Takes what pools are to grow by, and wakes who sees to it.
    pub(crate) growth: Sender<(PoolId, u64)>,
    pub(crate) bell: Arc<EventFd>,
}

impl Household {
    fn caller(&self) -> Caller<'_> {
        Caller::new(self.me, &*self.roster)
    }

    fn ask_to_grow(&self, pool: PoolId, bytes: u64) {
        // If there is no place it is asked for again.
        let _ = self.growth.try_send((pool, bytes));
        let _ = self.bell.write(1);
    }
}

/// What the service knows of a topic of its node.
#[derive(Debug, Clone)]
pub(crate) struct Facts {
    pub(crate) topic: Arc<Topic>,
    pub(crate) here: Arc<Pool>,
    pub(crate) arrivals: Arc<Pool>,
    pub(crate) publishes: bool,
    pub(crate) subscribes: bool,
}

/// A topic that is carried.
struct Sending {
    facts: Facts,
    /// Nothing leaves before it is open.
    gate: Arc<AtomicBool>,
    /// As long as the source lives.
    source: Weak<AtomicBool>,
}

/// One that is not carried any more, but whose source may still be at work.
struct Ending {
    facts: Facts,
    source: Weak<AtomicBool>,
    /// What is to be done when it has ended.
    later: VecDeque<Step>,
}

pub(crate) struct Carrier {
    options: NetworkOptions,
    household: Arc<Household>,
    peers: Peers,
    plan: Plan,
    ear: Ear,
    /// None until there is another node.
    workers: Option<Workers>,
    nodes: BTreeMap<NodeIdentity, SessionNumber>,
    topics: BTreeMap<String, Facts>,
    sending: BTreeMap<u32, Sending>,
    ending: BTreeMap<u32, Ending>,
    receiving: BTreeMap<(u32, NodeIdentity), Receiving>,
    /// What is to be done as soon as there are workers.
    postponed: Vec<Step>,
    /// Topics whose messages cannot be carried at all.
    given_up: Vec<u32>,
}

fn id(node: NodeIdentity) -> NodeId {
    NodeId(node.0)
}

fn key(number: u32) -> TopicKey {
    TopicKey(u64::from(number))
}

impl Carrier {
    pub(crate) fn start(
        options: &NetworkOptions,
        identity: NodeIdentity,
        label: &str,
        household: Arc<Household>,
        bell: Arc<Bell>,
    ) -> Result<Self> {
        let name = if options.name.is_empty() { label } else { &options.name };
        let peers = Peers::start(PeersOptions {
            listen: options.listen,
            peers: options.peers.clone(),
            rendezvous: options.rendezvous.clone(),
            insecure: options.insecure,
            lost_after: options.lost_after,
            ..PeersOptions::new(identity, name)
        })?;
        Ok(Self {
            plan: Plan::new(options.lost_after),
            ear: Ear::start(bell)?,
            options: options.clone(),
            household,
            peers,
            workers: None,
            nodes: BTreeMap::new(),
            topics: BTreeMap::new(),
            sending: BTreeMap::new(),
            ending: BTreeMap::new(),
            receiving: BTreeMap::new(),
            postponed: Vec::new(),
            given_up: Vec::new(),
        })
    }

    /// What becomes readable when there is something to do.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let workers = self.workers.iter().flat_map(Workers::all);
        std::iter::once(self.peers.descriptor()).chain(workers.map(Worker::wake_descriptor))
    }

    /// How long it may be left alone.
    pub(crate) fn longest_wait(&self, now: Instant) -> Option<Duration> {
        // What nobody publishes to any more, and is still owed.
        let is_abandoned = |facts: &Facts| {
            let sending = self.sending.get(&facts.topic.number());
            !facts.publishes && sending.is_some_and(Sending::has_backlog)
        };
        let looks = !self.ending.is_empty() || self.topics.values().any(is_abandoned);
        let planned = self.plan.deadline().map(|when| when.saturating_duration_since(now));
        if looks { Some(planned.unwrap_or(LOOK).min(LOOK)) } else { planned }
    }

    /// The topics of this node, as they are now.
    pub(crate) fn set_topics(&mut self, topics: BTreeMap<String, Facts>) {
        self.topics = topics;
        let present: Vec<u32> = self.topics.values().map(|facts| facts.topic.number()).collect();
        self.given_up.retain(|number| present.contains(number));
        let gone: Vec<_> = self
            .receiving
            .keys()
            .filter(|(number, _)| !present.contains(number))
            .copied()
            .collect();
        for (number, node) in gone {
            self.stop_receiving(number, node);
        }
        let interests = self.topics.iter().map(|(name, facts)| Interest {
            topic: name.clone(),
            publishes: facts.publishes,
            subscribes: facts.subscribes,
            settings: *facts.topic.settings(),
        });
        let interests: Vec<_> = interests.filter(|it| it.publishes || it.subscribes).collect();
        tracing::trace!(?interests, "told to other nodes");
        if let Err(error) = self.peers.set_interests(interests) {
            tracing::warn!(%error, "other nodes do not learn what there is here");
        }
        self.update();
    }

    /// Is something of the topic owed to other nodes, or about to be?
    pub(crate) fn holds(&self, number: u32) -> bool {
        let sending = self.sending.get(&number);
        self.ending.contains_key(&number) || sending.is_some_and(Sending::has_backlog)
    }

    /// Is somebody of this node in the way of what comes from others?
    pub(crate) fn waits(&self, number: u32) -> bool {
        let of_topic = self.receiving.iter().filter(|((topic, _), _)| *topic == number);
        of_topic.into_iter().any(|(_, receiving)| receiving.waits.load(Ordering::Acquire))
    }

    /// Sees to what happened.
    pub(crate) fn turn(&mut self) {
        while let Some(event) = self.peers.next_event() {
            self.hears(event);
        }
        self.hears_workers();
        let ended: Vec<u32> = self
            .ending
            .iter()
            .filter(|(_, ending)| ending.source.strong_count() == 0)
            .map(|(number, _)| *number)
            .collect();
        for number in ended {
            self.finish(number);
        }
        self.update();
    }

    fn hears(&mut self, event: Event) {
        tracing::trace!(?event, "from another node");
        match event {
            Event::Appeared { node, session, label, ours, .. } => {
                tracing::info!(%node, label, "another node is there");
                self.nodes.insert(node, session);
                self.plan.appears(node);
                self.begin_work(ours.ip());
            }
            Event::Interests { node, session, changes } => {
                if self.nodes.get(&node) == Some(&session) {
                    for change in changes {
                        match change {
                            Change::Set(it) => {
                                let wants = it.subscribes.then_some(it.settings);
                                self.plan.subscribes(node, &it.topic, wants);
                                self.tell_of_misfit(node, &it.topic, wants);
                            }
                            Change::Gone(topic) => self.plan.subscribes(node, &topic, None),
                        }
                    }
                }
            }
            Event::Letter { node, session, bytes } => {
                if self.nodes.get(&node) == Some(&session) {
                    self.reads(node, &bytes);
                }
            }
            Event::Vanished { node, session, reason } => {
                if self.nodes.get(&node) == Some(&session) {
                    tracing::info!(%node, %reason, "another node is gone");
                    self.nodes.remove(&node);
                    self.plan.vanishes(node);
                    for worker in self.workers.iter().flat_map(Workers::all) {
                        note(worker.lose_node(id(node)));
                    }
                    let gone: Vec<_> =
                        self.receiving.keys().filter(|(_, from)| *from == node).copied().collect();
                    for (number, node) in gone {
                        self.stop_receiving(number, node);
                    }
                }
            }
        }
        // Each by itself: one who goes and comes again begins anew.
        self.update();
    }

    fn tell_of_misfit(&self, node: NodeIdentity, name: &str, wants: Option<SharedSettings>) {
        let (Some(facts), Some(theirs)) = (self.topics.get(name), wants) else { return };
        let ours = facts.topic.settings();
        if !plan::fit(ours, &theirs) {
            tracing::warn!(
                topic = name, %node, %ours, %theirs,
                "another node wants a topic to be another one: its messages are not sent there"
            );
        }
    }

    /// Starts the workers, at the address from which the first node is reached.
    fn begin_work(&mut self, ours: IpAddr) {
        if self.workers.is_some() {
            return;
        }
        let require = self.options.provider.iter().cloned().collect();
        let options = WorkerOptions {
            policy: Policy { require, ..Policy::default() },
            ..WorkerOptions::default()
        };
        let local = self.options.source.unwrap_or(ours);
        match Workers::start(self.options.workers, options, local) {
            Ok(workers) => {
                let first = workers.all().next().map(|worker| worker.address().provider.clone());
                tracing::info!(%local, provider = first, "messages go between nodes");
                self.workers = Some(workers);
                for step in std::mem::take(&mut self.postponed) {
                    self.does(step);
                }
            }
            Err(error) => tracing::error!(%error, %local, "no messages can go between nodes"),
        }
    }

    /// Brings everything up to date with what is known.
    fn update(&mut self) {
        let topics =
            self.topics.iter().filter(|(_, facts)| !self.given_up.contains(&facts.topic.number()));
        let topics = topics.map(|(name, facts)| {
            let number = facts.topic.number();
            let backlog = self.sending.get(&number).is_some_and(Sending::has_backlog);
            let local = Local {
                number,
                settings: *facts.topic.settings(),
                has_messages: facts.publishes || backlog,
                noted: facts.topic.destinations().into_iter().map(NodeIdentity).collect(),
            };
            (name.clone(), local)
        });
        let topics = topics.collect();
        for step in self.plan.update(Instant::now(), &topics) {
            tracing::debug!(?step, "carrying");
            self.does(step);
        }
    }

    fn facts(&self, number: u32) -> Option<&Facts> {
        self.topics.values().find(|facts| facts.topic.number() == number)
    }

    /// Does a step of the plan, now or when it can be done.
    fn does(&mut self, step: Step) {
        let (Step::Carry(number)
        | Step::Note(number, _)
        | Step::Keep(number, _)
        | Step::Send(number, _)
        | Step::Forget(number, _)
        | Step::Leave(number)) = step;
        if let Some(ending) = self.ending.get_mut(&number) {
            ending.later.push_back(step);
            return;
        }
        if let Step::Note(_, node) = step {
            let is_noted = self.facts(number).is_none_or(|it| it.topic.note_destination(&node.0));
            if !is_noted {
                tracing::warn!(%node, "too many nodes want a topic: it may miss some if this service ends");
            }
            return;
        }
        if self.workers.is_none() {
            // What it is about lies in shared memory, and waits there.
            self.postponed.push(step);
            return;
        }
        match step {
            Step::Carry(_) => self.carry(number),
            Step::Keep(_, node) => self.add(number, node),
            Step::Send(_, node) => {
                self.add(number, node);
                if let Some(sending) = self.sending.get(&number) {
                    sending.gate.store(true, Ordering::Release);
                }
                self.ear.repeat(number);
            }
            Step::Forget(_, node) => {
                if let Some(workers) = &self.workers {
                    note(workers.of(key(number)).remove_destination(key(number), id(node)));
                }
                if let Some(sending) = self.sending.get(&number) {
                    sending.facts.topic.forget_destination(&node.0);
                }
            }
            Step::Leave(_) => self.leave(number),
            Step::Note(..) => {}
        }
    }

    fn add(&self, number: u32, node: NodeIdentity) {
        if let (Some(workers), true) = (&self.workers, self.sending.contains_key(&number)) {
            note(workers.of(key(number)).add_destination(key(number), id(node)));
        }
    }

    /// Keeps a topic's messages for other nodes from now on.
    fn carry(&mut self, number: u32) {
        let Some(facts) = self.facts(number).cloned() else { return };
        let Some(workers) = &self.workers else { return };
        let (topic, gate) = (&facts.topic, Arc::new(AtomicBool::new(false)));
        let settings = topic.settings();
        // Held by the source alone: when it is gone the source is.
        let (alive, source) = {
            let alive = Arc::new(AtomicBool::new(true));
            let source =
                TopicSource::new(&self.household, topic, &facts.here, &gate, Arc::clone(&alive));
            (Arc::downgrade(&alive), source)
        };
        let is_kept = settings.reliability == Reliability::Reliable;
        let options = TopicOptions {
            facts: TopicFacts {
                number: u64::from(number),
                largest: settings.largest,
                depth: settings.depth,
            },
            keep: (!is_kept).then_some(settings.depth as usize),
        };
        let sent = source.and_then(|source| {
            workers.of(key(number)).send_topic(key(number), options, Box::new(source))
        });
        match sent {
            Ok(announcer) => {
                topic.set_carried(true);
                self.ear.listen(topic, announcer);
                self.sending.insert(number, Sending { facts, gate, source: alive });
            }
            Err(error) => {
                tracing::error!(%error, "the messages of a topic do not go to other nodes");
                self.given_up.push(number);
            }
        }
    }

    /// Does not keep them any more.
    fn leave(&mut self, number: u32) {
        let Some(Sending { facts, source, .. }) = self.sending.remove(&number) else { return };
        self.ear.ignore(number);
        facts.topic.set_carried(false);
        if let Some(workers) = &self.workers {
            note(workers.of(key(number)).stop_sending(key(number)));
        }
        // Whoever subscribes in the role's name next must not lose that to the one before.
        self.ending.insert(number, Ending { facts, source, later: VecDeque::new() });
    }

    /// The source has ended: what it held is let go of, and what was asked for since is done.
    fn finish(&mut self, number: u32) {
        let Some(Ending { facts, later, .. }) = self.ending.remove(&number) else { return };
        let household = &self.household;
        let stopped = facts.topic.stop_carrying(&household.caller(), household.role, &facts.here);
        if let Err(error) = stopped {
            tracing::debug!(%error, "cannot stop carrying a topic yet");
            self.ending.insert(number, Ending { facts, source: Weak::new(), later });
            return;
        }
        for step in later {
            self.does(step);
        }
    }

    fn hears_workers(&mut self) {
        let mut reports = Vec::new();
        for worker in self.workers.iter().flat_map(Workers::all) {
            while let Ok(Some(report)) = worker.try_report() {
                reports.push(report);
            }
        }
        for report in reports {
            self.hears_worker(report);
        }
    }

    fn hears_worker(&mut self, report: Report) {
        let number = |key: TopicKey| key.0 as u32;
        match report {
            Report::Letter { key, node, letter, .. } => {
                let node = NodeIdentity(node.0);
                let (Some(session), Some(facts)) = (self.nodes.get(&node), self.facts(number(key)))
                else {
                    return;
                };
                let topic = facts.topic.name().to_owned();
                let letter = protocol::encode(&Letter { topic, terms: letter });
                if let Err(error) = self.peers.tell(node, *session, letter) {
                    tracing::debug!(%error, %node, "a letter was not sent");
                }
            }
            Report::Connected { key, node, side } => {
                tracing::debug!(?key, %node, ?side, "a topic is connected");
            }
            Report::Lost { key, node, side, reason } => {
                tracing::debug!(?key, %node, ?side, %reason, "a topic's line broke");
                if side == Side::Writer {
                    self.plan.breaks(Instant::now(), number(key), NodeIdentity(node.0));
                }
            }
            Report::Failed { key: Some(key), node: Some(node), error } => {
                tracing::error!(%error, ?key, %node, "a topic cannot go between two nodes");
                let (number, node) = (number(key), NodeIdentity(node.0));
                if self.receiving.contains_key(&(number, node)) {
                    self.stop_receiving(number, node);
                } else {
                    self.plan.refuses(number, node);
                }
            }
            Report::Failed { key: Some(key), node: None, error } => {
                tracing::error!(%error, ?key, "a topic does not go to other nodes any more");
                // Whoever publishes must not wait for what nobody takes.
                self.given_up.push(number(key));
            }
            Report::Failed { key: None, error, .. } => {
                tracing::error!(%error, "nothing goes to other nodes any more");
                let all = self.sending.keys().copied();
                self.given_up.extend(all);
            }
        }
    }
}

impl Sending {
    /// Has somebody something to take of it yet?
    fn has_backlog(&self) -> bool {
        let here = self.facts.topic.here();
        let mut seats = here.seats().filter(|seat| seat.who().is_some_and(Participant::is_role));
        seats.any(|seat| here.backlog_of(seat) != (0, 0))
    }
}

impl Drop for Carrier {
    fn drop(&mut self) {
        // Sources and sinks go first: they use names of this service.
        self.workers = None;
    }
}

fn note(done: Result<()>) {
    if let Err(error) = done {
        tracing::warn!(%error, "a worker does not take what it is told");
    }
}
