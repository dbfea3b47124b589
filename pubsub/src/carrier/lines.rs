//! How far it is with each topic that may go to other nodes, and the next step to where the
//! [plan](super::plan) wants it to be.
//!
//! What is to be done is seen each time from what there is: what the plan says, what was done so
//! far, and what lies in shared memory, where an earlier service may have left it at any point.
//! A step that cannot be done now is seen to be missing the next time.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use ipc::{Caller, Participant};

use super::beginnings::Beginning;
use super::known::Known;
use super::misfits::Here;
use super::plan::{Local, Plan, Standing};
use super::published::Announced;
use super::rest::Rest;
use super::source::{Delivered, TopicSource};
use super::{Carrier, Facts, Household, LOOK, key};
use crate::bridge::Command;
use crate::bridge::{TopicFacts, TopicOptions};
use crate::error::Result;
use crate::peers::NodeIdentity;
use crate::pool::Pool;
use crate::settings::Reliability;
use crate::topic::Topic;

/// How long to wait until what failed is tried again.
const RESTS: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(60));

/// A topic.
pub(super) struct Line {
    pub(super) facts: Facts,
    /// The service does not have it any more.
    pub(super) is_gone: bool,
    pub(super) state: State,
    /// How far its destinations are.
    delivered: Arc<Delivered>,
    /// The last numbers of publishers that its destinations were told.
    pub(super) announced: Announced,
    /// It failed, and is tried again then.
    pub(super) rest: Option<Rest>,
    /// What failed is not to be carried meanwhile: who publishes must not wait for it.
    pub(super) is_given_up: bool,
    /// And its destinations still have to be given up.
    is_owed: bool,
    has_complained: bool,
}

pub(super) enum State {
    /// Nothing is kept for other nodes.
    None,
    /// Something may be kept for them, by an earlier service or by a source that has ended.
    Left,
    Carried(Carried),
    /// Its source may still be at work. Whoever subscribes in the role's name next must not lose
    /// that to the one before.
    Ending(Ending),
}

/// A topic whose messages a worker has.
pub(super) struct Carried {
    /// Nothing leaves before it is open.
    gate: Arc<AtomicBool>,
    /// As long as the source lives.
    source: Weak<AtomicBool>,
    /// The destinations that the worker knows, and whether it was told to connect to them.
    told: BTreeMap<NodeIdentity, bool>,
    /// What was published before anything was kept.
    begins: Beginning,
}

impl Carried {
    /// A node vanished: it is to be connected to anew.
    pub(super) fn loses(&mut self, node: NodeIdentity) {
        self.told.entry(node).and_modify(|is_connected| *is_connected = false);
    }
}

pub(super) struct Ending {
    source: Weak<AtomicBool>,
    /// The next source goes on where this one stops.
    keeps: bool,
}

