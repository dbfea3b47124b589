//! Carries the messages of topics to other nodes, and from them: joins who is there
//! ([`peers`](crate::peers)) and what moves bytes ([`bridge`](crate::bridge)) with the topics
//! of this node.
//!
//! It belongs to the service's thread.

mod agenda;
mod beginnings;
mod ear;
mod known;
mod letters;
mod lines;
mod misfits;
mod obituaries;
mod options;
mod plan;
mod providers;
mod published;
mod receiving;
mod rest;
mod room;
mod sink;
mod source;
#[cfg(test)]
mod tests;
mod told;
mod work;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;
use ipc::{Caller, MappedWords, Participant, Roster};

use self::agenda::Agenda;
use self::beginnings::Beginning;
use self::ear::Ear;
use self::known::Known;
use self::lines::{Line, State};
use self::misfits::Misfits;
use self::plan::{Plan, of_topic};
use self::receiving::{Parting, Receiving};
use self::told::Count;
use self::work::{Open, Opening};
use crate::bridge::{Provider, TopicKey, Worker, Workers};
use crate::error::Result;
use crate::hall::Bell;
use crate::lock::lock;
use crate::log_limit::LogLimit;
use crate::peers::{Change, Event, Interest, NodeIdentity, Peers, SessionNumber};
use crate::pool::{Pool, PoolId};
use crate::topic::Topic;
use crate::wake::WakeFd;

#[cfg(any(test, feature = "fuzzing"))]
pub use self::letters::read_letter;
pub(crate) use self::lines::{is_owed, let_go};
pub use self::options::NetworkOptions;
pub(crate) use self::rest::Rest;

/// How often it looks whether something has ended of which nobody tells.
const LOOK: Duration = Duration::from_millis(20);
/// Events of other nodes that are heard before others have their turn.
const EVENTS: usize = 64;
/// How long to wait for a lock that a living process holds: what it is needed for is done later,
/// and who waits here has other things to do.
const PATIENCE: Duration = Duration::from_millis(20);

/// Held by who looks through what a dead writer of arrivals left: one at a time.
pub(crate) type Settling = Arc<Mutex<()>>;

/// Topics at which what comes from other nodes began to wait for room.
pub(crate) type Crowded = Arc<Mutex<BTreeSet<u32>>>;

/// In whose name the service works.
#[derive(Debug)]
pub(crate) struct Household {
    pub(crate) me: Participant,
    pub(crate) role: Participant,
    pub(crate) roster: Arc<Roster<MappedWords>>,
    /// Takes what pools are to grow by, and wakes who sees to it.
    pub(crate) growth: Sender<(PoolId, u64)>,
    pub(crate) bell: Arc<WakeFd>,
    pub(crate) crowded: Crowded,
    pub(crate) settling: Settling,
}