impl Line {
    /// What the topic is like here, as long as it is.
    pub(super) fn here(&self) -> Option<Here<'_>> {
        let Facts { topic, publishes, subscribes, .. } = &self.facts;
        let (settings, publishes, subscribes) = (topic.settings(), *publishes, *subscribes);
        (!self.is_gone).then_some(Here { settings, publishes, subscribes })
    }

    /// A topic that may have been carried by an earlier service.
    pub(super) fn new(facts: Facts) -> Self {
        Self {
            facts,
            is_gone: false,
            state: State::Left,
            delivered: Arc::default(),
            announced: Announced::default(),
            rest: None,
            is_given_up: false,
            is_owed: false,
            has_complained: false,
        }
    }

    pub(super) fn is_to_be_planned(&self, now: Instant) -> bool {
        let rests = self.rest.is_some_and(|rest| !rest.is_over(now));
        let is_given_up = self.is_given_up && (rests || self.is_owed);
        !self.is_gone && !is_given_up
    }

    pub(super) fn is_carried(&self) -> bool {
        matches!(self.state, State::Carried(_))
    }

    /// Has somebody something to take of it yet?
    pub(super) fn has_backlog(&self) -> bool {
        !matches!(self.state, State::None) && has_backlog(&self.facts.topic)
    }

    /// Is something of it owed to other nodes, or still being ended?
    pub(super) fn holds(&self) -> bool {
        match &self.state {
            State::None => false,
            State::Left => is_owed(&self.facts.topic),
            State::Carried(_) => has_backlog(&self.facts.topic),
            State::Ending(_) => true,
        }
    }

    /// Its source has ended, or ends, together with its worker: another one is to go on with it.
    pub(super) fn loses_its_worker(&mut self) {
        match &mut self.state {
            State::Carried(Carried { source, .. }) => {
                let source = Weak::clone(source);
                self.state = State::Ending(Ending { source, keeps: true });
            }
            State::Ending(_) | State::None | State::Left => {}
        }
    }

    /// The worker could not go on with it, and has ended it.
    pub(super) fn fails(&mut self, now: Instant) {
        if let State::Carried(Carried { source, .. }) = &self.state {
            let source = Weak::clone(source);
            self.state = State::Ending(Ending { source, keeps: false });
            (self.is_given_up, self.is_owed) = (true, true);
            self.rests(now);
        }
    }

    fn rests(&mut self, now: Instant) {
        self.rest = Some(Rest::after(self.rest, now, RESTS));
    }

    /// Notes its destinations for the next service, before anything is kept for them.
    fn note(&mut self, wanted: &BTreeMap<NodeIdentity, Standing>) {
        let topic = &self.facts.topic;
        let noted: Vec<_> = topic.destinations().into_iter().map(NodeIdentity).collect();
        let mut new = wanted.keys().filter(|node| !noted.contains(node));
        let is_noted = new.all(|node| topic.note_destination(&node.0));
        if !is_noted && !std::mem::replace(&mut self.has_complained, true) {
            tracing::warn!(
                topic = topic.name(),
                "more nodes want a topic than can be noted: some may miss messages if this \
                 service ends"
            );
        }
    }

    /// Forgets who is no destination any more: who does not want the topic, and who is given up and
    /// misses what it did not get.
    fn part_with_others(
        &mut self,
        plan: &Plan,
        (household, known): (&Household, &mut Known),
        wanted: &BTreeMap<NodeIdentity, Standing>,
    ) -> Result<()> {
        self.part_with_the_halted(household, known)?;
        let topic = &self.facts.topic;
        topic.finish_giving_up();
        let noted = topic.destinations().into_iter().map(NodeIdentity);
        let others: Vec<_> = noted.filter(|node| !wanted.contains_key(node)).collect();
        let (done, given_up): (Vec<_>, Vec<_>) = others
            .into_iter()
            .partition(|node| plan.is_done_with(topic.name(), topic.settings(), *node));
        for node in done {
            topic.forget_destination(&node.0);
            self.delivered.forget(&node.0);
        }
        if !given_up.is_empty() && wanted.is_empty() {
            // What is published from now on is for nobody elsewhere.
            topic.halt(&household.caller(), household.role)?;
        }
        for node in given_up {
            give_up(topic, household.role, (node, known), self.delivered.to(&node.0));
            self.delivered.forget(&node.0);
        }
        self.is_owed = false;
        Ok(())
    }

    /// A service died between halting and letting go of what was kept: nothing can go on from there.
    /// Whom it had still to give up misses what was kept, also one that is there again. That is before
    /// any other one is noted, and what is kept is let go of with it: so nothing is counted twice, and
    /// nothing as missed by one that came later.
    fn part_with_the_halted(&mut self, household: &Household, known: &mut Known) -> Result<()> {
        let (topic, role) = (&self.facts.topic, household.role);
        let is_halted = matches!(self.state, State::Left)
            && topic.here().seats_of(role).next().is_some()
            && !topic.here().seats().any(|seat| seat.who() == Some(role));
        if is_halted {
            topic.finish_giving_up();
            for node in topic.destinations() {
                give_up(topic, role, (NodeIdentity(node), &mut *known), 0);
            }
            keep_no_more(topic, &self.facts.here, &household.caller(), role)?;
        }
        Ok(())
    }

    /// When there is something to do at the latest, of which nobody tells.
    pub(super) fn deadline(&self, now: Instant, look: Duration) -> Option<Instant> {
        let rest = self.rest.filter(|rest| !rest.is_over(now)).map(|rest| rest.until());
        match &self.state {
            State::Ending(_) => Some(now + look),
            State::None | State::Left => rest,
            // What nobody publishes to any more, and is still owed.
            State::Carried(_) if !self.facts.publishes && self.has_backlog() => Some(now + look),
            State::Carried(_) => None,
        }
    }
}

/// A node is no destination of a topic any more, and has it only up to a position. Counts what it
/// misses, and says so.
fn give_up(topic: &Topic, role: Participant, (node, known): (NodeIdentity, &mut Known), from: u64) {
    let messages = topic.give_up(&node.0, role, from);
    let (number, topic, label) = (topic.number(), topic.name(), known.label(node));
    if messages == 0 {
        tracing::debug!(topic, %node, "a node is no destination any more: it misses nothing");
    } else {
        tracing::warn!(
            topic, %node, label, messages,
            "a node was given up: it misses messages of a topic, which nobody keeps for it any more"
        );
        known.gives_up(number, node, messages);
    }
}

/// The seats of those that carry it.
fn seats(topic: &Topic) -> impl Iterator<Item = ipc::Seat> {
    topic.here().seats().filter(|seat| seat.who().is_some_and(Participant::is_role))
}

pub(super) fn has_backlog(topic: &Topic) -> bool {
    !is_delivered(topic, topic.here().position())
}

/// Was all before a position delivered to other nodes, or given up?
pub(super) fn is_delivered(topic: &Topic, position: u64) -> bool {
    seats(topic).all(|seat| topic.here().oldest_unreleased(seat) >= position)
}

/// Are messages of a topic kept for other nodes? Also if nobody carries it at the moment.
pub(crate) fn is_owed(topic: &Topic) -> bool {
    !topic.destinations().is_empty() && has_backlog(topic)
}

/// Lets go of all that is kept of a topic for other nodes, by a service that cannot carry it there.
/// Nobody else is carrying it. May be done again, if it was cut short or has failed.
pub(crate) fn let_go(
    topic: &Topic,
    here: &Pool,
    caller: &Caller<'_>,
    role: Participant,
) -> Result<bool> {
    topic.finish_giving_up();
    let destinations = topic.destinations();
    if !destinations.is_empty() {
        topic.halt(caller, role)?;
        // Nobody was met who could be called anything.
        let mut known = Known::default();
        let nodes = destinations.iter().copied().map(NodeIdentity);
        nodes.for_each(|node| give_up(topic, role, (node, &mut known), 0));
    }
    Ok(keep_no_more(topic, here, caller, role)? || !destinations.is_empty())
}

/// Lets go of what is kept of a topic for nodes that were given up, or are done with it.
fn keep_no_more(
    topic: &Topic,
    here: &Pool,
    caller: &Caller<'_>,
    role: Participant,
) -> Result<bool> {
    let is_kept = topic.here().seats_of(role).next().is_some();
    if !is_kept && !topic.is_carried() {
        return Ok(false);
    }
    topic.set_carried(false);
    topic.stop_carrying(caller, role, here)?;
    Ok(true)
}

impl Carrier {
    /// Looks at a topic, and brings it to where the plan wants it to be.
    pub(super) fn look_at(&mut self, now: Instant, number: u32) {
        let Some(mut line) = self.lines.remove(&number) else {
            return self.agenda.forget(number);
        };
        #[cfg(test)]
        {
            self.looks += 1;
        }
        self.tell_of_the_dead(&line.facts.topic);
        if line.is_to_be_planned(now) {
            let facts = &line.facts;
            let local = Local {
                number,
                settings: *facts.topic.settings(),
                has_messages: facts.publishes || line.has_backlog(),
                noted: facts.topic.destinations().into_iter().map(NodeIdentity).collect(),
            };
            self.plan.update(now, facts.topic.name(), &local);
        } else {
            self.plan.forget(number);
        }
        let wanted: BTreeMap<_, _> = self.plan.destinations(number).collect();
        if let Err(error) =
            line.part_with_others(&self.plan, (&self.household, &mut self.known), &wanted)
        {
            // It stays one: nothing that it is owed may be let go of before it is counted.
            tracing::debug!(%error, "cannot give up a node yet");
            self.agenda.set_time(number, Some(now + LOOK));
            self.lines.insert(number, line);
            return;
        }
        line.note(&wanted);
        while self.step(now, number, &mut line, &wanted) {}
        self.tell_published(&mut line, Vec::new());
        if line.is_gone && matches!(line.state, State::None) {
            self.known.forget_topic(number);
            return self.agenda.forget(number);
        }
        let deadline = line.deadline(now, LOOK);
        self.agenda
            .set_time(number, deadline.into_iter().chain(self.plan.deadline(now, number)).min());
        self.lines.insert(number, line);
    }

    /// The next step of a topic. True if it was done, so that there may be one more.
    fn step(
        &mut self,
        now: Instant,
        number: u32,
        line: &mut Line,
        wanted: &BTreeMap<NodeIdentity, Standing>,
    ) -> bool {
        match &mut line.state {
            State::None if wanted.is_empty() => false,
            State::Left if wanted.is_empty() => self.clear(line),
            State::None | State::Left => self.carry(now, number, line),
            State::Carried(carried) if wanted.is_empty() => {
                let source = Weak::clone(&carried.source);
                line.state = State::Ending(Ending { source, keeps: false });
                line.facts.topic.set_carried(false);
                self.ear.ignore(number);
                self.tell(number, |worker| worker.tell(Command::StopSending(key(number))));
                true
            }
            State::Carried(carried) => {
                let is_kept = line.facts.topic.settings().reliability == Reliability::Reliable;
                let topic = &line.facts.topic;
                self.tell_destinations(topic, carried, wanted, is_kept);
                false
            }
            State::Ending(ending) => {
                ending.keeps &= !wanted.is_empty();
                if ending.source.strong_count() > 0 {
                    return false;
                }
                if ending.keeps {
                    line.state = State::Left;
                    return true;
                }
                self.clear(line)
            }
        }
    }