impl Household {
    fn caller(&self) -> Caller<'_> {
        Caller { patience: PATIENCE, ..Caller::new(self.me, &*self.roster) }
    }

    fn ask_to_grow(&self, pool: PoolId, bytes: u64) {
        // If there is no place it is asked for again.
        let _ = self.growth.try_send((pool, bytes));
        self.bell.ring();
    }

    /// What comes from another node waits for room: who is in the way has to be found.
    fn is_crowded(&self, number: u32) {
        lock(&self.crowded).insert(number);
        self.bell.ring();
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

impl Facts {
    fn are_as(&self, others: &Self) -> bool {
        let takes_part = |facts: &Self| (facts.publishes, facts.subscribes);
        Arc::ptr_eq(&self.topic, &others.topic) && takes_part(self) == takes_part(others)
    }
}

/// Another node that is there.
struct Remote {
    session: SessionNumber,
    /// From where it is reached.
    ours: IpAddr,
    /// What carries messages there, as soon as it has said so.
    provider: Option<Provider>,
    /// How often it said that this is another one.
    changes: u32,
}

pub(crate) struct Carrier {
    options: NetworkOptions,
    household: Arc<Household>,
    peers: Peers,
    plan: Plan,
    agenda: Agenda,
    /// How often a topic was looked at.
    #[cfg(test)]
    looks: u64,
    misfits: Misfits,
    /// What carries messages here, or did last.
    provider: Option<Provider>,
    ear: Ear,
    nodes: BTreeMap<NodeIdentity, Remote>,
    known: Known,
    /// None until there is another node, and while none can be started.
    workers: Option<Workers>,
    /// Where they are.
    local: Option<IpAddr>,
    workers_rest: Option<Rest>,
    /// Those that are being started, and how.
    opening: Option<Opening>,
    open: Open,
    /// Nodes that are not told yet what there is here.
    unspoken: Vec<(NodeIdentity, SessionNumber)>,
    /// Why there are none, if they could not be started.
    why_no_workers: Option<String>,
    /// Workers that end.
    farewells: Vec<JoinHandle<()>>,
    /// What they counted last.
    counts: Vec<Count>,
    names: BTreeMap<String, u32>,
    lines: BTreeMap<u32, Line>,
    receiving: BTreeMap<(u32, NodeIdentity), Receiving>,
    /// Where those begin that are about to be received, as far as it was told.
    beginnings: BTreeMap<(u32, NodeIdentity), Beginning>,
    /// Sinks that end.
    parting: Vec<Parting>,
    /// Something is to be tried again soon, of which nobody tells.
    is_behind: bool,
    began: Instant,
    /// Of what other nodes can cause.
    log: LogLimit,
}

fn key(number: u32) -> TopicKey {
    TopicKey(u64::from(number))
}

impl Carrier {
    /// Other nodes see this one from now on. What it subscribes to they are told with the first
    /// [topics](Self::set_topics). Whoever tries that again and again
    /// [says](NetworkOptions::say_if_insecure) itself what is to be said once.
    pub(crate) fn start(
        options: &NetworkOptions,
        identity: NodeIdentity,
        label: &str,
        household: Arc<Household>,
        bell: Arc<Bell>,
    ) -> Result<Self> {
        let peers = Peers::start(options, identity, label)?;
        Ok(Self {
            plan: Plan::new(options.lost_after),
            agenda: Agenda::new(Instant::now()),
            #[cfg(test)]
            looks: 0,
            misfits: Misfits::default(),
            provider: None,
            ear: Ear::start(bell, Arc::clone(&household.bell))?,
            options: options.clone(),
            household,
            peers,
            nodes: BTreeMap::new(),
            known: Known::default(),
            workers: None,
            local: None,
            workers_rest: None,
            opening: None,
            open: Workers::start,
            unspoken: Vec::new(),
            why_no_workers: None,
            farewells: Vec::new(),
            counts: Vec::new(),
            names: BTreeMap::new(),
            lines: BTreeMap::new(),
            receiving: BTreeMap::new(),
            beginnings: BTreeMap::new(),
            parting: Vec::new(),
            is_behind: false,
            began: Instant::now(),
            log: LogLimit::new(),
        })
    }

    /// May one more line be logged that another node causes?
    fn may_log(&mut self, now: Instant) -> bool {
        self.log.allows(now.saturating_duration_since(self.began))
    }

    /// May one more line be logged of a node that comes or goes?
    fn may_log_of(&mut self, now: Instant, node: NodeIdentity) -> bool {
        let since = now.saturating_duration_since(self.began);
        let is_there = |node: &NodeIdentity| self.nodes.contains_key(node);
        self.known.may_log(node, since, is_there) && self.log.allows(since)
    }

    /// How the next service of this node is to be connected: at the port and by the name that other
    /// nodes know.
    pub(crate) fn legacy(&self, label: &str) -> NetworkOptions {
        NetworkOptions {
            listen: self.peers.listens().or(self.options.listen),
            name: self.options.name(label).to_owned(),
            ..self.options.clone()
        }
    }

    /// What becomes readable when there is something to do.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let workers = self.workers.iter().flat_map(Workers::all);
        std::iter::once(self.peers.descriptor()).chain(workers.map(Worker::wake_descriptor))
    }

    /// How long it may be left alone.
    pub(crate) fn longest_wait(&self, now: Instant) -> Option<Duration> {
        let looks = self.is_behind || !self.parting.is_empty();
        let workers = self.workers_rest.filter(|rest| self.workers.is_none() && !rest.is_over(now));
        let deadlines = self.agenda.deadline(now, LOOK).into_iter();
        let deadline = deadlines
            .chain(workers.map(|rest| rest.until()))
            .chain(looks.then_some(now + LOOK))
            .chain(self.late_opening())
            .min();
        deadline.map(|when| when.saturating_duration_since(now))
    }

    /// Who takes part in these topics has changed, or did for a moment.
    pub(crate) fn have_changed(&mut self, topics: &BTreeSet<u32>) {
        self.agenda.stir_all(topics.iter().copied());
    }

    /// The topics of this node, as they are now.
    pub(crate) fn set_topics(&mut self, topics: BTreeMap<String, Facts>) {
        self.names = topics.iter().map(|(name, it)| (name.clone(), it.topic.number())).collect();
        let interests = topics.iter().map(|(name, facts)| Interest {
            topic: name.clone(),
            publishes: facts.publishes,
            subscribes: facts.subscribes,
            settings: *facts.topic.settings(),
        });
        let interests: Vec<_> = interests.filter(|it| it.publishes || it.subscribes).collect();
        let present: BTreeSet<_> = topics.values().map(|facts| facts.topic.number()).collect();
        for (number, line) in &mut self.lines {
            if !present.contains(number) && !std::mem::replace(&mut line.is_gone, true) {
                self.misfits.is_other_here(line.facts.topic.name());
                self.agenda.stir(*number);
            }
        }
        for facts in topics.into_values() {
            let number = facts.topic.number();
            let is_as_before = |line: &Line| !line.is_gone && line.facts.are_as(&facts);
            if self.lines.get(&number).is_some_and(is_as_before) {
                continue;
            }
            self.misfits.is_other_here(facts.topic.name());
            match self.lines.get_mut(&number) {
                Some(line) => (line.facts, line.is_gone) = (facts, false),
                None => drop(self.lines.insert(number, Line::new(facts))),
            }
            self.agenda.stir(number);
        }
        self.stop_receiving_unwanted();
        tracing::trace!(?interests, "told to other nodes");
        if let Err(error) = self.peers.set_interests(interests) {
            tracing::warn!(%error, "other nodes do not learn what there is here");
        }
        self.look_for_misfits();
        self.update(Instant::now());
    }

    /// Is something of the topic owed to other nodes, or about to be?
    pub(crate) fn holds(&self, number: u32) -> bool {
        self.lines.get(&number).is_some_and(Line::holds)
    }

    /// Is somebody of this node in the way of what comes from others?
    pub(crate) fn waits(&self, number: u32) -> bool {
        let Some(line) = self.lines.get(&number) else { return false };
        let holds = line.facts.topic.refusal_holds();
        let mut of_topic = self.receiving.range(of_topic(number));
        of_topic.any(|(_, receiving)| receiving.room.is_wanted(holds))
    }

    /// Sees to what happened.
    pub(crate) fn turn(&mut self) {
        let now = Instant::now();
        self.is_behind = false;
        for _ in 0..EVENTS {
            // If there are more, they say so.
            let Some(event) = self.peers.next_event() else { break };
            self.hears(now, event);
        }
        self.look_for_misfits();
        self.hears_workers(now);
        self.see_to_workers(now);
        self.see_to_receiving();
        self.tell_of_quiet_publishers();
        self.update(now);
    }

    fn is_session(&self, node: NodeIdentity, session: SessionNumber) -> bool {
        self.nodes.get(&node).is_some_and(|there| there.session == session)
    }

    fn hears(&mut self, now: Instant, event: Event) {
        tracing::trace!(?event, "from another node");
        match event {
            Event::Appeared { node, session, run, label, ours } => {
                if self.may_log_of(now, node) {
                    tracing::info!(%node, label, "another node is there");
                }
                let remote = Remote { session, ours: ours.ip(), provider: None, changes: 0 };
                self.nodes.insert(node, remote);
                let is_there = |node: &NodeIdentity| self.nodes.contains_key(node);
                self.known.is_called(node, label, is_there);
                if self.known.returns(node, run, is_there) {
                    self.renew_connections(node);
                }
                self.plan.appears(now, node);
                self.stir_all();
                self.misfits.forget(node);
                self.tell_provider(node);
                self.unspoken.push((node, session));
                // They tell all that are there, if it is another one.
                self.see_to_workers(now);
                self.speak_unless_opening();
            }
            Event::Interests { node, session, changes } if self.is_session(node, session) => {
                // What was refused may be another matter now.
                self.agenda.stir_all(self.plan.refused_by(node));
                for change in changes {
                    let name = match &change {
                        Change::Set(it) => &it.topic,
                        Change::Gone(topic) => topic,
                    };
                    self.agenda.stir_all(self.names.get(name).copied());
                    match change {
                        Change::Set(it) => {
                            let wants = it.subscribes.then_some(it.settings);
                            self.plan.subscribes(node, &it.topic, wants);
                            self.misfits.says(node, it);
                        }
                        Change::Gone(topic) => {
                            self.plan.subscribes(node, &topic, None);
                            self.misfits.is_done_with(node, &topic);
                        }
                    }
                }
                if self.plan.speaks(now, node) {
                    self.agenda.stir_all(self.plan.topics_of(node));
                }
            }
            Event::Letter { node, session, bytes } if self.is_session(node, session) => {
                self.reads(node, &bytes);
            }
            Event::Vanished { node, session, reason } if self.is_session(node, session) => {
                if self.may_log_of(now, node) {
                    let label = self.known.label(node);
                    tracing::info!(%node, label, %reason, "another node is gone");
                }
                self.nodes.remove(&node);
                self.unspoken.retain(|(other, _)| *other != node);
                self.plan.vanishes(now, node);
                self.agenda.stir_all(self.plan.topics_of(node));
                self.misfits.forget(node);
                for line in self.lines.values_mut() {
                    line.announced.forget(node);
                    if let State::Carried(carried) = &mut line.state {
                        carried.loses(node);
                    }
                }
                self.lose_node(node);
                self.beginnings.retain(|(_, from), _| *from != node);
                let of_node = self.receiving.keys().filter(|(_, from)| *from == node);
                for (number, node) in of_node.copied().collect::<Vec<_>>() {
                    self.stop_receiving(number, node);
                }
            }
            // Of a session that is over.
            Event::Interests { .. } | Event::Letter { .. } | Event::Vanished { .. } => {}
        }
    }

    fn facts(&self, name: &str) -> Option<&Facts> {
        self.lines.get(self.names.get(name)?).map(|line| &line.facts)
    }

    /// Topics here, or what other nodes have to do with them, may have changed.
    fn look_for_misfits(&mut self) {
        let Self { lines, names, misfits, known, .. } = self;
        misfits.look(|name| lines.get(names.get(name)?)?.here(), |node| known.label(node));
    }

    /// Something has changed that all topics have to do with.
    fn stir_all(&mut self) {
        self.agenda.stir_all(self.lines.keys().copied());
    }

    /// Brings all up to date that there is something to do for.
    fn update(&mut self, now: Instant) {
        for number in self.agenda.take(now, &self.lines) {
            self.look_at(now, number);
        }
    }
}

impl Drop for Carrier {
    fn drop(&mut self) {
        // Sources and sinks go first: they use names of this service.
        self.workers = None;
        if let Some(opening) = self.opening.take() {
            opening.end();
        }
        for farewell in self.farewells.drain(..) {
            if farewell.join().is_err() {
                tracing::error!("a thread that ended workers panicked");
            }
        }
    }
}