    /// Nothing of a topic is to be kept, and nobody is at it.
    fn clear(&mut self, line: &mut Line) -> bool {
        let topic = &line.facts.topic;
        let household = &self.household;
        match keep_no_more(topic, &line.facts.here, &household.caller(), household.role) {
            Ok(_) => {
                line.state = State::None;
                true
            }
            Err(error) => {
                tracing::debug!(%error, "cannot stop carrying a topic yet");
                self.agenda.stir(topic.number());
                false
            }
        }
    }

    /// Keeps a topic's messages for other nodes from now on.
    fn carry(&mut self, now: Instant, number: u32, line: &mut Line) -> bool {
        let Some(workers) = &mut self.workers else { return false };
        if line.rest.is_some_and(|rest| !rest.is_over(now)) {
            return false;
        }
        let (topic, gate) = (&line.facts.topic, Arc::new(AtomicBool::new(false)));
        let settings = topic.settings();
        let is_kept = settings.reliability == Reliability::Reliable;
        // Before anything is kept: what is published meanwhile is missing there.
        let begins = Beginning::of(topic);
        // Held by the source alone: when it is gone the source is.
        let (source, made) = {
            let alive = Arc::new(AtomicBool::new(true));
            let source = Arc::downgrade(&alive);
            let facts = (topic, &line.facts.here);
            let household = &self.household;
            (source, TopicSource::new(household, facts, &line.delivered, &gate, alive))
        };
        let options = TopicOptions {
            facts: TopicFacts {
                number: u64::from(number),
                largest: settings.largest,
                depth: settings.depth,
            },
            keep: (!is_kept).then_some(settings.depth as usize),
        };
        workers.place(key(number), settings.largest);
        let sent = made.and_then(|source| {
            workers.of(key(number)).send_topic(key(number), options, Box::new(source))
        });
        match sent {
            Ok(announcer) => {
                tracing::debug!(topic = topic.name(), "carried");
                topic.set_carried(true);
                self.ear.listen(topic, announcer);
                let told = BTreeMap::new();
                line.state = State::Carried(Carried { gate, source, told, begins });
                (line.is_given_up, line.has_complained) = (false, false);
                true
            }
            Err(error) => {
                if !std::mem::replace(&mut line.has_complained, true) {
                    let topic = topic.name();
                    tracing::error!(%error, topic, "a topic's messages do not go to other nodes");
                }
                // It may have begun: that is gone on with, or let go of.
                line.state = State::Left;
                line.rests(now);
                false
            }
        }
    }

    fn tell_destinations(
        &mut self,
        topic: &Topic,
        carried: &mut Carried,
        wanted: &BTreeMap<NodeIdentity, Standing>,
        is_kept: bool,
    ) {
        let number = topic.number();
        // From where on it is for those that are added now.
        let mut begins = carried.told.is_empty().then(|| carried.begins.clone());
        // Who is there and idle costs nothing yet. But as soon as something leaves, it has to go to
        // all.
        let is_open = carried.gate.load(Ordering::Acquire) || !is_kept;
        let mut has_new = false;
        for (node, standing) in wanted {
            let connects = standing.is_sending();
            let is_to_be_told = match carried.told.get(node) {
                None => is_open || *standing != Standing::Idle,
                Some(is_connected) => connects && !is_connected,
            };
            if is_to_be_told {
                if !carried.told.contains_key(node) {
                    let begins = begins.get_or_insert_with(|| Beginning::of(topic));
                    self.tell_beginning(*node, topic, begins);
                }
                let add =
                    |worker: &crate::bridge::Worker| worker.tell(Command::Add(key(number), *node));
                self.tell(number, add);
                has_new = true;
                carried.told.insert(*node, connects);
            } else if !connects {
                carried.loses(*node);
            }
        }
        let others: Vec<_> =
            carried.told.keys().filter(|node| !wanted.contains_key(node)).copied().collect();
        for node in others {
            self.tell(number, |worker| worker.tell(Command::Remove(key(number), node)));
            carried.told.remove(&node);
        }
        // Those that are owed something are all known to the worker: it may begin.
        if !is_kept || wanted.values().any(|standing| standing.is_sending()) {
            has_new |= !carried.gate.swap(true, Ordering::AcqRel);
        }
        if has_new {
            self.ear.repeat(number);
        }
    }
}
